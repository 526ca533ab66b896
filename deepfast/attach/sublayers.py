"""Which modules of somebody else's layer belong to its sublayers."""

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
        """All of them."""
        return self.norms if self.last is None else (*self.norms, self.last)


def _pair(norm: str, last: str | None) -> Sublayer:
    return Sublayer((norm,), last)


def _of_gpt2(layer: nn.Module) -> tuple[Sublayer, ...]:
    cross = (_pair("ln_cross_attn", "crossattention"),) if hasattr(layer, "crossattention") else ()
    return _pair("ln_1", "attn"), *cross, _pair("ln_2", "mlp")


def _of_neox(layer: nn.Module) -> tuple[Sublayer, ...]:
    norms = "input_layernorm", "post_attention_layernorm"
    if layer.use_parallel_residual:
        # Attention and feed-forward block stand side by side: one read for both.
        return (Sublayer(norms, None),)
    return _pair(norms[0], "post_attention_dropout"), _pair(norms[1], "post_mlp_dropout")


def _of_t5(layer: Any) -> tuple[Sublayer, ...]:
    """Two, or three with cross-attention."""
    parts = (f"layer.{i}" for i in range(len(layer.layer)))
    return tuple(_pair(f"{part}.layer_norm", f"{part}.dropout") for part in parts)


_LLAMA = _pair("input_layernorm", "self_attn"), _pair("post_attention_layernorm", "mlp")
_GEMMA = (
    _pair("input_layernorm", "post_attention_layernorm"),
    _pair("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_TORCH = _pair("norm1", "dropout1"), _pair("norm2", "dropout2"), _pair("norm3", "dropout3")
KNOWN: dict[str, tuple[Sublayer, ...] | Callable[[Any], tuple[Sublayer, ...]]] = {
    "LlamaDecoderLayer": _LLAMA,
    "MistralDecoderLayer": _LLAMA,
    "Qwen2DecoderLayer": _LLAMA,
    "Qwen3DecoderLayer": _LLAMA,
    "GemmaDecoderLayer": _LLAMA,
    "Gemma2DecoderLayer": _GEMMA,
    "Gemma3DecoderLayer": _GEMMA,
    "GPT2Block": _of_gpt2,
    "GPTNeoXLayer": _of_neox,
    "ModernBertEncoderLayer": (_pair("attn_norm", "attn"), _pair("mlp_norm", "mlp")),
    # One module is the dropout behind both sublayers.
    "ViTLayer": (_pair("layernorm_before", None), _pair("layernorm_after", None)),
    # Dropout is a function here, behind the last module.
    "WhisperEncoderLayer": (_pair("self_attn_layer_norm", None), _pair("final_layer_norm", None)),
    "T5Block": _of_t5,
    # timm's. LayerScale stands before DropPath.
    "Block": (_pair("norm1", "drop_path1"), _pair("norm2", "drop_path2")),
    "TransformerEncoderLayer": _TORCH[:2],
    "TransformerDecoderLayer": _TORCH,
}
"""The sublayers of known layers, or what finds them, by the name of the layer's class."""


def find(layers: Sequence[nn.Module], given: Any) -> tuple[Sublayer, ...]:
    """The sublayers of each layer, from the argument ``sublayers`` of `deepfast.connect`."""
    each = {id(layer): layer for layer in layers}.values()
    found = [_of_layer(layer, given) for layer in each]
    for layer, sublayers in zip(each, found, strict=True):
        if sublayers != found[0]:
            raise ValueError(
                f"{OP}: all layers must have the same sublayers, got {type(layers[0]).__name__} "
                f"and {type(layer).__name__}"
            )
    seen: set[nn.Module] = set()
    for layer in each:
        for module in map(layer.get_submodule, (n for s in found[0] for n in s.names)):
            name = type(module).__name__
            hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
            if module in seen:
                raise ValueError(f"{OP}: a {name} is a part of two sublayers; each needs its own")
            if any(hasattr(hook, "sublayer") for hook in hooks):
                raise ValueError(f"{OP}: a {name} is connected already, in another parent")
            seen.add(module)
    return found[0]


def _of_layer(layer: nn.Module, given: Any) -> tuple[Sublayer, ...]:
    if isinstance(given, str) and given == "auto":
        name = next((c.__name__ for c in type(layer).__mro__ if c.__name__ in KNOWN), None)
        if name is None:
            raise ValueError(
                f"{OP}: sublayers='auto' knows {', '.join(KNOWN)}; {type(layer).__name__} is none "
                "of them, so pass sublayers=((norm, last module), ...) with names of its modules"
            )
        known = KNOWN[name]
        found = known if isinstance(known, tuple) else known(layer)
    else:
        found = _parsed(given)
    for sublayer in found:
        for name in sublayer.names:
            try:
                layer.get_submodule(name)
            except AttributeError:
                inside = ", ".join(n for n, _ in layer.named_children())
                raise ValueError(
                    f"{OP}: sublayers: {type(layer).__name__} has no module {name!r}; its modules "
                    f"are {inside}"
                ) from None
    if getattr(layer, "norm_first", True) is False:
        raise ValueError(
            f"{OP}: sublayers needs layers with their norms before their sublayers, got "
            f"{type(layer).__name__} with norm_first=False"
        )
    return found


def _parsed(given: Any) -> tuple[Sublayer, ...]:
    found = []
    entries = given if isinstance(given, Sequence) and not isinstance(given, str) else ()
    for entry in entries:
        match entry:
            case (str(norm), str() | None as last):
                found.append(_pair(norm, last))
            case ((*norms,), str() | None as last) if norms and all(
                isinstance(n, str) for n in norms
            ):
                found.append(Sublayer(tuple(norms), last))
            case _:
                entries = ()
                break
    if not entries:
        raise TypeError(
            f"{OP}: sublayers must be 'auto' or a pair (norm, last module) for each sublayer, such "
            f"as (('norm1', 'attn'), ('norm2', 'mlp')), got {given!r}"
        )
    names = [name for sublayer in found for name in sublayer.names]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{OP}: sublayers: {name!r} stands in two places")
    return tuple(found)
