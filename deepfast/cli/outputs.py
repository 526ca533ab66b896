"""What commands check of their outputs and their device before they work."""

import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

PICTURES = (".svg", ".png")


def flush_output() -> OSError | None:
    """Flushes standard output, or returns why it cannot be written. What is left is then dropped:
    Python flushes it once more at exit, which must not fail."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def replaces(output: Path, source: str | Path) -> bool:
    """Whether writing the output would replace what was read from the source: that file or, for a
    checkpoint folder, a part of it."""
    source = Path(source)
    if source.is_dir():
        return output.resolve().parent == source.resolve()
    return output.is_file() and source.exists() and output.samefile(source)


def check_other(output: Path, sources: Iterable[str | Path], is_read: str = "is read") -> None:
    """Refuses an output that replaces one of the sources."""
    for source in sources:
        if replaces(output, source):
            raise ValueError(
                f"--output: expected another file than {source}, which {is_read}, got {output}"
            )


def check_keeps_run(output: Path, checkpoint: str) -> None:
    """Refuses to replace a part of the folder that a run can resume from."""
    if Path(checkpoint).is_dir():
        check_other(output, [checkpoint], "a run can resume from")


def checkpoint_output(path: str) -> Path:
    """The file to write a checkpoint to: what a link points to; the link stays."""
    from deepfast.files import check_writable

    output = Path(path).resolve()
    check_writable(output)
    if output.exists() and not output.is_file():
        raise ValueError(f"{output}: expected a file, got a pipe or a device")
    return output


def check_picture(option: str, path: Path | None) -> None:
    """Refuses a file that no picture can be written to; None means no picture."""
    if path is None:
        return
    if path.suffix not in PICTURES:
        raise ValueError(f"{option}: expected a file ending in .svg or .png, got {path}")
    # torch takes a second to import.
    from deepfast.files import check_writable

    check_writable(path)


def device_of(
    name: str | None, expected: str = "cpu or cuda", kinds: Collection[str] = ("cpu", "cuda")
) -> Any:
    """The torch.device of --device, which this machine has; None: a GPU where there is one."""
    import torch

    count = torch.cuda.device_count()
    name = name or ("cuda" if count else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in kinds:
        raise ValueError(f"--device: expected {expected}, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(
            f"--device: expected a device of this machine, got {name!r}: {count or 'no'} GPU found"
        )
    return device
