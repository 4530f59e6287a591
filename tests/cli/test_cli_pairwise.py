"""`tnsim pairwise` as a user runs it: globs, folders, hub caches, the files it writes, what it refuses."""

import csv
import json
import signal
import subprocess
import time

import numpy as np
import pytest
import xarray
from closeness import assert_close
from commands import command, refusal, told
from oracles import bilinear
from processes import started
from pyarrow import parquet
from refusals import refused

import tnsim
from tnsim.cli.pairwise import _has_plot


@pytest.fixture
def folder(tmp_path, rng):
    for n in (0, 10, 200):
        file = tmp_path / "models" / f"step_{n:03}.safetensors"
        tnsim.save(tnsim.Model([bilinear(rng, 3, 4, 2, True)]), file)
    return tmp_path


@pytest.fixture
def cache(folder):
    """The three checkpoints as revisions, two of them with a ref besides `main`."""
    root = folder / "models--me--net"
    commits = {0: "c" * 40, 10: "b" * 40, 200: "a" * 40}
    for n, commit in commits.items():
        (root / "snapshots" / commit).mkdir(parents=True)
        blob = root / f"blob{n}"
        blob.symlink_to(folder / "models" / f"step_{n:03}.safetensors")
        (root / "snapshots" / commit / "model.safetensors").symlink_to(blob)
    (root / "refs").mkdir()
    for ref, n in (("step0", 0), ("step10", 10), ("step200", 200), ("main", 200)):
        (root / "refs" / ref).write_text(commits[n])
    return root


def test_forward_passes_on_a_file_of_inputs(folder, rng):
    """`--metric empirical --inputs FILE` in every command that takes it, as Python has it."""
    inputs, models = folder / "inputs.npy", folder / "models"
    np.save(inputs, rng.normal(size=(30, 3)))
    metric = tnsim.Empirical(inputs)
    wanted = tnsim.pairwise(tnsim.load(models), metric).similarity.values
    options = ("--metric", "empirical", "--inputs", inputs)
    command("pairwise", models, "--out", folder / "out", *options)
    found = tnsim.open_pairwise(folder / "out")
    assert_close(found.similarity.values, wanted, scale=1.0, rtol=1e-12)
    assert found.attrs["metric"] == "empirical" and "standard_error" in found
    watched = folder / "watched"
    command("pairwise", models, "--out", watched, "--until", 3, "--follow", 0.05, *options)
    found = tnsim.open_pairwise(watched / "store").similarity.values
    assert_close(found, wanted, scale=1.0, rtol=1e-12)
    files = [models / f"step_{n:03}.safetensors" for n in (0, 10)]
    said = told("similarity", *files, *options)
    assert_close(said["similarity"], wanted[0, 1], scale=1.0, rtol=1e-12)
    assert "forward passes" in command("plan", *files, *options).stdout
    for wrong in (("--metric", "empirical"), ("--inputs", inputs)):
        refusal("pairwise", models, "--out", folder / "no", *wrong, said="forward passes need both")


@pytest.mark.parametrize("shell", [sorted, lambda names: [*sorted(names)[1:], sorted(names)[0]]])
def test_a_pattern_that_a_shell_writes_out_is_in_the_order_of_the_run(folder, shell):
    """Sorted by letters, step_100 stands before step_20, and every step and phase is another."""
    models = folder / "models"
    for n in (10, 200):
        (models / f"step_{n:03}.safetensors").rename(models / f"step_{n // 2}.safetensors")
    given = shell([f"{models}/{file.name}" for file in models.iterdir()])
    done = command("pairwise", *given, "--out", folder / "out", "--json")
    in_letters = [0, 100, 5] if shell is sorted else [100, 5, 0]
    wanted = [0, 5, 100] if shell is sorted else in_letters  # an order of the user's own
    assert json.loads(done.stdout)["a"] == wanted


