"""What rounding does to cosines: bounds against exact rational arithmetic, one rule throughout."""

import contextlib
import itertools
import re
import tracemalloc
import warnings

import cases
import jax
import numpy as np
import pytest
import rational_oracle as exact
from closeness import assert_close
from forced import OF_RUNS, take
from oracles import bilinear, linear, moved
from refusals import LOST, refused

import tnsim
from tnsim.engine import precision
from tnsim.engine.precision import Arithmetic, Cosine
from tnsim.errors import ResultError
from tnsim.problems.conditioning import (
    _amplified,
    _in_one_scale,
    _principal_axes,
    amplification,
    exact_product,
    regauged,
    without_skew,
)
from tnsim.problems.units import common_units, in_own_basis
from tnsim.scaled import Scaled, ScaledSum

pytestmark = pytest.mark.usefixtures("diagrams")

ORACLES = {"gaussian": exact.gaussian_product, "tree": exact.tree_product}
METRICS = {"gaussian": tnsim.Gaussian(), "tree": tnsim.TreeSymmetric()}


def stack(rng, depth, bias, skip, d=2):
    layers = [bilinear(rng, d, 3, d, bias) for _ in range(depth)]
    if skip:
        layers = [tnsim.Residual(layer, 0.7, 0.3) for layer in layers]
    return tnsim.Model([*layers, linear(rng, d, 2, bias)])


def exchanged(model):
    """Left and right exchanged: the same function, with weights that are no small change."""

    def exchange(layer):
        if isinstance(layer, tnsim.Residual):
            return tnsim.Residual(exchange(layer.layer), layer.skip, layer.scale)
        if isinstance(layer, tnsim.Linear):
            return layer
        biases = layer.right_bias, layer.left_bias, layer.down_bias
        return tnsim.Bilinear(layer.right, layer.left, layer.down, *biases)

    return tnsim.Model([exchange(layer) for layer in model.layers])


def scaled_weights(model, factor):
    return jax.tree.map(lambda x: factor * x if np.ndim(x) else x, model)


@pytest.fixture
def cosines(monkeypatch):
    """Every cosine with its error bound, as it is about to be clipped."""
    seen = []
    clipped = precision.clipped
    monkeypatch.setattr(precision, "clipped", lambda x, *y: (seen.append(x), clipped(x, *y))[1])
    return seen


@pytest.mark.crossing(quick=0)
@pytest.mark.parametrize("size", [1e-6, 5e-7, 1e-10])
@pytest.mark.parametrize("metric", METRICS)
def test_a_small_difference_keeps_its_digits(metric, size, rng):
    """Expanded by bilinearity, a change of 1e-6 gave a cosine of 1.011, clipped to 1."""
    a, c = stack(rng, 2, True, False), stack(rng, 2, True, True)
    b = scaled_weights(a, 1 + size)
    for model in (a, c):
        true = float(exact.cosine(model, b - a, ORACLES[metric]))
        found = tnsim.similarity(model, b - a, METRICS[metric])
        # 30 times the worst of 20 seeds, 4e-14: terms of degree 4 that cancel by a factor 10 or so
        assert_close(found, true, scale=1.0, rtol=2e-12)


def test_units_of_rows_cost_no_digits(rng):
    """Rows with entries just below and just above a unit's end share it, or float32 loses two digits."""
    a = stack(rng, 2, False, False)
    first, *others = a.layers
    rows = np.array([[1.99], [2.01]]) / np.abs(first.down).max(axis=1, keepdims=True)
    a = tnsim.Model([tnsim.Bilinear(first.left, first.right, rows * first.down), *others])
    true = float(exact.gaussian_product(a, a))
    # 30 times the worst of 20 seeds, 9e-7; two digits less are 1e-4.
    assert_close(tnsim.inner(a, a, dtype="float32"), true, rtol=3e-5, limited_by="float32")


def test_a_small_difference_of_three_layers(rng):
    a, c = stack(rng, 3, True, False, d=1), stack(rng, 3, True, False, d=1)
    b = moved(rng, a, 1e-6)
    for model in (a, c):
        true = float(exact.cosine(model, b - a, exact.tree_product))
        assert_close(
            tnsim.similarity(model, b - a, tnsim.TreeSymmetric()), true, scale=1.0, rtol=1e-12
        )


