"""Reads inside of a layer that other people wrote, while it runs.

A pre-norm layer computes ``h = x + f(norm1(x))``, then ``h + g(norm2(h))``. With a read for each
sublayer the input of each norm is a row of the connection, and what each sublayer adds is a state.
The first row is the layer's input. A hook of each later norm pushes what the sublayer before it has
added and replaces the norm's input by the row that the push returns. What the last sublayer has
added is pushed after the layer. The layer's own sums are computed and not used, unless the reads
are added to them.
"""

import abc
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepfast.attach.sublayers import OP, Sublayer
from deepfast.depth.history import PerThread


class _Through(torch.autograd.Function):
    """added, whose gradient also visits y, as a gradient of 0: wrappers such as FSDP gather a
    layer's weights when the gradient reaches its output."""

    @staticmethod
    def forward(ctx, added, y):
        return added.view_as(added)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_zeros(()).expand_as(grad)


def version(x: Tensor) -> int:
    """How often x was modified in place; inference mode does not count it."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def _shaped(x: Tensor, shape: torch.Size) -> Tensor:
    """x in another shape: a layer may compute a sublayer on (B * T, D)."""
    return x if x.shape == shape else x.reshape(shape)


class LayerRun:
    """One run of a layer by its parent's loop.

    What a sublayer adds is the output of its last module or, where none is named, the difference
    of the layer's own sums after and before it. A difference of 16-bit sums has their rounding
    error: half a unit in the last place of the sum.

    Args:
        run: the `deepfast.attach.passes.Pass`.
        k: number of the layer.
        x: its input, the row of its first sublayer.
    """

    def __init__(self, run: Any, k: int, x: Tensor):
        self.run, self.k, self.row, self.shape = run, k, x, x.shape
        # The sublayer that runs, how many of its norms have run, the layer's own sum before it, and
        # the output of its last module; both with their versions.
        self.number, self.norms = -1, 0
        self.before: tuple[Tensor, int] | None = None
        self.added: tuple[Tensor, int] | None = None

    def _named(self, number: int) -> str:
        norms = " and ".join(self.run.settings.sublayers[number].norms)
        return f"{OP}: the sublayer behind {norms} of layer {self.k}"

    def norm(self, number: int, given: Tensor) -> Tensor:
        """What a norm of a sublayer gets in place of ``given``."""
        sublayers, eager = self.run.settings.sublayers, not torch.compiler.is_compiling()
        if number == self.number and self.norms < len(sublayers[number].norms):
            if eager and given is not self.before[0]:
                raise RuntimeError(
                    f"{self._named(number)}: its norms share a read, so they must get one tensor"
                )
            self.norms += 1
            return _shaped(self.row, given.shape)
        if number <= self.number:
            raise RuntimeError(f"{self._named(number)} runs twice in one call of the layer")
        if number > self.number + 1:
            raise RuntimeError(
                f"{self._named(self.number + 1)} did not run before the next one; list the "
                "sublayers in the order in which they run"
            )
        if number > 0:
            own, added = _shaped(given, self.shape), self.end(given)
            self.row = self.run.later_read(own, added, len(sublayers) * self.k + number)
        else:
            if eager:
                self._check_first(given)
            # A wrapper such as FSDP may have put another tensor in the place of the row.
            self.row = self.run.first_read(len(sublayers) * self.k, given)
        self.number, self.norms, self.before = number, 1, (given, version(given))
        if eager:
            # Backward may run the norm again with the same tensor, as checkpointing does.
            given.deepfast_run = self.run, self.k  # type: ignore[attr-defined]
        return _shaped(self.row, given.shape)

    def _check_first(self, given: Tensor) -> None:
        kinds = [(t.shape, t.stride(), t.dtype, t.data_ptr()) for t in (self.row, given)]
        if kinds[0] != kinds[1]:
            raise RuntimeError(
                f"{OP}: layer {self.k} of {self.run.where} changes its input before its first "
                "norm; reads of sublayers need layers that give their input to the norm"
            )

    def output(self, number: int, output: Any) -> None:
        """The last module of a sublayer has run."""
        y = output[0] if isinstance(output, tuple) and output else output
        if number != self.number or self.added is not None:
            when = "twice" if self.added is not None else "before its norm"
            raise RuntimeError(
                f"{self._named(number)}: its last module runs {when}; put None in its place if it "
                "serves several sublayers, and one tuple of norms for sublayers side by side"
            )
        self.run.check(self.k, f"output of {self.run.settings.sublayers[number].last}", y)
        self.added = y, version(y)

    def end(self, total: Tensor) -> Tensor:
        """What the sublayer has added, behind which the layer's own sum is ``total``."""
        sublayer, found = self.run.settings.sublayers[self.number], self.added
        self.added = None
        if self.norms < len(sublayer.norms):
            raise RuntimeError(f"{self._named(self.number)}: one of these norms did not run")
        before, old = self.before  # type: ignore[misc]
        same = before is not total and version(before) == old
        if sublayer.last is None:
            if not same:
                raise RuntimeError(
                    f"{self._named(self.number)} is added in place; name its last module, or let "
                    "the layer make a new sum"
                )
            return _shaped(total, self.shape) - _shaped(before, self.shape)
        if found is None:
            raise RuntimeError(
                f"{self._named(self.number)}: {sublayer.last} did not run; sublayers side by side, "
                "whose norms run first, are one entry with a tuple of norms and None"
            )
        added, old = found
        if added is total or version(added) != old:
            what = "is the sum itself" if version(added) == old else "is modified in place"
            raise RuntimeError(
                f"{self._named(self.number)}: what {sublayer.last} returns {what}; put None in its "
                "place"
            )
        # Of each sublayer once in training and once in evaluation, where a dropout does nothing.
        this = self.k, self.number, self.run.connection.training
        settings = self.run.settings
        if same and this not in settings.checked:
            if not torch.compiler.is_compiling():
                self._check_sum(this, before, added, total)
            elif not settings.known:
                raise RuntimeError(
                    f"{self._named(self.number)}: a graph cannot check that the layer adds what "
                    f"{sublayer.last} returns; run the model once before torch.compile, in the "
                    "same mode (train or eval)"
                )
        return _shaped(added, self.shape)

    @torch.no_grad()
    def _check_sum(self, this: tuple, before: Tensor, added: Tensor, total: Tensor) -> None:
        """Raises where the sum behind the sublayer is not that before it plus ``added``; ``this``
        is then one of those that were checked."""
        capturing = total.is_cuda and torch.cuda.is_current_stream_capturing()
        if total.is_meta or capturing or not total.numel():
            return
        dtype = torch.promote_types(total.dtype, torch.float32)
        b, a, t = (_shaped(x, self.shape).to(dtype) for x in (before, added, total))
        # The sum is rounded to the layer's dtype, perhaps more than once. A NaN is no finding.
        scale = torch.stack([x.abs().amax(-1) for x in (b, a, t)]).amax(0)
        if ((b + a - t).abs().amax(-1) > 8 * torch.finfo(total.dtype).eps * scale).any():
            last = self.run.settings.sublayers[self.number].last
            raise RuntimeError(
                f"{self._named(self.number)} adds something else than {last} returns: name the "
                "last module before the sum, or None if there is none, and list every sublayer"
            )
        self.run.settings.checked.add(this)

    def last(self, y: Tensor) -> Tensor:
        """What the layer's last sublayer has added; y is the layer's output."""
        if self.number < len(self.run.settings.sublayers) - 1:
            raise RuntimeError(f"{self._named(self.number + 1)} did not run")
        added = self.end(y)
        alone = torch.compiler.is_compiling() or not (dist.is_available() and dist.is_initialized())
        return added if alone else _Through.apply(added, y)


