"""One layer over another, multiplied out. In: a step, joinings of its legs. Out: terms.

What is summed up here and why stands in `layerwise`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tnsim.engine.problem import Merge, Operand, Term
from tnsim.folding.alignment import Step
from tnsim.metrics.input_moments import InputKind
from tnsim.metrics.pairings import Joining, Leg
from tnsim.metrics.protocol import LayerwiseMetric
from tnsim.names import (
    COVARIANCE,
    IDENTITY,
    MEAN,
    PAIRS,
    SIDES,
    TRACE,
    Leaf,
    Pair,
    Side,
    input_index,
)
from tnsim.tensors.kinds import Kinds
from tnsim.tensors.lifted import Local, Part, local

_WAIT = Local(1, (Part((), out=input_index(0)),))
"""The identity: its output is its input."""


class States(NamedTuple):
    """The states below a layer, by the names under which their moments are defined.

    Args:
        moments: S of every pair of models; None while it is the input's.
        means: m of every model; None while it is the input's.
        centred: Whether a model's mean vanishes.
    """

    moments: dict[Pair, str | None]
    means: dict[Side, str | None]
    centred: dict[Side, bool]


@dataclass(frozen=True, eq=False)
class Comparison:
    """What all steps have in common, and the layers that each applies.

    Args:
        models, metric, inputs, lifted, pairs: As of `layerwise.fold_layers`.
        steps: The layers of both models, matched.
    """

    models: dict[Side, Kinds]
    metric: LayerwiseMetric
    inputs: InputKind
    lifted: bool
    pairs: tuple[Pair, ...]
    steps: tuple[Step, ...]

    def layer(self, model: Side, number: int) -> int | None:
        """Number of the layer that a step applies to a model; None where it waits."""
        step = self.steps[number]
        return step.bra if model == "A" else step.ket

    def order(self, model: Side, number: int) -> int:
        """Number of legs that a model has at a step."""
        return self.local(model, number).order

    def local(self, model: Side, number: int) -> Local:
        """The tensor that a step applies to a model."""
        layer = self.layer(model, number)
        return _WAIT if layer is None else local(self.models[model][layer])

    def waits(self, pair: Pair, number: int) -> bool:
        """Whether a step leaves both models as they are."""
        return self.layer(pair.bra, number) is None and self.layer(pair.ket, number) is None

    def mixes_after(self, number: int) -> bool:
        """Whether a nonlinear layer comes after a step: only these mix moments and means."""
        for later in range(number + 1, len(self.steps)):
            if any(self.order(model, later) > 1 for model in self.models):
                return True
        return False

    def carried(self) -> tuple[Pair, ...]:
        """The pairs whose moments every step needs.

        A metric that pairs legs within a model needs the moments of each model alone, too.
        """
        if not self.metric.pairs_within_model:
            return self.pairs
        present = set(itertools.chain.from_iterable(self.pairs))
        carried = []
        for pair in PAIRS:
            if set(pair) <= present and (pair.bra == pair.ket or pair in self.pairs):
                carried.append(pair)
        return tuple(carried)


class _Placed(NamedTuple):
    """A part of a layer's tensor in a term, its legs in one of their orders.

    Args:
        side: Where it stands in a joining, "A" for the bra and "B" for the ket.
        model: Whose layer it is.
        layer: Its number.
        part: A summand of its tensor.
        order: The leg of the joining that each input of the part is.
        weight: What the part counts.
    """

    side: Side
    model: Side
    layer: int | None
    part: Part
    order: tuple[int, ...]
    weight: float

    def name_of(self, index: str) -> str:
        """Name in the term of an index of the part."""
        for n, leg in enumerate(self.order):
            if index == input_index(n):
                return _end(Leg(self.side, leg))
        return self.side + index

    def operands(self) -> list[Operand]:
        """The arrays of the part."""
        if self.layer is None:  # an identity, which has no arrays
            return []
        operands = []
        for role, indices in self.part.tensors:
            name = str(Leaf(self.model, self.layer, role))
            operands.append(Operand(name, tuple(map(self.name_of, indices))))
        return operands


@dataclass(frozen=True, eq=False)
class LayerTerms:
    """The terms of moments and means above one step.

    Args:
        comparison: What all steps have in common.
        number: Which step it is.
        below: The states that its layers read.
    """

    comparison: Comparison
    number: int
    below: States

    def moment(self, pair: Pair, outputs: tuple[str, str]) -> Iterator[Term]:
        """The moment of a pair after the step; its trace where both outputs are one index."""
        orders = [self.comparison.order(model, self.number) for model in pair]
        centred = self.below.centred[pair.bra] and self.below.centred[pair.ket]
        joinings = self.comparison.metric.joinings(orders[0], orders[1], centred)
        return self.products(pair, joinings, outputs)

    def products(
        self, models: Sequence[Side], joinings: Iterable[Joining], outputs: tuple[str, ...]
    ) -> Iterator[Term]:
        """Joinings multiplied out: over the parts of every layer and the orders of its legs.

        Args:
            models: Whose layers meet, the bra's first; one alone for a mean.
            joinings: Of the legs of these layers.
            outputs: Names of the layers' output indices in every term.
        """
        for joining in joinings:
            choices = []
            for side, model in zip(SIDES, models, strict=False):
                choices.append(self.placed(side, model, side in joining.symmetrised))
            for placed in itertools.product(*choices):
                yield self.term(joining, placed, outputs)

    def placed(self, side: Side, model: Side, symmetrised: bool) -> list[_Placed]:
        """The parts of a model's layer; symmetrised, each with its legs in every order."""
        # P_n T is the mean over the n! orders of T's legs. Every order is a term of its own: a
        # product of the layer's own arrays, whose parts planning may share with other terms.
        layer = self.comparison.layer(model, self.number)
        tensor = self.comparison.local(model, self.number)
        orders = [tuple(range(tensor.order))]
        if symmetrised:
            orders = list(itertools.permutations(range(tensor.order)))
        placed = []
        for part in tensor.parts:
            for order in orders:
                weight = part.weight / len(orders)
                placed.append(_Placed(side, model, layer, part, order, weight))
        return placed

    def term(self, joining: Joining, placed: Sequence[_Placed], outputs: tuple[str, ...]) -> Term:
        """One product: the arrays of the parts, and what joins their legs."""
        # weight * X-part * Y-part * (S for each joined pair) * (m for each capped leg), where an
        # index is named by the leg that it is.
        weight = joining.weight
        operands: list[Operand] = []
        ends = []  # the output index of every part
        for one in placed:
            weight *= one.weight
            operands += one.operands()
            ends.append(one.name_of(one.part.out))
        models: dict[Side, Side] = {one.side: one.model for one in placed}
        merged = Merge()
        for one, two in joining.pairs:
            pair = Pair(models[one.side], models[two.side])
            operands += self.joined(pair, (_end(one), _end(two)), ends, merged)
        for leg in joining.capped:
            mean = self.below.means[models[leg.side]]
            operands.append(Operand(mean or MEAN, (_end(leg),)))
        for end, output in zip(ends, outputs, strict=True):
            merged.unite(end, output)
        if self.comparison.lifted and outputs == ("k", "k"):
            operands.append(Operand(TRACE, ("k",)))
        return Term(weight, merged.renamed(operands))

    def joined(
        self, pair: Pair, ends: tuple[str, str], outputs: Sequence[str], merged: Merge
    ) -> tuple[Operand, ...]:
        """The second moment between two legs.

        Where the input's is the identity or diagonal, the two legs become one index instead. But
        two legs that are both outputs, as the streams of two residuals are, stay apart: they are
        the rows and columns of what is defined.

        Args:
            pair: The models whose states the legs read.
            ends: Indices of the legs.
            outputs: Indices of the outputs.
            merged: Takes down which indices have become one.
        """
        if pair == Pair("B", "A"):  # S_AB is kept, and S_BA is its transpose
            pair, ends = Pair("A", "B"), (ends[1], ends[0])
        moment = self.below.moments[pair]
        if moment is not None:
            return (Operand(moment, ends),)
        kind = self.comparison.inputs.moment
        if kind == "full":
            return (Operand(COVARIANCE, ends),)
        diagonal: tuple[Operand, ...] = ()
        if kind == "diagonal":
            diagonal = (Operand(COVARIANCE, (ends[0],)),)
        if set(ends) <= set(outputs):
            return (Operand(IDENTITY, ends), *diagonal)
        merged.unite(*ends)
        return diagonal


def _end(leg: Leg) -> str:
    """Index of a leg in a term."""
    return f"{leg.side}{leg.index}"
