"""An LSTM layer with peepholes; its input f is already projected to the gates.

Zhou et al., Deep Recurrent Models with Fast-Forward Connections for Neural Machine Translation,
TACL 2016, Eq. 4; Gers and Schmidhuber, 2000, for peepholes. f_t has four parts z, rho, phi, pi in
this order, c is the state (r in the paper), and sigma is the logistic function:

    (z, rho, phi, pi) = f_t + h_{t-1} W
    c_t = tanh(z) * sigma(rho + p_rho c_{t-1}) + sigma(phi + p_phi c_{t-1}) * c_{t-1}
    h_t = tanh(c_t) * sigma(pi + p_pi c_t)
"""

import torch
from torch import Tensor

from deepfast.dtypes import compute_dtype
from deepfast.reference.rows import load, put


def cell(z: Tensor, c: Tensor, peephole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step: the four parts (B, 4H) and the state (B, H) to h, c and the four activations."""
    value, rho, phi, pi = z.chunk(4, -1)
    value = value.tanh()
    enter = (rho + peephole[0] * c).sigmoid()
    stay = (phi + peephole[1] * c).sigmoid()
    c = value * enter + stay * c
    leave = (pi + peephole[2] * c).sigmoid()
    return c.tanh() * leave, c, torch.cat((value, enter, stay, leave), -1)


def position(step: int, lengths: Tensor, reverse: bool) -> Tensor:
    """(B,) the position of each sentence in this ``step``."""
    return lengths - 1 - step if reverse else torch.full_like(lengths, step)


def peephole_lstm(
    f: Tensor, weight: Tensor, peephole: Tensor, *, h0=None, c0=None, lengths=None, reverse=False
) -> tuple[Tensor, Tensor, Tensor]:
    """h (T, B, H), and the last h and c (B, H) of each sentence.

    f (T, B, 4H), weight (H, 4H), peephole (3, H) for input, forget and output gate, h0 and c0
    (B, H) or None for zeros, lengths (B,) int64 or None for T. After a sentence's length its state
    does not change, and h is 0. ``reverse`` runs from a sentence's last position to its first.
    """
    steps, batch, width = f.shape
    dtype = compute_dtype(f.dtype)
    zeros = f.new_zeros(batch, width // 4)
    h = zeros if h0 is None else h0
    c = zeros.to(dtype) if c0 is None else c0.to(dtype)
    lengths = torch.full((batch,), steps, device=f.device) if lengths is None else lengths
    rows, out = torch.arange(batch, device=f.device), torch.zeros_like(f[..., : width // 4])
    for step in range(steps):
        active = (step < lengths).unsqueeze(-1)
        place = position(step, lengths, reverse).clamp(min=0), rows
        z = f[place].to(dtype) + h.to(dtype) @ weight.to(dtype)
        new_h, new_c, _ = cell(z, c, peephole.to(dtype))
        h, c = torch.where(active, new_h.to(f.dtype), h), torch.where(active, new_c, c)
        out = out.index_put(place, torch.where(active, h, out[place]))
    return out, h, c


# ---- launches ------------------------------------------------------------------------------------


def _running(steps, batch, lengths, device):
    """The lengths (``steps`` for every sentence where None), and the indices of the sentences."""
    if lengths is None:
        lengths = torch.full((batch,), steps, device=device)
    return lengths.clamp(0, steps), torch.arange(batch, device=device)


def peephole_lstm_forward(a):
    """``z = f_t + h_{t-1} W`` and `cell`, step by step.

    f and gates (T, B, 4H), h and c (T, B, H), c in the compute dtype. c and gates are both given or
    both None. After a sentence's length h, c and gates are 0. h0 and c0 (B, H), or None for zeros.
    """
    length, row = _running(a.f.shape[0], a.f.shape[1], a.lengths, a.f.device)
    w = load(a.weight)
    for out in (a.h, a.c, a.gates):
        if out is not None:
            out.zero_()
    a.h_last.zero_() if a.h0 is None else a.h_last.copy_(a.h0)
    a.c_last.zero_() if a.c0 is None else a.c_last.copy_(a.c0)
    for step in range(a.f.shape[0]):
        at = row[step < length]
        place = position(step, length[at], a.reverse), at
        new_h, new_c, activations = cell(
            load(a.f[place]) + load(a.h_last[at]) @ w, a.c_last[at], a.peephole
        )
        a.h_last[at], a.c_last[at] = new_h.to(a.h.dtype), new_c
        a.h[place] = a.h_last[at]
        if a.c is not None:
            a.c[place], a.gates[place] = new_c, activations.to(a.f.dtype)


def peephole_lstm_backward(a):
    """Gradients of peephole_lstm_forward, except the weight's, ``sum_t h_{t-1}^T df_t``.

    df is 0 after a sentence's length; dh, dh_last and dc_last may be None.
    """
    length, row = _running(a.df.shape[0], a.df.shape[1], a.lengths, a.df.device)
    w = load(a.weight)
    c_zero = a.c.new_zeros(a.c.shape[1:]) if a.c0 is None else a.c0
    dh_in = torch.zeros_like(c_zero) if a.dh_last is None else load(a.dh_last).clone()
    dc_in = torch.zeros_like(c_zero) if a.dc_last is None else a.dc_last.clone()
    a.df.zero_()
    a.dpeephole.zero_()
    for step in reversed(range(a.df.shape[0])):
        at = row[step < length]
        place = position(step, length[at], a.reverse), at
        before = a.c[position(step - 1, length[at], a.reverse), at] if step else c_zero[at]
        value, enter, stay, leave = load(a.gates[place]).chunk(4, -1)
        now, d = a.c[place], dh_in[at] if a.dh is None else dh_in[at] + load(a.dh[place])
        top = now.tanh()
        dpi = d * top * leave * (1 - leave)
        dc = dc_in[at] + d * leave * (1 - top * top) + dpi * a.peephole[2]
        drho, dphi = dc * value * enter * (1 - enter), dc * before * stay * (1 - stay)
        dz = torch.cat((dc * enter * (1 - value * value), drho, dphi, dpi), -1)
        a.df[place] = dz.to(a.df.dtype)
        a.dpeephole.add_(
            torch.stack([(drho * before).sum(0), (dphi * before).sum(0), (dpi * now).sum(0)])
        )
        dc_in[at] = dc * stay + drho * a.peephole[0] + dphi * a.peephole[1]
        dh_in[at] = dz @ w.T
    put(a.dh0, dh_in)
    put(a.dc0, dc_in)
