"""What a launch costs the host beside its kernel: `python -m bench.launch_overhead`.

First each op at two tokens, then one push of a deep pre-norm encoder: residual, dropout, the state
and the next layer's LN. Without its launches a push is checks, allocations and autograd nodes. Then
each launch of the push. The variants take turns.

There is no GPU in it: Triton's own driver code runs over a libcuda that does nothing. So the times
of a GPU's driver, of torch's allocator and of streams are missing: these are lower bounds. The
launches of csrc/cuda need CUDA's runtime and are not timed. One thread, freed memory kept, CPU time
of the thread.
"""

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.record import record
from deepfast import availability, ops
from deepfast import backend as backends
from deepfast.build import compiler
from deepfast.cases.case import tuple_of
from deepfast.cases.sizes import typical
from deepfast.clock import on_cpu
from deepfast.depth.depth_pass import Launches
from deepfast.measure.clock import interleave, keep_memory
from deepfast.measure.encoders import PlainLayer
from deepfast.nn import DLCL, AttentionResiduals, DepthHistory, LayerNorm

LAYERS, DIM, DROPOUT = 200, 16, 0.1
CALLS, WIDTH, ROUNDS = 100, 64, 15
COMMAND = "python -m bench.launch_overhead triton"
# A window keeps the compiled launch itself as small as possible.
CONNECTIONS: dict[str, Callable] = {
    "DLCL": partial(DLCL, window=1),
    "attention residuals": partial(AttentionResiduals, window=1),
}
PROCESSORS = 132
"""Multiprocessors of an H100."""

DRIVER = """
int cuCtxGetCurrent(void** x) { *x = x; return 0; }
int cuDeviceGet(int* x) { *x = 0; return 0; }
int cuDeviceGetCount(int* x) { *x = 1; return 0; }
int cuDeviceGetAttribute(int* x) { *x = 232448; return 0; }
int cuDevicePrimaryCtxRetain(void** x) { *x = x; return 0; }
int cuFuncGetAttribute(int* x, int what) { *x = what == 0 ? 1024 : 0; return 0; }
int cuModuleLoadData(void** x) { *x = x; return 0; }
int cuModuleGetFunction(void** x) { *x = x; return 0; }
int cuPointerGetAttribute(void** x, int what, void* pointer) { *x = pointer; return 0; }
int cuGetErrorString(int error, const char** x) { *x = "none"; return 0; }
"""
"""A libcuda that does nothing. A function that is called with more arguments ignores them."""

IDLE = (
    "Init CtxGetDevice CtxSetCurrent CtxGetLimit CtxSetLimit DriverGetVersion FuncSetAttribute "
    "FuncSetCacheConfig ModuleUnload OccupancyMaxActiveClusters StreamIsCapturing "
    "TensorMapEncodeTiled TensorMapEncodeIm2col LaunchKernelEx"
)


def _processors(_device: torch.device) -> int:
    return PROCESSORS


