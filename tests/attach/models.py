"""The small models of all tests of `connect` and `patch`, with random weights, and how to connect,
run and compare them."""

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

X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh()


def every(blocks, x, call=lambda block, x: block(x)):
    for block in blocks:
        x = call(block, x)
    return x


def does(forward, base=Block):
    """A class of layers with another forward."""
    return type("Does", (base,), {"forward": forward})


class Loop(nn.Module):
    """A parent whose forward is ``run(blocks, x)``."""

    def __init__(self, run=every, layers=L, layer=Block):
        super().__init__()
        self.run = run
        self.blocks = nn.ModuleList(layer() for _ in range(layers))

    def forward(self, x):
        return self.run(self.blocks, x)


class Outer(nn.Module):
    """Loops over the layers of a module whose forward it never calls."""

    def __init__(self, encoder=None):
        super().__init__()
        self.encoder = encoder or Loop()

    def forward(self, x):
        return every(self.encoder.blocks, x)


class CallsItself(Loop):
    def forward(self, x, again=True):
        return super().forward(self(x, False) if again else x)


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
    "vocab_size": VOCAB, "hidden_size": D, "d_model": D, "word_embed_proj_dim": D, "head_dim": 8,
    "intermediate_size": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "ffn_dim": 48,
    "d_kv": 8, "d_ff": 48, "num_hidden_layers": L, "num_layers": L, "encoder_layers": L,
    "decoder_layers": L, "num_attention_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "max_position_embeddings": 32, "image_size": 8, "patch_size": 4,
    "num_labels": 5, "num_mel_bins": 8, "max_source_positions": 10, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    "decoder_start_token_id": 0, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "final_logit_softcapping": None, "reference_compile": False,
}  # fmt: skip
"""Each class takes those that it knows."""
DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "dropout_rate", "resid_pdrop",
    "embd_pdrop", "attn_pdrop", "hidden_dropout", "attention_dropout",
)  # fmt: skip


def fresh(name, **more):
    """A model of Hugging Face transformers at its start, in training mode."""
    kind = getattr(pytest.importorskip("transformers"), name)
    keys = {"num_key_value_heads": 2} if "Causal" in name else {}
    config = kind.config_class(**SIZES | dict.fromkeys(DROPOUTS, 0.0) | keys | more)
    return kind(config).train()


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
    """A kind of model."""

    make: Callable[[], nn.Module]
    norm: str
    parents: tuple[str, ...]
    """Path of each parent and, after a colon, the name of its list."""
    run: Callable[[nn.Module], torch.Tensor]
    """The model's output, from inputs that are always the same."""

    def places(self, model):
        """Each parent, and the name of its list."""
        for place in self.parents:
            path, _, layers = place.partition(":")
            yield model.get_submodule(path), layers

    def connect(self, model, **options):
        """The connections; they begin with their initial values."""
        options = {"norm": self.norm} | options
        return [deepfast.connect(p, layers or None, **options) for p, layers in self.places(model)]

    def connected(self, **options):
        """A connected model with random parameters, always the same."""
        torch.manual_seed(0)
        model = perturbed(self.make())
        for module in model.modules():
            if hasattr(module, "config"):
                module.config.use_cache = False
        for made in self.connect(model, **options):
            perturbed(made)
        return model

    def disconnect(self, model):
        for parent, _ in self.places(model):
            deepfast.disconnect(parent)

    def connections(self, model):
        return [parent._modules[NAME] for parent, _ in self.places(model)]

    def layers(self, model):
        return [m for parent, name in self.places(model) for m in parent.get_submodule(name)]


def ids(rows=2, length=7, seed=1):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


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


def _numbers(model, *shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator).to(next(model.parameters()).dtype)


def _text(model):
    """The logits of two sentences, of which the second one ends with padding."""
    mask = torch.ones_like(ids())
    mask[1, -2:] = 0
    config = getattr(model, "module", model).config  # DDP wraps a model.
    more = {"decoder_input_ids": ids(seed=2)} if config.is_encoder_decoder else {}
    return model(input_ids=ids() * mask, attention_mask=mask, **more).logits


