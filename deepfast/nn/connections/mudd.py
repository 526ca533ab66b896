"""MUDD: each token chooses how its next layer's queries, keys, values and residual read all layers.

Row l mixes the states y_0 .. y_l, the embedding and the outputs of l layers, with weights that come
from y_l. So row l reads all of them, in forward for its sums and in backward for the gradients of
its weights. One pass over the states serves all streams.

Backward keeps one gradient for each state. Rows come from the last to the first, and each adds its
part to the gradients of all states that it has read, in the pass that computes the gradients of its
weights. The gradient of y_l is then complete when row l has run. Autograd alone would allocate one
tensor for each pair of a row and a state.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepfast import checks, ops
from deepfast.depth.connection import check_state, part
from deepfast.dtypes import compute_dtype
from deepfast.memory.policies import RERUN
from deepfast.nn.connections.base import Connection, LayerCall, Options, note, run_layer
from deepfast.nn.layer_norm import Norm, plain_norm
from deepfast.ops import common
from deepfast.ops.depth_mix import mix_tokens, mix_tokens_backward


class _Gradients:
    """The gradients of the states of one forward pass, while a backward pass computes them."""

    def __init__(self):
        self.task = -1
        self.sums: list[Tensor] = []

    def add_row(self, states, weight, dout, dweight, backend) -> None:
        """Adds what one row gives to the gradients of the states that it reads, 0 .. l."""
        task = self._task()
        accumulate = task == self.task and len(self.sums) > 0
        if not accumulate:
            self.task, self.sums = task, [common.empty_contiguous(y) for y in states]
        sums = self.sums[: len(states)]
        mix_tokens_backward(states, weight, dout, sums, accumulate, dweight, backend)

    def take(self, k: int) -> Tensor | None:
        """The gradient of state k, of which row k was the last to add its part."""
        if self._task() != self.task or len(self.sums) <= k:
            return None
        found = self.sums[k]
        del self.sums[k:]
        return found

    def _task(self) -> int:
        """The number of this backward pass, larger than that of each one that began before it."""
        task = torch._C._current_graph_task_id()
        if task < self.task:
            raise RuntimeError(
                "MUDD: another backward pass through the same forward pass began before this one "
                "ended; run them one after the other"
            )
        return task


@common.traced_as("mudd_row")
class _Row(torch.autograd.Function):
    """One row. A token, an empty tensor passed from row to row, keeps backward in order even where
    a layer ignores its input. Row 0 has no weight and returns its state."""

    @staticmethod
    def forward(ctx, gradients, states, backend, y, weight, _token):
        ctx.gradients, ctx.backend, ctx.row = gradients, backend, len(states) - 1
        ctx.set_materialize_grads(False)
        if weight is None:
            return y.view_as(y), torch.empty(0)
        ctx.save_for_backward(weight, *states)
        return mix_tokens(states, weight, backend), torch.empty(0)

    @staticmethod
    @common.first_order("MUDD")
    def backward(ctx, dout, _token):
        gradients, dweight = ctx.gradients, None
        if ctx.row == 0:
            dy = gradients.take(0)
            dy = dout if dy is None else dy if dout is None else dy.add_(dout)
            return None, None, None, dy, None, None
        if dout is not None:
            weight, *states = ctx.saved_tensors
            if ctx.needs_input_grad[4]:
                dweight = torch.empty_like(weight, dtype=compute_dtype(dout.dtype))
            gradients.add_row(states, weight, dout, dweight, ctx.backend)
            dweight = None if dweight is None else dweight.to(weight.dtype)
        return None, None, None, gradients.take(ctx.row), dweight, None


class MUDDHistory:
    """The states of one forward pass. Make a new one for every pass through a stack."""

    def __init__(self):
        self.states: list[Tensor] = []
        self.gradients = _Gradients()
        self.token: Tensor | None = None
        # The stack, and the grad mode of the first push.
        self.owner: MUDD | None = None
        self.grad_mode = False


class MUDD(nn.Module):
    """Every layer reads S sums of the states of all layers below it, weighted for each token.

        x_{l+1,s} = sum_{k<=l} A_l[k,s] y_k,   A_l = gelu(RMSNorm(y_l) W_1) W_2 + a_l

    y_0 is the embedding, y_l the output of layer l with its residual. The first layer reads the
    embedding. With four streams a layer projects its queries, keys and values from the first three
    and adds its branches to the fourth. The stack's output is one sum::

        history = deepfast.nn.MUDDHistory()
        x = mudd(embedding, history)              # (..., D), pushes y_0
        for layer in layers:
            x = mudd(layer(x), history)           # (..., S, D), pushes y_l; the last call (..., D)

    At the start a is 1 for the newest state and W_2 is 0: the plain residual stack. Each row reads
    all states before it, so traffic is quadratic in the number of layers. Memory is one state for
    each layer, and in backward one gradient for each.

    Args:
        num_layers: L.
        dim: D.
        streams: S.
        eps: added to the mean square in the RMSNorm, which has no weight.
        backend: see `deepfast.backend`.

    Attributes:
        up: W_1 of rows 1 .. L, (S (l+1), D) each.
        down: W_2 of these rows, ((l+1) S, S (l+1)); of the last row (l+1, S (l+1)).
        bias: a of these rows, (l+1, S); of the last row (l+1, 1).

    Source: Xiao, Meng, Li, Yuan, MUDDFormer: Breaking Residual Bottlenecks in Transformers via
    Multiway Dynamic Dense Connections, ICML 2025, arXiv 2502.12170.
    """

    name = "MUDD"

    def __init__(
        self,
        num_layers: int,
        dim: int,
        *,
        streams: int = 4,
        eps: float = 1e-6,
        backend: str | None = None,
    ):
        super().__init__()
        checks.whole("MUDD", num_layers=num_layers, dim=dim, streams=streams)
        checks.eps("MUDD", eps)
        self.num_layers, self.dim, self.streams = num_layers, dim, streams
        self.eps, self.backend = eps, backend
        counts = range(2, num_layers + 2)
        rows = [(k, streams if k <= num_layers else 1) for k in counts]
        self.up = nn.ParameterList(torch.empty(streams * k, dim) for k, _ in rows)
        self.down = nn.ParameterList(torch.empty(k * s, streams * k) for k, s in rows)
        self.bias = nn.ParameterList(torch.empty(k, s) for k, s in rows)
        self.reset_parameters()

    @property
    def device(self) -> torch.device:
        return self.up[0].device

    def reset_parameters(self) -> None:
        for up, down, bias in zip(self.up, self.down, self.bias, strict=True):
            nn.init.normal_(up, std=self.dim**-0.5)
            nn.init.zeros_(down)
            nn.init.zeros_(bias)
            nn.init.ones_(part(bias, -1))

    def forward(
        self,
        y: Tensor,
        history: MUDDHistory,
        *,
        residual: Tensor | None = None,
        dropout_p: float = 0.0,
        seed: int | Tensor | None = None,
    ) -> Tensor:
        """Pushes a layer's output and returns what the next layer reads.

        Args:
            y: (..., D), the output of the layer (or, with ``residual``, its last branch).
            history: the history of this forward pass.
            residual: added to dropout(y) in the pass that normalises the sum; not in the first
                push.
            dropout_p, seed: probability and seed of dropout on ``y``, while ``self.training``; not
                in the first push.

        Returns:
            (..., S, D); the embedding itself from the first call, (..., D) from the last.

        Raises:
            TypeError, ValueError: for operands that do not fit.
            RuntimeError: for a push after the last one, with another stack's history or under
                another grad mode; in backward, for a second derivative.
            NotImplementedError: under forward-mode differentiation (dual tensors).
        """
        common.reverse_mode_only("MUDD")
        checks.tensor("MUDD", "the layer's output", y)
        row = self._check_history(history)
        if row == 0 and (residual is not None or dropout_p != 0):
            raise ValueError("MUDD: the first push takes no residual and no dropout_p, got one")
        check_state(self, y)
        y, residual = common.autocast(y, residual)
        if row == 0:
            history.owner, history.grad_mode = self, torch.is_grad_enabled()
            return self._read(y, None, history)
        bias = self.bias[row - 1]
        weight, y = ops.feed_forward(
            y, None, None, self.up[row - 1], None, self.down[row - 1], bias.view(-1), self.eps,
            norm_type="rms", residual=residual, dropout_p=dropout_p, activation="gelu",
            training=self.training, seed=seed, backend=self.backend,
        )  # fmt: skip
        out = self._read(y, weight.unflatten(-1, bias.shape), history)
        return out if row < self.num_layers else out.squeeze(-2)

    def _check_history(self, history: MUDDHistory) -> int:
        """Checks that a push may follow those in ``history``; returns their number."""
        if not isinstance(history, MUDDHistory):
            raise TypeError(f"MUDD: history must be a MUDDHistory, got {type(history).__name__}")
        row = len(history.states)
        if row > 0 and history.owner is not self:
            raise RuntimeError(
                "MUDD: this history belongs to another stack; make a MUDDHistory for each stack "
                "and each forward pass"
            )
        if row > self.num_layers:
            raise RuntimeError(
                f"MUDD: expected {self.num_layers + 1} pushes with one history, got one more; make "
                "a new MUDDHistory for every forward pass"
            )
        # Backward would end at a row without a node, and lose the gradients of the states below it.
        if row > 0 and history.grad_mode != torch.is_grad_enabled():
            raise RuntimeError(
                "MUDD: grad mode changed within a pass; push every state under the grad mode of "
                "the first push, and detach the output of a frozen layer"
            )
        return row

    def _read(self, y: Tensor, weight: Tensor | None, history: MUDDHistory) -> Tensor:
        if torch.compiler.is_compiling():
            history.states.append(y)
            if weight is None:
                return y
            return ops.depth_mix(history.states, weight, backend=self.backend)
        checks.like("MUDD", "y", y, "the embedding", history.states[0] if history.states else y)
        history.states.append(y.detach())
        out, history.token = _Row.apply(
            history.gradients, list(history.states), self.backend, y, weight, history.token
        )
        return out

    def extra_repr(self) -> str:
        return f"num_layers={self.num_layers}, dim={self.dim}, streams={self.streams}"


class ReadStreams(nn.Module):
    """A pre-norm layer that reads the streams of `MUDD`, each of the first three through its norm.

    Args:
        layer: called with the residual stream x and ``normed``, the three others normalised.
        norms: of the streams of queries, keys and values.
        recompute: whether backward recomputes the normalised streams. A layer that runs again as a
            whole does so anyway.
    """

    norms: Sequence[Norm]

    def __init__(self, layer: nn.Module, norms: Sequence[nn.Module], recompute: bool):
        super().__init__()
        self.layer, self.recompute = layer, recompute
        self.norms = nn.ModuleList(norms)  # type: ignore[assignment]

    def forward(self, streams_TSD: Tensor, normed: None = None, **options):
        *streams, residual = streams_TSD.unbind(-2)
        found: list[Tensor] = [norm(x) for norm, x in zip(self.norms, streams, strict=True)]
        again = self.recompute and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if again and all(plain_norm(norm) for norm in self.norms):
            each = zip(self.norms, found, streams, strict=True)
            options["recompute_n"] = tuple(norm.recompute(n, x) for norm, n, x in each)
        return self.layer(residual, normed=tuple(found), **options)


class Streams(Connection):
    """`MUDD` between the layers of a pre-norm stack; each of its first three streams has a norm.

    A state between two layers is the next layer's residual stream.
    """

    def make_children(self, options: Options) -> None:
        self.mudd = MUDD(options.num_layers, options.dim, backend=options.backend)

    def __init__(self, options: Options):
        super().__init__(options)
        # Of keys and of values. The first layer has one norm for all streams.
        count = options.num_layers - 1
        self.key_norms, self.value_norms = (self.make_norms(options, count) for _ in range(2))

    def forward(
        self, x: Tensor, calls: Sequence[LayerCall | None], states: list[Tensor] | None = None
    ) -> Tensor:
        (x,) = common.autocast(x)
        history = MUDDHistory()
        x = self.mudd(x, history)
        for k, call in enumerate(calls):
            note(states, x if k == 0 else x[..., -1, :])
            if k == 0:
                x, branch = run_layer(call, x, self.norms[0](x), self.norms[0], None)
            else:
                norms = [self.norms[k], self.key_norms[k - 1], self.value_norms[k - 1]]
                reader = ReadStreams(call.layer, norms, call.policy not in RERUN)
                x, branch = run_layer(call._replace(layer=reader), x, None, None, None)
            x = self.mudd(branch, history, residual=x, dropout_p=self.dropout)
        note(states, x)
        return self.norms[-1](x)
