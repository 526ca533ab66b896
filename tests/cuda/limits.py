"""How near to a plain copy the GPU kernels can come, counted from their machine code.

    python tests/cuda/limits.py                                     # prints the table
    python tests/cuda/limits.py --write bench/results/limits.md

Nothing is measured. The kernels are compiled for sm_90, and the instructions of a kernel's loop
over tokens are counted, each inner loop as often as it runs.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


def module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


ptxas = module(Path(__file__).with_name("ptxas.py"))
ARCHITECTURE = 90

# ---- what is assumed of a chip -------------------------------------------------------------------

# Bytes a second of a copy: 0.9 of the datasheet's 3.35e12 and 4.8e12.
COPIES = {"H100": 3.0e12, "H200": 4.3e12}
MULTIPROCESSORS, CLOCK, SCHEDULERS = 132, 1.755e9, 4
# Cycles from a load of device memory to its value, in a busy chip.
LATENCY = 900
# Cycles to the result of other instructions whose time is not fixed; to that of the rest.
RESULT = {"LDG": LATENCY, "LDS": 33, "LDSM": 36, "SHFL": 26, "MUFU": 24, "LDC": 40, "HMMA": 35}
OTHER_RESULT = 22
# Cycles in which shared memory serves 32 lanes: 128 bytes in each.
SHARED_CYCLES = {32: 1, 64: 2, 128: 4}

HEADER = """\
# Computed, not measured: how near to a copy the GPU kernels can come

`python tests/cuda/limits.py --write bench/results/limits.md`, nvcc {version}, Triton {triton},
sm_90. The kernels `attend_*` are Triton's: on tensor cores (`dot`) for bf16 and rows of up to 1,024
channels, else with FMA; the rows of both show what tensor cores give. The others are CUDA C++.

For a token of D = 512 channels in bf16, of the machine code of the loop over tokens, each inner
loop as often as it runs:

- *bytes* to and from device memory;
- *slots*: the instructions that warps start;
- *alone*: the cycles that a pass takes if a warp has the multiprocessor for itself, from the waits
  that the compiler wrote into each instruction, with {latency} cycles for a load of device memory;
- *shared*: the cycles in which shared memory is busy.

A case says how many states (K) a pass reads for how many rows (B), or for how many states (J) it
pulls the gradients of L rows; of a boundary K near states and P pulled gradients. *warps* are those
of a multiprocessor, *in flight* the bytes that they wait for at once, *limit* what decides the
fraction on an H200.

Left out: what a block does once, and code that aligned rows of one warp never reach: barriers
between the warps of a row, accesses of single 16-bit values, slow paths of divisions. The bulk
copies of mix_rows and pull_rows are issued by one of a block's eight warps in turn, and count as an
eighth. Waits for other warps of the block are left out too.

A copy moves the bytes at its rate. The *fraction* is its time over the longest of

- the copy itself;
- *warps*: of W resident warps one row takes (alone + slots (W / 4 - 1)) / W cycles if a warp waits
  for all others of its scheduler in each pass;
- *shared*: the cycles of shared memory;
- *latency*: the bytes in flight must cover {latency} cycles of the copy's reads (Little's law).

Assumed: {chips} for a copy; {count} multiprocessors at {clock:.3f} GHz. The latencies are guesses
until a GPU has run the kernels; the counts are not.

"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A launch whose loop over tokens is counted."""

    source: str
    kernel: str
    what: str
    dim: int = 512
    tokens: float = 1
    """Tokens that a warp finishes in one pass of the loop."""
    loops: tuple[float, ...] = ()
    """How often each inner loop runs in one pass, in the order of the code. Where a loop runs 0
    times, the smallest stretch around it that a branch jumps over is left out."""
    rows_read: int
    rows_written: int
    ahead: float
    """Rows of the token's operands that a warp has in flight at once."""
    warps: int
    """Warps of a multiprocessor."""
    looped: bool = True
    """Whether the kernel has a loop over tokens; else all of it is counted."""
    never: str = "none"
    """Begins the opcodes of loads that these launches never make, of sums to add to."""
    copying: float = 1 / 8
    """The part of the warps that issues bulk copies."""


