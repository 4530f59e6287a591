"""The protocol of a family of problems, its leaves, and constants in sums over pairings.

A *family* is a way to write the inner products of two models as contractions: layer over layer,
diagrams over whole trees, sequences, tokens. Each is a small frozen object, made from the models'
layers (not their numbers) and the metric; `families.choose` picks the family that applies. The rest
of the program asks a family the questions of the protocol `Family`, and never which family it is.

*Constants.* Diagrams over whole trees (see `whole_tree`) pair *all* legs, as if the input were a
centred Gaussian. A lifted input `(1, x)` is not centred: its mean m holds the constant 1, and the
mean of x where the metric has a mean.

The way out is to let the mean fluctuate. Write the input as `z m + y`, with y ~ N(0, C) centred
and z a number. The inner product E that is asked for has z = 1. Take z ~ N(0, t) instead,
independent of y: then the input is a centred Gaussian of second moment `C + t m m^T`, and its sum
over pairings F(t) is the value that diagrams compute. E and F differ in a known way. The part of
degree 2k in z enters E with `1^(2k) = 1`, and F with `E[z^(2k)] = (2k - 1)!! t^k`. (Of 2n legs, an
odd number at z leaves an odd number at y, with expectation zero.) With f_k the part of degree 2k,

    E = sum_k f_k,          F(t) = sum_k (2k - 1)!! f_k t^k,          k = 0 .. n.

F is a polynomial of degree n in t, so its values at n + 1 points t_j determine every f_k, and E
is a single linear combination of these values, the same for all models:

    E = sum_j w_j F(t_j),          sum_j w_j t_j^k = 1 / (2k - 1)!!,          k = 0 .. n.

The points t need not be positive: F is a polynomial, and `C + t m m^T` is an argument of it.

Values at points were chosen over coefficients of powers of t. A product of parts of degree j and k
takes (j + 1)(k + 1) products of coefficients, and n + 1 of values: counted on plans, 0.8 times as
many multiplications at depth 2, and 1.1 to 1.2 times as many at depth 3. The runs at all points are
a single run on stacks of moments where that is quicker (see `compare.planned.runs_together`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from tnsim.engine.ir.problem import Problem
from tnsim.metrics.protocol import Metric
from tnsim.models.model import Model
from tnsim.names import Leaf, Pair, Side
from tnsim.sessions import session_cache

T = TypeVar("T")
_HALF_WIDTHS = np.linspace(0.1, 1.0, 91)
"""Half-widths h of the intervals [-h, h] that are searched for the points."""


class MomentNodes(NamedTuple):
    """The points at which a plan runs and the weights of its runs: `E = sum_j w_j F(t_j)`.

    Args:
        points: Variances t_j of the constant. A run has the second moment C + t_j m m^T.
        weights: Weights w_j of the runs.
        magnification: Factor by which the sum enlarges the rounding of the runs.
    """

    points: tuple[float, ...]
    weights: tuple[float, ...]
    magnification: float


@session_cache
def moment_nodes(legs: int) -> MomentNodes:
    """Points and weights that undo the over-counting of a constant of variance t.

    The points are Chebyshev's, stretched to [-h, h]. In a wide interval the powers
    `(2n - 1)!! t^n` are large and have to cancel; in a narrow interval the points lie close
    together and the weights are large, with alternating signs. The h with the least magnification
    is taken.

    Args:
        legs: Number 2n of input legs of both models together. The nodes are right for fewer legs
            too.

    Returns:
        n + 1 points and weights. The magnification is the largest, over k, of the absolute sum
        `sum_j |w_j| |t_j|^k (2k - 1)!!`, which would be 1 without the absolute values: it is 3 for
        4 legs, 10 for 8, 340 for 16.

    Example:
        A part of degree 2k in the constant is over-counted (2k - 1)!! times: 1, 1, 3.

        >>> nodes = moment_nodes(4)
        >>> for k in range(3):
        ...     print(f"{np.dot(nodes.weights, np.power(nodes.points, k)):.3f}")
        1.000
        1.000
        0.333

    Source:
        E[z^(2k)] = (2k - 1)!! t^k for z ~ N(0, t), as derived at the head of this module.
    """
    candidates = [_nodes_within(half_width, legs // 2) for half_width in _HALF_WIDTHS]
    return min(candidates, key=lambda nodes: nodes.magnification)


def _nodes_within(half_width: float, n: int) -> MomentNodes:
    """The n + 1 Chebyshev points on [-h, h] and the weights of the runs at them."""
    odd_numbers = [2 * k - 1.0 for k in range(1, n + 1)]
    double_factorials = np.cumprod([1.0, *odd_numbers])  # (2k - 1)!! for k = 0 .. n
    chebyshev = np.cos(np.pi * (2 * np.arange(n + 1) + 1) / (2 * n + 2))
    points = half_width * chebyshev
    # sum_j t_j^k w_j = 1 / (2k - 1)!!, one equation for each degree k: a Vandermonde system
    powers = points[None, :] ** np.arange(n + 1)[:, None]  # powers[k, j] = t_j^k
    weights = np.linalg.solve(powers, 1 / double_factorials)
    # Size of the runs relative to their sum: f_k enters run j as (2k - 1)!! f_k t_j^k.
    sizes = np.abs(weights) @ np.abs(powers).T * double_factorials
    return MomentNodes(tuple(points.tolist()), tuple(weights.tolist()), float(sizes.max()))


class Family(Protocol):
    """A way in which two models and a metric become a Problem.

    Frozen and hashable: a family is the key under which plans are stored, so it holds everything
    that a plan depends on besides the inner products asked for.
    """

    @property
    def name(self) -> str:
        """Name of the metric that was asked for."""
        ...

    @property
    def exact(self) -> bool:
        """Whether the metric's own definition is met exactly."""
        ...

    @property
    def lifted(self) -> bool:
        """Whether results per output coordinate carry the constant at position 0."""
        ...

    @property
    def nodes(self) -> MomentNodes | None:
        """Variances of the constant at which a plan runs; None where a single run is enough."""
        ...

    @property
    def layout(self) -> Hashable:
        """Everything that `prepare` and `weights` depend on besides the model and its side.

        Families of equal layout make the same arrays of a model, so the arrays serve all of them.
        """
        ...

    @classmethod
    def of(cls, a: Model, b: Model | None, metric: Metric) -> Self:
        """The family member that compares `a` with `b`, or `a` with itself where `b` is None.

        Raises:
            ModelError: The metric is not defined for these models.
            TooLarge: The metric is defined, but the contraction is out of reach.
        """
        ...

    def prepare(self, model: Model) -> Model:
        """The same function as `model`, in the form of layers that the family reads."""
        ...

    def problem(self, pairs: tuple[Pair, ...], slices: bool) -> Problem:
        """The problem that has inner products for outputs.

        Args:
            pairs: The inner products asked for, which name the outputs.
            slices: Whether there is an inner product for every output coordinate, or their
                sum.
        """
        ...

    def weights(self, side: Side, model: Model) -> dict[str, Any]:
        """The arrays of a prepared model by the names of the problem's leaves."""
        ...

    def inputs(
        self, names: Collection[str], metric: Metric, d_in: int, t: float | None = None
    ) -> dict[str, Any]:
        """The leaves that belong to no model: moments of the input, and constants.

        Args:
            names: Names of the leaves that are read.
            metric: Metric with these moments, of the class that the family was made for.
            d_in: Number of coordinates of the input.
            t: Variance of the constant, any of `nodes`; None without nodes.

        Returns:
            Arrays by leaf name.
        """
        ...


