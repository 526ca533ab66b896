"""Adds a depth connection to a pretrained model and trains on.

    pip install transformers
    python examples/pretrained.py

The connection is DenseFormer's. At first each layer reads only the layer below it, so the outputs
are those of the plain model, bit for bit. Training then moves the weights of the mixture. The
"pretrained" model is a small BERT that the program makes; put the name of yours in its place.
"""

import tempfile

import torch
from transformers import BertConfig, BertForMaskedLM

import deepfast

WORDS = 50


def make_plain(folder: str) -> None:
    """Stands for a checkpoint that somebody else trained."""
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=64,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)


def main(folder: str, steps: int = 100) -> tuple[BertForMaskedLM, list[float]]:
    """Returns the trained model and its losses."""
    torch.manual_seed(0)
    make_plain(folder)
    plain = BertForMaskedLM.from_pretrained(folder)
    Model = deepfast.connected(
        BertForMaskedLM, "bert.encoder", norm="post", connection="denseformer"
    )
    model = Model.from_pretrained(folder)

    ids = torch.randint(WORDS, (16, 10))
    with torch.no_grad():
        print("equal outputs:", torch.equal(model(ids).logits, plain(ids).logits))

    # The new weights may take larger steps than the pretrained ones.
    mixing = model.bert.encoder.depth_connection
    pretrained = [p for name, p in model.named_parameters() if "depth_connection" not in name]
    groups = [{"params": pretrained}, {"params": mixing.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)
    model.train()
    losses = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.3f} before, {losses[-1]:.3f} after {steps} steps")
    print("what the last layer reads:", [round(w, 3) for w in mixing.weight[-2, :-1].tolist()])

    # The config now has the connection's settings.
    model.save_pretrained(folder)
    again = deepfast.connected(BertForMaskedLM).from_pretrained(folder)
    with torch.no_grad():
        print("saved and loaded:", torch.equal(again(ids).logits, model.eval()(ids).logits))
    return model, losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
