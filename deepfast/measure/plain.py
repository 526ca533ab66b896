"""The same encoder in plain PyTorch, with embedding and loss: what `memory.eager` predicts, to be
counted."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepfast import ops
from deepfast.measure.forms import AddLoop, StackAndSum
from deepfast.memory.eager import CHECKPOINTED, LOOP, STACK
from deepfast.memory.sizes import Sizes
from deepfast.nn import DLCL, Packing, TransformerEncoder

CONNECTIONS = {STACK: StackAndSum, LOOP: AddLoop}
"""Form of `memory.eager` -> its sum over layers; the other forms have none."""
DROPOUT = 0.1


class PlainModel(nn.Module):
    """Embedding, `torch.nn.TransformerEncoderLayer`s, and a loss over the vocabulary.

    Pre-norm, ReLU, dropout on the embedding and on both branches of a layer; weights of embedding
    and projection are shared, and the loss makes all logits at once.

    Args:
        sizes: width, heads, layers and so on; an encoder alone.
        form: one of `memory.eager.EAGER`.
    """

    def __init__(self, sizes: Sizes, form: str):
        super().__init__()
        self.form = form
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                sizes.width, sizes.heads, sizes.ffn, DROPOUT, batch_first=True, norm_first=True
            )
            for _ in range(sizes.layers)
        )
        for layer in self.layers:
            # On branches alone, as in deepfast: torch's layer would drop attention and ReLU too.
            layer.self_attn.dropout = layer.dropout.p = 0.0
        self.dlcl = DLCL(sizes.layers, sizes.width) if form in CONNECTIONS else None
        self.norm = nn.LayerNorm(sizes.width)

    def loss(self, tokens_BS: Tensor, target_BS: Tensor) -> Tensor:
        """Mean cross-entropy of (B, S) targets."""
        connect = (lambda y: y) if self.dlcl is None else CONNECTIONS[self.form](self.dlcl)
        x = connect(F.dropout(self.embedding(tokens_BS), DROPOUT, self.training))
        for layer in self.layers:
            if self.form == CHECKPOINTED:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = connect(layer(x))
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), target_BS.flatten())


class FusedModel(nn.Module):
    """The same model made of deepfast's parts; every layer under one memory policy."""

    def __init__(self, sizes: Sizes, policy: str):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.encoder = TransformerEncoder(
            sizes.layers, sizes.width, sizes.heads, sizes.ffn, dropout=DROPOUT, memory=policy
        )

    def loss(self, tokens_BS: Tensor, target_BS: Tensor) -> Tensor:
        """Mean cross-entropy of (B, S) targets."""
        x = F.dropout(self.embedding(tokens_BS.flatten()), DROPOUT, self.training)
        y = self.encoder.forward_packed(x, Packing(*tokens_BS.shape))
        return ops.linear_cross_entropy(y, self.embedding.weight, target_BS.flatten())
