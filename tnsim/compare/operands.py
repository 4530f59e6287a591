"""What is multiplied in a comparison: the models of sums, and their arrays, held between calls.

*Sums.* An inner product of sums follows by bilinearity. The distinct models of two sums are
numbered, so that every pair is multiplied once.

*Arrays.* A model never changes, so its powers of two are found once, and its arrays are lifted,
symmetrised and put on the device (or kept as arrays of NumPy) once for each layout and dtype. These
results are belongings of the model (see `sessions`): they go when the model goes, when the session
is cleared, or when their memory is needed. Models whose weights are traced, or may still be written
to, are made ready at every call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np

from tnsim.engine.runtime import execution
from tnsim.engine.runtime.execution import Tier
from tnsim.metrics.protocol import Metric
from tnsim.models.arrays import bytes_of, digest_of, is_traced
from tnsim.models.model import AnyModel, Model, is_constant, kept_with, terms
from tnsim.names import Side, on_side
from tnsim.problems.families import Family
from tnsim.problems.units import Gauge, ScaledModel, Units, scaled_under, with_gauge
from tnsim.scaled import (
    Scaled,
    ScaledSum,
    add,
    scaled_terms,
    share_of_squares,
    times,
    total,
)
from tnsim.sessions import per_object_cache, session

Places: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Numbers of the models that each of two sums consists of."""
SumOfModels: TypeAlias = Scaled[tuple[tuple[Any, Any, Any], ...]]
"""A sum of models: triples (coefficient, exponent, model as prepared, or its number), and the
exponent of the sum."""


V = TypeVar("V")
_FAR = 2**14
"""An exponent of two beyond all floats."""
_SMALL = 2**16
"""Most weights of a model that is kept in the units of a run, half a MiB."""


def numbered_models(first: AnyModel, second: AnyModel) -> tuple[list[Model], Places]:
    """The distinct models of two sums, and the numbers of those that each sum consists of.

    Example:
        >>> import tnsim
        >>> one, two = (tnsim.Model([tnsim.Linear([[x]])]) for x in (1.0, 2.0))
        >>> numbered_models(two - one, one)[1]
        ((0, 1), (1,))
    """
    numbers: dict[int, int] = {}
    models: list[Model] = []
    for _, model in (*terms(first), *terms(second)):
        if numbers.setdefault(id(model), len(models)) == len(models):
            models.append(model)
    first_places, second_places = (
        tuple(numbers[id(model)] for _, model in terms(one)) for one in (first, second)
    )
    return models, (first_places, second_places)


def by_number(first: AnyModel, second: AnyModel, places: Places) -> dict[int, Model]:
    """The models of two sums by their numbers, also where a trace made equal ones anew.

    Args:
        first, second: Sums of models.
        places: Numbers of the models of each sum, see `numbered_models`.
    """
    models: dict[int, Model] = {}
    for one, own in zip((first, second), places, strict=True):
        for n, (_, model) in zip(own, terms(one), strict=True):
            models.setdefault(n, model)
    return models


def pairs_of_models(places: Places, norms: bool) -> list[tuple[int, int]]:
    """The pairs of models whose inner products make up those of two sums, each pair once.

    Args:
        places: Numbers of the models of each sum.
        norms: Whether the norms of both sums are wanted as well.

    Example:
        >>> pairs_of_models(((0, 1), (1,)), norms=False), pairs_of_models(((0,), (1,)), norms=True)
        ([(0, 1), (1, 1)], [(0, 1), (0, 0), (1, 1)])
    """
    first, second = places
    sides = [(first, second), *([(first, first), (second, second)] if norms else [])]
    found: dict[tuple[int, int], None] = {}
    for one, two in itertools.chain.from_iterable(itertools.product(*both) for both in sides):
        if (two, one) not in found:  # the inner product is symmetric
            found[one, two] = None
    return list(found)


def scaled_sum(
    model: AnyModel, places: tuple[int, ...], exponents: Sequence[Any] | Mapping[int, Any]
) -> SumOfModels:
    """A model or a combination as a sum of scaled models, which are given by their numbers.

    Args:
        model: Model or combination.
        places: Numbers of its models.
        exponents: Exponents of two that the scaled models lack, by number.
    """
    if isinstance(model, Model):
        (n,) = places
        return Scaled(((1.0, np.float64(0.0), n),), exponents[n])
    weighted = zip(terms(model), places, strict=True)
    return scaled_terms((c, exponents[n], n) for (c, _), n in weighted)


def over_terms(
    bra: SumOfModels, ket: SumOfModels, product: Callable[[Any, Any], ScaledSum], norms: bool
) -> dict[str, ScaledSum]:
    """The inner product of two sums of models and, with `norms`, of each with itself.

    Args:
        bra, ket: Sums of models, without their own exponents.
        product: Inner product of two of the models, without the exponents of these.
        norms: Whether `AA` and `BB` are wanted as well as `AB`.
    """
    sides = {"AB": (bra, ket)}
    if norms:
        sides |= {"AA": (bra, bra), "BB": (ket, ket)}
    values = {}
    for name, (one, two) in sides.items():
        # <sum_m c_m 2^x_m m, sum_n d_n 2^y_n n> = sum_mn c_m d_n 2^(x_m + y_n) <m, n>
        pairs = itertools.product(one.value, two.value)
        values[name] = add([times(product(m, n), c * d, x + y) for (c, x, m), (d, y, n) in pairs])
    return values


def mean_share(
    side: SumOfModels, mean: Callable[[Any], ScaledSum | None], norm: ScaledSum
) -> float:
    """The share of the squared norm of a sum of models that is in its mean.

    Args:
        side: Sum of models, without its own exponent.
        mean: Mean of every output of one of the models, without its exponent; None where it is not
            known.
        norm: Squared norm of the sum, in total or by output.

    Returns:
        The share from 0 to 1; NaN where it is not known.
    """
    means = []
    for coefficient, exponent, model in side.value:
        of_outputs = mean(model)
        if of_outputs is None:
            return math.nan
        means.append(times(of_outputs, coefficient, exponent))
    return float(share_of_squares(add(means), total(norm, slices=np.ndim(norm.mantissa) > 0)))


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
        return bytes_of([leaf for leaf in jax.tree.leaves(made.value) if id(leaf) not in known])

    if not is_constant(model) or is_traced(units):
        return scaled_under(model, units, slices)
    # The key is everything besides the model that scaling reads.
    inputs = np.asarray(units.inputs).tobytes()
    key = in_units, content(units.metric), inputs, units.by_states, slices
    return session().belongings.get(model, key, make, own_bytes)


def in_units_of_run(model: Model, units: Units, slices: bool) -> ScaledModel:
    """A model of a run over many in scientific notation; of a small model as `in_units` has it.

    Large models would have their memory twice as long as they live, and take little of a run's
    time; those of a few thousand weights take most of it, and are compared again and again.
    """
    return (in_units if model.parameters <= _SMALL else scaled_under)(model, units, slices)


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


@per_object_cache
def content(metric: Metric) -> Hashable:
    """What a metric is besides an object: its class, settings and a digest of its numbers.

    A metric of a user's class that is no pytree has nothing but itself.

    Example:
        >>> import tnsim
        >>> content(tnsim.Gaussian(mean=[1.0])) == content(tnsim.Gaussian(mean=[1.0]))
        True
    """
    leaves, form = jax.tree.flatten(metric)
    if any(leaf is metric for leaf in leaves):
        return object()
    return type(metric), digest_of(metric) if leaves else form


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
    arrays = kept_with(model, key, placed, bytes_of)
    return {on_side(name, side): array for name, array in arrays.items()}
