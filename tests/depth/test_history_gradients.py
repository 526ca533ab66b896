"""Gradients through a pass: a part of it, twice, and with unusual layers."""

import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from tests.depth.stack import (
    DIM,
    LAYERS,
    MODES,
    TOKENS,
    Stack,
    assert_equal,
    history,
    leaf,
    no_gc,
    plain_xs,
)

# ---- parts of a gradient ------------------------------------------------------------------------


@MODES
def test_gradient_of_the_weights_alone(backend, inplace):
    stack, y = Stack(backend=backend), leaf()
    (want,) = torch.autograd.grad(plain_xs(stack, y)[-1].square().sum(), stack.dlcl.weight)
    out = stack(y, history(inplace))
    (got,) = torch.autograd.grad(out.square().sum(), stack.dlcl.weight)
    torch.testing.assert_close(got, want)


@MODES
@pytest.mark.parametrize(("top", "bottom"), [(9, 4), (9, 0), (6, 2), (5, 4), (3, 0)])
def test_gradient_between_two_intermediate_inputs(backend, inplace, top, bottom):
    stack, y = Stack(backend=backend), leaf()
    xs = plain_xs(stack, y)
    (want,) = torch.autograd.grad(xs[top].square().sum(), xs[bottom])
    xs = stack.xs(y, history(inplace))
    (got,) = torch.autograd.grad(xs[top].square().sum(), xs[bottom])
    torch.testing.assert_close(got, want)


def test_full_backward_after_a_part_in_place_is_an_error(backend):
    stack, y = Stack(backend=backend), leaf()
    xs = stack.xs(y, history())
    torch.autograd.grad(xs[6].sum(), xs[2], retain_graph=True)
    with pytest.raises(RuntimeError, match=r"DepthHistory\(inplace=False\)"):
        xs[-1].sum().backward()


