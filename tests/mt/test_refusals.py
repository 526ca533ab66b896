"""What the functions and classes of the toolkit refuse, each with one sentence."""

import re
from functools import partial

import pytest
import torch

from deepfast.mt import search
from deepfast.mt.data import TokenBatches, Vocabulary
from deepfast.mt.models import DepthGrowingConfig, FastForwardLSTMConfig, TransformerConfig
from deepfast.mt.search import DecodingOptions, Ensemble, bleu
from tests.mt.models.kinds import RECURRENT, SIZES, both, make

WHOLE = "expected an integer of at least 1"
TRANSFORMER = [
    ({"decoder_layers": 2.5}, f"decoder_layers: {WHOLE} and at most 65536, got 2.5"),
    ({"dim": 18, "num_heads": 4}, "dim: expected an even multiple of num_heads 4, got 18"),
    ({"decoder_norm": "mid"}, "decoder_norm: expected one of pre, post, deepnorm or null"),
    ({"decoder_norm": "deepnorm", "decoder_connection": "dlcl"},
     "decoder_connection: expected residual with norm deepnorm, got 'dlcl'"),
    ({"norm_type": "none"}, "norm_type='none' needs norm='pre' and the connection residual"),
    ({"norm": "post", "encoder_connection": "attnres"},
     "encoder_connection: expected another one with norm post, as it needs norm pre"),
    ({"attnres_reads": 3}, f"attnres_reads: {WHOLE} and at most 2 or"),
    ({"attnres_block": 2}, "attnres_block: expected null without a side with 'block_attnres'"),
    ({"target_vocab_size": 12}, "target_vocab_size: expected the source's 11 where share_emb"),
    (both("residual", dlcl={"window": 2}), "dlcl: expected no options without a side wit"),
    ({"fusion": {"hops": 3}}, "fusion: expected no options without a side with a fusion, got"),
    ({"encoder_fusion": "average", "cross_attention": "transparent"},
     "encoder_fusion: expected null where cross_attention is transparent"),
    ({"encoder_fusion": "average", "decoder_fusion": "feed_forward",
      "fusion": {"hidden_dim": 6, "activation": "relu"}},
     "fusion: expected options that average or feed_forward reads (hidden_dim), got"),
    (both("latent", latent={"target_layers": 3, "target_weight": 1}), "at most the 2 layers"),
    (both("latent", cross_attention="transparent"), "encoder_connection: expected another than"),
]  # fmt: skip
GROWING = [
    ({"top_dlcl": {"window": 2}}, "top_dlcl: expected no options without a side with connecti"),
    ({"cross_attention": "transparent"}, "cross_attention: expected top in a model that grows"),
    ({"top_decoder_connection": "latent"}, "top_decoder_connection: expected another connecti"),
]
LSTM = [
    ({"dim": 7}, "multiple of 2, got 7"),
]
OPTIONS = [
    ({"nbest": 5}, "nbest: expected at most beam 4, got 5"),
    ({"deep_shallow": True, "alpha": 1.1}, "alpha: expected a number of at least 0 and at most 1,"),
    ({"gamma": 1.0}, "gamma: expected deep_shallow beside it, got 1.0"),
    ({"replace_unknown": True, "no_unknown": True}, "expected false with no_unknown or deep_shal"),
]
MADE = (
    (partial(TransformerConfig, **SIZES), TRANSFORMER),
    (partial(DepthGrowingConfig, **SIZES), GROWING),
    (partial(FastForwardLSTMConfig, **RECURRENT), LSTM),
    (DecodingOptions, OPTIONS),
)
PAIRS = [([5] * 3, [6] * 4)] * 9
small = partial(make, "dlcl", torch.float32, vocab_size=9)
CALLS = [
    *((partial(make_one, **changes), said) for make_one, rows in MADE for changes, said in rows),
    (partial(TokenBatches, [], max_tokens=9), "at least one pair of at most 9 tokens, got 0"),
    (partial(TokenBatches, PAIRS, max_tokens=9, max_length=3), "of at most 3 tokens, got 9 long"),
    (partial(bleu, ["a", "b"], ["a"]), "got 2 translations and 1 references"),
    (partial(bleu, [], []), "at least one translation, got none"),
    (partial(bleu, ["a"], [["a"]]), "references must be a list of sentences, got [['a']]"),
    (partial(bleu, [None], ["a"]), "hypotheses must be a list of sentences, got [None]"),
    (partial(Ensemble, []), "target_vocab_size, got none"),
    (lambda: Ensemble([small(vocab_size=60), small()]), "got [(9, 9), (60, 60)]"),
    (lambda: Ensemble([small(target_vocab_size=10, share_embeddings="decoder"), small()]),
     "vocab_size and target_vocab_size, got [(9, 9), (9, 10)]"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "sentence"), CALLS)
def test_refused_with_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        call()
    assert "\n" not in str(error.value)


def test_refused_for_these_models():
    text = ["a small house", "the old bridge"] * 3
    vocabulary, other = Vocabulary.train(text, 30), Vocabulary.train(text, 25)
    model, deep = small(vocab_size=30), DecodingOptions(deep_shallow=True)
    blind = make("Deep-ED", torch.float32, vocab_size=30)
    unknown, told = DecodingOptions(replace_unknown=True), "with attention over the source, got D"
    for models, own, options, sentence in (
        (model, vocabulary, deep, "_growing, got Transformer"),
        (Ensemble([model] * 2), vocabulary, deep, "got Ensemble"),
        (model, other, DecodingOptions(), "of the model's 30 pieces, got 25"),
        (blind, vocabulary, unknown, told),
        (Ensemble([model, blind]), vocabulary, unknown, told),
    ):
        with pytest.raises(ValueError, match=sentence):
            search.translate_lines(models, own, ["a"], options)
    for lines, references, options, sentence in (
        (["a", "b"], ["a"], DecodingOptions(), "got 2 lines and 1 references"),
        ([], [], DecodingOptions(), "at least one, got 0 lines"),
        (["a"], ["a"], deep, "_growing, got Transformer"),
    ):
        with pytest.raises(ValueError, match=sentence):
            next(search.tune(model, vocabulary, lines, references, options))
