"""The cut of a plan of pairs into shares, so that work on a model alone runs once per model.

Many values of a plan of `<a|b>` are computed from the arrays of a alone, and are the same for every
b. Among many models they are computed once for each a, and the plan is cut into *shares*:

    own share of a     values computed from arrays of a alone; runs once for every a
    own share of b     values computed from arrays of b alone; runs once for every b
    crossing share     all other values; runs for every pair, on outputs of the own shares

A share is a plan itself: stages of the whole plan, each reduced to a *portion* of its operations.
The cut takes three walks over the stages:

    1. forward: the owners of the arrays that each value is computed from (`analysed`)
    2. backward from the outputs: the crossing share, and its inputs from own shares (`portion`)
    3. backward from these inputs: the own share of each owner (`shares`)

*Values* (`analysed`). A value that is computed from the arrays of a single model belongs to the own
share of this model, a value that needs arrays of two models to the crossing share. A portion that
is a whole stage runs the program of the stage, whose compiled program other plans use too. Any
other portion needs a compiled program of its own. Where own work would not repay the compilation,
it is left to the crossing share and done for every pair.

*Portions* (`portion`). The portion of a share consists of its operations that lead to the wanted
values of the stage. Values of another share that these operations read are inputs of the portion.

A stage also divides outputs by scales, and each scale is read off an output:

    x = f(a)       s = largest entry of x      gives x / s
    y = g(a, b)                                gives y / s^2

Here x and its scale s belong to the own share of a, but y to the crossing share. The own share
therefore also gives 1 / s, a constant 1 divided by s, and the crossing share multiplies y by 1 / s
twice. The exponent of s is recorded once, by the share that reads s off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from tnsim.engine.ir.program import Operation, PlanStage, Program, postorder
from tnsim.engine.plan import Plan
from tnsim.sessions import session

ONE = "1"
"""Name of the constant 1, a scalar that own shares divide by scales."""
COMPILING = 10**8
"""Multiplications that take as long as the compilation of an operation: 5 to 10 ms."""
Dependencies: TypeAlias = "frozenset[str]"
"""The owners of the arrays that a value is computed from."""
Value: TypeAlias = "int | str"
"""A value of a stage's program by number, or a value that only a portion has by name."""
Powers: TypeAlias = "tuple[tuple[int, int], ...]"
"""Pairs (scale, power) of a program: an output is divided by these powers."""


