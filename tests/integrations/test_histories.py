"""fairseq's layer histories against the formulas of the authors' code, written out."""

import copy
import pickle
from argparse import Namespace

import pytest
import torch
from torch import nn

from deepfast.integrations import CreateLayerHistory

LAYERS, SHAPE = 6, (3, 2, 8)
DIM = SHAPE[-1]


def history(kind, pre=True, window=-1, total=False):
    more = {"encoder_integration_type": "sum"} if total else {}
    args = Namespace(
        encoder_history_type=kind, encoder_normalize_before=pre, encoder_layers=LAYERS,
        encoder_embed_dim=DIM, encoder_windows_size=window, **more,
    )  # fmt: skip
    return CreateLayerHistory(args, True)


class Stack(nn.Module):
    """Toy layers around a history, which is called as its authors call it. Weights are random."""

    def __init__(self, history):
        super().__init__()
        self.history = history
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.add_(0.3 * torch.randn_like(p))

    def forward(self, x):
        self.history.clean()
        self.history.add(x)
        for layer in self.layers:
            x = self.history.pop()
            self.history.add(x + torch.tanh(layer(x)))
        return self.history.pop()


def by_formula(stack, x, kind, pre, window=-1, total=False):
    """With the weights (L+1, L+1) of the history, and norm k - 1 of state or sum k."""
    weight, norms, states = stack.history.weight, stack.history.layer_norms, [x]

    def pop():
        row = len(states) - 1
        if kind == "residual":
            return sum(states)
        if kind == "dense":
            read = states if window == -1 else states[-window:]
            x = sum(read) / (1 if total else len(read))
        else:
            x = sum(weight[row, k] * y for k, y in enumerate(states))
        return x if row == 0 or pre else norms[row - 1](x)

    for k, layer in enumerate(stack.layers):
        x = pop()
        y = x + torch.tanh(layer(x))
        states.append(y if norms is None or not pre else norms[k](y))
    return pop()


def results(out, stack, x):
    learned = [p for p in stack.parameters() if p.requires_grad]
    return [out, *torch.autograd.grad(out.sin().sum(), [x, *learned])]


@pytest.mark.parametrize(("kind", "pre", "options"), [
    ("learnable_dense", True, {}),
    ("learnable_dense", False, {}),
    ("learnable_dense_nonorm", True, {}),
    ("residual", True, {}),
    *(("dense", pre, {"window": w, "total": t})
      for pre in (True, False) for w in (-1, 1, 3) for t in (True, False)),
])  # fmt: skip
def test_layer_history(kind, pre, options):
    made, norm = history(kind, pre, **options), nn.LayerNorm(DIM).state_dict()
    norms = {f"layer_norms.{i}.{p}": x for i in range(LAYERS) for p, x in norm.items()}
    means = torch.ones(LAYERS + 1, LAYERS + 1).tril()
    means /= means.sum(1, keepdim=True)
    # The names are in checkpoints.
    want = {} if kind == "learnable_dense_nonorm" else norms
    want |= {"weight": means} if kind.startswith("learnable") else {}
    torch.testing.assert_close(dict(made.state_dict()), want, rtol=0, atol=0)

    stack = Stack(made)
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    want = by_formula(stack, x, kind, pre, **options)
    for _ in range(2):
        out = by_formula(stack, x, kind, pre, **options)
        torch.testing.assert_close(results(stack(x), stack, x), results(out, stack, x))
    with torch.no_grad():
        torch.testing.assert_close(stack(x), want)
    for twin in (pickle.loads(pickle.dumps(stack)), copy.deepcopy(stack)):
        torch.testing.assert_close(twin(x), want)


def test_frozen_weights_and_two_passes_at_once():
    stack = Stack(history("learnable_dense"))
    stack.history.requires_grad_(False)
    xs = [torch.randn(SHAPE, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    found = []
    for outs in ([stack(x) for x in xs], [by_formula(stack, x, "learnable", True) for x in xs]):
        found.append(torch.autograd.grad(sum(out.sin().sum() for out in outs), xs))
    torch.testing.assert_close(*found)


def test_the_decoder_has_its_own_arguments():
    given = Namespace(
        encoder_history_type=None, decoder_history_type="learnable_dense",
        decoder_normalize_before=False, decoder_layers=2, decoder_embed_dim=5,
    )  # fmt: skip
    made = CreateLayerHistory(given, False)
    assert (made.norm, made.num_layers, made.dim) == ("post", 2, 5)
    assert CreateLayerHistory(given, True) is None


def test_refuses():
    for kind, pre, words in (
        ("gru", True, "must be one of .*, got 'gru'"),
        ("residual", False, "'residual' is not a sum of layers in p"),
        ("learnable_dense_nonorm", False, "needs encoder_normalize_before"),
    ):
        with pytest.raises(ValueError, match=words):
            history(kind, pre)
    made = history("learnable_dense")
    with pytest.raises(RuntimeError, match=r"call clean\(\) at the start"):
        made.add(torch.zeros(1, DIM))
    made.clean()
    with pytest.raises(RuntimeError, match=r"call add\(x\) before pop\(\)"):
        made.pop()
