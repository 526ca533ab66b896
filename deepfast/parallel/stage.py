"""An encoder in stages, for torch.distributed.pipelining."""

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepfast.depth.boundary import DepthHistory
from deepfast.memory.policies import MIXING
from deepfast.nn.connections.attention_residuals import Attended
from deepfast.nn.connections.base import LayerCall
from deepfast.nn.connections.dlcl import Mixed
from deepfast.nn.packing import Packing
from deepfast.nn.transformer import TransformerEncoder
from deepfast.parallel.depth import StageDepth
from deepfast.parallel.edges import OP, Edge, layer_counts, plan_edges


class _Stage(Mixed):
    """The connection between the layers of one stage: a copy of the depth connection's parameters,
    and the norms before the stage's layers. The last stage has the final norm."""

    def __init__(self, whole: Mixed, first: int, last: int, below: Edge | None, above: Edge | None):
        nn.Module.__init__(self)
        self.kind, self.norm = whole.kind, whole.norm
        self.dropout, self.reads, self.parts = whole.dropout, whole.reads, whole.parts
        # Stages in one process have parameters of their own, whose gradients a schedule scales.
        own = copy.deepcopy(whole.depth)
        setattr(self, whole.child, own)
        self.norms = None
        if whole.norms is not None:
            rows = range(first, last + (above is None))
            self.norms = nn.ModuleDict({str(row): whole.norms[row] for row in rows})  # type: ignore
        self.part = StageDepth(own, first, last, below, above)

    @property
    def depth(self) -> StageDepth:
        return self.part

    def forward(  # type: ignore[override]
        self, payload: tuple[Tensor, ...], calls: Sequence[LayerCall]
    ) -> tuple[Tensor, ...]:
        """From what crosses the edge below to what crosses the edge above, (T, D) each; the last
        stage returns its output alone."""
        history, norms = DepthHistory(), None
        x = self.part.begin(payload, history)
        if self.norms is not None:
            norms = list(self.norms.values())  # type: ignore[attr-defined]
            norms += [] if self.part.above is None else [None]
        x = self.mix(x, calls, norms, history)
        return (x,) if self.part.above is None else self.part.end(payload, x, history)


class _AttendedStage(_Stage, Attended):
    """The same for attention residuals."""


