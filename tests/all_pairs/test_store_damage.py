"""Damage to a store: the numbers of the undamaged run, or an error, never other numbers."""

import contextlib
import functools
import itertools
import os
import shutil
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from oracles import bilinear
from refusals import refused
from stored_runs import contents, file_of, files_of

import tnsim
from tnsim.all_pairs import store as stores

TINY = tnsim.Budget(memory_bytes=12_000)  # tiles of two models


@pytest.fixture(scope="module")
def models():
    rng = np.random.default_rng(0)
    return [tnsim.Model([bilinear(rng, 3, 4, 2, True)]) for _ in range(3)]


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    """A finished store, and its result."""
    path = tmp_path_factory.mktemp("whole") / "store"
    result = tnsim.pairwise(models, slices=True, store=path, budget=TINY)
    assert "in 3 tiles of 2 x 2" in result.attrs["plan"]
    return path, result


@pytest.fixture
def store(whole, tmp_path):
    """A copy of the finished store, to be damaged."""
    return Path(shutil.copytree(whole[0], tmp_path / "store"))


@pytest.fixture
def restored(models, whole, store):
    """The run of the store once more: what was lost is told, and computed again to the same bytes."""

    def run(told="damaged"):
        with pytest.warns(tnsim.errors.StoreWarning, match=told):
            assert tnsim.pairwise(models, slices=True, store=store, budget=TINY).identical(whole[1])
        assert contents(store) == contents(whole[0])

    return run


def place_of(store, name):
    """The file of a record, of a list or of the log."""
    if name in ("run", "models", "finished"):
        return store / f"{name}.json"
    return store / name if name == stores.LOG else file_of(store, name)


STANDING = {
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
}


@pytest.mark.crossing
@pytest.mark.parametrize("what", STANDING)
@pytest.mark.parametrize("name", ["tile 0 0", "norms a 1", "finished", "models", "run"])
def test_what_is_no_file_in_the_place_of_one(name, what, whole, store, restored):
    """It is damage like any other: told, and in its place comes what was lost."""
    place = place_of(store, name)
    place.unlink()
    STANDING[what](place)
    assert shows_nothing_else(store, whole[1])
    restored()


def test_a_file_in_the_place_of_a_folder(whole, store, restored):
    shutil.rmtree(store / "records")
    (store / "records").touch()
    assert shows_nothing_else(store, whole[1])
    restored()


@functools.cache
def watched():
    """Paths that become pipes as they are opened.

    Python calls one function, for as long as it runs, whenever anything is about to open a file or to do much else.
    """
    waiting = []

    def exchanged(event, arguments):
        if waiting and event == "open" and arguments[0] in (str(waiting[0]), waiting[0]):
            os.mkfifo(waiting.pop())

    sys.addaudithook(exchanged)
    return waiting


@pytest.mark.parametrize("name", ["tile 0 0", "models", "run", stores.LOG])
def test_a_pipe_that_takes_the_place_of_a_file_as_it_is_opened(name, models, store):
    """No look at a file beforehand helps; opening a pipe to read or to write waits for nobody."""
    place, lost = place_of(store, name), place_of(store, "tile 1 0")
    place.unlink(missing_ok=True)
    lost.unlink()  # so that there is something to compute, and to log

    def runs():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tnsim.errors.StoreWarning)
            with contextlib.suppress(tnsim.TnsimError):
                tnsim.pairwise(models, slices=True, store=store, budget=TINY)
        ended.append(True)

    ended = []
    watched().append(place)
    thread = threading.Thread(target=runs, daemon=True)
    thread.start()
    thread.join(60)
    assert ended and not watched()


