"""The text and the score of the published Multi30k results."""

import gzip

import pytest

from bench import multi30k

RAW = {
    "en": ["Two dogs\u2019 ball, \u201cred\u201d.", "A man doesn't SING (loudly)!"],
    "de": ["Zwei Hunde spielen - Ball.", "Ein Mann singt \u201elaut\u201c!"],
}
TOKENS = {
    "en": ["two dogs &apos; ball , &quot; red . &quot;", "a man doesn &apos;t sing ( loudly ) !"],
    "de": ["zwei hunde spielen - ball .", "ein mann singt &quot; laut &quot; !"],
}


@pytest.fixture
def folder(tmp_path):
    for part in multi30k.PARTS:
        for language, lines in RAW.items():
            with gzip.open(tmp_path / f"{part}.{language}.gz", "wt", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
    return tmp_path


def test_the_text_is_normalised_lower_cased_and_tokenised(folder):
    multi30k.main(["tokenise", str(folder), str(folder / "text")])
    for part in multi30k.PARTS:
        for language, lines in TOKENS.items():
            assert (folder / "text" / f"{part}.{language}").read_text("utf-8").splitlines() == lines


def test_the_score_counts_the_tokens(folder, capsys):
    found = folder / "found"
    found.write_text("\n".join(TOKENS["de"]), encoding="utf-8")
    multi30k.main(["mt", "score", str(folder), str(found)])
    published, of_text = capsys.readouterr().out.splitlines()[2:]
    assert published.startswith("| of tokens, lower-case, as published | 100.00 | ")
    assert "tok:none" in published
    assert "tok:13a" in of_text
    found.write_text("ein hund\nein mann", encoding="utf-8")
    multi30k.main(["mt", "score", str(folder), str(found)])
    published = capsys.readouterr().out.splitlines()[2]
    assert 0 <= float(published.split("|")[2]) < 50


def test_another_number_of_lines_is_refused(folder):
    (folder / "found").write_text("zwei hunde .\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="expected 2 lines, got 1"):
        multi30k.main(["mt", "score", str(folder), str(folder / "found")])
