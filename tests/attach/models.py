"""The small models of all tests of `connect` and `patch`, with random weights, and how to connect,
run and compare them."""

import contextlib
import copy
import importlib.metadata
import sys
from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

import deepfast
from deepfast.attach.passes import NAME

D, L, VOCAB, LENGTH = 32, 3, 50, 9

TRANSFORMERS = 0
with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    TRANSFORMERS = int(importlib.metadata.version("transformers").partition(".")[0])

X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh()


def every(blocks, x):
    for block in blocks:
        x = block(x)
    return x


class Loop(nn.Module):
    """A parent whose forward is ``run(blocks, x)``."""

    def __init__(self, run=every, layers=L, layer=Block):
        super().__init__()
        self.run = run
        self.blocks = nn.ModuleList(layer() for _ in range(layers))

    def forward(self, x):
        return self.run(self.blocks, x)


def connected_loop(run=every, layer=Block, **options):
    """Always with the same parameters."""
    torch.manual_seed(0)
    model = perturbed(Loop(run, 4, layer))
    perturbed(deepfast.connect(model, norm="pre", **options))
    return model


def torch_encoder(norm_first=False):
    layer = nn.TransformerEncoderLayer(
        D, 2, 24, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    norm = nn.LayerNorm(D) if norm_first else None
    return nn.TransformerEncoder(layer, L, norm=norm, enable_nested_tensor=False)


SIZES = {
    "vocab_size": VOCAB, "hidden_size": D, "intermediate_size": 48, "num_hidden_layers": L,
    "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
SEQ2SEQ = {
    "d_model": D, "encoder_layers": L, "decoder_layers": L, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0,
    "decoder_start_token_id": 0, "forced_eos_token_id": 2,
}  # fmt: skip
OF_CLASS = {
    "BartForConditionalGeneration": SEQ2SEQ,
    "MarianMTModel": SEQ2SEQ,
    "ModernBertForMaskedLM": {"global_attn_every_n_layers": 1, "reference_compile": False},
    "T5ForConditionalGeneration": {
        "d_model": D, "d_kv": 8, "d_ff": 48, "num_layers": L, "num_heads": 4, "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "ViTForImageClassification": {"image_size": 8, "patch_size": 4, "num_labels": 5},
    "Phi3ForCausalLM": {"resid_pdrop": 0.0},
    "GemmaForCausalLM": {"head_dim": 8},
    "Qwen3ForCausalLM": {"head_dim": 8},
    "MinistralForCausalLM": {"head_dim": 8},
    "SeedOssForCausalLM": {"residual_dropout": 0.0, "attention_dropout": 0.0, "head_dim": 8},
    "MistralForCausalLM": {"sliding_window": None},
    "GPT2LMHeadModel": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "GPTNeoXForCausalLM": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "OPTForCausalLM": {"dropout": 0.0, "word_embed_proj_dim": D, "ffn_dim": 48},
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


def fresh(name, **more):
    """A model of Hugging Face transformers at its start, in training mode."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    num_heads = {"num_key_value_heads": 2} if "Causal" in name else {}
    return kind(kind.config_class(**SIZES | num_heads | OF_CLASS.get(name, {}) | more)).train()


def perturbed(model):
    """The model with parameters that are not at their initial values: a fresh model's layers hardly
    change the states."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in filter(lambda p: p.requires_grad, model.parameters()):
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model


def make(name, **more):
    return perturbed(fresh(name, **more))


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

    def layers(self, model):
        return [m for _, p, name in self.places(model) for m in (getattr(p, name) if name else p)]

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


class InPlace(nn.Module):
    """In place of layer k, with its attributes, in a literal loop over ``states``."""

    def __init__(self, layer, k, states, connection):
        super().__init__()
        self.inner, self.k, self.states = layer, k, states
        # Its parameters are not the layer's.
        self.connection = [connection]

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


def literal_of(case, plain, connected, kind):
    """Puts the literal loop of ``kind`` into ``plain``, with copies of the connections of
    ``connected``.

    Returns:
        The parameters by the names that they have in ``connected``.
    """
    named = {}
    for path, parent, layers in case.places(plain):
        connection = copy.deepcopy(connected.get_submodule(path)._modules[NAME])
        found, states = getattr(parent, layers) if layers else parent, []
        for k, layer in enumerate(found):
            found[k] = kind(layer, k, states, connection)
        for name, p in connection.named_parameters():
            named[".".join(filter(None, (path, NAME, name)))] = p
    return named | {name.replace(".inner.", "."): p for name, p in plain.named_parameters()}


def outcome(case, model, named):
    """The output and all gradients, by name."""
    out = case.run(model)
    out.square().mean().backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
    return {"output": out.detach(), **grads}


def _timm():
    # Some file of timm needs each of these parts of torchvision, its transformers none.
    parts = "", ".datasets", ".models.feature_extraction", ".ops.misc", ".transforms", ".utils"
    with pytest.MonkeyPatch.context() as patch:
        for part in (*parts, ".transforms.functional"):
            patch.setitem(sys.modules, f"torchvision{part}", MagicMock())
        timm = pytest.importorskip("timm")
    return timm.models.vision_transformer.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=D, depth=L, num_heads=2, num_classes=5
    )


def _hf(name, *parents, norm, run=lambda model: model(ids()).logits, **more):
    return Case(lambda: fresh(name, **more), norm, parents, run)


def _numbers(model, *shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator).to(next(model.parameters()).dtype)


def _image(model):
    out = model(_numbers(model, 8, 3, 8, 8))
    return out if isinstance(out, torch.Tensor) else out.logits


def _vectors(model):
    return model(_numbers(model, 2, 7, D))


def _seq2seq(model):
    return model(input_ids=ids(), decoder_input_ids=ids(seed=2)).logits


_SIDES = ("model.encoder:layers", "model.decoder:layers")
CASES = {
    "torch post-norm": Case(torch_encoder, "post", (":layers",), _vectors),
    "torch pre-norm": Case(lambda: torch_encoder(True), "pre", (":layers",), _vectors),
    "sequential": Case(lambda: nn.Sequential(Block(), Block(), Block()), "pre", (":",), _vectors),
    "bert": _hf("BertForMaskedLM", "bert.encoder:layer", norm="post"),
    "modernbert": _hf(
        "ModernBertForMaskedLM", "model:layers", norm="pre", local_attention=8,
        global_attn_every_n_layers=3,
    ),
    "marian": _hf("MarianMTModel", *_SIDES, norm="post", run=_seq2seq),
    "bart": _hf("BartForConditionalGeneration", *_SIDES, norm="post", run=_seq2seq),
    "t5": _hf(
        "T5ForConditionalGeneration", "encoder:block", "decoder:block", norm="pre", run=_seq2seq
    ),
    "llama": _hf("LlamaForCausalLM", "model:layers", norm="pre"),
    "vit": _hf(
        "ViTForImageClassification",
        "vit.encoder:layer" if TRANSFORMERS == 4 else "vit:layers", norm="pre", run=_image,
    ),
    "timm": Case(_timm, "pre", (":blocks",), _image),
}  # fmt: skip


def batch(padded=False, labels=True):
    """Two sentences; with padding the first one is shorter."""
    words = torch.randint(3, VOCAB, (2, LENGTH))
    found = {"input_ids": words}
    if padded:
        mask = torch.ones_like(words)
        mask[0, 5:] = 0
        found |= {"attention_mask": mask, "input_ids": words * mask}
    if labels:
        target = torch.randint(0, VOCAB, words.shape)
        target[torch.rand(words.shape) < 0.4] = -100
        found["labels"] = target
    return found


def of_loss(model, loss):
    """The loss, and all its gradients by name."""
    model.zero_grad()
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | grads


def gradients(model, *outputs):
    """Of the outputs' mean squares, by name."""
    found = of_loss(model, sum(out.square().mean() for out in outputs))
    del found["loss"]
    return found


def results(model, inputs):
    """`of_loss` of a model of transformers, or of a function of its logits."""
    out = model(**inputs)
    return of_loss(model, out.logits.sin().sum() if out.loss is None else out.loss)


class Loss(nn.Module):
    """What DDP, FSDP and torch.compile wrap for `deepfast.causal_lm_loss`."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return deepfast.causal_lm_loss(self.model, **inputs)


def assert_equal(got, wanted):
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(got[name], wanted[name]), name


def assert_same(got, want, tolerance=1e-5):
    """Up to rounding in float32, relative to each tensor's scale; a key's bias changes no softmax,
    so its gradient is 0."""
    assert got.keys() == want.keys()
    largest = max(w.abs().max() for w in want.values())
    for name, tensor in want.items():
        scale = max(tensor.abs().max(), 1e-2 * largest)
        error = (got[name] - tensor).abs().max()
        assert error <= tolerance * scale, f"{name}: error {error:.3g}, scale {scale:.3g}"
