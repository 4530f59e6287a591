"""A cache folder of the session's own, so that no test reads what an earlier version searched."""

import os
import tempfile

os.environ["TNSIM_CACHE_DIR"] = tempfile.mkdtemp(prefix="tnsim-test-cache-")

import jax
import numpy as np
import pytest

from tnsim.engine import execution


@pytest.fixture(autouse=True, scope="module")
def fresh_programs():
    """Every module gives back what it compiled: a process may map only so many pieces of code (65,530 on Linux)."""
    yield
    jax.clear_caches()


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Seeded by the test's own name: replayable, and different for every test."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture
def numpy_plans(monkeypatch):
    """Verbs run on the NumPy reference."""
    run = execution.run
    monkeypatch.setattr(
        execution,
        "run",
        lambda plan, arrays: run(plan, {k: np.asarray(x) for k, x in arrays.items()}, "numpy"),
    )
