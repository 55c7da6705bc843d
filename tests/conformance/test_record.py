"""Recording: a call is restored exactly, with only the pages that it needs, and other calls are not affected."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import quire
from quire import launch
from quire.cache.format import FORMATS
from quire.cli import main
from quire.conformance.recording import tensor_file
from quire.conformance.recording.record import Recorder, load
from quire.conformance.recording.replay import here, then
from quire.contract.call import Call
from quire.contract.check import is_watched
from quire.platform import Platform

CACHES: dict[str, dict[str, Any]] = {
    "nhd bf16": {"dtype": torch.bfloat16},
    "vllm_x e4m3fn": {"dtype": torch.float8_e4m3fn, "layout": "vllm_x", "k_scale": 0.5, "v_scale": 2.0},
    "aiter e4m3fnuz": {"dtype": torch.float8_e4m3fnuz, "layout": "aiter", "x": 4},
    "hnd int8 token": {"dtype": torch.int8, "layout": "hnd", "scales": "token"},
    "vllm_joint fp16": {"dtype": torch.float16, "layout": "vllm_joint"},
    "hnd nvfp4": {"format": "nvfp4", "layout": "hnd", "v_scale": 0.01, "dtype": None},
    "e5m2 bytes": {"dtype": torch.uint8, "format": "e5m2"},
}


class Program:
    """Two sequences in a pool of many pages, and a step of theirs to record."""

    def __init__(self, device: str = "cpu", **how: Any):
        torch.manual_seed(0)
        self.pool = quire.PagePool(pages=32, page_size=4, device=device)
        self.cache = quire.KVCache.allocate(self.pool, kv_heads=2, head_dim=16, **({"dtype": torch.bfloat16} | how))
        a, b = self.pool.sequence(), self.pool.sequence()
        self.q, self.k, self.v = torch.randn(17, 8, 16).bfloat16().to(device).split((4, 2, 2), 1)
        quire.step(self.q, self.k, self.v, self.cache, self.pool.step({a: 10, b: 7}))
        self.batch = self.pool.step({a: 1, b: 3})

    def step(self, options: quire.Options | None = None, **how: Any) -> Any:
        return quire.step(self.q[:4], self.k[:4], self.v[:4], self.cache, self.batch, options, **how)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "call.safetensors"


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_a_step_is_restored(cache: dict[str, Any], file: Path) -> None:
    program = Program(**cache)
    options = quire.Options(sinks=torch.randn(4), softcap=30.0, window=(8, 0))
    with quire.record(file):
        out, lse = program.step(options, lse=True)
    (call,) = load(file)
    assert call.metadata["operation"] == "step"
    assert call.cache.format is FORMATS[program.cache.format.name] and call.cache.layout is program.cache.layout
    for got, want in zip((call.out, call.lse), (out, lse)):
        assert torch.equal(got, want)
    for got, want in zip(call.replay(), (out, lse)):
        assert torch.equal(got, want)
    assert call.violations() == [] and call.lost_tokens() == []
    assert call.problem.features == ("softcap", "sinks", "lse", "window")


def test_context_form_and_its_types_are_restored(file: Path) -> None:
    program = Program()
    batch = quire.Batch(program.batch.page_table.long(), program.batch.kv_lens.long(), program.batch.q_starts, max_kv_len=64)
    causal = torch.tensor([True, False])
    with quire.record(file):
        out = quire.attend(program.q[:4], program.cache, batch, quire.Options(causal=causal), new=(program.k[:4], program.v[:4]))
    (call,) = load(file)
    assert call.metadata["operation"] == "attend" and call.new is not None
    assert call.batch.page_table.dtype is torch.int64 and call.batch.q_starts.dtype is torch.int32 and call.batch.max_kv_len == 64
    assert torch.equal(call.replay()[0], out)


def test_only_needed_pages_are_saved(file: Path) -> None:
    program = Program()
    with quire.record(file):
        program.step(quire.Options(window=2))
    (call,) = load(file)
    # 11 tokens of which the last 2 are seen, and 10 of which the last 4 are: columns 2, and 1 to 2.
    assert call.batch.page_table.tolist() == [[-1, -1, 0], [-1, 1, 2]]
    assert call.cache.pages == 3 and call.metadata["pages"] == {"saved": 3, "of": 32}
    assert torch.equal(call.cache.k, program.cache.k[call.page_ids])
    with quire.record(file, pages="all"):
        program.step(quire.Options(window=2))
    assert load(file)[0].cache.pages == 32
    assert torch.equal(load(file)[0].batch.page_table, program.batch.page_table)


def test_the_number_of_calls_is_limited(file: Path) -> None:
    program = Program()
    with quire.record(file, calls=2):
        outs = [quire.attend(program.q[i : i + 4], program.cache, program.batch) for i in range(3)]
    assert [torch.equal(call.out, out) for call, out in zip(load(file), outs)] == [True, True]
    assert len(load(file)) == 2


def test_a_call_that_violates_the_contract_is_saved(file: Path) -> None:
    program = Program()
    program.batch.page_table[1, 1] = 71
    with pytest.raises(quire.ContractError), quire.record(file):
        program.step()
    (call,) = load(file)
    assert call.out is None and "table" in call.metadata["error"]
    assert [(v.rule, v.seq) for v in call.violations()] == [("table", 1)]
    assert int(call.batch.page_table[1, 1]) >= call.cache.pages
    assert main(["check", str(file)]) == 1


def test_a_call_that_raises_is_saved(file: Path) -> None:
    program = Program()
    q, recorder = program.q[:4], Recorder(str(file), 1, "needed")

    def broken(*call: Any) -> None:
        raise RuntimeError("out of registers")

    launcher = recorder.around("attend", broken, quire.explain(q, program.cache, program.batch))
    with pytest.raises(RuntimeError):
        launcher(Call(program.cache, program.batch, q, out=torch.zeros_like(q)))
    assert [call.metadata["error"] for call in load(file)] == ["RuntimeError: out of registers"]


def test_a_lost_token_is_detected(file: Path) -> None:
    program = Program()
    with quire.record(file):
        program.step()
    (call,) = load(file)
    call.cache.k[call.batch.page_table[1, 2], 1] = 0  # position 9 of sequence 1, its last new token
    assert call.lost_tokens() == [3]


def test_violations_of_the_ledger_are_saved(file: Path) -> None:
    program = Program(ledger=True)
    with pytest.raises(quire.ContractError), quire.record(file):
        quire.attend(program.q[:4], program.cache, program.batch)  # nobody has written the new tokens
    assert {v.rule for v in load(file)[0].violations()} == {"residency"}


def test_a_recording_without_calls_raises(file: Path) -> None:
    with pytest.raises(quire.QuireError, match="this thread made no call of attend or step"), quire.record(file):
        pass
    assert not file.exists()


def test_a_capture_is_refused_before_anything_is_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program()
    before = program.cache.k.clone()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(quire.QuireError, match="CUDA graph is being captured"), quire.record(file):
        program.step()
    assert torch.equal(program.cache.k, before)
    with pytest.raises(quire.QuireError, match="CUDA graph is being captured"), quire.record(file):
        quire.attend(program.q[:4], program.cache, program.batch)
    assert not file.exists()


@pytest.mark.parametrize("how, argument", [({"calls": 0}, "calls"), ({"pages": "some"}, "pages")])
def test_wrong_arguments_are_named(how: dict[str, Any], argument: str, file: Path) -> None:
    with pytest.raises(quire.ArgumentError, match=f"^{argument}: "), quire.record(file, **how):
        pass


def test_calls_outside_the_context_are_not_recorded(file: Path) -> None:
    assert not is_watched()
    recorder = Recorder(str(file), 1, "needed")
    recorder.closed = True
    told: list[Any] = []
    program = Program()
    q, decision = program.q[:4], quire.explain(program.q[:4], program.cache, program.batch)
    call = Call(program.cache, program.batch, q, out=torch.empty_like(q), k=program.k[:4], v=program.v[:4])
    # Who keeps a launcher may keep one that was made during a recording.
    for operation in ("write", "attend"):
        recorder.around(operation, told.append, decision)(call)
    assert told == [call, call] and not file.exists()
    assert recorder.around("audit", told.append, decision) == told.append


def test_launchers_of_a_recording_are_not_cached(file: Path) -> None:
    """A call before a recording, one within it and one behind it: the second alone is saved, though all have one launcher."""
    program = Program()
    quire.attend(program.q[:4], program.cache, program.batch)
    with quire.record(file, calls=5):
        quire.attend(program.q[:4], program.cache, program.batch)
    quire.attend(program.q[:4], program.cache, program.batch)
    assert len(load(file)) == 1
    launchers = [launcher for known in launch._known.values() for launcher in known.launchers.values()]
    assert launchers and not any(getattr(launcher, "__closure__", None) for launcher in launchers)


def test_checked_calls_are_recorded_and_recorded_calls_checked(file: Path) -> None:
    program = Program()
    with quire.record(file), quire.checked():
        program.step()
    assert len(load(file)) == 1
    low = quire.Batch(program.batch.page_table, program.batch.kv_lens, program.batch.q_starts, max_kv_len=1)
    with pytest.raises(quire.ContractError), quire.checked(), quire.record(file):
        quire.attend(program.q[:4], program.cache, low)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:100], lambda raw: raw[:-1], lambda raw: b"PK" + raw], ids=["head", "tail", "zip"]
)
def test_a_damaged_file_is_refused(damage: Any, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensor_file.save(file, {"x": torch.arange(100)}, {"version": 1, "calls": []})
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(SystemExit):
        main(["check", str(file)])
    assert "a file that quire.record wrote" in capsys.readouterr().err


TYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    *(FORMATS[n].dtype for n in ("e4m3fn", "e4m3fnuz", "e5m2")),
]


def test_tensors_are_restored_bit_by_bit(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype) for dtype in TYPES}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(1.5), "strided": torch.arange(12).view(3, 4).T}
    tensor_file.save(tmp_path / "t", tensors, {"words": "ä"})
    back, metadata = tensor_file.load(tmp_path / "t")
    assert metadata["words"] == "ä" and set(back) == set(tensors)
    assert int.from_bytes((tmp_path / "t").read_bytes()[:8], "little") % 8 == 0  # readers that map the file want it aligned
    for name, tensor in tensors.items():
        assert back[name].dtype is tensor.dtype and back[name].shape == tensor.shape
        assert torch.equal(back[name].float(), tensor.float()) and back[name].is_contiguous()


def test_a_file_of_the_hand_written_writer_is_read(tmp_path: Path) -> None:
    """Releases before safetensors was used: the header is padded with spaces, 8-bit floats are bytes that the metadata name."""
    k, lens = torch.randn(2, 3).to(torch.float8_e5m2), torch.tensor([7, 9])
    metadata = {"version": 1, "calls": [], "float8": {"0.k_pages": "torch.float8_e5m2"}}
    header = json.dumps(
        {
            "0.kv_lens": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]},
            "0.k_pages": {"dtype": "U8", "shape": [2, 3], "data_offsets": [16, 22]},
            "__metadata__": {"format": "pt", "quire": json.dumps(metadata)},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    data = lens.numpy().tobytes() + k.view(torch.uint8).numpy().tobytes()
    (tmp_path / "t").write_bytes(len(header).to_bytes(8, "little") + header + data)
    back, kept = tensor_file.load(tmp_path / "t")
    assert torch.equal(back["0.kv_lens"], lens) and kept == {"version": 1, "calls": []}
    assert back["0.k_pages"].dtype is k.dtype and torch.equal(back["0.k_pages"].float(), k.float())


def test_a_missing_safetensors_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for use in (lambda: tensor_file.load(tmp_path / "t"), lambda: tensor_file.save(tmp_path / "t", {}, {})):
        with pytest.raises(quire.QuireError, match="install the package safetensors"):
            use()


def test_check_and_explain_read_a_file(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program()
    with quire.record(file):
        program.step()
    assert main(["check", str(file)]) == 0
    assert "it keeps the contract" in capsys.readouterr().out
    assert main(["check", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calls"][0]["holds"] is True
    assert main(["explain", str(file), "--arch", "sm90"]) == 0
    text = capsys.readouterr().out
    assert "as it was decided on cpu" in text and "chosen     native" in text and "on nvidia sm90" in text
    for machine, same in ((Platform.detect("cpu"), True), (Platform.named("sm90"), False)):
        # A machine with a GPU decides for that, and the call was made on the CPU.
        monkeypatch.setattr(Platform, "detect", lambda *_, machine=machine: machine)
        assert main(["explain", str(file), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)["calls"][0]
        assert (answer["there"]["chosen"] == answer["here"]["chosen"]) is same
        assert answer["here"]["chosen"] is not None


def altered(file: Path, change: Any) -> None:
    """The file of a program whose kernel gave something else."""
    tensors, metadata = tensor_file.load(file)
    change(tensors)
    tensor_file.save(file, tensors, metadata)


def test_diagnose_of_a_correct_call(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = Program()
    with quire.record(file):
        program.step(lse=True)
    assert main(["diagnose", str(file), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [verdict["status"] for verdict in answer["verdicts"]] == ["correct", "correct"] and answer["correct"]
    assert main(["diagnose", str(file), "--kernel", "torch"]) == 0
    assert "recorded on cpu by " in capsys.readouterr().out


def test_diagnose_names_the_fault_of_the_recorded_kernel(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program's kernel took a window for one key less: what it gave is in the file, and here the call is right."""
    program = Program()
    with quire.record(file):
        program.step(quire.Options(window=5))
    narrow = load(file)[0]
    wrong = quire.attend(narrow.q, narrow.cache, narrow.batch, quire.Options(window=4))
    altered(file, lambda tensors: tensors["0.out"].copy_(wrong))
    assert main(["diagnose", str(file), "--json"]) == 1
    there, replayed = json.loads(capsys.readouterr().out)["verdicts"]
    assert (there["status"], replayed["status"]) == ("wrong", "correct")
    assert "window" in there["finding"]["fault"] and there["finding"]["distance"] <= 1
    assert main(["diagnose", str(file)]) == 1
    assert there["finding"]["fault"] in capsys.readouterr().out


