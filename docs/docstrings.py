"""An extension of griffe: docstrings, which are written to be read as text, as Markdown."""

import re

import griffe

SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields):$")
APART = re.compile(r"\S {3,}\S")


def as_markdown(text: str) -> str:
    """``::`` before a block becomes ``:``, and a paragraph in columns becomes a block of code."""
    done = []
    for paragraph in re.sub(r"::$", ":", text, flags=re.MULTILINE).split("\n\n"):
        lines = paragraph.split("\n")
        columns = any(APART.search(line) for line in lines)
        indented = all(line.startswith("    ") for line in lines)
        if columns and not indented and not SECTION.match(lines[0]):
            lines = [f"    {line}".replace("``", "") for line in lines]
        if lines[0] == "Attributes:":
            # griffe takes the word behind a space for a type.
            lines = [re.sub(r"^    (\w+), (\w+): ", r"    \1,\2: ", line) for line in lines]
        done.append("\n".join(lines))
    return "\n\n".join(paragraph for paragraph in done if paragraph != ":")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        """A function hides the module that has its name, as in Python."""
        for package in [pkg, *(m for m in pkg.modules.values() if m.is_subpackage)]:
            self.on_object(obj=package)
            for name in package.exports or ():
                if name in package.modules and name in package[name].members:
                    package[str(name)] = package[name][name]
