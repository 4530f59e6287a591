"""Stores: killed runs, stores of other runs, two processes."""

import errno
import json
import os
import shutil
import signal
import time
from collections import Counter

import numpy as np
import pytest
from oracles import bilinear
from processes import ended, started
from refusals import refused
from stored_runs import begun, compare, contents, file_of, files_of, listed

import tnsim
from tnsim.all_pairs import store as stores
from tnsim.all_pairs import work as tiles

RUN = """
import os, tnsim
models = tnsim.load(os.path.abspath("models"))
tnsim.pairwise(models, tnsim.GaussianClosure(), slices=True, store="store", budget=tnsim.Budget(memory_bytes=20_000))
"""


def computed(path):
    """How often each task was begun."""
    return Counter(begun(path) if path.exists() else ())


def finished(path):
    if not (path / "models.json").exists():
        return set()
    return {label for label, file in files_of(path).items() if file.exists()}


# Every record is written slowly, and after a few no more, so that eight processes leave something,
# however late they are killed.
SLOWLY = """
import os, time, tnsim
from tnsim.all_pairs import result
write, pauses = result.log_abs, iter([0.03] * 5)
result.log_abs = lambda x: (time.sleep(next(pauses, 60)), write(x))[1]
"""


@pytest.mark.slow
def test_killed_at_any_instant(folder, rng):
    """Nothing finished is computed again, and the end is that of a run that was left alone."""
    for n in range(10, 16):  # more tiles than eight runs can finish
        file = folder / "models" / f"step_{n:03}.safetensors"
        tnsim.save(tnsim.Model([bilinear(rng, 3, 4, 2, True)]), file)
    whole, store = compare(folder, store=folder / "whole.zarr"), folder / "store"
    for _ in range(8):
        before = {task: computed(store).get(task, 0) for task in finished(store)}
        process = started(SLOWLY + RUN, cwd=folder)
        start = time.monotonic()
        while len(finished(store)) == len(before) and time.monotonic() - start < 60:
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.06))
        process.send_signal(signal.SIGKILL)
        process.wait()
        after = computed(store)
        assert all(after[task] == count for task, count in before.items())
        assert len(finished(store)) > len(before)
    before = {task: computed(store)[task] for task in finished(store)}
    assert before and len(before) < len(finished(folder / "whole.zarr"))
    found = compare(folder, store=store)
    assert all(computed(store)[task] == count for task, count in before.items())
    assert found.identical(whole) and tnsim.open_pairwise(store).identical(whole)
    assert contents(store) == contents(folder / "whole.zarr")
    counts = computed(store)
    compare(folder, store=store)
    assert computed(store) == counts


