"""Transformer encoder and decoder of any depth."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepfast import checks
from deepfast.nn.cache import DecoderCache, Hypotheses
from deepfast.nn.connections.base import Options, StackCall, class_of
from deepfast.nn.connections.latent import LatentDepth, is_chosen
from deepfast.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from deepfast.nn.linear import Gate
from deepfast.nn.packing import Packing, check_packed, packed, packed_pair
from deepfast.nn.step import layer_steps
from deepfast.ops.attention import Window
from deepfast.ops.decoding import compiled
from deepfast.policies import resolve


class _Stack(nn.Module):
    """The common base of encoder and decoder: layers of one type, a connection, policies, gates."""

    planned: str
    """The attribute of a plan that holds this stack's policies."""

    layer: type[TransformerEncoderLayer] | type[TransformerDecoderLayer]
    # A ModuleList, whose type does not say that of its elements.
    layers: Sequence[TransformerEncoderLayer | TransformerDecoderLayer]

    def __init__(
        self,
        num_layers: int,
        dim: int,
        num_heads: int,
        ffn_dim: int,
        *,
        num_kv_heads: int | None = None,
        window: Window = None,
        connection: str = "dlcl",
        norm: str = "pre",
        norm_type: str = "layer",
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        activation: str = "relu",
        dlcl: dict | None = None,
        latent: dict | None = None,
        block: int | None = None,
        reads: int | None = None,
        decoder_layers: int | None = None,
        depth_init: bool = False,
        recompute: str | Sequence[str] | object = "none",
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        op = type(self).__name__
        checks.whole(op, num_layers=num_layers)
        checks.choice(op, ("pre", "post", "deepnorm"), norm=norm)
        self.scaled = norm == "deepnorm"
        """Whether the stack is post-norm with a residual that alpha multiplies."""
        if decoder_layers is not None:
            checks.whole(op, decoder_layers=decoder_layers)
            if not self.scaled or self.layer.crosses:
                raise ValueError(
                    f"{op}: decoder_layers is for an encoder with norm='deepnorm', got {norm=}"
                )
        self.alpha, beta = 1.0, 1.0
        if self.scaled:
            norm = "post"
            self.alpha, beta = self._scales(connection, norm_type, num_layers, decoder_layers)
        for name, value in (("dlcl", dlcl), ("latent", latent)):
            if value is not None:
                checks.dictionary(op, **{name: value})
        self.dim = dim
        factory: dict = {"device": device, "dtype": dtype}
        made = {"backend": backend} | factory
        given = dlcl, block, reads, self.layer.parts
        options = Options(op, connection, num_layers, dim, norm, norm_type, dropout, made, *given)
        rates: dict = {"dropout": dropout, "attention_dropout": attention_dropout}
        rates["activation_dropout"] = activation_dropout
        heads: dict = {"num_kv_heads": num_kv_heads, "window": window, "activation": activation}
        norms: dict = {"norm": norm, "norm_type": norm_type, "first_norm": False}
        norms |= {"later_norms": not options.reading} | made
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            self.layer(dim, num_heads, ffn_dim, **rates, **heads, **norms)
            for _ in range(num_layers)
        )
        self.connection = class_of(connection)(options)
        if latent and connection != "latent":
            raise ValueError(f"{op}: latent options need connection='latent', got {connection!r}")
        self.latent = None
        if connection == "latent":
            self.latent = LatentDepth(num_layers, **factory | (latent or {}))
        checks.flag(op, depth_init=depth_init)
        for layer in self.layers:
            if self.scaled:
                layer._scale(self.alpha, beta)
            if depth_init:
                layer._scale_outputs((len(self.layer.parts) * num_layers) ** -0.5)
        self.set_recompute(recompute)

    def _scales(
        self, connection: str, norm_type: str, layers: int, decoder_layers: int | None
    ) -> tuple[float, float]:
        """alpha and beta of DeepNorm."""
        for name, value, needed in (
            ("connection", connection, ("residual",)),
            ("norm_type", norm_type, ("layer", "rms")),
        ):
            if value not in needed:
                raise ValueError(
                    f"{type(self).__name__}: norm='deepnorm' needs {name}={needed[0]!r}, got "
                    f"{value!r}"
                )
        if self.layer.crosses:
            return (3 * layers) ** 0.25, (12 * layers) ** -0.25
        if decoder_layers is None:
            return (2 * layers) ** 0.25, (8 * layers) ** -0.25
        both = (layers**4 * decoder_layers) ** (1 / 16)
        return 0.81 * both, 0.87 / both

    def extra_repr(self) -> str:
        return f"norm='deepnorm', alpha={self.alpha:g}" if self.scaled else ""

    def gates(self, language: int = 0) -> list[Gate | None]:
        """The gates that scale the branches of each layer in one forward pass.

        They are drawn in training and chosen in evaluation. Without latent depth each is None.
        """
        return [None] * len(self.layers) if self.latent is None else self.latent(language)

    def _calls(
        self, options: Sequence[dict], gates: Sequence[Gate | None]
    ) -> list[StackCall | None]:
        """The calls of the layers, or of all their parts if each of them reads; in pre-norm None
        for a layer that is not used."""
        calls: list[StackCall | None] = []
        post = self.connection.norm == "post"
        used = zip(self.layers, self.policies, options, gates, strict=True)
        for layer, policy, given, gate in used:
            if is_chosen(gate, 0.0):
                calls.append(StackCall(layer.norms_alone, "none", {}) if post else None)
                continue
            if gate is not None and not is_chosen(gate, 1.0):
                given = given | {"gate": gate}
            elif self.scaled:
                # LN(alpha * x + f) = LN(x + f / alpha).
                given = given | {"gate": 1 / self.alpha}
            calls += self.connection.calls(layer, policy, given)
        return calls

    def set_recompute(self, recompute: str | Sequence[str] | object) -> None:
        """Sets what each layer keeps for backward, from the next forward pass on.

        Args:
            recompute: a policy of `deepfast.memory.POLICIES`; one policy per layer from the bottom;
                or a `deepfast.memory.Plan`, of which an encoder uses ``recompute`` and a decoder
                ``decoder_recompute``.

        Raises:
            ValueError: for an unknown policy, a number of policies that is not num_layers, or
                "layer+input" without a depth connection.
        """
        recompute = getattr(recompute, self.planned, recompute)
        self.policies = resolve(recompute, len(self.layers), self.connection.kind)
        """The recompute policy of each layer."""
        for layer, policy in zip(self.layers, self.policies, strict=True):
            # A layer may be inside a wrapper.
            for part in layer.modules():
                if isinstance(part, self.layer):
                    part.recompute = policy