def test_full_backward_after_a_part_without_inplace(backend):
    stack, y = Stack(backend=backend), leaf()
    leaves = (y, *stack.parameters())
    want = torch.autograd.grad(stack(y, history()).square().sum(), leaves)
    xs = stack.xs(y, history(False))
    torch.autograd.grad(xs[6].sum(), xs[2], retain_graph=True)
    got = torch.autograd.grad(xs[-1].square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("row", [0, 2, 3, 6])
def test_backward_of_a_part_after_a_full_one(backend, row):
    """Rows that the second backward never reaches must give it nothing."""
    stack, y = Stack(backend=backend), leaf()
    leaves = (y, stack.dlcl.weight)
    want = torch.autograd.grad(plain_xs(stack, y)[row].square().sum(), leaves)
    xs = stack.xs(y, history(False))
    torch.autograd.grad(xs[-1].sum(), leaves, retain_graph=True)
    assert_equal(torch.autograd.grad(xs[row].square().sum(), leaves), want)


def test_two_parts_in_place_that_do_not_meet(backend):
    """x_9 to x_6, then x_6 to the leaves: allowed in place, and the gradients are right."""
    stack, y = Stack(backend=backend), leaf()
    leaves = (y, stack.dlcl.weight)
    want = torch.autograd.grad(plain_xs(stack, y)[6].square().sum(), leaves)
    xs = stack.xs(y, history())
    torch.autograd.grad(xs[9].sum(), xs[6], retain_graph=True)
    assert_equal(torch.autograd.grad(xs[6].square().sum(), leaves), want)


@pytest.mark.parametrize("first", [2, 5])
def test_a_part_below_then_the_whole_in_place_is_an_error(backend, first):
    """The upper rows would be recomputed from slots that already hold gradients."""
    stack, y = Stack(backend=backend, norm="post"), leaf()
    xs = stack.xs(y, history())
    torch.autograd.grad(xs[first].sum(), y, retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace=False"):
        torch.autograd.grad(xs[-1].sum(), y)


def test_a_push_after_a_partial_backward_in_place(backend):
    """Backward wrote over states that later rows still read: an error, never wrong numbers."""
    stack, y = Stack(backend=backend), leaf()
    h, xs = history(), []
    x = stack.dlcl(y, h)
    for scale in stack.scales[:5]:
        xs.append(x)
        x = stack.dlcl(torch.tanh(x * scale), h)
    torch.autograd.grad(x.sum(), xs[1], retain_graph=True)
    want = plain_xs(stack, y)[6]
    try:
        got = stack.dlcl(torch.tanh(x * stack.scales[5]), h)
    except RuntimeError as error:
        assert "inplace=False" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(got, want)


@MODES
def test_losses_on_several_rows(backend, inplace):
    stack, y = Stack(backend=backend), leaf()
    leaves = (y, *stack.parameters())

    def loss(xs):
        return xs[-1].square().sum() + xs[3].sum() + (xs[5] * xs[6]).sum()

    want = torch.autograd.grad(loss(plain_xs(stack, y)), leaves)
    assert_equal(torch.autograd.grad(loss(stack.xs(y, history(inplace))), leaves), want)


@MODES
@pytest.mark.parametrize("row", [0, 3, 4, 7])
def test_a_loss_below_the_top(backend, inplace, row):
    """All layers ran; rows above the output get no gradient and must give none."""
    stack, y = Stack(backend=backend), leaf()
    leaves = (y, stack.dlcl.weight)
    want = torch.autograd.grad(plain_xs(stack, y)[row].square().sum(), leaves)
    xs = stack.xs(y, history(inplace))
    assert_equal(torch.autograd.grad(xs[row].square().sum(), leaves), want)


# ---- second and double backward ------------------------------------------------------------------


def test_second_backward_without_inplace_equals_the_first(backend):
    stack, y = Stack(backend=backend), leaf()
    loss = stack(y, history(False)).square().sum()
    leaves = (y, *stack.parameters())
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for _ in range(2):
        again = torch.autograd.grad(loss, leaves, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_second_backward_in_place_is_an_error(backend):
    stack, y = Stack(backend=backend), leaf()
    loss = stack(y, history()).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second backward.*DepthHistory\(inplace=False\)"):
        loss.backward()


@MODES
@pytest.mark.parametrize("linear", [False, True])
def test_double_backward_is_an_error(backend, inplace, linear):
    stack, y = Stack(backend=backend), leaf()
    out = stack(y, history(inplace))
    loss = out.sum() if linear else out.square().sum()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(loss, y, create_graph=True)


def test_forward_mode_is_an_error(backend):
    """Forward mode is refused with and without gradients; the tangent is never silently zero."""
    stack, y = Stack(backend=backend), leaf().detach()
    for learning in (True, False):
        with forward_ad.dual_level(), torch.set_grad_enabled(learning):
            dual = forward_ad.make_dual(y, torch.ones_like(y))
            with pytest.raises(NotImplementedError, match="DLCL: forward-mode"):
                stack(dual, history())


# ---- parameters changed between forward and backward ---------------------------------------------


@pytest.mark.parametrize("normalize_embedding", [True, False])
@pytest.mark.parametrize("name", ["weight", "norm_weight", "norm_bias"])
def test_parameters_changed_before_backward(backend, name, normalize_embedding):
    """The gradient is that of the forward pass, or an error; never a mixture."""
    stack = Stack(backend=backend, normalize_embedding=normalize_embedding)
    y = leaf()
    (want,) = torch.autograd.grad(stack(y, history()).square().sum(), y)
    loss = stack(y, history()).square().sum()
    with torch.no_grad():
        getattr(stack.dlcl, name).mul_(3).add_(1)
    try:
        (got,) = torch.autograd.grad(loss, y)
    except RuntimeError as error:
        assert "inplace" in str(error)  # noqa: PT017
    else:
        assert torch.equal(got, want)


# ---- unusual layers ------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("free", [{3}, {0}, {8}, {2, 3, 4}, set(range(9))], ids=str)
@pytest.mark.parametrize("trainable", [True, False])
def test_a_layer_that_ignores_its_input(backend, inplace, free, trainable):
    stack, y = Stack(backend=backend), leaf()
    constants = torch.randn(LAYERS, TOKENS, DIM, requires_grad=trainable)

    def run(push):
        x = push(y)
        for k, scale in enumerate(stack.scales):
            x = push(constants[k] * scale if k in free else torch.tanh(x * scale))
        leaves = (y, *stack.parameters(), *([constants] if trainable else []))
        return torch.autograd.grad(x.square().sum(), leaves)

    z, d = [], stack.dlcl

    def plain(state):
        row = len(z)
        if row:
            state = nn.functional.layer_norm(
                state, (DIM,), d.norm_weight[row], d.norm_bias[row], d.eps
            )
        z.append(state)
        return sum(d.weight[row, k] * z[k] for k in range(row + 1))

    h = history(inplace)
    assert_equal(run(lambda state: d(state, h)), run(plain))


@MODES
def test_layers_skipped_as_in_layer_drop(backend, inplace):
    stack, y = Stack(backend=backend, norm=None), leaf()
    skipped = {1, 4, 5, 8}

    def run(push):
        x = push(y)
        for k, scale in enumerate(stack.scales):
            x = push(x if k in skipped else torch.tanh(x * scale))
        return torch.autograd.grad(x.square().sum(), (y, *stack.parameters()))

    z = []

    def plain(state):
        z.append(state)
        return sum(stack.dlcl.weight[len(z) - 1, k] * z[k] for k in range(len(z)))

    h = history(inplace)
    assert_equal(run(lambda state: stack.dlcl(state, h)), run(plain))


@MODES
def test_a_stack_left_before_its_top(backend, inplace):
    """Fewer pushes than rows: the later rows are not part of the pass."""
    stack, y = Stack(backend=backend), leaf()
    want = torch.autograd.grad(plain_xs(stack, y)[5].square().sum(), (y, stack.dlcl.weight))
    with no_gc():
        h = history(inplace)
        x = stack.dlcl(y, h)
        for scale in stack.scales[:5]:
            x = stack.dlcl(torch.tanh(x * scale), h)
        alive = weakref.ref(h.state.states)
        got = torch.autograd.grad(x.square().sum(), (y, stack.dlcl.weight))
        assert (alive() is None) == inplace
        del h, x
        assert alive() is None
    assert_equal(got, want)


def test_an_embedding_that_wants_no_gradient(backend):
    stack, y = Stack(backend=backend), leaf()
    params = tuple(stack.parameters())
    want = torch.autograd.grad(stack(y, history()).sum(), params)
    got = torch.autograd.grad(stack(y.detach(), history()).sum(), params)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_everything_frozen_but_one_layer(backend):
    stack, y = Stack(backend=backend), leaf()
    (want,) = torch.autograd.grad(stack(y, history()).square().sum(), stack.scales)
    stack.dlcl.requires_grad_(False)
    scales = [s.detach().requires_grad_(k == 5) for k, s in enumerate(stack.scales)]
    h = history()
    x = stack.dlcl(y.detach(), h)
    for scale in scales:
        x = stack.dlcl(torch.tanh(x * scale), h)
    x.square().sum().backward()
    assert torch.equal(scales[5].grad, want[5])
    assert all(s.grad is None for k, s in enumerate(scales) if k != 5)
