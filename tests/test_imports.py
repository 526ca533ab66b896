"""What importing deepfast does and does not, and the direction of imports."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A part imports from those to its right, and from itself. What stands in one place may import none
# of its neighbours there.
ORDER = (
    "__main__; cli; measure; attach integrations; cases; mt.sweep; mt.training; mt.search; "
    "mt.models; mt.data; mt; memory; nn; depth; ops; machine; backend; rule selfcheck; "
    "availability; build; library; kernels launches reference mt.ids mt.checked; "
    "checks clock dtypes files policies version; connections"
)
RANK = {part: rank for rank, parts in enumerate(ORDER.split("; ")) for part in parts.split()}


def part_of(module):
    """The part of the package that has a module; none for the package itself."""
    _, *names = module.split(".")
    return next((part for part in (".".join(names[:2]), *names[:1]) if part in RANK), None)


def imports(path):
    """Absolute names of what a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_go_down():
    """deepfast/__init__.py and that of mt show the parts that users need."""
    for path in sorted((ROOT / "deepfast").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if module in ("deepfast.__init__", "deepfast.mt.__init__"):
            continue
        part = part_of(module)
        assert part is not None, f"say in this list where {module} stands"
        targets = {part_of(name) for name in imports(path) if name.startswith("deepfast.")}
        for target in targets - {part, None}:
            assert RANK[part] < RANK[target], f"{path} imports {target}"


def test_kernels_import_torch_and_triton_only():
    """So each of their files can be copied into another project."""
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        roots = {target.split(".")[0] for target in imports(path)}
        assert roots <= {"torch", "triton", "kernels", *sys.stdlib_module_names}, path


IMPORTS = """
import os, sys
import deepfast
assert "torch" not in sys.modules
assert {"nn", "ops", "mt", "memory"} <= set(dir(deepfast))

import torch
def state():
    threads, random = torch.get_num_threads(), torch.get_rng_state().tolist()
    return dict(os.environ), torch.get_default_dtype(), threads, random
# This part of torch sets a variable when it is first used.
torch.compiler.disable(print)
before, known = state(), set(sys.modules)
deepfast.nn.DLCL, deepfast.ops.layer_norm, deepfast.mt.models.Transformer
assert not hasattr(deepfast, "training_")
import deepfast.backend
loaded = set(sys.modules) - known
import deepfast.mt.training
assert state() == before
# It takes a second, and only steps of training need it.
assert "torch.distributed.checkpoint" not in sys.modules
print(*loaded)
"""
# With what pydantic needs.
PACKAGES = {
    "annotated_types", "deepfast", "pydantic", "pydantic_core", "torch", "typing_inspection",
}  # fmt: skip


@pytest.mark.slow
def test_importing(python):
    """`import deepfast` does not wait for torch: it loads its parts when they are used. It changes
    no environment variable, default dtype, seed or number of threads. Triton's kernels are loaded
    when the first of them is used."""
    loaded = python("-c", IMPORTS).stdout.split()
    packages = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names
    assert packages <= PACKAGES
    assert not [name for name in loaded if name.startswith("deepfast.kernels")]
