"""Sums of quimb networks: equal to quimb, to dense einsum and to `inner`; shared, bounded, transformed, refused."""

import tracemalloc
from types import SimpleNamespace

import backends
import cases
import cotengra
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quimb.tensor as qtn
from closeness import LARGEST, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from seeds import generator

import tnsim
import tnsim.engine.plan
from tnsim.engine import planner
from tnsim.engine.runtime import execution

pytestmark = pytest.mark.usefixtures("diagrams")


def by_quimb(networks, output_inds=()):
    total = 0.0
    for weight, network in networks:
        found = network.contract(output_inds=output_inds, optimize="greedy")
        total = total + weight * (found.data if output_inds else found)
    return total


def test_what_cannot_meet_is_zero(rng):
    """Centred inputs and an odd number of legs: no networks, and an inner product of 0."""
    a = tnsim.Model([cases.linear(rng, 3, 2)])
    b = tnsim.Model([cases.bilinear(rng, 3, 4, 2)])
    assert (
        tnsim.tensor_networks.contract(tnsim.tensor_networks.networks(a, b))
        == tnsim.inner(a, b)
        == 0
    )


SIZES = dict(zip("abcde", (1, 2, 3, 2, 3), strict=True))


@st.composite
def sums(draw):
    """Weighted networks with hyperindices, traces, scalars, outer products and copies."""
    entries = generator(draw(st.integers(0, 9)))
    some = st.lists(st.sampled_from(sorted(SIZES)), max_size=3).map(tuple)
    outputs = tuple(draw(st.lists(st.sampled_from("abcde"), unique=True, max_size=2)))
    arrays = {}
    terms = []
    for _ in range(draw(st.integers(1, 3))):
        inds = [*draw(st.lists(some, min_size=1, max_size=4)), outputs]
        operands = []
        for own in inds:
            shape = tuple(SIZES[index] for index in own)
            array = arrays.setdefault((shape, draw(st.booleans())), entries.normal(size=shape))
            operands.append((array, own))
        terms.append((draw(st.sampled_from([1.0, -1.0, 0.0, 2.5])), operands))
    return terms, outputs


@settings(max_examples=60)
@given(sums(), st.booleans())
def test_any_sum_is_dense_einsum(terms_and_outputs, scaled):
    terms, outputs = terms_and_outputs
    networks, dense, size = [], 0.0, 0.0
    for weight, operands in terms:
        tensors = [qtn.Tensor(array, inds) for array, inds in operands]
        networks.append((weight, qtn.TensorNetwork(tensors)))
        inputs = ",".join("".join(inds) for _, inds in operands)
        arrays = [array for array, _ in operands]
        equation = f"{inputs}->{''.join(outputs)}"
        dense = dense + weight * np.einsum(equation, *arrays)
        size = size + abs(weight) * np.einsum(equation, *map(np.abs, arrays))
    found = tnsim.tensor_networks.contract(networks, outputs, strip_exponent=scaled)
    if scaled:
        mantissa, exponent = found
        assert np.max(np.abs(mantissa)) in (0.0, 1.0)
        found = mantissa * 10.0**exponent
    assert_close(found, dense, scale=size, rtol=1e-12)


def chain(rng, count, size=4, **changed):
    """A closed ring of matrices, tagged by number."""
    tensors = []
    for n in range(count):
        array = changed.get(f"M{n}", rng.normal(size=(size, size)))
        tensors.append(qtn.Tensor(array, (f"i{n}", f"i{(n + 1) % count}"), {f"M{n}", "M"}))
    return qtn.TensorNetwork(tensors)


def test_outer_indices_are_quimbs(rng):
    a = qtn.Tensor(rng.normal(size=(2, 3)), ("i", "j"))
    b = qtn.Tensor(rng.normal(size=(3, 4)), ("j", "k"))
    turned = qtn.TensorNetwork([b, a])
    assert_close(tnsim.tensor_networks.contract(a & b), (a & b).contract().data)
    assert_close(tnsim.tensor_networks.contract([(1.0, a & b), (-1.0, turned)]), np.zeros((2, 4)))
    named = tnsim.tensor_networks.contract(a & b, ("k", "j"))
    assert_close(named, np.einsum("ij,jk->kj", a.data, b.data))
    assert_close(tnsim.tensor_networks.contract(a & b, ()), (a & b).contract(output_inds=()))


