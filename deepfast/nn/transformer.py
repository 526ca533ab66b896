"""Transformer encoder and decoder of any depth."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from deepfast.memory.policies import resolve

from .attention import KeyValueCache
from .connection import Connection
from .layers import TransformerDecoderLayer, TransformerEncoderLayer
from .packing import Packing


class _Stack(nn.Module):
    """What encoder and decoder share: layers of one kind, a connection, memory policies."""

    planned: str
    """Where a plan has this side's policies."""

    layer: type[TransformerEncoderLayer] | type[TransformerDecoderLayer]

    def __init__(
        self,
        num_layers: int,
        dim: int,
        heads: int,
        ffn_dim: int,
        *,
        connection: str = "dlcl",
        norm: str = "pre",
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        activation: str = "relu",
        dlcl: dict | None = None,
        memory: str | Sequence[str] | object = "keep",
        backend: str | None = None,
    ):
        super().__init__()
        self.dim = dim
        self.layers = nn.ModuleList(
            self.layer(
                dim,
                heads,
                ffn_dim,
                norm=norm,
                dropout=dropout,
                attention_dropout=attention_dropout,
                activation_dropout=activation_dropout,
                activation=activation,
                first_norm=False,
                backend=backend,
            )
            for _ in range(num_layers)
        )
        self.connection = Connection(
            num_layers,
            dim,
            connection=connection,
            norm=norm,
            dropout=dropout,
            backend=backend,
            dlcl=dlcl,
        )
        self.set_memory(memory)

    def set_memory(self, memory: str | Sequence[str] | object) -> None:
        """Chooses what each layer keeps for backward, from the next forward on.

        Args:
            memory: a policy of `deepfast.memory.POLICIES`, one for each layer from the bottom, or
                a `deepfast.memory.Plan`, of which an encoder takes ``policies`` and a decoder
                ``decoder_policies``.

        Raises:
            ValueError: for an unknown policy, another number of them than layers, or "history"
                without DLCL.
        """
        connection = "residual" if self.connection.dlcl is None else "dlcl"
        # Of a plan its own side.
        memory = getattr(memory, self.planned, memory)
        self.policies = resolve(memory, len(self.layers), connection)
        """The memory policy of each layer."""
        for layer, policy in zip(self.layers, self.policies, strict=True):
            # A layer may stand inside a wrapper.
            for part in layer.modules():
                if isinstance(part, self.layer):
                    part.memory = policy


