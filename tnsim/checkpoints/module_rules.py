"""Recognition of layers: the calls of a PyTorch module become rules of a dialect.

Nothing is read off the names of classes. A layer is a few calls whose arrays fit together: the
input of `down` is the product of the outputs of `left` and `right`, and the input of the next layer
is `a x + b f(x)` of the input x and the output f(x) of this layer. Arrays are those of random
weights and inputs, so that arrays do not fit by chance. Where nothing fits, the place is named.

A forward pass may call a function that is no submodule. Where the next call reads the result of
such a function of the layer before, a known activation is a layer, or the gate of a layer;
another function is named by the refusal (`unknown_function`). Activations are told apart by their
values alone, so that no name can be mistaken: the two forms of GELU differ by 4e-4.

Attention without softmax takes its roles from names (q1, k1, q2, k2, v, o; or q, k, v, o), or from
the parts of a single linear layer that stacks all but o, or from parameters (heads, d_in, d_head)
of a submodule that calls no other. Everything that no name tells is tried:
two scores that share q and k, or a single score (linear attention); the number of heads, the mask,
the rotation and the power of d_head in the scores. A rule is accepted where it computes the output
of the module (`attention_rules`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tnsim.activations.activation import activation
from tnsim.checkpoints.layer_rules import layer
from tnsim.checkpoints.module_calls import Call, join, kind, require_torch
from tnsim.checkpoints.named_arrays import NamedArrays
from tnsim.checkpoints.rules import (
    PROJECTIONS,
    SECOND_SCORE,
    AttentionRule,
    BilinearRule,
    ElementwiseRule,
    GatedRule,
    LinearRule,
    Rule,
)
from tnsim.errors import BY_PARTS, ON_INPUTS, OWN_ACTIVATION, UnsupportedLayer

ACTIVATIONS = (  # names of the registry, the most frequent first
    "relu",
    "gelu",
    "gelu_tanh",
    "silu",
    "tanh",
    "sigmoid",
    "softplus",
    "elu",
    "leaky_relu",
    "relu2",
    "relu6",
    "hardtanh",
    "hardswish",
    "abs",
    "erf",
    "sin",
    "step",
    "mish",
    "tanhshrink",
)
ENTRYWISE = ("selu", "celu", "softsign", "logsigmoid")
OVER_COORDINATES = ("softmax", "log_softmax", "normalize")
NORMS = ("layer_norm", "rms_norm")
ATTENTION_FITS = 1e-5  # relative to the output: tables of a rotation are often of float32
POWERS = (2, 1, 0, 0.5)  # powers of d_head by which scores may be divided, the paper's first
BASES = re.compile(r"rope|theta|base")
_ROLE = re.compile(
    r"(?:^|\.)(?:w_?|to_?)?([qkvo][12]?|query|key|value|out(?:put)?)(?:_?proj)?(?:\.\d+)?$",
    re.IGNORECASE,
)
_BIAS = re.compile(r"^(?:b_?(\w+)|(\w+)_bias)$", re.IGNORECASE)
ROLES = (set(PROJECTIONS), {"q", "k", "v", "o"})  # names of a whole layer
FITS = 1e-9  # relative to the size of an array: float64 leaves six digits more
NORM_MODULES = {"LayerNorm": "layer", "RMSNorm": "rms"}  # norms of rules by PyTorch's names
Declared = Rule | Callable[[Any], Any]


def activation_between(before: np.ndarray, after: np.ndarray) -> str | None:
    """The name of the activation that leads from some numbers to others, None where none does.

    Args:
        before: Numbers of any shape, some of them far from zero.
        after: Values of an activation at these numbers.

    Example:
        >>> numbers = np.linspace(-3.0, 3.0, 8)
        >>> activation_between(numbers, np.tanh(numbers))
        'tanh'
    """
    # Token numbers and arrays of other shape are no values of an activation.
    if before.shape != after.shape or before.dtype.kind != "f":
        return None
    fitting = (name for name in ACTIVATIONS if same(activation(name)(before), after))
    return next(fitting, None)


def unknown_function(calls: Sequence[Call], end: np.ndarray) -> str | None:
    """The function between the first of some calls and the next, alone or as a gate.

    Args:
        calls: Calls of a module, from a layer on.
        end: Output of the module, which follows the last call.

    Returns:
        Name of the function in `torch.nn.functional`, or "top-k"; None where no known function
        fits.
    """
    torch = require_torch()
    first, *rest = calls
    tensor = torch.from_numpy(first.result)
    following = rest[0].given if rest else end
    for name in (*ENTRYWISE, *OVER_COORDINATES, *NORMS):
        settings: dict[str, Any] = {}
        if name in OVER_COORDINATES:
            settings = {"dim": -1}
        elif name in NORMS:
            settings = {"normalized_shape": tensor.shape[-1:]}
        # Token numbers come out of no function of this list.
        if not tensor.is_floating_point():
            continue
        # The function itself is run, so that no formula of it stands here twice.
        result = getattr(torch.nn.functional, name)(tensor, **settings).numpy()
        if _same(result, following):
            return name
        # A gate reads the result of the first call and multiplies the result of the second.
        gated = len(rest) > 1 and result.shape == rest[0].result.shape
        if gated and _same(result * rest[0].result, rest[1].given):
            return f"a gate by {name}"
    return "top-k" if _keeps_largest(first.result, following) else None


def _keeps_largest(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether equally many of the largest numbers are kept in every row, and the others are 0."""
    if before.shape != after.shape or before.dtype.kind != "f":
        return False
    kept = after != 0
    # Every row of top-k keeps equally many numbers.
    counts = np.unique(kept.sum(axis=-1))
    if len(counts) > 1 or not 0 < counts[0] < before.shape[-1]:
        return False
    largest = np.sort(before, axis=-1)[..., -int(counts[0]) :]
    # The kept numbers have to be the largest, not just any.
    return _same(np.sort(after[kept].reshape(largest.shape), axis=-1), largest)


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-9, atol=1e-12)


