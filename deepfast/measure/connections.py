"""The connections over depth, each against its form in plain PyTorch: traffic, time and memory.

What is measured is the connection of a whole stack whose layers do nothing, forward and backward.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from deepfast.connections import BLOCKS
from deepfast.depth.schedule import block_pattern, depth_pattern
from deepfast.measure import forms
from deepfast.measure.clock import Row
from deepfast.measure.jobs import Turns
from deepfast.measure.settings import Settings
from deepfast.measure.traffic import OpTraffic, engine_moved
from deepfast.nn import DLCL, AttentionResiduals

OURS, PLAIN = "deepfast", "plain PyTorch"


class Connection(NamedTuple):
    """A connection and its two forms."""

    make: Callable[[int, int], forms.Connection]
    """The module, from L and D."""
    ours: Callable
    plain: Callable
    """A stack of all sources for every row, as the authors write it."""
    stacks: int
    """How many copies of every stack the plain form keeps."""


def _size(layers: int) -> int:
    """Layers in a block."""
    return -(-layers // BLOCKS)


def _in_blocks(layers: int, dim: int) -> AttentionResiduals:
    return AttentionResiduals(layers, dim, block=_size(layers))


_ATTENTION = forms.Deepfast, forms.StackedAttention, 2
BLOCKED = "attention in blocks"
CONNECTIONS = {
    "DLCL": Connection(DLCL, forms.Deepfast, forms.StackAndSum, 1),
    "full attention": Connection(AttentionResiduals, *_ATTENTION),
    BLOCKED: Connection(_in_blocks, *_ATTENTION),
}
"""In the order of the table."""


def connections(settings: Settings) -> list[Turns]:
    """Two rows for every connection at every depth, deepfast's first."""
    found = []
    for depth in settings.connection_depths:
        rows = [row for name in CONNECTIONS for row in _rows(settings, depth, name)]
        make = partial(ConnectionCase, settings, depth, rows)
        found.append(Turns("connections", f"{depth} layers", rows, make, settings.rounds))
    return found


def _rows(settings: Settings, depth: int, name: str) -> tuple[Row, Row]:
    """deepfast's row and plain PyTorch's."""
    connection = CONNECTIONS[name]
    state = settings.connection_tokens * settings.connection_dim
    pattern, running = depth_pattern(depth + 1, None, 1, 1), None
    if name == BLOCKED:
        pattern, running = block_pattern(depth + 1, _size(depth))
    reads = sum(map(len, pattern))
    ours, plain = (
        Row(variant=f"{name}: {form}", what=name, depth=depth, tokens=settings.connection_tokens)
        for form in (OURS, PLAIN)
    )
    ours.nbytes = 4 * state * engine_moved(pattern, running)
    # Every stack, and the states, gradients and products of the last rows.
    plain.predicted_bytes = 4 * state * connection.stacks * (reads + 5 * (depth + 1))
    return ours, plain


class ConnectionCase:
    """Every connection at one depth, on the same input."""

    def __init__(self, settings: Settings, depth: int, rows: list[Row]):
        torch.manual_seed(settings.seed)
        size = settings.connection_tokens, settings.connection_dim
        self.rows = {row.variant: row for row in rows}
        self.modules = {name: c.make(depth, size[1]) for name, c in CONNECTIONS.items()}
        # Away from 0, where every weight of a row is the same for all tokens.
        with torch.no_grad():
            for module in self.modules.values():
                for name, parameter in module.named_parameters():
                    if name.startswith("query"):
                        parameter.normal_(std=0.1 * parameter.shape[-1] ** -0.5)
        self.y, self.grad = torch.randn(size, requires_grad=True), torch.randn(size)

    def run(self, variant: str) -> None:
        """One run of a form. Where its traffic is not known, this run counts it."""
        row = self.rows[variant]
        connection, module = CONNECTIONS[row.what], self.modules[row.what]
        form = connection.ours if variant.endswith(OURS) else connection.plain
        run = partial(forms.mixing_alone, form, module, self.y, self.grad)
        if row.nbytes is None:
            with OpTraffic() as traffic:
                run()
            row.nbytes = traffic.nbytes
        else:
            run()
        self.y.grad = None
        module.zero_grad(set_to_none=True)


def pairs(rows: list[dict]) -> list[tuple[dict, dict]]:
    """deepfast's row of every connection and depth, and plain PyTorch's."""
    return list(zip(rows[::2], rows[1::2], strict=True))


def ratios(rows: list[dict]) -> dict[str, dict[str, float]]:
    """For every connection at the greatest depth, where both forms were measured there and at the
    depth before: time and memory of plain PyTorch over deepfast's, and by what factor the traffic
    of each grows between the two depths."""
    before, last = sorted({row["depth"] for row in rows})[-2:]
    found = {}
    for name in CONNECTIONS:
        some = [pair for pair in pairs(rows) if pair[0]["what"] == name]
        some = [pair for pair in some if pair[0]["depth"] in (before, last)]
        if not all(row["median_seconds"] for pair in some for row in pair):
            continue
        (ours_before, plain_before), (ours, plain) = some
        found[name] = {
            "time": plain["median_seconds"] / ours["median_seconds"],
            "memory": plain["peak_bytes"] / ours["peak_bytes"],
            "growth": ours["nbytes"] / ours_before["nbytes"],
            "plain_growth": plain["nbytes"] / plain_before["nbytes"],
        }
    return found
