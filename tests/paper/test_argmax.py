import jax.numpy as jnp
import pytest
from rerun import by_verdict, verdicts

from benchmarks.paper.argmax import EXPERIMENT, ArgmaxSetting, second_argmax

SMALL = ArgmaxSetting(
    distributions=("gaussian", "spikes", "last-is-minus-10", "spikes-text"),
    seeds=3,
    repetitions=1,
    steps=(0, 1, 4, 16, 64, 256),
    batch=128,
    samples=2000,
)


def test_the_second_largest_of_equal_ones_is_the_later_one():
    values = jnp.array([[0.0, 5.0, 0.0, 5.0], [0.0, 0.0, 0.0, -1.0]])
    assert second_argmax(values).tolist() == [3, 1]


@pytest.mark.full
def test_the_verdicts_of_a_short_training(tmp_path):
    assert by_verdict(verdicts(EXPERIMENT, SMALL, tmp_path)) == {
        "holds": (
            "accuracy-decidable accuracy-half accuracy-spikes eight-of-nine "
            "eight-of-nine-gaussian fitted gaussian-is-behaviour r-gaussian "
            "r-last-is-minus-10 r-spikes weight-cosine"
        ),
        "does not hold": "accuracy-spikes-text exception",
    }
