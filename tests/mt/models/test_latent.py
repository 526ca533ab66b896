"""Latent depth in the whole model: languages, the loss, decoding, and pruning."""

from functools import partial

import pytest
import torch

from deepfast.mt.models import Transformer
from deepfast.mt.models.prune import prune
from deepfast.mt.search import beam_search
from tests.mt.models.kinds import make

# Tags are 4 to 6, at the front; the second sentence is padded.
SOURCE = torch.tensor([[4, 8, 7, 9, 3], [4, 10, 3, 0, 0]])
TARGET = torch.tensor([[2, 9, 5, 6], [2, 8, 0, 0]])
LABELS = torch.tensor([[9, 5, 6, 3], [8, 3, 0, 0]])
LANGUAGES = {"de": 4, "fr": 5, "es": 6}
LOGITS = {
    "encoder": [[1, -1, 2], [-1, 1, 1], [1, 1, -2]],
    "decoder": [[2, -1, 1, -3], [-1, 1, -1, -1], [1, -1, 1, -1]],
}
MIXED = {"encoder_connection": "residual", "decoder_connection": "dlcl"}


def build(languages=LANGUAGES, **changes):
    sizes = {"vocab_size": 13, "decoder_layers": 4, "languages": languages}
    model = make("latent", torch.float32, **sizes | changes)
    for side, rows in LOGITS.items():
        latent = getattr(model, side).latent
        if latent is not None:
            latent.logits.data.copy_(torch.tensor(rows)[: max(len(languages), 1)])
    return model


def tagged(tag):
    source = SOURCE.clone()
    source[:, 0] = tag
    return source


def test_the_tag_chooses_the_layers():
    model = build()
    called = []
    for side in ("encoder", "decoder"):
        for index, layer in enumerate(getattr(model, side).layers):
            layer.register_forward_hook(lambda *_, at=(side, index): called.append(at))
    for tag, encoder, decoder in ((4, [0, 2], [0, 2]), (5, [1, 2], [1]), (6, [0, 1], [0, 2])):
        above = [("decoder", i) for i in decoder]
        layers = [("encoder", i) for i in encoder] + above
        model(tagged(tag), TARGET)
        # Padding on the left does not hide the tag.
        model(torch.tensor([[0, 0, tag, 8, 3]]), TARGET[:1])
        state = model.start(tagged(tag))
        for position in range(2):
            model.step(TARGET[:, position], state)
        assert called == [*layers, *layers, *layers, *above]
        called.clear()


