"""The layer histories of the DLCL authors' fairseq, and of the forks that descend from it.

A model calls ``history.clean()`` at the start of its forward pass, ``history.add(x)`` with the
embedding and each layer's output, and ``x = history.pop()`` after each. Checkpoints load as before.
"""

from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast.depth.dlcl import DLCL
from deepfast.depth.history import DepthHistory, PerThread

HISTORIES = ("residual", "dense", "learnable_dense", "learnable_dense_nonorm")


class Open(PerThread):
    """The pass that `clean` began."""

    history: DepthHistory | None = None
    x: Tensor | None = None
    """The newest row."""


class LayerHistory(DLCL):
    """A `DLCL` that holds the history of its pass, with one module for each layer-norm.

    Args:
        num_layers, dim, norm, options: as of `DLCL`.
        learnable: False makes W a constant that no checkpoint has.

    Attributes:
        weight: W (L+1, L+1), see `DLCL`.
        layer_norms: of the outputs of the layers (pre-norm), or of the sums (post-norm).
    """

    name = "LayerHistory"

    def __init__(
        self, num_layers: int, dim: int, norm: str | None, learnable: bool = True, **options
    ):
        super().__init__(num_layers, dim, norm=None, learnable=learnable, **options)
        self.norm, self.layer_norms = norm, None
        if norm is not None:
            made: dict = {"device": self.weight.device, "dtype": self.weight.dtype}
            self.layer_norms = nn.ModuleList(nn.LayerNorm(dim, **made) for _ in range(num_layers))
        if not learnable:
            weight = self.weight.detach()
            del self.weight
            self.register_buffer("weight", weight, persistent=False)
        self.open = Open()

    def norms(self) -> tuple[Tensor | None, Tensor | None]:
        if self.layer_norms is None:
            return None, None
        norms: Any = self.layer_norms
        weight, bias = (torch.stack([getattr(m, p) for m in norms]) for p in ("weight", "bias"))
        # The embedding has none.
        return F.pad(weight, (0, 0, 1, 0), value=1.0), F.pad(bias, (0, 0, 1, 0))

    def clean(self) -> None:
        """Begins a forward pass."""
        self.open.history, self.open.x = DepthHistory(), None

    def add(self, layer: Tensor) -> None:
        """Adds the embedding or a layer's output (..., D)."""
        history = self.open.history
        if history is None:
            raise RuntimeError(f"{self.name}: call clean() at the start of each forward pass")
        self.open.x = self(layer, history)
        if len(history) == self.rows:
            self.open.history = None

    def pop(self) -> Tensor:
        """The next layer's input or, after the last layer, the output."""
        if self.open.x is None:
            raise RuntimeError(f"{self.name}: call add(x) before pop()")
        return self.open.x


def CreateLayerHistory(args: Namespace, is_encoder: bool) -> LayerHistory | None:
    """The history of one side of a model, from fairseq's arguments; None where it has none.

    ``{side}_history_type``, with ``{side}_normalize_before``, ``{side}_layers`` and
    ``{side}_embed_dim``::

        learnable_dense         DLCL
        learnable_dense_nonorm  DLCL without layer-norms (pre-norm)
        dense                   the mean of all states or, with ``{side}_integration_type`` "sum",
                                their sum; ``{side}_windows_size`` of the newest states, -1 for all
        residual                the sum of all normalised states (pre-norm)

    Raises:
        ValueError: for another type, and for one that has no post-norm form.
    """
    side = "encoder" if is_encoder else "decoder"
    kind = getattr(args, f"{side}_history_type")
    if kind is None:
        return None
    pre = getattr(args, f"{side}_normalize_before")
    if kind not in HISTORIES:
        raise ValueError(
            f"CreateLayerHistory: {side}_history_type must be one of {HISTORIES}, got {kind!r}"
        )
    if kind in ("residual", "learnable_dense_nonorm") and not pre:
        raise ValueError(
            f"CreateLayerHistory: {side}_history_type={kind!r} is not a sum of layers in "
            f"post-norm; it needs {side}_normalize_before"
        )
    dense = kind == "dense"
    total = dense and getattr(args, f"{side}_integration_type", "avg") == "sum"
    window = getattr(args, f"{side}_windows_size", -1) if dense else -1
    options: dict = {"learnable": kind.startswith("learnable")}
    options["init"] = "one" if total or kind == "residual" else "average"
    options["window"] = None if window == -1 else window
    norm = None if kind == "learnable_dense_nonorm" else "pre" if pre else "post"
    layers, dim = (getattr(args, f"{side}_{size}") for size in ("layers", "embed_dim"))
    return LayerHistory(layers, dim, norm, **options)
