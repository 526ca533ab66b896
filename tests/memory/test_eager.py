"""The closed forms of plain PyTorch, against plain models that are trained for a step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepfast.measure.encoders import PlainEncoder
from deepfast.memory import LiveBytes, plan
from deepfast.memory.eager import CHECKPOINTED, EAGER, eager_peak

WIDTH, HEADS, FFN, BATCH, LENGTH = 64, 2, 256, 32, 16


class DecoderLayer(nn.Module):
    """A layer of `PlainEncoder` whose feed-forward block comes after a second attention."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.own, self.query = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.memory = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

    def attend(self, x, q, k, v, out, causal):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return x + F.dropout(out(o.transpose(1, 2).flatten(2)), 0.1)

    def forward(self, x, memory):
        x = self.attend(x, *self.own(self.norms[0](x)).chunk(3, -1), self.out[0], True)
        q, kv = self.query(self.norms[1](x)), self.memory(memory).chunk(2, -1)
        x = self.attend(x, q, *kv, self.out[1], False)
        return x + F.dropout(self.down(F.relu(self.up(self.norms[2](x)))), 0.1)


class Model(nn.Module):
    def __init__(self, form, layers, decoder_layers, vocabulary):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.encoder = PlainEncoder(layers, WIDTH, HEADS, FFN, dropout=0.1, form=form)
        self.decoder = nn.ModuleList(DecoderLayer() for _ in range(decoder_layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        memory = self.encoder(F.dropout(self.embedding(tokens) * 8.0, 0.1))
        x = F.dropout(self.embedding(tokens) * 8.0, 0.1)
        for layer in self.decoder:
            if self.encoder.form == CHECKPOINTED:
                x = checkpoint(layer, x, memory, use_reentrant=False)
            else:
                x = layer(x, memory)
        return F.linear(self.norm(x), self.embedding.weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", EAGER)
def test_a_plain_model_is_predicted_within_5_percent(form, dtype):
    layers, decoder_layers, vocabulary = 6, 3, 512
    model = Model(form, layers, decoder_layers, vocabulary)
    tokens = torch.randint(vocabulary, (BATCH, LENGTH))
    with LiveBytes() as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits.float(), tokens.flatten(), label_smoothing=0.1)
        del logits
        loss.backward()
    sizes = plan(
        budget="1TiB", num_layers=layers, dim=WIDTH, tokens=BATCH * LENGTH, num_heads=HEADS,
        ffn_dim=FFN,
        vocab_size=vocabulary, decoder_layers=decoder_layers, dtype=dtype, device="cpu",
        connection="residual" if model.encoder.dlcl is None else "dlcl",
    ).sizes  # fmt: skip
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(sizes.parameters, rel=0.02)
    measured = live.peak + 12 * count
    assert eager_peak(sizes, form) == pytest.approx(measured, rel=0.05)