def _cases(rng, bias, skip, depth):
    a, c = stack(rng, depth, bias, skip), stack(rng, depth, bias, skip)
    yield a, c
    for size in (1e-3, 1e-6):
        yield c, moved(rng, a, size) - a
        yield a, moved(rng, a, size) - a
        yield c, exchanged(moved(rng, a, size)) - a
        yield c - moved(rng, c, size), exchanged(moved(rng, a, size)) - a
        yield c, moved(rng, a, size) - 2.0 * a + moved(rng, a, size)


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.filterwarnings("ignore::tnsim.PrecisionWarning")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("metric", METRICS)
def test_the_error_bound_holds_and_is_not_loose(metric, dtype, cosines, rng):
    """True errors are below the bound, and their median is above a thousandth of the bound."""
    ratios = []
    for bias, skip, depth in ((0, 0, 1), (1, 1, 1), (0, 0, 2), (1, 0, 2)):
        for one, two in _cases(rng, bool(bias), bool(skip), depth):
            cosines.clear()
            try:
                tnsim.similarity(one, two, METRICS[metric], dtype=dtype)
            except tnsim.errors.ResultError:
                if not cosines:
                    continue  # a norm has no digit left
                assert cosines[0].error > precision.USELESS
            except tnsim.ModelError:
                continue  # a norm that is rounding alone
            true = float(exact.cosine(one, two, ORACLES[metric]))
            error, bound = abs(cosines[0].value - true), cosines[0].error
            assert error <= bound
            ratios.append(error / bound)
    assert np.median(ratios) > 1e-3 and max(ratios) > 1e-2


@pytest.fixture(params=["features", "contractions"])
def route(request, monkeypatch):
    """Pairwise runs along one route, whichever it would take."""
    take(monkeypatch, request.param, OF_RUNS)


@pytest.mark.slow
def test_one_question_has_one_answer(route, rng):
    """Features gave 1.000000 where similarity refused (5e-7) or gave 0.999955 (1e-6)."""
    a, c = (tnsim.Model([bilinear(rng, 3, 4, 2, True)]) for _ in range(2))
    differences = [scaled_weights(a, 1 + size) - a for size in (1e-3, 1e-6, 5e-7)]
    result = tnsim.pairwise([c, a, *differences], slices=True)
    for i, one in enumerate((c, a, *differences)):
        for j, two in enumerate((c, a, *differences)):
            assert_close(result.similarity[i, j], tnsim.similarity(one, two), scale=1.0)
            assert_close(result.slices[i, j], tnsim.slices(one, two), scale=1.0)


def test_sums_are_those_of_two(route, rng):
    """Sums of unit coefficients, of which no two entries have a model in common."""
    a, b, c, d = (tnsim.Model([bilinear(rng, 3, 4, 2, True)]) for _ in range(4))
    found = tnsim.pairwise([a + b, c + d]).similarity.values
    assert_close(found[0, 1], tnsim.similarity(a + b, c + d), scale=1.0)


def test_one_question_has_one_refusal(route, rng):
    """The same function to within rounding, by other weights."""
    a, c = (tnsim.Model([bilinear(rng, 3, 4, 2, True)]) for _ in range(2))
    same = exchanged(a)
    message = "a difference of models that are the same function to within rounding"
    with refused(message):
        tnsim.pairwise([c, same - a])
    with refused(message):
        tnsim.similarity(c, same - a)


@pytest.mark.parametrize("depth", [1, 2])
def test_differences_of_vectors_keep_digits(depth, rng):
    """Equal functions to 1e-7, but not so their weights: polynomials are subtracted."""
    a, c = stack(rng, depth, depth == 1, False), stack(rng, depth, depth == 1, False)
    diff = exchanged(moved(rng, a, 1e-7)) - a
    true = float(exact.cosine(c, diff, exact.gaussian_product))
    assert_close(
        tnsim.similarity(c, diff),
        true,
        scale=1.0,
        rtol=1e-7,
        limited_by="a difference of weights that keeps nine digits",
    )
    result = tnsim.pairwise({"c": c, "diff": diff})
    assert result.attrs["plan"].startswith("features")
    assert_close(
        result.similarity[0, 1],
        true,
        scale=1.0,
        rtol=1e-7,
        limited_by="a difference of weights that keeps nine digits",
    )


