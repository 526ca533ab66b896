"""One run of a layer that other people wrote: what its sublayers read and add.

A pre-norm layer computes ``h = x + f(norm1(x))``, then ``h + g(norm2(h))``. With a read for each
sublayer the input of each norm is a row of the connection, and what each sublayer adds is a state.
The first row is the layer's input. The layer's own sums are computed and not used, unless the reads
are added to them. `deepfast.attach` has the picture.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepfast.attach.passes import Pass, Settings, version
from deepfast.attach.sublayers import OP
from deepfast.ops.common import has_data


class _Through(torch.autograd.Function):
    """Returns added. In backward y gets a gradient of 0, because wrappers such as FSDP gather a
    layer's weights when a gradient reaches its output."""

    @staticmethod
    def forward(ctx, added, y):
        return added.view_as(added)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_zeros(()).expand_as(grad)


def _shaped(x: Tensor, shape: torch.Size) -> Tensor:
    """x in another shape: a layer may compute a sublayer on (B * T, D)."""
    return x if x.shape == shape else x.reshape(shape)


def _layout(x: Tensor) -> tuple:
    """Equal for two tensors with the same elements in memory."""
    # Without data it has no address.
    place = x.data_ptr() if has_data(x) else (x.untyped_storage()._cdata, x.storage_offset())
    return x.shape, x.stride(), x.dtype, place


class LayerRun:
    """One run of a layer whose sublayers read.

    What a sublayer adds is the output of its last module or, where none is named, the difference
    of the layer's own sums after and before it. A difference of 16-bit sums has their rounding
    error: half a unit in the last place of the sum.

    Args:
        pass_: the pass of the parent.
        k: number of the layer.
        x: its input, the row of its first sublayer.
        number: the sublayer that has run, -1 before the first one.
        task: where backward runs the layer without its stand-in, the number of that backward pass
            (graph task). Nothing is checked then, because forward has done so.
    """

    def __init__(self, pass_: Pass, k: int, x: Tensor, number: int = -1, task: int | None = None):
        self.pass_, self.k, self.row, self.number, self.task = pass_, k, x, number, task
        # The layer's own sum before the sublayer, and the output of the sublayer's last module;
        # both with their versions.
        self.before: tuple[Tensor | None, int] = (None, 0)
        self.added: tuple[Tensor | None, int] = (None, 0)

    def _error(self, text: str, number: int | None = None) -> RuntimeError:
        sublayer = self.pass_.settings.sublayers[self.number if number is None else number]
        norms = " and ".join(sublayer.norms)
        return RuntimeError(f"{OP}: the sublayer behind {norms} of layer {self.k} {text}")

    def norm(self, number: int, given: Tensor) -> Tensor:
        """The tensor that a norm of a sublayer gets in place of ``given``."""
        eager = not torch.compiler.is_compiling()
        if number == self.number:
            if eager and given is not self.before[0]:
                raise self._error(
                    "runs twice in one call of the layer, or its norms, which share a read, do not "
                    "get one tensor"
                )
            return _shaped(self.row, given.shape)
        if number != self.number + 1:
            text = "runs out of turn; list the sublayers in the order in which they run"
            raise self._error(text, number)
        row = self.pass_.settings.reads * self.k + number
        if number == 0:
            if eager and self.task is None and _layout(self.row) != _layout(given):
                raise RuntimeError(
                    f"{self.pass_.named(self.k)} changes its input before its first norm; reads of "
                    "sublayers need layers that give their input to the norm"
                )
            # A wrapper such as FSDP may have put another tensor in the place of the row.
            self.row = self.pass_.first(given, row)
        else:
            h = _shaped(given, self.pass_.shape)
            self.row = self.pass_.after(h, h if self.task is not None else self.end(given), row)
        self.number, self.before = number, (given, version(given))
        if eager:
            given.deepfast_layer = self.pass_, self.k  # type: ignore[attr-defined]
        return _shaped(self.row, given.shape)

    def output(self, number: int, output: Any) -> None:
        """The last module of a sublayer has run. Where it runs before its norm, `end` finds the
        fault."""
        if number == self.number and self.task is None:
            if self.added[0] is not None:
                raise self._error("has a last module that runs twice in one call of the layer")
            y = output[0] if isinstance(output, tuple) and output else output
            self.pass_.check(self.k, f"output of {self.pass_.settings.sublayers[number].last}", y)
            self.added = y, version(y)

    def end(self, total: Tensor) -> Tensor:
        """The tensor that the sublayer has added, behind which the layer's own sum is ``total``."""
        last, shape = self.pass_.settings.sublayers[self.number].last, self.pass_.shape
        (before, old), (added, returned), self.added = self.before, self.added, (None, 0)
        in_place = before is total or version(before) != old
        if last is None:
            if in_place:
                raise self._error("is added in place; name its last module, or make a new sum")
            return _shaped(total, shape) - _shaped(before, shape)
        if added is None:
            raise self._error(
                f"ends before {last} has run; sublayers side by side, whose norms run first, are "
                "one entry with a tuple of norms and None"
            )
        if added is total or version(added) != returned:
            raise self._error(
                f"needs None in place of {last}, whose output is modified in place or the sum"
            )
        if not in_place:
            self._check_sum(before, added, total)
        return _shaped(added, shape)

    def _check_sum(self, before: Tensor, added: Tensor, total: Tensor) -> None:
        """Raises where the sum behind the sublayer is not that before it plus ``added``. Each
        sublayer is checked once in training and once in evaluation, where a dropout does
        nothing."""
        settings, shape = self.pass_.settings, self.pass_.shape
        place = self.k, self.number, self.pass_.connection.training
        if place in settings.checked:
            return
        if torch.compiler.is_compiling():
            if settings.known:
                return
            raise self._error(
                "is not checked in a graph; run the model once before torch.compile, in the same "
                "mode (train or eval)"
            )
        capturing = total.is_cuda and torch.cuda.is_current_stream_capturing()
        if not has_data(total) or capturing or not total.numel():
            return
        dtype = torch.promote_types(total.dtype, torch.float32)
        b, a, t = (_shaped(x.detach(), shape).to(dtype) for x in (before, added, total))
        # The sum is rounded to the layer's dtype, perhaps more than once. A NaN is no finding.
        scale = torch.stack([x.abs().amax(-1) for x in (b, a, t)]).amax(0)
        if ((b + a - t).abs().amax(-1) > 8 * torch.finfo(total.dtype).eps * scale).any():
            raise self._error(
                f"adds something else than {settings.sublayers[self.number].last} returns: name "
                "the last module before the sum, or None if there is none, and list every sublayer"
            )
        settings.checked.add(place)

    def last(self, y: Tensor) -> Tensor:
        """The tensor that the last sublayer has added; y is the layer's output."""
        if self.number < self.pass_.settings.reads - 1:
            raise self._error("did not run", self.number + 1)
        added = self.end(y)
        alone = torch.compiler.is_compiling() or not (dist.is_available() and dist.is_initialized())
        return added if alone else _Through.apply(added, y)


