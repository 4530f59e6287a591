"""Dialects: how somebody else's state dict spells a model. In: a mapping of arrays. Out: a `Model`.

A dialect is plain data, readable and writable as JSON. Everything that would change the function if it
were guessed wrong is written down in it: which half of a fused weight is the left one, whether a matrix
is transposed, the residual rule and its scale, a norm that is folded away. `assumptions` says it in words.

Key names may contain `{i}` in a rule with `"repeat": true`, which then stands for layers 0, 1, ... as far
as the file has them; a trailing `?` marks a key that may be absent.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import numbers
import sys
import typing
from dataclasses import dataclass
from typing import Any

from tnsim.checkpoints.guard import refusing
from tnsim.errors import CheckpointError, UnsupportedLayer, printable
from tnsim.models.attention import MASKS

FORMAT = 1


@dataclass(frozen=True)
class Rule:
    """One layer, or with `repeat` a run of layers, in terms of key names.

    kind: "linear" (weight, bias), "bilinear" (left, right, down and their biases) or "attention" (q1, k1, q2, k2, v, o
    and their biases; two roles may name one array). `transpose`: matrices are stored (in, out). `fused`, `fused_bias`:
    one array holds left and right stacked on axis 0, in `fused_order`. A bilinear rule without `down` writes its hidden
    units out. `lifted`: column 0 of left and right multiplies a constant 1. residual: "additive" (x + scale f) or "lerp"
    ((1 - scale) x + scale f), with `scale` a number or the key of one. `norm_energy`: key of a constant mean square e by
    which a linear layer is divided, weight / sqrt(e + norm_epsilon).

    Attention: `score_power` p divides the product of the two scores by d_head^p; `rope_layout` "half" turns coordinates
    (i, i + d_head / 2), "interleaved" (2 i, 2 i + 1); `rope_direction` -1 turns by the negative angle; `rope_base` None for no RoPE.
    `n_heads`, `rope_base` and `scale` may be "config:a.b", read from config.json or config.yaml beside the file.
    """

    kind: str
    weight: str | None = None
    bias: str | None = None
    left: str | None = None
    right: str | None = None
    down: str | None = None
    left_bias: str | None = None
    right_bias: str | None = None
    down_bias: str | None = None
    fused: str | None = None
    fused_bias: str | None = None
    fused_order: str = "left-right"
    transpose: bool = False
    lifted: bool = False
    residual: str | None = None
    scale: float | str = 1.0
    q1: str | None = None
    k1: str | None = None
    q2: str | None = None
    k2: str | None = None
    v: str | None = None
    o: str | None = None
    q1_bias: str | None = None
    k1_bias: str | None = None
    q2_bias: str | None = None
    k2_bias: str | None = None
    v_bias: str | None = None
    o_bias: str | None = None
    n_heads: int | str | None = None
    mask: str = "causal"
    score_power: int = 2
    rope_base: float | str | None = None
    rope_layout: str = "half"
    rope_direction: int = 1
    norm_energy: str | None = None
    norm_epsilon: float = 0.0
    repeat: bool = False

    @property
    def main_key(self) -> str:
        """The key that a layer cannot do without; a repeated rule goes on while it is there."""
        return self.weight or self.fused or self.left or self.q1 or ""


@dataclass(frozen=True)
class Dialect:
    """A named list of rules.

    Attributes:
        name: for messages.
        layers: rules in order.
        nested: path of keys to the state dict, "key?" where it may be missing.
        ignore: patterns of keys that the model does not need.
        description: one sentence.

    Raises:
        CheckpointError: when a rule is incomplete, or holds what it cannot.
        UnsupportedLayer: for a layer kind without a polynomial.
    """

    name: str
    layers: tuple[Rule, ...]
    nested: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    description: str = ""

    def to_json(self) -> str:
        data = dataclasses.asdict(self)
        defaults = {f.name: f.default for f in dataclasses.fields(Rule)}
        data["layers"] = [
            {k: v for k, v in rule.items() if v != defaults[k]} for rule in data["layers"]
        ]
        return json.dumps({"format": FORMAT, **data}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Dialect:
        """Raises `CheckpointError` on anything but a dialect, `UnsupportedLayer` for a layer kind without a polynomial."""
        with refusing("not a dialect"):
            data = json.loads(text)
            if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
                raise ValueError(f'it must be an object with "format": {FORMAT}')
            rules = [_rule(n, fields) for n, fields in enumerate(data.pop("layers"))]
            lists = {name: tuple(x) for name, x in data.items() if isinstance(x, list)}
            return cls(layers=tuple(rules), **(data | lists))

    def __post_init__(self) -> None:
        _check(self)

    def assumptions(self) -> list[str]:
        """What reading a file in this dialect takes for granted, one sentence each."""
        title = f"dialect {self.name}"
        if self.description:
            title += f": {self.description}"
        sentences = [title]
        for n, rule in enumerate(self.layers):
            kind = f"{rule.kind} x n" if rule.repeat else rule.kind
            facts = "; ".join(_facts(rule)) or "W x + b"
            sentences.append(f"rule {n}, {kind}: {facts}")
        return [printable(sentence) for sentence in sentences]


def _facts(rule: Rule) -> list[str]:
    """What would change the function if it were otherwise."""
    facts = []
    if rule.transpose:
        facts.append("matrices are stored (in, out)")
    if rule.fused:
        order = " then ".join(rule.fused_order.split("-"))
        facts.append(f"{rule.fused} stacks {order} on axis 0")
    if rule.lifted:
        facts.append("column 0 of left and right is a bias")
    if rule.residual:
        formula = "x + s f(x)" if rule.residual == "additive" else "(1 - s) x + s f(x)"
        facts.append(f"residual {formula} with s = {rule.scale}")
    if rule.norm_energy:
        facts.append(f"weight divided by sqrt({rule.norm_energy} + {rule.norm_epsilon:g})")
    if rule.kind == "attention":
        facts += _attention_facts(rule)
    if rule.kind == "bilinear" and not rule.down:
        facts.append("hidden units are the output")
    if not (rule.residual or rule.kind == "linear"):
        facts.append("no residual")
    return facts


def _attention_facts(rule: Rule) -> list[str]:
    power = f"scores divided by d_head^{rule.score_power}"
    facts = [f"{rule.n_heads} heads, {rule.mask} mask, {power}"]
    if rule.rope_base:
        direction = "forward" if rule.rope_direction == 1 else "backward"
        facts.append(f"RoPE base {rule.rope_base}, {rule.rope_layout} layout, {direction}")
    else:
        facts.append("no RoPE")
    if rule.q1 == rule.q2 and rule.k1 == rule.k2:
        facts.append("both scores share their weights")
    return facts


PROJECTIONS = ("q1", "k1", "q2", "k2", "v", "o")
_REQUIRED = {  # of each kind; a bilinear layer may have fused instead
    "linear": ("weight",),
    "bilinear": ("left", "right"),
    "attention": (*PROJECTIONS, "n_heads"),
}
_CHOICES = {
    "mask": MASKS,
    "score_power": (0, 1, 2),
    "rope_layout": ("half", "interleaved"),
    "rope_direction": (1, -1),
    "residual": ("additive", "lerp", None),
    "fused_order": ("left-right", "right-left"),
}


def is_finite(value: Any) -> bool:
    """Whether something out of a file of text is a number that floats can hold."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return abs(value) <= sys.float_info.max


