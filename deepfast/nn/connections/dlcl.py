"""Stacks whose layers read a weighted sum of the states of all layers: DLCL and DenseFormer."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from deepfast.connections import CONNECTIONS
from deepfast.depth.connection import DepthConnection
from deepfast.depth.dlcl import DLCL
from deepfast.depth.history import DepthHistory
from deepfast.nn.connections.base import Connection, Note, Options, StackCall, run_layer
from deepfast.nn.layer_norm import Norm, plain_norm
from deepfast.ops import common


def dlcl_options(connection: str, norm: str, dlcl: dict | None) -> dict:
    """The arguments of `DLCL` in a stack, except its sizes. The user's replace the preset's.

    Args:
        connection: one that is a `DLCL`, see `deepfast.connections`.
        norm: "pre" or "post", of the stack.
        dlcl: the user's arguments. Its "norm" may only be the stack's norm, or None for no
            layer-norms in the mixture.

    Raises:
        ValueError: for another "norm".
    """
    options = {"norm": norm} | CONNECTIONS[connection].dlcl | (dlcl or {})
    if options["norm"] not in (norm, None):
        raise ValueError(
            f"dlcl: norm must be None or the stack's {norm!r}, got {options['norm']!r}"
        )
    return options


class Mixed(Connection):
    """Each layer reads a mixture of all states, made by a depth connection.

        pre-norm    ``x_{l+1} = sum_k W[l,k] LN_k(y_k)``, and ``n = LN(x_{l+1})`` in the same pass
        post-norm   ``x_{l+1} = LN_l(sum_k W[l,k] y_k)``

    The mixed inputs x are not kept for backward, which recomputes them from the states, block by
    block. So the stack needs no more memory than the plain residual one.
    """

    child = "dlcl"
    """The name of the depth connection among the children."""
    adds = False
    """Whether a state is what a layer adds to its input, not its output."""

    @staticmethod
    def make_depth(
        connection: str, num_layers: int, dim: int, norm: str | None, given: dict
    ) -> DepthConnection:
        """The depth connection.

        given: its further arguments, which replace those of the connection's name.
        """
        return DLCL(num_layers, dim, **dlcl_options(connection, norm, given))

    def make_children(self, options: Options) -> None:
        given = {"state_dtype": None} | options.made | self.given(options)
        sizes = options.connection, options.num_layers, options.dim, options.norm
        setattr(self, self.child, self.make_depth(*sizes, given))

    def given(self, options: Options) -> dict:
        """Further arguments of the depth connection, which may replace the stack's."""
        return {"norm_type": options.norm_type} | (options.dlcl or {})

    @property
    def depth(self) -> Any:  # type: ignore[override]
        return getattr(self, self.child)

    def forward(self, x: Tensor, calls: Sequence[StackCall | None], note: Note = None) -> Tensor:
        (x,) = common.autocast(x)
        if self.norms is not None:
            return self._pre_norm(x, calls, self.norms, note)
        history = DepthHistory()
        for call in (None, *calls):
            if call is not None:
                x = run_layer(call, x, None, None, history)
            x = self.depth(x, history)
            if note is not None:
                note(x)
        return x

    def _pre_norm(
        self, x: Tensor, calls: Sequence[StackCall], norms: Sequence[Norm], note: Note
    ) -> Tensor:
        """`forward` in pre-norm."""
        history, branch, residual, p = DepthHistory(), x, None, 0.0
        for row, (call, norm) in enumerate(zip((*calls, None), norms, strict=True)):
            if residual is not None and self.adds:
                # The last residual holds the layer's input and what every sublayer but the last has
                # added. The state is what all of them have added.
                residual = residual - x
            shown = note is not None and row % self.reads == 0
            whole = call is not None and call.part is None
            x, n = self._read(branch, residual, p, norm, history, whole or shown)
            if shown:
                note(x)
            if call is None:
                return n
            # Freed here, so that only the layer holds its input.
            branch = residual = None
            if whole:
                residual, branch = run_layer(call, x, n, norm, history)
            else:
                branch = run_layer(call, n, None, norm, history)
            p = self.dropout
        raise AssertionError("the last norm, which has no layer, returns")

    def _read(
        self,
        branch: Tensor,
        residual: Tensor | None,
        dropout_p: float,
        norm: Norm,
        history: DepthHistory,
        return_x: bool,
    ) -> tuple[Tensor | None, Tensor]:
        """Pushes a state; returns its row, or None unless ``return_x``, and norm(row). A norm that
        is not plain runs after the push."""
        push = partial(self.depth, branch, history, residual=residual, dropout_p=dropout_p)
        if plain_norm(norm):
            return push(out_norm=norm.as_output(), return_x=return_x)
        x = push()
        return x, norm(x)
