"""Adam and its learning rate: inverse square root (Vaswani et al. 2017) or constant."""

from __future__ import annotations

import torch

from deepfast.mt.models import TranslationModel
from deepfast.mt.training.recipe import OptimSection


def learning_rate(step: int, section: OptimSection) -> float:
    """The learning rate of step s, counted from 1.

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
