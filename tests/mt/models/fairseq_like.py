"""A Transformer with DLCL that has the names, ids and arithmetic of the authors' checkpoints.

Written from the paper and the description of their files: torch's layers, every state in a list,
stacked and summed for each layer, whole prefixes decoded anew. Slow, and with nothing of deepfast
in it.
"""

import argparse
import math
import re

import torch
import torch.nn.functional as F
from torch import nn

LUA, PAD, EOS, UNK = range(4)


def their_names(state, later):
    """The weights under the names of fairseq of 2018, or of a ``later`` one, in place of torch's.

    The later one has a matrix each for query, key and value.
    """
    renamed = {}
    for name, weight in state.items():
        name = name.replace("multihead_attn", "encoder_attn").replace(".linear", ".fc")
        if norm := re.search(r"\.norm(\d)\.", name):
            number, crosses = int(norm[1]) - 1, ["encoder_attn"] * name.startswith("decoder")
            place = ["self_attn", *crosses, "final"][number]
            theirs = f".{place}_layer_norm." if later else f".layer_norms.{number}."
            name = name.replace(norm[0], theirs)
        if later and "in_proj_" in name:
            names = [name.replace("in_proj_", f"{n}_proj.") for n in "qkv"]
            renamed |= zip(names, weight.chunk(3), strict=True)
        else:
            renamed[name] = weight
    return renamed


class History(nn.Module):
    def __init__(self, layers, dim, pre, weights, numbers):
        """weights: how many per pair of layers; None: a plain matrix. numbers: of the norms."""
        super().__init__()
        self.pre = pre
        shape = (layers + 1, layers + 1, *(() if weights is None else (weights,)))
        # Also above the diagonal, where nothing is read.
        self.weight = nn.Parameter(torch.randn(shape) / (layers + 1))
        self.layer_norms = nn.ModuleDict({str(n): nn.LayerNorm(dim) for n in numbers})
        self.of_state = dict(
            zip(range(layers + 1 - len(numbers), layers + 1), numbers, strict=True)
        )

    def norm(self, x, k):
        return self.layer_norms[str(self.of_state[k])](x) if k in self.of_state else x

    def add(self, states, y):
        states.append(self.norm(y, len(states)) if self.pre else y)

    def pop(self, states):
        row = len(states) - 1
        w = self.weight[row, : row + 1].view(row + 1, -1)
        # scalar_n: channel h is weighted by the weight h mod n.
        channels = torch.arange(states[0].shape[-1]) % w.shape[1]
        x = (torch.stack(states) * w[:, channels].view(row + 1, 1, 1, -1)).sum(0)
        return x if self.pre else self.norm(x, row)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("_float_tensor", torch.zeros(0))

    def forward(self, tokens, dim):
        real = tokens != PAD
        position = torch.where(real, real.cumsum(1) + PAD, PAD).unsqueeze(-1).float()
        half = dim // 2
        frequency = torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
        table = torch.cat(((position * frequency).sin(), (position * frequency).cos()), -1)
        return table.masked_fill(~real.unsqueeze(-1), 0)


class Side(nn.Module):
    def __init__(self, layers, embedding, history, layer, dim, heads, ffn, pre):
        super().__init__()
        self.embed_tokens, self.embed_positions = embedding, Positions()
        self.layers = nn.ModuleList(
            layer(dim, heads, ffn, dropout=0.0, batch_first=True, norm_first=pre)
            for _ in range(layers)
        )
        self.history = history
        self.layer_norm = nn.LayerNorm(dim) if pre else None

    def run(self, tokens, *memory, **masks):
        dim = self.embed_tokens.weight.shape[1]
        x = math.sqrt(dim) * self.embed_tokens(tokens) + self.embed_positions(tokens, dim)
        states = []
        if self.history is not None:
            self.history.add(states, x)
        for layer in self.layers:
            x = x if self.history is None else self.history.pop(states)
            x = layer(x, *memory, **masks)
            if self.history is not None:
                self.history.add(states, x)
        x = x if self.history is None else self.history.pop(states)
        return x if self.layer_norm is None else self.layer_norm(x)


