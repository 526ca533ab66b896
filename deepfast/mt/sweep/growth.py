"""Depth growing against its alternatives: the four rows of Wu et al. 2019 for one recipe.

- shallow: the first run's model
- deep: the model that has grown on it
- both: deep-shallow decoding with the two, weights tuned on the dev part
- equal depth: as many layers, trained from the start for as many steps as both runs together
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from deepfast.files import write_atomically
from deepfast.mt.search import DecodingOptions, bleu, load_translator, translate_all
from deepfast.mt.search.deep_shallow import tune_deep_shallow
from deepfast.mt.sweep.runs import Result, Run, read_object, seeded
from deepfast.mt.sweep.table import failures, known, spread, table
from deepfast.mt.training import Recipe, RecipeError, load_recipe
from deepfast.mt.training.corpus import held_out
from deepfast.mt.training.growing import FIRST, SECOND, second_run
from deepfast.mt.training.report import read_metrics

GROWN, EQUAL = "grown", "equal depth"
"""The two kinds of runs; "grown" is the shallow and the deep model."""
BOTH = "both.json"

Results = dict[str, dict[Run, Result]]
"""Kind of runs -> the result of each run."""


def equal_depth(recipe: Recipe) -> list[str]:
    """Overrides for a model of the grown one's depth, with the steps of both runs.

    Raises:
        RecipeError: the recipe does not make both runs.
    """
    if recipe.grow is None or recipe.grow.get("from") or recipe.data.tagged:
        raise RecipeError(
            "expected a recipe of one language with a section grow and without "
            f"grow.from, got grow {recipe.grow!r}"
        )
    second = second_run(recipe)
    model = second.model_config(vocab_size=8)
    overrides = ["grow=null"]
    for side in ("encoder", "decoder"):
        layers = getattr(model, f"{side}_layers") + getattr(model, f"top_{side}_layers")
        overrides.append(f"model.{side}_layers={layers}")
    for name in ("max_steps", "max_minutes"):
        limits = getattr(recipe.train, name), getattr(second.train, name)
        if None not in limits:
            overrides.append(f"train.{name}={sum(limits)}")
    return overrides


def runs_of_growth(
    name: str, overrides: Sequence[str], seeds: int, folder: Path | None
) -> dict[str, list[Run]]:
    """The runs of both kinds, one for each seed, in folders of ``folder``; for None that is the
    recipe's output with "-growth" at its end.

    Raises:
        RecipeError: see `equal_depth`.
    """
    plain = load_recipe(name, overrides)
    given = [*overrides, *(["train.test_bleu=true"] if plain.data.tests else [])]
    folder = folder or Path(f"{plain.output}-growth")
    return {
        kind: seeded(kind, name, own, seeds, folder / kind.replace(" ", "-"))
        for kind, own in ((GROWN, given), (EQUAL, [*given, *equal_depth(plain)]))
    }


def _shallow(folder: Path) -> Result:
    """What the first run of a grown run found, from its metrics."""
    rows = read_metrics(folder)
    scores = [row["nll"] for row in rows if row["event"] in ("valid", "average") and "nll" in row]
    tests = [row["bleu"] for row in rows if row["event"] == "test"]
    return {"nll": min(scores), "bleu": tests[-1] if tests else None}


def _both(run: Run) -> Result:
    """BLEU of deep-shallow decoding on the test part, with weights tuned on the dev part; kept in
    the run's folder."""
    path = run.folder / BOTH
    if path.exists():
        return read_object(path, bleu=float)
    dev, test = held_out(run.recipe.data)
    if not test:
        return {"bleu": None}
    checkpoint = next(
        row["of"] for row in read_metrics(run.folder / "run" / SECOND) if row["event"] == "test"
    )
    translator = load_translator(
        [run.folder / "run" / SECOND / checkpoint], run.recipe.train.device
    )
    model, vocabulary = translator.model, translator.vocabulary
    (sources, references), (lines, wanted) = (zip(*pairs, strict=True) for pairs in (dev, test))
    tuned = tune_deep_shallow(model, vocabulary, sources, references)
    options = DecodingOptions(deep_shallow=True, alpha=tuned.alpha, gamma=tuned.gamma)
    found = translate_all(model, vocabulary, lines, options).nbest
    score = bleu([best[0][1] for best in found], wanted).bleu
    result = {"bleu": score, "alpha": tuned.alpha, "gamma": tuned.gamma}
    write_atomically(path, json.dumps(result).encode())
    return result


def rows_of(results: Results) -> dict[str, list[Result]]:
    """Row -> its result for every seed that has finished: dev NLL, BLEU and parameters."""
    ended = {
        kind: [
            (run, found) for run, found in own.items() if not {"failed", "diverged"} & set(found)
        ]
        for kind, own in results.items()
    }
    grown = ended[GROWN]
    return {
        "shallow": [_shallow(run.folder / "run" / FIRST)
                    | {"parameters": found["bottom_parameters"]} for run, found in grown],
        "deep": [found for _, found in grown],
        "both": [_both(run) | {"nll": None, "parameters": found["parameters"]}
                 for run, found in grown],
        EQUAL: [found for _, found in ended[EQUAL]],
    }  # fmt: skip


def page(results: Results, command: str, machine: str) -> str:
    """The table as Markdown, and what failed."""
    lines = []
    for name, own in rows_of(results).items():
        count = known(own, "parameters")
        lines.append([
            name, f"{count[0] / 1e6:.2f}M" if count else "-", spread(known(own, "nll"), 3),
            spread(known(own, "bleu"), 1), str(len(own)),
        ])  # fmt: skip
    failed = [line for kind, own in results.items() for line in failures(kind, own.values())]
    return f"""\
# Depth growing

`{command}` on {machine}.

Mean and standard deviation over the seeds. *shallow*: the first run's model; *deep*: the model that
has grown on it; *both*: deep-shallow decoding with both, weights tuned on the dev part; *{EQUAL}*:
as many layers trained from the start, for the steps of both runs together. *dev NLL*, nats per
target token: the better of the best checkpoint and the average; *BLEU*: cased, 13a, of the test
part by that checkpoint, beam 4.

{table(["model", "parameters", "dev NLL", "BLEU", "runs"], lines)}
{"".join(failed)}"""
