"""Latent depth in a stack: layers that are not used, checkpointing, other modules."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepfast.memory import LiveBytes
from deepfast.nn import Packing, TransformerDecoder, TransformerEncoder
from tests.nn.written_out import DIM, HEADS, leaf, shaken

LAYERS, FFN, LANGUAGES = 5, 20, 3
LATENT = {"languages": LANGUAGES, "seed": 7}


def stack(kind=TransformerEncoder, **options):
    """Language 0 leaves out layers 1 and 4, language 1 the lowest, language 2 none."""
    options = {"connection": "latent", "dropout": 0.0, "latent": LATENT | options}
    module = shaken(kind(LAYERS, DIM, HEADS, FFN, **options))
    logits = [[2.0, -1, 1, 3, -2], [-1, 1, 1, 1, 1], [1, 1, 2, 0, 1]]
    module.latent.logits.data.copy_(torch.tensor(logits))
    return module


@pytest.mark.parametrize("evaluation", ["threshold", "mean"])
def test_unused_layers_do_not_run_and_keep_neither_keys_nor_values(evaluation):
    m = stack(TransformerDecoder, evaluation=evaluation).eval()
    unused = [evaluation == "threshold" and layer in (1, 4) for layer in range(LAYERS)]
    for layer, never in zip(m.layers, unused, strict=True):
        if never:
            layer.forward = None
    x, encoded = torch.randn(2, 4, DIM), torch.randn(2, 3, DIM)
    m(x, encoded)
    cache = m.start(encoded.flatten(0, 1), Packing(2, 3))
    m.step(x[:, 0], cache)
    assert [kv is None for kv in cache.encoded] == unused
    assert [kv.key_value is None for kv in cache.layers] == unused
    cache.reorder(torch.tensor([1, 1, 1]))
    assert cache.hypotheses.packing.tokens == 3
    assert cache.encoded[0][0].shape[0] == cache.layers[3].key_value.shape[0] == 1


def test_a_stack_without_any_layer_left_is_its_last_norm():
    m = stack().eval()
    with torch.no_grad():
        m.latent.logits.fill_(-1)
    x = torch.randn(2, 4, DIM)
    torch.testing.assert_close(m(x), m.connection.norms[-1](x))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpointing_draws_the_same_again(reentrant, dropout):
    """Two forwards, then their backwards in reverse order."""
    inputs = torch.randn(2, 5, DIM)

    def run(wrap):
        torch.manual_seed(9)
        x = inputs.clone().requires_grad_()
        m = TransformerEncoder(
            LAYERS, DIM, HEADS, FFN, connection="latent", dropout=dropout, latent=LATENT
        )
        shaken(m).latent.set_step(3)
        outputs = [wrap(m, x), wrap(m, x)]
        for y in reversed(outputs):
            y.square().sum().backward()
        return [*outputs, x.grad, *(p.grad for p in m.parameters())]

    want = run(lambda m, x: m(x))
    assert not torch.equal(*want[:2])
    got = run(lambda m, x: checkpointed(m, x, reentrant))
    assert len(got) == len(want)
    assert all(map(torch.equal, got, want))


def checkpointed(m, x, reentrant=False, **options):
    return checkpoint(m, x, use_reentrant=reentrant, **options)


def test_a_draw_that_backward_cannot_make_again_is_an_error():
    m, x = stack(), leaf(2, 5, DIM)
    loss = checkpointed(m, x, preserve_rng_state=False).sum()
    with pytest.raises(RuntimeError, match="checkpointing needs preserve_rng_state=True"):
        loss.backward()
    loss = checkpointed(m, x).sum()
    m.latent.set_step(4)
    with pytest.raises(RuntimeError, match="backward must run before the next set_step"):
        loss.backward()


def test_states_of_the_layers_that_run():
    m = stack().eval()
    states = []
    m.forward_packed(torch.randn(4, DIM), Packing(1, 4), states=states, language=0)
    assert len(states) == 4


def test_an_attention_of_another_make_is_scaled_too():
    class Other(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *inputs, **options):
            assert "gate" not in options
            return self.inner(*inputs, **options)

    m, x = stack(), torch.randn(2, 4, DIM)
    want = m(x)
    for layer in m.layers:
        layer.attention = Other(layer.attention)
        layer.feed_forward.down.register_forward_hook(lambda *_: None)
    m.latent.set_step(0)
    torch.testing.assert_close(m(x), want)


def test_a_gate_keeps_no_state_for_backward():
    """It keeps what the plain stack keeps and the scaled weights, for any number of tokens."""

    def kept(connection, tokens):
        torch.manual_seed(0)
        m = TransformerEncoder(3, 16, 2, 32, connection=connection, dropout=0.1)
        with LiveBytes(torch.device("cpu")) as live:
            y = m(torch.randn(1, tokens, 16))
            alive = live.current
        # The graph lives as long as its result.
        assert y.requires_grad
        return alive

    more = [kept("latent", n) - kept("residual", n) for n in (64, 512)]
    assert more[0] == more[1] > 0
