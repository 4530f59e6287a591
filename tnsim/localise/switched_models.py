"""Models with switches: their inner products, derivatives by switches, and integrals of those.

For a model f(s) that is a polynomial in switches s, and any sum of models T,

    delta_c = integral over t from 0 to 1 of df/ds_c at s = (t, ..., t)

is the part of component c in f(1, ..., 1) - f(0, ..., 0) after Aumann and Shapley: the parts sum to
the difference, as functions. Along the diagonal f is a polynomial of degree U in t, so
ceil(U / 2) Gauss-Legendre nodes give the integral exactly.

*Sums of models* (`parts_as_sums`). In a single switch f is a polynomial of small degree, whose
derivative is a sum of values, with as many nodes as the degree asks for. So delta_c is a sum of
models, and nothing is differentiated. It is taken where models have vectors of coefficients, and
where sums are short: 4 models for each layer of two, 0.34 s in place of 0.42 by gradients for a
change of two layers of 128 units by unit.

*Gradients.* Elsewhere one reverse gradient a node gives `<delta_c, T>` for all components together.
At points one compiled program goes through all nodes; weights and points are its arguments, so
other numbers need no new program. Along plans every node is a comparison of numbers with the
gradient that `inner` has, as plans compile for longer than they run.

*Inner products* of many models of one shape that share layers, as switched models do. At points
every layer runs once for all models that share it and what is below it (`problems.at_points`).
Along plans `pairwise` answers, by feature vectors or by one plan for all pairs with the share of
each model computed once.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.all_pairs.run import pairwise
from tnsim.compare import numbers
from tnsim.compare.by_plans import same_weights
from tnsim.compare.by_points import AtPoints
from tnsim.compare.numbers import without_each
from tnsim.compare.request import CROSS, Question, Request, check_comparison
from tnsim.compare.routes import cheapest, inner_products
from tnsim.compare.similarity import inner, similarity
from tnsim.engine.precision import Arithmetic
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.compiling import compiler_options
from tnsim.engine.runtime.devices import check_addresses
from tnsim.errors import CaveatWarning, DuplicateWarning, ModelError, TnsimError, TooLarge
from tnsim.metrics.metric import GaussianClosure
from tnsim.metrics.protocol import Metric, Points, WeightedPoints
from tnsim.models.forward import check_inputs, is_tokens, plain_forward
from tnsim.models.model import AnyModel, Combination, Model, terms
from tnsim.problems import at_points
from tnsim.problems.conditioning import amplification, cancellation_at, fits_float32
from tnsim.problems.features import common_space
from tnsim.problems.layer_kinds import kinds
from tnsim.scaled import LOG_2, ScaledSum, power

NEAR = 1e-4
"""Change of a cosine below which it is computed from differences: 1 less a cosine near 1 has few
digits, and nothing is left of it below 1e-16."""


_ALIKE = 64 * float(np.finfo(np.float64).eps)
"""Share of a squared difference that rounding leaves across models which differ by a factor."""
MOST_NODES = 512
"""Most nodes of one integral, each a reverse gradient."""
_IN_CACHE = 2**23
"""Bytes of the states of a block of points at the nodes that run together, which limit memory; one
node after another takes twice as long."""
_MOST_MODELS = 64
"""Most models of all sums of which parts are made; gradients take as long for all components as for
one."""


def one_less_cosine(squares: float, longer: float, first: float, second: float) -> float:
    """`1 - cos(a, b)` with the digits that 1 less a cosine near 1 has lost.

    With d = b - a it is `(|d|^2 - (|b| - |a|)^2) / (2 |a| |b|)`, where
    `|b| - |a| = <d, a + b> / (|a| + |b|)`. It is 0 where rounding is all that the difference of
    squares has, as of models that differ by a factor.

    Args:
        squares: `|d|^2`.
        longer: `<d, a + b>`.
        first, second: `|a|` and `|b|`, above 0.

    Example:
        >>> one_less_cosine(2.0, 0.0, 1.0, 1.0)
        1.0
    """
    across = squares - (longer / (first + second)) ** 2
    return across / (2 * first * second) if across > _ALIKE * squares else 0.0


def rises_as_drawn(
    rises: Float[np.ndarray, "groups players"],
    apart: Float[np.ndarray, " groups"],
    by_own: Float[np.ndarray, " players"],
    squares: Float[np.ndarray, " groups"],
) -> Float[np.ndarray, "groups players"]:
    """Derivatives of `cos(f, b)` by groups of draws, for shares without each group.

    A cosine is no sum over draws. With `p = <f, b>` and `q = <f, f>` its derivatives
    `(<df, b> - <df, f> p / q) / sqrt(q)`, in units of |b|, which scales all shares alike, change
    without a group also through p / q and q, to first order as here. Sums over groups are kept.

    Args:
        rises: The terms of each group, with p and q of all draws.
        apart: `(<f, b> - <f, f> p / q) / sqrt(q)` of each group, which sum to 0.
        by_own: `<df, f>` of all draws.
        squares: `<f, f>` of each group.

    Example:
        >>> found = rises_as_drawn(np.eye(2), np.array([1.0, -1.0]), np.ones(2), np.array([1.0, 3]))
        >>> found.tolist(), found.sum(axis=0).tolist()
        ([[0.875, -0.125], [0.125, 1.125]], [1.0, 1.0])
    """
    if len(squares) == 1:
        return rises
    shares = squares / squares.sum()
    beside = np.outer(apart, by_own / squares.sum())  # products of both leave the range of floats
    return rises - beside - np.outer(shares - 1 / len(shares), rises.sum(axis=0)) / 2


class Setting(Request):
    """The metric, precision and budget of all comparisons that a split of a model needs."""

    def inner(self, a: AnyModel, b: AnyModel) -> Any:
        """The inner product of two models."""
        return inner(a, b, self.metric, dtype=self.dtype, budget=self.budget)

    def squared_norm(self, model: AnyModel) -> float:
        """The squared norm of a model."""
        return float(self.inner(model, model))

    def product(self, first: AnyModel, second: AnyModel) -> float:
        """An inner product with the digits that are left of it, of parts that are summed up."""
        found = inner_products(first, second, self)
        value = found.values["AB"]
        return float(power(value.mantissa, value.exponent + found.exponent))

    def similarity(self, a: AnyModel, b: AnyModel) -> Any:
        """The cosine of two models."""
        return similarity(a, b, self.metric, dtype=self.dtype, budget=self.budget)

    def measure(self, a: Model, b: Model, of: str, beside: float = 0.0) -> float:
        """How far two models are apart: `|b - a|^2`, or `1 - similarity(a, b)`.

        Args:
            a, b: Models.
            of: Measure, `distance` or `similarity`.
            beside: Squared distance beside which a smaller one is read; digits count relative to
                it, as nothing is left of those of equal functions in other weights.
        """
        if same_weights(a, b):  # in float32 a zero without a term is taken for a loss
            return 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CaveatWarning)  # said once, of the models themselves
            if of == "distance":
                return self._squared_distance(b - a, beside)
            apart = 1.0 - float(self.similarity(a, b))
            return apart if apart > NEAR else self._apart(a, b)

    def _squared_distance(self, difference: Combination, beside: float) -> float:
        found = inner_products(difference, difference, self)
        own = found.values["AB"]
        if power(own.mantissa, own.exponent + found.exponent) < beside:
            size = np.asarray(beside, np.float64)
            whole = ScaledSum(size, np.asarray(-found.exponent, np.float64), size)
            found = found._replace(values={"AB": own, "AA": whole, "BB": whole})
        return max(float(numbers.value(found, (difference, difference), self)), 0.0)

    def _apart(self, a: Model, b: Model) -> float:
        """`1 - similarity(a, b)` of near models, whose squared norms are within floats."""
        first, second = (math.sqrt(self.squared_norm(model)) for model in (a, b))
        difference = b - a
        squares, longer = (self.product(difference, other) for other in (difference, a + b))
        return one_less_cosine(squares, longer, first, second)

    def enlarged(self, model: Model, points: Points | None) -> float:
        """The factor by which a model enlarges the rounding of its weights, at least 1."""
        if points is not None:
            return cancellation_at(model, points, self.dtype)
        return max(1.0, math.sqrt(float(amplification(model, self.metric))))

    def points(self, *models: Model) -> Points | None:
        """Points at which models are compared; None where a plan answers.

        Args:
            models: All models that are to run on the points.
        """
        check_bilinear(self.metric)
        check_comparison(models[0], models[-1], self.metric)
        question = Question(models, self.metric, CROSS, False, self.dtype)
        route = cheapest(question, self.budget).route
        if not isinstance(route, AtPoints):
            return None
        # Layers that models have in common run once, so one of each form tells the cost.
        forms = {kinds(model): model for model in models}.values()
        alone = AtPoints(replace(question, models=tuple(forms)), route.points)
        alone.within(alone.estimate(), self.budget)
        return route.points


def check_bilinear(metric: Any) -> None:
    """Refuse a metric under which a sum of models is not a sum of inner products.

    Raises:
        ModelError: The metric is `GaussianClosure`.

    Example:
        >>> import tnsim
        >>> check_bilinear(tnsim.Gaussian())
    """
    if isinstance(metric, GaussianClosure):
        raise ModelError(
            "GaussianClosure is no bilinear form of the model: it treats the hidden states of a "
            "whole model as Gaussian, so a sum of parts has another value than the parts; use "
            "Gaussian(), a finite metric such as Empirical or Categorical(samples=...), or "
            "TreeSymmetric()"
        )


@dataclass(frozen=True)
class Gram:
    """The matrix `values * 2 ** exponent` of inner products.

    Args:
        values: Inner products (rows, columns).
        sizes: What their rounding is relative to, as the products of the norms: models may be
            orthogonal.
        exponent: Exponent of the common scale of both.
        left_out: The same matrix without each group of draws, (groups, rows, columns), in scales
            of their own; None where nothing was sampled.
        points: Points at which all models ran; None along plans.
    """

    values: Float[np.ndarray, "rows columns"]
    sizes: Float[np.ndarray, "rows columns"]
    exponent: float
    left_out: Float[np.ndarray, "groups rows columns"] | None = None
    points: Points | None = None


def gram(rows: Sequence[Model], columns: Sequence[Model] | None, setting: Setting) -> Gram:
    """The inner products of all rows with all columns, without columns of all rows.

    Args:
        rows, columns: Models of one shape of inputs and outputs.
        setting: Metric, precision and budget.

    Returns:
        A `Gram`, float64.

    Example:
        >>> import numpy as np, tnsim
        >>> lines = [tnsim.Model([tnsim.Linear([[w]])]) for w in (1.0, 3.0)]
        >>> setting = Setting(tnsim.Empirical([[1.0], [2.0]]), "float64", tnsim.Budget())
        >>> found = gram(lines, None, setting)
        >>> (found.values * 2.0**found.exponent).round(9).tolist()
        [[2.5, 7.5], [7.5, 22.5]]
    """
    points = setting.points(*rows, *(columns or ()))
    if points is None:
        return along_plans(rows, columns, setting)
    sums = at_points.sums(
        [[(1.0, model)] for model in rows],
        None if columns is None else [[(1.0, model)] for model in columns],
        points,
        False,
        setting.dtype,
        setting.budget,
    )
    in_one_scale = _in_one_scale(at_points.over_groups(sums.products))
    left_out = None
    # Groups without weight have no values to leave out.
    counted = sums.shares > 0
    if points.drawn and np.count_nonzero(counted) > 1:
        left_out, exponents = without_each(sums.products, counted)
        left_out = left_out * np.exp2(exponents - exponents.max())
    return Gram(*in_one_scale, left_out, points)


def _in_one_scale(products: ScaledSum) -> tuple[np.ndarray, np.ndarray, float]:
    """Values and sizes relative to the largest scale among them, and its exponent."""
    values, exponents, sizes = map(np.asarray, products)
    # A size of zero has no scale, and must not set the common one.
    top = float(np.where(sizes == 0, -np.inf, exponents).max())
    if math.isinf(top):
        return np.zeros(values.shape), np.zeros(values.shape), 0.0
    factors = np.exp2(np.minimum(exponents - top, 0.0))
    return values * factors, sizes * factors, top


def along_plans(
    rows: Sequence[AnyModel], columns: Sequence[AnyModel] | None, setting: Setting
) -> Gram:
    """The inner products of all rows with all columns, as for `gram`, where no points answer."""
    with warnings.catch_warnings():
        # Switched models may be equal, and the caller has spoken of caveats.
        warnings.simplefilter("ignore", DuplicateWarning)
        warnings.simplefilter("ignore", CaveatWarning)
        products = pairwise(
            list(rows),
            setting.metric,
            other=None if columns is None else list(columns),
            dtype=setting.dtype,
            budget=setting.budget,
        )
    # `pairwise` gives natural logarithms.
    sign, log = (
        np.asarray(products["sign"], np.float64),
        np.asarray(products["log_inner"], np.float64),
    )
    first, second = (np.asarray(products[f"log_norm_{side}"], np.float64) for side in "ab")
    norms = (first[:, None] + second) / 2
    cosines = ScaledSum(sign * np.exp(log - norms), norms / LOG_2, np.ones_like(norms))
    return Gram(*_in_one_scale(cosines))


class Build(Protocol):
    """Models with switches, of weights that are given; hashable, as programs are kept by it."""

    def __call__(self, weights: Any, s: Any, /) -> Model:
        """The model with the switches s."""
        ...

    def outputs(self, weights: Any, s: Any, inputs: Any, /) -> Any:
        """The outputs of the model with the switches s at some inputs, in plain floats."""
        ...


class SwitchedModels(NamedTuple):
    """Models f(s) with switches s, and how they are compared.

    Args:
        build: Models f(s) for weights and switches s, and their outputs.
        weights: Pytree of arrays, such as two models.
        degrees: Degree of the outputs in each switch alone.
        degree: Degree U of the outputs in t along s = (t, ..., t).
        setting: Metric, precision and budget.
        points: Points of the comparison; None along a plan.
    """

    build: Build
    weights: Any
    degrees: tuple[int, ...]
    degree: int
    setting: Setting
    points: Points | None = None

    @property
    def players(self) -> int:
        """Number of switches."""
        return len(self.degrees)

    def at(self, s: Any) -> Model:
        """The model with given switches, of plain numbers."""
        return self.build(self.weights, np.broadcast_to(np.asarray(s, np.float64), self.players))


class Nodes(NamedTuple):
    """Nodes and weights of Gauss-Legendre quadrature on [0, 1]."""

    points: Float[np.ndarray, " nodes"]
    weights: Float[np.ndarray, " nodes"]


def nodes(count: int) -> Nodes:
    """Gauss-Legendre nodes on [0, 1], exact to degree 2 count - 1.

    Raises:
        TooLarge: There are more nodes than `MOST_NODES`.

    Example:
        >>> round(float(nodes(2).weights @ nodes(2).points**3), 12)
        0.25
    """
    if count > MOST_NODES:
        raise TooLarge(
            f"an exact integral over all switches takes {count:,} gradients here, more than "
            f"{MOST_NODES:,}, as its degree grows exponentially with depth; give models of fewer "
            "layers. A change of modules is also split by weights: by='module' on "
            "tnsim.Empirical(inputs)"
        )
    # From [-1, 1] to [0, 1].
    x, w = np.polynomial.legendre.leggauss(count)
    return Nodes((x + 1) / 2, w / 2)


def exact_nodes(degree: int) -> Nodes:
    """The nodes at which the derivative of a polynomial of this degree is integrated exactly."""
    # The derivative has degree U - 1, and n nodes are exact to degree 2 n - 1.
    return nodes(max(1, math.ceil(degree / 2)))


def rounding_error(switched: SwitchedModels, models: Sequence[Model], target: float) -> float:
    """The bound of the relative error of derivatives by switches in float32; 0 in float64.

    Rounding changes the outputs of f(s) by a share of |f(s)| that grows where sums within f(s)
    cancel (`problems.conditioning`), and derivatives by as much. Between two models that differ
    only in their hidden bases, outputs are far larger than at both ends.

    Args:
        switched: Models with switches.
        models: Models that are computed.
        target: Squared norm |T|^2 that results are relative to.
    """
    setting, points = switched.setting, switched.points
    if setting.dtype == "float64":
        return 0.0
    # Derivatives by switches are computed in plain floats, whose range may end before their digits.
    if not all(fits_float32(model, setting.metric, points) for model in models):
        return math.inf
    rng = np.random.default_rng(0)
    enlarged = 1.0  # the factor of rounding times |f(s)| / |T|, at both ends and between them
    for s in (0.0, 0.5, 1.0, *rng.uniform(size=(2, switched.players))):
        model = switched.at(s)
        squared = setting.product(model, model)
        # Where nothing passes without edges, the model with all switches off is zero.
        if squared != 0:
            size = math.sqrt(max(squared, 0.0) / target)
            # Unlike `max`, keeps the NaN of what is beyond floats, which is refused.
            enlarged = np.maximum(enlarged, size * setting.enlarged(model, points))
    growth = max(model.growth for model in models)
    return float(Arithmetic(growth, setting.dtype).rounding * enlarged)


class Slope(NamedTuple):
    """The inner product `<f(s), T>` and its derivatives by switches, by groups of draws.

    Args:
        value: Inner products, (groups,).
        by_switch: Derivatives, (groups, players).
    """

    value: Float[np.ndarray, " groups"]
    by_switch: Float[np.ndarray, "groups players"]


def slope(switched: SwitchedModels, s: Any, target: Model | Combination) -> Slope:
    """The derivatives of `<f(s), T>` by the switches.

    Args:
        switched: Models with switches.
        s: Switches, a single number for all or (players,).
        target: Model or sum of models T.

    Raises:
        TnsimError: A value is beyond the range of floats.
    """
    one = Nodes(np.ones(1), np.ones(1))
    found = _over_nodes(switched, one, s, target)
    _check_finite(switched.setting, *found)
    return found


def integral(
    switched: SwitchedModels, at: Nodes, target: Model | Combination
) -> Float[np.ndarray, "groups players"]:
    """The inner products `<delta_c, T>` by groups of draws: derivatives summed over nodes.

    Args:
        switched: Models with switches.
        at: Nodes, and their weights.
        target: Model or sum of models T.

    Raises:
        TnsimError: A value is beyond the range of floats.
    """
    sums = parts_as_sums(switched, at, terms(target))
    if sums is None:
        by_switch = _over_nodes(switched, at, 1.0, target).by_switch
    else:
        by_switch = np.array([[switched.setting.product(part, target) for part in sums]])
    _check_finite(switched.setting, by_switch)  # values may be beyond floats where no derivative is
    return by_switch


def _over_nodes(switched: SwitchedModels, at: Nodes, s: Any, target: Model | Combination) -> Slope:
    """The weighted sum of `<f(t s), T>` and of its derivatives over nodes t, by gradients."""
    switches = np.broadcast_to(np.asarray(s, np.float64), switched.players)
    if switched.points is None:
        slopes = _along_plan(switched, np.outer(at.points, switches), target)
        weighted = zip(at.weights, slopes, strict=True)
        found = [(weight * value, weight * by_switch) for weight, (value, by_switch) in weighted]
        return Slope(*(np.sum(same, axis=0) for same in zip(*found, strict=True)))
    coefficients, models = zip(*terms(target), strict=True)
    numbers, count = np.asarray(coefficients, np.float64), len(at.points)
    with execution.precision():
        args = _placed((switched.weights, (*at, switches), numbers, models), switched.setting.dtype)
        return Slope(*_by_groups(_slopes_of_blocks, args, switched, models, count))


def _check_finite(setting: Setting, *values: np.ndarray) -> None:
    if not all(np.isfinite(value).all() for value in values):
        advice = "scale down the last layer of both models, which changes no share"
        if setting.dtype == "float32":
            advice = "use dtype='float64'"
        raise TnsimError(
            f"inner products under {setting.metric.name} are beyond {setting.dtype} for these "
            f"weights; {advice}"
        )


def parts_as_sums(
    switched: SwitchedModels, at: Nodes, beside: Sequence[tuple[Any, Model]]
) -> list[Combination] | None:
    """The parts of all components as sums of models: derivatives by switches, summed over nodes.

    The derivative at 0 of a polynomial p of degree n is a sum over m = ceil(n / 2) steps x,

        p'(0) = sum_k w_k (p(x_k) - p(-x_k)),    2 sum_k w_k x_k^j = (1 if j = 1 else 0) for odd j,

    as even powers cancel. Steps are roots of the Chebyshev polynomial of degree 2 m, times half a
    switch.

    Args:
        switched: Models with switches.
        at: Nodes, and their weights.
        beside: Coefficients and models that the sums are compared with.

    Returns:
        A sum for each switch; None where models have no vectors of coefficients, or sums are long.
    """
    steps = [math.ceil(degree / 2) for degree in switched.degrees]
    every = [switched.at(0.5), *(model for _, model in beside)]
    if (
        switched.points is not None
        or 2 * len(at.points) * sum(steps) > _MOST_MODELS
        or common_space(every, switched.setting.metric) is None
    ):
        return None
    sums = []
    for alone, count in zip(np.eye(switched.players), steps, strict=True):
        # One step is exact whatever it is, and the longest one has the most digits.
        x = np.cos(np.pi * (np.arange(count) + 0.5) / (2 * count)) / 2 if count > 1 else [0.5]
        powers = 2.0 * np.asarray(x) ** np.arange(1, 2 * count, 2)[:, None]
        found = np.linalg.solve(powers, np.eye(count)[0])
        weighted = []
        for t, weight in zip(*at, strict=True):
            for step, w in zip(x, found, strict=True):
                for sign in (1.0, -1.0):
                    model = switched.at(t + sign * step * alone)
                    weighted.append((sign * weight * w, model))
        sums.append(Combination(weighted))
    return sums


def _by_groups(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    switched: SwitchedModels,
    models: Sequence[Model],
    count: int,
) -> Any:
    """Values of a function of blocks of vectors, summed over every group of draws.

    Args:
        function: Function of the build of the models, the number of nodes that run together, the
            arguments, and a block.
        args: Arguments that all blocks share.
        switched: Models with switches.
        models: Models of the target.
        count: Number of nodes.

    Returns:
        Values with a first axis of groups, float64.
    """
    groups, together, stacks = _point_stacks(switched, models, count)
    program = _program(function, 0, 1)
    numbers, slopes = [], []
    for group, stack in stacks:
        numbers.append(group)
        values = program(switched.build, together, *args, stack)
        slopes.append(jax.tree.map(lambda x: np.asarray(x, np.float64), values))
    place = np.concatenate(numbers)

    def summed(*same: np.ndarray) -> np.ndarray:
        values = np.concatenate(same)
        totals = np.zeros((groups, *values.shape[1:]))
        np.add.at(totals, place, values)
        return totals

    return jax.tree.map(summed, *slopes)


def _point_stacks(
    switched: SwitchedModels, models: Sequence[Model], count: int
) -> tuple[int, int, Iterator[tuple[np.ndarray, WeightedPoints]]]:
    """The number of groups, of nodes that run together, and the stacks of blocks of points."""
    every, points, setting = [switched.at(0.5), *models], switched.points, switched.setting
    assert points is not None  # as there are blocks of points
    for model in every:
        check_inputs(model, points.block(0, 1).inputs)
    bounds = at_points.groups(points)
    largest = max(stop - start for start, stop in bounds)
    # The way back keeps the states behind every layer: each model counts once for each of its
    # layers.
    deep = [model for model in every for _ in model.layers]
    size = at_points.batch_size(deep, points, largest, setting.dtype, setting.budget)
    each = at_points.needs(deep, points, setting.dtype).each
    together = max(1, min(count, int(_IN_CACHE / each)))
    if not points.continuations:
        # Even blocks, as large as a cache and the memory hold.
        most = max(1, min(int(_IN_CACHE / each), size) // together)
        size = math.ceil(largest / math.ceil(largest / most))
    return len(bounds), together, _stacks(points, bounds, size, setting.dtype)


def _stacks(
    points: Points, bounds: Sequence[tuple[int, int]], size: int, dtype: str
) -> Iterator[tuple[np.ndarray, WeightedPoints]]:
    """Blocks of equal size that a single program goes through, and the group of each block.

    A call for each block takes twice as long, with 32 groups of draws. Blocks of beginnings differ
    in shape, so that each is a stack of its own.
    """
    groups: list[int] = []
    blocks: list[WeightedPoints] = []
    room = 0
    for number, (start, stop) in enumerate(bounds):
        for batch in at_points.in_batches(points, start, stop, size):
            groups.append(number)
            inputs = batch.inputs if is_tokens(batch.inputs) else batch.inputs.astype(dtype)
            blocks.append(batch._replace(inputs=inputs))
            if not room:
                leaves = jax.tree.leaves(blocks[0])
                room = max(1, at_points.BATCH_BYTES // sum(x.nbytes for x in leaves))
                room = 1 if points.continuations else room
            if len(blocks) == room:
                yield _stacked_blocks(groups, blocks)
                groups, blocks = [], []
    if blocks:
        yield _stacked_blocks(groups, blocks)


def _stacked_blocks(
    groups: Sequence[int], blocks: Sequence[WeightedPoints]
) -> tuple[np.ndarray, WeightedPoints]:
    return np.array(groups), jax.tree.map(lambda *same: np.stack(same), *blocks)


@cache
def _program(function: Callable[..., Any], *static: int) -> Callable[..., Any]:
    """A function compiled once for all arrays of one shape, with these arguments static."""
    check_addresses()
    return jax.jit(function, static_argnums=static, compiler_options=compiler_options())


def _placed(tree: Any, dtype: str) -> Any:
    """Weights on the device in a precision; scalars such as skips as well."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def _slopes_of_blocks(
    build: Build,
    together: int,
    weights: Any,
    at: Any,
    coefficients: Any,
    models: Any,
    blocks: Any,
) -> Any:
    """Values and derivatives at all nodes, weighted and summed, over every block of points.

    Nodes that run together are an axis of one program, in which states below the first switch, and
    the way back through the last layer, have no such axis: they are computed once.
    """
    where, node_weights, switches = at

    def over_block(block: Any) -> Any:
        # The target does not depend on switches and runs outside of the gradient.
        target: Any = 0.0
        for n, model in enumerate(models):
            outputs = plain_forward(model, block.inputs)
            target = target + coefficients[n] * _weighted(outputs, block)

        def product(s: Any) -> Any:
            return (_weighted(build.outputs(weights, s, block.inputs), block) * target).sum()

        def at_node(t: Any) -> Any:
            return jax.value_and_grad(product)(t * switches)

        values, slopes = jax.lax.map(at_node, where, batch_size=together)
        return node_weights @ values, node_weights @ slopes

    return jax.lax.map(over_block, blocks)


