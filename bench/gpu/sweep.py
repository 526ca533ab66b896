"""Other tiles, warps, stages and residency for the Triton kernels, and other blocks of rows.

A setting replaces what a launcher asks its kernel file: the functions that choose a tile, or
options of the launch. Each row says its setting, and a note of each case names the fastest.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from unittest import mock

import torch

from bench.gpu.clock import Bench, Variant
from bench.gpu.ops import BF16, Boundary, Packed, Stack, ours, random
from deepfast import backend
from deepfast.nn import DLCL, DepthHistory

CHOSEN = "as it is"
"""The setting that the kernels have."""


class _With:
    """A kernel that is launched with other options than its launcher gives it."""

    def __init__(self, kernel, options: dict):
        self.kernel, self.options = kernel, options
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid):
        launch = self.kernel[grid]
        return lambda *args, **given: launch(*args, **(given | self.options))


@contextmanager
def setting(file: str, functions: dict[str, Callable], options: dict[str, dict]) -> Iterator[None]:
    """Replaces functions of a kernel file, and options of kernels by the kernel's name."""
    module = import_module(f"deepfast.kernels.{file}")
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(module, name, function))
        for name, changed in options.items():
            kernel = _With(getattr(module, name), changed)
            stack.enter_context(mock.patch.object(module, name, kernel))
        yield


def _rows(tile: str, residency: bool = False, loads: bool = False) -> dict[str, tuple]:
    """Settings of a kernel of whole rows: name -> (functions, options).

    tile: the function that chooses the tile. residency, loads: whether the kernel has a choice of
    resident warps, and of states that are loaded ahead.
    """
    common = import_module("deepfast.kernels.common")
    found = {}
    for per_thread, num_warps in itertools.product((8, 16, 32), (2, 4, 8)):
        choose = partial(common.row_tile, per_thread=per_thread, num_warps=num_warps)
        name = f"{per_thread} values a thread, {num_warps} warps"
        found[name] = {tile: lambda D, itemsize, c=choose: c(D, itemsize)}, {}
    for warps in (8, 16, 24) if residency else ():
        resident = {"residency": lambda _, n, w=warps: common.residency(w, n)}
        found[f"{warps} resident warps"] = resident, {}
    for count in (1, 2, 8) if loads else ():
        found[f"{count} states at once"] = {"loads_at_once": lambda *_, c=count: c}, {}
    return found


