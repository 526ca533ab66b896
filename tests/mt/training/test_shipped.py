"""The shipped recipes: their commands, and the settings of the papers that they follow."""

import importlib.resources
import shlex
from dataclasses import asdict

import pytest
import torch

from deepfast.mt.models import build
from deepfast.mt.training import load_recipe, recipe_names

FILES = ["data.train_source=a.en", "data.train_target=a.de", "data.dev_source=b.en",
         "data.dev_target=b.de"]  # fmt: skip


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_load(name):
    recipe = load_recipe(name, [] if name.startswith("phrases") else FILES)
    assert recipe.output == f"runs/{name}"
    recipe.model_config(vocab_size=100)


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_have_summary_and_command_on_top(name):
    file = importlib.resources.files("deepfast.mt") / "recipes" / f"{name}.yaml"
    summary, command, *_ = file.read_text("utf-8").splitlines()
    assert summary == f"# {recipe_names()[name]}"
    assert summary.endswith(".")
    assert command.startswith(f"#     deepfast train {name}")


def commands(name):
    """The words after `deepfast train NAME` of every command in a recipe's comments."""
    file = importlib.resources.files("deepfast.mt") / "recipes" / f"{name}.yaml"
    for line in file.read_text("utf-8").splitlines():
        words = shlex.split(line.removeprefix("#     ")) if line.startswith("#     ") else []
        if words[:2] == ["deepfast", "train"]:
            assert words[2] == name
            yield words[3:]


@pytest.mark.parametrize("name", recipe_names())
def test_every_command_in_a_recipe_s_comments_loads(name):
    loaded = [load_recipe(name, words) for words in commands(name)]
    # The commands may run at the same time.
    assert len({recipe.output for recipe in loaded}) == len(loaded) >= 1


# Wang et al. 2019: peak, warm-up, betas, dropout of attention and ReLU, encoder layers, connection,
# what the decoder reads, batches of 4,096 tokens in a step, steps.
WANG = {
    "transformer-base": (7e-4, 4000, (0.9, 0.98), 0.0, 6, "residual", "top", 8, 100_000),
    "transformer-pre": (1e-3, 8000, (0.9, 0.997), 0.1, 6, "residual", "top", 8, 100_000),
    "transformer-big": (5e-4, 4000, (0.9, 0.98), 0.0, 6, "residual", "top", 8, 300_000),
    "transformer-big-pre": (7e-4, 8000, (0.9, 0.997), 0.1, 6, "residual", "top", 8, 300_000),
    "transparent16": (2e-3, 16000, (0.9, 0.997), 0.1, 16, "residual", "transparent", 16, 50_000),
    "dlcl30": (2e-3, 16000, (0.9, 0.997), 0.1, 30, "dlcl", "top", 16, 50_000),
    "denseformer30": (2e-3, 16000, (0.9, 0.997), 0.1, 30, "denseformer", "top", 16, 50_000),
}
"""Both sides of dlcl30 are joined by DLCL; the rest of the rows has a residual decoder."""


def test_the_settings_of_wang_2019():
    seen = {}
    for name in ("transformer-base", "dlcl30"):
        for words in commands(name):
            recipe = load_recipe(name, words)
            optim, model = recipe.optim, recipe.model_config(vocab_size=100)
            assert (optim.label_smoothing, recipe.train.average_last) == (0.1, 5)
            assert model.attention_dropout == model.activation_dropout
            assert model.decoder_layers == 6
            both = recipe.output == "runs/dlcl30"
            assert model.decoder_connection == ("dlcl" if both else "residual")
            assert (optim.eps, optim.clip_norm, recipe.data.max_tokens) == (1e-8, None, 4096)
            big = "big" in recipe.output
            assert (model.dim, model.dropout) == ((1024, 0.3) if big else (512, 0.1))
            assert model.norm == ("pre" if model.attention_dropout else "post")
            seen[recipe.output.removeprefix("runs/")] = (
                optim.lr, optim.warmup, optim.betas, model.attention_dropout, model.encoder_layers,
                model.encoder_connection, model.cross_attention, optim.accumulate,
                recipe.train.max_steps,
            )  # fmt: skip
    assert seen == WANG


