"""Inner products over a finite measure, from forward passes at its points.

With `F_a = sqrt(w_i) a(x_i)` over all points, positions and outputs, `<a|b> = F_a . F_b`: these are
features (see `features`) of any function, exact for the measure. They are made in batches of points
and the products added up, so that no whole vector is ever stored.

`_Runner` runs functions on batches, in any of three modes: in NumPy, compiled, or inside a JAX
trace. `sums` compares many functions, batch by batch. `over_batches` is the same inside a trace:
points are constants, and batches of them are unrolled.

Batches are as large as a cache and the memory allow. Where points are draws, sums are kept for up
to 32 groups of consecutive points (`groups`), from which errors are estimated.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.engine.costs import PROGRAM_BYTES
from tnsim.engine.ir.problem import ITEM_BYTES
from tnsim.engine.planner import Budget
from tnsim.engine.precision import of_pair
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.devices import can_compile
from tnsim.errors import ModelError, TooLarge
from tnsim.long_work import announced
from tnsim.metrics.protocol import Points, WeightedPoints
from tnsim.models.arrays import weights_dtype
from tnsim.models.forward import (
    Prefixes,
    ScaledLayers,
    State,
    after,
    ahead,
    as_read,
    entered,
    forward,
    in_own_units,
    is_tokens,
    scaled_layer,
    scaled_layers,
)
from tnsim.models.functions import ALONE, Function, outputs_of
from tnsim.models.layers import Layer
from tnsim.models.model import Model
from tnsim.models.scaling import Unit, scaled_with_shifts
from tnsim.problems import features
from tnsim.problems.conditioning import cancellation_at
from tnsim.problems.features import FeatureBlock
from tnsim.problems.layer_kinds import LayerKind, kinds
from tnsim.problems.units import SampledStates
from tnsim.scaled import (
    LOG_2,
    SMALLEST,
    Scaled,
    ScaledSum,
    add,
    contribution,
    larger,
    library,
    magnified,
    not_differentiated,
    share_of_squares,
    shifted,
    split,
    stacked,
    taken,
    times,
)
from tnsim.scaled import total as over_last_axis

Part: TypeAlias = Model | Function
GROUPS = 32  # groups of draws: their standard error is known to an eighth of itself
BATCH_BYTES = 2**27  # inputs, states and outputs in flight; larger batches are no faster
FUNCTION_BYTES = 2**31  # the same of plain functions, which read all of their weights every time
_FUNCTION_BATCH = 1024  # points of a batch for a function, whose states are unknown
STARTING, _MULTIPLIED, _WRITTEN, _BRANCHING = 0.006, 2e10, 3e8, 3
"""Seconds before the first pass; multiplications of matrix products, and numbers written entry by
entry, in a second; factor of the latter where sequences share their beginnings."""


log: logging.Logger = logging.getLogger(__name__)
Terms: TypeAlias = Sequence[tuple[Any, Part]]
"""Coefficients and parts: a sum of functions that is compared."""
Mode: TypeAlias = Literal["eager", "compiled", "traced"]
"""How forward passes run: in NumPy, as compiled programs, or in a trace of the caller's."""
# Multiplications below which compiling takes longer than computing. Compiled activations take half
# of the time, layers of products the same.
_EAGER = 2**27
_FEW = 16  # inputs whose states tell the units of bonds in a trace
_MANY = 16  # inputs beside which a few more take little time
_MOST_SHIFTED = 10_000  # exponents beyond those of floats
_FIRST_LINE = 10.0  # seconds after which the first line of progress is logged, each later at twice
Vector: TypeAlias = FeatureBlock
"""The features of one function, without the axis of models: values (out, features), an exponent
for all outputs (1,) or one for each (out,), lengths and sizes (groups, out) of the parts of the
vector that belong to each group of points."""

_compiled_step = jax.jit(after, static_argnums=(3, 4))


class Needs(NamedTuple):
    """Bytes of arrays that forward passes take.

    Args:
        beside: Bytes for any batch: scaled weights, masks of attention, draws of a single seed.
        each: Bytes for every point of a batch.
    """

    beside: float
    each: float

    @property
    def least(self) -> float:
        """Number of bytes of a batch of a single point."""
        return self.beside + self.each

    def most(self, count: int, limit: int = BATCH_BYTES) -> float:
        """Number of bytes of the largest batch of `count` points that is run at once."""
        return max(self.least, self.beside + min(limit, count * self.each))


class Work(NamedTuple):
    """The work of forward passes.

    Args:
        multiplications: Scalar multiplications.
        written: Numbers that are written entry by entry, as often as their pass is slower.
    """

    multiplications: int
    written: int

    @property
    def seconds(self) -> float:
        """Expected seconds on two cores of a usual processor."""
        # Counts of sequences may be beyond a float.
        work, written = (min(count, 10**300) for count in self)
        return STARTING + work / _MULTIPLIED + written / _WRITTEN


