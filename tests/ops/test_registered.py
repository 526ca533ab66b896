"""What torch's own machinery makes of the ops: dispatch, tracing, counting, checkpointing."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from deepfast import backend as backends
from deepfast import ops
from deepfast.backend import SDPA
from deepfast.nn import DLCL, DepthHistory

T, D, K, N, SEED = 5, 16, 3, 7, 11
SMOOTHING = 0.1


class Case(NamedTuple):
    """A public call over leaves, and the arguments of the operator behind it."""

    run: Callable
    leaves: list[torch.Tensor]
    arguments: Callable


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


def cu_seqlens(tokens):
    """Two sentences, the first of two tokens."""
    return torch.tensor([0, 2, tokens], dtype=torch.int32)


def labels(tokens):
    return torch.arange(tokens) % N


def case(name, backend, p, tokens=T):
    """The op's case with dropout p, where it has dropout."""
    seed = torch.tensor(SEED) if p else None
    options = {"dropout_p": p, "seed": SEED, "backend": backend}

    def layer_norm(x, residual, w, b):
        return ops.layer_norm(x, w, b, residual=residual, training=True, **options)

    def activation(h):
        return ops.activation(h, "gelu", training=True, **options)

    def depth_mix(*leaves):
        sources, (w, nw, nb) = list(leaves[:K]), leaves[K:]
        return ops.depth_mix(sources, w, norm_weight=nw, norm_bias=nb, backend=backend)

    def depth_attention(*leaves):
        return ops.depth_attention(list(leaves[:K]), leaves[K], return_lse=True, backend=backend)

    def norm_linear(x, residual, nw, nb, w, b):
        return ops.norm_linear(x, nw, nb, w, b, residual=residual, training=True, **options)

    def feed_forward(x, residual, nw, nb, up, up_bias, down, down_bias):
        return ops.feed_forward(
            x, nw, nb, up, up_bias, down, down_bias, residual=residual, training=True,
            activation="gelu", activation_dropout_p=p, activation_seed=SEED, **options,
        )  # fmt: skip

    def attention(q, k, v):
        lengths = cu_seqlens(q.shape[0])
        return ops.attention(
            q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=q.shape[0],
            max_seqlen_k=q.shape[0], causal=True, **options,
        )  # fmt: skip

    def linear_cross_entropy(hidden, w):
        return ops.linear_cross_entropy(
            hidden, w, labels(len(hidden)), label_smoothing=SMOOTHING, return_nll=True,
            backend=backend,
        )  # fmt: skip

    def peephole_lstm(f, w, peephole, h0, c0):
        return ops.peephole_lstm(
            f, w, peephole, h0=h0, c0=c0, lengths=torch.arange(2) * 2, reverse=True,
            backend=backend,
        )  # fmt: skip

    x = (tokens, D)
    return {
        "layer_norm": lambda: Case(
            layer_norm, [leaf(*x), leaf(*x), leaf(D), leaf(D)],
            lambda x, r, w, b: (x, r, w, b, 1e-5, p, seed, backend),
        ),
        "activation": lambda: Case(
            activation, [leaf(*x)], lambda h: (h, "gelu", p, seed, backend)
        ),
        "depth_mix": lambda: Case(
            depth_mix, [*(leaf(*x) for _ in range(K)), leaf(K), leaf(K, D), leaf(K, D)],
            lambda *t: (list(t[:K]), *t[K:], 1e-5, backend),
        ),
        "depth_attention": lambda: Case(
            depth_attention, [*(leaf(*x) for _ in range(K)), leaf(2, D)],
            lambda *t: (list(t[:K]), t[K], None, True, 1e-6, backend),
        ),
        "norm_linear": lambda: Case(
            norm_linear, [leaf(*x), leaf(*x), leaf(D), leaf(D), leaf(N, D), leaf(N)],
            lambda *t: (*t, 1e-5, p, seed, backend),
        ),
        "feed_forward": lambda: Case(
            feed_forward,
            [leaf(*x), leaf(*x), leaf(D), leaf(D), leaf(N, D), leaf(N), leaf(D, N), leaf(D)],
            lambda *t: (*t, 1e-5, p, seed, "gelu", p, seed, True, False, backend),
        ),
        "attention": lambda: Case(
            attention, [leaf(tokens, 1, D) for _ in range(3)],
            lambda q, k, v: (
                q, k, v, cu_seqlens(len(q)), cu_seqlens(len(q)), len(q), len(q), True, 0.25, p,
                seed, backend,
            ),
        ),
        "linear_cross_entropy": lambda: Case(
            linear_cross_entropy, [leaf(*x), leaf(N, D)],
            lambda h, w: (
                h, w, labels(len(h)), SMOOTHING, -100, True, None, h.requires_grad,
                w.requires_grad, backend,
            ),
        ),
        "peephole_lstm": lambda: Case(
            peephole_lstm,
            [leaf(tokens, 2, 4 * K), leaf(K, 4 * K), leaf(3, K), leaf(2, K), leaf(2, K)],
            lambda f, *rest: (f, *rest, torch.arange(2) * 2, True, f.requires_grad, backend),
        ),
    }[name]()  # fmt: skip


