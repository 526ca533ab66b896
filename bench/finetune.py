"""Fine-tuning, plain and with gated attention residuals: `python -m bench.finetune`.

A Llama of 12 layers learns text, the sources of Python's library, for 400 steps. Both forms then
go on from its weights, 200 steps with each of three seeds, which draw the batches. The losses of
text that no step has seen go to bench/results/results.csv. It needs transformers; 5 minutes.
"""

import copy
import sys

import torch
from transformers import LlamaForCausalLM

from bench.record import record
from examples.attention_residuals import LENGTH, connected, plain_model, text, train

SEEDS, COMMAND = (1, 2, 3), "python -m bench.finetune"


@torch.no_grad()
def loss(model: LlamaForCausalLM, held_out: torch.Tensor) -> float:
    ids = held_out[: 512 * LENGTH].view(-1, LENGTH)
    losses = [model(input_ids=some, labels=some).loss for some in ids.split(64)]
    return torch.stack(losses).mean().item()


def main() -> int:
    torch.set_num_threads(1)
    data = text()
    learned, held_out = data[: -600 * LENGTH], data[-600 * LENGTH :]
    pretrained = plain_model(learned, 400)
    losses: dict[str, list[float]] = {"plain": [], "gated": []}
    moved = []
    for seed in SEEDS:
        model, residuals = connected(pretrained, held_out[None, :LENGTH])
        for form, one in (("plain", copy.deepcopy(pretrained)), ("gated", model)):
            train(one, learned, 200, seed=seed)
            losses[form].append(loss(one, held_out))
        moved.append(residuals.gamma.detach().abs().min().item())
        print(f"seed {seed}:", {form: found[-1] for form, found in losses.items()})
    plain, gated = (sum(losses[form]) / len(SEEDS) for form in losses)
    what = f"held-out loss after 200 steps of fine-tuning, {len(SEEDS)} seeds"
    record("finetune_gated", plain - gated, "nats", f"{what}: plain less gated, mean", COMMAND)
    spread = max(losses["plain"]) - min(losses["plain"])
    record("finetune_spread", spread, "nats", f"{what}: plain, largest less smallest", COMMAND)
    record("finetune_gamma", min(moved), "gamma", f"{what}: smallest |gamma|, from 0", COMMAND)
    return 0


if __name__ == "__main__":
    sys.exit(main())
