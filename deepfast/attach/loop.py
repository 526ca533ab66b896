"""What runs in somebody else's loop: the layers' stand-ins, and the pass that they share.

A parent's forward loops over its list of layers. `connect` swaps the class of that list. While the
parent's forward runs, the list gives a `LayerCall` in place of each layer. It calls the layer and
then pushes the output, outside of the layer's call. So a layer that is checkpointed, compiled,
sharded or has hooks is called as before. At all other times the list is an ordinary list.
"""

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deepfast.attach.memory import Row, block, run_again
from deepfast.depth.connection import DepthConnection
from deepfast.depth.history import DepthHistory
from deepfast.ops import common

NAME = "depth_connection"
"""The connection's name among the children of its parent."""

Layers = nn.ModuleList | nn.Sequential


class Pass:
    """One forward pass of the parent.

    Args:
        connection: receives the states.
        added: whether a state is what a layer adds, its output without its input.
        where: the list of layers, in errors.
        input_name: name of a layer's first argument.
        memory: what autograd keeps of a layer.
    """

    def __init__(
        self,
        connection: DepthConnection,
        added: bool,
        where: str,
        input_name: str,
        memory: str,
    ):
        self.connection, self.added, self.memory = connection, added, memory
        self.where, self.input_name = where, input_name
        self.history = DepthHistory(block=block(memory, connection.rows))
        # The input of the next layer.
        self.row: Row | None = None
        self.learns = torch.is_grad_enabled()
        # Opened by the list itself, not by the parent.
        self.inner = False
        # The pass of the call from which the parent has called itself.
        self.outer: Pass | None = None
        # What the last layer's call returned, and its version.
        self.returned: tuple[weakref.ref, int] | None = None

    def call(self, k: int, layer: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Runs layer k and returns its result, in which the next layer's input replaces y."""
        pushed = len(self.history)
        if pushed < k + (k > 0):
            raise RuntimeError(
                f"deepfast.connect: layer {max(pushed - 1, 0)} of {self.where} did not run before "
                f"layer {k}; a depth connection needs every layer, so set LayerDrop to 0"
            )
        if pushed > k + 1 and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                f"deepfast.connect: layer {k} of {self.where} runs twice in one pass; a depth "
                "connection needs every layer once"
            )
        if self.learns and not torch.is_grad_enabled():
            raise RuntimeError(
                f"deepfast.connect: layer {k} of {self.where} runs without gradients in a pass "
                "with gradients; where the loop checkpoints its layers, use use_reentrant=False"
            )
        name = self.input_name
        if not args and name not in kwargs:
            raise TypeError(
                f"deepfast.connect: layer {k} of {self.where} was called without {name}"
            )
        x = args[0] if args else kwargs[name]
        self._check(k, "input", x)
        if k == 0:
            x = self._push(x, 0)
            args, kwargs = ((x, *args[1:]), kwargs) if args else ((), {**kwargs, name: x})
        eager = not torch.compiler.is_compiling() and not x.is_inference()
        if eager and pushed == k + 1:
            self._check_passed_on(k, x)
        version = x._version if eager else 0
        result = self._run(k, layer, x, args, kwargs)
        if eager and self.added and x._version != version:
            raise RuntimeError(
                f"deepfast.connect: layer {k} of {self.where} modifies its input in place, so what "
                "it adds is not known; attention residuals need layers that do not"
            )
        y = result[0] if isinstance(result, tuple) and result else result
        self._check(k, "output", y)
        if y.shape != x.shape:
            raise ValueError(
                f"deepfast.connect: layer {k} of {self.where} must return a tensor of its input's "
                f"shape {tuple(x.shape)}, got {tuple(y.shape)}"
            )
        following = self._push(y - x if self.added else y, k + 1)
        self.returned = (weakref.ref(following), following._version) if eager else None
        if not isinstance(result, tuple):
            return following
        rest = (following, *result[1:])
        return type(result)(*rest) if hasattr(result, "_fields") else rest

    def _run(self, k: int, layer: nn.Module, x: Tensor, args: tuple, kwargs: dict) -> Any:
        """Layer k's result, under the memory policy."""
        if self.memory == "keep" or not torch.is_grad_enabled():
            return layer(*args, **kwargs)
        rest, others = args[1:], dict(kwargs)
        first = None if args else self.input_name
        if first is not None:
            del others[first]

        def call(x: Tensor) -> Any:
            return layer(x, *rest, **others) if first is None else layer(**{first: x}, **others)

        every = {f"argument {i}": value for i, value in enumerate(rest, 1)} | others
        where = f"deepfast.connect: layer {k} of {self.where}"
        return run_again(layer, where, x, self.row, call, every)

    def _check_passed_on(self, k: int, x: Tensor) -> None:
        """Warns where x, the input of layer k, is not what the call of layer k - 1 returned."""
        if self.returned is None:
            return
        returned, version = self.returned
        if returned() is not x or x._version != version:
            warnings.warn(
                f"deepfast.connect: the loop over {self.where} changes what layer {k - 1} returned "
                f"before it calls layer {k}; a depth connection expects layers that return their "
                "whole output, residual included, and a loop that passes it on",
                stacklevel=4,
            )

    def _check(self, k: int, what: str, y: object) -> None:
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
            raise ValueError(f"{where} must be (..., {self.connection.dim}), got {tuple(y.shape)}")

    def _push(self, y: Tensor, k: int) -> Tensor:
        # With its index, because a loop may checkpoint what it calls.
        kind = common.autocast_device(y.device)
        if not torch.is_autocast_enabled(kind):
            x = self.connection(y, self.history, index=k)
        else:
            # The states keep the dtype that the layers pass on.
            # torch's fast path of evaluation returns 16 bits from its first layer on.
            y = y if self.history.kind is None else y.to(self.history.kind[1])
            with torch.autocast(kind, enabled=False):
                x = self.connection(y, self.history, index=k)
        if self.memory == "history" and self.learns and not torch.compiler.is_compiling():
            self.row = Row(self.history.state, k, x)
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


