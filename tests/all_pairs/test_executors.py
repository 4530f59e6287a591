"""Executors: threads, processes, a dask cluster, and whatever can go wrong with them."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
from refusals import refused
from stored_runs import compare, contents

import tnsim
from tnsim.all_pairs import work
from tnsim.all_pairs.ways import NormBlock, Tile
from tnsim.scaled import ScaledSum


class Here:
    """An executor that runs each task at once, and has another fate for the one numbered `at`."""

    def __init__(self, fate, at=6):
        self.fate, self.left = fate, at

    def submit(self, function, *arguments):
        self.left -= 1
        future = Future()
        if self.left == 0:
            return self.fate(future) or future
        future.set_result(function(*arguments))
        return future


@pytest.mark.slow
def test_thread_and_process_executors(folder):
    alone = compare(folder)
    with ThreadPoolExecutor(2) as threads:
        assert compare(folder, executor=threads).identical(alone)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        assert compare(folder, executor=processes).identical(alone)


def test_executors_that_cannot_be_used(folder):
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as forks,
        refused(r"this process pool forks.*get_context\('spawn'\)", tnsim.TnsimError),
    ):
        compare(folder, executor=forks)
    said = r"executor must have submit\(function, \*arguments\), found int"
    with refused(said, tnsim.TnsimError):
        compare(folder, executor=3)


def shut_down(future):
    raise RuntimeError("cannot schedule new futures after shutdown")


def cancelled(future):
    future.cancel()


def lost(future):
    future.set_exception(BrokenProcessPool("a process was terminated abruptly"))


def failed(future):
    future.set_exception(ValueError("bad\nluck\x1b[2J"))


def no_future(future):
    return 5


def returns(value):
    return lambda future: future.set_result(value)


TILE = ScaledSum(np.ones((3, 3, 2)), np.zeros((3, 3)), np.ones((3, 3, 2)))
FORM = "of another form than the (inner products|squared norms) of .* models"


@pytest.mark.crossing
@pytest.mark.parametrize(
    "fate, message",
    [
        (shut_down, r"Here took no task \(RuntimeError: cannot schedule new futures after shut"),
        (cancelled, r"the executor cancelled a task \(CancelledError\)"),
        (lost, r"a task failed on the executor \(BrokenProcessPool: a process was terminated"),
        (failed, r"a task failed on the executor \(ValueError: bad luck\\x1b\[2J\)"),
        (no_future, r"Here.submit must return a future, found int"),
        (returns(None), "the executor returned NoneType of another form than"),
        (returns(TILE), FORM),
        (returns(Tile(TILE._replace(mantissa=TILE.mantissa.astype("float32")))), FORM),
        (returns(Tile(TILE._replace(size=np.nan * TILE.size))), FORM),
        (returns(Tile(TILE._replace(exponent=np.zeros((2, 2))))), FORM),
        (returns(Tile(TILE, np.full((3, 3), np.nan))), FORM),
        (returns(NormBlock(ScaledSum(np.ones((3, 2)), *np.zeros((2, 3))), np.ones(3))), FORM),
    ],
)
# among the norms, among the tiles
@pytest.mark.parametrize("at", [pytest.param(2, marks=pytest.mark.slow), 7])
def test_an_executor_that_fails(fate, message, at, folder):
    with refused(message, tnsim.errors.ExecutorError):
        compare(folder, executor=Here(fate, at))


@pytest.mark.parametrize("at", [2, 7])
def test_what_was_finished_before_an_executor_failed_is_kept(at, folder):
    """The error says where, no lease is left, and the same call goes on."""
    alone, store = compare(folder), folder / "store"
    said = f"BrokenProcessPool.*finished tiles are kept in {store}$"
    with refused(said, tnsim.errors.ExecutorError):
        compare(folder, executor=Here(lost, at), store=store)
    assert not list((store / "leases").iterdir())
    assert len((store / "computed.log").read_text().splitlines()) >= at - 1
    assert compare(folder, store=store).identical(alone)


def test_code_that_a_worker_lacks_is_named():
    """Dask tells of environments that differ, and of the module in the cause alone."""
    told = RuntimeError("Error during deserialization of the task graph")
    told.__cause__ = ModuleNotFoundError("No module named 'net'")
    said = "cannot import the code of the networks.*--model package.module:Net .*named 'net'"
    with refused(said, tnsim.errors.ExecutorError):
        dict(work.completed([(0, (abs, ()))], Here(lambda f: f.set_exception(told), 1)))


def test_what_a_task_refuses_comes_out_as_it_is():
    """Also by pickle, as from another process."""
    missing = tnsim.errors.MissingExtra("torch", "torch", "reading a .pt file")
    again = pickle.loads(pickle.dumps(missing))
    assert type(again) is tnsim.errors.MissingExtra and str(again) == str(missing)
    with refused(r"reading a .pt file needs torch", tnsim.errors.MissingExtra):
        dict(work.completed([(0, (abs, ()))], Here(lambda f: f.set_exception(again), 1)))


class Cluster:
    """What a Dask client tells of its workers; tasks are never done."""

    def __init__(self, *views, answer=tnsim.__version__):
        self.views, self.answer = list(views), answer

    def nthreads(self):
        view = self.views.pop(0) if len(self.views) > 1 else self.views[0]
        if isinstance(view, Exception):
            raise view
        return dict.fromkeys(view, 1)

    def run(self, function, *arguments, workers, on_error):
        assert function(*arguments) == tnsim.__version__ and on_error == "return"
        return dict.fromkeys(workers, self.answer)

    def submit(self, function, *arguments):
        return Future()

    def scatter(self):
        raise AssertionError


HIDDEN = ModuleNotFoundError("no tnsim")


@pytest.mark.parametrize(
    "cluster, message",
    [
        (Cluster([]), "the Dask cluster has no workers; start some, then run again"),
        (Cluster(["tcp://w"], []), "the Dask cluster has no workers"),
        (Cluster(["tcp://w"], OSError("gone")), r"the Dask scheduler was lost \(OSError: gone\)"),
        (Cluster(["tcp://w"], answer="0.0.9"), "tcp://w has tnsim 0.0.9, .*: install that version"),
        (Cluster(["tcp://w"], answer=HIDDEN), r"worker tcp://w cannot import tnsim \(no tnsim\)"),
    ],
)
def test_a_cluster_that_cannot_work(cluster, message, folder, monkeypatch):
    monkeypatch.setattr(work, "_LOOK", 0.05)
    monkeypatch.setattr(work, "_PATIENCE", 0.1)
    with refused(message, tnsim.errors.ExecutorError):
        compare(folder, executor=cluster)


def test_a_worker_that_comes_later_is_asked_too(monkeypatch):
    monkeypatch.setattr(work, "_LOOK", 0.05)
    cluster = Cluster(["tcp://1"], ["tcp://1"], ["tcp://1", "tcp://2"])
    request = []

    def run(*_, workers, on_error):
        request.append(workers)
        return dict.fromkeys(workers, "0.0.9" if request[1:] else tnsim.__version__)

    cluster.run = run
    with refused(r"worker tcp://2 has tnsim 0.0.9", tnsim.errors.ExecutorError):
        dict(work.completed([(0, (abs, (1,)))], cluster))
    assert request == [["tcp://1"], ["tcp://2"]]


def test_what_tasks_share_is_sent_to_a_cluster_once(monkeypatch):
    """The inputs of a metric are a part of each task's job, and may be large."""
    cluster, sent = Cluster(["tcp://1"]), []

    def submit(function, *arguments):
        future = Future()
        sent.append(arguments)
        numbers = (x.result() if isinstance(x, Future) else x for x in arguments)
        future.set_result(function(*numbers))
        return future

    monkeypatch.setattr(cluster, "submit", submit)
    shared = np.ones(3)
    found = dict(work.completed([(k, (np.multiply, (shared, k))) for k in range(4)], cluster))
    assert [found[k].sum() for k in range(4)] == [0, 3, 6, 9]
    assert sum(arguments[0] is shared for arguments in sent) == 1


