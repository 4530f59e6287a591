"""Count how the code reads.

Sizes, comments, docstrings and their words, lengths of functions, arguments, nesting, names.

    python scripts/count_style.py                      this project
    python scripts/count_style.py opt_einsum lineax    installed packages or folders, beside it

Numbers are per 1,000 lines where a share makes no sense; blank lines count, tests do not.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import re
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Statements whose bodies a reader has to keep in mind one inside the other.
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
DEEP, MANY = 3, 5
PRONOUNS = ("what", "one", "those", "whose")  # words that often stand in the place of a noun
SECTIONS = ("Args:", "Attributes:", "Arguments:")
# An argument entry that begins with one of these words is no phrase that stands alone.
FRAGMENT = re.compile(r"(Of|As|By|Its|Whose|In|From|That|What|Those)\b")
ENTRY = re.compile(r"(?:    )?[*\w, ]+(?: \([^)]*\))?: (\S.*)")


class Module(NamedTuple):
    """A file as text, as a syntax tree and under the name by which it is imported."""

    name: str
    text: str
    tree: ast.Module


def modules(folder: Path) -> list[Module]:
    """All Python files of a package, tests left out."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        place = path.relative_to(folder)
        if {"tests", "test"} & {*place.parts} or path.stem.endswith("_test"):
            continue
        text = path.read_text(encoding="utf-8")
        name = ".".join((folder.name, *place.with_suffix("").parts)).removesuffix(".__init__")
        found.append(Module(name, text, ast.parse(text)))
    return found


def rows(package: Sequence[Module]) -> Iterator[tuple[str, str]]:
    """Names and figures of all rows of the table."""
    lines = [len(module.text.splitlines()) for module in package]
    nodes = [node for module in package for node in ast.walk(module.tree)]
    functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
    classes = [_length(node) for node in nodes if isinstance(node, ast.ClassDef)]
    per_thousand = 1000 / max(sum(lines), 1)

    yield "files, lines", f"{len(package)}, {sum(lines):,}"
    yield "lines of the median file, the longest", f"{statistics.median(lines):.0f}, {max(lines):,}"
    yield "files that one file alone imports", f"{_one_importer(package)}"
    yield "functions a file", f"{len(functions) / len(package):.1f}"
    yield "public names a file", f"{sum(map(_public, package)) / len(package):.1f}"

    comments = sum(_commented(module.text) for module in package)
    yield "lines with a comment per 1,000", f"{comments * per_thousand:.0f}"
    documented = [
        node for node in nodes if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module))
    ]
    docstrings = [text for node in documented if (text := ast.get_docstring(node))]
    written = sum(len(text.splitlines()) for text in docstrings)
    yield "docstring lines per 1,000", f"{written * per_thousand:.0f}"
    yield "docstrings longer than one line", _share("\n" in text for text in docstrings)
    words = Counter(re.findall(r"[a-z]+", " ".join(docstrings).lower()))
    each = 1000 / max(words.total(), 1)
    figures = [f"{words[word] * each:.1f}" for word in PRONOUNS]
    yield f"{', '.join(PRONOUNS)} per 1,000 words", ", ".join(figures)
    entries = [entry for text in docstrings for entry in _entries(text)]
    fragments = sum(FRAGMENT.match(entry) is not None for entry in entries)
    yield "argument entries (Google), no phrases", f"{len(entries):,}, {fragments}"

    yield "function length, median / p90 / max", _spread([*map(_length, functions)])
    yield "longest class, lines", f"{max(classes, default=0)}"
    conditional = sum(isinstance(node, ast.IfExp) for node in nodes)
    yield "conditional expressions per 1,000", f"{conditional * per_thousand:.0f}"
    comprehensions = sum(isinstance(node, COMPREHENSIONS) for node in nodes)
    yield "comprehensions per 1,000", f"{comprehensions * per_thousand:.0f}"
    arguments = [len(_arguments(node)) for node in functions]
    yield "arguments, mean / p90 / max", _spread(arguments, mean=True)
    yield f"functions of more than {MANY} arguments", _share(n > MANY for n in arguments)
    depths = [_depth(node) for node in functions]
    yield "nesting, mean / p90 / max", _spread(depths, mean=True)
    yield f"functions nested {DEEP} deep or more", _share(depth >= DEEP for depth in depths)
    yield "functions with annotations", _share(map(_is_annotated, functions))
    names = [name for node in functions if not _is_special(name := node.name)]
    yield "function names of one word", _share("_" not in name.strip("_") for name in names)


