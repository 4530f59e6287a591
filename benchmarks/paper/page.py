"""Claims as a table for a terminal, and the Markdown page of all runs.

Every word and number about a run comes from its `claims.json`, so the page is made again, never
edited.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from benchmarks.paper import records
from benchmarks.paper.claims import Verdict, mean
from benchmarks.paper.experiment import NAMES, PROGRAM
from benchmarks.paper.records import claim_of
from tnsim.errors import ResultError
from tnsim.files import beginning, replacing

COLUMNS = (
    ("claim", 44),
    ("paper", 9),
    ("authors", 9),
    ("ours", 18),
    ("control", 18),
    ("expected", 16),
    ("verdict", 18),
)
_PLURAL = {
    Verdict.holds: "hold",
    Verdict.fails: "do not hold",
    Verdict.differs: "differ in setting",
    Verdict.cannot: "cannot be rerun",
}
TITLE = "# The paper, rerun"
PAGE = beginning(f"a page of {PROGRAM}", TITLE.encode())
Placed = tuple[PurePosixPath, dict[str, Any]]
"""The folder of a record's pictures, relative to the page, and the record."""


def lines(record: dict[str, Any]) -> list[str]:
    """A table of all claims of a run with their verdicts, and tables of measures.

    Args:
        record: A record that `records.record` made.

    Returns:
        Lines without their ends.
    """
    about = f"{record['where']}; setting {record['setting']}, seed {record['seed']}"
    heads = [name for name, _ in COLUMNS]
    rules = ["-" * width for _, width in COLUMNS]
    table = [f"{record['title']} ({about})", "", _table_line(heads).rstrip(), _table_line(rules)]
    for row in record["claims"]:
        table += _wrapped_row(cells(row))
    table += ["", score([record])]
    for summary in record["summaries"]:
        table += [
            "",
            f"{summary['title']}:",
            "",
            *_aligned_rows([summary["heads"], *summary["rows"]]),
        ]
    return table


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """The words of a claim, in the order of `COLUMNS`.

    Args:
        row: Row of a record.

    Returns:
        Words; a dash in the place of an absent value.
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
    """The expectation of a claim in words; a dash where the claim cannot be rerun."""
    claim = claim_of(row)
    parts = []
    if claim.expected is not None:
        parts.append(str(claim.expected))
    if claim.excess is not None:
        parts.append(f"beyond control {claim.excess}")
    return "; ".join(parts) or "-"


def published(value: float | str | None) -> str:
    """A published value as it was published, a dash for no value.

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
    """The mean over seeds, followed by the least and the largest value where these differ.

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
    """A number with three decimals; a small number with two digits, a large number without any.

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
    """The numbers of claims with each verdict, in words.

    Example:
        >>> score([{"claims": [{"verdict": "holds"}, {"verdict": "holds"}]}])
        '2 claims: 2 hold'
    """
    verdicts = Counter(row["verdict"] for record in records for row in record["claims"])
    counted = [
        f"{verdicts[verdict]} {_PLURAL[verdict]}" for verdict in Verdict if verdicts[verdict]
    ]
    return f"{verdicts.total()} claims: {', '.join(counted)}"


def _aligned_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines; every column is as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines


def _wrapped_row(words: Sequence[str]) -> list[str]:
    """A single row as lines, as many as its longest cell takes."""
    columns = []
    for text, (_, width) in zip(words, COLUMNS, strict=True):
        columns.append(textwrap.wrap(text, width))
    height = max(map(len, columns))
    padded = [column + [""] * (height - len(column)) for column in columns]
    return [_table_line(parts).rstrip() for parts in zip(*padded, strict=True)]


def _table_line(parts: Sequence[str]) -> str:
    widths = [width for _, width in COLUMNS]
    return "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True))


def write(root: Path, path: Path) -> Path:
    """Write the page of all runs below a folder.

    Args:
        root: Folder of the runs, which holds `EXPERIMENT/SETTING/claims.json`.
        path: Path of the page.

    Returns:
        The path.

    Raises:
        ResultError: When there is no run, or a run cannot be read.
    """
    text = page(gathered(root, path.parent))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, PAGE) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def gathered(root: Path, beside: Path) -> list[Placed]:
    """The records below a folder, in the order of `experiment.NAMES`.

    Args:
        root: Folder of the runs, which holds `EXPERIMENT/SETTING/claims.json`.
        beside: The folder of the page, above `root` or equal to it.

    Returns:
        Records with their folders.

    Raises:
        ResultError: When there is no record.
    """
    placed: list[Placed] = []
    for name in NAMES:
        for path in sorted(root.glob(f"{name}/*/{records.FILE}")):
            folder = path.parent.relative_to(beside)
            placed.append((PurePosixPath(folder), records.read(path)))
    if not placed:
        raise ResultError(f"{root} holds no finished experiment; run  {PROGRAM} NAME --out {root}")
    return placed