def work_of(parts: Iterable[Part], points: Points) -> Work:
    """The work of the forward passes of all models at all points; functions count nothing."""
    work = written = 0
    for model in parts:
        if isinstance(model, Model):
            layers = kinds(model)
            # An embedding of tokens looks up rows and multiplies nothing.
            multiplying = layers[1:] if points.tokens and layers[0].down is None else layers
            for states, seen in points.states(model.n_ctx or 1):
                work += states * sum(layer.multiplications(seen) for layer in multiplying)
                written += states * sum(_state_numbers(layer, seen) for layer in layers)
    return Work(work, _BRANCHING * written if points.continuations else written)


def outputs(d_out: int, positions: int, points: Points) -> int:
    """Number of output values of a model with `d_out` outputs at all points."""
    return d_out * sum(states for states, _ in points.states(positions))


def groups(points: Points) -> list[tuple[int, int]]:
    """First point and end of every group; sizes of groups differ by 1 at most."""
    # Undrawn points are one group, as nothing is estimated from them.
    count = (points.replicates or min(GROUPS, points.count)) if points.drawn else 1
    bounds = [n * points.count // count for n in range(count + 1)]
    return list(itertools.pairwise(bounds))


def in_batches(points: Points, start: int, stop: int, size: int) -> Iterator[WeightedPoints]:
    """The points from start to stop in batches of equal size, the last filled with weight 0."""
    for first in range(start, stop, size):
        last = min(first + size, stop)
        inputs, log_weights = points.block(first, last)
        missing = size - (last - first)
        if missing:
            inputs = np.concatenate([inputs, np.repeat(inputs[-1:], missing, axis=0)])
            log_weights = np.concatenate([log_weights, np.full(missing, -np.inf)])
        yield WeightedPoints(inputs, log_weights)


def all_points(
    parts: Sequence[Part], points: Points, dtype: str, budget: Budget
) -> Iterator[WeightedPoints]:
    """All points in batches within the memory allowed.

    Args:
        parts: Models and functions that run on them.
        points: Points and weights.
        dtype: Precision of the passes.
        budget: Limits.

    Raises:
        TooLarge: A single point is beyond the budget.
    """
    size = batch_size(parts, points, points.count, dtype, budget)
    return in_batches(points, 0, points.count, size)


def batches_of_groups(
    parts: Sequence[Part], points: Points, dtype: str, budget: Budget
) -> tuple[int, int]:
    """Number of points of a group in a batch, and number of groups that share a batch.

    Every group is cut into batches of one size, so that compiled passes have one shape; groups that
    are smaller than a batch share it: 1,000 inputs take a half to a quarter of the time.

    Raises:
        TooLarge: A single point is over the budget.
    """
    count = len(groups(points))
    largest = math.ceil(points.count / count)
    most = _largest_batch(parts, points, dtype, budget)
    size = _batch_of(points, largest, most)
    if size < largest or count == 1 or points.continuations:
        return size, 1
    room = _batch_of(points, points.count, most) // size
    return size, math.ceil(count / math.ceil(count / max(1, room)))


def batch_size(
    parts: Sequence[Part], points: Points, apart: int, dtype: str, budget: Budget
) -> int:
    """Number of points in a batch: `apart` divided evenly, within the memory allowed.

    Raises:
        TooLarge: A single point is over the budget.
    """
    return _batch_of(points, apart, _largest_batch(parts, points, dtype, budget))


def _batch_of(points: Points, apart: int, most: int) -> int:
    """`apart` points divided evenly into batches of at most `most`."""
    # Beginnings of sequences are shared within a batch, so its size follows their tree.
    if points.continuations:
        return points.aligned(most)
    # Even batches: as few as memory allows, and none that is nearly empty.
    return math.ceil(apart / math.ceil(apart / most))


def _largest_batch(parts: Sequence[Part], points: Points, dtype: str, budget: Budget) -> int:
    """Number of points that run at once within the memory allowed."""
    functions = [part for part in parts if not isinstance(part, Model)]
    # Functions that are compared have outputs of one shape, so any of them tells how many.
    asked = bool(functions) and points.count > ALONE
    outputs = len(functions) * _outputs_of_function(functions[0], points) if asked else 0
    needed = needs(parts, points, dtype, outputs)
    limit = FUNCTION_BYTES if functions else BATCH_BYTES
    room = budget.room(0, needed.most(points.count, limit))
    check_room(needed.least, room, "forward passes")
    most = max(1, int(min(limit, room - needed.beside) / max(1.0, needed.each)))
    if functions:
        most = min(most, _FUNCTION_BATCH)
        if asked and most <= ALONE:  # too few to tell whether they depend on one another
            for function in functions:
                outputs_of(function, points.block(0, ALONE + 1).inputs)
    return most


def _outputs_of_function(function: Function, points: Points) -> int:
    """Number of output values of a plain function at a point, from a run at a few."""
    try:
        return outputs_of(function, points.block(0, ALONE).inputs)[0].size
    except Exception:  # the batch itself is refused next, in words that name its shape
        return 0


def check_room(least: float, room: float, what: str) -> None:
    """Raise `TooLarge` where a single point takes more bytes than there is room for.

    Args:
        least: Number of bytes that a point takes.
        room: Number of bytes allowed.
        what: Subject of the message.
    """
    if least > room:
        raise TooLarge(
            f"{what} take {least / 2**30:.3g} GiB for a single input here, and the budget is "
            f"{room / 2**30:.3g} GiB; use shorter sequences (n_ctx), smaller widths or a larger "
            "tnsim.Budget"
        )


def needs(
    parts: Iterable[Part], points: Points, dtype: str, outputs_of_functions: int = 0
) -> Needs:
    """Bytes that the forward passes of functions take together, an upper bound for models.

    Args:
        parts: Models, or functions, whose states are unknown.
        points: Points of the measure.
        dtype: Precision of the forward passes.
        outputs_of_functions: Number of output values of all functions together at a point.

    Example:
        >>> import tnsim
        >>> points = tnsim.Empirical(np.eye(3)).points(None)
        >>> line = tnsim.Model([tnsim.Linear(np.eye(3))])
        >>> needs([line], points, "float64").each < needs([line] * 2, points, "float64").each
        True
    """
    item = ITEM_BYTES[dtype]
    # The outputs of functions as given, up to float64; then as compared, and twice in stacks.
    given = 8 * outputs_of_functions
    kept, widest, weights, masks, read = 3.0 * outputs_of_functions, 0.0, 0, 0, 0
    parts = list(parts)
    layers_of = [id(layer) for part in parts if isinstance(part, Model) for layer in part.layers]
    in_common = len(set(layers_of)) < len(layers_of)
    waiting = 0.0
    for part in parts:
        if not isinstance(part, Model):
            read = max(read, points.block(0, 1).inputs.nbytes)
            continue
        layers, positions = kinds(part), part.n_ctx or 1
        # Beginnings are shared by sequences, so a sequence has less than a state per position.
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
    return Needs(beside, 3 * read + given + item * (kept + widest + waiting))


def _state_numbers(layer: LayerKind, seen: int) -> int:
    """Most numbers alive at a single position in a layer that sees `seen` positions.

    Nearly as many are written, so the time of entry-by-entry work follows them.

    The layer reads a state and makes a product of its legs, leg after leg. Its output is
    divided by its largest entry: three arrays of the output's size, and a fourth where the output
    becomes a vector.
    """
    heads, d_head, d_value = layer.heads
    inside = (len(layer.legs) + 2) * layer.rank
    # Four rows and their rotations, two products at a time; two scores and their product.
    inside += heads * (10 * d_head + 3 * d_value + 3 * seen)
    return 2 * layer.d_in + inside + 4 * layer.d_out


class GramBlock(NamedTuple):
    """Inner products of rows with columns, and the squared norms of both."""

    products: ScaledSum
    rows: ScaledSum
    columns: ScaledSum


class Sums(NamedTuple):
    """The fields of a `GramBlock` for groups of points, with a first axis of groups.

    `shares` are the total weights of the groups. `means`, where they were asked for, are the means
    (out,) of every row and of every column over all inputs and positions, times the root of the
    number of positions, so that their squares are parts of the squared norms.
    """

    products: ScaledSum
    rows: ScaledSum
    columns: ScaledSum
    shares: Float[np.ndarray, " groups"]
    means: tuple[list[ScaledSum], ...] | None = None

    def mean_shares(self) -> tuple[Float[np.ndarray, " functions"], ...]:
        """The shares of squared norms that rows, and columns, have in their means, if asked for."""
        shares = []
        for means, norms in zip(self.means or (), (self.rows, self.columns), strict=False):
            summed = over_last_axis(over_groups(norms), slices=norms.mantissa.ndim > 2)
            shares.append(share_of_squares(stacked(means), summed))
        return tuple(shares)

    def over_outputs(self) -> Sums:
        """These sums, added up over outputs that are told apart."""
        summed = [over_last_axis(value, slices=True) for value in self[:3]]
        return self._replace(products=summed[0], rows=summed[1], columns=summed[2])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for value in self[:3] for array in value)