def attention_rules(
    module: Any, run: Sequence[Call], arrays: Mapping[str, Any]
) -> Iterator[tuple[int, Rule]]:
    """The rule of an attention layer with which calls begin.

    Args:
        module: The whole module, whose attributes may hold the base of a rotation.
        run: Calls of linear layers, or the call of a submodule with parameters of its own.
        arrays: Tensors of the module by name.

    Yields:
        The number of calls and the rule; nothing where no rule fits.

    Raises:
        UnsupportedLayer: A rule fits but for a factor that is no power of d_head.
    """
    # Attention reads a batch of sequences.
    if run[0].given.ndim != 3:
        return
    shapes = *_stacked_projections(run), *_separate_projections(run), *_by_head(run[0])
    for shape in shapes:
        output = run[shape.calls - 1].result
        for rule in _hypotheses(shape, module):
            # Nothing but the output decides; names only make the hypotheses fewer.
            fit = _fitted_scores(rule, NamedArrays(arrays, None), run[0].given, output)
            if fit is None:
                continue
            factor, power = fit
            if power is None:
                plain = "q . k" if rule.scores == 1 else "the product of both scores"
                raise UnsupportedLayer(
                    f"{_call_name(run[0])} begins attention without softmax, with scores that "
                    f"differ by the factor {factor:.6g} from {plain}; known are 1, "
                    "1 / sqrt(d_head), 1 / d_head and 1 / d_head^2. Put the factor into the "
                    "weights of the values, or declare the class: "
                    "layers={Class: lambda module: tnsim.Attention(...)}"
                )
            yield shape.calls, replace(rule, score_power=power)
            return


class Shape(NamedTuple):
    """Projections that may belong to an attention layer.

    Attributes:
        calls: Number of calls.
        keys: Fields of the rule of the layer.
        rows: Number of rows of queries, and of values.
        heads: Number of heads, None where unknown.
    """

    calls: int
    keys: dict[str, Any]
    rows: tuple[int, int]
    heads: int | None = None


