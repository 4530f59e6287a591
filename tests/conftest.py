"""What every test starts from: a cache folder of the session's own, a backend, a seeded generator.

Workers and subprocesses share the folder, so that equal programs are compiled once."""

import os
import tempfile
from types import MappingProxyType

if "PYTEST_XDIST_WORKER" not in os.environ:
    # No test reads what an earlier version searched or compiled.
    kept = tempfile.TemporaryDirectory(prefix="tnsim-test-cache-", ignore_cleanup_errors=True)
    os.environ["TNSIM_CACHE_DIR"] = kept.name

import jax
import numpy as np
import pytest

import tnsim
from tnsim.compare import by_points
from tnsim.engine import execution, whole_plans


def pytest_xdist_auto_num_workers(config):
    """A worker for each core that we may use; none where files are named, which starts sooner."""
    if config.args_source is config.ArgsSource.ARGS:
        return 0
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.fixture(autouse=True, scope="module")
def fresh_programs():
    """Every module gives back what it compiled: Linux lets a process map 65,530 pieces of code."""
    yield
    tnsim.session().programs.clear()
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
        monkeypatch.setattr(whole_plans, "LONGEST", -1)
    return chosen


_run = execution.run


def _reference(plan, arrays, backend="jax", over=MappingProxyType({})):
    if any(isinstance(x, jax.core.Tracer) for x in arrays.values()):
        return _run(plan, arrays, backend, over)
    return _run(plan, {name: np.asarray(x) for name, x in arrays.items()}, "numpy", over)


@pytest.fixture(autouse=True)
def diagrams(request, monkeypatch):
    """Exact deep metrics go by diagrams; at the sizes of tests, quadrature would cost less.

    Tests marked `quadrature` leave the choice to the planned cost.
    """
    if not request.node.get_closest_marker("quadrature"):
        monkeypatch.setattr(by_points, "gaussian_points", lambda *arguments: None)