# ---- machine code as cuobjdump prints it ---------------------------------------------------------

LINE = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);[^\n]*\n"
    r"\s+/\* 0x([0-9a-f]{16}) \*/",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Instruction:
    address: int
    opcode: str
    operands: str
    control: int
    """From bit 0: 4 bits of stall, a yield bit, 3 bits each for the results written and the
    operands read, 6 bits of a wait mask. As in the machine code since Volta, from bit 41 of the
    second word on."""

    @property
    def first(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def result(self) -> int:
        """Cycles to its result, if their number is not fixed."""
        # Triton's kernels hint at what lies in the L1 cache.
        cached = self.first == "LDG" and (".EF" in self.opcode or ".EL" in self.opcode)
        return RESULT["LDS"] if cached else RESULT.get(self.first, OTHER_RESULT)

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        found = re.search(r"0x([0-9a-f]+)\s*$", self.operands)
        return int(found[1], 16) if self.first == "BRA" and found else None

    @property
    def unusual(self) -> bool:
        """Whether a row of one warp, of aligned 16-bit values, never gets here."""
        narrow = self.first in ("LDG", "STG") and ".U16" in self.opcode
        return narrow or self.first in ("BAR", "CALL")


def instructions(listing: str) -> list[Instruction]:
    """Those of one function, as cuobjdump prints it."""
    return [
        Instruction(int(m[1], 16), m[2], m[3], int(m[4], 16) >> 41) for m in LINE.finditer(listing)
    ]


def jumps(code: list[Instruction], first: int, last: int) -> list[tuple[int, int]]:
    """The branches that jump over the instructions from ``first`` to ``last``, smallest first."""
    around = [(i.address, i.target) for i in code if i.target is not None]
    around = [(a, b) for a, b in around if a < first and last < b]
    return sorted(around, key=lambda jump: jump[1] - jump[0])


def usual(code: list[Instruction], never: str) -> list[Instruction]:
    """Without the smallest stretch around each unusual instruction that a branch jumps over."""
    odd = [i.address for i in code if i.unusual or i.opcode.startswith(never)]
    found = [jumps(code, at, at) for at in odd]
    return [i for i in code if not any(s and s[0][0] < i.address < s[0][1] for s in found)]


def loops(code: list[Instruction], behind: bool = False) -> list[tuple[int, int]]:
    """First and last address of every loop. What lies behind the last exit are waits for barriers
    that are not over at once, and slow paths: they jump back, but not to the begin of a loop.

    behind: whether loops may end there, as Triton's do.
    """
    found: dict[int, int] = {}
    end = max((i.address for i in code if i.first == "EXIT"), default=code[-1].address)
    # At the very end a branch to itself keeps a processor from reading on.
    end = code[-2].address if behind else end
    for i in code:
        if i.target is not None and i.target <= i.address <= end:
            found[i.target] = max(found.get(i.target, 0), i.address)
    return sorted(found.items())


def copies(code: list[Instruction]) -> set[tuple[int, int]]:
    """The stretches with bulk copies, from behind a branch to before its target. A branch jumps
    over each where no step is left to be copied, and inside that one another where it is not this
    warp's turn. Branches out of the loop go to waits."""
    found, end = set(), code[-1].address
    for at in (i.address for i in code if i.first == "UBLKCP"):
        reads = [i.address for i in code if i.first == "LDSM"]
        around = [(a, b) for a, b in jumps(code, at, at) if b <= end]
        around = [(a, b) for a, b in around if not any(a < r < b for r in reads)]
        target = sorted({b for _, b in around})[-2]
        found.add((min(a for a, b in around if b == target) + 1, target - 1))
    return found


# ---- counting machine code -----------------------------------------------------------------------


def functions(cubin: Path) -> dict[str, list[Instruction]]:
    """The instructions of each kernel by its short name."""
    tool = next(Path(module_folder("triton"), "backends/nvidia/bin").glob("cuobjdump"))
    done = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True)
    parts = re.split(r"^\s*Function : (\S+)\n", done.stdout, flags=re.MULTILINE)[1:]
    names = map(ptxas.short, ptxas.demangled(parts[::2]))
    return {name: instructions(body) for name, body in zip(names, parts[1::2], strict=True)}


