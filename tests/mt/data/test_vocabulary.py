"""The vocabulary: fixed ids, the same bytes each time, whole files only."""

import io
import random
import re
import sys

import pytest
import torch
from sentencepiece import SentencePieceTrainer

from deepfast.files import DataError, MissingPackage
from deepfast.mt.data import Vocabulary, split_tag

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "der schnelle braune Fuchs springt über den faulen Hund",
    "one hundred and twenty-one euros, 3.50 €",
    "einhunderteinundzwanzig Euro, 3,50 €",
] * 5


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train(SENTENCES, 100)


def test_round_trip_with_fixed_ids(vocabulary):
    assert len(vocabulary) == 100
    ids = vocabulary.pad_id, vocabulary.unk_id, vocabulary.bos_id, vocabulary.eos_id
    assert ids == (0, 1, 2, 3)
    for sentence in SENTENCES:
        found = vocabulary.encode(sentence)
        assert min(found) >= 4
        assert vocabulary.decode(found) == vocabulary.decode([2, *found, 3, 0, 0]) == sentence
        assert vocabulary.decode(torch.tensor(found)) == sentence
    # VT and FS separate words, as other white space does.
    assert vocabulary.decode(vocabulary.encode("  the \t dog\x0bthe\x1cdog ")) == "the dog the dog"
    assert vocabulary.pieces("dog\x0bthe") == vocabulary.pieces("dog the")
    assert (vocabulary.encode(""), vocabulary.decode([])) == ([], "")
    # Unknown characters.
    known = vocabulary.encode("dog")
    assert vocabulary.encode("dog 漢").count(1) == 1
    assert vocabulary.decode([1, *known, 1, 1]) == "⁇ dog ⁇ ⁇"
    assert vocabulary.decode([1, *known, 1], unknown="a▁b") == "a▁b dog a▁b"
    assert not {0, 2, 3} & set(vocabulary.encode("the <s> </s> <pad> dog"))


def test_learning_is_deterministic_and_silent(vocabulary, capfd):
    """Every digit is a piece, and long sentences take part."""
    assert Vocabulary.train(iter(SENTENCES), 100) == vocabulary
    assert capfd.readouterr() == ("", "")
    vocabulary = Vocabulary.train(["in 1996 and 1996", "ab " * 3000 + "ß"], 60, at_most=True)
    assert [p for p in vocabulary.pieces("1996") if p != "▁"] == ["1", "9", "9", "6"]
    assert 1 not in vocabulary.encode("ß")


@pytest.mark.parametrize(
    ("size", "limit"),
    [(9000, r"a value <= (\d+)\. In a recipe data\.vocab_at_most=true"), (10, r"10 vs (\d+)\.?$")],
)
def test_a_wrong_size_names_the_limit(size, limit):
    sentence = rf"^a vocabulary of size {size} cannot be learned: Vocabulary size .*{limit}"
    with pytest.raises(DataError, match=sentence) as caught:
        Vocabulary.train(SENTENCES, size)
    fits = int(re.search(sentence, str(caught.value))[1])
    assert len(Vocabulary.train(SENTENCES, max(size, fits), at_most=True)) == fits


def test_a_target_with_its_own_pieces(vocabulary, tmp_path):
    target = Vocabulary.train(SENTENCES[1:2] * 9, 60, at_most=True)
    both = vocabulary.with_target(target)
    source_text, target_text = SENTENCES[:2]
    pair = vocabulary.encode(source_text), target.encode(target_text)
    assert both.encode_pairs([(source_text, target_text)]) == [pair]
    assert both.decode(pair[1]) == target_text
    assert (both.target, vocabulary.target) == (target, vocabulary)
    for one in (vocabulary, both):
        copy = Vocabulary.from_bytes(one.to_bytes())
        assert (copy, copy.target) == (one, one.target)
        assert copy.encode(SENTENCES[1]) == one.encode(SENTENCES[1])
    assert both not in (vocabulary, target.with_target(vocabulary))
    both.save(tmp_path / "vocabulary.model")
    assert Vocabulary.load(tmp_path / "source.model") == vocabulary
    assert Vocabulary.load(tmp_path / "target.model") == target


def test_what_is_no_whole_vocabulary(vocabulary, tmp_path):
    """A cut between two fields, which end in the first part, leaves what parses as a model."""
    model, path = vocabulary.to_bytes(), tmp_path / "bpe.model"
    cuts = (*range(30, 2000), *random.Random(1).sample(range(2000, len(model) - 1), 50))
    others = b"", b"hello, this is text\n" * 9, b"\0" * 99, b"\xff" * 99
    for content in (*(model[:cut] for cut in cuts), *others):
        with pytest.raises(DataError, match="vocabulary: "):
            Vocabulary.from_bytes(content)
    path.write_bytes(model[:-9])
    with pytest.raises(DataError, match=r"bpe\.model: expected a whole sentencepiece model"):
        Vocabulary.load(path)
    foreign = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=foreign, vocab_size=60, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    with pytest.raises(DataError, match="must have the ids 0, 1, 2, 3, got"):
        Vocabulary.from_bytes(foreign.getvalue())


def test_nothing_to_learn_from_or_with(monkeypatch):
    for nothing in ([], ["", "  "]):
        with pytest.raises(DataError, match="size 100 cannot be learned: the sentences have no te"):
            Vocabulary.train(nothing, 100)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MissingPackage, match=r"pip install 'deepfast\[train\]'"):
        Vocabulary.train(SENTENCES, 100)


def test_tags_are_one_token_in_front():
    tagged = Vocabulary.train(SENTENCES, 100, tags=["<de>", "<fr>"])
    assert tagged.tags == {"<de>": 4, "<fr>": 5}
    plain = tagged.encode("the dog")
    assert tagged.encode("<de> the dog") == tagged.encode("  <de>  the dog") == [4, *plain]
    assert tagged.pieces("<de> the dog") == ["<de>", *tagged.pieces("the dog")]
    assert tagged.encode("<fr>") == [5]
    # A tag that the vocabulary does not have is text.
    assert tagged.encode("<es> the dog")[0] not in (4, 5)
    for line, expected in (
        ("<de> a  b", ("<de>", "a  b")),
        ("<de>\t\u00a0a", ("<de>", "a")),
        ("<de>", ("<de>", "")),
        ("a <de> b", (None, "a <de> b")),
        ("<b c> d", (None, "<b c> d")),
    ):
        assert split_tag(line) == expected


def test_whole_words():
    text = ["the old house 1984 .", "the old tree <unk:+2> .", "the tree"]
    vocabulary = Vocabulary.train(text, 10, whole_words=True, tags=["<de>"])
    assert vocabulary.whole_words
    assert not Vocabulary.train(text, 30).whole_words
    # By frequency; each unknown word is one unk, also behind another one.
    assert vocabulary.pieces("the  old zzz yyy tree") == ["▁the", "▁old", "▁zzz", "▁yyy", "▁tree"]
    ids = vocabulary.encode("<de> the old zzz yyy tree")
    assert ids[0] == vocabulary.tags["<de>"]
    assert [i == vocabulary.unk_id for i in ids[1:]] == [False, False, True, True, False]
    assert vocabulary.decode(vocabulary.encode("tree the old")) == "tree the old"
    assert vocabulary.decode(vocabulary.encode("the zzz old"), unknown="x") == "the x old"
