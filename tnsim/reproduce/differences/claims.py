"""What the paper says of differences of models. In: measured values. Out: claims."""

from __future__ import annotations

from typing import Any

import numpy as np

from tnsim.reproduce.claims import Claim, at_least, at_most, each, near
from tnsim.reproduce.differences.measure import Measured
from tnsim.reproduce.forgetting.claims import ends
from tnsim.reproduce.forgetting.setting import Setting
from tnsim.reproduce.run import Run

WHERE = "appendix B, figure 7"
AUTHORS = {"add 8": -0.89, "add 9": 0.38, "remove 9": -0.86, "re-add 9": 0.39}
"""Slice 9 beside the difference, at the ends of stages."""


def claims(run: Run[Setting], measured: Measured) -> tuple[Claim, ...]:
    """Rows about slice 9 at the ends of stages, and about what changes between them.

    Args:
        run: That was measured.
        measured: Its values.

    Returns:
        The claims.
    """
    differs = ""
    if run.data is None and run.given is None:
        differs = "other images than SVHN, and fewer steps: forgetting takes weight decay x steps"
    rows = []
    for stage, authors in AUTHORS.items():
        rows.append(
            Claim(
                name=f"slice-9-at-{stage.replace(' ', '-')}",
                text=f"Slice 9 beside the difference, at the end of {stage}.",
                where=WHERE,
                authors=authors,
                ours=each(measured.seeds, lambda one, name=stage: at_end(one, name)),
                expected=near(authors, 0.15),
                why="another pair of networks",
                differs=differs,
            )
        )
    return (*rows, *_changes(measured))


def _changes(measured: Measured) -> list[Claim]:
    """What the paper reads off the curves: which way slice 9 goes, and that it is slice 9."""
    controls = tuple(
        at_end(kept, "remove 9") - at_end(one, "control")
        for one, kept in zip(measured.seeds, measured.kept, strict=bool(measured.kept))
    )
    return [
        Claim(
            name="rises",
            text="Slice 9 turns towards the difference when 9 is added.",
            where=WHERE,
            authors=1.27,
            ours=each(measured.seeds, lambda one: at_end(one, "add 9") - at_end(one, "add 8")),
            expected=at_least(0.3),
            why="change between the ends of two stages",
        ),
        Claim(
            name="falls",
            text="Slice 9 turns away from it when 9 is removed.",
            where=WHERE,
            authors=-1.24,
            ours=each(measured.seeds, lambda one: at_end(one, "remove 9") - at_end(one, "control")),
            control=controls,
            expected=at_most(-0.1),
            excess=at_most(-0.1) if controls else None,
            why="change between the ends of two stages; the control goes on with all digits",
        ),
        Claim(
            name="recovers",
            text="Slice 9 turns back when 9 is added again.",
            where=WHERE,
            authors=1.25,
            ours=each(
                measured.seeds, lambda one: at_end(one, "re-add 9") - at_end(one, "remove 9")
            ),
            expected=at_least(0.1),
            why="change between the ends of two stages",
        ),
        Claim(
            name="isolated",
            text="The difference isolates output 9: other slices turn less.",
            where=WHERE,
            ours=each(measured.seeds, _times_other_slices),
            expected=at_least(2.0),
            why="ratio of the change when 9 is removed to the mean size of the nine others'",
        ),
    ]


def at_end(result: Any, stage: str, output: int = 9) -> float:
    """A slice beside the difference, at the end of a stage."""
    return float(result.slices[ends(result)[stage], 0, output])


def _times_other_slices(one: Any) -> float:
    changes = []
    for output in range(one.sizes["output"]):
        changes.append(abs(at_end(one, "remove 9", output) - at_end(one, "control", output)))
    return float(changes[9] / np.mean(changes[:9]))