class FairseqLike(nn.Module):
    """Small, odd sizes. `namespace` holds the arguments that its training would have saved."""

    def __init__(
        self, source, target, *, norm="pre", share="all", weights=1, numbering="from 1",
        decoder_history=True, later_names=False, dim=12, heads=2, ffn=20, layers=(3, 2),
    ):  # fmt: skip
        super().__init__()
        pre = norm == "pre"

        def embedding(size):
            made = nn.Embedding(size, dim, padding_idx=PAD)
            nn.init.normal_(made.weight, std=dim**-0.5)
            nn.init.zeros_(made.weight[PAD])
            return made

        def history(count, wanted):
            numbers = {"from 1": range(1, count + 1), "from 0": range(count),
                       "embedding too": range(count + 1), "none": ()}[numbering]  # fmt: skip
            return History(count, dim, pre, weights, numbers) if wanted else None

        first = embedding(source)
        second = first if share == "all" else embedding(target)
        rest = dim, heads, ffn, pre
        dlcl = numbering != "no history"
        numbering = numbering if dlcl else "none"
        self.encoder = Side(layers[0], first, history(layers[0], dlcl),
                            nn.TransformerEncoderLayer, *rest)  # fmt: skip
        self.decoder = Side(layers[1], second, history(layers[1], dlcl and decoder_history),
                            nn.TransformerDecoderLayer, *rest)  # fmt: skip
        self.later_names = later_names
        if share == "none":
            self.decoder.embed_out = nn.Parameter(torch.randn(target, dim) * dim**-0.5)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    p.add_(0.2 * torch.randn_like(p))
        kinds = {side: None if getattr(self, side).history is None else "learnable_dense"
                 for side in ("encoder", "decoder")}  # fmt: skip
        if numbering == "none" and dlcl:
            kinds = {s: kind and "learnable_dense_nonorm" for s, kind in kinds.items()}
        self.namespace = argparse.Namespace(
            arch="dense_transformer_wmt_en_de", dropout=0.1, attention_dropout=0.0,
            relu_dropout=0.1, share_all_embeddings=share == "all",
            share_decoder_input_output_embed=share != "none",
            **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (
                ("attention_heads", heads), ("ffn_embed_dim", ffn), ("normalize_before", pre),
                ("learned_pos", False), ("history_type", kinds[side]))},
        )  # fmt: skip

    def forward(self, source, target):
        """Ids (B, S) and (B, T) to logits (B, T, V). The source is padded on the left."""
        hidden = source == PAD
        memory = self.encoder.run(source, src_key_padding_mask=hidden)
        future = torch.ones(target.shape[1], target.shape[1]).triu(1).bool()
        x = self.decoder.run(target, memory, tgt_mask=future, memory_key_padding_mask=hidden)
        out = getattr(self.decoder, "embed_out", None)
        return F.linear(x, self.decoder.embed_tokens.weight if out is None else out)

    def greedy(self, source, longest):
        """The most probable id at each position, up to </s> or ``longest`` ids."""
        target = [EOS]
        while len(target) <= longest:
            logits = self(source, torch.tensor([target]))[0, -1]
            logits[PAD] = -math.inf
            target.append(int(logits.argmax()))
            if target[-1] == EOS:
                break
        return [token for token in target[1:] if token != EOS]

    def checkpoint(self):
        """The content of the checkpoint's file."""
        return {
            "args": self.namespace, "model": their_names(self.state_dict(), self.later_names),
            "extra_state": {"epoch": 3},
            "optimizer_history": [{"criterion_name": "LabelSmoothedCrossEntropyCriterion"}],
            "last_optimizer_state": None,
        }  # fmt: skip
