"""What JAX compiles for a cosine with derivatives. In: weights. Out: a cosine, how to pull back.

Everything that does not change from one step of training to the next stands in a `Comparison`,
under which JAX keeps the compiled programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from tnsim.compare.products import inner_products
from tnsim.engine import precision
from tnsim.engine.budget import Budget
from tnsim.engine.precision import Arithmetic, Cosine
from tnsim.models.model import terms

Weights = dict[int, Float[jax.Array, "..."]]
"""Arrays by their number among the leaves of (a, b, metric)."""


@dataclass(frozen=True)
class Comparison:
    """What is compared, without the numbers.

    Attributes:
        form: how (a, b, metric) is made of its leaves.
        degree: of the polynomials.
        dtype: precision of the computation.
        budget: what it may take.
    """

    form: Any
    degree: int
    dtype: str
    budget: Budget

    @property
    def arithmetic(self) -> Arithmetic:
        """What decides how many digits there are."""
        return Arithmetic(self.degree, self.dtype)


def comparison_of(
    a: Any, b: Any, metric: Any, dtype: str, budget: Budget
) -> tuple[Comparison, list[Any]]:
    """A comparison, and its leaves.

    Args:
        a: a model or a combination, as is b.
        b: the other one.
        metric: how inputs are weighed.
        dtype: precision of the computation.
        budget: what it may take.

    Returns:
        What is compared, and the weights and moments of (a, b, metric).
    """
    leaves, form = jax.tree.flatten((a, b, metric))
    degree = max(model.degree for one in (a, b) for _, model in terms(one))
    return Comparison(form, degree, dtype, budget), leaves


def _cosine(comparison: Comparison, moving: Weights, fixed: Weights) -> tuple[Any, Any]:
    """The cosine and its error bound, traced."""
    leaves = moving | fixed
    arrays = [jnp.asarray(leaves[n], comparison.dtype) for n in range(len(leaves))]
    a, b, metric = jax.tree.unflatten(comparison.form, arrays)
    found = inner_products(a, b, metric, True, False, comparison.dtype, comparison.budget).values
    return precision.cosine(found["AB"], found["AA"], found["BB"], comparison.arithmetic)


@partial(jax.jit, static_argnums=0)
def cosine(comparison: Comparison, moving: Weights, fixed: Weights) -> Cosine:
    """The cosine, unclipped, and the bound of its error.

    Args:
        comparison: what is compared.
        moving: weights that are tensors.
        fixed: all others, and the moments of the metric.

    Returns:
        Two scalars.
    """
    return Cosine(*_cosine(comparison, moving, fixed))


@partial(jax.jit, static_argnums=0)
def cosine_and_pullback(
    comparison: Comparison, moving: Weights, fixed: Weights
) -> tuple[Cosine, Any]:
    """The same, and what `gradient` needs of it.

    Args:
        comparison: as for `cosine`, as are the others.
        moving: with respect to which there are derivatives.
        fixed: all others.

    Returns:
        The cosine, and a function that is a pytree of what reverse mode keeps.
    """
    value, pullback, error = jax.vjp(
        lambda weights: _cosine(comparison, weights, fixed), moving, has_aux=True
    )
    return Cosine(value, error), pullback


@jax.jit
def gradient(pullback: Any) -> Weights:
    """The gradient of the cosine.

    Args:
        pullback: as `cosine_and_pullback` gives it.

    Returns:
        A derivative for each of the moving weights, in its type.
    """
    return pullback(1.0)[0]
