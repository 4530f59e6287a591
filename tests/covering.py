"""Crossings and long lists of cases, of which each suite runs a part and `pytest -m full` the rest.

A test that is parametrised by layers, metrics, routes and precisions is a product of these factors.
`@pytest.mark.crossing(quick=1, slow=2)`, with these strengths by default, runs every value of every factor in the quick suite and
every pair of values in the quick and the slow suite together; the other cases are `full`. A fault that needs no more than
two values to show is met by pairs. Strength 0 leaves a suite without cases of its own.

`@pytest.mark.sampled(quick=4, slow=12)` is for a list of cases without factors: so many of them, evenly spaced, run in the
quick suite, so many more in the slow one. Without `slow` all others run there. Cases that are marked `full` are in neither.

The arrays are greedy (D. M. Cohen et al., IEEE Trans. Softw. Eng. 23 (1997) 437): the case that has most combinations
that no earlier case has, and of equals the first. So they are the same for every run and every worker.
"""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import pytest


def covering(
    cases: Sequence[Mapping[str, Hashable]], strength: int, before: Sequence[int] = ()
) -> list[int]:
    """The cases in which every combination of `strength` values occurs that occurs in any case.

    Args:
        cases: Value of each factor, of every case.
        strength: Number of factors whose values are combined; all factors where there are fewer, none for 0.
        before: Numbers of cases that run anyway, whose combinations need no other case.

    Returns:
        Numbers of the chosen cases in order, without those of `before`.
    """
    missing = [_combinations(case, strength) for case in cases]
    chosen: list[int] = []
    met = set().union(*(missing[number] for number in before))
    while True:
        new = [len(combinations - met) for combinations in missing]
        best = max(range(len(cases)), key=new.__getitem__, default=None)
        if best is None or not new[best]:
            return sorted(chosen)
        chosen.append(best)
        met |= missing[best]


def _combinations(case: Mapping[str, Hashable], strength: int) -> set[tuple]:
    """Combinations of values that a case has, each with the names of its factors."""
    several = min(strength, len(case))
    return set(itertools.combinations(sorted(case.items()), several)) if several else set()


def share_out(items: list[pytest.Item]) -> None:
    """Mark the cases of every crossing and of every sampled list as slow or full, but those of the quick suite."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("full"):
            continue
        if item.get_closest_marker("crossing") or item.get_closest_marker("sampled"):
            seed = item.callspec.params.get("data_seed")
            tests[item.path, item.nodeid.partition("[")[0], seed].append(item)
    for cases in tests.values():
        fast = [n for n, item in enumerate(cases) if not item.get_closest_marker("slow")]
        if mark := cases[0].get_closest_marker("crossing"):
            factors = [_factors(item) for item in cases]
            chosen = covering([factors[n] for n in fast], mark.kwargs.get("quick", 1))
            quick = [fast[n] for n in chosen]
            slow = covering(factors, mark.kwargs.get("slow", 2), quick)
        else:
            mark = cases[0].get_closest_marker("sampled")
            quick = _spaced(fast, mark.kwargs["quick"])
            others = [n for n in range(len(cases)) if n not in quick]
            slow = _spaced(others, mark.kwargs.get("slow", len(others)))
        for number in set(range(len(cases))).difference(quick):
            cases[number].add_marker("slow" if number in slow else "full")


def _spaced(numbers: Sequence[int], count: int) -> list[int]:
    """So many of the numbers, evenly spaced."""
    count = min(count, len(numbers))
    return [numbers[n * len(numbers) // count] for n in range(count)]


def _factors(item: pytest.Item) -> dict[str, Hashable]:
    """Values of a case by the names of its factors; one that is no plain datum is the object itself."""
    plain = (bool, int, float, complex, str, bytes)
    return {
        name: (type(value).__name__, value) if isinstance(value, plain) else ("", id(value))
        for name, value in item.callspec.params.items()
        if name != "data_seed"
    }
