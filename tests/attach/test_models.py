"""Models of every kind, connected, against the literal loop around the same layers: a list of
states, and each layer's input summed from it in plain PyTorch."""

import copy

import pytest
import torch
from torch import nn

import deepfast
from deepfast.attach import passes
from deepfast.attach.passes import NAME
from deepfast.reference.depth_mix import dlcl
from tests.attach.models import (
    AGAIN,
    CASES,
    GATED,
    PRE_NORM,
    READS,
    SUBLAYERS,
    assert_equal,
    assert_same,
    gradients,
    ids,
    perturbed,
)
from tests.specifications import attention_residuals


class Literal(nn.Module):
    """In place of layer k, with its attributes: runs the layer, then computes the next input."""

    def __init__(self, layer, k, states, connection):
        super().__init__()
        self.inner, self.k, self.states = layer, k, states
        # Its parameters are not the layer's.
        self.connection = [connection]

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def mixed(self):
        c, row = self.connection[0], len(self.states) - 1
        if not hasattr(c, "query"):
            return dlcl(
                self.states, row, c.weight, norm=c.norm, norm_weight=c.norm_weight,
                norm_bias=c.norm_bias, eps=c.eps, rms=c.norm_type == "rms",
            )  # fmt: skip
        if c.block is None:
            return attention_residuals.full(self.states, c.query, row)
        return attention_residuals.block(self.states, c.query, row, c.block)

    def forward(self, x, *args, **kwargs):
        if self.k == 0:
            self.states[:] = [x]
            x = self.mixed()
        result = self.inner(x, *args, **kwargs)
        y = result[0] if isinstance(result, tuple) else result
        self.states.append(y - x if hasattr(self.connection[0], "query") else y)
        y = self.mixed()
        return (y, *result[1:]) if isinstance(result, tuple) else y


def literal_of(case, connected):
    """The model with the literal loop, and its parameters by their names in ``connected``."""
    model = copy.deepcopy(connected)
    connections = case.connections(model)
    case.disconnect(model)
    named = {}
    for (path, parent, layers), connection in zip(case.places(model), connections, strict=True):
        found, states = getattr(parent, layers) if layers else parent, []
        for k, layer in enumerate(found):
            found[k] = Literal(layer, k, states, connection)
        for name, p in connection.named_parameters():
            named[".".join(filter(None, (path, NAME, name)))] = p
    return model, named | {n.replace(".inner.", "."): p for n, p in model.named_parameters()}


def grads_and_output(case, model, named):
    out = case.run(model)
    out.square().mean().backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
    return {"output": out.detach(), **grads}


WAYS = [
    *((name, "dlcl", {}) for name in CASES),
    *((name, "attnres", {}) for name in PRE_NORM),
    ("bert", "dlcl", {"norm_type": "rms"}),
    ("bart", "denseformer", {}),
    ("sequential", "denseformer", {}),
    ("t5", "block_attnres", {"block": 2}),
]


@pytest.mark.parametrize(("name", "kind", "options"), WAYS)
def test_same_as_a_literal_loop(name, kind, options, monkeypatch):
    """With the same gradients to the bit where backward runs the layers again."""
    # Every policy then sums in the same order.
    monkeypatch.setattr(passes, "block", lambda recompute, rows: 2)
    case = CASES[name]
    model = case.connected(kind, **options)
    wanted = grads_and_output(case, *literal_of(case, model))
    assert_same(grads_and_output(case, model, dict(model.named_parameters())), wanted)
    wanted = gradients(model, case.run(model))
    for recompute in AGAIN:
        again = case.connected(kind, recompute=recompute, **options)
        assert_equal(gradients(again, case.run(again)), wanted)


STARTS = [
    *((name, {"connection": "denseformer"}) for name in CASES),
    *((name, GATED) for name in SUBLAYERS),
    *((name, READS | {"score_function": "relu"}) for name in SUBLAYERS),
    ("sequential", {"connection": "attnres", "score_function": "relu"}),
    ("llama", {"connection": "block_attnres", "score_function": "relu"}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), STARTS)