class TransformerEncoder(_Stack):
    """A stack of encoder layers. Each reads the layer below it or, by its connection, all of them.

    Args:
        num_layers: L >= 1.
        dim, num_heads, ffn_dim: D, H, F.
        num_kv_heads: heads of keys and values, see `MultiheadAttention`; None for H.
        window: of every self-attention, see `MultiheadAttention`.
        connection: one of `deepfast.connections.CONNECTIONS`: "dlcl"; "residual";
            "denseformer", which is a DLCL with other defaults; "attnres" and "block_attnres", see
            `AttentionResiduals`; "latent": residual, and the stack learns which layers to use.
        norm: "pre" (with a final LN), "post" or "deepnorm". The last needs
            ``connection="residual"``: each sublayer f gives ``x' = LN(alpha * x + f(x))``, and at
            the start the weights of values, outputs and feed-forward blocks are multiplied by
            beta; those of queries and keys are not:

                an encoder alone                        alpha = (2 L)^(1/4), beta = (8 L)^(-1/4)
                an encoder with ``decoder_layers`` = M  alpha = 0.81 (L^4 M)^(1/16),
                                                        beta = 0.87 (L^4 M)^(-1/16)
                a decoder                               alpha = (3 L)^(1/4), beta = (12 L)^(-1/4)
        norm_type: "layer" for `LayerNorm`, "rms" for `RMSNorm`, of the layers, of the stack and
            inside a DLCL's mixture. "none": no norms, in a pre-norm stack with the connection
            "residual" or "latent" (Li et al. train latent depth so).
        dropout: on each branch before its residual add.
        attention_dropout: on attention weights.
        activation_dropout: after the activation.
        activation: "relu", "gelu" or "swiglu", see `TransformerEncoderLayer`.
        dlcl: further arguments of `DLCL`, such as ``{"weight_type": "vector", "window": 8}``;
            ``{"norm": None}`` mixes states without norms, ``{"norm_type": "layer"}`` with
            layer-norms in a stack of RMS norms.
        block: layers per block under "block_attnres"; None for an eighth of the layers, rounded up.
        reads: under "attnres" and "block_attnres", how often a layer pushes and reads: 2 (or None):
            each of its sublayers does, also the three of a decoder layer; 1: the layer does once.
        depth_init: whether the output projections of attention and feed-forward block begin smaller
            by 1 / sqrt(sublayers of the stack): 1 / sqrt(2 L) in an encoder. The sum over all
            branches then begins with a variance that does not grow with the depth.
        decoder_layers: under "deepnorm", M, the decoder's layers; None without a decoder.
        latent: further arguments of `LatentDepth`, such as ``{"languages": 3, "hard": True}``.
            In evaluation a pre-norm layer that is not used costs nothing. A post-norm layer that
            is not used runs only its layer-norms, which normalise the residual alone.
        recompute: what layers keep for backward: a policy of `deepfast.memory.POLICIES` ("none",
            "ffn", "layer", "layer+input"), one policy per layer, or a plan.
            "layer+input" needs DLCL or attention residuals.
        backend: see `deepfast.backend`.
        device, dtype: of the parameters, as in `torch.nn`.

    Sources: Vaswani et al. 2017; Wang et al. 2019 for pre-norm and DLCL; Li et al. 2020 for latent
    depth; Pagliardini et al. 2024 for DenseFormer; Kimi Team 2026 for attention residuals; Wang
    et al., DeepNet, 2022, for DeepNorm; Radford et al., GPT-2, 2019, for depth_init.
    """

    layer, planned = TransformerEncoderLayer, "recompute"
    layers: Sequence[TransformerEncoderLayer]

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
        """Real tokens (T, D) to (T, D).

        Args:
            states: a list to append the states between the layers to, see `Connection.forward`. It
                keeps them alive.
            language: index of the language whose layers latent depth uses.

        Raises:
            TypeError, ValueError: for tokens that are not those of ``packing``.
        """
        check_packed("TransformerEncoder", "x", x_TD, packing, self.dim)
        options = [{"packing": packing}] * len(self.layers)
        note = None if states is None else states.append
        return self.connection(x_TD, self._calls(options, self.gates(language)), note)


