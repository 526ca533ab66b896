"""Memory policies on an encoder alone: predicted peaks, measured peaks, and times."""

import statistics
from functools import partial

import torch

from deepfast.measure.encoders import DROPOUT
from deepfast.measure.progress import Job
from deepfast.measure.rows import Row
from deepfast.measure.settings import Settings
from deepfast.measure.turns import Variant, turns
from deepfast.memory import POLICIES, Plan, plan
from deepfast.nn import Packing, TransformerEncoder

PARAMETERS = "parameters"
"""A category of a plan's table."""
LAYER_WORK = 0.02
"""About how many seconds a layer takes at D=128 and 1,024 tokens."""


class PolicyCase:
    """One depth: an encoder with dropout, an input and a gradient of its result."""

    def __init__(self, settings: Settings, depth: int):
        torch.manual_seed(settings.seed)
        sizes = predicted(settings, depth, POLICIES[0]).sizes
        self.encoder = TransformerEncoder(
            depth, sizes.width, sizes.heads, sizes.ffn, dropout=DROPOUT
        )
        self.packing = Packing(settings.memory_batch, settings.length)
        self.x = torch.randn(sizes.tokens, sizes.width, requires_grad=True)
        self.gradient = torch.ones(sizes.tokens, sizes.width)

    def run(self, policy: str) -> None:
        """Forward and backward with every layer under ``policy``."""
        self.encoder.set_memory(policy)
        # The first state is made in the step, like the result of an embedding.
        y = self.encoder.forward_packed(self.x * 1, self.packing)
        y.backward(self.gradient)
        self.encoder.zero_grad(set_to_none=True)
        self.x.grad = None


def predicted(settings: Settings, depth: int, policy: str) -> Plan:
    """The plan of `deepfast.memory.plan` for a `PolicyCase`; nothing of it is measured."""
    return plan(
        budget="1TiB", layers=depth, width=settings.memory_dim, tokens=settings.memory_tokens,
        vocabulary=0, decoder_layers=0, dtype="float32", optimizer="none", device="cpu",
        length=settings.length, policies=policy,
    )  # fmt: skip


def policies(settings: Settings, rows: list[Row]) -> list[Job]:
    """Adds a row for every policy at every depth; returns the jobs that fill them. Parameters are
    not counted. At one depth the policies are timed too."""
    jobs = []
    for depth in settings.depths:
        some = []
        for policy in POLICIES:
            found = predicted(settings, depth, policy)
            peak = found.peak - found.table[PARAMETERS]
            tokens = settings.memory_tokens
            some.append(Row(variant=policy, depth=depth, tokens=tokens, predicted_bytes=peak))
        rows += some
        rounds = settings.policy_rounds if depth == settings.policy_depth else 0
        work = LAYER_WORK * depth * settings.memory_tokens / 1024 * (settings.memory_dim / 128) ** 2
        variants = [Variant(row, rounds, work) for row in some]
        case = partial(PolicyCase, settings, depth)
        jobs += turns("memory policies", f"{depth} layers", variants, case)
    return jobs


def chapter(settings: Settings, rows: list[Row]) -> dict:
    """Sizes, and the rows with ratios: predicted to measured peaks, with and without parameters,
    and times to the time of `keep`."""
    sizes = predicted(settings, 1, POLICIES[0]).sizes
    keep = next((r for r in rows if r.seconds and r.variant == POLICIES[0]), None)
    found = []
    for row in rows:
        plan_ = predicted(settings, row.depth, row.variant)
        parameters, peak = plan_.table[PARAMETERS], row.peak_bytes
        more = dict.fromkeys(("ratio", "ratio_with_parameters", "relative"))
        if peak is not None:
            more["ratio"] = row.predicted_bytes / peak
            more["ratio_with_parameters"] = (row.predicted_bytes + parameters) / (peak + parameters)
        if row.seconds and keep is not None:
            # An interrupted round has measured fewer policies.
            pairs = zip(row.seconds, keep.seconds, strict=False)
            more["relative"] = statistics.median(own / other for own, other in pairs)
        more |= {"parameter_bytes": parameters, "expected_relative": plan_.time}
        found.append(row.as_dict() | more)
    return {
        "tokens": settings.memory_tokens, "sentences": settings.memory_batch,
        "dim": sizes.width, "heads": sizes.heads, "ffn_dim": sizes.ffn, "dropout": DROPOUT,
        "rows": found,
    }  # fmt: skip
