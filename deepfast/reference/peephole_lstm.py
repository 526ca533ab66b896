"""An LSTM layer with peepholes, from the input of its gates on.

Zhou et al., Deep Recurrent Models with Fast-Forward Connections for Neural Machine Translation,
TACL 2016, Eq. 4; peepholes are Gers and Schmidhuber's, 2000. With f_t the gates' input (its four
parts z, rho, phi, pi in this order), c the state (theirs is called r) and sigma the logistic
function:

    (z, rho, phi, pi) = f_t + h_{t-1} W
    c_t = tanh(z) * sigma(rho + p_rho c_{t-1}) + sigma(phi + p_phi c_{t-1}) * c_{t-1}
    h_t = tanh(c_t) * sigma(pi + p_pi c_t)
"""

import torch
from torch import Tensor

from deepfast.reference.layer_norm import compute_dtype


def cell(z: Tensor, c: Tensor, peephole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step: (B, 4H) of the four parts and (B, H) state to h, c, and the four activations."""
    value, rho, phi, pi = z.chunk(4, -1)
    value = value.tanh()
    enter = (rho + peephole[0] * c).sigmoid()
    stay = (phi + peephole[1] * c).sigmoid()
    c = value * enter + stay * c
    leave = (pi + peephole[2] * c).sigmoid()
    return c.tanh() * leave, c, torch.cat((value, enter, stay, leave), -1)


def position(step: int, lengths: Tensor, reverse: bool) -> Tensor:
    """(B,) the positions at which sentences of these lengths stand in their ``step``."""
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
    """h (T, B, H), and each sentence's last h and c, (B, H).

    f (T, B, 4H), weight (H, 4H), peephole (3, H) for input, forget and output gate, h0 and c0
    (B, H) or None for zeros, lengths (B,) int64 or None for T. A sentence stands still after its
    length, and h is 0 there; ``reverse`` runs from a sentence's own last position to its first.
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