class EncoderStage(nn.Module):
    """The layers of an encoder from ``first`` on, and what lies between them; see `split`.

    Its parameters have the names that they have in the encoder.

    Attributes:
        index, stages: which stage it is, of how many.
        below, above: what crosses the edges, `deepfast.parallel.Edge`; None at the ends.
    """

    def __init__(
        self,
        encoder: TransformerEncoder,
        index: int,
        first: int,
        count: int,
        edges: tuple[Edge, ...],
    ):
        super().__init__()
        self.index, self.stages, self.dim = index, len(edges) + 1, encoder.dim
        self.below = edges[index - 1] if index > 0 else None
        self.above = edges[index] if index < len(edges) else None
        here = range(first, first + count)
        self.layers = nn.ModuleDict({str(i): encoder.layers[i] for i in here})  # type: ignore
        self.policies = encoder.policies[first : first + count]
        whole: Any = encoder.connection
        ends = first * whole.reads, (first + count) * whole.reads
        make = _AttendedStage if isinstance(whole, Attended) else _Stage
        self.connection = make(whole, *ends, self.below, self.above)
        self.train(encoder.training)

    def forward(
        self, *payload: Tensor, key_padding_mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """What crosses the edge below to what crosses the edge above.

        The first stage takes the embedding (B, S, D), and the last one returns the output
        (B, S, D), zero at padding. Between them a tensor of the size of a state is (B, S, D), and
        R sums are (R, B, S, D); with a softmax their lse (R, B, S) comes after them.

        Args:
            key_padding_mask: (B, S), True is padding. Every stage needs it. Padding is computed,
                because microbatches have one shape.
        """
        name = f"stage {self.index} of {self.stages}"
        self._check_payload(name, payload)
        batch, length = payload[0].shape[:2]
        packing = Packing.of(
            batch, length, key_padding_mask, argument=f"{name}: key_padding_mask", keep=True
        )
        rows = tuple(y.flatten(axis, axis + 1) for y, axis in _token_axes(self.below, payload))
        sent = self.connection(rows, self._calls(packing))
        if self.above is None:
            return packing.unpack(sent[0])
        size = batch, length
        return tuple(y.unflatten(axis, size) for y, axis in _token_axes(self.above, sent))

    def _check_payload(self, name: str, payload: tuple[Tensor, ...]) -> None:
        """Refuses other shapes than the stage below sends; copies would broadcast some of them."""
        state = tuple(getattr(payload[0], "shape", ())) if payload else ()
        shapes: list[tuple[int, ...]] = [state]
        if self.below is not None and self.below.kind == "states":
            shapes = [state] * self.below.tensors
        elif self.below is not None and self.below.carried:
            rows = len(self.below.carried)
            shapes = [state, (rows, *state)]
            if getattr(self.connection.part.whole, "score_function", None) == "softmax":
                shapes.append((rows, *state[:2]))
        if len(payload) != len(shapes):
            raise TypeError(f"{name}: expected {len(shapes)} tensors, got {len(payload)}")
        for i, (y, shape) in enumerate(zip(payload, shapes, strict=True)):
            if not isinstance(y, Tensor):
                raise TypeError(f"{name}: tensor {i} must be a tensor, got {type(y).__name__}")
            if i == 0 and (len(shape) != 3 or shape[-1] != self.dim):
                raise ValueError(f"{name}: expected (B, S, {self.dim}), got {shape}")
            if tuple(y.shape) != shape:
                raise ValueError(f"{name}: tensor {i} must be {shape}, got {tuple(y.shape)}")

    def _calls(self, packing: Packing) -> list[LayerCall]:
        each = zip(self.layers.values(), self.policies, strict=True)
        calls = [self.connection.calls(*layer, {"packing": packing}) for layer in each]
        return [call for of_layer in calls for call in of_layer]


class _Unsplit:
    """Refuses the forward of an encoder whose stages have changed: they have its layers, but copies
    of its connection."""

    def __init__(self, stages: Sequence[EncoderStage] = ()):
        self.versions = weakref.WeakKeyDictionary(
            (stage, [p._version for p in _copies(stage)]) for stage in stages
        )

    def __reduce__(self):
        # A copy of the encoder has layers of its own.
        return _Unsplit, ()

    def __call__(self, encoder: TransformerEncoder, _args) -> None:
        if torch.compiler.is_compiling():
            return
        own = list(encoder.connection.depth.parameters())
        if self.versions and all(self._changed(stage, own) for stage in self.versions):
            raise RuntimeError(
                "TransformerEncoder: expected the stages of deepfast.parallel.split after they "
                "have changed, got the encoder, whose layers have changed and whose connection "
                "has not; load the state dicts of all stages into it first"
            )

    def _changed(self, stage: EncoderStage, own: list[nn.Parameter]) -> bool:
        """Whether a stage's copy was changed and is no longer equal to the encoder's own."""
        return any(
            (type(p), p.device, p.dtype) == (type(q), q.device, q.dtype)
            and p._version != version
            and not torch.equal(p, q)
            for p, q, version in zip(_copies(stage), own, self.versions[stage], strict=True)
        )


def _copies(stage: EncoderStage) -> list[nn.Parameter]:
    return list(stage.connection.depth.whole.parameters())


def _token_axes(edge: Edge | None, payload: tuple[Tensor, ...]) -> list[tuple[Tensor, int]]:
    """The tensors that cross an edge, and their axes of tokens: sums and their lse have rows before
    it."""
    sums = edge is not None and edge.kind == "sums"
    return [(y, int(sums and i > 0)) for i, y in enumerate(payload)]


def split(encoder: TransformerEncoder, stages: int | Sequence[int]) -> list[EncoderStage]:
    """Splits an encoder into stages for `torch.distributed.pipelining`.

    ::

        stage = deepfast.parallel.split(encoder, group.size())[group.rank()]
        pipe = PipelineStage(stage, group.rank(), group.size(), device, group=group)
        schedule = Schedule1F1B(pipe, n_microbatches=8, loss_fn=loss)

    The stages take the encoder's layers and norms, and each takes a copy of the depth connection's
    parameters. Every parameter keeps its name. To load a checkpoint ``whole`` of the encoder into a
    stage, ``stage.load_state_dict({name: whole[name] for name in stage.state_dict()})``; the state
    dicts of all stages together are one of the encoder.

    The copies of the connection's parameters have gradients that must be summed before the
    optimizer's step, see `sum_connection_gradients`. They then stay equal.

    Args:
        encoder: with connection "dlcl", "denseformer", "attnres" or "block_attnres", any norm and
            recompute policies.
        stages: how many, or the layers of each. A number makes them as equal as can be; the first
            ones have a layer more.

    Raises:
        TypeError: if ``encoder`` is no `deepfast.nn.TransformerEncoder`.
        ValueError: for another connection, or stages that do not fit.
    """
    if not isinstance(encoder, TransformerEncoder):
        kind = type(encoder).__name__
        raise TypeError(f"{OP}: encoder must be a TransformerEncoder, got {kind}")
    connection = encoder.connection
    if connection.kind not in MIXING:
        raise ValueError(
            f"{OP}: the connection must be one of {', '.join(MIXING)}, got {connection.kind!r}"
        )
    if connection.depth.shards is not None:
        raise ValueError(f"{OP}: the tokens of this encoder's connection are sharded already")
    counts = layer_counts(len(encoder.layers), stages)
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    edges = plan_edges(connection.depth, [first * connection.reads for first in firsts[1:]])
    made = [
        EncoderStage(encoder, i, first, count, edges)
        for i, (first, count) in enumerate(zip(firsts, counts, strict=True))
    ]
    encoder.register_forward_pre_hook(_Unsplit(made))
    return made
