"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(kw_only=True)
class TrainResult:
    """How a run ended."""

    output: Path
    """The folder of checkpoints and metrics."""
    step: int
    """Optimizer steps done."""
    stopped: str
    """"max_steps", "max_minutes", "patience", or one of `SIGNALS`."""
    seconds: float
    """Wall time, including the time before resuming."""
    checkpoint: Path | None
    """The newest checkpoint, from which a run resumes."""
    best: Path | None
    """The checkpoint with the lowest dev NLL of all validations in this folder."""
    best_nll: float | None
    """Its dev NLL, nats per target token."""
    average: Path | None
    """The average of the last checkpoints, to translate with; no run can resume from it."""
    average_nll: float | None
    """Its dev NLL, nats per target token."""
    test_bleu: float | None
    """BLEU of the test part, 0 to 100; with several languages their mean."""

    @property
    def for_translation(self) -> Path:
        """The average or the best checkpoint: the one with the lower dev NLL."""
        if self.average is not None and (
            self.best is None or (self.average_nll is not None and self.average_nll < self.best_nll)
        ):
            return self.average
        return self.best or self.checkpoint
