"""Under checkpointing a push is recomputed from the states of its own pass, or refused."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from deepfast.nn import DLCL, DepthHistory
from tests.depth.stack import MODES

LAYERS, DIM, TOKENS = 6, 5, 4
PUSH = pytest.mark.parametrize("push", ["first", "last"])
ANOTHER = "another forward pass"


class Net(nn.Module):
    """tanh layers around a DLCL in float64, each of them checkpointed together with a push.

    push: whether a checkpointed function begins with a push or ends with one.
    group: layers in a checkpointed function.
    shared: functions refer to ``self.history``, which the next forward pass replaces: a mistake.
    """

    def __init__(self, push="first", *, inplace=True, group=1, shared=False, nested=False, **run):
        super().__init__()
        self.dlcl = DLCL(LAYERS, DIM)
        self.matrices = nn.Parameter(torch.randn(LAYERS, DIM, DIM) / 2)
        with torch.no_grad():
            for p in self.dlcl.parameters():
                p.mul_(1 + 0.3 * torch.randn_like(p))
        self.double()
        self.push, self.inplace, self.group, self.shared = push, inplace, group, shared
        self.nested, self.run = nested, run

    def layer(self, k, x):
        return torch.sin(torch.tanh(x @ self.matrices[k]))

    def index(self, k):
        return k

    def wrap(self, f, y):
        if self.nested:
            inner, f = f, lambda y: checkpoint(inner, y, use_reentrant=False, **self.run)
        return checkpoint(f, y, use_reentrant=False, **self.run)

    def forward(self, y):
        """[y_0, what each checkpointed function returns, the output]."""
        self.history = own = DepthHistory(inplace=self.inplace, block=2)
        history = (lambda: self.history) if self.shared else (lambda: own)

        def first(ks, y):
            for k in ks:
                y = self.layer(k, self.dlcl(y, history(), index=self.index(k)))
            return y

        def last(ks, x):
            for k in ks:
                x = self.dlcl(self.layer(k, x), history(), index=self.index(k + 1))
            return torch.sin(x)

        outs = [y]
        x = y if self.push == "first" else self.dlcl(y, own, index=0)
        for k in range(0, LAYERS, self.group):
            ks = range(k, min(k + self.group, LAYERS))
            x = self.wrap(lambda x, ks=ks: (first if self.push == "first" else last)(ks, x), x)
            outs.append(x)
        return [*outs, self.dlcl(x, own, index=LAYERS) if self.push == "first" else x]

    def plain(self, y):
        """The same without an engine and without checkpointing."""
        d, w, z, outs = self.dlcl, self.dlcl.effective_weight(), [], [y]

        def mixed(y):
            k = len(z)
            norm = (DIM,), d.norm_weight[k], d.norm_bias[k], d.eps
            z.append(nn.functional.layer_norm(y, *norm) if k else y)
            return sum(w[k, j] * z[j] for j in range(k + 1))

        x = y if self.push == "first" else mixed(y)
        for k in range(LAYERS):
            x = self.layer(k, mixed(x)) if self.push == "first" else mixed(self.layer(k, x))
            last = (k + 1) % self.group == 0 or k == LAYERS - 1
            if self.push == "last" and last:
                x = torch.sin(x)
            if last:
                outs.append(x)
        return [*outs, mixed(x) if self.push == "first" else x]


def embedding():
    return torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)


def sum_of_squares(*outs):
    return sum((k + 1) * out.square().sum() for k, out in enumerate(outs))


def assert_right(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def gradients(forward, ys, order, leaves, which=-1):
    """Gradients from output ``which`` of each pass: of one sum, or of one pass after the other."""
    outs = [forward(y)[which] for y in ys]
    if order == "together":
        return torch.autograd.grad(sum_of_squares(*outs), leaves, materialize_grads=True)
    total = [torch.zeros_like(leaf) for leaf in leaves]
    for i in order:
        loss = (i + 1) * outs[i].square().sum()
        part = torch.autograd.grad(loss, leaves, materialize_grads=True)
        total = [a + b for a, b in zip(total, part, strict=True)]
    return total


ORDERS = pytest.mark.parametrize("order", ["together", (0, 1), (1, 0)], ids=str)


@MODES
@ORDERS
@pytest.mark.parametrize(
    ("push", "form"),
    [("first", {}), ("last", {}), ("first", {"group": 4}), ("last", {"nested": True})],
    ids=str,
)
def test_two_passes_at_once(inplace, push, order, form):
    net, ys = Net(push, inplace=inplace, **form), [embedding(), embedding()]
    leaves = [*ys, *net.parameters()]
    want = gradients(net.plain, ys, order, leaves)
    assert_right(gradients(net, ys, order, leaves), want)


@MODES
@ORDERS
@pytest.mark.parametrize("part", ["all", "matrices"])
@pytest.mark.parametrize(
    ("push", "form"),
    [
        ("first", {}),
        ("last", {}),
        ("last", {"group": 4}),
        ("first", {"nested": True}),
        ("first", {"determinism_check": "none"}),
        ("last", {"early_stop": False}),
    ],
    ids=str,
)
def test_a_history_that_the_next_pass_replaced_is_an_error(inplace, push, order, part, form):
    """The states are those of another pass; their gradients would be wrong by 7% to 80%."""
    net, ys = Net(push, inplace=inplace, shared=True, **form), [embedding(), embedding()]
    leaves = [*ys, *net.parameters()] if part == "all" else [net.matrices]
    with pytest.raises(RuntimeError, match=ANOTHER):
        gradients(net, ys, order, leaves)


@MODES
@PUSH
def test_the_newest_pass_may_use_a_shared_history(inplace, push):
    net, ys = Net(push, inplace=inplace, shared=True), [embedding(), embedding()]
    leaves = [ys[1], *net.parameters()]
    want = torch.autograd.grad(net.plain(ys[1])[-1].square().sum(), leaves)
    net(ys[0])
    assert_right(torch.autograd.grad(net(ys[1])[-1].square().sum(), leaves), want)


@MODES
@PUSH
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("which", [0, 1, 4, LAYERS])
def test_a_loss_on_what_one_layer_returns(inplace, push, shared, which):
    """The boundaries above it are not part of backward."""
    net, ys = Net(push, inplace=inplace, shared=shared), [embedding(), embedding()]
    leaves = [*ys, *net.parameters()]
    want = gradients(net.plain, ys, "together", leaves, which)
    if shared and which:
        with pytest.raises(RuntimeError, match=ANOTHER):
            gradients(net, ys, "together", leaves, which)
    else:
        assert_right(gradients(net, ys, "together", leaves, which), want)


@MODES
@PUSH
def test_the_output_of_one_pass_feeds_the_next(inplace, push):
    """The second pass's gradient flows into the first one's boundaries."""
    net, y = Net(push, inplace=inplace), embedding()
    leaves = [y, *net.parameters()]
    want = torch.autograd.grad(net.plain(net.plain(y)[-1])[-1].square().sum(), leaves)
    assert_right(torch.autograd.grad(net(net(y)[-1])[-1].square().sum(), leaves), want)
    net.shared = True
    out = net(net(y)[-1])[-1]
    with pytest.raises(RuntimeError, match=ANOTHER):
        torch.autograd.grad(out.square().sum(), leaves)


@PUSH
@pytest.mark.parametrize("lie", ["late", "counted", "one below"])
@pytest.mark.parametrize("part", ["all", "last matrix", "matrices"])
@MODES
def test_a_wrong_index_is_an_error(inplace, push, lie, part):
    """Recomputation passes the index of another push."""
    net, y = Net(push, inplace=inplace), embedding()
    matrices = net.matrices
    del net.matrices
    net.matrices = nn.ParameterList(matrices.detach().unbind(0))
    done, calls = [], []

    def index(k):
        calls.append(k)
        if not done:
            return k
        if lie == "late":
            return LAYERS - 1
        return len(calls) % (LAYERS + 1) if lie == "counted" else max(0, k - 1)

    net.index = index
    leaves = {
        "all": [y, *net.parameters()],
        "matrices": [*net.matrices],
        "last matrix": [net.matrices[-1]],
    }[part]
    want = torch.autograd.grad(net.plain(y)[-1].square().sum(), leaves)
    out = net(y)[-1]
    done.append(True)
    try:
        got = torch.autograd.grad(out.square().sum(), leaves)
    except RuntimeError:
        return
    # The last layer's index is the right one here.
    assert part == "last matrix"
    assert lie == "late"
    assert_right(got, want)


@PUSH
@MODES
def test_backward_once_more(inplace, push):
    net, y = Net(push, inplace=inplace), embedding()
    leaves = [y, *net.parameters()]
    loss = net(y)[-1].square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    if inplace:
        with pytest.raises(RuntimeError, match="inplace=False"):
            torch.autograd.grad(loss, leaves, retain_graph=True)
    else:
        assert_right(torch.autograd.grad(loss, leaves, retain_graph=True), first)


@PUSH
@MODES
@pytest.mark.parametrize(("top", "bottom"), [(6, 3), (5, 0), (3, 1)])
def test_a_part_and_then_the_whole(inplace, push, top, bottom):
    net, y = Net(push, inplace=inplace), embedding()
    leaves = [y, *net.parameters()]
    outs = net.plain(y)
    part = torch.autograd.grad(outs[top].sum(), outs[bottom], retain_graph=True)
    want = torch.autograd.grad(outs[-1].square().sum(), leaves)
    outs = net(y)
    got = torch.autograd.grad(outs[top].sum(), outs[bottom], retain_graph=True)
    assert_right(got, part)
    if inplace:
        with pytest.raises(RuntimeError, match="inplace=False"):
            torch.autograd.grad(outs[-1].square().sum(), leaves)
    else:
        assert_right(torch.autograd.grad(outs[-1].square().sum(), leaves), want)


@PUSH
@MODES
def test_an_exception_half_way_through_backward(inplace, push):
    """A second backward on the same pass gives the right gradients or an error."""
    net, y = Net(push, inplace=inplace), embedding()
    leaves = [y, *net.parameters()]
    want = torch.autograd.grad(net.plain(y)[-1].square().sum(), leaves)
    outs = net(y)
    handle = outs[3].register_hook(lambda _: 1 // 0)
    loss = outs[-1].square().sum()
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(loss, leaves, retain_graph=True)
    handle.remove()
    if inplace:
        with pytest.raises(RuntimeError, match="inplace=False"):
            torch.autograd.grad(loss, leaves)
    else:
        assert_right(torch.autograd.grad(loss, leaves), want)


@PUSH
@MODES
@pytest.mark.parametrize("group", [1, 4])
def test_checkpointing_without_early_stop(inplace, push, group):
    net, y = Net(push, inplace=inplace, group=group), embedding()
    leaves = [y, *net.parameters()]
    want = torch.autograd.grad(net.plain(y)[-1].square().sum(), leaves)
    with set_checkpoint_early_stop(False):
        loss = net(y)[-1].square().sum()
    assert_right(torch.autograd.grad(loss, leaves), want)


@MODES
@PUSH
@pytest.mark.parametrize("made", ["inside", "outside"])
def test_a_whole_stack_in_one_checkpoint(inplace, push, made):
    net, ys = Net(push, inplace=inplace), [embedding(), embedding()]
    net.wrap = lambda f, x: f(x)
    leaves = [*ys, *net.parameters()]

    def whole(y):
        return [checkpoint(lambda y: net(y)[-1], y, use_reentrant=False)]

    want = gradients(net.plain, ys, "together", leaves)
    assert_right(gradients(whole, ys, "together", leaves), want)


@MODES
@PUSH
@pytest.mark.parametrize("frozen", ["connection", "connection and two layers"])
@pytest.mark.parametrize("shared", [False, True])
@ORDERS
def test_a_frozen_bottom(inplace, push, frozen, shared, order):
    """The lowest boundaries have no gradient to give, so they are not in the graph."""
    net, ys = Net(push, inplace=inplace, shared=shared), [embedding(), embedding()]
    ys = [y.detach() for y in ys]
    net.dlcl.requires_grad_(False)
    matrices = net.matrices
    del net.matrices
    net.matrices = nn.ParameterList(matrices.detach().unbind(0))
    if frozen != "connection":
        net.matrices[0].requires_grad_(False), net.matrices[1].requires_grad_(False)
    leaves = [p for p in net.parameters() if p.requires_grad]
    want = gradients(net.plain, ys, order, leaves)
    if shared:
        with pytest.raises(RuntimeError, match=ANOTHER):
            gradients(net, ys, order, leaves)
    else:
        assert_right(gradients(net, ys, order, leaves), want)


@MODES
@ORDERS
@pytest.mark.parametrize("shared", [False, True])
def test_a_layer_that_detaches_its_input(inplace, order, shared):
    """The nodes of its graph lead to no boundary."""
    net, ys = Net(inplace=inplace, shared=shared), [embedding(), embedding()]
    layer = net.layer
    net.layer = lambda k, x: layer(k, x.detach() if k == 3 else x)
    leaves = [*ys, *net.parameters()]
    want = gradients(net.plain, ys, order, leaves)
    if shared:
        with pytest.raises(RuntimeError, match=ANOTHER):
            gradients(net, ys, order, leaves)
    else:
        assert_right(gradients(net, ys, order, leaves), want)


def test_a_recomputation_that_would_push_a_new_state():
    """The history that recomputation finds has as many states as the index says."""
    net, y = Net(shared=True), embedding()
    out = net(y)[-1]
    net.history = DepthHistory()
    x = y
    for k in range(LAYERS - 1):
        x = net.dlcl(x, net.history, index=k)
    with pytest.raises(RuntimeError, match=ANOTHER):
        out.sum().backward()
    assert len(net.history) == LAYERS - 1


@MODES
@PUSH
def test_passes_in_threads(inplace, push):
    net, ys = Net(push, inplace=inplace), [embedding() for _ in range(4)]
    leaves = list(net.parameters())
    want = [torch.autograd.grad(net.plain(y)[-1].square().sum(), [y, *leaves]) for y in ys]
    got = [None] * len(ys)

    def work(i):
        for _ in range(3):
            got[i] = torch.autograd.grad(net(ys[i])[-1].square().sum(), [ys[i], *leaves])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(ys))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(got, want, strict=True):
        assert_right(a, b)
