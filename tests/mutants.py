"""Breaks one line of the package at a time and runs the tests: which faults do they catch?

    python tests/mutants.py choose --seed 33 --count 24 > mutants.json
    python tests/mutants.py run mutants.json results.json

`choose` draws lines of arithmetic, indexing and conditions of the folders below; texts, docstrings
and errors stay. `run` breaks each in turn in the checkout that this file is in, compiles where it
has to, and runs the tests: those of the same folder first, then all of `make test`. It puts the
line back, writes the result, and begins where it was stopped. A mutant is found by its function and
its expression, wherever the function is now, so that the mutants of an old commit can be run in a
newer one. The checkout must have no changes of its own.
"""

import argparse
import ast
import json
import random
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A folder, how many of each 24 mutants it gets, and the tests that see it first.
AREAS = {
    "kernels": (3, ["tests/kernels"]),
    "csrc/cpu": (4, ["tests/ops", "tests/depth"]),
    "csrc/cuda": (3, ["tests/cuda"]),
    "deepfast/depth": (4, ["tests/depth"]),
    "deepfast/ops": (3, ["tests/ops"]),
    "deepfast/nn": (3, ["tests/nn"]),
    "deepfast/memory": (2, ["tests/memory"]),
    "deepfast/mt/training": (2, ["tests/mt/training"]),
}
SWAPS = {
    "+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
    "==": "!=", "!=": "==", "and": "or", "or": "and", "&&": "||", "||": "&&", "is": "is not",
}  # fmt: skip
SECONDS = 5400
"""A run of tests that takes longer counts as caught: the line made a loop endless."""


@dataclass(frozen=True)
class Mutant:
    area: str
    file: str
    function: str
    line: str
    """The whole line, without the white space around it."""
    mutated: str
    expression: str
    """What is broken in it."""
    broken: str


# ---- Python: by its syntax tree ------------------------------------------------------------------


_OPERATOR = re.compile(r"[\s)]*(//|<=|>=|==|!=|[-+*/<>]|and|or|is(?= (?!not)))\s")


def _broken_segment(text: str, node: ast.AST) -> tuple[str, str] | None:
    """The node's text, on one line, and the same text broken; None where there is nothing to do."""
    if node.lineno != node.end_lineno:
        return None
    match node:
        case ast.Subscript(slice=ast.Constant(value=int() as n)) if n >= 0:
            found = re.search(rf"\[{n}\]$", text)
            return (text, f"{text[: found.start()]}[{n + 1}]") if found else None
        case ast.BinOp() | ast.Compare() | ast.BoolOp():
            first = node.values[0] if isinstance(node, ast.BoolOp) else node.left
            start = first.end_col_offset - node.col_offset
            found = _OPERATOR.match(text[start:])
            if found and found[1] in SWAPS:
                at = start + found.start(1)
                return text, text[:at] + SWAPS[found[1]] + text[at + len(found[1]) :]
    return None


def _python(path: Path) -> list[tuple[str, int, str, str]]:
    """(function, line number, expression, broken expression) of all that can be broken."""
    source = path.read_text()
    lines, found = source.splitlines(), []
    leave = (ast.Raise, ast.JoinedStr, ast.AnnAssign, ast.Import, ast.ImportFrom)

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, leave) or getattr(node, "name", "") in ("__repr__", "extra_repr"):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
            children = node.body
        else:
            children = ast.iter_child_nodes(node)
        if function and isinstance(node, ast.expr) and node.lineno == node.end_lineno:
            text = lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()
            broken = _broken_segment(text, node)
            if broken and '"' not in text:
                found.append((function, node.lineno, *broken))
        for child in children:
            visit(child, function)

    visit(ast.parse(source), "")
    return found


# ---- C++: by its lines ---------------------------------------------------------------------------

_CODE = re.compile(r"\w[\w.\[\]()]* (\+|-|\*|/|<|<=|>|>=|==|!=|&&|\|\|) [\w(]")
_POINTER = re.compile(r"\b(const|float|auto|T|S|C)\b *\w* *$")
"""Before the star of a pointer's declaration, which is no product."""


