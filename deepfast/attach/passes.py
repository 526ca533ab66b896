"""One forward pass of a connected parent: its pushes, and the rows that they return."""

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepfast.attach.sublayers import OP, Sublayer
from deepfast.depth.boundary import recompute_row
from deepfast.depth.history import DepthHistory, PerThread
from deepfast.nn.recompute import Kept
from deepfast.ops import common
from deepfast.policies import RERUN

CONNECT_POLICIES = ("none", *RERUN)
"""Autograd keeps of a layer, besides its state: what the layer keeps; its input; nothing."""

NAME = "depth_connection"
"""The connection's name among the children of its parent."""


class _Thread(PerThread):
    pass_ = layer_run = None


class _Trace:
    pass_ = layer_run = None


class Current:
    """The pass and the `LayerRun` that run in this thread.

    Inside torch.compile, which cannot trace what is local to a thread, all threads share them. A
    copy, as of a layer with its hooks, begins with nothing.
    """

    def __init__(self):
        self.thread, self.trace = _Thread(), _Trace()
        self.warns = False
        """Whether a layer that runs in training without a pass is warned of."""

    def __reduce__(self):
        return Current, ()

    @property
    def here(self) -> Any:
        return self.trace if torch.compiler.is_compiling() else self.thread

    @property
    def pass_(self) -> "Pass | None":
        # A graph that breaks leaves its pass to eager code.
        return self.here.pass_ or self.trace.pass_

    # Not a setter, which the compiler of torch 2.11 does not trace: it would run behind the graph.
    def set_pass(self, pass_: "Pass | None") -> None:
        self.trace.pass_ = None
        self.here.pass_ = pass_


class Settings(NamedTuple):
    """The constants of a connected parent, and the record of what runs in it."""

    parent: str
    """The class of the parent, in errors."""
    where: str
    """The list of layers, in errors."""
    input_name: str
    """Name of a layer's first argument."""
    subtracts: bool
    """Whether a state is what a layer adds, its output without its input."""
    additive: bool
    """Whether the rows are added to the layers' own sums."""
    recompute: str
    """One of `CONNECT_POLICIES`."""
    inplace: bool
    """Whether backward may overwrite states with gradients."""
    sublayers: tuple[Sublayer, ...]
    """Those of a layer that read; none if the layer reads once."""
    known: bool
    """Whether their names are from the table of known layers."""
    current: Current
    checked: set[tuple[int, int, bool]]
    """Layers and sublayers, by number, that were seen to add what their last module returns, and
    whether that was in training."""

    @property
    def reads(self) -> int:
        """Rows of a layer."""
        return len(self.sublayers) or 1


