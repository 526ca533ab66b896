"""What holds for all ops alike: no tokens, strides, threads, and gradients that are not wanted."""

from itertools import combinations

import pytest
import torch

from tests.ops.cases import NAMES, VARIANTS, case, outputs, results, serves

P = 0.3
EVERY = pytest.mark.parametrize("name", [*NAMES, *VARIANTS])
PRODUCTS = ["norm_linear", "feed_forward", "norm_linear, rms", "feed_forward, rms"]
ROWS = ["layer_norm", "activation", "depth_mix", "depth_attention", *VARIANTS]
ROWS = [name for name in ROWS if name not in PRODUCTS]
"""Cases over tokens (..., D) without a matrix product, whose bits depend on strides and threads."""


@pytest.mark.parametrize("lead", [(0,), (2, 0)])
@pytest.mark.parametrize("name", [*ROWS, *PRODUCTS])
def test_no_tokens(backend, name, lead):
    serves(name, backend)
    c = case(name, backend, P, lead)
    out = outputs(c.run(*c.leaves))
    sum(o.sum() for o in out).backward()
    assert all(o.shape[: len(lead)] == lead for o in out)
    assert all(x.grad.shape == x.shape and x.grad.eq(0).all() for x in c.leaves)


def slice_of_channels(t):
    return torch.cat((torch.randn(len(t), 4), t, torch.randn(len(t), 5)), 1)[:, 4:-5]


def every_other_token(t):
    return t.repeat_interleave(2, 0)[::2]


def two_leading_dimensions(t):
    return t.view(3, -1, t.shape[1]).transpose(0, 1).contiguous().transpose(0, 1)


def channels_apart(t):
    return t.t().contiguous().t()


@pytest.mark.parametrize(
    "view", [slice_of_channels, every_other_token, two_leading_dimensions, channels_apart]
)
@pytest.mark.parametrize("name", ROWS)
def test_strides_change_nothing(backend, name, view):
    """Of the operands, and of the results' gradients."""
    serves(name, backend)
    c = case(name, backend, P, 12, 19)
    plain = outputs(c.run(*c.leaves))
    grads = [torch.randn(12, o[0].numel()) for o in plain]
    leaves = [view(x.detach()).requires_grad_() if x.shape == (12, 19) else x for x in c.leaves]
    out = outputs(c.run(*leaves))
    strided = [view(g).unflatten(-1, o.shape[1:]) for g, o in zip(grads, plain, strict=True)]
    got = [*out, *torch.autograd.grad(out, leaves, strided)]
    grads = [g.view(o.shape) for g, o in zip(grads, plain, strict=True)]
    expected = [*plain, *torch.autograd.grad(plain, c.leaves, grads)]
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.reshape(b.shape), b)


@pytest.mark.parametrize("name", [*ROWS, "peephole_lstm"])
def test_gradients_that_are_expanded(backend, name):
    serves(name, backend)
    c = case(name, backend, P)
    out = outputs(c.run(*c.leaves))
    rows = [torch.linspace(-1, 1, o.shape[-1]).expand(o.shape) for o in out]
    got = torch.autograd.grad(out, c.leaves, rows, retain_graph=True)
    expected = torch.autograd.grad(out, c.leaves, [row.contiguous() for row in rows])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", ROWS)
def test_bit_identical_on_any_number_of_threads(threads, name):
    c = case(name, "cpu", P, 333, 67)
    one = results(c.run, c.leaves)
    for n in (2, 2, 3):
        with threads(n):
            got = results(c.run, c.leaves)
        assert all(torch.equal(a, b) for a, b in zip(got, one, strict=True))


@EVERY
def test_a_gradient_does_not_depend_on_which_others_are_wanted(backend, name):
    """Each alone, all but one, and, where the gradients are few, in pairs."""
    serves(name, backend)
    c = case(name, backend, P)
    count = len(c.leaves)
    expected = results(c.run, c.leaves)[-count:]
    for size in {1, 2 if 2 < count < 7 else 1, max(1, count - 1)}:
        for wanted in combinations(range(count), size):
            leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(c.leaves)]
            got = results(c.run, leaves, [leaves[i] for i in wanted])[-size:]
            assert all(torch.equal(a, expected[i]) for a, i in zip(got, wanted, strict=True))


class Silent(torch.autograd.Function):
    """Hands back no gradient at all: None, not zeros."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


@EVERY
def test_on_the_meta_device(name):
    c = case(name, None, 0.0 if name == "attention" else P)
    leaves = [x.detach().to("meta").requires_grad_() for x in c.leaves]
    with torch.device("meta"):
        out = outputs(c.run(*leaves))
    out[0].sum().backward()
    assert all(x.grad.is_meta and x.grad.shape == x.shape for x in leaves)


@EVERY
def test_gradients_that_never_came(backend, name):
    serves(name, backend)
    c = case(name, backend, P)
    sum(Silent.apply(o).sum() for o in outputs(c.run(*c.leaves))).backward()
    assert all(x.grad is None for x in c.leaves)


@EVERY
def test_a_second_backward(backend, name):
    """The same bits where the graph was retained, an error where it was not."""
    serves(name, backend)
    c = case(name, backend, P)
    loss = sum(o.square().sum() for o in outputs(c.run(*c.leaves)))
    first = torch.autograd.grad(loss, c.leaves, retain_graph=True)
    second = torch.autograd.grad(loss, c.leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
