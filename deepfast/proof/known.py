"""What this process knows of its devices, and the proof of an op at its first use.

The ranks of a process group take one answer for each op, that of the rank that asks first.
"""

import json
import os
import threading
import time

import torch
import torch.distributed as dist

from deepfast.proof import table as tables
from deepfast.proof.prove import Runner, Wanted, prove
from deepfast.proof.table import Entry, Table, log, tell_once

MODES = ("auto", "off", "require")

_tables: dict[str, Table] = {}
"""By the device's name."""
_agreed: dict[tuple[str, str, str], Entry] = {}
"""By op, the device's name and dtype."""
_alone: dict[tuple[str, str, str], None] = {}
"""Those of `_agreed` that were not compared with other ranks, in the order of their choice."""
_proving = threading.RLock()

make_runner = Runner
"""Tests put faults and short limits here."""


def mode() -> str:
    """DEEPFAST_PROOF: auto proves an op at its first use, off never does, and require makes an op
    without a proved kernel an error."""
    found = os.environ.get("DEEPFAST_PROOF") or MODES[0]
    if found not in MODES:
        raise ValueError(f"DEEPFAST_PROOF: expected one of {', '.join(MODES)}, got {found!r}")
    return found


def forget() -> None:
    """Reads every table anew when it is next asked for."""
    _tables.clear()
    _agreed.clear()
    _alone.clear()


def exact(device: torch.device) -> torch.device | None:
    """The device with its index; None for a bare "cuda" where there is no GPU, or GPUs of several
    kinds, so that nothing is known of the one that will be used."""
    if device.type != "cuda" or device.index is not None:
        return device
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return torch.device("cuda", torch.cuda.current_device()) if len(names) == 1 else None


def table(device: torch.device, built: str | None) -> Table:
    """The device's table.

    built: as in `tables.make_key`.
    """
    name = tables.device_name(device)
    if name not in _tables:
        # All threads must have the same table: one of them writes into it what it proves.
        _tables.setdefault(name, tables.load(tables.make_key(device, built)))
    return _tables[name]


def entry(op: str, device: torch.device, dtype: str, built: str | None) -> Entry | None:
    """What is known of an op, without proving anything."""
    at = exact(device)
    if at is None:
        return None
    agreed = _agreed.get((op, tables.device_name(at), dtype))
    return agreed or table(at, built).entry(op, dtype)


def missing(device: torch.device) -> str:
    """Why nothing is known of an op on a device."""
    if device.type == "cuda" and torch.cuda.device_count() and exact(device) is None:
        return f"not a default for {str(device)!r} without an index: the GPUs are of several kinds"
    if mode() == "auto":
        return "not proved here yet: its first use on a GPU proves it"
    return f"not proved here yet, and DEEPFAST_PROOF={mode()} proves nothing at first use"


def why_not_now() -> str | None:
    """Why nothing can be proved at this moment."""
    if torch._C._current_graph_task_id() != -1:
        return "in backward"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "in the capture of a CUDA graph"
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)  # type: ignore[attr-defined]
    if fake or torch.compiler.is_compiling() or torch._guards.TracingContext.try_get():
        return "while a compiler traces it"
    return None


