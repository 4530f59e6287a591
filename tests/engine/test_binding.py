"""Interpreted plans: the numbers of `einsum`, in the memory that was planned, on any number of threads."""

import dataclasses
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import eager
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import drawn, programs
from refusals import refused

import tnsim
from tnsim import Session, using
from tnsim.cli import bench
from tnsim.engine import costs
from tnsim.engine.ir.program import Operation, PlanStage, Program
from tnsim.engine.plan import Plan
from tnsim.engine.runtime import binding, execution
from tnsim.engine.runtime.binding import stacked_stages

pytestmark = pytest.mark.usefixtures("diagrams")


def plan_of(program, dtype="float64"):
    """A plan of one stage that runs a program."""
    names = tuple(f"in{n}" for n in range(len(program.shapes)))
    outputs = tuple(f"out{n}" for n in range(len(program.outputs)))
    groups = tuple(f"g{n}" for n in range(len(program.scales)))
    stage = PlanStage(0, names, outputs, groups)
    shapes = dict(zip(names, program.shapes, strict=True))
    scales = dict.fromkeys(outputs, ())
    return Plan("none", True, dtype, 1, (program,), (stage,), shapes, outputs, scales)


def interpreted(plan, arrays, over=MappingProxyType({})):
    return execution.run(plan, arrays, "interpret", over)


def of_program(program, arrays, dtype="float64"):
    plan = plan_of(program, dtype)
    found = interpreted(plan, dict(zip(plan.shapes, arrays, strict=True)))
    return [*found.values.values()], [*found.exponents.values()]


@pytest.mark.slow
@settings(max_examples=300)
@given(programs(), st.sampled_from([("float64", 1e-12), ("float32", 4e-5), ("complex128", 1e-12)]))
def test_programs_of_any_operations(program, precision):
    """In float32 the worst error of 20 seeds is 1.1e-6, nine roundings."""
    dtype, rtol = precision
    arrays = drawn(program.shapes, dtype)
    wanted, _ = eager.run_program(program, list(arrays))
    found, _ = of_program(program, arrays, dtype)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, scale=max(np.abs(other).max(initial=0.0), 1.0), rtol=rtol,
                     limited_by="float32")  # fmt: skip


@pytest.mark.slow
@settings(max_examples=200)
@given(programs())
def test_programs_whose_operations_run_at_once(program):
    """The same bits, whichever thread runs what."""
    arrays = drawn(program.shapes)
    found = []
    for threads in (1, 3):
        with pytest.MonkeyPatch.context() as patch, using(Session()):
            patch.setattr(costs, "runs_at_once", lambda program: True)
            patch.setattr(binding, "processors", lambda threads=threads: threads)
            # Products, copies and what is computed entry by entry are cut into blocks.
            for name, least in (("_LARGE", 8), ("_LEAST_SIDE", 1), ("_LARGE_ENTRIES", 4)):
                patch.setattr(binding, name, least)
            found.append(of_program(program, arrays)[0])
    for one, other, wanted in zip(*found, eager.run_program(program, arrays)[0], strict=True):
        assert np.array_equal(one, other)
        size = max(np.abs(wanted).max(initial=0.0), 1.0)
        assert_close(one, wanted, scale=size, rtol=1e-12)


@pytest.mark.slow
@settings(max_examples=300)
@given(programs(), st.randoms(use_true_random=False))
def test_memory_of_operations_at_once(program, random):
    """No order in which threads may begin and end operations takes more than is planned."""
    order, over, first = binding._order(program), costs.overwritten(program), len(program.shapes)
    calls = binding.bind(program).calls
    sizes = [int(np.prod(shape)) for shape in program.value_shapes]
    waits, alive, running, done = list(order.waits), {}, {}, set()
    begun, peak, passed = set(), 0, 0
    while len(done) < len(calls):
        ready = [n for n, count in enumerate(waits) if not count and n not in begun]
        ready = [n for n in ready if n <= passed + order.ahead]
        if ready and len(running) < costs.AT_ONCE and (not running or random.random() < 0.6):
            n = random.choice(ready)
            begun.add(n)
            op = program.operations[n]
            running[n] = costs.beside(op, program.sizes[n], sizes[first + n])
            if over[n] is not None:
                alive.pop(op.args[over[n]])
            if first + n not in program.outputs:
                alive[first + n] = sizes[first + n]
            peak = max(peak, sum(alive.values()) + sum(running.values()))
            continue
        n = random.choice([*running])
        del running[n]
        done.add(n)
        for later in order.then[n]:
            waits[later] -= 1
        while passed in done:
            for number in {*calls[passed].dead, first + passed}:
                if number not in program.readers or number in calls[passed].dead:
                    alive.pop(number, None)
            passed += 1
    with pytest.MonkeyPatch.context() as patch, using(Session()):
        patch.setattr(costs, "runs_at_once", lambda program: True)
        assert peak <= costs.stage_elements(program)