class Open(threading.local):
    """The pass that is open in each thread. It is neither copied nor pickled."""

    run: Pass | None = None

    def __reduce__(self):
        return Open, ()


def _calls_itself(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs inside another one in this thread."""
    frame, calls = sys._getframe(), 0
    while frame is not None:
        code = nn.Module._call_impl.__code__
        calls += frame.f_code is code and frame.f_locals.get("self") is module
        frame = frame.f_back  # type: ignore[assignment]
    return calls > 1


class Attachment:
    """A connection's place in a parent: the hooks that open and close a pass.

    Args:
        layers: the list of layers.
        where: its name, for errors.
        memory: what autograd keeps of a layer.
    """

    def __init__(
        self,
        connection: DepthConnection,
        layers: Layers,
        where: str,
        added: bool,
        first: str,
        memory: str,
    ):
        self.connection, self.layers, self.where = connection, layers, where
        self.added, self.input_name, self.memory = added, first, memory
        self.open = Open()
        # Inside torch.compile, which does not carry what is local to a thread from graph to graph.
        self.traced: Pass | None = None
        self.handles: list = []

    @property
    def run(self) -> Pass | None:
        """The pass that is open."""
        if torch.compiler.is_compiling():
            return self.traced
        return self.traced if self.open.run is None else self.open.run

    @run.setter
    def run(self, run: Pass | None) -> None:
        if torch.compiler.is_compiling():
            self.traced = run
        else:
            self.open.run, self.traced = run, None

    def begin(self, module, _args) -> None:
        """Before the parent's forward."""
        if module is not self.layers and module._modules.get(NAME) is not self.connection:
            raise RuntimeError(
                f"deepfast.connect: {NAME} of {type(module).__name__} has been removed or replaced "
                "since it was connected; deepfast.disconnect the module, or put it back"
            )
        if len(self.layers) != self.connection.num_layers:
            raise RuntimeError(
                f"deepfast.connect: {self.where} had {self.connection.num_layers} layers when it "
                f"was connected, and has {len(self.layers)} now"
            )
        run = Pass(self.connection, self.added, self.where, self.input_name, self.memory)
        # After an interrupt an old pass may still be open.
        if self.run is not None and not torch.compiler.is_compiling() and _calls_itself(module):
            run.outer = self.run
        self.run = run

    def end(self, _module, _args, output) -> None:
        """After the parent's forward; after an exception the output is None."""
        run = self.run
        if run is None:
            return
        self.run = run.outer
        run.history.close()
        found, rows = len(run.history), run.connection.rows
        if output is not None and found < rows:
            raise RuntimeError(
                f"deepfast.connect: {max(found - 1, 0)} of {rows - 1} layers ran through the loop "
                f"over {self.where}; the parent's forward must iterate over the list, not over "
                "indices, and call every layer once (no LayerDrop)"
            )

    def begin_list(self, module, args) -> None:
        """Before the forward of an nn.Sequential: its parent may be skipped, as by timm's
        ``forward_features``."""
        if self.run is None:
            self.begin(module, args)
            self.run.inner = True  # type: ignore[attr-defined]

    def end_list(self, module, args, output) -> None:
        if self.run is not None and self.run.inner:
            self.end(module, args, output)


class _Loop(nn.Module):
    """What both connected lists share."""

    attachment: Attachment
    plain: Callable[[list[nn.Module]], Layers]
    """Makes a list of this kind that is not connected."""

    def _layers(self) -> list[nn.Module]:
        # An nn.Sequential that is its own parent has the connection among its children.
        return [m for name, m in self._modules.items() if name != NAME]

    def _calls(self) -> list:
        run, layers = self.attachment.run, self._layers()
        if run is None:
            return layers
        return [LayerCall(run, k, layer) for k, layer in enumerate(layers)]

    def __len__(self) -> int:
        return len(self._layers())

    def __iter__(self) -> Iterator:
        return iter(self._calls())

    def __getitem__(self, index):
        if not isinstance(index, slice):
            return self._layers()[index]
        if self.attachment.run is None:
            return self.plain(self._layers()[index])
        order = list(range(len(self)))
        if order[index] != order:
            raise RuntimeError(
                f"deepfast.connect: the forward of the parent of {self.attachment.where} loops "
                "over some of the layers; a depth connection needs all of them in their order"
            )
        return self._calls()


class ConnectedList(_Loop, nn.ModuleList):
    """An nn.ModuleList whose layers are connected."""

    plain = nn.ModuleList


class ConnectedSequential(_Loop, nn.Sequential):
    """An nn.Sequential whose layers are connected."""

    @staticmethod
    def plain(layers: list[nn.Module]) -> nn.Sequential:
        return nn.Sequential(*layers)

    def children(self) -> Iterator:
        # timm checkpoints what this returns. Outside of forward all children are meant.
        return super().children() if self.attachment.run is None else iter(self._calls())


CLASSES: dict[type[nn.Module], Any] = {
    nn.ModuleList: ConnectedList,
    nn.Sequential: ConnectedSequential,
}
"""Class of a list of layers -> the class of the same list while it is connected."""
