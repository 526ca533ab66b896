"""`deepfast.memory.measure` against steps that are run and counted."""

import pytest
import torch
from torch import nn

import deepfast
from deepfast.memory import LiveBytes, measure
from deepfast.nn import TransformerEncoder

X = torch.randn(4, 16, 32)
PADDING = torch.arange(16) > torch.tensor([[15], [9], [15], [3]])


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


def connected():
    """Its sublayers are checked where they have values."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    sublayers = (("norm1", "dropout1"), ("norm2", "dropout2"))
    deepfast.connect(model, norm="pre", connection="attnres", sublayers=sublayers)
    return model


def step(model):
    model(X).square().mean().backward()


def padded(model):
    """Finding the tokens reads the mask."""
    model(X, PADDING).square().mean().backward()


@pytest.mark.parametrize(("make", "run", "data"), [
    (lambda: nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), step, "none"),
    (lambda: TransformerEncoder(4, 32, 2, 64, recompute="layer"), step, "none"),
    (connected, step, "none"),
    # Views of the batch, which is not the step's.
    (lambda: nn.Linear(32, 1), step, "none"),
    (lambda: nn.Sequential(nn.Unflatten(0, (4, 1)), nn.Conv2d(1, 4, 3)), step, "none"),
    (Words, step, "none"),
    # A buffer inside an op.
    (lambda: Recurrent(32, 16, 2, batch_first=True), step, "real"),
    (lambda: TransformerEncoder(2, 32, 2, 64), padded, "real"),
])  # fmt: skip
def test_the_peak_is_that_of_a_step(make, run, data):
    """And the model, its gradients and the generator stay as they are."""
    model = make()
    run(model)
    parameters = list(model.parameters())
    grads, random = [p.grad for p in parameters], torch.get_rng_state()
    values = [g.to_dense().clone() for g in grads]
    found = measure(model, run)
    assert torch.equal(torch.get_rng_state(), random)
    for p, grad, value in zip(parameters, grads, values, strict=True):
        assert p.grad is grad
        assert torch.equal(grad.to_dense(), value)
    model.zero_grad()
    with LiveBytes() as live:
        run(model)
    own = sum(4 * p.numel() for p in parameters)
    assert found.data == data
    assert (found.reason == "") == (data == "none")
    assert found.peak == pytest.approx(live.peak + own, rel=0.01)
    assert found.table["parameters"] == own
    assert found.table["activations"] > 0
    assert f"{data} data" in repr(found)


def test_forward_alone_has_no_backward_and_an_error_of_the_step_is_raised():
    found = measure(nn.Linear(32, 8), lambda model: model(X))
    assert found.table["activations"] == 4 * 16 * 8 * 4
    assert found.table["gradients"] == found.table["transient"] == 0
    with pytest.raises(ZeroDivisionError):
        measure(nn.Linear(2, 2), lambda model: 1 / 0)
