"""Execution: one program in NumPy and JAX, few programs, finite at depth 64, no global setting touched."""

import itertools
import math

import backends
import cases
import eager
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sequence_cases
from closeness import LARGEST, assert_close
from oracles import bilinear
from refusals import refused

import tnsim
import tnsim.engine.plan
from tnsim import Session, using
from tnsim.cli import bench
from tnsim.compare.by_plans import affordable
from tnsim.compare.request import CROSS
from tnsim.engine import planner
from tnsim.engine.ir.program import Operation, Program
from tnsim.engine.runtime import binding, devices, execution
from tnsim.problems.families import choose, model_weights

pytestmark = [backends.compiled, pytest.mark.usefixtures("diagrams")]


def leaves_of(plan, a, b, metric):
    """Every array that a plan reads, by name."""
    family = choose(a, b, metric)
    models = {"A": family.prepare(a), "B": family.prepare(b)}
    known = model_weights(family, models) | family.inputs(plan.shapes, metric, a.d_in)
    return {name: known[name] for name in plan.shapes}


def stack(depth, dtype="float64", seed=0, size=1.0):
    model = bench.random_stack(6, 9, depth, "float64", seed)
    layers = (
        tnsim.Bilinear(*((size * x).astype(dtype) for x in (p.left, p.right, p.down)))
        for p in model.layers
    )
    return tnsim.Model(layers)


METRICS = {
    "tree": tnsim.TreeSymmetric(),
    "closure": tnsim.GaussianClosure(),
    "frobenius": tnsim.Frobenius(),
    "gaussian": tnsim.Gaussian(),
    "symmetric": tnsim.Symmetric(),
}


def all_tiers(a, b, metric, monkeypatch):
    """One plan operation by operation, compiled, and interpreted by one thread and by several."""
    planned = tnsim.plan(a, b, metric, slices=True).contraction
    leaves = leaves_of(planned, a, b, metric)
    reference = eager.run(planned, leaves)
    assert all(type(v) is np.ndarray for v in reference.values.values())
    with execution.precision():
        compiled = execution.run(planned, leaves)
    assert_close(
        np.asarray(compiled.values["AB"]), reference.values["AB"], scale=LARGEST, rtol=1e-11
    )
    assert compiled.exponents.keys() == reference.exponents.keys()
    for stage, log in reference.exponents.items():
        assert_close(compiled.exponents[stage], log, scale=1.0, rtol=1e-11)
    bound = execution.run(planned, leaves, "interpret")
    monkeypatch.setattr(binding, "REPAYS", 0.0)
    for threads in (1, 3):
        monkeypatch.setattr(binding, "processors", lambda threads=threads: threads)
        with using(Session()):
            one = execution.run(planned, leaves, "interpret")
        assert np.array_equal(one.values["AB"], bound.values["AB"])
        assert one.exponents == bound.exponents
    assert_close(bound.values["AB"], reference.values["AB"], scale=LARGEST, rtol=1e-12)
    assert bound.exponents == reference.exponents


# Compiling takes long: models of a kind each here, all of them among the slow tests.
BY_LAYERS = itertools.product(cases.SHALLOW | cases.DEEP, ("tree", "closure", "frobenius"))
WHOLE_TREES = itertools.product(("two bilinear", *cases.SHALLOW), ("gaussian", "symmetric"))


@pytest.mark.crossing(quick=0, slow=1)
@pytest.mark.parametrize("name, metric", [*BY_LAYERS, *WHOLE_TREES])
def test_all_tiers_run_the_same_plan(name, metric, rng, monkeypatch):
    a, b = cases.pair((cases.SHALLOW | cases.DEEP)[name], rng)
    all_tiers(a, b, METRICS[metric], monkeypatch)


@pytest.mark.sampled(quick=0)
@pytest.mark.parametrize(
    "metric", [tnsim.TreeSymmetric(), tnsim.Categorical()], ids=lambda m: m.name
)
def test_all_tiers_run_the_same_plan_of_sequences(metric, monkeypatch):
    all_tiers(*sequence_cases.pair(sequence_cases.ONE_LAYER["plain"], 1), metric, monkeypatch)


