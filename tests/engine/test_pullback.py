"""Derivatives of programs and plans along pullbacks, against complex steps.

Programs are polynomials, and NumPy runs them on complex numbers: f(x + i h v) = f(x) + i h f'(x) v + O(h^2), without
a difference that would cancel, so a step of 1e-30 gives the derivative along v to rounding.
"""

import tracemalloc

import eager
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sequence_cases
from cases import SHALLOW, pair
from closeness import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import drawn, programs
from refusals import refused

import tnsim
from tnsim.cli import bench
from tnsim.engine import costs
from tnsim.engine.ir.program import Operation, Program
from tnsim.engine.planner import Budget, check_pullbacks
from tnsim.engine.runtime import binding, execution
from tnsim.engine.runtime import gradients as gradients_module
from tnsim.engine.runtime.compiling import Wanted
from tnsim.engine.runtime.gradients import gradients, pulled_back, run_kept, vjp

pytestmark = pytest.mark.usefixtures("diagrams")

STEP = 1e-30


def moved(arrays, directions):
    return [x + 1j * STEP * v for x, v in zip(arrays, directions, strict=True)]


def along(slopes, values):
    """Derivatives paired with values, and the scale of the terms of the sum."""
    terms = [x * y for x, y in zip(slopes, values, strict=True)]
    return sum(x.sum() for x in terms), sum(abs(x).sum() for x in terms)


@pytest.mark.slow
@settings(max_examples=200)
@given(programs(), st.data())
def test_ways_back_of_any_programs(program, data):
    """Contractions, diagonals, sums and loops; some inputs wanted, some outputs given."""
    wanted = tuple(data.draw(st.booleans()) for _ in program.shapes)
    given = tuple(data.draw(st.booleans()) for _ in program.outputs)
    arrays = drawn(program.shapes)
    directions = [w * v for w, v in zip(wanted, drawn(program.shapes, seed=1), strict=True)]
    changed, _ = eager.run_program(program, moved(arrays, directions))
    chosen = [out for out, is_given in zip(changed, given, strict=True) if is_given]
    cotangents = drawn([out.shape for out in chosen], seed=2)
    expected, size = along(cotangents, [out.imag / STEP for out in chosen])
    found = vjp(program, given, wanted)
    value = 0.0
    if found is not None:
        before = [x.copy() for x in (*arrays, *cotangents)]
        slopes = found.bound([*(arrays[n] for n in found.reads), *cotangents])
        assert all(map(np.array_equal, before, (*arrays, *cotangents)))
        assert [x.shape for x in slopes] == [program.shapes[n] for n in found.gives]
        value, _ = along(slopes, [directions[n] for n in found.gives])
    assert_close(value, expected, scale=max(size, 1.0), rtol=1e-11)


def test_a_loop_over_blocks():
    """Turns of three rows of A, and of all of B: the derivative in A is put together of blocks."""
    product = Operation("contract", (0, 1), ((0, 1), (1, 2)), (0, 2))
    total = Operation("contract", (2, 2), ((0, 2), (0, 2)), (2,))
    body = Program(((3, 4), (4, 5)), (product, total), (3,))
    labels = ((0, 1), (1, 2))
    loop = Operation("loop", (0, 1), labels, (2,), chunks=(0,), body=body, block_size=3)
    program = Program(((6, 4), (4, 5)), (loop,), (2,))
    a, b, slope = drawn([(6, 4), (4, 5), (5,)])
    first, second = vjp(program, (True,), (True, True)).bound([a, b, slope])
    # sum_rc s_c (AB)_rc^2 has the derivatives 2 (AB s) B^T and 2 A^T (AB s).
    weighted = 2 * (a @ b) * slope
    assert_close(first, weighted @ b.T, scale="largest", rtol=1e-13)
    assert_close(second, a.T @ weighted, scale="largest", rtol=1e-13)


@pytest.mark.slow
@settings(max_examples=20)
@given(programs(), st.data())
def test_ways_back_of_any_programs_in_jax(program, data):
    """The same derivatives, loops included; inputs that derivatives do not read are left out."""
    wanted = tuple(data.draw(st.booleans()) for _ in program.shapes)
    way = vjp(program, (True,) * len(program.outputs), wanted)
    if way is None:
        return
    given = tuple(range(len(program.outputs)))
    work = gradients_module._TracedWay(program, given, way.reads, way.gives, ())
    read = [drawn(program.shapes)[n] for n in way.reads]
    slopes = drawn([program.value_shapes[n] for n in program.outputs], seed=2)
    with execution.precision():
        inputs = [jnp.asarray(x) for x in (*read, *slopes)]
        found, _ = gradients_module._traced(Wanted(work, None, "float64"))(inputs)
    for one, other in zip(found, way.bound([*read, *slopes]), strict=True):
        assert_close(
            np.asarray(one), other, scale=max(np.abs(other).max(initial=0.0), 1.0), rtol=1e-11
        )


def stacks(width, depth):
    return [bench.random_stack(width, width + 1, depth, "float64", seed) for seed in (1, 2)]


