"""DLCL where a compiler watches: the same sums as one graph of registered ops.

The engine of `deepfast.depth.state` writes states and gradients into memory of its own, which
a traced graph cannot hold. Here each state is an ordinary tensor and each row one `depth_mix` over
those it reads: correct, in one graph, but with traffic quadratic in depth, as every functional form
has. For deep stacks compile the layers and leave the connection eager.
"""

import torch
from torch import Tensor

from deepfast import ops
from deepfast.depth.boundary import OutNorm
from deepfast.depth.history import DepthHistory


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
    """`DLCL.forward` from registered ops alone; the history keeps the states as they are mixed."""
    k = len(history.traced)
    if history.state is not None or history.closed:
        raise RuntimeError("DLCL: this history's pass began outside torch.compile, or is closed")
    if history.owner is not None and history.owner is not dlcl:
        raise RuntimeError("DLCL: this history belongs to another stack")
    if k > dlcl.num_layers:
        raise RuntimeError(f"DLCL: this history has all of its {k} states; make a new one")
    if index is not None and index != k:
        raise RuntimeError("DLCL: layer called out of order inside torch.compile")
    history.owner = dlcl
    if history.traced_weight is None:
        history.traced_weight = dlcl.effective_weight()
    has_norm = k > 0 or dlcl.normalize_embedding
    p = dropout_p if dlcl.training else 0.0
    own = None
    if dlcl.norm is not None and has_norm:
        own = dlcl.norm_weight[k], dlcl.norm_bias[k], dlcl.eps
    z = _sum(y, residual, p, seed, dlcl.backend)
    if dlcl.norm == "pre" and own is not None:
        z = ops.layer_norm(z, *own, backend=dlcl.backend)
    history.traced.append(z)
    reads = dlcl.pattern[k]
    sources = [history.traced[j] for j in reads]
    weight = torch.stack([history.traced_weight[k, j] for j in reads])
    x = ops.depth_mix(sources, weight, backend=dlcl.backend)
    if dlcl.norm == "post" and own is not None:
        return ops.layer_norm(x, *own, backend=dlcl.backend)
    if out_norm is None:
        return x
    n = ops.layer_norm(x, *out_norm, backend=dlcl.backend)
    return x if want_x else None, n