@pytest.mark.slow
@settings(max_examples=30)
@given(programs())
def test_programs_of_any_operations_in_jax(program):
    arrays = drawn(program.shapes)
    wanted, _ = eager.run_program(program, arrays)
    with execution.precision():
        found, _ = binding.BoundStage.of(program, None, jnp)([jnp.asarray(x) for x in arrays])
    for one, other in zip(found, wanted, strict=True):
        assert_close(
            np.asarray(one), other, scale=max(np.abs(other).max(initial=0.0), 1.0), rtol=1e-12
        )


def test_a_loop_in_blocks_and_a_loop_inside(rng):
    """sum over blocks of two of x[2n:2n+2] y[2n:2n+2], each entry by a loop of its own over the third axis."""
    inner = Program(((2, 3), (2, 3)), (Operation("contract", (0, 1), ((0, 1), (0, 1)), ()),), (2,))
    third = Operation("loop", (0, 1), ((0, 1, 2), (0, 1, 2)), (), chunks=(2,), body=inner)
    body = Program(((2, 3, 5), (2, 3, 5)), (third,), (2,))
    loop = Operation("loop", (0, 1), ((0, 1, 2), (1, 0, 2)), (), chunks=(0,), body=body, block_size=2,
                     concurrency=2)  # fmt: skip
    swapped = Operation("contract", (1,), ((0, 1, 2),), (1, 0, 2))
    program = Program(((6, 3, 5), (6, 3, 5)), (swapped, loop), (3,))
    body_swapped = Operation("contract", (1,), ((0, 1, 2),), (1, 0, 2))
    body = Program(((2, 3, 5), (3, 2, 5)), (body_swapped, third._replace(args=(0, 2))), (3,))
    program = dataclasses.replace(
        program, operations=(swapped, loop._replace(args=(0, 2), body=body))
    )
    x, y = drawn(program.shapes)
    ((found,), _), ((wanted,), _) = of_program(program, [x, y]), eager.run_program(program, [x, y])
    assert_close(found, np.sum(x * y), scale=np.abs(x * y).sum(), rtol=1e-13)
    assert_close(found, wanted, scale=np.abs(x * y).sum(), rtol=1e-13)


@pytest.mark.parametrize(
    "numbers", [[0.0, 0.0], [0.0, -3.0], [np.inf, 1.0], [np.nan, 1.0], [1e300, 1e-300]]
)
def test_zero_infinity_and_nan_are_those_of_compiled_programs(numbers):
    square = Operation("contract", (0, 0), ((0,), (0,)), (0,))
    same = Operation("sum", (0,), ((0,),), (0,), (2.0,))
    program = Program(((2,),), (square, same), (1, 2), ((0, 2),), (((0, 2),), ((0, 1),)))
    plan, arrays = plan_of(program), {"in0": np.array(numbers)}
    found = interpreted(plan, arrays)
    with execution.precision():
        compiled = execution.run(plan, arrays)
    for name, value in found.values.items():
        np.testing.assert_array_equal(value, np.asarray(compiled.values[name]))
    for key, log in found.exponents.items():
        assert_close(log, np.asarray(compiled.exponents[key]), rtol=1e-14)


def test_a_trace_is_divided_by_its_scale():
    """A number that comes of a diagonal is an array, which can be written to."""
    trace = Operation("contract", (0,), ((0, 0),), ())
    double = Operation("sum", (1,), ((),), (), (2.0,))
    program = Program(((2, 2),), (trace, double), (1, 2), ((0, 1),), (((0, 1),), ((0, 1),)))
    outputs, exponents = of_program(program, [np.diag([3.0, 5.0])])
    assert [float(x) for x in outputs] == [0.5, 1.0] and exponents == [4.0]


