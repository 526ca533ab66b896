"""Triton's compiler takes every kernel, without a GPU. The programs run without the interpreter."""

import pytest

from deepfast import backend
from tests.kernels import sass


def test_a_sample_of_the_variants_passes_the_front_end(python):
    """`make front-end` takes all of them, with several versions of Triton."""
    pytest.importorskip("triton")
    assert " 0 failed" in python("-m", "tests.kernels.front_end", "--each", "3").stdout


@pytest.mark.slow
def test_every_launch_compiles_without_spills(python):
    """Its main call, for each target."""
    pytest.importorskip("triton")
    said = python("-m", "tests.kernels.aot", "--main", timeout=1800).stdout
    count = sum(map(len, backend.OPS.values()))
    assert f"{3 * count} calls of {count} launches compiled" in said


LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;               /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 LDG.E.128.CONSTANT R8, desc[UR12][R2.64] ;   /* 0x000 */
        /*0060*/                   STL.64 [R1+0x4], R23 ;                       /* 0x000 */
        /*0070*/                   LDL.LU R3, [R1+0xc] ;                        /* 0x000 */
        /*0080*/                   REDUX.SUM UR4, R2 ;                          /* 0x000 */
        /*0090*/               @P1 RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5 ; /* 0 */
        /*00b0*/              @UP0 UTMALDG.2D [UR8], [UR4] ;                    /* 0x000 */
"""


def test_faults_of_a_listing_are_found():
    assert sass.faults("copy_kernel", 80, LISTING, 200 << 10, "3.9.0") == [
        "LDL and STL: expected at most 0, got 2",
        "atomics: expected at most 0, got 1",
        "shared memory: expected at most 166912, got 204800",
    ]
    assert sass.faults("boundary_bwd_kernel", 90, LISTING, 0, "3.6.0") == [
        "atomics: expected at most 0, got 1"
    ]