@pytest.mark.parametrize("name", ["records", "leases", stores.LOG])
def test_nothing_is_written_through_a_link(name, models, whole, store, tmp_path):
    """A link in the place of a folder or of the log is named; what it points to stays as it is."""
    later = tnsim.Model([bilinear(np.random.default_rng(1), 3, 4, 2, True)])
    outside = tmp_path / "outside"
    (store / "leases").mkdir()
    place_of(store, "tile 1 0").unlink()  # so that there is something to compute
    (store / name).rename(outside)
    (store / name).symlink_to(outside)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for given in (models, [*models, later]):
        with refused(f"{store / name}: is a link, through which", tnsim.errors.StoreMismatch):
            tnsim.pairwise(given, slices=True, store=store, budget=TINY)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    # A store that stands elsewhere as a whole is where its owner wants it.
    (store / name).unlink()
    outside.rename(store / name)
    (tmp_path / "link").symlink_to(store)
    with pytest.warns(tnsim.errors.StoreWarning, match="tile 1 0"):
        found = tnsim.pairwise(models, slices=True, store=tmp_path / "link", budget=TINY)
    assert found.identical(whole[1]) and tnsim.open_pairwise(store).identical(whole[1])


def test_a_folder_with_files_of_others_is_named_and_kept(models, store):
    place = place_of(store, "tile 0 0")
    place.unlink()
    place.mkdir()
    (place / "thesis").write_text("mine")
    with (
        pytest.warns(tnsim.errors.StoreWarning),
        refused(rf"Directory not empty \({place}", tnsim.TnsimError),
    ):
        tnsim.pairwise(models, slices=True, store=store, budget=TINY)
    assert (place / "thesis").read_text() == "mine"


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_names_that_no_store_can_have(name, models, tmp_path):
    for use in (tnsim.open_pairwise, lambda path: tnsim.pairwise(models, store=path)):
        with refused(r"no path of a store: .*; give another", tnsim.errors.StoreMismatch):
            use(tmp_path / name)


def test_a_file_or_an_empty_name_is_no_store(models, tmp_path, monkeypatch):
    """Of a checkpoint it was said to be a damaged store, to be removed."""
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    (tmp_path / "step_1.safetensors").write_text("weights")
    for name, said in (
        (tmp_path / "step_1.safetensors", "not a store of tnsim.pairwise .Not a directory.; give"),
        ("", "the path of a store is empty; '.' is the present folder"),
    ):
        for use in (tnsim.open_pairwise, lambda path: tnsim.pairwise(models, store=path)):
            with refused(said, tnsim.errors.StoreMismatch):
                use(name)
    assert not [*Path().iterdir()]


def test_the_longest_name(models, tmp_path):
    result = tnsim.pairwise(models, store=tmp_path / ("x" * 255))
    assert tnsim.open_pairwise(tmp_path / ("x" * 255)).identical(result)
    assert len(list(tmp_path.iterdir())) == 1


def flipped(data, at):
    """One bit of the byte `at`, another bit for each byte."""
    return data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


