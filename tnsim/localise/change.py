"""The change from one network to another, split by component.

Between polynomials a and b every component is interpolated as a function (`models.components`),
f(0) = a and f(1) = b; between other networks the weights of components are (`change_of_weights`).
Three numbers answer three questions about a component c:

    share     <delta_c, b - a> / |b - a|^2   how much of the change it made, together with others
    removed   |b - b with c of a|^2          what breaks without it
    alone     |a with c of b - a|^2          what it does by itself

with delta_c after Aumann and Shapley (`slopes`). Shares sum to 1, and `delta_c` to b - a as
functions; the other two add up only where components do not interact.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, overload

import numpy as np
from jax.tree_util import Partial
from jaxtyping import Float
from numpy.polynomial.legendre import legvander
from numpy.typing import DTypeLike

from tnsim.checkpoints.given import folders_of_networks, is_path_or_paths, read_model
from tnsim.checkpoints.load import load
from tnsim.compare.by_plans import same_weights
from tnsim.compare.numbers import jackknife_error
from tnsim.compare.request import Comparable, check_comparison, comparables, estimated, with_metric
from tnsim.engine import precision
from tnsim.engine.budget import Budget
from tnsim.engine.ir.dtypes import dtype_name
from tnsim.engine.precision import Arithmetic
from tnsim.errors import CaveatWarning, ModelError, ResultError, warn
from tnsim.localise.change_of_weights import (
    CLOSE,
    ByScore,
    Lineage,
    OfModels,
    OnInputs,
    Unchanged,
    check_finite,
    groups_of,
    integral_of_weights,
)
from tnsim.localise.differences import Batch, by_input, directions
from tnsim.localise.grams import Setting, check_bilinear
from tnsim.localise.runs import Run, checkpoints_of, largest, table_of_run
from tnsim.localise.slopes import (
    Family,
    Nodes,
    certified,
    exact_nodes,
    gram_of_parts,
    integral,
    nodes,
    slope,
)
from tnsim.localise.switched_weights import switched_network
from tnsim.metrics.empirical import Empirical
from tnsim.metrics.metric import Gaussian, as_metric
from tnsim.metrics.points import Points
from tnsim.metrics.protocol import Metric
from tnsim.models.arrays import as_array, in_float64
from tnsim.models.checks import check_untraced
from tnsim.models.components import (
    GRANULARITIES,
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
from tnsim.models.forward import as_read, plain_forward
from tnsim.models.functions import is_function
from tnsim.models.model import Model, caveats, with_dense_matrices
from tnsim.models.origin import warn_of_caveats
from tnsim.options import checked
from tnsim.tables import html_table

if TYPE_CHECKING:
    import xarray as xr

TOTALS = {"distance": "|b - a|^2", "similarity": "1 - similarity"}
"""Values of `of`, and what they are measures of."""
_SAMPLED = 32
"""Most values of a polynomial from which all others are made."""
_Values: TypeAlias = tuple[np.ndarray, ...]
"""Inner products at nodes and their derivatives, see `_norm_and_product`."""
_CLOSE = 1e-9
"""Error of a sum of shares at which an integral that is not polynomial counts as found."""
_SHOWN = 8
"""Most components of a table in a notebook."""
_ROWS = 1024
"""Inputs of a batch of forward passes of models."""
_NO_LINEAGE = (
    "putting back any single component moves the function further than the whole change did: the "
    "two are no checkpoints of one network, or hidden units moved, so that exchanged weights mean "
    "little; compare parts by tnsim.parts, or heads by tnsim.heads"
)


class _Exchanges(Protocol):
    """Two networks whose components are exchanged, as far as a `Change` asks them."""

    def swapped(self, of: str, put_back: bool) -> Float[np.ndarray, " components"]:
        """The measure between b and b with one component of a, or between a and a with one of b."""
        ...

    def gram(self, total: float) -> Float[np.ndarray, "components components"]:
        """Inner products of the parts of the change."""
        ...

    def differences(self) -> Iterator[Batch]:
        """Outputs of b less those of a on the inputs of the metric."""
        ...


class _Pair(NamedTuple):
    """Two models whose components are exchanged.

    Args:
        a: First model, with the linear layers of b unless they are components too.
        b: Second model, in the basis of the first.
        parts: Components.
        setting: Metric, precision and budget.
        points: Points of the comparison; None along a plan.
    """

    a: Model
    b: Model
    parts: tuple[Component, ...]
    setting: Setting
    points: Points | None

    def certified(self, target: float, power: int) -> tuple[_Pair, float]:
        """The pair in float64 where float32 leaves few digits, and the error in float32 else.

        Args:
            target: Squared norm that results are relative to.
            power: Number of factors in a result whose rounding is enlarged.
        """
        models = self.a, self.family.at(0.5), self.b
        setting, points, error = certified(
            self.family, models, target, self.setting, self.points, power
        )
        return self._replace(setting=setting, points=points), error

    @property
    def family(self) -> Family:
        """The interpolated models, f(0) = a and f(1) = b."""
        # Degree of the states in t: a layer of order n multiplies n states, and an interpolated
        # component adds one factor t.
        degree = 0
        for n, layer in enumerate(self.a.layers):
            degree = layer.order * degree + any(part.layer == n for part in self.parts)
        orders = [layer.order for layer in self.a.layers]
        alone = tuple(math.prod(orders[part.layer + 1 :]) for part in self.parts)
        return Family(_Interpolation(self.parts), (self.a, self.b), alone, degree)

    def swapped(self, of: str, put_back: bool) -> Float[np.ndarray, " components"]:
        """See `_Exchanges`."""
        here, there = (self.b, self.a) if put_back else (self.a, self.b)
        pairs = ((here, exchanged(here, there, part)) for part in self.parts)
        return np.array([self.setting.measure(x, y, of) for x, y in pairs])

    def gram(self, total: float) -> Float[np.ndarray, "components components"]:
        """See `_Exchanges`."""
        # Parts may be far larger than the change, by the factor that enlarges rounding in shares.
        pair, error = self.certified(total, 2)
        found = gram_of_parts(pair.family, pair.setting, pair.points)
        # Inner products of the parts sum to the total; what they miss is what cancellation took.
        missed = abs(found.sum() / total - 1)
        degree = max(pair.a.degree, pair.b.degree)
        arithmetic = Arithmetic(degree, pair.setting.dtype)
        precision.report(max(missed, error), "an inner product of parts", arithmetic)
        return found

    def differences(self) -> Iterator[Batch]:
        """See `_Exchanges`."""
        metric = self.setting.metric
        if not isinstance(metric, Empirical):
            raise ModelError(
                "where on the inputs a change is, is asked of inputs: give "
                f"tnsim.Empirical(inputs), found {metric.name}"
            )
        # Weights are float64 here, as they are in `total`, whatever a file holds.
        both, count = (in_float64(self.a), in_float64(self.b)), len(metric.inputs)
        for start in range(0, count, _ROWS):
            rows = metric.inputs[start : start + _ROWS]
            x, y = (np.asarray(_run_model(model, rows)) for model in both)
            yield Batch(np.full(len(rows), 1.0 / count), y - x)


class _Weights(NamedTuple):
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

    def swapped(self, of: str, put_back: bool) -> Float[np.ndarray, " components"]:
        """See `_Exchanges`."""
        here = np.full(len(self.lineage.names), float(put_back))
        found = [self.lineage.measure(here, abs(here - group)) for group in self.groups]
        check_finite(found)
        return np.array(found)

    def gram(self, total: float) -> Float[np.ndarray, "components components"]:
        """See `_Exchanges`."""
        raise ModelError(
            "inner products of parts are computed for polynomials, whose parts are functions: of "
            "other networks read `share`, `removed` and `alone`"
        )

    def differences(self) -> Iterator[Batch]:
        """See `_Exchanges`."""
        if not isinstance(self.lineage, OnInputs):
            raise ModelError(
                "where on the inputs a change is, is asked of functions on inputs: give "
                f"tnsim.Empirical(inputs), and no score; found networks {self.lineage.how}"
            )
        return self.lineage.differences()


@dataclass(frozen=True)
class _Interpolation:
    """The function from (a, b) and s to the interpolated model."""

    parts: tuple[Component, ...]

    def __call__(self, weights: tuple[Model, Model], s: Any) -> Model:
        return interpolated(*weights, s, self.parts)

    def outputs(self, weights: tuple[Model, Model], s: Any, inputs: Any) -> Any:
        return interpolated_outputs(*weights, s, self.parts, inputs)


@dataclass(frozen=True, eq=False)
class Change:
    """A change of a network, split by component.

    The measures beside `share` are computed when they are first read: `removed` and `alone` by one
    inner product or forward pass for every component, `matrix` by derivatives for every pair.

    Attributes:
        components: Labels of the components.
        share: Signed shares (components,), which sum to 1; along weights, each and their sum within
            a thousandth, or a caveat says how well they are known.
        total: Squared distance `|b - a|^2` in units of squared outputs, or `1 - similarity`, or the
            score of b less that of a.
        surroundings: The same measure of the change of linear layers alone, which are no components
            and taken from b on both sides; 0 with `ends=True`.
        of: Measure of the change, `distance` or `similarity`, or the name of the score.
        metric: Name of the metric; of a score its name.
        exact: Whether the metric's definition is met exactly and the shares are exact.
        standard_error: Standard errors of `share`; None where nothing was sampled.
        caveats: Differences between the models and the networks they were read from.
        how: How weights were exchanged and on which inputs, in words; empty for polynomials.
    """

    components: tuple[str, ...]
    share: Float[np.ndarray, " components"]
    total: float
    surroundings: float
    of: str
    metric: str
    exact: bool
    standard_error: Float[np.ndarray, " components"] | None
    caveats: tuple[str, ...]
    how: str
    _exchanges: _Exchanges = field(repr=False)

    @cached_property
    def removed(self) -> Float[np.ndarray, " components"]:
        """The measure between b and b with one component put back: what breaks without it.

        Of a score it is the score of b with one component put back, less that of b.
        """
        return self._exchanges.swapped(self.of, True)

    @cached_property
    def alone(self) -> Float[np.ndarray, " components"]:
        """The measure between a and a with one component of b: what it does by itself.

        Of a score it is the score of a with one component of b, less that of a.
        """
        return self._exchanges.swapped(self.of, False)

    @cached_property
    def matrix(self) -> Float[np.ndarray, "components components"]:
        """The inner products `<delta_c, delta_d>`, which sum to `total` for a distance.

        Raises:
            ModelError: The change is one of similarity or of a score, whose parts are no functions,
                or the networks are no polynomials.
        """
        if self.of != "distance":
            raise ModelError(
                f"a change of {self.of} has no parts with inner products; use of='distance'"
            )
        return self._exchanges.gram(self.total)

    @cached_property
    def by_input(self) -> Float[np.ndarray, "inputs *positions"]:
        """How much of `|b - a|^2` is on each input, and at each position of sequences.

        The sum is `|b - a|^2`, whatever measure was split. Inputs are those of `Empirical`, or the
        normal ones of an estimate.

        Raises:
            ModelError: The networks were compared by exact inner products, or by a score.
        """
        return by_input(self._exchanges.differences())

    @checked
    def directions(self, count: int = 4) -> xr.Dataset:
        """The directions of the outputs along which most of the change is, on the inputs.

        Args:
            count: Most directions.

        Returns:
            A Dataset over `direction`, that of the largest share first: the `share` of `|b - a|^2`,
            float64, which sums to 1 over all directions; unit vectors `output` (direction,
            coordinate); and `along` (direction, input, and position of sequences), in units of
            outputs, so that b - a is the sum over all directions of `along` times `output`.

        Raises:
            ModelError: The networks were compared by exact inner products or by a score, or `count`
                is no number from 1.
            TooLarge: The outputs on all inputs take more than 2 GiB.

        Example:
            >>> import numpy as np, tnsim
            >>> square = lambda w: tnsim.Residual(tnsim.Bilinear([[1.0]], [[1.0]], [[w]]))
            >>> a, b = (tnsim.Model([square(w)]) for w in (1.0, 2.0))
            >>> found = tnsim.change(a, b, tnsim.Empirical([[1.0], [2.0]]))
            >>> found.by_input.tolist(), found.directions().along.values.tolist()
            ([0.5, 8.0], [[1.0, 4.0]])
        """
        return directions(self._exchanges.differences(), count)

    def _repr_html_(self) -> str:
        guarantee = self.how or ("exact" if self.exact else "approximation or estimate")
        what = TOTALS.get(self.of, self.of)
        title = f"Change {what} = {self.total:.4g}, {self.metric} ({guarantee})"
        order = largest(self.share, len(self.share))
        rows = [(self.components[n], f"{self.share[n]:.4g}") for n in order]
        return html_table(title, rows, ("component", "share"))


@dataclass(frozen=True, eq=False)
class ChangeSeries:
    """The changes of a run from every checkpoint to the next.

    Attributes:
        labels: Labels of the later checkpoints.
        each: `Change` of every step; None where a step left the function as it was.
        components: Labels of the components.

    Example:
        >>> import tnsim
        >>> model = lambda w: tnsim.Model([tnsim.Residual(tnsim.Bilinear([[1.0]], [[1.0]], [[w]]))])
        >>> steps = tnsim.change({0: model(1.0), 10: model(1.0), 20: model(2.0)})
        >>> steps.labels, steps.share.tolist()
        ((10, 20), [[0.0], [1.0]])
    """

    labels: tuple[Any, ...]
    each: tuple[Change | None, ...]
    components: tuple[str, ...]

    @property
    def share(self) -> Float[np.ndarray, "steps components"]:
        """Signed shares, of which those of a step sum to 1; 0 where nothing changed."""
        return self._table(lambda found: found.share)

    @property
    def removed(self) -> Float[np.ndarray, "steps components"]:
        """The measure between a checkpoint and itself with one component of the one before."""
        return self._table(lambda found: found.removed)

    @property
    def total(self) -> Float[np.ndarray, " steps"]:
        """The measure of every step; 0 where nothing changed."""
        return np.array([0.0 if found is None else found.total for found in self.each])

    def _table(self, row: Callable[[Change], np.ndarray]) -> np.ndarray:
        nothing = np.zeros(len(self.components))
        return np.array([nothing if found is None else row(found) for found in self.each])

    def _repr_html_(self) -> str:
        totals = [f"{total:.4g}" for total in self.total]
        return table_of_run(
            "Shares of every change",
            self.labels,
            self.components,
            self.share,
            _SHOWN,
            [("change", totals)],
        )


@overload
def change(
    a: Comparable,
    b: Comparable,
    metric: Metric | str = Gaussian(),
    *,
    by: str | int | Sequence[str] | None = None,
    of: str | Callable[[Any], Any] = "distance",
    ends: bool = False,
    align: Any = None,
    n_ctx: int | None = None,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Change: ...


@overload
def change(
    a: Any,
    b: None = None,
    metric: Metric | str = Gaussian(),
    *,
    by: str | int | Sequence[str] | None = None,
    of: str | Callable[[Any], Any] = "distance",
    ends: bool = False,
    align: Any = None,
    n_ctx: int | None = None,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> ChangeSeries: ...


@checked(own="by")
def change(
    a: Any,
    b: Any = None,
    metric: Metric | str = Gaussian(),
    *,
    by: str | int | Sequence[str] | None = None,
    of: str | Callable[[Any], Any] = "distance",
    ends: bool = False,
    align: Any = None,
    n_ctx: int | None = None,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Change | ChangeSeries:
    """Split the change from one network to another by component, or every step of a run.

    Of polynomials, component functions are interpolated, never weights, so shares are exact and
    depend on what components compute: an order of hidden units, a scale moved from one factor to
    another, or a basis inside a head changes nothing. Components are matched by number, and both
    streams have one basis, as along a run.

    Of any other network (a module of PyTorch, a function of JAX that is a pytree of its weights, a
    model with activations) the weights of components are exchanged, which means something between
    checkpoints of one training run, fine-tunings and edits, not between two seeds. It runs on the
    inputs of `Empirical`, or on normal inputs under `Gaussian`. Shares are integrals along the
    straight path of weights, by one way back through the network for all components. `removed` asks
    what breaks where a component is put back, and mixes two checkpoints at their ends alone.

    Args:
        a, b: Models of equal layers, or modules of PyTorch and paths of files in the place of
            models; ranks may differ by layer. Or two networks with equal names of weights. Without
            b the checkpoints of a run: a `tnsim.load`, a folder or pattern of files or, on inputs,
            of folders of Hugging Face, a sequence or a mapping from labels, in their order.
        metric: Metric that weighs the inputs, or its name; any but `GaussianClosure`.
        by: Granularity of components. Of polynomials `"layer"`, `"head"` or `"unit"`, as for
            `components`. Of weights `"module"` for what stands inside of a numbered block (its
            attention, its norms) and other modules, `"block"`, `"parameter"`, a number for as many
            parts of a weight's dotted name, or beginnings of names. None for layers of models and
            for modules of other networks.
        of: Measure that is split: `"distance"` for `|b - a|^2`, `"similarity"` for
            `1 - similarity(a, b)`; or, of weights, a function of the network that returns a score,
            such as a loss on data of your own as a tensor.
        ends: Whether linear layers without a skip, such as embeddings, are components of
            polynomials as well. Otherwise the linear layers of b stand on both sides, see
            `Change.surroundings`.
        align: Change of basis of the stream of b: `"embedding"` for the rotation that takes its
            embedding nearest to that of a, or a square matrix; None where the bases are equal.
        n_ctx: Length of the sequences on which models with attention are compared, where neither
            the models nor the inputs of `Empirical` say it.
        dtype: Precision of the computation, float64 or float32; the result is float64.
        budget: Limits of memory and work for the computation.

    Returns:
        A `Change`: float64 shares, which sum to 1, and the total; of a run a `ChangeSeries`, which
        holds that of every checkpoint from the one before.

    Raises:
        ModelError: The layers or weights of the networks do not correspond, the networks are equal,
            the metric is no bilinear form of the model, or `inner` would raise it.
        UnsupportedLayer: A layer has an activation, where `by` names parts of polynomials.
        TooLarge: The integral takes more than 512 gradients, or the computation is beyond the
            budget.
        ResultError: The models differ by less than rounding.

    Warns:
        PrecisionWarning: Few digits of the shares are left.
        CaveatWarning: Shares along weights are known to less than a thousandth, or any exchange of
            weights breaks the function.

    Example:
        >>> import numpy as np, tnsim
        >>> def model(first, second):
        ...     square = lambda w: tnsim.Residual(tnsim.Bilinear([[1.0]], [[1.0]], [[w]]))
        ...     return tnsim.Model([square(first), square(second)])
        >>> found = tnsim.change(model(1.0, 1.0), model(1.0, 2.0))
        >>> found.components, found.share.round(9).tolist()
        (('layer 0', 'layer 1'), [0.0, 1.0])
        >>> round(found.total, 9) == round(float(found.removed[1]), 9)
        True

        Any module, on inputs:

        >>> import copy, torch
        >>> a = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
        >>> b = copy.deepcopy(a)
        >>> with torch.no_grad():
        ...     _ = b[2].weight.mul_(1.5)
        >>> found = tnsim.change(a, b, tnsim.Empirical(np.eye(3)))
        >>> found.components, found.share.round(3).tolist()
        (('0', '2'), [0.0, 1.0])

        Every step of a run:

        >>> run = [model(1.0, 1.0), model(1.0, 2.0), model(3.0, 2.0)]
        >>> tnsim.change(run).share.round(9).tolist()
        [[0.0, 1.0], [1.0, 0.0]]

    Source:
        Aumann and Shapley 1974, "Values of non-atomic games"; integrated gradients after
        Sundararajan et al. 2017, on functions of components, or on weights, in the place of inputs.
    """
    by = by.tolist() if isinstance(by, np.ndarray) else by  # equals nothing and is in no list
    options = {"by": by, "of": of, "ends": ends, "align": align, "n_ctx": n_ctx}
    options |= {"dtype": dtype, "budget": budget}
    metric = as_metric(metric)
    if b is None:
        return _changes(a, metric, options)
    return _change(a, b, metric, **options)


def _changes(run: Any, metric: Metric, options: Mapping[str, Any]) -> ChangeSeries:
    """The change of every checkpoint of a run from the one before, see `change`."""
    if isinstance(metric, Empirical) and (folders := folders_of_networks(run)):
        run = folders  # each runs on the inputs as it is read, two at a time
    elif is_path_or_paths(run):
        run = load(run, n_ctx=options["n_ctx"])
    if not isinstance(run, Run):
        raise ModelError(
            "change takes two networks, or the checkpoints of a run in the place of both, found "
            f"one {type(run).__name__}"
        )
    labels, checkpoints = checkpoints_of(run)
    if len(labels) < 2:
        raise ModelError(f"a run has two checkpoints or more, found {len(labels)}")
    # Two networks at a time: a run may be longer than memory.
    networks = iter(checkpoints)
    before, each = next(networks), []
    for after in networks:
        try:
            each.append(_change(before, after, metric, **options))
        except Unchanged:
            each.append(None)
        before = after
    known = [found.components for found in each if found is not None]
    if not known:
        raise ModelError("all checkpoints are the same function: there is no change to split")
    if any(names != known[0] for names in known):
        raise ModelError("the checkpoints have different components, so that no table holds them")
    return ChangeSeries(labels[1:], tuple(each), known[0])


def _change(
    a: Any,
    b: Any,
    metric: Metric,
    by: Any,
    of: Any,
    ends: bool,
    align: Any,
    n_ctx: int | None,
    dtype: DTypeLike,
    budget: Budget,
) -> Change:
    """The change between two networks, see `change`."""
    a, b, metric, exchanges_weights = _sides(a, b, metric, by, of, n_ctx)
    setting = Setting(metric, dtype_name(dtype), budget)
    if exchanges_weights:
        if ends or align is not None:
            raise ModelError(
                "ends= and align= are for polynomials: here every weight belongs to a component, "
                "and weights are exchanged as they are"
            )
        return _change_of_weights(a, b, setting, by, of)
    _check_measure(of)
    by = "layer" if by is None else by
    return _change_of_functions(a, b, setting, by, of, ends, align)


def _functions_exchanged(
    a: Any, b: Any, setting: Setting, by: Any, ends: bool, align: Any
) -> tuple[_Pair, Model]:
    """Two polynomials of one basis whose components are exchanged, and the first as it is."""
    check_bilinear(setting.metric)
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
    return _Pair(start, b, parts, setting, setting.points(start, middle, b)), a


def _change_of_functions(
    a: Any, b: Any, setting: Setting, by: Any, of: Any, ends: bool, align: Any
) -> Change:
    """The change of polynomials whose component functions are interpolated, see `change`."""
    metric = setting.metric
    pair, a = _functions_exchanged(a, b, setting, by, ends, align)
    start, b, parts = pair.a, pair.b, pair.parts
    exact_nodes(pair.family.degree)  # refused before anything is computed
    said = caveats(a, b)
    total = setting.measure(start, b, of)
    if total <= 0:
        raise Unchanged("the models are the same function: there is no change to split")
    # Shares are relative to |b - a|^2, those of a cosine to its own change in units of |b|.
    relative_to = total if of == "distance" else total**2 * setting.squared_norm(b)
    pair, error = pair.certified(relative_to, 1)
    if pair.setting is not setting:
        setting = pair.setting
        total = setting.measure(start, b, of)
    surroundings = 0.0 if start is a else setting.measure(a, start, of)
    if of == "distance":  # the inner products <delta_c, b - a>, by groups of draws
        difference: Any = by_differences(b - start, setting.dtype)
        at = exact_nodes(pair.family.degree)
        slopes = integral(pair.family, at, difference, setting, pair.points)
    else:
        slopes = _of_similarity(pair, total, _CLOSE + error)
    # The first axis are groups of draws, which are kept for the standard errors only.
    together = slopes.sum(axis=0)
    share = together / together.sum()
    arithmetic = Arithmetic(max(start.degree, b.degree), setting.dtype)
    # The parts sum to the total; by how much they miss it shows the digits that cancellation has
    # left.
    missed = abs(together.sum() / total - 1)
    precision.report(max(missed, error), "a share of the change", arithmetic)
    warn_of_caveats(said)
    exact = setting.exact(start, b) and of == "distance"
    labels = tuple(part.label for part in parts)
    spread = _jackknife(slopes)
    return Change(
        labels, share, total, surroundings, of, metric.name, exact, spread, said, "", pair
    )


def _check_measure(of: Any) -> None:
    if of not in TOTALS:
        raise ModelError(f"of must be one of {', '.join(TOTALS)}, or a function, found {of!r}")


def _sides(
    a: Any, b: Any, metric: Any, by: Any, of: Any, n_ctx: int | None
) -> tuple[Any, Any, Any, bool]:
    """Both networks, the metric, and whether weights are exchanged instead of functions.

    Polynomials have exact parts, so their weights are exchanged only where `by` or `of` asks.
    """
    if by in ("head", "unit") and not callable(of):
        return *comparables(a, b, metric, n_ctx), metric, False
    if by in (None, "layer") and not callable(of):
        given = a, b
        a, b, metric = with_metric(a, b, metric, n_ctx)
        functions = is_function(a), is_function(b)
        if any(functions) and not all(functions):
            raise ModelError(
                "one network is read as a model and the other is not, so that neither layers nor "
                "weights correspond: give two checkpoints of one network"
            )
        if not any(functions) and all(getattr(x, "is_polynomial", True) for x in (a, b)):
            return a, b, metric, False
        if by is None and isinstance(metric, Empirical) and all(map(is_function, given)):
            a, b = given  # a network that runs on inputs has the parts of its own code
        return a, b, metric, True
    # A folder of Hugging Face is a network with code of its own.
    a, b = (read_model(x, n_ctx, True) if folders_of_networks([x]) else x for x in (a, b))
    for one in (a, b):
        if not is_function(one):
            raise ModelError(
                "scores, and groups of weights, are those of a network itself: give modules of "
                f"PyTorch or functions of JAX, found {type(one).__name__}; of models and files "
                f"by= is one of {', '.join(GRANULARITIES)}"
            )
    return a, b, metric if callable(of) else estimated(metric, (a, b), n_ctx), True


def _run_model(model: Model, inputs: Any) -> Any:
    return plain_forward(model, as_read(model, inputs))


def moved_by(
    a: Any,
    b: Any,
    metric: Metric,
    by: str | int | Sequence[str],
    n_ctx: int | None,
    dtype: DTypeLike = "float64",
) -> dict[str, float]:
    """How far every component alone moved a network, by forward passes or inner products alone.

    Args:
        a, b: The network before and after, as for `change`.
        metric: Metric that weighs the inputs.
        by: Granularity of components, as for `change`.
        n_ctx: Length of the sequences on which models with attention are compared.
        dtype: Precision of the computation.

    Returns:
        `|b - b with the component of a| / |b|` by component.

    Raises:
        Unchanged: The two are one function, or differ by rounding.
        ModelError, UnsupportedLayer, TooLarge: Raised as by `change`.

    Example:
        >>> import torch
        >>> a = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Tanh())
        >>> b = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Tanh())
        >>> sorted(moved_by(a, b, Empirical([[1.0]]), "module", None))
        ['0']
    """
    a, b, metric, exchanges_weights = _sides(a, b, metric, by, "distance", n_ctx)
    setting = Setting(metric, dtype_name(dtype), Budget())
    if exchanges_weights:
        exchanges: Any = _weights_exchanged(a, b, setting, by, "distance")
        labels, length = exchanges.labels, exchanges.lineage.length
    else:
        exchanges, _ = _functions_exchanged(a, b, setting, by, False, None)
        labels = tuple(part.label for part in exchanges.parts)
        length = setting.squared_norm(exchanges.b) ** 0.5
    # Rounding may take the squared norm of no difference below 0.
    back = np.sqrt(np.maximum(exchanges.swapped("distance", True), 0.0))
    return dict(zip(labels, (back / length).tolist(), strict=True))


def _weights_exchanged(a: Any, b: Any, setting: Setting, by: Any, of: Any) -> _Weights:
    """Two networks, different ones, and the weights of every component.

    Raises:
        Unchanged: Both measure the same.
    """
    metric = setting.metric
    said: tuple[str, ...] = ()
    if not callable(of):
        _check_measure(of)
        check_comparison(a, b, metric)
    if isinstance(metric, Empirical) and not is_function(a):
        said, by = caveats(a, b), "block"
        a, b = (Partial(_run_model, with_dense_matrices(model)) for model in (a, b))
    if is_function(a):
        network = switched_network(a, b, getattr(metric, "output", None), setting.dtype)
        lineage: Any = (
            ByScore(network, of) if callable(of) else OnInputs(network, (a, b), setting, of)
        )
    else:
        check_untraced("change", a, b, metric)
        lineage, said, by = OfModels(a, b, setting, str(of)), caveats(a, b), "block"
    check_finite(lineage.total)
    if lineage.total == 0:
        what = f"have one {_name(of)}" if callable(of) else "are the same function on these inputs"
        raise Unchanged(f"the networks {what}: there is no change to split")
    parts = groups_of(lineage.names, "module" if by is None else by)
    labels = tuple(label.replace("layers.", "layer ", 1) for label in parts)
    return _Weights(lineage, labels, tuple(parts.values()), said)


def _name(of: Any) -> str:
    """The name of a measure, or of a function that scores."""
    return getattr(of, "__name__", "score") if callable(of) else of


def _change_of_weights(a: Any, b: Any, setting: Setting, by: Any, of: Any) -> Change:
    """The change of networks whose weights are exchanged, see `change`."""
    exchanges = _weights_exchanged(a, b, setting, by, of)
    lineage, labels, _, said = exchanges
    total = lineage.total
    slopes, error = integral_of_weights(lineage, np.stack(exchanges.groups, axis=1))
    share = slopes.sum(axis=0) / total
    if error > CLOSE:
        said += (
            f"shares, which sum to {share.sum():.4g}, are known to {error:.1g} only, as the path "
            "of weights between the networks is too rough for 129 nodes: split the change at a "
            "checkpoint in between",
        )
    found = Change(
        labels,
        share,
        total,
        0.0,
        _name(of),
        _name(of) if callable(of) else setting.metric.name,
        False,
        _jackknife(slopes),
        said,
        f"weights exchanged, {lineage.how}",
        exchanges,
    )
    if not callable(of) and len(labels) > 1 and (found.removed > total).all():
        found = dataclasses.replace(found, caveats=(*said, _NO_LINEAGE))
    for caveat in found.caveats:
        warn(caveat, CaveatWarning)
    return found


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


def _of_similarity(
    pair: _Pair, total: float, close: float
) -> Float[np.ndarray, "groups components"]:
    """The integral of the derivatives of the cosine of f(s) and b.

    The cosine is no polynomial in t: nodes are doubled until the parts sum to its rise, but for a
    relative error that is close enough.
    """
    # Both inner products, and their derivatives, are polynomials in t of degree at most 2 U: from
    # few values all others follow.
    degree, known = pair.family.degree, None
    if 2 * degree < _SAMPLED:
        known = nodes(2 * degree + 1).points, _norm_and_product(pair, 2 * degree + 1)
    # As many nodes as the numerator would need, at least.
    count = max(4, math.ceil(degree / 2))
    while True:
        at = nodes(count)
        if known is None:
            values = _norm_and_product(pair, count)
        else:
            # From values to coefficients of Legendre polynomials, and to values elsewhere.
            there, here = (legvander(2 * t - 1, 2 * degree) for t in (known[0], at.points))
            moved = here @ np.linalg.inv(there)
            values = tuple(np.tensordot(moved, x, 1) for x in known[1])
        slopes = _cosine_slopes(pair, at, values)
        missed = abs(slopes.sum(axis=0).sum() - total)
        if missed <= close * total:
            return slopes
        if 2 * count > 512:
            raise ResultError(
                f"the similarity changes too steeply between the models: {count} nodes miss "
                f"{missed:.1g} of {total:.3g}; use of='distance', which is exact"
            )
        count *= 2


def _norm_and_product(pair: _Pair, count: int) -> _Values:
    """`<f, b>` with `<df, b>`, and `<f, f>` with `<df, f>`, at Gauss-Legendre nodes.

    Returns:
        Values (nodes, groups) and derivatives (nodes, groups, components), of both in turn.
    """
    found = []
    for t in nodes(count).points:
        # The target is the model itself, held fixed: half of the derivative of its squared norm.
        for target in (pair.b, pair.family.at(t)):
            found.append(slope(pair.family, t, target, pair.setting, pair.points))
    cross, own = (zip(*found[n::2], strict=True) for n in (0, 1))
    return tuple(np.array(values) for values in (*cross, *own))


def _cosine_slopes(pair: _Pair, at: Nodes, values: _Values) -> Float[np.ndarray, "groups parts"]:
    """The derivatives of the cosine, weighted and summed over nodes."""
    norm = pair.setting.squared_norm(pair.b)
    total: Any = 0.0
    for weight, cross, by_cross, own, by_own in zip(at.weights, *values, strict=True):
        p, q = cross.sum(), own.sum()
        if q <= 0:
            raise ResultError(
                "a model between the two is the zero function, whose similarity is undefined; use "
                "of='distance'"
            )
        # d (p / sqrt(q)) = dp / sqrt(q) - p dq / (2 q^(3/2)), and dq = 2 <df, f>.
        rise = by_cross / np.sqrt(q) - p * by_own / q**1.5
        total = total + weight * rise / np.sqrt(norm)
    return total


def _jackknife(estimates: Float[np.ndarray, "groups components"]) -> np.ndarray | None:
    """Standard errors of shares from their values without each group of draws.

    They are infinite where the models do not differ without some group, so that shares of their
    change are undefined.
    """
    groups = len(estimates)
    if groups < 2:
        return None
    # The sums of all others, not differences: one group may have all but the last digits.
    left_out = (1.0 - np.eye(groups)) @ estimates
    totals = left_out.sum(axis=1, keepdims=True)
    if not totals.all():
        return np.full(left_out.shape[1], np.inf)
    return jackknife_error(left_out / totals)
