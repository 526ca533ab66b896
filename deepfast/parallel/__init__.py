"""Depth connections beyond one GPU, with torch.distributed: pipelines, and sharded tokens."""

from deepfast.parallel.edges import Edge, EdgePayload, edge_payload
from deepfast.parallel.gradients import sum_connection_gradients
from deepfast.parallel.stage import EncoderStage, split
from deepfast.parallel.tokens import shard_tokens

__all__ = [
    "Edge",
    "EdgePayload",
    "EncoderStage",
    "edge_payload",
    "shard_tokens",
    "split",
    "sum_connection_gradients",
]
