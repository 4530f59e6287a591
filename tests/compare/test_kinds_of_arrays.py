"""A model answers alike whatever library and type its weights come in.

Every verb is held to the same model with float64 NumPy weights of the same values. Weights are random numbers of 24
bits (8 for bfloat16), so that a product or a sum that is taken in float32 shows in the eighth digit.
"""

import contextlib
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import LARGEST, assert_close
from refusals import refused

import tnsim
import tnsim.models.components
import tnsim.models.model

torch = pytest.importorskip("torch")

D, UNITS, OUT, POSITIONS = 3, 4, 2, 2
TIGHT = 1e-12


def jax_float64(array):
    """An array of JAX in float64, which exists outside of the scope that made it."""
    with jax.enable_x64(True):
        return jnp.asarray(array, jnp.float64)


KINDS = {
    "numpy float32": lambda x: x.astype(np.float32),
    "numpy float64": lambda x: x,
    "numpy float64 of another byte order": lambda x: x.astype(x.dtype.newbyteorder()),
    "jax float32": lambda x: jnp.asarray(x, jnp.float32),
    "jax bfloat16": lambda x: jnp.asarray(x, jnp.bfloat16),
    "jax float64": jax_float64,
    "torch float32": lambda x: torch.tensor(x, dtype=torch.float32),
    "torch float64": torch.tensor,
    "torch bfloat16": lambda x: torch.tensor(x, dtype=torch.bfloat16),
    "numpy bfloat16": lambda x: x.astype(jnp.bfloat16),
}


def rounded(array, kind):
    """The numbers of an array as a kind of arrays holds them, in float64."""
    narrow = jnp.bfloat16 if "bfloat16" in kind else np.float32 if "32" in kind else np.float64
    return np.asarray(array).astype(narrow).astype(np.float64)


class Weights:
    """Random arrays of one kind."""

    def __init__(self, seed, kind, reference):
        self.generator, self.kind = np.random.default_rng(seed), kind
        self.make = np.array if reference else KINDS[kind]

    def __call__(self, *shape):
        array = self.generator.normal(size=shape) / np.sqrt(shape[-1])
        return self.make(rounded(array, self.kind))

    def linear(self, d_out, d_in, bias=True):
        return tnsim.Linear(self(d_out, d_in), self(d_out) if bias else None)

    def bilinear(self):
        maps = self(UNITS, D), self(UNITS, D), self(D, UNITS)
        return tnsim.Bilinear(*maps, self(UNITS), self(UNITS), self(D))

    def multilinear(self):
        legs = [self(UNITS, D) for _ in range(3)]
        return tnsim.Multilinear(legs, self(D, UNITS), [self(UNITS) for _ in legs], self(D))

    def gated(self):
        maps = self(UNITS, D), self(UNITS, D), self(D, UNITS)
        return tnsim.Gated(*maps, "silu", self(UNITS), self(UNITS), self(D))

    def attention(self, bias=True, **settings):
        rows = [self(4, D) for _ in range(5)]
        biases = {"q1_bias": self(4), "v_bias": self(4), "o_bias": self(D)} if bias else {}
        return tnsim.Attention(*rows, self(D, 4), 2, **biases, **settings)


def residual(layer):
    """A residual of numbers that no power of two makes whole."""
    return tnsim.Residual(layer, 0.7, 0.3)


LAYERS = {
    "Linear": lambda w: [w.linear(UNITS, D), w.linear(OUT, UNITS)],
    "Bilinear": lambda w: [w.linear(D, D), w.bilinear(), w.linear(OUT, D)],
    "Residual": lambda w: [
        *(w.linear(D, D), residual(w.bilinear()), residual(w.bilinear()), w.linear(OUT, D))
    ],
    "Multilinear": lambda w: [w.multilinear(), residual(w.linear(D, D)), w.linear(OUT, D)],
    "Elementwise": lambda w: [w.linear(UNITS, D), tnsim.Elementwise("gelu"), w.linear(OUT, UNITS)],
    "kinked": lambda w: [
        *(w.linear(D, D), residual(tnsim.Elementwise("relu")), w.linear(D, D), w.linear(OUT, D))
    ],
    "Gated": lambda w: [w.linear(D, D), residual(w.gated()), w.linear(OUT, D)],
    "Attention": lambda w: [w.linear(D, D), residual(w.attention()), w.linear(OUT, D)],
    "rotary": lambda w: [w.attention(False, rope_base=100.0), w.linear(OUT, D, False)],
    "Embedding": lambda w: [
        *(w.linear(D, 5, False), residual(w.attention()), residual(w.bilinear()), w.linear(OUT, D))
    ],
}
SEQUENCES = "Attention", "rotary", "Embedding"
ACTIVATED = "Elementwise", "kinked", "Gated"


def pair(layers, kind, reference=False):
    """Two models of a form, with arrays of a kind or with float64 NumPy arrays of equal numbers."""
    n_ctx = POSITIONS if layers in SEQUENCES else None
    made = [LAYERS[layers](Weights(seed, kind, reference)) for seed in (1, 2)]
    return [tnsim.Model(own, n_ctx) for own in made]


