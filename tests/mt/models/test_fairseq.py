"""Converted fairseq checkpoints give the same outputs and translations."""

import fractions

import pytest
import torch

from deepfast.cli import main
from deepfast.files import DataError
from deepfast.mt.data import TokenVocabulary, read_dictionary, read_vocabulary
from deepfast.mt.models import fairseq
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.search import DecodingOptions, translate_lines
from tests.mt.models.fairseq_like import EOS, LUA, PAD, UNK, FairseqLike

SOURCE_TOKENS = [f"{word}{tail}" for word in ("ha", "lo", "mi", "ne") for tail in ("", "@@")]
TARGET_TOKENS = ["der@@", "ei", "ne@@", "Haus", "Ü"]
OURS = {LUA: 2, PAD: 0, EOS: 3, UNK: 1}

VARIANTS = pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "post"},
        {"weights": None, "numbering": "from 0"},
        {"norm": "post", "weights": 5, "numbering": "from 0", "share": "decoder"},
        {"weights": 12, "numbering": "embedding too", "share": "none", "decoder_history": False},
        {"numbering": "none", "share": "decoder"},
        {"numbering": "no history", "later_names": True, "share": "none"},
        {"norm": "post", "numbering": "no history", "later_names": True},
    ],
    ids=str,
)


def make(**options):
    shared = options.get("share", "all") == "all"
    target = SOURCE_TOKENS if shared else TARGET_TOKENS
    return FairseqLike(len(SOURCE_TOKENS) + 4, len(target) + 4, **options).eval(), target


def ours(ids):
    return ids.clone().apply_(lambda token: OURS.get(token, token))


@pytest.fixture
def convert(tmp_path, capsys):
    """``convert(model)`` writes the files, runs the command, and returns (exit code, its words)."""

    def run(content, target=SOURCE_TOKENS, *flags, zipped=True, source=SOURCE_TOKENS):
        torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=zipped)
        for side, tokens in (("source", source), ("target", target)):
            lines = (f"{token} {100 - n}\n" for n, token in enumerate(tokens))
            (tmp_path / f"dict.{side}").write_text("".join(lines), encoding="utf-8")
        code = main(["mt", "convert", str(tmp_path / "old.pt"),
                     "--output", str(tmp_path / "new.pt"),
                     "--source-dictionary", str(tmp_path / "dict.source"),
                     "--target-dictionary", str(tmp_path / "dict.target"), *flags])  # fmt: skip
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def padded_batch(size):
    """Ids of fairseq: sources padded on the left, targets that begin with </s>."""
    source = torch.randint(4, len(SOURCE_TOKENS) + 4, (3, 6))
    source[1, :2], source[2, :4] = PAD, PAD
    source[:, -1] = EOS
    target = torch.randint(4, size, (3, 5))
    target[:, 0], target[1, 2] = EOS, UNK
    return source, target


@VARIANTS
@torch.no_grad()
def test_the_command_s_checkpoint_has_the_logits_and_translations(options, convert, tmp_path):
    theirs, tokens = make(**options)
    code, said = convert(theirs.checkpoint(), tokens, zipped="norm" in options)
    assert code == 0, said
    assert "source: 4 special ids, then the 8 tokens of" in said
    model, vocabulary = load_model(tmp_path / "new.pt")
    assert model.config.first_position == 2
    assert model.config.share_embeddings == options.get("share", "all")
    size = len(tokens) + 4
    source, target = padded_batch(size)
    want = theirs(source, target)[..., [PAD, UNK, LUA, EOS, *range(4, size)]]
    got = model(ours(source), ours(target)).view(3, 5, size)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

    lines = ["ha lo@@ mi", "ne", "was@@ ha mi mi lo@@ ne@@ ha"]
    ids = {token: place for place, token in enumerate(SOURCE_TOKENS, 4)}
    expected = []
    for line in lines:
        source = torch.tensor([[*(ids.get(token, UNK) for token in line.split()), EOS]])
        words = [{UNK: "⁇", LUA: ""}.get(i, tokens[i - 4]) for i in theirs.greedy(source, 7)]
        text = " ".join(word for word in words if word) + " "
        expected.append(text.replace("@@ ", "").strip())
    greedy = DecodingOptions(beam=1, max_length=7)
    assert translate_lines(model, read_vocabulary(vocabulary), lines, greedy) == expected


def test_training_in_half_precision(convert, tmp_path):
    theirs, _ = make()
    code, said = convert(theirs.half().checkpoint())
    assert code == 0, said
    assert {p.dtype for p in load_model(tmp_path / "new.pt")[0].parameters()} == {torch.float32}


def test_a_dictionary_may_list_the_special_tokens(convert):
    theirs, _ = make()
    listed = ["<Lua heritage>", "<pad>", "</s>", "<unk>", *SOURCE_TOKENS]
    code, said = convert(theirs.checkpoint(), source=listed)
    assert code == 0, said
    assert "source: 4 special ids and 8 tokens, all of them in" in said
    assert "target: 4 special ids, then the 8 tokens of" in said


