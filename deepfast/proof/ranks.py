"""The ranks of a process group take one answer for each op, that of the rank that asks first."""

import json

import torch.distributed as dist

from deepfast.proof.table import Entry, proved


def agree(op: str, dtype: str, key: dict[str, str], entry: Entry) -> tuple[Entry, str | None]:
    """The first rank's entry, for all ranks on the same kind of device, and None; or what differs.

    There is no collective call, because ranks may use different ops at different times, such as the
    stages of a pipeline. A rank on another kind of device has its own answers.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return entry, None
    store = dist.distributed_c10d._get_default_store()
    if store is None:  # MPI has none.
        return entry, None
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
