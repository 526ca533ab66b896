"""Unknown words that become the source words they are aligned with, and marks of PosUnk."""

import torch

from deepfast.mt.data import Vocabulary
from deepfast.mt.ids import EOS, UNK
from deepfast.mt.search import DecodingOptions, Ensemble, translate_lines
from deepfast.mt.search.unknown import aligned_words
from tests.mt.search.conftest import Table, grown, recurrent

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


def test_a_dictionary_replaces_the_marks_of_a_translation(tmp_path):
    vocabulary = Vocabulary.train(["a b <unk:+0> c <unk:-1> <unk:+1>"] * 3, 10, whole_words=True)
    path = tmp_path / "dictionary"
    path.write_text("y\tz\n")
    for said, replaced, marked in (
        ("<unk:+0> c <unk:-1>", "x c z", "x c z"),
        # Two unks that look at one word are one copy, but the mark counts both.
        ("rare rare c <unk:+1>", "x c v", "⁇ ⁇ c v"),
    ):
        model = Looks([0] * 4, vocabulary.encode(said), len(vocabulary))
        for replace, expected in ((True, replaced), (False, marked)):
            options = DecodingOptions(beam=1, dictionary=str(path), replace_unknown=replace)
            assert translate_lines(model, vocabulary, ["x w v y"], options) == [expected]


def test_behind_a_language_tag_the_same_word():
    vocabulary = Vocabulary.train(["the old bridge"] * 3, 40, tags=["<de>"], at_most=True)
    line = "<de>  the\x0bold bridge"
    for word in ("the", "bridge"):
        place = last_piece(vocabulary, line, word)
        assert aligned_words(Looks([place]), vocabulary, line, [[UNK]], {}) == [[word]]
    # Most attention may be on the tag, but it is no word. Alone it is one.
    assert aligned_words(Looks([0]), vocabulary, line, [[UNK]], {})[0][0] in line.split()[1:]
    assert aligned_words(Looks([0]), vocabulary, "<de>", [[UNK]], {}) == [["<de>"]]


def test_models_with_attention(model, vocabulary, monkeypatch):
    chosen = Ensemble([model, recurrent(len(vocabulary))])
    # Unk is by far the most likely token.
    step, unknown = chosen.step, 100 * torch.eye(len(vocabulary))[UNK]
    monkeypatch.setattr(chosen, "step", lambda *args: step(*args) + unknown)
    options = DecodingOptions(beam=2, max_length=3, replace_unknown=True)
    found = translate_lines(chosen, vocabulary, [LINE, "boats"], options)
    assert set(found[0].split()) <= set(LINE.split())
    assert found[1] == "boats"


def test_a_transformer_tells_its_cross_attention():
    """With one head, the alignment must be the weights of the values in the last layer."""
    model, seen = grown(20, num_heads=1), {}
    source = torch.tensor([[0, 5, 6, 3], [7, 8, 9, 3]])
    target = torch.tensor([[2, 5, 6], [2, 7, 0]])
    weights = model.alignment(source, target)
    assert weights[0, :, 0].eq(0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3))
    attention = model.decoder.layers[-1].cross_attention
    attention.out.register_forward_pre_hook(lambda _, args: seen.update(out=args[0]))
    attention.key_value.register_forward_hook(lambda _, args, kv: seen.update(kv=kv))
    model(source, target)
    # Without padding: 3 and 4 source tokens, 3 and 2 target tokens.
    values = seen["kv"].chunk(2, -1)[1].split((3, 4))
    mixed = seen["out"].split((3, 2))
    torch.testing.assert_close(weights[0, :, 1:] @ values[0], mixed[0])
    torch.testing.assert_close(weights[1, :2] @ values[1], mixed[1])
