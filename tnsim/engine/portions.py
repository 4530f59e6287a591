"""What a share computes of one stage. In: a stage, a share. Out: a piece, what it reads and gives.

Every operation of a stage belongs to one share (see `shares`): to that of the one model whose
arrays its value is computed from, or to the crossing one. The *portion* of a share is made of those
operations that lead to what is wanted of the stage. Where they read a value of another share, that
value becomes an input of the portion.

A stage also divides outputs by scales, and each scale is read off one of them:

    x = f(a)       s = its largest entry       gives x / s
    y = g(a, b)                                gives y / s^2

Here x and its scale belong to the own share of a, but y to the crossing one. So the own share gives
1 / s as well, a constant 1 divided by s, and the crossing share multiplies y by it, twice. The
logarithm of s is kept once, by the share that reads it off.

A portion that is all of a stage runs the stage's own piece, whose program other plans have too. One
that is not needs a program of its own. So where own work would not repay that, it is left to the
crossing share, and done for every pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tnsim.engine.ownership import UNIT, AnalysedStage, Powers, Reads, Value
from tnsim.engine.piece import Operation, Piece


class Portion(NamedTuple):
    """What a share computes of a stage.

    Args:
        number: Of the stage in the whole plan.
        piece: The operations.
        inputs: Names of what they read.
        outputs: Names of what is given.
        groups: The scale groups whose scales the portion reads off.
        taken: Of the inputs that are computed from one owner's arrays, whose they are.
    """

    number: int
    piece: Piece
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    groups: tuple[str, ...]
    taken: dict[str, str]


def portion(stage: AnalysedStage, owner: str | None, wanted: set[str]) -> Portion | None:
    """What a share computes of a stage.

    Args:
        stage: Of the whole plan.
        owner: Whose share it is; None for the crossing one.
        wanted: Names of values that are read later on.

    Returns:
        None where nothing of the stage is wanted of this share.

    Example:
        The stage of `analysed`: the own share of a gives the square, value 2 of stage 0.

        >>> from tnsim.engine.ownership import analysed
        >>> from tnsim.engine.plan_stages import PlanStage
        >>> square = Operation("contract", (0, 0), ((0,), (0,)), (0,))
        >>> product = Operation("contract", (2, 1), ((0,), (0,)), ())
        >>> piece = Piece(((3,), (3,)), (square, product), outputs=(3,))
        >>> whose = [frozenset({"A"}), frozenset({"B"})]
        >>> ab = PlanStage(0, ("a", "b"), ("AB",))
        >>> stage = analysed(0, ab, piece, whose, pairs=10**9)
        >>> crossing = portion(stage, None, {"AB"})
        >>> crossing.inputs, crossing.taken
        (('0:2', 'b'), {'0:2': 'A', 'b': 'B'})
        >>> own = portion(stage, "A", {"0:2"})
        >>> own.inputs, own.outputs
        (('a',), ('0:2',))
    """
    if all(_belongs(reads, owner) for reads in stage.computed):
        return _whole(stage, wanted)
    scales = [n for n in range(len(stage.piece.scales)) if _belongs(stage.scale(n), owner)]
    given = _outputs(stage, owner, scales, wanted)
    if not given:
        return None
    draft = _Draft(stage)
    draft.compute((one.value for one in given), owner)
    values, powers = [], []
    for one in given:
        by_others: list[str] = []
        by_own: list[tuple[int, int]] = []
        for slot, power in one.powers:
            if slot in scales:
                by_own.append((scales.index(slot), power))
            else:
                by_others += [stage.inverse(slot)] * power
        values.append(draft.multiplied(one.value, by_others))
        powers.append(tuple(by_own))
    piece, inputs = draft.piece(values, _read_off(stage, scales, given), tuple(powers))
    return Portion(
        stage.number,
        piece,
        inputs=tuple(map(stage.name, inputs)),
        outputs=tuple(one.name for one in given),
        groups=tuple(stage.stage.groups[slot] for slot in scales),
        taken=_taken(stage, inputs),
    )


def _whole(analysed: AnalysedStage, wanted: set[str]) -> Portion | None:
    """All of a stage, by its own piece; None where nothing of it is wanted."""
    number, stage, piece, *_ = analysed
    if wanted.isdisjoint(stage.outputs) and not stage.groups:
        return None
    taken = _taken(analysed, range(len(piece.shapes)))
    return Portion(number, piece, stage.inputs, stage.outputs, stage.groups, taken)


def _taken(stage: AnalysedStage, inputs: Iterable[Value]) -> dict[str, str]:
    """Of the inputs that are computed from one owner's arrays, whose they are."""
    taken = {}
    for value in inputs:
        if len(stage.reads(value)) == 1:
            (taken[stage.name(value)],) = stage.reads(value)
    return taken


