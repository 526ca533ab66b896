"""Models of other packages: ten connected ones beside the plain ones, and beam search beside
`generate` of transformers, which it needs."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

import deepfast
from deepfast.attach.passes import CONNECT_POLICIES
from deepfast.measure.settings import Settings
from deepfast.measure.turns import Row, Turns
from deepfast.mt.models import Transformer, TransformerConfig
from deepfast.mt.search import DecodingOptions, beam_search

LAYERS, DIM, LENGTH = 6, 256, 128
SIZES = {
    "vocab_size": 1000, "hidden_size": DIM, "intermediate_size": 4 * DIM, "pad_token_id": 0,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FEW_KEYS = {"head_dim": 64, "num_key_value_heads": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BERT = {"reference_compile": False, "cls_token_id": 1, "sep_token_id": 2}
VIT = {"image_size": 64, "patch_size": 8, "hidden_dropout_prob": 0.0}
T5 = {"d_model": DIM, "d_kv": 64, "d_ff": 4 * DIM, "num_layers": LAYERS, "num_heads": 4,
      "dropout_rate": 0.0}  # fmt: skip
WHISPER = {
    "d_model": DIM, "encoder_layers": LAYERS, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 4 * DIM, "dropout": 0.0,
    "max_source_positions": LENGTH, "decoder_start_token_id": 1,
}  # fmt: skip


def made(name: str, **options: Any) -> nn.Module:
    """A model of transformers."""
    kind = getattr(transformers, name)
    return kind(kind.config_class(**SIZES | options))


def torchs() -> nn.Module:
    layer = nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(DIM), enable_nested_tensor=False)


def read(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return model(input_ids=words, attention_mask=torch.ones_like(words)).logits


MODELS: dict[str, tuple] = {
    "torch's encoder": (torchs, "", lambda m, w: m(torch.ones(*w.shape, DIM))),
    "Llama": (partial(made, "LlamaForCausalLM"), "model", read),
    "Qwen3": (partial(made, "Qwen3ForCausalLM", **FEW_KEYS), "model", read),
    "Gemma 2": (partial(made, "Gemma2ForCausalLM", **FEW_KEYS), "model", read),
    "GPT-2": (partial(made, "GPT2LMHeadModel", **NO_DROPOUT), "transformer", read),
    "GPT-NeoX": (partial(made, "GPTNeoXForCausalLM"), "gpt_neox", read),
    "ModernBERT": (partial(made, "ModernBertForMaskedLM", **BERT), "model", read),
    "ViT": (partial(made, "ViTForImageClassification", **VIT), "vit",
            lambda m, w: m(torch.ones(2 * len(w), 3, 64, 64)).logits),
    "Whisper's encoder": (lambda: made("WhisperModel", **WHISPER).get_encoder(), "",
                          lambda m, w: m(torch.ones(len(w), 80, 2 * LENGTH)).last_hidden_state),
    "T5, both sides": (partial(made, "T5ForConditionalGeneration", **T5), "encoder decoder",
                       lambda m, w: m(input_ids=w, decoder_input_ids=w).logits),
}  # fmt: skip
"""How each is made, the parents that are connected, and a call of it."""
DLCL_FORMS = {f"DLCL, {policy}": {"recompute": policy} for policy in CONNECT_POLICIES}
"""Variant of torch's encoder -> arguments of `deepfast.connect`."""
CONNECTED: dict[str, dict | None] = {
    "plain": None, "connected": {"connection": "attnres", "sublayers": "auto"},
}  # fmt: skip
"""The same of all models: attention residuals that read before each sublayer."""


class ModelCase:
    """A model, plain and connected."""

    def __init__(self, name: str, batch: int, variants: Mapping[str, dict | None]):
        make, parents, self.call = MODELS[name]
        self.words = torch.arange(batch * LENGTH).view(batch, LENGTH) % 1000
        self.models = {}
        for variant, options in variants.items():
            torch.manual_seed(0)
            model = self.models[variant] = make().train()
            for path in (parents.split() or [""]) if options is not None else ():
                deepfast.connect(model.get_submodule(path), norm="pre", **options)

    def run(self, row: Row) -> None:
        model = self.models[row.variant]
        self.call(model, self.words).square().mean().backward()
        model.zero_grad(set_to_none=True)


