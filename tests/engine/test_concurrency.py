"""What runs at once: calls in order, stages in rounds, turns of a loop over heads."""

import math
import threading

import backends
import eager
import jax
import numpy as np
import pytest
from closeness import assert_close
from refusals import refused
from sequence_oracles import attention

import tnsim
import tnsim.engine.plan
from tnsim.compare.by_plans import plan_for
from tnsim.compare.request import CROSS
from tnsim.engine import costs
from tnsim.engine.planner import LARGE
from tnsim.engine.runtime import devices, execution
from tnsim.problems.families import choose, model_weights

pytestmark = backends.compiled


def test_results_keep_the_order_of_the_calls_and_few_wait(monkeypatch):
    monkeypatch.setattr(devices, "cores", lambda: 8)
    started = []
    both = threading.Barrier(2)

    def call(n):
        started.append(n)
        if n < 2:
            both.wait(timeout=60)  # calls 0 and 1 run at once, or this fails
        return n

    results = devices.at_once((lambda n=n: call(n) for n in range(6)), most=2)
    assert next(results) == 0
    assert max(started) <= 2
    assert [0, *results] == list(range(6))


def test_an_error_in_a_call_is_that_of_all(monkeypatch):
    monkeypatch.setattr(devices, "cores", lambda: 2)

    def fail():
        raise tnsim.ModelError("no such array")

    with refused("no such array"):
        list(devices.at_once([lambda: 1, fail, lambda: 3], most=3))


@pytest.mark.parametrize("wide", [False, True])
def test_calls_have_the_callers_precision(monkeypatch, wide):
    monkeypatch.setattr(devices, "cores", lambda: 2)
    with jax.enable_x64(wide):
        found = list(devices.at_once([lambda: jax.numpy.ones(2).dtype] * 2, most=2))
    assert found == [np.dtype("float64" if wide else "float32")] * 2


def heads(rng, n_ctx):
    """Two attention layers of three heads and of two."""
    layers = [attention(rng, 4, heads, 4, 4, 4) for heads in (3, 2)]
    return [tnsim.Model([layer], n_ctx=n_ctx) for layer in layers]


def test_rounds_have_every_stage_after_what_it_reads(rng):
    plan = tnsim.plan(*heads(rng, 1)).contraction
    made = set(plan.shapes)
    for each in plan.rounds:
        stages = [plan.stages[n] for n in each.stages]
        assert all(made >= set(stage.inputs) for stage in stages)
        for stage in stages:
            made |= set(stage.outputs)
        made -= set(each.last_read)
    assert sorted(n for each in plan.rounds for n in each.stages) == list(range(len(plan.stages)))
    assert made == set(plan.shapes) | set(plan.outputs)


def test_stages_of_two_models_run_at_once_in_no_more_memory(rng):
    plan = tnsim.plan(*heads(rng, 1)).contraction
    first, second = plan.programs[plan.stages[0].program], plan.programs[plan.stages[1].program]
    assert plan.rounds[0].stages == (0, 1)
    outputs = sum(math.prod(p.value_shapes[n]) for p in (first, second) for n in p.outputs)
    working = max(costs.working_elements(first), costs.working_elements(second))
    assert plan.rounds[0].own == outputs + 2 * working < plan.peak_elements
    assert plan.peak_elements == max(each.elements for each in plan.rounds)
    assert all(len(each.stages) == 1 for each in plan.rounds[1:])


def test_few_elements_are_sent_ahead_at_a_time():
    """A round is waited for where it is long, or where many are under way; results are the same."""
    ahead = execution._Ahead((), 0)
    short, long = execution._SHORT, execution._SHORT + 1
    under_way = []
    for n, own in enumerate((1, long, short, short, short, short, short, 1)):
        each = costs.Round((0, 1), 2, own, own, 0.0, ())
        results, ahead = execution._sent([lambda n=n: n, lambda n=n: -n], each, ahead)
        assert list(results) == [n, -n]
        under_way.append(ahead.elements)
    assert under_way == [1, 0, short, 2 * short, 3 * short, 4 * short, 0, 1]
    assert max(under_way) == execution._AHEAD


@pytest.mark.sampled(quick=0)
@pytest.mark.parametrize(
    "metric, n_ctx, large, tiers",
    [
        (tnsim.Gaussian(), 2, 2**10, ["interpret"]),
        (tnsim.TreeSymmetric(), 1, 2**8, ["interpret", "compile"]),
    ],
    ids=["gaussian", "tree"],
)
def test_turns_over_heads_give_the_same_number(monkeypatch, metric, n_ctx, large, tiers, rng):
    monkeypatch.setattr(devices, "cores", lambda: 2)
    a, b = heads(rng, n_ctx)
    family = choose(a, b, metric)
    whole = plan_for(family, CROSS, False, "float64")
    assert plan_for(family, CROSS, False, "float64", large=LARGE) is whole  # planned once
    turned = plan_for(family, CROSS, False, "float64", large=large)
    (loop,) = [op for program in turned.programs for op in program.operations if op.concurrency > 1]
    assert any(op.kind == "loop" for op in loop.body.operations)  # a pair of heads in a turn inside
    assert turned.peak_elements < whole.peak_elements
    assert tnsim.engine.plan.Plan.from_json(turned.to_json()) == turned

    models = {"A": family.prepare(a), "B": family.prepare(b)}
    known = model_weights(family, models) | family.inputs(whole.shapes, metric, a.d_in)
    arrays = {name: known[name] for name in whole.shapes}
    expected = eager.run(whole, arrays).values["AB"]
    for tier in tiers:
        with execution.precision():
            value = execution.run(turned, arrays, tier).values["AB"]
        assert_close(value, expected, rtol=1e-11)