def metrics(layers, kind, reference=False):
    """Metrics with arrays of the kind, by name."""
    values = Weights(3, kind, reference)
    if layers == "Embedding":
        chances = np.array([0.1, 0.2, 0.3, 0.15, 0.25])
        chances = rounded(chances, "float32" if "bfloat16" in kind else kind)
        if not reference and "bfloat16" not in kind:
            chances = KINDS[kind](chances)
        return {"tokens": tnsim.Categorical(chances)}
    root = values.generator.normal(size=(D, D))
    cov = rounded(root @ root.T, kind)
    found = {"normal": tnsim.Gaussian()}
    if "bfloat16" not in kind:  # rounded so far, a matrix may have a negative eigenvalue
        found["with moments"] = tnsim.Gaussian(values(D), values.make(cov))
    shape = (6, POSITIONS, D) if layers in SEQUENCES else (6, D)
    return found | {"inputs": tnsim.Empirical(values(*shape))}


def numbers(result):
    """The numbers of a matrix of all pairs."""
    return np.concatenate([result["similarity"].values.ravel(), result["log_inner"].values.ravel()])


def of_networks(a, b, metric):
    return sum(
        w * n.contract(output_inds=()) for w, n in tnsim.tensor_networks.networks(a, b, metric)
    )


COMPARED = {
    "similarity": tnsim.similarity,
    "inner": tnsim.inner,
    "log_inner": lambda *ask: tnsim.log_inner(*ask).log,
    "slices": tnsim.slices,
    "of a difference": lambda a, b, metric: tnsim.similarity(b - a, b, metric),
    "of sums": lambda a, b, metric: tnsim.inner(b + 0.3 * a, 0.1 * b - a, metric),
    "pairwise": lambda a, b, metric: numbers(tnsim.pairwise([a, b], metric)),
    "pairwise of sums": lambda a, b, metric: numbers(tnsim.pairwise([a, 0.3 * b - a], metric)),
    "plan": lambda *ask: tnsim.plan(*ask).multiplications,
}
SPLIT = {
    "paths by layer": lambda *ask: tnsim.paths(*ask, by="layer").values,
    "paths by unit": lambda *ask: tnsim.paths(*ask, by="unit").values,
    "polynomial": lambda a, b, metric: tnsim.polynomial(a, 3)(np.ones(D)),
    "switched": lambda a, b, metric: tnsim.inner(
        tnsim.models.components.switched(a, _fractions(a)), b, metric
    ),
}
SPLIT_POLYNOMIALS = {
    "edges": lambda a, b, metric: tnsim.paths(a, None, metric, legs=True).share,
    "change": lambda *ask: tnsim.change(*ask).share,
    "change by unit": lambda *ask: tnsim.change(*ask, by="unit").share,
    "removed": lambda *ask: tnsim.change(*ask).removed,
    "exchanged units": lambda *ask: tnsim.change(*ask, by="unit").alone,
}
LINEAR = ("Linear",)  # has no components


def _fractions(model):
    return np.full(len(tnsim.components(model)), 0.3)


def verbs(layers, name):
    """The verbs that answer for a form of model under a metric."""
    chosen = dict(COMPARED)
    if name not in ("inputs", "tokens"):
        chosen["check"] = lambda *ask: tnsim.check(*ask, samples=256).estimate
    if layers in SEQUENCES:
        chosen["heads"] = lambda a, b, metric: tnsim.heads(a, b, "ov").inner.values
        chosen["paths by head"] = lambda *ask: tnsim.paths(*ask, by="head").values
        # Along plans of attention, derivatives compile for minutes.
        return chosen | SPLIT_POLYNOMIALS if layers == "Embedding" else chosen
    if layers in LINEAR:
        return chosen
    if name != "inputs":
        chosen["networks"] = of_networks
    return chosen | SPLIT | ({} if layers in ACTIVATED else SPLIT_POLYNOMIALS)


@functools.cache
def expected(layers, kind, name, verb):
    """The answer for float64 NumPy weights with the numbers of a kind."""
    a, b = pair(layers, kind, reference=True)
    return np.asarray(verbs(layers, name)[verb](a, b, metrics(layers, kind, True)[name]), float)


def check_alike(layers, kind, name, chosen=None, scope=contextlib.nullcontext()):
    """Hold verbs of a form of model to float64 NumPy weights of the same numbers."""
    a, b = pair(layers, kind)
    metric = metrics(layers, kind)[name]
    narrow = kind.replace("torch", "numpy").replace("jax", "numpy")  # of equal numbers
    with warnings.catch_warnings(), scope:
        warnings.simplefilter("ignore", tnsim.PrecisionWarning)
        for verb in verbs(layers, name) if chosen is None else chosen:
            found = np.asarray(verbs(layers, name)[verb](a, b, metric), float)
            assert_close(found, expected(layers, narrow, name, verb), scale=LARGEST, rtol=TIGHT)


