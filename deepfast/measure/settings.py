"""What is measured: sizes and counts of runs. They do not depend on the machine."""

import time
from dataclasses import dataclass, replace
from functools import partial

from deepfast.clock import Clock, on_cpu

RECIPE = "phrases-dlcl30"
"""The recipe of the trained model."""
TWIN = ("model.encoder_connection=residual", "model.norm=post")
"""What the model that it is compared with changes."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes. The defaults are those of a report, about 7 minutes on 2 slow cores."""

    depths: tuple[int, ...] = (6, 30, 60, 100)
    """Layers of the encoders that are compared."""
    batch: int = 16
    """Sentences of a step."""
    length: int = 32
    """Tokens of a sentence."""
    dim: int = 256
    """D."""
    num_heads: int = 4
    """H."""
    ffn_dim: int = 1024
    """F."""
    compile_up_to: int = 0
    """The most layers of a stack that is also measured with the loop of adds under
    `torch.compile`. The time that compiling takes grows with the square of the depth."""
    rounds: int = 3
    """Timed runs of every variant, in turns."""
    cpu_time: bool = False
    """Whether the time of the processor is measured, which other work disturbs less."""
    mixing_depths: tuple[int, ...] = (12, 24, 48, 96)
    """Layers of the stacks whose connection is measured alone."""
    mixing_tokens: int = 256
    """T of these stacks."""
    mixing_dim: int = 128
    """D of these stacks."""
    mixing_forward: bool = False
    """Whether their forward is also measured alone, without autograd."""
    memory_batch: int = 32
    """Sentences of a step where recompute policies are measured."""
    memory_dim: int = 128
    """D of these steps, with heads of 64 and F = 4 D. With few tokens for its width, gradients
    would hide what the policies save."""
    policy_depth: int = 60
    """Layers of the encoder whose policies are timed; one of ``depths``."""
    training: bool = True
    """Whether to train."""
    overrides: tuple[str, ...] = (
        "model.dim=64", "model.num_heads=2", "model.ffn_dim=256", "model.dropout=0.0",
        "optim.lr=4e-3", "optim.warmup=80", "data.max_tokens=500",
    )  # fmt: skip
    """key=value for both recipes."""
    steps: int = 450
    """Optimizer steps of the trained model."""
    twin_steps: int = 150
    """Optimizer steps of the model it is compared with."""
    sentences: int = 300
    """Test sentences to translate."""

    @property
    def tokens(self) -> int:
        """T, the tokens of a step."""
        return self.batch * self.length

    @property
    def clock(self) -> Clock:
        """Measures one run."""
        return partial(on_cpu, now=time.process_time) if self.cpu_time else on_cpu

    @property
    def memory_tokens(self) -> int:
        """T of a step in the measurements of recompute policies."""
        return self.memory_batch * self.length

    @property
    def state_bytes(self) -> int:
        """The bytes of one state in float32."""
        return self.tokens * self.dim * 4


DEFAULT = Settings()

FULL = replace(
    DEFAULT, batch=64, memory_batch=64, memory_dim=256, overrides=(), steps=500, twin_steps=200,
    mixing_tokens=1024,
)  # fmt: skip
"""Larger sizes."""

QUICK = replace(
    DEFAULT, depths=(2, 4, 8), batch=8, length=8, dim=32, num_heads=2, ffn_dim=64, rounds=2,
    mixing_depths=(2, 4), mixing_tokens=16, mixing_dim=32, memory_dim=32, policy_depth=8,
    sentences=6,
    overrides=(
        "model.dim=32", "model.num_heads=2", "model.ffn_dim=64", "model.encoder_layers=6",
        "model.decoder_layers=1", "data.train_size=600", "data.dev_size=30", "data.test_size=30",
        "data.vocab_size=250",
    ),
    steps=20, twin_steps=10,
)  # fmt: skip
"""Small sizes for a look at the page, or for a test; the numbers mean nothing."""
