"""`deepfast plan`: the table, JSON, exit codes and the picture."""

import json

import pytest

from deepfast.cli import main
from deepfast.memory import POLICIES

ARGUMENTS = ["plan", "--budget", "24GiB", "--dim", "512", "--tokens", "8192"]


def test_the_table_is_printed(capsys):
    assert main([*ARGUMENTS, "--num-layers", "30"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("30 encoder layers (dlcl), 6 decoder layers (residual), pre-norm, 512 ")
    assert "\nrecompute policies: none; decoder none\nstep time: 1.00 times" in text
    for name in ("parameters", "weight copies", "history", "allocator margin", "peak", "budget"):
        assert f"\n{name} " in text
    assert text.endswith("it fits\n")


def test_what_is_left_out_is_solved_for_and_json_says_the_same(capsys):
    assert main([*ARGUMENTS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["num_layers"] > 100
    assert found["peak"] == sum(found["table"].values()) <= found["budget"] == 24 * 2**30
    assert main([*ARGUMENTS, "--num-layers", str(found["num_layers"] + 1)]) == 3


def test_what_does_not_fit_has_an_exit_code_and_advice(capsys):
    assert main([*ARGUMENTS, "--num-layers", "5000"]) == 3
    assert "it does not fit: what fits is " in capsys.readouterr().out
    assert main([*ARGUMENTS, "--num-layers", "200", "--recompute", "none"]) == 3
    assert "it does not fit: it fits with recompute policies " in capsys.readouterr().out


def test_it_is_the_exit_code_also_where_a_size_is_solved_for(capsys):
    assert main(["plan", "--budget", "1MiB", "--dim", "512", "--tokens", "8192"]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("deepfast plan: --budget: expected at least ")
    assert said.err.count("\n") == 1


def test_where_no_budget_was_given_it_is_the_answer(capsys):
    assert main(["plan", *ARGUMENTS[3:], "--num-layers", "30", "--recompute", "ffn"]) == 0
    *table, verdict = capsys.readouterr().out.splitlines()
    assert not any(line.startswith("budget") for line in table)
    assert verdict.startswith("it needs a budget of ")
    needed = verdict.removeprefix("it needs a budget of ").replace(" ", "")
    given = ["plan", "--budget", needed, *ARGUMENTS[3:], "--num-layers", "30", "--recompute", "ffn"]
    assert main(given) == 0


def test_options_are_those_of_plan(capsys):
    options = ["--num-layers", "4", "--num-heads", "4", "--ffn-dim", "100", "--vocab-size", "0",
               "--decoder-layers", "0", "--connection", "residual", "--norm", "post", "--dtype",
               "float32", "--optimizer", "sgd", "--device", "cpu", "--activation", "gelu",
               "--accumulate", "2", "--length", "9", "--no-dropout", "--recompute",
               "none,ffn,layer,layer", "--json"]  # fmt: skip
    assert main([*ARGUMENTS, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recompute"] == ["none", "ffn", "layer", "layer"]
    wanted = {"num_heads": 4, "ffn_dim": 100, "vocab_size": 0, "decoder_layers": 0, "norm": "post",
              "connection": "residual", "dtype": "float32", "optimizer": "sgd", "device": "cpu",
              "activation": "gelu", "accumulate": 2, "length": 9, "dropout": False}  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_the_picture_shows_every_policy(tmp_path, ending, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"memory{ending}"
    assert main([*ARGUMENTS, "--num-layers", "30", "--plot", str(path)]) == 0
    content = path.read_bytes()
    if ending == ".png":
        assert content.startswith(b"\x89PNG")
        return
    text = content.decode()
    policies = [f"deepfast, {policy}" for policy in POLICIES]
    for name in (*policies, "budget 24.0 GiB"):
        assert f">{name}</text>" in text


def test_ranks_share_parameters_and_optimizer(capsys):
    def table(*options):
        words = "plan --budget 1TiB --num-layers 24 --dim 1024 --tokens 4096 --json".split()  # noqa: SIM905
        assert main([*words, *options]) == 0
        return json.loads(capsys.readouterr().out)["table"]

    alone, ddp = table(), table("--ranks", "8", "--parallel", "ddp")
    fsdp = table("--ranks", "8", "--parallel", "fsdp")
    kept = table("--ranks", "8", "--parallel", "fsdp", "--no-reshard")
    for name in ("parameters", "optimizer"):
        assert ddp[name] == alone[name]
        assert fsdp[name] == pytest.approx(alone[name] / 8, rel=1e-6)
    assert alone["gradients"] <= ddp["gradients"] == alone["parameters"]
    assert fsdp["weight copies"] < kept["weight copies"]
    assert sum(fsdp.values()) < sum(kept.values()) < sum(alone.values())
    # More ranks need less each, and one rank alone shares nothing.
    assert sum(table("--ranks", "64", "--parallel", "fsdp").values()) < sum(fsdp.values())
    assert table("--ranks", "1", "--parallel", "fsdp") == alone
    assert main([*ARGUMENTS, "--ranks", "8", "--parallel", "fsdp"]) == 0
    assert "one of 8 ranks, fsdp" in capsys.readouterr().out
