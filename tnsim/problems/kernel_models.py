"""Models with activations under a Gaussian metric, layer over layer.

A model of a single nonlinear layer is a function of hidden units of the input
(`problems.hidden_units`), and its inner products are exact. `GaussianClosure` takes any number of
such layers. A model is then a chain of *segments* with one nonlinear layer each, and the states s
of one model and t of another that enter segment n are taken for jointly normal, with the means and
covariances that they have as outputs of segment n - 1 at normal inputs,

    cov(s, t) = D (K - mean mean') D'^T + J_h J_l'^T + J_l J_h'^T + J_l J_l'^T,

K the kernel of the hidden units of both segments, J_h and J_l the slopes of the hidden units and of
the linear part. The last segments give the inner product. A matrix L with the joint covariance
L L^T has rows of s and of t, so that every segment reads rows in the coordinates of one L, as the
first segments do. Means and covariances of one model with itself are known to every pair.

A model of fewer segments keeps its last state, as polynomial models do under the same metric.

*Error.* Covariances are off by the rounding and the truncation of kernels, and the next kernel
reads covariances. A kernel of continuous activations passes an error of correlations on, while a
step, of slope 1 / sqrt(1 - rho^2) at correlation rho, passes on the root of the error. Cancellation
within the model enlarges errors as it does under all metrics (`problems.conditioning`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from tnsim.activations.activation import Remainder
from tnsim.activations.kernels import jumps
from tnsim.engine.precision import Arithmetic, cancellation
from tnsim.metrics.input_moments import marginals, root_of
from tnsim.metrics.protocol import Metric
from tnsim.models.arrays import is_traced, pytree
from tnsim.models.model import Model
from tnsim.problems.conditioning import amplification
from tnsim.problems.diagrams import groups
from tnsim.problems.hidden_units import HiddenUnits, segments
from tnsim.problems.kernels import Blocks, Prepared, blocks_of, inner, kernel_blocks, prepared
from tnsim.problems.tensors.affine import Affine
from tnsim.problems.tensors.kinds import Kinds
from tnsim.scaled import SMALLEST, ScaledSum, contribution, larger, library, shifted, split
from tnsim.sessions import per_object_cache

_EPS = float(np.finfo(np.float64).eps)
_ORDERS = 24
"""Orders of Hermite coefficients that a typical pair of units takes, for estimates of work."""


class Law(NamedTuple):
    """The moments of a state that is taken for normal.

    Args:
        mean: Mean of the state.
        cov: Covariance of the state.
        error: Errors of the moments relative to the sizes of the state.
    """

    mean: Float[np.ndarray, " width"]
    cov: Float[np.ndarray, "width width"]
    error: float


@pytree
@dataclass(frozen=True, eq=False)
class Chain:
    """A model at a position, segment by segment.

    Args:
        first: First segment as a function of the input.
        later: Further segments, as functions of the state before.
        laws: Laws of the states that the further segments read.
    """

    first: Prepared
    later: tuple[HiddenUnits, ...] = ()
    laws: tuple[Law, ...] = ()


@pytree
@dataclass(frozen=True, eq=False)
class PreparedModel:
    """A model under a metric, as `2 ** exponent` times prepared functions.

    Args:
        positions: The model at every distinct position.
        counts: Numbers of positions alike.
        exponent: Exponent of the power of two that outputs lack.
        cancels: Factor by which errors grow as terms within the model cancel, see `conditioning`.
    """

    positions: tuple[Chain, ...]
    counts: tuple[int, ...] = field(metadata={"static": True})
    exponent: Any
    cancels: float = field(default=1.0, metadata={"static": True})


def under(
    model: Model, metric: Metric, dtype: str, roots: Sequence[Any] | None = None
) -> PreparedModel:
    """A model under a Gaussian metric, at every distinct position.

    Args:
        model: Model that `hidden_units.has_kernels` accepts under the metric.
        metric: A Gaussian metric.
        dtype: Type of the arrays; of several segments float64.
        roots: Roots of the covariances of a single segment's input, see `roots_of`; None where
            they are to be made of the metric.

    Example:
        The mean of relu(z) is 0.3989; the state is stored in the unit 2.

        >>> import numpy as np, tnsim
        >>> layers = [tnsim.Linear(np.eye(2)), tnsim.Elementwise("relu")] * 2
        >>> made = under(tnsim.Model(layers), tnsim.GaussianClosure(), "float64")
        >>> made.positions[0].laws[0].mean.round(4).tolist()
        [0.1995, 0.1995]
    """
    reading = model.d_in, model.n_ctx
    first, *later = segments(model)
    if not later:
        return units_under(first, metric, reading, dtype, roots=roots)
    chain, exponents = [], []
    for units in (first, *later):
        if chain:
            units = _of_scaled(units, exponents[-1], chain[-1])
        units, exponent = _in_range(units)
        chain.append(units)
        exponents.append(exponent)
    made = units_under(chain[0], metric, reading, "float64", on_host=True)
    chains = [_continued(position.first, tuple(chain[1:])) for position in made.positions]
    cancels = cancellation(amplification(model, metric))
    return PreparedModel(tuple(chains), made.counts, exponents[-1], cancels)


def units_under(
    units: HiddenUnits,
    metric: Metric,
    reading: tuple[int, int | None],
    dtype: str,
    on_host: bool = False,
    roots: Sequence[Any] | None = None,
) -> PreparedModel:
    """A function of hidden units under a Gaussian metric, at every distinct position.

    Args:
        units: Function of hidden units.
        metric: A Gaussian metric.
        reading: Coordinates and positions of the input, None for vectors.
        dtype: Type of the arrays.
        on_host: Whether kernels are made in NumPy, also where there is an accelerator.
        roots: Roots of the covariances, see `under`.
    """
    d_in, n_ctx = reading
    units, exponent = _in_range(units)
    chains, counts = [], []
    roots = roots_of(metric, reading) if roots is None else roots
    # Positions with the same marginal are computed once and counted.
    for (count, mean, _), root in zip(marginals(metric, d_in, n_ctx), roots, strict=True):
        chains.append(Chain(prepared(units, mean, root, d_in, dtype, on_host)))
        counts.append(count)
    return PreparedModel(tuple(chains), tuple(counts), exponent)


def roots_of(metric: Metric, reading: tuple[int, int | None]) -> tuple[Any, ...]:
    """Roots of the covariances of a metric, at every distinct position.

    Functions that meet are in the coordinates of one root, and a root is unique but for a rotation.

    Args:
        metric: A Gaussian metric.
        reading: Coordinates and positions of the input, None for vectors.
    """
    return (_roots if is_traced(metric) else _kept_roots)(metric, *reading)


def _roots(metric: Metric, d_in: int, n_ctx: int | None) -> tuple[Any, ...]:
    """Roots of the covariances of a metric, at every distinct position."""
    return tuple(root_of(cov) for _, _, cov in marginals(metric, d_in, n_ctx))


_kept_roots = per_object_cache(_roots)  # eigenvectors of 768 coordinates take a second


def _in_range(units: HiddenUnits) -> tuple[HiddenUnits, Any]:
    """The function with outputs near 1, and the exponent of two that they lack."""
    arrays = {name: getattr(units, name) for name in ("down", "linear", "constant")}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    if "down" not in arrays and units.activation is not None:
        return units, np.float64(0.0)  # the identity is near one
    # One power of two for all that outputs read, so that their sum needs no units of its own.
    exponents = [split(abs(array).max())[1] for array in arrays.values()]
    exponent = functools.reduce(larger, exponents)
    exponent = larger(exponent, SMALLEST / 4)
    scaled = {name: shifted(array, -exponent) for name, array in arrays.items()}
    return units._replace(**scaled), exponent


def _of_scaled(units: HiddenUnits, exponent: Any, below: HiddenUnits) -> HiddenUnits:
    """The same function of `2 ** -exponent` times the outputs of the segment below."""
    if not exponent:
        return units

    def scaled(affine: Affine) -> Affine:
        weight = affine.weight
        if weight is None:  # the segment below has a matrix, of which the exponent is taken
            assert below.down is not None
            weight = np.eye(len(below.down))
        return Affine(shifted(weight, exponent), affine.bias)

    up = None if units.up is None else scaled(units.up)
    linear = None if units.linear is None else shifted(units.linear, exponent)
    return units._replace(gate=scaled(units.gate), up=up, linear=linear)


def _continued(first: Prepared, later: tuple[HiddenUnits, ...]) -> Chain:
    """A chain with the laws of its states, from the first segment up."""
    chain = Chain(first)
    for units in later:
        law = _law_after(_top(chain), chain.laws)
        chain = Chain(first, (*chain.later, units), (*chain.laws, law))
    return chain


def _law_after(state: Prepared, before: tuple[Law, ...]) -> Law:
    """The law of the outputs of a segment, given the laws of the states before."""
    cov, share = _covariance(state, state)
    mean = np.asarray(state.hidden.mean + state.beside.mean)
    error = _passed_on(state, state, before[-1].error if before else 0.0) + share
    return Law(mean, (cov + cov.T) / 2, error)


def _at(units: HiddenUnits, mean: np.ndarray, root: np.ndarray) -> Prepared:
    """A segment as a function of a state with some mean and rows of a root of a joint law."""
    return prepared(units, mean, root, len(mean), "float64", on_host=True)


def _covariance(one: Prepared, two: Prepared) -> tuple[np.ndarray, float]:
    """The covariance of the outputs of two segments, and its error relative to sizes."""
    (_, hidden), (_, other) = one.hidden, two.hidden
    slopes, other_slopes = one.beside.slopes, two.beside.slopes
    covariance: Any = (hidden + slopes) @ other_slopes.T + slopes @ other.T
    share = _EPS
    if one.units and two.units:
        start = 0
        for block in kernel_blocks(one, two, centred=True):
            stop = start + len(block.gross)
            read = block.values if two.down is None else block.values @ two.down.T
            if one.down is None:
                covariance[start:stop] += read
            else:
                covariance += one.down[:, start:stop] @ read
            share = max(share, float(block.share) + _EPS)
            start = stop
    return covariance, share


def _passed_on(one: Prepared, two: Prepared, error: float) -> float:
    """The error of a kernel whose correlations have an error."""
    functions = (x.activation for x in (one, two) if x.activation is not None)
    return error**0.5 if any(map(jumps, functions)) else error


def last_segments(
    a: PreparedModel, b: PreparedModel
) -> Iterator[tuple[int, Prepared, Prepared, float]]:
    """The last segments of two models under one law, at every distinct position.

    Args:
        a, b: Models under the same metric.

    Yields:
        The number of positions alike, both functions in the coordinates of one input, and the error
        of their kernel through errors of the law, relative to sizes.
    """
    for count, one, two in zip(a.counts, a.positions, b.positions, strict=True):
        yield count, *_last(one, two)


def _last(one: Chain, two: Chain) -> tuple[Prepared, Prepared, float]:
    """The last segments of two chains under their joint law, and the error of their kernel."""
    depth = max(len(one.later), len(two.later))
    if one is two and depth:
        top = _top(one)
        return top, top, _passed_on(top, top, one.laws[-1].error)
    one, two = _lengthened(one, depth), _lengthened(two, depth)
    left, right, error = one.first, two.first, 0.0
    for n in range(depth):
        law, other = one.laws[n], two.laws[n]
        both, share = _covariance(left, right)
        error = max(law.error, other.error, _passed_on(left, right, error) + share)
        joint = np.block([[law.cov, both], [both.T, other.cov]])
        root, width = root_of(joint, noise=0.0), len(law.mean)
        left = _at(one.later[n], law.mean, root[:width])
        right = _at(two.later[n], other.mean, root[width:])
    return left, right, _passed_on(left, right, error)


def _top(chain: Chain) -> Prepared:
    """The last segment of a chain under the law of its own state."""
    if not chain.laws:
        return chain.first
    law = chain.laws[-1]
    return _at(chain.later[-1], law.mean, root_of(law.cov, noise=0.0))


def _lengthened(chain: Chain, depth: int) -> Chain:
    """The chain with identities behind it, as many as it lacks of a number of later segments."""
    lacking = depth - len(chain.later)
    if not lacking:
        return chain
    law = _law_after(_top(chain), chain.laws)
    kept = HiddenUnits(None, Affine(), None, None, np.eye(len(law.mean)), None)
    return Chain(chain.first, chain.later + (kept,) * lacking, chain.laws + (law,) * lacking)


def product_of(
    a: PreparedModel,
    b: PreparedModel,
    slices: bool,
    dtype: str,
    known: Sequence[Blocks | None] = (),
) -> ScaledSum:
    """The inner product of two prepared models without their exponents, summed over positions.

    Args:
        a, b: Models under the same metric.
        slices: Whether outputs are told apart.
        dtype: Precision of the computation.
        known: Kernels at every distinct position as numbers, inside a trace; none where they are
            to be made.

    Returns:
        The product. Its size counts the certified bound of the rest of each series, so that the
        error of rounding, relative to the size, is a bound of both.
    """
    value: Any = 0.0
    size: Any = 0.0
    bound: Any = 0.0
    last = last_segments(a, b)
    for (count, one, two, error), blocks in itertools.zip_longest(last, known):
        products = inner(one, two, slices, blocks)
        value, size = value + count * products.value, size + count * products.size
        bound = bound + count * (products.bound + error * products.size)
    # The bound of truncation is expressed as size, on which the error of rounding is relative.
    size = size + bound / Arithmetic(1, dtype).rounding
    # Squares of units of 1e-160 have few digits or none, by the smallest step of floats.
    xp = library(size)
    size = xp.where(size > 0, size + float(np.finfo(dtype).tiny), size)
    return ScaledSum(value, np.zeros(()), (a.cancels * b.cancels) ** 0.5 * size)


def mean_part(model: PreparedModel) -> ScaledSum:
    """The mean of every output as a part of its norm, which is a sum over positions.

    Returns:
        Means over inputs and positions times the root of the number of positions, without the
        model's exponent.
    """
    mean: Any = 0.0
    for count, last, *_ in last_segments(model, model):
        mean = mean + count * (last.hidden.mean + last.beside.mean)
    values = np.asarray(mean, np.float64) / math.sqrt(sum(model.counts))
    return contribution(values, np.float64(0.0))


def host_sum(value: ScaledSum) -> ScaledSum:
    """The sum in NumPy's float64."""
    return ScaledSum(*(np.asarray(array, np.float64) for array in value))


