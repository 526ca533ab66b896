"""LayerHistory against the formulas of the authors' code and of its descendants, written out."""

import copy
import pickle
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepfast.integrations import CreateLayerHistory, DynamicLinearCombination

LAYERS, SHAPE = 6, (3, 2, 8)
DIM = SHAPE[-1]


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


class Encoder(nn.Module):
    """As the encoders of these forks, with a toy layer."""

    def __init__(self, history):
        super().__init__()
        self.history = history
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))

    def forward(self, x):
        self.history.clean()
        getattr(self.history, "push", getattr(self.history, "add", None))(x)
        for layer in self.layers:
            x = self.history.pop()
            x = x + torch.tanh(layer(x))
            getattr(self.history, "push", getattr(self.history, "add", None))(x)
        return self.history.pop()


def args(kind, pre=True, **more):
    return Namespace(
        encoder_history_type=kind, encoder_normalize_before=pre, encoder_layers=LAYERS,
        encoder_embed_dim=DIM, **more,
    )  # fmt: skip


def assert_same(ours, literal):
    """Of the same weights, which have the same names."""
    ours, literal = Encoder(ours).double(), Encoder(literal).double()
    with torch.no_grad():
        for p in literal.parameters():
            p.add_(0.3 * torch.randn_like(p))
    ours.load_state_dict(literal.state_dict())
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    names = [n for n, p in literal.named_parameters() if p.requires_grad]
    for _ in range(2):
        found = []
        for model in (ours, literal):
            parameters = dict(model.named_parameters())
            out = model(x)
            grads = torch.autograd.grad(out.sin().sum(), [x, *(parameters[n] for n in names)])
            found.append([out, *grads])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), literal(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(ours))(x), literal(x))
    torch.testing.assert_close(copy.deepcopy(ours)(x), literal(x))


CASES = [
    ("learnable_dense", True, {}),
    ("learnable_dense", False, {}),
    ("learnable_dense_nonorm", True, {}),
    ("residual", True, {}),
    *(("dense", pre, {"window": w, "total": t})
      for pre in (True, False) for w in (-1, 1, 3) for t in (True, False)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "pre", "options"), CASES)
def test_is_the_formula(kind, pre, options):
    more = {"encoder_windows_size": options.get("window", -1)}
    if options.get("total"):
        more["encoder_integration_type"] = "sum"
    ours, literal = CreateLayerHistory(args(kind, pre, **more), True), Literal(kind, pre, **options)
    assert ours.state_dict().keys() == literal.state_dict().keys()
    for name, value in literal.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    assert_same(ours, literal)


def test_the_decoder_has_its_own_arguments():
    sizes = {"decoder_normalize_before": False, "decoder_layers": 2, "decoder_embed_dim": 5}
    given = args("residual", decoder_history_type="learnable_dense", **sizes)
    history = CreateLayerHistory(given, False)
    assert (history.norm, history.num_layers, history.dim) == ("post", 2, 5)
    assert CreateLayerHistory(args(None), True) is None


