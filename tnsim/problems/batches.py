"""What forward passes take, and the batches of points in which they run.

Where points are draws, sums are kept for groups of consecutive points (`groups`), from which errors
are estimated. Batches are as large as a cache and the memory allow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from tnsim.engine.budget import Budget
from tnsim.engine.ir.dtypes import ITEM_BYTES
from tnsim.errors import TooLarge
from tnsim.metrics.points import Points, WeightedPoints
from tnsim.models.functions import ALONE, Function, outputs_of
from tnsim.models.model import Model
from tnsim.problems.tensors.kinds import Kinds, LayerKind, kinds

Part: TypeAlias = Model | Function
GROUPS = 32  # groups of draws: their standard error is known to an eighth of itself
BATCH_BYTES = 2**27  # inputs, states and outputs in flight; larger batches are no faster
FUNCTION_BYTES = 2**31  # the same of plain functions, which read all of their weights every time
_FUNCTION_BATCH = 1024  # points of a batch for a function, whose states are unknown
STARTING, _MULTIPLIED, _WRITTEN, _BRANCHING = 0.006, 2e10, 3e8, 3
"""Seconds before the first pass; multiplications of matrix products, and numbers written entry by
entry, in a second; factor of the latter where sequences share their beginnings."""


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
    if points.tokens and layers[0].down is None:
        layers = layers[1:]  # an embedding of tokens looks up rows and multiplies nothing
    work = 0
    for states, seen in points.states(positions):
        work += states * sum(layer.multiplications(seen) for layer in layers)
    return work


class Work(NamedTuple):
    """The work of forward passes.

    Args:
        multiplications: Scalar multiplications.
        written: Numbers that are written entry by entry, as often as their pass is slower.
    """

    multiplications: int
    written: int

    def and_products(self, multiplications: int) -> Work:
        """The work together with further multiplications."""
        return self._replace(multiplications=self.multiplications + multiplications)

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
            layers, positions = kinds(model), model.n_ctx or 1
            work += multiplications(layers, positions, points)
            for states, seen in points.states(positions):
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
    are smaller than a batch share it.

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
