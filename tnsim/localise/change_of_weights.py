"""The change of any network, split by whose weights a component has.

Components are groups of weight tensors. Of a network that is no polynomial they have no function of
their own to interpolate, so the weights themselves are switched from those of A to those of B
(`switched_weights`), f(0) = A and f(1) = B. With `theta(s) = theta_A + s Delta`,

    f_B - f_A = integral over s from 0 to 1 of sum_k J_k Delta_k,    J_k = d f / d theta_k,

so that with d = f_B - f_A on the inputs

    share_k = integral of <Delta_k, J_k^T d> ds / |d|^2

sums to 1: one way back at a node of s serves all components at once. A score L in the place of
`<f, d>` gives shares of `L_B - L_A`. Weights may only be exchanged between networks of one lineage,
whose hidden units stand in one order.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Float

from tnsim.compare.by_points import points_of
from tnsim.compare.request import check_comparison
from tnsim.engine.runtime import execution
from tnsim.errors import CaveatWarning, ModelError, ResultError, TnsimError, TooLarge, first_few
from tnsim.localise.differences import ONE_FUNCTION, Batch, Split, Unchanged
from tnsim.localise.switched_models import Setting, one_less_cosine, rises_as_drawn
from tnsim.localise.switched_weights import (
    Between,
    SwitchedNetwork,
    Switches,
    check_is_whole,
    more_than_weights,
    switched_network,
)
from tnsim.metrics.finite_measures import Empirical
from tnsim.metrics.metric import GaussianEstimate
from tnsim.metrics.protocol import WeightedPoints
from tnsim.models.arrays import is_count
from tnsim.models.forward import outputs_on
from tnsim.models.functions import is_function
from tnsim.models.model import Model, caveats, check_untraced, with_dense_matrices
from tnsim.problems.at_points import BATCH_BYTES, groups

GROUPINGS = ("module", "block", "parameter")
"""Values of `by` that group weights."""
_FEWEST_STEPS, _MOST_STEPS = 4, 128
"""Steps between the nodes of an integral, each number twice the one before."""
CLOSE = 1e-3
"""Error of shares at which an integral counts as found."""
_MOST_ROWS = 1024
"""Most inputs of a batch."""
_MOST_KEPT = 2**31
"""Most bytes of outputs that are kept instead of computed again."""
_ROUNDING = 1e3
"""Relative rounding of outputs, in units of the last place."""
_MOST_GROUPS = 8
"""Most groups of draws."""
_running = threading.RLock()
"""Held while a network has its switches: threads may read two measures of one change at once."""
_PARAMETRIZED = "parametrizations"
"""Name under which PyTorch keeps what a weight of a module is computed from."""


def groups_of(
    names: Sequence[str], by: str | int | Sequence[str]
) -> dict[str, Float[np.ndarray, " parameters"]]:
    """Weight tensors in groups, the components.

    Args:
        names: Dotted names of weight tensors, such as `h.0.attn.c_attn.weight`.
        by: Granularity: `"module"` for what stands directly inside of a numbered block, such as
            `h.0.attn`, and for whole modules elsewhere; `"block"` for numbered blocks;
            `"parameter"` for tensors; a number for as many parts of the name; or beginnings of
            names.

    Returns:
        For each component, in the order of the network, which weights are its own. Weights below
        none of the given names are one component, `others`.

    Raises:
        ModelError: `by` has another value, or a name begins no weight.

    Example:
        >>> names = ["wte.weight", "h.0.attn.q.weight", "h.0.attn.q.bias", "h.0.mlp.fc.weight"]
        >>> list(groups_of(names, "module")), list(groups_of(names, "block"))
        (['wte', 'h.0.attn', 'h.0.mlp'], ['wte', 'h.0'])
        >>> list(groups_of(names, ["h.0.attn"]))
        ['others', 'h.0.attn']
        >>> list(groups_of(["0.bias", "0.parametrizations.weight.original0"], "module"))
        ['0']
    """
    chosen, rest = None, ""
    if isinstance(by, Iterable) and not isinstance(by, str | bytes):
        chosen = list(map(str, by))
    if chosen is not None:
        for beginning in chosen:
            if not any(_is_below(name, beginning) for name in names):
                raise ModelError(
                    f"by names {beginning!r}, which begins no weight of the network: its weights "
                    f"are {first_few(names, 8)}"
                )
        # A module may have the name of the rest itself.
        rest = "all others" if "others" in chosen else "others"
    if chosen == [] or (chosen is None and not (is_count(by) or by in GROUPINGS)):
        raise ModelError(
            f"by must be one of {', '.join(GROUPINGS)}, a number of parts of names, or a list of "
            f"beginnings of names, found {by!r}"
        )
    found: dict[str, np.ndarray] = {}
    for n, name in enumerate(names):
        if chosen is not None:
            fitting = [beginning for beginning in chosen if _is_below(name, beginning)]
            label = max(fitting, key=len, default=rest)
        else:
            label = _group_of(name, by)
        found.setdefault(label, np.zeros(len(names)))[n] = 1.0
    return found


def _is_below(name: str, beginning: str) -> bool:
    return name == beginning or name.startswith(f"{beginning}.")


def _group_of(name: str, by: Any) -> str:
    if by == "parameter":
        return name
    *path, _ = name.split(".")
    if _PARAMETRIZED in path[1:]:
        path = path[: path.index(_PARAMETRIZED, 1)]
    if isinstance(by, int):
        path = path[:by]
    else:
        numbers = [n for n, part in enumerate(path) if part.isdigit()]
        if numbers:
            path = path[: numbers[0] + (2 if by == "module" else 1)]
    return ".".join(path) or name


class OnInputs:
    """A lineage of networks that run on inputs.

    Args:
        network: Network with switches.
        ends: The two networks.
        setting: Metric, precision and budget.
        of: Measure that is split, `"distance"` or `"similarity"`.

    Attributes:
        names: Names of the weight tensors.
        how: What the networks run on, in words.
        length: The norm of B.
        total: The measure between both networks.
    """

    def __init__(
        self, network: SwitchedNetwork, ends: tuple[Any, Any], setting: Setting, of: str
    ) -> None:
        self.network, self.names, self.of = network, network.names, of
        metric: Any = setting.metric  # `Empirical`, as functions are compared on inputs alone
        normal = "normal " if isinstance(metric, GaussianEstimate) else ""
        self.how = f"on {len(metric.inputs):,} {normal}inputs"
        points: Any = points_of((), metric)
        few = points.block(0, min(4, points.count)).inputs
        for switch, given in enumerate(ends):
            network.switch(np.full(len(self.names), switch))
            runs = [(few, network.outputs(few))]
            check_is_whole(network, given, metric.output, switch, runs, True)
        # Every group has ways back of its own, so groups of draws are few: standard errors are
        # known to a quarter of themselves.
        bounds = groups(points)
        several = math.ceil(len(bounds) / _MOST_GROUPS)
        self.points = points
        self.bounds = [
            (bounds[n][0], bounds[min(n + several, len(bounds)) - 1][1])
            for n in range(0, len(bounds), several)
        ]
        row = max(1.0, network.bytes_of_row(few))
        room = setting.budget.room(0, row)
        if row > room:
            raise TooLarge(
                f"a way back through the network takes {row / 2**30:.3g} GiB for a single input, "
                f"and the budget is {room / 2**30:.3g} GiB; use shorter inputs or a larger "
                "tnsim.Budget"
            )
        self.rows = int(max(1, min(_MOST_ROWS, BATCH_BYTES / row, room / row)))
        # Outputs of both ends are kept where they fit: made anew, shares take 1.6 times as long.
        self.room = min(_MOST_KEPT, room / 2)
        self.kept: dict[tuple[int, float], np.ndarray] = {}
        self.zeros, self.ones = np.zeros(len(self.names)), np.ones(len(self.names))
        for switch, given in enumerate(ends):
            # A setting may act on a few inputs alone.
            check_is_whole(network, given, metric.output, switch, self._runs(switch), False)
        sums = self._sums(self.zeros, self.ones)
        self.total, squares = self._measured(sums), sums[:, 3].sum()
        check_finite([self.total, squares])
        vanished = max(self.total, squares) < float(np.finfo(np.float64).tiny)
        if vanished and any(batch.values.any() for batch in self.differences()):
            raise TnsimError(
                "the outputs of the networks are so small that their squares are below the range "
                "of floats: scale what both give by one factor"
            )
        self.length = np.sqrt(squares)
        # |b - a|^2 that is left of equal outputs by rounding.
        rounding = (_ROUNDING * float(np.finfo(setting.dtype).eps)) ** 2
        least = rounding * squares if of == "distance" else rounding / 2
        if 0 < self.total <= least:
            raise Unchanged(
                "the networks differ by less than rounding on these inputs: there is no change to "
                "split"
            )

    def _batches(self) -> Iterator[tuple[int, int, WeightedPoints]]:
        """Number of the group, number of the first input, and inputs with their weights."""
        for group, (start, stop) in enumerate(self.bounds):
            for first in range(start, stop, self.rows):
                yield group, first, self.points.block(first, min(first + self.rows, stop))

    def _runs(self, switch: int) -> Iterator[tuple[Any, np.ndarray]]:
        """All inputs in batches, and the outputs of the first or the second network."""
        for _, number, batch in self._batches():
            switches = (self.zeros, self.ones)[switch]
            yield batch.inputs, self._outputs(switches, number, batch.inputs)

    def _outputs(self, switches: Switches, number: int, inputs: Any) -> np.ndarray:
        end = _end(switches)
        with _running:
            if end is not None and (number, end) in self.kept:
                return self.kept[number, end]
            self.network.switch(switches)
            outputs = self.network.outputs(inputs)
            if end is not None and outputs.nbytes <= self.room:
                self.room -= outputs.nbytes
                self.kept[number, end] = outputs
        return outputs

    @np.errstate(over="ignore", invalid="ignore")  # squares beyond floats are refused by name
    def _sums(self, first: Switches, second: Switches) -> Float[np.ndarray, "groups 5"]:
        """`|y - x|^2`, `<y - x, y + x>`, `|x|^2`, `|y|^2` and `<x, y>` of the outputs x and y."""
        found = np.zeros((len(self.bounds), 5))
        for group, number, batch in self._batches():
            x = self._outputs(first, number, batch.inputs)
            y = self._outputs(second, number, batch.inputs)
            weights, d = _of_rows(batch, x), y - x
            factors = (d, d), (d, y + x), (x, x), (y, y), (x, y)
            found[group] += [float((weights * one * other).sum()) for one, other in factors]
        return found

    def measure(self, first: Switches, second: Switches) -> float:
        """How far apart two networks of the lineage are."""
        return self._measured(self._sums(first, second))

    def _measured(self, sums: Float[np.ndarray, "groups 5"]) -> float:
        differing, longer, shorter, ones, _ = map(float, sums.sum(axis=0))
        if self.of == "distance":
            return differing
        if not (shorter and ones):
            raise ModelError("a network is zero on all inputs, so its similarity is undefined")
        return one_less_cosine(differing, longer, math.sqrt(shorter), math.sqrt(ones))

    def differences(self) -> Iterator[Batch]:
        """Outputs of B less those of A on all inputs."""
        for _, number, batch in self._batches():
            x = self._outputs(self.zeros, number, batch.inputs)
            y = self._outputs(self.ones, number, batch.inputs)
            yield Batch(np.exp(batch.log_weights), y - x)

    def slopes(self, s: float) -> Float[np.ndarray, "groups weights"]:
        """Derivatives of what is split along B - A at a point of the path, by groups of draws."""
        at = np.full(len(self.names), s)
        if self.of == "similarity":
            sums = self._sums(at, self.ones)
            squares, products = sums[:, [2, 4]].sum(axis=0)
            if not squares:
                raise ResultError("a network between the two is zero; use of='distance'")
            # The gradient of <f, b> / (|f| |b|) by f is b / (|f| |b|) - f <f, b> / (|f|^3 |b|).
            by_end = 1 / (np.sqrt(squares) * self.length)
            by_itself = products * by_end / squares
        found = np.zeros((len(self.bounds), len(self.names)))
        of_norm = np.zeros(len(self.names))
        for group, number, batch in self._batches():
            end = self._outputs(self.ones, number, batch.inputs)
            if self.of == "distance":
                target, own = end - self._outputs(self.zeros, number, batch.inputs), 0.0
            else:
                target, own = end * by_end, by_itself
            weights = _of_rows(batch, end)
            self.network.switch(at)
            cotangent = partial(_cotangent, weights, target, own)
            found[group] += self.network.slopes(batch.inputs, cotangent)
            if self.of == "similarity" and len(found) > 1:
                norm = partial(_cotangent, weights, 0.0, -1.0)
                of_norm += self.network.slopes(batch.inputs, norm)
        if len(found) == 1 or self.of == "distance":
            return found
        apart = sums[:, 4] * by_end - sums[:, 2] * by_itself
        return rises_as_drawn(found, apart, of_norm, sums[:, 2])


def _cotangent(
    weights: np.ndarray, target: np.ndarray | float, own: float, outputs: np.ndarray
) -> np.ndarray:
    return weights * (target - own * outputs)


def _end(switches: Switches) -> float | None:
    """0 or 1 for the switches of the first or the second network, None for others."""
    return next((end for end in (0.0, 1.0) if (switches == end).all()), None)


def _of_rows(batch: WeightedPoints, outputs: np.ndarray) -> np.ndarray:
    """The weights of inputs, in the shape of their outputs."""
    return np.exp(batch.log_weights).reshape(-1, *(1,) * (outputs.ndim - 1))


class ByScore:
    """A lineage whose networks have a score, such as a loss on data of the caller's.

    Its measure is a difference of scores; they have no norm, so that `length` is NaN.

    Args:
        network: Network with switches.
        ends: The two networks.
        of: Function of the network that returns the score.
        dtype: Precision of the computation.

    Attributes:
        names: Names of the weight tensors.
        how: What the networks are measured by, in words.
        total: The score of B less that of A.
    """

    def __init__(
        self, network: SwitchedNetwork, ends: tuple[Any, Any], of: Callable[[Any], Any], dtype: str
    ) -> None:
        self.network, self.names, self.score = network, network.names, of
        self.how, self.length = "scored by a function", math.nan
        both = [np.full(len(self.names), end) for end in (0.0, 1.0)]
        self.ends = {end[0]: self._score_at(end) for end in both}
        alike = math.sqrt(np.finfo(dtype).eps)
        for switch, given in enumerate(ends):
            # A network between itself and itself has its own settings and code.
            own, found = switched_network(given, given, None, dtype).score(of), self.ends[switch]
            # A score that is zero for one of both, as a distance from it, has rounding alone there.
            if abs(found - own) > alike * max(map(abs, (own, *self.ends.values()))):
                raise more_than_weights(switch, network.merged[switch])
        self.total = self.measure(*both)

    def _score_at(self, switches: Switches) -> float:
        with _running:
            self.network.switch(switches)
            return self.network.score(self.score)

    def measure(self, first: Switches, second: Switches) -> float:
        """The score of the second network less that of the first."""
        values = []
        for switches in (first, second):
            end = _end(switches)
            values.append(self._score_at(switches) if end is None else self.ends[end])
        return values[1] - values[0]

    def slopes(self, s: float) -> Float[np.ndarray, "1 weights"]:
        """Derivatives of the score along B - A at a point of the path."""
        self.network.switch(np.full(len(self.names), s))
        return self.network.slopes_of_score(self.score)[None]


def all_numbers(model: Model) -> Model:
    """A model with every number as an array, so that all of them count as weights.

    The skip and the scale of a residual are plain floats, and change the function as weights do.

    Example:
        >>> import tnsim
        >>> layer = tnsim.Residual(tnsim.Linear([[1.0]]), 0.5)
        >>> all_numbers(tnsim.Model([layer])).layers[0].skip
        array(0.5)
    """
    return jax.tree.map(lambda leaf: np.asarray(leaf, getattr(leaf, "dtype", np.float64)), model)


def with_equal_biases(a: Model, b: Model) -> tuple[Model, Model]:
    """Two models with zeros for each bias that the other one alone has.

    A bias of zeros, as most begin a training, is none in a model that was read.

    Args:
        a, b: Models, which are returned as they are where more than biases differ.

    Example:
        >>> import tnsim
        >>> a, b = (tnsim.Model([tnsim.Linear([[1.0]], bias)]) for bias in (None, [2.0]))
        >>> with_equal_biases(a, b)[0].layers[0].bias
        array([0.])
    """

    def is_none(leaf: Any) -> bool:
        return leaf is None

    def filled(path: Any, one: Any, two: Any) -> Any:
        is_missing = one is None and two is not None and "bias" in jax.tree_util.keystr(path)
        return np.zeros_like(two) if is_missing else one

    if jax.tree.structure(a, is_leaf=is_none) != jax.tree.structure(b, is_leaf=is_none):
        return a, b
    both = partial(jax.tree_util.tree_map_with_path, filled, is_leaf=is_none)
    return both(a, b), both(b, a)


class OfModels:
    """A lineage of models with one hidden layer of activations, compared by exact inner products.

    Args:
        a, b: Models of equal layers.
        setting: Metric, precision and budget.
        of: Measure that is split, `"distance"` or `"similarity"`.

    Attributes:
        names: Names of the weight tensors.
        how: What the models are compared by, in words.
        total: The measure between both models.
    """

    def __init__(self, a: Model, b: Model, setting: Setting, of: str) -> None:
        self.b, self.of, self.how = b, of, "compared by exact inner products"
        self.setting = setting
        self.form = jax.tree.structure(b)
        if jax.tree.structure(a) != self.form:  # an activation is no weight
            raise more_than_weights(0)
        self.between = Between.of(all_numbers(a), all_numbers(b))
        self.names = self.between.names
        self.difference = b - a
        self.total = self.measure(np.zeros(len(self.names)), np.ones(len(self.names)))

    @property
    def length(self) -> float:
        """The norm of B."""
        return self.setting.squared_norm(self.b) ** 0.5

    def _model(self, switches: Any) -> Model:
        return jax.tree.unflatten(self.form, self.between.at(switches))

    def measure(self, first: Switches, second: Switches) -> float:
        """How far apart two models of the lineage are."""
        return self.setting.measure(self._model(first), self._model(second), self.of)

    def slopes(self, s: float) -> Float[np.ndarray, "1 weights"]:
        """Derivatives of what is split along B - A at a point of the path."""

        def value(switches: Any) -> Any:
            model = self._model(switches)
            if self.of == "distance":
                return self.setting.inner(model, self.difference)
            return self.setting.similarity(model, self.b)

        with warnings.catch_warnings(), execution.precision():
            warnings.simplefilter("ignore", CaveatWarning)
            return np.asarray(jax.grad(value)(np.full(len(self.names), s)), np.float64)[None]


Lineage: TypeAlias = OnInputs | ByScore | OfModels
"""Two networks of one lineage, and all between them."""


def integral_of_weights(
    lineage: Lineage, components: Float[np.ndarray, "weights components"]
) -> tuple[Float[np.ndarray, "groups components"], float]:
    """Derivatives along B - A, integrated along the straight path of weights.

    Twice as many steps keep every node, and are taken until neither the sum misses the total nor
    any component moves by more than `CLOSE` of it, up to 128 steps. A sum alone may be met by
    chance.

    Args:
        lineage: The two networks, and those between them.
        components: Which weights are those of each component.

    Returns:
        The integral by groups of draws and components, and its error relative to the total: how far
        the sum misses it, or a component moved at the last doubling.
    """
    slopes: dict[int, np.ndarray] = {}
    found: Any = np.inf
    count = _FEWEST_STEPS
    while True:
        before, found = found, 0.0
        for n, (t, weight) in enumerate(zip(*_nested_nodes(count), strict=True)):
            # A node is known by its place among those of the most steps, which nest all others.
            place = n * (_MOST_STEPS // count)
            if place not in slopes:
                slopes[place] = lineage.slopes(t) @ components
            found = found + weight * slopes[place]
        check_finite(found)
        missed = abs(found.sum() - lineage.total)
        moved = abs((found - before).sum(axis=0)).max()
        error = float(max(missed, moved) / abs(lineage.total))
        if error <= CLOSE or count == _MOST_STEPS:
            return found, error
        count *= 2


def _nested_nodes(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of Clenshaw and Curtis on [0, 1]; twice as many steps keep every node.

    Args:
        count: Number of steps between the nodes, even.

    Example:
        >>> nodes, weights = _nested_nodes(2)
        >>> nodes.round(9).tolist(), (6 * weights).round(9).tolist()
        ([0.0, 0.5, 1.0], [1.0, 4.0, 1.0])

    Source:
        Clenshaw and Curtis, 1960, "A method for numerical integration on an automatic computer".
    """
    angles = np.pi * np.arange(count + 1) / count
    # The interpolation by cos(j angle) is integrated term by term: over [0, 1] an odd j gives 0,
    # and j = 2 k gives 1 / (1 - 4 k^2).
    k = np.arange(1, count // 2 + 1)
    by_cosine = np.where(k == count // 2, 1.0, 2.0) / (4.0 * k**2 - 1)
    weights = (1 - np.cos(2 * np.outer(angles, k)) @ by_cosine) / count
    weights[[0, -1]] /= 2
    return (1 - np.cos(angles)) / 2, weights


def check_finite(values: Any) -> None:
    """Refuse numbers that are NaN or infinite.

    Raises:
        TnsimError: A number is not finite.

    Example:
        >>> check_finite(np.ones(2))
    """
    if not np.isfinite(values).all():
        raise TnsimError(
            "a change is NaN or infinite: outputs, a score or their derivatives are beyond floats "
            "between the two networks, as of a root or a logarithm at 0"
        )


class WeightsExchanged(NamedTuple):
    """Two networks of which groups of weights are exchanged.

    Args:
        lineage: The two networks, and those between them.
        labels: Labels of the components.
        groups: For each component, which weights are its own.
        caveats: Differences between the models and the networks they were read from.
    """

    lineage: Lineage
    labels: tuple[str, ...]
    groups: tuple[Float[np.ndarray, " weights"], ...]
    caveats: tuple[str, ...]

    @property
    def how(self) -> str:
        """How weights are exchanged, in words."""
        return f"weights exchanged, {self.lineage.how}"

    @property
    def length(self) -> float:
        """The norm of b."""
        return self.lineage.length

    def split(self) -> Split:
        """The change from a to b, split by component.

        Raises:
            Unchanged: Both are one function.
        """
        total = self.lineage.total
        slopes, error = integral_of_weights(self.lineage, np.stack(self.groups, axis=1))
        share = slopes.sum(axis=0) / total
        if error <= CLOSE:
            return Split(slopes, share, total)
        doubt = (
            f"shares, which sum to {share.sum():.4g}, are known to {error:.1g} only, as the path "
            f"of weights between the networks is too rough for {_MOST_STEPS + 1} nodes: split the "
            "change at a checkpoint in between"
        )
        return Split(slopes, share, total, doubts=(doubt,))

    def swapped(self, put_back: bool, total: float) -> Float[np.ndarray, " components"]:
        """The measure between b and b with one component of a, or between a and a with one of b.

        Args:
            put_back: Whether components of a are put into b.
            total: Unused here, see `FunctionsExchanged.swapped`.
        """
        here = np.full(len(self.lineage.names), float(put_back))
        found = [self.lineage.measure(here, abs(here - group)) for group in self.groups]
        check_finite(found)
        return np.array(found)

    def gram(
        self, total: float, share: Float[np.ndarray, " components"]
    ) -> Float[np.ndarray, "components components"]:
        """Refuse inner products of the parts of the change, which are no functions here."""
        raise ModelError(
            "inner products of parts are computed for polynomials, whose parts are functions: of "
            "other networks read `share`, `removed` and `alone`"
        )

    def differences(self) -> Iterator[Batch]:
        """Outputs of b less those of a on the inputs of the metric."""
        if not isinstance(self.lineage, OnInputs):
            raise ModelError(
                "where on the inputs a change is, is asked of functions on inputs: give "
                f"tnsim.Empirical(inputs), and no score; found networks {self.lineage.how}"
            )
        return self.lineage.differences()


def exchange_weights(a: Any, b: Any, setting: Setting, by: Any, of: Any) -> WeightsExchanged:
    """Two networks, different ones, and the weights of every component.

    Args:
        a, b: Networks, or models.
        setting: Metric, precision and budget.
        by: Grouping of weights, as for `change`.
        of: Measure, or a function that scores.

    Raises:
        Unchanged: Both measure the same.
    """
    metric = setting.metric
    said: tuple[str, ...] = ()
    are_models = not is_function(a)
    if are_models:
        said, by = caveats(a, b), "block"
        a, b = with_equal_biases(a, b)
    if not callable(of):
        check_comparison(a, b, metric)
    if isinstance(metric, Empirical) and are_models:
        a, b = (Partial(outputs_on, all_numbers(with_dense_matrices(model))) for model in (a, b))
    if is_function(a):
        network = switched_network(a, b, getattr(metric, "output", None), setting.dtype)
        if callable(of):
            lineage = ByScore(network, (a, b), of, setting.dtype)
        else:
            lineage = OnInputs(network, (a, b), setting, of)
    else:
        check_untraced("change", a, b, metric)
        lineage = OfModels(a, b, setting, str(of))
    check_finite(lineage.total)
    if lineage.total == 0:
        what = f"have one {name_of(of)}" if callable(of) else f"are {ONE_FUNCTION[of]}"
        what += " on these inputs" if isinstance(lineage, OnInputs) else ""
        raise Unchanged(f"the networks {what}: there is no change to split")
    parts = groups_of(lineage.names, "module" if by is None else by)
    # Modules are found by the names that they have, layers of models by their numbers.
    labels = tuple(x.replace("layers.", "layer ", 1) if are_models else x for x in parts)
    return WeightsExchanged(lineage, labels, tuple(parts.values()), said)


def name_of(of: Any) -> str:
    """The name of a measure, or of a function that scores.

    Example:
        >>> name_of("distance"), name_of(len)
        ('distance', 'len')
    """
    return getattr(of, "__name__", "score") if callable(of) else of
