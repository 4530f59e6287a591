"""Whose arrays a stage computes from. In: a stage, whose its inputs are. Out: whose all else is.

A value that is computed from the arrays of one model alone is *own*, one that needs those of two
crosses. Cutting a stage between the two gives each part a program, and so a compiled program, of
its own. Where the own part is less work than that, the whole stage is left to cross (see
`portions`).

[merged from engine/portions]
What a share computes of one stage. In: a stage, a share. Out: a program, what it reads and gives.

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

A portion that is all of a stage runs the stage's own program, whose compiled program other plans
have too. One that is not needs a compiled program of its own. So where own work would not repay
that, it is left to the crossing share, and done for every pair.

[merged from engine/shares]
A plan cut by whose arrays it reads. In: a plan, the owner of each array. Out: a plan per share.

What a plan of `<a|b>` computes from the arrays of a alone is the same beside whichever b. Among
many models it is therefore computed once for each of them, and the plan is cut in *shares*:

    own share of a     what reads arrays of a and of nobody else; runs once for every a
    own share of b     the same for b
    crossing share     all the rest; runs for every pair, on what the own shares hand out

A share is a plan itself: the stages of the whole, each with some of its operations (`portions`).
It takes three walks over the stages:

    1. forward: whose arrays is each value computed from?
    2. backward from the outputs: the crossing share, and what it takes from own shares
    3. backward from what it takes: the own share of each owner
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from tnsim.engine.ir.program import Operation, Program
from tnsim.engine.ir.stages import PlanStage, WholePlan
from tnsim.engine.plan import Plan
from tnsim.sessions import session_cache

ONE = "1"
"""Name of the constant 1, an array without axes that own shares read."""


COMPILING = 10**8
"""Multiplications that take as long as compiling an operation: 5 to 10 ms."""


Dependencies: TypeAlias = "frozenset[str]"
"""Whose arrays a value is computed from."""


Value: TypeAlias = "int | str"
"""A value of a stage's program by its number, or by name what only a portion has."""


Powers: TypeAlias = "tuple[tuple[int, int], ...]"
"""Scales of a program and how often each divides an output."""


class AnalysedStage(NamedTuple):
    """A stage of a plan, and whose arrays everything in it is computed from.

    Args:
        number: Of the stage in the plan.
        stage: Which arrays it reads and gives.
        program: What it computes.
        values: For every value of the program, inputs first.
        outputs: For every output, divided by its scales.
    """

    number: int
    stage: PlanStage
    program: Program
    values: tuple[Dependencies, ...]
    outputs: tuple[Dependencies, ...]

    @property
    def powers(self) -> tuple[Powers, ...]:
        """By which scales each output is divided."""
        return self.program.powers or ((),) * len(self.outputs)

    @property
    def computed(self) -> tuple[Dependencies, ...]:
        """Whose arrays all that the stage computes and gives is computed from."""
        return (*self.values[len(self.program.shapes) :], *self.outputs)

    def scale(self, slot: int) -> Dependencies:
        """Whose arrays a scale is computed from: those of the output that it is read off."""
        which, _ = self.program.scales[slot]
        return self.outputs[which]

    def inverse(self, slot: int) -> str:
        """Name of 1 over a scale."""
        return f"{self.number}:1/{self.stage.groups[slot]}"

    def name(self, value: Value) -> str:
        """By which shares know a value: inputs by their own, others by stage and number."""
        if isinstance(value, str):
            return value
        is_input = value < len(self.program.shapes)
        return self.stage.inputs[value] if is_input else f"{self.number}:{value}"

    def reads(self, value: Value) -> Dependencies:
        """Whose arrays a value is computed from, that of a scale's inverse too."""
        if not isinstance(value, str):
            return self.values[value]
        inverses = {
            self.inverse(slot): self.scale(slot) for slot in range(len(self.program.scales))
        }
        return inverses.get(value, frozenset())

    def shape(self, value: Value) -> tuple[int, ...]:
        """What has a name only is a number."""
        return () if isinstance(value, str) else self.program.value_shapes[value]