def load_driver(folder: str) -> None:
    """Makes Triton launch on an H100 that does nothing."""
    functions = "".join(f"int cu{name}(void) {{ return 0; }}\n" for name in IDLE.split())
    source, library = Path(folder) / "cuda.c", Path(folder) / "libcuda.so.1"
    source.write_text(DRIVER + functions)
    options = "-w", "-shared", "-fPIC", "-O2", "-xc", "-Wl,-soname,libcuda.so.1"
    subprocess.run([compiler(), *options, source, "-o", library], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    with ExitStack() as stack:
        for name, value in (("current_device", 0), ("get_device_capability", (9, 0))):
            function = lambda *_, v=value: v  # noqa: E731
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        driver = CudaDriver()
    driver.get_current_device = lambda: 0
    driver.get_current_stream = lambda _device: 0
    driver.get_device_capability = lambda *_: (9, 0)
    triton.runtime.driver.set_active(driver)


@contextmanager
def launching(name: str) -> Iterator[None]:
    """In it tensors on the CPU are launched as the backend ``name`` launches those on a GPU."""
    with ExitStack() as stack:
        if name == "triton":
            load_driver(stack.enter_context(tempfile.TemporaryDirectory()))
            able = mock.patch.object(availability, "_triton", return_value=None)
            stack.enter_context(able)
            for module in filter(None, (availability.kernel_file(f)[0] for f in KERNELS)):
                if hasattr(module, "multiprocessors"):
                    count = mock.patch.object(module, "multiprocessors", _processors)
                    stack.enter_context(count)
        backends.forget()
        stack.callback(backends.forget)
        yield


KERNELS = sorted({file for files in availability.KERNEL_FILES.values() for file in files})


# ---- what is timed -------------------------------------------------------------------------------


def _nothing(*_args, **_named) -> None:
    """Replaces a launch."""


def make(connection: str, backend: str, replace: Callable | None = None) -> Callable[[], Tensor]:
    """A forward pass over LAYERS + 1 pushes, each with a residual, dropout and the next layer's LN.

    replace: takes the name of a launch and the launch, and returns what runs in its place.
    """
    depth, norm = CONNECTIONS[connection](LAYERS, DIM, backend=backend), LayerNorm(DIM)
    x = torch.randn(1, DIM, requires_grad=True)

    def forward() -> Tensor:
        history, branch, residual = DepthHistory(), x, None
        for k in range(LAYERS + 1):
            residual, branch = depth(
                branch, history, residual=residual, dropout_p=DROPOUT, out_norm=norm.as_output()
            )
            if k == 0 and replace is not None:
                depth_pass = history.depth_pass
                depth_pass.launch = Launches(*map(replace, depth_pass.launches, depth_pass.launch))
        return branch

    return forward


def microseconds(variants: dict[str, Callable], calls: int) -> dict[str, float]:
    """Of one of the ``calls`` in a run of each variant, the median."""
    clock = partial(on_cpu, now=time.thread_time)
    rows = interleave(variants, repeats=ROUNDS, warmup=3, clock=clock)
    return {name: round(row.median / calls * 1e6, 1) for name, row in rows.items()}


def pushes(connection: str, backend: str) -> dict[str, float]:
    """One push, forward alone and with backward, with its launches and without."""
    whole = make(connection, backend)
    forms = {"whole": whole, "without launches": make(connection, backend, lambda *_: _nothing)}
    variants = {}
    for name, forward in forms.items():
        variants[f"forward, {name}"] = forward
        variants[f"both ways, {name}"] = lambda f=forward: f().sum().backward()
    found = microseconds(variants, LAYERS + 1)
    if backend == "triton":
        key = f"push_{connection.replace(' ', '_').lower()}"
        said = f"host time of a push of {connection}, both ways, Triton, a driver that does nothing"
        record(key, found["both ways, whole"], "us", said, COMMAND)
        parts = f"{said}, without its launches"
        record(f"{key}_rest", found["both ways, without launches"], "us", parts, COMMAND)
    return found


def layer() -> dict[str, float]:
    """A pre-norm layer of torch on two tokens, without a connection; its kernels are counted too,
    which take less time here than its calls."""
    plain = PlainLayer(WIDTH, 1, WIDTH, DROPOUT)
    x = torch.randn(1, 2, WIDTH, requires_grad=True)
    found = _timed({"a layer of torch": lambda: plain(x)}, [x, *plain.parameters()])
    said = "host time of a pre-norm layer of torch on two tokens, both ways, kernels included"
    record("host_layer", found["a layer of torch, both ways"], "us", said, COMMAND)
    return found


def launches(connection: str, backend: str) -> dict[str, float]:
    """One call of each launch of a connection; of Triton also without what follows the launcher,
    and with Triton's own way behind it."""
    calls: dict[str, Callable] = {}

    def keep(name: str, launch: Callable) -> Callable:
        def run(**operands) -> None:
            calls[name] = partial(launch, **operands)
            launch(**operands)

        return run

    with mock.patch.dict(CONNECTIONS, {connection: CONNECTIONS[connection].func}):
        make(connection, backend, keep)().sum().backward()

    def repeat(call: Callable) -> None:
        for _ in range(CALLS):
            call()

    forms = {name: partial(repeat, call) for name, call in calls.items()}
    if backend == "triton":
        from deepfast.kernels import launch

        def replaced(start: Callable, form: Callable) -> None:
            with mock.patch.object(launch, "start", start):
                form()

        def tritons_way(kernel, programs, args, options) -> None:
            kernel[programs](*args, **options)

        for what, start in (("launcher alone", _nothing), ("by JITFunction.run", tritons_way)):
            for name in calls:
                forms[f"{name}, {what}"] = partial(replaced, start, forms[name])
    found = microseconds(forms, CALLS)
    if backend == "triton":
        for name in calls:
            said = f"host time of {name}, Triton, a driver that does nothing"
            record(f"launch_{name}", found[name], "us", said, COMMAND)
            way = found[f"{name}, by JITFunction.run"]
            record(f"launch_{name}_jit", way, "us", f"{said}, by JITFunction.run", COMMAND)
    return found


class _Empty(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, dy):
        return dy


def _timed(forms: dict[str, Callable], leaves: list[Tensor]) -> dict[str, float]:
    """One call of each form, forward alone without gradients and both ways."""

    def forward(form: Callable) -> None:
        with torch.no_grad():
            for _ in range(CALLS):
                form()

    def both(form: Callable) -> None:
        for _ in range(CALLS):
            results = tuple_of(form())
            torch.autograd.backward(results, tuple(map(torch.ones_like, results)))
            for leaf in leaves:
                leaf.grad = None

    runs = (("forward", forward), ("both ways", both))
    variants = {f"{name}, {way}": partial(run, f) for name, f in forms.items() for way, run in runs}
    return microseconds(variants, CALLS)


def each_op(backend: str) -> dict[str, float]:
    """One typical call of each op that the backend has kernels for."""
    found = {}
    for op in backends.OPS:
        if "boundary" not in op and backends.why_unable(op, backend, "cpu", torch.float32) is None:
            case = typical(op, WIDTH, "cpu", tokens=2)
            leaves = case.leaves(torch.float32, torch.float32)
            found |= _timed({op: partial(case.run, **leaves, backend=backend)}, [*leaves.values()])
    return found


def norms() -> dict[str, float]:
    """Norms of torch, and an empty function, for comparison."""
    shapes = (2, WIDTH), (2, WIDTH), (WIDTH,), (WIDTH,)
    x, residual, weight, bias = leaves = [torch.randn(s, requires_grad=True) for s in shapes]

    def add_norm() -> tuple[Tensor, Tensor]:
        s = x + residual
        return F.layer_norm(s, (WIDTH,), weight, bias), s

    forms: dict[str, Callable] = {
        "deepfast's add_layer_norm": lambda: ops.add_layer_norm(x, residual, weight, bias),
        "torch's layer_norm": lambda: F.layer_norm(x, (WIDTH,), weight, bias),
        "torch's add and layer_norm": add_norm,
        "an empty autograd.Function": lambda: _Empty.apply(x),
    }
    return _timed(forms, leaves)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.launch_overhead", description=__doc__)
    parser.add_argument("backends", nargs="*", help="cpu, triton; both by default. Rows of triton "
                        "are written to bench/results/results.csv")  # fmt: skip
    names = parser.parse_args(argv).backends
    if unknown := {*names} - {"cpu", "triton"}:
        parser.error(f"expected cpu or triton, got {unknown.pop()!r}")
    torch.set_num_threads(1)
    keep_memory()
    for backend in names or ("cpu", "triton"):
        with launching(backend):
            found = norms() if backend == "cpu" else layer()
            found |= each_op(backend)
            for connection, kind in CONNECTIONS.items():
                op = kind.func.pass_kind.op
                if backends.why_unable(op, backend, "cpu", torch.float32) is None:
                    rows = pushes(connection, backend)
                    found |= {f"a push of {connection}, {name}": us for name, us in rows.items()}
                    found |= launches(connection, backend)
        for name, us in found.items():
            print(f"{us:6.1f} us {backend}: {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