WORKS = {
    "one bilinear layer": lambda rng: (*stacks(4, 1), tnsim.Gaussian()),
    "biases": lambda rng: (*pair(SHALLOW["bilinear biases"], rng), tnsim.Gaussian([0.5, 0.0, 0.1])),
    "diagrams": lambda rng: (*stacks(3, 2), tnsim.Gaussian()),
    "a deep tree": lambda rng: (*stacks(4, 4), tnsim.TreeSymmetric()),
    "a deep closure": lambda rng: (*stacks(4, 3), tnsim.GaussianClosure()),
    "whole trees": lambda rng: (*stacks(3, 2), tnsim.Symmetric()),
    "attention": lambda rng: (
        *sequence_cases.pair(sequence_cases.ONE_LAYER["plain"], 2),
        tnsim.Gaussian(),
    ),
    "attention with biases": lambda rng: (
        *sequence_cases.pair(sequence_cases.ONE_LAYER["biases"], 2),
        tnsim.Gaussian(),
    ),
    "a transformer": lambda rng: (
        *sequence_cases.pair(sequence_cases.ONE_LAYER["transformer"], 2),
        tnsim.GaussianClosure(),
    ),
}
DEAR = ("attention", "attention with biases", "a transformer")


def slopes_and_steps(plan, wanted, seed=0):
    """Derivatives of a plan along a direction, by its pullback and by a complex step, and a scale."""
    arrays = dict(zip(plan.shapes, drawn(plan.shapes.values(), seed=seed), strict=True))
    directions = dict(zip(plan.shapes, drawn(plan.shapes.values(), seed=seed + 1), strict=True))
    slopes = dict(zip(plan.outputs, drawn(plan.output_shapes.values(), seed=seed + 2), strict=True))
    with execution.precision():
        result, kept = run_kept(pulled_back(plan, wanted), arrays)
        found = gradients(kept, slopes)
    assert set(found) <= wanted and set(result.values) == set(plan.outputs)
    changed = {n: x + 1j * STEP * directions[n] if n in wanted else x for n, x in arrays.items()}
    reference = eager.run(plan, changed)
    for key, exponent in reference.exponents.items():
        assert exponent == result.exponents[key]
    expected, _ = along(slopes.values(), [reference.values[n].imag / STEP for n in plan.outputs])
    value, size = along([np.asarray(x) for x in found.values()], [directions[n] for n in found])
    return value, expected, size


@pytest.mark.parametrize(
    "work, backend",
    [
        *((pytest.param(n, "interpret", marks=[pytest.mark.slow] * (n in DEAR))) for n in WORKS),
        pytest.param("one bilinear layer", "compile", marks=pytest.mark.slow),
    ],
    indirect=["backend"],
)
def test_derivatives_of_plans(work, backend, rng):
    *models, metric = WORKS[work](rng)
    plan = tnsim.plan(*models, metric, cosine=True).contraction
    names = [*plan.shapes]
    for wanted in (frozenset(names), frozenset(n for n in names if n.startswith("A."))):
        value, expected, size = slopes_and_steps(plan, wanted)
        assert_close(value, expected, scale=size, rtol=1e-12)


def test_nothing_is_computed_for_arrays_that_are_not_wanted():
    """A fixed goal: its norm has no derivative, and the way back takes less work."""
    plan = tnsim.plan(*stacks(5, 2), tnsim.GaussianClosure(), cosine=True).contraction
    one, both = ({n for n in plan.shapes if n[0] in sides} for sides in ("A", "AB"))
    of_one, of_both = (pulled_back(plan, frozenset(names)) for names in (one, both))
    assert set(of_one.gives) == one and set(of_both.gives) == both
    assert of_one.multiplications < 0.8 * of_both.multiplications


@pytest.mark.parametrize("metric", [tnsim.Gaussian(), tnsim.TreeSymmetric()], ids=lambda m: m.name)
def test_memory_of_the_way_back(metric, monkeypatch):
    """Never more than was planned, which is within half of it where all runs one by one."""
    monkeypatch.setattr(costs, "AT_ONCE", 1)
    monkeypatch.setattr(costs, "AHEAD", 0)
    tnsim.session().clear()
    monkeypatch.setattr(binding, "processors", lambda: 1)
    plan = tnsim.plan(*stacks(40, 2), metric, cosine=True).contraction
    found = pulled_back(plan, frozenset(plan.shapes))
    arrays = dict(zip(plan.shapes, drawn(plan.shapes.values()), strict=True))
    slopes = dict(zip(plan.outputs, drawn(plan.output_shapes.values()), strict=True))
    with jax.default_device(jax.devices("cpu")[0]):
        _, kept = run_kept(found, arrays)
        gradients(kept, slopes)
        tracemalloc.start()
        gradients(kept, slopes)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert 2**18 < found.own_bytes < 1.5 * peak
    assert peak < found.own_bytes + 2**16


def test_budgets_count_the_way_back():
    """Both limits lie between the plan alone and the plan with its pullback."""
    plan = tnsim.plan(*stacks(8, 2), tnsim.GaussianClosure(), cosine=True).contraction
    found = pulled_back(plan, frozenset(plan.shapes))
    limits = {
        "with its gradients needs .* GiB here": {"memory_bytes": 1.1 * plan.interpreted_bytes},
        "with its gradients needs .* multipl": {"multiplications": 1.1 * plan.multiplications},
    }
    for message, limit in limits.items():
        with refused(message, tnsim.TooLarge):
            check_pullbacks([found], Budget(**limit), "closure", "")
    check_pullbacks([found], Budget(20 * plan.interpreted_bytes, 5 * plan.multiplications), "", "")
