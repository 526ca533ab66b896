"""Kernels broken on purpose are caught and named, and the next backend serves a right answer."""

import io
import json

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend, ops
from deepfast.cases import case as cases
from deepfast.cases import check, sizes, worker
from deepfast.proof import known, prove
from deepfast.proof import table as tables
from deepfast.proof.prove import NoWorker, Runner
from tests.proof import faults

CPU = torch.device("cpu")


class InProcess(Runner):
    """Runs the items here, one after another: for kernels that do not end the process."""

    runs = 0

    def run(self, op, items):
        type(self).runs += 1
        job = {"op": op, "device": "cpu", "thorough": False, "rounds": 1, "items": items}
        out = io.StringIO()
        worker.Worker(job, out).run()
        for line in map(json.loads, out.getvalue().splitlines()):
            if "done" in line:
                yield items[line["done"]], line


@pytest.fixture
def proofs(device, monkeypatch):
    """Kernels are proved in this process, by one case; several workers would share its seed."""
    monkeypatch.setattr(sizes, "cases", faults.one)
    monkeypatch.setattr(known, "make_runner", lambda device: InProcess(device, workers=1))
    monkeypatch.setattr(InProcess, "runs", 0)
    return InProcess


@pytest.fixture
def broken(monkeypatch):
    """``broken(by, fault)`` breaks layer_norm on this backend, in this process."""

    def install(by, fault):
        wrapped = faults.broken(backend._launchers, (by,), getattr(faults, fault))
        monkeypatch.setattr(backend, "_launchers", wrapped)

    return install


@pytest.fixture
def served():
    """``served()``: the backend that layer_norm took by itself, after its answer was checked."""

    def run():
        x, w, b = torch.randn(4, 17), torch.randn(17), torch.randn(17)
        with backend.record() as seen:
            y = ops.layer_norm(x, w, b)
        expected = F.layer_norm(x.double(), (17,), w.double(), b.double())
        torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)
        # A proof in this process is seen as well, and comes before.
        return seen[-1][1]

    return run


def errors():
    return known.entry("layer_norm", CPU, "float32", backend.cuda_build())["errors"]


CASE = "odd width, rows apart, residual, dropout"
SAID = {
    "wrong": f"{CASE}: output 0: error 1, allowed",
    "odd": f"{CASE}: output 0: error ",
    "unwritten": f"{CASE}: output 0: not finite",
    "unsteady": f"{CASE}: output 0: another run gave other bits",
    "raises": f"{CASE}: RuntimeError: broken on purpose",
    "memory": f"{CASE}: out of memory: Tried to allocate 9.00 GiB",
}


@pytest.mark.parametrize("fault", [None, *SAID])
@pytest.mark.parametrize("by", ["triton", "cuda"])
def test_a_broken_kernel(emulated, proofs, broken, served, monkeypatch, by, fault):
    """It is named, and the next backend serves; a right one serves itself."""
    monkeypatch.setitem(backend.PROVABLE, "cpu", (by,))
    if fault is None:
        assert served() == by
        assert errors() == {by: None}
        return
    broken(by, fault)
    assert [served(), served()] == ["cpu", "cpu"]
    assert errors()[by].startswith(SAID[fault])
    reason = backend.explain("layer_norm", "cpu", torch.float32)[by]
    assert reason.startswith(f"failed its proof here ({SAID[fault]}")


def test_a_proof_without_memory_is_not_kept(
    emulated, proofs, broken, served, cache, monkeypatch, caplog
):
    """It is tried again by the next process, and here the next backend serves."""
    with monkeypatch.context() as patch:
        wrapped = faults.broken(backend._launchers, ("cuda",), faults.memory)
        patch.setattr(backend, "_launchers", wrapped)
        assert [served(), served()] == ["triton"] * 2
    runs = proofs.runs
    assert caplog.text.count("memory ran out while layer_norm was proved") == 1
    assert "kept in this process" in caplog.records[-1].getMessage()
    assert not list(cache.glob("*.json"))
    backend.forget()
    assert served() == "cuda"
    assert proofs.runs == 2 * runs
    assert len(list(cache.glob("*.json"))) == 1


def test_memory_that_runs_out_again_keeps_what_was_proved(proofs, broken):
    known.first_use("layer_norm", CPU, backend.provable("layer_norm", CPU), None)
    table = known.table(CPU, None)
    broken("triton", "memory")
    backend._choices.clear()
    known.run(table, {"layer_norm": {"triton": ["float32"]}}, CPU)
    assert table.lost["layer_norm"]["float32"]["errors"]["triton"].startswith(SAID["memory"])
    assert errors() == tables.load(table.key).entry("layer_norm", "float32")["errors"]
    assert errors() == {"triton": None}


# ---- faults that end a process -------------------------------------------------------------------


