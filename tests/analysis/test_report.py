"""The page as a file: its data are the run's, its text is only text. A browser is in test_page."""

import base64
import hashlib
import re
from importlib import resources

import numpy as np
import pytest
from closeness import assert_close
from refusals import refused
from sample_runs import blocks, data_of, shipped

import tnsim
from tnsim.analysis import reading, report


def unpacked(packed, shape):
    values = np.empty(shape)
    if packed["symmetric"]:
        values[np.tril_indices(len(values))] = packed["values"]
        values = np.tril(values) + np.tril(values, -1).T
    else:
        values[:] = np.reshape(packed["values"], shape)
    return values / 10 ** packed["decimals"]


def test_page_holds_the_run(tmp_path):
    run = shipped()
    page = report.write(run, tmp_path / "deep" / "run.html", "Modular addition")
    data = data_of(page)
    assert data["rows"] == data["columns"] == run.a.values.tolist()
    assert {packed["name"] for packed in data["matrices"]} == {"similarity", "log_inner", "sign"}
    scores, fifth = data["phases"][2]["scores"], run.slices.sel(output=5)
    for found, wanted, digits in [
        *((unpacked(packed, (13, 13)), run[packed["name"]], 4) for packed in data["matrices"]),
        (unpacked(data["slices"][5], (13, 13)), fifth, 3),
        (scores["similarity"], reading.block_score(run, (4, 9)), 4),
        (scores["output 5"], reading.block_score(fifth, (4, 9)), 4),
        (data["embedding"]["points"][0], reading.mds(run).points[0], 4),
    ]:
        few = f"numbers packed in {digits} digits"
        assert_close(found, np.asarray(wanted), scale=1.0, rtol=10**-digits, limited_by=few)
    assert data["phases"][2]["changePoints"] == list(reading.segment(run, 3).change_points)
    assert ["metric", "gaussian"] in data["provenance"]
    assert data["models"]["a"][0] == ["checkpoint", "log_norm", "hash", "name"]
    assert data["models"]["a"][1][3] == "step_0.safetensors"


def test_page_is_alone(tmp_path):
    text = report.write(shipped(), tmp_path / "run.html").read_text()
    loading = r"(src|href)\s*=|@import|url\(|fetch\(|XMLHttp|import\("
    writing = r"innerHTML|insertAdjacentHTML|document\.write"
    assert not re.search(f"{loading}|{writing}", text)
    assert "default-src 'none'" in text
    assert set(re.findall(r"https?://[^\"']*", text)) == {"http://www.w3.org/2000/svg"}


def test_text_is_never_markup(tmp_path):
    nasty = "</script><img src=x onerror=alert(1)> & __RUN__ __SCRIPT__"
    run = shipped().assign_attrs(note=nasty).assign_coords(name_a=("a", [nasty] * 13))
    page = report.write(run, tmp_path / "run.html", nasty)
    text = page.read_text(encoding="utf-8")
    assert "<img" not in text and text.count("</script>") == 2
    assert ["note", nasty] in data_of(page)["provenance"] and data_of(page)["title"] == nasty


def test_large_and_small_runs(tmp_path, rng):
    large = report.write(blocks(rng, [100, 100, 100]), tmp_path / "large.html")
    assert large.stat().st_size < 1_200_000
    for sizes in ([1], [1, 1], [2, 3]):
        data = data_of(report.write(blocks(rng, sizes), tmp_path / "small.html"))
        assert len(data["phases"]) == sum(sizes) and (data["embedding"] is None) == (sum(sizes) < 3)


def test_two_sets_and_a_zero_inner_product(tmp_path, rng):
    run = blocks(rng, [3, 3]).isel(a=slice(0, 2))
    run["log_inner"][0, 1] = -np.inf
    data = data_of(report.write(run, tmp_path / "run.html"))
    assert data["phases"] == [] and data["embedding"] is None and not data["oneSet"]
    packed = {packed["name"]: packed["values"] for packed in data["matrices"]}
    assert packed["log_inner"][1] is None


def test_two_lists_with_equal_labels_are_not_one_set(tmp_path, rng):
    first, second = (
        [tnsim.Model([tnsim.Linear(rng.normal(size=(2, 3)))]) for _ in range(4)] for _ in "ab"
    )
    run = tnsim.pairwise(first, other=second)
    run["loss"] = ("b", [4.0, 3.0, 2.0, 1.0])
    data = data_of(report.write(run, tmp_path / "two.html"))
    assert data["rows"] == data["columns"] and not data["oneSet"]
    assert data["phases"] == [] and data["embedding"] is None
    assert [curve["name"] for curve in data["curves"]] == ["loss"]


