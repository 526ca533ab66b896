"""The section `parallel` of a recipe: how the ranks of torchrun share a model."""

from __future__ import annotations

from dataclasses import dataclass

from deepfast.mt.training.errors import expect

KINDS = ("auto", "ddp", "fsdp")


@dataclass(kw_only=True)
class ParallelSection:
    """How ranks share the model. Without torchrun nothing here counts."""

    kind: str = "auto"
    """"ddp": each rank has the whole model. "fsdp": each rank has a share of every layer, of its
    gradient and of its optimizer state, and gathers a layer while it runs. "auto": ddp where the
    model with gradient and optimizer state takes at most half of a rank's memory, else fsdp."""
    reshard: bool = True
    """With fsdp: free a gathered layer after forward, and gather it again in backward."""
    timeout: float = 45.0
    """Seconds that a rank waits in a common call. A rank that has not come by then has failed, and
    so has a first rank that gives no sign of life for so long while the others wait for its
    work."""

    def __post_init__(self):
        expect(self.kind in KINDS, "parallel.kind", f"one of {', '.join(KINDS)}", self.kind)
        within = 0 < self.timeout < 1e6
        expect(within, "parallel.timeout", "seconds above 0 and below 1e6", self.timeout)