CLOSURE = tnsim.GaussianClosure()  # beyond one layer it has no vectors, whose digits would be kept


SHRINKING = np.geomspace(1e-5, 1e-8, 25)
"""Relative sizes of differences, from some that have digits left to some that are rounding."""


def outcomes(ask, rng):
    """What is said of two differences of one model, as both become smaller."""
    a = stack(rng, 2, False, False)
    one, two = (exchanged(moved(rng, a, 1.0)) for _ in range(2))

    def changed(other, size):
        return jax.tree.map(lambda x, y: x + size * (y - x), exchanged(a), other) - a

    said = []
    for size in SHRINKING:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                ask(changed(one, size), changed(two, size))
                said.append("".join(str(each.message) for each in told))
            except tnsim.ModelError as error:
                said.append(f"ModelError: {error}")
            except tnsim.errors.ResultError as error:
                said.append(f"ResultError: {error}")
    return said


def check_order(said, warning, refusal):
    """First a warning, then a refusal, and in the end the difference is no function any more."""
    stages = []
    for text in said:
        if text.startswith("ModelError"):
            assert "the same function to within rounding" in text
            stages.append(2)
        elif text.startswith("ResultError"):
            assert re.search(refusal, text), text
            stages.append(1)
        else:
            assert not text or re.search(warning, text), text
            stages.append(0)
    assert stages == sorted(stages) and {0, 1} <= set(stages) and any(said)


@pytest.mark.slow
def test_lost_digits_are_told_and_lost_numbers_refused(rng):
    refusal = "has no digits left: its terms cancel, .* compare models that differ more"
    check_order(
        outcomes(lambda one, two: tnsim.similarity(one, two, CLOSURE), rng),
        "the cosine has about [123] digits left: its terms cancel, and rounding may change",
        f"the cosine {refusal}",
    )
    said = outcomes(lambda one, two: tnsim.inner(one, two, CLOSURE), rng)
    assert re.search(f"the inner product {refusal}", said[-1])
    a, c = stack(rng, 2, False, False), stack(rng, 2, False, False)
    assert tnsim.inner(c, a - a) == 0


def test_an_input_of_output_zero_hides_no_lost_digits(rng):
    """Between biases that cancel nothing is left of the other inputs."""
    inputs = np.concatenate([np.zeros((1, 2)), rng.normal(size=(9, 2))])

    def between(size):
        offset = np.rint(size * rng.normal(size=3))
        first = tnsim.Linear(rng.normal(size=(3, 2)), offset)
        return tnsim.Model([first, tnsim.Linear(np.eye(3), -offset), bilinear(rng, 3, 4, 2)])

    for metric in (tnsim.Empirical(inputs), tnsim.Product("uniform")):
        for verb in (tnsim.similarity, tnsim.inner):
            with refused("has no digits left", tnsim.TnsimError):
                verb(between(1e15), between(1e15), metric)
            with refused("use dtype='float64'", LOST):
                verb(between(1e6), between(1e6), metric, dtype="float32")
        a, b = between(1e6), between(1e6)
        plain = [tnsim.Model([tnsim.Linear(m.layers[0].weight), m.layers[-1]]) for m in (a, b)]
        assert_close(
            tnsim.similarity(a, b, metric),
            tnsim.similarity(*plain, metric),
            scale=1.0,
            rtol=1e-8,
            limited_by="biases of a million",
        )


def test_lost_states_have_no_axes():
    """Twelve layers that lost the states of a few inputs ended in an error of LAPACK."""
    states = Scaled(np.array([[np.nan, np.nan], [3.0, 3.0]]), np.zeros((2, 1)))
    assert_close(abs(_principal_axes([_in_one_scale(states)]).axes), np.full((2, 2), 0.5**0.5))


@pytest.mark.slow
def test_pairs_without_digits_are_named(rng):
    def ask(one, two):
        tnsim.pairwise({"x": one, "y": two}, CLOSURE)

    said = outcomes(ask, rng)
    wanted = "the cosine of . and . has"
    check_order(
        said, f"{wanted} about", f"{wanted} no digits left|the squared norm of . has no digits left"
    )


