"""The registered ops under torch's compiler and its checkpointing."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from deepfast import ops
from deepfast.cases import ops as cases
from tests.ops.cases import (
    NAMES,
    Call,
    D,
    equal,
    of_any_length,
    operator,
    results,
)

# Compiled every day with Triton's kernels, the other ops with the CPU's.
TRITON = ("attention", "depth_mix", "linear_cross_entropy")


def randn(*shape):
    return torch.randn(shape, requires_grad=True)


# Without a seed the graph is the same on every backend.
CASES = [
    pytest.param(name, by, p, marks=() if p and by == daily else pytest.mark.exhaustive)
    for name in NAMES
    for daily in ("triton" if name in TRITON else "cpu",)
    for by, p in (("cpu", 0.0), ("cpu", 0.3), ("reference", 0.3), ("triton", 0.3))
]


@pytest.mark.parametrize(("name", "any_backend", "p"), CASES, indirect=["any_backend"])
def test_compiles_to_one_graph(name, any_backend, p):
    """Without a graph break, the same numbers, for any number of tokens with one compilation."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    form, counts = of_any_length(name, any_backend, p), []
    compiled = torch.compile(form, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 9):
        leaves = Call(name, any_backend, p, tokens).leaves
        assert equal(results(compiled, leaves), results(form, leaves))
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] > 0


@pytest.mark.exhaustive
def test_compiles_with_inductor(backend, monkeypatch, tmp_path):
    """The default compiler, over all ops in one function."""
    # A cache of its own: the key of Inductor's cache in torch 2.13 leaves out the instruction set,
    # so code that was compiled for AVX-512 would run under ATEN_CPU_CAPABILITY=avx2 and be wrong.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    w, weight = randn(D), randn(D, D)

    def chain(x, residual):
        options = {"dropout_p": 0.2, "training": True, "backend": backend}
        h, s = ops.add_norm_linear(x, residual, w, w, weight, seed=1, **options)
        h = ops.activation(h, "gelu", seed=3, **options)
        y, s = ops.add_layer_norm(h, s, w, w, seed=2, **options)
        q = ops.depth_mix([x, y, s], torch.ones(3), backend=backend).unflatten(1, (2, D // 2))
        n = x.shape[0]
        cu = torch.tensor([0, 2, n], dtype=torch.int32)
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": n, "max_seqlen_k": n}
        return ops.attention(q, q, q, **lengths, backend=backend)

    compiled = torch.compile(chain, fullgraph=True, dynamic=True)
    # The processes of a pool would import torch first.
    with torch._inductor.config.patch(compile_threads=1):
        for tokens in (5, 8):
            leaves = [randn(tokens, D), randn(tokens, D)]
            for a, b in zip(results(compiled, leaves), results(chain, leaves), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_replays_dropout(backend, name, monkeypatch):
    """The seed comes from torch's generator, which checkpointing restores."""
    if name != "feed_forward":  # The seeds of its call follow each other.
        monkeypatch.setattr(cases, "SEED", None)
    c = Call(name, backend)
    run = c.run
    torch.manual_seed(3)
    plain = results(run, c.leaves)
    torch.manual_seed(3)
    again = results(lambda *t: checkpoint(run, *t, use_reentrant=False), c.leaves)
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("saved", NAMES)
def test_selective_checkpointing_by_op(backend, saved):
    """An op whose results the policy saves does not run again; the others do."""
    if backend == "cpu":
        backend = None
    cases = {name: Call(name, "reference", 0.0) for name in NAMES}

    def run():
        return sum(o.sum() for c in cases.values() for o in c.run(*c.leaves))

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
