"""Estimates of seconds: what the formula counts, at rates that are given."""

from closeness import assert_close

from tnsim.engine.ir.program import Operation, Program
from tnsim.engine.runtime import rates
from tnsim.engine.runtime.rates import Rates

GIVEN = Rates(large=1e11, small=1e10, passing=1e9, starting=1e-5, compiling=0.01)
PRODUCT = Operation("contract", (0, 1), ((0, 1), (1, 2)), (0, 2))
PROGRAM = Program(((2, 3), (3, 4)), (PRODUCT,), (2,))
LABELS = (3, 0, 1), (3, 1, 2)
LOOP = Operation("loop", (0, 1), LABELS, (0, 2), chunks=(3,), body=PROGRAM)
LOOPED = Program(((50, 2, 3), (50, 3, 4)), (LOOP,), (2,))


def test_short_programs_are_compiled_at_once_and_a_long_one_by_one_core(monkeypatch):
    monkeypatch.setattr(rates, "USUAL_CORES", 10)
    at_once = rates._THREADS * 10
    assert_close(rates.compiling([1] * 600, GIVEN), 600 * 0.01 / at_once)
    assert rates.compiling([5], GIVEN) == 5 * 0.01
    assert rates.compiling([], GIVEN) == 0.0


def test_the_body_of_a_loop_is_compiled_once_and_runs_at_every_turn():
    assert LOOPED.length == 2
    once = rates.running(PROGRAM, GIVEN)
    assert_close(rates.running(LOOPED, GIVEN), 1e-5 + 50 * once)
