"""Files that a run leaves: whole or not at all, with labels that do no harm."""

import csv
import json
import os
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from oracles import linear
from pyarrow import parquet
from refusals import refused
from sample_runs import FORMULAS, WRITERS, blocks, data_of
from stored_runs import contents

import tnsim
from tnsim import report
from tnsim.all_pairs import result as result_module
from tnsim.files import replacing


def labelled(rng, labels):
    result = blocks(rng, [len(labels)])
    return result.assign_coords(a=labels, b=labels, name_a=("a", labels))


def names(folder):
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("name", WRITERS)
def test_a_run_that_stops_leaves_the_file_as_it_was(name, tmp_path, rng, monkeypatch):
    """Killed before the rename: the old file is whole and nothing lies beside it."""
    path = tmp_path / name
    WRITERS[name](blocks(rng, [2]), path)
    before = path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        WRITERS[name](blocks(rng, [3]), path)
    assert path.read_bytes() == before and names(tmp_path) == [name]


@pytest.mark.parametrize("name", WRITERS)
def test_what_cannot_be_written_is_an_error_of_ours(name, tmp_path, rng):
    (tmp_path / "file").write_text("")
    with refused(f"{name}: cannot be written: ", tnsim.errors.ResultError):
        WRITERS[name](blocks(rng, [2]), tmp_path / "file" / name)
    assert names(tmp_path) == ["file"]


def test_links_are_followed_and_devices_stay(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to("target")
    with replacing(tmp_path / "link") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"
    with replacing(tmp_path / "plain") as temporary:
        temporary.write_text("new")
    (tmp_path / "usual").write_text("new")
    assert (tmp_path / "plain").stat().st_mode == (tmp_path / "usual").stat().st_mode
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("a device is no file to replace"))
    with replacing(Path(os.devnull)) as device:
        device.write_text("gone")


def cells(result, path):
    """The cells of the table of a result."""
    result_module.write_csv(result, path)
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_labels_are_never_formulas_and_numbers_stay_numbers(tmp_path, rng):
    header, *rows = cells(labelled(rng, [*FORMULAS]), tmp_path / "run.csv")
    assert header[1:] == [*FORMULAS.values()] == [row[0] for row in rows]
    numbers = labelled(rng, [-2, -1, 3])
    header, *rows = cells(numbers, tmp_path / "run.csv")
    assert header[1:] == ["-2", "-1", "3"]
    values = np.array([row[1:] for row in rows], float)
    np.testing.assert_array_equal(values, numbers.similarity)


@pytest.mark.parametrize(
    "before", ["", *"\n \v\f\xa0\ufeff\u200b", "\r\n", " \t", "a\n", "a;", "a,"]
)
def test_no_reader_of_csv_finds_a_formula(before, tmp_path, rng):
    """Whatever separator it takes, and whether or not it heeds quotes."""
    labels = [before + formula for formula in ("=1+1", "@SUM(A1)", '"=1"', "\uff1d1+1")]
    result_module.write_csv(labelled(rng, labels), tmp_path / "run.csv")
    text = (tmp_path / "run.csv").read_bytes().decode()
    starts = [cell.strip('\ufeff\u200b" ')[:1] for cell in re.split(r"[,;\t\n\r\v\f]", text)]
    assert set("=@\uff1d").isdisjoint(starts) and starts.count("'") >= 2 * len(labels)


@pytest.mark.parametrize("digits", [str(2**53 + 1), "9" * 19, "9" * 30, "1" * 5000])
def test_names_that_are_numbers_beyond_what_readers_hold_are_text(digits, tmp_path, rng):
    """As numbers they would lose digits in browsers, or be objects that no file of arrays holds."""
    models = {name: tnsim.Model([linear(rng, 2, 2)]) for name in (digits, "1")}
    result = tnsim.pairwise(models, store=tmp_path / "store")
    assert result.a.values.tolist() == [digits, "1"]
    assert tnsim.open_pairwise(tmp_path / "store").identical(result)
    for name, write in WRITERS.items():
        write(result, tmp_path / name)
    with np.load(tmp_path / "result.npz") as arrays:
        assert all(arrays[name].dtype.kind != "O" for name in arrays)
    assert parquet.read_table(tmp_path / "pairs.parquet")["a"].to_pylist()[0] == digits
    assert tnsim.reading.trajectory(result, to=1)[0] == result.similarity[0, 1]


