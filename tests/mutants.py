"""Breaks one operator at a time and runs tests: which faults do they catch?

    python tests/mutants.py deepfast/depth tests/depth --count 8 --seed 1

The first folder holds Python, C++ or CUDA code; the second holds the tests. C++ is compiled again.
The line is put back after its tests. The checkout must have no changes of its own.
"""

import argparse
import random
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAIRS = (("+", "-"), ("<", "<="), (">", ">="), ("==", "!="), ("and", "or"), ("&&", "||"))
SWAPS = dict(PAIRS) | {b: a for a, b in PAIRS} | {"*": "+", "/": "*", "//": "*"}
CPP = re.compile(r"(?<=[\w)\]] )(\+|-|\*|/|<|<=|>|>=|==|!=|&&|\|\|)(?= [\w(])")


def places(path: Path) -> list[tuple[int, int, str]]:
    """Line and column of each operator between two operands."""
    found = []
    if path.suffix == ".py":
        with tokenize.open(path) as file:
            for token in tokenize.generate_tokens(file.readline):
                (number, at), end = token.start, token.end[1]
                if token.string in SWAPS and token.line[at - 1] == token.line[end] == " ":
                    found.append((number - 1, at, token.string))
        return found
    for number, line in enumerate(path.read_text().splitlines()):
        code = line.partition("//")[0]
        if code.startswith("  ") and '"' not in code:
            found += [(number, one.start(), one[0]) for one in CPP.finditer(code)]
    return found


def run(*command: str) -> int:
    words = [sys.executable, "-m", *command]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=3600).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("tests")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=ROOT):
        sys.exit("expected a checkout without changes")
    files = [p for p in sorted(args.source.rglob("*")) if p.suffix in (".py", ".cpp", ".cu", ".h")]
    pool = [(path, *place) for path in files for place in places(path)]
    for path, number, at, op in random.Random(args.seed).sample(pool, args.count):
        original = path.read_text()
        lines = original.splitlines(keepends=True)
        lines[number] = lines[number][:at] + SWAPS[op] + lines[number][at + len(op) :]
        path.write_text("".join(lines))
        try:
            built = path.suffix == ".py" or run("deepfast", "build") == 0
            caught = not built or run("pytest", "-q", "-x", args.tests) != 0
        finally:
            path.write_text(original)
        print("caught" if caught else "MISSED", f"{path}:{number + 1}", lines[number].strip())


if __name__ == "__main__":
    main()
