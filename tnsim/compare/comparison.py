"""A comparison of two models, apart into its structure and its numbers.

Everything that does not change from one step of training to the next stands in a `Form`, under
which JAX keeps compiled programs. The numbers are leaves of (a, b, metric): moving weights, with
respect to which derivatives are taken, and fixed numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.compare.request import Answer, Request
from tnsim.compare.sums_of_models import Places, by_number, numbered_models
from tnsim.engine.budget import Budget
from tnsim.metrics.points import WeightedPoints
from tnsim.metrics.protocol import Metric
from tnsim.models.model import AnyModel, Model, is_constant

Weights = dict[int, Float[jax.Array, "..."]]
"""Arrays by their number among the leaves of (a, b, metric)."""


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
    numbers = {n: leaf for n, leaf in enumerate(leaves) if _is_number(leaf)}
    # Leaves that are no numbers are part of the key under which JAX keeps compiled programs, so
    # they are a tuple that can be hashed.
    others = tuple((n, leaf) for n, leaf in enumerate(leaves) if n not in numbers)
    form = Form(answer, tree, others, request.dtype, request.budget, request.squared_norms)
    return Comparison(form, (a, b), request.metric, numbers, points)


def _is_moved(tree: Any) -> bool:
    """Whether a leaf is marked by True."""
    return any(leaf is True for leaf in jax.tree.leaves(tree))


def _is_number(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") or isinstance(leaf, float)