def block(recompute: str, rows: int) -> int | None:
    """Rows per block of a pass, see `deepfast.depth`; None is the default.

    Backward holds two fp32 sums for every row of a block besides the states. Under "layer+input"
    they take about a ninth of the memory of fp32 states, two ninths of that of 16-bit ones, and the
    mixture up to 1.5 times its least traffic.
    """
    return max(2, min(rows // 18, 8)) if recompute == "layer+input" else None


def version(x: Tensor) -> int:
    """How often x was modified in place; inference mode does not count it."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def row_again(depth_pass: Any, row: int, shape: torch.Size) -> Tensor:
    """Row ``row``, computed again from the states of ``depth_pass``."""
    return recompute_row(depth_pass, row, None)[0].view(shape)


class Pass:
    """One forward pass of the parent. Its connection receives the states.

    Args:
        opener: the module whose forward it is: the parent, or an nn.Sequential with its layers.
    """

    def __init__(self, connection: Any, settings: Settings, opener: nn.Module):
        self.connection, self.settings, self.opener = connection, settings, opener
        self.history = DepthHistory(
            inplace=settings.inplace, block=block(settings.recompute, connection.rows)
        )
        # The pass of the call from which the parent has called itself.
        self.outer: Pass | None = None
        self.learns = torch.is_grad_enabled()
        # Of the first state; the dtype outside of torch.compile alone.
        self.shape = torch.Size()
        self.dtype: torch.dtype | None = None
        # The newest row as the push returned it, its number and its version.
        self.newest: tuple[weakref.ref[Tensor], int, int] | None = None
        # The newest row that waits for the layer whose own sum it is added to, with its number.
        self.waiting: tuple[int | None, Tensor | None] = (None, None)
        # The tensors of the input's shape that the last layer returned besides its output.
        self.beside: list[Tensor] = []

    def named(self, k: int) -> str:
        """Layer k, at the start of an error."""
        return f"{OP}: layer {k} of {self.settings.where}"

    def check_turn(self, k: int) -> bool:
        """Whether layer k is the next one; in backward it may run again. Raises for another layer,
        and under another grad mode."""
        pushed, reads = len(self.history), self.settings.reads
        is_next = pushed == reads * k + (k > 0)
        if not is_next and (pushed <= reads * k or torch._C._current_graph_task_id() == -1):
            raise RuntimeError(
                f"{self.named(k)} was called after {max(pushed - 1, 0) // reads} layers; a depth "
                "connection needs every layer once and in its order, without LayerDrop"
            )
        if self.learns and not torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.named(k)} runs without gradients in a pass with gradients; where the loop "
                "checkpoints its layers, use use_reentrant=False"
            )
        return is_next

    def check(self, k: int, what: str, y: object, shape: torch.Size | None = None) -> None:
        """Raises unless y, ``what`` of layer k, can be pushed, and has this shape."""
        where, dim = f"{OP}: the {what} of layer {k} of {self.settings.where}", self.connection.dim
        if not isinstance(y, Tensor) or y.is_nested:
            raise TypeError(
                f"{where} must be a tensor, or a tuple that begins with one, and not nested (build "
                f"nn.TransformerEncoder with enable_nested_tensor=False), got {type(y).__name__}"
            )
        if y.dim() == 0 or y.shape[-1] != dim or (shape is not None and y.shape != shape):
            expected = f"(..., {dim})" if shape is None else tuple(shape)
            raise ValueError(
                f"{where} must be {expected}, got {tuple(y.shape)}; pass dim= to connect if the "
                "states have another width than the layers"
            )

    def push(self, v: Tensor, row: int) -> Tensor:
        """Pushes v as state ``row`` and returns the connection's row of that number."""
        if row == 0:
            self.shape = v.shape
        kind = common.autocast_device(v.device)
        # The states keep the dtype that the layers pass on: torch's fast path of evaluation returns
        # 16 bits from its first layer on.
        wide = torch.is_autocast_enabled(kind) and self.connection.state_dtype is not None
        if wide and self.dtype is not None:
            v = v.to(self.dtype)
        with torch.autocast(kind, enabled=False) if wide else contextlib.nullcontext():
            # With its index, because a loop may checkpoint what it calls.
            x = self.connection(v, self.history, index=row)
        if not torch.compiler.is_compiling():
            self.dtype, self.newest = v.dtype, (weakref.ref(x), row, version(x))
        return x

    def after(self, h: Tensor, v: Tensor, row: int) -> Tensor:
        """Pushes v as state ``row`` and returns what takes the place of h, the layer's own sum."""
        x = self.push(v, row)
        if not self.settings.additive:
            return x
        if row % self.settings.reads or row == self.connection.rows - 1:
            return self.connection.add(h, x, row)
        # The loop passes on h, to which the first norm of the next layer adds the row. A call that
        # backward repeats leaves nothing, which would refer to the graph for ever.
        self.newest = None
        if len(self.history) < self.connection.rows:
            self.waiting = row, x
        return h

    def first(self, h: Tensor, row: int) -> Tensor:
        """The tensor that the first norm of a layer gets, whose input is h."""
        if not self.settings.additive:
            return h
        number, x = self.waiting
        if number != row:
            # Backward runs the layer again. Checkpointing counts what autograd saves, so this row
            # must need a gradient as the first one did.
            depth_pass: Any = self.history.depth_pass
            x = row_again(depth_pass, row, h.shape)
            x.requires_grad_(depth_pass.any_learns or row > depth_pass.lowest)
        return self.connection.add(h, x, row)

    def is_newest(self, x: Tensor) -> bool:
        """Whether x is the newest row; a loop may pass on something else, such as a scaled row."""
        newest, _, count = self.newest
        return newest() is x and version(x) == count

    def input_again(self, x: Tensor) -> Callable[[], Tensor]:
        """A function that gives x, a layer's input, in backward: from the states where x is the
        newest row.

        It does not hold the history, whose token refers to the graph.
        """
        from_states = self.settings.recompute == "layer+input" and self.learns
        if not from_states or self.newest is None or not self.is_newest(x):
            return Kept(x)
        return functools.partial(row_again, self.history.depth_pass, self.newest[1], x.shape)
