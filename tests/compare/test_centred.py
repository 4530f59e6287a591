"""Similarity of functions without their means: NumPy at points, quadrature, the laws of a mean."""

import itertools
from functools import partial

import numpy as np
import pytest
from closeness import assert_close
from commands import command, told
from oracles import bilinear, linear, multilinear, quadrature, random_gaussian
from refusals import refused
from seeds import generator
from sequence_cases import slow
from sequence_oracles import attention
from stored_runs import begun

import tnsim
from tnsim.compare import centred

X = generator(5).normal(size=(60, 3)) + 0.5


def cosine(u, v, weights=None):
    """The cosine of outputs (n, ..., out) without their means over inputs and positions."""
    weights = np.full(len(u), 1 / len(u)) if weights is None else weights / weights.sum()
    shape = (-1,) + (1,) * (u.ndim - 1)
    apart = []
    for y in (u, v):
        by_input = y.reshape(len(y), -1, y.shape[-1]).mean(axis=1)
        apart.append((y - weights @ by_input) * np.sqrt(weights).reshape(shape))
    return (apart[0] * apart[1]).sum() / np.linalg.norm(apart[0]) / np.linalg.norm(apart[1])


def network(rng, kind):
    layers = {
        "linear": lambda: [linear(rng, 3, 2, bias=True)],
        "bilinear": lambda: [bilinear(rng, 3, 4, 2, biases=True)],
        "two layers": lambda: [bilinear(rng, 3, 4, 3), bilinear(rng, 3, 4, 2)],
        "relu": lambda: [
            linear(rng, 3, 4, bias=True),
            tnsim.Elementwise("relu"),
            linear(rng, 4, 2),
        ],
        "activation last": lambda: [linear(rng, 3, 2), tnsim.Elementwise("gelu")],
    }
    return tnsim.Model(layers[kind]())


KINDS = ("linear", "bilinear", "two layers", "relu", "activation last")


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("kind", KINDS)
def test_at_inputs(kind):
    rng = generator(1)
    a, b = (network(rng, kind) for _ in range(2))
    weights = rng.uniform(size=len(X))
    metric = tnsim.Empirical(X, weights)
    wanted = cosine(np.asarray(a(X)), np.asarray(b(X)), weights)
    assert_close(tnsim.similarity(a, b, metric, centred=True), wanted, scale=1.0, rtol=1e-11)
    grid = tnsim.pairwise([a, b], metric, centred=True)
    assert_close(grid.similarity[0, 1], wanted, scale=1.0, rtol=1e-11)
    plain = (lambda model: lambda x: np.asarray(model(x)))(a)
    assert_close(tnsim.similarity(plain, b, metric, centred=True), wanted, scale=1.0, rtol=1e-11)
    by_output = tnsim.slices(a, b, metric, centred=True)
    for n in range(2):
        alone = cosine(np.asarray(a(X))[:, n:][:, :1], np.asarray(b(X))[:, n:][:, :1], weights)
        assert_close(by_output[n], alone, scale=1.0, rtol=1e-10)


