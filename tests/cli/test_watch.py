"""`tnsim watch`: checkpoints that appear while it looks, files that are half written, Ctrl-C."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from commands import command
from oracles import bilinear

import tnsim


def saved(rng, folder, step):
    path = folder / f"step_{step:03}.safetensors"
    tnsim.save(tnsim.Model([bilinear(rng, 3, 4, 2, True)]), path)
    return path


def test_what_appears_is_computed_and_half_a_file_waits(tmp_path, rng):
    """Two checkpoints, then half of a third, then its rest, then a fourth."""
    run, out, page = tmp_path / "run", tmp_path / "out", tmp_path / "page.html"
    run.mkdir()
    for step in (0, 10):
        saved(rng, run, step)
    third = saved(rng, tmp_path, 20).read_bytes()
    (run / "step_020.safetensors").write_bytes(third[: len(third) - 8])

    def trains():
        def wait(count):
            while not (out / "similarity.csv").exists() or rows() < count:
                time.sleep(0.02)

        def rows():
            return len((out / "similarity.csv").read_text().splitlines()) - 1

        wait(2)
        (run / "step_020.safetensors").write_bytes(third)
        wait(3)
        saved(rng, run, 30)

    training = threading.Thread(target=trains, daemon=True)
    training.start()
    done = command(
        *("watch", run, "--out", out, "--every", 0.05, "--until", 4, "--report", page), check=False
    )
    training.join(10)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"watching {run} every 0.05 s; Ctrl-C ends")
    assert sum("waiting for" in line and "step_020" in line for line in lines) == 1
    assert [line.split(";")[0] for line in lines if line.startswith("models")] == [
        "models 2, 2 new",
        "models 3, 1 new",
        "models 4, 1 new",
    ]
    found = tnsim.open_pairwise(out / "store.zarr")
    assert found.a.values.tolist() == [0, 10, 20, 30]
    assert abs(found.similarity - tnsim.pairwise(run).similarity).max() < 1e-12
    assert "step_030" in page.read_text() and (out / "result.npz").exists()


def test_a_checkpoint_that_changed_ends_it(tmp_path, rng):
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    for step in (0, 10):
        saved(rng, run, step)
    options = ("watch", run, "--out", out, "--every", 0.05, "--until")
    assert command(*options, 2).returncode == 0
    saved(rng, run, 0)
    saved(rng, run, 20)
    done = command(*options, 3, check=False)
    assert done.returncode == 2 and "holds another run: other weights for 0" in done.stderr


def test_results_do_not_go_among_the_checkpoints(tmp_path):
    done = command("watch", tmp_path, "--out", tmp_path, check=False)
    assert done.returncode == 2 and "is a folder of checkpoints" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals as POSIX has them")
def test_an_interrupt_ends_it_in_one_line(tmp_path):
    (tmp_path / "run").mkdir()
    argv = [sys.executable, "-m", "tnsim", "watch", "run", "--out", "out", "--every", "0.05"]
    process = subprocess.Popen(
        argv,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("watching run")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130 and out == ""
    assert err.splitlines() == [
        "tnsim: stopped by SIGINT: finished pairs are kept in out/store.zarr, watch again to go on"
    ]
