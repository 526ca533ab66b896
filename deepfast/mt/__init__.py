"""The translation toolkit: from two text files to a trained model, and from lines to translations.

How text becomes a translation, and the names that do it:

    text         data.read_parallel(source, target)         two files to sentence pairs
    vocabulary   data.Vocabulary.train(sentences, size)     subwords; encode_pairs gives token ids
    batches      data.TokenBatches(pairs, max_tokens=...)   yields data.Batch, padded tensors
    model        models.build(models.TransformerConfig(...))
    loss         model.loss(batch.source_BS, batch.target_in_BT, batch.target_out_BT, smoothing)
    checkpoint   training.train(training.load_recipe(...))  all of the above, saved in its output
    translation  search.load_translator([checkpoint])       a model and its vocabulary
                 search.translate_lines(model, vocabulary, lines, search.DecodingOptions(...))
    score        search.bleu(translations, references)

`recipes` holds the recipes that `deepfast mt train --list` shows.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepfast.mt import data, models, search, training

__all__ = ["data", "models", "search", "training"]


def __getattr__(name: str):
    # Each part is loaded when it is first used.
    if name in __all__:
        return importlib.import_module(f"deepfast.mt.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
