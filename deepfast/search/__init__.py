"""From a trained model to text: beam search, translation of lines, and scores.

    from deepfast.models.checkpoint import load_model

    model, vocabulary = load_model("model.pt")
    lines = translate_lines(model, Vocabulary.from_bytes(vocabulary), ["a small house"])

sacrebleu is imported when a score is asked for.
"""

from .beam import Hypothesis, beam_search
from .deep_shallow import Tuned, deep_shallow_nbest, tune_deep_shallow
from .ensemble import Ensemble
from .forced import score_hypotheses
from .score import Scores, bleu
from .translate import translate_lines, translate_nbest

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
