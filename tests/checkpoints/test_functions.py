"""Functions of JAX as models: each beside the function itself, far outside of the usual inputs."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import LARGEST, assert_close
from refusals import refused

import tnsim

WIDTH, HIDDEN, POSITIONS, TOKENS = 4, 6, 5, 7
SIZES = (1e-3, 1.0, 30.0, 1e4)


def weights(rng):
    shapes = dict(
        a=(4, 6), b=(6, 3), c=(4, 6), s=(4, 4), t=(4, 4), bias=(6,), out=(3,), table=(7, 4)
    )
    return {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}


def activated(function):
    return lambda p, x: function(x @ p["a"] + p["bias"]) @ p["b"] + p["out"]


def heads(p, x, name):
    return (x @ p[name]).reshape(-1, POSITIONS, 2, 2)


def attention(p, x):
    scores = jnp.einsum("bthd,bshd->bhts", heads(p, x, "s"), heads(p, x, "t"))
    mixed = jnp.einsum("bhts,bshd->bthd", jnp.tril(scores**2) / 3, heads(p, x, "s"))
    return x + mixed.reshape(-1, POSITIONS, WIDTH) @ p["t"]


def turns(p, x):
    return jax.lax.scan(lambda h, w: (h + (h @ w) * h, None), x, jnp.stack([p["s"], p["t"]]))[0]


def rows_of_turns(p, x):
    weights = jnp.stack([p["s"], p["t"]])
    return jnp.hstack(jax.lax.scan(lambda h, w: (h @ w, h * h), x, weights, reverse=True)[1])


def moved(p, x):
    """JAX moves what would end beyond an array back into it."""
    part = jax.lax.dynamic_slice_in_dim(x, 3, 2, 1) * x[:, :2]
    return jax.lax.dynamic_update_slice(x, part, (0, 9)) @ p["a"]


def loop(p, x):
    return jax.lax.fori_loop(0, 2, lambda n, h: h + 0.5 * (h @ p["s"]) * (h @ p["t"]), x)


VECTORS = {
    "relu": activated(jax.nn.relu),
    "gelu": activated(lambda u: jax.nn.gelu(u, approximate=False)),
    "gelu_tanh": activated(jax.nn.gelu),
    "silu": activated(jax.nn.silu),
    "softplus": activated(jax.nn.softplus),
    "elu": activated(jax.nn.elu),
    "selu": activated(jax.nn.selu),
    "leaky_relu": activated(lambda u: jax.nn.leaky_relu(u, 0.03)),
    "hard_swish": activated(jax.nn.hard_swish),
    "relu6": activated(jax.nn.relu6),
    "mish": activated(jax.nn.mish),
    "clip": activated(lambda u: jnp.clip(u, -40, 40)),
    "clamp": activated(lambda u: jax.lax.clamp(-1.0, u, 40.0)),
    "where": activated(lambda u: jnp.where(u > 0.3, u, 0.1 * u)),
    "by hand": activated(lambda u: 0.5 * u * (1 + jnp.tanh(0.7 * u))),
    "swiglu": lambda p, x: (jax.nn.silu(x @ p["a"]) * (x @ p["c"])) @ p["b"],
    "bilinear": lambda p, x: ((x @ p["a"]) * (x @ p["c"] + 1)) @ p["b"] + x[:, :3],
    "deep": lambda p, x: ((turns(p, x) @ p["a"]) * (turns(p, x) @ p["c"])) @ p["b"],
    "fourth power": lambda p, x: (x @ p["a"]) ** 4 @ p["b"],
    "a square": lambda p, x: jnp.square(x @ p["a"]) @ p["b"] - x[:, 1:],
    "a column of zeros": lambda p, x: x.at[:, 0].set(0.0) @ p["a"],
    "a column of others": lambda p, x: x.at[:, 1].set(x[:, 2] * x[:, 3]) @ p["a"],
    "columns at numbers": moved,
    "added columns": lambda p, x: x.at[:, :2].add(x[:, 2:] * 3) @ p["a"],
    "weight first": lambda p, x: (p["a"].T @ x.T).T,
    "halves": lambda p, x: jnp.multiply(*jnp.split(x @ p["a"], 2, -1)) @ p["s"][:3],
    "strides": lambda p, x: jnp.concatenate([x[:, ::2], x[:, ::-1]], -1) @ p["a"][:, :3].T.repeat(2, 0),
    "choice": lambda p, x: x[:, jnp.array([2, 0, 0])] * x[:, 1:],
    "padding": lambda p, x: jnp.pad(x, ((0, 0), (1, 1)), constant_values=2.0) @ p["b"],
    "means": lambda p, x: (x - x.mean(-1, keepdims=True)) @ p["a"],
    "products": lambda p, x: (x @ p["a"]).reshape(-1, 2, 3).prod(1) @ p["s"][:3],
    "products up to each place": lambda p, x: jnp.cumprod(x, -1) @ p["a"],
    "products from each place": lambda p, x: jax.lax.cumprod(x @ p["a"][:, :3], 1, reverse=True),
    "sums": lambda p, x: jnp.cumsum(x, -1) * x.sum(-1, keepdims=True),
    "a scan": turns,
    "rows of a scan": rows_of_turns,
    "a loop": loop,
    "jit": jax.jit(activated(jax.nn.relu)),
    "checkpoint": jax.checkpoint(activated(jax.nn.silu)),
    "whole numbers": lambda p, x: x[:, jnp.arange(4) // 2] * ((jnp.arange(4) & 1) + jnp.arange(4) % 3),
    "stacks": lambda p, x: sum(jnp.unstack(jnp.stack([x, x * x, jnp.tile(x[:, 2:], (1, 2))], 1), axis=1)),
    "cond": lambda p, x: jax.lax.cond(False, lambda h: h, lambda h: (h @ p["s"]) * h, x),
    "a scan of no turns": lambda p, x: jax.lax.scan(lambda h, w: (h @ w, h), x, jnp.zeros((0, 4, 4)))[0] @ p["a"],
    "a barrier": lambda p, x: jnp.multiply(*jax.lax.optimization_barrier((x, x @ p["s"]))),
    "vmap": lambda p, x: jax.vmap(lambda one: jnp.outer(one, one).reshape(-1)[:6] @ p["b"])(x),
}  # fmt: skip
SEQUENCES = {
    "attention": attention,
    "positions alone": lambda p, x: (x @ p["a"]) * (x @ p["c"]),
    "flattened": lambda p, x: x.reshape(len(x), -1)[:, :6] @ p["b"],
    "mean over positions": lambda p, x: x.mean(1) @ p["a"],
}
OF_TOKENS = {
    "table": lambda p, t: ((p["table"][t] @ p["a"]) * (p["table"][t] @ p["c"])) @ p["b"],
    "rows of single tokens": lambda p, t: jax.vmap(jax.vmap(lambda i: p["table"][i]))(t) @ p["a"],
    "take": lambda p, t: jnp.take(p["table"], t, axis=0) @ p["s"],
    "attention": lambda p, t: attention(p, p["table"][t]),
}


def beside(function, params, model, x, given):
    with jax.enable_x64(True):
        wanted = np.asarray(function(jax.tree.map(jnp.asarray, params), jnp.asarray(x)))
    found = np.asarray(model(given)).reshape(wanted.shape)
    assert_close(found, wanted, scale=LARGEST, rtol=1e-9)


@pytest.mark.sampled(quick=0, slow=17)
@pytest.mark.parametrize("name", VECTORS)
def test_functions_of_vectors(name, rng):
    params = weights(rng)
    model = tnsim.from_function(VECTORS[name], params, np.zeros((2, WIDTH)))
    assert model.n_ctx is None and model.origin.error < 1e-12
    for size in SIZES:
        x = size * rng.normal(size=(3, WIDTH))
        beside(VECTORS[name], params, model, x, x)
    kinks = np.concatenate([np.zeros((1, WIDTH)), 0.3 * np.eye(WIDTH)])
    beside(VECTORS[name], params, model, kinks, kinks)


@pytest.mark.sampled(quick=0)
@pytest.mark.parametrize("name", SEQUENCES)
def test_functions_of_sequences(name, rng):
    params, function = weights(rng), SEQUENCES[name]
    model = tnsim.from_function(function, params, np.zeros((1, POSITIONS, WIDTH)))
    for size in SIZES[:3]:
        x = size * rng.normal(size=(3, POSITIONS, WIDTH))
        beside(function, params, model, x, x if model.n_ctx else x.reshape(3, -1))
    assert model.n_ctx in (None, POSITIONS)
    if model.n_ctx:
        assert f"at n_ctx {POSITIONS}" in model.origin.assumptions[0]


@pytest.mark.sampled(quick=0)
@pytest.mark.parametrize("name", OF_TOKENS)
def test_functions_of_tokens(name, rng):
    params, function = weights(rng), OF_TOKENS[name]
    model = tnsim.from_function(function, params, np.zeros((1, POSITIONS), np.int32))
    tokens = rng.integers(TOKENS, size=(20, POSITIONS))
    assert model.d_in == TOKENS
    beside(function, params, model, tokens, np.eye(TOKENS)[tokens])


@pytest.mark.slow
def test_convolutions_have_receptive_fields(rng):
    def network(params, x):
        def conv(kernel):
            numbers = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=numbers
            )

        pooled = jax.lax.reduce_window(
            conv(params["a"]) * conv(params["b"]), 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )  # fmt: skip
        return pooled.reshape(len(x), -1) @ params["out"]

    params = {name: rng.normal(size=(3, 3, 1, 2)) for name in "ab"}
    params["out"] = rng.normal(size=(18, 3))
    model = tnsim.from_function(network, params, np.zeros((1, 6, 6, 1)))
    x = rng.normal(size=(4, 6, 6, 1))
    beside(network, params, model, x, x.reshape(4, -1))
    assert isinstance(model.layers[0], tnsim.Bilinear)


@pytest.mark.slow
def test_weights_of_any_kind_are_read_on_their_own_numbers(rng):
    """Each of several pytrees anew: what is inert in one of them is not left out of another."""

    def network(params, x):
        hidden = params["gain"] * jax.nn.relu(x @ params["layers"][0]) * params["mask"]
        return hidden @ params["layers"][1] + x[:, :3] @ (params["low"] @ params["rank"])

    shapes = [(WIDTH, HIDDEN), (HIDDEN, 3)]
    models = []
    for n in range(2):
        params = {
            "layers": [rng.normal(size=shape) for shape in shapes],
            "gain": np.float64(1 + n),
            "mask": np.ones(HIDDEN) if n == 0 else rng.integers(0, 2, size=HIDDEN) * 1.0,
            "low": rng.normal(size=(3, 1)),
            "rank": n * rng.normal(size=(1, 3)),
        }
        models.append(tnsim.from_function(network, params, np.zeros((1, WIDTH))))
        x = rng.normal(size=(9, WIDTH))
        beside(network, params, models[-1], x, x)
    narrow = weights(rng)
    for dtype in (jnp.float32, jnp.bfloat16, np.float16):
        given = {name: jnp.asarray(array, dtype) for name, array in narrow.items()}
        wide = {name: np.asarray(array, np.float64) for name, array in given.items()}
        one = tnsim.from_function(VECTORS["bilinear"], given, np.zeros((1, WIDTH), np.float32))
        assert tnsim.similarity(one, tnsim.from_function(VECTORS["bilinear"], wide, x)) == 1.0
    rounded = tnsim.from_function(
        lambda p, x: x.astype(jnp.float32) @ p["a"],
        {name: jnp.asarray(array, jnp.float32) for name, array in narrow.items()},
        x,
    )
    assert rounded.layers[0].weight.shape == (HIDDEN, WIDTH)


@pytest.mark.slow
def test_the_same_network_in_pytorch(rng):
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.Linear(6, 3)
    ).double()
    params = [tensor.detach().numpy() for tensor in net.parameters()]

    def network(p, x):
        return jax.nn.gelu(x @ p[0].T + p[1], approximate=False) @ p[2].T + p[3]

    model = tnsim.from_function(network, params, np.zeros((1, 4)))
    assert repr(model) == repr(tnsim.from_module(net))
    assert_close(tnsim.similarity(model, net), 1.0, rtol=1e-14)


def test_modules_of_equinox_and_flax(rng):
    equinox = pytest.importorskip("equinox")
    mlp = equinox.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))
    model = tnsim.from_function(lambda m, x: jax.vmap(m)(x), mlp, np.zeros((1, 4)))
    x = rng.normal(size=(5, 4))
    assert_close(model(x), np.asarray(jax.vmap(mlp)(x)), scale=LARGEST, rtol=1e-5, limited_by="float32")  # fmt: skip
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3)(linen.silu(linen.Dense(6)(x)) * linen.Dense(6)(x))

    net = Net()
    params = net.init(jax.random.key(0), jnp.zeros((1, 4)))
    model = tnsim.from_function(net.apply, params, np.zeros((1, 4)))
    assert isinstance(model.layers[0], tnsim.Gated)
    beside(net.apply, params, model, x, x)


REFUSED = {
    "softmax": (lambda p, x: jax.nn.softmax(x), "the largest of several values"),
    "a norm": (lambda p, x: x / jnp.linalg.norm(x, axis=-1, keepdims=True), "sqrt|div"),
    "a product of a batch": (lambda p, x: x * x.prod(0), "depends on the batch around it"),
    "many factors": (lambda p, x: (x @ jnp.ones((4, 9))).prod(-1, keepdims=True), "reduce_prod"),
    "a batch": (lambda p, x: x - x.mean(0), "depends on the batch around it"),
    "the size of a batch": (lambda p, x: x @ p["a"] / len(x), "depends on the batch around it"),
    "a power by the size of a batch": (lambda p, x: (x @ p["a"]) ** len(x), "pow with"),
    "neighbours in a batch": (lambda p, x: jnp.roll(x, 1, 0), "depends on the batch around it"),
    "a branch": (lambda p, x: x if x.sum() > 0 else -x, "branches on, or counts with, numbers"),
    "cond": (lambda p, x: jax.lax.cond(x.sum() > 0, lambda: x, lambda: -x), "use jnp.where"),
    "while": (lambda p, x: jax.lax.while_loop(lambda h: h.sum() < 1, lambda h: 2 * h, x), "a loop that ends by a value"),
    "sorting": (lambda p, x: jnp.sort(x), "compares hidden units with one another"),
    "folds": (lambda p, x: jax.lax.reduce(x, np.zeros((), x.dtype), lambda u, v: u + v + u * v, (1,))[:, None], "computes reduce"),
    "rounding": (lambda p, x: jnp.round(x), "computes round"),
    "whole numbers": (lambda p, x: x.astype(jnp.int32) * 1.0, "rounds numbers that depend on the input"),
    "bfloat16": (lambda p, x: x.astype(jnp.bfloat16) @ p["a"], "rounds numbers that depend on the input to bfloat16"),
    "products in float32": (
        lambda p, x: jnp.dot(x, p["a"], preferred_element_type=jnp.float32),
        "rounds numbers that depend on the input to float32",
    ),
    "random weights": (
        lambda p, x: x @ jax.random.normal(jax.random.key(0), (4, 2)),
        r"draws random numbers \(jax\.random\)",
    ),
    "random bits": (
        lambda p, x: x @ jax.random.uniform(jax.random.PRNGKey(0), (4, 2)),
        r"draws random numbers \(jax\.random\)",
    ),
    "noise": (
        lambda p, x: x + jax.random.normal(jax.random.key(0), x.shape),
        r"draws random numbers \(jax\.random\)",
    ),
    "a constant": (lambda p, x: jnp.ones((len(x), 1)) * p["out"], "does not depend on the input"),
    "updates at random places": (
        lambda p, x: jax.lax.dynamic_update_slice(x, x[:, :2], (0, (x[0, 0] > 0).astype(int))),
        "writes to places that depend on numbers",
    ),
    "random places": (lambda p, x: x[:, (x[0, 0] > 0).astype(int)], "which takes entries|rounds|places"),
}  # fmt: skip


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_layers_is_refused_by_name(name, rng):
    function, said = REFUSED[name]
    with refused(said, tnsim.UnsupportedLayer) as caught:
        tnsim.from_function(function, weights(rng), np.zeros((2, WIDTH)))
    assert "layers=" not in str(caught.value)  # which is for classes of modules


def test_what_is_no_function_of_weights_and_inputs(rng):
    params, x = weights(rng), np.zeros((2, WIDTH))
    line = jax.jit(VECTORS["bilinear"])
    for function, given, inputs, said in [
        (lambda p, x: (x, x), params, x, r"gives 2 arrays.*\[0\]"),
        (lambda p, x: (x @ p["a"]).sum(), params, x, "gives a single number for a batch"),
        (
            line,
            {**params, "a": np.full((4, 6), np.nan)},
            x,
            r"params\['a'\] holds numbers that are",
        ),
        (line, {**params, "a": np.ones((4, 6), complex)}, x, r"params\['a'\] is complex"),
        (line, params, np.zeros(WIDTH), r"shape \(4,\).*jax.vmap"),
        (line, params, np.zeros((0, WIDTH)), "x is a batch of inputs"),
        (
            line,
            params,
            np.zeros((2, WIDTH + 1)),
            r"does not take this x, a batch \(2, 5\) of float.*jax\.vmap",
        ),
    ]:
        with refused(said):
            tnsim.from_function(function, given, inputs)
    with refused(r"outside of jax\.jit"):
        jax.jit(lambda p: tnsim.from_function(line, p, x).layers[0].down.sum())(params)
    goal, inputs = (
        tnsim.from_function(line, params, x),
        tnsim.Empirical(rng.normal(size=(9, WIDTH))),
    )
    with refused("functions and files do not; build layers"):
        jax.grad(lambda p: tnsim.similarity(lambda x: line(p, x), goal, inputs))(params)


def test_tokens_as_truth_values_are_refused_by_name(rng):
    """They were taken for the tokens themselves, and the refusal spoke of random numbers."""
    present = lambda p, t: p["table"][t.astype(bool).astype(int)]  # noqa: E731
    with refused("rounds numbers that depend on the input to bool", tnsim.UnsupportedLayer):
        tnsim.from_function(present, weights(rng), np.zeros((1, POSITIONS), np.int32))


def test_functions_of_entries_in_place_are_refused(rng):
    """They were left out wherever random inputs did not meet them."""
    clipped = lambda p, x: x.at[:, 0].apply(lambda u: jnp.clip(u, -1e9, 1e9))  # noqa: E731
    with refused("applies a function to entries", tnsim.UnsupportedLayer):
        tnsim.from_function(clipped, weights(rng), np.zeros((2, WIDTH)))


@pytest.mark.slow
def test_keys_beside_the_weights_go_to_the_function(rng):
    """Ended in JAX's TypeError, as in states of flax.nnx that hold generators."""
    x, params = np.zeros((2, WIDTH)), weights(rng)
    model = tnsim.from_function(VECTORS["bilinear"], {**params, "key": jax.random.key(0)}, x)
    assert tnsim.similarity(model, tnsim.from_function(VECTORS["bilinear"], params, x)) == 1


