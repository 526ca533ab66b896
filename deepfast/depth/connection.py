"""The base class of depth connections: a push is checked, and the first one begins a pass."""

import abc

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from deepfast import checks
from deepfast.depth.boundary import ParameterGradients, boundary, nearest_passes
from deepfast.depth.depth_pass import DepthPass
from deepfast.depth.history import DepthHistory
from deepfast.depth.push import OutNorm, Push
from deepfast.depth.schedule import Pattern, Schedule, default_block
from deepfast.depth.traced import BY_ID, traced
from deepfast.ops import common


def part(parameter: Tensor, index) -> Tensor:
    """``parameter[index]`` as a view to initialise. It has the attributes of the parameter.

    Initial values are set by the functions of torch.nn.init alone. Libraries that load weights
    replace these functions, so that a parameter which has been loaded keeps its values.
    transformers marks such a parameter with an attribute.
    """
    view = parameter.detach()[index]
    view.__dict__.update(parameter.__dict__)
    return view


class DepthConnection(nn.Module, abc.ABC):
    """Every layer reads a weighted sum of the states of all layers below it.

    The base class of `DLCL` and `AttentionResiduals`, which have the parameters, and a kind of pass
    that weighs the states with them.

    Args:
        num_layers: L.
        dim: D.
        pattern: pattern[l] has the states that row l reads, in ascending order.
        continues: continues[k]: whether state k is what is pushed plus state k - 1.
        norm: "pre": states have layer-norms; "post": rows have; None.
        state_dtype: dtype of the states under autocast: torch.float32, or None for autocast's.
        eps: added to the variance in these layer-norms.
        backend: see `deepfast.backend`.
    """

    name: str
    """In errors. The class of a sharded module has another name."""
    normalize_embedding = False
    norm_type = "layer"
    pass_kind: type[DepthPass]

    def __new__(cls, *_, **__):
        # Also where a connection is copied or loaded.
        connection = super().__new__(cls)
        BY_ID[id(connection)] = connection
        return connection

    def __init__(
        self,
        num_layers: int,
        dim: int,
        pattern: Pattern,
        *,
        continues: tuple[bool, ...] | None = None,
        norm: str | None,
        state_dtype: torch.dtype | None,
        eps: float,
        backend: str | None,
    ):
        super().__init__()
        checks.choice(self.name, (torch.float32, None), state_dtype=state_dtype)
        self.num_layers, self.dim, self.pattern, self.rows = num_layers, dim, pattern, len(pattern)
        self.continues = continues or (False,) * self.rows
        self.norm, self.state_dtype, self.eps, self.backend = norm, state_dtype, eps, backend
        # Computed on first use and shared by all passes.
        self._schedules: dict[int, Schedule] = {}

    # ---- what a subclass has -------------------------------------------------------------------

    @abc.abstractmethod
    def pass_parameters(self) -> tuple[Tensor | None, ...]:
        """The tensors, with gradient, that weigh the states in a pass; first the weights or
        queries."""

    @abc.abstractmethod
    def traced_row(
        self, states: list[Tensor], indices: list[int], k: int, weights: Tensor,
        partial: list[Tensor] | None,
    ) -> Tensor:  # fmt: skip
        """Row k by registered ops, from these states, their indices and the row's partial sum.
        weights: the first of `pass_parameters`."""

    @abc.abstractmethod
    def traced_far(
        self, states: list[Tensor], indices: list[int], rows: range, weights: Tensor
    ) -> list[tuple[Tensor, int]] | None:
        """The partial sums of several rows over the same states, by registered ops: tensors, each
        with the dimension that counts the rows. None where no op has them."""

    def norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Weights and biases (L+1, D) of the norms, or None, with gradient."""
        return None, None

    def _checked(self, name: str, *shape: int, needed: bool = True) -> Tensor | None:
        """A parameter, checked, because a program can put another in its place."""
        p = getattr(self, name)
        if needed and p is None:
            raise TypeError(f"{self.name}: {name} must be a tensor {shape}, got None")
        checks.parameter(self.name, name, p, shape, self.device)
        return p

    @property
    def device(self) -> torch.device:
        p: Tensor | None = next(self.parameters(), None)
        if p is None:
            # Raises, with the name of a parameter that is missing.
            p = self.pass_parameters()[0]
        return p.device

    def has_norm(self, k: int) -> bool:
        """Whether state k, or in post-norm row k, has a layer-norm of this connection; index 0
        needs ``normalize_embedding``."""
        return self.norm is not None and (k > 0 or self.normalize_embedding)

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
        return_x: bool = True,
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
            return_x: with ``out_norm``, whether to return x too. False needs ``out_norm``.

        Returns:
            x_{k+1}, shaped like y; with ``out_norm``, (x_{k+1} or None, LN(x_{k+1})).

        Raises:
            TypeError, ValueError: for operands that do not fit.
            RuntimeError: for a push out of order, with another stack's history or under another
                grad mode; for a push that checkpointing repeats with the history of another pass;
                in backward, for a second derivative.
            NotImplementedError: under forward-mode differentiation (dual tensors).
        """
        if out_norm is None and not return_x:
            raise ValueError(f"{self.name}: return_x=False needs out_norm, got None")
        push = Push(y, residual, index, dropout_p, seed, out_norm, return_x)
        if not torch.compiler.is_compiling():
            return self._push(push, history)
        if history.eager:
            return self._push_outside(push, history)
        return traced(self, push, history)

    def _push(self, push: Push, history: DepthHistory) -> Tensor | tuple[Tensor | None, Tensor]:
        """`forward` in eager code."""
        common.reverse_mode_only(self.name, vmap=False)
        checks.tensor(self.name, "the layer's output", push.branch)
        if push.residual is not None:
            checks.tensor(self.name, "residual", push.residual)
        push.branch, push.residual = common.cast_states(
            self.state_dtype, push.branch, push.residual
        )
        self._check(push, history)
        if history.depth_pass is None:
            self._begin(push, history)
        k, push.depth_pass = push.k, history.depth_pass
        if not self.training:
            push.dropout_p = 0.0
        if push.dropout_p == 0:
            push.seed = None
        elif push.seed is None:
            push.seed = push.depth_pass.seed(k)
        else:
            push.seed = common.draw_seed(self.name, push.seed, push.branch.device)
        if self.norm == "post" and self.has_norm(k):
            push.return_x = False
        x, out = boundary(push, history)
        if push.out_norm is not None:
            return x, out
        return x if out is None else out

    _push_outside = torch.compiler.disable(
        _push, reason="a push outside of the graph; DepthHistory(eager=False) traces it"
    )

    def _schedule(self, block: int | None, device_type: str) -> Schedule:
        """Which state each row reads when, for the ``block`` of a `DepthHistory`."""
        block = block or default_block(self.rows, device_type, self.pass_kind.states_per_pull)
        if block not in self._schedules:
            self._schedules[block] = Schedule(self.pattern, block)
        return self._schedules[block]

    def _begin(self, push: Push, history: DepthHistory) -> None:
        """Begins the pass with its first push. The whole pass uses the parameters read here."""
        schedule = self._schedule(history.block, push.branch.device.type)
        # Here autograd saves copies, by hooks of this block: a parameter may change before
        # backward, and checkpointing must not count tensors that a recomputed push does not save.
        with saved_tensors_hooks(torch.clone, lambda copy: copy):
            parameters = history.parameters or self.pass_parameters()
        depth_pass = self.pass_kind(self, push, schedule, history.inplace, parameters)
        history.owner, history.depth_pass = self, depth_pass
        if depth_pass.any_learns:
            history.token = ParameterGradients.apply(depth_pass, *parameters)

    # ---- checks, which change nothing but the push ---------------------------------------------

    def _check(self, push: Push, history: DepthHistory) -> None:
        """Checks a push whose tensors are cast for autocast, and sets its k."""
        y, residual, out_norm, op = push.branch, push.residual, push.out_norm, self.name
        if not isinstance(history, DepthHistory):
            raise TypeError(f"{op}: history must be a DepthHistory, got {type(history).__name__}")
        kind, depth_pass = (y.shape, y.dtype, y.device), history.depth_pass
        # A state of the same kind as the first one of this pass needs no further check.
        if history.owner is not self or depth_pass is None or depth_pass.state_kind != kind:
            self._check_state(y)
            if history.owner is self and depth_pass is not None:
                shape, dtype, device = depth_pass.state_kind
                raise ValueError(
                    f"{op}: the states of a pass must be alike: expected {tuple(shape)} of {dtype} "
                    f"on {device}, got {tuple(y.shape)} of {y.dtype} on {y.device}"
                )
        checks.probability(op, push.dropout_p)
        if residual is not None and (residual.shape, residual.dtype, residual.device) != kind:
            checks.like(op, "residual", residual, "the branch", y)
        if out_norm is not None:
            self._check_out_norm(out_norm, y.device)
        self._set_number(push, history)
        self._check_one_norm(out_norm, push.k)

    def _check_one_norm(self, out_norm: OutNorm | None, k: int) -> None:
        if out_norm is not None and self.norm == "post" and self.has_norm(k):
            raise ValueError(
                f"{self.name}: a post-norm boundary has its own LN; out_norm must be None"
            )

    def _check_state(self, y: Tensor) -> None:
        """Checks the width, the dtype and the device of what is pushed."""
        op = self.name
        if not y.is_floating_point():
            raise ValueError(f"{op}: the input must have a floating-point dtype, got {y.dtype}")
        if y.shape[-1] != self.dim:
            raise ValueError(f"{op}: the input must be (..., {self.dim}), got {tuple(y.shape)}")
        if y.device != self.device:
            raise ValueError(f"{op}: the input must be on {self.device}, got {y.device}")

    def _check_out_norm(self, out_norm: OutNorm, device: torch.device) -> None:
        if not isinstance(out_norm, OutNorm):
            raise TypeError(
                f"{self.name}: out_norm must be an OutNorm (LayerNorm.as_output() or "
                f"RMSNorm.as_output()), got {type(out_norm).__name__}"
            )
        checks.eps(self.name, out_norm.eps, argument="out_norm.eps")
        shape = (self.dim,)
        checks.parameter(self.name, "out_norm.weight", out_norm.weight, shape, device)
        checks.parameter(self.name, "out_norm.bias", out_norm.bias, shape, device)

    def _set_number(self, push: Push, history: DepthHistory) -> None:
        """Sets the number k of a push: the next one or, in backward, a recomputed one."""
        op, depth_pass, index = self.name, history.depth_pass, push.index
        if history.owner is not None and history.owner is not self:
            raise RuntimeError(
                f"{op}: this history belongs to another stack; make a DepthHistory for each stack "
                "and each forward pass"
            )
        if history.traced:
            raise RuntimeError(
                f"{op}: this pass began inside torch.compile and goes on outside; make its history "
                "outside of the compiled function or with eager=True, or compile the whole stack "
                "with fullgraph=True"
            )
        if index is not None and not checks.is_whole(index):
            raise TypeError(f"{op}: index must be an integer, got {index!r}")
        pushed = len(history)
        k = pushed if index is None else index
        task = torch._C._current_graph_task_id()
        # A pass that began in this backward pass recomputes a whole stack, which is allowed.
        if k >= pushed and depth_pass is not None and task not in (-1, depth_pass.began_in):
            raise RuntimeError(
                f"{op}: a push during the backward pass of another forward pass; under "
                "checkpointing pass index= and use, in each recomputation, the history of its own "
                "forward pass"
            )
        if k >= self.rows:
            raise RuntimeError(
                f"{op}: {self.num_layers} layers push {self.rows} states, and this history has "
                "them all; expected a new DepthHistory for a new forward pass"
            )
        if not 0 <= k <= pushed or (k < pushed and task == -1):
            already = ", which is pushed already" if 0 <= k < pushed else ""
            raise RuntimeError(
                f"{op}: layer called out of order: expected index {pushed}, got {k}{already}"
            )
        push.k, push.recomputed = k, k < pushed
        if push.recomputed:
            self._check_recomputed(depth_pass, k, task)
        elif history.closed:
            raise RuntimeError(f"{op}: this history is closed; make a new one")
        elif depth_pass is not None and depth_pass.learning != torch.is_grad_enabled():
            raise RuntimeError(
                f"{op}: grad mode changed within a pass; push every state under the grad mode of "
                "the first push (reentrant checkpointing changes it: use use_reentrant=False), and "
                "detach the output of a frozen layer"
            )

    def _check_recomputed(self, depth_pass: DepthPass, k: int, task: int) -> None:
        """Checks a push that checkpointing repeats: it must belong to this pass.

        The checkpointed function may refer to the wrong history, for example when a module keeps
        only the history of its last pass. So the check follows the graph down from the autograd
        node that runs now. The first boundaries on the way must belong to this pass. If there is no
        boundary on the way, this pass must be in the middle of its backward. The states up to k
        must still exist.
        """
        passes = nearest_passes(torch._C._current_autograd_node(), self)
        if depth_pass not in passes and (passes or depth_pass.task != task):
            raise RuntimeError(
                f"{self.name}: push {k} is recomputed for another forward pass than its history's; "
                "make a DepthHistory in each forward pass, and let the checkpointed function refer "
                "to it, not to an attribute that the next forward pass replaces"
            )
        depth_pass.check_readable(k)