def _weighted(outputs: Any, block: Any) -> Any:
    """Outputs times the roots of the weights of points: both factors of a product get the root.

    Outputs are plain floats: exponents of their own would cost more to compile than all the rest.
    """
    roots = jnp.exp(block.log_weights / 2).astype(outputs.dtype)
    return outputs * roots.reshape(-1, *(1,) * (outputs.ndim - 1))


def _along_plan(
    switched: SwitchedModels,
    switches: Float[np.ndarray, "nodes players"],
    target: Model | Combination,
) -> Iterator[Slope]:
    """The inner product and its derivatives at several nodes, in a single group.

    Models of numbers are compared as ever, with the gradient that `inner` has; only the way from
    switches to weights is compiled, which is short: operation by operation a change of four layers
    takes 2.4 times as long.
    """
    setting = switched.setting
    with execution.precision():
        weights = _placed(switched.weights, setting.dtype)
        # The target is placed once, so that what is made of it serves all nodes.
        fixed = [(c, _placed(model, setting.dtype)) for c, model in terms(target)]

        def product(model: Model) -> Any:
            return setting.inner(model, Combination(fixed))

        for s in switches:
            at = jnp.asarray(s, setting.dtype)
            model, pullback = _program(_switched, 0)(switched.build, weights, at)
            value, by_weight = jax.value_and_grad(product)(model)
            (by_switch,) = _program(_pulled_back)(pullback, by_weight)
            yield Slope(*(np.asarray(x, np.float64)[None] for x in (value, by_switch)))


