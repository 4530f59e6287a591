"""Protocols of metrics: names, guarantees, and a rule for joining legs, or points.

The metrics of tnsim follow these protocols. Metrics from outside are finite measures.

*Finite measures* `sum_i w_i delta(x_i)` make their points block by block. As a metric operator such
a measure is a sum of product vectors, `sum_i w_i x_i (x) ... (x) x_i`, and its contraction with a
tree is the forward pass at the points. Points are requested by number and never stored: a product
rule and an enumeration count in mixed radix, and draws are made in chunks with a seed for each
chunk. Weights are logarithms, as the weights of a rule of high degree leave the range of floats.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from tnsim.errors import ModelError, TooLarge
from tnsim.metrics.orbits import PairingRule
from tnsim.models.forward import Prefixes
from tnsim.options import shown

MAX_BITS = 1000
"""Binary digits of the largest number of points: costs must stay in the range of floats."""
CHUNK = 4096
"""Number of draws that share a seed."""

Draw: TypeAlias = Callable[[np.random.Generator, int], Any]
"""A map from a generator and a number n to n inputs."""


class Reading(NamedTuple):
    """The inputs that the models under comparison read.

    Args:
        d_in: Number of coordinates of the input, at a single position of a sequence.
        n_ctx: Number of positions, None for vectors.
        degree: Highest degree of the models, infinite where one has an activation; any number where
            points do not depend on it.
        causal: Whether no output depends on later positions.
    """

    d_in: int
    n_ctx: int | None
    degree: int
    causal: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a single input."""
        return (self.d_in,) if self.n_ctx is None else (self.n_ctx, self.d_in)


class WeightedPoints(NamedTuple):
    """Some points of a measure: inputs along the first axis, and logarithms of weights.

    Inputs may be `Prefixes`: then a beginning has the weight of all sequences with this beginning.
    """

    inputs: Any
    log_weights: Float[np.ndarray, " points"]


class Rule(NamedTuple):
    """Nodes and logarithms of weights of a measure of a single coordinate."""

    nodes: Float[np.ndarray, " nodes"]
    log_weights: Float[np.ndarray, " nodes"]


@dataclass(frozen=True)
class Points:
    """A finite measure.

    Args:
        count: Number of points.
        block: Function from (start, stop) to the points with the numbers start to stop - 1. It can
            be pickled, for other processes.
        drawn: Whether points are draws, so that their mean is an estimate for a distribution.
        tokens: Whether inputs are token ids.
        continuations: Number of tokens that may follow a beginning, for sequences that share their
            beginnings; 0 where every point is an input of its own.
        together: Number of points that are made at once, even for a smaller request.
        replicates: Number of equal stretches of points, each an estimate of its own, where points
            of a stretch depend on each other; 0 for draws that are independent.

    Example:
        >>> points = product_rule([Rule(np.array([-1.0, 1.0]), np.log([0.5, 0.5]))] * 2)
        >>> points.count, points.block(1, 3).inputs.tolist()
        (4, [[-1.0, 1.0], [1.0, -1.0]])
    """

    count: int
    block: Callable[[int, int], WeightedPoints]
    drawn: bool = False
    tokens: bool = False
    continuations: int = 0
    together: int = 0
    replicates: int = 0

    def states(self, positions: int) -> list[tuple[int, int]]:
        """Numbers of states that a model has at all points, by the positions that a state sees.

        Args:
            positions: Number of positions of an input.

        Returns:
            Pairs (number of states, number of positions that such a state sees).

        Example:
            >>> sequences(np.full(4, 0.25), n_ctx=3).states(3)
            [(192, 3)]
            >>> beginnings(np.full(4, 0.25), n_ctx=3).states(3)
            [(4, 1), (16, 2), (64, 3)]
        """
        if not self.continuations:
            return [(self.count * positions, positions)]
        # There are V^s beginnings of s tokens out of V, and the state of each sees its s positions.
        return [(self.continuations**seen, seen) for seen in range(1, positions + 1)]

    def aligned(self, most: int) -> int:
        """Largest size of a block, if every block holds continuations of a single beginning.

        Args:
            most: Upper limit for the size of a block.

        Example:
            >>> [beginnings(np.full(4, 0.25), n_ctx=3).aligned(most) for most in (3, 15, 60)]
            [2, 8, 32]
        """
        size = self.count
        while size > most:
            size //= self.continuations
        # Whole subtrees of V^k sequences fit; of their next level as many as fit and divide V, so
        # that every block ends where a beginning ends.
        room = min(most, self.count) // size
        fitting = (n for n in range(1, room + 1) if self.continuations % n == 0)
        return size * max(fitting)


