"""What must hold of a DepthHistory, whatever a training loop does to it."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from deepfast.backend import BackendError
from deepfast.nn import DLCL, DepthHistory

LAYERS, DIM, TOKENS = 9, 12, 5
MODES = pytest.mark.parametrize("inplace", [True, False])


class Stack(nn.Module):
    """Cheap layers around a DLCL."""

    def __init__(self, layers=LAYERS, dim=DIM, **options):
        super().__init__()
        self.dlcl = DLCL(layers, dim, **options)
        self.scales = nn.Parameter(1 + 0.1 * torch.randn(layers, dim))
        with torch.no_grad():
            # With gains of one the sum over a layer-norm is constant and its gradient zero.
            for p in self.dlcl.parameters():
                p.mul_(1 + 0.3 * torch.randn_like(p))

    def xs(self, y, history):
        """Every x_1 .. x_{L+1}."""
        xs = [self.dlcl(y, history)]
        for scale in self.scales:
            xs.append(self.dlcl(torch.tanh(xs[-1] * scale), history))
        return xs

    def forward(self, y, history):
        return self.xs(y, history)[-1]


def plain_xs(stack, y):
    """The same without an engine: autograd through everything (pre-norm)."""
    d, z, xs = stack.dlcl, [], []
    w = d.effective_weight()
    for row in range(d.num_layers + 1):
        state = y if row == 0 else torch.tanh(xs[-1] * stack.scales[row - 1])
        if row and d.norm == "pre":
            state = nn.functional.layer_norm(
                state, (d.dim,), d.norm_weight[row], d.norm_bias[row], d.eps
            )
        z.append(state)
        xs.append(sum(w[row, k] * z[k] for k in range(row + 1)))
    return xs


def leaf(*shape):
    return torch.randn(shape or (TOKENS, DIM), requires_grad=True)


def history(inplace=True):
    return DepthHistory(inplace=inplace, block=4)


@contextlib.contextmanager
def no_gc():
    """Reference counts alone must free things."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


# ---- several passes at once, and passes that end early -----------------------------------------


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
    # The plain form leaves norms of index 0 out altogether.
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
    """Whoever keeps the history of a finished pass keeps its states, not its activations."""
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


def test_no_grad_frees_with_the_history(backend):
    stack, y = Stack(backend=backend), leaf()
    with no_gc(), torch.no_grad():
        h = history()
        out = stack(y, h)
        alive = weakref.ref(h.state.states)
        del h
        assert alive() is None
        assert torch.isfinite(out).all()


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
        # A checkpointed function refers to h and h to the graph: leaving the block parts them.
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
    """Without a gradient to give, the first boundaries have no node that could free anything."""
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
    """Loss and history are still referenced; only gradients are left."""
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
    """Bytes at the highest, in states. The layer saves nothing: a detached copy with a gradient
    through an addition."""
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
    """Gradients of rows that the second pass never reaches must not show in it."""
    stack, y = Stack(backend=backend), leaf()
    leaves = (y, stack.dlcl.weight)
    want = torch.autograd.grad(plain_xs(stack, y)[row].square().sum(), leaves)
    xs = stack.xs(y, history(False))
    torch.autograd.grad(xs[-1].sum(), leaves, retain_graph=True)
    assert_equal(torch.autograd.grad(xs[row].square().sum(), leaves), want)


