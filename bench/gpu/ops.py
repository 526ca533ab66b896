"""GPU benchmarks of the ops, most of them of calls of `deepfast.cases`, beside torch and others."""

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.clock import Bench, Variant
from deepfast import backend, ops
from deepfast.cases import ops as calls
from deepfast.cases.case import Case, Rows, torchs, tuple_of
from deepfast.depth.depth_pass import empty_slots
from deepfast.depth.schedule import default_block
from deepfast.launches import LAUNCHES
from deepfast.measure.rows import Row

BF16 = torch.bfloat16
DROPOUT = 0.1

# Target fractions of a copy, forward and backward, by width.
LAYER_NORM = {
    "triton": {512: (0.80, 0.60), 1024: (0.85, 0.65), 4096: (0.90, 0.70)},
    "cuda": {512: (0.85, 0.70), 1024: (0.85, 0.70), 4096: (0.90, 0.70)},
}
DEPTH_MIX = {"triton": (0.80, 0.80), "cuda": (0.90, 0.85)}
BOUNDARY = {"cuda": 0.80}


def random(bench: Bench, *shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, device=bench.device).to(BF16).requires_grad_(grad)


def ours(by: str | None) -> str:
    """The name of a variant of deepfast; None is what deepfast chooses."""
    return "deepfast" if by is None else f"deepfast, {by}"


def compiled(function: Callable, toy: bool) -> Callable:
    """torch.compile; at toy size it traces without generating code."""
    # Imported here: torch itself imports it only with its compiler.
    from torch._functorch import config

    # The benchmarks run one backward many times over the same saved tensors.
    config.donated_buffer = False
    return torch.compile(function, dynamic=False, backend="aot_eager" if toy else "inductor")


def others(package: str, name: str, load: Callable[[], Callable]) -> dict[str, Callable]:
    """A function that imports another package's form; nothing where it is not installed."""
    return {name: load} if importlib.util.find_spec(package) is not None else {}


def _forward_and_backward(form: Callable, sets: list[dict], moved) -> tuple[Callable, Callable]:
    """Functions that make a forward and a backward of ``form`` over all sets of operands."""

    def forward():
        return Variant(run=lambda: [form(**s) for s in sets], calls=len(sets), nbytes=moved[0])

    def backward():
        outputs = [tuple_of(form(**s)) for s in sets]
        grads = [list(map(torch.ones_like, y)) for y in outputs]
        return Variant(
            run=lambda: [
                torch.autograd.grad(y, list(s.values()), g, retain_graph=True)
                for y, s, g in zip(outputs, sets, grads, strict=True)
            ],
            calls=len(sets),
            nbytes=moved[1],
        )

    return forward, backward


def call(bench: Bench, what: str, case: Case, theirs: dict[str, Callable[[], Callable]]):
    """Measures a call forward and backward by every backend, in torch's ops, compiled, and by
    others.

    what: with {} for the direction, forward or backward.
    theirs: by name what makes a form of the operands.

    Returns:
        For forward and backward its name, and the rows by variant.
    """
    nbytes = sum(x.x.numel() * BF16.itemsize for x in case.operands.values())
    count = bench.sets(nbytes)
    own = [case.leaves(BF16, BF16, bench.device) for _ in range(count)]
    low = [case.of_one_dtype(BF16, bench.device) for _ in range(count)]
    moved = [m.nbytes(BF16) for m in case.moved]
    plain = functools.partial(case.plain, torchs)
    theirs = {"torch": lambda: plain, "torch.compile": lambda: compiled(plain, bench.toy)} | theirs
    forms = {
        ours(by): (lambda by=by: functools.partial(case.run, backend=by), own)
        for by in bench.backends(case.op)
    }
    forms |= {name: (load, low) for name, load in theirs.items()}
    first = next(iter(own[0].values())).detach()
    copies = [torch.empty_like(first) for _ in own]
    copy = lambda: Variant(  # noqa: E731
        run=lambda: [c.copy_(next(iter(s.values())).detach())
                     for c, s in zip(copies, own, strict=True)],
        calls=count, nbytes=2 * first.nbytes,
    )  # fmt: skip
    found = []
    for i, which in enumerate(("forward", "backward")):
        makers = {
            name: lambda load=load, sets=sets, i=i: _forward_and_backward(load(), sets, moved)[i]()
            for name, (load, sets) in forms.items()
        }
        title = what.format(which)
        found.append((title, bench.case(title, makers | {"copy of the first operand": copy})))
    return found


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


def _liger_norm():
    function = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
    return lambda x, weight, bias: function.apply(x, weight, bias, 1e-5)