def product_rule(rules: Sequence[Rule]) -> Points:
    """The product of measures of single coordinates, (points, coordinates).

    Args:
        rules: Rules of the coordinates; an empty sequence gives a point without coordinates.
    """
    # Points are numbered and made when asked for: a product of many rules is never held.
    count = math.prod(len(rule.nodes) for rule in rules)
    return Points(count, partial(_product_block, tuple(rules)))


def _product_block(rules: Sequence[Rule], start: int, stop: int) -> WeightedPoints:
    digits = _digits(start, stop, [len(rule.nodes) for rule in rules])
    inputs = np.empty(digits.shape)
    log_weights = np.zeros(len(digits))
    for n, rule in enumerate(rules):
        inputs[:, n] = rule.nodes[digits[:, n]]
        # Coordinates are independent, so weights multiply.
        log_weights += rule.log_weights[digits[:, n]]
    return WeightedPoints(inputs, log_weights)


def mapped(points: Points, function: Callable[[Any], Any]) -> Points:
    """The image of a measure under a function of blocks of inputs."""
    block = partial(_mapped_block, points, function)
    return dataclasses.replace(points, block=block)


def _mapped_block(points: Points, function: Callable, start: int, stop: int) -> WeightedPoints:
    inputs, log_weights = points.block(start, stop)
    return WeightedPoints(function(inputs), log_weights)


def sequences(probabilities: Float[np.ndarray, " vocabulary"], n_ctx: int) -> Points:
    """All sequences of tokens with their probabilities, positions independent, (points, n_ctx).

    The last position changes fastest, so neighbours share their beginning.

    Raises:
        TooLarge: The number of sequences is beyond the range of floats.

    Example:
        >>> sequences(np.array([0.5, 0.5]), n_ctx=2).block(1, 3).inputs.tolist()
        [[0, 1], [1, 0]]
    """
    if n_ctx * math.log2(len(probabilities)) > MAX_BITS:
        raise TooLarge(
            f"all sequences of {n_ctx:,} tokens out of {len(probabilities):,} cannot be counted, "
            "let alone run; draw some of them, as by tnsim.Categorical(samples=65536), or shorten "
            "n_ctx"
        )
    with np.errstate(divide="ignore"):
        log = np.log(probabilities)
    return Points(len(log) ** n_ctx, partial(_sequence_block, log, n_ctx), tokens=True)


def _sequence_block(log: np.ndarray, n_ctx: int, start: int, stop: int) -> WeightedPoints:
    ids = _digits(start, stop, [len(log)] * n_ctx)
    return WeightedPoints(ids, log[ids].sum(axis=1))


def beginnings(probabilities: Float[np.ndarray, " vocabulary"], n_ctx: int) -> Points:
    """All sequences of tokens as the beginnings that they share, for causal models.

    A block of sequences becomes its distinct beginnings p, each with the weight of all sequences of
    the block that begin with p:
    `sum_x w(x) sum_s a_s(x) b_s(x) = sum_s sum_p a(p) b(p) sum_(x begins with p) w(x)`. The
    equation holds for every block, so a beginning that several blocks share is part of each block.

    Args:
        probabilities: Probabilities of tokens, the same at every position.
        n_ctx: Number of tokens of a sequence.

    Example:
        >>> inputs, log_weights = beginnings(np.array([0.25, 0.75]), n_ctx=2).block(0, 4)
        >>> [level.tolist() for level in inputs.tokens], np.exp(log_weights).round(4).tolist()
        ([[0, 1], [0, 1, 0, 1]], [0.25, 0.75, 0.0625, 0.1875, 0.1875, 0.5625])
    """
    whole = sequences(probabilities, n_ctx)
    block = partial(_beginnings_block, whole, len(probabilities))
    return Points(whole.count, block, tokens=True, continuations=len(probabilities))


