"""Unknown words that become the source words they are aligned with, and marks of PosUnk."""

import pytest
import torch

from deepfast.mt.data import Vocabulary
from deepfast.mt.ids import EOS, UNK
from deepfast.mt.search import DecodingOptions, Ensemble, translate_lines, translate_nbest
from deepfast.mt.search.unknown import aligned_words, check_aligns
from tests.mt.search.conftest import Table, grown, lively, recurrent

LINE = "the old bridge of Ωxford"


class Looks(Table):
    """Says ``tokens``. Position t of the target looks at the source's token ``places[t]``."""

    def __init__(self, places, tokens=(), size=9):
        rows = torch.eye(size) * 50
        super().__init__(lambda _, prefix: rows[(*tokens, EOS)[len(prefix)]])
        self.config.vocab_size = size
        self.anything = torch.nn.Parameter(torch.zeros(1))
        self.places = places

    def alignment(self, source_BS, target_in_BT):
        weights = torch.zeros(*target_in_BT.shape, source_BS.shape[1])
        for t, place in enumerate(self.places):
            weights[:, t, place] = 1
        return weights


def last_piece(vocabulary, line, word):
    """The place of the last piece of a word."""
    return len(vocabulary.encode(line.partition(word)[0] + word)) - 1


def test_copies_or_translates_what_is_looked_at(vocabulary):
    oxford, old, bridge = (
        last_piece(vocabulary, LINE, word) for word in ("Ωxford", "old", "bridge")
    )
    known = vocabulary.encode("home")
    tokens = [UNK, *known, UNK]
    model = Looks([oxford, *[0] * len(known), bridge], tokens, len(vocabulary))
    found = aligned_words(model, vocabulary, LINE, [tokens, known], {})
    assert found == [["Ωxford", "bridge"], []]
    options = DecodingOptions(beam=1, replace_unknown=True)
    assert translate_lines(model, vocabulary, [LINE], options) == ["Ωxford home bridge"]
    # Pieces of one unknown word are one copy.
    model = Looks([oxford, oxford, old])
    for dictionary, words in (({}, ["Ωxford", "", "old"]), ({"old": "alt"}, ["Ωxford", "", "alt"])):
        assert aligned_words(model, vocabulary, LINE, [[UNK] * 3], dictionary) == [words]
    # The end of the source is no word.
    model = Looks([len(vocabulary.encode(LINE))])
    assert aligned_words(model, vocabulary, LINE, [[UNK]], {})[0][0] in LINE.split()


@pytest.mark.parametrize("replace_unknown", [False, True])
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("<unk:+0> c <unk:-1>", "x c z"),
        # Two unks that look at one word are one copy, but the mark counts both.
        ("rare rare c <unk:+1>", "x c v"),
    ],
)
def test_a_dictionary_replaces_the_marks_of_a_translation(
    tmp_path, said, expected, replace_unknown
):
    vocabulary = Vocabulary.train(["a b <unk:+0> c <unk:-1> <unk:+1>"] * 3, 10, whole_words=True)
    model = Looks([0] * 4, vocabulary.encode(said), len(vocabulary))
    path = tmp_path / "dictionary"
    path.write_text("y\tz\n")
    options = DecodingOptions(beam=1, dictionary=str(path), replace_unknown=replace_unknown)
    (text,) = translate_lines(model, vocabulary, ["x w v y"], options)
    assert text == (expected if replace_unknown or "rare" not in said else "⁇ ⁇ c v")


def test_behind_a_language_tag_the_same_word():
    vocabulary = Vocabulary.train(["the old bridge"] * 3, 40, tags=["<de>"], at_most=True)
    line = "<de>  the\x0bold bridge"
    for word in ("the", "bridge"):
        place = last_piece(vocabulary, line, word)
        assert aligned_words(Looks([place]), vocabulary, line, [[UNK]], {}) == [[word]]
    # Most attention may be on the tag, but it is no word.
    assert aligned_words(Looks([0]), vocabulary, line, [[UNK]], {})[0][0] in line.split()[1:]


@pytest.mark.parametrize("kind", ["transformer", "depth_growing", "fast_forward_lstm", "both"])
def test_every_model_with_attention(model, grown_model, vocabulary, monkeypatch, kind):
    lstm = recurrent(len(vocabulary))
    models = model, grown_model, lstm, Ensemble([model, lstm])
    names = "transformer", "depth_growing", "fast_forward_lstm", "both"
    chosen = models[names.index(kind)]
    step = chosen.step

    def unknown(tokens, state):
        """Unk is by far the most likely token."""
        logits = step(tokens, state)
        logits[:, UNK] += 100
        return logits

    monkeypatch.setattr(chosen, "step", unknown)
    given = {"beam": 2, "max_length": 3}
    plain, replaced = (
        translate_nbest(chosen, vocabulary, [LINE, "boats"], DecodingOptions(**given | more))
        for more in ({}, {"replace_unknown": True})
    )
    assert all("⁇" in best[0].text for best in plain)
    assert set(replaced[0][0].text.split()) <= set(LINE.split())
    assert replaced[1][0].text.split() == ["boats"]
    assert [b[0].score for b in plain] == [b[0].score for b in replaced]


@pytest.mark.parametrize("make", [lively, grown])
def test_a_transformer_tells_its_cross_attention(make):
    """With one head, the alignment must be the weights of the values in the last layer."""
    model = make(20, num_heads=1)
    source = torch.tensor([[0, 5, 6, 3], [7, 8, 9, 3]])
    target = torch.tensor([[2, 5, 6], [2, 7, 0]])
    weights = model.alignment(source, target)
    assert weights[0, :, 0].eq(0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3))
    attention, seen = model.decoder.layers[-1].cross_attention, {}
    with (
        attention.out.register_forward_pre_hook(lambda _, args: seen.update(out=args[0])),
        attention.key_value.register_forward_hook(lambda _, args, kv: seen.update(kv=kv)),
    ):
        model(source, target)
    # Without padding: 3 and 4 source tokens, 3 and 2 target tokens.
    values = seen["kv"].chunk(2, -1)[1].split((3, 4))
    mixed = seen["out"].split((3, 2))
    torch.testing.assert_close(weights[0, :, 1:] @ values[0], mixed[0])
    torch.testing.assert_close(weights[1, :2] @ values[1], mixed[1])


def test_a_model_without_attention_is_refused(vocabulary, model):
    blind = recurrent(len(vocabulary), attention=False)
    for one in (blind, Ensemble([model, blind])):
        with pytest.raises(ValueError, match="with attention over the source, got Deep-ED"):
            translate_nbest(one, vocabulary, [LINE], DecodingOptions(replace_unknown=True))
    check_aligns(Ensemble([model, recurrent(len(vocabulary))]))
