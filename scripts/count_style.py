"""Count how the code reads.

Line lengths, expressions that need a second look, comments, docstrings, annotations.

    python scripts/count_style.py                      this project
    python scripts/count_style.py opt_einsum lineax    installed packages, beside it

Numbers are per 1,000 lines where a share makes no sense; blank lines count.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WIDE = 100
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Counts:
    """What was counted in the files of one package."""

    files: int = 0
    lines: int = 0
    characters: int = 0
    written: int = 0
    wide: int = 0
    conditionals: int = 0
    comprehensions: int = 0
    commented: int = 0
    docstrings: int = 0
    long_docstrings: int = 0
    functions: int = 0
    annotated: int = 0
    longest_function: int = 0
    longest_class: int = 0
    longest_file: int = 0

    def rows(self) -> Iterator[tuple[str, str]]:
        """(what, figure) of every row of the table."""
        per_thousand = 1000 / max(self.lines, 1)
        yield "files, lines", f"{self.files}, {self.lines}"
        yield "mean line", f"{self.characters / max(self.written, 1):.0f}"
        yield f"share over {WIDE} characters", f"{self.wide / max(self.written, 1):.1%}"
        yield "conditional expressions per 1,000", f"{self.conditionals * per_thousand:.0f}"
        yield "comprehensions per 1,000", f"{self.comprehensions * per_thousand:.0f}"
        yield "lines with a comment per 1,000", f"{self.commented * per_thousand:.0f}"
        share = self.long_docstrings / max(self.docstrings, 1)
        yield "docstrings longer than one line", f"{share:.0%}"
        yield "functions with annotations", f"{self.annotated / max(self.functions, 1):.0%}"
        yield "longest function, lines", f"{self.longest_function}"
        yield "longest class, lines", f"{self.longest_class}"
        yield "longest file, lines", f"{self.longest_file}"


def count(folder: Path) -> Counts:
    """Counts over all Python files of a folder, tests inside it left out."""
    total = Counts()
    for path in sorted(folder.rglob("*.py")):
        if "tests" in path.relative_to(folder).parts:
            continue
        _add(total, path.read_text(encoding="utf-8"))
    return total


def _add(total: Counts, text: str) -> None:
    lines = text.splitlines()
    written = [line for line in lines if line.strip()]
    total.files += 1
    total.lines += len(lines)
    total.written += len(written)
    total.characters += sum(len(line) for line in written)
    total.wide += sum(len(line) > WIDE for line in written)
    total.longest_file = max(total.longest_file, len(lines))
    total.commented += _commented(text)
    for node in ast.walk(ast.parse(text)):
        _add_node(total, node)


def _add_node(total: Counts, node: ast.AST) -> None:
    total.conditionals += isinstance(node, ast.IfExp)
    total.comprehensions += isinstance(node, COMPREHENSIONS)
    if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)):
        docstring = ast.get_docstring(node)
        total.docstrings += docstring is not None
        total.long_docstrings += docstring is not None and "\n" in docstring
    if isinstance(node, FUNCTIONS):
        given = [*node.args.args, *node.args.kwonlyargs]
        hints = [argument.annotation for argument in given] + [node.returns]
        total.functions += 1
        total.annotated += any(hint is not None for hint in hints)
        total.longest_function = max(total.longest_function, _length(node))
    if isinstance(node, ast.ClassDef):
        total.longest_class = max(total.longest_class, _length(node))


def _length(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1


def _commented(text: str) -> int:
    """Lines that carry a comment, alone or behind code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed")
    return Path(spec.origin).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", help="installed packages to count as well")
    packages = parser.parse_args().packages
    folders = [Path(__file__).parent.parent / "tnsim", *map(_folder, packages)]
    columns = [dict(count(folder).rows()) for folder in folders]
    names = ["tnsim", *packages]
    print(f"{'':<36}" + "".join(f"{name:>14}" for name in names))
    for row in columns[0]:
        print(f"{row:<36}" + "".join(f"{column[row]:>14}" for column in columns))


if __name__ == "__main__":
    main()
