"""Small tables for notebooks. In: rows of words and numbers. Out: HTML, all text escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any


def html_table(title: str, rows: Iterable[Sequence[Any]], header: Sequence[Any] = ()) -> str:
    """A table with a caption; the first cell of a row names it.

    Args:
        title: the caption.
        rows: cells of every row; text is escaped, never parsed as markup.
        header: names of the columns, none for a list of properties.

    Returns:
        One `<table>` element.

    Example:
        >>> html_table("A model", [("degree", 2)])
        '<table><caption>A model</caption><tr><th>degree</th><td>2</td></tr></table>'
    """
    lines = [f"<caption>{_escaped(title)}</caption>"]
    if header:
        lines.append("<tr>" + "".join(f"<th>{_escaped(name)}</th>" for name in header) + "</tr>")
    for name, *cells in rows:
        values = "".join(f"<td>{_escaped(cell)}</td>" for cell in cells)
        lines.append(f"<tr><th>{_escaped(name)}</th>{values}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _escaped(text: Any) -> str:
    """Markup taken for text; half of a surrogate pair, which no page can hold, as its escape."""
    return html.escape(str(text)).encode("utf-8", "backslashreplace").decode()
