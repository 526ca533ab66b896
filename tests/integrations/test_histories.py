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


class Stack(nn.Module):
    """Toy layers around a history, which is called as its authors call it."""

    def __init__(self, history):
        super().__init__()
        self.history = history
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))

    def forward(self, x):
        self.history.clean()
        self.history.add(x)
        for layer in self.layers:
            x = self.history.pop()
            self.history.add(x + torch.tanh(layer(x)))
        return self.history.pop()


class Literal(nn.Module):
    """``weight`` (L+1, L+1) or a constant, and norm k - 1 of state or sum k. Add and pop."""

    def __init__(self, kind, pre, window=-1, total=False):
        super().__init__()
        self.kind, self.pre, self.window, self.total = kind, pre, window, total
        norms = [nn.LayerNorm(DIM) for _ in range(LAYERS)]
        self.layer_norms = None if kind == "learnable_dense_nonorm" else nn.ModuleList(norms)
        if kind.startswith("learnable"):
            ones = torch.ones(LAYERS + 1, LAYERS + 1).tril()
            self.weight = nn.Parameter(ones / ones.sum(1, keepdim=True))

    def clean(self):
        self.states = []

    def add(self, y):
        k = len(self.states)
        if k > 0 and self.pre and self.layer_norms is not None:
            y = self.layer_norms[k - 1](y)
        self.states.append(y)

    def pop(self):
        row = len(self.states) - 1
        if self.kind == "residual":
            return sum(self.states)
        if self.kind == "dense":
            read = self.states if self.window == -1 else self.states[-self.window :]
            x = sum(read) / (1 if self.total else len(read))
        else:
            x = sum(self.weight[row, k] * y for k, y in enumerate(self.states))
        return x if row == 0 or self.pre else self.layer_norms[row - 1](x)


def history(kind, pre=True, window=-1, total=False):
    more = {"encoder_integration_type": "sum"} if total else {}
    args = Namespace(
        encoder_history_type=kind, encoder_normalize_before=pre, encoder_layers=LAYERS,
        encoder_embed_dim=DIM, encoder_windows_size=window, **more,
    )  # fmt: skip
    return CreateLayerHistory(args, True)


def pair(*given, **options):
    """Stacks with both histories and the same random weights: their names are the same."""
    ours, literal = Stack(history(*given, **options)), Stack(Literal(*given, **options))
    torch.testing.assert_close(
        ours.history.state_dict(), literal.history.state_dict(), rtol=0, atol=0
    )
    with torch.no_grad():
        for p in literal.parameters():
            p.add_(0.3 * torch.randn_like(p))
    ours.load_state_dict(literal.state_dict())
    return ours.double(), literal.double()


def results(model, x, names):
    parameters = dict(model.named_parameters())
    out = model(x)
    return [out, *torch.autograd.grad(out.sin().sum(), [x, *(parameters[n] for n in names)])]


@pytest.mark.parametrize(("kind", "pre", "options"), [
    ("learnable_dense", True, {}),
    ("learnable_dense", False, {}),
    ("learnable_dense_nonorm", True, {}),
    ("residual", True, {}),
    *(("dense", pre, {"window": w, "total": t})
      for pre in (True, False) for w in (-1, 1, 3) for t in (True, False)),
])  # fmt: skip
def test_layer_history(kind, pre, options):
    ours, literal = pair(kind, pre, **options)
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    names = [n for n, p in literal.named_parameters() if p.requires_grad]
    for _ in range(2):
        torch.testing.assert_close(*(results(model, x, names) for model in (ours, literal)))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), literal(x))
    for twin in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        torch.testing.assert_close(twin(x), literal(x))


def test_frozen_weights_and_two_passes_at_once():
    xs = [torch.randn(SHAPE, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    found = []
    for model in pair("learnable_dense", True):
        model.history.requires_grad_(False)
        outs = [model(x) for x in xs]
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
