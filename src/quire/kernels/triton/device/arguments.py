"""The arguments of the attention kernels: records of pointers with their strides, and the constants that a kernel is compiled for.

The type of a member says what the compiler may assume about it, see `Kind`. A member that is None is absent: the compiler removes
it and the code that depends on it.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, NamedTuple


class Kind(Enum):
    """What the compiler may assume about an argument. Memory is aligned or generic: `Problem.memory`."""

    NUMBER = "a number of 32 bits"
    POINTER = "a pointer to single elements; nothing is assumed about its alignment"
    VECTORS = "a pointer to elements that are read or written in vectors: a multiple of 16 bytes in aligned memory"
    OWNED = "a pointer into memory that the launcher allocates: always a multiple of 16 bytes"
    STRIDE = "a stride of 64 bits"
    UNIT_STRIDE = "1 in aligned memory, where it is a constant; otherwise 64 bits"
    K_STRIDE = "32 bits and a multiple of the unit of K's heads in aligned memory; otherwise 64 bits"
    V_STRIDE = "32 bits and a multiple of the unit of V's heads in aligned memory; otherwise 64 bits"


Number = Annotated[Any, Kind.NUMBER]
Pointer = Annotated[Any, Kind.POINTER]
VectorPointer = Annotated[Any, Kind.VECTORS]
OwnedPointer = Annotated[Any, Kind.OWNED]
Stride = Annotated[Any, Kind.STRIDE]
UnitStride = Annotated[Any, Kind.UNIT_STRIDE]
KStride = Annotated[Any, Kind.K_STRIDE]
VStride = Annotated[Any, Kind.V_STRIDE]


class BatchTensors(NamedTuple):
    """The index tensors of a batch, and its size."""

    page_table: Pointer
    table_row: Stride
    """Stride of the table's rows; a `_step` is the stride of the last axis."""
    table_step: UnitStride
    table_width: Number
    kv_lens: Pointer
    kv_lens_step: UnitStride
    q_starts: Pointer
    q_starts_step: UnitStride
    causal: Pointer
    """One bool per sequence, or None."""
    causal_step: Stride
    seqs: Number
    tokens: Number
    short: Number
    """Sequences with at most so many new tokens are short: their keys are split over programs."""
    wide_rows: Number
    """1 if short sequences take tiles of C.WIDE_ROWS; None in kernels without these."""
    rank: Number
    """This and the next two are the shard, None without one: which keys of a sequence are in the cache."""
    ranks: Number
    interleave: Number
    spans: Pointer
    """The keys [begin, end) that each new token sees, `[tokens, 2]`, or None."""
    spans_token: Stride
    spans_side: Stride
    select: Pointer
    """This and the next four are the selection, None without one: `[tokens or seqs, kv_heads, count]` with its strides, of heads 0
    where they share their entries."""
    select_row: Stride
    select_head: Stride
    select_step: Stride
    select_count: Number
    prefixes: Pointer
    """This and the next nine are the shared prefixes, None without them: `Prefixes.groups`, int32 `[prefixes, 5]`."""
    prefix_count: Number
    members: Pointer
    """`Prefixes.members`."""
    chains: Pointer
    """`Prefixes.chains`, `[seqs, 1 + levels]`."""
    levels: Number
    shared_tokens: Number
    """Sequences with more new tokens are read by themselves."""
    part_keys: Number
    """The keys of a partial result of a prefix: parts begin at multiples of this number."""
    parts: Number
    """How many partial results of a row `parts_at` has memory for."""
    parts_at: OwnedPointer
    """Accumulators `[parts, tokens, q_heads, v width]`, then row maxima and row sums `[parts, tokens, q_heads]`, in fp32."""
    reads_prefixes: Number
    """1 if this launch reads the keys of prefixes, 0 if it reads all other keys."""


class Query(NamedTuple):
    """Queries `[tokens, q_heads, head_dim]`, and the powers of two that balanced queries were divided by, `[tokens, q_heads]`."""

    at: VectorPointer
    token: KStride
    head: KStride
    dim: UnitStride
    exponents: OwnedPointer


class Cache(NamedTuple):
    """K and V pages, and their scales if they are quantised; strides are constants."""

    k: VectorPointer
    v: VectorPointer
    k_scale: Pointer
    v_scale: Pointer
    pages: Number


