"""The vocabulary: fixed ids, the same bytes each time, whole files only."""

import itertools
import pickle
import random
import sys

import pytest
import torch

from deepfast.files import DataError, MissingPackage
from deepfast.mt.data import Vocabulary, split_tag, tag_of

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "der schnelle braune Fuchs springt über den faulen Hund",
    "one hundred and twenty-one euros, 3.50 €",
    "einhunderteinundzwanzig Euro, 3,50 €",
] * 5


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train(SENTENCES, 100)


def test_ids_are_fixed(vocabulary):
    assert len(vocabulary) == 100
    ids = vocabulary.pad_id, vocabulary.unk_id, vocabulary.bos_id, vocabulary.eos_id
    assert ids == (0, 1, 2, 3)
    assert min(min(vocabulary.encode(sentence)) for sentence in SENTENCES) >= 4


def test_round_trip(vocabulary):
    for sentence in SENTENCES:
        assert vocabulary.decode(vocabulary.encode(sentence)) == sentence
    assert vocabulary.decode(vocabulary.encode("  the \t dog ")) == "the dog"
    assert vocabulary.encode("") == []
    assert vocabulary.decode([]) == ""


def test_decode_drops_specials_and_shows_unknown(vocabulary):
    ids = vocabulary.encode("the dog")
    assert vocabulary.decode([2, *ids, 3, 0, 0]) == "the dog"
    assert vocabulary.decode(torch.tensor([2, *ids, 3, 0])) == "the dog"
    assert vocabulary.decode([*ids, 1]) == "the dog ⁇"


def test_decode_replaces_each_unknown(vocabulary):
    ids = [1, *vocabulary.encode("dog"), 1]
    assert vocabulary.decode(ids, unknown=["a▁b", ""]) == "a▁b dog"
    for bad in (-1, 100):
        with pytest.raises(DataError, match=f"from 0 to 99, got {bad}"):
            vocabulary.decode([5, bad])
    for words in ([], ["a"], ["a", "b", "c"]):
        with pytest.raises(DataError, match=f"words for 2 unks, got {len(words)}"):
            vocabulary.decode(ids, unknown=words)


def test_text_that_looks_like_a_special_is_text(vocabulary):
    for special in ("<s>", "</s>", "<pad>"):
        assert not {0, 2, 3} & set(vocabulary.encode(f"the {special} dog"))
    assert vocabulary.encode("dog 漢").count(1) == 1


def test_training_is_deterministic_and_silent(vocabulary, capfd):
    again = Vocabulary.train(iter(SENTENCES), 100)
    assert again.to_bytes() == vocabulary.to_bytes()
    assert again == vocabulary
    assert again.fingerprint() == vocabulary.fingerprint()
    assert Vocabulary.train(SENTENCES, 90) != vocabulary
    assert capfd.readouterr() == ("", "")


def test_every_digit_is_a_piece_unless_told(vocabulary):
    figures = ["in 1996 and 1996"] * 20
    split, whole = (
        Vocabulary.train(figures, 60, at_most=True, split_digits=flag) for flag in (True, False)
    )
    assert [p for p in split.pieces("1996") if p != "▁"] == ["1", "9", "9", "6"]
    assert whole.pieces("1996") == ["▁1996"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("<de> the dog", ["<de>", "the", "dog"]),
        ("  <fr>  dog", ["<fr>", "dog"]),
        ("<it> dog", ["<it>", "dog"]),
        ("<de>", ["<de>"]),
    ],
)
def test_pieces_and_words_go_with_the_ids_of_a_tagged_line(line, words):
    vocabulary = Vocabulary.train(["the dog", "a <it> cat"] * 9, 40, tags=["<de>", "<fr>"],
                                  at_most=True)  # fmt: skip
    ids, pieces = vocabulary.encode(line), vocabulary.pieces(line)
    assert (ids[0] in vocabulary.tags.values()) == (pieces[0] in vocabulary.tags)
    found, word_of = vocabulary.words(line)
    assert found == words
    assert len(ids) == len(pieces) == len(word_of)


def test_too_large_names_the_most(vocabulary):
    with pytest.raises(DataError, match=r"size 9000 is more .* expected at most") as caught:
        Vocabulary.train(SENTENCES, 9000)
    most = int(str(caught.value).rsplit(" ", 1)[1])
    assert len(Vocabulary.train(SENTENCES, most)) == most
    assert len(Vocabulary.train(SENTENCES, 9000, at_most=True)) == most


