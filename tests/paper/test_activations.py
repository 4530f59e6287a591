import pytest
from rerun import verdicts

from benchmarks.paper.activations import EXPERIMENT, ActivationsSetting

SMALL = ActivationsSetting(inputs=6, hidden=12, steps=200, networks=1, grid=200, samples=8192)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:the models are not quite")
def test_the_verdicts_of_small_networks(tmp_path):
    assert verdicts(EXPERIMENT, SMALL, tmp_path) == {
        "exact-relu": "holds",
        "exact-gelu": "holds",
        "exact-tanh": "holds",
        "grid-gelu": "holds",
        "grid-tanh": "holds",
        "relu-permuted": "holds",
        "gelu-permuted": "holds",
        "relu-rescaled": "holds",
        "tanh-flipped": "holds",
        "gelu-by-tanh": "holds",
        "closure-drawn": "holds",
        "closure-trained": "does not hold",
        "polynomial-bound": "holds",
    }
