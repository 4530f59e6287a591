"""Differences of nearly equal models, written as models of their own so that nothing cancels.

`b - a` is small where the weights of a and b are nearly equal, and an inner product of `b - a`
expanded by bilinearity is a small sum of large terms. The same function is also *one* model. Let v
be the state of a behind some layer and u the state of b there, and carry the pair (v, d) with
d = (u - v) / unit. A layer is an output matrix O times a product of affine rows r_i (no row for a
linear layer, two for a bilinear layer, five for attention). Write A for the arrays of a and B for
the arrays of b. The difference of the two layers telescopes over these arrays:

    (B_O prod B_i(u) - A_O prod A_i(v)) / unit
        = D_O prod A_i(v) + B_O sum_i A_1(v) .. A_{i-1}(v) D_i(v, d) B_{i+1}(u) .. B_n(u),

    D_O = (B_O - A_O) / unit,
    D_i(v, d) = (B_i - A_i) / unit v + B_i d,
    B_i(u) = B_i v + unit B_i d.

Every product is again a product of affine rows of (v, d), so the layer of pairs is a layer of the
same kind, with a further group of hidden units (heads) for each row: 3 times the rank of a bilinear
layer, 6 times the heads of attention, and twice the width. Nothing is left out, no large numbers
are subtracted, and `unit` makes all entries of similar size. The identity holds leg by leg, for
tensors and not for functions only, so the value of every metric stays the same.

Terms that are no small changes of each other stay as they are: models of different structure or
skip, equal functions with other weights (hidden units permuted), and second differences
`a - 2 b + c`, which may still cancel once the first differences have been taken.

Models less a constant are models too (`less`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from tnsim.models.arrays import as_array, bias_name, is_sparse, is_traced, requires_grad, vector
from tnsim.models.layers import (
    Attention,
    Layer,
    Linear,
    Residual,
    affine_maps,
    innermost,
    map_names,
    residual_rule,
)
from tnsim.models.model import Combination, Model, terms
from tnsim.models.scaling import replaced

T = TypeVar("T")


def by_differences(model: Model | Combination, dtype: str) -> Model | Combination:
    """The same function with small differences of models as models of their own.

    A difference becomes a model where expanding by bilinearity would lose more than a quarter of
    the digits of `dtype`: where the coefficients of some models cancel and their weights differ by
    less than `eps ** (1 / 8)`, since a squared norm loses twice as many digits as the weights.
    Wider differences lose little and cost less as combinations: two bilinear layers that differ by
    0.02 lose 4 of 16 digits, by 0.1 one.

    Args:
        model: A combination, or a model, which is returned unchanged.
        dtype: Precision of the computation to come.

    Returns:
        A combination over the same inputs and outputs, without terms whose coefficient is zero;
        traced weights and coefficients are left alone.
    """
    if isinstance(model, Model) or is_traced(model):
        return model
    near = float(np.finfo(dtype).eps) ** 0.125
    weighted = regrouped(terms(model), near, _relative_gap, _one_difference)
    return Combination(weighted) if weighted else model


def regrouped(
    weighted: Sequence[tuple[Any, T]],
    near: float,
    gap: Callable[[T, T], float],
    difference: Callable[[T, T, float], list[tuple[float, T]]],
) -> list[tuple[Any, T]]:
    """A weighted sum with small differences of summands written as summands of their own.

    Args:
        weighted: Coefficients and summands.
        near: Gap below which a difference is taken.
        gap: Function of two summands that gives the largest relative change of a weight, 0 for
            equal weights, infinity where the summands have no difference in closed form.
        difference: Function of two summands and their gap that gives the coefficients and summands
            of the second less the first.

    Returns:
        Coefficients and summands without terms whose coefficient is zero.
    """
    terms: list[tuple[Any, T]] = []
    nonzero = [(c, part) for c, part in weighted if c != 0]
    for group in _weight_groups(nonzero, near, gap):
        coefficients = [float(c) for c, _ in group]
        # sum_i c_i f_i = total * f_1 + sum_i c_i (f_i - f_1). It pays where the coefficients
        # cancel, total much smaller than size: else the norm is that of f_1, and nothing is lost.
        total, size = sum(coefficients), sum(map(abs, coefficients))
        if len(group) == 1 or abs(total) > near * size:
            terms += group
            continue
        base = group[0][1]
        for coefficient, other in group[1:]:
            unit = gap(base, other)
            if unit:
                small = difference(base, other, unit)
                terms += [(float(coefficient) * factor, part) for factor, part in small]
        if total:
            terms.append((total, base))
    return terms


def _weight_groups(
    weighted: Sequence[tuple[Any, T]], near: float, gap: Callable[[T, T], float]
) -> list[list[tuple[Any, T]]]:
    """The summands in groups of weights near the weights of the first of the group."""
    groups: list[list[tuple[Any, T]]] = []
    for coefficient, summand in weighted:
        for group in groups:
            if gap(group[0][1], summand) < near:
                group.append((coefficient, summand))
                break
        else:
            groups.append([(coefficient, summand)])
    return groups


def _one_difference(a: Model, b: Model, unit: float) -> list[tuple[float, Model]]:
    return [(unit, _difference_model(a, b, unit))]


class _Parts(NamedTuple):
    """A layer `skip x + scale * output(product of rows)`, with arrays `[bias, weight]`.

    Args:
        core: Layer inside residuals.
        rows: Affine maps that are multiplied, leg by leg.
        output: Affine map that is applied to the product.
        skip: Weight of the stream.
        scale: Weight of the layer inside the residuals.
    """

    core: Any
    rows: tuple[Float[np.ndarray, "rows in_and_one"], ...]
    output: Float[np.ndarray, "out hidden_and_one"]
    skip: float
    scale: float

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """All numbers of the layer."""
        return (*self.rows, self.output, np.array([self.skip]), np.array([self.scale]))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of all arrays."""
        return [array.shape for array in self.arrays]

    @property
    def stream(self) -> float:
        """The skip that stays a stream; 0 where the matrix of a linear layer absorbs it."""
        return 0.0 if isinstance(self.core, Linear) else self.skip

    @property
    def settings(self) -> tuple[Any, ...]:
        """What must be equal for two layers to have a difference of the same form."""
        core = self.core
        heads = isinstance(core, Attention) and (core.n_heads, core.mask, core.rope_base)
        return type(core), self.stream, heads

    def whole_output(self) -> Float[np.ndarray, "out hidden_and_one"]:
        """The output matrix times the scale, plus the skip of a linear layer."""
        return self.scale * self.output + (self.skip - self.stream) * _identity_map(self.output)


