"""Which sequences of a batch begin with the same pages: groups, which form trees."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy
import torch

from quire.cache.prefix_search import BEGIN, COUNT, END, FIELDS, FIRST, LEVEL, PrefixArrays, search
from quire.cache.shard import keys_of
from quire.errors import ArgumentError, describe
from quire.keywords import refuse_unknown

if TYPE_CHECKING:
    from quire.batch import Batch


class Prefix(NamedTuple):
    """Sequences that have the same pages in columns [begin, end) of the page table."""

    sequences: tuple[int, ...]
    """Their rows in the page table, in any order."""
    begin: int
    """0, or where the sequences' previous prefix ends."""
    end: int


class Prefixes:
    """Which sequences of a batch have the same pages: `Batch(prefixes=...)`. Kernels that can then read these pages once for all of
    them. `PagePool.step(..., share=True)` makes it for pages that sequences share by `fork` or `match`, and `Prefixes.find` from a
    page table.

    Prefixes form trees: the first prefix of a sequence begins at column 0, each further one where the one before it ends, and
    sequences that share it shared all prefixes before it. They hold only whole pages of tokens before the new ones.

    Args:
        prefixes: For each prefix `(sequences, begin, end)`: two or more rows of the page table, and the columns
            that are equal in them.
        seqs: The number of sequences of the batch.
        device: The device of the batch.

    Raises:
        ArgumentError: The prefixes do not form trees, or a value is not an int in range.

    Example:
        >>> import quire
        >>> pool = quire.PagePool(pages=64, page_size=16)
        >>> prompt = pool.sequence()
        >>> batch = pool.step({prompt: 320})
        >>> answers = [pool.fork(prompt) for _ in range(4)]
        >>> pool.step(dict.fromkeys(answers, 1), share=True).prefixes
        Prefixes(4 sequences x 20 pages)
    """

    __slots__ = ("groups", "members", "chains", "seqs", "sizes", "saved_pages", "most_pages")

    def __init__(
        self, prefixes: Iterable[tuple[Iterable[int], int, int]], seqs: int, device: torch.device | str = "cpu", **unknown: NoReturn
    ):
        if unknown:
            refuse_unknown(Prefixes.__init__, unknown)
        self._hold(_arrays(_checked(prefixes, seqs), seqs), device)

    def _hold(self, arrays: PrefixArrays, device: torch.device | str) -> None:
        groups = arrays.groups
        self.seqs: int = len(arrays.chains)
        """Sequences of the batch."""
        self.groups, self.members, self.chains = (torch.from_numpy(array).to(device) for array in arrays)
        columns = groups[:, END] - groups[:, BEGIN]
        self._measure(tuple(zip(groups[:, COUNT].tolist(), columns.tolist())), int(groups[:, END].max(initial=0)))

    def _measure(self, sizes: tuple[tuple[int, int], ...], most_pages: int) -> None:
        self.sizes: tuple[tuple[int, int], ...] = sizes
        """The number of sequences and of columns of each prefix, as far as they are known on the host. They choose a kernel and
        divide its work; no result depends on them."""
        self.saved_pages: int = sum((sequences - 1) * pages for sequences, pages in sizes)
        """How many reads of pages are saved."""
        self.most_pages: int = most_pages
        """An upper bound of the pages that a sequence shares."""

    @property
    def levels(self) -> int:
        """An upper bound of the prefixes of one sequence."""
        return self.chains.shape[1] - 1

    @property
    def listed(self) -> list[Prefix]:
        """The prefixes, read from the tensors: on a GPU this waits for the device."""
        members = self.members.tolist()
        return [Prefix(tuple(members[f : f + n]), b, e) for f, n, b, e, _ in self.groups.tolist() if n]

    @classmethod
    def find(cls, batch: Batch, page_size: int | None = None) -> Prefixes:
        """Finds the prefixes of a batch in its page table. This reads the batch's index tensors on the host: on a GPU it waits for
        the device.

        Args:
            batch: The batch. Its lengths and page table have to be valid.
            page_size: Slots of a page. Default: that of the batch.

        Raises:
            ArgumentError: No page size is known.

        Example:
            >>> import torch, quire
            >>> batch = quire.Batch(
            ...     page_table=torch.tensor([[7, 3, 5], [7, 3, 2], [7, 6, 1]]),
            ...     kv_lens=torch.tensor([129, 130, 190]),
            ...     q_starts=torch.tensor([0, 1, 2, 3]),
            ...     page_size=64,
            ... )
            >>> batch = batch.with_prefixes(quire.Prefixes.find(batch))
            >>> batch.prefixes.listed
            [Prefix(sequences=(0, 1, 2), begin=0, end=1), Prefix(sequences=(0, 1), begin=1, end=2)]
        """
        page_size = batch.page_size if page_size is None else page_size
        if not isinstance(page_size, int) or isinstance(page_size, bool) or page_size < 1:
            raise ArgumentError("page_size", describe(page_size), "an int of 1 or more: the batch does not know it")
        context = batch.kv_lens.cpu().long() - batch.q_starts.cpu().long().diff()
        keys = keys_of(batch.shard, context.clamp(min=0)).numpy()
        return cls.of_table(batch.page_table.cpu().numpy(), keys, page_size, batch.device)

    @classmethod
    def of_table(cls, table: numpy.ndarray, context: numpy.ndarray, page_size: int, device: torch.device | str = "cpu") -> Prefixes:
        """The prefixes of a page table `[seqs, columns]` in host memory.

        Args:
            table: The page table.
            context: How many keys each sequence has before its new tokens, `[seqs]`.
            page_size: Slots of a page.
            device: The device of the batch.
        """
        made = cls.__new__(cls)
        made._hold(search(table, numpy.minimum(context // page_size, table.shape[1]), page_size), device)
        return made

    @classmethod
    def allocate(
        cls, seqs: int, prefixes: int, members: int, pages: int, levels: int = 1, device: torch.device | str = "cpu"
    ) -> Prefixes:
        """Makes empty buffers of a fixed size, for CUDA graphs. `fill` updates them in place.

        Args:
            seqs, prefixes, levels: The maximum number of sequences, of prefixes, and of prefixes of one sequence.
            members: The maximum sum of the numbers of sequences of all prefixes.
            pages: The maximum number of pages that a sequence shares.
            device: The device of the batch.

        Example:
            >>> import quire
            >>> buffers = quire.Prefixes.allocate(seqs=4, prefixes=2, members=4, pages=32)
            >>> buffers.fill(quire.Prefixes([((0, 1), 0, 20)], seqs=4))
            Prefixes(2 sequences x 20 pages)
        """
        for name, size in (("seqs", seqs), ("prefixes", prefixes), ("members", members), ("pages", pages), ("levels", levels)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise ArgumentError(name, describe(size), "an int of 0 or more")
        made = cls([], 0)
        made.seqs = seqs
        made._measure((), pages)
        made.groups = torch.zeros(prefixes, FIELDS, dtype=torch.int32, device=device)
        made.members = torch.zeros(members, dtype=torch.int32, device=device)
        made.chains = torch.full((seqs, 1 + levels), -1, dtype=torch.int32, device=device)
        made.chains[:, 0] = 0
        return made

    def fill(self, other: Prefixes) -> Prefixes:
        """Copies other prefixes into these buffers; the rest becomes empty.

        Args:
            other: Prefixes of at most as many sequences, no larger than these buffers.

        Raises:
            ArgumentError: They are larger.
        """
        sizes = (
            ("seqs", other.seqs, self.seqs),
            ("prefixes", len(other.groups), len(self.groups)),
            ("members", len(other.members), len(self.members)),
            ("levels", other.levels, self.levels),
            ("pages", other.most_pages, self.most_pages),
        )
        for name, given, most in sizes:
            if given > most:
                raise ArgumentError(name, given, f"at most {most}, as allocated")
        self.groups.zero_()[: len(other.groups)].copy_(other.groups)
        self.members.zero_()[: len(other.members)].copy_(other.members)
        self.chains.fill_(-1)[:, 0] = 0
        self.chains[: other.seqs, : 1 + other.levels].copy_(other.chains)
        self._measure(other.sizes, self.most_pages)
        return self

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """`groups [prefixes, 5]`: where its members begin, how many they are, the columns, its level. `members`: rows of the page
        table, group by group. `chains [seqs, 1 + levels]`: how many columns a sequence shares, and its prefixes in order, -1 after
        the last. All are int32."""
        return {"prefixes.groups": self.groups, "prefixes.members": self.members, "prefixes.chains": self.chains}

    @property
    def numbers(self) -> tuple[Any, ...]:
        """What is known on the host, as `restored` takes it."""
        return self.seqs, self.sizes, self.most_pages

    @classmethod
    def restored(cls, numbers: tuple[Any, ...], named: dict[str, torch.Tensor]) -> Prefixes:
        """Prefixes from their `numbers` and their `tensors`."""
        made = cls.__new__(cls)
        made.seqs, sizes, most_pages = numbers
        made._measure(sizes, most_pages)
        made.groups, made.members, made.chains = (named[f"prefixes.{name}"] for name in ("groups", "members", "chains"))
        return made

    def clone(self) -> Prefixes:
        """A copy with its own tensors."""
        made = Prefixes.__new__(Prefixes)
        made.seqs, made.sizes, made.saved_pages, made.most_pages = self.seqs, self.sizes, self.saved_pages, self.most_pages
        made.groups, made.members, made.chains = self.groups.clone(), self.members.clone(), self.chains.clone()
        return made

    def __repr__(self) -> str:
        if self.groups.device.type != "cpu":
            return f"Prefixes({len(self.groups)} on {self.groups.device})"
        each = [f"{len(sequences)} sequences x {end - begin} pages" for sequences, begin, end in self.listed]
        more = f", and {len(each) - 4} more" if len(each) > 4 else ""
        return f"Prefixes({', '.join(each[:4])}{more})"

    @staticmethod
    def of(given: object, batch: Batch) -> Prefixes | None:
        """The argument of a batch. Raises ArgumentError if it is none."""
        if given is None:
            return None
        if not isinstance(given, Prefixes):
            raise ArgumentError("prefixes", describe(given), "a quire.Prefixes, or None")
        if given.seqs != batch.seqs:
            raise ArgumentError("prefixes", f"prefixes of {given.seqs} sequences", f"those of {batch.seqs}, as the batch has")
        return given


def _checked(given: Any, seqs: int) -> list[Prefix]:
    """The prefixes, those of fewer sequences of a tree after those of more. Raises ArgumentError for wrong values."""
    if not isinstance(seqs, int) or isinstance(seqs, bool) or seqs < 0:
        raise ArgumentError("seqs", describe(seqs), "an int of 0 or more")
    if not isinstance(given, Iterable):
        raise ArgumentError("prefixes", describe(given), "an iterable of (sequences, begin, end)")
    found = []
    for i, one in enumerate(given):
        prefix = _prefix(i, one)
        begin, end = prefix.begin, prefix.end
        if not all(isinstance(x, (int, numpy.integer)) and not isinstance(x, bool) for x in (*prefix.sequences, begin, end)):
            raise ArgumentError(f"prefixes[{i}]", repr(prefix), "(sequences, begin, end) of ints")
        if len(set(prefix.sequences)) < max(2, len(prefix.sequences)):
            raise ArgumentError(f"prefixes[{i}]", f"sequences {prefix.sequences}", "two sequences or more, each once")
        if not all(0 <= seq < seqs for seq in prefix.sequences):
            raise ArgumentError(f"prefixes[{i}]", f"sequences {prefix.sequences}", f"rows of the page table, 0 to {seqs - 1}")
        if not 0 <= begin < end < 2**31:
            raise ArgumentError(f"prefixes[{i}]", f"columns [{begin}, {end})", "0 <= begin < end")
        found.append(prefix)
    return sorted(found, key=lambda prefix: prefix.begin)


def _prefix(i: int, given: Any) -> Prefix:
    """Prefix number i. Raises ArgumentError unless it has three parts, of which the first has parts."""
    try:
        sequences, begin, end = given
        return Prefix(tuple(sequences), begin, end)
    except (TypeError, ValueError):
        raise ArgumentError(f"prefixes[{i}]", describe(given), "(sequences, begin, end), such as ((0, 1), 0, 4)") from None


def _arrays(found: list[Prefix], seqs: int) -> PrefixArrays:
    """The arrays of these prefixes. Raises ArgumentError unless they form trees."""
    chains = _chains(found, seqs)
    groups = numpy.zeros((len(found), FIELDS), dtype=numpy.int32)
    counts = [len(prefix.sequences) for prefix in found]
    if found:
        groups[:, COUNT] = counts
        groups[:, FIRST] = numpy.cumsum(counts) - counts
        groups[:, BEGIN:LEVEL] = [prefix[1:] for prefix in found]
        for i, prefix in enumerate(found):
            groups[i, LEVEL] = int(numpy.flatnonzero(chains[prefix.sequences[0], 1:] == i)[0])
    members = numpy.array([seq for prefix in found for seq in prefix.sequences], dtype=numpy.int32)
    return PrefixArrays(groups, members, chains)


def _chains(found: list[Prefix], seqs: int) -> numpy.ndarray:
    """`Prefixes.chains`. Raises ArgumentError unless the prefixes form trees."""
    chain: list[list[int]] = [[] for _ in range(seqs)]
    covered = [0] * seqs
    for i, (sequences, begin, end) in enumerate(found):
        first = sequences[0]
        for seq in sequences:
            if covered[seq] != begin:
                allowed = f"{covered[seq]}, where the prefix before it ends" if covered[seq] else "0 for the first prefix"
                raise ArgumentError(f"the prefix of columns [{begin}, {end}) of sequence {seq}", f"begin = {begin}", allowed)
            if chain[seq] != chain[first]:
                raise ArgumentError(
                    f"the prefix of columns [{begin}, {end})",
                    f"sequences {first} and {seq}",
                    "sequences that share all columns before",
                )
        for seq in sequences:
            covered[seq] = end
        for seq in sequences[1:]:
            chain[seq].append(i)
        chain[first].append(i)
    levels = max(map(len, chain), default=0)
    made = numpy.full((seqs, 1 + levels), -1, dtype=numpy.int32)
    made[:, 0] = covered
    for row, ids in zip(made, chain):
        row[1 : 1 + len(ids)] = ids
    return made
