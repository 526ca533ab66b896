"""`deepfast selfcheck`: faults in processes of their own, times, and the command."""

import json

import pytest
import torch

from deepfast import backend, ops
from deepfast.cases import case as cases
from deepfast.cases import check, sizes, worker
from deepfast.cli import main
from deepfast.selfcheck import full, store
from tests.selfcheck import faults

CPU, FP32 = torch.device("cpu"), torch.float32
CASE = "odd width, rows apart, residual, dropout"
JOB = {"op": "layer_norm", "by": ["triton"], "dtype": "float32", "device": "cpu"}


SAID = {
    "wrong": "output 0: error 1, allowed",
    "not_finite": "output 0: not finite",
    "unsteady": "output 0: another run gave other bits",
    "raises": "RuntimeError: broken on purpose",
    "memory": "OutOfMemoryError: Tried to allocate",
}


@pytest.mark.parametrize("fault", [None, *SAID])
def test_a_fault_is_named(device, monkeypatch, fault):
    monkeypatch.setattr(sizes, "cases", faults.one)
    if fault is not None:
        broken = faults.broken(backend.launchers, ("triton",), getattr(faults, fault))
        monkeypatch.setattr(backend, "launchers", broken)
    said = []
    result = worker.result_of(JOB, lambda **line: said.append(line))
    assert said == [{"by": "triton", "case": CASE}]
    if fault is None:
        assert result["error"] is None
    else:
        assert result["error"].startswith(f"{CASE}: {SAID[fault]}")
    assert result.get("memory", False) == (fault == "memory")


def test_a_kernel_is_timed_beside_torch(device, monkeypatch):
    """The measurement itself, on the interpreter."""
    monkeypatch.setattr(sizes, "WIDTHS", (8 * 128 - 3 * 128,))
    job = JOB | {"by": ["triton", "reference"], "timed": True}
    result = worker.result_of(job, lambda **line: None)
    assert result["error"] is None
    assert set(result["seconds"]["8"]) == {"triton", "reference"}
    assert min(result["seconds"]["8"].values()) > 0


@pytest.mark.slow
def test_a_step_is_timed_beside_the_plain_residual(device):
    job = {"op": full.STEP, "by": ["deepfast"], "dtype": "bfloat16", "device": "cpu"}
    said = []
    result = worker.result_of(job, lambda **line: said.append(line["by"]))
    assert result["error"] is None
    assert said[1:] == list(result["seconds"]) == ["residual", "dlcl", "attnres"]
    full.say_step({"error": None, "seconds": {"residual": 0.1, "dlcl": 0.102}}, said.append)
    assert said[-1] == "training step, bf16, over the plain residual's 100.0 ms: dlcl 1.020"


def in_a_process(fault, seconds=120, dtype="float32"):
    prelude = f"from tests.selfcheck import faults; faults.install(('triton',), {fault!r})"
    return full.run(JOB | {"dtype": dtype}, seconds, prelude)


@pytest.mark.slow
def test_a_crash_or_a_hang_ends_its_process_alone(device):
    aborted = in_a_process("abort_in_float32")
    assert aborted["error"].startswith(f"{CASE}: the process ended by SIGABRT")
    assert not aborted["memory"]
    assert in_a_process("abort_in_float32", dtype="float16")["error"] is None
    assert in_a_process("hang", 20)["error"] == f"{CASE}: no answer within 20 s"
    # The system kills a process where the machine has no memory left.
    assert in_a_process("killed")["memory"]


def test_a_process_that_does_not_start_blames_no_kernel(device):
    with pytest.raises(RuntimeError, match="status 1: no room for a context"):
        full.run(JOB, prelude="raise SystemExit('no room for a context')")


def test_a_kernel_that_writes_to_an_operand_is_named():
    def function(x, bias, *, backend):
        y = ops.layer_norm(x, None, bias, backend=backend)
        if backend == "cpu":
            # Past autograd, as a kernel does.
            bias.data.add_(1)
        return y

    given = {"x": cases.Computed(torch.randn(3, 8)), "bias": cases.Computed(torch.randn(8))}
    case = cases.Case(name="writes", op="layer_norm", operands=given, run=function)
    said = check.fault(case, "cpu", torch.float32, CPU)
    assert said.startswith("writes: operand bias: error ")