class New(NamedTuple):
    """New keys and values `[tokens, kv_heads, dim]`, None in full form."""

    k: VectorPointer
    k_token: KStride
    k_head: KStride
    k_dim: UnitStride
    v: VectorPointer
    v_token: VStride
    v_head: VStride
    v_dim: UnitStride


class Out(NamedTuple):
    """`[tokens, q_heads, v_head_dim]`, and the LSE `[tokens, q_heads]` or None."""

    at: VectorPointer
    token: VStride
    head: VStride
    dim: UnitStride
    lse: Pointer
    lse_token: Stride
    lse_head: Stride
    zero_padding: Number
    """1 if rows that belong to no sequence are set to zero."""


class Workspace(NamedTuple):
    """Partial results of units that are split: two places per split and row, `[rows, programs, 2]`. In this order the parts of one
    row have strides that the compiler knows, although it does not know the number of rows.

    One allocation: accumulators `[.., v width]`, row maxima `[..]` and row sums `[..]` in fp32; then a header per split, int32
    `[programs, 6]`."""

    at: OwnedPointer
    programs: Number
    tail_programs: Number
    """The last programs, which take one unit each if there are many units."""
    main_programs: Number
    """The other programs, per head; at least 1."""
    tail_units: Number
    """The number of units per program from which the tail is scheduled dynamically."""
    overlapped: Number
    """1 if the next kernel may run concurrently from the start."""
    rows: Number
    """The rows of partial results that a batch-invariant call has memory for, in the order of its pieces; None in other calls."""


class TileNumbers(NamedTuple):
    """A tile of short sequences as run-time numbers, for `combine_kernel`, which is compiled once for all tiles. See
    `TritonTile`."""

    rows: Number
    heads_per_tile: Number
    tokens: Number
    heads: Number


