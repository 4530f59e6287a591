"""Finite measures against plain forward passes, enumeration and diagrams."""

import itertools
import math
import random
import re
import tracemalloc

import cases
import jax
import numpy as np
import pytest
from closeness import LARGEST, assert_close
from oracles import bilinear, expected_products, linear, quadrature, slope_of
from refusals import refused
from sequence_oracles import attention

import tnsim
from tnsim.compare import by_features
from tnsim.compare.by_points import reading_of
from tnsim.models.functions import ALONE
from tnsim.problems import at_points
from tnsim.problems import at_points as passes


def cosine(x, y, weights=None):
    """From outputs, points on the first axis, in units in which no square overflows."""
    roots = np.sqrt(np.ones(len(x)) if weights is None else weights)
    x, y = (np.reshape(z, (len(z), -1)) * roots[:, None] for z in (x, y))
    x, y = (z / np.abs(z).max() for z in (x, y))
    return np.sum(x * y) / np.sqrt(np.sum(x * x) * np.sum(y * y))


def language_model(g, vocabulary=5, n_ctx=3, layers=2, width=4, outputs=3, **options):
    """Two attention layers over tokens."""
    stack = [linear(g, vocabulary, width, True)]
    for _ in range(layers):
        inner = attention(g, width, 2, 2, 2, width, True, **options)
        stack.append(tnsim.Residual(inner, 0.7, 0.3))
    return tnsim.Model([*stack, linear(g, width, outputs, True)], n_ctx=n_ctx)


@pytest.mark.sampled(quick=8)
@pytest.mark.parametrize("case", [*cases.SHALLOW, *cases.DEEP, *cases.UNEVEN, *cases.THREE])
def test_empirical_is_the_mean_over_forward_passes(case, rng):
    make = (cases.SHALLOW | cases.DEEP | cases.UNEVEN | cases.THREE)[case]
    a, b = cases.pair(make, rng)
    x, weights = rng.normal(size=(40, cases.D)), rng.uniform(size=40)
    metric = tnsim.Empirical(x, weights)
    value = tnsim.similarity(a, b, metric)
    assert_close(value, cosine(a(x), b(x), weights), scale=1.0, rtol=1e-12)
    assert (value.exact, value.route, value.metric) == (True, "data", "empirical")
    products = weights / weights.sum() @ (a(x) * b(x))
    size = np.sqrt(weights @ (a(x) ** 2).sum(axis=1) * (weights @ (b(x) ** 2).sum(axis=1)))
    inner = tnsim.inner(a, b, metric)
    assert_close(inner, products.sum(), scale=size, rtol=1e-12)
    sign, log = tnsim.log_inner(a, b, metric)
    assert_close(sign * np.exp(log), float(inner), rtol=1e-11)
    by_output = [cosine(a(x)[:, [k]], b(x)[:, [k]], weights) for k in range(a.d_out)]
    assert_close(tnsim.slices(a, b, metric), by_output, scale=1.0, rtol=1e-12)


def test_empirical_over_sequences_and_token_ids(rng):
    a, b = language_model(rng), language_model(rng)
    ids = rng.integers(0, 5, size=(50, 3))
    x = np.eye(5)[ids]
    wanted = cosine(a(x), b(x))
    for inputs in (ids, x):
        assert_close(tnsim.similarity(a, b, tnsim.Empirical(inputs)), wanted, scale=1.0, rtol=1e-12)
    softened = x + 0.1 * rng.normal(size=x.shape)
    value = tnsim.similarity(a, b, tnsim.Empirical(softened))
    assert_close(value, cosine(a(softened), b(softened)), scale=1.0, rtol=1e-12)


