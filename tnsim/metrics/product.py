"""Independent inputs of any distribution as a metric. In: marginals. Out: a finite measure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tnsim.errors import ModelError
from tnsim.metrics.marginals import marginal
from tnsim.metrics.points import Points, Reading, check_draws, draws, mapped, product_rule
from tnsim.models.arrays import pytree


@pytree
@dataclass(frozen=True, eq=False)
class Product:
    """`E<A(x), B(x)>` over independent coordinates of any distribution.

    Exact by Gauss quadrature where inputs are few: degree + 1 nodes in every coordinate. Where
    they are many, `samples` draws inputs instead, and results have a standard error.

    Args:
        marginals: One distribution for all coordinates, or a list with one for each coordinate of
            an input (of a position, for sequences). A distribution is a name ("normal",
            "half-normal" `|z|`, "uniform" on [-1, 1], "laplace" of variance 1, "bimodal" -1 or 1
            plus 0.3 z, "spikes" 2 z or 0 with probability 3/4, "bernoulli" 0 or 1, "signs" -1 or
            1), a pair (nodes, weights), or an array of moments E[x^0], E[x], E[x^2] and so on.
        samples: How many inputs to draw, which makes the result an estimate; None for the exact
            value.
        seed: Of the draws.

    Raises:
        ModelError: A distribution is none of these, or there are no samples.

    Example:
        On [-1, 1], E[x^2] = 1/3 and E[x^4] = 1/5.

        >>> import tnsim
        >>> line = tnsim.Model([tnsim.Linear([[1.0]])])
        >>> square = tnsim.Model([tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])])
        >>> uniform = tnsim.Product("uniform")
        >>> for model in (line, square):
        ...     print(f"{tnsim.inner(model, model, uniform):.3f}")
        0.333
        0.200

    Source:
        Golub and Welsch, Calculation of Gauss quadrature rules, 1969.
    """

    marginals: Any = dataclasses.field(metadata={"static": True})
    samples: int | None = dataclasses.field(default=None, metadata={"static": True})
    seed: int = dataclasses.field(default=0, metadata={"static": True})
    name = "product"
    pairs_within_model = True

    def __post_init__(self) -> None:
        check_draws(self.samples, self.seed)
        given = self.marginals
        kept = tuple(map(_kept, given)) if isinstance(given, list) else (_kept(given),)
        for one in kept:
            marginal(one)
        object.__setattr__(self, "marginals", kept)

    def is_exact(self, nonlinear_layers: int) -> bool:
        """Nodes of Gauss rules are summed over, not draws."""
        return self.samples is None

    def points(self, reading: Reading) -> Points:
        """A product of Gauss rules, or draws.

        Raises:
            ModelError: There are distributions for another number of coordinates, moments are too
                few for the degree of the models, or draws are asked for where only moments are
                known.
        """
        if len(self.marginals) not in (1, reading.d_in):
            raise ModelError(
                f"the metric has {len(self.marginals)} distributions, but the models read "
                f"{reading.d_in} coordinates"
            )
        if self.samples is not None:
            for one in map(marginal, self.marginals):
                if one.draw is None:
                    raise ModelError(f"nothing can be drawn from {one.name}; leave out samples")
            draw = partial(_draw, self.marginals, reading.shape)
            return draws(self.samples, self.seed, draw)
        rules = [marginal(one).rule(reading.degree + 1) for one in self.marginals]
        each = rules * (reading.d_in // len(rules)) * (reading.n_ctx or 1)
        return mapped(product_rule(each), partial(_shaped, reading.shape))


def _kept(given: Any) -> Any:
    """A distribution as its name, or with arrays of its numbers."""
    if isinstance(given, str):
        return given
    if isinstance(given, tuple):
        return tuple(np.asarray(one, np.float64) for one in given)
    return np.asarray(given, np.float64)


def _shaped(shape: tuple[int, ...], inputs: Any) -> Any:
    return inputs.reshape(len(inputs), *shape)


def _draw(given: tuple, shape: tuple[int, ...], rng: np.random.Generator, count: int) -> Any:
    """Draws of inputs, coordinate by coordinate where they differ."""
    drawing = [marginal(one).draw for one in given]
    if len(drawing) == 1:
        assert drawing[0] is not None
        return drawing[0](rng, (count, *shape))
    columns = [draw(rng, (count, *shape[:-1])) for draw in drawing if draw is not None]
    return np.stack(columns, axis=-1)
