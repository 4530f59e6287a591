"""What the paper says of grokking, beside training. In: measured values. Out: claims."""

from __future__ import annotations

import numpy as np

import tnsim
from tnsim.reproduce.claims import Claim, Interval, at_least, at_most, each
from tnsim.reproduce.grokking.measure import KNOWN, Measured, first_row
from tnsim.reproduce.grokking.setting import Setting
from tnsim.reproduce.run import Run

WHERE = "section 3.2, figure 4"
CHANCE = 0.05
"""Accuracy up to which nothing is understood; guessing gives 1 / 113."""
SPACING = 1.6
"""Ratio of neighbouring steps where five checkpoints make a decade."""
PHASES = {3: (180, 8881), 5: (102, 1076, 7517, 21799)}
"""Where the best phases of the authors' stored similarities start."""


def claims(run: Run[Setting], measured: Measured) -> tuple[Claim, ...]:
    """Rows about curves, about blocks and phases, and about frequencies.

    Args:
        run: That was measured.
        measured: Its values.

    Returns:
        The claims.
    """
    differs = ""
    if run.setting.train_share != Setting.train_share:
        differs = "the text's split and weight decay instead of the code's"
    rows = [*_curves(measured, differs), *_blocks(measured, differs), *_after(measured)]
    if measured.at_text:
        rows.append(_at_text(measured))
    return tuple(rows)


def _curves(measured: Measured, differs: str) -> list[Claim]:
    return [
        Claim(
            name="memorised-first",
            text="Training saturates immediately, with validation at chance.",
            where=WHERE,
            paper="chance",
            authors=0.003,
            ours=each(measured.runs, _held_when_known),
            expected=at_most(CHANCE),
            why="guessing gives 0.009; validation accuracy when training reaches 99 %",
        ),
        Claim(
            name="generalises",
            text="Validation then jumps to perfect.",
            where=WHERE,
            paper="perfect",
            ours=each(measured.runs, lambda result: float(result.validation_accuracy[-1])),
            expected=at_least(KNOWN),
            why="accuracy of the last checkpoint",
        ),
        Claim(
            name="generalises-at",
            text="The step from which validation is above 95 %.",
            where=WHERE,
            authors=11290,
            ours=each(measured.runs, lambda result: _step(result, "validation_accuracy", 0.95)),
            expected=_within(11290, 2.0),
            why="another split and initialisation: a factor of two",
            differs=differs,
        ),
    ]


def _blocks(measured: Measured, differs: str) -> list[Claim]:
    rows = [
        Claim(
            name="blocks-as-named",
            text="Three diagonal blocks are initialisation, memorisation and the solution.",
            where=WHERE,
            ours=each(measured.runs, _share_in_their_block),
            expected=at_least(1.0),
            why="share of the checkpoints that the curves name and that lie in the block so named",
            note="best three phases, against accuracies: nothing learned, only the training pairs "
            "known, all pairs known",
        )
    ]
    for phases, starts in PHASES.items():
        for number, start in enumerate(starts):
            rows.append(
                Claim(
                    name=f"start-{number + 2}-of-{phases}",
                    text=f"Phase {number + 2} of the best {phases} starts at this step.",
                    where=WHERE,
                    authors=start,
                    ours=each(measured.runs, lambda one, p=phases, n=number: _starts(one, p)[n]),
                    expected=_within(start, SPACING),
                    why="one checkpoint of five to a decade, either way",
                    differs=differs,
                )
            )
    for number, (curve, level) in enumerate(
        (("train", 0.9), ("validation", 0.1), ("validation", KNOWN)), start=1
    ):
        name = f"{curve}_accuracy"
        rows.append(
            Claim(
                name=f"phase-{number + 2}-at-{curve}-{level:.0%}".rstrip("%"),
                text=f"Phase {number + 2} of five starts where {curve} accuracy reaches "
                f"{level:.0%}.",
                where=WHERE,
                ours=each(
                    measured.runs,
                    lambda one, n=number, c=name, v=level: _starts(one, 5)[n] / _step(one, c, v),
                ),
                expected=_within(1.0, SPACING),
                why="ratio of the two steps; one checkpoint of five to a decade, either way",
            )
        )
    return rows


def _after(measured: Measured) -> list[Claim]:
    return [
        Claim(
            name="beyond-the-jump",
            text="Reorganisation goes on after validation is perfect.",
            where=WHERE,
            ours=each(measured.runs, _similarity_when_understood),
            expected=at_most(0.9),
            why="similarity to the last checkpoint when validation reaches 99 %",
        ),
        Claim(
            name="frequencies-settle-late",
            text="Frequencies of the embeddings settle only after validation is perfect.",
            where=WHERE,
            ours=each(measured.runs, _settled_after_understood),
            expected=at_least(1.0),
            why="ratio of two steps: the cosine of frequency shares to the last ones stays above "
            "0.99; validation reaches 99 %",
        ),
        Claim(
            name="either-metric",
            text="The symmetrised metric (code) shows what the Gaussian one (text) does.",
            where=WHERE,
            ours=each(measured.runs, lambda one: float(abs(one.similarity - one.symmetric).max())),
            expected=at_most(0.02),
            why="largest difference of two entries",
        ),
    ]


def _at_text(measured: Measured) -> Claim:
    return Claim(
        name="memorised-first-at-text",
        text="Training saturates with validation at chance, at the settings of the text.",
        where="appendix C",
        paper="chance",
        ours=measured.at_text,
        expected=at_most(CHANCE),
        why="guessing gives 0.009; validation accuracy when training reaches 99 %",
        note="60 % of the pairs and a weight decay of 0.06, where the authors' code has 30 % and "
        "0.3: with the text's settings both come together",
    )


def _within(middle: float, factor: float) -> Interval:
    return Interval(middle / factor, middle * factor)


def _step(result: tnsim.Pairwise, curve: str, level: float) -> float:
    """The step of the first checkpoint at which a curve is at a level or above it."""
    return float(result.a[first_row(result[curve].values, level)])


def _starts(result: tnsim.Pairwise, phases: int) -> tuple[float, ...]:
    """Steps at which the second and later ones of the best phases start."""
    return tnsim.reading.segment(result, phases).labels


def _held_when_known(result: tnsim.Pairwise) -> float:
    row = first_row(result.train_accuracy.values, KNOWN)
    return float(result.validation_accuracy[row])


def _share_in_their_block(result: tnsim.Pairwise) -> float:
    """Of the checkpoints that the curves put into one of the three blocks, those found there."""
    train, held = result.train_accuracy.values, result.validation_accuracy.values
    named = np.select(
        [train <= CHANCE, (train >= KNOWN) & (held <= CHANCE), held >= KNOWN], [0, 1, 2], -1
    )
    points = tnsim.reading.segment(result, 3).change_points
    found = tnsim.reading.phase_of_rows(points, len(named))
    return float((found == named)[named >= 0].mean())


def _similarity_when_understood(result: tnsim.Pairwise) -> float:
    row = first_row(result.validation_accuracy.values, KNOWN)
    return float(result.similarity[row, -1])


def _settled_after_understood(result: tnsim.Pairwise) -> float:
    """The step from which frequencies stay, in units of that at which validation is perfect."""
    to_last = result.frequency_cosine.values[:, -1]
    lowest_from_here = np.minimum.accumulate(to_last[::-1])[::-1]
    settled = float(result.a[first_row(lowest_from_here, 0.99)])
    return settled / _step(result, "validation_accuracy", KNOWN)
