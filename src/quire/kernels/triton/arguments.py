"""What travels together into a kernel: pointers with their strides, and the constants it is compiled for.

Members that are None are absent: the compiler removes them and what depends on them.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """Which tokens: the batch."""

    page_table: Any
    table_row: Any
    """Distance between two rows of the table."""
    table_step: Any
    """Distance between two columns of it."""
    table_width: Any
    kv_lens: Any
    kv_lens_step: Any
    q_starts: Any
    q_starts_step: Any
    causal: Any
    """One bool a row, or None."""
    causal_step: Any
    seqs: Any
    tokens: Any
    short: Any
    """Rows up to that many new tokens are short: their keys are split over programs."""


class Query(NamedTuple):
    """`[tokens, q_heads, head_dim]`, and what balanced queries were divided by, `[tokens, q_heads]`."""

    at: Any
    token: Any
    head: Any
    dim: Any
    exponents: Any


class Cache(NamedTuple):
    """K and V pages, and their scales if they are quantised; strides are constants."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    pages: Any


class New(NamedTuple):
    """New keys and values `[tokens, kv_heads, dim]`, None in full form."""

    k: Any
    k_token: Any
    k_head: Any
    k_dim: Any
    v: Any
    v_token: Any
    v_head: Any
    v_dim: Any


class Features(NamedTuple):
    """What a layer asks for beyond softmax(q k) v."""

    scale: Any
    """Multiplies q·k, in units of log 2, never negative."""
    softcap: Any
    """The cap over |scale|'s own units: see `weigh`."""
    alibi: Any
    alibi_step: Any
    sinks: Any
    sinks_step: Any
    mask: Any
    mask_token: Any
    mask_column: Any
    positions: Any
    positions_step: Any
    q_scale: Any
    out_scale: Any


class Out(NamedTuple):
    """`[tokens, q_heads, v_head_dim]`, and the LSE `[tokens, q_heads]` or None."""

    at: Any
    token: Any
    head: Any
    dim: Any
    lse: Any
    lse_token: Any
    lse_head: Any
    zero_padding: Any
    """1 if rows that belong to no sequence become zero."""


class Workspace(NamedTuple):
    """Where programs store partial results of units that are split: two places a share and row, `[rows, programs, 2]`. What
    `combine` adds up of one row so lies at distances that the compiler knows, although it does not know the number of rows.

    One piece of memory: weighted values `[.., v width]`, then the largest logit `[..]`, then the sum of weights `[..]`, in fp32;
    then a header for each share, int32 `[programs, 5]`."""

    at: Any
    programs: Any
    extras: Any
    """Programs, the last, that take a unit each if there are many."""
    mains: Any
    """The others, of each head; 1 at least."""
    many_units: Any
    """How many units a program make many."""
    beside: Any
    """1 if the kernel that is launched next may run beside this one from the start."""


class Geometry(NamedTuple):
    """A tile of short rows as numbers, for `combine`, which is compiled once for all of them. See `Tile`."""

    rows: Any
    together: Any
    tokens: Any
    heads: Any


