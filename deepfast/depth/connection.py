"""What all depth connections share: the push of a state, what it is checked for, and the pass that
it belongs to."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from deepfast import checks
from deepfast.depth.boundary import Call, DepthHistory, Parameters, Push, boundary, nearest_passes
from deepfast.depth.depth_pass import DepthPass
from deepfast.depth.in_graph import CONNECTIONS
from deepfast.depth.rows import OutNorm
from deepfast.depth.schedule import Pattern, Schedule, default_block
from deepfast.depth.traced import traced
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


class DepthConnection(nn.Module):
    """Every layer reads a weighted sum of the states of all layers below it.

    What `DLCL` and `AttentionResiduals` share. They have the parameters, and a kind of pass that
    weighs the states with them.

    Args:
        num_layers: L.
        dim: D.
        pattern: pattern[l] has the states that row l reads, in ascending order.
        running: running[k]: whether state k is what is pushed plus state k - 1.
        norm: "pre": states have layer-norms; "post": rows have; None.
        state_dtype: what states are under autocast: torch.float32, or None for its dtype.
        eps: added to the variance in these layer-norms.
        backend: see `deepfast.backend`.
    """

    name: str
    """In errors. The class of a sharded module has another name."""
    normalize_embedding = False
    norm_type = "layer"
    # Each kind of connection has its own.
    pass_kind: type[DepthPass]
    pass_parameters: Callable[[], tuple[Tensor | None, ...]]
    """What a pass weighs the states with, with gradient; first the weights or queries."""
    traced_row: Callable[[list[Tensor], list[int], int, Tensor, list[Tensor] | None], Tensor]
    """By registered ops: (states, their numbers, k, the first of `pass_parameters`, partial) -> row
    k, from these states and its partial sum."""
    traced_far: Callable[[list[Tensor], list[int], range, Tensor], list[tuple[Tensor, int]] | None]
    """(states, their numbers, rows, the first of `pass_parameters`) -> the partial sums of several
    rows over the same states: tensors, each with the dimension that counts the rows. None where no
    op has them."""

    def __new__(cls, *_, **__):
        # Also where a connection is copied or loaded.
        connection = super().__new__(cls)
        CONNECTIONS[id(connection)] = connection
        return connection

    def __init__(
        self,
        num_layers: int,
        dim: int,
        pattern: Pattern,
        *,
        running: tuple[bool, ...] | None = None,
        norm: str | None,
        state_dtype: torch.dtype | None,
        eps: float,
        backend: str | None,
    ):
        super().__init__()
        checks.choice(self.name, (torch.float32, None), state_dtype=state_dtype)
        self.num_layers, self.dim, self.pattern, self.rows = num_layers, dim, pattern, len(pattern)
        self.running = running or (False,) * self.rows
        self.norm, self.state_dtype, self.eps, self.backend = norm, state_dtype, eps, backend
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
        p: Tensor | None = next(self.parameters(), None)
        if p is None:
            # Raises, with the name of a parameter that is missing.
            p = self.pass_parameters()[0]
        return p.device

    def norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Weights and biases (L+1, D) of the norms, or None, with gradient."""
        return None, None

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
        call = Call(y, history, index, residual, dropout_p, seed, out_norm, return_x)
        if not torch.compiler.is_compiling():
            return self._push(call)
        return self._push_outside(call) if history.eager else traced(self, call)

    def _push(self, call: Call) -> Tensor | tuple[Tensor | None, Tensor]:
        """`forward` in eager code."""
        history, out_norm = call.history, call.out_norm
        common.reverse_mode_only(self.name, vmap=False)
        checks.tensor(self.name, "the layer's output", call.y)
        if call.residual is not None:
            checks.tensor(self.name, "residual", call.residual)
        y, residual = common.cast_states(self.state_dtype, call.y, call.residual)
        k = _check_push(self, y, residual, call)
        if history.state is None:
            self._begin(y, history)
        p, seed = call.dropout_p if self.training else 0.0, None
        if p > 0 and call.seed is None:
            seed = history.state.seed(k)
        elif p > 0:
            seed = common.draw_seed(self.name, call.seed, y.device)
        norm = None if out_norm is None else (out_norm.eps, out_norm.rms)
        return_x = call.return_x and not (self.norm == "post" and self.has_norm(k))
        push = Push(history.state, k, p, seed, return_x, norm, call.k is not None)
        x, out = boundary(history, push, y, residual, out_norm)
        if out_norm is not None:
            return x, out
        return x if out is None else out

    _push_outside = torch.compiler.disable(
        _push, reason="a push outside of the graph; DepthHistory(eager=False) traces it"
    )

    def _begin(self, y: Tensor, history: DepthHistory) -> None:
        """Begins the pass whose first push is y. The whole pass uses the parameters read here."""
        block = history.block or default_block(self.rows, y.device.type, self.pass_kind.pulled)
        if block not in self._schedules:
            self._schedules[block] = Schedule(self.pattern, block)
        parameters = history.parameters or self.pass_parameters()
        run = self.pass_kind(self, y, self._schedules[block], history.inplace, parameters)
        history.owner, history.kind, history.state = self, (y.shape, y.dtype, y.device), run
        history.grad_mode = torch.is_grad_enabled()
        history.task = torch._C._current_graph_task_id()
        if run.any_learns:
            history.token = Parameters.apply(run, *parameters)