def _share(answers: Iterator[bool] | map[bool]) -> str:
    told = list(answers)
    return f"{sum(told) / max(len(told), 1):.0%}"


def _spread(values: list[int], mean: bool = False) -> str:
    values = sorted(values) or [0]
    first = f"{statistics.mean(values):.1f}" if mean else f"{statistics.median(values):.0f}"
    return f"{first} / {values[int(0.9 * (len(values) - 1))]} / {values[-1]}"


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.AST) -> int:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    return last - first + 1


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """Arguments without self and cls."""
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [argument for argument in given if argument.arg not in ("self", "cls")]


def _is_annotated(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return node.returns is not None or any(arg.annotation for arg in _arguments(node))


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _depth(node: ast.AST) -> int:
    """Blocks inside one another in a function; functions inside it count for themselves."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            continue
        # An `elif` is an `if` in the else of another, and no deeper than that for a reader.
        further = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        deepest = max(deepest, _depth(child) + (isinstance(child, BLOCKS) and not further))
    return deepest


def _commented(text: str) -> int:
    """Lines that carry a comment, alone or behind code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def _public(module: Module) -> int:
    """Functions and classes of a file that do not begin with an underscore."""
    defined = [node for node in module.tree.body if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
    return sum(not node.name.startswith("_") for node in defined)


def _entries(docstring: str) -> Iterator[str]:
    """Descriptions of the arguments in a docstring of Google's form."""
    inside = False
    for line in docstring.splitlines():
        if line.strip() in SECTIONS:
            inside = True
        elif line and not line.startswith(" "):
            inside = False
        elif inside and (entry := ENTRY.fullmatch(line)):
            yield entry[1]


def _one_importer(package: Sequence[Module]) -> int:
    """Files with exactly one importer, which is in their own folder."""
    known = {module.name for module in package}
    importers: dict[str, set[str]] = {name: set() for name in known}
    for module in package:
        for node in ast.walk(module.tree):
            for name in _imported(node, module.name):
                if name in known and name != module.name:
                    importers[name].add(module.name)
    alone = [(name, *users) for name, users in importers.items() if len(users) == 1]
    return sum(name.rpartition(".")[0] == user.rpartition(".")[0] for name, user in alone)


def _imported(node: ast.AST, importer: str) -> Iterator[str]:
    """Modules that a statement imports, whether it names them or something in them."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parent = importer.split(".")[: -node.level]
            base = ".".join((*parent, *base.split("."))).strip(".")
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


def _folder(package: str) -> Path:
    if Path(package).is_dir():
        return Path(package)
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is neither installed nor a folder")
    return Path(spec.origin).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", help="installed packages, or folders of packages")
    packages = parser.parse_args().packages
    folders = [Path(__file__).parent.parent / "tnsim", *map(_folder, packages)]
    columns = [dict(rows(modules(folder))) for folder in folders]
    widths = [max(len(figure) for figure in column.values()) for column in columns]
    names = [folder.name for folder in folders]
    table = [["", *names], *([row, *(column[row] for column in columns)] for row in columns[0])]
    first = max(len(row) for row in columns[0])
    for row, *figures in table:
        cells = [
            figure.rjust(max(width, len(name)))
            for figure, width, name in zip(figures, widths, names, strict=True)
        ]
        print("  ".join((row.ljust(first), *cells)))


if __name__ == "__main__":
    main()
