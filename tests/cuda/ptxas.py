"""What nvcc produces for every CUDA kernel, without a GPU.

Each csrc/cuda/*.cu is compiled for every architecture with warnings as errors. What ptxas reports
for a kernel is compared with the launches that the emulator sees near D = 512.

    python tests/cuda/ptxas.py                                      # or make cuda-check
    python tests/cuda/ptxas.py --write bench/results/ptxas.md
"""

import argparse
import concurrent.futures
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from deepfast import build

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "bench" / "results" / "ptxas.md"
# The source whose host code is compiled too.
HOST = "partials"
# What is compiled for one architecture where the committed table is of these sources.
SAMPLE = ("partials", "pull_rows")
COLUMNS = ("kernel", "sm", "registers", "stack", "spills", "threads", "shared", "resident")

HEADER = """\
# What nvcc produces for the CUDA kernels

nvcc {version}, no GPU; `python tests/cuda/ptxas.py --write bench/results/ptxas.md`. If the
sources or nvcc are not those of this table, a test compiles every kernel and compares its registers
with these numbers. Otherwise it compiles two files, whose numbers must be the same.

Sources {sources}.

*registers* per thread, bytes of *stack* frame, *spills* in bytes stored and loaded; *threads* of a
block and its bytes of *shared* memory in a launch at D = 512, at 768 for three chunks a thread, or
at 508 and 509 for rows that are not aligned; *resident* the warps that a multiprocessor holds at
once, of 64.

"""


def module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


sass = module(ROOT / "tests" / "kernels" / "aot_sass.py")


def short(name: str) -> str | None:
    """``layer_norm_fwd_kernel<bf16>`` from a demangled name; None if it is no kernel."""
    # A demangled name has a result type only if the kernel is a template.
    found = re.search(r"(\w+_kernel)(<.*>)?\(", re.sub(r"deepfast::", "", name))
    if found is None:
        return None
    arguments = re.sub(r"\((?:int|bool|long)\)", "", found[2] or "").replace(" ", "")
    return found[1] + re.sub(r"\btrue\b", "1", re.sub(r"\bfalse\b", "0", arguments))


def demangled(names: list[str]) -> list[str]:
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
    return done.stdout.splitlines()


# ---- ptxas -------------------------------------------------------------------------------------

REPORT = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<sm>\d+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers"
    r"(?P<rest>[^\n]*)",
    re.DOTALL,
)


def headers(source: Path) -> set[Path]:
    """A file and all files of csrc that it includes."""
    found, left = set(), [source.resolve()]
    while left:
        path = left.pop()
        # The emulator's header is elsewhere.
        if path not in found and path.exists():
            found.add(path)
            names = re.findall(r'#include "(.*)"', path.read_text())
            left += [(path.parent / name).resolve() for name in names]
    return found


def passes(source: Path, architectures: list[str]) -> list[list[str]]:
    """Architectures whose machine code is made from one PTX.

    Below 100 nvcc writes the same PTX for each, except where the code asks for an architecture.
    """
    if any(re.search(r"__CUDA_ARCH__ *[<>=]", path.read_text()) for path in headers(source)):
        return [[a] for a in architectures]
    old = [a for a in architectures if int(a) < 100]
    return [*([old] if old else []), *([a] for a in architectures if a not in old)]


def compile_one(source: Path, architectures: list[str], host: bool) -> tuple[str, list[dict]]:
    """What went wrong, and the kernels; with ``host`` the host code is compiled too."""
    with tempfile.TemporaryDirectory() as folder:
        command = [build.find_nvcc(), *build.cuda_flags([]), "-Xptxas=-v"]
        for group in passes(source, architectures):
            code = ",".join(f"sm_{a}" for a in group)
            command.append(f"-gencode=arch=compute_{group[0]},code=[{code}]")
        command += ["-Werror=all-warnings", "-c" if host else "-fatbin", str(source)]
        build.write_headers(Path(folder))
        done = subprocess.run([*command, "-o", "out"], cwd=folder, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode != 0:
        return f"{source.name} does not compile:\n{said}", []
    found = [m.groupdict() for m in REPORT.finditer(said)]
    names = demangled([f["name"] for f in found])
    return "", [
        {
            "kernel": short(name),
            "sm": int(f["sm"]),
            "registers": int(f["registers"]),
            "stack": int(f["stack"]),
            "spills": int(f["stores"]) + int(f["loads"]),
            "static": int((re.search(r"(\d+) bytes smem", f["rest"]) or [0, 0])[1]),
        }
        for f, name in zip(found, names, strict=True)
    ]


# ---- launches ----------------------------------------------------------------------------------

LAUNCHES = """
import sys, torch
from bench.gpu.launches import every_launch
from deepfast.launches import LAUNCHES
torch.ops.load_library(sys.argv[1])
ops = torch.ops.deepfast_emulated
for dim in 512, 768, 508, 509:
    every_launch(ops, "cpu", 2, dim)
# A far pass over states without norms.
for dtype in torch.bfloat16, torch.float16:
    states = torch.zeros(20, 2, 512, dtype=dtype)
    for rows in range(8), range(16):
        rows = list(rows)
        LAUNCHES["mix_rows"].by_name(ops.mix_rows)(
            states=states, sources=[16], weight=torch.ones(20, 20), rows=rows, out=states.float(),
            out_rows=rows, accumulate=False,
        )
"""


def launches() -> dict[str, tuple[int, int]]:
    """For each kernel the threads and the bytes of shared memory of its largest launch."""
    library = str(module(Path(__file__).with_name("build.py")).build())
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "launches")
        subprocess.run(
            [sys.executable, "-c", LAUNCHES, library], cwd=ROOT,
            env=os.environ | {"EMULATOR_LOG": str(log), "EMULATOR_BLOCKS": "0",
                              "OMP_NUM_THREADS": "1"}, check=True,
        )  # fmt: skip
        lines = [line.split() for line in log.read_text().splitlines()]
    listed = subprocess.run(["nm", "-C", library], capture_output=True, text=True, check=True)
    names = {int(a, 16): n for a, _, n in (x.split(" ", 2) for x in listed.stdout.splitlines()
                                           if not x.startswith(" "))}  # fmt: skip
    found: dict[str, tuple[int, int]] = {}
    for address, _, threads, shared in lines:
        name = short(names[int(address, 16)])
        found[name] = max(found.get(name, (0, 0)), (int(threads), int(shared)))
    return found


