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
from deepfast.cases import sentences
from deepfast.cases.case import Case, Rows, torch_dropout, tuple_of
from deepfast.measure.clock import Row

BF16 = torch.bfloat16
DROPOUT = 0.1

# Target fractions of a copy, forward and backward, by width.
LAYER_NORM = {512: (0.80, 0.60), 1024: (0.85, 0.65), 4096: (0.90, 0.70)}


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


def measure(bench: Bench, what: str, case: Case, theirs: dict[str, Callable[[], Callable]]):
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
    plain = functools.partial(case.plain, torch_dropout)
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
        for dim in bench.size(tuple(LAYER_NORM), (512,)):
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
    theirs = {} if fused or bench.toy else (
        others("liger_kernel", "Liger", _liger_norm) | others("fla", "fla", _fla_norm)
    )  # fmt: skip
    name = "residual + dropout + LN" if fused else "LN"
    for i, (what, rows) in enumerate(
        measure(bench, f"{name} {{}}, T={T}, D={D}, bf16", case, theirs)
    ):
        if not fused:
            reached = bench.fraction(rows.get(ours("triton")))
            bench.target(f"{what}, triton, fraction of copy", reached, LAYER_NORM[dim][i])


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
    case = sentences.linear_cross_entropy("", Rows((T,), D), V)
    leaves = case.of_one_dtype(BF16, bench.device)
    plain = functools.partial(case.plain, torch_dropout)
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


# ---- attention -----------------------------------------------------------------------------------


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

    def variant(self, by: str | None, training: bool) -> Variant:
        """A backend of the op; without ``by`` SDPA, on the padded sentences."""
        operands, grads = (self.packed, self.dpacked) if by else (self.padded, self.dpadded)

        def apply(q, k, v):
            if by is None:
                return F.scaled_dot_product_attention(q, k, v, self.mask)
            return ops.attention(
                q, k, v, cu_seqlens_q=self.cu, cu_seqlens_k=self.cu, max_seqlen_q=self.longest,
                max_seqlen_k=self.longest, backend=by,
            )  # fmt: skip

        def run():
            return [
                torch.autograd.grad(apply(*xs), xs, g) if training else apply(*xs)
                for xs, g in zip(operands, grads, strict=True)
            ]

        moved = (12 if training else 4) * self.state
        return Variant(run=run, calls=len(operands), nbytes=moved)


def attention(bench: Bench) -> None:
    case = Packed(bench)
    for training in (False, True):
        forms = {ours("triton"): "triton", "SDPA, padded": None, "torch varlen": "varlen"}
        reason = backend.why_unable("attention", "varlen", bench.device, BF16)
        if reason is not None:
            del forms["torch varlen"]
            bench.note(f"no torch varlen: {reason}")
        what = f"attention {'forward + backward' if training else 'forward'}, {case.size}"
        timings = bench.case(
            what, {n: functools.partial(case.variant, by, training) for n, by in forms.items()}
        )
    fast = timings.pop(ours("triton"), None)
    best = min((t.median for t in timings.values()), default=math.nan)
    reached = best / fast.median if fast and timings else None
    bench.target(f"{what}, times the best of SDPA and varlen", reached, 1.5)
