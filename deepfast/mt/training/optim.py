"""Adam, and the schedules of its rate: inverse square root (Vaswani et al. 2017) or constant."""

from __future__ import annotations

import torch
from torch import nn

from deepfast.mt.models.interface import parameter_groups
from deepfast.mt.training.recipe import OptimSection


def learning_rate(step: int, section: OptimSection) -> float:
    """Rate of optimizer step `step`, counted from 1: linear up to the peak in the warm-up of w
    steps, then peak * sqrt(w/s) or the peak, and after a restart its own rate."""
    if section.restart_step is not None and step > section.restart_step:
        return section.restart_lr
    warmup = section.warmup
    if step <= warmup:
        return section.lr * step / warmup
    return section.lr * ((warmup / step) ** 0.5 if section.schedule == "inverse_sqrt" else 1.0)


def build_optimizer(model: nn.Module, section: OptimSection) -> torch.optim.AdamW:
    """AdamW, which is Adam where the decay is 0; with ``l2`` Adam on the penalised loss.

    Which parameters decay, and at what share of the rate they learn, the model says.
    """
    groups = [
        {
            "params": group["params"],
            "weight_decay": (section.l2 or section.weight_decay) if group.get("decays") else 0.0,
            "lr_scale": group.get("lr_scale", 1.0),
        }
        for group in parameter_groups(model)
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