def test_a_cosine_beyond_its_error_bound_is_our_error():
    assert precision.clipped(Cosine(np.array(1 + 1e-9), np.array(1e-8)), "float64") == 1
    for dtype, said in (("float64", ""), ("float32", "dtype='float64' or ")):
        with refused(
            rf"1\.011, outside .*\(use {said}an equal .* please report it", tnsim.TnsimError
        ):
            precision.clipped(Cosine(np.array([0.5, 1.011]), np.array([1e-9, 1e-3])), dtype)
        beyond = Cosine(np.array([0.5, 1.011, 0.5]), np.array([1e-9, 1e-3, np.nan]))
        known = precision.known(beyond, (), Arithmetic(2, dtype))  # a trace cannot refuse
        assert np.isnan(known).tolist() == [False, True, True]


def test_products_to_more_bits_are_the_same_in_blocks(rng, monkeypatch):
    a, b = rng.normal(size=(7, 5)), rng.normal(size=(5, 4))
    whole = exact_product(a, b)
    monkeypatch.setattr("tnsim.problems.conditioning._BLOCK", 3)
    for found, known in zip(exact_product(a, b), whole, strict=True):
        assert (found == known).all()


def skewed(rng, condition):
    """Two bilinear layers, and the same function in a hidden basis of a condition."""
    matrices, *bases = cases.skewed(rng, condition)
    return cases.in_basis(matrices, np.eye(4), np.eye(4)), cases.in_basis(matrices, *bases)


@pytest.mark.crossing(quick=0)
@pytest.mark.parametrize("condition", [pytest.param(1, marks=pytest.mark.slow), 100, 10_000])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("metric", [tnsim.Symmetric(), CLOSURE, tnsim.TreeSymmetric()])
def test_a_function_in_a_skewed_hidden_basis_is_itself(metric, dtype, condition, cosines, rng):
    """Digits that cancel between two layers are counted: float32 gave 0.9978, exact to 4e-6."""
    for _ in range(10):
        a, b = skewed(rng, condition)
        cosines.clear()
        value = tnsim.similarity(a, b, metric, dtype=dtype)
        assert abs(cosines[-1].value - 1) <= cosines[-1].error
        assert value <= 1
        matrix = tnsim.pairwise([a, b], metric, dtype=dtype).similarity.values
        assert (matrix <= 1).all() and (matrix >= 1 - 2 * cosines[0].error).all()


@pytest.mark.parametrize("between", ["layers", "linear layers"])
def test_another_hidden_basis_is_the_same_function(between, rng):
    """A change of basis costs no digits, however far the basis was from orthogonal.

    Beside forward passes in fractions. Rounded after every matrix product, outputs were off by
    1e-10 where two linear layers meet; float64 leaves no more than the digits of single weights.
    """
    _, model = skewed(rng, 1e6)
    if between == "linear layers":
        first, second = model.layers
        basis = np.linalg.qr(rng.normal(size=(4, 4)))[0] * np.geomspace(1, 1e6, 4)
        middle = tnsim.Linear(basis), tnsim.Linear(np.linalg.inv(basis))
        down, biases = rng.normal(size=(4, 9)), [rng.normal(size=n) for n in (9, 9, 4)]
        first = tnsim.Bilinear(first.left, first.right, down, *biases)
        second = tnsim.Bilinear(*rng.normal(size=(2, 9, 4)), second.down)
        model = tnsim.Model([first, *middle, second])
    other, _ = regauged(model, CLOSURE)
    x = rng.normal(size=(5, 4))
    true, found = (exact.forward(m, x) for m in (model, other))
    difference = np.abs((found - true).astype(np.float64)).max()
    assert_close(difference, 0.0, scale=float(np.abs(true).max()), rtol=1e-13)


def test_a_coordinate_that_is_zero_to_within_rounding_has_no_unit_of_its_own(rng):
    """In units of its rounding, 2^-24, others left float32: a cosine was off by twice its bound."""
    one, two = rng.normal(size=(2, 2, 2))
    rows = np.concatenate([one, 3 * two]), np.concatenate([two, one / 3])
    zero = tnsim.Bilinear(*rows, [[1.0, 0.7, -1.0, -0.7], [1.0, 0.2, 0.3, 0.5]])
    model = tnsim.Model([zero, bilinear(rng, 2, 3, 2, True)])
    made = in_own_basis(model, common_units([model], tnsim.Gaussian()), False)[0].value
    assert all(np.abs(array).max() < 2**8 for array in jax.tree.leaves(made))