def test_a_tile_that_is_half_written_is_not_trusted(folder):
    """What stands in the place of a record is neither shown nor kept, and what is lost is told."""
    store = folder / "store"
    whole = compare(folder, store=store)
    (store / "finished.json").unlink()
    lost = file_of(store, "tile 1 0")
    data, tile = lost.read_bytes(), listed(store)["growths"][0]["tile"]
    lost.unlink()
    with pytest.warns(tnsim.errors.StoreWarning, match=r"store: not finished: tile 1 0 missing"):
        shown = tnsim.open_pairwise(store).similarity
    assert np.isnan(shown[tile : 2 * tile, :tile]).all() and not np.isnan(shown[:tile, :tile]).any()
    lost.write_bytes(data[: len(data) // 2])
    with refused("damaged: tile 1 0; run pairwise again", tnsim.errors.DamagedStore):
        tnsim.open_pairwise(store)
    with pytest.warns(tnsim.errors.StoreWarning, match="damaged: tile 1 0; computed again"):
        assert compare(folder, store=store).identical(whole)
    assert lost.read_bytes() == data


def test_what_killed_processes_left_is_swept(folder, monkeypatch):
    """Files in the making: those of processes that are gone, and none that names no process."""
    whole, path = compare(folder), folder / "store"
    compare(folder, store=path)
    before = contents(path)
    dead = f"{stores.host()}-{ended()}-{'c9aa' * 8}"
    ours, elsewhere = "-".join(stores.maker()), f"{'0' * 16}-1-{'c9aa' * 8}"

    def being_written(maker, age=0):
        made = [path / f".{maker}.partial", path / "records" / f".{maker}.partial"]
        for file in made:
            file.touch()
            os.utime(file, (time.time() - age,) * 2)
        return made

    left = [*being_written(dead), *being_written(f"1{elsewhere[1:]}", age=25 * 3600)]
    kept = [*being_written(ours), *being_written(elsewhere), *being_written("x")]
    assert tnsim.open_pairwise(path).identical(whole) and all(made.exists() for made in left)
    assert compare(folder, store=path).identical(whole)
    assert not any(made.exists() for made in left) and all(made.exists() for made in kept)
    for made in kept:
        made.unlink()
    assert contents(path) == before


def test_sweeping_takes_nothing_from_a_process_that_is_writing(folder, monkeypatch):
    """Another run ends each time a file is whole and not renamed yet."""
    whole, path = compare(folder), folder / "store"
    swept = []

    def sweeping_first(function):
        def wrapped(*arguments):
            swept.append(arguments)
            stores.sweep(path)
            return function(*arguments)

        return wrapped

    monkeypatch.setattr(os, "replace", sweeping_first(os.replace))
    assert compare(folder, store=path).identical(whole)
    assert len(swept) > 15 and tnsim.open_pairwise(path).identical(whole)


def test_a_full_disk_is_told_and_nothing_is_lost(folder, monkeypatch):
    whole, write, count = compare(folder), stores.log_start, []

    def fails(store, what):
        count.append(what)
        if len(count) == 6:
            with stores.writing(store.path):
                raise OSError(28, "No space left on device")
        write(store, what)

    monkeypatch.setattr(stores, "log_start", fails)
    said = "store: cannot be written: No space left on device; finished tiles are kept, run again"
    with refused(said, tnsim.TnsimError):
        compare(folder, store=folder / "store")
    with pytest.warns(tnsim.errors.StoreWarning, match="not finished"):
        assert np.isnan(tnsim.open_pairwise(folder / "store").similarity).any()
    assert compare(folder, store=folder / "store").identical(whole)


def denied(code, allowed):
    """What a file system answers where `allowed` says no: root, as which tests may run, may do all."""

    def asked(function):
        def answered(path, *arguments, **options):
            if not allowed(str(path)):
                raise OSError(code, os.strerror(code), path)
            return function(path, *arguments, **options)

        return answered

    return asked


def test_a_finished_store_may_be_read_only(folder, monkeypatch):
    """Also one in which a killed process has left something that nobody can remove now."""
    whole, store = compare(folder, store=folder / "store"), folder / "store"
    (store / f".{stores.host()}-{ended()}-{'c9aa' * 8}.partial").touch()
    before = contents(store)
    locked = denied(errno.EROFS, lambda path: not path.startswith(str(store)))
    for name in ("unlink", "replace", "mkdir", "rmdir"):
        monkeypatch.setattr(os, name, locked(getattr(os, name)))
    assert compare(folder, store=store).identical(whole)
    assert tnsim.open_pairwise(store).identical(whole)
    assert contents(store) == before


@pytest.mark.parametrize("name", ["tile 1 0", "run", "models", "finished", "."])
def test_what_may_not_be_read_is_not_damaged(name, folder, monkeypatch):
    """It is named, and nobody is told to remove what others can read."""
    whole, store = compare(folder, store=folder / "store"), folder / "store"
    hidden = {"tile 1 0": file_of(store, "tile 1 0"), ".": store}.get(name, store / f"{name}.json")
    before = contents(store)
    with monkeypatch.context() as patch:
        readable = denied(
            errno.EACCES, lambda path: not path.startswith(str(hidden) + "/" * (name == "."))
        )
        for function in ("open", "stat", "lstat") if name == "." else ("open",):
            patch.setattr(os, function, readable(getattr(os, function)))
        for use in (tnsim.open_pairwise, lambda path: compare(folder, store=path)):
            with refused(
                "cannot be read: Permission denied; give a store that you", tnsim.TnsimError
            ):
                use(store)
    assert contents(store) == before and tnsim.open_pairwise(store).identical(whole)


def test_a_store_without_models_is_no_other_folder(folder):
    """A run that ended before its list of models was there, or is about to write it."""
    compare(folder, store=folder / "store")
    (folder / "begun").mkdir()
    shutil.copy(folder / "store" / "run.json", folder / "begun")
    with refused("begun: no model was compared; run pairwise again", tnsim.errors.StoreMismatch):
        tnsim.open_pairwise(folder / "begun")


def test_a_store_of_another_run_is_refused(folder, rng):
    models, store = tnsim.load(folder / "models"), folder / "store"
    tnsim.pairwise(models, store=store)
    shifted = tnsim.Gaussian(np.ones(3))
    for given, options, message in [
        (models, {"metric": tnsim.Frobenius()}, 'metric "gaussian", and "frobenius" is asked for'),
        (models, {"metric": shifted}, "gaussian has other parameters there, such as"),
        (models, {"dtype": "float32"}, 'dtype "float64", and "float32" is asked for'),
        (models, {"slices": True}, "slices false, and true is asked for"),
        (models[:4], {}, "10 models on side a, and 4 are given"),
        (models, {"other": models}, "all pairs of one list; give another path"),
    ]:
        with refused(f"store: holds another run: {message}", tnsim.errors.StoreMismatch):
            tnsim.pairwise(given, store=store, **options)
    tnsim.save(tnsim.Model([bilinear(rng, 3, 4, 2, True)]), models.paths[3])
    said = r"other weights for 3 \(side a, number 3\); give another path, or remove it"
    with refused(said, tnsim.errors.StoreMismatch):
        tnsim.pairwise(models, store=store)
    data = json.loads((store / "run.json").read_text())
    for version in (stores.FORMAT - 1, stores.FORMAT + 1):
        data["content"]["format"] = version
        (store / "run.json").write_text(json.dumps(data))
        for use in (lambda path: tnsim.pairwise(models, store=path), tnsim.open_pairwise):
            with refused("a store of another version of tnsim", tnsim.errors.StoreMismatch):
                use(store)
    content = json.loads((store / "models.json").read_text())["content"]
    del content["centred"]  # as in version 6
    stores.write_list(store / "models.json", content | {"format": 6})
    (store / "run.json").unlink()
    (store / "finished.json").unlink()
    with refused("a store of another version of tnsim", tnsim.errors.StoreMismatch):
        tnsim.open_pairwise(store)
    for name in ("zarr.json", "parts.json"):
        earlier = folder / name / "store"
        earlier.mkdir(parents=True)
        (earlier / name).write_text("{}")
        for use in (lambda path: tnsim.pairwise(models, store=path), tnsim.open_pairwise):
            with refused("a store of another version of tnsim", tnsim.errors.StoreMismatch):
                use(earlier)
        assert [file.name for file in earlier.iterdir()] == [name]
    with refused(r"models: not a store of tnsim.pairwise", tnsim.errors.StoreMismatch):
        tnsim.pairwise(models, store=folder / "models")
    with refused(r"nowhere: not a store of tnsim.pairwise", tnsim.errors.StoreMismatch):
        tnsim.open_pairwise(folder / "nowhere")


@pytest.mark.slow
def test_two_processes_on_one_store(folder):
    """Started at the same instant, they begin at most a tenth of the tasks twice."""
    together = RUN.replace(
        "tnsim.pairwise(",
        "import pathlib, time\nfrom tnsim.all_pairs import result\nwrite = result.log_abs\n"
        "result.log_abs = lambda x: (time.sleep(0.03), write(x))[1]\n"
        "pathlib.Path(f'{os.getpid()}.ready').touch()\n"
        "while not pathlib.Path('go').exists():\n    time.sleep(0.01)\ntnsim.pairwise(",
    )
    both = [started(together, cwd=folder) for _ in range(2)]
    while len(list(folder.glob("*.ready"))) < 2:
        assert not any(process.poll() for process in both)
        time.sleep(0.01)
    (folder / "go").touch()
    assert [process.wait() for process in both] == [0, 0]
    assert tnsim.open_pairwise(folder / "store").identical(compare(folder))
    assert not [p for p in folder.iterdir() if p.suffix == ".tmp"]
    assert not (folder / "store" / "leases").exists()
    counts = computed(folder / "store")
    assert len(counts) == 14 and sum(counts.values()) <= 1.1 * len(counts)
    lines = (folder / "store" / "computed.log").read_text().splitlines()
    assert len({line.split()[1] for line in lines}) == 2  # both had a part in it


def test_a_checkpoint_that_changes_under_way(folder, rng, monkeypatch):
    models = tnsim.load(folder / "models")

    def swaps(job, entries, run=tiles.norms):
        tnsim.save(tnsim.Model([bilinear(rng, 3, 4, 2, True)]), models.paths[0])
        return run(job, entries)

    monkeypatch.setattr(tiles, "norms", swaps)
    said = "step_000.safetensors: has changed while the run was under way"
    with refused(said, tnsim.CheckpointError):
        tnsim.pairwise(models)