def model_weights(family: Family, models: Mapping[Side, Model]) -> dict[str, Any]:
    """The arrays of all models by leaf name.

    Args:
        family: Family that names the leaves.
        models: Models by side, prepared by the family.

    Returns:
        Arrays by leaf name.

    Example:
        >>> import tnsim
        >>> from tnsim.problems.families import choose
        >>> model = tnsim.Model([tnsim.Linear([[2.0]])])
        >>> family = choose(model, None, tnsim.Gaussian())
        >>> model_weights(family, {"A": model})
        {'A.LAYER0.WEIGHT': array([[2.]])}
    """
    arrays: dict[str, Any] = {}
    for side, model in models.items():
        arrays |= family.weights(side, model)
    return arrays


def by_side(bra: T, ket: T | None) -> dict[Side, T]:
    """The given objects of the two models by side, without a missing second model.

    Example:
        >>> by_side(1, 2), by_side(1, None)
        ({'A': 1, 'B': 2}, {'A': 1})
    """
    if ket is None:
        return {"A": bra}
    return {"A": bra, "B": ket}


def named(side: Side, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The arrays of a model's layers, by leaf name.

    Example:
        >>> named("A", [{"WEIGHT": 1.0}])
        {'A.LAYER0.WEIGHT': 1.0}
    """
    leaves: dict[str, Any] = {}
    for number, roles in enumerate(layers):
        for role, array in roles.items():
            leaves[str(Leaf(side, number, role))] = array
    return leaves


def identities(names: Collection[str], sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The identity matrices among the names that are read; the others may be large.

    Example:
        >>> list(identities(["IDENTITY"], {"IDENTITY": 2, "SAME_POSITION": 1000}))
        ['IDENTITY']
    """
    return {name: np.eye(size) for name, size in sizes.items() if name in names}


def only(names: Collection[str], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves that a plan reads.

    Example:
        >>> only(["MEAN"], {"MEAN": 1.0, "TRACE": 2.0})
        {'MEAN': 1.0}
    """
    return {name: array for name, array in leaves.items() if name in names}