def analysed(
    number: int, stage: PlanStage, program: Program, inputs: Sequence[Dependencies], pairs: int
) -> AnalysedStage:
    """Whose arrays everything in a stage is computed from.

    Args:
        number: Of the stage in its plan.
        stage: Which arrays it reads and gives.
        program: What it computes.
        inputs: For every input, whose arrays it is computed from.
        pairs: How often the crossing share runs.

    Example:
        `sum_i a_i^2 b_i`, of which the square reads a alone.

        >>> from tnsim.engine.ir.program import Operation
        >>> square = Operation("contract", (0, 0), ((0,), (0,)), (0,))
        >>> product = Operation("contract", (2, 1), ((0,), (0,)), ())
        >>> program = Program(((3,), (3,)), (square, product), outputs=(3,))
        >>> whose = [frozenset({"A"}), frozenset({"B"})]
        >>> ab = PlanStage(0, ("a", "b"), ("AB",))
        >>> stage = analysed(0, ab, program, whose, pairs=10**9)
        >>> [sorted(reads) for reads in stage.values]
        [['A'], ['B'], ['A'], ['A', 'B']]
    """
    values = list(inputs)
    for op in program.operations:
        values.append(union(values[arg] for arg in op.args))
    if not stage.groups:  # those with scales define what later stages go on with
        _leave_what_does_not_repay(program, values, pairs)
    undivided = tuple(values[value] for value in program.outputs)
    found = AnalysedStage(number, stage, program, tuple(values), undivided)
    divided = []
    for own, powers in zip(undivided, found.powers, strict=True):
        divided.append(own | union(found.scale(slot) for slot, _ in powers))
    return found._replace(outputs=tuple(divided))


def union(several: Iterable[Dependencies]) -> Dependencies:
    """Whose arrays any of several values is computed from."""
    return frozenset().union(*several)


def _leave_what_does_not_repay(program: Program, values: list[Dependencies], pairs: int) -> None:
    """Leave to the crossing share what takes less than compiling the program without it."""
    everyone = union(values)
    first = len(program.shapes)
    for owner in everyone:
        alone = [n for n in range(first, len(values)) if values[n] == {owner}]
        work = sum(program.costs[n - first] for n in alone)
        is_cut = len(alone) < len(program.operations)
        if is_cut and pairs * work < COMPILING * program.length:
            for n in alone:
                values[n] = everyone


class Portion(NamedTuple):
    """What a share computes of a stage.

    Args:
        number: Of the stage in the whole plan.
        program: The operations.
        inputs: Names of what they read.
        outputs: Names of what is given.
        groups: The scale groups whose scales the portion reads off.
        taken: Of the inputs that are computed from one owner's arrays, whose they are.
    """

    number: int
    program: Program
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

        >>> from tnsim.engine.passes.hoisting import analysed
        >>> from tnsim.engine.ir.stages import PlanStage
        >>> square = Operation("contract", (0, 0), ((0,), (0,)), (0,))
        >>> product = Operation("contract", (2, 1), ((0,), (0,)), ())
        >>> program = Program(((3,), (3,)), (square, product), outputs=(3,))
        >>> whose = [frozenset({"A"}), frozenset({"B"})]
        >>> ab = PlanStage(0, ("a", "b"), ("AB",))
        >>> stage = analysed(0, ab, program, whose, pairs=10**9)
        >>> crossing = portion(stage, None, {"AB"})
        >>> crossing.inputs, crossing.taken
        (('0:2', 'b'), {'0:2': 'A', 'b': 'B'})
        >>> own = portion(stage, "A", {"0:2"})
        >>> own.inputs, own.outputs
        (('a',), ('0:2',))
    """
    if all(_belongs(reads, owner) for reads in stage.computed):
        return _whole(stage, wanted)
    scales = [n for n in range(len(stage.program.scales)) if _belongs(stage.scale(n), owner)]
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
    program, inputs = draft.program(values, _read_off(stage, scales, given), tuple(powers))
    return Portion(
        stage.number,
        program,
        inputs=tuple(map(stage.name, inputs)),
        outputs=tuple(one.name for one in given),
        groups=tuple(stage.stage.groups[slot] for slot in scales),
        taken=_taken(stage, inputs),
    )


def _whole(analysed: AnalysedStage, wanted: set[str]) -> Portion | None:
    """All of a stage, by its own program; None where nothing of it is wanted."""
    number, stage, program, *_ = analysed
    if wanted.isdisjoint(stage.outputs) and not stage.groups:
        return None
    taken = _taken(analysed, range(len(program.shapes)))
    return Portion(number, program, stage.inputs, stage.outputs, stage.groups, taken)


def _taken(stage: AnalysedStage, inputs: Iterable[Value]) -> dict[str, str]:
    """Of the inputs that are computed from one owner's arrays, whose they are."""
    taken = {}
    for value in inputs:
        if len(stage.reads(value)) == 1:
            (taken[stage.name(value)],) = stage.reads(value)
    return taken


