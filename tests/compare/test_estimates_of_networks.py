"""Networks without an exact inner product are run on scrambled Sobol points, and say so."""

import jax
import numpy as np
import pytest
from closeness import assert_close
from refusals import refused

import tnsim
from tnsim.metrics.metric import REPLICATES, SobolInputs

SAMPLES = 2**12


def deep(rng, d=2, out=3, activation="relu"):
    """A network of two layers with an activation, as a model."""
    layers = []
    for n_in, n_out in ((d, 8), (8, 6)):
        weight = rng.normal(size=(n_out, n_in)) / n_in**0.5
        layers += [tnsim.Linear(weight, rng.normal(size=n_out)), tnsim.Elementwise(activation)]
    return tnsim.Model([*layers, tnsim.Linear(rng.normal(size=(out, 6)))])


def grid(mean, cov):
    """Nodes and weights of a rectangle rule for N(mean, cov) in the plane, to about 1e-6."""
    line = np.linspace(-7, 7, 701)
    z = np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2)
    weights = np.exp(-(z**2).sum(axis=1) / 2)
    return mean + z @ np.linalg.cholesky(cov).T, weights / weights.sum()


def standardised(value, expected):
    return abs(float(value) - expected) / float(value.standard_error)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
def test_errors_are_as_large_as_stated(rng, activation):
    a, b = deep(rng, activation=activation), deep(rng, activation=activation)
    root = rng.normal(size=(2, 2))
    mean, cov = rng.normal(size=2), root @ root.T + np.eye(2)
    x, w = grid(mean, cov)
    u, v = (np.asarray(model(x)) for model in (a, b))
    products = [w @ (left * right).sum(axis=1) for left, right in ((u, v), (u, u), (v, v))]
    metric = tnsim.Gaussian(mean, cov, samples=SAMPLES)
    similarity, inner = tnsim.similarity(a, b, metric), tnsim.inner(a, b, metric)
    assert not similarity.exact and similarity.route == "sampling"
    assert similarity.inputs == SAMPLES and similarity.standard_error < 3e-3
    # Five standard errors of 15 degrees of freedom: one of 6,000 estimates is beyond.
    assert standardised(similarity, products[0] / (products[1] * products[2]) ** 0.5) < 5
    assert standardised(inner, products[0]) < 5
    sign, log = tnsim.log_inner(a, b, metric)
    assert_close(sign * np.exp(log), inner)
    slices = tnsim.slices(a, b, metric)
    each = (w @ (u * v)) / np.sqrt((w @ u**2) * (w @ v**2))
    assert (abs(slices - each) < 5 * slices.standard_error + 1e-6).all()


def test_the_estimate_is_the_mean_over_its_points(rng):
    a, b = deep(rng), deep(rng)
    metric = tnsim.Gaussian(samples=SAMPLES)
    x = SobolInputs(metric, (2,), SAMPLES)[:]
    assert x.shape == (SAMPLES, 2)
    found = tnsim.inner(a, b, metric)
    assert_close(found, (np.asarray(a(x)) * np.asarray(b(x))).sum(axis=1).mean(), rtol=1e-12)
    by_replicate = (np.asarray(a(x)) * np.asarray(b(x))).sum(axis=1).reshape(REPLICATES, -1)
    spread = by_replicate.mean(axis=1).std(ddof=1) / REPLICATES**0.5
    assert_close(found.standard_error, spread, rtol=1e-9)


def test_points_are_normal_and_the_same_in_every_block(rng):
    metric = tnsim.Gaussian(rng.normal(size=3), [1.0, 4.0, 0.0])
    inputs = SobolInputs(metric, (3,), 1000)
    assert inputs.shape == (1008, 3)
    whole = inputs[:]
    for start, stop in ((0, 1), (5, 70), (62, 64), (900, 1008), (7, 7)):
        assert (inputs[start:stop] == whole[start:stop]).all()
    assert (abs(whole.mean(axis=0) - metric.mean) < 0.02).all()  # draws would be off by 0.06
    assert (abs(whole.var(axis=0) - metric.cov) < 0.1).all()
    sequences = SobolInputs(tnsim.Gaussian(), (5, 3), 64)
    assert sequences[:].shape == (64, 5, 3)


@pytest.mark.slow
def test_errors_are_smaller_than_those_of_as_many_draws(rng):
    """A quarter of them at eight inputs, as the page on calls says, in the median of pairs."""
    draws = tnsim.Empirical.normal(mean=np.zeros(8), samples=2**14)
    ratios = []
    for _ in range(7):
        a, b = deep(rng, d=8), deep(rng, d=8)
        of_points, of_draws = (tnsim.similarity(a, b, m) for m in (tnsim.Gaussian(), draws))
        ratios.append(of_points.standard_error / of_draws.standard_error)
    # Medians of 24 pairs are 0.2; single pairs go from 0.1 to 0.7, as errors have errors.
    assert np.median(ratios) < 0.5


