"""Orders of axes that spare copies: the same numbers, of the same shapes."""

import pytest
from closeness import LARGEST, assert_close
from eager import run_program
from oracles import bilinear, closure_products, expected_products
from seeds import generator

import tnsim
from tnsim import using
from tnsim.engine.ir.program import Operation, Program
from tnsim.engine.search import sharing
from tnsim.engine.search.sharing import laid_out, moved

pytestmark = pytest.mark.usefixtures("diagrams")


@pytest.fixture
def always(monkeypatch):
    """However small values are."""
    monkeypatch.setattr(sharing, "LARGE", 0)


def all_moved(program):
    return sum(moved(op, op.sizes(program.value_shapes)) for op in program.operations)


def a_program(rng, length):
    """Random products and sums of matrices and of what they give."""
    shapes = [(2, 3), (3, 2), (2, 2), (3, 3)]
    sizes = list(shapes)
    operations = []
    for _ in range(length):
        one, other = rng.choice(len(sizes), 2)
        first = tuple(range(len(sizes[one])))
        second = []
        for n, size in enumerate(sizes[other]):
            alike = [label for label in first if sizes[one][label] == size and label not in second]
            second.append(rng.choice(alike) if alike and rng.random() < 0.7 else 10 + n)
        of = dict(zip((*first, *second), (*sizes[one], *sizes[other]), strict=True))
        single = [x for x in of if (x in first) != (x in second)]
        both = [x for x in of if x in first and x in second and rng.random() < 0.3]
        output = tuple(int(x) for x in rng.permutation([*single, *both]))
        if not 1 <= len(output) <= 4:
            continue
        labels = first, tuple(map(int, second))
        operations.append(Operation("contract", (int(one), int(other)), labels, output))
        sizes.append(tuple(of[x] for x in output))
        order = tuple(map(int, rng.permutation(len(output))))
        turned = Operation("sum", (len(sizes) - 1,), (tuple(range(len(output))),), order, (2.0,))
        operations.append(turned)
        sizes.append(tuple(sizes[-1][n] for n in order))
    return Program(tuple(shapes), tuple(operations), (len(sizes) - 1, len(sizes) - 2))


@pytest.mark.parametrize("seed", range(20))
def test_the_numbers_stay(seed, always):
    rng = generator(seed)
    program = a_program(rng, 8)
    found = laid_out(program)
    inputs = [rng.normal(size=shape) for shape in program.shapes]
    for one, other in zip(
        run_program(program, inputs)[0], run_program(found, inputs)[0], strict=True
    ):
        assert_close(one, other, scale=LARGEST, rtol=1e-12)
    assert all_moved(found) <= all_moved(program)


def test_a_copy_is_spared(always):
    """x[i, j, k] = a[i, j] b[j, k] is summed over j: as x[i, k, j] it is a matrix already."""
    outer = Operation("contract", (0, 1), ((0, 1), (1, 2)), (0, 1, 2))
    later = Operation("contract", (3, 2), ((0, 1, 2), (1, 3)), (0, 2, 3))
    program = Program(((30, 30),) * 3, (outer, later), (4,))
    assert all_moved(program) and all_moved(laid_out(program)) < all_moved(program)
    assert laid_out(program).value_shapes[-1] == program.value_shapes[-1]


@pytest.mark.parametrize("metric", [tnsim.Gaussian(), tnsim.GaussianClosure()])
def test_inner_products_are_those_of_the_oracle(metric, rng, always, tmp_path, monkeypatch):
    monkeypatch.setenv("TNSIM_CACHE_DIR", str(tmp_path))  # plans are searched anew
    models = [tnsim.Model([bilinear(rng, 3, 4, 3, False) for _ in range(2)]) for _ in range(2)]
    products = closure_products if isinstance(metric, tnsim.GaussianClosure) else expected_products
    with using(tnsim.Session()):
        found = tnsim.inner(*models, metric)
    assert_close(found, products(*models, metric).sum(), rtol=1e-10)


def test_a_sum_of_many_terms_has_few_orders(always):
    """Every permutation of twelve terms was tried, which took half a minute for language models."""
    terms = tuple(
        Operation("contract", (0, 1), ((0, 1), (1, 2)), (2, 0) if n % 2 else (0, 2))
        for n in range(12)
    )
    labels = tuple((1, 0) if n % 2 else (0, 1) for n in range(12))
    total = Operation("sum", tuple(range(2, 14)), labels, (0, 1), (1.0,) * 12)
    product = Operation("contract", (14, 15), ((0, 1), (1, 2)), (0, 2))
    shapes = ((3, 3), (3, 3))
    operations = (*terms, total, Operation("sum", (14,), ((0, 1),), (1, 0), (2.0,)), product)
    program = Program(shapes, operations, (16,))
    assert len(sharing._orders(list(operations), 14, [12, 13, 14])) <= 2
    found = laid_out(program)
    assert all_moved(found) <= all_moved(program)
