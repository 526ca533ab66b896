"""DepthHistory: several passes at once, passes that end early, and what memory they hold."""

import contextlib
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from tests.depth.stack import DIM, EACH, INPLACE, LAYERS, TOKENS, Stack, history, leaf, no_gc


@EACH
@INPLACE
@pytest.mark.parametrize("order", ["together", (0, 1), (1, 0)], ids=str)
def test_two_forwards_before_a_backward(backend, name, inplace, order):
    """Pushed layer by layer, first one and then the other."""
    stack, ys = Stack(name, backend=backend), [leaf(), leaf()]
    leaves = [*ys, *stack.parameters()]

    def gradients(outs):
        losses = [outs[0].sum() + outs[1].sum()]
        if order != "together":
            losses = [outs[i].square().sum() for i in order]
        each = [torch.autograd.grad(loss, leaves, materialize_grads=True) for loss in losses]
        return [sum(grads) for grads in zip(*each, strict=True)]

    alone = [stack(y, history(inplace)) for y in ys]
    want = gradients(alone)
    histories = [history(inplace), history(inplace)]
    xs = [stack.push(y, h) for y, h in zip(ys, histories, strict=True)]
    for k in range(LAYERS):
        xs = [stack.push(stack.layer(k, x), h) for x, h in zip(xs, histories, strict=True)]
    assert_close(xs, alone, rtol=0, atol=0)
    assert_close(gradients(xs), want)


def test_threads_that_share_a_stack(backend):
    """The first thread that needs a schedule makes it; no thread sees an incomplete one."""
    first, y = Stack(layers=30, backend=backend), torch.randn(3, DIM)
    expected = first(y, history())
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(3):
            stack = Stack(layers=30, backend=backend)
            stack.load_state_dict(first.state_dict())
            with ThreadPoolExecutor(4) as pool:
                outs = list(pool.map(lambda _, s=stack: s(y, history()), range(4)))
            assert_close(outs, [expected] * 4, rtol=0, atol=0)
    finally:
        sys.setswitchinterval(before)


@EACH
def test_a_fake_or_inference_pass_leaves_nothing_behind(backend, name):
    stack, fresh, y = Stack(name, backend=backend), Stack(name, backend=backend), leaf()
    with torch.inference_mode():
        stack(y, history())
    with FakeTensorMode(allow_non_fake_inputs=True):
        stack(torch.randn(TOKENS, DIM), history())
    fresh.load_state_dict(stack.state_dict())
    out = stack(y, history())
    assert torch.equal(out, fresh(y, history()))
    out.sum().backward()


def states(h):
    return weakref.ref(h.depth_pass.states)


@EACH
@INPLACE
def test_a_backward_that_never_comes(backend, name, inplace):
    stack, y = Stack(name, backend=backend), leaf()
    with no_gc():
        h = history(inplace)
        out = stack(y, h)
        alive = states(h)
        del h
        assert alive() is not None, "the graph still needs the states"
        del out
        assert alive() is None


def test_a_history_does_not_hold_the_graph(backend):
    """A caller who keeps the history of a finished pass keeps its states, not its activations."""
    stack, y = Stack(backend=backend), leaf()
    with no_gc():
        h = history()
        out = stack(y, h)
        node = weakref.ref(out.grad_fn)
        del out
        assert node() is None
    assert len(h) == LAYERS + 1


@pytest.mark.parametrize("learning", [True, False])
def test_a_pass_given_up_half_way(backend, learning):
    stack, y = Stack(backend=backend), leaf()
    with no_gc(), torch.set_grad_enabled(learning):
        h = history()
        x = stack.push(torch.tanh(stack.push(y, h)), h)
        alive = states(h)
        del h, x
        assert alive() is None