def test_wrong_arrays_are_refused(rng):
    a, b = cases.pair(cases.SHALLOW["bilinear"], rng)
    planned = tnsim.plan(a, b).contraction
    with refused(
        r"the plan expects A.LAYER0.DOWN of shape \(2, 4\), found nothing; plan these models anew"
    ):
        execution.run(planned, {}, "interpret")


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.filterwarnings("ignore::tnsim.PrecisionWarning")
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "metric",
    [
        tnsim.TreeSymmetric(),
        pytest.param(tnsim.GaussianClosure(), marks=pytest.mark.slow),
        pytest.param(tnsim.Frobenius(), marks=pytest.mark.slow),
    ],
    ids=lambda m: m.name,
)
def test_64_layers_stay_finite(metric, dtype, size):
    """Norms are about exp(2^64): the cosine, the slices and the logarithms are finite all the same."""
    a, b = stack(64, dtype, 0, size), stack(64, dtype, 1, size)
    assert_close(
        tnsim.similarity(a, stack(64, dtype, 0, size), metric, dtype=dtype),
        1,
        rtol=1e-6 if dtype == "float32" else 1e-9,
        limited_by=dtype,
    )
    assert -1 <= tnsim.similarity(a, b, metric, dtype=dtype) <= 1
    assert np.isfinite(tnsim.slices(a, b, metric, dtype=dtype)).all()
    sign, log = tnsim.log_inner(a, a, metric, dtype=dtype)
    assert sign == 1 and np.isfinite(log) and abs(log) > 1e17
    if log > 0:
        with refused("beyond float64; use log_inner", tnsim.TnsimError):
            tnsim.inner(a, a, metric, dtype=dtype)


def test_freed_memory_is_given_back_before_a_large_plan(monkeypatch):
    a, b = stack(2, seed=1), stack(2, seed=2)
    planned = tnsim.plan(a, b, tnsim.GaussianClosure()).contraction
    leaves = leaves_of(planned, a, b, tnsim.GaussianClosure())
    given_back = []
    monkeypatch.setattr(execution, "give_back_freed", lambda: given_back.append(True))
    for least, times in ((0, 1), (2**60, 1)):
        monkeypatch.setattr(execution, "_TRIMMED", least)
        with execution.precision():
            execution.run(planned, leaves)
        assert len(given_back) == times


@pytest.mark.slow
def test_visible_rounding_is_not_silent():
    """A degree of 2^64 magnifies rounding beyond use, 2^16 leaves eleven digits."""
    with pytest.warns(
        tnsim.PrecisionWarning,
        match="degree 1.84e.19 in float64: rounding alone may change the result by 2",
    ):
        tnsim.similarity(stack(64), stack(64, seed=1), tnsim.TreeSymmetric())
    a, b = stack(17), stack(17, seed=1)
    needed = tnsim.plan(a, b, tnsim.TreeSymmetric(), cosine=True, dtype="float32").contraction
    # Within the budget float64 would answer in the place of float32.
    narrow = tnsim.Budget(memory_bytes=1.5 * max(needed.peak_bytes, needed.interpreted_bytes))
    with pytest.warns(tnsim.PrecisionWarning, match="use dtype='float64'"):
        tnsim.similarity(a, b, tnsim.TreeSymmetric(), dtype="float32", budget=narrow)


def test_a_loop_is_compiled_once():
    outer = Operation("contract", (0, 1), ((0, 1), (1, 2)), (0, 2))
    body = Program(((4, 5), (5, 6)), (outer,), (2,))
    labels = (3, 0, 1), (3, 1, 2)
    once = Operation("loop", (0, 1), labels, (0, 2), chunks=(3,), body=body)
    program = Program(((5, 4, 5), (5, 5, 6)), (once,), (2,))
    labels = (4, 3, 0, 1), (4, 3, 1, 2)
    nested = Operation("loop", (0, 1), labels, (0, 2), chunks=(4,), body=program)
    whole = Program(((6, 5, 4, 5), (6, 5, 5, 6)), (nested,), (2,))
    arrays = [
        (np.arange(math.prod(shape), dtype=np.float32) % 50).reshape(shape)
        for shape in whole.shapes
    ]
    lowered = jax.jit(lambda x: binding.BoundStage.of(whole, None, jnp)(x)).lower(arrays)
    assert lowered.as_text().count("dot_general") == 1
    ((expected,), _), ((found,), _) = eager.run_program(whole, arrays), lowered.compile()(arrays)
    np.testing.assert_array_equal(found, expected)  # whole numbers below 2^24