def test_another_basis_that_cancels_more_is_not_taken(rng):
    """Beside large biases principal axes raised the amplification a thousandfold, and errors 130-fold."""
    metric = tnsim.TreeSymmetric()
    for _ in range(12):
        layers = []
        for _ in range(5):
            weights = [8 * rng.normal(size=size) for size in ((3, 2), (3, 2), (2, 3), 3, 3, 2)]
            layers.append(tnsim.Bilinear(*weights[:3], *(2.0**18 * x for x in weights[3:])))
        model = tnsim.Model(layers)
        units = common_units([model], metric)
        given = in_own_basis(model, units, False)[0].value
        found = without_skew(given, units.metric)[0]
        before, after = (amplification(x, units.metric) for x in (given, found))
        assert after <= 4 * before


def test_an_input_beyond_floats_does_not_hide_what_the_others_show(rng):
    """Of 12 layers one input left no outputs: the squared norm, off by 5e-5, was told to be exact."""
    steep = tnsim.Model([linear(rng, 2, 2), tnsim.Linear([[1e3, -1e3], [1e3, -999.0]])])
    inputs = rng.normal(size=(8, 2))
    others = np.concatenate([inputs, np.full((1, 2), np.nan)])
    assert_close(_amplified(steep, others), _amplified(steep, inputs))
    assert _amplified(steep, others[-1:]) == 1.0


def reading_all_but(direction, rng):
    """A bilinear layer whose legs do not read a direction of the input, to within rounding."""
    layer = bilinear(rng, 2, 3, 2, True)
    blind = np.eye(2) - np.outer(direction, direction)
    biases = layer.left_bias, layer.right_bias, layer.down_bias
    return tnsim.Bilinear(layer.left @ blind, layer.right @ blind, layer.down, *biases)


@pytest.mark.filterwarnings("ignore::tnsim.PrecisionWarning")
@pytest.mark.parametrize("moment", ["mean", "covariance"])
@pytest.mark.parametrize("metric", [tnsim.Gaussian, tnsim.GaussianClosure])
def test_what_a_model_reads_of_large_inputs_is_counted(metric, moment, cosines, rng):
    """Errors were up to 240 times their bounds, where the other model cancels nothing."""
    direction = np.array([0.6, 0.8])
    mean = 200 * direction if moment == "mean" else None
    cov = np.eye(2) + 200.0**2 * np.outer(direction, direction) if moment != "mean" else None
    inputs = metric(mean, cov)
    for _ in range(4):
        a = tnsim.Model([reading_all_but(direction, rng), bilinear(rng, 2, 3, 2, True)])
        other, maps = bilinear(rng, 2, 3, 2, True), rng.normal(size=(2, 2, 2))
        b, c = (tnsim.Model([other, tnsim.Linear(x)]) for x in maps)
        ratio = float(tnsim.inner(a, b, inputs) / tnsim.inner(a, c, inputs))
        b = tnsim.Model([other, tnsim.Linear(maps[0] - ratio * maps[1])])  # cosines near zero
        true = tnsim.similarity(a, b, inputs)
        cosines.clear()
        with contextlib.suppress(ResultError):  # no digit is left
            found = tnsim.similarity(a, b, inputs, dtype="float32")
            assert abs(found - true) <= cosines[-1].error


@pytest.mark.filterwarnings("ignore::tnsim.PrecisionWarning")
def test_deep_models_get_another_basis_until_their_degree_leaves_no_digit(rng):
    """34 layers whose bases are skewed were refused, or off by .12 where degree alone allows 1e-5."""
    metric, d, layers = tnsim.TreeSymmetric(), 8, 34
    for _ in range(3):
        arrays = rng.normal(size=(layers, 3, d, d)) / d**0.5
        given = tnsim.Model([tnsim.Bilinear(*each) for each in arrays])
        for lower, upper in itertools.pairwise(arrays):
            axes = [np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(2)]
            basis = axes[0] * np.geomspace(1, 1e4, d) @ axes[1]
            lower[2] = basis @ lower[2]
            upper[:2] = upper[:2] @ np.linalg.inv(basis)
        skewed = tnsim.Model([tnsim.Bilinear(*each) for each in arrays])
        assert_close(
            tnsim.similarity(given, skewed, metric), 1.0, rtol=1e-4, limited_by="the degree 2^34"
        )
    deeper = tnsim.Model([*given.layers, *given.layers])
    assert without_skew(deeper, metric) == (deeper, None, 1.0)


