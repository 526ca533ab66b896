"""`deepfast mt compare-growth` with real runs."""

import json

import pytest

from deepfast.cli import main
from deepfast.mt.data import read_lines
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.search import DecodingOptions, bleu, load_translator, translate_lines
from deepfast.mt.sweep.growth import equal_depth
from deepfast.mt.training import load_recipe
from deepfast.mt.training.corpus import held_out, load_corpus

TINY = (
    "data.train_size=100", "data.dev_size=2", "data.test_size=2", "data.max_tokens=200",
    "data.vocab_size=120", "model.dim=8", "model.num_heads=2", "model.ffn_dim=8",
    "model.encoder_layers=2", "model.decoder_layers=1", "grow.model.top_encoder_layers=2",
    "grow.model.top_decoder_layers=1", "train.max_steps=4", "grow.train.max_steps=3",
    "train.validate_every=2", "train.save_every=2", "train.log_every=2", "train.threads=1",
)  # fmt: skip


def lines_of(path):
    """The cells of the table's lines."""
    rows = [line.strip("| ").split(" | ") for line in path.read_text().splitlines()
            if line.startswith("| ")]  # fmt: skip
    return {row[0]: row[1:] for row in rows[2:]}


def literal(folder):
    """Parameters, dev NLL and BLEU of the four rows, from what the two runs have written."""
    rows, best = {}, {}
    for name, run in (("shallow", "grown/seed-1/run/stage1"), ("deep", "grown/seed-1/run/stage2"),
                      ("equal depth", "equal-depth/seed-1/run")):  # fmt: skip
        text = (folder / run / "metrics.jsonl").read_text()
        metrics = [json.loads(line) for line in text.splitlines()]
        nll = min(m["nll"] for m in metrics if m["event"] in ("valid", "average"))
        (test,) = (m for m in metrics if m["event"] == "test")
        best[name] = folder / run / test["of"]
        size = sum(p.numel() for p in load_model(best[name])[0].parameters())
        rows[name] = [f"{size / 1e6:.2f}M", f"{nll:.3f}", f"{test['bleu']:.1f}", "1"]
    translator = load_translator([best["deep"]], "cpu")
    text = best["deep"].parent / "phrases"
    source, reference = (read_lines(text / f"test.{side}") for side in ("en", "de"))
    # `test_deep_shallow` holds what tuning finds.
    tuned = json.loads((folder / "grown/seed-1/both.json").read_text())
    options = DecodingOptions(deep_shallow=True, alpha=tuned["alpha"], gamma=tuned["gamma"])
    translated = translate_lines(translator.model, translator.vocabulary, source, options)
    both = f"{bleu(translated, reference).bleu:.1f}"
    return rows | {"both": [rows["deep"][0], "-", both, "1"]}


def test_the_four_rows(in_process, tmp_path, capsys):
    command = ["mt", "compare-growth", "phrases-growing", *TINY, "--output", str(tmp_path)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert said.endswith(f"{tmp_path / 'growth.md'}\n")
    found = lines_of(tmp_path / "growth.md")
    assert list(found) == ["shallow", "deep", "both", "equal depth"]
    assert found == literal(tmp_path)
    equal, _ = load_model(tmp_path / "equal-depth/seed-1/run/average.pt")
    assert (equal.config.encoder_layers, equal.config.decoder_layers) == (4, 2)
    # What has finished is not made again.
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    assert len(stamps) == 5
    assert main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == stamps


@pytest.mark.parametrize("files", [False, True])
def test_the_held_out_pairs_are_those_of_the_corpus(files, tmp_path):
    sizes = ["data.train_size=50", "data.dev_size=5", "data.test_size=5", "data.vocab_size=100"]
    section = load_recipe("phrases-small", sizes).data
    corpus = load_corpus(section, seed=1, folder=tmp_path)
    if files:
        texts = [f"data.{part}_{side}={tmp_path / 'phrases' / part}.{end}"
                 for part in ("train", "dev", "test")
                 for side, end in (("source", "en"), ("target", "de"))]  # fmt: skip
        changes = [*sizes, *texts, "data.phrases=null", "data.lowercase=true"]
        section = load_recipe("phrases-small", changes).data
        corpus = load_corpus(section, seed=1, folder=None)
    assert held_out(section) == (corpus.dev, corpus.test)


def test_equal_depth_has_the_layers_and_steps_of_both_runs():
    recipe = load_recipe("growing-big", ["data.dev_source=dev.en", "data.dev_target=dev.de"])
    assert equal_depth(recipe) == [
        "grow=null", "model.encoder_layers=8", "model.decoder_layers=8", "train.max_steps=400000"
    ]  # fmt: skip
    timed = ["train.max_steps=null", "train.max_minutes=5", "grow.train.max_steps=null"]
    assert "train.max_minutes=10.0" in equal_depth(load_recipe("phrases-growing", timed))


def test_processes_are_limited_as_in_a_sweep(tmp_path, monkeypatch):
    given = {}

    def stop(runs, processes):
        given.update(vars(processes))
        raise KeyboardInterrupt

    monkeypatch.setattr("deepfast.mt.sweep.runs.compare", stop)
    words = ["--jobs", "2", "--threads", "3", "--memory-limit", "8GiB", "--output", str(tmp_path)]
    assert main(["mt", "compare-growth", "phrases-growing", *words]) == 130
    assert given == {"jobs": 2, "threads": 3, "memory": 8 * 2**30}
