"""A whole stack in a compiled graph: the launches of eager code, and no other state is moved."""

import re

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

import deepfast
from deepfast.launches import LAUNCHES
from deepfast.nn import DLCL, AttentionResiduals, DepthHistory, TransformerEncoder
from tests.nn.test_compile import Stack
from tests.nn.written_out import outcome, shaken

DIM, TOKENS = 64, 96
KINDS = {"dlcl": DLCL, "attnres": AttentionResiduals}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


class Eager(TorchDispatchMode):
    """The launches of eager code, by their names and lists of slots, and what torch's ops move."""

    def __init__(self):
        super().__init__()
        self.launched, self.elements = [], 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name, out = op._schema.name.split("::")[1], op(*args, **(kwargs or {}))
        if name in LAUNCHES:
            self.launched.append((name, [list(x) for x in args if isinstance(x, (list, tuple))]))
        elif isinstance(out, torch.Tensor) and not op.is_view and "empty" not in name:
            self.elements += sum(x.numel() for x in (out, *args) if isinstance(x, torch.Tensor))
        return out


def launched(code: str) -> list:
    """The same from a graph's code."""
    calls = re.findall(r"^ *torch\.ops\.deepfast\.(\w+)\.default\((.*)\)", code, re.MULTILINE)
    lists = ((name, re.findall(r"\[([\d, ]*)\]", operands)) for name, operands in calls)
    return [(name, [[int(i) for i in x.split(",") if x] for x in found]) for name, found in lists]


def moved_by_launches(launches) -> int:
    """How many states they read or write, of the lists and of single tensors. The second list of a
    far pass has its targets: an entry of the sums each, and in backward the states themselves."""
    singles = {"boundary_forward": 3, "boundary_backward": 5}
    total = 0
    for name, lists in launches:
        kind = name.removeprefix("attention_")
        total += singles.get(kind, 0) + sum(map(len, lists[:3]))
    return total


def loops(code: str) -> int:
    """How many elements the loops of the compiler read or write: the sizes of their buffers."""
    count = {}

    def elements(size: str) -> int:
        return torch.Size(int(x) for x in size.split(",") if x.strip()).numel()

    for name, size in re.findall(r"(\w+) = empty_strided_cpu\(\(([\d, ]*)\)", code):
        count[name] = elements(size)
    for name, size in re.findall(r"assert_size_stride\((\w+), \(([\d, ]*)\)", code):
        count[name] = elements(size)
    for name, before in re.findall(r"(\w+) = (\w+); +del \2", code):
        count[name] = count[before]
    total = 0
    for operands in re.findall(r"^ *cpp_fused_\w+\((.*)\)", code, re.MULTILINE):
        total += sum(count[name] for name in operands.split(", ") if name in count)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_moves_the_states_of_eager_code(kind):
    """Forward and backward of a connected model: the launches and their slots are those of eager
    code. Nothing is copied, and autograd adds no gradients of states."""
    model = nn.Sequential(*(nn.Tanh() for _ in range(9))).double()
    deepfast.connect(model, norm="pre", dim=DIM, connection=kind, inplace=False)
    shaken(model.double())
    x = torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)

    with Eager() as eager:
        wanted = outcome(model, x, model)
    with torch._inductor.config.patch(fx_graph_cache=False):
        compiled = torch.compile(model, fullgraph=True)
        got, codes = run_and_get_code(outcome, compiled, x, model)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)
    code = "\n".join(codes)
    assert launched(code) == eager.launched
    engine = moved_by_launches(eager.launched)
    graph, wanted = (engine + n / (TOKENS * DIM) for n in (loops(code), eager.elements))
    assert graph <= 1.05 * wanted


PROGRAMS = {
    "dlcl": {}, "attnres": {"reads": 1}, "block_attnres": {},
    "denseformer": {"dlcl": {"period": 3, "dilation": 2}},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("connection", PROGRAMS)
def test_an_exported_program_shares_reads(connection):
    """The rows of a block read older states by one op, also after a decomposition."""
    model = TransformerEncoder(
        24, 16, 2, 24, connection=connection, dropout=0.0, **PROGRAMS[connection]
    )
    model, x = shaken(model).double(), torch.randn(2, 5, 16, dtype=torch.float64)
    program, wanted = torch.export.export(model, (x,)), model(x)
    torch.testing.assert_close(program.module()(x), wanted, rtol=1e-11, atol=1e-11)
    plain = program.run_decompositions().module()
    torch.testing.assert_close(plain(x), wanted, rtol=1e-11, atol=1e-11)
    ops = (node for node in program.graph.nodes if "deepfast.depth_" in str(node.target))
    read = sum(len(node.args[0]) for node in ops)
    direct = sum(map(len, model.connection.depth.pattern))
    # Attention also reads each block's two results.
    most = {"dlcl": 0.57, "attnres": 0.72}
    assert read <= most.get(connection, 1.1) * direct


def test_an_exported_push_with_dropout_computes_no_norm():
    """Attention residuals have none: a push is the sum and the reads, and the numbers are those of
    eager code."""

    class Dropped(Stack):
        def forward(self, x):
            return self.one(x)

    model, x = Dropped(AttentionResiduals), torch.randn(5, 16, dtype=torch.float64)
    program = torch.export.export(model, (x,))
    assert not [n for n in program.graph.nodes if "layer_norm" in str(n.target)]
    x.requires_grad_()
    got, wanted = (outcome(each, x, each) for each in (program.module(), model))
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


def test_a_program_in_fp16_has_no_partial_sum_that_overflows():
    class Pushes(nn.Module):
        def __init__(self):
            super().__init__()
            self.dlcl = DLCL(11, 8, norm=None)
            # Of each row the older half less the newer half.
            k = torch.arange(12)
            self.dlcl.weight.data.copy_((k[:, None] / 2 - k).sign())

        def forward(self, y):
            history = DepthHistory()
            return torch.stack([self.dlcl(x, history) for x in y])

    y = torch.full((12, 3, 8), 4e4, dtype=torch.float16)
    program = torch.export.export(Pushes(), (y,))
    assert torch.equal(program.module()(y)[1:], torch.zeros(11, 3, 8, dtype=torch.float16))


@pytest.mark.slow
def test_any_number_of_tokens():
    """Inductor's graph for sizes that it does not know."""
    model = TransformerEncoder(3, 16, 2, 24, connection="attnres", dropout=0.0)
    model = shaken(model).double()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        x = torch.randn(2, tokens, 16, dtype=torch.float64, requires_grad=True)
        got, wanted = (outcome(run, x, model) for run in (compiled, model))
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_a_graph_for_cuda_graphs_reads_nothing_back():
    """``mode="reduce-overhead"`` records what runs between two steps of Python: the code must not
    wait for a value, and a second step must not compile again."""
    torch.manual_seed(0)
    encoder = TransformerEncoder(2, DIM, 2, DIM, dropout=0.1)
    compiled = torch.compile(encoder, fullgraph=True, mode="reduce-overhead")
    x = torch.randn(2, TOKENS // 2, DIM)

    def step():
        compiled(x).square().mean().backward()

    _, codes = run_and_get_code(step)
    assert len(codes) == 2  # forward and backward
    for code in codes:
        assert "torch.ops.deepfast" in code
        assert not re.search(r"\.item\(|\.tolist\(|_local_scalar_dense|\.cpu\(", code)
    with torch._dynamo.config.patch(error_on_recompile=True):
        step()
