"""Paths: sums, inclusion and exclusion by hand, gauges, remainders, runs of checkpoints, refusals."""

import itertools
from pathlib import Path

import component_oracles as oracle
import numpy as np
import pytest
from activated_cases import gated, gaussian
from activated_cases import points as quadrature_of
from closeness import LARGEST, assert_close
from component_oracles import STACKS, pair, points
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import bilinear, linear
from refusals import LOST, refused
from seeds import generator
from sequence_cases import slow

import tnsim
from tnsim.localise.paths import components_in

DATA = Path(tnsim.__file__).parent / "data" / "induction"


def by_hand(model, x, by, labels):
    """Features of the paths with these labels, and the norm of what has no label."""
    names = tnsim.components(model, by)
    parts = oracle.path_outputs(model, x, len(names), by)
    found = {
        frozenset(n for n, one in zip(names, own, strict=True) if one): value.ravel()
        for own, value in parts.items()
    }
    features = np.stack([found.pop(frozenset(components_in(label))) for label in labels])
    rest = max((abs(value).max() for value in found.values()), default=0.0)
    return features, rest / abs(features).max()


def block(rng, activation, skip=1.0):
    return tnsim.Residual(gated(rng, activation, 3, 3, 3).layers[0], skip)


ACTIVATED = {
    "below a product": lambda rng: [block(rng, "gelu"), tnsim.Residual(bilinear(rng, 3, 2, 3))],
    "above another": lambda rng: [block(rng, "gelu", 0.5), block(rng, "relu"), linear(rng, 3, 2)],
    "without a skip": lambda rng: [
        tnsim.Residual(linear(rng, 3, 3)),
        *gated(rng, "silu", 2, 2, 3).layers,
    ],
}


