import pytest
from rerun import by_verdict, verdicts

from benchmarks.paper.activations import EXPERIMENT, ActivationsSetting

SMALL = ActivationsSetting(inputs=6, hidden=12, steps=200, networks=1, grid=200, samples=8192)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:the models are not quite")
def test_the_verdicts_of_small_networks(tmp_path):
    assert by_verdict(verdicts(EXPERIMENT, SMALL, tmp_path)) == {
        "holds": (
            "closure-drawn exact-gelu exact-relu exact-tanh gelu-by-tanh gelu-permuted "
            "grid-gelu grid-tanh polynomial-bound relu-permuted relu-rescaled "
            "tanh-flipped"
        ),
        "does not hold": "closure-trained",
    }
