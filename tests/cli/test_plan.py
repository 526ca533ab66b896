"""`deepfast plan`: the table, JSON, exit codes and the picture."""

import json

import pytest

from deepfast.cli import main
from deepfast.memory import POLICIES

SIZES = ["--dim", "64", "--tokens", "512", "--vocab-size", "100", "--decoder-layers", "1",
         "--length", "32", "--device", "cpu"]  # fmt: skip


@pytest.fixture
def plan(capsys):
    """plan(words): the exit code, and the text or what --json prints."""

    def run(*words):
        code = main(["plan", *SIZES, *words])
        said = capsys.readouterr().out
        return code, json.loads(said) if said.startswith("{") else said

    return run


def test_the_table_is_printed_and_a_picture_drawn(plan, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.svg"
    code, text = plan("--budget", "1GiB", "--num-layers", "6", "--plot", str(path))
    assert code == 0
    assert text.startswith("6 encoder layers (dlcl), 1 decoder layers (residual), pre-norm, 64 ")
    assert "\nrecompute policies: none; decoder none\nstep time: 1.00 times" in text
    for name in ("parameters", "weight copies", "history", "allocator margin", "peak", "budget"):
        assert f"\n{name} " in text
    assert "\nit fits\n" in text
    for name in (*POLICIES, "budget 1.00 GiB"):
        assert f">{name}</text>" in path.read_text()


def test_what_is_left_out_is_solved_for_and_json_says_the_same(plan, capsys):
    code, found = plan("--budget", "20MiB", "--json")
    assert code == 0
    assert found["fits"]
    assert found["num_layers"] > 5
    assert found["peak"] == sum(found["table"].values()) <= found["budget"] == 20 * 2**20
    # What does not fit has an exit code and advice.
    most = str(found["num_layers"])
    code, text = plan("--budget", "20MiB", "--num-layers", most, "--recompute", "none")
    assert code == 3
    assert "it does not fit: it fits with recompute policies " in text
    code, text = plan("--num-layers", most)
    assert code == 0
    assert "\nit needs a budget of " in text
    assert main(["plan", "--budget", "1MiB", *SIZES]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("deepfast plan: --budget: expected at least ")


def test_options_are_those_of_plan(plan):
    given = {"num_layers": 4, "num_heads": 4, "ffn_dim": 100, "vocab_size": 0, "norm": "post",
             "decoder_layers": 0, "connection": "residual", "dtype": "float32", "optimizer": "sgd",
             "activation": "gelu", "accumulate": 2, "length": 9}  # fmt: skip
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    options += ["--budget=1GiB", "--no-dropout", "--recompute=none,ffn,layer,layer", "--json"]
    code, found = plan(*options)
    assert code == 0
    given |= {"dropout": False, "recompute": ["none", "ffn", "layer", "layer"]}
    assert {name: found[name] for name in given} == given


def test_ranks_share_parameters_and_optimizer(plan):
    given = "--budget", "1TiB", "--num-layers", "3", "--decoder-layers=0", "--json", "--ranks"
    alone, ddp, fsdp, kept, many = (
        plan(*given, ranks, "--parallel", *options)[1]["table"]
        for ranks, *options in (
            ("1", "fsdp"), ("8", "ddp"), ("8", "fsdp"), ("8", "fsdp", "--no-reshard"),
            ("64", "fsdp"),
        )
    )  # fmt: skip
    for name in ("parameters", "optimizer"):
        assert ddp[name] == alone[name]
        assert fsdp[name] == pytest.approx(alone[name] / 8, rel=1e-4)
    assert alone["gradients"] <= ddp["gradients"] == alone["parameters"]
    assert fsdp["weight copies"] < kept["weight copies"]
    totals = [sum(one.values()) for one in (many, fsdp, kept, alone)]
    assert totals == sorted(set(totals))
