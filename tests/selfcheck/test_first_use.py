"""A kernel is checked once before its first use; a wrong one is replaced, and remembered."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from deepfast import backend, ops
from deepfast.backend import BackendError
from deepfast.cases import sentences
from deepfast.cli import main
from deepfast.launches import LAUNCHES
from deepfast.selfcheck import first_use, store
from tests.kernels.agreement import numbers, run
from tests.selfcheck import faults
from tests.selfcheck.test_operands import given_for

CPU, FP32 = torch.device("cpu"), torch.float32
FORWARD, BACKWARD = "layer_norm_forward", "layer_norm_backward"


def norm(width=9):
    """The backend that serves layer_norm, after its result and gradient were compared."""
    x, w, b, g = (torch.randn(s) for s in ((4, width), (width,), (width,), (4, width)))
    x.requires_grad_()
    with backend.record() as seen:
        y = ops.layer_norm(x, w, b)
    expected = F.layer_norm(x, (width,), w, b)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    got, wanted = (torch.autograd.grad(z, x, g)[0] for z in (y, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    return seen[0][1]


@pytest.fixture
def broken(monkeypatch):
    """``broken(by, fault)`` breaks a launch on this backend."""

    def install(by, fault, launch=FORWARD, result="y"):
        made = faults.broken(backend.launchers, (by,), getattr(faults, fault), launch, result)
        monkeypatch.setattr(backend, "launchers", made)

    return install


def test_each_variant_is_checked_once(device, cache, caplog, capsys):
    for width in (9, 9, 16, 9):
        assert norm(width) == "triton"
    assert device == [FORWARD, BACKWARD] * 2
    # As another process, which reads the file.
    backend.forget()
    assert norm() == "triton"
    assert device == [FORWARD, BACKWARD] * 2
    assert not caplog.records
    (path,) = cache.glob("*.jsonl")
    assert set(json.loads(path.read_text().splitlines()[0])) == {"key"}
    assert main(["info", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert f"check    {path}; a GPU checks each kernel" in said
    assert "\n    layer_norm triton float32: variants right at first use: 4\n" in said


def test_what_is_not_checked(device):
    """A request, float64, what has no elements, and tensors of a tracer, which have no values."""
    ops.layer_norm(torch.randn(3, 8), None, None, backend="triton")
    ops.layer_norm(torch.randn(3, 8, dtype=torch.float64), None, None)
    ops.layer_norm(torch.randn(0, 8), None, None)
    with FakeTensorMode():
        results = {"y": torch.empty(4, 9), "mean": torch.empty(4), "rstd": torch.empty(4)}
        launch = backend.choose("layer_norm", None, CPU, FP32, 9)[1].layer_norm_forward
        launch(x=torch.empty(4, 9), eps=1e-5, rms=False, dropout_p=0.0, **results)
    assert device == []


def test_off_checks_nothing_and_remembers(device, broken, monkeypatch):
    monkeypatch.setenv("DEEPFAST_SELFCHECK", "off")
    assert norm() == "triton"
    assert device == []
    monkeypatch.delenv("DEEPFAST_SELFCHECK")
    broken("triton", "wrong")
    backend.forget()
    norm()
    monkeypatch.setenv("DEEPFAST_SELFCHECK", "off")
    backend.forget()
    assert norm() == "cpu"


def test_require_is_an_error_in_place_of_another_backend(device, broken, monkeypatch):
    broken("triton", "raises")
    monkeypatch.setenv("DEEPFAST_SELFCHECK", "require")
    for _ in range(2):
        with pytest.raises(BackendError, match=r"require: layer_norm triton float32.*on purpose"):
            norm()
        backend.forget()
    assert device == [FORWARD]


@pytest.mark.parametrize(("fault", "launch", "result", "said"), [
    ("wrong", FORWARD, "y", "y: error 1, allowed"),
    ("raises", FORWARD, "y", "RuntimeError: broken on purpose"),
    ("wrong", BACKWARD, "dx", "dx: error 1, allowed"),
])  # fmt: skip
def test_a_wrong_kernel_is_replaced_and_remembered(
    device, broken, caplog, fault, launch, result, said
):
    broken("triton", fault, launch, result)
    # The reference computes the first call, and the next backend the second one.
    assert [norm(), norm()] == ["triton", "cpu"]
    backend.forget()
    assert norm() == "cpu"
    assert device == [FORWARD, BACKWARD][: 1 + (launch == BACKWARD)]
    (record,) = caplog.records
    assert "layer_norm by triton in float32 failed its check" in record.getMessage()
    for text in (record.getMessage(), backend.explain("layer_norm", CPU, FP32)["triton"]):
        assert f"{launch} (9, " in text
        assert said in text


@pytest.mark.parametrize(("launch", "result"), [("boundary_forward", "x"), ("mix_rows", "out")])
def test_a_boundary_in_cuda_has_far_passes_of_triton(
    emulated, device, broken, monkeypatch, launch, result
):
    """Both are checked, and a wrong one of either leaves the op to the next backend."""
    monkeypatch.setitem(backend.CHECKED, "cpu", ("cuda",))
    broken("cuda", "wrong", launch, result)
    given = {name: numbers(name, T=3, D=17) for name in ("boundary_forward", "mix_rows")}
    reference, served = backend.choose("boundary", "reference", CPU, FP32)[1], []
    for _ in range(2):
        by, launches = backend.choose("boundary", None, CPU, FP32)
        served.append(by)
        for name, made in given.items():
            got = run(launches, name, made, FP32, FP32)
            for key, value in run(reference, name, made, FP32, FP32).items():
                torch.testing.assert_close(got[key], value, rtol=1e-5, atol=1e-5)
    assert served == ["cuda", "cpu"]
    assert device[-1] == launch


def test_attention_goes_on_with_the_reference(device, broken, monkeypatch):
    """Its next backend on a GPU is torch's, which has no launches for a backward pass of ours."""
    broken("triton", "wrong", "attention_backward", "dq")
    why_unable = backend.why_unable

    def no_cpu(op, by, *at):
        return "no GPU" if by == "cpu" else why_unable(op, by, *at)

    monkeypatch.setattr(backend, "why_unable", no_cpu)
    case, served = sentences.attention("", [5, 3], None, sentences.Heads(2, 16)), []
    leaves = case.leaves(torch.float16, torch.float16)

    def grads(**options):
        return torch.autograd.grad(case.run(**leaves, **options).float().sum(), [*leaves.values()])

    for _ in range(2):
        with backend.record() as seen:
            got = grads()
        served.append(seen[0][1])
        torch.testing.assert_close(got, grads(backend="reference"), rtol=1e-2, atol=1e-2)
    assert served == ["triton", "sdpa"]
    assert device == ["attention_forward", "attention_backward"]