def test_copies_are_found_by_array_and_by_tag(rng):
    """(M M M M) needs two products where all are known to be one matrix, and three where not."""
    matrix = rng.normal(size=(128, 128))
    one = chain(rng, 4, **{f"M{n}": matrix for n in range(4)})
    equal = chain(rng, 4, **{f"M{n}": matrix.copy() for n in range(4)})
    plans = [
        tnsim.tensor_networks.contract_expression(networks, shared_tags=tags).plan
        for networks, tags in ((one, ()), (equal, ()), (equal, ["M"]), (equal, "M"))
    ]
    costs = [plan.multiplications for plan in plans]
    product, trace = 128**3, 128**2
    shared, apart = product + trace, 2 * product + trace
    assert costs == [shared, apart, shared, shared]
    with refused("tags 'M' are said to share one array, but theirs"):
        tnsim.tensor_networks.contract(chain(rng, 4), shared_tags=["M"])
    with refused("several groups of shared_tags"):
        tnsim.tensor_networks.contract(equal, shared_tags=["M", ("M", "M0")])


def test_sums_come_before_products(rng):
    """A sum of operators between two states is one operator: its cost does not grow with the sum."""
    ring = chain(rng, 3, 16)
    rest = [ring["M1"], ring["M2"]]
    costs = []
    for count in (1, 9):
        networks = []
        for n in range(count):
            operator = qtn.Tensor(rng.normal(size=(16, 16)), ("i0", "i1"))
            networks.append((0.5 + n, qtn.TensorNetwork([operator, *rest])))
        expression = tnsim.tensor_networks.contract_expression(networks)
        assert_close(expression(), by_quimb(networks), rtol=1e-12)
        costs.append(expression.plan.multiplications)
    assert costs[0] == costs[1] == 16**3 + 16**2


