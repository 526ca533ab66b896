"""What a layer reads when backward runs it again: as in forward, or an error."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import deepfast
from tests.attach import models
from tests.attach.models import Block, X

AGAIN = ["layer", "layer+input"]


class InPlace(Block):
    def forward(self, x):
        return super().forward(x.mul_(2))


class Counting(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(models.D)

    def forward(self, x):
        return x + self.linear(self.norm(x.flatten(0, 1)).view_as(x))


@dataclass
class Context:
    """What a loop tells its layers."""

    scale: object = 1.0


def table_of(context):
    """The dict or list with the values, and the name of the scale in it."""
    if isinstance(context, list):
        return context, 0
    return context if isinstance(context, dict) else vars(context), "scale"


class Told(Block):
    def forward(self, x, context):
        table, name = table_of(context)
        return x + self.linear(self.norm(x) * table[name]).tanh()


def tells(context, value):
    """A loop that changes what its layers read from an argument before each of them."""

    def run(blocks, x):
        told = context()
        table, name = table_of(told)
        for k, block in enumerate(blocks):
            table[name] = value(1.0 + k)
            x = block(x, told)
        return x

    return models.Loop(run, layer=Told)


@pytest.mark.parametrize("recompute", AGAIN)
@pytest.mark.parametrize("value", [float, torch.tensor])
@pytest.mark.parametrize("context", [dict, lambda: [1.0], Context])
def test_what_a_loop_changes_in_an_argument_is_an_error(context, value, recompute):
    model = tells(context, value)
    deepfast.connect(model, "blocks", norm="pre", recompute=recompute)
    out = model(X)
    with pytest.raises(
        RuntimeError, match=r"recompute policy: (scale|0) of a Told or its arguments"
    ):
        out.sum().backward()


class Tells(Told):
    """A layer that replaces what it reads in its argument, and adds to a loss there."""

    def forward(self, x, context):
        table, name = table_of(context)
        table[name] = table[name] + 1.0
        y = super().forward(x, context)
        if isinstance(table, dict):
            table["loss"] = table.get("loss", 0.0) + y.mean()
        return y


@pytest.mark.parametrize("recompute", AGAIN)
@pytest.mark.parametrize("context", [lambda: {"scale": 1.0}, lambda: [1.0], Context])
def test_what_a_layer_replaces_in_an_argument_is_as_in_forward(context, recompute):
    def run(blocks, x):
        told = context()
        for block in blocks:
            x = block(x, told)
        table, _ = table_of(told)
        return x + table["loss"] if isinstance(table, dict) else x

    results = []
    for each in ("none", recompute):
        torch.manual_seed(1)
        model = models.Loop(run, layer=Tells)
        deepfast.connect(model, "blocks", norm="pre", recompute=each)
        model(X).sin().sum().backward()
        results.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*results)


class Tied(Block):
    """A layer that reads a weight of its parent."""

    def __init__(self):
        super().__init__()
        self.parent = []

    def forward(self, x):
        return super().forward(x @ self.parent[0])


@pytest.mark.parametrize("recompute", ["none", *AGAIN])
def test_another_module_s_weight_modified_in_place_is_an_error(recompute):
    model = models.Loop(layer=Tied)
    model.weight = nn.Parameter(torch.eye(models.D))
    for block in model.blocks:
        block.parent.append(model.weight)
    deepfast.connect(model, "blocks", norm="pre", recompute=recompute)
    out = model(X)
    with torch.no_grad():
        model.weight.mul_(2)
    again = r"0 of a Tied .* expected the same tensor \(32, 32\), got one that was changed"
    expected = "modified by an inplace operation" if recompute == "none" else again
    with pytest.raises(RuntimeError, match=expected):
        out.sum().backward()


class Choosing(Block):
    """A layer with attributes of several kinds, which decide what it computes."""

    def __init__(self):
        super().__init__()
        self.function, self.factors, self.options = torch.tanh, [1.0], {"shifts": [0.5, (2, 3.0)]}

    def forward(self, x):
        y = self.function(self.linear(self.norm(x) * self.factors[0]))
        return x + y + self.options["shifts"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: setattr(b, "function", torch.relu), r"function of .* expected <built-in met"),
        (lambda b: b.factors.__setitem__(0, 2.0), r"0 of .* expected 1\.0, got 2\.0"),
        (lambda b: b.options["shifts"].__setitem__(0, 2.0), r"0 of .* expected 0\.5, got 2\.0"),
        (lambda b: b.options["shifts"].pop(), r"1 of .* expected \(2, 3\.0\), got "),
        (lambda b: b.linear.weight.requires_grad_(False),
         r"linear\.weight of .* expected requires_grad True, got False"),
        (lambda b: torch.nn.init.zeros_(b.linear.weight),
         r"linear\.weight of .* expected the same tensor .*, got one that was changed in place"),
        (lambda b: setattr(b, "norm", nn.LayerNorm(models.D)),
         r"norm of .* expected LayerNorm.*, got another one, LayerNorm"),
        (lambda b: b.eval(), r"training of .* expected True, got False"),
    ],
)  # fmt: skip
def test_a_layer_that_is_another_one_in_backward_is_an_error(change, said):
    model = models.Loop(layer=Choosing)
    deepfast.connect(model, "blocks", norm="pre", recompute="layer")
    out = model(X)
    change(model.blocks[1])
    with pytest.raises(RuntimeError, match=f"recompute policy: {said}"):
        out.sum().backward()


def test_a_tensor_that_a_loop_changes_in_place_is_an_error():
    scale = torch.ones(())
    model = tells(lambda: Context(scale), scale.fill_)
    deepfast.connect(model, "blocks", norm="pre", recompute="layer")
    out = model(X)
    with pytest.raises(RuntimeError, match="scale of a Told or its arguments"):
        out.sum().backward()


def test_layers_that_cannot_run_again():
    for recompute in AGAIN:
        model = nn.Sequential(Block(), InPlace())
        deepfast.connect(model, norm="pre", recompute=recompute)
        with pytest.raises(RuntimeError, match=r"layer 1 of Sequential modifies its input in pl"):
            model(X)
        model = nn.Sequential(Counting(), Counting())
        deepfast.connect(model, norm="pre", dim=models.D, recompute=recompute)
        out = model(X)
        with pytest.raises(RuntimeError, match=r"\w+ of a Counting .* has been modified since"):
            out.sum().backward()
