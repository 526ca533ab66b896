"""Transformer encoder and decoder of any depth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from deepfast import checks
from deepfast.memory.policies import resolve
from deepfast.nn.attention import KeyValueCache
from deepfast.nn.connections.connection import Body, Connection
from deepfast.nn.connections.latent import Gate, LatentDepth
from deepfast.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from deepfast.nn.packing import Packing, packed, packed_pair


def _is(gate: Gate, value: float) -> bool:
    """Whether a gate is chosen and has this value; what is drawn is not looked at."""
    return isinstance(gate, float) and gate == value


class _Stack(nn.Module):
    """What encoder and decoder share: layers of one kind, a connection, memory policies, gates."""

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
        latent: dict | None = None,
        block: int | None = None,
        memory: str | Sequence[str] | object = "keep",
        backend: str | None = None,
    ):
        super().__init__()
        checks.whole(type(self).__name__, num_layers=num_layers)
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
            block=block,
        )
        if latent and connection != "latent":
            raise ValueError(f"latent options need connection='latent', got {connection!r}")
        self.latent = LatentDepth(num_layers, **latent or {}) if connection == "latent" else None
        self.set_memory(memory)

    def gates(self, language: int = 0) -> list[Gate] | None:
        """What scales the branches of each layer in one forward pass: drawn while training, chosen
        in evaluation; None without latent depth."""
        return None if self.latent is None else self.latent(language)

    def _connect(
        self,
        x: Tensor,
        call: Callable[..., Tensor | tuple[Tensor, Tensor]],
        gates: Sequence[Gate] | None,
        states: list[Tensor] | None,
    ) -> Tensor:
        """Runs the layers that are used; ``call`` is of a layer's index and keywords."""
        post = self.connection.norm == "post"

        def body(index: int, gate: Gate | None) -> Body:
            if gate is None or _is(gate, 1.0):
                return lambda x, n, again=None: call(index, x, normed=n, again=again)
            if post and _is(gate, 0.0):
                return lambda x, n: self.layers[index].norms_alone(x)
            return lambda x, n, again=None: call(index, x, normed=n, again=again, gate=gate)

        gates = gates or [None] * len(self.layers)
        bodies = [body(index, gate) for index, gate in enumerate(gates)]
        skipped = () if post else [i for i, gate in enumerate(gates) if _is(gate, 0.0)]
        return self.connection(x, bodies, self.policies, states=states, skipped=skipped)

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
    """A stack of encoder layers; by its connection each reads the layer below it, or all of them.

    Args:
        num_layers: L >= 1.
        dim, heads, ffn_dim: D, H, F.
        connection: one of `deepfast.nn.connections.connection.CONNECTIONS`: "dlcl"; "residual";
            "denseformer", which is a DLCL with other defaults; "attnres" and "block_attnres", see
            `AttentionResiduals`; "latent": residual, and learned which layers are used.
        norm: "pre" (with a final LN) or "post".
        dropout: on each branch before its residual add.
        attention_dropout: on attention weights.
        activation_dropout: after the activation.
        activation: "relu" or "gelu".
        dlcl: further arguments of `DLCL`, such as ``{"weight": "vector", "window": 8}``;
            ``{"norm": None}`` mixes states without layer-norms.
        block: layers of a block under "block_attnres"; None: an eighth of them, rounded up.
        latent: further arguments of `LatentDepth`, such as ``{"languages": 3, "hard": True}``.
            In evaluation a pre-norm layer that is not used costs nothing, and of a post-norm one
            the layer-norms are left, which hold its input's scale.
        memory: what layers keep for backward: a policy of `deepfast.memory.POLICIES` ("keep",
            "lean", "leaner", "states", "history"), one for each layer, or a plan.
        backend: see `deepfast.backend`.

    Sources: Vaswani et al. 2017; Wang et al. 2019 for pre-norm and DLCL; Li et al. 2020 for latent
    depth; Pagliardini et al. 2024 for DenseFormer; Kimi Team 2026 for attention residuals.
    """

    layer, planned = TransformerEncoderLayer, "policies"

    def forward(
        self, x_BSD: Tensor, key_padding_mask: Tensor | None = None, *, language: int = 0
    ) -> Tensor:
        """(B, S, D) to (B, S, D), zero at padding. ``key_padding_mask`` (B, S): True is padding."""
        x_TD, packing = packed("TransformerEncoder", x_BSD, self.dim, key_padding_mask)
        return packing.unpack(self.forward_packed(x_TD, packing, language=language))

    def forward_packed(
        self,
        x_TD: Tensor,
        packing: Packing,
        *,
        states: list[Tensor] | None = None,
        language: int = 0,
    ) -> Tensor:
        """Real tokens (T, D) to (T, D); a list ``states`` is given those between the layers.

        ``language`` is what latent depth chooses layers for.
        """

        def call(index, x, **options):
            return self.layers[index](x, packing=packing, **options)

        return self._connect(x_TD, call, self.gates(language), states)


