"""Depth growing: the equations, a frozen bottom that keeps nothing, and decoding step by step."""

from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

from deepfast.mt.models import (
    DepthGrowing,
    DepthGrowingConfig,
    Transformer,
    TransformerConfig,
)
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.models.transformer import sinusoids
from deepfast.mt.training.gradient_norms import GradientNorms
from deepfast.reference.depth_growing import depth_growing
from tests.mt.models.decoding import (
    NEAR,
    SOURCE,
    TARGET,
    assert_hypotheses_reorder,
    assert_steps_equal_forward,
)

SIZES = {"dim": 12, "heads": 3, "ffn_dim": 20, "encoder_layers": 3, "decoder_layers": 2,
         "top_encoder_layers": 2, "top_decoder_layers": 3}  # fmt: skip
LABELS = torch.tensor([[9, 5, 6, 3], [4, 3, 0, 0], [8, 7, 3, 0]])

CASES = {
    "as the paper": {"norm": "post", "encoder_connection": "residual"},
    "as the code": {"norm": "post", "encoder_connection": "residual", "embedding_norm": True},
    "pre, dlcl below": {},
    "pre, dlcl on top": {
        "encoder_connection": "residual", "top_encoder_connection": "dlcl",
        "top_decoder_connection": "dlcl", "top_dlcl": {"weight": "vector", "init": "one"}},
    "pre, dlcl everywhere": {
        "decoder_connection": "dlcl", "top_encoder_connection": "dlcl", "dlcl": {"window": 2},
        "top_decoder_connection": "dlcl", "embedding_norm": True},
}  # fmt: skip
OTHERS = {
    "three embeddings below": {
        "share_embeddings": "none", "first_position": 2, "target_vocab_size": 11,
        "top_encoder_connection": "denseformer"},
}  # fmt: skip
EVERY = pytest.mark.parametrize("case", CASES | OTHERS)


