"""The story of the seeds, solved: the failures as they came, each explanation put to the test, the cause, and what each proposed
fix would have done. Every number is computed here; what the documents report stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from quire.attend import attend
from quire.batch import Batch
from quire.cache.kv_cache import KVCache
from quire.conformance.report import Finding
from quire.conformance.run import examine
from quire.conformance.seeds import (
    DECODE,
    HEAD_DIM,
    HEADS,
    PAGE_SIZE,
    SMALL,
    SMALLER,
    TOLERANCE,
    Call,
    Seeds,
    leftover,
    operator,
    suspect,
)
from quire.dispatch.vllm import VllmCall, explain_vllm
from quire.platform import Platform

REPORTED: dict[str, Any] = {"mismatched": 8192, "elements": 43_720_704, "error": 1.685546875, "at": (5336, 0, 0)}
"""What the documents say of the third failure."""

POISONS = (1024.0, -0.5)
"""Two values that no right answer contains: what follows the one and then the other was never written."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Failure:
    """One of the three, as the person at the keyboard met it."""

    when: str
    message: str
    means: str


@dataclass(frozen=True)
class Hypothesis:
    """An explanation, how large an error it can make at all, and what became of it."""

    name: str
    documents: str
    says: str
    predicts: float | None
    """The largest error it makes in the failing row, computed; None if it predicts a row that nobody writes."""
    mismatched: int
    """How many elements of that row the test would then call wrong."""
    explains: bool
    because: str


@dataclass(frozen=True)
class Fix:
    """A change that a document proposes, applied, and the test run again."""

    document: str
    proposal: str
    mismatched: int | None
    """Elements that the test still calls wrong; None if the test is not run."""
    would: str
    would_not: str

    @property
    def cures(self) -> bool:
        return self.mismatched == 0


@dataclass(frozen=True)
class Lookalike:
    """A fault whose failure counts the same elements, and the three answers that give it away."""

    fault: str
    mismatched: int
    at: tuple[int, ...]
    error: float
    follows_poison: bool
    """Two poisons in the output: does the row hold now the one, now the other?"""
    right_with_int32: bool
    """`q_starts` as int32: is the row right then?"""
    right_with_token: bool
    """The new token in the cache: is the row right then?"""
    named: str


@dataclass(frozen=True)
class Named:
    """What the kit finds if it is given a kernel, and told nothing."""

    planted: str
    named: str
    where: str
    evidence: tuple[str, ...]
    expected: str


@dataclass(frozen=True)
class Config:
    """A row of the second document's matrix, by vLLM's own rule of that time."""

    name: str
    kernel: str
    because: str
    reads_q_starts: str
    result: str


NAMES = {
    (True, True, False): "index type: q_starts int64, read as int32",
    (False, False, True): "missing token: the new token is not in the cache",
    (True, False, False): "row never written: the launch leaves it out",
}
"""What the three answers, in the order of `Lookalike`, say."""


@dataclass
class Story:
    """All of it, as data."""

    batch: dict[str, Any]
    failures: list[Failure] = field(default_factory=list)
    hypotheses: list[Hypothesis] = field(default_factory=list)
    read_as: dict[str, Any] = field(default_factory=dict)
    poisons: list[dict[str, Any]] = field(default_factory=list)
    configs: list[Config] = field(default_factory=list)
    fixes: list[Fix] = field(default_factory=list)
    after: dict[str, Any] = field(default_factory=dict)
    lookalikes: list[Lookalike] = field(default_factory=list)
    kit: list[Named] = field(default_factory=list)

    @property
    def cause(self) -> str:
        return "; ".join(h.name for h in self.hypotheses if h.explains) or "unknown"

    @property
    def holds(self) -> bool:
        """Whether the documents' figures came out, one explanation is left, and the look-alikes were told apart."""
        return (
            self.batch["elements"] == REPORTED["elements"]
            and REPORTED["at"][0] == self.batch["decode_row"]
            and [h.explains for h in self.hypotheses].count(True) == 1
            and all(poison["row_holds_it"] and poison["rest_unchanged"] for poison in self.poisons)
            and all(like.named == like.fault for like in self.lookalikes)
            and len({like.named for like in self.lookalikes}) == len(self.lookalikes)
            and all(one.named == one.expected for one in self.kit)
        )

    def to_dict(self) -> dict[str, Any]:
        fixes = [{**asdict(fix), "cures": fix.cures} for fix in self.fixes]
        return {"story": "seeds", **asdict(self), "fixes": fixes, "reported": REPORTED, "cause": self.cause, "holds": self.holds}