class Tile(NamedTuple):
    """How much one program computes at a time."""

    ROWS: int
    """Query rows: tokens times heads of a group, times key heads."""
    KEYS: int
    """Keys, those of each key head counted."""
    STAGES: int
    TOGETHER: int
    """Key heads in one tile. They lie side by side, and a tile of few rows has room for their queries: it then takes fewer keys of
    more heads, and units are fewer and longer. No query sees another head's keys."""
    STEP: int
    """Keys of each of them: how far a tile reaches."""
    TOKENS: int
    """Query tokens whose rows fit: a token has a row for each head of its group."""
    HEADS: int
    """Units over the same queries: key heads, fewer if some are together, more if a group is larger than a tile."""
    FEW: bool
    """A tile of few rows spends its time on loads: it looks up pages one tile ahead, and meets keys that only some of its queries
    see in one loop with all others. A tile of many rows spends it on products, and has no registers to spare."""

    @classmethod
    def of(cls, rows: int, keys: int, stages: int, few: bool, group: int, kv_heads: int, together: int = 1) -> Tile:
        tokens = max(1, rows // (group * together))
        heads = kv_heads // together * -(-group // rows)
        return cls(rows, keys, stages, together, keys // together, tokens, heads, few)


class Constants(NamedTuple):
    """What a kernel is compiled for."""

    KV_HEADS: int
    GROUP: int
    HEAD_DIM: int
    V_DIM: int
    K_WIDTH: int
    """head_dim as a tile is wide: a power of two, 16 at least."""
    V_WIDTH: int
    PAGE_SIZE: int
    K_STEPS: tuple[int, ...]
    """Strides of [page, head, slot/, slot%, dim/, dim%]."""
    K_SLOTS: int
    """The length of slot%."""
    K_DIMS: int
    """The length of dim%."""
    V_STEPS: tuple[int, ...]
    V_SLOTS: int
    V_DIMS: int
    FAR: bool
    """Whether some element of K or V is 2^31 elements or more away from the first: offsets then take 64 bits."""
    BYTES: bool
    """Whether the cache stores an element in a byte."""
    FORMAT: str
    HARDWARE: bool
    """Whether the target converts e4m3fn itself."""
    K_SCALE_STEPS: tuple[int, ...] | None
    """(page, slot, head), 0 where one scale serves all; None without scales."""
    V_SCALE_STEPS: tuple[int, ...] | None
    PER_KEY: bool
    """Whether keys have scales of their own, or those from pages have one and new ones none."""
    DOT: str
    """The type in which the two products are computed: fp16, bf16 or fp32."""
    BALANCE: str | None
    """Where queries are brought near 1 by a power of two before they become fp16: 'here', 'before' (by `balance`), or nowhere."""
    NEGATE: bool
    """Whether the scale is negative: queries change sign, so that the largest product is the largest logit."""
    CAUSAL: bool | None
    """None: `Rows.causal` says it, row by row."""
    NEW: bool
    """Whether new tokens are given beside the cache."""
    TREE: bool
    LEFT: int | None
    RIGHT: int | None
    CONTEXT_FROM: int
    """Rows with at least that many new tokens take them from `New`."""
    FEWEST: int
    """Only rows with FEWEST to MOST new tokens are computed; others are left as they are."""
    MOST: int
    SHORT: int
    """The least that `Rows.short` can be."""
    LEAST: int
    """The least work that is worth a program, in key tiles."""
    OPENING: int
    """What opening a unit costs, in key tiles."""
    TAIL: bool
    """Whether the last units may be scheduled dynamically, on `Workspace.extras` programs more."""
    INVARIANT: bool
    """No unit is split: its bits then follow from itself alone."""
    Q_FORMAT: str
    """The queries' format if they are fp8, else 'float'."""
    OUT: str
    """The output's format if it is fp8, else 'float'."""
    OUT_NUMBER: bool
    """Whether `Features.out_scale` is a number and not a pointer."""
    SCAN: int
    """Rows of the batch that are looked at at once."""
    WIDE: bool
    """Whether the work of a batch, in tiles, may exceed 31 bits."""
    UNIFORM: bool
    """Whether the compiler must be told what all threads agree on."""
    EARLY: bool
    """Whether `combine` may be launched before `attend` has ended: it waits for it on the card."""


class Finish(NamedTuple):
    """What `combine` is compiled for: those of the constants that the end of a unit depends on."""

    KV_HEADS: int
    GROUP: int
    V_DIM: int
    V_WIDTH: int
    V_SCALE_STEPS: tuple[int, ...] | None
    PER_KEY: bool
    OUT: str
    OUT_NUMBER: bool
    EARLY: bool

    @classmethod
    def of(cls, constants: Constants) -> Finish:
        return cls(*(getattr(constants, name) for name in cls._fields))


class Balance(NamedTuple):
    """What `balance` is compiled for."""

    KV_HEADS: int
    GROUP: int
    HEAD_DIM: int
    K_WIDTH: int

    @classmethod
    def of(cls, constants: Constants) -> Balance:
        return cls(*(getattr(constants, name) for name in cls._fields))
