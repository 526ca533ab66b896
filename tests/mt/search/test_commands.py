"""`deepfast mt translate` and `deepfast mt score`, as a user calls them."""

import gzip
import io
import json
import re
import sys
import zipfile

import pytest

from deepfast.cli import main
from deepfast.mt.search import (
    DecodingOptions,
    bleu,
    load_translator,
    translate_lines,
    translate_nbest,
)

TEXT = "the old bridge\n\nwe walk home\r\na small house\n"
LINES = ["the old bridge", "", "we walk home", "a small house"]
FAST = ["--beam", "2", "--max-length", "6", "--device", "cpu"]


@pytest.fixture
def expected(model, vocabulary):
    return translate_lines(model, vocabulary, LINES, DecodingOptions(beam=2, max_length=6))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "test.en"
    path.write_bytes(TEXT.encode())
    return path


@pytest.mark.parametrize("end", ["", ".gz"])
def test_file_to_file(checkpoint, tmp_path, expected, capsys, end):
    pack, unpack = (gzip.compress, gzip.decompress) if end else (bytes, bytes)
    source, output = tmp_path / f"test.en{end}", tmp_path / f"test.de{end}"
    source.write_bytes(pack(TEXT.encode()))
    arguments = ["--input", str(source), "--output", str(output), *FAST]
    assert main(["mt", "translate", checkpoint, *arguments]) == 0
    assert unpack(output.read_bytes()).decode().split("\n") == [*expected, ""]
    said = capsys.readouterr()
    assert said.out == ""
    assert "deepfast mt translate: 4 lines in" in said.err
    assert re.search(r" lines/s, \d+\.\d target tokens/s\n$", said.err)
    assert sorted(tmp_path.iterdir()) == [output, source]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_standard_input_to_standard_output(checkpoint, expected, capfdbinary, monkeypatch, pack):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(pack(TEXT.encode()))))
    assert main(["mt", "translate", checkpoint, *FAST]) == 0
    assert capfdbinary.readouterr().out.decode() == "".join(f"{x}\n" for x in expected)


def test_nbest_by_both_forms_of_the_length_penalty(checkpoint, source, model, vocabulary, capsys):
    words = ["--input", str(source), "--length-penalty", "1.6", "--nbest", "2", *FAST]
    first = []
    for form in ("gnmt", "power"):
        assert main(["mt", "translate", checkpoint, *words, "--length-form", form]) == 0
        rows = [row.split("\t") for row in capsys.readouterr().out.splitlines()]
        options = DecodingOptions(
            beam=2, max_length=6, nbest=2, length_penalty=1.6, length_form=form
        )
        nbest = [x for best in translate_nbest(model, vocabulary, LINES, options) for x in best]
        assert [int(number) for number, _, _ in rows] == [1, 1, 2, 3, 3, 4, 4]
        assert [text for _, _, text in rows] == [found.text for found in nbest]
        scores = [float(score) for _, score, _ in rows]
        assert scores == pytest.approx([found.score for found in nbest], abs=1e-3)
        first.append(scores[0])
    assert first[0] < 2 * first[1]


DECODE = {"beam": 3, "length_penalty": 2.0, "length_form": "power"}


@pytest.mark.parametrize(
    ("words", "changes", "said"),
    [
        ([], {}, "beam 3, length penalty 2 (power)"),
        (["--beam", "1"], {"beam": 1}, "beam 1, length penalty 2 (power)"),
        (["--length-penalty", "0"], {"length_penalty": 0}, "beam 3, length penalty 0 (power)"),
    ],
)
def test_the_recipe_of_the_checkpoint_says_how_to_decode(
    model, vocabulary, write, source, capsys, words, changes, said
):
    checkpoint = write(model, recipe={"decode": DECODE})
    command = ["mt", "translate", checkpoint, "--input", str(source), "--max-length", "6", *words]
    assert main(command) == 0
    found = capsys.readouterr()
    assert f"deepfast mt translate: decoding: {said}\n" in found.err
    options = DecodingOptions(max_length=6, **DECODE | changes)
    assert found.out.splitlines() == translate_lines(model, vocabulary, LINES, options)


def test_of_several_checkpoints_the_first_says_how_to_decode(model, write, source, capsys):
    first, other = write(model, recipe={"decode": DECODE}), write(model)
    assert main(["mt", "translate", first, other, first, "--input", str(source)]) == 0
    said = capsys.readouterr().err
    assert "translate: decoding: beam 3, length penalty 2 (power)\n" in said
    assert said.count("the first checkpoint's decoding counts") == 1
    assert f"{other} has beam 4, length penalty 0.6 (gnmt), but the first" in said