def test_inputs_come_from_files_and_other_libraries(tmp_path, rng, monkeypatch):
    import jax.numpy as jnp
    from safetensors.numpy import save_file

    a, b = cases.pair(cases.DEEP["two bilinear"], rng)
    x = rng.normal(size=(70, cases.D)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    save_file({"inputs": x, "labels": x[:, 0].copy()}, tmp_path / "x.safetensors")
    save_file({"a": x, "b": x}, tmp_path / "two.safetensors")
    wanted = tnsim.similarity(a, b, tnsim.Empirical(x))
    for inputs in (tmp_path / "x.npy", str(tmp_path / "x.safetensors"), jnp.asarray(x), x.tolist()):
        assert_close(tnsim.similarity(a, b, tnsim.Empirical(inputs)), wanted, scale=1.0, rtol=1e-15)
    monkeypatch.chdir(tmp_path)
    relative = tnsim.Empirical("x.safetensors")
    monkeypatch.chdir("/")  # as a worker elsewhere
    assert_close(tnsim.similarity(a, b, relative), wanted, scale=1.0, rtol=1e-15)
    with refused("holds 2 tensors and none called 'inputs'"):
        tnsim.Empirical(tmp_path / "two.safetensors")
    with refused("no such file of inputs"):
        tnsim.Empirical(tmp_path / "none.npy")
    with refused(r"read from .npy and .safetensors files"):
        tnsim.Empirical(tmp_path / "x.csv")
    (tmp_path / "broken.npy").write_bytes(b"no numbers")
    with refused(r"broken.npy: not a readable file of inputs"):
        tnsim.Empirical(tmp_path / "broken.npy")


def test_functions_stand_beside_models(rng):
    a, _ = cases.pair(cases.DEEP["two bilinear"], rng)
    x = rng.normal(size=(300, cases.D))
    metric = tnsim.Empirical(x)

    def rectified(x):
        return np.maximum(a(x), 0)

    wanted = cosine(a(x), rectified(x))
    for pair in ((a, rectified), (rectified, a)):
        value = tnsim.similarity(*pair, metric)
        assert_close(value, wanted, scale=1.0, rtol=1e-12)
        assert value.exact
    assert_close(tnsim.similarity(rectified, rectified, metric), 1.0)
    assert_close(tnsim.inner(rectified, a, metric), (a(x) * rectified(x)).sum() / 300)
    with refused(r"compared on inputs alone: use tnsim.Empirical"):
        tnsim.similarity(a, rectified, tnsim.Gaussian(samples=0))
    with refused(r"have one shape of outputs; .* found 2 outputs"):
        tnsim.similarity(a, lambda x: x, metric)
    with refused("gives an array, found NoneType"):
        tnsim.similarity(a, lambda x: None, metric)
    with refused(r"found shape \(1, 2\) for"):
        tnsim.similarity(a, lambda x: a(x)[:1], metric)
    with refused("outputs that are NaN or infinite", tnsim.TnsimError):
        tnsim.similarity(a, lambda x: a(x) * np.inf, metric)


def test_functions_may_write_into_what_they_are_given_and_have_given(rng):
    """The inputs of the next function were other ones, and so were those of the user."""
    x, buffer = rng.normal(size=(300, cases.D)), np.empty((300, cases.D))
    metric, before = tnsim.Empirical(x), x.copy()

    def in_place(x):
        x *= 2
        x += 1
        return x

    def into_a_buffer(x):
        return np.square(x, out=buffer[: len(x)])

    wanted = cosine(2 * x + 1, x**2)
    assert_close(tnsim.similarity(in_place, into_a_buffer, metric), wanted, scale=1.0)
    assert_close(tnsim.similarity(into_a_buffer, in_place, metric), wanted, scale=1.0)
    np.testing.assert_array_equal(x, before)


def test_modules_may_give_a_buffer_of_their_own(rng):
    """The first outputs of a batch were those of its last inputs."""
    torch = pytest.importorskip("torch")
    x, buffer = rng.normal(size=(30, cases.D)), torch.zeros(30, cases.D, dtype=torch.float64)

    class Squares(torch.nn.Module):
        def forward(self, x):
            return torch.square(x, out=buffer[: len(x)])

    net, metric = Squares(), tnsim.Empirical(x)
    assert_close(tnsim.similarity(net, np.square, metric), 1.0, scale=1.0)
    assert_close(tnsim.torch.similarity(net, np.square, metric).item(), 1.0, scale=1.0)


def test_functions_that_draw_random_numbers_are_refused(rng):
    """However rarely, or little, these move an output; and no numbers that are drawn in vain."""
    torch = pytest.importorskip("torch")
    x = rng.normal(size=(30, 3))
    net = torch.nn.Linear(3, 2).double()

    def moved(size, draw):
        return lambda x: net(torch.as_tensor(x)) + size * draw()

    draws = {
        "torch": lambda: torch.rand(()),
        "numpy": np.random.random_sample,
        "python": random.random,
    }
    for draw in draws.values():
        with refused(r"draws random numbers, .*: call module.eval\(\)"):
            tnsim.similarity(moved(1e-9, draw), net, tnsim.Empirical(x))
        value = tnsim.similarity(moved(0.0, draw), net, tnsim.Empirical(x))
        assert_close(value, 1.0, scale=1.0)

    class DropPath(torch.nn.Module):
        """Stochastic depth, as networks of images have it: a chance for each input."""

        def forward(self, x):
            return x * (torch.rand(len(x), 1) > 1e-3) if self.training else x

    deep = torch.nn.Sequential(net, DropPath())
    for similarity in (tnsim.similarity, tnsim.torch.similarity):
        with refused(r"draws random numbers, .*: call module.eval\(\)"):
            # Enough inputs that one of them is dropped.
            similarity(deep.train(), net, tnsim.Empirical(rng.normal(size=(20_000, 3))))
        assert_close(similarity(deep.eval(), net, tnsim.Empirical(x)).item(), 1.0, scale=1.0)


@pytest.mark.parametrize("dtype", ["int8", "complex64"])
def test_the_precision_of_inputs_is_that_of_weights_that_are_floats(dtype, rng):
    """Packed weights or complex ones that stand first rounded inputs to integers, or failed."""
    torch = pytest.importorskip("torch")
    numbers = rng.integers(-4, 5, (3, 2))

    class Packed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            packed = torch.as_tensor(numbers, dtype=getattr(torch, dtype))
            self.packed = torch.nn.Parameter(packed, requires_grad=False)
            self.scale = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

        def forward(self, x):
            return x @ (self.packed.abs() * self.scale).to(x.dtype)

    x = rng.normal(size=(30, 3))
    plain = lambda x: np.tanh(x) @ np.ones((3, 2))  # noqa: E731
    value = tnsim.similarity(Packed(), plain, tnsim.Empirical(x))
    assert_close(value, cosine(x @ np.abs(numbers), plain(x)), scale=1.0)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("sizes", [(1e-200,), (1e200,), (1e-310,), (1e-200, 1e200, 1.0)])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_outputs_of_functions_are_of_any_size(sizes, dtype, rng):
    """All alike, and each output by itself, beside functions, models and modules of PyTorch."""
    torch = pytest.importorskip("torch")
    x = rng.normal(size=(64, 3))
    maps = rng.normal(size=(2, 3, 3))
    # Powers of two near the sizes: products by them are exact.
    powers = np.exp2(np.rint(np.log2(np.broadcast_to(sizes, 3))))
    a, b = (lambda x, m=m: x @ m for m in maps)
    c, d = (lambda x, m=m: powers * (x @ m) for m in maps)
    net = torch.nn.Linear(3, 3, bias=False, dtype=torch.float64)
    net.weight.data = torch.from_numpy((maps[1] * powers).T.copy())
    metric = tnsim.Empirical(x)
    # Far smaller outputs count for nothing beside larger ones.
    seen = powers > 1e-100 * powers.max()
    rtol = {"float64": 1e-12, "float32": 1e-5}[dtype]
    limits = {"scale": 1.0, "rtol": rtol, **({} if dtype == "float64" else {"limited_by": dtype})}
    wanted = cosine(a(x)[:, seen], b(x)[:, seen])
    by_output = [cosine(a(x)[:, [k]], b(x)[:, [k]]) for k in range(3)]
    for other in (d, net):
        assert_close(tnsim.similarity(c, other, metric, dtype=dtype), wanted, **limits)
        assert_close(tnsim.slices(c, other, metric, dtype=dtype), by_output, **limits)
    assert_close(tnsim.similarity(c, c, metric, dtype=dtype), 1.0, **limits)
    found = tnsim.pairwise([a, c, net], metric, slices=True, dtype=dtype)
    # Of norms of 2^±1300 a run has the logarithms, whose last place is a thousand of the cosine's.
    of_run = {**limits, "rtol": max(5e-12, rtol)}
    assert_close(found.similarity[1, 2], wanted, **of_run)
    assert_close(found.slices[1, 2], by_output, **of_run)
    assert_close(found.slices[0, 1], np.ones(3), **of_run)
    inner = (a(x) * b(x)).mean(axis=0)[seen].sum()
    sign, log = tnsim.log_inner(c, d, metric, dtype=dtype)
    assert sign == np.sign(inner)
    assert_close(log, np.log(abs(inner)) + 2 * np.log(powers.max()), **{**limits, "scale": 1000.0})
    value = tnsim.similarity(c, d, metric, dtype=dtype)
    known = tnsim.similarity(a, b, metric, dtype=dtype)
    if seen.all():
        assert_close(value.standard_error, known.standard_error, **limits)


@pytest.mark.parametrize("dtype", [complex, object, str])
def test_outputs_that_are_no_real_numbers_are_refused(dtype, rng):
    metric = tnsim.Empirical(rng.normal(size=(4, 2)))
    with refused("compared gives real numbers, found"):
        tnsim.inner(lambda x: x.astype(dtype), lambda x: x, metric)


@pytest.mark.full
def test_functions_of_any_size_are_differentiated_beside_models(rng):
    """A function is a constant of the trace, in whichever units its outputs are."""
    x, weight, other = rng.normal(size=(16, 3)), rng.normal(size=(2, 3)), rng.normal(size=(2, 3))
    y, metric = (x @ other.T) ** 2, tnsim.Empirical(x)

    def gradient(weight, size):
        a = tnsim.Model([tnsim.Linear(weight)])
        return tnsim.similarity(a, lambda x: size * (np.asarray(x) @ other.T) ** 2, metric)

    out = x @ weight.T
    norm, product = np.linalg.norm(out), (out * y).sum()
    wanted = (y.T @ x - product / norm**2 * out.T @ x) / (norm * np.linalg.norm(y))
    with jax.enable_x64(True):
        for size in (2.0**-700, 2.0**700):
            assert_close(jax.grad(gradient)(weight, size), wanted, scale=1.0, rtol=1e-13)


def test_modules_of_pytorch_are_run_without_gradients(rng):
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    a, _ = cases.pair(cases.DEEP["two bilinear"], rng)
    x = rng.normal(size=(30, 3))
    outputs = module(torch.as_tensor(x, dtype=torch.float32)).detach().numpy()
    for inputs in (x, torch.as_tensor(x)):
        value = tnsim.similarity(module, a, tnsim.Empirical(inputs))
        assert_close(value, cosine(outputs, a(x)), scale=1.0, rtol=1e-6, limited_by="float32")


@pytest.mark.parametrize("dtype", ["u1", "u2", ">i2", "u8"])
def test_modules_take_tokens_of_any_width(rng, dtype):
    torch = pytest.importorskip("torch")
    one, two = (torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Tanh()) for _ in "ab")
    tokens = rng.integers(0, 9, (20, 3))
    found = tnsim.similarity(one, two, tnsim.Empirical(tokens.astype(dtype)))
    assert found == tnsim.similarity(one, two, tnsim.Empirical(tokens))


