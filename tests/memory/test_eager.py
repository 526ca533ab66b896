"""The closed forms of plain PyTorch, against plain models that are trained for a step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepfast.measure.forms import FORMS
from deepfast.memory import LiveBytes, plan
from deepfast.memory.eager import CHECKPOINTED, EAGER, eager_peak
from deepfast.nn import DLCL

WIDTH, HEADS, FFN, BATCH, LENGTH = 64, 2, 256, 32, 16


class Norm(nn.LayerNorm):
    """In fp32, as under CUDA's autocast."""

    def forward(self, x):
        return super().forward(x.float())


class Attention(nn.Module):
    def __init__(self, cross):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH) if cross else None
        self.rest = nn.Linear(WIDTH, (2 if cross else 3) * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory, causal):
        if self.query is None:
            qkv = self.rest(x).chunk(3, -1)
        else:
            qkv = self.query(x), *self.rest(memory).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in qkv)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(o.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.attentions = nn.ModuleList(Attention(cross) for cross in range(1 + decoder))
        self.norms = nn.ModuleList(Norm(WIDTH) for _ in range(2 + decoder))
        self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

    def forward(self, x, memory):
        for attention, norm in zip(self.attentions, self.norms, strict=False):
            causal = memory is not None and attention.query is None
            x = x + F.dropout(attention(norm(x), memory, causal), 0.1)
        return x + F.dropout(self.down(F.relu(self.up(self.norms[-1](x)))), 0.1)


class Model(nn.Module):
    def __init__(self, form, layers, decoder_layers, vocabulary):
        super().__init__()
        self.form = form
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.encoder = nn.ModuleList(Layer(False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(True) for _ in range(decoder_layers))
        self.dlcl = DLCL(layers, WIDTH) if form in FORMS else None
        self.norms = nn.ModuleList([Norm(WIDTH), Norm(WIDTH)])

    def run(self, layer, x, memory=None):
        if self.form == CHECKPOINTED:
            return checkpoint(layer, x, memory, use_reentrant=False)
        return layer(x, memory)

    def forward(self, tokens):
        x = F.dropout(self.embedding(tokens) * 8.0, 0.1)
        connect = (lambda y: y) if self.dlcl is None else FORMS[self.form](self.dlcl)
        x = connect(x)
        for layer in self.encoder:
            x = connect(self.run(layer, x))
        x = self.norms[0](x)
        if len(self.decoder):
            memory, x = x, F.dropout(self.embedding(tokens) * 8.0, 0.1)
            for layer in self.decoder:
                x = self.run(layer, x, memory)
            x = self.norms[1](x)
        return F.linear(x, self.embedding.weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layers", "decoder_layers", "vocabulary"), [(12, 0, 64), (6, 3, 512)])
@pytest.mark.parametrize("form", EAGER)
def test_a_plain_model_is_predicted_within_5_percent(
    form, layers, decoder_layers, vocabulary, dtype
):
    model = Model(form, layers, decoder_layers, vocabulary)
    tokens = torch.randint(vocabulary, (BATCH, LENGTH))
    with LiveBytes() as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits.float(), tokens.flatten(), label_smoothing=0.1)
        del logits
        loss.backward()
    sizes = plan(
        budget="1TiB", layers=layers, width=WIDTH, tokens=BATCH * LENGTH, heads=HEADS, ffn=FFN,
        vocabulary=vocabulary, decoder_layers=decoder_layers, dtype=dtype, device="cpu",
        connection="residual" if model.dlcl is None else "dlcl",
    ).sizes  # fmt: skip
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(sizes.parameters, rel=0.02)
    measured = live.peak + 12 * count
    assert eager_peak(sizes, form) == pytest.approx(measured, rel=0.05)
