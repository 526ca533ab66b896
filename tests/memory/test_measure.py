"""`deepfast.memory.measure` against steps that are run and counted."""

import pytest
import torch
from torch import nn

from deepfast.memory import LiveBytes, measure
from deepfast.nn import TransformerEncoder

X = torch.randn(4, 16, 32)


class Words(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 32, sparse=True)

    def forward(self, x):
        return self.table((x > 0).long()[..., 0])


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


PADDING = torch.arange(16) > torch.tensor([[15], [9], [15], [3]])


def step(model):
    model(X).square().mean().backward()


def padded(model):
    """Finding the tokens reads the mask."""
    model(X, PADDING).square().mean().backward()


MODELS = {
    "plain torch": (
        lambda: nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True), step, "none"
    ),
    "a stack": (lambda: TransformerEncoder(4, 32, 2, 64, recompute="layer"), step, "none"),
    # Views of the batch, which is not the step's.
    "one product": (lambda: nn.Linear(32, 1), step, "none"),
    "convolution": (
        lambda: nn.Sequential(nn.Unflatten(0, (4, 1)), nn.Conv2d(1, 4, 3)), step, "none"
    ),
    "sparse gradient": (Words, step, "none"),
    "a buffer inside an op": (lambda: Recurrent(32, 16, 2, batch_first=True), step, "real"),
    "a step that reads values": (lambda: TransformerEncoder(2, 32, 2, 64), padded, "real"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_that_of_a_step(name):
    make, run, data = MODELS[name]
    model = make()
    found = measure(model, run)
    with LiveBytes() as live:
        run(model)
    own = sum(4 * p.numel() for p in model.parameters())
    assert found.data == data
    assert (found.reason == "") == (data == "none")
    assert found.peak == pytest.approx(live.peak + own, rel=0.01)
    assert found.table["parameters"] == own
    assert found.table["activations"] > 0
    assert f"{data} data" in repr(found)


@pytest.mark.parametrize("run", [step, padded])
def test_model_and_generator_stay_as_they_are(run):
    model = TransformerEncoder(2, 32, 2, 64)
    step(model)
    grads, before = [p.grad for p in model.parameters()], torch.get_rng_state()
    values = [g.clone() for g in grads]
    measure(model, run)
    assert torch.equal(torch.get_rng_state(), before)
    for p, grad, value in zip(model.parameters(), grads, values, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, value)


def test_an_error_of_the_step_is_raised():
    with pytest.raises(ZeroDivisionError):
        measure(nn.Linear(2, 2), lambda model: 1 / 0)