def test_combinations_and_small_differences(rng):
    a, b = cases.pair(cases.DEEP["two with biases"], rng)
    x = rng.normal(size=(60, cases.D))
    metric = tnsim.Empirical(x)
    value = tnsim.similarity(a - 3.0 * b, 1e200 * a, metric)
    assert_close(value, cosine(a(x) - 3 * b(x), a(x)), scale=1.0, rtol=1e-12)
    layer = a.layers[0]
    near = [
        tnsim.Model([tnsim.Bilinear(layer.left + step, layer.right, layer.down), *a.layers[1:]])
        for step in (1e-9, -1e-9)
    ]
    assert_close(tnsim.similarity(near[0] - near[1], near[0] - near[1], metric), 1)
    with refused("same function to within rounding"):
        tnsim.similarity(a - a, b, metric)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_deep_models_never_leave_the_range_of_floats(scale, rng):
    """Degree 2^12: outputs of about scale^4096, their cosine as of models of tame size."""
    layers = [bilinear(rng, 3, 4, 3) for _ in range(12)]
    x = rng.normal(size=(20, 3))
    state, log = x.copy(), np.zeros((20, 1))
    for layer in layers:
        state = layer(state)
        size = np.abs(state).max(axis=1, keepdims=True)
        state, log = state / size, 2 * log + np.log(size)
    outputs = [state * np.exp(log - log.max()), state[:, ::-1] * np.exp(log - log.max())]
    scaled = [tnsim.Bilinear(scale * x.left, scale * x.right, x.down) for x in layers]
    a = tnsim.Model([*scaled, tnsim.Linear(np.eye(3))])
    b = tnsim.Model([*scaled, tnsim.Linear(np.eye(3)[::-1])])
    value = tnsim.similarity(a, b, tnsim.Empirical(x))
    assert_close(value, cosine(*outputs), scale=1.0)
    biased = tnsim.Model([tnsim.Residual(bilinear(rng, 3, 4, 3, True), scale) for _ in range(12)])
    assert_close(tnsim.similarity(biased, biased, tnsim.Empirical(scale * x)), 1.0)


