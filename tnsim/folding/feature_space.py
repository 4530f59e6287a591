"""Which numbers a feature vector holds. In: kinds of layers, a metric. Out: spaces to choose from.

A *space* says how a model becomes a vector whose dot products are inner products, and what that
costs. Each family of spaces is a function of the kinds of all models and the metric, which answers
None where it has no vectors for them; the rest of the program asks a space and never which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from jaxtyping import Float

from tnsim.folding.entry_space import entries
from tnsim.folding.polynomial_space import polynomials
from tnsim.metrics.protocol import Metric
from tnsim.models.model import Model
from tnsim.tensors.kinds import Kinds

_LARGEST = 2**24  # numbers in a vector of a combination, 128 MiB


class FeatureSpace(Hashable, Protocol):
    """How the models of a run become vectors. Hashable: programs are compiled for a space."""

    @property
    def route(self) -> str:
        """Name of the way to compute that it offers, among those of a run."""
        ...

    @property
    def d_out(self) -> int:
        """Outputs of the models."""
        ...

    @property
    def length(self) -> int:
        """Numbers of a vector, per output."""
        ...

    @property
    def parts(self) -> Sequence[FeatureSpace]:
        """Spaces that are made one at a time; dot products are sums over them."""
        ...

    @property
    def at_once(self) -> int:
        """Models of equal layers whose vectors are made together."""
        ...

    def multiplications(self, layers: Kinds) -> int:
        """Scalar multiplications that the vector of one model takes."""
        ...

    def in_flight(self, layers: Kinds, models: int) -> int:
        """Elements of intermediates while a part of the vectors of some models is made."""
        ...

    def weights(self, model: Model) -> Any:
        """A pytree of arrays, of equal shapes for models of equal kinds."""
        ...

    def inputs(self, metric: Metric, dtype: str) -> Any:
        """A pytree of what all vectors depend on besides the weights."""
        ...

    def vector(self, weights: Any, inputs: Any) -> Float[Any, "out features"]:
        """The vector of a model; JAX traces it."""
        ...


_FAMILIES: tuple[Callable[[Sequence[Kinds], Metric, int | None], FeatureSpace | None], ...]
_FAMILIES = polynomials, entries


def spaces(
    models: Sequence[Kinds], metric: Metric, n_ctx: int | None = None
) -> tuple[FeatureSpace, ...]:
    """The spaces that hold all models of these layers.

    Args:
        models: Kinds of layers, model by model.
        metric: Any.
        n_ctx: Positions of the sequences that the models read, None for vectors.

    Returns:
        One of each family that has vectors for them.

    Example:
        >>> import numpy as np, tnsim
        >>> from tnsim.tensors.kinds import kinds
        >>> square = tnsim.Bilinear(*[np.eye(2)] * 3)
        >>> deep = tnsim.Model([square, square])
        >>> [space.length for space in spaces([kinds(deep)], tnsim.Gaussian())]
        [9]
    """
    found = [family(models, metric, n_ctx) for family in _FAMILIES]
    return tuple(space for space in found if space is not None)


def fits(space: FeatureSpace) -> bool:
    """Whether combinations may be compared as vectors, which lose fewer digits than products."""
    return space.length * space.d_out <= _LARGEST
