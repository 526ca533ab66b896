"""DenseFormer: after each block, a weighted average of the outputs of all blocks so far.

Pagliardini et al., DenseFormer: Enhancing Information Flow in Transformers via Depth Weighted
Averaging, NeurIPS 2024, https://arxiv.org/abs/2402.02622, section 3.
"""

from collections.abc import Callable, Sequence

from torch import Tensor


def denseformer(
    x: Tensor,
    blocks: Sequence[Callable[[Tensor], Tensor]],
    weight: Tensor,
    *,
    dilation: int = 1,
    period: int = 1,
) -> Tensor:
    """``Y_i = sum_j alpha[i, j] X_j`` with ``X_i = block_i(Y_{i-1})`` and ``X_0 = Y_0 = x``.

    The sum runs over every dilation-th j, counted back from i. It is taken after every period-th
    block; after the other blocks ``Y_i = X_i``. weight: alpha, (n+1, n+1) for n blocks.
    """
    outputs = [x]
    for i, block in enumerate(blocks, 1):
        x = block(x)
        outputs.append(x)
        if i % period == 0:
            x = sum(weight[i, j] * outputs[j] for j in range(i % dilation, i + 1, dilation))
    return x
