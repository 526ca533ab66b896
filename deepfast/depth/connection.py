"""What all depth connections share: the push of a state, and the pass that it belongs to."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepfast import checks
from deepfast.depth.boundary import OutNorm, first_token, push
from deepfast.depth.check_push import check_push
from deepfast.depth.history import DepthHistory
from deepfast.depth.outside import Begun
from deepfast.depth.schedule import Schedule, default_block
from deepfast.depth.state import DepthState
from deepfast.depth.traced import traced
from deepfast.depth.weights import AttentionWeights, ConstantWeights
from deepfast.ops import common


class PassWeights(NamedTuple):
    """What a connection contributes to one pass. Detached tensors are copies: a parameter changed
    before backward must not change the pass."""

    weights: ConstantWeights | AttentionWeights
    parameters: tuple[Tensor | None, ...]
    """The tensors that the gradients of the weights belong to, then norm weights and biases."""
    norms: tuple[Tensor, Tensor | None] | None
    """Weights and biases (L+1, D) of the stack's own norms, detached; None without. RMS norms have
    no bias."""


class DepthConnection(nn.Module):
    """Every layer reads a weighted sum of the states of all layers below it.

    What `DLCL` and `AttentionResiduals` share. They have the parameters, and say how a row weighs
    the states (`_pass_weights`).

    Args:
        num_layers: L.
        dim: D.
        pattern: pattern[l] has the states that row l reads, in ascending order.
        running: running[k]: whether state k is what is pushed plus state k - 1.
        norm: "pre": states have layer-norms; "post": rows have; None.
        states: what states are under autocast, one of `deepfast.ops.common.STATES`.
        eps: added to the variance in these layer-norms.
        backend: see `deepfast.backend`.
    """

    name: str
    """In errors. The class of a sharded module has another name."""
    normalize_embedding = False
    norm_kind = "layer"
    # Each kind of connection has its own.
    _pass_weights: Callable[[Tensor, bool], PassWeights]
    """The weights of a pass, from its first push and whether it learns."""
    traced_weights: Callable[[], Tensor]
    """Inside torch.compile: what the rows of one pass share."""
    traced_row: Callable[[list[Tensor], int, Tensor], Tensor]
    """Inside torch.compile: row k from the states that it reads, and what the rows share."""

    def __init__(
        self,
        num_layers: int,
        dim: int,
        pattern: tuple[tuple[int, ...], ...],
        *,
        running: tuple[bool, ...] | None = None,
        norm: str | None,
        states: str,
        eps: float,
        backend: str | None,
    ):
        super().__init__()
        checks.choice(self.name, common.STATES, states=states)
        self.num_layers, self.dim, self.pattern, self.rows = num_layers, dim, pattern, len(pattern)
        self.running = running or (False,) * self.rows
        self.norm, self.states, self.eps, self.backend = norm, states, eps, backend
        # Set by `deepfast.parallel.shard_tokens`.
        self.shards: Any = None
        # Computed on first use and shared by all passes.
        self._schedules: dict[int, Schedule] = {}

    def _own(self, name: str, *shape: int, needed: bool = True) -> Tensor | None:
        """A parameter, checked, because a program can put another in its place."""
        p = getattr(self, name)
        if needed and p is None:
            raise TypeError(f"{self.name}: {name} must be a tensor {shape}, got None")
        checks.parameter(self.name, name, p, shape, self.device)
        return p

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def has_norm(self, k: int) -> bool:
        """Whether state k, or in post-norm row k, has a layer-norm of this connection; index 0
        needs ``normalize_embedding``."""
        return self.norm is not None and (k > 0 or self.normalize_embedding)

    def _schedule(self, block: int) -> Schedule:
        if block not in self._schedules:
            self._schedules[block] = self._make_schedule(block)
        return self._schedules[block]

    def _make_schedule(self, block: int) -> Schedule:
        return Schedule(self.pattern, block)

    def forward(
        self,
        y: Tensor,
        history: DepthHistory,
        *,
        index: int | None = None,
        residual: Tensor | None = None,
        dropout_p: float = 0.0,
        seed: int | Tensor | None = None,
        out_norm: OutNorm | None = None,
        want_x: bool = True,
    ) -> Tensor | tuple[Tensor | None, Tensor]:
        """Pushes a layer's output and returns the next layer's input.

        Args:
            y: (..., D), the output of the layer (or, with ``residual``, its last branch).
            history: the history of this forward pass.
            index: k of y_k. Give it where a call may be repeated, for example inside
                `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`.
            residual: added to dropout(y) in the same pass.
            dropout_p, seed: probability and seed of dropout on ``y``, while ``self.training``.
            out_norm: the next layer's first norm, applied in the same pass:
                ``LayerNorm(...).as_output()`` or ``RMSNorm(...).as_output()``.
            want_x: with ``out_norm``, whether to return x too. False needs ``out_norm``.

        Returns:
            x_{k+1}, shaped like y; with ``out_norm``, (x_{k+1} or None, LN(x_{k+1})).

        Raises:
            TypeError, ValueError: for operands that do not fit.
            RuntimeError: for a push out of order, with another stack's history or under another
                grad mode; for a push that checkpointing repeats with the history of another pass;
                in backward, for a second derivative.
            NotImplementedError: under forward-mode differentiation (dual tensors).
        """
        if out_norm is None and not want_x:
            raise ValueError(f"{self.name}: want_x=False needs out_norm, got None")
        push = self._push
        if torch.compiler.is_compiling():
            push = self._push_outside if history.eager else functools.partial(traced, self)
        return push(y, history, index, residual, dropout_p, seed, out_norm, want_x)

    def _push(
        self, y: Tensor, history: DepthHistory, index, residual, dropout_p, seed, out_norm, want_x
    ) -> Tensor | tuple[Tensor | None, Tensor]:
        """`forward` in eager code."""
        common.reverse_mode_only(self.name, vmap=False)
        checks.tensor(self.name, "the layer's output", y)
        if residual is not None:
            checks.tensor(self.name, "residual", residual)
        y, residual = common.cast_states(self.states, y, residual)
        k = check_push(self, y, residual, history, index, dropout_p, out_norm)
        if history.state is None:
            self._begin(y, history)
        p = dropout_p if self.training else 0.0
        if p == 0:
            seed = None
        elif seed is None:
            seed = history.state.seed(k)
        else:
            seed = common.draw_seed(self.name, seed, y.device)
        if self.shards is not None:
            y, out_norm = self.shards.push(y, p, seed, out_norm)
            p, seed = 0.0, None
        x, out = push(
            history, k, y, residual=residual, out_norm=out_norm, want_x=want_x, dropout_p=p,
            seed=seed, indexed=index is not None,
        )  # fmt: skip
        if out_norm is not None:
            return x, out
        return x if out is None else out

    _push_outside = torch.compiler.disable(
        _push, reason="a push outside of the graph; DepthHistory(eager=False) traces it"
    )

    def _begin(
        self,
        y: Tensor,
        history: DepthHistory,
        begun: Begun | None = None,
        sums: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        """Begins the pass whose first push is y. The whole pass uses the parameters read here.

        begun, sums: what rows begin with in a stage of a pipeline, and its tensors with gradient.
        """
        learning = torch.is_grad_enabled()
        weights, parameters, norms = self._pass_weights(y, learning)
        if self.shards is not None:
            parameters = self.shards.summed(*parameters)
        has = tuple(self.has_norm(k) for k in range(self.rows))
        none = (False,) * self.rows
        pre, post = self.norm == "pre", self.norm == "post"
        source, out = norms if pre else (None, None), norms if post else (None, None)
        history.owner, history.kind = self, (y.shape, y.dtype, y.device)
        history.grad_mode, history.task = learning, torch._C._current_graph_task_id()
        history.state = DepthState(
            owner=self,
            weights=weights,
            running=self.running,
            norm_weight=source[0],
            norm_bias=source[1],
            norm_source=has if pre else none,
            out_norm_weight=out[0],
            out_norm_bias=out[1],
            norm_out=has if post else none,
            eps=self.eps,
            rms=self.norm_kind == "rms",
            schedule=self._schedule(history.block or default_block(self.rows)),
            inplace=history.inplace,
            need_norm_grad=learning
            and norms is not None
            and any(p is not None and p.requires_grad for p in parameters[-2:]),
            begun=begun,
        )
        history.token = first_token(history.state, *parameters, *sums)
