"""DLCL: dynamic linear combination of layers."""

import math

import torch
from torch import Tensor, nn

from deepfast import backend as backends
from deepfast import checks, ops
from deepfast.depth.connection import DepthConnection, PassWeights
from deepfast.depth.initial import part
from deepfast.depth.pattern import MaskedWeight, depth_pattern, pattern_mask
from deepfast.depth.weights import ConstantWeights
from deepfast.dtypes import compute_dtype


class DLCL(DepthConnection):
    """Every layer reads a learned weighted sum of all layers below it.

    pre-norm    ``x_{l+1} = sum_{k<=l} W[l,k] * LN_k(y_k)``        the LN belongs to the source
    post-norm   ``x_{l+1} = LN_l(sum_{k<=l} W[l,k] * y_k)``        the LN belongs to the consumer

    y_0 is the embedding, y_k the output of layer k, x_{l+1} the input of layer l + 1. LN_0 is left
    out, as in the authors' code, unless ``normalize_embedding`` is set: y_0 enters the sums as it
    is in pre-norm, and ``x_1 = W[0,0] * y_0`` in post-norm::

        history = deepfast.nn.DepthHistory()
        x = dlcl(embedding, history)               # pushes y_0, returns x_1
        for layer in layers:
            x = dlcl(layer(x), history)            # pushes y_l, returns x_{l+1}

    The last call returns the stack's output. DLCL does not apply a pre-norm stack's final LN.
    Memory is one state per layer, gradients included. Each state is read about sqrt(L) times.

    Args:
        num_layers: L. The weights have L + 1 rows: one for each layer's input, one for the output.
        dim: D.
        norm: "pre", "post" or None.
        norm_kind: "layer" for layer-norms; "rms" for RMS norms, which subtract no mean and have no
            bias.
        weight: "scalar", "group" (channel h uses weight h mod ``groups``) or "vector" (one weight
            per channel).
        groups: number of weights per pair of layers, for "group".
        init: "average" (1 / (l + 1)), "one" or "identity" (1 on the newest state, 0 elsewhere).
            With ``softmax`` these are the weights after the softmax ("one" becomes "average").
        learnable: False freezes the weights at their init.
        softmax: each row of W is passed through a softmax over the states that it reads.
        window, dilation, period: which states a row reads, see `depth_pattern`. A weight outside
            the pattern is exactly 0 and gets no gradient, and the row does not read its state.
        normalize_embedding: True gives index 0 its LN. By default it has none, and row 0 of
            ``norm_weight`` and ``norm_bias`` is not used.
        states: dtype of the states, and so of x, under autocast. "float32" widens 16-bit inputs, as
            torch's layer-norm does on a GPU: the residual stream of a model around it keeps its
            precision. "autocast" narrows fp32 inputs to autocast's dtype: half the memory, for
            layers that read 16 bits, as those of `TransformerEncoder`. Without autocast states have
            the dtype of what is pushed.
        eps: added to the variance in the layer-norms, or to the mean square in the RMS norms.
        backend: see `deepfast.backend`.

    Attributes:
        weight: (L+1, L+1), or (L+1, L+1, groups) or (L+1, L+1, D); row l feeds layer l + 1.
        norm_weight, norm_bias: (L+1, D), or None without norm. RMS norms have no bias.

    Source: Wang et al., Learning Deep Transformer Models for Machine Translation, ACL 2019,
    Eq. 7 to 9.
    """

    name = "DLCL"

    def __init__(
        self,
        num_layers: int,
        dim: int,
        *,
        norm: str | None = "pre",
        norm_kind: str = "layer",
        weight: str = "scalar",
        groups: int | None = None,
        init: str = "average",
        learnable: bool = True,
        softmax: bool = False,
        window: int | None = None,
        dilation: int = 1,
        period: int = 1,
        normalize_embedding: bool = False,
        states: str = "float32",
        eps: float = 1e-5,
        backend: str | None = None,
    ):
        checks.choice("DLCL", ("pre", "post", None), norm=norm)
        checks.choice("DLCL", ("layer", "rms"), norm_kind=norm_kind)
        checks.choice("DLCL", ("scalar", "group", "vector"), weight=weight)
        checks.choice("DLCL", ("average", "one", "identity"), init=init)
        checks.whole("DLCL", num_layers=num_layers, dim=dim, dilation=dilation, period=period)
        for name, size in (("window", window), ("groups", groups)):
            if size is not None:
                checks.whole("DLCL", **{name: size})
        checks.flag(
            "DLCL", learnable=learnable, softmax=softmax, normalize_embedding=normalize_embedding
        )
        checks.eps("DLCL", eps)
        if weight == "group" and groups is None:
            raise ValueError(f"DLCL: weight='group' needs groups, from 1 to {dim}, got None")
        if weight != "group" and groups is not None:
            raise ValueError(f"DLCL: {groups=} needs weight='group', got {weight=}")
        if groups is not None and groups > dim:
            raise ValueError(f"DLCL: groups must be between 1 and {dim}, got {groups}")
        pattern = depth_pattern(num_layers + 1, window, dilation, period)
        super().__init__(
            num_layers, dim, pattern, norm=norm, states=states, eps=eps, backend=backend
        )
        self.kind, self.norm_kind = weight, norm_kind
        self.groups, self.init, self.softmax = groups, init, softmax
        self.window, self.dilation, self.period = window, dilation, period
        self.normalize_embedding = normalize_embedding
        # Computed on first use and shared by all passes.
        self._masks: dict[torch.device, Tensor] = {}
        rows = self.rows
        self.extra = {"scalar": (), "group": (groups,), "vector": (dim,)}[weight]
        """The sizes of a weight of one pair of layers."""
        self.weight = nn.Parameter(torch.empty(rows, rows, *self.extra), requires_grad=learnable)
        self.norm_weight = self.norm_bias = None
        if norm is not None:
            self.norm_weight = nn.Parameter(torch.empty(rows, dim))
            if norm_kind == "layer":
                self.norm_bias = nn.Parameter(torch.empty(rows, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # The softmax of log w is w for rows that add up to one; the log of 0 counts as -30.
        nn.init.constant_(self.weight, -30.0 if self.softmax else 0.0)
        for row, sources in enumerate(self.pattern):
            value = 1.0 / len(sources) if self.init == "average" else 1.0
            value = math.log(value) if self.softmax else value
            for k in (row,) if self.init == "identity" else sources:
                nn.init.constant_(part(self.weight, (row, k)), value)
        if self.norm_weight is not None:
            nn.init.ones_(self.norm_weight)
        if self.norm_bias is not None:
            nn.init.zeros_(self.norm_bias)

    def effective_weight(self) -> Tensor:
        """W as it is applied: masked to the pattern and, with ``softmax``, a softmax of each row.

        Returns:
            (L+1, L+1) or (L+1, L+1, D), with gradient.
        """
        weight = self._own("weight", self.rows, self.rows, *self.extra)
        mask = self._mask(weight.device)
        mask = mask.view(*mask.shape, *(1,) * len(self.extra))
        weight = MaskedWeight.apply(weight, mask, self.softmax)
        if self.kind == "group":
            weight = weight.repeat(1, 1, -(-self.dim // self.groups))[:, :, : self.dim]
        return weight

    def norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Weights and biases (L+1, D) of the norms, or None, with gradient."""
        shape, needed = (self.rows, self.dim), self.norm is not None
        weight = self._own("norm_weight", *shape, needed=needed)
        return weight, self._own("norm_bias", *shape, needed=False)

    def _mask(self, device: torch.device) -> Tensor:
        if device in self._masks:
            return self._masks[device]
        mask = pattern_mask(self.pattern, device)
        # A mask created while tracing, as a fake tensor or in inference mode cannot be reused.
        if not torch.compiler.is_compiling() and type(mask) is Tensor and not mask.is_inference():
            self._masks[device] = mask
        return mask

    def _pass_weights(self, y: Tensor, learning: bool) -> PassWeights:
        plain = 0 if self.normalize_embedding else 1
        return self._pass_of(self.effective_weight(), self.norms(), plain, y, learning)

    def _pass_of(
        self,
        weight: Tensor,
        parameters: tuple[Tensor | None, Tensor | None],
        plain: int,
        y: Tensor,
        learning: bool,
    ) -> PassWeights:
        """A pass with this W, and these weights and biases of norms, of which the first
        ``plain`` are not used."""
        dtype = compute_dtype(y.dtype)
        norms: tuple[Tensor, Tensor | None] | None = None
        if self.norm is not None:
            # Copies: a parameter changed before backward must not change this pass.
            norm_weight, norm_bias = (
                None if p is None else p.detach().to(dtype, copy=True).contiguous()
                for p in parameters
            )
            # Assigning a number may copy it from the host.
            norm_weight[:plain].fill_(1.0)
            if norm_bias is not None:
                norm_bias[:plain].zero_()
            norms = norm_weight, norm_bias
        _, launch = backends.choose("boundary", self.backend, y.device, y.dtype, y.shape[-1])
        copy = weight.detach().to(dtype, copy=True).contiguous()
        weights = ConstantWeights(launch, copy, learning and weight.requires_grad)
        return PassWeights(weights, (weight, *parameters), norms)

    def traced_weights(self) -> Tensor:
        return self.effective_weight()

    def traced_row(self, sources: list[Tensor], k: int, weights: Tensor) -> Tensor:
        weight = torch.stack([weights[k, j] for j in self.pattern[k]])
        return ops.depth_mix(sources, weight, backend=self.backend)

    def extra_repr(self) -> str:
        return (
            f"num_layers={self.num_layers}, dim={self.dim}, norm={self.norm!r}, "
            f"norm_kind={self.norm_kind!r}, "
            f"weight={self.kind!r}, init={self.init!r}"
        )
