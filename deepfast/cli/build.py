"""Compiles the C++ ops against the torch that is installed, about two minutes on two cores.

Without them everything runs on torch's ops. The CUDA C++ kernels are compiled too where torch has
CUDA and an nvcc of its major version is found. The library is written into the package, or into the
user's cache folder where the package is read-only. A second call compiles only what changed."""

import argparse
import time

EXAMPLE = "deepfast build"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The environment has the options: CXX, MAX_JOBS, DEEPFAST_BUILD_CUDA."""


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from deepfast import build

    start, target, left_out = time.monotonic(), build.choose_target(), build.why_no_cuda()
    print(f"The compiler is {build.compiler()}, jobs: {build.parallel_jobs()}.")
    if left_out is not None:
        print(f"The CUDA C++ kernels are left out: {left_out}.")
    columns = "compiling", BarColumn(), MofNCompleteColumn(), "files", TimeElapsedColumn()
    with Progress(*columns, console=Console()) as progress:
        # Until the number of files is known, another process may be compiling.
        task = progress.add_task("", total=None)

        def begin(files: int, seconds: float) -> None:
            progress.print(f"{files} files to compile: about {seconds:.0f} s.", highlight=False)
            progress.update(task, total=files)

        build.compile_ops(target, begin, lambda done: progress.update(task, completed=done))
    print(f"{target}: done in {time.monotonic() - start:.0f} s.")
    return 0
