"""Gradients through a pass: a part of it, twice, and with unusual layers."""

import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.testing import assert_close

from tests.depth.stack import EACH, INPLACE, LAYERS, Stack, history, in_float64, leaf, no_gc

ROWS_AND_LEAVES = {
    "the weights alone": lambda xs, y, w: ([xs[-1]], w),
    "9 to 4": lambda xs, y, w: ([xs[9]], [xs[4]]),
    "9 to 0": lambda xs, y, w: ([xs[9]], [xs[0]]),
    "6 to 2": lambda xs, y, w: ([xs[6]], [xs[2]]),
    "5 to 4": lambda xs, y, w: ([xs[5]], [xs[4]]),
    "below the top 0": lambda xs, y, w: ([xs[0]], [y, *w]),
    "below the top 3": lambda xs, y, w: ([xs[3]], [y, *w]),
    "below the top 4": lambda xs, y, w: ([xs[4]], [y, *w]),
    "several rows": lambda xs, y, w: ([xs[-1], xs[3], xs[5] * xs[6]], [y, *w]),
}
"""Which x a loss has, and what its gradient is taken of."""


def both(stack, y, inplace, gradients):
    """``gradients`` of all x of an engine's pass, and of one in plain torch."""
    return gradients(stack.xs(y, history(inplace))), gradients(stack.xs(y, stack.plain()))


@EACH
@INPLACE
@pytest.mark.parametrize("part", ROWS_AND_LEAVES)
def test_a_part_of_a_gradient(backend, name, inplace, part):
    stack, y = in_float64(name, backend)

    def gradients(xs):
        rows, leaves = ROWS_AND_LEAVES[part](xs, y, [next(stack.depth.parameters())])
        return torch.autograd.grad(sum(x.square().sum() for x in rows), leaves)

    assert_close(*both(stack, y, inplace, gradients))


@EACH
@pytest.mark.parametrize("row", [0, 2, 3, 6])
def test_a_part_after_the_whole(backend, name, row):
    """Rows that the second backward never reaches must give it nothing."""
    stack, y = in_float64(name, backend)
    leaves = (y, next(stack.depth.parameters()))

    def gradients(xs):
        torch.autograd.grad(xs[-1].sum(), leaves, retain_graph=True)
        return torch.autograd.grad(xs[row].square().sum(), leaves)

    assert_close(*both(stack, y, False, gradients))


@EACH
def test_two_parts_in_place_that_do_not_meet(backend, name):
    """x_9 to x_6, then x_6 to the leaves: allowed in place, and the gradients are right."""
    stack, y = in_float64(name, backend)

    def gradients(xs):
        torch.autograd.grad(xs[9].sum(), xs[6], retain_graph=True)
        return torch.autograd.grad(xs[6].square().sum(), (y, next(stack.depth.parameters())))

    assert_close(*both(stack, y, True, gradients))


@EACH
def test_a_push_after_a_partial_backward_in_place(backend, name):
    """Backward wrote over states that later rows still read: an error, never wrong numbers."""
    stack, y = in_float64(name, backend)
    h, xs = history(), []
    x = stack.push(y, h)
    for k in range(5):
        xs.append(x)
        x = stack.push(stack.layer(k, x), h)
    torch.autograd.grad(x.sum(), xs[1], retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace=False"):
        stack.push(stack.layer(5, x), h)


@EACH
@INPLACE
@pytest.mark.parametrize("linear", [False, True])
def test_double_backward_is_an_error(backend, name, inplace, linear):
    stack, y = in_float64(name, backend)
    out = stack(y, history(inplace))
    loss = out.sum() if linear else out.square().sum()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(loss, y, create_graph=True)


@EACH
def test_forward_mode_is_an_error(backend, name):
    """Forward mode is refused with and without gradients; the tangent is never silently zero."""
    stack, y = Stack(name, backend=backend), leaf().detach()
    for learning in (True, False):
        with forward_ad.dual_level(), torch.set_grad_enabled(learning):
            dual = forward_ad.make_dual(y, torch.ones_like(y))
            with pytest.raises(NotImplementedError, match=f"{stack.depth.name}: forward-mode"):
                stack(dual, history())


@EACH
@pytest.mark.parametrize("where", ["embedding", "middle"])
def test_a_backward_inside_another_one_is_an_error(name, where):
    """It would discard what the outer one has summed, whose gradients were then wrong."""
    stack, x, inner = Stack(name), leaf(), []
    found = stack.xs(x, history(False))
    loss = found[-1].sum()

    def again(_):
        if not inner:
            inner.append(None)
            torch.autograd.grad(loss, x, retain_graph=True)

    (x if where == "embedding" else found[1]).register_hook(again)
    with pytest.raises(RuntimeError, match=r"another backward pass .* one after the other"):
        loss.backward(retain_graph=True)


@EACH
@pytest.mark.parametrize("normalize_embedding", [True, False])
def test_parameters_changed_before_backward(backend, name, normalize_embedding):
    """The gradient is that of the forward pass."""
    dlcl = name in ("dlcl", "post-norm")
    options = {"normalize_embedding": normalize_embedding} if dlcl else {}
    stack, y = Stack(name, backend=backend, **options), leaf()
    (want,) = torch.autograd.grad(stack(y, history()).square().sum(), y)
    for p in stack.depth.parameters():
        loss, before = stack(y, history()).square().sum(), p.detach().clone()
        with torch.no_grad():
            p.mul_(3).add_(1)
        assert torch.equal(torch.autograd.grad(loss, y)[0], want)
        with torch.no_grad():
            p.copy_(before)


@EACH
@INPLACE
@pytest.mark.parametrize("few", [{3}, {0}, {8}, {2, 3, 4}, {1, 4, 5, 8}, set(range(9))], ids=str)
@pytest.mark.parametrize("do", ["learn constants", "are constants", "are skipped"])
def test_layers_that_ignore_their_input(backend, name, inplace, few, do):
    """Or that are skipped, as in layer drop: what comes out of a push goes into the next one."""
    stack, y = in_float64(name, backend)
    constants = leaf(LAYERS, *y.shape, dtype=torch.float64)
    leaves = (y, *stack.parameters(), *([constants] if do == "learn constants" else []))
    plain, constants = stack.layer, constants if do == "learn constants" else constants.detach()

    def layer(k, x):
        if k not in few:
            return plain(k, x)
        return x if do == "are skipped" else constants[k] * stack.scales[k]

    stack.layer = layer

    def gradients(xs):
        return torch.autograd.grad(xs[-1].square().sum(), leaves, materialize_grads=True)

    assert_close(*both(stack, y, inplace, gradients))


@EACH
@INPLACE
def test_a_stack_left_before_its_top(backend, name, inplace):
    """Fewer pushes than rows: the later rows are not part of the pass."""
    stack, y = in_float64(name, backend)
    leaves = (y, next(stack.depth.parameters()))

    def lower(h):
        x = stack.push(y, h)
        for k in range(5):
            x = stack.push(stack.layer(k, x), h)
        return x

    want = torch.autograd.grad(lower(stack.plain()).square().sum(), leaves)
    with no_gc():
        h = history(inplace)
        x = lower(h)
        alive = weakref.ref(h.depth_pass.states)
        got = torch.autograd.grad(x.square().sum(), leaves)
        assert (alive() is None) == inplace
        del h, x
        assert alive() is None
    assert_close(got, want)
