"""The direction of imports, and what importing deepfast does not do."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "deepfast"

# What each package may import of deepfast besides itself. From the top:
#   cli -> measure, mt, cases -> memory -> nn -> depth -> ops -> backend -> selfcheck, rule
#   -> availability -> launches, reference, library; machine is above backend
#   checks, connections, dtypes, files and policies lie at the bottom.
# Inside mt: sweep -> training -> search -> models, data.
BOTTOM = {"checks", "connections", "dtypes", "files", "policies", "version"}
OPS = {"ops", "backend", "launches", "reference"} | BOTTOM
NN = {"nn", "depth", "memory"} | OPS
MODELS = {"mt.models", "mt.data", "mt.ids"} | NN
ALLOWED = {
    "version": set(),
    "checks": set(),
    "connections": set(),
    "policies": {"connections"},
    "dtypes": set(),
    "files": set(),
    "reference": {"dtypes", "version"},
    "kernels": set(),
    "launches": set(),
    "rule": {"availability"},
    "library": {"files"},
    "build": {"library", "files"},
    "availability": {"dtypes", "launches", "library", "kernels"},
    "selfcheck": {
        "availability",
        "dtypes",
        "files",
        "launches",
        "library",
        "reference",
        "version",
    },
    "clock": set(),
    "backend": {"availability", "dtypes", "launches", "reference", "rule", "selfcheck"},
    "machine": {"backend", "version"},
    "ops": {"backend", "launches", "reference", *BOTTOM},
    "depth": OPS,
    "nn": NN - {"memory"},
    "memory": NN,
    "cases": {"clock", "selfcheck", *NN},
    "attach": NN,
    "integrations": NN,
    "mt.checked": {"checks", "files"},
    "mt.ids": set(),
    "mt": {"mt.data", "mt.models", "mt.search", "mt.training"},
    "mt.data": {"mt", "mt.ids", *BOTTOM},
    "mt.models": {"mt", "mt.checked", "mt.data", "mt.ids", *NN},
    "mt.search": {"mt", "mt.checked", *MODELS},
    "mt.training": {"machine", "mt", "mt.checked", "mt.search", *MODELS},
    "mt.sweep": {"mt", "mt.checked", "mt.search", "mt.training", *MODELS},
    "measure": {"cases", "clock", "machine", "mt", "mt.search", "mt.training", "mt.sweep", *MODELS},
    "cli": {
        "build",
        "machine",
        "selfcheck",
        "mt",
        "mt.search",
        "mt.training",
        "mt.sweep",
        "measure",
        *MODELS,
    },
    "__main__": {"cli"},
    # deepfast/__init__.py shows what most users need.
    "": {"attach", "integrations", "mt", "nn", "ops", "memory", "version"},
}


def sources():
    """Every source file of the package; deepfast/kernels is a link and has a test of its own."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if not any(parent.is_symlink() for parent in path.parents if PACKAGE in parent.parents):
            yield path


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sources()}


