"""Depth connections beyond one GPU, with torch.distributed: pipeline stages."""

from deepfast.parallel.edges import Edge, EdgePayload, edge_payload
from deepfast.parallel.gradients import sum_connection_gradients
from deepfast.parallel.stage import EncoderStage, split

__all__ = [
    "Edge",
    "EdgePayload",
    "EncoderStage",
    "edge_payload",
    "split",
    "sum_connection_gradients",
]
