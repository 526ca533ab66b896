"""Shared fixtures: seeds, threads, backends, tolerances, poisoned memory, a memory meter."""

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
import torch

ROOT = Path(__file__).parents[1]

# The same examples each time, on a machine of any speed.
hypothesis.settings.register_profile(
    "deepfast",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=20,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("deepfast")

# Programs that the tests start find the package of this tree, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
# triton.jit reads this when a test imports a kernel file: without a GPU kernels run in Triton's
# interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config):
    # A shell's background jobs ignore Ctrl-C, and nohup's the end of a terminal. So would every
    # process that the tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Most tensors here are tiny, and with several workers each has a core.
    torch.set_num_threads(1)


def _refuse_missing_package(report):
    """With CI=true a test does not skip for a package: `make setup` installs each of them."""
    ci = os.environ.get("CI") == "true"
    if ci and report.skipped and "could not import" in str(report.longrepr):
        report.outcome = "failed"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return _refuse_missing_package((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return _refuse_missing_package((yield))


def pytest_collection_finish():
    # Modules and items stay. Without them, collecting garbage takes 0.3 s less each time.
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(scope="session")
def tolerances():
    """The table of tolerances and the assertions on it."""
    return importlib.import_module("tests.tolerances")


@pytest.fixture(scope="session")
def _emulated_library():
    build = importlib.import_module("tests.cuda.build")
    try:
        build.compiler()
    except build.BuildError as error:
        pytest.skip(f"the CUDA kernels are not emulated: {error}")
    torch.ops.load_library(build.build())
    return torch.ops.deepfast_emulated


@pytest.fixture
def emulated(_emulated_library):
    """The CUDA kernels on this processor: backend "cuda" takes tensors on a CPU."""
    from deepfast import backend

    with pytest.MonkeyPatch.context() as patch:
        importlib.import_module("tests.cuda.build").emulate(patch.setattr)
        yield _emulated_library
    backend.forget()


@pytest.fixture
def backend(exact_backend):
    """Each backend that can run here, by name."""
    return exact_backend


@pytest.fixture(params=["cpu", "reference"])
def exact_backend(request):
    """Each backend that computes in float64."""
    from deepfast import backend

    reason = backend.why_unable("layer_norm", request.param, "cpu", torch.float64)
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture(params=["cpu", "reference", "triton"])
def any_backend(request):
    """Each backend that has kernels of every op here; Triton's run in its interpreter."""
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


@pytest.fixture
def ran():
    """``with ran(op, backend): ...`` asserts that the op ran inside, and only on that backend."""
    from deepfast import backend

    @contextlib.contextmanager
    def check(op, name):
        with backend.record() as seen:
            yield
        assert set(seen) == {(op, name)}

    return check


@pytest.fixture
def poison():
    """Fresh memory is NaN, so a result that is never written is found."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.fixture(autouse=True)
def _seeded(request):
    """Tests of these folders run on poisoned memory."""
    torch.manual_seed(0)
    folders = (ROOT / "tests" / name for name in ("depth", "nn", "ops"))
    if any(map(request.path.is_relative_to, folders)):
        request.getfixturevalue("poison")


@pytest.fixture
def threads():
    """``with threads(n): ...`` runs on n threads."""

    @contextlib.contextmanager
    def use(n):
        before = torch.get_num_threads()
        torch.set_num_threads(n)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    return use


@pytest.fixture
def meter():
    """``with meter() as m: ...`` counts the bytes that the CPU allocator gives out: ``m.peak``, and
    those left at the end, ``m.left``."""

    @contextlib.contextmanager
    def count():
        result = SimpleNamespace(peak=0, left=0)
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            yield result
        events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(events, key=lambda e: e.start_ns()):
            result.left += event.nbytes()
            result.peak = max(result.peak, result.left)

    return count


@pytest.fixture(scope="session")
def python():
    """Runs a program in a fresh interpreter with further environment variables."""

    def run(*args, check=True, timeout=300, **environment):
        done = subprocess.run(
            [sys.executable, *args],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def one_rank():
    """The process group of this process alone."""
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def agree_on_ranks(tmp_path):
    """``agree_on_ranks(count, step, forms)`` runs ``step`` of every form in ``count`` processes
    of gloo. The parts of a form, which slashes divide, are the arguments of ``step``."""
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")

    def run(count, step, forms):
        args = tmp_path / "store", count, step, forms
        # A new process takes seconds to import torch. CUDA and autograd's threads cannot be forked.
        method = "spawn" if torch.cuda.is_available() else "fork"
        torch.multiprocessing.start_processes(_rank, args, count, start_method=method)

    return run


def _rank(rank, store, count, step, forms):
    torch.distributed.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=120)
    )
    for form in forms:
        try:
            step(*form.split("/"))
        except Exception as error:
            error.add_note(f"{form}, rank {rank}")
            raise
    torch.distributed.destroy_process_group()
