"""The parts of a change: integrals against complex steps, finite sums, gauges, swaps, refusals."""

import itertools
from fractions import Fraction

import component_oracles as oracle
import jax
import numpy as np
import pytest
import rational_oracle
from closeness import LARGEST, assert_close
from component_oracles import pair, points
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp
from oracles import bilinear, linear, quadrature
from refusals import LOST, refused
from seeds import generator
from sequence_cases import slow
from test_paths import scrambled

import tnsim
import tnsim.models.components
from tnsim.engine import precision
from tnsim.errors import ResultError
from tnsim.localise import change_of_functions, switched_models
from tnsim.models.model import Origin


def with_ends_of(a, b):
    """The model a with the linear layers of b, as a change without ends has it."""
    layers = [
        y if isinstance(y, tnsim.Linear) else x for x, y in zip(a.layers, b.layers, strict=True)
    ]
    return tnsim.Model(layers, n_ctx=a.n_ctx)


def check_against_complex_steps(found, a, b, x, weights, by, ends=False):
    players = len(found.components)
    parts = oracle.parts_of_change(a, b, x, players, by, ends)
    parts = (parts.reshape(players, len(x), -1) * np.sqrt(weights)[:, None]).reshape(players, -1)
    start = a if ends else with_ends_of(a, b)
    total = (b(x) - start(x)).reshape(len(x), -1) * np.sqrt(weights)[:, None]
    assert_close(found.total, (total**2).sum(), rtol=1e-11)
    wanted = parts @ total.ravel() / (total**2).sum()
    assert_close(found.share, wanted, scale=LARGEST, rtol=1e-10)
    assert_close(found.share.sum(), 1.0, scale=abs(wanted).max(), rtol=1e-12)
    gram = parts @ parts.T
    assert_close(found.matrix, gram, scale=LARGEST, rtol=1e-10)
    assert_close(found.matrix.sum(), found.total, scale=abs(gram).max(), rtol=1e-10)
    for c, (put_back, put_in) in enumerate(zip(found.removed, found.alone, strict=True)):
        out, alone = np.ones(players), np.zeros(players)
        out[c], alone[c] = 0.0, 1.0
        removed = b(x) - oracle.mixed_outputs(a, b, x, out, by, ends)
        added = oracle.mixed_outputs(a, b, x, alone, by, ends) - start(x)
        for value, moved in ((put_back, removed), (put_in, added)):
            wanted = weights @ (moved.reshape(len(x), -1) ** 2).sum(1)
            assert_close(value, wanted, scale=max(found.total, wanted), rtol=1e-11)


CASES = [
    ("mlp", "unit", False),
    slow(("attention", "head", True)),
    slow(("mlp", "layer", True)),
    slow(("no skip", "unit", False)),
    slow(("nested", "layer", False)),
    slow(("cubic", "unit", True)),
    slow(("attention", "layer", False)),
    slow(("mixed", "head", False)),
    slow(("scales and biases", "unit", False)),
]


def apart(rng):
    """Models whose residuals have other scales, zero among them, and of which one lacks biases."""
    a = tnsim.Model([oracle.mlp(rng, 3, 2, scale=0.6), oracle.mlp(rng, 3, 2, scale=0.0)])
    b = tnsim.Model([oracle.mlp(rng, 3, 2, scale=1.5, biases=False), oracle.mlp(rng, 3, 2)])
    return a, b


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("case", CASES)
def test_shares_are_integrals_of_component_functions(case, rng):
    name, by, ends = case
    a, b = apart(rng) if name == "scales and biases" else pair(name, rng)
    x = points(a, rng)
    found = tnsim.change(a, b, tnsim.Empirical(x), by=by, ends=ends)
    check_against_complex_steps(found, a, b, x, np.full(len(x), 1 / len(x)), by, ends)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("orders", [(2, 3), (2, 2, 2)])