def sums(
    rows: Sequence[Terms],
    columns: Sequence[Terms] | None,
    points: Points,
    slices: bool,
    dtype: str,
    budget: Budget = Budget(),
    *,
    means: bool = False,
) -> Sums:
    """Inner products of all rows with all columns, with themselves where there are none.

    Args:
        rows, columns: Functions to compare, each a sum of parts; every part runs once.
        points: Points of the measure.
        slices: Whether outputs are told apart, on the last axis.
        dtype: Precision of the forward passes of models; functions have their own.
        budget: Budget that bounds the memory of a batch.
        means: Whether means are computed as well; every point is an input of its own.

    Returns:
        `Sums` of a single group, or of several where the points are draws.

    Raises:
        ModelError: Inputs or outputs of models and functions do not fit each other.
        TooLarge: A single point is over the budget.
        TnsimError: A function gives a value that is not finite.
    """
    every = [*rows, *(columns or ())]
    # A part that several rows have in common runs once.
    parts = {id(part): part for terms in every for _, part in terms}
    work = work_of(parts.values(), points)
    bounds = groups(points)
    size, together = batches_of_groups(list(parts.values()), points, dtype, budget)
    grams, shares, added = [], [], []
    begun, due, passed = time.monotonic(), _FIRST_LINE, 0
    with announced("forward passes", work.seconds), execution.precision():
        # Compiling takes memory of its own, which a small budget does not leave.
        eager = work.multiplications < _EAGER or not can_compile()
        eager = eager or budget.room(0, PROGRAM_BYTES) < PROGRAM_BYTES
        passes = _Runner(parts, slices, dtype, "eager" if eager else "compiled", together)
        for first_group in range(0, len(bounds), together):
            own = bounds[first_group : first_group + together]
            share, batches = np.zeros(together), []
            for batch in _shared_batches(points, own, size, together):
                # Points that fill the last batch have weight 0, and add nothing here or to
                # products.
                share += np.exp(batch.log_weights).reshape(together, -1).sum(axis=1)
                vectors = passes.at(batch)
                check_shapes([x.values.shape for x in vectors.values()], len(batch.log_weights))
                first = [_sum_vector(terms, vectors, dtype) for terms in rows]
                second = first
                if columns is not None:
                    second = [_sum_vector(terms, vectors, dtype) for terms in columns]
                block = _gram_block(first, second, slices)
                batches = [GramBlock(*map(add, _by_field([*batches, block])))]
                if means:
                    of_batch = [_means(side, batch) for side in (first, second)]
                    added = [_added_means([*added, of_batch])]
                passed += len(batch.log_weights)
                if (seconds := time.monotonic() - begun) >= due:
                    due = 2 * seconds
                    done = f"{min(passed, points.count):,} of {points.count:,}"
                    log.info("forward passes for %.0f s: %s inputs", seconds, done)
            (total,) = batches
            grams.append(GramBlock(*(taken(value, slice(len(own))) for value in total)))
            shares.append(share[: len(own)])
    joined = GramBlock(*(_joined(same) for same in _by_field(grams)))
    return Sums(*joined, np.concatenate(shares), tuple(added[0]) if means else None)


