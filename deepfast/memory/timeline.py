"""The memory of a training step at its peak, by category.

The computation follows a step: up through the layers, which keep what their policies say; the head;
then down again, where each layer frees what it kept and adds its gradients. Along layers of one
policy every sum is linear in depth. So the peak is at an end of a run of equal policies, or where a
buffer is allocated or freed. Only these layers are computed.
"""

from itertools import groupby
from typing import NamedTuple

from deepfast.memory.layer_bytes import (
    FP32,
    LayerBytes,
    head_bytes,
    layer_bytes,
)
from deepfast.memory.policies import ATTENTION_RESIDUALS, MIXING
from deepfast.memory.sizes import OPTIMIZERS, Sizes
from deepfast.memory.steps import Step

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


def block_rows(rows: int) -> int:
    """Rows per block of the depth connection, as `deepfast.depth.schedule.default_block`."""
    return 4 if rows <= 32 else 8


def slot_bytes(tokens: int, width: int, element: int) -> int:
    """Bytes of a slot in the buffer of states: whole pages of 4 KiB and one line of 64 bytes."""
    return -(-tokens * width * element // 4096) * 4096 + 64


class Moment(NamedTuple):
    """Bytes alive at one point of a step, without parameters and optimizer state."""

    gradients: int = 0
    copies: int = 0
    history: int = 0
    activations: int = 0
    transient: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        return sum(self)


class Stack:
    """One stack of layers with its connection.

    Args:
        policies: one for each layer.
    """

    def __init__(self, sizes: Sizes, policies: tuple[str, ...], decoder: bool = False):
        self.sizes, self.decoder = sizes, decoder
        self.tokens = sizes.target_tokens if decoder else sizes.tokens
        self.count, self.rows = len(policies), sizes.rows(decoder)
        self.parts = sizes.parts(decoder)
        self.runs = [
            (layer_bytes(sizes, policy, decoder), sum(1 for _ in run))
            for policy, run in groupby(policies)
        ]
        kind = sizes.kind(decoder)
        self.mixes, self.attends = kind in MIXING, kind in ATTENTION_RESIDUALS
        self.running = kind == "block_attnres"
        self.block = block_rows(self.rows)
        self.last_block = self.block * ((self.rows - 1) // self.block)
        self.slot = slot_bytes(self.tokens, sizes.width, sizes.bytes)
        self.state = self.tokens * sizes.width * sizes.bytes
        self.source = sizes.tokens * sizes.width * sizes.bytes

    def connection(self, slots: int = 0, *, learning: bool = False) -> int:
        """The connection's own memory.

        Args:
            slots: number of slots for partial and pulled sums.
            learning: whether the gradients of its weights exist.
        """
        if not self.mixes:
            return 0
        if self.attends:
            # A copy of the queries. For each row the numbers of its norm, for each state its RMS,
            # three for a softmax, and two more for the partial sums of a block.
            weights = self.rows * self.sizes.width
            numbers = (self.sizes.norm_values + 4) * self.rows + 2 * self.partial()
        else:
            # Copies of W and of the norms. A state's norm stores a standard deviation.
            of_norm = self.sizes.norm_values
            weights = self.rows * (
                self.rows * self.sizes.depth_channels + of_norm * self.sizes.width
            )
            numbers = (of_norm + (self.sizes.norm == "pre")) * self.rows
        weights, statistics = FP32 * weights, FP32 * numbers * self.tokens
        if learning and self.running:
            # What a running sum adds to the gradient of the state before it.
            statistics += self.state
        # One slot for each state, and one more for the last gradient.
        states = (self.rows + 1 + slots) * self.slot
        return states + statistics + weights * (2 if learning else 1)

    def entered(self) -> int:
        """The stack's input, which the caller holds, and its copy in autocast's dtype, unless they
        count as kept by a layer."""
        embedding = FP32 * self.tokens * self.sizes.width
        copied = self.sizes.dtype == "bfloat16"
        if self.mixes:
            return embedding + (self.state if copied else 0)
        return embedding if copied else 0

    def embedded(self) -> int:
        """Gradients of the stack's input in fp32, after dropout and before it."""
        return 2 * FP32 * self.tokens * self.sizes.width

    def partial(self) -> int:
        """Slots of partial sums; 0 where there is only one block."""
        return self.block if self.rows > self.block else 0

    def pulled(self, index: int, step: Step) -> int:
        """Slots of pulled sums in a step of backward: none before it leaves the last block."""
        return self.block if index * self.parts + step.part < self.last_block - 1 else 0

    def candidates(self) -> list[int]:
        """Layers at which the peak can lie, ascending."""
        # The pulled sums are allocated in the upper of these two layers. The lower one is the first
        # that has them from its start.
        first = (self.last_block - 2) // self.parts
        found = {first, first - 1}
        end = 0
        for _, length in self.runs:
            found |= {end, end + length - 1}
            end += length
        return sorted(index for index in found if 0 <= index < self.count)

    def layer(self, index: int) -> LayerBytes:
        for layer, length in self.runs:
            if index < length:
                return layer
            index -= length
        raise IndexError(index)

    def below(self, end: int, field: str) -> int:
        """The sum of a field of `LayerBytes` over layers 0 .. end - 1."""
        total = 0
        for layer, length in self.runs:
            total += min(max(end, 0), length) * getattr(layer, field)
            end -= length
        return total

    def _moment(self, index: int, step: Step, copies: str, **rest: int) -> Moment:
        """One step of layer ``index``, on top of what the layers below it keep."""
        layer = self.layer(index)
        activations = min(layer.kept, step.alive)
        own = min(getattr(layer, copies), step.alive - activations)
        return Moment(
            copies=self.below(index, copies) + own,
            activations=self.below(index, "kept") + activations,
            transient=step.alive - activations - own + rest.pop("transient"),
            **rest,
        )

    def forward(self) -> list[Moment]:
        entered, moments = self.entered(), []
        for index in self.candidates():
            for step in self.layer(index).forward:
                # Partial sums are allocated with the first row of the second block.
                row = index * self.parts + step.part
                history = self.connection(self.partial() if row >= self.block else 0)
                moments.append(
                    self._moment(index, step, "cached", history=history, transient=entered)
                )
        return moments

    def full(self, *, cached: bool = False) -> Moment:
        """Between forward and backward: everything that is kept, and the stack's result."""
        # Without a depth connection the last norm keeps its input.
        states = 2 if self.sizes.norm == "pre" and not self.mixes else 1
        return Moment(
            copies=self.below(self.count, "cached" if cached else "copies"),
            history=self.connection(),
            activations=self.below(self.count, "kept"),
            transient=states * self.state,
        )

    def backward(self) -> list[Moment]:
        # The norms of the connection.
        per_layer = self.layer(0).gradients
        if self.sizes.norm == "pre":
            per_layer += self.sizes.norm_values * FP32 * self.sizes.width * self.parts
        moments = []
        for index in self.candidates():
            # The gradient of the encoder's output, to which every decoder layer adds.
            source = self.source if self.decoder and index < self.count - 1 else 0
            moments += [
                self._moment(
                    index, step, "copies",
                    gradients=(self.count - 1 - index) * per_layer + step.gradients,
                    history=self.connection(self.partial() + self.pulled(index, step),
                                            learning=True),
                    transient=source,
                )
                for step in self.layer(index).backward
            ]  # fmt: skip
        return moments

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of every parameter."""
        return FP32 * (
            self.count * self.sizes.layer_parameters(self.decoder)
            + self.sizes.connection_parameters(self.decoder)
        )


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
    # The projection's gradient waits for those of the embeddings, the decoder's first.
    projection = Moment(head=head.gradients)
    moments.append(_sum(below, projection, Moment(head=head.working)))
    done = projection
    if decoder is not None:
        moments += [_sum(waiting, done, moment) for moment in decoder.backward()]
        done = _sum(done, Moment(gradients=decoder.gradients))
        # Beside the gradient of the encoder's output.
        embedding = Moment(head=head.embedding, transient=decoder.embedded())
        moments.append(_sum(waiting, done, embedding))
    if not sizes.vocabulary:
        # The caller of a bare stack holds its result.
        source = Moment(transient=encoder.state)
    moments += [_sum(source, done, moment) for moment in encoder.backward()]
    last = Moment(
        gradients=encoder.gradients, head=head.embedding, transient=encoder.embedded()
    )  # fmt: skip
    return [*moments, _sum(done, last)]


def _sum(*moments: Moment) -> Moment:
    return Moment(*map(sum, zip(*moments, strict=True)))


def peak_table(
    sizes: Sizes, policies: tuple[str, ...], decoder_policies: tuple[str, ...]
) -> dict[str, int]:
    """Category -> bytes at the peak of a step; their sum is the peak."""
    encoder = Stack(sizes, policies)
    decoder = Stack(sizes, decoder_policies, True) if decoder_policies else None
    count = sizes.parameters
    whole = FP32 * count
    moments = _moments(sizes, encoder, decoder)
    if sizes.accumulate > 1:
        # The gradients of earlier micro-batches are alive while later ones run.
        moments = [moment._replace(gradients=whole) for moment in moments]
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
    """Bytes that a device needs beside the tensors of a step."""
    return int(MARGIN * peak) + CONTEXT if sizes.device == "cuda" else 0
