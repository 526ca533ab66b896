"""DenseFormer's module, by the names of its authors' package."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast import checks
from deepfast.depth.boundary import OpenPass
from deepfast.depth.dlcl import DLCL


class DWAModules(DLCL):
    """Depth-weighted averages: after block i, ``x = sum_j alphas[i][j] X_j``.

    X_0 is the embedding and X_{i+1} the output of block i. The sum runs over every dilation-th j,
    counted back from i + 1, after every period-th block; the other blocks' outputs are returned as
    they are. A model calls it as it calls the authors' module::

        dwa.init_accumulators(x)
        for i, block in enumerate(blocks):
            x = dwa(block(x), block_idx=i)

    Memory is one state per block, gradients included, where the authors' module keeps the states
    and autograd their sums. The names of the parameters are the authors', ``alphas.{i}.weight``, so
    their checkpoints load.

    Args:
        n_blocks: number of blocks.
        dilation, period: see above.

    Source: Pagliardini et al., DenseFormer, NeurIPS 2024, https://github.com/epfml/DenseFormer.
    """

    name = "DWAModules"

    def __init__(self, n_blocks: int, dilation: int = 1, period: int = 1):
        checks.whole(self.name, n_blocks=n_blocks, dilation=dilation, period=period)
        if period > n_blocks:
            raise ValueError(f"{self.name}: {period=} must be at most {n_blocks=}")
        # The width is known when a pass begins.
        super().__init__(n_blocks, 1, norm=None, dilation=dilation, period=period)
        del self.weight
        self.n_blocks = n_blocks
        self.alphas = nn.ModuleList(
            nn.Linear((row + dilation) // dilation, 1, bias=False) if row % period == 0 else None
            for row in range(1, n_blocks + 1)
        )
        self.open = OpenPass()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # There are none yet when DLCL calls this.
        for alpha in getattr(self, "alphas", ()):
            if alpha is not None:
                nn.init.zeros_(alpha.weight)
                nn.init.ones_(alpha.weight[0, -1:])

    def effective_weight(self) -> Tensor:
        one = next(self.parameters()).new_ones(1)
        rows = []
        for row, alpha in enumerate((None, *self.alphas)):
            if alpha is None:
                rows.append(F.pad(one, (row, self.rows - row - 1)))
                continue
            # One weight in every `dilation` columns, the last one for the newest state.
            spread = F.pad(alpha.weight.view(-1, 1), (0, self.dilation - 1)).flatten()
            rows.append(F.pad(spread, (row % self.dilation, self.rows - row - self.dilation)))
        return torch.stack(rows)

    def init_accumulators(self, x: Tensor) -> None:
        """Begins a forward pass with the embedding (..., D)."""
        checks.tensor(self.name, "x", x)
        self.dim = x.shape[-1]
        self.open.begin()
        self(x, -1)

    def forward(self, x: Tensor, block_idx: int) -> Tensor:  # type: ignore[override]
        """What follows block ``block_idx``, whose output is x (..., D)."""
        history = self.open.history
        if history is None:
            raise RuntimeError(
                f"{self.name}: call init_accumulators(x) at the start of each forward pass"
            )
        checks.whole(self.name, -1, block_idx=block_idx)
        x = super().forward(x, history, index=block_idx + 1)  # type: ignore[assignment]
        if block_idx + 1 == self.n_blocks:
            self.open.end()
        return x

    def extra_repr(self) -> str:
        return f"n_blocks={self.n_blocks}, dilation={self.dilation}, period={self.period}"
