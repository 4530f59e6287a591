"""A plan cut by whose arrays it reads. In: a plan, the owner of each array. Out: a plan per share.

What is computed from the arrays of one model alone is the same beside whichever other model, so it
is computed once: that is the model's *own share*. The *crossing share* is all the rest, and reads
what the own shares hand out.

A scale that is read off values of one model divides values of both. The own share then hands out
its inverse, a constant 1 divided by it, and the crossing share multiplies by that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from tnsim.engine.piece import Operation, Piece
from tnsim.engine.plan import Plan, PlanStage, WholePlan
from tnsim.sessions import remembered

UNIT = "1"
"""Name of the constant 1, an array without axes that own shares read."""
NEGLIGIBLE = 1 / 32
"""Part of a stage's work that stays in the crossing share: it would not repay a program."""

Reads: TypeAlias = "frozenset[str]"
"""Whose arrays a value is computed from."""
Value: TypeAlias = "int | str"
"""A value of a stage's piece, or the name of an array that its piece does not have."""
Powers: TypeAlias = "tuple[tuple[int, int], ...]"
"""Scales of a piece and how often each divides an output."""
Scales: TypeAlias = "tuple[tuple[str, int], ...]"
"""Scale groups and powers that make up the logarithm of an output."""


class Share(NamedTuple):
    """Some of what a plan computes.

    Args:
        plan: Computes it.
        numbers: Of which stages of the whole its stages are parts.
    """

    plan: Plan
    numbers: tuple[int, ...]


class Shares(NamedTuple):
    """A plan cut in shares.

    Args:
        own: Of an owner, what is computed from its arrays alone. Who hands out nothing has none.
        crossing: The rest, which reads the outputs of `own` beside arrays of the whole.
    """

    own: dict[str, Share]
    crossing: Share


def uncut(plan: Plan) -> Shares:
    """The plan as it is, all of it crossing."""
    return Shares({}, Share(plan, tuple(range(len(plan.stages)))))


def shares(plan: Plan, owners: Mapping[str, str]) -> Shares:
    """Cut a plan.

    Args:
        plan: What is cut.
        owners: Of arrays in `plan.shapes`. What has none, such as moments of the input, is read by
            whoever needs it.

    Returns:
        Shares that compute together what the plan does. The logarithms of their scales are those of
        the stages of the whole that `numbers` names.
    """
    labels = plan.metric, plan.exact, plan.dtype, plan.diagrams
    scales = tuple(plan.scales.items())
    return _shares(plan.whole, labels, scales, tuple(map(owners.get, plan.shapes)))


@remembered
def _shares(
    plan: WholePlan,
    labels: tuple[str, bool, str, int],
    scales: tuple[tuple[str, Scales], ...],
    owners: tuple[str | None, ...],
) -> Shares:
    stages = _analysed(plan, owners)
    shapes = dict(zip(plan.names, plan.shapes, strict=True)) | {UNIT: ()}
    across = _cut(stages, None, plan.outputs)
    handed: dict[str, dict[str, None]] = {}
    for portion in across:
        for name, owner in portion.taken.items():
            if name not in shapes:
                handed.setdefault(owner, {})[name] = None
    own = {}
    for owner, names in sorted(handed.items()):
        own[owner] = _share(_cut(stages, owner, names), labels, dict.fromkeys(names, ()), shapes)
    for share in own.values():
        shapes |= share.plan.output_shapes
    return Shares(own, _share(across, labels, dict(scales), shapes))


class _Stage(NamedTuple):
    """A stage of the whole, and whose arrays its values and its outputs depend on."""

    number: int
    stage: PlanStage
    piece: Piece
    values: tuple[Reads, ...]
    outputs: tuple[Reads, ...]

    @property
    def powers(self) -> tuple[Powers, ...]:
        return self.piece.powers or ((),) * len(self.outputs)

    def scale(self, slot: int) -> Reads:
        """Whose arrays a scale depends on."""
        which, _ = self.piece.scales[slot]
        return self.outputs[which]

    def name(self, value: Value) -> str:
        """By which shares know a value."""
        if isinstance(value, str):
            return value
        is_input = value < len(self.piece.shapes)
        return self.stage.inputs[value] if is_input else f"{self.number}:{value}"

    def shape(self, value: Value) -> tuple[int, ...]:
        return () if isinstance(value, str) else self.piece.value_shapes[value]

    def inverse(self, slot: int) -> str:
        """Name of 1 over a scale."""
        return f"{self.number}:1/{self.stage.groups[slot]}"


def _analysed(plan: WholePlan, owners: tuple[str | None, ...]) -> list[_Stage]:
    """All stages, with whose arrays everything depends on."""
    everyone = frozenset(owner for owner in owners if owner)
    reads: dict[str, Reads] = {}
    for name, owner in zip(plan.names, owners, strict=True):
        reads[name] = frozenset({owner} if owner else ())
    stages = []
    for number, stage in enumerate(plan.stages):
        piece = plan.pieces[stage.piece]
        values = [reads[name] for name in stage.inputs]
        for op in piece.operations:
            values.append(_union(values[arg] for arg in op.args))
        if not stage.groups:  # those with scales define what later steps go on with
            _leave_negligible(piece, values, everyone)
        given = tuple(values[value] for value in piece.outputs)
        found = _Stage(number, stage, piece, tuple(values), given)
        scaled = []
        for own, powers in zip(given, found.powers, strict=True):
            scaled.append(own | _union(found.scale(slot) for slot, _ in powers))
        stages.append(found._replace(outputs=tuple(scaled)))
        reads.update(zip(stage.outputs, scaled, strict=True))
    return stages


