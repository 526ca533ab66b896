"""How a language model computes its loss, read from the code of its forward.

The loss is known if it is an output layer and a cross entropy of its result, and if no other
statement that runs has to do with the labels, the logits or the loss. Then the model runs without
labels as with them, and its output layer may return the loss in place of the logits.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from deepfast.integrations.swap import definition

SHIFTED = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}
"""Name of a loss function of transformers -> whether each position predicts the next token."""

_LOSS = re.compile(
    r"if labels is not None:\n"
    r"(?:    labels = labels\.to\(\w+\.device\)\n"
    r"|    (?P<torch_dropout>\w+) = (?P<kind>(?:nn\.)?CrossEntropyLoss)\(\)\n)*"
    r"    (?P<loss>\w+) = (?:"
    r"self\.loss_function\((?:logits=)?(?P<logits>\w+), (?:labels=)?labels, "
    r"(?:vocab_size=)?[\w.]+(?:, \*\*(?P<options>\w+))?\)|"
    r"(?P=torch_dropout)\((?P<scores>\w+)\.view\(-1, [\w.]+\), labels\.view\(-1\)\))"
)
_TUPLE = (
    r"if not return_dict:\n    output = \({logits},\)(?: \+ \w+\[\d+:\])?\n"
    r"    return \({loss},\) \+ output if {loss} is not None else output"
)
_DEFAULT = r"{0} = {0} if {0} is not None else (self\.config\.[\w.]+)"


def lookup(owner: Any, path: str) -> Any:
    """``owner.path``, or None."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


class Unknown(ValueError):
    """Why the loss of a model is not known."""


class Form(NamedTuple):
    """The loss of a model."""

    head: str
    """The path of its output layer."""
    function: str | None
    """The name of its ``loss_function``; None for torch's CrossEntropyLoss."""
    options: bool
    """Whether the keywords of forward reach that function."""
    off: list[str]
    """Arguments of forward with which it runs other code."""
    settings: dict[str, Any]
    """Attributes of the model, and their values with which it runs this code."""


def loss_function(model: Any) -> str | None:
    """The name of the model's loss function, if it is a known one of transformers."""
    found = getattr(model, "loss_function", None)
    if getattr(found, "__module__", None) != "transformers.loss.loss_utils":
        return None
    return found.__name__ if found.__name__ in SHIFTED else None


def read(model: nn.Module) -> Form:
    """The loss of ``model``.

    Raises:
        Unknown: with the reason.
    """
    code = _code(model)
    if "labels" not in _parameters(code):
        raise Unknown("its forward has no argument labels")
    found = [(s, m) for s in code.body if (m := _LOSS.fullmatch(ast.unparse(s)))]
    if len(found) != 1:
        raise Unknown("its forward has no cross entropy of a known form")
    at, match = found[0]
    options, function = match["options"], None
    if match["kind"]:
        name = match["kind"].partition(".")[0]
        if _global(model, name) is not {"nn": nn}.get(name, nn.CrossEntropyLoss):
            raise Unknown("its CrossEntropyLoss is not torch's")
    else:
        function = loss_function(model)
        if function is None:
            raise Unknown("its loss_function is not one of transformers'")
        if options and not _passes_on(code, options):
            raise Unknown("its forward gives its loss_function other arguments than it gets")
    branches = _Branches(model, code)
    made = _logits(branches, at, match["loss"], match["logits"] or match["scores"])
    return Form(_head(model, made), function, bool(options), branches.off, branches.settings)


def _code(module: nn.Module) -> ast.FunctionDef:
    kind = type(module).__name__
    if "forward" in vars(module):
        raise Unknown(f"the forward of this {kind} is not that of its class")
    code = definition(type(module).forward)
    if code is None:
        raise Unknown(f"the code of {kind}.forward cannot be read")
    return code


def _parameters(code: ast.FunctionDef) -> list[str]:
    return [a.arg for a in (*code.args.posonlyargs, *code.args.args, *code.args.kwonlyargs)]


def _global(model: nn.Module, name: str) -> Any:
    """What ``name`` means in the code of forward."""
    function = inspect.unwrap(type(model).forward)
    return None if name in function.__code__.co_varnames else function.__globals__.get(name)


def _passes_on(code: ast.FunctionDef, options: str) -> bool:
    """Whether ``options`` are the keywords of forward, which are passed on and nothing else, and
    have all that the loss functions know."""
    nodes = list(ast.walk(code))
    passed = [n.value for n in nodes if isinstance(n, ast.keyword) and n.arg is None]
    return (
        code.args.kwarg is not None
        and code.args.kwarg.arg == options
        and {"num_items_in_batch", "ignore_index"}.isdisjoint(_parameters(code))
        and all(n in passed for n in nodes if isinstance(n, ast.Name) and n.id == options)
    )


def _names(code: ast.AST, stored: bool = False) -> set[str]:
    """The variables in ``code``, or those that it sets."""
    found = (n for n in ast.walk(code) if isinstance(n, ast.Name))
    return {n.id for n in found if not stored or isinstance(n.ctx, ast.Store)}


def _assigned(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    """The variable and the value of an assignment."""
    match statement:
        case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, value):
            return name, value
    return None, None


def _quoted(code: ast.AST) -> str:
    line = " ".join(ast.unparse(code).split())
    return f"`{line[:100]}{'...' if len(line) > 100 else ''}`"


def _path(code: ast.AST) -> str | None:
    """``a.b`` of the code ``self.a.b``."""
    found = re.fullmatch(r"self\.(\w+(?:\.\w+)*)", ast.unparse(code))
    return None if found is None else found[1]