def normal(rng, make, positions=None):
    """Two models, a Gaussian metric, and points of quadrature over all positions."""
    models = [make() for _ in "ab"]
    d, n = models[0].d_in, positions or 1
    mean, cov = random_gaussian(rng, d)
    x, weights = quadrature(8 // n + 3, np.tile(mean, n), np.kron(np.eye(n), cov))
    x = x if positions is None else x.reshape(-1, n, d)
    return models, [tnsim.Gaussian(mean, cov)], x, weights


def uniform(rng):
    x, w = np.polynomial.legendre.leggauss(4)  # on [-1, 1], where the law is uniform
    x, w = (np.array(list(itertools.product(y, repeat=3))) for y in (x, w))
    return [network(rng, "bilinear") for _ in "ab"], [tnsim.Product(["uniform"] * 3)], x, w.prod(1)


def attending(rng, d, n_ctx, *others):
    layers = [attention(rng, d, 1, 2, 2, 2, rope_base=None), *(make() for make in others)]
    return tnsim.Model(layers, n_ctx=n_ctx)


def tokens(rng, *others):
    """By all sequences of three tokens; deeper models share their beginnings."""
    ids = np.array(list(itertools.product(range(3), repeat=3)))
    metrics = [tnsim.Categorical(), tnsim.Empirical(ids)]
    models = [attending(rng, 3, 3, *others) for _ in "ab"]
    return models, metrics, np.eye(3)[ids], None


def of_sequences(rng):
    x = rng.normal(size=(50, 4, 3))
    models = [attending(rng, 3, 4, lambda: bilinear(rng, 2, 4, 2)) for _ in "ab"]
    return models, [tnsim.Empirical(x)], x, None


# name -> rng -> models, metrics of one law, and its points and weights; means are over inputs and positions
LAWS = {
    "linear": lambda g: normal(g, lambda: network(g, "linear")),
    "bilinear": lambda g: normal(g, lambda: network(g, "bilinear")),
    "two layers": lambda g: normal(g, lambda: network(g, "two layers")),
    "uniform": uniform,
    "sequences": of_sequences,
    "tokens": tokens,
    "tokens twice": lambda g: tokens(g, lambda: attention(g, 2, 1, 2, 2, 2, rope_base=None)),
    "normal sequences": lambda g: normal(g, lambda: attending(g, 2, 2), 2),
}


@pytest.mark.parametrize(
    "law", [slow(x) if x in ("linear", "normal sequences") else x for x in LAWS]
)
def test_exact_under_every_law(law):
    (a, b), metrics, x, weights = LAWS[law](generator(2))
    wanted = cosine(np.asarray(a(x)), np.asarray(b(x)), weights)
    for metric in metrics:
        found = tnsim.similarity(a, b, metric, centred=True)
        assert found.exact
        assert_close(found, wanted, scale=1.0, rtol=1e-10)
        grid = tnsim.pairwise([a, b], metric, centred=True)
        assert_close(grid.similarity[0, 1], wanted, scale=1.0, rtol=1e-10)
        if isinstance(metric, tnsim.Gaussian):
            checked = tnsim.check(a, b, metric, centred=True, samples=4096)
            assert abs(checked.deviation) < 5


def test_an_activation_is_exact():
    # E relu(x) = 1 / sqrt(2 pi), so relu(x) - E and x have covariance 1 / 2 and variances
    # 1 / 2 - 1 / (2 pi) and 1.
    relu = tnsim.Model([tnsim.Linear([[1.0]]), tnsim.Elementwise("relu")])
    line = tnsim.Model([tnsim.Linear([[1.0]])])
    found = tnsim.similarity(relu, line, centred=True)
    assert_close(found, 0.5 / np.sqrt(0.5 - 1 / (2 * np.pi)), rtol=1e-12)
    assert_close(tnsim.inner(relu, line, centred=True), 0.5, rtol=1e-12)
    assert_close(tnsim.log_inner(relu, line, centred=True).log, np.log(0.5), rtol=1e-11)


def test_a_constant_added_to_outputs_changes_nothing():
    rng = generator(3)
    layers = [bilinear(rng, 3, 4, 2, biases=True) for _ in range(2)]
    a, b = (tnsim.Model([layer]) for layer in layers)
    shifted = tnsim.Model([layers[1], tnsim.Linear(np.eye(2), bias=[30.0, -50.0])])
    wanted = tnsim.similarity(a, b, centred=True)
    assert abs(tnsim.similarity(a, shifted) - wanted) > 0.01
    assert_close(tnsim.similarity(a, shifted, centred=True), wanted, scale=1.0, rtol=1e-11)
    assert_close(
        tnsim.similarity(a, b - 0.5 * a, centred=True),
        tnsim.similarity(a, shifted - 0.5 * a, centred=True),
        scale=1.0,
        rtol=1e-10,
    )


@pytest.mark.parametrize("offset", [2.0**30, 2.0**40])
def test_what_outputs_of_a_function_have_in_common_costs_no_digits(offset):
    """The offset is added without rounding; that of the mean took seven digits beside 2^40."""
    rng = generator(10)
    outputs = [np.round(rng.normal(size=(60, 2)) * 2**10) / 2**10 for _ in range(2)]
    rows = np.arange(60.0)[:, None]
    a, b = (
        (lambda x, y=y, c=c: y[x[:, 0].astype(int)] + c)
        for y, c in zip(outputs, (offset, -offset), strict=True)
    )
    found = tnsim.similarity(a, b, tnsim.Empirical(rows), centred=True)
    assert_close(found, cosine(*outputs), scale=1.0)


def test_means_beyond_floats_and_over_nothing_are_refused():
    steep = tnsim.Model([tnsim.Bilinear([[1e200]], [[1e200]], [[1.0]])])
    said = "the mean of the outputs, or what they are less their mean, is beyond float64"
    with refused(said, tnsim.TnsimError):
        tnsim.similarity(steep, steep, centred=True)
    with refused(said, tnsim.TnsimError):
        tnsim.similarity(*[lambda x: 1e308 * x] * 2, tnsim.Empirical([[1.0], [-1.0]]), centred=True)


def test_files_are_centred_and_their_store_knows(tmp_path, monkeypatch):
    rng = generator(6)
    models = [network(rng, "bilinear") for _ in range(3)]
    for n, model in enumerate(models):
        tnsim.save(model, tmp_path / f"step_{n}.safetensors")
    files = [str(tmp_path / f"step_{n}.safetensors") for n in range(3)]
    wanted = [[float(tnsim.similarity(a, b, centred=True)) for b in models] for a in models]
    store = tmp_path / "store"
    exactly = centred.mean_of

    def elsewhere(*given):
        """A mean as another processor rounds it."""
        mean = exactly(*given)
        return mean._replace(values=np.nextafter(mean.values, np.inf))

    for mean_of in (exactly, exactly, elsewhere):  # computed, then read, which changes no model
        monkeypatch.setattr(centred, "mean_of", mean_of)
        found = tnsim.pairwise(files, centred=True, store=store)
        assert_close(found.similarity, wanted, scale=1.0, rtol=1e-11)
    assert len(begun(store)) == 2
    with refused("centred", tnsim.errors.StoreMismatch):
        tnsim.pairwise(files, store=store)
    assert found.attrs["centred"] == 1
    number = told("similarity", *files[:2], "--centred")
    assert_close(number["similarity"], wanted[0][1], scale=1.0, rtol=1e-11)
    assert number["centred"] is True
    for verb in ("similarity", "pairwise"):
        out = ("--out", tmp_path / "out") if verb == "pairwise" else ()
        assert "(exact, without means)" in command(verb, *files[:2], "--centred", *out).stdout


@pytest.mark.slow
def test_modules_are_centred():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    nets = [torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Softmax(-1)) for _ in range(2)]
    with torch.no_grad():
        u, v = (net(torch.from_numpy(X).float()).numpy().astype(np.float64) for net in nets)
    metric = tnsim.Empirical(X)
    found = tnsim.similarity(*nets, metric, centred=True)
    assert_close(found, cosine(u, v), scale=1.0, rtol=1e-6, limited_by="float32")
    assert found.inputs == len(X)
    estimate = tnsim.similarity(*nets, centred=True)
    assert not estimate.exact and estimate < tnsim.similarity(*nets)


