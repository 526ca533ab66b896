"""A depth connection in an exported program, or in several graphs: the same sums by registered ops.

Neither can hold the buffer of states that `DepthPass` reads and writes. Here each state is an
ordinary tensor, and each row is one op over the states it reads. The result is the same, but the
traffic is quadratic in depth. A pass that is in one compiled graph is in_graph.py's.
"""

import torch
from torch import Tensor

from deepfast import ops
from deepfast.depth import in_graph
from deepfast.depth.depth_pass import OutNorm
from deepfast.ops import common
from deepfast.ops.layer_norm import normalise


def _norm(connection, x: Tensor, norm: OutNorm) -> Tensor:
    return normalise(connection.name, x, None, norm, 0.0, None, connection.backend)[0]


def _sum(y: Tensor, residual: Tensor | None, p: float, seed, backend) -> Tensor:
    """residual + dropout(y)."""
    if p == 0:
        return y if residual is None else y + residual
    residual = torch.zeros_like(y) if residual is None else residual
    return ops.add_layer_norm(
        y, residual, None, None, dropout_p=p, training=True, seed=seed, backend=backend
    )[1]


def traced(connection, call) -> Tensor | tuple[Tensor | None, Tensor]:
    """`DepthConnection.forward` while a compiler traces it.

    call: its arguments, a `deepfast.depth.connection.Call`.
    """
    history = call.history
    if connection.shards is not None:
        raise RuntimeError(
            f"{connection.name}: with sharded tokens a push cannot be traced; make its history "
            "outside of the compiled function or with eager=True"
        )
    k = len(history.traced)
    if history.owner is not None and history.owner is not connection:
        raise RuntimeError(f"{connection.name}: this history belongs to another stack")
    if k >= connection.rows:
        raise RuntimeError(
            f"{connection.name}: this history has all of its {k} states; make a new one"
        )
    if history.state is not None or history.closed:
        raise RuntimeError(
            f"{connection.name}: this history's pass began outside torch.compile, or is closed"
        )
    if call.k is not None and call.k != k:
        raise RuntimeError(f"{connection.name}: layer called out of order inside torch.compile")
    history.owner = connection
    if k == 0:
        history.parameters = connection.pass_parameters()
    if k == 0 and history.in_graph:
        history.in_graph = in_graph.possible()
    if history.in_graph:
        return in_graph.push(connection, call)
    y, residual = common.cast_states(connection.state_dtype, call.y, call.residual)
    norm = None
    if connection.has_norm(k):
        norm_weight, norm_bias = connection.norms()
        bias = None if norm_bias is None else norm_bias[k]
        norm = OutNorm(norm_weight[k], bias, connection.eps, connection.norm_type == "rms")
    if connection.running[k]:
        before = history.traced[k - 1]
        residual = before if residual is None else residual + before
    p = call.dropout_p if connection.training else 0.0
    z = _sum(y, residual, p, call.seed, connection.backend)
    if connection.norm == "pre" and norm is not None:
        z = _norm(connection, z, norm)
    history.traced.append(z)
    sources = [history.traced[j] for j in connection.pattern[k]]
    x = connection.traced_row(sources, k, history.parameters[0])
    if k == connection.rows - 1:
        # The compiled graph keeps what backward needs.
        history.traced = [None] * (k + 1)
        history.close()
    if connection.norm == "post" and norm is not None:
        return _norm(connection, x, norm)
    if call.out_norm is None:
        return x
    return x if call.return_x else None, _norm(connection, x, call.out_norm)
