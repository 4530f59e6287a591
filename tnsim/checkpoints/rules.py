"""Rules: descriptions of how a foreign state dict spells a layer, a class for each kind of layer.

Everything that would change the function if it were guessed wrong is a field of its rule. A rule is
checked once (`check_rule`), and `facts` says its conventions in words.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from tnsim.activations.activation import activation
from tnsim.errors import CheckpointError, TnsimError, UnsupportedLayer
from tnsim.models.layers import MASKS

PROJECTIONS = ("q1", "k1", "q2", "k2", "v", "o")
SECOND_SCORE = ("q2", "k2")  # projections that linear attention lacks
# Fields whose numbers a file or its configuration may hold.
NUMBERS = ("scale", "n_heads", "rope_base", "norm_energy")
_CHOICES = {  # values that a field may have
    "mask": MASKS,
    "scores": (2, 1),
    "score_power": (0, 0.5, 1, 2),
    "rope_layout": ("half", "interleaved"),
    "rope_direction": (1, -1),
    "residual": ("additive", "lerp", None),
    "norm": ("rms", "layer", None),
}
_RESIDUALS = {"additive": "x + s f(x)", "lerp": "(1 - s) x + s f(x)"}
_DIRECTIONS = {1: "forward", -1: "backward"}


@dataclass(frozen=True, repr=False, kw_only=True)
class Rule:
    """The fields that rules of every kind share; a rule is an object of a class below.

    Attributes:
        transpose: Whether matrices are stored (in, out).
        residual: "additive" for x + s f(x), "lerp" for (1 - s) x + s f(x), None for f(x).
        scale: The number s, the key of a tensor with this number, or "config:a.b".
        norm: "rms" or "layer" for a norm before the layer, inside its residual: g x / sqrt(e + eps)
            + c, where e is the mean square of x, and "layer" subtracts the mean from x first.
        norm_weight: Key of g; None for 1.
        norm_bias: Key of c; None for 0.
        norm_energy: Key of a constant to take for e; then no inputs are needed.
        norm_epsilon: The number eps.
        repeat: Whether the rule stands for a run of layers, in whose keys `{i}` counts.

    "config:a.b" is read from config.json or config.yaml beside the file.
    """

    kind: ClassVar[str] = ""
    required: ClassVar[tuple[str, ...]] = ()
    main: ClassVar[tuple[str, ...]] = ()  # fields whose first key is `main_key`

    transpose: bool = False
    residual: str | None = None
    scale: float | str = 1.0
    norm: str | None = None
    norm_weight: str | None = None
    norm_bias: str | None = None
    norm_energy: str | None = None
    norm_epsilon: float = 0.0
    repeat: bool = False

    def __repr__(self) -> str:
        said = [f"{name}={value!r}" for name, value in self.changed().items() if name != "kind"]
        return f"{type(self).__name__}({', '.join(said)})"

    def changed(self) -> dict[str, Any]:
        """The fields with other than their default values, as a dialect's file has them.

        Returns:
            Values by name, the kind among them.

        Example:
            >>> LinearRule(weight="w").changed()
            {'kind': 'linear', 'weight': 'w'}
        """
        # Files stay short and readable with changed fields alone.
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        chosen = {name: value for name, value in vars(self).items() if value != defaults[name]}
        return {"kind": self.kind, **chosen}

    @property
    def main_key(self) -> str:
        """A key that every layer of the rule has; a repeated rule goes on while the key exists.

        Of stacked arrays it is theirs, and empty for a rule without arrays.
        """
        return next((key for name in self.main if (key := getattr(self, name))), "")

    def numbered(self, i: int) -> Self:
        """The rule of a single layer in a run of layers.

        Args:
            i: Number of the layer in the run, from 0.

        Returns:
            The rule with `{i}` replaced in all keys.

        Example:
            >>> LinearRule(weight="blocks.{i}.weight", repeat=True).numbered(3).weight
            'blocks.3.weight'
        """
        keys = {
            name: value.replace("{i}", str(i))
            for name, value in vars(self).items()
            if isinstance(value, str)
        }
        return dataclasses.replace(self, **keys)


@dataclass(frozen=True, repr=False, kw_only=True)
class LinearRule(Rule):
    """A linear layer, W x + b, in terms of names of keys.

    Attributes:
        weight: Key of W.
        bias: Key of b, "key?" where it may be absent.

    The fields of `Rule` besides: `transpose`, a residual and a norm.

    Example:
        >>> LinearRule(weight="head.weight", bias="head.bias?")
        LinearRule(weight='head.weight', bias='head.bias?')
    """

    kind: ClassVar[str] = "linear"
    required: ClassVar[tuple[str, ...]] = ("weight",)
    main: ClassVar[tuple[str, ...]] = ("weight",)

    weight: str | None = None
    bias: str | None = None


@dataclass(frozen=True, repr=False, kw_only=True)
class StackedRule(Rule):
    """A rule whose arrays may be stacked.

    Attributes:
        fused: Key of an array that stacks the arrays of several roles on axis 0.
        fused_bias: Key of their stacked biases.
        fused_order: Order of the roles.
    """

    required_fused: ClassVar[tuple[str, ...]] = ("fused",)
    orders: ClassVar[tuple[str, ...]] = ()

    fused: str | None = None
    fused_bias: str | None = None
    fused_order: str | None = None


@dataclass(frozen=True, repr=False, kw_only=True)
class BilinearRule(StackedRule):
    """A bilinear layer, D ((L x + l) * (R x + r)) + b, in terms of names of keys.

    Attributes:
        left, right: Keys of L and R.
        down: Key of D; without it the hidden units are the output.
        left_bias, right_bias, down_bias: Keys of l, r and b.
        fused: Key of an array that stacks left and right on axis 0; `fused_bias` is the key of
            their stacked biases, and `fused_order` is "left-right" or "right-left".
        lifted: Whether column 0 of left and right multiplies a constant 1.

    The fields of `Rule` besides: `transpose`, a residual and a norm.

    Example:
        >>> BilinearRule(left="w_l", right="w_r", down="w_d", residual="additive").main_key
        'w_l'
    """

    kind: ClassVar[str] = "bilinear"
    required: ClassVar[tuple[str, ...]] = ("left", "right")
    main: ClassVar[tuple[str, ...]] = ("fused", "left")
    orders: ClassVar[tuple[str, ...]] = ("left-right", "right-left")

    left: str | None = None
    right: str | None = None
    down: str | None = None
    left_bias: str | None = None
    right_bias: str | None = None
    down_bias: str | None = None
    fused_order: str | None = "left-right"
    lifted: bool = False


@dataclass(frozen=True, repr=False, kw_only=True)
class AttentionRule(StackedRule):
    """An attention layer with two scores or a single score, in terms of names of keys.

    Attributes:
        q1, k1, q2, k2, v, o: Keys of the projections; two roles may name the same array.
        q1_bias, k1_bias, q2_bias, k2_bias, v_bias, o_bias: Keys of their biases.
        fused: Key of an array that stacks all projections but o on axis 0; `fused_bias` is the key
            of their stacked biases, and `fused_order` is "q-k-v", where both scores share q and k,
            or "q1-k1-q2-k2-v".
        by_head: Whether arrays have an axis of heads: queries, keys and values (heads, d_in,
            d_head), their biases (heads, d_head), and o (heads, d_head, d_out).
        scores: 2, or 1 for linear attention: without q2, k2 and RoPE, and "q-k-v" where stacked.
        n_heads: The number of heads, or "config:a.b".
        mask: "causal" or "none".
        score_power: Exponent p, one of 0, 0.5, 1 and 2; the product of the scores is divided by
            d_head^p.
        rope_base: Base of the rotary angles or "config:a.b"; None for no RoPE.
        rope_layout: "half" turns coordinates (i, i + d_head / 2), "interleaved" (2 i, 2 i + 1).
        rope_direction: Sign of the angle, 1 or -1.

    The fields of `Rule` besides: `transpose`, a residual and a norm.

    Example:
        >>> rule = AttentionRule(fused="qkv", fused_order="q-k-v", o="out", n_heads=4)
        >>> rule.main_key, rule.mask
        ('qkv', 'causal')

    Source:
        Attention and its scale: section 2.1 of the paper, where p is 2.
    """

    kind: ClassVar[str] = "attention"
    required: ClassVar[tuple[str, ...]] = (*PROJECTIONS, "n_heads")
    main: ClassVar[tuple[str, ...]] = ("fused", "q1")
    required_fused: ClassVar[tuple[str, ...]] = ("fused", "o", "n_heads")
    orders: ClassVar[tuple[str, ...]] = ("q-k-v", "q1-k1-q2-k2-v")

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
    by_head: bool = False
    scores: int = 2
    n_heads: int | str | None = None
    mask: str = "causal"
    score_power: float = 2
    rope_base: float | str | None = None
    rope_layout: str = "half"
    rope_direction: int = 1


@dataclass(frozen=True, repr=False, kw_only=True)
class ElementwiseRule(Rule):
    """A function of every coordinate, f(x); it has no array.

    Attributes:
        activation: Name of f, such as "relu", "gelu" or "gelu_tanh".

    The residual of `Rule` besides.

    Example:
        >>> ElementwiseRule(activation="relu").main_key
        ''
    """

    kind: ClassVar[str] = "elementwise"
    required: ClassVar[tuple[str, ...]] = ("activation",)

    activation: str | None = None


@dataclass(frozen=True, repr=False, kw_only=True)
class GatedRule(StackedRule):
    """A gated layer, D (f(G x + g) * (U x + u)) + b, in terms of names of keys.

    Attributes:
        gate: Key of G.
        up: Key of U; without it a hidden unit is f(G x + g).
        down: Key of D.
        gate_bias, up_bias, down_bias: Keys of g, u and b.
        activation: Name of f, such as "silu", "gelu" or "gelu_tanh".
        fused: Key of an array that stacks gate and up on axis 0; `fused_bias` is the key of their
            stacked biases, and `fused_order` is "gate-up" or "up-gate".

    The fields of `Rule` besides: `transpose`, a residual and a norm.

    Example:
        >>> GatedRule(gate="w1", up="w3", down="w2", activation="silu").main_key
        'w1'
    """

    kind: ClassVar[str] = "gated"
    required: ClassVar[tuple[str, ...]] = ("gate", "down", "activation")
    main: ClassVar[tuple[str, ...]] = ("fused", "gate")
    required_fused: ClassVar[tuple[str, ...]] = ("fused", "down", "activation")
    orders: ClassVar[tuple[str, ...]] = ("gate-up", "up-gate")

    gate: str | None = None
    up: str | None = None
    down: str | None = None
    gate_bias: str | None = None
    up_bias: str | None = None
    down_bias: str | None = None
    activation: str | None = None


_CLASSES = (LinearRule, BilinearRule, AttentionRule, ElementwiseRule, GatedRule)
KINDS: dict[str, type[Rule]] = {kind.kind: kind for kind in _CLASSES}
"""Classes of rules by the kind that a dialect's file names."""


