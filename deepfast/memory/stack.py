"""What a stack keeps for backward, and what it needs while it runs, at every point of a step.

Elements per token, D wide, F in the feed-forward block, H heads; statistics (of softmax and
layer-norms) are fp32, everything else is in the storage dtype. With fewer heads of keys and values
these are narrower:

    encoder   none         n or x, q k v, o, s, h      6 D + F      post-norm 7 D + F
              ffn          without h                   6 D          7 D
              layer        x                           D            D
              layer+input  nothing
    decoder   none         also q, o, s of its second attention, and k v: 2 D per source token

Where each sublayer reads the depth connection, no n, x or s is kept: `part_steps`. GELU and a rerun
need more while backward runs; `steps` goes through both directions.
`tests/memory/test_plan_measured.py` compares the plan with measured steps, also of random sizes.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby

import torch

from deepfast.depth.schedule import default_block
from deepfast.memory.part_steps import PartLayer
from deepfast.memory.sizes import Sizes
from deepfast.memory.steps import FP32, Layer, Moment, Step
from deepfast.ops.common import empty_slots
from deepfast.policies import ATTENTION_RESIDUALS, MIXING


@dataclass(frozen=True)
class LayerBytes:
    """One layer of a stack under one policy, in bytes of a micro-batch."""

    kept: int
    """Activations, from its forward to its backward."""
    copies: int
    """Copies of its weights, in autocast's dtype or scaled, from its forward to its backward."""
    cached: int
    """Copies from its forward to the end of the whole forward."""
    forward: tuple[Step, Step]
    """The highest step of its forward, and the boundary after it. Both include ``kept``."""
    backward: tuple[Step, ...]
    """The steps of its backward that no later step exceeds."""
    gradients: int
    """Gradients of its parameters, which exist from its backward on."""


@lru_cache(maxsize=64)
def layer_bytes(sizes: Sizes, policy: str, decoder: bool = False) -> LayerBytes:
    """One layer of the encoder, or of the decoder."""
    kind = PartLayer if sizes.parts(decoder) > 1 else Layer
    layer = kind(sizes, policy, decoder)
    cached = sum(layer.cached().values())
    *steps, boundary = layer.forward()
    return LayerBytes(
        kept=sum(layer.kept().values()),
        # Autocast's cache is freed with its context.
        copies=sum(layer.held().values()),
        cached=cached,
        forward=(max(steps, key=lambda step: step.alive), boundary),
        backward=_highest(layer.backward()),
        gradients=FP32 * sizes.layer_parameters(decoder),
    )


def _highest(steps: list[Step]) -> tuple[Step, ...]:
    """The steps that no later step exceeds. Gradients grow, so no other step can be the peak."""
    found: list[Step] = []
    for step in reversed(steps):
        if not found or step.alive > found[-1].alive:
            found.append(step)
    return tuple(found)


