"""A constant or a mean in sums over pairings. In: a number of legs. Out: variances and weights.

Diagrams over whole trees (see `whole_tree`) pair *all* legs, as if the input were a centred
Gaussian. A lifted input `(1, x)` is not centred: its mean m holds the constant 1, and the mean of
x where the metric has one.

The way out is to let the mean fluctuate. Write the input as `z m + y`, with y ~ N(0, C) centred
and z a number. The inner product E that is asked for has z = 1. Take z ~ N(0, t) instead,
independent of y: then the input is a centred Gaussian of second moment `C + t m m^T`, and its sum
over pairings F(t) is what diagrams compute. The two differ in a known way. The part of degree 2k
in z enters E with `1^(2k) = 1`, and F with `E[z^(2k)] = (2k - 1)!! t^k`. (Of 2n legs, an odd
number at z leaves an odd number at y, whose expectation is zero.) With f_k the part of degree 2k,

    E = sum_k f_k,          F(t) = sum_k (2k - 1)!! f_k t^k,          k = 0 .. n.

F is a polynomial of degree n in t, so its values at n + 1 points t_j determine every f_k, and E
is one linear combination of them, the same for all models:

    E = sum_j w_j F(t_j),          sum_j w_j t_j^k = 1 / (2k - 1)!!,          k = 0 .. n.

Nothing asks that t be positive: F is a polynomial, and `C + t m m^T` is an argument of it.

Values at points were chosen over coefficients of powers of t. A product of parts of degree j and k
takes (j + 1)(k + 1) products of coefficients, and n + 1 of values: counted on plans, 0.8 times as
many multiplications at depth 2, and 1.1 to 1.2 times as many at depth 3. The runs at all points are
one run on stacks of moments where that is quicker (see `compare.planned.runs_together`).

[merged from folding/base]
How a comparison becomes a Problem. In: nothing. Out: the protocol of a family of problems.

A *family* is one way to write the inner products of two models as contractions: layer over layer,
diagrams over whole trees, sequences, tokens. Each is a small frozen object, made from the models'
layers (not their numbers) and the metric; `choose` picks the one that applies. The rest of the
program asks a family four questions and never which one it is.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from tnsim.engine.ir.problem import Problem
from tnsim.metrics.protocol import Metric
from tnsim.models.model import Model
from tnsim.names import Pair, Side
from tnsim.sessions import session_cache


class MomentNodes(NamedTuple):
    """Where a plan is run, and how its runs are added up: `E = sum_j w_j F(t_j)`.

    Args:
        points: Variances t_j of the constant. A run has the second moment C + t_j m m^T.
        weights: w_j, what each run counts.
        magnification: How many times the runs' rounding is enlarged in the sum.
    """

    points: tuple[float, ...]
    weights: tuple[float, ...]
    magnification: float


_HALF_WIDTHS = np.linspace(0.1, 1.0, 91)
"""Half-widths h of the intervals [-h, h] that are tried for the points."""


@session_cache
def moment_nodes(legs: int) -> MomentNodes:
    """Points and weights that undo the over-counting of a constant of variance t.

    The points are those of Chebyshev, stretched to [-h, h]. In a wide interval the powers
    `(2n - 1)!! t^n` are large and have to cancel; in a narrow one the points lie close together
    and the weights are large, with alternating signs. The best h between is searched for.

    Args:
        legs: Input legs of both models together, 2n. The nodes are right for fewer legs, too.

    Returns:
        n + 1 points and weights. The magnification is the largest, over k, of the absolute sum
        `sum_j |w_j| |t_j|^k (2k - 1)!!`, which would be 1 without the bars: it is 3 for 4 legs,
        10 for 8, 340 for 16.

    Example:
        A part of degree 2k in the constant is over-counted (2k - 1)!! times: 1, 1, 3.

        >>> nodes = moment_nodes(4)
        >>> for k in range(3):
        ...     print(f"{np.dot(nodes.weights, np.power(nodes.points, k)):.3f}")
        1.000
        1.000
        0.333

    Source:
        E[z^(2k)] = (2k - 1)!! t^k for z ~ N(0, t), as above.
    """
    candidates = [_nodes_within(half_width, legs // 2) for half_width in _HALF_WIDTHS]
    return min(candidates, key=lambda nodes: nodes.magnification)


def _nodes_within(half_width: float, n: int) -> MomentNodes:
    """The n + 1 Chebyshev points on [-h, h] and the weights that belong to them."""
    odd_numbers = [2 * k - 1.0 for k in range(1, n + 1)]
    double_factorials = np.cumprod([1.0, *odd_numbers])  # (2k - 1)!! for k = 0 .. n
    chebyshev = np.cos(np.pi * (2 * np.arange(n + 1) + 1) / (2 * n + 2))
    points = half_width * chebyshev
    # sum_j t_j^k w_j = 1 / (2k - 1)!!, one equation for each degree k: a Vandermonde system
    powers = points[None, :] ** np.arange(n + 1)[:, None]  # powers[k, j] = t_j^k
    weights = np.linalg.solve(powers, 1 / double_factorials)
    # By how much the runs exceed what they add up to: f_k enters run j as (2k - 1)!! f_k t_j^k
    sizes = np.abs(weights) @ np.abs(powers).T * double_factorials
    return MomentNodes(tuple(points.tolist()), tuple(weights.tolist()), float(sizes.max()))


class Family(Protocol):
    """One way in which two models and a metric become a Problem.

    Frozen and hashable: a family is the key under which plans are kept, so it holds all that a plan
    depends on besides the inner products asked for.
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
        """Whether outputs, where they are wanted one by one, carry the constant at position 0."""
        ...

    @property
    def nodes(self) -> MomentNodes | None:
        """Variances of the constant at which a plan runs, see `constants`.

        None where one run is all.
        """
        ...

    @property
    def layout(self) -> Hashable:
        """All that `prepare` and `weights` depend on besides the model and its side.

        Families of one layout lay out a model alike, so its arrays serve all of them.
        """
        ...

    @classmethod
    def of(cls, a: Model, b: Model | None, metric: Metric) -> Self:
        """The family member that compares `a` with `b`, or `a` with itself where `b` is None.

        Raises:
            ModelError: The metric is not defined for these models.
            TooLarge: It is, but nobody could contract what it asks for.
        """
        ...

    def prepare(self, model: Model) -> Model:
        """The same function as `model`, in the form of layers that the family reads."""
        ...

    def problem(self, pairs: tuple[Pair, ...], per_output: bool) -> Problem:
        """The problem whose outputs are inner products.

        Args:
            pairs: The inner products asked for; outputs are named by them.
            per_output: Whether they are wanted for every output coordinate, or summed over them.
        """
        ...

    def weights(self, side: Side, model: Model) -> dict[str, Any]:
        """The arrays of one prepared model by the names of the problem's leaves."""
        ...

    def inputs(
        self, names: Collection[str], metric: Metric, d_in: int, t: float | None = None
    ) -> dict[str, Any]:
        """The leaves that are not a model's: moments of the input, and constants.

        Args:
            names: The leaves that are read.
            metric: Whose moments; of the class that the family was made for.
            d_in: Coordinates of the input.
            t: Variance of the constant, one of `nodes`; None without nodes.

        Returns:
            Leaf name -> array.
        """
        ...


def model_weights(family: Family, models: Mapping[Side, Model]) -> dict[str, Any]:
    """The arrays of all models.

    Args:
        family: Says what the leaves are.
        models: Prepared by the family.

    Returns:
        Leaf name -> array.

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