def rule_of(fields: Mapping[str, Any], where: str) -> Rule:
    """The rule that an object in a dialect's file describes, not checked yet.

    Args:
        fields: Values by name, the kind among them.
        where: Words in front of a message.

    Raises:
        CheckpointError: The kind has no such field.
        UnsupportedLayer: The kind is unknown.

    Example:
        >>> rule_of({"kind": "linear", "weight": "w"}, "layer rule 0")
        LinearRule(weight='w')
    """
    # A value that cannot be hashed would fail in the lookup with an error of Python.
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise UnsupportedLayer(
            f"{where}: kind {kind!r} is no layer that can be read; known are {', '.join(KINDS)}"
        )
    # An unknown field is refused and never ignored: it may have been meant to change the function.
    known = {field.name for field in dataclasses.fields(KINDS[kind])}
    if surplus := sorted(set(fields) - known - {"kind"}):
        raise CheckpointError(
            f"{where} has unknown fields {surplus}; a {kind} rule has {sorted(known)}"
        )
    return KINDS[kind](**{name: value for name, value in fields.items() if name != "kind"})


def facts(rule: Rule) -> list[str]:
    """The conventions of a rule that determine the function, in words.

    Args:
        rule: A rule that passed `check_rule`.

    Returns:
        Phrases, none for a plain linear layer.

    Example:
        >>> facts(BilinearRule(left="l", right="r", down="d", residual="additive"))
        ['residual x + s f(x) with s = 1.0']
    """
    phrases = []
    if rule.transpose:
        phrases.append("matrices are stored (in, out)")
    if isinstance(rule, StackedRule) and rule.fused:
        order = " then ".join(str(rule.fused_order).split("-"))
        phrases.append(f"{rule.fused} stacks {order} on axis 0")
    if isinstance(rule, BilinearRule) and rule.lifted:
        phrases.append("column 0 of left and right is a bias")
    if rule.residual:
        phrases.append(f"residual {_RESIDUALS[rule.residual]} with s = {rule.scale}")
    if rule.norm_energy:
        phrases.append(f"input divided by sqrt({rule.norm_energy} + {rule.norm_epsilon:g})")
    elif rule.norm:
        phrases.append(f"{rule.norm} norm before it, eps {rule.norm_epsilon:g}")
    if isinstance(rule, AttentionRule):
        phrases += _attention_facts(rule)
    if isinstance(rule, ElementwiseRule | GatedRule):
        phrases.append(f"activation {rule.activation}")
    if isinstance(rule, BilinearRule) and not rule.down:
        phrases.append("hidden units are the output")
    if not (rule.residual or isinstance(rule, LinearRule | ElementwiseRule)):
        phrases.append("no residual")
    return phrases


