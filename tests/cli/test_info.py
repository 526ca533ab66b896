"""`deepfast info`: the device, every op, and an override that cannot serve."""

import json

import pytest
import torch

from deepfast import backend, ops
from deepfast.cli import main


@pytest.fixture
def info(monkeypatch, capsys):
    """info(VARIABLE=value): the text, and what --json prints."""
    for name in ("DEEPFAST_BACKEND", "DEEPFAST_SELFCHECK", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)

    def run(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert main(["info", "--device", "cpu"]) == 0
        text = capsys.readouterr().out
        assert main(["info", "--device", "cpu", "--json"]) == 0
        return text, json.loads(capsys.readouterr().out)

    return run


def test_every_op_has_its_backend_and_a_reason_for_each_other(info):
    text, report = info()
    chosen = {op: choice["chosen"] for op, choice in report["ops"].items()}
    assert chosen == dict.fromkeys(backend.OPS, "cpu")
    starts = {line.partition(":")[0] for line in text.splitlines()}
    assert set(ops.__all__) | set(backend.OPS) <= starts
    assert "norm_linear: cpu, made of layer_norm and torch's linear\n" in text
    assert "    sdpa: can serve, comes later in the order\n" in text

    text, report = info(DEEPFAST_BACKEND="triton")
    assert {choice["chosen"] for choice in report["ops"].values()} == {None}
    assert "layer_norm: none, DEEPFAST_BACKEND=triton cannot serve\n" in text
    assert "    triton: tensors are on cpu, not cuda" in text
    assert "    cpu: can serve, DEEPFAST_BACKEND=triton asks for another\n" in text
    _, report = info(DEEPFAST_BACKEND="sdpa")
    chosen = {op: choice["chosen"] for op, choice in report["ops"].items()}
    assert chosen == dict.fromkeys(backend.OPS, None) | {"attention": "sdpa"}
    assert "sdpa is torch's attention" in report["ops"]["boundary"]["refused"]["sdpa"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine where no check was made")
def test_the_mode_of_checks_is_told(info):
    assert "no check was made here; a GPU checks each kernel at its first use; " in info()[0]
    for mode in ("off", "require"):
        text, _ = info(DEEPFAST_SELFCHECK=mode)
        assert f"no check was made here; DEEPFAST_SELFCHECK={mode}: " in text


def test_a_wrong_variable_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("DEEPFAST_SELFCHECK", "fast")
    assert main(["info", "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("deepfast info: DEEPFAST_SELFCHECK: expected one of first-use, off, ")
    assert said.count("\n") == 1
