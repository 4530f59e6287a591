"""From a folded problem to a plan. In: a `Problem`. Out: a `Plan`, found once per structure and cached.

Each stage is first rewritten with its operands numbered, so that equal layers give equal keys; then its
piece is looked up in memory, on disk, or built: every product is contracted along a path of cotengra,
products share what they have in common, and among the candidate paths those are kept that make the
*whole piece* cheapest. The result depends on the structure alone.

The cache holds one JSON file per piece under `TNSIM_CACHE_DIR` (default: the user's cache folder). A file
that cannot be read is a miss; a folder that cannot be written is no cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from tnsim.engine import pathfinding as paths
from tnsim.engine.plan import Piece, Plan, PlanStage, piece_from_data
from tnsim.engine.problem import Definition, Operand, Problem, Stage, Term, prune, unaliased
from tnsim.engine.stage_search import Shapes, build_piece, settle, shape_of, split, written

VERSION = 10
LARGE = 2**27  # elements: 1 GiB in float64
MAX_OPERATIONS = 200


def plan_problem(
    problem: Problem, metric: str, exact: bool, dtype: str, large: int = LARGE
) -> Plan:
    """Plan every stage of a problem; the metric's name, guarantee and dtype are carried along as labels.

    `large`: elements beyond which an intermediate is computed in chunks.
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
                    tuple(g.group for g in stage.gauges if g.definition is not None)
                    if last
                    else (),
                    tuple((g.group, g.degree) for g in stage.gauges) if last else (),
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
    )


def _settled(problem: Problem, large: int) -> Problem:
    """Terms that can be written in several ways, written in the cheapest; what only the others needed is dropped."""
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
        stages.append(Stage(tuple(definitions), stage.gauges))
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
    groups: dict[str, str] = {g.group: f"group{n}" for n, g in enumerate(stage.gauges)}

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
    gauges = tuple(
        g._replace(group=groups[g.group], degree=0, definition=g.definition and names[g.definition])
        for g in stage.gauges
    )
    return Stage(definitions, gauges)


@lru_cache(maxsize=4096)
def _ways(stage: Stage, shapes: Shapes, large: int) -> tuple[tuple[int, ...], ...]:
    """The cheapest way of every term of a numbered stage, from disk or newly searched."""

    def valid(data: Any) -> tuple[tuple[int, ...], ...]:
        found = tuple(tuple(int(way) for way in ways) for ways in data)
        for ways, d in zip(found, stage.definitions, strict=True):
            written(d, ways)
        return found

    return _kept(["ways", stage, shapes, large], valid, lambda: settle(stage, shapes, large), list)[
        0
    ]


@lru_cache(maxsize=4096)
def _piece(
    stage: Stage, shapes: Shapes, symmetric: tuple[bool, ...], large: int
) -> tuple[Piece, str]:
    """The piece of a numbered stage, from disk or newly searched, and what searched it."""

    def valid(data: Any) -> Piece:
        piece = piece_from_data(data)
        if piece.shapes != shapes or len(piece.value_shapes) < len(shapes):
            raise ValueError("a piece of other shapes")
        return piece

    return _kept(
        ["piece", stage, shapes, symmetric, large],
        valid,
        lambda: build_piece(stage, shapes, symmetric, large),
        asdict,
    )


def _kept(
    key: list, valid: Callable[[Any], Any], build: Callable[[], Any], plain: Callable[[Any], Any]
) -> tuple[Any, str]:
    """A search result by structure: from the cache folder if it is there and sound, else built and kept."""
    folder = cache_folder()
    text = repr([VERSION, *key])
    file = folder and folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    if file is not None:
        try:
            data = json.loads(file.read_text())
            if data["key"] == text:
                return valid(data["found"]), data["searched_with"]
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
            pass  # absent or damaged: search again and overwrite
    found, source = build(), paths.version()
    if file is not None:
        _write(
            file,
            json.dumps(
                {"key": text, "searched_with": source, "found": plain(found)}, separators=(",", ":")
            ),
        )
    return found, source


def cache_folder() -> Path | None:
    """Where pieces are kept: `TNSIM_CACHE_DIR`, empty for none; else the platform's cache folder."""
    named = os.environ.get("TNSIM_CACHE_DIR")
    if named is not None:
        return Path(named) if named else None
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA")
    elif sys.platform == "darwin":
        root = os.path.expanduser("~/Library/Caches")
    else:
        root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "tnsim" / "plans" if root else None


def _write(file: Path, text: str) -> None:
    """Temp file and rename, so that no reader ever sees half a piece."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as out:
            out.write(text)
        os.replace(name, file)
    except OSError:
        pass  # a read-only home: plans are searched again next time
