"""The random operands of a check, and what tells the variants of a launch apart."""

import pytest
import torch

from deepfast import backend
from deepfast.launches import LAUNCHES
from deepfast.selfcheck import first_use, operands
from deepfast.selfcheck.operands import variant_of
from tests.kernels.agreement import LOW
from tests.kernels.calls import chosen, without_memory

CPU, FP32 = torch.device("cpu"), torch.float32
ATTENTION = ("attention_forward", "attention_backward")
CALLS = [*((name, 100) for name in LAUNCHES), *((name, 5) for name in (*ATTENTION, "mix_rows"))]


def given_for(name, dtype, tokens):
    """The record of a call. Its numbers are zeros, of which a check sees the seed alone."""
    sizes = {"T": tokens, "Q": tokens, "D": 40, "V": 40, "K": 3, "G": 2, "E": 16, "P": 9, "N": 3}
    sizes |= {"H": 17 if name.startswith("peephole") else 2}
    # Other kernels run where a sentence may be longer than a tile.
    given = {"dtype": dtype, "reach": (-1, 0), "length": 150 if tokens == 100 else 40}

    def zeros(x):
        if isinstance(x, list):
            return [zeros(y) for y in x]
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_()

    launch = LAUNCHES[name]
    return launch.record._make(map(zeros, without_memory(launch, chosen(launch, **given, **sizes))))


# Dtypes take turns.
@pytest.mark.parametrize(
    ("name", "tokens", "dtype"), [(*call, LOW[i % 3]) for i, call in enumerate(CALLS)]
)
def test_a_right_kernel_passes(monkeypatch, name, tokens, dtype):
    pytest.importorskip("triton")
    monkeypatch.setattr(operands, "TOKENS", 5)
    launch, given = LAUNCHES[name], given_for(name, dtype, tokens)
    triton, reference = (backend.launchers(launch.op, by)[name] for by in ("triton", "reference"))
    assert first_use.fault(launch, triton, reference, given, CPU, dtype) is None
    made = operands.like_those_of(launch, given, torch.Generator().manual_seed(3))
    variant_of(launch)(made)
    assert all(
        x.shape[0] <= 5
        for o, x in zip(launch.operands, made, strict=True)
        if isinstance(x, torch.Tensor) and o.shapes[0][:1] == ("T",)
    )


def test_a_variant_has_what_chooses_a_kernel():
    launch = LAUNCHES["attention_forward"]
    variant, given = variant_of(launch), given_for(launch.name, FP32, 5)
    base = variant(given)
    others = {"left": 1, "max_seqlen_q": 9, "dropout_p": 0.0, "seed": None, "q": given.q[..., :8]}
    for name, x in others.items():
        assert variant(given._replace(**{name: x})) != base
    assert variant(given._replace(q=given.q[:3], scale=2.0)) == base
    left = [variant(given._replace(left=n)) for n in (-1, 0, 1, 300)]
    assert len(set(left)) == 4
