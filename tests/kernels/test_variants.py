"""How often Triton compiles: not again for another number of tokens or another layer, and not for
the check of a kernel before its first use."""

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("variants.py")


@pytest.fixture(scope="module")
def found(python):
    pytest.importorskip("triton")
    return json.loads(python(PROGRAM, PYTHONPATH=str(PROGRAM.parents[2])).stdout)


def test_no_kernel_depends_on_the_number_of_tokens(found):
    """And the operands of a check have what Triton specialises on: alignments and strides."""
    more = {
        (case, kernel): counts
        for case, kernels in found["cases"].items()
        for kernel, counts in kernels.items()
        if counts[0] != counts[1]
    }
    assert found["cases"]
    assert not more, "variants for one number of tokens, and for several with their checks"


def test_the_boundaries_of_a_block_share_their_kernels(found):
    boundary = {"boundary_fwd_kernel": 1, "boundary_bwd_kernel": 1, "sum_partials_kernel": 1}
    attention = {
        "attention_boundary_fwd_kernel": 1, "attention_boundary_bwd_kernel": 1,
        "attend_query_kernel": 1, "sum_partials_kernel": 1,
    }  # fmt: skip
    assert found["blocks"] == {"boundary": boundary, "attention_boundary": attention}


def test_a_kept_kernel_is_the_one_that_triton_would_launch(found):
    assert found["faults"] == []
