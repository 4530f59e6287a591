"""Dialects: descriptions of how a foreign state dict spells a model.

A dialect is plain data, readable and writable as JSON. Every convention that would change the
function if it were guessed wrong is written down in the dialect: the half of a fused weight that is
the left factor, whether a matrix is transposed, the residual rule and its scale, a norm that is
folded away. `Dialect.assumptions` says the conventions in words.

Names of keys may contain `{i}` in a rule with `"repeat": true`, which then stands for layers 0, 1,
... as far as the file has them; a trailing `?` marks a key that may be absent. Entries whose name
begins with `#` are comments.

`dialects.json` holds the dialects of layouts that public code uses, `PRESETS` by name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tnsim.checkpoints.rules import (
    NUMBERS,
    AttentionRule,
    BilinearRule,
    ElementwiseRule,
    GatedRule,
    LinearRule,
    Rule,
    check_rule,
    facts,
    rule_of,
)
from tnsim.errors import CheckpointError, printable, refusing
from tnsim.options import is_list

__all__ = [
    "AttentionRule",
    "BilinearRule",
    "Dialect",
    "ElementwiseRule",
    "GatedRule",
    "LinearRule",
    "Rule",
]

FORMAT = 1  # version of the JSON of dialects
PATTERN_CHARACTERS = 2**14
"""Limit of characters in all patterns of a dialect; as a regular expression so many compile in
0.1 s."""


@dataclass(frozen=True)
class Dialect:
    """A named list of rules.

    Attributes:
        name: Name of the dialect, for messages.
        layers: Rules in order.
        nested: Path of keys to the state dict, "key?" where it may be missing.
        ignore: Patterns of keys that are no part of the function, such as a step counter. A norm or
            a bias is refused here.
        description: Description of the layout in a single sentence.
        unused: Patterns of weights that the forward pass does not use, a norm or a bias perhaps.
        leave_out: Patterns of keys that are part of the function, and are knowingly not read; every
            result says so.

    Raises:
        CheckpointError: When a rule is incomplete, or a field has an impossible value.
        UnsupportedLayer: For a layer kind without a polynomial.

    Example:
        >>> dialect = Dialect("mine", (LinearRule(weight="w"),))
        >>> Dialect.from_json(dialect.to_json()) == dialect
        True
    """

    name: str
    layers: tuple[Rule, ...]
    nested: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    description: str = ""
    unused: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The dialect as text, without fields that have their default values.

        Returns:
            A JSON object, indented.

        Example:
            >>> '"weight": "w"' in Dialect("mine", (LinearRule(weight="w"),)).to_json()
            True
        """
        fields: dict[str, Any] = {"format": FORMAT, "name": self.name}
        fields["layers"] = [rule.changed() for rule in self.layers]
        for field in dataclasses.fields(self):
            # Fields at their default are left out: most of them are empty.
            if getattr(self, field.name) and field.name not in fields:
                fields[field.name] = getattr(self, field.name)
        return json.dumps(fields, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Dialect:
        """The dialect in the text of a JSON file.

        Args:
            text: An object with "format", "name", "layers" and the other attributes.

        Returns:
            The dialect, checked.

        Raises:
            CheckpointError: On anything but a dialect.
            UnsupportedLayer: For a layer kind without a polynomial.

        Example:
            >>> rules = '[{"kind": "linear", "weight": "w"}]'
            >>> Dialect.from_json(f'{{"format": 1, "name": "mine", "layers": {rules}}}').name
            'mine'
        """
        with refusing("not a dialect"):
            return cls.from_fields(json.loads(text))

    @classmethod
    def from_fields(cls, fields: Any) -> Dialect:
        """The dialect that a JSON object describes.

        Raises:
            CheckpointError, UnsupportedLayer: Raised as by `from_json`.
            ValueError: The object is no dialect.
        """
        # The version stands first, so that a later format is refused before its fields are read.
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise ValueError(f'it must be an object with "format": {FORMAT}')
        fields = _without_comments(fields)
        rules = [_rule_from(n, rule) for n, rule in enumerate(fields.pop("layers"))]
        if "guesses" in fields:
            raise ValueError(
                "a dialect says what is so and has no guesses: mend the rules that are wrong, "
                "and delete the field"
            )
        for name, value in fields.items():
            # JSON has no tuples, and dialects are compared and hashed.
            if isinstance(value, list):
                fields[name] = tuple(value)
        return cls(layers=tuple(rules), **fields)

    def __post_init__(self) -> None:
        _check_dialect(self)

    def assumptions(self, runs: Sequence[tuple[Rule, ...]] = ()) -> list[str]:
        """The assumptions that reading a file in this dialect makes.

        Args:
            runs: For each rule the rules of its single layers, with the numbers of a file; without
                runs the sentences name the keys of the dialect.

        Returns:
            A sentence for the dialect, and a sentence for each rule.

        Example:
            >>> Dialect("mine", (LinearRule(weight="w"),)).assumptions()
            ['dialect mine', 'rule 0, linear: W x + b']
        """
        title = f"dialect {self.name}"
        if self.description:
            title += f": {self.description}"
        sentences = [title]
        for n, rule in enumerate(self.layers):
            kind = rule.kind
            count = "n"
            if runs:
                count = str(len(runs[n]))
                # The numbers of a file say more than the names under which they stand.
                rule = _with_values(rule, runs[n])
            if rule.repeat:
                kind += f" x {count}"
            phrases = "; ".join(facts(rule)) or "W x + b"
            sentences.append(f"rule {n}, {kind}: {phrases}")
        return [printable(sentence) for sentence in sentences]


def is_pattern(key: str) -> bool:
    """Whether a key is a pattern of several keys.

    Args:
        key: Entry of `ignore`, `unused` or `leave_out`.

    Returns:
        True where the key has a character that stands for others.

    Example:
        >>> is_pattern("layers.*.step"), is_pattern("step")
        (True, False)
    """
    return any(character in key for character in "*?[")


def _with_values(rule: Rule, run: Sequence[Rule]) -> Rule:
    """A rule that shows the numbers of its layers in the place of the keys of the numbers."""
    values: dict[str, Any] = {}
    for name in vars(rule).keys() & NUMBERS:
        # Layers of a run may have numbers of their own, which are then listed.
        distinct = list(dict.fromkeys(getattr(layer, name) for layer in run))
        values[name] = distinct[0]
        if len(distinct) > 1:
            values[name] = ", ".join(map(str, distinct))
    return dataclasses.replace(rule, **values)


def _without_comments(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of an object without comments, whose names begin with #."""
    return {name: value for name, value in fields.items() if not name.startswith("#")}


def _rule_from(n: int, fields: Any) -> Rule:
    """A rule from JSON."""
    if not isinstance(fields, dict):
        raise ValueError(f"layer rule {n} must be an object, found {fields!r}")
    return rule_of(_without_comments(fields), f"layer rule {n}")


def _check_dialect(dialect: Dialect) -> None:
    for field in ("name", "description"):
        if not isinstance(getattr(dialect, field), str):
            raise CheckpointError(f"the {field} of a dialect must be text")
    if not is_list(dialect.layers):
        raise CheckpointError(
            f"dialect {dialect.name}: layers must list rules, found {dialect.layers!r}"
        )
    for field in ("nested", "ignore", "unused", "leave_out"):
        # A single text would pass for a list of its letters.
        keys = getattr(dialect, field)
        if not isinstance(keys, tuple) or not all(isinstance(key, str) for key in keys):
            raise CheckpointError(f"dialect {dialect.name}: {field} must list keys, found {keys!r}")
    lengths = [
        len(key)
        for key in (*dialect.ignore, *dialect.unused, *dialect.leave_out)
        if is_pattern(key)
    ]
    # Names without wildcards are looked up in a set, and have no limit.
    if sum(lengths) > PATTERN_CHARACTERS:
        raise CheckpointError(
            f"dialect {dialect.name}: its {len(lengths):,} patterns of keys have "
            f"{sum(lengths):,} characters, over the limit of {PATTERN_CHARACTERS:,}; "
            "whole names have no limit"
        )
    if not len(dialect.layers):
        raise CheckpointError(f"dialect {dialect.name} has no layer rules")
    for n, rule in enumerate(dialect.layers):
        check_rule(rule, f"dialect {dialect.name}, layer rule {n}")


PRESETS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in map(
        Dialect.from_fields,
        json.loads(Path(__file__).with_name("dialects.json").read_text(encoding="utf-8")),
    )
}
"""Dialects of layouts that public code uses, by name, from files as users write them."""
