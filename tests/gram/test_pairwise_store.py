"""Stores and executors: killed runs, stores of other runs, two processes, processes and a dask cluster."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
from oracles import bilinear

import tnsim
from tnsim.gram import tasks as tiles

TINY = tnsim.Budget(memory_bytes=20_000)  # tiles of two or three models
RUN = """
import os, tnsim
models = tnsim.load(os.path.abspath("models"))
tnsim.pairwise(models, tnsim.GaussianClosure(), slices=True, store="store.zarr", budget=tnsim.Budget(memory_bytes=20_000))
"""


@pytest.fixture
def folder(tmp_path, rng):
    """Ten checkpoints in `models`."""
    for n in range(10):
        tnsim.save(
            tnsim.Model([bilinear(rng, 3, 4, 2, True)]),
            tmp_path / "models" / f"step_{n:03}.safetensors",
        )
    return tmp_path


def compare(folder, **options):
    options = {"slices": True, "budget": TINY} | options
    return tnsim.pairwise(tnsim.load(folder / "models"), tnsim.GaussianClosure(), **options)


def contents(path):
    """Every chunk and every piece of metadata of a store, byte by byte."""
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in path.rglob("*")
        if p.is_file() and p.name != "computed.log"
    }


def computed(path):
    """How often each task was begun."""
    lines = (
        [line.split(maxsplit=2)[2] for line in (path / "computed.log").read_text().splitlines()]
        if path.exists()
        else []
    )
    return {line: lines.count(line) for line in lines}


def finished(path):
    import zarr

    if not path.exists():
        return set()
    group = zarr.open_group(path, mode="r")
    return {f"tile {i} {j}" for i, j in np.argwhere(group["tiles"][:])} | {
        f"norms a {i}" for i in np.flatnonzero(group["blocks_a"][:])
    }


def test_killed_at_any_instant(folder, rng):
    """Ten kills: nothing finished is computed again, and the end is that of a run that was left alone."""
    for n in range(10, 16):  # more tiles than ten runs can finish
        tnsim.save(
            tnsim.Model([bilinear(rng, 3, 4, 2, True)]),
            folder / "models" / f"step_{n:03}.safetensors",
        )
    whole = compare(folder, store=folder / "whole.zarr")
    store, slow = (
        folder / "store.zarr",
        RUN.replace(
            "import os, tnsim\n", "import os, time, tnsim\nfrom tnsim.gram import run as runs\n"
        ),
    )
    # every array's chunk written slowly, so that kills fall between the chunks of a tile and its marker
    slow = slow.replace(
        "tnsim.pairwise(",
        "write = runs.log_abs\nruns.log_abs = lambda x: (time.sleep(0.03), write(x))[1]\ntnsim.pairwise(",
        1,
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    kills = 0
    while kills < 10:
        before = {task: computed(store).get(task, 0) for task in finished(store)}
        process = subprocess.Popen([sys.executable, "-c", slow], cwd=folder, env=environment)
        start = time.monotonic()
        target = len(finished(store)) + 1
        while (
            process.poll() is None
            and len(finished(store)) < target
            and time.monotonic() - start < 60
        ):
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.06))
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        after = computed(store)
        assert all(after[task] == count for task, count in before.items())
    before = {task: computed(store)[task] for task in finished(store)}
    assert before and len(before) < len(finished(folder / "whole.zarr"))
    found = compare(folder, store=store)
    assert all(computed(store)[task] == count for task, count in before.items())
    assert found.identical(whole) and tnsim.open_pairwise(store).identical(whole)
    assert contents(store) == contents(folder / "whole.zarr")
    counts = computed(store)
    compare(folder, store=store)
    assert computed(store) == counts


def test_a_tile_without_its_marker_is_not_trusted(folder):
    import zarr

    whole = compare(folder, store=folder / "store.zarr")
    group = zarr.open_group(folder / "store.zarr")
    group["tiles"][1, 0] = 0
    group["similarity"][:] = 5.0
    found = tnsim.pairwise(
        tnsim.load(folder / "models"),
        tnsim.GaussianClosure(),
        slices=True,
        store=folder / "store.zarr",
    )
    tile = next(iter(group["similarity"].chunks))
    np.testing.assert_array_equal(
        found.similarity[tile : 2 * tile, :tile], whole.similarity[tile : 2 * tile, :tile]
    )
    assert (found.similarity[:tile, :tile] == 5.0).all()  # finished, and so not touched


def test_a_full_disk_is_told_and_nothing_is_lost(folder, monkeypatch):
    from tnsim.gram import store as stores

    whole, write, count = compare(folder), stores.log_start, []

    def fails(store, what):
        count.append(what)
        if len(count) == 6:
            with stores.writing(store.path):
                raise OSError(28, "No space left on device")
        write(store, what)

    monkeypatch.setattr(stores, "log_start", fails)
    with pytest.raises(
        tnsim.TnsimError,
        match=r"store.zarr: cannot be written: No space left on device; finished tiles are kept, run again",
    ):
        compare(folder, store=folder / "store.zarr")
    assert np.isnan(tnsim.open_pairwise(folder / "store.zarr").similarity).any()
    assert compare(folder, store=folder / "store.zarr").identical(whole)


def test_a_store_of_another_run_is_refused(folder, rng):
    models, store = tnsim.load(folder / "models"), folder / "store.zarr"
    tnsim.pairwise(models, store=store)
    for arguments, message in [
        ((models, tnsim.Frobenius()), 'metric "gaussian", and "frobenius" is asked for'),
        (
            (models, tnsim.Gaussian(np.ones(3))),
            'metric_parameters "standard", and ".*" is asked for',
        ),
        ((models[:4],), "10 models on side a, and 4 are given"),
        ((models, tnsim.Gaussian(), models), "all pairs of one list; give another path"),
    ]:
        with pytest.raises(tnsim.StoreMismatch, match=f"store.zarr: holds another run: {message}"):
            tnsim.pairwise(*arguments, store=store)
    with pytest.raises(tnsim.StoreMismatch, match='dtype "float64", and "float32" is asked for'):
        tnsim.pairwise(models, store=store, dtype="float32")
    with pytest.raises(tnsim.StoreMismatch, match="slices false, and true is asked for"):
        tnsim.pairwise(models, store=store, slices=True)
    tnsim.save(tnsim.Model([bilinear(rng, 3, 4, 2, True)]), models.paths[3])
    with pytest.raises(
        tnsim.StoreMismatch,
        match=r"other weights for 3 \(side a, number 3\); give another path, or remove it",
    ):
        tnsim.pairwise(models, store=store)
    data = json.loads((store / "zarr.json").read_text())
    data["attributes"]["tnsim"]["format"] = 0
    (store / "zarr.json").write_text(json.dumps(data))
    with pytest.raises(tnsim.StoreMismatch, match="format 0, and 1 is asked for"):
        tnsim.pairwise(models, store=store)
    with pytest.raises(tnsim.StoreMismatch, match=r"models: not a store of tnsim.pairwise"):
        tnsim.pairwise(models, store=folder / "models")
    with pytest.raises(tnsim.StoreMismatch, match=r"nowhere: not a store of tnsim.pairwise"):
        tnsim.open_pairwise(folder / "nowhere")


def test_two_processes_on_one_store(folder):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    both = [
        subprocess.Popen([sys.executable, "-c", RUN], cwd=folder, env=environment) for _ in range(2)
    ]
    assert [process.wait() for process in both] == [0, 0]
    assert tnsim.open_pairwise(folder / "store.zarr").identical(compare(folder))
    assert not [p for p in folder.iterdir() if p.suffix == ".tmp"]


def test_a_checkpoint_that_changes_under_way(folder, rng, monkeypatch):
    models = tnsim.load(folder / "models")

    def swaps(job, entries, run=tiles.norms):
        tnsim.save(tnsim.Model([bilinear(rng, 3, 4, 2, True)]), models.paths[0])
        return run(job, entries)

    monkeypatch.setattr(tiles, "norms", swaps)
    with pytest.raises(
        tnsim.CheckpointError,
        match=r"step_000.safetensors: has changed while the run was under way",
    ):
        tnsim.pairwise(models)


def test_thread_and_process_executors(folder):
    alone = compare(folder)
    with ThreadPoolExecutor(2) as threads:
        assert compare(folder, executor=threads).identical(alone)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        assert compare(folder, executor=processes).identical(alone)


def test_executors_that_cannot_be_used(folder):
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as forks,
        pytest.raises(tnsim.TnsimError, match=r"this process pool forks.*get_context\('spawn'\)"),
    ):
        compare(folder, executor=forks)
    with pytest.raises(
        tnsim.TnsimError, match=r"executor must have submit\(function, \*arguments\), found int"
    ):
        compare(folder, executor=3)

    class Broken:
        def submit(self, *arguments):
            future = Future()
            future.set_exception(multiprocessing.context.ProcessError("x"))
            return future

    with pytest.raises(multiprocessing.context.ProcessError):
        compare(folder, executor=Broken())


def test_a_dask_worker_killed_in_the_middle(folder):
    """Two worker processes, one killed once tiles come back: what it had is computed again, to the same bytes."""
    import dask
    from distributed import Client, LocalCluster

    alone = compare(folder, store=folder / "alone.zarr")
    settings = {
        "distributed.scheduler.allowed-failures": 10,
        "distributed.comm.timeouts.connect": "30s",
    }
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            silence_logs=50,
        ) as cluster,
        Client(cluster) as client,
    ):
        victim = next(iter(client.run(os.getpid).values()))
        killed = []

        class Killing:
            """The client, whose seventh task is submitted just after a worker died."""

            def submit(self, *arguments):
                if len(killed) == 7:
                    os.kill(victim, signal.SIGKILL)
                killed.append(1)
                return client.submit(*arguments)

        found = compare(folder, executor=Killing(), store=folder / "store.zarr")
    assert len(killed) > 7
    assert found.identical(alone)
    assert contents(folder / "store.zarr") == contents(folder / "alone.zarr")