def test_parts_of_deep_models_against_quadrature(orders, rng):
    """Degrees of three and of four in a switch alone, which take two steps on either side."""
    a, b = (
        tnsim.Model(
            [tnsim.Multilinear(rng.normal(size=(n, 2, 2)), rng.normal(size=(2, 2))) for n in orders]
        )
        for _ in range(2)
    )
    x, w = quadrature(9, np.zeros(2), np.eye(2))
    found = tnsim.change(a, b)
    assert found.exact and found.standard_error is None and found.surroundings == 0.0
    check_against_complex_steps(found, a, b, x, w, "layer")


@pytest.mark.slow
def test_gradients_answer_where_sums_of_models_are_too_long(rng, monkeypatch):
    a, b = (tnsim.Model([oracle.mlp(rng, 2, 2, biases=False)]) for _ in range(2))
    found = tnsim.change(a, b, by="unit")
    matrix = found.matrix
    monkeypatch.setattr(switched_models, "_MOST_MODELS", 0)
    planned = tnsim.change(a, b, by="unit")
    assert_close(planned.share, found.share, scale=LARGEST, rtol=1e-12)
    assert_close(planned.matrix, matrix, scale=LARGEST, rtol=1e-12)


@pytest.mark.parametrize("name", ["gaussian", "tree", "frobenius", "symmetric"])
@pytest.mark.slow
def test_parts_along_plans_sum_to_the_distance(name, rng):
    metrics = {
        "gaussian": tnsim.Gaussian(),
        "tree": tnsim.TreeSymmetric(),
        "frobenius": tnsim.Frobenius(),
        "symmetric": tnsim.Symmetric(),
    }
    a, b = (tnsim.Model([oracle.mlp(rng, 2, 2, biases=False)]) for _ in range(2))
    found = tnsim.change(a, b, metrics[name], by="unit")
    assert_close(found.total, tnsim.inner(b - a, b - a, metrics[name]), rtol=1e-12)
    assert_close(found.share.sum(), 1.0, scale=abs(found.share).max(), rtol=1e-12)
    # One layer is linear in its components, so a part is the exchange itself.
    parts = [
        found_model - a
        for found_model in (
            tnsim.models.components.switched(b, [1.0, 0.0], "unit")
            + tnsim.models.components.switched(a, [0.0, 1.0], "unit"),
            tnsim.models.components.switched(b, [0.0, 1.0], "unit")
            + tnsim.models.components.switched(a, [1.0, 0.0], "unit"),
        )
    ]
    # The stream is in both summands; the difference of two parts has it no more.
    wanted = float(tnsim.inner(parts[0] - parts[1], b - a, metrics[name])) / found.total
    assert_close(found.share[0] - found.share[1], wanted, scale=1.0, rtol=1e-10)
    if name == "frobenius":
        rows = found.matrix.sum(axis=1)
        assert_close(rows / found.total, found.share, scale=LARGEST, rtol=1e-10)


@pytest.mark.slow
def test_without_repeated_use_the_parts_are_shapley_values(rng):
    """Layers of order 1 reach no component twice: the average over all orders of swaps."""
    a, b = (
        tnsim.Model([tnsim.Residual(linear(rng, 3, 3, True), 0.5) for _ in range(3)])
        for _ in range(2)
    )
    x = rng.normal(size=(6, 3))
    found = tnsim.change(a, b, tnsim.Empirical(x))
    corners = {
        s: oracle.mixed_outputs(a, b, x, np.array(s, float))
        for s in itertools.product((0, 1), repeat=3)
    }
    parts = oracle.shapley_parts(corners, 3).reshape(3, -1)
    total = parts.sum(axis=0)
    assert_close(found.share, parts @ total / (total @ total), scale=LARGEST, rtol=1e-11)


@pytest.mark.sampled(quick=0, slow=1)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=4)
@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_parts_do_not_depend_on_gauges(name, seed):
    g = generator(seed)
    a, b = pair(name, g)
    metric = tnsim.Empirical(points(a, g))
    by = "head" if a.attends else "layer"
    wanted = tnsim.change(a, b, metric, by=by)
    found = tnsim.change(scrambled(g, a), scrambled(g, b), metric, by=by)
    assert_close(found.share, wanted.share, scale=LARGEST, rtol=1e-9)
    assert_close(found.removed, wanted.removed, scale=LARGEST, rtol=1e-9)
    assert_close(found.alone, wanted.alone, scale=LARGEST, rtol=1e-9)


