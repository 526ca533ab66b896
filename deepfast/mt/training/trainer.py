"""One model in training: the step, the validation, and a state that resumes exactly."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from deepfast.memory.count import LiveBytes
from deepfast.memory.sizes import OPTIMIZERS
from deepfast.mt.data import Batch
from deepfast.mt.models import build, kind_of
from deepfast.mt.training.checkpoint import check_config, load_weights
from deepfast.mt.training.corpus import Corpus
from deepfast.mt.training.environment import memory_bytes, random_state, set_random_state
from deepfast.mt.training.errors import CheckpointError, NotFiniteError
from deepfast.mt.training.nonfinite import first_nonfinite_gradient, first_nonfinite_module
from deepfast.mt.training.optim import build_optimizer, learning_rate
from deepfast.mt.training.recipe import Recipe

VALIDATION = ("best_nll", "best_step", "since_best", "validated_at")
"""Attributes of a trainer that early stopping needs after resuming."""


@dataclass
class Window:
    """Sums over the steps since the last line of metrics."""

    steps: int = 0
    loss: float = 0.0
    """Label-smoothed loss, summed over target tokens, nats."""
    nll: float = 0.0
    """NLL, summed over target tokens, nats."""
    source_tokens: int = 0
    target_tokens: int = 0
    grad_norm: float = 0.0
    """Gradient norm before clipping, summed over steps."""
    seconds: float = 0.0
    """Time of the steps, without validation and checkpoints."""


class Trainer:
    """Model, optimizer, batches and counters. `run` decides when each method is called."""

    def __init__(self, recipe: Recipe, corpus: Corpus, device: torch.device):
        self.recipe, self.corpus, self.device = recipe, corpus, device
        vocabulary = corpus.vocabulary
        config = recipe.model_config(
            len(vocabulary), vocabulary.pad_id, corpus.languages, vocabulary.target_size
        )
        self.model = build(config).to(device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(self.model, recipe.optim)
        self.step = 0
        self.seconds = 0.0
        """Wall time of the run up to its last checkpoint."""
        self.best_nll, self.best_step, self.since_best = math.inf, 0, 0
        self.validated_at = 0
        """Step of the last validation."""
        self.window = Window()
        self._micro_batches = self._epochs()

    def _epochs(self) -> Iterator[Batch]:
        """The batches of one epoch after the other, from where `TokenBatches` stands."""
        return itertools.chain.from_iterable(itertools.repeat(self.corpus.batches))

    def _loss(self, batch: Batch, smoothing: float) -> tuple[Tensor, Tensor]:
        """Loss and NLL, summed over the batch's target tokens."""
        mixed = self.recipe.train.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
            return self.model.loss(
                batch.source_BS, batch.target_in_BT, batch.target_out_BT, smoothing
            )

    def train_step(self) -> None:
        """One optimizer step over `accumulate` micro-batches."""
        began = time.perf_counter()
        optim = self.recipe.optim
        batches = [next(self._micro_batches).to(self.device) for _ in range(optim.accumulate)]
        target_tokens = sum(batch.target_tokens for batch in batches)
        generators = random_state(self.device)

        self.model.train()
        self.model.set_step(self.step + 1)
        self.optimizer.zero_grad(set_to_none=True)
        loss = nll = torch.zeros((), device=self.device)
        for batch in batches:
            batch_loss, batch_nll = self._loss(batch, optim.label_smoothing)
            # Divided by the tokens of the whole step, as if the micro-batches were one batch.
            (batch_loss / target_tokens).backward()
            loss, nll = loss + batch_loss.detach(), nll + batch_nll
        norm = get_total_norm([p.grad for p in self.parameters if p.grad is not None])

        # The only place where the step waits for the device.
        loss_sum, nll_sum, grad_norm = torch.stack((loss, nll, norm)).tolist()
        if not (math.isfinite(loss_sum) and math.isfinite(grad_norm)):
            raise self._not_finite(loss_sum, batches, generators)
        if optim.clip_norm is not None:
            clip_grads_with_norm_(self.parameters, optim.clip_norm, norm)
        if self.step == optim.restart_step:
            # Adam forgets its averages.
            self.optimizer = build_optimizer(self.model, optim)
        rate = learning_rate(self.step + 1, optim)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        self.optimizer.step()

        self.step += 1
        window = self.window
        window.steps += 1
        window.loss += loss_sum
        window.nll += nll_sum
        window.grad_norm += grad_norm
        window.source_tokens += sum(batch.source_tokens for batch in batches)
        window.target_tokens += target_tokens
        window.seconds += time.perf_counter() - began

    def measure(self) -> float:
        """Peak bytes of a step on the largest micro-batch; infinity if the GPU has less.

        Counts parameters, gradients, the optimizer's state, and the tensors that forward and
        backward keep alive. Parameters and random generators stay as they are.
        """
        batch = self.corpus.batches.largest().to(self.device)
        generators = random_state(self.device)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        try:
            with LiveBytes(self.device) as live:
                # With accumulation the gradients exist while the next micro-batch runs.
                for _ in range(min(self.recipe.optim.accumulate, 2)):
                    loss = self._loss(batch, self.recipe.optim.label_smoothing)[0]
                    (loss / batch.target_tokens).backward()
                    del loss
        except torch.cuda.OutOfMemoryError:
            return math.inf
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            set_random_state(generators, self.device)
        state = OPTIMIZERS["adam"] * sum(p.numel() for p in self.parameters)
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return live.peak + weights + state

    def take_metrics(self) -> dict[str, Any]:
        """Means since the last call, per target token in nats; starts a new window."""
        window, self.window = self.window, Window()
        tokens, seconds = window.target_tokens, max(window.seconds, 1e-9)
        return {
            "step": self.step,
            "epoch": self.corpus.batches.epoch,
            "loss": window.loss / tokens,
            "nll": window.nll / tokens,
            "ppl": perplexity(window.nll / tokens),
            "lr": learning_rate(max(self.step, 1), self.recipe.optim),
            "grad_norm": window.grad_norm / window.steps,
            "source_tokens_per_second": window.source_tokens / seconds,
            "target_tokens_per_second": window.target_tokens / seconds,
            "memory_bytes": memory_bytes(self.device),
        } | self.model.metrics()

    @torch.no_grad()
    def validate(self) -> float:
        """NLL of the dev part, nats per target token, eos included."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in self.corpus.dev_batches:
            total += self._loss(batch.to(self.device), 0.0)[1]
        return total.item() / sum(batch.target_tokens for batch in self.corpus.dev_batches)

    def record(self, nll: float) -> bool:
        """Records a validation; returns whether it is the best so far."""
        self.validated_at = self.step
        if nll < self.best_nll:
            self.best_nll, self.best_step, self.since_best = nll, self.step, 0
            return True
        self.since_best += 1
        return False

    def _not_finite(self, loss: float, batches: list[Batch], generators: dict) -> NotFiniteError:
        """Runs the step's forward again, with the same dropout, to find where it went wrong."""
        step = self.step + 1
        if math.isfinite(loss):
            name = first_nonfinite_gradient(self.model)
            where = f"of {name}" if name else "norm over all parameters"
            return NotFiniteError(f"step {step}: the gradient {where} is not finite")
        set_random_state(generators, self.device)
        self.model.set_step(step)
        module = None
        for batch in batches:
            module = module or first_nonfinite_module(
                self.model, functools.partial(self._loss, batch, 0.0)
            )
        where = f"the output of {module}" if module else "the loss, every module's output is finite"
        return NotFiniteError(
            f"step {step}: the loss is {loss}; the first value that is not finite is {where}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything a checkpoint holds: plain values and tensors."""
        optim = self.recipe.optim
        return {
            **self.model_state(self.model.state_dict()),
            "training": {
                "optimizer": self.optimizer.state_dict(),
                "schedule": {"step": self.step, "peak": optim.lr, "warmup": optim.warmup},
                "batches": self.corpus.batches.state_dict(),
                "random": random_state(self.device),
                "validation": {name: getattr(self, name) for name in VALIDATION},
                "window": asdict(self.window),
                "seconds": self.seconds,
            },
        }

    def model_state(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        """What translating needs: this model with `weights`."""
        return {
            "step": self.step,
            "kind": kind_of(self.model.config),
            "config": asdict(self.model.config),
            "model": weights,
            "vocabulary": self.corpus.vocabulary.to_bytes(),
            "recipe": self.recipe.to_dict(),
        }

    def load_state_dict(self, content: dict[str, Any], path: Path) -> None:
        """Continue exactly where the checkpoint was taken; `path` is its name in errors.

        Learning rate, betas and the like come from the recipe, which may have changed.
        """
        check_config(path, content, self.model.config)
        load_weights(self.model, content["model"], path)
        state = content["training"]
        own = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        try:
            # A copy: the tensors are mapped from the file, which may be deleted.
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            self.corpus.batches.load_state_dict(state["batches"])
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        for group, options in zip(self.optimizer.param_groups, own, strict=True):
            group.update(options)
        self.step, self.seconds = content["step"], state["seconds"]
        for name in VALIDATION:
            setattr(self, name, state["validation"][name])
        self.window = Window(**state["window"])
        self._micro_batches = self._epochs()
        # Restored last, because building the model drew from the same generators.
        set_random_state(state["random"], self.device)


def perplexity(nll: float) -> float:
    """exp(nll) for an NLL in nats per token; infinity if that overflows."""
    return math.exp(nll) if nll < 700 else math.inf
