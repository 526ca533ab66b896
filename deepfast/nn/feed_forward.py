"""The feed-forward block of a layer, alone or behind the layer's norm."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import ops
from deepfast.depth.connection import part
from deepfast.nn.layer_norm import Norm, add_norm, plain_norm
from deepfast.nn.linear import Gate, gated, gated_parameters, plain
from deepfast.nn.recompute import not_saved, rerun
from deepfast.ops.activation import KINDS
from deepfast.policies import RERUN

ACTIVATIONS = (*KINDS, "swiglu")


class FeedForward(nn.Module):
    """``W_2 dropout(activation(W_1 x))``; with "swiglu" ``W_2 dropout(silu(g) * u)`` where g and u
    are the two halves of ``W_1 x``. The layer around it has checked the arguments."""

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        activation: str = "relu",
        dropout: float = 0.0,
        *,
        backend: str | None = None,
        **factory: Any,
    ):
        super().__init__()
        self.activation, self.dropout, self.backend = activation, dropout, backend
        self.up = nn.Linear(dim, (1 + (activation == "swiglu")) * ffn_dim, **factory)
        self.down = nn.Linear(ffn_dim, dim, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        channels = self.down.in_features
        for start in range(0, self.up.out_features, channels):
            nn.init.xavier_uniform_(part(self.up.weight, slice(start, start + channels)))
        nn.init.xavier_uniform_(self.down.weight)
        for linear in (self.up, self.down):
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, gate: Gate | None = None) -> Tensor:
        # The first product has no name here, so that `_rest` can free it.
        bias = self.up.bias if plain(self.up, nn.Linear) else None
        return self._rest(self._first(x), gate, bias)

    def _first(self, x: Tensor) -> Tensor:
        """The first product; where the layer is plain, without its bias."""
        with not_saved(x, self.up):
            return F.linear(x, self.up.weight) if plain(self.up, nn.Linear) else self.up(x)

    def after_norm(
        self,
        norm: Norm,
        x: Tensor,
        residual: Tensor | None,
        dropout_p: float,
        *,
        recompute: str = "none",
        return_norm: bool = False,
        gate: Gate | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(s, branch) of ``s = residual + dropout(x)``, or (n, branch) with ``return_norm``.

        Without a residual s is x.

        The branch is ``gate * feed_forward(n)`` with n = LN(s). Where the op is fused, autograd
        saves neither n nor masks, and ``recompute`` decides whether it saves the hidden activation.
        """
        swiglu = self.activation == "swiglu"
        fused = plain_norm(norm) and plain(self.up, nn.Linear) and not swiglu
        # A rerun stops before the last product, which it could not do inside one op.
        apart = recompute in RERUN or not plain(self.down, nn.Linear)
        if not fused or (apart and (residual is None or return_norm)):
            n, s = add_norm(norm, x, residual, dropout_p)
            s = n if return_norm else s
            if swiglu and recompute == "ffn":
                return s, rerun(self, lambda n: self(n, gate), (n,), None, {})
            return s, self(n, gate)
        affine, up = (norm.weight, norm.bias), self.up
        options: dict = {"norm_type": norm.norm_type, "dropout_p": dropout_p}
        options |= {"training": self.training, "backend": norm.backend}
        if apart:
            h, s = ops.add_norm_linear(x, residual, *affine, up.weight, None, norm.eps, **options)
            return s, self._rest(h, gate, up.bias)
        options |= {"activation": self.activation, "activation_dropout_p": self.dropout}
        options |= {"recompute": recompute != "none", "return_norm": return_norm}
        down = gated_parameters(self.down, gate)
        branch, s = ops.feed_forward(
            x, *affine, up.weight, up.bias, *down, norm.eps, residual=residual, **options
        )
        return s, branch

    def _rest(self, h: Tensor, gate: Gate | None, bias: Tensor | None = None) -> Tensor:
        """``gate * W_2 dropout(activation(h + bias))``."""
        p, training = self.dropout, self.training
        if self.activation == "swiglu":
            g, u = (h if bias is None else h + bias).chunk(2, -1)
            return gated(self.down, F.dropout(F.silu(g) * u, p, training), gate)
        options: dict = {"dropout_p": p, "training": training, "backend": self.backend}
        h = ops.activation(h, self.activation, bias=bias, **options)
        return gated(self.down, h, gate)