def _attention_facts(rule: AttentionRule) -> list[str]:
    power = f"scores divided by d_head^{rule.score_power}"
    phrases = [f"{rule.n_heads} heads, {rule.mask} mask, {power}"]
    if rule.rope_base:
        direction = _DIRECTIONS[rule.rope_direction]
        phrases.append(f"RoPE base {rule.rope_base}, {rule.rope_layout} layout, {direction}")
    else:
        phrases.append("no RoPE")
    if rule.by_head:
        phrases.append("matrices are stored by head")
    if rule.scores == 1:
        phrases.append("a single score (linear attention)")
    # A stack in the order q-k-v leaves all keys at None, which are equal too.
    elif (rule.q1 == rule.q2 and rule.k1 == rule.k2) and rule.fused_order != "q1-k1-q2-k2-v":
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


def check_rule(rule: Any, where: str) -> None:
    """Refuse a rule that is incomplete or has a field with an impossible value.

    Args:
        rule: Any rule.
        where: Words in front of a message.

    Raises:
        CheckpointError: For a wrong field, which the message names, and for another object.

    Example:
        >>> check_rule(LinearRule(bias="b"), "rule 0")
        Traceback (most recent call last):
            ...
        tnsim.errors.CheckpointError: rule 0: a linear rule names weight
    """
    # A subclass could have fields that nobody checks.
    if type(rule) not in KINDS.values():
        names = ", ".join(f"tnsim.dialects.{kind.__name__}" for kind in KINDS.values())
        raise CheckpointError(f"{where} must be one of {names}, found {rule!r}")
    hints = _field_types(type(rule))
    for field in dataclasses.fields(rule):
        # JSON gives any type for any field.
        value = getattr(rule, field.name)
        if not _has_type(value, hints[field.name]):
            raise CheckpointError(f"{where}: {field.name} must be {field.type}, found {value!r}")
        known = _CHOICES.get(field.name)
        if known is not None and value not in known:
            names = " or ".join(repr(choice) for choice in known if choice is not None)
            raise CheckpointError(f"{where}: {field.name} {value!r} is unknown, use {names}")
    _check_keys(rule, where)
    if isinstance(rule, ElementwiseRule | GatedRule):
        try:
            activation(str(rule.activation))
        except TnsimError as error:
            raise CheckpointError(f"{where}: {error}") from None