def test_a_check_without_memory_is_not_kept(device, monkeypatch, cache, caplog):
    with monkeypatch.context() as patch:
        out_of_memory = faults.broken(backend.launchers, ("triton",), faults.memory)
        patch.setattr(backend, "launchers", out_of_memory)
        norm(), norm()
    assert caplog.text.count("cannot be checked without memory (OutOfMemoryError: Tried") == 1
    lines = next(cache.glob("*.jsonl")).read_text().splitlines()
    assert not any(FORWARD in line and '"error"' in line for line in lines)
    backend.forget()
    assert norm() == "triton"


def test_a_reference_that_fails_blames_no_kernel(device, broken, cache):
    broken("reference", "raises")
    with pytest.raises(RuntimeError, match="broken on purpose"):
        norm()
    assert '"error"' not in next(cache.glob("*.jsonl")).read_text()


def test_a_lost_gpu_ends_the_call_and_is_remembered(device, broken, monkeypatch):
    broken("triton", "raises")
    monkeypatch.setattr(first_use, "_lost_context", lambda _: "an illegal memory access")
    with pytest.raises(BackendError, match=r"made the GPU unusable for this process \(an illegal"):
        norm()
    backend.forget()
    assert norm() == "cpu"


def test_a_check_that_is_interrupted_is_made_again(device, monkeypatch, caplog):
    """But not one that ends with its process. While it runs, it blames no kernel: ranks check the
    same variant at the same time."""
    file, begun = store.of(CPU).path, []

    def interrupt(*_):
        others = store.load(store.make_key(CPU))
        assert others.begun
        assert not others.wrong
        begun.append(file.read_bytes())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(first_use, "fault", interrupt)
        with pytest.raises(KeyboardInterrupt):
            norm()
    # The process has ended since then.
    monkeypatch.setattr(store, "_start", lambda _: None)
    backend.forget()
    assert norm() == "triton"
    assert not caplog.records
    file.write_bytes(begun[0])
    backend.forget()
    assert norm() == "cpu"
    (said,) = store.of(CPU).wrong.values()
    assert said.startswith(f"{FORWARD} (9, ")
    assert "did not end" in said
    assert "`deepfast selfcheck --op layer_norm --again` tries anew" in said
    (record,) = caplog.records
    assert said in record.getMessage()