@pytest.mark.crossing
@pytest.mark.parametrize("by", ["layer", "head", "unit"])
@pytest.mark.parametrize("name", [*STACKS, *ACTIVATED])
def test_paths_are_inclusion_and_exclusion_over_all_subsets(name, by, rng):
    """Of components of polynomials, and of activations at any depth, which are no polynomials in switches."""
    a, b = (
        pair(name, rng) if name in STACKS else (tnsim.Model(ACTIVATED[name](rng)) for _ in range(2))
    )
    if by == "head" and not a.attends:
        pytest.skip("no heads")
    x = points(a, rng)
    found = tnsim.paths(a, b, tnsim.Empirical(x), by=by)
    (bra, bra_rest), (ket, ket_rest) = (
        by_hand(model, x, by, labels) for model, labels in ((a, found.bra), (b, found.ket))
    )
    wanted = bra @ ket.T / len(x)
    assert_close(found.values, wanted, scale=LARGEST, rtol=1e-11)
    assert max(bra_rest, ket_rest) < 1e-12  # paths that are left out are zero
    inner = tnsim.inner(a, b, tnsim.Empirical(x))
    assert_close(found.values.sum(), inner, scale=abs(wanted).max(), rtol=1e-12)
    assert_close(found.share.sum(), 1.0, scale=abs(found.share).sum(), rtol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("partner", ["gelu", "relu", "bilinear"])
def test_units_beside_an_activation_are_pairs_of_the_kernel(partner, rng):
    """Against nested quadrature, with a skip, biases, and linear layers around the units."""
    a = tnsim.Model([linear(rng, 2, 3, True), block(rng, "gelu", 0.7), linear(rng, 3, 2, True)])
    b = (
        gated(rng, partner, 2)
        if partner != "bilinear"
        else tnsim.Model([bilinear(rng, 2, 2, 2, True)])
    )
    metric = gaussian(rng)
    x, weights = quadrature_of([a, b], metric)
    found = tnsim.paths(a, b, metric, by="unit")
    bra, ket = (
        by_hand(model, x, "unit", labels)[0].reshape(len(labels), len(x), -1)
        for model, labels in ((a, found.bra), (b, found.ket))
    )
    wanted = np.einsum("n,ino,jno->ij", weights, bra, ket)
    assert_close(found.values, wanted, scale=LARGEST, rtol=1e-10)
    assert_close(found.values.sum(), tnsim.inner(a, b, metric), rtol=1e-12)
    largest = tnsim.paths(a, b, metric, by="unit", top=1)
    assert largest.bra[1] == "remainder"
    kept = found.share[found.bra.index(largest.bra[0])]
    assert abs(kept) == abs(found.share).max() and abs(largest.share[0] - kept) < 1e-12
    one = tnsim.paths(a, metric=metric, by="unit", within=["layer 1 unit 1"])
    whole = tnsim.paths(a, metric=metric, by="unit")
    assert one.bra == ("embed", "embed > layer 1 unit 1")
    assert_close(one.values[1, 1], whole.values[2, 2], rtol=1e-12)
    assert_close(one.values.sum(), whole.values.sum(), rtol=1e-12)


METRICS = {
    "gaussian": tnsim.Gaussian(mean=[0.3, 0.0, -0.2]),
    "tree": tnsim.TreeSymmetric(),
    "symmetric": tnsim.Symmetric(),
    "frobenius": tnsim.Frobenius(),
    "product": tnsim.Product("uniform"),
}


@pytest.mark.parametrize(
    "name", [slow("gaussian"), *[name for name in METRICS if name != "gaussian"]]
)
def test_paths_sum_to_the_inner_product_under_every_metric(name, rng):
    a, b = (
        tnsim.Model([oracle.mlp(rng, 3, 2), oracle.mlp(rng, 3, 2, 0.7), linear(rng, 3, 2)])
        for _ in range(2)
    )
    metric = METRICS[name]
    found = tnsim.paths(a, b, metric)
    scale = np.sqrt(float(tnsim.inner(a, a, metric)) * float(tnsim.inner(b, b, metric)))
    assert_close(found.values.sum(), tnsim.inner(a, b, metric), scale=scale, rtol=1e-12)
    alone = tnsim.paths(a, metric=metric)
    assert_close(alone.values, alone.values.T, scale=LARGEST, rtol=1e-13)
    assert np.linalg.eigvalsh(alone.values).min() > -1e-12 * abs(alone.values).max()


def test_attention_under_tokens_of_one_layer(rng):
    model = tnsim.Model(
        [linear(rng, 3, 4), oracle.attending(rng, 4, 2), linear(rng, 4, 3)], n_ctx=3
    )
    metric = tnsim.Categorical()
    found = tnsim.paths(model, metric=metric, by="head")
    assert_close(found.values.sum(), tnsim.inner(model, model, metric), rtol=1e-12)
    ids = np.array(list(itertools.product(range(3), repeat=3)))
    features, _ = by_hand(model, np.eye(3)[ids], "head", found.bra)
    assert_close(found.values, features @ features.T / len(ids), scale=LARGEST, rtol=1e-11)


def scrambled(g, model):
    """The same function: units permuted, rescaled and with exchanged factors, heads in other bases."""
    layers = []
    for layer in model.layers:
        core, skip, scale = oracle.core_of(layer)
        if isinstance(core, tnsim.Bilinear):
            core = scrambled_units(g, core)
        elif isinstance(core, tnsim.Attention):
            core = scrambled_heads(g, core)
        layers.append(
            tnsim.Residual(core, skip, scale) if isinstance(layer, tnsim.Residual) else core
        )
    return tnsim.Model(layers, n_ctx=model.n_ctx)


def scrambled_units(g, core):
    rows = [
        np.column_stack([m, b])
        for m, b in ((core.left, core.left_bias), (core.right, core.right_bias))
    ]
    if g.random() < 0.5:
        rows.reverse()
    order = g.permutation(core.rank)
    sizes = np.exp(g.normal(size=(2, core.rank, 1))) * g.choice([-1, 1], (2, core.rank, 1))
    left, right = ((row * size)[order] for row, size in zip(rows, sizes, strict=True))
    down = (core.down / (sizes[0] * sizes[1])[:, 0])[:, order]
    return tnsim.Bilinear(
        left[:, :-1], right[:, :-1], down, left[:, -1], right[:, -1], core.down_bias
    )


def scrambled_heads(g, core):
    """Bases of values and outputs; without RoPE also of queries and keys; both scores exchanged."""
    heads, new = core.n_heads, {name: [] for name in ("q1", "k1", "q2", "k2", "v", "o")}
    biases = {name: [] for name in ("q1", "k1", "q2", "k2", "v")}
    for h in range(heads):
        scores = slice(h * core.d_head, (h + 1) * core.d_head)
        for q, k in (("q1", "k1"), ("q2", "k2")):
            z = (
                g.normal(size=(core.d_head, core.d_head))
                if core.rope_base is None
                else np.eye(core.d_head) * g.uniform(0.5, 2)
            )
            for name, basis in ((q, z), (k, np.linalg.inv(z).T)):
                new[name].append(basis @ getattr(core, name)[scores])
                bias = getattr(core, f"{name}_bias")
                biases[name].append(np.zeros(core.d_head) if bias is None else basis @ bias[scores])
        z = g.normal(size=(core.d_value, core.d_value))
        rows = slice(h * core.d_value, (h + 1) * core.d_value)
        new["v"].append(z @ core.v[rows])
        biases["v"].append(np.zeros(core.d_value) if core.v_bias is None else z @ core.v_bias[rows])
        new["o"].append(core.o[:, rows] @ np.linalg.inv(z))
    arrays = {
        name: np.concatenate(found, axis=1 if name == "o" else 0) for name, found in new.items()
    }
    held = {name: np.concatenate(found) for name, found in biases.items()}
    if g.random() < 0.5:
        for one, two in (("q1", "q2"), ("k1", "k2")):
            arrays[one], arrays[two] = arrays[two], arrays[one]
            held[one], held[two] = held[two], held[one]
    return tnsim.Attention(
        *(arrays[name] for name in ("q1", "k1", "q2", "k2", "v", "o")), heads,
        *(held[name] for name in ("q1", "k1", "q2", "k2", "v")), core.o_bias,
        mask=core.mask, rope_base=core.rope_base,
    )  # fmt: skip


@pytest.mark.slow
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=6)
@pytest.mark.parametrize("name", ["mlp", "attention", "mixed"])
def test_paths_do_not_depend_on_gauges(name, seed):
    g = generator(seed)
    a, b = pair(name, g)
    metric = tnsim.Empirical(points(a, g))
    by = "head" if a.attends else "layer"
    wanted = tnsim.paths(a, b, metric, by=by)
    found = tnsim.paths(scrambled(g, a), scrambled(g, b), metric, by=by)
    assert found.bra == wanted.bra
    assert_close(found.values, wanted.values, scale=LARGEST, rtol=1e-9)


