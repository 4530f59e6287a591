"""Numbers of a comparison and their gradients, along plans and their pullbacks.

A comparison is a function of weights that runs plans on its way. *Before* the plans, weights are
written in scientific notation and laid out as arrays; *after* them, inner products become a number.
Nothing of this is traced as a whole:

1. `_Noting` goes the way of the comparison on arrays of NumPy and notes everything that is found by
   numbers and has no derivative: units, bases of bonds, how far sums within a model cancel.
2. `_arrays_for_plans` is traced with these notes given, and is little more than the layout. It
   records the arrays of all plans, as no plan reads the result of another plan.
3. The plans run as any plan, interpreted or compiled (see `engine/runtime/rates`), and derivatives
   pass through them along their pullbacks (`engine/runtime/gradients`).
4. `_number_after_plans` is given their results.

The second and the fourth are small compiled programs, kept under the structure of the comparison.
Comparisons that run no plan, over points, are `_number_after_plans` alone. Kernels of hidden units
and their slopes are computed among the notes (`KernelNumbers`), in NumPy, and traces are given
them: a trace of their formulas would compile for ten seconds, of gated units for a minute.

*In JAX* (`differentiated`). A function that is differentiated and not compiled is called with
numbers at hand. Its value and its gradient at these numbers are those above, and its derivative
along a change of the weights is the inner product of gradient and change. Where a rule of JAX asks
for this derivative inside another trace, as for second derivatives, the whole comparison is traced
instead, as it is inside `jax.jit` and `jax.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from tnsim.activations.kernels import Expanded, Kernel, KernelNumbers, Together
from tnsim.compare.comparison import (
    Comparison,
    Fixed,
    Weights,
    beside_number,
    comparison_of,
    compiled,
)
from tnsim.compare.inner_products import inner_products
from tnsim.compare.planned import ADVICE, announced_plans
from tnsim.compare.request import Answer, Arrays, Request, Tracing
from tnsim.compare.resident import in_new_notation
from tnsim.engine.budget import Budget, check_pullbacks
from tnsim.engine.plan import Plan
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.execution import Result
from tnsim.engine.runtime.gradients import Kept, gradients, pulled_back, run_kept
from tnsim.engine.runtime.rates import backend_of
from tnsim.errors import TooLarge
from tnsim.models.arrays import weights_dtype
from tnsim.models.differences import by_differences
from tnsim.models.model import Model, terms
from tnsim.problems.kernels import KernelMaker
from tnsim.problems.state_sizes import Units, written
from tnsim.scaled import Scaled
from tnsim.sessions import session

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


class _Noting(Tracing):
    """The way of a comparison on numbers, without its plans; notes what is found by numbers.

    Attributes:
        notes: Values noted, notations of models, and kernels, in the order of the way.
    """

    def __init__(self, budget: Budget, moving: Collection[Any]) -> None:
        """Args:
        budget: Limits of the comparison.
        moving: Arrays with respect to which derivatives are taken.
        """
        self.notes: list[Any] = []
        self._budget = budget
        self._moving = set(map(id, moving))
        self._slopes_bytes = 0

    def kernel(self, arguments: Any) -> KernelMaker:
        slopes = any(id(leaf) in self._moving for leaf in jax.tree.leaves(arguments))

        def noted_kernel(
            pairing: Any, first: Expanded, second: Expanded, together: Together
        ) -> Kernel:
            if slopes:
                self._check_slopes(pairing, len(first.unit), len(second.unit))
            compiled = session().tier == "compile"
            made = KernelNumbers.of(pairing, first, second, together, slopes, compiled)
            self.notes.append(made)
            return made.kernel(pairing, first, second)

        return noted_kernel

    def _check_slopes(self, pairing: Any, rows: int, columns: int) -> None:
        """Raise `TooLarge` where the slopes of all kernels so far exceed the budget."""
        # The numbers, and the products of slopes with the changes that they stand beside.
        self._slopes_bytes += 2 * 8 * (1 + pairing.slopes) * rows * columns
        room = self._budget.room(0, self._slopes_bytes)
        if self._slopes_bytes > room:
            raise TooLarge(
                f"gradients through kernels of {rows:,} x {columns:,} hidden units need "
                f"{self._slopes_bytes / 2**30:.3g} GiB here, and the budget is "
                f"{room / 2**30:.3g} GiB; use Empirical(inputs) or a larger tnsim.Budget"
            )

    def noted(self, make: Callable[[], V]) -> V:
        self.notes.append(make())
        return self.notes[-1]

    def in_units(self, model: Model, units: Units, slices: bool) -> Scaled[Model]:
        made, notation = in_new_notation(model, units, slices)
        self.notes.append(notation)
        return made

    def results(self, plan: Plan, runs: Sequence[Callable[[], Arrays]]) -> list[Result]:
        # Nothing is noted that depends on a result, so any numbers would do.
        values = {name: np.ones(shape, plan.dtype) for name, shape in plan.output_shapes.items()}
        exponents = dict.fromkeys(plan.scale_weights, np.zeros(()))
        return [Result(values, exponents, plan.scale_weights)] * len(runs)


class _RecordedTrace(Tracing):
    """A trace that is given its notes, and records the arrays of plans; their results are zeros.

    Attributes:
        runs: Runs asked for so far.
        arrays: Distinct arrays of all runs; runs at several moment nodes read the same weights.
    """

    def __init__(self, notes: list[Any]) -> None:
        self.runs: list[_PlanRun] = []
        self.arrays: list[jax.Array] = []
        self._notes = iter(notes)
        self._numbers: dict[int, int] = {}  # by identity; `arrays` keeps the objects alive

    def kernel(self, arguments: Any) -> KernelMaker:
        return partial(_given_kernel, self._notes)

    def noted(self, make: Callable[[], V]) -> V:
        return next(self._notes)

    def in_units(self, model: Model, units: Units, slices: bool) -> Scaled[Model]:
        return written(model, next(self._notes))

    def results(self, plan: Plan, runs: Sequence[Callable[[], Arrays]]) -> list[Result]:
        for arrays in runs:
            places = {}
            for name, array in arrays().items():
                places[name] = self._numbers.setdefault(id(array), len(self.arrays))
                if places[name] == len(self.arrays):
                    self.arrays.append(array)
            self.runs.append(_PlanRun(plan, places))
        values = {name: jnp.zeros(shape, plan.dtype) for name, shape in plan.output_shapes.items()}
        exponents = dict.fromkeys(plan.scale_weights, jnp.zeros(()))
        return [Result(values, exponents, plan.scale_weights)] * len(runs)


class _ResumedTrace(Tracing):
    """A trace that is given its notes and the results of its plans, and reads no model."""

    def __init__(self, given: _GivenResults) -> None:
        self._notes = iter(given.notes)
        self._results = iter(zip(given.mantissas, given.exponents, strict=True))

    def kernel(self, arguments: Any) -> KernelMaker:
        return partial(_given_kernel, self._notes)

    def noted(self, make: Callable[[], V]) -> V:
        return next(self._notes)

    def in_units(self, model: Model, units: Units, slices: bool) -> Scaled[Model]:
        return Scaled(model, next(self._notes).exponent)

    def results(self, plan: Plan, runs: Sequence[Callable[[], Arrays]]) -> list[Result]:
        return [Result(*next(self._results), plan.scale_weights) for _ in runs]


def _given_kernel(
    notes: Iterator[KernelNumbers], pairing: Any, first: Expanded, second: Expanded, _: Any
) -> Kernel:
    """The next kernel that was noted, as a function of the units of a trace."""
    return next(notes).kernel(pairing, first, second)


def _notes(
    comparison: Comparison, moving: Weights, fixed: Fixed, differentiated: bool
) -> list[Any]:
    """Everything that a comparison finds by numbers before its plans.

    Args:
        comparison: Structure of the comparison.
        moving: Weights with respect to which derivatives could be taken.
        fixed: Numbers without derivatives.
        differentiated: Whether derivatives are taken, for which kernels note their slopes.
    """
    arrays = {}
    for n, array in (moving | fixed.weights).items():
        # A copy that nobody writes to: measurements of it may be kept.
        arrays[n] = np.array(array, comparison.dtype)
        arrays[n].flags.writeable = False
    noting = _Noting(comparison.budget, [arrays[n] for n in moving] if differentiated else ())
    with np.errstate(all="ignore"):
        comparison.products(arrays, None, noting)
    return noting.notes


@compiled(static_argnums=0)
def _arrays_for_plans(
    comparison: Comparison, moving: Weights, fixed: Fixed, notes: list[Any]
) -> tuple[Any, Any, _PlanRuns]:
    """The arrays of all plans by number, the pullback of those that vary, and the runs."""

    def arrays(weights: Weights) -> Any:
        recorded = _RecordedTrace(notes)
        comparison.number(weights, fixed, recorded)
        varying = _varying_arrays(recorded.arrays)
        every = dict(enumerate(recorded.arrays))
        moved = {n: every.pop(n) for n in varying}
        return moved, (every, _PlanRuns(tuple(recorded.runs), varying))

    moved, pullback, (others, runs) = jax.vjp(arrays, moving, has_aux=True)
    return moved | others, pullback, runs


def _varying_arrays(arrays: list[jax.Array]) -> tuple[int, ...]:
    """Numbers of the arrays that depend on what JAX differentiates with respect to."""
    varying: list[int] = []

    @jax.custom_vjp
    def asked(arrays: list[jax.Array]) -> jax.Array:
        return jnp.zeros(())

    def forward(arrays: list[Any]) -> tuple[jax.Array, None]:
        varying.extend(n for n, array in enumerate(arrays) if array.perturbed)
        return jnp.zeros(()), None

    def backward(_: None, slope: Any) -> Any:
        raise AssertionError("the zero has no derivative")

    asked.defvjp(forward, backward, symbolic_zeros=True)
    asked(arrays)
    return tuple(varying)


@compiled(static_argnums=0)
def _number_after_plans(
    comparison: Comparison, moving: Weights, fixed: Fixed, given: _GivenResults
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The number with its companions, and its derivatives in moving weights and mantissas."""

    def number(weights: Weights, mantissas: Any) -> tuple[Any, Any]:
        return comparison.number(weights, fixed, _ResumedTrace(given._replace(mantissas=mantissas)))

    return jax.value_and_grad(number, (0, 1), has_aux=True)(moving, given.mantissas)


