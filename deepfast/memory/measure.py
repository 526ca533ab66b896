"""The memory of a training step of any model, measured."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode

from deepfast.memory.count import dense
from deepfast.memory.ledger import ACTIVATIONS, GRADIENTS, TRANSIENT, Ledger
from deepfast.memory.recording import SeenThrough
from deepfast.memory.units import format_bytes


@dataclass(frozen=True)
class Measured:
    """What a training step needs."""

    table: dict[str, int]
    """Category -> bytes at the peak of the step."""
    data: str
    """"none" where a copy of the model without data ran the step, "real" where the model did."""
    reason: str
    """Why the step needed data; empty where it did not."""

    @property
    def peak(self) -> int:
        """Bytes at the peak, the model's own included."""
        return sum(self.table.values())

    def __repr__(self) -> str:
        return f"Measured(peak {format_bytes(self.peak, up=True)}, {self.data} data)"


class _StepLedger(Ledger):
    """Tells what forward makes from what backward makes.

    fake: the mode of a step without data. The step's own tensors enter it as copies, which do not
    count.
    """

    fake: FakeTensorMode | None = None

    def _storages(self, tree: object) -> set[int]:
        found = super()._storages(tree)
        for tensor in dense(tree) if self.fake is not None else ():
            if not isinstance(tensor, FakeTensor):
                found.add(self.fake.from_tensor(tensor).untyped_storage()._cdata)
        return found

    def _category(self, func: Any, args: tuple) -> int:
        if self.fake is not None and func is torch.ops.aten.mkldnn_rnn_layer.default:
            raise NotImplementedError("an LSTM keeps a buffer that it makes with data alone")
        running = torch._C._current_graph_task_id() != -1
        self.category = TRANSIENT if running else ACTIVATIONS
        return super()._category(func, args)


def measure(model: nn.Module, step: Callable[[nn.Module], object]) -> Measured:
    """Measures the peak memory of one training step of any model, connected or not.

    It first runs the step on a copy of the model without data, which takes neither the time nor the
    memory of a step. A step that reads values (``.item()``, a mask's indices), or calls kernels
    that torch does not know, needs data: then the model itself runs it once, and is counted.

        measured = deepfast.memory.measure(model, lambda model: model(batch).mean().backward())

    Args:
        model: its parameters may have gradients, which do not count and stay as they are.
        step: (model) -> anything; forward and backward, without the optimizer. It calls the model
            that it is given, and may run twice.

    Returns:
        The peak by category: "parameters" (and buffers), "gradients", "activations" (what forward
        has made and is alive) and "transient" (what backward has made). It counts tensors as
        `LiveBytes` does on a CPU, so not the scratch memory inside of torch's ops, nor what an
        allocator loses.
    """
    given = {p: p.grad for p in model.parameters()}
    with torch.random.fork_rng():
        try:
            for p in given:
                p.grad = None
            return _without_data(model, step)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            return _measured(model, step, reason)
        finally:
            for p, grad in given.items():
                p.grad = grad


def _without_data(model: nn.Module, step: Callable) -> Measured:
    """The step on a copy of the model without data."""
    # The step's own tensors, such as a batch, have data.
    mode = SeenThrough(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        model = copy.deepcopy(model)

    def run(model: nn.Module) -> None:
        with mode:
            step(model)

    return _measured(model, run, fake=mode)


def _measured(
    model: nn.Module, step: Callable, reason: str = "", fake: FakeTensorMode | None = None
) -> Measured:
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else "cpu"
    ledger = _StepLedger(parameters, device=device)
    ledger.fake = fake
    with ledger:
        step(model)
    own = sum(t.nbytes for t in (*parameters, *model.buffers()))
    top = ledger.highest[""]
    table = {
        "parameters": own,
        "gradients": top[GRADIENTS],
        "activations": top[ACTIVATIONS],
        "transient": top[TRANSIENT],
    }
    return Measured(table, "real" if reason else "none", reason)
