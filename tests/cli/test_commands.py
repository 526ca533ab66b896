"""The names of the commands, their help, and what the operating system refuses."""

import importlib

import pytest
import torch

from deepfast.cli import COMMANDS, main


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_each_command_has_a_help_with_an_example(capsys, name):
    pytest.importorskip("yaml")
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: deepfast {name}")
    if name in ("", "mt"):
        # A line without a command gets the help, too.
        assert main(name.split()) == 2
        assert capsys.readouterr() == ("", said)
    else:
        assert f"example:\n  deepfast {name}" in said


def test_an_error_of_the_system_has_its_reason_alone(monkeypatch, capsys):
    def too_much(*args):
        return torch.empty(2**40 * 2**15)

    def fail(error):
        raise error

    for called, code, sentence in (
        (lambda _: fail(MemoryError()), 1, "out of memory"),
        (lambda _: fail(OSError(28, "No space left on device")), 1, "No space left on device"),
        (too_much, 1, f"out of memory: tried to allocate {2**57} bytes"),
        (lambda _: fail(KeyboardInterrupt()), 130, "interrupted"),
    ):
        monkeypatch.setattr("deepfast.cli.mt.score.run", called)
        assert main(["mt", "score", "hyp", "ref"]) == code
        assert capsys.readouterr().err == f"deepfast mt score: {sentence}\n"
    # Ctrl-C may come while the command is imported.
    monkeypatch.setattr(importlib, "import_module", lambda _: fail(KeyboardInterrupt()))
    assert main(["mt", "translate", "model.pt"]) == 130
    assert capsys.readouterr().err == "deepfast mt translate: interrupted\n"
