"""Several models that translate together, of one kind and of two."""

import pytest
import torch

from deepfast.cli import main
from deepfast.mt.data import Vocabulary
from deepfast.mt.search import DecodingOptions, Ensemble, translate_lines, translate_nbest
from tests.mt.search.conftest import FAST, lively, recurrent

LINES = ["the old bridge", "", "we walk home"]


@pytest.fixture
def models(model, vocabulary):
    size = len(vocabulary)
    return [model, lively(size, seed=5).eval(), recurrent(size)]


@torch.no_grad()
def test_probabilities_are_averaged_and_hypotheses_move_in_every_model(models):
    source, index = torch.tensor([[5, 6, 7, 3], [8, 3, 0, 0]]), torch.tensor([1, 0, 1])
    ensemble = Ensemble(models)
    together, alone = ensemble.start(source), [model.start(source) for model in models]
    for tokens in torch.tensor([[2, 2], [6, 9]]):
        steps = zip(models, alone, strict=True)
        expected = torch.stack([m.step(tokens, state).softmax(-1) for m, state in steps])
        mean = expected.mean(0)
        torch.testing.assert_close(ensemble.step(tokens, together).exp(), mean)
        assert not torch.allclose(mean, expected[0], atol=1e-3)
    together.reorder(index)
    other = ensemble.start(source[index])
    for tokens in torch.tensor([[2, 2], [6, 9]]):
        ensemble.step(tokens[index], other)
    last = torch.tensor([4, 5, 6])
    torch.testing.assert_close(ensemble.step(last, together), ensemble.step(last, other))


def test_translate_with_several_checkpoints(models, vocabulary, write, text, capsys):
    """The first one says how to decode."""
    first = write(models[0], recipe={"decode": {"length_penalty": 2.0}})
    paths = [first, *map(write, models[1:])]
    assert main(["mt", "translate", *paths, "--input", text(LINES), *FAST]) == 0
    options = DecodingOptions(beam=2, max_length=6, length_penalty=2.0)
    said = capsys.readouterr()
    assert said.out.splitlines() == translate_lines(Ensemble(models), vocabulary, LINES, options)
    assert "decoding: beam 2, length penalty 2 (gnmt)\n" in said.err


def test_models_of_two_vocabularies_cannot_vote(models, write, text, capsys):
    other = Vocabulary.train(["other words of another text"] * 3, 30).to_bytes()
    paths = write(models[0]), write(models[1], vocabulary=other)
    assert main(["mt", "translate", *paths, "--input", text(LINES), *FAST]) == 1
    said = capsys.readouterr().err
    assert f"{paths[1]}: expected the vocabulary of {paths[0]}, got another one" in said
    assert said.count("\n") == 1


def test_lines_of_several_languages():
    """Each model chooses layers for a batch, and each numbers the languages in its own way."""
    letters = ["a b c d e f g h"] * 9
    vocabulary = Vocabulary.train(letters, 14, tags=["<de>", "<fr>"], whole_words=True)
    tags = {tag: vocabulary.encode(f"<{tag}>")[0] for tag in ("de", "fr")}
    latent = {"encoder_connection": "latent", "decoder_connection": "latent"}
    kinds = latent | {"languages": tags}, latent | {"languages": dict(reversed(tags.items()))}, {}
    models = [lively(len(vocabulary), seed, **options) for seed, options in enumerate(kinds)]
    ensemble = Ensemble(models).eval()
    lines = ["<de> a b c", "<fr> a b c", "<de> d e", "", "<fr> f g h"]
    options = DecodingOptions(nbest=3, max_length=6)
    alone = [translate_nbest(ensemble, vocabulary, [line], options)[0] for line in lines]
    for one, other in zip(
        alone, translate_nbest(ensemble, vocabulary, lines, options), strict=True
    ):
        assert [found.text for found in one] == [found.text for found in other]
        scores = [found.score for found in other]
        assert [found.score for found in one] == pytest.approx(scores, abs=1e-4)
    assert alone[0] != alone[1]
