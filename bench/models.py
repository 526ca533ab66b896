"""Other people's models with two reads a layer over the plain ones: `python -m bench.models`.

For each model a training step and its peak bytes, with attention residuals (`sublayers="auto"`)
over the plain model, 6 layers, D=256, T=1024, fp32, without dropout. Both take turns on one thread.
``deep`` is two deeper Llamas, one of which generates. It needs transformers; about 5 minutes.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

import deepfast
from bench.claims import Claims
from deepfast.measure.clock import keep_memory

LAYERS, DIM = 6, 256
WORDS = torch.arange(1024).view(8, 128) % 1000
SIZES = {
    "vocab_size": 1000, "hidden_size": DIM, "intermediate_size": 4 * DIM, "pad_token_id": 0,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def _read(model: nn.Module) -> torch.Tensor:
    return model(input_ids=WORDS, attention_mask=torch.ones_like(WORDS)).logits


def _torch() -> nn.Module:
    layer = nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(DIM), enable_nested_tensor=False)


def _made(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        kind = getattr(transformers, name)
        return kind(kind.config_class(**SIZES | options))

    return make


WHISPER = {
    "d_model": DIM, "encoder_layers": LAYERS, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 4 * DIM, "dropout": 0.0,
    "max_source_positions": 128, "decoder_start_token_id": 1,
}  # fmt: skip


MODELS: dict[str, tuple] = {
    "torch": (_torch, "", lambda m: m(torch.ones(8, 128, DIM))),
    "llama": (_made("LlamaForCausalLM"), "model", _read),
    "qwen3": (_made("Qwen3ForCausalLM", head_dim=64, num_key_value_heads=2), "model", _read),
    "gemma2": (_made("Gemma2ForCausalLM", head_dim=64, num_key_value_heads=2), "model", _read),
    "gpt2": (_made("GPT2LMHeadModel", **NO_DROPOUT), "transformer", _read),
    "gpt_neox": (_made("GPTNeoXForCausalLM"), "gpt_neox", _read),
    "modernbert": (_made("ModernBertForMaskedLM", reference_compile=False, cls_token_id=1,
                         sep_token_id=2), "model", _read),
    "vit": (_made("ViTForImageClassification", image_size=64, patch_size=8,
                  hidden_dropout_prob=0.0), "vit", lambda m: m(torch.ones(16, 3, 64, 64)).logits),
    "whisper": (lambda: _made("WhisperModel", **WHISPER)().get_encoder(), "",
                lambda m: m(torch.ones(8, 80, 256)).last_hidden_state),
    "t5": (_made("T5ForConditionalGeneration", d_model=DIM, d_kv=64, d_ff=4 * DIM, num_heads=4,
                 num_layers=LAYERS, dropout_rate=0.0), "encoder decoder",
           lambda m: m(input_ids=WORDS, decoder_input_ids=WORDS).logits),
}  # fmt: skip
"""How each is made, the parents that are connected, and a call of it."""


def step(model: nn.Module, call: Callable) -> None:
    call(model).square().mean().backward()
    model.zero_grad(set_to_none=True)


def both(make: Callable[[], nn.Module], parents: str) -> dict[str, nn.Module]:
    models = {}
    for form in ("plain", "connected"):
        torch.manual_seed(0)
        models[form] = make().train()
    for name in parents.split() or [""]:
        parent = models["connected"].get_submodule(name)
        deepfast.connect(parent, norm="pre", connection="attnres", sublayers="auto")
    return models


def compare(claims: Claims, key: str, what: str, models: dict, call: Callable) -> None:
    forms = {form: partial(step, model, call) for form, model in models.items()}
    what = f"step of {what}, two reads a layer over plain"
    claims.times(f"{key}_step", what, forms, "connected", "plain")
    claims.bytes(f"{key}_bytes", what, forms, "connected", "plain")


def deep(claims: Claims) -> None:
    """A Llama of 12 layers and D=512, and one of 24 layers that generates."""

    def make(layers: int) -> dict[str, nn.Module]:
        options = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
        options |= {"num_hidden_layers": layers, "eos_token_id": None}
        return both(_made("LlamaForCausalLM", **options), "model")

    ids = WORDS.view(4, 256).repeat(1, 2)
    read = lambda m: m(input_ids=ids, labels=ids, use_cache=False).loss  # noqa: E731
    compare(claims, "models_llama_12", "a Llama, 12 layers, T=2048, D=512", make(12), read)
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    models = {form: model.eval() for form, model in make(24).items()}
    forms = {form: partial(m.generate, ids[:1, :8], **options) for form, m in models.items()}
    what = "20 tokens generated one by one by a Llama of 24 layers, D=512, two reads over plain"
    claims.times("decode_llama_24", what, forms, "connected", "plain")


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    keep_memory()
    claims = Claims("", 5)
    claims.command = "python -m bench.models"
    for name in names or MODELS:
        if name in MODELS:
            make, parents, call = MODELS[name]
            what = f"{name}, {LAYERS} layers, D={DIM}"
            compare(claims, f"models_{name}", what, both(make, parents), call)
    if not names or "deep" in names:
        deep(claims)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
