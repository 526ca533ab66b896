"""`deepfast info`: the device, every op, and an override that cannot serve."""

import json
from pathlib import Path

import pytest
import torch

from deepfast import backend, ops
from deepfast.cli import main


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


def test_the_device_is_named(info):
    text, report = info()
    assert report["device"].startswith("cpu (")
    assert f"device   {report['device']}, " in text


def test_every_public_op_has_a_line(info):
    text, _ = info()
    starts = {line.partition(":")[0] for line in text.splitlines()}
    assert set(ops.__all__) | set(backend.OPS) <= starts
    assert "norm_linear: cpu, made of layer_norm and torch's linear\n" in text


def test_the_cpu_backend_of_attention_is_told_for_what_it_is(info):
    assert "    cpu (torch's sdpa under another name): can serve, comes later" in info()[0]
    assert "attention: cpu (torch's sdpa under another name)\n" in info("cpu")[0]
    assert "layer_norm: cpu\n" in info("cpu")[0]


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


def test_an_override_that_is_no_backend_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("DEEPFAST_BACKEND", "fast")
    assert main(["info", "--device", "cpu"]) == 1
    assert "DEEPFAST_BACKEND: expected one of cuda, " in capsys.readouterr().err


def test_what_a_gpu_would_choose(info, monkeypatch):
    """What `deepfast info` says about a GPU is what the backend chooses there."""
    nothing = {"cuda": (), "triton": ()}
    monkeypatch.setattr(backend, "PROVED", nothing)
    for op in backend.OPS:
        reasons = backend.explain(op, "cuda", torch.bfloat16)
        served = next(name for name, reason in reasons.items() if reason is None)
        assert served == ("sdpa" if op == "attention" else "reference")
        # No reason for a refusal says that another backend serves.
        assert not any("serves" in reason for reason in reasons.values() if reason)
    text, report = info()
    assert report["proved"] == {name: list(ops) for name, ops in nothing.items()}
    rest = "; the default of other ops is the reference, of attention torch's own\n"
    assert f"on a GPU kernels proved for: no op{rest}" in text
    some = {"cuda": ("layer_norm",), "triton": ("boundary", "layer_norm")}
    monkeypatch.setattr(backend, "PROVED", some)
    proved = "layer_norm (cuda); boundary, layer_norm (triton)"
    assert f"on a GPU kernels proved for: {proved}{rest}" in info()[0]


@pytest.mark.parametrize("page", ["README.md", "docs/backends.md"])
def test_the_text_agrees_with_what_is_proved(page):
    readme = " ".join((Path(__file__).parents[2] / page).read_text().split())
    assert ("They have not run on a GPU yet" in readme) == (not any(backend.PROVED.values()))
    assert "the reference and torch's own attention are the default" in readme
