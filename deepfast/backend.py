"""Which implementation serves an op, and why each other one does not.

``backend=None`` chooses the first of `BACKENDS` that can serve; the environment variable
DEEPFAST_BACKEND overrides every choice left open. Nothing falls back in silence: `explain` gives
the reason for every backend refused, `deepfast info` prints them, `record` tells what ran.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from deepfast.reference import launchers as _reference

BACKENDS = ("cuda", "triton", "cpu", "reference")

OPS = {
    "layer_norm": ("layer_norm_forward", "layer_norm_backward"),
    "depth_mix": ("depth_mix_forward", "depth_mix_backward"),
    "boundary": (
        "boundary_forward",
        "boundary_backward",
        "mix_rows",
        "pull_rows",
        "advise_states",
    ),
}
"""The launches behind each op."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class BackendError(RuntimeError):
    """A backend was asked for that cannot serve."""


def _load_compiled():
    try:
        from deepfast import _C
    except ImportError as error:
        return None, f"deepfast._C does not load ({error}); was a C++ compiler there at install?"
    return _C, None


_C, _C_REASON = _load_compiled()


def _check_parallel() -> None:
    """A build whose parallel loops are silently serial is told, not borne as a slow package."""
    threads = torch.get_num_threads()
    if _C is not None and threads > 1 and _C.parallel_ranges(threads) < 2:
        warnings.warn(
            f"deepfast._C runs its loops on one thread while torch has {threads}: rebuild it, or "
            "look at OMP_THREAD_LIMIT and OMP_DYNAMIC",
            RuntimeWarning,
            stacklevel=2,
        )


_check_parallel()


def refusal(op: str, backend: str, device_type: str, dtype: torch.dtype) -> str | None:
    """Why ``backend`` cannot serve ``op`` there, or None where it can."""
    if op not in OPS:
        raise BackendError(f"expected an op of {', '.join(OPS)}, got {op!r}")
    if dtype not in DTYPES:
        return f"dtype {dtype} is none of float32, bfloat16, float16, float64"
    if backend == "reference":
        return None
    if backend == "cpu":
        if _C is None:
            return _C_REASON
        return None if device_type == "cpu" else f"tensors are on {device_type}, not cpu"
    if backend in ("cuda", "triton"):
        return f"{op} has no {backend} kernel in this version"
    return f"expected one of {', '.join(BACKENDS)}"


def explain(op: str, device_type: str, dtype: torch.dtype) -> dict[str, str | None]:
    """For every backend the reason it cannot serve, None where it can."""
    return {name: refusal(op, name, device_type, dtype) for name in BACKENDS}


@functools.cache
def _resolve(op: str, requested: str | None, device_type: str, dtype: torch.dtype):
    reasons = explain(op, device_type, dtype)
    names = BACKENDS if requested is None else (requested,)
    for name in names:
        if reasons.get(name, "") is None:
            return name, _launchers(op, name)
    if requested is not None and requested not in BACKENDS:
        raise BackendError(f"backend: expected one of {', '.join(BACKENDS)}, got {requested!r}")
    why = "; ".join(f"{name}: {reasons[name]}" for name in names)
    raise BackendError(f"{op}: no backend can serve {dtype} on {device_type} ({why})")


def _launchers(op: str, name: str) -> SimpleNamespace:
    if name == "reference":
        return SimpleNamespace(**{f: getattr(_reference, f) for f in OPS[op]})
    return SimpleNamespace(**{f: getattr(torch.ops.deepfast, f).default for f in OPS[op]})


_records: list[list[tuple[str, str]]] = []


def choose(op: str, requested: str | None, device_type: str, dtype: torch.dtype):
    """The name of the backend that serves and its launch functions.

    Raises:
        BackendError: with the reason, where the requested backend (or every one) cannot serve.
    """
    if requested is None:
        requested = os.environ.get("DEEPFAST_BACKEND") or None
    name, launchers = _resolve(op, requested, device_type, dtype)
    for seen in _records:
        seen.append((op, name))
    return name, launchers


@contextlib.contextmanager
def record() -> Iterator[list[tuple[str, str]]]:
    """Collects (op, backend) of every choice made inside the block."""
    seen: list[tuple[str, str]] = []
    _records.append(seen)
    try:
        yield seen
    finally:
        # By identity: two lists that hold the same are equal.
        del _records[next(i for i, other in enumerate(_records) if other is seen)]


def build_info() -> dict:
    """How the compiled library was built, or why there is none."""
    return dict(_C.build_info()) if _C is not None else {"missing": _C_REASON}
