"""Kernels broken on purpose are caught and named, and the next backend serves a right answer."""

import pytest
import torch
import torch.nn.functional as F

from deepfast import backend, ops
from deepfast.cases import case as cases
from deepfast.cases import check, sizes
from deepfast.proof import known
from deepfast.proof import table as tables
from deepfast.proof.prove import Limits, NoWorker, Runner
from tests.proof import faults

CPU = torch.device("cpu")


@pytest.fixture
def served(monkeypatch):
    """``served()``: the backend that layer_norm took by itself, after its answer was checked."""

    def run(dtype=torch.float32):
        x, w, b = torch.randn(4, 17), torch.randn(17), torch.randn(17)
        with backend.record() as seen:
            y = ops.layer_norm(x.to(dtype), w, b)
        torch.testing.assert_close(
            y.double(), F.layer_norm(x.to(dtype).double(), (17,), w.double(), b.double()),
            rtol=1e-2, atol=1e-2,
        )  # fmt: skip
        # A proof in this process is seen as well, and comes before.
        return seen[-1][1]

    return run


def errors(dtype="float32"):
    return known.entry("layer_norm", CPU, dtype, backend.cuda_build())["errors"]


SAID = {
    "wrong": "odd width, rows apart, residual, dropout: output 0: error 1, allowed",
    "odd": "odd width, rows apart, residual, dropout: output 0: error ",
    "unwritten": "odd width, rows apart, residual, dropout: output 0: not finite",
    "unsteady": "odd width, rows apart, residual, dropout: output 0: another run gave other bits",
    "raises": "odd width, rows apart, residual, dropout: RuntimeError: broken on purpose",
    "memory": "odd width, rows apart, residual, dropout: out of memory: Tried to allocate 9.00 GiB",
}


@pytest.mark.parametrize("fault", [None, *SAID])
@pytest.mark.parametrize("by", ["triton", "cuda"])
def test_a_broken_kernel(emulated, device, broken, served, monkeypatch, caplog, by, fault):
    """It is named, and the next backend serves; a right one serves itself."""
    only_float32(monkeypatch)
    if by == "triton":
        monkeypatch.setitem(backend.PROVABLE, "cpu", ("triton",))
    if fault is not None:
        broken((by,), fault)
    next_one = {"triton": "cpu", "cuda": "triton"}[by]
    assert [served(), served()] == 2 * [by if fault is None else next_one]
    assert errors().get("triton" if by == "cuda" else None) is None
    if fault is None:
        assert errors()[by] is None
        first, last = (record.getMessage() for record in caplog.records)
        assert "layer_norm is used on cpu for the first time" in first
        assert f"{by} is proved" in last
        assert "kept in" in last
        return
    assert errors()[by].startswith(SAID[fault])
    reason = backend.explain("layer_norm", "cpu", torch.float32)[by]
    assert reason.startswith(f"failed its proof here ({SAID[fault]}")


def test_a_proof_without_memory_is_not_kept(
    emulated, device, broken, served, cache, monkeypatch, caplog
):
    """It is tried again by the next process, and here the next backend serves."""
    only_float32(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(
            backend, "_launchers", faults.broken(backend._launchers, ("cuda",), faults.memory)
        )
        assert [served(), served()] == ["triton"] * 2
    runs = device.runs
    assert caplog.text.count("memory ran out while layer_norm was proved") == 1
    assert "kept in this process" in caplog.records[-1].getMessage()
    assert not list(cache.glob("*.json"))
    backend.forget()
    assert served() == "cuda"
    assert device.runs == 2 * runs
    assert len(list(cache.glob("*.json"))) == 1


def test_memory_that_runs_out_again_keeps_what_was_proved(device, broken, monkeypatch, cache):
    only_float32(monkeypatch)
    known.first_use("layer_norm", CPU, backend.provable("layer_norm", CPU), None)
    table = known.table(CPU, None)
    broken(("triton",), "memory")
    backend._choices.clear()
    known.run(table, {"layer_norm": {"triton": ["float32"]}}, CPU)
    assert table.lost["layer_norm"]["float32"]["errors"]["triton"].startswith(SAID["memory"])
    assert errors() == tables.load(table.key).entry("layer_norm", "float32")["errors"]
    assert errors() == {"triton": None}


def only_float32(monkeypatch):
    whole = backend.provable
    monkeypatch.setattr(
        backend, "provable", lambda op, at: {by: ["float32"] for by in whole(op, at)}
    )


# ---- faults that end a process -------------------------------------------------------------------


def prelude(names, fault):
    return f"from tests.proof import faults; faults.install({names}, {fault!r})"


def items(*dtypes):
    return [{"dtype": dtype, "backend": "triton"} for dtype in dtypes]


def run(fault, silence, *dtypes):
    runner = Runner(CPU, Limits(silence=silence), prelude=prelude(("triton",), fault))
    return [
        (item["dtype"], result["error"])
        for item, result in runner.run("layer_norm", items(*dtypes))
    ]


@pytest.mark.exhaustive
def test_a_crash_is_of_its_dtype_alone(device):
    """Another process goes on with the dtypes that are left."""
    (dtype, error), other = run("abort_in_float32", 120, "float32", "float16")
    case = "odd width, rows apart, residual, dropout"
    assert other == ("float16", None)
    assert dtype == "float32"
    assert error.startswith(f"{case}: the process ended by SIGABRT")


@pytest.mark.exhaustive
def test_a_worker_that_the_system_killed_had_no_memory(device):
    """A kernel that is wrong ends its process in other ways."""
    assert [memory("killed", 120), memory("abort", 120), memory("hang", 1)] == [True, False, False]


def memory(fault, silence):
    runner = Runner(CPU, Limits(silence=silence), prelude=prelude(("triton",), fault))
    ((_, result),) = runner.run("layer_norm", items("float32"))
    return result["memory"]


@pytest.mark.exhaustive
def test_a_hang_is_ended(device):
    ((_, error),) = run("hang", 1, "float32")
    assert error == "odd width, rows apart, residual, dropout: no answer within 1 s"


def test_a_worker_that_does_not_start_blames_no_kernel(device, served, cache, caplog, monkeypatch):
    """Its end is told, it is not kept, and the next backend serves."""
    monkeypatch.setattr(
        known, "make_runner",
        lambda device: Runner(device, prelude="raise SystemExit('no room for a context')"),
    )  # fmt: skip
    with pytest.raises(NoWorker):
        list(known.make_runner(CPU).run("layer_norm", items("float32")))
    assert served() == "cpu"
    assert "the process ended with status 1: no room for a context" in caplog.text
    assert not list(cache.glob("*.json"))
    assert served() == "cpu"


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
    from deepfast.proof.prove import time

    entries = {d: {"errors": dict(e), "seconds": {}} for d, e in errors.items()}
    widths = tables.widths("layer_norm", "cpu")
    short = time(Timed(dict(zip(widths, seconds, strict=True))), "layer_norm", entries)
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
    assert (
        tables.fastest(entries["float32"], a) == tables.fastest(entries["float32"], c) == "triton"
    )


def test_a_kernel_is_timed_beside_torch(device, monkeypatch):
    """The measurement itself, on the interpreter."""
    job = {"dtype": "float32", "width": 8, "backends": ["triton", "reference"]}
    ((_, result),) = device(CPU).run("layer_norm", [job])
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