def build(case="pre, dlcl below", **changes):
    """A small model. Its parameters are moved from initial values that could hide a mistake."""
    torch.manual_seed(3)
    model = DepthGrowing(
        DepthGrowingConfig(vocab_size=11, **SIZES | (CASES | OTHERS)[case] | changes)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        model.bottom.embedding.weight[0].zero_()
    return model.eval()


def specified(model, written_out, source, target):
    """Logits of the shallow and of the deep network for one sentence, in plain PyTorch."""
    bottom = model.bottom

    def embedded(tokens):
        positions = sinusoids(torch.arange(len(tokens)), 12).to(bottom.embedding.weight)
        return (bottom.embedding.weight[tokens] * 12**0.5 + positions)[None]

    def encoder(m):
        return lambda x: written_out.naive_encoder(m, x)

    def decoder(m):
        return lambda y, memory: written_out.naive_decoder(m, y, memory)

    def norm(m):
        return lambda x: F.layer_norm(x, (12,), m.weight, m.bias, m.eps)

    norms = None
    if model.config.embedding_norm:
        norms = norm(model.source_norm), norm(model.target_norm)
    states = depth_growing(
        embedded(source), embedded(target), encoder(bottom.encoder), decoder(bottom.decoder),
        encoder(model.encoder), decoder(model.decoder), norms=norms,
    )  # fmt: skip
    return [s[0] @ bottom.embedding.weight.T for s in states]


@pytest.mark.parametrize("case", CASES)
def test_both_networks_are_the_papers_in_float64(case, written_out):
    """Outputs and all gradients of a padded batch equal those of its sentences one by one."""
    model = build(case).double()
    rows = [
        specified(model, written_out, source[source != 0], target[target != 0])
        for source, target in zip(SOURCE, TARGET, strict=True)
    ]
    shallow, deep = (torch.cat(side) for side in zip(*rows, strict=True))
    torch.testing.assert_close(model.bottom(SOURCE, TARGET), shallow, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model(SOURCE, TARGET), deep, rtol=1e-9, atol=1e-9)

    labels = LABELS[TARGET != 0]
    expected = F.cross_entropy(deep, labels, label_smoothing=0.1, reduction="sum")
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert not [name for name in learning if name.startswith("bottom.")]
    gradients = torch.autograd.grad(expected, list(learning.values()), materialize_grads=True)
    loss, nll = model.loss(SOURCE, TARGET, LABELS, 0.1)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert nll.item() == pytest.approx(F.cross_entropy(deep, labels, reduction="sum").item())
    for (name, p), gradient in zip(learning.items(), gradients, strict=True):
        got = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(got, gradient, rtol=1e-8, atol=1e-9, msg=name)
    assert all(p.grad is None for p in model.bottom.parameters())


def test_the_bottoms_own_projection_gives_the_logits():
    model = build(next(iter(OTHERS)))
    bottom = model.bottom
    with torch.no_grad():
        x, packing = bottom.embed_source(SOURCE)
        y, target = bottom.embed_target(TARGET)
        h1 = bottom.encoder.forward_packed(x, packing)
        h2 = model.encoder.forward_packed(x + h1, packing)
        s1 = bottom.decoder.forward_packed(y, target, h1, packing)
        s2 = model.decoder.forward_packed(y + s1, target, h2, packing)
        assert torch.equal(model(SOURCE, TARGET), s2 @ bottom.output.weight.T)


def test_gradcheck_of_the_tops_parameters():
    model = build("as the code").double()
    names = ["source_norm.weight", "target_norm.bias", "encoder.layers.0.attention.out.bias",
             "decoder.layers.0.cross_attention.query.bias"]  # fmt: skip
    values = [model.get_parameter(name).detach().clone().requires_grad_() for name in names]

    def loss(*values):
        parameters = dict(zip(names, values, strict=True))
        return torch.func.functional_call(model, parameters, (SOURCE, TARGET)).square().mean()

    assert torch.autograd.gradcheck(loss, values)


def test_blocks_of_attention_residuals_are_each_network_s_own():
    own = {"encoder_connection": "block_attnres", "top_decoder_connection": "block_attnres"}
    for below, above, expected in ((2, None, 2), (2, 3, 3), (None, 1, 1)):
        config = DepthGrowingConfig(
            vocab_size=11, **SIZES | own, attnres_block=below, top_attnres_block=above
        )
        model = DepthGrowing(config)
        assert model.decoder.connection.residuals.block == expected
        assert model.decoder.connection.reads == 3
        assert model.bottom.encoder.connection.residuals.block == (below or 1)


@EVERY
def test_decoding_step_by_step_equals_forward(case):
    assert_steps_equal_forward(build(case), **NEAR)


@EVERY
def test_reordered_hypotheses_keep_both_encoders(case):
    assert_hypotheses_reorder(build(case), **NEAR)


@EVERY
def test_the_bottom_is_the_transformer_that_was_trained(case):
    model = build(case)
    before = Transformer(model.config.bottom).eval()
    before.load_state_dict(model.bottom.state_dict())
    assert type(before.config) is TransformerConfig
    with torch.no_grad():
        assert torch.equal(before(SOURCE, TARGET), model.bottom(SOURCE, TARGET))


@pytest.mark.parametrize("bottom_dropout", [False, True])
def test_the_bottom_costs_no_activation_memory(meter, bottom_dropout):
    """Bytes that live between forward and backward, with a bottom of 1 and of 12 layers."""

    def kept(**changes):
        model = build(bottom_dropout=bottom_dropout, **changes).train()
        # DLCL makes its pattern in the first forward.
        model.loss(SOURCE, TARGET, LABELS, 0.1)
        with meter() as found:
            loss, _ = model.loss(SOURCE, TARGET, LABELS, 0.1)
        loss.backward()
        return found.left

    one = kept(encoder_layers=1, decoder_layers=1)
    assert kept(encoder_layers=12, decoder_layers=12) == one
    # A layer of the top keeps at least 8 states of 10 tokens.
    assert kept(encoder_layers=1, decoder_layers=1, top_encoder_layers=3) > one + 4 * 8 * 10 * 12


def test_dropout_is_in_the_top_alone_unless_it_is_wanted():
    model = build(dropout=0.4)
    for mode, below in ((True, False), (False, False)):
        model.train(mode)
        assert {m.training for m in model.bottom.modules()} == {below}
        assert model.encoder.training == mode
    seen = {}
    stack = model.bottom.encoder.forward_packed
    model.bottom.encoder.forward_packed = lambda x, p, **_: seen.setdefault("h1", stack(x, p))
    with torch.no_grad():
        deterministic = model.bottom.encode(SOURCE)[0]
        seen.clear()
        one, two = (model.train()(SOURCE, TARGET) for _ in range(2))
    assert torch.equal(seen["h1"], deterministic)
    assert not torch.equal(one, two)
    wanted = build(dropout=0.4, bottom_dropout=True).train()
    assert {m.training for m in wanted.bottom.modules()} == {True}
    with torch.no_grad():
        assert not torch.equal(wanted.encode(SOURCE)[0], wanted.encode(SOURCE)[0])
        assert torch.equal(wanted.eval()(SOURCE, TARGET), wanted(SOURCE, TARGET))


@pytest.mark.parametrize("bottom_dropout", [False, True])
def test_one_mask_of_the_embedding(bottom_dropout):
    """With dropout in the bottom, the top reads the embedding with the same dropout mask."""
    model = build("as the paper", dropout=0.5, bottom_dropout=bottom_dropout).train()
    inputs = {}
    for name, stack in (("below", model.bottom.encoder), ("top", model.encoder)):
        run = stack.forward_packed

        def spy(x, p, *, name=name, run=run):  # fmt: skip
            inputs[name] = x
            return run(x, p)

        stack.forward_packed = spy  # fmt: skip
    h1, _, _ = model.encode(SOURCE)
    entered = inputs["top"] - h1
    dropped = entered.abs() < 1e-5
    assert 0.3 < dropped.float().mean() < 0.7
    if bottom_dropout:
        torch.testing.assert_close(entered, inputs["below"], rtol=1e-4, atol=1e-5)
    else:
        assert not inputs["below"].eq(0).any()


def gradients(model, **options):
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, **options):
        loss, _ = model.loss(SOURCE, TARGET, LABELS, 0.1)
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("policy", ["lean", "leaner", "states", "history"])
def test_memory_policies_of_the_top_give_the_same_bits(policy):
    model = build("pre, dlcl everywhere", dropout=0.3).train()
    expected = gradients(model, enabled=False)
    model.encoder.set_memory(policy)
    model.decoder.set_memory(policy)
    got = gradients(model, enabled=False)
    assert got[0] == expected[0]
    for name, gradient in expected[1].items():
        assert torch.equal(got[1][name], gradient), name