@compiled(static_argnums=0)
def _value_after_plans(
    comparison: Comparison, moving: Weights, fixed: Fixed, given: _GivenResults
) -> tuple[Any, Any]:
    """The number from the results of all plans, without derivatives."""
    return comparison.number(moving, fixed, _ResumedTrace(given))


@compiled()
def _gradient_of_weights(pullback: Any, slopes: dict[int, Any], own: Weights) -> Weights:
    """The gradient: through the arrays of plans, and beside them."""
    return jax.tree.map(jnp.add, own, pullback(slopes)[0])


def number(comparison: Comparison, moving: Weights, fixed: Fixed) -> tuple[Any, Any]:
    """The number of a comparison without derivatives.

    Args:
        comparison: Structure of the models and the metric.
        moving: Weights with respect to which derivatives could be taken.
        fixed: Numbers without derivatives.

    Returns:
        The number, and the numbers that accompany it.
    """
    if fixed.sample is not None:
        return _value_after_plans(comparison, moving, fixed, _given_after_plans([], []))
    notes = _notes(comparison, moving, fixed, differentiated=False)
    arrays, _, runs = _arrays_for_plans(comparison, moving, fixed, notes)
    results = []
    with announced_plans([plan for plan, _ in runs.runs]):
        for plan, places in runs.runs:
            backend = backend_of(plan)
            placed = execution.placed(_arrays_by_name(arrays, places), plan.dtype, backend)
            results.append(execution.run(plan, placed, backend))
    return _value_after_plans(comparison, moving, fixed, _given_after_plans(results, notes))


