"""Reads inside of a layer that other people wrote: which of its modules they belong to, and the
hooks that do them.

A pre-norm layer computes ``h = x + f(norm1(x))``, then ``h + g(norm2(h))``. With a read for each
sublayer the input of each norm is a row of the connection, and what each sublayer adds is a state.
The first row is the layer's input. A hook of each later norm pushes what the sublayer before it has
added and replaces the norm's input by the row that the push returns. What the last sublayer has
added is pushed after the layer. The layer's own sums are computed and not used.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepfast.depth.boundary import PerThread

OP = "deepfast.connect"


class Sublayer(NamedTuple):
    """The modules of a sublayer, by their names in the layer."""

    norms: tuple[str, ...]
    """Those that get the row."""
    last: str | None
    """The one whose output, or its first entry, is added to the residual; None where the layer
    changes the output before it adds it. What the sublayer adds is then a difference of two sums of
    the layer's, see `LayerRun`."""


def _pair(norm: str, last: str | None) -> Sublayer:
    return Sublayer((norm,), last)


def _of_gpt2(layer: nn.Module) -> tuple[Sublayer, ...]:
    cross = (_pair("ln_cross_attn", "crossattention"),) if hasattr(layer, "crossattention") else ()
    return _pair("ln_1", "attn"), *cross, _pair("ln_2", "mlp")


def _of_neox(layer: nn.Module) -> tuple[Sublayer, ...]:
    norms = "input_layernorm", "post_attention_layernorm"
    if layer.use_parallel_residual:
        # Attention and feed-forward block stand side by side: one read for both.
        return (Sublayer(norms, None),)
    return _pair(norms[0], "post_attention_dropout"), _pair(norms[1], "post_mlp_dropout")


def _of_t5(layer: Any) -> tuple[Sublayer, ...]:
    """Two, or three with cross-attention."""
    parts = (f"layer.{i}" for i in range(len(layer.layer)))
    return tuple(_pair(f"{part}.layer_norm", f"{part}.dropout") for part in parts)