def _separate_projections(run: Sequence[Call]) -> Iterator[Shape]:
    """Projections by separate linear layers, recognised by their names."""
    roles = _projection_roles(run)
    if roles is None:
        return
    keys: dict[str, Any] = {}
    for role in PROJECTIONS:
        # Where q and k have no number, both scores share them.
        keys |= _attention_keys(role, roles.get(role) or roles[role[0]])
    query = roles.get("q1") or roles["q"]
    yield Shape(len(roles), keys, (query.result.shape[-1], roles["v"].result.shape[-1]))


def _stacked_projections(run: Sequence[Call]) -> Iterator[Shape]:
    """Projections by a linear layer that stacks them, recognised by the next input's width."""
    if len(run) < 2:
        return
    # The width that the output map reads is the number of rows of a role.
    for order in ("q-k-v", "q1-k1-q2-k2-v"):
        rows = run[1].given.shape[-1]
        if run[0].result.shape[-1] == rows * len(order.split("-")):
            keys = (
                _attention_keys("fused", run[0])
                | _attention_keys("o", run[1])
                | {"fused_order": order}
            )
            yield Shape(2, keys, (rows, rows))


def _by_head(call: Call) -> Iterator[Shape]:
    """Projections by parameters of a single submodule that have an axis of heads, by their names.

    Biases are called b_Q, bq or q_bias.
    """
    own = dict(call.module.named_parameters(recurse=False))
    roles: dict[str, Any] = {}
    keys: dict[str, Any] = {"by_head": True}
    biases: dict[str, str] = {}
    for name in own:
        bias = _BIAS.match(name)
        if (role := _role(bias[1] or bias[2] if bias else name)) is None:
            return
        (biases if bias else roles)[role] = name
    if set(roles) not in ROLES or any(own[name].ndim != 3 for name in roles.values()):
        return
    for role in PROJECTIONS:
        # Where q and k have no number, both scores share them.
        shared = role if role in roles else role[0]
        keys[role] = join(call.path, roles[shared])
        if shared in biases:
            keys[f"{role}_bias"] = join(call.path, biases[shared])
    query, value = (own[roles[role]].shape for role in ("q1" if "q1" in roles else "q", "v"))
    yield Shape(1, keys, (query[0] * query[2], value[0] * value[2]), query[0])


def _attention_keys(role: str, call: Call) -> dict[str, str]:
    """The fields of a rule for the weights of a single linear layer."""
    keys = {role: join(call.path, "weight")}
    if call.module.bias is not None:
        keys[f"{role}_bias"] = join(call.path, "bias")
    return keys


def _projection_roles(run: Sequence[Call]) -> dict[str, Call] | None:
    """Calls by role, None where names or inputs do not fit attention."""
    roles: dict[str, Call] = {}
    for call in run:
        if (role := _role(call.path)) is None:
            break
        roles[role] = call
        # The output map closes the layer.
        if role == "o":
            break
        # All projections but o read the same state.
        if call.given is not run[0].given and not np.array_equal(call.given, run[0].given):
            return None
    return roles if set(roles) in ROLES else None


def _role(path: str) -> str | None:
    """The role that a name says, such as q or k1, None for other names."""
    # The end of the path is the name that the user gave, before a place in a Sequential.
    named = _ROLE.search(path)
    if named is None:
        return None
    role = named[1].lower()
    # Words stand for their first letter, and q1 for itself.
    return role[0] if role.isalpha() else role