def _identity_map(output: np.ndarray) -> np.ndarray:
    return np.eye(*output.shape, k=1)


def _layer_parts(layer: Layer) -> _Parts:
    core = innermost(layer)
    skip, scale = map(float, residual_rule(layer))
    names, last = affine_maps(core)
    rows = tuple(_affine_array(core, name) for name in names)
    return _Parts(core, rows, _affine_array(core, last), skip, scale)


def _output_change(a: _Parts, b: _Parts) -> Float[np.ndarray, "out hidden_and_one"]:
    """The difference of the whole outputs, taken on factors before products are rounded."""
    # s' O' - s O = s (O' - O) + (s' - s) O': both differences are exact for near numbers
    # (Sterbenz), which the difference of the products would not be.
    change = a.scale * (b.output - a.output) + (b.scale - a.scale) * b.output
    return change + (b.skip - a.skip) * _identity_map(b.output)


def _affine_array(core: Any, name: str) -> Float[np.ndarray, "rows in_and_one"]:
    """The array [bias, weight] of an affine map, with a zero bias where there is none."""
    weight = np.asarray(getattr(core, name), np.float64)
    bias = getattr(core, bias_name(name))
    bias = np.zeros(len(weight)) if bias is None else np.asarray(bias, np.float64)
    return np.column_stack([bias, weight])


