"""A depth connection while a compiler traces it.

Where one graph holds the whole pass, the launches of eager code become part of it. The compiler
does not look into a push. When it traces the graph's forward and backward, it runs the push as
eager code does, with `DepthPass` and its autograd nodes, on tensors without data. The graph gets
what they launch, with the buffers that the launches write. So it moves the bytes of eager code. Its
memory is a buffer of states and one of gradients.

An exported program, or a pass in several graphs, cannot hold that buffer. There each state is an
ordinary tensor. Where a block of rows begins, one op over the older states gives the partial sums
of all its rows; one op each adds the states of the block. So forward has the schedule of
`deepfast.depth`. Autograd writes a gradient of every source for each op, and adds them up.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from deepfast.depth.history import DepthHistory, graph_number
from deepfast.depth.push import OutNorm, Push
from deepfast.depth.schedule import one_for_all
from deepfast.ops import common
from deepfast.ops.add_dropout import add_dropout
from deepfast.ops.layer_norm import normalise

BY_ID: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Every connection by its id: a compiled graph cannot hold a module."""


def traced(connection, push: Push, history: DepthHistory) -> Tensor | tuple[Tensor | None, Tensor]:
    """`DepthConnection.forward` while a compiler traces it."""
    k = len(history.traced)
    if history.owner is not None and history.owner is not connection:
        raise RuntimeError(f"{connection.name}: this history belongs to another stack")
    if k >= connection.rows:
        raise RuntimeError(
            f"{connection.name}: this history has all of its {k} states; make a new one"
        )
    if history.depth_pass is not None or history.closed:
        raise RuntimeError(
            f"{connection.name}: this history's pass began outside torch.compile, or is closed"
        )
    if push.index is not None and push.index != k:
        raise RuntimeError(f"{connection.name}: layer called out of order inside torch.compile")
    history.owner = connection
    if k == 0:
        history.parameters = connection.pass_parameters()
    if history.graph > 0 and history.graph == traced_graph():
        return push_in_graph(connection, push, history)
    if k > 0 and history.traced[-1] is None:
        raise RuntimeError(
            f"{connection.name}: this pass began inside torch.compile, in a graph that ended "
            "before its last push; compile with fullgraph=True to see where it breaks, or make "
            "the history with eager=True"
        )
    connection._check_one_norm(push.out_norm, k)
    y, residual = common.cast_states(connection.state_dtype, push.branch, push.residual)
    norm = None
    if connection.has_norm(k):
        norm_weight, norm_bias = connection.norms()
        bias = None if norm_bias is None else norm_bias[k]
        norm = OutNorm(norm_weight[k], bias, connection.eps, connection.norm_type == "rms")
    if connection.continues[k]:
        before = history.traced[k - 1]
        residual = before if residual is None else residual + before
    p = push.dropout_p if connection.training else 0.0
    z = add_dropout(connection.name, y, residual, p, push.seed, connection.backend)
    if connection.norm == "pre" and norm is not None:
        z = _norm(connection, z, norm)
    history.traced.append(z)
    x = _mixed(connection, history, k)
    if k == connection.rows - 1:
        # The compiled graph keeps what backward needs.
        history.traced = [None] * (k + 1)
        history.close()
    if connection.norm == "post" and norm is not None:
        return _norm(connection, x, norm)
    if push.out_norm is None:
        return x
    return x if push.return_x else None, _norm(connection, x, push.out_norm)


def _norm(connection, x: Tensor, norm: OutNorm) -> Tensor:
    return normalise(connection.name, x, None, norm, 0.0, None, connection.backend)[0]


def _mixed(connection, history, k: int) -> Tensor:
    """Row k, from its partial sum, where its block has some, and the states of the block."""
    states, weights = history.traced, history.parameters[0]
    schedule = connection._schedule(history.block, states[k].device.type)
    start, end = schedule.blocks[k]
    if k == start:
        passes = schedule.far_reads(start, end)
        history.far = None
        if one_for_all(passes, end - start):
            indices, rows = passes[0].sources, range(start, end)
            sources = [states[j] for j in indices]
            history.far = connection.traced_far(sources, indices, rows, weights)
    if history.far is None:
        indices, partial = connection.pattern[k], None
    else:
        indices, partial = schedule.near[k], [x.select(axis, k - start) for x, axis in history.far]
    return connection.traced_row([states[j] for j in indices], indices, k, weights, partial)


# ---- in one graph --------------------------------------------------------------------------------


def traced_graph() -> int:
    """`graph_number` of the graph that is being traced, which may then hold pushes."""
    torch.compiler.allow_in_graph(_push)
    return graph_number()


traced_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _constant(x: Any) -> Any:
    """A number that the compiler takes for a variable, as a constant of the graph."""
    return float(x) if isinstance(x, torch.SymFloat) else x


def _push(
    connection: int, parameters: tuple[Tensor | None, ...], token: Tensor | None,
    tensors: tuple, block: int | None, constants: tuple, norm: tuple,
) -> list[Tensor]:  # fmt: skip
    """One push, by tensors and constants alone: the next token, and what the push returns.

    The order of the tokens is the order of the pushes. Each has the history as an attribute.
    """
    if token is None:
        # In place, the graph of backward would begin with a copy of the states.
        history = DepthHistory(inplace=False, block=block, eager=True)
        history.parameters = parameters
    else:
        history = token.deepfast_history  # type: ignore[attr-defined]
        history.token = token if token.requires_grad else None
    branch, residual, seed, weight, bias = tensors
    index, dropout_p, return_x = constants
    push = Push(
        branch, residual, index=index, dropout_p=_constant(dropout_p), seed=seed,
        out_norm=OutNorm(weight, bias, *map(_constant, norm)) if norm else None, return_x=return_x,
    )  # fmt: skip
    results = BY_ID[connection]._push(push, history)
    token, history.token = history.token, None
    token = torch.empty(0) if token is None else token
    token.deepfast_history = history  # type: ignore[attr-defined]
    results = results if isinstance(results, tuple) else (results,)
    return [token, *(x for x in results if x is not None)]


def push_in_graph(connection, push: Push, history) -> Tensor | tuple[Tensor | None, Tensor]:
    """`DepthConnection.forward` in the graph that holds the pass."""
    weight, bias, *norm = (None, None) if push.out_norm is None else push.out_norm
    seed = push.seed
    if seed is not None and connection.training and push.dropout_p > 0:
        seed = common.draw_seed(connection.name, seed, push.branch.device)
    token, *results = _push(
        id(connection), history.parameters, history.token,
        (push.branch, push.residual, seed, weight, bias), history.block,
        (push.index, push.dropout_p, push.return_x), tuple(norm),
    )  # fmt: skip
    history.token = token
    history.traced.append(None)
    if len(history.traced) == connection.rows:
        history.close()
    if push.out_norm is None:
        return results[0]
    return results[0] if push.return_x else None, results[-1]
