"""Small runs into stores: a run of few tiles, and what a store holds byte by byte."""

import json
from concurrent.futures import Future

import tnsim
from tnsim.all_pairs import growing
from tnsim.all_pairs.store import Store

TINY = tnsim.Budget(memory_bytes=20_000)  # tiles of two or three models


def compare(folder, **options):
    """All pairs of the checkpoints in `models`, tile by tile."""
    options = {"slices": True, "budget": TINY} | options
    return tnsim.pairwise(tnsim.load(folder / "models"), tnsim.GaussianClosure(), **options)


def contents(path):
    """Every record and every list of a store, byte by byte."""
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in path.rglob("*")
        if p.is_file() and p.name != "computed.log"
    }


def begun(path):
    """Labels of all tasks that were begun, once for each time."""
    log = path / "computed.log"
    return [line.split(maxsplit=2)[2] for line in log.read_text().splitlines()]


def listed(path):
    """The list of the models of a store."""
    return json.loads((path / "models.json").read_text())["content"]


def files_of(path):
    """The file of every record of a store, by its label."""
    store = Store.of(listed(path), path)
    records = [record for grid in growing.grids_of(store) for record in grid.records]
    return {record.label: store._file(store._key(record)) for record in records}


def file_of(path, label):
    """The file of a record."""
    return files_of(path)[label]


class Stopping:
    """An executor that ends a run after some tasks, as a killed process does."""

    def __init__(self, tasks):
        self.tasks = tasks

    def submit(self, function, *arguments):
        if not self.tasks:
            raise OSError("stopped")
        self.tasks -= 1
        future = Future()
        future.set_result(function(*arguments))
        return future