@pytest.mark.parametrize("kind", ["numpy float32", "jax float32", "jax float64", "torch bfloat16"])
def test_beside_an_activation(kind):
    quick = ["similarity", "log_inner", "of a difference", "of sums", "pairwise", "paths by unit"]
    check_alike("Elementwise", kind, "normal", quick)


@pytest.mark.parametrize("kind", ["numpy float32", "jax float32"])
def test_moments_of_the_inputs(kind):
    check_alike("kinked", kind, "with moments", ["inner", "pairwise", "paths by unit"])
    check_alike("Bilinear", kind, "with moments", ["inner", "of a difference", "paths by unit"])


@pytest.mark.crossing(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "numpy float64"])
@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(n, marks=pytest.mark.full) if n in ("Residual", "Multilinear") else n
        for n in LAYERS
    ],
)
def test_every_verb(layers, kind):
    for name in metrics(layers, kind):
        check_alike(layers, kind, name)


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("layers", ["Bilinear", "Elementwise", "Embedding"])
@pytest.mark.parametrize("kind", ["jax float32", "jax float64"])
def test_with_64_bits_in_jax(layers, kind):
    for name in metrics(layers, kind):
        check_alike(layers, kind, name, scope=jax.enable_x64(True))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, np.float16])
def test_weights_replaced_in_the_tree(dtype):
    # An optimiser writes new leaves past every constructor, in the precision that it computes in.
    a, b = (
        jax.tree.map(lambda x: jnp.asarray(x, dtype), model)
        for model in pair("kinked", "jax float64")
    )
    wide = [jax.tree.map(lambda x: np.asarray(x, np.float64), model) for model in (a, b)]
    for verb in ("similarity", "of a difference", "pairwise", "paths by unit"):
        ask = verbs("kinked", "normal")[verb]
        assert_close(ask(a, b, tnsim.Gaussian()), ask(*wide, tnsim.Gaussian()), rtol=TIGHT)


def test_coefficients_of_sums():
    a, b = pair("Elementwise", "numpy float64")
    third = jnp.float32(1) / 3
    found = tnsim.inner(third * (third * a), b)
    assert_close(found, float(third) ** 2 * float(tnsim.inner(a, b)), rtol=TIGHT)


@pytest.mark.slow
def test_origins_are_kept():
    origin = tnsim.models.model.Origin("a file", caveats=("left out: norm.weight",))
    layers = pair("Elementwise", "jax float32")[0].layers
    model = tnsim.Model(layers, origin=origin)
    with pytest.warns(tnsim.CaveatWarning, match="left out"):
        tnsim.inner(model, model)
    assert "left out: norm.weight" in tnsim.polynomial(model, 3).origin.caveats


def test_weights_that_are_written_to_are_read_again():
    model = tnsim.Model([tnsim.Linear([[1.0]]), tnsim.Elementwise("relu")])
    model = jax.tree.map(lambda x: np.array(x, np.float16), model)
    before = float(tnsim.inner(model, model))
    model.layers[0].weight[:] = 2.0
    assert_close(tnsim.inner(model, model), 4 * before)


def gives_its_memory_away(model):
    """A model of JAX whose arrays are handed to a program."""
    given = jax.tree.map(jnp.asarray, model)
    jax.jit(lambda x: jax.tree.map(lambda leaf: 2 * leaf, x), donate_argnums=0)(given)
    return given


@pytest.mark.parametrize("verb", ["a layer", "similarity", "save"])
def test_arrays_that_jax_has_deleted_are_refused(verb, tmp_path):
    """Ended in JAX's own RuntimeError."""
    model = tnsim.Model([tnsim.Linear(np.eye(2, dtype=np.float32))])
    gone = gives_its_memory_away(model)
    attempts = {
        "a layer": lambda: tnsim.Linear(gone.layers[0].weight),
        "similarity": lambda: tnsim.similarity(gone, model),
        "save": lambda: tnsim.save(gone, tmp_path / "gone.safetensors"),
    }
    with refused("deleted.*donate_argnums"):
        attempts[verb]()


TENSORS_WITHOUT_NUMBERS = {
    "torch.func": lambda ask: torch.func.grad(ask)(torch.eye(2)),
    "torch.vmap": lambda ask: torch.vmap(ask)(torch.ones(1, 2, 2)),
    "meta": lambda ask: ask(torch.empty(2, 2, device="meta")),
    "sparse": lambda ask: ask(torch.eye(2).to_sparse()),
}


@pytest.mark.parametrize("kind", TENSORS_WITHOUT_NUMBERS)
def test_tensors_without_numbers_are_refused(kind):
    """Ended in errors of PyTorch about storage and layouts."""
    with refused("a tensor of PyTorch has no plain numbers, as inside torch.func"):
        TENSORS_WITHOUT_NUMBERS[kind](tnsim.Linear)


def test_tensors_that_are_negated_or_conjugated_as_they_are_read():
    values = torch.tensor([[1.0 + 2.0j]])
    np.testing.assert_array_equal(tnsim.Linear(values.conj().imag).weight, [[-2.0]])


def test_a_single_number_that_is_none_is_named():
    with refused("a coefficient of a model is nan"):
        float("nan") * pair("Elementwise", "numpy float64")[0]
