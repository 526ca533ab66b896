"""What runs in somebody else's loop: the layers' stand-ins, and the pass that they share.

A parent's forward loops over its list of layers. `connect` swaps the class of that list. While the
parent's forward runs, the list gives a `LayerCall` in place of each layer. It calls the layer and
then pushes the output, outside of the layer's call. So a layer that is checkpointed, compiled,
sharded or has hooks is called as before. At all other times the list is an ordinary list.
"""

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepfast.attach.passes import NAME, EagerCall, LayerCall, Layers, Pass, Settings
from deepfast.depth.history import PerThread


class Open(PerThread):
    run: Pass | None = None


def _calls_itself(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs inside another one in this thread."""
    frame, calls = sys._getframe(), 0
    while frame is not None:
        code = nn.Module._call_impl.__code__
        calls += frame.f_code is code and frame.f_locals.get("self") is module
        frame = frame.f_back  # type: ignore[assignment]
    return calls > 1


def _kind(connection: Any) -> tuple:
    """Equal for connections of one kind and size. A wrapper such as PEFT's ``modules_to_save`` has
    the attributes of what it wraps."""
    return tuple(getattr(connection, name, None) for name in ("name", "num_layers", "dim"))


class Attachment:
    """A connection's place in a parent: the hooks that open and close a pass."""

    def __init__(self, parent: nn.Module, layers: Layers, settings: Settings):
        self.parent, self.layers, self.settings = parent, layers, settings
        # For messages: an nn.Sequential that is its own list gets another class.
        self.name = type(parent).__name__
        self.kind = _kind(parent._modules[NAME])
        # Whether the warning was given that the layers run without the connection.
        self.warned = False
        self.open = Open()
        # Inside torch.compile, which does not carry what is local to a thread from graph to graph.
        self.traced: Pass | None = None
        self.handles: list = [
            parent.register_forward_pre_hook(self.begin, prepend=True),
            parent.register_forward_hook(self.end, always_call=True),
        ]
        self.watch(True)
        if isinstance(layers, nn.Sequential) and layers is not parent:
            self.handles += [
                layers.register_forward_pre_hook(self.begin_list, prepend=True),
                layers.register_forward_hook(self.end_list, always_call=True),
            ]

    @property
    def run(self) -> Pass | None:
        """The pass that is open in this thread."""
        if torch.compiler.is_compiling():
            return self.traced
        return self.traced if self.open.run is None else self.open.run

    @run.setter
    def run(self, run: Pass | None) -> None:
        if torch.compiler.is_compiling():
            self.traced = run
        else:
            self.open.run, self.traced = run, None

    def watch(self, on: bool) -> None:
        """Whether the first layer has a `Watch`. During a pass it has none, because a hook would
        change how torch.compile and torch's fast path of evaluation run the layer."""
        for layer in [*self.layers._modules.values()][:1]:
            hooks: dict = layer._forward_pre_hooks
            if on:
                hooks[NAME] = Watch(self)
            else:
                hooks.pop(NAME, None)

    def begin(self, module, _args) -> None:
        """Before the parent's forward."""
        connection: Any = self.parent._modules.get(NAME)
        if _kind(connection) != self.kind:
            raise RuntimeError(
                f"deepfast.connect: {NAME} of {self.name} has been removed or replaced since it "
                "was connected; deepfast.disconnect the module, or put it back"
            )
        if len(self.layers) != connection.num_layers:
            raise RuntimeError(
                f"deepfast.connect: {self.settings.where} had {connection.num_layers} layers when "
                f"it was connected, and has {len(self.layers)} now"
            )
        if torch.jit.is_tracing():
            raise RuntimeError(
                f"deepfast.connect: torch.jit.trace cannot trace the connected {self.name}; use "
                "torch.export"
            )
        if not torch.compiler.is_compiling():
            self.watch(False)
        run = Pass(connection, self.settings)
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
        if not torch.compiler.is_compiling():
            self.watch(not self.warned)
        run.history.close()
        # It refers to the graph, whose tensors refer to the pass.
        run.read = None
        found, rows = len(run.history), run.connection.rows
        if output is None or found == rows:
            return
        where, kind = self.settings.where, self.name
        if found == 0 and run.indexed:
            text = f"the forward of {kind} took layers by index; it must iterate over {where}"
        elif run.iterated:
            text = (
                f"in a loop over {where}, {max(found - 1, 0) // self.settings.reads} of "
                f"{run.connection.num_layers} layers ran; the loop "
                "must call every layer itself, as layer(x), without LayerDrop or an early end"
            )
        else:
            text = (
                f"the forward of {kind} did not iterate over {where}; connect the module whose "
                "forward does, and again where the list was replaced"
            )
        raise RuntimeError(f"deepfast.connect: {text}")

    def begin_list(self, module, args) -> None:
        """Before the forward of an nn.Sequential: its parent may be skipped, as by timm's
        ``forward_features``."""
        if self.run is None:
            self.begin(module, args)
            self.run.inner = True  # type: ignore[attr-defined]

    def end_list(self, module, args, output) -> None:
        if self.run is not None and self.run.inner:
            self.end(module, args, output)


class Watch:
    """A hook of the first layer: warns where it runs in training outside of a pass.

    A copy of the layer may run on its own, so the copied hook does nothing, until the copy of the
    list has put its own in its place.
    """

    def __init__(self, attachment: Attachment | None = None):
        self.attachment = None if attachment is None else weakref.ref(attachment)

    def __reduce__(self):
        return Watch, ()

    def __call__(self, layer: nn.Module, _args) -> None:
        if torch.compiler.is_compiling() or self.attachment is None or not layer.training:
            return
        attachment = self.attachment()
        # Checkpointing runs layers again in backward.
        if attachment is None or attachment.run or torch._C._current_graph_task_id() != -1:
            return
        attachment.warned = True
        attachment.watch(False)
        warnings.warn(
            f"deepfast.connect: layers of {attachment.settings.where} run in training without the "
            f"connection, because the forward of {attachment.name} does not call them; connect the "
            "module whose forward does, with the dotted name of the list, as in "
            "connect(model, 'encoder.layers', ...)",
            stacklevel=2,
        )


class _Loop(nn.Module):
    """What both connected lists share."""

    attachment: Attachment
    plain: Callable[[list[nn.Module]], Layers]
    """Makes a list of this kind that is not connected."""

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        for layer in self._layers()[:1]:
            hooks: dict = layer._forward_pre_hooks
            if NAME in hooks:
                hooks[NAME] = Watch(self.attachment)

    def _layers(self) -> list[nn.Module]:
        # An nn.Sequential that is its own parent has the connection among its children.
        return [m for name, m in self._modules.items() if name != NAME]

    def _calls(self) -> list:
        run, layers = self.attachment.run, self._layers()
        if run is None:
            return layers
        run.iterated = True
        stand_in = LayerCall if torch.compiler.is_compiling() else EagerCall
        return [stand_in(run, k, layer) for k, layer in enumerate(layers)]

    def __len__(self) -> int:
        return len(self._layers())

    def __iter__(self) -> Iterator:
        return iter(self._calls())

    def __reversed__(self) -> Iterator:
        return iter(self[::-1])

    def __getitem__(self, index):
        run = self.attachment.run
        if not isinstance(index, slice):
            if run is not None:
                run.indexed = True
            return self._layers()[index]
        if run is None:
            return self.plain(self._layers()[index])
        order = list(range(len(self)))
        if order[index] != order:
            raise RuntimeError(
                "deepfast.connect: the forward of the parent of "
                f"{self.attachment.settings.where} loops over some of the layers; a depth "
                "connection needs all of them in their order"
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