def _fla_norm():
    function = importlib.import_module("fla.modules.layernorm").layer_norm
    return lambda x, weight, bias: function(x, weight, bias, eps=1e-5)


def _layer_norm(bench: Bench, dim: int, fused: bool) -> None:
    """LN alone or, fused, with residual and dropout in the same pass."""
    T, D = bench.size(32768, 8), bench.size(dim, dim // 32)
    case = calls.layer_norm("", Rows((T,), D), residual=fused, p=DROPOUT if fused else 0.0)
    theirs = {} if fused else (
        others("liger_kernel", "Liger", _liger_norm) | others("fla", "fla", _fla_norm)
    )  # fmt: skip
    name = "residual + dropout + LN" if fused else "LN"
    for i, (what, rows) in enumerate(call(bench, f"{name} {{}}, T={T}, D={D}, bf16", case, theirs)):
        for by in () if fused else bench.backends("layer_norm"):
            reached, wanted = bench.fraction(rows.get(ours(by))), LAYER_NORM[by][dim][i]
            bench.target(f"{what}, {by}, fraction of copy", reached, wanted)


def depth_mix(bench: Bench) -> None:
    bench.attempt(_depth_mix)
    count, T, D = bench.size((24, 8192, 512), (3, 8, 16))
    rows, size = Rows((T,), D), f"{count} sources, T={T}, D={D}, bf16, {{}}"
    what = f"functional depth_mix with LN, {size}"
    bench.attempt(call, what, calls.depth_mix("", rows, count), {})
    for hops in (1, 4):
        case = calls.depth_attention("", rows, count, hops, gain=False, lse=False)
        bench.attempt(call, f"depth attention, {hops} hops, {size}", case, {})


def linear_cross_entropy(bench: Bench) -> None:
    for vocabulary in (32000, 128256):
        bench.attempt(_linear_cross_entropy, vocabulary)


def _liger_loss():
    module = importlib.import_module("liger_kernel.transformers")
    loss = module.LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1)
    return lambda hidden, weight, target: loss(weight, hidden, target)