class TransformerDecoder(_Stack):
    """A stack of decoder layers with its own depth history. Args as `TransformerEncoder`."""

    layer, planned = TransformerDecoderLayer, "decoder_recompute"
    layers: Sequence[TransformerDecoderLayer]

    def forward(
        self,
        x_BSD: Tensor,
        encoded_BSD: Tensor,
        key_padding_mask: Tensor | None = None,
        encoded_key_padding_mask: Tensor | None = None,
        *,
        language: int = 0,
    ) -> Tensor:
        """(B, T, D) and the encoder's output (B, S, D) to (B, T, D), zero at padding.

        True in a mask is padding. Padding of x must be on the right: a token would otherwise attend
        to the padding before it. A mask on the CPU is checked for this. A mask on a GPU is trusted,
        since reading it would wait for the device.

        Raises:
            TypeError, ValueError: for operands that do not fit.
        """
        masks = key_padding_mask, encoded_key_padding_mask
        operands = packed_pair("TransformerDecoder", (x_BSD, encoded_BSD), self.dim, masks)
        return operands[1].unpack(self.forward_packed(*operands, language=language))

    def forward_packed(
        self,
        x_TD: Tensor,
        packing: Packing,
        encoded_TD: Tensor | Sequence[Tensor],
        encoded_packing: Packing,
        *,
        states: list[Tensor] | None = None,
        language: int = 0,
    ) -> Tensor:
        """Real tokens (T, D) to (T, D).

        Args:
            encoded_TD: what all layers attend to, or one tensor for each layer.
            states: a list to append the states between the layers to, see `Connection.forward`. It
                keeps them alive.
            language: index of the language whose layers latent depth uses.

        Raises:
            TypeError, ValueError: for tokens that are not those of the packings.
        """
        check_packed("TransformerDecoder", "x", x_TD, packing, self.dim)
        shared = {"packing": packing, "encoded_packing": encoded_packing}
        # Each layer projects it, and so decides whether keys and values are kept.
        each = self._each(encoded_TD, encoded_packing)
        options = [shared | {"encoded": encoded} for encoded in each]
        note = None if states is None else states.append
        return self.connection(x_TD, self._calls(options, self.gates(language)), note)

    def _each(self, encoded_TD: Tensor | Sequence[Tensor], packing: Packing) -> Sequence[Tensor]:
        """The encoder output that each layer attends to."""
        count = len(self.layers)
        each = [encoded_TD] * count if isinstance(encoded_TD, Tensor) else encoded_TD
        if len(each) != count:
            raise ValueError(
                f"TransformerDecoder: expected one encoder output for each of {count} layers, got "
                f"{len(each)}"
            )
        for encoded in each:
            check_packed("TransformerDecoder", "encoded", encoded, packing, self.dim)
        return each

    def start(
        self,
        encoded_TD: Tensor | Sequence[Tensor],
        encoded_packing: Packing,
        *,
        language: int = 0,
    ) -> DecoderCache:
        """Projects the encoder's output, or one for each layer, once for all steps of decoding."""
        gates, each = self.gates(language), self._each(encoded_TD, encoded_packing)
        encoded = [
            None
            if is_chosen(gate, 0.0)
            else layer.cross_attention.project_encoded(one, encoded_packing, decoding=True)
            for layer, one, gate in zip(self.layers, each, gates, strict=True)
        ]
        each_one = Hypotheses(encoded_packing.batch, each[0].device)
        return DecoderCache(encoded, encoded_packing, gates, each_one)

    @torch.no_grad()
    def step(
        self, x_BD: Tensor, cache: DecoderCache, *, states: list[Tensor] | None = None
    ) -> Tensor:
        """Decodes one position per hypothesis, (B, D) to (B, D), without gradients, and updates
        the cache in place.

        Raises:
            TypeError, ValueError: for an x_BD that does not fit the cache.
        """
        if not isinstance(cache, DecoderCache):
            got = type(cache).__name__
            raise TypeError(f"TransformerDecoder: cache must be what start returns, got {got}")
        packing = cache.hypotheses.packing
        check_packed("TransformerDecoder", "x", x_BD, packing, self.dim)
        cache.hypotheses.advance()
        shared = {"packing": packing, "encoded_packing": cache.encoded_packing}
        options = [
            shared | {"encoded": encoded, "cache": layer}
            for encoded, layer in zip(cache.encoded, cache.layers, strict=True)
        ]
        calls = self._calls(options, cache.gates)
        whole = not self.connection.parts
        if whole and compiled(x_BD) and not torch._C._is_any_autocast_enabled():
            if cache.steps is None:
                cache.steps = layer_steps(self.layers, x_BD)
            calls = [
                call._replace(layer=step)
                if step and call and call.layer is layer and "gate" not in call.options
                else call
                for call, layer, step in zip(calls, self.layers, cache.steps, strict=True)
            ]
        return self.connection(x_BD, calls, None if states is None else states.append)