def test_weights_that_jax_has_deleted_are_refused():
    weight = jnp.ones((WIDTH, 2))
    weight.delete()
    with refused("deleted"):
        tnsim.from_function(lambda p, x: x @ p, weight, np.zeros((1, WIDTH)))


def test_what_counts_inputs_is_refused(rng):
    numbered = lambda p, x: jnp.arange(len(x))[:, None] * x @ p["a"]  # noqa: E731
    with refused("compute with the number of its inputs"):
        tnsim.from_function(numbered, weights(rng), np.zeros((2, WIDTH)))


def program(rng, depth):
    """A random function of vectors: affine steps, products, activations, residuals, choices."""
    steps = []
    for _ in range(depth):
        kind = rng.integers(9)
        number, axis = float(rng.normal()), int(rng.integers(WIDTH))
        function = [jax.nn.relu, jnp.tanh, jax.nn.silu, jax.nn.softplus, jnp.abs][rng.integers(5)]
        steps.append(
            [
                lambda p, h, n=number: h @ p["s"] + n,
                lambda p, h, n=number: n * h + (h @ p["t"]) * (h @ p["s"]) / 9,
                lambda p, h, f=function: h + f(h @ p["t"]) / 3,
                lambda p, h, k=axis: jnp.roll(h, k, -1),
                lambda p, h, k=axis: h.at[:, k].set(0.5),
                lambda p, h: h[:, ::-1] - h.mean(-1, keepdims=True),
                lambda p, h: jnp.concatenate([h[:, 2:], h[:, :2]], -1),
                lambda p, h, k=axis: jnp.where(jnp.arange(WIDTH) == k, -h, h),
                lambda p, h: jnp.einsum("oi,bi->bo", p["t"], h) / 2,
            ][kind]
        )
    if depth % 2:
        steps.append(lambda p, h: (jax.nn.gelu(h @ p["a"]) * (h @ p["c"])) @ p["b"])

    def function(p, x):
        for step in steps:
            x = step(p, x)
        return x

    return function


def check_programs(rng, count):
    refused = 0
    for n in range(count):
        params, function = weights(rng), program(rng, 1 + n % 5)
        try:
            model = tnsim.from_function(function, params, np.zeros((1, WIDTH)))
        except tnsim.UnsupportedLayer:
            refused += 1
            continue
        for size in (1e-3, 1.0, 20.0):
            x = size * rng.normal(size=(4, WIDTH))
            beside(function, params, model, x, x)
    return refused


@pytest.mark.slow
def test_random_programs(rng):
    assert check_programs(rng, 6) <= 2


@pytest.mark.full
@pytest.mark.slow
def test_many_random_programs(rng):
    assert check_programs(rng, 300) <= 60


@pytest.mark.slow
def test_nothing_of_pytorch_is_imported():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, tnsim\n"
        "model = tnsim.from_function(lambda p, x: x @ p, np.ones((3, 2)), np.zeros((1, 3)))\n"
        "assert model.d_out == 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
