"""Turns a trained Llama of 12 layers into a model with attention residuals, and trains it on.

    pip install transformers
    python examples/attention_residuals.py

Every sublayer then reads a learned mixture of what all sublayers below have added, on top of the
residual stream. Each read has a gate that begins at 0, so at first the logits are those of the
plain model, bit for bit. The program trains a small plain model on bytes of Python's own library,
and then trains it on, plain and with attention residuals, on the same batches. It takes a minute.
"""

import copy
import pathlib
import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepfast

LAYERS, DIM, LENGTH, BATCH = 12, 64, 64, 16


def text() -> torch.Tensor:
    """Bytes of the modules that lie beside `random`."""
    files = sorted(pathlib.Path(random.__file__).parent.glob("*.py"))[:60]
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)))


def train(model: LlamaForCausalLM, data: torch.Tensor, steps: int, seed: int) -> list[float]:
    """Returns the losses. The connection's parameters have their own rate and no decay."""
    plain, depth = deepfast.parameter_groups(model)
    optimizer = torch.optim.AdamW([plain, depth | {"lr": 1e-2}], lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
        ids = torch.stack([data[i : i + LENGTH] for i in starts])
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain_model(data: torch.Tensor, steps: int) -> LlamaForCausalLM:
    """A Llama without a connection, after these steps."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=DIM, intermediate_size=3 * DIM, num_hidden_layers=LAYERS,
        num_attention_heads=4,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    losses = train(model, data, steps, seed=0)
    print(f"plain: loss {losses[0]:.2f}, after {steps} steps {losses[-1]:.2f}")
    return model


def connected(plain: LlamaForCausalLM, ids: torch.Tensor):
    """A copy with attention residuals, which begins with the same logits; and its connection."""
    model = copy.deepcopy(plain)
    residuals = deepfast.connect(
        model.model, norm="pre", connection="attnres", sublayers="auto", additive="gated"
    )
    with torch.no_grad():
        print("equal logits:", torch.equal(model(ids).logits, plain(ids).logits))
    return model, residuals


def main(steps: int = 100) -> tuple[LlamaForCausalLM, list[float], list[float]]:
    """Returns the model, its losses, and those of its plain twin."""
    data = text()
    plain = plain_model(data, 2 * steps)
    model, residuals = connected(plain, data[None, :LENGTH])
    both = [train(m, data, steps, seed=1) for m in (model, plain)]
    last = [sum(losses[-20:]) / len(losses[-20:]) for losses in both]
    print(f"{steps} steps more: {last[0]:.3f} with attention residuals, {last[1]:.3f} without")
    gates = residuals.gamma.detach()
    print(f"gates: {gates.min():.3f} to {gates.max():.3f}")
    return model, *both


if __name__ == "__main__":
    main()
