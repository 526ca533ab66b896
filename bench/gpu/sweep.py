"""Other tiles, warps, stages and residency for the Triton kernels, and other blocks of rows.

A setting replaces what a launcher asks its kernel file: the functions that choose a tile, or
options of the launch. Each row says its setting, and a note of each case names the fastest.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from unittest import mock

import torch

from bench.gpu.clock import Bench, Variant
from bench.gpu.ops import BF16, Packed, ours, random
from bench.gpu.stacks import Boundary, Stack, operands
from deepfast import backend
from deepfast.nn import DLCL, DepthHistory

CHOSEN = "as it is"
"""The setting that the kernels have."""


class _With:
    """A kernel that is launched with other options than its launcher gives it."""

    def __init__(self, kernel, options: dict):
        self.kernel, self.options = kernel, options
        self.arg_names, self.params = kernel.arg_names, getattr(kernel, "params", ())

    def __getitem__(self, grid):
        def launch(*args, **given):
            changed = [
                self.options.get(name, x) for name, x in zip(self.arg_names, args, strict=False)
            ]
            others = {k: x for k, x in self.options.items() if k not in self.arg_names[: len(args)]}
            return self.kernel[grid](*changed, **(given | others))

        return launch


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


def _rows(tile: str, residency: bool = False) -> dict[str, tuple]:
    """Settings of a kernel of whole rows: name -> (functions, options).

    tile: the function that chooses the tile. residency: whether the kernel has a choice of resident
    warps.
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


def _case(bench: Bench, what: str, file: str, settings: dict, variant: Variant) -> None:
    """Measures the variant under each setting, and names the fastest."""
    settings = {CHOSEN: ({}, {})} | dict(list(settings.items())[:: bench.size(1, 12)])

    def make(functions, options):
        def under():
            with setting(file, functions, options):
                return variant.run()

        return replace(variant, run=under)

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
    launch = backend.choose("layer_norm", "triton", bench.device, BF16)[1]
    without = dict.fromkeys(("residual", "sum", "dsum", "dresidual", "seed"))
    for which, states, settings in (
        ("forward", 2, _rows("forward_tile")),
        ("backward", 3, _rows("backward_tile", residency=True)),
    ):
        name, nbytes = f"layer_norm_{which}", 2 * states * T * D
        if which == "backward":
            del without["sum"]
        calls = [
            operands(bench, name, T, D, **without, dropout_p=0.0)
            for _ in range(bench.sets(nbytes))
        ]  # fmt: skip
        run = partial(_each, getattr(launch, name), calls)
        variant = Variant(run=run, calls=len(calls), nbytes=nbytes)
        _case(bench, f"LN {which}, T={T}, D={D}, bf16", "layer_norm", settings, variant)


def _each(launch: Callable, calls: list[dict]) -> None:
    for call in calls:
        launch(**call)


def boundary(bench: Bench) -> None:
    case = Boundary(bench, 512)
    for name, settings in (
        ("boundary_forward", _rows("forward_tile")),
        ("boundary_backward", _rows("backward_tile", residency=True)),
    ):
        what = f"{name.replace('_', ' ')}, {case.size}"
        _case(bench, what, "boundary", settings, case.variant(name, "triton"))


def far_passes(bench: Bench) -> None:
    layers, T, D = bench.size((100, 8192, 512), (9, 8, 16))
    stack = Stack(bench, layers, T, D)
    tiles = (64, 256), (64, 1024), (128, 512), (128, 1024)
    stages = tuple(itertools.product((1, 2, 3), (4, 8)))
    for name, settings in (
        ("mix_rows", _far("mix_rows_dot_kernel", tiles, stages)),
        ("pull_rows", _far("pull_rows_dot_kernel", blocks=(1, 2, 4, 6))),
    ):
        what = f"{name.partition('_')[0]}, L={layers}, T={T}, D={D}, B={stack.block}, bf16"
        calls = stack.far_passes(name)
        run = partial(stack.run, "triton", name, calls)
        variant = Variant(run=run, nbytes=stack.nbytes(calls))
        _case(bench, what, "mix_rows", settings, variant)


def attention(bench: Bench) -> None:
    case = Packed(bench)
    for training, which in ((False, "forward_launch"), (True, "backward_launch")):
        what = f"attention {'forward + backward' if training else 'forward'}, {case.size}"
        _case(bench, what, "attention", _attention(which), case.variant("triton", training))


def blocks(bench: Bench) -> None:
    for layers in bench.size((30, 100), (3,)):
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