def module_folder(name: str) -> str:
    return importlib.util.find_spec(name).submodule_search_locations[0]


def weighted(code: list[Instruction], case: Case) -> list[tuple[Instruction, float]]:
    """The instructions of the loop over tokens, and how often each runs in one pass."""
    begin, end = 0, max(i.address for i in code if i.first == "EXIT")
    triton = case.source == "triton"
    if case.looped:
        begin, end = max(loops(code, triton), key=lambda span: span[1] - span[0])
    body = [i for i in code if begin <= i.address <= end]
    # Every row of Triton's kernels passes their barriers.
    body = body if triton else usual(body, case.never)
    inner = [span for span in loops(body, triton) if span != (begin, end)]
    if len(inner) != len(case.loops):
        raise SystemExit(
            f"{case.kernel}: expected {len(case.loops)} inner loops, got {len(inner)}:"
            f" {[(hex(a), hex(b)) for a, b in inner]}"
        )
    times = dict.fromkeys(copies(body), case.copying)
    for span, often in zip(inner, case.loops, strict=True):
        if often == 0:
            branch, target = jumps(body, *span)[0]
            span = branch + 1, target - 1
        times[span] = often

    def weight(address: int) -> float:
        runs = 1.0
        for (a, b), often in times.items():
            runs *= often if a <= address <= b else 1.0
        return runs

    return [(i, weight(i.address)) for i in body]


# ---- limits --------------------------------------------------------------------------------------


def alone(code: list[tuple[Instruction, float]]) -> float:
    """Cycles that one warp takes for these instructions without any other warp.

    An instruction starts when the results that its wait mask names have come. Where it ends its
    own result comes after `RESULT`, and the next one starts after its stall.
    """
    now, total, ready = 0, 0.0, dict.fromkeys(range(6), 0)
    for i, runs in code:
        before = now
        now = max([now, *(ready[b] for b in range(6) if i.control >> 11 + b & 1)])
        written, read = i.control >> 5 & 7, i.control >> 8 & 7
        if written < 6:
            ready[written] = max(ready[written], now + i.result)
        if read < 6:
            ready[read] = max(ready[read], now + OTHER_RESULT)
        now += max(1, i.control & 15)
        total += (now - before) * runs
    return total


def count(code: list[Instruction], case: Case) -> dict[str, float]:
    """Slots, cycles alone and cycles of shared memory for a token."""
    body, shared = weighted(code, case), 0.0
    for i, runs in body:
        if i.first in ("LDS", "STS", "LDSM", "LDGSTS"):
            bits = 128 if i.first == "LDSM" else ptxas.sass.width(i.opcode)
            shared += runs * SHARED_CYCLES[bits]
    found = {"slots": sum(runs for _, runs in body), "alone": alone(body), "shared": shared}
    return {name: number / case.tokens for name, number in found.items()}


def fractions(case: Case, counted: dict[str, float], chip: str) -> dict[str, float]:
    """The time of a copy over the time that each limit asks for."""
    rate = COPIES[chip] / (MULTIPROCESSORS * CLOCK)
    rows, row = case.rows_read + case.rows_written, case.dim * 2
    copy, others = rows * row / rate, case.warps / SCHEDULERS - 1
    return {
        "warps": copy * case.warps / (counted["alone"] + counted["slots"] * others),
        "shared": copy / max(counted["shared"], 1),
        "latency": case.warps * case.ahead * row / (LATENCY * rate * case.rows_read / rows),
    }


def compiled(source: str, folder: str) -> dict[str, list[Instruction]]:
    build, cubin = ptxas.build, Path(folder, f"{source}.cubin")
    code = f"-gencode=arch=compute_{ARCHITECTURE},code=sm_{ARCHITECTURE}"
    command = [build.find_nvcc(), *build.cuda_flags([]), "-cubin", code]
    path = ROOT / "csrc" / "cuda" / f"{source}.cu"
    build.write_headers(Path(folder))
    subprocess.run([*command, path, "-o", cubin], cwd=folder, check=True, capture_output=True)
    return functions(cubin)


