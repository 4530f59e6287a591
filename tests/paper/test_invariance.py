from rerun import by_verdict, verdicts

from benchmarks.paper.invariance import EXPERIMENT, InvarianceSetting

SMALL = InvarianceSetting(inputs=5, hidden=24, outputs=3, deep_width=2, networks=2, samples=4096)


def test_the_verdicts_of_small_networks(tmp_path):
    assert by_verdict(verdicts(EXPERIMENT, SMALL, tmp_path)) == {
        "holds": (
            "gaussian-exact outputs-backdoor symmetric-discriminates tensor-backdoor "
            "tensor-both tensor-hidden-basis tensor-negated tensor-permuted "
            "tensor-perturbed tensor-rescaled tensor-swapped weights-both"
        ),
        "does not hold": "closure-exact gaussian-finer tree-discriminates",
    }
