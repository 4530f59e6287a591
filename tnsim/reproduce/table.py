"""Claims for a terminal. In: a record. Out: lines of text."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tnsim.reproduce.claims import Verdict, mean
from tnsim.reproduce.records import claim_of

COLUMNS = (
    ("claim", 44),
    ("paper", 9),
    ("authors", 9),
    ("ours", 18),
    ("control", 18),
    ("expected", 16),
    ("verdict", 18),
)


def lines(record: dict[str, Any]) -> list[str]:
    """A table of all claims of a run, what became of them, and measures side by side.

    Args:
        record: As `records.record` makes it.

    Returns:
        Lines without their ends.
    """
    about = f"{record['where']}; setting {record['setting']}, seed {record['seed']}"
    heads = [name for name, _ in COLUMNS]
    rules = ["-" * width for _, width in COLUMNS]
    table = [f"{record['title']} ({about})", "", _line(heads).rstrip(), _line(rules)]
    for row in record["claims"]:
        table += _wrapped(cells(row))
    table += ["", score([record])]
    for summary in record["summaries"]:
        table += ["", f"{summary['title']}:", "", *_aligned([summary["heads"], *summary["rows"]])]
    return table


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """The words of one claim, in the order of `COLUMNS`.

    Args:
        row: Of a record.

    Returns:
        Words; a dash where there is nothing to say.
    """
    claim = claim_of(row)
    return (
        f"{claim.text} ({claim.where})",
        published(claim.paper),
        published(claim.authors),
        values(claim.ours),
        values(claim.control),
        expectation(row),
        row["verdict"],
    )


def expectation(row: dict[str, Any]) -> str:
    """Where a claim's number must be, in words; a dash where it cannot be rerun."""
    claim = claim_of(row)
    parts = []
    if claim.expected is not None:
        parts.append(str(claim.expected))
    if claim.excess is not None:
        parts.append(f"beyond control {claim.excess}")
    return "; ".join(parts) or "-"


def published(value: float | str | None) -> str:
    """A value of somebody else's, as they gave it.

    Example:
        >>> published(None), published(0.92), published("> 0.9")
        ('-', '0.92', '> 0.9')
    """
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:g}"


def values(ours: Sequence[float]) -> str:
    """The mean over seeds, and where there are several the least and the largest.

    Example:
        >>> values((0.5,)), values((0.25, 0.75)), values((1.0, 1.0))
        ('0.5', '0.5 (0.25 to 0.75)', '1')
    """
    if not ours:
        return "-"
    text, least, largest = map(number, (mean(tuple(ours)), min(ours), max(ours)))
    if least == largest:
        return text
    return f"{text} ({least} to {largest})"


def number(value: float) -> str:
    """Three decimals, or three digits where that shows none.

    Example:
        >>> number(0.12345), number(1e-9), number(12345.6), number(1.0)
        ('0.123', '1e-09', '12,346', '1')
    """
    if value != 0 and abs(value) < 0.001:
        return f"{value:.2g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}".rstrip("0").rstrip(".")


def score(records: Iterable[dict[str, Any]]) -> str:
    """How many claims have which verdict.

    Example:
        >>> score([{"claims": [{"verdict": "holds"}, {"verdict": "holds"}]}])
        '2 claims: 2 hold'
    """
    verdicts = Counter(row["verdict"] for record in records for row in record["claims"])
    counted = [f"{verdicts[one]} {_PLURAL[one]}" for one in Verdict if verdicts[one]]
    return f"{verdicts.total()} claims: {', '.join(counted)}"


_PLURAL = {
    Verdict.holds: "hold",
    Verdict.fails: "do not hold",
    Verdict.differs: "differ in setting",
    Verdict.cannot: "cannot be rerun",
}


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, every column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines


def _wrapped(words: Sequence[str]) -> list[str]:
    """One row, on as many lines as its longest cell takes."""
    columns = []
    for text, (_, width) in zip(words, COLUMNS, strict=True):
        columns.append(textwrap.wrap(text, width))
    height = max(map(len, columns))
    padded = [column + [""] * (height - len(column)) for column in columns]
    return [_line(parts).rstrip() for parts in zip(*padded, strict=True)]


def _line(parts: Sequence[str]) -> str:
    widths = [width for _, width in COLUMNS]
    return "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True))
