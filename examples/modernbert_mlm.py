"""ModernBERT with a depth connection learns to fill in masked words.

    pip install transformers
    python examples/modernbert_mlm.py --layers 12 --steps 300

The sentences are made here: a subject, a verb that agrees with it, and an object. Every layer reads
a learned sum of all layers below it (DLCL). At the end the program prints some filled sentences.
"""

import argparse
import random

import torch
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForMaskedLM

import deepfast

NOUNS = {"dog": "dogs", "cat": "cats", "bird": "birds", "child": "children", "horse": "horses"}
VERBS = {"sees": "see", "likes": "like", "follows": "follow", "hears": "hear"}
ADJECTIVES = ["old", "small", "red", "quiet"]
WORDS = [
    "[PAD]", "[MASK]", "[CLS]", "[SEP]", "this", "these", "the", *NOUNS, *NOUNS.values(), *VERBS,
    *VERBS.values(), *ADJECTIVES,
]  # fmt: skip
NUMBER = {word: k for k, word in enumerate(WORDS)}
PAD, MASK = 0, 1
LENGTH = 8


def make_sentence() -> list[str]:
    noun, verb = random.choice(list(NOUNS)), random.choice(list(VERBS))
    subject = ["this", noun, verb]
    if random.random() < 0.5:
        subject = ["these", NOUNS[noun], VERBS[verb]]
    if random.random() < 0.5:
        subject.insert(1, random.choice(ADJECTIVES))
    return ["[CLS]", *subject, "the", random.choice(list(NOUNS)), "[SEP]"]


def make_batch(sentences: int) -> dict[str, Tensor]:
    """One word of four is masked; the labels of all others are ignored."""
    rows = [[NUMBER[word] for word in make_sentence()] for _ in range(sentences)]
    ids = torch.tensor([row + [PAD] * (LENGTH - len(row)) for row in rows])
    words = ids >= NUMBER["this"]
    masked = words & (torch.rand(ids.shape) < 0.25)
    masked[:, 1] |= ~masked.any(1)
    return {
        "input_ids": ids.masked_fill(masked, MASK),
        "attention_mask": (ids != PAD).long(),
        "labels": ids.masked_fill(~masked, -100),
    }


def make_model(layers: int, dim: int) -> ModernBertForMaskedLM:
    config = ModernBertConfig(
        vocab_size=len(WORDS), hidden_size=dim, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=2 * dim, max_position_embeddings=LENGTH, pad_token_id=PAD,
        cls_token_id=NUMBER["[CLS]"], bos_token_id=NUMBER["[CLS]"],
        sep_token_id=NUMBER["[SEP]"], eos_token_id=NUMBER["[SEP]"], reference_compile=False,
    )  # fmt: skip
    model = ModernBertForMaskedLM(config)
    deepfast.connect(model.model, norm="pre")
    return model


def train(model: ModernBertForMaskedLM, steps: int, sentences: int = 64) -> list[float]:
    """Returns the loss of every step."""
    # The connection's weights begin as a mean: decay would pull them to zero.
    mixing = [p for name, p in model.named_parameters() if "depth_connection" in name]
    others = [p for name, p in model.named_parameters() if "depth_connection" not in name]
    groups = [{"params": others}, {"params": mixing, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3)
    losses = []
    for step in range(steps):
        loss = model(**make_batch(sentences)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49 or step == steps - 1:
            print(f"step {step + 1}: loss {losses[-1]:.3f}")
    return losses


@torch.no_grad()
def fill(model: ModernBertForMaskedLM, batch: dict[str, Tensor]) -> list[str]:
    """The sentences, with the words that the model puts in for the masks in brackets."""
    best = model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.argmax(2)
    return [
        " ".join(
            f"[{WORDS[word]}]" if number == MASK else WORDS[number]
            for number, word in zip(row, words, strict=True)
            if number == MASK or number >= NUMBER["this"]
        )
        for row, words in zip(batch["input_ids"].tolist(), best.tolist(), strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    model = make_model(args.layers, args.dim)
    train(model, args.steps)
    print(*fill(model, make_batch(5)), sep="\n")


if __name__ == "__main__":
    main()
