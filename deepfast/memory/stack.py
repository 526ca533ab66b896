"""What a stack of any depth keeps at every point of a step, from records of single layers."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from deepfast.memory.history import FP32, History
from deepfast.memory.ledger import Moment
from deepfast.memory.sizes import Sizes


@dataclass(frozen=True)
class LayerRecord:
    """One layer of a stack under one policy, with the boundary above it."""

    kept: Moment
    """From its forward to the end of the whole forward."""
    saved: Moment
    """From its forward to its backward. Autocast frees its copies of weights after forward."""
    forward: tuple[Moment, ...]
    """The highest point in forward of each of its parts that reads, above what was alive at the
    layer's start."""
    backward: tuple[Moment, ...]
    """The same in backward, also from the lowest part to the highest."""
    gradients: int
    """Of its parameters and of the norms before it."""
    forward_flops: int
    """Multiplications and additions of its matrix products."""
    backward_flops: int


class Stack:
    """One stack of layers with its connection.

    Args:
        records: policy -> a layer under it.
        policies: one for each layer.
        blocks: as in `History`.
    """

    def __init__(
        self,
        sizes: Sizes,
        records: dict[str, LayerRecord],
        policies: Sequence[str],
        decoder: bool,
        blocks: bool = True,
    ):
        self.count = len(policies)
        self.history = History(sizes, self.count, decoder, blocks)
        # A stack may have thousands of layers, and `plan` looks at hundreds of stacks.
        runs = [(records[policy], len(list(same))) for policy, same in groupby(policies)]
        self.runs = [record for record, _ in runs]
        """The layers, without those that are like the layer below them."""
        self.starts = [0, *accumulate(length for _, length in runs)]
        """The first layer of each run of equal layers, and the number of layers."""
        self.sums = {
            field: list(
                accumulate(
                    (getattr(record, field).times(length) for record, length in runs),
                    Moment.plus, initial=Moment(),
                )
            )
            for field in ("kept", "saved")
        }  # fmt: skip
        """Field of `LayerRecord` -> its sum over the runs below each run."""
        parameters = self.count * sizes.layer_parameters(decoder)
        parameters += sizes.connection_parameters(decoder, self.count)
        self.learned = Moment(gradients=FP32 * parameters)

    def below(self, field: str, index: int) -> Moment:
        """The sum of a field of `LayerRecord` over the layers below layer ``index``."""
        run = min(bisect_right(self.starts, index), len(self.runs)) - 1
        own = getattr(self.runs[run], field).times(index - self.starts[run])
        return self.sums[field][run].plus(own)

    def holds(self, state: str) -> Moment:
        """What exists for this stack outside of its own forward and backward.

        Args:
            state: "nothing"; "states" where forward begins; "kept" after forward, and "saved" where
                autocast has ended; "learning" where backward begins; "learned" after it.
        """
        if state == "nothing":
            return Moment()
        if state == "learned":
            return self.learned
        history = Moment(history=self.history.bytes(state == "learning"))
        if state == "states":
            return history
        return history.plus(self.below("kept" if state == "kept" else "saved", self.count))

    def _ends(self, also: Sequence[int] = ()) -> list[int]:
        """Layers at which the peak can lie: along equal layers every sum is linear in the depth, so
        these are the ends of runs, and those where a buffer is allocated or freed."""
        found = {0, self.count - 1, *also}
        for start in self.starts[1:-1]:
            found |= {start - 1, start}
        return sorted(index for index in found if 0 <= index < self.count)

    def _record(self, index: int) -> LayerRecord:
        return self.runs[bisect_right(self.starts, index) - 1]

    def forward(self) -> list[Moment]:
        """The highest points of forward, above "states"."""
        moments = []
        for index in self._ends():
            for part, highest in enumerate(self._record(index).forward):
                sums = Moment(history=self.history.partial(index, part))
                moments.append(self.below("kept", index).plus(highest, sums))
        return moments

    def backward(self) -> list[Moment]:
        """The highest points of backward, above "learning"."""
        first, moments = self.history.first_pulled, []
        for index in self._ends((first, first + 1)):
            record, above = self._record(index), self.count - 1 - index
            freed = self.below("saved", self.count).minus(self.below("saved", index + 1))
            for part, highest in enumerate(record.backward):
                sums = self.history.pulled(index, part)
                more = Moment(gradients=above * record.gradients, history=sums)
                moments.append(highest.plus(more).minus(freed))
        return moments
