"""The machine code of every kernel against its limits and bench/results/aot.md."""

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from deepfast import backend

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("aot.py")
TABLE = ROOT / "bench" / "results" / "aot.md"
REWRITE = "python tests/kernels/aot.py --write bench/results/aot.md"


@pytest.fixture(scope="module")
def report(request, tmp_path_factory):
    """One run of aot.py, in a process of its own, without the interpreter: over all cases, or over
    one of each launcher if the table is of these sources."""
    path = tmp_path_factory.mktemp("aot") / "report.json"
    command = [sys.executable, PROGRAM, "--json", path]
    if not request.config.getoption("all_cases"):
        command.append("--changed")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert path.exists(), done.stderr
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def sass():
    """aot_sass.py, which needs no Triton."""
    spec = importlib.util.spec_from_file_location("aot_sass", PROGRAM.with_name("aot_sass.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def kernel():
    """A kernel without fault."""
    return {
        "case": "copy bfloat16 D=512", "kernel": "copy_fwd_kernel", "sm": 90, "registers": 40,
        "shared": 0, "warps": 4, "resident": 48, "loads": Counter({128: 4, 32: 1}),
        "async": Counter(), "stores": Counter({128: 4}), "tensor core": 0, "spills": 0,
        "atomics": 0,
    }  # fmt: skip


@pytest.mark.exhaustive
def test_no_kernel_has_a_fault(report):
    assert not report["faults"], "\n" + "\n".join(report["faults"])


@pytest.mark.exhaustive
def test_table_lists_what_is_launched(report, sass):
    jobs = set(map(tuple, report["jobs"]))
    committed = {k for k in sass.read_table(TABLE.read_text()) if (k[0], k[-1]) in jobs}
    launched = set(map(tuple, report["rows"]))
    assert launched == committed, f"{TABLE.name} is not of these kernels; {REWRITE}"


@pytest.mark.exhaustive
def test_every_launcher_has_a_case(report):
    launchers = {name for names in backend.OPS.values() for name in names}
    assert {case.split()[0] for case, _, _ in report["rows"]} == launchers


LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;               /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 LDG.E.128.CONSTANT R8, desc[UR12][R2.64] ;   /* 0x000 */
        /*0020*/                   LDG.E.LTC128B R6, desc[UR12][R4.64] ;        /* 0x000 */
        /*0030*/                   LDG.E.U16.CONSTANT R6, desc[UR12][R4.64] ;   /* 0x000 */
        /*0040*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR4][R6.64], P0 ;  /* 0x0 */
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;        /* 0x000 */
        /*0060*/                   STL.64 [R1+0x4], R23 ;                       /* 0x000 */
        /*0070*/                   LDL.LU R3, [R1+0xc] ;                        /* 0x000 */
        /*0080*/                   REDUX.SUM UR4, R2 ;                          /* 0x000 */
        /*0090*/               @P1 RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5 ; /* 0 */
        /*00a0*/                   STG.E.64 desc[UR12][R2.64], R8 ;             /* 0x000 */
        /*00b0*/              @UP0 UTMALDG.2D [UR8], [UR4] ;                    /* 0x000 */
        /*12340*/                  STG.E.ENL2.256 desc[UR12][R2.64], R8, R12 ;  /* 0x000 */
"""


def test_read_sass(sass):
    assert sass.read_sass(LISTING) == {
        "loads": {128: 1, 32: 1, 16: 1},
        "async": {128: 2},
        "stores": {64: 1, 256: 1},
        "spills": 2,
        "atomics": 1,
        "tensor core": 1,
    }


@pytest.mark.parametrize(
    ("sm", "registers", "shared", "warps", "resident"),
    [
        (90, 32, 0, 4, 64),
        (90, 33, 0, 4, 48),
        (90, 255, 0, 8, 8),
        (90, 255, 0, 16, 0),
        (90, 16, 0, 1, 32),
        (90, 128, 100 << 10, 4, 8),
        (80, 128, 164 << 10, 4, 0),
    ],
)
def test_resident_warps(sass, sm, registers, shared, warps, resident):
    assert sass.resident_warps(sass.CHIPS[sm], registers, shared, warps) == resident


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"spills": 14}, "LDL and STL: expected 0, got 14"),
        ({"atomics": 1}, "atomics: expected 0, got 1"),
        ({"resident": 0}, "shared memory: expected what the chip has, got 0"),
        (
            {"loads": Counter({32: 4})},
            "bytes in 16-byte loads: expected at least 50%, got 0% (4x32)",
        ),
        (
            {"stores": Counter({64: 2})},
            "bytes in 16-byte stores: expected at least 50%, got 0% (2x64)",
        ),
        ({"kernel": "attention_fwd_kernel"}, "matrix instructions: expected some, got 0"),
        ({"registers": 49}, "registers: expected at most 48, got 49"),
        ({"shared": 1025}, "shared: expected at most 1024, got 1025"),
    ],
)
def test_a_fault_is_one_line(sass, kernel, change, line):
    committed = {"registers": "40", "shared": "0"}
    assert sass.faults(kernel, committed, "3.9.0") == []
    kernel |= change
    lines = sass.faults(kernel, committed, "3.9.0")
    assert lines == [f"{kernel['kernel']} on sm_90 in copy bfloat16 D=512: {line}"]


def test_an_older_compiler_may_spill(sass, kernel):
    kernel |= {"kernel": "boundary_bwd_kernel 2", "sm": 100, "spills": 10}
    assert sass.faults(kernel, None, "3.6.0") == []
    assert len(sass.faults(kernel, None, "3.9.0")) == 1
    (line,) = sass.faults(kernel | {"spills": 11}, None, "3.6.0")
    assert line.endswith("LDL and STL: expected at most 10, got 11")


def test_small_kernels_may_be_narrow(sass, kernel):
    narrow = {"kernel": "sum_partials_kernel 2", "loads": Counter({32: 4})}
    assert sass.faults(kernel | narrow, None, "3.9.0") == []


def test_table_reads_back(sass, kernel):
    rows = sass.read_table("# A title\n\nText.\n\n" + sass.write_table([kernel]))
    assert rows == {sass.key(kernel): dict(zip(sass.COLUMNS, sass.row(kernel), strict=True))}
    assert rows[sass.key(kernel)]["loads"] == "4x128 1x32"