def _belongs(reads: Dependencies, owner: str | None) -> bool:
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
    of_scales = {stage.program.scales[slot][0] for slot in scales}
    given = []
    for place, name in enumerate(stage.stage.outputs):
        is_read = name in wanted or place in of_scales
        if is_read and _belongs(stage.outputs[place], owner):
            given.append(_Output(name, stage.program.outputs[place], stage.powers[place]))
    if owner is None:
        return given
    for value in range(len(stage.program.shapes), len(stage.values)):
        if stage.name(value) in wanted:
            given.append(_Output(stage.name(value), value))
    for slot in scales:
        if stage.inverse(slot) in wanted:
            given.append(_Output(stage.inverse(slot), ONE, ((slot, 1),)))
    return given


def _read_off(
    stage: AnalysedStage, scales: Sequence[int], given: Sequence[_Output]
) -> tuple[tuple[int, int], ...]:
    """The scales of a portion: which of its outputs each is read off, and its power."""
    places = {one.name: place for place, one in enumerate(given)}
    found = []
    for slot in scales:
        which, power = stage.program.scales[slot]
        found.append((places[stage.stage.outputs[which]], power))
    return tuple(found)


class _Draft:
    """A program in the making.

    Args:
        stage: Of the whole plan, of whose values it is made.
    """

    def __init__(self, stage: AnalysedStage) -> None:
        self.stage = stage
        self.operations: dict[Value, Operation] = {}

    def compute(self, values: Iterable[Value], owner: str | None) -> None:
        """The operations of a share that lead to some values."""
        first = len(self.stage.program.shapes)
        waiting = list(values)
        needed: set[int] = set()
        while waiting:
            value = waiting.pop()
            if isinstance(value, str) or value < first or value in needed:
                continue
            if _belongs(self.stage.values[value], owner):
                needed.add(value)
                waiting += self.stage.program.operations[value - first].args
        for value in sorted(needed):
            self.operations[value] = self.stage.program.operations[value - first]

    def multiplied(self, value: Value, factors: Iterable[str]) -> Value:
        """A value times numbers that are known by name."""
        axes = tuple(range(len(self.stage.shape(value))))
        for factor in factors:
            args: Any = (value, factor)
            value = f"{value} * {factor}"
            self.operations[value] = Operation("contract", args, (axes, ()), axes)
        return value

    def program(
        self, outputs: Sequence[Value], scales: Powers, powers: tuple[Powers, ...]
    ) -> tuple[Program, tuple[Value, ...]]:
        """The program that gives some values, and the values that it reads.

        Args:
            outputs: The values.
            scales: As those of a `Program`.
            powers: As those of a `Program`.
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
        return Program(shapes, tuple(operations), given, scales, powers), inputs


Labels: TypeAlias = "tuple[str, bool, str, int]"
"""Metric, guarantee, precision and number of diagrams of a plan."""


Scales: TypeAlias = "tuple[tuple[str, int], ...]"
"""Scale groups and powers that make up the logarithm of an output."""


class Share(NamedTuple):
    """Some of what a plan computes.

    Args:
        plan: Computes it.
        numbers: Of which stages of the whole its stages are portions.
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


