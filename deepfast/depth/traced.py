"""DLCL inside torch.compile: the same sums as one graph of registered ops.

A compiled graph cannot hold the buffer of states that `DepthState` reads and writes. Here each
state is an ordinary tensor, and each row is one `depth_mix` over the states it reads. The result
is the same, but the traffic is quadratic in depth, as in every functional form. For deep stacks
compile the layers and leave the connection eager.
"""

import torch
from torch import Tensor

from deepfast import ops
from deepfast.depth.boundary import OutNorm
from deepfast.depth.history import DepthHistory
from deepfast.ops.layer_norm import normalise


def _sum(y: Tensor, residual: Tensor | None, p: float, seed, backend) -> Tensor:
    """residual + dropout(y)."""
    if p == 0:
        return y if residual is None else y + residual
    residual = torch.zeros_like(y) if residual is None else residual
    _, total = ops.layer_norm(
        y, None, None, residual=residual, dropout_p=p, training=True, seed=seed, backend=backend
    )
    return total


def traced(
    dlcl,
    y: Tensor,
    history: DepthHistory,
    index: int | None,
    residual: Tensor | None,
    dropout_p: float,
    seed: int | Tensor | None,
    out_norm: OutNorm | None,
    want_x: bool,
) -> Tensor | tuple[Tensor | None, Tensor]:
    """`DLCL.forward` with registered ops only; the history keeps the states as they are mixed."""
    k = len(history.traced)
    if history.owner is not None and history.owner is not dlcl:
        raise RuntimeError("DLCL: this history belongs to another stack")
    if k > dlcl.num_layers:
        raise RuntimeError(f"DLCL: this history has all of its {k} states; make a new one")
    if history.state is not None or history.closed:
        raise RuntimeError("DLCL: this history's pass began outside torch.compile, or is closed")
    if index is not None and index != k:
        raise RuntimeError("DLCL: layer called out of order inside torch.compile")
    history.owner = dlcl
    if history.traced_weight is None:
        history.traced_weight = dlcl.effective_weight()
    norm = (dlcl.norm_weight[k], dlcl.norm_bias[k], dlcl.eps) if dlcl.has_norm(k) else None
    z = _sum(y, residual, dropout_p if dlcl.training else 0.0, seed, dlcl.backend)
    if dlcl.norm == "pre" and norm is not None:
        z = ops.layer_norm(z, *norm, backend=dlcl.backend)  # type: ignore[assignment]
    history.traced.append(z)
    reads = dlcl.pattern[k]
    sources = [history.traced[j] for j in reads]
    weight = torch.stack([history.traced_weight[k, j] for j in reads])
    x = ops.depth_mix(sources, weight, backend=dlcl.backend)
    if k == dlcl.num_layers:
        # The compiled graph keeps what backward needs.
        history.traced = [None] * (k + 1)
        history.close()
    if dlcl.norm == "post" and norm is not None:
        return ops.layer_norm(x, *norm, backend=dlcl.backend)
    if out_norm is None:
        return x
    n = normalise("DLCL", x, None, *out_norm, 0.0, False, None, dlcl.backend)
    return x if want_x else None, n  # type: ignore[return-value]
