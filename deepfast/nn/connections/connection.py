"""How layers of a stack are joined: plain residual, DLCL, DLCL set up as DenseFormer, attention
residuals; and residual with latent depth, whose gates are the layers' matter."""

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepfast import checks
from deepfast.depth.attention_residuals import AttentionResiduals, ResidualHistory
from deepfast.depth.boundary import recompute_row
from deepfast.depth.dlcl import DLCL
from deepfast.depth.history import DepthHistory
from deepfast.memory.policies import RERUN
from deepfast.nn.bare import bare
from deepfast.nn.layer_norm import LayerNorm
from deepfast.nn.recompute import Kept, rerun
from deepfast.ops import common

PRESETS: dict[str, dict] = {"dlcl": {}, "denseformer": {"norm": None, "init": "identity"}}
"""Connection that is a DLCL -> its arguments where they are not DLCL's defaults.

"denseformer": depth-weighted averages begin as the identity and mix states without layer-norms of
their own; ``dilation`` and ``period`` are the paper's (Pagliardini et al., DenseFormer, 2024). The
paper takes no average on the embedding and between periods; a learned scale of one stands there.
"""

ATTENTION_RESIDUALS = ("attnres", "block_attnres")
CONNECTIONS = ("dlcl", "residual", "denseformer", *ATTENTION_RESIDUALS, "latent")

BLOCKS = 8
"""Blocks of layers under "block_attnres" where their size is not given, as published."""

Body = Callable[..., Tensor | tuple[Tensor, Tensor]]
"""Pre-norm: (x, n, again), a layer's input, its normalised form and what makes that again, or None,
to the layer's last residual and branch. Post-norm: (x, None) to the layer's output."""


def dlcl_options(connection: str, norm: str, dlcl: dict | None) -> dict:
    """The arguments of `DLCL` in a stack, but for sizes: the preset's, then the user's.

    Args:
        connection: a name of `PRESETS`.
        norm: "pre" or "post", of the stack.
        dlcl: the user's; its key "norm" may only leave the layer-norms of the mixture out (None).

    Raises:
        ValueError: for layer-norms where the stack has none.
    """
    options = {"norm": norm} | PRESETS[connection] | (dlcl or {})
    if options["norm"] not in (norm, None):
        raise ValueError(
            f"dlcl: norm must be None or the stack's {norm!r}, got {options['norm']!r}"
        )
    return options


