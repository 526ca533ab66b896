"""Other people's models with two reads a layer over the plain ones: `python -m bench.models`.

For each model a training step and its peak bytes, with attention residuals (`sublayers="auto"`)
over the plain model, 6 layers, D=256, T=1024, fp32, without dropout. Both take turns on one thread.
It needs transformers; about 3 minutes.
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


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    keep_memory()
    claims = Claims("", 5)
    claims.command = "python -m bench.models"
    for name in names or MODELS:
        make, parents, call = MODELS[name]
        models = {}
        for form in ("plain", "connected"):
            torch.manual_seed(0)
            models[form] = make().train()
        for parent in parents.split() or [""]:
            deepfast.connect(
                models["connected"].get_submodule(parent), norm="pre", connection="attnres",
                sublayers="auto",
            )  # fmt: skip
        forms = {form: partial(step, model, call) for form, model in models.items()}
        what = f"step of {name} with two reads a layer over plain, {LAYERS} layers, D={DIM}"
        claims.times(f"models_{name}_step", what, forms, "connected", "plain")
        claims.bytes(f"models_{name}_bytes", what, forms, "connected", "plain")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