@pytest.mark.parametrize("metric", [tnsim.Symmetric(), tnsim.TreeSymmetric(), tnsim.Frobenius()])
def test_metrics_without_inputs_are_refused(metric):
    model = network(generator(7), "bilinear")
    with refused("no expectation over inputs"):
        tnsim.similarity(model, model, metric, centred=True)


def test_functions_have_means_on_inputs_alone():
    """Under a product they ran on inputs of no coordinates."""
    for metric in (tnsim.Product("uniform"), tnsim.GaussianClosure()):
        with refused("functions that are no models are compared on inputs alone"):
            tnsim.similarity(np.tanh, np.sin, metric, centred=True)


def constants():
    """Constant models and functions, of which rounding leaves something or nothing."""
    flat = tnsim.Model([tnsim.Linear(np.zeros((1, 3)), bias=[0.1])])
    quiet = tnsim.Linear(np.ones((4, 3)), bias=np.full(4, -1e3))  # no unit is ever on
    dead = tnsim.Model([quiet, tnsim.Elementwise("relu"), tnsim.Linear(np.ones((1, 4)), [0.1])])
    own = lambda x: np.full((len(x), 1), 0.1) + 1e-17 * x[:, :1]  # noqa: E731
    return {"flat": flat, "dead": dead, "difference": flat - 0.5 * flat, "function": own}