def _union(several: Iterable[Reads]) -> Reads:
    return frozenset().union(*several)


def _leave_negligible(piece: Piece, values: list[Reads], everyone: Reads) -> None:
    """Leave to the crossing share what is hardly any work of a stage."""
    first = len(piece.shapes)
    for owner in everyone:
        alone = [n for n in range(first, len(values)) if values[n] == {owner}]
        work = sum(piece.costs[n - first] for n in alone)
        if work < NEGLIGIBLE * piece.multiplications:
            for n in alone:
                values[n] = everyone


class _Portion(NamedTuple):
    """What a share computes of a stage; `taken` is what it reads of others, and whose that is."""

    number: int
    piece: Piece
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    groups: tuple[str, ...]
    taken: dict[str, str]


class _Output(NamedTuple):
    """What a portion gives: a value, divided by scales of the stage."""

    name: str
    value: Value
    powers: Powers = ()


def _cut(stages: Sequence[_Stage], owner: str | None, outputs: Iterable[str]) -> list[_Portion]:
    """The portions of a share that lead to some outputs.

    Args:
        stages: Of the whole.
        owner: Whose share it is; None for the crossing one.
        outputs: Their names.
    """
    wanted = set(outputs)
    portions = []
    for stage in reversed(stages):  # portions say what they read of earlier ones
        portion = _portion(stage, owner, wanted)
        if portion is not None:
            wanted.update(portion.inputs)
            portions.append(portion)
    return portions[::-1]


def _portion(stage: _Stage, owner: str | None, wanted: set[str]) -> _Portion | None:
    """What a share computes of a stage, None where that is nothing."""
    slots = [n for n in range(len(stage.piece.scales)) if _belongs(stage.scale(n), owner)]
    given = _outputs(stage, owner, slots, wanted)
    if not given:
        return None
    draft = _Draft(stage)
    draft.compute((one.value for one in given), owner)
    values, powers = [], []
    taken: dict[str, str] = {}
    for one in given:
        inverses = []
        for slot, power in one.powers:
            if slot not in slots:
                inverses += [stage.inverse(slot)] * power
                (taken[stage.inverse(slot)],) = stage.scale(slot)
        values.append(draft.multiplied(one.value, inverses))
        powers.append(tuple((slots.index(s), power) for s, power in one.powers if s in slots))
    places = {one.name: place for place, one in enumerate(given)}
    scales = []
    for slot in slots:
        which, power = stage.piece.scales[slot]
        scales.append((places[stage.stage.outputs[which]], power))
    piece, inputs = draft.piece(values, tuple(scales), tuple(powers))
    for value in inputs:
        if owner is None and isinstance(value, int) and len(stage.values[value]) == 1:
            (taken[stage.name(value)],) = stage.values[value]
    return _Portion(
        stage.number,
        piece,
        inputs=tuple(map(stage.name, inputs)),
        outputs=tuple(one.name for one in given),
        groups=tuple(stage.stage.groups[slot] for slot in slots),
        taken=taken,
    )


def _belongs(reads: Reads, owner: str | None) -> bool:
    """Whether a share computes what depends on these; what depends on nobody, both may."""
    return reads <= {owner} if owner else len(reads) != 1


def _outputs(
    stage: _Stage, owner: str | None, slots: Sequence[int], wanted: set[str]
) -> list[_Output]:
    """What a share gives of a stage: what is wanted, and what its scales are read off."""
    of_scales = {stage.piece.scales[slot][0] for slot in slots}
    given = []
    for place, name in enumerate(stage.stage.outputs):
        if _belongs(stage.outputs[place], owner) and (name in wanted or place in of_scales):
            given.append(_Output(name, stage.piece.outputs[place], stage.powers[place]))
    if owner is None:
        return given
    for value in range(len(stage.piece.shapes), len(stage.values)):
        if stage.name(value) in wanted:
            given.append(_Output(stage.name(value), value))
    for slot in slots:
        if stage.inverse(slot) in wanted:
            given.append(_Output(stage.inverse(slot), UNIT, ((slot, 1),)))
    return given


class _Draft:
    """A piece in the making.

    Args:
        stage: Of the whole, whose values it is made of.
    """

    def __init__(self, stage: _Stage) -> None:
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
        """A value times numbers."""
        axes = tuple(range(len(self.stage.shape(value))))
        for factor in factors:
            args: Any = (value, factor)
            value = f"{value} * {factor}"
            self.operations[value] = Operation("contract", args, (axes, ()), axes)
        return value

    def piece(
        self, outputs: Sequence[Value], scales: Powers, powers: tuple[Powers, ...]
    ) -> tuple[Piece, tuple[Value, ...]]:
        """The piece that gives some values, and the values that it is given."""
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


def _share(
    portions: Sequence[_Portion],
    labels: tuple[str, bool, str, int],
    scales: Mapping[str, Scales],
    shapes: Mapping[str, tuple[int, ...]],
) -> Share:
    """A share of its portions.

    Args:
        portions: In order.
        labels: Metric, guarantee, precision and number of diagrams of the whole.
        scales: Of every output.
        shapes: Of all arrays that may be read.
    """
    pieces: dict[Piece, int] = {}
    stages = []
    for one in portions:
        number = pieces.setdefault(one.piece, len(pieces))
        stages.append(PlanStage(number, one.inputs, one.outputs, one.groups))
    read = {name for one in portions for name in one.inputs}
    leaves = {name: shape for name, shape in shapes.items() if name in read}
    plan = Plan(*labels, tuple(pieces), tuple(stages), leaves, tuple(scales), dict(scales))
    return Share(plan, tuple(one.number for one in portions))
