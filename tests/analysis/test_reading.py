"""Scores, phases, embeddings: against brute force, on made runs and on the shipped run."""

import itertools
import json
import sys

import numpy as np
import pytest
import xarray as xr
from closeness import assert_close
from refusals import refused
from sample_runs import SHIPPED, blocks, result, shipped

import tnsim
from tnsim import baselines, reading


def test_block_score_by_hand():
    similarity = np.array([[1, 0.8, 0.1], [0.8, 1, 0.3], [0.1, 0.3, 1]])
    # The block of one has no pair within.
    assert_close(reading.block_score(similarity, [2]), 0.8 - 0.2)
    assert_close(reading.block_score(similarity, [1]), 0.3 - 0.45)


def test_last_block_score_by_hand(rng):
    """The published formula: what the models before the change look like is left out of it."""
    similarity = np.array([[1, 0.1, 0.3], [0.1, 1, 0.8], [0.3, 0.8, 1]])
    assert_close(reading.last_block_score(similarity, [1]), 0.8 - 0.2)
    run = blocks(rng, [5, 4, 3]).similarity.values
    last = np.arange(12) >= 9
    within = run[np.ix_(last, last)][~np.eye(3, dtype=bool)].mean()
    expected = within - run[np.ix_(~last, last)].mean()
    assert_close(reading.last_block_score(run, [5, 9]), expected)
    assert_close(reading.last_block_score(run, [9]), expected)
    with refused(r"pairs within blocks .* blocks of \[11, 1\]", tnsim.errors.ResultError):
        reading.last_block_score(run, [11])


def test_groups_need_not_follow_one_another(rng):
    run = blocks(rng, [4, 5, 3]).similarity
    order = rng.permutation(12)
    groups = np.repeat(["first", "second", "third"], [4, 5, 3])[order]
    mixed = run.values[np.ix_(order, order)]
    assert_close(reading.group_score(mixed, groups), reading.block_score(run, [4, 9]))
    with refused("12 models need a group each, found 3 groups", tnsim.errors.ResultError):
        reading.group_score(mixed, [0, 1, 2])


@pytest.mark.parametrize("score", [reading.block_score, reading.last_block_score])
def test_against_control(rng, score):
    """The change alone is left: a control that drifts as the run does leaves nothing."""
    vectors = rng.normal(size=(9, 30)).cumsum(0)
    control = result(vectors @ vectors.T, list(range(9)))
    changed = vectors.copy()
    changed[5:] += 20 * rng.normal(size=30)
    run = result(changed @ changed.T, list(range(9)))
    found = reading.against_control(run, control, [5], score)
    assert found.score == score(run, [5]) and found.control == score(control, [5])
    assert found.difference == found.score - found.control > 0.2
    assert reading.against_control(control, control, [5], score).difference == 0
    with refused("goes on from the run's own models: before row 7", tnsim.errors.ResultError):
        reading.against_control(run, control, [7], score)
    with refused("found 8 models, 0 to 7, and 9 models, 0 to 8", tnsim.errors.ResultError):
        reading.against_control(run, control.isel(a=slice(8), b=slice(8)), [5], score)
    with refused("give one at least, found none", tnsim.errors.ResultError):
        reading.against_control(run, control, [], score)


def test_segmentation_is_optimal(rng):
    vectors = rng.normal(size=(8, 3))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)

    def scatter(points):
        return sum(np.square(part - part.mean(0)).sum() for part in np.split(vectors, points))

    found = reading.segmentations(vectors @ vectors.T, 8)
    for phases, one in enumerate(found, 1):
        best = min(itertools.combinations(range(1, 8), phases - 1), key=scatter)
        assert one.change_points == best
        assert_close(one.cost, scatter(best), scale=1.0, rtol=1e-12)
        assert one == reading.segment(vectors @ vectors.T, phases)
    assert np.all(np.diff([one.cost for one in found]) <= 1e-12)