def of_triton() -> dict[str, list[Instruction]]:
    """The instructions of the far passes of attention residuals, at bf16 and D = 512."""
    # Imported here: the rest needs no Triton. Its interpreter compiles nothing.
    os.environ["TRITON_INTERPRET"] = "0"
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from deepfast.kernels import attend_dot, attend_rows

    whole = attend_rows.attend_tile(512, 2, 8)._asdict() | {"BB": 8}
    states = torch.empty(0, 0, 512, dtype=torch.bfloat16, device="meta")
    rows = attend_dot.dot_tile(states, attend_dot.MOST_CHANNELS)
    pulled = attend_dot.dot_tile(states, attend_dot.PULLED_CHANNELS)
    found = {}
    for kernel, given in (
        (attend_rows.attend_rows_kernel, whole | {"UNROLL": attend_rows.LOADS, "maxnreg": 128}),
        (attend_rows.attend_pull_kernel, whole | {"UNROLL": 1, "maxnreg": 128}),
        (attend_dot.attend_rows_dot_kernel, rows | {"maxnreg": 128}),
        (attend_dot.attend_pull_dot_kernel, pulled),
    ):
        given = given | {"p_bias": None, "RELU": False, "ACCUMULATE": False, "D": 512}
        options = {name: given.pop(name) for name in ("num_warps", "maxnreg") if name in given}
        names, signature, aligned = kernel.arg_names, {}, {}
        for i, name in enumerate(names):
            stored = "*bf16" if name in ("p_states", "p_grads", "p_out") else "*fp32"
            signature[name] = stored if name.startswith("p_") else "i32"
            if name in given:
                signature[name] = "constexpr"
            elif name.startswith(("p_", "s_")):
                aligned[i,] = [["tt.divisibility", 16]]
        constants = {(names.index(name),): value for name, value in given.items()}
        source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
        made = compile(source, target=GPUTarget("cuda", ARCHITECTURE, 32), options=options)
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "kernel.cubin")
            cubin.write_bytes(made.asm["cubin"])
            (found[kernel.__name__],) = functions(cubin).values()
    return found


COLUMNS = ("kernel", "case", "bytes", "slots", "alone", "shared", "warps", "in flight", "limit")


Code = dict[str, dict[str, list[Instruction]]]
"""By source and kernel."""


def table(cases: list[Case], code: Code) -> str:
    columns = (*COLUMNS, *COPIES)
    lines = [columns, ["---"] * len(columns)]
    for case in cases:
        counted = count(code[case.source][case.kernel], case)
        limits = {chip: fractions(case, counted, chip) for chip in COPIES}
        nearest = min(limits["H200"], key=limits["H200"].__getitem__)
        row = case.dim * 2
        lines.append((
            case.kernel, case.what, str((case.rows_read + case.rows_written) * row),
            *(f"{counted[name]:.0f}" for name in ("slots", "alone", "shared")), str(case.warps),
            f"{case.warps * case.ahead * row / 1024:.0f} KB",
            nearest if limits["H200"][nearest] < 1 else "copy",
            *(f"{min(1, *limits[chip].values()):.2f}" for chip in COPIES),
        ))  # fmt: skip
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# ---- launches ------------------------------------------------------------------------------------


def forward(near: int, far: bool = True) -> Case:
    """The boundary; `near` states with the pushed one, `far`: with a partial sum."""
    return Case(
        source="boundary", kernel="boundary_fwd_kernel<bf16,1,2>", what=f"K={near}",
        loops=(near - 1,), rows_read=near + 1 + far, rows_written=3, ahead=5, warps=16,
    )  # fmt: skip


def backward(near: int, pulls: int, far: int = 2) -> Case:
    """`pulls`: with the row itself. `far`: of a partial sum and what far rows pulled."""
    return Case(
        source="boundary_backward", kernel="boundary_bwd_kernel<bf16,1,2>",
        what=f"K={near} P={pulls}", loops=(near - 1, pulls), rows_read=near + pulls + 1 + far,
        rows_written=3, ahead=5, warps=8,
    )  # fmt: skip


# A warp has an eighth of a token. Of the 64 copies for sixteen states a lane issues two.
EIGHTH = 1 / 8
DOT = 16