@pytest.mark.parametrize("name, far", [("gelu", 300.0), ("gelu", -37.5), ("sigmoid", -700.0)])
def test_an_activation_reads_inputs_as_they_are_and_ends_in_zero(name, far):
    model = tnsim.Model([tnsim.Elementwise(name, 1), tnsim.Linear([[3.0]])])
    inputs = np.array([[far], [1.0]])
    square = (model(inputs) ** 2).mean()
    assert_close(tnsim.inner(model, model, tnsim.Empirical(inputs)), square, rtol=1e-14)


@pytest.mark.slow
def test_batches_and_compiled_passes_change_nothing(rng, monkeypatch):
    a, b = language_model(rng), language_model(rng)
    metric = tnsim.Empirical(rng.integers(0, 5, size=(100, 3)))
    wanted = tnsim.similarity(a, b, metric)
    monkeypatch.setattr(at_points, "BATCH_BYTES", 2**10)
    assert_close(tnsim.similarity(a, b, metric), wanted, scale=1.0, rtol=1e-14)
    monkeypatch.setattr(passes, "_EAGER", 0)
    assert_close(tnsim.similarity(a, b, metric), wanted, scale=1.0, rtol=1e-13)
    single = tnsim.similarity(a, b, metric, dtype="float32")
    assert_close(single, wanted, scale=1.0, rtol=1e-5, limited_by="float32")
    assert single != wanted


def measured_peak(models, metric, dtype, budget):
    """Bytes that NumPy allocates at once, and those that were planned for the batch."""
    points = metric.points(reading_of(models))
    terms = [[(1.0, model)] for model in models]
    passes.sums(terms[:1], terms[1:], points, False, dtype, budget)  # imports are not counted
    tracemalloc.start()
    try:
        passes.sums(terms[:1], terms[1:], points, False, dtype, budget)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    needed = at_points.needs(models, points, dtype)
    size = math.prod(at_points.batches_of_groups(models, points, dtype, budget))
    return peak, needed.beside + size * needed.each, size


WIDE = {
    "bilinear": lambda g: [bilinear(g, 32, 256, 64, True), bilinear(g, 64, 16, 200)],
    "residual": lambda g: [tnsim.Residual(bilinear(g, 32, 64, 32, True), 0.5) for _ in range(2)],
    "legs": lambda g: [tnsim.Multilinear([g.normal(size=(128, 32))] * 4, g.normal(size=(8, 128)))],
    "attention": lambda g: [attention(g, 32, 2, 16, 16, 32)],
    "one head": lambda g: [attention(g, 32, 1, 32, 32, 32, mask="none")],
}


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", WIDE)
def test_batches_follow_the_budget(name, dtype, rng, monkeypatch):
    """Passes by NumPy, whose allocations Python counts: within the plan, and the plan in reason."""
    monkeypatch.setattr(passes, "_EAGER", float("inf"))
    n_ctx = 64 if name in ("attention", "one head") else None
    models = [tnsim.Model(WIDE[name](rng), n_ctx=n_ctx) for _ in range(2)]
    shape = (640, 32) if n_ctx is None else (64, n_ctx, 32)
    metric = tnsim.Empirical(rng.normal(size=shape))
    least = at_points.needs(models, metric.points(None), dtype).least
    few = measured_peak(models, metric, dtype, tnsim.Budget(memory_bytes=1.01 * least))
    many = measured_peak(models, metric, dtype, tnsim.Budget())
    python = 2**18  # objects, and sums of groups
    for peak, planned, _ in (few, many):
        assert peak <= planned + python
    assert few[2] == 1 < many[2] and few[0] <= 1.01 * least + python
    assert many[1] <= 4 * many[0]
    with refused(r"for a single input here, and the budget is", tnsim.TooLarge):
        tnsim.similarity(*models, metric, dtype=dtype, budget=tnsim.Budget(memory_bytes=least / 2))


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_batches_of_functions_follow_their_outputs(dtype, rng):
    """Logits are larger than all else; functions of NumPy, whose allocations Python counts."""
    first, second = rng.normal(size=(2, 7, 500))
    functions = [lambda tokens: first[tokens], lambda tokens: second[tokens]]
    metric = tnsim.Empirical(rng.integers(0, 7, size=(30, 120)))
    wanted = tnsim.similarity(*functions, metric, dtype=dtype)
    digits = {"rtol": 1e-13}
    if dtype == "float32":
        digits = {"rtol": 1e-5, "limited_by": "float32"}
    least = at_points.needs((), metric.points(None), dtype, 2 * 120 * 500).least
    for inputs in (1, 2, 4):  # one or two do not tell whether a function reads its batch
        budget = tnsim.Budget(memory_bytes=int(1.01 * inputs * least))
        tracemalloc.start()
        try:
            found = tnsim.similarity(*functions, metric, dtype=dtype, budget=budget)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak <= max(inputs, ALONE) * least + 2**20  # means and norms of outputs by group
        assert_close(found, wanted, scale=1.0, **digits)
        less_each = [lambda x, f=f: f(x) - f(x).mean(axis=0) for f in functions]
        with refused("where other inputs stand in its batch"):
            tnsim.similarity(*less_each, metric, dtype=dtype, budget=budget)
    run = tnsim.pairwise(functions, metric, dtype=dtype, budget=budget)
    assert_close(run.similarity[0, 1], wanted, scale=1.0, **digits)
    with refused(r"for a single input here, and the budget is", tnsim.TooLarge):
        half = tnsim.Budget(memory_bytes=int(least / 2))
        tnsim.similarity(*functions, metric, dtype=dtype, budget=half)


