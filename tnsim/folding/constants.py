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
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tnsim.sessions import remembered


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


@remembered
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
