"""What was proved on this machine: one JSON file for each key, in the user's cache folder.

The key names everything that a result depends on: the device, the driver, torch, Triton, the
sources of the kernels and the compiled library. A file is used only where its whole key is equal.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deepfast import library
from deepfast.files import cache_folder, replaced

FORMAT = "2"
"""Raised when the file's fields change, or when the cases get stricter: old results then end."""

VARIES = ("driver", "library")
"""Fields of the key in which a packaged table may differ. A driver runs machine code that was
compiled for another one, and every machine compiles its own library from the same sources."""

LENGTHS = (64, 512, 4096)
"""Longest sentences at which attention is timed: tiles that suit one do not suit another."""

WIDTHS = (512, 1024, 4096)
"""Channels of a row at which other ops are timed; of an LSTM half as many."""

PACKAGED = Path(__file__).parent / "tables"

log = logging.getLogger("deepfast")

Entry = dict[str, dict]
"""Of one op and dtype. "errors": by backend, None where it is proved; "seconds": by width, of a
forward and backward pass by backend."""


def widths(op: str, kind: str) -> tuple[int, ...]:
    """Where an op is timed on devices of type ``kind``; on a CPU, where tests run, at toy sizes."""
    found: tuple[int, ...] = LENGTHS if op == "attention" else WIDTHS
    found = found if kind == "cuda" else tuple(3 + n // 128 for n in found)
    return tuple(w // 2 for w in found) if op == "peephole_lstm" else found


def length(queries: int, keys: int) -> int:
    """The length at which attention over sentences of at most these lengths was timed."""
    for found in LENGTHS:
        if queries <= found and keys <= found:
            return found
    return LENGTHS[-1]


def rival(op: str) -> str:
    """The backend that is torch's own form of the op."""
    return "sdpa" if op == "attention" else "reference"


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
        found = re.search(r"\b\d+\.[\d.]+", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found[0]
    return str(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]


def _triton() -> str:
    try:
        return importlib.import_module("triton").__version__
    except ImportError:
        return "none"


def device_name(device: torch.device) -> str:
    """The name of the model. What is proved on one GPU holds for all of its kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def make_key(device: torch.device, built: str | None) -> dict[str, str]:
    """What the results depend on.

    built: what the CUDA kernels of deepfast._C were compiled for; None where it has none.
    """
    library = "none"
    if built is not None:
        # A library may be older than the sources beside it.
        compiled = Path(importlib.util.find_spec("deepfast._C").origin)
        library = hashlib.sha256(compiled.read_bytes()).hexdigest()[:16]
    return {
        "format": FORMAT,
        "device": device_name(device),
        "driver": _driver() if device.type == "cuda" else "none",
        "torch": torch.__version__,
        "triton": _triton(),
        "sources": digest(),
        "cuda": built or "none",
        "library": library,
    }


def file_of(key: dict[str, str]) -> Path:
    """The key's file in the cache folder."""
    text = json.dumps(key, sort_keys=True).encode()
    return cache_folder() / f"proof-{hashlib.sha256(text).hexdigest()[:16]}.json"


@dataclass
class Table:
    """What is known for one key."""

    key: dict[str, str]
    ops: dict[str, dict[str, Entry]] = field(default_factory=dict)
    """By op and dtype, as "bfloat16"."""
    source: str | None = None
    """The file it was read from or written to."""
    lost: dict[str, dict[str, Entry]] = field(default_factory=dict)
    """Ops that could not be proved for a reason outside the kernels; for this process alone."""

    def entry(self, op: str, dtype: str) -> Entry | None:
        """What is known of an op in a dtype; None where nothing is."""
        return (self.ops.get(op) or self.lost.get(op, {})).get(dtype)

    def to_json(self) -> str:
        return json.dumps({"key": self.key, "ops": self.ops}, indent=1) + "\n"


def fastest(entry: Entry, width: int | None) -> str | None:
    """The backend that was fastest at ``width``: at the next wider one that was timed, beyond the
    widest at that one, without a width over all of them. None where nothing was timed."""
    timed = {int(at): seconds for at, seconds in entry["seconds"].items()}
    if not timed:
        return None
    if width is None:
        among = set.intersection(*map(set, timed.values()))
        total = {name: sum(seconds[name] for seconds in timed.values()) for name in among}
    else:
        total = timed[min((at for at in timed if at >= width), default=max(timed))]
    return min(total, key=total.get) if total else None


def proved(entry: Entry) -> set[str]:
    """The backends of an entry that gave no error."""
    return {name for name, error in entry["errors"].items() if error is None}


def _check(data: object, ops: object) -> None:
    """Raises ValueError, TypeError or AttributeError where a file's fields are not those of a
    table."""
    if not isinstance(data, dict) or set(data) != {"key", "ops"}:
        raise ValueError("expected the fields key and ops")
    for op, dtypes in ops.items():  # type: ignore[attr-defined]
        for dtype, entry in dtypes.items():
            if set(entry) != {"errors", "seconds"}:
                raise ValueError(f"{op} {dtype}: expected the fields errors and seconds")
            if not all(e is None or isinstance(e, str) for e in entry["errors"].values()):
                raise ValueError(f"{op} {dtype}: an error is text or null")
            for width, seconds in entry["seconds"].items():
                if int(width) < 0 or not all(isinstance(s, float) for s in seconds.values()):
                    raise ValueError(f"{op} {dtype}: seconds are numbers by width and backend")


def read(path: Path, key: dict[str, str], varies: tuple[str, ...] = ()) -> Table | None:
    """The table in a file; None where there is none for this key.

    A broken file is told, and then counts as none.

    varies: fields of the key that may differ.
    """
    try:
        stored = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s cannot be read (%s); kernels are proved anew", path, error)
        return None
    try:
        data = json.loads(stored)
        _check(data, data["ops"])
        found = data["key"]
        same = {k: v for k, v in found.items() if k not in varies} == {
            k: v for k, v in key.items() if k not in varies
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("%s is no table of proved kernels (%s); it is made anew", path, error)
        return None
    if same:
        return Table(key, data["ops"], str(path))
    if not varies:
        # The file's name comes from its key, so this one was copied or changed.
        log.warning("%s is of another device or version; it is made anew", path)
    return None


def load(key: dict[str, str]) -> Table:
    """The table of the cache folder; else the packaged one; else an empty one."""
    found = read(file_of(key), key)
    for path in () if found else sorted(PACKAGED.glob("*.json")):
        found = found or read(path, key, VARIES)
    return found or Table(key)


@functools.cache
def tell_once(text: str) -> None:
    log.warning("%s", text)


def _tell_unwritable(error: OSError) -> None:
    tell_once(
        f"{cache_folder()} cannot be written ({error.strerror}): what is proved is kept for this "
        "process alone; DEEPFAST_CACHE names another folder"
    )


@contextlib.contextmanager
def lock(key: dict[str, str]) -> Iterator[None]:
    """Keeps other processes from proving for this key and from writing its file."""
    # torch brings it; imported here, because most processes prove nothing.
    from filelock import FileLock

    with contextlib.ExitStack() as held:
        try:
            cache_folder().mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(file_of(key).with_suffix(".lock")))
        except OSError as error:
            _tell_unwritable(error)
        yield


def write(table: Table) -> None:
    """Writes the table to its file; the caller holds its lock. A reader sees the old file or the
    new one, whole."""
    path = file_of(table.key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as file:
            file.write(table.to_json().encode())
    except OSError as error:
        _tell_unwritable(error)
    else:
        table.source = str(path)


# ---- as text -------------------------------------------------------------------------------------


def summary(entry: Entry) -> str:
    """Which backends are proved, or why not, in one line."""
    return ", ".join(
        f"{by} {'is proved' if error is None else f'failed ({error})'}"
        for by, error in sorted(entry["errors"].items())
    )


def lines(table: Table, ops: Iterable[str] | None = None) -> Iterator[str]:
    """A line for each op and dtype, and one below it for each width at which it was timed."""
    for op in table.ops | table.lost if ops is None else ops:
        for dtype, entry in (table.ops.get(op) or table.lost.get(op, {})).items():
            yield f"{op} {dtype}: {summary(entry)}"
            for width, seconds in entry["seconds"].items():
                times = ", ".join(f"{by} {s * 1e6:.0f} us" for by, s in seconds.items())
                yield f"    width {width}: {fastest(entry, int(width))} serves; {times}"
