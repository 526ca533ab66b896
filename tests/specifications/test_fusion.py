"""The specification of multi-layer representation fusion in the terms of torch."""

import torch
import torch.nn.functional as F

from tests.specifications import fusion

STATES, DIM, HOPS, INNER = 3, 4, 2, 5


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def test_average():
    z = randn(STATES, 7, DIM)
    torch.testing.assert_close(fusion.average(list(z)), z.mean(0))


def test_feed_forward_is_over_the_concatenation():
    z, up, down = randn(STATES, 7, DIM), randn(INNER, STATES * DIM), randn(DIM, INNER)
    up_bias, down_bias = randn(INNER), randn(DIM)
    expected = F.linear(torch.cat(list(z), -1), up, up_bias).relu() @ down.T + down_bias
    got = fusion.feed_forward(list(z), up, up_bias, down, down_bias)
    torch.testing.assert_close(got, expected)


def test_attention():
    z, e = randn(STATES, 7, DIM), randn(STATES, DIM)
    w1, w2 = randn(STATES, INNER, DIM), randn(HOPS, INNER)
    tilde = z + e[:, None]
    scores = torch.einsum("lta,ha->lth", torch.einsum("ltd,lad->lta", tilde, w1).tanh(), w2)
    weights = fusion.attention_weights(list(z), e, list(w1), w2, torch.tanh)
    torch.testing.assert_close(torch.stack(weights), scores.softmax(0))
    hops = fusion.attention(list(z), e, weights)
    expected = torch.einsum("lth,ltd->htd", scores.softmax(0), tilde)
    torch.testing.assert_close(torch.stack(hops), expected)


def test_a_weight_for_each_channel():
    z, e, weights = randn(STATES, 7, DIM), randn(STATES, DIM), randn(STATES, 7, DIM).softmax(0)
    got = fusion.channel_attention(list(z), e, list(weights))
    torch.testing.assert_close(got, (weights * (z + e[:, None])).sum(0))