def in_other_basis(model, basis):
    """The stream of a model with linear ends in another basis."""
    inverse, layers = np.linalg.inv(basis), []
    for n, layer in enumerate(model.layers):
        if n in (0, len(model.layers) - 1):
            weight = basis @ layer.weight if n == 0 else layer.weight @ inverse
            layers.append(tnsim.Linear(weight))
            continue
        core, skip, scale = oracle.core_of(layer)
        core = tnsim.Bilinear(
            core.left @ inverse, core.right @ inverse, basis @ core.down,
            core.left_bias, core.right_bias, basis @ core.down_bias,
        )  # fmt: skip
        layers.append(tnsim.Residual(core, skip, scale))
    return tnsim.Model(layers)


def test_one_function_in_other_weights_is_no_part_that_breaks_anything(rng):
    first, second, third = (bilinear(rng, 2, 3, 2) for _ in range(3))
    order = [1, 2, 0]
    same = tnsim.Bilinear(first.right[order], 2 * first.left[order], first.down[:, order] / 2)
    found = tnsim.change(tnsim.Model([first, second]), tnsim.Model([same, third]))
    for part in (found.removed, found.alone):
        assert_close(part, [0.0, found.total], scale=found.total, rtol=1e-12)


@pytest.mark.slow
def test_streams_in_other_bases_are_aligned(rng):
    embed, head = linear(rng, 6, 4), linear(rng, 4, 2)
    first, second, third = (oracle.mlp(rng, 4, 2) for _ in range(3))
    a, b = (tnsim.Model([embed, first, last, head]) for last in (second, third))
    metric = tnsim.Empirical(rng.normal(size=(5, 6)))
    wanted = tnsim.change(a, b, metric)
    assert_close(wanted.share, np.array([0.0, 1.0]), scale=1.0, rtol=1e-12)
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    turned = in_other_basis(b, turn)
    found = tnsim.change(a, turned, metric, align="embedding")
    assert_close(found.share, wanted.share, scale=1.0, rtol=1e-10)
    basis = rng.normal(size=(4, 4))
    found = tnsim.change(a, in_other_basis(b, basis), metric, align=np.linalg.inv(basis))
    assert_close(
        found.share, wanted.share, scale=1.0, rtol=1e-8, limited_by="the condition of the basis"
    )
    assert abs(tnsim.change(a, turned, metric).share[1] - 1) > 0.01


@pytest.mark.slow
def test_a_change_of_similarity_sums_to_its_loss(rng):
    a, b = pair("mlp", rng)
    start = with_ends_of(a, b)
    x = points(a, rng, 20)
    metric = tnsim.Empirical(x)
    found = tnsim.change(a, b, metric, of="similarity")
    assert_close(found.total, 1 - tnsim.similarity(start, b, metric), rtol=1e-12)
    assert_close(found.share.sum(), 1.0, rtol=1e-12)
    assert not found.exact
    t, w = np.polynomial.legendre.leggauss(200)
    step, wanted, goal = 1e-100, np.zeros(len(found.share)), b(x)
    for c in range(len(wanted)):
        for node, weight in zip((t + 1) / 2, w / 2, strict=True):
            s = np.full(len(wanted), node, complex)
            s[c] += 1j * step
            f = oracle.mixed_outputs(a, b, x.astype(complex), s)
            cosine = (f * goal).sum() / np.sqrt((f * f).sum() * (goal * goal).sum())
            wanted[c] += weight * cosine.imag / step
    assert_close(
        found.share, wanted / found.total, scale=LARGEST, rtol=1e-8, limited_by="the nodes"
    )
    with refused("use of='distance'"):
        found.matrix  # noqa: B018


@pytest.mark.slow
def test_ends_stand_on_both_sides_unless_they_are_components(rng):
    a, b = pair("mlp", rng)
    metric = tnsim.Empirical(points(a, rng))
    inside = tnsim.change(a, b, metric)
    start = with_ends_of(a, b)
    gap = a - start
    assert_close(inside.surroundings, tnsim.inner(gap, gap, metric), rtol=1e-12)
    whole = tnsim.change(a, b, metric, ends=True)
    assert whole.components == ("layer 0", "layer 1", "layer 2", "layer 3")
    assert whole.surroundings == 0.0
    assert "Change |b - a|^2" in whole._repr_html_()


