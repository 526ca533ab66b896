"""How kernels are launched: on the device of their operands, and by compiled kernels that are kept
by what Triton specialises on. No GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepfast import backend
from deepfast.launches import LAUNCHES
from deepfast.selfcheck import first_use

launch = pytest.importorskip("deepfast.kernels.launch")
triton = pytest.importorskip("triton")


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_launcher_enters_the_device_of_its_operands(monkeypatch, name):
    def enter(index):
        raise RuntimeError(f"cuda:{index} is entered")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", enter)
    with FakeTensorMode():
        x = torch.empty(2, device="cuda:1")
    record = LAUNCHES[name].record
    with pytest.raises(RuntimeError, match=r"^cuda:1 is entered$"):
        backend.launchers(LAUNCHES[name].op, "triton")[name](record(*[x] * len(record._fields)))


class Compiled:
    """Keeps the arguments of its launches."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.launched: list[tuple] = []

    def run(self, *given):
        self.launched.append(given)


class Compiler:
    """A kernel that is compiled at each call of Triton's way."""

    __name__, arg_names = "kernel", ("p_x", "T", "s_x", "sources", "D")

    def __init__(self):
        self.made: list[Compiled] = []
        kinds = "is_constexpr", "do_not_specialize", "do_not_specialize_on_alignment"
        self.params = [
            SimpleNamespace(
                num=i, **dict(zip(kinds, (name == "D", name == "T", False), strict=True))
            )
            for i, name in enumerate(self.arg_names)
        ]

    def __getitem__(self, programs):
        return lambda *_args, **_options: self.made.append(Compiled()) or self.made[-1]


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "CompiledKernel", Compiled)
    driver = SimpleNamespace(
        get_current_device=lambda: 3, get_current_stream=lambda device: f"stream of {device}"
    )
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    return Compiler()


X, OFF = torch.zeros(64), torch.zeros(65)[1:]
GIVEN = {"p_x": X, "T": 33, "s_x": 32, "sources": (X, X), "D": 8, "num_warps": 4}


def run(kernel, **changed):
    launch.call(kernel, (7,), **GIVEN | changed)


def test_a_second_launch_calls_the_compiled_kernel_with_addresses(kernel, monkeypatch):
    run(kernel)
    run(kernel, T=34, s_x=160)
    (compiled,) = kernel.made
    address = X.data_ptr()
    ((*where, x, T, s_x, sources, D),) = compiled.launched
    assert where == [7, 1, 1, "stream of 3", "function", "metadata", None, None, None]
    assert (x, T, s_x, sources, D) == (address, 34, 160, (address, address), 8)
    # A profiler sees each launch, which then goes Triton's way.
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda _: None)
    run(kernel)
    assert [len(compiled.launched) for compiled in kernel.made] == [1, 0]


OWN, NONE = [1, 1], [1, 0, 0]


@pytest.mark.parametrize(("changed", "launched"), [
    ({"p_x": None}, OWN), ({"p_x": OFF}, OWN), ({"p_x": X.half()}, OWN), ({"s_x": 33}, OWN),
    ({"s_x": 1}, OWN), ({"s_x": None}, OWN), ({"s_x": 0.5}, OWN), ({"sources": (X, OFF)}, OWN),
    ({"sources": (1, 2)}, OWN), ({"D": 16}, OWN), ({"num_warps": 8}, OWN),
    ({"T": 2**31}, NONE), ({"s_x": 2**31}, NONE), ({"sources": (3, 2**31)}, NONE),
], ids=str)  # fmt: skip
def test_what_triton_specialises_has_a_kernel_of_its_own(kernel, changed, launched):
    """Launches with an integer of 64 bits go Triton's way each time."""
    for _ in range(2):
        run(kernel)
        run(kernel, **changed)
    assert [len(compiled.launched) for compiled in kernel.made] == launched


PLAIN, SHIFTED, APART = torch.randn(4, 16), torch.randn(65)[1:].view(4, 16), torch.randn(4, 24)
EACH = PLAIN, SHIFTED, APART[:, :16]


@pytest.fixture
def checked(kernel, monkeypatch, tmp_path):
    """``checked(x, wrong=..., first=...)`` is a checked launch, which starts the kernel and then
    computes what the reference does; ``checked.made`` counts its checks."""
    monkeypatch.setenv("DEEPFAST_CACHE", str(tmp_path))
    first_use.forget()
    table, fault = LAUNCHES["layer_norm_forward"], first_use.fault
    reference = backend.launchers("layer_norm", "reference")[table.name]

    def counted(*given):
        run.made += 1
        return fault(*given)

    def run(x, wrong=lambda x: False, first=()):
        def start(a):
            for other in first:
                launch.call(other, (1,), PLAIN, 4, 16, (PLAIN,), 16)
            launch.call(kernel, (1,), a.x, 4, a.x.stride(0), (PLAIN,), 16)
            reference(a)
            a.y.add_(wrong(a.x))

        y = torch.empty(4, 16)
        made = first_use.Checked(table, "triton", start, reference, lambda: None, launch.thread)
        given = {"x": x, "eps": 0.0, "rms": True, "dropout_p": 0.0, "y": y, "rstd": torch.empty(4)}
        table.by_name(made)(**given)
        return (y - x * x.square().mean(1, keepdim=True).rsqrt()).abs().max() < 1e-5

    run.made = 0
    monkeypatch.setattr(first_use, "fault", counted)
    yield run
    first_use.forget()


def test_each_kernel_that_triton_compiles_is_checked(checked, kernel):
    """For each alignment and for the distance of rows, also where a request compiled it before; in
    this process, and the next finds it."""
    launch.call(kernel, (1,), SHIFTED, 4, 16, (PLAIN,), 16)
    assert all(map(checked, EACH * 2))
    assert checked.made == 3
    assert launch.thread.ask is None
    first_use.forget()
    del kernel.deepfast
    assert all(map(checked, EACH))
    assert checked.made == 3


def shifted(x):
    return x.data_ptr() % 16 > 0


def test_the_reference_replaces_a_wrong_kernel(checked):
    assert checked(PLAIN)
    for _ in range(2):
        assert checked(SHIFTED, wrong=shifted)
    assert checked.made == 2


def test_a_wrong_kernel_behind_another_one_is_an_error(checked):
    """The other one may have added to an operand, so the reference cannot compute the call."""
    first = [Compiler()]
    assert checked(PLAIN, first=first)
    with pytest.raises(backend.BackendError, match="layer_norm: kernel failed its check, or"):
        checked(SHIFTED, wrong=shifted, first=first)
