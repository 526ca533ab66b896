"""The base class of the connections between the layers of a stack, and how they run a layer.

`deepfast.connections` lists the connections. Each is a subclass of `Connection` in a file beside
this one, which shows its loop over the layers.
"""

import abc
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepfast import checks
from deepfast.connections import CONNECTIONS
from deepfast.depth.boundary import recompute_row
from deepfast.depth.history import DepthHistory
from deepfast.nn.layer_norm import NORMS, Norm, check_norms, plain_norm
from deepfast.nn.recompute import Kept, kept, recomputable, rerun
from deepfast.policies import RERUN


@dataclass(frozen=True)
class Options:
    """The options of a stack that its connection reads, see `TransformerEncoder`. The layers check
    the sizes."""

    op: str
    """The class of the stack, which errors name."""
    connection: str
    num_layers: int
    dim: int
    norm: str
    norm_type: str
    dropout: float
    made: dict
    """The arguments ``backend``, ``device`` and ``dtype`` of the modules that it makes."""
    dlcl: dict | None = None
    block: int | None = None
    reads: int | None = None
    parts: tuple[str, ...] = ()
    """The parts of each layer."""

    def __post_init__(self) -> None:
        op, name = self.op, self.connection
        checks.choice(op, CONNECTIONS, connection=name)
        check_norms(op, name, self.norm, self.norm_type)
        kind = CONNECTIONS[name]
        checks.whole(op, 1, 2, reads=1 if self.reads is None else self.reads)
        if self.reads == 2 and not kind.attends:
            raise ValueError(f"{op}: reads must be 1 or None where connection={name!r}, got 2")
        if self.dlcl and kind.dlcl is None:
            raise ValueError(f"{op}: dlcl options need connection='dlcl', got {name!r}")
        if self.block is not None and name != "block_attnres":
            raise ValueError(f"{op}: block needs connection='block_attnres', got {name!r}")
        if kind.pre_norm and self.norm != "pre":
            raise ValueError(f"{op}: connection={name!r} needs norm='pre', got {self.norm!r}")

    @property
    def reading(self) -> tuple[str, ...]:
        """The parts of a layer that each push and read; none where the layer does once."""
        each = CONNECTIONS[self.connection].attends if self.reads is None else self.reads == 2
        return self.parts if each else ()


class StackCall(NamedTuple):
    """How a stack calls one of its layers: ``layer(x, normed=n, **options)``.

    In pre-norm x is the layer's input, n = LN(x), and the layer returns its last residual and its
    last branch. In post-norm n is None and the layer returns its output.
    """

    layer: Any
    """The layer; for a layer that latent depth skips, one of its methods (`norms_alone`)."""
    policy: str
    """The layer's recompute policy, one of `deepfast.policies.POLICIES`."""
    options: dict
    part: str | None = None
    """The part of the layer that the call runs, None for all of it. The call of a part is
    ``layer(n, normed=None, part=part, **options)``, and the layer returns a branch."""


Note = Callable[[Tensor], object] | None
"""A function of a state, such as the ``append`` of a list: FSDP2 of torch 2.11 copies the lists
among the arguments of a module."""


