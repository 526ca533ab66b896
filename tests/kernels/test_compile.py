"""Triton's compiler takes every kernel, without a GPU. The programs run without the interpreter."""

import pytest

pytest.importorskip("triton")


def test_a_sample_of_the_variants_passes_the_front_end(python):
    """A call of each launch; `make front-end` takes all, with several versions of Triton."""
    python("-m", "tests.kernels.front_end", "--each", "1")


@pytest.mark.slow
def test_every_launch_compiles_without_spills(python):
    """A call of each, for each target."""
    python("-m", "tests.kernels.aot", timeout=1800)
