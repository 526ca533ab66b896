"""Passes: derivatives that are refused, what passes share, and what their end frees."""

import contextlib
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tests.depth.stack import DIM, EACH, INPLACE, LAYERS, TOKENS, Stack, history, leaf, no_gc


@EACH
@pytest.mark.parametrize("normalize_embedding", [True, False])
def test_parameters_changed_before_backward(name, normalize_embedding):
    """The gradient is that of the forward pass."""
    dlcl = name in ("dlcl", "post-norm")
    options = {"normalize_embedding": normalize_embedding} if dlcl else {}
    stack, y = Stack(name, **options), leaf()
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
def test_derivatives_that_are_refused(name):
    """Of second order, also of a linear loss. Forward mode is refused with and without gradients;
    the tangent is never silently zero."""
    stack, y = Stack(name), leaf()
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


# ---- what passes share ---------------------------------------------------------------------------


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


@EACH
@pytest.mark.parametrize(
    "learns",
    ["everything", "connection", "layers", "upper layers", "nothing", "no_grad", "inference_mode"],
)
def test_the_end_of_a_pass_frees_the_states(name, learns):
    """Although the caller keeps the history and the result. Where the first boundaries need no
    gradient, they have no autograd node that does it."""
    stack, y, h = Stack(name), leaf(), history()
    y.requires_grad_(learns not in ("connection", "layers", "upper layers", "nothing"))
    stack.depth.requires_grad_(learns not in ("layers", "upper layers", "nothing"))
    stack.scales.requires_grad_(learns != "nothing")
    with no_gc(), getattr(torch, learns, contextlib.nullcontext)():
        x = stack.push(y, h)
        alive = weakref.ref(h.depth_pass.states)
        for k in range(LAYERS):
            assert h.nbytes > 0
            x = stack.push(x if learns == "upper layers" and k < 3 else stack.layer(k, x), h)
        if x.requires_grad:
            x.sum().backward()
        assert alive() is None
    assert (h.nbytes, len(h)) == (0, LAYERS + 1)
    with pytest.raises(RuntimeError, match="new DepthHistory"):
        stack.push(y, h)


@EACH
@INPLACE
@pytest.mark.parametrize("end", ["none", "no_grad", "forward", "checkpointed", "backward"])
def test_the_states_of_a_pass_that_ends_early_are_freed(name, inplace, end):
    """With the history and the result: without backward, half-way without gradients, and where a
    layer fails in forward, in a checkpointed function, or in backward. A history does not hold the
    graph: a caller who keeps it keeps the states, not the activations."""
    stack, y = Stack(name), leaf()

    def run(h):
        x = stack.push(y, h)
        for k in range(LAYERS):
            if k == 4 and end == "backward":
                x.register_hook(lambda _: 1 // 0)
            elif k == 4 and end != "none":
                raise ZeroDivisionError

            def layer(x, k=k):
                return stack.push(stack.layer(k, x), h, index=k + 1)

            x = checkpoint(layer, x, use_reentrant=False) if end == "checkpointed" else layer(x)
        if end == "backward":
            x.sum().backward()
        return x

    with no_gc(), getattr(torch, end, contextlib.nullcontext)():
        h, out = history(inplace), None
        with contextlib.suppress(ZeroDivisionError):
            out = run(h)
        alive = weakref.ref(h.depth_pass.states)
        if end == "none":
            node = weakref.ref(out.grad_fn)
            del out
            assert node() is None
        if end == "checkpointed":
            # A checkpointed function refers to h and h to the graph. close cuts it.
            h.close()
        del h
        assert alive() is None
