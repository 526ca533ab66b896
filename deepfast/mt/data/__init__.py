"""From text to batches: parallel files, vocabularies, batches of a token budget, phrase corpora.

    text = ParallelText("train.en", "train.de")
    vocabulary = Vocabulary.train((side for _, *pair in text for side in pair), 8000)
    batches = TokenBatches(prepare(text, vocabulary, Path("cache")), max_tokens=4096)

This package imports neither models nor training. sentencepiece, num2words and Babel are imported
when they are needed.
"""

from deepfast.files import DataError, MissingPackage
from deepfast.mt.data.batches import Batch, TokenBatches, evaluation_batches, make_batch, take
from deepfast.mt.data.pairs import Pairs, prepare
from deepfast.mt.data.phrases import phrases
from deepfast.mt.data.text import ParallelText, read_lines, read_parallel
from deepfast.mt.data.vocabulary import Vocabulary, lower, split_tag, tag_of

__all__ = [
    "Batch",
    "DataError",
    "MissingPackage",
    "Pairs",
    "ParallelText",
    "TokenBatches",
    "Vocabulary",
    "evaluation_batches",
    "lower",
    "make_batch",
    "phrases",
    "prepare",
    "read_lines",
    "read_parallel",
    "split_tag",
    "tag_of",
    "take",
]
