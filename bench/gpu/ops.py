"""GPU benchmarks of the ops around matrix products: layer_norm, depth_mix, boundary."""

import functools

import torch

from bench.gpu import peers
from bench.gpu.clock import Bench, Variant
from bench.gpu.launches import arguments
from deepfast import backend, ops
from deepfast.depth.schedule import default_block
from deepfast.depth.state import empty_slots
from deepfast.measure.rows import Row

BF16 = torch.bfloat16
DROPOUT = 0.1


def random(bench: Bench, *shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device=bench.device).to(BF16).requires_grad_(grad)


def _seed(bench: Bench) -> torch.Tensor:
    return torch.tensor(5, device=bench.device)


def _forward_and_backward(apply, sets, grads, leaves, nbytes):
    """Functions that make a forward and a backward of ``apply`` over all sets of operands.

    leaves: further tensors that need gradients. nbytes: of each direction.
    """

    def forward():
        f = apply()
        return Variant(run=lambda: [f(*s) for s in sets], calls=len(sets), nbytes=nbytes[0])

    def backward():
        f = apply()
        outputs = [f(*s) for s in sets]
        return Variant(
            run=lambda: [
                torch.autograd.grad(y, (*s, *leaves), g, retain_graph=True)
                for y, s, g in zip(outputs, sets, grads, strict=True)
            ],
            calls=len(sets),
            nbytes=nbytes[1],
        )

    return forward, backward


# Target fractions of a copy, forward and backward, by width.
LAYER_NORM = {
    "triton": {512: (0.80, 0.60), 1024: (0.85, 0.65), 4096: (0.90, 0.70)},
    "cuda": {512: (0.85, 0.70), 1024: (0.85, 0.70), 4096: (0.90, 0.70)},
}
DEPTH_MIX = {"triton": (0.80, 0.80), "cuda": (0.90, 0.85)}
BOUNDARY = {"cuda": 0.80}


def ours(by: str | None) -> str:
    """The name of a variant of deepfast; None is what deepfast chooses."""
    return "deepfast" if by is None else f"deepfast, {by}"


def copy(bench: Bench) -> None:
    """The bandwidth of a copy, by this clock and by Triton's, which has to agree."""
    elements = bench.size(1 << 30, 1 << 12)
    source = torch.randn(elements, device=bench.device).to(BF16)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    what = f"copy of {elements} elements, bf16"

    def run():
        target.copy_(source)

    rows = bench.case(what, {"copy": lambda: Variant(run=run, nbytes=moved)})
    if bench.toy:
        return
    from triton.testing import do_bench

    seconds = do_bench(run, return_mode="median") / 1e3
    bench.rows([
        Row(what=what, variant="triton.testing.do_bench", seconds=[seconds], nbytes=moved,
            note="eager")
    ])  # fmt: skip
    ratio = seconds / rows["copy"].median
    bench.target(f"{what}: agreement of do_bench and this clock", min(ratio, 1 / ratio), 0.97)


def layer_norm(bench: Bench) -> None:
    for fused in (False, True):
        for dim in bench.size(tuple(LAYER_NORM["triton"]), (512,)):
            bench.attempt(_layer_norm, dim, fused)


