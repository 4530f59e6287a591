"""No output takes the place of a file of another kind; a result of an earlier run it does replace."""

import os
import re
import shutil
import sys
from pathlib import Path

import corpus_files
import numpy as np
import pytest
from commands import command, refusal
from refusals import refused
from safetensors.numpy import save_file
from sample_runs import WRITERS, blocks

import tnsim
from tnsim.cli.options import named_path
from tnsim.files import PNG, check_replaceable, replacing

FOREIGN = {"W_l": np.ones((3, 2)), "W_r": np.ones((3, 2)), "W_p": np.ones((2, 3))}
PAIRS = ("pairwise", "{a}", "{b}", "--out", "{out}")
WRITING = {
    "report": ((*PAIRS, "--report", "{out}/page.html"), "page.html"),
    "report over a checkpoint": (("pairwise", "{b}", "--out", "{out}", "--report", "{a}"), None),
    "csv": (PAIRS, "similarity.csv"),
    "npz": (PAIRS, "result.npz"),
    "parquet": ((*PAIRS, "--parquet"), "pairs.parquet"),
    "zarr": ((*PAIRS, "--zarr"), "pairs.zarr"),
    "heatmap": ((*PAIRS, "--plots"), "heatmap.png"),
    "trajectory": ((*PAIRS, "--plots"), "trajectory.png"),
    "embedding": ((*PAIRS, "--plots"), "mds.png"),
    "convert": (("convert", "{a}", "{out}/c.safetensors"), "c.safetensors"),
    "convert in place": (("convert", "{a}", "{a}"), None),
    "bench": (("bench", "depth", "--out", "{out}"), "depth.json"),
    "bench picture": (("bench", "depth", "--out", "{out}"), "depth.png"),
    "demo": (("demo", "--out", "{out}"), "similarity.npz"),
    "demo picture": (("demo", "--out", "{out}"), "similarity.png"),
    "demo page": (("demo", "--out", "{out}"), "report.html"),
}
OTHERS = {
    "a checkpoint": lambda path: save_file(FOREIGN, path),
    "text": lambda path: path.write_text("notes of somebody"),
    "a page": lambda path: path.write_text("<!doctype html><title>mine</title>"),
    "numbers": lambda path: path.write_bytes(np.arange(100.0).tobytes()),
    "json": lambda path: path.write_text('{"name": "mine"}'),
    "weights in npz": lambda path: path.write_bytes(corpus_files.npz(FOREIGN)),
    "a folder": lambda path: (path / "notes").mkdir(parents=True),
}


@pytest.fixture
def files(tmp_path):
    found = {name: tmp_path / f"{name}.safetensors" for name in "ab"}
    for scale, path in enumerate(found.values(), 1):
        save_file({name: scale * array for name, array in FOREIGN.items()}, path)
    found["out"] = tmp_path / "out"
    found["out"].mkdir()
    found["pairs"] = [argument.format_map(found) for argument in PAIRS]
    return found


def contents(folder):
    return {
        path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))
    }


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", WRITING)
def test_a_file_of_another_kind_stays(name, other, files, tmp_path):
    """Refused in one line, before anything is computed or written."""
    arguments, obstacle = WRITING[name]
    if obstacle is not None:
        OTHERS[other](files["out"] / obstacle)
    before = contents(tmp_path)
    said = "holds something else than"
    if obstacle and (other == "a folder") != (name == "zarr"):
        said = f"is a {'folder' if other == 'a folder' else 'file'}, where"
    line = refusal(*(argument.format_map(files) for argument in arguments), said=said)
    assert contents(tmp_path) == before
    assert (obstacle or "a.safetensors") in line


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "the path is empty; '.' is the present folder"),
        ("-", "- is no standard input or output here"),
    ],
)
def test_a_path_is_a_name(name, said, files, tmp_path, monkeypatch):
    """An unset variable of a shell was the present folder, and a dash a file of that name."""
    monkeypatch.chdir(tmp_path)
    a, before = files["a"], contents(tmp_path)
    inputs = ("--fit", "--inputs", "--example", "--norm-inputs")
    for arguments in (
        (*files["pairs"][:-1],),
        (*files["pairs"], "--report"),
        ("demo", "--out"),
        ("bench", "depth", "--out"),
        ("convert", a),
        *((verb, a, a, "--plot") for verb in ("paths", "change")),
        *(("similarity", a, a, option) for option in inputs),
    ):
        refusal(*arguments, name, said=said)
    assert contents(tmp_path) == before


def test_a_tilde_is_the_home_of_the_user(monkeypatch):
    """Shells leave it behind the equals sign of `--out=~/runs`, which made a folder `~`."""
    monkeypatch.setenv("HOME", "/home/ada")
    assert named_path("~/runs") == Path("/home/ada/runs")
    assert named_path("~nobody of this name") == Path("~nobody of this name")