def _beginnings_block(whole: Points, vocabulary: int, start: int, stop: int) -> WeightedPoints:
    ids, log_weights = whole.block(start, stop)
    tokens, logs = [ids[:, -1]], [log_weights]
    # From the leaves up: the weight of a beginning is the sum of the weights of its continuations.
    for position in range(ids.shape[1] - 2, -1, -1):
        each = min(vocabulary, len(logs[0]))  # a small block has a single beginning
        logs.insert(0, np.logaddexp.reduce(logs[0].reshape(-1, each), axis=1))
        tokens.insert(0, ids[:: len(ids) // len(logs[0]), position])
    return WeightedPoints(Prefixes(tuple(tokens)), np.concatenate(logs))


def draws(count: int, seed: int, draw: Draw, tokens: bool = False) -> Points:
    """Independent draws, equally weighted.

    Args:
        count: Number of draws.
        seed: Seed of all draws; draw i is the same in every block that contains it.
        draw: Function from a generator and a number n to n inputs.
        tokens: Whether inputs are token ids.

    Example:
        >>> points = draws(5000, 0, lambda rng, n: rng.normal(size=(n, 2)))
        >>> bool((points.block(4000, 5000).inputs[96:] == points.block(4096, 5000).inputs).all())
        True
    """
    block = partial(_drawn_block, count, seed, draw)
    return Points(count, block, drawn=True, tokens=tokens, together=CHUNK)


def _drawn_block(count: int, seed: int, draw: Draw, start: int, stop: int) -> WeightedPoints:
    # Every chunk has a seed of its own, so draw i is the same in every block that contains it.
    inputs: Any = None
    for chunk in range(start // CHUNK, -(-stop // CHUNK)):
        first = chunk * CHUNK
        drawn = draw(np.random.default_rng([seed, chunk]), CHUNK)
        drawn = drawn[max(start - first, 0) : stop - first]
        if inputs is None:  # all at once, as parts would be in memory twice where they are joined
            shape = stop - start, *drawn.shape[1:]
            try:
                inputs = np.empty(shape, drawn.dtype)
            except (MemoryError, ValueError):
                raise TooLarge(f"memory does not hold draws of shape {shape}: draw fewer") from None
        place = max(first - start, 0)
        inputs[place : place + len(drawn)] = drawn
    # A mean: every draw weighs 1 / count.
    return WeightedPoints(inputs, np.full(len(inputs), -math.log(count)))


def check_draws(samples: int | None) -> None:
    """Raise `ModelError` for an invalid number of draws.

    Example:
        >>> check_draws(0)
        Traceback (most recent call last):
        tnsim.errors.ModelError: samples must be whole, at least 2, or None for none, found 0
    """
    if samples is not None and not (isinstance(samples, Integral) and samples > 1):
        raise ModelError(f"samples must be whole, at least 2, or None for none, found {samples!r}")


def _digits(start: int, stop: int, sizes: Sequence[int]) -> Int[np.ndarray, "points digits"]:
    """The numbers start to stop - 1 in mixed radix, with the last digit changing fastest."""
    digits = np.empty((stop - start, len(sizes)), np.int64)
    rest = np.arange(start, stop)
    for n in range(len(sizes) - 1, -1, -1):
        # The last digit first, as in a division by hand.
        rest, digits[:, n] = np.divmod(rest, sizes[n])
    return digits


@runtime_checkable
class Metric(Protocol):
    """The attributes that every metric has.

    A metric is immutable, and a pytree whose leaves are its arrays.

    Example:
        >>> import tnsim
        >>> tnsim.GaussianClosure().name, tnsim.GaussianClosure().is_exact(2)
        ('closure', False)

    Source:
        Paper, section 2.2: a metric is the `Lambda` that joins the input legs of two models.
    """

    @property
    def name(self) -> str:
        """Name in a single word, for results and the command line."""
        ...

    @property
    def pairs_within_model(self) -> bool:
        """Whether legs of the same model may be joined with each other.

        If so, legs may be handed to the mean as well, and the moments and the mean of each model
        alone are computed along with the moments between models.
        """
        ...

    def is_exact(self, nonlinear_layers: int) -> bool:
        """Whether the computed value is exact by the definition of the metric.

        Args:
            nonlinear_layers: Number of nonlinear layers in the deeper model.
        """
        ...


class LayerwiseMetric(Metric, Protocol):
    """A metric that joins the legs of a layer of the bra with the legs of a layer of the ket.

    Source:
        Paper, appendices A.2 and A.3: a single layer of the Gram recursion.
    """

    @property
    def rule(self) -> PairingRule:
        """The rule by which the legs of two layers are joined."""
        ...


@runtime_checkable
class FiniteMetric(Metric, Protocol):
    """A metric that is a finite measure: `sum_i w_i <a(x_i), b(x_i)>`.

    No legs are joined, so the value of `pairs_within_model` does not matter.

    Example:
        A coin whose sides are the inputs -1 and 1.

        >>> import numpy as np, tnsim
        >>> from tnsim.metrics.protocol import Rule, product_rule
        >>> class Coin:
        ...     name = "coin"
        ...     pairs_within_model = False
        ...     def is_exact(self, nonlinear_layers):
        ...         return True
        ...     def points(self, reading):
        ...         side = Rule(np.array([-1.0, 1.0]), np.log([0.5, 0.5]))
        ...         return product_rule([side] * reading.d_in)
        >>> line = tnsim.Model([tnsim.Linear([[1.0]], [1.0])])
        >>> print(f"{tnsim.inner(line, line, Coin()):.3f}")
        2.000

    Source:
        Paper, section 2.2, with `Lambda = sum_i w_i x_i (x) ... (x) x_i`.
    """

    def points(self, reading: Reading) -> Points:
        """Inputs and their weights.

        Args:
            reading: Inputs that the models under comparison read.

        Raises:
            ModelError: The measure has no inputs of this form.
        """
        ...


def joins_layers(metric: Any) -> TypeGuard[LayerwiseMetric]:
    """Whether a metric joins legs layer by layer.

    Example:
        >>> import tnsim
        >>> joins_layers(tnsim.TreeSymmetric()), joins_layers(tnsim.Symmetric())
        (True, False)
    """
    return isinstance(getattr(metric, "rule", None), PairingRule) and isinstance(metric, Metric)


def adds_up(metric: Any) -> TypeGuard[FiniteMetric]:
    """Whether a value is a `FiniteMetric`; of metrics without points `isinstance` takes 34 µs.

    Example:
        >>> import tnsim
        >>> adds_up(tnsim.Categorical()), adds_up(tnsim.TreeSymmetric())
        (True, False)
    """
    return getattr(metric, "points", None) is not None and isinstance(metric, Metric)


def points_for(metric: FiniteMetric, reading: Any) -> Points:
    """The points of a finite measure; a block that is none of its parts is refused as it is read.

    Args:
        metric: Metric, which may be a user's own.
        reading: Inputs that the models under comparison read, None for plain functions.

    Raises:
        ModelError: The measure has no points, or a block has NaN or infinite inputs, weights that
            are no logarithms of numbers, or another number of points than was asked for.

    Example:
        >>> import tnsim
        >>> points_for(tnsim.Empirical(np.eye(3)), None).count
        3
    """
    points: Any = metric.points(reading)
    count = points.count if isinstance(points, Points) else None
    if not isinstance(count, Integral) or count < 1:
        raise ModelError(
            f"the metric {metric.name} says at which inputs models run by tnsim.metrics.protocol."
            f"Points with one point at least, found {shown(points)}"
        )
    if points.replicates > count:
        raise ModelError(
            f"the metric {metric.name} has {points.replicates} replicates of {count} points"
        )
    return dataclasses.replace(points, block=partial(_checked_block, points))


def _checked_block(points: Points, start: int, stop: int) -> WeightedPoints:
    inputs, log_weights = points.block(start, stop)
    if points.continuations:  # beginnings of sequences, which are tnsim's own
        return WeightedPoints(inputs, log_weights)
    what = f"points {start} to {stop - 1} of a measure"
    inputs, log_weights = np.asarray(inputs), np.asarray(log_weights)
    count = stop - start
    if inputs.shape[:1] != (count,) or log_weights.shape != (count,):
        raise ModelError(
            f"{what} were asked for, and its block has inputs {inputs.shape} and weights "
            f"{log_weights.shape}"
        )
    if {inputs.dtype.kind, log_weights.dtype.kind} - set("biuf"):
        raise ModelError(
            f"{what} are real numbers and so are the logarithms of their weights, found "
            f"{inputs.dtype} and {log_weights.dtype}"
        )
    if not np.isfinite(inputs).all():
        raise ModelError(f"{what} have NaN or infinite inputs")
    if not (log_weights < np.inf).all():  # as no NaN is
        raise ModelError(
            f"{what} have the logarithm {log_weights.max()} among their weights: weights are "
            "finite and not below zero, and their logarithms numbers or -inf"
        )
    return WeightedPoints(inputs, log_weights)
