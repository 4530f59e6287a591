"""The compiled function that runs many steps at a call: the bits of NumPy, and when it is loaded."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import drawn, programs
from test_interpreter import interpreted, plan_of

import tnsim
from tnsim import Session, using
from tnsim.cli import bench
from tnsim.engine.ir import step_table, steps
from tnsim.engine.ir.program import Operation, Program
from tnsim.engine.ir.steps import Step, View
from tnsim.engine.runtime import executor, interpreter

pytestmark = pytest.mark.skipif(
    executor._gemm_address("float64") is None,
    reason="NumPy has another BLAS than that of its wheels",
)


def both(plan, arrays, threads=1, over=None, sizes=()):
    """What a plan gives step by step, and with the compiled function."""
    outcomes = []
    for loading in (np.inf, 0.0):
        with pytest.MonkeyPatch.context() as patch, using(Session()):
            patch.setattr(executor, "_LOADING", loading)
            outcomes.append(interpreted(plan, arrays, threads, over, sizes))
    return outcomes


def assert_same_bits(one, other):
    for name, value in one.values.items():
        np.testing.assert_array_equal(value, other.values[name])
    for key, exponent in one.exponents.items():
        np.testing.assert_array_equal(exponent, other.exponents[key])


@settings(max_examples=200)
@given(programs(), st.sampled_from(["float64", "float32"]))
def test_programs_of_any_operations(program, dtype):
    plan = plan_of(program, dtype)
    arrays = dict(zip(plan.shapes, drawn(program.shapes, dtype), strict=True))
    assert_same_bits(*both(plan, arrays))


@settings(max_examples=200)
@given(st.data())
def test_products_of_matrices_in_any_order(data):
    """Batches, repeated axes, transposed matrices, vectors, and a matrix times its transpose."""
    sizes = {label: data.draw(st.sampled_from([1, 2, 3, 5, 17])) for label in range(5)}
    labels = st.lists(st.sampled_from(range(5)), min_size=1, max_size=4, unique=True)
    first, second = tuple(data.draw(labels)), tuple(data.draw(labels))
    args = data.draw(st.sampled_from([(0, 1), (0, 0)]))
    if args == (0, 0):  # the second reading of the first array, its axes exchanged
        second = tuple(data.draw(st.permutations(first)))
        sizes = dict.fromkeys(range(5), sizes[0])
    shapes = tuple(tuple(sizes[label] for label in each) for each in (first, second))
    both_have = sorted({*first} & {*second})
    summed = data.draw(st.sets(st.sampled_from(both_have))) if both_have else set()
    out = tuple(data.draw(st.permutations(sorted({*first, *second} - summed))))
    product = Operation("contract", args, (first, second), out)
    program = Program(shapes, (product,), (2,))
    plan = plan_of(program)
    assert_same_bits(*both(plan, dict(zip(plan.shapes, drawn(shapes), strict=True))))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "metric", [tnsim.Gaussian(), tnsim.GaussianClosure()], ids=lambda m: m.name
)
def test_whole_plans(metric, dtype, threads, monkeypatch, diagrams):
    """Bound plans and others, with parts of steps and lanes of loops shared by threads."""
    a, b = (bench.random_stack(12, 9, 2, dtype, seed) for seed in (1, 2))
    plan = tnsim.plan(a, b, metric, cosine=True).contraction
    arrays = dict(zip(plan.shapes, drawn(plan.shapes.values(), dtype), strict=True))
    small = both(plan, arrays, threads)
    monkeypatch.setattr(steps, "_PART", 2**8)
    monkeypatch.setattr(steps, "_PART_ENTRIES", 2**6)
    monkeypatch.setattr(steps, "_BLOCK", 4)
    monkeypatch.setattr(steps, "_SHARED", 0.0)
    monkeypatch.setattr(interpreter, "_SMALL", 0)
    plan = tnsim.plan(a, b, metric, cosine=True).contraction
    parts = both(plan, arrays, threads)
    assert_same_bits(*small)
    assert_same_bits(*parts)


@pytest.mark.parametrize("size", [17, 130])
def test_two_inputs_that_are_one_array(size, monkeypatch):
    """NumPy multiplies a matrix with its own transpose in another way than two arrays of equal numbers."""
    monkeypatch.setattr(interpreter, "_SMALL", 0)  # a bound plan copies its inputs
    shape = size, 3 * size
    product = Operation("contract", (0, 1), ((0, 1), (2, 1)), (0, 2))
    (x,) = drawn([shape])
    plan = plan_of(Program((shape, shape), (product,), (2,)))
    assert_same_bits(*both(plan, {"in0": x, "in1": x}))
    assert_same_bits(*both(plan, {"in0": x, "in1": x.copy()}))


@pytest.mark.usefixtures("diagrams")
def test_stacks_of_models(rng):
    a, b = (bench.random_stack(5, 4, 2, "float64", seed) for seed in (1, 2))
    plan = tnsim.plan(a, b, tnsim.Gaussian(), cosine=True).contraction
    over = {name: (True,) for name in plan.shapes if name.startswith("B.")}
    arrays = {
        n: rng.normal(size=(3, *shape) if n in over else shape) for n, shape in plan.shapes.items()
    }
    assert_same_bits(*both(plan, arrays, over=over, sizes=(3,)))


def test_numbers_beyond_floats_are_those_of_numpy():
    square = Operation("contract", (0, 0), ((0, 1), (0, 1)), (0, 1))
    less = Operation("sum", (1, 0), ((0, 1), (0, 1)), (0, 1), (1.0, -1.0))
    program = Program(((2, 3),), (square, less), (2,))
    numbers = np.array([[np.inf, -0.0, 1e300], [np.nan, 5e-324, -1.0]])
    one, other = both(plan_of(program), {"in0": numbers})
    np.testing.assert_array_equal(one.values["out0"], other.values["out0"])


def test_steps_that_numpy_computes_in_ways_of_its_own_have_no_row():
    def row(x, y, z):
        return step_table._row(Step("matmul", (x, y), z), (x, y, z), 8)

    x, z = View(0, 0, (4, 4), (32, 8)), View(2, 0, (4, 4), (32, 8))
    assert row(x, View(1, 0, (4, 4), (32, 8)), z) is not None
    assert row(x, View(0, 0, (4, 4), (8, 32)), z) is None  # times its own transpose
    assert row(View(0, 0, (1, 4), (32, 8)), x, View(2, 0, (1, 4), (32, 8))) is None  # a vector
    assert row(View(0, 0, (4, 4), (64, 16)), x, z) is None  # every second entry
    seven = View(0, 0, (2,) * 7, tuple(8 * 2**n for n in range(7)))
    assert step_table._row(Step("copy", (seven,), seven), (seven, seven), 8) is None


def test_the_function_is_loaded_when_work_repays_it(monkeypatch):
    monkeypatch.setattr(executor, "_state", executor._State())
    monkeypatch.setattr(executor, "_loaded", lambda dtype: dtype)
    real, complex_ = np.dtype("float64"), np.dtype("complex128")
    assert executor.executor(real, 60_000) is None
    assert executor.executor(complex_, 20_000) is None
    assert executor.executor(real, 20_000) == "float64"
    assert executor.executor(real, 0) == "float64"
    assert executor.executor(complex_, 200_000) is None


def test_threads_go_on_while_one_of_them_loads(monkeypatch):
    monkeypatch.setattr(executor, "_state", executor._State())
    real, others = np.dtype("float64"), []

    def loaded(dtype):
        with ThreadPoolExecutor(1) as pool:
            others.append(pool.submit(executor.executor, real, 10**6).result())
        return dtype

    monkeypatch.setattr(executor, "_loaded", loaded)
    assert executor.executor(real, 10**6) == "float64"
    assert others == [None]
    assert executor.executor(real, 0) == "float64"


def test_no_call_is_long(monkeypatch, diagrams):
    """An interrupt is noticed between calls."""
    a, b = (bench.random_stack(12, 9, 2, "float64", seed) for seed in (1, 2))
    plan = tnsim.plan(a, b, tnsim.Gaussian()).contraction
    arrays = dict(zip(plan.shapes, drawn(plan.shapes.values()), strict=True))
    calls, call = [], executor.Executor.call
    monkeypatch.setattr(
        executor.Executor, "call", lambda self, *args: calls.append(args[2:]) or call(self, *args)
    )
    numbers, counts = [], []
    for seconds in (np.inf, 0.0):
        monkeypatch.setattr(interpreter, "_UNINTERRUPTED", seconds)
        numbers.append(both(plan, arrays)[1])
        counts.append(len(calls))
        assert seconds or all(last - first == 1 for first, last in calls[counts[0] :])
    assert_same_bits(*numbers)
    assert counts[1] - counts[0] > counts[0] > 0


def test_without_numba_steps_are_called_one_by_one(monkeypatch):
    monkeypatch.setattr(executor, "_state", executor._State())
    monkeypatch.setitem(sys.modules, "tnsim.engine.runtime.executor_kernel", None)
    assert executor.executor(np.dtype("float64"), 10**6) is None


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2]])
@pytest.mark.parametrize("kind", ["*.nbi", "*.nbc"])
def test_a_damaged_file_of_numba_is_made_again(damage, kind, tmp_path, monkeypatch):
    """As a full disk leaves it; it ended every later call."""
    from numba.core import config

    from tnsim.engine.runtime import executor_kernel

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(executor_kernel, "_run_of", _little_run_of)  # which numba compiles at once
    assert executor_kernel.kernel("float64") is not None
    (path,) = tmp_path.rglob(kind)
    path.write_bytes(damage(sound := path.read_bytes()))
    taken = np.zeros((1, step_table.COLUMNS), np.int64), 0, np.zeros(1, np.int64), 0, 0, 0, 0, 1.0
    for _ in range(2):
        run = executor_kernel.kernel("float64")
        assert run is not None and run(*taken) is None
        # Compiled again it is a few bytes longer or shorter, by the numbers in its names.
        assert len(path.read_bytes()) > 0.9 * len(sound)


def _little_run_of(layout):
    def run(rows, weights, addresses, first, last, gemm, item, one):
        addresses[0] += layout[0]

    return run
