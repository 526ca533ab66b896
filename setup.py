"""Installs deepfast without compiling anything: `deepfast build` compiles its C++ ops afterwards.

DEEPFAST_BUILD=1 compiles them into the wheel. This needs torch, ninja and pybind11, so it runs
without build isolation.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

wish = os.environ.get("DEEPFAST_BUILD", "")
if wish not in ("", "0", "1"):
    sys.exit(f"DEEPFAST_BUILD: expected 0, 1 or unset, got {wish!r}")


class BuildOps(build_ext):
    """Writes the library under the name by which deepfast.library finds it."""

    def get_ext_filename(self, fullname):
        from deepfast import build, library

        name = library.file_name(build.why_no_cuda() is None)
        return str(Path(*fullname.split(".")[:-1], name))

    def build_extension(self, ext):
        from deepfast import build

        build.compile_ops(Path(self.get_ext_fullpath(ext.name)).resolve())


# A build front end does not put this folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
compiled = {
    "ext_modules": [Extension("deepfast._C", sources=["csrc/bindings.cpp"])],
    "cmdclass": {"build_ext": BuildOps},
}
setup(
    packages=[
        "deepfast.csrc",
        "deepfast.kernels",
        *find_packages(include=["deepfast", "deepfast.*"], exclude=["deepfast.kernels*"]),
    ],
    package_dir={"deepfast.csrc": "csrc", "deepfast.kernels": "kernels"},
    package_data={
        "deepfast": ["py.typed", "mt/recipes/*.yaml", "measure/*.html"],
        "deepfast.csrc": ["*.cpp", "*/*.cpp", "*/*.cu", "*/*.h"],
    },
    **(compiled if wish == "1" else {}),
)
