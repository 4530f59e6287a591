"""Inner products over a finite measure, from forward passes at its points.

With `F_a = sqrt(w_i) a(x_i)` over all points, positions and outputs, `<a|b> = F_a . F_b`: these are
features (see `features`) of any function, exact for the measure. They are made in batches of points
and the products added up, so that no whole vector is ever stored. Where points are draws, sums are
stored for up to 32 groups of consecutive points, from which errors are estimated.

`sums` compares many functions, batch by batch. `inner_product` is the same inside a JAX trace, in
terms of JAX alone: points are constants, and batches of them are unrolled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.engine import scaled
from tnsim.engine.budget import Budget
from tnsim.engine.costs import PROGRAM_BYTES
from tnsim.engine.ir.dtypes import ITEM_BYTES
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.devices import can_compile
from tnsim.engine.scaled import LogScaled, add, contribution, stacked, taken, times
from tnsim.errors import ModelError, TooLarge
from tnsim.metrics.points import Points, WeightedPoints
from tnsim.models.arrays import library
from tnsim.models.forward import (
    Prefixes,
    ScaledLayers,
    State,
    after,
    ahead,
    check_inputs,
    entered,
    forward,
    in_own_units,
    is_tokens,
    scaled_layers,
)
from tnsim.models.functions import Function, outputs_of
from tnsim.models.model import Model
from tnsim.models.scaling import SMALLEST, Unit, larger, split
from tnsim.problems.tensors.kinds import Kinds, LayerKind, kinds

Part: TypeAlias = Model | Function


Terms: TypeAlias = Sequence[tuple[Any, Part]]
"""Coefficients and parts: a sum of functions that is compared."""


Run: TypeAlias = Callable[[WeightedPoints], "Vector"]


GROUPS = 32  # groups of draws: their standard error is known to an eighth of itself


BATCH_BYTES = 2**27  # inputs, states and outputs in flight; larger batches are no faster


_FUNCTION_BATCH = 1024  # points of a batch for a function of unknown memory


_KEPT_BATCHES = 32  # batches with products that wait to be added up


_EAGER = 2**27  # multiplications below which compiling takes longer than computing


class Vector(NamedTuple):
    """The vector `values * exp(log)`, with one scale for all outputs or one for each.

    `lengths` are the lengths of the values by output, `sizes` the sums of the lengths of all
    terms.
    """

    values: Float[Any, "out features"]
    log: Float[Any, " 1"] | Float[Any, " out"]
    lengths: Float[Any, " out"]
    sizes: Float[Any, " out"]


class Gram(NamedTuple):
    """Inner products of rows with columns, and the squared norms of both."""

    products: LogScaled
    rows: LogScaled
    columns: LogScaled


class Sums(NamedTuple):
    """The fields of a `Gram` for groups of points, with a first axis of groups.

    `shares` are the total weights of the groups.
    """

    products: LogScaled
    rows: LogScaled
    columns: LogScaled
    shares: Float[np.ndarray, " groups"]

    def over_outputs(self) -> Sums:
        """These sums, added up over outputs that are told apart."""
        summed = [scaled.total(value, slices=True) for value in self[:3]]
        return Sums(summed[0], summed[1], summed[2], self.shares)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for value in self[:3] for array in value)


class Needs(NamedTuple):
    """Bytes of arrays that forward passes take.

    Args:
        beside: Bytes for any batch: scaled weights, masks of attention, draws of one seed.
        each: Bytes for every point of a batch.
    """

    beside: float
    each: float

    @property
    def least(self) -> float:
        """Number of bytes of a batch of one point."""
        return self.beside + self.each

    def most(self, count: int) -> float:
        """Number of bytes of the largest batch of `count` points that is run at once."""
        return max(self.least, self.beside + min(BATCH_BYTES, count * self.each))


def multiplications(layers: Kinds, positions: int, points: Points) -> int:
    """Number of scalar multiplications of a model's forward passes at all points.

    Args:
        layers: Kinds of the model's layers.
        positions: Number of positions of an input, 1 for vectors.
        points: Points of the measure.

    Example:
        >>> import tnsim
        >>> points = tnsim.Empirical(np.eye(3)).points(None)
        >>> multiplications(kinds(tnsim.Model([tnsim.Linear(np.eye(3))])), 1, points)
        27
    """
    if points.tokens and layers[0].down is None and len(layers) > 1:
        layers = layers[1:]  # an embedding of tokens looks up rows and multiplies nothing
    work = 0
    for states, seen in points.states(positions):
        work += states * sum(layer.multiplications_at_position(seen) for layer in layers)
    return work


def outputs(d_out: int, positions: int, points: Points) -> int:
    """Number of output values of a model with `d_out` outputs at all points."""
    return d_out * sum(states for states, _ in points.states(positions))


def sums(
    rows: Sequence[Terms],
    columns: Sequence[Terms] | None,
    points: Points,
    slices: bool,
    dtype: str,
    budget: Budget = Budget(),
) -> Sums:
    """Inner products of all rows with all columns, with themselves where there are none.

    Args:
        rows, columns: Functions to compare, each a sum of parts; every part runs once.
        points: Points of the measure.
        slices: Whether outputs are told apart, on the last axis.
        dtype: Precision of the forward passes of models; functions have their own.
        budget: Budget that bounds the memory of a batch.

    Returns:
        `Sums` of one group, or of several where the points are draws.

    Raises:
        ModelError: Inputs or outputs of models and functions do not fit each other.
        TooLarge: One point is over the budget.
        TnsimError: A function gives a value that is not finite.
    """
    every = [*rows, *(columns or ())]
    parts = {id(part): part for terms in every for _, part in terms}
    work = _work(parts.values(), points)
    largest = max(stop - start for start, stop in groups(points))
    size = batch_size(list(parts.values()), points, largest, dtype, budget)
    grams, shares = [], []
    with execution.precision():
        eager = work < _EAGER or not can_compile()
        eager = eager or budget.room(0, PROGRAM_BYTES) < PROGRAM_BYTES
        models = {key: part for key, part in parts.items() if isinstance(part, Model)}
        passes = _Passes(models, slices, dtype, eager)
        functions = {
            key: _of_plain(part, slices, dtype) for key, part in parts.items() if key not in models
        }
        for start, stop in groups(points):
            share, batches = 0.0, []
            for batch in in_batches(points, start, stop, size):
                share += float(np.exp(batch.log_weights).sum())
                vectors = passes.at(batch)
                vectors |= {key: run(batch) for key, run in functions.items()}
                _check_shapes(vectors, batch)
                first = [_sum(terms, vectors, dtype) for terms in rows]
                second = first
                if columns is not None:
                    second = [_sum(terms, vectors, dtype) for terms in columns]
                batches.append(_gram(first, second, slices))
                if len(batches) == _KEPT_BATCHES:
                    batches = [Gram(*(add(same) for same in _by_field(batches)))]
            grams.append(Gram(*(add(same) for same in _by_field(batches))))
            shares.append(share)
    together = Gram(*(stacked(same) for same in _by_field(grams)))
    return Sums(*together, np.array(shares))


def _by_field(grams: Sequence[Gram]) -> list[list[LogScaled]]:
    """All products, then all squared norms of rows, then all squared norms of columns."""
    return [list(same) for same in zip(*grams, strict=True)]


def total(value: LogScaled) -> LogScaled:
    """The sum of a value over groups."""
    groups = range(len(value.mantissa))
    return add([taken(value, n) for n in groups])


class _Passes:
    """Forward passes of models; layers below the first difference of several models run once.

    Models have a layer in common where they hold the same object, as models with switches do.
    """

    def __init__(self, models: dict[int, Model], slices: bool, dtype: str, eager: bool):
        self.models, self.slices, self.dtype = models, slices, dtype
        self.made: dict[tuple[int, bool], ScaledLayers] = {}
        self.first: dict[tuple[bytes, int, bool], ScaledLayers] = {}
        self.step, self.rest, self.whole = after, _vector_of_rest, vector_of_model
        if not eager:
            self.step, self.rest, self.whole = _compiled_step, _compiled_rest, _compiled

    def at(self, batch: WeightedPoints) -> dict[int, Vector]:
        """The vectors of all models on a batch."""
        for model in self.models.values():
            check_inputs(model, batch.inputs)
        half_logs = batch.log_weights / 2
        counts = batch.inputs.counts if isinstance(batch.inputs, Prefixes) else None
        found: dict[int, Vector] = {}
        for keys in self._alike(list(self.models), 0, 1):
            inputs, unit = batch.inputs, np.zeros(())
            if not is_tokens(inputs):
                inputs, unit = in_own_units(self.models[keys[0]], inputs)
                inputs = inputs.astype(self.dtype)
            scaled = {key: self._scaled(self.models[key], unit) for key in keys}
            if len(keys) == 1:
                found[keys[0]] = _on_host(self.whole(scaled[keys[0]], inputs, half_logs))
            else:
                state, done = entered(scaled[keys[0]], inputs)
                found |= self._behind(scaled, done, state, half_logs, counts)
        return found

    def _behind(
        self,
        scaled: dict[int, ScaledLayers],
        done: int,
        state: State,
        half_logs: Any,
        counts: tuple[int, ...] | None,
    ) -> dict[int, Vector]:
        """The vectors of models that have the state behind `done` layers in common."""
        found: dict[int, Vector] = {}
        for same in self._alike(list(scaled), done, done + 1):
            layers, units = scaled[same[0]]
            if len(same) == 1:
                rest = ScaledLayers(layers[done:], units[done:])
                found[same[0]] = _on_host(self.rest(rest, state, half_logs, counts))
                continue
            demands = ahead(layers[done + 1 :])
            reached = self.step(layers[done], units[done], state, demands, counts)
            alike = {key: scaled[key] for key in same}
            found |= self._behind(alike, done + 1, reached, half_logs, counts)
        return found

    def _alike(self, keys: list[int], start: int, stop: int) -> list[list[int]]:
        """Models in groups that have the layers from `start` to `stop - 1` in common.

        A state is normalised as the layers ahead demand, so a group has equal demands. The outputs
        of two models are vectors of their own even where all layers are the same.
        """
        groups: dict[Any, list[int]] = {}
        for key in keys:
            layers = self.models[key].layers
            own = key if len(layers) <= stop else None
            same = (*map(id, layers[start:stop]), ahead(layers[stop:]), own)
            groups.setdefault(same, []).append(key)
        return list(groups.values())

    def _scaled(self, model: Model, unit: Unit) -> ScaledLayers:
        """A model in scientific notation, in the dtype of the passes, for some units of inputs.

        A layer that models have in common is scaled once; of first layers those for the last units
        are kept.
        """
        known = unit.tobytes()
        if any(kept[0] != known for kept in self.first):
            self.first.clear()
        layers = []
        for n, layer in enumerate(model.layers):
            apart = self.slices and n + 1 == len(model.layers)
            if n == 0:
                place = known, id(layer), apart
                if place not in self.first:
                    self.first[place] = self._cast(layer, apart, unit)
                layers.append(self.first[place])
                continue
            if (id(layer), apart) not in self.made:
                self.made[id(layer), apart] = self._cast(layer, apart, None)
            layers.append(self.made[id(layer), apart])
        return ScaledLayers(
            tuple(layer for one in layers for layer in one.layers),
            tuple(exponent for one in layers for exponent in one.exponents),
        )

    def _cast(self, layer: Any, apart: bool, unit: Unit | None) -> ScaledLayers:
        """One layer in scientific notation."""
        one = jax.tree.map(np.asarray, scaled_layers(Model([layer]), apart, unit))
        weights = jax.tree.map(lambda x: np.asarray(x, self.dtype), one.layers)
        return ScaledLayers(weights, one.exponents)


_compiled_step = jax.jit(after, static_argnums=(3, 4))


def _vector_of_rest(
    rest: ScaledLayers, state: State, half_logs: Any, counts: tuple[int, ...] | None
) -> Vector:
    """The vector of a model whose first layers have run."""
    return vector_of(*forward(rest, state, counts), half_logs)


_compiled_rest = jax.jit(_vector_of_rest, static_argnums=3)


def _of_plain(part: Function, slices: bool, dtype: str) -> Run:
    """The function that returns the vector of a plain function on a batch."""

    def plain(batch: WeightedPoints) -> Vector:
        outputs = outputs_of(part, batch.inputs).astype(dtype)
        exponents = np.zeros((len(outputs), outputs.shape[-1] if slices else 1))
        return _on_host(vector_of(outputs, exponents, batch.log_weights / 2))

    return plain


def vector_of_model(layers: ScaledLayers, inputs: Any, half_logs: Any) -> Vector:
    """The vector of a model at some points, see `vector_of`."""
    return vector_of(*forward(layers, inputs), half_logs)


_compiled = jax.jit(vector_of_model)


def vector_of(outputs: Any, exponents: Any, half_logs: Any) -> Vector:
    """The vector of `outputs * 2 ** exponents` at some points.

    half_logs: Logarithms of the roots of the points' weights.
    """
    xp = library(outputs)
    # Entry i of F is 2^e_i sqrt(w_i) a'_i, where no factor need be a float. The largest factor of
    # the batch, exp(log), is taken out; entries that underflow then are negligible.
    logs = exponents * math.log(2) + half_logs[:, None]
    log = logs.max(axis=0)
    log = larger(log, SMALLEST)  # finite where no point of this batch has a weight
    factors = xp.exp(logs - log).astype(outputs.dtype)
    factors = factors.reshape(len(outputs), *(1,) * (outputs.ndim - 2), -1)
    values = xp.moveaxis(outputs * factors, -1, 0).reshape(outputs.shape[-1], -1)
    lengths = xp.sqrt((values * values).sum(axis=1))
    return Vector(values, log, lengths, lengths)


def _on_host(vector: Vector) -> Vector:
    """The vector with its small arrays in NumPy's float64."""
    lengths = np.asarray(vector.lengths, np.float64)
    return Vector(vector.values, np.asarray(vector.log, np.float64), lengths, lengths)


