"""fairseq's layer histories against the formulas of the authors' code, written out."""

import copy
import pickle
from argparse import Namespace

import pytest
import torch
from torch import nn

from deepfast.integrations import CreateLayerHistory

LAYERS, DIM = 6, 8


def history(kind, pre=True, window=-1, total=False):
    more = {"encoder_integration_type": "sum"} if total else {}
    args = Namespace(
        encoder_history_type=kind, encoder_normalize_before=pre, encoder_layers=LAYERS,
        encoder_embed_dim=DIM, encoder_windows_size=window, **more,
    )  # fmt: skip
    return CreateLayerHistory(args, True)


def rows(history, x):
    """What the layers get, as the authors call a history: of layers that return ``x.sin()``."""
    history.clean()
    found = []
    for one in x:
        history.add(one.sin())
        found.append(history.pop())
    return torch.stack(found)


def by_formula(history, x, kind, pre=True, window=-1, total=False):
    """With the weights (L+1, L+1) of the history, and norm k - 1 of state or sum k."""
    weight, norms, states, found = history.weight, history.layer_norms, [], []
    for row, one in enumerate(x):
        y = one.sin()
        states.append(norms[row - 1](y) if pre and row > 0 and norms is not None else y)
        if kind == "residual":
            y = sum(states)
        elif kind == "dense":
            read = states if window == -1 else states[-window:]
            y = sum(read) / (1 if total else len(read))
        else:
            y = sum(weight[row, k] * state for k, state in enumerate(states))
        found.append(y if row == 0 or pre else norms[row - 1](y))
    return torch.stack(found)


def results(out, history, x):
    learned = [p for p in history.parameters() if p.requires_grad]
    return [out, *torch.autograd.grad(out.sin().sum(), [x, *learned])]


def perturbed(history):
    with torch.no_grad():
        for p in history.double().parameters():
            p.add_(0.3 * torch.randn_like(p))
    return history


def draw():
    return torch.randn(LAYERS + 1, 3, 2, DIM, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("kind", "pre", "options"), [
    ("learnable_dense", True, {}),
    ("learnable_dense", False, {}),
    ("learnable_dense_nonorm", True, {}),
    ("residual", True, {}),
    ("dense", True, {}),
    ("dense", True, {"window": 3, "total": True}),
    ("dense", False, {"window": 1}),
    ("dense", False, {"window": 3}),
    ("dense", False, {"total": True}),
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

    perturbed(made)
    x = draw()
    for twin in (made, made, pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        want = by_formula(twin, x, kind, pre, **options)
        torch.testing.assert_close(results(rows(twin, x), twin, x), results(want, twin, x))


def test_frozen_weights_and_two_passes_at_once():
    made, x, y = perturbed(history("learnable_dense")).requires_grad_(False), draw(), draw()
    found = []
    for outs in ([rows(made, x), rows(made, y)], [by_formula(made, z, "dlcl") for z in (x, y)]):
        found.append(torch.autograd.grad(sum(out.sin().sum() for out in outs), (x, y)))
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
    ):
        with pytest.raises(ValueError, match=words):
            history(kind, pre)
    made = history("learnable_dense")
    with pytest.raises(RuntimeError, match=r"call clean\(\) at the start"):
        made.add(torch.zeros(1, DIM))
    made.clean()
    with pytest.raises(RuntimeError, match=r"call add\(x\) before pop\(\)"):
        made.pop()
