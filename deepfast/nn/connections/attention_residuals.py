"""Stacks whose layers or sublayers attend to what the layers below them have added."""

from deepfast.connections import BLOCKS
from deepfast.depth.attention_residuals import AttentionResiduals
from deepfast.depth.connection import DepthConnection
from deepfast.nn.connections.base import Options
from deepfast.nn.connections.dlcl import Mixed


class Attended(Mixed):
    """``x_{l+1} = sum_k softmax_k(w_l . RMSNorm(v_k)) v_k``, in pre-norm stacks.

    v_k is what layer k adds, or what sublayer k adds if each of them reads.
    """

    child, adds = "residuals", True

    @staticmethod
    def make_depth(
        connection: str,
        num_layers: int,
        dim: int,
        norm: str | None,
        given: dict,
        kind: type[AttentionResiduals] = AttentionResiduals,
    ) -> DepthConnection:
        if connection == "block_attnres" and given.get("block") is None:
            given = given | {"block": -(-num_layers // BLOCKS)}
        return kind(num_layers, dim, **given)

    def given(self, options: Options) -> dict:
        return {"reads": self.reads, "block": options.block}