class AnalysedStage(NamedTuple):
    """A stage of a plan, with the owners of the arrays that its values are computed from.

    Args:
        number: Number of the stage in the plan.
        stage: Names of inputs, outputs and scale groups.
        program: Program of the stage.
        values: Owners for every value of the program, inputs first.
        outputs: Owners for every output after its division by scales.
    """

    number: int
    stage: PlanStage
    program: Program
    values: tuple[Dependencies, ...]
    outputs: tuple[Dependencies, ...]

    @property
    def powers(self) -> tuple[Powers, ...]:
        """The scales that each output is divided by."""
        return self.program.powers or ((),) * len(self.outputs)

    @property
    def computed(self) -> tuple[Dependencies, ...]:
        """The owners for every operation and every output of the stage."""
        return (*self.values[len(self.program.shapes) :], *self.outputs)

    def scale(self, slot: int) -> Dependencies:
        """The owners for a scale, which are those of the output that the scale is read off."""
        which, _ = self.program.scales[slot]
        return self.outputs[which]

    def inverse(self, slot: int) -> str:
        """The name of the inverse of a scale."""
        return f"{self.number}:1/{self.stage.groups[slot]}"

    def name(self, value: Value) -> str:
        """The name of a value in shares.

        Inputs and named values have names of their own, other values are named by stage and number.
        """
        if isinstance(value, str):
            return value
        is_input = value < len(self.program.shapes)
        return self.stage.inputs[value] if is_input else f"{self.number}:{value}"

    @property
    def owners(self) -> dict[str, Dependencies]:
        """The owners for every value and for the inverse of every scale, by name."""
        inverses = {self.inverse(n): self.scale(n) for n in range(len(self.program.scales))}
        return {self.name(value): own for value, own in enumerate(self.values)} | inverses

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of a value; values known by name alone are scalars."""
        return () if isinstance(value, str) else self.program.value_shapes[value]


def analysed(
    number: int, stage: PlanStage, program: Program, inputs: Sequence[Dependencies], pairs: int
) -> AnalysedStage:
    """A stage with the owners of the arrays that each of its values is computed from.

    Args:
        number: Number of the stage in its plan.
        stage: Names of inputs, outputs and scale groups.
        program: Program of the stage.
        inputs: Owners for every input.
        pairs: Number of runs of the crossing share.

    Example:
        In `sum_i a_i^2 b_i` the square reads a alone:

        >>> square = Operation("contract", (0, 0), ((0,), (0,)), (0,))
        >>> product = Operation("contract", (2, 1), ((0,), (0,)), ())
        >>> program = Program(((3,), (3,)), (square, product), outputs=(3,))
        >>> whose = [frozenset({"A"}), frozenset({"B"})]
        >>> ab = PlanStage(0, ("a", "b"), ("AB",))
        >>> stage = analysed(0, ab, program, whose, pairs=10**9)
        >>> [sorted(reads) for reads in stage.values]
        [['A'], ['B'], ['A'], ['A', 'B']]
    """
    # Operations stand in an order in which they can run, so the owners of all arguments are known
    # when an operation is reached.
    values = list(inputs)
    for op in program.operations:
        values.append(union(values[arg] for arg in op.args))
    if not stage.groups:  # stages with scales define the values that later stages start from
        _leave_what_does_not_repay(program, values, pairs)
    # Owners of a scale are those of the output that the scale is read off before any division. The
    # stage therefore needs `outputs` twice: undivided, to look up the scales, and then divided.
    undivided = tuple(values[value] for value in program.outputs)
    stage_values = AnalysedStage(number, stage, program, tuple(values), undivided)
    divided = []
    for own, powers in zip(undivided, stage_values.powers, strict=True):
        # x / s depends on the arrays of x and of s.
        divided.append(own | union(stage_values.scale(slot) for slot, _ in powers))
    return stage_values._replace(outputs=tuple(divided))


def union(several: Iterable[Dependencies]) -> Dependencies:
    """The owners of the arrays that any of several values is computed from."""
    return frozenset().union(*several)


def _leave_what_does_not_repay(program: Program, values: list[Dependencies], pairs: int) -> None:
    """Assign own work to all owners where it takes less time than a compilation.

    Else all pairs of language models compile 5,010 further operations for .6 % of the work.

    Args:
        program: Program of a stage.
        values: Owners for every value, which are replaced in place.
        pairs: Number of runs of the crossing share.
    """
    everyone = union(values)
    first = len(program.shapes)
    for owner in everyone:
        # Cutting gives every share a program to compile; it pays where the work saved over all
        # pairs takes longer.
        alone = [n for n in range(first, len(values)) if values[n] == {owner}]
        work = sum(program.costs[n - first] for n in alone)
        # Where one model owns every operation, its own share is the whole stage and runs the
        # stage's compiled program, so nothing further is compiled.
        is_cut = len(alone) < len(program.operations)
        if is_cut and pairs * work < COMPILING * program.length:
            for n in alone:
                # Values that read these values already have several owners, or belong to the same
                # owner and are in `alone` as well. So no dependency has to be computed again.
                # Work of all owners belongs to the crossing share.
                values[n] = everyone


class Portion(NamedTuple):
    """The part of a stage that a share computes.

    Args:
        number: Number of the stage in the whole plan.
        program: Program of the portion.
        inputs: Names of the values that the program reads.
        outputs: Names of the values that the program gives.
        groups: Scale groups whose scales the portion reads off.
    """

    number: int
    program: Program
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    groups: tuple[str, ...]


def portion(stage: AnalysedStage, owner: str | None, wanted: set[str]) -> Portion | None:
    """The portion of a stage that a share computes.

    Args:
        stage: Stage of the whole plan.
        owner: Owner of the share; None for the crossing share.
        wanted: Names of the values that are read later.

    Returns:
        The portion; None where the share computes no wanted value and no scale of the stage.

    Example:
        In the stage of the example of `analysed`, the own share of a gives the square, which is
        value 2 of stage 0:

        >>> square = Operation("contract", (0, 0), ((0,), (0,)), (0,))
        >>> product = Operation("contract", (2, 1), ((0,), (0,)), ())
        >>> program = Program(((3,), (3,)), (square, product), outputs=(3,))
        >>> whose = [frozenset({"A"}), frozenset({"B"})]
        >>> ab = PlanStage(0, ("a", "b"), ("AB",))
        >>> stage = analysed(0, ab, program, whose, pairs=10**9)
        >>> crossing = portion(stage, None, {"AB"})
        >>> crossing.inputs
        ('0:2', 'b')
        >>> own = portion(stage, "A", {"0:2"})
        >>> own.inputs, own.outputs
        (('a',), ('0:2',))
    """
    # A stage that belongs to one share as a whole keeps its program, and with it the compiled
    # program that other plans share.
    number, plan_stage, program = stage.number, stage.stage, stage.program
    if all(_belongs(reads, owner) for reads in stage.computed):
        return Portion(number, program, plan_stage.inputs, plan_stage.outputs, plan_stage.groups)
    # Scales of the whole stage, by number. In the portion they are renumbered by their position in
    # this list.
    scales = [n for n in range(len(program.scales)) if _belongs(stage.scale(n), owner)]
    given = _outputs(stage, owner, scales, wanted)
    if not given:
        return None
    operations = _own_operations(stage, owner, [output.value for output in given])
    values: list[Value] = []
    powers = []
    # Each output is divided by the scales of its stage. A scale that this share reads off itself is
    # divided off by the program as usual. A scale that another share reads off arrives as the
    # scalar 1 / s, by which the value is multiplied as often as its power says.
    for _, value, divided in given:
        powers.append(tuple((scales.index(n), power) for n, power in divided if n in scales))
        # The factor has no axes, so the contraction keeps all axes of the value in their order.
        axes = tuple(range(len(stage.shape(value))))
        for slot, power in divided:
            for _ in range(power if slot not in scales else 0):
                # The name of the product spells out how it was made. Two outputs that are the same
                # value times the same factors therefore share the operations.
                args: Any = (value, stage.inverse(slot))
                value = f"{args[0]} * {args[1]}"
                operations[value] = Operation("contract", args, (axes, ()), axes)
        values.append(value)
    # A dictionary in place of a set: the inputs get the order in which the operations read them,
    # equal in every process, so that equal portions are equal programs.
    read = [arg for op in operations.values() for arg in op.args]
    needed: dict[Value, None] = dict.fromkeys((*read, *values))
    # Whatever no operation of the portion computes comes from another share, or from the arrays of
    # the plan.
    inputs = [value for value in needed if value not in operations]
    places = {output.name: place for place, output in enumerate(given)}
    read_off = []
    for slot in scales:
        which, power = program.scales[slot]
        read_off.append((places[plan_stage.outputs[which]], power))
    scaling = {"scales": tuple(read_off), "powers": tuple(powers)}
    return Portion(
        number,
        Program.of(operations, inputs, values, stage.shape, **scaling),
        inputs=tuple(map(stage.name, inputs)),
        outputs=tuple(places),
        groups=tuple(plan_stage.groups[slot] for slot in scales),
    )


def _own_operations(
    stage: AnalysedStage, owner: str | None, outputs: Iterable[Value]
) -> dict[Value, Operation]:
    """The operations of a share that lead to some values, in an order in which they can run."""
    first = len(stage.program.shapes)

    # Inputs of the stage, named values and values of another share become inputs of the portion.
    def is_own(value: Value) -> bool:
        return (
            not isinstance(value, str) and value >= first and _belongs(stage.values[value], owner)
        )

    def operation(value: Any) -> Operation:
        return stage.program.operations[value - first]

    def below(value: Value) -> tuple[int, ...]:
        return operation(value).args if is_own(value) else ()

    own: Any = filter(is_own, postorder(outputs, below))
    return {value: operation(value) for value in sorted(own)}


def _belongs(reads: Dependencies, owner: str | None) -> bool:
    """Whether a share computes the values of some owners.

    Every share computes for itself the values without an owner, such as moments of the input.

    Args:
        reads: Owners of the arrays that a value is computed from.
        owner: Owner of the share; None for the crossing share.
    """
    return reads <= {owner} if owner else len(reads) != 1


class _Output(NamedTuple):
    """An output of a portion: a value divided by scales of the whole stage."""

    name: str
    value: Value
    powers: Powers = ()


def _outputs(
    stage: AnalysedStage, owner: str | None, scales: Sequence[int], wanted: set[str]
) -> list[_Output]:
    """The outputs of a portion: wanted outputs of the stage, and outputs that give its scales.

    An own share also gives the intermediate values and the inverses of scales that the crossing
    share wants.
    """
    # An output that a scale is read off is given even where no later stage wants it: a program
    # reads its scales off its own outputs.
    of_scales = {stage.program.scales[slot][0] for slot in scales}
    given = []
    for place, name in enumerate(stage.stage.outputs):
        is_read = name in wanted or place in of_scales
        if is_read and _belongs(stage.outputs[place], owner):
            given.append(_Output(name, stage.program.outputs[place], stage.powers[place]))
    # The crossing share runs last, so nobody else takes intermediate values or inverses from it.
    if owner is None:
        return given
    for value in range(len(stage.program.shapes), len(stage.values)):
        if stage.name(value) in wanted:
            given.append(_Output(stage.name(value), value))
    # The program divides outputs by its scales at its end, so the constant 1, given as an output of
    # power 1, comes out as 1 / s.
    for slot in scales:
        if stage.inverse(slot) in wanted:
            given.append(_Output(stage.inverse(slot), ONE, ((slot, 1),)))
    return given


class Share(NamedTuple):
    """A part of the computation of a plan.

    Args:
        plan: Plan of the part.
        numbers: Number of the stage in the whole plan, for every stage of the part.
    """

    plan: Plan
    numbers: tuple[int, ...]


class Shares(NamedTuple):
    """A plan cut into shares.

    Args:
        own: Own share by owner; owners without values for the crossing share are absent.
        crossing: Crossing share, which reads outputs of `own` and arrays of the whole plan.
    """

    own: dict[str, Share]
    crossing: Share


def uncut(plan: Plan) -> Shares:
    """The shares of a plan that is not cut: the crossing share is the whole plan."""
    return Shares({}, Share(plan, tuple(range(len(plan.stages)))))


def shares(plan: Plan, owners: Mapping[str, str], pairs: int) -> Shares:
    """The shares of a plan.

    Args:
        plan: Plan to be cut.
        owners: Owner of each array in `plan.shapes`, by name. Arrays without an owner, such as
            moments of the input, may be read by every share.
        pairs: Number of runs of the crossing share. For few runs a stage that could be cut is left
            whole, because its portions would need compiled programs of their own.

    Returns:
        Shares that together compute the outputs of the plan. The exponents of scales belong to the
        stages of the whole plan that `numbers` names.

    Example:
        For two bilinear layers, the moments of the first layer's outputs within a model are in the
        own share of the model:

        >>> import numpy as np, tnsim
        >>> from tnsim.names import side_of
        >>> model = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)] * 2)
        >>> plan = tnsim.plan(model, model, tnsim.GaussianClosure(), cosine=False).contraction
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
    owned = tuple(map(owners.get, plan.shapes))
    labels = plan.metric, plan.exact, plan.dtype, plan.diagrams, tuple(plan.scales.items())
    key = (shares, plan.whole, labels, owned, pairs)
    return session().results.get(key, lambda: _shares(plan, owned, pairs))