def test_remainders_keep_the_sum(rng):
    a, b = pair("attention", rng)
    metric = tnsim.Empirical(points(a, rng))
    whole = tnsim.paths(a, b, metric, by="head")
    place = {label: n for n, label in enumerate(whole.bra)}
    for options in ({"order": 1}, {"order": 2}, {"top": 3}, {"order": 2, "top": 2}):
        found = tnsim.paths(a, b, metric, by="head", **options)
        assert found.bra[-1] == found.ket[-1] == "remainder"
        assert_close(
            found.values.sum(), whole.values.sum(), scale=abs(whole.values).max(), rtol=1e-11
        )
        kept = [place[label] for label in found.bra[:-1]]
        assert_close(found.share[:-1], whole.share[kept], scale=abs(whole.share).max(), rtol=1e-10)
    largest = tnsim.paths(a, b, metric, by="head", top=3)
    assert set(largest.bra[:-1]) == {whole.bra[n] for n in np.argsort(-abs(whole.share))[:3]}
    every = tnsim.paths(a, b, metric, by="head", top=10**6, order=100)
    assert every.bra == whole.bra
    # Units of a single layer have an inner product for each pair.
    single = gated(rng, "relu", 2)
    units = tnsim.paths(single, by="unit")
    found = tnsim.paths(single, by="unit", within=["layer 0 unit 1"], order=0)
    assert found.bra == ("embed", "remainder")
    assert_close(found.share[1], units.share[units.bra.index("embed > layer 0 unit 1")], scale=1.0)


def test_components_outside_are_always_on(rng):
    a, _ = pair("attention", rng)
    metric = tnsim.Empirical(points(a, rng))
    whole = tnsim.paths(a, metric=metric, by="head")
    some = ("layer 1 head 0", "layer 2 head 1")
    found = tnsim.paths(a, metric=metric, by="head", within=some)
    for label, share in zip(found.bra, found.share, strict=True):
        alike = [
            set(components_in(one)) & set(some) == set(components_in(label)) for one in whole.bra
        ]
        assert_close(share, whole.share[alike].sum(), scale=1.0, rtol=1e-10)