OPTIMIZERS = {
    "name": lambda: "greedy",
    "reusable": lambda: cotengra.ReusableHyperOptimizer(
        max_repeats=4, parallel=False, methods=["greedy"]
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_paths_by_an_optimiser_of_cotengra(name, rng):
    """Equal to quimb with the same optimiser, for vectors, open indices and large intermediates."""
    a, b = cases.pair(cases.SHALLOW["bilinear"], rng)
    networks = list(tnsim.tensor_networks.networks(a, b, tnsim.GaussianClosure()))
    found = tnsim.tensor_networks.contract(networks, optimize=OPTIMIZERS[name]())
    scale = sum(abs(weight * by_quimb([(1.0, network)])) for weight, network in networks)
    assert_close(found, by_quimb(networks), scale=scale, rtol=1e-11)
    chain = qtn.TN_rand_reg(10, 3, 4, seed=1, phys_dim=2)
    outer = chain.outer_inds()
    optimizer = OPTIMIZERS[name]()
    expression = tnsim.tensor_networks.contract_expression(chain, outer, optimize=optimizer)
    wanted = chain.contract(output_inds=outer, optimize=optimizer).data
    assert_close(expression(), wanted, scale=LARGEST, rtol=1e-12)
    searcher = "greedy" if name == "name" else type(optimizer).__name__
    assert expression.plan.searched_with.endswith(searcher)
    assert not tnsim.tensor_networks.contract_expression(chain, outer).plan.searched_with.endswith(
        searcher
    )


def test_an_optimiser_finds_the_path_that_runs(rng):
    """The path is the one of the optimiser, also where it is a bad one."""
    sizes = {"i": 2, "j": 30, "k": 30, "l": 30}
    pairs = ("ij", "jk", "kl")
    chain = qtn.TensorNetwork(
        [qtn.Tensor(rng.normal(size=[sizes[i] for i in pair]), pair) for pair in pairs]
    )

    class Last(cotengra.oe.PathOptimizer):
        def __call__(self, inputs, output, size_dict, memory_limit=None):
            ends = [n for n, labels in enumerate(inputs) if min(map(size_dict.get, labels)) == 30]
            return [tuple(ends), (0, 1)]

    bad = tnsim.tensor_networks.contract_expression(chain, ("i", "l"), optimize=Last())
    good = tnsim.tensor_networks.contract_expression(chain, ("i", "l"))
    assert bad.plan.multiplications == 30**3 + 2 * 30**2 and good.plan.multiplications == 4 * 30**2
    assert_close(bad(), good(), scale=LARGEST, rtol=1e-12)


def test_an_optimiser_for_one_contraction_is_refused_for_more(rng):
    a, b = cases.pair(cases.SHALLOW["bilinear biases"], rng)
    once = cotengra.HyperOptimizer(max_repeats=4, parallel=False, methods=["greedy"])
    with refused(r"another product.*ReusableHyperOptimizer"):
        tnsim.tensor_networks.contract(
            tnsim.tensor_networks.networks(a, b, tnsim.GaussianClosure()), optimize=once
        )


@pytest.mark.parametrize(
    "wrong",
    ["no such method", 3, [(0, 1)], np.eye(2), SimpleNamespace(search=lambda *_: None)],
)
def test_optimisers_without_a_path_are_refused(wrong, rng):
    chain = qtn.MPS_rand_state(4, 2, seed=1)
    with refused(r"^optimize.*name of a method of cotengra"):
        tnsim.tensor_networks.contract(chain, optimize=wrong)


def test_declared_symmetries_save_work(rng):
    half = rng.normal(size=(4, 4))
    matrix, vector = half + half.T, rng.normal(size=4)
    x = qtn.Tensor(vector, ("i",))
    middle = qtn.Tensor(matrix, ("i", "j"), {"COV"})
    # The product of the vector with the matrix from the left is that from the right.
    end = {"i": "j", "j": "k"}
    network = x & middle & middle.reindex(end) & x.reindex({"i": "k"})
    plain = tnsim.tensor_networks.contract_expression(network)
    told = tnsim.tensor_networks.contract_expression(network, symmetric_tags=["COV"])
    assert_close(told(), np.sum((matrix @ vector) ** 2))
    assert_close(plain(), told())
    assert told.plan.multiplications < plain.plan.multiplications
    with refused("declared symmetric, but its axes are not exch"):
        told({"COV": half})


def test_networks_of_one_inner_product_share_their_arrays(rng):
    """The sum of 19 networks costs a fraction of what they cost one by one."""
    a, b = cases.pair(cases.DEEP["two bilinear"], rng)
    networks = list(tnsim.tensor_networks.networks(a, b, tnsim.GaussianClosure(np.ones(3))))
    expression = tnsim.tensor_networks.contract_expression(networks)
    assert len(networks) == 19 and len(expression.networks.leaves) < 20
    assert expression.plan.multiplications < 0.4 * expression.plan.unshared_multiplications
    assert repr(expression).startswith("Expression(a sum of 19 networks over 18 arrays, outputs ()")


def test_exponents_are_quimbs(rng):
    ring = chain(rng, 3)
    value = ring.contract()
    large = chain(rng, 3, **{f"M{n}": 1e150 * ring[f"M{n}"].data for n in range(3)})
    with refused("left the range of float64; use strip_exponent=True", tnsim.TnsimError):
        tnsim.tensor_networks.contract(large)
    terms = chain(rng, 3, **{f"M{n}": abs(ring[f"M{n}"].data) for n in range(3)}).contract()
    # A logarithm is off by the relative error of its number, which is eps for the sum of absolute
    # terms; and 450 in float64 by up to 6e-14.
    scale = terms / abs(value)
    for dtype, rtol, reason in (("float64", 2e-12, None), ("float32", 1e-5, "float32")):
        mantissa, exponent = tnsim.tensor_networks.contract(large, strip_exponent=True, dtype=dtype)
        assert mantissa == np.sign(value)
        assert_close(
            exponent, 450 + np.log10(abs(value)), scale=scale, rtol=rtol, limited_by=reason
        )
    twice = [(1.0, large), (1e300, ring)]  # different arrays in different units, one sum
    mantissa, exponent = tnsim.tensor_networks.contract(twice, strip_exponent=True)
    assert_close(mantissa * 10 ** (exponent - 450), value, rtol=1e-10)
    small = ring.copy()
    small.exponent = 2.0
    assert_close(tnsim.tensor_networks.contract([(1.0, small), (-50.0, ring)]), 50 * value)
    large.exponent = -450.0
    with refused(r"exponents of the networks differ by 452, .* call network.distribute_exponent"):
        tnsim.tensor_networks.contract([(1.0, large), (1.0, small)], strip_exponent=True)
    assert tnsim.tensor_networks.contract([(0.0, ring)], strip_exponent=True) == (0.0, 0.0)
    for wrong in (-np.inf, 2j, np.ones(2)):
        large.exponent = wrong
        with refused("the exponent of network 0 is no finite real number"):
            tnsim.tensor_networks.contract(large)


def test_nothing_is_lost_on_the_way(rng):
    """Small arrays first would underflow, though what they are multiplied with makes up for it."""
    ring = chain(rng, 4)
    value = ring.contract()
    scales = (1e-200, 1e-200, 1e200, 1e200)
    arrays = {f"M{n}": scale * ring[f"M{n}"].data for n, scale in enumerate(scales)}
    mixed = chain(rng, 4, **arrays)
    assert_close(tnsim.tensor_networks.contract(mixed), value, rtol=1e-11)
    assert_close(tnsim.tensor_networks.contract([(1.0, mixed), (1.0, ring)]), 2 * value, rtol=1e-11)
    expression = tnsim.tensor_networks.contract_expression(ring)
    assert_close(expression(arrays), value, rtol=1e-11)


@pytest.mark.slow
def test_a_vector_goes_through_more_matrices_than_python_calls_functions():
    turn = np.roll(np.eye(8), 1, axis=1)
    tensors = [qtn.Tensor(np.arange(8.0), ("i0",))]
    tensors += [qtn.Tensor(turn.copy(), (f"i{n}", f"i{n + 1}")) for n in range(1001)]
    found = tnsim.tensor_networks.contract(qtn.TensorNetwork(tensors))
    assert_close(found, np.arange(8.0) @ turn, rtol=1e-12)


@pytest.mark.crossing
@pytest.mark.parametrize("backend", ["jax", "numpy"])
@pytest.mark.parametrize("dtype, rtol", [("float64", 1e-11), ("float32", 1e-4)])
def test_long_sums_without_cancellation_have_an_exponent(dtype, rtol, backend):
    """The partition function of an Ising ring, whose transfer matrix has a larger eigenvalue.

    Powers of ten stayed at the smallest float32, as 5 / 8 of it is rounded to it, and were many powers too large.
    """
    count = 800  # of a value of 1e366
    bond = np.exp(0.9 * np.array([[1.0, -1.0], [-1.0, 1.0]]))
    ring = [qtn.Tensor(bond, (f"s{n}", f"s{(n + 1) % count}")) for n in range(count)]
    tens = [qtn.Tensor(np.full(4, 10.0), ("h",)) for _ in range(count)]
    for tensors, log in ((ring, np.log(2 * np.cosh(0.9))), (tens, np.log(10.0))):
        network = qtn.TensorNetwork(tensors)
        mantissa, exponent = tnsim.tensor_networks.contract(
            network, (), strip_exponent=True, dtype=dtype, backend=backend
        )
        wanted = count * log / np.log(10) + (np.log10(4.0) if tensors is tens else 0.0)
        assert_close(exponent + np.log10(mantissa), wanted, rtol=rtol, limited_by="float32")


def powers(exponent, size):
    """A network with the value `size * 10**exponent`."""
    vectors = [qtn.Tensor(np.array([x]), ("i",)) for x in (size, 1.0)]
    network = qtn.TensorNetwork(vectors)
    network.exponent = exponent
    return network


@pytest.mark.parametrize(("exponent", "size"), [(-400.0, 1e200), (400.0, 1e-200), (2.0, 1e-300)])
def test_an_exponent_makes_up_for_its_arrays(exponent, size):
    found = tnsim.tensor_networks.contract(powers(exponent, size))
    assert_close(found, np.exp(np.log(size) + exponent * np.log(10)), rtol=1e-11)


@pytest.mark.parametrize(
    "network", [powers(-200.0, 1e-200), (1e-300, powers(0.0, 1e-100)), (1e300, powers(0.0, 1e10))]
)
def test_a_sum_beyond_the_range_of_floats_is_no_zero(network):
    with refused("left the range of float64; use strip_exponent", tnsim.TnsimError):
        tnsim.tensor_networks.contract([network])


@pytest.mark.parametrize("size", [1e-60, 1e60])
def test_weights_beyond_float32_are_taken_in_float32(size):
    sum_of_two = [(size, powers(0.0, 1.0)), (2 * size, powers(0.0, 3.0))]
    found = tnsim.tensor_networks.contract(sum_of_two, dtype="float32")
    assert_close(found / size, 7.0, rtol=1e-6, limited_by="float32")
    mantissa, exponent = tnsim.tensor_networks.contract(
        sum_of_two, dtype="float32", strip_exponent=True
    )
    assert_close(mantissa * 10 ** (exponent - np.log10(size)), 7.0, rtol=5e-6, limited_by="float32")


@pytest.mark.parametrize("sizes", [(1e-60, 1e30, 1e30), (1e60, 1e-30, 1e-30), (1e-20, 1e-20, 1e40)])
def test_arrays_beyond_float32_meet_in_float32(sizes):
    chain = [size * np.diag([1.0, 2.0]) for size in sizes]
    tensors = [qtn.Tensor(x, (f"i{n}", f"i{n + 1}")) for n, x in enumerate(chain)]
    found = tnsim.tensor_networks.contract(qtn.TensorNetwork(tensors), dtype="float32")
    assert_close(found, np.diag([1.0, 8.0]), scale=1.0, rtol=1e-5, limited_by="float32")


def test_sums_that_vanish_keep_their_shape(rng):
    tensor = qtn.Tensor(rng.normal(size=(2, 3)), ("i", "j"))
    other = qtn.Tensor(tensor.data, ("i", "j"))
    for networks in (
        [(0.0, tensor.as_network())],
        [(1.0, tensor.as_network()), (-1.0, other.as_network())],
    ):
        np.testing.assert_array_equal(tnsim.tensor_networks.contract(networks), np.zeros((2, 3)))
    assert tnsim.tensor_networks.contract([]) == 0.0
    with refused("no networks says nothing of the sizes of 'i'"):
        tnsim.tensor_networks.contract([], ("i",))


ONE, TWO = (
    qtn.Tensor(np.ones((2, 3)), inds, "T").as_network() for inds in (("i", "j"), ("i", "k"))
)
REFUSED = {
    "equal outer indices: network 0 has 'i', 'j', network 1 has 'i', 'k'": [(1, ONE), (1, TWO)],
    r"item 1 is \(int, Tensor\)": [(1, ONE), (1, ONE["T"])],
    "weight of network 0 is no finite number: nan": [(np.nan, ONE)],
    "network 0 has no tensors": [(1.0, qtn.TensorNetwork([]))],
    "'i' of network 0 has sizes 2 and 3": qtn.TensorNetwork(
        [qtn.Tensor(np.ones(2), "i"), qtn.Tensor(np.ones(3), "i")]
    ),
    "tensor of network 0 with the indices 'i' must hold numbers, found dtype <U1": qtn.Tensor(
        np.array(["x", "y"]), "i"
    ).as_network(),
    "indices 'i' must hold numbers, found dtype key<fry>": qtn.Tensor(
        jax.random.split(jax.random.key(0)), "i"
    ).as_network(),
    "indices 'i' has 1 NaN or infinite": qtn.Tensor([np.inf, 1.0], "i").as_network(),
    "the outputs 'i', 'j' have sizes": [
        (1, ONE),
        (1, qtn.Tensor(np.ones((4, 3)), "ij").as_network()),
    ],
}


def test_a_plain_list_of_networks_is_added_up(rng):
    networks = [chain(rng, 3) for _ in range(2)]
    expected = sum(network.contract() for network in networks)
    assert_close(tnsim.tensor_networks.contract(networks), expected)


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_sum_is_refused(message):
    with refused(message):
        tnsim.tensor_networks.contract(REFUSED[message])


def test_what_fits_no_expression_is_refused(rng):
    with refused("network 0 lacks the outputs 'x'; it has 'i', 'j'"):
        tnsim.tensor_networks.contract(ONE, ("x",))
    with refused("output_inds names an index twice"):
        tnsim.tensor_networks.contract(ONE, ("i", "i"))
    with refused("backend must be 'jax' or 'numpy', found 'torch'"):
        tnsim.tensor_networks.contract(ONE, backend="torch")
    with refused("dtype must be one of float64, float32"):
        tnsim.tensor_networks.contract(ONE, dtype="int8")
    ring = tnsim.tensor_networks.contract_expression(chain(rng, 3))
    with refused("'M' stand for 3 different arrays: give more tags"):
        ring({"M": np.eye(4)})
    with refused("no tensor carries the tags 'N'; there are 'M', 'M0'"):
        ring({"N": np.eye(4)})
    with refused(r"tags are texts, or tuples of texts, in a list; found \[0\]"):
        ring({0: np.eye(4)})
    with refused(
        "arrays of Expression.__call__ must be a mapping or None", tnsim.errors.OptionError
    ):
        ring(np.eye(4))
    with refused(r"'M', 'M0' has shape \(3, 3\), planned was \(4, 4"):
        ring({"M0": np.eye(3)})


def test_chunks_that_save_memory_stay_within_the_multiplications(rng, monkeypatch):
    """All of six tensors joined: a loop over a bond computes some products in every turn."""
    monkeypatch.setattr(planner, "LARGE", 2**10)
    bonds = [[f"{min(i, j)}{max(i, j)}" for j in range(6) if j != i] for i in range(6)]
    network = qtn.TensorNetwork([qtn.Tensor(rng.normal(size=(3,) * 5), own) for own in bonds])
    plan = tnsim.tensor_networks.contract_expression(network).plan
    memory, work = 0.6 * plan.interpreted_bytes, plan.multiplications
    chunked = tnsim.tensor_networks.contract_expression(network, budget=tnsim.Budget(memory)).plan
    assert chunked.interpreted_bytes <= memory and chunked.multiplications > work
    with refused("multiplications here, more than the budget of", tnsim.TooLarge):
        tnsim.tensor_networks.contract_expression(network, budget=tnsim.Budget(memory, work))


def test_budgets_hold_before_anything_starts(rng, monkeypatch):
    ring = chain(rng, 6, 8)
    monkeypatch.setattr(execution, "run", lambda *_: pytest.fail("started"))
    with refused(r"a network needs \S+ GiB here.*contract fewer netw", tnsim.TooLarge):
        tnsim.tensor_networks.contract(ring, budget=tnsim.Budget(memory_bytes=100))
    with refused(r"a sum of 2 networks needs .* multiplications here", tnsim.TooLarge):
        twice = [(1.0, ring), (2.0, chain(rng, 6, 8))]
        tnsim.tensor_networks.contract(twice, budget=tnsim.Budget(multiplications=10))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("sizes", [(700, 2, 700), (1000, 1000, 1)])
def test_large_sums_and_large_arrays_take_the_memory_that_is_told(dtype, sizes, rng):
    """A sum of 512 MiB took 2 GiB, of which the plan told 0.7; units took two arrays beside each."""
    a, b, c = sizes
    left, right = rng.normal(size=(a, b)).astype(dtype), np.ones((b, c), dtype)
    network = qtn.Tensor(left, "ac") & qtn.Tensor(right, "cb")
    tnsim.tensor_networks.contract(network, backend="numpy", dtype=dtype)
    tracemalloc.start()
    run = tnsim.tensor_networks.contract_expression(network, backend="numpy", dtype=dtype)
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    told = run.plan.interpreted_bytes
    assert told / 1.5 < peak < 1.1 * told


def test_arrays_of_any_library(rng):
    torch = pytest.importorskip("torch")
    ring = chain(rng, 3)
    expected = ring.contract()
    scale = np.prod([np.linalg.norm(tensor.data) for tensor in ring])  # entries may cancel
    for convert in (torch.tensor, jnp.asarray, lambda x: x.astype(np.float32)):
        other = ring.copy()
        other.apply_to_arrays(convert)
        assert_close(
            tnsim.tensor_networks.contract(other),
            expected,
            scale=scale,
            rtol=1e-5,
            limited_by="float32",
        )


@pytest.mark.slow
@backends.compiled
def test_an_expression_is_a_function_of_arrays(rng, backend):
    """Called, jitted, mapped and differentiated with new arrays by tag; what is not given stays."""
    a, b = cases.pair(cases.DEEP["two bilinear"], rng)
    networks = list(tnsim.tensor_networks.networks(a, b, tnsim.TreeSymmetric()))
    expression = tnsim.tensor_networks.contract_expression(networks)
    tags = ("A", "LAYER0", "DOWN")
    (tensor, *_) = networks[0][1].select_tensors(tags, which="all")
    down = rng.normal(size=a.layers[0].down.shape)
    new = tensor.data.copy()
    new[1:, : down.shape[1]] = down  # beside it the constant: a row, and the unit that computes it
    changed = tnsim.Bilinear(a.layers[0].left, a.layers[0].right, down)
    expected = tnsim.inner(tnsim.Model([changed, *a.layers[1:]]), b, tnsim.TreeSymmetric())

    assert_close(expression(), tnsim.inner(a, b, tnsim.TreeSymmetric()), rtol=1e-10)
    assert_close(expression({tags: new}), expected, rtol=1e-10)
    assert_close(
        tnsim.tensor_networks.contract(networks, backend="numpy"), expression(), rtol=1e-12
    )
    with jax.enable_x64(True):
        several = jnp.stack([new, 2 * new, tensor.data])
        mapped = jax.jit(jax.vmap(lambda x: expression({tags: x})))(several)
        assert_close(mapped, [expression({tags: x}) for x in several], rtol=1e-10)
        gradient = jax.grad(lambda x: expression({tags: x}))(jnp.asarray(new))
        step = 1e-6 * rng.normal(size=new.shape)
        rise = expression({tags: new + step}) - expression({tags: new - step})
        assert_close(
            rise, 2 * float((gradient * step).sum()), rtol=1e-5, limited_by="finite differences"
        )


@pytest.mark.slow
@backends.compiled
def test_scaled_results_differentiate(rng, backend):
    """Units are constants: the gradient of mantissa times 10**exponent is that of the value."""
    ring = chain(rng, 3)
    scaled = tnsim.tensor_networks.contract_expression([(1.0, ring)], strip_exponent=True)
    plain = tnsim.tensor_networks.contract_expression(ring)

    def value(arrays):
        mantissa, exponent = scaled(arrays)
        return mantissa * 10.0**exponent

    with jax.enable_x64(True):
        arrays = {"M1": jnp.asarray(rng.normal(size=(4, 4)))}
        assert_close(jax.grad(value)(arrays)["M1"], jax.grad(plain)(arrays)["M1"], rtol=1e-10)


@backends.compiled
def test_networks_may_be_made_inside_a_trace(rng, backend):
    matrix, vector = rng.normal(size=(3, 3)).astype("f4"), np.ones(3, np.float32)

    def form(x):
        left, right = (qtn.Tensor(x, (index,)) for index in "ij")
        return tnsim.tensor_networks.contract(left & qtn.Tensor(matrix, ("i", "j")) & right)

    found = jax.grad(form)(vector)
    assert found.dtype == np.float32
    expected, scale = (x @ vector for x in (matrix + matrix.T, abs(matrix) + abs(matrix.T)))
    assert_close(found, expected, scale=scale, rtol=1e-5, limited_by="float32")


@pytest.mark.parametrize("scaled", [False, True])
def test_complex_networks(scaled, rng):
    """As in quimb: <psi|U|psi> of a random state, whose bra is the conjugate of its ket."""
    ket = qtn.MPS_rand_state(4, bond_dim=3, dtype="complex128", seed=0)
    gate = qtn.Tensor(rng.normal(size=(2, 2)) + 1j * rng.normal(size=(2, 2)), ("b1", "k1"))
    bra = ket.H
    norm = bra & ket
    moved = bra.reindex({"k1": "b1"}) & gate & ket
    networks = [(1.0, norm), (-0.5, moved)]
    expected = norm.contract() - 0.5 * moved.contract()
    found = tnsim.tensor_networks.contract(networks, strip_exponent=scaled)
    if scaled:
        mantissa, exponent = found
        assert_close(abs(mantissa), 1.0)
        found = mantissa * 10**exponent
    assert_close(found, expected, rtol=1e-12)
    assert isinstance(found, complex)  # a number, as that of a real sum
    single = tnsim.tensor_networks.contract_expression(networks, dtype="complex64")
    assert_close(single(), expected, rtol=1e-5, limited_by="float32")
    assert single.plan.input_bytes == 8 * sum(np.size(t.data) for t in moved.tensors)
    assert tnsim.engine.plan.Plan.from_json(single.plan.to_json()) == single.plan
    with refused("hold complex numbers, which float64 does not"):
        tnsim.tensor_networks.contract(networks, dtype="float64")
    real = tnsim.tensor_networks.contract_expression(chain(rng, 3))
    with refused("must hold real numbers, found dtype complex128"):
        real({"M0": 1j * np.eye(4)})


@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_weights_of_networks_may_be_complex(rng, backend):
    x, y, z = (rng.normal(size=(3, 3)) for _ in range(3))
    chains = [qtn.Tensor(x, ("i", "j")) & qtn.Tensor(one, ("j", "k")) for one in (y, z)]
    weights = 2.0 - 1.5j, np.complex64(0.25j)
    found = tnsim.tensor_networks.contract(
        list(zip(weights, chains, strict=True)), ("i", "k"), backend=backend
    )
    expected = x @ (weights[0] * y + complex(weights[1]) * z)
    assert_close(found, expected, scale=LARGEST, rtol=1e-12)
    mantissa, exponent = tnsim.tensor_networks.contract(
        [(1e-200j, chains[0]), (1e-200, chains[0])],
        ("i", "k"),
        strip_exponent=True,
        backend=backend,
    )
    found = mantissa * 10.0 ** (exponent + 200)
    assert_close(found, (1 + 1j) * x @ y, scale=LARGEST, rtol=1e-12)
    only = tnsim.tensor_networks.contract(
        [(0j, chains[0]), (1j, chains[1])], ("i", "k"), backend=backend
    )
    assert_close(only, 1j * x @ z, scale=LARGEST, rtol=1e-12)
    real = qtn.Tensor(x, ("i", "j"), "REAL") & qtn.Tensor(y, ("j", "k"))
    turned = tnsim.tensor_networks.contract_expression([(1j, real)], ("i", "k"), backend=backend)
    with jax.enable_x64(True):
        traced = jax.jit(lambda new: turned({"REAL": new}))(z)
    assert_close(traced, 1j * z @ y, scale=LARGEST, rtol=1e-12)
    beyond = 10**400, np.dtype("g").type("1e400")
    for wrong in (
        "one",
        float("nan"),
        complex(0, float("inf")),
        [1.0],
        [[1], [1, 2]],
        None,
        *beyond,
    ):
        with refused("the weight of network 0 is no finite number"):
            tnsim.tensor_networks.contract([(wrong, chains[0])])
    with refused("float64 does not"):
        tnsim.tensor_networks.contract([(1j, chains[0])], dtype="float64")
