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
    f: Tensor,
    weight: Tensor,
    peephole: Tensor,
    *,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    lengths: Tensor | None = None,
    reverse: bool = False,
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
