"""The rows of the table: what each row changes in the recipe that all rows share."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepfast.mt.data.text import read_parallel, write_lines
from deepfast.mt.training import load_recipe

BASE = "phrases-systems"

LARGE = (
    "data.train_size=200000", "data.vocab_size=4000", "data.max_tokens=16000", "model.dim=512",
    "model.num_heads=8", "model.ffn_dim=2048", "model.encoder_layers=30", "model.decoder_layers=6",
    "optim.warmup=1000", "train.max_steps=4000", "train.validate_every=250",
    "train.save_every=500", "train.log_every=100", "train.device=cuda", "train.precision=bfloat16",
)  # fmt: skip
"""The larger setting, for a GPU."""

HELD_OUT = 500
"""How many pairs are held out of two text files, for each of dev and test."""


@dataclass(frozen=True)
class Row:
    """One system."""

    name: str
    """The name of its folder, and for ``--rows``."""
    title: str
    """The system's name in the table."""
    source: str
    """The paper."""
    overrides: tuple[str, ...] = ()
    """key=value, on top of the shared recipe."""
    grows: bool = False
    """Trained in two stages: two thirds of the layers for half the steps, then all."""
    recipe: str = BASE
    """The recipe of another kind of model: this row takes its model and rates, the rest is
    shared."""
    large: tuple[str, ...] = ()
    """key=value on top of such a recipe in the larger setting."""

    def settings(self, shared: Sequence[str]) -> list[str]:
        """All overrides of a run; every row has those of ``shared``."""
        overrides = [*shared, *self.overrides]
        if self.recipe != BASE:
            plain = load_recipe(BASE, shared).to_dict()
            common = [f"{section}.{key}={json.dumps(value)}" for section in ("data", "train")
                      for key, value in plain[section].items()]  # fmt: skip
            larger = self.large if set(LARGE) <= set(shared) else ()
            overrides = [*common, *self.overrides, *larger]
        if self.grows:
            recipe = load_recipe(BASE, overrides)
            model, steps = recipe.model_config(vocab_size=8), recipe.train.max_steps
            for side in ("encoder", "decoder"):
                layers = getattr(model, f"{side}_layers")
                top = max(1, layers // 3)
                overrides += [f"model.{side}_layers={max(1, layers - top)}",
                              f"grow.model.top_{side}_layers={top}"]  # fmt: skip
            first = -(-steps // 2)
            overrides += [f"train.max_steps={first}", f"grow.train.max_steps={steps - first}"]
        return overrides


def _plain(norm: str) -> tuple[str, ...]:
    return ("model.encoder_connection=residual", f"model.norm={norm}")


ROWS = (
    Row("post-norm", "post-norm", "Vaswani 2017", _plain("post")),
    Row("pre-norm", "pre-norm", "Wang 2019", _plain("pre")),
    # As in the paper, encoder and decoder are connected.
    Row(
        "dlcl-post", "DLCL, post-norm", "Wang 2019",
        ("model.norm=post", "model.decoder_connection=dlcl"),
    ),
    Row("dlcl-pre", "DLCL, pre-norm", "Wang 2019", ("model.decoder_connection=dlcl",)),
    Row(
        "transparent", "transparent attention, pre-norm", "Bapna 2018",
        (*_plain("pre"), "model.cross_attention=transparent"),
    ),
    Row(
        "denseformer", "DenseFormer, pre-norm", "Pagliardini 2024",
        ("model.encoder_connection=denseformer",),
    ),
    Row(
        "attnres", "attention residuals, full", "Kimi Team 2026",
        ("model.encoder_connection=attnres",),
    ),
    Row(
        "block-attnres", "attention residuals, blocks of 3", "Kimi Team 2026",
        ("model.encoder_connection=block_attnres", "model.attnres_block=3"),
    ),
    Row("mudd", "MUDD, pre-norm", "Xiao 2025", ("model.encoder_connection=mudd",)),
    *(
        Row(
            f"fusion-{kind.replace('_', '-')}", f"layer fusion, {kind.replace('_', ' ')}",
            "Wang 2018",
            (*_plain("post"), f"model.encoder_fusion={kind}", f"model.decoder_fusion={kind}",
             *sizes),
        )
        for kind, sizes in (
            ("average", ()),
            ("feed_forward", ("model.fusion.hidden_dim=192",)),
            ("attention", ("model.fusion.attention_dim=192", "model.fusion.hidden_dim=192")),
            ("channel_attention", ("model.fusion.attention_dim=192",)),
        )
    ),
    Row(
        "latent", "latent depth, 12 layers to choose from", "Li 2020",
        ("model.encoder_connection=latent", "model.latent.target_layers=8",
         "model.latent.target_weight=0.1", "model.latent.hard=true", "model.latent.soft_steps=60",
         "model.latent.anneal_steps=60", "model.latent.lr_scale=20"),
    ),
    *(
        Row(
            name, f"fast-forward LSTM, {title}", "Zhou 2016",
            (f"model.attention={attention}", "model.dim=96"), recipe="phrases-fflstm",
            large=("model.dim=512", "model.embedding_dim=256", "model.encoder_layers=9",
                   "model.decoder_layers=7"),
        )
        for name, title, attention in (
            ("deep-att", "Deep-Att", "true"), ("deep-ed", "Deep-ED", "false"),
        )
    ),
    Row("growing", "depth growing, a third of the layers on top", "Wu 2019", _plain("pre"), True),
)  # fmt: skip
"""In the order of the table."""


def named(names: str | None) -> list[Row]:
    """The rows of a comma-separated list; all of them for None.

    Raises:
        ValueError: for an unknown name.
    """
    known = {row.name: row for row in ROWS}
    wanted = list(known) if names is None else names.split(",")
    for name in wanted:
        if name not in known:
            raise ValueError(f"--rows: expected names of {', '.join(known)}, got {name!r}")
    return [known[name] for name in wanted]


def text_files(source: Path, target: Path, folder: Path) -> tuple[str, ...]:
    """Overrides that train on two text files, with lines held out at regular distances.

    The lines held out are written into ``folder``, once.
    """
    pairs = read_parallel(source, target).pairs
    if len(pairs) < 10 * HELD_OUT:
        raise ValueError(
            f"{source}: expected at least {10 * HELD_OUT} pairs of lines, of which {HELD_OUT} are "
            f"held out for each of dev and test, got {len(pairs)}"
        )
    stride = len(pairs) // HELD_OUT
    parts: dict[str, list] = {"train": [], "dev": [], "test": []}
    for index, pair in enumerate(pairs):
        at = index % stride
        # The last part may be shorter than the others; it is only for training.
        held = index < stride * HELD_OUT
        parts["dev" if held and at == 0 else "test" if held and at == 1 else "train"].append(pair)
    folder.mkdir(parents=True, exist_ok=True)
    overrides = ["data.phrases=null"]
    for part, chosen in parts.items():
        for side, lines in zip(("source", "target"), zip(*chosen, strict=True), strict=True):
            path = folder / f"{part}.{side}"
            write_lines(path, lines)
            overrides.append(f"data.{part}_{side}={path}")
    return tuple(overrides)
