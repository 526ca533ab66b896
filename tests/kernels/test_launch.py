"""The state that launches keep: compiled kernels, by what Triton specialises on."""

from types import SimpleNamespace

import pytest
import torch

from deepfast import backend
from deepfast.launches import LAUNCHES
from deepfast.selfcheck import first_use

launch = pytest.importorskip("deepfast.kernels.launch")
triton = pytest.importorskip("triton")


class Compiled(launch.CompiledKernel):
    """Counts its launches, and keeps the arguments of the last one."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.launched: list[tuple] = []

    def __del__(self):
        """There is no module to unload."""

    @property
    def run(self):
        return lambda *given: self.launched.append(given)


class Compiler:
    """A kernel that is compiled at each call of Triton's way."""

    __name__, arg_names = "kernel", ("p_x", "T", "s_x", "sources", "D")

    def __init__(self):
        names = enumerate(self.arg_names)
        self.params = [
            SimpleNamespace(
                num=i,
                is_constexpr=name == "D",
                do_not_specialize=name == "T",
                do_not_specialize_on_alignment=False,
            )
            for i, name in names
        ]
        self.made: list[Compiled] = []

    def __getitem__(self, programs):
        def run(*_args, **_options):
            self.made.append(Compiled())
            return self.made[-1]

        return run


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    driver = SimpleNamespace(
        get_current_device=lambda: 3, get_current_stream=lambda device: f"stream of {device}"
    )
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    return Compiler()


X, OFF = torch.zeros(64), torch.zeros(65)[1:]
GIVEN = {"p_x": X, "T": 33, "s_x": 32, "sources": (X, X), "D": 8, "num_warps": 4}


def run(kernel, **changed):
    launch.call(kernel, (7,), **GIVEN | changed)


def test_a_second_launch_calls_the_compiled_kernel_with_addresses(kernel):
    run(kernel)
    run(kernel, T=34, s_x=160)
    (compiled,) = kernel.made
    address = X.data_ptr()
    ((*where, x, T, s_x, sources, D),) = compiled.launched
    assert where == [7, 1, 1, "stream of 3", "function", "metadata", None, None, None]
    assert (x, T, s_x, sources, D) == (address, 34, 160, (address, address), 8)


@pytest.mark.parametrize("changed", [
    {"p_x": None}, {"p_x": OFF}, {"p_x": X.half()}, {"s_x": 33}, {"s_x": 1}, {"s_x": None},
    {"sources": (X, OFF)}, {"sources": (1, 2)}, {"D": 16}, {"num_warps": 8}, {"s_x": 0.5},
], ids=str)  # fmt: skip
def test_what_triton_specialises_has_a_kernel_of_its_own(kernel, changed):
    for _ in range(2):
        run(kernel)
        run(kernel, **changed)
    assert [len(compiled.launched) for compiled in kernel.made] == [1, 1]


@pytest.mark.parametrize(
    "changed", [{"T": 2**31}, {"s_x": 2**31}, {"sources": (3, 2**31)}], ids=str
)
def test_an_integer_of_64_bits_goes_tritons_way(kernel, changed):
    for _ in range(2):
        run(kernel, **changed)
    assert [len(compiled.launched) for compiled in kernel.made] == [0, 0]


PLAIN, SHIFTED, APART = torch.randn(4, 16), torch.randn(65)[1:].view(4, 16), torch.randn(4, 24)


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
    """For each alignment and for the distance of rows; in this process, and the next finds it."""
    for x in (PLAIN, SHIFTED, APART[:, :16]) * 2:
        assert checked(x)
    assert checked.made == 3
    assert launch.thread.ask is None
    first_use.forget()
    del kernel.deepfast
    for x in (PLAIN, SHIFTED, APART[:, :16]):
        assert checked(x)
    assert checked.made == 3


def test_a_kernel_that_a_request_compiled_is_checked_too(checked, kernel):
    launch.call(kernel, (1,), SHIFTED, 4, 16, (PLAIN,), 16)
    assert checked(PLAIN)
    assert checked(SHIFTED)
    assert checked.made == 2


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


def test_a_profiler_sees_each_launch(kernel, monkeypatch):
    run(kernel)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda _: None)
    run(kernel)
    assert [len(compiled.launched) for compiled in kernel.made] == [0, 0]


def test_operands_and_strides_come_from_the_record(kernel):
    a = SimpleNamespace(x=torch.zeros(3, 48), t=5)
    launch.launch(kernel, (1,), a, sources=(X,), D=8)
    launch.launch(kernel, (1,), a, sources=(X,), D=8)
    ((*_, address, tokens, stride, _, _),) = kernel.made[0].launched
    assert (address, tokens, stride) == (a.x.data_ptr(), 5, 48)
