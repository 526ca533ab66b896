"""An encoder in stages, run one after another in one process, agrees with the whole encoder."""

import functools
import gc
import weakref

import pytest
import torch

from deepfast.memory import POLICIES
from deepfast.nn import AttentionResiduals, TransformerEncoder
from deepfast.parallel import split
from tests.parallel.encoders import (
    CONNECTIONS,
    DIM,
    batch,
    encoder,
    gradients,
    loss,
    run,
    staged_step,
    whole_step,
)


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-12, atol=1e-12, msg=key)


@pytest.mark.parametrize(("layers", "stages"), [(4, 2), (4, 4), (7, 3), (6, [1, 4, 1])])
@pytest.mark.parametrize("name", CONNECTIONS)
def test_float64(name, layers, stages):
    got, expected = (
        step(encoder(layers, torch.float64, **CONNECTIONS[name]), *batch(dtype=torch.float64))
        for step in (functools.partial(staged_step, stages), whole_step)
    )
    assert_same(got, expected)


@pytest.mark.each_value
@pytest.mark.parametrize("recompute", POLICIES)
@pytest.mark.parametrize("name", ["dlcl", "dlcl, post-norm", "attnres", "attnres, one read"])
def test_memory_policies(name, recompute):
    """A policy changes no bit of a stage."""
    kept, got = (
        staged_step(3, encoder(5, recompute=policy, **CONNECTIONS[name]), *batch())
        for policy in ("none", recompute)
    )
    for key, value in kept.items():
        assert torch.equal(got[key], value), key


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(
    "options",
    [{"score_function": "relu"}, {"norm_affine": True, "scale": 0.7}, {"window": 4}, {"block": 2}],
    ids=str,
)
def test_other_attention_residuals(options, stages):
    """A connection that was put into the encoder by hand."""

    def model():
        made = encoder(5, torch.float64, connection="attnres")
        generator = torch.Generator().manual_seed(1)
        made.connection.residuals = AttentionResiduals(
            5, DIM, reads=2, state_dtype=None, **options
        ).double()
        with torch.no_grad():
            for p in made.connection.residuals.parameters():
                p += 0.3 * torch.randn(p.shape, generator=generator)
        return made

    operands = batch(dtype=torch.float64)
    assert_same(staged_step(stages, model(), *operands), whole_step(model(), *operands))


def test_policies_of_layers():
    recompute = ["none", "ffn", "ffn+qkv", "layer", "layer+input"]
    stages = split(encoder(5, recompute=recompute), 2)
    assert [len(stage.layers) for stage in stages] == [3, 2]
    assert [stage.policies for stage in stages] == [tuple(recompute[:3]), tuple(recompute[3:])]


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["dlcl", "attnres"])
def test_backends(any_backend, tolerances, name):
    options = CONNECTIONS[name]
    got = staged_step(2, encoder(3, backend=any_backend, **options), *batch())
    plain = whole_step(encoder(3, backend=any_backend, **options), *batch())
    exact = whole_step(encoder(3, torch.float64, **options), *batch(dtype=torch.float64))
    tolerances.assert_all_accurate(got, plain, exact, torch.float32)


@pytest.mark.parametrize("name", ["dlcl", "attnres"])
def test_autocast(name):
    """Under autocast states and sums cross in 16 bits."""
    model = encoder(6, **CONNECTIONS[name])
    x, target, padding = batch()
    with torch.autocast("cpu", torch.bfloat16):
        whole = model(x, padding)
        out, crossed = run(split(model, 3), x, padding)
        loss(out, target).backward()
    assert {t.dtype for payload in crossed for t in payload[:2]} == {torch.bfloat16}
    torch.testing.assert_close(out, whole, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", ["dlcl", "attnres"])
def test_without_gradients(name):
    model = encoder(5, **CONNECTIONS[name]).eval()
    x, _, padding = batch()
    with torch.no_grad():
        out, _ = run(split(model, 3), x, padding)
        torch.testing.assert_close(out, model(x, padding), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dlcl", "dlcl, post-norm", "attnres"])
@pytest.mark.parametrize("frozen", ["connection.", "layers.", "connection.norms", "layers.0"])
def test_frozen_parameters(name, frozen):
    def model():
        made = encoder(5, torch.float64, **CONNECTIONS[name])
        for key, p in made.named_parameters():
            p.requires_grad_(not key.startswith(frozen))
        return made

    x, target, padding = batch(dtype=torch.float64)
    whole, parts = model(), split(model(), 3)
    loss(whole(x, padding), target).backward()
    loss(run(parts, x, padding)[0], target).backward()
    got = gradients(parts)
    expected = {key: p.grad for key, p in whole.named_parameters() if p.grad is not None}
    assert_same(got, expected)


def test_checkpoint_of_the_whole_and_back():
    whole = encoder(7).state_dict()
    stages = split(encoder(7, seed=1), 3)
    for stage in stages:
        stage.load_state_dict({name: whole[name] for name in stage.state_dict()})
    again = {name: p for stage in stages for name, p in stage.state_dict().items()}
    assert again.keys() == whole.keys()
    encoder(7, seed=2).load_state_dict(again)
    assert all(torch.equal(again[name], whole[name]) for name in whole)


@pytest.mark.parametrize("name", ["dlcl", "attnres"])
def test_nothing_is_alive_after_the_step(name):
    stages = split(encoder(5, **CONNECTIONS[name]), 3)
    x, target, padding = batch()
    out, crossed = run(stages, x, padding)
    loss(out, target).backward()
    refs = [weakref.ref(t.untyped_storage()) for payload in crossed for t in payload]
    gc.disable()
    del out, crossed
    assert not any(ref() for ref in refs)
    gc.enable()


def test_a_second_backward_is_an_error():
    x, target, padding = batch()
    found = loss(run(split(encoder(5), 3), x, padding)[0], target)
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gradients have overwritten them"):
        found.backward()


def test_dropout():
    """Its masks are drawn from the seed, and backward uses those of forward."""

    def step(recompute):
        torch.manual_seed(7)
        return staged_step(2, encoder(5, dropout=0.3, recompute=recompute), *batch())

    first = step("none")
    assert all(torch.equal(first[key], value) for key, value in step("layer+input").items())
    whole = whole_step(encoder(5, dropout=0.0), *batch())
    assert not torch.allclose(first["loss"], whole["loss"])


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_memory(meter, index):
    """Under "layer+input" a stage in flight holds the states that came in and its own, one slot
    more, and what it sends: as many as are counted, beside what grows with the number of tokens
    alone."""
    torch.manual_seed(0)
    model = TransformerEncoder(16, 64, 2, 64, dropout=0.0, recompute="layer+input")
    stages = split(model, 4)
    x = torch.randn(1, 512, 64)
    payload = (x,)
    for stage in stages[:index]:
        payload = tuple(t.detach().requires_grad_() for t in stage(*payload))
    stage = stages[index]
    stage(*payload)
    with meter() as counted:
        sent = stage(*payload)
    depth = stage.connection.depth
    made = len(sent) if isinstance(sent, tuple) else 1
    if stage.above is not None and stage.above.kind == "sums":
        made = stage.above.tensors
    elif stage.above is not None:
        made -= len(payload) if stage.below is not None else 0
    expected = depth.rows + 1 + made
    assert counted.left == pytest.approx(expected * x.nbytes, rel=0.08)
