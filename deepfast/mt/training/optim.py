"""Adam, its learning rate, and the norm of a step's gradient: of the whole model and each layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepfast.mt.models import TranslationModel
from deepfast.mt.training.parallel import whole
from deepfast.mt.training.recipe import OptimSection

PREFIX = "grad_norm_"
"""Keys in a line of metrics begin with this."""
REST = "other"
"""What is in no part: weights over depth, the last norms, fusions."""
DIGITS = 7
"""Digits of a norm that a line of metrics keeps."""


def learning_rate(step: int, section: OptimSection) -> float:
    """The learning rate of step s, counted from 1 (Vaswani et al. 2017).

    It rises linearly to the peak over the w steps of warm-up; then it is peak * sqrt(w/s), or the
    peak. After a restart it is the restart's rate.
    """
    if section.restart_step is not None and step > section.restart_step:
        return section.restart_lr
    warmup = section.warmup
    if step <= warmup:
        return section.lr * step / warmup
    return section.lr * ((warmup / step) ** 0.5 if section.schedule == "inverse_sqrt" else 1.0)


def build_optimizer(model: TranslationModel, section: OptimSection) -> torch.optim.Adam:
    """AdamW, which is Adam if the decay is 0; with ``l2`` Adam on the penalised loss.

    The model says which parameters decay, and how fast each learns.
    """
    groups = [
        {
            "params": group["params"],
            "weight_decay": (section.l2 or section.weight_decay) if group.get("decays") else 0.0,
            "lr_scale": group.get("lr_scale", 1.0),
        }
        for group in model.parameter_groups()
    ]
    make = torch.optim.Adam if section.l2 else torch.optim.AdamW
    return make(
        [group for group in groups if group["params"]],
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        # One kernel for all parameters; deterministic on the CPU and on CUDA.
        fused=True,
    )


class GradientNorms:
    """Norms of a step's gradient. One pass over the gradients gives the norm of each parameter;
    those of the layers and of the whole are sums of them.
    """

    def __init__(self, model: TranslationModel):
        self._parts = model.parts()
        self._learned: list[Tensor] = []
        self._norms: Any = None

    def measure(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norm of the whole gradient; where ranks have shards, a common call."""
        self._learned = [p for p in parameters if p.grad is not None]
        self._norms = torch.stack(torch._foreach_norm([p.grad for p in self._learned]))
        return whole(torch.linalg.vector_norm(self._norms))

    def row(self) -> dict[str, float | list[float | None] | None]:
        """For a line of metrics, the norms of the last step that `measure` saw, before clipping:
        of a part, or of each layer of a part, and of the rest. One without a gradient has None.
        Empty before the first step; a common call where ranks have shards."""
        if not self._learned:
            return {}
        norms = dict(zip(map(id, self._learned), whole(self._norms).tolist(), strict=True))

        def norm(numbers: Iterable[int]) -> float | None:
            own = [norms.pop(number) for number in numbers if number in norms]
            return float(f"{math.hypot(*own):.{DIGITS}g}") if own else None

        def of(module: nn.Module) -> float | None:
            return norm(map(id, module.parameters()))

        found = {
            PREFIX + name: of(part) if isinstance(part, nn.Module) else [*map(of, part)]
            for name, part in self._parts.items()
        }
        return found | {PREFIX + REST: norm([*norms])}
