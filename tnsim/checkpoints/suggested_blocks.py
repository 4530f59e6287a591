"""Blocks of a suggested dialect. In: rules guessed one by one. Out: rules in order, a refusal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tnsim.errors import ON_INPUTS, UnsupportedLayer, printable

_GATE = re.compile(
    r"(w_?)?(g|gate|gates|gating)(_?(proj|projection|layer|linear))?|gate_?up(_?proj)?|wi_?[01]"
    r"|fc1_[gx]",
    re.IGNORECASE,
)
_GATED = re.compile(r"(^|[._])(swi|ge|re|se)?glu(_?mlp)?\d*([._]|$)", re.IGNORECASE)
_LOOKED_UP = re.compile(r"(?<!un)emb|wte|tok", re.IGNORECASE)
_BY_HAND = (
    "If it is a polynomial after all, write its rule by hand, "
    '{"kind": "bilinear", "left": ..., "right": ..., "down": ...} or {"kind": "linear", '
    '"weight": ...}, or read the module by tnsim.from_module, which runs it'
)
_ORDER = (
    "the layers follow one another in this order, and nothing stands before, between or behind "
    "them that leaves no tensor in a file: no activation (ReLU, GELU), no softmax, no norm without "
    "weights, no residual connection around several layers"
)
_STORED = "matrices are stored (out, in), as nn.Linear has them, unless a rule says transpose"
OPEN = "?"
"""Before the name of a field: its value is a guess, and the text says what else it may be."""
Shapes = Mapping[str, tuple[int, int]]


def check_polynomial(
    rules: Sequence[dict[str, Any]], shapes: Shapes, names: Mapping[str, str]
) -> None:
    """Refuse what names or shapes say to be no polynomial.

    A gate is multiplied through an activation in nearly all networks that have one, and linear
    layers in a row would be one linear layer but for the activations between them. Neither leaves
    a trace in a file.

    Args:
        rules: Rules in order, a rule that is still repeated for a run of equal layers.
        shapes: Shapes of the matrices by their names, {i} where numbers stand.
        names: From names of tensors to such names.

    Raises:
        UnsupportedLayer: Naming the matrices.

    Example:
        >>> rules = [{"kind": "linear", "weight": f"{n}.weight"} for n in (0, 2)]
        >>> check_polynomial(rules, {"0.weight": (4, 3), "2.weight": (2, 4)}, {})
        Traceback (most recent call last):
            ...
        tnsim.errors.UnsupportedLayer: 0.weight and 2.weight are plain linear layers in a row, wh...
    """
    gate = next(filter(_is_gate, shapes), None) or _gate_of_three(shapes)
    if gate is not None:
        raise UnsupportedLayer(
            f"{printable(gate)} is a gate by its name: nearly all networks put it through an "
            "activation (SwiGLU, GEGLU, GLU), which leaves no trace in a file and is no "
            f"polynomial. {_BY_HAND}. {ON_INPUTS}"
        )
    before: dict[str, Any] | None = None
    for rule in rules:
        linear = rule["kind"] == "linear"
        several = linear and rule.get("repeat") and list(names.values()).count(rule["weight"]) > 1
        in_a_row = before is not None and before["kind"] == "linear" and not _is_lookup(before)
        if linear and (several or in_a_row):
            first = rule if before is None or not in_a_row else before
            both = dict.fromkeys((first["weight"], rule["weight"]))
            raise UnsupportedLayer(
                f"{printable(' and '.join(both))} are plain linear layers in a row, which would be "
                "one linear layer but for activations between them (ReLU, GELU): these leave no "
                f"trace in a file and are no polynomials. {_BY_HAND}. {ON_INPUTS}"
            )
        before = rule


def _is_gate(key: str) -> bool:
    path = key.removesuffix(".weight")
    return bool(_GATE.fullmatch(path.rpartition(".")[2]) or _GATED.search(path))


def _is_lookup(rule: dict[str, Any]) -> bool:
    """Whether a layer looks up the vector of a token, which nobody puts through an activation."""
    return bool(rule.get("transpose") and _LOOKED_UP.search(rule["weight"]))


def _gate_of_three(shapes: Shapes) -> str | None:
    """The gate among w1, w2 and w3 where w2 leads back: so LLaMA calls those of its SwiGLU."""
    for key, (rows, columns) in shapes.items():
        found = re.fullmatch(r"(.*\b)(w_?)1((\.weight)?)", key)
        if found is None:
            continue
        second, third = (f"{found[1]}{found[2]}{n}{found[3]}" for n in (2, 3))
        leads_back = shapes.get(second) == (columns, rows) and rows != columns
        if leads_back and shapes.get(third) == (rows, columns):
            return key
    return None


def guesses_of(layers: Iterable[dict[str, Any]], shapes: Shapes) -> Iterator[dict[str, Any]]:
    """Take out of rules what names and shapes leave open.

    Args:
        layers: Rules in order; what they hold under names that begin with `OPEN` is taken out.
        shapes: Shapes of the matrices by their names.

    Yields:
        Entries of the guesses of a dialect, none of them confirmed.

    Example:
        >>> rules = [{"kind": "linear", "weight": "w", "?residual": "none"}]
        >>> [guess["about"] for guess in guesses_of(rules, {"w": (2, 2)})], rules
        (['layers', 'matrices', 'residual of layer rule 0'], [{'kind': 'linear', 'weight': 'w'}])
    """
    layers = list(layers)
    found = [("layers", _ORDER)]
    if len(layers) == 1 or any(rows == columns for rows, columns in shapes.values()):
        found.append(("matrices", _STORED))
    for n, rule in enumerate(layers):
        for name in [name for name in rule if name.startswith(OPEN)]:
            found.append((f"{name.removeprefix(OPEN)} of layer rule {n}", rule.pop(name)))
    for about, guess in found:
        yield {"about": about, "guess": guess, "confirmed": False}


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
        if name != "repeat" and not (i and name[0] in "#?"):
            found[name] = value.replace("{i}", str(i)) if isinstance(value, str) else value
    return found
