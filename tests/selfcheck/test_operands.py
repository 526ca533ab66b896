"""The random operands of a check, and what tells the variants of a launch apart."""

import pytest
import torch

from deepfast import backend
from deepfast.launches import LAUNCHES
from deepfast.selfcheck import first_use
from deepfast.selfcheck.operands import TOKENS, like_those_of, variant_of
from tests.kernels.agreement import ABSENT, LOW, numbers
from tests.kernels.test_attention import CASES, operands, with_results

CPU, FP32 = torch.device("cpu"), torch.float32


def given_for(name, dtype, tokens):
    """The record of a call."""
    if name.startswith("attention_") and "boundary" not in name:
        made = numbers(name, **with_results(operands(*CASES["groups, long"]), FP32))
    elif name.startswith("peephole"):
        made = numbers(name, P=9, N=3, H=17)
    else:
        made = numbers(name, T=tokens, D=40, V=40, **ABSENT.get(name, {}))

    def stored(o, x):
        if o.type == "Tensor[]":
            return [y.to(dtype) for y in x]
        return x.to(dtype) if o.dtype == "storage" and x is not None else x

    launch = LAUNCHES[name]
    return launch.record(*(stored(o, made[o.name]) for o in launch.operands))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("tokens", [2, 100])
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_right_kernel_passes(name, tokens, dtype):
    pytest.importorskip("triton")
    launch, given = LAUNCHES[name], given_for(name, dtype, tokens)
    triton, reference = (backend.launchers(launch.op, by)[name] for by in ("triton", "reference"))
    assert first_use.fault(launch, triton, reference, given, CPU, dtype) is None
    made = like_those_of(launch, given, torch.Generator().manual_seed(3))
    variant_of(launch)(made)
    assert all(
        x.shape[0] <= TOKENS
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