def results(fault, silence, *dtypes):
    """(error, whether memory ran out) of Triton's kernel in a worker, by dtype."""
    prelude = f"from tests.proof import faults; faults.install(('triton',), {fault!r})"
    runner = Runner(CPU, silence=silence, prelude=prelude)
    items = [{"dtype": dtype, "backend": "triton"} for dtype in dtypes]
    found = runner.run("layer_norm", items)
    return {item["dtype"]: (said["error"], said.get("memory", False)) for item, said in found}


@pytest.mark.exhaustive
def test_a_crash_is_of_its_dtype_alone(device):
    """Another process goes on with the dtypes that are left."""
    found = results("abort_in_float32", 120, "float32", "float16")
    assert list(found) == ["float32", "float16"]
    error, memory = found["float32"]
    assert error.startswith(f"{CASE}: the process ended by SIGABRT")
    assert not memory
    assert found["float16"][0] is None


@pytest.mark.exhaustive
def test_a_hang_is_ended_and_a_worker_that_the_system_killed_had_no_memory(device):
    assert results("hang", 1, "float32")["float32"] == (f"{CASE}: no answer within 1 s", False)
    assert results("killed", 120, "float32")["float32"][1]


def test_a_worker_that_does_not_start_blames_no_kernel(device, served, cache, caplog, monkeypatch):
    """Its end is told, it is not kept, and the next backend serves."""
    monkeypatch.setattr(
        known, "make_runner",
        lambda device: Runner(device, prelude="raise SystemExit('no room for a context')"),
    )  # fmt: skip
    with pytest.raises(NoWorker):
        list(known.make_runner(CPU).run("layer_norm", [{"dtype": "float32", "backend": "triton"}]))
    assert [served(), served()] == ["cpu", "cpu"]
    assert "the process ended with status 1: no room for a context" in caplog.text
    assert not list(cache.glob("*.json"))


def test_every_op_has_cases():
    assert set(sizes.KERNELS) == set(backend.OPS)


# ---- times ---------------------------------------------------------------------------------------


class Timed:
    """A runner whose measurements are given: seconds by width and backend, or an error."""

    device = CPU

    def __init__(self, seconds):
        self.seconds = seconds

    def run(self, op, items):
        for item in items:
            given = {by: self.seconds[item["width"]][by] for by in item["backends"]}
            failed = [by for by, s in given.items() if isinstance(s, str)]
            if failed:
                error = given[failed[0]]
                yield item, {"backend": failed[0], "error": error, "memory": "memory" in error}
            else:
                yield item, {"seconds": given}


def timed(seconds, errors):
    entries = {d: {"errors": dict(e), "seconds": {}} for d, e in errors.items()}
    widths = tables.widths("layer_norm", "cpu")
    short = prove.time(Timed(dict(zip(widths, seconds, strict=True))), "layer_norm", entries)
    assert short == any("memory" in str(seconds) for seconds in seconds)
    return entries, widths


def test_the_fastest_serves_at_its_width():
    fine = {"cuda": None, "triton": None}
    entries, (a, b, c) = timed(
        [{"cuda": 1.0, "triton": 2.0, "reference": 3.0},
         {"cuda": 2.0, "triton": 1.0, "reference": 3.0},
         {"cuda": 2.0, "triton": 3.0, "reference": 1.0}],
        {"float32": fine, "bfloat16": fine, "float16": {"cuda": "wrong", "triton": None}},
    )  # fmt: skip
    for width, name in ((1, "cuda"), (a, "cuda"), (a + 1, "triton"), (b, "triton"),
                        (c, "reference"), (9 * c, "reference"), (None, "cuda")):  # fmt: skip
        assert tables.fastest(entries["bfloat16"], width) == name
    # float16 has the times of bfloat16, without the backend that is wrong in it.
    assert tables.fastest(entries["float16"], a) == "triton"
    assert tables.fastest(entries["float16"], c) == "reference"


@pytest.mark.parametrize("said", ["width 4096: the process ended by SIGSEGV", "out of memory"])
def test_a_backend_that_fails_while_it_is_timed_is_not_proved(said):
    entries, (a, _, c) = timed(
        [{"cuda": 1.0, "triton": 2.0, "reference": 3.0},
         {"cuda": 1.0, "triton": 2.0, "reference": 3.0},
         {"cuda": said, "triton": 2.0, "reference": 3.0}],
        {"float32": {"cuda": None, "triton": None}},
    )  # fmt: skip
    assert entries["float32"]["errors"] == {"cuda": said, "triton": None}
    assert {tables.fastest(entries["float32"], width) for width in (a, c)} == {"triton"}


def test_a_kernel_is_timed_beside_torch(proofs):
    """The measurement itself, on the interpreter."""
    job = {"dtype": "float32", "width": 8, "backends": ["triton", "reference"]}
    ((_, result),) = proofs(CPU).run("layer_norm", [job])
    assert set(result["seconds"]) == {"triton", "reference"}
    assert min(result["seconds"].values()) > 0


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
