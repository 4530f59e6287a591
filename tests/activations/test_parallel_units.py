"""Kernels of units that are one variable, or nearly: panels between kinks, whatever the activation.

The first model is a student that begins as a copy of its teacher, with another activation.
"""

from functools import cache
from itertools import combinations_with_replacement

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from activated_cases import gated_kernel
from closeness import LARGEST, assert_close
from scipy.special import erf

from tnsim.activations.activation import ACTIVATIONS, activation
from tnsim.activations.kernels import GatedInputs, NormalInputs, kernel
from tnsim.activations.pairs import SLOPE_ORDERS, pair_derivatives, slopes_by_law

KINKS = (-3.0, -1.0, 0.0, 1.0, 3.0, 6.0)
"""All places where a named activation is no power series."""
LAWS = [
    # Means and deviations of u and v, with kinks in and beside the centre of the other function.
    (19.0, 8.0, -20.0, 8.0),
    (1.25, 3.0, 1.25, 3.0),
    (-0.3, 0.4, -1.5, 0.7),
    (4.0, 2.0, -3.0, 1.0),
    (0.0, 1.0, 0.0, 2.0),
]
FAR = [("relu6", "sigmoid"), ("hardswish", "silu"), ("relu", "sin"), ("leaky_relu", "mish")]
"""Kinked and smooth activations."""
ROWS = np.array([[0.7, 0.0], [-1.1, 0.4]]), np.array([[0.5, 0.9], [0.8, -0.6]])
"""Means of the factors of gated units u and v, ahead of their rows."""


@cache
def nodes(law, sign, gap):
    """Nodes x of a standard normal law in the plane, in panels between kinks, and their weights.

    With u = m + s x_0 and v = n + t (rho x_0 + bar x_1) kinks of u end panels, and those of v too
    where bar is 0. Behind a kink of u a smooth function of v takes few nodes along x_1.
    """
    m, s, n, t = law
    points, weights = np.polynomial.legendre.leggauss(24)
    ends = [(x - m) / s for x in KINKS] + [(x - n) / (sign * t) for x in KINKS if not gap]
    ends = np.unique(np.clip([*ends, *np.linspace(-12, 12, 25 + 24 * int(max(s, t)))], -12, 12))
    length = np.diff(ends) / 2
    z = (ends[:-1] + length * (points[:, None] + 1)).ravel()
    weight = (length * weights[:, None]).ravel() * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    y, of_y = np.polynomial.hermite_e.hermegauss(40 if gap else 3)
    x = np.stack([np.repeat(z, len(y)), np.tile(y, len(z))])
    return x, np.outer(weight, of_y / of_y.sum()).ravel()


def logistic(u):
    return 1 / (1 + np.exp(-u))


def softplus(u):
    return np.where(u.real > 0, u, 0) + np.log1p(np.exp(np.where(u.real > 0, -u, u)))


def clipped(u, low, high):
    return np.where(u.real < low, low, np.where(u.real > high, high, u))


def gelu_tanh(u):
    return u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3))) / 2


FORWARD = {
    "identity": lambda u: u,
    "square": lambda u: u**2,
    "sin": np.sin,
    "tanh": np.tanh,
    "tanhshrink": lambda u: u - np.tanh(u),
    "sigmoid": logistic,
    "silu": lambda u: u * logistic(u),
    "softplus": softplus,
    "mish": lambda u: u * np.tanh(softplus(u)),
    "erf": erf,
    "gelu": lambda u: u * (1 + erf(u / np.sqrt(2))) / 2,
    "gelu_tanh": gelu_tanh,
    "step": lambda u: np.where(u.real > 0, 1.0, 0.0),
    "relu": lambda u: np.where(u.real > 0, u, 0),
    "relu2": lambda u: np.where(u.real > 0, u, 0) ** 2,
    "leaky_relu": lambda u: np.where(u.real > 0, u, 0.01 * u),
    "abs": lambda u: np.where(u.real > 0, u, -u),
    "relu6": lambda u: clipped(u, 0, 6),
    "hardtanh": lambda u: clipped(u, -1, 1),
    "hardswish": lambda u: u * clipped(u + 3, 0, 6) / 6,
    "elu": lambda u: np.where(u.real > 0, u, np.expm1(np.where(u.real > 0, 0, u))),
}


@cache
def forward(name, law, sign, gap, of_v):
    """Values of an activation at the nodes, and of its derivative by an imaginary step."""
    m, s, n, t = law
    x, _ = nodes(law, sign, gap)
    bar = np.sqrt(gap * (2 - gap))
    u = n + t * (sign * (1 - gap) * x[0] + bar * x[1]) if of_v else m + s * x[0]
    with np.errstate(all="ignore"):
        values = FORWARD[name](u + 1e-30j)
    return values.real, values.imag / 1e-30


def plain(f, g, law, sign, gap=0.0):
    """E f(u) g(v) and its slopes by m, s, n, t and rho."""
    _, s, _, t = law
    (x, y), weight = nodes(law, sign, gap)
    (value, slope), (other, other_slope) = (
        forward(name, law, sign, gap, of_v) for name, of_v in ((f, False), (g, True))
    )
    along = sign * (1 - gap) * x + np.sqrt(gap * (2 - gap)) * y
    terms = [
        value * other,
        slope * other,
        slope * x * other,
        value * other_slope,
        value * other_slope * along,
        s * t * slope * other_slope,
    ]
    return np.array([weight @ one for one in terms])