class NoFunctions(TorchFunctionMode):
    """Refuses each call of a function of torch."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called")


def test_the_users_state_does_not_reach_a_check():
    """Autocast would round the reference, so that a wrong result looks right beside it."""
    launch, given = LAUNCHES["attention_forward"], given_for("attention_forward", FP32, 5)
    reference = backend.launchers("attention", "reference")[launch.name]
    counter, random = FlopCounterMode(display=False), torch.get_rng_state()

    def wrong(call):
        reference(call)
        call.o.add_(1e-3)

    torch.set_default_dtype(torch.float64)
    try:
        with (
            counter,
            torch.autocast("cpu", torch.bfloat16),
            torch.inference_mode(),
            torch.device("meta"),
            NoFunctions(),
        ):
            said = first_use.fault(launch, wrong, reference, given, CPU, FP32)
    finally:
        torch.set_default_dtype(FP32)
    assert said.startswith("o: error 0.001, allowed ")
    assert counter.get_total_flops() == 0
    assert torch.equal(torch.get_rng_state(), random)


def test_in_a_capture_the_reference_computes(device, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        x = torch.randn(4, 9)
        for _ in range(2):
            torch.testing.assert_close(ops.layer_norm(x, None, None), F.layer_norm(x, (9,)))
        monkeypatch.setenv("DEEPFAST_SELFCHECK", "require")
        with pytest.raises(BackendError, match=r"got no check in the capture of a CUDA graph"):
            ops.layer_norm(x, None, None)
    monkeypatch.delenv("DEEPFAST_SELFCHECK")
    assert device == []
    assert caplog.text.count("cannot be checked in the capture of a CUDA graph") == 1
    assert norm() == "triton"
    assert device == [FORWARD, BACKWARD]


def test_a_compiled_function_checks_when_it_runs(device, caplog):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x, w):
        return ops.layer_norm(x, w, None).sin()

    x, w = torch.randn(4, 9, requires_grad=True), torch.randn(9)
    for _ in range(2):
        y = compiled(x, w)
        torch.testing.assert_close(y, F.layer_norm(x, (9,), w).sin())
        y.sum().backward()
    assert device == [FORWARD, BACKWARD]
    assert not [record for record in caplog.records if record.name == "deepfast"]


def test_one_thread_checks_and_the_others_wait(device):
    """The kernel is the reference, because Triton's interpreter runs in one thread at a time."""
    launch, start = LAUNCHES[FORWARD], threading.Barrier(4)
    reference = backend.launchers(launch.op, "reference")[FORWARD]
    checked = first_use.Checked(launch, "triton", reference, reference, lambda: None, None)

    def call(_):
        given = given_for(FORWARD, FP32, 5)
        start.wait(60)
        checked(given)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(4)))
    assert device == [FORWARD]
