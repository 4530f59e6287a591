"""Paths: a model as a sum of functions, one for every set of components that a signal goes through.

With a switch z_c in front of each component, the outputs are a polynomial `f(z) = sum_m z^m f_m`:
f_m sums all trees that use component c exactly m_c times. The *path* of a set S of components is

    h_S = sum of all f_m with support S = sum_(T within S) (-1)^|S - T| f(z = 1 on T, 0 elsewhere).

The sum of all paths is the model. Trees themselves are not unique, as the two factors of a hidden
unit may be exchanged, and neither is their sum by left and right leg. Paths depend on the functions
of the components alone. Where an activation reads components, f is no polynomial, and the second
form is the definition. Inner products of paths are a matrix that sums to the inner product of the
models, because an inner product is bilinear.

The outputs are affine in the switches of the last layer that has any, if all layers above it are
linear. Sets with two components of that layer are then empty, and 2^C (C' + 1) switched models do
for C components below it and C' in it. Sets through which no signal goes are known from skips,
biases and zero matrices, and left out.

*Edges* say which component reads which, through which legs. A gate g_e on each edge e multiplies
what the legs of one class of a component read of another. The classes Q, K and V of attention, and
`in` for all legs of other layers, are those that no gauge mixes: the left and the right factor of a
hidden unit may be exchanged. Two numbers belong to an edge:

    cut     |f - f(g_e = 0)|^2 / |f|^2                       what is lost without it
    share   integral of <df/dg_e, f> / |f|^2 along g = t     its part of the function

Shares sum to the part of the model that needs some edge.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import jax
import numpy as np
from jaxtyping import Float
from numpy.typing import DTypeLike

from tnsim.checkpoints.load import Series
from tnsim.compare.numbers import jackknife_error, without_each
from tnsim.compare.request import comparables, count_text, is_exact
from tnsim.engine import precision
from tnsim.engine.ir.problem import dtype_name
from tnsim.engine.planner import Budget
from tnsim.engine.precision import Arithmetic
from tnsim.engine.runtime import execution
from tnsim.errors import ModelError, ResultError, TnsimError, TooLarge, printable
from tnsim.localise.differences import (
    ROWS,
    Run,
    checkpoints_of,
    largest,
    least_sure,
    table_of_run,
    text_of_run,
    text_of_shares,
)
from tnsim.localise.switched_models import (
    Gram,
    Setting,
    SwitchedModels,
    check_bilinear,
    exact_nodes,
    gram,
    integral,
    rounding_error,
)
from tnsim.metrics.metric import Gaussian, as_metric
from tnsim.metrics.protocol import Metric
from tnsim.models.arrays import bias_name
from tnsim.models.components import (
    EMBED,
    Component,
    Edge,
    check_polynomial,
    chosen,
    components_of,
    core_with_output,
    edges_of,
    switched_layer,
    wired,
)
from tnsim.models.forward import plain_forward
from tnsim.models.layers import activation_of, affine_maps, innermost, residual_rule
from tnsim.models.model import (
    Model,
    caveats,
    check_numbers,
    check_untraced,
    warn_of_caveats,
    with_dense_matrices,
)
from tnsim.options import checked, shown
from tnsim.problems import at_points
from tnsim.problems.hidden_units import bias_in_outputs, hidden_units, tells_units_apart
from tnsim.problems.kernels import KERNEL_DTYPE, ToldApart, products_of_parts, units_under
from tnsim.scaled import beyond_float, power
from tnsim.tables import guarantee, html_table

MOST_SWITCHED = 1024
"""Most switched models of one question; their inner products are a matrix of this size."""
_LARGE = 1e3
"""Largest weight or bias of a layer in which nothing need cancel to more than half of the digits
of float64."""
START, REST = "embed", "remainder"
"""Label of the path through no component, and of paths that are not told apart."""


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges between the components of a model.

    Attributes:
        edges: Labels such as `layer 1 head 1 > K of layer 2 head 0`.
        share: Signed shares (edges,) of the squared norm of the model.
        cut: Squared distances (edges,) between the model and the model without the edge, in units
            of the squared norm of the model.
        rest: Share of signals that need no edge; `share` sums to `1 - rest`.
        metric: Name of the metric.
        exact: Whether the metric's definition is met exactly.
        standard_error: Standard errors of `share`, (edges,); None where nothing was sampled.
        caveats: Differences between the model and the network it was read from.
    """

    edges: tuple[str, ...]
    share: Float[np.ndarray, " edges"]
    cut: Float[np.ndarray, " edges"]
    rest: float
    metric: str
    exact: bool
    standard_error: Float[np.ndarray, " edges"] | None = None
    caveats: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = guarantee(self.exact, self.standard_error)
        lines = [f"{self.metric} ({said})", f"{'share':>9}{'cut':>10}   edge"]
        for n in largest(self.cut, ROWS):
            lines.append(f"{self.share[n]:>+9.4f}{self.cut[n]:>10.4f}   {self.edges[n]}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        order = largest(self.cut)
        rows = [(self.edges[n], f"{self.share[n]:.4g}", f"{self.cut[n]:.4g}") for n in order]
        said = guarantee(self.exact, self.standard_error)
        return html_table(f"Edges, {self.metric} ({said})", rows, ("edge", "share", "cut"))


@dataclass(frozen=True, eq=False)
class EdgeSeries:
    """The edges of every checkpoint of a run.

    Attributes:
        labels: Labels of the checkpoints.
        each: `Edges` of every checkpoint.
        edges: Labels of the edges, equal for all checkpoints.
    """

    labels: tuple[Any, ...]
    each: tuple[Edges, ...]
    edges: tuple[str, ...]

    @property
    def share(self) -> Float[np.ndarray, "checkpoints edges"]:
        """Signed shares of the squared norm of each checkpoint."""
        return np.stack([edges.share for edges in self.each])

    @property
    def cut(self) -> Float[np.ndarray, "checkpoints edges"]:
        """Squared distances to the model without the edge, in units of the squared norm."""
        return np.stack([edges.cut for edges in self.each])

    def __str__(self) -> str:
        each = zip(self.labels, self.each, strict=True)
        return "\n".join(f"{printable(str(label), 40)}, {edges}" for label, edges in each)

    def _repr_html_(self) -> str:
        return table_of_run("Effects of cutting edges", self.labels, self.edges, self.cut)


def edges_of_run(labels: tuple[Any, ...], each: Sequence[Edges]) -> EdgeSeries:
    """The edges of checkpoints as one table.

    Raises:
        ModelError: The checkpoints have different components.

    Example:
        >>> one = Edges(("embed > in of layer 0",), np.ones(1), np.ones(1), 0.0, "gaussian", True)
        >>> edges_of_run((0, 1), [one, one]).share.tolist()
        [[1.0], [1.0]]
    """
    first = each[0].edges
    for label, edges in zip(labels, each, strict=True):
        if edges.edges != first:
            raise ModelError(
                f"checkpoint {label} has other edges than {labels[0]}, {len(edges.edges)} and "
                f"{len(first)}; give checkpoints of equal layers"
            )
    return EdgeSeries(labels, tuple(each), first)


@dataclass(frozen=True)
class _Wiring:
    """The function from a model and gates to the model with these gates."""

    parts: tuple[Component, ...]
    edges: tuple[Edge, ...]

    def __call__(self, weights: tuple[Model], gates: Any) -> Model:
        return wired(weights[0], gates, self.parts, self.edges)

    def outputs(self, weights: tuple[Model], gates: Any, inputs: Any) -> Any:
        return plain_forward(self(weights, gates), inputs)


def edges_between(model: Model, by: str, setting: Setting) -> Edges:
    """The edges of a model with their shares, and the effect of cutting each.

    Args:
        model: Any model.
        by: Granularity of components.
        setting: Metric, precision and budget.

    Raises:
        ModelError: The model is the zero function.
        UnsupportedLayer: A layer has an activation.
        TooLarge: There are more edges than `MOST_SWITCHED`.

    Example:
        >>> import tnsim
        >>> from tnsim.engine.planner import Budget
        >>> layer = tnsim.Residual(tnsim.Linear([[1.0]]))
        >>> setting = Setting(tnsim.Empirical([[1.0]]), "float64", Budget())
        >>> found = edges_between(tnsim.Model([layer, layer]), "layer", setting)
        >>> found.edges
        ('embed > in of layer 0', 'embed > in of layer 1', 'layer 0 > in of layer 1')
        >>> found.cut.round(9).tolist(), round(found.rest, 9)
        ([0.25, 0.0625, 0.0625], 0.25)
    """
    parts = components_of([model], by)
    check_polynomial(model)
    edges = edges_of(model, parts)
    if len(edges) > MOST_SWITCHED:
        raise TooLarge(
            f"by={by!r} gives {len(edges):,} edges, each of which is cut in a model of its own, "
            f"more than {MOST_SWITCHED:,}; use a coarser by, or paths without legs"
        )
    # Degree of the states in the common gate t: each leg of a component reads states through one
    # more gate.
    degree, known = 0, {part.layer for part in parts}
    for n, layer in enumerate(model.layers):
        if n in known:
            degree = max(degree, innermost(layer).order * (1 + degree))
    # In one gate alone the degree is no higher.
    degrees = (degree,) * len(edges)
    switched = SwitchedModels(_Wiring(parts, edges), (model,), degrees, degree, setting)
    at = exact_nodes(degree)
    whole, norm = switched.at(1.0), setting.squared_norm(model)
    if norm <= 0:
        raise ModelError("the model is the zero function, of which no edge has a share")
    # All gates open but one.
    cuts = [switched.at(1.0 - np.eye(len(edges))[n]) for n in range(len(edges))]
    switched = switched._replace(points=setting.points(whole))
    error = rounding_error(switched, [whole], norm)
    precision.report(error, "a share of an edge", Arithmetic(model.growth, setting.dtype))
    slopes, errors = integral(switched, at, model), None
    share = slopes.sum(axis=0) / norm
    if switched.points is None:
        cut = np.array([setting.measure(whole, other, "distance", norm) for other in cuts])
    else:
        # The squared norm of a difference, as sums over points; the column is needed only as a
        # partner. Layers that models share run once: one distance after another takes 2.3 to 3.5
        # times as long.
        rows = [[(1.0, whole), (-1.0, other)] for other in cuts]
        one: list[Any] = [[(1.0, whole)]]
        sums = at_points.sums(rows, one, switched.points, False, setting.dtype, setting.budget)
        squares = at_points.over_groups(sums.rows)
        cut = np.asarray(power(squares.mantissa, squares.exponent))
        counted = sums.shares > 0
        if switched.points.drawn and np.count_nonzero(counted) > 1:
            own = power(*without_each(sums.columns, counted))
            with np.errstate(divide="ignore", invalid="ignore"):  # zero without some group
                errors = jackknife_error((slopes.sum(axis=0) - slopes[counted]) / own)
    names = {EMBED: START} | {n: part.label for n, part in enumerate(parts)}
    labels = tuple(f"{names[x.source]} > {x.leg} of {names[x.target]}" for x in edges)
    exact, said = is_exact(setting.metric, [model]), caveats(model)
    rest, name = 1.0 - float(share.sum()), setting.metric.name
    return Edges(labels, share, cut / norm, rest, name, exact, errors, said)


@dataclass(frozen=True, eq=False)
class Paths:
    """Inner products of the paths of two models, which sum to the inner product of the models.

    Attributes:
        values: Inner products (bra, ket) in units of squared outputs.
        bra, ket: Labels of the paths of the first and of the second model.
        metric: Name of the metric.
        exact: Whether the metric's definition is met exactly.
        standard_error: Standard errors of `share`, (bra,); None where nothing was sampled.
        caveats: Differences between the models and the networks they were read from.
    """

    values: Float[np.ndarray, "bra ket"]
    bra: tuple[str, ...]
    ket: tuple[str, ...]
    metric: str
    exact: bool
    standard_error: Float[np.ndarray, " bra"] | None = None
    caveats: tuple[str, ...] = ()

    @property
    def share(self) -> Float[np.ndarray, " bra"]:
        """Signed shares `<h_S, b> / <a, b>` of the paths of the first model, which sum to 1.

        A share may be negative or above 1, where paths cancel one another.

        Raises:
            ResultError: The inner product of the models is zero.
        """
        if not self.values.sum():
            raise ResultError(
                "the inner product of the models is zero, so its parts have no shares; `values` "
                "has the parts themselves"
            )
        return _shares(self.values)

    def through(self, *names: str) -> float:
        """The sum of the shares of all paths that go through every one of some components.

        Args:
            names: Labels of components, or of layers, which stand for any component of the layer.

        Returns:
            A number without a unit; through two layers it is their composition share.

        Raises:
            ModelError: No path goes through a component or layer of this name.
        """
        return float(self.share[_through(self.bra, names)].sum())

    def __str__(self) -> str:
        said = guarantee(self.exact, self.standard_error)
        return f"metric      {self.metric} ({said})\n{text_of_shares(self.bra, self.share)}"

    def _repr_html_(self) -> str:
        share = self.share
        rows = [(self.bra[n], f"{share[n]:.4g}") for n in largest(share)]
        said = guarantee(self.exact, self.standard_error)
        return html_table(f"Paths, {self.metric} ({said})", rows, ("path", "share"))


@dataclass(frozen=True, eq=False)
class PathSeries:
    """The paths of every checkpoint of a run, each compared with itself or with one model.

    Attributes:
        labels: Labels of the checkpoints.
        each: `Paths` of every checkpoint.
        paths: Labels of the paths of all checkpoints, in the order of the components.
    """

    labels: tuple[Any, ...]
    each: tuple[Paths, ...]
    paths: tuple[str, ...]

    @property
    def share(self) -> Float[np.ndarray, "checkpoints paths"]:
        """Signed shares of the paths; 0 where a checkpoint lacks a path."""
        table = np.zeros((len(self.each), len(self.paths)))
        place = {name: n for n, name in enumerate(self.paths)}
        for row, paths_of_model in zip(table, self.each, strict=True):
            row[[place[name] for name in paths_of_model.bra]] = paths_of_model.share
        return table

    def through(self, *names: str) -> Float[np.ndarray, " checkpoints"]:
        """The shares of all paths through every one of some components, as `Paths.through`."""
        return self.share[:, _through(self.paths, names)].sum(axis=1)

    def __str__(self) -> str:
        told = least_sure(self.each)
        said = guarantee(told.exact, told.standard_error)
        table = text_of_run(self.labels, self.paths, self.share)
        return f"metric      {told.metric} ({said})\n{table}"

    def _repr_html_(self) -> str:
        return table_of_run("Shares of paths", self.labels, self.paths, self.share)


def _shares(values: np.ndarray) -> np.ndarray:
    """Sums over the last axis as shares of the sum over the last two; NaN where that is zero."""
    total = values.sum(axis=(-2, -1))
    return values.sum(axis=-1) / np.where(total == 0, np.nan, total)[..., None]


def components_in(path: str) -> tuple[str, ...]:
    """The labels of the components of a path.

    Example:
        >>> components_in("embed > layer 1 head 0 + layer 1 head 2 > layer 2")
        ('layer 1 head 0', 'layer 1 head 2', 'layer 2')
    """
    return tuple(name for step in path.split(" > ")[1:] for name in step.split(" + "))


def _through(labels: Sequence[str], names: Sequence[str]) -> list[int]:
    """Numbers of the paths through all of some components or layers."""
    sets = [components_in(label) for label in labels]
    known = dict.fromkeys(name for names_of_set in sets for name in names_of_set)
    for name in names:
        if not (isinstance(name, str) and any(_is_of(component, name) for component in known)):
            raise ModelError(
                f"no path goes through {shown(name)}; components are {', '.join(known)}"
            )
    return [
        n
        for n, own in enumerate(sets)
        if all(any(_is_of(component, name) for component in own) for name in names)
    ]


def _is_of(component: str, name: str) -> bool:
    """Whether a name is that of a component, or of its layer."""
    return name in (component, " ".join(component.split(" ")[:2]))


@overload
def paths(
    a: Model,
    b: None = None,
    metric: Metric | str = Gaussian(),
    *,
    by: str = "layer",
    legs: Literal[True],
    n_ctx: int | None = None,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Edges: ...


@overload
def paths(
    a: Series | Sequence[Model] | Mapping[str, Model],
    b: None = None,
    metric: Metric | str = Gaussian(),
    *,
    by: str = "layer",
    legs: Literal[True],
    n_ctx: int | None = None,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> EdgeSeries: ...


@overload
def paths(
    a: Model,
    b: Model | None = None,
    metric: Metric | str = Gaussian(),
    *,
    by: str = "layer",
    within: Iterable[str] | None = None,
    order: int | None = None,
    top: int | None = None,
    legs: Literal[False] = False,
    n_ctx: int | None = None,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Paths: ...


@overload
def paths(
    a: Series | Sequence[Model] | Mapping[str, Model],
    b: Model | None = None,
    metric: Metric | str = Gaussian(),
    *,
    by: str = "layer",
    within: Iterable[str] | None = None,
    order: int | None = None,
    top: int | None = None,
    legs: Literal[False] = False,
    n_ctx: int | None = None,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> PathSeries: ...


@checked(own="order top")
def paths(
    a: Any,
    b: Model | None = None,
    metric: Metric | str = Gaussian(),
    *,
    by: str = "layer",
    within: Iterable[str] | None = None,
    order: int | None = None,
    top: int | None = None,
    legs: bool = False,
    n_ctx: int | None = None,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Paths | PathSeries | Edges | EdgeSeries:
    """Split `inner(a, b, metric)` by the components that signals go through in both models.

    Args:
        a: A model, or the checkpoints of a run: a `Series`, a sequence or a mapping from labels.
            Modules of PyTorch and paths of files stand for models.
        b: A model to compare with; None for every model with itself.
        metric: Metric that weighs the inputs, or its name; any but `GaussianClosure`. For attention
            prefer tokens, as `Categorical(samples=...)`: under normal inputs the terms of highest
            degree are all there is.
        by: Granularity of components, `"layer"`, `"head"` or `"unit"`, as for `components`.
        within: Labels of the components that are told apart, or of layers for all of their
            components; others are always on.
        order: Largest number of components in a path; longer paths are in the `remainder`.
        top: Number of paths of the largest shares that are told apart, in each model; others are in
            the `remainder`.
        legs: Whether the answer is the edges of each model, component by component and by class of
            legs: Q, K and V of attention, or `in` for all legs of another layer.
        n_ctx: Length of the sequences on which models with attention are compared, where neither
            the models nor the inputs of `Empirical` say it.
        dtype: Precision of the computation, float64 or float32; the result is float64.
        budget: Limits of memory and work for the computation.

    Returns:
        `Paths`, float64 of shape (paths of a, paths of b) in units of squared outputs, which sums
        to the inner product; for checkpoints a `PathSeries`. Labels such as
        `embed > layer 1 head 0 > layer 2 head 3` name the components of a path; `+` stands between
        components of one layer. With `legs`, `Edges`, for checkpoints an `EdgeSeries`.

    Raises:
        ModelError: A label is unknown, the metric is no bilinear form of the model, or `inner`
            would raise it.
        UnsupportedLayer: A layer has an activation, and `legs` is asked of it or the metric has no
            closed form for the model.
        TooLarge: The question needs more than 1,024 switched models, or edges, or is beyond the
            budget.
        TnsimError: An inner product is beyond float64.

    Warns:
        PrecisionWarning: Paths cancel so far that few digits of a share are left.

    Example:
        A model `x + 2 x^2` of one layer: the stream and the layer, under a coin's inputs.

        >>> import tnsim
        >>> layer = tnsim.Residual(tnsim.Bilinear([[1.0]], [[2.0]], [[1.0]]))
        >>> found = tnsim.paths(tnsim.Model([layer]), metric=tnsim.Empirical([[1.0], [-1.0]]))
        >>> found.bra, found.share.round(9).tolist()
        (('embed', 'embed > layer 0'), [0.2, 0.8])

    Source:
        Moebius inversion on the subsets of components (Rota 1964); paths through heads after
        Elhage et al. 2021, "A mathematical framework for transformer circuits".
    """
    metric = as_metric(metric)
    setting = Setting(metric, dtype_name(dtype), budget)
    question = _Question(by, None if within is None else tuple(within), order, top)
    question.check()
    labels, models = checkpoints_of(a) if isinstance(a, Run) else (("",), [a])
    if not labels:
        raise ModelError("paths of a run are those of at least one checkpoint, found none")
    if legs:
        if b is not None or question[1:] != (None, None, None):
            raise ModelError(
                "legs=True gives the edges of each model by itself: leave out b, within, order, "
                "top. Cutting an edge changes a single model, and nothing pairs the edges of two "
                "models; paths([a, b], legs=True) has the edges of both side by side, and "
                "paths(a, b) splits their inner product by components"
            )
        of_edges = [
            edges_between(_models(model, None, metric, n_ctx)[0], by, setting) for model in models
        ]
        _warn_of_each(of_edges)
        return edges_of_run(labels, of_edges) if isinstance(a, Run) else of_edges[0]
    each = tuple(
        _compared(*_models(model, b, metric, n_ctx), setting, question) for model in models
    )
    _warn_of_each(each)
    if not isinstance(a, Run):
        return each[0]
    return PathSeries(labels, each, _in_order([result.bra for result in each]))


def _warn_of_each(results: Sequence[Paths | Edges]) -> None:
    """Warn the caller of `paths` of the caveats of all models, each once."""
    said = dict.fromkeys(caveat for result in results for caveat in result.caveats)
    warn_of_caveats(tuple(said))


def _models(a: Any, b: Any, metric: Metric, n_ctx: int | None) -> tuple[Any, Any]:
    """A model and its partner, if any, read from what the caller gave."""
    both = comparables(a, a if b is None else b, metric, n_ctx)
    one, two = map(with_dense_matrices, both)
    return one, None if b is None else two


class _Question(NamedTuple):
    """The arguments of `paths` that do not concern numbers."""

    by: str
    within: tuple[str, ...] | None
    order: int | None
    top: int | None

    def check(self) -> None:
        """Raise `ModelError` for numbers of paths that are not counts, or for no components."""
        for name, value, least in (("order", self.order, 0), ("top", self.top, 1)):
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and value >= least):
                raise ModelError(f"{name} must be an integer of at least {least}, found {value!r}")
        if self.within == ():
            raise ModelError("within names components that are told apart, found none")


def _in_order(known: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Labels of several rows, each once; the remainder comes last."""
    every = dict.fromkeys(label for labels in known for label in labels if label != REST)
    rest = [REST] if any(REST in labels for labels in known) else []
    ordered = sorted(every, key=lambda label: (len(components_in(label)), list(every).index(label)))
    return (*ordered, *rest)


@dataclass(frozen=True)
class _Side:
    """A model as a sum of paths.

    Args:
        models: Switched models; none where paths are made of the units themselves.
        labels: Labels of the paths.
        signs: Coefficients (paths, models) of the switched models, or of the units, in every path.
    """

    models: list[Model]
    labels: tuple[str, ...]
    signs: Float[np.ndarray, "paths models"]


def _compared(a: Model, b: Model | None, setting: Setting, question: _Question) -> Paths:
    """The paths of one model with those of another, or with its own."""
    both = (a,) if b is None or b is a else (a, b)
    check_numbers(*both)
    parts = [components_of([model], question.by) for model in both]
    check_bilinear(setting.metric)
    check_untraced("paths", a, b, setting.metric)
    degree, dtype = max(model.growth for model in both), setting.dtype
    # Units of single nonlinear layers have an inner product for each pair, read off the kernel. All
    # other components are told apart by switched models.
    if _reads_units(both, parts, setting.metric):
        inner, dtype = _products_of_units(a, both[-1], (parts[0], parts[-1]), setting), KERNEL_DTYPE
        bra, ket = (_side_of_units(own, question) for own in (parts[0], parts[-1]))
        lost = Arithmetic(degree, dtype).rounding * inner.sizes.sum()
    else:
        bra = _side(a, parts[0], question)
        ket = bra if len(both) == 1 else _side(both[1], parts[1], question)
        inner = gram(bra.models, None if ket is bra else ket.models, setting)
        for axis in (0, 1):  # a model that is zero with all others has lost its states
            precision.check_terms(inner.sizes.max(axis=axis), dtype)
        lost = _lost_by_rounding(bra, ket, inner, setting, degree)
    # Inner products are bilinear, so those of paths are the signed sums on both sides.
    mantissas = bra.signs @ inner.values @ ket.signs.T
    total = abs(mantissas.sum())
    error = float(lost / total) if total else 0.0
    precision.report(error, "a share of a path", Arithmetic(degree, dtype))
    left_out = None if inner.left_out is None else bra.signs @ inner.left_out @ ket.signs.T
    bra_labels, ket_labels = bra.labels, ket.labels
    # Matrices that merge paths into the remainder, needed once more for the standard errors.
    rows, columns = np.eye(len(bra_labels)), np.eye(len(ket_labels))
    if question.top is not None:
        bra_labels, rows = _merged(bra_labels, mantissas.sum(axis=1), question.top)
        ket_labels, columns = _merged(ket_labels, mantissas.sum(axis=0), question.top)
        mantissas = rows @ mantissas @ columns.T
    values = power(mantissas, np.float64(inner.exponent))
    if beyond_float(values, mantissas):
        raise TnsimError(
            f"inner products of paths under {setting.metric.name} are beyond float64 for these "
            "weights; scale down the last layer of a model, which changes no share"
        )
    error = None
    if left_out is not None and mantissas.sum():
        error = jackknife_error(_shares(rows @ left_out @ columns.T))
    exact, said = is_exact(setting.metric, both), caveats(*both)
    return Paths(values, bra_labels, ket_labels, setting.metric.name, exact, error, said)


def _side_of_units(parts: Sequence[Component], question: _Question) -> _Side:
    """How paths are made of the units of a single nonlinear layer."""
    told: Sequence[int] = range(len(parts))
    if question.within is not None:
        told = chosen(parts, question.within)
    labels = [START, *(_label([parts[n]], 1) for n in told)]
    # The row of each component among the labels; components that are not told apart are always on
    # and belong to the path of no component, row 0.
    row_of = {n: 1 + k for k, n in enumerate(told)}
    rows = [row_of.get(n, 0) for n in range(len(parts))]
    if question.order == 0:
        labels, rows = [START, REST], [min(row, 1) for row in rows]
    matrix = np.zeros((len(labels), 1 + len(parts)))
    # The first column is the path of no component, which is a row of its own.
    matrix[[0, *rows], range(1 + len(parts))] = 1.0
    return _Side([], tuple(labels), matrix)


def _reads_units(
    models: Sequence[Model], parts: Sequence[Sequence[Component]], metric: Any
) -> bool:
    """Whether the components of some models are the units of single nonlinear layers.

    Args:
        models: Models under comparison.
        parts: All components of each model.
        metric: Metric of the comparison.

    Raises:
        UnsupportedLayer: A model has an activation, and the metric has no closed form for it.
    """
    for model, own in zip(models, parts, strict=True):
        places = {part.layer for part in own}
        if not any(part.parts > 1 or part.part is None for part in own):
            return False
        if places != {n for n, order in enumerate(model.orders) if order > 1}:
            return False
    return tells_units_apart(models, metric)


def _products_of_units(
    a: Model, b: Model, parts: tuple[Sequence[Component], Sequence[Component]], setting: Setting
) -> Gram:
    """The inner products of the paths of two models through their hidden units.

    A model of one nonlinear layer, with an activation or without, is a linear map of its hidden
    units, a constant and the input (`problems.hidden_units`), and every hidden unit is a component.
    So the inner product of two models is a sum over pairs of components, which is read off before
    it is summed: entries of the kernel times products of output weights. The path of no component
    is the input with all constants but the bias of the layer.

    Args:
        a, b: Models that `_reads_units` accepts.
        parts: Components of each model.
        setting: Gaussian metric of the comparison.

    Returns:
        A `Gram`, the path of no component first, then each component in order.
    """
    with execution.precision():
        sides = [_with_bias(model, own, setting) for model, own in zip((a, b), parts, strict=True)]
        values = products_of_parts(*sides)
        own = (values, values) if b is a else (products_of_parts(x, x) for x in sides)
        lengths = [np.sqrt(np.maximum(matrix.diagonal(), 0.0)) for matrix in own]
    return Gram(values, np.outer(*lengths), float(sum(made.exponent for made, _ in sides)))


def _with_bias(model: Model, parts: Sequence[Component], setting: Setting) -> ToldApart:
    """A model as prepared, with its bias."""
    reading = model.d_in, model.n_ctx
    made = units_under(hidden_units(model), setting.metric, reading, KERNEL_DTYPE)
    # The bias of the nonlinear layer is told apart from all other constants.
    bias = bias_in_outputs(model) if parts[-1].part is None else None
    return made, None if bias is None else power(np.asarray(bias), -made.exponent)


def _lost_by_rounding(
    bra: _Side, ket: _Side, inner: Gram, setting: Setting, degree: float
) -> float:
    """The bound of what rounding leaves open of the sum of a path's inner products."""
    factors = []
    for side in (bra, ket):
        # In float64 the largest model tells for all what cancels within layers that are always on,
        # along plans where numbers are large: bonds have the bases of their states there.
        told = side.models if setting.dtype == "float32" else side.models[-1:]
        along_plans = setting.dtype == "float64" and inner.points is None
        if along_plans and _largest_weight(told[0]) < _LARGE:
            factors.append(np.ones(1))
            continue
        factors.append(np.array([setting.enlarged(model, inner.points) for model in told]))
    sizes = inner.sizes * precision.of_pair(factors[0][:, None], factors[1])
    # A share reads the whole second model, to which its paths sum up; what that sum adds up on the
    # way is rounded as floats of 64 bits.
    signs, rounding = abs(bra.signs), Arithmetic(degree, setting.dtype).rounding
    read = (signs @ sizes @ abs(ket.signs.sum(axis=0))).max()
    added = (signs @ sizes @ abs(ket.signs).sum(axis=0)).max()
    return rounding * read + Arithmetic(degree, "float64").rounding * added


def _largest_weight(model: Model) -> float:
    """The largest absolute value in the arrays of a model."""
    return max(float(np.abs(leaf).max(initial=0.0)) for leaf in jax.tree.leaves(model))


def _merged(
    labels: tuple[str, ...], sizes: np.ndarray, top: int
) -> tuple[tuple[str, ...], Float[np.ndarray, "kept paths"]]:
    """Labels with all but the largest paths in the remainder, and the matrix that merges them."""
    # From the largest to the smallest; the remainder itself is never chosen.
    order = [n for n in np.argsort(-abs(sizes), kind="stable") if labels[n] != REST]
    kept = sorted(order[:top])
    if len(order) <= top:
        return labels, np.eye(len(labels))
    matrix = np.zeros((len(kept) + 1, len(labels)))
    matrix[range(len(kept)), kept] = 1.0
    # Each path that is not kept counts once in the remainder.
    matrix[-1] = 1.0 - matrix[:-1].sum(axis=0)
    return (*(labels[n] for n in kept), REST), matrix


def _side(model: Model, parts: tuple[Component, ...], question: _Question) -> _Side:
    """The switched models of a model, and how paths are made of them."""
    if question.within is not None:
        parts = tuple(parts[n] for n in chosen(parts, question.within))
    sets = _sets(model, parts, question)
    open_paths = supports(model, parts, set(sets))
    # A switched model is zero unless a path lies within its set.
    shown = [s for s in sets if s in open_paths]
    # Sets are bit masks: `path & ~s == 0` says that a path lies within the set s.
    needed = [s for s in sets if any(path & ~s == 0 for path in shown)]
    # Moebius inversion over subsets: the sign is that of the number of components in s but not in
    # t.
    signs = np.array(
        [[(-1.0) ** (s ^ t).bit_count() if t & ~s == 0 else 0.0 for t in needed] for s in shown]
    ).reshape(len(shown), len(needed))
    models = list(_switched_models(model, parts, needed))
    labels = tuple(_label(parts, s) for s in shown)
    # The remainder is the whole model less all paths that are told apart.
    whole = (1 << len(parts)) - 1
    if question.order is not None and question.order < len(parts) and whole not in needed:
        signs = np.block(
            [[signs, np.zeros((len(shown), 1))], [-signs.sum(axis=0), np.ones((1, 1))]]
        )
        models += list(_switched_models(model, parts, [whole]))
        labels = (*labels, REST)
    if not models:
        raise ModelError("the model is the zero function: no signal goes through it")
    return _Side(models, labels, signs)


def _label(parts: Sequence[Component], support: int) -> str:
    """The label of the path of a set of components."""
    steps = [START]
    own = [part for n, part in enumerate(parts) if support >> n & 1]
    for _, same in itertools.groupby(own, key=lambda part: part.layer):
        steps.append(" + ".join(part.label for part in same))
    return " > ".join(steps)


def _sets(model: Model, parts: Sequence[Component], question: _Question) -> list[int]:
    """Sets of components as bits, those below each set before it.

    Raises:
        TooLarge: There are more than `MOST_SWITCHED`.
    """
    # Orders of the layers above the last component: where all are linear, two components of the top
    # layer never multiply, and sets with two of them have no path.
    top = max(part.layer for part in parts)
    last = 0
    if all(order == 1 for order in model.orders[top + 1 :]):
        last = sum(part.layer == top for part in parts)  # the outputs are affine in its switches
    below = len(parts) - last
    most = len(parts) if question.order is None else min(question.order, len(parts))
    # Each set below, of k components, stands alone and with each component of the top layer.
    count = sum(math.comb(below, k) * (1 + (last if k < most else 0)) for k in range(most + 1))
    if count > MOST_SWITCHED:
        raise TooLarge(
            f"by={question.by!r} gives {len(parts)} components, whose sets need "
            f"{count_text(count)} switched models, more than {MOST_SWITCHED:,}; use a coarser by, "
            "within=[...] for some components, or order=2 for paths of at most two"
        )
    lower = [
        sum(1 << n for n in own)
        for k in range(most + 1)
        for own in itertools.combinations(range(below), k)
    ]
    sets = list(lower)
    for own in lower:
        if own.bit_count() < most:
            sets += [own | 1 << n for n in range(below, len(parts))]
    # Subsets come before the sets that contain them.
    return sorted(sets, key=lambda s: (s.bit_count(), _bits(s)))


def _bits(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(number.bit_length()) if number >> n & 1)


def _switched_models(
    model: Model, parts: Sequence[Component], sets: Iterable[int]
) -> Iterator[Model]:
    """The model with the components of a set on and others off; equal layers are one object."""
    # Layers with equal switches are one object, so that forward passes run them once.
    known: dict[tuple[int, int], Any] = {}
    for own in sets:
        layers = []
        for n, layer in enumerate(model.layers):
            places = [k for k, part in enumerate(parts) if part.layer == n]
            key = n, own & sum(1 << k for k in places)
            if key not in known:
                switches = np.array([float(own >> k & 1) for k in places])
                known[key] = switched_layer(layer, [parts[k] for k in places], switches)
            layers.append(known[key])
        yield Model(layers, model.n_ctx, model.origin)


def supports(model: Model, parts: Sequence[Component], within: set[int]) -> set[int]:
    """The sets of components through which some signal may go.

    Args:
        model: Any model.
        parts: Components that are told apart.
        within: Sets that are asked for, with all of their subsets.

    Returns:
        Sets as bits. Signals end where a layer has no skip, or a matrix is zero.

    Example:
        >>> from tnsim import Bilinear
        >>> model = Model([Bilinear([[1.0]], [[1.0]], [[1.0]])])
        >>> supports(model, components_of([model], "layer"), {0, 1})
        {1}
    """
    # `reach` are the sets of components that a signal at the current bond may have gone through; at
    # the input, none.
    reach = {0}
    for n, layer in enumerate(model.layers):
        core = core_with_output(layer)
        rows, output = affine_maps(core)
        # A skip passes signals on as they are. A product of legs joins the sets of its legs.
        below = set(reach) if residual_rule(layer)[0] != 0 else set()
        products = {0} if rows else reach
        for name in rows:
            legs = reach if np.any(getattr(core, name)) else set()
            # A bias of a leg is a signal through no component.
            if _is_there(getattr(core, bias_name(name))):
                legs = legs | {0}
            # A function of a sum of signals depends on any of their unions.
            if name == rows[0] and activation_of(core) is not None:
                legs = _unions(legs, within)
            products = {x | y for x in products for y in legs} & within
        weight, bias = np.asarray(getattr(core, output)), getattr(core, bias_name(output))
        own = [(1 << k, part) for k, part in enumerate(parts) if part.layer == n]
        # Columns of the output matrix that belong to no component are always on.
        always = np.ones(weight.shape[1], bool)
        bias_bit = 0
        for bit, part in own:
            if part.bias:
                bias_bit = bit
            if part.part is not None:
                columns = part.places(len(always))
                always[columns] = False
                if weight[:, columns].any():
                    below |= {x | bit for x in products}
        if weight[:, always].any():
            below |= products
        if _is_there(bias):
            below.add(bias_bit)
        reach = below & within
    return reach


def _unions(sets: Iterable[int], within: set[int]) -> set[int]:
    """All unions of some sets, the empty one included, through which a function of a sum goes."""
    unions = {0}
    for component_set in sets:
        unions |= {component_set | other for other in unions} & within
    return unions


def _is_there(bias: Any) -> bool:
    """Whether a bias is given and not zero."""
    return bias is not None and bool(np.any(bias))
