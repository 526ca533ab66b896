"""`deepfast mt train`: output, exit codes, and a real kill."""

import io
import os
import shlex
import signal
from unittest.mock import Mock

import pytest

from deepfast.cli import main
from deepfast.mt.training import dump_recipe, recipe_names
from tests.mt.training.runs import at_step


@pytest.fixture
def command(make_recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(make_recipe()))
    return ["mt", "train", str(path)]


def test_the_list_and_overrides_behind_options(command, capsys):
    assert main(["mt", "train", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(recipe_names())
    words = [*command, "optim.lr=2e-3", "--print", "optim.warmup=7"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "lr: 0.002" in said
    assert "warmup: 7" in said
    for wrong, word in (([*words, "--prnt", "a=1"], "--prnt"), (["info", "a=1"], "a=1")):
        with pytest.raises(SystemExit):
            main(wrong)
        assert f"unrecognized arguments: {word}" in capsys.readouterr().err


def test_an_output_that_is_no_plain_word(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*command, "train.max_steps=2", "output=-x"]) == 0
    assert (tmp_path / "-x" / "best.pt").is_file()
    told = capsys.readouterr().out.rpartition("to translate: deepfast ")[2]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    assert main(shlex.split(told.removesuffix(" < FILE\n"))) == 0
    assert capsys.readouterr().out.count("\n") == 2


def test_the_first_rank_of_a_machine_says_what_its_recipe_lacks(command, monkeypatch, capsys):
    """Each machine may have another file."""
    for rank, local, said in (("0", "0", ": x: "), ("2", "0", ": rank 2: x: "), ("1", "1", "")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local)
        assert main([*command, "x=1"]) == 1
        told = capsys.readouterr().err.partition("unknown key")[0]
        assert told == (f"deepfast mt train{said}" if said else "")


def send(monkeypatch, *numbers):
    """The process gets these signals in the first step."""
    at_step(monkeypatch, 1, lambda trainer: [os.kill(os.getpid(), number) for number in numbers])


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([signal.SIGTERM], 143),
        ([signal.SIGINT, signal.SIGHUP], 130),
        # A closed terminal sends it twice: its shell does, and the kernel.
        ([signal.SIGHUP, signal.SIGHUP], 129),
    ],
)
def test_signals_have_their_exit_codes(command, monkeypatch, capsys, numbers, code):
    before = list(map(signal.getsignal, numbers))
    send(monkeypatch, *numbers)
    assert main(command) == code
    out = capsys.readouterr().out
    assert f"{numbers[0].name}: stopped after step 1; continue from" in out
    assert "resume=true" in out
    assert list(map(signal.getsignal, numbers)) == before


def test_a_run_under_nohup_ignores_a_closed_terminal(command, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        send(monkeypatch, signal.SIGHUP)
        assert main([*command, "train.max_steps=2"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupt_that_cannot_wait(command, tmp_path, capsys, monkeypatch):
    """Before the first step, and a second one."""
    with monkeypatch.context() as patch:
        patch.setattr("deepfast.mt.training.run.load_corpus", Mock(side_effect=KeyboardInterrupt))
        assert main(command) == 130
    send(monkeypatch, signal.SIGINT, signal.SIGINT)
    assert main(command) == 130
    assert capsys.readouterr().err.count("interrupted, no further checkpoint was written") == 2
    assert not list((tmp_path / "run").glob("step-*"))
