"""What training and search ask of a model, whatever its kind.

    config                                        with vocab_size, padding_idx and backend, and
                                                  target_vocab_size where it is another
    loss(source_BS, target_in_BT, target_out_BT, label_smoothing) -> (loss, nll), both summed
    start(source_BS) -> state                     once per batch of sentences
    step(tokens_B, state) -> logits (B, V)        one position further
    state.reorder(index, memory=...)              of what `start` gave
    describe() -> str                             one line of sizes and choices

and, where a model has something of its own to say:

    set_step(step)                                before each step of training, counted from 1
    metrics() -> dict                             numbers and lists for the line of metrics
    group(source_tokens) -> int                   sentences of one batch must agree in it
    parameter_groups() -> list of ParameterGroup  how its parameters learn
    alignment(source_BS, target_in_BT) -> (B, T, S)   how much a word looks at each of the source's
    bottom                                        a whole model within, see `search.deep_shallow`
    encoder.set_memory, decoder.set_memory        see `deepfast.nn.TransformerEncoder`
"""

from typing import Any, TypedDict

from torch import nn


class ParameterGroup(TypedDict, total=False):
    """Parameters that learn alike."""

    params: list[nn.Parameter]
    lr_scale: float
    """Times the rate of the schedule; absent: 1."""
    decays: bool
    """Whether weight decay holds for them."""


def target_vocab_size(config: Any) -> int:
    """Of a model whose config may have no vocabulary of the target's own."""
    return getattr(config, "target_vocab_size", None) or config.vocab_size


def parameter_groups(model: nn.Module) -> list[ParameterGroup]:
    """How a model's parameters learn: as it says itself, or as `decaying_matrices`."""
    own = getattr(model, "parameter_groups", None)
    return decaying_matrices(model) if own is None else own()


def decaying_matrices(model: nn.Module) -> list[ParameterGroup]:
    """All parameters alike, but that the matrices of linear maps alone decay.

    Mixing weights, norms, biases and the embedding would be pulled away from where they belong.
    """
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    learning = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in learning if id(p) in matrices], "decays": True},
        {"params": [p for p in learning if id(p) not in matrices], "decays": False},
    ]
