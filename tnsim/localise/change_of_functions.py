"""The change between two polynomials, split by whose functions a component has.

Every component is interpolated as a function (`models.components`), f(0) = a and f(1) = b, and its
part delta_c of the change is an integral along the segment between them (`switched_models`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from tnsim.compare.by_plans import same_weights
from tnsim.compare.by_points import points_of
from tnsim.compare.request import is_exact
from tnsim.engine import precision
from tnsim.engine.precision import Arithmetic
from tnsim.errors import ModelError, ResultError
from tnsim.localise.differences import ONE_FUNCTION, Batch, Split, Unchanged
from tnsim.localise.switched_models import (
    MOST_NODES,
    NEAR,
    Nodes,
    Setting,
    SwitchedModels,
    check_bilinear,
    exact_nodes,
    gram_of_parts,
    integral,
    nodes,
    rises_as_drawn,
    rounding_error,
    slope,
)
from tnsim.metrics.finite_measures import Empirical
from tnsim.metrics.protocol import Points
from tnsim.models.arrays import as_array, in_float64
from tnsim.models.components import (
    Component,
    basis_of_embedding,
    check_exchangeable,
    check_polynomial,
    components_of,
    exchanged,
    in_basis,
    interpolated,
    interpolated_outputs,
)
from tnsim.models.differences import by_differences
from tnsim.models.forward import outputs_on
from tnsim.models.model import Model, caveats, check_untraced, with_dense_matrices

_CLOSE = 1e-9
"""Error of a sum of shares at which an integral that is not polynomial counts as found."""
_OF_SUMS = 4.0
"""Error of an inner product of parts, in units of what the sums of its matrix miss, or of the
rounding of outputs. Of 900 changes of two layers by 1e-3 to 1e-12 of their weights, one is beyond
its bound, by 8 %, and the median is a seventh."""
_ROWS = 1024
"""Inputs of a batch of forward passes of models."""
_NODES_OF_INTERVAL, _MOST_INTERVALS = 16, 1024
"""Nodes of an interval over which the slope of a cosine is integrated, and most of such intervals,
for each of which polynomials are evaluated and no model."""


@dataclass(frozen=True)
class _Interpolation:
    """The function from (a, b) and s to the interpolated model."""

    parts: tuple[Component, ...]

    def __call__(self, weights: tuple[Model, Model], s: Any) -> Model:
        return interpolated(*weights, s, self.parts)

    def outputs(self, weights: tuple[Model, Model], s: Any, inputs: Any) -> Any:
        return interpolated_outputs(*weights, s, self.parts, inputs)


class FunctionsExchanged(NamedTuple):
    """Two models whose components are exchanged.

    Args:
        given: First model.
        a: First model, with the linear layers of b unless they are components too.
        b: Second model, in the basis of the first.
        parts: Components.
        setting: Metric, precision and budget.
        of: Measure, see `TOTALS`.
        points: Points of the comparison; None along a plan.
    """

    given: Model
    a: Model
    b: Model
    parts: tuple[Component, ...]
    setting: Setting
    of: str
    points: Points | None

    how = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the components."""
        return tuple(part.label for part in self.parts)

    @property
    def caveats(self) -> tuple[str, ...]:
        """Differences between the models and the networks they were read from."""
        return caveats(self.given, self.b)

    @property
    def length(self) -> float:
        """The norm of b."""
        return self.setting.squared_norm(self.b) ** 0.5

    def split(self) -> Split:
        """The change from a to b, split by component.

        Raises:
            Unchanged: Both are one function.
        """
        of = self.of
        exact_nodes(self.switched.degree)  # refused before anything is computed
        total = self.setting.measure(self.a, self.b, of)
        if total <= 0:
            if self.a is self.given or self.setting.measure(self.given, self.b, of) <= 0:
                raise Unchanged(f"the models are {ONE_FUNCTION[of]}: there is no change to split")
            raise Unchanged(
                "the models differ in linear layers alone, which are no components by themselves: "
                "ends=True makes components of them"
            )
        # Shares are relative to |b - a|^2, those of a cosine to its own change in units of |b|.
        relative_to = total
        if of != "distance":
            relative_to = total**2 * self.setting.squared_norm(self.b)
        error, setting = self.rounding_error(relative_to), self.setting
        surroundings = (
            0.0 if self.a is self.given else setting.measure(self.given, self.a, of, total)
        )
        arithmetic = Arithmetic(max(self.a.degree, self.b.degree), setting.dtype)
        if of == "distance":  # the inner products <delta_c, b - a>, by groups of draws
            difference: Any = by_differences(self.b - self.a, setting.dtype)
            at = exact_nodes(self.switched.degree)
            slopes = integral(self.switched, at, difference)
        else:
            floor = _rounding_of_similarity(self, total)
            error = max(error, floor)
            precision.refuse(error, "a share of the change", arithmetic)
            slopes, lost = _of_similarity(self, total, _CLOSE + error)
            error = max(error, lost)
        # The first axis are groups of draws, which are kept for the standard errors only.
        together = slopes.sum(axis=0)
        # The parts sum to the total; by how much they miss it shows the digits that cancellation
        # has left.
        missed = abs(together.sum() / total - 1)
        precision.report(max(missed, error), "a share of the change", arithmetic)
        exact = is_exact(setting.metric, (self.a, self.b)) and of == "distance"
        return Split(slopes, together / together.sum(), total, surroundings, exact)

    def rounding_error(self, target: float) -> float:
        """The bound of the error that float32 leaves in results.

        See `switched_models.rounding_error`.

        Args:
            target: Squared norm that results are relative to.
        """
        models = self.a, self.switched.at(0.5), self.b
        return rounding_error(self.switched, models, target)

    @property
    def switched(self) -> SwitchedModels:
        """The interpolated models, f(0) = a and f(1) = b."""
        # Degree of the states in t: a layer of order n multiplies n states, and an interpolated
        # component adds one factor t.
        degree = 0
        for n, layer in enumerate(self.a.layers):
            degree = layer.order * degree + any(part.layer == n for part in self.parts)
        orders = [layer.order for layer in self.a.layers]
        alone = tuple(math.prod(orders[part.layer + 1 :]) for part in self.parts)
        both, build = (self.a, self.b), _Interpolation(self.parts)
        return SwitchedModels(build, both, alone, degree, self.setting, self.points)

    def swapped(self, put_back: bool, total: float) -> Float[np.ndarray, " components"]:
        """The measure between b and b with one component of a, or between a and a with one of b.

        Args:
            put_back: Whether components of a are put into b.
            total: Measure beside which those that are smaller are read.
        """
        here, there = (self.b, self.a) if put_back else (self.a, self.b)
        pairs = ((here, exchanged(here, there, part)) for part in self.parts)
        return np.array([self.setting.measure(x, y, self.of, total) for x, y in pairs])

    def gram(
        self, total: float, share: Float[np.ndarray, " components"]
    ) -> Float[np.ndarray, "components components"]:
        """Inner products of the parts of the change, whose rows sum to the shares of the total."""
        error = self.rounding_error(total)
        found = gram_of_parts(self.switched)
        # Each part is off by that share of the change, and may be far larger than the change.
        longest = max(1.0, math.sqrt(max(found.diagonal().max(), 0.0) / total))
        # What sums miss is what cancellation took, of which single products lose more. Sums may
        # miss little by chance, and outputs are rounded relative to b, not to the change.
        sums = found.sum(axis=1) / total
        missed = max(abs(sums.sum() - 1), abs(sums - share).max())
        beside = math.sqrt(max(self.setting.product(self.b, self.b), 0.0) / total)
        lost = _OF_SUMS * max(missed, precision.EPS[self.setting.dtype] * beside)
        arithmetic = Arithmetic(max(self.a.degree, self.b.degree), self.setting.dtype)
        bound = longest * max(lost, arithmetic.rounding, error * (1 + error / longest))
        precision.report(bound, "an inner product of parts", arithmetic)
        return found

    def differences(self) -> Iterator[Batch]:
        """Outputs of b less those of a on the inputs of the metric."""
        metric = self.setting.metric
        if not isinstance(metric, Empirical):
            raise ModelError(
                "where on the inputs a change is, is asked of inputs: give "
                f"tnsim.Empirical(inputs), found {metric.name}"
            )
        # Weights are float64 here, as they are in `total`, whatever a file holds.
        both = in_float64(self.a), in_float64(self.b)
        points: Any = points_of(both, metric)
        for start in range(0, points.count, _ROWS):
            rows, log_weights = points.block(start, min(start + _ROWS, points.count))
            x, y = (np.asarray(outputs_on(model, rows)) for model in both)
            yield Batch(np.exp(log_weights), y - x)


