"""The names of the commands: what the help shows."""

import re

import pytest

from deepfast.cli import COMMANDS, main

TOP = ["info", "build", "selfcheck", "bench", "report", "plan", "mt"]
MT = ["train", "translate", "score", "sweep", "posunk", "prune", "show"]


@pytest.mark.parametrize(("words", "names"), [([], TOP), (["mt"], MT)])
def test_the_help_names_these_commands(capsys, words, names):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert re.findall(r"^    ([a-z][a-z-]*)", text, re.M) == names
    # A line without a command gets the same.
    assert main(words) == 2
    assert capsys.readouterr() == ("", text)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "mt"])
def test_each_command_has_a_help_with_an_example(capsys, name):
    pytest.importorskip("yaml")
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: deepfast {name} ")
    assert f"example:\n  deepfast {name}" in said