def test_an_input_beyond_the_memory_is_refused_before_it_is_made(rng):
    """Scores of 200,000 positions with each other: 640 GB, by every verb."""
    n_ctx = 200_000
    models = [tnsim.Model([attention(rng, 2, 1, 2, 2, 2)], n_ctx=n_ctx) for _ in range(2)]
    metric = tnsim.Empirical(np.zeros((1, n_ctx, 2)))
    for verb in (tnsim.similarity, tnsim.plan):
        with refused(r"use shorter sequences \(n_ctx\)", tnsim.TooLarge):
            verb(*models, metric)
    with refused(r"use shorter sequences \(n_ctx\)", tnsim.TooLarge):
        tnsim.pairwise(models, metric)


def test_inputs_without_weight_count_for_nothing(rng):
    """Neither in the scale of a sum nor in the number of groups behind an error."""
    a, b = cases.pair(cases.DEEP["two bilinear"], rng)
    small = [jax.tree.map(lambda x: 2.0**-300 * x, model) for model in (a, b)]
    x, weights = rng.normal(size=(64, cases.D)), np.zeros(64)
    weights[:4] = 1
    metric, few = tnsim.Empirical(x, weights), tnsim.Empirical(x[:4])
    assert_close(
        tnsim.log_inner(*small, metric), tnsim.log_inner(*small, few), scale=1.0, rtol=1e-11
    )
    assert_close(tnsim.similarity(*small, metric), tnsim.similarity(a, b, few))
    assert np.isfinite(tnsim.similarity(a, b, metric).standard_error)
    weights[1:] = 0
    assert tnsim.similarity(a, b, metric).standard_error is not None  # the metric has a copy
    assert tnsim.similarity(a, b, tnsim.Empirical(x, weights)).standard_error is None
    found = tnsim.pairwise([a, b], tnsim.Empirical(x, weights))
    assert found.standard_error.values.tolist() == [[0, np.inf], [np.inf, 0]]


def test_an_error_is_infinite_where_one_group_of_inputs_is_all_there_is():
    x = np.full((64, 1), 0.5)
    x[7] = 3.0

    def rare(x):
        return np.maximum(x - 1, 0)

    value = tnsim.similarity(rare, lambda x: rare(x) ** 2, tnsim.Empirical(x))
    assert_close(value, 1)
    assert value.standard_error == np.inf


def test_quadrature_drops_what_no_model_reads(rng):
    wide = [linear(rng, 2, 3) for _ in range(2)]
    reads = linear(rng, 40, 2)
    a, b = (
        tnsim.Model([reads, tnsim.Linear(w.weight), bilinear(rng, 3, 3, 3), bilinear(rng, 3, 3, 2)])
        for w in wide
    )
    plan = tnsim.plan(a, b)
    assert (plan.route, plan.fact("forward passes"), plan.exact) == ("quadrature", 25, True)
    narrow = [tnsim.Model(model.layers[1:]) for model in (a, b)]
    below = tnsim.Gaussian(cov=reads.weight @ reads.weight.T)
    assert_close(tnsim.similarity(a, b), tnsim.similarity(*narrow, below), scale=1.0, rtol=1e-12)


def test_quadrature_covers_what_each_model_reads(rng, monkeypatch):
    """Models of equal layers, which read other directions of the inputs."""
    monkeypatch.setattr(by_features, "polynomials", lambda *arguments: None)
    rest = [bilinear(rng, 2, 3, 2), bilinear(rng, 2, 2, 2)]
    a, b = models = [tnsim.Model([linear(rng, 5, 2), *rest]) for _ in range(2)]
    products = [[expected_products(x, y, tnsim.Gaussian()).sum() for x in models] for y in models]
    norms = np.sqrt(np.diag(products))
    value = tnsim.similarity(a, b)
    assert value.route == "quadrature"
    assert_close(value, products[0][1] / norms.prod(), scale=1.0, rtol=1e-12)
    matrix = tnsim.pairwise(models).similarity.values
    assert_close(matrix, products / norms / norms[:, None], scale=1.0, rtol=1e-12)
    # Routes are weighed once for models of equal layers, and by what these models read.
    alike = tnsim.Model([tnsim.Linear(a.layers[0].weight), bilinear(rng, 2, 3, 2), rest[1]])
    passes = [tnsim.plan(x, y).fact("forward passes") for x, y in ((a, b), (alike, b), (alike, a))]
    assert passes == [5**4, 5**4, 5**2]