def _store() -> dist.Store | None:
    """Where the ranks leave their answers; None where there are no others, or no store."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    found = dist.distributed_c10d._get_default_store()
    if found is None:
        tell_once(
            "deepfast: this process group has no store (as with MPI): the ranks do not compare "
            "which kernels are proved, and each takes its own answers"
        )
    return found


def _agree(
    store: dist.Store, op: str, dtype: str, key: dict[str, str], entry: Entry
) -> tuple[Entry, str | None]:
    """The first rank's entry, for all ranks on the same kind of device, and None; or what differs.

    There is no collective call, because ranks may use different ops at different times, such as the
    stages of a pipeline. A rank on another kind of device has its own answers.
    """
    rank = dist.get_rank()
    mine = json.dumps({"rank": rank, "key": key, "entry": entry})
    name = f"deepfast/proof/{key['device']}/{op}/{dtype}"
    first = json.loads(store.compare_set(name, "", mine))
    who = f"{op} {dtype}: rank {rank} differs from rank {first['rank']}"
    for field, value in first["key"].items():
        if key.get(field) != value:
            return entry, f"{who}: {field} is {key.get(field)}, not {value}"
    missing = tables.proved(first["entry"]) - tables.proved(entry)
    if missing:
        errors = "; ".join(
            f"{by}: {entry['errors'].get(by, 'was not proved')}" for by in sorted(missing)
        )
        return entry, f"{who}, where these backends are proved: {errors}"
    return first["entry"], None


def _compare() -> tuple[bool, str | None]:
    """Compares with other ranks what was not compared yet, also what was chosen before there was a
    process group. Returns whether an answer changed, and what differs, or None."""
    store = _store() if _alone else None
    changed = False
    for each in list(_alone) if store is not None else ():
        op, name, dtype = each
        entry, difference = _agree(store, op, dtype, _tables[name].key, _agreed[each])
        if difference is not None:
            return changed, difference
        changed |= entry != _agreed[each]
        _agreed[each] = entry
        _alone.pop(each, None)
    return changed, None


def settle(
    op: str, device: torch.device, dtype: str, kernels: dict[str, list[str]], built: str | None
) -> tuple[bool, bool, str | None]:
    """Proves an op that nothing is known of, where the environment lets it; then the ranks agree.

    kernels: the backends that could be proved, with their dtypes.

    Returns:
        Whether the answer may be kept, whether other answers may have changed, and what is wrong,
        or None.
    """
    how, at = mode(), exact(device)
    found, settled, changed = entry(op, device, dtype, built), True, False
    if found is None and at is not None and kernels and how == "auto":
        reason = why_not_now()
        if reason is None:
            first_use(op, at, kernels, built)
            found = entry(op, device, dtype, built)
        else:
            settled = False
            tell_once(
                f"deepfast: {op} is not proved on this device and cannot be {reason}: torch's own "
                "form serves; run `deepfast prove`, or the op once outside, before"
            )
    if found is not None:
        asked = op, tables.device_name(at), dtype
        if asked not in _agreed:
            _agreed[asked], _alone[asked] = found, None
        changed, difference = _compare()
        if difference is not None:
            return False, changed, difference
        found = _agreed[asked]
    if how == "require" and not (found and tables.proved(found)):
        failed = "; ".join(f"{by}: {e}" for by, e in (found or {"errors": {}})["errors"].items())
        wrong = (
            f"DEEPFAST_PROOF=require: {op} {dtype} has no proved kernel on {device}"
            f"{f' ({failed})' if failed else ''}; `deepfast prove` proves it"
        )
        return False, changed, wrong
    return settled, changed, None


def first_use(
    op: str, device: torch.device, kernels: dict[str, list[str]], built: str | None
) -> None:
    """Proves one op, unless another thread or process has done so meanwhile."""
    with _proving:
        known = table(device, built)
        if op in known.ops or op in known.lost:
            return
        with tables.lock(known.key):
            fresh = tables.load(known.key)
            known.ops, known.source = fresh.ops | known.ops, fresh.source
            if op in known.ops:
                return
            name = tables.device_name(device)
            log.warning(
                "deepfast: %s is used on %s for the first time: its kernels are proved now, once, "
                "in other processes, which takes about a minute (DEEPFAST_PROOF=off: never)",
                op, name,
            )  # fmt: skip
            start = time.monotonic()
            run(known, {op: kernels}, device)
        entries = known.ops.get(op) or known.lost.get(op, {})
        lines = [f"{dtype}: {tables.summary(found)}" for dtype, found in entries.items()]
        kept = known.source if op in known.ops else None
        log.warning(
            "deepfast: %s took %.0f s on %s; %s; kept in %s",
            op, time.monotonic() - start, name, "; ".join(lines), kept or "this process",
        )  # fmt: skip


def run(
    known: Table, wanted: Wanted, device: torch.device, *, thorough: bool = False, **options
) -> None:
    """Proves ``wanted``; the caller holds the table's lock. Further options are `prove`'s."""
    runner = make_runner(device=device)
    runner.thorough = thorough
    prove(known, wanted, runner, **options)