class _Branches:
    """The statements of a forward that run with the settings of its model."""

    def __init__(self, model: nn.Module, code: ast.FunctionDef):
        self.model, self.code = model, code
        self.off: list[str] = []
        self.settings: dict[str, Any] = {}

    def statements(self, body: list[ast.stmt], tracked: set[str]) -> Iterator[ast.stmt]:
        """Those of ``body``, with a branch in the place of an ``if`` that has ``tracked`` variables
        and that the settings decide."""
        for s in body:
            runs = self._decided(s.test) if isinstance(s, ast.If) and _names(s) & tracked else None
            if runs is None:
                yield s
            else:
                yield from self.statements(s.body if runs else s.orelse, tracked)  # type: ignore

    def _decided(self, test: ast.expr) -> bool | None:
        match test:
            case ast.BoolOp(ast.And(), values):
                return False if any(self._decided(v) is False for v in values) else None
            case ast.Name(name):
                return self._argument(name)
            case ast.Attribute() if _path(test) not in (None, "training"):
                return bool(self._setting(test))
            case ast.Compare(left, [ast.IsNot()], [ast.Constant(None)]) if _path(left):
                return self._setting(left) is not None
            case ast.Compare(left, [ast.Eq()], [ast.Constant(value)]) if _path(left):
                return self._setting(left) == value
        return None

    def _setting(self, code: ast.expr) -> Any:
        path: Any = _path(code)
        value = self.settings[path] = lookup(self.model, path)
        if not isinstance(value, bool | int | float | str | None):
            raise Unknown(f"its forward depends on {path}, a {type(value).__name__}")
        return value

    def _argument(self, name: str) -> bool | None:
        """An argument of forward that is None unless given, and then a setting. One that comes
        after the labels is given as a keyword."""
        sets = [s for s in self.code.body if name in _names(s, stored=True)]
        parameters = _parameters(self.code)
        if len(sets) != 1 or name not in parameters[parameters.index("labels") :]:
            return None
        found = re.fullmatch(_DEFAULT.format(name), ast.unparse(sets[0]))
        if found is None:
            return None
        self.off.append(name)
        return bool(self._setting(ast.parse(found[1], mode="eval").body))


def _logits(branches: _Branches, at: ast.stmt, loss: str, logits: str) -> ast.expr:
    """The code of the logits. Raises Unknown if another statement touches what the loss has to do
    with."""
    tracked, made, after = {"labels", loss, logits}, None, False
    for s in branches.statements(branches.code.body, tracked):
        used, (name, value) = _names(s) & tracked, _assigned(s)
        if s is at:
            after = True
        elif not after and used == {logits} == {name}:
            made = value
        elif not (
            not used
            or (not after and name == loss and ast.unparse(s).endswith(" = None"))
            or (after and _returns(branches.model, s, loss, logits))
        ):
            raise Unknown(f"besides a head and cross entropy its forward has {_quoted(s)}")
    if made is None:
        raise Unknown("its logits are not the result of a layer")
    return made


def _returns(model: nn.Module, statement: ast.stmt, loss: str, logits: str) -> bool:
    """Whether ``statement`` returns the loss and the logits, as an output of transformers or as a
    tuple."""
    match statement:
        case ast.Return(ast.Call(ast.Name(kind), [], keywords)):
            given = {k.arg: ast.unparse(k.value) for k in keywords}
            more = (k.value for k in keywords if k.arg not in ("loss", "logits"))
            return (
                hasattr(_global(model, kind), "to_tuple")
                and (given.get("loss"), given.get("logits")) == (loss, logits)
                and not any(_names(value) & {"labels", loss, logits} for value in more)
            )
    pattern = _TUPLE.format(loss=loss, logits=logits)
    return re.fullmatch(pattern, ast.unparse(statement)) is not None


def _head(owner: nn.Module, made: ast.expr | None) -> str:
    """The path below ``owner`` of the output layer whose result is ``made``."""
    match made:
        case ast.IfExp(_, one, other) if _head(owner, one) == _head(owner, other):
            return _head(owner, one)
        # They leave a loss in fp32 as it is.
        case ast.Call(ast.Attribute(value, "contiguous" | "float" as method), [], []):
            path = _head(owner, value)
            if method == "float" and lookup(owner, path).weight.dtype == torch.float64:
                raise Unknown("its logits in fp64 are rounded to fp32")
            return path
        case ast.Call(ast.Attribute() as layer) if path := _path(layer):
            found = lookup(owner, path)
            if inspect.ismethod(found):
                return _head(owner, _result(definition(found.__func__)))
            if isinstance(found, nn.Module):
                return path + _below(found, path)
    how = "in more than one statement" if made is None else f"as {_quoted(made)}"
    raise Unknown(f"{type(owner).__name__} computes the logits {how}")


def _below(layer: nn.Module, path: str) -> str:
    """The path of the output layer below ``layer``, with a dot, or nothing if it is that layer."""
    if layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        raise Unknown(f"its {path} has hooks")
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return f".{_head(layer, _result(_code(layer)))}"
    if type(layer.weight) is not nn.Parameter:
        raise Unknown(f"the weight of its {path} is a {type(layer.weight).__name__}")
    return ""


def _result(code: ast.FunctionDef | None) -> ast.expr | None:
    """What ``code`` returns, if that is one call at its end."""
    if code is None or sum(isinstance(n, ast.Return) for n in ast.walk(code)) != 1:
        return None
    match code.body[-2:]:
        case [ast.Assign([ast.Name(name)], value), ast.Return(ast.Name(end))] if name == end:
            return value
        case [*_, ast.Return(value)]:
            return value
    return None
