"""`deepfast mt translate` and `deepfast mt score`, as a user calls them."""

import gzip
import io
import json
import re
import sys

import pytest

from deepfast.cli import main
from deepfast.mt.search import DecodingOptions, bleu, translate_lines, translate_nbest
from tests.mt.search.conftest import FAST

TEXT = "the old bridge\n\nwe walk home\r\na small house\n"
LINES = ["the old bridge", "", "we walk home", "a small house"]


@pytest.fixture
def expected(model, vocabulary):
    return translate_lines(model, vocabulary, LINES, DecodingOptions(beam=2, max_length=6))


@pytest.fixture
def source(text):
    return text(LINES)


def test_from_and_to_files_and_standard_streams(
    checkpoint, tmp_path, expected, capsys, monkeypatch
):
    source, output = tmp_path / "test.en.gz", tmp_path / "test.de.gz"
    source.write_bytes(gzip.compress(TEXT.encode()))
    arguments = ["--input", str(source), "--output", str(output), *FAST]
    assert main(["mt", "translate", checkpoint, *arguments]) == 0
    assert gzip.decompress(output.read_bytes()).decode().split("\n") == [*expected, ""]
    said = capsys.readouterr()
    assert said.out == ""
    assert re.search(r"mt translate: 4 lines in .* \d+\.\d target tokens/s\n$", said.err)
    assert sorted(tmp_path.iterdir()) == [output, source]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert main(["mt", "translate", checkpoint, *FAST]) == 0
    assert capsys.readouterr().out == "".join(f"{line}\n" for line in expected)


def test_nbest_and_bfloat16(checkpoint, source, model, vocabulary, capsys):
    command = ["mt", "translate", checkpoint, "--input", source, "--nbest", "2", *FAST]
    assert main(command) == 0
    rows = [row.split("\t") for row in capsys.readouterr().out.splitlines()]
    options = DecodingOptions(beam=2, max_length=6, nbest=2)
    nbest = [x for best in translate_nbest(model, vocabulary, LINES, options) for x in best]
    assert [int(number) for number, _, _ in rows] == [1, 1, 2, 3, 3, 4, 4]
    assert [text for _, _, text in rows] == [found.text for found in nbest]
    scores = [float(score) for _, score, _ in rows]
    assert scores == pytest.approx([found.score for found in nbest], abs=1e-3)
    assert main([*command, "--precision", "bfloat16"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


def test_the_recipe_of_the_checkpoint_says_how_to_decode(model, vocabulary, write, source, capsys):
    decode = {"beam": 3, "length_penalty": 2.0, "length_form": "power"}
    checkpoint = write(model, recipe={"decode": decode})
    for words, changes, said in (
        ([], {}, "beam 3, length penalty 2 (power)"),
        (["--beam", "1"], {"beam": 1}, "beam 1, length penalty 2 (power)"),
        (["--length-penalty", "0"], {"length_penalty": 0}, "beam 3, length penalty 0 (power)"),
    ):
        command = ["mt", "translate", checkpoint, "--input", source, "--max-length", "6", *words]
        assert main(command) == 0
        found = capsys.readouterr()
        assert f"deepfast mt translate: decoding: {said}\n" in found.err
        options = DecodingOptions(max_length=6, **decode | changes)
        assert found.out.splitlines() == translate_lines(model, vocabulary, LINES, options)


def test_the_tokenizer_is_chosen_and_said(model, write, source, text, capsys):
    chinese = text(["那座旧桥已经关闭。"] * 4, "chinese")
    two, checkpoint = [chinese] * 2, write(model, recipe={"data": {"target_language": "zh"}})
    translated = ["--checkpoint", checkpoint, "--source", source, "--reference", chinese, *FAST]
    for words, tokenizer, score in (
        (two, "13a", "  0.00"), ([*two, "--tokenize", "zh"], "zh", "100.00"),
        (translated, "zh", "  0.00"), ([*translated, "--tokenize", "none"], "none", "  0.00"),
    ):  # fmt: skip
        assert main(["mt", "score", *words]) == 0
        said = capsys.readouterr()
        assert said.out.startswith(
            f"BLEU            {score}  nrefs:1|case:mixed|eff:no|tok:{tokenizer}"
        )
        assert ("most references have no space" in said.err) == (tokenizer != "zh")
    assert main(["mt", "score", *two, "--tokenize", "zh", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bleu"] == pytest.approx(100)


def test_references_of_a_model_of_lower_cased_text(expected, model, write, source, text, capsys):
    """They are those of training's BLEU."""
    checkpoint = write(model, recipe={"data": {"lowercase": True}})
    reference = text([f"{line.upper()}!" for line in expected], "reference")
    words = ["mt", "score", "--checkpoint", checkpoint, "--source", source, "--reference",
             reference, "--tokenize", "char", *FAST]  # fmt: skip
    assert main(words) == 0
    said = capsys.readouterr().out
    score = bleu(expected, [f"{line.lower()}!" for line in expected], tokenize="char").bleu
    assert 0 < score < 100
    assert said.startswith(f"BLEU            {score:6.2f}  ")
    assert "references lower-cased, as in training\n" in said
