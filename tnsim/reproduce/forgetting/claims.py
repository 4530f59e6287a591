"""What the paper says of forgetting, beside training. In: measured values. Out: claims."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

import tnsim
from tnsim.reproduce.claims import Claim, Interval, at_least, at_most, each, near
from tnsim.reproduce.forgetting.measure import WHOLE, Compared, Measured
from tnsim.reproduce.forgetting.setting import STAGES, Setting
from tnsim.reproduce.run import Run

WHERE = "section 3.1, figure 3"
PROGRESS = "appendix B, figure 6"
WORDS = {"similarity": "tensor similarity", "cka": "CKA", "weight_cosine": "cosine of weights"}


def claims(run: Run[Setting], measured: Measured) -> tuple[Claim, ...]:
    """Rows about accuracy, about whole models, and about slices.

    Args:
        run: That was measured.
        measured: Its values.

    Returns:
        The claims.
    """
    differs = ""
    if run.data is None and run.given is None:
        differs = "other images than SVHN, and fewer steps: forgetting takes weight decay x steps"
    return (
        _accuracy(measured, differs),
        *_whole(measured, differs),
        *_drops(measured, differs),
        *_slices(measured, differs),
    )


def _accuracy(measured: Measured, differs: str) -> Claim:
    return Claim(
        name="accuracy",
        text="Validation accuracy at the end of every stage is 83 to 85 %.",
        where=PROGRESS,
        paper="0.83 to 0.85",
        authors="0.822 to 0.855",
        ours=each(measured.seeds, lambda one: float(_at_ends(one, "validation_accuracy").mean())),
        expected=near(0.84, 0.02),
        why="mean over stages",
        differs=differs,
    )


def _whole(measured: Measured, differs: str) -> list[Claim]:
    rows = []
    for other, authors in (("cka", -0.005), ("weight_cosine", 0.166)):
        rows.append(
            Claim(
                name=f"sharper-than-{other.replace('_', '-')}",
                text=f"Tensor similarity parts stages with and without 9 more sharply than "
                f"{WORDS[other]}.",
                where=WHERE,
                paper="much weaker signal",
                authors=authors,
                ours=each(
                    measured.seeds,
                    lambda one, name=other: (
                        with_and_without_9(one.stages, "similarity")
                        - with_and_without_9(one.stages, name)
                    ),
                ),
                expected=at_least(0.02),
                why="difference of two group scores, stages with 9 and without",
                differs=differs,
                note="authors' stored runs: tensor 0.216, CKA 0.221, weights 0.050",
            )
        )
    return rows


def _drops(measured: Measured, differs: str) -> list[Claim]:
    """What removing 9 does to the likeness with the end of the stage that added it."""
    rows = []
    for name, authors in (("similarity", 0.19), ("cka", 0.07), ("weight_cosine", 0.07)):
        text = f"Removing 9 lowers {WORDS[name]} to the end of the stage that adds 9."
        excess = at_least(0.02)
        if name != "similarity":
            text = f"Removing 9 lowers {WORDS[name]} considerably less."
            excess = at_most(0.05)
        rows.append(_drop(measured, name, text, authors, excess, differs))
    rows.append(
        Claim(
            name="most-pronounced-drop",
            text="The drop of tensor similarity is the most pronounced of the three.",
            where=PROGRESS,
            authors=2.7,
            ours=each(measured.seeds, _times_the_next_drop),
            expected=at_least(1.0),
            why="ratio to the larger of the two others",
        )
    )
    return rows


def _drop(
    measured: Measured, name: str, text: str, authors: float, excess: Interval, differs: str
) -> Claim:
    """One drop, judged by what it has beyond the control, or by the authors' without one."""
    drops = each(measured.seeds, lambda one: drop(one.stages, name))
    claim = Claim(
        name=f"drop-of-{name.replace('_', '-')}",
        text=text,
        where=PROGRESS,
        authors=authors,
        ours=drops,
        why="1 less similarity, at the end of the stage; the control goes on with all digits",
        differs=differs,
        note="no control was published: what goes on with all digits drifts away as well",
    )
    if measured.seeds[0].kept is None:
        return dataclasses.replace(claim, expected=near(authors, 0.05))
    # rows of the control bear the number of the stage that they stand for
    controls = each(measured.seeds, lambda one: drop(one.kept, name))
    return dataclasses.replace(claim, control=controls, excess=excess)