def _check_shapes(vectors: dict[int, Vector], batch: WeightedPoints) -> None:
    """Raise `ModelError` unless the vectors of all parts have one shape."""
    shapes = sorted({tuple(vector.values.shape) for vector in vectors.values()})
    if len(shapes) > 1:
        numbers = [f"{shape[0]} outputs, {shape[1]} rows" for shape in shapes]
        raise ModelError(
            f"functions that are compared have one shape of outputs; on {len(batch.log_weights)} "
            f"inputs found {' and '.join(numbers)}"
        )


def _sum(terms: Terms, vectors: dict[int, Vector], dtype: str) -> Vector:
    """The vector of a sum of parts."""
    own = [vectors[id(part)] for _, part in terms]
    mantissas, exponents = split(np.array([float(coefficient) for coefficient, _ in terms]))
    # sum_m c_m exp(log_m) v_m; the largest of the factors c_m exp(log_m) is taken out as exp(log).
    logs = np.stack([vector.log for vector in own]) + exponents[:, None] * math.log(2)
    log = logs.max(axis=0)
    factors = mantissas[:, None] * np.exp(logs - log)
    values = sum(
        vector.values * factor.astype(dtype)[:, None]
        for factor, vector in zip(factors, own, strict=True)
    )
    lengths = np.stack([vector.lengths for vector in own])
    sizes = (abs(factors) * lengths).sum(axis=0)
    if len(own) == 1:
        return Vector(values, log, sizes, sizes)
    xp = library(values)
    squares = np.asarray(xp.sum(values * values, axis=1), np.float64)
    return Vector(values, log, np.sqrt(squares), sizes)


