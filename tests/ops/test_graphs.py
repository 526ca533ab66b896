"""The registered ops under torch's compiler, its checkpointing and its export."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import checkpoint

from deepfast import ops as public
from deepfast.cases import ops, sentences
from deepfast.cases.case import tuple_of
from deepfast.ops.register import LIBRARY
from tests.ops.cases import EVERY, HERE, NAMES, Call, P, T, equal, of_any_length, operator, results

SLOW = pytest.mark.slow

# Each takes about a second.
FAST = ("layer_norm", "depth_mix", "attention")


def calls(*more):
    """Each op with dropout, and ``more`` of the slow tests."""
    fast = [pytest.param(name, P, marks=[SLOW] * (name not in FAST)) for name in NAMES]
    return [*fast, *(pytest.param(*call, marks=SLOW) for call in more)]


WITHOUT_DROPOUT = [(name, 0.0) for name in NAMES]


@pytest.mark.parametrize(("name", "p"), calls(*WITHOUT_DROPOUT))
@pytest.mark.parametrize("by", [by for by in HERE if by != "reference"])
def test_compiles_to_one_graph(name, by, p):
    """Without a graph break, the same numbers, for any number of tokens with one compilation."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    form, counts = of_any_length(name, by, p), []
    compiled = torch.compile(form, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 9):
        leaves = Call(name, by, p, tokens).leaves
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


# ---- exported programs -------------------------------------------------------------------------


class Module(torch.nn.Module):
    """A function as a module, which is what torch exports."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, *tensors):
        return self.run(*tensors)


def export(run, leaves, shapes):
    return torch.export.export(Module(run), tuple(leaves), dynamic_shapes=(tuple(shapes),))


def exported(name, p):
    """The case of ``name`` for any number of tokens; a recurrence has a fixed number of steps."""
    leaves = Call(name, None, p).leaves
    any_number = {0: Dim.AUTO} if name != "peephole_lstm" else None
    shapes = [any_number if len(x) == T else None for x in leaves]
    return export(of_any_length(name, None, p), leaves, shapes)


def ours(program):
    return {n.target for n in program.graph.nodes if str(n.target).startswith("deepfast.")}


OTHERS = [(name, P) for name in EVERY if name not in NAMES]


@pytest.mark.parametrize(("name", "p"), calls(*OTHERS, *WITHOUT_DROPOUT))
def test_a_decomposed_program_has_torchs_ops_alone(name, p):
    """With the same numbers; an exported one keeps the op."""
    c, program = Call(name, None, p), exported(name, p)
    assert ours(program) == ours(program.run_decompositions({})) == {c.operator()[0]}
    decomposed = program.run_decompositions()
    assert not ours(decomposed)
    if name == "attention" and p:
        return  # Its dropout mask is then torch's.
    leaves = Call(name, None, p, T if name == "peephole_lstm" else T + 4).leaves
    found, expected = decomposed.module()(*leaves), of_any_length(name, None, p)(*leaves)
    torch.testing.assert_close(tuple_of(found), tuple_of(expected), rtol=1e-5, atol=1e-5)


def test_every_op_with_a_gradient_is_tested():
    names = {name.split("::")[1] for name in LIBRARY._op_defs}
    assert {name for name in names if not name.endswith("_grad")} == set(NAMES)


def test_any_number_of_steps_is_an_error():
    """The program would have the ops of the example's steps alone."""
    c = Call("peephole_lstm", None, 0.0)
    program = export(c.run, c.leaves, [{0: Dim.AUTO}, *[None] * (len(c.leaves) - 1)])
    with pytest.raises(ValueError, match=r"peephole_lstm: .* must be fixed, got a dynamic one"):
        program.run_decompositions()


def compile_ahead_of_time(call, x):
    torch._inductor.aoti_compile_and_package(torch.export.export(call, (x,)))


@pytest.mark.parametrize("run", [lambda call, x: torch.compile(call)(x), compile_ahead_of_time])
def test_inductor_keeps_the_ops(run):
    seen = []

    def stop_before_code_is_made(graph):
        seen.extend(node.target for node in graph.nodes)
        raise InterruptedError("seen")

    config = {"post_grad_custom_post_pass": stop_before_code_is_made, "force_disable_caches": True}
    torch._dynamo.reset()
    call = Module(lambda x: public.layer_norm(x, None, None))
    with torch._inductor.config.patch(config), pytest.raises(Exception, match="seen"):
        run(call, torch.randn(T, 16))
    assert operator("layer_norm") in seen
