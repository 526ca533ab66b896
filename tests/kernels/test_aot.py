"""Every Triton kernel compiles without spills, and bench/results/aot.md lists every case."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepfast import backend

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("aot.py")
REWRITE = "python tests/kernels/aot.py --write bench/results/aot.md"


@pytest.fixture(scope="module")
def report(request, tmp_path_factory):
    """One run of aot.py, in a process of its own, without the interpreter: over all cases, or over
    one of each launcher."""
    path = tmp_path_factory.mktemp("aot") / "report.json"
    command = [sys.executable, PROGRAM, "--json", path]
    if not request.config.getoption("all_cases"):
        command.append("--sample")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert path.exists(), done.stderr
    return json.loads(path.read_text())


@pytest.mark.exhaustive
def test_no_kernel_has_a_fault(report):
    assert not report["faults"], "\n" + "\n".join(report["faults"])


@pytest.mark.exhaustive
def test_the_table_lists_what_is_launched(report):
    lines = (ROOT / "bench" / "results" / "aot.md").read_text().splitlines()
    committed = {tuple(line[2:-2].split(" | ")[:3]) for line in lines if line.startswith("| ")}
    launched = {tuple(row[:3]) for row in report["rows"]}
    assert launched <= committed, f"aot.md is not of these kernels; {REWRITE}"
    launchers = {name for names in backend.OPS.values() for name in names}
    assert {case.split()[0] for case, *_ in launched} == launchers


@pytest.fixture(scope="module")
def sass():
    """aot_sass.py, which needs no Triton."""
    spec = importlib.util.spec_from_file_location("aot_sass", PROGRAM.with_name("aot_sass.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;               /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 LDG.E.128.CONSTANT R8, desc[UR12][R2.64] ;   /* 0x000 */
        /*0060*/                   STL.64 [R1+0x4], R23 ;                       /* 0x000 */
        /*0070*/                   LDL.LU R3, [R1+0xc] ;                        /* 0x000 */
        /*0080*/                   REDUX.SUM UR4, R2 ;                          /* 0x000 */
        /*0090*/               @P1 RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5 ; /* 0 */
        /*00b0*/              @UP0 UTMALDG.2D [UR8], [UR4] ;                    /* 0x000 */
"""


def test_a_fault_is_one_line(sass):
    code = sass.OPCODE.findall(LISTING)
    assert code == ["LDC", "LDG", "STL", "LDL", "REDUX", "RED", "UTMALDG"]
    assert sass.faults("copy_kernel", 80, code, 200 << 10, "3.9.0") == [
        "LDL and STL: expected at most 0, got 2",
        "atomics: expected at most 0, got 1",
        "shared memory: expected at most 166912, got 204800",
    ]
    assert sass.faults("copy_kernel", 90, ["LDG"], 200 << 10, "3.9.0") == []
