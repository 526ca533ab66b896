"""Small models with random weights, and how to connect and run each of them."""

import contextlib
import importlib.metadata
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

import deepfast

D, L, VOCAB = 16, 3, 40

TRANSFORMERS = 0
with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    TRANSFORMERS = int(importlib.metadata.version("transformers").partition(".")[0])


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    norm: str
    parents: tuple[str, ...]
    """Path of each parent and, after a colon, the name of its list."""
    run: Callable[[nn.Module], torch.Tensor]
    """The model's output, from inputs that are always the same."""

    def places(self, model):
        """(path, parent, name of its list) for each parent."""
        for place in self.parents:
            path, _, layers = place.partition(":")
            yield path, model.get_submodule(path), layers

    def connect(self, model, connection="dlcl", **options):
        """The connections, by path."""
        made = {}
        for path, parent, layers in self.places(model):
            layers = None if type(parent) is nn.Sequential else layers
            made[path] = deepfast.connect(
                parent, layers, norm=self.norm, connection=connection, **options
            )
        return made


def ids(rows=2, length=7, seed=1):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def numbers(model, *shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(next(model.parameters()).dtype)


def torch_encoder(norm_first=False):
    layer = nn.TransformerEncoderLayer(
        D, 2, 24, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    norm = nn.LayerNorm(D) if norm_first else None
    return nn.TransformerEncoder(layer, L, norm=norm, enable_nested_tensor=False)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh()


def _hf(name, config, **values):
    def make():
        transformers = pytest.importorskip("transformers")
        made = getattr(transformers, config)(**values)
        return getattr(transformers, name)(made)

    return make


_bert = _hf(
    "BertForMaskedLM", "BertConfig", hidden_size=D, num_hidden_layers=L, num_attention_heads=2,
    intermediate_size=24, vocab_size=VOCAB, max_position_embeddings=32, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)  # fmt: skip
_modernbert = _hf(
    "ModernBertForMaskedLM", "ModernBertConfig", hidden_size=D, num_hidden_layers=L,
    num_attention_heads=2, intermediate_size=24, vocab_size=VOCAB, max_position_embeddings=32,
    local_attention=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
    sep_token_id=2, reference_compile=False,
)  # fmt: skip
_SEQ2SEQ = {
    "d_model": D, "encoder_layers": L, "decoder_layers": L, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "vocab_size": VOCAB, "max_position_embeddings": 32, "dropout": 0.0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "forced_eos_token_id": 2,
}  # fmt: skip
_marian = _hf("MarianMTModel", "MarianConfig", **_SEQ2SEQ)
_bart = _hf("BartForConditionalGeneration", "BartConfig", **_SEQ2SEQ)
_t5 = _hf(
    "T5ForConditionalGeneration", "T5Config", d_model=D, d_kv=8, d_ff=24, num_layers=L,
    num_decoder_layers=L, num_heads=2, vocab_size=VOCAB, dropout_rate=0.0,
    decoder_start_token_id=0,
)  # fmt: skip
_llama = _hf(
    "LlamaForCausalLM", "LlamaConfig", hidden_size=D, num_hidden_layers=L, num_attention_heads=2,
    num_key_value_heads=1, intermediate_size=24, vocab_size=VOCAB, max_position_embeddings=32,
    pad_token_id=0,
)  # fmt: skip
_vit = _hf(
    "ViTForImageClassification", "ViTConfig", hidden_size=D, num_hidden_layers=L,
    num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4, num_labels=5,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def _timm():
    timm = pytest.importorskip("timm")
    return timm.models.vision_transformer.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=D, depth=L, num_heads=2, num_classes=5
    )


def _seq2seq(model):
    return model(input_ids=ids(), decoder_input_ids=ids(seed=2)).logits


_VIT = "vit.encoder:layer" if TRANSFORMERS == 4 else "vit:layers"
_BOTH = ("model.encoder:layers", "model.decoder:layers")


def _logits(model):
    return model(ids()).logits


def _image(model):
    out = model(numbers(model, 2, 3, 8, 8))
    return out if isinstance(out, torch.Tensor) else out.logits


def _vectors(model):
    return model(numbers(model, 2, 7, D))


CASES = {
    "torch post-norm": Case(torch_encoder, "post", (":layers",), _vectors),
    "torch pre-norm": Case(lambda: torch_encoder(True), "pre", (":layers",), _vectors),
    "sequential": Case(lambda: nn.Sequential(Block(), Block(), Block()), "pre", (":",), _vectors),
    "bert": Case(_bert, "post", ("bert.encoder:layer",), _logits),
    "modernbert": Case(_modernbert, "pre", ("model:layers",), _logits),
    "marian": Case(_marian, "post", _BOTH, _seq2seq),
    "bart": Case(_bart, "post", _BOTH, _seq2seq),
    "t5": Case(_t5, "pre", ("encoder:block", "decoder:block"), _seq2seq),
    "llama": Case(_llama, "pre", ("model:layers",), _logits),
    "vit": Case(_vit, "pre", (_VIT,), _image),
    "timm": Case(_timm, "pre", (":blocks",), _image),
}


def perturbed(model):
    """The model with parameters that are not at their initial values: a fresh model's layers hardly
    change the states."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in filter(lambda p: p.requires_grad, model.parameters()):
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model
