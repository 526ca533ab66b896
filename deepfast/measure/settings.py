"""What a report measures: sizes, budgets and what may be left out."""

import time
from dataclasses import dataclass, replace

SHARES = {"sweep": 0.36, "mixing": 0.08, "memory": 0.10, "compiled": 0.04, "training": 0.30,
          "twin": 0.10, "translation": 0.02}  # fmt: skip
"""Part of the report -> share of its time; what a part leaves goes to those after it."""

RESERVE_SECONDS = 6.0
"""For drawing the pictures and writing the page."""


@dataclass(kw_only=True)
class Settings:
    """Sizes and budgets of a report."""

    minutes: float = 6.2
    """Wall time of the whole report."""
    depths: tuple[int, ...] = (6, 30, 60, 100)
    """Layers of the encoders that are compared."""
    batch: int = 64
    """Sentences of a step."""
    length: int = 32
    """Tokens of a sentence."""
    dim: int = 256
    """D."""
    heads: int = 4
    """H."""
    ffn_dim: int = 1024
    """F."""
    rounds: int = 5
    """Timed runs of a variant, where they are affordable."""
    memory_bytes: int | None = None
    """Memory a step may take; None: what the machine has free."""
    mixing: tuple[tuple[int, tuple[str, ...]], ...] = (
        (60, ("deepfast", "DenseFormer form", "loop of adds")),
        (100, ("deepfast", "stack and sum", "DenseFormer form")),
    )
    """Depths and forms of the mixing on its own, the most wanted forms first."""
    memory: bool = True
    """Whether to measure the memory policies."""
    memory_batch: int = 32
    """Sentences of a step there."""
    memory_dim: int = 128
    """D there, heads of 64 and F = 4 D: small, since five policies take turns, and with many tokens
    for its width, as in training, or gradients would hide what the policies save."""
    policy_depth: int = 60
    """Layers of the encoder whose policies are timed, or the nearest of ``depths`` below it."""
    held_depths: tuple[int, ...] = (6, 30)
    """Layers of the small models that hold the closed forms to measurement."""
    compiled: bool = True
    """Whether to try the loop of adds under torch.compile."""
    training: bool = True
    """Whether to train at all."""
    recipe: str = "phrases-dlcl30"
    """Recipe of the model that is trained."""
    twin: str = "phrases-postnorm30"
    """Recipe of the model it is compared with."""
    overrides: tuple[str, ...] = ()
    """key=value for both recipes."""
    sentences: int = 300
    """Test sentences to translate, at most."""
    beam: int = 4
    """Hypotheses of the beam search."""
    seed: int = 1
    """Of parameters and inputs of the sweep."""

    def __post_init__(self):
        if not 0 < self.minutes < float("inf"):
            raise ValueError(f"--minutes: expected a number above 0, got {self.minutes}")
        if self.rounds < 1:
            raise ValueError(f"--rounds: expected at least 1, got {self.rounds}")
        if not self.depths or min(self.depths) < 1:
            raise ValueError(f"--depths: expected layers, each at least 1, got {self.depths}")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ValueError(f"--memory-gib: expected a number above 0, got {self.memory_bytes}")
        self.depths = tuple(sorted(set(self.depths)))

    @property
    def tokens(self) -> int:
        """T, of a step."""
        return self.batch * self.length

    @property
    def memory_tokens(self) -> int:
        """T of a step where memory policies are measured."""
        return self.memory_batch * self.length

    @property
    def state_bytes(self) -> int:
        """One state in float32."""
        return self.tokens * self.dim * 4


def quick(settings: Settings) -> Settings:
    """Small sizes for a look at the page, or for a test: half a minute, numbers without worth."""
    forms = ("deepfast", "stack and sum", "DenseFormer form")
    small = ("model.dim=32", "model.heads=2", "model.ffn_dim=64", "model.encoder_layers=6",
             "model.decoder_layers=1", "data.train_size=600", "data.dev_size=30",
             "data.test_size=30", "data.vocab_size=250", "train.log_every=1",
             "train.validate_every=10")  # fmt: skip
    return replace(
        settings,
        minutes=min(settings.minutes, 0.6),
        depths=(2, 4, 8),
        batch=8,
        length=8,
        dim=32,
        heads=2,
        ffn_dim=64,
        rounds=2,
        mixing=((8, forms),),
        memory_batch=32,
        memory_dim=32,
        policy_depth=8,
        held_depths=(2,),
        compiled=False,
        overrides=small,
        sentences=6,
    )


class Budget:
    """Wall time, handed out part by part so that the whole never runs over."""

    def __init__(self, seconds: float, skipped: frozenset[str] = frozenset()):
        self.began = time.perf_counter()
        self.seconds = seconds
        self.open = {part: share for part, share in SHARES.items() if part not in skipped}
        self.spent: dict[str, float] = {}

    @property
    def left(self) -> float:
        """Seconds until the report has to be written."""
        return self.began + self.seconds - RESERVE_SECONDS - time.perf_counter()

    def start(self, part: str) -> "Deadline":
        """The time of a part: its share of what is left for it and the parts after it."""
        total = sum(self.open.values())
        share = self.open.pop(part)
        return Deadline(max(0.0, self.left * share / total), part, self)


class OutOfTime(Exception):
    """A run went on beyond its deadline and was stopped."""


class Deadline:
    """The end of one part of the report; as a context it notes what the part took."""

    def __init__(self, seconds: float, part: str = "", budget: Budget | None = None):
        self.began = time.perf_counter()
        self.seconds, self.part, self.budget = seconds, part, budget

    @property
    def left(self) -> float:
        return self.began + self.seconds - time.perf_counter()

    def check(self) -> None:
        """Raises OutOfTime when the time is up."""
        if self.left < 0:
            raise OutOfTime(f"stopped after {self.seconds:.2g} s, its time budget")

    def __enter__(self) -> "Deadline":
        return self

    def __exit__(self, *error: object) -> None:
        if self.budget is not None:
            self.budget.spent[self.part] = time.perf_counter() - self.began
