"""The random operands of a check, and what tells the variants of a launch apart."""

import pytest
import torch

from deepfast import backend
from deepfast.launches import LAUNCHES
from deepfast.selfcheck import first_use
from deepfast.selfcheck.operands import TOKENS, like_those_of, variant_of
from tests.kernels.agreement import ABSENT, LOW, numbers, reference_of, run

CPU, FP32 = torch.device("cpu"), torch.float32
STARTS = torch.tensor([0, 40, 43]).int()


def given_for(name, dtype, tokens):
    """The record of a call."""
    given = {"T": tokens, "D": 40, "V": 40, **ABSENT.get(name, {})}
    if name in ("attention_forward", "attention_backward"):
        given = {"T": 43, "Q": 43, "H": 4, "G": 2, "E": 16, "N": 2, "dropout_p": 0.2, "scale": 0.25}
        # Other kernels run where a sentence may be longer than a tile.
        longest = 40 if tokens == 2 else 150
        given |= {"left": -1, "right": 0, "max_seqlen_q": longest, "max_seqlen_k": longest}
        given |= {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}
        made = numbers("attention_forward", **given)
        given |= {x: made[x] for x in "qkv"}
        given |= run(reference_of("attention"), "attention_forward", made, FP32, FP32)
    elif name.startswith("peephole"):
        given = {"P": 9, "N": 3, "H": 17}
    made = numbers(name, **given)

    def stored(o, x):
        if o.type == "Tensor[]":
            return [y.to(dtype) for y in x]
        return x.to(dtype) if o.dtype == "storage" and x is not None else x

    launch = LAUNCHES[name]
    return launch.record(*(stored(o, made[o.name]) for o in launch.operands))


# Dtypes take turns.
CALLS = [(name, tokens) for name in LAUNCHES for tokens in (2, 100)]


@pytest.mark.parametrize(
    ("name", "tokens", "dtype"), [(*call, LOW[i % 3]) for i, call in enumerate(CALLS)]
)
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
