"""The benchmarks beside plain PyTorch, at toy sizes: their tables, and that work is the same."""

import re

import pytest
import torch

from bench import attention, encoder, gradients, overhead


@pytest.fixture(autouse=True)
def _one_thread(threads):
    with threads(1):
        yield


def test_the_overhead_of_a_boundary(monkeypatch, capsys):
    monkeypatch.setattr(overhead, "LAYERS", 2)
    monkeypatch.setattr(overhead, "keep_memory", lambda: None)
    assert overhead.main() == 0
    lines = capsys.readouterr().out.splitlines()
    number = r"\d+\.\d us"
    for kind, line in zip(("plain", "full"), lines, strict=True):
        assert re.match(f"{kind} boundary: forward, with launches {number}, both ways, ", line)


def test_attention_beside_sdpa(capsys, monkeypatch):
    monkeypatch.setattr(attention, "CASES", {attention.RAGGED: None, "2 x 3": [3, 3]})
    assert attention.main(["--width", "8", "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    rows = re.findall(r"^\| (\d+ x [^|]*) \|(?: \d+\.\d\d \|){4}$", said, re.MULTILINE)
    assert rows == [attention.RAGGED, "2 x 3"]


def test_an_encoder_beside_torchs(capsys):
    sizes = ["--layers", "1", "--dim", "16", "--sentences", "4", "--rounds", "1"]
    assert encoder.main(sizes) == 0
    said = capsys.readouterr().out
    rows = re.findall(r"^\| of (14[^|]*) words \|(?: [\d.]+ \|){5}$", said, re.MULTILINE)
    assert rows == ["14 +- 4", "14"]


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


def test_the_encoders_do_the_same_work():
    """With torch's parameters deepfast's plain encoder computes the same; a step changes all."""
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
    before = [p.clone() for p in mine.parameters()]
    encoder.step(mine, x, padding)()
    assert not any(map(torch.equal, before, mine.parameters()))


def test_gradients_at_initialisation(tmp_path):
    stacks = {"latent": gradients.STACKS["latent depth, pre-norm"]}
    first, second = (gradients.measure(stacks, layers=3, seeds=1) for _ in range(2))
    assert first == second
    assert len(first["latent"]) == 3
    assert min(first["latent"]) > 0
    norms = {name: [2.0 / (k + 1) for k in range(10)] for name in gradients.STACKS}
    page = gradients.table(norms)
    for line in ("| 5 | 0.4 | 0.4 | 0.4 | 0.4 |", "| lowest over highest | 10 | 10 | 10 | 10 |",
                 "| the same, per layer | 1.292 |"):  # fmt: skip
        assert line in page
    assert "| 25 |" not in page
    gradients.draw(norms, tmp_path / "a.svg")
    assert all(name in (tmp_path / "a.svg").read_text() for name in gradients.STACKS)