def test_autocast_learns_in_float32():
    model = build("pre, dlcl everywhere").train()
    exact, mixed = (gradients(model, enabled=enabled) for enabled in (False, True))
    assert mixed[0] == pytest.approx(exact[0], rel=0.05)
    assert {g.dtype for g in mixed[1].values()} == {torch.float32}


def test_a_checkpoint_gives_the_same_model(tmp_path):
    model = build("pre, dlcl everywhere")
    content = {"format": "deepfast-checkpoint", "version": 1, "kind": "depth_growing",
               "config": asdict(model.config), "model": model.state_dict(),
               "vocabulary": b"pieces"}  # fmt: skip
    torch.save(content, tmp_path / "model.pt")
    loaded, _ = load_model(tmp_path / "model.pt")
    assert not any(m.training for m in loaded.modules())
    assert not any(p.requires_grad for p in loaded.bottom.parameters())
    with torch.no_grad():
        assert torch.equal(loaded(SOURCE, TARGET), model(SOURCE, TARGET))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"top_encoder_layers": 0}, "top_encoder_layers must be a whole number of at least 1"),
        ({"top_decoder_layers": 1.5}, "top_decoder_layers must be a whole number of at least 1"),
        ({"top_encoder_connection": "dense"}, "top_encoder_connection must be one of dlcl, resi"),
        ({"top_dlcl": {"window": 2}}, "top_dlcl needs a side with connection 'dlcl'"),
        ({"top_dlcl": {"wide": 2}, "top_encoder_connection": "dlcl"}, "got wide"),
        ({"dim": 15}, "dim must be an even multiple of heads 3, got 15"),
    ],
)
def test_config_refuses(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        DepthGrowingConfig(**{"vocab_size": 11} | SIZES | changes)


def test_gradient_norms_count_the_layers_of_the_bottom():
    """They are frozen and have none."""
    model = build().train()
    norms = GradientNorms(model)
    model.loss(SOURCE, TARGET, LABELS, 0.1)[0].backward()
    norms.measure(list(model.parameters()))
    row = norms.row()
    for side, top, below in (("encoder", model.encoder, 3), ("decoder", model.decoder, 2)):
        expected = [torch.cat([p.grad.flatten() for p in layer.parameters()]).norm().item()
                    for layer in top.layers]  # fmt: skip
        assert row[f"grad_norm_{side}"][:below] == [None] * below
        assert row[f"grad_norm_{side}"][below:] == pytest.approx(expected, rel=1e-5)