@pytest.mark.crossing
@pytest.mark.parametrize("kind", constants())
@pytest.mark.parametrize("metric", [tnsim.Gaussian(mean=np.zeros(3)), tnsim.Empirical(X)])
def test_a_constant_function_has_no_similarity(kind, metric):
    """Rounding of the mean was a function of its own, and what was left is not the zero function."""
    constant, other = constants()[kind], tnsim.Model([linear(generator(7), 3, 1, bias=True)])
    said = "is constant to within rounding.*: centred=True leaves nothing of it.*centred=False"
    with refused(f"the second model {said}"):
        tnsim.similarity(other, constant, metric, centred=True)
    with refused(f"the second model {said}"):
        tnsim.slices(other, constant, metric, centred=True)
    with refused(f"late {said}"):
        tnsim.pairwise({"early": other, "late": constant}, metric, centred=True)
    if kind != "difference":  # whose terms cancel: no digit is left of zero
        assert abs(tnsim.inner(other, constant, metric, centred=True)) < 1e-14
    assert abs(tnsim.similarity(other, constant, metric)) > 0
    with refused(said):
        tnsim.check(constant, other, tnsim.Gaussian(mean=np.zeros(3)), centred=True)


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("kind", KINDS)
def test_similarities_of_means_say_so(kind):
    """The share of the mean by NumPy, at weighted inputs, of models, functions and differences."""
    rng = generator(6)
    a, b = (network(rng, kind) for _ in range(2))
    weights = rng.uniform(size=len(X))
    shares = []
    for offset in (0.0, 1e5):
        one, two = (tnsim.Model((*model.layers, linear_offset(offset))) for model in (a, b))
        of_each = []
        for model in (one, two):
            y = np.asarray(model(X))
            mean = weights @ y / weights.sum()
            of_each.append((mean**2).sum() / (weights @ (y**2).sum(1) / weights.sum()))
        metric = tnsim.Empirical(X, weights)
        found = tnsim.similarity(one, two, metric)
        assert_close(found.mean_share, min(of_each), scale=1.0, rtol=1e-11)
        plain = tnsim.similarity(lambda x, own=one: np.asarray(own(x)), two, metric)
        assert_close(plain.mean_share, min(of_each), scale=1.0, rtol=1e-11)
        assert ("squared norm is the mean" in str(found)) == (min(of_each) > 0.5)
        assert tnsim.similarity(one, two, metric, centred=True).mean_share < 1e-20
        shares.append(min(of_each))
    assert shares[1] > 0.9


def share_of_mean(x, weights, *summands):
    """By points of quadrature, of a sum of (coefficient, model) at a single position."""
    y = sum(c * np.asarray(tnsim.Model(model.layers)(x)) for c, model in summands)
    return ((weights @ y) ** 2).sum() / (weights @ (y * y).sum(1))


def linear_offset(offset):
    return tnsim.Linear(np.eye(2), np.full(2, offset))


def test_means_of_sequences_and_of_draws():
    rng = generator(8)
    weight = rng.normal(size=(2, 3))
    x = rng.normal(size=(50, 4, 3)) + 1.0
    model = tnsim.Model([tnsim.Linear(weight)], n_ctx=4)
    y = x @ weight.T
    wanted = 4 * (y.mean((0, 1)) ** 2).sum() / (y**2).sum((1, 2)).mean()
    found = tnsim.similarity(model, lambda x: x @ weight.T + 1e-3 * x[..., :2], tnsim.Empirical(x))
    other = y + 1e-3 * x[..., :2]
    wanted = min(wanted, 4 * (other.mean((0, 1)) ** 2).sum() / (other**2).sum((1, 2)).mean())
    assert_close(found.mean_share, wanted, scale=1.0, rtol=1e-11)
    constant = tnsim.similarity(
        lambda x: np.ones((len(x), 2)),
        lambda x: x[:, :2] * 0 + 2,
        tnsim.Gaussian(mean=np.zeros(3), samples=1024),
    )
    assert_close(constant.mean_share, 1.0, scale=1.0, rtol=1e-12)
    assert "100 % of the squared norm" in str(constant)
    odd = tnsim.similarity(np.tanh, lambda x: x, tnsim.Gaussian(mean=np.zeros(3)))
    assert odd.mean_share < 1e-4
    assert "mean" not in str(odd)
    models = [network(rng, "bilinear"), network(rng, "bilinear")]
    assert tnsim.similarity(*models, tnsim.Symmetric()).mean_share is None  # which has no inputs


POLYNOMIALS = {
    "linear": lambda rng: [linear(rng, 3, 2, bias=True)],
    "bilinear": lambda rng: [bilinear(rng, 3, 4, 2)],
    "biased": lambda rng: [linear(rng, 3, 3, bias=True), bilinear(rng, 3, 4, 3, True)],
    "skip": lambda rng: [tnsim.Residual(bilinear(rng, 3, 4, 3, True)), linear(rng, 3, 2)],
    "cubic": lambda rng: [multilinear(rng, 3, 3, 4, 3, True)],
    "two layers": lambda rng: [bilinear(rng, 3, 4, 2, True), bilinear(rng, 2, 4, 2)],
    "six coordinates": lambda rng: [bilinear(rng, 3, 9, 6, True), bilinear(rng, 6, 9, 2)],
    "three layers": lambda rng: [bilinear(rng, n, 4, 2, True) for n in (3, 2, 2)],
}


