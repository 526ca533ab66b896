"""The ranks of a process group take one answer for each op, that of the rank that asks first."""

import functools
import json

import torch.distributed as dist

from deepfast.proof.table import Entry, log, proved


@functools.cache
def _tell_no_store() -> None:
    log.warning(
        "deepfast: this process group has no store (as with MPI): the ranks do not compare which "
        "kernels are proved, and each takes its own answers"
    )


def store() -> dist.Store | None:
    """Where the ranks leave their answers; None where there are no others, or no store."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    found = dist.distributed_c10d._get_default_store()
    if found is None:
        _tell_no_store()
    return found


def agree(
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
    missing = proved(first["entry"]) - proved(entry)
    if missing:
        errors = "; ".join(
            f"{by}: {entry['errors'].get(by, 'was not proved')}" for by in sorted(missing)
        )
        return entry, f"{who}, where these backends are proved: {errors}"
    return first["entry"], None
