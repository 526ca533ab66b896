"""A depth connection inside torch.compile: the launches of the engine become part of the graph.

The compiler does not look into a push. When it traces the graph's forward and backward, it runs the
push as eager code does, with `DepthPass` and its autograd nodes, on tensors without data. The graph
gets what they launch, with the buffers that the launches write. So it moves the bytes of eager
code. Its memory is a buffer of states and one of gradients.
"""

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from deepfast.depth.rows import OutNorm
from deepfast.ops import common

CONNECTIONS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Every connection by its id: a compiled graph cannot hold a module."""


SEVERAL = -1
"""An exported program, which may go to runtimes that do not have the launches, or a graph that may
break, so that the rest of a pass is in another."""

_numbers = itertools.count(1)


def current() -> int:
    """The number of the graph that is being traced, where it holds all that the function does
    (``fullgraph=True``). Else `SEVERAL`, or 0 where the graph has no more than the history."""
    if torch.compiler.is_exporting():
        return SEVERAL
    from torch._dynamo.symbolic_convert import InstructionTranslator

    from deepfast.depth.boundary import DepthHistory

    tx = InstructionTranslator.current_tx()
    if tx.output.root_tx.f_code is DepthHistory.__init__.__code__:
        return 0
    if not tx.one_graph:
        return SEVERAL
    torch.compiler.allow_in_graph(_push)
    if not hasattr(tx.output, "deepfast_number"):
        tx.output.deepfast_number = next(_numbers)  # type: ignore[attr-defined]
    return tx.output.deepfast_number  # type: ignore[attr-defined]


# What torch.compiler.assume_constant_result does, without importing all of torch's compiler.
current._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _number(x: Any) -> Any:
    """A number that the compiler takes for a variable, as a constant of the graph."""
    return float(x) if isinstance(x, torch.SymFloat) else x


def _push(
    connection: int, parameters: tuple[Tensor | None, ...], block: int | None, token: Tensor | None,
    y: Tensor, index: int | None, residual: Tensor | None, dropout_p: float,
    seed: int | Tensor | None, weight: Tensor | None, bias: Tensor | None,
    norm: list, return_x: bool,
) -> list[Tensor]:  # fmt: skip
    """One push, by tensors and constants alone: the next token, and what the push returns.

    The order of the tokens is the order of the pushes. Each has the history as an attribute.
    """
    from deepfast.depth.boundary import Call, DepthHistory

    owner = CONNECTIONS[connection]
    if token is None:
        # In place, the graph of backward would begin with a copy of the states.
        history = DepthHistory(inplace=False, block=block, eager=True)
        history.parameters = parameters
    else:
        history = token.deepfast_history  # type: ignore[attr-defined]
        history.token = token if token.requires_grad else None
    out_norm = OutNorm(weight, bias, *map(_number, norm)) if norm else None
    call = Call(y, history, index, residual, _number(dropout_p), seed, out_norm, return_x)
    results = owner._push(call)
    token, history.token = history.token, None
    token = torch.empty(0) if token is None else token
    token.deepfast_history = history  # type: ignore[attr-defined]
    results = results if isinstance(results, tuple) else (results,)
    return [token, *(x for x in results if x is not None)]


def push(connection, call) -> Tensor | tuple[Tensor | None, Tensor]:
    """`DepthConnection.forward` in the graph that holds the pass."""
    history, out_norm = call.history, call.out_norm
    weight, bias, *norm = (None, None) if out_norm is None else out_norm
    seed = call.seed
    if seed is not None and connection.training and call.dropout_p > 0:
        seed = common.draw_seed(connection.name, seed, call.y.device)
    token, *results = _push(
        id(connection), history.parameters, history.block, history.token,
        call.y, call.k, call.residual, call.dropout_p, seed, weight, bias, norm, call.return_x,
    )  # fmt: skip
    history.token = token
    history.traced.append(None)
    if len(history.traced) == connection.rows:
        history.close()
    if out_norm is None:
        return results[0]
    return results[0] if call.return_x else None, results[-1]