class Connection(nn.Module, abc.ABC):
    """Runs the layers of a stack; a subclass has `forward`, the loop over them.

    All work between two layers is one pass over memory. Without a depth connection

        pre-norm    ``x_{l+1} = y_l`` and ``n = LN(x_{l+1})`` for the next layer, and a final LN
        post-norm   ``y_l = LN(r + f)``, inside the layer

    where y_l = r + dropout(f) is the output of layer l, with its last residual r and branch f.

    The pre-norm layer-norms between layers, or between sublayers, belong to this module, not to the
    layers, so that a sharding wrapper around a layer never hides them.

    Attributes:
        reads: how often a layer pushes and reads.
        norms: pre-norm only: entry l is the first LN of layer l, or of sublayer l if each of them
            reads; the last one is the stack's final LN.
        depth: the depth connection, which keeps a state of every layer; None where a layer reads
            only the layer below it.
    """

    norms: Sequence[Norm] | None
    # A `DLCL` or an `AttentionResiduals`.
    depth: Any = None

    def __init__(self, options: Options):
        super().__init__()
        self.kind, self.norm, self.dropout = options.connection, options.norm, options.dropout
        self.parts, self.reads = options.reading, len(options.reading) or 1
        self.make_children(options)
        self.norms = None
        if options.norm == "pre":
            make, count = NORMS[options.norm_type], self.reads * options.num_layers + 1
            self.norms = nn.ModuleList(  # type: ignore[assignment]
                make(options.dim, **options.made) for _ in range(count)
            )

    def make_children(self, options: Options) -> None:
        """Makes the modules of a subclass other than the norms."""

    def calls(self, layer: Any, policy: str, options: dict) -> list[StackCall]:
        """The calls of one layer: one or, where each of its parts reads, one for each."""
        return [StackCall(layer, policy, options, part) for part in self.parts or (None,)]

    @abc.abstractmethod
    def forward(self, x: Tensor, calls: Sequence[StackCall | None], note: Note = None) -> Tensor:
        """From the embedding (T, D) to the stack's output (T, D).

        Args:
            calls: one for each layer, or for each sublayer that reads. None skips the layer, its
                norm and its state (pre-norm without a depth connection only).
            note: is called with each of the L + 1 states (T, D): the embedding, then the input of
                each next layer (under a depth connection, its mixture).
        """


def class_of(connection: str) -> Any:
    """The class of a connection, which makes that of a stack."""
    module, _, name = CONNECTIONS[connection].place.partition(".")
    return getattr(importlib.import_module(f"deepfast.nn.connections.{module}"), name)


def run_layer(
    call: StackCall,
    x: Tensor,
    n: Tensor | None,
    norm: Norm | None,
    history: DepthHistory | None,
) -> Any:
    """Runs one layer, or one part of it, under its recompute policy; returns what the layer
    returns.

    Args:
        x: the layer's input; for a part, its normalised input.
        n: norm(x); None for a part and in post-norm.
        norm: the norm before the layer or part; None in post-norm.
        history: the pass of the depth connection; None without one.
    """
    layer, policy, options, part = call
    if part is not None:
        options = options | {"part": part}
    # The feed-forward block without its hidden activation runs again from n, without its last
    # product.
    if part is not None and (policy in RERUN or (part == "feed_forward" and policy != "none")):
        policy = "layer+input"

    def run(x: Tensor, n: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        return layer(x, normed=n, **options)

    if not torch.is_grad_enabled() or (torch.compiler.is_compiling() and policy not in RERUN):
        return run(x, n)
    if torch.compiler.is_compiling():
        return rerun(layer, run, (x, n), None, options)
    # Below the lowest layer that learns, states may be freed before this layer runs again. A pass
    # that torch.compile traces has none. A norm that is not plain does not run again.
    learns = x.requires_grad or (n is not None and n.requires_grad)
    states = learns and history is not None and history.depth_pass is not None
    states = states and (norm is None or plain_norm(norm))
    if policy == "layer+input" and states:
        return rerun(layer, run, (x, n), _from_states(norm, history, n is not None), options)
    if policy in RERUN:
        return rerun(layer, run, (x, n), _from_input(x, n, norm), options)
    if part is not None and states:
        inputs = _from_states(norm, history, False)
        recomputable(x, lambda: inputs()[0])
    elif n is not None and history is None and plain_norm(norm):
        # The norm keeps x. A depth connection keeps states and not x, so autograd keeps n.
        recomputable(n, norm.recompute(x))
    return run(x, n)


def _from_states(norm: Norm | None, history: DepthHistory, both: bool):
    """Returns the function that recomputes the inputs from the states: x and n or, unless ``both``,
    the only input of a post-norm layer or of a part."""
    # The function must not hold the history: the history's token holds the graph, and the graph
    # holds this function.
    depth_pass, k = history.depth_pass, history.depth_pass.pushed - 1
    if norm is None:
        return lambda: recompute_row(depth_pass, k, None)
    out_norm = norm.keep_output()
    return lambda: recompute_row(depth_pass, k, out_norm(), return_x=both)


def _from_input(x: Tensor, n: Tensor | None, norm: Norm | None):
    """Returns the function that gives x, which it keeps, and recomputes n; None where there is no
    n."""
    if n is None:
        return None
    if not plain_norm(norm):
        return kept(x, n)
    kept_x, again = Kept(x), norm.recompute(x)
    return lambda: (kept_x(), again())
