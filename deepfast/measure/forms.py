"""Other ways to compute DLCL and attention residuals, as published, for measurements against
deepfast.

A form is called like the module whose parameters it shares, but has its own history: one object is
one forward pass through a stack, ``x = connect(y)``. All forms of a connection compute one
formula, that of its default options, and differ in how they sum over layers:

    DLCL       x_{l+1} = sum_{k<=l} W[l,k] LN_k(y_k), pre-norm
    attention  x_{l+1} = sum_{k<=l} softmax_k(w_l . RMSNorm(v_k)) v_k, full or in blocks, where
               the v of a block are summed
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import ops
from deepfast.nn import DLCL, AttentionResiduals, DepthHistory

RESIDUAL, STACK, DENSEFORMER = "plain residual", "stack and sum", "DenseFormer form"
LOOP, PER_ROW, COMPILED = "loop of adds", "per row", "compiled"
"""Names of forms, and of what has none of these connections."""

Connection = DLCL | AttentionResiduals
States = list[Tensor]


def deepfast(module: Connection) -> Callable[[Tensor], Tensor]:
    """This package."""
    return partial(module, history=DepthHistory())


def loop_of_adds(states: States, weights: Tensor | Sequence[Tensor]) -> Tensor:
    """A running sum of weight times state: no stack, one read and one write of x per term."""
    x = weights[0] * states[0]
    for k in range(1, len(states)):
        x = x + weights[k] * states[k]
    return x


# ---- DLCL ----------------------------------------------------------------------------------------


def dlcl_form(mix: Callable[[States, Tensor], Tensor], dlcl: DLCL) -> Callable[[Tensor], Tensor]:
    """A form of DLCL.

    mix: from the states z_k = LN_k(y_k) and their weights (K,) to their sum.
    """
    states: States = []

    def connect(y: Tensor) -> Tensor:
        k = len(states)
        # The embedding, which is the first, has no layer-norm.
        norm = dlcl.norm_weight[k], dlcl.norm_bias[k], dlcl.eps
        states.append(F.layer_norm(y, (dlcl.dim,), *norm) if k else y)
        return mix(states, dlcl.weight[k, : k + 1].to(states[-1].dtype))

    return connect


def stack_and_sum(states: States, weight: Tensor) -> Tensor:
    """Stacks all layers, multiplies by their weights, sums: the form of the DLCL paper's code."""
    return (torch.stack(states) * weight.view(-1, *(1,) * states[0].dim())).sum(0)


class _Append(torch.autograd.Function):
    """Writes a layer into the shared buffer and returns the filled part.

    The view is made outside autograd, so writing the next layer does not invalidate it. Its
    gradient goes in two parts: the older layers' to the previous append, the newest layer's to that
    layer.
    """

    @staticmethod
    def forward(ctx, buffer, filled, index, z):
        buffer[index] = z
        ctx.index = index
        view = buffer.new_empty(0)
        view.set_(buffer.untyped_storage(), 0, (index + 1, *buffer.shape[1:]))
        return view

    @staticmethod
    def backward(ctx, grad):
        older = grad[: ctx.index] if ctx.index else None
        return None, older, None, grad[ctx.index]


def denseformer_form(dlcl: DLCL) -> Callable[[Tensor], Tensor]:
    """One buffer and a tensordot per layer: linear memory, as in DenseFormer's module.

    Pagliardini et al., DenseFormer, NeurIPS 2024.
    """
    buffers: States = []

    def mix(states: States, weight: Tensor) -> Tensor:
        *older, z = states
        if not older:
            buffers.append(z.new_empty(dlcl.weight.shape[0], *z.shape))
        # In the place of a state is the part of the buffer that ends with it.
        states[-1] = _Append.apply(*buffers, older[-1] if older else None, len(older), z)
        return torch.tensordot(weight, states[-1], dims=1)

    return dlcl_form(mix, dlcl)


