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
    table_width: Any
    kv_lens: Any
    kv_lens_step: Any
    q_starts: Any
    q_starts_step: Any
    causal: Any
    """One bool a row, or None."""
    seqs: Any
    tokens: Any


class Query(NamedTuple):
    """`[tokens, q_heads, head_dim]`, and what balanced queries were divided by, `[tokens, q_heads]`."""

    at: Any
    token: Any
    head: Any
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
    v: Any
    v_token: Any
    v_head: Any


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
    """`[tokens, q_heads, v_head_dim]`, and the LSE `[tokens, q_heads]`, contiguous, or None."""

    at: Any
    token: Any
    head: Any
    lse: Any


class Room(NamedTuple):
    """Where programs leave what they gathered of a unit that others share: two places a share, `[programs, 2, rows]`.

    One piece of memory: weighted values `[.., v width]`, then the largest logit `[..]`, then the sum of weights `[..]`, in fp32;
    then a note for each share, int32 `[programs, 5]`."""

    at: Any
    programs: Any
    units: Any
    """Where long rows that are cut into units wait to be taken, or None."""


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
    TABLE_STEP: int
    """Distance between two columns of the page table."""
    Q_DIM: int
    """Distance between two elements of a query; likewise for the others."""
    OUT_DIM: int
    NEW_K_DIM: int
    NEW_V_DIM: int
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
    """Rows up to that many new tokens are short: their keys are shared out evenly over programs."""
    LEAST: int
    """The least work that is worth a program, in key tiles."""
    OPENING: int
    """What opening a unit costs, in key tiles."""
    EXTRAS: int
    """Programs, the last, that take a unit each if there are many."""
    MAINS: int
    """The others, of each head."""
    MANY_UNITS: int | None
    """How many a program make many."""
    INVARIANT: bool
    """No unit is shared out: its bits then follow from itself alone."""
    Q_FORMAT: str
    """The queries' format if they are fp8, else 'float'."""
    OUT: str
    """The output's format if it is fp8, else 'float'."""
    OUT_NUMBER: bool
    """Whether `Features.out_scale` is a number and not a pointer."""
    ZERO_PADDING: bool
    SCAN: int
    """Rows of the batch that are looked at at once."""
    MANY: bool
    """Whether the batch has more rows than that."""
    WIDE: bool
    """Whether the work of the batch, in tiles, could exceed 31 bits."""
    UNIFORM: bool
    """Whether the compiler must be told what all threads agree on."""
    EARLY: bool
    """Whether `combine` may be launched before `attend` has ended: it waits for it on the card."""
    BESIDE: bool
    """Whether what is launched next may run beside this from the start."""