# Numbers of a unit's tables, by whether units are gated and coefficients summed, and blocks of a
# kernel that are alive at once, by whether units are gated (`benchmarks/memory.py`).
_TABLES = {(False, False): 128, (False, True): 1216, (True, False): 704, (True, True): 2048}
_BLOCKS = {False: 4, True: 7}


class Segment(NamedTuple):
    """The size of a segment, enough to tell what its kernels take.

    Args:
        d_in: Coordinates of the state that the segment reads.
        units: Number of hidden units.
        d_out: Coordinates of the state after it.
        gated: Whether its units are gated.
        summed: Whether coefficients of its activation are sums over nodes.
    """

    d_in: int
    units: int
    d_out: int
    gated: bool = False
    summed: bool = False

    @property
    def numbers(self) -> int:
        """Numbers of a prepared segment: rows of its units, and matrices that its outputs read.

        The tables of a unit, coefficients by order, are counted as they are made.
        """
        each = 2 * (self.d_in + self.d_out) + _TABLES[self.gated, self.summed]
        return self.units * each + 2 * self.d_in * self.d_out


def segment_sizes(layers: Kinds) -> tuple[Segment, ...]:
    """The sizes of the segments of a model, from the input up.

    Example:
        >>> import numpy as np, tnsim
        >>> from tnsim.problems.tensors.kinds import kinds
        >>> model = tnsim.Model([tnsim.Linear(np.ones((3, 2))), tnsim.Elementwise("relu")])
        >>> segment_sizes(kinds(model))
        (Segment(d_in=2, units=3, d_out=3, gated=False, summed=False),)
    """
    found = groups(layers).nonlinear
    if not found:
        return (Segment(layers[0].d_in, 0, layers[-1].d_out),)
    sizes, d_in = [], layers[0].d_in
    for number, behind in found:
        layer, d_out = layers[number], layers[(number, *behind)[-1]].d_out
        if layer.activation is not None:
            units = layer.rank or layer.d_in
        else:
            units = layer.rank * 2 ** (layer.order - 1)  # powers, see `hidden_units`
        f, gated = layer.activation, layer.activation is not None and bool(layer.rank)
        summed = f is not None and any(isinstance(part, Remainder) for part in f.parts)
        sizes.append(Segment(d_in, units, d_out, gated, summed))
        d_in = d_out
    return tuple(sizes)