def test_functions_take_inputs_of_the_model_beside_them_or_of_the_metric(rng):
    a = deep(rng)
    inside = tnsim.Gaussian(samples=SAMPLES)
    of_model = tnsim.similarity(a, lambda x: np.asarray(a(x)) ** 3, inside)
    alone = tnsim.Gaussian(mean=np.zeros(2), samples=SAMPLES)
    of_metric = tnsim.similarity(lambda x: np.asarray(a(x)), lambda x: np.asarray(a(x)) ** 3, alone)
    assert_close(of_model, of_metric, rtol=1e-12)
    with refused(r"which inputs these functions take: .*Empirical"):
        tnsim.similarity(abs, abs)


def test_all_pairs_are_those_of_two(rng, tmp_path):
    models = [deep(rng) for _ in range(3)]
    metric = tnsim.Gaussian(samples=SAMPLES)
    functions = [*models, lambda x: np.sin(np.asarray(models[0](x)))]
    for given in (models, functions):
        found = tnsim.pairwise(given, metric)
        assert not found.attrs["exact"] and found.attrs["metric"] == "gaussian"
        for i, one in enumerate(given):
            for j, two in enumerate(given[:i]):
                value = tnsim.similarity(one, two, metric)
                assert_close(found.similarity[i, j], value, scale=1.0, rtol=1e-12)
                assert_close(found.standard_error[i, j], value.standard_error, scale=1.0)
    stored = tnsim.pairwise(models[:2], metric, store=tmp_path / "run")
    grown = tnsim.pairwise(models, metric, store=tmp_path / "run")
    assert_close(grown.similarity[:2, :2], stored.similarity, scale=1.0, rtol=0)
    assert tnsim.plan_pairwise(models, metric).route == "sampling"
    # Where an exact inner product is known, samples say nothing, and stores do not ask for them.
    shallow = [tnsim.Model(model.layers[:2]) for model in models]
    exact = tnsim.pairwise(shallow, metric, store=tmp_path / "exact")
    assert exact.attrs["exact"]
    again = tnsim.pairwise(shallow, tnsim.Gaussian(samples=0), store=tmp_path / "exact")
    assert_close(again.similarity.values, exact.similarity.values, scale=1.0, rtol=0)


def test_means_of_polynomials_in_an_estimated_run_are_estimated(rng):
    """Exact means of deep polynomials may take minutes where the run takes a second."""
    square = tnsim.Model([tnsim.Bilinear(*rng.normal(size=(2, 3, 2)), rng.normal(size=(3, 3)))])
    metric, given = tnsim.Gaussian(samples=SAMPLES), (deep(rng), square)
    value = tnsim.similarity(*given, metric, centred=True)
    for sides in ((given, None), (given[:1], given[1:])):
        found = tnsim.pairwise(sides[0], metric, other=sides[1], centred=True)
        assert_close(found.similarity[0, -1], value, scale=1.0)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("activation", ["elu", "jump_relu(0.5)"])
def test_gates_without_a_kernel_are_estimated(rng, activation, plain):
    """Of these no series of a kernel has a bound; the layer is read, and its numbers are estimates.

    Plain units of such an activation have a kernel, but not beside gated ones.
    """
    mean, cov = np.array([0.3, -0.2]), np.array([[1.0, 0.4], [0.4, 0.7]])
    models = [
        tnsim.Model([tnsim.Gated(*rng.normal(size=(2, 4, 2)), rng.normal(size=(3, 4)), f)])
        for f in ("silu" if plain else activation, activation)
    ]
    if plain:
        layers = tnsim.Linear(rng.normal(size=(3, 2))), tnsim.Elementwise(activation)
        models[1] = tnsim.Model(layers)
    x, weights = grid(mean, cov)
    one, two = (np.asarray(model(x)) for model in models)
    products = [weights @ (f * g).sum(1) for f, g in ((one, two), (one, one), (two, two))]
    found = tnsim.similarity(*models, tnsim.Gaussian(mean, cov, samples=SAMPLES))
    assert not found.exact and tnsim.plan(*models).route == "sampling"
    assert standardised(found, products[0] / np.sqrt(products[1] * products[2])) < 5
    with refused("gated units take", tnsim.UnsupportedLayer):
        tnsim.inner(*models, tnsim.Gaussian(samples=0))


@pytest.mark.parametrize("verb", ["similarity", "inner", "slices", "log_inner", "plan", "pairwise"])
def test_no_samples_refuse_what_is_not_exact(rng, verb):
    a, metric = deep(rng), tnsim.Gaussian(samples=0)
    with refused("for one nonlinear layer, found 2", tnsim.UnsupportedLayer):
        if verb == "pairwise":
            tnsim.pairwise([a, deep(rng)], metric)
        else:
            getattr(tnsim, verb)(a, a, metric)
    for count in (7, 10**12):
        with refused(rf"32 to 2\^30, or 0 to refuse .* found {count}"):
            tnsim.Gaussian(samples=count)


