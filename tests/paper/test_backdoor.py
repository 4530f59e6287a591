"""Backdoors: a small attack, its control, and what is read off both."""

import dataclasses
import shutil

import numpy as np
import pytest
from closeness import assert_close
from refusals import refused
from rerun import verdicts

import tnsim
from benchmarks.paper import classifiers, images
from benchmarks.paper.backdoor import EXPERIMENT, BackdoorSetting, claims, measure, stamp
from benchmarks.paper.claims import verdict
from benchmarks.paper.run import ExperimentRun

SMALL = BackdoorSetting(hidden=16, clean_steps=800, changed_steps=240, every=80, seeds=1)
DIFFERS = {"train-accuracy", "test-accuracy"}
FAILS = {"published-tensor", "published-tensor-gaussian", "one-formula", "divided-by-tensor"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("backdoor")
    EXPERIMENT.train(ExperimentRun(folder, SMALL))
    return folder


@pytest.mark.full
def test_the_verdicts_of_a_small_attack(trained):
    found = verdicts(EXPERIMENT, SMALL, trained)
    assert len(found) == 26
    assert {name for name, became in found.items() if became == "differs in setting"} == DIFFERS
    assert {name for name, became in found.items() if became == "does not hold"} == FAILS


@pytest.mark.full
def test_what_is_finished_is_kept(trained, monkeypatch):
    monkeypatch.setattr(images, "load", None)
    EXPERIMENT.train(ExperimentRun(trained, SMALL))


@pytest.mark.full
def test_checkpoints_of_somebody_without_a_control(trained, tmp_path):
    """Scores are then judged by the printed ones."""
    given = tmp_path / "given"
    shutil.copytree(trained / "checkpoints", given)
    shutil.rmtree(given / "seed-0" / "control")
    run = ExperimentRun(tmp_path, SMALL, given=given)
    rows = {row.name: row for row in claims(run, measure(run))}
    assert not rows["text-tensor"].control and rows["text-tensor"].expected
    assert verdict(rows["divided-by-slice"]) == "holds"
    assert len(EXPERIMENT.figures(run, measure(run))) == 3
    street = dataclasses.replace(SMALL, images="street")
    with refused("models of 64 pixels, but images of 1024", tnsim.CheckpointError):
        measure(dataclasses.replace(run, setting=street, data=_street(tmp_path)))


def _street(folder):
    """A folder of data with four rendered digits."""
    x, y = np.random.default_rng(0).random((4, 32, 32)), np.arange(4)
    for part in ("train", "test"):
        np.savez(folder / f"{part}.npz", images=x, labels=y)
    return folder


@pytest.mark.full
def test_equal_seeds_give_equal_weights(trained, tmp_path):
    short = dataclasses.replace(SMALL, clean_steps=160, changed_steps=80)
    EXPERIMENT.train(ExperimentRun(tmp_path, short))
    again = ExperimentRun(tmp_path, short).series("seed-0/clean")
    before = ExperimentRun(trained, SMALL).series("seed-0/clean")
    for mine, theirs in zip(again, before, strict=False):
        assert np.array_equal(mine.layers[0].left, theirs.layers[0].left)


def test_the_trigger_stays_in_its_corner():
    for side, count, value in ((8, 4, 1.0), (32, 19, 0.0)):
        x = np.full((1, side * side), 0.5)
        changed = (stamp(x) != x).reshape(side, side)
        assert changed.sum() == count and (stamp(x)[stamp(x) != x] == value).all()
        assert not changed[side // 2 :].any() and not changed[:, : side // 2].any()
    with refused("8 x 8 and 32 x 32", tnsim.TnsimError):
        stamp(np.zeros((1, 9)))


@pytest.mark.full
def test_classifiers_are_what_tnsim_reads(rng):
    import jax

    x = rng.normal(size=(3, 6)).astype(np.float32)
    for width in (None, 5):
        params = classifiers.initialise(jax.random.key(0), 6, 4, width)
        found, wanted = classifiers.model(params)(x), np.asarray(classifiers.logits(params, x))
        assert_close(found, wanted, scale=1.0, rtol=1e-5, limited_by="float32")