@pytest.mark.parametrize(
    ("option", "package", "extra"),
    [
        ("--parquet", "pyarrow", "parquet"),
        ("--zarr", "zarr", "zarr"),
        ("--plots", "matplotlib", "plot"),
    ],
)
def test_a_missing_package_is_told_before_anything_is_computed(
    option, package, extra, files, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    line = refusal(*files["pairs"], option, said=f"needs {package}, which is not installed")
    assert f"pip install 'tnsim[{extra}]'" in line and not list(files["out"].iterdir())


def test_a_file_has_the_ending_of_its_kind(files):
    a = files["a"]
    for verb in (("paths", a, "--plot"), ("change", a, a, "--plot")):
        refusal(*verb, files["out"] / "x.pdf", said="a picture ends in .png, found .pdf")
    refusal(*files["pairs"], "--report", "x.png", said="a page of tnsim ends in .html, found .png")
    refusal("convert", a, "x", said="a model in tnsim's format ends in .safetensors, found no end")


def test_two_outputs_are_two_files(files, tmp_path):
    (files["out"] / "link").symlink_to("result.npz")
    for page in ("result.npz", "../out/result.npz", "link"):
        refusal(*files["pairs"], "--report", files["out"] / page, said="result.npz")
    assert [path.name for path in files["out"].iterdir()] == ["link"]


def test_a_folder_that_is_none(files):
    below = files["a"] / "page.html"
    refusal(*files["pairs"], "--report", below, said=f"{files['a']} is no folder")


@pytest.mark.parametrize(
    "page", ["store/page.html", "store/a/page.html", "similarity.csv/page.html", "", "store"]
)
@pytest.mark.parametrize("options", [(), ("--follow", 1, "--until", 2)], ids=["run", "follow"])
def test_an_output_within_another_is_refused_before_anything_is_computed(options, page, files):
    """Though neither is there yet."""
    files["out"].rmdir()
    line = refusal(*files["pairs"], "--report", files["out"] / page, *options)
    assert "which is another output; give another" in line or "is the same file" in line
    assert not files["out"].exists()


@pytest.mark.parametrize("place", ["/", "loop", "loop/x.png"])
def test_a_picture_where_no_file_can_be(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    tnsim.save(tnsim.Model([tnsim.Linear(np.eye(2))]), "a.safetensors")
    for verb in (("paths", "a.safetensors", "--plot"), ("convert", "a.safetensors")):
        done = command(*verb, place, check=False)
        assert done.returncode in (0, 2) and "unforeseen" not in done.stderr
        assert place != "/" or "is a folder" in done.stderr
    for arguments in (("loop", "--out", "o"), ("a.safetensors", "--out", "loop/x")):
        refusal("pairwise", *arguments)
    line = refusal("pairwise", "a.safetensors", "--out", "x" * 300)
    assert line.endswith("x/parts: File name too long\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="devices as Linux has them")
def test_a_picture_is_written_into_a_folder_that_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tnsim.save(tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)]), "a.safetensors")
    command("paths", "a.safetensors", "--plot", "new/folder/x.png")
    assert Path("new/folder/x.png").exists()
    done = command("paths", "a.safetensors", "--plot", "/dev/full", check=False)
    assert done.stderr == "tnsim: error: /dev/full: cannot be written: No space left on device\n"


@pytest.mark.parametrize("name", WRITERS)
def test_the_file_of_an_earlier_run_is_replaced_and_no_other(name, tmp_path, rng):
    path = tmp_path / name
    path.touch()  # empty, as by mktemp
    WRITERS[name](blocks(rng, [2]), path)
    first = path.read_bytes()
    WRITERS[name](blocks(rng, [3]), path)
    assert path.read_bytes() != first
    for write in OTHERS.values():
        other = tmp_path / "other"
        write(other)
        before = contents(tmp_path)
        with refused(r"other: cannot be written: (holds|is a )", tnsim.errors.ResultError):
            WRITERS[name](blocks(rng, [2]), other)
        assert contents(tmp_path) == before
        shutil.rmtree(other) if other.is_dir() else other.unlink()


def test_a_model_replaces_a_model_and_nothing_else(tmp_path):
    model = tnsim.Model([tnsim.Linear(np.eye(2))])
    path = tmp_path / "a.safetensors"
    tnsim.save(model, path)
    tnsim.save(tnsim.Model([tnsim.Linear(2 * np.eye(2))]), path)
    np.testing.assert_array_equal(tnsim.load(path).layers[0].weight, 2 * np.eye(2))
    save_file(FOREIGN, path)
    before = path.read_bytes()
    with refused("holds something else than a model in tnsim's", tnsim.CheckpointError):
        tnsim.save(model, path)
    assert path.read_bytes() == before


@pytest.mark.skipif(sys.platform == "win32", reason="devices as POSIX has them")
@pytest.mark.parametrize("reason", [(28, "No space left on device"), ("encoder error -2",)])
def test_what_fails_while_it_is_written_is_named_where_it_can_be(reason, tmp_path):
    """An error of the system takes the name, and another error keeps its words."""
    path = tmp_path / "heatmap.png"
    said = f"[Errno 28] {reason[1]}: {str(path)!r}" if len(reason) == 2 else reason[0]
    with refused(f"^{re.escape(said)}$", OSError), replacing(path, PNG):
        raise OSError(*reason)


def test_a_device_has_nothing_to_lose(files):
    given = ("convert", files["a"], "/dev/null", "--dialect", "bilinear-readout")
    refusal(*given, said="ends in .safetensors")
    check_replaceable(Path(os.devnull), PNG)
