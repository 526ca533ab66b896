"""Gradients of one or several passes, whole or in parts, and under checkpointing: a push is
recomputed from the states of its own pass, or refused."""

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.depth.stack import DIM, EACH, INPLACE, LAYERS, TOKENS, Stack, history, leaf, results

PUSH = pytest.mark.parametrize("push", ["first", "last"])
ANOTHER = "another forward pass"


class Net(Stack):
    """A stack in float64. Its layers run in functions, each with a push.

    push: whether a function begins with a push or ends with one.
    wrap: what is checkpointed: "each" function, a function in a function ("nested"), the "whole"
        stack, or "nothing".
    group: layers in a function.
    shared: functions refer to ``self.history``, which the next forward pass replaces: a mistake.
    p: of dropout before each push and behind each layer.
    cut, skipped: layers whose input is detached, and layers that return their input.
    top: layers that run.
    more: options of `checkpoint`.
    """

    def __init__(
        self, name, push, *, inplace=True, wrap="each", group=1, shared=False, p=0.0, cut=(),
        skipped=(), top=LAYERS, **more,
    ):  # fmt: skip
        super().__init__(name)
        self.scales = nn.ParameterList(self._parameters.pop("scales").unbind())
        self.double()
        self.first, self.inplace, self.wrap, self.group = push == "first", inplace, wrap, group
        self.shared, self.p, self.cut, self.skipped = shared, p, cut, skipped
        self.top, self.more, self.index = top, more, lambda k: k

    def layer(self, k, x):
        if k in self.skipped:
            return x
        x = x.detach() if k in self.cut else x
        return nn.functional.dropout(super().layer(k, x), self.p)

    def run(self, f, x):
        if self.wrap in ("whole", "nothing"):
            return f(x)
        if self.wrap == "nested":
            inner, f = f, lambda x: checkpoint(inner, x, use_reentrant=False, **self.more)
        return checkpoint(f, x, use_reentrant=False, **self.more)

    def forward(self, y):
        """[y_0, what each function returns, the output of the stack]."""
        if self.wrap == "whole":
            return [checkpoint(lambda y: self.eager(y)[-1], y, use_reentrant=False)]
        return self.eager(y)

    def eager(self, y):
        return self.functions(y, history(self.inplace), self.run)

    def in_plain(self, y):
        """The same in plain torch without checkpoints."""
        outs = self.functions(y, self.plain(), lambda f, x: f(x))
        return outs[-1:] if self.wrap == "whole" else outs

    def functions(self, y, own, run):
        self.history = own

        def push(x, k):
            at = self.history if self.shared else own
            return self.push(x, at, index=self.index(k), dropout_p=self.p)

        def function(ks, x):
            for k in ks:
                x = self.layer(k, push(x, k)) if self.first else push(self.layer(k, x), k + 1)
            return x if self.first else torch.tanh(x)

        outs = [y]
        x = y if self.first else self.push(y, own, index=0)
        for k in range(0, self.top, self.group):
            ks = range(k, min(k + self.group, self.top))
            x = run(lambda x, ks=ks: function(ks, x), x)
            outs.append(x)
        return [*outs, self.push(x, own, index=self.top)] if self.first else outs


def embedding():
    return leaf(dtype=torch.float64)


