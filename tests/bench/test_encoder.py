"""The comparison with torch's encoder, at toy sizes."""

import re

import pytest
import torch

from bench import encoder


def test_a_line_for_each_kind_of_batch(capsys, threads):
    sizes = ["--layers", "1", "--dim", "16", "--sentences", "4", "--rounds", "1"]
    with threads(1):
        assert encoder.main(sizes) == 0
    said = capsys.readouterr().out
    rows = re.findall(r"^\| of (14[^|]*) words \|(?: [\d.]+ \|){5}$", said, re.MULTILINE)
    assert rows == ["14 +- 4", "14"]


@pytest.mark.parametrize("name", ["residual", "DLCL"])
def test_a_step_updates_every_parameter(name):
    model = encoder.models(2, 16)[name]
    before = [p.clone() for p in model.parameters()]
    encoder.step(model, torch.randn(3, 5, 16), torch.arange(5) >= torch.tensor([[5], [2], [4]]))()
    assert not any(map(torch.equal, before, model.parameters()))


NAMES = {
    "self_attn.in_proj_": "attention.query_key_value.",
    "self_attn.out_proj": "attention.out",
    "linear1": "feed_forward.up",
    "linear2": "feed_forward.down",
    "norm2": "feed_forward_norm",
}


def ours(name: str, layers: int) -> str:
    """The name of torch's parameter in deepfast's encoder."""
    if name.startswith("norm."):
        return f"connection.norms.{layers}.{name[5:]}"
    if ".norm1." in name:
        return name.replace("layers.", "connection.norms.").replace(".norm1.", ".")
    for theirs, mine in NAMES.items():
        name = name.replace(theirs, mine)
    return name


def test_the_comparison_is_of_the_same_work():
    """With torch's parameters deepfast's plain encoder computes the same."""
    found = encoder.models(2, 16)
    theirs, mine = found["torch"].eval().double(), found["residual"].eval().double()
    for p in theirs.parameters():
        p.data.normal_()
    mine.load_state_dict({ours(name, 2): p for name, p in theirs.state_dict().items()})
    padding = torch.arange(5) >= torch.tensor([[5], [2], [4]])
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(
        mine(x, padding)[~padding], theirs(x, src_key_padding_mask=padding)[~padding]
    )
