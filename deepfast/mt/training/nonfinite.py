"""Finds where NaN or infinity appeared first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepfast.mt.training.parallel import local


class _Found(Exception):
    """Ends the forward pass at the first output that is not finite."""


def _finite(output: Any) -> bool:
    if isinstance(output, Tensor):
        return not output.is_floating_point() or bool(torch.isfinite(output).all())
    if isinstance(output, (tuple, list)):
        return all(map(_finite, output))
    return True


def first_nonfinite_module(
    model: nn.Module, forward: Callable[[], Any], *, stop: bool = True
) -> str | None:
    """Runs `forward`, which calls `model`, and names the first module whose output holds NaN or
    infinity; None if all outputs are finite.

    Args:
        stop: whether to end the forward pass there.
    """
    names = {module: name or "the model" for name, module in model.named_modules()}
    found: list[str] = []

    def check(module: nn.Module, inputs: Any, output: Any) -> None:
        if not _finite(output):
            found.append(f"{names[module]} ({type(module).__name__})")
            if stop:
                raise _Found

    hooks = [module.register_forward_hook(check) for module in names]
    try:
        forward()
    except _Found:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def first_nonfinite_output_gradient(model: nn.Module, step: Callable[[], Any]) -> str | None:
    """Runs `step`, a forward and a backward pass, and names the module whose output first gets a
    gradient with NaN or infinity; None if there is none."""
    found: list[str] = []
    names = {module: name for name, module in model.named_modules() if name}

    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        def check(gradient: Tensor) -> None:
            if not _finite(gradient):
                found.append(f"{names[module]} ({type(module).__name__})")

        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(check)

    hooks = [module.register_forward_hook(watch) for module in names]
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def first_nonfinite_gradient(model: nn.Module) -> str | None:
    """The last parameter, in the model's order, whose gradient is not finite.

    The backward pass runs from the model's end to its beginning and so reached that one first.
    """
    bad = [name for name, p in model.named_parameters() if p.grad is not None
           and not _finite(p.grad)]  # fmt: skip
    return bad[-1] if bad else None


def first_nonfinite_parameter(model: nn.Module) -> str | None:
    """The first parameter, in the model's order, that is not finite on this rank."""
    return next((name for name, p in model.named_parameters() if not _finite(local(p))), None)
