"""Stacks whose layers or sublayers attend to what the layers below them have added."""

from collections.abc import Sequence

from torch import Tensor

from deepfast.connections import BLOCKS
from deepfast.depth.attention_residuals import AttentionResiduals
from deepfast.depth.connection import DepthConnection
from deepfast.depth.history import DepthHistory
from deepfast.nn.connections.base import LayerCall, Options, note, part_of, run_layer
from deepfast.nn.connections.dlcl import Mixed
from deepfast.nn.layer_norm import Norm


class Attended(Mixed):
    """``x_{l+1} = sum_k softmax_k(w_l . RMSNorm(v_k)) v_k``, in pre-norm stacks.

    v_k is what layer k adds, or what sublayer k adds if each of them reads.
    """

    child = "residuals"

    @staticmethod
    def make_depth(
        connection: str, num_layers: int, dim: int, norm: str | None, given: dict,
        kind: type[AttentionResiduals] = AttentionResiduals,
    ) -> DepthConnection:  # fmt: skip
        if connection == "block_attnres" and given.get("block") is None:
            given = given | {"block": -(-num_layers // BLOCKS)}
        return kind(num_layers, dim, **given)

    def make_children(self, options: Options) -> None:
        given = {"reads": self.reads, "block": options.block, "state_dtype": None}
        self.residuals = self.make_depth(
            options.connection, options.num_layers, options.dim, options.norm,
            given | {"backend": options.backend},
        )  # fmt: skip

    def pre_norm(
        self,
        x: Tensor,
        calls: Sequence[LayerCall],
        norms: Sequence[Norm],
        history: DepthHistory,
        states: list[Tensor] | None,
    ) -> Tensor:
        branch, residual, p = x, None, 0.0
        for row, (call, norm) in enumerate(zip(calls, norms, strict=False)):
            whole = part_of(call) is None
            shown = states is not None and row % self.reads == 0
            if residual is not None:
                # The last residual holds the layer's input and what every sublayer but the last has
                # added. The state is what all of them have added.
                residual = residual - x
            x, n = self.read(branch, residual, p, norm, history, whole or shown)
            if shown:
                note(states, x)
            # Freed here, so that only the layer holds its input.
            branch = residual = None
            if whole:
                residual, branch = run_layer(call, x, n, norm, history)
            else:
                branch = run_layer(call, n, None, norm, history)
            p = self.dropout
        if residual is not None:
            residual = residual - x
        return self.last_row(branch, residual, p, norms[-1], history, states)
