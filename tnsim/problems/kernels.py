"""Inner products of functions of hidden units under a Gaussian, of one layer and of several.

With x = mean + L z and z standard normal, every hidden unit (`problems.hidden_units`) is a function
of one or two normal numbers, so the inner product of two functions is a sum over pairs of units,

    E <A, B> = sum_o sum_ij D[o, i] K[i, j] D'[o, j] + <h, l'> + <l, h'> + <l, l'>,
    K[i, j] = E h_i h'_j,

where h stands for D h(x) and l for S x + c. The kernel K is the metric as an operator between the
hidden legs of bra and ket: all pairings of Isserlis' theorem, of all orders, summed up. Its entries
are closed forms or series with a certified remainder (`tnsim.activations`). Against a linear
partner only the mean and the first Hermite coefficients of a function count, so with x0 = E A and
J = E A z^T the other terms are x0 . x0' + <J, J'>.

The rows of K are made in blocks, so no more than a block of K is in memory. Numbers on the host
take NumPy, with nothing to compile; traces and accelerators take JAX, accelerators only where the
layer is wide enough to keep them busy.

Source:
    Cho and Saul 2009, "Kernel methods for deep learning"; Tsuchida et al. 2018, "Invariance of
    weight distributions in rectified MLPs".

*Layer over layer.* A model of a single nonlinear layer is a function of hidden units of the input
(`problems.hidden_units`), and its inner products are exact. `GaussianClosure` takes any number of
such layers (`Chain`). A model is then a chain of *segments* with one nonlinear layer each, and the
states s of one model and t of another that enter segment n are taken for jointly normal, with the
means and covariances that they have as outputs of segment n - 1 at normal inputs,

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
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.activations.activation import Activation, Remainder
from tnsim.activations.kernels import (
    Expanded,
    GatedInputs,
    GatedPairing,
    Kernel,
    NormalInputs,
    Pairing,
    as_function,
    between,
    expanded,
    first_moments,
    gated_expanded,
    gated_moments,
    jumps,
    with_slopes,
)
from tnsim.engine.precision import Arithmetic, cancellation, of_pair
from tnsim.engine.runtime.devices import backend, processors, shared
from tnsim.metrics.input_moments import marginals, root_of
from tnsim.metrics.protocol import Metric
from tnsim.models.arrays import Array, add, is_traced, pytree
from tnsim.models.model import Model
from tnsim.problems.conditioning import amplification
from tnsim.problems.diagrams import groups
from tnsim.problems.hidden_units import HiddenUnits, segments
from tnsim.problems.layer_kinds import Kinds
from tnsim.problems.layer_tensors import Affine, product
from tnsim.scaled import SMALLEST, ScaledSum, contribution, larger, library, shifted, split
from tnsim.sessions import per_object_cache

_BLOCK = 2**21
"""Most entries of a block of the kernel, 16 MiB, beside a few arrays of its size in flight."""
_NARROW = 256
"""Most hidden units that stay on the host beside an accelerator: an inner product of 256 by 256
units takes both 40 ms, and an accelerator seconds more to compile the program of a kernel."""

KERNEL_DTYPE = "float64"
"""Precision of kernels outside of a trace, also where float32 is asked for: their thresholds near
correlation 1 are below the range of float32."""

Blocks: TypeAlias = tuple[Kernel, ...]
"""The kernel of all hidden units of two models, in blocks of rows."""


_EPS = float(np.finfo(np.float64).eps)
_ORDERS = 24
"""Orders of Hermite coefficients that a typical pair of units takes, for estimates of work."""

# Numbers of a unit's tables, by whether units are gated and coefficients summed, and blocks of a
# kernel that are alive at once, by whether units are gated (`benchmarks/memory.py`).
_TABLES = {(False, False): 128, (False, True): 1216, (True, False): 704, (True, True): 2048}
_BLOCKS = {False: 4, True: 7}
_ALONE = 10  # arrays of rows of the units that a block has in common, in two threads


class Moments(NamedTuple):
    """The mean `E A` and the first Hermite coefficients `E A z^T` of a function of z ~ N(0, 1)."""

    mean: Float[Array, " out"]
    slopes: Float[Array, "out latent"]


@pytree
@dataclass(frozen=True, eq=False)
class Prepared:
    """A model at a position, over the standard normal coordinates z of the input.

    Args:
        activation: Function of the gates; None where there are no hidden units.
        gate: Gates as normal numbers.
        up: Factors of the gates as normal numbers; None for 1.
        down: Matrix D of the outputs; None for the identity.
        hidden: Mean and slopes of D h.
        beside: Mean and slopes of S x + c.
        copies: Number of powers that together are a single hidden unit of the layer.
        expanded: Coefficients of the hidden units; None where there are none.
    """

    activation: Activation | None = field(metadata={"static": True})
    gate: NormalInputs | None
    up: NormalInputs | None
    down: Float[Any, "out units"] | None
    hidden: Moments
    beside: Moments
    copies: int = field(default=1, metadata={"static": True})
    expanded: Expanded | None = None

    @property
    def units(self) -> int:
        """Number of hidden units."""
        return 0 if self.gate is None else len(self.gate.mean)


class Inner(NamedTuple):
    """An inner product, or one for each output.

    Args:
        value: Sum over pairs of hidden units, and the other terms.
        size: Size of the terms, relative to which the sum is rounded.
        bound: Certified bound of the remainders of all series.
    """

    value: Float[Any, "*out"]
    size: Float[Any, "*out"]
    bound: Float[Any, "*out"]


def prepared(
    units: HiddenUnits,
    mean: Any,
    root: Any,
    d_in: int,
    dtype: str,
    on_host: bool = False,
    moving: bool = False,
) -> Prepared:
    """A model under x = mean + L z, in arrays of NumPy, or of JAX inside a trace.

    On an accelerator the kernels of wide layers are made there, and nothing else: every function of
    an array there is a program of its own, which takes a tenth of a second to compile.

    Args:
        units: Hidden units of the model.
        mean: Mean of the input, (d_in,); None for zero.
        root: Matrix L, its diagonal, or None for the identity, see `root_of`.
        d_in: Number of coordinates of the input.
        dtype: Type of the arrays.
        on_host: Whether kernels are made in NumPy, also where there is an accelerator.
        moving: Whether kernels will have slopes by the parameters of the hidden units.
    """
    traced = is_traced((units[1:], mean, root))
    xp = jnp if traced else np
    latent = root.shape[1] if root is not None and root.ndim == 2 else d_in

    def normal(affine: Affine) -> NormalInputs:
        # E (W x + b) = W mean + b; the rows W L give the dependence on z.
        known = affine.weight is not None
        weight = affine.weight if known else np.eye(d_in)
        means = affine.bias
        if mean is not None:
            means = add(weight @ mean if known else mean, affine.bias)
        rows: Any = weight
        if root is not None and root.ndim == 1:
            rows = weight * root
        elif root is not None:
            rows = weight @ root if known else root
        means = np.zeros(len(rows)) if means is None else means
        return NormalInputs(xp.asarray(means, dtype), xp.asarray(rows, dtype))

    if units.linear is not None:
        beside = Moments(*normal(Affine(units.linear, units.constant)))
    else:
        rows: Any = units.gate.weight if units.down is None else units.down
        out = d_in if rows is None else len(rows)
        constant = np.zeros(out) if units.constant is None else units.constant
        beside = Moments(xp.asarray(constant, dtype), xp.zeros((out, latent), dtype))
    if units.activation is None:
        return Prepared(None, None, None, None, Moments(*map(xp.zeros_like, beside)), beside)
    gate = normal(units.gate)
    up = None if units.up is None else normal(units.up)
    down = None if units.down is None else xp.asarray(units.down, dtype)
    hidden = Moments(*(product(down, moment) for moment in moments(units.activation, gate, up)))
    on_device = not (traced or on_host or len(gate.mean) <= _NARROW or backend() == "cpu")
    known = (
        expanded(units.activation, gate, on_device, moving)
        if up is None
        else gated_expanded(units.activation, GatedInputs(gate, up), on_device, moving)
    )
    return Prepared(units.activation, gate, up, down, hidden, beside, units.copies, known)


def moments(function: Activation, gate: NormalInputs, up: NormalInputs | None) -> Moments:
    """The means `E h` of hidden units and their first Hermite coefficients `E h z^T`.

    Args:
        function: Function f of the gates.
        gate: Gates u.
        up: Factors of the gates; None for 1.
    """
    if up is None:
        mean, slope = first_moments(function, gate)
        return Moments(mean, slope[:, None] * gate.rows)
    return Moments(*gated_moments(function, GatedInputs(gate, up)))


def inner(a: Prepared, b: Prepared, slices: bool, known: Blocks | None = None) -> Inner:
    """The inner product of two models at a position, in total or for each output.

    Args:
        a, b: Models under the same input.
        slices: Whether outputs are told apart.
        known: Kernel of the hidden units as numbers, inside a trace; None where it is to be made.
    """
    value: Any = 0.0
    # Against a linear function only mean and slopes count; units against units are added below.
    for one, two in ((a.hidden, b.beside), (a.beside, b.hidden), (a.beside, b.beside)):
        value = value + _linear_product(one, two)
    xp = library(a.beside, b.beside)
    # Lengths sqrt(E l^2) of the linear parts and of the units, by output: what terms are as large
    # as, for the error of rounding.
    lengths = [xp.sqrt(_linear_product(units.beside, units.beside)) for units in (a, b)]
    bound = xp.zeros_like(value)
    if a.units and b.units:
        pairs = _over_pairs(a, b, known)
        value, bound = value + pairs.value, pairs.bound
        lengths = [x + y for x, y in zip(lengths, pairs.lengths, strict=True)]
    if slices:
        return Inner(value, lengths[0] * lengths[1], bound)
    # By Cauchy-Schwarz the products of both lengths, summed over outputs, are at most the product
    # of the two norms.
    first, second = (library(x).sqrt((x**2).sum()) for x in lengths)
    return Inner(value.sum(), first * second, bound.sum())


def _linear_product(one: Moments, two: Moments) -> Any:
    """`E <A, l>` by output, for a function A and a linear function l."""
    return one.mean * two.mean + (one.slopes * two.slopes).sum(axis=1)


class _Pairs(NamedTuple):
    """Sums over pairs of hidden units, by output.

    Args:
        value: Sums `D K D'`.
        bound: Certified bounds of their errors of truncation.
        lengths: Roots of `sum_i D[o, i]^2 E h_i^2` of both models, where sizes of units are those
            relative to which kernels are rounded. Errors of pairs of units that are independent of
            one another add up to rounding times the product of the two.
    """

    value: Any
    bound: Any
    lengths: tuple[Any, Any]


def _over_pairs(a: Prepared, b: Prepared, known: Blocks | None) -> _Pairs:
    rows, columns = down_of(a), down_of(b)
    value: Any = 0.0
    share: Any = 0.0
    gross, other_gross = [], None
    xp = library(a.beside, b.beside)
    # Of a symmetric kernel NumPy makes the upper triangle, three fifths of 3,072 units. Its blocks
    # have several shapes, each a program of JAX's, and columns are doubled in place.
    alone = a is b and xp is np and a.expanded is not None and a.expanded.side is not None
    if known is None:
        blocks = kernel_blocks(a, b, triangle=alone)
    else:
        units = _units_of_blocks(a, b)
        blocks = (as_function(one, *both) for one, both in zip(known, units, strict=True))
    for block in blocks:
        if is_traced(tuple(block)):  # also of numbers, where an accelerator makes the kernel
            xp = jnp
        # Blocks come in the order of their rows; the rows so far are counted by the lengths of
        # their sizes.
        start = sum(map(len, gross))
        stop = start + len(block.gross)
        read = columns
        if alone:  # entries above the diagonal blocks stand for those below too
            read = columns[:, start:].copy()
            read[:, stop - start :] *= 2
        # sum_i D[o, i] (K D'^T)[i, o] for the rows of the block, an entry for each output.
        products = xp.asarray(block.values @ read.T)
        value = value + xp.einsum("oi,io->o", rows[:, start:stop], products)
        share = xp.maximum(share, xp.asarray(block.share))
        gross.append(xp.asarray(block.gross))
        other_gross = xp.asarray(block.other_gross)
    total, length = _sizes(rows, xp.concatenate(gross))
    other_total, other_length = total, length
    if not alone:  # the last block of a triangle lacks columns
        other_total, other_length = _sizes(columns, other_gross)
    # |sum_ij D[o, i] e_ij D'[o, j]| with |e_ij| <= share gross_i gross_j.
    return _Pairs(value, share * total * other_total, (length, other_length))


def _sizes(down: Any, gross: Any) -> tuple[Float[Any, " out"], Float[Any, " out"]]:
    """Sizes of all hidden units in the outputs, relative to which kernels are rounded.

    Args:
        down: Matrix D of the outputs.
        gross: Sizes of the units.

    Returns:
        Sums over units of |D| times the size of the unit, and the roots of the sums of squares, as
        errors of single pairs of units add up.
    """
    xp = library(down, gross)
    return abs(down) @ gross, xp.sqrt(xp.einsum("oi,oi,i->o", down, down, gross**2))


def down_of(model: Prepared) -> Any:
    """The matrix that reads the outputs off the hidden units."""
    if model.down is not None:
        return model.down
    return np.eye(model.units, dtype=model.beside.mean.dtype)


def whole_kernel(a: Prepared, b: Prepared) -> Float[Any, "legs others"]:
    """The kernel with the constant and the input beside the hidden units.

    Rows and columns are `(h, 1, z)`, so that the inner product of two models is the sum of
    `readout(a) * (readout(b) @ kernel.T)` and nothing else.
    """
    # First moments of hidden units with (1, z), which frame the kernel of the units.
    legs = []
    for model in (a, b):
        latent, dtype = model.beside.slopes.shape[1], model.beside.mean.dtype
        known = Moments(np.zeros(0, dtype), np.zeros((0, latent), dtype))
        if model.activation is not None and model.gate is not None:
            known = moments(model.activation, model.gate, model.up)
        legs.append(library(known).column_stack([known.mean, known.slopes]))
    first, second = legs
    xp = library(first, second)
    pairs = np.zeros((len(first), len(second)), first.dtype)
    if pairs.size:
        pairs = xp.concatenate([block.values for block in kernel_blocks(a, b)])
    # (1, z) are uncorrelated and of variance 1.
    beside = np.eye(first.shape[1], dtype=first.dtype)
    return xp.block([[pairs, first], [second.T, beside]])


def readout(model: Prepared) -> Float[Any, "out legs"]:
    """The matrix that reads the outputs off `(h, 1, z)`, see `whole_kernel`."""
    beside = [model.beside.mean[:, None], model.beside.slopes]
    xp = library(model.beside)
    return xp.concatenate([down_of(model), *beside] if model.units else beside, axis=1)


def _readout_apart(model: Prepared, apart: np.ndarray | None) -> np.ndarray:
    """The readout with a part of the constant as a leg of its own, behind all others."""
    matrix = np.array(readout(model))
    if apart is None:
        return matrix
    matrix[:, model.units] -= apart  # the column of the constant 1
    return np.column_stack([matrix, apart])


def _gathered(products: np.ndarray, model: Prepared, apart: bool) -> np.ndarray:
    """Rows of the legs `(h, 1, z)` as rows of the parts of a function."""
    units = products[: model.units]
    # The first axis after reshaping are the powers that together are a unit of the layer.
    units = units.reshape(model.copies, -1, products.shape[1]).sum(axis=0)
    end = len(products) - apart
    stream = products[model.units : end].sum(axis=0, keepdims=True)
    return np.concatenate([stream, units, products[end:]])


def blocks_of(units: int, others: int) -> list[tuple[int, int]]:
    """First unit and end of the blocks in which rows of the kernel are made, of even sizes.

    Example:
        >>> blocks_of(3, 5)
        [(0, 3)]
    """
    count = max(1, math.ceil(units * others / _BLOCK))
    return list(itertools.pairwise(n * units // count for n in range(count + 1)))


def kernel_blocks(
    a: Prepared, b: Prepared, centred: bool = False, triangle: bool = False
) -> Iterator[Kernel]:
    """The kernel of all hidden units of two models in blocks of rows, with certified bounds.

    Args:
        a, b: Models under the same input.
        centred: Whether products of means are left out, which makes covariances; on the host.
        triangle: Whether columns before a block's rows are left out, as a kernel of one model with
            itself is symmetric.
    """
    for units in _units_of_blocks(a, b, centred, triangle):
        yield between(*units, _at_once)


def blocks_at_numbers(a: Prepared, b: Prepared, moving: tuple[bool, bool]) -> Blocks:
    """The kernel of all hidden units of two models that are numbers, with its slopes.

    Args:
        a, b: Models under the same input.
        moving: Whether each of them is differentiated.
    """
    return tuple(with_slopes(*both, _at_once, moving) for both in _units_of_blocks(a, b))


def slope_bytes(a: Prepared, b: Prepared) -> int:
    """Bytes of the kernel of two models with its slopes, and of what a derivative makes of them."""
    pairing = Pairing if a.up is None and b.up is None else GatedPairing
    # The numbers, and the products of slopes with the changes that they stand beside.
    return 2 * 8 * (1 + pairing.slopes) * a.units * b.units


def _units_of_blocks(
    a: Prepared, b: Prepared, centred: bool = False, triangle: bool = False
) -> Iterator[tuple[Pairing, Expanded, Expanded]]:
    """What stands at the pairs of each block, and the units of its rows and columns."""
    first, second, pairing = a.expanded, b.expanded, Pairing
    if first is None or second is None:  # a linear function has no units
        return
    # A plain unit is a gated unit with the factor 1, so one formula serves all pairs as soon as one
    # side is gated.
    if a.up is not None or b.up is not None:
        first, second, pairing = _as_gated(a), _as_gated(b), GatedPairing
    for start, stop in blocks_of(a.units, b.units):
        others = second.part(start, b.units) if triangle else second
        yield pairing(first.f, second.f, centred), first.part(start, stop), others


def _at_once(tasks: Sequence[Any]) -> list[Any]:
    """The results of tasks, in threads."""
    return shared(tasks, processors())


def _as_gated(model: Prepared) -> Expanded:
    """The hidden units as gated ones, of factors 1 where there are none."""
    if model.up is not None and model.expanded is not None:
        return model.expanded
    assert model.activation is not None and model.gate is not None
    mean, rows = model.gate
    factors = NormalInputs(library(mean).ones_like(mean), library(rows).zeros_like(rows))
    on_device = model.expanded is not None and model.expanded.side is None
    return gated_expanded(model.activation, GatedInputs(model.gate, factors), on_device)


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


ToldApart: TypeAlias = tuple[PreparedModel, np.ndarray | None]
"""A function as prepared, and a part of its constant that is told apart; None for none."""


def products_of_parts(a: ToldApart, b: ToldApart) -> Float[np.ndarray, "parts others"]:
    """The inner product of two functions, read off between their parts before it is summed.

    Args:
        a, b: Functions of a single segment, whose parts are the rows and the columns.

    Returns:
        Inner products, over all positions, of the constant with the input, which are one part, of
        every hidden unit, and of the constant that is told apart, where there is one.
    """
    (bra, _), (ket, _) = a, b
    total: Any = 0.0
    for count, one, two in zip(bra.counts, bra.positions, ket.positions, strict=True):
        both = [(x.first, apart) for x, (_, apart) in zip((one, two), (a, b), strict=True)]
        # Entry (i, j) is the kernel times the weights with which outputs read both legs.
        kernel = np.asarray(whole_kernel(one.first, two.first))
        first, second = (_readout_apart(*each) for each in both)
        for model, own in both:
            # What is told apart is a leg that repeats the constant. Each turn exchanges both axes.
            rows = kernel if own is None else np.concatenate([kernel, kernel[[model.units]]])
            kernel = rows.T
        products = np.asarray((first.T @ second) * kernel, np.float64)
        for model, own in both:
            products = _gathered(products, model, own is not None).T
        total = total + count * products
    return total


def under(
    model: Model,
    metric: Metric,
    dtype: str,
    roots: Sequence[Any] | None = None,
    moving: bool = False,
) -> PreparedModel:
    """A model under a Gaussian metric, at every distinct position.

    Args:
        model: Model that `hidden_units.has_kernels` accepts under the metric.
        metric: A Gaussian metric.
        dtype: Type of the arrays; of several segments float64.
        roots: Roots of the covariances of a single segment's input, see `roots_of`; None where
            they are to be made of the metric.
        moving: Whether kernels of a single segment will have slopes by its weights.

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
        return units_under(first, metric, reading, dtype, roots=roots, moving=moving)
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
    moving: bool = False,
) -> PreparedModel:
    """A function of hidden units under a Gaussian metric, at every distinct position.

    Args:
        units: Function of hidden units.
        metric: A Gaussian metric.
        reading: Coordinates and positions of the input, None for vectors.
        dtype: Type of the arrays.
        on_host: Whether kernels are made in NumPy, also where there is an accelerator.
        roots, moving: Arguments of `under`.
    """
    d_in, n_ctx = reading
    units, exponent = _in_range(units)
    chains, counts = [], []
    roots = roots_of(metric, reading) if roots is None else roots
    # Positions with the same marginal are computed once and counted.
    for (count, mean, _), root in zip(marginals(metric, d_in, n_ctx), roots, strict=True):
        chains.append(Chain(prepared(units, mean, root, d_in, dtype, on_host, moving)))
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
    share, start = _EPS, 0
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
        root, width = root_of(joint, rounding=0.0), len(law.mean)
        left = _at(one.later[n], law.mean, root[:width])
        right = _at(two.later[n], other.mean, root[width:])
    return left, right, _passed_on(left, right, error)


def _top(chain: Chain) -> Prepared:
    """The last segment of a chain under the law of its own state."""
    if not chain.laws:
        return chain.first
    law = chain.laws[-1]
    return _at(chain.later[-1], law.mean, root_of(law.cov, rounding=0.0))


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
    return ScaledSum(value, np.zeros(()), of_pair(a.cancels, b.cancels) * size)


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
        >>> from tnsim.problems.layer_kinds import kinds
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
        series: Those among them that are made entry by entry.
        numbers: Numbers of all arrays alive at once, beside the models.
    """

    work: int
    series: int
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
        # A unit and its copy have no series, and their rows stand beside each other.
        numbers += _ALONE * rows * width
        if n:
            work += 10 * width**3  # eigenvectors of the joint covariance, about
            numbers += 3 * width**2
        met.append(Meeting(work, pairs * _ORDERS, numbers))
    return met
