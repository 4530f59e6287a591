"""What planning costs: no collections of garbage, lines of progress, early refusals."""

import gc
import itertools
import re
import threading

import numpy as np
import pytest
from refusals import refused

import tnsim
from tnsim import using
from tnsim.compare.by_plans import affordable, plan_for
from tnsim.compare.request import ALL, CROSS
from tnsim.engine.search import paths
from tnsim.engine.search.routes import BeyondLimit
from tnsim.problems.families import choose


def stack(depth, width, rank=None, outputs=None):
    rank, sizes = rank or width, [width] * depth + [outputs or width]
    layers = []
    for below, above in itertools.pairwise(sizes):
        shapes = (rank, below), (rank, below), (above, rank)
        layers.append(tnsim.Bilinear(*(np.ones(shape) for shape in shapes)))
    return tnsim.Model(layers)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_off_while_some_thread_plans_and_as_before_afterwards(enabled):
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    inside, leave = threading.Event(), threading.Event()

    def other():
        with paths.planning("another"):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    try:
        with pytest.raises(KeyError), paths.planning("a plan"):
            thread.start()
            assert inside.wait(60) and not gc.isenabled()
            raise KeyError
        assert not gc.isenabled()  # the other thread still plans
        leave.set()
        thread.join()
        assert gc.isenabled() is enabled
    finally:
        leave.set()
        (gc.enable if was else gc.disable)()


def test_long_planning_says_how_far_it_is(monkeypatch, logged):
    now = itertools.count(step=1.5)
    monkeypatch.setattr(paths.time, "monotonic", lambda: next(now))
    with using(tnsim.Session()):
        tnsim.plan(stack(2, 20), stack(2, 20), tnsim.TreeSymmetric())
    first, *later, last = logged
    assert re.fullmatch(r"planning \S+ for \d+ s: stage 1 of 2, products searched: \d", first)
    assert re.fullmatch(r"planned \S+ in \d+\.\d s", last)
    assert 0 < len(later) < 6  # ever more rarely


def test_short_planning_says_nothing(logged):
    with using(tnsim.Session()):
        tnsim.plan(stack(1, 5), stack(1, 5), tnsim.TreeSymmetric())
    assert not logged


def test_work_beyond_the_budget_is_refused_before_the_search(monkeypatch):
    monkeypatch.setattr(paths, "route", lambda *_: pytest.fail("searched"))
    family = choose(stack(3, 24), stack(3, 25, outputs=24), tnsim.Symmetric())
    budget = tnsim.Budget(multiplications=1e6)
    message = r"symmetric needs at least \S+ multiplications here, more than the budget of 1e\+06"
    with using(tnsim.Session()), refused(message, tnsim.TooLarge):
        affordable(family, CROSS, False, "float64", budget)


@pytest.mark.sampled(quick=1, slow=2)
@pytest.mark.parametrize(
    "depth, width",
    [
        (1, 40),
        pytest.param(2, 12, marks=pytest.mark.slow),
        pytest.param(2, 20, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("pairs", [CROSS, ALL])
def test_no_plan_takes_less_than_the_least_work(depth, width, pairs, monkeypatch, rng):
    """Every limit below which planning ends is below what the plan takes."""
    monkeypatch.setenv("TNSIM_CACHE_DIR", "")
    layers = []
    for _ in range(depth):
        shapes = (width + 3, width), (width + 3, width), (width, width + 3), (width,)
        left, right, down, bias = (rng.normal(size=shape) for shape in shapes)
        layers.append(tnsim.Bilinear(left, right, down, None, None, bias))
    family = choose(tnsim.Model(layers), tnsim.Model(layers[::-1]), tnsim.Gaussian())
    with using(tnsim.Session()):
        whole = plan_for(family, pairs, False, "float64").multiplications
    for limit in whole * np.array([0.9, 0.5, 0.1, 0.01]):
        with using(tnsim.Session()):
            try:
                assert (
                    plan_for(family, pairs, False, "float64", limit=limit).multiplications == whole
                )
            except BeyondLimit as beyond:
                assert limit < beyond.least <= whole


def test_a_plan_is_the_same_object_whatever_the_limit():
    family = choose(stack(2, 6), stack(2, 7, outputs=6), tnsim.TreeSymmetric())
    plan = affordable(family, CROSS, False, "float64", tnsim.Budget())
    assert plan_for(family, CROSS, False, "float64", limit=1e9) is plan