def test_two_parts_in_place_that_do_not_meet(backend):
    """x_9 to x_6, then x_6 to the leaves: allowed in place, and nothing of the first shows."""
    stack, y = Stack(backend=backend), leaf()
    leaves = (y, stack.dlcl.weight)
    want = torch.autograd.grad(plain_xs(stack, y)[6].square().sum(), leaves)
    xs = stack.xs(y, history())
    torch.autograd.grad(xs[9].sum(), xs[6], retain_graph=True)
    assert_equal(torch.autograd.grad(xs[6].square().sum(), leaves), want)


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
    """All layers ran; the rows above get no gradient and must give none."""
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
    (g,) = torch.autograd.grad(loss, y, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        (leaf().sum() + g.square().sum()).backward()


def test_forward_mode_is_an_error(backend):
    """Never a tangent of zero, whether or not anything learns."""
    stack, y = Stack(backend=backend), leaf().detach()
    for learning in (True, False):
        with forward_ad.dual_level(), torch.set_grad_enabled(learning):
            dual = forward_ad.make_dual(y, torch.ones_like(y))
            with pytest.raises(NotImplementedError, match="forward mode"):
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


# ---- odd layers ----------------------------------------------------------------------------------


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


# ---- misuse --------------------------------------------------------------------------------------


def test_a_history_used_by_two_stacks(backend):
    a, b, h = Stack(backend=backend), Stack(backend=backend), history()
    x = a.dlcl(leaf(), h)
    with pytest.raises(RuntimeError, match="belongs to another stack"):
        b.dlcl(x, h)


def test_a_history_used_on_two_devices(backend):
    a, h = Stack(backend=backend), history()
    a.dlcl(leaf(), h)
    with pytest.raises(ValueError, match="on cpu, the input on meta"):
        a.dlcl(torch.randn(TOKENS, DIM, device="meta"), h)


def test_a_history_used_for_two_passes(backend):
    stack, h = Stack(backend=backend), history()
    out = stack(leaf(), h)
    with pytest.raises(RuntimeError, match=r"9 layers push 10 states.*new DepthHistory"):
        stack.dlcl(out, h)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="new"):
        stack.dlcl(leaf(), h)


@pytest.mark.parametrize("index", [2, 5, -1])
def test_a_layer_called_out_of_order(backend, index):
    stack, h = Stack(backend=backend), history()
    x = stack.dlcl(leaf(), h)
    with pytest.raises(RuntimeError, match="out of order: expected index 1, got"):
        stack.dlcl(x, h, index=index)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.randn(TOKENS + 1, DIM), "expected 5 tokens .*got 6"),
        (torch.randn(TOKENS, DIM).double(), "torch.float32 .*got 5 of torch.float64"),
        (torch.randn(TOKENS, DIM + 1), r"expected \(..., 12\), got \(5, 13\)"),
    ],
)
def test_states_of_one_pass_are_alike(backend, y, message):
    stack, h = Stack(backend=backend), history()
    stack.dlcl(leaf(), h)
    with pytest.raises(ValueError, match=message):
        stack.dlcl(y, h)
    assert len(h) == 1, "a refused push changed the history"


def test_an_unknown_backend():
    with pytest.raises(BackendError, match=r"expected one of cuda, triton, .*, cpu, ref"):
        DLCL(2, DIM, backend="gpu")(leaf(), history())


def test_block_of_no_rows():
    with pytest.raises(ValueError, match="block must be at least 1, got 0"):
        DepthHistory(block=0)


def test_a_refused_first_push_leaves_the_history_fresh(backend):
    """A history whose first push failed serves another try."""
    stack, h = Stack(backend=backend), history()
    with pytest.raises(ValueError, match="expected"):
        stack.dlcl(torch.randn(3, DIM + 1), h)
    stack(leaf(), h).sum().backward()


# ---- checkpointing -------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(nn.functional.dropout(torch.relu(self.up(x)), 0.3))


def checkpointed(dlcl, layers, y, h, p, wrap):
    """Each segment makes a layer's input from the states and runs the layer."""
    for k, layer in enumerate(layers):
        y = wrap(lambda y, k=k, f=layer: f(dlcl(y, h, index=k, dropout_p=p)), y)
    return dlcl(y, h, index=len(layers))


