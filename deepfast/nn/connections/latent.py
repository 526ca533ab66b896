"""Latent depth: a stack that learns which of its layers each language uses."""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import checks
from deepfast.nn.linear import Gate

PRIORS = ("uniform", "beta", "mean")
EVALUATIONS = ("threshold", "mean")

GRID = 4096
"""Points of the midpoint rule for the mean of a soft z, which has no closed form."""

FORWARDS = 1024
"""How many forward passes of one step checkpointing can still recompute in backward."""


def is_chosen(gate: Gate | None, value: float) -> bool:
    """Whether a gate was chosen (a float) and has this value. Drawn gates are not read."""
    return isinstance(gate, float) and gate == value


class LatentDepth(nn.Module):
    """Random gates z that decide which layers are used: ``x_{l+1} = x_l + z_l SubLayer(x_l)``.

    In training every forward pass draws ``z = sigma((a + g_1 - g_2) / tau)`` for all languages and
    layers, where g is Gumbel noise, and every layer runs. In evaluation nothing is drawn: a layer
    is used where ``sigma(a)``, the probability that z is above 1/2, is at least ``threshold``. A
    layer that is not used costs nothing. With ``evaluation="mean"`` all layers are used, each with
    the mean of its z: the soft weights of the paper.

    A draw depends on ``seed``, on the step (`set_step`) and on the number of earlier draws in the
    step, not on the state of torch's default generator. So all ranks draw the same z. When
    checkpointing runs a forward pass again in backward, it must get the same z. To recognise it,
    each forward pass draws one number from torch's CPU generator, whose state checkpointing
    restores. Checkpointing with ``preserve_rng_state=False`` is therefore an error.

    With p = sigma(a) and u, the mean of p over languages, `penalty` is in closed form:

        kl_weight * KL(p || prior) + entropy_weight * -sum u log u
                                   + target_weight * (sum u - target_layers)^2

    From step ``soft_steps`` on, the KL's weight rises from 0 over ``anneal_steps`` steps. The
    weights of the other two terms then rise over the next ``anneal_steps`` steps.

    Args:
        num_layers: L.
        languages: N. Each language has its own logits.
        tau: temperature of the soft z, above 0.
        hard: from step ``soft_steps`` on, z is rounded to 0 or 1 and has the gradient of the soft
            z (straight-through).
        soft_steps, anneal_steps: numbers of training steps.
        prior: probability that a layer is used. "uniform": 1/2. "beta": a / (a + b), the mean of
            Beta(a, b). "mean": p averaged over languages.
        beta: (a, b), each above 0, for the prior "beta". (1, 1) equals "uniform".
        kl_weight, entropy_weight, target_weight: at least 0, in nats per target token.
        target_layers: K, how many layers should be used; None for no such term.
        evaluation: "threshold": z is 1 where a layer is used, else 0. "mean": z of every layer is
            its mean at the end of training, which is sigma(a) where ``hard``.
        threshold: in (0, 1). `keeps` compares with it, so it decides what pruning removes.
        lr_scale: learning rate of the logits, as a multiple of the rate of other parameters. The
            code that builds the optimizer applies it. Logits need a higher rate, because the
            choice of layers must settle within the run.
        seed: seed of the draws.
        device, dtype: of the logits, as in `torch.nn`.

    The authors' code uses the drawn z in place of p, and only the z = 1 term of the KL.

    Source: Li et al., Deep Transformers with Latent Depth, 2020.
    """

    def __init__(
        self,
        num_layers: int,
        languages: int = 1,
        *,
        tau: float = 1.0,
        hard: bool = False,
        soft_steps: int = 0,
        anneal_steps: int = 0,
        prior: str = "uniform",
        beta: tuple[float, float] = (1.0, 1.0),
        kl_weight: float = 0.0,
        entropy_weight: float = 0.0,
        target_layers: float | None = None,
        target_weight: float = 0.0,
        evaluation: str = "threshold",
        threshold: float = 0.5,
        lr_scale: float = 1.0,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.num_layers, self.languages = num_layers, languages
        self.tau, self.hard = tau, hard
        self.soft_steps, self.anneal_steps = soft_steps, anneal_steps
        self.prior, self.beta = prior, tuple(beta) if isinstance(beta, Iterable) else beta
        self.kl_weight, self.entropy_weight = kl_weight, entropy_weight
        self.target_layers, self.target_weight = target_layers, target_weight
        self.evaluation, self.threshold = evaluation, threshold
        self.lr_scale, self.seed = lr_scale, seed
        self._check()
        self.logits = nn.Parameter(torch.empty(languages, num_layers, device=device, dtype=dtype))
        self.reset_parameters()
        self.set_step(0)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.logits)

    def _check(self) -> None:
        op, wanted = "LatentDepth", self.target_layers
        checks.whole(op, num_layers=self.num_layers, languages=self.languages)
        checks.whole(op, 0, soft_steps=self.soft_steps, anneal_steps=self.anneal_steps)
        checks.flag(op, hard=self.hard)
        checks.positive(op, tau=self.tau, lr_scale=self.lr_scale)
        checks.number(op, threshold=self.threshold)
        if not 0 < self.threshold < 1:
            raise ValueError(
                f"{op}: threshold must be a number between 0 and 1, got {self.threshold!r}"
            )
        for name in ("kl_weight", "entropy_weight", "target_weight"):
            checks.number(op, **{name: getattr(self, name)})
        checks.choice(op, PRIORS, prior=self.prior)
        checks.choice(op, EVALUATIONS, evaluation=self.evaluation)
        if not checks.is_whole(self.seed):
            raise ValueError(f"{op}: seed must be an integer, got {self.seed!r}")
        if not (isinstance(self.beta, tuple) and len(self.beta) == 2):
            raise ValueError(f"{op}: beta must be two numbers above 0, got {self.beta!r}")
        for number in self.beta:
            checks.positive(op, beta=number)
        if self.prior != "beta" and self.beta != (1, 1):
            raise ValueError(
                f"{op}: beta must be (1, 1) for the prior {self.prior}, got {self.beta!r}"
            )
        if wanted is not None:
            checks.number(op, target_layers=wanted)
            if not 0 < wanted <= self.num_layers:
                raise ValueError(
                    f"{op}: target_layers must be above 0 and at most the {self.num_layers} "
                    f"layers, got {wanted!r}"
                )
        elif self.target_weight:
            raise ValueError(
                f"{op}: target_layers must be a number where target_weight is set, got None"
            )

    def set_step(self, step: int) -> None:
        """Sets the number of the next training step, from 1; 0 where no trainer sets it."""
        checks.whole("LatentDepth", 0, step=step)
        self.step, self.draws = step, 0
        self._numbers: dict[int, int] = {}
        """Mark of a forward pass of this step -> the number of its draw."""

    def draw(self) -> Tensor:
        """Draws z (N, L) for one forward pass, with a gradient to the logits."""
        noise = self._noise().to(self.logits.device, self.logits.dtype)
        soft = torch.sigmoid((self.logits + noise) / self.tau)
        if not (self.hard and self.step >= self.soft_steps):
            return soft
        # In this order of operations z is exactly 0 or 1.
        return (soft > 0.5).to(soft.dtype) + (soft - soft.detach())

    def _noise(self) -> Tensor:
        """g_1 - g_2 (N, L) of the next draw, fp64 on the CPU."""
        # Each draw has its own seed, so a resumed run needs only the step to continue.
        seed = (self.seed * 1_000_003 + self.step) * 1_000_003 + self._number()
        generator = torch.Generator().manual_seed(seed % 2**63)
        shape = 2, self.languages, self.num_layers
        e = torch.empty(shape, dtype=torch.float64).exponential_(generator=generator)
        # -log of an exponential is a Gumbel.
        return e[1].log() - e[0].log()

    def _number(self) -> int:
        """The number of this draw in the step; a recomputed forward pass keeps its number."""
        # Checkpointing restores this generator: a recomputed forward pass draws the same mark.
        mark = int(torch.randint(2**62, (), device="cpu"))
        if mark not in self._numbers:
            if torch._C._current_graph_task_id() != -1:
                raise RuntimeError(
                    "LatentDepth: expected backward to recompute a forward pass of this step from "
                    "the same state of torch's CPU generator, got another state: checkpointing "
                    "needs preserve_rng_state=True, and backward must run before the next set_step"
                )
            self._numbers[mark] = self.draws
            self.draws += 1
            if len(self._numbers) > FORWARDS:
                del self._numbers[next(iter(self._numbers))]
        return self._numbers[mark]

    def choose(self, language: int = 0) -> list[float]:
        """z of each layer in evaluation, from the logits alone; 0.0 for a layer that is not used.

        Raises:
            ValueError: for a language that the module does not have, and where a logit is nan.
        """
        if self.evaluation == "mean":
            return self._mean(self._numbers_of(language)).tolist()
        return list(map(float, self.keeps(language)))

    def keeps(self, language: int = 0) -> list[bool]:
        """For each layer whether ``sigma(a)`` is at least ``threshold``.

        Raises:
            ValueError: as `choose`.
        """
        least = math.log(self.threshold / (1 - self.threshold))
        return (self._numbers_of(language) >= least).tolist()

    def _numbers_of(self, language: int) -> Tensor:
        """The logits of a language (L,), fp64 on the CPU."""
        checks.whole("LatentDepth", 0, self.languages - 1, language=language)
        logits = self.logits[language].detach().double().cpu()
        wrong = logits.isnan().nonzero().flatten().tolist()
        if wrong:
            raise ValueError(
                f"LatentDepth: logits must be numbers, got nan for layer {wrong[0]} of "
                f"language {language}"
            )
        return logits

    def _mean(self, logits: Tensor) -> Tensor:
        """(L,) the mean of z over the noise."""
        if self.hard:
            return torch.sigmoid(logits)
        u = (torch.arange(GRID, dtype=logits.dtype) + 0.5) / GRID
        return torch.sigmoid((logits.unsqueeze(1) + torch.logit(u)) / self.tau).mean(1)

    def forward(self, language: int = 0) -> Sequence[Gate]:
        """z of each layer for a batch of one language; ``language`` is its index, from 0."""
        checks.whole("LatentDepth", 0, self.languages - 1, language=language)
        return list(self.draw()[language].unbind()) if self.training else self.choose(language)

    def kl(self) -> Tensor:
        """``KL(p || prior)`` in nats, the sum over layers and the mean over languages."""
        # In logits: log p and log(1 - p) stay finite where p is 0 or 1 in fp32.
        a = self.logits
        log_on, log_off = F.logsigmoid(a), F.logsigmoid(-a)
        on, off = a.sigmoid(), (-a).sigmoid()
        prior_on: Tensor | float
        prior_off: Tensor | float
        if self.prior == "mean":
            # The logarithm of the mean of p over languages, computed in log space.
            count = math.log(self.languages)
            prior_on, prior_off = log_on.logsumexp(0) - count, log_off.logsumexp(0) - count
        else:
            first, second = self.beta
            total = math.log(first + second)
            prior_on, prior_off = math.log(first) - total, math.log(second) - total
        return (on * (log_on - prior_on) + off * (log_off - prior_off)).sum(1).mean()

    def entropy(self) -> Tensor:
        """``-sum_l u_l log u_l`` in nats."""
        log_use = F.logsigmoid(self.logits).logsumexp(0) - math.log(self.languages)
        return -(log_use.exp() * log_use).sum()

    def depth(self) -> Tensor:
        """``sum_l u_l``, the expected number of layers that are used."""
        return self.logits.sigmoid().mean(0).sum()

    def penalty(self) -> Tensor:
        """The penalty to add to the loss per target token at this step, in nats."""
        first = self._weight(self.soft_steps)
        second = self._weight(self.soft_steps + self.anneal_steps)
        total = self.logits.new_zeros(())
        if self.kl_weight:
            total = total + first * self.kl_weight * self.kl()
        if self.entropy_weight:
            total = total + second * self.entropy_weight * self.entropy()
        if self.target_weight:
            off = self.depth() - self.target_layers
            total = total + second * self.target_weight * off.square()
        return total

    def _weight(self, start: int) -> float:
        """From 0 at step ``start`` to 1 after ``anneal_steps`` more."""
        if self.anneal_steps == 0:
            return float(self.step >= start)
        return min(max((self.step - start) / self.anneal_steps, 0.0), 1.0)

    def extra_repr(self) -> str:
        return f"num_layers={self.num_layers}, languages={self.languages}, tau={self.tau}"
