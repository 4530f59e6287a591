"""From a folded problem to a plan.

In: a `Problem`. Out: a `Plan`, found once per structure and cached.

Each stage is first rewritten with its operands numbered, so that equal layers give equal keys;
then its piece is looked up in memory, on disk, or built: every product is contracted along a path
of cotengra, products share what they have in common, and among the candidate paths those are kept
that make the *whole piece* cheapest. The result depends on the structure alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tnsim.engine import cache
from tnsim.engine import pathfinding as paths
from tnsim.engine.piece import Piece
from tnsim.engine.plan import Plan, PlanStage
from tnsim.engine.plan_json import piece_from_data
from tnsim.engine.problem import Definition, Operand, Problem, Stage, Term, prune, unaliased
from tnsim.engine.stage_search import Shapes, build_piece, settle, shape_of, split, written
from tnsim.sessions import remembered

LARGE = 2**27  # elements: 1 GiB in float64
MAX_OPERATIONS = 200


def plan_problem(
    problem: Problem, metric: str, exact: bool, dtype: str, large: int = LARGE, runs: int = 1
) -> Plan:
    """Plan every stage of a problem; the metric's name, guarantee and dtype are carried along as
    labels.

    `large`: elements beyond which an intermediate is computed in chunks. `runs`: how often all is
    run.
    """
    problem = _settled(problem, large)
    shapes, symmetric = dict(problem.shapes), set(problem.symmetric)
    pieces: dict[Piece, int] = {}
    stages, diagrams, sources, scales = [], 0, set(), {}
    for stage in problem.stages:
        inputs = _inputs(stage)
        key = _numbered(stage, inputs)
        arrays = tuple(map(unaliased, inputs))
        whole, source = _piece(
            key, tuple(shapes[n] for n in arrays), tuple(n in symmetric for n in arrays), large
        )
        sources.add(source)
        names = dict(enumerate(arrays))
        for definition, output in zip(stage.outputs, whole.outputs, strict=True):
            shapes[definition.name] = whole.value_shapes[output]
            if definition.symmetric:
                symmetric.add(definition.name)
            scales[definition.name] = definition.powers
        diagrams = max(diagrams, max((len(d.terms) for d in stage.definitions), default=0))
        parts = split(whole, MAX_OPERATIONS)
        for n, (piece, takes, gives) in enumerate(parts):
            last = n == len(parts) - 1
            outputs = (
                tuple(d.name for d in stage.outputs)
                if last
                else tuple(f"#{len(stages)}.{a}" for a in gives)
            )
            taken = tuple(names[a] for a in takes)
            if not last:
                names |= dict(zip(gives, outputs, strict=True))
            stages.append(
                PlanStage(
                    pieces.setdefault(piece, len(pieces)),
                    taken,
                    outputs,
                    tuple(g.group for g in stage.scale_groups if g.definition is not None)
                    if last
                    else (),
                    tuple((g.group, g.degree) for g in stage.scale_groups) if last else (),
                )
            )
    return Plan(
        metric=metric,
        exact=exact,
        dtype=dtype,
        diagrams=diagrams,
        pieces=tuple(pieces),
        stages=tuple(stages),
        shapes=dict(problem.shapes),
        outputs=problem.outputs,
        scales={name: scales[name] for name in problem.outputs},
        searched_with=", ".join(sorted(sources)),
        runs=runs,
    )


def _settled(problem: Problem, large: int) -> Problem:
    """Terms that can be written in several ways, written in the cheapest.

    What only the others needed is dropped.
    """
    if not any(
        term.otherwise for stage in problem.stages for d in stage.definitions for term in d.terms
    ):
        return problem
    shapes, stages = dict(problem.shapes), []
    for stage in problem.stages:
        inputs = _inputs(stage)
        numbered = _numbered(stage, inputs)
        ways = _ways(numbered, tuple(shapes[n] for n in inputs), large)
        definitions = []
        for d, chosen in zip(stage.definitions, ways, strict=True):
            definitions.append(written(d, chosen))
            shapes[d.name] = shape_of(d, shapes)
        stages.append(Stage(tuple(definitions), stage.scale_groups))
    return prune(dataclasses.replace(problem, stages=tuple(stages)))


def _inputs(stage: Stage) -> tuple[str, ...]:
    """Names a stage takes from outside, in order of first use."""
    own = {d.name for d in stage.definitions}
    used = (
        o.name
        for d in stage.definitions
        for t in d.terms
        for way in (t.operands, *t.otherwise)
        for o in way
    )
    return tuple(name for name in dict.fromkeys(used) if name not in own)


def _numbered(stage: Stage, inputs: tuple[str, ...]) -> Stage:
    """The stage with numbers for names: equal for layers that differ in name only."""
    names = {name: f"in{n}" for n, name in enumerate(inputs)}
    names |= {d.name: f"def{n}" for n, d in enumerate(stage.definitions)}
    groups: dict[str, str] = {g.group: f"group{n}" for n, g in enumerate(stage.scale_groups)}

    def renamed(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        return tuple(Operand(names[o.name], o.indices) for o in operands)

    definitions = tuple(
        Definition(
            names[d.name],
            d.indices,
            tuple(
                Term(t.weight, renamed(t.operands), tuple(map(renamed, t.otherwise)))
                for t in d.terms
            ),
            d.symmetric,
            tuple((groups[g], p) for g, p in d.powers if g in groups),
            d.kept,
            d.over,
        )
        for d in stage.definitions
    )
    scale_groups = tuple(
        g._replace(group=groups[g.group], degree=0, definition=g.definition and names[g.definition])
        for g in stage.scale_groups
    )
    return Stage(definitions, scale_groups)


@remembered
def _ways(stage: Stage, shapes: Shapes, large: int) -> tuple[tuple[int, ...], ...]:
    """The cheapest way of every term of a numbered stage, from the cache or newly searched."""
    key = ["ways", stage, shapes, large]
    ways, _ = cache.kept(
        key,
        search=lambda: settle(stage, shapes, large),
        encode=list,
        decode=lambda data: _ways_from_data(data, stage),
        searcher=paths.version(),
    )
    return ways


def _ways_from_data(data: Any, stage: Stage) -> tuple[tuple[int, ...], ...]:
    """The ways of a stage from parsed JSON. Raises `ValueError` unless every term has its way."""
    ways = []
    for numbers, definition in zip(data, stage.definitions, strict=True):
        for number, term in zip(numbers, definition.terms, strict=True):
            if type(number) is not int or not 0 <= number <= len(term.otherwise):
                raise ValueError(f"a term has no way {number!r}")
        ways.append(tuple(numbers))
    return tuple(ways)


@remembered
def _piece(
    stage: Stage, shapes: Shapes, symmetric: tuple[bool, ...], large: int
) -> tuple[Piece, str]:
    """The piece of a numbered stage, from the cache or newly searched, and what searched it."""
    key = ["piece", stage, shapes, symmetric, large]
    return cache.kept(
        key,
        search=lambda: build_piece(stage, shapes, symmetric, large),
        encode=dataclasses.asdict,
        decode=lambda data: _piece_for(data, stage, shapes),
        searcher=paths.version(),
    )


def _piece_for(data: Any, stage: Stage, shapes: Shapes) -> Piece:
    """A piece from parsed JSON. Raises `ValueError` unless it is one of this stage."""
    piece = piece_from_data(data)
    known = {f"in{n}": shape for n, shape in enumerate(shapes)}
    for definition in stage.definitions:
        known[definition.name] = shape_of(definition, known)
    expected = tuple(known[definition.name] for definition in stage.outputs)
    given = tuple(piece.value_shapes[value] for value in piece.outputs)
    groups = [group for group in stage.scale_groups if group.definition is not None]
    if piece.shapes != shapes or given != expected or len(piece.scales) != len(groups):
        raise ValueError("the piece of another stage")
    return piece
