"""What the paper says of language models, beside a small one. In: measured. Out: claims."""

from __future__ import annotations

from typing import Any

import numpy as np

import tnsim
from tnsim.reproduce.claims import Claim, Summary, at_least, at_most
from tnsim.reproduce.language.measure import MEASURES, Measured
from tnsim.reproduce.language.setting import PAPER, PHASES, Setting
from tnsim.reproduce.phases import Seen, claims_of, seen, summary
from tnsim.reproduce.run import Run

WHERE = "section 3.4, figure 5"
AUTHORS = {  # block scores of their stored matrices by the text's formula, at their best phases
    "similarity": 0.525,
    "text_residual": 0.322,
    "text_logits": 0.286,
    "weight_cosine": 0.284,
}


def claims(run: Run[Setting], measured: Measured) -> tuple[Claim, ...]:
    """Rows about n-grams, blocks, which measure sees the n-gram phases, and what is exact.

    Args:
        run: That was measured.
        measured: Its matrices and curves.

    Returns:
        The claims.
    """
    differs = _differs(run)
    in_matrices = phases_seen(measured)
    turning = "those of n-gram scores do"
    return (
        *_of_ngrams(measured, differs),
        *claims_of(in_matrices, MEASURES, WHERE, turning, AUTHORS, differs),
        *_of_tensors(in_matrices, differs),
        *_of_exactness(measured),
        *_of_size(run, measured),
    )


def _differs(run: Run[Setting]) -> str:
    """How a run is not the paper's; checkpoints of somebody may be."""
    if run.given is not None:
        return ""
    ways = []
    if run.setting.width != PAPER.width:
        ways.append(f"a model of width {run.setting.width} instead of {PAPER.width}")
    if run.setting.biases != PAPER.biases:
        ways.append("without biases")
    if run.data is None:
        ways.append("on Python source instead of the Pile")
    return ", ".join(ways)


def phases_seen(measured: Measured) -> dict[str, Seen]:
    """What each matrix shows of the phases that n-gram scores have."""
    points = _turns(measured).change_points
    table = measured.table
    return {name: seen(table[name], measured.ngrams, points) for name in MEASURES}


def summaries(measured: Measured) -> tuple[Summary, ...]:
    """All measures side by side."""
    return (summary(phases_seen(measured), MEASURES, _turns(measured).labels),)


def _turns(measured: Measured) -> Any:
    """The best phases of the n-gram scores."""
    return tnsim.reading.segment(measured.ngrams, PHASES)


def _of_ngrams(measured: Measured, differs: str) -> list[Claim]:
    names = [str(name) for name in measured.table.data_vars if str(name).endswith("-gram score")]
    curves = np.stack([measured.table[name].values for name in names])
    rows = []
    for name, curve, authors in zip(names, curves, ("1.32, then 1.11", 2.06, 2.37), strict=False):
        rows.append(
            Claim(
                name=name.replace(" ", "-"),
                text=f"The model specialises in the commonest {name[0]}-grams.",
                where=WHERE,
                authors=authors,
                ours=(float(curve.max()),),
                expected=at_least(1.2),
                why="1 is no specialisation",
                differs=differs,
            )
        )
    late = curves[:, -1] / curves.max(axis=1)
    return [
        *rows,
        Claim(
            name="pairs-stop-first",
            text="The 2-gram score stops rising before those of longer n-grams.",
            where=WHERE,
            paper="continued changes",
            authors=round(1.11 / 1.32 - 1, 3),
            ours=(float(late[0] - late[1:].min()),),
            expected=at_most(0.0),
            why="share of its peak that the score has at the end, less that of the longer ones",
            differs=differs,
        ),
    ]


def _of_tensors(found: dict[str, Seen], differs: str) -> list[Claim]:
    """Tensor similarity beside the best of the other measures."""
    tensor = found["similarity"]
    others = [one for name, one in found.items() if name != "similarity"]
    beyond = tensor.score - tensor.even - max(one.score - one.even for one in others)
    return [
        Claim(
            name="tensor-is-sharpest",
            text="Tensor similarity has clear blocks where existing measures blur.",
            where=WHERE,
            authors=round(AUTHORS["similarity"] - AUTHORS["text_residual"], 3),
            ours=(tensor.score - max(one.score for one in others),),
            expected=at_least(0.0),
            why="its block score less the largest of the others",
            differs=differs,
        ),
        Claim(
            name="tensor-is-sharpest-beyond-drift",
            text="The same for what block scores have beyond those of even drift.",
            where=WHERE,
            ours=(beyond,),
            expected=at_least(0.0),
            why="its excess over its control less the largest of the others",
            differs=differs,
        ),
        Claim(
            name="tensor-follows-ngrams-best",
            text="Tensor similarity follows the n-gram scores better than other measures.",
            where=WHERE,
            ours=(tensor.rank - max(one.rank for one in others),),
            expected=at_least(0.0),
            why="its Spearman's coefficient with likeness in n-gram scores less the largest other",
            differs=differs,
        ),
    ]


def _of_size(run: Run[Setting], measured: Measured) -> list[Claim]:
    if run.given is not None:
        return []
    return [
        Claim(
            name="the-papers-run",
            text="101 checkpoints of 2.9 million weights after 3.9 billion tokens of the Pile.",
            where=WHERE,
            cannot="no such text comes with Python, and training takes 5 hours on an A10; give "
            "--checkpoints where you have them",
            note=f"the text here has the digest {measured.digest}",
        )
    ]


def _of_exactness(measured: Measured) -> list[Claim]:
    """What "closed form" means for two layers of attention.

    The layer-wise closure is a closed form of its own recursion, which takes hidden states for
    Gaussian. It equals E<A(x), B(x)> for one nonlinear layer. Two layers of attention have degree
    25, a product of two such models 50, and no sample of inputs settles moments of that degree.
    """
    error = float(measured.table["standard_error"].values.max())
    return [
        Claim(
            name="closed-form",
            text="The matrix is the expected inner product under Gaussian inputs, in closed form.",
            where=WHERE,
            paper="closed form",
            cannot="the closure is exact for one nonlinear layer and an approximation for two, and "
            "sampling does not settle the exact value: moments of degree 50 are decided by rare "
            f"inputs, the standard error of a cosine reaches {error:.2f}",
            note="where exact values can be had the two differ: `closure-exact` of invariance, and "
            "benchmarks/results/closure-attention.md",
        ),
    ]
