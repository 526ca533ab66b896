"""`deepfast info`: the device, every op, and an override that cannot serve."""

import json
import re
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is proved, or will be")
def test_without_a_gpu_nothing_is_proved(info):
    """What `deepfast info` says about a GPU is what the backend chooses there."""
    for op in backend.OPS:
        reasons = backend.explain(op, "cuda", torch.bfloat16)
        assert "its first use on a GPU proves it" in reasons["triton"]
        served = next(name for name, reason in reasons.items() if reason is None)
        assert served == ("sdpa" if op == "attention" else "reference")
    text, report = info()
    assert "proof    a GPU proves an op's kernels at its first use, or all with `deepfast" in text
    assert report["proof"] == {"mode": "auto", "source": None, "lines": []}


@pytest.mark.parametrize(
    ("mode", "said"), [("off", "nothing is proved at first use"), ("require", "is an error")]
)
def test_the_mode_of_proofs_is_told(info, monkeypatch, mode, said):
    monkeypatch.setenv("DEEPFAST_PROOF", mode)
    text, _ = info()
    assert f"proof    DEEPFAST_PROOF={mode}: " in text
    assert said in text


@pytest.mark.parametrize(
    ("variable", "value", "known"),
    [
        ("DEEPFAST_BACKEND", "fast", "cuda, "),
        ("DEEPFAST_PROOF", "on", "auto, off, require"),
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
    assert ("have not run on a GPU of ours yet" in text) == (not any("gpu" in r for r in runs))
    assert re.search("deepfast (prove|selfcheck)", text)
