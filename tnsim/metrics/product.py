"""The metric of independent coordinates of any distribution, a finite measure.

A Gauss rule with n nodes has the moments 0 to 2n - 1 of its distribution, so it gives the exact
means of polynomials up to degree 2n - 1. A distribution given by moments m_k goes through
Chebyshev's algorithm in exact fractions; a distribution with a density is cut into many small
panels with a Gauss-Legendre rule in each. Both ways give the recurrence of the orthogonal
polynomials, and the recurrence gives the rule (see `quadrature`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError, PrecisionWarning, warn
from tnsim.metrics.points import Points, Reading, Rule, check_draws, draws, mapped, product_rule
from tnsim.metrics.quadrature import gauss_rule, hermite_rule
from tnsim.models.arrays import host_array, pytree
from tnsim.models.checks import Seed, seed_number
from tnsim.options import checked, shown

_PANELS, _PANEL_NODES = 400, 20  # panels between two edges of a density, nodes of a panel
_ROUNDING = 1e-12  # relative rounding of moments that are given as floats
_VISIBLE = 1e-3  # rounding of the moments beside the spread, beyond which a warning tells it
# A square of the recurrence below this share of what it is left of has no digit: what follows it
# would be a node of rounding, far from the others.
_EPS = 2.0**-50


@dataclass(frozen=True)
class Marginal:
    """A distribution of a single coordinate.

    Args:
        name: Name for users and for messages.
        rule: Function from a number n of nodes to a rule that is exact to degree 2n - 1, or to
            every degree.
        draw: Function from a generator and a shape to draws; None if only moments are known.
    """

    name: str
    rule: Callable[[int], Rule]
    draw: Callable[[np.random.Generator, tuple[int, ...]], Any] | None


def marginal(given: Any) -> Marginal:
    """The distribution that a user means.

    Args:
        given: Name in `NAMED`, a pair (nodes, weights), or moments E[x^k] for k = 0, 1, 2 and so
            on, of which the first is 1.

    Raises:
        ModelError: The value is none of these.

    Example:
        >>> marginal("bernoulli").rule(5).nodes.tolist()
        [0.0, 1.0]
    """
    if isinstance(given, str):
        if given not in NAMED:
            raise ModelError(
                f"no distribution is called {given!r}; known are {', '.join(NAMED)}; or give "
                "moments, or (nodes, weights)"
            )
        return NAMED[given]
    if _is_nodes_and_weights(given):
        return _finite_distribution("given nodes", *given)
    moments = _numbers(given)
    if moments.size == 0:
        raise ModelError(
            f"a marginal is the name of a distribution ({', '.join(NAMED)}), an array of moments, "
            f"or (nodes, weights), and a list has one for each coordinate; found {shown(given)}"
        )
    if len(moments) < 2 or abs(moments[0] - 1) > _ROUNDING or not np.isfinite(moments).all():
        first = ", ".join(f"{moment:g}" for moment in moments[:4])
        raise ModelError(
            "moments are finite numbers E[x^0] = 1, E[x], E[x^2] and so on, two at least; "
            f"found {len(moments)}, which begin with {first}"
        )
    return Marginal("given moments", lambda nodes: rule_of_moments(moments.tolist(), nodes), None)


def _is_nodes_and_weights(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and np.ndim(given[0]) == 1


def _numbers(given: Any) -> Float[np.ndarray, " n"]:
    """A list of numbers as an array, an empty one for anything else.

    Rows of moments are several distributions, so an array of two axes is no list.
    """
    try:
        array = host_array(given) if hasattr(given, "detach") else np.asarray(given)
        is_list = array.ndim == 1 and array.dtype.kind in "biufO"
        return array.astype(np.float64) if is_list else np.empty(0)
    except (TypeError, ValueError, OverflowError):
        return np.empty(0)


def rule_of_moments(moments: Sequence[float], nodes: int) -> Rule:
    """The Gauss rule with given moments, by Chebyshev's algorithm in exact fractions.

    Args:
        moments: Moments E[x^k] from k = 0 on, at least 2 * nodes of them.
        nodes: Number of nodes; a distribution with fewer points gives as many nodes as points.

    Raises:
        ModelError: The moments are too few, or belong to no distribution.

    Warns:
        PrecisionWarning: Rounding of the moments leaves few digits of the distribution.

    Example:
        >>> (rule_of_moments([1, 0, 1, 0, 3, 0], nodes=3).nodes ** 2).round(6).tolist()
        [3.0, 0.0, 3.0]

    Source:
        Gautschi, Orthogonal polynomials: computation and approximation, section 2.1.7.
    """
    if len(moments) < 2 * nodes:
        raise ModelError(
            f"models of this degree need the moments up to E[x^{2 * nodes - 1}], found "
            f"{len(moments)} moments"
        )
    # With pi_k the monic orthogonal polynomials and s_k(l) = E[pi_k x^l], the recurrence
    # pi_{k+1} = (x - a_k) pi_k - b_k pi_{k-1} is a recurrence of moments as well:
    #
    #     s_k(l) = s_{k-1}(l + 1) - a_{k-1} s_{k-1}(l) - b_{k-1} s_{k-2}(l),
    #     b_k = s_k(k) / s_{k-1}(k - 1),    a_k = s_k(k + 1) / s_k(k) - s_{k-1}(k) / s_{k-1}(k - 1).
    #
    # In step k `after[n]` is s_k(k + n), `row[n]` is s_{k-1}(k - 1 + n) and `before[n]` is
    # s_{k-2}(k - 2 + n). Digits cancel in these sums, so they are computed in fractions.
    before = [Fraction(0)] * (2 * nodes)
    row = [Fraction(moment) for moment in moments[: 2 * nodes]]
    # Sums of absolute values stand beside them: moments are rounded, and what is left of them by
    # cancellation has the rounding of all.
    sizes_before, sizes = before, list(map(abs, row))
    diagonal, squares, lost = [row[1] / row[0]], [], 0.0
    for k in range(1, nodes):
        a = diagonal[-1]
        b = squares[-1] if squares else Fraction(0)
        count = 2 * (nodes - k)
        places = range(count)
        after = [row[n + 2] - a * row[n + 1] - b * before[n + 2] for n in places]
        sizes_before, sizes = (
            sizes,
            [sizes[n + 2] + abs(a) * sizes[n + 1] + b * sizes_before[n + 2] for n in places],
        )
        vanishes = after[0] <= _EPS * sizes[0] and _all_vanish(after, sizes)
        # What rounding of the moments is beside the spread, of which the variance is the first to
        # be known: where it is zero up to rounding, the moments are those of a constant.
        spread = b * row[0] if k > 1 else after[0]
        if spread > 0 and not (vanishes and k == 1):
            lost = max(lost, float(sizes[0] / spread) * 2.0**-53)
        if vanishes:
            break  # the distribution has k points
        if after[0] <= 0:
            raise ModelError(f"the moments up to E[x^{2 * k}] are those of no distribution")
        squares.append(after[0] / row[0])
        diagonal.append(after[1] / after[0] - row[1] / row[0])
        before, row = row, after
    if lost > _VISIBLE:
        digits = max(0, int(-math.log10(lost)))
        warn(
            f"the moments up to E[x^{2 * nodes - 1}], as they are rounded, leave about {digits} "
            "digits of the spread about the mean: give (nodes, weights), or moments of x less its "
            "mean, with the mean in the first biases",
            PrecisionWarning,
        )
    return gauss_rule(np.array([float(a) for a in diagonal]), np.sqrt([float(b) for b in squares]))


def _all_vanish(sums: Sequence[Fraction], sizes: Sequence[Fraction]) -> bool:
    """Whether sums are zero up to the rounding of the moments in them."""
    both = zip(sums, sizes, strict=True)
    return all(abs(value) <= _ROUNDING * size for value, size in both)


def _of_density(
    density: Callable[[Any], Any], edges: Callable[[int], Sequence[float]]
) -> Callable[[int], Rule]:
    """Gauss rules of a density that is smooth between edges; edges may depend on the nodes."""

    def rule(nodes: int) -> Rule:
        t, weights = np.polynomial.legendre.leggauss(_PANEL_NODES)
        bounds = edges(nodes)
        cuts = [np.linspace(*pair, _PANELS + 1) for pair in itertools.pairwise(bounds)]
        starts = np.concatenate([cut[:-1] for cut in cuts])
        widths = np.concatenate([np.diff(cut) for cut in cuts])
        x = (starts[:, None] + widths[:, None] * (t + 1) / 2).ravel()
        w = (widths[:, None] / 2 * weights).ravel() * density(x)
        return gauss_rule(*_stieltjes(x, w / w.sum(), nodes))

    return rule


def _stieltjes(
    x: Float[np.ndarray, " n"], weights: Float[np.ndarray, " n"], nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence of the polynomials orthonormal under many weighted points."""
    diagonal, off_diagonal = np.zeros(nodes), np.zeros(nodes - 1)
    root = np.sqrt(weights)
    basis = np.zeros((nodes, len(x)))  # row k: p_k times the square roots of the weights
    basis[0] = root / np.linalg.norm(root)
    for k in range(nodes):
        diagonal[k] = basis[k] ** 2 @ x
        if k + 1 == nodes:
            break
        vector = x * basis[k]
        for _ in range(2):  # twice, as rounding leaves a part of the projection
            vector = vector - basis[: k + 1].T @ (basis[: k + 1] @ vector)
        off_diagonal[k] = np.linalg.norm(vector)
        basis[k + 1] = vector / off_diagonal[k]
    return diagonal, off_diagonal


