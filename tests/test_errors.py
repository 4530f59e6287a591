"""Wrong models and wrong questions: the right class, with what was asked, found and needed."""

import cases
import numpy as np
import pytest
from oracles import bilinear, linear
from refusals import refused

import tnsim

ONE = np.ones((2, 2))


@pytest.mark.parametrize(
    "message, build",
    {
        r"Linear weight must have 2 axes, found shape \(3,\)": lambda: tnsim.Linear(np.ones(3)),
        r"Linear weight is empty, shape \(0, 3\)": lambda: tnsim.Linear(np.ones((0, 3))),
        "Linear weight must hold real numbers, found dtype complex128": lambda: tnsim.Linear(
            ONE * 1j
        ),
        "Linear weight must hold real numbers": lambda: tnsim.Linear([["a", "b"]]),
        r"a coefficient of a model must have 0 axes, found shape \(2,\)": lambda: (
            tnsim.Model([tnsim.Linear(ONE)]) * np.ones(2)
        ),
        "a coefficient of a model must hold real numbers, found dtype complex128": lambda: (
            1j * tnsim.Model([tnsim.Linear(ONE)])
        ),
        "a Combination needs a pair": lambda: tnsim.Combination([]),
        "a coefficient of a model is nan": lambda: tnsim.Combination(
            [(np.nan, tnsim.Model([tnsim.Linear(ONE)]))]
        ),
        r"Linear bias has shape \(3,\), expected \(2,\)": lambda: tnsim.Linear(ONE, np.ones(3)),
        r"Linear weight has 1 NaN or infinite entries, the first at \[0, 1\]": lambda: tnsim.Linear(
            [[1.0, np.inf]]
        ),
        r"Bilinear right has shape \(3, 2\), axis 0 must be 2 as in left": lambda: tnsim.Bilinear(
            ONE, np.ones((3, 2)), ONE
        ),
        r"Bilinear down has shape \(2, 3\), axis 1 must be 2, the rank of left and right": lambda: (
            tnsim.Bilinear(ONE, ONE, np.ones((2, 3)))
        ),
        "the layer maps 2 to 3": lambda: tnsim.Residual(tnsim.Linear(np.ones((3, 2)))),
        "Residual skip is nan, no finite number": lambda: tnsim.Residual(
            tnsim.Linear(ONE), skip=np.nan
        ),
        "a model needs at least one layer, found none": lambda: tnsim.Model([]),
        "layer 1 expects 3 inputs but layer 0 gives 2": lambda: tnsim.Model(
            [tnsim.Linear(ONE), tnsim.Linear(np.ones((2, 3)))]
        ),
        "cov must be positive semidefinite, found the eigenvalue -1": lambda: tnsim.Gaussian(
            cov=-np.eye(2)
        ),
        "cov must be symmetric, found entries that differ": lambda: tnsim.Gaussian(
            cov=[[1.0, 2.0], [0.0, 1.0]]
        ),
        r"cov must be a square matrix or the vector of its diagonal, found shape \(2, 3\)": lambda: (
            tnsim.Gaussian(cov=np.ones((2, 3)))
        ),
        "mean has 3 coordinates but cov 2": lambda: tnsim.Gaussian(np.ones(3), np.eye(2)),
        "the input mean has 1 NaN": lambda: tnsim.GaussianClosure([np.nan]),
    }.items(),
)
def test_what_makes_no_model(build, message):
    with refused(message):
        build()


def test_what_is_not_polynomial():
    with refused(
        "layer 0 is a function; layers with an exact similarity are Linear", tnsim.UnsupportedLayer
    ):
        tnsim.Model([lambda x: x])
    with refused("the layer inside Residual is a str", tnsim.UnsupportedLayer):
        tnsim.Residual("softmax")


def test_models_that_cannot_be_compared(rng):
    a = tnsim.Model([linear(rng, 3, 2)])
    for verb in (
        tnsim.similarity,
        tnsim.slices,
        tnsim.inner,
        tnsim.log_inner,
        tnsim.plan,
        tnsim.tensor_networks.networks,
    ):
        with refused("the models read different inputs: 3 and 4 coordinates"):
            verb(a, tnsim.Model([linear(rng, 4, 2)]))
        with refused("the models have different outputs: 2 and 5"):
            verb(a, tnsim.Model([linear(rng, 3, 5)]))
        with refused(r"expected a metric such as .* of yours with what .*\.FiniteMetric has"):
            verb(a, a, "cosine")
        with refused(r"found an array: .*tnsim\.Empirical\(inputs\)"):
            verb(a, a, np.ones((2, 3)))
    with refused("different outputs"):
        a - tnsim.Model([linear(rng, 3, 5)])
    with refused("expected a tnsim Model or a combination of models, found ndarray"):
        tnsim.similarity(a, np.eye(3))
    with refused(r"a\.pt: no such file", tnsim.CheckpointError):
        tnsim.similarity("a.pt", a)
    with refused(r"a model by tnsim\.from_module\(module\)"):
        tnsim.similarity(a, abs, tnsim.Gaussian(samples=0))
    with refused("the metric's mean has 2 coordinates but the models read 3"):
        tnsim.similarity(a, a, tnsim.Gaussian(np.ones(2)))
    with refused("dtype must be one of float64, float32, found 'float16'"):
        tnsim.similarity(a, a, dtype="float16")
    with refused(r"memory_bytes of a Budget must be above 0, found -1"):
        tnsim.Budget(-1)
    for metric in (tnsim.Gaussian(), tnsim.Empirical(np.ones((2, 3)))):
        with refused(r"budget of similarity must be a tnsim\.Budget.*found 10"):
            tnsim.similarity(a, a, metric, budget=10)
    with refused("plan the models of a combination pair by pair"):
        tnsim.plan(a, a - a)


