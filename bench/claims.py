"""Ratios between forms that take turns in one run: `python -m bench.claims [GROUP ...]`.

Each number is the median of the ratios of the rounds. It goes to bench/results/results.csv as soon
as it is measured. All groups take about 15 minutes on 2 cores.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch

from bench.record import record
from deepfast.measure.clock import interleave, keep_memory, ratio
from deepfast.measure.forms import (
    ATTENTION_FORMS,
    FORMS,
    Connection,
    InStack,
    mixing_alone,
)
from deepfast.memory import LiveBytes
from deepfast.nn import DLCL, AttentionResiduals, TransformerEncoder

SENTENCES, LENGTH, DIM, HEADS, FFN = 64, 32, 256, 4, 1024
TOKENS = SENTENCES * LENGTH
SIZES = f"T={TOKENS}, D={DIM}, fp32"
Forms = dict[str, Callable[[], object]]


class Claims:
    """Measures and records numbers of one group."""

    def __init__(self, group: str, rounds: int):
        self.command, self.rounds = f"python -m bench.claims {group}", rounds

    def times(self, key: str, what: str, forms: Forms, above: str, below: str) -> None:
        """The time of ``above`` over that of ``below``."""
        some = {name: forms[name] for name in (above, below)}
        rows = interleave(some, repeats=self.rounds)
        record(key, ratio(rows[above], rows[below]), "x", what, self.command)

    def bytes(self, key: str, what: str, forms: Forms, above: str, below: str) -> None:
        """The peak bytes of ``above`` over those of ``below``."""
        value = peak_bytes(forms[above]) / peak_bytes(forms[below])
        record(key, value, "x", f"peak bytes: {what}", self.command)


def peak_bytes(run: Callable[[], object]) -> int:
    """Of the tensors that a second run makes; those that existed before count as zero."""
    run()
    with LiveBytes() as live:
        run()
    return live.peak


def mixing(module: Connection, forms: dict, tokens: int = TOKENS) -> Forms:
    """Each form of the connection of a whole stack whose layers do nothing, on the same weights and
    input."""
    y, grad = torch.randn(tokens, DIM, requires_grad=True), torch.randn(tokens, DIM)
    return {name: partial(mixing_alone, form, module, y, grad) for name, form in forms.items()}


def step(
    layers: int, connection: str, form: Callable | None = None, *, sentences: int = SENTENCES,
    dropout: float = 0.1, optimizer: bool = False, norm: str = "pre",
) -> Callable[[], None]:  # fmt: skip
    """A training step of an encoder: forward, backward, and Adam if asked for.

    form: computes the connection in place of deepfast, one of `deepfast.measure.forms`.
    """
    torch.manual_seed(0)
    encoder = TransformerEncoder(
        layers, DIM, HEADS, FFN, connection=connection, dropout=dropout, norm=norm
    )
    if form is not None:
        outer = encoder.connection
        setattr(outer, outer.child, InStack(form, outer.depth))
    adam = torch.optim.Adam(encoder.parameters(), lr=1e-4, fused=True) if optimizer else None
    x, target = torch.randn(2, sentences, LENGTH, DIM).unbind(0)

    def run():
        loss = (encoder(x) - target).square().mean()
        loss.backward()
        if adam is not None:
            adam.step()
        encoder.zero_grad(set_to_none=True)

    return run


def dlcl(claims: Claims) -> None:
    """DLCL: its mixing beside other forms, and a step beside the plain residual one."""
    steps = {name: step(100, name, optimizer=True) for name in ("residual", "dlcl")}
    what = f"training step with Adam: DLCL over plain residual, L=100, {SIZES}"
    claims.times("step_dlcl_100", what, steps, "dlcl", "residual")
    claims.bytes("bytes_dlcl_100", what, steps, "dlcl", "residual")
    of_60, of_100 = (mixing(DLCL(layers, DIM), FORMS) for layers in (60, 100))
    what = "mixing of DLCL, forward and backward"
    for layers, forms in ((60, of_60), (100, of_100)):
        about = f"{what}: DenseFormer form over deepfast, L={layers}, {SIZES}"
        key = f"mix_denseformer_{layers}"
        claims.times(key, about, forms, "DenseFormer form", "deepfast")
    stack = f"{what}: stack and sum over deepfast, L=100, {SIZES}"
    claims.bytes("mix_stack_bytes_100", stack, of_100, "stack and sum", "deepfast")
    claims.times("mix_stack_100", stack, of_100, "stack and sum", "deepfast")


def attnres(claims: Claims) -> None:
    """Full attention residuals: the mixing and a step."""

    def make(sources: int, tokens: int = TOKENS) -> Forms:
        residuals = AttentionResiduals(sources - 1, DIM)
        with torch.no_grad():
            residuals.query.normal_(std=DIM**-0.5)
        return mixing(residuals, ATTENTION_FORMS, tokens)

    what = "mixing of full attention residuals, forward and backward"
    runs = {sources: make(sources) for sources in (49, 97)}
    both = runs[97] | {"DLCL": mixing(DLCL(96, DIM), FORMS)["deepfast"]}
    claims.times("attnres_dlcl_97", f"{what}: over that of DLCL, 97 sources, {SIZES}",
                 both, "deepfast", "DLCL")  # fmt: skip
    for key, form, sources in (("list_97", "list", 97), ("stack_49", "stack", 49)):
        about = f"{what}: a {form} over deepfast, {sources} sources, {SIZES}"
        claims.times(f"attnres_{key}", about, runs[sources], form, "deepfast")
    deep = {str(layers): make(layers + 1, 512)["deepfast"] for layers in (48, 192)}
    about = f"{what}: 192 layers over 48, T=512, D={DIM}, fp32, one thread"
    claims.times("attnres_growth_192", about, deep, "192", "48")
    steps = {name: step(48, name) for name in ("residual", "attnres")}
    about = f"step: attention residuals, two reads a layer, over plain residual, L=48, {SIZES}"
    claims.times("step_attnres_48", about, steps, "attnres", "residual")
    claims.bytes("bytes_attnres_48", about, steps, "attnres", "residual")


def norms(claims: Claims) -> None:
    """DeepNorm, which scales the residual, over post-norm."""
    forms = {norm: step(24, "residual", norm=norm) for norm in ("post", "deepnorm")}
    about = f"step, forward and backward: deepnorm over post, L=24, {SIZES}"
    claims.times("step_deepnorm_24", about, forms, "deepnorm", "post")


def threads(claims: Claims) -> None:
    """Two threads over one; nothing else may run."""

    def both(run: Callable[[], object]) -> Forms:
        def on(count: int) -> None:
            torch.set_num_threads(count)
            run()

        return {"one": partial(on, 1), "two": partial(on, 2)}

    keep_memory()
    for layers in (24, 100):
        about = f"one thread over two: mixing of DLCL, forward and backward, L={layers}, {SIZES}"
        run = mixing(DLCL(layers, DIM), FORMS)["deepfast"]
        claims.times(f"threads_mix_{layers}", about, both(run), "one", "two")
    about = f"one thread over two: step, forward and backward, of DLCL, L=24, {SIZES}"
    claims.times("threads_step_24", about, both(step(24, "dlcl")), "one", "two")
    plain = about.replace("DLCL", "the plain residual")
    claims.times("threads_step_residual_24", plain, both(step(24, "residual")), "one", "two")


GROUPS = {group.__name__: group for group in (dlcl, attnres, norms, threads)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", help=", ".join(GROUPS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    for name in args.groups:
        if name not in GROUPS:
            parser.error(f"expected groups of {', '.join(GROUPS)}, got {name!r}")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    for name in args.groups or GROUPS:
        GROUPS[name](Claims(name, args.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
