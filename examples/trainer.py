"""BERT with a depth connection, trained by the Trainer of Hugging Face transformers.

    pip install transformers accelerate
    python examples/trainer.py --layers 12 --steps 300

The model reads a sequence of symbols and tells which of them occurs most often. Every layer reads a
learned sum of all layers below it (DLCL).
"""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import deepfast

SYMBOLS, LENGTH = 4, 15


def make_data(count: int) -> list[dict]:
    rows = torch.randint(SYMBOLS, (count, LENGTH))
    return [{"input_ids": row, "labels": row.bincount(minlength=SYMBOLS).argmax()} for row in rows]


def make_model(layers: int, dim: int) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=SYMBOLS, hidden_size=dim, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * dim, num_labels=SYMBOLS,
    )  # fmt: skip
    # Backward runs each layer again, so that training keeps one state of it and nothing else.
    Model = deepfast.connected(
        BertForSequenceClassification, "bert.encoder", norm="post", recompute="layer+input"
    )
    return Model(config)


def train(layers: int, dim: int, steps: int, folder: str) -> list[float]:
    """Trains, saves the model in ``folder`` and returns the losses."""
    torch.manual_seed(0)
    model = make_model(layers, dim)
    arguments = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=32, learning_rate=1e-3,
        logging_steps=max(1, steps // 10), save_strategy="no", report_to=[],
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=make_data(32 * steps))
    trainer.train()
    trainer.save_model(folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", default="connected-bert")
    args = parser.parse_args()
    train(args.layers, args.dim, args.steps, args.folder)
    # The config has the connection's settings: the class needs no more than its base.
    Model = deepfast.connected(BertForSequenceClassification)
    model = Model.from_pretrained(args.folder).eval()
    data = make_data(200)
    with torch.no_grad():
        found = model(torch.stack([row["input_ids"] for row in data])).logits.argmax(1)
    right = (found == torch.stack([row["labels"] for row in data])).float().mean()
    print(f"right answers: {right:.0%}")


if __name__ == "__main__":
    main()