def test_a_run_says_what_its_ends_did():
    def model(first, square):
        layer = tnsim.Residual(tnsim.Bilinear([[1.0]], [[1.0]], [[square]]))
        return tnsim.Model([tnsim.Linear([[first]]), layer])

    run = {0: model(1.0, 1.0), 1: model(1.0, 2.0), 2: model(9.0, 2.0), 3: model(9.0, 3.0)}
    steps = tnsim.change({label: run[label] for label in (0, 1)})
    assert "surroundings" not in str(steps)
    steps = tnsim.change({0: run[0], 2: run[2], 3: run[3]})
    alone = run[0] - model(9.0, 1.0)
    assert_close(steps.surroundings, [tnsim.inner(alone, alone), 0.0], scale=1.0, rtol=1e-9)
    head = next(line for line in str(steps).splitlines() if line.startswith("checkpoint"))
    assert head.split() == ["checkpoint", "change", "surroundings", "a"]
    assert "parts with ends=True" in str(steps) and "surroundings" in steps._repr_html_()


def test_a_run_is_as_sure_as_its_least_sure_step():
    def model(*weights):
        squares = [tnsim.Bilinear([[1.0]], [[1.0]], [[w]]) for w in weights]
        return tnsim.Model([tnsim.Residual(square) for square in squares])

    run = {0: model(1.0, 1.0), 1: model(1.0, 1.1), 2: model(4.0, 1.0), 3: model(4.0, 1.01)}
    sampled = tnsim.Product("uniform", samples=64)
    for series in (tnsim.change(run, metric=sampled), tnsim.paths(run, metric=sampled)):
        most = max(found.standard_error.max() for found in series.each)
        assert series.each[0].standard_error.max() < 0.9 * most
        assert f"standard errors of shares up to {most:.2g})" in str(series)


@pytest.mark.slow
def test_tiny_changes_keep_their_digits(rng):
    """A change of 1e-7 of the weights: its square is 1e-14 of the norms."""
    a, _ = pair("mlp", rng)
    down = a.layers[2].layer.down
    core = a.layers[2].layer
    moved = tnsim.Bilinear(
        core.left, core.right, down * (1 + 1e-7), core.left_bias, core.right_bias, core.down_bias
    )
    b = tnsim.Model([*a.layers[:2], tnsim.Residual(moved, 0.7, 0.6), a.layers[3]])
    metric = tnsim.Empirical(points(a, rng))
    found = tnsim.change(a, b, metric, by="layer")
    assert_close(found.share, np.array([0.0, 1.0]), scale=1.0, rtol=1e-7, limited_by="the change")
    assert_close(found.removed, np.array([0.0, found.total]), scale=found.total, rtol=1e-9)


@pytest.mark.slow
def test_a_run_has_the_change_of_every_step(rng):
    a, b = pair("mlp", rng)
    run = {"start": a, 10: b, 20: b, 30: a}
    found = tnsim.change(run)
    assert found.labels == (10, 20, 30) and found.each[1] is None
    there, back = tnsim.change(a, b), tnsim.change(b, a)
    nothing = np.zeros(len(there.components))
    assert found.components == there.components
    assert_close(found.share, np.array([there.share, nothing, back.share]), rtol=1e-12)
    assert_close(found.removed, np.array([there.removed, nothing, back.removed]), rtol=1e-12)
    assert_close(found.total, np.array([there.total, 0.0, back.total]), rtol=1e-12)
    assert "<td>30</td>" in found._repr_html_() or "<th>30</th>" in found._repr_html_()


def test_what_holds_of_all_steps_of_a_run_is_told_once():
    origin = Origin("a file", caveats=("left out: criterion.weight",))
    layers = [tnsim.Residual(tnsim.Bilinear([[1.0]], [[1.0]], [[w]])) for w in (1.0, 2.0, 3.0)]
    with pytest.warns(tnsim.CaveatWarning, match="left out: criterion") as said:
        tnsim.change([tnsim.Model([layer], origin=origin) for layer in layers])
    assert len(said) == 1 and said[0].filename == __file__