def compiled(function: Callable) -> Callable:
    """The function under `torch.compile`."""
    # A variant for each row or depth, twice where some steps have no gradient.
    torch._dynamo.config.recompile_limit = 256
    return torch.compile(function, fullgraph=True, dynamic=False)


_compiled_loop = cache(partial(compiled, loop_of_adds))


FORMS: dict[str, Callable[[DLCL], Callable]] = {
    STACK: partial(dlcl_form, stack_and_sum),
    DENSEFORMER: denseformer_form,
    LOOP: partial(dlcl_form, loop_of_adds),
    # One fused pass per layer over all layers below it: fewest launches, quadratic reads.
    PER_ROW: partial(dlcl_form, ops.depth_mix),
    COMPILED: lambda dlcl: dlcl_form(_compiled_loop(), dlcl),
    "deepfast": deepfast,
}
"""The forms of DLCL."""


# ---- attention residuals -------------------------------------------------------------------------


def attention_form(
    attend: Callable[[States, Callable, Tensor], Tensor], residuals: AttentionResiduals
) -> Callable[[Tensor], Tensor]:
    """A form of attention residuals.

    attend: from the sources, their RMSNorm and a query (D,) to the sum of the sources.
    """
    values: States = []
    rows = zip(residuals.continues, residuals.query, strict=True)
    norm = partial(F.rms_norm, normalized_shape=(residuals.dim,), eps=residuals.eps)

    def connect(v: Tensor) -> Tensor:
        continues, query = next(rows)
        if continues:
            values[-1] = values[-1] + v
        else:
            values.append(v)
        return attend(values, norm, query)

    return connect


def stacked_attention(values: States, norm: Callable, query: Tensor) -> Tensor:
    """Stacks all sources for every row, as in the pseudocode of the paper (Kimi Team, 2026)."""
    v = torch.stack(values)
    scores = torch.einsum("d,k...d->k...", query, norm(v))
    return torch.einsum("k...,k...d->...d", scores.softmax(0), v)


ATTENTION_FORMS: dict[str, Callable[[AttentionResiduals], Callable]] = {
    STACK: partial(attention_form, stacked_attention),
    # One fused pass per row over all sources.
    PER_ROW: partial(attention_form, lambda v, _norm, query: ops.attention_residual(query, v)),
    "deepfast": deepfast,
}
"""The forms of attention residuals that are compared, deepfast last."""


class InStack(nn.Module):
    """A form in the place of the `DLCL` or `AttentionResiduals` of a pre-norm stack with
    layer-norms."""

    def __init__(self, form, module: Connection):
        super().__init__()
        self.form, self.module = form, module

    def forward(self, y, history, *, residual, dropout_p, out_norm, return_x=True):
        if history.owner is None:
            history.owner = self.form(self.module)
        v = F.dropout(y, dropout_p, self.training)
        x = history.owner(v if residual is None else v + residual)
        n = F.layer_norm(x, x.shape[-1:], out_norm.weight, out_norm.bias, out_norm.eps)
        return x if return_x else None, n


def perturb(module: nn.Module) -> None:
    """Moves the parameters away from their first values, which are the same for all layers."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))


# ---- the connection of a stack alone -------------------------------------------------------------


@torch.library.custom_op("deepfast_measure::layer", mutates_args=())
def copying_layer(x: Tensor) -> Tensor:
    """A layer that copies its input. A compiler cannot look inside, and so cannot fuse what stands
    between two layers with what stands between the next two: with real layers it could not."""
    return x.clone()


copying_layer.register_fake(torch.empty_like)
copying_layer.register_autograd(lambda ctx, grad: copying_layer(grad))


def mixing_alone(
    form: Callable, module: Connection, y: Tensor, layer: Callable | None = None
) -> Tensor:
    """The connection of a whole stack whose layers do nothing, or are all ``layer``. The form
    shares its parameters with the module."""
    connect = form(module)
    y = connect(y)
    for _ in range(module.rows - 1):
        y = connect(y if layer is None else layer(y))
    return y