def test_divergences_are_divided_as_squared_distances(rng):
    """Chords give what cosines give; so do distances between points that are no unit vectors."""
    vectors = rng.normal(size=(8, 3))
    points = vectors.cumsum(0)
    squared = np.square(points[:, None] - points).sum(2)
    found = reading.segment(squared, 3)
    parts = np.split(points, found.change_points)
    assert_close(found.cost, sum(np.square(part - part.mean(0)).sum() for part in parts))
    run = blocks(rng, [5, 9, 4])
    chords = 2 - 2 * run.similarity
    assert reading.segment(chords, 3).change_points == reading.segment(run, 3).change_points
    for wrong in (0.5 * np.eye(3), squared - squared.max() * (1 - np.eye(8))):
        with refused("holds neither cosines nor divergences", tnsim.errors.ResultError):
            reading.segment(wrong, 2)


def test_correlation(rng):
    """Against the definitions, over pairs of different models."""
    run, other = blocks(rng, [3, 3]), blocks(rng, [2, 4])
    found = reading.correlation(run, other.similarity)
    above = np.triu_indices(6, 1)
    x, y = run.similarity.values[above], other.similarity.values[above]
    assert found.pairs == 15
    assert_close(found.pearson, np.corrcoef(x, y)[0, 1])
    ranks = [values.argsort().argsort() for values in (x, y)]
    assert_close(found.spearman, np.corrcoef(*ranks)[0, 1])
    rows = run.similarity[:2]
    assert reading.correlation(rows, rows**3).pairs == 12
    assert_close(reading.correlation(rows, rows**3).spearman, 1)


def test_shipped_run_has_three_phases():
    """Initialisation, memorisation, generalisation: change points where the accuracies say so."""
    run, log = shipped(), json.loads((SHIPPED / "metrics.json").read_text())["checkpoints"]
    learned, generalised = reading.segment(run, 3).labels
    accuracy = {row["step"]: (row["train_accuracy"], row["validation_accuracy"]) for row in log}
    steps = run.a.values
    assert max(accuracy[s][0] for s in steps[steps < learned]) < 0.4
    assert accuracy[learned][0] > 0.9 > 0.3 > accuracy[learned][1]
    assert (
        max(accuracy[s][1] for s in steps[steps < generalised]) < 0.999 < accuracy[generalised][1]
    )
    assert reading.block_score(run, reading.segment(run, 3).change_points) > 0.4


def test_trajectory(rng):
    run = blocks(rng, [3, 4])
    values = run.similarity.values
    assert reading.trajectory(run).values.tolist() == values[:, -1].tolist()
    assert reading.trajectory(run, 200).values.tolist() == values[:, 2].tolist()
    previous = reading.trajectory(run, "previous")
    assert_close(previous.values, np.diagonal(values, 1))
    assert previous.a.values.tolist() == [100, 200, 300, 400, 500, 600]
    apart = run.isel(a=slice(0, 2))
    assert reading.trajectory(apart).shape == (2,)
    with refused("no model is labelled 250; labels go from 0 to 600", tnsim.errors.ResultError):
        reading.trajectory(run, 250)


def test_mds_gives_the_chords_back(rng):
    vectors = rng.normal(size=(6, 2))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = reading.mds(vectors @ vectors.T)
    points = found.points.values
    distances = np.linalg.norm(points[:, None] - points, axis=2)
    assert_close(distances, np.linalg.norm(vectors[:, None] - vectors, axis=2))
    assert_close(found.share.sum(), 1)
    assert_close(found.negative, 0, scale=1.0, rtol=1e-12)
    assert_close(points.mean(0), 0, scale=np.abs(points).max(), rtol=1e-12)
    assert np.all(points[-1] >= points[0])
    same = reading.mds(np.ones((4, 4)))
    assert np.all(same.points == 0) and not same.share.any()