def test_sources_without_one_language_and_layers_without_a_number_are_refused():
    model, plain = build(), build(**MIXED)
    with torch.no_grad():
        # French uses no layer of the decoder; Spanish has a logit of the encoder that is none.
        model.decoder.latent.logits[1] = -1
        model.encoder.latent.logits[2, 2] = torch.nan
    mixed, untagged = torch.tensor([[4, 8, 3], [5, 8, 3]]), torch.tensor([[8, 9, 3]])
    for run, sentence in (
        (partial(model.start, mixed), "expected a batch of one lang"),
        (partial(model.alignment, tagged(5), TARGET), "alignment: expected a decoder layer that"),
        (partial(model.start, tagged(6)), "logits must be numbers, got nan for layer 2 of languag"),
        *((partial(beam_search, one, untagged),
           "begins with the tag of one of the languages de, fr, es") for one in (model, plain)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            run()
    # Without latent depth languages share a batch.
    assert [plain.group([tag, 8]) for tag in LANGUAGES.values()] == [0, 0, 0]
    plain(mixed, TARGET)


def test_the_penalty_is_part_of_the_loss_alone():
    """Gradients reach every layer, and the logits of the language."""
    terms = {"kl_weight": 0.5, "entropy_weight": 0.3, "target_layers": 2.0, "target_weight": 0.2}
    plain, model = build(latent={"hard": True}), build(latent=terms | {"prior": "mean"})
    model.load_state_dict(plain.state_dict())
    want = plain.loss(SOURCE, TARGET, LABELS, 0.1)
    got = model.loss(SOURCE, TARGET, LABELS, 0.1)
    tokens = (TARGET != 0).sum()
    penalty = model.encoder.latent.penalty() + model.decoder.latent.penalty()
    assert penalty > 0.1
    torch.testing.assert_close(got[0], want[0] + tokens * penalty)
    torch.testing.assert_close(got[1], want[1])
    plain.train().set_step(1)
    plain.loss(SOURCE, TARGET, LABELS)[0].backward()
    for stack in (plain.encoder, plain.decoder):
        grad = stack.latent.logits.grad
        assert grad[0].abs().min() > 0
        assert grad[1:].eq(0).all()
    assert all(p.grad is not None for p in plain.parameters())


def test_metrics_and_logits_that_learn_faster():
    model = build(latent={"lr_scale": 20.0})
    row = model.metrics()
    depth = torch.tensor(LOGITS["decoder"]).sigmoid().mean(0).sum()
    assert row["decoder_depth"] == pytest.approx(depth)
    assert row["encoder_kl"] > 0
    assert (row["decoder_layers_fr"], row["decoder_used_fr"]) == (1, [1])
    assert build({}).metrics()["decoder_used"] == [0, 2]
    groups = model.parameter_groups()
    assert [group.get("lr_scale", 1) for group in groups] == [1, 1, 20, 20]
    logits = [model.encoder.latent.logits, model.decoder.latent.logits]
    assert [p for group in groups[2:] for p in group["params"]] == logits
    named = [id(p) for group in groups for p in group["params"]]
    assert sorted(named) == sorted(id(p) for p in model.parameters())


def pruned(model, language=None):
    config, weights = prune(model, language)
    smaller = Transformer(config).eval()
    smaller.load_state_dict(weights)
    return smaller


@pytest.mark.parametrize(
    ("language", "changes", "layers"),
    [
        ("de", {}, (2, 2)),
        ("fr", {"norm_type": "none"}, (2, 1)),
        # The target is at most the layers that are left.
        (None, {"latent": {"target_layers": 3.5, "target_weight": 0.1},
                "encoder_connection": "residual"}, (3, 3)),
        (None, {}, (3, 3)),
        ("fr", {"encoder_connection": "residual", "encoder_fusion": "average"}, (3, 1)),
        (None, {"languages": {}, "decoder_connection": "dlcl"}, (2, 4)),
        # Nothing can be left out.
        (None, {"norm": "post"}, (3, 4)),
        (None, {"latent": {"evaluation": "mean"}}, (3, 4)),
        (None, {"encoder_connection": "dlcl", "decoder_connection": "residual"}, (3, 4)),
    ],
)  # fmt: skip
@torch.no_grad()
def test_a_pruned_model_is_the_model_without_its_unused_layers(language, changes, layers):
    """Bit for bit, and it knows no other language."""
    model = build(**changes)
    smaller = pruned(model, language)
    c = smaller.config
    assert (c.encoder_layers, c.decoder_layers) == layers
    assert c.latent.get("target_layers", 0) <= c.decoder_layers
    for tag in LANGUAGES.values() if language is None else [LANGUAGES[language]]:
        assert torch.equal(smaller(tagged(tag), TARGET), model(tagged(tag), TARGET))
    if language is None:
        return
    assert c.encoder_connection == c.decoder_connection == "residual"
    assert (c.latent, c.languages) == ({}, {language: LANGUAGES[language]})
    assert smaller.group([LANGUAGES[language], 8]) == 0
    for other in {4, 5, 6, 8} - {LANGUAGES[language]}:
        uses = partial(smaller.group, [other, 8]), partial(smaller, tagged(other), TARGET)
        for use in (*uses, partial(beam_search, smaller, tagged(other))):
            with pytest.raises(ValueError, match=f"of one of the languages {language}, got none"):
                use()


def test_what_cannot_be_pruned():
    idle, nothing = build(), "expected a pre-norm model with latent depth and latent.evaluation thr"
    with torch.no_grad():
        idle.decoder.latent.logits[1] = -1
    for model, language, sentence in (
        (build(**MIXED), "fr", nothing),
        (build(norm="post"), "de", nothing),
        (build(latent={"evaluation": "mean"}), "de", nothing),
        (build(), "it", r"a language of the model \(de, fr, es\), got 'it'"),
        (idle, "fr", "decoder_layers: expected an integer of at least 1 and at most .*, got 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            pruned(model, language)