def test_an_ordinary_model_is_not_told_to_cancel(rng, cosines):
    """The bound stays below the size that is told, and within a factor 100 of the largest errors."""
    for _ in range(20):
        a, b = skewed(rng, 1)
        tnsim.similarity(a, b, CLOSURE, dtype="float32")
        assert cosines[-1].error < 1e-4


def test_measuring_what_cancels_takes_one_changed_model_at_a_time(rng):
    """Plans tell the memory beside the models, and three changed copies of them were beyond it."""
    model = tnsim.Model([linear(rng, 128, 128)] * 4)
    amplification(tnsim.Model([linear(rng, 2, 2)] * 4), tnsim.Gaussian())
    tracemalloc.start()
    amplification(model, tnsim.Gaussian())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * 4 * 8 * 128**2


def test_ordinary_residual_layers_are_in_the_range_of_float32(rng):
    """Units that grew with each skip of 1 took six of them beyond it: they were refused as NaN."""
    layers = [tnsim.Residual(bilinear(rng, 4, 4, 4, True)) for _ in range(12)]
    a, b = tnsim.Model(layers[:6]), tnsim.Model(layers[6:])
    for metric in (tnsim.TreeSymmetric(), tnsim.Frobenius(), CLOSURE):
        assert_close(
            tnsim.similarity(a, b, metric, dtype="float32"),
            tnsim.similarity(a, b, metric),
            scale=1.0,
            rtol=1e-4,
            limited_by="float32",
        )


def with_cancelling_units(rng, model, size):
    """The same function with two hidden units more in each layer, which nearly undo each other."""
    layers = []
    for layer in model.layers:
        more = size * rng.normal(size=(layer.d_out, 1))
        first = np.eye(len(layer.left))[:1]  # of the unit that is there twice
        left, right = (np.r_[x, x[:1]] for x in (layer.left, layer.right))
        layers.append(tnsim.Bilinear(left, right, np.c_[layer.down + more * first, -more]))
    return tnsim.Model(layers)


@pytest.mark.sampled(quick=0)
@pytest.mark.filterwarnings("ignore::tnsim.PrecisionWarning")
@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.parametrize("metric", [CLOSURE, tnsim.TreeSymmetric()])
def test_the_bound_of_three_layers_is_of_use(metric, cancels, cosines, rng):
    """Never below the error, and within a factor 100 of the largest."""
    ratios = []
    for _ in range(16):
        a = tnsim.Model([bilinear(rng, 4, 8, 4) for _ in range(3)])
        b = moved(rng, a, 0.3)
        if cancels:
            size = 10 ** rng.uniform(0.5, 1.5)
            a, b = (with_cancelling_units(rng, model, size) for model in (a, b))
        a, b = (jax.tree.map(np.float32, model) for model in (a, b))
        true = tnsim.similarity(a, b, metric)
        cosines.clear()
        tnsim.similarity(a, b, metric, dtype="float32")
        ratios.append(abs(cosines[0].value - true) / cosines[0].error)
    assert 0.01 < max(ratios) <= 1


def cancelling(rng, size):
    """Two hidden units that are `size` times as large as their sum, beside a third."""
    first, second, left, right, change = rng.normal(size=(5, 3))
    rights = [right, right + change / size, second]
    down = rng.normal(size=(2, 1)) * [[size, -size, 1.0]]
    return tnsim.Model([tnsim.Bilinear([left, left, first], rights, down)])


@pytest.mark.parametrize("verb", [tnsim.similarity, tnsim.inner, tnsim.log_inner])
def test_float32_tells_where_it_leaves_few_digits(verb, rng):
    """Between hidden units that cancel to 1/300 it leaves one or none, to 1/100,000 none."""
    for size, kinds in ((300, LOST), (100_000, LOST[1:])):
        a, b = (cancelling(rng, size) for _ in range(2))
        with pytest.raises(kinds, match=r"digits left.*use dtype='float64'"):
            verb(a, b, dtype="float32")


