"""From text to batches: parallel files, vocabularies, batches of a token budget, phrase corpora.

    text = read_parallel("train.en", "train.de")
    vocabulary = Vocabulary.train([*text.sources, *text.targets], 8000)
    batches = TokenBatches(vocabulary.encode_pairs(text), max_tokens=4096, place=text.place)

This package imports neither models nor training. sentencepiece, num2words and Babel are imported
when they are needed.
"""

from deepfast.files import DataError, MissingPackage
from deepfast.mt.data.batches import (
    Batch,
    TokenBatches,
    evaluation_batches,
    make_batch,
    restore_order,
    take,
)
from deepfast.mt.data.phrases import Corpus, phrases, write
from deepfast.mt.data.text import (
    Dropped,
    ParallelText,
    read_lines,
    read_parallel,
)
from deepfast.mt.data.tokens import (
    TokenVocabulary,
    read_dictionary,
    read_vocabulary,
    subwords,
)
from deepfast.mt.data.vocabulary import (
    SeparateVocabularies,
    Vocabulary,
    lower,
    split_tag,
    tag_of,
)

__all__ = [
    "Batch",
    "Corpus",
    "DataError",
    "Dropped",
    "MissingPackage",
    "ParallelText",
    "SeparateVocabularies",
    "TokenBatches",
    "TokenVocabulary",
    "Vocabulary",
    "evaluation_batches",
    "lower",
    "make_batch",
    "phrases",
    "read_dictionary",
    "read_lines",
    "read_parallel",
    "read_vocabulary",
    "restore_order",
    "split_tag",
    "subwords",
    "tag_of",
    "take",
    "write",
]
