"""What crosses each edge of a pipeline, and its count.

Below an edge lie the states up to the newest one, b, and above it the rows from b on, which read
them. Two things carry what these rows need:

    "states"    the states up to b that such a row reads
    "sums"      the input of the next layer, row b, and the sums of the later rows over those states

Once a stage has sent sums, the stages after it do not know the states, so they send sums too. The
edges send what is fewest in all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deepfast import checks
from deepfast.depth.connection import DepthConnection

OP = "deepfast.parallel.split"


@dataclass(frozen=True)
class Edge:
    """What one stage sends to the next."""

    state: int
    """b, the newest state below the edge."""
    kind: str
    """"states" or "sums"."""
    carried: tuple[int, ...]
    """The states, ascending, or the rows after b whose sums cross with row b."""

    @property
    def tensors(self) -> int:
        """How many tensors of the size of a state cross."""
        return len(self.carried) + (self.kind == "sums")


@dataclass(frozen=True)
class EdgePayload:
    """What the edges of a pipeline carry for each microbatch, in tensors of the size of a state.

    Backward sends as many. A softmax sends one number more for each token of each sum.
    """

    edges: tuple[Edge, ...]
    """From the bottom."""

    @property
    def tensors(self) -> tuple[int, ...]:
        return tuple(edge.tensors for edge in self.edges)

    @property
    def total(self) -> int:
        return sum(self.tensors)

    @property
    def peak(self) -> int:
        return max(self.tensors, default=0)

    @property
    def all_states(self) -> tuple[int, ...]:
        """The same counts where every edge sends all states below it."""
        return tuple(edge.state + 1 for edge in self.edges)

    def __str__(self) -> str:
        every = self.all_states
        lines = [
            f"edge {i}: {edge.tensors} {edge.kind} (all states: {below})"
            for i, (edge, below) in enumerate(zip(self.edges, every, strict=True))
        ]
        most = max(every, default=0)
        lines.append(f"in all {self.total} of {sum(every)}, at most {self.peak} of {most}")
        return "\n".join(lines)


def layer_counts(num_layers: int, stages: int | Sequence[int]) -> tuple[int, ...]:
    """Layers of each stage: as given or, for a number of stages, as equal as can be."""
    if not isinstance(stages, Sequence):
        checks.whole(OP, stages=stages)
        if stages > num_layers:
            raise ValueError(f"{OP}: {num_layers} layers make at most as many stages, got {stages}")
        few, more = divmod(num_layers, stages)
        return tuple(few + (i < more) for i in range(stages))
    for count in stages:
        checks.whole(OP, **{"layers of a stage": count})
    if sum(stages) != num_layers:
        raise ValueError(
            f"{OP}: the layers of the stages must add up to {num_layers}, got {list(stages)}"
        )
    return tuple(stages)


def plan_edges(connection: DepthConnection, newest: Sequence[int]) -> tuple[Edge, ...]:
    """The edges above the states ``newest``, with the fewest tensors in all."""
    reads, rows = connection.pattern, connection.rows
    states, sums = [], []
    for b in newest:
        kept = (k for k in range(b) if any(k in reads[row] for row in range(b, rows)))
        later = (row for row in range(b + 1, rows) if reads[row][0] <= b)
        states.append(Edge(b, "states", (*kept, b)))
        # A state that contains the one before it needs that one.
        sums.append(None if connection.running[b + 1] else Edge(b, "sums", tuple(later)))
    plans = [(*states[:i], *sums[i:]) for i in range(len(newest) + 1)]
    return min(
        (plan for plan in plans if None not in plan), key=lambda plan: sum(e.tensors for e in plan)
    )


def edge_payload(connection: DepthConnection, stages: int | Sequence[int]) -> EdgePayload:
    """Counts what the edges of a pipeline carry, see `EdgePayload`.

    Args:
        connection: the depth connection of the whole stack, a `deepfast.nn.DLCL` or
            `deepfast.nn.AttentionResiduals`; `deepfast.nn.TransformerEncoder` has it as
            ``encoder.connection.depth``.
        stages: as in `deepfast.parallel.split`.

    Raises:
        TypeError, ValueError: for another connection, or stages that do not fit.
    """
    op = "deepfast.parallel.edge_payload"
    if not isinstance(connection, DepthConnection):
        kind = type(connection).__name__
        raise TypeError(f"{op}: expected a DLCL or AttentionResiduals, got {kind}")
    reads = (connection.rows - 1) // connection.num_layers
    below, newest = 0, []
    for count in layer_counts(connection.num_layers, stages)[:-1]:
        below += count
        newest.append(reads * below)
    return EdgePayload(plan_edges(connection, newest))
