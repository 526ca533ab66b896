"""Passes: parts of a gradient, several passes at once, passes that end early, and their memory."""

import copy
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from tests.depth.stack import (
    DIM,
    EACH,
    INPLACE,
    LAYERS,
    TOKENS,
    Stack,
    history,
    in_float64,
    leaf,
    no_gc,
)


@EACH
@INPLACE
@settings(max_examples=8)
@given(
    rows=st.sets(st.integers(0, LAYERS), min_size=1, max_size=3),
    of=st.one_of(st.sampled_from(["weights", "all", "all"]), st.integers(0, LAYERS)),
    top=st.sampled_from([LAYERS, LAYERS, 5]),
    whole_first=st.booleans(),
    few=st.one_of(st.just(set()), st.sets(st.integers(0, LAYERS - 1))),
    do=st.sampled_from(["learn constants", "are constants", "are skipped"]),
)
def test_a_part_of_a_gradient(backend, name, inplace, rows, of, top, whole_first, few, do):
    """A loss on some rows of a stack that may be left before its top. Its gradient is taken of the
    weights, of a row, or of all leaves. Rows that a second backward never reaches must give it
    nothing. A few layers ignore their input or are skipped, as in layer drop."""
    torch.manual_seed(0)
    stack, y = in_float64(name, backend)
    weights, constants = next(stack.depth.parameters()), leaf(LAYERS, *y.shape, dtype=y.dtype)
    everything = [y, *stack.parameters(), *([constants] if do == "learn constants" else [])]
    fixed, plain = constants if do == "learn constants" else constants.detach(), stack.layer

    def layer(k, x):
        if k not in few:
            return plain(k, x)
        return x if do == "are skipped" else fixed[k] * stack.scales[k]

    stack.layer, found = layer, []
    for h in (history(inplace), stack.plain()):
        xs = stack.xs(y, h, top)
        leaves = {"weights": [weights], "all": everything}.get(of) or [xs[min(of, top)]]
        if whole_first and not inplace:
            torch.autograd.grad(xs[-1].sum(), everything, retain_graph=True, allow_unused=True)
        loss = sum(xs[min(row, top)].square().sum() for row in rows)
        found.append(torch.autograd.grad(loss, leaves, materialize_grads=True))
    assert_close(*found)


