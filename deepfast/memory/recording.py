"""A training step of a small model, run without data and counted.

The model has the width and the tokens of the model that is planned, and few layers: one for each
policy, and one below and one above them. Its tensors are torch's fake tensors, which have no
elements. The ops of deepfast allocate what they do with data, and their launches do nothing. So the
counted bytes are those of a real step on a CPU, and the step takes less than a second.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deepfast.memory.ledger import ACTIVATIONS, GRADIENTS, HEAD, HISTORY, TRANSIENT, Ledger
from deepfast.memory.sizes import Side, Sizes
from deepfast.memory.stack import LayerRecord, Stack
from deepfast.nn import MultiheadAttention, Packing
from deepfast.ops.linear_cross_entropy import chunk_rows, linear_cross_entropy
from deepfast.policies import policies_of

SECTIONS = {
    "encoder forward": ("states", "nothing"),
    "decoder forward": ("kept", "states"),
    "loss": ("kept", "kept"),
    "loss backward": ("learning", "learning"),
    "decoder backward": ("saved", "learning"),
    "decoder end": ("saved", "learned"),
    "encoder backward": ("learning", "learned"),
    "encoder end": ("learned", "learned"),
}
"""Sections of a step -> what encoder and decoder hold, see `Stack.holds`. A side ends where the
gradient of its embedding is computed."""


@dataclass(frozen=True)
class Recording:
    """What a step of the small model needed."""

    layers: dict[str, dict[str, LayerRecord]]
    """Side -> policy -> the record of a layer under it."""
    rest: dict[str, Tensor]
    """Section -> (6,) bytes that the stacks do not hold. For forward and backward of a stack these
    are the bytes at their start, else those at the peak."""


def held(section: str, stacks: dict[str, Stack]) -> Tensor:
    """(6,) bytes that the stacks hold in a section."""
    states = zip(stacks.values(), SECTIONS[section], strict=False)
    return torch.stack([stack.holds(state) for stack, state in states]).sum(0)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Inside the block the settings of the caller's code do not matter, nor do its random numbers
    change."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)


class SeenThrough(FakeTensorMode):
    """Lets deepfast's ops run on fake tensors as they do on real ones, see `ops.register`."""

    sees_through = True


