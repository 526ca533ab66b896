"""The registered ops under torch's compiler, its checkpointing and its export."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import checkpoint

from deepfast.cases.case import tuple_of
from deepfast.ops.register import LIBRARY
from tests.ops.cases import EVERY, NAMES, Call, P, Seen, T, equal, of_any_length, results


def calls(names, *fast):
    """Each with dropout; two also without it, for attention then has the same numbers."""
    given = [(name, P) for name in names] + [("layer_norm", 0.0), ("attention", 0.0)]
    return [
        pytest.param(name, p, marks=[] if name in fast and p else pytest.mark.slow)
        for name, p in given
    ]


@pytest.mark.parametrize(("name", "p"), calls(NAMES, "layer_norm", "depth_mix", "attention"))
def test_compiles_to_one_graph(name, p):
    """Without a graph break, the same numbers, for any number of tokens with one compilation."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    form, counts = of_any_length(name, None, p), []
    compiled = torch.compile(form, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 9):
        leaves = Call(name, None, p, tokens).leaves
        assert equal(results(compiled, leaves), results(form, leaves))
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] > 0


@pytest.mark.parametrize("saved", [NAMES[::2], NAMES[1::2]])
def test_selective_checkpointing_by_op(saved):
    """Ops whose results the policy saves do not run again; the others do."""
    cases = [Call(name, "reference", 0.0) for name in NAMES]
    leaves = [x for c in cases for x in c.leaves]

    def run():
        return sum(o.sum() for c in cases for o in c.run(*c.leaves))

    def policy(_ctx, op, *_args, **_kwargs):
        policies = torchs.CheckpointPolicy
        ours = str(op) in [f"deepfast.{name}.default" for name in saved]
        return policies.MUST_SAVE if ours else policies.PREFER_RECOMPUTE

    context = partial(torchs.create_selective_checkpoint_contexts, policy)
    loss = checkpoint(run, use_reentrant=False, context_fn=context)
    with Seen() as seen:
        grads = torch.autograd.grad(loss, leaves)
    assert equal(grads, torch.autograd.grad(run(), leaves))
    again = {op.name().split("::")[1] for op, _ in seen.calls}
    assert set(NAMES) - again == set(saved)


# ---- exported programs -------------------------------------------------------------------------


class Module(torch.nn.Module):
    """A function as a module, which is what torch exports."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, *tensors):
        return self.run(*tensors)


def exported(name, p, any_number=True):
    """The case of ``name``, for any number of tokens or steps."""
    leaves = Call(name, None, p).leaves
    shapes = tuple({0: Dim.AUTO} if any_number and len(x) == T else None for x in leaves)
    module = Module(of_any_length(name, None, p))
    return torch.export.export(module, tuple(leaves), dynamic_shapes=(shapes,))


def ours(program):
    return {n.target for n in program.graph.nodes if str(n.target).startswith("deepfast.")}


@pytest.mark.parametrize(("name", "p"), calls(EVERY, "depth_mix"))
def test_a_decomposed_program_has_torchs_ops_alone(name, p):
    """With the same numbers; an exported one keeps the op."""
    # A recurrence has a fixed number of steps.
    fixed = name == "peephole_lstm"
    c, program = Call(name, None, p), exported(name, p, not fixed)
    assert ours(program) == ours(program.run_decompositions({})) == {c.operator()[0]}
    decomposed = program.run_decompositions()
    assert not ours(decomposed)
    if name == "attention" and p:
        return  # Its dropout mask is then torch's.
    leaves = Call(name, None, p, T if fixed else T + 4).leaves
    found, expected = decomposed.module()(*leaves), of_any_length(name, None, p)(*leaves)
    torch.testing.assert_close(tuple_of(found), tuple_of(expected), rtol=1e-5, atol=1e-5)


def test_every_op_with_a_gradient_is_tested():
    names = {name.split("::")[1] for name in LIBRARY._op_defs}
    assert {name for name in names if not name.endswith("_grad")} == set(NAMES)


def test_any_number_of_steps_is_an_error():
    """The program would have the ops of the example's steps alone."""
    with pytest.raises(ValueError, match=r"peephole_lstm: .* must be fixed, got a dynamic one"):
        exported("peephole_lstm", 0.0).run_decompositions()


def test_inductor_keeps_the_ops_of_an_exported_program():
    seen = []

    def stop_before_code_is_made(graph):
        seen.extend(node.target for node in graph.nodes)
        raise InterruptedError("seen")

    config = {"post_grad_custom_post_pass": stop_before_code_is_made, "force_disable_caches": True}
    program = exported("layer_norm", P, any_number=False)
    with torch._inductor.config.patch(config), pytest.raises(Exception, match="seen"):
        torch._inductor.aoti_compile_and_package(program)
    assert torch.ops.deepfast.layer_norm.default in seen
