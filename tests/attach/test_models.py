"""Models of every kind, connected, against the literal loop around the same layers or sublayers: a
list of states, and each input summed from it in plain PyTorch."""

import copy
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepfast
from deepfast.attach import passes
from deepfast.reference.depth_mix import dlcl
from tests.attach import layers, models
from tests.attach.layers import BOTH, NAMES, SUMS, Checkpointed, TwoParts, connected, literal
from tests.attach.models import CASES, READS, SUBLAYERS, X, assert_same, gradients, perturbed
from tests.specifications import attention_residuals


def mixed(states, c):
    """The row of connection c from all states."""
    row = len(states) - 1
    if hasattr(c, "query"):
        return attention_residuals.block(states, c.query, row, c.block or 1)
    return dlcl(
        states, row, c.weight, norm=c.norm, norm_weight=c.norm_weight, norm_bias=c.norm_bias,
        eps=c.eps, rms=c.norm_type == "rms",
    )  # fmt: skip


def make_literal(loop, connection):
    """Hooks of the layers replace the input of the first one and each output."""
    states = []

    def begin(_layer, args):
        states[:] = [args[0]]
        return (mixed(states, connection), *args[1:])

    def push(_layer, args, result):
        y = result[0] if isinstance(result, tuple) else result
        states.append(y - args[0] if hasattr(connection, "query") else y)
        y = mixed(states, connection)
        return (y, *result[1:]) if isinstance(result, tuple) else y

    loop[0].register_forward_pre_hook(begin)
    for layer in loop:
        layer.register_forward_hook(push)


def of_literal_loop(case, connected):
    """`gradients` of the model with the literal loop, by the names in ``connected``."""
    model = copy.deepcopy(connected)
    connections, named = case.connections(model), dict(model.named_parameters())
    case.disconnect(model)
    for (parent, name), connection in zip(case.places(model), connections, strict=True):
        make_literal(parent.get_submodule(name), connection)
    found = gradients(model, case.run(model))
    return found | {n: p.grad for n, p in named.items() if p.grad is not None}


@pytest.mark.parametrize(("name", "options"), [
    *((name, {}) for name in CASES if name not in SUBLAYERS),
    ("torch pre-norm", {}),
    ("llama", {}),
    *((name, READS) for name in SUBLAYERS),
    *((name, {"connection": "attnres"}) for name in ("torch pre-norm", "llama")),
    ("torch pre-norm", {"connection": "block_attnres", "block": 2}),
    ("torch post-norm", {"connection": "denseformer"}),
    ("torch post-norm", {"norm_type": "rms"}),
])  # fmt: skip
def test_models_whose_layers_run_once_and_again(name, options, monkeypatch):
    """The gradients of the literal loop; also if backward runs layers again, under a policy to the
    bit where layers read once. The checkpointing of transformers is of no use beside a policy, but
    right; sublayers that read refuse that. `test_the_known_sublayers` has the values of theirs."""
    # Every policy then sums in the same order.
    monkeypatch.setattr(passes, "block", lambda recompute, rows: 2)
    case = CASES[name]
    model = case.connected(**options)
    literally = None if options == READS else of_literal_loop(case, model)
    wanted = gradients(model, case.run(model))
    assert_same(wanted, literally or wanted)

    def check(model, run=case.run, tolerance=1e-5):
        assert_same(gradients(model, run(model)), wanted, tolerance)

    check(model, partial(checkpoint, case.run, use_reentrant=False))
    for recompute, checkpoints in (("none", (0, 1)), ("layer", ()), ("layer+input", (0,))):
        again = case.connected(**options, recompute=recompute)
        if recompute != "none":
            check(again, tolerance=1e-5 if options == READS else 0)
        for reentrant in checkpoints if hasattr(again, "gradient_checkpointing_enable") else ():
            # Its inputs must need gradients.
            again.enable_input_require_grads()
            again.gradient_checkpointing_enable({"use_reentrant": bool(reentrant)})
            if options == READS and (reentrant or recompute != "none"):
                with pytest.raises(RuntimeError, match="use_reentrant=False"):
                    check(again)
            else:
                check(again)


def grads_and_output(out, named):
    named = {n: p for n, p in named.items() if p.requires_grad}
    grads = torch.autograd.grad(out.square().mean(), [*named.values()], materialize_grads=True)
    return {"output": out.detach(), **dict(zip(named, grads, strict=True))}


@pytest.mark.parametrize(("name", "options"), [
    *((name, {"connection": "denseformer"}) for name in CASES),
    *((name, models.GATED) for name in SUBLAYERS),
])  # fmt: skip
def test_pretrained_weights_keep_their_meaning(name, options):
    """DenseFormer and gates begin as the plain model, to the bit."""
    case = CASES[name]
    model = perturbed(case.make()).bfloat16()
    plain = case.run(model)
    case.connect(model, **options)
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


