"""From a trained model to text: beam search, translation of lines, and scores.

    from deepfast.mt.models.checkpoint import load_model

    model, vocabulary = load_model("model.pt")
    lines = translate_lines(model, Vocabulary.from_bytes(vocabulary), ["a small house"])

sacrebleu is imported when a score is asked for.
"""

from deepfast.mt.search.beam import Hypothesis, beam_search
from deepfast.mt.search.deep_shallow import Tuned, deep_shallow_nbest, tune_deep_shallow
from deepfast.mt.search.ensemble import Ensemble
from deepfast.mt.search.forced import score_hypotheses
from deepfast.mt.search.score import Scores, bleu
from deepfast.mt.search.translate import translate_lines, translate_nbest

__all__ = [
    "Ensemble",
    "Hypothesis",
    "Scores",
    "Tuned",
    "beam_search",
    "bleu",
    "deep_shallow_nbest",
    "score_hypotheses",
    "translate_lines",
    "translate_nbest",
    "tune_deep_shallow",
]