def page(placed: Sequence[Placed]) -> str:
    """The page as text.

    Args:
        placed: Records with their folders.

    Returns:
        Markdown.
    """
    records = [record for _, record in placed]
    lines = [
        TITLE,
        "",
        "Every claim of the paper that can be rerun, beside what was measured. This page is "
        f"written by `{PROGRAM}` from the `claims.json` of every run; nobody edits it.",
        "",
        f"**{score(records)}.**",
        "",
        *_overview_lines(records),
        *_listed_claims("What does not hold", records, Verdict.fails),
        *_listed_claims("What differs in setting", records, Verdict.differs),
        *_listed_claims("What cannot be rerun", records, Verdict.cannot),
    ]
    for folder, record in placed:
        lines += _run_section(folder, record)
    lines += _origin_lines(records)
    return "\n".join(lines) + "\n"


def _overview_lines(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The lines of a table with a row for each run."""
    heads = ["experiment", "in the paper", "setting", "seed", "train", "measure", *Verdict]
    yield from _table_head(heads)
    for record in records:
        verdicts = Counter(row["verdict"] for row in record["claims"])
        seconds = [_seconds(record["seconds"].get(step)) for step in ("train", "measure")]
        yield _table_row(
            [
                f"[{record['experiment']}](#{_anchor(record)})",
                record["where"],
                record["setting"],
                str(record["seed"]),
                *seconds,
                *(str(verdicts[verdict] or "-") for verdict in Verdict),
            ]
        )
    yield ""


def _listed_claims(title: str, records: Iterable[dict[str, Any]], wanted: Verdict) -> list[str]:
    """A section of the claims of equal verdict, with their numbers; empty without such claims."""
    items = []
    for record in records:
        for row in record["claims"]:
            if row["verdict"] == wanted:
                items.append(f"- *{record['experiment']}*: {row['text']} {_reason_of(row)}")
    if not items:
        return []
    return [f"## {title}", "", *items, ""]


def _reason_of(row: dict[str, Any]) -> str:
    if row["cannot"]:
        return _sentence(row["cannot"])
    said = [f"Ours: {values(row['ours'])}"]
    if row["control"]:
        said.append(f"control: {values(row['control'])}")
    if row["paper"] is not None:
        said.append(f"paper: {published(row['paper'])}")
    if row["authors"] is not None:
        said.append(f"authors: {published(row['authors'])}")
    said.append(f"expected: {expectation(row)}")
    sentences = [_sentence("; ".join(said))]
    sentences += [_sentence(row[name]) for name in ("differs", "note") if row[name]]
    return " ".join(sentences)


def _run_section(folder: PurePosixPath, record: dict[str, Any]) -> Iterator[str]:
    """The lines of the section of a single run, with its figures and all claims."""
    yield f"## {_title(record)}"
    yield ""
    yield f"`{PROGRAM} {_arguments(record)}`; {record['where']} of the paper."
    yield ""
    for figure in record["figures"]:
        yield f"![{record['title']}: {PurePosixPath(figure).stem}]({folder / figure})"
        yield ""
    for summary in record["summaries"]:
        yield f"{summary['title']}:"
        yield ""
        yield from _table_head(summary["heads"])
        yield from map(_table_row, summary["rows"])
        yield ""
    yield from _table_head([name for name, _ in COLUMNS])
    for row in record["claims"]:
        yield _table_row(cells(row))
    yield ""
    yield "Why these intervals:"
    yield ""
    by_reason: dict[str, list[str]] = {}
    for row in record["claims"]:
        said = [_sentence(row[name]) for name in ("why", "note") if row[name]]
        by_reason.setdefault(" ".join(said), []).append(row["name"])
    for reason, names in by_reason.items():
        if reason:
            yield f"- {', '.join(names)}: {reason}"
    yield ""


def _arguments(record: dict[str, Any]) -> str:
    """The arguments of the command line that made a record."""
    words = [record["experiment"]]
    if record["setting"] != "default":
        words.append("--full")
    if record["seed"]:
        words.append(f"--seed {record['seed']}")
    if record["data"]:
        words.append(f"--data {record['data']}")
    if record["checkpoints"]:
        words.append(f"--checkpoints {record['checkpoints']}")
    return " ".join(words)


def _origin_lines(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The lines of a list of machines and versions, each once, with their experiments."""
    yield "## Machines and versions"
    yield ""
    by_origin: dict[str, list[str]] = {}
    for record in records:
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        origin = f"{record['machine']}; {versions}"
        by_origin.setdefault(origin, []).append(record["experiment"])
    for origin, names in by_origin.items():
        yield f"- {', '.join(dict.fromkeys(names))}: {origin}."


def _title(record: dict[str, Any]) -> str:
    if record["setting"] == "default":
        return record["title"]
    return f"{record['title']}, setting {record['setting']}"


def _anchor(record: dict[str, Any]) -> str:
    """The anchor of a record's heading, by the rule of Markdown renderers."""
    kept = [letter for letter in _title(record).lower() if letter.isalnum() or letter in " -"]
    return "".join(kept).replace(" ", "-")


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:,.0f} s"


def _table_head(names: Sequence[str]) -> list[str]:
    return [_table_row(names), _table_row(["---"] * len(names))]


def _table_row(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
