"""Small HTML tables for notebooks, with all text escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any


def html_table(title: str, rows: Iterable[Sequence[Any]], header: Sequence[Any] = ()) -> str:
    """An HTML table with a caption; the first cell of a row is its name.

    Args:
        title: Caption of the table.
        rows: Cells of every row; text is escaped, never parsed as markup.
        header: Names of the columns; empty for a list of properties.

    Returns:
        A `<table>` element.

    Example:
        >>> html_table("A model", [("degree", 2)])
        '<table><caption>A model</caption><tr><th>degree</th><td>2</td></tr></table>'
    """
    lines = [f"<caption>{_escaped(title)}</caption>"]
    if header:
        lines.append(f"<tr>{_cells('th', header)}</tr>")
    for name, *values in rows:
        lines.append(f"<tr>{_cells('th', [name])}{_cells('td', values)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _cells(tag: str, texts: Iterable[Any]) -> str:
    return "".join(f"<{tag}>{_escaped(text)}</{tag}>" for text in texts)


def _escaped(text: Any) -> str:
    """The text without markup.

    Half of a surrogate pair, as in an undecodable file name, cannot be part of a page, so its
    escape replaces it.
    """
    return html.escape(str(text)).encode("utf-8", "backslashreplace").decode()
