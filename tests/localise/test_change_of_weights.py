"""The change of any network by its weights: complex steps, the networks themselves, refusals."""

import copy
import pickle
import warnings
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import LARGEST, assert_close
from refusals import refused
from seeds import generator

import tnsim
from tnsim.compare.numbers import jackknife_error
from tnsim.localise.change_of_weights import CLOSE, groups_of

torch = pytest.importorskip("torch")
from module_cases import Module  # noqa: E402
from torch import nn  # noqa: E402


class Products(nn.Module):
    """A network of two blocks, a polynomial in its weights, whose parts are named as usual."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"left": nn.Linear(4, 4), "right": nn.Linear(4, 4)}) for _ in range(2)
        )

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block["left"](x) * block["right"](x)
        return x


def products(weights, x):
    """The same network in NumPy, on weights by name."""

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    x = linear("embed", x)
    for n in range(2):
        x = x + linear(f"blocks.{n}.left", x) * linear(f"blocks.{n}.right", x)
    return x


def moved(network, rng, size=0.3, within=""):
    """A copy of a network whose floating-point weights below a name have moved."""
    other = copy.deepcopy(network)
    with torch.no_grad():
        for name, weight in (*other.named_parameters(), *other.named_buffers()):
            if name.startswith(within) and weight.is_floating_point():
                step = torch.as_tensor(rng.normal(size=tuple(weight.shape)) * size)
                weight.add_(step.abs() if name.endswith("running_var") else step)
    return other


def state(network):
    return {name: value.numpy() for name, value in network.state_dict().items()}


def with_part(network, other, part):
    """The network with a part of the other."""
    made = copy.deepcopy(network)
    taken = {k: v for k, v in other.state_dict().items() if k == part or k.startswith(f"{part}.")}
    assert taken
    made.load_state_dict({**made.state_dict(), **taken})
    return made


def squared_distance(a, b, x):
    with torch.no_grad():
        return float(((a(torch.as_tensor(x)) - b(torch.as_tensor(x))) ** 2).sum()) / len(x)


@pytest.fixture
def pair():
    torch.manual_seed(0)
    a = Products().double()
    return a, moved(a, generator(1))


X = generator(2).normal(size=(40, 3))


def test_shares_are_the_integrals_of_complex_steps(pair):
    a, b = pair
    found = tnsim.change(a, b, tnsim.Empirical(X), by="block")
    assert found.components == ("embed", "blocks.0", "blocks.1")
    first, second = state(a), state(b)
    d = products(second, X) - products(first, X)
    nodes, weights = np.polynomial.legendre.leggauss(20)
    wanted = np.zeros(3)
    for t, w in zip((nodes + 1) / 2, weights / 2, strict=True):
        for n, part in enumerate(found.components):
            between = {
                name: first[name]
                + (t + (1e-30j if name.startswith(part) else 0)) * (second[name] - first[name])
                for name in first
            }
            slope = products(between, X).imag / 1e-30
            wanted[n] += w * (slope * d).sum() / (d**2).sum()
    assert_close(found.share, wanted, scale=LARGEST, rtol=1e-11)
    assert_close(found.share.sum(), 1.0, rtol=1e-11)
    assert_close(found.total, (d**2).sum() / len(X), rtol=1e-12)


@pytest.mark.parametrize("by", ["module", "block"])
def test_exchanged_parts_are_those_of_the_networks_themselves(pair, by):
    a, b = pair
    found = tnsim.change(a, b, tnsim.Empirical(X), by=by)
    back = [squared_distance(b, with_part(b, a, part), X) for part in found.components]
    alone = [squared_distance(a, with_part(a, b, part), X) for part in found.components]
    assert_close(found.removed, back, rtol=1e-12)
    assert_close(found.alone, alone, rtol=1e-12)


def test_a_similarity_is_split_as_well(pair):
    a, b = pair
    metric = tnsim.Empirical(X)
    found = tnsim.change(a, b, metric, of="similarity")
    assert_close(found.total, 1 - float(tnsim.similarity(a, b, metric)), scale=1.0, rtol=1e-13)
    assert_close(found.share.sum(), 1.0, rtol=1e-3, limited_by="the nodes of an integral")
    back = [with_part(b, a, part) for part in found.components]
    wanted = [1 - float(tnsim.similarity(b, other, metric)) for other in back]
    assert_close(found.removed, wanted, scale=1.0, rtol=1e-13)


def test_small_changes_keep_their_digits(pair):
    a, _ = pair
    b = moved(a, generator(3), size=1e-6)
    found = tnsim.change(a, b, tnsim.Empirical(X), of="similarity")
    weights = [state(net) for net in (a, b)]
    x, y = (products(w, X) for w in weights)
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    assert_close(found.total, ((x - y) ** 2).sum() / 2, rtol=1e-8, limited_by="digits of 1e-6")


def test_a_score_is_split(pair):
    a, b = pair
    x = torch.as_tensor(X)

    def loss(network):
        return torch.tanh(network(x) / 4).square().mean()

    def number(network):
        return float(loss(network).detach())

    found = tnsim.change(a, b, of=loss, by="block")
    assert found.of == "loss"
    assert_close(found.total, number(b) - number(a), rtol=1e-12)
    back = [number(with_part(b, a, part)) - number(b) for part in found.components]
    assert_close(found.removed, back, scale=LARGEST, rtol=1e-12)
    assert_close(found.share.sum(), 1.0, rtol=1e-3, limited_by="the nodes of an integral")
    with refused("a change of loss has no parts"):
        _ = found.matrix


def test_weights_of_inputs_count(pair):
    a, b = pair
    twice = np.concatenate([X, X[:5]])
    weights = np.where(np.arange(len(X)) < 5, 2.0, 1.0)
    one = tnsim.change(a, b, tnsim.Empirical(twice))
    other = tnsim.change(a, b, tnsim.Empirical(X, weights))
    assert_close(one.share, other.share, scale=LARGEST, rtol=1e-12)
    assert_close(one.total, other.total, rtol=1e-12)


def test_batches_change_nothing(pair, monkeypatch):
    a, b = pair
    whole = tnsim.change(a, b, tnsim.Empirical(X))
    monkeypatch.setattr("tnsim.localise.change_of_weights._MOST_ROWS", 3)
    small = tnsim.change(a, b, tnsim.Empirical(X))
    assert_close(small.share, whole.share, scale=LARGEST, rtol=1e-12)
    assert_close(small.removed, whole.removed, rtol=1e-12)


def test_outputs_that_do_not_fit_are_computed_again(pair, monkeypatch):
    a, b = pair
    whole = tnsim.change(a, b, tnsim.Empirical(X), of="similarity")
    monkeypatch.setattr("tnsim.localise.change_of_weights._MOST_KEPT", 0)
    again = tnsim.change(a, b, tnsim.Empirical(X), of="similarity")
    assert_close(again.share, whole.share, scale=LARGEST, rtol=1e-12)


def test_float32_is_near(pair):
    a, b = pair
    wide = tnsim.change(a, b, tnsim.Empirical(X))
    narrow = tnsim.change(a, b, tnsim.Empirical(X), dtype="float32")
    assert_close(narrow.share, wide.share, scale=LARGEST, rtol=1e-4, limited_by="float32")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_networks_of_16_bits_are_those_of_their_weights(pair, dtype):
    narrow = [copy.deepcopy(network).to(dtype) for network in pair]
    wide = [copy.deepcopy(network).double() for network in narrow]
    found, wanted = (tnsim.change(*two, tnsim.Empirical(X)) for two in (narrow, wide))
    assert_close(found.share, wanted.share, scale=LARGEST, rtol=1e-12)
    assert_close(found.total, wanted.total, rtol=1e-12)


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(
    "mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad]
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_modes_of_the_caller_change_nothing(pair, dtype, mode):
    """In inference mode there were no derivatives, and all shares were 0."""
    metric = tnsim.Empirical(X)
    expected = tnsim.change(*pair, metric, dtype=dtype)
    with mode():
        found = tnsim.change(*pair, metric, dtype=dtype)
        removed = found.removed
    assert (found.share == expected.share).all() and (removed == expected.removed).all()


def test_neither_network_is_changed(pair):
    a, b = pair
    before = [copy.deepcopy(net.state_dict()) for net in pair]
    found = tnsim.change(a, b, tnsim.Empirical(X))
    _ = found.alone
    for net, kept in zip(pair, before, strict=True):
        assert all(torch.equal(net.state_dict()[name], kept[name]) for name in kept)
        assert all(p.grad is None for p in net.parameters())


def score_of(network):
    return network(torch.as_tensor(X)).square().mean()


@pytest.mark.parametrize("options", [{}, {"of": score_of}])
def test_what_is_asked_later_is_asked_of_the_networks_as_they_were(pair, options):
    a, b = copy.deepcopy(pair)
    wanted, found = (tnsim.change(a, b, tnsim.Empirical(X), **options) for _ in range(2))
    _ = wanted.removed, wanted.alone
    with torch.no_grad():
        for weight in (*a.parameters(), *b.parameters()):
            weight.mul_(3)
    assert (found.removed == wanted.removed).all() and (found.alone == wanted.alone).all()


def of_jax(weights, x):
    return products(weights, jnp.asarray(x))


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_a_change_is_kept_and_sent_by_pickle(pair, library):
    """Hooks of modules and programs of JAX cannot be."""
    if library == "jax":
        pair = [jax.tree_util.Partial(of_jax, state(net)) for net in pair]
    found = tnsim.change(*pair, tnsim.Empirical(X), by="block")
    sent = pickle.loads(pickle.dumps(found))
    assert (sent.share == found.share).all() and (sent.removed == found.removed).all()


def test_threads_may_ask_one_change(pair):
    metric = tnsim.Empirical(generator(3).normal(size=(2000, 3)))
    wanted = tnsim.change(*pair, metric).alone
    for _ in range(3):
        exchanges = tnsim.change(*pair, metric)._exchanges
        with ThreadPoolExecutor(2) as pool:
            _, alone = pool.map(exchanges.swapped, (True, False), (1.0, 1.0))
        assert (alone == wanted).all()


def masked():
    """Softmax attention that adds its mask, which has infinities."""

    def forward(m, x):
        queries, keys, values = m.maps(x).chunk(3, -1)
        return (queries @ keys.mT + m.mask).softmax(-1) @ values

    mask = torch.full((4, 4), -torch.inf).triu(1)
    return Module(forward, maps=nn.Linear(3, 9), mask=mask).double()


def test_infinities_that_both_networks_have_stay(rng):
    a = masked()
    b = moved(a, rng, within="maps")
    x = rng.normal(size=(5, 4, 3))
    found = tnsim.change(a, b, tnsim.Empirical(x), by="parameter")
    assert_close(found.total, squared_distance(a, b, x))
    assert abs(found.share.sum() - 1) < CLOSE
    put_back = with_part(b, a, "maps.bias")
    removed = dict(zip(found.components, found.removed, strict=True))
    assert_close(removed["maps.bias"], squared_distance(b, put_back, x))
    assert removed["mask"] == 0


def test_infinities_within_a_weight_that_moves_stay(rng):
    a = masked()
    a.mask = nn.Parameter(a._buffers.pop("mask"))
    b = moved(a, rng)
    x = tnsim.Empirical(rng.normal(size=(5, 4, 3)))
    found = tnsim.change(a, b, x, by="parameter")

    def attention(weights, x):
        maps = x @ weights["maps.weight"].T + weights["maps.bias"]
        queries, keys, values = jnp.split(maps, 3, -1)
        scores = queries @ keys.swapaxes(-1, -2) + weights["mask"]
        return jax.nn.softmax(scores) @ values

    functions = (jax.tree_util.Partial(jax.jit(attention), state(net)) for net in (a, b))
    same = tnsim.change(*functions, x, by="parameter")
    by_name = dict(zip(same.components, same.share, strict=True))
    assert_close([by_name[n] for n in found.components], found.share, scale=LARGEST, rtol=1e-11)
    assert_close(found.share.sum(), 1.0, rtol=1e-3, limited_by="the nodes of an integral")


class Counted(nn.Sequential):
    """A network that counts its forward passes, those with gradients and those without."""

    passes: ClassVar[Counter] = Counter()

    def forward(self, x):
        self.passes[torch.is_grad_enabled()] += 1
        return super().forward(x)


@pytest.mark.parametrize("affine", [True, False])
def test_statistics_of_batch_norms_are_weights(affine):
    norm = nn.BatchNorm1d(6, affine=affine)
    a = Counted(nn.Linear(3, 6), norm, nn.GELU(), nn.Linear(6, 2)).eval()
    b = moved(a, generator(4), within="1.running")
    Counted.passes.clear()
    found = tnsim.change(a, b, tnsim.Empirical(X.astype(np.float32)))
    share, removed = (
        dict(zip(found.components, x, strict=True)) for x in (found.share, found.removed)
    )
    wanted = {"0": 0.0, "1": 1.0, "3": 0.0}
    assert_close([share[n] for n in wanted], [*wanted.values()], rtol=1e-6, limited_by="the nodes")
    assert_close(removed["1"], found.total, rtol=1e-12)
    assert Counted.passes[False] < 2 * Counted.passes[True]  # no difference for each of them


def test_statistics_of_a_batch_stand_beside_those_of_a_network():
    """A batch norm without statistics takes those of the batch, also where others have derivatives."""
    own = nn.BatchNorm1d(4, track_running_stats=False)
    a = nn.Sequential(nn.BatchNorm1d(3), nn.GELU(), nn.Linear(3, 4), own, nn.GELU()).double().eval()
    b = moved(a, generator(4), within="0.running")
    x = torch.as_tensor(X)
    found = tnsim.change(a, b, of=lambda network: network(x).square().mean())
    share = dict(zip(found.components, found.share, strict=True))
    assert_close(share["0"], 1.0, rtol=1e-6, limited_by="the nodes")


class Scaled(nn.Module):
    """A network of which some weights are buffers or parameters."""

    def __init__(self, are_buffers):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        for name, value in (("scale", torch.ones(4)), ("shift", torch.zeros(4))):
            if are_buffers:
                self.register_buffer(name, value)
            else:
                setattr(self, name, nn.Parameter(value))

    def forward(self, x):
        return torch.tanh(self.layer(x)) * self.scale + self.shift**2


def test_gradients_within_a_forward_pass_change_as_any_function():
    """Forces of an energy, of which PyTorch keeps a history where it is told to record none."""

    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_(True)
                energy = self.second(self.first(x) ** 3).sum()
                return torch.autograd.grad(energy, x, create_graph=True)[0]

    torch.manual_seed(0)
    net = Forces().double()
    nets = net, moved(net, generator(0))
    x = np.random.default_rng(0).normal(size=(20, 3))
    found = tnsim.change(*nets, tnsim.Empirical(x))
    before, after = (net(torch.tensor(x)).detach().numpy() for net in nets)
    assert_close(found.total, np.mean(np.sum((after - before) ** 2, axis=1)))
    assert_close(found.share.sum(), 1.0, rtol=1e-6, limited_by="nodes of the path")


@pytest.mark.parametrize("of", ["distance", lambda net: net(torch.as_tensor(X)).square().mean()])
def test_buffers_change_as_parameters_do(of):
    """By differences, as buffers may have no derivatives."""
    a = Scaled(True).double()
    ends, written = (a, moved(a, generator(2))), [Scaled(False).double() for _ in range(2)]
    for net, end in zip(written, ends, strict=True):
        net.load_state_dict(end.state_dict())
    found, wanted = (
        tnsim.change(*pair, tnsim.Empirical(X), of=of, by="parameter") for pair in (ends, written)
    )
    by_name = dict(zip(wanted.components, wanted.share, strict=True))
    share = [by_name[name] for name in found.components]
    # A central difference of step 1e-4 leaves 1e-8 / 6 of a third derivative, which was up to 5e-8
    # of the largest share over 32 draws.
    assert_close(found.share, share, scale=LARGEST, rtol=2e-6, limited_by="differences")


def test_parts_of_a_network_in_training_may_be_frozen():
    """Every part took the mode of the whole, and what is frozen counted as random."""
    a = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)).double()
    b = moved(a, generator(4), within="0")
    still = [copy.deepcopy(net).eval() for net in (a, b)]
    for net in (a, b):
        net[1:].eval()
    found = tnsim.change(a, b, tnsim.Empirical(X))
    assert a.training and found.total == tnsim.change(*still, tnsim.Empirical(X)).total


@pytest.mark.slow
def test_functions_of_jax_are_those_of_torch(pair):
    one, two = (jax.tree_util.Partial(of_jax, state(net)) for net in pair)
    metric = tnsim.Empirical(X)
    wanted, found = (tnsim.change(*nets, metric, by="block") for nets in (pair, (one, two)))
    by_name = dict(zip(found.components, found.share, strict=True))
    order = [by_name[name] for name in wanted.components]
    assert_close(order, wanted.share, scale=LARGEST, rtol=1e-11)
    by_name = dict(zip(found.components, found.removed, strict=True))
    assert_close([by_name[n] for n in wanted.components], wanted.removed, rtol=1e-11)

    def score(network):
        return jnp.tanh(network(X)).sum()

    split = tnsim.change(one, two, of=score)
    assert_close(split.total, float(score(two) - score(one)), rtol=1e-5, limited_by="float32")
    assert_close(split.share.sum(), 1.0, rtol=1e-3, limited_by="the nodes of an integral")


@pytest.mark.slow
def test_weights_of_two_classes_are_matched_by_name(rng):
    """Leaves of equal names and shapes stand in another order in another class."""
    here, there = namedtuple("here", "w v"), namedtuple("there", "v w")

    def run(weights, x):
        return jnp.tanh(x @ weights.w) @ weights.v

    w, v = rng.normal(size=(2, 3, 3))
    other_w, other_v = (w, v) + 0.1 * rng.normal(size=(2, 3, 3))
    a, *ends = (
        jax.tree_util.Partial(run, one)
        for one in (here(w, v), here(other_w, other_v), there(other_v, other_w))
    )

    def score(network):
        return (network(X) ** 2).sum()

    for of in (score, "distance"):
        one, two = (
            tnsim.change(a, b, tnsim.Empirical(X), by="parameter", of=of, dtype="float64")
            for b in ends
        )
        assert two.components == one.components[::-1] == ("v", "w")
        assert_close(two.share[::-1], one.share, scale=LARGEST, rtol=1e-12)
        assert_close(two.total, one.total, rtol=1e-12)


@pytest.mark.slow
def test_functions_of_jax_are_compiled_once(rng):
    """Each of hundreds of ways back was traced anew, which took longer than all the rest."""
    weights, moves, calls = rng.normal(size=(2, 3, 2)), 0.1 * rng.normal(size=(2, 3, 2)), []

    def run(weights, x):
        calls.append(x.shape)
        x = jnp.asarray(x)
        return (x @ weights["left"]) * (x @ weights["right"])

    def by_values(weights, x):
        return run(weights, x) if float(abs(x).max()) > 0 else x  # no program can ask this

    found, counts = [], []
    for function in (run, by_values):
        ends = [
            jax.tree_util.Partial(function, dict(zip(("left", "right"), arrays, strict=True)))
            for arrays in (weights, weights + moves)
        ]
        found.append(tnsim.change(*ends, tnsim.Empirical(X), by="parameter"))
        counts.append(len(calls))
    assert found[0].components == found[1].components
    assert_close(found[0].share, found[1].share, scale=LARGEST, rtol=1e-12)
    assert counts[0] < 30 < counts[1] - counts[0], counts


def deep(activation):
    return nn.Sequential(
        nn.Linear(3, 8), activation(), nn.Linear(8, 8), activation(), nn.Linear(8, 2)
    ).double()


def permuted(network, layer):
    """The same function, with the hidden units behind a layer in another order."""
    other, order = copy.deepcopy(network), torch.tensor([3, 1, 0, 7, 6, 2, 5, 4])
    with torch.no_grad():
        for weight in (other[layer].weight, other[layer].bias, other[layer + 2].weight.T):
            weight.copy_(weight[order])
    return other


@pytest.mark.full
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_deep_networks_run_on_normal_inputs(activation):
    a = deep(activation)
    b = moved(a, generator(5), within="2")
    found = tnsim.change(a, b)
    assert found.components == ("0", "2", "4")
    assert found.how == "weights exchanged, on 16,384 normal inputs"
    assert not found.exact
    assert_close(
        found.share, [0, 1, 0], scale=1.0, rtol=1e-3, limited_by="the nodes of an integral"
    )
    assert found.standard_error is not None
    # The models that files of such networks are read as.
    models = [tnsim.from_module(net) for net in (a, b)]
    other = tnsim.change(*models)
    assert other.components == ("layer 0", "layer 2", "layer 4")
    assert_close(other.share, found.share, scale=1.0, rtol=1e-9)
    assert_close(other.removed, found.removed, scale=LARGEST, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["distance", "similarity"])
def test_one_hidden_layer_is_exact_by_kernels(of):
    a = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    b = moved(a, generator(6), size=0.2)
    found = tnsim.change(a, b, of=of)
    assert found.components == ("layer 0", "layer 2")
    one, two = tnsim.from_module(a), tnsim.from_module(b)

    def apart(other):
        if of == "similarity":
            return 1 - tnsim.similarity(two, other)
        return float(tnsim.inner(two - other, two - other))

    for n, part in enumerate(("0", "2")):
        assert_close(found.removed[n], apart(tnsim.from_module(with_part(b, a, part))))
    assert_close(found.total, apart(one))
    # The same by forward passes.
    drawn = tnsim.change(a, b, tnsim.Empirical.normal(np.zeros(3), samples=4096), of=of)
    error = np.hypot(0, drawn.standard_error) * 6
    assert (abs(found.share - drawn.share) <= error + 1e-3).all()


@pytest.mark.parametrize("layers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_biases_that_begin_as_zeros_change_as_weights_do(layers):
    hidden = [nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(layers)]
    a = nn.Sequential(*hidden, nn.Linear(3, 2)).double()
    b = moved(a, generator(6), size=0.2)
    with torch.no_grad():
        for name, weight in a.named_parameters():
            weight *= not name.endswith("bias")
    metric = tnsim.Gaussian(samples=64) if layers == 1 else tnsim.Empirical(X)
    for one, two in ((a, b), (b, a)):
        found = tnsim.change(tnsim.from_module(one), tnsim.from_module(two), metric)
        assert_close(found.share.sum(), 1.0, rtol=1e-3, limited_by="the nodes of an integral")
        if layers == 2:
            assert_close(found.total, squared_distance(a, b, X), rtol=1e-12)
            back = [squared_distance(two, with_part(two, one, part), X) for part in "012"]
            assert_close(found.removed, back, rtol=1e-12)


@pytest.mark.filterwarnings("ignore:putting back any single component")
def test_standard_errors_of_a_similarity_are_those_of_its_norms_too():
    # One pair, of which the terms with norms held fixed have seven times the error of the shares.
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    b = copy.deepcopy(a)
    with torch.no_grad():
        for weight in b.parameters():
            weight += 0.3 * torch.randn(weight.shape)
    x = 3 + np.random.default_rng(0).normal(size=(8, 3))

    def split(inputs):
        return tnsim.change(a, b, tnsim.Empirical(inputs), of="similarity")

    left_out = np.array([split(np.delete(x, n, 0)).share for n in range(8)])
    wanted = jackknife_error(left_out)
    assert_close(split(x).standard_error, wanted, rtol=0.3, limited_by="terms of second order")


@pytest.mark.slow
def test_networks_without_common_weights_are_warned_of():
    a = deep(nn.ReLU)
    # The same function but for small moves, with hidden units in other orders.
    b = permuted(permuted(moved(a, generator(7), size=0.01), 0), 2)
    for net in (a, b):
        net.register_buffer("frozen", torch.ones(1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = tnsim.change(a, b, tnsim.Empirical(X))
    assert [str(one.message) for one in said] == list(found.caveats)
    assert any("no checkpoints of one network" in caveat for caveat in found.caveats)
    assert all(one.filename == __file__ for one in said)


def test_a_run_of_modules_by_distance_similarity_and_score():
    first = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2), nn.Tanh()).double()
    second = copy.deepcopy(first)
    with torch.no_grad():
        second[0].weight.add_(0.1)
    third = copy.deepcopy(second)
    with torch.no_grad():
        third[2].bias.add_(0.2)
    x = torch.randn(20, 3, dtype=torch.float64)

    def loss(net):
        return net(x).square().mean()

    data = tnsim.Empirical(x)
    for options in ({}, {"of": "similarity"}, {"of": loss}, {"by": "parameter"}):
        run = tnsim.change([first, second, third], metric=data, **options)
        assert run.labels == ("1", "2")
        for found, pair in zip(run.each, [(first, second), (second, third)], strict=True):
            alone = tnsim.change(*pair, data, **options)
            assert found.components == alone.components == run.components
            assert_close(found.share, alone.share, rtol=1e-12)
            assert_close(found.total, alone.total, rtol=1e-12)


def test_a_folder_of_a_run_is_its_checkpoints(tmp_path, rng):
    nets = [tnsim.Model([tnsim.Bilinear(*rng.normal(size=(3, 2, 2)))]) for _ in range(3)]
    for step, net in enumerate(nets):
        tnsim.save(net, tmp_path / f"step_{step * 10}.safetensors")
    found = tnsim.change(tmp_path)
    assert found.labels == ("10", "20")
    assert_close(found.total, tnsim.change(nets).total, rtol=1e-12)


@pytest.mark.slow
def test_a_transformer_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 16}
    a = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    ).eval()
    b = moved(a, generator(8), within="transformer.h.1.mlp")
    tokens = generator(9).integers(0, 11, (20, 12))
    found = tnsim.change(a, b, tnsim.Empirical(tokens))
    blocks = [
        f"transformer.h.{n}.{part}" for n in range(2) for part in ("ln_1", "attn", "ln_2", "mlp")
    ]
    # The readout is tied to the embedding.
    assert found.components == ("transformer.wte", "transformer.wpe", *blocks, "transformer.ln_f")
    place = found.components.index("transformer.h.1.mlp")
    assert_close(found.share[place], 1.0, rtol=1e-3, limited_by="the nodes of an integral")
    assert_close(found.removed[place], found.total, rtol=1e-12)
    assert_close(np.delete(found.removed, place), 0.0, scale=found.total, rtol=1e-12)


def test_groups_of_weights():
    names = ["pos", "h.0.attn.q.weight", "h.0.attn.k.weight", "h.0.norm.weight", "head.out.weight"]
    assert list(groups_of(names, "module")) == ["pos", "h.0.attn", "h.0.norm", "head.out"]
    assert list(groups_of(names, "block")) == ["pos", "h.0", "head.out"]
    assert list(groups_of(names, "parameter")) == names
    assert list(groups_of(names, 1)) == ["pos", "h", "head"]
    assert list(groups_of(names, ["h.0", "h.0.attn"])) == ["others", "h.0.attn", "h.0"]
    assert list(groups_of(["others.weight", "last"], ["others"])) == ["others", "all others"]
    normed = ["0.bias", "0.parametrizations.weight.original0", "parametrizations.weight.original"]
    assert list(groups_of(normed, "module")) == ["0", "parametrizations.weight"]
    for by in ("module", "block", "parameter", 1, 2, ["h"]):
        assert (np.sum(list(groups_of(names, by).values()), axis=0) == 1).all()


def renamed(pair):
    return pair[0], nn.Sequential(nn.Linear(3, 4)).double()


def reshaped(pair):
    other = copy.deepcopy(pair[1])
    other.embed = nn.Linear(5, 4).double()
    return pair[0], other


def other_code(pair):
    other = copy.deepcopy(pair[1])
    other.register_forward_hook(lambda *_: None)
    other.blocks = nn.ModuleList(reversed(list(other.blocks)))
    other.forward = lambda x: Products.forward(other, x) ** 2
    return pair[0], other


def random_in_training(pair):
    nets = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)).double()
    return nets, moved(nets, generator(0))


def bounded(pair):
    """Networks of which one has a bound that few inputs reach."""
    nets = [nn.Sequential(nn.Hardtanh(-v, v), pair[0].embed) for v in (2.5, 9.0)]
    return nets[0], moved(nets[1], generator(0))


def dotted(pair):
    """Functions of JAX, two weights of which have one dotted name."""
    weights = {"a.b": np.ones(4), "a": {"b": np.zeros(4)}}
    return [jax.tree_util.Partial(lambda x, w: x[:, :1] * w["a.b"], w=weights)] * 2


REFUSALS = [
    (renamed, {}, "only the first network has a weight 'embed.weight'"),
    (reshaped, {}, r"'embed.weight' has shape \(4, 3\) in the first network and \(4, 5\)"),
    (other_code, {}, "the two differ in more than weights"),
    (random_in_training, {}, "call module.eval"),
    (
        lambda pair: (nn.LazyLinear(2), nn.LazyLinear(2)),
        {},
        "has no weights yet, .* call the module",
    ),
    (random_in_training, {"of": score_of}, "code or random numbers"),
    (bounded, {}, "the first network computes something else"),
    (bounded, {"of": score_of}, "the first network computes something else"),
    (lambda pair: pair, {"by": [0]}, "by names '0', which begins no weight"),
    (lambda pair: (pair[0], pair[0]), {}, "the networks are the same function on these inputs"),
    (lambda pair: pair, {"by": "heads"}, "by must be one of module, block, parameter"),
    (lambda pair: pair, {"by": "head"}, "found Products; of any other network .* by='module'"),
    (lambda pair: pair, {"by": 0}, "by must be one of module, block, parameter"),
    (lambda pair: pair, {"by": 2.5}, "beginnings of names, found 2.5"),
    (lambda pair: pair, {"by": []}, r"beginnings of names, found \[\]"),
    (lambda pair: pair, {"by": ["embedding"]}, "'embedding', which begins no weight"),
    (lambda pair: pair, {"ends": True}, "ends= and align= are for polynomials"),
    (lambda pair: pair, {"of": "loss"}, "of must be one of distance, similarity, or a function"),
    (lambda pair: pair, {"of": lambda net: net.embed.weight}, "a score is a single number"),
    (lambda pair: pair, {"of": lambda net: 1.0}, "have one <lambda>"),
    (lambda pair: (pair[0], tnsim.from_module(pair[1])), {}, "the other is not"),
    (lambda pair: (pair[0], lambda x: x[:, :1] * np.ones(4)), {}, "one is no PyTorch module"),
    (lambda pair: (np.sin, np.cos), {}, "holds no weights"),
    (dotted, {}, "two weights are called 'a.b'"),
]


@pytest.mark.parametrize(("make", "options", "said"), REFUSALS)
def test_refusals(pair, make, options, said):
    with refused(said):
        tnsim.change(*make(pair), tnsim.Empirical(X), **options)


def test_models_that_are_compared_exactly_have_no_inputs():
    one, two = (
        tnsim.Model([tnsim.Linear([[1.0]]), tnsim.Elementwise(name)]) for name in ("relu", "gelu")
    )
    with refused("are the same function: there is no change"):
        tnsim.change(one, one)
    with refused("the two differ in more than weights"):
        tnsim.change(one, two)


def test_a_score_without_derivatives_is_refused(pair):
    x = torch.as_tensor(X)

    def loss(network):
        return network(x).sum().item()

    with refused(r"without \.item\(\)"):
        tnsim.change(*pair, of=loss)


def test_a_score_of_inputs_in_another_type_names_the_way(pair):
    x = torch.as_tensor(X, dtype=torch.float32)
    with refused(r"runs in float64.*x\.to\(next\(net\.parameters"):
        tnsim.change(*pair, of=lambda network: network(x).square().mean())
    with pytest.raises(RuntimeError, match=r"^its own$"):
        tnsim.change(*pair, of=lambda network: (_ for _ in ()).throw(RuntimeError("its own")))


def narrow(m, x):
    """A network that takes float32 alone, as the grouped products of experts do."""
    if x.dtype != torch.float32:
        raise RuntimeError("Expected mat_a to be Float32, got Double")
    return torch.tanh(m.layer(x))


def test_networks_of_narrow_types_name_the_way():
    a, b = (Module(narrow, layer=nn.Linear(X.shape[1], 2)) for _ in "ab")
    data = tnsim.Empirical(X.astype(np.float32))
    with refused(r"runs in float64 here.*dtype='float32'"):
        tnsim.change(a, b, data)
    share = tnsim.change(a, b, data, dtype="float32").share
    assert_close(share.sum(), 1.0, rtol=1e-3, limited_by="the nodes of an integral")
    for options in ({}, {"dtype": "float32"}):
        monitor = tnsim.torch.Monitor(data, every=1, by="module", **options)
        monitor(0, a)
        if not options:
            with refused(r"float64 here.*give dtype='float32'"):
                monitor(1, b)
    put_back = tnsim.change(a, b, data, dtype="float32")
    outputs = b(torch.as_tensor(X, dtype=torch.float32)).detach()
    size = float((outputs**2).sum() / len(X)) ** 0.5
    moved = monitor(1, b)["moved/layer"]
    assert_close(moved, put_back.removed[0] ** 0.5 / size, rtol=1e-5, limited_by="float32")
    with refused(r"or dtype='float32' where the network knows"):
        tnsim.change(a, b, of=lambda net: net(next(net.parameters()).new_ones(X.shape)).sum())


def test_derivatives_that_are_no_numbers_are_refused(pair):
    x = torch.as_tensor(X)

    def root(network):
        return network.embed.weight.sum() + (0 * network(x)).sum().sqrt()

    with refused("NaN or infinite", tnsim.TnsimError):
        tnsim.change(*pair, of=root)


@pytest.mark.parametrize("factor, said", [(1e200, "NaN or infinite"), (1e-200, "so small that")])
def test_squares_beyond_floats_are_no_equal_networks(factor, said):
    a = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for weight in a[2].parameters():
            weight.mul_(factor)
    b = copy.deepcopy(a)
    with torch.no_grad():
        b[2].weight.mul_(1.5)
    with refused(said, tnsim.TnsimError):
        tnsim.change(a, b, tnsim.Empirical(X))


def test_a_change_of_weights_without_one_of_the_function_is_refused():
    a = deep(nn.ReLU)
    b = permuted(a, 0)
    for of in ("distance", "similarity"):
        with refused("differ by less than rounding", tnsim.errors.ResultError):
            tnsim.change(a, b, tnsim.Empirical(X), of=of)


def test_a_path_that_is_too_rough_is_said(pair):
    a, b = pair
    x = torch.as_tensor(X[:1])

    def steps(network):
        return (2000 * network(x).sum()).sin()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = tnsim.change(a, b, of=steps)
    assert found.caveats
    assert "split the change at a checkpoint in between" in str(said[-1].message)


@pytest.mark.slow
def test_a_layer_that_did_not_change_adds_nothing_to_an_exact_change():
    rng = np.random.default_rng(0)
    read, write = rng.normal(size=(5, 3)), rng.normal(size=(2, 5))
    a, b = (
        tnsim.Model([tnsim.Linear(w * read), tnsim.Elementwise("tanh"), tnsim.Linear(write)])
        for w in (1.0, 1.2)
    )
    found = tnsim.change(a, b)
    changed, kept = np.argsort(-np.abs(found.share))[:2]
    assert found.share[kept] == 0 and found.removed[kept] == 0
    assert abs(found.share[changed] - 1) < 1e-3
    difference = b - a
    assert abs(found.removed[changed] / tnsim.inner(difference, difference) - 1) < 1e-9
    assert tnsim.inner(b - b, a) == 0


@pytest.mark.parametrize("on_inputs", [pytest.param(False, marks=pytest.mark.slow), True])
def test_skips_and_scales_of_residuals_change_with_their_layer(rng, on_inputs):
    shapes = (3, 2), (5, 3), (3, 5), (2, 3)
    drawn = [(rng.normal(size=shape), rng.normal(size=shape)) for shape in shapes]

    def layers(t):  # near each other, so that few nodes are enough
        read, gate, down, write = (weights + t * move for weights, move in drawn)
        gated = tnsim.Gated(gate, None, down, "gelu")
        wide = tnsim.Residual(gated, 1.0 - 2 * t, 0.7 + 2 * t)
        return [tnsim.Linear(read), wide, tnsim.Linear(write)]

    first, second = layers(0.0), layers(0.1)
    metric = tnsim.Empirical(rng.normal(size=(20, 2))) if on_inputs else tnsim.Gaussian()
    a, b = tnsim.Model(first), tnsim.Model(second)
    found = tnsim.change(a, b, metric)
    assert found.components == ("layer 0", "layer 1", "layer 2")
    assert abs(found.share.sum() - 1) < 1e-3
    for n, alone in enumerate(found.alone):
        other = tnsim.Model([*first[:n], second[n], *first[n + 1 :]])
        assert_close(alone, float(tnsim.inner(other - a, other - a, metric)))


@pytest.mark.parametrize("weights", [np.float64, np.float32])
def test_where_on_the_inputs_polynomials_differ(rng, weights):
    a, b = (
        tnsim.Model([tnsim.Bilinear(*[rng.normal(size=(3, 3)).astype(weights) for _ in range(3)])])
        for _ in "ab"
    )
    x, counts = rng.normal(size=(1030, 3)), rng.uniform(0.5, 2.0, size=1030)
    found = tnsim.change(a, b, tnsim.Empirical(x, counts))
    wide = [jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model) for model in (a, b)]
    squares = ((wide[1](x) - wide[0](x)) ** 2).sum(axis=1) * counts / counts.sum()
    assert_close(found.by_input, squares, rtol=1e-12)
    assert_close(found.by_input.sum(), found.total, rtol=1e-12)


def test_where_on_the_inputs_networks_differ(pair):
    a, b = pair
    with torch.no_grad():
        y = (b(torch.as_tensor(X)) - a(torch.as_tensor(X))).numpy()
    found = tnsim.change(a, b, tnsim.Empirical(X))
    assert_close(found.by_input, (y**2).sum(axis=1) / len(X), rtol=1e-12)
    # All directions together are the difference itself, and each is of length one.
    all_of_them = found.directions(100)
    assert len(all_of_them.direction) == y.shape[1]
    assert_close(all_of_them.along.values.T @ all_of_them.output.values, y, rtol=1e-11)
    assert_close(all_of_them.share.sum(), 1.0, rtol=1e-12)
    gram = all_of_them.output.values @ all_of_them.output.values.T
    assert_close(gram, np.eye(len(gram)), scale=1.0, rtol=1e-12)
    # No other direction holds more than the first.
    variances = np.linalg.eigvalsh(y.T @ y / len(X))[::-1] / found.total
    assert_close(found.directions(2).share, variances[:2], rtol=1e-11)


def test_where_on_sequences_networks_differ():
    a = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)).double()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b[0].weight[2] += 1.0  # one token has another embedding
    tokens = np.array([[0, 2, 1], [1, 1, 1], [2, 2, 3]])
    found = tnsim.change(a, b, tnsim.Empirical(tokens))
    assert found.by_input.shape == (3, 3)
    assert ((found.by_input > 0) == (tokens == 2)).all()
    leading = found.directions()
    assert leading.sizes == {"direction": 1, "coordinate": 3, "input": 3, "position": 3}
    assert_close(leading.share, [1.0])


def test_where_is_asked_of_inputs(pair):
    a, b = pair
    with refused(r"and no score; found networks scored"):
        tnsim.change(a, b, of=lambda net: net(torch.as_tensor(X)).square().mean()).directions()
    one, two = (tnsim.Model([tnsim.Bilinear([[1.0]], [[1.0]], [[w]])]) for w in (1.0, 2.0))
    with refused(r"give tnsim.Empirical\(inputs\), found gaussian"):
        tnsim.change(one, two).directions()
    with refused("count is a number of directions from 1, found 0"):
        tnsim.change(a, b, tnsim.Empirical(X)).directions(0)
