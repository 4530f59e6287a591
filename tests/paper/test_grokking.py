"""Grokking: the shipped series and what it shows, at settings that need no training."""

import json

import numpy as np
import pytest
from backends import compiled
from closeness import assert_close
from refusals import refused
from rerun import verdicts

import tnsim
from benchmarks.paper import grokking
from benchmarks.paper.run import ExperimentRun


@pytest.mark.full
@compiled
def test_the_verdicts_of_the_shipped_series(tmp_path):
    found = verdicts(grokking.EXPERIMENT, grokking.GrokkingSetting(text_steps=()), tmp_path)
    assert set(found.values()) == {"holds"} and len(found) == 16


@pytest.mark.full
def test_training_again_gives_the_shipped_weights(tmp_path):
    run = ExperimentRun(tmp_path, grokking.GrokkingSetting(steps=grokking.STEPS[:5]))
    grokking.train_series(run, "seed-0")
    again, shipped = run.series("seed-0"), tnsim.Series(grokking.SHIPPED)
    for mine, kept in zip(again, shipped, strict=False):
        for name in ("left", "right", "down"):
            weights = getattr(kept.layers[0], name)
            assert_close(
                getattr(mine.layers[0], name), weights, scale=1.0, rtol=1e-5, limited_by="float32"
            )


def test_the_shipped_series_groks():
    log = json.loads((grokking.SHIPPED / "log.json").read_text())["checkpoints"]
    assert [entry["step"] for entry in log] == list(grokking.STEPS)
    known = [entry for entry in log if entry["train_accuracy"] >= 0.99]
    assert known[0]["validation_accuracy"] < 1 / 113 < 0.99 < known[-1]["validation_accuracy"]
    assert sum(path.stat().st_size for path in grokking.SHIPPED.iterdir()) < 3e6


def test_a_curve_that_never_rises_is_named():
    with refused(r"never reaches 0\.9: it ends at 0\.5", tnsim.errors.ResultError):
        grokking.first_row(np.array([0.1, 0.5]), 0.9)
