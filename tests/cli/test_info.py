"""`deepfast info`: the device, every op, and an override that cannot serve."""

import json
from pathlib import Path

import pytest
import torch

from deepfast import backend, ops
from deepfast.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def info(monkeypatch, capsys):
    """``info(override)``: the text, and what --json prints."""

    def run(override=None):
        monkeypatch.delenv("DEEPFAST_BACKEND", raising=False)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        if override is not None:
            monkeypatch.setenv("DEEPFAST_BACKEND", override)
        assert main(["info", "--device", "cpu"]) == 0
        text = capsys.readouterr().out
        assert main(["info", "--device", "cpu", "--json"]) == 0
        return text, json.loads(capsys.readouterr().out)

    return run


def test_the_device_and_every_op_have_lines(info):
    text, report = info()
    assert report["device"].startswith("cpu (")
    assert f"device   {report['device']}, " in text
    assert {op: choice["chosen"] for op, choice in report["ops"].items()} == dict.fromkeys(
        backend.OPS, "cpu"
    )
    starts = {line.partition(":")[0] for line in text.splitlines()}
    assert set(ops.__all__) | set(backend.OPS) <= starts
    for said in ("norm_linear: cpu, made of layer_norm and torch's linear\n", "\nattention: cpu\n",
                 "    sdpa: can serve, comes later in the order\n",
                 "    cuda (torch's sdpa under another name): "):  # fmt: skip
        assert said in text


def test_an_override_that_cannot_serve_is_explained(info):
    text, report = info("triton")
    assert {choice["chosen"] for choice in report["ops"].values()} == {None}
    assert "override DEEPFAST_BACKEND=triton\n" in text
    assert "layer_norm: none, DEEPFAST_BACKEND=triton cannot serve\n" in text
    assert "    triton: tensors are on cpu, not cuda" in text
    assert "    cpu: can serve, DEEPFAST_BACKEND=triton asks for another\n" in text
    assert "norm_linear: none, " in text


def test_an_override_that_serves_in_part(info):
    _, report = info("sdpa")
    chosen = {op: choice["chosen"] for op, choice in report["ops"].items()}
    assert chosen == dict.fromkeys(backend.OPS, None) | {"attention": "sdpa"}
    assert "sdpa is torch's attention" in report["ops"]["boundary"]["refused"]["sdpa"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there checks may have been made")
def test_without_a_gpu_no_check_was_made(info):
    text, report = info()
    assert "check    no check was made here; a GPU checks each kernel at its first use; " in text
    assert report["selfcheck"] == {"mode": "first-use", "file": None, "lines": []}


@pytest.mark.parametrize(
    ("mode", "said"), [("off", "no kernel is checked at its first use"), ("require", "is an error")]
)
def test_the_mode_of_checks_is_told(info, monkeypatch, mode, said):
    monkeypatch.setenv("DEEPFAST_SELFCHECK", mode)
    text, _ = info()
    assert f"no check was made here; DEEPFAST_SELFCHECK={mode}: " in text
    assert said in text


@pytest.mark.parametrize(
    ("variable", "value", "known"),
    [
        ("DEEPFAST_BACKEND", "fast", "cuda, "),
        ("DEEPFAST_SELFCHECK", "on", "first-use, off, require"),
    ],
)
def test_a_wrong_variable_is_one_sentence(monkeypatch, capsys, variable, value, known):
    monkeypatch.setenv(variable, value)
    assert main(["info", "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"deepfast info: {variable}: expected one of {known}")
    assert said.count("\n") == 1


@pytest.mark.parametrize("page", ["README.md", "docs/backends.md"])
def test_the_text_says_what_has_not_run(page):
    text = " ".join((ROOT / page).read_text().split())
    runs = (json.loads(p.read_text()) for p in (ROOT / "bench" / "results").glob("*.json"))
    assert ("run on a GPU yet" in text) == (not any("gpu" in r for r in runs))
    assert "deepfast selfcheck" in text