def _shares(plan: Plan, owners: Sequence[str | None], pairs: int) -> Shares:
    """The shares of a plan, from the owner of each of its arrays."""
    stages = _analysed(plan, owners, pairs)
    shapes = plan.shapes | {ONE: ()}
    # The crossing share comes first, because its inputs are the outputs that the own shares have to
    # give.
    crossing = _portions(stages, None, plan.outputs)
    handed = _handed(crossing, stages, shapes)
    own: dict[str, Share] = {}
    # Outputs of own shares leave as they are, without exponents of their own: each scale that an
    # own share reads off is listed with its stage in the whole plan, where the crossing share's
    # outputs count it.
    for owner, names in sorted(handed.items()):
        portions = _portions(stages, owner, names)
        own[owner] = _share(plan, portions, dict.fromkeys(names, ()), shapes)
    for share in own.values():
        shapes |= share.plan.output_shapes
    return Shares(own, _share(plan, crossing, plan.scales, shapes))


def _analysed(plan: Plan, owners: Sequence[str | None], pairs: int) -> list[AnalysedStage]:
    """All stages of a plan, with the owners for each of their values."""
    # Owners by name of the array, at first those of the plan's arrays and then of every output of a
    # stage that has been gone through.
    reads: dict[str, Dependencies] = {}
    for name, owner in zip(plan.shapes, owners, strict=True):
        reads[name] = frozenset({owner} if owner else ())
    stages = []
    for number, stage in enumerate(plan.stages):
        inputs = [reads[name] for name in stage.inputs]
        analysis = analysed(number, stage, plan.programs[stage.program], inputs, pairs)
        stages.append(analysis)
        reads.update(zip(stage.outputs, analysis.outputs, strict=True))
    return stages


