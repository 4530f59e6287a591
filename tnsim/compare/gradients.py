"""Numbers of a comparison and their gradients, found alike for JAX and for PyTorch.

A comparison is a function of weights in three steps:

    arrays     weights in scientific notation, laid out as arrays of plans
    Gram block inner products of models: plans that contract the arrays, or kernels of hidden units
    answer     a number of the inner products

Where the numbers are at hand, the block runs as it does without derivatives, and has a rule of its
own: plans run in NumPy, or on a device, and derivatives pass along their pullbacks; kernels and
their slopes are tables. The two other steps are small compiled programs, kept under the structure
of the comparison (`Form`), and the chain rule joins the three. Units, bases of bonds and how far
sums cancel are found by numbers first; the function does not depend on them, so derivatives take
them as constants (`Gauge`, `Written`). Models without moving weights are prepared as ever, once.
Where a session asks for compiled plans, all this is one program, as it is inside `jax.jit`.

*In JAX* (`differentiated`). A function that is differentiated and not compiled is called with
numbers at hand. Its derivative along a change of the weights is the inner product of gradient and
change; as a rule for tangents it serves both modes. Where a rule of JAX asks for this derivative
inside another trace, as for second derivatives, the whole comparison is traced instead, as it is
inside `jax.jit` and `jax.vmap`: the three steps are then a part of the caller's trace.

*Structure and numbers.* Everything that does not change from one step of training to the next
stands in a `Form`, under which JAX keeps compiled programs. The numbers are leaves of (a, b,
metric): moving weights, with respect to which derivatives are taken, and fixed numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_context
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Float

from tnsim.compare.by_kernels import GivenKernels, Kernels, kernels_at_numbers, traced_products
from tnsim.compare.by_plans import (
    ADVICE,
    AskedPair,
    PlannedPair,
    Written,
    announced_plans,
    planned,
    planned_pairs,
    products_of,
    traced_arrays,
)
from tnsim.compare.by_points import at_traced_points
from tnsim.compare.operands import (
    Places,
    by_number,
    in_new_gauge,
    in_units,
    numbered_models,
    placed_weights,
)
from tnsim.compare.request import (
    Answer,
    InnerProducts,
    Question,
    Request,
    check_comparison,
)
from tnsim.compare.routes import inner_products, routes_of
from tnsim.engine.plan import Plan
from tnsim.engine.planner import Budget, check_pullbacks
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.compiling import compiler_options
from tnsim.engine.runtime.execution import Result, tier_in_use
from tnsim.engine.runtime.gradients import gradients, pulled_back, run_kept
from tnsim.metrics.protocol import Metric, WeightedPoints
from tnsim.models.arrays import weights_dtype
from tnsim.models.differences import by_differences
from tnsim.models.model import AnyModel, Model, is_constant, terms
from tnsim.models.scaling import Unit
from tnsim.names import on_side
from tnsim.problems.families import Family, by_side
from tnsim.problems.units import (
    Gauge,
    ScaledModel,
    in_gauge,
    in_units_of_inputs,
    units_of_inputs,
)
from tnsim.sessions import session

_K = TypeVar("_K")
Weights = dict[int, Float[jax.Array, "..."]]
"""Arrays by their number among the leaves of (a, b, metric)."""


_Key: TypeAlias = tuple[int, str]
"""Number of a layout, or behind all layouts of a run, and the name of an array there."""
_Arrays: TypeAlias = dict[_Key, Any]
_Given: TypeAlias = "WeightedPoints | GivenKernels | _GivenModels"


@dataclass(frozen=True)
class Form:
    """The structure of a comparison, without its numbers.

    Attributes:
        answer: Function that makes the number of the inner products.
        tree: Tree structure of (a, b, metric), with None for the metric where points are given,
            and None for the second model where it is the first.
        others: Leaves that are no numbers, each with its number among the leaves, such as a user's
            metric that is no pytree.
        dtype: Precision of the computation.
        budget: Limits on work and memory.
        squared_norms: Whether the answer reads the norms.
    """

    answer: Answer
    tree: Any
    others: tuple[tuple[int, Any], ...]
    dtype: str
    budget: Budget
    squared_norms: bool

    def arguments(self, leaves: Mapping[int, Any]) -> tuple[Any, Any, Any]:
        """Both models and the metric, of all their numbers."""
        # The leaves come back from two places, structure and numbers, and are put in order by their
        # numbers, as `tree.unflatten` expects them.
        every: dict[int, Any] = dict(self.others) | dict(leaves)
        a, b, metric = jax.tree.unflatten(self.tree, [every[n] for n in range(len(every))])
        return a, a if b is None else b, metric

    def traced(self, leaves: Mapping[int, Any]) -> tuple[Any, Any, Any]:
        """Both models and the metric inside a trace, in the precision of the computation."""
        return self.arguments({n: jnp.asarray(x, self.dtype) for n, x in leaves.items()})

    def request(self, metric: Any) -> Request:
        """The request, under a metric with these or other numbers; None where points are given."""
        return Request(metric, self.dtype, self.budget, self.squared_norms)

    @property
    def coefficients(self) -> frozenset[int]:
        """Numbers of the leaves that are coefficients of models in a sum."""
        a, b, _ = jax.tree.unflatten(self.tree, range(self.tree.num_leaves))
        found = jax.tree.leaves((a, b), is_leaf=lambda x: isinstance(x, Model))
        return frozenset(x for x in found if isinstance(x, int))


class Moves(NamedTuple):
    """What of a comparison depends on moving weights.

    Attributes:
        places: Numbers of the models of each sum.
        models: Numbers of the models that depend on them.
        metric: Whether the metric depends on them.
    """

    places: Places
    models: frozenset[int]
    metric: bool


class Comparison(NamedTuple):
    """A comparison of two models and its numbers.

    Attributes:
        form: Structure of the comparison.
        models: Both sides as they were given.
        metric: Metric as it was given.
        leaves: Weights and moments by their number among the leaves of (a, b, metric).
        points: Points of a finite metric, in place of its moments; None where legs are joined.
    """

    form: Form
    models: tuple[AnyModel, AnyModel]
    metric: Metric
    leaves: dict[int, Any]
    points: WeightedPoints | None

    def fixed(self, moving: Collection[int]) -> dict[int, Any]:
        """The numbers without derivatives."""
        return {n: leaf for n, leaf in self.leaves.items() if n not in moving}

    def at(self, moving: Weights) -> tuple[Any, Any, Metric]:
        """Both models and the metric as numbers on the host.

        What was made of a model that never changes is kept with the model, so such a model remains
        the object that it is. Others are of arrays that nobody writes to, so that measurements of
        them may be kept too.

        Args:
            moving: Weights that take the place of others, by number.
        """

        def number(leaf: Any) -> Any:
            array = np.array(leaf, self.form.dtype)
            array.flags.writeable = False
            return array

        made: dict[int, Model] = {}  # of given models by identity: a model may occur in both sums

        def known(new: Any, given: Any) -> Any:
            if not isinstance(given, Model):
                return number(new)
            if id(given) not in made:
                made[id(given)] = given if is_constant(given) else jax.tree.map(number, new)
            return made[id(given)]

        a, b, metric = self.form.arguments(self.fixed(moving) | moving)
        a, b = (
            jax.tree.map(known, new, given, is_leaf=lambda x: isinstance(x, Model))
            for new, given in zip((a, b), self.models, strict=True)
        )
        if self.points is None and self.moves(moving).metric:
            return a, b, jax.tree.map(number, metric)
        return a, b, self.metric

    def moves(self, moving: Collection[int]) -> Moves:
        """What depends on moving weights.

        Args:
            moving: Numbers of the weights.
        """
        _, places = numbered_models(*self.models)
        a, b, metric = self.form.arguments({n: n in moving for n in self.leaves})
        models = frozenset(n for n, model in by_number(a, b, places).items() if _is_moved(model))
        return Moves(places, models, _is_moved(metric))


def comparison_of(
    answer: Answer, a: Any, b: Any, request: Request, points: WeightedPoints | None
) -> Comparison:
    """A comparison and its numbers.

    Args:
        answer: Function that makes the number of the inner products.
        a: A model or a combination of models.
        b: The other model or combination.
        request: Metric, precision and budget of the comparison.
        points: Points of a finite metric, which take the place of its moments.
    """
    # Where points stand for the metric, the metric's own numbers must not be traced as well.
    metric = request.metric if points is None else None
    leaves, tree = jax.tree.flatten((a, None if b is a else b, metric))
    numbers = {
        n: leaf
        for n, leaf in enumerate(leaves)
        if hasattr(leaf, "dtype") or isinstance(leaf, float)
    }
    # Leaves that are no numbers are part of the key under which JAX keeps compiled programs, so
    # they are a tuple that can be hashed.
    others = tuple((n, leaf) for n, leaf in enumerate(leaves) if n not in numbers)
    form = Form(answer, tree, others, request.dtype, request.budget, request.squared_norms)
    return Comparison(form, (a, b), request.metric, numbers, points)


def _is_moved(tree: Any) -> bool:
    """Whether a leaf is marked by True."""
    return any(leaf is True for leaf in jax.tree.leaves(tree))


def _compiled(**options: Any) -> Any:
    """`jax.jit` with the compiler options of plans.

    The options are asked for when this file is imported, which is when gradients are first needed.
    """
    return partial(jax.jit, compiler_options=compiler_options(), **options)


def number_and_pullback(
    comparison: Comparison, moving: Weights
) -> tuple[tuple[Any, Any], Callable[[], Weights]]:
    """The number of a comparison, and a function that returns its gradient.

    Args:
        comparison: Models, metric and numbers.
        moving: Weights with respect to which derivatives are taken, in place of those of the
            comparison.

    Returns:
        The number with the numbers that accompany it, and a function without arguments. The
        function returns a derivative for each of the moving weights, in the type of the weight.

    Raises:
        TooLarge: The computation with its derivatives would exceed the budget.
    """
    if comparison.points is not None:
        return _in_one_program(comparison, (), moving, comparison.points)
    a, b, metric = comparison.at(moving)
    check_comparison(a, b, metric)
    models, _ = numbered_models(a, b)
    request = comparison.form.request(metric)
    (route,) = routes_of(
        Question(tuple(models), metric, request.pairs, False, request.dtype, traced=True)
    )
    moves = comparison.moves(moving)
    which = frozenset(range(len(models))) if moves.metric else moves.models
    with np.errstate(all="ignore"):
        if isinstance(route, Kernels):
            given = kernels_at_numbers(models, which, moves.places, request)
        elif session().tier == "compile":
            given = _given_models(models, which, request)
        else:
            return _along_plans(comparison, models, request, moving, moves)
        return _in_one_program(comparison, moves.places, moving, given)


# Points, kernels and whatever a session compiles: the block is a part of the answer's program, or
# is given to it.


class _GivenModels(NamedTuple):
    """What the trace of a comparison along plans is given.

    Attributes:
        unit: Exponents of the units of the inputs, None where all are 0.
        models: Models that are not differentiated, in scientific notation, by number.
    """

    unit: Unit | None
    models: dict[int, ScaledModel]


def _given_models(models: Sequence[Model], moving: Collection[int], request: Request) -> _Given:
    """The models without moving weights, prepared as ever."""
    unit = units_of_inputs(models, request.metric)
    units = in_units_of_inputs(models, request.metric, unit)
    fixed = {n: in_units(m, units, False) for n, m in enumerate(models) if n not in moving}
    return _GivenModels(unit, fixed)


def _in_one_program(
    comparison: Comparison, places: Any, moving: Weights, given: _Given
) -> tuple[tuple[Any, Any], Callable[[], Weights]]:
    """The number and its gradient, which is there already."""
    fixed = comparison.fixed(moving)
    value, own = _with_gradient(comparison.form, places, moving, fixed, given)
    return jax.block_until_ready(value), lambda: own


@_compiled(static_argnums=(0, 1))
def _with_gradient(
    form: Form, places: Places, moving: Weights, fixed: Weights, given: _Given
) -> tuple[tuple[Any, Any], Weights]:
    """The number at some points, of kernels or along plans, and its gradient."""

    def number(weights: Weights) -> tuple[Any, Any]:
        a, b, metric = form.traced(fixed | weights)
        request = form.request(metric)
        if isinstance(given, WeightedPoints):
            a, b = (by_differences(model, form.dtype) for model in (a, b))
            products = at_traced_points(a, b, given)
        elif isinstance(given, GivenKernels):
            products = traced_products(a, b, places, request, given)
        else:
            products = _along_traced_plans(a, b, places, request, given)
        return beside_number(form.answer(products, (a, b), request))

    return jax.value_and_grad(number, has_aux=True)(moving)


def _along_traced_plans(
    a: AnyModel, b: AnyModel, places: Places, request: Request, given: _GivenModels
) -> InnerProducts:
    """The inner products of plans that are a part of the trace."""
    models = by_number(a, b, places)
    units = in_units_of_inputs(list(models.values()), request.metric, given.unit)
    request = request._replace(metric=units.metric)
    known = [given.models.get(n) or in_units(m, units, False) for n, m in models.items()]
    pairs = planned_pairs([made.value for made in known], places, request, traced=True)
    results, pullbacks = [], []
    for pair in pairs:
        plan = pair.plan
        arrays = traced_arrays(pair, known[pair.one].value, known[pair.two].value, request)
        pullbacks += [pulled_back(plan, _varying(own)) for own in arrays]
        results.append([execution.run(plan, own, "trace") for own in arrays])
    check_pullbacks(pullbacks, request.budget, pullbacks[0].forward.metric, ADVICE)
    written = Written.of(known, traced=True)
    return products_of(a, b, places, pairs, results, written, request, traced=True)


# Plans: arrays, block, answer.


class _Layout(NamedTuple):
    """The arrays of a model that plans read.

    Attributes:
        model: Number of the model.
        family: Family that lays out the arrays.
        names: Names of the arrays, as of side A.
    """

    model: int
    family: Family
    names: frozenset[str]


class _Run(NamedTuple):
    """A run of a plan.

    Attributes:
        plan: Plan that runs.
        keys: Key of each array that is differentiated, by its name in the plan.
        arrays: All arrays by name.
    """

    plan: Plan
    keys: dict[str, _Key]
    arrays: dict[str, Any]


def _along_plans(
    comparison: Comparison,
    models: Sequence[Model],
    request: Request,
    moving: Weights,
    moves: Moves,
) -> tuple[tuple[Any, Any], Callable[[], Weights]]:
    """The number of plans, and its gradient."""
    form = comparison.form
    unit = units_of_inputs(models, request.metric)
    units = in_units_of_inputs(models, request.metric, unit)
    request = request._replace(metric=units.metric)
    known, gauges = [], {}
    for n, model in enumerate(models):
        if n in moves.models:
            made, gauges[n] = in_new_gauge(model, units)
        else:
            made = in_units(model, units, False)
        known.append(made)
    written = [made.value for made in known]
    pairs = planned_pairs(written, moves.places, request, traced=True)
    asked, layouts = tuple([pair.asked for pair in pairs]), _layouts(pairs, moves)
    fixed = comparison.fixed(moving)
    moved, pullback, others = _arrays(form, moves, layouts, asked, moving, fixed, unit, gauges)
    runs = list(_runs(pairs, layouts, moves, written, request, moved, moved | others))
    results, back = _with_pullbacks(runs, request)
    value, (own, slopes) = _answer_of_plans(
        form,
        moves.places,
        asked,
        {n: moving[n] for n in form.coefficients if n in moving},
        fixed | moving,
        Written.of(known, traced=True),
        [result.values for result in results],
        [result.exponents for result in results],
    )
    # The caller may write to the tensors as soon as this returns, so JAX must be done.
    jax.block_until_ready((value, pullback))

    def gradient() -> Weights:
        total: _Arrays = {}
        for run, of_arrays in zip(runs, back(slopes), strict=True):
            for name, slope in of_arrays.items():
                key = run.keys[name]
                total[key] = total[key] + slope if key in total else slope
        for key, array in moved.items():  # no output depends on what is left
            if key not in total:
                total[key] = np.zeros(array.shape, array.dtype)
        return _gradient_of_weights(pullback, total, own)

    return value, gradient


def _layouts(pairs: Sequence[PlannedPair], moves: Moves) -> tuple[_Layout, ...]:
    """The layouts in which plans read models with moving weights, each once."""
    families: dict[tuple[int, Any], Family] = {}
    names: dict[tuple[int, Any], set[str]] = {}
    for pair in pairs:
        for side, n in by_side(pair.one, None if pair.alone else pair.two).items():
            if n in moves.models:
                key = n, pair.family.layout
                families.setdefault(key, pair.family)
                read = (name for name in pair.plan.shapes if name.startswith(side))
                names.setdefault(key, set()).update(on_side(name, "A") for name in read)
    return tuple(
        _Layout(n, family, frozenset(names[n, layout])) for (n, layout), family in families.items()
    )


@_compiled(static_argnums=(0, 1, 2, 3))
def _arrays(
    form: Form,
    moves: Moves,
    layouts: tuple[_Layout, ...],
    asked: tuple[AskedPair, ...],
    moving: Weights,
    fixed: Weights,
    unit: Unit | None,
    gauges: dict[int, Gauge],
) -> tuple[_Arrays, Any, _Arrays]:
    """The arrays that depend on moving weights, their pullback, and arrays beside them.

    Units of the inputs and gauges of the models with moving weights, by number, are found by
    numbers before plans run.
    """

    def arrays(weights: Weights) -> tuple[_Arrays, _Arrays]:
        a, b, metric = form.traced(fixed | weights)
        models = by_number(a, b, moves.places)
        made: _Arrays = {}
        for n, (model, family, names) in enumerate(layouts):
            written = in_gauge(models[model], gauges[model])
            of_model = family.weights("A", family.prepare(written))
            made |= {(n, name): array for name, array in of_model.items() if name in names}
        if moves.metric:
            known = in_units_of_inputs(list(models.values()), metric, unit).metric
            request = form.request(known)
            n = len(layouts)
            for pair in asked:
                for inputs in planned(pair, request).inputs(known, models[0].d_in):
                    made |= {(n, name): array for name, array in inputs.items()}
                    n += 1
        made = {key: jnp.asarray(array, form.dtype) for key, array in made.items()}
        varying = _varying(made)
        moved = {key: array for key, array in made.items() if key in varying}
        return moved, {key: array for key, array in made.items() if key not in varying}

    moved, pullback, others = jax.vjp(arrays, moving, has_aux=True)
    return moved, pullback, others


def _varying(arrays: Mapping[_K, Any]) -> frozenset[_K]:
    """Keys of the arrays that depend on what JAX differentiates with respect to.

    A step that moves the last of eight layers of width 256 takes 174 ms, 273 with all arrays moved.
    """
    varying: list[_K] = []

    @jax.custom_vjp
    def asked(arrays: Mapping[_K, Any]) -> jax.Array:
        return jnp.zeros(())

    def forward(arrays: dict[_K, Any]) -> tuple[jax.Array, None]:
        varying.extend(key for key, array in arrays.items() if array.perturbed)
        return jnp.zeros(()), None

    def backward(_: None, slope: Any) -> Any:
        raise AssertionError("the zero has no derivative")

    asked.defvjp(forward, backward, symbolic_zeros=True)
    asked(arrays)
    return frozenset(varying)


def _runs(
    pairs: Sequence[PlannedPair],
    layouts: Sequence[_Layout],
    moves: Moves,
    written: Sequence[Model],
    request: Request,
    moved: _Arrays,
    made: _Arrays,
) -> Iterator[_Run]:
    """The runs of all plans, at every moment node.

    Args:
        pairs: Pairs of models.
        layouts: Layouts of the models with moving weights.
        moves: What depends on moving weights.
        written: Models in scientific notation.
        request: Request for the sums, its metric in the units of the inputs.
        moved: Arrays that depend on moving weights.
        made: All arrays of models or of a metric with moving weights.
    """
    numbers = {(one.model, one.family.layout): n for n, one in enumerate(layouts)}
    behind = len(layouts)
    for pair in pairs:
        plan = pair.plan
        weights: dict[str, Any] = {}
        places: dict[str, _Key] = {}
        for side, n in by_side(pair.one, None if pair.alone else pair.two).items():
            layout = numbers.get((n, pair.family.layout))
            if layout is None:
                weights |= placed_weights(
                    pair.family, side, written[n], request.dtype, tier_in_use()
                )
                continue
            for key in made:
                if key[0] == layout:
                    places[on_side(key[1], side)] = key
        for inputs in pair.inputs(request.metric, written[0].d_in):
            own = dict(places)
            if moves.metric:
                own |= {name: (behind, name) for name in inputs}
                behind += 1
            arrays = weights | inputs | {name: made[key] for name, key in own.items()}
            arrays = {name: arrays[name] for name in plan.shapes}
            keys = {name: key for name, key in own.items() if name in arrays and key in moved}
            yield _Run(plan, keys, arrays)


def _with_pullbacks(
    runs: Sequence[_Run], request: Request
) -> tuple[list[Result], Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]]]:
    """The results of all runs, and the pullback of the block.

    Returns:
        The results, and a function of the derivatives in the mantissas of each run by name. It
        gives the derivatives in the arrays of each run, without arrays on which nothing depends.
    """
    pullbacks = [pulled_back(run.plan, frozenset(run.keys)) for run in runs]
    check_pullbacks(pullbacks, request.budget, runs[0].plan.metric, ADVICE)
    results, kept = [], []
    with announced_plans([pulled.forward for pulled in pullbacks]):
        for pulled, run in zip(pullbacks, runs, strict=True):
            result, read = run_kept(pulled, run.arrays)
            results.append(result)
            kept.append(read)
    return results, lambda slopes: [
        gradients(read, slope) for read, slope in zip(kept, slopes, strict=True)
    ]


@_compiled(static_argnums=(0, 1, 2))
def _answer_of_plans(
    form: Form,
    places: Places,
    asked: tuple[AskedPair, ...],
    coefficients: Weights,
    fixed: Weights,
    written: Written,
    mantissas: list[dict[str, Any]],
    exponents: list[dict[tuple[int, str], Any]],
) -> tuple[tuple[Any, Any], tuple[Weights, list[dict[str, Any]]]]:
    """The number of the results of all runs, and its derivatives in coefficients and mantissas."""

    def number(coefficients: Weights, mantissas: list[dict[str, Any]]) -> tuple[Any, Any]:
        a, b, metric = form.traced(fixed | coefficients)
        request = form.request(metric)
        pairs = [planned(pair, request) for pair in asked]
        runs = iter(zip(mantissas, exponents, strict=True))
        results = []
        for pair in pairs:
            plan = pair.plan
            results.append([Result(*next(runs), plan.scale_weights) for _ in range(plan.runs)])
        products = products_of(a, b, places, pairs, results, written, request, traced=True)
        return beside_number(form.answer(products, (a, b), request))

    return jax.value_and_grad(number, (0, 1), has_aux=True)(coefficients, mantissas)


@_compiled()
def _gradient_of_weights(pullback: Any, slopes: _Arrays, own: Weights) -> Weights:
    """The gradient: through the arrays of plans, and of the coefficients."""
    (found,) = pullback(slopes)
    return found | own


def beside_number(answer: Any) -> tuple[Any, Any]:
    """The number of an answer, and the numbers that accompany it, None where there are none.

    Example:
        >>> beside_number(0.5), beside_number((0.5, 1e-15))
        ((0.5, None), (0.5, 1e-15))
    """
    if not isinstance(answer, tuple):
        return answer, None
    number, beside = answer
    return number, beside


def differentiated(answer: Answer, a: Any, b: Any, request: Request) -> tuple[Any, Any]:
    """An answer as a function that JAX differentiates at numbers, see `request.at_numbers`.

    Args:
        answer: Function that makes a number of the inner products.
        a, b: Models or combinations of models, some weights or moments being traced.
        request: Metric, precision, budget, and the products that are wanted.

    Returns:
        The number and the numbers that accompany it, traced.
    """
    first = by_differences(a, request.dtype)
    second = first if b is a else by_differences(b, request.dtype)
    models = [model for one in (first, second) for _, model in terms(one)]
    request = request._replace(dtype=weights_dtype(*models))
    comparison = comparison_of(answer, first, second, request, None)
    traced = {n: leaf for n, leaf in comparison.leaves.items() if isinstance(leaf, Tracer)}

    def traced_whole(moving: Weights) -> tuple[Any, Any]:
        """The answer as a part of the caller's trace."""
        one, two, metric = comparison.form.arguments(comparison.fixed(moving) | moving)
        whole = request._replace(metric=metric)
        return beside_number(answer(inner_products(one, two, whole), (one, two), whole))

    # The rule does not name the function that it belongs to: such a circle would keep the tracers,
    # and the caller's arrays in the precision of this trace, until garbage is collected. Meanwhile
    # JAX would give these to traces of another precision.
    found = jax.custom_jvp(traced_whole)

    @partial(found.defjvp, symbolic_zeros=True)
    def derivative(primals: tuple[Weights], tangents: tuple[Weights]) -> tuple[Any, Any]:
        (moving,), (changes,) = primals, tangents
        changes = {n: x for n, x in changes.items() if not isinstance(x, SymbolicZero)}
        own = {n: moving[n] for n in changes}
        others = {n: array for n, array in moving.items() if n not in own}
        if any(isinstance(array, Tracer) for array in moving.values()):
            return jax.jvp(lambda some: traced_whole(others | some), (own,), (changes,))
        # Numbers are computed at once, outside of the trace that differentiates: it would follow
        # every program of the gradient, for a third of a small step.
        with execution.precision(), eval_context():
            here = comparison._replace(leaves=comparison.leaves | others)
            (number, beside), gradient = number_and_pullback(here, own)
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
