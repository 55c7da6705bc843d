"""FlashInfer's batch decode on Quire, by FlashInfer's own trace-apply. Its wrappers need a GPU: without one, this only writes the
files with which any program that calls FlashInfer gets Quire."""

import tempfile
from pathlib import Path

import torch

from quire.integrations.flashinfer import Sizes, enable, write

SIZES = Sizes(q_heads=32, kv_heads=8, head_dim=128, page_size=16)

folder = Path(tempfile.mkdtemp())
for path in write(folder, SIZES):  # or: python -m quire.integrations.flashinfer DIR --q-heads 32 ...
    print(path.relative_to(folder))
print("to use them: FLASHINFER_TRACE_APPLY=1 FLASHINFER_TRACE_APPLY_PATH=DIR python your_program.py")

if torch.cuda.is_available():
    import flashinfer

    enable(**SIZES._asdict())  # the line that changes
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "NHD")
    index = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([0, 2, 3], [4, 1, 6], [9, 16]))
    wrapper.plan(*index, *SIZES, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    pages = torch.randn(2, 8, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    out = wrapper.run(torch.randn(2, 32, 128, dtype=torch.bfloat16, device="cuda"), (pages[0], pages[1]))
    print(out.shape, flashinfer.trace_apply.stats())
