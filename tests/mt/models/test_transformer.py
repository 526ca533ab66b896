"""The Transformer's own: positions, norms, embeddings, transparent attention, fused layers."""

import math

import pytest
import torch

from deepfast.mt.models import DepthGrowing, DepthGrowingConfig, Transformer, TransformerConfig
from deepfast.mt.models.transformer import sinusoids
from deepfast.nn import LayerNorm, RMSNorm
from deepfast.nn.connections.fusion import FUSIONS, WITH_ATTENTION
from tests.mt.models import kinds
from tests.mt.models.kinds import SIZES, SOURCE, TARGET, make
from tests.specifications.transparent_attention import transparent_attention


@pytest.mark.parametrize("name", ["rms", "rms, post"])
def test_all_norms_are_rms_norms(name):
    """Those inside the mixture too."""
    model = make(name)
    assert model.encoder.connection.dlcl.norm_type == "rms"
    assert not any(type(module) is LayerNorm for module in model.modules())
    norms = [module for module in model.modules() if type(module) is RMSNorm]
    # In pre-norm each stack has one more, after its last layer.
    assert len(norms) == 3 * 2 + 2 * 3 + (2 if name == "rms" else 0)


def test_embeddings_that_are_shared_or_not():
    for name, own in (
        ("dlcl", {"embedding"}),
        ("decoder's embedding", {"embedding", "target_embedding"}),
        ("own embeddings", {"embedding", "output", "target_embedding"}),
    ):
        found = {key.partition(".")[0] for key, _ in make(name).named_parameters()}
        assert found - {"encoder", "decoder"} == own


def test_sinusoids():
    table = sinusoids(torch.arange(50), 16)
    assert table.shape == (50, 16)
    assert table.dtype == torch.float32
    for position, i in ((0, 0), (7, 0), (7, 3), (49, 7)):
        angle = position * 10000 ** (-i / 7)
        assert float(table[position, i]) == pytest.approx(math.sin(angle), abs=1e-4)
        assert float(table[position, 8 + i]) == pytest.approx(math.cos(angle), abs=1e-4)
    assert sinusoids(torch.arange(3), 2).isfinite().all()


@pytest.mark.parametrize("grown", [False, True])
def test_matrices_drawn_by_their_inputs(grown):
    """In both sides, the fusions, the output, and the top of a model that grows."""
    sizes = SIZES | {"vocab_size": 50, "dim": 48, "ffn_dim": 192, "init": "fan_in",
                     "share_embeddings": "none"}  # fmt: skip
    torch.manual_seed(1)
    if grown:
        model = DepthGrowing(DepthGrowingConfig(**sizes))
    else:
        model = Transformer(TransformerConfig(**sizes, **kinds.fused("attention")))
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    bottom = model.bottom if grown else model
    assert bottom.output in linears
    for linear in linears:
        bound = linear.in_features**-0.5
        for p in linear.parameters():
            assert p.abs().max() <= bound
        if linear.weight.numel() > 1000:
            assert linear.weight.abs().max() > 0.95 * bound
    for embedding in (bottom.embedding, bottom.target_embedding):
        assert not embedding.weight[0].any()
        std = embedding.weight[1:].std()
        torch.testing.assert_close(std, torch.tensor(48**-0.5), rtol=0.1, atol=0)


@pytest.mark.parametrize("name", [name for name in kinds.CONFIGS if "transparent" in name])
def test_transparent_logits_and_gradients_are_those_of_the_specification(name):
    model = make(name)
    mix, final = model.transparent, None
    if model.config.norm == "pre":
        final = model.encoder.connection.norms[-1]

    def literal(states, output):
        if final is None:
            return transparent_attention(states, mix.weight)
        gain = torch.cat((mix.norm_weight, final.weight[None]))
        shift = torch.cat((mix.norm_bias, final.bias[None]))
        return transparent_attention(states, mix.weight, norm_weight=gain, norm_bias=shift)

    results = []
    for form in (mix.forward, literal):
        mix.forward = form
        model.zero_grad()
        logits = model(SOURCE, TARGET)
        logits.square().sum().backward()
        results.append((logits, {key: p.grad for key, p in model.named_parameters()}))
    (got, grads), (want, expected) = results
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert grads["transparent.weight"].abs().min() > 0
    for key, gradient in expected.items():
        torch.testing.assert_close(grads[key], gradient, rtol=1e-8, atol=1e-8, msg=key)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("kind", FUSIONS)
def test_the_output_is_that_of_the_fusion(kind, norm):
    """The stacks' states are fused here and not by the model."""
    model = make(f"{kind} fusion, {norm}")

    def fused_output(stack, fusion, *args):
        states = []
        y = stack.forward_packed(*args, states=states)
        embedding = (model.fusions.layer_embedding,) if fusion.fusion_type in WITH_ATTENTION else ()
        return fusion([*states[:-1], y], *embedding)

    x, packing = model.embed_source(SOURCE)
    memory = fused_output(model.encoder, model.fusions.encoder, x, packing)
    y, target_packing = model.embed_target(TARGET)
    args = y, target_packing, memory, packing
    expected = model.project(fused_output(model.decoder, model.fusions.decoder, *args))
    torch.testing.assert_close(model(SOURCE, TARGET), expected)


@pytest.mark.parametrize("kind", WITH_ATTENTION)
def test_attention_over_layers(kind):
    model = make(f"{kind} fusion, post")
    hops = 2 if kind == "attention" else 2 * 12
    for operands, shape in (((SOURCE,), (10, hops, 4)), ((SOURCE, TARGET), (9, hops, 3))):
        weights = model.layer_attention(*operands)
        assert weights.shape == shape
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    with pytest.raises(ValueError, match=r"decoder_fusion: expected one of .*got None"):
        make("fusion of the encoder").layer_attention(SOURCE, TARGET)
    with pytest.raises(ValueError, match=r"encoder_fusion: expected one of .*got 'average'"):
        make("average fusion, pre").layer_attention(SOURCE)
