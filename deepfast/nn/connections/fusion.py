"""Multi-layer representation fusion: combines the states of all layers into one state."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import checks, ops
from deepfast.dtypes import compute_dtype
from deepfast.nn.layer_norm import LayerNorm
from deepfast.nn.linear import check_input
from deepfast.ops import common

OPTIONS = {
    "average": (),
    "feed_forward": ("hidden_dim",),
    "attention": ("hops", "attention_dim", "hidden_dim", "activation", "shared"),
    "channel_attention": ("hops", "attention_dim", "hidden_dim", "activation", "shared"),
}
"""Kind of fusion -> the arguments of `LayerFusion` that this kind reads and some others do not."""
FUSIONS = tuple(OPTIONS)
WITH_ATTENTION = ("attention", "channel_attention")
ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu}


class LayerFusion(nn.Module):
    """Combines the states z_0 .. z_L of all layers into one state y; z_0 is the embedding.

    average             ``y = 1 / (L + 1) sum_l z~_l``
    feed_forward        ``y = W_b max(0, W_a [z~_0; ...; z~_L])``
    attention           ``a_lh = softmax_l(W_2 s(W_1 z~_l))_h``, ``m_h = sum_l a_lh z~_l`` and
                        ``y = W_b max(0, W_a [m_1; ...; m_hops])``
    channel_attention   the same with one weight a_lh per channel; without ``hops`` it has one
                        softmax and no feed-forward layer: ``y = sum_l a_l * z~_l``

    ``z~_l = z_l + E_l``, or z_l without layer embeddings. W_a and W_b have biases. Every kind
    returns LN(y). In "attention" the softmax over layers and the weighted sum are one pass
    (`deepfast.ops.depth_attention`), which allocates neither a stack of the states nor z~.

    Args:
        num_states: L + 1.
        dim: D.
        fusion_type: one of `FUSIONS`.
        hops: number of softmaxes; None: 4 in "attention". Not every kind reads hops,
            attention_dim, hidden_dim, activation and shared; see `OPTIONS`.
        attention_dim: rows of W_1.
        hidden_dim: width of the feed-forward layer.
        activation: s, "tanh" or "relu".
        shared: True for one W_1 for all layers, False for one W_1 per layer.
        source_norm: True for the states of a pre-norm stack. Every state except the last then
            passes through its own LN; the last has already passed the stack's final LN.
        word_embedding: False leaves z_0 out of the sum; it is still passed to `forward`.
        layer_embeddings: whether there is E; None: only in the kinds with attention.
        own_embedding: False where the caller passes E to `forward`, for example when an encoder
            and a decoder share it.
        backend: see `deepfast.backend`.
        device, dtype: of the parameters, as in `torch.nn`.

    Attributes:
        layer_embedding: E (L + 1, D), initialised uniformly in [-0.1, 0.1], or None.

    Source: Wang et al., Multi-layer Representation Fusion for Neural Machine Translation, COLING
    2018; s = tanh comes from the self-attention that it extends (Lin et al., A
    Structured Self-attentive Sentence Embedding, ICLR 2017).
    """

    # A ModuleList, whose type does not say that of its elements.
    w1: Sequence[nn.Linear]

    def __init__(
        self,
        num_states: int,
        dim: int,
        fusion_type: str = "attention",
        *,
        hops: int | None = None,
        attention_dim: int = 1024,
        hidden_dim: int = 512,
        activation: str = "tanh",
        shared: bool = True,
        source_norm: bool = False,
        word_embedding: bool = True,
        layer_embeddings: bool | None = None,
        own_embedding: bool = True,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        checks.choice("LayerFusion", FUSIONS, fusion_type=fusion_type)
        checks.choice("LayerFusion", ACTIVATIONS, activation=activation)
        attending = fusion_type in WITH_ATTENTION
        if hops is None and fusion_type != "channel_attention":
            hops = 4
        if layer_embeddings is None:
            layer_embeddings = attending
        sizes = {"dim": dim, "attention_dim": attention_dim, "hidden_dim": hidden_dim}
        checks.whole("LayerFusion", **sizes, **({} if hops is None else {"hops": hops}))
        flags = {"shared": shared, "source_norm": source_norm, "word_embedding": word_embedding}
        flags |= {"layer_embeddings": layer_embeddings, "own_embedding": own_embedding}
        checks.flag("LayerFusion", **flags)
        checks.whole("LayerFusion", 1 if word_embedding else 2, num_states=num_states)
        self.num_states, self.dim, self.backend = num_states, dim, backend
        self.fusion_type = fusion_type
        self.activation = activation
        self.first = 0 if word_embedding else 1
        self.with_embeddings = layer_embeddings
        count = num_states - self.first
        factory: dict = {"device": device, "dtype": dtype}
        self.source_norms = None
        if source_norm:
            norms = (LayerNorm(dim, backend=backend, **factory) for _ in range(count - 1))
            self.source_norms = nn.ModuleList(norms)
        self.layer_embedding = None
        if layer_embeddings and own_embedding:
            self.layer_embedding = layer_embedding(num_states, dim, **factory)
        parts = {"feed_forward": count, "attention": hops, "channel_attention": hops}.get(
            fusion_type
        )
        if attending:
            self.w1 = nn.ModuleList(  # type: ignore[assignment]
                _matrix(dim, attention_dim, **factory) for _ in range(1 if shared else count)
            )
            width = 1 if fusion_type == "attention" else dim
            self.w2 = _matrix(attention_dim, width * (hops or 1), **factory)
        self.feeds = parts is not None
        if parts is not None:
            self.up = _matrix(dim * parts, hidden_dim, bias=True, **factory)
            self.down = _matrix(hidden_dim, dim, bias=True, **factory)
        self.norm = LayerNorm(dim, backend=backend, **factory)

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
            layer_embedding: E, (at least L + 1, D); only where ``own_embedding`` is False and
                there are layer embeddings.
            return_attention: whether to return the weights too ("attention" and
                "channel_attention" only).

        Returns:
            (..., D); with ``return_attention`` also the weights over layers, (..., hops, L + 1) or
            (..., hops * D, L + 1) in fp32 (fp64 for fp64), without gradient; 0 for a word
                embedding that is left out.

        Raises:
            TypeError, ValueError: for operands that do not fit.
        """
        states = common.checked_sources("LayerFusion", "states", states)
        if len(states) != self.num_states:
            raise ValueError(f"LayerFusion: expected {self.num_states} states, got {len(states)}")
        if states[0].shape[-1] != self.dim:
            shape = tuple(states[0].shape)
            raise ValueError(f"LayerFusion: states[0] must be (..., {self.dim}), got {shape}")
        for linear in (m for m in self.modules() if isinstance(m, nn.Linear)):
            check_input("LayerFusion", "states[0]", states[0], linear)
        checks.flag("LayerFusion", return_attention=return_attention)
        if return_attention and self.fusion_type not in WITH_ATTENTION:
            raise ValueError(f"LayerFusion: {self.fusion_type!r} has no attention to return")
        embedding = self._embedding(layer_embedding)
        states = states[self.first :]
        if self.source_norms is not None:
            normed = [norm(z) for norm, z in zip(self.source_norms, states[:-1], strict=True)]
            states = [*normed, states[-1]]
        weights = None
        if self.fusion_type == "average":
            y = self._average(states, embedding)
        elif self.fusion_type == "feed_forward":
            y = torch.cat(states, -1)
        else:
            y, weights = self._attend(states, embedding)
        if self.feeds:
            fixed = embedding if self.fusion_type == "feed_forward" else None
            y = self._feed_forward(y, fixed)
        y = self.norm(y)
        return (y, F.pad(weights.detach().mT, (self.first, 0))) if return_attention else y

    def _average(self, states: list[Tensor], embedding: Tensor | None) -> Tensor:
        dtype = compute_dtype(states[0].dtype)
        weight = states[0].new_full((len(states),), 1 / len(states), dtype=dtype)
        y: Tensor = ops.depth_mix(states, weight, backend=self.backend)
        return y if embedding is None else (y + embedding.mean(0)).to(y.dtype)

    def _attend(self, states: list[Tensor], embedding: Tensor | None) -> tuple[Tensor, Tensor]:
        """The parts m_1 .. m_hops, (..., hops * D), and the weights (..., L, hops or hops * D)."""
        no_embedding = [None] * len(states)
        each = no_embedding if embedding is None else embedding.unbind(0)
        numbered = enumerate(zip(states, each, strict=True))
        scores = torch.stack([self._score(z, index, e) for index, (z, e) in numbered], -2)
        dtype = compute_dtype(states[0].dtype)
        weights = scores.to(dtype).softmax(-2)
        if self.fusion_type == "attention":
            m = ops.depth_attention(states, scores=scores, backend=self.backend)
            if embedding is not None:
                m = m + (weights.mT @ embedding.to(dtype)).to(m.dtype)
        else:
            by_channel = weights.unflatten(-1, (-1, self.dim)).unbind(-3)
            m = sum(
                a * (z if e is None else z + e).unsqueeze(-2)
                for a, z, e in zip(by_channel, states, each, strict=True)
            ).to(states[0].dtype)
        return m.flatten(-2), weights

    def _embedding(self, given: Tensor | None) -> Tensor | None:
        """E of the states that are read, or None."""
        if (given is None) == (self.with_embeddings and self.layer_embedding is None):
            raise ValueError(
                "LayerFusion: layer_embedding must be given if and only if own_embedding=False "
                f"leaves it to the caller, got {'none' if given is None else 'one'}"
            )
        embedding = given if self.layer_embedding is None else self.layer_embedding
        if embedding is None:
            return None
        checks.tensor("LayerFusion", "layer_embedding", embedding)
        shape = tuple(embedding.shape)
        if len(shape) != 2 or shape[0] < self.num_states or shape[1] != self.dim:
            raise ValueError(
                f"LayerFusion: layer_embedding must be (at least {self.num_states}, {self.dim}), "
                f"got {shape}"
            )
        return embedding[self.first : self.num_states]

    def _score(self, z: Tensor, index: int, e: Tensor | None) -> Tensor:
        """``W_2 s(W_1 (z + e))``, where W_1 e is the bias of W_1 z."""
        w1 = self.w1[index % len(self.w1)].weight
        hidden = F.linear(z, w1, None if e is None else F.linear(e, w1).to(w1.dtype))
        return self.w2(ACTIVATIONS[self.activation](hidden))

    def _feed_forward(self, x: Tensor, embedding: Tensor | None) -> Tensor:
        """embedding: E (L, D), added to the parts of x; W_a E is part of the bias."""
        w: Tensor = self.up.weight
        bias: Tensor = self.up.bias
        if embedding is not None:
            bias = bias + F.linear(embedding.reshape(-1).to(w.dtype), w).to(bias.dtype)
        return self.down(ops.activation(F.linear(x, w, bias), "relu", backend=self.backend))

    def extra_repr(self) -> str:
        return f"num_states={self.num_states}, dim={self.dim}, fusion_type={self.fusion_type!r}"


def layer_embedding(num_states: int, dim: int, **factory: Any) -> nn.Parameter:
    """E, (L + 1, D), initialised uniformly in [-0.1, 0.1]."""
    embedding = nn.Parameter(torch.empty(num_states, dim, **factory))
    return nn.init.uniform_(embedding, -0.1, 0.1)  # type: ignore[return-value]


def _matrix(inputs: int, outputs: int, bias: bool = False, **factory: Any) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias, **factory)
    _reset(linear)
    return linear


def _reset(linear: nn.Linear) -> None:
    nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