def test_composition_through_layers_and_heads(rng):
    a, _ = pair("attention", rng)
    metric = tnsim.Empirical(points(a, rng))
    layers, heads = (tnsim.paths(a, metric=metric, by=by) for by in ("layer", "head"))
    both = layers.share[layers.bra.index("embed > layer 1 > layer 2")]
    assert_close(layers.through("layer 1", "layer 2"), both, rtol=1e-12)
    assert_close(heads.through("layer 1", "layer 2"), both, scale=1.0, rtol=1e-10)
    own = [n for n, label in enumerate(heads.bra) if "layer 2 head 1" in components_in(label)]
    assert_close(heads.through("layer 2 head 1"), heads.share[own].sum(), scale=1.0, rtol=1e-12)
    for unknown in ("layer 7", "layer"):
        with refused(f"no path goes through '{unknown}'; components are layer 1"):
            heads.through(unknown)


def test_layers_below_the_first_difference_run_once(rng, monkeypatch):
    """Of two layers of three heads: 8 passes of the first, and of the second 4 on each of 8 states.

    8 more of each measure how far they enlarge rounding.
    """
    from tnsim.models import layers as module

    model = tnsim.Model(
        [
            linear(rng, 2, 3),
            *(oracle.attending(rng, 3, 3, False) for _ in range(2)),
            linear(rng, 3, 2),
        ],
        n_ctx=2,
    )
    runs, call = [], module.Attention.__call__
    monkeypatch.setattr(
        module.Attention, "__call__", lambda self, x: runs.append(self) or call(self, x)
    )
    tnsim.paths(model, metric=tnsim.Empirical(rng.normal(size=(1, 2, 2))), by="head")
    assert len(runs) == 8 + 8 * 4 + 2 * 8


def test_a_zero_matrix_ends_paths(rng):
    layers = [oracle.mlp(rng, 3, 2), oracle.mlp(rng, 3, 2, biases=False), linear(rng, 3, 2)]
    dead = tnsim.Residual(
        tnsim.Bilinear(layers[1].layer.left, layers[1].layer.right, np.zeros((3, 2)))
    )
    model = tnsim.Model([layers[0], dead, layers[2]])
    for metric in (tnsim.Gaussian(), tnsim.Frobenius()):
        assert tnsim.paths(model, metric=metric).bra == ("embed", "embed > layer 0")
    nothing = tnsim.Model([layers[0], tnsim.Linear(np.zeros((2, 3)))])
    with refused("zero function: no signal goes through it"):
        tnsim.paths(nothing)


@pytest.mark.slow
def test_a_run_is_a_table_of_shares():
    series = tnsim.Series(DATA, n_ctx=8)[::4]
    metric = tnsim.Categorical(samples=64)
    run = tnsim.paths(series, metric=metric)
    assert run.labels == series.labels and run.paths[0] == "embed"
    assert run.share.shape == (3, 4)
    assert_close(run.share.sum(axis=1), np.ones(3), rtol=1e-11)
    for model, row in zip(series, run.share, strict=True):
        one = tnsim.paths(model, metric=metric)
        assert row[[run.paths.index(label) for label in one.bra]].tolist() == one.share.tolist()
    rise = run.through("layer 1", "layer 2")
    assert rise[0] < 0.05 and rise[2] > 0.7
    last = tnsim.paths({"early": series[0], "late": series[2]}, series[2], metric)
    assert last.labels == ("early", "late")
    assert_close(last.share[1], run.share[2], scale=1.0, rtol=1e-11)
    assert "Shares of paths" in run._repr_html_() and "embed" in last.each[0]._repr_html_()


def test_sampled_shares_have_errors_that_cover_them(rng):
    """Shares of many samples lie about as far from those of all inputs as their errors say."""
    a, _ = pair("mlp", rng)
    exact = tnsim.paths(a, metric=tnsim.Gaussian())
    assert exact.standard_error is None
    deviations = []
    for _ in range(20):
        found = tnsim.paths(a, metric=tnsim.Empirical(rng.normal(size=(1000, 3))))
        deviations.append((found.share - exact.share) / found.standard_error)
    assert 0.4 < np.sqrt(np.mean(np.square(deviations))) < 2.5