# ---- the report --------------------------------------------------------------------------------


def digest() -> str:
    """A digest of everything that decides what is compiled; comments do not."""
    files = sorted({path for source in sources() for path in headers(source)})
    # The places of headers differ between machines.
    flags = [flag for flag in build.cuda_flags([]) if not flag.startswith(("-isystem", "-I"))]
    code = [re.sub(r"\s*//.*", "", file.read_text()) for file in files]
    return hashlib.sha256(repr((code, flags)).encode()).hexdigest()[:16]


def sources() -> list[Path]:
    return sorted((ROOT / "csrc" / "cuda").glob("*.cu"))


def differences(rows: list[list[str]], architectures: list[str]) -> list[str]:
    """A line for each kernel of SAMPLE whose row is another one, and for each that has none."""
    committed, faults = {tuple(row[:2]): row[:5] for row in rows}, []
    for source in (ROOT / "csrc" / "cuda" / f"{name}.cu" for name in SAMPLE):
        said, kernels = compile_one(source, architectures, host=False)
        faults += [said] if said else []
        for found in ([str(k[c]) for c in COLUMNS[:5]] for k in kernels):
            row = committed.get(tuple(found[:2]))
            faults += [f"{TABLE.name} has {row}, compiled: {found}"] if row != found else []
    return faults


def report(changed: bool = False) -> dict:
    """Version, rows by COLUMNS, faults; with ``changed`` those of the committed table if it is of
    these sources and this nvcc, after a comparison with the files of SAMPLE."""
    version, architectures = build.nvcc_facts(build.find_nvcc())
    committed = TABLE.read_text() if TABLE.exists() else ""
    if changed and f"Sources {digest()}." in committed and f"nvcc {version}," in committed:
        rows = read_table(committed)
        faults = differences(rows, architectures[:1])
        return {"version": version, "architectures": architectures, "rows": rows, "faults": faults}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        # The emulator's compiler warns about host code. nvcc adds only the headers, and one file
        # is enough for these.
        jobs = [pool.submit(compile_one, s, architectures, s.stem == HOST) for s in sources()]
        results = [job.result() for job in jobs]
    faults = [said for said, _ in results if said]
    seen = launches()
    rows = []
    for k in sorted((k for _, ks in results for k in ks), key=lambda k: (k["kernel"], k["sm"])):
        threads, shared = seen.get(k["kernel"], (None, None))
        where = f"{k['kernel']} on sm_{k['sm']}"
        if k["stack"] or k["spills"]:
            faults.append(f"{where}: {k['stack']} bytes of stack, {k['spills']} of spills")
        resident = None
        if threads is not None:
            shared += k["static"]
            chip = sass.CHIPS[k["sm"]]
            resident = sass.resident_warps(chip, k["registers"], shared, threads // 32)
            if resident == 0:
                faults.append(f"{where}: no block of {threads} threads, {shared} bytes fits")
        cells = k | {"threads": threads, "shared": shared, "resident": resident}
        rows.append(["-" if cells[c] is None else str(cells[c]) for c in COLUMNS])
    return {"version": version, "architectures": architectures, "rows": rows, "faults": faults}


def table(found: dict) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *found["rows"]]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return HEADER.format(version=found["version"], sources=digest()) + text


def read_table(text: str) -> list[list[str]]:
    """The rows of `table`."""
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return lines[2:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="file of the table")
    parser.add_argument("--json", type=Path, help="file for what was found")
    parser.add_argument(
        "--changed", action="store_true", help="compile two files if the table is of these sources"
    )
    args = parser.parse_args()
    if build.find_nvcc() is None:
        print("cuda-check: no nvcc was found, nothing was compiled")
        return 0
    found = report(args.changed)
    text = table(found)
    print(text)
    if args.write:
        args.write.write_text(text)
    if args.json:
        args.json.write_text(json.dumps(found))
    print("\n".join(found["faults"]) or "no faults")
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