@dataclass
class DecoderCache:
    """What decoding one position at a time keeps, per layer."""

    memory: list[tuple[Tensor, Tensor] | None]
    """None for a layer that is not used."""
    memory_packing: Packing
    layers: list[KeyValueCache] = field(default_factory=list)
    gates: list[Gate] | None = None
    """Of latent depth, the same for all steps."""

    def reorder(self, index: Tensor, *, memory: bool = True) -> None:
        """Keeps hypotheses ``index`` (B',) of the batch, with ``memory`` the encoder's side too."""
        for cache in self.layers:
            cache.reorder(index)
        if not memory:
            return
        self.memory = [kv and (kv[0][index], kv[1][index]) for kv in self.memory]
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
        *,
        language: int = 0,
    ) -> Tensor:
        """(B, T, D) and the encoder's output (B, S, D) to (B, T, D), zero at padding.

        True in a mask is padding. Padding of x must stand on the right: elsewhere a token would
        attend to the padding in front of it. A mask on the CPU that has it elsewhere is refused;
        one on a GPU is trusted, since reading it would wait for the device.

        Raises:
            TypeError, ValueError: for operands that do not fit.
        """
        operands = packed_pair(
            "TransformerDecoder", x_BSD, memory_BSD, self.dim, key_padding_mask,
            memory_key_padding_mask,
        )  # fmt: skip
        return operands[1].unpack(self.forward_packed(*operands, language=language))

    def forward_packed(
        self,
        x_TD: Tensor,
        packing: Packing,
        memory_TD: Tensor | Sequence[Tensor],
        memory_packing: Packing,
        *,
        states: list[Tensor] | None = None,
        language: int = 0,
    ) -> Tensor:
        """Real tokens (T, D) to (T, D).

        memory_TD: what all layers attend to, or one for each layer.
        states: a list that is given those between the layers.
        language: what latent depth chooses layers for.
        """
        # Each layer projects it, so that it decides whether keys and values are kept.
        memory, gates = self._each(memory_TD), self.gates(language)

        def call(index, x, **options):
            return self.layers[index](
                x, memory[index], packing=packing, memory_packing=memory_packing, **options
            )

        return self._connect(x_TD, call, gates, states)

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

    def start(
        self,
        memory_TD: Tensor | Sequence[Tensor],
        memory_packing: Packing,
        *,
        language: int = 0,
    ) -> DecoderCache:
        """Projects the encoder's output, or one for each layer, once for all steps of decoding."""
        gates = self.gates(language)
        memory = [
            None
            if gates and _is(gates[index], 0.0)
            else layer.cross_attention.project_memory(one, memory_packing, decoding=True)
            for index, (layer, one) in enumerate(
                zip(self.layers, self._each(memory_TD), strict=True)
            )
        ]
        return DecoderCache(memory, memory_packing, [KeyValueCache() for _ in self.layers], gates)

    def step(
        self, x_BD: Tensor, cache: DecoderCache, *, states: list[Tensor] | None = None
    ) -> Tensor:
        """One new position per sentence, (B, D) to (B, D)."""
        packing = Packing(x_BD.shape[0], 1)

        def call(index, x, **options):
            return self.layers[index](
                x, cache.memory[index], packing=packing, memory_packing=cache.memory_packing,
                cache=cache.layers[index], **options,
            )  # fmt: skip

        return self._connect(x_BD, call, cache.gates, states)