@pytest.mark.usefixtures("diagrams")
def test_metrics_that_do_not_fit(rng):
    a, _ = cases.pair(cases.DEEP["two bilinear"], rng)
    shallow = tnsim.Model([bilinear(rng, 3, 4, 2)])
    with refused(
        r"compares trees of one shape, but the nonlinear layers have orders \[2, 2\] and \[2\]"
    ):
        tnsim.similarity(a, shallow, tnsim.TreeSymmetric())
    with refused(
        r"compares tensors of one order, but the models have degrees 4 and 2; use Gaussian\(\)"
    ):
        tnsim.similarity(a, shallow, tnsim.Symmetric())
    assert not tnsim.similarity(a, shallow, tnsim.GaussianClosure()).exact
    four = tnsim.Model([bilinear(rng, 2, 2, 2) for _ in range(4)])
    for verb in (tnsim.inner, tnsim.plan):
        with refused(
            r"joins 32 legs in more than 10\^14 ways; up to 20.*Use GaussianClosure\(\)",
            tnsim.TooLarge,
        ):
            verb(four, four)
    legs = rng.normal(size=(3, 2, 3))
    cubic = tnsim.Model([tnsim.Multilinear(legs, np.ones((2, 2)), np.ones((3, 2)))])
    with refused("in pairs, and models of degrees 4 and 3 have an odd number", tnsim.TooLarge):
        tnsim.inner(a, cubic)


def test_rows_of_unequal_length_are_no_moments():
    """NumPy's own error said neither what was given nor where."""
    ragged = [[1.0], [1.0, 2.0]]
    for attempt in (tnsim.Gaussian, lambda x: tnsim.Gaussian(cov=x), tnsim.Gaussian.fit):
        with refused("an array was expected"):
            attempt(ragged)


@pytest.mark.parametrize(
    "metric",
    [tnsim.Gaussian(), tnsim.Symmetric(), tnsim.TreeSymmetric(), tnsim.Frobenius()],
    ids=lambda m: m.name,
)
def test_zero_models_have_no_cosine(metric, rng):
    a = tnsim.Model([bilinear(rng, 3, 4, 2)])
    layer = a.layers[0]
    for factors in np.eye(3):
        arrays = zip(factors, (layer.left, layer.right, layer.down), strict=True)
        zero = tnsim.Model([tnsim.Bilinear(*((1 - factor) * x for factor, x in arrays))])
        with refused("the second model is the zero function: its cosine with anything is undef"):
            tnsim.similarity(a, zero, metric)
        with refused("the first model is the zero function"):
            tnsim.similarity(zero, zero, metric)
        assert tnsim.inner(a, zero, metric) == 0
        assert tnsim.log_inner(a, zero, metric) == (0, -np.inf)
    half = tnsim.Model(
        [tnsim.Bilinear(layer.left, layer.right, np.array([[1.0], [0.0]]) * layer.down)]
    )
    assert 0 < tnsim.similarity(a, half, metric) < 1
    with refused("the second model is the zero function in output 1"):
        tnsim.slices(a, half, metric)


def test_a_difference_of_equal_functions_has_no_cosine(rng):
    a = tnsim.Model([bilinear(rng, 3, 4, 2)])
    layer = a.layers[0]
    same = tnsim.Model([tnsim.Bilinear(layer.right, layer.left, layer.down)])
    for diff in (a - a, a - same):
        with refused("a difference of models that are the same function to within rounding"):
            tnsim.similarity(a, diff)


HALF = tnsim.Model([tnsim.Linear(ONE), tnsim.Bilinear(ONE, ONE, ONE)])
CHOSEN = tnsim.Empirical(np.eye(2), output=1)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: tnsim.similarity(HALF, 2 * HALF, CHOSEN), r"^output=1 chooses among"),
        (lambda: tnsim.slices(HALF, HALF, CHOSEN), r"^output=1 chooses among"),
        (lambda: tnsim.pairwise([HALF, HALF], CHOSEN), r"^output=1 chooses among"),
        (
            lambda: tnsim.pairwise([HALF], budget=5),
            r"budget of pairwise must be a tnsim\.Budget.*found 5",
        ),
        (
            lambda: tnsim.plan(HALF, HALF, budget=5),
            r"budget of plan must be a tnsim\.Budget.*found 5",
        ),
        (lambda: tnsim.paths(HALF, budget=5), r"budget of paths must be a tnsim\.Budget.*found 5"),
        (
            lambda: tnsim.change(HALF, HALF, budget=5),
            r"budget of change must be a tnsim\.Budget.*found 5",
        ),
        (lambda: tnsim.paths(HALF, within=[]), "within names components .* found none"),
        (lambda: tnsim.Gaussian(samples=64.5), r"samples of a Gaussian .* found 64\.5"),
        (lambda: tnsim.Product("uniform", samples=2.5), r"whole, at least 2.*2\.5"),
        (lambda: tnsim.Categorical(samples="9"), "whole, at least 2.*'9'"),
        (lambda: tnsim.check(HALF, HALF, samples="99"), "at least 64 samples, found '99'"),
    ],
)
def test_options_that_cannot_be_met_are_refused(ask, message):
    with refused(message):
        ask()


@pytest.mark.parametrize("phases", [2.5, "2", None])
def test_phases_are_whole_numbers(phases):
    with refused(f"1 to 3 phases, not into {phases!r}", tnsim.errors.ResultError):
        tnsim.reading.segment(np.eye(3), phases)
