"""One forward pass of a connected parent, and what stands in the place of each layer during it."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepfast.attach.additive import AddedResiduals
from deepfast.attach.reads import LayerRun, running, version
from deepfast.attach.sublayers import Sublayer
from deepfast.depth.boundary import recompute_row
from deepfast.depth.connection import DepthConnection
from deepfast.depth.depth_pass import DepthPass
from deepfast.depth.history import DepthHistory
from deepfast.memory.policies import RERUN
from deepfast.nn.recompute import Kept, rerun
from deepfast.ops import common

POLICIES = ("none", *RERUN)
"""What autograd keeps of a layer besides its state: what the layer keeps; its input; nothing."""

NAME = "depth_connection"
"""The connection's name among the children of its parent."""

Layers = nn.ModuleList | nn.Sequential


class Settings(NamedTuple):
    """What all passes of a connection share."""

    where: str
    """The list of layers, in errors."""
    added: bool
    """Whether a state is what a layer adds, its output without its input."""
    input_name: str
    """Name of a layer's first argument."""
    recompute: str
    """What autograd keeps of a layer."""
    inplace: bool
    """Whether backward may overwrite states with gradients."""
    sublayers: tuple[Sublayer, ...]
    """Those of a layer that read; none if the layer reads once."""
    checked: set[tuple[int, int, bool]]
    """Layers and sublayers, by number, that were seen to add what their last module returns, and
    whether that was in training."""
    known: bool = False
    """Whether their names are from the table of known layers."""

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


class Row:
    """Row k of the connection, the input of layer k.

    Args:
        x: the row, as the push returned it. This object does not keep it.
    """

    def __init__(self, state: DepthPass | None, k: int, x: Tensor):
        self.state, self.k, self.shape = state, k, x.shape
        self.x, self.version = weakref.ref(x), version(x)

    def is_still(self, x: Tensor) -> bool:
        """Whether x is the row; a loop may pass on something else, such as a scaled row."""
        return self.x() is x and version(x) == self.version

    def __call__(self) -> tuple[Tensor]:
        """Computes the row again from the states."""
        x, normed = recompute_row(cast(DepthPass, self.state), self.k, None)
        return ((x if normed is None else normed).view(self.shape),)


