"""What JAX compiles for a cosine with derivatives. In: weights. Out: a cosine, how to pull back.

Everything that does not change from one step of training to the next stands in a `Comparison`,
under which JAX keeps the compiled programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from tnsim.compare.products import at_traced_points, inner_products
from tnsim.compare.question import Question
from tnsim.engine import precision
from tnsim.engine.budget import Budget
from tnsim.engine.precision import Arithmetic, Cosine
from tnsim.engine.programs import compiler_options
from tnsim.metrics.points import Weighted
from tnsim.models.model import terms

Weights = dict[int, Float[jax.Array, "..."]]
"""Arrays by their number among the leaves of (a, b, metric)."""


class Fixed(NamedTuple):
    """Numbers without derivatives.

    Attributes:
        weights: Of models, and the moments of the metric.
        sample: The points of a finite metric, None where legs are joined.
    """

    weights: Weights
    sample: Weighted | None


@dataclass(frozen=True)
class Comparison:
    """What is compared, without the numbers.

    Attributes:
        form: How (a, b, metric) is made of its leaves, the metric None where a sample is given.
        others: Leaves that are no numbers, by their number among the leaves: a metric from outside
            that is no pytree.
        degree: Of the polynomials.
        dtype: Precision of the computation.
        budget: What it may take.
    """

    form: Any
    others: tuple[tuple[int, Any], ...]
    degree: int
    dtype: str
    budget: Budget

    @property
    def arithmetic(self) -> Arithmetic:
        """What decides how many digits there are."""
        return Arithmetic(self.degree, self.dtype)


def comparison_of(
    a: Any, b: Any, asked: Question, sample: Weighted | None
) -> tuple[Comparison, dict[int, Any]]:
    """A comparison, and its leaves.

    Args:
        a: A model or a combination, as is b.
        b: The other one.
        asked: What is asked of them.
        sample: The points of a finite metric, which then has no moments.

    Returns:
        What is compared, and the weights and moments of (a, b, metric) by number.
    """
    metric = asked.metric if sample is None else None
    leaves, form = jax.tree.flatten((a, b, metric))
    numbers = {n: leaf for n, leaf in enumerate(leaves) if _is_number(leaf)}
    others = tuple((n, leaf) for n, leaf in enumerate(leaves) if n not in numbers)
    degree = max(model.degree for one in (a, b) for _, model in terms(one))
    return Comparison(form, others, degree, asked.dtype, asked.budget), numbers


def _compiled(**options: Any) -> Any:
    """`jax.jit` as the programs of plans are compiled; this file is read when one is needed."""
    return partial(jax.jit, compiler_options=compiler_options(), **options)


def _is_number(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") or isinstance(leaf, float)


def _cosine(comparison: Comparison, moving: Weights, fixed: Fixed) -> tuple[Any, Any]:
    """The cosine, float64, and its error bound, traced."""
    leaves: dict[int, Any] = dict(comparison.others)
    for n, array in (moving | fixed.weights).items():
        leaves[n] = jnp.asarray(array, comparison.dtype)
    a, b, metric = jax.tree.unflatten(comparison.form, [leaves[n] for n in range(len(leaves))])
    if fixed.sample is None:
        asked = Question(metric, comparison.dtype, comparison.budget, norms=True)
        found = inner_products(a, b, asked).values
    else:
        found = at_traced_points(a, b, fixed.sample, comparison.dtype).values
    cosines = precision.cosine(found["AB"], found["AA"], found["BB"], comparison.arithmetic)
    return cosines.value.astype("float64"), cosines.error


@_compiled(static_argnums=0)
def cosine(comparison: Comparison, moving: Weights, fixed: Fixed) -> Cosine:
    """The cosine, unclipped, and the bound of its error.

    Args:
        comparison: What is compared.
        moving: Weights that are tensors.
        fixed: What has no derivatives.

    Returns:
        Two scalars.
    """
    return Cosine(*_cosine(comparison, moving, fixed))


@_compiled(static_argnums=0)
def cosine_and_pullback(
    comparison: Comparison, moving: Weights, fixed: Fixed
) -> tuple[Cosine, Any]:
    """The same, and what `gradient` needs of it.

    Args:
        comparison: As for `cosine`, as are the others.
        moving: With respect to which there are derivatives.
        fixed: What has none.

    Returns:
        The cosine, and a function that is a pytree of what reverse mode keeps.
    """
    value, pullback, error = jax.vjp(
        lambda weights: _cosine(comparison, weights, fixed), moving, has_aux=True
    )
    return Cosine(value, error), pullback


@_compiled()
def gradient(pullback: Any) -> Weights:
    """The gradient of the cosine.

    Args:
        pullback: As `cosine_and_pullback` gives it.

    Returns:
        A derivative for each of the moving weights, in its type.
    """
    return pullback(1.0)[0]
