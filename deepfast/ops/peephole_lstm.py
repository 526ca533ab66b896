"""An LSTM layer with peepholes, all steps of a batch in one pass."""

from typing import Any

import torch
from torch import Tensor

from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.ops.register import Op, watched
from deepfast.reference.peephole_lstm import peephole_lstm as reference


def _launch_operands(a, like: Tensor) -> tuple[Any, dict]:
    """The launches of the backend, and the operands that forward and backward share, as kernels
    read them."""
    launch = common.launches("peephole_lstm", a.backend, like, like.shape[-1] // 4)
    shared = {"weight": a.weight.contiguous(), "lengths": _contiguous(a.lengths)}
    shared |= {n: common.parameter(getattr(a, n), like.dtype) for n in ("peephole", "c0")}
    return launch, shared | {"reverse": a.reverse}


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _forward(a):
    launch, shared = _launch_operands(a, a.f)
    f, (steps, batch, width), dtype = a.f, a.f.shape, compute_dtype(a.f.dtype)
    h, h_last = f.new_empty(steps, batch, width // 4), f.new_empty(batch, width // 4)
    c_last = torch.empty_like(h_last, dtype=dtype)
    c = torch.empty_like(h, dtype=dtype) if a.keep else None
    gates = f.new_empty(f.shape) if a.keep else None
    results = {"h": h, "h_last": h_last, "c_last": c_last, "c": c, "gates": gates}
    launch.peephole_lstm_forward(f=f.contiguous(), h0=_contiguous(a.h0), **shared, **results)
    return tuple(results.values())


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
    if a.c.shape != a.h.shape:
        raise RuntimeError("peephole_lstm: a gradient needs keep=True, got keep=False")
    launch, shared = _launch_operands(a, a.gates)
    want, (_, batch, dim) = _peephole_lstm_grad.results._make(a.wants), a.h.shape
    df, dpeephole = a.gates.new_empty(a.gates.shape), a.c.new_empty(3, dim)
    dweight = a.gates.new_empty(dim, 4 * dim) if want.dweight else None
    dh0 = a.gates.new_empty(batch, dim) if want.dh0 else None
    dc0 = a.c.new_empty(batch, dim) if want.dc0 else None
    given = {name: _contiguous(getattr(a, name)) for name in ("dh", "dh_last", "dc_last")}
    results = {"df": df, "dh0": dh0, "dc0": dc0, "dpeephole": dpeephole}
    launch.peephole_lstm_backward(**given, **shared, c=a.c, gates=a.gates, **results)
    if dweight is not None:
        _weight_grad(df, a.h, a.h0, a.lengths, a.reverse, dweight)
    return df, dweight, dpeephole, dh0, dc0


def _flops(gates: Tensor, products: int = 1) -> int:
    """Multiplications and additions of ``products`` products with the recurrent weight."""
    return 2 * products * gates.numel() * (gates.shape[-1] // 4)


_peephole_lstm_grad = Op(
    "peephole_lstm_grad(Tensor h, Tensor? dh, Tensor? dh_last, Tensor? dc_last, Tensor weight, "
    "Tensor peephole, Tensor? h0, Tensor? c0, Tensor? lengths, bool reverse, Tensor c, "
    "Tensor gates, bool[] wants, str? backend) "
    "-> (Tensor df, Tensor dweight, Tensor dpeephole, Tensor dh0, Tensor dc0)",
    _grad_forward,
    # The gradient of the weight is a product too.
    flops=lambda a: _flops(a.gates, 1 + a.wants[1]),
)


def _plain(a):
    if isinstance(a.f.shape[0], torch.SymInt):
        raise ValueError(
            "peephole_lstm: a decomposition has one block of ops for each of f's positions, so "
            "their number T must be fixed, got a dynamic one"
        )
    states = {"h0": a.h0, "c0": a.c0, "lengths": a.lengths}
    return reference(a.f, a.weight, a.peephole, reverse=a.reverse, **states)


_peephole_lstm = Op(
    "peephole_lstm(Tensor f, Tensor weight, Tensor peephole, Tensor? h0, Tensor? c0, "
    "Tensor? lengths, bool reverse, bool keep, str? backend) "
    "-> (Tensor h, Tensor h_last, Tensor c_last, Tensor c, Tensor gates)",
    _forward,
    flops=lambda a: _flops(a.f),
    cast=("f", "weight", "h0"),
    grad=_peephole_lstm_grad,
    plain=_plain,
    public=3,
)


def _check(f, weight, peephole, h0, c0, lengths) -> None:
    op = "peephole_lstm"
    checks.tensor(op, "f", f)
    if f.dim() != 3 or f.shape[2] % 4:
        raise ValueError(f"{op}: f must be (T, B, 4H), got {tuple(f.shape)}")
    steps, batch, dim = f.shape[0], f.shape[1], f.shape[2] // 4
    common.fits(op, "weight", weight, (dim, 4 * dim), f)
    if h0 is not None:
        common.fits(op, "h0", h0, (batch, dim), f)
    checks.tensor(op, "peephole", peephole)
    checks.parameter(op, "peephole", peephole, (3, dim), f.device)
    checks.parameter(op, "c0", c0, (batch, dim), f.device)
    if lengths is None:
        return
    common.fits(op, "lengths", lengths, (batch,), f, torch.int64)
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

    Raises: as every op, see `deepfast.ops`.

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
