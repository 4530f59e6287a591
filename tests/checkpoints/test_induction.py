"""The shipped induction series: it loads, and it does what its metrics say, on sequences drawn anew."""

import json
from pathlib import Path

import numpy as np
import pytest
from closeness import assert_close

import tnsim

FOLDER = Path(tnsim.__file__).parent / "data" / "induction"
METRICS = json.loads((FOLDER / "metrics.json").read_text())


def drawn(settings, count, seed=0):
    """Tokens (count, context) that repeat a segment of different ones, and which of them (from the second on) are determined."""
    rng = np.random.default_rng(seed)
    shortest, longest = settings["segments"]
    segments = rng.permuted(np.tile(np.arange(settings["vocabulary"]), (count, 1)), axis=1)
    lengths = rng.integers(shortest, longest + 1, size=(count, 1))
    tokens = np.take_along_axis(segments, np.arange(settings["context"]) % lengths, axis=1)
    return tokens, np.arange(1, settings["context"]) > lengths


def test_the_series_is_complete():
    series = tnsim.load(FOLDER)
    assert [int(label) for label in series.labels] == [
        row["step"] for row in METRICS["checkpoints"]
    ]
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1.5e6
    for model in series:
        assert (model.degree, model.n_ctx, model.d_in, model.d_out) == (25, 4, 16, 16)
        assert [layer.scale for layer in model.layers[1:3]] == [METRICS["settings"]["scale"]] * 2


@pytest.mark.parametrize("index", [0, 6, -1])
def test_accuracy_is_what_the_metrics_say(index):
    settings, row = METRICS["settings"], METRICS["checkpoints"][index]
    tokens, repeated = drawn(settings, 2000)
    model = tnsim.load(FOLDER / f"step_{row['step']:06d}.safetensors", n_ctx=settings["context"])
    logits = model(np.eye(settings["vocabulary"], dtype=np.float32)[tokens])[:, :-1]
    right = logits.argmax(axis=-1) == tokens[:, 1:]
    assert_close(
        right[repeated].mean(),
        row["repeated_accuracy"],
        scale=1.0,
        rtol=0.02,
        limited_by="a share of sampled tokens",
    )
    assert_close(
        right[~repeated].mean(),
        row["fresh_accuracy"],
        scale=1.0,
        rtol=0.02,
        limited_by="a share of sampled tokens",
    )


def test_induction_appears_within_the_run():
    accuracy = {row["step"]: row["repeated_accuracy"] for row in METRICS["checkpoints"]}
    assert accuracy[200] < 0.1
    assert accuracy[1250] > 0.9
    assert accuracy[4000] > 0.99


@pytest.mark.slow
def test_similarity_tells_before_from_after():
    """Within the trained phase neighbours are alike; what came before has nothing in common with it."""
    first, before, after, last = (
        tnsim.load(FOLDER / f"step_{step:06d}.safetensors", n_ctx=2)
        for step in (0, 300, 2400, 4000)
    )
    tree = tnsim.TreeSymmetric()
    assert tnsim.similarity(after, last, tree) > 0.8
    assert abs(tnsim.similarity(before, last, tree)) < 0.05
    assert abs(tnsim.similarity(first, last, tree)) < 0.05
