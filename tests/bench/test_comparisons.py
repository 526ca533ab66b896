"""The benchmarks beside plain PyTorch, at toy sizes: their tables, and that work is the same."""

import re
from dataclasses import replace

import pytest
import torch

from bench import attention, claims, compiled, depth, encoder, gradients, launch_overhead, record


@pytest.fixture(autouse=True)
def _one_thread(threads):
    with threads(1):
        yield


def test_the_overhead_of_launches(monkeypatch, capsys):
    for name, value in (("LAYERS", 9), ("CALLS", 2), ("ROUNDS", 1)):
        monkeypatch.setattr(launch_overhead, name, value)
    monkeypatch.setattr(launch_overhead, "keep_memory", lambda: None)
    assert launch_overhead.main(["cpu"]) == 0
    rows = re.findall(r"^ *\d+\.\d us cpu: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert rows[:2] == [
        "deepfast's add_layer_norm, forward",
        "deepfast's add_layer_norm, both ways",
    ]
    assert {"layer_norm, forward", "a push of DLCL, both ways, without launches"} <= {*rows}
    assert {"boundary_backward", "mix_rows", "attend_pull"} <= {*rows}


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
    gradients.draw(norms, tmp_path / "a.svg")
    assert all(name in (tmp_path / "a.svg").read_text() for name in gradients.STACKS)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The file of results, empty and in a folder of its own."""
    path = tmp_path / "results.csv"
    record.write({}, path)
    for name in ("read", "write"):
        monkeypatch.setattr(getattr(record, name), "__defaults__", (path,))
    monkeypatch.setattr(depth, "FILE", path)
    return path


def test_a_step_over_depth(results, monkeypatch):
    for name, value in {"DIM": 8, "HEADS": 2, "FFN": 8, "LENGTH": 3}.items():
        monkeypatch.setattr(claims, name, value)
    monkeypatch.setattr(depth, "DEPTHS", (1, 2))
    monkeypatch.setattr(depth, "SENTENCES", 2)
    assert depth.main(["--rounds", "1"]) == 0
    rows = record.read()
    # Of the compiled loop only the time.
    assert len(rows) == 6 * 2 * 2 + 2
    assert all(row.value > 0 for row in rows.values())
    pictures = sorted(path.name for path in results.parent.glob("*.svg"))
    assert pictures == [
        "depth_gib.svg", "depth_gib_dark.svg", "depth_ratio.svg", "depth_ratio_dark.svg",
        "schedule.svg",
    ]  # fmt: skip
    for name in pictures[:4]:
        text = (results.parent / name).read_text()
        shown = [key for key in depth.FORMS if "gib" not in name or key != "dlcl_compiled"]
        assert all(depth.FORMS[key][0] in text for key in shown)


@pytest.mark.parametrize("form", ["dlcl_per_row", "dlcl_stack", "dlcl_compiled", "attnres_per_row"])
def test_the_forms_compute_the_same(form, monkeypatch):
    """In a step of the benchmark every form of a connection has the loss of deepfast."""
    losses = []
    backward = torch.Tensor.backward
    monkeypatch.setattr(
        torch.Tensor, "backward", lambda x, *given: losses.append(x.item()) or backward(x, *given)
    )
    for name, value in {"DIM": 8, "HEADS": 2, "FFN": 8, "LENGTH": 3}.items():
        monkeypatch.setattr(claims, name, value)
    _, connection, computed = depth.FORMS[form]
    for given in (None, computed):
        claims.step(3, connection, given, sentences=2, dropout=0.0)()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", claims.GROUPS)
def test_claims(results, monkeypatch, group):
    """Every number that a group measures is one of the file."""
    known = {key for key, _ in record.read(record.FILE)}
    for name, value in {"DIM": 8, "HEADS": 2, "FFN": 8, "LENGTH": 2, "TOKENS": 4}.items():
        monkeypatch.setattr(claims, name, value)
    monkeypatch.setattr(claims, "SENTENCES", 2)
    monkeypatch.setattr(claims, "keep_memory", lambda: None)
    assert claims.main([group, "--rounds", "1", "--threads", "1"]) == 0
    rows = record.read()
    assert {key for key, _ in rows} <= known
    assert rows
    assert all(row.value > 0 and row.command.endswith(group) for row in rows.values())


@pytest.mark.exhaustive
def test_models(results, monkeypatch):
    pytest.importorskip("transformers")
    from bench import models

    known = {key for key, _ in record.read(record.FILE)}
    monkeypatch.setattr(models, "keep_memory", lambda: None)
    assert models.main(["torch", "gpt2"]) == 0
    assert len(record.read()) == 4
    assert {key for key, _ in record.read()} <= known


def test_compiled(results, monkeypatch, capsys):
    """A row has two numbers, both of which are recorded."""
    row = compiled.ROWS["depth_mix_8_fp32"]
    small = replace(row, sizes=replace(row.sizes, tokens=4, dim=8))
    monkeypatch.setitem(compiled.ROWS, "depth_mix_8_fp32", small)
    monkeypatch.setattr(compiled, "keep_memory", lambda: None)
    assert compiled.main(["depth_mix_8_fp32", "--rounds", "1"]) == 0
    assert {key for key, _ in record.read()} == {
        "compiled_depth_mix_8_fp32", "compiled_depth_mix_8_fp32_backward",
    }  # fmt: skip
    capsys.readouterr()
    assert compiled.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == [*compiled.ROWS, *compiled.MODELS]
