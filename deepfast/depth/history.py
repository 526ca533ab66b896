"""The memory of one forward pass through a stack with depth connections."""

from torch import Tensor

from deepfast.depth.state import DepthState


class DepthHistory:
    """What the layers of one stack have written in one forward pass.

    Make a new one for every forward pass and hand it to every call of the stack's `DLCL`. It
    owns one buffer with a state per layer, which backward turns into the gradients' buffer; the
    buffer goes when backward ends, or when the pass's outputs go. Several passes may be open at
    once, each with a history of its own.

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
        self.owner: object | None = None
        # The state is what autograd nodes hold; the token belongs to the graph. Keeping them apart
        # keeps the graph free of reference cycles.
        self.state: DepthState | None = None
        self.token: Tensor | None = None
        self.token_grad = False
        self.grad_mode = False
        # The backward pass that the first push was part of, -1 outside of one.
        self.task = -1
        # Shape, dtype and device of the first push.
        self.kind: tuple | None = None
        # What a traced pass keeps instead: W as applied, and the states as they are mixed.
        self.traced_weight: Tensor | None = None
        self.traced: list[Tensor] = []
        self.closed = False

    def __len__(self) -> int:
        """States pushed so far."""
        return len(self.traced) if self.state is None else self.state.pushed

    @property
    def nbytes(self) -> int:
        """Bytes of the states' buffers that are alive now."""
        if self.state is None:
            return 0
        buffers = (self.state.states, self.state._partial, self.state._pulled)
        return sum(b.numel() * b.element_size() for b in buffers if b is not None)

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
