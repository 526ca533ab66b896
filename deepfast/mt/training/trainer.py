"""One model in training: the step and the validation, from batches to new parameters."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from deepfast.memory.count import LiveBytes
from deepfast.memory.sizes import OPTIMIZERS
from deepfast.mt.data import Batch
from deepfast.mt.models import TranslationModel, build
from deepfast.mt.models.checkpoint import check_config
from deepfast.mt.training.corpus import Corpus
from deepfast.mt.training.environment import peak_bytes, random_state, set_random_state
from deepfast.mt.training.failed_step import not_finite
from deepfast.mt.training.optim import GradientNorms, build_optimizer, learning_rate
from deepfast.mt.training.parallel import (
    Share,
    is_sharded,
    local_bytes,
    logits_gathered,
    shard_again,
    share_model,
    shares,
    syncing,
    whole,
)
from deepfast.mt.training.ranks import Ranks
from deepfast.mt.training.recipe import Recipe


@dataclass
class Window:
    """Sums over the steps since the last line of metrics."""

    steps: int = 0
    loss: float = 0.0
    """Label-smoothed loss, summed over target tokens, nats."""
    nll: float = 0.0
    """NLL, summed over target tokens, nats."""
    correct: float = 0.0
    """Target tokens that have the largest logit, where train.accuracy counts them."""
    source_tokens: int = 0
    target_tokens: int = 0
    grad_norm: float = 0.0
    """Gradient norm before clipping, summed over steps."""
    seconds: float = 0.0
    """Time of the steps, without validation and checkpoints."""


class Validation(NamedTuple):
    """What a model is worth on the dev part."""

    nll: float
    """Nats per target token, eos included."""
    accuracy: float
    """Share of the target tokens, eos included, that have the largest logit."""

    @property
    def row(self) -> dict[str, float]:
        """For a line of metrics."""
        return {"nll": self.nll, "ppl": perplexity(self.nll), "accuracy": self.accuracy}


class Trainer:
    """Model, optimizer, batches and counters. `run` decides when each method is called."""

    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        device: torch.device,
        ranks: Ranks | None = None,
        bottom: dict[str, Any] | None = None,
    ):
        """
        Args:
            ranks: those that share the model; None: this process alone.
            bottom: the checkpoint that a model of the kind depth_growing grows on.
        """
        self.recipe, self.corpus, self.device = recipe, corpus, device
        self.ranks = ranks = ranks or Ranks()
        vocabulary = corpus.vocabulary
        config = recipe.model_config(len(vocabulary), corpus.languages, len(vocabulary.target))
        self.model = build(config).to(device)
        if bottom is not None:
            check_config(recipe.grow["from"], bottom, self.model.bottom.config)
            self.model.bottom.load_state_dict(bottom["model"])
        self.loss = share_model(self.model, recipe, ranks, device)
        """The model's loss, with which all ranks train the same parameters."""
        # All ranks have made the same model. From here on each draws its own dropout masks.
        ranks.seed(recipe.train.seed)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(self.model, recipe.optim)
        self.gradient_norms = GradientNorms(self.model)
        self.step = 0
        self.seconds = 0.0
        """Wall time of the run up to its last checkpoint."""
        self.best_nll, self.best_step, self.since_best = math.inf, 0, 0
        self.validated_at = 0
        """Step of the last validation."""
        self.window = Window()
        # One epoch after the other, from where `TokenBatches` stands at the first step.
        self._micro_batches = itertools.chain.from_iterable(itertools.repeat(corpus.batches))

    def batch_loss(
        self, batch: Batch, smoothing: float, *, accuracy: bool = False
    ) -> tuple[Tensor, ...]:
        """Loss and NLL, summed over the batch's target tokens.

        Args:
            accuracy: with the number of target tokens that have the largest logit.
        """
        mixed = self.recipe.train.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
            given = batch.source_BS, batch.target_in_BT, batch.target_out_BT, smoothing, accuracy
            return self.loss(*given)

    def train_step(self) -> None:
        """One optimizer step over its micro-batches, of which each rank has its share.

        Raises:
            NotFiniteError: the loss or the gradient is NaN or infinite.
            OtherRankError: it is so on another rank.
        """
        began = time.perf_counter()
        optim = self.recipe.optim
        batches = [next(self._micro_batches) for _ in range(optim.micro_batches(self.step + 1))]
        target_tokens = sum(batch.target_tokens for batch in batches)
        generators = random_state(self.device)

        self.model.train()
        self.model.set_step(self.step + 1)
        self.optimizer.zero_grad(set_to_none=True)
        mine = self._shares(batches)
        sums = self._backward(mine, target_tokens)
        norm = self.gradient_norms.measure(self.parameters)

        # The only place where the step waits for the device, and for the other ranks.
        rows = self.ranks.rows(*torch.cat((sums, norm.view(1))).tolist())
        loss_sum, nll_sum, correct = (sum(column) for column in list(zip(*rows, strict=True))[:3])
        grad_norm = rows[0][3]
        if not (math.isfinite(loss_sum) and math.isfinite(grad_norm)):
            # Runs the step again, with the same dropout, to find where it went wrong.
            set_random_state(generators, self.device)
            self.model.set_step(self.step + 1)
            self.optimizer.zero_grad(set_to_none=True)
            what = f"loss is {loss_sum}"
            if math.isfinite(loss_sum):
                what = "gradient is not finite"
            text, own = f"step {self.step + 1}: the {what}", rows[self.ranks.rank][0]
            raise not_finite(self, text, own, lambda: self._backward(mine, target_tokens))
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
        window.correct += correct
        window.grad_norm += grad_norm
        window.source_tokens += sum(batch.source_tokens for batch in batches)
        window.target_tokens += target_tokens
        window.seconds += time.perf_counter() - began

    def _shares(self, batches: list[Batch], most: int | None = None) -> list[Share]:
        """This rank's part of micro-batches, or the first `most` of its parts, on its device."""
        whole = not self.model.draws
        mine = shares(batches, self.ranks.rank, self.ranks.size, whole=whole)[:most]
        return [Share(batch.to(self.device), counts) for batch, counts in mine]

    def _backward(self, mine: list[Share], target_tokens: int) -> Tensor:
        """Adds up the gradients of this rank's share; returns its sums (3,) of loss, NLL and right
        tokens."""
        sums = torch.zeros(3, device=self.device)
        smoothing, accuracy = self.recipe.optim.label_smoothing, self.recipe.train.accuracy
        # Divided by the tokens of the whole step, as if the micro-batches were one batch. The ranks
        # then take the mean of their gradients.
        divisor = target_tokens / self.ranks.size
        for number, (batch, counts) in enumerate(mine, 1):
            with syncing(self.loss, number == len(mine)):
                batch_loss, *more = self.batch_loss(batch, smoothing, accuracy=accuracy)
                (batch_loss / (divisor if counts else math.inf)).backward()
            if counts:
                found = torch.stack((batch_loss.detach(), *more))
                sums[: len(found)] += found
        return sums

    def measure(self) -> float:
        """Peak bytes of a step on the largest micro-batch.

        Counts parameters, gradients, the optimizer's state, and the tensors that forward and
        backward keep alive. Parameters and random generators stay as they are.
        """
        optim = self.recipe.optim
        accumulate = max(optim.accumulate, optim.restart_accumulate or 1)
        # With accumulation the gradients exist while the next micro-batch runs.
        mine = self._shares([self.corpus.batches.largest()] * accumulate, most=2)
        generators = random_state(self.device)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        with LiveBytes(self.device) as live:
            self._backward(mine, mine[0].batch.target_tokens)
        self.optimizer.zero_grad(set_to_none=True)
        set_random_state(generators, self.device)
        # Adam's state has the precision of the parameters, fp32.
        state = OPTIMIZERS["adam"] * sum(map(local_bytes, self.parameters)) // 4
        weights = sum(map(local_bytes, self.model.parameters()))
        # DDP has made its buckets of gradients before.
        buckets = 0
        if not (self.ranks.alone or is_sharded(self.loss)):
            buckets = sum(map(local_bytes, self.parameters))
        return live.peak + weights + state + buckets

    def take_metrics(self) -> dict[str, Any]:
        """Means since the last call, per target token in nats; starts a new window."""
        window, self.window = self.window, Window()
        tokens, seconds = window.target_tokens, max(window.seconds, 1e-9)
        with logits_gathered(self.model):
            more = self.model.metrics()
        return {
            "step": self.step,
            "epoch": self.corpus.batches.epoch,
            "loss": window.loss / tokens,
            "nll": window.nll / tokens,
            "ppl": perplexity(window.nll / tokens),
            **({"accuracy": window.correct / tokens} if self.recipe.train.accuracy else {}),
            "lr": learning_rate(max(self.step, 1), self.recipe.optim),
            "grad_norm": window.grad_norm / window.steps,
            "source_tokens_per_second": window.source_tokens / seconds,
            "target_tokens_per_second": window.target_tokens / seconds,
            "memory_bytes": int(max(self.ranks.rows(peak_bytes(self.device)))[0]),
        } | self.gradient_norms.row() | more  # fmt: skip

    @torch.no_grad()
    def validate(self) -> Validation:
        """NLL and accuracy of the dev part.

        Raises:
            NotFiniteError: the NLL is NaN or infinite.
            OtherRankError: it is so on another rank.
        """
        self.model.eval()
        total = self._evaluate()
        shard_again(self.loss)
        rows = self.ranks.rows(*total.tolist())
        nll, correct = (sum(column) for column in zip(*rows, strict=True))
        if not math.isfinite(nll):
            text = f"step {self.step}: the loss of the dev part is {nll}"
            raise not_finite(self, text, rows[self.ranks.rank][0], self._evaluate)
        tokens = sum(batch.target_tokens for batch in self.corpus.dev_batches)
        return Validation(nll / tokens, correct / tokens)

    def _evaluate(self) -> Tensor:
        """This rank's sums (2,) of NLL and right tokens over the dev part."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in self.corpus.dev_batches:
            # Batches may differ in their layers, so all ranks work on one.
            for part, counts in self._shares([batch]):
                _, nll, correct = self.batch_loss(part, 0.0, accuracy=True)
                if counts:
                    total += torch.stack((nll, correct))
        return total

    def whole_model(self) -> TranslationModel:
        """The model, or a copy of it where it is in shares: translating runs its parts at times of
        its own on each rank."""
        if not is_sharded(self.loss):
            return self.model
        with torch.device("meta"):
            copied = build(self.model.config)
        weights = {name: whole(tensor) for name, tensor in self.model.state_dict().items()}
        copied.load_state_dict(weights, assign=True)
        return copied

    def record(self, nll: float) -> bool:
        """Records a validation; returns whether it is the best so far."""
        self.validated_at = self.step
        if nll < self.best_nll:
            self.best_nll, self.best_step, self.since_best = nll, self.step, 0
            return True
        self.since_best += 1
        return False


def perplexity(nll: float) -> float:
    """exp(nll) for an NLL in nats per token; infinity if that overflows."""
    return math.exp(nll) if nll < 700 else math.inf