def _hypotheses(shape: Shape, module: Any) -> Iterator[AttentionRule]:
    """Rules for every number of scores and heads, mask and rotation, the plainest first."""
    rows = shape.rows
    single = _single_score(shape.keys)
    # Heads divide the rows of queries and the rows of values alike.
    heads = [n for n in range(1, rows[0] + 1) if rows[0] % n == rows[1] % n == 0]
    heads = [n for n in heads if shape.heads in (None, n)]
    # Without a rotation first, then bases that the module itself names.
    bases = (None, *dict.fromkeys((*_rotation_bases(module), 10_000.0)))
    for base, n_heads, mask in itertools.product(bases, heads, ("causal", "none")):
        rule = AttentionRule(**shape.keys, n_heads=n_heads, mask=mask, rope_base=base)
        if base is None:
            yield rule
            # A constant second score survives no rotation, so a single score is tried without.
            if single is not None:
                yield AttentionRule(**single, n_heads=n_heads, mask=mask)
        elif rows[0] // n_heads % 2 == 0:
            # A rotation needs pairs of coordinates.
            for layout, turn in itertools.product(("half", "interleaved"), (1, -1)):
                yield replace(rule, rope_layout=layout, rope_direction=turn)


def _single_score(keys: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of linear attention, None where queries or keys of two scores are told apart."""
    shared = keys.get("q1") == keys.get("q2") and keys.get("k1") == keys.get("k2")
    # A stack in another order than q-k-v tells them apart.
    shared = shared and keys.get("fused_order") in (None, "q-k-v")
    if not shared:
        return None
    second = {name for role in SECOND_SCORE for name in (role, f"{role}_bias")}
    return {name: key for name, key in keys.items() if name not in second} | {"scores": 1}


def _rotation_bases(module: Any) -> Iterator[float]:
    """Numbers in attributes of submodules whose names fit the base of a rotation."""
    for child in module.modules():
        for name, value in vars(child).items():
            if BASES.search(name) and isinstance(value, (int, float)) and value > 1:
                yield float(value)


def _fitted_scores(
    rule: Rule, arrays: NamedArrays, x: np.ndarray, expected: np.ndarray
) -> tuple[float, float | None] | None:
    """The factor of the scores with which a rule computes the module's output, and its power.

    The factor is d_head^-p of the power p in `POWERS`, None for other factors. None where no factor
    of the scores gives the output.
    """
    attention: Any = layer(rule, arrays)
    bias = 0.0 if attention.o_bias is None else attention.o_bias
    # The rule divides by d_head^2, so the output is that of plain scores, times the factor.
    plain = (attention(x) - bias) * attention.d_head**2
    squares = float((plain * plain).sum())
    if squares == 0 or not np.isfinite(squares) or plain.shape != expected.shape:
        return None
    factor = float((plain * (expected - bias)).sum()) / squares
    known = [(attention.d_head**-power, power) for power in POWERS]
    for number, power in (*known, (factor, None)):
        given = number * plain + bias
        if np.allclose(given, expected, rtol=0, atol=ATTENTION_FITS * np.abs(expected).max()):
            return number, power
    return None


class ModulePart(NamedTuple):
    """A layer: a rule of a dialect, or a function of the user that makes layers of a submodule.

    Attributes:
        path: Name of the submodule with which the layer begins.
        rule: Rule with the names of the whole module; None for a function.
        make: The function; None for a rule.
        around: Skip and scale of the residual around the layer that the function makes.
    """

    path: str
    rule: Rule | None
    make: Callable[[Any], Any] | None = None
    around: tuple[float, float] | None = None


class Unit(NamedTuple):
    """Calls that may be a single layer: their number, input and output, and the layer itself."""

    calls: int
    given: np.ndarray
    result: np.ndarray
    part: ModulePart


@dataclass(frozen=True)
class Reader:
    """The module that is recognised, with its tensors.

    Attributes:
        module: The module with random weights.
        declared: Rules or functions for classes of the user.
        arrays: Tensors of the module by name.
        numbers: Parameters of a single entry by name, which may be scales of residuals.
    """

    module: Any
    declared: Mapping[type, Declared]
    arrays: Mapping[str, Any]
    numbers: Mapping[str, float]


def parts_of(
    reader: Reader, calls: Sequence[Call], start: np.ndarray, end: np.ndarray
) -> list[ModulePart]:
    """The layers that lead from the input of a module to its output.

    Args:
        reader: The module, for lookups.
        calls: Calls of the module's leaves, in order.
        start: Input of the module.
        end: Output of the module.

    Returns:
        Layers in order.

    Raises:
        UnsupportedLayer: Where no layer fits at a place, which the message names.
    """
    # A layer that reads the output of the module, such as a head behind it, has no share in it.
    calls = [*itertools.takewhile(lambda call: not same(call.given, end), calls)] or calls
    parts: list[ModulePart] = []
    stream, norm, last_norm = start, None, None
    n = 0
    while n < len(calls):
        call = calls[n]
        name = activation_between(stream, call.given)
        # A function before the next call is an activation of its own.
        if norm is None and name is not None and not same(call.given, stream):
            parts.append(_elementwise_part(name))
            stream = call.given
        # A norm waits for the layer behind it.
        if norm is None and kind(call.module) in NORM_MODULES and same(call.given, stream):
            norm = last_norm = call
            n += 1
            continue
        unit, part = _next_unit(reader, calls[n:], stream, norm, end, last_norm)
        parts.append(part)
        n += unit.calls
        # The next input tells how the layer goes on: by itself, in a residual or through an
        # activation.
        after = _given_next(calls[n:], end)
        # A layer whose output passes through an activation before the next layer reads it.
        stream, norm = unit.result if _is_activated(unit, after) else after, None
    if norm is not None:
        raise UnsupportedLayer(
            f"{norm.path} ({kind(norm.module)}) has no layer behind it into which it could go"
        )
    # An activation may stand last.
    if not same(stream, end):
        name = activation_between(stream, end)
        if name is None:
            raise _unexplained_step(calls[-1:], True, end, last_norm)
        parts.append(_elementwise_part(name))
    return parts


def _elementwise_part(name: str) -> ModulePart:
    return ModulePart("", ElementwiseRule(activation=name))


def _next_unit(
    reader: Reader,
    calls: Sequence[Call],
    stream: np.ndarray,
    norm: Call | None,
    end: np.ndarray,
    last_norm: Call | None,
) -> tuple[Unit, ModulePart]:
    """The first unit of the next calls that continues the stream, and its layer.

    The last norm so far is named where none fits: its output may be the stream.
    """
    # The layer behind a norm reads the norm's output, while its residual adds to the stream.
    available = stream if norm is None else norm.result
    reads_stream, multiple = False, ""
    for unit in _possible_units(reader, calls):
        if not same(unit.given, available):
            continue
        reads_stream = True
        after = _given_next(calls[unit.calls :], end)
        # A residual is tried first, as the plain layer is the case of skip 0.
        part = _with_residual(reader, unit, stream, after)
        if part is None and (factor := _constant_factor(unit.result, after)) is not None:
            multiple = f"it is the output of {_call_name(calls[unit.calls - 1])} times {factor:.6g}"
        if part is None and _is_activated(unit, after):
            part = unit.part
        if part is None or (_is_plain(unit.part.rule) and part is unit.part):
            continue
        if norm is not None:
            part = _behind_norm(norm, part)
        return unit, part
    if norm is not None and not reads_stream:
        # A norm that nothing reads has no place in a rule.
        raise UnsupportedLayer(
            f"{_call_name(norm)} does not stand directly before {_call_name(calls[0])}, so there "
            f"is no layer into which it could go. {ON_INPUTS}"
        )
    raise _unexplained_step(calls, reads_stream, end, norm or last_norm, multiple)


def _is_activated(unit: Unit, after: np.ndarray) -> bool:
    """Whether an activation alone leads from the output of a unit to the next input."""
    # The identity is no activation.
    if same(unit.result, after):
        return False
    return activation_between(unit.result, after) is not None


def _is_plain(rule: Rule | None) -> bool:
    """Whether a rule is a block of a single hidden layer, which has a use inside a residual alone.

    Without a residual the block is read as two linear layers with an activation between them.
    """
    return isinstance(rule, GatedRule) and not (rule.up or rule.fused)


def _given_next(calls: Sequence[Call], end: np.ndarray) -> np.ndarray:
    return calls[0].given if calls else end


def _possible_units(reader: Reader, calls: Sequence[Call]) -> Iterator[Unit]:
    """Units with which the next calls may begin, the longest first."""
    first = calls[0]
    # Declarations of the user go before any recognition.
    for cls, declared in reader.declared.items():
        if isinstance(first.module, cls):
            yield Unit(1, first.given, first.result, _declared_part(first, declared))
            return
    if kind(first.module) == "Embedding":
        # Embeddings are stored by token, so rows are outputs.
        rule = LinearRule(weight=join(first.path, "weight"), transpose=True)
        yield Unit(1, first.given, first.result, ModulePart(first.path, rule))
    if not kind(first.module):
        yield from _attention_units(reader, [first])
    if kind(first.module) != "Linear":
        return
    run = list(_leading_linears(calls))
    # The longest unit first: a bilinear layer begins with a linear one.
    yield from _attention_units(reader, run)
    yield from _bilinear_units(run)
    yield from _gated_units(run)
    yield Unit(1, first.given, first.result, _linear_part(first))


def _leading_linears(calls: Sequence[Call]) -> Iterator[Call]:
    """The calls of linear layers with which a list begins."""
    for call in calls:
        if kind(call.module) != "Linear":
            return
        yield call


def _declared_part(call: Call, declared: Declared) -> ModulePart:
    """The layer that the user declared for a class, with the names of the whole module."""
    if not isinstance(declared, Rule):
        return ModulePart(call.path, None, declared)
    names = {"kind", "norm", "residual", "mask", "fused_order", "rope_layout", "activation"}
    # Fields that are words and no names of tensors stay as they are.
    keys = {
        field: join(call.path, value)
        for field, value in vars(declared).items()
        if isinstance(value, str) and field not in names and not value.startswith("config:")
    }
    return ModulePart(call.path, replace(declared, **keys))


def _linear_part(call: Call) -> ModulePart:
    return ModulePart(call.path, LinearRule(**_layer_keys(call, "weight", "bias")))


def _layer_keys(call: Call, weight: str, bias: str) -> dict[str, Any]:
    """The fields of a rule for a single linear layer."""
    keys = {weight: join(call.path, "weight")}
    if call.module.bias is not None:
        keys[bias] = join(call.path, "bias")
    return keys


def _bilinear_units(run: Sequence[Call]) -> Iterator[Unit]:
    """Products of two linear layers or halves of a layer, and squares, with or without `down`."""
    first = run[0]
    half = first.result.shape[-1] // 2
    products: list[tuple[int, np.ndarray, dict[str, Any]]] = []
    # Two layers side by side read the same array.
    if len(run) > 1 and same(run[1].given, first.given):
        second = run[1]
        if second.result.shape == first.result.shape:
            keys = _layer_keys(first, "left", "left_bias") | _layer_keys(
                second, "right", "right_bias"
            )
            products.append((2, first.result * second.result, keys))
    # One layer may stack both factors.
    if first.result.shape[-1] == 2 * half:
        halves = first.result[..., :half] * first.result[..., half:]
        products.append((1, halves, _layer_keys(first, "fused", "fused_bias")))
    # The square of a layer is the product with itself.
    square = _layer_keys(first, "left", "left_bias") | _layer_keys(first, "right", "right_bias")
    products.append((1, first.result**2, square))
    for count, product, keys in products:
        if len(run) > count and same(run[count].given, product):
            down = run[count]
            rule = BilinearRule(**keys, **_layer_keys(down, "down", "down_bias"))
            yield Unit(count + 1, first.given, down.result, ModulePart(first.path, rule))
        # The product may also be the output, without `down`.
        yield Unit(count, first.given, product, ModulePart(first.path, BilinearRule(**keys)))


def _gated_units(run: Sequence[Call]) -> Iterator[Unit]:
    """Hidden layers with an activation, alone or as the gate of a second linear layer or half."""
    first = run[0]
    half = first.result.shape[-1] // 2
    gates: list[tuple[int, np.ndarray, np.ndarray | None, dict[str, Any]]] = []
    if len(run) > 2 and same(run[1].given, first.given):
        second = run[1]
        if second.result.shape == first.result.shape:
            # Either of the two may be the gate; the activation decides.
            for gate, up in ((first, second), (second, first)):
                keys = _layer_keys(gate, "gate", "gate_bias") | _layer_keys(up, "up", "up_bias")
                gates.append((2, gate.result, up.result, keys))
    if first.result.shape[-1] == 2 * half:
        keys = _layer_keys(first, "fused", "fused_bias")
        before, behind = first.result[..., :half], first.result[..., half:]
        gates.append((1, before, behind, keys | {"fused_order": "gate-up"}))
        gates.append((1, behind, before, keys | {"fused_order": "up-gate"}))
    # Without a second factor the activation stands alone.
    gates.append((1, first.result, None, _layer_keys(first, "gate", "gate_bias")))
    for count, gate, up, keys in gates:
        if len(run) <= count:
            continue
        down = run[count]
        for name in ACTIVATIONS:
            # Values decide: names of classes may lie.
            hidden = activation(name)(gate) if up is None else activation(name)(gate) * up
            if same(hidden, down.given):
                keys |= {"activation": name} | _layer_keys(down, "down", "down_bias")
                rule = GatedRule(**keys)
                yield Unit(count + 1, first.given, down.result, ModulePart(first.path, rule))
                break


def _attention_units(reader: Reader, run: Sequence[Call]) -> Iterator[Unit]:
    """Attention without softmax, recognised by the names of its projections and by its output."""
    for count, rule in attention_rules(reader.module, run, reader.arrays):
        yield Unit(count, run[0].given, run[count - 1].result, ModulePart(run[0].path, rule))


def _with_residual(
    reader: Reader, unit: Unit, stream: np.ndarray, after: np.ndarray
) -> ModulePart | None:
    """The layer with its residual, where `after = a x + b f(x)` for some numbers a and b."""
    # Two numbers are fitted to many entries, which fit by no chance.
    skip, scale = _fitted_residual(stream, unit.result, after)
    if scale is None:
        return None
    part = unit.part
    # Skip 0 and scale 1 are a layer without a residual.
    if (skip, scale) == (0.0, 1.0):
        return part
    if part.rule is None:
        return part._replace(around=(skip, scale))
    if part.rule.residual is not None:
        return None
    # A scale that is a parameter of the module is named, so that other weights bring their own.
    named = scale
    if scale != 1.0:
        named = next((name for name, x in reader.numbers.items() if abs(x - scale) < FITS), scale)
    if skip == 1.0:
        return part._replace(rule=replace(part.rule, residual="additive", scale=named))
    # The interpolating rule has skip 1 - s.
    if abs(skip + scale - 1.0) < FITS:
        return part._replace(rule=replace(part.rule, residual="lerp", scale=named))
    return None


def _fitted_residual(x: np.ndarray, y: np.ndarray, after: np.ndarray) -> tuple[float, float | None]:
    """Numbers (a, b) of 12 digits for which `after = a x + b y`; b is None where none fit."""
    if same(y, after):
        return 0.0, 1.0
    if y.size != after.size or x.size != after.size or x.dtype.kind != "f":
        return 0.0, None
    # Least squares in two unknowns, whose residual tells whether the step fits at all.
    columns = np.stack([x.ravel(), y.ravel()], axis=1)
    numbers, *_ = np.linalg.lstsq(columns, after.ravel(), rcond=None)
    # Twelve digits drop the rounding of the fit.
    skip, scale = (float(f"{number:.12g}") for number in numbers)
    if abs(skip - 1.0) < FITS:
        skip = 1.0
    fits = same(skip * x.ravel() + scale * y.ravel(), after.ravel())
    return skip, scale if fits and abs(scale) > FITS else None


def _constant_factor(y: np.ndarray, after: np.ndarray) -> float | None:
    """The number c for which `after = c y`, None where there is none."""
    if y.size != after.size or y.dtype.kind != "f" or not y.any():
        return None
    factor = float(y.ravel() @ after.ravel() / (y.ravel() @ y.ravel()))
    return factor if same(factor * y, after) else None


def _behind_norm(norm: Call, part: ModulePart) -> ModulePart:
    """A layer with the norm before it."""
    if part.rule is None or part.rule.norm is not None:
        raise UnsupportedLayer(
            f"{norm.path} ({kind(norm.module)}) stands before {part.path}, which was declared by a "
            "function; declare it by a Rule, so that the norm can go into it"
        )
    fields: dict[str, Any] = {"norm": NORM_MODULES[kind(norm.module)]}
    for name in ("weight", "bias"):
        if getattr(norm.module, name, None) is not None:
            fields[f"norm_{name}"] = join(norm.path, name)
    return part._replace(rule=replace(part.rule, **fields, norm_epsilon=float(norm.module.eps)))


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays hold the same numbers, in any shape.

    Args:
        one: Any array.
        other: Any array.

    Returns:
        True where the arrays differ by rounding alone.

    Example:
        >>> same(np.ones((2, 3)), np.ones((2, 3, 1)) + 1e-12)
        True
    """
    # Shapes may differ: a module may flatten between layers.
    if one.size != other.size or len(one) != len(other):
        return False
    return bool(np.abs(one.ravel() - other.ravel()).max() <= FITS * max(np.abs(other).max(), 1e-99))


def _is_norm(call: Call) -> bool:
    """Whether a call is that of a norm, by the name of its class, as LlamaRMSNorm."""
    return type(call.module).__name__.endswith("Norm")


def _unexplained_step(
    calls: Sequence[Call],
    after: bool,
    end: np.ndarray,
    norm: Call | None = None,
    multiple: str = "",
) -> UnsupportedLayer:
    """The refusal of a module in which no known layer explains a step between two calls.

    `multiple` says where a layer fits but for a constant factor.
    """
    place, following = _call_name(calls[0]), "the output"
    if len(calls) > 1:
        following = f"what {_call_name(calls[1])} is given"
    said = f"cannot tell what {place} is given: it is not the output of the layer before it"
    if after:
        said = f"cannot tell how {following} follows from {place}"
    advice = ""
    if multiple:
        said += f": {multiple}, a factor for which rules have no place without a residual "
        said += "connection: put it into the weights"
    # A function that is known by name says more than the place alone.
    elif name := unknown_function(calls, end):
        advice = f". {ON_INPUTS}"
        said += f": it is {name} of it, "
        if name.removeprefix("a gate by ") in ENTRYWISE:
            said += "which is no activation known by name"
            advice = f". {OWN_ACTIVATION}{advice}"
        else:
            said += "which has no exact similarity"
    elif norm := norm or next((call for call in calls if _is_norm(call)), None):
        advice = f". {ON_INPUTS}"
        said += f"; {_call_name(norm)} is there, which is known before a layer only, "
        said += "inside its residual"
        if any("attn" in call.path or "attention" in call.path for call in calls):
            advice = f". {BY_PARTS}{advice}"
    elif any(kind(call.module) == "Embedding" for call in calls):
        # Layers act on every token alone, so a sum over tokens has none.
        advice = f". {ON_INPUTS}, inputs here being tokens (n, positions)"
    return UnsupportedLayer(
        f"{said}. Known are linear layers, products of two of them, activations, gates, residual "
        "connections, norms before a layer, embeddings and attention without softmax (q1, k1, q2, "
        "k2, v, o; q, k, v, o; or q, k, v in one). Declare the class around it: "
        "layers={Class: BilinearRule(...) or a function from an instance to layers of tnsim}"
        f"{advice}"
    )


def _call_name(call: Call) -> str:
    return f"{call.path or 'the module'} ({type(call.module).__name__})"