class LiteralCombination(nn.Module):
    """``weight`` (L+1, L+1, X): channel h uses weight h mod X; norm k of state or sum k."""

    def __init__(self, pre, size, init, softmax, embed):
        super().__init__()
        self.pre, self.softmax = pre, softmax
        weight = torch.ones(LAYERS + 1, LAYERS + 1)
        if init == "avg":
            weight = weight.tril() / weight.tril().sum(1, keepdim=True)
        self.weight = nn.Parameter(weight.unsqueeze(2).repeat(1, 1, size))
        norms = [nn.LayerNorm(DIM) for _ in range(LAYERS)]
        self.layer_norms = nn.ModuleList([nn.LayerNorm(DIM) if embed else nn.Sequential(), *norms])

    def clean(self):
        self.states = []

    def push(self, y):
        k = len(self.states)
        self.states.append(self.layer_norms[k](y) if k == 0 or self.pre else y)

    def pop(self):
        row, rows = len(self.states) - 1, LAYERS + 1
        weight = self.weight
        if self.softmax:
            upper = torch.ones(rows, rows, dtype=torch.bool).triu(1).unsqueeze(2)
            weight = F.softmax(weight.masked_fill(upper, float("-inf")), dim=1)
        weight = weight.repeat(1, 1, DIM // weight.shape[2])
        x = sum(weight[row, k] * y for k, y in enumerate(self.states))
        return x if self.pre else self.layer_norms[row](x)


@pytest.mark.parametrize(("weight_type", "size"), [("scalar", 1), ("scalar_4", 4), ("vector", DIM)])
@pytest.mark.parametrize("init", ["avg", "one"])
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize(("pre", "embed"), [(True, False), (True, True), (False, False)])
def test_dynamic_linear_combination(weight_type, size, init, softmax, pre, embed):
    given = args(
        None, pre, weight_type=weight_type, init_value=init, normalize_learned_weight=softmax,
        history_dropout=0.0, history_window_size=-1, encoder_learnable=True, normalize_embed=embed,
    )  # fmt: skip
    ours = DynamicLinearCombination(given, True)
    literal = LiteralCombination(pre, size, init, softmax, embed)
    shapes = [{n: p.shape for n, p in m.state_dict().items()} for m in (ours, literal)]
    assert shapes[0] == shapes[1]
    fresh = literal.double(), copy.deepcopy(ours).double()
    x = torch.randn(SHAPE, dtype=torch.float64)
    for history in fresh:
        history.clean()
        for k in range(LAYERS + 1):
            history.push(x + k * x.roll(k, -1))
    torch.testing.assert_close(fresh[0].pop(), fresh[1].pop())
    assert_same(ours, literal)


def test_sublayers_frozen_weights_and_dropout():
    given = args(
        None, weight_type="scalar", init_value="avg", normalize_learned_weight=False,
        history_dropout=0.5, history_window_size=-1, encoder_learnable=False, normalize_embed=False,
    )  # fmt: skip
    history = DynamicLinearCombination(given, True, include_sublayer=True)
    assert history.weight.shape == (2 * LAYERS + 1, 2 * LAYERS + 1, 1)
    assert not history.weight.requires_grad
    history.clean()
    history.push(torch.ones(50, DIM))
    assert set(history.pop().flatten().tolist()) == {0.0, 2.0}
    assert torch.equal(history.eval().pop(), torch.ones(50, DIM))


def test_compiles():
    encoder = Encoder(CreateLayerHistory(args("learnable_dense"), True))
    x = torch.randn(SHAPE)
    torch.testing.assert_close(torch.compile(encoder, backend="eager")(x), encoder(x))


@pytest.mark.parametrize(
    ("kind", "pre", "message"),
    [
        ("gru", True, "must be one of .*, got 'gru'"),
        ("learnable_dense_mask", True, "must be one of .*, got 'learnable_dense_mask'"),
        ("residual", False, "'residual' is not a sum of layers in post-norm"),
        ("learnable_dense_nonorm", False, "needs encoder_normalize_before"),
    ],
)
def test_refuses(kind, pre, message):
    with pytest.raises(ValueError, match=message):
        CreateLayerHistory(args(kind, pre), True)


def test_calls_out_of_order():
    history = CreateLayerHistory(args("learnable_dense"), True)
    with pytest.raises(RuntimeError, match=r"call clean\(\) at the start"):
        history.add(torch.zeros(1, DIM))
    history.clean()
    with pytest.raises(RuntimeError, match=r"call add\(x\) before pop\(\)"):
        history.pop()


@pytest.mark.parametrize("change", [{"history_window_size": 3}, {"normalize_embed": True}])
def test_refuses_what_the_authors_code_does_otherwise(change):
    given = {
        "weight_type": "scalar", "init_value": "avg", "normalize_learned_weight": False,
        "history_dropout": 0.0, "history_window_size": -1, "encoder_learnable": True,
        "normalize_embed": False,
    }  # fmt: skip
    with pytest.raises(ValueError, match="the authors' code"):
        DynamicLinearCombination(args(None, False, **given | change), True)