COV = np.array([[1.0, 0.3, 0], [0.3, 0.5, 0.1], [0, 0.1, 2.0]])


@pytest.mark.crossing
@pytest.mark.parametrize(
    ("mean", "cov"),
    [(np.array([0.4, -1.0, 0.7]), COV), (None, np.diagonal(COV)), (None, None)],
    ids=["mean and covariance", "variances", "standard"],
)
@pytest.mark.parametrize("kind", POLYNOMIALS)
def test_means_of_polynomials(kind, mean, cov):
    """From the weights alone, of models, sums and small models, in every road of a run."""
    rng = generator(11)
    a, b, c = (tnsim.Model(POLYNOMIALS[kind](rng)) for _ in range(3))
    summed = a - 2.0 * b
    metric = tnsim.Gaussian(mean, cov)
    spread = np.eye(3) if cov is None else np.diag(cov) if cov.ndim == 1 else cov
    x, weights = quadrature(9, np.zeros(3) if mean is None else mean, spread)
    share = partial(share_of_mean, x, weights)
    wanted = [share((1, b)), share((1, a)), share((1, a), (-2, b)), share((1, c))]
    compared = [3.0 * b, a, summed, c * 1e-30]
    for (one, first), (two, second) in itertools.pairwise(zip(compared, wanted, strict=True)):
        found = tnsim.similarity(one, two, metric).mean_share
        assert_close(found, min(first, second), scale=1.0, rtol=1e-10)
    for asked in ({}, {"slices": True}):
        run = tnsim.pairwise(compared, metric, **asked)
        assert_close(run.mean_share_a.values, wanted, scale=1.0, rtol=1e-10)
    beside = tnsim.pairwise([c], metric, other=compared)
    assert_close(beside.mean_share_b.values, wanted, scale=1.0, rtol=1e-10)


@pytest.mark.crossing
@pytest.mark.parametrize("verb", ["similarity", "pairwise"])
@pytest.mark.parametrize("mean", [np.array([0.6, -0.4]), None], ids=["mean", "standard"])
def test_means_of_attention(mean, verb):
    """Which has a plan and no vectors: beside quadrature over the inputs of both positions."""
    rng = generator(13)
    cov = np.array([[1.0, 0.3], [0.3, 0.5]])
    both = np.zeros(4) if mean is None else np.tile(mean, 2)
    x, weights = quadrature(6, both, np.kron(np.eye(2), cov))
    a, b = (
        tnsim.Model([tnsim.Residual(attention(rng, 2, 2, 2, 1, 2, biases=True))], n_ctx=2)
        for _ in range(2)
    )

    def share(*summands):
        y = sum(c * np.asarray(model(x.reshape(-1, 2, 2))) for c, model in summands)
        return 2 * ((weights @ y.mean(1)) ** 2).sum() / (weights @ (y * y).sum((1, 2)))

    metric = tnsim.Gaussian(mean, cov)
    if verb == "similarity":
        found = tnsim.similarity(a, 3.0 * b, metric).mean_share
        wanted = min(share((1, a)), share((1, b)))
    else:
        found = tnsim.pairwise([a, b * 1e-30, a - 2.0 * b], metric).mean_share_a.values
        wanted = [share((1, a)), share((1, b)), share((1, a), (-2, b))]
    assert_close(found, wanted, scale=1.0, rtol=1e-10)


@pytest.mark.parametrize("kind", ["wide", "lifted", slow("attention twice")])
def test_means_of_a_closure(kind):
    """The norm is that of the mean and that of the rest, where only a plan knows both."""
    rng = generator(14)
    metric, n_ctx = tnsim.GaussianClosure(np.full(3, 0.3)), None
    if kind == "attention twice":
        n_ctx = 2
        made = [[attention(rng, 3, 1, 2, 2, 3, biases=True) for _ in range(2)] for _ in range(2)]
    else:
        biased = kind == "lifted"
        made = [[bilinear(rng, 3, 9, 3, biased) for _ in range(4)] for _ in range(2)]
    a, b = (tnsim.Model(layers, n_ctx) for layers in made)
    found = tnsim.similarity(a, b, metric)
    assert found.route == "contractions"
    wanted = []
    for model in (a, b):
        whole, rest = (tnsim.log_inner(model, model, metric, centred=c) for c in (False, True))
        wanted.append(-np.expm1(rest.log - whole.log))
    assert_close(found.mean_share, min(wanted), scale=1.0, rtol=1e-10)
    run = tnsim.pairwise([a, b], metric)
    assert_close(run.mean_share_a.values, wanted, scale=1.0, rtol=1e-10)
    centred = tnsim.similarity(a, b, metric, centred=True)
    assert centred.mean_share < 1e-20


