"""The text and the score of the published Multi30k results, English to German.

    pip install sacremoses        # part of the extra dev
    python -m bench.multi30k tokenise RAW TEXT
    deepfast mt train multi30k-tiny data.train_source=TEXT/train.en ...
    deepfast mt translate runs/multi30k-tiny/average.pt < TEXT/test_2016_flickr.en > FOUND
    python -m bench.multi30k score RAW FOUND

RAW is a folder with train.en.gz, train.de.gz, val.* and test_2016_flickr.* of the data's task 1.

Wu et al. 2021, "Good for Misconceived Reasons", table 2: a Transformer of 4 + 4 layers and width
128 has 41.0 BLEU on test 2016 from the text alone. Their text is normalised, lower-cased and
tokenised by the scripts of Moses, here by sacremoses, and BLEU counts those tokens.
"""

import argparse
import gzip
import sys
from pathlib import Path

import sacrebleu
from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer

from deepfast.mt.data.text import write_lines

PARTS, LANGUAGES = ("train", "val", "test_2016_flickr"), ("en", "de")
TEST = "test_2016_flickr"


def lines(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def tokenise(texts: list[str], language: str) -> list[str]:
    normalise = MosesPunctNormalizer(lang=language).normalize
    split = MosesTokenizer(lang=language).tokenize
    return [split(normalise(text).lower(), return_str=True) for text in texts]


def score(folder: Path, translations: list[str]) -> list[str]:
    """Lines of a Markdown table: BLEU of tokens, and sacrebleu's own of text."""
    reference = lines(folder / f"{TEST}.de.gz")
    if len(translations) != len(reference):
        sys.exit(f"translations: expected {len(reference)} lines, got {len(translations)}")
    tokens = sacrebleu.BLEU(tokenize="none", force=True)
    text = sacrebleu.BLEU(lowercase=True)
    join = MosesDetokenizer(lang="de").detokenize
    joined = [join(line.split()) for line in translations]
    rows = (
        ("of tokens, lower-case, as published", tokens, translations, tokenise(reference, "de")),
        ("of text, lower-case", text, joined, reference),
    )
    table = ["| BLEU | value | signature |", "|---|---|---|"]
    for name, measure, found, expected in rows:
        value = measure.corpus_score(found, [expected]).score
        table.append(f"| {name} | {value:.2f} | `{measure.get_signature()}` |")
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("task", choices=("tokenise", "score"))
    parser.add_argument("folder", type=Path, help="of the gzip files")
    parser.add_argument("path", type=Path, help="where tokenised text goes, or the translations")
    args = parser.parse_args(argv)
    if args.task == "score":
        print("\n".join(score(args.folder, args.path.read_text("utf-8").splitlines())))
        return
    args.path.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        for language in LANGUAGES:
            text = tokenise(lines(args.folder / f"{part}.{language}.gz"), language)
            write_lines(args.path / f"{part}.{language}", text)


if __name__ == "__main__":
    main()