def test_quadrature_reads_rows_of_any_size(rng):
    """What a small row reads counts as much where a later layer magnifies it."""
    first, rest = bilinear(rng, 3, 3, 2), [[bilinear(rng, 2, 3, 2)] for _ in range(2)]
    units = np.array([1.0, 2.0**-70, 2.0**70])
    small = units[:, None]
    layers = [first, tnsim.Bilinear(first.left * small, first.right * small, first.down / units**2)]
    whole, scaled = ([tnsim.Model([one, *more]) for more in rest] for one in layers)
    assert_close(tnsim.similarity(*scaled), tnsim.similarity(*whole), scale=1.0, rtol=1e-12)
    for factor in (2.0**600, 2.0**-600):
        far = [tnsim.Linear(factor * rng.normal(size=(3, 3))) for _ in range(2)]
        near = [tnsim.Linear(layer.weight / factor) for layer in far]
        models, wanted = ([tnsim.Model([*one, *m.layers]) for m in whole] for one in (far, near))
        assert_close(tnsim.similarity(*models), tnsim.similarity(*wanted), scale=1.0, rtol=1e-12)


def test_six_layers_of_two_inputs(rng):
    """Degree 64: against a rule of NumPy's."""
    a, b = (tnsim.Model([bilinear(rng, 2, 3, 2, True) for _ in range(6)]) for _ in range(2))
    value = tnsim.similarity(a, b)
    x, w = quadrature(70, np.zeros(2), np.eye(2))
    assert_close(value, cosine(a(x), b(x), w), scale=1.0, rtol=1e-10)
    assert value.exact and value.route == "quadrature"


@pytest.mark.parametrize("probabilities", [None, [0.5, 0.2, 0.0, 0.3]])
def test_categorical_of_any_depth_is_enumerated(probabilities, rng):
    a, b = language_model(rng, vocabulary=4), language_model(rng, vocabulary=4, layers=3)
    metric = tnsim.Categorical(None if probabilities is None else np.array(probabilities))
    ids = np.array(list(itertools.product(range(4), repeat=3)))
    p = np.full(4, 0.25) if probabilities is None else np.array(probabilities)
    x, weights = np.eye(4)[ids], p[ids].prod(axis=1)
    value = tnsim.similarity(a, b, metric)
    assert_close(value, cosine(a(x), b(x), weights), scale=1.0, rtol=1e-12)
    assert (value.exact, value.route, value.standard_error) == (True, "enumeration", None)
    plan = tnsim.plan(a, b, metric)
    assert (plan.fact("forward passes"), plan.route) == (64, "enumeration")
    one = language_model(rng, vocabulary=4, layers=1)
    assert tnsim.similarity(one, one, metric).route == "contractions"
    mixed = tnsim.similarity(a, one, metric)
    assert_close(mixed, cosine(a(x), one(x), weights), scale=1.0, rtol=1e-12)
    both_ways = language_model(rng, vocabulary=4, mask="none")
    value = tnsim.similarity(a, both_ways, metric)
    assert_close(value, cosine(a(x), both_ways(x), weights), scale=1.0, rtol=1e-12)


@pytest.mark.slow
def test_sequences_that_begin_alike_share_their_beginning(rng, monkeypatch):
    a, b = (language_model(rng, vocabulary=4, n_ctx=4) for _ in range(2))
    both_ways = language_model(rng, vocabulary=4, n_ctx=4, mask="none")
    p = np.array([0.1, 0.2, 0.3, 0.4])
    metric = tnsim.Categorical(p)
    ids = np.array(list(itertools.product(range(4), repeat=4)))
    x, weights = np.eye(4)[ids], p[ids].prod(axis=1)
    wanted = cosine(a(x), b(x), weights)
    assert_close(tnsim.similarity(a, b, metric), wanted, scale=1.0, rtol=1e-12)
    value = tnsim.similarity(a, both_ways, metric)
    assert_close(value, cosine(a(x), both_ways(x), weights), scale=1.0, rtol=1e-12)
    shared, apart = (tnsim.plan(a, other, metric) for other in (b, both_ways))
    assert shared.fact("forward passes") == apart.fact("forward passes") == 256
    assert 2.9 < apart.multiplications / shared.multiplications < 3.2  # 340 states, not 1024
    for batch_bytes in (2**10, 2**13, 2**15):
        monkeypatch.setattr(at_points, "BATCH_BYTES", batch_bytes)
        assert_close(tnsim.similarity(a, b, metric), wanted, scale=1.0, rtol=1e-12)
    monkeypatch.setattr(passes, "_EAGER", 0)
    assert_close(tnsim.similarity(a, b, metric), wanted, scale=1.0, rtol=1e-12)


def test_beginnings_of_very_different_sizes(rng):
    """Attention brings states that differ by 2^20 to its fifth power."""
    a, b = (language_model(rng, vocabulary=3) for _ in range(2))
    sizes = np.array([2.0**20, 1.0, 2.0**-20])
    ids = np.array(list(itertools.product(range(3), repeat=3)))
    weights = (p := np.array([1e-200, 0.5, 0.5]))[ids].prod(axis=1)
    models = []
    for model in (a, b):
        first = model.layers[0]
        table = tnsim.Linear(first.weight * sizes, first.bias)
        models.append(tnsim.Model([table, *model.layers[1:]], n_ctx=3))
    x = np.eye(3)[ids]
    wanted = cosine(*(model(x) for model in models), weights)
    for metric in (tnsim.Categorical(p), tnsim.Empirical(ids, weights)):
        assert_close(tnsim.similarity(*models, metric), wanted, scale=1.0, rtol=1e-12)