def _portions(
    stages: Sequence[AnalysedStage], owner: str | None, outputs: Iterable[str]
) -> list[Portion]:
    """The portions of a share that lead to some outputs, in the order of the stages.

    Args:
        stages: Stages of the whole plan.
        owner: Owner of the share; None for the crossing share.
        outputs: Names of the outputs.
    """
    wanted = set(outputs)
    portions = []
    for stage in reversed(stages):  # the inputs of a portion are wanted of earlier stages
        part = portion(stage, owner, wanted)
        if part is not None:
            wanted.update(part.inputs)
            portions.append(part)
    return portions[::-1]


def _handed(
    crossing: Sequence[Portion], stages: Sequence[AnalysedStage], shapes: Mapping[str, object]
) -> dict[str, list[str]]:
    """The names of the values that the crossing share takes from each own share.

    Args:
        crossing: Portions of the crossing share.
        stages: Stages of the whole plan.
        shapes: Shapes of the arrays of the whole plan, which no share has to compute.
    """
    owners: dict[str, Dependencies] = {}
    for stage in stages:
        owners |= stage.owners
    # Several portions may take the same value.
    names = dict.fromkeys(name for part in crossing for name in part.inputs if name not in shapes)
    handed: dict[str, list[str]] = {}
    for name in names:
        if len(owners[name]) == 1:
            (owner,) = owners[name]
            handed.setdefault(owner, []).append(name)
    return handed


def _share(
    plan: Plan,
    portions: Sequence[Portion],
    scales: dict[str, tuple[tuple[str, int], ...]],
    shapes: Mapping[str, tuple[int, ...]],
) -> Share:
    """The share that consists of some portions.

    Args:
        plan: The whole plan, whose labels the share has.
        portions: Portions in the order of their stages.
        scales: Scale groups and powers of every output.
        shapes: Shapes of all arrays that the share may read.
    """
    # Portions of stages of equal form are equal programs, each of which is listed, and compiled,
    # once.
    programs: dict[Program, int] = {}
    stages = []
    for part in portions:
        number = programs.setdefault(part.program, len(programs))
        stages.append(PlanStage(number, part.inputs, part.outputs, part.groups))
    read = {name for part in portions for name in part.inputs}
    # The plan of a share expects only arrays that one of its portions reads.
    leaves = {name: shape for name, shape in shapes.items() if name in read}
    part = dataclasses.replace(
        plan,
        programs=tuple(programs),
        stages=tuple(stages),
        shapes=leaves,
        outputs=tuple(scales),
        scales=scales,
        searched_with="",
        runs=1,
    )
    return Share(part, tuple(portion.number for portion in portions))
