"""Work of more than ten seconds says so, whatever computes it."""

import io
import sys
import time

import numpy as np
import pytest
from processes import python

import tnsim
from tnsim import long_work

WORKS = {
    "contractions of gaussian": ("bilinear", tnsim.Gaussian()),
    "vectors of symmetric": ("deep", tnsim.Symmetric()),
    "forward passes": ("bilinear", tnsim.Empirical(np.eye(3))),
    "kernels of gaussian": ("relu", tnsim.Gaussian()),
}


def model(rng, kind):
    if kind == "relu":
        return tnsim.Model([tnsim.Linear(rng.normal(size=(3, 3))), tnsim.Elementwise("relu")])
    layers = [tnsim.Bilinear(*rng.normal(size=(3, 3, 3))) for _ in range(1 + (kind == "deep"))]
    return tnsim.Model(layers)


@pytest.fixture
def long(monkeypatch, logged):
    """Everything takes long, and is expected to."""
    from tnsim.compare import by_plans

    monkeypatch.setattr(long_work, "LONG", 0.0)
    monkeypatch.setattr(by_plans, "_BRIEF", 0)
    return logged


@pytest.mark.parametrize("what", WORKS)
def test_every_route_says_so(what, rng, long):
    kind, metric = WORKS[what]
    a, b = (model(rng, kind) for _ in range(2))
    found = tnsim.similarity(a, b, metric)
    (line,) = (line for line in long if "expected" in line)
    assert line.startswith(f"{what}: about ")
    assert tnsim.similarity(a, b, metric) == found


def test_many_pairs_and_gradients_say_so(rng, long):
    pytest.importorskip("xarray")
    models = [model(rng, "bilinear") for _ in range(3)]
    tnsim.pairwise(models)
    lines = [line for line in long if "expected" in line]
    assert len(lines) == 1 and lines[0].startswith("6 inner products by ")
    tnsim.change(*models[:2])
    assert any("contractions of" in line for line in long)


def test_short_work_says_nothing(rng, logged):
    a, b = (model(rng, "bilinear") for _ in range(2))
    tnsim.similarity(a, b)
    assert not [line for line in logged if "expected" in line]


def test_a_job_without_a_terminal_is_told_of_minutes():
    work = "from tnsim.long_work import announced\nwith announced('a sum', {}): pass"
    brief, long = (python(work.format(seconds)) for seconds in (59.0, 90.0))
    assert brief == ("", "") and long == ("", "a sum: about 1.5 minutes expected\n")


def test_a_terminal_shows_the_time(monkeypatch):
    """The bar counts the time that has passed, and goes when the work ends, also by an error."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(long_work, "_TICK", 0.01)
    with pytest.raises(KeyboardInterrupt), long_work.announced("a long sum", 90.0):
        time.sleep(0.2)
        raise KeyboardInterrupt
    assert "a long sum" in shown.getvalue() and "of about 1.5 minutes" in shown.getvalue()
    length = len(shown.getvalue())
    time.sleep(0.05)
    assert len(shown.getvalue()) == length