@pytest.mark.slow
def test_categorical_beyond_the_budget_is_sampled_where_that_is_asked_for(rng):
    a, b = (language_model(rng, 50, 12) for _ in range(2))
    with refused(r"use Categorical\(..., samples=100_000\), an estimate", tnsim.TooLarge):
        tnsim.similarity(a, b, tnsim.Categorical())
    with refused(r"10\^20.4 inputs .* or a larger tnsim.Budget", tnsim.TooLarge):
        tnsim.plan(a, b, tnsim.Categorical())
    unlimited = tnsim.Budget(multiplications=np.inf)
    assert tnsim.plan(a, b, tnsim.Categorical(), budget=unlimited).fact("forward passes") == 50**12
    value = tnsim.similarity(a, b, tnsim.Categorical(samples=3000, seed=1))
    ids = np.concatenate(
        [np.random.default_rng([1, 0]).choice(50, size=(4096, 12), p=np.full(50, 0.02))]
    )[:3000]
    assert_close(value, cosine(a(np.eye(50)[ids]), b(np.eye(50)[ids])), scale=1.0, rtol=1e-12)
    assert (value.exact, value.route) == (False, "sampling") and value.standard_error > 0
    small = [language_model(rng, 4) for _ in range(2)]
    exact = tnsim.similarity(*small, tnsim.Categorical())
    estimate = tnsim.similarity(*small, tnsim.Categorical(samples=20_000))
    assert abs(exact - estimate) < 5 * estimate.standard_error < 0.5
    with refused("samples must be whole, at least 2"):
        tnsim.Categorical(samples=1)
    with refused("seed of samples must be 0 or more"):
        tnsim.Categorical(samples=10, seed=-1)


@pytest.mark.slow
def test_inside_a_trace(rng):
    """Values and derivatives by the weights of models, against values outside."""
    metric = tnsim.Empirical(rng.normal(size=(9, 3)), np.arange(9.0))
    a, b = cases.pair(cases.SHALLOW["bilinear"], rng)
    leaves, form = jax.tree.flatten(a)
    steps = [rng.normal(size=np.shape(leaf)) for leaf in leaves]

    def verbs(t):
        arrays = [leaf + t * step for leaf, step in zip(leaves, steps, strict=True)]
        moved = jax.tree.unflatten(form, arrays)
        numbers = (
            tnsim.similarity(moved - 0.4 * b, b, metric),
            tnsim.slices(moved, b, metric).sum(),
            tnsim.log_inner(moved, b, metric).log,
        )
        xp = jax.numpy if isinstance(t, jax.core.Tracer) else np
        return xp.stack(numbers)

    with jax.enable_x64(True):
        value, slope = jax.jit(lambda t: jax.jvp(verbs, (t,), (1.0,)))(0.0)
    assert_close(value, verbs(0.0), rtol=1e-12)
    wanted = slope_of(verbs, 1e-5)
    assert_close(slope, wanted, scale=LARGEST, rtol=1e-6, limited_by="finite differences")


def test_a_trace_does_not_grow_with_its_points(rng):
    a, b = cases.pair(cases.SHALLOW["bilinear"], rng)
    sizes = []
    for count in (20, 200):
        metric = tnsim.Empirical(rng.normal(size=(count, 3)))
        traced = jax.make_jaxpr(lambda a, metric=metric: tnsim.log_inner(a, b, metric).log)(a)
        sizes.append(str(traced).count(" = "))
    assert sizes[0] == sizes[1]


def test_points_are_not_traced(rng):
    (a, b), tokens = cases.pair(cases.SHALLOW["bilinear"], rng), language_model(rng)
    for message, call in {
        "inputs of Empirical .* are data": lambda x: tnsim.similarity(a, b, tnsim.Empirical(x)),
        "found traced arrays: make the metric outside the JAX trace": lambda x: tnsim.similarity(
            a, b, tnsim.Empirical(np.ones((3, 3)), x[0])
        ),
        "Categorical has arrays that are traced.* weights of models may be traced": lambda x: (
            tnsim.similarity(tokens, tokens, tnsim.Categorical(x[0]))
        ),
    }.items():
        with refused(message):
            jax.jit(call)(np.full((3, 5), 0.2))


def test_refusals(rng):
    a, b = cases.pair(cases.SHALLOW["bilinear"], rng)
    for inputs, message in (
        (np.ones((4, 2)), r"read inputs of shape \(n, 3\), found \(n, 2\)"),
        (np.ones((4, 3), int), "integers are token ids, for models of sequences"),
    ):
        metric = tnsim.Empirical(inputs)
        for verb in (
            tnsim.similarity,
            tnsim.plan,
            lambda *two: tnsim.plan_pairwise(two[:2], two[2]),
        ):
            with refused(message):
                verb(a, b, metric)
    with refused("found float64 of shape"):
        tnsim.Empirical(np.ones(3))
    with refused("need weights of shape"):
        tnsim.Empirical(np.ones((4, 3)), np.ones(3))
    with refused("not negative, and not all zero"):
        tnsim.Empirical(np.ones((2, 3)), np.array([1.0, -1.0]))
    with refused("inputs are not finite, first in row 1"):
        tnsim.similarity(a, b, tnsim.Empirical([[1.0, 1, 1], [1, np.nan, 1]]))
    tokens = language_model(rng)
    with refused(r"ids from 0 to 7 .* read 5 tokens"):
        tnsim.similarity(tokens, tokens, tnsim.Empirical(np.array([[0, 1, 7]])))
    with refused("more than the budget of 10; use fewer inputs", tnsim.TooLarge):
        tnsim.similarity(
            a, b, tnsim.Empirical(np.ones((9, 3))), budget=tnsim.Budget(multiplications=10)
        )
    with refused("is the zero function"):
        tnsim.similarity(a, b, tnsim.Empirical(np.zeros((9, 3))))
    metric = tnsim.Empirical(np.ones((9, 3)))
    with refused("joins no legs, so it has no networks"):
        tnsim.tensor_networks.networks(a, b, metric)