def _added_means(batches: Sequence[list[list[ScaledSum]]]) -> list[list[ScaledSum]]:
    """The sums over batches of the means of all rows, and of all columns."""
    return [[add(same) for same in zip(*side, strict=True)] for side in zip(*batches, strict=True)]


def _means(vectors: Sequence[Vector], batch: WeightedPoints) -> list[ScaledSum]:
    """What a batch adds to the means of some functions, see `Sums`."""
    found = []
    for values, exponent, *_ in vectors:
        # Features hold the roots of the weights once, position after position of an input.
        positions = values.shape[1] // len(batch.log_weights)
        roots = np.exp(np.repeat(batch.log_weights, positions) / 2) / math.sqrt(positions)
        summed = np.asarray(values @ roots.astype(values.dtype), np.float64)
        found.append(contribution(summed, np.broadcast_to(exponent, summed.shape)))
    return found


def with_cancellation(
    sums: Sums, rows: Sequence[Terms], columns: Sequence[Terms] | None, points: Points, dtype: str
) -> Sums:
    """Sums whose sizes count the cancellation within each model, as error bounds take them.

    Args:
        sums: Sums of the rows and columns over the points.
        rows, columns: Functions that were compared; a plain function counts as it is.
        points: Points of the measure.
        dtype: Precision of the forward passes of models.
    """
    slices = np.ndim(sums.rows.mantissa) > 2

    def factors(every: Sequence[Terms]) -> np.ndarray:
        found = []
        for terms in every:
            models = [part for _, part in terms if isinstance(part, Model)]
            own = [cancellation_at(model, points, dtype, slices) for model in models]
            found.append(max(own, default=1.0))
        return np.array(found)

    first = factors(rows)
    second = first if columns is None else factors(columns)
    return sums._replace(
        products=magnified(sums.products, of_pair(first[:, None], second)[None]),
        rows=magnified(sums.rows, first[None]),
        columns=magnified(sums.columns, second[None]),
    )


