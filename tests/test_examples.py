"""Every example runs, at toy size, and teaches what it says."""

import importlib.util
import json
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deepfast

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_each_example_has_a_test():
    text = Path(__file__).read_text()
    for path in EXAMPLES.iterdir():
        assert path.name.startswith("__") or f'"{path.name}"' in text, path.name


@pytest.fixture
def load():
    """Imports an example by its file name."""

    def imported(name):
        spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return imported


def test_own_loop(load, capsys):
    losses = load("own_loop.py").train(layers=3, dim=16, steps=6, sentences=8, lr=1e-2)
    assert losses[-1] < losses[0]
    assert "step 6: loss " in capsys.readouterr().out


def test_latent_mlm(load, capsys):
    example = load("latent_mlm.py")
    pieces = torch.randint(4, 50, (400, 60))
    pieces[:, 50:] = 0
    seen, labels = example.hidden(pieces, mask=50)
    chosen = labels != example.IGNORED
    assert torch.equal(labels[chosen], pieces[chosen])
    assert torch.equal(seen[~chosen], pieces[~chosen])
    assert not chosen[:, 50:].any()
    # 20,000 draws: four standard errors.
    assert abs(chosen[:, :50].float().mean() - 0.15) < 0.011
    masked = seen[chosen] == 50
    assert abs(masked.float().mean() - 0.8) < 0.03
    assert abs((seen[chosen] == pieces[chosen]).float().mean() - 0.1) < 0.03
    lines = [" ".join(f"w{i % 7}{j}" for j in range(i % 5 + 2)) for i in range(80)]
    model, losses = example.train(
        lines, layers=4, keep=2, dim=16, steps=30, vocab_size=40, max_tokens=200, lr=1e-2
    )
    assert sum(losses[-10:]) < sum(losses[:10])
    assert len(model.latent.keeps()) == 4
    assert "step 30: loss " in capsys.readouterr().out


@pytest.mark.parametrize("static", [False, True], ids=["latent", "static"])
def test_latent_mlm_without_norms(load, tmp_path, capsys, monkeypatch, static):
    example = load("latent_mlm.py")
    torch.manual_seed(0)
    deep = example.MaskedLanguageModel(50, 24, None if static else 12, 16, 4, 100, "none")
    loss = deep.loss(torch.randint(4, 50, (2, 9)))
    loss.backward()
    assert loss < 20
    assert all(p.grad.isfinite().all() for p in deep.parameters() if p.grad is not None)
    text = tmp_path / "text"
    text.write_text("".join(f"w{i % 7} x{i % 5} y{i % 3}\n" for i in range(80)))
    trained = []

    def train(lines, **options):
        trained.append(real_train(lines, **options, vocab_size=40, max_tokens=200, lr=1e-2))
        return trained[0]

    real_train = example.train
    monkeypatch.setattr(example, "train", train)
    words = ["--layers", "3", "--keep", "2", "--dim", "16", "--steps", "25", "--text", str(text)]
    words += ["--norm-type", "none", *(["--static"] if static else [])]
    monkeypatch.setattr("sys.argv", ["latent_mlm.py", *words])
    example.main()
    ((model, losses),) = trained
    assert sum(losses[-10:]) < sum(losses[:10])
    assert not [name for name, _ in model.named_parameters() if "norm" in name]
    assert (model.latent is None) == static
    assert ("layers stay" in capsys.readouterr().out) == (not static)


def test_language_model(load, capsys):
    example = load("language_model.py")
    lines = [f"a man {verb} the {color} dog {k}" for verb in ("sees", "finds", "calls")
             for color in ("red", "old", "big") for k in range(10)]  # fmt: skip
    sizes = {"layers": 3, "dim": 16, "heads": 2, "ffn_dim": 24, "length": 12, "dropout": 0.0}
    example.EVERY, example.WARMUP = 3, 2
    tokens = torch.randint(60, (2, 13))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 60
    found = {}
    for name in example.CONNECTIONS:
        torch.manual_seed(4)
        model = example.Model(name, 60, **sizes)
        found[name] = model.loss(tokens).item()
        model.eval()
        same = (model(tokens[:, :-1]) == model(changed[:, :-1])).all(-1).all(0)
        # No position reads a later token.
        assert same.tolist() == [True] * 7 + [False] * 5
        again = [
            example.train((lines, lines), name, steps=7, lr=1e-2, vocab_size=60, **sizes)
            for _ in range(2)
        ]
        assert again[0] == again[1]
        assert again[0][-1] < again[0][0]
        assert f"{name}: lowest dev NLL " in capsys.readouterr().out
    assert found["none"] == found["denseformer"] == found["additive"]
    assert len(set(found.values())) == 4
    with pytest.raises(ValueError, match="expected texts of more than 12 tokens"):
        example.train((lines, lines[:1]), "none", steps=1, vocab_size=60, **sizes)