class Again(NamedTuple):
    """A layer that backward runs again, from one of its norms on."""

    run: Any
    k: int
    place: object
    number: int
    row: Tensor
    task: int


class Running(PerThread):
    """What runs in this thread."""

    layer: LayerRun | None = None
    """The layer that the innermost loop has called."""

    def __init__(self):
        self.again: list[Again] = []
        """The newest norm that backward has run again; nothing after backward."""


class Traced:
    """The same inside torch.compile of a whole model, which cannot trace what is local to a
    thread."""

    layer: LayerRun | None = None


RUNNING, TRACED = Running(), Traced()


def running() -> Running | Traced:
    return TRACED if torch.compiler.is_compiling() else RUNNING


class Hook(abc.ABC):
    """A hook of a module in a layer. Where the layer is compiled by itself, the hook breaks its
    graph, because states are pushed in eager code."""

    def __init__(self, number: int, place: object):
        self.number, self.place = number, place
        """The sublayer's, and an object that stands for the layer."""

    def __call__(self, _module: nn.Module, *given: Any) -> Any:
        traced = torch.compiler.is_compiling() and TRACED.layer is not None
        return self.run(*given) if traced else self.outside(*given)

    @abc.abstractmethod
    def run(self, *given: Any) -> Any:
        """What the hook does and returns."""

    @torch.compiler.disable(reason="a read of a sublayer outside of the graph")
    def outside(self, *given: Any) -> Any:
        return self.run(*given)