def _layer_norm(bench: Bench, dim: int, fused: bool) -> None:
    """LN alone or, fused, with residual and dropout in the same pass."""
    T, D = bench.size(32768, 8), bench.size(dim, dim // 32)
    state, inputs = 2 * T * D, 1 + fused
    sets = [
        tuple(random(bench, T, D, grad=True) for _ in range(inputs))
        for _ in range(bench.sets(2 * inputs * state))
    ]
    grads = [tuple(random(bench, T, D) for _ in range(inputs)) for _ in sets]
    w, b = (torch.randn(D, device=bench.device, requires_grad=True) for _ in range(2))
    low = [p.detach().to(BF16).requires_grad_() for p in (w, b)]
    nbytes = 2 * inputs * state + 8 * T, (3 + 2 * fused) * state + 8 * T
    options = {"dropout_p": DROPOUT, "training": True, "seed": _seed(bench)} if fused else {}

    def own(by):
        return lambda x, *residual: ops.layer_norm(
            x, w, b, residual=residual[0] if fused else None, backend=by, **options
        )

    def plain(x, *residual):
        if fused:
            return peers.plain_fused_layer_norm(x, *residual, *low, DROPOUT)
        return peers.plain_layer_norm(x, *low)

    def other(load):
        norm = load()
        return lambda x: norm(x, *low)

    theirs = {"torch": lambda: plain, "torch.compile": lambda: peers.compiled(plain, bench.toy)}
    if not fused:
        for name, load in peers.other_layer_norms().items():
            theirs[name] = functools.partial(other, load)
    kernels = bench.backends("layer_norm")
    makers = {
        ours(by): _forward_and_backward(functools.partial(own, by), sets, grads, (w, b), nbytes)
        for by in kernels
    }
    for name, apply in theirs.items():
        makers[name] = _forward_and_backward(apply, sets, grads, low, nbytes)
    copies = [torch.empty_like(s[0]) for s in sets]
    makers["copy of x"] = 2 * [
        lambda: Variant(
            run=lambda: [c.copy_(s[0].detach()) for c, s in zip(copies, sets, strict=True)],
            calls=len(sets),
            nbytes=2 * state,
        )
    ]
    for i, which in enumerate(("forward", "backward")):
        name = "residual + dropout + LN" if fused else "LN"
        what = f"{name} {which}, T={T}, D={D}, bf16"
        rows = bench.case(what, {name: pair[i] for name, pair in makers.items()})
        for by in () if fused else kernels:
            reached, wanted = bench.fraction(rows.get(ours(by))), LAYER_NORM[by][dim][i]
            bench.target(f"{what}, {by}, fraction of copy", reached, wanted)


class Stack:
    """States, weights and launches of a deep stack, as a history holds them."""

    def __init__(self, bench: Bench, layers: int, T: int, D: int, block: int | None = None):
        self.device = bench.device
        self.rows, self.block = layers + 1, block or default_block(layers + 1)
        self.T, self.D = T, D
        like = torch.empty(T, D, dtype=BF16, device=bench.device)
        self.states = empty_slots(self.rows + 1, like).normal_()
        self.out = empty_slots(self.block, like)
        self.weight = torch.randn(self.rows, self.rows, device=bench.device).tril() / layers
        self.norm_weight, self.norm_bias = torch.randn(2, self.rows, D, device=bench.device)
        self.dweight = torch.zeros_like(self.weight)

    def blocks(self):
        """(first row, end) of every block."""
        starts = range(0, self.rows, self.block)
        return [(start, min(start + self.block, self.rows)) for start in starts]

    def launch(self, by: str):
        """The launches of a backend."""
        return backend.choose("boundary", by, self.device, BF16)[1]

    def mix(self, by: str) -> None:
        launch = self.launch(by)
        for start, end in self.blocks()[1:]:
            launch.mix_rows(
                self.states, list(range(start)), self.weight, list(range(start, end)),
                self.norm_weight, self.norm_bias, self.out, list(range(end - start)), False,
            )  # fmt: skip

    def mix_by_product(self) -> None:
        """The same sums as matrix products in torch, without norm_weight and norm_bias."""
        for start, end in self.blocks()[1:]:
            weight = self.weight[start:end, :start].to(BF16)
            weight @ self.states[:start].flatten(1)

    def pull(self, by: str) -> None:
        launch = self.launch(by)
        for start, end in self.blocks()[:-1]:
            rows = list(range(end, self.rows))
            launch.pull_rows(
                self.states, [r + 1 for r in rows], rows, self.states, list(range(start, end)),
                self.weight, self.norm_weight, self.norm_bias, self.out, list(range(end - start)),
                False, self.dweight,
            )  # fmt: skip

    def nbytes(self, pull: bool) -> int:
        """Each state or gradient is read once in a block's pass, and each sum is written once. A
        pull also reads the block's own states."""
        count = 0
        for start, end in self.blocks():
            far = self.rows - end if pull else start
            count += far + (2 if pull else 1) * (end - start) if far else 0
        return count * self.T * self.D * 2


def depth_mix(bench: Bench) -> None:
    bench.attempt(_depth_mix)
    bench.attempt(_functional_depth_mix)
    for hops in (1, 4):
        bench.attempt(_depth_attention, hops)


def _depth_mix(bench: Bench) -> None:
    """All passes over far states of a forward, and of a backward, of a 100-layer stack."""
    layers, T, D = bench.size((100, 8192, 512), (9, 8, 16))
    stack = Stack(bench, layers, T, D)
    size = f"L={layers}, T={T}, D={D}, bf16"
    moved = stack.nbytes(pull=False)
    kernels = bench.backends("boundary")

    def maker(run, nbytes, *args):
        return lambda: Variant(run=lambda: run(*args), nbytes=nbytes)

    mix = {ours(by): maker(stack.mix, moved, by) for by in kernels}
    mix["torch.mm"] = maker(stack.mix_by_product, moved)
    pull = {ours(by): maker(stack.pull, stack.nbytes(pull=True), by) for by in kernels}
    for i, (which, forms) in enumerate({"forward": mix, "pull": pull}.items()):
        what = f"depth mix {which}, {size}"
        timings = bench.case(what, forms)
        for by in kernels:
            reached = bench.fraction(timings.get(ours(by)))
            bench.target(f"{what}, {by}, fraction of copy", reached, DEPTH_MIX[by][i])


def _functional_depth_mix(bench: Bench) -> None:
    """ops.depth_mix over a list of tensors, with the sources' LN."""
    count, T, D = bench.size((24, 8192, 512), (3, 8, 16))
    weight = torch.randn(count, device=bench.device, requires_grad=True)
    norm = [torch.randn(count, D, device=bench.device, requires_grad=True) for _ in range(2)]

    def apply(by, *sources):
        return ops.depth_mix(
            list(sources), weight, norm_weight=norm[0], norm_bias=norm[1], backend=by
        )

    states = count + 1, 2 * count + 1
    what = "functional depth_mix with LN"
    _over_sources(bench, "depth_mix", what, apply, (weight, *norm), states, (), 8 * count * T)


def _depth_attention(bench: Bench, hops: int) -> None:
    """ops.depth_attention over a list of tensors, with queries against the tensors' RMSNorm."""
    count, _, D = bench.size((24, 8192, 512), (3, 8, 16))
    query = torch.randn(hops, D, device=bench.device, requires_grad=True)

    def apply(by, *sources):
        return ops.depth_attention(list(sources), query, backend=by)

    states = count + hops, 2 * count + 2 * hops
    what = f"depth attention, {hops} hops"
    _over_sources(bench, "depth_attention", what, apply, (query,), states, (hops,), 0)


def _over_sources(bench: Bench, op: str, what: str, apply, leaves, states, hops, more: int) -> None:
    """Forward and backward of an op over a list of tensors.

    states: how many states each direction moves. hops: an axis of the result. more: bytes beside.
    """
    count, T, D = bench.size((24, 8192, 512), (3, 8, 16))
    sets = [[random(bench, T, D, grad=True) for _ in range(count)]]
    grads = [random(bench, T, *hops, D)]
    nbytes = [moved * 2 * T * D + more for moved in states]
    makers = {
        ours(by): _forward_and_backward(
            lambda by=by: functools.partial(apply, by), sets, grads, leaves, nbytes
        )
        for by in bench.backends(op)
    }
    for i, which in enumerate(("forward", "backward")):
        name = f"{what}, {count} sources, T={T}, D={D}, bf16, {which}"
        bench.case(name, {by: pair[i] for by, pair in makers.items()})


def boundary(bench: Bench) -> None:
    for dim in bench.size((512, 1024), (512,)):
        bench.attempt(_boundary, dim)


class Boundary:
    """Boundaries in the middle of their blocks: half of the block's states are near states.

    Each boundary of a run has operands of its own.
    """

    def __init__(self, bench: Bench, dim: int):
        layers, T, D = bench.size((100, 8192, dim), (9, 8, dim // 32))
        self.stack = stack = Stack(bench, layers, T, D)
        self.place = stack.block // 2 - 1
        blocks = stack.blocks()[1:]
        self.ks = [s + self.place for s, end in blocks if end - s == stack.block]
        names = "branch", "residual", "pulled", "dx", "dout"
        self.inputs = {k: {name: random(bench, T, D) for name in names} for k in self.ks}
        weight, bias = torch.randn(2, D, device=bench.device)
        source_rstd, mean, rstd = torch.rand(3, T, device=bench.device)
        self.shared = {
            "states": stack.states, "weight": stack.weight, "norm_weight": stack.norm_weight,
            "norm_bias": stack.norm_bias, "norm_source": True, "source_eps": 1e-5, "out_eps": 1e-5,
            "source_rms": False, "out_rms": False, "dropout_p": DROPOUT, "seed": _seed(bench),
            "out_norm_weight": weight, "out_norm_bias": bias, "source_rstd": source_rstd,
            "out_mean": mean, "out_rstd": rstd, "dweight": stack.dweight, "grads": stack.states,
        }  # fmt: skip
        channels = "dnorm_weight", "dnorm_bias", "dout_norm_weight", "dout_norm_bias"
        self.shared |= {name: torch.empty(D, device=bench.device) for name in channels}

    def call(self, by: str, name: str, k: int, *results: str) -> list[torch.Tensor]:
        """The launch of row k; returns fresh tensors for ``results``."""
        end = k - self.place + self.stack.block
        pulls = list(range(k, end))
        operands = self.shared | self.inputs[k] | {
            "k": k, "near": list(range(k - self.place, k + 1)), "grad_slot": k + 1,
            "partial": self.stack.out[k // self.stack.block % self.stack.block],
            "pull_rows": pulls, "pull_slots": [r + 1 for r in pulls],
        }  # fmt: skip
        made = {result: torch.empty_like(operands["branch"]) for result in results}
        operands |= made
        getattr(self.stack.launch(by), name)(*arguments(name, **operands))
        return list(made.values())

    def forward(self, by: str, k: int):
        return self.call(by, "boundary_forward", k, "x", "out")

    def backward(self, by: str, k: int):
        return self.call(by, "boundary_backward", k, "dbranch", "dresidual")

    def plain(self, _, k: int):
        stack = self.stack
        near = stack.states[k - self.place : k].unbind()
        weights = stack.weight[k, k - self.place : k + 1].to(BF16)
        norm = [self.shared[f"out_norm_{name}"].to(BF16) for name in ("weight", "bias")]
        return peers.plain_boundary(
            self.inputs[k]["branch"], self.inputs[k]["residual"], stack.out[self.place], near,
            weights, norm, norm, DROPOUT,
        )  # fmt: skip

    def maker(self, run, states: int, by: str | None = None):
        """A variant that runs every boundary; ``states`` is how many each moves."""
        moved = states * 2 * self.stack.T * self.stack.D
        return lambda: Variant(
            run=lambda: [run(by, k) for k in self.ks], calls=len(self.ks), nbytes=moved
        )

    @property
    def moved(self) -> tuple[int, int]:
        """States that a forward and a backward read and write."""
        # Read: branch, residual, partial sum, near states. Written: the state, x, LN(x).
        forward = 3 + self.place + 3
        # Read: dx, dout, partial sum, own and near states, far pull, the block's later gradients.
        # Written: the row's gradient, dbranch, dresidual.
        later = self.stack.block - 1 - self.place
        return forward, 3 + 1 + self.place + 1 + later + 3


def _boundary(bench: Bench, dim: int) -> None:
    case = Boundary(bench, dim)
    size = f"T={case.stack.T}, D={case.stack.D}, {case.place} near states, bf16"
    kernels = bench.backends("boundary")
    for which, run, moved in zip(
        ("forward", "backward"), (case.forward, case.backward), case.moved, strict=True
    ):
        what = f"boundary {which}, {size}"
        forms = {ours(by): case.maker(run, moved, by) for by in kernels}
        if which == "forward":
            forms["torch"] = case.maker(case.plain, moved)
        timings = bench.case(what, forms)
        for by in set(kernels) & set(BOUNDARY):
            reached = bench.fraction(timings.get(ours(by)))
            bench.target(f"{what}, {by}, fraction of copy", reached, BOUNDARY[by])