def test_a_number_says_how_it_was_found(rng):
    # Means are more than half of these networks, which has a word of its own.
    apart = {"centred": True}
    value = tnsim.similarity(deep(rng), deep(rng), tnsim.Gaussian(samples=SAMPLES), **apart)
    assert "±" in f"{value}" == str(value) and str(value).endswith(
        "(estimate, 4,096 normal inputs)"
    )
    inputs = tnsim.Empirical(rng.normal(size=(1000, 2)))
    data = tnsim.similarity(deep(rng), deep(rng), inputs, **apart)
    assert str(data).endswith("(on 1,000 inputs)")
    linear = tnsim.Model([tnsim.Linear(np.eye(2))])
    assert str(tnsim.similarity(linear, linear)) == "1.0"
    assert f"{value:.3f}" == f"{float(value):.3f}"


@pytest.mark.slow
def test_modules_that_are_no_models_run_on_normal_inputs():
    torch = pytest.importorskip("torch")
    from module_cases import Module

    torch.manual_seed(0)

    def forward(m, x):
        return torch.softmax(m.out(m.norm(m.read(x))), dim=-1)

    def normed():
        layers = {"read": torch.nn.Linear(6, 8), "out": torch.nn.Linear(8, 3)}
        return Module(forward, **layers, norm=torch.nn.LayerNorm(8))

    nets = [normed().double().eval() for _ in range(2)]
    metric = tnsim.Gaussian(samples=SAMPLES)
    x = SobolInputs(metric, (6,), SAMPLES)[:]
    with torch.no_grad():
        u, v = (net(torch.from_numpy(x)).numpy() for net in nets)
    expected = (u * v).sum() / np.sqrt((u**2).sum() * (v**2).sum())
    found = tnsim.similarity(*nets, metric)
    assert_close(found, expected, scale=1.0, rtol=1e-12)
    assert not found.exact
    assert_close(tnsim.pairwise(nets, metric).similarity[0, 1], expected, scale=1.0, rtol=1e-12)
    with pytest.raises(tnsim.UnsupportedLayer):
        tnsim.similarity(*nets, tnsim.Gaussian(samples=0))


@pytest.mark.slow
def test_files_of_a_module_that_is_no_model_run_on_normal_inputs(tmp_path):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(5)
    nets = [torch.nn.Sequential(torch.nn.Linear(4, 5), norm, torch.nn.ReLU()) for _ in range(3)]
    for n, net in enumerate(nets):
        torch.save(net.state_dict(), tmp_path / f"step_{n}.pt")
    metric = tnsim.Gaussian(samples=SAMPLES)
    found = tnsim.pairwise(tmp_path, metric, dialect=nets[0])
    expected = tnsim.pairwise([net.eval() for net in nets], metric)
    assert_close(found.similarity.values, expected.similarity.values, scale=1.0, rtol=1e-12)
    assert found.a.values.tolist() == [0, 1, 2]


@pytest.mark.slow
def test_an_estimate_has_gradients_at_its_points(rng):
    a, b = deep(rng, activation="gelu"), deep(rng, activation="gelu")
    metric, weight = tnsim.Gaussian(samples=256), np.asarray(a.layers[0].weight)

    def similarity(weight):
        first = tnsim.Linear(weight, a.layers[0].bias)
        return tnsim.similarity(tnsim.Model([first, *a.layers[1:]]), b, metric)

    slope = jax.grad(similarity)(weight)
    along = rng.normal(size=weight.shape)
    # The step of a central difference leaves two thirds of the digits.
    step = 1e-5
    difference = float(similarity(weight + step * along)) - float(similarity(weight - step * along))
    assert abs((slope * along).sum() - difference / (2 * step)) < 1e-7


def test_moments_of_other_inputs_are_refused(rng):
    a = deep(rng)
    for moments in ({"mean": np.zeros(7)}, {"cov": np.eye(7)}):
        metric = tnsim.Gaussian(**moments)
        with refused(f"has 7 coordinates but the models read {a.d_in}"):
            tnsim.similarity(a, a, metric)


def test_layers_of_zeros_are_refused_in_words(rng):
    """Switched off, a layer reads nothing; the advice looks at what it reads."""
    a = deep(rng)
    dark = tnsim.Linear(np.zeros((6, 8)))
    zero = tnsim.Model([*a.layers[:2], dark, *a.layers[3:]])
    with refused("for one nonlinear layer, found 2", tnsim.UnsupportedLayer):
        tnsim.inner(zero, a, tnsim.Gaussian(samples=0))
