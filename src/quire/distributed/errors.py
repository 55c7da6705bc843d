"""Errors between ranks: a collective that failed or timed out, and arguments that differ between ranks."""

from __future__ import annotations

from quire.errors import QuireError


class CommunicationError(QuireError, RuntimeError):
    """A collective failed, or did not finish within the timeout: a rank has ended, is stopped, or is at another call. The results
    of the call are lost, and the process group cannot be used any more.

    Attributes:
        collective: What was called, such as "all_gather".
        group: The group, in words: its name, its ranks and this one.
        timeout: The timeout in seconds that was set on the group; None if Quire left the group's own.
        seconds: How long this rank waited.

    Example:
        >>> from quire.distributed import CommunicationError
        >>> print(CommunicationError("all_gather", "'cp' of ranks 0, 1 (this is rank 0)", 5.0, 5.003, "Timed out"))
        all_gather: failed after 5.0 s (timeout 5 s) in the group 'cp' of ranks 0, 1 (this is rank 0). A rank has ended, ...
    """

    def __init__(self, collective: str, group: str, timeout: float | None, seconds: float, reason: str):
        self.collective, self.group, self.timeout, self.seconds = collective, group, timeout, seconds
        limit = "the group's own timeout" if timeout is None else f"timeout {timeout:g} s"
        super().__init__(
            f"{collective}: failed after {seconds:.1f} s ({limit}) in the group {group}. A rank has ended, is stopped or is at "
            "another call. The group cannot be used any more: end this process and start all ranks again. torch.distributed "
            f"says: {reason}"
        )


class RankMismatch(QuireError, ValueError):
    """Ranks of a group called the same function with different arguments, or are at different calls. Of tensors and other values
    that are no ints, the message has this rank's; of the other ranks only that they differ.

    Attributes:
        argument: What differs, such as "options.window", or "the call".
        ranks: The ranks that differ from this one, by their number among all ranks, as `torch.distributed.get_rank()` gives it.

    Example:
        >>> from quire.distributed import RankMismatch
        >>> print(RankMismatch("ContextParallel.attend", "tokens", "4", {1: "5"}, "'cp' of ranks 0, 1"))
        ContextParallel.attend: tokens differs between the ranks of 'cp' of ranks 0, 1: given 4 here, 5 at rank 1; allowed: ...
    """

    def __init__(self, caller: str, argument: str, here: str, others: dict[int, str], group: str):
        self.argument, self.ranks = argument, tuple(others)
        there = ", ".join(f"{value} at rank {rank}" for rank, value in others.items())
        super().__init__(
            f"{caller}: {argument} differs between the ranks of {group}: given {here} here, {there}; "
            "allowed: the same on every rank"
        )


class RankFailed(QuireError, RuntimeError):
    """Another rank raised an error in the same call, before results were exchanged. The group can be used further.

    Attributes:
        ranks: The ranks that raised, by their number among all ranks.

    Example:
        >>> from quire.distributed import RankFailed
        >>> print(RankFailed("ContextParallel.attend", (1,), "'cp' of ranks 0, 1"))
        ContextParallel.attend: rank 1 of the group 'cp' of ranks 0, 1 raised an error in this call; nothing was exchanged. ...
    """

    def __init__(self, caller: str, ranks: tuple[int, ...], group: str):
        self.ranks = ranks
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        super().__init__(
            f"{caller}: {names} of the group {group} raised an error in this call; nothing was exchanged. Its message is in the "
            "output of that rank."
        )
