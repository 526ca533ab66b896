"""Writes C++ from the table of launches: the schemas, and for each launch a struct that fills and
checks itself from the dispatcher's arguments.

    schemas.h      the schemas of deepfast._C, and the registration of the CPU's launches
    launches.h     one struct for each launch, without torch: sizes, pointers and numbers
    launches.cpp   their constructors, which check dtypes, devices, shapes and contiguity
"""

import runpy
from pathlib import Path

# In an installed package this folder lies inside of it, in a clone beside it.
_FOLDER = Path(__file__).resolve().parents[1]
TABLE = _FOLDER / ("launches.py" if (_FOLDER / "launches.py").exists() else "deepfast/launches.py")

WRITTEN = "// Written by the build from deepfast/launches.py."
NUMBERS = {"int": "int64_t", "float": "double", "bool": "bool", "int[]": "Indices"}
TYPES = {"Tensor": "tensor", "Tensor?": "optional", "Tensor[]": "tensors", "int": "integer",
         "int[]": "indices", "float": "number", "bool": "flag", "str": "word"}  # fmt: skip


def struct_name(launch) -> str:
    return "".join(word.capitalize() for word in launch.name.split("_"))


def sizes(launch) -> dict[str, list[tuple[int, int, int]]]:
    """For each letter of the shapes where it is found: (operand, dimension, what is added to it).
    One place in a tensor that is always given is enough."""
    found: dict[str, list] = {}
    certain: dict[str, list] = {}
    for i, o in enumerate(launch.operands):
        for dimension, entry in enumerate(o.shapes[0] if o.shapes else ()):
            letter, _, added = entry.partition("+")
            if len(letter) == 1 and letter.isalpha():
                places = certain if o.type != "Tensor?" else found
                places.setdefault(letter, []).append((i, dimension, int(added or 0)))
    # K is the length of a list of tensors.
    for i, o in enumerate(launch.operands):
        if o.type == "Tensor[]" and not o.writes:
            certain["K"] = [(i, -1, 0)]
    letters = dict.fromkeys([*certain, *found])
    return {a: certain[a][:1] if a in certain else found[a] for a in letters if a != "S"}


def field(o) -> tuple[str, str]:
    """The C++ type of an operand, and the call that fills and checks it; `I` is its number."""
    if o.words:
        words = ", ".join(f'"{word}"' for word in o.words)
        return "Kind", f"static_cast<Kind>(in.word(I, {{{words}}}))"
    if not o.dtype:
        below = [f"{x}.count" if len(x) > 1 else x for x in o.below]
        limit = below[0] if len(below) == 1 else f"std::min({', '.join(below)})" if below else ""
        take = "index" if o.type == "int" and below else TYPES[o.type]
        return NUMBERS[o.type], f"in.{take}(I{', ' * bool(limit)}{limit})"
    first, *more = (", ".join(shape) for shape in o.shapes)
    if o.type == "Tensor[]":
        return "Matrices", f"in.matrices(I, {first})"
    if more:
        return "Weights", f"in.weights(I, {{{first}}}, {more[0].rpartition(', ')[2]})"
    if o.dtype in ("int32", "int64"):
        return f"const {o.dtype}_t*", f"in.{o.dtype}(I, {{{first}}})"
    if o.dense:
        return "void*", f"in.{'dense' if o.dtype == 'storage' else 'compute'}(I, {{{first}}})"
    sums = ", true" * (o.dtype == "compute")
    if len(o.shapes[0]) == 2:
        return "Matrix", f"in.matrix(I, {first}{sums})"
    if o.shapes[0][0] in "SB":
        return "Slots", f"in.slots(I, {first.partition(', ')[2]}{sums})"
    return "Heads", f"in.heads(I, {first})"


def struct(launch) -> str:
    name, letters = struct_name(launch), sizes(launch)
    words = next((o.words for o in launch.operands if o.words), None)
    lines = [f"struct {name} {{", "  static const Signature kSignature;"]
    if words:
        lines.append(f"  enum class Kind {{ {', '.join(words)} }};")
    lines += ["  Storage storage;", f"  int64_t {', '.join(letters)};"]
    for o in launch.operands:
        shapes = " or ".join(f"({', '.join(shape)})" for shape in o.shapes)
        lines.append(f"  {field(o)[0]} {o.name};" + f"  // {shapes}" * bool(shapes))
    if "dropout_p" in launch.names:
        lines.append("  Dropout dropout;")
    lines += [
        f"  explicit {name}(const Arguments& in);",
        "};",
        f"void run({name}& a);  // on the CPU",
    ]
    return "\n".join(lines)


def constructor(launch) -> str:
    name = struct_name(launch)
    names = ", ".join(f'{{"{o.name}", Type::{TYPES[o.type]}}}' for o in launch.operands)
    stored = [i for i, o in enumerate(launch.operands) if o.dtype == "storage"]
    certain = [i for i in stored if launch.operands[i].type != "Tensor?"]
    lines = [
        f"static const Operand {launch.name}_operands[] = {{{names}}};",
        f'const Signature {name}::kSignature = {{"{launch.name}", {len(launch.operands)}, '
        f"{launch.name}_operands}};",
        f"{name}::{name}(const Arguments& in) {{",
        f"  storage = in.storage({certain[0]});",
    ]
    for letter, places in sizes(launch).items():
        said = ", ".join(f"{{{i}, {dimension}, {added}}}" for i, dimension, added in places)
        lines.append(f"  {letter} = in.size({{{said}}});")
    # An index is compared with the number of slots of an operand that may come after it.
    numbered = sorted(enumerate(launch.operands), key=lambda item: bool(item[1].below))
    for i, o in numbered:
        lines.append(f"  {o.name} = {field(o)[1].replace('(I', f'({i}')};")
    if "dropout_p" in launch.names:
        lines.append("  dropout = dropout_of(dropout_p, seed);")
    return "\n".join([*lines, "}"])


def write(folder: Path) -> None:
    """Writes the three files. An unchanged file is not written again, so that its includers are
    compiled again only when the table changes."""
    launches = list(runpy.run_path(str(TABLE))["LAUNCHES"].values())
    schemas = [f'  m.def("{launch.schema}");' for launch in launches]
    rows = [f'  m.impl("{x.name}", &run_boxed<{struct_name(x)}>);' for x in launches]
    files = {
        "schemas.h": [
            '#pragma once\n#include "launches.h"\n\ntemplate <class Library>',
            *("void define_launches(Library& m) {", *schemas, "}\n\nnamespace deepfast {"),
            "template <class Launch>\nvoid run_boxed(uint64_t* stack, uint64_t, uint64_t);",
            *("\ntemplate <class Library>\nvoid register_launches(Library& m) {", *rows, "}\n}"),
        ],
        "launches.h": [
            '#pragma once\n#include "csrc/common/views.h"\n\nnamespace deepfast {',
            *map(struct, launches),
            "}  // namespace deepfast",
            "#define DEEPFAST_LAUNCHES(LAUNCH) \\",
            " \\\n".join(f"  LAUNCH({x.name}, {struct_name(x)})" for x in launches),
        ],
        "launches.cpp": [
            '#include "launches.h"\n\n#include <algorithm>\n\n#include "csrc/common/arguments.h"\n',
            *("namespace deepfast {", *map(constructor, launches), "}  // namespace deepfast"),
        ],
    }
    for name, lines in files.items():
        text, path = "\n".join([WRITTEN, *lines, ""]), folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