def _far(kernel: str, tiles: tuple = (), stages: tuple = (), blocks: tuple = ()) -> dict:
    """Settings of a far pass: sides of the tile, stages and warps, programs on a multiprocessor."""
    mix_rows = import_module("deepfast.kernels.mix_rows")
    found = {}
    for BD, elements in tiles:
        tile = partial(mix_rows._stream_tile, BD=BD, elements=elements)
        functions = {"_stream_tile": lambda T, D, *_, t=tile: t(T, D)}
        found[f"tile of {elements}, at most {BD} channels"] = functions, {}
    for number, warps in stages:
        options = {kernel: {"STAGES": number, "num_warps": warps}}
        found[f"{number} stages, {warps} warps"] = {}, options
    for programs in blocks:
        # The launcher takes three programs for each multiprocessor.
        counted = mix_rows.multiprocessors
        functions = {"multiprocessors": lambda d, p=programs, c=counted: max(1, c(d) * p // 3)}
        found[f"{programs} programs on a multiprocessor"] = functions, {}
    return found


def _attention(which: str) -> dict:
    """Settings of the function that chooses a launch: queries of a tile, and warps."""
    attention = import_module("deepfast.kernels.attention")
    choose, found = getattr(attention, which), {}

    def changed(*args, queries, warps):
        launch, whole_row = choose(*args)
        return launch._replace(BQ=min(queries, launch.BQ), num_warps=warps), whole_row

    for queries, warps in itertools.product((64, 32, 16), (2, 4, 8)):
        name = f"at most {queries} queries at a time, {warps} warps"
        found[name] = {which: partial(changed, queries=queries, warps=warps)}, {}
    return found


def _case(bench: Bench, what: str, file: str, settings: dict, run, calls: int, nbytes: int) -> None:
    """Measures ``run`` under each setting, and names the fastest."""
    settings = {CHOSEN: ({}, {})} | dict(list(settings.items())[:: bench.size(1, 8)])

    def make(functions, options):
        def under():
            with setting(file, functions, options):
                return run()

        return Variant(run=under, calls=calls, nbytes=nbytes)

    # Some settings need more registers or shared memory than there are.
    makers = {name: partial(make, *given) for name, given in settings.items()}
    rows = bench.case(what, makers, may_fail=True)
    if CHOSEN not in rows:
        bench.error(what, f"{CHOSEN!r} did not run, see the notes")
        return
    best = min(rows.values(), key=lambda row: row.median)
    gain = rows[CHOSEN].median / best.median
    bench.note(f"{what}: fastest is {best.variant!r}, {gain:.2f} times as fast as it is now")


def layer_norm(bench: Bench) -> None:
    T, D = bench.size((32768, 512), (8, 16))
    launch = backend.choose("layer_norm", "triton", bench.device, torch.bfloat16)[1]
    sets = [random(bench, 3, T, D) for _ in range(bench.sets(6 * T * D))]
    weight, bias, dweight, dbias = torch.randn(4, D, device=bench.device)
    mean, rstd = torch.rand(2, T, device=bench.device)

    def forward():
        for x, y, _ in sets:
            launch.layer_norm_forward(
                x=x, weight=weight, bias=bias, eps=1e-5, rms=False, dropout_p=0.0, y=y, mean=mean,
                rstd=rstd,
            )  # fmt: skip

    def backward():
        for x, dy, dx in sets:
            launch.layer_norm_backward(
                sum=x, dy=dy, weight=weight, rms=False, mean=mean, rstd=rstd, dropout_p=0.0, dx=dx,
                dweight=dweight, dbias=dbias,
            )  # fmt: skip

    size, count = f"T={T}, D={D}, bf16", len(sets)
    _case(bench, f"LN forward, {size}", "layer_norm", _rows("forward_tile"), forward, count,
          4 * T * D)  # fmt: skip
    _case(bench, f"LN backward, {size}", "layer_norm", _rows("backward_tile", residency=True),
          backward, count, 6 * T * D)  # fmt: skip


def boundary(bench: Bench) -> None:
    case = Boundary(bench, 512)
    state, count = 2 * case.stack.T * case.stack.D, len(case.ks)
    size = f"T={case.stack.T}, D={case.stack.D}, {case.place} near states, bf16"
    forward, backward = case.moved

    def run(which):
        return lambda: [which("triton", k) for k in case.ks]

    _case(bench, f"boundary forward, {size}", "boundary", _rows("forward_tile", loads=True),
          run(case.forward), count, forward * state)  # fmt: skip
    settings = _rows("backward_tile", residency=True, loads=True)
    _case(bench, f"boundary backward, {size}", "boundary", settings, run(case.backward), count,
          backward * state)  # fmt: skip


def far_passes(bench: Bench) -> None:
    layers, T, D = bench.size((100, 8192, 512), (9, 8, 16))
    stack = Stack(bench, layers, T, D)
    size = f"L={layers}, T={T}, D={D}, B={stack.block}, bf16"
    mix = _far("mix_rows_dot_kernel", ((64, 256), (64, 1024), (128, 512), (128, 1024)),
               tuple(itertools.product((1, 2, 3), (4, 8))))  # fmt: skip
    pull = _far("pull_rows_dot_kernel", blocks=(1, 2, 4, 6))
    _case(bench, f"mix, {size}", "mix_rows", mix, lambda: stack.mix("triton"), 1,
          stack.nbytes(pull=False))  # fmt: skip
    _case(bench, f"pull, {size}", "mix_rows", pull, lambda: stack.pull("triton"), 1,
          stack.nbytes(pull=True))  # fmt: skip


def attention(bench: Bench) -> None:
    case = Packed(bench)
    for training, which in ((False, "forward_launch"), (True, "backward_launch")):
        what = f"attention {'forward + backward' if training else 'forward'}, {case.size}"
        variant = case.maker(case.ours, case.packed, case.dpacked, training)()
        _case(bench, what, "attention", _attention(which), variant.run, variant.calls,
              variant.nbytes)  # fmt: skip


def blocks(bench: Bench) -> None:
    for layers in bench.size((30, 100), (5,)):
        bench.attempt(_blocks, layers)


def _blocks(bench: Bench, layers: int) -> None:
    """The depth connection alone, forward and backward, for blocks of B rows."""
    T, D = bench.size((8192, 512), (8, 16))
    y = random(bench, T, D, grad=True)
    grad = random(bench, T, D)

    def maker(by, block):
        dlcl = DLCL(layers, D, backend=by).to(bench.device)

        def run():
            history, x = DepthHistory(block=block), y
            for _ in range(layers + 1):
                x = dlcl(x, history)
            return torch.autograd.grad(x, [y, *dlcl.parameters()], grad)

        return lambda: Variant(run=run)

    forms = {
        f"{ours(by)}, B={block}": maker(by, block)
        for by in bench.backends("boundary") for block in bench.size((4, 8, 16), (2, 4))
    }  # fmt: skip
    what = f"mixing, forward + backward, L={layers}, T={T}, D={D}, {str(BF16)[6:]}"
    rows = bench.case(what, forms, seconds=3.0)
    if rows:
        best = min(rows.values(), key=lambda row: row.median)
        bench.note(f"{what}: fastest is {best.variant!r}")


SWEEPS = {
    "blocks": blocks, "boundary": boundary, "far passes": far_passes, "layer_norm": layer_norm,
    "attention": attention,
}  # fmt: skip
