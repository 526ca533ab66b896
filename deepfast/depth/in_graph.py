"""A depth connection inside torch.compile: the launches of the engine become part of the graph.

The compiler does not look into a push. When it traces the graph's forward and backward, it runs the
push as eager code does, with `DepthPass` and its autograd nodes, on tensors without data. The graph
gets what they launch, with the buffers that the launches write. So it moves the bytes of eager
code. Its memory is a buffer of states and one of gradients.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from deepfast.depth.depth_pass import OutNorm, Push
from deepfast.depth.history import DepthHistory, graph_number
from deepfast.ops import common

BY_ID: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Every connection by its id: a compiled graph cannot hold a module."""


def traced_graph() -> int:
    """`graph_number` of the graph that is being traced, which may then hold pushes."""
    torch.compiler.allow_in_graph(_push)
    return graph_number()


traced_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _number(x: Any) -> Any:
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
        branch, residual, index=index, dropout_p=_number(dropout_p), seed=seed,
        out_norm=OutNorm(weight, bias, *map(_number, norm)) if norm else None, return_x=return_x,
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
