"""Results of the checks on this machine: one file for each key, in the user's cache folder.

The key names everything that a result depends on: deepfast, the sources of the kernels, the
compiled library, torch, Triton, the GPU and its driver. A file has one JSON object on each line.
Processes only append lines, so several of them can write at the same time without a lock. A line
says that a check has begun before it runs: a kernel whose check ends or hangs its process is wrong.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deepfast import library
from deepfast.files import cache_folder
from deepfast.version import __version__

FORMAT = "4"
"""Increase it if the fields of a line change or the checks get stricter; old files are then
ignored."""

log = logging.getLogger("deepfast")

Kernels = tuple[str, str, str]
"""The kernels of an op: op, backend and dtype, as ("layer_norm", "triton", "bfloat16")."""


@functools.cache
def digest() -> str:
    """A digest of the sources that decide what a GPU runs: the Triton kernels, the CUDA C++ and the
    table of launches."""
    # In a clone the folder of the kernels lies beside the package.
    (kernels,) = importlib.util.find_spec("deepfast.kernels").submodule_search_locations
    files = [library.PACKAGE / "launches.py"]
    for folder in (Path(kernels), library.CSRC / "common", library.CSRC / "cuda"):
        files += sorted(f for f in folder.glob("*") if f.suffix in (".py", ".h", ".cu"))
    return library.digest_of(files)


def _driver() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        if version := re.search(r"\b\d+\.[\d.]+", text):
            return version[0]
    # As on WSL. What the driver's library says is the version of its CUDA alone.
    number = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    return str(number.value)


def _triton() -> str:
    try:
        return importlib.import_module("triton").__version__
    except ImportError:
        return "none"


def _library() -> str:
    """A digest of deepfast._C, which may be older than the sources beside it."""
    file = getattr(sys.modules.get("deepfast._C"), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else "none"


def device_name(device: torch.device) -> str:
    """The name of the model. A result holds for all GPUs of the same model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def make_key(device: torch.device) -> dict[str, str]:
    return {
        "format": FORMAT,
        "deepfast": __version__,
        "sources": digest(),
        "library": _library(),
        "torch": torch.__version__,
        "triton": _triton(),
        "device": device_name(device),
        "driver": _driver() if device.type == "cuda" else "none",
    }


def _start(pid: int) -> str | None:
    """When a process of this machine started, which tells it from a later one of its number."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None


def _still_runs(machine: str, pid: int, start: str | None, since: float) -> bool:
    """Whether the process of a check may still run. On another machine it has an hour."""
    if machine != platform.node():
        return time.time() - since < 3600
    return _start(pid) == start


@functools.cache
def tell_once(text: str) -> None:
    log.warning("%s", text)


@dataclass
class Store:
    """The results for one key."""

    key: dict[str, str]
    path: Path
    wrong: dict[Kernels, str] = field(default_factory=dict)
    """Kernels that are not used, with their error."""
    right: dict[Kernels, set[tuple]] = field(default_factory=dict)
    """The variants that were right at their first use: the launch, and what chooses a variant."""
    full: dict[Kernels, str] = field(default_factory=dict)
    """The date of the last full selfcheck."""
    begun: set[tuple[Kernels, tuple, tuple]] = field(default_factory=set)
    """The kernels, variant and process of each check that has not ended."""

    def take(self, line: dict) -> None:
        """Adds what a line of the file says. A later line replaces an earlier one."""
        kernels = line["op"], line["backend"], line["dtype"]
        if "process" in line:
            check = kernels, (line["launch"], *line["variant"]), tuple(line["process"])
            (self.begun.discard if line["ended"] else self.begun.add)(check)
            return
        error = line["error"]
        if "launch" not in line:
            self.full[kernels] = line["date"]
            self.wrong.pop(kernels, None)
            self.begun = {check for check in self.begun if check[0] != kernels}
        if error is not None:
            self.wrong[kernels] = error
        elif "launch" in line:
            self.right.setdefault(kernels, set()).add((line["launch"], *line["variant"]))

    def add(self, **line: object) -> None:
        """Takes a line and appends it to the file."""
        self.take(line)
        # A new file begins with the key, for a reader.
        new = [] if self.path.exists() else [{"key": self.key}]
        text = "".join(json.dumps(x) + "\n" for x in (*new, line))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # One write in append mode: lines of several processes do not mix.
            with open(self.path, "ab", buffering=0) as file:
                file.write(text.encode())
        except OSError as error:
            tell_once(
                f"deepfast: {self.path} cannot be written ({error.strerror}): check results "
                "are lost when this process ends; set DEEPFAST_CACHE to another folder"
            )

    @contextlib.contextmanager
    def check(self, **line: object) -> Iterator[None]:
        """Keeps that a check of this line's variant has begun, and that it has ended."""
        line["process"] = platform.node(), os.getpid(), _start(os.getpid()), time.time()
        self.add(**line, ended=False)
        try:
            yield
        finally:
            self.add(**line, ended=True)

    def blame_unfinished(self) -> None:
        """Makes kernels wrong whose check ended its process, or hung until somebody ended it."""
        for kernels, (launch, *variant), process in self.begun:
            right = (launch, *variant) in self.right.get(kernels, ())
            if right or kernels in self.wrong or _still_runs(*process):
                continue
            op, by, dtype = kernels
            error = (
                f"{launch} {tuple(variant)}: its check of {time.ctime(process[-1])} did not end (a "
                f"crash or a hang); `deepfast selfcheck --op {op} --again` tries anew"
            )
            log.warning("deepfast: %s by %s in %s is not used: %s", op, by, dtype, error)
            self.add(op=op, backend=by, dtype=dtype, launch=launch, variant=variant, error=error)

    def lines(self) -> Iterator[str]:
        """A line of text for the kernels of each op, backend and dtype."""
        for kernels in sorted({*self.wrong, *self.right, *self.full}):
            op, by, dtype = kernels
            how = []
            if kernels in self.full:
                how.append(f"full selfcheck on {self.full[kernels]}")
            if kernels in self.right:
                how.append(f"variants right at first use: {len(self.right[kernels])}")
            if kernels in self.wrong:
                how.append(f"NOT USED: {self.wrong[kernels]}")
            yield f"{op} {by} {dtype}: {'; '.join(how)}"


def load(key: dict[str, str]) -> Store:
    """The results in the key's file. A line that cannot be read is left out, with a warning."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    results = Store(key, cache_folder() / f"selfcheck-{name}.jsonl")
    try:
        stored = results.path.read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return results
    except OSError as error:
        tell_once(
            f"deepfast: {results.path} cannot be read ({error.strerror}); kernels are checked"
        )
        return results
    for text in stored:
        try:
            line = json.loads(text)
            if "key" not in line:
                results.take(line)
        except (ValueError, TypeError, KeyError, AttributeError):
            tell_once(f"deepfast: {results.path} has an invalid line, which is ignored: {text!r}")
    results.blame_unfinished()
    return results


_stores: dict[str, Store] = {}
"""By the device's name."""


def of(device: torch.device) -> Store:
    """The results for a device, read once in a process."""
    name = device_name(device)
    if name not in _stores:
        # All threads must have the same one.
        _stores.setdefault(name, load(make_key(device)))
    return _stores[name]


def forget() -> None:
    """Reads the files again at the next use."""
    _stores.clear()


def error_of(op: str, backend: str, device: torch.device, dtype: str) -> str | None:
    """Why these kernels are not used on the device; None where no check has failed."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return None
    return of(device).wrong.get((op, backend, dtype))