def exchange_functions(
    a: Any, b: Any, setting: Setting, of: Any, by: Any, ends: bool, align: Any
) -> FunctionsExchanged:
    """Two polynomials whose components are exchanged, in one basis.

    Args:
        a, b: Models.
        setting: Metric, precision and budget.
        of: Measure, see `TOTALS`.
        by: Granularity of components, as for `change`; None for layers.
        ends: Whether linear layers are components too.
        align: What takes the stream of b to the basis of a, as for `change`.

    Raises:
        ModelError: Components do not correspond.
        UnsupportedLayer: A model has an activation.
        TooLarge: A forward pass is beyond the budget.
    """
    check_bilinear(setting.metric)
    by = "layer" if by is None else by
    one, two = with_dense_matrices(a), with_dense_matrices(b)
    check_untraced("change", one, two, setting.metric)
    parts = components_of([one, two], by, linear=ends)
    check_polynomial(one, two)
    a, b = check_exchangeable(one, two, by)
    if align is not None:
        b = in_basis(b, _basis(a, b, align))
    start = _with_ends(a, b, parts)
    # A model between the two takes part in the choice of points, as its kinds of layers may be
    # those of neither end.
    middle = interpolated(start, b, np.full(len(parts), 0.5), parts)
    points = setting.points(start, middle, b)
    return FunctionsExchanged(a, start, b, parts, setting, of, points)


