"""How the layers of a stack are joined, and one plain loop for pre-norm and one for post-norm.

The connections are the plain residual, DLCL, DLCL set up as DenseFormer, attention residuals, MUDD,
and latent depth, which is a residual connection whose layers scale their own branches.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepfast import checks
from deepfast.depth.attention_residuals import AttentionResiduals
from deepfast.depth.boundary import recompute_row
from deepfast.depth.dlcl import DLCL
from deepfast.depth.history import DepthHistory
from deepfast.memory.policies import ATTENTION_RESIDUALS, RERUN
from deepfast.nn.connections.mudd import MUDD, MUDDHistory, ReadStreams
from deepfast.nn.layer_norm import NORMS, Norm, check_norms, plain_norm
from deepfast.nn.recompute import Kept, Recompute, not_saved
from deepfast.nn.rerun import rerun
from deepfast.ops import common

PRESETS: dict[str, dict] = {"dlcl": {}, "denseformer": {"norm": None, "init": "identity"}}
"""Connection that is a DLCL -> the arguments of `DLCL` that it changes from their defaults.

"denseformer": depth-weighted averages start as the identity and mix the states without
layer-norms; ``dilation`` and ``period`` are those of the paper (Pagliardini et al., DenseFormer,
2024). The paper takes no average at the embedding and between periods. Here such a row has one
learned scale, which starts at 1.
"""

PRE_NORM = (*ATTENTION_RESIDUALS, "mudd")
"""Connections that only pre-norm stacks have."""

CONNECTIONS = ("dlcl", "residual", "denseformer", *PRE_NORM, "latent")

BLOCKS = 8
"""How many blocks of layers "block_attnres" has where ``block`` is None, as in the paper."""


def dlcl_options(connection: str, norm: str, dlcl: dict | None) -> dict:
    """The arguments of `DLCL` in a stack, except its sizes. The user's replace the preset's.

    Args:
        connection: a name of `PRESETS`.
        norm: "pre" or "post", of the stack.
        dlcl: the user's arguments. Its "norm" may only be the stack's norm, or None for no
            layer-norms in the mixture.

    Raises:
        ValueError: for another "norm".
    """
    options = {"norm": norm} | PRESETS[connection] | (dlcl or {})
    if options["norm"] not in (norm, None):
        raise ValueError(
            f"dlcl: norm must be None or the stack's {norm!r}, got {options['norm']!r}"
        )
    return options


def rows_per_layer(op: str, connection: str, reads: int | None, parts: int) -> int:
    """How often a layer pushes and reads.

    Args:
        op: the stack's name in errors.
        connection: one of `CONNECTIONS`.
        reads: 1: once; 2: each of its ``parts`` does; None: 2 for attention residuals, else 1.

    Raises:
        ValueError: for other ``reads``, and for 2 without attention residuals.
    """
    attends = connection in ATTENTION_RESIDUALS
    reads = 1 + attends if reads is None else reads
    checks.whole(op, 1, 2, reads=reads)
    if reads == 2 and not attends:
        raise ValueError(f"{op}: reads must be 1 or None where connection={connection!r}, got 2")
    return parts if reads == 2 else 1


class LayerCall(NamedTuple):
    """How a stack calls one of its layers: ``layer(x, normed=n, **options)``.

    In pre-norm x is the layer's input, n = LN(x), and the layer returns its last residual and its
    last branch. In post-norm n is None and the layer returns its output. With ``part`` among the
    options the call is ``layer(n, normed=None, **options)``, and the layer returns a branch.
    """

    layer: Any
    """The layer; for a layer that latent depth skips, one of its methods (`norms_alone`)."""
    policy: str
    """What the layer keeps for backward, one of `deepfast.memory.POLICIES`."""
    options: dict


def _part(call: LayerCall) -> str | None:
    """The part of the layer that the call runs; None for the whole layer. No property, because the
    compiler of torch 2.10 knows none of a named tuple."""
    return call.options.get("part")


class Connection(nn.Module):
    """Runs the layers of a stack; all work between two layers is one pass over memory.

    pre-norm, residual   ``x_{l+1} = y_l``; the same with latent depth, whose layers scale their
                         own branches
    pre-norm, DLCL       ``x_{l+1} = sum_k W[l,k] LN_k(y_k)``
    pre-norm, attnres    ``x_{l+1} = sum_k softmax_k(w_l . RMSNorm(v_k)) v_k``, where v_k is what
                         layer k adds, or what its sublayer k adds if each of them reads
    pre-norm, mudd       ``x_{l+1,s} = sum_k A_l[k,s] y_k`` for four streams s, with weights of each
                         token, see `MUDD`; each has its own layer-norm
    pre-norm, always     ``n = LN(x_{l+1})`` for the next layer, and a final LN after the last one
    post-norm            ``y_l = LN(r + f)``; with DLCL ``x_{l+1} = LN_l(sum_k W[l,k] y_k)``.

    A depth connection does not keep the mixed inputs x for backward. It recomputes them from the
    states, block by block, so the stack needs no more memory than the plain residual one.

    The pre-norm layer-norms between layers, or between sublayers, belong to this module, not to the
    layers, so that a sharding wrapper around a layer never hides them.

    Args:
        op: the class of the stack, which errors name.
        reads: how often a layer pushes and reads, see `rows_per_layer`.
    """

    def __init__(
        self,
        op: str,
        num_layers: int,
        dim: int,
        *,
        connection: str,
        norm: str,
        norm_kind: str = "layer",
        dropout: float,
        backend: str | None,
        dlcl: dict | None = None,
        block: int | None = None,
        reads: int = 1,
    ):
        super().__init__()
        checks.whole(op, num_layers=num_layers, dim=dim)
        checks.probability(op, dropout, argument="dropout")
        checks.choice(op, CONNECTIONS, connection=connection)
        check_norms(op, connection, norm, norm_kind)
        if dlcl and connection not in PRESETS:
            raise ValueError(f"{op}: dlcl options need connection='dlcl', got {connection!r}")
        if block is not None and connection != "block_attnres":
            raise ValueError(f"{op}: block needs connection='block_attnres', got {connection!r}")
        if connection in PRE_NORM and norm != "pre":
            raise ValueError(f"{op}: connection={connection!r} needs norm='pre', got {norm!r}")
        self.kind, self.norm, self.dropout, self.reads = connection, norm, dropout, reads
        self.residuals = None
        if connection in ATTENTION_RESIDUALS:
            if connection == "block_attnres" and block is None:
                block = -(-num_layers // BLOCKS)
            self.residuals = AttentionResiduals(
                num_layers, dim, reads=reads, block=block, states="autocast", backend=backend
            )
        self.mudd = MUDD(num_layers, dim, backend=backend) if connection == "mudd" else None
        self.dlcl = None
        if connection in PRESETS:
            options = {"norm_kind": norm_kind} | dlcl_options(connection, norm, dlcl)
            self.dlcl = DLCL(num_layers, dim, states="autocast", backend=backend, **options)
        # Pre-norm: entry l is the first LN of layer l, or of sublayer l if each of them reads; the
        # last one is the stack's final LN.
        self.norms: Sequence[Norm] | None = None
        if norm == "pre":
            self.norms = nn.ModuleList(  # type: ignore[assignment]
                NORMS[norm_kind](dim, backend=backend) for _ in range(reads * num_layers + 1)
            )
        # MUDD: the norms of keys and of values; the first layer has one norm for all streams.
        if self.mudd is not None:
            self.key_norms, self.value_norms = (
                nn.ModuleList(NORMS[norm_kind](dim, backend=backend) for _ in range(num_layers - 1))
                for _ in range(2)
            )

    @property
    def depth(self) -> DLCL | AttentionResiduals | None:
        """The depth connection; None where a layer reads only the layer below it."""
        return self.residuals if self.dlcl is None else self.dlcl

    def forward(
        self, x: Tensor, calls: Sequence[LayerCall | None], states: list[Tensor] | None = None
    ) -> Tensor:
        """From the embedding (T, D) to the stack's output (T, D).

        Args:
            calls: one for each layer, or for each sublayer that reads. None skips the layer, its
                norm and its state (pre-norm without a depth connection only).
            states: a list to append the L + 1 states (T, D) to: the embedding, then the input of
                each next layer (under a depth connection, its mixture). The list keeps them alive.
        """
        (x,) = common.autocast(x)
        if self.mudd is not None:
            return self._streams(x, calls, states)
        history = None if self.depth is None else DepthHistory()
        if self.norm == "post":
            return self._post_norm(x, calls, history, states)
        return self._pre_norm(x, calls, self.norms, history, states)

    def _pre_norm(
        self,
        x: Tensor,
        calls: Sequence[LayerCall | None],
        norms: Sequence[Norm | None],
        history: DepthHistory | None,
        states: list[Tensor] | None,
    ) -> Tensor:
        """norms: of each call, and the last one; None where a stage ends with its last push."""
        branch, residual, p = x, None, 0.0
        used = [(call, norm) for call, norm in zip(calls, norms, strict=False) if call]
        for row, (call, norm) in enumerate((*used, (None, norms[-1]))):
            whole = call is not None and _part(call) is None
            shown = states is not None and row % self.reads == 0
            if history is not None:
                if self.residuals is not None and residual is not None:
                    # The state is what all sublayers of the layer have added. The last residual
                    # holds the layer's input and every sublayer but the last.
                    residual = residual - x
                if norm is None:
                    return self.depth(branch, history, residual=residual, dropout_p=p)
                x, n = self.depth(
                    branch,
                    history,
                    residual=residual,
                    dropout_p=p,
                    out_norm=norm.as_output(),
                    want_x=whole or shown,
                )
            elif residual is None:
                x, n = branch, norm(branch)
            else:
                n, x = norm(branch, residual=residual, dropout_p=p)
            if shown:
                states.append(x)
            if call is None:
                return n
            # Freed here, so that only the layer holds its input.
            branch = residual = None
            if whole:
                residual, branch = run_layer(call, x, n, norm, history)
            else:
                branch = run_layer(call, n, None, norm, history)  # type: ignore[assignment]
            p = self.dropout
        raise AssertionError("the last norm, which has no layer, returns")

    def _streams(
        self, x: Tensor, calls: Sequence[LayerCall], states: list[Tensor] | None
    ) -> Tensor:
        """MUDD; a state between two layers is the next layer's residual stream."""
        history = MUDDHistory()
        x = self.mudd(x, history)
        for k, call in enumerate(calls):
            if states is not None:
                states.append(x if k == 0 else x[..., -1, :])
            if k == 0:
                x, branch = run_layer(call, x, self.norms[0](x), self.norms[0], None)
            else:
                norms = [self.norms[k], self.key_norms[k - 1], self.value_norms[k - 1]]
                reader = ReadStreams(call.layer, norms, call.policy not in RERUN)
                x, branch = run_layer(call._replace(layer=reader), x, None, None, None)
            x = self.mudd(branch, history, residual=x, dropout_p=self.dropout)
        if states is not None:
            states.append(x)
        return self.norms[-1](x)

    def _post_norm(
        self,
        x: Tensor,
        calls: Sequence[LayerCall],
        history: DepthHistory | None,
        states: list[Tensor] | None,
    ) -> Tensor:
        for call in (None, *calls):
            if call is not None:
                x = run_layer(call, x, None, None, history)  # type: ignore[assignment]
            if history is not None:
                x = self.depth(x, history)  # type: ignore[assignment]
            if states is not None:
                states.append(x)
        return x


