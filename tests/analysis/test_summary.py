"""The words of a summary, held to what the matrix was made to show."""

import numpy as np
import pytest
import xarray as xr
from refusals import refused

import tnsim
from tnsim.analysis import reading
from tnsim.analysis.reading import findings, without_copies


def run_of(points, labels=None, **more):
    """A result of unit vectors."""
    points = np.asarray(points, float)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    labels = list(range(len(points))) if labels is None else labels
    values = {"similarity": (("a", "b"), points @ points.T)}
    return tnsim.Pairwise(values, {"a": labels, "b": labels, **more})


def on_a_circle(angles):
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


@pytest.mark.parametrize("jump", [1, 4, 6])
def test_a_jump_is_named_and_drift_is_not(jump):
    angles = 0.05 * np.arange(8.0)
    even = findings(run_of(on_a_circle(angles)))
    assert even[1].startswith("It changed evenly") and "Changed here" not in " ".join(even)
    angles[jump:] += 1.0
    said = findings(run_of(on_a_circle(angles), labels=(100 * np.arange(8)).tolist()))
    assert f"Changed here: from {100 * jump - 100} to {100 * jump} (similarity" in said[1]
    assert f"{np.cos(1.05):.3g}; the other steps" in said[1]
    assert said[0].startswith(f"8 models, 0 to 700: similarity from {np.cos(1.35):.3g} (0 and 700)")


def test_phases_are_those_of_segment():
    run = run_of(on_a_circle(np.array([0.0, 0.05, 1.3, 2.5, 2.55, 2.6])))
    whole, found = (reading.segment(run, phases) for phases in (1, 3))
    said = f"The best 3 phases: 0 to 1; 2; 3 to 5 ({100 * found.cost / whole.cost:.0f} % of"
    assert said in " ".join(findings(run))
    assert str(found) == "3 phases, changed here: 2, 3"


def test_small_changes_are_told_by_their_difference_from_one():
    said = findings(run_of(on_a_circle(np.array([0.0, 1e-4, 2e-4, 1e-2]))))
    assert "(similarity 1 - 4.8e-05; the other steps 1 - 5e-09)" in said[1]
    assert findings(run_of(np.ones((3, 2))))[1] == "The function did not change."


def test_steps_beside_the_largest_are_told_by_the_largest_of_them():
    said = findings(run_of(on_a_circle(np.cumsum([0.0, 1.2, 0.5, 0.1, 0.1]))))
    assert "(similarity 0.362; the other steps 0.878 or more, their median 1 - 0.005)" in said[1]


def test_steps_are_told_by_their_similarity():
    """Which no rounding of chords has changed: 0 is 0."""
    said = findings(run_of(np.eye(4)))
    assert (
        "most from 0 to 1 (similarity 0), less than twice as far as in the other steps (0)."
        in said[1]
    )


def test_models_under_names_have_no_order_to_change_in():
    names = ["base", "pruned", "int8", "seed_1", "seed_2", "tuned"]
    (said,) = findings(run_of(on_a_circle(np.arange(6.0)), names))
    assert said.startswith("6 models, base to tuned: similarity from")


def test_copies_of_steps_are_left_out_of_words_and_curves():
    angles = np.array([0.0, 0.1, 1.5, 1.6, 0.1])
    digests = ("a", ["p", "q", "r", "s", "q"])
    run = run_of(on_a_circle(angles), ["1", "2", "3", "4", "model_best"], hash_a=digests)
    said = findings(run)
    assert said[0].startswith("4 models, 1 to 4") and "model_best = 2" in said[1]
    assert "from 2 to 3" in said[2]
    figure = run.tnsim.plot("trajectory", change_points=[2])
    assert len(figure.axes[0].lines[0].get_xdata()) == 4
    # Steps with equal weights are steps.
    same = run.assign_coords(a=[1, 2, 3, 4, 5], b=[1, 2, 3, 4, 5])
    assert without_copies(same).sizes["a"] == 5


def test_models_that_are_mostly_their_means():
    models = [tnsim.Model([tnsim.Linear([[w, 1.0]], [c])]) for w, c in ((1, 9), (2, 9), (5, 0))]
    said = "mean over the inputs in 2 of 3 models (up to 98 %): centred=True (--centred)"
    assert said in tnsim.pairwise(models).tnsim.summary()
    beside = tnsim.pairwise(models[:2], other=models[1:])
    assert "the inputs in 3 of 4 models" in beside.tnsim.summary()
    for alike in (
        tnsim.pairwise(models[1:]),  # one model of a pair says nothing of the other
        tnsim.pairwise(models, centred=True),
        tnsim.pairwise(models[:2], other=models[2:]),
        tnsim.pairwise(models, tnsim.TreeSymmetric()),
    ):
        assert "mean over the inputs" not in alike.tnsim.summary()


def test_sets_and_pairs_and_runs_over_parts():
    models = [tnsim.Model([tnsim.Linear([[w, 1.0]])]) for w in (1.0, 2.0, 5.0)]
    two = tnsim.pairwise(models[:2], other=models[1:])
    assert findings(two)[0].startswith("2 x 2 models: similarity from")
    assert "2 models, 0 and 1: similarity" in tnsim.pairwise(models[:2]).tnsim.summary()
    data = tnsim.pairwise(models, tnsim.Empirical(np.ones((40, 2))), centred=False)
    assert "On these inputs under empirical, with standard errors up to" in data.tnsim.summary()
    part = {"part": ["p", "q"], "kind": ("part", ["ov", "ov"])}
    norms = {
        f"log_norm_{side}": (("part", side), np.log([[1.0, 4.0], [1.0, 9.0]])) for side in "ab"
    }
    ones = {"similarity": (("part", "a", "b"), np.ones((2, 2, 2)))}
    steps = {side: [0, 1] for side in "ab"}
    said = findings(xr.Dataset({**ones, **norms}, {**part, **steps}))
    assert said[1] == "ov: q (|b - a| 2, similarity 1), p (|b - a| 1, similarity 1)."
    still = {name: (dims, 0 * norm) for name, (dims, norm) in norms.items()}
    assert findings(xr.Dataset({**ones, **still}, {**part, **steps}))[1] == "ov: none moved."


def test_runs_that_are_not_finished_are_refused():
    values = {"similarity": (("a", "b"), np.array([[1.0, np.nan], [np.nan, 1.0]]))}
    with refused("finish the run first", tnsim.errors.ResultError):
        findings(xr.Dataset(values, {"a": [0, 1], "b": [0, 1]}))


def test_what_is_no_matrix_over_models_is_refused_in_words():
    run = run_of(np.eye(3))
    assert findings(run.transpose("b", "a")) == findings(run)
    wide = run.isel(a=[1])
    assert findings(wide.transpose("b", "a")) == findings(wide)
    for result, said in (
        (run.isel(a=0), r"a matrix over \(a, b\).*select the others first"),
        (run.isel(a=0, b=1), r"a matrix over \(a, b\)"),
        (run.rename(a="model"), r"a matrix over \(a, b\), found dimensions \('model', 'b'\)"),
        (run.isel(a=[]), "the result holds no models"),
        (run.drop_vars("similarity"), "no similarity"),
    ):
        with refused(said, tnsim.errors.ResultError):
            result.tnsim.summary()
    with refused("no log_norm_a", tnsim.errors.ResultError):
        _ = run.tnsim.distance