def _cpp(path: Path) -> list[tuple[str, int, str, str]]:
    """As `_python`; the function is left open."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code = line.partition("//")[0]
        if not line.startswith("  ") or '"' in code or "template" in code:
            continue
        for match in _CODE.finditer(code):
            operator, (start, end) = match[1], match.span(1)
            if operator != "*" or not _POINTER.search(code[:start]):
                broken = code[match.start() : start] + SWAPS[operator] + code[end : match.end()]
                found.append(("", number, match[0], broken))
    return found


def candidates(folder: Path) -> list[tuple[Path, str, int, str, str]]:
    found = []
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".cpp", ".cu", ".h"):
            read = _python if path.suffix == ".py" else _cpp
            found += [(path, *one) for one in read(path)]
    return found


def choose(seed: int, count: int) -> list[Mutant]:
    draw, chosen = random.Random(seed), []
    for area, (share, _) in AREAS.items():
        pool = candidates(ROOT / area)
        for path, function, number, text, broken in draw.sample(pool, round(share * count / 24)):
            line = path.read_text().splitlines()[number - 1].strip()
            mutated = line.replace(text, broken, 1)
            chosen.append(
                Mutant(area, str(path.relative_to(ROOT)), function, line, mutated, text, broken)
            )
    return chosen


# ---- running -------------------------------------------------------------------------------------


def find(mutant: Mutant) -> tuple[Path, int, str] | None:
    """Where the mutant's line is now, and the line broken: file, line number, text."""
    top = ROOT / ("deepfast" if mutant.area.startswith("deepfast") else mutant.area.split("/")[0])
    pool = candidates(top)
    # The same line; else the same expression in a function of the name, in the same file first.
    for same_line in (True, False):
        for same_file in (True, False):
            for path, function, number, text, broken in pool:
                line = path.read_text().splitlines()[number - 1]
                if (
                    function.lstrip("_") == mutant.function.lstrip("_")
                    and (text, broken) == (mutant.expression, mutant.broken)
                    and (not same_line or line.strip() == mutant.line)
                    and (not same_file or path == ROOT / mutant.file)
                ):
                    return path, number, line.replace(text, broken, 1)
    return None


def _tests(arguments: list[str], workers: str) -> str | None:
    """None where the tests pass, else the first that fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", workers, "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no end after {SECONDS} s"
    if done.returncode == 0:
        return None
    said = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return said[0] if said else f"pytest ended with {done.returncode}: {done.stdout[-300:]}"


def _build() -> str | None:
    command = [sys.executable, "-m", "deepfast", "build"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode == 0 else "it does not compile"


def test(mutant: Mutant, workers: str) -> dict[str, str]:
    """What became of the mutant: caught by which tests, missed, or not found."""
    where = find(mutant)
    if where is None:
        return {"result": "not found"}
    path, number, broken = where
    original = path.read_text()
    lines = original.splitlines()
    lines[number - 1] = broken
    compiled = mutant.area == "csrc/cpu"
    near = AREAS[mutant.area][1]
    try:
        path.write_text("\n".join(lines) + "\n")
        by = _build() if compiled else None
        # The file of tests with the module's name comes first.
        name = f"test_{path.stem.removesuffix('_kernel')}*.py"
        own = [str(p.relative_to(ROOT)) for folder in near for p in (ROOT / folder).rglob(name)]
        for stage in filter(None, (own, near, ["tests"])):
            by = by or _tests(stage, workers)
    finally:
        path.write_text(original)
        if compiled:
            _build()
    at = f"{path.relative_to(ROOT)}:{number}"
    return {"result": "caught" if by else "missed", "by": by or "", "at": at}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    chooser = commands.add_parser("choose", help="print mutants of this checkout")
    chooser.add_argument("--seed", type=int, default=33)
    chooser.add_argument("--count", type=int, default=24)
    runner = commands.add_parser("run", help="run the tests on each mutant")
    runner.add_argument("mutants", type=Path)
    runner.add_argument("results", type=Path)
    runner.add_argument("--workers", default="2", help="processes of tests")
    args = parser.parse_args()
    if args.command == "choose":
        print(json.dumps([asdict(m) for m in choose(args.seed, args.count)], indent=1))
        return
    changed = subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=ROOT, text=True)
    if changed.strip():
        sys.exit(f"expected a checkout without changes, got\n{changed}")
    results = json.loads(args.results.read_text()) if args.results.exists() else []
    for number, fields in enumerate(json.loads(args.mutants.read_text())):
        if number < len(results):
            continue
        mutant = Mutant(**fields)
        results.append({**fields, **test(mutant, args.workers)})
        args.results.write_text(json.dumps(results, indent=1))
        last = results[-1]
        told = last["result"], last.get("at", mutant.file), mutant.mutated, last.get("by", "")
        print(number, *told, sep="  ", flush=True)


if __name__ == "__main__":
    main()
