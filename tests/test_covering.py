"""Covering arrays: every combination is met, by few cases, and no case is lost."""

import itertools

import pytest
from covering import covering

pytest_plugins = "pytester"
FACTORS = {"layers": range(6), "metric": "abcd", "verb": "uvw", "dtype": (32, 64)}
CASES = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]


def combinations(cases, strength):
    return {
        tuple((name, case[name]) for name in names)
        for case in cases
        for names in itertools.combinations(FACTORS, strength)
    }


def test_every_combination_is_met_by_few_cases():
    for strength, most in ((0, 0), (1, 6), (2, 27), (3, 90), (4, 144)):
        chosen = [CASES[number] for number in covering(CASES, strength)]
        assert len(chosen) <= most
        assert combinations(chosen, strength) == (
            combinations(CASES, strength) if chosen else set()
        )


def test_what_runs_anyway_is_counted():
    before = covering(CASES, 1)
    more = covering(CASES, 2, before)
    both = [CASES[number] for number in before + more]
    assert not set(before) & set(more)
    assert combinations(both, 2) == combinations(CASES, 2)


@pytest.mark.slow
def test_suites_share_a_crossing(pytester):
    pytester.makeconftest(
        "from covering import share_out\n"
        "def pytest_collection_modifyitems(items): share_out(items)\n"
    )
    pytester.makeini(
        "[pytest]\nmarkers =\n slow:\n full:\n crossing:\n sampled:\naddopts = --strict-markers -p no:cacheprovider"
    )
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.crossing
        @pytest.mark.parametrize("c", [object(), object()])
        @pytest.mark.parametrize("b", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
        @pytest.mark.parametrize("a", [0, 1, 2])
        def test(a, b, c): pass
        @pytest.mark.sampled(quick=2, slow=3)
        @pytest.mark.parametrize("a", range(12))
        def test_list(a): pass
        """
    )
    counts = {
        suite: pytester.runpytest_inprocess("-m", suite).parseoutcomes()["passed"]
        for suite in ("not slow and not full", "slow and not full", "full")
    }
    assert counts["not slow and not full"] == 3 + 2
    assert sum(counts.values()) == 18 + 12
    assert counts["slow and not full"] <= 7 + 3
