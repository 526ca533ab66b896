"""What is measured: sizes and counts of runs. They do not depend on the machine."""

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from deepfast.clock import Clock, on_cpu

RECIPE = "phrases-dlcl30"
"""The recipe of the trained model."""
TWIN = ("model.encoder_connection=residual", "model.norm=post")
"""What the model that it is compared with changes."""


class Size(NamedTuple):
    """Of a step of an encoder: sentences, tokens of each, and D; heads of 64, and F = 4 D."""

    batch: int
    length: int
    dim: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def sizes(self) -> tuple[int, int, int]:
        """D, heads and F."""
        return self.dim, max(1, self.dim // 64), 4 * self.dim


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes. The defaults are those of a report, about 7 minutes on 2 slow cores."""

    depths: tuple[int, ...] = (6, 30, 60, 100)
    """Layers of the encoders that are compared."""
    step: Size = field(default=Size(16, 32, 256))
    """Of their steps."""
    compile_up_to: int = 0
    """The most layers of a stack that is also measured with the loop of adds under
    `torch.compile`. The time that compiling takes grows with the square of the depth."""
    rounds: int = 3
    """Timed runs of every variant, in turns."""
    cpu_time: bool = False
    """Whether the time of the processor is measured, which other work disturbs less."""
    mixing_depths: tuple[int, ...] = (12, 24, 48, 96)
    """Layers of the stacks whose connection is measured alone."""
    mixing: tuple[int, int] = (256, 128)
    """T and D of these stacks."""
    mixing_forward: bool = False
    """Whether their forward is also measured alone, without autograd."""
    memory: Size = field(default=Size(32, 32, 128))
    """Of the steps where recompute policies are measured. With few tokens for their width,
    gradients would hide what the policies save."""
    policy_depth: int = 60
    """Layers of the encoder whose policies are timed; one of ``depths``."""
    training: bool = True
    """Whether to train."""
    overrides: tuple[str, ...] = (
        "model.dim=64", "model.num_heads=2", "model.ffn_dim=256", "model.dropout=0.0",
        "optim.lr=4e-3", "optim.warmup=80", "data.max_tokens=500", "data.test_size=300",
    )  # fmt: skip
    """key=value for both recipes."""
    steps: int = 450
    """Optimizer steps of the trained model."""
    twin_steps: int = 150
    """Optimizer steps of the model it is compared with."""

    @property
    def clock(self) -> Clock:
        """Measures one run."""
        return partial(on_cpu, now=time.process_time) if self.cpu_time else on_cpu


DEFAULT = Settings()

FULL = replace(
    DEFAULT, step=Size(64, 32, 256), memory=Size(64, 32, 256), mixing=(1024, 128), overrides=(),
    steps=500, twin_steps=200,
)  # fmt: skip
"""Larger sizes."""

QUICK = replace(
    DEFAULT, depths=(2, 4, 8), step=Size(8, 8, 32), rounds=2, mixing_depths=(2, 4),
    mixing=(16, 32), memory=Size(32, 8, 32), policy_depth=8,
    overrides=(
        "model.dim=32", "model.num_heads=2", "model.ffn_dim=64", "model.encoder_layers=6",
        "model.decoder_layers=1", "data.train_size=600", "data.dev_size=30", "data.test_size=30",
        "data.vocab_size=250",
    ),
    steps=20, twin_steps=10,
)  # fmt: skip
"""Small sizes for a look at the page, or for a test; the numbers mean nothing."""