@pytest.fixture
def start(device, monkeypatch):
    """Processes whose results are given: errors by backend or (backend, dtype), and a time."""
    errors: dict = {}

    def run(job):
        by, dtype = job["by"][0], job["dtype"]
        if job["op"] == full.STEP:
            return {"error": "no step", "by": by, "memory": True}
        error = errors.get((by, dtype), errors.get(by))
        if "timed" not in job:
            return {"error": error, "by": by, "memory": "memory" in str(error)}
        if late := errors.get("times"):
            return {"error": late, "by": by}
        return {"error": None, "seconds": {"7": dict.fromkeys(job["by"], 0.5)}}

    monkeypatch.setattr(full, "run", run)
    return errors


def command(*words):
    return main(["selfcheck", "--device", "cpu", "--op", "layer_norm", *words])


def test_the_command_checks_prints_and_keeps(start, capsys, tmp_path):
    assert command("--op", "boundary", "--write", str(tmp_path / "results.json")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cpu: kernels to check, by op, backend and dtype: 6"
    # A step that fails for memory is no fault of a kernel.
    assert lines[1] == "training step: no step"
    assert lines[2].startswith(("boundary triton ", "layer_norm triton "))
    assert "layer_norm triton float32: right" in lines
    assert "layer_norm bfloat16, size 7: triton 500000 us, reference 500000 us" in lines
    assert not any(line.startswith("layer_norm float16, size") for line in lines)
    assert lines[-1] == f"kept in {store.of(CPU).path}"
    assert json.loads((tmp_path / "results.json").read_text())["lines"] == lines[:-1]
    assert main(["info", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "    layer_norm triton float32: full selfcheck on 2" in text
    assert "\nlayer_norm: triton\n" in text


def test_a_wrong_kernel_does_not_serve(start, capsys):
    start["triton", "float32"] = "broken on purpose"
    assert command("--json") == 1
    found = json.loads(capsys.readouterr().out)["lines"]
    assert "layer_norm triton float32: broken on purpose" in found
    assert not any(full.STEP in line for line in found)
    assert "NOT USED: broken on purpose" in "".join(store.of(CPU).lines())
    chosen = [backend.chosen("layer_norm", None, CPU, d, 8) for d in (FP32, torch.bfloat16)]
    assert chosen == ["cpu", "triton"]
    start.clear()
    assert command() == 0
    assert backend.chosen("layer_norm", None, CPU, FP32, 8) == "triton"


def test_a_second_run_checks_what_has_no_result(start, capsys, monkeypatch):
    run, ran, most = full.run, [], 1

    def counted(job):
        # All but the first process end with the program.
        if len(ran) == most:
            raise KeyboardInterrupt
        ran.append(job["dtype"])
        return run(job)

    monkeypatch.setattr(full, "PROCESSES", 1)
    monkeypatch.setattr(full, "run", counted)
    assert command() == 130
    # What a training step uses most comes first.
    assert ran == ["bfloat16"]
    most = None
    store.forget()
    assert command() == 0
    assert "layer_norm triton bfloat16: right on 20" in capsys.readouterr().out
    checked = ["bfloat16", "float32", "float16"]
    assert ran[:3] == checked
    ran.clear()
    assert command("--again") == 0
    assert ran[:3] == checked


def test_what_memory_or_times_say(start, capsys):
    start["triton"] = "out of memory"
    assert command() == 1
    assert "not an error of the kernel: no result is stored" in capsys.readouterr().out
    assert not store.of(CPU).full
    start.clear()
    start["times"] = "size 4096: the process ended by SIGSEGV"
    assert command() == 1
    assert "SIGSEGV" in store.of(CPU).wrong["layer_norm", "triton", "bfloat16"]


@pytest.mark.parametrize(("words", "said"), [
    (("--op", "softmax"), "--op: expected one of layer_norm, "),
    (("--device", "tpu9"), "--device: expected a GPU such as cuda:1 (elsewhere"),
    (("--device", "cpu"), "elsewhere there is nothing to check"),
    (("--device", "cuda:99"), "--device: expected a device of this machine, got 'cuda:99'"),
])  # fmt: skip
def test_the_command_refuses_in_one_sentence(capsys, words, said):
    assert main(["selfcheck", *words]) == 1
    assert said in capsys.readouterr().err
