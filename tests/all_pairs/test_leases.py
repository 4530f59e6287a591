"""Leases: one process at a tile, and no tile blocked by a process that is gone."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
from stored_runs import Stopping, begun, compare

import tnsim
from tnsim.all_pairs import store as stores
from tnsim.all_pairs import work
from tnsim.all_pairs.store import Leases


@pytest.fixture
def dead():
    """The number of a process that has ended."""
    return processes.ended()


def put(path, label, text):
    (path / "leases").mkdir(exist_ok=True)
    (path / "leases" / label).write_text(text)


def test_one_holder_at_a_time(tmp_path):
    with Leases(tmp_path) as ours, Leases(tmp_path) as theirs:
        assert ours.take("tile 0 0") and not theirs.take("tile 0 0") and theirs.take("tile 1 0")
        ours.release("tile 0 0")
        assert theirs.take("tile 0 0") and not ours.take("tile 0 0")
    assert not (tmp_path / "leases").exists()


def test_in_memory_nobody_else_is_there():
    with Leases(None) as ours:
        assert ours.take("tile 0 0") and ours.take("tile 0 0")


def test_whoever_finishes_removes_the_folder_meanwhile(tmp_path, monkeypatch):
    mkdir, made = Path.mkdir, []

    def removed_at_once(folder):
        mkdir(folder)
        if not made:
            folder.rmdir()
        made.append(folder)

    monkeypatch.setattr(Path, "mkdir", removed_at_once)
    with Leases(tmp_path) as ours:
        assert ours.take("tile 0 0")
    assert len(made) == 2


def test_a_dead_holder_of_this_host_does_not_block(tmp_path, dead):
    put(tmp_path, "tile-0-0", f"{stores.host()} {dead} x")
    with Leases(tmp_path) as ours:
        assert ours.take("tile 0 0")


@pytest.mark.parametrize(
    "text", ["elsewhere 1 x", ""]
)  # another host, killed before it was written
def test_a_lease_without_a_sign_of_life_expires(text, tmp_path, monkeypatch):
    put(tmp_path, "tile-0-0", text)
    now = [0.0]
    monkeypatch.setattr(stores.time, "monotonic", lambda: now[0])
    with Leases(tmp_path) as ours:
        assert not ours.take("tile 0 0")
        now[0] += stores.EXPIRY / 2
        # A sign of life, whatever that clock says.
        os.utime(tmp_path / "leases" / "tile-0-0", (1, 1))
        assert not ours.take("tile 0 0")
        now[0] += stores.EXPIRY - 1
        assert not ours.take("tile 0 0")
        now[0] += 2
        assert ours.take("tile 0 0")


def test_leases_are_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "_RENEWAL", 0.01)
    renewed = threading.Event()
    monkeypatch.setattr(stores.os, "utime", lambda file: renewed.set())
    with Leases(tmp_path) as ours:
        ours.take("tile 0 0")
        assert renewed.wait(10)


@pytest.mark.slow
def test_a_run_waits_for_the_tile_of_another(folder, dead, monkeypatch):
    """What another process has in hand is left to it, until it is there or its process is gone."""
    whole, store = compare(folder, store=folder / "whole.zarr"), folder / "store"

    with pytest.raises(tnsim.errors.ExecutorError):
        compare(folder, store=store, executor=Stopping(0))
    put(store, "tile-2-1", f"{stores.host()} {os.getpid()} other")
    put(store, "norms-a-1", f"{stores.host()} {dead} other")
    pauses = []

    def other_dies(seconds):
        """In the third pause; until then the run has everything else in hand."""
        pauses.append(seconds)
        if len(pauses) == 3:
            put(store, "tile-2-1", f"{stores.host()} {dead} other")

    monkeypatch.setattr(work, "time", SimpleNamespace(sleep=other_dies))
    assert compare(folder, store=store).identical(whole)
    assert len(pauses) == 3
    tasks = begun(store)
    assert tasks[-1] == "tile 2 1" and len(tasks) == len(set(tasks)) + 1  # one was interrupted


def test_a_folder_of_leases_that_goes_while_it_is_asked_for(tmp_path, monkeypatch):
    """It is there when it is made, and gone when somebody looks what it is."""
    mkdir, gone = Path.mkdir, []

    def finished_meanwhile(folder, **options):
        if not gone:
            gone.append(folder)
            raise FileExistsError(17, "File exists", str(folder))
        mkdir(folder, **options)

    monkeypatch.setattr(Path, "mkdir", finished_meanwhile)
    with Leases(tmp_path) as ours:
        assert ours.take("tile 0 0") and gone


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
@pytest.mark.parametrize("place", ["leases", "leases/tile-0-0", "leases/tile-7-7", "leases/lists"])
def test_what_no_process_leased_blocks_nothing(place, make, tmp_path):
    """A folder, a pipe that nobody writes to, a link to nowhere; also in the place of the folder."""
    (tmp_path / place).parent.mkdir(exist_ok=True)
    make(tmp_path / place)
    with Leases(tmp_path) as ours:
        ours.wait(stores.LISTS)
        assert ours.take("tile 0 0")
    assert not (tmp_path / "leases").exists()


def test_a_process_of_a_container_of_the_same_name_is_another(tmp_path, dead, monkeypatch):
    """Numbers of processes say nothing where processes are numbered anew."""
    put(tmp_path, "tile-0-0", f"{stores.host()} {dead} x")
    monkeypatch.setattr(stores, "host", lambda: "a" * 16)
    with Leases(tmp_path) as ours:
        assert not ours.take("tile 0 0")
