"""What a step takes on one of several ranks that share a model."""

from deepfast.memory.sizes import Sizes
from deepfast.memory.steps import FP32, Moment


def local_parameters(sizes: Sizes) -> int:
    """Parameters that a rank keeps from step to step."""
    return -(-sizes.parameters // sizes.ranks) if sizes.sharded else sizes.parameters


def gathered(sizes: Sizes) -> int:
    """Bytes of the whole parameters that FSDP holds at one time: a layer and the buffer that it
    came in, one connection in fp32, and all that belongs to no layer."""
    layers = [sizes.layer_parameters()] * sizes.layers
    connections = [sizes.connection_parameters()]
    if sizes.decoder_layers:
        layers += [sizes.layer_parameters(True)] * sizes.decoder_layers
        connections.append(sizes.connection_parameters(True))
    rest = sizes.parameters - sum(layers) - sum(connections)
    if sizes.reshard:
        return sizes.bytes * (2 * max(layers) + rest) + FP32 * max(connections)
    return sizes.bytes * (sum(layers) + max(layers) + rest) + FP32 * sum(connections)


def on_one_rank(sizes: Sizes, moments: list[Moment]) -> list[Moment]:
    """The moments of a step with what a rank has of gradients and weights."""
    whole = FP32 * sizes.parameters
    if not sizes.sharded:
        if sizes.ranks == 1 and sizes.accumulate == 1:
            return moments
        # The gradients of earlier micro-batches are alive while later ones run. DDP keeps its
        # buckets of gradients from step to step, and the gradients until the buckets get their sum.
        gradients = whole * (2 if sizes.ranks > 1 and sizes.accumulate > 1 else 1)
        return [moment._replace(gradients=gradients) for moment in moments]
    # A layer's gradients, and the buffer in fp32 from which they are reduced over the ranks.
    layer = max(sizes.layer_parameters(), sizes.layer_parameters(True) * bool(sizes.decoder_layers))
    reduced = (sizes.bytes + FP32) * layer
    copies = gathered(sizes)
    return [
        moment._replace(
            # Gradients are not reduced before the last micro-batch of a step.
            gradients=(whole if sizes.accumulate > 1 else 0)
            + (moment.gradients // sizes.ranks + reduced if moment.gradients else 0),
            # Autocast finds the weights in its dtype.
            copies=copies + (0 if sizes.bytes == 2 else moment.copies),
        )
        for moment in moments
    ]
