"""Trains with the installed package and runs the code of the README.

python tests/installed.py cpu       fails where another backend than cpu runs the ops
"""

import re
import sys
from pathlib import Path

import torch

import deepfast
from deepfast import backend

README = Path(__file__).parents[1] / "README.md"


def train() -> set[str]:
    """Three steps of a small encoder; returns the backends of its ops."""
    encoder = deepfast.nn.TransformerEncoder(3, 16, 2, 32, connection="dlcl")
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.01)
    x, target = torch.randn(2, 4, 5, 16).unbind()
    losses = []
    with backend.record() as seen:
        for _ in range(3):
            loss = (encoder(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0], losses
    return {by for op, by in seen if op != "attention"}


if __name__ == "__main__":
    assert not Path(deepfast.__file__).is_relative_to(README.parent / "deepfast"), deepfast.__file__
    torch.manual_seed(0)
    ran = train()
    assert ran == {sys.argv[1]}, ran
    # Other packages are not installed beside the wheel.
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    blocks = [block for block in blocks if "transformers" not in block]
    assert blocks
    exec("\n".join(blocks))
    print(f"torch {torch.__version__}: {sys.argv[1]} trains, {len(blocks)} README blocks run")