def seeds(progress: Progress = lambda text: None) -> Story:
    """Rebuilds the batch and goes through the story. Some ten seconds on two cores, and 3 GB of memory."""
    progress("drawing the batch")
    batch = Seeds.draw()
    elements = sum(batch.q_lens) * HEADS * HEAD_DIM
    story = Story(
        {
            "q_lens": list(batch.q_lens),
            "contexts": list(batch.contexts),
            "kv_lens": batch.kv_lens,
            "tokens": sum(batch.q_lens),
            "keys": sum(batch.kv_lens),
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "page_size": PAGE_SIZE,
            "elements": elements,
            "decode_row": batch.row,
            "values": [-SMALL, SMALL],
            "tolerance": TOLERANCE,
        }
    )
    progress("the right answer, by dense attention")
    expected = batch.expected
    progress("the prefill rows")
    prefilled = _mismatched(batch.prefill, expected[: batch.row])
    assert prefilled == 0, f"{prefilled} elements of the prefill rows are wrong: the story has no other fault than its own"
    progress("the three failures")
    held = leftover(batch)
    story.failures = _failures(batch, held)
    progress("one explanation after the other")
    story.hypotheses = _hypotheses(batch)
    story.read_as = _read_as(batch)
    story.poisons = [_poison(batch, value) for value in POISONS]
    story.configs = _configs()
    progress("each proposed fix")
    story.fixes = _fixes(batch, held)
    progress("faults that look the same")
    ordinary = batch.looking_at_itself()
    story.after = _after(batch, ordinary)
    story.lookalikes = [
        _lookalike(NAMES[True, True, False], batch, Call(), held),
        _lookalike(NAMES[False, False, True], ordinary, Call(starts=batch.q_starts(torch.int32).int()), held),
        _lookalike(NAMES[True, False, False], batch, Call(starts=batch.q_starts(torch.int32).int(), rows=DECODE), held),
    ]
    progress("the kit, which is told nothing")
    story.kit = _kit()
    return story


def _failures(batch: Seeds, held: torch.Tensor) -> list[Failure]:
    """Runs the test three times, as it was changed from one to the next."""
    long = batch.q_starts(torch.int64)
    return [
        Failure(
            "as it came: block_table, seq_lens and query_start_loc are torch.long",
            _message(lambda: operator(batch, Call(index=torch.int64, starts=long), held)),
            "The kernel asks two of the three pointers by type, data_ptr<int>(). That is a refusal, and an honest one.",
        ),
        Failure(
            "with an fp8_e5m2 cache, everything dtype=torch.int now",
            _message(lambda: operator(batch, Call(kv_cache_dtype="fp8_e5m2"), held)),
            "A declared limit: the kernel reads e4m3 alone. Its caller selects it for e5m2 all the same.",
        ),
        Failure(
            "everything dtype=torch.int, cache as q",
            _message(lambda: _assert_close(operator(batch, Call(), held), batch.expected)),
            f"1 token x {HEADS} heads x {HEAD_DIM} = {HEADS * HEAD_DIM} elements: the row that decodes, all of it, and no other. "
            "Which they are is computed; how wrong they are is what the memory held, and ours is made to hold what theirs did.",
        ),
    ]