def _shared_batches(
    points: Points, own: Sequence[tuple[int, int]], size: int, together: int
) -> Iterator[WeightedPoints]:
    """The batches of a single group, or a batch of several groups, one after another."""
    if together == 1:
        yield from in_batches(points, *own[0], size)
        return
    filled = [next(in_batches(points, start, stop, size)) for start, stop in own]
    # Groups that fill the last batch have the weight 0.
    last = filled[-1]
    nothing = last._replace(log_weights=np.full(size, -np.inf))
    filled += [nothing] * (together - len(own))
    inputs, log_weights = zip(*filled, strict=True)
    yield WeightedPoints(np.concatenate(inputs), np.concatenate(log_weights))


def _joined(parts: Sequence[ScaledSum]) -> ScaledSum:
    """Sums of several groups, one after another."""
    return ScaledSum(*(np.concatenate(same) for same in zip(*parts, strict=True)))


def _by_field(grams: Sequence[GramBlock]) -> list[list[ScaledSum]]:
    """All products, then all squared norms of rows, then all squared norms of columns."""
    return [list(same) for same in zip(*grams, strict=True)]


def over_groups(value: ScaledSum) -> ScaledSum:
    """The sum of a value over groups."""
    groups = range(len(value.mantissa))
    return add([taken(value, n) for n in groups])


class _Runner:
    """Forward passes of functions on batches of points.

    Layers below the first difference of several models run once. Models have a layer in common
    where they hold the same object, as models with switches do.

    Args:
        parts: Models and plain functions by `id`.
        slices: Whether outputs are told apart.
        dtype: Precision of inputs and outputs; of models too, except in a trace.
        mode: Way to run the models.
        together: Number of groups of points in a batch.
    """

    def __init__(
        self, parts: Mapping[int, Part], slices: bool, dtype: str, mode: Mode, together: int = 1
    ):
        self.models = {key: part for key, part in parts.items() if isinstance(part, Model)}
        self.functions = {key: part for key, part in parts.items() if key not in self.models}
        self.slices, self.dtype, self.mode, self.together = slices, dtype, mode, together
        # A trace refuses no hidden states that float32 loses: it has to lose none.
        self.by_states = mode == "traced" and dtype == "float32"
        self.step, self.rest = after, _vector_behind
        if mode == "compiled":
            self.step, self.rest = _compiled_step, _compiled_rest
        self.asked: set[int] = set()
        # The layers in scientific notation of `_scaled_layer`, with the units of their inputs.
        self.made: dict[tuple[int, bool], tuple[Unit, Scaled[Layer]]] = {}

    def at(self, batch: WeightedPoints) -> dict[int, Vector]:
        """The vectors of all functions on a batch."""
        read = {key: as_read(model, batch.inputs) for key, model in self.models.items()}
        # sqrt(w) = 2^(log2(w) / 2): weights of points are given by natural logarithms
        halves = batch.log_weights / (2 * LOG_2)
        vectors: dict[int, Vector] = {}
        for key, function in self.functions.items():
            vectors[key] = self._of_function(key, function, batch, halves)
        # Of networks on disk those that ran last stay loaded: the next batch begins with them.
        self.functions = dict(reversed(self.functions.items()))
        together = self._by_next_layer(self.models, 0)
        if self.by_states:  # of layers that models have in common units differ with what follows
            together = [[key] for key in self.models]
        for keys in together:
            inputs: Any = read[keys[0]]
            unit: Unit = np.zeros(())
            if not is_tokens(inputs):
                inputs, unit = in_own_units(self.models[keys[0]], inputs)
                inputs = inputs.astype(self.dtype)
            if self.mode == "traced":
                inputs = jax.tree.map(jnp.asarray, inputs)
            layers = {key: self._scaled_model(self.models[key], unit, inputs) for key in keys}
            vectors |= self._behind_first_layer(layers, inputs, halves)
        return vectors

    def _behind_first_layer(
        self, layers: Mapping[int, ScaledLayers], inputs: Any, halves: Any
    ) -> dict[int, Vector]:
        """The vectors of models that have their first layer in common."""
        counts = inputs.counts if isinstance(inputs, Prefixes) else None
        vectors: dict[int, Vector] = {}

        def finish(key: int, done: int, reached: Any) -> None:
            """Run a single model to its outputs, as one program where passes are compiled."""
            vector = self.rest(layers[key][done:], reached, halves, counts, self.together)
            vectors[key] = self._finished_vector(vector)

        first, *others = layers
        if not others:
            finish(first, 0, inputs)
            return vectors
        # Groups of models with a state in common and the next layer too. A group that is taken up
        # leaves the groups behind that layer, which come next: a state of each depth waits.
        state, done = entered(layers[first], inputs)
        waiting = [(keys, done, state) for keys in self._by_next_layer(layers, done)]
        while waiting:
            keys, done, state = waiting.pop()
            if len(keys) == 1:
                finish(keys[0], done, state)
                continue
            (layer, unit), *later = layers[keys[0]][done:]
            state = self.step(layer, unit, state, ahead([x for x, _ in later]), counts)
            waiting += [(same, done + 1, state) for same in self._by_next_layer(keys, done + 1)]
        return vectors

    def _by_next_layer(self, keys: Iterable[int], done: int) -> list[list[int]]:
        """Models that have `done` layers in common, in groups that have the next in common too.

        A state is normalised as the layers ahead demand, so a group has equal demands. The outputs
        of two models are vectors of their own even where all layers are the same.
        """
        groups: dict[Any, list[int]] = {}
        for key in keys:
            layer, *later = self.models[key].layers[done:]
            groups.setdefault((id(layer), ahead(later), None if later else key), []).append(key)
        return list(groups.values())

    def _scaled_model(self, model: Model, unit: Unit, inputs: Any) -> ScaledLayers:
        """A model in scientific notation, for some inputs and the units that they are in."""
        if self.by_states and model.is_polynomial and not is_tokens(inputs):
            made = _in_units_of_states(model, self.slices, inputs, unit)
            return jax.tree.map(jnp.asarray, made)
        if self.mode == "traced":
            return jax.tree.map(jnp.asarray, scaled_layers(model, self.slices, unit))
        layers = []
        for n, layer in enumerate(model.layers):
            apart = self.slices and n + 1 == len(model.layers)
            layers.append(self._scaled_layer(layer, apart, np.zeros(()) if n else unit))
        return tuple(layers)

    def _scaled_layer(self, layer: Layer, slices: bool, inputs: Unit) -> Scaled[Layer]:
        """A layer in scientific notation, made once for all models that hold it.

        A layer that reads inputs is made again where their units change.
        """
        place = id(layer), slices
        if place not in self.made or not np.array_equal(self.made[place][0], inputs):
            self.made.pop(place, None)  # what is made again needs its room
            weights, exponent = scaled_layer(layer, slices, inputs)
            weights = jax.tree.map(lambda x: _narrowed(x, self.dtype), weights)
            self.made[place] = inputs, Scaled(weights, np.asarray(exponent))
        return self.made[place][1]

    def _of_function(
        self, key: int, function: Function, batch: WeightedPoints, halves: Any
    ) -> Vector:
        """The vector of a plain function.

        Outputs may be of any size that a float has, as those of models may: their largest entry
        becomes a number near 1, for every input, and for every output where these are told apart.
        """
        # What else is in a batch plays no part: asked first, and where it costs next to nothing.
        apart = key not in self.asked or len(batch.inputs) >= _MANY
        self.asked.add(key)
        outputs = outputs_of(function, batch.inputs, apart)
        if outputs.dtype.kind != "f":
            outputs = outputs.astype(np.float64)
        # Logits are large: nothing of their size is made but what is kept.
        axes = tuple(range(1, outputs.ndim - self.slices))
        highest, lowest = (f(axis=axes, keepdims=True) for f in (outputs.max, outputs.min))
        exponents = split(np.maximum(highest, -lowest).astype(np.float64)).exponent
        mantissas = np.empty(outputs.shape, self.dtype)
        by = (-exponents.clip(-_MOST_SHIFTED)).astype(np.int32)  # a row of zeros has none
        np.ldexp(outputs, by, out=mantissas, dtype=np.float64, casting="same_kind")
        exponents = exponents.reshape(len(outputs), -1)
        if self.mode == "traced":
            return vector_of(Scaled(jnp.asarray(mantissas), exponents), halves, self.together)
        vector = vector_of(Scaled(mantissas, exponents), halves, self.together, out=mantissas)
        return self._finished_vector(vector)

    def _finished_vector(self, vector: Vector) -> Vector:
        """The vector with its small arrays in NumPy's float64, except in a trace."""
        if self.mode == "traced":
            return vector
        lengths = np.asarray(vector.lengths, np.float64)
        return Vector(vector.values, np.asarray(vector.exponent, np.float64), lengths, lengths)


