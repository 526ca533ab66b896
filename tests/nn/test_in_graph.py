"""A whole stack in a compiled graph: the launches of eager code, and no state is copied. And in a
CUDA graph, shown on a CPU: what that forbids does not occur."""

import re

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import deepfast
from deepfast import ops
from deepfast.launches import LAUNCHES
from deepfast.nn import DLCL, DepthHistory, Packing, TransformerDecoder, TransformerEncoder
from tests.nn.written_out import Seen, outcome, shaken

DIM, TOKENS = 64, 96


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dlcl", "attnres"])
def test_a_graph_launches_what_eager_code_does(kind, meter):
    """Forward and backward of a connected model. Nothing is copied: the graph needs no more
    memory."""
    model = nn.Sequential(*(nn.Tanh() for _ in range(5))).double()
    deepfast.connect(model, norm="pre", dim=DIM, connection=kind, inplace=False)
    shaken(model.double())
    x = torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)

    with Seen() as seen:
        wanted = outcome(model, x, model)
    with torch._inductor.config.patch(fx_graph_cache=False):
        compiled = torch.compile(model, fullgraph=True)
        got, codes = run_and_get_code(outcome, compiled, x, model)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)
    call = r"^ *torch\.ops\.deepfast\.(\w+)\.default\("
    launched = re.findall(call, "\n".join(codes), re.MULTILINE)
    names = (name.partition("::")[2] for name in seen.names)
    assert launched == [name for name in names if name in LAUNCHES]
    peaks = []
    for run in (compiled, model):
        with meter() as used:
            outcome(run, x, model)
        peaks.append(used.peak)
    assert peaks[0] <= 1.05 * peaks[1]


PROGRAMS = {
    "dlcl": {}, "attnres": {"reads": 1}, "block_attnres": {},
    "denseformer": {"dlcl": {"period": 3, "dilation": 2}},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("connection", PROGRAMS)
def test_an_exported_program_shares_reads(connection):
    """The rows of a block read older states by one op, also after a decomposition."""
    model = TransformerEncoder(
        12, 16, 2, 24, connection=connection, dropout=0.0, **PROGRAMS[connection]
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
    most = {"dlcl": 0.71, "attnres": 0.81}
    assert read <= most.get(connection, 1.1) * direct


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


# ---- CUDA graphs ---------------------------------------------------------------------------------


FORBIDDEN = {
    # Numbers that Python reads, sizes that depend on values, tensors made of Python's numbers.
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::unique_dim",
    "aten::masked_select", "aten::lift_fresh", "aten::scalar_tensor",
}  # fmt: skip
ENCODERS = [{"recompute": "ffn"}, {"norm": "post"}]
DECODERS = [{"dlcl": o} for o in ({"window": 3}, {"softmax": True}, {"weight_type": "vector"})]


@pytest.mark.parametrize("options", [*ENCODERS, *DECODERS], ids=str)
def test_a_step_in_eager_code_reads_nothing_back(options):
    """Nor does it bring a value from the host: a replay would use that of the capture. The first
    step may; it prepares what later ones use. With a loss of each token, which has weights."""
    kind = TransformerEncoder if options in ENCODERS else TransformerDecoder
    module = kind(5, 32, 2, 64, dropout=0.1, activation_dropout=0.1, **options)
    words, factor = torch.randn(17, 32, requires_grad=True), torch.rand(15)
    labels, packing = torch.zeros(15, dtype=torch.int64), Packing.of(3, 5, None)
    x, encoded = torch.randn(2, 15, 32)
    given = [encoded, packing] if kind is TransformerDecoder else []
    for _ in range(2):
        with Seen() as seen:
            y = module.forward_packed(x, packing, *given)
            one, each = (
                ops.linear_cross_entropy(y, words, labels, label_smoothing=0.1, **how)
                for how in ({}, {"token_weight": factor, "reduction": "none"})
            )
            (one + each.sum()).backward()
    assert len(seen.names) > 20
    assert not FORBIDDEN.intersection(seen.names)
    assert all(p.grad is not None for p in (words, *module.parameters()))