def outputs(out):
    return out if isinstance(out, tuple) else (out,)


def results(run, leaves):
    """Outputs of a call, and gradients of a loss over all of them."""
    out = outputs(run(*leaves))
    loss = sum((o * torch.linspace(-1, 1, o.numel()).view_as(o)).sum() for o in out)
    return [o.detach() for o in out] + list(torch.autograd.grad(loss, leaves))


def operator(name):
    return getattr(torch.ops.deepfast, name).default


NAMES = [
    "layer_norm", "activation", "depth_mix", "depth_attention", "norm_linear", "feed_forward",
    "attention", "linear_cross_entropy", "peephole_lstm",
]  # fmt: skip
DROPOUT = [0.0, 0.3]


@pytest.fixture(params=["cpu", "reference", "triton", "cuda"])
def any_backend(request):
    """Each backend that has kernels here; Triton's run in its interpreter, CUDA's are emulated."""
    if request.param == "cuda":
        request.getfixturevalue("emulated")
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


def serves(name, backend):
    """On the CPU attention is torch's, which registers itself; some ops have no CUDA kernel."""
    if name in backends.NO_CUDA and backend == "cuda":
        pytest.skip(f"{name} has no CUDA kernel")
    if name == "attention" and backend in SDPA:
        pytest.skip(f"attention by {backend} is torch's")


@pytest.mark.parametrize("p", DROPOUT)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(any_backend, name, p):
    serves(name, any_backend)
    c = case(name, any_backend, p)
    opcheck(operator(name), c.arguments(*c.leaves))


def test_opcheck_without_optional_operands(backend):
    x, w, weight = leaf(2, 3, D), leaf(D), leaf(N, D)
    opcheck(operator("layer_norm"), (x, None, None, None, 1e-5, 0.0, None, backend))
    opcheck(operator("layer_norm"), (x, None, w, None, 1e-5, 0.5, torch.tensor(3), backend))
    opcheck(operator("activation"), (x, "relu", 0.0, None, backend))
    opcheck(operator("activation"), (x, "relu", 0.5, torch.tensor(3), backend))
    opcheck(operator("depth_mix"), ([x, x], leaf(2), None, None, 1e-5, backend))
    opcheck(operator("depth_mix"), ([x, x], leaf(2, D), None, leaf(2, D), 1e-5, backend))
    if backend != "cuda":
        scores = leaf(2, 3, 2, N)
        opcheck(operator("depth_attention"), ([x, x], None, scores, False, 1e-6, backend))
    opcheck(operator("norm_linear"), (x, None, None, None, weight, None, 1e-5, 0.0, None, backend))


@pytest.fixture
def launched(monkeypatch):
    """The arguments of the first call of each compiled launch, from ops and from a stack."""
    calls = {}
    real = backends._launchers

    def spies(op, name):
        def spy(launch, call):
            def run(*args):
                copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
                calls.setdefault(launch, copies)
                return call(*args)

            return run

        found = vars(real(op, name))
        return SimpleNamespace(**{launch: spy(launch, call) for launch, call in found.items()})

    monkeypatch.setattr(backends, "_launchers", spies)
    backends._resolve.cache_clear()
    for name in ("layer_norm", "activation", "depth_mix", "depth_attention",
                 "linear_cross_entropy", "peephole_lstm"):  # fmt: skip
        c = case(name, "cpu", 0.3)
        results(c.run, c.leaves)
    dlcl, history, x = DLCL(5, D, backend="cpu"), DepthHistory(block=2), leaf(T, D)
    for _ in range(6):
        x = dlcl(torch.tanh(x), history, residual=x, dropout_p=0.2)
    x.sum().backward()
    yield calls
    backends._resolve.cache_clear()


