"""Stores that grow: new pairs alone are computed, earlier numbers stay bit for bit."""

import contextlib
import re
import shutil
import time
import warnings

import numpy as np
import pytest
from closeness import LARGEST, assert_close
from oracles import bilinear
from processes import started
from refusals import refused
from stored_runs import TINY, Stopping, begun, contents, listed

import tnsim
from tnsim.all_pairs.store import Leases


@pytest.fixture
def models(rng):
    return [tnsim.Model([bilinear(rng, 3, 4, 2, True)]) for _ in range(10)]


def computed(store):
    """Every record that was begun, with its growth and its record, once for each time."""
    found = (re.fullmatch(r"(?:grown/(\d+)/)?(.*)", task).groups() for task in begun(store))
    return [(int(growth or 0), record) for growth, record in found]


def same(found, wanted, rtol=1e-12):
    """Whether two results have the same labels and, but for rounding, the same numbers."""
    assert list(found.data_vars) == list(wanted.data_vars)
    for name in found.data_vars:
        scale = LARGEST
        if name == "log_inner":  # d log|x| = dx / x, and dx is relative to the norms
            scale = 1 / np.abs(wanted["similarity"].values)
        assert_close(found[name].values, wanted[name].values, scale=scale, rtol=rtol)
    for name in ("a", "b", "name_a", "hash_a", "hash_b"):
        assert (found[name].values == wanted[name].values).all()
    assert found.attrs["duplicates"] == wanted.attrs["duplicates"]
    return True


def relu(rng):
    first = tnsim.Linear(rng.normal(size=(4, 3)), rng.normal(size=4))
    return tnsim.Model([first, tnsim.Elementwise("relu"), tnsim.Linear(rng.normal(size=(2, 4)))])