def test_float32_takes_what_is_equal_in_two_checkpoints():
    first, second, third = (tnsim.Bilinear([[1.0]], [[1.0]], [[n]]) for n in (1.0, 2.0, 3.0))
    run = [tnsim.Model([first, second])] * 2 + [tnsim.Model([first, third])]
    found = tnsim.change(run, metric=tnsim.Empirical([[1.0], [2.0]]), dtype="float32")
    assert found.each[0] is None and found.share[1].tolist() == [0.0, 1.0]
    assert found.removed[1, 0] == 0.0


def test_what_is_no_run_is_refused(rng):
    a, _ = pair("mlp", rng)
    cubic, _ = pair("cubic", rng)
    cases = {
        "two networks, or the checkpoints of a run in the place of both, found one Model": a,
        "two checkpoints or more, found 1": [a],
        "all checkpoints are the same function": [a, a, a],
        "have 4 and 3 layers": [a, a, cubic],
    }
    for message, run in cases.items():
        with refused(message):
            tnsim.change(run)


def test_a_bias_that_only_some_checkpoints_have_is_no_component_of_a_run(rng):
    run = [tnsim.Model([bilinear(rng, 2, 2, 2, biases)]) for biases in (False, False, True)]
    with refused("have different components.*of models use by='layer'"):
        tnsim.change(run, by="unit")
    assert tnsim.change(run).components == ("layer 0",)


def test_what_is_no_change_is_refused_in_one_line(rng):
    a, b = pair("mlp", rng)
    wide = tnsim.Model(
        [linear(rng, 3, 5), oracle.mlp(rng, 5, 3), oracle.mlp(rng, 5, 2, 0.7), linear(rng, 5, 2)]
    )
    ranks = tnsim.Model([*a.layers[:1], oracle.mlp(rng, 4, 9), *a.layers[2:]])
    skips = tnsim.Model([*a.layers[:1], oracle.mlp(rng, 4, 3, 0.2), *a.layers[2:]])
    small = tnsim.Model([linear(rng, 2, 4), *a.layers[1:]])
    heads, more = pair("attention", rng)
    more = tnsim.Model([more.layers[0], oracle.attending(rng, 4, 3), *more.layers[2:]], n_ctx=3)
    cubic, _ = pair("cubic", rng)
    cases = {
        "GaussianClosure is no bilinear form": lambda: tnsim.change(a, b, tnsim.GaussianClosure()),
        "of must be one of distance, similarity, or a function, found 'size'": lambda: tnsim.change(
            a, b, of="size"
        ),
        "the same function: there is no change to split": lambda: tnsim.change(a, a),
        "linear layers alone, .*: ends=True makes components of them": lambda: tnsim.change(
            tnsim.Model([tnsim.Linear(np.eye(3)), *a.layers]),
            tnsim.Model([tnsim.Linear(2 * np.eye(3)), *a.layers]),
        ),
        "have 4 and 3 layers": lambda: tnsim.change(a, cubic),
        "widths of the output, 4 and 5: the streams have different bases": lambda: tnsim.change(
            a, wide
        ),
        "layer 1 has 3 and 9 units": lambda: tnsim.change(a, ranks, by="unit"),
        "layer 1 of the models differs in its skips, 1.0 and 0.2": lambda: tnsim.change(a, skips),
        "layer 1 has 2 and 3 heads": lambda: tnsim.change(heads, more, by="head"),
        "align must be 'embedding' or a square matrix": lambda: tnsim.change(a, b, align="head"),
        r"found shape \(3, 3\)": lambda: tnsim.change(a, b, align=np.eye(3)),
        "align is a singular matrix": lambda: tnsim.change(a, b, align=np.zeros((4, 4))),
        "the embeddings span 2 of 4 directions": lambda: tnsim.change(
            small, small, align="embedding"
        ),
        "take the models of a combination one by one": lambda: tnsim.change(a, b - a),
        "is a metric, Gaussian: give it as metric=": lambda: tnsim.change([a, b], tnsim.Gaussian()),
    }
    for message, attempt in cases.items():
        with refused(message):
            attempt()
    square = tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])
    large = [tnsim.Model([tnsim.Bilinear([[1e6]], [[1e6]], [[n]]), square]) for n in (1e3, 2e3)]
    with refused("are beyond float32 for these weights; use dtype='float64'", tnsim.TnsimError):
        tnsim.change(*large, tnsim.Empirical([[1.0]]), dtype="float32")
    deep = tnsim.Model([oracle.mlp(rng, 2, 1) for _ in range(12)])
    other = tnsim.Model([oracle.mlp(rng, 2, 1) for _ in range(12)])
    with refused("takes 2,048 gradients here, more than 512.*fewer layers", tnsim.TooLarge):
        tnsim.change(deep, other, tnsim.Empirical(rng.normal(size=(2, 2)) * 0.01))