def _hypotheses(batch: Seeds) -> list[Hypothesis]:
    """What each explanation would do to the failing row, and whether that can be what was seen."""
    k, v, row, context = batch.k[DECODE], batch.v[DECODE], batch.row, batch.contexts[DECODE]
    truth = batch.dense(DECODE, k, v)[0]
    zero = k.new_zeros(1, HEADS, HEAD_DIM)

    def predicts(out: torch.Tensor) -> tuple[float, int]:
        wrong = (out.float() - truth).abs()
        return float(wrong.max()), int((wrong > TOLERANCE).sum())

    missing = predicts(batch.dense(DECODE, torch.cat((k[:-1], zero)), torch.cat((v[:-1], zero)))[0])
    needed = REPORTED["error"] * (context + 1)
    rounded = predicts(_in_fp16(batch.q[row], k, v))
    filled = Call(token_in_cache=True, starts=batch.q_starts(torch.int32).int())
    own = predicts(operator(batch, filled, torch.zeros_like(batch.q))[row])
    whole_page = -len(k) % PAGE_SIZE
    beyond = zero.expand(whole_page, -1, -1)
    over = predicts(batch.dense(DECODE, torch.cat((k, beyond)), torch.cat((v, beyond)))[0])
    neighbour = slice(0, PAGE_SIZE)
    strange = predicts(batch.dense(DECODE, torch.cat((k, batch.k[0][neighbour])), torch.cat((v, batch.v[0][neighbour])))[0])
    lengths = _read_as(batch)["lengths"]
    unwritten = operator(batch, Call(), torch.full_like(batch.q, POISONS[0]))[row]
    return [
        Hypothesis(
            "missing cache token",
            "000, 001, 002, 003",
            f"The cache lacks position {context} of the row that decodes, and the kernel reads what is there instead.",
            *missing,
            explains=missing[0] >= REPORTED["error"] / 10,
            because=f"The cache is zero-filled and the weights are even: one key of {context + 1} moves the row by "
            f"{missing[0]:.1e}. For {REPORTED['error']:.2f} the slot would have to hold {needed:.0f}, {HEADS * HEAD_DIM} times.",
        ),
        Hypothesis(
            "accuracy",
            "004, title of 002",
            "The kernel's arithmetic is too coarse in this configuration.",
            *max(rounded, own),
            explains=max(rounded, own)[0] >= REPORTED["error"] / 10,
            because=f"Its partitions and 16-bit weights cost {own[0]:.1e}, fp16 throughout {rounded[0]:.1e}. Any average of values "
            f"within {SMALL:g} stays within {SMALL:g}, however badly it is rounded.",
        ),
        Hypothesis(
            "boundary",
            "002",
            "The kernel reads past the end of the sequence, where Triton does not.",
            *max(over, strange),
            explains=max(over, strange)[0] >= REPORTED["error"] / 10,
            because=f"The {whole_page} empty slots of the last page, all attended: {over[0]:.1e}. A neighbour's page as well: "
            f"{strange[0]:.1e}. What lies there is within {SMALL:g} too.",
        ),
        Hypothesis(
            "index type",
            "004, which took it for cured",
            "torch.cumsum turned int32 into int64, and the kernel takes the bytes for int32.",
            None,
            int((unwritten - truth).abs().gt(TOLERANCE).sum()),
            explains=1 not in lengths and bool((unwritten == POISONS[0]).all()),
            because=f"It reads the row's length as {lengths[DECODE]}, which is not 1, and leaves the row to the other kernel, "
            "which leaves it to this one. The row keeps what its memory held, of any size.",
        ),
    ]


