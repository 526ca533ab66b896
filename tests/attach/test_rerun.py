"""What a layer reads when backward runs it again: as in forward, or an error."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import deepfast
from tests.attach.models import AGAIN, Block, D, Loop, X


@dataclass
class Context:
    """What a loop tells its layers."""

    scale: object = 1.0


class Reading(Block):
    """A layer that reads attributes of several kinds, another module's weight, and an argument."""

    def __init__(self):
        super().__init__()
        self.function, self.factors, self.options = torch.tanh, [1.0], {"shifts": [0.5, (2, 3.0)]}
        self.parent = [nn.Parameter(torch.eye(D))]

    def forward(self, x, *told):
        for context in told:
            x = x * (vars(context) if isinstance(context, Context) else context)["scale"]
        y = self.function(self.linear(self.norm(x @ self.parent[0]) * self.factors[0]))
        return x + y + self.options["shifts"][0]


TOLD = r"scale of a Reading or its arguments"
CHANGES = [
    (lambda b, _: setattr(b, "function", torch.relu), r"function of .* expected <built-in met"),
    (lambda b, _: b.factors.__setitem__(0, 2.0), r"0 of .* expected 1\.0, got 2\.0"),
    (lambda b, _: b.options["shifts"].__setitem__(0, 2.0), r"0 of .* expected 0\.5, got 2\.0"),
    (lambda b, _: b.options["shifts"].pop(), r"1 of .* expected \(2, 3\.0\), got "),
    (lambda b, _: b.linear.weight.requires_grad_(False),
     r"linear\.weight of .* expected requires_grad True, got False"),
    (lambda b, _: nn.init.zeros_(b.linear.weight),
     r"linear\.weight of .* expected the same tensor .*, got one that was changed in place"),
    (lambda b, _: nn.init.zeros_(b.parent[0]),
     r"0 of a Reading .* expected the same tensor \(32, 32\), got one that was changed"),
    (lambda b, _: setattr(b, "norm", nn.LayerNorm(D)),
     r"norm of .* expected LayerNorm.*, got another one, LayerNorm"),
    (lambda b, _: b.eval(), r"training of .* expected True, got False"),
    (lambda b, told: told[0].__setitem__("scale", 2.0), TOLD),
    (lambda b, told: told[0].__setitem__("scale", torch.ones(())), TOLD),
    (lambda b, told: setattr(told[1], "scale", 2.0), TOLD),
    (lambda b, told: told[1].scale.fill_(2), TOLD),
]  # fmt: skip


@pytest.mark.parametrize("recompute", AGAIN)
@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_a_layer_that_is_another_one_in_backward_is_an_error(change, said, recompute):
    told = {"scale": 1.0}, Context(torch.ones(()))

    def run(blocks, x):
        for block in blocks:
            x = block(x, *told)
        return x

    model = Loop(run, layer=Reading)
    deepfast.connect(model, norm="pre", recompute=recompute)
    out = model(X)
    change(model.blocks[1], told)
    with pytest.raises(RuntimeError, match=f"recompute policy: {said}"):
        out.sum().backward()


class Tells(Block):
    """A layer that replaces what it reads in its argument, and adds to a loss there."""

    def forward(self, x, told):
        table = vars(told) if isinstance(told, Context) else told
        table["scale"] = table["scale"] + 1.0
        y = x + self.linear(self.norm(x) * table["scale"]).tanh()
        table["loss"] = table.get("loss", 0.0) + y.mean()
        return y


@pytest.mark.parametrize("context", [lambda: {"scale": 1.0}, Context])
def test_what_a_layer_replaces_in_an_argument_is_as_in_forward(context):
    def run(blocks, x):
        told = context()
        for block in blocks:
            x = block(x, told)
        return x + (told["loss"] if isinstance(told, dict) else told.loss)

    results = []
    for recompute in ("none", *AGAIN):
        torch.manual_seed(1)
        model = Loop(run, layer=Tells)
        deepfast.connect(model, norm="pre", recompute=recompute)
        model(X).sin().sum().backward()
        results.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(results[1:], [results[0]] * 2)


class InPlace(Block):
    def forward(self, x):
        return super().forward(x.mul_(2))


class Counting(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x):
        return x + self.linear(self.norm(x.flatten(0, 1)).view_as(x))


@pytest.mark.parametrize("recompute", AGAIN)
def test_layers_that_cannot_run_again(recompute):
    model = nn.Sequential(Block(), InPlace())
    deepfast.connect(model, norm="pre", recompute=recompute)
    with pytest.raises(RuntimeError, match=r"layer 1 of Sequential modifies its input in place"):
        model(X)
    model = nn.Sequential(Counting(), Counting())
    deepfast.connect(model, norm="pre", dim=D, recompute=recompute)
    out = model(X)
    with pytest.raises(RuntimeError, match=r"\w+ of a Counting .* has been modified since"):
        out.sum().backward()
