"""Rules: descriptions of how a foreign state dict spells one layer.

Everything that would change the function if it were guessed wrong is a field of its rule. A rule is
checked once (`check_rule`), and `facts` says its conventions in words.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import sys
import typing
from dataclasses import dataclass
from typing import Any

from tnsim.activations.activation import activation
from tnsim.errors import ON_INPUTS, CheckpointError, TnsimError, UnsupportedLayer
from tnsim.models.attention import MASKS

PROJECTIONS = ("q1", "k1", "q2", "k2", "v", "o")
# Fields whose numbers a file or its configuration may hold.
NUMBERS = ("scale", "n_heads", "rope_base", "norm_energy")
# Keys under which configurations of transformers state the number of heads.
CONFIGURED_HEADS = "config:model.n_head|num_attention_heads|n_head|n_heads"
_REQUIRED = {  # fields that a rule of each kind must have
    "linear": ("weight",),
    "bilinear": ("left", "right"),
    "attention": (*PROJECTIONS, "n_heads"),
    "elementwise": ("activation",),
    "gated": ("gate", "down", "activation"),
}
_FUSED = {  # required fields and orders of each kind that may stack arrays in one
    "bilinear": (("fused",), "left-right or right-left"),
    "attention": (("fused", "o", "n_heads"), "q-k-v or q1-k1-q2-k2-v"),
    "gated": (("fused", "down", "activation"), "gate-up or up-gate"),
}
_CHOICES = {  # values that a field may have
    "mask": MASKS,
    "score_power": (0, 1, 2),
    "rope_layout": ("half", "interleaved"),
    "rope_direction": (1, -1),
    "residual": ("additive", "lerp", None),
    "fused_order": (
        "left-right",
        "right-left",
        "q-k-v",
        "q1-k1-q2-k2-v",
        "gate-up",
        "up-gate",
    ),
    "norm": ("rms", "layer", None),
}


@dataclass(frozen=True, repr=False)
class Rule:
    """One layer, or with `repeat` a run of layers, in terms of names of keys.

    A linear rule has `weight` and `bias`; a bilinear one `left`, `right`, `down`; an attention rule
    `q1`, `k1`, `q2`, `k2`, `v`, `o`, where two roles may name one array; a gated one `gate`, `up`,
    `down`. Each of these also has `<role>_bias`. A bilinear rule without `down` writes its hidden
    units out; a gated one without `up` is a block of one hidden layer. An elementwise rule has no
    array.

    Attributes:
        kind: "linear", "bilinear", "attention", "elementwise" or "gated".
        activation: Name of the activation, such as "relu", "gelu" or "gelu_tanh".
        fused: Key of an array that stacks the arrays of several roles on axis 0: left and right, or
            gate and up, or all of attention but o. `fused_bias` is the key of their stacked biases.
        fused_order: Order of the roles, "left-right" or "right-left"; for a gate "gate-up" or
            "up-gate"; for attention "q-k-v", where both scores share q and k, or "q1-k1-q2-k2-v".
        transpose: Whether matrices are stored (in, out).
        lifted: Whether column 0 of left and right multiplies a constant 1.
        residual: "additive" for x + s f(x), "lerp" for (1 - s) x + s f(x), None for f(x).
        scale: The number s, the key of a tensor with this number, or "config:a.b".
        n_heads: The number of heads, or "config:a.b".
        mask: "causal" or "none".
        score_power: Exponent p; the product of the two scores is divided by d_head^p.
        rope_base: Base of the rotary angles or "config:a.b"; None for no RoPE.
        rope_layout: "half" turns coordinates (i, i + d_head / 2), "interleaved" (2 i, 2 i + 1).
        rope_direction: Sign of the angle, 1 or -1.
        norm: "rms" or "layer" for a norm before the layer, inside its residual: g x / sqrt(e + eps)
            + c, where e is the mean square of x, and "layer" subtracts the mean from x first.
        norm_weight: Key of g; None for 1.
        norm_bias: Key of c; None for 0.
        norm_energy: Key of a constant to take for e; then no inputs are needed.
        norm_epsilon: The number eps.
        repeat: Whether the rule stands for a run of layers.

    "config:a.b" is read from config.json or config.yaml beside the file.

    Example:
        >>> Rule("bilinear", left="w_l", right="w_r").main_key
        'w_l'

    Source:
        Attention and its scale: section 2.1 of the paper, where p is 2.
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
    gate: str | None = None
    up: str | None = None
    gate_bias: str | None = None
    up_bias: str | None = None
    activation: str | None = None
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
    norm: str | None = None
    norm_weight: str | None = None
    norm_bias: str | None = None
    norm_energy: str | None = None
    norm_epsilon: float = 0.0
    repeat: bool = False

    def __repr__(self) -> str:
        said = [f"{name}={value!r}" for name, value in self.changed().items()]
        return f"Rule({', '.join(said)})"

    def changed(self) -> dict[str, Any]:
        """The fields with other than their default values.

        Returns:
            Values by name, the kind among them.

        Example:
            >>> Rule("linear", weight="w").changed()
            {'kind': 'linear', 'weight': 'w'}
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: value for name, value in vars(self).items() if value != defaults[name]}

    @property
    def main_key(self) -> str:
        """A key that every layer of the rule has; a repeated rule goes on while the key exists."""
        return self.weight or self.fused or self.left or self.q1 or self.gate or ""

    def numbered(self, i: int) -> Rule:
        """The rule of one layer in a run of layers.

        Args:
            i: Number of the layer in the run, from 0.

        Returns:
            The rule with `{i}` replaced in all keys.

        Example:
            >>> Rule("linear", weight="blocks.{i}.weight", repeat=True).numbered(3).weight
            'blocks.3.weight'
        """
        keys = {
            name: value.replace("{i}", str(i))
            for name, value in vars(self).items()
            if isinstance(value, str)
        }
        return dataclasses.replace(self, **keys)


def facts(rule: Rule) -> list[str]:
    """The conventions of a rule that determine the function, in words.

    Args:
        rule: A rule that passed `check_rule`.

    Returns:
        Phrases, none for a plain linear layer.

    Example:
        >>> facts(Rule("bilinear", left="l", right="r", down="d", residual="additive"))
        ['residual x + s f(x) with s = 1.0']
    """
    phrases = []
    if rule.transpose:
        phrases.append("matrices are stored (in, out)")
    if rule.fused:
        order = " then ".join(rule.fused_order.split("-"))
        phrases.append(f"{rule.fused} stacks {order} on axis 0")
    if rule.lifted:
        phrases.append("column 0 of left and right is a bias")
    if rule.residual:
        phrases.append(f"residual {_RESIDUALS[rule.residual]} with s = {rule.scale}")
    if rule.norm_energy:
        phrases.append(f"input divided by sqrt({rule.norm_energy} + {rule.norm_epsilon:g})")
    elif rule.norm:
        phrases.append(f"{rule.norm} norm before it, eps {rule.norm_epsilon:g}")
    if rule.kind == "attention":
        phrases += _attention_facts(rule)
    if rule.activation:
        phrases.append(f"activation {rule.activation}")
    if rule.kind == "bilinear" and not rule.down:
        phrases.append("hidden units are the output")
    if not (rule.residual or rule.kind in ("linear", "elementwise")):
        phrases.append("no residual")
    return phrases


_RESIDUALS = {"additive": "x + s f(x)", "lerp": "(1 - s) x + s f(x)"}
_DIRECTIONS = {1: "forward", -1: "backward"}


def _attention_facts(rule: Rule) -> list[str]:
    power = f"scores divided by d_head^{rule.score_power}"
    phrases = [f"{rule.n_heads} heads, {rule.mask} mask, {power}"]
    if rule.rope_base:
        direction = _DIRECTIONS[rule.rope_direction]
        phrases.append(f"RoPE base {rule.rope_base}, {rule.rope_layout} layout, {direction}")
    else:
        phrases.append("no RoPE")
    if (rule.q1 == rule.q2 and rule.k1 == rule.k2) and rule.fused_order != "q1-k1-q2-k2-v":
        phrases.append("both scores share their weights")
    return phrases


def is_finite(value: Any) -> bool:
    """Whether a value out of a text file is a number that floats can hold.

    Args:
        value: Value that a parser gave.

    Returns:
        False for booleans, infinities, NaN, other types, and integers beyond floats.

    Example:
        >>> is_finite(3), is_finite(True), is_finite(10**400)
        (True, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    largest = sys.float_info.max
    return value <= largest and not value < -largest  # the first comparison is false for NaN


def check_rule(rule: Rule, where: str) -> None:
    """Refuse a rule that is incomplete or has a field with an impossible value.

    Args:
        rule: Any rule.
        where: Words in front of a message.

    Raises:
        CheckpointError: For a wrong field, which the message names.
        UnsupportedLayer: For an unknown kind of layer.

    Example:
        >>> check_rule(Rule("softmax"), "rule 0")
        Traceback (most recent call last):
            ...
        tnsim.errors.UnsupportedLayer: rule 0: kind 'softmax' is no layer that can be read; known...
    """
    hints = _hints()
    for field in dataclasses.fields(Rule):
        value = getattr(rule, field.name)
        if not _has_type(value, hints[field.name]):
            raise CheckpointError(f"{where}: {field.name} must be {field.type}, found {value!r}")
    if rule.kind not in _REQUIRED:
        raise UnsupportedLayer(
            f"{where}: kind {rule.kind!r} is no layer that can be read; "
            f"known are {', '.join(_REQUIRED)}. {ON_INPUTS}"
        )
    for field, known in _CHOICES.items():
        if (value := getattr(rule, field)) not in known:
            names = " or ".join(repr(choice) for choice in known if choice is not None)
            raise CheckpointError(f"{where}: {field} {value!r} is unknown, use {names}")
    if rule.activation is not None:
        try:
            activation(rule.activation)
        except TnsimError as error:
            raise CheckpointError(f"{where}: {error}") from None
    _check_keys(rule, where)


def _check_keys(rule: Rule, where: str) -> None:
    required = _REQUIRED[rule.kind]
    instead = ""
    if rule.kind in _FUSED:
        instead = ", or fused"
        if rule.fused:
            required, orders = _FUSED[rule.kind]
            if rule.fused_order not in orders.split(" or "):
                raise CheckpointError(
                    f"{where}: fused_order of a {rule.kind} rule is {orders}, "
                    f"found {rule.fused_order}"
                )
    for field in required:
        key = getattr(rule, field)
        if not key:
            names = ", ".join(_REQUIRED[rule.kind])
            raise CheckpointError(f"{where}: a {rule.kind} rule names {names}{instead}")
        if isinstance(key, str) and key.endswith("?"):
            raise CheckpointError(f"{where}: {field} {key!r} may not be absent, remove the ?")
    if rule.repeat and "{i}" not in rule.main_key:
        raise CheckpointError(
            f"{where}: repeats {rule.main_key!r}, which is the same key each time; "
            "put {i} where the number of the layer stands"
        )


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
