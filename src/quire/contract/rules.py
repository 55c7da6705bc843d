"""The contract between a caller and every kernel: an ordered tuple of rules, which is the specification.

`docs/contract.md` is printed from it. Ids are stable; new rules go to the end.
"""

from __future__ import annotations

from quire.contract import static, values
from quire.contract.rule import Rule

CONTRACT: tuple[Rule, ...] = (
    Rule(
        "dont-care",
        "A slot, page, table entry, scale or padding row that is not required never influences the output, even if it "
        "holds NaN, Inf, -1 or a stale id. Required are the slots that some query of the sequence can see; pages and "
        "table entries wholly left of the window are not. Nothing of a sequence without new tokens is read, its table row"
        " included.",
        binds="kernel",
        proof="tests/test_dont_care.py",
    ),
    Rule(
        "residency",
        "Required slots were written for this sequence. In full form the cache holds all tokens of every sequence; in "
        "context form (`new=`) it holds those before the new ones, and the new tokens of every sequence come from `new`. "
        "Checked against the ledger, if the cache keeps one.",
        binds="caller",
        static=(static.copies_applied,),
        values=(values.residency,),
    ),
    Rule(
        "index-types",
        "Index tensors are int32 or int64, each read in its own type, never reinterpreted; any other type is refused by name.",
        binds="caller and kernel",
        static=(static.index_types,),
        proof="tests/test_attend.py",
    ),
    Rule(
        "table",
        "The page table covers the required pages, and their ids lie in [0, pages). In host memory this is checked for "
        "every batch, and again after torch has changed one of its tensors. No kernel follows an id or a length out of "
        "range: the output of its sequence is NaN on a GPU, and in host memory after a change that torch did not see "
        "(through an alias of numpy); `check` names the cell.",
        binds="caller and kernel",
        values=(values.table,),
        proof="tests/contract/test_bad_input.py",
    ),
    Rule(
        "lengths",
        "`q_starts[0]` is 0, it never falls, and its last entry is at most the rows of q: rows beyond are padding, never "
        "read, their output and slots untouched. `kv_lens` counts all tokens, the new ones included, so `q_len <= kv_len`"
        " binds every sequence but those of a non-causal call in full form. A query that sees no key gives zeros and an "
        "LSE of -inf, or of the sink. The length of a sequence without new tokens is not read. The host's maxima are "
        "hints: a low one is reported and never truncates.",
        binds="caller",
        values=(values.starts, values.lengths, values.hints),
    ),
    Rule(
        "ownership",
        "No slot is written twice in one call, slots lie inside the cache or are -1, and a page with several holders is "
        "not written. What is written does not lie in the cache itself. With a ledger, a slot is written once each time it "
        "is handed out.",
        binds="caller",
        static=(static.own_memory,),
        values=(values.slots, values.written_once),
    ),
    Rule(
        "output",
        "Every live row of `out` is written exactly once, nothing else is touched, caches included. `out` has memory of its own.",
        binds="caller and kernel",
        static=(static.output,),
        proof="tests/test_dont_care.py",
    ),
    Rule(
        "quantisation",
        "A quantised cache stores x / scale, saturating, and reads x * scale. The format is named, never guessed; a scale"
        " is finite and above 0. The scale that `write` computes for a token with a NaN or an infinity is not: `check` "
        "reports it, and the rows that see the token are NaN. In context form the new tokens are used as given, "
        "unquantised, so a batch-invariant call"
        " over a quantised cache takes the full form.",
        binds="caller and kernel",
        static=(static.quantisation,),
        values=(values.scales,),
        proof="tests/test_attend.py",
    ),
    Rule(
        "addressing",
        "Addresses are 64-bit: a cache above 2^31 elements is right, not wrapped.",
        binds="kernel",
        proof="tests/test_addressing.py",
    ),
    Rule(
        "capture",
        "A kernel that says it can be captured into a graph reads nothing back from the device, and a captured graph "
        "replays rightly when lengths, tables and data change in place. No hidden buffer is shared between streams.",
        binds="kernel",
        proof="tests/dispatch",
    ),
    Rule(
        "repeatable",
        "Same inputs, same bits. With `batch_invariant`, a row's bits do not depend on its neighbours, the batch size, "
        "the hints or how its prompt was cut.",
        binds="kernel",
        proof="tests/test_invariance.py",
    ),
    Rule(
        "shapes",
        "q [tokens, q_heads, head_dim], k and v [tokens, kv_heads, dim], out [tokens, q_heads, v_head_dim], page_table "
        "[seqs, pages_per_seq], kv_lens [seqs], q_starts [seqs + 1]; q_heads is a multiple of kv_heads. Any strides will "
        "do.",
        binds="caller",
        static=(static.batch_shapes, static.query_shapes, static.key_value_shapes),
    ),
    Rule(
        "devices",
        "Every tensor of a call lives where the cache lives.",
        binds="caller",
        static=(static.one_device,),
    ),
    Rule(
        "numbers",
        "Numbers of options can be computed with in fp32: softcap, scale, q_scale and out_scale lie between 2^-100 and 2^100 "
        "(a scale may also be 0 or negative), ALiBi slopes between -2^64 and 2^64, sinks between -2^100 and 2^100 or are "
        "infinite. What is no tensor is refused by `Options`.",
        binds="caller",
        values=(values.numbers,),
    ),
    Rule(
        "written-scales",
        "Required slots of a quantised cache with scales per tensor or head are read with the scales they were written with. "
        "Checked against the ledger, if the cache keeps one.",
        binds="caller",
        values=(values.written_scales,),
    ),
)