def test_standard_errors_are_those_of_the_jackknife(rng):
    """Values without one of 32 groups each; two models are largest on different groups."""
    layer = bilinear(rng, 2, 3, 2)
    first = tnsim.Model([tnsim.Linear([[1.0, 0.0], [0.0, 0.1]]), layer])
    second = tnsim.Model([tnsim.Linear([[0.1, 0.0], [0.0, 1.0]]), layer])
    scale = np.logspace(-1, 1, 96)
    inputs = rng.normal(size=(96, 2)) * np.stack([scale, scale[::-1]], axis=1)
    without = []
    for group in np.arange(96).reshape(32, 3):
        a, b = (model(np.delete(inputs, group, axis=0)) for model in (first, second))
        by_output = (a * b).sum(0) / np.sqrt((a**2).sum(0) * (b**2).sum(0))
        without.append([cosine(a, b), (a * b).sum() / 93, *by_output])
    errors = np.sqrt(31 / 32 * ((without - np.mean(without, axis=0)) ** 2).sum(0))
    metric = tnsim.Empirical(inputs)
    verbs = tnsim.similarity, tnsim.inner, tnsim.slices
    for verb, error in zip(verbs, (errors[0], errors[1], errors[2:]), strict=True):
        assert_close(verb(first, second, metric).standard_error, error)
    for slices in (False, True):
        found = tnsim.pairwise([first, second], metric, slices=slices)
        assert_close(float(found.standard_error[0, 1]), errors[0])


def test_masks_are_not_left_out(rng):
    x = rng.normal(size=(4, 2))
    with refused(r"a masked array was given.*array\.filled\(0\)"):
        tnsim.Empirical(np.ma.masked_array(x, mask=x > x.min()))
    assert tnsim.Empirical(np.ma.masked_array(x)).inputs.tolist() == x.tolist()


def test_inputs_with_labels_are_refused(rng):
    """Labels of the shape of the inputs would pass for a second position."""
    torch = pytest.importorskip("torch", reason="data sets of PyTorch need the torch extra")
    x, y = (torch.as_tensor(rng.normal(size=(5, 3))) for _ in range(2))
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    net = tnsim.Model([tnsim.Linear(np.ones((2, 3)))])
    for wrong in (iter(loader), data.tensors, list(data), zip(x, y, strict=True)):
        with refused(r"give the inputs alone, such as dataset\.tensor"):
            tnsim.Empirical(wrong)
    normed = torch.nn.Sequential(torch.nn.RMSNorm(3), torch.nn.Linear(3, 2))
    batch = next(iter(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x))))
    for wrong in (list(data), [x, y[0]], (x, x), batch):
        for attempt in (
            tnsim.Gaussian.fit,
            lambda wrong: tnsim.baselines.cka([net, net], wrong),
            lambda wrong: tnsim.from_module(normed, norm_inputs=wrong),
            lambda wrong: tnsim.inputs_of(normed, "1", wrong),
            lambda wrong: tnsim.hidden_states(normed, wrong),
        ):
            with refused(r"array was expected|inputs are one array"):
                attempt(wrong)
    expected = tnsim.inner(net, net, tnsim.Empirical(x.numpy()))
    plain = torch.utils.data.TensorDataset(x)
    for right in (x, x.tolist(), list(x), list(map(tuple, x.tolist())), plain, {"x": x}):
        assert tnsim.inner(net, net, tnsim.Empirical(right)) == expected
    # Data sets and loaders say which entry is the input: the first.
    for right in (data, loader, torch.utils.data.Subset(data, range(5))):
        with pytest.warns(
            tnsim.CaveatWarning, match="tuples of 2, as of inputs with labels"
        ) as said:
            metric = tnsim.Empirical(right)
        assert {one.filename for one in said} == {__file__}
        assert tnsim.inner(net, net, metric) == expected
    named = [{"pixel_values": row, "label": 1} for row in x]
    subset = torch.utils.data.Subset(named, range(5))
    assert tnsim.inner(net, net, tnsim.Empirical(subset)) == expected


@pytest.mark.parametrize("width, route", [(2, "quadrature"), (8, "features")])
def test_the_cheaper_of_vectors_and_nodes_is_taken(width, route, rng):
    """Two layers of eight inputs: 5^8 nodes in both models, of three matrices a layer, cost more."""
    models = []
    for _ in range(2):
        layers = [tnsim.Bilinear(*rng.normal(size=(3, width, width))) for _ in range(2)]
        models.append(tnsim.Model(layers))
    plan = tnsim.plan(*models, cosine=True)
    assert plan.route == route
    nodes = 5**width * 2 * 2 * 3 * width**2
    assert (
        plan.multiplications < (1.5 if width == 2 else 0.1) * nodes
    )  # products of outputs besides


def test_long_forward_passes_say_how_far_they_are(rng, monkeypatch, logged):
    """A line per doubling of the time, so that nobody takes a long run for a hang."""
    monkeypatch.setattr(passes, "_FIRST_LINE", 0.0)
    a, b = (tnsim.Model([linear(rng, 3, 2, True)]) for _ in range(2))
    tnsim.similarity(a, b, tnsim.Empirical(rng.normal(size=(40, 3))))
    assert re.fullmatch(r"forward passes for 0 s: \d+ of 40 inputs", logged[0])


def test_activations_that_are_zero_at_all_inputs_are_parts_of_a_sum_in_float32(rng):
    off = tnsim.Model([tnsim.Linear(np.eye(2), [-9.0, -9.0]), tnsim.Elementwise("relu")])
    other, metric = tnsim.Model([bilinear(rng, 2, 3, 2)]), tnsim.Empirical(rng.normal(size=(4, 2)))
    found = tnsim.similarity(off - other, other, metric, dtype="float32")
    assert_close(found, -1.0, rtol=1e-6, limited_by="float32")
