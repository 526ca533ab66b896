"""Training steps with depth connections beside one without, as `deepfast selfcheck` times them."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from deepfast.cases.case import Device
from deepfast.cases.check import in_turns
from deepfast.nn import Packing, TransformerEncoder

SIZES = {"cuda": (24, 8192, 1024, 128), "cpu": (2, 6, 16, 3)}
"""By the type of a device: layers, tokens, D, tokens of a sentence."""
CONNECTIONS = ("residual", "dlcl", "attnres")


def seconds(device: Device, begin: Callable[[str], None], rounds: int) -> dict[str, float]:
    """Median seconds of forward and backward of a pre-norm encoder under bf16 autocast, by its
    connection. Every op takes the backend that it has by default."""
    begin(CONNECTIONS[0])
    layers, T, D, length = SIZES[torch.device(device).type]
    x, target = torch.randn(2, T, D, device=device)
    packing = Packing(T // length, length)

    def step(encoder: TransformerEncoder) -> None:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = encoder.forward_packed(x.bfloat16().requires_grad_(), packing)
        F.mse_loss(y.float(), target).backward()
        encoder.zero_grad(set_to_none=True)

    variants: dict[str, Callable[[], object]] = {}
    for connection in CONNECTIONS:
        encoder = TransformerEncoder(layers, D, max(1, D // 64), 4 * D, connection=connection)
        variants[connection] = partial(step, encoder.to(device))
    return in_turns(variants, device, begin, rounds)
