"""The cosine of a comparison and its gradient, along plans and their pullbacks.

A comparison is a function of weights that runs plans on its way. *Before* the plans, weights are
scaled and laid out as arrays; *after* them, inner products become a cosine. JAX traces the function
twice: `_arrays_for_plans` records the arrays of all plans, as no plan reads the result of another
plan, and `_cosine_after_plans` is given the results. Both become small compiled programs. Between
them the plans run as any plan, interpreted or compiled (see `engine/runtime/rates`), and
derivatives pass through them along their pullbacks (`engine/passes/pullback`).

Comparisons that run no plan, over points or kernels, are `_cosine_after_plans` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.compare.planned import ADVICE
from tnsim.compare.request import Tracing
from tnsim.engine.budget import check_pullbacks
from tnsim.engine.passes.pullback import pulled_back
from tnsim.engine.plan import Plan
from tnsim.engine.precision import Cosine
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.execution import Result
from tnsim.engine.runtime.gradients import Kept, gradients, run_kept
from tnsim.engine.runtime.rates import backend_of
from tnsim.torch.comparison import Comparison, Fixed, Weights, compiled

V = TypeVar("V")


class _PlanRun(NamedTuple):
    """A run of a plan.

    Attributes:
        plan: Plan that runs.
        arrays: Number of each array among the arrays of all runs, by name.
    """

    plan: Plan
    arrays: dict[str, int]


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _PlanRuns:
    """The runs of a comparison, a pytree without leaves: shapes and names, no numbers.

    Attributes:
        runs: Runs in the order in which they were asked for.
        varying: Numbers of the arrays that depend on moving weights.
    """

    runs: tuple[_PlanRun, ...]
    varying: tuple[int, ...]


class _GivenResults(NamedTuple):
    """What a trace is given after its plans.

    Attributes:
        mantissas: Outputs of each run by name.
        exponents: Exponents of the scales of each run.
        notes: Values noted before and between the plans.
    """

    mantissas: list[dict[str, Any]]
    exponents: list[dict[tuple[int, str], Any]]
    notes: list[Any]


class _RecordedTrace(Tracing):
    """A trace that runs no plan: it records the arrays and goes on with zeros for the results.

    Attributes:
        runs: Runs asked for so far.
        arrays: Distinct arrays of all runs; runs at several moment nodes read the same weights.
        notes: Values noted so far.
    """

    def __init__(self) -> None:
        self.runs: list[_PlanRun] = []
        self.arrays: list[jax.Array] = []
        self.notes: list[Any] = []
        self._numbers: dict[int, int] = {}  # by identity; `arrays` keeps the objects alive

    def noted(self, make: Callable[[], V]) -> V:
        self.notes.append(make())
        return self.notes[-1]

    def run(self, plan: Plan, arrays: dict[str, jax.Array]) -> Result:
        places = {}
        for name, array in arrays.items():
            places[name] = self._numbers.setdefault(id(array), len(self.arrays))
            if places[name] == len(self.arrays):
                self.arrays.append(array)
        self.runs.append(_PlanRun(plan, places))
        values = {name: jnp.zeros(shape, plan.dtype) for name, shape in plan.output_shapes.items()}
        exponents = dict.fromkeys(plan.scale_weights, jnp.zeros(()))
        return Result(values, exponents, plan.scale_weights)


class _ResumedTrace(Tracing):
    """A trace that is given the results of its plans, and the values noted before them."""

    def __init__(self, given: _GivenResults) -> None:
        self.notes = iter(given.notes)
        self.results = iter(zip(given.mantissas, given.exponents, strict=True))

    def noted(self, make: Callable[[], V]) -> V:
        return next(self.notes)

    def run(self, plan: Plan, arrays: dict[str, jax.Array]) -> Result:
        return Result(*next(self.results), plan.scale_weights)


@compiled(static_argnums=0)
def _arrays_for_plans(
    comparison: Comparison, moving: Weights, fixed: Fixed
) -> tuple[Any, Any, Any, _PlanRuns]:
    """The arrays of all plans by number, the pullback of those that vary, notes, and the runs."""

    def arrays(weights: Weights) -> Any:
        recorded = _RecordedTrace()
        comparison.cosine(weights, fixed, recorded)
        varying = _varying_arrays(recorded.arrays)
        every = dict(enumerate(recorded.arrays))
        moved = {n: every.pop(n) for n in varying}
        return moved, (every, recorded.notes, _PlanRuns(tuple(recorded.runs), varying))

    moved, pullback, (others, notes, runs) = jax.vjp(arrays, moving, has_aux=True)
    return moved | others, pullback, notes, runs


def _varying_arrays(arrays: list[jax.Array]) -> tuple[int, ...]:
    """Numbers of the arrays that depend on what JAX differentiates with respect to."""
    found: list[int] = []

    @jax.custom_vjp
    def asked(arrays: list[jax.Array]) -> jax.Array:
        return jnp.zeros(())

    def forward(arrays: list[Any]) -> tuple[jax.Array, None]:
        found.extend(n for n, array in enumerate(arrays) if array.perturbed)
        return jnp.zeros(()), None

    def backward(_: None, slope: Any) -> Any:
        raise AssertionError("the zero has no derivative")

    asked.defvjp(forward, backward, symbolic_zeros=True)
    asked(arrays)
    return tuple(found)


@compiled(static_argnums=0)
def _cosine_after_plans(
    comparison: Comparison, moving: Weights, fixed: Fixed, given: _GivenResults
) -> tuple[Cosine, tuple[Any, Any]]:
    """The cosine, and its derivatives in moving weights and mantissas of plans."""

    def cosine(weights: Weights, mantissas: Any) -> tuple[Any, Any]:
        tracing = _ResumedTrace(given._replace(mantissas=mantissas))
        value, error = comparison.cosine(weights, fixed, tracing)
        return value, error

    differentiated = jax.value_and_grad(cosine, (0, 1), has_aux=True)
    (value, error), slopes = differentiated(moving, given.mantissas)
    return Cosine(value, error), slopes


@compiled(static_argnums=0)
def _value_after_plans(
    comparison: Comparison, moving: Weights, fixed: Fixed, given: _GivenResults
) -> Cosine:
    """The cosine from the results of all plans, without derivatives."""
    return comparison.cosine(moving, fixed, _ResumedTrace(given))


@compiled()
def _gradient_of_weights(pullback: Any, slopes: dict[int, Any], own: Weights) -> Weights:
    """The gradient: through the arrays of plans, and beside them."""
    return jax.tree.map(jnp.add, own, pullback(slopes)[0])


def cosine(comparison: Comparison, moving: Weights, fixed: Fixed) -> Cosine:
    """The cosine, unclipped, and its error bound.

    Args:
        comparison: Structure of the models and the metric.
        moving: Weights that are tensors of PyTorch.
        fixed: Numbers without derivatives.

    Returns:
        Two scalars.
    """
    if fixed.sample is not None:
        return _value_after_plans(comparison, moving, fixed, _given_after_plans([], []))
    arrays, _, notes, runs = _arrays_for_plans(comparison, moving, fixed)
    results = []
    for plan, places in runs.runs:
        backend = backend_of(plan)
        placed = execution.placed(_arrays_by_name(arrays, places), plan.dtype, backend)
        results.append(execution.run(plan, placed, backend))
    return _value_after_plans(comparison, moving, fixed, _given_after_plans(results, notes))


def cosine_and_pullback(
    comparison: Comparison, moving: Weights, fixed: Fixed
) -> tuple[Cosine, Callable[[], Weights]]:
    """The cosine with its error bound, and a function that returns the gradient.

    Args:
        comparison: Structure of the models and the metric.
        moving: Weights with respect to which derivatives are taken.
        fixed: Numbers without derivatives.

    Returns:
        The cosine, and a function without arguments. It returns a derivative of the cosine for each
        of the moving weights, in the type of the weight.

    Raises:
        TooLarge: The plans, their pullbacks and what these keep exceed the budget.
    """
    if fixed.sample is not None:
        found, (own, _) = _cosine_after_plans(comparison, moving, fixed, _given_after_plans([], []))
        return jax.block_until_ready(found), lambda: own
    arrays, pullback, notes, runs = _arrays_for_plans(comparison, moving, fixed)
    pullbacks = []
    for plan, places in runs.runs:
        wanted = frozenset(name for name, n in places.items() if n in runs.varying)
        pullbacks.append(pulled_back(plan, wanted))
    metric = runs.runs[0].plan.metric if runs.runs else ""
    check_pullbacks(pullbacks, comparison.budget, metric, ADVICE)
    results, kept = [], []
    for one, (_, places) in zip(pullbacks, runs.runs, strict=True):
        result, read = run_kept(one, _arrays_by_name(arrays, places))
        results.append(result)
        kept.append(read)
    found, (own, slopes) = _cosine_after_plans(
        comparison, moving, fixed, _given_after_plans(results, notes)
    )
    # The caller may write to the tensors as soon as this returns, so JAX must be done.
    jax.block_until_ready((found, pullback))
    return found, partial(_pulled_through_plans, runs, kept, pullback, slopes, own)


def _arrays_by_name(arrays: dict[int, Any], places: dict[str, int]) -> dict[str, Any]:
    """The arrays of a run by name."""
    return {name: arrays[n] for name, n in places.items()}


def _given_after_plans(results: list[Result], notes: list[Any]) -> _GivenResults:
    """The results of plans, and notes, as arguments of a compiled program."""
    mantissas = [result.values for result in results]
    return _GivenResults(mantissas, [result.exponents for result in results], notes)


def _pulled_through_plans(
    runs: _PlanRuns, kept: list[Kept], pullback: Any, slopes: list[dict[str, Any]], own: Weights
) -> Weights:
    """The gradient, through the pullbacks of all runs.

    Args:
        runs: Runs of plans.
        kept: What their pullbacks read.
        pullback: Pullback of the arrays of plans.
        slopes: Derivatives of the cosine in the mantissas of each run.
        own: Derivatives of the cosine in moving weights at fixed mantissas.
    """
    total: dict[int, Any] = {}
    for (_, places), read, slope in zip(runs.runs, kept, slopes, strict=True):
        for name, found in gradients(read, slope).items():
            n = places[name]
            total[n] = total[n] + found if n in total else found
    for plan, places in runs.runs:  # no output depends on what is left
        for name, n in places.items():
            if n in runs.varying and n not in total:
                total[n] = np.zeros(plan.shapes[name], plan.dtype)
    return _gradient_of_weights(pullback, total, own)