def test_a_large_matrix_and_a_vector_are_multiplied_by_the_library():
    """As a loop over entries, XLA wrote all products out: a second array of the matrix's size."""
    product = Operation("contract", (0, 1), ((0, 1), (1,)), (0,))
    program = Program(((1100, 1000), (1000,)), (product,), (2,))
    arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in program.shapes]
    lowered = jax.jit(lambda x: binding.BoundStage.of(program, None, jnp)(x)).lower(arrays)
    assert lowered.as_text().count("dot_general") == 1


@pytest.mark.slow
def test_nothing_global_changes(rng):
    a, b = cases.pair(cases.SHALLOW["bilinear"], rng)
    assert not jax.config.jax_enable_x64
    value = tnsim.similarity(a, b)
    assert isinstance(value, np.float64) and isinstance(tnsim.slices(a, b), np.ndarray)
    assert not jax.config.jax_enable_x64 and jax.config.jax_default_matmul_precision is None
    assert (value.metric, value.exact) == ("gaussian", True) and tnsim.slices(a, b)[:1].exact
    assert type(value + 1) is np.float64


@pytest.mark.slow
def test_budget_is_kept_or_refused_before_anything_runs(monkeypatch, rng):
    a, b = (tnsim.Model([bilinear(rng, 16, 24, 16), bilinear(rng, 16, 24, 4)]) for _ in range(2))
    expected = tnsim.inner(a, b)
    peak = tnsim.plan(a, b).contraction.peak_bytes
    half = tnsim.Budget(memory_bytes=0.5 * peak)
    monkeypatch.setattr(planner, "LARGE", 2**14)
    assert_close(tnsim.inner(a, b, budget=half), expected, rtol=1e-12)
    family = choose(a, b, tnsim.Gaussian())
    chunked = affordable(family, CROSS, False, "float64", half)
    assert chunked.peak_bytes <= 0.5 * peak and any(
        op.kind == "loop" for p in chunked.programs for op in p.operations
    )
    assert tnsim.engine.plan.Plan.from_json(chunked.to_json()) == chunked
    monkeypatch.setattr(execution, "run", lambda *_: pytest.fail("started"))
    with refused(
        r"gaussian needs 0\.00\d+ GiB here, and the budget is 9.31e-07 GiB; use GaussianClosure\(\)",
        tnsim.TooLarge,
    ):
        tnsim.inner(a, b, budget=tnsim.Budget(memory_bytes=1000))
    with refused(
        r"gaussian needs \S+ multiplications here, more than the budget of 1e\+03", tnsim.TooLarge
    ):
        tnsim.inner(a, b, budget=tnsim.Budget(multiplications=1e3))
    monkeypatch.setattr(devices, "available_bytes", lambda compiles: 60 * 2**20)
    monkeypatch.setattr(planner, "_ALWAYS_FITS", 0)
    big = [bench.random_stack(128, 256, 2, "float64", seed) for seed in (0, 1)]
    with refused(
        r"tree needs \S+ GiB here, and the budget is \S+ GiB .80% of free memory less",
        tnsim.TooLarge,
    ):
        tnsim.similarity(*big, tnsim.TreeSymmetric())


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() == "cpu", reason="JAX sees no accelerator")
def test_accelerator_agrees_with_numpy(rng):
    a, b = tnsim.Model([bilinear(rng, 64, 128, 10)]), tnsim.Model([bilinear(rng, 64, 96, 10)])
    planned = tnsim.plan(a, b).contraction
    leaves = leaves_of(planned, a, b, tnsim.Gaussian())
    reference = eager.run(planned, leaves)
    with execution.precision():
        found = execution.run(planned, leaves)
    assert_close(np.asarray(found.values["AB"]), reference.values["AB"], rtol=1e-12)


def test_programs_are_given_up_in_the_order_of_use(rng):
    models = [tnsim.Model([bilinear(rng, 3, 4, 2 + n)]) for n in range(3)]
    with using(Session(tier="compile")) as roomy:
        expected = [tnsim.inner(m, 2.0 * m) for m in models]
    assert len(roomy.programs) == 3 and roomy.programs.held > 3
    with using(Session(operations=1, tier="compile")) as narrow:
        assert [tnsim.inner(m, 2.0 * m) for m in models] == expected
    assert len(narrow.programs) == 1
