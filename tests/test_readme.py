"""The README's code runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    assert len(blocks) >= 3
    scope: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), scope)
    assert scope["x"].shape == (8, 32, 256)
    assert scope["y"].shape == (8, 32, 256)
    assert scope["dlcl"].weight.grad is not None


def test_commands_exist():
    from deepfast.cli import COMMANDS

    for command in re.findall(r"^ {4}(?:\.venv/bin/)?deepfast (\w+)", README.read_text(), re.M):
        assert command in COMMANDS