def assert_right(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def gradients(forward, ys, order, rows, leaves):
    """Of a loss on some rows of one pass or two: of their sum, or of one pass after the other.
    ``leaves`` may be the number of a row of the first pass."""
    outs = [forward(ys[0])]
    if order != "alone":
        outs.append(forward(outs[0][-1] if order == "chained" else ys[1]))
    losses = [
        (i + 1) * sum(out[row % len(out)].square().sum() for row in rows)
        for i, out in enumerate(outs)
    ]
    losses = [losses[i] for i in order] if isinstance(order, tuple) else [sum(losses)]
    leaves = [outs[0][leaves % len(outs[0])]] if isinstance(leaves, int) else leaves
    parts = [torch.autograd.grad(loss, leaves, materialize_grads=True) for loss in losses]
    return [sum(grads) for grads in zip(*parts, strict=True)]


NOTHING = {"wrap": "nothing"}
FORMS = [
    NOTHING, NOTHING, NOTHING | {"top": 5}, {}, {"group": 4}, {"wrap": "nested"}, {"wrap": "whole"},
    {"top": 5}, {"determinism_check": "none"}, {"early_stop": False},
]  # fmt: skip


@EACH
@INPLACE
@pytest.mark.parametrize("number", range(8))
def test_gradients(name, inplace, number):
    """A loss on some rows of one pass or two, where the output of one may feed the next, of a stack
    that may be left before its top. Its gradient is taken of all that learns, of the layers, of the
    depth weights or of a row. The embedding may be frozen, with it the connection, and with both
    the lowest layers: boundaries without a gradient to give are not in the graph."""
    chance = random.Random(f"{name} {inplace} {number}")
    draw = chance.choice
    push, form, frozen = draw(["first", "last"]), draw(FORMS), draw([0, 0, 1, 2, 3])
    order = draw(["alone", "together", "chained", (0, 1), (1, 0)])
    rows = {*chance.sample(range(LAYERS + 2), draw([1, 2, 3]))}
    of = draw(["all", "all", "scales", "weights", draw(range(LAYERS + 1))])
    few = {
        what: chance.sample(range(LAYERS - 1), draw([0, 0, 1, 2, 4])) for what in ("cut", "skipped")
    }
    net, ys = Net(name, push, inplace=inplace, **form, **few), [embedding(), embedding()]
    # A function whose layer is cut off is recomputed after a boundary of its pass, or refused.
    rows = rows | {-1} if frozen or few["cut"] else rows
    if frozen:
        ys, net.top, of = [y.detach() for y in ys], LAYERS, "all"
        net.depth.requires_grad_(frozen == 1)
        net.scales[: 2 * (frozen == 3)].requires_grad_(False)
    kinds = {"scales": [*net.scales], "weights": [next(net.depth.parameters())]}
    leaves = kinds.get(of, [p for p in (*ys, *net.parameters()) if p.requires_grad])
    leaves = of if isinstance(of, int) else leaves
    want = gradients(net.in_plain, ys, order, rows, leaves)
    torch.testing.assert_close(gradients(net, ys, order, rows, leaves), want)


@EACH
@PUSH
def test_a_history_that_passes_share(name, push):
    """With the history of the other pass the gradients would be wrong by 7% to 80%. The newest pass
    may use it."""
    net, ys = Net(name, push, shared=True), [embedding(), embedding()]
    leaves = [*ys, *net.parameters()]
    for order, row in (("together", -1), ("chained", -3), ((0, 1), -3), ((1, 0), -1)):
        with pytest.raises(RuntimeError, match=ANOTHER):
            gradients(net, ys, order, {row}, leaves)
    want = gradients(net.in_plain, ys[1:], "alone", {-1}, leaves[1:])
    net(ys[0])
    assert_right(gradients(net, ys[1:], "alone", {-1}, leaves[1:]), want)


LIES = {
    "the last": lambda k: LAYERS - 1,
    "counted down": lambda k: LAYERS - k,
    "one below": lambda k: max(0, k - 1),
}


@PUSH
@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_index_is_an_error(push, lie):
    """Recomputation passes the index of another push."""
    net, y = Net("dlcl", push), embedding()
    for leaves in ([y, *net.parameters()], [*net.scales]):
        net.index = lambda k: k
        loss = net(y)[-1].square().sum()
        net.index = LIES[lie]
        with pytest.raises(RuntimeError):
            torch.autograd.grad(loss, leaves)


@EACH
@INPLACE
@pytest.mark.parametrize("before", [(-1, None), (6, 3), (5, 0), (3, 1), "exception"])
def test_a_second_backward(name, inplace, before):
    """After a whole one, a part, or one that failed half-way. In place it must begin below the row
    that the first one has reached. It gives nothing to rows that it does not reach itself."""
    draw = random.Random(f"{name} {inplace} {before}").choice
    push, wrap, row = draw(["first", "last"]), draw(["each", "nothing"]), draw([-1, 3])
    net, y = Net(name, push, inplace=inplace, wrap=wrap), embedding()
    leaves = [y, *net.parameters()]
    passes = net.in_plain(y), net(y)
    outs = passes[1]
    if before == "exception":
        handle = outs[3].register_hook(lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            torch.autograd.grad(outs[-1].sum(), leaves, retain_graph=True)
        handle.remove()
    else:
        top, bottom = before
        part, got = (
            torch.autograd.grad(
                x[top].square().sum(), leaves if bottom is None else x[bottom], retain_graph=True
            )
            for x in passes
        )
        assert_right(got, part)
    want, got = (
        lambda x=x: torch.autograd.grad(x[row].square().sum(), leaves, materialize_grads=True)
        for x in passes
    )
    if inplace and (row != 3 or before not in ((6, 3), "exception")):
        with pytest.raises(RuntimeError, match="inplace=False"):
            got()
    else:
        assert_right(got(), want())


@EACH
@PUSH
def test_recomputed_bits(name, push):
    """Dropout at the boundary and in the layer too."""
    net, y, found = Net(name, push, p=0.4), embedding(), []
    for net.wrap in ("each", "nothing"):
        torch.manual_seed(5)
        out = net(y)[-1]
        found.append([out, *torch.autograd.grad(out.square().sum(), [y, *net.parameters()])])
    assert all(map(torch.equal, *found))


@EACH
def test_reentrant_checkpointing(name):
    """Of the layer alone: the boundary stays outside, and a nested backward pass inside a layer
    does not disturb it. Around a push it is an error: the graph would contain the repeated push and
    give wrong gradients. So is a function without an index."""
    stack, (y, dout) = Stack(name), torch.randn(2, TOKENS, DIM)
    want, plain = results(stack, history(), y, dout), stack.layer
    stack.layer = lambda k, x: checkpoint(plain, k, x, use_reentrant=True)
    torch.testing.assert_close(results(stack, history(), y, dout), want)
    for reentrant, index, words in ((True, 0, "use_reentrant=False"), (False, None, "pass index=")):
        h = history()
        x = checkpoint(
            lambda y, h=h, i=index: torch.tanh(stack.push(y, h, index=i)),
            leaf(),
            use_reentrant=reentrant,
        )
        with pytest.raises(RuntimeError, match=words):
            stack.push(x, h).sum().backward()