def _linear_cross_entropy(bench: Bench, vocabulary: int) -> None:
    """A step of the projection to a vocabulary and its loss."""
    T, D = bench.size((8192, 512), (8, 16))
    V = bench.size(vocabulary, vocabulary // 1000)
    case = calls.linear_cross_entropy("", Rows((T,), D), V)
    leaves = case.of_one_dtype(BF16, bench.device)
    plain = functools.partial(case.plain, torchs)
    forms: dict[str, Callable] = {
        ours(by): lambda by=by: functools.partial(case.run, backend=by)
        for by in bench.backends("linear_cross_entropy")
    }
    forms |= {"torch": lambda: plain, "torch.compile": lambda: compiled(plain, bench.toy)}
    target = torch.randint(V, (T,), device=bench.device)
    for name, load in ({} if bench.toy else others("liger_kernel", "Liger", _liger_loss)).items():
        forms[name] = lambda load=load: functools.partial(load(), target=target)

    def maker(load):
        def make():
            loss = load()
            # No graph: Liger's form reads a count back to the host. Python's share is small here.
            return Variant(
                run=lambda: torch.autograd.grad(loss(**leaves), list(leaves.values())), graph=False
            )

        return make

    what = f"linear cross entropy, T={T}, D={D}, V={V}, bf16"
    rows = bench.case(what, {name: maker(load) for name, load in forms.items()})
    for by in bench.backends("linear_cross_entropy"):
        if ours(by) in rows and "torch" in rows:
            ratio = rows["torch"].median / rows[ours(by)].median
            bench.target(f"{what}, {by}, times as fast as torch", ratio, 1.0)


# ---- launches of a deep stack --------------------------------------------------------------------


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
                states=self.states, sources=list(range(start)), weight=self.weight,
                rows=list(range(start, end)), norm_weight=self.norm_weight,
                norm_bias=self.norm_bias, out=self.out, out_rows=list(range(end - start)),
                accumulate=False,
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
                grads=self.states, grad_slots=[r + 1 for r in rows], rows=rows, states=self.states,
                sources=list(range(start, end)), weight=self.weight, norm_weight=self.norm_weight,
                norm_bias=self.norm_bias, out=self.out, out_rows=list(range(end - start)),
                accumulate=False, dweight=self.dweight,
            )  # fmt: skip

    def nbytes(self, pull: bool) -> int:
        """Each state or gradient is read once in a block's pass, and each sum is written once. A
        pull also reads the block's own states."""
        count = 0
        for start, end in self.blocks():
            far = self.rows - end if pull else start
            count += far + (2 if pull else 1) * (end - start) if far else 0
        return count * self.T * self.D * 2


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
        blocks = stack.blocks()[1:]
        self.ks = [s + self.place for s, end in blocks if end - s == stack.block]
        names = "branch", "residual", "pulled", "dx", "dout"
        self.inputs = {k: {name: random(bench, T, D) for name in names} for k in self.ks}
        weight, bias = torch.randn(2, D, device=bench.device)
        source_rstd, mean, rstd = torch.rand(3, T, device=bench.device)
        self.shared = {
            "states": stack.states, "weight": stack.weight, "norm_weight": stack.norm_weight,
            "norm_bias": stack.norm_bias, "norm_source": True, "source_eps": 1e-5, "out_eps": 1e-5,
            "source_rms": False, "out_rms": False, "dropout_p": DROPOUT,
            "seed": torch.tensor(5, device=bench.device),
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
        given = {o: operands[o] for o in LAUNCHES[name].names if o in operands}
        getattr(self.stack.launch(by), name)(**given)
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
        return plain_boundary(
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


# ---- attention -----------------------------------------------------------------------------------


def varlen_attention(q, k, v, cu_seqlens, longest: int):
    """torch's flash attention over packed sentences (T, H, d)."""
    from torch.nn.attention.varlen import varlen_attn

    # The further arguments are left out: their names differ between versions of torch.
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest)


def sentence_lengths(tokens: int, shortest: int, longest: int) -> list[int]:
    """Random lengths that add up to ``tokens``."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = int(torch.randint(shortest, longest + 1, (), generator=generator))
        lengths.append(min(drawn, left))
    return lengths


class Packed:
    """Sentences of 20 to 60 tokens: packed, and for SDPA padded to the longest."""

    def __init__(self, bench: Bench):
        tokens, heads, width = bench.size((8192, 8, 64), (16, 1, 16))
        lengths = sentence_lengths(tokens, *bench.size((20, 60), (5, 9)))
        self.longest, self.state = max(lengths), 2 * tokens * heads * width
        self.size = f"{tokens} tokens in {len(lengths)} sentences, {heads} heads of {width}, bf16"
        cu = [0, *accumulate(lengths)]
        self.cu = torch.tensor(cu, dtype=torch.int32, device=bench.device)
        count = bench.sets(8 * self.state)
        # Slices of one projection, as a layer passes them.
        self.packed = [
            [x.detach().requires_grad_() for x in random(bench, tokens, 3, heads, width).unbind(1)]
            for _ in range(count)
        ]
        self.dpacked = [random(bench, tokens, heads, width) for _ in range(count)]
        shape = len(lengths), heads, self.longest, width
        self.padded = [[random(bench, *shape, grad=True) for _ in range(3)] for _ in range(count)]
        self.dpadded = [random(bench, *shape) for _ in range(count)]
        real = torch.arange(self.longest, device=bench.device) < self.cu.diff()[:, None]
        self.mask = real[:, None, None, :]

    def ours(self, q, k, v):
        return ops.attention(
            q, k, v, cu_seqlens_q=self.cu, cu_seqlens_k=self.cu, max_seqlen_q=self.longest,
            max_seqlen_k=self.longest, backend="triton",
        )  # fmt: skip

    def varlen(self, q, k, v):
        return varlen_attention(q, k, v, self.cu, self.longest)

    def sdpa(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, self.mask)

    def maker(self, apply, operands, grads, training: bool):
        def both():
            return [
                torch.autograd.grad(apply(*xs), xs, g) if training else apply(*xs)
                for xs, g in zip(operands, grads, strict=True)
            ]

        moved = (12 if training else 4) * self.state
        return lambda: Variant(run=both, calls=len(operands), nbytes=moved)


def attention(bench: Bench) -> None:
    case = Packed(bench)
    for training in (False, True):
        forms = {
            ours("triton"): case.maker(case.ours, case.packed, case.dpacked, training),
            "SDPA, padded": case.maker(case.sdpa, case.padded, case.dpadded, training),
        }
        reason = backend.refusal("attention", "varlen", bench.device, BF16)
        if reason is None:
            forms["torch varlen"] = case.maker(case.varlen, case.packed, case.dpacked, training)
        elif not training:
            bench.note(f"no torch varlen: {reason}")
        what = f"attention {'forward + backward' if training else 'forward'}, {case.size}"
        timings = bench.case(what, forms)
    fast = timings.pop(ours("triton"), None)
    best = min((t.median for t in timings.values()), default=math.nan)
    reached = best / fast.median if fast and timings else None
    bench.target(f"{what}, times the best of SDPA and varlen", reached, 1.5)
