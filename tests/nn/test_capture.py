"""What a CUDA graph forbids does not occur in a training step, shown on a CPU.

A step in a capture may not read a value back, nor bring one from the host: a replay would use that
of the capture. The first step may; it prepares what later ones use.
"""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepfast import ops
from deepfast.nn import Packing, TransformerDecoder, TransformerEncoder
from deepfast.policies import POLICIES, RERUN

D, B, S, WORDS = 32, 3, 5, 17
FORBIDDEN = {
    # Numbers that Python reads, sizes that depend on values, tensors made of Python's numbers.
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::unique_dim",
    "aten::masked_select", "aten::lift_fresh", "aten::scalar_tensor",
}  # fmt: skip


class Forbidden(TorchDispatchMode):
    """Collects the operations that a capture does not allow."""

    # Eager code calls the ops inside deepfast's own.
    sees_through = True

    def __init__(self):
        super().__init__()
        self.found, self.count = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        if function._schema.name in FORBIDDEN:
            self.found.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def trained(step, parameters):
    """Runs the step twice; returns what is forbidden in the second one."""
    step().backward()
    with Forbidden() as mode:
        step().backward()
    assert mode.count > 20
    assert all(p.grad is not None for p in parameters)
    return mode.found


ENCODERS = [
    {"norm": norm, "recompute": policy}
    for norm in ("pre", "post")
    for policy in POLICIES
    if policy not in RERUN
]
DECODERS = [{"dlcl": o} for o in ({"window": 3}, {"softmax": True}, {"weight_type": "vector"})]


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((TransformerEncoder, o) for o in ENCODERS), *((TransformerDecoder, o) for o in DECODERS)],
    ids=str,
)
def test_a_stack_with_a_loss(kind, options):
    """A loss of each token, with weights."""
    module = kind(5, D, 2, 2 * D, dropout=0.1, activation_dropout=0.1, **options)
    words, factor = torch.randn(WORDS, D, requires_grad=True), torch.rand(B * S)
    labels = torch.zeros(B * S, dtype=torch.int64)
    x, encoded = torch.randn(2, B * S, D)
    packing = Packing.of(B, S, None)
    given = [encoded, packing] if kind is TransformerDecoder else []

    def step():
        y = module.forward_packed(x, packing, *given)
        loss = partial(ops.linear_cross_entropy, y, words, labels, label_smoothing=0.1)
        return loss() + loss(token_weight=factor, reduction="none").sum()

    assert not trained(step, [words, *module.parameters()])
