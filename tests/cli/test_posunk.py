"""`deepfast mt posunk`, then a model of whole words that is trained on its text."""

import random

from deepfast.cli import main
from deepfast.mt.data import read_lines
from deepfast.mt.data.posunk import read_translations, without_marks
from deepfast.mt.search import load_translator
from tests.mt.words import WORDS, reversed_pairs, write_pairs

RARE = {f"name{n}": f"Name{n}" for n in range(30)}
BOTH = WORDS | RARE


def test_marks_come_back_translated_and_train(tmp_path, capsys):
    """A name is in each sentence, and each name is rare."""
    generator = random.Random(1)
    for part, count in (("train", 150), ("dev", 10)):
        rows = [row for row, _ in reversed_pairs(count)]
        for row in rows:
            row.insert(generator.randrange(len(row)), generator.choice(list(RARE)))
        pairs = [(row, [BOTH[word] for word in reversed(row)]) for row in rows]
        write_pairs(tmp_path, part, pairs)
    files = [str(tmp_path / name) for name in ("train.en", "train.de", "dev.en", "dev.de")]
    marked = tmp_path / "marked"
    assert main(["mt", "posunk", *files, "--words", "10", "--output", str(marked)]) == 0
    assert f"{marked / 'train.de'}: " in capsys.readouterr().out
    assert read_translations(marked / "dictionary") == BOTH
    for part in ("train", "dev"):
        paths = tmp_path / f"{part}.en", tmp_path / f"{part}.de", marked / f"{part}.de"
        for source, target, given in zip(*map(read_lines, paths), strict=True):
            assert given.count("<unk:") == 1
            assert without_marks(source.split(), given, BOTH) == target
    output = tmp_path / "run"
    assert main([
        "mt", "train", "fflstm", f"data.train_source={files[0]}", f"data.dev_source={files[2]}",
        f"data.train_target={marked / 'train.de'}", f"data.dev_target={marked / 'dev.de'}",
        "data.whole_words=true", "data.vocab_size=60", "data.target_vocab_size=30",
        "data.max_tokens=200", "model.dim=8", "model.embedding_dim=8", "model.encoder_layers=1",
        "model.decoder_layers=1", "train.max_steps=2", "train.precision=float32",
        "train.device=cpu", f"output={output}",
    ]) == 0  # fmt: skip
    vocabulary = load_translator([output / "best.pt"], "cpu").vocabulary
    assert vocabulary.whole_words
    # Ten words, their marks and four special words: no more is in the text.
    assert vocabulary.unk_id not in vocabulary.target.encode(read_lines(marked / "train.de")[0])