def _basis(a: Model, b: Model, align: Any) -> Float[np.ndarray, "width width"]:
    if isinstance(align, str):
        if align != "embedding":
            raise ModelError(f"align must be 'embedding' or a square matrix, found {align!r}")
        return basis_of_embedding(a, b)
    return as_array(align, "align, 'embedding' or a square matrix,", 2)


def _with_ends(a: Model, b: Model, parts: tuple[Component, ...]) -> Model:
    """The model a with the layers of b where there is no component; a itself if these are equal."""
    own = {part.layer for part in parts}
    layers = list(a.layers)
    for n, (first, second) in enumerate(zip(a.layers, b.layers, strict=True)):
        if n not in own and not same_weights(first, second):
            layers[n] = second
    if all(x is y for x, y in zip(layers, a.layers, strict=True)):
        return a
    return Model(layers, a.n_ctx, a.origin)


def _rounding_of_similarity(pair: FunctionsExchanged, total: float) -> float:
    """What rounding leaves open of a change of similarity, relative to it.

    Along plans derivatives of a cosine are differences of numbers near 1. At points they are inner
    products with b - f, which is as small as the root of the change, unless b is longer than a.
    """
    degree = max(pair.a.degree, pair.b.degree)
    rounding = Arithmetic(degree, "float64").rounding
    if pair.points is None:
        return rounding / total
    first, second = (math.sqrt(pair.setting.squared_norm(model)) for model in (pair.a, pair.b))
    longer = (second - first) ** 2 / (2 * first * second)
    return rounding * max(min(total, 1.0) ** -0.5, longer / total)


class _Products(NamedTuple):
    """Inner products of f(t, ..., t) with b, or b - f, and with itself, and their derivatives.

    The first axis of each are values of t, the second groups of draws; derivatives by the switches
    of components have a third one.
    """

    cross: Float[np.ndarray, "t groups"]
    by_cross: Float[np.ndarray, "t groups components"]
    squares: Float[np.ndarray, "t groups"]
    by_own: Float[np.ndarray, "t groups components"]