def test_opcheck_of_the_compiled_launches(launched):
    """Each as the engine and the ops call it."""
    expected = {f for op, group in backends.OPS.items() if op != "attention" for f in group}
    assert launched.keys() == expected
    for name, args in launched.items():
        opcheck(operator(name), tuple(args), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("p", DROPOUT)
@pytest.mark.parametrize("name", NAMES)
def test_the_operator_is_the_function(any_backend, name, p):
    """Eager code takes a short cut past the dispatcher: the same bits come out."""
    serves(name, any_backend)
    c = case(name, any_backend, p)
    count = len(outputs(c.run(*c.leaves)))
    direct = results(
        lambda *leaves: outputs(operator(name)(*c.arguments(*leaves)))[:count], c.leaves
    )
    for a, b in zip(direct, results(c.run, c.leaves), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_of_the_operator(backend, name):
    serves(name, backend)
    c = case(name, backend, 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        out = outputs(operator(name)(*c.arguments(*c.leaves)))
        public = outputs(c.run(*c.leaves))
    # Activation leaves its input as it is.
    assert (torch.bfloat16 in {o.dtype for o in out}) == (name != "activation")
    for a, b in zip(out, public, strict=False):
        assert torch.equal(a, b)
    out[0].float().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in c.leaves)


@pytest.mark.parametrize("p", DROPOUT)
@pytest.mark.parametrize("name", NAMES)
def test_compiles_to_one_graph(any_backend, name, p):
    """Without a graph break, the same numbers, for any number of tokens with one compilation."""
    serves(name, any_backend)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        case(name, any_backend, p).run, fullgraph=True, dynamic=True, backend=counter
    )
    counts = []
    for tokens in (5, 9, 6):
        c = case(name, any_backend, p, tokens)
        for a, b in zip(results(compiled, c.leaves), results(c.run, c.leaves), strict=True):
            assert torch.equal(a, b)
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] > 0