def _relative_gap(a: Model, b: Model) -> float:
    """The largest relative change of an array between two models, as a power of two.

    Zero for equal weights, infinite for models of different structure.
    """
    if len(a.layers) != len(b.layers) or is_sparse((a, b)):
        return math.inf
    if not (a.is_polynomial and b.is_polynomial):
        return math.inf  # see `problems.hidden_units.small_differences`
    pairs = []
    for first, second in zip(map(_layer_parts, a.layers), map(_layer_parts, b.layers), strict=True):
        if first.settings != second.settings or first.shapes != second.shapes:
            return math.inf
        pairs += list(zip(first.arrays, second.arrays, strict=True))
    return largest_change(pairs)


def largest_change(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
    """The largest relative change from the first to the second array of a pair, a power of two.

    Example:
        >>> largest_change([(np.array([2.0, 1.0]), np.array([2.0, 1.5]))])
        0.25
    """
    gap = 0.0
    for x, y in pairs:
        # Halves of the largest floats have a difference that is a float too.
        change = np.abs(0.5 * y - 0.5 * x).max()
        if not np.array_equal(x, y):
            # Relative to the largest entry of the array: small entries may change by much without a
            # change of the function. A change below the range of floats is a change all the same.
            share = 2 * (change / max(np.abs(x).max(), np.abs(y).max()))
            gap = max(gap, share, float(np.finfo(np.float64).tiny))
    # A power of two divides differences without rounding.
    return 2.0 ** math.floor(math.log2(gap)) if gap else 0.0


def _difference_model(a: Model, b: Model, unit: float) -> Model:
    """The model of `(b - a) / unit`; layers below the first difference are layers of a."""
    pairs = [(_layer_parts(x), _layer_parts(y)) for x, y in zip(a.layers, b.layers, strict=True)]
    first = next(n for n, pair in enumerate(pairs) if not _are_equal(*pair))
    layers = list(a.layers[:first])
    # A stream carries (v, d) past its layer. A linear layer below it therefore makes the pair
    # (v, 0), and a linear layer at the end reads d. Layers without a stream do both themselves.
    if pairs[first][0].stream:
        layers.append(Linear(np.eye(2 * a.layers[first].d_in, a.layers[first].d_in)))
    for n in range(first, len(pairs)):
        enters = n == first and not pairs[n][0].stream
        leaves = n == len(pairs) - 1 and not pairs[n][0].stream
        layers.append(_layer_of_pairs(*pairs[n], unit, enters, leaves))
    if pairs[-1][0].stream:
        layers.append(Linear(np.eye(a.d_out, 2 * a.d_out, k=a.d_out)))
    return Model(layers, a.n_ctx)


def _layer_of_pairs(a: _Parts, b: _Parts, unit: float, enters: bool, leaves: bool) -> Layer:
    """The layer from (v, d) to (v', d'); `enters`: from v alone, `leaves`: to d' alone."""
    # Hidden units come in groups of one product each. The first group is prod A_i(v), read with A_O
    # by the output v' and with D_O by d'. Then every leg i that differs has the product of A_j for
    # j < i, D_i, and B_j for j > i, which d' reads with B_O.
    rows = [_block_row(x, y, unit, enters) for x, y in zip(a.rows, b.rows, strict=True)]
    groups = [[row.a for row in rows]]
    for n, row in enumerate(rows):
        if row.difference.any():
            before, after = [x.a for x in rows[:n]], [x.b for x in rows[n + 1 :]]
            # prod B_i - prod A_i = sum_i A_1 .. A_(i-1) (B_i - A_i) B_(i+1) .. B_n, a telescope.
            groups.append([*before, row.difference, *after])
    # A linear layer has no rows: its output reads (v, d) itself, so B_O d is its only difference.
    differences = len(groups) - 1 if rows else int(not enters)
    whole = b.whole_output()[:, 1:]
    output = np.hstack([_output_change(a, b) / unit, *[whole] * differences])
    if not leaves:
        zero = np.zeros((len(whole), differences * whole.shape[1]))
        output = np.vstack([np.hstack([a.whole_output(), zero]), output])
    stacked = [np.vstack(group) for group in zip(*groups, strict=True)]
    core = _core_of(a.core, (*stacked, output), len(groups))
    return Residual(core, a.stream) if a.stream else core


def _core_of(core: Any, arrays: Sequence[np.ndarray], groups: int) -> Layer:
    """A layer of the kind and settings of another, with other rows and output, in `groups` groups.

    Args:
        core: The other layer, inside residuals.
        arrays: Arrays `[bias, weight]` of all affine maps in order, the output map last.
        groups: Number of groups of hidden units; heads are as many times those of the layer.
    """
    values: dict[str, Any] = {}
    for name, affine in zip(map_names(core), arrays, strict=True):
        what = f"the difference of {name}"
        bias = affine[:, 0] if affine[:, 0].any() else None
        values[name] = as_array(affine[:, 1:], what, 2)
        values[bias_name(name)] = vector(bias, f"{what}, its bias", len(affine))
    if isinstance(core, Attention):
        values["n_heads"] = core.n_heads * groups
    return replaced(core, values)


class _Row(NamedTuple):
    """Affine rows over (v, d): rows of a at v, rows of b at v + unit d, difference / unit."""

    a: Float[np.ndarray, "rows in_and_one"]
    b: Float[np.ndarray, "rows in_and_one"]
    difference: Float[np.ndarray, "rows in_and_one"]


def _block_row(a: np.ndarray, b: np.ndarray, unit: float, enters: bool) -> _Row:
    change = (b - a) / unit
    if enters:  # no layer before differs: d = 0, and the state is v alone
        return _Row(a, b, change)
    weight = b[:, 1:]  # d is a difference, so biases act on v only
    return _Row(
        np.hstack([a, np.zeros_like(weight)]),
        np.hstack([b, unit * weight]),
        np.hstack([change, weight]),
    )


def _are_equal(a: _Parts, b: _Parts) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a.arrays, b.arrays, strict=True))