def test_what_is_no_gram_matrix_is_named():
    impossible = np.array([[1, 0.9, -0.9], [0.9, 1, 0.9], [-0.9, 0.9, 1]])
    warned = tnsim.errors.NegativeEigenvalueWarning
    with pytest.warns(warned, match="matrix has the eigenvalue -0.8"):
        assert reading.spectrum(impossible)[0] < 0
    with pytest.warns(warned, match="of the spectrum of the matrix is negative"):
        assert reading.mds(impossible).negative > 0.05


def test_exact_metrics_are_gram_matrices():
    assert_close(reading.spectrum(shipped()).sum(), 13)
    rounded = shipped().astype(np.float32).astype(float)
    assert_close(reading.spectrum(rounded.assign_attrs(dtype="float32")).sum(), 13)


def test_dendrogram_joins_phases_last(rng):
    linkage = reading.dendrogram(blocks(rng, [3, 4]))
    assert linkage.shape == (6, 4) and sorted(linkage[:, 3])[-1] == 7
    assert linkage[-1, 2] > 2 * linkage[-2, 2]


def test_any_matrix_of_a_result_can_be_read():
    run = shipped()
    run["weight_cosine"] = baselines.weight_cosine(tnsim.load(SHIPPED))
    run["js_divergence"] = baselines.js_divergence(tnsim.load(SHIPPED), 100)
    assert reading.segment(run.weight_cosine, 3) != reading.segment(run, 3)
    assert -1 < reading.block_score(run.slices.sel(output=2), [4]) < 1
    assert reading.block_score(run.js_divergence, [4]) < 0
    said = "js_divergence is no matrix of cosines: a model compared with itself gives 0, not 1"
    with refused(said, tnsim.errors.ResultError):
        reading.mds(run.js_divergence)


def test_refusals(rng):
    run = blocks(rng, [3, 3])
    hole = run.copy(deep=True)
    hole.similarity[1, 2] = np.nan
    crooked = run.similarity.values.copy()
    crooked[0, 1] += 0.1
    half, pairs, points = run.isel(b=[0, 1]), reading.correlation, reading.block_score
    even = np.ones((6, 6)) + 0 * run.similarity
    for message, call, *given in [
        ("6 models can be divided into 1 to 6 phases, not into 7", reading.segment, run, 7),
        ("not into 0", reading.segment, run, 0),
        ("1 to 6 dimensions, not in 9", reading.mds, run, 9),
        (r"change points must rise from 1 to 5, found \[3, 3\]", points, run, [3, 3]),
        ("must rise from 1", points, run, [0]),
        (r"found blocks of \[6\] models", points, run, []),
        ("at least two models", reading.dendrogram, np.ones((1, 1))),
        ("not finite: nan at row 1, column 2; finish the run", reading.spectrum, hole),
        ("one set of models, found 2 rows and 6 columns", reading.spectrum, run.isel(a=[0, 1])),
        ("that are not the same models", reading.spectrum, run.assign_attrs(symmetric=0)),
        ("entries differ from their mirror images by up to 0.1", reading.spectrum, crooked),
        (r"similarities, found an array of shape \(3,\)", reading.spectrum, np.ones(3)),
        ("no similarity, only no variable at all", reading.spectrum, xr.Dataset()),
        (r"\('a', 'b', 'output'\); select the others first", reading.spectrum, shipped().slices),
        ("the result holds no models", reading.spectrum, np.ones((0, 0))),
        ("along b the first has 6 models, 0 to 500, the second 2 models, 0 to 1", pairs, run, half),
        ("at least 3 pairs of models, found 1", pairs, np.eye(2), np.eye(2)),
        ("all entries of similarity are 1: its correlation", pairs, run, even),
    ]:
        with refused(message, tnsim.errors.ResultError):
            call(*given)


@pytest.mark.parametrize("package", ["xarray", "scipy.linalg"])
def test_missing_extra(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with refused(r"pip install 'tnsim\[pairwise\]'", tnsim.errors.MissingExtra):
        reading.spectrum(np.eye(2))
