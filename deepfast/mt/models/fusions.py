"""The fusions of the layers of a `Transformer`."""

from torch import Tensor, nn

from deepfast.mt.models.transformer_config import SIDES, TransformerConfig
from deepfast.nn import LayerFusion
from deepfast.nn.connections.fusion import layer_embedding


class Fusions(nn.Module):
    """`LayerFusion` over the layers of the encoder, the decoder or both.

    Attributes:
        encoder, decoder: the side's `LayerFusion`, or None.
        layer_embedding: E of the fusions that have layer embeddings, or None. Layer l of either
            side has the same embedding.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        c = config
        for side in SIDES:
            kind, layers = getattr(c, f"{side}_fusion"), getattr(c, f"{side}_layers")
            fusion = None
            if kind is not None:
                fusion = LayerFusion(
                    layers + 1, c.dim, kind, own_embedding=False, source_norm=c.norm == "pre",
                    backend=c.backend, **c.fusion,
                )  # fmt: skip
            setattr(self, side, fusion)
        states = [
            f.num_states
            for f in self.children()
            if isinstance(f, LayerFusion) and f.with_embeddings
        ]
        self.layer_embedding = layer_embedding(max(states), c.dim) if states else None

    def forward(self, side: str, states: list[Tensor], output: Tensor) -> Tensor:
        """The fusion of a stack's ``states``, the last of which is its ``output``."""
        fusion = getattr(self, side)
        embedding = self.layer_embedding if fusion.with_embeddings else None
        return fusion([*states[:-1], output], embedding)