def test_means_beyond_floats():
    """The share of a function is that of its multiples, whose means no float holds."""
    rng = generator(15)
    layers = [bilinear(rng, 4, 6, 4) for _ in range(12)]
    plain = tnsim.Model(layers)
    large = tnsim.Model([tnsim.Bilinear(977.0 * x.left, x.right, x.down) for x in layers])
    metric, other = tnsim.GaussianClosure(), tnsim.Model([bilinear(rng, 4, 6, 4)])
    wanted = tnsim.similarity(plain, plain, metric).mean_share
    assert 1e-6 < wanted < 1.0
    assert_close(tnsim.similarity(large, large, metric).mean_share, wanted, rtol=1e-10)
    run = tnsim.pairwise([plain, large, other], metric)
    assert_close(run.mean_share_a.values[:2], [wanted, wanted], rtol=1e-10)


def test_means_of_sparse_layers():
    rng = generator(12)
    band = np.abs(np.arange(40)[:, None] - np.arange(40)) < 2
    legs = [rng.normal(size=band.shape) * band for _ in range(2)]
    legs[1] = legs[1] + legs[0]
    down = rng.normal(size=(3, 40))
    sparse = [tnsim.models.arrays.SparseMatrix.of(leg) for leg in legs]
    model = tnsim.Model([tnsim.Bilinear(*sparse, down)])
    forms = np.einsum("oh,hi,hj->oij", down, *legs)
    forms = (forms + forms.transpose(0, 2, 1)) / 2
    squares = np.einsum("oii->o", forms) ** 2
    wanted = squares.sum() / (squares + 2 * (forms**2).sum((1, 2))).sum()
    found = tnsim.similarity(model, 2.0 * model)
    assert found.route == "receptive fields"
    assert_close(found.mean_share, wanted, scale=1.0, rtol=1e-12)


@pytest.mark.parametrize("n_ctx", [None, 3])
def test_means_of_networks_with_a_hidden_layer(n_ctx):
    """Without inputs: from the weights alone, beside points of quadrature."""
    rng = generator(9)
    mean, cov = rng.normal(size=2), np.array([[1.0, 0.3], [0.3, 0.5]])
    metric = tnsim.Gaussian(mean, cov)
    x, weights = quadrature(200, mean, cov)

    def gelu(offset):
        first, last = linear(rng, 2, 5, bias=True), rng.normal(size=(2, 5))
        return tnsim.Model([first, tnsim.Elementwise("gelu"), tnsim.Linear(last, offset)], n_ctx)

    a, b, far = gelu(np.zeros(2)), gelu(np.ones(2)), gelu(np.full(2, 30.0))

    share = partial(share_of_mean, x, weights)
    of_a, of_b, of_far = (share((1, model)) for model in (a, b, far))
    found = tnsim.similarity(a, b, metric)
    assert_close(found.mean_share, min(of_a, of_b), scale=1.0, rtol=1e-9)
    apart = tnsim.similarity(a - far, far, metric)
    assert_close(apart.mean_share, min(share((1, a), (-1, far)), of_far), scale=1.0, rtol=1e-9)
    assert apart.mean_share > 0.9 and "% of the squared norm is the mean" in str(apart)
    assert "mean_share" in repr(apart) and apart.route == "kernels"
    assert tnsim.similarity(a, far, metric, centred=True).mean_share < 1e-20
    assert_close(
        tnsim.similarity(a, far, tnsim.GaussianClosure(mean, cov)).mean_share,
        min(of_a, of_far),
        scale=1.0,
        rtol=1e-9,
    )
    zero = tnsim.Model([tnsim.Linear(np.zeros((2, 2)), np.ones(2))], n_ctx)
    assert_close(tnsim.similarity(a, zero, metric).mean_share, of_a, scale=1.0, rtol=1e-9)