class Read(Hook):
    """Before a norm of the sublayer: its input becomes the row."""

    def run(self, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        name = None if args else next(iter(kwargs), None)
        given = args[0] if args else kwargs.get(name)
        layer = running().layer
        row = self._again(given) if layer is None else layer.norm(self.number, given)
        if row is None or row is given:
            return None
        return ((row, *args[1:]), kwargs) if args else (args, kwargs | {name: row})

    def _again(self, given: Any) -> Tensor | None:
        """The row where backward runs the norm again; None outside of a pass."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return None
        run, k = getattr(given, "deepfast_run", None) or (None, 0)
        newest = RUNNING.again
        last = newest[0] if newest else None
        if last is not None and (last.task != task or last.place is not self.place):
            last = None
        if run is None and last is not None and self.number > 0:
            run, k = last.run, last.k
        if run is None:
            raise RuntimeError(
                f"{OP}: backward runs a layer whose sublayers read again, with another input than "
                "in forward; checkpoint it with use_reentrant=False and connect it with "
                "recompute='none'"
            )
        if last is not None and (last.run, last.k, last.number) == (run, k, self.number):
            return last.row
        # The tensor only gives the shape of what was pushed in forward.
        index = run.settings.reads * k + self.number
        row = run.later_read(given, given, index) if self.number else run.first_read(index, given)
        if not newest or newest[0].task != task:
            # Another thread may end the backward pass.
            torch.autograd.Variable._execution_engine.queue_callback(newest.clear)
        newest[:] = [Again(run, k, self.place, self.number, row, task)]
        return row


class Take(Hook):
    """Behind the last module of the sublayer."""

    def run(self, _args: tuple, output: Any) -> None:
        layer = running().layer
        if layer is not None:
            layer.output(self.number, output)


def check_free(layers: Any, sublayers: tuple[Sublayer, ...]) -> None:
    """Raises where a module of a sublayer has hooks of another connection."""
    for layer in layers:
        for module in map(layer.get_submodule, (n for s in sublayers for n in s.names)):
            hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            if any(isinstance(hook, Hook) for hook in hooks):
                name = type(module).__name__
                raise ValueError(f"{OP}: a {name} is connected already, in another parent")


class Hooked:
    """The hooks of all layers. A layer that stands in several places has them once."""

    def __init__(self, layers: Any, sublayers: tuple[Sublayer, ...]):
        self.layers, self.hooks = layers, list[Hook]()
        for layer in {id(layer): layer for layer in layers}.values():
            place = object()
            for number, sublayer in enumerate(sublayers):
                for norm in sublayer.norms:
                    self.hooks.append(Read(number, place))
                    layer.get_submodule(norm).register_forward_pre_hook(
                        self.hooks[-1], prepend=True, with_kwargs=True
                    )
                if sublayer.last is not None:
                    self.hooks.append(Take(number, place))
                    layer.get_submodule(sublayer.last).register_forward_hook(self.hooks[-1])

    def remove(self) -> None:
        for module in self.layers.modules():
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                hooks, with_kwargs = (getattr(module, n) for n in (name, f"{name}_with_kwargs"))
                # A layer may hold a connected model, whose hooks stay.
                for key in [key for key, hook in hooks.items() if hook in self.hooks]:
                    del hooks[key]
                    with_kwargs.pop(key, None)
