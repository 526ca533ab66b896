"""Runs somebody else's layer again in backward, in place of what autograd would save of it."""

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepfast.depth.boundary import recompute_row
from deepfast.depth.depth_pass import DepthPass
from deepfast.memory.policies import RERUN
from deepfast.nn.recompute import Kept
from deepfast.nn.rerun import rerun

POLICIES = ("keep", *RERUN)
"""What autograd keeps of a layer beside its state: what the layer keeps; its input; nothing."""


def block(memory: str, rows: int) -> int | None:
    """Rows per block of a pass, see `deepfast.depth`; None is the default.

    Backward holds two sums for every row of a block beside the states. Under "history" they take
    about a ninth of the states' memory, and the mixture up to 1.5 times its least traffic.
    """
    return max(2, min(rows // 18, 8)) if memory == "history" else None


def version(x: Tensor) -> int:
    """How often x was modified in place; inference mode does not count it."""
    return 0 if x.is_inference() else x._version


class Row:
    """Row k of the connection, the input of layer k.

    Args:
        x: the row, as the push returned it. This object does not keep it.
    """

    def __init__(self, state: DepthPass | None, k: int, x: Tensor):
        self.state, self.k, self.shape = state, k, x.shape
        self.x, self.version = weakref.ref(x), version(x)

    def is_still(self, x: Tensor) -> bool:
        """Whether x is the row; a loop may pass on something else, such as a scaled row."""
        return self.x() is x and version(x) == self.version

    def __call__(self) -> tuple[Tensor]:
        """Computes the row again from the states."""
        x, normed = recompute_row(cast(DepthPass, self.state), self.k, None)
        return ((x if normed is None else normed).view(self.shape),)


def run_again(
    layer: nn.Module, where: str, x: Tensor, row: Row | None, call: Callable, others: dict
) -> Any:
    """Returns ``call(x)``, which runs ``layer``. Backward calls it again.

    Args:
        where: names the layer in errors.
        row: what recomputes x in backward, if x is that row; None keeps x.
        call: does not hold x.
        others: what it passes to the layer beside x, by name.
    """
    if torch.compiler.is_compiling():
        return checkpoint(call, x, use_reentrant=False)
    for name, value in others.items():
        # The caches of transformers.
        if value is not None and hasattr(value, "get_seq_length"):
            raise RuntimeError(
                f"{where} takes a cache ({name}), and would fill it twice under this memory "
                "policy; pass use_cache=False, or connect with memory='keep'"
            )
    before = version(x)
    # Below the lowest layer that learns, where x has no gradient, the states may be freed before
    # backward ends.
    if row is not None and row.is_still(x) and x.requires_grad:
        inputs: Callable = row
    else:
        kept = Kept(x)

        def inputs() -> tuple[Tensor]:
            return (kept(),)

    result = rerun(layer, call, (x,), inputs, others)
    if version(x) != before:
        raise RuntimeError(
            f"{where} modifies its input in place, so backward cannot run it again; connect with "
            "memory='keep'"
        )
    return result
