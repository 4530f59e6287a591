"""Files that a run leaves: whole or not at all, with labels that do no harm."""

import csv
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from oracles import linear
from pyarrow import parquet
from sample_runs import blocks

import tnsim
from tnsim import report
from tnsim.all_pairs import result as result_module
from tnsim.files import replacing

WRITERS = {
    "similarity.csv": result_module.write_csv,
    "result.npz": result_module.write_npz,
    "pairs.parquet": result_module.write_parquet,
    "run.html": report.write,
}
NASTY = ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "\udc80x", "plain", "a=b"]


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
    with pytest.raises(tnsim.ResultError, match=f"{name}: cannot be written: "):
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


def test_labels_are_never_formulas_and_numbers_stay_numbers(tmp_path, rng):
    result_module.write_csv(labelled(rng, NASTY), tmp_path / "run.csv")
    with (tmp_path / "run.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    escaped = ["'" + label for label in NASTY[:6]] + ["\\udc80x", "plain", "a=b"]
    assert header[1:] == escaped and [row[0] for row in rows] == escaped
    numbers = labelled(rng, [-2, -1, 3])
    result_module.write_csv(numbers, tmp_path / "run.csv")
    with (tmp_path / "run.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header[1:] == ["-2", "-1", "3"]
    values = np.array([row[1:] for row in rows], float)
    np.testing.assert_array_equal(values, numbers.similarity)


@pytest.mark.parametrize(
    "before", ["\n", " ", "\r\n", "\v", "\f", "\xa0", "\ufeff", "\u200b", " \t"]
)
def test_what_a_spreadsheet_drops_hides_no_formula(before, tmp_path, rng):
    """Blanks, ends of lines, marks without a width: also where a reader takes each line for a row."""
    for label in (f"{before}=1+1", f"a\n{before}@SUM(A1)", "\uff1d1+1"):
        result_module.write_csv(labelled(rng, [label, "b"]), tmp_path / "run.csv")
        with (tmp_path / "run.csv").open(encoding="utf-8", newline="") as file:
            header, *_ = csv.reader(file)
        assert header[1:] == ["'" + label, "b"]
    result_module.write_csv(labelled(rng, [f"{before}plain", "a b=c"]), tmp_path / "run.csv")
    with (tmp_path / "run.csv").open(encoding="utf-8", newline="") as file:
        header, *_ = csv.reader(file)
    assert header[1].endswith(f"{before}plain") and header[2] == "a b=c"


@pytest.mark.parametrize("digits", ["9" * 19, "9" * 30, "1" * 5000])
def test_names_that_are_numbers_beyond_64_bits_are_text(digits, tmp_path, rng):
    """As numbers they would be Python objects, which no file of arrays can hold."""
    models = {name: tnsim.Model([linear(rng, 2, 2)]) for name in (digits, "1")}
    result = tnsim.pairwise(models, store=tmp_path / "store")
    assert result.a.values.tolist() == [digits, "1"]
    assert tnsim.open_pairwise(tmp_path / "store").identical(result)
    for name, write in WRITERS.items():
        write(result, tmp_path / name)
    with np.load(tmp_path / "result.npz") as arrays:
        assert all(arrays[name].dtype.kind != "O" for name in arrays)
    assert parquet.read_table(tmp_path / "pairs.parquet")["a"].to_pylist()[0] == digits


def test_half_a_surrogate_pair_does_not_break_a_file(tmp_path, rng):
    """What Python makes of a file name that is not UTF-8."""
    result = labelled(rng, ["\udc80x", "\ud800", "z"]).assign_attrs(note="\udc80")
    page = report.write(result, tmp_path / "run.html", "\udc80").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="run">(.*?)</script>', page, re.DOTALL)[1])
    assert data["rows"] == ["\udc80x", "\ud800", "z"] and data["title"] == "\udc80"
    result_module.write_npz(result, tmp_path / "run.npz")
    with np.load(tmp_path / "run.npz") as arrays:
        assert json.loads(str(arrays["attributes"]))["note"] == "\udc80"
        assert arrays["a"].tolist() == ["\udc80x", "\ud800", "z"]
    result_module.write_parquet(result, tmp_path / "run.parquet")
    table = parquet.read_table(tmp_path / "run.parquet").to_pydict()
    assert table["b"][:3] == ["\\udc80x", "\\ud800", "z"]


@pytest.mark.parametrize("store", ["http://host/run", "s3://bucket/run", "gs://x", "file:///run"])
def test_a_store_is_no_address(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (lambda: tnsim.pairwise([], store=store), lambda: tnsim.open_pairwise(store)):
        with pytest.raises(tnsim.StoreMismatch, match=f"{store}: a store is a folder on a disk"):
            call()
    assert names(tmp_path) == []