def test_a_matrix_without_a_block_score_is_shown(tmp_path, rng):
    run = blocks(rng, [3, 3])
    run["seconds"] = run.similarity * np.arange(6.0)
    data = data_of(report.write(run, tmp_path / "run.html"))
    assert "seconds" in {packed["name"] for packed in data["matrices"]}
    assert set(data["phases"][1]["scores"]) == {"similarity", "log_inner", "sign"}


def test_refusals(tmp_path, monkeypatch, rng):
    run = blocks(rng, [2, 2])
    monkeypatch.setattr(report, "MAX_NUMBERS", 40)
    with refused("48 numbers are more than the 40 of a page", tnsim.errors.ResultError):
        report.write(run, tmp_path / "run.html")
    run["similarity"][0, 1] = np.nan
    with refused("similarity is not finite", tnsim.errors.ResultError):
        report.write(run, tmp_path / "run.html")


def test_only_the_script_of_the_page_may_run(tmp_path):
    text = report.write(shipped(), tmp_path / "run.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in text


def test_every_file_of_the_page_is_in_it():
    files = {path.name: path for path in (resources.files(tnsim.analysis) / "page").iterdir()}
    assert set(files) == {"page.html", "page.css", *report.SCRIPTS}
    for path in files.values():
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) < 350 and max(map(len, lines)) <= 100, path


def test_curves_caveats_and_what_matrices_say_of_themselves(tmp_path, rng):
    run = blocks(rng, [2, 1]).assign_attrs(caveats=["a norm was left out"])
    run["accuracy"] = ("a", [0.1234567, np.nan, 1.0])
    run["epoch_a"] = ("a", [1, 2, 3])
    run["note"] = ("a", ["x", "y", "z"])
    run["never_measured"] = ("a", [np.nan] * 3)
    run["cka"] = run.similarity.assign_attrs(samples=200)
    data = data_of(report.write(run, tmp_path / "run.html"))
    assert data["curves"] == [
        {"name": "accuracy", "values": [0.123457, None, 1.0]},
        {"name": "epoch", "values": [1.0, 2.0, 3.0]},
    ]
    assert data["caveats"] == ["a norm was left out"]
    assert data["about"] == {"cka": [["samples", "200"]]}
    two_sets = run.isel(a=slice(0, 2))
    two_sets["loss"] = ("b", [3.0, 2.0, 1.0])
    data = data_of(report.write(two_sets, tmp_path / "run.html"))
    assert data["curves"] == [{"name": "loss", "values": [3.0, 2.0, 1.0]}]


def test_slices_are_drawn_by_the_scale_of_their_figure(tmp_path, rng):
    """One slice alone would be drawn by logarithm; all of them have the scale of all values."""
    run = blocks(rng, [6])
    apart = 1e-3 * (1 - np.eye(6))
    few = np.where(np.arange(6) == 5, apart, 1e-4 * apart)
    stack = 1 - np.stack([np.maximum(few, few.T), *[apart] * 4], axis=-1)
    run["slices"] = (("a", "b", "output"), stack)
    data = data_of(report.write(run, tmp_path / "run.html"))
    assert [packed["scale"]["name"] for packed in data["slices"]] == ["log", *["angle"] * 4]
    image = run.tnsim.plot("slices").axes[0].images[0]
    assert data["sliceScale"]["name"] == "angle" and "by angle" in image.get_label()
    assert data["sliceScale"]["low"] == image.norm.vmin


@pytest.mark.parametrize("size", [1e-320, 1e-90, 1e-6, 0.03, 1.0, 1e15])
def test_numbers_of_any_size_keep_their_digits(size, tmp_path, rng):
    """Distances in small units were 0.0000 on the page, and in the table that it downloads."""
    run = blocks(rng, [6])
    run["distance"] = (("a", "b"), size * rng.random((6, 6)))
    packed = {
        each["name"]: each for each in data_of(report.write(run, tmp_path / "run.html"))["matrices"]
    }
    found = unpacked(packed["distance"], (6, 6)) if size > 1e-100 else np.zeros((6, 6))
    digits = "numbers packed in 4 digits"
    assert_close(found, run.distance.values, scale=max(size, 1e-99), rtol=1e-3, limited_by=digits)
    assert packed["distance"]["decimals"] <= 100  # the most that a browser writes
    assert packed["similarity"]["decimals"] == 4


def test_an_embedding_of_nearly_equal_models_is_no_point(tmp_path):
    angles = 1e-5 * np.arange(4)
    near = np.cos(np.subtract.outer(angles, angles))
    run = blocks(np.random.default_rng(0), [4]).assign(similarity=(("a", "b"), near))
    points = np.array(data_of(report.write(run, tmp_path / "run.html"))["embedding"]["points"])
    few = "points of rounding 1e-8"
    assert_close(np.ptp(points[:, 0]), 3e-5, rtol=1e-2, limited_by=few)
