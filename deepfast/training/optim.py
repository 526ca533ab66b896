"""Adam and the inverse-square-root schedule of Vaswani et al. 2017."""

from __future__ import annotations

import torch
from torch import nn

from deepfast.training.recipe import OptimSection


def learning_rate(step: int, *, peak: float, warmup: int) -> float:
    """Rate of optimizer step `step`, counted from 1: linear up to `peak`, then peak * sqrt(w/s)."""
    return peak * min(step / warmup, (warmup / step) ** 0.5)


def build_optimizer(model: nn.Module, section: OptimSection) -> torch.optim.AdamW:
    """AdamW, which is Adam where the decay is 0.

    Only matrices of linear layers decay: mixing weights, norms, biases and the embedding would be
    pulled away from where they belong.
    """
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    decayed = [p for p in model.parameters() if p.requires_grad and id(p) in matrices]
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in matrices]
    groups = [
        {"params": decayed, "weight_decay": section.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        # One kernel for all parameters; deterministic on the CPU and on CUDA.
        fused=True,
    )