def test_what_is_written_over_is_no_view_of_another_value():
    """A value that is read under other labels is memory of its own."""
    double = Operation("sum", (0,), ((0,),), (0,), (2.0,))
    view = Operation("contract", (1,), ((0,),), (0,))
    squares = Operation("contract", (1, 0), ((0,), (0,)), (0,))  # the last that reads the doubles
    both = Operation("sum", (2, 3), ((0,), (0,)), (0,), (1.0, 1.0))
    program = Program(((2,),), (double, view, squares, both), (4,))
    (found,), _ = of_program(program, [np.array([3.0, 5.0])])
    assert found.tolist() == [2 * x + 2 * x**2 for x in (3.0, 5.0)]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("metric", [tnsim.TreeSymmetric(), tnsim.Gaussian()], ids=lambda m: m.name)
def test_the_bits_are_those_of_one_thread(metric, at_once, monkeypatch):
    """Products are cut into blocks or run at once, and loops are cut into lanes, whatever the number of threads."""
    monkeypatch.setattr(costs, "_MIDDLE", (2**8 if at_once else 2**60, 2**61))
    monkeypatch.setattr(binding, "_LARGE", 2**8)
    monkeypatch.setattr(binding, "_LARGE_ENTRIES", 2**6)
    monkeypatch.setattr(binding, "_LEAST_SIDE", 4)
    monkeypatch.setattr(binding, "REPAYS", 0.0)
    tnsim.session().clear()  # equal programs, bound with the usual sizes
    a, b = (bench.random_stack(12, 9, 2, "float64", seed) for seed in (1, 2))
    plan = tnsim.plan(a, b, metric, cosine=True).contraction
    assert at_once == any(map(costs.runs_at_once, plan.programs))
    arrays = dict(zip(plan.shapes, drawn(plan.shapes.values()), strict=True))
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(binding, "processors", lambda threads=threads: threads)
        found.append(interpreted(plan, arrays))
    one, *others = found
    for other in others:
        for name, value in one.values.items():
            assert np.array_equal(value, other.values[name])
        assert one.exponents == other.exponents


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("depth, metric", [(2, tnsim.Gaussian()), (3, tnsim.GaussianClosure())])
@pytest.mark.parametrize("stack", [0, 4])
def test_threads_may_run_one_plan(depth, metric, stack, rng):
    """Further runs compute the bits of a first one, on other arrays, and leave earlier results alone."""
    a, b = (bench.random_stack(5, 4, depth, "float64", seed) for seed in (1, 2))
    plan = tnsim.plan(a, b, metric, cosine=True).contraction
    over = {name: (True,) for name in plan.shapes if name.startswith("B.")} if stack else {}
    several = []
    for _ in range(3):
        shapes = {n: (stack, *shape) if n in over else shape for n, shape in plan.shapes.items()}
        several.append({name: rng.normal(size=shape) for name, shape in shapes.items()})
    wanted = []
    for arrays in several:
        with using(Session()):
            wanted.append(interpreted(plan, arrays, over))
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(interpreted, plan, several[n % 3], over) for n in range(30)]
        found = [run.result() for run in runs]
    for n, one in enumerate(found):
        for name, value in wanted[n % 3].values.items():
            assert np.array_equal(one.values[name], value)
        for key, exponent in wanted[n % 3].exponents.items():
            assert np.array_equal(one.exponents[key], exponent)


@pytest.mark.parametrize(
    "threads, at_once", [(1, None), (3, None), (3, "operations"), (1, "operations"), (1, "stages")]
)
def test_memory_is_within_half_of_what_was_planned(threads, at_once, monkeypatch):
    monkeypatch.setattr(binding, "processors", lambda: threads)
    monkeypatch.setattr(costs, "_AT_ONCE_SECONDS", 0.0 if at_once == "stages" else np.inf)
    monkeypatch.setattr(costs, "_MIDDLE", (2**21 if at_once else 2**60, 2**61))
    tnsim.session().clear()
    a, b = (bench.random_stack(40, 50, 2, "float64", seed) for seed in (1, 2))
    plan = tnsim.plan(a, b, cosine=at_once == "stages").contraction
    arrays = dict(zip(plan.shapes, drawn(plan.shapes.values()), strict=True))
    interpreted(plan, arrays)  # binds the plan
    tracemalloc.start()
    interpreted(plan, arrays)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    rounds = binding.prepared(plan.whole, 8, stacked_stages(plan, (), {})[0]).rounds
    assert at_once != "stages" or any(len(each.stages) > 1 for each in rounds)
    assert bool(at_once) == any(map(costs.runs_at_once, plan.programs))
    own = plan.interpreted_bytes - plan.input_bytes
    assert own > 2**20  # beside which views and calls are little
    assert peak < own + 2**16
    # A plan counts what runs at once whatever the machine has of cores, and whatever threads come
    # together: one thread, and threads that miss each other, need less.
    assert at_once or own < 1.5 * peak


