"""Dialects: how somebody else's state dict spells a model. In: a mapping of arrays. Out: a `Model`.

A dialect is plain data, readable and writable as JSON. Everything that would change the function if it
were guessed wrong is written down in it: which half of a fused weight is the left one, whether a matrix
is transposed, the residual rule and its scale, a norm that is folded away. `assumptions` says it in words.

Key names may contain `{i}` in a rule with `"repeat": true`, which then stands for layers 0, 1, ... as far
as the file has them; a trailing `?` marks a key that may be absent.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from tnsim.errors import CheckpointError, UnsupportedLayer
from tnsim.models.layers import MASKS

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


@dataclass(frozen=True)
class Dialect:
    """A named list of rules; `nested` is the path of keys to the state dict ("key?" if it may be missing), `ignore` lists key patterns."""

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
        try:
            data = json.loads(text)
            if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
                raise ValueError(f'it must be an object with "format": {FORMAT}')
            known = {f.name for f in dataclasses.fields(Rule)}
            rules = []
            for n, rule in enumerate(data.pop("layers")):
                if surplus := set(rule) - known:
                    raise ValueError(
                        f"layer rule {n} has unknown fields {sorted(surplus)}; known are {sorted(known)}"
                    )
                rules.append(Rule(**rule))
            found = cls(
                layers=tuple(rules),
                **{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()},
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"not a dialect: {error}") from None
        _check(found)
        return found

    def assumptions(self) -> list[str]:
        """What reading a file in this dialect takes for granted, one sentence each."""
        found = [f"dialect {self.name}" + (f": {self.description}" if self.description else "")]
        for n, rule in enumerate(self.layers):
            facts = []
            if rule.transpose:
                facts.append("matrices are stored (in, out)")
            if rule.fused:
                facts.append(
                    f"{rule.fused} stacks {' then '.join(rule.fused_order.split('-'))} on axis 0"
                )
            if rule.lifted:
                facts.append("column 0 of left and right is a bias")
            if rule.residual:
                formula = "x + s f(x)" if rule.residual == "additive" else "(1 - s) x + s f(x)"
                facts.append(f"residual {formula} with s = {rule.scale}")
            if rule.norm_energy:
                facts.append(f"weight divided by sqrt({rule.norm_energy} + {rule.norm_epsilon:g})")
            if rule.kind == "attention":
                facts.append(
                    f"{rule.n_heads} heads, {rule.mask} mask, scores divided by d_head^{rule.score_power}"
                )
                turned = f"base {rule.rope_base}, {rule.rope_layout} layout, {'forward' if rule.rope_direction == 1 else 'backward'}"
                facts.append(f"RoPE {turned}" if rule.rope_base else "no RoPE")
                if rule.q1 == rule.q2 and rule.k1 == rule.k2:
                    facts.append("both scores share their weights")
            if rule.kind == "bilinear" and not rule.down:
                facts.append("hidden units are the output")
            if not (rule.residual or rule.kind == "linear"):
                facts.append("no residual")
            found.append(
                f"rule {n}, {rule.kind}{' x n' if rule.repeat else ''}: {'; '.join(facts) or 'W x + b'}"
            )
        return found


PROJECTIONS = ("q1", "k1", "q2", "k2", "v", "o")
_CHOICES = {
    "mask": MASKS,
    "score_power": (0, 1, 2),
    "rope_layout": ("half", "interleaved"),
    "rope_direction": (1, -1),
}


def _check(dialect: Dialect) -> None:
    if not dialect.layers:
        raise CheckpointError(f"dialect {dialect.name} has no layer rules")
    for n, rule in enumerate(dialect.layers):
        where = f"dialect {dialect.name}, layer rule {n}"
        if rule.kind not in ("linear", "bilinear", "attention"):
            raise UnsupportedLayer(
                f"{where}: kind {rule.kind!r} is no polynomial layer that can be read; known are linear, bilinear, attention"
            )
        for field, known in _CHOICES.items():
            if (value := getattr(rule, field)) not in known:
                raise CheckpointError(
                    f"{where}: {field} {value!r} is unknown, use {' or '.join(map(repr, known))}"
                )
        if rule.residual not in (None, "additive", "lerp"):
            raise CheckpointError(
                f"{where}: residual {rule.residual!r} is unknown, use 'additive' or 'lerp'"
            )
        if rule.fused_order not in ("left-right", "right-left"):
            raise CheckpointError(
                f"{where}: fused_order {rule.fused_order!r} is unknown, use 'left-right' or 'right-left'"
            )
        complete, needs = {
            "linear": (rule.weight, "weight"),
            "bilinear": (rule.fused or (rule.left and rule.right), "left and right, or fused"),
            "attention": (
                all(getattr(rule, role) for role in PROJECTIONS) and rule.n_heads,
                f"{', '.join(PROJECTIONS)} and n_heads",
            ),
        }[rule.kind]
        if not complete:
            raise CheckpointError(f"{where}: a {rule.kind} rule names {needs}")
        if rule.kind == "linear" and rule.residual:
            raise CheckpointError(
                f"{where}: a residual rule needs a bilinear or an attention layer"
            )