class Hook:
    """A hook of a module in a layer. Where the layer is compiled by itself, the hook breaks its
    graph, because states are pushed in eager code."""

    def __init__(self, settings: Settings, sublayer: int):
        self.settings, self.sublayer = settings, sublayer

    def __call__(self, _module: nn.Module, *given: Any) -> Any:
        traced = torch.compiler.is_compiling() and self.settings.current.trace.layer_run is not None
        return self.act(*given) if traced else self.outside(*given)

    def act(self, *given: Any) -> Any:
        """The result of the hook."""
        raise NotImplementedError

    @torch.compiler.disable(reason="a read of a sublayer outside of the graph")
    def outside(self, *given: Any) -> Any:
        return self.act(*given)


class Read(Hook):
    """Before a norm of the sublayer: its input becomes the row."""

    def act(self, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        name = None if args else next(iter(kwargs), None)
        given = args[0] if args else kwargs.get(name)
        layer_run = self._layer_run(given)
        row = given if layer_run is None else layer_run.norm(self.sublayer, given)
        if row is given:
            return None
        return ((row, *args[1:]), kwargs) if args else (args, kwargs | {name: row})

    def _layer_run(self, given: Any) -> LayerRun | None:
        """The run of the layer that the norm belongs to; None outside of a pass."""
        here = self.settings.current.here
        layer_run: LayerRun | None = here.layer_run
        if torch.compiler.is_compiling() or (layer_run is not None and layer_run.task is None):
            return layer_run
        task = torch._C._current_graph_task_id()
        if task == -1:
            return None
        layer_run = None if layer_run is None or layer_run.task != task else layer_run
        called = getattr(given, "deepfast_layer", None)
        if called is not None and (layer_run is None or layer_run.before[0] is not given):
            if layer_run is None:
                # Another thread may end the backward pass.
                clear = functools.partial(vars(here).pop, "layer_run", None)
                torch.autograd.Variable._execution_engine.queue_callback(clear)
            pass_, k = called
            here.layer_run = layer_run = LayerRun(pass_, k, given, self.sublayer - 1, task)
        if layer_run is None:
            raise RuntimeError(
                f"{OP}: backward runs a layer whose sublayers read again, with another input than "
                "in forward; checkpoint it with use_reentrant=False and connect it with "
                "recompute='none'"
            )
        return layer_run


class Take(Hook):
    """Behind the last module of the sublayer."""

    def act(self, _args: tuple, output: Any) -> None:
        layer_run = self.settings.current.here.layer_run
        if layer_run is not None:
            layer_run.output(self.sublayer, output)
