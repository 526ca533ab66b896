"""The command line with closed streams."""

import subprocess
import sys

import pytest


def run(*args, closed):
    """The command's exit code and what it wrote, started with these streams closed."""
    command = f'exec "$@" {closed}'
    return subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, "-m", "deepfast", *args],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a training run, whose standard output was closed."""
    pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("run")
    done = run(
        "train", "phrases-small", f"output={folder}", "train.max_steps=2", "data.train_size=200",
        "data.dev_size=8", "data.test_size=8", "data.vocab_size=150", "train.save_every=1",
        "train.validate_every=1", "train.threads=1", closed=">&-",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.fixture
def translate(trained, tmp_path):
    text = tmp_path / "text"
    text.write_text("eins\n")
    return "translate", str(trained / "average.pt"), "--input", str(text)


def test_training_goes_on_without_standard_output(trained):
    assert {f.name for f in trained.glob("*.pt")} >= {"step-00000002.pt", "average.pt"}


def test_results_for_a_closed_standard_output_are_an_error(translate):
    for command in (["info"], translate):
        done = run(*command, closed=">&-")
        assert done.returncode == 1
        assert done.stderr.endswith(f"deepfast {command[0]}: standard output is closed\n")
        assert "Traceback" not in done.stderr


def test_a_closed_standard_input_is_an_error(translate):
    done = run(*translate[:2], closed="<&-")
    sentence = "standard input: expected text, got a closed stream"
    assert (done.returncode, done.stderr) == (1, f"deepfast translate: {sentence}\n")


def test_errors_are_not_written_among_results(translate):
    done = run(*translate, closed="2>&-")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1)


def test_a_table_ends_with_its_reader_as_text_does():
    pytest.importorskip("rich")
    command = ("bench", "layer_norm", "--tokens", "1", "--dim", "2", "--rounds", "1")
    done = run(*command, closed=">&-")
    assert (done.returncode, done.stderr) == (1, "deepfast bench: standard output is closed\n")
    done = run(*command, closed="> >(true)")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("score", "--help")])
def test_help_for_a_closed_standard_output(words):
    done = run(*words, closed=">&-")
    name = " ".join(("deepfast", *words[:-1]))
    assert (done.returncode, done.stderr) == (1, f"{name}: standard output is closed\n")
    done = run(*words, closed="> >(true)")
    assert (done.returncode, done.stderr) == (0, "")
