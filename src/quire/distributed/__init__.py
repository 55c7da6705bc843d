"""Attention over several devices and machines, on torch.distributed: tensor parallelism divides heads, context parallelism keys."""

from torch.distributed import is_available

if not is_available():
    raise ImportError("quire.distributed: given a torch that was built without torch.distributed; allowed: a build with it")

from quire.distributed.context_parallel import ContextParallel
from quire.distributed.errors import CommunicationError, RankFailed, RankMismatch
from quire.distributed.tensor_parallel import TensorParallel

__all__ = ["TensorParallel", "ContextParallel", "CommunicationError", "RankMismatch", "RankFailed"]
