"""The contract between a caller and every kernel: an ordered tuple of rules, which is the specification.

`docs/contract.md` is generated from it. Ids are stable; new rules go to the end.
"""

from __future__ import annotations

from quire.contract import static, values
from quire.contract.rule import Rule

CONTRACT: tuple[Rule, ...] = (
    Rule(
        "dont-care",
        "A slot, page, table entry, scale or padding row that is not required never influences the output, even if it "
        "holds NaN, Inf, -1 or a stale id. Required are the slots that some query of the sequence can see; pages and "
        "table entries wholly left of the window, or outside of all spans, are not, nor those that a selection leaves out. "
        "Nothing of a sequence without new tokens is read, including its page-table entries.",
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
        "Index tensors are int32 or int64, each read in its own type, never reinterpreted; any other type is rejected, and the "
        "message names the argument.",
        binds="caller and kernel",
        static=(static.index_types,),
        proof="tests/test_attend.py",
    ),
    Rule(
        "table",
        "The page table covers the required pages, and their ids are in [0, pages). In host memory this is checked for "
        "every batch, and again after torch has changed one of its tensors. No kernel uses an id or a length that is "
        "out of range: the output of that sequence is NaN on a GPU, and in host memory after a change that torch did not see "
        "(through a NumPy alias); `check` names the entry.",
        binds="caller and kernel",
        values=(values.table,),
        proof="tests/contract/test_bad_input.py",
    ),
    Rule(
        "lengths",
        "`q_starts` starts with 0, is non-decreasing, and its last entry is at most the number of rows of q. Later rows are "
        "padding: they are not read, and their output and slots are not written. `kv_lens` includes the new tokens, so "
        "`q_len <= kv_len` for every sequence, except in full form in a non-causal call or one with spans. A query that sees "
        "no key gives zeros and an LSE of -inf, or of the sink. The length of a sequence without new tokens is not read. "
        "`max_q_len` and `max_kv_len` are hints: one that is too low is reported and does not change the result.",
        binds="caller",
        values=(values.starts, values.lengths, values.hints),
    ),
    Rule(
        "ownership",
        "No slot is written twice in one call, slots are inside the cache or -1, and a page that several sequences hold is "
        "not written. The new keys and values do not share memory with the cache. With a ledger, a slot is written once each "
        "time it is allocated.",
        binds="caller",
        static=(static.own_memory,),
        values=(values.slots, values.written_once),
    ),
    Rule(
        "output",
        "Every row of `out` that belongs to a sequence is written exactly once. Nothing else is written, including the caches. "
        "`out` shares no memory with another tensor of the call.",
        binds="caller and kernel",
        static=(static.output,),
        proof="tests/test_dont_care.py",
    ),
    Rule(
        "quantisation",
        "A quantised cache stores x / scale, saturating, and reads x * scale. `int4_zp` reads (code - zero point) * scale; the "
        "zero point is in the low four bits of the scale, which do not count as its number. The format is named, never guessed; "
        "a scale is finite and above 0. The scale that `write` computes for a token with a NaN or an infinity is not: `check` "
        "reports it, and the output of queries that see the token is NaN. In context form the new tokens are used as given, "
        "unquantised, so a batch-invariant call over a quantised cache must use full form.",
        binds="caller and kernel",
        static=(static.quantisation,),
        values=(values.scales,),
        proof="tests/test_attend.py",
    ),
    Rule(
        "addressing",
        "Addresses are 64-bit: results are correct for a cache of more than 2^31 elements.",
        binds="kernel",
        proof="tests/test_addressing.py",
    ),
    Rule(
        "capture",
        "A kernel that can be captured into a CUDA graph reads nothing back from the device. A captured graph replays "
        "correctly when lengths, tables and data change in place. No internal buffer is shared between streams.",
        binds="kernel",
        proof="tests/dispatch",
    ),
    Rule(
        "repeatable",
        "The same inputs give the same bits. With `batch_invariant`, the result of a sequence does not depend on the other "
        "sequences, the batch size, the hints or how its prompt was chunked.",
        binds="kernel",
        proof="tests/test_invariance.py",
    ),
    Rule(
        "shapes",
        "q [tokens, q_heads, head_dim], k and v [tokens, kv_heads, dim], out [tokens, q_heads, v_head_dim], page_table "
        "[seqs, pages_per_seq], kv_lens [seqs], q_starts [seqs + 1]; q_heads is a multiple of kv_heads. Any strides are "
        "allowed.",
        binds="caller",
        static=(static.batch_shapes, static.query_shapes, static.key_value_shapes),
    ),
    Rule(
        "devices",
        "Every tensor of a call is on the device of the cache.",
        binds="caller",
        static=(static.one_device,),
    ),
    Rule(
        "numbers",
        "Numeric options are in a range that kernels can compute with in fp32. Numbers and scales are from 2^-100 to 2^100 "
        "(`scale` may also be 0 or negative), ALiBi slopes from -2^64 to 2^64, sinks from -2^100 to 2^100 or infinite. "
        "`Options` rejects numbers out of range; tensors are checked with the call.",
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
    Rule(
        "shards",
        "With `Batch(shard=(rank, ranks, interleave))` the cache holds the keys whose position p satisfies `p // interleave % "
        "ranks == rank`, in order, and the page table has their pages. Lengths, positions, windows, distances and columns of a "
        "tree mask are those of the whole sequence. Tokens of other ranks are neither written nor seen, and their rows of `new` "
        "may hold any value. The results of all ranks, of which one has the sinks, merged by LSE, are the result over all keys.",
        binds="kernel",
        proof="tests/test_shard.py",
    ),
    Rule(
        "rotation",
        "With `rope`, k and q are normalised, rotated and rounded once; k is quantised after that. A token is rotated by its "
        "position in the sequence, or by `positions` (`[tokens]`; `[3, tokens]` with sections), also if it has no slot. A step "
        "with a tree mask needs positions. Positions are in [0, max_positions) of the tables. No kernel reads a table elsewhere: "
        "the rotated q and k of such a token are NaN. `q_out` is q itself or shares no memory with another tensor of the call; "
        "its padding rows are not written.",
        binds="caller and kernel",
        static=(static.rotation,),
        values=(values.rope_positions,),
        proof="tests/test_rope.py",
    ),
    Rule(
        "spans",
        "With `Batch(spans=...)`, integers [tokens, 2], the token in row i of q sees the keys at positions [begin, end) of its "
        "sequence, and none if begin >= end. They replace causality and window, so a call with spans has neither these options nor "
        "`mask`. 0 <= begin and end <= kv_len for a token that sees keys; on a GPU spans are clipped to [0, kv_len). Spans of "
        "padding rows may hold any value.",
        binds="caller and kernel",
        static=(static.spans,),
        values=(values.spans,),
        proof="tests/test_spans.py",
    ),
    Rule(
        "selection",
        "With `Batch(select=...)` a query sees, of the keys that causality and window show, only those that are selected. "
        "`positions [tokens, kv_heads or 1, n]` has positions of keys for each row of q, in [0, kv_len); `columns [seqs, "
        "kv_heads or 1, n]` has columns of the page table for each sequence, of pages that begin before kv_len. -1 is no entry; "
        "an entry occurs once in its row. A selection is used in full form, without a tree mask, spans or a shard. Values are "
        "checked in host memory. On a GPU, and in host memory after a change that torch did not see, an entry out of range is "
        "never used: the output of the queries and heads that read it is NaN; one that occurs twice counts twice.",
        binds="caller and kernel",
        static=(static.selection,),
        values=(values.selection,),
        proof="tests/test_select.py",
    ),
    Rule(
        "prefixes",
        "With `Batch(prefixes=...)` the sequences of a prefix have the same pages in its columns of the page table, and these are "
        "full pages before their new tokens. Sequences without new tokens may have anything, and so may all in a call with a "
        "window, a tree mask, spans, a selection or a shard, which does not use prefixes. The result is that of the batch without "
        "prefixes, up to rounding: whether pages are read once is a choice of the dispatcher. Values are checked in host memory. "
        "On a GPU, and in host memory after a change that torch did not see, the output of a sequence that shares other pages or "
        "new tokens is NaN, or what its own pages give.",
        binds="caller and kernel",
        static=(static.prefixes,),
        values=(values.prefixes,),
        proof="tests/test_prefixes.py",
    ),
    Rule(
        "latent",
        "With `KVCache(v_in_k=n)` the first n elements of a key are its value: there is one tensor of pages, with one format, "
        "and the scales of K are those of V. `write` and `step` take `(k, None)`, with k whole, `[tokens, kv_heads, head_dim]`, or "
        "a pair of its parts, `[tokens, kv_heads, n]` and `[tokens, kv_heads, head_dim - n]` of one type; a scale that `write` "
        "computes for a token is for both parts. Context form takes `new=(k, None)` with k whole. V given beside K is "
        "rejected. `rope` rotates the elements behind the first n, of k and of q; `k_norm`, `[n]`, normalises the first n of k; "
        "`q_norm` is rejected.",
        binds="caller and kernel",
        static=(static.latent,),
        proof="tests/test_mla.py",
    ),
    Rule(
        "hadamard",
        "With `KVCache(hadamard=True)` keys are stored times the matrix `H[i, j] = (-1) ** popcount(i & j) / sqrt(head_dim)`. "
        "`write` and `step` transform k, `attend` and `step` transform q, and `attend` the keys of `new`: in fp32, rounded once to "
        "their type; a key is quantised after that. V is not transformed. The result is that over keys and queries that were not "
        "transformed, up to rounding. K is quantised, and head_dim a power of two; `v_in_k`, `rope` and fp8 queries are rejected.",
        binds="caller and kernel",
        proof="tests/test_hadamard.py",
    ),
)
