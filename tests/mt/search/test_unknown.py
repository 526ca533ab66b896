"""Unknown words that become the source words they are aligned with."""

import pytest
import torch

from deepfast.mt.data import Vocabulary
from deepfast.mt.data.vocabulary import UNK
from deepfast.mt.search import DecodingOptions, Ensemble, translate_nbest
from deepfast.mt.search.unknown import check_aligns, replace_unknown
from tests.mt.search.conftest import Table, grown, lively, recurrent

LINE = "the old bridge of Ωxford"


class Looks(torch.nn.Module):
    """Attention by rule: position t of the target is on the source's token ``places[t]``."""

    def __init__(self, places):
        super().__init__()
        self.anything = torch.nn.Parameter(torch.zeros(1))
        self.places = places

    def alignment(self, source_BS, target_in_BT):
        weights = torch.zeros(*target_in_BT.shape, source_BS.shape[1])
        for t, place in enumerate(self.places):
            weights[:, t, place] = 1
        return weights


def places_of(vocabulary, *numbers):
    """For each number of a word the place of its last piece."""
    _, word_of = vocabulary.words(LINE)
    return [max(i for i, n in enumerate(word_of) if n == number) for number in numbers]


def test_copies_or_translates_what_is_looked_at(vocabulary):
    known = vocabulary.encode("home")
    places = places_of(vocabulary, 4, *[0] * len(known), 2)
    tokens = [UNK, *known, UNK]
    texts = replace_unknown(Looks(places), vocabulary, LINE, [tokens, known])
    assert texts == ["Ωxford home bridge", "home"]
    # Pieces of one unknown word are one copy.
    model = Looks(places_of(vocabulary, 4, 4, 1))
    for dictionary, text in (({}, "Ωxford old"), ({"old": "alt"}, "Ωxford alt")):
        assert replace_unknown(model, vocabulary, LINE, [[UNK] * 3], dictionary) == [text]


def test_a_dictionary_replaces_the_marks_of_a_translation(model, tmp_path):
    """A model that says ``<unk:+0> c <unk:-1>``."""
    vocabulary = Vocabulary.train(["a b <unk:+0> c <unk:-1>"] * 3, 9, whole_words=True)
    wanted = [*vocabulary.encode("<unk:+0> c <unk:-1>"), vocabulary.eos_id]
    rows = torch.eye(len(vocabulary)) * 50
    table = Table(lambda _, prefix: rows[wanted[len(prefix)]])
    table.config.vocab_size = len(vocabulary)
    table.anything = torch.nn.Parameter(torch.zeros(1))
    path = tmp_path / "dictionary"
    path.write_text("y\tz\n")
    options = DecodingOptions(beam=1, dictionary=str(path))
    (best,) = translate_nbest(table, vocabulary, ["x w v y"], options)
    assert best[0][1] == "x c z"


def test_the_end_of_the_source_is_no_word(vocabulary):
    model = Looks([len(vocabulary.encode(LINE))])
    assert replace_unknown(model, vocabulary, LINE, [[UNK]])[0] in LINE.split()


@pytest.mark.parametrize("word", ["the", "bridge"])
def test_behind_a_language_tag_the_same_word(word):
    vocabulary = Vocabulary.train(["the old bridge"] * 3, 40, tags=["<de>"], at_most=True)
    line = "<de> the old bridge"
    end = len(vocabulary.encode(line.partition(word)[0] + word))
    assert replace_unknown(Looks([end - 1]), vocabulary, line, [[UNK]]) == [word]
    # Most attention may be on the tag, but it is no word.
    assert replace_unknown(Looks([0]), vocabulary, line, [[UNK]])[0] in line.split()[1:]


@pytest.mark.parametrize("kind", ["transformer", "depth_growing", "fast_forward_lstm", "both"])
def test_every_model_with_attention(model, grown_model, lstm, vocabulary, kind):
    chosen = {
        "transformer": model, "depth_growing": grown_model,
        "fast_forward_lstm": lstm, "both": Ensemble([model, lstm]),
    }[kind]  # fmt: skip
    # Make unk by far the most likely token.
    step = chosen.step

    def unknown(tokens, state):
        logits = step(tokens, state)
        logits[:, UNK] += 100 if state is not None else 0
        return logits

    chosen.step = unknown
    try:
        options = {"beam": 2, "max_length": 3}
        plain = translate_nbest(chosen, vocabulary, [LINE, "boats"], DecodingOptions(**options))
        replaced = translate_nbest(
            chosen, vocabulary, [LINE, "boats"], DecodingOptions(replace_unknown=True, **options)
        )
    finally:
        del chosen.step
    assert all("⁇" in best[0][1] for best in plain)
    assert set(replaced[0][0][1].split()) <= set(LINE.split())
    assert replaced[1][0][1].split() == ["boats"]
    assert [b[0][0] for b in plain] == [b[0][0] for b in replaced]


@pytest.mark.parametrize("make", [lively, grown])
def test_a_transformer_tells_its_cross_attention(make):
    """With one head, the alignment must be the weights of the values in the last layer."""
    model = make(20, num_heads=1).eval()
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


def test_a_model_without_attention_is_refused(vocabulary, model, lstm):
    blind = recurrent(len(vocabulary), attention=False)
    for one in (blind, Ensemble([model, blind])):
        with pytest.raises(ValueError, match="with attention over the source, got Deep-ED"):
            translate_nbest(one, vocabulary, [LINE], DecodingOptions(replace_unknown=True))
    check_aligns(Ensemble([model, lstm]), vocabulary)