@pytest.mark.parametrize("transform", [jax.jit, jax.grad])
@pytest.mark.parametrize("verb", [tnsim.paths, tnsim.change])
def test_traced_models_are_refused_in_a_line(transform, verb, rng):
    a, b = (tnsim.Model([bilinear(rng, 3, 2, 2)]) for _ in range(2))
    with refused(rf"^{verb.__name__} reads numbers.*jax\.jit"):
        transform(lambda model: verb(model, b))(a)


def skewed(rng, condition):
    """Two bilinear layers, the state between them in a basis of some condition."""
    first, second = (
        [rng.normal(size=shape) / 2 for shape in shapes]
        for shapes in (((6, 3), (6, 3), (4, 6)), ((6, 4), (6, 4), (2, 6)))
    )
    turns = [np.linalg.qr(rng.normal(size=(4, 4)))[0] for _ in range(2)]
    sizes = np.geomspace(1, 1 / condition, 4)
    basis, inverse = turns[0] * sizes @ turns[1], turns[1].T / sizes @ turns[0].T
    layers = [*first[:2], basis @ first[2]], [*(x @ inverse for x in second[:2]), second[2]]
    return tnsim.Model([tnsim.Bilinear(*layer) for layer in layers])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gaussian", "empirical"])
def test_float32_tells_of_skewed_bases(name, rng):
    """Shares of about 1 were off by 2, as models between the two are a thousand times as large."""
    a, b = skewed(rng, 1e3), skewed(rng, 1e3)
    metric = tnsim.Gaussian() if name == "gaussian" else tnsim.Empirical(rng.normal(size=(50, 3)))
    with pytest.raises(LOST, match="use dtype='float64'"):
        tnsim.change(a, b, metric, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [-400, 400])
def test_changes_of_similarity_of_large_and_small_outputs(exponent, rng):
    """They were called too steep, as powers of norms left the range of floats."""
    shares = []
    a, b = pair("mlp", rng)
    for size in (1.0, 2.0**exponent):
        ends = (
            tnsim.Model([*model.layers, tnsim.Linear(size * np.eye(model.d_out))])
            for model in (a, b)
        )
        shares.append(tnsim.change(*ends, of="similarity").share)
    assert_close(shares[1], shares[0], scale=LARGEST, rtol=1e-11)


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4])
def test_changes_of_similarity_however_steep_take_few_gradients(size, monkeypatch):
    """Gradients at up to 1,020 nodes took 40 s; a quotient of polynomials needs few of them."""
    count, slope = [0], change_of_functions.slope

    def counted(*arguments):
        count[0] += 1
        return slope(*arguments)

    monkeypatch.setattr(change_of_functions, "slope", counted)
    # Two hidden units that write into two outputs, of which the one goes and the other comes.
    units = np.eye(2)
    a, b = (tnsim.Model([tnsim.Bilinear(units, units, np.diag(w))]) for w in ([size, 0], [0, 1]))
    found = tnsim.change(a, b, tnsim.Empirical(np.eye(2)), by="unit", of="similarity")
    assert count[0] == 2 * (2 * 1 + 1)

    def slope_of_second(t):  # of t / r with r = |(size (1 - t), t)|, by the second unit alone
        return size**2 * (1 - t) ** 2 / mp.sqrt(size**2 * (1 - t) ** 2 + t**2) ** 3

    wanted = float(mp.quad(slope_of_second, sorted({0, size / 10, size, min(10 * size, 0.5), 1})))
    limits = {"rtol": 1e-14 / size**2, "limited_by": "what rounds q where it is small"}
    assert_close(found.share, [1 - wanted, wanted], scale=LARGEST, **limits)