PAPERS = {
    # Wang et al. 2018, section 4.2; 160,000 pairs in batches of 80, then of 32.
    "layer-fusion": {
        "data.vocab_size": 8389, "data.target_vocab_size": 6428, "data.max_length": 100,
        "model.dim": 256, "model.ffn_dim": 1024, "model.encoder_layers": 3,
        "model.decoder_layers": 3, "model.encoder_connection": "residual",
        "model.decoder_connection": "residual", "model.norm": "post", "model.init": "fan_in",
        "model.share_embeddings": "none", "model.dropout": 0.1, "model.encoder_fusion": None,
        "model.decoder_fusion": "attention", "model.fusion.hops": 6,
        "model.fusion.attention_dim": 1024, "model.fusion.hidden_dim": 512,
        "optim.lr": 4.94e-4, "optim.warmup": 16_000, "optim.schedule": "inverse_sqrt",
        "optim.betas": [0.9, 0.98], "optim.eps": 1e-9, "optim.clip_norm": None,
        "optim.label_smoothing": 0.0, "optim.accumulate": 5, "optim.restart_step": 80_000,
        "optim.restart_lr": 5e-5, "optim.restart_accumulate": 2, "train.max_steps": 180_000,
    },
    # Zhou et al. 2016, sections 4.2 and 4.3.
    "fflstm": {
        "model.dim": 512, "model.embedding_dim": 256, "model.encoder_layers": 9,
        "model.decoder_layers": 7, "model.columns": 2, "model.attention": True,
        "model.fast_forward": True, "model.bidirectional": True, "model.bias": True,
        "model.dropout": 0.1, "model.init_std": 0.07, "model.lr_scale": 0.08,
        "optim.lr": 5e-4, "optim.schedule": "constant", "optim.weight_decay": 2.0,
        "optim.l2": 0.0, "optim.clip_norm": None, "optim.label_smoothing": 0.0,
    },
    # The command of the authors of Li et al. 2020, and the defaults of their code.
    "latent": {
        "model.dim": 512, "model.heads": 4, "model.ffn_dim": 1024, "model.encoder_layers": 12,
        "model.decoder_layers": 24, "model.encoder_connection": "residual",
        "model.decoder_connection": "latent", "model.norm": "post", "model.norm_kind": "layer",
        "model.share_embeddings": "decoder", "model.dropout": 0.3, "model.attention_dropout": 0.3,
        "model.activation_dropout": 0.0, "model.latent.tau": 5.0, "model.latent.hard": True,
        "model.latent.soft_steps": 500, "model.latent.anneal_steps": 5000,
        "model.latent.prior": "uniform", "model.latent.kl_weight": 4.17e-3,
        "model.latent.entropy_weight": 0.1, "model.latent.target_layers": 12,
        "model.latent.target_weight": 0.1, "optim.lr": 1.5e-3, "optim.warmup": 8000,
        "optim.schedule": "inverse_sqrt", "optim.betas": [0.9, 0.98], "optim.eps": 1e-6,
        "optim.clip_norm": 1.0, "optim.label_smoothing": 0.1, "optim.accumulate": 8,
        "data.max_tokens": 4096,
    },
    # Wu et al. 2019, section 3.1: big, with the optimizer and the rate of Vaswani et al. 2017.
    "growing-big": {
        "model.dim": 1024, "model.heads": 16, "model.ffn_dim": 4096, "model.encoder_layers": 6,
        "model.decoder_layers": 6, "model.encoder_connection": "residual",
        "model.decoder_connection": "residual", "model.norm": "post",
        "model.share_embeddings": "all", "model.dropout": 0.3,
        "grow.model.top_encoder_layers": 2, "grow.model.top_decoder_layers": 2,
        "optim.lr": 4.94e-4, "optim.warmup": 4000, "optim.schedule": "inverse_sqrt",
        "optim.betas": [0.9, 0.98], "optim.eps": 1e-9, "optim.clip_norm": None,
        "optim.label_smoothing": 0.1, "data.vocab_size": 32_000,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PAPERS)
def test_the_settings_of_the_papers(name):
    recipe = load_recipe(name, next(commands(name)))
    values = recipe.to_dict() | {"model": asdict(recipe.model_config(vocab_size=100))}
    seen = {}
    for key in PAPERS[name]:
        value = values
        for part in key.split("."):
            value = value[part]
        seen[key] = value
    assert seen == PAPERS[name]


@pytest.mark.parametrize(
    ("changes", "millions"),
    [
        ("decoder_fusion=null fusion=null", 10.97),
        ("decoder_fusion=null fusion=null encoder_layers=4 decoder_layers=4", 12.82),
        ("decoder_fusion=null fusion=null encoder_layers=6 decoder_layers=6", 16.50),
        ("decoder_fusion=average fusion.hops=null", 10.97),
        ("decoder_fusion=null encoder_fusion=feed_forward fusion.hops=null", 11.63),
        ("encoder_fusion=feed_forward decoder_fusion=feed_forward fusion.hops=null", 12.29),
        ("decoder_fusion=null encoder_fusion=attention fusion.hops=4", 11.90),
        ("decoder_fusion=null encoder_fusion=attention fusion.hops=6", 12.16),
        ("fusion.hops=4", 11.90),
        ("encoder_fusion=attention fusion.hops=4", 12.82),
        ("encoder_fusion=feed_forward fusion.hops=4", 12.55),
    ],
)
def test_the_parameters_of_layer_fusion(changes, millions):
    """Table 2 of Wang et al. 2018; here the output has no biases, 0.006 million."""
    words = [f"model.{change}" for change in changes.split()]
    recipe = load_recipe("layer-fusion", [*FILES, *words])
    config = recipe.model_config(
        recipe.data.vocab_size, target_vocab_size=recipe.data.target_vocab_size
    )
    with torch.device("meta"):
        model = build(config)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    assert count == pytest.approx(millions, abs=0.01)
