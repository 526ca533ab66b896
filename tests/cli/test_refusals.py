"""What commands refuse: one sentence, exit code 1, nothing written."""

import os

import pytest
import torch

from deepfast.cli import COMMANDS, main
from deepfast.mt.data import Vocabulary
from deepfast.mt.training.run_folder import only_run
from tests.mt.models.kinds import make, save

PLAN = ["plan", "--budget", "24GiB", "--dim", "512", "--tokens", "8192"]
SWEEP = ["sweep", "phrases-small", "--over", "model.dim=8", "--output", "new"]
TRANSLATE = ["translate", "text", "steps", "--input", "text", "--dictionary", "words"]
OPEN = ["translate", "model.pt", "--input", "text"]
POSUNK = ["--words", "1", "--output"]
READ = "--output: expected another file than {0}, which is read, got {0}"

REFUSED = [  # the commands of `deepfast mt` without mt
    # Arguments.
    (["train", ""], "got an empty one in"),
    ([*SWEEP[:-2], "--output="], "got an empty one in"),
    ([*SWEEP, "--seeds", "0"], "seeds must be an integer of at least 1"),
    (["sweep", "phrases-small"], "expected a section sweep, or --over KEY=VALUE,VALUE, got"),
    (["sweep", "growing-big", "--only", "deep"], "--only: expected one of grown, shallow, e"),
    ([*SWEEP[:-1], "text"], "text: cannot be made (File"),
    (["bench", "soft_max"], "expected an op of layer_norm, "),
    (["bench", "--dim", "7"], "--dim: expected an even number, got 7"),
    (["info", "--device", "tpu"], "--device: expected cpu or cuda, got 'tpu'"),
    (["info", "--dtype", "int8"], "--dtype: expected one of float32, "),
    (["plan", "--dim", "512"], "plan: --budget, --num-layers, --dim, --tokens: expected at"),
    ([*PLAN, "--recompute", "less"], "deepfast plan: --recompute: expected one of none, "),
    ([*PLAN, "--num-heads", "5"], "--num-heads: expected a divisor of --dim 512, got 5"),
    (["train"], "see deepfast mt train --list"),
    ([*OPEN, "--threads", "1025"], "integer from 1 to 1024"),
    ([*OPEN, "--device", "tpu"], "expected cpu or cuda, got"),
    (["score", "two", "two", "--checkpoint", "model.pt"], "expected HYPOTHESES and REFERENCES"),
    # Text.
    (["score", "--checkpoint", "model.pt", "--source", "two", "--reference", "text"],
     "got 2 and 1"),
    (["posunk", "text", "words", "text", "words", *POSUNK, "new"], "expected pairs of SOURCE and"),
    (["posunk", "text", "two", *POSUNK, "new"], "expected as many lines in text as in two, got 1"),
    (["posunk", "empty", "empty", *POSUNK, "new"], "expected a line with words on both sides in"),
    (["posunk", "marked", "two", *POSUNK, "new"], "marked:2: expected a text without marks, got "),
    # Files that cannot be used, or that are read.
    (["posunk", "text", "words", *POSUNK, "text"], "text: cannot be made"),
    (["posunk", "text", "words", *POSUNK, "."], "--output: expected another file than words, "),
    (["posunk", "dictionary", "text", *POSUNK, "."], "expected another file than dictionary"),
    (["report", "--quick", "--output", "page"], "page/index.html: expected a file, got a"),
    (["sweep", "phrases-small", "--over", "model.dim=8", "--output", "busy"], "that no other run"),
    (["train", "n" * 300], f"{'n' * 300}: cannot be used (File name too long)"),
    (["train", "/proc/self/mem"], "/proc/self/mem: cannot be read (Input/output error)"),
    (["train", "phrases-small", "output=new", "data.phrases=null", "data.train_source=none",
      "data.train_target=none"], "none: there is no such file"),
    (["train", "recipe.yaml"], "output: expected a folder where recipe.yaml is not replaced"),
    (["translate", "text", "--input", "text"], "expected a deepfast checkpoint, got a file of"),
    (["translate", "model.pt", "--input", "none"], "none: there is no such file"),
    ([*OPEN, "--output", "no/x"], "no is not an existing folder"),
    *(([*TRANSLATE, "--output", name], READ.format(name)) for name in ("text", "words")),
    ([*TRANSLATE, "--output", "steps/run.pt"], "file than steps, which is read, got steps/run.pt"),
    (["plan", "--plot", "no/x.svg"], "no/x.svg: no is not an existing folder"),
    ([*PLAN, "--plot", "memory.pdf"], "--plot: expected a file ending in .svg or "),
    (["selfcheck", "--device", "cpu", "--write", "page"], "page: expected a file, got a folder"),
    # Models that have nothing to leave out or to show.
    (["prune", "model.pt", "--output", "new", "--language", "de"], "expected a pre-norm model wit"),
    (["show", "m", "--output", "folder.svg"], "expected a file, got a folder"),
    (["show", "model.pt", "--output=a.jpg"], "expected a file ending in .svg or .png"),
    (["show", "plain.pt"], "with DLCL, attention residuals or latent depth in the encoder or the "),
    (["show", "attnres.pt"], "--sample: expected source sentences, over which"),
    (["show", "attnres.pt", "--sample", "empty"], "expected sentences with words, got none"),
    (["show", "plain.pt", "a"], "expected a model with an encoder_fusion or a decoder_fusion"),
    (["show", "fused.pt", "  "], "TEXT: expected words, got none"),
    (["show", "fused.pt", "a", "--language", "it"], "a language of the checkpoint (de), got 'it'"),
    (["show", "fused.pt", "a", "--side", "decoder"], "got None"),
]  # fmt: skip
MODELS = {"model.pt": "dlcl", "plain.pt": "transparent", "attnres.pt": "attnres",
          "fused.pt": "fusion of the encoder"}  # fmt: skip
TEXTS = {"text": "a\n", "two": "a\nb\n", "empty": "\n", "words": "a 1\n", "dictionary": "a\n",
         "marked": "a\n<unk> <unk:-1>\n", "steps/run.pt": "a\n", "folder.svg/x": "",
         "recipe.yaml": "# Mine.\noutput: .\n", "page/index.html/x": ""}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The content of a checkpoint file of each model."""
    folder = tmp_path_factory.mktemp("models")
    vocabulary = Vocabulary.train(["a b c d e"] * 9, 11, at_most=True, tags=["<de>"])
    found = {}
    for name, kind in MODELS.items():
        model = make(kind, torch.float32, vocab_size=len(vocabulary))
        save(folder / name, model, vocabulary.to_bytes())
        found[name] = (folder / name).read_bytes()
    return found


@pytest.mark.parametrize(("words", "sentence"), REFUSED)
def test_refused_with_a_sentence(checkpoints, tmp_path, monkeypatch, capsys, words, sentence):
    words = words if words[0] in COMMANDS else ["mt", *words]
    command = " ".join(words[: 1 + (words[0] == "mt")])
    for package in ("matplotlib", "jinja2", "yaml"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    files = {name: content.encode() for name, content in TEXTS.items()} | checkpoints
    for name, content in files.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with only_run(tmp_path / "busy"):
        assert main(words) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if "decoding: beam" not in line]
    assert len(said) == 1
    assert said[0].startswith(f"deepfast {command}: ")
    assert said[0].count(f"{command}: ") == 1
    assert sentence in said[0]
    assert "Errno" not in said[0]
    found = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"]
    assert {str(p.relative_to(tmp_path)): p.read_bytes() for p in found} == files
