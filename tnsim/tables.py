"""Properties as a reader gets them: small HTML tables for notebooks, and attributes in words."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
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
    lines = [f"<caption>{_escaped_text(title)}</caption>"]
    if header:
        lines.append(f"<tr>{_table_cells('th', header)}</tr>")
    for name, *values in rows:
        lines.append(f"<tr>{_table_cells('th', [name])}{_table_cells('td', values)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def in_words(attributes: Mapping[Any, Any]) -> dict[Any, Any]:
    """Attributes of a result with `yes`, `no` and `none` in the place of 1, 0 and no caveats.

    Files hold numbers there, because formats such as netCDF know no truth values.

    Args:
        attributes: Attributes by name.

    Returns:
        The same names, in the same order.

    Example:
        >>> in_words({"metric": "gaussian", "exact": 1, "symmetric": 0, "caveats": []})
        {'metric': 'gaussian', 'exact': 'yes', 'symmetric': 'no', 'caveats': 'none'}
    """
    said = dict(attributes)
    for name in ("exact", "symmetric"):
        if name in said:
            said[name] = "yes" if said[name] else "no"
    if "caveats" in said:
        # A file that holds a single caveat gives a text.
        caveats = [said["caveats"]] if isinstance(said["caveats"], str) else said["caveats"]
        said["caveats"] = "; ".join(map(str, caveats)) or "none"
    return said


def _table_cells(tag: str, texts: Iterable[Any]) -> str:
    return "".join(f"<{tag}>{_escaped_text(text)}</{tag}>" for text in texts)


def _escaped_text(text: Any) -> str:
    """The text without markup.

    Half of a surrogate pair, as in an undecodable file name, cannot be part of a page, so its
    escape replaces it.
    """
    return html.escape(str(text)).encode("utf-8", "backslashreplace").decode()
