"""Checks of values: index tensors, scales and the ledger. They run after the static checks passed, and never use an invalid
index."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from quire.cache.ledger import LedgerFinding
from quire.contract.call import Call
from quire.contract.picture import row_picture
from quire.contract.rule import Violation
from quire.options import PER_HEAD, RANGE, is_in_range


def starts(call: Call) -> Iterator[Violation]:
    at, rows = call.q_starts, "q" if call.q is not None else "k"
    if int(at[0]) != 0:
        picture = row_picture("q_starts", at, 0)
        yield Violation("lengths", "q_starts[0]", str(int(at[0])), "0: the first sequence starts at row 0", picture=picture)
    for i in ((at < 0) | (at > call.tokens)).nonzero().flatten().tolist():
        if i:
            allowed = f"at most {call.tokens}, the rows of {rows}, and no less than 0"
            picture = row_picture("q_starts", at, i, f"{rows} has {call.tokens} rows")
            yield Violation("lengths", f"q_starts[{i}]", str(int(at[i])), allowed, seq=i - 1, picture=picture)
    for i in (at[1:] < at[:-1]).nonzero().flatten().tolist():
        picture = row_picture("q_starts", at, i + 1, f"falls from {int(at[i])}")
        allowed = f"{int(at[i])} or more: it never falls"
        yield Violation("lengths", f"q_starts[{i + 1}]", str(int(at[i + 1])), allowed, seq=i, picture=picture)


def lengths(call: Call) -> Iterator[Violation]:
    kv, q, bound = call.kv_lens, call.q_lens, call.lens_bound
    for i in ((kv < 0) & call.taken).nonzero().flatten().tolist():
        yield Violation("lengths", f"kv_lens[{i}]", str(int(kv[i])), "0 or more", seq=i, picture=row_picture("kv_lens", kv, i))
    for i in (bound & (q > kv) & (kv >= 0)).nonzero().flatten().tolist():
        why = "they are written to its slots" if call.writes else "they are among its keys"
        note = f"q_len {int(q[i])}: kv_lens counts the new tokens too"
        picture = row_picture("kv_lens", kv, i, note)
        allowed = f"{int(q[i])} or more: the sequence has {int(q[i])} new tokens, and {why}"
        yield Violation("lengths", f"kv_lens[{i}]", str(int(kv[i])), allowed, seq=i, picture=picture)
    mask = call.options.mask
    if call.q is not None and mask is not None and len(q) and int(q.max()) > mask.shape[1]:
        i = int(q.argmax())
        allowed = f"M >= {int(q[i])}, the new tokens of sequence {i}"
        yield Violation("lengths", "mask", f"[tokens, {mask.shape[1]}]", allowed, seq=i)


def spans(call: Call) -> Iterator[Violation]:
    """The keys that a token sees are keys of its sequence."""
    if call.q is None or call.batch.spans is None or not call.lengths_hold:
        return
    begin, end = call.spans[: int(call.q_starts[-1])].unbind(1)
    seq = call.sequence_of_rows(torch.arange(len(begin), device="cpu"))
    bad = call.taken[seq] & (begin < end) & ((begin < 0) | (end > call.kv_lens[seq]))
    for i in bad.nonzero().flatten().tolist():
        kv_len, row = int(call.kv_lens[seq[i]]), call.spans[i]
        allowed = f"[begin, end) within [0, {kv_len}), the keys of sequence {int(seq[i])}; begin >= end for none"
        picture = row_picture(f"spans[{i}]", row, 0 if int(row[0]) < 0 else 1, f"kv_len {kv_len}")
        given = f"[{int(row[0])}, {int(row[1])})"
        yield Violation("spans", f"spans[{i}]", given, allowed, seq=int(seq[i]), token=i, picture=picture)


def hints(call: Call) -> Iterator[Violation]:
    batch = call.batch
    kv_lens = torch.where(call.taken, call.kv_lens, 0)
    for name, hint, lens in (("max_q_len", batch.max_q_len, call.q_lens), ("max_kv_len", batch.max_kv_len, kv_lens)):
        if hint is not None and len(lens) and int(lens.max()) > hint:
            i = int(lens.argmax())
            allowed = f"{int(lens[i])} or more: sequence {i} has as many (only a hint: the result is correct anyway)"
            yield Violation("lengths", name, str(hint), allowed, seq=i, harmless=True)


def selection(call: Call) -> Iterator[Violation]:
    """The entries of a selection exist, each once in its row."""
    select = call.batch.select
    if call.q is None or select is None or not call.lengths_hold:
        return
    entries, seq, limit = call.entries
    what = "a position" if select.kind == "positions" else "a column"
    rows = call.selecting.nonzero().flatten()
    bad = (entries < -1) | (entries >= limit[:, None, None])
    ordered, order = torch.sort(entries, dim=-1, stable=True)
    again = torch.zeros_like(bad)
    again[..., 1:] = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    again = torch.zeros_like(again).scatter(-1, order, again) & ~bad
    for i, head, j in (bad | again).nonzero().tolist():
        row, given, end = int(rows[i]), str(int(entries[i, head, j])), int(limit[i])
        name = f"select.{select.kind}[{row}, {head}"
        where, picture = f"{name}, {j}]", row_picture(f"{name}]", entries[i, head], j)
        allowed = f"-1, or {what} in [0, {end}): sequence {int(seq[i])} has {int(call.kv_lens[seq[i]])} tokens"
        if not bool(bad[i, head, j]):
            given, allowed = f"{given}, which occurs before it", f"each {what.split()[-1]} at most once in a row"
        token = row if select.kind == "positions" else None
        yield Violation("selection", where, given, allowed, seq=int(seq[i]), token=token, picture=picture)


def prefixes(call: Call) -> Iterator[Violation]:
    """Sequences have the pages that they are said to share, and tokens in them before their new ones."""
    shared, size = call.batch.prefixes, call.cache.page_size
    if shared is None or not call.may_share or not call.lengths_hold:
        return
    groups, members, chains = (tensor.cpu().long() for tensor in shared.tensors.values())
    keys, made = call.keys_before(call.context), torch.full_like(chains, -1)
    made[:, 0] = 0
    for i, (first, count, begin, end, level) in enumerate(groups.tolist()):
        seqs = members[first : first + count] if first >= 0 and count >= 0 else members
        exist = len(seqs) == count and bool(((seqs >= 0) & (seqs < len(chains))).all()) and 0 <= level < shared.levels
        if count and not (exist and 0 <= begin < end):
            given = str(groups[i].tolist())
            yield Violation(
                "prefixes", f"prefixes.groups[{i}]", given, "a prefix of sequences of the batch, as quire.Prefixes makes it"
            )
            return
        made[seqs, 0], made[seqs, 1 + level] = end, i
        yield from _shared(call, seqs[call.taken[seqs]], begin, end, keys // size)
    for i, level in ((chains != made) & call.taken[:, None]).nonzero().tolist():
        given, allowed = str(int(chains[i, level])), f"{int(made[i, level])}, as groups and members say"
        yield Violation("prefixes", f"prefixes.chains[{i}, {level}]", given, allowed, seq=i)


def _shared(call: Call, seqs: torch.Tensor, begin: int, end: int, most: torch.Tensor) -> Iterator[Violation]:
    """Of sequences with new tokens that share columns [begin, end) those that cannot: they have `most` columns before these."""
    columns = f"columns [{begin}, {end})"
    for i in seqs[most[seqs] < end].tolist():
        given = f"sequence {i} shares {columns}"
        allowed = f"at most {int(most[i])} columns, the full pages before its new tokens"
        yield Violation("prefixes", "prefixes", given, allowed, seq=i)
    if end > call.page_table.shape[1] or not len(seqs):
        return
    mine, first = call.page_table[seqs, begin:end], int(seqs[0])
    differs = mine != mine[0]
    for row in differs.any(1).nonzero().flatten().tolist():
        i, column = int(seqs[row]), begin + int(differs[row].int().argmax())
        page, id = int(call.page_table[first, column]), int(call.page_table[i, column])
        allowed = f"{page}, as sequence {first} has: they share {columns}"
        yield Violation("prefixes", f"page_table[{i}, {column}]", str(id), allowed, seq=i, page=id, picture=_row(call, i, column))


def table(call: Call) -> Iterator[Violation]:
    """The entries of the page table that the call needs: those an attend reads, and those a write uses unless slots are given."""
    if not call.lengths_hold:
        return
    cache, width = call.cache, call.page_table.shape[1]
    reach = torch.zeros_like(call.kv_lens)
    if call.q is not None:
        reach = call.reach
    if call.writes and call.given_slots is None:
        first, end = _written_keys(call)
        reach = torch.maximum(reach, torch.where(first < end, end, 0))
    narrow = (reach > width * cache.page_size).nonzero().flatten().tolist()
    for i in narrow:
        needs = -(-int(reach[i]) // cache.page_size)
        given = f"{width} columns"
        here = "" if call.batch.shard is None else " of the shard"
        allowed = f"{needs} or more: sequence {i} reaches {int(reach[i])} tokens{here} in pages of {cache.page_size}"
        yield Violation("table", "page_table", given, allowed, seq=i, picture=_row(call, i, width - 1) if width else "")
    for i, column in _needed_cells(call):
        id = int(call.page_table[i, column])
        if not 0 <= id < cache.pages:
            here = "" if call.batch.shard is None else f", of which {int(call.keys_before(call.kv_lens)[i])} in the shard"
            note = f"kv_len {int(call.kv_lens[i])}{here}, pages of {cache.page_size}"
            picture = _row(call, i, column, note)
            yield Violation(
                "table", f"page_table[{i}, {column}]", str(id), f"a page id in [0, {cache.pages})", seq=i, page=id, picture=picture
            )


def _needed_cells(call: Call) -> list[tuple[int, int]]:
    """The entries of the page table that the call needs and that hold no valid page, as (sequence, column), in order."""
    size, width = call.cache.page_size, call.page_table.shape[1]
    column = torch.arange(width, device="cpu")
    needed = torch.zeros(call.page_table.shape, dtype=torch.bool, device="cpu")
    if call.q is not None:
        if not call.needs_ranges and call.batch.select is None:
            needed |= _columns(column, size, call.first_needed, call.end_needed)
        else:
            seq, key = call.needed
            needed[seq, key // size] = True
    if call.writes and call.given_slots is None:
        needed |= _columns(column, size, *_written_keys(call))
    bad = needed & ((call.page_table < 0) | (call.page_table >= call.cache.pages))
    return [(i, c) for i, c in bad.nonzero().tolist()]


def _written_keys(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The first key of each sequence that a write stores, and one past the last, `[seqs]` each."""
    return call.keys_before(call.context), call.keys_before(torch.where(call.q_lens > 0, call.kv_lens, 0))


