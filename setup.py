"""Installs deepfast; csrc/build.py compiles its ops.

Environment: CXX names the compiler, MAX_JOBS limits parallel compiles, DEEPFAST_BUILD_CUDA=0 leaves
CUDA out and =1 makes a build without CUDA an error.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

if importlib.util.find_spec("torch") is None:
    sys.exit(
        "deepfast is compiled against the PyTorch you use, and torch was not found: install torch "
        "first, then run `pip install --no-build-isolation .` (or `make setup`)"
    )

# Loaded by path, because a build front end does not put this folder on sys.path.
spec = importlib.util.spec_from_file_location("build", Path(__file__).parent / "csrc" / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


class BuildOps(build_ext):
    """Compiles csrc/, or says that no compiler was found and leaves the ops out."""

    def build_extension(self, ext):
        if build.compiler() is None:
            print(
                "deepfast: no C++ compiler was found (set CXX to name one); installing without "
                "the compiled ops; the reference backend will run instead",
                file=sys.stderr,
            )
            ext.optional = True
            return
        build.compile_ops(Path(self.get_ext_fullpath(ext.name)).resolve())

    def get_outputs(self):
        return [path for path in super().get_outputs() if Path(path).exists()]


setup(
    packages=[
        "deepfast.kernels",
        *find_packages(include=["deepfast", "deepfast.*"], exclude=["deepfast.kernels*"]),
    ],
    package_dir={"deepfast.kernels": "kernels"},
    package_data={"deepfast": ["py.typed", "mt/recipes/*.yaml", "measure/*.html"]},
    ext_modules=[Extension("deepfast._C", sources=["csrc/bindings.cpp"])],
    cmdclass={"build_ext": BuildOps},
)
