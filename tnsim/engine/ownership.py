"""Whose arrays a stage computes from. In: a stage, whose its inputs are. Out: whose all else is.

A value that is computed from the arrays of one model alone is *own*, one that needs those of two
crosses. Cutting a stage between the two gives each part a piece, and so a program, of its own.
Where the own part is less work than that, the whole stage is left to cross (see `portions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from tnsim.engine.piece import Piece
from tnsim.engine.plan_stages import PlanStage

UNIT = "1"
"""Name of the constant 1, an array without axes that own shares read."""
COMPILING = 10**8
"""Multiplications that take as long as compiling an operation: 5 to 10 ms."""

Reads: TypeAlias = "frozenset[str]"
"""Whose arrays a value is computed from."""
Value: TypeAlias = "int | str"
"""A value of a stage's piece by its number, or by name what only a portion has."""
Powers: TypeAlias = "tuple[tuple[int, int], ...]"
"""Scales of a piece and how often each divides an output."""


class AnalysedStage(NamedTuple):
    """A stage of a plan, and whose arrays everything in it is computed from.

    Args:
        number: Of the stage in the plan.
        stage: Which arrays it reads and gives.
        piece: What it computes.
        values: For every value of the piece, inputs first.
        outputs: For every output, divided by its scales.
    """

    number: int
    stage: PlanStage
    piece: Piece
    values: tuple[Reads, ...]
    outputs: tuple[Reads, ...]

    @property
    def powers(self) -> tuple[Powers, ...]:
        """By which scales each output is divided."""
        return self.piece.powers or ((),) * len(self.outputs)

    @property
    def computed(self) -> tuple[Reads, ...]:
        """Whose arrays all that the stage computes and gives is computed from."""
        return (*self.values[len(self.piece.shapes) :], *self.outputs)

    def scale(self, slot: int) -> Reads:
        """Whose arrays a scale is computed from: those of the output that it is read off."""
        which, _ = self.piece.scales[slot]
        return self.outputs[which]

    def inverse(self, slot: int) -> str:
        """Name of 1 over a scale."""
        return f"{self.number}:1/{self.stage.groups[slot]}"

    def name(self, value: Value) -> str:
        """By which shares know a value: inputs by their own, others by stage and number."""
        if isinstance(value, str):
            return value
        is_input = value < len(self.piece.shapes)
        return self.stage.inputs[value] if is_input else f"{self.number}:{value}"

    def reads(self, value: Value) -> Reads:
        """Whose arrays a value is computed from, that of a scale's inverse too."""
        if not isinstance(value, str):
            return self.values[value]
        inverses = {self.inverse(slot): self.scale(slot) for slot in range(len(self.piece.scales))}
        return inverses.get(value, frozenset())

    def shape(self, value: Value) -> tuple[int, ...]:
        """What has a name only is a number."""
        return () if isinstance(value, str) else self.piece.value_shapes[value]


def analysed(
    number: int, stage: PlanStage, piece: Piece, inputs: Sequence[Reads], pairs: int
) -> AnalysedStage:
    """Whose arrays everything in a stage is computed from.

    Args:
        number: Of the stage in its plan.
        stage: Which arrays it reads and gives.
        piece: What it computes.
        inputs: For every input, whose arrays it is computed from.
        pairs: How often the crossing share runs.

    Example:
        `sum_i a_i^2 b_i`, of which the square reads a alone.

        >>> from tnsim.engine.piece import Operation
        >>> square = Operation("contract", (0, 0), ((0,), (0,)), (0,))
        >>> product = Operation("contract", (2, 1), ((0,), (0,)), ())
        >>> piece = Piece(((3,), (3,)), (square, product), outputs=(3,))
        >>> whose = [frozenset({"A"}), frozenset({"B"})]
        >>> ab = PlanStage(0, ("a", "b"), ("AB",))
        >>> stage = analysed(0, ab, piece, whose, pairs=10**9)
        >>> [sorted(reads) for reads in stage.values]
        [['A'], ['B'], ['A'], ['A', 'B']]
    """
    values = list(inputs)
    for op in piece.operations:
        values.append(union(values[arg] for arg in op.args))
    if not stage.groups:  # those with scales define what later stages go on with
        _leave_what_does_not_repay(piece, values, pairs)
    undivided = tuple(values[value] for value in piece.outputs)
    found = AnalysedStage(number, stage, piece, tuple(values), undivided)
    divided = []
    for own, powers in zip(undivided, found.powers, strict=True):
        divided.append(own | union(found.scale(slot) for slot, _ in powers))
    return found._replace(outputs=tuple(divided))


def union(several: Iterable[Reads]) -> Reads:
    """Whose arrays any of several values is computed from."""
    return frozenset().union(*several)


def _leave_what_does_not_repay(piece: Piece, values: list[Reads], pairs: int) -> None:
    """Leave to the crossing share what takes less than compiling the piece without it."""
    everyone = union(values)
    first = len(piece.shapes)
    for owner in everyone:
        alone = [n for n in range(first, len(values)) if values[n] == {owner}]
        work = sum(piece.costs[n - first] for n in alone)
        is_cut = len(alone) < len(piece.operations)
        if is_cut and pairs * work < COMPILING * piece.length:
            for n in alone:
                values[n] = everyone
