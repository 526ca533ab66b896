"""GPU benchmarks of the launches of a deep stack: far passes and boundaries."""

import functools

import torch
import torch.nn.functional as F

from bench.gpu import launches
from bench.gpu.clock import Bench, Variant
from bench.gpu.ops import BF16, DROPOUT, measure, ours
from deepfast import backend
from deepfast.cases import ops as cases
from deepfast.cases.case import Rows
from deepfast.depth.schedule import default_block
from deepfast.launches import LAUNCHES
from deepfast.ops.common import empty_slots

# Target fractions of a copy, forward and backward.
DEPTH_MIX = (0.80, 0.80)
BOUNDARY = {"cuda": 0.80}


def operands(bench: Bench, name: str, T: int, D: int, **given) -> dict:
    """Those of a launch, random in what it reads of the activations."""
    made = launches.operands(name, T, D, BF16, bench.device, given)
    for o in LAUNCHES[name].operands:
        if o.dtype == "storage" and not o.writes and o.name not in given:
            made[o.name].normal_()
    return made


class Stack:
    """The states of a deep stack, as a history holds them, and launches that work on them."""

    def __init__(self, bench: Bench, layers: int, T: int, D: int):
        self.bench, self.rows, self.T, self.D = bench, layers + 1, T, D
        self.block = default_block(self.rows, bench.device)
        like = torch.empty(T, D, dtype=BF16, device=bench.device)
        self.states = empty_slots(self.rows + 1, like).normal_()
        self.out = empty_slots(self.block, like, torch.float32)
        starts = range(0, self.rows, self.block)
        self.blocks = [(start, min(start + self.block, self.rows)) for start in starts]
        """(first row, end) of every block."""

    def operands(self, name: str, **given) -> dict:
        shared = {"states": self.states, "grads": self.states, "R": self.rows, "S": self.rows + 1}
        return operands(self.bench, name, self.T, self.D, **shared | given)

    def run(self, by: str, name: str, calls: list[dict]) -> None:
        launch = getattr(backend.choose("boundary", by, self.bench.device, BF16)[1], name)
        for call in calls:
            launch(**call)

    def far_passes(self, name: str) -> list[dict]:
        """The operands of all launches of mix_rows in a forward, or of pull_rows in a backward."""
        calls = []
        for start, end in self.blocks:
            block, far = list(range(start, end)), list(range(start))
            lists = {"rows": block, "sources": far}
            if name == "pull_rows":
                far = list(range(end, self.rows))
                lists = {"rows": far, "sources": block, "grad_slots": [r + 1 for r in far]}
            if far:
                lists["out_rows"] = list(range(end - start))
                calls.append(self.operands(name, **lists, out=self.out))
        return calls

    def nbytes(self, calls: list[dict]) -> int:
        """Each state or gradient is read once in a block's pass, and each sum is written once. A
        pull also reads the block's own states."""
        count = 0
        for call in calls:
            # Sums have 4 bytes, states and gradients 2.
            count += len(call["sources"]) + 2 * len(call["out_rows"])
            count += len(call["rows"]) if "grads" in call else 0
        return count * self.T * self.D * 2

    def mix_by_product(self, calls: list[dict]) -> None:
        """The sums of mix_rows as matrix products in torch, without norm_weight and norm_bias."""
        for call in calls:
            first, last, count = call["rows"][0], call["rows"][-1], len(call["sources"])
            weight = call["weight"][first : last + 1, :count].to(BF16)
            weight @ self.states[:count].flatten(1)


def depth_mix(bench: Bench) -> None:
    bench.attempt(_depth_mix)
    count, T, D = bench.size((24, 8192, 512), (3, 8, 16))
    rows, size = Rows((T,), D), f"{count} sources, T={T}, D={D}, bf16, {{}}"
    what = f"functional depth_mix with LN, {size}"
    bench.attempt(measure, what, cases.depth_mix("", rows, count), {})
    for hops in bench.size((1, 4), (2,)):
        case = cases.depth_attention("", rows, count, hops, gain=False, lse=False)
        bench.attempt(measure, f"depth attention, {hops} hops, {size}", case, {})


