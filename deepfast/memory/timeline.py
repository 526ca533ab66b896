"""The memory of a training step at its peak, by category.

The computation follows a step: up through the layers, which keep what their policies say; the head;
then down again, where each layer frees what it kept and adds its gradients. Along layers of one
policy every sum is linear in depth. So the peak is at an end of a run of equal policies, or where a
buffer is allocated or freed. Only these layers are computed.
"""

from dataclasses import dataclass

from deepfast.memory.sizes import OPTIMIZERS, Sizes
from deepfast.memory.stack import Stack
from deepfast.memory.steps import FP32, Moment
from deepfast.ops.linear_cross_entropy import WIDENED, chunk_rows

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "weight copies",
    "history",
    "activations",
    "transient",
    "head",
    "allocator margin",
)
"""Rows of a plan's table."""

MARGIN, CONTEXT = 0.04, 300 * 2**20
"""The share of memory that CUDA's allocator loses to fragmentation, and the bytes of CUDA's context
and libraries."""


@dataclass(frozen=True)
class HeadBytes:
    """Bytes of the embedding and of the projection to the vocabulary."""

    kept: int
    """Bytes per token of one side, from the embedding's forward to its backward."""
    working: int
    """While the loss and its gradients are computed."""
    gradients: int
    """Gradient of the shared weight, which exists from the loss on."""


def head_bytes(sizes: Sizes) -> HeadBytes:
    """The head's bytes by closed formulas; all 0 without a vocabulary."""
    if not sizes.vocab_size:
        return HeadBytes(kept=0, working=0, gradients=0)
    tokens = sizes.target_tokens if sizes.decoder_layers else sizes.tokens
    chunk = chunk_rows(tokens, sizes.vocab_size, sizes.device)
    table = sizes.vocab_size * sizes.dim
    working = chunk * sizes.vocab_size * sizes.bytes + 2 * tokens * sizes.dim * sizes.bytes
    # FSDP's parameters are in the storage dtype already, and so are their gradients.
    gradient = sizes.bytes if sizes.sharded else FP32
    if sizes.dtype == "bfloat16":
        working += 0 if sizes.sharded else 2 * table
        if sizes.device == "cpu":
            # The weight's gradient is summed in fp32 from operands converted part by part.
            working += FP32 * chunk * (sizes.dim + min(WIDENED, sizes.vocab_size))
    # The dropout mask of embeddings: one byte per element on CUDA, an fp32 factor on the CPU.
    mask = sizes.dim * (1 if sizes.device == "cuda" else FP32) if sizes.dropout else 0
    return HeadBytes(kept=mask, working=working, gradients=gradient * table)


def _moments(sizes: Sizes, encoder: Stack, decoder: Stack | None) -> list[Moment]:
    """Every point of a step at which the peak can lie."""
    head = head_bytes(sizes)
    source = Moment(head=head.kept * sizes.tokens)
    moments = [_sum(source, moment) for moment in encoder.forward()]
    # Autocast holds every copy that it made until its context ends.
    below, waiting = (_sum(source, encoder.full(cached=cached)) for cached in (True, False))
    if decoder is not None:
        target = Moment(head=head.kept * sizes.target_tokens)
        below, waiting = _sum(below, target), _sum(waiting, target)
        moments += [_sum(below, moment) for moment in decoder.forward()]
        below = _sum(below, decoder.full(cached=True))
    # The projection's gradient waits for those of the embeddings, the decoder's first. While one is
    # added to it, it exists three times: beside it are the new gradient and the sum.
    done = Moment(head=head.gradients)
    moments.append(_sum(below, done, Moment(head=head.working)))
    if decoder is not None:
        moments += [_sum(waiting, done, moment) for moment in decoder.backward()]
        done = _sum(done, Moment(gradients=decoder.gradients))
        # Beside the gradient of the encoder's output.
        embedding = Moment(head=2 * head.gradients, transient=decoder.embedded())
        moments.append(_sum(waiting, done, embedding))
    if not sizes.vocab_size:
        # The caller of a bare stack holds its result.
        source = Moment(transient=encoder.state)
    moments += [_sum(source, done, moment) for moment in encoder.backward()]
    last = Moment(
        gradients=encoder.gradients, head=2 * head.gradients, transient=encoder.embedded()
    )
    return [*moments, _sum(done, last)]


def _sum(*moments: Moment) -> Moment:
    return Moment(*map(sum, zip(*moments, strict=True)))


def peak_table(
    sizes: Sizes, policies: tuple[str, ...], decoder_recompute: tuple[str, ...]
) -> dict[str, int]:
    """Category -> bytes at the peak of a step; their sum is the peak."""
    encoder = Stack(sizes, policies)
    decoder = Stack(sizes, decoder_recompute, True) if decoder_recompute else None
    count = local_parameters(sizes)
    moments = on_one_rank(sizes, _moments(sizes, encoder, decoder))
    top = max(moments, key=lambda moment: moment.total)
    table = {
        "parameters": FP32 * count,
        "gradients": top.gradients,
        "optimizer": OPTIMIZERS[sizes.optimizer] * count,
        "weight copies": top.copies,
        "history": top.history,
        "activations": top.activations,
        "transient": top.transient,
        "head": top.head,
        "allocator margin": 0,
    }
    table["allocator margin"] = margin(sizes, sum(table.values()))
    return table


def margin(sizes: Sizes, peak: int) -> int:
    """Bytes that a device needs besides the tensors of a step."""
    return int(MARGIN * peak) + CONTEXT if sizes.device == "cuda" else 0


# ---- one of several ranks that share the model ---------------------------------------------------


def local_parameters(sizes: Sizes) -> int:
    """Parameters that a rank keeps from step to step."""
    return -(-sizes.parameters // sizes.ranks) if sizes.sharded else sizes.parameters


def gathered(sizes: Sizes) -> int:
    """Bytes of the unsharded parameters that FSDP holds at one time: a layer and its all-gather
    buffer, one connection in fp32, and all parameters outside of the layers."""
    layers = [sizes.layer_parameters()] * sizes.num_layers
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
