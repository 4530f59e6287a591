"""What planning costs: no collections of garbage, lines of progress."""

import gc
import itertools
import logging
import re
import threading

import numpy as np
import pytest

import tnsim
from tnsim import using
from tnsim.compare.planned import affordable
from tnsim.compare.request import CROSS
from tnsim.engine.search import progress
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
        with progress.planning("another"):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    try:
        with pytest.raises(KeyError), progress.planning("a plan"):
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


def test_long_planning_says_how_far_it_is(monkeypatch, caplog):
    now = itertools.count(step=1.5)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with caplog.at_level(logging.INFO, "tnsim"), using(tnsim.Session()):
        tnsim.plan(stack(2, 20), stack(2, 20), tnsim.TreeSymmetric())
    first, *later, last = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"planning \S+ for \d+ s: stage 1 of 2, products searched: \d", first)
    assert re.fullmatch(r"planned \S+ in \d+\.\d s", last)
    assert 0 < len(later) < 6  # ever more rarely


def test_short_planning_says_nothing(caplog):
    with caplog.at_level(logging.INFO, "tnsim"), using(tnsim.Session()):
        tnsim.plan(stack(1, 5), stack(1, 5), tnsim.TreeSymmetric())
    assert not caplog.records


def test_work_beyond_the_budget_is_refused():
    family = choose(stack(3, 4), stack(3, 5, outputs=4), tnsim.Symmetric())
    budget = tnsim.Budget(multiplications=1e3)
    message = r"symmetric needs \S+ multiplications here, more than the budget of 1e\+03"
    with using(tnsim.Session()), pytest.raises(tnsim.TooLarge, match=message):
        affordable(family, CROSS, False, "float64", budget)