def _rule(n: int, fields: Any) -> Rule:
    """A rule from JSON."""
    if not isinstance(fields, dict):
        raise ValueError(f"layer rule {n} must be an object, found {fields!r}")
    known = {field.name for field in dataclasses.fields(Rule)}
    if surplus := sorted(set(fields) - known):
        raise ValueError(f"layer rule {n} has unknown fields {surplus}; known are {sorted(known)}")
    return Rule(**fields)


def _check(dialect: Dialect) -> None:
    for field in ("name", "description"):
        if not isinstance(getattr(dialect, field), str):
            raise CheckpointError(f"the {field} of a dialect must be text")
    for field in ("nested", "ignore"):
        keys = getattr(dialect, field)
        if not isinstance(keys, tuple) or not all(isinstance(key, str) for key in keys):
            raise CheckpointError(f"dialect {dialect.name}: {field} must list keys, found {keys!r}")
    if not dialect.layers:
        raise CheckpointError(f"dialect {dialect.name} has no layer rules")
    for n, rule in enumerate(dialect.layers):
        _check_rule(rule, f"dialect {dialect.name}, layer rule {n}")


def _check_rule(rule: Rule, where: str) -> None:
    hints = _hints()
    for field in dataclasses.fields(Rule):
        value = getattr(rule, field.name)
        if not _has_type(value, hints[field.name]):
            raise CheckpointError(f"{where}: {field.name} must be {field.type}, found {value!r}")
    if rule.kind not in _REQUIRED:
        raise UnsupportedLayer(
            f"{where}: kind {rule.kind!r} is no polynomial layer that can be read; "
            f"known are {', '.join(_REQUIRED)}"
        )
    for field, known in _CHOICES.items():
        if (value := getattr(rule, field)) not in known:
            names = " or ".join(repr(choice) for choice in known if choice is not None)
            raise CheckpointError(f"{where}: {field} {value!r} is unknown, use {names}")
    _check_keys(rule, where)


def _check_keys(rule: Rule, where: str) -> None:
    required = ("fused",) if rule.fused and rule.kind == "bilinear" else _REQUIRED[rule.kind]
    for field in required:
        key = getattr(rule, field)
        if not key:
            names = ", ".join(_REQUIRED[rule.kind])
            instead = ", or fused" if rule.kind == "bilinear" else ""
            raise CheckpointError(f"{where}: a {rule.kind} rule names {names}{instead}")
        if isinstance(key, str) and key.endswith("?"):
            raise CheckpointError(f"{where}: {field} {key!r} may not be absent, remove the ?")
    if rule.repeat and "{i}" not in rule.main_key:
        raise CheckpointError(
            f"{where}: repeats {rule.main_key!r}, which is the same key each time; "
            "put {i} where the number of the layer stands"
        )
    if rule.kind == "linear" and rule.residual:
        raise CheckpointError(f"{where}: a residual rule needs a bilinear or an attention layer")


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(Rule)


def _has_type(value: Any, hint: Any) -> bool:
    """Whether JSON could hold a value of such a type; a boolean is no number here."""
    kinds = typing.get_args(hint) or (hint,)
    if isinstance(value, bool):
        return bool in kinds
    if float in kinds and isinstance(value, numbers.Real):
        return is_finite(value)
    return isinstance(value, kinds)