class Meeting(NamedTuple):
    """Two segments under one law: costs of their kernel and of the law.

    Args:
        work: Scalar multiplications, without pairs of units of high correlation.
        numbers: Numbers of all arrays alive at once, beside the models.
    """

    work: int
    numbers: int


def meetings(bra: Sequence[Segment], ket: Sequence[Segment], alone: bool) -> list[Meeting]:
    """The segments of two models that meet, from the input up.

    Args:
        bra: Segments of the first model.
        ket: Segments of the second model.
        alone: Whether both are one model.
    """
    met = []
    one, two = (Segment(x[-1].d_out, 0, x[-1].d_out) for x in (bra, ket))
    for n in range(max(len(bra), len(ket))):
        left = bra[n] if n < len(bra) else one
        right = ket[n] if n < len(ket) else two
        width = left.d_in if alone or not n else left.d_in + right.d_in
        d_out, pairs = max(left.d_out, right.d_out), left.units * right.units
        # An entry of the kernel is a correlation, a series and a product with a weight of each
        # output.
        work = pairs * (width + _ORDERS) + left.units * (right.units + 1) * d_out
        work += 2 * width * d_out
        rows = max((stop - start for start, stop in blocks_of(left.units, right.units)), default=0)
        numbers = _BLOCKS[left.gated or right.gated] * rows * right.units
        if n:
            work += 10 * width**3  # eigenvectors of the joint covariance, about
            numbers += 3 * width**2
        met.append(Meeting(work, numbers))
    return met
