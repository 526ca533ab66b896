"""The command line with closed streams."""

import os
import subprocess
import sys
import time

import pytest


def run(*args, closed, **environment):
    """The command's exit code and what it wrote, started with these streams closed."""
    command = f'exec "$@" {closed}'
    return subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, "-m", "deepfast", *args],
        capture_output=True, text=True, timeout=120, env=os.environ | environment,
    )  # fmt: skip


TRAIN = (
    "train", "phrases-small", "train.max_steps=2", "data.train_size=200", "data.dev_size=8",
    "data.test_size=8", "data.vocab_size=150", "train.save_every=1", "train.validate_every=1",
    "train.threads=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a training run, whose standard output was closed."""
    pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("run")
    done = run(*TRAIN, f"output={folder}", closed=">&-")
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.fixture
def translate(trained, tmp_path):
    text = tmp_path / "text"
    text.write_text("eins\n")
    return "translate", str(trained / "average.pt"), "--input", str(text)


def test_training_goes_on_without_standard_output(trained):
    assert {f.name for f in trained.glob("*.pt")} >= {"step-00000002.pt", "average.pt"}


def test_training_goes_on_where_the_disk_of_standard_output_is_full(tmp_path):
    pytest.importorskip("sentencepiece")
    done = run(*TRAIN, f"output={tmp_path}", closed=">/dev/full")
    assert done.stderr == (
        "standard output: cannot be written (No space left on device); training goes on without "
        "it\n"
    )
    assert done.returncode == 0
    assert (tmp_path / "average.pt").exists()
    # An error keeps its sentence and its exit code.
    done = run(*TRAIN, f"output={tmp_path}", closed=">/dev/full")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "expected a new folder, got one with an earlier run" in done.stderr


@pytest.fixture
def endless(tmp_path):
    """endless(*words, stdout=...): the process of a run that has begun to train."""
    pytest.importorskip("sentencepiece")
    processes = []

    def begin(*words, **streams):
        steps = ("train.max_steps=1000000", "train.save_every=1000000", f"output={tmp_path}")
        process = subprocess.Popen(
            [sys.executable, *words, *TRAIN, *steps],
            env=os.environ | {"PYTHONUNBUFFERED": ""}, start_new_session=True, **streams,
        )  # fmt: skip
        processes.append(process)
        metrics, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def test_a_stopped_run_keeps_its_exit_code_where_nobody_reads(endless, tmp_path):
    process = endless("-m", "deepfast", stdout=subprocess.PIPE)
    process.stdout.close()
    process.terminate()
    assert process.wait(60) == 143
    assert len(list(tmp_path.glob("step-*.pt"))) == 1


def test_a_run_whose_terminal_is_closed_saves_and_ends(endless, tmp_path):
    ours, terminal = os.openpty()
    program = "import fcntl, runpy, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    program += "runpy.run_module('deepfast', run_name='__main__')"
    process = endless("-c", program, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    os.close(ours)
    assert process.wait(60) == 129
    assert len(list(tmp_path.glob("step-*.pt"))) == 1
    assert not (tmp_path / ".lock").exists()


def test_results_for_a_full_disk_are_an_error(translate):
    # Python's buffer tells which file could not be written.
    done = run("info", closed=">/dev/full", PYTHONUNBUFFERED="")
    sentence = "standard output: cannot be used (No space left on device)"
    assert (done.returncode, done.stderr) == (1, f"deepfast info: {sentence}\n")


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
