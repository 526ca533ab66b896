"""Variants of Triton's kernels compile up to Triton IR. `make front-end` takes all of them, with
several versions of Triton."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("front_end.py")


@pytest.mark.exhaustive
def test_a_sample_of_the_variants_has_correct_types(python):
    pytest.importorskip("triton")
    said = python(PROGRAM, "--each", "12", PYTHONPATH=str(PROGRAM.parents[2])).stdout
    assert " 0 launches failed" in said
