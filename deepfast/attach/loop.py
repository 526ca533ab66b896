"""What runs in somebody else's loop: the layers' stand-ins, and the pass that they share.

A parent's forward loops over its list of layers. `connect` swaps the class of that list. While the
parent's forward runs, the list gives a `LayerCall` in place of each layer. It calls the layer and
then pushes the output, outside of the layer's call. So a layer that is checkpointed, compiled,
sharded or has hooks is called as before. At all other times the list is an ordinary list.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepfast.attach.passes import NAME, LayerCall, Layers, Pass
from deepfast.depth.connection import DepthConnection


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