def test_shares_that_hang_on_one_input_have_no_finite_error():
    model = tnsim.Model([tnsim.Residual(tnsim.Linear([[1.0]]))])
    found = tnsim.paths(model, metric=tnsim.Empirical([[1.0], [0.0], [0.0]]))
    assert found.share.tolist() == [0.5, 0.5] and np.isinf(found.standard_error).all()


def test_what_has_no_paths_is_refused_in_one_line(rng):
    a, _ = pair("mlp", rng)
    deep = tnsim.Model([oracle.mlp(rng, 2, 1, biases=False) for _ in range(12)])
    cases = {
        "GaussianClosure is no bilinear form": lambda: tnsim.paths(
            a, metric=tnsim.GaussianClosure()
        ),
        "order must be an integer of at least 0, found -1": lambda: tnsim.paths(a, order=-1),
        "top must be an integer of at least 1, found 2.5": lambda: tnsim.paths(a, top=2.5),
        "no component 'layer 0', only layer 1, layer 2": lambda: tnsim.paths(a, within=["layer 0"]),
        "found float": lambda: tnsim.paths(1.0),
        "at least one checkpoint, found none": lambda: tnsim.paths({}),
        "different outputs": lambda: tnsim.paths(a, tnsim.Model([*a.layers, linear(rng, 2, 3)])),
        r"10\^32.1 switched models, more than 1,024": lambda: tnsim.paths(
            tnsim.Model([bilinear(np.random.default_rng(0), 2, 100, 2)] * 2), by="unit"
        ),
        r"12 components, whose sets need 4,096 switched models, more than 1,024": lambda: (
            tnsim.paths(deep)
        ),
    }
    for message, attempt in cases.items():
        with refused(message, (tnsim.ModelError, tnsim.TooLarge)):
            attempt()
    opposite = tnsim.Model([tnsim.Bilinear([[1.0, 0.0]], [[0.0, 1.0]], [[1.0]])])
    square = tnsim.Model([tnsim.Bilinear([[1.0, 0.0]], [[1.0, 0.0]], [[1.0]])])
    crossed = tnsim.paths(opposite, square, tnsim.Empirical([[1.0, 0.0], [0.0, 1.0]]))
    with refused("inner product of the models is zero", tnsim.errors.ResultError):
        crossed.share  # noqa: B018


def test_shares_of_orthogonal_models(rng):
    """An even function beside an odd one: what rounding left of their product was split."""
    odd = tnsim.Model([tnsim.Residual(tnsim.Linear(rng.normal(size=(2, 2)))) for _ in range(2)])
    even = tnsim.Model([bilinear(rng, 2, 3, 2)])
    inputs = rng.normal(size=(5, 2))
    both_signs = tnsim.Empirical(np.concatenate([inputs, np.roll(-inputs, 1, axis=0)]))
    # By chance rounding leaves nothing.
    no_shares = "a share of a path has no digits left|the inner product of the models is zero"
    with refused(no_shares, tnsim.errors.ResultError):
        tnsim.paths(odd, even, both_signs).share  # noqa: B018
    first, last = linear(rng, 3, 5), linear(rng, 5, 2)
    units = [tnsim.Model([first, tnsim.Elementwise(name), last]) for name in ("tanh", "abs")]
    with refused(no_shares, tnsim.errors.ResultError):
        tnsim.paths(*units, by="unit").share  # noqa: B018
    apart = tnsim.Empirical([[1.0, 0.0], [-1.0, 0.0]])
    assert not tnsim.paths(odd, even, apart, dtype="float32").values.any()


def with_cancelling_units(rng, size):
    """Two residual layers of hidden units that nearly undo their copies, `size` times as large."""
    layers = []
    for _ in range(2):
        left, right, down = (rng.normal(size=shape) / 2 for shape in ((6, 4), (6, 4), (4, 6)))
        copies = left * (1 + rng.normal(size=left.shape) / size)
        arrays = np.vstack([left, copies]), np.vstack([right, right])
        core = tnsim.Bilinear(*arrays, size * np.hstack([down, -down]))
        layers.append(tnsim.Residual(core))
    return tnsim.Model(layers)