@MODES
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("norm", ["pre", "post", None])
@pytest.mark.parametrize("options", [{}, {"weight": "vector", "softmax": True}, {"window": 3}])
def test_checkpointing(backend, inplace, p, norm, options):
    dlcl = DLCL(LAYERS, DIM, norm=norm, backend=backend, **options)
    layers, y = [Layer(DIM) for _ in range(LAYERS)], leaf()
    leaves = [y, *dlcl.parameters(), *(q for layer in layers for q in layer.parameters())]

    def run(wrap):
        torch.manual_seed(5)
        out = checkpointed(dlcl, layers, y, history(inplace), p, wrap)
        return out, torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)

    out, want = run(lambda f, y: f(y))
    again, got = run(lambda f, y: checkpoint(f, y, use_reentrant=False))
    assert torch.equal(out, again)
    for a, b in zip(got, want, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_checkpointing_keeps_one_state_per_layer(meter):
    dim, tokens = 128, 64

    def peak(wrap):
        dlcl, layers = DLCL(20, dim, backend="cpu"), [Layer(dim) for _ in range(20)]
        y = leaf(tokens, dim)
        with meter() as m:
            h = DepthHistory(block=4)
            out = checkpointed(dlcl, layers, y, h, 0.0, wrap)
            del h
        assert out.requires_grad
        return m.left / (tokens * dim * 4)

    plain = peak(lambda f, y: f(y))
    saved = peak(lambda f, y: checkpoint(f, y, use_reentrant=False))
    # The states, each segment's input y_k, and the output; statistics are 1/128 of a state each.
    assert saved <= 22 + 21 + 4
    assert saved < plain / 2


def test_checkpointing_without_an_index_is_an_error(backend):
    dlcl, layers, y = DLCL(3, DIM, backend=backend), [Layer(DIM) for _ in range(3)], leaf()
    h = history()
    for layer in layers:
        y = checkpoint(lambda y, f=layer: f(dlcl(y, h)), y, use_reentrant=False)
    out = dlcl(y, h)
    with pytest.raises(RuntimeError, match="pass index="):
        out.sum().backward()


def test_reentrant_checkpointing_of_the_layer_alone(backend):
    """The boundary stays outside; a nested backward pass inside a layer does not disturb it."""
    dlcl = DLCL(LAYERS, DIM, backend=backend)
    layers, y = [Layer(DIM).eval() for _ in range(LAYERS)], leaf()
    leaves = (y, *dlcl.parameters())

    def run(wrap):
        torch.manual_seed(5)
        h = history()
        x = dlcl(y, h)
        for layer in layers:
            x = dlcl(wrap(layer, x), h)
        for q in leaves:
            q.grad = None
        x.square().sum().backward()
        return [q.grad for q in leaves]

    want = run(lambda f, x: f(x))
    got = run(lambda f, x: checkpoint(f, x, use_reentrant=True))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_repeated_push_outside_recomputation_is_an_error(backend):
    dlcl, h = DLCL(2, DIM, backend=backend), history()
    dlcl(leaf(), h, index=0)
    with pytest.raises(RuntimeError, match="out of order: expected index 1, got 0"):
        dlcl(leaf(), h, index=0)


def test_reentrant_checkpointing_around_a_push_is_an_error(backend):
    """Its repeated push would take part in backward, with the wrong gradients."""
    dlcl, layer = DLCL(1, DIM, norm=None, learnable=False, backend=backend), Layer(DIM)
    h, y = history(), leaf()
    y = checkpoint(lambda y: layer(dlcl(y, h, index=0)), y, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        dlcl(y, h, index=1).sum().backward()


@pytest.mark.parametrize("out_norm", [torch.nn.LayerNorm(DIM), (1, 2)])
def test_refuses_an_output_norm_of_another_kind(out_norm):
    with pytest.raises(TypeError, match="out_norm must be an OutNorm"):
        DLCL(2, DIM)(leaf(), history(), out_norm=out_norm)


def test_a_change_of_grad_mode_within_a_pass_is_an_error(backend):
    """A push without gradients would cut its state, and all below, out of the chain."""
    stack, y = Stack(backend=backend), leaf()
    for inside in (0, 2):
        h = history()

        def push_all(h=h, inside=inside):
            for k in range(4):
                with torch.set_grad_enabled(k != inside):
                    stack.dlcl(torch.tanh(y), h)

        with pytest.raises(RuntimeError, match="grad mode changed"):
            push_all()


@pytest.mark.parametrize("first", [2, 5])
def test_a_part_below_then_the_whole_in_place_is_an_error(backend, first):
    """The upper rows would be made again from states that are gradients by now."""
    stack, y = Stack(backend=backend, norm="post"), leaf()
    xs = stack.xs(y, history())
    torch.autograd.grad(xs[first].sum(), y, retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace=False"):
        torch.autograd.grad(xs[-1].sum(), y)


def test_threads_that_share_a_stack(backend):
    """Schedules are made when first needed: by whichever thread comes first, whole."""
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