def _belongs(reads: Reads, owner: str | None) -> bool:
    """Whether a share computes what is computed from these arrays.

    What is computed from nobody's, such as a moment of the input, any share computes for itself.
    """
    return reads <= {owner} if owner else len(reads) != 1


class _Output(NamedTuple):
    """What a portion gives: a value, divided by scales of the whole stage."""

    name: str
    value: Value
    powers: Powers = ()


def _outputs(
    stage: AnalysedStage, owner: str | None, scales: Sequence[int], wanted: set[str]
) -> list[_Output]:
    """What a share gives of a stage: what is wanted, and what its scales are read off.

    An own share also gives intermediate values and inverses of scales, which the crossing one asks
    for.
    """
    of_scales = {stage.piece.scales[slot][0] for slot in scales}
    given = []
    for place, name in enumerate(stage.stage.outputs):
        is_read = name in wanted or place in of_scales
        if is_read and _belongs(stage.outputs[place], owner):
            given.append(_Output(name, stage.piece.outputs[place], stage.powers[place]))
    if owner is None:
        return given
    for value in range(len(stage.piece.shapes), len(stage.values)):
        if stage.name(value) in wanted:
            given.append(_Output(stage.name(value), value))
    for slot in scales:
        if stage.inverse(slot) in wanted:
            given.append(_Output(stage.inverse(slot), UNIT, ((slot, 1),)))
    return given


def _read_off(
    stage: AnalysedStage, scales: Sequence[int], given: Sequence[_Output]
) -> tuple[tuple[int, int], ...]:
    """The scales of a portion: which of its outputs each is read off, and its power."""
    places = {one.name: place for place, one in enumerate(given)}
    found = []
    for slot in scales:
        which, power = stage.piece.scales[slot]
        found.append((places[stage.stage.outputs[which]], power))
    return tuple(found)


class _Draft:
    """A piece in the making.

    Args:
        stage: Of the whole plan, of whose values it is made.
    """

    def __init__(self, stage: AnalysedStage) -> None:
        self.stage = stage
        self.operations: dict[Value, Operation] = {}

    def compute(self, values: Iterable[Value], owner: str | None) -> None:
        """The operations of a share that lead to some values."""
        first = len(self.stage.piece.shapes)
        waiting = list(values)
        needed: set[int] = set()
        while waiting:
            value = waiting.pop()
            if isinstance(value, str) or value < first or value in needed:
                continue
            if _belongs(self.stage.values[value], owner):
                needed.add(value)
                waiting += self.stage.piece.operations[value - first].args
        for value in sorted(needed):
            self.operations[value] = self.stage.piece.operations[value - first]

    def multiplied(self, value: Value, factors: Iterable[str]) -> Value:
        """A value times numbers that are known by name."""
        axes = tuple(range(len(self.stage.shape(value))))
        for factor in factors:
            args: Any = (value, factor)
            value = f"{value} * {factor}"
            self.operations[value] = Operation("contract", args, (axes, ()), axes)
        return value

    def piece(
        self, outputs: Sequence[Value], scales: Powers, powers: tuple[Powers, ...]
    ) -> tuple[Piece, tuple[Value, ...]]:
        """The piece that gives some values, and the values that it reads.

        Args:
            outputs: The values.
            scales: As those of a `Piece`.
            powers: As those of a `Piece`.
        """
        read = [arg for op in self.operations.values() for arg in op.args]
        found: dict[Value, None] = dict.fromkeys((*read, *outputs))
        inputs = tuple(value for value in found if value not in self.operations)
        numbers = {value: n for n, value in enumerate((*inputs, *self.operations))}
        operations = []
        for op in self.operations.values():
            operations.append(op._replace(args=tuple(numbers[arg] for arg in op.args)))
        shapes = tuple(map(self.stage.shape, inputs))
        given = tuple(numbers[value] for value in outputs)
        return Piece(shapes, tuple(operations), given, scales, powers), inputs