def _of_similarity(
    pair: FunctionsExchanged, total: float, close: float
) -> tuple[Float[np.ndarray, "groups components"], float]:
    """The integral of the derivatives of the cosine of f(s) and b, and its relative rounding.

    The cosine is no polynomial in t, but a quotient of some, of degree 2 U at most: their values at
    2 U + 1 nodes are their values everywhere, so that no further gradient is taken however steep
    the quotient is. Intervals are halved until neither half tells more than the whole.
    """
    near = total <= NEAR and pair.points is not None  # plans would expand b - f, and lose the same
    at = nodes(min(2 * pair.switched.degree + 1, MOST_NODES))
    known = _products_at(pair, at.points, near)
    norm = math.sqrt(pair.setting.squared_norm(pair.b))
    lengths = []

    def over(start: float, stop: float) -> Float[np.ndarray, "groups components"]:
        inside = nodes(_NODES_OF_INTERVAL)
        values = _polynomials_at(at, known, start + (stop - start) * inside.points)
        lengths.append(values.squares.sum(axis=1).min())
        if lengths[-1] <= 0:
            raise ResultError(
                "a model between the two is the zero function, whose similarity is undefined; use "
                "of='distance'"
            )
        slopes = [_slopes_of_cosine(*each) for each in zip(*values, strict=True)]
        return (stop - start) / norm * np.tensordot(inside.weights, slopes, 1)

    slopes, intervals = np.zeros(known.by_own.shape[1:]), [(0.0, 1.0, over(0.0, 1.0))]
    while intervals:
        start, stop, whole = intervals.pop()
        middle = (start + stop) / 2
        halves = over(start, middle), over(middle, stop)
        missed = abs((sum(halves) - whole).sum(axis=0)).max()
        if missed <= close * total or len(lengths) > _MOST_INTERVALS:
            slopes += sum(halves)
        else:
            intervals += [(start, middle, halves[0]), (middle, stop, halves[1])]
    # Polynomials are as exact as they are large, which q may be elsewhere.
    longest = known.squares.sum(axis=1).max()
    lost = float(precision.EPS[pair.setting.dtype] * longest / min(lengths))
    missed = abs(slopes.sum() - total)
    if missed > (close + lost) * total:
        raise ResultError(
            "the similarity changes too steeply between the models, as of those that are nearly "
            f"opposite: shares miss {missed:.1g} of {total:.3g}; use of='distance', which is exact"
        )
    return slopes, lost


def _products_at(
    pair: FunctionsExchanged, at: Float[np.ndarray, " nodes"], near: bool
) -> _Products:
    """The inner products of models between two, by gradients."""
    found = []
    for t in at:
        own = pair.switched.at(t)
        cross = slope(pair.switched, t, pair.b - own if near else pair.b)
        # The target is the model itself, held fixed: half of the derivative of its squared norm.
        found.append((*cross, *slope(pair.switched, t, own)))
    return _Products(*map(np.stack, zip(*found, strict=True)))


def _polynomials_at(known: Nodes, values: _Products, t: Float[np.ndarray, " t"]) -> _Products:
    """Polynomials that are known at Gauss-Legendre nodes, at other places (barycentric formula).

    Source:
        Wang, Huybrechs and Vandewalle 2014, "Explicit barycentric weights for polynomial
        interpolation in the roots or extrema of classical orthogonal polynomials".
    """
    x, weights = known
    shares = (-1.0) ** np.arange(len(x)) * np.sqrt(x * (1 - x) * weights)
    apart = t[:, None] - x
    # At a node its own share is all there is.
    shares = shares / np.where(apart == 0, np.finfo(np.float64).tiny, apart)
    shares /= shares.sum(axis=1, keepdims=True)
    return _Products(*(np.tensordot(shares, each, 1) for each in values))


def _slopes_of_cosine(
    cross: Float[np.ndarray, " groups"],
    by_cross: Float[np.ndarray, "groups components"],
    squares: Float[np.ndarray, " groups"],
    by_own: Float[np.ndarray, "groups components"],
) -> Float[np.ndarray, "groups components"]:
    """The derivatives of the cosine at some t, times the norm of b.

    With p = <f, T> and q = <f, f> the derivative `d (<f, b> / sqrt(q)) = (<df, T> - p <df, f> / q)
    / sqrt(q)` is the same for T = b and for T = b - f, as for any other multiple of f beside b. For
    near models the latter has small terms in the place of large ones that cancel.
    """
    p, q = cross.sum(), squares.sum()
    # No power of q, which may leave the range of floats.
    rises, apart = by_cross - p / q * by_own, cross - p / q * squares
    return rises_as_drawn(rises, apart, by_own.sum(axis=0), squares) / np.sqrt(q)