@pytest.mark.parametrize("legs", [False, slow(True)])
@pytest.mark.parametrize("name", ["gaussian", "empirical"])
def test_float32_tells_where_units_cancel(name, legs, rng):
    """Shares were off by up to 2e-3 without a word."""
    model = with_cancelling_units(rng, 1e4)
    metric = tnsim.Gaussian() if name == "gaussian" else tnsim.Empirical(rng.normal(size=(50, 4)))
    with pytest.raises(LOST, match="use dtype='float64'"):
        tnsim.paths(model, metric=metric, legs=legs, dtype="float32")


def test_many_layers_by_order(rng):
    layers = [tnsim.Residual(bilinear(rng, 2, 1, 2), 1.0, 0.05) for _ in range(10)]
    deep = tnsim.Model(layers)
    metric = tnsim.Empirical(rng.normal(size=(6, 2)))
    found = tnsim.paths(deep, metric=metric, order=1)
    assert len(found.bra) == 12
    assert_close(found.values.sum(), tnsim.inner(deep, deep, metric), rtol=1e-12)


def test_a_signal_begins_at_the_biases_of_legs(rng):
    """Without a skip, the constant product of both biases is a path through its own layer alone."""
    left, right, down = rng.normal(size=4), rng.normal(size=4), rng.normal(size=(2, 4))
    above = tnsim.Bilinear(*rng.normal(size=(2, 4, 3)), down, left, right)
    model = tnsim.Model([bilinear(rng, 3, 4, 3), above])
    found = tnsim.paths(model)
    assert found.bra == ("embed > layer 1", "embed > layer 0 > layer 1")
    constant = tnsim.Linear(np.zeros((2, 3)), bias=down @ (left * right))
    wanted = tnsim.inner(tnsim.Model([constant]), model) / tnsim.inner(model, model)
    assert_close(found.share[0], wanted, rtol=1e-9)


@pytest.mark.parametrize("name", ["gaussian", "empirical"])
def test_linear_layers_that_undo_each_other(name, rng):
    """Shares were off by .9 without a warning, where each layer by itself loses few digits."""
    metric = tnsim.Gaussian() if name == "gaussian" else tnsim.Empirical(rng.normal(size=(20, 2)))
    turned = [np.linalg.qr(rng.normal(size=(2, 2)))[0] for _ in range(6)]
    skewed = [u @ np.diag([1e3, 1e-3]) @ v for u, v in zip(turned[::2], turned[1::2], strict=True)]
    undone = [np.linalg.inv(matrix) for matrix in reversed(skewed)]
    layers = [tnsim.Residual(bilinear(rng, 2, 3, 2)) for _ in range(2)]
    between = [tnsim.Linear(matrix / 2) for matrix in (*skewed, *undone)]
    with refused("has no digits left", tnsim.errors.ResultError):
        tnsim.paths(tnsim.Model([layers[0], *between, layers[1]]), None, metric)


@pytest.mark.parametrize("name", ["gaussian", "empirical"])
def test_biases_that_linear_layers_take_away(name, rng):
    """Shares were off in float64 without a warning."""
    metric = tnsim.Gaussian() if name == "gaussian" else tnsim.Empirical(rng.normal(size=(20, 2)))
    layers = [tnsim.Residual(bilinear(rng, 2, 3, 2)) for _ in range(2)]
    wanted = tnsim.paths(tnsim.Model(layers), None, metric).share
    for size, rtol in ((1e5, 1e-7), (1e15, None)):
        bias = np.rint(size * rng.normal(size=2))
        model = tnsim.Model(
            [layers[0], tnsim.Linear(np.eye(2), bias), tnsim.Linear(np.eye(2), -bias), layers[1]]
        )
        if rtol is None:
            with refused("has no digits left", tnsim.errors.ResultError):
                tnsim.paths(model, None, metric)
            continue
        found = tnsim.paths(model, None, metric)
        assert_close(found.share, wanted, scale=1.0, rtol=rtol, limited_by="what biases cancel")