class Pass:
    """One forward pass of the parent. Its connection receives the states."""

    def __init__(self, connection: DepthConnection, settings: Settings):
        self.connection, self.settings, self.where = connection, settings, settings.where
        self.history = DepthHistory(
            inplace=settings.inplace, block=block(settings.recompute, connection.rows)
        )
        # The input of the next layer, as the push returned it; None inside torch.compile.
        self.row: Row | None = None
        # Whether a row is added to the layer's own sum, and the newest row with its number.
        self.adds = isinstance(connection, AddedResiduals)
        self.read: tuple[int, Tensor] | None = None
        self.learns = torch.is_grad_enabled()
        # Opened by the list itself, not by the parent.
        self.inner = False
        # The pass of the call from which the parent has called itself.
        self.outer: Pass | None = None
        # The tensors of the input's shape that the last layer returned besides its output.
        self.beside: list[Tensor] = []
        # Whether the parent's forward has iterated over the list, and taken layers by index.
        self.iterated = self.indexed = False

    def _named(self, k: int) -> str:
        """Layer k, at the start of an error."""
        return f"deepfast.connect: layer {k} of {self.where}"

    def call(self, k: int, layer: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Runs layer k and returns its result, in which the next layer's input replaces y."""
        pushed, this = len(self.history), self._named(k)
        self._check_turn(k, pushed)
        name = self.settings.input_name
        if not args and name not in kwargs:
            raise TypeError(
                f"{this} was called without {name}, its first argument, which must be the layer's "
                "input"
            )
        x, named, rest = args[0] if args else kwargs[name], len(args) == 0, args[1:]
        others = {key: value for key, value in kwargs.items() if not named or key != name}

        def run(x: Tensor) -> Any:
            return layer(**{name: x}, **others) if named else layer(x, *rest, **others)

        def once(x: Tensor) -> tuple[Any, Tensor, Tensor]:
            """The layer's result, its output, and what is pushed."""
            result = run(x)
            y = self._output(k, x, result)
            return result, y, y - x if self.settings.added else y

        def reading(x: Tensor) -> tuple[Any, Tensor, Tensor]:
            """The same where sublayers read."""
            now, inside = running(), LayerRun(self, k, x)
            outer, now.layer = now.layer, inside
            try:
                result = run(x)
            finally:
                now.layer = outer
            y = self._output(k, x, result)
            return result, y, inside.last(y)

        self.check(k, "input", x)
        if k == 0:
            x = self._passed_on(self.push(x, 0), x, 0)
        eager = not torch.compiler.is_compiling()
        given = [x, *rest, *others.values()]
        if eager and pushed == self.settings.reads * k + 1:
            self._check_passed_on(k, x, given)
        again = self.settings.recompute != "none" and torch.is_grad_enabled()
        before = version(x)
        call = reading if self.settings.sublayers else once
        if not again:
            result, y, pushed_y = call(x)
        elif eager:
            options = {f"argument {i}": value for i, value in enumerate(rest, 1)} | others
            inputs = self._inputs(this, x, options)
            result, y, pushed_y = rerun(layer, call, (x,), inputs, options)
        else:
            result, y, pushed_y = checkpoint(call, x, use_reentrant=False)
        if (self.settings.added or again) and version(x) != before:
            raise RuntimeError(
                f"{this} modifies its input in place; attention residuals need layers that do not, "
                "and so does every recompute policy but 'none'"
            )
        row = self.settings.reads * (k + 1)
        following = self._passed_on(self.push(pushed_y, row), y, row)
        if not isinstance(result, tuple):
            return following
        self.beside = [
            t for t in result[1:]
            if isinstance(t, Tensor) and t.shape == x.shape and not any(t is g for g in given)
        ]  # fmt: skip
        returned = (following, *result[1:])
        return type(result)(*returned) if hasattr(result, "_fields") else returned

    def _passed_on(self, read: Tensor, h: Tensor, row: int) -> Tensor:
        """What the loop passes on: the row or, where rows are added to the layers' own sums, h; and
        at the end their sum."""
        if not self.adds:
            return read
        if row == self.connection.rows - 1:
            self.read = None
            return self.added(h, read, row)
        self.row = None
        if not self.history.closed:
            self.read = row, read
        return h

    def added(self, h: Tensor, read: Tensor, row: int) -> Tensor:
        return cast(AddedResiduals, self.connection).add(h, read, row)

    def first_read(self, row: int, h: Tensor) -> Tensor:
        """What the first norm of a layer gets, whose input is h."""
        if not self.adds:
            return h
        if self.read is not None and self.read[0] == row:
            read = self.read[1]
        else:
            # Backward runs the layer again. Checkpointing counts what autograd saves, so this row
            # must need a gradient as the first one did.
            state = cast(DepthPass, self.history.depth_pass)
            read = Row(state, row, h)()[0].requires_grad_(state.any_learns or row > state.lowest)
        return self.added(h, read, row)

    def later_read(self, h: Tensor, v: Tensor, row: int) -> Tensor:
        """What a later norm gets, from what the sublayer before it has added."""
        read = self.push(v, row)
        return self.added(h, read, row) if self.adds else read

    def _output(self, k: int, x: Tensor, result: Any) -> Tensor:
        """The output in the result of layer k, whose input is x."""
        y = result[0] if isinstance(result, tuple) and result else result
        self.check(k, "output", y)
        if y.shape != x.shape:
            raise ValueError(
                f"{self._named(k)} must return a tensor of its input's shape {tuple(x.shape)}, got "
                f"{tuple(y.shape)}"
            )
        return y

    def _check_turn(self, k: int, pushed: int) -> None:
        """Raises where layer k is not the next one, or runs under another grad mode."""
        this, reads = self._named(k), self.settings.reads
        if pushed < reads * k + (k > 0):
            raise RuntimeError(
                f"{self._named(max(pushed - 1, 0) // reads)} did not run before layer {k}; a depth "
                "connection needs every layer in its order, without LayerDrop"
            )
        if pushed > reads * k + 1 and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                f"{this} runs twice in one pass; a depth connection needs every layer once"
            )
        if self.learns and not torch.is_grad_enabled():
            raise RuntimeError(
                f"{this} runs without gradients in a pass with gradients; where the loop "
                "checkpoints its layers, use use_reentrant=False"
            )

    def _inputs(self, this: str, x: Tensor, options: dict) -> Callable[[], tuple[Tensor]]:
        """What gives x again in backward, which runs layer ``this`` again with ``options``."""
        for name, value in options.items():
            # The caches of transformers.
            if value is not None and hasattr(value, "get_seq_length"):
                raise RuntimeError(
                    f"{this} takes a cache ({name}), and would fill it twice under this recompute "
                    "policy; pass use_cache=False, or connect with recompute='none'"
                )
        row = self.row if self.settings.recompute == "layer+input" and self.learns else None
        if row is not None and row.is_still(x):
            return row
        kept = Kept(x)
        return lambda: (kept(),)

    def _check_passed_on(self, k: int, x: Tensor, given: list) -> None:
        """Warns where x, the input of layer k, is not what the call of layer k - 1 returned, or
        where the layers pass on a second stream."""
        if any(t is g for t in self.beside for g in given):
            warnings.warn(
                f"{self._named(k)} gets a second tensor that layer {k - 1} returned besides its "
                "output; if it is a part of the residual stream, the connection does not see it: "
                "layers must return their whole output",
                stacklevel=4,
            )
        if self.row is not None and not self.row.is_still(x):
            warnings.warn(
                f"deepfast.connect: the loop over {self.where} changes what layer {k - 1} returned "
                f"before it calls layer {k}; a depth connection expects layers that return their "
                "whole output, residual included, and a loop that passes it on",
                stacklevel=4,
            )

    def check(self, k: int, what: str, y: object) -> None:
        """Raises unless y can be pushed."""
        where = f"deepfast.connect: the {what} of layer {k} of {self.where}"
        if not isinstance(y, Tensor):
            raise TypeError(
                f"{where} must be a tensor, or a tuple whose first entry is one, got "
                f"{type(y).__name__}"
            )
        if y.is_nested:
            raise TypeError(
                f"{where} is a nested tensor, which is not supported; build the encoder with "
                "enable_nested_tensor=False"
            )
        if y.dim() == 0 or y.shape[-1] != self.connection.dim:
            raise ValueError(
                f"{where} must be (..., {self.connection.dim}), got {tuple(y.shape)}; pass dim= "
                "to connect if the states have another width than the layers"
            )

    def push(self, y: Tensor, k: int) -> Tensor:
        """Pushes state k and returns row k."""
        # With its index, because a loop may checkpoint what it calls.
        kind = common.autocast_device(y.device)
        if not torch.is_autocast_enabled(kind) or self.connection.state_dtype is None:
            x = self.connection(y, self.history, index=k)
        else:
            # The states keep the dtype that the layers pass on.
            # torch's fast path of evaluation returns 16 bits from its first layer on.
            begun = self.history.depth_pass
            y = y if begun is None else y.to(begun.state_kind[1])
            with torch.autocast(kind, enabled=False):
                x = self.connection(y, self.history, index=k)
        if not torch.compiler.is_compiling():
            self.row = Row(self.history.depth_pass, k, x)
        return x


class LayerCall:
    """Stands in for layer k while its parent's forward runs; its attributes are the layer's."""

    def __init__(self, run: Pass, k: int, layer: nn.Module):
        self._run, self._k, self._layer = run, k, layer

    def __call__(self, *args, **kwargs):
        return self._run.call(self._k, self._layer, args, kwargs)

    def __getattr__(self, name: str):
        return getattr(self._layer, name)

    def __setattr__(self, name: str, value) -> None:
        if name in ("_run", "_k", "_layer"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._layer, name, value)


class EagerCall(LayerCall):
    """The same outside of torch.compile, which cannot trace an object with another class: here
    `isinstance`, ``==`` and sets of layers find the layer."""

    @property  # type: ignore[misc]
    def __class__(self):
        return type(self._layer)

    def __eq__(self, other: object) -> bool:
        return self._layer is getattr(other, "_layer", other)

    def __hash__(self) -> int:
        return hash(self._layer)
