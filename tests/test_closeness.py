"""The comparison of numbers itself, its records, and that no test compares by other means."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import seeds
from closeness import LARGEST, RECORDS, assert_close

TESTS = Path(__file__).parent
ELSEWHERE = {"assert_allclose", "assert_almost_equal", "assert_array_almost_equal", "isclose"}


@pytest.mark.parametrize(
    "actual, expected, options",
    [
        (1.0, 1 + 2e-9, {}),
        (1e-20, 2e-20, {}),
        (0.0, 1e-300, {}),
        (np.nan, np.nan, {}),
        (np.inf, -np.inf, {}),
        ([1.0, 2.0], [1.0, 2.1], {"scale": LARGEST}),
        ([1.0, 1e-9], [1.0, 1.1e-9], {}),
        ([1.0, 2.0], [1.0], {}),
        (1 + 1e-9j, 1.0, {"rtol": 1e-10}),
    ],
)
def test_what_is_not_close(actual, expected, options):
    with pytest.raises(AssertionError):
        assert_close(actual, expected, **options)


def test_what_is_close():
    assert_close(1.0, 1 + 1e-10)
    assert_close([np.inf, 0.0], [np.inf, 0.0])
    assert_close([1.0, 1e-12], [1.0, 0.0], scale=LARGEST)
    assert_close(np.ones((2, 3)), 1)
    assert_close(1e290, 1.5e290, scale=1e300, rtol=1e-10)


def test_a_loose_tolerance_needs_a_reason():
    with pytest.raises(ValueError, match="rtol=1e-05 is above 1e-09: name the reason"):
        assert_close(1.0, 1.0, rtol=1e-5)
    assert_close(1.0, 1 + 1e-6, rtol=1e-5, limited_by="float32")


def test_errors_are_recorded(monkeypatch, tmp_path):
    monkeypatch.setenv(RECORDS, str(tmp_path))
    assert_close([1.0, 2.0], [1.0, 2 + 2e-12], rtol=1e-11)
    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text())
    assert record["line"].startswith("test_closeness.py:") and record["seed"] == seeds.current()
    assert record["test"].endswith("test_errors_are_recorded")
    assert 0.0999 < record["ratio"] < 0.1001


@pytest.mark.slow
def test_no_test_compares_by_other_means():
    """`approx` and the functions of NumPy have default tolerances that no result justifies."""
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", getattr(node, "id", None))
            assert name not in ELSEWHERE | {"allclose", "approx", "longdouble"}, f"{path}: {name}"


def test_data_follow_the_content_of_a_case():
    draw = lambda **values: seeds.case_generator(values).normal()  # noqa: E731
    assert draw(case="two", biases=True) == draw(biases=True, renamed="two")
    assert draw(case="two", backend="jax") == draw(case="two", backend="numpy")
    assert draw(change=draw) == draw(change=print) == draw()
    assert draw(case="two") != draw(case="three") and draw(x=1) != draw(x=(1, 2))
    assert draw(x=np.ones(2)) != draw(x=np.ones(3))


def test_a_seed_rolls_all_data():
    known = seeds.current()
    try:
        values = []
        for seed in (known, known + 1, known):
            seeds.use(seed)
            values.append((seeds.generator(3).normal(), seeds.case_generator({"x": 1}).normal()))
    finally:
        seeds.use(known)
    assert values[0] == values[2]
    assert values[0][0] != values[1][0] and values[0][1] != values[1][1]
