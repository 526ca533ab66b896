"""What the command line does with errors before and while a command runs."""

import importlib

import pytest
import torch

from deepfast.cli import decoding, main


def test_ctrl_c_while_a_command_is_imported(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["translate", "model.pt"]) == 130
    assert capsys.readouterr().err == "deepfast translate: interrupted\n"


def test_python_s_own_lack_of_memory_is_one_sentence(monkeypatch, capsys):
    def exhausted(*args):
        raise MemoryError

    monkeypatch.setattr(importlib.import_module("deepfast.cli.score"), "read_lines", exhausted)
    assert main(["score", "a", "b"]) == 1
    assert capsys.readouterr().err == "deepfast score: out of memory\n"

    def run_far_out(_):
        torch.empty(2**40 * 2**15)

    monkeypatch.setattr("deepfast.cli.score.run", run_far_out)
    assert main(["score", "hyp", "ref"]) == 1
    wanted = f"deepfast score: out of memory: tried to allocate {2**57} bytes\n"
    assert capsys.readouterr().err == wanted


@pytest.mark.parametrize("words", [["--output", ""], ["--output="]])
def test_an_empty_argument_is_no_folder(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "phrases-small", "--over", "optim.lr=1e-3", *words]) == 1
    assert "expected text in every argument, got an empty one" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["sweep", "compare-growth"])
def test_more_runs_than_anyone_waits_for_are_refused(command, capsys):
    over = ["--over", "optim.lr=1e-3"] if command == "sweep" else []
    assert main([command, "phrases-growing", *over, "--seeds", str(10**12)]) == 1
    assert "seeds must be at most 65536" in capsys.readouterr().err


@pytest.mark.parametrize("threads", [0, 100_000_000])
def test_more_threads_than_any_machine_starts_are_refused(threads, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decoding, "load_translator", None)
    text = tmp_path / "text"
    text.write_text("a\n")
    command = ["translate", "model.pt", "--input", str(text), "--threads", str(threads)]
    assert main(command) == 1
    assert "threads must be a whole number from 1 to 1024, got" in capsys.readouterr().err