@pytest.mark.parametrize("source", [SOURCE_TOKENS[:-1], [*SOURCE_TOKENS, "x"],
                                    ["<pad>", "a", "b", "c", *SOURCE_TOKENS]])  # fmt: skip
def test_a_dictionary_of_another_size_is_refused(convert, source, tmp_path):
    code, said = convert(make()[0].checkpoint(), source=source)
    assert code == 1
    assert "expected 8 tokens for an embedding of 12 rows, of which 4 are special (<Lua " in said
    assert said.rstrip().endswith(f"got {len(source)}")
    assert not (tmp_path / "new.pt").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_objects_are_refused_unless_asked_for(convert, zipped):
    content = make()[0].checkpoint() | {"meters": fractions.Fraction(1, 3)}
    code, said = convert(content, zipped=zipped)
    assert code == 1
    assert "got an object of fractions.Fraction; --unsafe loads it" in said
    code, said = convert(content, SOURCE_TOKENS, "--unsafe", zipped=zipped)
    assert code == 0, said


def test_objects_of_a_package_that_is_not_here(tmp_path):
    content, path = (
        make()[0].checkpoint() | {"meters": fractions.Fraction(1, 3)},
        tmp_path / "old.pt",
    )
    torch.save(content, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes().replace(b"fractions", b"fractionz"))
    with pytest.raises(ValueError, match=r"packages that are installed here, .*fractionz"):
        fairseq.read_fairseq(path, unsafe=True)


OTHER = r"pt: expected a fairseq checkpoint, got another file$"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "there is no such file"),
        ([1, 2], "with the key 'model', got none"),
        ({"model": {}}, "under the key 'args', got NoneType"),
        # Bytes that begin like a pickle are another file too.
        *((data, OTHER) for data in (
            b"no torch file", b"hello", b"the 100\nold 30\n", b"1 2 3\n", b"X\x01\x00\x00\x00\xb8.",
            b"X\x1a\x80", b"c:HW!4}\n)$J\n.", b"]a.", b"(K\x01]d.",
        )),
    ],
    ids=str,
)  # fmt: skip
def test_other_files_are_refused(tmp_path, content, sentence):
    path = tmp_path / "file.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ValueError, match=sentence):
        fairseq.read_fairseq(path)


@pytest.mark.parametrize(
    ("arguments", "weights", "sentence"),
    [
        ({"encoder_learned_pos": True}, {}, "expected encoder_learned_pos False, got True"),
        ({"activation_fn": "gelu"}, {}, "expected activation_fn relu, got gelu"),
        ({"decoder_attention_heads": 3}, {}, "same attention_heads on both sides, got 2 in"),
        ({"decoder_normalize_before": False}, {}, "the same normalize_before on both sides"),
        ({"encoder_history_type": "dense"}, {}, "encoder_history_type learnable.*got dense"),
        ({}, {"encoder.layers.0.gate.weight": 2}, r"got encoder\.layers\.0\.gate\.weight too"),
        ({}, {"decoder.layers.1.fc1.bias": None}, r"a weight decoder\.layers\.1\.fc1\.bias"),
        ({}, {"encoder.history.layer_norms.2.weight": 5}, r"2\.weight \(12,\), got \(5,\)"),
        ({}, {"decoder.history.weight": (3, 3, 12)}, "expected DLCL alike on both sides"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused(arguments, weights, sentence):
    content = make()[0].checkpoint()
    vars(content["args"]).update(arguments)
    changed = {name: size and torch.zeros(size) for name, size in weights.items()}
    content["model"] = {k: w for k, w in (content["model"] | changed).items() if w is not None}
    with pytest.raises(ValueError, match=sentence):
        fairseq.convert(content)


def test_a_normalised_embedding_in_post_norm_is_refused():
    content = make(norm="post", numbering="embedding too")[0].checkpoint()
    with pytest.raises(ValueError, match="expected a normalised embedding only in pre-norm"):
        fairseq.convert(content)


def test_dictionaries(tmp_path):
    path = tmp_path / "dict.txt"
    path.write_text("ha 3\nü@@ 2\nha 1\n", encoding="utf-8")
    tokens = read_dictionary(path)
    assert tokens == ["ha", "ü@@", "ha"]
    vocabulary = TokenVocabulary(tokens, ["x", "y@@"])
    again = read_vocabulary(vocabulary.to_bytes())
    assert (len(again), again.target_size, again.fingerprint()) == (7, 6, vocabulary.fingerprint())
    assert again.encode(" ha  ü@@ nie ") == [6, 5, 1]
    assert again.decode([0, 2, 4, 5, 4, 1, 5, 3]) == "x yx ⁇ y"
    assert again.bos_id == again.eos_id == 3
    with pytest.raises(DataError, match="ids must be from 0 to 5, got 6"):
        again.decode([6])
    for line in ("ha", "ha x", " 3", "ha -1"):
        path.write_text(f"gut 1\n{line}\n")
        with pytest.raises(DataError, match=r"dict\.txt:2: expected a token and its count"):
            read_dictionary(path)
    with pytest.raises(DataError, match="expected a dictionary of tokens, got other data"):
        read_vocabulary(b'{"kind": "else"}')