def _switched(build: Build, weights: Any, s: Any) -> tuple[Model, Any]:
    """A model with switches, and the function from its derivatives to those of the switches."""
    return jax.vjp(lambda s: build(weights, s), s)


def _pulled_back(pullback: Any, slopes: Any) -> Any:
    return pullback(slopes)


def gram_of_parts(switched: SwitchedModels) -> Float[np.ndarray, "players players"]:
    """The inner products `<delta_c, delta_d>` of the parts of all components, float64."""
    at, setting = exact_nodes(switched.degree), switched.setting
    if (sums := parts_as_sums(switched, at, ())) is not None:
        found = along_plans(sums, None, setting)
        return power(found.values, np.float64(found.exponent))
    with execution.precision():
        weights = _placed(switched.weights, setting.dtype)
        if switched.points is not None:
            weighted = at.points, at.weights, np.ones(switched.players)
            args = weights, _placed(weighted, setting.dtype)
            return _by_groups(_parts_of_blocks, args, switched, (), len(at.points)).sum(axis=0)
        # <delta_c, delta_d> is a double integral over t and t', and its integrand at (t', t) is the
        # transpose of that at (t, t'): each pair of nodes is computed once.
        gram = np.zeros((switched.players, switched.players))
        nodes_and_weights = zip(*at, strict=True)
        for (t, u), (x, y) in itertools.combinations_with_replacement(nodes_and_weights, 2):
            s, r = (jnp.full(switched.players, z, setting.dtype) for z in (t, x))
            mixed = _program(_mixed_derivatives, 0, 5)(
                switched.build, weights, s, r, setting.metric, setting.dtype
            )
            both = np.asarray(mixed, np.float64)
            gram += u * y * (both if t == x else both + both.T)
    return gram


def _mixed_derivatives(
    build: Build, weights: Any, s: Any, r: Any, metric: Metric, dtype: str
) -> Any:
    """The inner products of derivatives of f at s with derivatives at r."""

    def product(s: Any, r: Any) -> Any:
        return inner(build(weights, s), build(weights, r), metric, dtype=dtype)

    return jax.jacfwd(jax.grad(product, argnums=0), argnums=1)(s, r)


def _parts_of_blocks(build: Build, together: int, weights: Any, at: Any, blocks: Any) -> Any:
    """The Gram matrix of the parts over every block of points."""
    where, node_weights, ones = at

    def over_block(block: Any) -> Any:
        def vector(s: Any) -> Any:
            return _weighted(build.outputs(weights, s, block.inputs), block)

        def at_node(node: Any) -> Any:
            t, weight = node
            return weight * jax.jacfwd(vector)(t * ones)

        # One node after another: a derivative has the size of all outputs for every player.
        parts = jax.lax.map(at_node, (where, node_weights)).sum(axis=0)
        # (points and outputs, players): the Gram matrix of the columns.
        flat = parts.reshape(-1, parts.shape[-1])
        return flat.T @ flat

    return jax.lax.map(over_block, blocks)