class TransformerEncoder(_Stack):
    """A stack of encoder layers; with ``connection="dlcl"`` each reads all layers below it.

    Args:
        num_layers: L >= 1.
        dim, heads, ffn_dim: D, H, F.
        connection: "dlcl" or "residual".
        norm: "pre" (with a final LN) or "post".
        dropout: on each branch before its residual add.
        attention_dropout: on attention weights.
        activation_dropout: after the activation.
        activation: "relu" or "gelu".
        dlcl: further arguments of `DLCL`, such as ``{"weight": "vector", "window": 8}``.
        memory: what layers keep for backward: a policy of `deepfast.memory.POLICIES` ("keep",
            "lean", "leaner", "states", "history"), one for each layer, or a plan.
        backend: see `deepfast.backend`.

    Sources: Vaswani et al. 2017; Wang et al. 2019 for pre-norm and DLCL.
    """

    layer, planned = TransformerEncoderLayer, "policies"

    def forward(self, x_BSD: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """(B, S, D) to (B, S, D), zero at padding. ``key_padding_mask`` (B, S): True is padding."""
        if x_BSD.dim() != 3 or x_BSD.shape[-1] != self.dim:
            raise ValueError(
                f"TransformerEncoder: expected (B, S, {self.dim}), got {tuple(x_BSD.shape)}"
            )
        packing = Packing.of(*x_BSD.shape[:2], key_padding_mask)
        return packing.unpack(self.forward_packed(packing.pack(x_BSD), packing))

    def forward_packed(
        self, x_TD: Tensor, packing: Packing, *, states: list[Tensor] | None = None
    ) -> Tensor:
        """Real tokens (T, D) to (T, D); a list ``states`` is given those between the layers."""

        def body(layer):
            return lambda x, n, again=None: layer(x, normed=n, packing=packing, again=again)

        return self.connection(x_TD, map(body, self.layers), self.policies, states=states)


@dataclass
class DecoderCache:
    """What decoding one position at a time keeps, per layer."""

    memory: list[tuple[Tensor, Tensor]]
    memory_packing: Packing
    layers: list[KeyValueCache] = field(default_factory=list)

    def reorder(self, index: Tensor, *, memory: bool = True) -> None:
        """Keeps hypotheses ``index`` (B',) of the batch, with ``memory`` the encoder's side too."""
        for cache in self.layers:
            cache.reorder(index)
        if not memory:
            return
        self.memory = [(k[index], v[index]) for k, v in self.memory]
        padding = self.memory_packing.padding
        self.memory_packing = Packing(
            index.numel(),
            self.memory_packing.length,
            None,
            None if padding is None else padding[index],
        )


class TransformerDecoder(_Stack):
    """A stack of decoder layers with a depth history of its own. Args as the encoder."""

    layer, planned = TransformerDecoderLayer, "decoder_policies"

    def forward(
        self,
        x_BSD: Tensor,
        memory_BSD: Tensor,
        key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D) and the encoder's output (B, S, D) to (B, T, D), zero at padding.

        Padding of x must stand on the right; True in a mask is padding.
        """
        packing = Packing.of(*x_BSD.shape[:2], key_padding_mask)
        memory_packing = Packing.of(*memory_BSD.shape[:2], memory_key_padding_mask)
        y = self.forward_packed(
            packing.pack(x_BSD), packing, memory_packing.pack(memory_BSD), memory_packing
        )
        return packing.unpack(y)

    def forward_packed(
        self,
        x_TD: Tensor,
        packing: Packing,
        memory_TD: Tensor | Sequence[Tensor],
        memory_packing: Packing,
        *,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Real tokens (T, D) to (T, D).

        memory_TD: what all layers attend to, or one for each layer.
        states: a list that is given those between the layers.
        """
        # Each layer projects it, so that it decides whether keys and values are kept.
        caches = [None] * len(self.layers)
        return self._run(x_TD, packing, self._each(memory_TD), memory_packing, caches, states)

    def _each(self, memory_TD: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        """What each layer attends to."""
        if isinstance(memory_TD, Tensor):
            return [memory_TD] * len(self.layers)
        if len(memory_TD) != len(self.layers):
            raise ValueError(
                f"TransformerDecoder: expected one memory for each of {len(self.layers)} layers, "
                f"got {len(memory_TD)}"
            )
        return memory_TD

    def start(self, memory_TD: Tensor | Sequence[Tensor], memory_packing: Packing) -> DecoderCache:
        """Projects the encoder's output, or one for each layer, once for all steps of decoding."""
        memory = [
            layer.cross_attention.project_memory(one, memory_packing, decoding=True)
            for layer, one in zip(self.layers, self._each(memory_TD), strict=True)
        ]
        return DecoderCache(memory, memory_packing, [KeyValueCache() for _ in self.layers])

    def step(
        self, x_BD: Tensor, cache: DecoderCache, *, states: list[Tensor] | None = None
    ) -> Tensor:
        """One new position per sentence, (B, D) to (B, D)."""
        packing = Packing(x_BD.shape[0], 1)
        return self._run(x_BD, packing, cache.memory, cache.memory_packing, cache.layers, states)

    def _run(self, x, packing, memory, memory_packing, caches, states) -> Tensor:
        def body(layer, kv, cache):
            return lambda x, n, again=None: layer(
                x, kv, normed=n, packing=packing, memory_packing=memory_packing, cache=cache,
                again=again,
            )  # fmt: skip

        return self.connection(
            x, map(body, self.layers, memory, caches), self.policies, states=states
        )
