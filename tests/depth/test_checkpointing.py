"""Several passes and backwards, and under checkpointing: a push is recomputed from the states of
its own pass, or refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepfast.nn import DLCL, DepthHistory
from tests.depth.stack import EACH, INPLACE, Stack, history, leaf
from tests.specifications.connections import PlainHistory

LAYERS, DIM, TOKENS = 6, 5, 4
PUSH = pytest.mark.parametrize("push", ["first", "last"])
ANOTHER = "another forward pass"


def call(f, x):
    return f(x)


class Net(Stack):
    """Layers around a depth connection in float64, each of them checkpointed with a push.

    push: whether a checkpointed function begins with a push or ends with one.
    group: layers in a checkpointed function.
    shared: functions refer to ``self.history``, which the next forward pass replaces: a mistake.
    p: of dropout before each push and behind each layer.
    more: checkpointed, False calls the functions alone; nested, a function in a function; whole,
        one function for the stack; options of `checkpoint`.
    """

    def __init__(
        self, push="first", name="dlcl", *, inplace=True, group=1, shared=False, p=0.0, **more
    ):
        super().__init__(name, LAYERS, DIM)
        self.matrices = nn.ParameterList(torch.randn(DIM, DIM) / 2 for _ in range(LAYERS))
        del self.scales
        self.double()
        self.first, self.inplace, self.group, self.shared = push == "first", inplace, group, shared
        self.p, self.nested, self.whole = p, more.pop("nested", False), more.pop("whole", False)
        self.detached = None
        if self.whole or not more.pop("checkpointed", True):
            self.wrap = call
        self.run = more

    def layer(self, k, x):
        x = x.detach() if k == self.detached else x
        return nn.functional.dropout(torch.sin(torch.tanh(x @ self.matrices[k])), self.p)

    def index(self, k):
        return k

    def wrap(self, f, y):
        if self.nested:
            inner, f = f, lambda y: checkpoint(inner, y, use_reentrant=False, **self.run)
        return checkpoint(f, y, use_reentrant=False, **self.run)

    def forward(self, y, history=None):
        """[y_0, what each function returns, the output]; in plain torch without checkpoints."""
        if self.whole and history is None:
            return [checkpoint(lambda y: self.functions(y, None)[-1], y, use_reentrant=False)]
        return self.functions(y, history)

    def functions(self, y, history):
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


def gradients(forward, ys, order, leaves, which=-1, chained=False):
    """Gradients from output ``which`` of each pass: of one sum, or of one pass after the other."""
    outs = [forward(ys[0])[which]]
    outs.append(forward(outs[0] if chained else ys[1])[which])
    losses = [(i + 1) * out.square().sum() for i, out in enumerate(outs)]
    losses = [sum(losses)] if order == "together" else [losses[i] for i in order]
    parts = [torch.autograd.grad(loss, leaves, materialize_grads=True) for loss in losses]
    return [sum(grads) for grads in zip(*parts, strict=True)]


FORMS = [
    {}, {"group": 4}, {"nested": True}, {"determinism_check": "none"}, {"early_stop": False},
    {"checkpointed": False}, {"whole": True},
]  # fmt: skip
FROZEN = [None, "embedding", "connection", "two layers too", "a layer detaches its input"]


@EACH
@INPLACE
@settings(max_examples=15)
@given(
    push=st.sampled_from(["first", "last"]),
    form=st.sampled_from(FORMS),
    order=st.sampled_from(["together", (0, 1), (1, 0)]),
    frozen=st.sampled_from(FROZEN),
    matrices=st.booleans(),
    which=st.sampled_from([-1, 0, 1, -3]),
    chained=st.booleans(),
)
def test_two_passes_at_once(name, inplace, push, form, order, frozen, matrices, which, chained):
    """From the output or what a layer returns, to all that learns or to the matrices alone, and the
    output of one pass may feed the next. Boundaries without a gradient to give are not in the
    graph, and a layer may cut it."""
    torch.manual_seed(0)
    net = Net(push, name, inplace=inplace, **form)
    ys = [embedding(), embedding()]
    net.depth.requires_grad_(frozen in (None, "embedding", FROZEN[-1]))
    net.matrices[: 2 if frozen == "two layers too" else 0].requires_grad_(False)
    net.detached = 3 if frozen == FROZEN[-1] else None
    ys = ys if frozen in (None, FROZEN[-1]) else [y.detach() for y in ys]
    leaves = [*net.matrices] if matrices else [*ys, *net.parameters()]
    leaves = [p for p in leaves if p.requires_grad]
    # A whole stack in one function returns its output alone. Two backwards share the first pass.
    which = -1 if form.get("whole") or frozen else which
    order = "together" if chained else order
    want = gradients(net.in_plain, ys, order, leaves, which, chained)
    assert_right(gradients(net, ys, order, leaves, which, chained), want)


@EACH
@INPLACE
@PUSH
def test_a_history_that_passes_share(name, inplace, push):
    """With the history of the other pass the gradients would be wrong by 7% to 80%. The newest pass
    may use it."""
    net = Net(push, name, inplace=inplace, shared=True)
    ys = [embedding(), embedding()]
    leaves = [*ys, *net.parameters()]
    for order, which in (("together", -1), ((0, 1), -1), ((1, 0), -1), ("together", -3)):
        for chained in (False, True):
            with pytest.raises(RuntimeError, match=ANOTHER):
                gradients(net, ys, "together" if chained else order, leaves, which, chained)
    want = torch.autograd.grad(net.in_plain(ys[1])[-1].square().sum(), leaves[1:])
    net(ys[0])
    assert_right(torch.autograd.grad(net(ys[1])[-1].square().sum(), leaves[1:]), want)


LIES = {
    "late": lambda k, calls: LAYERS - 1,
    "counted": lambda k, calls: len(calls) % (LAYERS + 1),
    "one below": lambda k, calls: max(0, k - 1),
}


@INPLACE
@PUSH
@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_index_is_an_error(inplace, push, lie):
    """Recomputation passes the index of another push."""
    for part in ("all", "matrices", "last matrix"):
        net, y, done, calls = Net(push, inplace=inplace), embedding(), [], []

        def index(k, done=done, calls=calls):
            calls.append(k)
            return LIES[lie](k, calls) if done else k

        leaves = {"all": [y, *net.parameters()], "matrices": [*net.matrices]}
        leaves = leaves.get(part, [net.matrices[-1]])
        net.index = index
        loss = net(y)[-1].square().sum()
        done.append(True)
        try:
            got = torch.autograd.grad(loss, leaves)
        except RuntimeError:
            continue
        # The last layer's index is the right one here.
        assert (part, lie) == ("last matrix", "late")
        assert_right(got, torch.autograd.grad(net.in_plain(y)[-1].square().sum(), leaves))


@EACH
@INPLACE
@settings(max_examples=6)
@given(
    push=st.sampled_from(["first", "last"]),
    checkpointed=st.booleans(),
    before=st.sampled_from(["whole", (6, 3), (5, 0), (3, 1), "exception"]),
)
def test_a_second_backward(name, inplace, push, before, checkpointed):
    """After a whole one, a part, or one that failed half-way."""
    torch.manual_seed(0)
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
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_recomputed_bits(name, inplace, push, p):
    """Dropout at the boundary and in the layer too."""
    net, y = Net(push, name, inplace=inplace, p=p), embedding()

    def run():
        torch.manual_seed(5)
        out = net(y)[-1]
        return [out, *torch.autograd.grad(out.square().sum(), [y, *net.parameters()])]

    again, net.wrap = run(), call
    assert all(map(torch.equal, again, run()))


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


@EACH
def test_reentrant_checkpointing(backend, name):
    """Of the layer alone: the boundary stays outside, and a nested backward pass inside a layer
    does not disturb it. Around a push it is an error: the graph would contain the repeated push and
    give wrong gradients. So is a function without an index."""
    stack, y = Stack(name, backend=backend), leaf()
    leaves, plain, found = (y, *stack.depth.parameters()), stack.layer, []
    for wrap in (lambda f, *a: f(*a), lambda f, *a: checkpoint(f, *a, use_reentrant=True)):
        stack.layer = lambda k, x, wrap=wrap: wrap(plain, k, x)
        for q in leaves:
            q.grad = None
        stack(y, history()).square().sum().backward()
        found.append([q.grad for q in leaves])
    assert all(map(torch.equal, *found))
    for reentrant, index, words in ((True, 0, "use_reentrant=False"), (False, None, "pass index=")):
        h = history()
        x = checkpoint(
            lambda y, h=h, i=index: torch.tanh(stack.push(y, h, index=i)),
            y,
            use_reentrant=reentrant,
        )
        with pytest.raises(RuntimeError, match=words):
            stack.push(x, h).sum().backward()