def _gram(rows: Sequence[Vector], columns: Sequence[Vector], slices: bool) -> Gram:
    """The inner products of row vectors with column vectors, which may be the same."""
    first, second = _stacked(rows), _stacked(columns)
    xp = library(first.values)
    if slices:
        gram = xp.einsum("kof,lof->klo", first.values, second.values, optimize=True)
        size = np.einsum("ko,lo->klo", first.lengths, second.sizes)
        size += np.einsum("ko,lo->klo", first.sizes, second.lengths)
    else:
        flat = [vector.values.reshape(len(vector.values), -1) for vector in (first, second)]
        gram = flat[0] @ flat[1].T
        size = first.lengths @ second.sizes.T + first.sizes @ second.lengths.T
    logs = first.log[:, None] + second.log[None, :]
    products = LogScaled(np.asarray(gram, np.float64), logs, size / 2)
    return Gram(products, _norms(first, slices), _norms(second, slices))


def _norms(stack: Vector, slices: bool) -> LogScaled:
    """The squared norms of vectors, with the sizes that `features.norms` derives."""
    eps = float(np.finfo(np.dtype(stack.values.dtype)).eps)
    squares = stack.lengths**2
    sizes = (stack.lengths + eps * stack.sizes) * stack.sizes
    if not slices:
        squares, sizes = squares.sum(axis=1), sizes.sum(axis=1)
    return LogScaled(squares, 2 * stack.log, sizes)


