"""The induction experiment on the shipped series, at fewer positions."""

import shutil

import numpy as np
import pytest
from closeness import LARGEST, assert_close
from refusals import refused
from rerun import by_verdict, verdicts

import tnsim
from benchmarks.paper import induction
from benchmarks.paper.run import ExperimentRun

SMALL = induction.InductionSetting(positions=2, sequences=200)
STEPS = (0, 100, 300, 650, 1250, 4000)


@pytest.mark.full
def test_the_verdicts_of_half_the_shipped_series(tmp_path):
    shipped = induction.series_of(ExperimentRun(tmp_path, SMALL))
    given = tmp_path / "half"
    given.mkdir()
    for path in shipped.paths:
        if int(path.stem.removeprefix("step_")) in STEPS:
            shutil.copy(path, given)
    found = verdicts(induction.EXPERIMENT, SMALL, tmp_path / "out", given=given)
    assert by_verdict(found) == {
        "holds": (
            "blocks-repeated-outputs blocks-similarity blocks-weight-cosine learned "
            "nothing-in-common one-head-first phases-repeated-outputs phases-similarity "
            "phases-weight-cosine through-the-last-layer"
        )
    }


def test_parts_add_up_to_their_model(tmp_path):
    model = induction.series_of(ExperimentRun(tmp_path, SMALL))[-1]
    model = tnsim.Model(model.layers, n_ctx=16)
    repeated = induction.drawn(5, 16, 16, 4, 8, seed=0)
    total = sum(induction.outputs_of(part, repeated) for part in induction.parts(model).values())
    wanted = induction.outputs_of(model, repeated)
    assert_close(total, wanted, scale=LARGEST, rtol=1e-4, limited_by="float32")


def test_what_is_determined_is_what_came_before():
    repeated = induction.drawn(20, 16, 16, 4, 8, seed=1)
    for tokens, known in zip(repeated.tokens.tolist(), repeated.determined.tolist(), strict=True):
        for place, told in enumerate(known, start=1):
            before = tokens[: place - 1]
            assert told == (tokens[place - 1] in before)


def test_an_accuracy_that_does_not_rise_is_refused():
    with refused("before, within and after", tnsim.errors.ResultError):
        induction.turns_of(np.full(5, 0.9), 0.1)