@EACH
def test_two_parts_in_place_that_do_not_meet(backend, name):
    """x_9 to x_6, then x_6 to the leaves: allowed in place, and the gradients are right. A push
    after a part is an error, because backward wrote over states that later rows still read."""
    stack, y = in_float64(name, backend)

    found, leaves = [], (y, next(stack.depth.parameters()))
    for h in (history(), stack.plain()):
        xs = stack.xs(y, h)
        torch.autograd.grad(xs[9].sum(), xs[6], retain_graph=True)
        found.append(torch.autograd.grad(xs[6].square().sum(), leaves))
    assert_close(*found)
    h = history()
    x = lower(stack, y, h)
    torch.autograd.grad(x.sum(), y, retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace=False"):
        stack.push(stack.layer(5, x), h)


def lower(stack, y, h, layers=5):
    return stack.xs(y, h, layers)[-1]


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


# ---- derivatives that are refused ----------------------------------------------------------------


@EACH
def test_derivatives_that_are_refused(backend, name):
    """Of second order, also of a linear loss. Forward mode is refused with and without gradients;
    the tangent is never silently zero."""
    stack, y = Stack(name, backend=backend), leaf()
    for inplace in (True, False):
        for power in (1, 2):
            loss = stack(y, history(inplace)).pow(power).sum()
            with pytest.raises(RuntimeError, match="second derivative"):
                torch.autograd.grad(loss, y, create_graph=True)
    y = y.detach()
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
def test_a_change_of_grad_mode_within_a_pass_is_an_error(backend, name):
    """A push without gradients would cut its state and all states below out of the graph."""
    stack, y = Stack(name, backend=backend), leaf()
    for learning in (True, False):
        h = history()
        with torch.set_grad_enabled(learning):
            x = lower(stack, y, h, 2)
        with torch.set_grad_enabled(not learning), pytest.raises(RuntimeError, match="grad mode"):
            stack.push(x, h)


# ---- what passes share ---------------------------------------------------------------------------


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


# ---- what is freed, by reference counts alone ----------------------------------------------------


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        raise KeyError("layer 5")


def step(stack, y, h, below=0):
    """The layers below layer ``below`` are frozen."""
    x = stack.push(y, h)
    for k, scale in enumerate(stack.scales):
        x = stack.push(torch.tanh(x * (scale.detach() if k < below else scale)), h)
    loss = x.square().sum()
    loss.backward()
    return loss


def frozen(stack, y, h, *, connection=True, **options):
    stack.depth.requires_grad_(connection)
    return step(stack, y.detach(), h, **options)


def without_gradients(context):
    def forward(stack, y, h):
        with context():
            return stack(y, h)

    return forward


def nothing_learns(stack, y, h):
    stack.requires_grad_(False)
    return stack(y.detach(), h)


def broken(where):
    def run(stack, y, h):
        x = stack.push(y, h)
        for k in range(1, LAYERS + 1):
            if k == 5 and where != "backward":
                raise KeyError("layer 5")
            x = Broken.apply(x) if k == 5 else x
            f = lambda x, k=k: torch.tanh(stack.push(x, h, index=k))  # noqa: E731
            x = checkpoint(f, x, use_reentrant=False) if where == "checkpointed" else f(x)
        x.sum().backward()

    def raises(stack, y, h):
        # A checkpointed function refers to h and h to the graph. close cuts it.
        with pytest.raises(KeyError):
            run(stack, y, h)
        if where == "checkpointed":
            h.close()

    return raises


FREED = {
    "a step": step,
    "a frozen embedding": frozen,
    "a frozen connection": partial(frozen, connection=False),
    "frozen layers": partial(frozen, connection=False, below=3),
    "no grad": without_gradients(torch.no_grad),
    "inference": without_gradients(torch.inference_mode),
    "nothing learns": nothing_learns,
}
"""Passes whose end frees the states, although the caller keeps the history and the result. Where
the first boundaries need no gradient, they have no autograd node that does it."""
DROPPED = {
    "no backward": lambda stack, y, h: stack(y, h),
    "half of forward": lower,
    "half of forward without gradients": lambda s, y, h: without_gradients(torch.no_grad)(
        partial(lower, s), y, h
    ),
    **{f"broken {where}": broken(where) for where in ("forward", "checkpointed", "backward")},
}
"""Passes that hold their states until the caller drops the history and the result."""


@EACH
@INPLACE
@pytest.mark.parametrize("way", FREED | DROPPED)
def test_the_states_are_freed(backend, name, inplace, way):
    stack, y, alive = Stack(name, backend=backend), leaf(), []
    other, push = copy.deepcopy(stack), stack.push

    def watched(y, h, **call):
        x = push(y, h, **call)
        if not alive:
            alive.append(weakref.ref(h.depth_pass.states))
        assert h.nbytes > 0 or len(h) > LAYERS
        return x

    stack.push = watched
    with no_gc():
        h = history(inplace if "frozen" not in way and way != "a step" else True)
        kept = (FREED | DROPPED)[way](stack, y, h)
        if way in FREED:
            assert alive[0]() is None
            assert (h.nbytes, len(h)) == (0, LAYERS + 1)
            with pytest.raises(RuntimeError, match="new DepthHistory"):
                push(y, h)
            assert kept is not None
        else:
            del kept, h
            assert alive[0]() is None
    if "broken" in way:
        losses = (s(y, history(inplace)).sum() for s in (stack, other))
        got, want = (
            torch.autograd.grad(loss, (y, *s.parameters()))
            for loss, s in zip(losses, (stack, other), strict=True)
        )
        assert_close(got, want)


def test_who_holds_the_states_and_the_graph(backend):
    """The graph needs the states. A history does not hold the graph: a caller who keeps the
    history of a finished pass keeps its states, not its activations."""
    stack, y = Stack(backend=backend), leaf()
    with no_gc():
        h = history()
        out = stack(y, h)
        alive, node = weakref.ref(h.depth_pass.states), weakref.ref(out.grad_fn)
        del h
        assert alive() is not None
        h = history()
        out = stack(y, h)
        node = weakref.ref(out.grad_fn)
        del out
        assert node() is None
    assert len(h) == LAYERS + 1


@INPLACE
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_loss_beside_each_layer_alone(backend, inplace, checkpointed):
    """No boundary learns, and the last push frees the states."""
    stack, y = Stack(backend=backend), leaf().detach()
    stack.depth.requires_grad_(False)

    def layer(x, k, h):
        loss = torch.tanh(x * stack.scales[k]).square().sum()
        return stack.push(torch.tanh(x), h, index=k + 1), loss

    def gradient(h, wrap):
        x, losses = stack.push(y, h), []
        for k in range(LAYERS):
            x, loss = wrap(layer, x, k, h)
            losses.append(loss)
        assert not x.requires_grad
        assert len(losses) == LAYERS
        return torch.autograd.grad(sum(losses), stack.scales)

    def call(f, *args):
        return f(*args)

    h = history(inplace)
    got = gradient(h, partial(checkpoint, use_reentrant=False) if checkpointed else call)
    assert h.nbytes == 0
    assert_close(got, gradient(stack.plain(), call))