@lru_cache(maxsize=64)
def slot_bytes(tokens: int, width: int, dtype: str) -> int:
    """Bytes of a slot in the engine's buffers of states and of sums."""
    state = torch.empty(tokens, width, dtype=getattr(torch, dtype), device="meta")
    return empty_slots(1, state).untyped_storage().nbytes()


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
        of_policy = {policy: layer_bytes(sizes, policy, decoder) for policy in set(policies)}
        # A stack may have thousands of layers, and `plan` looks at hundreds of stacks.
        runs = [(of_policy[policy], len(list(same))) for policy, same in groupby(policies)]
        self.runs = [layer for layer, _ in runs]
        """The layers, without those that are like the layer below them."""
        self.starts = [0, *accumulate(length for _, length in runs)]
        """The first layer of each run of equal layers, and the number of layers."""
        self.sums = {
            field: [0, *accumulate(getattr(layer, field) * length for layer, length in runs)]
            for field in ("kept", "copies", "cached")
        }
        """Field of `LayerBytes` -> its sum over the runs below each run."""
        kind = sizes.kind(decoder)
        self.mixes, self.attends = kind in MIXING, kind in ATTENTION_RESIDUALS
        self.running = kind == "block_attnres"
        self.block = default_block(self.rows, sizes.device, 16 if self.attends else 8)
        self.last_block = self.block * ((self.rows - 1) // self.block)
        self.slot = slot_bytes(self.tokens, sizes.dim, sizes.dtype)
        self.sum_slot = slot_bytes(self.tokens, sizes.dim, "float32")
        self.state = self.tokens * sizes.dim * sizes.bytes
        self.source = sizes.tokens * sizes.dim * sizes.bytes

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
            weights = self.rows * self.sizes.dim
            numbers = (self.sizes.norm_values + 4) * self.rows + 2 * self.partial()
        else:
            # Copies of W and of the norms. A state's norm stores a standard deviation.
            of_norm = self.sizes.norm_values
            weights = self.rows * (self.rows * self.sizes.depth_channels + of_norm * self.sizes.dim)
            numbers = (of_norm + (self.sizes.norm == "pre")) * self.rows
        weights, statistics = FP32 * weights, FP32 * numbers * self.tokens
        if learning and self.running:
            # What a running sum adds to the gradient of the state before it.
            statistics += self.state
        # One slot for each state, and one more for the last gradient.
        states = (self.rows + 1) * self.slot + slots * self.sum_slot
        return states + statistics + weights * (2 if learning else 1)

    def entered(self) -> int:
        """The stack's input, which the caller holds, and its copy in autocast's dtype, unless they
        count as kept by a layer."""
        embedding = FP32 * self.tokens * self.sizes.dim
        copied = self.sizes.dtype == "bfloat16"
        if self.mixes:
            return embedding + (self.state if copied else 0)
        return embedding if copied else 0

    def embedded(self) -> int:
        """Gradients of the stack's input in fp32, after dropout and before it."""
        return 2 * FP32 * self.tokens * self.sizes.dim

    def partial(self) -> int:
        """Slots of partial sums; 0 where there is only one block."""
        return self.block if self.rows > self.block else 0

    def pulled(self, index: int, step: Step) -> int:
        """Slots of pulled sums in a step of backward: none before it leaves the last block."""
        return self.block if index * self.parts + step.part < self.last_block - 1 else 0

    def layer(self, index: int) -> LayerBytes:
        return self.runs[bisect_right(self.starts, index) - 1]

    def below(self, field: str, index: int) -> int:
        """The sum of a field of `LayerBytes` over the layers below layer ``index``."""
        run = min(bisect_right(self.starts, index), len(self.runs)) - 1
        return self.sums[field][run] + (index - self.starts[run]) * getattr(self.runs[run], field)

    def candidates(self) -> list[int]:
        """Layers at which the peak can lie, ascending."""
        # The pulled sums are allocated in the upper of these two layers. The lower one is the first
        # that has them from its start.
        first = (self.last_block - 2) // self.parts
        found = {first, first - 1, 0, self.count - 1}
        for start in self.starts[1:-1]:
            found |= {start - 1, start}
        return sorted(index for index in found if 0 <= index < self.count)

    def _moment(self, index: int, step: Step, copies: str, **rest: int) -> Moment:
        """One step of layer ``index``, on top of what the layers below it keep."""
        layer = self.layer(index)
        activations = min(layer.kept, step.alive)
        own = min(getattr(layer, copies), step.alive - activations)
        return Moment(
            copies=self.below(copies, index) + own,
            activations=self.below("kept", index) + activations,
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
            copies=self.below("cached" if cached else "copies", self.count),
            history=self.connection(),
            activations=self.below("kept", self.count),
            transient=states * self.state,
        )

    def backward(self) -> list[Moment]:
        # The norms of the connection.
        per_layer = self.layer(0).gradients
        if self.sizes.norm == "pre":
            per_layer += self.sizes.norm_values * FP32 * self.sizes.dim * self.parts
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
