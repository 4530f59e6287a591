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
import math
import os
import sys
import tempfile
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from tnsim import paths
from tnsim.canonical import canonical
from tnsim.expressions import Builder, Use, product
from tnsim.plans import Operation, Piece, Plan, PlanStage, piece_from_data
from tnsim.problem import Definition, Operand, Problem, Stage, Term

VERSION = 1
MAX_ATTEMPTS = 40
NEGLIGIBLE = 0.01


def plan_problem(problem: Problem, metric: str, exact: bool, dtype: str) -> Plan:
    """Plan every stage of a problem; the metric's name, guarantee and dtype are carried along as labels."""
    shapes, symmetric = dict(problem.shapes), set(problem.symmetric)
    pieces: dict[Piece, int] = {}
    stages, diagrams, sources, scales = [], 0, set(), {}
    for stage in problem.stages:
        inputs = _inputs(stage)
        key = _numbered(stage, inputs)
        piece, source = _piece(key, tuple(shapes[n] for n in inputs), tuple(n in symmetric for n in inputs))
        sources.add(source)
        for definition, output in zip(stage.definitions, piece.outputs, strict=True):
            shapes[definition.name] = piece.value_shapes[output]
            if definition.symmetric:
                symmetric.add(definition.name)
            diagrams += len(definition.terms)
            scales[definition.name] = definition.powers
        stages.append(
            PlanStage(
                pieces.setdefault(piece, len(pieces)),
                inputs,
                tuple(d.name for d in stage.definitions),
                tuple(g.group for g in stage.gauges if g.definition is not None),
                tuple((g.group, g.degree) for g in stage.gauges),
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


def _inputs(stage: Stage) -> tuple[str, ...]:
    """Names a stage takes from outside, in order of first use."""
    own = {d.name for d in stage.definitions}
    used = (o.name for d in stage.definitions for t in d.terms for o in t.operands)
    return tuple(name for name in dict.fromkeys(used) if name not in own)


def _numbered(stage: Stage, inputs: tuple[str, ...]) -> Stage:
    """The stage with numbers for names: equal for layers that differ in name only."""
    names = {name: f"in{n}" for n, name in enumerate(inputs)}
    names |= {d.name: f"def{n}" for n, d in enumerate(stage.definitions)}
    groups: dict[str, str] = {g.group: f"group{n}" for n, g in enumerate(stage.gauges)}
    definitions = tuple(
        Definition(
            names[d.name],
            d.indices,
            tuple(Term(t.weight, tuple(Operand(names[o.name], o.indices) for o in t.operands)) for t in d.terms),
            d.symmetric,
            tuple((groups[g], p) for g, p in d.powers if g in groups),
        )
        for d in stage.definitions
    )
    gauges = tuple(g._replace(group=groups[g.group], degree=0, definition=g.definition and names[g.definition]) for g in stage.gauges)
    return Stage(definitions, gauges)


@lru_cache(maxsize=4096)
def _piece(stage: Stage, shapes: tuple[tuple[int, ...], ...], symmetric: tuple[bool, ...]) -> tuple[Piece, str]:
    """The piece of a numbered stage, from disk or newly searched, and what searched it."""
    folder = cache_folder()
    text = json.dumps([VERSION, asdict(stage), shapes, symmetric], separators=(",", ":"))
    file = folder and folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    if file is not None:
        try:
            data = json.loads(file.read_text())
            piece = piece_from_data(data["piece"])
            if data["stage"] == text and piece.shapes == shapes and len(piece.value_shapes) > 0:
                return piece, data["searched_with"]
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
            pass  # absent or damaged: search again and overwrite
    piece, source = build_piece(stage, shapes, symmetric), paths.version()
    if file is not None:
        _write(file, json.dumps({"stage": text, "searched_with": source, "piece": asdict(piece)}, separators=(",", ":")))
    return piece, source


def build_piece(stage: Stage, shapes: tuple[tuple[int, ...], ...], symmetric: tuple[bool, ...]) -> Piece:
    """Search paths for every product of a stage and assemble them with what they share.

    Coordinate descent over the candidate paths, the most expensive products first: a candidate stays if it
    makes the whole stage cheaper. Products too cheap to matter keep their own best path.
    """
    stage = Stage(tuple(_distinct_terms(d) for d in stage.definitions), stage.gauges)
    options: dict[tuple, tuple[paths.Path, ...]] = {}
    expense: dict[tuple, int] = {}

    def collect(inputs, output, sizes):
        key = (inputs, output, tuple(sizes.items()))
        if key not in options:
            options[key] = paths.candidates(inputs, output, sizes)
            expense[key] = _path_cost(inputs, output, sizes, options[key][0])
        return options[key][0]

    forms: dict = {}
    best = _Assembly(stage, shapes, symmetric, collect, forms)
    chosen, attempts, improved = dict.fromkeys(options, 0), 0, True
    while improved:
        improved = False
        for key in sorted(options, key=expense.__getitem__, reverse=True):
            if expense[key] < NEGLIGIBLE * best.cost[0]:
                continue
            for n in range(len(options[key])):
                if n == chosen[key] or attempts >= MAX_ATTEMPTS:
                    continue
                trial, attempts = {**chosen, key: n}, attempts + 1

                def pick(inputs, output, sizes, trial=trial):
                    key = (inputs, output, tuple(sizes.items()))
                    return options[key][trial[key]]

                attempt = _Assembly(stage, shapes, symmetric, pick, forms)
                if attempt.cost < best.cost:
                    best, chosen, improved = attempt, trial, True
    return best.piece(stage, shapes)


def _path_cost(inputs, output, sizes: dict[int, int], path: paths.Path) -> int:
    """Scalar multiplications of one product alone along one path."""
    pool, total = dict(enumerate(map(frozenset, inputs))), 0
    for n, (one, two) in enumerate(path):
        both = pool.pop(one) | pool.pop(two)
        total += math.prod(sizes[x] for x in both)
        pool[len(inputs) + n] = both & frozenset(output).union(*pool.values())
    return total


def _distinct_terms(definition: Definition) -> Definition:
    """Terms that are one network up to the names of summed indices become one, with the sum of their weights."""
    numbers = {x: n for n, x in enumerate(dict.fromkeys(o.name for t in definition.terms for o in t.operands))}
    weights: dict = {}
    for term in definition.terms:
        labels = {x: n for n, x in enumerate(definition.indices)}
        tensors = [(-1 - n, (n,)) for n in range(len(labels))]  # marks that keep the outputs apart
        for o in term.operands:
            tensors.append((numbers[o.name], tuple(labels.setdefault(x, len(labels)) for x in o.indices)))
        key, _ = canonical(tensors, range(len(definition.indices)), lambda ref: False)
        kept, weight = weights.get(key, (term, 0.0))
        weights[key] = kept, weight + term.weight
    terms = tuple(Term(weight, term.operands) for term, weight in weights.values() if weight)
    return dataclasses.replace(definition, terms=terms)


class _Assembly:
    """One assembly of a stage under a choice of paths: its builder, its outputs, its cost."""

    def __init__(self, stage: Stage, shapes, symmetric, path, forms: dict):
        self.builder = builder = Builder(forms)
        values = {f"in{n}": builder.atom(s, symmetric=y) for n, (s, y) in enumerate(zip(shapes, symmetric, strict=True))}
        self.outputs: list[Use] = []
        for definition in stage.definitions:
            items = []
            for term in definition.terms:
                uses = [Use(values[o.name], o.indices) for o in term.operands]
                items.append((term.weight, product(builder, uses, definition.indices, path)))
            total = builder.total(items, definition.indices)
            if total.labels != definition.indices:
                total = self._permuted(total, definition.indices)
            values[definition.name] = total.value
            if definition.symmetric:
                builder.symmetric.add(total.value)
            self.outputs.append(total)
        self.cost = builder.cost(u.value for u in self.outputs)

    def _permuted(self, use: Use, indices: tuple[str, ...]) -> Use:
        """A definition's own axis order, as a sum of one."""
        position = {x: n for n, x in enumerate(indices)}
        labels = tuple(position[x] for x in use.labels)
        sizes = dict(zip(labels, self.builder.values[use.value].shape, strict=True))
        axes = tuple(range(len(indices)))
        operation = Operation("sum", (use.value,), (labels,), axes, (1.0,))
        return Use(self.builder.atom(tuple(sizes[n] for n in axes), operation=operation), indices)

    def piece(self, stage: Stage, shapes) -> Piece:
        builder, inputs = self.builder, len(shapes)
        needed = [n for n in builder.reachable(u.value for u in self.outputs) if n >= inputs]
        number = {n: n for n in range(inputs)} | {n: inputs + i for i, n in enumerate(needed)}
        operations = []
        for n in needed:
            op = builder.values[n].operation
            operations.append(op._replace(args=tuple(number[a] for a in op.args), weights=tuple(map(float, op.weights))))
        position = {d.name: n for n, d in enumerate(stage.definitions)}
        live = [g for g in stage.gauges if g.definition is not None]
        slot = {g.group: n for n, g in enumerate(live)}
        return Piece(
            shapes=shapes,
            operations=tuple(operations),
            outputs=tuple(number[u.value] for u in self.outputs),
            scales=tuple((position[g.definition], g.power) for g in live),
            powers=tuple(tuple((slot[g], p) for g, p in d.powers if g in slot) for d in stage.definitions),
        )


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