def test_all_pairs_and_what_is_written(folder):
    out = folder / "out"
    files = folder / "models" / "*.safetensors"
    text = command("pairwise", files, "--out", out, "--slices", "--parquet", "--zarr")
    assert "models      3 x 3, 0 with the weights of another" in text.stdout
    assert "gaussian (exact)" in text.stdout
    assert "--report page.html" in text.stdout
    assert "6/6" in text.stderr and "pair/s" in text.stderr
    expected = tnsim.pairwise(tnsim.load(folder / "models"), slices=True)
    lowest = float(expected.similarity.min())
    assert f"lowest      similarity {lowest:.4g}, of " in text.stdout
    with (out / "similarity.csv").open() as file:
        header, *rows = list(csv.reader(file))
    assert header == ["", "0", "10", "200"] and [row[0] for row in rows] == header[1:]
    np.testing.assert_array_equal(np.array([row[1:] for row in rows], float), expected.similarity)
    with np.load(out / "result.npz") as found:
        np.testing.assert_array_equal(found["slices"], expected.slices)
        assert found["a"].tolist() == [0, 10, 200]
        assert json.loads(str(found["attributes"]))["metric"] == "gaussian"
    pairs = parquet.read_table(out / "pairs.parquet").to_pydict()
    assert pairs["a"][:4] == [0, 0, 0, 10] and pairs["b"][:4] == [0, 10, 200, 0]
    assert pairs["similarity"] == expected.similarity.values.ravel().tolist()
    assert pairs["slices"][0] == [1.0, 1.0]
    assert xarray.open_zarr(out / "pairs.zarr", chunks=None).equals(expected)
    again = told("pairwise", folder / "models", "--out", out, "--slices")  # goes on, and so reads
    assert again["similarity"] == expected.similarity.values.tolist() and again["a"] == [0, 10, 200]
    assert again["exact"] is True


def test_others_and_a_dry_run(folder):
    files = sorted((folder / "models").iterdir())
    options = ("--other", files[2], "--metric", "tree", "--out", folder / "out")
    found = told("pairwise", *files[:2], *options)
    a, b, c = map(tnsim.load, files)
    wanted = [[tnsim.similarity(m, c, tnsim.TreeSymmetric())] for m in (a, b)]
    assert_close(found["similarity"], wanted, scale=1.0, rtol=1e-12)
    assert found["b"] == ["step_200"] and found["metric"] == "tree"
    assert "pairs            6" in command("pairwise", folder / "models", "--dry-run").stdout
    planned = told("pairwise", folder / "models", "--dry-run")
    assert planned["route"] == "features" and planned["tiles"]["pairs"] == 6
    assert planned["seconds"] > 0


def test_revisions_of_a_hub_cache(cache, folder):
    assert tnsim.Series(cache).names == ("step0", "step10", "step200")
    found = told("pairwise", cache, "--out", folder / "out")
    assert found["a"] == [0, 10, 200]
    wanted = tnsim.pairwise(tnsim.load(folder / "models")).similarity
    assert found["similarity"] == wanted.values.tolist()
    (cache / "refs" / "step10").unlink()
    assert tnsim.Series(cache).names == ("bbbbbbbb", "step0", "step200")
    extra = cache / "snapshots" / ("a" * 40) / "other.npz"
    extra.touch()
    said = "must hold one checkpoint file, found model.safetensors, other.npz"
    with refused(said, tnsim.CheckpointError):
        tnsim.Series(cache)


