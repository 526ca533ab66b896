"""The encoders that are compared: the same layers and parameters, joined in different ways."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepfast.measure.forms import PEERS
from deepfast.measure.settings import Deadline, Settings
from deepfast.nn import Packing, TransformerEncoder

RESIDUAL, COMPILED = "plain residual", "loop of adds, compiled"
"""Variants that are no form of DLCL in `measure.forms`."""

REFERENCE = "stack and sum"
"""The form that losses and gradients are compared with: the DLCL paper's code."""

VARIANTS = (RESIDUAL, "deepfast", REFERENCE, "DenseFormer form", "loop of adds")
"""In the order in which they are first run: where time is short, the most wanted come first."""


def within(form: Callable, check: Callable[[], None]) -> Callable:
    """A form of `measure.forms` that calls ``check`` at every layer, in backward too.

    ``check`` ends a run by raising.
    """

    def make(dlcl):
        connect = form(dlcl)

        def connect_in_time(y: Tensor) -> Tensor:
            check()
            x = connect(y)
            if x.requires_grad:
                x.register_hook(lambda _: check())
            return x

        return connect_in_time

    return make


class PeerEncoder(nn.Module):
    """A pre-norm DLCL encoder whose sum over layers is made by a form of `measure.forms`.

    Layer bodies, layer-norms and every parameter are those of ``encoder``; only what stands
    between two layers differs. Dropout on the last branch of a layer is left out, as it is where
    ``encoder`` has none.
    """

    def __init__(self, encoder: TransformerEncoder, form: Callable):
        super().__init__()
        if encoder.connection.dlcl is None or encoder.connection.norm != "pre":
            raise ValueError("PeerEncoder: expected a pre-norm encoder with connection='dlcl'")
        if encoder.connection.dropout:
            raise ValueError(f"PeerEncoder: expected dropout 0, got {encoder.connection.dropout}")
        self.encoder, self.form = encoder, form

    def forward_packed(self, x_TD: Tensor, packing: Packing) -> Tensor:
        """Real tokens (T, D) to (T, D)."""
        connection = self.encoder.connection
        connect = self.form(connection.dlcl)
        x = connect(x_TD)
        for layer, norm in zip(self.encoder.layers, connection.norms, strict=False):
            residual, branch = layer.body(x, norm(x), packing)
            x = connect(residual + branch)
        return connection.norms[-1](x)


class Case:
    """One depth: an input, a target, and the encoders of all variants over shared parameters.

    Args:
        deadline: past it a step of a form other than deepfast's ends with OutOfTime; it may be
            replaced between two steps.
    """

    def __init__(
        self, settings: Settings, depth: int, deadline: Deadline, activation: str = "relu"
    ):
        torch.manual_seed(settings.seed)
        self.depth, self.deadline = depth, deadline
        sizes = (depth, settings.dim, settings.heads, settings.ffn_dim)
        options = {"dropout": 0.0, "activation": activation}
        self.encoder = TransformerEncoder(*sizes, **options)
        self._disturb(self.encoder.connection.dlcl)
        with torch.device("meta"):
            plain = TransformerEncoder(*sizes, connection="residual", **options)
        plain.layers = self.encoder.layers
        plain.connection.norms = self.encoder.connection.norms
        self.models: dict[str, nn.Module] = {RESIDUAL: plain, "deepfast": self.encoder}
        for name, form in PEERS.items():
            self.models.setdefault(name, PeerEncoder(self.encoder, within(form, self._check)))
        self.x = torch.randn(settings.tokens, settings.dim)
        self.target = torch.randn(settings.tokens, settings.dim)
        self.packing = Packing(settings.batch, settings.length)

    def _check(self) -> None:
        self.deadline.check()

    @staticmethod
    def _disturb(dlcl: nn.Module) -> None:
        """Away from the initial averages: equal weights would hide a mix-up of layers."""
        with torch.no_grad():
            dlcl.weight.mul_(1 + 0.3 * torch.randn_like(dlcl.weight))
            dlcl.norm_weight.add_(0.1 * torch.randn_like(dlcl.norm_weight))

    def step(self, variant: str) -> Tensor:
        """Forward and backward; gradients are left in the parameters. Returns the loss."""
        out = self.models[variant].forward_packed(self.x, self.packing)
        loss = F.mse_loss(out, self.target)
        loss.backward()
        return loss.detach()

    def forget_gradients(self) -> None:
        self.encoder.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, Tensor]:
        """Moves the gradients out of the parameters; those never reached are left out."""
        found = {n: p.grad for n, p in self.encoder.named_parameters() if p.grad is not None}
        self.forget_gradients()
        return found
