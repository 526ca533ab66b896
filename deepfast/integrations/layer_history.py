"""The layer histories of the DLCL authors' fairseq, and of the forks that descend from it.

A model calls ``history.clean()`` at the start of its forward pass, ``history.add(x)`` with the
embedding and with the output of each layer, and ``x = history.pop()`` after each of them. The
parameters have the original names, so checkpoints load and models are saved as before.
"""

from argparse import Namespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast.depth.boundary import OpenPass
from deepfast.depth.dlcl import DLCL

HISTORIES = ("residual", "dense", "learnable_dense", "learnable_dense_nonorm")


class LayerHistory(DLCL):
    """A `DLCL` that holds the history of its pass, with one module for each layer-norm.

    Args:
        num_layers, dim: L and D.
        norm: "pre", "post" or None.
        embedding_norm: the entry of the embedding in the list of norms: None (there is none),
            "empty" (without parameters) or "norm".
        parameter: whether W is a parameter; False makes it a constant that no checkpoint has.
        options: arguments of `DLCL` but ``norm_type``: the authors have layer-norms.

    Attributes:
        weight: W (L+1, L+1), see `DLCL`.
        layer_norms: of the outputs of the layers (pre-norm), or of the sums (post-norm).
    """

    name = "LayerHistory"

    def __init__(
        self,
        num_layers: int,
        dim: int,
        norm: str | None,
        *,
        embedding_norm: str | None = None,
        parameter: bool = True,
        **options,
    ):
        super().__init__(num_layers, dim, norm=None, norm_type="layer", **options)
        self.norm = norm
        self.normalize_embedding = embedding_norm == "norm"
        first: dict[str | None, list[nn.Module]]
        first = {None: [], "empty": [nn.Sequential()], "norm": [nn.LayerNorm(dim)]}
        self.layer_norms = None
        if norm is not None:
            modules = [*first[embedding_norm], *(nn.LayerNorm(dim) for _ in range(num_layers))]
            self.layer_norms = nn.ModuleList(modules)
        if not parameter:
            weight = self.weight.detach()
            del self.weight
            self.register_buffer("weight", weight, persistent=False)
        self.open = OpenPass()

    def norms(self) -> tuple[Tensor | None, Tensor | None]:
        if self.layer_norms is None:
            return None, None
        modules = [m for m in self.layer_norms if isinstance(m, nn.LayerNorm)]
        weights: list[Tensor] = [m.weight for m in modules]
        biases: list[Tensor] = [m.bias for m in modules]
        if len(modules) < self.rows:
            weights.insert(0, torch.ones_like(weights[0]))
            biases.insert(0, torch.zeros_like(biases[0]))
        return torch.stack(weights), torch.stack(biases)

    def clean(self) -> None:
        """Begins a forward pass."""
        self.open.begin()

    def add(self, layer: Tensor) -> None:
        """Adds the embedding or a layer's output (..., D)."""
        history = self.open.history
        if history is None:
            raise RuntimeError(f"{self.name}: call clean() at the start of each forward pass")
        self.open.x = self(layer, history)
        if len(history) == self.rows:
            self.open.end()

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
    fixed: dict = {}
    if kind == "residual":
        fixed = {"init": "one"}
    if kind == "dense":
        total = getattr(args, f"{side}_integration_type", "avg") == "sum"
        window = getattr(args, f"{side}_windows_size", -1)
        fixed = {"init": "one" if total else "average", "window": None if window == -1 else window}
    norm = None if kind == "learnable_dense_nonorm" else "pre" if pre else "post"
    return LayerHistory(
        getattr(args, f"{side}_layers"), getattr(args, f"{side}_embed_dim"), norm,
        parameter=not fixed, learnable=not fixed, **fixed,
    )  # fmt: skip


class DynamicLinearCombination(LayerHistory):
    """The module of the authors' published code, which calls ``push`` where others call ``add``.

    Args:
        args: ``weight_type`` "scalar", "scalar_n" or "vector", ``init_value`` "avg" or "one",
            ``normalize_learned_weight``, ``normalize_embed``, ``history_dropout``,
            ``{side}_learnable`` and the sizes, as in `CreateLayerHistory`.
        is_encoder: the side.
        include_sublayer: whether each sublayer pushes, not each layer.

    Raises:
        ValueError: for ``history_window_size``, which the authors' code does not keep to; and for a
            normalised embedding in post-norm, which it normalises twice.
    """

    name = "DynamicLinearCombination"

    def __init__(self, args: Namespace, is_encoder: bool, include_sublayer: bool = False):
        side = "encoder" if is_encoder else "decoder"
        layers, pre = getattr(args, f"{side}_layers"), getattr(args, f"{side}_normalize_before")
        if include_sublayer:
            layers *= 2 if is_encoder else 3
        if args.history_window_size != -1:
            raise ValueError(
                f"{self.name}: history_window_size must be -1, got {args.history_window_size}: "
                "the authors' code reads the states outside of the window too"
            )
        if args.normalize_embed and not pre:
            raise ValueError(
                f"{self.name}: normalize_embed needs {side}_normalize_before: in post-norm the "
                "authors' code normalises the embedding twice"
            )
        kind, _, groups = args.weight_type.partition("_")
        options = {"weight_type": kind}
        if groups:
            options = {"weight_type": "group", "groups": int(groups)}
        super().__init__(
            layers, getattr(args, f"{side}_embed_dim"), "pre" if pre else "post",
            embedding_norm="norm" if args.normalize_embed else "empty",
            init={"avg": "average"}.get(args.init_value, args.init_value),
            softmax=args.normalize_learned_weight, learnable=getattr(args, f"{side}_learnable"),
            **options,
        )  # fmt: skip
        if kind == "scalar" and not groups:
            self.extra = (1,)
            self.weight = nn.Parameter(
                self.weight.detach().unsqueeze(-1), self.weight.requires_grad
            )
        self.out_dropout = args.history_dropout

    def effective_weight(self) -> Tensor:
        weight = super().effective_weight()
        return weight.squeeze(-1) if self.weight_type == "scalar" else weight

    def push(self, layer: Tensor) -> None:
        """Adds the embedding or a layer's output (..., D)."""
        self.add(layer)

    def pop(self) -> Tensor:
        return F.dropout(super().pop(), self.out_dropout, self.training)
