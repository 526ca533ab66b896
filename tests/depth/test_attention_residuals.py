"""Attention residuals against the published equations written out."""

import pytest
import torch
from torch.testing import assert_close

from deepfast.nn import AttentionResiduals, DepthHistory
from tests.depth.stack import DIM, Stack
from tests.specifications.connections import attention_row

LAYERS = 5
FORMS = [
    {"scale": 0.5, "norm_affine": True},
    {"window": 1},
    {"window": 3, "norm_affine": True},
    {"score_function": "relu"},
    {"score_function": "relu", "window": 2, "scale": 2.0},
    {"score_function": "relu", "block": 2},
    *({"block": block} for block in (None, 1, 2, 3, 5, 7)),
]


def learned(block=None, **options):
    """An AttentionResiduals with queries away from zero."""
    return Stack("attnres", LAYERS, block=block, **options).depth


def values(m, *shape, dtype=torch.float64):
    shape = shape or (2, 3)
    return [torch.randn(*shape, DIM, dtype=dtype, requires_grad=True) for _ in range(m.rows)]


def rows(m, v, **options):
    history = DepthHistory(**options)
    return [m(x, history) for x in v]


@pytest.mark.parametrize("block", [1, 2, None])
@pytest.mark.parametrize("reads", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_is_the_equation(form, reads, block, backend):
    m = learned(backend=backend, reads=reads, **form).double()
    assert m.rows == reads * LAYERS + 1
    assert_equation(m, values(m), block)


@pytest.mark.parametrize("form", [{}, {"score_function": "relu"}], ids=str)
def test_is_the_equation_where_a_cache_holds_few_states(form, backend):
    m = Stack("attnres", 20, 600, backend=backend, **form).depth.double()
    assert_equation(m, list(torch.randn(21, 11, 600).double().requires_grad_()), block=4)


def assert_equation(m, v, block):
    got, expected = rows(m, v, block=block), [attention_row(m, v, row) for row in range(m.rows)]
    assert_close(got, expected)
    seeds, leaves = [torch.randn_like(x) for x in got], [*v, *m.parameters()]
    assert_close(*(torch.autograd.grad(xs, leaves, seeds) for xs in (got, expected)))


def test_queries_begin_at_zero():
    """Where the softmax is a mean."""
    assert not AttentionResiduals(LAYERS, DIM).query.any()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_mean_weights(form):
    """Each row's sum of sources, weighed for each of the tokens: here a single one."""
    m = learned(**form).double()
    v = [x[0, :1] for x in values(m)]
    means = m.mean_weights(v)
    states = []
    for x, continues in zip(v, m.continues, strict=True):
        states.append(x + states[-1] if continues else x)
    for row, x in enumerate(rows(m, v)):
        assert_close(x, (means[row].unsqueeze(-1) * torch.cat(states)).sum(0, True))
        assert not means[row, row + 1 :].any()


def test_a_half_precision_query_is_scaled_in_fp32():
    m = AttentionResiduals(2, DIM, scale=100.0).half()
    with torch.no_grad():
        m.query.fill_(1000)
    assert all(x.isfinite().all() for x in rows(m, torch.randn(3, 3, DIM).half()))
