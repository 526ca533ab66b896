"""The compiled library of C++ ops, deepfast._C: its path, how it is loaded, and why it cannot be.

Its file name contains a digest of its sources, so a library that was compiled from other sources is
never loaded. The name also says whether it has CUDA. `deepfast build` writes it into the package.
Where that folder is read-only, it writes into the user's cache folder, below the version of torch.
"""

import functools
import hashlib
import importlib.util
import os
import struct
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from deepfast.files import cache_folder

PACKAGE = Path(__file__).resolve().parent

CSRC = PACKAGE / "csrc" if (PACKAGE / "csrc").exists() else PACKAGE.parent / "csrc"
"""The C++ sources: inside the installed package, or next to the package in a clone."""

BUILD = f"{'python -m ' if (PACKAGE.parent / 'setup.py').exists() else ''}deepfast build"
"""The command that compiles the ops of this copy. A clone's folder shadows an installed copy, whose
ops the command `deepfast` would compile."""

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
"""Names the version of Python, the processor's architecture and the system."""


def digest_of(files: Iterable[Path]) -> str:
    """A digest of the files' names and content, in their order."""
    digest = hashlib.sha256()
    for file in files:
        text = file.read_bytes()
        digest.update(f"{file.parent.name}/{file.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:16]


@functools.cache
def file_name(cuda: bool = False) -> str:
    """The file name of the library with CUDA or without. The digest covers all instruction sets of
    the architecture, because one library contains all of them and chooses one when it is loaded."""
    files = [PACKAGE / "build.py", PACKAGE / "launches.py"]
    files += sorted(f for f in CSRC.rglob("*") if f.suffix in (".cpp", ".cu", ".h", ".py"))
    return f"_C.{digest_of(files)}{'.cuda' * cuda}{SUFFIX}"


def in_package(cuda: bool = False) -> Path:
    """The library in the package. By torch's stable ABI it works with newer versions too."""
    return PACKAGE / file_name(cuda)


def in_cache(cuda: bool = False) -> Path:
    """The library in the user's cache folder, for this version of torch alone."""
    import torch

    return cache_folder() / f"torch-{torch.__version__}" / file_name(cuda)


def _cut_short(path: Path) -> bool:
    """Whether an ELF file ends before its table of sections does. To load it would kill the process
    with a bus error."""
    with open(path, "rb") as file:
        head = file.read(64)
        if len(head) < 64 or not head.startswith(b"\x7fELF"):
            return False  # Loading it raises ImportError.
        start, size, count = struct.unpack_from("<Q10xHH", head, 40)
        return os.fstat(file.fileno()).st_size < start + size * count


def load() -> tuple[ModuleType | None, str | None]:
    """Returns (library, None) or (None, reason). Loading registers the ops with torch."""
    reason = f"the C++ ops of {PACKAGE} are not compiled"
    for path in (*PACKAGE.glob(f"_C*{SUFFIX}"), *cache_folder().glob(f"torch-*/_C*{SUFFIX}")):
        reason = (
            f"the C++ ops do not match: {path} is built from other sources or for another torch"
        )
    # First those with CUDA. Environments share the cache, so the package's own library comes first.
    places = (place(cuda) for cuda in (True, False) for place in (in_package, in_cache))
    for path in filter(os.path.exists, places):
        spec = importlib.util.spec_from_file_location("deepfast._C", path)
        try:
            if _cut_short(path):
                raise ImportError(f"{path} is cut short")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except (ImportError, OSError) as error:
            reason = f"the C++ ops do not load: {error}"
        else:
            sys.modules[spec.name] = module
            return module, None
    return None, f"{reason}; `{BUILD}` compiles them"