def shares(plan: Plan, owners: Mapping[str, str], pairs: int) -> Shares:
    """Cut a plan.

    Args:
        plan: What is cut.
        owners: Of arrays in `plan.shapes`. What has none, such as moments of the input, is read by
            whoever needs it.
        pairs: How often the crossing share is to run. Over few runs a stage that only part of could
            be computed once is left whole, as the part would need a compiled program of its own.

    Returns:
        Shares that compute together what the plan does. The logarithms of their scales are those of
        the stages of the whole that `numbers` names.

    Example:
        Of two bilinear layers: how the first one's outputs vary in each model is its own.

        >>> import numpy as np, tnsim
        >>> from tnsim.names import side_of
        >>> model = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)] * 2)
        >>> plan = tnsim.plan(model, model, tnsim.GaussianClosure(), norms=False)
        >>> owners = {name: side for name in plan.shapes if (side := side_of(name))}
        >>> found = shares(plan, owners, pairs=1000)
        >>> crossing = found.crossing.plan
        >>> sorted(found.own), crossing.outputs
        (['A', 'B'], ('AB',))
        >>> set(found.own["A"].plan.outputs) < set(crossing.shapes)
        True
        >>> crossing.multiplications < plan.multiplications
        True
    """
    labels = plan.metric, plan.exact, plan.dtype, plan.diagrams
    scales = tuple(plan.scales.items())
    return _shares(plan.whole, labels, scales, tuple(map(owners.get, plan.shapes)), pairs)


@session_cache
def _shares(
    plan: WholePlan,
    labels: Labels,
    scales: tuple[tuple[str, Scales], ...],
    owners: tuple[str | None, ...],
    pairs: int,
) -> Shares:
    stages = _analysed(plan, owners, pairs)
    shapes = dict(zip(plan.names, plan.shapes, strict=True)) | {ONE: ()}
    crossing = _portions(stages, None, plan.outputs)
    handed = _handed(crossing, shapes)
    own: dict[str, Share] = {}
    for owner, names in sorted(handed.items()):
        portions = _portions(stages, owner, names)
        own[owner] = _share(portions, labels, dict.fromkeys(names, ()), shapes)
    for share in own.values():
        shapes |= share.plan.output_shapes
    return Shares(own, _share(crossing, labels, dict(scales), shapes))


def _analysed(plan: WholePlan, owners: tuple[str | None, ...], pairs: int) -> list[AnalysedStage]:
    """All stages, with whose arrays everything in them is computed from."""
    reads: dict[str, Dependencies] = {}
    for name, owner in zip(plan.names, owners, strict=True):
        reads[name] = frozenset({owner} if owner else ())
    stages = []
    for number, stage in enumerate(plan.stages):
        inputs = [reads[name] for name in stage.inputs]
        found = analysed(number, stage, plan.programs[stage.program], inputs, pairs)
        stages.append(found)
        reads.update(zip(stage.outputs, found.outputs, strict=True))
    return stages


def _portions(
    stages: Sequence[AnalysedStage], owner: str | None, outputs: Iterable[str]
) -> list[Portion]:
    """The portions of a share that lead to some outputs, in the order of the stages.

    Args:
        stages: Of the whole.
        owner: Whose share it is; None for the crossing one.
        outputs: Their names.
    """
    wanted = set(outputs)
    portions = []
    for stage in reversed(stages):  # what one reads is wanted of the stages before
        found = portion(stage, owner, wanted)
        if found is not None:
            wanted.update(found.inputs)
            portions.append(found)
    return portions[::-1]


def _handed(crossing: Sequence[Portion], shapes: Mapping[str, object]) -> dict[str, list[str]]:
    """What the own share of each owner hands out: what the crossing one takes, arrays apart."""
    handed: dict[str, dict[str, None]] = {}
    for found in crossing:
        for name, owner in found.taken.items():
            if name not in shapes:
                handed.setdefault(owner, {})[name] = None
    return {owner: list(names) for owner, names in handed.items()}


def _share(
    portions: Sequence[Portion],
    labels: Labels,
    scales: Mapping[str, Scales],
    shapes: Mapping[str, tuple[int, ...]],
) -> Share:
    """A share of its portions.

    Args:
        portions: In order.
        labels: Of the whole.
        scales: Of every output.
        shapes: Of all arrays that may be read.
    """
    programs: dict[Program, int] = {}
    stages = []
    for one in portions:
        number = programs.setdefault(one.program, len(programs))
        stages.append(PlanStage(number, one.inputs, one.outputs, one.groups))
    read = {name for one in portions for name in one.inputs}
    leaves = {name: shape for name, shape in shapes.items() if name in read}
    plan = Plan(*labels, tuple(programs), tuple(stages), leaves, tuple(scales), dict(scales))
    return Share(plan, tuple(one.number for one in portions))
