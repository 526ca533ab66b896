"""The comparison of language models: its models, a run, and the page."""

import json
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench import language_model as module
from bench.language_model import PILOTS, SIZES, SYSTEMS, Model, main, train
from deepfast.mt.data.text import write_lines
from deepfast.mt.sweep import runs

SMALL = {"layers": 3, "dim": 16, "heads": 2, "ffn_dim": 24, "vocab_size": 60, "length": 12,
         "batch": 2, "dropout": 0.0, "warmup": 2, "validate_every": 3}  # fmt: skip
TOKENS = torch.randint(60, (2, 13), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def text(tmp_path):
    lines = [f"a man {verb} the {color} dog {k}" for verb in ("sees", "finds", "calls")
             for color in ("red", "old", "big") for k in range(10)]  # fmt: skip
    write_lines(tmp_path / "text", lines)
    return str(tmp_path / "text")


def model(system):
    torch.manual_seed(4)
    return Model(system, SIZES | SMALL)


def test_connections_that_begin_as_the_plain_model():
    plain = model("pre-norm").loss(TOKENS)
    for name in ("DenseFormer", "attention residuals, additive"):
        assert torch.equal(model(name).loss(TOKENS), plain), name
    others = [model(name).loss(TOKENS).item() for name in SYSTEMS if name != "pre-norm"]
    assert len({*others, plain.item()}) == len(SYSTEMS) - 2


@torch.no_grad()
def test_a_block_of_elcbert_drops_its_input():
    found = model("ELC-BERT's form").blocks[0]
    x = torch.randn(2, 12, 16)
    branch = found.attention(found.norm1(x))
    torch.testing.assert_close(found(x), branch + found.mlp(found.norm2(branch)))


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_model_reads_no_later_token(system):
    net = model(system).eval()
    changed = TOKENS.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 60
    same = (net(TOKENS[:, :-1]) == net(changed[:, :-1])).all(-1).all(0)
    assert same.tolist() == [True] * 7 + [False] * 5


def test_the_same_run_has_the_same_losses(text):
    settings = SIZES | SMALL | {"train": text, "dev": text, "steps": 7, "seed": 1, "lr": "1e-2",
                                "system": "attention residuals"}  # fmt: skip
    first, second = train(settings), train(settings)
    assert first["curve"] == second["curve"]
    assert [step for step, _ in first["curve"]] == [3, 6, 7]
    assert first["curve"][-1][1] < first["curve"][0][1]
    assert [row["step"] for row in first["gradient_norms"]] == [1, 7]
    assert train(settings | {"seed": 2})["curve"] != first["curve"]


def test_pilots_seeds_and_the_page(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "SIZES", SIZES | SMALL)
    monkeypatch.setattr(module, "POINTS", module.POINTS[:2])
    monkeypatch.setattr(module, "PILOTS", replace(PILOTS, values=("1e-2", "1e38"), steps=2))

    def start(run, threads):
        run.write()
        assert main(["--run", str(run.folder)]) == 0
        return SimpleNamespace(poll=lambda: 0, kill=int, wait=int)

    monkeypatch.setattr(runs, "_start", start)
    output = tmp_path / "runs"
    words = ["--train", text, "--dev", text, "--steps", "4", "--output", str(output)]
    assert main(words) == 0
    assert "DenseFormer, lr=1e38, seed 1: diverged, step 2" in capsys.readouterr().out
    page = (output / "sweep.md").read_text()
    assert "\n| DenseFormer | **" in page
    results = [json.loads(path.read_text()) for path in output.glob("DenseFormer/*/result.json")]
    mean = statistics.mean(run["nll"] for run in results)
    assert f"\n| DenseFormer | {mean:.3f} ± " in page
    kept = {path: path.stat().st_mtime_ns for path in output.rglob("result.json")}
    assert main(words) == 0
    assert not main(["--jobs", "0", *words])
    assert kept == {path: path.stat().st_mtime_ns for path in output.rglob("result.json")}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--seeds", "0"], "seeds must be an integer of at least 1, got 0"),
        (["--jobs", "-1"], "jobs must be an integer of at least 0, got -1"),
        (["--steps", "1"], "steps must be an integer of at least 2, got 1"),
        (["--dev", "none"], "none"),
    ],
)
def test_refused_before_any_run(text, tmp_path, words, sentence):
    output = tmp_path / "runs"
    with pytest.raises(ValueError, match=sentence):
        main(["--train", text, "--dev", text, "--output", str(output), *words])
    assert not output.exists()


def test_the_cost_of_every_system(text, monkeypatch):
    monkeypatch.setattr(module, "SIZES", SIZES | SMALL)
    found = module.trainings({"train": text, "dev": text}, module.POINTS)
    assert [point.name for point in found] == [*SYSTEMS]
    peaks = [training.measure() for training in found.values()]
    plain, *others = peaks
    assert min(others) > plain > 16 * module.parameters(next(iter(found.values())).model)
