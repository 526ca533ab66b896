"""Several passes and backwards, and under checkpointing: a push is recomputed from the states of
its own pass, or refused."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepfast.nn import DLCL, DepthHistory
from tests.depth.stack import CONNECTIONS, EACH, INPLACE, Stack, assert_equal, history, leaf
from tests.specifications.connections import PlainHistory

LAYERS, DIM, TOKENS = 6, 5, 4
PUSH = pytest.mark.parametrize("push", ["first", "last"])
ORDERS = pytest.mark.parametrize("order", ["together", (0, 1), (1, 0)], ids=str)
WAYS = pytest.mark.parametrize("way", [{}, {"shared": True}, {"checkpointed": False}], ids=str)
ANOTHER = "another forward pass"


def call(f, x):
    return f(x)


class Net(Stack):
    """Layers around a depth connection in float64, each of them checkpointed with a push.

    push: whether a checkpointed function begins with a push or ends with one.
    group: layers in a checkpointed function.
    shared: functions refer to ``self.history``, which the next forward pass replaces: a mistake.
    more: checkpointed, False calls the functions alone; p, dropout before each push; nested, a
        function in a function; options of `checkpoint`.
    """

    def __init__(self, push="first", name="dlcl", *, inplace=True, group=1, shared=False, **more):
        super().__init__(name, LAYERS, DIM)
        self.matrices = nn.ParameterList(torch.randn(DIM, DIM) / 2 for _ in range(LAYERS))
        del self.scales
        self.double()
        self.first, self.inplace, self.group, self.shared = push == "first", inplace, group, shared
        self.p, self.nested = more.pop("p", 0.0), more.pop("nested", False)
        if not more.pop("checkpointed", True):
            self.wrap = call
        self.run = more

    def layer(self, k, x):
        return torch.sin(torch.tanh(x @ self.matrices[k]))

    def index(self, k):
        return k

    def wrap(self, f, y):
        if self.nested:
            inner, f = f, lambda y: checkpoint(inner, y, use_reentrant=False, **self.run)
        return checkpoint(f, y, use_reentrant=False, **self.run)

    def forward(self, y, history=None):
        """[y_0, what each function returns, the output]; in plain torch without checkpoints."""
        own = history or DepthHistory(inplace=self.inplace, block=2)
        self.history = own
        wrap = call if isinstance(own, PlainHistory) else self.wrap

        def push(x, k):
            at = self.history if self.shared and isinstance(own, DepthHistory) else own
            return self.push(x, at, index=self.index(k), dropout_p=self.p)

        def function(ks, x):
            for k in ks:
                x = self.layer(k, push(x, k)) if self.first else push(self.layer(k, x), k + 1)
            return x if self.first else torch.sin(x)

        outs = [y]
        x = y if self.first else self.push(y, own, index=0)
        for k in range(0, LAYERS, self.group):
            ks = range(k, min(k + self.group, LAYERS))
            x = wrap(lambda x, ks=ks: function(ks, x), x)
            outs.append(x)
        return [*outs, self.push(x, own, index=LAYERS) if self.first else x]

    def in_plain(self, y):
        return self(y, self.plain())


def embedding():
    return leaf(TOKENS, DIM, dtype=torch.float64)


def assert_right(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def gradients(forward, ys, order, leaves, which=-1):
    """Gradients from output ``which`` of each pass: of one sum, or of one pass after the other."""
    outs = [forward(y)[which] for y in ys]
    losses = [(i + 1) * out.square().sum() for i, out in enumerate(outs)]
    losses = [sum(losses)] if order == "together" else [losses[i] for i in order]
    parts = [torch.autograd.grad(loss, leaves, materialize_grads=True) for loss in losses]
    return [sum(grads) for grads in zip(*parts, strict=True)]


def check(net, ys, order, leaves, which=-1):
    """The gradients, or the error where the history is that of another pass."""
    want = gradients(net.in_plain, ys, order, leaves, which)
    if net.shared and which:
        with pytest.raises(RuntimeError, match=ANOTHER):
            gradients(net, ys, order, leaves, which)
    else:
        assert_right(gradients(net, ys, order, leaves, which), want)


FORMS = [
    ("first", {}),
    ("last", {}),
    ("first", {"group": 4}),
    ("last", {"group": 4}),
    ("first", {"nested": True}),
    ("last", {"nested": True}),
    ("first", {"determinism_check": "none"}),
    ("last", {"early_stop": False}),
]


@EACH
@INPLACE
@ORDERS
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("part", ["all", "matrices"])
@pytest.mark.parametrize(("push", "form"), FORMS, ids=str)
def test_two_passes_at_once(name, inplace, push, order, part, form, shared):
    """With the history of the other pass the gradients would be wrong by 7% to 80%."""
    net = Net(push, name, inplace=inplace, shared=shared, **form)
    ys = [embedding(), embedding()]
    check(net, ys, order, [*ys, *net.parameters()] if part == "all" else [*net.matrices])


@INPLACE
@PUSH
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("which", [0, 1, 4, LAYERS])
def test_a_loss_on_what_one_layer_returns(inplace, push, shared, which):
    """The boundaries above it are not part of backward."""
    net, ys = Net(push, inplace=inplace, shared=shared), [embedding(), embedding()]
    check(net, ys, "together", [*ys, *net.parameters()], which)


@EACH
@INPLACE
@PUSH
@ORDERS
@WAYS
@pytest.mark.parametrize(
    "frozen", ["embedding", "connection", "two layers too", "a layer detaches its input"]
)
def test_nodes_that_lead_to_no_boundary(name, inplace, push, frozen, way, order):
    """Boundaries without a gradient to give are not in the graph, and a layer may cut it."""
    net, ys = Net(push, name, inplace=inplace, **way), [embedding(), embedding()]
    if frozen == "a layer detaches its input":
        layer = net.layer
        net.layer = lambda k, x: layer(k, x.detach() if k == 3 else x)
    else:
        net.depth.requires_grad_(frozen == "embedding")
        net.matrices[: 2 if frozen == "two layers too" else 0].requires_grad_(False)
        ys = [y.detach() for y in ys]
    check(net, ys, order, [p for p in (*ys, *net.parameters()) if p.requires_grad])


@INPLACE
@PUSH
def test_the_newest_pass_may_use_a_shared_history(inplace, push):
    net, ys = Net(push, inplace=inplace, shared=True), [embedding(), embedding()]
    leaves = [ys[1], *net.parameters()]
    want = torch.autograd.grad(net.in_plain(ys[1])[-1].square().sum(), leaves)
    net(ys[0])
    assert_right(torch.autograd.grad(net(ys[1])[-1].square().sum(), leaves), want)


@EACH
@INPLACE
@PUSH
@WAYS
def test_the_output_of_one_pass_feeds_the_next(name, inplace, push, way):
    """The second pass's gradient flows into the first one's boundaries."""
    net, y = Net(push, name, inplace=inplace, **way), embedding()
    leaves = [y, *net.parameters()]
    want = torch.autograd.grad(net.in_plain(net.in_plain(y)[-1])[-1].square().sum(), leaves)
    loss = net(net(y)[-1])[-1].square().sum()
    if net.shared:
        with pytest.raises(RuntimeError, match=ANOTHER):
            torch.autograd.grad(loss, leaves)
    else:
        assert_right(torch.autograd.grad(loss, leaves), want)


@PUSH
@pytest.mark.parametrize("lie", ["late", "counted", "one below"])
@pytest.mark.parametrize("part", ["all", "last matrix", "matrices"])
@INPLACE
def test_a_wrong_index_is_an_error(inplace, push, lie, part):
    """Recomputation passes the index of another push."""
    net, y, done, calls = Net(push, inplace=inplace), embedding(), [], []

    def index(k):
        calls.append(k)
        if not done:
            return k
        if lie == "late":
            return LAYERS - 1
        return len(calls) % (LAYERS + 1) if lie == "counted" else max(0, k - 1)

    leaves = {
        "all": [y, *net.parameters()],
        "matrices": [*net.matrices],
        "last matrix": [net.matrices[-1]],
    }[part]
    want = torch.autograd.grad(net.in_plain(y)[-1].square().sum(), leaves)
    net.index = index
    out = net(y)[-1]
    done.append(True)
    try:
        got = torch.autograd.grad(out.square().sum(), leaves)
    except RuntimeError:
        return
    # The last layer's index is the right one here.
    assert (part, lie) == ("last matrix", "late")
    assert_right(got, want)


@EACH
@PUSH
@INPLACE
@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("before", ["whole", (6, 3), (5, 0), (3, 1), "exception"], ids=str)
def test_a_second_backward(name, inplace, push, before, checkpointed):
    """After a whole one, a part, or one that failed half-way."""
    net, y = Net(push, name, inplace=inplace, checkpointed=checkpointed), embedding()
    leaves = [y, *net.parameters()]
    plain, outs = net.in_plain(y), net(y)
    want = torch.autograd.grad(plain[-1].square().sum(), leaves, retain_graph=True)
    loss = outs[-1].square().sum()
    if before == "whole":
        assert_right(torch.autograd.grad(loss, leaves, retain_graph=True), want)
    elif before == "exception":
        handle = outs[3].register_hook(lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            torch.autograd.grad(loss, leaves, retain_graph=True)
        handle.remove()
    else:
        top, bottom = before
        part, got = (
            torch.autograd.grad(x[top].sum(), x[bottom], retain_graph=True) for x in (plain, outs)
        )
        assert_right(got, part)
    if inplace:
        with pytest.raises(RuntimeError, match="inplace=False"):
            torch.autograd.grad(loss, leaves)
    else:
        assert_right(torch.autograd.grad(loss, leaves), want)


@EACH
@INPLACE
@PUSH
def test_a_whole_stack_in_one_checkpoint(name, inplace, push):
    net, ys = Net(push, name, inplace=inplace), [embedding(), embedding()]
    net.wrap = call
    leaves = [*ys, *net.parameters()]

    def whole(y):
        return [checkpoint(lambda y: net(y)[-1], y, use_reentrant=False)]

    want = gradients(net.in_plain, ys, "together", leaves)
    assert_right(gradients(whole, ys, "together", leaves), want)


@EACH
@INPLACE
@PUSH
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_recomputed_bits(name, inplace, push, p):
    """Dropout at the boundary and in the layer too."""
    net, y = Net(push, name, inplace=inplace, p=p), embedding()
    layer, leaves = net.layer, [y, *net.parameters()]
    net.layer = lambda k, x: nn.functional.dropout(layer(k, x), p)

    def run():
        torch.manual_seed(5)
        out = net(y)[-1]
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    again, net.wrap = run(), call
    assert_equal(again, run())


def test_a_recomputation_that_would_push_a_new_state():
    """The history that recomputation finds has as many states as the index says."""
    net, y = Net(shared=True), embedding()
    out = net(y)[-1]
    net.history, x = DepthHistory(), y
    for k in range(LAYERS - 1):
        x = net.push(x, net.history, index=k)
    with pytest.raises(RuntimeError, match=ANOTHER):
        out.sum().backward()
    assert len(net.history) == LAYERS - 1


def test_checkpointing_keeps_one_state_per_layer(meter):
    dim, tokens = 128, 64

    def left(checkpointed):
        dlcl, y = DLCL(20, dim, backend="cpu"), leaf(tokens, dim)
        layers = [nn.Sequential(nn.Linear(dim, dim), nn.ReLU()) for _ in range(20)]
        with meter() as m:
            h = history()

            def push_and_run(y, k):
                return layers[k](dlcl(y, h, index=k))

            for k in range(20):
                if checkpointed:
                    y = checkpoint(push_and_run, y, k, use_reentrant=False)
                else:
                    y = push_and_run(y, k)
            out = dlcl(y, h, index=20)
            h = y = None
        assert out.requires_grad
        return m.left / (tokens * dim * 4)

    # The states, each function's input y_k, and the output. Statistics are 1/128 of a state each.
    assert left(True) <= 22 + 21 + 4
    assert left(True) < left(False) * 0.8


@pytest.mark.parametrize("name", CONNECTIONS)
def test_reentrant_checkpointing_of_the_layer_alone(backend, name):
    """The boundary stays outside; a nested backward pass inside a layer does not disturb it."""
    stack, y = Stack(name, backend=backend), leaf()
    leaves, plain, found = (y, *stack.depth.parameters()), stack.layer, []
    for wrap in (lambda f, *a: f(*a), lambda f, *a: checkpoint(f, *a, use_reentrant=True)):
        stack.layer = lambda k, x, wrap=wrap: wrap(plain, k, x)
        for q in leaves:
            q.grad = None
        stack(y, history()).square().sum().backward()
        found.append([q.grad for q in leaves])
    assert_equal(*found)


def test_reentrant_checkpointing_around_a_push_is_an_error(backend):
    """The graph would contain the repeated push and give wrong gradients."""
    dlcl = DLCL(1, DIM, norm=None, learnable=False, backend=backend)
    h, y = history(), leaf(TOKENS, DIM)
    y = checkpoint(lambda y: torch.tanh(dlcl(y, h, index=0)), y, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        dlcl(y, h, index=1).sum().backward()


@EACH
def test_checkpointing_without_an_index_is_an_error(backend, name):
    stack, y, h = Stack(name, backend=backend), leaf(), history()
    for k in range(3):
        f = lambda y, k=k: stack.layer(k, stack.push(y, h))  # noqa: E731
        y = checkpoint(f, y, use_reentrant=False)
    out = stack.push(y, h)
    with pytest.raises(RuntimeError, match="pass index="):
        out.sum().backward()
