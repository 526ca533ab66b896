"""Operands of the loss over a vocabulary."""

import torch


def operands(T, D, V, dtype=torch.float32, ignored=0.3):
    hidden = torch.randn(T, D).to(dtype)
    weight = (2 * torch.randn(V, D) / D**0.5).to(dtype)
    target = torch.randint(V, (T,)).where(torch.rand(T) >= ignored, -100)
    target[: T // 2 + 1].clamp_(min=0)
    return hidden, weight, target