def _stacked(vectors: Sequence[Vector]) -> Vector:
    """Several vectors as one, with a first axis of models; a common scale has no output axis."""
    xp = library(vectors[0].values)
    values = xp.stack([vector.values for vector in vectors])
    log = np.stack([vector.log for vector in vectors])
    if log.shape[1] == 1:
        log = log[:, 0]
    lengths = np.stack([vector.lengths for vector in vectors])
    return Vector(values, log, lengths, np.stack([vector.sizes for vector in vectors]))


def groups(points: Points) -> list[tuple[int, int]]:
    """First point and end of every group; sizes of groups differ by one at most."""
    count = min(GROUPS, points.count) if points.drawn else 1
    bounds = [n * points.count // count for n in range(count + 1)]
    return list(itertools.pairwise(bounds))


def in_batches(points: Points, start: int, stop: int, size: int) -> Iterator[WeightedPoints]:
    """The points from start to stop in batches of one size, the last filled with weight 0."""
    for first in range(start, stop, size):
        last = min(first + size, stop)
        inputs, log_weights = points.block(first, last)
        missing = size - (last - first)
        if missing:
            inputs = np.concatenate([inputs, np.repeat(inputs[-1:], missing, axis=0)])
            log_weights = np.concatenate([log_weights, np.full(missing, -np.inf)])
        yield WeightedPoints(inputs, log_weights)


def _work(parts: Iterable[Part], points: Points) -> int:
    """Number of multiplications of the forward passes of all models at all points."""
    models = [part for part in parts if isinstance(part, Model)]
    return sum(multiplications(kinds(model), model.n_ctx or 1, points) for model in models)


def batch_size(
    parts: Sequence[Part], points: Points, apart: int, dtype: str, budget: Budget
) -> int:
    """Number of points in a batch: `apart` divided evenly, within the memory allowed.

    Raises:
        TooLarge: One point is over the budget.
    """
    needed = needs(parts, points, dtype)
    room = budget.room(0, needed.most(points.count))
    check_room(needed.least, room, "forward passes")
    most = max(1, int(min(BATCH_BYTES, room - needed.beside) / max(1.0, needed.each)))
    if not all(isinstance(part, Model) for part in parts):
        most = min(most, _FUNCTION_BATCH)
    if points.continuations:
        return points.aligned(most)
    return math.ceil(apart / math.ceil(apart / most))


def check_room(least: float, room: float, what: str) -> None:
    """Raise `TooLarge` where one point takes more bytes than there is room for.

    Args:
        least: Number of bytes that one point takes.
        room: Number of bytes allowed.
        what: Subject of the message.
    """
    if least > room:
        raise TooLarge(
            f"{what} take {least / 2**30:.3g} GiB for a single input here, and the budget is "
            f"{room / 2**30:.3g} GiB; use shorter sequences (n_ctx), smaller widths or a larger "
            "tnsim.Budget"
        )


def needs(parts: Iterable[Part], points: Points, dtype: str) -> Needs:
    """Bytes that the forward passes of functions take together, an upper bound for models.

    Args:
        parts: Models, or functions, for which only the inputs are counted.
        points: Points of the measure.
        dtype: Precision of the forward passes.

    Example:
        >>> import tnsim
        >>> points = tnsim.Empirical(np.eye(3)).points(None)
        >>> line = tnsim.Model([tnsim.Linear(np.eye(3))])
        >>> needs([line], points, "float64").each < needs([line] * 2, points, "float64").each
        True
    """
    item = ITEM_BYTES[dtype]
    kept, widest, weights, masks, read = 0.0, 0.0, 0, 0, 0
    parts = list(parts)
    layers_of = [id(layer) for part in parts if isinstance(part, Model) for layer in part.layers]
    in_common = len(set(layers_of)) < len(layers_of)
    waiting = 0.0
    for part in parts:
        if not isinstance(part, Model):
            read = max(read, points.block(0, 1).inputs.nbytes)
            continue
        layers, positions = kinds(part), part.n_ctx or 1
        states = outputs(1, positions, points) / points.count
        read = max(read, 8 * positions * (1 if points.tokens else part.d_in))
        # Values of every part three times: as computed, times their coefficient, and in one stack.
        # A fourth time for the copy that a product of stacks makes.
        kept += 4 * states * part.d_out
        seen = 0 if points.continuations else positions
        widest = max(widest, *(states * _state_numbers(layer, seen) for layer in layers))
        if in_common:  # a state of each depth waits until all models have read it
            waiting = max(waiting, states * sum(layer.d_out for layer in layers))
        weights += 2 * part.parameters  # scaled, and on the device
        if any(layer.mixes_positions for layer in layers) and seen:
            masks = max(masks, positions**2)
    # The mask is made in float64 and cast: two copies with a score, four before any score.
    beside = item * weights + 17 * masks + 4 * points.together * read
    return Needs(beside, 3 * read + item * (kept + widest + waiting))


def _state_numbers(layer: LayerKind, seen: int) -> int:
    """Most numbers alive at one position in a layer that sees `seen` positions.

    The layer reads a state and makes a product of its legs, one leg after another. Its output is
    divided by its largest entry: three arrays of the output's size, and a fourth where the output
    becomes a vector.
    """
    heads, d_head, d_value = layer.heads
    inside = (len(layer.legs) + 2) * layer.rank
    # Four rows and their rotations, two products at a time; two scores and their product.
    inside += heads * (10 * d_head + 3 * d_value + 3 * seen)
    return 2 * layer.d_in + inside + 4 * layer.d_out


def inner_product(
    rows: Terms, columns: Terms, points: Points, slices: bool, dtype: str
) -> LogScaled:
    """`<a|b>` of two sums of models, in the precision of their weights.

    Args:
        rows, columns: Sums of models, traced or not, or of functions.
        points: Points of the measure.
        slices: Whether outputs are told apart.
        dtype: Precision of the forward passes, for their memory.

    Returns:
        Inner product, () or (out,).

    Raises:
        ModelError: The models do not read these inputs.
        TooLarge: One point takes more than the free memory. Batches follow no smaller budget: each
            becomes part of the caller's program.
    """
    known = [part for _, part in (*rows, *columns)]
    size = batch_size(known, points, points.count, dtype, Budget())
    return over_batches(rows, columns, in_batches(points, 0, points.count, size), slices)


def over_batches(
    rows: Terms, columns: Terms, batches: Iterable[WeightedPoints], slices: bool
) -> LogScaled:
    """`<a|b>` of two sums of models at given points, which may be traced too.

    Args:
        rows, columns: Sums of models, traced or not, or of functions.
        batches: Batches that hold all points.
        slices: Whether outputs are told apart.

    Returns:
        Inner product, () or (out,).
    """
    parts = {id(part): part for _, part in (*rows, *columns)}
    runs = {key: _run_traced(part, slices) for key, part in parts.items()}
    products = []
    for batch in batches:
        vectors = {key: run(batch) for key, run in runs.items()}
        for (c, a), (d, b) in itertools.product(rows, columns):
            first, second = vectors[id(a)], vectors[id(b)]
            mantissa = (first.values * second.values).sum(axis=1)
            log = first.log + second.log
            if not slices:
                mantissa, log = mantissa.sum(), log[0]
            products.append(times(contribution(mantissa, log), c * d))
    return add(products)


def _run_traced(part: Part, slices: bool) -> Run:
    """The function that returns the vector of a part on a batch."""
    if not isinstance(part, Model):
        return partial(_of_function, part, slices)
    return partial(_of_model, part, slices)


def _of_function(function: Function, slices: bool, batch: WeightedPoints) -> Vector:
    """The vector of a plain function on a batch, inside a trace."""
    outputs = outputs_of(function, batch.inputs)
    exponents = jnp.zeros((len(outputs), outputs.shape[-1] if slices else 1))
    return vector_of(jnp.asarray(outputs), exponents, batch.log_weights / 2)


def _of_model(model: Model, slices: bool, batch: WeightedPoints) -> Vector:
    """The vector of a model on a batch, inside a trace, in the dtype of its weights."""
    inputs, unit = batch.inputs, None
    check_inputs(model, inputs)
    if not is_tokens(inputs):
        weights = (leaf for leaf in jax.tree.leaves(model) if jnp.ndim(leaf))
        inputs, unit = in_own_units(model, inputs)
        inputs = inputs.astype(jnp.result_type(*weights))
    inputs = jax.tree.map(jnp.asarray, inputs)
    layers = jax.tree.map(jnp.asarray, scaled_layers(model, slices, unit))
    return vector_of_model(layers, inputs, batch.log_weights / 2)