_LLAMA = _pair("input_layernorm", "self_attn"), _pair("post_attention_layernorm", "mlp")
_GEMMA = (
    _pair("input_layernorm", "post_attention_layernorm"),
    _pair("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_TORCH = _pair("norm1", "dropout1"), _pair("norm2", "dropout2"), _pair("norm3", "dropout3")
KNOWN: dict[str, tuple[Sublayer, ...] | Callable[[Any], tuple[Sublayer, ...]]] = {
    "LlamaDecoderLayer": _LLAMA,
    "MistralDecoderLayer": _LLAMA,
    "Qwen2DecoderLayer": _LLAMA,
    "Qwen3DecoderLayer": _LLAMA,
    "GemmaDecoderLayer": _LLAMA,
    "Gemma2DecoderLayer": _GEMMA,
    "Gemma3DecoderLayer": _GEMMA,
    "GPT2Block": _of_gpt2,
    "GPTNeoXLayer": _of_neox,
    "ModernBertEncoderLayer": (_pair("attn_norm", "attn"), _pair("mlp_norm", "mlp")),
    # One module is the dropout behind both sublayers.
    "ViTLayer": (_pair("layernorm_before", None), _pair("layernorm_after", None)),
    # Dropout is a function here, behind the last module.
    "WhisperEncoderLayer": (_pair("self_attn_layer_norm", None), _pair("final_layer_norm", None)),
    "T5Block": _of_t5,
    # timm's. LayerScale stands before DropPath.
    "Block": (_pair("norm1", "drop_path1"), _pair("norm2", "drop_path2")),
    "TransformerEncoderLayer": _TORCH[:2],
    "TransformerDecoderLayer": _TORCH,
}
"""The sublayers of known layers, or what finds them, by the name of the layer's class."""


def find(layer: nn.Module, given: Any) -> tuple[Sublayer, ...]:
    """The sublayers of a layer, from the argument ``sublayers`` of `deepfast.connect`."""
    if isinstance(given, str) and given == "auto":
        name = next((c.__name__ for c in type(layer).__mro__ if c.__name__ in KNOWN), None)
        if name is None:
            raise ValueError(
                f"{OP}: sublayers='auto' knows {', '.join(KNOWN)}; {type(layer).__name__} is none "
                "of them, so pass sublayers=((norm, last module), ...) with names of its modules"
            )
        known = KNOWN[name]
        found = known if isinstance(known, tuple) else known(layer)
    else:
        found = _parsed(given)
    for sublayer in found:
        for name in (*sublayer.norms, *filter(None, (sublayer.last,))):
            try:
                layer.get_submodule(name)
            except AttributeError:
                inside = ", ".join(n for n, _ in layer.named_children())
                raise ValueError(
                    f"{OP}: sublayers: {type(layer).__name__} has no module {name!r}; its modules "
                    f"are {inside}"
                ) from None
    _check_norm_first(layer)
    # One read of the layer's input, and what the whole layer adds.
    return () if len(found) == 1 and found[0].last is None else found


def _parsed(given: Any) -> tuple[Sublayer, ...]:
    found = []
    entries = given if isinstance(given, Sequence) and not isinstance(given, str) else ()
    for entry in entries:
        match entry:
            case (str(norm), str() | None as last):
                found.append(_pair(norm, last))
            case ((*norms,), str() | None as last) if norms and all(
                isinstance(n, str) for n in norms
            ):
                found.append(Sublayer(tuple(norms), last))
            case _:
                entries = ()
                break
    if not entries:
        raise TypeError(
            f"{OP}: sublayers must be 'auto' or a pair (norm, last module) for each sublayer, such "
            f"as (('norm1', 'attn'), ('norm2', 'mlp')), got {given!r}"
        )
    names = [name for sublayer in found for name in (*sublayer.norms, sublayer.last) if name]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{OP}: sublayers: {name!r} stands in two places")
    return tuple(found)


def _check_norm_first(layer: nn.Module) -> None:
    if getattr(layer, "norm_first", True) is False:
        raise ValueError(
            f"{OP}: sublayers needs layers with their norms before their sublayers, got "
            f"{type(layer).__name__} with norm_first=False"
        )


# ---- while a layer runs --------------------------------------------------------------------------


class _Blocked(torch.autograd.Function):
    """x, whose gradient is dropped: none flows through the layer's own sums to the row."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, _grad):
        return None


class _Through(torch.autograd.Function):
    """added, whose gradient also visits y, as a gradient of 0: wrappers such as FSDP gather a
    layer's weights when the gradient reaches its output."""

    @staticmethod
    def forward(ctx, added, y):
        return added.view_as(added)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_zeros(()).expand_as(grad)


class LayerRun:
    """One run of a layer, the first one or one in backward.

    What a sublayer adds is the output of its last module or, where none is named, the difference
    of the layer's own sums behind and before it. A difference of 16-bit sums has their rounding
    error: half a unit in the last place of the sum.

    Args:
        run: the `deepfast.attach.passes.Pass`.
        k: number of the layer.
        x: its input, the row of its first sublayer.
    """

    def __init__(self, run: Any, k: int, x: Tensor):
        self.run, self.k, self.row = run, k, x
        # The sublayer that runs, how many of its norms have run, the layer's own sum before it, and
        # the output of its last module.
        self.number, self.norms = -1, 0
        self.before: Tensor | None = None
        self.added: Tensor | None = None
        # Whether nobody waits for what the last sublayer adds.
        self.alone = False
        # The backward pass that the layer runs in.
        compiling = torch.compiler.is_compiling()
        self.task = -1 if compiling else torch._C._current_graph_task_id()

    def input(self) -> Tensor:
        """What the layer gets."""
        if torch.compiler.is_compiling():
            return self.row.detach()
        given = _Blocked.apply(self.row)
        self.mark(given)
        return given

    def mark(self, given: Tensor) -> None:
        """Notes on the layer's input which pass it belongs to. Where backward runs the layer again,
        as checkpointing does, the layer gets the same tensor."""
        given.deepfast_run = self.run, self.k, self.row  # type: ignore[attr-defined]

    def _named(self, number: int) -> str:
        norms = " and ".join(self.run.settings.sublayers[number].norms)
        return f"{OP}: the sublayer behind {norms} of layer {self.k}"

    def is_over(self, run: Any, k: int, _row: Tensor) -> bool:
        """Whether this layer does not wait for another norm with the layer's input. In backward it
        may have been left early."""
        whole = self.norms == len(self.run.settings.sublayers[0].norms)
        return run is not self.run or k != self.k or self.number > 0 or whole

    @property
    def ended(self) -> bool:
        """Whether all norms of the layer have run."""
        sublayers = self.run.settings.sublayers
        return self.number == len(sublayers) - 1 and self.norms == len(sublayers[-1].norms)

    def norm(self, number: int, given: Tensor) -> Tensor:
        """What a norm of a sublayer gets in place of ``given``."""
        sublayers = self.run.settings.sublayers
        if number == self.number and self.norms < len(sublayers[number].norms):
            self.norms += 1
            return self.row
        if number <= self.number:
            raise RuntimeError(f"{self._named(number)} runs twice in one call of the layer")
        if number > self.number + 1:
            raise RuntimeError(f"{self._named(self.number + 1)} did not run before the next one")
        if number > 0:
            self.row = self.run.push(self.end(given), len(sublayers) * self.k + number)
        elif not torch.compiler.is_compiling():
            self._check_first(given)
            # A wrapper such as FSDP has put another tensor in the place of the marked one.
            self.mark(given)
        self.number, self.norms, self.before = number, 1, given
        return self.row

    def _check_first(self, given: Tensor) -> None:
        x = self.row
        if (x.shape, x.dtype, x.data_ptr()) != (given.shape, given.dtype, given.data_ptr()):
            raise RuntimeError(
                f"{OP}: layer {self.k} of {self.run.where} changes its input before its first "
                "norm; reads of sublayers need layers that give their input to the norm"
            )

    def output(self, number: int, output: Any) -> None:
        """The last module of a sublayer has run."""
        y = output[0] if isinstance(output, tuple) and output else output
        if number != self.number or self.added is not None:
            when = "twice" if self.added is not None else "before its norm"
            raise RuntimeError(f"{self._named(number)}: its last module runs {when}")
        self.run.check(self.k, f"output of {self.run.settings.sublayers[number].last}", y)
        self.added = y

    def end(self, total: Tensor) -> Tensor:
        """What the sublayer has added, behind which the layer's own sum is ``total``."""
        sublayer, added = self.run.settings.sublayers[self.number], self.added
        self.added = None
        if self.norms < len(sublayer.norms):
            raise RuntimeError(f"{self._named(self.number)}: one of these norms did not run")
        if sublayer.last is None:
            return total - self.before
        if added is None:
            raise RuntimeError(f"{self._named(self.number)}: {sublayer.last} did not run")
        return added

    def last(self, y: Tensor) -> Tensor:
        """What the layer's last sublayer has added; y is the layer's output."""
        if self.number < len(self.run.settings.sublayers) - 1:
            raise RuntimeError(f"{self._named(self.number + 1)} did not run")
        added = self.end(y)
        alone = torch.compiler.is_compiling() or not (dist.is_available() and dist.is_initialized())
        return added if alone else _Through.apply(added, y)


class Running(PerThread):
    """The run of a layer that is open in this thread."""

    layer: LayerRun | None = None


class Traced:
    """The same inside torch.compile of a whole model, which cannot trace what is local to a
    thread."""

    layer: LayerRun | None = None


RUNNING, TRACED = Running(), Traced()


def running() -> Running | Traced:
    return TRACED if torch.compiler.is_compiling() else RUNNING


class Hook:
    """A hook of a module in a layer. Where the layer is compiled by itself, the hook breaks its
    graph, because states are pushed in eager code."""

    def __init__(self, number: int):
        self.number = number
        """That of the sublayer."""

    def __call__(self, _module: nn.Module, *given: Any) -> Any:
        traced = torch.compiler.is_compiling() and TRACED.layer is not None
        return self.run(*given) if traced else self.outside(*given)

    def run(self, *given: Any) -> Any:
        raise NotImplementedError

    @torch.compiler.disable(reason="a read of a sublayer outside of the graph")
    def outside(self, *given: Any) -> Any:
        return self.run(*given)


class Read(Hook):
    """Before a norm of the sublayer: its input becomes the row."""

    def run(self, args: tuple) -> tuple | None:
        now, given = running(), args[0]
        layer = now.layer if torch.compiler.is_compiling() else self._layer(given)
        if layer is None:
            return None
        row = layer.norm(self.number, given)
        if layer.ended and layer.alone:
            now.layer = None
        return row, *args[1:]

    @staticmethod
    def _layer(given: Tensor) -> LayerRun | None:
        """The run that the norm belongs to; where backward runs a layer again, a new one."""
        layer, task = RUNNING.layer, torch._C._current_graph_task_id()
        if layer is not None and layer.task != task:
            layer = None
        marked = getattr(given, "deepfast_run", None)
        if marked is not None and task != -1 and (layer is None or layer.is_over(*marked)):
            RUNNING.layer = layer = LayerRun(*marked)
            layer.alone = True
        if layer is None and task != -1:
            raise RuntimeError(
                f"{OP}: backward runs a layer whose sublayers read again, with another input than "
                "in forward; a layer that checkpoints itself needs use_reentrant=False and "
                "recompute='none'"
            )
        return layer


class Take(Hook):
    """Behind the last module of the sublayer."""

    def run(self, _args: tuple, output: Any) -> None:
        layer = running().layer
        if layer is not None:
            layer.output(self.number, output)


def hook(layers: Sequence[nn.Module], sublayers: tuple[Sublayer, ...]) -> list:
    """Registers the hooks of all layers, once where a layer stands in several places, and returns
    their handles."""
    handles = []
    for layer in {id(layer): layer for layer in layers}.values():
        for number, sublayer in enumerate(sublayers):
            for norm in sublayer.norms:
                module = layer.get_submodule(norm)
                handles.append(module.register_forward_pre_hook(Read(number), prepend=True))
            if sublayer.last is not None:
                module = layer.get_submodule(sublayer.last)
                handles.append(module.register_forward_hook(Take(number)))
    return handles