def _in_units_of_states(model: Model, slices: bool, inputs: Any, unit: Unit) -> ScaledLayers:
    """The layers of a model in units of its states on a few inputs, coordinate by coordinate.

    Small hidden states that large weights read then stay in the range of float32.

    Args:
        model: Polynomial model, traced or not.
        slices: Whether each output has an exponent of its own.
        inputs: Inputs in their units.
        unit: Exponents of these units.
    """
    fixed, few = not_differentiated((model, inputs[:_FEW]))
    (_, exponent), shifts = scaled_with_shifts(fixed, slices, SampledStates(few), unit)
    *layers, last = scaled_layers(jax.tree.map(shifted, model, shifts), slices)
    return (*layers, Scaled(last.value, last.exponent + exponent))


def _narrowed(array: Any, dtype: str) -> np.ndarray:
    """An array in a precision; NaN where its largest entry leaves the range, which is refused.

    A bias of a stream that is far below 1 may be such an array, and yet count among states as
    small.
    """
    narrow, limits = np.asarray(array, dtype), np.finfo(dtype)
    if dtype != "float64":
        # Absolute values of all entries would be a second array of their size.
        top = float(max(np.max(array, initial=0.0), -np.min(array, initial=0.0)))
        if top > limits.max or 0 < top < limits.tiny:
            return np.full_like(narrow, np.nan)
    return narrow


