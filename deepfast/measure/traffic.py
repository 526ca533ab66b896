"""The states (T, D) that a depth connection reads and writes in a step, counted from its launches:
of the connection alone, without layer-norms and layers."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepfast.depth.history import DepthHistory
from deepfast.depth.schedule import default_block
from deepfast.launches import LAUNCHES
from deepfast.nn import DLCL, AttentionResiduals, LayerNorm

STATE = (("T", "D"),)
READ = ("near", "sources", "pull_rows", "grad_slots")
"""Operands that list what a launch reads."""


class _Launches(TorchDispatchMode):
    """Counts states of one token."""

    moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if name in ("zero_", "add_") and args[0].shape[-2:-1] == (1,):
            # Sums that begin with 0, or a state that is added to another one.
            self.moved += args[0].numel() // args[0].shape[-1] * (1 if name == "zero_" else 3)
        elif name in LAUNCHES:
            launch = LAUNCHES[name]
            given = dict(zip(launch.names, args, strict=True))
            self.moved += sum(len(given.get(listed, ())) for listed in READ)
            # Sums that a pass adds to are read, too.
            self.moved += len(given.get("out_rows", ())) * (1 + given.get("accumulate", 0))
            states = (o.name for o in launch.operands if o.shapes == STATE)
            self.moved += sum(given[state] is not None for state in states)
        return func(*args, **(kwargs or {}))


def engine_moved(
    module: DLCL | AttentionResiduals, block: int | None = None, device_type: str = "cpu"
) -> int:
    """States that deepfast's engine reads and writes in forward and backward of one pass; 0 where
    the package has no compiled ops, whose launches are counted.

    Every row's result is mixed again in backward, as before a layer-norm.

    Args:
        module: on a CPU, of few channels; its gradients are added to.
        block: rows per block; None for the default on a device of ``device_type``.
    """
    pull = module.pass_kind.states_per_pull
    history = DepthHistory(block=block or default_block(module.rows, device_type, pull))
    norm, x = LayerNorm(module.dim).as_output(), torch.ones(1, module.dim, requires_grad=True)
    with _Launches() as counted:
        for _ in range(module.rows):
            _, x = module(x, history, out_norm=norm, return_x=False)
        x.sum().backward()
    return counted.moved
