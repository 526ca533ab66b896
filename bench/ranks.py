"""Training on two ranks of one core each against one process on one core, with the same steps.

    python -m bench.ranks
    python -m bench.ranks --ranks 4 model.dim=512 parallel.reshard=false

Prints for DDP and FSDP the median over steps of the speed-up, and the overhead: how much longer the
ranks take than an equal share of the work of one process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPE = (
    "phrases-small", "train.max_steps=30", "train.log_every=1", "train.validate_every=1000",
    "train.save_every=1000", "train.average_last=0", "train.tensorboard=false", "data.dev_size=0",
    "train.threads=1", "model.dim=256", "model.num_heads=4", "model.ffn_dim=1024",
    "model.encoder_layers=12", "data.max_tokens=2000",
)  # fmt: skip
WARM_UP = 5
"""Steps that are left out at the start."""


def speeds(ranks: int, folder: Path, overrides: list[str]) -> list[float]:
    """Target tokens per second of each step."""
    program = [sys.executable]
    if ranks > 1:
        program += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*program, "-m", "deepfast", "mt", "train", *RECIPE, *overrides, f"output={folder}"]
    # As many cores as ranks, in both cases one for each.
    cores = sorted(os.sched_getaffinity(0))[:ranks]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["target_tokens_per_second"] for row in rows if row["event"] == "train"][WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        alone = speeds(1, Path(folder, "alone"), args.overrides)
        print(f"one process: {statistics.median(alone):,.0f} target tokens/s")
        for kind in ("ddp", "fsdp"):
            words = [*args.overrides, f"parallel.kind={kind}"]
            shared = speeds(args.ranks, Path(folder, kind), words)
            ratio = statistics.median(s / a for s, a in zip(shared, alone, strict=True))
            print(
                f"{kind:4} on {args.ranks} ranks: {statistics.median(shared):,.0f} target "
                f"tokens/s, {ratio:.2f} times one process, overhead {args.ranks / ratio - 1:.1%}"
            )


if __name__ == "__main__":
    main()
