"""The caller's handle on one forward pass through a stack with depth connections."""

import torch
from torch import Tensor

from deepfast.depth.state import DepthState


class DepthHistory:
    """What the layers of one stack have written in one forward pass.

    Make a new one for every forward pass and hand it to every call of the stack's `DLCL`. It
    owns one buffer with a state per layer, which backward turns into the buffer of gradients. The
    buffer is freed when backward ends or when the pass's outputs are freed; under
    `torch.no_grad` with the last push. Several passes may be open at once, each with a history of
    its own.

    Args:
        inplace: whether backward may write gradients over states (no memory beyond one state per
            layer). False keeps the states, at twice the memory, so that a second backward with
            ``retain_graph=True`` works.
        block: rows per look-ahead block; None chooses by depth.
    """

    def __init__(self, *, inplace: bool = True, block: int | None = None):
        if block is not None and block < 1:
            raise ValueError(f"DepthHistory: block must be at least 1, got {block}")
        self.inplace = inplace
        self.block = block
        # The stack, and shape, dtype and device of the first push.
        self.owner: object | None = None
        self.kind: tuple[torch.Size, torch.dtype, torch.device] | None = None
        # Autograd nodes hold the state; the token holds autograd nodes. They are kept apart so
        # that there is no reference cycle.
        self.state: DepthState | None = None
        self.token: Tensor | None = None
        # Grad mode of the first push, and the backward pass (graph task) that it was part of: -1
        # outside of backward.
        self.grad_mode = False
        self.task = -1
        # A traced pass keeps these instead of a state: W, and the states as they are mixed. After
        # the last push the states are None.
        self.traced_weight: Tensor | None = None
        self.traced: list[Tensor | None] = []
        self.closed = False

    def __len__(self) -> int:
        """States pushed so far."""
        return len(self.traced) if self.state is None else self.state.pushed

    @property
    def nbytes(self) -> int:
        """Bytes of the states and partial sums that are alive now."""
        return 0 if self.state is None else self.state.nbytes

    def close(self) -> None:
        """Lets go of the graph; no further state can be pushed. The last push does this itself.

        Needed only where a pass breaks off while `torch.utils.checkpoint` holds a function that
        refers to this history, which would keep each other alive. ``with DepthHistory() as h:``
        closes it too.
        """
        self.token = self.traced_weight = None
        self.closed = True

    def __enter__(self) -> "DepthHistory":
        return self

    def __exit__(self, *_exception) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DepthHistory(states={len(self)}, inplace={self.inplace}, nbytes={self.nbytes})"
