"""Which stages run at once. In: a plan. Out: rounds of stages, one round after another.

The moments of two models wait for nothing of each other, and a long stage is cut into parts (see
`splitting`) of which few keep all cores busy. So stages that need nothing of one another run at
once. A round waits for its last stage: what is alive at a time, and so the memory, depends on the
plan alone, not on how fast anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from tnsim.engine.plan_stages import PlanStage

if TYPE_CHECKING:
    from tnsim.engine.plan import Plan

Sizes = dict[str, int]


class Round(NamedTuple):
    """Stages that run at once.

    Args:
        stages: Their numbers.
        own: Elements that they need themselves.
        elements: Alive at once while they run: their own, and those of values that wait.
        last_read: Names of the values, arrays of the plan apart, that nothing reads after them.
    """

    stages: tuple[int, ...]
    own: int
    elements: int
    last_read: tuple[str, ...]


def rounds(plan: Plan) -> tuple[Round, ...]:
    """Every stage in a round after those of what it reads.

    As few rounds as go without more memory than the stages need one after another.
    """
    one_by_one = tuple(_rounds(plan, at_most=0))
    if len(plan.stages) < 2:
        return one_by_one
    return tuple(_rounds(plan, at_most=max(each.elements for each in one_by_one)))


def _rounds(plan: Plan, at_most: int) -> Iterator[Round]:
    """Rounds of as many stages as fit in so many elements, at least one each."""
    alive = {name: math.prod(shape) for name, shape in plan.shapes.items()}
    readers = _readers(plan)
    left = dict(enumerate(plan.stages))
    while left:
        chosen: dict[int, PlanStage] = {}
        for number, stage in left.items():
            if not alive.keys() >= set(stage.inputs):
                continue
            with_it = sum(_elements(plan, alive, [*chosen.values(), stage]))
            if not chosen or with_it <= at_most:
                chosen[number] = stage
        own, waiting = _elements(plan, alive, list(chosen.values()))
        read: list[str] = []
        for number, stage in chosen.items():
            del left[number]
            alive |= _given(plan, stage)
            read += [name for name in set(stage.inputs) if name in readers]
        for name in read:
            readers[name] -= 1
        last_read = tuple(name for name in dict.fromkeys(read) if not readers[name])
        for name in last_read:
            del alive[name]
        yield Round(tuple(chosen), own, own + waiting, last_read)


def _elements(plan: Plan, alive: Sizes, stages: list[PlanStage]) -> tuple[int, int]:
    """Elements alive while some stages run: their own, and those that none of them reads."""
    read = {name for stage in stages for name in stage.inputs}
    own = sum(plan.pieces[stage.piece].peak_elements for stage in stages)
    return own, sum(size for name, size in alive.items() if name not in read)


def _readers(plan: Plan) -> dict[str, int]:
    """How many stages read each value that is not kept to the end."""
    readers: dict[str, int] = {}
    for stage in plan.stages:
        for name in set(stage.inputs) - set(plan.shapes) - set(plan.outputs):
            readers[name] = readers.get(name, 0) + 1
    return readers


def _given(plan: Plan, stage: PlanStage) -> Sizes:
    """Elements of what a stage hands out."""
    piece = plan.pieces[stage.piece]
    outputs = zip(stage.outputs, piece.outputs, strict=True)
    return {name: math.prod(piece.value_shapes[output]) for name, output in outputs}
