"""Marks of unknown words: into a training text, and out of a translation."""

from deepfast.mt.data.posunk import annotated, mark, without_marks

SOURCE = ["the", "ecotax", "portico", "in", "Pont-de-Buis"]
TARGET = ["le", "portique", "écotaxe", "de", "Pont-de-Buis"]
LINKS = [(0, 0), (2, 1), (1, 2), (4, 4)]


def test_a_target_with_marks_comes_back():
    """The sentence of the paper's Figure 1."""
    given = annotated(TARGET, LINKS, {"le", "de"})
    assert given == ["le", "<unk:-1>", "<unk:+1>", "de", "<unk:+0>"]
    translations = {"portico": "portique", "ecotax": "écotaxe"}
    assert without_marks(SOURCE, " ".join(given), translations) == " ".join(TARGET)
    assert without_marks(SOURCE, " ".join(given), {}) == "le portico ecotax de Pont-de-Buis"
    # Marks without a source word.
    assert annotated(["x", "y"], [], set()) == ["<unk:null>"] * 2
    assert [mark(d) for d in (7, 8, -7, -8, None)] == [
        "<unk:+7>", "<unk:null>", "<unk:-7>", "<unk:null>", "<unk:null>"
    ]  # fmt: skip
    text = "<unk:-2> a <unk:null> <unk:+1> <unk:+7> <unk:x>"
    assert without_marks(["one", "two"], text, {}) == "a <unk:x>"
    assert without_marks(["one", "two", "three"], text, {}) == "three a three <unk:x>"