def test_diagnose_reports_unknown_without_a_matching_fault(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = Program()
    with quire.record(file):
        program.step()
    altered(file, lambda tensors: tensors["0.out"][2, 1, 3:7].mul_(-3).add_(0.7))
    assert main(["diagnose", str(file), "--json"]) == 1
    there, _ = json.loads(capsys.readouterr().out)["verdicts"]
    assert there["finding"]["fault"] == "unknown" and there["finding"]["where"]["row"] == 2 and there["wrong"] == 4


@pytest.mark.parametrize(
    "argv, says",
    [
        ([], "FILE: given nothing; allowed: a file that quire.record saved"),
        (["FILE", "--call", "3"], "--call: given 3; allowed: 0 to 0"),
    ],
)
def test_diagnose_refuses_wrong_arguments(argv: list[str], says: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = Program()
    with quire.record(file):
        program.step()
    with pytest.raises(SystemExit):
        main(["diagnose", *(str(file) if word == "FILE" else word for word in argv)])
    assert says in capsys.readouterr().err


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_a_call_of_a_gpu_is_replayed_on_the_cpu(cache: dict[str, Any], file: Path) -> None:
    program = Program(**cache, device="cuda")
    with quire.record(file):
        program.step(quire.Options(softcap=30.0, window=(8, 0)), lse=True)
    (call,) = load(file)
    assert call.metadata["device"].startswith("cuda") and call.q.device.type == "cpu" and call.violations() == []
    assert call.lost_tokens() == []
    assert [verdict.status for verdict in (then(call), here(call), here(load(file, "cuda")[0]))] == ["correct"] * 3


@needs_gpu
def test_a_real_capture_is_refused(file: Path) -> None:
    program = Program(device="cuda")
    program.step()
    with (
        pytest.raises(quire.QuireError, match="CUDA graph is being captured"),
        quire.record(file),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        program.step()
