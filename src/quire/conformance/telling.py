"""The story of the seeds as a person reads it."""

from __future__ import annotations

from quire.conformance.paper import BAD, GOOD, Paper
from quire.conformance.story import REPORTED, Story


def tell(story: Story, paper: Paper) -> None:
    """Prints all of it, in order."""
    batch = story.batch
    row, elements = batch["decode_row"], batch["elements"]
    paper.heading("The story of the seeds")
    paper.text(
        f"A team ports a test to another GPU. Ten sequences, {batch['tokens']} new tokens over {batch['keys']} keys, "
        f"{batch['heads']} heads of {batch['head_dim']}: {elements:,} numbers of output. Nine sequences prefill, the last decodes "
        f"one token, in row {row}. The test fails three times, each time otherwise. Five documents are written about it; they "
        "contradict each other. Lengths, sizes and tolerance are the test's; its numbers are drawn anew within the same bounds."
    )
    paper.grid(
        ("sequence", *map(str, range(len(batch["q_lens"])))),
        [("new tokens", *map(str, batch["q_lens"])), ("context", *map(str, batch["contexts"]))],
    )

    paper.heading("1  Three failures")
    for number, failure in enumerate(story.failures, 1):
        paper.text(f"({number}) {failure.when}")
        paper.quote(failure.message)
        paper.text(f"    {failure.means}")

    paper.heading("2  Four explanations, and how much each can explain")
    paper.text(
        f"The documents report {REPORTED['error']:.3f}. The test's numbers lie within {batch['values'][1]:g}, its tolerance is "
        f"{batch['tolerance']:g}. So the first question is not which elements are wrong, but by how much they can be."
    )
    for h in story.hypotheses:
        most = "Any error: it predicts a row that nobody writes"
        if h.predicts is not None:
            most = f"At most {h.predicts:.1e}: {REPORTED['error'] / h.predicts:,.0f} times too small"
        size = f"{most}; {h.mismatched} wrong elements."
        paper.item("confirmed" if h.explains else "rejected", f"{h.name} (documents {h.documents})", h.says, size, h.because)

    paper.heading("3  The cause")
    read = story.read_as
    paper.text(
        f"torch.cumsum of {read['dtype_before_cumsum']} gives {read['dtype_after_cumsum']}. The kernel takes the address of "
        "q_starts and reads int32 from it, without asking: every other number that it sees is the upper half of one."
    )
    columns = range(len(read["lengths"]))
    paper.grid(
        ("sequence", *map(str, columns)),
        [
            ("q_starts", *(str(read["starts"][i]) for i in columns)),
            ("read as", *(str(read["read_as_int32"][i]) for i in columns)),
            ("new tokens", *(str(read["true_lengths"][i]) for i in columns)),
            ("read as", *(str(read["lengths"][i]) for i in columns)),
        ],
    )
    paper.text(
        "It computes rows of one new token and leaves the rest to the prefill kernel. By these lengths there is no such row. "
        f"Row {row} is left by both, and holds what its memory held before. If so, it must hold whatever is put there:"
    )
    paper.grid(
        ("memory filled with", f"row {row} then holds", f"the other {row} rows", ""),
        [
            (
                f"{p['poison']:g}",
                f"{p['poison']:g} in all {REPORTED['mismatched']} places" if p["row_holds_it"] else "something else",
                "the same bits" if p["rest_unchanged"] else "changed",
                "confirmed" if p["row_holds_it"] and p["rest_unchanged"] else "rejected",
            )
            for p in story.poisons
        ],
    )
    paper.text("And only this configuration failed, because only it gets this kernel (vLLM's rule of that time, on gfx942):")
    paper.grid(
        ("configuration", "", "kernel", "because", "reads q_starts"),
        [(c.name, c.result, c.kernel, c.because, c.reads_q_starts) for c in story.configs],
    )

    paper.heading("4  What each proposed fix would have done")
    for f in story.fixes:
        left = "no test is run" if f.mismatched is None else f"{f.mismatched} elements still wrong"
        paper.item(
            "cures" if f.cures else "no",
            f"{f.document}: {f.proposal}",
            f"{left}.",
            f"It would {f.would}.",
            f"It would not {f.would_not}.",
        )
    after = story.after
    paper.text(
        "What the documents say of the contract is right all the same: the decode kernel reads everything from the cache, so the "
        f"token belongs there. Once the row is written, its absence costs {after['test_data_without_token']:.1e} with the test's "
        f"numbers, which the test cannot see, and {after['ordinary_data_without_token']:.1f} with numbers of ordinary size."
    )
    if after["prefill_same_bits_with_new_tokens_in_cache"]:
        paper.text(
            "And document 001 takes its own first attempt back for nothing: new tokens in the cache do not disturb a prefill that "
            "gets them beside it. The bits are the same."
        )

    paper.heading("5  Three faults that count the same")
    paper.text(
        f"{REPORTED['mismatched']} wrong elements in row {row} have more than one possible cause. Counting does not tell them "
        "apart; three questions do."
    )
    paper.grid(
        ("planted", "wrong elements", "worst", "follows two poisons", "right with int32", "right with the token", "named", ""),
        [
            (
                like.fault.split(":")[0],
                f"{like.mismatched} / {elements}",
                f"{like.error:.2f}",
                _yes(like.follows_poison),
                _yes(like.right_with_int32),
                _yes(like.right_with_token),
                like.named.split(":")[0],
                GOOD if like.named == like.fault else BAD,
            )
            for like in story.lookalikes
        ],
    )
    paper.text("The kit needs no story. Given a kernel and int64 indices, on a batch a sixteenth as long, it says of one that ...")
    paper.grid(
        ("... planted", "named", "at", "probes", ""),
        [(k.planted, k.named, k.where, "; ".join(k.evidence), GOOD if k.named == k.expected else BAD) for k in story.kit],
    )
    came_out = "everything above came out as told" if story.holds else "something above did NOT come out as told"
    paper.item(GOOD if story.holds else BAD, f"cause: {story.cause}; {came_out}")


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
