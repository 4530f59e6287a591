"""Tasks that threads share: order, errors, and tasks that share tasks."""

import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest
import seeds
from processes import python

from tnsim.engine.runtime.devices import Order, processors, shared


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
            time.sleep(1e-3)

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


INTERRUPTED = """
import faulthandler, random, signal
from functools import partial
from tnsim.engine.runtime import devices
from tnsim.engine.runtime.devices import Order, one_blas_thread, shared

faulthandler.dump_traceback_later(60, exit=True)
devices.processors = lambda: 4
count, rng, found, ended = 12, random.Random(5), 0, 0
in_a_row = Order((0, *[1] * (count - 1)), (*((n + 1,) for n in range(count - 1)), ()), 8)
at_once = Order((0,) * count, ((),) * count, 8)
before = [each.num_threads for each in devices.blas_libraries()]
tasks = [partial(shared, [partial(pow, n, 2)] * 3, 3) for n in range(count)]

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
while ended < 600:
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1e-3))
        with one_blas_thread():
            results = shared(tasks, 4, rng.choice([in_a_row, at_once, None]))
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert results == [[n * n] * 3 for n in range(count)]
        found += 1
    except KeyboardInterrupt:
        ended += 1
with one_blas_thread():
    pass
print(found > 0, before == [each.num_threads for each in devices.blas_libraries()])
"""


def test_an_interrupt_at_any_step_leaves_no_thread_waiting():
    assert python(INTERRUPTED)[0].split() == ["True", "True"]
