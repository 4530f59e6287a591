"""What every test starts from: a cache folder of the session's own, a backend, a seeded generator.

Workers and subprocesses share the folder, so that equal programs are compiled once."""

import gc
import itertools
import logging
import os
import sys
import tempfile

import xla_flags

if sys.dont_write_bytecode:
    # Every worker and every process that a test starts would compile all files anew.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Users have XLA's own flags, as tests under an older instruction set have, which set theirs.
os.environ.setdefault("XLA_FLAGS", " ".join(xla_flags.QUICK))

if "PYTEST_XDIST_WORKER" not in os.environ:
    # No test reads what an earlier version searched or compiled.
    kept = tempfile.TemporaryDirectory(prefix="tnsim-test-cache-", ignore_cleanup_errors=True)
    os.environ["TNSIM_CACHE_DIR"] = kept.name

import covering
import hypothesis
import numpy as np
import pytest
import seeds

import tnsim


def pytest_xdist_auto_num_workers(config):
    """A worker for each core that we may use; none where files are named, which starts sooner."""
    if config.args_source is config.ArgsSource.ARGS:
        return 0
    # Threads of BLAS of several workers would wait for one another in busy loops.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


MAPS = 20_000  # of the 65,530 that Linux lets a process have; a compiled program takes several
MEMORY = 3 * 2**30  # bytes of a worker, with all that its programs keep
_modules = itertools.count(1)


@pytest.fixture(autouse=True, scope="module")
def fresh_programs():
    """Compiled programs stay for the modules to come, until the process has grown large."""
    yield
    try:
        with open("/proc/self/maps", "rb") as maps, open("/proc/self/statm") as pages:
            resident = int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            many = sum(1 for _ in maps) > MAPS or resident > MEMORY
    except OSError:  # elsewhere than on Linux
        many = next(_modules) % 10 == 0
    if many:
        import jax  # not above: the process that hands tests to workers runs none

        tnsim.session().programs.clear()
        jax.clear_caches()


# Examples are drawn from the seed of the test, without a memory of earlier runs, on every machine.
hypothesis.settings.register_profile("tnsim", deadline=None, database=None, derandomize=False)
hypothesis.settings.load_profile("tnsim")


def pytest_addoption(parser):
    group = parser.getgroup("tnsim")
    group.addoption("--seed", type=int, default=0, help="the seed of all random data")
    group.addoption("--seeds", type=int, default=1, help="run every test with so many seeds")


def pytest_configure(config):
    seeds.use(config.getoption("--seed"))
    chosen = config.option.markexpr
    if chosen and "full" not in chosen:  # what is slow and full is full
        config.option.markexpr = f"({chosen}) and not full"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Crossings are shared out among the suites before any case is left out by its marks.

    Files about PyTorch come first, so that a single worker of two imports its compiler.
    """
    covering.share_out(items)
    items.sort(key=lambda item: "torch" not in vars(item.module))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """While all tests are imported, everything is there to stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """A million objects of libraries and of tests to come are no garbage: no collection looks at them."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # every collection calls back JAX and hypothesis


def pytest_generate_tests(metafunc):
    """Every test once for each seed, where several are asked for."""
    first, count = (metafunc.config.getoption(name) for name in ("--seed", "--seeds"))
    if count > 1:
        several = range(first, first + count)
        names = [f"seed{number}" for number in several]
        metafunc.parametrize("data_seed", several, indirect=True, ids=names)


@pytest.fixture(autouse=True)
def data_seed(request) -> int:
    """The seed of the test's data, that of hypothesis and of PyTorch too."""
    chosen = getattr(request, "param", request.config.getoption("--seed"))
    seeds.use(chosen)
    hypothesis.core.global_force_seed = chosen
    if "torch" in sys.modules:
        # Of the CPU alone: `torch.manual_seed` keeps a formatted traceback for devices to come.
        sys.modules["torch"].default_generator.manual_seed(chosen)
    return chosen


@pytest.fixture
def rng(request, data_seed) -> np.random.Generator:
    """Seeded by the seed and the parametrised values of the case, see `seeds`."""
    case = getattr(request.node, "callspec", None)
    return seeds.case_generator(case.params if case else {})


@pytest.fixture(autouse=True)
def backend(request, monkeypatch):
    """The tier in which plans run, see `backends`; without a choice, that of users."""
    chosen = getattr(request, "param", "auto")
    monkeypatch.setattr(tnsim.session(), "tier", chosen)
    return chosen


@pytest.fixture
def logged():
    """What tnsim logs from level INFO on; pytest's own plugin has work for every test."""
    messages, handler, logger = [], logging.Handler(), logging.getLogger("tnsim")
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield messages
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)


@pytest.fixture
def diagrams(monkeypatch):
    """Exact deep metrics go by diagrams, for tests of plans: others cost less at their sizes."""
    monkeypatch.setattr("tnsim.compare.by_points.gaussian_points", lambda *arguments: None)
    monkeypatch.setattr("tnsim.compare.by_features.polynomials", lambda *arguments: None)