def test_fsdp(load, one_rank, capsys):
    losses = load("fsdp.py").train(layers=2, dim=16, steps=10)
    assert losses[-1] < losses[0]
    assert "saved and loaded: True" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_under_torchrun(python):
    said = python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(EXAMPLES / "fsdp.py"), "--dim", "16", "--steps", "3", OMP_NUM_THREADS="1",
    ).stdout  # fmt: skip
    assert "step 3: loss " in said
    assert "saved and loaded: True" in said


@pytest.mark.exhaustive
def test_two_agents(tmp_path):
    """Two agents on this machine stand for two machines."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "test",
        str(EXAMPLES / "fsdp.py"), "--layers", "2", "--dim", "16", "--steps", "3", "--folder",
        str(tmp_path),
    ]  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [subprocess.Popen(command, env=os.environ, **pipes) for _ in range(2)]
    try:
        said = [agent.communicate(timeout=120)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sum("saved and loaded: True" in text for text in said) == 1, said


@pytest.fixture
def transformers():
    pytest.importorskip("accelerate")
    return pytest.importorskip("transformers")


def test_trainer(load, transformers, tmp_path):
    example = load("trainer.py")
    losses = example.train(layers=2, dim=16, steps=60, folder=str(tmp_path))
    assert losses[-1] < losses[0]
    model = deepfast.connected(transformers.BertForSequenceClassification)
    model = model.from_pretrained(tmp_path)
    assert model.bert.encoder.depth_connection.num_layers == 2


def test_modernbert_mlm(load, transformers):
    example = load("modernbert_mlm.py")
    torch.manual_seed(0)
    random.seed(0)
    model = example.make_model(layers=3, dim=16)
    losses = example.train(model, steps=20)
    assert losses[-1] < 0.9 * losses[0]
    batch = example.make_batch(4)
    filled = example.fill(model, batch)
    assert [line.count("[") for line in filled] == (batch["labels"] >= 0).sum(1).tolist()


def test_pretrained(load, transformers, capsys, tmp_path):
    _, losses = load("pretrained.py").main(str(tmp_path), steps=5)
    assert losses[-1] < losses[0]
    said = capsys.readouterr().out
    assert "equal outputs: True" in said
    assert "saved and loaded: True" in said


def test_attention_residuals(load, transformers, capsys):
    example = load("attention_residuals.py")
    example.LAYERS, example.DIM, example.BATCH = 2, 16, 4
    model, losses, plain = example.main(steps=30)
    assert max(losses[-5:]) < losses[0]
    assert losses[0] == plain[0]
    assert (model.model.depth_connection.gamma != 0).all()
    assert "equal logits: True" in capsys.readouterr().out


def cells(name):
    """The code of a notebook's cells; they hold no results."""
    notebook = json.loads((EXAMPLES / name).read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            yield "".join(cell["source"])


def test_the_notebook_draws_the_weights(capsys, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = []
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(pyplot.gcf()))
    scope: dict = {}
    for number, code in enumerate(cells("weights.ipynb")):
        code = re.sub(r"STEPS = .*", "STEPS = 2, 8, 4, 5, 3", code)
        exec(compile(code, f"weights.ipynb, code {number}", "exec"), scope)
    assert len(scope["losses"]) == 3
    (figure,) = shown
    assert [axes.get_title() for axes in figure.axes[:2]] == ["before", "after"]
    said = capsys.readouterr().out
    assert "output: " in said
    assert re.search(r"connected: [\d.]+ s, \d+ MiB", said)
    pyplot.close(figure)
