"""What every test starts from: caches of the session's own, a backend for plans, a seeded generator."""

import os
import tempfile

if "PYTEST_XDIST_WORKER" not in os.environ:
    # No test reads what an earlier version searched or compiled. Workers and subprocesses share both folders.
    caches = tempfile.TemporaryDirectory(prefix="tnsim-test-", ignore_cleanup_errors=True)
    os.environ["TNSIM_CACHE_DIR"] = os.path.join(caches.name, "plans")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(caches.name, "programs")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax
import numpy as np
import pytest

from tnsim.engine import execution


def pytest_xdist_auto_num_workers(config):
    """A worker per core for the whole suite, none where files are named: starting them takes longer."""
    return 0 if config.args_source is config.ArgsSource.ARGS else None


@pytest.fixture(autouse=True, scope="module")
def fresh_programs():
    """Every module gives back what it compiled: a process may map only so many pieces of code (65,530 on Linux)."""
    yield
    jax.clear_caches()


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Seeded by the test's own name: replayable, and different for every test."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def backend(request, monkeypatch):
    """What plans run on, see `backends`. What JAX traces runs on JAX all the same."""
    chosen = getattr(request, "param", "numpy")
    if chosen == "numpy":
        monkeypatch.setattr(execution, "run", _reference)
    return chosen


_run = execution.run


def _reference(plan, arrays, *backend):
    if any(isinstance(x, jax.core.Tracer) for x in arrays.values()):
        return _run(plan, arrays, *backend)
    return _run(plan, {name: np.asarray(x) for name, x in arrays.items()}, "numpy")
