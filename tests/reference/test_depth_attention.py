"""The specification of attention over depth against the papers' formulas written out."""

import torch

from deepfast.reference.depth_attention import depth_attention
from deepfast.reference.layer_norm import rms_norm

COUNT, DIM, HOPS = 4, 5, 3


def states():
    return list(torch.randn(COUNT, 2, 3, DIM, dtype=torch.float64))


def test_given_scores():
    """softmax over layers of each hop's scores, hop by hop and token by token."""
    y, s = states(), torch.randn(2, 3, COUNT, HOPS, dtype=torch.float64)
    out, lse = depth_attention(y, scores=s)
    for b in range(2):
        for t in range(3):
            for h in range(HOPS):
                a = s[b, t, :, h].softmax(0)
                expected = sum(a[k] * y[k][b, t] for k in range(COUNT))
                torch.testing.assert_close(out[b, t, h], expected)
                torch.testing.assert_close(lse[b, t, h], s[b, t, :, h].exp().sum().log())


def test_a_query():
    """phi(q, k) = exp(q . RMSNorm(k)), normalised over the layers."""
    y, q, g = states(), torch.randn(DIM).double(), torch.randn(DIM).double()
    phi = [torch.exp(rms_norm(v, g)[0] @ q).unsqueeze(-1) for v in y]
    expected = sum(p * v for p, v in zip(phi, y, strict=True)) / sum(phi)
    out, lse = depth_attention(y, q, norm_weight=g)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, sum(phi).log().squeeze(-1))
    plain = [torch.exp(v @ q).unsqueeze(-1) for v in y]
    expected = sum(p * v for p, v in zip(plain, y, strict=True)) / sum(plain)
    torch.testing.assert_close(depth_attention(y, q, norm=None)[0], expected)


def test_hops_are_queries_of_their_own():
    y, q = states(), torch.randn(HOPS, DIM).double()
    g = torch.randn(HOPS, DIM).double()
    out, lse = depth_attention(y, q, norm_weight=g)
    for h in range(HOPS):
        alone, alone_lse = depth_attention(y, q[h], norm_weight=g[h])
        torch.testing.assert_close(out[..., h, :], alone)
        torch.testing.assert_close(lse[..., h], alone_lse)
