"""DenseFormer's and fairseq's histories against the formulas of the authors' code, written out."""

import copy
import pickle
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepfast.integrations import CreateLayerHistory, DWAModules, DynamicLinearCombination

LAYERS, SHAPE = 6, (3, 2, 8)
DIM = SHAPE[-1]


class Stack(nn.Module):
    """Toy layers around a history, which is called as its authors call it."""

    def __init__(self, history):
        super().__init__()
        self.history = history
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))

    def start(self, x):
        if hasattr(self.history, "init_accumulators"):
            self.history.init_accumulators(x)
            return x
        self.history.clean()
        return self.after(x, None)

    def after(self, y, k):
        """The next layer's input, where y is the embedding or the output of layer k."""
        if hasattr(self.history, "init_accumulators"):
            return self.history(y, block_idx=k)
        getattr(self.history, "push", getattr(self.history, "add", None))(y)
        return self.history.pop()

    def forward(self, x, checkpointed=False):
        x = self.start(x)
        for k, layer in enumerate(self.layers):
            y = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            x = self.after(x + torch.tanh(y), k)
        return x


def pair(ours, literal):
    """Stacks with both histories and the same random weights: their names are the same."""
    ours, literal = Stack(ours).double(), Stack(literal).double()
    with torch.no_grad():
        for p in literal.parameters():
            p.add_(0.3 * torch.randn_like(p))
    ours.load_state_dict(literal.state_dict())
    return ours, literal


def results(model, x, names, **options):
    parameters = dict(model.named_parameters())
    out = model(x, **options)
    return [out, *torch.autograd.grad(out.sin().sum(), [x, *(parameters[n] for n in names)])]


def assert_same(ours, literal, **options):
    ours, literal = pair(ours, literal)
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    names = [n for n, p in literal.named_parameters() if p.requires_grad]
    for _ in range(2):
        got, want = (results(model, x, names, **options) for model in (ours, literal))
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), literal(x))
    for twin in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        torch.testing.assert_close(twin(x), literal(x))