def _slices(measured: Measured, differs: str) -> list[Claim]:
    return [
        _drop(measured, "slice_9", "Removing 9 lowers slice 9.", 1.07, at_least(0.1), differs),
        Claim(
            name="orthogonal-slices",
            text="Without 9, slice 9 is orthogonal to slice 9 with it.",
            where=WHERE,
            paper=0.0,
            authors=-0.07,
            ours=each(measured.seeds, lambda one: 1.0 - drop(one.stages, "slice_9")),
            expected=near(0.0, 0.1),
            why="similarity of the ends of two stages, remove 9 and add 9",
            differs=differs,
        ),
        Claim(
            name="localised",
            text="The drop is localised almost entirely to digit 9.",
            where=PROGRESS,
            ours=each(measured.seeds, _times_other_slices),
            expected=at_least(2.0),
            why="ratio to the mean drop of the nine other slices",
        ),
        Claim(
            name="grouped",
            text="Slice 9 groups the stages with 9, and those without.",
            where=WHERE,
            authors=0.937,
            ours=each(measured.seeds, lambda one: with_and_without_9(one.stages, "slice_9")),
            expected=near(0.937, 0.1),
            why="group score of the stages with 9 and without",
            differs=differs,
        ),
        Claim(
            name="divided-in-two",
            text="The best two phases of slice 9 are before and after 9 is added.",
            where=WHERE,
            ours=each(measured.seeds, lambda one: _is_divided(one, "slice_9", ("add 8",))),
            expected=at_least(0.66),
            why="share of the seeds; two of three",
        ),
        Claim(
            name="divided-in-two-globally",
            text="The best two phases of tensor similarity are before and after 9 is added.",
            where=WHERE,
            paper="block structure",
            ours=each(measured.seeds, lambda one: _is_divided(one, "similarity", ("add 8",))),
            expected=at_least(0.66),
            why="share of the seeds; two of three",
            differs=differs,
        ),
        Claim(
            name="divided-in-four",
            text="The best four phases of slice 9 start where 9 comes, goes and comes again.",
            where=WHERE,
            authors="yes",
            ours=each(
                measured.seeds,
                lambda one: _is_divided(one, "slice_9", ("add 8", "control", "remove 9")),
            ),
            expected=at_least(0.66),
            why="share of the seeds; two of three",
            differs=differs,
        ),
        Claim(
            name="weaker-in-weights",
            text="The cosine of weights of output 9 shows this much less.",
            where=PROGRESS,
            authors=0.12,
            ours=each(measured.seeds, _of_weights),
            expected=at_most(0.5),
            why="ratio of two group scores: cosine of the head's row 9, and slice 9",
            note="authors' stored runs: 0.115 of 0.937",
        ),
        Claim(
            name="recovers",
            text="Adding 9 again restores slice 9.",
            where=PROGRESS,
            ours=each(measured.seeds, _recovered),
            expected=at_least(0.5),
            why="share of the drop that is made up for at the end of the next stage",
        ),
    ]


def ends(result: Any) -> dict[str, int]:
    """The last row of every stage."""
    numbers = result.stage.values.tolist()
    found = {}
    for row, number in enumerate(numbers):
        found[STAGES[int(number)].name] = row
    return found


def with_and_without_9(result: Any, name: str) -> float:
    """Group score of the stages that show 9 and those that do not; the start is left out."""
    table = result[name].isel(a=slice(1, None), b=slice(1, None))
    shown = [STAGES[int(number)].digits == 10 for number in result.stage.values[1:]]
    return tnsim.reading.group_score(table, np.array(shown))


def drop(result: Any, name: str) -> float:
    """1 less the similarity of the stages that remove and that add 9, at their ends."""
    rows = ends(result)
    return 1.0 - float(result[name][rows["add 9"], rows["remove 9"]])


def _at_ends(one: Compared, name: str) -> np.ndarray:
    return one.stages[name].values[list(ends(one.stages).values())]


def _times_the_next_drop(one: Compared) -> float:
    first, *others = [drop(one.stages, name) for name in WHOLE]
    return first / max(others)


def _times_other_slices(one: Compared) -> float:
    rows = ends(one.stages)
    drops = 1.0 - one.stages.slices.values[rows["add 9"], rows["remove 9"]]
    return float(drops[9] / drops[:9].mean())


def _is_divided(one: Compared, name: str, after: Sequence[str]) -> float:
    """1 where the best phases start right after these stages; the start is left out."""
    table = one.stages[name].isel(a=slice(1, None), b=slice(1, None))
    rows = ends(one.stages)
    wanted = tuple(rows[stage] for stage in after)
    return float(tnsim.reading.segment(table, len(after) + 1).change_points == wanted)


def _of_weights(one: Compared) -> float:
    of_tensors = with_and_without_9(one.stages, "slice_9")
    return with_and_without_9(one.stages, "weight_slice_9") / of_tensors


def _recovered(one: Compared) -> float:
    rows = ends(one.stages)
    again = 1.0 - float(one.stages.slice_9[rows["add 9"], rows["re-add 9"]])
    lost = drop(one.stages, "slice_9")
    return (lost - again) / lost