class Connection(nn.Module):
    """Runs a stack of layer bodies, with everything between two of them in one pass.

    pre-norm, residual   ``x_{l+1} = y_l``; so with latent depth, whose gates are the layers' matter
    pre-norm, DLCL       ``x_{l+1} = sum_k W[l,k] LN_k(y_k)``
    pre-norm, attnres    ``x_{l+1} = sum_k softmax_k(w_l . RMSNorm(v_k)) v_k``, layer k adding v_k
    then ``n = LN(x_{l+1})`` for the next layer, and a final LN after the last.
    post-norm            ``y_l = LN(r + f)``; with DLCL ``x_{l+1} = LN_l(sum_k W[l,k] y_k)``.

    Under DLCL the mixed inputs x are not kept for backward: they are made again from the states,
    block by block, so the stack holds no more memory than the plain residual one.

    The pre-norm layer-norms between layers belong to this module, not to the layers, so that a
    sharding wrapper around a layer never hides them.
    """

    def __init__(
        self,
        num_layers: int,
        dim: int,
        *,
        connection: str,
        norm: str,
        dropout: float,
        backend: str | None,
        dlcl: dict | None = None,
        block: int | None = None,
    ):
        super().__init__()
        checks.whole("Connection", num_layers=num_layers, dim=dim)
        checks.probability("Connection", dropout, argument="dropout")
        if connection not in CONNECTIONS:
            raise ValueError(f"connection must be one of {CONNECTIONS}, got {connection!r}")
        if dlcl and connection not in PRESETS:
            raise ValueError(f"dlcl options need connection='dlcl', got {connection!r}")
        if block is not None and connection != "block_attnres":
            raise ValueError(f"block needs connection='block_attnres', got {connection!r}")
        if connection in ATTENTION_RESIDUALS and norm != "pre":
            raise ValueError(f"connection {connection!r} needs norm='pre', got {norm!r}")
        self.norm, self.dropout = norm, dropout
        self.residuals = None
        if connection in ATTENTION_RESIDUALS:
            if connection == "block_attnres" and block is None:
                block = -(-num_layers // BLOCKS)
            self.residuals = AttentionResiduals(num_layers, dim, block=block, backend=backend)
        self.dlcl = None
        if connection in PRESETS:
            options = dlcl_options(connection, norm, dlcl)
            self.dlcl = DLCL(num_layers, dim, backend=backend, **options)
        # Pre-norm: entry l is layer l's first LN, the last one the stack's final LN.
        self.norms = None
        if norm == "pre":
            self.norms = nn.ModuleList(
                LayerNorm(dim, backend=backend) for _ in range(num_layers + 1)
            )

    def forward(
        self,
        x: Tensor,
        layers: Iterable[Body],
        policies: Sequence[str] | None = None,
        *,
        states: list[Tensor] | None = None,
        skipped: Collection[int] = (),
    ) -> Tensor:
        """From the embedding (T, D) to the stack's output (T, D).

        policies: the memory policy of each layer; None: what a layer keeps is its own business.
        states: a list to be given the L + 1 states: the embedding and what each layer leaves for
            the next one, (T, D) each; under DLCL row l's mixture. They are held as long as it is.
        skipped: indices of layers that are left out, with their norm and their state; pre-norm,
            without DLCL.
        """
        (x,) = common.autocast(x)
        layers = list(layers)
        policies = policies or ("keep",) * len(layers)
        if self.norm == "post":
            return self._post_norm(x, layers, policies, states)
        if self.residuals is not None:
            return self._attention_residuals(x, layers, policies, states)
        run = [index for index in range(len(layers)) if index not in skipped]
        norms = [self.norms[index] for index in (*run, -1)]
        layers, policies = [layers[index] for index in run], [policies[index] for index in run]
        return self._pre_norm(x, layers, norms, policies, states)

    def _pre_norm(
        self,
        x: Tensor,
        layers: list[Body],
        norms: list[LayerNorm],
        policies: Sequence[str],
        states: list[Tensor] | None,
    ) -> Tensor:
        history = DepthHistory() if self.dlcl is not None else None
        last = len(layers)
        branch, residual, p = x, None, 0.0
        for index, norm in enumerate(norms):
            if history is not None:
                x, n = self.dlcl(
                    branch,
                    history,
                    residual=residual,
                    dropout_p=p,
                    out_norm=norm.as_output(),
                    want_x=index < last or states is not None,
                )
            elif residual is None:
                x, n = branch, norm(branch)
            else:
                n, x = norm(branch, residual=residual, dropout_p=p)
            if states is not None:
                states.append(x)
            if index < last:
                # Nothing but the layer needs its input from here on.
                branch = residual = None
                residual, branch = self._run(layers[index], policies[index], x, n, norm, history)
                p = self.dropout
        return n

    def _attention_residuals(
        self,
        x: Tensor,
        layers: list[Body],
        policies: Sequence[str],
        states: list[Tensor] | None,
    ) -> Tensor:
        history, v = ResidualHistory(), x
        for layer, policy, norm in zip([*layers, None], [*policies, None], self.norms, strict=True):
            x = self.residuals(v, history)
            n = norm(x)
            if states is not None:
                states.append(x)
            if layer is not None:
                residual, branch = self._run(layer, policy, x, n, norm, None)
                # What all sublayers add: the last residual has the input and all but the last one.
                v = (residual - x) + F.dropout(branch, self.dropout, self.training)
        return n

    def _run(
        self,
        layer: Body,
        policy: str,
        x: Tensor,
        n: Tensor | None,
        norm: LayerNorm | None,
        history: DepthHistory | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One layer under its policy; ``norm`` made n of x, and both are None in post-norm."""
        if not torch.is_grad_enabled():
            return layer(x, n)
        if torch.compiler.is_compiling():
            # A compiler sees through torch's checkpointing, and keeps what it likes elsewhere.
            return checkpoint(layer, x, n, use_reentrant=False) if policy in RERUN else layer(x, n)
        # Below the lowest layer that learns the states may be gone when this one runs again.
        learns = x.requires_grad or (n is not None and n.requires_grad)
        if policy == "history" and learns:
            return _rerun_from_states(layer, x, n, norm, history)
        if policy in RERUN:
            return _rerun_from_input(layer, x, n, norm)
        # DLCL keeps n, and x nowhere; without it the layer-norm keeps x.
        if n is None or history is not None or not bare(norm, LayerNorm):
            return layer(x, n)
        return layer(x, n, norm.again(n, x))

    def _post_norm(
        self,
        x: Tensor,
        layers: list[Body],
        policies: Sequence[str],
        states: list[Tensor] | None,
    ) -> Tensor:
        history = DepthHistory() if self.dlcl is not None else None
        if history is not None:
            x = self.dlcl(x, history)
        if states is not None:
            states.append(x)
        for body, policy in zip(layers, policies, strict=True):
            x = self._run(body, policy, x, None, None, history)
            if history is not None:
                x = self.dlcl(x, history)
            if states is not None:
                states.append(x)
        return x


def _rerun_from_states(
    layer: Body, x: Tensor, n: Tensor | None, norm: LayerNorm | None, history: DepthHistory
) -> Tensor | tuple[Tensor, Tensor]:
    """The policy "history": x and n are mixed again from the states."""
    # Not the history, whose token belongs to the graph that will hold this.
    state, k = history.state, history.state.pushed - 1
    out_norm = None if norm is None else norm.as_output()

    def mixed() -> tuple[Tensor, Tensor | None]:
        x, out = recompute_row(state, k, out_norm)
        if norm is not None:
            return x, out
        # In post-norm a row's own norm gives the layer's input.
        return (x if out is None else out), None

    return rerun(layer, (x, n), mixed)


def _rerun_from_input(
    layer: Body, x: Tensor, n: Tensor | None, norm: LayerNorm | None
) -> Tensor | tuple[Tensor, Tensor]:
    """The policy "states": x is kept, and n made of it again."""
    kept = Kept(x)
    if n is None:
        return rerun(layer, (x, None), lambda: (kept(), None))
    made = norm.again(n, x) if bare(norm, LayerNorm) else Kept(n)
    return rerun(layer, (x, n), lambda: (kept(), made()))