@pytest.mark.slow
def test_compiles_with_inductor(backend):
    """The default compiler, over all ops in one function."""
    torch._dynamo.reset()
    w, weight = leaf(D), leaf(D, D)

    def chain(x, residual):
        options = {"dropout_p": 0.2, "training": True, "backend": backend}
        h, s = ops.norm_linear(x, w, w, weight, residual=residual, seed=1, **options)
        h = ops.activation(h, "gelu", seed=3, **options)
        y, s = ops.layer_norm(h, w, w, residual=s, seed=2, **options)
        q = ops.depth_mix([x, y, s], torch.ones(3), backend=backend).unflatten(1, (2, D // 2))
        cu, n = cu_seqlens(len(x)), len(x)
        return ops.attention(
            q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=n, max_seqlen_k=n,
            backend=backend,
        )  # fmt: skip

    compiled = torch.compile(chain, fullgraph=True, dynamic=True)
    for tokens in (5, 8):
        leaves = [leaf(tokens, D), leaf(tokens, D)]
        for a, b in zip(results(compiled, leaves), results(chain, leaves), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_replays_dropout(backend, name):
    """The seed comes from torch's generator, which checkpointing sets back."""
    serves(name, backend)
    c = case(name, backend, 0.3)
    drawn = {"layer_norm": ops.layer_norm, "norm_linear": ops.norm_linear}

    def run(*leaves):
        if name == "activation":
            return ops.activation(*leaves, "gelu", dropout_p=0.3, training=True, backend=backend)
        if name not in drawn:
            return c.run(*leaves)
        x, residual, *params = leaves
        return drawn[name](
            x, *params, residual=residual, dropout_p=0.3, training=True, backend=backend
        )

    torch.manual_seed(3)
    plain = results(run, c.leaves)
    torch.manual_seed(3)
    again = results(lambda *t: checkpoint(run, *t, use_reentrant=False), c.leaves)
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("saved", NAMES)
def test_selective_checkpointing_by_op(backend, saved):
    """An op that is to be saved does not run again; the others do."""
    if backend == "cpu":
        backend = None
    cases = {name: case(name, "reference", 0.0) for name in NAMES}

    def run():
        return sum(o.sum() for c in cases.values() for o in outputs(c.run(*c.leaves)))

    def policy(_ctx, op, *_args, **_kwargs):
        must = op is operator(saved)
        return CheckpointPolicy.MUST_SAVE if must else CheckpointPolicy.PREFER_RECOMPUTE

    calls = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    leaves = [x for c in cases.values() for x in c.leaves]
    exact = torch.autograd.grad(run(), leaves)
    context = partial(create_selective_checkpoint_contexts, policy)
    loss = checkpoint(run, use_reentrant=False, context_fn=context)
    with Spy():
        grads = torch.autograd.grad(loss, leaves)
    for a, b in zip(grads, exact, strict=True):
        assert torch.equal(a, b)
    for name in NAMES:
        assert (operator(name) in calls) == (name != saved), name


def test_flops():
    """Matrix products are counted, elementwise work is not: torch's own convention."""
    expected = {
        "layer_norm": (0, 0),
        "activation": (0, 0),
        "depth_mix": (2 * K * T * D, 4 * K * T * D),
        # Scores and sum of two hops, and twice that backward.
        "depth_attention": (2 * 2 * 2 * K * T * D, 2 * 2 * 2 * 2 * K * T * D),
        "norm_linear": (2 * T * N * D, 4 * T * N * D),
        # Sentences of 2 and 3 tokens: 13 pairs, two products forward and five backward.
        "attention": (2 * 2 * 13 * D, 5 * 2 * 13 * D),
        # Gradients are made in forward.
        "linear_cross_entropy": (3 * 2 * T * N * D, 0),
        # The recurrent products of two sentences, for the state and for the weight in backward.
        "peephole_lstm": (2 * T * 2 * K * 4 * K, 4 * T * 2 * K * 4 * K),
    }
    for name, (forward, backward) in expected.items():
        c = case(name, "reference", 0.0)
        with FlopCounterMode(display=False) as counter:
            loss = sum(o.sum() for o in outputs(c.run(*c.leaves)))
            assert counter.get_total_flops() == forward, name
            loss.backward()
        assert counter.get_total_flops() == forward + backward, name


@pytest.mark.parametrize("layers", [3, 12])
def test_flops_of_a_stack(layers):
    """Each pair of layers counts once forward and twice backward, however rows are blocked."""
    dlcl, x, history = DLCL(layers, D, backend="cpu"), leaf(T, D), DepthHistory()
    pairs = (layers + 1) * (layers + 2) // 2
    with FlopCounterMode(display=False) as counter:
        for _ in range(layers + 1):
            x = torch.tanh(dlcl(x, history))
        assert counter.get_total_flops() == 2 * pairs * T * D
        x.sum().backward()
    assert counter.get_total_flops() == 6 * pairs * T * D


def test_fake_tensors(backend):
    """Shapes without data: nothing is computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), backends.record() as seen:
        x = torch.empty(1 << 20, D, requires_grad=True)
        y, s = ops.layer_norm(x, None, None, residual=x, backend=backend)
        z = ops.depth_mix([y, s], torch.ones(2), backend=backend)
        z.sum().backward()
    assert z.shape == x.shape == x.grad.shape
    assert not seen


def test_inference_leaves_no_graph(backend):
    c = case("layer_norm", backend, 0.0)
    with torch.no_grad():
        assert not any(o.requires_grad for o in outputs(c.run(*c.leaves)))


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_is_an_error(name):
    """It would give tangents of zero."""
    c = case(name, "reference", 0.0)
    x, *rest = (t.detach() for t in c.leaves)
    with pytest.raises(NotImplementedError, match=f"{name}: forward-mode"):
        torch.func.jvp(lambda x: outputs(c.run(x, *rest))[0], (x,), (x,))
