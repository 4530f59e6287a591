"""The language experiment on a text of a few rules: byte pairs, n-grams, and all verdicts."""

import itertools
from collections import Counter

import numpy as np
import pytest
from closeness import assert_close
from refusals import refused
from rerun import by_verdict, verdicts

import tnsim
from benchmarks.paper import language
from benchmarks.paper.phases import drifting_evenly
from benchmarks.paper.run import ExperimentRun

MODEL = dict(vocabulary=28, width=4, heads=1, layers=1, biases=True, context=8)
TRAINING = dict(batch=16, steps=300, checkpoints=6, rate=1e-2)
MEASURES = dict(positions=2, sequences=64, grams=20, windows=200)
SMALL = language.LanguageSetting(**MODEL, **TRAINING, **MEASURES)


@pytest.fixture
def text(tmp_path):
    """A folder of sentences in which some words always follow others."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(60):
        words = []
        for _ in range(60):
            words += ["the ", rng.choice(["cat ", "dog ", "hen "]), rng.choice(["sat. ", "ran. "])]
        (folder / f"{n:02d}.txt").write_text("".join(words))
    return folder


def greedy(word, coder):
    """One word by the definition: the earliest merge that applies, wherever it applies first."""
    rank = {pair: 2 + len(coder.alphabet) + n for n, pair in enumerate(coder.merges)}
    ids = [2 + coder.alphabet.index(byte) if byte in coder.alphabet else 1 for byte in word]
    while True:
        found = [rank.get(pair) for pair in itertools.pairwise(ids)]
        if not any(found):
            return ids
        best = min(number for number in found if number)
        place = found.index(best)
        ids[place : place + 2] = [best]


def test_byte_pairs_against_their_definition(rng):
    words = [bytes(rng.choice(list(b"abc"), size=n)) for n in rng.integers(1, 12, size=200)]
    coder = language.learn(Counter(words), 24)
    assert coder.size == 24
    found = language.encode(coder, [*words, b"xaz"])
    assert [ids.tolist() for ids in found] == [greedy(word, coder) for word in [*words, b"xaz"]]
    assert [b"".join(map(coder.text, ids)) for ids in found] == [*words, b"?a?"]


def test_nothing_is_lost_between_words():
    text = b"def f(x):\n    return {x: 10}\r\n\t\xc3\xa9  #  end"
    assert b"".join(language.words_of(text)) == text


def test_runs_of_one_letter_merge_from_the_left():
    assert language.encode(language.Coder(b"a", ((2, 2),)), [b"aaaaa"])[0].tolist() == [3, 3, 2]


def test_a_text_too_short_is_refused():
    with refused("too short for 30 tokens"):
        language.learn(Counter([b"ab"]), 30)
    with refused("no room"):
        language.learn(Counter([bytes(range(97, 123))]), 10)
    with refused("too few documents to hold out"):
        language.made([b"one"], 10)


def test_the_standard_library_is_a_text():
    names = language.documents(None)
    assert len(names) > 100 and max(map(len, names)) <= 2**16


def test_an_empty_folder_is_no_text(tmp_path):
    with refused(r"a folder of \.txt files"):
        language.documents(tmp_path)


def test_checkpoints_without_their_text_are_refused(tmp_path):
    with refused(r"training.*held_out"):
        language.text_of(ExperimentRun(tmp_path / "out", SMALL, given=tmp_path))


def test_ngrams_do_not_cross_documents(rng):
    tokens = rng.integers(0, 4, size=500)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, 3)
    counts = Counter(map(tuple, windows.tolist()))
    own = {gram: count for gram, count in counts.items() if 0 not in gram}
    found = language.common(tokens, 3, 5)
    assert [own[tuple(gram)] for gram in found.tolist()] == sorted(own.values())[::-1][:5]


def test_scores_are_one_for_a_model_that_knows_nothing():
    even = tnsim.Model([tnsim.Linear(np.zeros((1, 5))), tnsim.Linear(np.zeros((5, 1)))])
    grams = [np.ones((3, 2), int), np.ones((3, 3), int)]
    assert language.scores([even], grams, grams).tolist() == [[1.0, 1.0]]


def test_even_drift_has_the_mean_of_every_lag(rng):
    values = rng.normal(size=(6, 6))
    values += values.T
    even = drifting_evenly(values)
    for lag in range(6):
        assert_close(np.diagonal(even, lag), np.diagonal(values, lag).mean())


@pytest.mark.full
def test_the_verdicts_of_a_small_model(tmp_path, text):
    folder = tmp_path / "out"
    found = verdicts(language.EXPERIMENT, SMALL, folder, data=text)
    assert by_verdict(found) == {
        "differs in setting": "2-gram-score tensor-follows-ngrams-best",
        "holds": (
            "3-gram-score blocks-gaussian-logits blocks-held-out-text blocks-similarity "
            "blocks-text-logits blocks-text-residual blocks-weight-cosine "
            "pairs-stop-first phases-gaussian-logits phases-held-out-text "
            "phases-similarity phases-text-logits phases-text-residual "
            "phases-weight-cosine tensor-is-sharpest tensor-is-sharpest-beyond-drift"
        ),
        "cannot be rerun": "closed-form the-papers-run",
    }
    # So that it can be given to another run.
    assert (folder / "checkpoints" / language.FILE).exists()