def models(settings: Settings, batch: int, names: Iterable[str]) -> list[Turns]:
    """Every model with attention residuals; torch's encoder also with DLCL under each policy."""
    found = []
    for name in names:
        variants = CONNECTED | (DLCL_FORMS if name == "torch's encoder" else {})
        rows = [Row(variant=variant, what=name, depth=LAYERS) for variant in variants]
        make = partial(ModelCase, name, batch, variants)
        found.append(Turns("models", rows, make, settings.rounds, settings.clock, "plain"))
    return found


# ---- beam search ---------------------------------------------------------------------------------

EOS, UNLIKELY, BEAM, VOCABULARY, TOKENS = 3, -30.0, 4, 8000, 25


class Endless(Transformer):
    """A model that ends no sentence before the search does."""

    def project(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().project(x)
        logits[:, EOS] += UNLIKELY
        return logits


class BeamCase:
    """Models of one size with random weights, both post-norm with relu. Every search takes as many
    tokens as the source has, and then the end, in both."""

    def __init__(self, encoder: int, decoder: int, sentences: int):
        torch.manual_seed(1)
        self.source = torch.randint(4, VOCABULARY, (sentences, TOKENS))
        self.source[:, -1] = EOS
        config = TransformerConfig(
            dim=DIM, num_heads=4, ffn_dim=4 * DIM, encoder_layers=encoder, decoder_layers=decoder,
            vocab_size=VOCABULARY, norm="post", encoder_connection="residual",
        )  # fmt: skip
        self.ours = Endless(config).eval()
        theirs = transformers.MarianConfig(
            vocab_size=VOCABULARY, decoder_vocab_size=VOCABULARY, d_model=DIM,
            encoder_layers=encoder, decoder_layers=decoder, encoder_ffn_dim=4 * DIM,
            decoder_ffn_dim=4 * DIM, encoder_attention_heads=4, decoder_attention_heads=4,
            activation_function="relu", scale_embedding=True, max_position_embeddings=512,
            pad_token_id=0, bos_token_id=2, eos_token_id=EOS, decoder_start_token_id=2,
            forced_eos_token_id=EOS,
        )  # fmt: skip
        self.theirs = transformers.MarianMTModel(theirs).eval()
        self.theirs.final_logits_bias[:, EOS] = UNLIKELY

    def run(self, row: Row) -> None:
        found = self.deepfast() if row.variant == "deepfast" else self.transformers()
        if found != len(self.source) * (TOKENS + 1):
            raise RuntimeError(f"{row.variant}: expected translations of {TOKENS} tokens")

    def deepfast(self) -> int:
        found = beam_search(self.ours, self.source, DecodingOptions(beam=BEAM, max_length=TOKENS))
        return sum(len(best[0].tokens) + 1 for best in found)

    def transformers(self) -> int:
        found = self.theirs.generate(
            self.source, attention_mask=torch.ones_like(self.source), num_beams=BEAM,
            do_sample=False, max_new_tokens=TOKENS + 1, length_penalty=1.0,
        )  # fmt: skip
        # Without the token that starts the decoder.
        return found[:, 1:].numel()


def beam(settings: Settings, depths: Iterable[tuple[int, int]]) -> list[Turns]:
    found = []
    for encoder, decoder in depths:
        rows = [
            Row(variant=v, what=f"beam search, {encoder} + {decoder} layers", counted=False)
            for v in ("transformers", "deepfast")
        ]
        make = partial(BeamCase, encoder, decoder, settings.step.batch)
        rounds, clock = settings.rounds, settings.clock
        found.append(Turns("beam search", rows, make, rounds, clock, "deepfast"))
    return found