def test_opposite_models_have_no_change_of_similarity(rng):
    """They took 40 s to be refused, and models that differ by a factor 20 s, as too steep."""
    a = tnsim.Model([tnsim.Residual(bilinear(rng, 2, 3, 2)), linear(rng, 2, 2)])
    x = tnsim.Empirical(rng.normal(size=(20, 2)))

    def times(factor):
        return tnsim.Model([a.layers[0], tnsim.Linear(factor * np.asarray(a.layers[1].weight))])

    with refused("of those that are nearly opposite", ResultError):
        tnsim.change(a, times(-1.0), x, of="similarity", ends=True)
    with refused("the models are the same function, up to a factor: there is no change"):
        tnsim.change(a, times(3.0), x, of="similarity", ends=True)
    run = [a, times(3.0), tnsim.Model([tnsim.Residual(bilinear(rng, 2, 3, 2)), a.layers[1]])]
    steps = tnsim.change(run, metric=x, of="similarity", ends=True)
    assert steps.total[0] == 0
    assert steps.share[0].tolist() == [0, 0]


def test_changes_of_similarity_in_float32(rng):
    """They were refused, as a sum of shares to 9 digits is beyond float32."""
    a, b = skewed(rng, 2.0), skewed(rng, 2.0)
    one, exact = (tnsim.change(a, b, of="similarity", dtype=x) for x in ("float32", "float64"))
    assert_close(one.share, exact.share, scale=LARGEST, rtol=1e-3, limited_by="float32")


@pytest.mark.slow
def test_inner_products_of_small_parts_in_float32(rng):
    """Their bound was that of shares squared: changes of a hundredth were warned of."""
    a = skewed(rng, 2.0)
    b = jax.tree.map(lambda x: x * (1 + 1e-3 * rng.normal(size=x.shape)), a)
    one, exact = (tnsim.change(a, b, dtype=x) for x in ("float32", "float64"))
    assert_close(one.matrix, exact.matrix, scale=LARGEST, rtol=1e-3, limited_by="float32")


