"""`quire explain` as people and programs call it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any

import pytest

import quire
from quire.cli import main
from quire.compat.vllm_rule import RULES
from quire.plan.layer_kinds import FAMILIES, NAMES
from quire.platform import NAMED, NICKNAMES, Platform
from quire.problem import Problem

VLLM_QUESTION = "--as vllm --arch gfx942 --q-heads 64 --kv-heads 64 --head-dim 128 --page-size 32 --kv-dtype fp8_e5m2"
VLLM_ANSWER = "custom kernel selected by the rule, and it will raise: reads e4m3 only"


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str]):
    """Runs `quire explain` with flags; returns the exit status and what was printed."""

    def run(flags: str) -> tuple[int, str]:
        code = main(["explain", *flags.split()])
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def asked(explain):
    """The answer of `quire explain --json`."""

    def run(flags: str, code: int = 0) -> Any:
        found, text = explain(f"{flags} --json")
        assert found == code
        return json.loads(text)

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]):
    """What `quire explain` says about a wrong question."""

    def run(flags: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["explain", *flags.split()])
        assert caught.value.code == 2
        return capsys.readouterr().err

    return run


# --- Quire's own kernels ----------------------------------------------------------------------------------------------------


def test_without_flags_it_is_a_decode_on_this_machine(explain) -> None:
    code, text = explain("")
    first, second, third, *others = text.splitlines()
    assert code == 0
    assert first == "attend: decode, q <= 1, kv <= 4096, 32/8 heads x 128, pages of 16 nhd bf16, q bf16"
    assert second == f"on {Platform.detect()}"
    assert third.startswith("chosen     ") and [line for line in others if line.startswith("because    ")]


@pytest.mark.parametrize("name", NAMED)
def test_every_named_platform(asked, name: str) -> None:
    found = asked(f"--arch {name}")
    assert found["platform"]["name"] == name and found["chosen"]
    assert found["problem"]["device"] == ("cpu" if NAMED[name].vendor == "cpu" else "cuda")


@pytest.mark.parametrize(
    "flags, fields",
    [
        ("--q-heads 12 --kv-heads 3", {"q_heads": 12, "kv_heads": 3}),
        ("--head-dim 80 --v-head-dim 64", {"head_dim": 80, "v_head_dim": 64}),
        ("--page-size 544 --layout vllm_x", {"page_size": 544, "layout": "vllm_x"}),
        ("--q-dtype half", {"q_dtype": "fp16", "out_dtype": "fp16", "format": "fp16"}),
        ("--q-dtype fp32 --out-dtype fp8", {"q_dtype": "fp32", "out_dtype": "e4m3fn"}),
        ("--q-dtype fp8", {"q_dtype": "e4m3fn", "out_dtype": "bf16"}),
        ("--kv-dtype torch.float8_e5m2", {"format": "e5m2", "scales": "tensor"}),
        ("--kv-dtype int8 --scales token", {"format": "int8", "scales": "token"}),
        ("--scales token", {"format": "bf16", "scales": "none"}),
        ("--window 16", {"window": [15, 15]}),
        ("--sliding-window 1", {"window": [0, 0]}),
        ("--softcap --alibi --sinks", {"softcap": True, "alibi": True, "sinks": True}),
        ("--softcap 50 --mask --lse", {"softcap": True, "mask": True, "lse": True}),
        ("--spans --softcap 50", {"softcap": True, "spans": "int32"}),
        ("--select columns", {"select": "columns", "select_index": "int32"}),
        ("--non-causal --form context", {"causal": "no", "form": "context"}),
        ("--batch-invariant", {"batch_invariant": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_flags_describe_the_problem(asked, flags: str, fields: dict[str, Any]) -> None:
    problem = asked(flags)["problem"]
    assert {name: problem[name] for name in fields} == fields
    assert Problem.from_json(json.dumps(problem)) is not None


@pytest.mark.parametrize(
    "flags, extent",
    [
        ("", {"seqs": 1, "tokens": 1, "max_q_len": 1, "max_kv_len": 4096, "saved_keys": 0}),
        (
            "--seqs 5 --max-q-len 3 --max-kv-len 5000",
            {"seqs": 5, "tokens": 15, "max_q_len": 3, "max_kv_len": 5000, "saved_keys": 0},
        ),
        ("--max-seq-len 5000", {"seqs": 1, "tokens": 1, "max_q_len": 1, "max_kv_len": 5000, "saved_keys": 0}),
        (
            "--seqs 5 --shared-prefix 1000",
            {"seqs": 5, "tokens": 5, "max_q_len": 1, "max_kv_len": 4096, "saved_keys": 4 * 62 * 16},
        ),
    ],
    ids=["decode", "verify", "long", "shared prefix"],
)
def test_flags_describe_the_extent(asked, flags: str, extent: dict[str, int]) -> None:
    assert asked(flags)["extent"] == extent


def test_a_shared_prefix_chooses_the_kernel_that_reads_it_once(asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked("--arch h100 --seqs 5 --shared-prefix 3000")["chosen"] == "triton-shared"
    assert asked("--arch h100 --seqs 5 --shared-prefix 100")["chosen"] == "triton-decode"
    for words, message in (
        ("--shared-prefix 100", "--seqs: given 1 with --shared-prefix 100; allowed: 2 or more"),
        ("--seqs 2 --shared-prefix 4096", "--shared-prefix: given 4096; allowed: at most 4095"),
    ):
        with pytest.raises(SystemExit):
            asked(words)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arch, spelling, format",
    [
        ("gfx942", "fp8", "e4m3fnuz"),
        ("gfx942", "fp8_e4m3", "e4m3fnuz"),
        ("gfx942", "e4m3fn", "e4m3fn"),
        ("gfx950", "fp8", "e4m3fn"),
        ("sm80", "fp8", "e4m3fn"),
        ("cpu", "fp8_e4m3", "e4m3fn"),
    ],
)
def test_fp8_is_the_flavour_of_the_platform(asked, arch: str, spelling: str, format: str) -> None:
    assert asked(f"--arch {arch} --kv-dtype {spelling}")["problem"]["format"] == format


def test_json_of_a_decision(asked) -> None:
    found = asked("--arch sm90 --operation write")
    assert set(found) == {
        *("operation", "problem", "extent", "platform", "requested", "capturing", "chosen", "because", "candidates", "next_better"),
        *("compiled", "not_compiled", "schema", "command", "interrupted", "related"),
    }
    assert found["operation"] == "write"
    assert set(found["candidates"][-1]) == {"kernel", "summary", "refusals"}


def test_no_kernel_is_status_1(asked, explain) -> None:
    found = asked("--head-dim 513", code=1)
    assert found["chosen"] is None
    assert {refusal["rule"] for refusal in found["candidates"][-1]["refusals"]} == {"head_dim", "v_head_dim"}
    code, text = explain("--capturing --arch cpu")
    assert code == 1 and "chosen     none" in text and "torch, if you launch it outside of a CUDA graph" in text
    code, text = explain("--capturing --arch cpu --all")
    assert code == 1 and "capturing: given yes, allowed no" in text


def test_a_kernel_by_name(asked) -> None:
    assert asked("--kernel torch")["requested"] == "torch"
    found = asked("--kernel torch --capturing", code=1)
    assert (found["requested"], found["chosen"]) == ("torch", None)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--arch gfx943", "--arch: given 'gfx943'; allowed: sm75, sm80, "),
        ("--kernel fast", "--kernel: given 'fast'; allowed for attend: "),
        ("--kv-dtype fp7", "--kv-dtype: given 'fp7'; allowed: auto, fp32, "),
        ("--q-dtype int8", "--q-dtype: given 'int8'; allowed: fp32, "),
        ("--q-dtype auto", "--q-dtype: given 'auto'; allowed: fp32, "),
        ("--q-heads 32 --kv-heads 5", "--q-heads: given 32; allowed: a multiple of --kv-heads 5"),
        ("--page-size 0", "--page-size: given 0; allowed: a whole number of 1 or more"),
        ("--head-dim many", "--head-dim: given many; allowed: a whole number of 1 or more"),
        ("--window -1", "--window: given -1; allowed: 0 for no window"),
        ("--layout blocked", "--layout: given 'blocked'; allowed: nhd, hnd, vllm_x"),
        ("--as sglang", "--as: given 'sglang'; allowed: quire, vllm"),
        ("--rule tomorrow", "--rule: given 'tomorrow'; allowed: today, 2025-11, both"),
        ("--as vllm --softcap 50", "--softcap: given with --as vllm; allowed: nothing"),
        ("--as vllm --q-dtype fp8", "--q-dtype: given 'fp8'; allowed: fp32, fp16, bf16"),
        ("--heads 3", "No such option '--heads'"),
    ],
)
def test_a_wrong_question_is_status_2_and_names_the_flag(refused, flags: str, message: str) -> None:
    assert message in refused(flags)


# --- one screen -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", "sm90", "gfx942", "sm75"])
@pytest.mark.parametrize("flags", ["", "--kv-dtype fp8 --mask --max-q-len 512", "--operation step --capturing", "--as vllm"])
def test_it_fits_on_a_screen(explain, name: str, flags: str) -> None:
    flags = flags if flags != "--as vllm" else f"{flags} --kv-dtype fp8"
    lines = explain(f"--arch {name} {flags}")[1].splitlines()
    assert len(lines) <= 24 and ("vllm" in flags or max(map(len, lines)) <= 100), lines


def test_kernels_are_grouped_by_what_they_lack(explain) -> None:
    text = explain("--arch gfx942")[1]
    assert "refused    gluon-mixed, gluon-mixed-bytes: needs arch sm90, not gfx942\n" in text
    assert "           native: needs vendor cpu, not amd\n" in text


def test_what_would_be_faster(explain) -> None:
    text = explain("--arch h100 --max-q-len 512 --mask")[1]
    assert "chosen     triton-mixed" in text and "faster     gluon-mixed, if you do not use mask\n" in text
    assert "faster     triton-decode" not in text, "to cut a batch into calls of 16 tokens is not faster"
    assert "refused    triton-decode: needs long_rows at most 8192, not 16384\n" in text


def test_all_has_every_limit(explain) -> None:
    text = explain("--arch gfx942 --all")[1]
    assert "refused: gluon-mixed (" in text and "  arch: given gfx942, allowed sm90" in text


def test_a_step_is_a_write_and_an_attend(asked, explain) -> None:
    found = asked("--operation step --arch sm90")
    assert (found["operation"], found["chosen"]) == ("step", "triton-decode")
    assert [(other["operation"], other["chosen"]) for other in found["related"]] == [("write", "triton")]
    assert "with       triton, which does the write" in explain("--operation step --arch sm90")[1]


@pytest.mark.parametrize(
    "name, arch",
    [("h100", "sm90"), ("H200", "sm90"), ("A100", "sm80"), ("l4", "sm89"), ("L40S", "sm89"), ("rtx 4090", "sm89"),
     ("b200", "sm100"), ("MI300X", "gfx942"), ("mi250", "gfx90a"), ("mi350x", "gfx950"), ("RX-7900-XTX", "gfx1100"),
     ("x86_64", "x86-64")],
)  # fmt: skip
def test_common_names_of_gpus(name: str, arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert Platform.named(name) is NAMED[arch]
    assert main(["explain", "--arch", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["platform"]["arch"] == arch


def test_every_common_name_is_known() -> None:
    assert set(NICKNAMES.values()) <= NAMED.keys() and not NICKNAMES.keys() & NAMED.keys()


@pytest.mark.parametrize("arch, chosen", [("sm90", "triton-decode"), ("gfx942", "triton-decode")])
def test_without_triton_it_answers_for_machines_that_have_it(arch: str, chosen: str) -> None:
    code = f"import sys; sys.modules['triton'] = None; from quire.cli import main; main(['explain', '--arch', '{arch}'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "" and f"chosen     {chosen}" in done.stdout
    assert "note       triton is not installed on this machine; the answer is for one that has it" in done.stdout


# --- vLLM's kernels ---------------------------------------------------------------------------------------------------------


def test_what_vllm_of_november_2025_did(explain) -> None:
    code, text = explain(VLLM_QUESTION)
    today, then = text.split("\n\n")
    for part, rule in ((today, "rule of today"), (then, "rule of November 2025")):
        assert rule in part.splitlines()[0] and part.splitlines()[0].endswith(VLLM_ANSWER)
        assert "  holds" not in part and "limits hold: --all shows them" in part
        assert "group ratio 1 (64 query heads / 64 kv heads)" in part
    assert code == 0


def test_every_limit_of_vllms_rule(explain) -> None:
    assert "  holds    arch" in explain(f"{VLLM_QUESTION} --all")[1]


def test_what_vllm_did_for_programs(asked) -> None:
    found = asked(VLLM_QUESTION)
    assert (found["as"], found["arch"], found["gqa_ratio"]) == ("vllm", "gfx942", 1)
    assert [answer["rule"] for answer in found["answers"]] == list(RULES)
    for answer in found["answers"]:
        assert answer["answer"] == VLLM_ANSWER
        assert (answer["selected"], answer["outcome"], answer["call"]["kv_cache_dtype"]) == ("custom", "raises", "fp8_e5m2")


@pytest.mark.parametrize("number, rule", enumerate(["today", "2025-11"]))
def test_one_rule(asked, number: int, rule: str) -> None:
    assert [answer["rule"] for answer in asked(f"--as vllm --arch gfx906 --rule {rule}")["answers"]] == [list(RULES)[number]]


@pytest.mark.parametrize(
    "flags, call",
    [
        ("--kv-dtype bfloat16", {"kv_cache_dtype": "bfloat16"}),
        ("", {"kv_cache_dtype": "auto", "max_seq_len": 4096, "sliding_window": 0, "q_dtype": "bf16", "native_strides": True}),
        ("--q-dtype float16 --max-seq-len 131073", {"q_dtype": "fp16", "max_seq_len": 131073}),
        ("--sliding-window 16", {"sliding_window": 16}),
        ("--sliding-window -1", {"sliding_window": 0}),
        ("--alibi --sinks", {"alibi": True, "sinks": True}),
        ("--out-dtype fp8 --padded-pages", {"output_scale": True, "native_strides": False}),
        ("--head-dim 24 --page-size 544", {"head_size": 24, "block_size": 544}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_flags_describe_vllms_call(asked, flags: str, call: dict[str, Any]) -> None:
    (found,) = asked(f"--as vllm --arch gfx942 --rule today {flags}")["answers"]
    assert {name: found["call"][name] for name in call} == call


# --- the command ------------------------------------------------------------------------------------------------------------


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, parts in (
        (["--help"], ("examples:", "quire doctor", "explain", "doctor")),
        (["explain", "--help"], ("examples:", "--as vllm", "exit status: 0", "--kv-dtype", "gfx942")),
    ):
        assert main(argv) == 0
        text = capsys.readouterr().out
        assert all(part in text for part in parts)


@pytest.mark.parametrize("argv", [["nothing"], ["--nothing"]], ids=["unknown command", "unknown option"])
def test_a_wrong_command_is_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2 and "usage: see `quire help`" in capsys.readouterr().err


def test_only_the_requested_command_is_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    imported: list[str] = []
    monkeypatch.setattr("quire.cli.import_module", lambda name: imported.append(name) or importlib.import_module(name))
    assert main(["explain"]) == 0 and imported == ["quire.cli.explain"]


def test_it_runs_as_a_module_without_rich_or_triton() -> None:
    code = (
        "import sys; sys.modules['rich'] = sys.modules['triton'] = None; import quire.cli as cli; sys.exit(cli.main(['explain']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "chosen  " in done.stdout
    again = subprocess.run([sys.executable, "-m", "quire", "explain", "--head-dim", "513"], capture_output=True, text=True)
    assert again.returncode == 1 and "chosen     none" in again.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"quire {quire.__version__}\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--softcap 0", "--softcap: given 0.0; allowed: a finite number above 0"),
        ("--softcap much", "--softcap: given 'much'; allowed: a number"),
        ("--max-q-len 100 --max-kv-len 4", "--max-q-len: given 100; allowed: at most --max-kv-len 4"),
        ("--batch-invariant --form context --kv-dtype fp8", "--form: given context with --batch-invariant"),
        ("--as vllm --operation write", "--operation: given write with --as vllm"),
        ("--as vllm --layout hnd", "--layout: given hnd with --as vllm"),
        ("--as vllm --kv-dtype banana", "--kv-dtype: given 'banana' with --as vllm; allowed: vLLM's own names: auto"),
        ("--as vllm --kv-dtype bf16", "--kv-dtype: given 'bf16' with --as vllm"),
        ("--as vllm --out-dtype e5m2", "--out-dtype: given e5m2 with --as vllm"),
        ("--as vllm --capturing", "--capturing: given with --as vllm"),
    ],
)
def test_a_question_that_no_call_could_ask(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["explain", *flags.split()])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--no-custom-paged-attn", "--aiter-paged-attn"])
def test_switches_of_vllm_of_november_2025(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    question = ["explain", "--as", "vllm", "--rule", "2025-11", "--arch", "gfx942", "--json"]
    assert main(question) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["selected"] == "custom"
    assert main([*question, flag]) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["selected"] == "triton"


def test_a_closed_pipe_is_no_verdict() -> None:
    code = "import sys; from quire.cli import main; sys.exit(main(['explain', '--json']))"
    done = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.stdout and done.stderr
    done.stdout.close()
    assert done.stderr.read() == b""
    assert done.wait() == 128 + 13
    done.stderr.close()


def test_without_a_command_it_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "quire doctor" in capsys.readouterr().err


# --- Writes that rotate -------------------------------------------------------------------------------------------------------


def test_rope_is_of_the_write(asked) -> None:
    found = asked("--operation step --rope 64 --rope-interleaved --qk-norm bf16 --arch h100")
    (write,) = found["related"]
    assert found["problem"]["rope"] is None
    assert write["problem"]["rope"][:2] == [64, True] and write["problem"]["rope"][4:6] == ["bf16", "bf16"]
    assert asked("--operation write --rope --arch h100")["problem"]["rope"][0] == 128
    latent = asked("--operation write --rope --qk-norm bf16 --head-dim 576 --v-in-k 512 --arch h100")["problem"]["rope"]
    assert latent[0] == 64 and latent[4:6] == ["none", "bf16"], "what is behind the latent is rotated, and the latent normalised"


@pytest.mark.parametrize("sizes", ["--head-dim 576 --v-in-k 576", "--head-dim 576 --v-in-k 40", "--head-dim 33 --v-in-k 20"])
@pytest.mark.parametrize("arch", ["h100", "gfx942"])
def test_every_pair_of_latent_sizes_has_a_kernel(asked, arch: str, sizes: str) -> None:
    assert asked(f"{sizes} --kv-heads 1 --arch {arch}")["chosen"] is not None


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--rope", "--rope: given with --operation attend; allowed: --operation write or step"),
        ("--operation write --rope 63", "--rope: given 63; allowed: an even number of at most --head-dim 128"),
        (
            "--operation write --rope 66 --like deepseek-v3",
            "--rope: given 66; allowed: an even number of at most --head-dim - --v-in",
        ),
        ("--head-dim 576 --v-in-k 577", "--v-in-k: given 577 with --head-dim 576; allowed: at most --head-dim, which is at most"),
        ("--head-dim 577 --v-in-k 512", "--v-in-k: given 512 with --head-dim 577"),
        ("--qk-norm bf16", "--qk-norm: given without --rope; allowed: with --rope"),
        ("--rope-interleaved", "--rope-interleaved: given without --rope"),
        ("--rope --as vllm", "--rope: given with --as vllm; allowed: nothing"),
        ("--select columns --as vllm", "--select: given with --as vllm; allowed: nothing"),
        ("--select rows", "--select: given 'rows'; allowed: positions, columns"),
        ("--select columns --mask", "--select: given with --spans, --mask or --form context; allowed: full form"),
        ("--select positions --form context", "--select: given with"),
    ],
)
def test_wrong_rotations_and_selections(refused, flags: str, message: str) -> None:
    assert message in " ".join(refused(flags).split())


# --- The layers of known models -----------------------------------------------------------------------------------------------


def test_like_explains_each_kind_of_layer(explain, asked) -> None:
    code, text = explain("--like gemma-4 --arch h100 --kv-dtype fp8")
    heads = [line for line in text.splitlines() if line.startswith("gemma-4")]
    assert (code, heads) == (0, ["gemma-4-31b: 50 layers with a window of 1024", "gemma-4-31b: 10 layers without a window"])
    found = asked("--like gemma-4 --arch h100 --kv-dtype fp8 --operation step --page-size 64")
    kinds = [(kind["layers"], kind["problem"], len(kind["related"])) for kind in found["kinds"]]
    shapes = [(n, p["q_heads"], p["kv_heads"], p["head_dim"], p["window"], p["page_size"], p["format"]) for n, p, _ in kinds]
    assert shapes == [(50, 32, 16, 256, [1023, 1023], 64, "e4m3fn"), (10, 32, 4, 512, [None, None], 64, "e4m3fn")]
    assert [related for *_, related in kinds] == [1, 1]


@pytest.mark.parametrize(
    "name, model, features",
    [
        ("gpt-oss", "gpt-oss-120b", {"sinks": True, "softcap": False, "head_dim": 64}),
        ("google/gemma-2-9b-it", "gemma-2-9b", {"sinks": False, "softcap": True, "head_dim": 256}),
        ("qwen3", "qwen3-32b", {"q_heads": 64, "kv_heads": 8, "head_dim": 128}),
        ("Qwen3 MoE", "qwen3-235b-a22b", {"q_heads": 64, "kv_heads": 4}),
        ("qwen-3-32b", "qwen3-32b", {"q_heads": 64}),
        ("gptoss", "gpt-oss-120b", {"sinks": True}),
        ("meta-llama/Llama3-8B-Instruct", "llama-3-8b", {"q_heads": 32}),
        ("Qwen/Qwen3-8B", "qwen3-8b", {"q_heads": 32, "kv_heads": 8, "window": [None, None]}),
    ],
)
def test_like_has_the_features_of_a_model(asked, name: str, model: str, features: dict[str, Any]) -> None:
    found = asked(f"--like {name.replace(' ', '_')}")
    assert found["like"] == model
    for kind in found["kinds"]:
        assert {field: kind["problem"][field] for field in features} == features


def test_like_a_model_with_chunks(asked) -> None:
    chunked, full = asked("--like llama-4 --max-kv-len 100000 --max-q-len 9000")["kinds"]
    assert (chunked["chunk"], chunked["extent"]["max_kv_len"], chunked["extent"]["max_q_len"]) == (8192, 8192, 8192)
    assert (full["chunk"], full["extent"]["max_kv_len"], full["extent"]["max_q_len"]) == (None, 100000, 9000)


def test_every_known_name_is_explained(asked) -> None:
    for name in NAMES:
        assert asked(f"--like {name} --arch h100")["kinds"], name


@pytest.mark.parametrize("given", ["--q-heads 8", "--window 5", "--sinks", "--as vllm", "call.safetensors"])
def test_like_refuses_what_the_model_has(refused, given: str) -> None:
    said = refused(f"--like gpt-oss {given}")
    assert "with --like gpt-oss; allowed: nothing" in said or "call.safetensors" in said


def test_like_names_and_suggests(refused, explain) -> None:
    for given, meant in (("gema-4", "gemma-4"), ("qwen", "qwen-3"), ("deepseek-v4", "deepseek-v3"), ("Google/Gemma-9", "gemma-4")):
        assert f"did you mean {meant}" in refused(f"--like {given}")
    assert len({name.replace("-", "") for name in NAMES}) == len(set(NAMES)), "hyphens do not tell names apart"
    text = " ".join(explain("--help")[1].split())
    assert all(name in text for name in FAMILIES)
