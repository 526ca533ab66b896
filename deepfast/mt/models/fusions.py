"""The fusions of layers on either side of an encoder-decoder model."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from deepfast.nn import LayerFusion
from deepfast.nn.connections.fusion import OPTIONS, WITH_ATTENTION, layer_embedding


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """The kinds of fusion that a config's values name."""
    named = (config.get("encoder_fusion"), config.get("decoder_fusion"))
    return [kind for kind in OPTIONS if kind in named]


def _unread(config: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options in the field ``fusion`` that no named kind reads."""
    read = {name for kind in _kinds(config) for name in OPTIONS[kind]}
    known = {name for names in OPTIONS.values() for name in names}
    return {name: x for name, x in config["fusion"].items() if name in known - read}


def check_read(config: Mapping[str, Any]) -> None:
    """Refuses options of a fusion that would change nothing; a default changes nothing anywhere.

    Args:
        config: the values of a config that is right otherwise, with a fusion on some side.

    Raises:
        ValueError: for an option that neither side's kind reads.
    """
    defaults = inspect.signature(LayerFusion).parameters
    ignored = {name: x for name, x in _unread(config).items() if x != defaults[name].default}
    if ignored:
        kinds = _kinds(config)
        read = sorted({name for kind in kinds for name in OPTIONS[kind]})
        raise ValueError(
            f"fusion: expected no options but those that {' or '.join(kinds)} reads "
            f"({', '.join(read) or 'none'}), got {ignored}"
        )


def without_unread(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config's values without those options: checkpoints from before `check_read` may have
    some."""
    if not isinstance(config.get("fusion"), dict) or not _kinds(config):
        return dict(config)
    ignored = _unread(config)
    return {**config, "fusion": {k: v for k, v in config["fusion"].items() if k not in ignored}}


class Fusions(nn.Module):
    """`LayerFusion` over the encoder's layers, the decoder's, or both, with one layer embedding.

    Args:
        dim: D.
        sides: "encoder" and "decoder" -> (kind of the fusion or None, number of layers).
        options: further arguments of `LayerFusion`, for both sides.

    Attributes:
        encoder, decoder: their `LayerFusion`, or None.
        layer_embedding: E, as deep as the deeper side, or None: layer l of either side has the
            same.
    """

    def __init__(self, dim: int, sides: dict[str, tuple[str | None, int]], **options):
        super().__init__()
        self.encoder = self.decoder = None
        for side, (kind, layers) in sides.items():
            if kind is not None:
                fusion = LayerFusion(layers + 1, dim, kind, own_embedding=False, **options)
                setattr(self, side, fusion)
        attending = [f.num_states for f in self.children() if f.kind in WITH_ATTENTION]
        self.layer_embedding = layer_embedding(max(attending), dim) if attending else None

    def forward(self, side: str, run: Callable, seen: list[Tensor] | None = None) -> Tensor:
        """What ``run()`` returns, or the fusion of the stack's layers where that side has one.

        Args:
            side: "encoder" or "decoder".
            run: the stack, with an argument ``states``, see `TransformerEncoder.forward_packed`.
            seen: a list to be given the weights of the layers, (N, hops, L + 1).

        Raises:
            ValueError: where weights are asked of a side without attention.
        """
        fusion = getattr(self, side)
        if seen is not None and (fusion is None or fusion.kind not in WITH_ATTENTION):
            got = None if fusion is None else fusion.kind
            raise ValueError(f"{side}_fusion: expected one of {WITH_ATTENTION}, got {got!r}")
        if fusion is None:
            return run()
        states: list[Tensor] = []
        y = run(states=states)
        # The last state has passed the stack's final LN.
        states[-1] = y
        embedding = self.layer_embedding if fusion.kind in WITH_ATTENTION else None
        if seen is None:
            return fusion(states, embedding)
        y, weights = fusion(states, embedding, return_attention=True)
        seen.append(weights)
        return y
