"""Forgetting, and differences of models: narrow networks, one seed."""

import shutil

import pytest
from rerun import verdicts

from benchmarks.paper import differences, forgetting
from benchmarks.paper.forgetting import ForgettingSetting, labels_of
from benchmarks.paper.run import ExperimentRun

SMALL = ForgettingSetting(width=48, hidden=96, kept=2, seeds=1)
DIFFERS = {  # of forgetting, as at the default sizes
    "accuracy",
    "sharper-than-weight-cosine",
    "drop-of-similarity",
    "orthogonal-slices",
    "grouped",
    "divided-in-two-globally",
    "divided-in-four",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The series of `differences`, which has those of `forgetting`."""
    folder = tmp_path_factory.mktemp("stages")
    differences.EXPERIMENT.train(ExperimentRun(folder, SMALL))
    return folder


@pytest.mark.full
def test_the_verdicts_of_forgetting(trained):
    found = verdicts(forgetting.EXPERIMENT, SMALL, trained)
    assert len(found) == 16
    for name, became in found.items():
        assert became == ("differs in setting" if name in DIFFERS else "holds"), name


@pytest.mark.full
def test_the_verdicts_of_differences(trained):
    found = verdicts(differences.EXPERIMENT, SMALL, trained)
    assert len(found) == 8
    for name, became in found.items():
        beside_authors = name.startswith("slice-9-at")
        assert became == ("differs in setting" if beside_authors else "holds"), name


@pytest.mark.full
def test_checkpoints_of_somebody_without_a_control(trained, tmp_path):
    shutil.copytree(trained / "checkpoints", tmp_path / "given")
    shutil.rmtree(tmp_path / "given" / "seed-0" / "kept")
    run = ExperimentRun(tmp_path, SMALL, given=tmp_path / "given")
    measured = differences.measure(run)
    assert measured.kept == ()
    rows = {row.name: row for row in differences.claims(run, measured)}
    assert rows["falls"].control == () and rows["falls"].expected


def test_labels_name_the_stage():
    log = [{"stage": stage} for stage in (0, 0, 0, 1, 8)]
    assert labels_of(log) == ["start", "base, 1", "base, 2", "add 5, 1", "re-add 9, 1"]
