"""The layer integrators of x-transformers (``integrate_layers=True``), by one fused op."""

from collections.abc import Sequence

from torch import Tensor, nn

from deepfast import ops
from deepfast.integrations.swap import Handle, Swapped


class _LIMe(Swapped):
    """``out_v = sum_l w[v, l] hiddens[l]`` for each token, w = to_weights(x). The op reads the list
    of hiddens once for all views, forward and backward, and makes no stack of it."""

    num_layers: int
    multiple_views: bool
    to_weights: nn.Module

    def forward(self, x: Tensor, hiddens: Tensor | Sequence[Tensor]) -> Tensor:
        if len(hiddens) != self.num_layers:
            raise ValueError(f"DynamicLIMe: expected {self.num_layers} hiddens, got {len(hiddens)}")
        sources = hiddens.unbind(0) if isinstance(hiddens, Tensor) else hiddens
        weight = self.to_weights(x).movedim(0, -1)
        out = ops.depth_mix(sources, weight).movedim(-2, 0)
        return out if self.multiple_views else out[0]


def fuse_layer_integrators(model: nn.Module) -> Handle:
    """Makes the layer integrators of a model of x-transformers compute by `ops.depth_mix`.

    ::

        model = TransformerWrapper(..., attn_layers=Decoder(..., integrate_layers=True))
        handle = deepfast.integrations.fuse_layer_integrators(model)

    Only the class of each ``DynamicLIMe`` in ``model`` changes; no parameter changes its name.

    Returns:
        A handle whose ``remove()`` undoes it.

    Raises:
        TypeError, ValueError: for what is not a module, and for a model that has none.

    Source: Gerasimov et al., LIMe: Layer-Integrated Memory, 2025, arXiv 2502.09245.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(f"fuse_layer_integrators: model must be a module, got {kind}")
    handle = Handle()
    for module in model.modules():
        kind = type(module)
        if kind.__name__ == "DynamicLIMe" and kind.__module__.partition(".")[0] == "x_transformers":
            handle.swap(module, _LIMe)
    if not handle:
        raise ValueError(
            f"fuse_layer_integrators: {type(model).__name__} has no DynamicLIMe of x_transformers; "
            "build its layers with integrate_layers=True"
        )
    return handle