def check_stacks(plan, over):
    """Two models on one side, three on the other: runs on stacks are those one by one."""
    stacks, arrays = (2, 3), {}
    for name, shape in plan.shapes.items():
        own = [size for size, has in zip(stacks, over.get(name, ()), strict=False) if has]
        (arrays[name],) = drawn([(*own, *shape)], seed=len(arrays))
    found = execution.run(plan, arrays, "interpret", over)
    with execution.precision():
        compiled = execution.run(plan, arrays, over=over)
    for pair in np.ndindex(stacks):
        # Of an array that lacks a stacked axis every pair reads the same.
        own = {
            name: x[tuple(n for n, has in zip(pair, over.get(name, ()), strict=False) if has)]
            for name, x in arrays.items()
        }
        wanted = eager.run(plan, own)
        for run in (found, compiled):
            for name, value in wanted.values.items():
                one = np.broadcast_to(run.values[name], (*stacks, *value.shape))[pair]
                size = max(np.abs(value).max(initial=0.0), 1.0)
                assert_close(one, value, scale=size, rtol=1e-12)
            for key, log in wanted.exponents.items():
                one = np.broadcast_to(run.exponents[key], stacks)[pair]
                assert_close(one, log, scale=1.0, rtol=1e-12)


@pytest.mark.slow
def test_stacks_are_runs_one_by_one():
    """Norms have the axis of one side."""
    a, b = (bench.random_stack(4, 5, 3, "float64", seed) for seed in (1, 2))
    plan = tnsim.plan(a, b, tnsim.GaussianClosure(), cosine=True).contraction
    axes = {"A": (True, False), "B": (False, True)}
    check_stacks(plan, {name: axes[name[0]] for name in plan.shapes if name[1] == "."})


@pytest.mark.slow
@settings(max_examples=20)
@given(programs(), st.data())
def test_stacks_of_any_programs(program, data):
    plan, axes = plan_of(program), st.tuples(st.booleans(), st.booleans())
    check_stacks(plan, {name: data.draw(axes) for name in plan.shapes})


# --- tiers -----------------------------------------------------------------------------------


def test_a_session_knows_three_tiers():
    with refused("tier must be one of auto, interpret, compile, found 'jit'"):
        Session(tier="jit")


@pytest.mark.slow
def test_a_processor_runs_numpy_unless_the_session_asks_for_xla():
    a, b = (bench.random_stack(8, 8, 2, "float64", seed) for seed in (1, 2))
    found = {}
    for tier in ("auto", "interpret", "compile"):
        with using(Session(tier=tier)) as fresh:
            assert execution.tier_in_use() == ("compile" if tier == "compile" else "interpret")
            found[tier] = tnsim.inner(a, b)
            assert bool(len(fresh.programs)) == (tier == "compile")
    assert found["auto"] == found["interpret"]
    assert_close(found["compile"], found["auto"], rtol=1e-12)


def test_batches_take_the_time_of_their_number():
    a, b = (bench.random_stack(8, 8, 2, "float64", seed) for seed in (1, 2))
    plan = tnsim.plan(a, b, tnsim.TreeSymmetric()).contraction
    over = {name: (name.startswith("A"), name.startswith("B")) for name in plan.shapes}
    once, batch = execution.seconds_of(plan), execution.seconds_of(plan, 1, 4, over)
    assert once < batch < 16 * once
    assert_close(execution.seconds_of(plan, 3), 3 * once, rtol=1e-12)
    assert_close(execution.seconds_of(plan, 33, 4, over), 3 * batch, rtol=1e-12)


@pytest.mark.slow
def test_a_store_keeps_its_tier(tmp_path):
    pytest.importorskip("xarray")
    models = [bench.random_stack(20, 4, 2, "float64", seed) for seed in range(3)]
    stored = {}
    for tier in ("interpret", "compile"):
        with using(Session(tier=tier)):
            run = tnsim.pairwise(models, tnsim.TreeSymmetric(), store=tmp_path / tier)
            assert run.attrs["tier"] == tier and run.attrs["plan"].startswith("contractions")
            stored[tier] = run.similarity.values
    assert_close(stored["interpret"], stored["compile"], scale=1.0, rtol=1e-12)
    with using(Session(tier="compile")):
        again = tnsim.pairwise(models, tnsim.TreeSymmetric(), store=tmp_path / "interpret")
    assert again.attrs["tier"] == "interpret"
    assert np.array_equal(again.similarity.values, stored["interpret"])
