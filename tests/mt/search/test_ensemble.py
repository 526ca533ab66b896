"""Several models that translate together, of one kind and of two."""

import pytest
import torch

from deepfast.cli import main
from deepfast.mt.data import Vocabulary
from deepfast.mt.search import DecodingOptions, Ensemble, translate_lines, translate_nbest
from tests.mt.search.conftest import lively

LINES = ["the old bridge", "", "we walk home"]
FAST = ["--beam", "2", "--max-length", "6", "--device", "cpu"]


@pytest.fixture
def models(model, vocabulary, lstm):
    return [model, lively(len(vocabulary), seed=5).eval(), lstm]


def steps(model, source, tokens):
    state = model.start(source)
    return [model.step(t, state) for t in tokens]


def test_probabilities_are_averaged(models):
    source = torch.tensor([[5, 6, 7, 3], [8, 3, 0, 0]])
    tokens = torch.tensor([[2, 2], [6, 9], [7, 4]])
    together = steps(Ensemble(models), source, tokens)
    alone = [steps(model, source, tokens) for model in models]
    for t, log_probs in enumerate(together):
        mean = torch.stack([logits[t].softmax(-1) for logits in alone]).mean(0)
        torch.testing.assert_close(log_probs.exp(), mean)
        assert not torch.allclose(mean, alone[0][t].softmax(-1), atol=1e-3)


def test_hypotheses_move_in_every_model(models):
    source, index = torch.tensor([[5, 6, 7, 3], [8, 3, 0, 0]]), torch.tensor([1, 0, 1])
    ensemble = Ensemble(models)
    state, other = ensemble.start(source), ensemble.start(source[index])
    ensemble.step(torch.tensor([2, 2]), state)
    ensemble.step(torch.tensor([2, 2, 2]), other)
    state.reorder(index)
    torch.testing.assert_close(
        ensemble.step(torch.tensor([4, 5, 6]), state), ensemble.step(torch.tensor([4, 5, 6]), other)
    )


def test_translate_with_several_checkpoints(models, vocabulary, write, tmp_path, capsys):
    source = tmp_path / "source"
    source.write_text("".join(f"{line}\n" for line in LINES))
    paths = [write(model) for model in models]
    assert main(["mt", "translate", *paths, "--input", str(source), *FAST]) == 0
    expected = translate_lines(
        Ensemble(models), vocabulary, LINES, DecodingOptions(beam=2, max_length=6)
    )
    assert capsys.readouterr().out == "".join(f"{line}\n" for line in expected)


def test_models_that_cannot_vote(models, write, tmp_path, capsys):
    other = Vocabulary.train(["other words of another text"] * 3, 30).to_bytes()
    first, source = write(models[0]), tmp_path / "source"
    source.write_text("a small house\n")
    for path, sentence in (
        (write(models[1], vocabulary=other), f"expected the vocabulary of {first}, got another"),
        (write(models[1], recipe={"data": {"lowercase": True}}), "expected the data.lowercase of"),
    ):
        assert main(["mt", "translate", first, path, "--input", str(source), *FAST]) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert path in said
        assert sentence in said


def test_lines_of_several_languages():
    """Each model chooses layers for a batch, and each numbers the languages in its own way."""
    letters = ["a b c d e f g h"] * 9
    vocabulary = Vocabulary.train(letters, 14, tags=["<de>", "<fr>"], whole_words=True)
    tags = {tag: vocabulary.encode(f"<{tag}>")[0] for tag in ("de", "fr")}
    latent = {"encoder_connection": "latent", "decoder_connection": "latent"}
    models = [
        lively(len(vocabulary), seed, **options)
        for seed, options in enumerate(
            [latent | {"languages": tags}, latent | {"languages": dict(reversed(tags.items()))}, {}]
        )
    ]
    ensemble = Ensemble(models).eval()
    lines = ["<de> a b c", "<fr> a b c", "<de> d e", "", "<fr> f g h"]
    options = {"nbest": 3, "max_length": 6}
    alone = [
        translate_nbest(ensemble, vocabulary, [line], DecodingOptions(**options))[0]
        for line in lines
    ]
    together = translate_nbest(ensemble, vocabulary, lines, DecodingOptions(**options))
    for one, other in zip(alone, together, strict=True):
        assert [found.text for found in one] == [found.text for found in other]
        scores = [found.score for found in other]
        assert [found.score for found in one] == pytest.approx(scores, abs=1e-4)
    assert alone[0] != alone[1]
