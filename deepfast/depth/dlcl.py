"""DLCL: dynamic linear combination of layers."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepfast import checks, ops
from deepfast.depth.buffers import numbers_of_rows
from deepfast.depth.connection import DepthConnection, part
from deepfast.depth.depth_pass import DepthPass, Launches
from deepfast.depth.push import OutNorm
from deepfast.depth.schedule import depth_pattern
from deepfast.ops.depth_mix import depth_mix_sums


class ConstantPass(DepthPass):
    """``x_{l+1} = sum_k W[l,k] z_k``, the same weights for all tokens.

    Its parameters are W (L+1, L+1) or (L+1, L+1, D), zero outside the pattern, and (L+1, D) or None
    the weights and the biases of the norms that the connection gives to states (pre-norm) or to
    rows (post-norm).
    """

    op = "boundary"
    launches = Launches("boundary_forward", "boundary_backward", "mix_rows", "pull_rows")

    def begin(self, tokens: int) -> None:
        owner = self.owner
        self.weight, *self.norms = self.parameters
        self.pre, rms = owner.norm == "pre", owner.norm_type == "rms"
        self.has_norm = [owner.has_norm(k) for k in range(self.rows)]
        # Kernels apply weight and bias to every state. The states without a norm come first: in
        # these copies they get weight 1 and bias 0, each by one assignment.
        plain = self.has_norm.index(True) if True in self.has_norm else 0
        for p, neutral in zip(self.norms, (1.0, 0.0), strict=True):
            if p is not None:
                p[:plain].fill_(neutral)
        norm_weight, norm_bias = self.norms if self.pre else (None, None)
        self.weights = {"weight": self.weight, "norm_weight": norm_weight, "norm_bias": norm_bias}
        self.source_norms: list[dict[str, Any]] = [
            {"norm_source": self.pre and has_norm, "source_rms": rms, "source_rstd": None}
            for has_norm in self.has_norm
        ]
        """The norm of each state."""
        if self.pre:
            rstds = numbers_of_rows(self.weight, self.rows, tokens)
            for norm, rstd in zip(self.source_norms, rstds, strict=True):
                norm["source_rstd"] = rstd
        elif owner.norm == "post":
            self.own_norms = [
                None if weight is None else OutNorm(weight, bias, owner.eps, rms)
                for weight, bias in self._by_row(self.norms)
            ]
        self.take_grads()

    def _by_row(self, norms: Sequence[Tensor | None]) -> list[tuple]:
        """(weight[k], bias[k]) of every row or state k that has a norm, else (None, None)."""
        columns = [[None] * self.rows if p is None else p.unbind(0) for p in norms]
        pairs = zip(self.has_norm, *columns, strict=True)
        return [(weight, bias) if has else (None, None) for has, weight, bias in pairs]

    def release(self) -> None:
        super().release()
        self.source_norms = []

    def forward_weights(self, k: int, partial: Tensor | None) -> dict[str, Any]:
        return {"source_eps": self.owner.eps, **self.source_norms[k], **self.weights}

    def backward_weights(self, k: int, dout: Tensor | None) -> dict[str, Any]:
        dnorm_weight, dnorm_bias = self.source_grads[k]
        return {
            "partial": None if dout is None else self.partial(k),
            "dweight": self.dweight,
            "dnorm_weight": dnorm_weight,
            "dnorm_bias": dnorm_bias,
            **self.source_norms[k],
            **self.weights,
        }

    def mix_weights(self) -> dict[str, Any]:
        return self.weights

    def pull_weights(self) -> dict[str, Any]:
        return {"dweight": self.dweight, **self.weights}

    def begin_grads(self) -> None:
        weight_learns, *norms_learn = self.learns
        if weight_learns:
            self.dweight = torch.zeros_like(self.weight)
        if any(norms_learn):
            self.dnorms = [None if p is None else torch.zeros_like(p) for p in self.norms]
            if self.pre:
                self.source_grads = self._by_row(self.dnorms)
            else:
                self.own_norm_grads = self._by_row(self.dnorms)

    dweight: Tensor | None = None
    dnorms: Sequence[Tensor | None] = (None, None)

    def take_grads(self) -> tuple[Tensor | None, ...]:
        grads = self.dweight, *self.dnorms
        self.dweight, self.dnorms = None, (None, None)
        self.source_grads = self.own_norm_grads = [(None, None)] * self.rows
        return grads


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
        norm_type: "layer" for layer-norms; "rms" for RMS norms, which subtract no mean and have no
            bias.
        weight_type: "scalar", "group" (channel h uses weight h mod ``groups``) or "vector" (one
            weight per channel).
        groups: number of weights per pair of layers, for "group".
        init: "average" (1 / (l + 1)), "one" or "identity" (1 on the newest state, 0 elsewhere).
            With ``softmax`` these are the weights after the softmax ("one" becomes "average").
        learnable: False freezes the weights at their init.
        softmax: each row of W is passed through a softmax over the states that it reads.
        window, dilation, period: which states a row reads, see `depth_pattern`. A weight outside
            the pattern is exactly 0 and gets no gradient, and the row does not read its state.
        normalize_embedding: True gives index 0 its LN. By default it has none, and row 0 of
            ``norm_weight`` and ``norm_bias`` is not used.
        state_dtype: dtype of the states, and so of x, under autocast. torch.float32 widens 16-bit
            inputs, as torch's layer-norm does on a GPU: the residual stream of a model around it
            keeps its precision. None narrows fp32 inputs to autocast's dtype: half the memory, for
            layers that read 16 bits, as those of `TransformerEncoder`. Without autocast states have
            the dtype of what is pushed.
        eps: added to the variance in the layer-norms, or to the mean square in the RMS norms.
        backend: see `deepfast.backend`.
        device, dtype: of the parameters, as in `torch.nn`.

    Attributes:
        weight: (L+1, L+1), or (L+1, L+1, groups) or (L+1, L+1, D); row l feeds layer l + 1.
        norm_weight, norm_bias: (L+1, D), or None without norm. RMS norms have no bias.

    Source: Wang et al., Learning Deep Transformer Models for Machine Translation, ACL 2019,
    Eq. 7 to 9.
    """

    name, pass_kind = "DLCL", ConstantPass

    def __init__(
        self,
        num_layers: int,
        dim: int,
        *,
        norm: str | None = "pre",
        norm_type: str = "layer",
        weight_type: str = "scalar",
        groups: int | None = None,
        init: str = "average",
        learnable: bool = True,
        softmax: bool = False,
        window: int | None = None,
        dilation: int = 1,
        period: int = 1,
        normalize_embedding: bool = False,
        state_dtype: torch.dtype | None = torch.float32,
        eps: float = 1e-5,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        checks.choice("DLCL", ("pre", "post", None), norm=norm)
        checks.choice("DLCL", ("layer", "rms"), norm_type=norm_type)
        checks.choice("DLCL", ("scalar", "group", "vector"), weight_type=weight_type)
        checks.choice("DLCL", ("average", "one", "identity"), init=init)
        checks.whole("DLCL", num_layers=num_layers, dim=dim, dilation=dilation, period=period)
        for name, size in (("window", window), ("groups", groups)):
            if size is not None:
                checks.whole("DLCL", **{name: size})
        checks.flag(
            "DLCL", learnable=learnable, softmax=softmax, normalize_embedding=normalize_embedding
        )
        checks.eps("DLCL", eps)
        if weight_type == "group" and groups is None:
            raise ValueError(f"DLCL: weight_type='group' needs groups, from 1 to {dim}, got None")
        if weight_type != "group" and groups is not None:
            raise ValueError(f"DLCL: {groups=} needs weight_type='group', got {weight_type=}")
        if groups is not None and groups > dim:
            raise ValueError(f"DLCL: groups must be between 1 and {dim}, got {groups}")
        pattern = depth_pattern(num_layers + 1, window, dilation, period)
        super().__init__(
            num_layers, dim, pattern, norm=norm, state_dtype=state_dtype, eps=eps, backend=backend
        )
        self.weight_type, self.norm_type = weight_type, norm_type
        self.groups, self.init, self.softmax = groups, init, softmax
        self.window, self.dilation, self.period = window, dilation, period
        self.normalize_embedding = normalize_embedding
        # Computed on first use and shared by all passes.
        self._masks: dict[torch.device, Tensor] = {}
        rows = self.rows
        self.extra = {"scalar": (), "group": (groups,), "vector": (dim,)}[weight_type]
        """The sizes of a weight of one pair of layers."""
        factory: dict = {"device": device, "dtype": dtype}
        weight = torch.empty(rows, rows, *self.extra, **factory)
        self.weight = nn.Parameter(weight, requires_grad=learnable)
        self.norm_weight = self.norm_bias = None
        if norm is not None:
            self.norm_weight = nn.Parameter(torch.empty(rows, dim, **factory))
            if norm_type == "layer":
                self.norm_bias = nn.Parameter(torch.empty(rows, dim, **factory))
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
        weight = self._checked("weight", self.rows, self.rows, *self.extra)
        mask = self._mask(weight.device)
        mask = mask.view(*mask.shape, *(1,) * len(self.extra))
        if self.softmax:
            weight = weight.masked_fill(~mask, float("-inf")).softmax(dim=1)
        else:
            weight = weight.masked_fill(~mask, 0)
        if self.weight_type == "group":
            weight = weight.repeat(1, 1, -(-self.dim // self.groups))[:, :, : self.dim]
        return weight

    def norms(self) -> tuple[Tensor | None, Tensor | None]:
        shape, needed = (self.rows, self.dim), self.norm is not None
        weight = self._checked("norm_weight", *shape, needed=needed)
        return weight, self._checked("norm_bias", *shape, needed=False)

    def _mask(self, device: torch.device) -> Tensor:
        """(L+1, L+1) bool: whether row l reads state k."""
        if device in self._masks:
            return self._masks[device]
        mask = torch.zeros(self.rows, self.rows, dtype=torch.bool)
        for row, sources in enumerate(self.pattern):
            mask[row, list(sources)] = True
        mask = mask.to(device)
        # A mask created while tracing, as a fake tensor or in inference mode cannot be reused.
        if not torch.compiler.is_compiling() and type(mask) is Tensor and not mask.is_inference():
            self._masks[device] = mask
        return mask

    def pass_parameters(self) -> tuple[Tensor | None, ...]:
        return self.effective_weight(), *self.norms()

    def traced_row(self, states, indices, k, weights, partial) -> Tensor:
        weight = torch.stack([weights[k, j] for j in indices])
        if partial is not None:
            states, weight = [*partial, *states], torch.cat((weight.new_ones(1), weight))
        return ops.depth_mix(states, weight, backend=self.backend)

    def traced_far(self, states, indices, rows, weights) -> list[tuple[Tensor, int]] | None:
        # The sums have the dtype of the states, and in fp16 some could pass its largest number.
        if weights.dim() > 2 or states[0].dtype == torch.float16:
            return None
        weight = weights[rows.start : rows.stop, indices].T
        return [(depth_mix_sums(states, weight, self.backend), -2)]

    def extra_repr(self) -> str:
        return (
            f"num_layers={self.num_layers}, dim={self.dim}, norm={self.norm!r}, "
            f"norm_type={self.norm_type!r}, "
            f"weight_type={self.weight_type!r}, init={self.init!r}"
        )
