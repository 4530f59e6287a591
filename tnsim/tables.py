"""What a reader gets: HTML tables for notebooks, attributes in words, and cells of spreadsheets."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_CELLS = re.compile(r"([\n\r\v\f\x1c-\x1e\x85\u2028\u2029\t,;|])")
"""Ends of lines and separators, behind which some reader of CSV begins a cell."""
_NAMED = 8  # names of what belongs to no part, of which there may be hundreds


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


def guarantee(exact: bool, standard_errors: Iterable[float] | None = None) -> str:
    """The relation of a number, or of shares, to the true one, in words.

    Args:
        exact: Whether the result calls itself exact.
        standard_errors: Standard errors of shares; None where nothing was sampled.

    Example:
        >>> guarantee(False, [0.01, 0.02])
        'estimate from samples, standard errors of shares up to 0.02'
    """
    if standard_errors is not None:
        most = max(standard_errors)
        return f"estimate from samples, standard errors of shares up to {most:.2g}"
    return "exact" if exact else "approximation beyond one nonlinear layer"


def in_words(attributes: Mapping[Any, Any]) -> dict[Any, Any]:
    """Attributes of a result in words: `yes` and `no` for 1 and 0, `none` for no caveats.

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
        said["caveats"] = "; ".join(listed(said["caveats"])) or "none"
    if "rest" in said:
        names = listed(said["rest"])
        shown = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        said["rest"] = f"differs in {len(names)}: {shown}" if names else "does not differ"
    return said


def listed(attribute: Any) -> list[str]:
    """An attribute that is a list of texts, of which netCDF makes a text with a line for each.

    Example:
        >>> listed(["a"]), listed("a\\nb"), listed([])
        (['a'], ['a', 'b'], [])
    """
    return attribute.splitlines() if isinstance(attribute, str) else list(map(str, attribute))


def cell(label: Any) -> Any:
    """A label as a cell of a table, of which no spreadsheet makes a formula.

    Whatever the separator and whether or not quotes count, a cell may begin at the label, behind an
    end of a line or behind a separator. Programs drop blanks, control characters and marks without
    a width before they look for a formula, and take wide forms of its first sign.

    Args:
        label: Label of a model or of a part.

    Returns:
        Text that UTF-8 holds, with an apostrophe, by which spreadsheets know text, wherever a
        formula might begin and before a label that begins with a control character. A label that is
        no text is returned as it is.

    Example:
        >>> cell("=1+1"), cell("a; =1+1"), cell("a=1"), cell(-1)
        ("'=1+1", "a;' =1+1", 'a=1', -1)
    """
    if not isinstance(label, str):
        return label
    pieces = _CELLS.split(label.encode("utf-8", "backslashreplace").decode())
    escaped = "".join([f"'{piece}" if _is_formula(piece) else piece for piece in pieces])
    return f"'{escaped}" if label[:1] in ("\t", "\r", "\n") else escaped


def _is_formula(text: str) -> bool:
    """Whether the first sign that a spreadsheet sees in a text begins a formula."""
    # Blanks, controls, marks, quotes, and letters without ink.
    seen = (
        sign
        for sign in text
        if unicodedata.category(sign)[0] not in "ZCM"
        and sign not in '"\u115f\u1160\u2800\u3164\uffa0'
    )
    return unicodedata.normalize("NFKC", next(seen, " "))[0] in "=+-@"


def _table_cells(tag: str, texts: Iterable[Any]) -> str:
    return "".join(f"<{tag}>{_escaped_text(text)}</{tag}>" for text in texts)


def _escaped_text(text: Any) -> str:
    """The text without markup.

    Half of a surrogate pair, as in an undecodable file name, cannot be part of a page, so its
    escape replaces it.
    """
    return html.escape(str(text)).encode("utf-8", "backslashreplace").decode()