def test_what_cancels_within_a_model_counts_in_forward_passes(rng):
    """Cosines of a difference were off by 0.05 to 0.35 in float32, without a warning."""
    goal, copy = cases.cancelling_copies(rng)
    other, _ = cases.cancelling_copies(rng)
    inputs = rng.normal(size=(9, 3))
    metric, base = tnsim.Empirical(inputs), copy(1e6)

    def outputs(model):  # in integers, units of 2^-60
        layer = model.layers[0]
        x, left, right, down = (
            (np.asarray(y, float) * 2.0**60).astype(object)
            for y in (inputs, layer.left, layer.right, layer.down)
        )
        exactly = np.vectorize(int, otypes=[object])
        x, left, right, down = map(exactly, (x, left, right, down))
        hidden = x.dot(left.T) * x.dot(right.T)
        return np.array(hidden.dot(down.T) // 2**200, float) * 2.0**-100

    difference = outputs(base) - outputs(goal)
    vectors = {"base": outputs(base), "other": outputs(other), "difference": difference}
    flat = np.array([x.ravel() / np.linalg.norm(x) for x in vectors.values()])
    models = dict(zip(vectors, (base, other, base - goal), strict=True))
    # 30 times the worst of 20 seeds, of units that are 10^6 times their sum.
    close = {"scale": 1.0, "rtol": 3e-7, "limited_by": "hidden units that cancel"}
    assert_close(tnsim.pairwise(models, metric).similarity.values, flat @ flat.T, **close)
    assert_close(tnsim.similarity(base - goal, other, metric), flat[2] @ flat[1], **close)
    for verb, given in ((tnsim.similarity, (base - goal, other)), (tnsim.pairwise, (models,))):
        with refused("use dtype='float64'", LOST):
            verb(*given, metric, dtype="float32")


def test_a_result_in_float32_that_has_its_digits_stays(rng):
    a, b = (cancelling(rng, 1) for _ in range(2))
    assert tnsim.similarity(a, b, dtype="float32") != tnsim.similarity(a, b)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_sizes_magnify_rounding(dtype):
    """A norm that is a thousandth of its size loses three digits."""
    rounding = Arithmetic(2, dtype).rounding
    one = ScaledSum(np.array(1.0), np.array(0.0), np.array(1.0))
    small = ScaledSum(np.array(1e-3), np.array(0.0), np.array(1.0))
    plain = precision.cosine(one._replace(mantissa=np.array(0.5)), one, one, Arithmetic(2, dtype))
    assert_close(
        plain.error,
        1.5 * rounding,
        rtol=1e-2,
        limited_by="a bound of two terms, of which the test states the larger",
    )
    product = ScaledSum(np.array(5e-4), np.array(0.0), np.array(1.0))
    found = precision.cosine(product, small, small, Arithmetic(2, dtype))
    assert_close(
        found.error,
        1500 * rounding,
        rtol=0.1,
        limited_by="a bound of several terms, of which the test states the largest",
    )


def test_a_norm_without_digits_is_not_called_zero():
    """A negative squared norm is rounding: what cancels need not be the zero function."""
    one = np.float64(1.0)
    lost = ScaledSum(np.float64(-1e-18), np.float64(0.0), one)
    with refused("squared norm of the model has no digits left: ", tnsim.errors.ResultError):
        precision.check_norm(lost, "the model", False, Arithmetic(4, "float64"))
    zero = ScaledSum(np.float64(0.0), np.float64(0.0), one)
    with refused("the model is the zero function"):
        precision.check_norm(zero, "the model", False, Arithmetic(4, "float64"))


def test_a_squared_norm_below_zero_leaves_no_digit():
    """Rounding alone: the squared norm of a difference of equal functions came out as -3e-17."""
    below = ScaledSum(np.array(-(2.0**-55)), np.array(0.0), np.array(0.75))
    above = below._replace(mantissa=np.array(1.0))
    for bra, ket in ((below, below), (below, above), (above, below)):
        with np.errstate(invalid="ignore"):
            found = precision.cosine(below, bra, ket, Arithmetic(2, "float64"))
        assert np.isnan(found.error) or found.error == np.inf