def run_layer(
    call: LayerCall,
    x: Tensor,
    n: Tensor | None,
    norm: Norm | None,
    history: DepthHistory | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Runs one layer, or one part of it, under its memory policy.

    Args:
        x: the layer's input; for a part, its normalised input.
        n: norm(x); None for a part and in post-norm.
        norm: the norm before the layer or part; None in post-norm.
        history: the pass of the depth connection; None without one.
    """
    layer, policy, options = call
    if _part(call) is not None and _runs_again(call):
        policy = "history"

    def run(x: Tensor, n: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        return layer(x, normed=n, **options)

    if not torch.is_grad_enabled() or (torch.compiler.is_compiling() and policy not in RERUN):
        return run(x, n)
    if torch.compiler.is_compiling():
        # A compiler understands torch's checkpointing, and chooses itself what else to save.
        return checkpoint(run, x, n, use_reentrant=False)
    # Below the lowest layer that learns, states may be freed before this layer runs again. A pass
    # that torch.compile traces has none.
    learns = x.requires_grad or (n is not None and n.requires_grad)
    states = learns and history is not None and history.state is not None
    if policy == "history" and states:
        return rerun(layer, run, (x, n), _from_states(norm, history, n is not None), options)
    if policy in RERUN:
        return rerun(layer, run, (x, n), _from_input(x, n, norm), options)
    if _part(call) is not None and states:
        return _part_from_states(layer, x, norm, history, options)
    # A depth connection keeps states and not x, so autograd keeps n. Without one the norm keeps x,
    # and backward recomputes n.
    if n is not None and history is None and plain_norm(norm):
        return layer(x, normed=n, recompute_n=norm.recompute(n, x), **options)
    return layer(x, normed=n, **options)


def _runs_again(call: LayerCall) -> bool:
    """Whether backward runs a part again. The feed-forward block without its hidden activation
    runs from n, without its last product."""
    return call.policy in RERUN or (_part(call) == "feed_forward" and call.policy != "keep")


def _part_from_states(
    layer: Any, n: Tensor, norm: Norm, history: DepthHistory, options: dict
) -> Tensor:
    """Runs a part so that backward recomputes its input n from the states."""
    inputs = _from_states(norm, history, False)
    again = Recompute(n, lambda: inputs()[0])
    with not_saved([(n, again)]):
        return layer(n, recompute_n=again, **options)


def _from_states(norm: Norm | None, history: DepthHistory, both: bool):
    """Returns the function that recomputes the inputs from the states (policy "history"): x and n
    or, unless ``both``, the only input of a post-norm layer or of a part."""
    # The function must not hold the history: the history's token holds the graph, and the graph
    # holds this function.
    state, k = history.state, history.state.pushed - 1
    out_norm = None if norm is None else norm.keep_output()

    def inputs() -> tuple[Tensor, Tensor | None]:
        x, normed = recompute_row(
            state, k, None if out_norm is None else out_norm(), both or out_norm is None
        )
        # In post-norm a row may have its own norm. Its result is then the layer's input.
        return (x, normed) if both else (x if normed is None else normed, None)

    return inputs


def _from_input(x: Tensor, n: Tensor | None, norm: Norm | None):
    """Returns the function that gives x, which it keeps, and recomputes n (policy "states")."""
    x_kept = Kept(x)
    if n is None:
        return lambda: (x_kept(), None)
    n_again = norm.recompute(n, x).function if plain_norm(norm) else Kept(n)
    return lambda: (x_kept(), n_again())