@pytest.mark.slow
def test_dask_workers_without_tnsim_and_a_lost_scheduler(folder):
    """Processes as started by hand: an error within seconds where the run would wait for ever."""
    from distributed import Client

    shadow = folder / "without" / "tnsim.py"
    shadow.parent.mkdir()
    shadow.write_text("raise ModuleNotFoundError('hidden')\n")
    started = []

    def start(kind, *arguments):
        module = f"distributed.cli.dask_{kind}"
        command = [sys.executable, "-m", module, *arguments, "--no-dashboard"]
        environment = {**os.environ, "PYTHONPATH": str(shadow.parent)}
        options = {"env": environment, "cwd": folder, "stderr": subprocess.DEVNULL}
        started.append(subprocess.Popen(command, **options))

    try:
        start("scheduler", "--port", "0", "--scheduler-file", str(folder / "scheduler.json"))
        start("worker", "--scheduler-file", str(folder / "scheduler.json"), "--no-nanny")
        with Client(scheduler_file=str(folder / "scheduler.json"), timeout=60) as client:
            client.wait_for_workers(1, timeout=60)
            with refused(r"worker tcp.* cannot import tnsim \(hidden", tnsim.errors.ExecutorError):
                compare(folder, executor=client)
            future = client.submit(time.sleep, 60)
            started[0].kill()
            with refused(r"cancelled a task .*scheduler-connection", tnsim.errors.ExecutorError):
                work._result(future, "run again")
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_dask_worker_killed_in_the_middle(folder):
    """Two workers, one killed once tiles come back: its work is done again, to the same bytes."""
    import dask
    from distributed import Client, LocalCluster

    alone = compare(folder, store=folder / "alone.zarr")
    settings = {"scheduler.allowed-failures": 10, "comm.timeouts.connect": "30s"}
    settings = {f"distributed.{name}": value for name, value in settings.items()}
    local = dict(n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=50)
    with dask.config.set(settings), LocalCluster(**local) as cluster, Client(cluster) as client:
        victim = next(iter(client.run(os.getpid).values()))
        killed = []

        class Killing:
            """The client, whose seventh task is submitted just after a worker died."""

            def submit(self, *arguments):
                if len(killed) == 7:
                    os.kill(victim, signal.SIGKILL)
                killed.append(1)
                return client.submit(*arguments)

        found = compare(folder, executor=Killing(), store=folder / "store")
    assert len(killed) > 7
    assert found.identical(alone)
    assert contents(folder / "store") == contents(folder / "alone.zarr")
