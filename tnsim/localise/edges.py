"""Edges: which component reads which, through which legs.

A gate g_e on each edge e multiplies what the legs of one class of a component read of another. The
classes Q, K and V of attention, and `in` for all legs of other layers, are those that no gauge
mixes: the left and the right factor of a hidden unit may be exchanged. Two numbers belong to an
edge:

    cut     |f - f(g_e = 0)|^2 / |f|^2                       what is lost without it
    share   integral of <df/dg_e, f> / |f|^2 along g = t     its part of the function

Shares sum to the part of the model that needs some edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from tnsim.compare.request import is_exact
from tnsim.engine import precision
from tnsim.engine.precision import Arithmetic
from tnsim.errors import ModelError
from tnsim.localise.grams import Setting
from tnsim.localise.runs import ROWS, largest, table_of_run
from tnsim.localise.slopes import SwitchedModels, exact_nodes, integral, rounding_error
from tnsim.models.components import (
    EMBED,
    Component,
    Edge,
    check_polynomial,
    components_of,
    edges_of,
    wired,
)
from tnsim.models.forward import plain_forward
from tnsim.models.layers import innermost
from tnsim.models.model import Model, caveats
from tnsim.problems import at_points
from tnsim.scaled import power
from tnsim.tables import guarantee, html_table


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
        caveats: Differences between the model and the network it was read from.
    """

    edges: tuple[str, ...]
    share: Float[np.ndarray, " edges"]
    cut: Float[np.ndarray, " edges"]
    rest: float
    metric: str
    exact: bool
    caveats: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.metric} ({guarantee(self.exact)})", f"{'share':>9}{'cut':>10}   edge"]
        for n in largest(self.cut, ROWS):
            lines.append(f"{self.share[n]:>+9.4f}{self.cut[n]:>10.4f}   {self.edges[n]}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        order = largest(self.cut)
        rows = [(self.edges[n], f"{self.share[n]:.4g}", f"{self.cut[n]:.4g}") for n in order]
        return html_table(f"Edges, {self.metric}", rows, ("edge", "share", "cut"))


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
        return "\n".join(f"{label}, {edges}" for label, edges in each)

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

    Example:
        >>> import tnsim
        >>> from tnsim.engine.budget import Budget
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
    if not edges:
        raise ModelError("the model has no edges: no component reads anything")
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
    share = integral(switched, at, model).sum(axis=0) / norm
    if switched.points is None:
        cut = np.array([setting.squared_norm(whole - other) for other in cuts])
    else:
        # The squared norm of a difference, as sums over points; the column is needed only as a
        # partner.
        rows = [[(1.0, whole), (-1.0, other)] for other in cuts]
        one: list[Any] = [[(1.0, whole)]]
        sums = at_points.sums(rows, one, switched.points, False, setting.dtype, setting.budget)
        squares = at_points.over_groups(sums.rows)
        cut = np.asarray(power(squares.mantissa, squares.exponent))
    labels = tuple(_label(parts, edge) for edge in edges)
    exact, said = is_exact(setting.metric, [model]), caveats(model)
    return Edges(
        labels, share, cut / norm, 1.0 - float(share.sum()), setting.metric.name, exact, said
    )


def _label(parts: tuple[Component, ...], edge: Edge) -> str:
    source = "embed" if edge.source == EMBED else parts[edge.source].label
    return f"{source} > {edge.leg} of {parts[edge.target].label}"