class TritonTile(NamedTuple):
    """How much one program computes at a time."""

    ROWS: int
    """Query rows: tokens times query heads per key head, times key heads."""
    KEYS: int
    """Keys, counted for each key head."""
    STAGES: int
    HEADS_PER_TILE: int
    """Key heads in one tile. With few query rows a tile takes fewer keys of several heads, which are adjacent in memory, and there
    are fewer and longer units. Keys of other heads are masked."""
    STEP: int
    """Keys per key head: the distance between tiles."""
    TOKENS: int
    """Query tokens per tile: a token has one row for each query head of its group."""
    HEADS: int
    """Units over the same tokens: key heads, fewer if a tile has several, more if a group is larger than a tile."""
    FEW_ROWS: bool
    """A tile of few rows is limited by loads: it loads page ids one tile ahead, and computes masked and unmasked tiles in one loop.
    A tile of many rows is limited by products and registers."""
    PIECE: int
    """Keys of a piece of work: those of one tile or, in a batch-invariant call, of several. Pieces begin at multiples."""

    @classmethod
    def of(
        cls, rows: int, keys: int, stages: int, few: bool, group: int, kv_heads: int, heads_per_tile: int = 1, piece: int = 0
    ) -> TritonTile:
        tokens = max(1, rows // (group * heads_per_tile))
        heads = kv_heads // heads_per_tile * -(-group // rows)
        step = keys // heads_per_tile
        return cls(rows, keys, stages, heads_per_tile, step, tokens, heads, few, piece or step)


class AttendConstants(NamedTuple):
    """What an attention kernel is compiled for."""

    KV_HEADS: int
    GROUP: int
    HEAD_DIM: int
    """Elements of a key or, if V is a part of K, of that part: the others are the rest."""
    V_DIM: int
    K_WIDTH: int
    """The width of a tile of keys: HEAD_DIM rounded up to a power of two, at least 16."""
    V_WIDTH: int
    V_IN_K: bool
    """Whether the tile of keys is that of values, too."""
    REST_DIM: int | None
    """Elements of a key that are not its value, where V is a part of K; None where there are none."""
    REST_WIDTH: int | None
    PAGE_SIZE: int
    K_STEPS: tuple[int, ...]
    """Strides of [page, head, slot/, slot%, dim/, dim%]."""
    K_SLOTS: int
    """The length of slot%."""
    K_DIMS: int
    """The length of dim%, in elements of storage."""
    V_STEPS: tuple[int, ...]
    V_SLOTS: int
    V_DIMS: int
    K_GROUPS: tuple[int, ...] | None
    """Where the scales of groups of K are, `quire.cache.groups.GroupPlaces`; None if the format has none."""
    V_GROUPS: tuple[int, ...] | None
    FAR: bool
    """Whether offsets into K or V need 64 bits."""
    BYTES: bool
    """Whether K or V is stored in bytes."""
    K_FORMAT: str
    K_PACK: int
    """Elements in one element of storage. Eight are in a word of 32 bits, over bytes: strides and K_DIMS count words."""
    V_FORMAT: str
    V_PACK: int
    HARDWARE: bool
    """Whether the target converts fp8 in hardware."""
    K_SCALE_STEPS: tuple[int, ...] | None
    """Strides by page, slot and head, 0 where one scale serves all; None if K is not quantised."""
    V_SCALE_STEPS: tuple[int, ...] | None
    PER_KEY: bool
    """Whether scales are applied key by key: per-token scales, or scaled pages and new keys without a scale."""
    DOT: str
    """The type in which the two products are computed: fp16, bf16 or fp32."""
    BALANCE: str | None
    """Where queries are divided by a power of two before they become fp16: 'here', 'before' (`balance_kernel`), or None."""
    NEGATE: bool
    """Whether the scale is negative: queries are negated, so that the largest product gives the largest logit."""
    CAUSAL: bool | None
    """None: `BatchTensors.causal` has it per sequence."""
    NEW: bool
    """Whether new tokens are passed as arguments."""
    TREE: bool
    SPANS: bool
    """Whether `BatchTensors.spans` says what each new token sees."""
    SELECT: str | None
    """What the batch selects: 'positions' per query, 'columns' per sequence, or None."""
    LEFT: int | None
    RIGHT: int | None
    CONTEXT_FROM: int
    """Sequences with at least that many new tokens take them from `New`."""
    MIN_Q_LEN: int
    """Only sequences with MIN_Q_LEN to MAX_Q_LEN new tokens are computed; others are left as they are."""
    MAX_Q_LEN: int
    SHORT: int
    """The smallest value that `BatchTensors.short` can have."""
    MIN_WORK: int
    """The least work of a program, in pieces."""
    UNIT_OVERHEAD: int
    """The cost of starting a unit, in pieces."""
    TAIL: bool
    """Whether the last units may be scheduled dynamically, by `Workspace.tail_programs` more programs."""
    INVARIANT: bool
    """Every piece of work has a softmax state of its own, and these are merged in order: the bits of a sequence do not depend on
    the batch, whichever programs compute its pieces."""
    Q_FORMAT: str
    """The queries' format if they are fp8, else 'float'."""
    OUT: str
    """The output's format if it is fp8, else 'float'."""
    OUT_NUMBER: bool
    """Whether `Features.out_scale` is a number and not a pointer."""
    SCAN: int
    """Sequences, or columns of the table, that are read at a time."""
    WIDE: bool
    """Whether the work of a batch is counted in 64 bits."""
    UNIFORM: bool
    """Whether the compiler is told of numbers that they are equal in all threads."""
    NVIDIA: bool
    """Whether the target is a GPU of NVIDIA: its compiler must be told which numbers are equal in all threads, and it has an
    instruction for reciprocals."""
    PDL: bool
    """Programmatic dependent launch: the next kernel may be launched before this one has ended, and waits for it on the GPU."""
    SHARED: bool = False
    """Whether keys of shared prefixes are read once for all of their sequences."""
    WIDE_ROWS: TritonTile | None = None
    """Another tile of short sequences, with more rows: of kernels that compute both decodes and longer queries."""


class CombineConstants(NamedTuple):
    """What `combine_kernel` is compiled for: the constants that `finish` and `store` use."""

    KV_HEADS: int
    GROUP: int
    V_DIM: int
    V_WIDTH: int
    V_SCALE_STEPS: tuple[int, ...] | None
    V_GROUPS: tuple[int, ...] | None
    PER_KEY: bool
    OUT: str
    OUT_NUMBER: bool
    PDL: bool
    INVARIANT: bool

    @classmethod
    def of(cls, constants: AttendConstants) -> CombineConstants:
        return cls(*(getattr(constants, name) for name in cls._fields))


class BalanceConstants(NamedTuple):
    """What `balance_kernel` is compiled for."""

    KV_HEADS: int
    GROUP: int
    HEAD_DIM: int
    K_WIDTH: int
    REST_DIM: int | None
    REST_WIDTH: int | None

    @classmethod
    def of(cls, constants: AttendConstants) -> BalanceConstants:
        return cls(*(getattr(constants, name) for name in cls._fields))
