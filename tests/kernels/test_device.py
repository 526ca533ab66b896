"""Triton's launchers run on the device of their operands, shown without a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepfast import backend
from deepfast.launches import LAUNCHES

pytest.importorskip("triton")


class Entered(Exception):
    """The device that a launcher made the current one."""


@pytest.fixture
def tensor(monkeypatch):
    """A tensor of cuda:1 without memory, while cuda:0 is the current device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with FakeTensorMode():
        return torch.empty(2, device="cuda:1")


@pytest.mark.parametrize("name", list(LAUNCHES))
def test_every_launcher_enters_the_device(monkeypatch, tensor, name):
    def enter(index):
        raise Entered(index)

    monkeypatch.setattr(torch.cuda, "device", enter)
    launch = LAUNCHES[name]
    given = {o.name: [tensor] if o.type == "Tensor[]" else tensor for o in launch.operands}
    # Numbers, and the tensors that may be missing.
    given |= {o.name: None for o in launch.operands if not o.dtype or o.type == "Tensor?"}
    run = getattr(backend.choose(launch.op, "triton", "cpu", torch.float32)[1], name)
    with pytest.raises(Entered, match=r"^1$"):
        run(**given)
