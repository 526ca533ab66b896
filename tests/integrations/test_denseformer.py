"""DWAModules against the formula of the authors' module, written out."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepfast.integrations import DWAModules

BLOCKS, SHAPE = 7, (2, 3, 8)


class Literal(nn.Module):
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


class Model(nn.Module):
    """As in the authors' README."""

    def __init__(self, dwa):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(SHAPE[-1], SHAPE[-1]) for _ in range(BLOCKS))
        self.dwa = dwa

    def forward(self, x, checkpointed=False):
        self.dwa.init_accumulators(x)
        for i, block in enumerate(self.blocks):
            y = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            x = self.dwa(x + torch.tanh(y), block_idx=i)
        return x


def pair(dilation, period):
    """Our model and the literal one, with the same random weights: their names are the same."""
    ours, literal = (Model(c(BLOCKS, dilation, period)) for c in (DWAModules, Literal))
    with torch.no_grad():
        for p in literal.parameters():
            p.add_(0.3 * torch.randn_like(p))
    ours.load_state_dict(literal.state_dict())
    return ours, literal


def results(model, x, **options):
    out = model(x, **options)
    grads = torch.autograd.grad(out.sin().sum(), [x, *model.parameters()])
    return [out, *grads]


@pytest.mark.parametrize("dilation", [1, 2, 3, 4])
@pytest.mark.parametrize("period", [1, 2, 5])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_is_the_formula(dilation, period, checkpointed):
    models = pair(dilation, period)
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        got, want = (results(m.double(), x, checkpointed=checkpointed) for m in models)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("dilation", "period"), [(1, 1), (4, 5)])
def test_begins_as_the_plain_model(dilation, period):
    model = Model(DWAModules(BLOCKS, dilation, period))
    x = plain = torch.randn(SHAPE)
    for block in model.blocks:
        plain = plain + torch.tanh(block(plain))
    assert torch.equal(model(x), plain)
    assert model.state_dict().keys() == Model(Literal(BLOCKS, dilation, period)).state_dict().keys()


def test_frozen_averages_and_two_passes_at_once():
    ours, literal = (m.double() for m in pair(2, 1))
    for p in (*ours.dwa.parameters(), *literal.dwa.parameters()):
        p.requires_grad_(False)
    xs = [torch.randn(SHAPE, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    found = []
    for model in (ours, literal):
        outs = [model(x) for x in xs]
        found.append(torch.autograd.grad(sum(out.sin().sum() for out in outs), xs))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_copies_pickles_and_compiles():
    ours, literal = pair(2, 2)
    x = torch.randn(SHAPE)
    ours(x)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(twin(x), literal(x))
    torch.testing.assert_close(torch.compile(ours, backend="eager")(x), literal(x))


def test_refuses():
    with pytest.raises(ValueError, match=r"period=3 must be at most n_blocks=2"):
        DWAModules(2, period=3)
    with pytest.raises(RuntimeError, match=r"call init_accumulators\(x\) at the start"):
        DWAModules(2)(torch.zeros(1, 4), block_idx=0)
    dwa = DWAModules(2)
    dwa.init_accumulators(torch.zeros(1, 4))
    with pytest.raises(RuntimeError, match="called out of order: expected index 1, got 2"):
        dwa(torch.zeros(1, 4), block_idx=1)
    with pytest.raises(ValueError, match="block_idx must be a whole number of at least -1, got"):
        dwa(torch.zeros(1, 4), block_idx="0")