def _columns(column: torch.Tensor, size: int, first: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """Which columns of the page table keys [first, end) of each sequence use, bool `[seqs, columns]`."""
    first, end = first[:, None], end[:, None]
    return (first < end) & (column * size < end) & ((column + 1) * size > first)


def _row(call: Call, seq: int, column: int, note: str = "") -> str:
    return row_picture(f"page_table[{seq}]", call.page_table[seq], column, note)


def _holds(call: Call) -> bool:
    """Whether lengths and table are valid, so that slots can be computed from them."""
    return call.lengths_hold and not any(True for _ in table(call))


def rope_positions(call: Call) -> Iterator[Violation]:
    """The positions by which a write rotates are in the tables. Those of padding rows are not read."""
    rope, given = call.rope, call.rope_positions
    if rope is None or not call.lengths_hold:
        return
    allowed = f"a position in [0, {rope.max_positions}), which rope has a row for"
    if given is None:
        for i in (call.taken & (call.kv_lens > rope.max_positions)).nonzero().flatten().tolist():
            picture = row_picture("kv_lens", call.kv_lens, i, f"its last token is at position {int(call.kv_lens[i]) - 1}")
            yield Violation(
                "rotation",
                f"kv_lens[{i}]",
                str(int(call.kv_lens[i])),
                f"at most {rope.max_positions}, the positions of rope",
                seq=i,
                picture=picture,
            )
        return
    by_axis = (given if given.dim() == 2 else given[None]).cpu().long()
    for axis, row in enumerate(by_axis[:, : int(call.q_starts[-1])]):
        for i in ((row < 0) | (row >= rope.max_positions)).nonzero().flatten().tolist():
            where = f"positions[{i}]" if given.dim() == 1 else f"positions[{axis}, {i}]"
            yield Violation("rotation", where, str(int(row[i])), allowed, token=i, picture=row_picture("positions", row, i))


def slots(call: Call) -> Iterator[Violation]:
    """The slots that a write stores to: inside the cache, each slot once, no shared page."""
    if not call.writes or not call.lengths_hold:
        return
    given, capacity = call.given_slots, call.cache.pages * call.cache.page_size
    if given is not None:
        values = given.cpu().long()[: int(call.q_starts[-1])]
        outside = ((values < -1) | (values >= capacity)).nonzero().flatten().tolist()
        for i in outside:
            picture = row_picture("slots", values, i)
            allowed = f"a slot in [0, {capacity}), or -1 to skip the token"
            yield Violation("ownership", f"slots[{i}]", str(int(values[i])), allowed, token=i, slot=int(values[i]), picture=picture)
    elif not _holds(call):
        return
    row, slot, _ = call.stored
    row, slot = row[slot < capacity], slot[slot < capacity]
    order = torch.argsort(slot, stable=True)
    again = (slot[order].diff() == 0).nonzero().flatten()
    for first, second in zip(order[again].tolist(), order[again + 1].tolist()):
        given_text = f"slot {int(slot[second])}, to which token {int(row[first])} is written too"
        yield _ownership(call, int(row[second]), int(slot[second]), given_text, "each slot at most once in a call")
    if call.cache.pool is not None:
        # Copies are applied before the write, so reference counts are those after the step.
        held = call.cache.pool.holders[slot // call.cache.page_size]
        for i in (held > 1).nonzero().flatten().tolist():
            text = f"slot {int(slot[i])} of page {int(slot[i]) // call.cache.page_size}, which {int(held[i])} sequences hold"
            yield _ownership(
                call,
                int(row[i]),
                int(slot[i]),
                text,
                "a page that one sequence holds: extend the sequence through the pool, which copies shared pages",
            )


def _ownership(call: Call, row: int, slot: int, given: str, allowed: str) -> Violation:
    page = slot // call.cache.page_size
    seq = int(call.sequence_of_rows(torch.tensor(row, device="cpu")))
    picture = ""
    if call.given_slots is not None:
        picture = row_picture("slots", call.given_slots, row)
    elif seq < call.page_table.shape[0]:
        at = row - int(call.q_starts[seq + 1]) + int(call.kv_lens[seq])
        picture = _row(call, seq, call.keys_before(at) // call.cache.page_size, f"position {at}")
    return Violation("ownership", f"slots[{row}]", given, allowed, seq=seq, token=row, page=page, slot=slot, picture=picture)


def written_once(call: Call) -> Iterator[Violation]:
    """With a ledger: a slot is written once each time it is allocated."""
    if not call.writes or call.cache.ledger is None or any(True for _ in slots(call)) or not call.lengths_hold:
        return
    row, slot, at = call.stored
    known = at >= 0
    seq = call.sequence_of_rows(row[known])
    for finding in call.cache.ledger.audit_write(slot[known], at[known], seq, call.batch.sequences):
        text = f"{_name(call, finding.seq)} writes position {finding.position} to {_slot(finding)}: {finding.reason}"
        yield _finding(call, "ownership", finding, text, "a slot that was allocated to this token and not written since")


def residency(call: Call) -> Iterator[Violation]:
    """With a ledger: every slot that an attend needs was written, for this sequence and position."""
    ledger = call.cache.ledger
    if call.q is None or ledger is None or not _holds(call):
        return
    seq, key = call.needed
    # What this call itself writes before it attends (`check` of a step) counts as written, and its copies as applied.
    if call.writes:
        old = ~_written_now(call, seq, key)
        seq, key = seq[old], key[old]
    if call.writes and call.batch.copies and not call.cache.has_applied(call.batch.copies):
        ledger = ledger.after(call.batch.copies)
    slot = call.page_table[seq, key // call.cache.page_size] * call.cache.page_size + key % call.cache.page_size
    for finding in ledger.audit_read(slot, call.positions_of(key), seq, call.batch.sequences):
        text = f"{_name(call, finding.seq)} needs {_slot(finding)}: {finding.reason}"
        yield _finding(call, "residency", finding, text, "required slots were written for this sequence")


def _written_now(call: Call, seq: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Which of the tokens (sequence, key) this call itself writes before it attends, to the slot that it will read."""
    row, slot, _ = call.stored
    target = torch.full((call.tokens,), -1, device="cpu")
    target[row] = slot
    at = call.positions_of(key)
    of_token = (at - call.kv_lens[seq] + call.q_starts[1:][seq]).clamp(min=0)
    size = call.cache.page_size
    return (at >= call.context[seq]) & (target[of_token] == call.page_table[seq, key // size] * size + key % size)


def _name(call: Call, seq: int) -> str:
    known = call.batch.sequences
    return f"sequence {seq}" if known is None or known[seq].id == seq else f"sequence {known[seq].id} (index {seq} of the batch)"


def _slot(finding: LedgerFinding) -> str:
    return f"slot {finding.slot} (page {finding.page}, offset {finding.offset})"


def _finding(call: Call, rule: str, f: LedgerFinding, given: str, allowed: str) -> Violation:
    column = call.keys_before(f.position) // call.cache.page_size
    picture = _row(call, f.seq, column, f"position {f.position}: offset {f.offset}")
    return Violation(rule, "cache", given, allowed, seq=f.seq, token=f.position, page=f.page, slot=f.slot, picture=picture)


def scales(call: Call) -> Iterator[Violation]:
    cache = call.cache
    for name, scale in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)):
        if scale is None:
            continue
        if scale.dim() < 3:
            yield from _bad_scales(name, scale)
        elif call.q is not None and _holds(call):
            # Per token and head: only the scales of required slots are checked.
            seq, key = call.needed
            if call.writes:
                old = ~_written_now(call, seq, key)
                seq, key = seq[old], key[old]
            at, offset = call.positions_of(key), key % cache.page_size
            page = call.page_table[seq, key // cache.page_size]
            read = scale.cpu()[page, offset]
            for i, head in ((read <= 0) | ~read.isfinite()).nonzero().tolist():
                where = f"{name}[{int(page[i])}, {int(offset[i])}, {head}]"
                allowed = "a finite number above 0: the slot is required"
                picture = _row(call, int(seq[i]), int(key[i]) // cache.page_size, f"position {int(at[i])}")
                value = float(read[i, head])
                # `write` stores such a scale for a token with a NaN or an infinity. Only the queries that see the token are
                # affected.
                harmless = math.isnan(value) or value == math.inf
                given = f"{value}, which write stores for a token with a NaN or an infinity" if harmless else str(value)
                yield Violation("quantisation", where, given, allowed, int(seq[i]), int(at[i]), picture=picture, harmless=harmless)
    if call.q is not None:
        for name in ("q_scale", "out_scale"):
            value = getattr(call.options, name)
            if isinstance(value, torch.Tensor):
                yield from _bad_scales(name, value)


def _bad_scales(name: str, scale: torch.Tensor) -> Iterator[Violation]:
    values = scale.cpu().reshape(-1).tolist()
    for i, value in enumerate(values):
        if not (value > 0 and math.isfinite(value)):
            where = name if scale.dim() == 0 else f"{name}[{i}]"
            yield Violation("quantisation", where, str(value), "a finite number above 0", picture=row_picture(name, values, i))


def numbers(call: Call) -> Iterator[Violation]:
    """Tensors of the options hold values in the range that kernels can compute with in fp32."""
    if call.q is None:
        return
    options = call.options
    for name, (most, infinite) in PER_HEAD.items():
        tensor = getattr(options, name)
        if tensor is None:
            continue
        values = tensor.cpu().float()
        good = (values.abs() <= most) | (values.isinf() if infinite else False)
        if bool(good.all()):
            continue
        allowed = f"a number from {-most:.3g} to {most:.3g}" + (", or -inf or inf" if infinite else "")
        for i in (~good).nonzero().flatten().tolist():
            yield Violation("numbers", f"{name}[{i}]", str(float(values[i])), allowed, picture=row_picture(name, values, i))
    for name in ("q_scale", "out_scale"):
        value = getattr(options, name)
        number = float(value) if isinstance(value, torch.Tensor) else 1.0
        if not (number > 0 and math.isfinite(number)):
            continue  # reported by `scales`
        if not is_in_range(number):
            yield Violation("numbers", name, str(number), RANGE)
        elif name == "q_scale" and (broken := options.too_large(number)) is not None:
            yield Violation("numbers", *broken)


def written_scales(call: Call) -> Iterator[Violation]:
    """With a ledger: every slot that an attend needs was written with the current scales of the cache."""
    ledger, mark = call.cache.ledger, None
    if call.q is not None and ledger is not None and _holds(call):
        mark = call.cache.scale_mark()
    if ledger is None or mark is None:
        return
    seq, key = call.needed
    if call.writes:
        old = ~_written_now(call, seq, key)
        seq, key = seq[old], key[old]
        if call.batch.copies and not call.cache.has_applied(call.batch.copies):
            ledger = ledger.after(call.batch.copies)
    size = call.cache.page_size
    slot, at = call.page_table[seq, key // size] * size + key % size, call.positions_of(key)
    for i in ledger.audit_scales(slot, mark).tolist():
        page, offset = divmod(int(slot[i]), size)
        given = f"slot {int(slot[i])} (page {page}, offset {offset}), which was written with other values of k_scale and v_scale"
        picture = _row(call, int(seq[i]), int(key[i]) // size, f"position {int(at[i])}: offset {offset}")
        allowed = "the scales that required slots were written with, or write them again"
        where = (int(seq[i]), int(at[i]), page, int(slot[i]))
        yield Violation("written-scales", "cache", given, allowed, *where, picture)
