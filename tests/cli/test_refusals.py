"""What commands refuse: one sentence, exit code 1, nothing written."""

import importlib
import os

import pytest
import torch

from deepfast.cli import COMMANDS, main
from deepfast.mt.training.run_folder import only_run

PLAN = ["plan", "--budget", "24GiB", "--dim", "512", "--tokens", "8192"]
SWEEP = ["sweep", "phrases-small", "--over", "model.dim=8", "--output", "new"]
TRANSLATE = ["translate", "model.pt", "steps", "--input", "text", "--dictionary", "words"]
POSUNK = ["--words", "1", "--output"]
READ = "--output: expected another file than {0}, which is read, got {0}"

REFUSED = [  # the commands of `deepfast mt` without mt
    # Arguments.
    (["sweep", "phrases-small", "--over", "optim.lr=1e-3", "--output", ""], "got an empty one in"),
    (["sweep", "phrases-small", "--over", "optim.lr=1e-3", "--output="], "got an empty one in"),
    ([*SWEEP, "--seeds", "0"], "seeds must be an integer of at least 1"),
    ([*SWEEP, "--jobs", "-1"], "jobs must be an integer of at least 0"),
    (["sweep", "phrases-small"], "expected a section sweep, or --over KEY=VALUE,VALUE, got"),
    (["sweep", "growing-big", "--only", "deep"], "--only: expected one of grown, shallow, e"),
    (["sweep", "phrases-systems", "--output", "text"], "text: cannot be made (File"),
    (["translate", "model.pt", "--input", "text", "--threads", "1025"], "integer from 1 to 1024"),
    (["bench", "soft_max"], "expected an op of layer_norm, "),
    (["bench", "--dim", "7"], "--dim: expected an even number, got 7"),
    (["bench", "--rounds", "0"], "bench: --rounds must be an integer of at least 1, got 0"),
    (["bench", "--device", "tpu"], "--device: expected cpu or cuda, got 'tpu'"),
    (["info", "--device", "tpu"], "--device: expected cpu or cuda, got 'tpu'"),
    (["info", "--dtype", "int8"], "--dtype: expected one of float32, "),
    (["plan", "--dim", "512"], "plan: --budget, --num-layers, --dim, --tokens: expected at"),
    ([*PLAN, "--recompute", "less"], "deepfast plan: --recompute: expected one of none, "),
    ([*PLAN, "--norm", "dim"], "deepfast plan: --norm: expected one of pre, post, got 'dim'"),
    ([*PLAN, "--num-heads", "5"], "--num-heads: expected a divisor of --dim 512, got 5"),
    (["train"], "see deepfast mt train --list"),
    # Text.
    (["posunk", "text", *POSUNK, "new"], "expected pairs of SOURCE and TARGET whose targets have"),
    (["posunk", "text", "words", "text", "words", *POSUNK, "new"], "expected pairs of SOURCE and"),
    (["posunk", "text", "two", *POSUNK, "new"], "expected as many lines in text as in two, got 1"),
    (["posunk", "text", "none", *POSUNK, "new"], "none: there is no such file"),
    (["posunk", "empty", "empty", *POSUNK, "new"], "expected a line with words on both sides in"),
    (["posunk", "marked", "two", *POSUNK, "new"], "marked:2: expected a text without marks, got "),
    (["posunk", "two", "marked", *POSUNK, "new"], "marked:2: expected a text without marks, got "),
    (["posunk", "text", "words", "--words", "0", "--output", "new"], "words must be an integer"),
    # Files that cannot be used, or that are read.
    (["posunk", "text", "words", *POSUNK, "text"], "text: cannot be made"),
    (["posunk", "text", "words", *POSUNK, "."], "--output: expected another file than words, "),
    (["posunk", "dictionary", "text", *POSUNK, "."], "expected another file than dictionary"),
    (["report", "--quick", "--output", "text/x"], "text/x: cannot be made (Not a directory)"),
    (["report", "--quick", "--output", "page"], "page/index.html: expected a file, got a"),
    (["sweep", "phrases-small", "--over", "model.dim=8", "--output", "busy"], "that no other run"),
    (["train", "n" * 300], f"{'n' * 300}: cannot be used (File name too long)"),
    (["train", "/proc/self/mem"], "/proc/self/mem: cannot be read (Input/output error)"),
    (["train", "phrases-small", "output=/proc/nowhere"], "/proc/nowhere: cannot be made"),
    (["train", "phrases-small", "output=new", "data.phrases=null", "data.train_source=none",
      "data.train_target=none"], "none: there is no such file"),
    (["train", "recipe.yaml"], "output: expected a folder where recipe.yaml is not replaced"),
    (["translate", "m", "--output", "n" * 300], "cannot be used (File name too long)"),
    *(([*TRANSLATE, "--output", name], READ.format(name)) for name in
      ("text", "model.pt", "words")),
    ([*TRANSLATE, "--output", "steps/run.pt"], "file than steps, which is read, got steps/run.pt"),
    (["show", "m", "a", "--output", "no/x.svg"], "no is not an existing folder"),
    (["show", "m", "--output", "folder.svg"], "expected a file, got a folder"),
    (["plan", "--plot", "no/x.svg"], "no/x.svg: no is not an existing folder"),
    ([*PLAN, "--plot", "memory.pdf"], "--plot: expected a file ending in .svg or "),
    (["selfcheck", "--device", "cpu", "--write", "page"], "page: expected a file, got a folder"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "sentence"), REFUSED)
def test_refused_with_a_sentence(tmp_path, monkeypatch, capsys, words, sentence):
    words = words if words[0] in COMMANDS else ["mt", *words]
    command = " ".join(words[: 1 + (words[0] == "mt")])
    for package in ("matplotlib", "jinja2", "yaml"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    files = {"text": "a\n", "two": "a\nb\n", "empty": "\n", "model.pt": "a 1\n", "words": "a 1\n",
             "dictionary": "a\n", "marked": "a\n<unk> <unk:-1>\n", "steps/run.pt": "a\n",
             "recipe.yaml": "# Mine.\noutput: .\n", "folder.svg/x": "",
             "page/index.html/x": ""}  # fmt: skip
    for name, content in files.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        (tmp_path / name).write_text(content)
    with only_run(tmp_path / "busy"):
        assert main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"deepfast {command}: ")
    assert said.count(f"{command}: ") == 1
    assert sentence in said
    assert "Errno" not in said
    assert said.count("\n") == 1
    found = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"]
    assert {str(p.relative_to(tmp_path)): p.read_text() for p in found} == files


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "out of memory"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_an_error_of_the_system_has_its_reason_alone(monkeypatch, capsys, error, sentence):
    def fail(*args):
        raise error

    monkeypatch.setattr(importlib.import_module("deepfast.cli.mt.score"), "read_lines", fail)
    assert main(["mt", "score", "a", "b"]) == 1
    assert capsys.readouterr().err == f"deepfast mt score: {sentence}\n"


def test_memory_that_torch_does_not_get_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("deepfast.cli.mt.score.run", lambda _: torch.empty(2**40 * 2**15))
    assert main(["mt", "score", "hyp", "ref"]) == 1
    wanted = f"deepfast mt score: out of memory: tried to allocate {2**57} bytes\n"
    assert capsys.readouterr().err == wanted


def test_ctrl_c_while_a_command_is_imported(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["mt", "translate", "model.pt"]) == 130
    assert capsys.readouterr().err == "deepfast mt translate: interrupted\n"