def _finite_distribution(name: str, nodes: Any, weights: Any) -> Marginal:
    """The distribution on finitely many points."""
    x, shares = _numbers(nodes), _numbers(weights)
    fits = x.shape == shares.shape and np.isfinite([x, shares]).all()
    if not fits or not (shares >= 0).all() or not shares.any():
        raise ModelError(
            "nodes and weights are two lists of one length, finite, weights not negative and not "
            f"all zero; found nodes {shown(nodes)} and weights {shown(weights)}"
        )
    shares = shares / shares.max()  # the sum of which is in the range of floats
    p = shares / shares.sum()
    with np.errstate(divide="ignore"):
        rule = Rule(x, np.log(p))
    return Marginal(name, lambda count: rule, lambda rng, shape: rng.choice(x, shape, p=p))


def _tail_width(nodes: int) -> float:
    """Standard deviations of a normal beyond which degree 2 * nodes adds nothing to a mean."""
    return 12 + 2 * math.sqrt(2 * nodes)


def _bimodal(x: Any) -> Any:
    """The density of "bimodal" up to a factor, where 0.18 is twice the variance 0.3^2."""
    return np.exp(-((x - 1) ** 2) / 0.18) + np.exp(-((x + 1) ** 2) / 0.18)


def _draw_bimodal(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return rng.choice([-1.0, 1.0], shape) + 0.3 * rng.normal(size=shape)


def _spikes(nodes: int) -> Rule:
    """The rule of "spikes": nodes of 2 z with a quarter of the weight, and a node at 0."""
    x, log_weights = NAMED["normal"].rule(nodes)
    log_weights = np.append(log_weights + math.log(0.25), math.log(0.75))
    return Rule(np.append(2 * x, 0.0), log_weights)


def _draw_spikes(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return rng.choice([0.0, 2.0], shape, p=[0.75, 0.25]) * rng.normal(size=shape)


def _named_distributions() -> dict[str, Marginal]:
    def uniform(nodes: int) -> Rule:
        # Legendre's polynomials on [-1, 1], orthonormal: a_k = 0, b_k = k / sqrt(4 k^2 - 1).
        k = np.arange(1.0, nodes)
        return gauss_rule(np.zeros(nodes), k / np.sqrt(4 * k**2 - 1))

    def laplace(nodes: int) -> list[float]:
        # Under x^(2n) times the density, sqrt(2) x is a gamma number of mean 2n + 1 and variance
        # 2n + 1: the reach is more than 8 standard deviations above it.
        reach = (2 * nodes + 60 + 8 * math.sqrt(2 * nodes)) / math.sqrt(2)
        return [-reach, 0.0, reach]

    half = _of_density(lambda x: np.exp(-(x**2) / 2), lambda nodes: [0.0, _tail_width(nodes)])
    double = _of_density(lambda x: np.exp(-math.sqrt(2) * abs(x)), laplace)
    modes = _of_density(
        _bimodal, lambda n: [-1 - 0.3 * _tail_width(n), 0.0, 1 + 0.3 * _tail_width(n)]
    )
    marginals = [
        Marginal("normal", hermite_rule, lambda rng, shape: rng.normal(size=shape)),
        Marginal("half-normal", half, lambda rng, shape: abs(rng.normal(size=shape))),
        Marginal("uniform", uniform, lambda rng, shape: rng.uniform(-1, 1, shape)),
        Marginal("laplace", double, lambda rng, shape: rng.laplace(0, 0.5**0.5, shape)),
        Marginal("bimodal", modes, _draw_bimodal),
        Marginal("spikes", _spikes, _draw_spikes),
        _finite_distribution("bernoulli", [0.0, 1.0], [0.5, 0.5]),
        _finite_distribution("signs", [-1.0, 1.0], [0.5, 0.5]),
    ]
    return {one.name: one for one in marginals}


NAMED = _named_distributions()
"""Distributions by name: normal, half-normal `|z|`, uniform on [-1, 1], laplace of variance 1,
bimodal (-1 or 1 plus 0.3 z), spikes (2 z, or 0 with probability 3/4), bernoulli (0 or 1) and signs
(-1 or 1), where z is a standard normal number."""


@checked(own="samples")
@pytree
@dataclass(frozen=True, eq=False)
class Product:
    """`E<A(x), B(x)>` over independent coordinates of any distribution.

    Few coordinates are integrated exactly by Gauss quadrature, with degree + 1 nodes in every
    coordinate. For many coordinates `samples` draws inputs instead, and results have a standard
    error.

    Args:
        marginals: Distribution of all coordinates, or a list of distributions, one for each
            coordinate of an input (of a position, for sequences). A distribution is a name
            ("normal", "half-normal" `|z|`, "uniform" on [-1, 1], "laplace" of variance 1, "bimodal"
            -1 or 1 plus 0.3 z, "spikes" 2 z or 0 with probability 3/4, "bernoulli" 0 or 1, "signs"
            -1 or 1), a pair (nodes, weights), or an array of moments E[x^0], E[x], E[x^2] and so
            on.
        samples: Number of inputs to draw, which makes the result an estimate; None for the exact
            value.
        seed: Seed of the draws: a number, a NumPy generator or a JAX key.

    Raises:
        ModelError: A distribution has another form, or `samples` is less than 2.

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
    seed: Seed = dataclasses.field(default=0, metadata={"static": True})
    name = "product"
    pairs_within_model = True

    def __post_init__(self) -> None:
        check_draws(self.samples)
        object.__setattr__(self, "seed", seed_number(self.seed, "the seed of samples"))
        given = self.marginals
        if isinstance(given, _Marginals):
            return
        if not isinstance(given, list):
            given = [given]
        for one in given:
            marginal(one)  # refuses what is no distribution
        object.__setattr__(self, "marginals", _Marginals(map(_stored_form, given)))

    def is_exact(self, nonlinear_layers: int) -> bool:
        """Whether nodes of Gauss rules are summed over, instead of draws."""
        return self.samples is None

    def points(self, reading: Reading) -> Points:
        """A product of Gauss rules, or draws of inputs.

        Raises:
            ModelError: The distributions are for another number of coordinates, moments are too few
                for the degree of the models, or there are samples of a distribution of which only
                moments are known.
        """
        if len(self.marginals) not in (1, reading.d_in):
            raise ModelError(
                f"the metric has {len(self.marginals)} distributions, but the models read "
                f"{reading.d_in} coordinates"
            )
        known = [marginal(one) for one in self.marginals]
        if self.samples is not None:
            for one in known:
                if one.draw is None:
                    raise ModelError(f"nothing can be drawn from {one.name}; leave out samples")
            draw = partial(_draw_inputs, self.marginals, reading.shape)
            return draws(self.samples, seed_number(self.seed), draw)
        if math.isinf(reading.degree):
            raise ModelError(
                "the nodes of Product are exact for polynomials, and a model has an activation: "
                "give Product(..., samples=...) for an estimate with its standard error"
            )
        rules = [one.rule(reading.degree + 1) for one in known]
        each = rules * (reading.d_in // len(rules)) * (reading.n_ctx or 1)
        return mapped(product_rule(each), partial(_in_shape, reading.shape))


class _Marginals(tuple[Any, ...]):
    """Distributions as the metric stores them, so that `dataclasses.replace` gives them back.

    A plain tuple would not do: two lists of moments look like nodes with their weights.
    """


def _stored_form(given: Any) -> Any:
    """A distribution as the metric stores it, a name or numbers that can be compared and hashed."""
    if isinstance(given, str):
        return given
    if _is_nodes_and_weights(given):
        return tuple(map(_stored_form, map(list, given)))
    return tuple(_numbers(given).tolist())


def _in_shape(shape: tuple[int, ...], inputs: Any) -> Any:
    return inputs.reshape(len(inputs), *shape)


def _draw_inputs(given: tuple, shape: tuple[int, ...], rng: np.random.Generator, count: int) -> Any:
    """Draw inputs, coordinate by coordinate where distributions differ."""
    drawing = [marginal(one).draw for one in given]
    if len(drawing) == 1:
        assert drawing[0] is not None
        return drawing[0](rng, (count, *shape))
    columns = [draw(rng, (count, *shape[:-1])) for draw in drawing if draw is not None]
    return np.stack(columns, axis=-1)
