"""The highest point of a training step, by category.

A step is walked through as it runs: up through the layers, which leave what their policy keeps; the
head; down again, where each layer gives back what it kept and leaves its gradients. Between two
layers of one policy every sum is linear in depth, so the peak lies at an end of a run of equal
policies, or where a buffer comes or goes, and only these layers are looked at.
"""

from dataclasses import dataclass, fields, replace
from itertools import groupby

from .layer_bytes import FP32, LayerBytes, head_bytes, layer_bytes
from .sizes import OPTIMIZERS, Sizes

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
"""What a CUDA allocator loses to fragments, and what the device's context and libraries hold."""


def block_rows(rows: int) -> int:
    """Rows per block of the depth connection; `deepfast.ops.depth_state.default_block`."""
    return 4 if rows <= 32 else 8


def slot_bytes(tokens: int, width: int, element: int) -> int:
    """A state in the buffer of states: padded to whole pages of 4 KiB and one line of 64 bytes."""
    return -(-tokens * width * element // 4096) * 4096 + 64


@dataclass(frozen=True)
class Moment:
    """Bytes alive at one point of a step, beside what is there throughout."""

    gradients: int = 0
    copies: int = 0
    history: int = 0
    activations: int = 0
    transient: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        return (
            self.gradients + self.copies + self.history + self.activations + self.transient
            + self.head
        )  # fmt: skip


class Stack:
    """One stack of layers with its connection.

    Args:
        policies: one for each layer.
    """

    def __init__(self, sizes: Sizes, policies: tuple[str, ...], decoder: bool = False):
        self.sizes, self.decoder = sizes, decoder
        self.tokens = sizes.target_tokens if decoder else sizes.tokens
        self.count, self.rows = len(policies), len(policies) + 1
        self.runs = [
            (layer_bytes(sizes, policy, decoder), sum(1 for _ in run))
            for policy, run in groupby(policies)
        ]
        kind = sizes.decoder_connection if decoder else sizes.connection
        self.dlcl, self.block = kind == "dlcl", block_rows(self.rows)
        self.last_block = self.block * ((self.rows - 1) // self.block)
        self.slot = slot_bytes(self.tokens, sizes.width, sizes.bytes)
        self.state = self.tokens * sizes.width * sizes.bytes

    def connection(self, slots: int = 0) -> int:
        """The connection's own memory, with ``slots`` of partial and pulled sums."""
        # A row's norm has a mean and a standard deviation, a state's norm the latter.
        pre = self.sizes.norm == "pre"
        statistics = self.rows * self.tokens * FP32
        if not self.dlcl:
            return 2 * statistics if pre else 0
        # Slots of states, one more for the last gradient, and W as it is applied, with gradient.
        weights = 3 * FP32 * self.rows * (
            self.rows * self.sizes.depth_channels + 2 * self.sizes.width
        )  # fmt: skip
        statistics *= 3 if pre else 2
        return (self.rows + 1 + slots) * self.slot + statistics + weights

    def partial(self) -> int:
        """Slots of partial sums, where there is more than one block."""
        return self.block if self.rows > self.block else 0

    def candidates(self) -> list[int]:
        """Layers at which the peak can lie, ascending."""
        # The pulled sums come when backward leaves the last block.
        found = {self.last_block - 2}
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

    def forward(self) -> list[Moment]:
        return [
            Moment(
                copies=self.below(index + 1, "cached"),
                history=self.connection(self.partial()),
                activations=self.below(index + 1, "kept"),
                transient=self.layer(index).forward,
            )
            for index in self.candidates()
        ]

    def full(self, *, cached: bool = False) -> Moment:
        """Between forward and backward: everything kept, and the stack's result."""
        # Without DLCL the last norm keeps its input.
        states = 2 if self.sizes.norm == "pre" and not self.dlcl else 1
        return Moment(
            copies=self.below(self.count, "cached" if cached else "copies"),
            history=self.connection(),
            activations=self.below(self.count, "kept"),
            transient=states * self.state,
        )

    def backward(self) -> list[Moment]:
        # A layer's first norm is the connection's.
        per_layer = self.layer(0).gradients
        if self.sizes.norm == "pre":
            per_layer += 2 * FP32 * self.sizes.width
        moments = []
        for index in self.candidates():
            pulled = self.block if index < self.last_block - 1 else 0
            moments.append(
                Moment(
                    gradients=(self.count - 1 - index) * per_layer,
                    copies=self.below(index + 1, "copies"),
                    history=self.connection(self.partial() + pulled),
                    activations=self.below(index + 1, "kept"),
                    transient=self.layer(index).backward,
                )
            )
        return moments

    @property
    def gradients(self) -> int:
        """Of every parameter."""
        return FP32 * (
            self.count * self.sizes.layer_parameters(self.decoder)
            + self.sizes.connection_parameters(self.decoder)
        )


def _moments(sizes: Sizes, encoder: Stack, decoder: Stack | None) -> list[Moment]:
    """Every point of a step at which the peak can lie."""
    head = head_bytes(sizes)
    source = Moment(head=head.kept * sizes.tokens)
    moments = [_sum(source, moment) for moment in encoder.forward()]
    # Until autocast's context ends it holds every copy it made.
    below, waiting = (_sum(source, encoder.full(cached=cached)) for cached in (True, False))
    if decoder is not None:
        target = Moment(head=head.kept * sizes.target_tokens)
        below, waiting = _sum(below, target), _sum(waiting, target)
        moments += [_sum(below, moment) for moment in decoder.forward()]
        below = _sum(below, decoder.full(cached=True))
    # Until the embedding's own arrives and both are added up.
    projection = Moment(head=head.gradients)
    moments.append(_sum(below, projection, Moment(head=head.working)))
    done = projection
    if decoder is not None:
        moments += [_sum(waiting, done, moment) for moment in decoder.backward()]
        done = _sum(done, Moment(gradients=decoder.gradients))
    if not sizes.vocabulary:
        # Whoever calls a bare stack holds its result.
        source = Moment(transient=encoder.state)
    moments += [_sum(source, done, moment) for moment in encoder.backward()]
    # The embedding's gradient comes last, beside the projection's.
    last = Moment(gradients=encoder.gradients, head=head.embedding)
    return [*moments, _sum(done, last)]


def _sum(*moments: Moment) -> Moment:
    return Moment(
        **{f.name: sum(getattr(moment, f.name) for moment in moments) for f in fields(Moment)}
    )


def peak_table(
    sizes: Sizes, policies: tuple[str, ...], decoder_policies: tuple[str, ...]
) -> dict[str, int]:
    """Category to bytes at the highest point of a step; their sum is the peak."""
    encoder = Stack(sizes, policies)
    decoder = Stack(sizes, decoder_policies, True) if decoder_policies else None
    count = sizes.parameters
    whole = FP32 * count
    moments = _moments(sizes, encoder, decoder)
    if sizes.accumulate > 1:
        # The gradients of earlier micro-batches stay while later ones run.
        moments = [replace(moment, gradients=whole) for moment in moments]
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
    """What a device takes beside the tensors of a step."""
    return int(MARGIN * peak) + CONTEXT if sizes.device == "cuda" else 0
