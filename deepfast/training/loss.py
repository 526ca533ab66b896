"""Label-smoothed cross-entropy, Szegedy et al. 2016, as two sums."""

import torch.nn.functional as F
from torch import Tensor


def smoothed_loss(logits_NV: Tensor, labels_N: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Loss and negative log-likelihood, both summed over the N labels, in nats.

        loss = (1 - smoothing) * nll + smoothing * mean over the vocabulary of -log p

    The same as `F.cross_entropy(..., label_smoothing=smoothing, reduction="sum")`, with one
    log-softmax for both sums.

    Args:
        logits_NV: (N, V), any float dtype; computed in float32.
        labels_N: (N,) int64.
    """
    logp_NV = F.log_softmax(logits_NV.float(), dim=-1)
    nll = F.nll_loss(logp_NV, labels_N, reduction="sum")
    if smoothing == 0:
        return nll, nll.detach()
    uniform = -logp_NV.sum() / logp_NV.shape[-1]
    return (1 - smoothing) * nll + smoothing * uniform, nll.detach()
