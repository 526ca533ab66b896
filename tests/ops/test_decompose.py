"""Exported programs keep the ops; decomposed ones have torch's ops alone, with the same numbers."""

import pytest
import torch
from torch.export import Dim

from deepfast import ops
from deepfast.cases.case import tuple_of
from deepfast.ops.register import LIBRARY
from tests.ops.cases import EVERY, NAMES, Call, T, of_any_length, operator


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


CASES = [
    pytest.param(name, p, marks=() if p and name in NAMES else pytest.mark.exhaustive)
    for name in EVERY
    for p in (0.0, 0.3)
]


@pytest.mark.parametrize(("name", "p"), CASES)
def test_a_decomposed_program_has_torchs_ops_alone(name, p):
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
    call = Module(lambda x: ops.layer_norm(x, None, None))
    with torch._inductor.config.patch(config), pytest.raises(Exception, match="seen"):
        run(call, torch.randn(T, 16))
    assert operator("layer_norm") in seen