def number_and_pullback(
    comparison: Comparison, moving: Weights, fixed: Fixed
) -> tuple[tuple[Any, Any], Callable[[], Weights]]:
    """The number of a comparison, and a function that returns its gradient.

    Args:
        comparison: Structure of the models and the metric.
        moving: Weights with respect to which derivatives are taken.
        fixed: Numbers without derivatives.

    Returns:
        The number with the numbers that accompany it, and a function without arguments. The
        function returns a derivative for each of the moving weights, in the type of the weight.

    Raises:
        TooLarge: The plans, their pullbacks and what these keep exceed the budget.
    """
    if fixed.sample is not None:
        value, (own, _) = _number_after_plans(comparison, moving, fixed, _given_after_plans([], []))
        return jax.block_until_ready(value), lambda: own
    notes = _notes(comparison, moving, fixed, differentiated=True)
    arrays, pullback, runs = _arrays_for_plans(comparison, moving, fixed, notes)
    pullbacks = []
    for plan, places in runs.runs:
        wanted = frozenset(name for name, n in places.items() if n in runs.varying)
        pullbacks.append(pulled_back(plan, wanted))
    metric = runs.runs[0].plan.metric if runs.runs else ""
    check_pullbacks(pullbacks, comparison.budget, metric, ADVICE)
    results, kept = [], []
    with announced_plans([pulled.forward for pulled in pullbacks]):
        for pulled, (_, places) in zip(pullbacks, runs.runs, strict=True):
            result, read = run_kept(pulled, _arrays_by_name(arrays, places))
            results.append(result)
            kept.append(read)
    value, (own, slopes) = _number_after_plans(
        comparison, moving, fixed, _given_after_plans(results, notes)
    )
    # The caller may write to the tensors as soon as this returns, so JAX must be done.
    jax.block_until_ready((value, pullback))
    return value, partial(_pulled_through_plans, runs, kept, pullback, slopes, own)


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
        slopes: Derivatives of the number in the mantissas of each run.
        own: Derivatives of the number in moving weights at fixed mantissas.
    """
    total: dict[int, Any] = {}
    for (_, places), read, slope in zip(runs.runs, kept, slopes, strict=True):
        for name, derivative in gradients(read, slope).items():
            n = places[name]
            total[n] = total[n] + derivative if n in total else derivative
    for plan, places in runs.runs:  # no output depends on what is left
        for name, n in places.items():
            if n in runs.varying and n not in total:
                total[n] = np.zeros(plan.shapes[name], plan.dtype)
    return _gradient_of_weights(pullback, total, own)


def differentiated(answer: Answer, a: Any, b: Any, request: Request) -> tuple[Any, Any]:
    """An answer as a function that JAX differentiates at numbers, see `request.at_numbers`.

    Args:
        answer: Function that makes a number of the inner products.
        a, b: Models or combinations of models, some weights or moments being traced.
        request: Question asked of them.

    Returns:
        The number and the numbers that accompany it, traced.
    """
    first = by_differences(a, request.dtype)
    second = first if b is a else by_differences(b, request.dtype)
    models = [model for one in (first, second) for _, model in terms(one)]
    request = request._replace(dtype=weights_dtype(*models))
    comparison, leaves = comparison_of(answer, first, second, request, None)
    traced = {n: leaf for n, leaf in leaves.items() if isinstance(leaf, Tracer)}
    fixed = {n: leaf for n, leaf in leaves.items() if n not in traced}

    @jax.custom_jvp
    def found(moving: Weights) -> tuple[Any, Any]:
        """The answer as a part of the caller's trace."""
        one, two, metric = comparison.arguments(moving | fixed)
        whole = request._replace(metric=metric)
        return beside_number(answer(inner_products(one, two, whole), (one, two), whole))

    @partial(found.defjvp, symbolic_zeros=True)
    def derivative(primals: tuple[Weights], tangents: tuple[Weights]) -> tuple[Any, Any]:
        (moving,), (changes,) = primals, tangents
        changes = {n: x for n, x in changes.items() if not isinstance(x, SymbolicZero)}
        own = {n: moving[n] for n in changes}
        others = {n: array for n, array in moving.items() if n not in own}
        if any(isinstance(array, Tracer) for array in moving.values()):
            return jax.jvp(lambda some: found.fun(others | some), (own,), (changes,))
        with execution.precision():
            (number, beside), gradient = number_and_pullback(
                comparison, own, Fixed(fixed | others, None)
            )
            slopes = gradient()
        number, beside = jax.tree.map(_in_widest_floats, (number, beside))
        change = _along(slopes, changes).astype(number.dtype)
        return (number, beside), (change, jax.tree.map(jnp.zeros_like, beside))

    return found(traced)


def _in_widest_floats(array: Any) -> jax.Array:
    """An array in its type, or in the widest floats that the caller's settings admit."""
    return jnp.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))


@jax.jit
def _along(slopes: Weights, changes: Weights) -> jax.Array:
    """The derivative along changes of the weights."""
    return jnp.stack([(slopes[n] * changes[n]).sum() for n in changes]).sum()
