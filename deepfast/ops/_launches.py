"""What torch knows of the compiled launches: they return nothing, and have their FLOPs."""

import torch
from torch.utils.flop_counter import register_flop_formula

from deepfast import backend
from deepfast.launches import LAUNCHES, Launch


def _nothing(*_, **__) -> None:
    """What a launch returns."""


def _flops(launch: Launch):
    def count(*args, out_shape=None, **named) -> int:
        return launch.flops(**dict(zip(launch.names, args, strict=False)), **named)

    return count


for _name, _launch in LAUNCHES.items():
    if _launch.compiled and backend.compiled():
        torch.library.register_fake(f"deepfast::{_name}", _nothing)
        register_flop_formula(getattr(torch.ops.deepfast, _name))(_flops(_launch))