def _check_keys(rule: Rule, where: str) -> None:
    required = own = _required_keys(rule, where)
    if isinstance(rule, AttentionRule) and rule.by_head and (rule.fused or rule.transpose):
        raise CheckpointError(
            f"{where}: arrays by head (by_head) are neither stacked (fused) nor transposed"
        )
    instead = ""
    if isinstance(rule, StackedRule):
        instead = ", or fused"
        if rule.fused:
            required = rule.required_fused
            if rule.fused_order not in rule.orders:
                raise CheckpointError(
                    f"{where}: fused_order of a {rule.kind} rule is {' or '.join(rule.orders)}, "
                    f"found {rule.fused_order}"
                )
    for field in required:
        key = getattr(rule, field)
        if not key:
            names = ", ".join(own)
            raise CheckpointError(f"{where}: a {rule.kind} rule names {names}{instead}")
        # A layer without its main arrays is no layer, so these cannot be optional.
        if isinstance(key, str) and key.endswith("?"):
            raise CheckpointError(f"{where}: {field} {key!r} may not be absent, remove the ?")
    # A run would never end.
    if rule.repeat and "{i}" not in rule.main_key:
        raise CheckpointError(
            f"{where}: repeats {rule.main_key!r}, which is the same key each time; "
            "put {i} where the number of the layer stands"
        )


def _required_keys(rule: Rule, where: str) -> tuple[str, ...]:
    """The fields that a rule without stacked arrays has to name."""
    if not (isinstance(rule, AttentionRule) and rule.scores == 1):
        return rule.required
    # The second score is a constant then, which no rotation may turn.
    for field in (*SECOND_SCORE, *(f"{role}_bias" for role in SECOND_SCORE), "rope_base"):
        if getattr(rule, field) is not None:
            raise CheckpointError(
                f"{where}: attention of a single score (scores = 1) has no {field}, leave it out"
            )
    if rule.fused and rule.fused_order != "q-k-v":
        raise CheckpointError(
            f"{where}: fused_order of attention with a single score is q-k-v, found "
            f"{rule.fused_order}"
        )
    return tuple(field for field in rule.required if field not in SECOND_SCORE)


@functools.cache
def _field_types(kind: type[Rule]) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _has_type(value: Any, hint: Any) -> bool:
    """Whether JSON could hold a value of such a type; a boolean is no number here."""
    kinds = typing.get_args(hint) or (hint,)
    if isinstance(value, bool):
        return bool in kinds
    if float in kinds and isinstance(value, numbers.Real):
        return is_finite(value)
    return isinstance(value, kinds)