def test_a_checkpoint_is_read_once(checkpoint, source, monkeypatch, capsys):
    checked, check = [], zipfile.ZipFile.testzip
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda self: checked.append(1) or check(self))
    assert main(["mt", "translate", checkpoint, "--input", str(source), *FAST]) == 0
    assert len(checked) == 1


def test_bfloat16_and_long_lines(checkpoint, source, capsys):
    arguments = ["--input", str(source), "--precision", "bfloat16", "--max-tokens", "3", *FAST]
    assert main(["mt", "translate", checkpoint, *arguments]) == 0
    said = capsys.readouterr()
    assert len(said.out.split("\n")) == 5
    assert "deepfast mt translate: line 1 has" in said.err


def test_score(tmp_path, capsys):
    hypotheses, references = tmp_path / "h", tmp_path / "r.gz"
    hypotheses.write_text("the Small house stands here\n", encoding="utf-8")
    references.write_bytes(gzip.compress(b"the small house stands here\n"))
    assert main(["mt", "score", str(hypotheses), str(references)]) == 0
    said = capsys.readouterr().out
    assert "case:mixed" in said
    assert "BLEU lower-case 100.00" in said
    assert main(["mt", "score", str(hypotheses), str(references), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bleu_lowercase"] == pytest.approx(100)


def test_the_tokenizer_is_chosen_and_said(model, write, source, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("那座旧桥已经关闭。\n" * 4, encoding="utf-8")
    two, checkpoint = [str(text)] * 2, write(model, recipe={"data": {"target_language": "zh"}})
    translated = ["--checkpoint", checkpoint, "--source", str(source), "--reference", str(text)]
    for words, tokenizer, score in (
        (two, "13a", "  0.00"), ([*two, "--tokenize", "zh"], "zh", "100.00"),
        ([*translated, *FAST], "zh", "  0.00"),
        ([*translated, *FAST, "--tokenize", "none"], "none", "  0.00"),
    ):  # fmt: skip
        assert main(["mt", "score", *words]) == 0
        said = capsys.readouterr()
        assert said.out.startswith(
            f"BLEU            {score}  nrefs:1|case:mixed|eff:no|tok:{tokenizer}"
        )
        assert ("most references have no space" in said.err) == (tokenizer != "zh")


def test_references_of_a_model_of_lower_cased_text(model, vocabulary, write, source, capsys):
    """They are those of training's BLEU."""
    checkpoint = write(model, recipe={"data": {"lowercase": True}})
    reference = source.with_name("reference")
    found = translate_lines(model, vocabulary, LINES, DecodingOptions(beam=2, max_length=6))
    reference.write_text("".join(f"{line.upper()}!\n" for line in found))
    words = ["mt", "score", "--checkpoint", checkpoint, "--source", str(source), *FAST]
    words += ["--tokenize", "char"]
    assert main([*words, "--reference", str(reference)]) == 0
    said = capsys.readouterr().out
    expected = bleu(found, [f"{line.lower()}!" for line in found], tokenize="char").bleu
    assert 0 < expected < 100
    assert said.startswith(f"BLEU            {expected:6.2f}  ")
    assert "references lower-cased, as in training\n" in said
    assert main([*words, "--reference", str(reference), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lowercase"] is True


def test_score_by_length(tmp_path, capsys):
    sources, texts = tmp_path / "s", tmp_path / "t"
    sources.write_text("one\none two three\n<de> one two three\n" + "word " * 9 + "\n")
    texts.write_text("a b c d\na b c d e\na b c d f\na b c d g\n")
    arguments = ["mt", "score", str(texts), str(texts)]
    arguments += ["--source", str(sources), "--by-length", "2,3,5"]
    assert main(arguments) == 0
    said = capsys.readouterr().out.splitlines()[-4:]
    assert said == [
        "BLEU 100.00  1 sentence, up to 2 words",
        "BLEU 100.00  2 sentences, 3 words",
        "BLEU      -  0 sentences, 4 to 5 words",
        "BLEU 100.00  1 sentence, over 5 words",
    ]
    assert main([*arguments, "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["by_length"]
    assert [part["sentences"] for part in parts] == [1, 2, 0, 1]
    assert parts[2] == {"name": "4 to 5 words", "sentences": 0, "bleu": None}
    picture = tmp_path / "length.svg"
    assert main([*arguments, "--picture", str(picture)]) == 0
    words = re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text())
    assert {"up to 2", "3", "4 to 5", "over 5", "BLEU by the words of a source"} <= set(words)
    # The part without a sentence has no bar.
    assert [word for word in words if re.fullmatch(r"\d+\.\d", word)] == ["100.0"] * 3


def test_score_without_unknown_words(checkpoint, tmp_path, capsys):
    source, reference = tmp_path / "s", tmp_path / "t"
    source.write_text("the old bridge\nwe walk Ω home\na small house\n", encoding="utf-8")
    reference.write_text("the Ω bridge\nwe walk home\nthe Ω house\n", encoding="utf-8")
    arguments = ["mt", "score", "--checkpoint", checkpoint, "--source", str(source), "--reference",
                 str(reference), "--by-length", "3", *FAST]  # fmt: skip
    assert main(arguments) == 0
    *_, short, long, known = capsys.readouterr().out.splitlines()
    assert short.endswith(" 2 sentences, up to 3 words")
    assert long.endswith(" 1 sentence, over 3 words")
    # Those whose reference is known; the Ω of a source does not count.
    assert known.endswith(" 1 sentence, no unknown word in the reference")


def test_known_references(checkpoint, write, model):
    references = ["the old bridge", "The old bridge", "the Ω bridge", ""]
    lower = write(model, recipe={"data": {"lowercase": True}})
    for path, expected in (
        (checkpoint, [True, False, False, True]), (lower, [True, True, False, True]),
    ):  # fmt: skip
        translator = load_translator([path], "cpu")
        assert translator.knows(translator.prepare_references(references)) == expected


@pytest.mark.parametrize(("words", "hints"), [([], 1), (["--alpha", "0.5"], 0), (["--gamma=1"], 0)])
def test_default_weights_hint_at_tuning(grown_checkpoint, source, capsys, words, hints):
    arguments = ["--input", str(source), "--deep-shallow", *words, *FAST]
    assert main(["mt", "translate", grown_checkpoint, *arguments]) == 0
    said = capsys.readouterr()
    assert said.err.count("deepfast mt score --tune finds good ones on a dev text") == hints
    assert "--tune" not in said.out


BY_LENGTH = ["score", "{s}", "{s}", "--source", "{s}", "--by-length"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["translate", "{c}", "--input", "{d}/none"], "none: there is no such file"),
        (["translate", "{d}/none.pt"], "none.pt: there is no such file"),
        (["translate", "{s}"], "expected a deepfast checkpoint, got a file of"),
        (["translate", "{c}", "--output", "{d}/no/x"], "/no is not an existing folder"),
        (["translate", "{c}", "--output", "{d}"], "expected a file, got a folder"),
        (["translate", "{c}", "--device", "tpu"], "expected cpu or cuda, got"),
        (["translate", "{c}", "{c}", "--deep-shallow"], "depth_growing, got 2 models"),
        (["translate", "{c}", "--gamma", "1"], "alpha and gamma need deep_shallow, got "),
        (["score", "--tune", "{s}", "{s}"], "expected HYPOTHESES and REFERENCES, or --checkp"),
        (["translate", "{c}", "--nbest", "5"], "nbest must be at most beam 4, got 5"),
        (["score", "{s}", "{s}", "--checkpoint", "{c}"], "expected HYPOTHESES and REFERENCES"),
        (["score", "{s}", "{s}", "--by-length", "3"], "--by-length: expected --source, the text"),
        (["score", "{s}", "{s}", "--picture", "x.svg"], "--picture: expected --by-length, whose"),
        ([*BY_LENGTH, "3", "--picture", "x.pdf"],
         "--picture: expected a file ending in .svg or .png, got x.pdf"),
        ([*BY_LENGTH, "3,x"], "expected rising integers such as 10,20,30, got '3,x'"),
        (["score", "{s}", "{s}", "--source", "{e}", "--by-length", "3"],
         "empty as in "),
        (["score", "{s}", "{e}"], "got 4 translations and 0 references"),
        (["score", "--checkpoint", "{c}", "--source", "{s}", "--reference", "{e}"],
         "empty, got 4 and 0"),
    ],
)  # fmt: skip
def test_refused_with_a_sentence(checkpoint, source, tmp_path, capsys, arguments, sentence):
    (tmp_path / "empty").touch()
    if arguments[0] == "translate" and "--input" not in arguments:
        arguments = [*arguments, "--input", "{s}"]
    places = {"c": checkpoint, "s": source, "d": tmp_path, "e": tmp_path / "empty"}
    assert main(["mt", *(a.format(**places) for a in arguments)]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if "decoding: beam" not in line]
    assert len(said) == 1
    assert sentence in said[0]
