"""How text is decoded: one set of options for every search and every command."""

from collections.abc import Mapping
from typing import Annotated, Any

from deepfast.mt.checked import Checked, Count, Field, checked, one_of

LENGTH_FORMS = ("gnmt", "power")
ALPHA, GAMMA = 0.5, 0.6
"""The weights of deep-shallow decoding in its authors' script."""
RECIPE_KEYS = ("beam", "length_penalty", "length_form")
"""The options that a recipe has in its section `decode`."""


@checked("decoding: ", frozen=True)
class DecodingOptions(Checked):
    """What a search looks for, and how large its batches are.

    `translate_nbest` reads all options, `beam_search` those that concern one batch.

    Raises:
        ValueError: a value out of range, or two options that cannot go together.
    """

    beam: Annotated[int, Field(ge=1, le=2**16)] = 4
    """Hypotheses kept per sentence; 1 is greedy search. More than the vocabulary holds is not
    an error. The model decodes this many times as many rows as a batch has sentences."""
    nbest: Count = 1
    """Translations returned per sentence, at most ``beam``."""
    # Below 0 the score of a longer hypothesis has no bound; far greater powers are no numbers.
    length_penalty: Annotated[float, Field(ge=0, le=10)] = 0.6
    """Alpha of the score, at least 0; 0 ranks by likelihood, higher prefers longer translations."""
    length_form: Annotated[str, one_of(LENGTH_FORMS)] = "gnmt"
    """What divides log P for n tokens, eos included. "gnmt": ((5 + n) / 6)^alpha, of Wu et al.
    2016. "power": n^alpha, of fairseq; the papers that used fairseq state its alpha."""
    max_length: Count | None = None
    """Most tokens of a translation, eos not counted; then eos is forced and its log-probability
    counts. None: ``2 * n + 10`` for a source of n tokens, eos included."""
    max_tokens: Count = 2000
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
    alpha: Annotated[float, Field(ge=0, le=1)] = ALPHA
    """Deep-shallow decoding: the weight, 0 to 1, of the network that found a translation; the
    other network has the rest."""
    gamma: Annotated[float, Field(ge=-10, le=10)] = GAMMA
    """Deep-shallow decoding: the power of the length, in tokens, that divides the score; higher
    prefers longer translations."""

    def __post_init__(self) -> None:
        self.expect(self.nbest <= self.beam, "nbest", f"at most beam {self.beam}")
        for name, default in (("alpha", ALPHA), ("gamma", GAMMA)):
            fits = self.deep_shallow or getattr(self, name) == default
            self.expect(fits, name, "deep_shallow beside it")
        alone = not (self.no_unknown or self.deep_shallow)
        expected = "false with no_unknown or deep_shallow"
        self.expect(alone or not self.replace_unknown, "replace_unknown", expected)

    @classmethod
    def of_recipe(cls, recipe: Mapping[str, Any]) -> "DecodingOptions":
        """The options of a recipe's section `decode`; where it lacks one, the default."""
        section = recipe.get("decode", {})
        return cls(**{name: section[name] for name in RECIPE_KEYS if name in section})

    def __str__(self) -> str:
        """Such as `beam 4, length penalty 0.6 (gnmt)`."""
        said = f"beam {self.beam}, length penalty {self.length_penalty:g} ({self.length_form})"
        return said + (f", alpha {self.alpha}, gamma {self.gamma}" if self.deep_shallow else "")


DEFAULTS = DecodingOptions()
