"""Depth connections with tokens shared out over two processes on the CPU, with dropout."""

from pathlib import Path

import pytest
from torch import nn

from deepfast.nn import DLCL
from deepfast.parallel import shard_tokens

STEPS = Path(__file__).with_name("token_steps.py")
FORMS = [
    "dlcl/dtensor",
    "dlcl/uneven",
    "dlcl/plain",
    "dlcl/middle",
    "post/dtensor",
    "post/plain",
    "attnres/dtensor",
    "attnres/middle",
]


@pytest.mark.parametrize("form", FORMS)
def test_two_ranks(agree_on_two_ranks, form):
    agree_on_two_ranks(form)


def test_misuse():
    with pytest.raises(TypeError, match="expected a DLCL or AttentionResiduals, got Linear"):
        shard_tokens(nn.Linear(2, 2), None)
    with pytest.raises(ValueError, match="mesh must be a DeviceMesh of one dimension, got None"):
        shard_tokens(DLCL(2, 4), None)
