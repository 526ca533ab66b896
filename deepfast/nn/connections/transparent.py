"""Transparent attention: each decoder layer attends to a mixture of all encoder layers."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import checks, ops


class TransparentAttention(nn.Module):
    """Gives each of M decoder layers its own softmax mixture of L + 1 encoder states.

    ``z_j = sum_k dropout(softmax(W[j]))[k] * h_k``, with h_0 the embedding and h_k the output of
    encoder layer k. In pre-norm h_k is LN_k of that output; the last of these norms is the
    encoder's final LN.

    The op reads the states in place. It allocates neither a stack of them nor normalised copies.

    Args:
        encoder_layers: L.
        decoder_layers: M.
        dim: D.
        norm: "pre" or "post", of the encoder.
        dropout: probability that a weight of a mixture becomes 0, in training.
        eps: of the layer-norms.
        backend: see `deepfast.backend`.
        device, dtype: of the parameters, as in `torch.nn`.

    Attributes:
        weight: (M, L+1) logits. They start at 0, so that every state has the same weight.
        norm_weight, norm_bias: (L, D) in pre-norm, else None.

    Source: Bapna et al., Training Deeper Neural Machine Translation Models with Transparent
    Attention, 2018.
    """

    def __init__(
        self,
        encoder_layers: int,
        decoder_layers: int,
        dim: int,
        *,
        norm: str = "pre",
        dropout: float = 0.1,
        eps: float = 1e-5,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        op = "TransparentAttention"
        checks.choice(op, ("pre", "post"), norm=norm)
        checks.whole(op, encoder_layers=encoder_layers, decoder_layers=decoder_layers, dim=dim)
        checks.probability(op, dropout, argument="dropout")
        checks.eps(op, eps)
        self.encoder_layers, self.decoder_layers, self.dim = encoder_layers, decoder_layers, dim
        self.norm, self.dropout, self.eps, self.backend = norm, dropout, eps, backend
        factory: dict = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(decoder_layers, encoder_layers + 1, **factory))
        self.norm_weight = self.norm_bias = None
        if norm == "pre":
            self.norm_weight = nn.Parameter(torch.empty(encoder_layers, dim, **factory))
            self.norm_bias = nn.Parameter(torch.empty(encoder_layers, dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.norm_weight is not None:
            nn.init.ones_(self.norm_weight)
            nn.init.zeros_(self.norm_bias)

    def forward(self, states: Sequence[Tensor], output: Tensor) -> list[Tensor]:
        """The mixture (T, D) that each decoder layer attends to.

        Args:
            states: L + 1 tensors (T, D), the list that `TransformerEncoder.forward_packed` fills.
            output: (T, D), what `forward_packed` returns: the last state, in pre-norm after the
                final LN.

        Raises:
            TypeError, ValueError: for operands that do not fit.
        """
        if not isinstance(states, Sequence):
            kind = type(states).__name__
            raise TypeError(f"TransparentAttention: states must be a list of tensors, got {kind}")
        if len(states) != self.encoder_layers + 1:
            raise ValueError(
                f"TransparentAttention: expected {self.encoder_layers + 1} states, got "
                f"{len(states)}"
            )
        checks.tensor("TransparentAttention", "output", output)
        if output.shape[-1] != self.dim:
            raise ValueError(
                f"TransparentAttention: output must be (T, {self.dim}), got {tuple(output.shape)}"
            )
        rows = F.dropout(self.weight.softmax(1), self.dropout, self.training)
        return [self._mix(list(states), output, row) for row in rows]

    def _mix(self, states: list[Tensor], output: Tensor, share: Tensor) -> Tensor:
        if self.norm == "post":
            return ops.depth_mix(states, share, backend=self.backend)
        norm: dict = {"norm_weight": self.norm_weight, "norm_bias": self.norm_bias}
        norm["eps"] = self.eps
        below = ops.depth_mix(states[:-1], share[:-1], **norm, backend=self.backend)
        # A second op, because the encoder has already normalised its output.
        both = torch.stack((torch.ones_like(share[-1]), share[-1]))
        return ops.depth_mix([below, output], both, backend=self.backend)

    def extra_repr(self) -> str:
        return (
            f"encoder_layers={self.encoder_layers}, decoder_layers={self.decoder_layers}, "
            f"dim={self.dim}, norm={self.norm!r}, dropout={self.dropout}"
        )
