"""The sublayers of somebody else's layer: their modules, by name."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

OP = "deepfast.connect"


class Sublayer(NamedTuple):
    """The modules of a sublayer, by their names in the layer."""

    norms: tuple[str, ...]
    """Those that get the row."""
    last: str | None
    """The one whose output, or its first entry, is added to the residual; None where the layer
    changes the output before it adds it. What the sublayer adds is then a difference of two sums of
    the layer's, see `deepfast.attach.layer_run.LayerRun`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all these modules."""
        return self.norms if self.last is None else (*self.norms, self.last)


def _of_gpt2(layer: nn.Module) -> tuple:
    cross = (("ln_cross_attn", "crossattention"),) if hasattr(layer, "crossattention") else ()
    return ("ln_1", "attn"), *cross, ("ln_2", "mlp")


def _of_neox(layer: nn.Module) -> tuple:
    norms = "input_layernorm", "post_attention_layernorm"
    if layer.use_parallel_residual:
        # Attention and feed-forward block stand side by side: one read for both.
        return ((norms, None),)
    return (norms[0], "post_attention_dropout"), (norms[1], "post_mlp_dropout")


def _of_t5(layer: Any) -> tuple:
    """Two, or three with cross-attention."""
    parts = (f"layer.{i}" for i in range(len(layer.layer)))
    return tuple((f"{part}.layer_norm", f"{part}.dropout") for part in parts)


_LLAMA = ("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp")
_GEMMA = (
    ("input_layernorm", "post_attention_layernorm"),
    ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_TORCH = ("norm1", "dropout1"), ("norm2", "dropout2"), ("norm3", "dropout3")
KNOWN: dict[str, tuple | Callable[[Any], tuple]] = {
    "LlamaDecoderLayer": _LLAMA,
    "MistralDecoderLayer": _LLAMA,
    "Qwen2DecoderLayer": _LLAMA,
    "Qwen3DecoderLayer": _LLAMA,
    "GemmaDecoderLayer": _LLAMA,
    "Gemma2DecoderLayer": _GEMMA,
    "Gemma3DecoderLayer": _GEMMA,
    "GPT2Block": _of_gpt2,
    "GPTNeoXLayer": _of_neox,
    "ModernBertEncoderLayer": (("attn_norm", "attn"), ("mlp_norm", "mlp")),
    # One module is the dropout behind both sublayers.
    "ViTLayer": (("layernorm_before", None), ("layernorm_after", None)),
    # Dropout is a function here, behind the last module.
    "WhisperEncoderLayer": (("self_attn_layer_norm", None), ("final_layer_norm", None)),
    "T5Block": _of_t5,
    # timm's. LayerScale stands before DropPath.
    "Block": (("norm1", "drop_path1"), ("norm2", "drop_path2")),
    "TransformerEncoderLayer": _TORCH[:2],
    "TransformerDecoderLayer": _TORCH,
}
"""By the name of a layer's class, the argument ``sublayers`` of `deepfast.connect`, or what finds
it."""


def find_sublayers(layers: Sequence[nn.Module], given: Any) -> tuple[Sublayer, ...]:
    """The sublayers of each layer, from the argument ``sublayers`` of `deepfast.connect`."""
    modules: list[nn.Module] = []
    # A layer may stand in several places.
    for layer in dict.fromkeys(layers):
        parts = _of_layer(layer, given)
        if parts != _of_layer(layers[0], given):
            raise ValueError(
                f"{OP}: all layers must have the same sublayers, got {type(layers[0]).__name__} "
                f"and {type(layer).__name__}"
            )
        modules += [layer.get_submodule(name) for part in parts for name in part.names]
    for module in modules:
        name = type(module).__name__
        if modules.count(module) > 1:
            raise ValueError(f"{OP}: a {name} is a part of two sublayers; each needs its own")
        hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
        if any(hasattr(hook, "sublayer") for hook in hooks):
            raise ValueError(f"{OP}: a {name} is connected already, in another parent")
    return parts


def _of_layer(layer: nn.Module, given: Any) -> tuple[Sublayer, ...]:
    kind = type(layer).__name__
    if isinstance(given, str) and given == "auto":
        name = next((c.__name__ for c in type(layer).__mro__ if c.__name__ in KNOWN), None)
        if name is None:
            raise ValueError(
                f"{OP}: sublayers='auto' knows {', '.join(KNOWN)}; {kind} is none of them, so pass "
                "sublayers=((norm, last module), ...) with names of its modules"
            )
        known = KNOWN[name]
        given = known if isinstance(known, tuple) else known(layer)
    entries = given if isinstance(given, Sequence) and not isinstance(given, str) else ()
    parts = [_sublayer(entry) for entry in entries]
    if not parts or None in parts:
        raise TypeError(
            f"{OP}: sublayers must be 'auto' or a pair (norm, last module) for each sublayer, such "
            f"as (('norm1', 'attn'), ('norm2', 'mlp')), got {given!r}"
        )
    inside = {name for name, _ in layer.named_modules(remove_duplicate=False)}
    if missing := [name for part in parts for name in part.names if name not in inside]:
        children = ", ".join(name for name, _ in layer.named_children())
        raise ValueError(
            f"{OP}: sublayers: {kind} has no module {missing[0]!r}; its modules are {children}"
        )
    if getattr(layer, "norm_first", True) is False:
        raise ValueError(
            f"{OP}: sublayers needs layers with their norms before their sublayers, got {kind} "
            "with norm_first=False"
        )
    return tuple(parts)


def _sublayer(entry: object) -> Sublayer | None:
    match entry:
        case (str(norm), str() | None as last):
            return Sublayer((norm,), last)
        case ((*norms,), str() | None as last) if norms and all(isinstance(n, str) for n in norms):
            return Sublayer((*map(str, norms),), last)
    return None
