"""From a trained model to text: beam search, translation of lines, and scores.

    translator = load_translator(["model.pt"])
    lines = translator.prepare(["a small house"])
    options = DecodingOptions(beam=8, length_penalty=1.0)
    translations = translate_lines(translator.model, translator.vocabulary, lines, options)

From the bottom: `beam_search` works on one batch of token ids; `translate_lines` makes batches of
lines and turns the results into text. sacrebleu is imported when a score is asked for.
"""

from deepfast.mt.search.beam import Hypothesis, beam_search, score_hypotheses
from deepfast.mt.search.ensemble import Ensemble
from deepfast.mt.search.options import DecodingOptions
from deepfast.mt.search.score import Scores, bleu
from deepfast.mt.search.translate import (
    Translation,
    Translator,
    load_translator,
    translate_lines,
    translate_nbest,
)
from deepfast.mt.search.tuning import tune

__all__ = [
    "DecodingOptions",
    "Ensemble",
    "Hypothesis",
    "Scores",
    "Translation",
    "Translator",
    "beam_search",
    "bleu",
    "load_translator",
    "score_hypotheses",
    "translate_lines",
    "translate_nbest",
    "tune",
]
