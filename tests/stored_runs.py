"""Small runs into stores: a run of few tiles, and what a store holds byte by byte."""

from concurrent.futures import Future

import tnsim

TINY = tnsim.Budget(memory_bytes=20_000)  # tiles of two or three models


def compare(folder, **options):
    """All pairs of the checkpoints in `models`, tile by tile."""
    options = {"slices": True, "budget": TINY} | options
    return tnsim.pairwise(tnsim.load(folder / "models"), tnsim.GaussianClosure(), **options)


def contents(path):
    """Every chunk and every piece of metadata of a store, byte by byte."""
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in path.rglob("*")
        if p.is_file() and p.name != "computed.log"
    }


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