def constant(d_in: int, values: Float[np.ndarray, " out"], n_ctx: int | None) -> Model:
    """The model of a constant function.

    Args:
        d_in: Coordinates of the input.
        values: Output for every input.
        n_ctx: Number of positions of a sequence, or None.

    Example:
        >>> constant(2, np.array([5.0]), None)(np.ones((1, 2))).tolist()
        [[5.0]]
    """
    nothing = Linear(np.zeros((1, d_in)))  # narrow, as inputs may be tokens of a large vocabulary
    return Model([nothing, Linear(np.zeros((len(values), 1)), values)], n_ctx)


def less(given: Model | Combination, values: Float[np.ndarray, " out"]) -> Model | Combination:
    """A model or a sum of models less a constant.

    Args:
        given: Model or combination.
        values: Constant, one number for every output.

    Returns:
        Of a model a model with another bias at its end, in a layer of its own where the last bias
        is a tensor that requires grad; of a sum a sum with one more term.

    Example:
        >>> less(Model([Linear([[2.0]])]), np.array([5.0]))(np.ones((1, 1))).tolist()
        [[-3.0]]
    """
    if isinstance(given, Combination):
        return given - constant(given.d_in, values, given.n_ctx)
    last: Any = given.layers[-1]
    if isinstance(last, Linear) and not requires_grad(last.bias):
        bias = -values if last.bias is None else np.asarray(last.bias, np.float64) - values
        layers = (*given.layers[:-1], Linear(last.weight, bias))
    else:
        layers = (*given.layers, Linear(np.eye(len(values)), -values))
    return Model(layers, given.n_ctx, given.origin)