@EACH
@INPLACE
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_last_push_frees_the_states(backend, name, inplace, context):
    """The caller keeps the history and the output."""
    stack, y = Stack(name, backend=backend), leaf()
    want = stack(y, history())
    with no_gc(), context():
        h = history(inplace)
        x = stack.push(y, h)
        alive = states(h)
        for k in range(LAYERS):
            assert h.nbytes > 0
            x = stack.push(stack.layer(k, x), h)
        assert alive() is None
        assert (h.nbytes, len(h)) == (0, LAYERS + 1)
        assert torch.equal(x, want)
        with pytest.raises(RuntimeError, match="new DepthHistory"):
            stack.push(x, h)


@INPLACE
@pytest.mark.parametrize("checkpointed", [None, False, True])
def test_where_no_boundary_learns_the_last_push_frees_the_states(backend, inplace, checkpointed):
    """Nothing learns (None), or a loss beside each layer alone."""
    stack, y, h = Stack(backend=backend), leaf().detach(), history(inplace)
    stack.depth.requires_grad_(False)
    stack.scales.requires_grad_(checkpointed is not None)

    def layer(x, k):
        loss = torch.tanh(x * stack.scales[k]).square().sum()
        return stack.push(torch.tanh(x), h, index=k + 1), loss

    x, losses = stack.push(y, h), []
    for k in range(LAYERS):
        if checkpointed:
            x, loss = checkpoint(layer, x, k, use_reentrant=False)
        else:
            x, loss = layer(x, k)
        losses.append(loss)
    assert not x.requires_grad
    assert h.nbytes == 0
    if checkpointed is not None:
        (grad,) = torch.autograd.grad(sum(losses), [stack.scales])
        x, plain = y, stack.plain()
        for k in range(LAYERS):
            x = plain.push(x if k == 0 else torch.tanh(x))
            losses[k] = torch.tanh(x * stack.scales[k]).square().sum()
        assert_close(grad, torch.autograd.grad(sum(losses), [stack.scales])[0])


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        raise KeyError("layer 5")


@EACH
@INPLACE
@pytest.mark.parametrize("where", ["forward", "checkpointed forward", "backward"])
def test_an_exception_in_a_layer(backend, name, inplace, where):
    stack, y = Stack(name, backend=backend), leaf()
    leaves = (y, *stack.parameters())
    want = torch.autograd.grad(stack(y, history(inplace)).sum(), leaves)
    checkpointed = where == "checkpointed forward"

    def broken(h):
        x = stack.push(y, h)
        for k in range(1, LAYERS + 1):
            if k == 5 and where != "backward":
                raise KeyError("layer 5")
            x = Broken.apply(x) if k == 5 else x
            f = lambda x, k=k: torch.tanh(stack.push(x, h, index=k))  # noqa: E731
            x = checkpoint(f, x, use_reentrant=False) if checkpointed else f(x)
        x.sum().backward()

    with no_gc():
        h = history(inplace)
        # A checkpointed function refers to h and h to the graph. Leaving the block closes h.
        with pytest.raises(KeyError), h if checkpointed else contextlib.nullcontext():
            broken(h)
        alive = states(h)
        del h
        assert alive() is None, "a broken pass holds its states"
    assert_close(torch.autograd.grad(stack(y, history(inplace)).sum(), leaves), want)


@EACH
@pytest.mark.parametrize("frozen", [None, "embedding", "connection", "all below layer 3"])
def test_nothing_is_alive_after_the_step(backend, name, frozen):
    """Where the first boundaries need no gradient, they have no autograd node that frees the
    states."""
    stack, y = Stack(name, backend=backend), leaf()
    y.requires_grad_(frozen is None)
    stack.depth.requires_grad_(frozen in (None, "embedding"))
    with no_gc():
        h = history()
        x = stack.push(y, h)
        for k, scale in enumerate(stack.scales):
            below = frozen == "all below layer 3" and k < 3
            x = stack.push(torch.tanh(x * (scale.detach() if below else scale)), h)
        loss = x.square().sum()
        alive = states(h)
        assert h.nbytes > 0
        loss.backward()
        assert alive() is None, "the states outlive backward"
        assert h.nbytes == 0
        assert loss.grad_fn is not None
