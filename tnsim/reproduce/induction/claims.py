"""When induction is learned, through which heads, and what sees it. In: measured. Out: claims."""

from __future__ import annotations

import numpy as np

from tnsim.reproduce.claims import Claim, Summary, at_least, at_most
from tnsim.reproduce.induction.measure import MEASURES, Measured
from tnsim.reproduce.induction.setting import Setting
from tnsim.reproduce.phases import Seen, claims_of, seen, summary
from tnsim.reproduce.run import Run

WHERE = "beyond the paper"


def claims(run: Run[Setting], measured: Measured) -> tuple[Claim, ...]:
    """Rows about the curves, the heads, and the phases of each matrix.

    Args:
        run: That was measured.
        measured: Its matrices and curves.

    Returns:
        The claims.
    """
    of_phases = claims_of(phases_seen(measured), MEASURES, WHERE, "the accuracy turns")
    return (*_of_heads(measured), *of_phases)


def _of_heads(measured: Measured) -> list[Claim]:
    table = measured.table
    steps = table["a"].values
    begins, arrives = measured.turns
    heads = [name for name in table.data_vars if str(name).startswith("through head")]
    through = np.stack([table[name].values for name in heads])
    score = table["induction score"].values
    shares = through / score
    first = int(shares[:, begins:arrives].mean(axis=1).argmax())
    return [
        Claim(
            name="learned",
            text="Repeated tokens are predicted at the end.",
            where=WHERE,
            ours=(float(table["repeated accuracy"].values[-1]),),
            expected=at_least(0.99),
            why="accuracy on tokens that an earlier occurrence determines",
            note=f"it leaves chance at step {steps[begins]} and arrives at step {steps[arrives]}",
        ),
        Claim(
            name="through-the-last-layer",
            text="Induction goes through heads of the last layer, not past it.",
            where=WHERE,
            ours=(float(shares[:, -1].sum()),),
            expected=at_least(0.9),
            why="share of the right token's logit above the mean",
        ),
        Claim(
            name="one-head-first",
            text="One head carries it while it forms; others join when it has arrived.",
            where=WHERE,
            ours=(float(shares[first, begins + 1 : arrives].max() - shares[first, -1]),),
            expected=at_least(0.1),
            why="largest share of this head while it forms, less its share at the end",
            note=f"the head is number {first}",
        ),
        Claim(
            name="nothing-in-common",
            text="Before induction begins a model has nothing in common with the last.",
            where=WHERE,
            ours=(float(np.abs(table["similarity"].values[:begins, -1]).max()),),
            expected=at_most(0.1),
            why="largest similarity, layer by layer",
        ),
    ]


def phases_seen(measured: Measured) -> dict[str, Seen]:
    """What each matrix shows of the phases that the accuracy has."""
    table = measured.table
    return {name: seen(table[name], measured.behaviour, measured.turns) for name in MEASURES}


def summaries(measured: Measured) -> tuple[Summary, ...]:
    """All measures side by side."""
    turns = measured.table["a"].values[list(measured.turns)].tolist()
    return (summary(phases_seen(measured), MEASURES, turns),)
