"""Multi-layer representation fusion: combines the states of all layers into one state."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import checks, ops
from deepfast.nn.layer_norm import LayerNorm
from deepfast.ops import common
from deepfast.reference.layer_norm import compute_dtype

OPTIONS = {
    "average": (),
    "feed_forward": ("hidden_dim",),
    "attention": ("hops", "attention_dim", "hidden_dim", "activation", "shared"),
    "channel_attention": ("attention_dim", "activation", "shared"),
}
"""Kind of fusion -> the arguments of `LayerFusion` that this kind reads and some others do not."""
FUSIONS = tuple(OPTIONS)
WITH_ATTENTION = ("attention", "channel_attention")
ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu}


class LayerFusion(nn.Module):
    """Combines the states z_0 .. z_L of all layers into one state y; z_0 is the embedding.

    average             ``y = 1 / (L + 1) sum_l z_l``
    feed_forward        ``y = W_b max(0, W_a [z_0; ...; z_L])``
    attention           ``a_lh = softmax_l(W_2 s(W_1 z~_l))_h`` with ``z~_l = z_l + E_l``,
                        ``m_h = sum_l a_lh z~_l`` and ``y = W_b max(0, W_a [m_1; ...; m_hops])``
    channel_attention   ``a_l = softmax_l(W_2 s(W_1 z~_l))``, one weight per channel, and
                        ``y = sum_l a_l * z~_l``

    W_a and W_b have biases. Every kind returns LN(y). In "attention" the softmax over layers and
    the weighted sum are one pass (`deepfast.ops.depth_attention`), which allocates neither a stack
    of the states nor z~.

    Args:
        num_states: L + 1.
        dim: D.
        kind: one of `FUSIONS`.
        hops: number of softmaxes in "attention". Not every kind reads hops, attention_dim,
            hidden_dim, activation and shared; see `OPTIONS`.
        attention_dim: rows of W_1.
        hidden_dim: width of the feed-forward layer.
        activation: s, "tanh" or "relu".
        shared: True for one W_1 for all layers, False for one W_1 per layer.
        source_norm: True for the states of a pre-norm stack. Every state except the last then
            passes through its own LN; the last has already passed the stack's final LN.
        own_embedding: False where the caller passes E to `forward`, for example when an encoder
            and a decoder share it.
        backend: see `deepfast.backend`.

    Attributes:
        layer_embedding: E (L + 1, D), initialised uniformly in [-0.1, 0.1], or None.

    Source: Wang et al., Multi-layer Representation Fusion for Neural Machine Translation, COLING
    2018; s = tanh comes from the self-attention that it extends (Lin et al., A
    Structured Self-attentive Sentence Embedding, ICLR 2017).
    """

    # A ModuleList, which does not tell the type of its elements.
    w1: Sequence[nn.Linear]

    def __init__(
        self,
        num_states: int,
        dim: int,
        kind: str = "attention",
        *,
        hops: int = 4,
        attention_dim: int = 1024,
        hidden_dim: int = 512,
        activation: str = "tanh",
        shared: bool = True,
        source_norm: bool = False,
        own_embedding: bool = True,
        backend: str | None = None,
    ):
        super().__init__()
        checks.choice("LayerFusion", FUSIONS, kind=kind)
        checks.choice("LayerFusion", ACTIVATIONS, activation=activation)
        checks.whole(
            "LayerFusion",
            num_states=num_states,
            dim=dim,
            hops=hops,
            attention_dim=attention_dim,
            hidden_dim=hidden_dim,
        )
        checks.flag(
            "LayerFusion", shared=shared, source_norm=source_norm, own_embedding=own_embedding
        )
        self.num_states, self.dim, self.kind, self.backend = num_states, dim, kind, backend
        self.activation = activation
        self.source_norms = None
        if source_norm:
            norms = (LayerNorm(dim, backend=backend) for _ in range(num_states - 1))
            self.source_norms = nn.ModuleList(norms)
        self.layer_embedding = None
        if kind in WITH_ATTENTION:
            if own_embedding:
                self.layer_embedding = layer_embedding(num_states, dim)
            matrices = 1 if shared else num_states
            self.w1 = nn.ModuleList(  # type: ignore[assignment]
                _matrix(dim, attention_dim) for _ in range(matrices)
            )
            self.w2 = _matrix(attention_dim, hops if kind == "attention" else dim)
        if kind in ("feed_forward", "attention"):
            width = dim * (hops if kind == "attention" else num_states)
            self.up = _matrix(width, hidden_dim, bias=True)
            self.down = _matrix(hidden_dim, dim, bias=True)
        self.norm = LayerNorm(dim, backend=backend)

    def reset_parameters(self) -> None:
        if self.layer_embedding is not None:
            nn.init.uniform_(self.layer_embedding, -0.1, 0.1)
        for linear in self.modules():
            if isinstance(linear, nn.Linear):
                _reset(linear)

    def forward(
        self,
        states: Sequence[Tensor],
        layer_embedding: Tensor | None = None,
        *,
        return_attention: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Combines L + 1 states (..., D) into one.

        Args:
            states: z_0 .. z_L of one shape and dtype.
            layer_embedding: E, (at least L + 1, D); only where ``own_embedding`` is False.
            return_attention: whether to return the weights too ("attention" and
                "channel_attention" only).

        Returns:
            (..., D); with ``return_attention`` also the weights over layers, (..., hops, L + 1) or
            (..., D, L + 1) in fp32 (fp64 for fp64), without gradient.

        Raises:
            TypeError, ValueError: for operands that do not fit.
        """
        states = common.checked_sources("LayerFusion", "states", states)
        if len(states) != self.num_states:
            raise ValueError(f"LayerFusion: expected {self.num_states} states, got {len(states)}")
        if states[0].shape[-1] != self.dim:
            shape = tuple(states[0].shape)
            raise ValueError(f"LayerFusion: states[0] must be (..., {self.dim}), got {shape}")
        checks.flag("LayerFusion", return_attention=return_attention)
        if return_attention and self.kind not in WITH_ATTENTION:
            raise ValueError(f"LayerFusion: {self.kind!r} has no attention to return")
        if self.source_norms is not None:
            normed = [norm(z) for norm, z in zip(self.source_norms, states[:-1], strict=True)]
            states = [*normed, states[-1]]
        dtype = compute_dtype(states[0].dtype)
        if self.kind == "average":
            weight = states[0].new_full((len(states),), 1 / len(states), dtype=dtype)
            return self.norm(ops.depth_mix(states, weight, backend=self.backend))
        if self.kind == "feed_forward":
            return self.norm(self._feed_forward(torch.cat(states, -1)))
        embedding = self._embedding(layer_embedding)
        scores = torch.stack(
            [self._score(z, index, embedding[index]) for index, z in enumerate(states)], -2
        )
        weights = scores.to(dtype).softmax(-2)
        if self.kind == "attention":
            m: Tensor = ops.depth_attention(  # type: ignore[assignment]
                states, scores=scores, backend=self.backend
            )
            m = m + (weights.mT @ embedding.to(dtype)).to(m.dtype)
            y = self._feed_forward(m.flatten(-2))
        else:
            parts = weights.unbind(-2)
            y = sum(a * (z + e) for a, z, e in zip(parts, states, embedding, strict=True))
            y = y.to(states[0].dtype)
        y = self.norm(y)
        return (y, weights.detach().mT) if return_attention else y

    def _embedding(self, given: Tensor | None) -> Tensor:
        own = self.layer_embedding
        if (own is None) == (given is None):
            raise ValueError(
                "LayerFusion: layer_embedding must be given exactly when own_embedding=False, got "
                f"{'none' if given is None else 'one beside its own'}"
            )
        embedding = given if own is None else own
        checks.tensor("LayerFusion", "layer_embedding", embedding)
        shape = tuple(embedding.shape)
        if len(shape) != 2 or shape[0] < self.num_states or shape[1] != self.dim:
            raise ValueError(
                f"LayerFusion: layer_embedding must be (at least {self.num_states}, {self.dim}), "
                f"got {shape}"
            )
        return embedding[: self.num_states]

    def _score(self, z: Tensor, index: int, e: Tensor) -> Tensor:
        """(..., hops) or (..., D): ``W_2 s(W_1 (z + e))``, where W_1 e is the bias of W_1 z."""
        w1 = self.w1[index % len(self.w1)].weight
        hidden = F.linear(z, w1, F.linear(e, w1).to(w1.dtype))
        return self.w2(ACTIVATIONS[self.activation](hidden))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.down(ops.activation(self.up(x), "relu", backend=self.backend))

    def extra_repr(self) -> str:
        return f"num_states={self.num_states}, dim={self.dim}, kind={self.kind!r}"


def layer_embedding(num_states: int, dim: int) -> nn.Parameter:
    """E, (L + 1, D), initialised uniformly in [-0.1, 0.1]."""
    embedding = nn.Parameter(torch.empty(num_states, dim))
    return nn.init.uniform_(embedding, -0.1, 0.1)  # type: ignore[return-value]


def _matrix(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias)
    _reset(linear)
    return linear


def _reset(linear: nn.Linear) -> None:
    nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
