"""Tiny models of Hugging Face transformers with random weights."""

import pytest
import torch

VOCABULARY, LENGTH = 50, 9
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OF_CLASS = {
    "ModernBertForMaskedLM": {"global_attn_every_n_layers": 1, "reference_compile": False},
    "T5ForConditionalGeneration": {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "Phi3ForCausalLM": {"resid_pdrop": 0.0},
    "GemmaForCausalLM": {"head_dim": 8},
    "Qwen3ForCausalLM": {"head_dim": 8},
    "MinistralForCausalLM": {"head_dim": 8},
    "SeedOssForCausalLM": {
        "residual_dropout": 0.0, "attention_dropout": 0.0, "head_dim": 8,
    },
    "MistralForCausalLM": {"sliding_window": None},
    "GPT2LMHeadModel": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "GPTNeoXForCausalLM": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "OPTForCausalLM": {"dropout": 0.0, "word_embed_proj_dim": 32, "ffn_dim": 48},
    "Gemma2ForCausalLM": {"head_dim": 8, "final_logit_softcapping": None},
    "Qwen3MoeForCausalLM": {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
    "DeepseekV3ForCausalLM": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}  # fmt: skip


def make(name, **more):
    """A model in training mode, in fp32, whose norms and biases are not those of the start."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    like_bert = "bert" in name.lower() or "Electra" in name
    sizes = SIZES | (NO_DROPOUT if like_bert else {})
    if "Causal" in name:
        sizes = sizes | {"num_key_value_heads": 2}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = kind.config_class(**sizes | OF_CLASS.get(name, {}) | more)
    model = kind(config).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def batch(padded=False, labels=True):
    """Two sentences; with padding the first one is shorter."""
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    found = {"input_ids": ids}
    if padded:
        mask = torch.ones_like(ids)
        mask[0, 5:] = 0
        found |= {"attention_mask": mask, "input_ids": ids * mask}
    if labels:
        target = torch.randint(0, VOCABULARY, ids.shape)
        target[torch.rand(ids.shape) < 0.4] = -100
        found["labels"] = target
    return found


def results(model, inputs):
    """The loss, or a function of the logits, and all gradients by name."""
    model.zero_grad()
    out = model(**inputs)
    loss = out.logits.sin().sum() if out.loss is None else out.loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | grads


def assert_same(got, want, tolerance=1e-5):
    """Relative to each tensor's scale; a key's bias changes no softmax, so its gradient is 0."""
    assert got.keys() == want.keys()
    largest = max(w.abs().max() for w in want.values())
    for name, tensor in want.items():
        scale = max(tensor.abs().max(), 1e-2 * largest)
        error = (got[name] - tensor).abs().max()
        assert error <= tolerance * scale, f"{name}: error {error:.3g}, scale {scale:.3g}"