def _image(model):
    out = model(_numbers(model, 8, 3, 8, 8))
    return out if isinstance(out, torch.Tensor) else out.logits


def _vectors(model):
    return model(_numbers(model, 2, 7, D))


def _sound(model):
    return model(_numbers(model, 2, 8, 20)).last_hidden_state


def _hf(name, *parents, norm="pre", run=_text, **more):
    return Case(lambda: fresh(name, **more), norm, parents, run)


CASES = {
    "torch post-norm": Case(torch_encoder, "post", (":layers",), _vectors),
    "torch pre-norm": Case(lambda: torch_encoder(True), "pre", (":layers",), _vectors),
    "sequential": Case(lambda: nn.Sequential(Block(), Block(), Block()), "pre", (":",), _vectors),
    "below": Case(Outer, "pre", (":encoder.blocks",), _vectors),
    "twice": Case(CallsItself, "pre", (":blocks",), _vectors),
    "timm": Case(_timm, "pre", (":blocks",), _image),
    "bert": _hf("BertForMaskedLM", "bert.encoder:layer", norm="post"),
    "modernbert": _hf(
        "ModernBertForMaskedLM", "model:layers", local_attention=8, global_attn_every_n_layers=3
    ),
    "bart": _hf(
        "BartForConditionalGeneration", "model.encoder:layers", "model.decoder:layers", norm="post"
    ),
    "t5": _hf("T5ForConditionalGeneration", "encoder:block", "decoder:block"),
    "llama": _hf("LlamaForCausalLM", "model:layers"),
    "vit": _hf("ViTForImageClassification", "vit:layers", run=_image),
    "whisper": Case(lambda: fresh("WhisperModel").get_encoder(), "pre", (":layers",), _sound),
    "gpt2": _hf("GPT2LMHeadModel", "transformer:h"),
    "gpt_neox": _hf("GPTNeoXForCausalLM", "gpt_neox:layers"),
    "neox, one by one": _hf("GPTNeoXForCausalLM", "gpt_neox:layers", use_parallel_residual=False),
    "gemma2": _hf("Gemma2ForCausalLM", "model:layers"),
}
UNKNOWN = "sequential", "below", "twice"
SUBLAYERS = [n for n, case in CASES.items() if case.norm == "pre" and n not in UNKNOWN]
"""Those whose sublayers are known."""
READS = {"connection": "attnres", "sublayers": "auto"}
GATED = READS | {"additive": "gated"}


def batch(padded=False):
    """Two sentences with labels; with padding the first one is shorter."""
    words = torch.randint(3, VOCAB, (2, LENGTH))
    found = {"input_ids": words}
    if padded:
        mask = torch.ones_like(words)
        mask[0, 5:] = 0
        found |= {"attention_mask": mask, "input_ids": words * mask}
    target = torch.randint(0, VOCAB, words.shape)
    target[torch.rand(words.shape) < 0.4] = -100
    return found | {"labels": target}


def of_loss(model, loss):
    """The loss, and all its gradients by name."""
    model.zero_grad()
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | grads


def gradients(model, *outputs):
    """Of the outputs' mean squares, by name, with the first output."""
    found = of_loss(model, sum(out.square().mean() for out in outputs))
    return found | {"output": outputs[0].detach()}


def outcome(model, *outputs):
    """With numbers that are drawn after the step: dropout has drawn the same number of them."""
    return gradients(model, *outputs) | {"random": torch.rand(3)}


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
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def assert_same(got, want, tolerance=1e-5):
    """Up to rounding in float32, relative to each tensor's scale; a key's bias changes no softmax,
    so its gradient is 0."""
    assert got.keys() == want.keys()
    largest = max(w.abs().max() for w in want.values())
    for name, tensor in want.items():
        scale = max(tensor.abs().max(), 1e-2 * largest)
        error = (got[name] - tensor).abs().max()
        assert error <= tolerance * scale, f"{name}: error {error:.3g}, scale {scale:.3g}"
