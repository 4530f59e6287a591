"""Inner products of functions of hidden units under a Gaussian, exactly.

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
layer is wide enough to keep them busy. Models of several nonlinear layers are chains of such
functions (`problems.kernel_models`).

Source:
    Cho and Saul 2009, "Kernel methods for deep learning"; Tsuchida et al. 2018, "Invariance of
    weight distributions in rectified MLPs".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.activations.activation import Activation
from tnsim.activations.gated import GatedInputs, GatedPairing, gated_expanded, gated_moments
from tnsim.activations.kernels import (
    Expanded,
    Kernel,
    NormalInputs,
    Pairing,
    as_function,
    between,
    expanded,
    first_moments,
    with_slopes,
)
from tnsim.engine.runtime.devices import backend, processors
from tnsim.engine.runtime.threads import shared
from tnsim.models.arrays import Array, add, is_traced, pytree
from tnsim.problems.hidden_units import HiddenUnits
from tnsim.problems.tensors.affine import Affine, product
from tnsim.scaled import library
from tnsim.sessions import session

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


class Moments(NamedTuple):
    """The mean `E A` and the first Hermite coefficients `E A z^T` of a function of z ~ N(0, 1)."""

    mean: Float[Array, " out"]
    slopes: Float[Array, "out latent"]


class Sizes(NamedTuple):
    """Sizes of all hidden units in the outputs, relative to which kernels are rounded.

    Args:
        total: Sums over units of |D| times the size of the unit.
        length: Roots of the sums of squares, as errors of single pairs of units add up.
    """

    total: Float[Any, " out"]
    length: Float[Any, " out"]


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
        sizes: Sizes of the hidden units in the outputs; None where `expanded` has no coefficients.
    """

    activation: Activation | None = field(metadata={"static": True})
    gate: NormalInputs | None
    up: NormalInputs | None
    down: Float[Any, "out units"] | None
    hidden: Moments
    beside: Moments
    copies: int = field(default=1, metadata={"static": True})
    expanded: Expanded | None = None
    sizes: Sizes | None = None

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
    units: HiddenUnits, mean: Any, root: Any, d_in: int, dtype: str, on_host: bool = False
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
        expanded(units.activation, gate, on_device)
        if up is None
        else gated_expanded(units.activation, GatedInputs(gate, up), on_device)
    )
    sizes = None
    if known.side is not None:
        eye = np.eye(len(known.side.gross)) if down is None else down
        sizes = _sizes(eye, known.side.gross)
    return Prepared(units.activation, gate, up, down, hidden, beside, units.copies, known, sizes)


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
    # Of a symmetric kernel NumPy makes the upper triangle. Its blocks have several shapes, each of
    # which would be a program of JAX's, and columns are doubled in place.
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
    first = a.sizes or _sizes(rows, xp.concatenate(gross))
    second = b.sizes or _sizes(columns, other_gross)
    # |sum_ij D[o, i] e_ij D'[o, j]| with |e_ij| <= share gross_i gross_j.
    bound = share * first.total * second.total
    return _Pairs(value, bound, (first.length, second.length))


def _sizes(down: Any, gross: Any) -> Sizes:
    """The sizes of all hidden units in the outputs, given those of the units."""
    xp = library(down, gross)
    length = xp.sqrt(xp.einsum("oi,oi,i->o", down, down, gross**2))
    return Sizes(abs(down) @ gross, length)


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


def products_of_parts(
    a: Prepared, b: Prepared, apart: tuple[np.ndarray | None, np.ndarray | None]
) -> Float[np.ndarray, "parts others"]:
    """The inner product of two functions, read off between their parts before it is summed.

    Args:
        a, b: Functions whose parts are the rows and the columns.
        apart: A part of the constant of each that is told apart; None for none.

    Returns:
        Inner products of the constant with the input, which are one part, of every hidden unit, and
        of the constant that is told apart, where there is one.
    """
    # Entry (i, j) is the kernel times the weights with which outputs read both legs.
    kernel = np.asarray(whole_kernel(a, b))
    first, second = (_readout_apart(model, own) for model, own in zip((a, b), apart, strict=True))
    for model, own in zip((a, b), apart, strict=True):
        # What is told apart is a leg that repeats the constant. Each turn exchanges both axes.
        rows = kernel if own is None else np.concatenate([kernel, kernel[[model.units]]])
        kernel = rows.T
    products = np.asarray((first.T @ second) * kernel, np.float64)
    for model, own in zip((a, b), apart, strict=True):
        products = _gathered(products, model, own is not None).T
    return products


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


def blocks_at_numbers(a: Prepared, b: Prepared, slopes: bool) -> Blocks:
    """The kernel of all hidden units of two models that are numbers, for traces that are given it.

    Args:
        a, b: Models under the same input.
        slopes: Whether the kernel is differentiated.
    """
    if not (a.units and b.units):
        return ()
    if not slopes:
        return tuple(kernel_blocks(a, b))
    compiled = session().tier == "compile"
    units = _units_of_blocks(a, b)
    return tuple(with_slopes(*both, _at_once, compiled) for both in units)


def slope_bytes(a: Prepared, b: Prepared) -> int:
    """Bytes of the kernel of two models with its slopes, and of what a derivative makes of them."""
    if not (a.units and b.units):
        return 0
    pairing = Pairing if a.up is None and b.up is None else GatedPairing
    # The numbers, and the products of slopes with the changes that they stand beside.
    return 2 * 8 * (1 + pairing.slopes) * a.units * b.units


def _units_of_blocks(
    a: Prepared, b: Prepared, centred: bool = False, triangle: bool = False
) -> Iterator[tuple[Pairing, Expanded, Expanded]]:
    """What stands at the pairs of each block, and the units of its rows and columns."""
    first, second, pairing = a.expanded, b.expanded, Pairing
    assert first is not None and second is not None  # there are units
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
