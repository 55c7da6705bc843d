"""Prints the investigation for a person."""

from __future__ import annotations

from quire.conformance.reporting.terminal import BAD, GOOD, Printer
from rocm_story.results import REPORTED, Investigation


def print_investigation(found: Investigation, printer: Printer) -> None:
    for section in (_introduction, _failures, _hypotheses, _cause, _configurations, _fixes, _missing_token, _similar_faults, _kit):
        section(found, printer)
    outcome = "every step above gave the reported result" if found.reproduced else "a step above did NOT give the reported result"
    printer.item(GOOD if found.reproduced else BAD, f"cause: {found.cause}; {outcome}")


def _introduction(found: Investigation, printer: Printer) -> None:
    batch = found.batch
    printer.heading("vLLM's attention test on ROCm, November 2025")
    printer.text(
        "vLLM's test of its mixed-batch attention operator (test_contexted_kv_attention) fails on an AMD GPU, three times, each "
        "time with a different message. Five written analyses of the failure, numbered 000 to 004 here, contradict each other. "
        f"The batch has ten sequences, {batch['tokens']} new tokens over {batch['keys']} keys and {batch['heads']} heads of "
        f"{batch['head_dim']}: {batch['elements']:,} output elements. Nine sequences prefill; the last one decodes one token, in "
        f"row {batch['decode_row']} of the output. Lengths, sizes and tolerance are the test's; the values are drawn again within "
        "the same range."
    )
    printer.table(
        ("sequence", *map(str, range(len(batch["q_lens"])))),
        [("new tokens", *map(str, batch["q_lens"])), ("context", *map(str, batch["contexts"]))],
    )


def _failures(found: Investigation, printer: Printer) -> None:
    printer.heading("1  Three failures")
    for number, failure in enumerate(found.failures, 1):
        printer.text(f"({number}) {failure.setup}")
        printer.quote(failure.message)
        printer.text(f"    {failure.meaning}")


def _hypotheses(found: Investigation, printer: Printer) -> None:
    printer.heading("2  Four explanations, and how large an error each can cause")
    printer.text(
        f"The analyses report an error of {REPORTED['error']:.3f}. The test's values lie within {found.batch['values'][1]:g}, its "
        f"tolerance is {found.batch['tolerance']:g}. So the first question is how large an error each explanation can cause."
    )
    for h in found.hypotheses:
        size = "Any size: it predicts a row that no kernel writes"
        if h.max_error is not None:
            size = f"At most {h.max_error:.1e}: {REPORTED['error'] / h.max_error:,.0f} times too small"
        verdict = "confirmed" if h.explains else "rejected"
        printer.item(verdict, f"{h.name} (analyses {h.analyses})", h.claim, f"{size}; {h.mismatched} wrong elements.", h.reason)


def _cause(found: Investigation, printer: Printer) -> None:
    starts, row = found.q_starts, found.batch["decode_row"]
    printer.heading("3  The cause")
    printer.text(
        f"torch.cumsum of {starts['dtype_before_cumsum']} gives {starts['dtype_after_cumsum']}. The decode kernel takes the "
        "address of query_start_loc (q_starts here) and reads int32 from it without a check, so every other number it sees is "
        "the upper half of one."
    )
    columns = range(len(starts["lengths"]))
    printer.table(
        ("sequence", *map(str, columns)),
        [
            ("q_starts", *(str(starts["starts"][i]) for i in columns)),
            ("read as", *(str(starts["read_as_int32"][i]) for i in columns)),
            ("new tokens", *(str(starts["true_lengths"][i]) for i in columns)),
            ("read as", *(str(starts["lengths"][i]) for i in columns)),
        ],
    )
    printer.text(
        "The decode kernel computes sequences with one new token and leaves the others to the prefill kernel. With these numbers "
        f"there is no such sequence. Neither kernel writes row {row}, so it must keep whatever its memory held before the call:"
    )
    printer.table(
        ("memory filled with", f"row {row} after the call", f"the other {row} rows", ""),
        [
            (
                f"{test['value']:g}",
                f"{test['value']:g} in all {REPORTED['mismatched']} elements" if test["row_keeps_it"] else "something else",
                "unchanged" if test["rest_unchanged"] else "changed",
                "confirmed" if test["row_keeps_it"] and test["rest_unchanged"] else "rejected",
            )
            for test in found.fill_tests
        ],
    )


def _configurations(found: Investigation, printer: Printer) -> None:
    printer.text("Only one configuration failed, because only it uses this kernel (vLLM's selection rule of that time, on gfx942):")
    printer.table(
        ("configuration", "", "kernel", "because", "reads q_starts"),
        [(c.name, c.result, c.kernel, c.reason, c.reads_q_starts) for c in found.configurations],
    )


def _fixes(found: Investigation, printer: Printer) -> None:
    printer.heading("4  What each proposed fix does")
    for fix in found.fixes:
        remaining = "The test is skipped." if fix.mismatched is None else f"{fix.mismatched} elements are still wrong."
        lines = (remaining, f"It would {fix.effect}.", f"It would not {fix.limitation}.")
        printer.item("cures" if fix.cures else "no", f"{fix.source}: {fix.proposal}", *lines)


def _missing_token(found: Investigation, printer: Printer) -> None:
    token = found.missing_token
    printer.text(
        "The analyses are right about the contract: the decode kernel reads all keys from the cache, so the new token must be "
        f"there. Once the row is written, the missing token costs {token['test_values_without_token']:.1e} with the test's "
        f"values, which the test cannot see, and {token['ordinary_values_without_token']:.1f} with values of ordinary size."
    )
    if token["prefill_same_bits_with_new_tokens_in_cache"]:
        printer.text(
            "Analysis 001 withdraws its first attempt without need: new tokens in the cache do not change a prefill that gets them "
            "as separate arguments. The output has the same bits."
        )


def _similar_faults(found: Investigation, printer: Printer) -> None:
    printer.heading("5  Three faults with the same symptom")
    printer.text(
        f"{REPORTED['mismatched']} wrong elements in row {found.batch['decode_row']} have more than one possible cause. The count "
        "does not distinguish them; three observations do."
    )
    head = ("injected fault", "wrong", "worst", "keeps old memory", "correct with int32", "correct with token", "identified", "")
    printer.table(
        head,
        [
            (
                one.fault.split(":")[0],
                f"{one.mismatched}",
                f"{one.error:.2f}",
                _yes(one.keeps_old_memory),
                _yes(one.correct_with_int32),
                _yes(one.correct_with_token),
                one.identified.split(":")[0],
                GOOD if one.identified == one.fault else BAD,
            )
            for one in found.similar_faults
        ],
    )


def _kit(found: Investigation, printer: Printer) -> None:
    printer.text(
        "The conformance kit makes such observations by itself. Given only the kernel, with int64 indices and lengths divided by "
        "16, it reports for a kernel that ..."
    )
    printer.table(
        ("a kernel with this fault", "identified", "at", "evidence", ""),
        [(k.planted, k.identified, k.where, "; ".join(k.evidence), GOOD if k.identified == k.expected else BAD) for k in found.kit],
    )


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
