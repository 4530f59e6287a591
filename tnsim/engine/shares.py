"""A plan cut by whose arrays it reads. In: a plan, the owner of each array. Out: a plan per share.

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
from typing import NamedTuple, TypeAlias

from tnsim.engine.ownership import UNIT, AnalysedStage, Reads, analysed
from tnsim.engine.piece import Piece
from tnsim.engine.plan import Plan, PlanStage, WholePlan
from tnsim.engine.portions import Portion, portion
from tnsim.sessions import remembered

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
            be computed once is left whole, as the part would need a program of its own.

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


@remembered
def _shares(
    plan: WholePlan,
    labels: Labels,
    scales: tuple[tuple[str, Scales], ...],
    owners: tuple[str | None, ...],
    pairs: int,
) -> Shares:
    stages = _analysed(plan, owners, pairs)
    shapes = dict(zip(plan.names, plan.shapes, strict=True)) | {UNIT: ()}
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
    reads: dict[str, Reads] = {}
    for name, owner in zip(plan.names, owners, strict=True):
        reads[name] = frozenset({owner} if owner else ())
    stages = []
    for number, stage in enumerate(plan.stages):
        inputs = [reads[name] for name in stage.inputs]
        found = analysed(number, stage, plan.pieces[stage.piece], inputs, pairs)
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
    pieces: dict[Piece, int] = {}
    stages = []
    for one in portions:
        number = pieces.setdefault(one.piece, len(pieces))
        stages.append(PlanStage(number, one.inputs, one.outputs, one.groups))
    read = {name for one in portions for name in one.inputs}
    leaves = {name: shape for name, shape in shapes.items() if name in read}
    plan = Plan(*labels, tuple(pieces), tuple(stages), leaves, tuple(scales), dict(scales))
    return Share(plan, tuple(one.number for one in portions))