def _check_push(connection: DepthConnection, y: Tensor, residual: Tensor | None, call: Call) -> int:
    """Checks a push and returns its index k. It changes nothing.

    y, residual: those of the call, cast for autocast.
    """
    op, history, out_norm = connection.name, call.history, call.out_norm
    if not isinstance(history, DepthHistory):
        raise TypeError(f"{op}: history must be a DepthHistory, got {type(history).__name__}")
    kind = y.shape, y.dtype, y.device
    # A state of the same kind as the first one of this pass needs no further check.
    if history.owner is not connection or history.kind != kind:
        check_state(connection, y)
        if history.owner is connection and history.kind is not None:
            shape, dtype, device = history.kind
            raise ValueError(
                f"{op}: the states of a pass must be alike: expected {tuple(shape)} of {dtype} on "
                f"{device}, got {tuple(y.shape)} of {y.dtype} on {y.device}"
            )
    checks.probability(op, call.dropout_p)
    if residual is not None and (residual.shape, residual.dtype, residual.device) != kind:
        checks.like(op, "residual", residual, "the branch", y)
    if out_norm is not None:
        _check_out_norm(connection, out_norm, y)
    k = _check_index(connection, history, call.k)
    if out_norm is not None and connection.norm == "post" and connection.has_norm(k):
        raise ValueError(f"{op}: a post-norm boundary has its own LN; out_norm must be None")
    return k


def check_state(connection, y: Tensor) -> None:
    """Checks the width, the dtype and the device of what is pushed."""
    op = connection.name
    if not y.is_floating_point():
        raise ValueError(f"{op}: the input must have a floating-point dtype, got {y.dtype}")
    if y.shape[-1] != connection.dim:
        raise ValueError(f"{op}: the input must be (..., {connection.dim}), got {tuple(y.shape)}")
    if y.device != connection.device:
        raise ValueError(f"{op}: the input must be on {connection.device}, got {y.device}")


def _check_out_norm(connection, out_norm: OutNorm, y: Tensor) -> None:
    op = connection.name
    if not isinstance(out_norm, OutNorm):
        raise TypeError(
            f"{op}: out_norm must be an OutNorm (LayerNorm.as_output() or RMSNorm.as_output()), "
            f"got {type(out_norm).__name__}"
        )
    checks.eps(op, out_norm.eps, argument="out_norm.eps")
    for name, p in (("weight", out_norm.weight), ("bias", out_norm.bias)):
        checks.parameter(op, f"out_norm.{name}", p, (connection.dim,), y.device)


def _check_index(connection, history: DepthHistory, index: int | None) -> int:
    """The index k of this push: the next one or, in backward, a recomputed one."""
    op = connection.name
    if history.owner is not None and history.owner is not connection:
        raise RuntimeError(
            f"{op}: this history belongs to another stack; make a DepthHistory for each stack "
            "and each forward pass"
        )
    if history.traced:
        raise RuntimeError(
            f"{op}: this pass began inside torch.compile and goes on outside; make its history "
            "outside of the compiled function or with eager=True, or compile the whole stack with "
            "fullgraph=True"
        )
    if index is not None and not checks.is_whole(index):
        raise TypeError(f"{op}: index must be an integer, got {index!r}")
    pushed, begun = len(history), history.state is not None
    k = pushed if index is None else index
    task = torch._C._current_graph_task_id()
    # A pass that began in this backward pass recomputes a whole stack, which is allowed.
    if k >= pushed and begun and task not in (-1, history.task):
        raise RuntimeError(
            f"{op}: a push during the backward pass of another forward pass; under checkpointing "
            "pass index= and use, in each recomputation, the history of its own forward pass"
        )
    if k >= connection.rows:
        raise RuntimeError(
            f"{op}: {connection.num_layers} layers push {connection.rows} states, and this "
            f"history has them all; expected a new DepthHistory for a new forward pass"
        )
    if not 0 <= k <= pushed or (k < pushed and task == -1):
        already = ", which is pushed already" if 0 <= k < pushed else ""
        raise RuntimeError(
            f"{op}: layer called out of order: expected index {pushed}, got {k}{already}"
        )
    if k < pushed:
        _check_recomputed(history, k, task)
        return k
    if history.closed:
        raise RuntimeError(f"{op}: this history is closed; make a new one")
    if begun and history.state.released:
        raise RuntimeError(f"{op}: this history's backward has ended; make a new one")
    if begun and history.grad_mode != torch.is_grad_enabled():
        raise RuntimeError(
            f"{op}: grad mode changed within a pass; push every state under the grad mode of the "
            "first push (reentrant checkpointing changes it: use use_reentrant=False), and "
            "detach the output of a frozen layer"
        )
    return k


def _check_recomputed(history: DepthHistory, k: int, task: int) -> None:
    """Checks a push that checkpointing repeats: it must belong to the pass of ``history``.

    The checkpointed function may refer to the wrong history, for example when a module keeps only
    the history of its last pass. So the check follows the graph down from the autograd node that
    runs now. The first boundaries on the way must belong to this pass. If there is no boundary on
    the way, this pass must be in the middle of its backward. The states up to k must still exist.
    """
    state, op = history.state, history.owner.name
    passes = nearest_passes(torch._C._current_autograd_node(), history.owner)
    if state not in passes and (passes or state.task != task):
        raise RuntimeError(
            f"{op}: push {k} is recomputed for another forward pass than its history's; make a "
            "DepthHistory in each forward pass, and let the checkpointed function refer to it, "
            "not to an attribute that the next forward pass replaces"
        )
    state.check_readable(k)
