"""DepthHistory: several passes at once, passes that end early, and what memory they hold."""

import contextlib
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepfast.nn import DLCL, DepthHistory
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


@MODES
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_a_backward(backend, inplace, order):
    stack, ys = Stack(backend=backend), [leaf(), leaf()]
    alone = []
    for y in ys:
        stack.zero_grad()
        out = stack(y, history(inplace))
        alone.append((out, torch.autograd.grad(out.square().sum(), (y, *stack.parameters()))))
    outs = [stack(y, history(inplace)) for y in ys]
    for i in order:
        got = torch.autograd.grad(outs[i].square().sum(), (ys[i], *stack.parameters()))
        assert torch.equal(outs[i], alone[i][0])
        assert all(torch.equal(a, b) for a, b in zip(got, alone[i][1], strict=True))


def test_two_forwards_interleaved_layer_by_layer(backend):
    stack, ys = Stack(backend=backend), [leaf(), leaf()]
    alone = [stack(y, history()) for y in ys]
    want = torch.autograd.grad(alone[0].sum() + alone[1].sum(), (*ys, *stack.parameters()))
    histories = [history(), history()]
    xs = [stack.dlcl(y, h) for y, h in zip(ys, histories, strict=True)]
    for scale in stack.scales:
        xs = [stack.dlcl(torch.tanh(x * scale), h) for x, h in zip(xs, histories, strict=True)]
    got = torch.autograd.grad(xs[0].sum() + xs[1].sum(), (*ys, *stack.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(xs, alone, strict=True))
    assert_equal(got, want)


def test_one_stack_feeding_another(backend):
    """Encoder and decoder: two histories in one graph."""
    a, b, y = Stack(backend=backend), Stack(backend=backend), leaf()
    out = b(a(y, history()), history())
    got = torch.autograd.grad(out.sum(), (y, *a.parameters(), *b.parameters()))
    out = plain_xs(b, plain_xs(a, y)[-1])[-1]
    # The plain form has no norms of index 0.
    want = torch.autograd.grad(out.sum(), (y, *a.parameters(), *b.parameters()))
    assert_equal(got, want)


@MODES
def test_a_backward_that_never_comes(backend, inplace):
    stack, y = Stack(backend=backend), leaf()
    with no_gc():
        h = history(inplace)
        out = stack(y, h)
        alive = weakref.ref(h.state.states)
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


def test_a_pass_given_up_half_way(backend):
    stack, y = Stack(backend=backend), leaf()
    with no_gc():
        h = history()
        x = stack.dlcl(y, h)
        x = stack.dlcl(torch.tanh(x), h)
        alive = weakref.ref(h.state.states)
        del h, x
        assert alive() is None


def test_no_grad(backend):
    stack, y = Stack(backend=backend), leaf()
    want = stack(y, history())
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(stack(y, history()), want)


@MODES
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_without_gradients_the_last_push_frees_the_states(backend, inplace, context, norm):
    """The caller keeps the history and the output."""
    stack, y = Stack(norm=norm, backend=backend), leaf()
    with no_gc(), context():
        h, x = history(inplace), y
        for k in range(LAYERS + 1):
            x = stack.dlcl(x, h)
            if k == 0:
                alive = weakref.ref(h.state.states)
            assert (h.nbytes > 0) == (k < LAYERS)
        assert alive() is None
        assert len(h) == LAYERS + 1
        assert torch.isfinite(x).all()
        with pytest.raises(RuntimeError, match="new DepthHistory"):
            stack.dlcl(x, h)


@MODES
def test_where_nothing_learns_the_last_push_frees_the_states(backend, inplace):
    stack, h = Stack(backend=backend).requires_grad_(False), history(inplace)
    assert not stack(leaf().detach(), h).requires_grad
    assert h.nbytes == 0


@MODES
def test_where_only_a_loss_of_a_checkpointed_layer_learns(backend, inplace):
    """No boundary has a gradient, so the last push frees the states."""
    stack, y, results = Stack(backend=backend), leaf().detach(), []
    stack.dlcl.requires_grad_(False)

    def layer(x, scale, k, h):
        loss = torch.tanh(x * scale).square().sum()
        return stack.dlcl(torch.tanh(x), h, index=k), loss

    for checkpointed in (False, True):
        h, losses = history(inplace), []
        x = stack.dlcl(y, h)
        for k, scale in enumerate(stack.scales, 1):
            if checkpointed:
                x, loss = checkpoint(layer, x, scale, k, h, use_reentrant=False)
            else:
                x, loss = layer(x, scale, k, h)
            losses.append(loss)
        results += torch.autograd.grad(sum(losses), [stack.scales])
    assert_equal(results[1:], results[:1])


def test_a_pass_without_gradients_given_up_half_way(backend):
    stack = Stack(backend=backend)
    with no_gc(), torch.no_grad():
        h = history()
        stack.dlcl(leaf(), h)
        alive = weakref.ref(h.state.states)
        del h
        assert alive() is None


@MODES
@pytest.mark.parametrize("checkpointed", [False, True])
def test_an_exception_in_a_layer(backend, inplace, checkpointed):
    stack, y = Stack(backend=backend), leaf()
    out = stack(y, history(inplace))
    want = torch.autograd.grad(out.sum(), (y, *stack.parameters()))

    def broken(h):
        x = stack.dlcl(y, h)
        for k in range(1, 5):
            f = lambda x, k=k: torch.tanh(stack.dlcl(x, h, index=k))  # noqa: E731
            x = checkpoint(f, x, use_reentrant=False) if checkpointed else f(x)
        raise KeyError("layer 5")

    with no_gc():
        h = history(inplace)
        # A checkpointed function refers to h and h to the graph. Leaving the block closes h.
        with pytest.raises(KeyError), h if checkpointed else contextlib.nullcontext():
            broken(h)
        alive = weakref.ref(h.state.states)
        del h
        assert alive() is None, "a broken pass holds its states"
    out = stack(y, history(inplace))
    assert_equal(torch.autograd.grad(out.sum(), (y, *stack.parameters())), want)


@MODES
def test_an_exception_in_backward(backend, inplace):
    stack, y = Stack(backend=backend), leaf()

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            raise KeyError("layer 5")

    with no_gc():
        h = history(inplace)
        x = stack.dlcl(y, h)
        for k in range(LAYERS):
            x = stack.dlcl(torch.tanh(Broken.apply(x) if k == 5 else x), h)
        with pytest.raises(KeyError):
            x.sum().backward()
        alive = weakref.ref(h.state.states)
        del h, x
        assert alive() is None
    stack.zero_grad()
    out = stack(y, history(inplace))
    torch.autograd.grad(out.sum(), (y, *stack.parameters()))


def test_threads_that_share_a_stack(backend):
    """The first thread that needs a schedule makes it; no thread sees an incomplete one."""
    import sys
    from concurrent.futures import ThreadPoolExecutor

    layers, y = 30, torch.randn(3, DIM)
    exact = Stack(layers, backend=backend)
    expected = exact(y, history())
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(3):
            stack = Stack(layers, backend=backend)
            stack.load_state_dict(exact.state_dict())
            with ThreadPoolExecutor(4) as pool:
                outs = list(pool.map(lambda _, s=stack: s(y, history()), range(4)))
            for out in outs:
                assert torch.equal(out, expected)
    finally:
        sys.setswitchinterval(before)


def test_a_fake_or_inference_pass_leaves_nothing_behind(backend):
    from torch._subclasses.fake_tensor import FakeTensorMode

    stack, y = Stack(backend=backend), leaf()
    with torch.inference_mode():
        stack(y, history())
    with FakeTensorMode(allow_non_fake_inputs=True):
        stack(torch.randn(TOKENS, DIM), history())
    fresh = Stack(backend=backend)
    fresh.load_state_dict(stack.state_dict())
    out, expected = stack(y, history()), fresh(y, history())
    assert torch.equal(out, expected)
    out.sum().backward()


# ---- what is alive when -------------------------------------------------------------------------


def test_nothing_is_alive_after_the_step(backend):
    stack, y = Stack(backend=backend), leaf()
    with no_gc():
        h = history()
        loss = stack(y, h).square().sum()
        alive = weakref.ref(h.state.states)
        assert h.nbytes > 0
        loss.backward()
        assert alive() is None, "the states outlive backward"
        assert h.nbytes == 0
        assert loss.grad_fn is not None


@pytest.mark.parametrize("frozen", ["embedding", "embedding and W", "all below layer 3"])
def test_nothing_is_alive_after_the_step_of_a_frozen_bottom(backend, frozen):
    """The first boundaries need no gradient: they have no autograd node that frees the states."""
    stack, y = Stack(norm=None, backend=backend), leaf().detach()
    if frozen != "embedding":
        stack.dlcl.weight.requires_grad_(False)
    with no_gc():
        h = history()
        x = stack.dlcl(y, h)
        for k, scale in enumerate(stack.scales):
            a = scale.detach() if frozen == "all below layer 3" and k < 3 else scale
            x = stack.dlcl(torch.tanh(x * a), h)
        loss = x.square().sum()
        alive = weakref.ref(h.state.states)
        loss.backward()
        assert alive() is None, "the states outlive backward"


def test_the_bytes_of_a_step_are_its_gradients(meter):
    """The caller keeps loss and history; only gradients are left in memory."""
    stack, y = Stack(dim=128, backend="cpu"), leaf(64, 128)
    stack(y, history()).sum().backward()
    for p in (y, *stack.parameters()):
        p.grad = None
    with meter() as m:
        h = history()
        loss = stack(y, h).sum()
        loss.backward()
    gradients = sum(p.grad.nbytes for p in (y, *stack.parameters()))
    assert m.left <= gradients + 20_000


def peak_of(meter, layers, block, *, backward):
    """Peak bytes, counted in states. The layers are additions, which save nothing."""
    tokens, dim = 64, 256
    dlcl = DLCL(layers, dim, backend="cpu")
    y = leaf(tokens, dim)

    def step():
        h = DepthHistory(block=block)
        x = dlcl(y, h)
        for _ in range(layers):
            x = dlcl(x + 1.0, h)
        loss = x.sum()
        del x
        if backward:
            loss.backward()
        return loss

    step()
    y.grad = None
    dlcl.zero_grad()
    with meter() as m:
        step()
    return m.peak / (tokens * dim * 4)


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("block", [4, 8])
def test_memory_is_linear_in_depth(meter, block, backward):
    """L + 2 states and the blocks' partial sums serve forward and backward together."""
    depths = (8, 16, 32, 64)
    peaks = [peak_of(meter, layers, block, backward=backward) for layers in depths]
    for layers, peak in zip(depths, peaks, strict=True):
        # Beyond the states: a layer's input, output and gradients, and the norms' gradients
        # (2 (L + 1) D values, 1/32 of a state for each layer, more than once while they add up).
        assert peak <= layers + 2 + 3 * block + 6 + layers / 8, peaks
    slopes = [(peaks[i + 1] - peaks[i]) / (depths[i + 1] - depths[i]) for i in range(3)]
    assert all(0.9 <= slope <= 1.25 for slope in slopes), slopes