def _vector_behind(
    layers: ScaledLayers, reached: Any, halves: Any, counts: tuple[int, ...] | None, together: int
) -> Vector:
    """The vector of a model from its inputs, or from a state and the layers that follow."""
    return vector_of(forward(layers, reached, counts), halves, together)


_compiled_rest = jax.jit(_vector_behind, static_argnums=(3, 4))


def vector_of(
    outputs: State, halves: Any, together: int = 1, out: np.ndarray | None = None
) -> Vector:
    """The vector of some outputs: those of each point times the root of its weight.

    Args:
        outputs: Outputs at the points.
        halves: Logarithms to base 2 of the roots of the weights.
        together: Number of groups of points, which follow each other.
        out: Array of NumPy for the products, which may be the outputs themselves.
    """
    values, exponents = outputs
    xp = library(values)
    # Entry i of F is 2^e_i sqrt(w_i) a'_i, where no factor need be a float. The largest factor of
    # the batch, 2^exponent, is taken out; entries that underflow then are negligible.
    exponents = exponents + halves[:, None]
    exponent = larger(exponents.max(axis=0), SMALLEST)  # finite where no point has a weight
    factors = xp.exp2(exponents - exponent).astype(values.dtype)
    # Shapes: values (points, ..., out), factors (points, 1, ..., 1 or out); the result has outputs
    # first and one row of features for each.
    factors = factors.reshape(len(values), *(1,) * (values.ndim - 2), -1)
    weighted = values * factors if out is None else np.multiply(values, factors, out=out)
    values = xp.moveaxis(weighted, -1, 0).reshape(values.shape[-1], -1)
    lengths = xp.sqrt(_squares(values, together))
    return Vector(values, exponent, lengths, lengths)


def _squares(values: Any, together: int) -> Float[Any, "groups out"]:
    """Sums of squared features (out, features) by group."""
    if library(values) is np:  # without a second array of their size
        by_group = values.reshape(len(values), together, -1)
        return np.einsum("ogf,ogf->go", by_group, by_group, dtype=np.float64)
    return (values * values).reshape(len(values), together, -1).sum(axis=2).T


def check_shapes(shapes: Iterable[Sequence[int]], count: int) -> None:
    """Raise `ModelError` unless vectors of functions have a single shape.

    Args:
        shapes: Shapes (out, features) of the vectors.
        count: Number of inputs.

    Example:
        >>> check_shapes([(3, 10), (3, 10)], count=10)
    """
    distinct = sorted({tuple(shape) for shape in shapes})
    if len(distinct) > 1:
        numbers = [f"{shape[0]} outputs, {shape[1]} rows" for shape in distinct]
        raise ModelError(
            f"functions that are compared have one shape of outputs; on {count} "
            f"inputs found {' and '.join(numbers)}"
        )


def _sum_vector(terms: Terms, vectors: dict[int, Vector], dtype: str) -> Vector:
    """The vector of a sum of parts."""
    own = [vectors[id(part)] for _, part in terms]
    mantissas, powers = split(np.array([float(coefficient) for coefficient, _ in terms]))
    # Mantissas from 1 to 2, so that a model by itself is its vector as it is.
    mantissas, powers = 2 * mantissas, powers - 1
    # sum_m c_m 2^(e_m) v_m; the largest of the factors c_m 2^(e_m) is taken out as 2^exponent.
    powers = np.stack([vector.exponent for vector in own]) + powers[:, None]
    exponent = powers.max(axis=0)
    factors = mantissas[:, None] * np.exp2(powers - exponent)
    values: Any = own[0].values
    if len(own) > 1 or (factors != 1.0).any():
        values = sum(
            vector.values * factor.astype(dtype)[:, None]
            for factor, vector in zip(factors, own, strict=True)
        )
    lengths = np.stack([vector.lengths for vector in own])
    sizes = (abs(factors)[:, None] * lengths).sum(axis=0)
    if len(own) == 1:
        return Vector(values, exponent, sizes, sizes)
    by_group = _squares if library(values) is np else _compiled_squares
    squares = np.asarray(by_group(values, len(sizes)), np.float64)
    return Vector(values, exponent, np.sqrt(squares), sizes)


_compiled_squares = jax.jit(_squares, static_argnums=1)


def _gram_block(rows: Sequence[Vector], columns: Sequence[Vector], slices: bool) -> GramBlock:
    """The inner products of row vectors with column vectors, which may be the same, by group."""
    first = _stacked_vectors(rows)
    second = first if columns is rows else _stacked_vectors(columns)
    grams = []
    for one, two in zip(first, second, strict=True):
        squares = [features.norms(block, slices) for block in (one, two)]
        grams.append(GramBlock(features.products(one, two, slices), *squares))
    return GramBlock(*(stacked(same) for same in _by_field(grams)))


