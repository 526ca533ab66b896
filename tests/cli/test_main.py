"""What the command line does with errors before and while a command runs."""

import importlib

import pytest
import torch

from deepfast.cli import decoding, main


def test_ctrl_c_while_a_command_is_imported(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["translate", "model.pt"]) == 130
    assert capsys.readouterr().err == "deepfast translate: interrupted\n"


def test_python_s_own_lack_of_memory_is_one_sentence(monkeypatch, capsys):
    def exhausted(*args):
        raise MemoryError

    monkeypatch.setattr(importlib.import_module("deepfast.cli.score"), "read_lines", exhausted)
    assert main(["score", "a", "b"]) == 1
    assert capsys.readouterr().err == "deepfast score: out of memory\n"

    def run_far_out(_):
        torch.empty(2**40 * 2**15)

    monkeypatch.setattr("deepfast.cli.score.run", run_far_out)
    assert main(["score", "hyp", "ref"]) == 1
    wanted = f"deepfast score: out of memory: tried to allocate {2**57} bytes\n"
    assert capsys.readouterr().err == wanted


@pytest.mark.parametrize("words", [["--output", ""], ["--output="]])
def test_an_empty_argument_is_no_folder(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "phrases-small", "--over", "optim.lr=1e-3", *words]) == 1
    assert "expected text in every argument, got an empty one" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["sweep", "compare-growth"])
def test_more_runs_than_anyone_waits_for_are_refused(command, capsys):
    over = ["--over", "optim.lr=1e-3"] if command == "sweep" else []
    assert main([command, "phrases-growing", *over, "--seeds", str(10**12)]) == 1
    assert "seeds must be at most 65536" in capsys.readouterr().err


@pytest.mark.parametrize("threads", [0, 100_000_000])
def test_more_threads_than_any_machine_starts_are_refused(threads, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decoding, "load_translator", None)
    text = tmp_path / "text"
    text.write_text("a\n")
    command = ["translate", "model.pt", "--input", str(text), "--threads", str(threads)]
    assert main(command) == 1
    assert "threads must be a whole number from 1 to 1024, got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["posunk", "text", "text", "--words", "1", "--output", "text"], "text: cannot be made"),
        (["report", "--quick", "--output", "text/x"], "text/x: cannot be made (Not a directory)"),
        (["report", "--quick", "--output", "page"], "page/index.html: expected a file, got a"),
        (["compare-growth", "phrases-growing", "--output", "text"], "text: cannot be made (File"),
        (["train", "n" * 300], f"{'n' * 300}: cannot be used (File name too long)"),
        (["train", "/proc/self/mem"], "/proc/self/mem: cannot be read (Input/output error)"),
        (["translate", "m", "--output", "n" * 300], "cannot be used (File name too long)"),
        (["show-run", ".", "--output", "text/x.svg"], "expected a folder that exists, got text"),
        (["show-attention", "m", "a", "--output", "no/x.svg"], "expected a folder that exists"),
        (["show-weights", "m", "--output", "folder.svg"], "expected a file, got a folder"),
        (["plan", "--plot", "no/x.svg"], "no/x.svg: expected a folder that exists, got no"),
        (["prove", "--device", "cpu", "--write", "page"], "page: expected a file, got a folder"),
        (["convert", "page", "--source-dictionary", "text", "--target-dictionary", "text",
          "--output", "x"], "page: cannot be read (Is a directory)"),
    ],
)  # fmt: skip
def test_paths_that_cannot_be_used_are_one_sentence(tmp_path, monkeypatch, capsys, words, sentence):
    for package in ("matplotlib", "jinja2", "rich", "yaml"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("a\n")
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "page" / "index.html").mkdir(parents=True)
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"deepfast {words[0]}: ")
    assert sentence in said
    assert "Errno" not in said
    assert said.count("\n") == 1


def test_an_error_of_the_system_without_a_file_has_its_reason_alone(monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("deepfast.cli.score.read_lines", full)
    assert main(["score", "a", "b"]) == 1
    assert capsys.readouterr().err == "deepfast score: No space left on device\n"


@pytest.mark.parametrize("output", ["text", "model.pt", "words", "steps/run.pt"])
def test_translations_replace_nothing_that_is_read(tmp_path, monkeypatch, capsys, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps").mkdir()
    for name in ("text", "model.pt", "words", "steps/run.pt"):
        (tmp_path / name).write_text("a\n")
    command = ["translate", "model.pt", "steps", "--input", "text", "--dictionary", "words"]
    assert main([*command, "--output", output]) == 1
    source = "steps" if "/" in output else output
    wanted = f"--output: expected another file than {source}, which is read, got {output}\n"
    assert capsys.readouterr().err == f"deepfast translate: {wanted}"
    assert (tmp_path / output).read_text() == "a\n"


@pytest.mark.parametrize("output", ["model.pt", "words"])
def test_a_converted_checkpoint_replaces_nothing_that_is_read(
    tmp_path, monkeypatch, capsys, output
):
    monkeypatch.chdir(tmp_path)
    for name in ("model.pt", "words"):
        (tmp_path / name).write_text("a 1\n")
    words = ["--source-dictionary", "words", "--target-dictionary", "words", "--output", output]
    assert main(["convert", "model.pt", *words]) == 1
    assert f"expected another file than {output}, which is read" in capsys.readouterr().err


def test_a_run_does_not_replace_its_recipe(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"# Mine.\noutput: {tmp_path}\n")
    assert main(["train", str(path)]) == 1
    assert f"output: expected a folder where {path} is not replaced" in capsys.readouterr().err
    assert path.read_text().startswith("# Mine.")