class _SmallModel:
    """The small model, and the ledger of its step."""

    def __init__(self, sizes: Sizes):
        self.sizes, self.part = sizes, 0
        self.orders = {
            side.name: ("none", *policies_of(side.connection), "none") for side in sizes.sides
        }
        # The sides with as many layers as they have here.
        self.sides = [s._replace(layers=len(self.orders[s.name])) for s in sizes.sides]
        # FSDP gathers parameters in the dtype of the products.
        low = sizes.sharded and sizes.dtype == "bfloat16"
        dtype = torch.bfloat16 if low else torch.float32
        self.table = torch.empty(sizes.vocab_size, sizes.dim, dtype=dtype, requires_grad=True)
        # Of a bare stack.
        self.given = torch.empty(sizes.tokens, sizes.dim, requires_grad=True)
        self.modules = {side.name: side.stack(self.orders[side.name]) for side in self.sides}
        weights: list[Tensor] = []
        parameters: list[Tensor] = [self.table]
        for side, module in self.modules.items():
            parameters += module.parameters()
            for number, layer in enumerate(module.layers):
                weights += layer.parameters()
                layer.register_forward_pre_hook(partial(self._begins, side, number))
                layer.register_forward_hook(partial(self._ends, side, number))
            if module.connection.depth is not None:
                module.connection.depth.register_forward_pre_hook(_one_block)
            for inner in module.modules():
                if sizes.padding and isinstance(inner, MultiheadAttention):
                    # torch's attention works on padded copies.
                    inner.backend = "sdpa"
        old = sizes.accumulate > 1 or sizes.ranks > 1
        self.ledger = Ledger(parameters, weights, old_gradients=old)

    def _enter(self, side: str, what: str, *_: object) -> None:
        category = HEAD if what in ("source", "end") else TRANSIENT
        self.ledger.enter(f"{side} {what}", category)

    def _begins(self, side: str, number: int, *_: object) -> None:
        """A layer, or the next part of it, begins forward. In backward it may run again."""
        if torch._C._current_graph_task_id() == -1:
            self.part = self.part + 1 if f" {number} " in self.ledger.section else 0
            self._enter(side, f"forward {number} {self.part}")

    def _ends(self, side: str, number: int, _layer: Any, _args: Any, result: Any) -> None:
        """A layer or part ends forward. Its backward begins at its branch."""
        if torch._C._current_graph_task_id() == -1:
            branch = result[-1] if isinstance(result, tuple) else result
            enter = partial(self._enter, side, f"backward {number} {self.part}")
            branch.grad_fn.register_prehook(enter)

    def step(self) -> None:
        sizes = self.sizes
        with self.ledger:
            self._enter("encoder", "source")
            with torch.autocast("cpu", torch.bfloat16, enabled=sizes.dtype == "bfloat16"):
                result = self._forward()
            # As where the caller's outermost context of autocast ends.
            torch.clear_autocast_cache()
            self.ledger.enter("loss backward", HEAD)
            # The caller of a bare stack holds its result.
            (result if sizes.vocab_size else (2 * result).sum()).backward()

    def _forward(self) -> Tensor:
        """The loss or, without a vocabulary, the encoder's result."""
        sizes, below = self.sizes, dict[str, Any]()
        for side in self.sides:
            packing = _packing(side.tokens, sizes.padding)
            y = self._run(side, packing=packing, **below)
            below = {"encoded": y, "encoded_packing": packing}
        self.ledger.enter("loss", HEAD)
        if not sizes.vocab_size:
            return y
        labels = torch.empty(side.tokens, dtype=torch.int64)
        chunk = chunk_rows(side.tokens, sizes.vocab_size, sizes.device)
        return linear_cross_entropy(
            y,
            self.table,
            labels,
            label_smoothing=0.1,
            reduction="sum",
            chunk_size=chunk,
            backend=sizes.backend,
        )

    def _run(self, side: Side, **options: Any) -> Tensor:
        """From the embedding to the result of one stack."""
        self._enter(side.name, "source")
        sizes, module = self.sizes, self.modules[side.name]
        if not sizes.vocab_size:
            x = self.given * 1
        else:
            tokens = torch.empty(side.tokens, dtype=torch.int64)
            x = F.embedding(tokens, self.table) * sizes.dim**0.5
            if sizes.dropout and sizes.device == "cuda":
                # On a GPU torch keeps a mask of bytes.
                x = torch.native_dropout(x, 0.1, True)[0]
            elif sizes.dropout:
                x = F.dropout(x, 0.1)
        x.grad_fn.register_prehook(partial(self._enter, side.name, "end"))
        self._enter(side.name, "begin")
        gates: Sequence[Any] = [None] * side.layers
        if module.latent is not None:
            # Drawn gates have the same bytes.
            gates = module.latent.logits.sigmoid()[0].unbind()
        return module.connection(x, module._calls([options] * side.layers, gates))

    # ---- what the step has shown ---------------------------------------------------------------

    def recording(self) -> Recording:
        ledger = self.ledger
        layers = {side.name: self._layers(side) for side in self.sides}
        stacks = {
            side.name: Stack(side, layers[side.name], self.orders[side.name], blocks=False)
            for side in self.sides
        }
        alive = {name: ledger.highest[name] for name in SECTIONS if name in ledger.highest}
        for side in self.sides:
            top = f"{side.layers - 1} {side.parts - 1}"
            for way, first in (("forward", "0 0"), ("backward", top)):
                section = f"{side.name} {way}"
                alive[section] = ledger.starts[f"{section} {first}"]
        rest = {}
        for section, found in alive.items():
            beside = _bytes(found) - held(section, stacks)
            # The ledger does not know what is kept.
            beside[TRANSIENT] += beside[ACTIVATIONS] + beside[HISTORY]
            beside[ACTIVATIONS] = beside[HISTORY] = 0
            rest[section] = beside
        return Recording(layers, rest)

    def _layers(self, side: Side) -> dict[str, LayerRecord]:
        starts, highest, flops = self.ledger.starts, self.ledger.highest, self.ledger.flops
        found, parts = {}, range(side.parts)
        forward, backward = f"{side.name} forward", f"{side.name} backward"
        for number, policy in list(enumerate(self.orders[side.name]))[1:-1]:
            up, down = ([f"{way} {number} {part}" for part in parts] for way in (forward, backward))
            begins, returns = _bytes(starts[up[0]]), _bytes(starts[down[-1]])
            kept = _bytes(starts[f"{forward} {number + 1} 0"]) - begins
            saved = returns - _bytes(starts[f"{backward} {number - 1} {parts[-1]}"])
            gradients, saved[GRADIENTS] = -int(saved[GRADIENTS]), 0
            for change in (kept, saved):
                change[ACTIVATIONS], change[TRANSIENT] = change[TRANSIENT].clone(), 0
            found[policy] = LayerRecord(
                kept=kept,
                saved=saved,
                forward=_bytes([highest[section] for section in up]) - begins,
                backward=_bytes([highest[section] for section in down]) - returns,
                gradients=gradients,
                forward_flops=sum(flops[section] for section in up),
                backward_flops=sum(flops[section] for section in down),
            )
        return found


def _bytes(counted: Sequence) -> Tensor:
    return torch.tensor(counted, device="cpu")


@lru_cache(maxsize=256)
def _record(sizes: Sizes) -> Recording:
    with undisturbed(), SeenThrough():
        model = _SmallModel(sizes)
        model.step()
    return model.recording()


@lru_cache(maxsize=1024)
def recording(sizes: Sizes) -> Recording:
    """The recording of the small model of ``sizes``, which is kept."""
    least = replace(
        sizes,
        num_layers=1,
        decoder_layers=min(sizes.decoder_layers, 1),
        accumulate=min(sizes.accumulate, 2),
        ranks=min(sizes.ranks, 2),
        parallel=sizes.parallel if sizes.ranks > 1 else "ddp",
    )
    return _record(replace(least, optimizer="none", length=1, reshard=True))


def _one_block(depth: Any, args: tuple) -> None:
    """Before a push: all rows of the small model are one block, which needs no sums."""
    args[1].block = depth.rows


def _packing(tokens: int, padding: bool) -> Packing:
    """One sentence: the bytes of a step do not depend on where sentences end."""
    if not padding:
        return Packing(1, tokens)
    indices = torch.empty(tokens, dtype=torch.int64)
    return Packing(1, tokens, indices, torch.empty(1, tokens, dtype=torch.bool))