def mix(states: int, rows: int) -> Case:
    """Two of three stages of sixteen states are in flight, in each of two blocks."""
    most = 8 if rows <= 8 else 16
    return Case(
        source="mix_rows", kernel=f"mix_rows_dot_kernel<bf16,{most},1>",
        what=f"K={states} B={rows}", tokens=EIGHTH,
        loops=(-(-states // DOT), 32, 32, 0, 0, 0, 0, 0), rows_read=states, rows_written=rows,
        ahead=2 * DOT * EIGHTH, warps=16, never="LDG.E.128",
    )  # fmt: skip


def pull(rows: int, sources: int) -> Case:
    """Two of three stages of sixteen gradients are in flight, in each of two blocks."""
    return Case(
        source="pull_rows", kernel="pull_rows_dot_kernel<bf16>", what=f"L={rows} J={sources}",
        tokens=EIGHTH, loops=(sources, -(-rows // DOT), min(rows, DOT)), rows_read=rows + sources,
        rows_written=sources, ahead=2 * DOT * EIGHTH, warps=16, never="LDG.E.128",
    )  # fmt: skip


def attend(states: int, rows: int, dot: bool) -> Case:
    """attend_rows. A program of eight warps has a token: of 8 rows, or on tensor cores of 16. It
    loads two states, or 16, and waits for them."""
    name = "attend_rows_dot_kernel" if dot else "attend_rows_kernel"
    passes = states // DOT if dot else states // 2
    return Case(
        source="triton", kernel=name, what=f"K={states} B={rows}", loops=(passes,),
        tokens=EIGHTH if dot else EIGHTH * 8 / rows, rows_read=states, rows_written=rows,
        ahead=(DOT if dot else 2) * EIGHTH, warps=16,
    )  # fmt: skip


def attend_back(rows: int, sources: int, dot: bool) -> Case:
    """attend_pull, without the gradient of the queries. On tensor cores gradients and queries are
    loaded twice, the second time from the L1 cache."""
    name = "attend_pull_dot_kernel" if dot else "attend_pull_kernel"
    return Case(
        source="triton", kernel=name, what=f"L={rows} J={sources}",
        loops=(rows // DOT if dot else rows,), tokens=EIGHTH if dot else EIGHTH * 8 / sources,
        rows_read=rows + sources, rows_written=sources, ahead=(DOT if dot else 1) * EIGHTH,
        warps=8 if dot else 16, looped=dot,
    )  # fmt: skip


NORM = {"source": "layer_norm", "what": "residual, dropout", "rows_written": 2}
CASES = [
    forward(4), forward(8), backward(4, 4), backward(8, 8),
    mix(16, 8), mix(64, 8), mix(16, 16), mix(64, 16), pull(16, 8), pull(64, 8),
    Case(**NORM, kernel="layer_norm_fwd_kernel<bf16,2,1>", rows_read=2, ahead=2, warps=32,
         looped=False),
    Case(**NORM, kernel="layer_norm_bwd_kernel<bf16,2,1>", rows_read=3, ahead=6, warps=16),
    *(attend(n, b, dot) for n, b in ((16, 8), (64, 8), (64, 16)) for dot in (False, True)),
    *(attend_back(n, b, dot) for n, b in ((16, 8), (64, 8), (64, 16)) for dot in (False, True)),
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="file of the table")
    args = parser.parse_args()
    if ptxas.build.find_nvcc() is None:
        print("limits: no nvcc was found, nothing was counted")
        return 0
    version, _ = ptxas.build.nvcc_facts(ptxas.build.find_nvcc())
    chips = ", ".join(f"{chip} {rate / 1e12:.1f} TB/s" for chip, rate in COPIES.items())
    text = HEADER.format(
        version=version, latency=LATENCY, chips=chips, triton=importlib.metadata.version("triton"),
        count=MULTIPROCESSORS, clock=CLOCK / 1e9,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        sources = sorted({c.source for c in CASES} - {"triton"})
        code = {source: compiled(source, folder) for source in sources} | {"triton": of_triton()}
    text += table(CASES, code)
    print(text)
    if args.write:
        args.write.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