def damages(data, flips):
    """Ways to damage a file, by name: what is in it then, None where it is gone."""
    places = sorted({len(data) * n // flips for n in range(flips)})
    damaged = {f"bit flipped in byte {at}": flipped(data, at) for at in places}
    cuts = {f"cut to {size} bytes": data[:size] for size in {0, len(data) // 2, len(data) - 1}}
    return {**damaged, **cuts, "longer by a byte": data + b"0", "gone": None}


def put(file, data):
    file.unlink(missing_ok=True)
    if data is not None:
        file.write_bytes(data)


def shows_nothing_else(path, result):
    """`open_pairwise` gives the undamaged result or refuses. True where it refused."""
    try:
        assert tnsim.open_pairwise(path).identical(result)
    except (tnsim.errors.DamagedStore, tnsim.errors.StoreMismatch) as error:
        assert str(path) in str(error)
        return True
    return False


@pytest.mark.slow
def test_every_file_damaged(whole, store, restored):
    """In every region of every file: reading refuses, going on restores it and says so."""
    original, result = whole
    before, harmless = contents(original), []
    for n, (name, data) in enumerate(before.items()):
        told = []
        for what, damaged in damages(data, 40).items():
            put(store / name, damaged)
            (told if shows_nothing_else(store, result) else harmless).append((name, what))
        put(store / name, damages(data, 40)[told[n % len(told)][1]])
        restored(r"store: damaged: .*; computed again$")
    # The mark of the end, and times and padding of an archive, outside of its arrays and names.
    harmless.remove(("finished.json", "gone"))
    assert all(name.endswith(".npz") and what[:3] in ("bit", "lon") for name, what in harmless)
    assert len(harmless) < 0.2 * 40 * len(before), harmless


@pytest.mark.parametrize("name", ["run", "models", "finished"])
def test_every_byte_of_lists(name, whole, store):
    """Any bit of a list: reading refuses, with no other class of error."""
    _, result = whole
    file = place_of(store, name)
    data = file.read_bytes()
    for at in range(0, len(data), 7):
        put(file, flipped(data, at))
        assert shows_nothing_else(store, result), at
    put(file, data)
    assert tnsim.open_pairwise(store).identical(result)


@pytest.mark.slow
def test_files_exchanged(whole, store, restored):
    """Whole records, and whole lists, in the place of others and linked there."""
    original, result = whole
    records = ["tile 0 0", "tile 1 0", "tile 1 1", "norms a 0", "norms a 1"]
    for group in (records, ["run", "models", "finished"]):
        for one, other in itertools.permutations(group, 2):
            for link in (False, True):
                shutil.rmtree(store, ignore_errors=True)
                shutil.copytree(original, store)
                place, source = place_of(store, one), place_of(store, other)
                place.unlink()
                place.symlink_to(source) if link else shutil.copy(source, place)
                assert shows_nothing_else(store, result), (one, other)
                restored()
                assert not place.is_symlink()


def test_records_of_another_run_are_no_records(models, whole, tmp_path):
    """Every record under the name of the same tile of a run under another metric, and every list."""
    original, result = whole
    store, options = tmp_path / "store", {"slices": True, "budget": TINY}
    tnsim.pairwise(models, tnsim.Frobenius(), store=store, **options)
    other = tmp_path / "other.zarr"
    shutil.copytree(original, other)
    theirs = files_of(store)
    places = {label: file for label, file in files_of(other).items() if label in theirs}
    assert {"tile 0 0", "norms a 0"} <= places.keys()
    for label, file in places.items():
        shutil.copy(theirs[label], file)
    assert shows_nothing_else(other, result)
    for name in ("models.json", "finished.json"):
        shutil.copy(store / name, other / name)
    assert shows_nothing_else(other, result)
    with pytest.warns(tnsim.errors.StoreWarning, match="damaged"):
        assert tnsim.pairwise(models, store=other, **options).identical(result)


def test_read_while_another_process_finishes(whole, store, monkeypatch):
    """What was not there yet when it was looked for is missing, not damaged."""
    original, result = whole
    fetch = stores.Store.fetch
    late = [place_of(store, name) for name in ("tile 0 0", "tile 1 0", "tile 1 1", "finished")]
    for file in late:
        file.unlink()

    def fetched(self, record):
        if record.label == "tile 1 1":
            for file in late:
                shutil.copy(original / file.relative_to(store), file)
        return fetch(self, record)

    monkeypatch.setattr(stores.Store, "fetch", fetched)
    with pytest.warns(tnsim.errors.StoreWarning, match="not finished: tile 0 0, tile 1 0 missing"):
        shown = tnsim.open_pairwise(store)
    assert np.isnan(shown.similarity[:2, :2]).all()
    assert tnsim.open_pairwise(store).identical(result)


def test_a_store_that_lost_its_lists_is_not_given_to_another_run(models, whole, store):
    _, result = whole
    (store / "run.json").unlink()
    with refused("3 models on side a, and 2 are given", tnsim.errors.StoreMismatch):
        tnsim.pairwise(models[:2], slices=True, store=store, budget=TINY)
    with refused('metric "gaussian", and "frobenius"', tnsim.errors.StoreMismatch):
        tnsim.pairwise(models, tnsim.Frobenius(), slices=True, store=store, budget=TINY)
    assert not (store / "run.json").exists()
    other_tiles = tnsim.Budget(memory_bytes=6_000)  # the store's are kept all the same
    with pytest.warns(tnsim.errors.StoreWarning, match="damaged: run.json; computed again"):
        again = tnsim.pairwise(models, slices=True, store=store, budget=other_tiles)
    assert again.drop_attrs().identical(result.drop_attrs())
    for file in store.glob("*.json"):
        file.unlink()
    for use in (tnsim.open_pairwise, lambda path: tnsim.pairwise(models, store=path)):
        with refused(r"damaged: run.json; .* remove it", tnsim.errors.DamagedStore):
            use(store)