def _depth_mix(bench: Bench) -> None:
    """All passes over far states of a forward, and of a backward, of a 100-layer stack."""
    layers, T, D = bench.size((100, 8192, 512), (9, 8, 16))
    stack = Stack(bench, layers, T, D)
    for i, (which, name) in enumerate({"forward": "mix_rows", "pull": "pull_rows"}.items()):
        calls = stack.far_passes(name)
        moved, ours_by = stack.nbytes(calls), ours("triton")
        runs = {ours_by: functools.partial(stack.run, "triton", name, calls)}
        if which == "forward":
            runs["torch.mm"] = functools.partial(stack.mix_by_product, calls)
        what = f"depth mix {which}, L={layers}, T={T}, D={D}, bf16"
        timings = bench.case(
            what, {n: functools.partial(Variant, run=run, nbytes=moved) for n, run in runs.items()}
        )
        reached = bench.fraction(timings.get(ours_by))
        bench.target(f"{what}, triton, fraction of copy", reached, DEPTH_MIX[i])


def boundary(bench: Bench) -> None:
    for dim in bench.size((512, 1024), (512,)):
        bench.attempt(_boundary, dim)


def plain_boundary(branch, residual, partial, states, weight, norm, out_norm, p: float):
    """A boundary between two layers in torch's ops: push y, mix, LN of the next layer.

    states: the block's earlier ones, normalised; weight: theirs and the new one's.
    """
    y = residual + F.dropout(branch, p)
    z = F.layer_norm(y, y.shape[-1:], *norm)
    x = partial + weight[-1] * z
    for w, state in zip(weight[:-1].unbind(), states, strict=True):
        x = x + w * state
    return z, x, F.layer_norm(x, x.shape[-1:], *out_norm)


class Boundary:
    """Boundaries in the middle of their blocks: half of the block's states are near states.

    Each boundary of a run has operands of its own.
    """

    def __init__(self, bench: Bench, dim: int):
        layers, T, D = bench.size((100, 8192, dim), (9, 8, dim // 32))
        self.stack = stack = Stack(bench, layers, T, D)
        self.place = stack.block // 2 - 1
        self.size = f"T={T}, D={D}, {self.place} near states, bf16"
        self.calls: dict[str, list[dict]] = {"boundary_forward": [], "boundary_backward": []}
        for start, end in stack.blocks[1:]:
            k, pulls = start + self.place, list(range(start + self.place, end))
            given = {"k": k, "near": list(range(start, k + 1)), "grad_slot": k + 1,
                     "pull_rows": pulls, "pull_slots": [r + 1 for r in pulls]}  # fmt: skip
            if end - start == stack.block:
                for name, calls in self.calls.items():
                    calls.append(stack.operands(name, **given))
        # Plain code has its partial sums in the dtype of the states.
        self.partials = [call["partial"].to(BF16) for call in self.calls["boundary_forward"]]

    def plain(self) -> list:
        """The forward in torch's ops."""
        found = []
        for call, older in zip(self.calls["boundary_forward"], self.partials, strict=True):
            first, k = call["near"][0], call["k"]
            norm = [call[f"out_norm_{name}"].to(BF16) for name in ("weight", "bias")]
            found.append(plain_boundary(
                call["branch"], call["residual"], older, call["states"][first:k].unbind(),
                call["weight"][k, first : k + 1].to(BF16), norm, norm, DROPOUT,
            ))  # fmt: skip
        return found

    def variant(self, name: str, by: str | None) -> Variant:
        """A form that runs every boundary forward, or backward; without ``by`` in torch's ops."""
        calls, later = self.calls[name], self.stack.block - 1 - self.place
        # Forward reads branch, residual, partial sum and near states, and writes state, x, LN(x).
        # Backward reads dx, dout, partial sum, own and near states, far pull and the block's later
        # gradients, and writes the row's gradient, dbranch, dresidual.
        moved = 3 + self.place + (3 if name == "boundary_forward" else 1 + 1 + later + 3)
        run = functools.partial(self.stack.run, by, name, calls) if by else self.plain
        nbytes = moved * 2 * self.stack.T * self.stack.D
        return Variant(run=run, calls=len(calls), nbytes=nbytes)


def _boundary(bench: Bench, dim: int) -> None:
    case, kernels = Boundary(bench, dim), bench.backends("boundary")
    for name in case.calls:
        what = f"{name.replace('_', ' ')}, {case.size}"
        forms = {ours(by): functools.partial(case.variant, name, by) for by in kernels}
        if name == "boundary_forward":
            forms["torch"] = functools.partial(case.variant, name, None)
        timings = bench.case(what, forms)
        for by in set(kernels) & set(BOUNDARY):
            reached = bench.fraction(timings.get(ours(by)))
            bench.target(f"{what}, {by}, fraction of copy", reached, BOUNDARY[by])
