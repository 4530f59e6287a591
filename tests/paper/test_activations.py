import pytest
from rerun import by_verdict, verdicts

from benchmarks.paper.activations import EXPERIMENT, ActivationsSetting

SMALL = ActivationsSetting(inputs=6, hidden=12, steps=200, networks=1, grid=200, samples=8192)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:the models are not quite")
def test_the_verdicts_of_small_networks(tmp_path):
    assert by_verdict(verdicts(EXPERIMENT, SMALL, tmp_path)) == {
        "holds": (
            "exact-relu exact-gelu exact-tanh grid-gelu grid-tanh relu-permuted gelu-permuted "
            "relu-rescaled tanh-flipped gelu-by-tanh closure-drawn polynomial-bound"
        ),
        "does not hold": "closure-trained",
    }