def test_pretrained_weights_keep_their_meaning(name, options, dtype):
    """DenseFormer and gates begin as the plain model to the bit. Attention residuals with ReLU sum
    the residual stream in another order."""
    case = CASES[name]
    model = perturbed(case.make())
    exact = case.run(copy.deepcopy(model).double())
    plain = case.run(model.to(dtype))
    case.connect(model, **options)
    if "score_function" in options:
        error, own = ((out - exact).norm() for out in (case.run(model), plain))
        assert error <= (1.5 if "sublayers" in options else 2) * own
    else:
        assert torch.equal(case.run(model), plain)


def drop(model):
    """Gives every dropout of the model a probability."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
        for name in ("attention_dropout", "dropout_p", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.1)
    return model


@pytest.mark.parametrize("options", [{"score_function": "relu"}, {"additive": "gated"}])
@pytest.mark.parametrize("name", SUBLAYERS)
def test_the_known_sublayers(name, options):
    """The rows are at first the residual stream, so the gradients are those of the plain model:
    each state is what its sublayer adds, also with dropout, and each norm gets its row."""
    case, outputs = CASES[name], []
    plain = perturbed(case.make()).double()
    model = copy.deepcopy(plain)
    made = case.connect(model, **READS, **options)
    assert {c.reads for c in made.values()} == {"gpt_neox": {1}, "t5": {2, 3}}.get(name, {2})
    for prepare in (lambda model: model, drop):
        found = []
        for run in (plain, model.double()):
            run.zero_grad()
            torch.manual_seed(5)
            found.append(grads_and_output(case, prepare(run), dict(run.named_parameters())))
        new = {n: found[1].pop(n) for n in found[1].keys() - found[0].keys()}
        torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)
        # Of each row; the queries' are zeros where the rows come to a gate of zero.
        of_rows = [grad.view(len(grad), -1) for n, grad in new.items() if "query" not in n]
        assert len(of_rows) == len(made)
        assert all(grad.any(1).all() for grad in of_rows)
        outputs.append(found[1]["output"])
    assert not torch.allclose(*outputs)


@pytest.mark.parametrize("name", SUBLAYERS)
def test_sublayers_that_backward_runs_again(name):
    case = CASES[name]
    model = case.connected(**READS)
    wanted = gradients(model, case.run(model))
    whole = torch.utils.checkpoint.checkpoint(case.run, model, use_reentrant=False)
    assert_same(gradients(model, whole), wanted)
    for recompute in AGAIN:
        again = case.connected(**READS, recompute=recompute)
        assert_same(gradients(again, case.run(again)), wanted)


@pytest.mark.parametrize("name", ["sequential", "timm", "bart", "t5", "gpt2"])
def test_only_the_connection_is_new(name):
    case = CASES[name]
    model = case.make()
    names, kinds = set(model.state_dict()), {n: type(m) for n, m in model.named_modules()}
    repr_before = repr(model)
    connections = case.connect(model)
    new = set(model.state_dict()) - names
    assert names <= set(model.state_dict())
    assert all(f"{NAME}." in name for name in new)
    assert len(new) == 3 * len(connections)
    case.disconnect(model)
    assert {n: type(m) for n, m in model.named_modules()} == kinds
    assert repr(model) == repr_before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(("name", "options", "beams"), [
    ("bart", {}, 3), ("t5", {}, 1), ("llama", {}, 3), ("t5", READS, 1), ("gpt2", READS, 1),
    ("gemma2", READS, 1), ("gpt_neox", READS, 1),
])  # fmt: skip
def test_generation_with_a_cache(name, options, beams):
    """The same tokens come out as without the cache of keys and values."""
    model = CASES[name].connected(**options).eval()
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "num_beams": beams, "do_sample": False}
    cached = model.generate(ids(), use_cache=True, **options)
    assert torch.equal(cached, model.generate(ids(), use_cache=False, **options))


def test_features_and_checkpoints_of_timm():
    """Its features come without forward, and it checkpoints the children of its list."""
    model = CASES["timm"].connected()
    x = torch.randn(2, 3, 8, 8)
    after = model.forward_features(x)
    assert torch.equal(model.forward_head(after), model(x))
    wanted = gradients(model, model(x))
    model.set_grad_checkpointing()
    assert_same(gradients(model, model(x)), wanted, 0)
    deepfast.disconnect(model)
    assert not torch.equal(model.forward_features(x), after)