def test_too_small_names_the_least():
    with pytest.raises(DataError, match=r"size 10 is less .* expected at least") as caught:
        Vocabulary.train(SENTENCES, 10)
    least = int(str(caught.value).rsplit(" ", 1)[1])
    assert len(Vocabulary.train(SENTENCES, least)) == least
    with pytest.raises(DataError, match="more than 4, got 4"):
        Vocabulary.train(SENTENCES, 4)
    for nothing, at_most in itertools.product(([], ["", "  "]), (False, True)):
        with pytest.raises(DataError, match="at least one sentence"):
            Vocabulary.train(nothing, 100, at_most=at_most)


def test_long_sentences_and_line_ends_take_part():
    long = "ab " * 3000 + "ß\nq"
    assert 1 not in Vocabulary.train(["ab ab", long], 12, at_most=True).encode("ß q")


def test_copies_are_equal(vocabulary, tmp_path):
    trained = Vocabulary.train(SENTENCES, 100, path=tmp_path / "bpe.model")
    assert [p.name for p in tmp_path.iterdir()] == ["bpe.model"]
    for copy in (
        trained,
        Vocabulary.load(tmp_path / "bpe.model"),
        Vocabulary.from_bytes(vocabulary.to_bytes()),
        pickle.loads(pickle.dumps(vocabulary)),
    ):
        assert copy == vocabulary
        assert copy.encode(SENTENCES[1]) == vocabulary.encode(SENTENCES[1])


def test_truncated_file(vocabulary, tmp_path):
    """A cut between two fields, which end in the first part, leaves what parses as a model."""
    model, path = vocabulary.to_bytes(), tmp_path / "bpe.model"
    for cut in (*range(30, 2000), *random.Random(1).sample(range(2000, len(model) - 1), 50)):
        with pytest.raises(DataError, match="vocabulary: "):
            Vocabulary.from_bytes(model[:cut])
    path.write_bytes(model[:-9])
    with pytest.raises(DataError, match=r"bpe\.model: expected a whole sentencepiece model"):
        Vocabulary.load(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        *((data, r"bpe\.model: ") for data in (
            b"", b"hello, this is text\n" * 9, b"\0" * 99, b"\xff" * 99)),
        (None, "no such vocabulary file"),
        (..., "cannot be read"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_vocabulary(content, sentence, tmp_path):
    path = tmp_path / "bpe.model"
    if content is ...:
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
        with pytest.raises(DataError, match="vocabulary"):
            Vocabulary.from_bytes(content)
    with pytest.raises(DataError, match=sentence):
        Vocabulary.load(path)


def test_foreign_ids_are_refused(tmp_path):
    import io

    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, vocab_size=60, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    with pytest.raises(DataError, match="must have the ids 0, 1, 2, 3, got"):
        Vocabulary.from_bytes(model.getvalue())


def test_without_sentencepiece_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MissingPackage, match=r"pip install 'deepfast\[train\]'") as caught:
        Vocabulary.train(SENTENCES, 100)
    assert isinstance(caught.value, DataError)
    assert isinstance(caught.value, ImportError)


def test_tags_are_one_token_in_front():
    tagged = Vocabulary.train(SENTENCES, 100, tags=["<de>", "<fr>"])
    assert tagged.tags == {"<de>": 4, "<fr>": 5}
    plain = tagged.encode("the dog")
    assert tagged.encode("<de> the dog") == tagged.encode("  <de>  the dog") == [4, *plain]
    assert tagged.encode("<fr>") == [5]
    assert tagged.decode([5, *plain]) == "<fr> the dog"
    # A tag that the vocabulary does not have is text.
    assert tagged.encode("<es> the dog")[0] not in (4, 5)
    assert Vocabulary.from_bytes(tagged.to_bytes()).tags == tagged.tags


def test_split_tag():
    assert split_tag("<de> a  b") == ("<de>", "a  b")
    assert split_tag("<de>") == ("<de>", "")
    assert split_tag("a <de> b") == (None, "a <de> b")
    assert split_tag("<b c> d") == (None, "<b c> d")
    assert tag_of("de") == "<de>"


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
    assert vocabulary.words("the zzz yyy") == (["the", "zzz", "yyy"], [0, 1, 2])
    assert vocabulary.decode(vocabulary.encode("tree the old")) == "tree the old"
    assert vocabulary.decode(vocabulary.encode("the zzz old"), unknown=["x"]) == "the x old"
    assert Vocabulary.from_bytes(vocabulary.to_bytes()).encode("the zzz") == ids[1:2] + ids[3:4]
