"""The registered ops under torch's compiler and its checkpointing."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import checkpoint

from deepfast.cases import ops, sentences
from tests.ops.cases import NAMES, Call, equal, of_any_length, operator, results

# Compiled every day with Triton's kernels, the other ops with the CPU's.
TRITON = ("attention", "depth_mix", "linear_cross_entropy")


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


@pytest.mark.parametrize(
    "name", ["layer_norm", "add_dropout", "activation", "norm_linear", "attention"]
)
def test_checkpointing_replays_dropout(backend, name, monkeypatch):
    """The seed comes from torch's generator, which checkpointing restores."""
    for module in (ops, sentences):
        monkeypatch.setattr(module, "SEED", None)
    c = Call(name, backend)

    def seeded(run, seed):
        torch.manual_seed(seed)
        return results(run, c.leaves)

    plain = seeded(c.run, 3)
    assert equal(seeded(lambda *t: checkpoint(c.run, *t, use_reentrant=False), 3), plain)
    assert not equal(seeded(c.run, 4), plain)


@pytest.mark.parametrize("saved", NAMES)
def test_selective_checkpointing_by_op(backend, saved):
    """An op whose results the policy saves does not run again; the others do."""
    if backend == "cpu":
        backend = None
    cases = {name: Call(name, "reference", 0.0) for name in NAMES}

    def run():
        return sum(o.sum() for c in cases.values() for o in c.run(*c.leaves))

    def policy(_ctx, op, *_args, **_kwargs):
        policies = torchs.CheckpointPolicy
        return policies.MUST_SAVE if op is operator(saved) else policies.PREFER_RECOMPUTE

    calls = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    leaves = [x for c in cases.values() for x in c.leaves]
    exact = torch.autograd.grad(run(), leaves)
    context = partial(torchs.create_selective_checkpoint_contexts, policy)
    loss = checkpoint(run, use_reentrant=False, context_fn=context)
    with Spy():
        grads = torch.autograd.grad(loss, leaves)
    assert equal(grads, exact)
    for name in NAMES:
        assert (operator(name) in calls) == (name != saved), name
