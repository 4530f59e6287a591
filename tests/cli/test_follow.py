"""`tnsim pairwise --follow`: checkpoints that appear while it looks, files that are half written, Ctrl-C."""

import itertools
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from commands import command, piped, refusal
from oracles import bilinear
from safetensors.numpy import save_file

import tnsim
from tnsim.all_pairs import growing
from tnsim.cli import pairwise

WRITTEN = "result.npz", "similarity.csv", "store"


@pytest.fixture
def run(tmp_path):
    """The folder of a run."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def saved(rng, folder, *steps):
    """Checkpoints of these steps in a folder."""
    paths = [folder / f"step_{step:03}.safetensors" for step in steps]
    for path in paths:
        tnsim.save(tnsim.Model([bilinear(rng, 3, 4, 2, True)]), path)
    return paths


def test_what_appears_is_computed_and_half_a_file_waits(tmp_path, rng, run):
    """Two checkpoints, then half of a third, then its rest, then a fourth."""
    out, page = tmp_path / "out", tmp_path / "page.html"
    saved(rng, run, 0, 10)
    third = saved(rng, tmp_path, 20)[0].read_bytes()
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
    options = ("--follow", 0.05, "--until", 4, "--report", page)
    done = command("pairwise", run, "--out", out, *options, check=False)
    training.join(10)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"following {run} every 0.05 s; Ctrl-C ends")
    assert sum("waiting for" in line and "step_020" in line for line in lines) == 1
    told = [line.split(";")[0] for line in lines if line.startswith("models")]
    assert told == [f"models {several}" for several in ("2, 2 new", "3, 1 new", "4, 1 new")]
    found = tnsim.open_pairwise(out / "store")
    assert found.a.values.tolist() == [0, 10, 20, 30]
    assert abs(found.similarity - tnsim.pairwise(run).similarity).max() < 1e-12
    assert "step_030" in page.read_text() and (out / "result.npz").exists()


def test_folders_of_models_have_the_labels_of_pairwise(tmp_path, rng, run):
    for step in (9, 10):
        (run / f"checkpoint-{step}").mkdir()
        saved(rng, tmp_path, step)[0].rename(run / f"checkpoint-{step}" / "model.safetensors")
    out = tmp_path / "out"
    command("pairwise", run, "--out", out, "--follow", 0.05, "--until", 2)
    assert tnsim.open_pairwise(out / "store").a.values.tolist() == [9, 10]


def test_what_keeps_all_files_from_being_found_is_said_once(run, capsys):
    (run / "step_1").mkdir()
    for name in ("model", "consolidated"):
        (run / "step_1" / f"{name}.safetensors").touch()
    look = pairwise._Look([str(run)], tnsim.load)
    assert look.written() == look.written() == ()
    (line,) = capsys.readouterr().out.splitlines()
    assert f"waiting for {run}: {run / 'step_1'}: is a folder where one file is meant" in line


def test_a_checkpoint_that_changed_ends_it(tmp_path, rng, run):
    out = tmp_path / "out"
    saved(rng, run, 0, 10)
    options = ("pairwise", run, "--out", out, "--follow", 0.05, "--until")
    assert command(*options, 2).returncode == 0
    saved(rng, run, 0, 20)
    done = command(*options, 3, check=False)
    assert done.returncode == 2 and "holds another run: other weights for 0" in done.stderr


class Training:
    """What happens to the files of a run, a step before each pause of the watcher."""

    def __init__(self, monkeypatch, *steps):
        self.steps = list(steps)
        monkeypatch.setattr(pairwise.time, "sleep", self.sleep)

    def sleep(self, _):
        if not self.steps:
            signal.raise_signal(signal.SIGINT)
        if step := self.steps.pop(0):
            step()


def following(run, out):
    """What a watcher says of a run until its training ends, and the table that it leaves."""
    done = command("pairwise", run, "--out", out, "--follow", 0.05, check=False)
    said = f"tnsim: stopped by SIGINT: finished tiles are kept in {out}/store, run again to go on\n"
    assert (done.returncode, done.stderr) == (130, said)
    with np.load(out / "result.npz") as arrays:
        return done.stdout, arrays["a"].tolist(), arrays["similarity"]


def test_it_goes_on_where_a_checkpoint_is_rewritten(tmp_path, rng, monkeypatch, run):
    out = tmp_path / "out"
    saved(rng, run, 0, 10)
    again, more = (lambda: saved(rng, run, 10)), (lambda: saved(rng, run, 20))
    Training(monkeypatch, None, again, None, more, None, again, None)
    said, labels, values = following(run, out)
    assert said.count("step_010.safetensors was rewritten or removed: all pairs are") == 2
    assert [line.split(";")[0] for line in said.splitlines() if line.startswith("models")] == [
        *("models 2, 2 new", "models 2, 1 new", "models 3, 1 new", "models 3, 1 new")
    ]
    assert labels == [0, 10, 20] and sorted(path.name for path in out.iterdir()) == [*WRITTEN]
    assert abs(values - tnsim.pairwise(run).similarity.values).max() < 1e-12
    assert tnsim.open_pairwise(out / "store").a.values.tolist() == [0, 10]


def test_it_goes_on_where_checkpoints_are_rotated(tmp_path, rng, monkeypatch, run):
    out = tmp_path / "out"
    first, second = saved(rng, run, 0, 10)

    def rotate(old, step):
        saved(rng, run, step)
        old.unlink()

    steps = (lambda: rotate(first, 20)), None, (lambda: rotate(second, 30)), None
    Training(monkeypatch, None, *steps)
    said, labels, values = following(run, out)
    assert labels == [20, 30] and said.count("was rewritten or removed") == 2
    assert abs(values - tnsim.pairwise(run).similarity.values).max() < 1e-12
    touched = lambda: os.utime(run / "step_020.safetensors", (1, 1))  # noqa: E731
    Training(monkeypatch, None, touched, None, None)
    said, *_ = following(run, tmp_path / "other")
    assert "rewritten" not in said and said.count("models 2") == 2


@pytest.mark.parametrize("name", ["optimizer.safetensors", "step_005.safetensors", "optimizer.npz"])
def test_what_is_no_model_is_left_out(name, tmp_path, rng, monkeypatch, run):
    """Once said, until it is one."""
    out = tmp_path / "out"
    state = {"exp_avg": np.ones((3, 2)), "step": np.ones(1)}
    np.savez(run / name, **state) if name.endswith("npz") else save_file(state, run / name)
    steps = [None, lambda: saved(rng, run, 0), None, lambda: saved(rng, run, 10), None]
    Training(monkeypatch, *steps, None)
    said, labels, values = following(run, out)
    assert labels == [0, 10] and values.shape == (2, 2)
    assert said.count(f"waiting for {run / name}: ") == 1
    Training(monkeypatch, None, lambda: saved(rng, tmp_path, 5)[0].rename(run / name), None, None)
    said, labels, values = following(run, tmp_path / "other")
    assert len(values) == (3 if name.endswith("safetensors") else 2)


def test_a_checkpoint_that_goes_while_it_is_read(tmp_path, rng, monkeypatch, run):
    out = tmp_path / "out"
    paths = saved(rng, run, 0, 10, 20)
    compared = tnsim.pairwise

    def late(*args, **options):
        paths[0].unlink(missing_ok=True)
        return compared(*args, **options)

    monkeypatch.setattr(tnsim, "pairwise", late)
    Training(monkeypatch, None, None, None)
    _, labels, _ = following(run, out)
    assert labels == [10, 20]


def test_a_checkpoint_that_is_rewritten_slowly(tmp_path, rng, monkeypatch, run):
    """Without it the store is read as it was before it came, and still holds what it was."""
    out, last = tmp_path / "out", run / "step_010.safetensors"
    whole = lambda: saved(rng, tmp_path, 10)[0].replace(last)  # noqa: E731
    half = lambda: last.write_bytes(last.read_bytes()[:100])  # noqa: E731
    saved(rng, run, 0)
    Training(monkeypatch, None, whole, None, half, None, None, whole, None, None, None)
    said, labels, values = following(run, out)
    assert [line.split(";")[0] for line in said.splitlines() if line.startswith("models")] == [
        *("models 1, 1 new", "models 2, 1 new", "models 1, 0 new", "models 2, 1 new")
    ]
    assert labels == [0, 10]
    assert abs(values - tnsim.pairwise(run).similarity.values).max() < 1e-12


def test_a_checkpoint_that_is_rewritten_while_pairs_are_computed(tmp_path, rng, monkeypatch, run):
    """The store lists the model that was there before; no number of it comes out."""
    out, times = tmp_path / "out", iter(range(2))
    for step in (0, 10):
        saved(rng, run, step)
    computed = growing.computed

    def late(*arguments):
        for _ in itertools.islice(times, 1):
            saved(rng, run, 10)
        return computed(*arguments)

    monkeypatch.setattr(growing, "computed", late)
    Training(monkeypatch, *[None] * 9)
    said, labels, values = following(run, out)
    assert said.count("step_010.safetensors was rewritten or removed: all pairs are") == 2
    assert labels == [0, 10]
    assert abs(values - tnsim.pairwise(run).similarity.values).max() < 1e-12


@pytest.mark.parametrize("every", ["inf", "-inf", "nan", "0", "1e300", "x"])
def test_pauses_are_numbers_of_seconds(every, tmp_path):
    refusal("pairwise", tmp_path, "--out", tmp_path / "out", "--follow", every, said="--follow")


def test_names_on_standard_input_are_read_once(tmp_path, rng, monkeypatch):
    paths = saved(rng, tmp_path, 0, 10)
    monkeypatch.setattr(sys, "stdin", piped("\n".join(map(str, paths))))
    done = command("pairwise", "-", "--out", tmp_path / "out", "--follow", 0.05, "--until", 2)
    assert "models 2, 2 new" in done.stdout


def test_a_watcher_behind_another_waits_for_the_files(tmp_path, rng, monkeypatch, run):
    """The store holds a checkpoint that this watcher sees whole two looks later."""
    out = tmp_path / "out"
    paths = saved(rng, run, 0, 10, 20)
    wanted = tnsim.pairwise(run, store=out / "store")
    late, sleeps = paths[2].read_bytes(), []
    paths[2].unlink()

    def sleep(_):
        sleeps.append(None)
        if len(sleeps) == 2:  # after a look that found two files whole, and a refusal
            paths[2].write_bytes(late)

    monkeypatch.setattr(pairwise.time, "sleep", sleep)
    done = command("pairwise", run, "--out", out, "--follow", 0.05, "--until", 3)
    assert "models 3, 3 new" in done.stdout and len(sleeps) == 3
    assert tnsim.open_pairwise(out).identical(wanted)


def test_others_and_parts_as_pairwise_takes_them(tmp_path, rng, run):
    out = tmp_path / "out"
    paths = saved(rng, run, 0, 10)
    options = ("pairwise", run, "--follow", 0.05, "--until", 2, "--other", paths[0])
    command(*options, "--out", out)
    found = tnsim.open_pairwise(out / "store").similarity
    assert found.shape == (2, 1) and found.values[0, 0] == 1
    *scores, values = rng.normal(size=(5, 4, 3))
    out_of_heads = rng.normal(size=(3, 4))
    for n, path in enumerate(paths):
        layer = tnsim.Attention(*scores, values + 0.1 * n, out_of_heads, n_heads=2)
        tnsim.save(tnsim.Model([layer]), path)
    done = command(*options[:-2], "--parts", "ov", "--out", tmp_path / "parts")
    assert "in layer 0 head" in done.stdout
    found = tnsim.open_pairwise(tmp_path / "parts")
    wanted = tnsim.pairwise(tnsim.parts(tnsim.load(run), ["ov"])).similarity.values
    assert abs(found.similarity.values - wanted).max() < 1e-12 and wanted.shape == (2, 2, 2)


def test_results_do_not_go_among_the_checkpoints(tmp_path):
    given = ("pairwise", tmp_path, "--out", tmp_path, "--follow", 1)
    refusal(*given, said="is a folder of checkpoints")
    path = tmp_path / "step_1.safetensors"
    tnsim.save(tnsim.Model([tnsim.Linear([[1.0]])]), path)
    refusal("pairwise", path, "--out", path, said="is a checkpoint that is compared: give a folder")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--until", 2), "--until ends --follow SECONDS, which is not given"),
        (("--follow", 1, "--dry-run"), "leave --dry-run out"),
        (("--follow", 1, "--json"), "leave --json out"),
        (("--follow", 1), "give --out DIR"),
    ],
)
def test_options_that_do_not_go_together(options, message, tmp_path):
    refusal("pairwise", tmp_path, *options, said=message)


def test_named_files_that_cannot_be_read_end_it(tmp_path, rng, monkeypatch):
    """There is nothing to wait for where the files are named and do not change."""
    (good,), bad = saved(rng, tmp_path, 0), tmp_path / "step_010.npz"
    np.savez(bad, exp_avg=np.ones(3))
    monkeypatch.setattr(pairwise.time, "sleep", lambda _: None)
    options = ("--out", tmp_path / "out", "--follow", 0.05, "--until", 2)
    done = command("pairwise", good, bad, *options, check=False)
    assert done.returncode == 2 and "step_010" in done.stderr
