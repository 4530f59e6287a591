"""A comparison of two models as a structure without numbers, and its numbers.

Everything that does not change from one step of training to the next stands in a `Comparison`,
under which JAX keeps compiled programs. The numbers are leaves of (a, b, metric): moving weights,
with respect to which derivatives are taken, and fixed numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from tnsim.compare.by_points import at_traced_points
from tnsim.compare.request import (
    Answer,
    InnerProducts,
    Question,
    Request,
    Tracing,
    Two,
    check_comparison,
)
from tnsim.compare.routes import routes_of
from tnsim.engine.budget import Budget
from tnsim.engine.runtime.compiling import compiler_options
from tnsim.metrics.points import WeightedPoints
from tnsim.models.differences import by_differences
from tnsim.models.model import terms

Weights = dict[int, Float[jax.Array, "..."]]
"""Arrays by their number among the leaves of (a, b, metric)."""


class Fixed(NamedTuple):
    """Numbers without derivatives.

    Attributes:
        weights: Fixed weights of the models, and the moments of the metric.
        sample: Points of a finite metric; None where legs are joined.
    """

    weights: Weights
    sample: WeightedPoints | None


@dataclass(frozen=True)
class Comparison:
    """The structure of a comparison, without its numbers.

    Attributes:
        answer: Function that makes the number of the inner products.
        form: Tree structure of (a, b, metric), with None for the metric where a sample is given,
            and None for the second model where it is the first.
        others: Leaves that are no numbers, each with its number among the leaves, such as a user's
            metric that is no pytree.
        dtype: Precision of the computation.
        budget: Limits on work and memory.
        squared_norms: Whether the answer reads the norms.
    """

    answer: Answer
    form: Any
    others: tuple[tuple[int, Any], ...]
    dtype: str
    budget: Budget
    squared_norms: bool

    def number(self, moving: Weights, fixed: Fixed, tracing: Tracing) -> tuple[Any, Any]:
        """The answer, as JAX traces it.

        Args:
            moving: Weights with respect to which derivatives are taken.
            fixed: Numbers without derivatives.
            tracing: Way in which the comparison is traced.

        Returns:
            A scalar, and numbers without derivatives.
        """
        arrays = {
            n: jnp.asarray(array, self.dtype) for n, array in (moving | fixed.weights).items()
        }
        products, models, request = self.products(arrays, fixed.sample, tracing)
        return beside_number(self.answer(products, models, request))

    def arguments(self, arrays: Mapping[int, Any]) -> tuple[Any, Any, Any]:
        """Both models and the metric, of their weights and moments by number among the leaves."""
        # The leaves come back from two places, structure and numbers, and are put in order by their
        # numbers, as `tree.unflatten` expects them.
        leaves: dict[int, Any] = dict(self.others) | dict(arrays)
        a, b, metric = jax.tree.unflatten(self.form, [leaves[n] for n in range(len(leaves))])
        return a, a if b is None else b, metric

    def products(
        self, arrays: Mapping[int, Any], sample: WeightedPoints | None, tracing: Tracing
    ) -> tuple[InnerProducts, Two, Request]:
        """The inner products, as in a trace also where arrays are those of NumPy.

        Args:
            arrays: All weights and moments by their number among the leaves.
            sample: Points of a finite metric; None where legs are joined.
            tracing: Way in which the comparison is traced.

        Returns:
            The products, and the models and the request that they answer.
        """
        a, b, metric = self.arguments(arrays)
        request = Request(metric, self.dtype, self.budget, self.squared_norms, tracing=tracing)
        if sample is not None:
            a, b = (by_differences(model, self.dtype) for model in (a, b))
            return at_traced_points(a, b, sample), (a, b), request
        check_comparison(a, b, metric)
        models = tuple(model for one in (a, b) for _, model in terms(one))
        (route,) = routes_of(Question(models, metric, request.pairs, False, self.dtype, True))
        return route.products(a, b, request, True), (a, b), request


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


def comparison_of(
    answer: Answer, a: Any, b: Any, request: Request, sample: WeightedPoints | None
) -> tuple[Comparison, dict[int, Any]]:
    """A comparison, and its numbers.

    Args:
        answer: Function that makes the number of the inner products.
        a: A model or a combination of models.
        b: The other model or combination.
        request: Metric, precision and budget of the comparison.
        sample: Points of a finite metric, which take the place of its moments.

    Returns:
        The comparison, and the weights and moments of (a, b, metric) by their number among the
        leaves.
    """
    # Where a sample stands for the metric, the metric's own numbers must not be traced as well.
    metric = request.metric if sample is None else None
    leaves, form = jax.tree.flatten((a, None if b is a else b, metric))
    numbers = {n: leaf for n, leaf in enumerate(leaves) if _is_number(leaf)}
    # Leaves that are no numbers are part of the key under which JAX keeps compiled programs, so
    # they are a tuple that can be hashed.
    others = tuple((n, leaf) for n, leaf in enumerate(leaves) if n not in numbers)
    comparison = Comparison(
        answer, form, others, request.dtype, request.budget, request.squared_norms
    )
    return comparison, numbers


def _is_number(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") or isinstance(leaf, float)


def compiled(**options: Any) -> Any:
    """`jax.jit` with the compiler options of plans.

    The options are asked for when this file is imported, which is when gradients are first needed.
    """
    return partial(jax.jit, compiler_options=compiler_options(), **options)
