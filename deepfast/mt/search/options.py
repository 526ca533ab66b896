"""How text is decoded: one set of options for every search and every command."""

from dataclasses import dataclass

from deepfast import checks

LENGTH_FORMS = ("gnmt", "power")
MOST = 10
"""The greatest power of a length. Far greater ones leave the range of numbers."""


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """What a search looks for, and how large its batches are.

    `translate_all` reads all options, `beam_search` those that concern one batch.

    Raises:
        ValueError: a value out of range, or two options that cannot go together.
    """

    beam: int = 4
    """Hypotheses kept per sentence; 1 is greedy search. More than the vocabulary holds is not
    an error. The model decodes this many times as many rows as a batch has sentences."""
    nbest: int = 1
    """Translations returned per sentence, at most ``beam``."""
    length_penalty: float = 0.6
    """Alpha of the score, at least 0; 0 ranks by likelihood, higher prefers longer translations."""
    length_form: str = "gnmt"
    """What divides log P for n tokens, eos included. "gnmt": ((5 + n) / 6)^alpha, of Wu et al.
    2016. "power": n^alpha, of fairseq; the papers that used fairseq state its alpha."""
    max_length: int | None = None
    """Most tokens of a translation, eos not counted; then eos is forced and its log-probability
    counts. None: ``2 * n + 10`` for a source of n tokens, eos included."""
    max_tokens: int = 2000
    """Most source tokens of a batch, eos and padding included."""
    no_unknown: bool = False
    """Whether unk is never generated."""
    replace_unknown: bool = False
    """Whether each unk becomes the source word with the most attention, see `search.unknown`."""
    dictionary: str | None = None
    """A file of word translations that `deepfast mt posunk` has written. It replaces the marks of
    unknown words in translations; with `replace_unknown` it translates the copied words."""
    deep_shallow: bool = False
    """Whether a model that has grown translates together with its bottom, see
    `search.deep_shallow`."""
    alpha: float | None = None
    """Deep-shallow decoding: the weight, 0 to 1, of the network that found a translation; the
    other network has the rest. None: 0.5."""
    gamma: float | None = None
    """Deep-shallow decoding: the power of the length, in tokens, that divides the score; higher
    prefers longer translations. None: 0.6."""

    def __post_init__(self) -> None:
        checks.whole("decoding", beam=self.beam, nbest=self.nbest, max_tokens=self.max_tokens)
        if self.max_length is not None:
            checks.whole("decoding", max_length=self.max_length)
        if self.nbest > self.beam:
            raise ValueError(f"decoding: nbest must be at most beam {self.beam}, got {self.nbest}")
        # Below 0 the score of a longer hypothesis has no bound.
        checks.number("decoding", most=MOST, length_penalty=self.length_penalty)
        checks.choice("decoding", LENGTH_FORMS, length_form=self.length_form)
        if self.alpha is not None:
            checks.probability("decoding", self.alpha, argument="alpha")
        if self.gamma is not None:
            checks.number("decoding", least=-MOST, most=MOST, gamma=self.gamma)
        for name in ("alpha", "gamma"):
            if getattr(self, name) is not None and not self.deep_shallow:
                raise ValueError(f"decoding: {name} needs deep_shallow, got {name} without it")
        for name in ("no_unknown", "deep_shallow"):
            if self.replace_unknown and getattr(self, name):
                raise ValueError(f"decoding: replace_unknown cannot go with {name}, got both")


DEFAULTS = DecodingOptions()
