"""An LSTM layer with peepholes, all steps of a batch in one pass."""

import math

import torch
from torch import Tensor

from deepfast import backend as backends
from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.ops.register import gradients, register, watched
from deepfast.reference.peephole_lstm import peephole_lstm as reference


def _launches(like: Tensor, backend: str | None):
    width = like.shape[-1] // 4
    return backends.choose("peephole_lstm", backend, like.device, like.dtype, width)[1]


def _forward(a):
    results = h, h_last, c_last, c, gates = _fake(a)
    c, gates = (c, gates) if a.keep else (None, None)
    f, weight, h0, lengths = map(_contiguous, (a.f, a.weight, a.h0, a.lengths))
    peephole, c0 = (common.parameter(p, f.dtype) for p in (a.peephole, a.c0))
    _launches(a.f, a.backend).peephole_lstm_forward(
        f=f, weight=weight, peephole=peephole, h0=h0, c0=c0, lengths=lengths, reverse=a.reverse,
        h=h, h_last=h_last, c_last=c_last, c=c, gates=gates,
    )  # fmt: skip
    return results


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _fake(a):
    f, (steps, batch, width) = a.f, a.f.shape
    dtype, shape = compute_dtype(f.dtype), (steps, batch, width // 4)
    h_last = f.new_empty(shape[1:])
    c_last = f.new_empty(shape[1:], dtype=dtype)
    c = f.new_empty(shape if a.keep else 0, dtype=dtype)
    return f.new_empty(shape), h_last, c_last, c, f.new_empty(f.shape if a.keep else 0)


def _weight_grad(
    df: Tensor, h: Tensor, h0: Tensor | None, lengths: Tensor | None, reverse: bool, out: Tensor
) -> None:
    """``sum_t h_{t-1}^T df_t``, one product over all positions.

    h and df are 0 after a sentence's length. A second product adds h0 times the first df.
    """
    steps, batch, dim = h.shape
    before, after = (h[1:], df[:-1]) if reverse else (h[:-1], df[1:])
    torch.mm(before.reshape(-1, dim).T, after.reshape(-1, 4 * dim), out=out)
    if h0 is None or steps == 0:
        return
    if not reverse:
        out.addmm_(h0.T, df[0])
        return
    # A sentence of length 0 may take any position, because its df is 0.
    last = lengths.clamp(1, steps) - 1 if lengths is not None else h0.new_full((batch,), steps - 1)
    first = df.gather(0, last.long().view(1, -1, 1).expand(1, -1, 4 * dim))[0]
    out.addmm_(h0.T, first)


def _grad_forward(a):
    results = df, dweight, dpeephole, dh0, dc0 = _grad_fake(a)
    dh, dh_last, dc_last, weight, lengths = map(
        _contiguous, (a.dh, a.dh_last, a.dc_last, a.weight, a.lengths)
    )
    peephole, c0 = (common.parameter(p, a.h.dtype) for p in (a.peephole, a.c0))
    _launches(a.gates, a.backend).peephole_lstm_backward(
        dh=dh, dh_last=dh_last, dc_last=dc_last, weight=weight, peephole=peephole, c0=c0,
        lengths=lengths, reverse=a.reverse, c=a.c, gates=a.gates, df=df, dh0=dh0, dc0=dc0,
        dpeephole=dpeephole,
    )  # fmt: skip
    if dweight is not None:
        _weight_grad(df, a.h, a.h0, a.lengths, a.reverse, dweight)
    return results


def _grad_fake(a):
    want, state = _peephole_lstm_grad.results._make(a.wants), a.h.shape[1:]
    dweight = a.gates.new_empty(state[1], 4 * state[1]) if want.dweight else None
    dh0 = a.gates.new_empty(state) if want.dh0 else None
    dc0 = a.c.new_empty(state) if want.dc0 else None
    return a.gates.new_empty(a.gates.shape), dweight, a.c.new_empty(3, state[1]), dh0, dc0


def _product_flops(gates) -> int:
    # The product with the recurrent weight.
    return 2 * math.prod(gates) * (gates[-1] // 4)


def _grad_flops(a) -> int:
    want = _peephole_lstm_grad.results._make(a.wants)
    return (2 if want.dweight else 1) * _product_flops(a.gates)


_peephole_lstm_grad = register(
    "peephole_lstm_grad(Tensor h, Tensor? dh, Tensor? dh_last, Tensor? dc_last, Tensor weight, "
    "Tensor peephole, Tensor? h0, Tensor? c0, Tensor? lengths, bool reverse, Tensor c, "
    "Tensor gates, bool[] wants, str? backend) "
    "-> (Tensor df, Tensor dweight, Tensor dpeephole, Tensor dh0, Tensor dc0)",
    _grad_forward,
    fake=_grad_fake,
    flops=_grad_flops,
)


def _plain(a):
    if isinstance(a.f.shape[0], torch.SymInt):
        raise ValueError(
            "peephole_lstm: a decomposition has one block of ops for each of f's positions, so "
            "their number T must be fixed, got a dynamic one"
        )
    return reference(
        a.f, a.weight, a.peephole, h0=a.h0, c0=a.c0, lengths=a.lengths, reverse=a.reverse
    )


def _setup(ctx, a, results):
    return {
        "weight": a.weight, "peephole": a.peephole, "h0": a.h0, "c0": a.c0, "lengths": a.lengths,
        "h": results.h, "c": results.c, "gates": results.gates, "reverse": a.reverse,
        "backend": a.backend,
    }  # fmt: skip


def _backward(ctx, kept, grads):
    if kept["c"].shape != kept["h"].shape:
        raise RuntimeError("peephole_lstm: a gradient needs keep=True, got keep=False")
    return gradients(
        _peephole_lstm_grad, ctx, kept, dh=grads.h, dh_last=grads.h_last, dc_last=grads.c_last
    )


_peephole_lstm = register(
    "peephole_lstm(Tensor f, Tensor weight, Tensor peephole, Tensor? h0, Tensor? c0, "
    "Tensor? lengths, bool reverse, bool keep, str? backend) "
    "-> (Tensor h, Tensor h_last, Tensor c_last, Tensor c, Tensor gates)",
    _forward,
    fake=_fake,
    flops=lambda a: _product_flops(a.f),
    cast=("f", "weight", "h0"),
    setup=_setup,
    backward=_backward,
    plain=_plain,
    public=3,
)


def _check(f, weight, peephole, h0, c0, lengths) -> None:
    op = "peephole_lstm"
    checks.tensor(op, "f", f)
    if f.dim() != 3 or f.shape[2] % 4:
        raise ValueError(f"{op}: f must be (T, B, 4H), got {tuple(f.shape)}")
    steps, batch, dim = f.shape[0], f.shape[1], f.shape[2] // 4
    for name, x, shape in (("weight", weight, (dim, 4 * dim)), ("h0", h0, (batch, dim))):
        if x is None and name == "h0":
            continue
        checks.tensor(op, name, x)
        checks.parameter(op, name, x, shape, f.device)
        if x.dtype != f.dtype:
            raise ValueError(f"{op}: {name} must have f's dtype {f.dtype}, got {x.dtype}")
    checks.tensor(op, "peephole", peephole)
    checks.parameter(op, "peephole", peephole, (3, dim), f.device)
    checks.parameter(op, "c0", c0, (batch, dim), f.device)
    checks.parameter(op, "lengths", lengths, (batch,), f.device, floating=False)
    if lengths is None:
        return
    if lengths.dtype != torch.int64:
        raise ValueError(f"{op}: lengths must be int64, got {lengths.dtype}")
    # Reading a GPU's tensor would wait for the GPU, where kernels clamp the lengths instead.
    if lengths.device.type == "cpu" and not watched(lengths) and batch:
        least, most = lengths.min().item(), lengths.max().item()
        if least < 0 or most > steps:
            raise ValueError(f"{op}: lengths must be from 0 to {steps}, got {least} to {most}")


def peephole_lstm(
    f: Tensor,
    weight: Tensor,
    peephole: Tensor,
    *,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    lengths: Tensor | None = None,
    reverse: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """An LSTM layer with peepholes, from the input f of its gates.

    With the four parts of f_t in the order z, rho, phi, pi, and sigma the logistic function::

        (z, rho, phi, pi) = f_t + h_{t-1} W
        c_t = tanh(z) * sigma(rho + p_0 c_{t-1}) + sigma(phi + p_1 c_{t-1}) * c_{t-1}
        h_t = tanh(c_t) * sigma(pi + p_2 c_t)

    Forward runs all steps in one pass, and so does backward, which then computes the weight's
    gradient as one product. Autograd saves the four activations in f's dtype, h, and c in fp32.
    Arithmetic is in fp32 (fp64 for fp64). Each h is rounded once, and the next step reads the
    rounded h.

    Args:
        f: (T, B, 4H), fp32, bf16, fp16 or fp64. Under autocast fp32 is cast to its dtype, as are
            weight and h0.
        weight: W, (H, 4H) in f's dtype.
        peephole: p, (3, H), any of these dtypes: for the input, the forget and the output gate.
        h0: (B, H) in f's dtype, the first h_{t-1}; None for zeros.
        c0: (B, H), any of these dtypes; None for zeros.
        lengths: (B,) int64, from 0 to T; None for T. After a sentence's length its state does not
            change, whatever f holds, and h is 0.
        reverse: whether to run from a sentence's last position to its first.
        backend: see `deepfast.backend`.

    Returns:
        h (T, B, H) in f's dtype; the last h of each sentence (B, H) in f's dtype; and the last c
        (B, H) in fp32 (fp64 for fp64). For a sentence of length 0 the last two are h0 and c0.

    Raises:
        TypeError, ValueError: for operands that do not fit.
        BackendError: when the requested backend cannot run the op.
        RuntimeError: in backward, for a second derivative.
        NotImplementedError: under forward-mode differentiation (`torch.func.jvp`).

    Source: Zhou et al., Deep Recurrent Models with Fast-Forward Connections for Neural Machine
    Translation, TACL 2016, Eq. 4; Gers, Schmidhuber, Recurrent nets that time and count, 2000.
    """
    if isinstance(f, Tensor) and isinstance(weight, Tensor):
        f, weight, h0 = common.autocast(f, weight, h0)
    _check(f, weight, peephole, h0, c0, lengths)
    checks.flag("peephole_lstm", reverse=reverse)
    given = (f, weight, peephole, h0, c0)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    return _peephole_lstm(f, weight, peephole, h0, c0, lengths, reverse, keep, backend)
