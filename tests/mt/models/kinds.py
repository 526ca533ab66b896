"""Small models of every kind and option, and a batch for them."""

from dataclasses import asdict

import torch

from deepfast.mt.models import (
    DepthGrowingConfig,
    FastForwardLSTMConfig,
    TransformerConfig,
    build,
    kind_of,
)
from deepfast.mt.models.checkpoint import save_checkpoint
from deepfast.nn.connections.fusion import OPTIONS

# The second source is padded on the left, the third on the right. Ids 4 and 10 are real words.
SOURCE = torch.tensor([[5, 6, 7, 9, 3], [0, 0, 8, 4, 3], [7, 3, 0, 0, 0]])
TARGET = torch.tensor([[2, 9, 5, 6], [2, 4, 0, 0], [2, 8, 7, 0]])
LABELS = torch.tensor([[9, 5, 6, 3], [4, 3, 0, 0], [8, 7, 3, 0]])
REAL = TARGET != 0

SIZES = {"vocab_size": 11, "dim": 12, "num_heads": 3, "ffn_dim": 20, "encoder_layers": 3,
         "decoder_layers": 2}  # fmt: skip
RECURRENT = {"vocab_size": 11, "dim": 6, "embedding_dim": 5, "encoder_layers": 3,
             "decoder_layers": 2}  # fmt: skip
FUSION = {"hidden_dim": 6, "hops": 2, "attention_dim": 5}
"""Each kind of fusion gets those of these options that it reads."""


def both(connection, **changes):
    return {"encoder_connection": connection, "decoder_connection": connection} | changes


def fused(kind, **changes):
    options = {name: x for name, x in FUSION.items() if name in OPTIONS[kind]}
    return {"encoder_fusion": kind, "decoder_fusion": kind, "fusion": options} | changes


TRANSFORMERS = {
    "dlcl": both("dlcl"),
    "residual, post": both("residual", norm="post"),
    "frozen": both("dlcl", dlcl={"weight_type": "vector", "learnable": False}),
    "attnres": both("attnres"),
    "block_attnres": both("block_attnres", attnres_block=2),
    "deepnorm, pre-norm decoder": {"norm": "deepnorm", "decoder_norm": "pre",
                                   "encoder_connection": "residual"},
    "rms": {"norm_type": "rms"},
    "own embeddings": {"share_embeddings": "none", "target_vocab_size": 13},
    "decoder's embedding": {"share_embeddings": "decoder", "target_vocab_size": 13},
    "latent": both("latent"),
    "transparent": {"cross_attention": "transparent", "encoder_connection": "residual"},
    "transparent, dlcl": {"cross_attention": "transparent"},
    "transparent, dlcl, post": {"cross_attention": "transparent", "norm": "post"},
    "fusion of the encoder": fused("attention", decoder_fusion=None),
    # The fusions of both sides share E.
    "average fusion": fused("average", fusion={"layer_embeddings": True}),
    "feed_forward fusion": fused("feed_forward", norm="post", decoder_connection="dlcl"),
    "attention fusion": fused("attention", decoder_connection="dlcl"),
    "channel_attention fusion": fused("channel_attention", norm="post"),
}  # fmt: skip
GROWING = {
    "as the paper": {"norm": "post", "encoder_connection": "residual"},
    "dlcl below": {},
    "dlcl on top": {"encoder_connection": "residual", "top_encoder_connection": "dlcl",
                    "top_decoder_connection": "dlcl",
                    "top_dlcl": {"weight_type": "vector", "init": "one"}},
    "dlcl everywhere": {"decoder_connection": "dlcl", "top_encoder_connection": "dlcl",
                        "dlcl": {"window": 2}, "top_decoder_connection": "dlcl",
                        "embedding_norm": True},
    "three embeddings below": {"share_embeddings": "none",
                               "target_vocab_size": 11, "top_encoder_connection": "denseformer"},
}  # fmt: skip
ABLATIONS = {
    "": {}, ", one layer": {"encoder_layers": 1, "decoder_layers": 1},
    ", two layers": {"encoder_layers": 2}, ", no f": {"fast_forward": False},
    ", forward": {"bidirectional": False}, ", one column": {"columns": 1}, ", bias": {"bias": True},
    ", plain": {"fast_forward": False, "columns": 1, "bidirectional": False, "bias": True},
}  # fmt: skip
LSTMS = {
    f"{name}{change}": {"attention": name == "Deep-Att"} | options
    for name in ("Deep-Att", "Deep-ED") for change, options in ABLATIONS.items()
}  # fmt: skip

TOPS = {"top_encoder_layers": 2, "top_decoder_layers": 3}
CONFIGS = {
    name: (kind, sizes | given)
    for kind, sizes, cases in (
        (TransformerConfig, SIZES, TRANSFORMERS),
        (DepthGrowingConfig, SIZES | TOPS, GROWING),
        (FastForwardLSTMConfig, RECURRENT, LSTMS),
    )
    for name, given in cases.items()
}
"""Name -> the class of a config, and its fields."""


SOME = ("dlcl", "latent", "transparent, dlcl", "attention fusion", "dlcl everywhere", "Deep-Att",
        "Deep-ED")  # fmt: skip
"""A model of each kind."""


def make(name, dtype=torch.float64, seed=3, **changes):
    """In evaluation mode. Its parameters are moved from values that could hide a mistake."""
    torch.manual_seed(seed)
    kind, given = CONFIGS[name]
    model = build(kind(**given | changes)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.weight[module.padding_idx] = 0
    return model


def save(path, model, vocabulary=bytes(range(256)), **changes):
    """Writes a checkpoint file; returns its path."""
    content = {"step": 3, "kind": kind_of(model.config), "config": asdict(model.config),
               "model": model.state_dict(), "vocabulary": vocabulary, "recipe": {}}  # fmt: skip
    save_checkpoint(path, content | changes)
    return str(path)


def learning(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradients(model):
    """Loss and gradients after the same seed."""
    torch.manual_seed(5)
    model.zero_grad()
    loss = model.loss(SOURCE, TARGET, LABELS, 0.1)[0]
    loss.backward()
    return loss.item(), {name: p.grad for name, p in learning(model).items()}