def test_one_revision_by_its_name(cache, folder, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    expected = tnsim.load(folder / "models" / "step_010.safetensors")
    for name in ("me/net@step10", "me/net@bbbb", f"{cache}@step10"):
        assert tnsim.similarity(tnsim.load(name), expected) == 1
    found = told("similarity", "me/net@step0", "me/net@step200")
    assert found["a"] == "me/net@step0" and -1 < found["similarity"] < 1
    both = tnsim.Series(["me/net@step0", "me/net@step200"])
    assert both.labels == ("0", "200")
    for name, message in {
        "me/net@step7": r"no revision 'step7' in the local cache \(found step200, .*hf download",
        "me/other@main": "no repository me/other in the hub cache .*hf download me/other",
    }.items():
        with refused(message, tnsim.CheckpointError):
            tnsim.load(name)


def test_what_is_refused(folder):
    for arguments, message in [
        ((folder / "models",), "give --out DIR"),
        ((folder / "nothing*.npz", "--out", folder / "out"), "no checkpoint matches"),
        ((folder / "models", "--dialect", "nope", "--out", folder / "out"), "no dialect 'nope'"),
        ((folder / "models", "--out", folder / "out/../models"), "give another, such as"),
    ]:
        refusal("pairwise", *arguments, said=message)


@pytest.mark.slow
def test_a_scheduler(folder):
    """The workers of a Dask cluster compute, and give what is computed here."""
    from distributed import LocalCluster

    local = dict(n_workers=1, threads_per_worker=1, dashboard_address=":0", silence_logs=50)
    with LocalCluster(**local) as cluster:
        where = ("--out", folder / "out", "--scheduler", cluster.scheduler_address)
        found = told("pairwise", folder / "models", *where)
    wanted = tnsim.pairwise(tnsim.load(folder / "models")).similarity
    assert found["similarity"] == wanted.values.tolist()


def test_a_single_model_has_no_place_in_a_plane():
    """As the first of a run that is followed."""
    pytest.importorskip("xarray")
    models = {str(n): tnsim.Model([tnsim.Linear([[1.0, n]])]) for n in range(2)}
    shown = {n: _has_plot("mds", tnsim.pairwise(dict(list(models.items())[:n]))) for n in (1, 2)}
    assert shown == {1: False, 2: True}


def test_wrong_arguments_are_one_line(tmp_path):
    pytest.importorskip("distributed")
    dask = pytest.importorskip("dask")
    short = {"distributed.comm.timeouts.connect": "100ms"}
    file = tmp_path / "a.safetensors"
    tnsim.save(tnsim.Model([tnsim.Linear(np.eye(2))]), file)
    pairwise = ("pairwise", file, "--out", tmp_path / "out", "--scheduler")
    for arguments, message in (
        (("similarity", file, file, "--check", 8, "--seed", "-1"), "'--seed': "),
        (("similarity", file, file, "--seed", 1), "--seed is that of --check SAMPLES, which is"),
        (("pairwise", file, "--dry-run", "--distances", "1,2"), "are those of --parts qk"),
        (("pairwise", file, "--parts", "ov", "--distances", "2"), "are those of --parts qk"),
        ((*pairwise, "nonsense"), "--scheduler 'nonsense': missing port number in address"),
        ((*pairwise, "tcp://127.0.0.1:1"), "Timed out trying to connect to tcp://127.0.0.1:1"),
        (("pairwise", file, "--out", "s3://bucket"), "s3:/bucket/store: a store is a folder"),
    ):
        with dask.config.set(short):
            refusal(*arguments, said=message)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_in_one_line(number, folder):
    """With the status of a shell, and nothing held: the same command goes on."""
    slow = (
        "import time\nfrom tnsim.cli.app import main\nfrom tnsim.all_pairs import store\n"
        "log = store.log_start\n"
        "store.log_start = lambda *arguments: (log(*arguments), time.sleep(30))\nmain()"
    )
    arguments = ["pairwise", folder / "models", "--out", folder / "out", "--json"]
    store = folder / "out" / "store"
    process = started(slow, *arguments, stderr=subprocess.PIPE)
    while not (store / "computed.log").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    kept = f"finished tiles are kept in {store}, run again to go on"
    assert said == f"tnsim: stopped by {number.name}: {kept}\n"
    assert not list((store / "leases").iterdir())
    assert json.loads(command(*arguments).stdout)["a"] == [0, 10, 200]