def _stacked_vectors(vectors: Sequence[Vector]) -> list[FeatureBlock]:
    """Vectors as a block with an axis of models for each group; a common scale has no axis of
    outputs."""
    arrays = [vector.values for vector in vectors]
    if len(arrays) == 1:
        values = arrays[0][None]
    elif library(arrays[0]) is np:
        # Outputs of a batch lie in memory row by row of features, and stay as they lie.
        values = np.stack([array.T for array in arrays]).swapaxes(1, 2)
    else:
        values = jnp.stack(arrays)
    exponent = np.stack([vector.exponent for vector in vectors])
    if exponent.shape[1] == 1:
        exponent = exponent[:, 0]
    lengths = np.stack([vector.lengths for vector in vectors], axis=1)
    sizes = np.stack([vector.sizes for vector in vectors], axis=1)
    count = len(lengths)
    if count > 1:
        # Groups are small: their products are made by NumPy, without a call of the device each.
        values = np.asarray(values)
    by_group = values.reshape(*values.shape[:2], count, -1)
    return [FeatureBlock(by_group[:, :, n], exponent, lengths[n], sizes[n]) for n in range(count)]


def vectors_of(terms: Terms, dtype: str) -> Callable[[WeightedPoints], Vector]:
    """The vector of a sum of models as a function of a batch of points, in NumPy.

    Args:
        terms: Coefficients and models, numbers.
        dtype: Precision of the forward passes.

    Returns:
        A function that keeps the scaled weights from batch to batch.

    Example:
        >>> import tnsim
        >>> line = tnsim.Model([tnsim.Linear([[1.0]])])
        >>> batch = tnsim.Empirical([[3.0], [4.0]]).points(None).block(0, 2)
        >>> vector = vectors_of([(1.0, line)], "float64")(batch)
        >>> round(float((vector.values**2).sum() * 4 ** vector.exponent[0]), 12)
        12.5
    """
    passes = _Runner({id(part): part for _, part in terms}, False, dtype, "eager")
    return lambda batch: _sum_vector(terms, passes.at(batch), dtype)


def traced_vector(
    terms: Terms, batch: WeightedPoints, exponent: Any, dtype: str
) -> Float[jax.Array, "out features"]:
    """The vector of a sum of models in units of `2 ** exponent`, inside a JAX trace.

    Args:
        terms: Coefficients and models, traced or not.
        batch: Points, which are numbers.
        exponent: Exponent of the unit, such as the exponent of the vector in NumPy.
        dtype: Precision of inputs and outputs.

    Example:
        >>> import tnsim
        >>> line = tnsim.Model([tnsim.Linear([[1.0]])])
        >>> batch = tnsim.Empirical([[3.0]]).points(None).block(0, 1)
        >>> traced_vector([(1.0, line)], batch, 1.0, "float32").tolist()
        [[1.5]]
    """
    vectors = _Runner({id(part): part for _, part in terms}, False, dtype, "traced").at(batch)
    total: Any = 0.0
    for coefficient, part in terms:
        vector = vectors[id(part)]
        total = total + vector.values * (coefficient * jnp.exp2(vector.exponent - exponent))
    return total


def over_batches(
    first: Terms, second: Terms, batches: Iterable[WeightedPoints], slices: bool, norms: bool
) -> dict[str, ScaledSum]:
    """`<a|b>` as `AB` and, with norms, `<a|a>` and `<b|b>` of two sums at given points.

    Points may be traced too. Every part runs once on a batch, in the precision of the weights.

    Args:
        first, second: Sums of models, traced or not, or of functions.
        batches: Batches that hold all points.
        slices: Whether outputs are told apart.
        norms: Whether `AA` and `BB` are wanted as well.

    Returns:
        Inner products, () or (out,).

    Raises:
        ModelError: The models do not read these inputs.
    """
    parts = {id(part): part for _, part in (*first, *second)}
    models = [part for part in parts.values() if isinstance(part, Model)]
    dtype = weights_dtype(*models) if models else "float64"
    passes = _Runner(parts, slices, dtype, "traced")
    sides = {"AB": (first, second)}
    if norms:
        sides |= {"AA": (first, first), "BB": (second, second)}
    products: dict[str, list[ScaledSum]] = {name: [] for name in sides}
    for batch in batches:
        vectors = passes.at(batch)
        for name, (rows, columns) in sides.items():
            for (c, a), (d, b) in itertools.product(rows, columns):
                one, two = vectors[id(a)], vectors[id(b)]
                mantissa = (one.values * two.values).sum(axis=1)
                exponent = one.exponent + two.exponent
                if not slices:
                    mantissa, exponent = mantissa.sum(), exponent[0]
                products[name].append(times(contribution(mantissa, exponent), c * d))
    return {name: add(found) for name, found in products.items()}