def gated(f, g, law, sign, gap=0.0):
    """E f(u) w g(v) w' and its slopes by the means and rows of u, w, v and w'."""
    x, weight = nodes(law, sign, gap)
    factor, other_factor = (mean[0] + rows @ x for mean, rows in ROWS)
    (value, slope), (other, other_slope) = (
        forward(name, law, sign, gap, of_v) for name, of_v in ((f, False), (g, True))
    )
    one = np.concatenate([np.ones((1, x.shape[1])), x])
    terms = [
        slope * factor * other * other_factor,
        value * other * other_factor,
        value * factor * other_slope * other_factor,
        value * factor * other,
    ]
    return weight @ (terms[1] * factor), [(one * y) @ weight for y in terms]


def units(cases):
    """Gated units u, w and v, w' of cases (law, sign, gap)."""
    (m, s, n, t, rho, gap), count = laws(cases), len(cases)
    gates = (m, s, 0 * s), (n, t * rho, t * np.sqrt(gap * (2 - gap)))
    return tuple(
        GatedInputs(
            NormalInputs(mean, np.stack(rows, 1)),
            NormalInputs(np.full(count, factor[0][0]), np.tile(factor[1], (count, 1))),
        )
        for (mean, *rows), factor in zip(gates, ROWS, strict=True)
    )


def laws(cases):
    """Arrays of laws, with correlations and gaps, for cases (law, sign, gap)."""
    m, s, n, t = np.array([law for law, _, _ in cases]).T
    sign, gap = np.array([one[1:] for one in cases]).T
    return m, s, n, t, sign * (1 - gap), gap


def assert_plain(f, g, cases):
    law = laws(cases)
    with np.errstate(all="ignore"):
        every = pair_derivatives(activation(f), activation(g), law, SLOPE_ORDERS)
    found = np.array(
        [every[0], *slopes_by_law(dict(zip(SLOPE_ORDERS, every, strict=True)), (0, 0), law)]
    )
    expected = np.array([plain(f, g, *case) for case in cases]).T
    scale = np.abs(expected).max(0) + 1
    assert_close(found, expected, scale=np.broadcast_to(scale, found.shape), rtol=5e-11)


def assert_gated(f, g, cases):
    found = gated_kernel(f, g, *units(cases))
    expected = np.array([gated(f, g, *case)[0] for case in cases])
    error = np.abs(np.diag(found.values) - expected)
    assert np.all(error <= np.diag(found.bound)), error / np.diag(found.bound)


EXACT = [(law, sign, 0.0) for law in LAWS for sign in (1, -1)]


@pytest.mark.sampled(quick=0)
@pytest.mark.parametrize("f, g", FAR)
def test_parallel_units_of_other_activations(f, g):
    """Gated values were off by 1e-2 and slopes by 1e-3: a kink's density has no width there."""
    assert_plain(f, g, EXACT)
    assert_gated(f, g, EXACT)


@pytest.mark.parametrize("f, g", [("relu6", "sigmoid"), ("elu", "tanh")])
def test_values_and_slopes_go_on_to_parallel_units(f, g):
    cases = [(LAWS[2], sign, gap) for sign in (1, -1) for gap in (1e-16, 1e-11, 1e-6, 1e-2)]
    assert_plain(f, g, cases)
    if f != "elu":
        assert_gated(f, g, cases)


PAIRS = sorted(combinations_with_replacement(sorted(ACTIVATIONS), 2))


@pytest.mark.sampled(quick=0, slow=30)
@pytest.mark.parametrize("f, g", PAIRS)
def test_parallel_units_of_every_pair_of_activations(f, g):
    if "step" in (f, g):  # its slopes are densities, which no node has
        found = kernel(f, g, *(x.gate for x in units(EXACT)))
        expected = np.array([plain(f, g, *case)[0] for case in EXACT])
        assert np.all(np.abs(np.diag(found.values) - expected) <= np.diag(found.bound))
        return
    assert_plain(f, g, EXACT)
    if "elu" not in (f, g):
        assert_gated(f, g, EXACT)


@pytest.mark.full
@pytest.mark.parametrize(
    "f, g, gaps", [("relu6", "sigmoid", (0.0, 1e-12, 1e-4)), ("sin", "hardswish", (0.0,))]
)
def test_gradients_of_parallel_gated_units(f, g, gaps):
    """By means and rows of all four inputs, in a compiled program."""
    slopes_of = jax.value_and_grad(lambda *x: gated_kernel(f, g, *x).values[0, 0], (0, 1))
    with jax.enable_x64(True):
        total = jax.jit(slopes_of)
        for case in [(LAWS[2], sign, gap) for sign in (1, -1) for gap in gaps]:
            value, slopes = total(*jax.tree.map(jnp.asarray, units([case])))
            expected, by_input = gated(f, g, *case)
            assert_close(value, expected, scale=1.0, rtol=1e-12)
            every = (x for pair in slopes for x in (pair.gate, pair.up))
            found = [np.concatenate([x.mean, np.ravel(x.rows)]) for x in every]
            assert_close(np.array(found), np.array(by_input), scale=LARGEST, rtol=1e-11)
