"""The state of a model held between calls: its scaled form and its arrays on the device.

A model never changes, so its powers of two are found once, and its arrays are lifted, symmetrised
and put on the device (or kept as arrays of NumPy) once for each layout and dtype. These results are
belongings of the model (see `sessions`): they go when the model goes, when the session is cleared,
or when their memory is needed. Models whose weights are traced, or may still be written to, are
made ready at every call.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

import jax
import numpy as np

from tnsim.engine.runtime import execution
from tnsim.engine.runtime.execution import Tier
from tnsim.metrics.protocol import Metric
from tnsim.models.arrays import digest_of, is_traced
from tnsim.models.model import Model, is_constant, kept_with
from tnsim.names import Side, on_side
from tnsim.problems.base import Family
from tnsim.problems.units import Gauge, ScaledModel, Units, scaled_under, with_gauge
from tnsim.sessions import per_object_cache, session

V = TypeVar("V")

_FAR = 2**14
"""An exponent of two beyond all floats."""


def is_known_constant(value: Any) -> bool:
    """Whether a value is a constant model; the arrays of a model are looked at once.

    Example:
        >>> import tnsim
        >>> is_known_constant(tnsim.Model([tnsim.Linear([[1.0]])])), is_known_constant(1.0)
        (True, False)
    """
    return isinstance(value, Model) and is_constant(value)


def apart_by_precision(value: V) -> V:
    """The same models and metric, with arrays of their own for traces in float32.

    JAX remembers an array of NumPy that a trace has captured with the dtype that it had there, as
    long as the trace is kept. A later trace in float64 would be given the same array in float32: it
    fails, or loses half of the digits without a word. So no array is in traces of both kinds.

    Args:
        value: Pytree of models, arrays and anything else; leaves that are no arrays are kept.

    Returns:
        The value itself where JAX computes in float64; else equal views of its arrays. A model that
        occurs several times remains a single object, also in later calls.

    Example:
        >>> import numpy as np, tnsim
        >>> model = tnsim.Model([tnsim.Linear(np.eye(2))])
        >>> with jax.enable_x64(False):
        ...     first, second = apart_by_precision((model, model))
        >>> first is model, first is second
        (False, True)
        >>> np.shares_memory(first.layers[0].weight, model.layers[0].weight)
        True
    """
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return value
    return jax.tree.map(
        lambda leaf: _with_views(leaf) if isinstance(leaf, Model) else _view(leaf),
        value,
        is_leaf=lambda leaf: isinstance(leaf, Model),
    )


@per_object_cache
def _with_views(model: Model) -> Model:
    """A model with views of its arrays of NumPy, which JAX tells from these arrays."""
    return jax.tree.map(_view, model)


def _view(leaf: Any) -> Any:
    return leaf.view() if isinstance(leaf, np.ndarray) else leaf


def in_units(model: Model, units: Units, slices: bool) -> ScaledModel:
    """A model in scientific notation, see `scaled_under`; the same object at every call.

    Args:
        model: Model to be scaled.
        units: Units that all models of the comparison share.
        slices: Whether each output has an exponent of its own.
    """

    def make() -> ScaledModel:
        made = scaled_under(model, units, slices)
        _fixed(made.value)
        return made

    # Arrays that the scaled model shares with the model count with the model.
    def own_bytes(made: ScaledModel) -> int:
        known = set(map(id, jax.tree.leaves(model)))
        return total_bytes(leaf for leaf in jax.tree.leaves(made.value) if id(leaf) not in known)

    if not is_constant(model) or is_traced(units):
        return scaled_under(model, units, slices)
    # The key is everything besides the model that scaling reads.
    inputs = np.asarray(units.inputs).tobytes()
    key = in_units, content(units.metric), inputs, units.by_states, slices
    return session().belongings.get(model, key, make, own_bytes)


def in_new_gauge(model: Model, units: Units) -> tuple[ScaledModel, Gauge]:
    """A model in scientific notation, and its gauge for derivatives; made at every call.

    Args:
        model, units: Arguments of `in_units`, none of them traced.

    Returns:
        The model, and a gauge of arrays whose shapes do not depend on numbers: whatever the units,
        one compiled program writes models of one form.
    """
    made, gauge = with_gauge(model, units, slices=False)
    _fixed(made.value)

    def of_each(array: Any, by: Any) -> Any:
        # Beside rows of zeros exponents are infinite. `shifted` clips them no later than here.
        return np.broadcast_to(np.clip(by, -_FAR, _FAR), np.shape(array)).astype(np.int32)

    shifts = [
        None if by is None else jax.tree.map(of_each, model, by)
        for by in (gauge.shifts, gauge.further_shifts)
    ]
    return made, gauge._replace(shifts=shifts[0], further_shifts=shifts[1])


def _fixed(made: Model) -> None:
    """Forbid to write to the arrays of a model that no caller holds, so that it is a constant."""
    for leaf in jax.tree.leaves(made):
        if isinstance(leaf, np.ndarray):
            leaf.flags.writeable = False


def content(metric: Metric) -> Hashable:
    """The class of a metric and a digest of its numbers: equal for metrics of equal moments.

    Example:
        >>> import tnsim
        >>> content(tnsim.Gaussian(mean=[1.0])) == content(tnsim.Gaussian(mean=[1.0]))
        True
    """
    return type(metric), _metric_digest(metric) if jax.tree.leaves(metric) else None


_metric_digest = per_object_cache(digest_of)


def placed_weights(
    family: Family, side: Side, model: Model, dtype: str, tier: Tier
) -> dict[str, Any]:
    """The arrays of a model by the names of a problem's leaves, where plans read them.

    Args:
        family: Family of the problem, which lays out the model's arrays.
        side: Side of the model in the problem.
        model: Model whose weights are not traced.
        dtype: Type of the arrays.
        tier: Tier in which plans run, which says where the weights lie.

    Returns:
        Leaf name -> array of JAX or NumPy.
    """

    def placed() -> dict[str, Any]:
        # Names are those of side A, whichever side asks, so that both sides find the same arrays.
        # `execution.placed` leaves a few small arrays on the host; `device_put` places them too.
        arrays = family.weights("A", family.prepare(model))
        arrays = execution.placed(arrays, dtype, tier)
        return jax.device_put(arrays) if tier == "compile" else arrays

    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    key = family.layout, dtype, device, tier
    arrays = kept_with(model, key, placed, lambda made: total_bytes(made.values()))
    return {on_side(name, side): array for name, array in arrays.items()}


def total_bytes(arrays: Any) -> int:
    """The bytes of some arrays together; leaves that are no arrays have none."""
    return sum(getattr(array, "nbytes", 0) for array in arrays)
