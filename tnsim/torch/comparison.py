"""A comparison of two models as a structure without numbers, and its numbers.

Everything that does not change from one step of training to the next stands in a `Comparison`,
under which JAX keeps compiled programs. The numbers are leaves of (a, b, metric): moving weights,
with respect to which derivatives are taken, and fixed numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from tnsim.compare.inner_products import at_traced_points, inner_products
from tnsim.compare.request import Request, Tracing
from tnsim.engine import precision
from tnsim.engine.budget import Budget
from tnsim.engine.precision import Arithmetic, Cosine
from tnsim.engine.runtime.compiling import compiler_options
from tnsim.metrics.points import WeightedPoints
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
        form: Tree structure of (a, b, metric), with None for the metric where a sample is given.
        others: Leaves that are no numbers, each with its number among the leaves, such as a user's
            metric that is no pytree.
        degree: Largest degree of the polynomials.
        dtype: Precision of the computation.
        budget: Limits on work and memory.
    """

    form: Any
    others: tuple[tuple[int, Any], ...]
    degree: int
    dtype: str
    budget: Budget

    @property
    def arithmetic(self) -> Arithmetic:
        """Degree and precision, which bound the errors of rounding."""
        return Arithmetic(self.degree, self.dtype)

    def cosine(self, moving: Weights, fixed: Fixed, tracing: Tracing) -> Cosine:
        """The cosine, float64 and unclipped, and its error bound, as JAX traces them.

        Args:
            moving: Weights with respect to which derivatives are taken.
            fixed: Numbers without derivatives.
            tracing: Way in which the comparison is traced.

        Returns:
            Two scalars.
        """
        # The leaves come back from three places (structure, moving and fixed numbers) and are put
        # in order by their numbers, as `tree.unflatten` expects them.
        leaves: dict[int, Any] = dict(self.others)
        for n, array in (moving | fixed.weights).items():
            leaves[n] = jnp.asarray(array, self.dtype)
        a, b, metric = jax.tree.unflatten(self.form, [leaves[n] for n in range(len(leaves))])
        if fixed.sample is None:
            request = Request(metric, self.dtype, self.budget, squared_norms=True, tracing=tracing)
            found = inner_products(a, b, request).values
        else:
            found = at_traced_points(a, b, fixed.sample, self.dtype).values
        cosines = precision.cosine(found["AB"], found["AA"], found["BB"], self.arithmetic)
        return Cosine(cosines.value.astype("float64"), cosines.error)


def comparison_of(
    a: Any, b: Any, request: Request, sample: WeightedPoints | None
) -> tuple[Comparison, dict[int, Any]]:
    """A comparison, and its numbers.

    Args:
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
    leaves, form = jax.tree.flatten((a, b, metric))
    numbers = {n: leaf for n, leaf in enumerate(leaves) if _is_number(leaf)}
    # Leaves that are no numbers are part of the key under which JAX keeps compiled programs, so
    # they are a tuple that can be hashed.
    others = tuple((n, leaf) for n, leaf in enumerate(leaves) if n not in numbers)
    degree = max(model.growth for one in (a, b) for _, model in terms(one))
    return Comparison(form, others, degree, request.dtype, request.budget), numbers


def _is_number(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") or isinstance(leaf, float)


def compiled(**options: Any) -> Any:
    """`jax.jit` with the compiler options of plans.

    The options are asked for when this file is imported, which is when gradients are first needed.
    """
    return partial(jax.jit, compiler_options=compiler_options(), **options)
