"""Small calls of every registered op, of `deepfast.cases`, and the operator behind each."""

from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepfast import backend
from deepfast import ops as public
from deepfast.cases import check, ops, sentences
from deepfast.cases.case import Case, Rows, differentiate, masked, tuple_of
from deepfast.ops.add_dropout import add_dropout_op
from deepfast.ops.common import draw_seed
from deepfast.reference import accuracy

LOW = (torch.float32, torch.bfloat16, torch.float16)
T, D, K, N = 5, 16, 3, 7
P = 0.3
HERE = [
    by
    for by in ("cpu", "reference", "triton")
    if backend.why_unable("layer_norm", by, "cpu", torch.float32) is None
]
"""The backends that have kernels of every op here; Triton's run in its interpreter."""


def _packed(name, rows, p):
    """Two sentences, the first of two tokens; two heads share one of the keys."""
    lengths = [2, rows.tokens - 2]
    return sentences.attention(
        name, lengths, None, sentences.Heads(2, D, 2), causal=True, window=1, p=p
    )


def _sum(name, rows, p):
    def run(x, residual, backend):
        seed = draw_seed("add_dropout", ops.SEED, x.device)
        return add_dropout_op(x, residual, p, seed, backend)

    def plain(dropout, x, residual):
        return residual + dropout(x, p, ops.SEED)

    operands = {"x": rows.random(), "residual": rows.random()}
    return Case(name=name, op="boundary", operands=operands, run=run, plain=plain)


def _recurrent(name, rows, _):
    return sentences.peephole_lstm(name, rows.tokens, 2, K, reverse=True, begun=True)


MAKERS = {
    "layer_norm": lambda n, rows, p: ops.layer_norm(n, rows, p=p),
    "add_dropout": _sum,
    "activation": lambda n, rows, p: ops.activation(n, rows, "gelu", p=p),
    "depth_mix": lambda n, rows, _: ops.depth_mix(n, rows, K),
    "depth_mix_sums": lambda n, rows, _: ops.depth_mix_sums(n, rows, K),
    "depth_attention": lambda n, rows, _: ops.depth_attention(n, rows, K, 2, gain=False),
    "norm_linear": lambda n, rows, p: ops.norm_linear(n, rows, N, p=p),
    "feed_forward": lambda n, rows, p: ops.feed_forward(n, rows, N, p=p),
    "attention": _packed,
    "linear_cross_entropy": lambda n, rows, _: sentences.linear_cross_entropy(
        n, rows, N, bias=True
    ),
    "peephole_lstm": _recurrent,
}
NAMES = list(MAKERS)
"""Each is the name of a registered op."""

RMS = {
    "rms_norm": lambda n, rows, p: ops.rms_norm(n, rows, p=p),
    "norm_linear, rms": lambda n, rows, p: ops.norm_linear(n, rows, N, rms=True, p=p),
    "feed_forward, rms": lambda n, rows, p: ops.feed_forward(n, rows, N, rms=True, p=p),
}
FEWER = {
    "layer_norm, alone": lambda n, rows, _: ops.layer_norm(n, rows, residual=False),
    "layer_norm, no bias": lambda n, rows, p: ops.layer_norm(n, rows, p=p, bias=False),
    "relu": lambda n, rows, p: ops.activation(n, rows, "relu", p=p),
    "depth_mix, per channel": lambda n, rows, _: ops.depth_mix(n, rows, K, channels=True),
    "depth_mix, no norm": lambda n, rows, _: ops.depth_mix(n, rows, K, norm=()),
    "depth_attention, scores": lambda n, rows, _: ops.depth_attention(n, rows, K, 2, scored=True),
    "norm_linear, alone": lambda n, rows, _: ops.norm_linear(n, rows, N, residual=False),
    "linear_cross_entropy, of each token": lambda n, rows, _: sentences.linear_cross_entropy(
        n, rows, N, weighted=True, reduction="none"
    ),
}
"""With other or fewer operands."""
EVERY = MAKERS | RMS | FEWER

PRODUCTS = [name for name in EVERY if name.startswith(("norm_linear", "feed_forward"))]
LOSSES = ("linear_cross_entropy", "linear_cross_entropy, of each token")
OTHERS = (*PRODUCTS, *LOSSES, "attention", "peephole_lstm")
ROWS = [name for name in EVERY if name not in OTHERS]
"""Cases over tokens (..., D) without a matrix product, whose bits depend on strides and threads."""


class Seen(TorchDispatchMode):
    """The calls of our ops, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "deepfast":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


class Call:
    """A case with its leaves."""

    def __init__(self, name, backend=None, p=P, lead=T, dim=D):
        lead = lead if isinstance(lead, tuple) else (lead,)
        self.case = EVERY[name](name, Rows(lead, dim), p)
        made = self.case.leaves(torch.float32, torch.float32)
        self.names, self.leaves, self.backend = list(made), list(made.values()), backend

    def run(self, *leaves):
        named = dict(zip(self.names, leaves, strict=True))
        return tuple_of(self.case.run(**named, backend=self.backend))

    def operator(self):
        """The registered op that the call dispatches to, and its arguments."""
        with Seen() as seen:
            self.run(*self.leaves)
        return seen.calls[0]


def of_any_length(name, backend, p):
    """The run of a case on any number of tokens: what goes with their number comes from them."""

    def attention(q, k, v):
        tokens = q.shape[0]  # len(q) would be a constant of an exported program.
        lengths = torch.tensor([0, 2, tokens], dtype=torch.int32)
        options = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "causal": True, "window": 1}
        options |= {"max_seqlen_q": tokens, "max_seqlen_k": tokens, "dropout_p": p}
        return public.attention(q, k, v, **options, seed=ops.SEED, backend=backend)

    def linear_cross_entropy(x, weight, bias=None, each=False):
        tokens = torch.arange(x.shape[0])
        options = {"token_weight": tokens / 2, "reduction": "none"} if each else {}
        options |= {"linear_bias": bias, "backend": backend}
        return public.linear_cross_entropy(x, weight, tokens % N, **options)

    forms = {
        "attention": attention,
        "linear_cross_entropy": linear_cross_entropy,
        "linear_cross_entropy, of each token": partial(linear_cross_entropy, each=True),
    }
    return forms.get(name) or Call(name, backend, p).run


def assert_agrees(case, by, dtype=torch.float32, runs=2):
    """A backend is as near to float64 as the rule says; the reference is the plain form."""
    if by != "reference":
        error = check.fault(case, by, dtype, "cpu", runs)
    elif case.plain is None:
        return
    else:
        plain = partial(case.plain, masked)
        got = differentiate(partial(case.run, backend=by), case.leaves(dtype, dtype), dtype)
        exact = differentiate(plain, case.leaves(dtype, torch.float64), dtype)
        near = differentiate(plain, case.of_one_dtype(accuracy.plain_dtype(dtype)), dtype)
        got = {name: value for name, value in got.items() if not name.startswith("operand")}
        error = accuracy.first_fault(got, near, exact, dtype)
    assert error is None, f"{case.name}: {error}"


def results(run, leaves, wanted=None):
    """Outputs of a call, and the gradients of a loss over all of them, of the leaves ``wanted``."""
    out = tuple_of(run(*leaves))
    loss = sum((o * torch.linspace(-1, 1, o.numel()).view_as(o)).sum() for o in out)
    return [o.detach() for o in out] + list(torch.autograd.grad(loss, wanted or leaves))


def equal(found, wanted):
    return all(map(torch.equal, found, wanted))