class LiteralDWA(nn.Module):
    """One accumulator for each remainder of the block's number; a weight for each of its states."""

    def __init__(self, n_blocks, dilation=1, period=1):
        super().__init__()
        self.dilation, self.period = dilation, period
        self.alphas = nn.ModuleList()
        for i in range(1, n_blocks + 1):
            used = i % period == 0
            self.alphas.append(
                nn.Linear((i + dilation) // dilation, 1, bias=False) if used else None
            )
            if used:
                nn.init.zeros_(self.alphas[-1].weight)
                self.alphas[-1].weight.data[0, -1] = 1.0

    def init_accumulators(self, x):
        self.states = [[] for _ in range(self.dilation)]
        self.states[0].append(x)

    def forward(self, x, block_idx):
        i = block_idx + 1
        group = self.states[i % self.dilation]
        group.append(x)
        if i % self.period != 0:
            return x
        return torch.tensordot(self.alphas[block_idx].weight.view(-1), torch.stack(group), dims=1)


@pytest.mark.parametrize("dilation", [1, 2, 3, 4])
@pytest.mark.parametrize("period", [1, 2, 5])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_denseformer(dilation, period, checkpointed):
    histories = [c(LAYERS, dilation, period) for c in (DWAModules, LiteralDWA)]
    assert_same(*histories, checkpointed=checkpointed)


@pytest.mark.parametrize(("dilation", "period"), [(1, 1), (4, 5)])
def test_denseformer_begins_as_the_plain_model(dilation, period):
    model = Stack(DWAModules(LAYERS, dilation, period))
    x = plain = torch.randn(SHAPE)
    for layer in model.layers:
        plain = plain + torch.tanh(layer(plain))
    assert torch.equal(model(x), plain)


def test_frozen_averages_and_two_passes_at_once():
    ours, literal = pair(DWAModules(LAYERS, 2), LiteralDWA(LAYERS, 2))
    xs = [torch.randn(SHAPE, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    found = []
    for model in (ours, literal):
        model.history.requires_grad_(False)
        outs = [model(x) for x in xs]
        found.append(torch.autograd.grad(sum(out.sin().sum() for out in outs), xs))
    torch.testing.assert_close(*found)


def args(kind, pre=True, **more):
    return Namespace(
        encoder_history_type=kind, encoder_normalize_before=pre, encoder_layers=LAYERS,
        encoder_embed_dim=DIM, **more,
    )  # fmt: skip


def authors(pre=True, **more):
    """The arguments of the authors' published code."""
    given = {
        "weight_type": "scalar", "init_value": "avg", "normalize_learned_weight": False,
        "history_dropout": 0.0, "history_window_size": -1, "encoder_learnable": True,
        "normalize_embed": False,
    }  # fmt: skip
    return args(None, pre, **given | more)


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


CASES = [
    ("learnable_dense", True, {}),
    ("learnable_dense", False, {}),
    ("learnable_dense_nonorm", True, {}),
    ("residual", True, {}),
    *(("dense", pre, {"window": w, "total": t})
      for pre in (True, False) for w in (-1, 1, 3) for t in (True, False)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "pre", "options"), CASES)
def test_layer_history(kind, pre, options):
    more = {"encoder_windows_size": options.get("window", -1)}
    if options.get("total"):
        more["encoder_integration_type"] = "sum"
    ours, literal = CreateLayerHistory(args(kind, pre, **more), True), Literal(kind, pre, **options)
    assert ours.state_dict().keys() == literal.state_dict().keys()
    torch.testing.assert_close(dict(ours.state_dict()), dict(literal.state_dict()), rtol=0, atol=0)
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
    given = authors(
        pre, weight_type=weight_type, init_value=init, normalize_learned_weight=softmax,
        normalize_embed=embed,
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
    given = authors(history_dropout=0.5, encoder_learnable=False)
    history = DynamicLinearCombination(given, True, include_sublayer=True)
    assert history.weight.shape == (2 * LAYERS + 1, 2 * LAYERS + 1, 1)
    assert not history.weight.requires_grad
    history.clean()
    history.push(torch.ones(50, DIM))
    assert set(history.pop().flatten().tolist()) == {0.0, 2.0}
    assert torch.equal(history.eval().pop(), torch.ones(50, DIM))


@pytest.mark.parametrize(
    "make", [lambda: DWAModules(2, 2, 2), lambda: CreateLayerHistory(args("learnable_dense"), True)]
)
def test_compiles(make, monkeypatch):
    monkeypatch.setitem(globals(), "LAYERS", 2)
    model, x = Stack(make()), torch.randn(SHAPE)
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))


def dwa(block_idx, start=True):
    """A call of DenseFormer's module."""
    averages = DWAModules(2)
    if start:
        averages.init_accumulators(torch.zeros(1, 4))
    averages(torch.zeros(1, 4), block_idx=block_idx)


def history(kind, pre=True, start=False):
    """A call of a layer history that `clean` has started or not."""
    made = CreateLayerHistory(args(kind, pre), True)
    if start:
        made.clean()
        made.pop()
    made.add(torch.zeros(1, DIM))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: DWAModules(2, period=3), ValueError, r"period=3 must be at most n_blocks=2"),
        (lambda: dwa(0, start=False), RuntimeError, r"call init_accumulators\(x\) at the start"),
        (lambda: dwa(1), RuntimeError, "called out of order: expected index 1, got 2"),
        (lambda: dwa("0"), ValueError, "block_idx must be an integer of at least -1, got"),
        (lambda: history("gru"), ValueError, "must be one of .*, got 'gru'"),
        (lambda: history("residual", False), ValueError, "'residual' is not a sum of layers in p"),
        (lambda: history("learnable_dense_nonorm", False), ValueError,
         "needs encoder_normalize_before"),
        (lambda: history("learnable_dense"), RuntimeError, r"call clean\(\) at the start"),
        (lambda: history("learnable_dense", start=True), RuntimeError,
         r"call add\(x\) before pop\(\)"),
        (lambda: DynamicLinearCombination(authors(history_window_size=3), True), ValueError,
         "the authors' code"),
        (lambda: DynamicLinearCombination(authors(False, normalize_embed=True), True), ValueError,
         "the authors' code"),
    ],
)  # fmt: skip
def test_refuses(call, error, words):
    with pytest.raises(error, match=words):
        call()
