"""Modules of other packages that compute the same by our ops: their class is swapped.

So parameters, names, hooks, buffers and wrappers stay as they are. What a module computes is read
from the code of its forward.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from torch import nn


class Swapped:
    """What a swapped class adds to the class of a module: it comes first among its bases."""

    parts: tuple[type["Swapped"], type[nn.Module]]
    """This class, and the class of the module."""

    def __reduce_ex__(self, protocol) -> Any:
        # The class has no name by which pickle finds it.
        return _empty, type(self).parts, *super().__reduce_ex__(protocol)[2:]


def swapped(own: type[Swapped], plain: type[nn.Module]) -> type:
    """The class ``plain`` with what ``own`` changes. It keeps its name, which other code reads."""
    if (own, plain) not in _made:
        # Hugging Face's Trainer reads the signature.
        @functools.wraps(plain.forward)
        def forward(self, *args, **kwargs):
            return own.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

        body = {
            "__doc__": plain.__doc__, "__module__": plain.__module__,
            "__qualname__": plain.__qualname__, "parts": (own, plain), "forward": forward,
        }  # fmt: skip
        _made[own, plain] = type(plain.__name__, (own, plain), body)
    return _made[own, plain]


_made: dict[tuple[type, type], type] = {}


def _empty(own: type[Swapped], plain: type[nn.Module]):
    """For pickle: an instance of the swapped class, before its state is set."""
    cls: Any = swapped(own, plain)
    return cls.__new__(cls)


class Handle:
    """What was swapped. ``remove()`` undoes it."""

    def __init__(self):
        self._undo: list = []

    def swap(self, module: nn.Module, own: type[Swapped]) -> None:
        plain = type(module)
        module.__class__ = swapped(own, plain)
        self._undo.append(lambda: setattr(module, "__class__", plain))

    def __len__(self) -> int:
        """Changes that remove() undoes."""
        return len(self._undo)

    def remove(self) -> None:
        """Makes every module what it was. A second call does nothing."""
        while self._undo:
            self._undo.pop()()


PACKAGES = ("torch", "transformers")
"""Their decorators of a forward leave its arguments and its results as they are."""


@functools.cache
def definition(function: Callable) -> ast.FunctionDef | None:
    """The code of ``function`` without its docstring, or None where it cannot be read."""
    while hasattr(function, "__wrapped__"):
        module = getattr(function, "__globals__", {}).get("__name__", "")
        if module.partition(".")[0] not in PACKAGES:
            return None
        function = function.__wrapped__
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        # It is compiled, was typed into an interpreter, or is a lambda.
        return None
    if not isinstance(found, ast.FunctionDef):
        return None
    if ast.get_docstring(found) is not None:
        del found.body[0]
    return found


def text(code: ast.FunctionDef) -> str:
    """The statements, spelled in one way and without comments."""
    return "\n".join(map(ast.unparse, code.body))
