from rerun import verdicts

from benchmarks.paper.invariance import EXPERIMENT, InvarianceSetting

SMALL = InvarianceSetting(inputs=5, hidden=24, outputs=3, deep_width=2, networks=2, samples=4096)


def test_the_verdicts_of_small_networks(tmp_path):
    assert verdicts(EXPERIMENT, SMALL, tmp_path) == {
        "tensor-permuted": "holds",
        "tensor-swapped": "holds",
        "tensor-rescaled": "holds",
        "tensor-both": "holds",
        "tensor-hidden-basis": "holds",
        "tensor-negated": "holds",
        "weights-both": "holds",
        "tensor-perturbed": "holds",
        "outputs-backdoor": "holds",
        "tensor-backdoor": "holds",
        "gaussian-exact": "holds",
        "closure-exact": "does not hold",
        "tree-discriminates": "does not hold",
        "symmetric-discriminates": "holds",
        "gaussian-finer": "does not hold",
    }