def outside_functions(body):
    """The statements of a module that run on import, or that a type checker reads."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for block in ("body", "orelse", "handlers", "finalbody"):
                yield from outside_functions(getattr(node, block, []))


def imports(path, *, everywhere=True):
    """Absolute names of the modules a file imports.

    everywhere: False leaves out imports inside functions, but keeps those under
    ``if TYPE_CHECKING:``.
    """
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if everywhere else outside_functions(tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join([*parts, *([base] if base else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name if name in MODULES or name == "deepfast._C" else base


def layer_of(module):
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["mt"] else 1])


def test_imports_go_down():
    for name, path in MODULES.items():
        layer = layer_of(name)
        assert layer in ALLOWED, f"{name}: say in this table what {layer!r} may import"
        for target in imports(path):
            if target.split(".")[0] == "deepfast" and layer_of(target) != layer:
                assert layer_of(target) in ALLOWED[layer], f"{name} imports {target}"


def test_no_circles():
    """No module imports itself through others, not even under ``if TYPE_CHECKING:``."""
    graph = {
        name: {t for t in imports(path, everywhere=False) if t in MODULES and t != name}
        for name, path in MODULES.items()
    }
    seen, stack = set(), []

    def visit(name):
        assert name not in stack, " -> ".join([*stack[stack.index(name) :], name])
        if name in seen:
            return
        stack.append(name)
        for target in sorted(graph[name]):
            visit(target)
        stack.pop()
        seen.add(name)

    for name in graph:
        visit(name)


def test_no_other_packages_kernels_no_benchmarks_no_path_tricks():
    for name, path in MODULES.items():
        roots = {target.split(".")[0] for target in imports(path)}
        assert not roots & {"kernels", "bench"}, name
        assert "sys.path" not in path.read_text(), name


def test_kernels_import_torch_and_triton_only():
    files = sorted((ROOT / "kernels").rglob("*.py"))
    assert files
    for path in files:
        roots = {target.split(".")[0] for target in imports(path)}
        assert roots <= {"torch", "triton", "kernels", *sys.stdlib_module_names}, path


def extras():
    """Import names of the dependencies in pyproject.toml other than torch."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split("\ndependencies = ")[1].split("\n")[0]
    section += text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    names = set(re.findall(r'"([a-zA-Z0-9_-]+)', section))
    modules = {{"pyyaml": "yaml"}.get(name, name.replace("-", "_")) for name in names}
    return modules - {"numpy", "torch", "triton"}


IMPORTS = """
import json, os, sys
environment = dict(os.environ)
import deepfast
assert "torch" not in sys.modules
assert {"nn", "ops", "mt", "memory"} <= set(dir(deepfast))
assert dict(os.environ) == environment

import torch
def state():
    return (dict(os.environ), torch.get_default_dtype(), torch.get_num_threads(),
            torch.get_rng_state().tolist())
# This part of torch sets a variable when it is first used.
torch.compiler.disable(print)
before = state()
deepfast.nn.DLCL, deepfast.ops.layer_norm, deepfast.mt.models.Transformer
assert not hasattr(deepfast, "training_")
import deepfast.backend
loaded = list(sys.modules)
import deepfast.mt.training
assert state() == before
# It takes a second, and only steps of training need it.
assert "torch.distributed.checkpoint" not in sys.modules
print(*loaded)
"""


@pytest.fixture(scope="module")
def loaded(python):
    """The modules that the imports of the parts load.

    `import deepfast` must not wait for the import of torch: it loads its parts when they are used.
    No import changes an environment variable, the default dtype, the seed or the number of
    threads.
    """
    return python("-c", IMPORTS).stdout.split()


# numpy and triton are torch's own optional dependencies: torch imports them where they are there.
def test_importing_needs_torch_alone_and_the_toolkit_pydantic(loaded):
    packages = {name.split(".")[0] for name in loaded}
    assert {"torch", "deepfast"} <= packages
    assert packages & extras() == {"pydantic"}
    assert "kernels" not in packages


def test_importing_loads_no_kernels(loaded):
    """Triton's kernels are loaded when the first of them is used."""
    assert "deepfast.mt.models" in loaded
    assert not [name for name in loaded if name.startswith("deepfast.kernels")]


def test_op_names_are_one_in_every_folder():
    """Files of an op: reference, op, C++ and test carry its name."""
    ops = {"layer_norm", "activation", "depth_mix", "depth_attention", "peephole_lstm"}
    files = [f"deepfast/reference/{op}.py" for op in ops]
    for op in (*ops, "boundary"):
        folder = "depth" if op == "boundary" else "ops"
        files += [f"deepfast/{folder}/{op}.py", f"tests/{folder}/test_{op}.py"]
        files.append(f"csrc/cpu/{op}_kernel.cpp")
    # The kernel of linear_cross_entropy is the computation between torch's matrix products.
    files += [f"deepfast/{folder}/linear_cross_entropy.py" for folder in ("ops", "reference")]
    files += ["kernels/cross_entropy.py", "csrc/cpu/cross_entropy_kernel.cpp"]
    assert not [file for file in files if not (ROOT / file).exists()]