INPUTS = np.random.default_rng(3).normal(size=(40, 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "route, metric, options",
    [
        ("features", tnsim.Gaussian(), {"slices": True, "budget": TINY}),
        ("contractions", tnsim.GaussianClosure(), {"slices": True}),
        ("data", tnsim.Empirical(INPUTS), {}),
        ("kernels", tnsim.Gaussian(), {}),
    ],
)
def test_new_pairs_alone_are_computed(route, metric, options, models, rng, tmp_path):
    """Five models, then six, then nine: old numbers bit for bit, all as one run would give them."""
    store, known, before = tmp_path / "store", None, []
    if route == "contractions":
        models = [tnsim.Model([bilinear(rng, 3, 4, 3, True), *one.layers]) for one in models]
    if route == "kernels":
        models = [relu(rng) for _ in models]
    for count in (5, 6, 9):
        found = tnsim.pairwise(models[:count], metric, store=store, **options)
        assert same(found, tnsim.pairwise(models[:count], metric, **options))
        assert tnsim.open_pairwise(store).identical(found)
        assert (found.similarity == found.similarity.T.values).all()
        assert {growth["route"] for growth in listed(store)["growths"]} == {route}
        if known is not None:
            old = {"a": slice(len(known.a)), "b": slice(len(known.b))}
            for name in found.data_vars:
                chosen = {dim: old[dim] for dim in old if dim in found[name].dims}
                assert (found[name].isel(chosen).values == known[name].values).all()
        now = computed(store)
        assert len(now) == len(set(now)) and set(before) < set(now)
        step = (5, 6, 9).index(count)
        new = {(growth, record.split()[0]) for growth, record in set(now) - set(before)}
        kinds = ("norms", "within", "across") if step else ("norms", "tile")
        assert new == {(step, kind) for kind in kinds}
        known, before = found, now
    # Squared norms are computed of new models alone.
    sizes = {0: 5, 1: 1, 2: 3}
    norms = [growth for growth, record in before if "norms" in record]
    assert all(norms.count(growth) <= models for growth, models in sizes.items())
    whole = tnsim.pairwise(models[:9], metric, store=store, **options)
    assert whole.identical(known) and computed(store) == before


def test_one_model_after_another_takes_few_tiles(models, tmp_path):
    """A new model against all earlier ones is one tile, as long as one tile holds them."""
    store = tmp_path / "store"
    for count in (4, 5, 6):
        found = tnsim.pairwise(models[:count], store=store)
    assert found.attrs["plan"].endswith("; grown 2 times, by 2 models")
    records = [record for growth, record in computed(store) if growth == 2]
    assert records == ["norms a 0", "within tile 0 0", "across tile 0 0"]


@pytest.mark.slow
def test_models_of_other_sizes_join(models, rng, tmp_path):
    """The route of the first run is kept where it holds the new models."""
    store = tmp_path / "store"
    tnsim.pairwise(models[:3], store=store)
    deep = tnsim.Model([bilinear(rng, 3, 5, 3, True), bilinear(rng, 3, 4, 2, True)])
    wide = tnsim.Model([bilinear(rng, 3, 7, 2, False)])
    found = tnsim.pairwise([*models[:3], deep, wide], store=store)
    assert same(found, tnsim.pairwise([*models[:3], deep, wide]), rtol=1e-11)
    first, second = listed(store)["growths"]
    assert first["route"] == second["route"]


def test_labels_follow_the_names_of_all_files(models, tmp_path):
    """A single file has its name for a label; files that differ by a number have their steps."""
    paths = [tmp_path / f"step_{n}.safetensors" for n in (100, 200, 300)]
    for count in (1, 2, 3):
        tnsim.save(models[count], paths[count - 1])
        found = tnsim.pairwise(paths[:count], store=tmp_path / "store")
        assert same(found, tnsim.pairwise(paths[:count]))
        assert tnsim.open_pairwise(tmp_path / "store").identical(found)
    assert found.a.values.tolist() == [100, 200, 300]


def test_later_models_may_be_approximate_or_have_caveats(rng, tmp_path):
    shallow = [tnsim.Model([bilinear(rng, 3, 4, 3, True)]) for _ in range(3)]
    origin = tnsim.models.model.Origin("a file", caveats=("left out: norm.weight",))
    read = tnsim.Model(shallow[2].layers, origin=origin)
    deep = tnsim.Model([*shallow[0].layers, *shallow[1].layers])
    store, metric = tmp_path / "store", tnsim.GaussianClosure()
    assert tnsim.pairwise(shallow[:2], metric, store=store).attrs["exact"] == 1
    with pytest.warns(tnsim.CaveatWarning, match=r"left out: norm\.weight"):
        grown = tnsim.pairwise([*shallow[:2], read, deep], metric, store=store)
    assert grown.attrs["exact"] == 0 and grown.attrs["caveats"] == ["left out: norm.weight"]
    assert tnsim.open_pairwise(store).identical(grown)
    earlier = tnsim.pairwise(shallow[:2], metric, store=store)
    assert earlier.attrs["exact"] == 1 and earlier.attrs["caveats"] == []


def test_a_run_of_earlier_models_reads_what_it_has(models, tmp_path):
    store = tmp_path / "store"
    first = tnsim.pairwise(models[:3], store=store)
    second = tnsim.pairwise(models[:5], store=store)
    tnsim.pairwise(models[:6], store=store)
    before = computed(store)
    assert tnsim.pairwise(models[:3], store=store).identical(first)
    assert tnsim.pairwise(models[:5], store=store).identical(second)
    assert computed(store) == before


def test_other_models_are_refused(models, tmp_path):
    store = tmp_path / "store"
    tnsim.pairwise(models[:3], store=store)
    tnsim.pairwise(models[:5], store=store)
    for given, message in [
        ([*models[:2], models[9], *models[3:6]], r"other weights for 2 \(side a, number 2\)"),
        ([*models[:3], models[8], *models[4:6]], r"other weights for 3 \(side a, number 3\)"),
        (models[:4], "5 models on side a, and 4 are given"),
        (dict(zip("uvwxyz", models[1:7], strict=True)), r"a model 0 \(side a.*that is not given"),
        (dict(zip([4, 3, 2, 1, 0], models[4::-1], strict=True)), "in another order"),
    ]:
        with refused(f"holds another run: .*{message}", tnsim.errors.StoreMismatch):
            tnsim.pairwise(given, store=store)


def test_a_growth_that_was_stopped_goes_on(models, tmp_path):
    """After any number of tasks the old numbers are there; the end is that of a run left alone."""
    options = {"budget": TINY}
    metric = tnsim.GaussianClosure()
    alone, store = tmp_path / "alone" / "store", tmp_path / "store"
    for path in (alone, store):
        first = tnsim.pairwise(models[:4], metric, store=path, **options)
    whole = tnsim.pairwise(models[:9], metric, store=alone, **options)
    stops = 0
    for tasks in (0, 1, 2, 3, 4):
        try:
            tnsim.pairwise(models[:9], metric, store=store, executor=Stopping(tasks), **options)
        except tnsim.errors.ExecutorError:
            stops += 1
            with pytest.warns(tnsim.errors.StoreWarning, match="not finished: .*grown/1/"):
                shown = tnsim.open_pairwise(store)
            assert (shown.similarity.values[:4, :4] == first.similarity.values).all()
            known = ~np.isnan(shown.similarity.values)
            assert (shown.similarity.values[known] == whole.similarity.values[known]).all()
    assert stops >= 3
    assert tnsim.pairwise(models[:9], metric, store=store, **options).identical(whole)
    assert contents(store) == contents(alone)


def test_two_processes_grow_one_store(models, tmp_path, monkeypatch):
    """Another process adds other models just before: both end with all models, no pair twice."""
    store, take, others = tmp_path / "store", Leases.take, []
    tnsim.pairwise(models[:3], store=store)

    def later(leases, label):
        if not others:
            others.append(None)
            others.append(tnsim.pairwise(models[:4], store=store))
        return take(leases, label)

    monkeypatch.setattr(Leases, "take", later)
    found = tnsim.pairwise(models[:6], store=store)
    assert same(found, tnsim.pairwise(models[:6])) and same(others[1], tnsim.pairwise(models[:4]))
    assert listed(store)["since_a"] == [0, 0, 0, 1, 2, 2]
    assert len(computed(store)) == len(set(computed(store)))
    assert not list(store.rglob("*.partial"))


@pytest.mark.slow
def test_damage_to_a_grown_store(models, tmp_path):
    """Every file flipped in its middle or lost: the same numbers again, told, or a refusal."""
    store = tmp_path / "store"
    tnsim.pairwise(models[:2], store=store)
    whole = tnsim.pairwise(models[:4], store=store)
    before = contents(store)
    assert len(before) == 3 + 5
    for name, data in before.items():
        # More bytes than stand between two arrays, which no checksum covers and nobody reads.
        start, stop = len(data) // 2 - 64, len(data) // 2 + 64
        flipped = bytes(byte ^ 1 for byte in data[start:stop])
        for damaged in (data[:start] + flipped + data[stop:], None):
            if damaged is None and name == "finished.json":
                continue  # without the mark of its end a store has all of its numbers
            (store / name).unlink() if damaged is None else (store / name).write_bytes(damaged)
            with refused("damaged", tnsim.errors.DamagedStore):
                tnsim.open_pairwise(store)
            with pytest.warns(tnsim.errors.StoreWarning, match="damaged: .*; computed again"):
                assert tnsim.pairwise(models[:4], store=store).identical(whole)
            assert contents(store) == before
            assert tnsim.open_pairwise(store).identical(whole)


def test_labels_are_those_of_the_call(models, tmp_path):
    store = tmp_path / "store"
    tnsim.pairwise(models[:3], store=store)
    labelled = dict(zip("xyz", models, strict=False)), dict(zip((7, 8, 9), models, strict=False))
    for given in labelled:
        assert same(tnsim.pairwise(given, store=store), tnsim.pairwise(given))
    with pytest.warns(tnsim.errors.DuplicateWarning):
        given = {"x": models[0], "best": models[2], "y": models[1], "z": models[2]}
        found = tnsim.pairwise(given, store=store)
        assert same(found, tnsim.pairwise(given)) and tnsim.open_pairwise(store).identical(found)


def test_lists_of_another_state_give_no_other_numbers(models, tmp_path):
    """Of the same first run, with other models in between: each reads the numbers of its own."""
    stores = [tmp_path / "one", tmp_path / "two"]
    for store, between in zip(stores, models[3:5], strict=True):
        for given in ([models[0]], [models[0], between], [models[0], between, models[7]]):
            whole = tnsim.pairwise(given, store=store)
    shutil.copy(stores[1] / "models.json", stores[0] / "models.json")
    with refused(r"damaged: norms a 0|damaged: grown", tnsim.errors.DamagedStore):
        tnsim.open_pairwise(stores[0])
    with pytest.warns(tnsim.errors.StoreWarning, match="damaged: "):
        assert tnsim.pairwise(given, store=stores[0]).identical(whole)
    assert tnsim.open_pairwise(stores[0]).identical(whole)


@pytest.mark.sampled(quick=2, slow=6)
@pytest.mark.filterwarnings("ignore::tnsim.errors.DuplicateWarning")
@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("columns", [False, True])
def test_any_history_of_a_store(columns, seed, models, tmp_path):
    """Models at any place, copies, stops and damage: right numbers, and finished records stay."""
    rng, store = np.random.default_rng(seed), tmp_path / "store"
    names, given, other = iter(range(1000)), {}, {} if columns else None
    options = {"budget": TINY, "slices": True}
    for step in range(7):
        for side in (given, other):
            for _ in range(0 if side is None else rng.integers(1 if not side else 0, 4)):
                labelled = list(side.items())
                model = models[rng.integers(len(models))]
                labelled.insert(rng.integers(len(labelled) + 1), (f"m{next(names)}", model))
                side.clear()
                side.update(labelled)
        earlier = {}
        if (store / "records").exists():
            earlier = {file: file.stat().st_mtime_ns for file in (store / "records").iterdir()}
        fate = rng.choice(["whole", "stopped", "damaged"]) if step else "whole"
        if fate == "damaged":
            files = [file for file in sorted(store.rglob("*")) if file.suffix in (".npz", ".json")]
            hurt = files[rng.integers(len(files))]
            data = hurt.read_bytes()
            cut = data[: rng.integers(len(data))]
            hurt.write_bytes(cut) if rng.random() < 0.7 else hurt.unlink()
            earlier.pop(hurt, None)
        if fate == "stopped":
            with contextlib.suppress(tnsim.errors.ExecutorError):
                executor = Stopping(int(rng.integers(6)))
                tnsim.pairwise(given, other=other, store=store, executor=executor, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tnsim.errors.StoreWarning)
            found = tnsim.pairwise(given, other=other, store=store, **options)
        assert same(found, tnsim.pairwise(given, other=other, **options), rtol=1e-11)
        assert tnsim.open_pairwise(store).identical(found)
        assert all(file.stat().st_mtime_ns == time for file, time in earlier.items())
    assert [file.name for file in tmp_path.iterdir()] == ["store"]


GROW = """
import os, sys, tnsim
from tnsim.all_pairs import result
import time
write = result.log_abs
result.log_abs = lambda x: (time.sleep(0.02), write(x))[1]
series = tnsim.load(os.path.abspath("models"))
for count in map(int, sys.argv[1:]):
    tnsim.pairwise(series[:count], tnsim.GaussianClosure(), store="store", budget=tnsim.Budget(memory_bytes=20_000))
"""


@pytest.mark.slow
def test_processes_at_a_growing_store(folder):
    """Two processes grow one store at the same time, while a third reads."""
    series, store = tnsim.load(folder / "models"), folder / "store"
    tnsim.pairwise(series[:4], tnsim.GaussianClosure(), store=store, budget=TINY)
    known = tnsim.open_pairwise(store).similarity.values
    both = [started(GROW, *counts.split(), cwd=folder) for counts in ("5 7 10", "4 10")]
    looked = 0
    while any(process.poll() is None for process in both):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tnsim.errors.StoreWarning)
            shown = tnsim.open_pairwise(store).similarity.values
        assert (shown[:4, :4] == known).all()
        looked += 1
        time.sleep(0.05)
    assert looked > 5 and 0 in [process.returncode for process in both]
    found = tnsim.pairwise(series, tnsim.GaussianClosure(), store=store, budget=TINY)
    assert same(found, tnsim.pairwise(series, tnsim.GaussianClosure(), budget=TINY))
    counts = computed(store)
    assert len(counts) <= 1.1 * len(set(counts)) + 1
