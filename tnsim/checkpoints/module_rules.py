"""Calls of a PyTorch module become rules of a dialect. In: calls with their arrays. Out: parts.

Nothing is read off the names of classes. A layer is a few calls whose arrays fit together: what
`down` was given is the product of what `left` and `right` gave, and what comes next is
`a x + b f(x)` of what went in and came out. Arrays are those of random weights and inputs, so that
what fits does not fit by chance. Where nothing fits, the place is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tnsim.checkpoints.module_activations import activation
from tnsim.checkpoints.module_attention import attention_rules
from tnsim.checkpoints.module_calls import Call, join, kind
from tnsim.checkpoints.rules import Rule
from tnsim.errors import ON_INPUTS, UnsupportedLayer

FITS = 1e-9  # of the size of an array: float64 leaves six digits more
NORMS = {"LayerNorm": "layer", "RMSNorm": "rms"}
Declared = Rule | Callable[[Any], Any]


class Part(NamedTuple):
    """A layer: a rule of a dialect, or what a function of the user's makes of a submodule.

    Attributes:
        path: Of the submodule with which it begins.
        rule: With the names of the whole module; None for a function.
        make: The function; None for a rule.
        around: Skip and scale of the residual around what the function makes.
    """

    path: str
    rule: Rule | None
    make: Callable[[Any], Any] | None = None
    around: tuple[float, float] | None = None


class Unit(NamedTuple):
    """Calls that may be one layer: how many, what it reads, what it gives, what it would be."""

    calls: int
    given: np.ndarray
    result: np.ndarray
    part: Part


@dataclass(frozen=True)
class Reader:
    """What recognition looks things up in.

    Attributes:
        module: With random weights.
        declared: What classes of the user's are.
        arrays: Tensors of the module by name.
        numbers: Parameters of one entry by name, which may be scales of residuals.
    """

    module: Any
    declared: Mapping[type, Declared]
    arrays: Mapping[str, Any]
    numbers: Mapping[str, float]


def parts_of(
    reader: Reader, calls: Sequence[Call], start: np.ndarray, end: np.ndarray
) -> list[Part]:
    """The layers that lead from the input of a module to its output.

    Args:
        reader: Of the module.
        calls: Of its leaves, in order.
        start: Its input.
        end: Its output.

    Returns:
        Layers in order.

    Raises:
        UnsupportedLayer: Naming the place where nothing fits.
    """
    parts: list[Part] = []
    stream, norm = start, None
    n = 0
    while n < len(calls):
        call = calls[n]
        if norm is None and kind(call.module) in NORMS and same(call.given, stream):
            norm = call
            n += 1
            continue
        unit, part = _next(reader, calls[n:], stream, norm, end)
        parts.append(part)
        n += unit.calls
        stream, norm = _given_next(calls[n:], end), None
    if norm is not None:
        raise UnsupportedLayer(
            f"{norm.path} ({kind(norm.module)}) has no layer behind it into which it could go"
        )
    if not same(stream, end):
        raise _gap(calls[-1:], True, end)
    return parts


def _next(
    reader: Reader, calls: Sequence[Call], stream: np.ndarray, norm: Call | None, end: np.ndarray
) -> tuple[Unit, Part]:
    """The first way in which the next calls are a layer of what is there."""
    available = stream if norm is None else norm.result
    reads_stream = False
    for unit in _units(reader, calls):
        if not same(unit.given, available):
            continue
        reads_stream = True
        after = _given_next(calls[unit.calls :], end)
        found = _residual(reader, unit, stream, after)
        if found is None:
            continue
        if norm is not None:
            found = _behind(norm, found)
        return unit, found
    if norm is not None and not reads_stream:
        raise UnsupportedLayer(
            f"{_name(norm)} does not stand directly before {_name(calls[0])}, so there is no layer "
            f"into which it could go. {ON_INPUTS}"
        )
    raise _gap(calls, reads_stream, end, norm)


def _given_next(calls: Sequence[Call], end: np.ndarray) -> np.ndarray:
    return calls[0].given if calls else end


def _units(reader: Reader, calls: Sequence[Call]) -> Iterator[Unit]:
    """What the next calls may be, what takes most of them first."""
    first = calls[0]
    for cls, declared in reader.declared.items():
        if isinstance(first.module, cls):
            yield Unit(1, first.given, first.result, _declared(first, declared))
            return
    if kind(first.module) == "Embedding":
        rule = Rule("linear", weight=join(first.path, "weight"), transpose=True)
        yield Unit(1, first.given, first.result, Part(first.path, rule))
    if kind(first.module) != "Linear":
        return
    run = list(_linears(calls))
    yield from _attentions(reader, run)
    yield from _bilinears(run)
    yield Unit(1, first.given, first.result, _linear(first))


def _linears(calls: Sequence[Call]) -> Iterator[Call]:
    """The calls of linear layers with which a list begins."""
    for call in calls:
        if kind(call.module) != "Linear":
            return
        yield call


def _declared(call: Call, declared: Declared) -> Part:
    """What the user says a class is, with the names of the whole module."""
    if not isinstance(declared, Rule):
        return Part(call.path, None, declared)
    names = {"kind", "norm", "residual", "mask", "fused_order", "rope_layout"}
    keys = {
        field: join(call.path, value)
        for field, value in vars(declared).items()
        if isinstance(value, str) and field not in names and not value.startswith("config:")
    }
    return Part(call.path, replace(declared, **keys))


def _linear(call: Call) -> Part:
    return Part(call.path, Rule("linear", **_keys(call, "weight", "bias")))


def _keys(call: Call, weight: str, bias: str) -> dict[str, Any]:
    """The fields of a rule for one linear layer."""
    keys = {weight: join(call.path, "weight")}
    if call.module.bias is not None:
        keys[bias] = join(call.path, "bias")
    return keys


def _bilinears(run: Sequence[Call]) -> Iterator[Unit]:
    """Products of two linear layers, of two halves of one, or of one with itself; `down` or not."""
    first = run[0]
    half = first.result.shape[-1] // 2
    products: list[tuple[int, np.ndarray, dict[str, Any]]] = []
    if len(run) > 1 and same(run[1].given, first.given):
        second = run[1]
        if second.result.shape == first.result.shape:
            keys = _keys(first, "left", "left_bias") | _keys(second, "right", "right_bias")
            products.append((2, first.result * second.result, keys))
    if first.result.shape[-1] == 2 * half:
        halves = first.result[..., :half] * first.result[..., half:]
        products.append((1, halves, _keys(first, "fused", "fused_bias")))
    square = _keys(first, "left", "left_bias") | _keys(first, "right", "right_bias")
    products.append((1, first.result**2, square))
    for count, product, keys in products:
        if len(run) > count and same(run[count].given, product):
            down = run[count]
            rule = Rule("bilinear", **keys, **_keys(down, "down", "down_bias"))
            yield Unit(count + 1, first.given, down.result, Part(first.path, rule))
        yield Unit(count, first.given, product, Part(first.path, Rule("bilinear", **keys)))


def _attentions(reader: Reader, run: Sequence[Call]) -> Iterator[Unit]:
    """Bilinear attention, by the names of its linear layers and by what it gives."""
    for count, rule in attention_rules(reader.module, run, reader.arrays):
        yield Unit(count, run[0].given, run[count - 1].result, Part(run[0].path, rule))


def _residual(reader: Reader, unit: Unit, stream: np.ndarray, after: np.ndarray) -> Part | None:
    """The layer with what goes around it, where `after = a x + b f(x)` for some numbers a and b."""
    skip, scale = _fit(stream, unit.result, after)
    if scale is None:
        return None
    part = unit.part
    if (skip, scale) == (0.0, 1.0):
        return part
    if part.rule is None:
        return part._replace(around=(skip, scale))
    if part.rule.residual is not None:
        return None
    named = scale
    if scale != 1.0:
        named = next((name for name, x in reader.numbers.items() if abs(x - scale) < FITS), scale)
    if skip == 1.0:
        return part._replace(rule=replace(part.rule, residual="additive", scale=named))
    if abs(skip + scale - 1.0) < FITS:
        return part._replace(rule=replace(part.rule, residual="lerp", scale=named))
    return None


def _fit(x: np.ndarray, y: np.ndarray, after: np.ndarray) -> tuple[float, float | None]:
    """Numbers (a, b) for which `after = a x + b y`, rounded to what they must mean; b None."""
    if same(y, after):
        return 0.0, 1.0
    if y.size != after.size or x.size != after.size or x.dtype.kind != "f":
        return 0.0, None
    columns = np.stack([x.ravel(), y.ravel()], axis=1)
    numbers, *_ = np.linalg.lstsq(columns, after.ravel(), rcond=None)
    skip, scale = (float(f"{number:.12g}") for number in numbers)
    if abs(skip - 1.0) < FITS:
        skip = 1.0
    fits = same(skip * x.ravel() + scale * y.ravel(), after.ravel())
    return skip, scale if fits and abs(scale) > FITS else None


def _behind(norm: Call, part: Part) -> Part:
    """A layer with the norm before it."""
    if part.rule is None or part.rule.norm is not None:
        raise UnsupportedLayer(
            f"{norm.path} ({kind(norm.module)}) stands before {part.path}, which was declared by a "
            "function; declare it by a Rule, so that the norm can go into it"
        )
    fields: dict[str, Any] = {"norm": NORMS[kind(norm.module)]}
    for name in ("weight", "bias"):
        if getattr(norm.module, name, None) is not None:
            fields[f"norm_{name}"] = join(norm.path, name)
    return part._replace(rule=replace(part.rule, **fields, norm_epsilon=float(norm.module.eps)))


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays hold the same numbers, in whatever shape.

    Args:
        one: Any array.
        other: Any array.

    Returns:
        True where they differ by rounding alone.

    Example:
        >>> same(np.ones((2, 3)), np.ones((2, 3, 1)) + 1e-12)
        True
    """
    if one.size != other.size or len(one) != len(other):
        return False
    return bool(np.abs(one.ravel() - other.ravel()).max() <= FITS * max(np.abs(other).max(), 1e-99))


def _gap(
    calls: Sequence[Call], after: bool, end: np.ndarray, norm: Call | None = None
) -> UnsupportedLayer:
    """That nothing tells what happens before or after the first of some calls."""
    place, following = _name(calls[0]), "the output"
    if len(calls) > 1:
        following = f"what {_name(calls[1])} is given"
    said = f"cannot tell what {place} is given: it is not the output of the layer before it"
    if after:
        said = f"cannot tell how {following} follows from {place}"
    if name := activation(calls, end):
        said += f": it is {name} of it, which is no polynomial"
    elif norm := norm or next((call for call in calls if kind(call.module) in NORMS), None):
        said += f"; {_name(norm)} is there, which is known before a layer only, inside its residual"
    return UnsupportedLayer(
        f"{said}. Known are linear layers, products of two of them, residual connections, norms "
        "before a layer, embeddings and bilinear attention (q1, k1, q2, k2, v, o, or q, k, v in "
        "one). If it is a polynomial, declare the class around it: layers={Class: Rule(...) or a "
        f"function from an instance to layers of tnsim}}. {ON_INPUTS}"
    )


def _name(call: Call) -> str:
    return f"{call.path or 'the module'} ({type(call.module).__name__})"