def _in_fp16(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Everything rounded to fp16 after every step, the running sum of the output too: worse than any kernel."""
    logits = (q.float() * k.float()).half().float().sum(-1).T.half() * torch.tensor(HEAD_DIM**-0.5).half()
    weights = (logits - logits.amax(1, keepdim=True)).float().exp().half()
    total, out = torch.zeros(HEADS).half(), torch.zeros(HEADS, HEAD_DIM).half()
    for key in range(len(k)):
        total = total + weights[:, key]
        out = out + weights[:, key, None] * v[key]
    return (out / total[:, None]).float()


def _read_as(batch: Seeds) -> dict[str, Any]:
    """The bytes of q_starts, as they are and as the kernel reads them."""
    starts = batch.q_starts(torch.int32)
    as_int32 = starts.view(torch.int32)[: len(starts)]
    return {
        "dtype_before_cumsum": "int32",
        "dtype_after_cumsum": str(starts.dtype).removeprefix("torch."),
        "starts": starts.tolist(),
        "read_as_int32": as_int32.tolist(),
        "lengths": as_int32.diff().tolist(),
        "true_lengths": starts.diff().tolist(),
    }


def _poison(batch: Seeds, value: float) -> dict[str, Any]:
    """The output's memory filled with a value that no answer contains, and the call repeated."""
    out = operator(batch, Call(), torch.full_like(batch.q, value))
    return {
        "poison": value,
        "row": batch.row,
        "row_holds_it": bool((out[batch.row] == value).all()),
        "rest_unchanged": torch.equal(out[: batch.row], batch.prefill),
    }


def _configs() -> list[Config]:
    """Why only one configuration failed: the rule of that time says which kernel each got."""
    found = []
    for name, kv_heads, window, head_size in (
        ("num_queries_per_kv 1, window 0", 64, 0, 128),
        ("num_queries_per_kv 1, window 16", 64, 16, 128),
        ("num_queries_per_kv 64, window 0", 1, 0, 128),
        ("head_size 24, window 0", 64, 0, 24),
    ):
        call = VllmCall(Platform.named("gfx942"), HEADS, kv_heads, head_size, PAGE_SIZE, "auto", "fp16", 1024, window)
        decision = explain_vllm(call, "seeds")
        custom = decision.selected == "custom"
        refused = [f"{r.rule} {r.given}" for r in decision.reasons if not r.holds]
        found.append(
            Config(
                name,
                decision.to_dict()["kernel"],
                f"group ratio {call.gqa_ratio}" if custom else f"the rule refuses {refused[0]}",
                "as int32, whatever it is" if custom else "in its own type",
                "FAIL" if custom else "PASS",
            )
        )
    return found


def _fixes(batch: Seeds, held: torch.Tensor) -> list[Fix]:
    """Each proposal, applied to the call, and the test's own comparison over the row that failed."""
    as_proposed = batch.q_starts(torch.int32)
    int32 = as_proposed.int()
    expected = batch.expected[batch.row]

    def left(**change: Any) -> int:
        return _mismatched(operator(batch, Call(**change), held)[batch.row], expected)

    no_row = "write the row: query_start_loc is still int64"
    lacking = "complete the cache: with numbers of ordinary size the row would still lack its token"
    return [
        Fix(
            "001",
            "cache_len = seq_len for rows that decode",
            left(token_in_cache=True),
            "give the decode kernel the cache that its contract asks for; production does",
            no_row,
        ),
        Fix(
            "002 option 1",
            "copy the query token into the cache after filling it",
            left(token_in_cache=True),
            "do what 001 does, in another place",
            no_row,
        ),
        Fix(
            "002 option 2",
            "let the kernel use context lengths for rows that decode",
            left(length="contexts"),
            "agree with the test's cache",
            f"{no_row}. In production, where the token is in the cache, it would be left out of its own attention",
        ),
        Fix(
            "002 option 3", "document and skip", None, "make the suite green", "cure anything: every int64 caller keeps a stale row"
        ),
        Fix(
            "003",
            "dtype=torch.int everywhere, skip e5m2, cache_len = seq_len for rows that decode",
            left(token_in_cache=True),
            "end the first two failures, and complete the cache",
            f"{no_row}, since torch.cumsum({_name(torch.int32)}) is {_name(as_proposed.dtype)}; its four tests go on failing",
        ),
        Fix(
            "004 option 1",
            "dtype=torch.int in the test",
            left(),
            "turn the first failure, which says what is wrong, into the third, which does not",
            no_row,
        ),
        Fix(
            "004 option 2",
            "convert block_tables, seq_lens and query_start_loc in the wrapper",
            left(starts=int32),
            "cure it, for every caller: the only proposal that names query_start_loc where it counts",
            lacking,
        ),
        Fix(
            "004 option 3",
            "let the kernel accept int64",
            left(reads_own_type=True),
            "cure it, if query_start_loc is among what it reads in its own type",
            lacking,
        ),
        Fix(
            "upstream (#28905)",
            "torch.cumsum(...).to(torch.int32)",
            left(starts=int32),
            "cure the test",
            "protect other callers: the kernel still takes the bytes for int32, unasked",
        ),
    ]


def _after(batch: Seeds, ordinary: Seeds) -> dict[str, Any]:
    """What the missing token is worth once the row is written: nothing that this test sees, everything with other numbers. And
    whether new tokens in the cache harm a prefill, as one document says."""
    int32 = batch.q_starts(torch.int32).int()

    def worst(of: Seeds, filled: bool) -> float:
        out = operator(of, Call(token_in_cache=filled, starts=int32), torch.zeros_like(of.q))
        return float((out[of.row].float() - of.expected[of.row].float()).abs().max())

    seq = min(range(DECODE), key=lambda i: batch.kv_lens[i])
    outs = [_context_form(batch, seq, in_cache) for in_cache in (batch.kv_lens[seq], batch.contexts[seq])]
    return {
        "test_data_without_token": worst(batch, False),
        "test_data_with_token": worst(batch, True),
        "ordinary_data_without_token": worst(ordinary, False),
        "ordinary_data_with_token": worst(ordinary, True),
        "tolerance": TOLERANCE,
        "prefill_same_bits_with_new_tokens_in_cache": torch.equal(*outs),
    }


def _context_form(batch: Seeds, seq: int, in_cache: int) -> torch.Tensor:
    """A prefill whose new tokens come beside the cache, over a cache that holds so many of its tokens."""
    width = -(-batch.kv_lens[seq] // PAGE_SIZE)
    pages = []
    for x in (batch.k, batch.v):
        flat = torch.zeros(width * PAGE_SIZE, HEADS, HEAD_DIM, dtype=torch.float16)
        flat[:in_cache] = x[seq][:in_cache]
        pages.append(flat.view(width, PAGE_SIZE, HEADS, HEAD_DIM))
    new = batch.k[seq][batch.contexts[seq] :], batch.v[seq][batch.contexts[seq] :]
    one = Batch(torch.arange(width)[None], torch.tensor([batch.kv_lens[seq]]), torch.tensor([0, batch.q_lens[seq]]))
    cache = KVCache.wrap(pages[0], pages[1], layout="nhd")
    return attend(batch.q[batch.rows_of(seq)], cache, one, new=new)


def _lookalike(fault: str, batch: Seeds, call: Call, held: torch.Tensor) -> Lookalike:
    """Runs the test against a fault, then asks the three questions. Nothing but the answers goes into the name."""
    expected, row = batch.expected, batch.row
    int32 = batch.q_starts(torch.int32).int()

    def out(memory: torch.Tensor, **change: Any) -> torch.Tensor:
        return operator(batch, Call(**{**asdict(call), **change}), memory)

    seen = out(held)
    wrong = (seen.float() - expected.float()).abs()
    filled = [out(torch.full_like(held, value))[row] for value in POISONS]
    follows = all(bool((got == value).all()) for got, value in zip(filled, POISONS))
    as_int32 = _is_right(out(held, starts=int32)[row], expected[row])
    with_token = _is_right(out(held, token_in_cache=True)[row], expected[row])
    at = torch.unravel_index(wrong.argmax(), wrong.shape)
    return Lookalike(
        fault,
        int((wrong > TOLERANCE).sum()),
        tuple(int(i) for i in at),
        float(wrong.max()),
        follows,
        as_int32,
        with_token,
        NAMES.get((follows, as_int32, with_token), "unknown"),
    )


def _kit() -> list[Named]:
    """The kit's own diagnosis of such kernels, on a smaller batch."""
    found = []
    for planted, kernel, expected in (
        ("reads q_starts as int32", suspect("reads int32"), "q-starts-int64-as-int32"),
        ("is launched for a row too few", suspect("leaves out", reads_own_type=True, leaves_out=1), "row-unwritten"),
        ("does neither", suspect("right", reads_own_type=True), "nothing"),
    ):
        result = examine(SMALLER, kernel)
        finding = result.findings[0] if result.findings else Finding("nothing")
        found.append(Named(planted, finding.fault, str(finding.where) if result.findings else "", finding.evidence, expected))
    return found


def _message(run: Callable[[], object]) -> str:
    try:
        run()
    except (RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def _assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def _mismatched(got: torch.Tensor, want: torch.Tensor) -> int:
    """How many elements the test calls wrong."""
    return int((~torch.isclose(got.float(), want.float(), atol=TOLERANCE, rtol=0)).sum())


def _is_right(got: torch.Tensor, want: torch.Tensor) -> bool:
    """By the test's tolerance, and by two roundings of fp16 for numbers that it was not made for."""
    return torch.allclose(got.float(), want.float(), atol=TOLERANCE, rtol=2**-9)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