@pytest.mark.parametrize("seed", [1033, 1131, 1185])
def test_inner_products_of_small_parts_are_within_their_bound(seed, monkeypatch):
    """Their bound was what their sum misses, which is little where errors in it cancel."""
    rng, told = np.random.default_rng(seed), []
    a = tnsim.Model([bilinear(rng, 2, 2, 2) for _ in range(2)])
    size = 10.0 ** -rng.uniform(3, 12)
    b = jax.tree.map(lambda x: x * (1 + size * rng.normal(size=x.shape)), a)
    x = rng.normal(size=(8, 2))
    found = tnsim.change(a, b, tnsim.Empirical(x))
    monkeypatch.setattr(precision, "report", lambda error, *_: told.append(error))

    def mixed(s):
        y = rational_oracle.rational(x)
        for switch, *layers in zip(s, a.layers, b.layers, strict=True):
            one, two = (rational_oracle.layer_forward(layer, y) for layer in layers)
            y = (1 - switch) * one + switch * two
        return y

    # Outputs are quadratic in each switch, and derivatives along the diagonal in t.
    half, parts = Fraction(1, 2), []
    for apart in half * np.eye(2, dtype=int):
        slopes = [mixed(t + apart) - mixed(t - apart) for t in (0, half, 1)]
        parts.append((slopes[0] + 4 * slopes[1] + slopes[2]) / 6)
    gram = np.array([[(u * v).sum() / 8 for v in parts] for u in parts])
    error = abs(rational_oracle.rational(found.matrix) - gram).max() / gram.sum()
    assert 0 < error < max(told)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize(
    "name, size", [("gaussian", 1e-6), ("gaussian", 1e-4), ("empirical", 1e-9), ("empirical", 1e-6)]
)
def test_changes_of_similarity_between_near_models(name, size, rng):
    """Totals of 1e-12 had few digits and were refused as too steep; below 1e-16 there was none."""
    a = tnsim.Model(
        [tnsim.Residual(bilinear(rng, 2, 3, 2)), tnsim.Residual(bilinear(rng, 2, 3, 2))]
    )
    x, weights = rng.normal(size=(9, 2)), np.ones(9)
    if name == "gaussian":
        x, weights = quadrature(5, np.zeros(2), np.eye(2))
    metric = tnsim.Gaussian() if name == "gaussian" else tnsim.Empirical(x)
    layers = [
        tnsim.Residual(moved(layer.layer, size * rng.normal(size=layer.layer.down.shape)))
        for layer in a.layers
    ]
    b = tnsim.Model(layers)

    def apart(one, two):
        # Products of outputs in rationals; 1 less their cosine in 60 digits.
        u, v = (rational_oracle.forward(model, x) for model in (one, two))
        of_each = rational_oracle.rational(weights)[:, None]
        with mp.workdps(60):
            uv, uu, vv = (
                mp.mpf(total.numerator) / total.denominator
                for total in ((of_each * y * z).sum() for y, z in ((u, v), (u, u), (v, v)))
            )
            return float(1 - uv / mp.sqrt(uu * vv))

    found = tnsim.change(a, b, metric, of="similarity")
    limits = {"rtol": 1e-6, "limited_by": "the digits of near models"}
    assert_close(found.total, apart(a, b), **limits)
    back = [tnsim.Model([a.layers[0], layers[1]]), tnsim.Model([layers[0], a.layers[1]])]
    assert_close(found.removed, [apart(b, one) for one in back], **limits)
    assert_close(found.alone, [apart(a, one) for one in reversed(back)], **limits)
    assert_close(found.share.sum(), 1.0, rtol=1e-12)


def moved(layer, by):
    return tnsim.Bilinear(layer.left, layer.right, layer.down + by)


def in_units_of_the_stream(exponent, writes):
    """One function for all exponents: a stream in units of `2 ** exponent`, biases included."""
    rng, unit = np.random.default_rng(7), 2.0**exponent
    layers = []
    for _ in range(2):
        left, right, down = (rng.normal(size=shape) for shape in ((3, 2), (3, 2), (2, 3)))
        bias = unit * writes * rng.normal(size=2)
        core = tnsim.Bilinear(left / unit, right / unit, unit * writes * down, None, None, bias)
        layers.append(tnsim.Residual(core))
    ends = tnsim.Linear(unit * np.eye(2)), tnsim.Linear(np.eye(2) / unit)
    return tnsim.Model([ends[0], *layers, ends[1]])


@pytest.mark.crossing
@pytest.mark.parametrize("name", ["gaussian", "empirical"])
@pytest.mark.parametrize("exponent", [-72, slow(-140), slow(70), 200])
def test_float32_is_right_or_tells_beyond_its_range(name, exponent, rng):
    """Changes, paths, edges and similarities were off by up to 0.7 or NaN."""
    metric = tnsim.Gaussian() if name == "gaussian" else tnsim.Empirical(rng.normal(size=(20, 2)))
    near, far = (
        [in_units_of_the_stream(own, writes) for writes in (1.0, 1.1)] for own in (0, exponent)
    )
    asked = {
        "change": lambda a, b, dtype: tnsim.change(a, b, metric, dtype=dtype).share,
        "paths": lambda a, _, dtype: tnsim.paths(a, None, metric, dtype=dtype).share,
        "edges": lambda a, _, dtype: tnsim.paths(a, None, metric, legs=True, dtype=dtype).cut,
        "similarity": lambda a, b, dtype: [tnsim.similarity(a, b, metric, dtype=dtype)],
    }
    for ask in asked.values():
        try:
            found = ask(*far, "float32")
        except LOST:
            continue
        assert_close(found, ask(*near, "float64"), scale=LARGEST, rtol=1e-4, limited_by="float32")
