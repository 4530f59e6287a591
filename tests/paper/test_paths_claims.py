"""The experiment on paths: its own tools against public verbs and hand-made cases, and its verdicts."""

import json
import shutil

import numpy as np
import pytest
from closeness import LARGEST, assert_close
from rerun import verdicts
from scipy.stats import spearmanr
from seeds import generator

import tnsim
from benchmarks.paper import paths
from benchmarks.paper.induction import drawn
from benchmarks.paper.paths import EXPERIMENT, PathsSetting
from benchmarks.paper.repetitions import RepetitionSetting, trained
from benchmarks.paper.run import ExperimentRun

TINY = RepetitionSetting(width=8, heads=2, batch=8, held_out=64, warmup=1, steps=(0, 2))
SHIPPED = tnsim.__path__[0] + "/data/induction"


def two_layers(rng, width=4, heads=2):
    def attention():
        weights = (rng.normal(size=(width, width)) for _ in range(6))
        return tnsim.Residual(tnsim.Attention(*weights, heads, rope_base=10.0), 1.0, 0.3)

    ends = (tnsim.Linear(rng.normal(size=shape)) for shape in ((width, 5), (5, width)))
    first, last = ends
    return tnsim.Model([first, attention(), attention(), last], n_ctx=3)


@pytest.mark.full
def test_a_cut_edge_is_the_cut_of_paths():
    """Models of twice the width, which the experiment writes, against gates inside tnsim."""
    rng = generator(0)
    model, x = two_layers(rng), rng.normal(size=(4, 3, 5))
    found = tnsim.paths(model, metric=tnsim.Empirical(x), by="head", legs=True)
    whole = model(x)
    for source, target, leg in ((0, 1, "Q"), (1, 0, "K"), (1, 1, "V")):
        lost = ((whole - paths.without_edge(model, source, target, leg)(x)) ** 2).sum()
        label = f"layer 1 head {source} > {leg} of layer 2 head {target}"
        cut = found.cut[found.edges.index(label)]
        assert_close(cut, lost / (whole**2).sum(), rtol=1e-9)


def test_scores_are_those_of_matrices_by_hand():
    model = two_layers(generator(1))
    scores = paths.composition_scores(model)
    one, two = model.layers[1].layer, model.layers[2].layer
    written = one.o[:, 2:] @ one.v[2:]  # head 1 of two, of width 2
    value = two.o[:, :2] @ two.v[:2]
    wanted = np.linalg.norm(value @ written) / np.linalg.norm(value) / np.linalg.norm(written)
    assert scores.shape == (2, 2, 3)
    assert_close(scores[1, 0, 2], wanted, rtol=1e-12)
    products = [q[:2].T @ k[:2] for q, k in ((two.q1, two.k1), (two.q2, two.k2))]
    norms = [
        np.linalg.norm(product @ written) / np.linalg.norm(product) / np.linalg.norm(written)
        for product in products
    ]
    assert_close(scores[1, 0, 1], np.mean(norms), rtol=1e-12)


def test_ranks_with_equal_values():
    rng = generator(2)
    one, two = rng.integers(0, 4, 30), rng.normal(size=30)
    assert_close(paths.spearman(one, two), spearmanr(one, two).statistic, rtol=1e-12)


def test_a_scrambled_layer_is_the_same_function():
    rng = generator(3)
    layer = tnsim.Bilinear(*(rng.normal(size=s) for s in ((5, 3), (5, 3), (2, 5))))
    x = rng.normal(size=(7, 3))
    other = paths.scrambled(layer, rng)
    assert_close(other(x), layer(x), scale=LARGEST, rtol=1e-12)
    both = [tnsim.Model([one]) for one in (layer, other)]
    assert abs(tnsim.baselines.weight_cosine(both)[0, 1]) < 0.9


def test_planted_changes_are_found():
    right, _, share = paths.planted(PathsSetting(points=32), 0)
    assert right
    assert_close(share, 1.0, rtol=1e-10)


@pytest.mark.full
def test_training_is_deterministic_and_its_log_complete(tmp_path):
    run = ExperimentRun(tmp_path, PathsSetting(seeds=2, training=TINY))
    paths.train(run)
    log = json.loads((run.checkpoints / "seed-1" / "log.json").read_text())
    (_, shipped), (steps, models) = paths.series_of(run)
    assert len(shipped) == 12 and steps == [0, 2]
    tokens = np.eye(16)[drawn(2, 16, 16, 4, 8, 0).tokens]
    for row, model, again in zip(log["checkpoints"], models, trained(TINY, 1), strict=True):
        assert row == {"step": again.step, **again.measures}
        same = tnsim.Model(again.model.layers, model.n_ctx)
        assert model(tokens).tolist() == same(tokens).tolist()


@pytest.mark.full
def test_the_verdicts_of_half_the_shipped_series(tmp_path):
    given = tmp_path / "given" / "seed-0"
    given.mkdir(parents=True)
    for step in (0, 200, 300, 450, 900, 4000):
        shutil.copy(f"{SHIPPED}/step_{step:06}.safetensors", given)
    small = PathsSetting(samples=32, edge_samples=2, edge_steps=(4000,), planted=3, backdoors=1)
    found = verdicts(EXPERIMENT, small, tmp_path / "out", given=given.parent)
    assert len(found) == 9
    # Claims on intervals and on edges need every checkpoint, and more than two sequences.
    names = "share-follows-accuracy", "better-than-the-score", "no-early-rise", "planted-changes"
    for name in names:
        assert found[name] == "holds"
