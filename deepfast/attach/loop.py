"""The hooks of somebody else's loop, its list of layers, and a stand-in for each layer.

While the parent's forward runs, the list gives a stand-in in place of each layer. At all other
times it is an ordinary list. `deepfast.attach` has the picture.
"""

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deepfast.attach.layer_run import LayerRun, Read, Take
from deepfast.attach.passes import NAME, Pass, Settings, version
from deepfast.attach.sublayers import OP
from deepfast.nn.recompute import rerun


def call_layer(pass_: Pass, k: int, layer: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Runs layer k and returns its result, in which the next layer's input replaces its output."""
    settings, this, eager = pass_.settings, pass_.named(k), not torch.compiler.is_compiling()
    is_next = pass_.check_turn(k)
    name, named = settings.input_name, len(args) == 0
    if named and name not in kwargs:
        raise TypeError(
            f"{this} was called without {name}, its first argument, which must be the layer's input"
        )
    x, rest = (kwargs[name], ()) if named else (args[0], args[1:])
    others = {key: value for key, value in kwargs.items() if not named or key != name}
    options = {f"argument {i}": value for i, value in enumerate(rest, 1)} | others

    def once(x: Tensor) -> tuple[Any, Tensor, Tensor]:
        """The layer's result, its output, and what is pushed."""
        here, layer_run = settings.current.here, None
        if settings.sublayers:
            outer, layer_run = here.layer_run, LayerRun(pass_, k, x)
            here.layer_run = layer_run
        try:
            result = layer(**{name: x}, **others) if named else layer(x, *rest, **others)
        finally:
            if layer_run is not None:
                here.layer_run = outer
        y = result[0] if isinstance(result, tuple) and result else result
        pass_.check(k, "output", y, x.shape)
        if layer_run is not None:
            return result, y, layer_run.last(y)
        return result, y, y - x if settings.subtracts else y

    pass_.check(k, "input", x)
    if k == 0:
        x = pass_.after(x, x, 0)
    given = [x, *options.values()]
    if eager and is_next and k > 0:
        _check_passed_on(pass_, k, given)
    again = settings.recompute != "none" and torch.is_grad_enabled()
    before = version(x)
    # The caches of transformers.
    caches = [key for key, value in options.items() if hasattr(value, "get_seq_length")]
    if again and eager and caches:
        raise RuntimeError(
            f"{this} takes a cache ({caches[0]}), and would fill it twice under this recompute "
            "policy; pass use_cache=False, or connect with recompute='none'"
        )
    if again:
        inputs = pass_.input_again(x) if eager else None
        result, y, v = rerun(layer, once, (x,), inputs and (lambda: (inputs(),)), options)
    else:
        result, y, v = once(x)
    if (settings.subtracts or again) and version(x) != before:
        raise RuntimeError(
            f"{this} modifies its input in place; attention residuals need layers that do not, and "
            "so does every recompute policy but 'none'"
        )
    following = pass_.after(y, v, settings.reads * (k + 1))
    if not isinstance(result, tuple):
        return following
    new = (t for t in result[1:] if not any(t is g for g in given))
    pass_.beside = [t for t in new if isinstance(t, Tensor) and t.shape == x.shape]
    returned = (following, *result[1:])
    return type(result)(*returned) if hasattr(result, "_fields") else returned


def _check_passed_on(pass_: Pass, k: int, given: list) -> None:
    """Warns where the input of layer k, the first of its arguments ``given``, is not what the call
    of layer k - 1 returned, or where the layers pass on a second stream."""
    if any(t is g for t in pass_.beside for g in given):
        what = "a second tensor besides"
    elif pass_.newest is not None and not pass_.is_newest(given[0]):
        what = "something else than"
    else:
        return
    warnings.warn(
        f"{pass_.named(k)} gets {what} the output that layer {k - 1} returned; a depth connection "
        "expects layers that return their whole output, residual included, and a loop that passes "
        "it on",
        stacklevel=4,
    )


class StandIn:
    """Stands in for layer k while its parent's forward runs; its attributes are the layer's."""

    def __init__(self, pass_: Pass, k: int, layer: nn.Module):
        self._pass, self._k, self._layer = pass_, k, layer

    def __call__(self, *args, **kwargs):
        return call_layer(self._pass, self._k, self._layer, args, kwargs)

    def __getattr__(self, name: str):
        return getattr(self._layer, name)

    def __setattr__(self, name: str, value) -> None:
        if name in ("_pass", "_k", "_layer"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._layer, name, value)


class EagerStandIn(StandIn):
    """The same outside of torch.compile, which cannot trace an object with another class: here
    `isinstance`, ``==`` and sets of layers find the layer."""

    @property  # type: ignore[misc]
    def __class__(self):
        return type(self._layer)

    def __eq__(self, other: object) -> bool:
        return self._layer is getattr(other, "_layer", other)

    def __hash__(self) -> int:
        return hash(self._layer)


def _calls_itself(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs inside another one in this thread."""
    frame, calls = sys._getframe(), 0
    while frame is not None:
        code = nn.Module._call_impl.__code__
        calls += frame.f_code is code and frame.f_locals.get("self") is module
        frame = frame.f_back  # type: ignore[assignment]
    return calls > 1


class Watch:
    """A hook of the first layer: warns once where it runs in training outside of a pass."""

    def __init__(self, settings: Settings):
        self.settings = settings

    def __call__(self, layer: nn.Module, _args) -> None:
        current = self.settings.current
        if torch.compiler.is_compiling() or not (current.warns and layer.training):
            return
        # Checkpointing runs layers again in backward.
        if current.pass_ is not None or torch._C._current_graph_task_id() != -1:
            return
        current.warns = False
        warnings.warn(
            f"{OP}: layers of {self.settings.where} run in training without the connection, "
            f"because the forward of {self.settings.parent} does not call them; connect the module "
            "whose forward does, with the dotted name of the list, as in "
            "connect(model, 'encoder.layers', ...)",
            stacklevel=2,
        )


class Attachment:
    """A connection's place in a parent: the hooks, of which some open and close a pass."""

    def __init__(self, parent: nn.Module, layers: Any, settings: Settings):
        self.parent, self.layers, self.settings = parent, layers, settings
        layers.__class__, layers.attachment = CLASSES[type(layers)], self
        self.current, self.kind = settings.current, self._kind()
        self.current.warns = True
        self.watch(True)
        self.handles: list = []
        # The parent of an nn.Sequential may be skipped, as by timm's ``forward_features``.
        for module in {parent, layers} if isinstance(layers, nn.Sequential) else {parent}:
            self.handles += [
                module.register_forward_pre_hook(self.begin, prepend=True),
                module.register_forward_hook(self.end, always_call=True),
            ]
        # A layer may stand in several places.
        for layer in {*layers}:
            for number, sublayer in enumerate(settings.sublayers):
                for norm in map(layer.get_submodule, sublayer.norms):
                    read = Read(settings, number)
                    norm.register_forward_pre_hook(read, prepend=True, with_kwargs=True)
                if sublayer.last is not None:
                    last = layer.get_submodule(sublayer.last)
                    last.register_forward_hook(Take(settings, number))

    def __setstate__(self, state: dict) -> None:
        # A copy of a layer alone has no attachment, and does not warn.
        vars(self).update(state)
        self.current.warns = True

    def remove(self) -> None:
        """Removes itself from the list, and all hooks; a layer may hold a connected model, whose
        hooks stay."""
        for handle in self.handles:
            handle.remove()
        for module in self.layers.modules():
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                hooks, with_kwargs = (getattr(module, n) for n in (name, f"{name}_with_kwargs"))
                for key, hook in [*hooks.items()]:
                    if getattr(hook, "settings", None) is not self.settings:
                        continue
                    del hooks[key]
                    with_kwargs.pop(key, None)
        self.layers.__class__ = self.layers.plain
        del self.layers.attachment

    def watch(self, on: bool) -> None:
        """Whether the first layer has a `Watch`. During a pass it has none, because a hook would
        change how torch.compile and torch's fast path of evaluation run the layer."""
        for layer in [*self.layers._modules.values()][:1]:
            hooks: dict = layer._forward_pre_hooks
            if on:
                hooks[NAME] = Watch(self.settings)
            else:
                hooks.pop(NAME, None)

    def _kind(self) -> tuple:
        """The sizes that may not change. A wrapper of the connection such as PEFT's
        ``modules_to_save`` has the attributes of what it wraps."""
        connection = self.parent._modules.get(NAME)
        names = "name", "num_layers", "dim"
        return len(self.layers), *(getattr(connection, name, None) for name in names)

    def begin(self, module: nn.Module, _args) -> None:
        """Before the forward of the parent or of its list."""
        current, compiling = self.current, torch.compiler.is_compiling()
        if module is not self.parent and current.pass_ is not None:
            return
        if self._kind() != self.kind:
            raise RuntimeError(
                f"{OP}: {NAME} of {self.settings.parent} has been removed or replaced, or "
                f"{self.settings.where} has another number of layers, since it was connected; put "
                "it back, or deepfast.disconnect the module"
            )
        if torch.jit.is_tracing():
            raise RuntimeError(
                f"{OP}: torch.jit.trace cannot trace the connected {self.settings.parent}; use "
                "torch.export"
            )
        if not compiling:
            self.watch(False)
        pass_ = Pass(self.parent._modules[NAME], self.settings, module)
        # After an interrupt an old pass may still be open.
        if current.pass_ is not None and not compiling and _calls_itself(module):
            pass_.outer = current.pass_
        current.set_pass(pass_)

    def end(self, module: nn.Module, _args, output) -> None:
        """After that forward; after an exception the output is None."""
        pass_ = self.current.pass_
        if pass_ is None or pass_.opener is not module:
            return
        self.current.set_pass(pass_.outer)
        if not torch.compiler.is_compiling():
            self.watch(self.current.warns)
        pass_.history.close()
        # They refer to the graph, whose tensors refer to the pass.
        pass_.waiting, pass_.beside = (None, None), []
        pushed, settings = len(pass_.history), self.settings
        if output is not None and pushed < pass_.connection.rows:
            raise RuntimeError(
                f"{OP}: in the forward of {settings.parent}, {max(pushed - 1, 0) // settings.reads}"
                f" of {pass_.connection.num_layers} layers of {settings.where} ran; it must loop "
                "over the list, not over indices, and call every layer as layer(x), without "
                "LayerDrop or an early end; connect the module whose forward does, and again where "
                "the list was replaced"
            )


class _Loop(nn.Module):
    """The behaviour of both kinds of connected lists."""

    attachment: Attachment
    plain: type
    """The class of such a list that is not connected."""

    def _layers(self) -> list[nn.Module]:
        # An nn.Sequential that is its own parent has the connection among its children.
        return [m for name, m in self._modules.items() if name != NAME]

    def _calls(self) -> list:
        pass_, layers = self.attachment.current.pass_, self._layers()
        if pass_ is None:
            return layers
        kind = StandIn if torch.compiler.is_compiling() else EagerStandIn
        return [kind(pass_, k, layer) for k, layer in enumerate(layers)]

    def __len__(self) -> int:
        return len(self._layers())

    def __iter__(self) -> Iterator:
        return iter(self._calls())

    def __reversed__(self) -> Iterator:
        return iter(self._calls()[::-1])

    def __getitem__(self, index):
        layers, inside = self._layers(), self.attachment.current.pass_ is not None
        if not isinstance(index, slice):
            return layers[index]
        # `call_layer` raises where a layer is left out.
        return self._calls()[index] if inside else self.plain().extend(layers[index])


class ConnectedList(_Loop, nn.ModuleList):
    """An nn.ModuleList whose layers are connected."""

    plain = nn.ModuleList


class ConnectedSequential(_Loop, nn.Sequential):
    """An nn.Sequential whose layers are connected."""

    plain = nn.Sequential

    def children(self) -> Iterator:
        # timm checkpoints what this returns. Outside of forward all children are meant.
        inside = self.attachment.current.pass_ is not None
        return iter(self._calls()) if inside else super().children()


CLASSES: dict[type[nn.Module], Any] = {
    nn.ModuleList: ConnectedList,
    nn.Sequential: ConnectedSequential,
}
"""Class of a list of layers -> the class of the same list while it is connected."""
