"""Tasks that threads share: order, errors, and tasks that share tasks."""

import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest
import seeds

from tnsim.engine.runtime.threads import Order, processors, shared


def in_order(count, rng):
    """Tasks of which each waits for some earlier ones, and the numbers of these."""
    waits = [set(rng.integers(0, n, size=min(n, 2)).tolist()) if n else set() for n in range(count)]
    then = [tuple(m for m in range(count) if n in waits[m]) for n in range(count)]
    return waits, Order(tuple(map(len, waits)), tuple(then), ahead=4)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_task_begins_after_those_that_it_waits_for(threads):
    rng = seeds.generator(3)
    waits, order = in_order(60, rng)
    pauses = rng.uniform(0, 1e-3, size=60)
    lock, done, passed = threading.Lock(), set(), []

    def task(n):
        def run():
            with lock:
                assert waits[n] <= done
                assert all(m in done for m in range(n - order.ahead))
            time.sleep(pauses[n])
            with lock:
                done.add(n)
            return n * n

        return run

    def note(n):
        with lock:
            assert set(range(n + 1)) <= done
        passed.append(n)

    found = shared([task(n) for n in range(60)], threads, order, note)
    assert found == [n * n for n in range(60)] and passed == list(range(60))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("ordered", [False, True])
def test_an_error_ends_all_and_begins_nothing_more(threads, ordered):
    _, order = in_order(50, seeds.generator(4))
    begun = []

    def task(n):
        def run():
            begun.append(n)
            if n == 20:
                raise ArithmeticError("task 20")
            time.sleep(1e-4)

        return run

    with pytest.raises(ArithmeticError, match="task 20"):
        shared([task(n) for n in range(50)], threads, order if ordered else None)
    assert len(begun) < 50
    time.sleep(0.01)
    assert len(begun) == len(set(begun)) < 50


def test_tasks_share_tasks_of_their_own():
    def task(n):
        return lambda: sum(shared([lambda k=k: n * k for k in range(5)], 3))

    assert shared([task(n) for n in range(20)], 3) == [10 * n for n in range(20)]


def test_a_helper_that_never_began_keeps_nothing():
    """It stays in the queue of the pool while all threads are busy elsewhere."""
    free, kept = threading.Event(), []

    def busy():
        free.wait(10)

    def nested():
        array = np.ones(1000)
        kept.append(weakref.ref(array))
        tasks = [partial(np.add, array, 1.0), partial(np.add, array, 2.0)]
        found = shared(tasks, 2), shared(tasks, 2, Order((0, 1), ((1,), ()), ahead=4))
        del array, tasks
        assert kept[0]() is None
        free.set()
        return found

    # Whichever thread has the nested tasks, all others of the pool wait.
    everything = [nested, *[busy] * processors()]
    first, *_ = shared(everything, processors())
    for found in first:
        assert [x[0] for x in found] == [2.0, 3.0]
