"""Blocks of a suggested dialect. In: rules guessed one by one. Out: rules in order, with doubts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator
from typing import Any

_GATE = re.compile(r"gate(_?proj)?", re.IGNORECASE)
GUESSED_NOTHING = (
    "a guess: nothing stands between this layer and the one before; with a ReLU or a GELU there "
    "the network is no polynomial, and is compared on inputs (tnsim.Empirical)"
)


def doubt(rules: list[dict[str, Any]]) -> None:
    """Say where an activation may stand, which leaves no trace in a file.

    Args:
        rules: In order; comments are added to them.

    Example:
        >>> rules = [{"kind": "linear", "weight": f"{n}.weight"} for n in (0, 2)]
        >>> doubt(rules)
        >>> [list(rule) for rule in rules]
        [['kind', 'weight'], ['kind', 'weight', '# before']]
    """
    before = None
    for rule in rules:
        if rule["kind"] == "linear" and (rule.get("repeat") or before == "linear"):
            rule["# before"] = GUESSED_NOTHING
        before = rule["kind"]
        word = rule.get("left", "").removesuffix(".weight").rpartition(".")[2]
        if _GATE.fullmatch(word):
            rule["# left"] = "multiplied as it is, a guess; SwiGLU and GEGLU are no polynomials"


def one_by_one(rules: list[dict[str, Any]], names: Collection[str]) -> Iterator[dict[str, Any]]:
    """Rules in order; where several make one block, those of each block after one another.

    A repeated rule is a run of equal layers, so attention and MLP in turn are written out.

    Args:
        rules: As guessed, repeated where their names have numbers.
        names: Of the tensors, which tell how many blocks there are.

    Yields:
        The rules of the dialect.

    Example:
        >>> rules = [{"weight": f"h.{{i}}.{name}", "repeat": True} for name in "ab"]
        >>> names = ["h.0.a", "h.0.b", "h.1.a", "h.1.b"]
        >>> [rule["weight"] for rule in one_by_one(rules, names)]
        ['h.0.a', 'h.0.b', 'h.1.a', 'h.1.b']
    """
    blocks = [_block(rule) for rule in rules]
    for block, several in itertools.groupby(rules, key=_block):
        run = list(several)
        if block is None or blocks.count(block) == 1:
            yield from run
            continue
        numbers = {name[len(block) :].split(".")[0] for name in names if name.startswith(block)}
        for i in range(len(numbers)):
            for rule in run:
                yield _numbered(rule, i)


def _block(rule: dict[str, Any]) -> str | None:
    """What the names of a repeated rule have before their number."""
    if not rule.get("repeat"):
        return None
    keys = [value for value in rule.values() if isinstance(value, str) and "{i}" in value]
    return keys[0].partition("{i}")[0]


def _numbered(rule: dict[str, Any], i: int) -> dict[str, Any]:
    """The rule of one layer of a run."""
    found: dict[str, Any] = {}
    for name, value in rule.items():
        if name != "repeat" and not (i and name.startswith("#")):
            found[name] = value.replace("{i}", str(i)) if isinstance(value, str) else value
    return found