@pytest.mark.parametrize(("name", "options"), [
    *((name, {"score_function": "relu"}) for name in SUBLAYERS),
    *((name, {"additive": "gated"}) for name in ("torch pre-norm", "gpt_neox", "t5")),
])  # fmt: skip
def test_the_known_sublayers(name, options):
    """The rows are at first the residual stream, so the gradients are those of the plain model:
    each state is what its sublayer adds, also with dropout, and each norm gets its row."""
    case, outputs = CASES[name], []
    plain = perturbed(case.make()).double()
    model = copy.deepcopy(plain)
    made = case.connect(model, **READS, **options)
    assert {c.reads for c in made} == {"gpt_neox": {1}, "t5": {2, 3}}.get(name, {2})
    for prepare in (lambda model: model, drop):
        found = []
        for run in (plain, model.double()):
            torch.manual_seed(5)
            out = case.run(prepare(run))
            found.append(grads_and_output(out, dict(run.named_parameters())))
        new = {n: found[1].pop(n) for n in found[1].keys() - found[0].keys()}
        torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)
        # Of each row; the queries' are zeros where the rows come to a gate of zero.
        of_rows = [grad.view(len(grad), -1) for n, grad in new.items() if "query" not in n]
        assert len(of_rows) == len(made)
        assert all(grad.any(1).all() for grad in of_rows)
        outputs.append(found[1]["output"])
    assert not torch.allclose(*outputs)


@pytest.mark.parametrize(("name", "options", "beams"), [
    ("bart", {}, 3), ("t5", READS, 1), ("llama", READS, 3),
])  # fmt: skip
def test_generation_with_a_cache(name, options, beams):
    """The same tokens come out as without the cache of keys and values."""
    model = CASES[name].connected(**options).eval()
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "num_beams": beams, "do_sample": False}
    cached = model.generate(models.ids(), use_cache=True, **options)
    assert torch.equal(cached, model.generate(models.ids(), use_cache=False, **options))


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


def assert_literal(model):
    """Output and gradients of a connected model are those of the literal loop."""
    x, plain = X.double().requires_grad_(), copy.deepcopy(model)
    connection, named = plain.depth_connection, dict(plain.named_parameters())
    deepfast.disconnect(plain)
    gamma = getattr(connection, "gamma", None)
    if hasattr(connection, "gamma") and gamma is None:
        gamma = torch.ones(connection.rows)
    wanted = grads_and_output(literal(plain, x, connection.query, gamma), named | {"x": x})
    got = grads_and_output(model(x), dict(model.named_parameters()) | {"x": x})
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


ONE, GATES, AGAIN = {"additive": "one"}, {"additive": "gated"}, {"recompute": "layer"}
BY_KEYWORD = models.does(
    lambda m, x: (h := x + m.attn(m.norm1(input=x))) + m.mlp(m.norm2(input=h)), layers.AddsInPlace
)
CHECKPOINTED = [
    Checkpointed,
    *(partial(layers.CheckpointedParts, *again) for again in ((1, 1), (1, 0), (0, 1))),
]


@pytest.mark.parametrize(("layer", "names", "options"), [
    (TwoParts, NAMES, {"recompute": "layer+input"}),
    *((layers.SideBySide, [(("norm1", "norm2"), None)], options) for options in ({}, GATES)),
    (layers.AddsInPlace, BOTH, {}),
    (BY_KEYWORD, BOTH, {}),
    # Disconnecting the model leaves those in its layers connected.
    (layers.Nested, NAMES, {}),
    *((layer, NAMES, options) for layer in CHECKPOINTED for options in ({}, GATES)),
    *((TwoParts, NAMES, options) for options in ({}, AGAIN, ONE, GATES, GATES | AGAIN)),
    *((TwoParts, SUMS, options) for options in ({}, GATES | AGAIN)),
    *((layers.Flat, names, options)
      for names in (NAMES, SUMS) for options in ({}, GATES | AGAIN)),
])  # fmt: skip
def test_sublayers_are_those_of_a_literal_loop(layer, names, options):
    model = connected(layer, names, **options)
    assert_literal(model)
    assert model.blocks.attachment.current.thread.layer_run is None
    # A sublayer alone runs as ever.
    assert model.blocks[0].mlp(X.double()).shape == X.shape


def test_a_layer_that_checkpoints_itself_needs_no_policy():
    with pytest.raises(RuntimeError, match="connect it with recompute='none'"):
        assert_literal(connected(Checkpointed, recompute="layer"))


def test_one_layer_in_all_places():
    assert_literal(connected(cache(TwoParts)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_no_misfit(dtype):
    """The sums of a layer in 16 bits, with large inputs."""
    model = connected().to(dtype)
    for scale in (1, 1000):
        model.depth_connection.query.data.zero_()
        assert model(scale * X.to(dtype)).isfinite().all()