LABELS = {
    "steps": (["0", "0100"], [0, 100]),
    "largest": (["0", str(2**53)], [0, 2**53]),
    "microseconds": (["1753900000000000", "1"], [1753900000000000, 1]),
    "nanoseconds": (["1753900000000000000", "1753900001000000000"], None),
    "numbers of nanoseconds": ([1753900000000000000, 1753900001000000000], None),
    "one number twice": (["7", "007"], None),
    "words": (["first", "2"], None),
    "mixed": ([0, "last"], None),
    "superscript": (["2\xb2", "1"], None),
}


@pytest.mark.crossing
@pytest.mark.parametrize("labels, known", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("given", ["mapping", "names", "files"])
def test_a_matrix_of_the_same_models_has_the_labels_of_the_result(
    labels, known, given, tmp_path, rng
):
    """xarray joins by labels: with others, every entry would be NaN."""
    known = known or list(map(str, labels))
    models = {label: tnsim.Model([linear(rng, 2, 2)]) for label in labels}
    names = None
    if given == "names":
        models, names = list(models.values()), labels
    if given == "files":
        for label, model in models.items():
            tnsim.save(model, tmp_path / f"{label}.safetensors")
        models = tnsim.Series([tmp_path / f"{label}.safetensors" for label in labels])
    result = tnsim.pairwise(models, names=names, store=tmp_path / "store")
    if given != "files" or labels[0] != "7":  # such files have their whole names for labels
        assert result.a.values.tolist() == known
    result["weight_cosine"] = tnsim.baselines.weight_cosine(models, names=names)
    assert np.isfinite(result.weight_cosine).all()
    data = data_of(report.write(result, tmp_path / "run.html"))
    read = tnsim.reading.matrix(result)["b"]
    assert data["rows"] == result.a.values.tolist() == read.values.tolist()
    numbers = [label for label in data["rows"] if not isinstance(label, str)]
    assert numbers == [float(label) for label in numbers]  # as a browser holds them


def test_assigned_labels_keep_their_digits_on_pages_and_in_tables(tmp_path, rng):
    dates = np.array(["2026-01-01", "2026-01-02"], "datetime64[ns]")
    for labels in (dates, np.array([2**60 + 1, 0]), np.array([0.1, np.inf])):
        shown = [str(label) for label in labels]
        result = labelled(rng, labels)
        data = data_of(report.write(result, tmp_path / "run.html"))
        assert list(map(str, data["rows"])) == shown
        assert cells(result, tmp_path / "run.csv")[0][1:] == shown


def test_half_a_surrogate_pair_does_not_break_a_file(tmp_path, rng):
    """What Python makes of a file name that is not UTF-8."""
    result = labelled(rng, ["\udc80x", "\ud800", "z"]).assign_attrs(note="\udc80")
    data = data_of(report.write(result, tmp_path / "run.html", "\udc80"))
    assert data["rows"] == ["\udc80x", "\ud800", "z"] and data["title"] == "\udc80"
    result_module.write_npz(result, tmp_path / "run.npz")
    with np.load(tmp_path / "run.npz") as arrays:
        assert json.loads(str(arrays["attributes"]))["note"] == "\udc80"
        assert arrays["a"].tolist() == ["\udc80x", "\ud800", "z"]
    result_module.write_parquet(result, tmp_path / "run.parquet")
    table = parquet.read_table(tmp_path / "run.parquet").to_pydict()
    assert table["b"][:3] == ["\\udc80x", "\\ud800", "z"]


@pytest.mark.parametrize(
    "labels", [["\0x", "a\0b"], np.array(["2026-01-01", "2026-01-02"], "datetime64[ns]")]
)
def test_a_table_of_pairs_keeps_labels_and_standard_errors(labels, tmp_path, rng):
    result = labelled(rng, labels)
    result["standard_error"] = abs(result.similarity) / 8
    result_module.write_parquet(result, tmp_path / "run.parquet")
    table = parquet.read_table(tmp_path / "run.parquet").to_pandas()
    assert table["b"][:2].tolist() == list(pd.Series(labels))
    assert (table["standard_error"] == result.standard_error.values.ravel()).all()


def test_netcdf_keeps_lists_of_texts(tmp_path, rng):
    """Which SciPy, as the only writer, refuses by a KeyError."""
    result = tnsim.pairwise([tnsim.Model([linear(rng, 2, 2)]) for _ in range(2)])
    result = result.assign_attrs(caveats=["left out: b", "left out: c"], rest=["d.0", "e"])
    result.to_netcdf(tmp_path / "run.nc", engine="scipy")
    again = xr.load_dataset(tmp_path / "run.nc")
    assert again.drop_attrs().equals(result.drop_attrs())
    pages = [data_of(report.write(x, tmp_path / "run.html")) for x in (again, result)]
    for part in ("caveats", "findings", "provenance"):
        assert pages[0][part] == pages[1][part]


@pytest.mark.parametrize("store", ["http://host/run", "s3://bucket/run", "gs://x", "file:///run"])
def test_a_store_is_no_address(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (lambda: tnsim.pairwise([], store=store), lambda: tnsim.open_pairwise(store)):
        with refused(f"{store}: a store is a folder on a disk", tnsim.errors.StoreMismatch):
            call()
    assert names(tmp_path) == []


@pytest.mark.slow
def test_a_zarr_folder_is_opened_lazily_and_replaced_as_a_whole(tmp_path, rng, monkeypatch):
    import xarray

    models, path = [tnsim.Model([linear(rng, 3, 2)]) for _ in range(4)], tmp_path / "pairs.zarr"
    for several in (models, models[:3]):
        result = tnsim.pairwise(several, slices=True)
        result_module.write_zarr(result, path)
        found = xarray.open_zarr(path, chunks=None)
        assert not found.similarity.variable._in_memory
        assert found.equals(result) and found.attrs == result.attrs
        assert found.tnsim.metric == "gaussian" and names(tmp_path) == ["pairs.zarr"]
    replace, whole = os.replace, contents(path)

    def full(source, target):
        if Path(target) == path and not path.exists() and disk_is_full.pop():
            raise OSError(28, "No space left on device")
        replace(source, target)

    disk_is_full = [False, True]  # where the old folder comes back, and where the new one comes
    monkeypatch.setattr(os, "replace", full)
    with refused(f"{path}: cannot be written: No space left", tnsim.errors.ResultError):
        result_module.write_zarr(tnsim.pairwise(models), path)
    monkeypatch.setattr(xarray.Dataset, "to_zarr", half_written)
    with pytest.raises(KeyboardInterrupt):
        result_module.write_zarr(result, path)
    assert contents(path) == whole and names(tmp_path) == ["pairs.zarr"]


def half_written(result, path, **options):
    path.mkdir()
    (path / ".zattrs").write_text("{")
    raise KeyboardInterrupt


def test_a_folder_takes_no_place_of_what_is_not_its_kind(tmp_path, rng):
    result = tnsim.pairwise([tnsim.Model([linear(rng, 3, 2)]) for _ in range(2)])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("of somebody")
    with refused("mine: cannot be written: holds something else", tnsim.errors.ResultError):
        result_module.write_zarr(result, tmp_path / "mine")
    (tmp_path / "file").write_text("of somebody")
    with refused("file: cannot be written: is a file, where", tnsim.errors.ResultError):
        result_module.write_zarr(result, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "of somebody" and names(tmp_path / "mine")
