"""Ways to join the input legs of two unrolled trees. In: two models, a metric. Out: joined legs.

For the metrics that work layer by layer. The two outputs meet; what the metric says of the layers
that give them decides which of the bonds below meet, and so on down to the input legs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from tnsim.folding.alignment import align
from tnsim.metrics.input_moments import input_kind
from tnsim.metrics.pairings import Joining, Leg, gaussian_mean
from tnsim.metrics.protocol import LayerwiseMetric
from tnsim.models.model import Model
from tnsim.names import SIDES, Side
from tnsim.tensor_networks.network import Copy
from tnsim.tensors.kinds import kinds


class Bond(NamedTuple):
    """The output bond of one copy of a layer, or below all layers an input leg."""

    side: Side
    copy: int


class JoinedLegs(NamedTuple):
    """A way to join bonds, down to the input legs.

    Args:
        weight: How often it counts.
        pairs: Input legs that are joined.
        capped: Input legs that are handed to the mean.
        symmetrised: Copies of layers whose legs are to be symmetrised.
    """

    weight: float = 1.0
    pairs: tuple[tuple[Bond, Bond], ...] = ()
    capped: tuple[Bond, ...] = ()
    symmetrised: tuple[Copy, ...] = ()

    def times(self, other: JoinedLegs) -> JoinedLegs:
        """Both ways at once, for different bonds."""
        return JoinedLegs(
            self.weight * other.weight,
            self.pairs + other.pairs,
            self.capped + other.capped,
            self.symmetrised + other.symmetrised,
        )


class LegJoinings:
    """All ways to join bonds, from the output down, along the same steps as the folded problem.

    A task is to join two bonds with each other, or to take the mean of one. What a metric says of
    the layers below these bonds turns it into tasks one step lower, in one or several ways; at the
    input a task is a pair of legs or a capped leg.
    """

    def __init__(self, models: dict[Side, Model], metric: LayerwiseMetric):
        self.models = models
        self.metric = metric
        self.steps = align(models["A"].layers, models["B"].layers, metric)
        layers = itertools.chain.from_iterable(map(kinds, models.values()))
        constant = any(kind.biases or kind.skips for kind in layers)
        inputs_centred = input_kind(metric, constant).centred
        # What a model gives after a step has mean zero as long as no layer so far was nonlinear.
        self.centred: list[dict[Side, bool]] = [dict.fromkeys(models, inputs_centred)]
        for step in range(len(self.steps)):
            above: dict[Side, bool] = {}
            for side, centred in self.centred[-1].items():
                above[side] = centred and self.order(side, step) == 1
            self.centred.append(above)

    def all(self) -> Iterator[JoinedLegs]:
        """All ways to join the two outputs."""
        return self.ways((Bond("A", 0), Bond("B", 0)), len(self.steps))

    def layer(self, side: Side, step: int) -> int | None:
        """Number of the layer that a step applies to one side; None where the side waits."""
        return self.steps[step].bra if side == "A" else self.steps[step].ket

    def order(self, side: Side, step: int) -> int:
        """Number of legs that one side has at a step."""
        number = self.layer(side, step)
        return 1 if number is None else self.models[side].layers[number].order

    def ways(self, bonds: tuple[Bond, ...], steps: int) -> Iterator[JoinedLegs]:
        """Ways to join two bonds, or to take the mean of one, that are outputs of `steps` steps."""
        if steps == 0:
            yield JoinedLegs(pairs=(bonds,)) if len(bonds) == 2 else JoinedLegs(capped=bonds)
            return
        step = steps - 1
        orders = [self.order(bond.side, step) for bond in bonds]
        centred = all(self.centred[step][bond.side] for bond in bonds)
        if len(bonds) == 2:
            joinings = self.metric.joinings(orders[0], orders[1], centred)
        else:
            joinings = gaussian_mean(orders[0], centred)
        for joining in joinings:
            start, tasks = self.expanded(joining, bonds, step)
            yield from self.all_of(tasks, start, step)

    def expanded(
        self, joining: Joining, bonds: tuple[Bond, ...], step: int
    ) -> tuple[JoinedLegs, list[tuple[Bond, ...]]]:
        """What a joining says of the copies below two bonds, and its tasks one step lower.

        A joining speaks of sides "A" and "B", which here are the first and the second bond: two
        bonds of one model may meet.
        """
        at = dict(zip(SIDES, bonds, strict=False))

        def child(leg: Leg) -> Bond:
            side, copy = at[leg.side]
            return Bond(side, copy * self.order(side, step) + leg.index)

        copies = []
        for slot in joining.symmetrised:
            side, copy = at[slot]
            number = self.layer(side, step)
            if number is not None:
                copies.append((side, number, copy))
        tasks: list[tuple[Bond, ...]] = [(child(one), child(two)) for one, two in joining.pairs]
        tasks += [(child(leg),) for leg in joining.capped]
        return JoinedLegs(joining.weight, symmetrised=tuple(copies)), tasks

    def all_of(
        self, tasks: list[tuple[Bond, ...]], start: JoinedLegs, steps: int
    ) -> Iterator[JoinedLegs]:
        """Ways to do all tasks: every way to do the first, with every way to do the rest."""
        if not tasks:
            yield start
            return
        first, *rest = tasks
        for way in self.ways(first, steps):
            yield from self.all_of(rest, start.times(way), steps)
