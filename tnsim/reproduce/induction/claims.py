"""When induction is learned, through which heads, and what sees it. In: measured. Out: claims."""

from __future__ import annotations

import numpy as np

from tnsim.reproduce.claims import Claim, at_least, at_most
from tnsim.reproduce.induction.measure import MEASURES, Measured
from tnsim.reproduce.induction.setting import Setting
from tnsim.reproduce.phases import published_score, seen
from tnsim.reproduce.run import Run

WHERE = "beyond the paper"


def claims(run: Run[Setting], measured: Measured) -> tuple[Claim, ...]:
    """Rows about the curves, the heads, and the phases of each matrix.

    Args:
        run: that was measured.
        measured: its matrices and curves.

    Returns:
        The claims.
    """
    return (*_of_heads(measured), *_of_phases(measured))


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


def _of_phases(measured: Measured) -> list[Claim]:
    table = measured.table
    turns = ", ".join(map(str, table["a"].values[list(measured.turns)]))
    rows = []
    for name, title in MEASURES.items():
        one = seen(table[name], measured.behaviour, measured.turns)
        starts = ", ".join(map(str, one.starts))
        rows.append(
            Claim(
                name=f"phases-{name.replace('_', '-')}",
                text=f"The best three phases of {title} start where the accuracy turns.",
                where=WHERE,
                ours=(one.late,),
                expected=at_most(1.0),
                why="checkpoints between the two, on average",
                note=f"the accuracy turns at steps {turns}, phases start at {starts}; Spearman's "
                f"coefficient with likeness in behaviour {one.rank:.3f}",
            )
        )
        rows.append(
            Claim(
                name=f"blocks-{name.replace('_', '-')}",
                text=f"Block score of {title} at its best three phases.",
                where=WHERE,
                ours=(one.score,),
                control=(one.even,),
                excess=at_least(0.0),
                why="the control drifts as much, evenly, so it has no phases",
                note=published_score(one),
            )
        )
    return rows
