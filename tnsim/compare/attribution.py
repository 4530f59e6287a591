"""The components of two models that account for their inner product, as a labelled matrix.

An output is a sum of components: the residual stream past the last nonlinear layer, the output of
that layer (head by head if it is attention), and biases; linear layers after it act on each
component. By unit, every hidden unit of a single nonlinear layer is a component of its own. An
inner product is bilinear, so it is the sum of a matrix with an entry per pair of
components. Entry (i, j) is `sum_s E<a_i(x)[s], b_j(x)[s]>` under the metric: exact for one
nonlinear layer, and for more layers with the hidden states as the metric models them (closure,
tree).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from numpy.typing import DTypeLike

from tnsim.compare.request import check_comparison
from tnsim.engine.ir.dtypes import dtype_name
from tnsim.engine.planner import LARGE, plan_problem
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.rates import backend_of
from tnsim.errors import ModelError, TnsimError
from tnsim.metrics.metric import GaussianClosure, joins_legs, joins_whole_trees
from tnsim.metrics.protocol import Metric
from tnsim.models.model import Model, caveats, guesses
from tnsim.models.origin import warn_of_caveats
from tnsim.names import CONSTANT, CORE, HEADS, SIDES, STREAM, Selector, Side
from tnsim.problems.base import model_weights
from tnsim.problems.families import Sequences
from tnsim.problems.kernels import (
    KERNEL_DTYPE,
    Prepared,
    PreparedModel,
    answers,
    check_has_units,
    readout,
    under,
    whole_kernel,
)
from tnsim.problems.sequences.attribution import fold_attribution
from tnsim.problems.state_sizes import in_common_units
from tnsim.problems.tensors.kinds import LayerKind, kinds, nonlinear
from tnsim.problems.tokens import merged_linear
from tnsim.scaled import Scaled, beyond_float, power
from tnsim.tables import html_table

GRANULARITIES = ("layer", "head", "unit")  # values of `by`


@dataclass(frozen=True, eq=False)
class Attribution:
    """Contributions of pairs of components, which sum to the inner product.

    Attributes:
        values: Contributions in units of squared outputs; entry (i, j) belongs to component
            `bra[i]` of the first model and component `ket[j]` of the second.
        bra, ket: Names of the components of the first and of the second model.
        metric: Name of the metric.
        exact: Whether the metric's definition is met exactly.
        caveats: Differences between the models and the networks they were read from.
    """

    values: Float[np.ndarray, "bra ket"]
    bra: tuple[str, ...]
    ket: tuple[str, ...]
    metric: str
    exact: bool
    caveats: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        guarantee = "exact" if self.exact else "approximation"
        title = f"Contributions to <a|b>, {self.metric} ({guarantee})"
        rows = [
            (name, *(f"{value:.4g}" for value in row))
            for name, row in zip(self.bra, self.values, strict=True)
        ]
        return html_table(title, rows, ("", *self.ket))


def attribution(
    a: Model,
    b: Model,
    metric: Metric = GaussianClosure(),
    *,
    by: str = "layer",
    dtype: DTypeLike = "float64",
) -> Attribution:
    """Split `inner(a, b, metric)` into contributions of pairs of components.

    Args:
        a, b: Models of one depth, with at least one nonlinear layer.
        metric: Metric that works layer by layer: `GaussianClosure` or `TreeSymmetric`; for hidden
            units and for models with an activation a Gaussian one.
        by: `"layer"` for the residual stream into the last nonlinear layer, that layer, and
            constants; `"head"` for the heads of a last attention layer one by one; `"unit"` for
            the hidden units of models with a single nonlinear layer. A component that a model
            lacks has zeros: labels do not depend on the partner.
        dtype: Precision of the computation, float64 or float32; the result is float64.

    Returns:
        An `Attribution`, float64 of shape (components of a, components of b), in units of squared
        outputs.

    Raises:
        ModelError: An argument is not a plain model; the models have no nonlinear layer, different
            numbers of nonlinear layers, different last nonlinear layers, or no heads to tell
            apart; the metric joins whole models; or `inner` would raise it.
        TnsimError: A contribution is beyond float64.

    Example:
        >>> import numpy as np, tnsim
        >>> layer = tnsim.Bilinear(np.eye(2), np.eye(2), np.eye(2))
        >>> a = tnsim.Model([layer])
        >>> result = tnsim.attribution(a, a)
        >>> result.bra
        ('stream', 'layer 0', 'constant')
        >>> round(float(result.values.sum() / tnsim.inner(a, a)), 6)
        1.0
    """
    dtype = dtype_name(dtype)
    _check_question(a, b, by)
    check_comparison(a, b, metric)
    if by == "unit" or answers([a, b], metric):
        return _by_units(a, b, metric, by)
    parts, near = in_common_units([a, b], metric, slices=False)
    # Units are applied before linear layers are merged, so that no product of weights leaves the
    # range of floats.
    models: dict[Side, Model] = {"A": _prepared(parts[0].value), "B": _prepared(parts[1].value)}
    last: dict[Side, LayerKind] = {
        "A": _last_nonlinear(models["A"]),
        "B": _last_nonlinear(models["B"]),
    }
    _check_layers(last["A"], last["B"], by)
    _check_metric(a, b, metric)
    labels: dict[Side, tuple[str, ...]] = {
        side: _labels(models[side], last[side], by) for side in SIDES
    }
    family = Sequences.of(models["A"], models["B"], near)
    mantissas, exponent = _contracted(family, models, near, labels, by, dtype)
    values = power(mantissas, exponent + sum(part.exponent for part in parts))
    if np.isnan(mantissas).any() or beyond_float(values, mantissas):
        raise _beyond_float(metric)
    said = caveats(a, b)
    warn_of_caveats(said, stacklevel=2)
    exact = family.exact and not guesses(a, b)
    return Attribution(values, labels["A"], labels["B"], metric.name, exact, said)


def _by_units(a: Model, b: Model, metric: Metric, by: str) -> Attribution:
    """Contributions of pairs of hidden units, or of all units together (see `problems.kernels`).

    Raises:
        ModelError: A model has no nonlinear layer, or the metric knows no kernel of the models.
    """
    if by == "head":
        raise ModelError("by='head' needs attention as the last nonlinear layer; use by='layer'")
    check_has_units([a, b], metric)
    with execution.precision():
        bra, ket = (under(model, metric, KERNEL_DTYPE) for model in (a, b))
        total: Any = 0.0
        for count, one, two in zip(bra.counts, bra.positions, ket.positions, strict=True):
            first, second = readout(one), readout(two)
            # <f_A, f_B> = sum_gh (R_A[:, g] . R_B[:, h]) K[g, h], with readouts R and the kernel K
            # of units, constant and input: every summand is a share.
            shares = np.asarray((first.T @ second) * whole_kernel(one, two), np.float64)
            total = total + count * _gathered(_gathered(shares, one, by).T, two, by).T
    values = power(total, bra.exponent + ket.exponent)
    if beyond_float(values, total):
        raise _beyond_float(metric)
    said = caveats(a, b)
    warn_of_caveats(said, stacklevel=3)
    of_bra, of_ket = _unit_labels(a, bra, by), _unit_labels(b, ket, by)
    return Attribution(values, of_bra, of_ket, metric.name, not guesses(a, b), said)


def _gathered(shares: np.ndarray, model: Prepared, by: str) -> np.ndarray:
    """Rows of hidden units, the constant and the input as rows of components.

    The input goes to the front, where the stream stands.
    """
    units = shares[: model.units]
    units = units.reshape(model.copies, -1, shares.shape[1]).sum(axis=0)
    if by == "layer":
        units = units.sum(axis=0, keepdims=True)
    constant, stream = shares[model.units : model.units + 1], shares[model.units + 1 :]
    return np.concatenate([stream.sum(axis=0, keepdims=True), units, constant])


def _unit_labels(model: Model, prepared: PreparedModel, by: str) -> tuple[str, ...]:
    """The names of components, in the order of `_gathered`."""
    number = _number_of_last_nonlinear(model)
    if by == "layer":
        return ("stream", f"layer {number}", "constant")
    units = range(prepared.positions[0].units // prepared.positions[0].copies)
    return ("stream", *(f"layer {number} unit {n}" for n in units), "constant")


def _beyond_float(metric: Metric) -> TnsimError:
    return TnsimError(
        f"the contributions under {metric.name} are beyond float64 for these weights; "
        "scale down the last layer of a model, which changes no share"
    )


def _check_question(a: Model, b: Model, by: str) -> None:
    """Raise `ModelError` unless both models are plain and `by` is known."""
    if by not in GRANULARITIES:
        raise ModelError(f"by must be one of {', '.join(GRANULARITIES)}, found {by!r}")
    for model in (a, b):
        if not isinstance(model, Model):
            raise ModelError(
                "attribution is between two models; take those of a combination one by one"
            )


def _check_layers(a: LayerKind, b: LayerKind, by: str) -> None:
    """Raise `ModelError` unless the last nonlinear layers have components that can be compared."""
    if a.mixes_positions is not b.mixes_positions:
        raise ModelError(
            f"the last nonlinear layers are {a.name} and {b.name}; they cannot be compared"
        )
    if by == "head" and not a.mixes_positions:
        raise ModelError(
            "by='head' needs an attention layer as the last nonlinear layer, "
            f"found {a.name}; use by='layer'"
        )


def _check_metric(a: Model, b: Model, metric: Metric) -> None:
    """Raise `ModelError` unless depths are equal and the metric joins layer by layer."""
    depths = [nonlinear(kinds(model)) for model in (a, b)]
    if depths[0] != depths[1]:
        raise ModelError(
            "attribution is for models of one depth, "
            f"found {depths[0]} and {depths[1]} nonlinear layers"
        )
    if not joins_legs(metric) or joins_whole_trees(type(metric), depths[0]):
        raise ModelError(
            "attribution works layer by layer: use GaussianClosure() or TreeSymmetric(), "
            f"found {type(metric).__name__}"
        )


def _contracted(
    family: Sequences,
    models: dict[Side, Model],
    metric: Metric,
    labels: dict[Side, tuple[str, ...]],
    by: str,
    dtype: str,
) -> Scaled[Float[np.ndarray, "bra ket"]]:
    """Products of all pairs of components, in a single scale."""
    assert family.ket is not None  # the family was made of two models
    counts: dict[Side, int] = {side: len(labels[side]) for side in SIDES}
    problem = fold_attribution(
        {"A": family.bra, "B": family.ket},
        family.metric,
        family.input_kind,
        family.n_ctx,
        counts,
        by_head=by == "head",
    )
    plan = plan_problem(problem, metric.name, family.exact, dtype, LARGE)
    known = model_weights(family, models)
    known |= family.inputs(plan.shapes, metric, models["A"].d_in)
    for side in SIDES:
        known |= _selectors(side, counts[side], by)
    with execution.precision():
        backend = backend_of(plan)
        arrays = execution.placed({name: known[name] for name in plan.shapes}, dtype, backend)
        result = jax.device_get(execution.run(plan, arrays, backend))
    exponent = execution.exponent_of(result, dict(plan.scales["AB"]))
    return Scaled(np.asarray(result.values["AB"], np.float64), exponent)


def _prepared(model: Model) -> Model:
    """An equal model over sequences; a model of vectors reads sequences of a single position.

    Linear layers after the last nonlinear layer are merged into one.
    """
    layers = list(model.layers)
    if max(model.orders) == 1:
        raise ModelError(
            "attribution is by the parts of the last nonlinear layer, but a model is linear"
        )
    behind = _number_of_last_nonlinear(model) + 1
    head, tail = layers[:behind], layers[behind:]
    if tail:
        head.append(merged_linear(tail))
    return Model(head, model.n_ctx or 1)


def _number_of_last_nonlinear(model: Model) -> int:
    """The number of the last nonlinear layer."""
    return max(n for n, order in enumerate(model.orders) if order > 1)


def _last_nonlinear(model: Model) -> LayerKind:
    """The kind of the last nonlinear layer."""
    return kinds(model)[_number_of_last_nonlinear(model)]


def _labels(model: Model, last: LayerKind, by: str) -> tuple[str, ...]:
    """The names of components, in the order of `_selectors`."""
    number = _number_of_last_nonlinear(model)
    if by == "layer":
        return ("stream", f"layer {number}", "constant")
    heads = [f"layer {number} head {h}" for h in range(last.heads[0])]
    return ("stream", *heads, "constant")


def _selectors(side: Side, count: int, by: str) -> dict[str, Float[np.ndarray, ...]]:
    """Arrays that assign each part of an output to a component, by leaf name.

    The stream is the first component, constants are the last; the layer or its heads lie between.
    """
    eye = np.eye(count)
    selectors = {Selector(STREAM, side): eye[0], Selector(CONSTANT, side): eye[-1]}
    if by == "head":
        selectors[Selector(HEADS, side)] = eye[:, 1:-1]
    else:
        selectors[Selector(CORE, side)] = eye[1]
    return {str(name): array for name, array in selectors.items()}
