"""The planner, which turns a `Problem` into a `Plan`, once per structure, within a budget.

The operands of each stage are first numbered, so that equal layers give equal keys. The program of
the stage is then looked up in memory and on disk, or built: every product is contracted along a
path of cotengra, and products share intermediates and common factors. The result depends on the
structure alone.

*Budgets.* A plan that needs too much memory is planned again with smaller chunks, up to four times.
Where none of these plans fits, or the work is beyond the budget, `TooLarge` is raised before
anything runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar

from tnsim.engine import disk_cache
from tnsim.engine.ir.plan_json import program_data, program_from_data
from tnsim.engine.ir.problem import (
    Operand,
    Problem,
    Stage,
    Term,
    names_read,
    prune,
    strip_alias,
)
from tnsim.engine.ir.program import PlanStage, Program
from tnsim.engine.plan import Plan
from tnsim.engine.runtime import devices
from tnsim.engine.runtime.execution import seconds_of, tier_in_use
from tnsim.engine.runtime.gradients import Pullback
from tnsim.engine.search import paths
from tnsim.engine.search.routes import (
    BeyondLimit,
    Choices,
    Shapes,
    check_limit,
    shape_of,
    written,
)
from tnsim.engine.search.stages import build_program, choose_alternatives
from tnsim.errors import ModelError, TooLarge
from tnsim.options import checked
from tnsim.sessions import session

T = TypeVar("T")
Check = Callable[[], None]
"""The check that a problem is within its limit."""
LARGE = 2**27
"""Elements beyond which an intermediate is computed in chunks: 1 GiB in float64."""
MAX_OPERATIONS = 200
"""Most operations of a program. Longer programs are cut into parts, which run one after another:
XLA's compile time grows faster than linearly in the length of a program."""


FREE_SHARE = 0.8  # share of free memory that a plan may use with its compiling
_ALWAYS_FITS = 2**24  # bytes for which free memory is not looked up


def plan_problem(
    problem: Problem,
    metric: str,
    exact: bool,
    dtype: str,
    large: int = LARGE,
    runs: int = 1,
    limit: float = math.inf,
) -> Plan:
    """Plan every stage of a problem.

    Args:
        problem: Definitions to be computed, stage by stage.
        metric: Name of the metric, a label of the plan.
        exact: Whether the metric's definition is met exactly, a label of the plan.
        dtype: Precision of the computation, a label of the plan.
        large: Elements beyond which an intermediate is computed in chunks.
        runs: Number of times that the plan is run for a single result.
        limit: Multiplications that all runs may take. Planning ends early where few products show
            that they take more; a plan that is found may still be beyond the limit.

    Returns:
        The plan. It depends on the structure of the problem alone.

    Raises:
        BeyondLimit: All runs take more multiplications than the limit.
    """
    definitions = [d for stage in problem.stages for d in stage.definitions]
    diagrams = max([sum(t.diagrams for t in d.terms) for d in definitions], default=0)
    # The check is made once, before the first search: where all results are in the caches, the plan
    # itself soon tells its work.
    check = cache(partial(_check_problem, problem, limit / runs))
    try:
        with paths.planning(metric):
            # Three steps: terms are settled on their cheapest way, every stage becomes a program,
            # and programs of equal form are numbered once.
            problem = _settled_problem(problem, large, check)
            planner = _Planner(problem, large, check)
            for number, stage in enumerate(problem.stages, 1):
                paths.tell(f"stage {number} of {len(problem.stages)}")
                planner.add(stage)
    except BeyondLimit as beyond:  # the least work of a single run
        raise BeyondLimit(runs * beyond.least) from None
    return Plan(
        metric=metric,
        exact=exact,
        dtype=dtype,
        diagrams=diagrams,
        programs=tuple(planner.programs),
        stages=tuple(planner.stages),
        shapes=dict(problem.shapes),
        outputs=problem.outputs,
        scales={name: planner.scales[name] for name in problem.outputs},
        searched_with="; ".join(sorted(planner.sources)),
        runs=runs,
    )


def _check_problem(problem: Problem, limit: float) -> None:
    """Raise `BeyondLimit` where a stage takes more multiplications than a run may."""
    if limit == math.inf:
        return
    shapes = dict(problem.shapes)
    for stage, numbered, known in _numbered_stages(problem, shapes):
        given = check_limit(numbered, known, limit)
        shapes |= {d.name: shape for d, shape in zip(stage.definitions, given, strict=True)}


class _Planner:
    """The plan of the stages added so far.

    Attributes:
        large: Elements beyond which an intermediate is computed in chunks.
        check: Check of the problem, made before the first search.
        shapes: Shapes of leaves and definitions.
        exchangeable: Number of last axes that may be exchanged, for symmetric arrays.
        scales: Scale groups that each definition is divided by, with powers.
        programs: Distinct programs, numbered.
        stages: Stages of the plan, each a run of a program.
        sources: Versions of the search that found the programs.
    """

    def __init__(self, problem: Problem, large: int, check: Check) -> None:
        self.large = large
        self.check = check
        self.shapes = dict(problem.shapes)
        self.exchangeable = dict.fromkeys(problem.symmetric, 2)
        self.scales: dict[str, tuple[tuple[str, int], ...]] = {}
        self.programs: dict[Program, int] = {}
        self.stages: list[PlanStage] = []
        self.sources: set[str] = set()

    def add(self, stage: Stage) -> None:
        """Plan another stage, as a single program or, where that is long, as several."""
        inputs = names_read(stage.definitions)
        # Two names of one array (an alias) are two inputs of the program and one array of the plan.
        arrays = tuple(map(strip_alias, inputs))
        shapes = tuple(self.shapes[name] for name in arrays)
        exchangeable = tuple(self.exchangeable.get(name, 0) for name in arrays)
        program, source = _stage_program(
            _numbered_stage(stage, inputs), shapes, exchangeable, self.large, self.check
        )
        self.sources.add(source)
        for definition, output in zip(stage.outputs, program.outputs, strict=True):
            self.shapes[definition.name] = program.value_shapes[output]
            self.exchangeable[definition.name] = definition.exchangeable
            self.scales[definition.name] = definition.powers

        # The parts of a long program hand intermediate values on under names that no definition
        # has: "#" with the number of the stage and of the value.
        names = dict(enumerate(arrays))  # value number -> name, for later parts of the program
        for part, takes, gives, is_last in _parts(program):
            outputs = tuple(definition.name for definition in stage.outputs)
            if not is_last:
                outputs = tuple(f"#{len(self.stages)}.{number}" for number in gives)
            groups = stage.scale_groups if is_last else ()
            self.stages.append(
                PlanStage(
                    program=self.programs.setdefault(part, len(self.programs)),
                    inputs=tuple(names[number] for number in takes),
                    outputs=outputs,
                    groups=tuple(g.group for g in groups if g.definition is not None),
                    degrees=tuple((g.group, g.degree) for g in groups),
                )
            )
            names |= zip(gives, outputs, strict=True)


def _parts(program: Program) -> Iterator[tuple[Program, Sequence[int], Sequence[int], bool]]:
    """The parts of a program of at most `MAX_OPERATIONS`, in the order in which they run.

    The last part has the outputs and the scales of the whole program.

    Yields:
        The part, numbers of its inputs and of its outputs in the whole program, and whether it is
        the last one.
    """
    inputs, count = len(program.shapes), len(program.operations)
    whole = dict(enumerate(program.operations, inputs))
    if count <= MAX_OPERATIONS:  # its stage names all inputs, also those that nothing reads
        yield program, range(inputs), program.outputs, True
        return
    # Nearly equally long parts take the least time in total.
    parts = math.ceil(count / MAX_OPERATIONS)
    ends = [inputs + round(count * n / parts) for n in range(parts + 1)]
    for start, stop in itertools.pairwise(ends):
        inside = {number: whole[number] for number in range(start, stop)}
        is_last = stop == ends[-1]
        # Scales are read off outputs, which are complete after the last part only.
        scaling, gives = program.scaling, program.outputs
        if not is_last:
            # A part gives only what a later part or the caller reads; the rest is freed at its end.
            later = set(program.outputs).union(*(whole[n].args for n in range(stop, ends[-1])))
            scaling, gives = {}, tuple(number for number in inside if number in later)
        # The last part may give values that an earlier part computed, without an operation that
        # reads them.
        takes = sorted(set(gives).union(*(op.args for op in inside.values())) - inside.keys())
        shape = program.value_shapes.__getitem__
        yield Program.of(inside, takes, gives, shape, **scaling), takes, gives, is_last


def _settled_problem(problem: Problem, large: int, check: Check) -> Problem:
    """The problem with every term written in its cheapest way.

    Definitions and leaves that only the other ways needed are dropped.
    """
    definitions = [d for stage in problem.stages for d in stage.definitions]
    if not any(term.alternatives for d in definitions for term in d.terms):
        return problem
    shapes = dict(problem.shapes)
    stages = []
    for stage, numbered, known in _numbered_stages(problem, shapes):
        settled = []
        chosen = _cheapest_ways(numbered, known, large, check)
        for d, ways in zip(stage.definitions, chosen, strict=True):
            settled.append(written(d, ways))
            shapes[d.name] = shape_of(d, shapes)
        stages.append(Stage(tuple(settled), stage.scale_groups))
    return prune(dataclasses.replace(problem, stages=tuple(stages)))


def _numbered_stages(
    problem: Problem, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[Stage, Stage, Shapes]]:
    """Each stage, the stage with numbers for names, and the shapes of its inputs.

    Args:
        problem: Problem of the stages.
        shapes: Shapes by name, to which the caller adds those of a stage before the next is asked.
    """
    for stage in problem.stages:
        inputs = names_read(stage.definitions)
        known = tuple(shapes[strip_alias(name)] for name in inputs)
        yield stage, _numbered_stage(stage, inputs), known


def _numbered_stage(stage: Stage, inputs: tuple[str, ...]) -> Stage:
    """The stage with numbers for names; stages that differ in names only become equal."""
    names = {name: f"in{n}" for n, name in enumerate(inputs)}
    names |= {d.name: f"def{n}" for n, d in enumerate(stage.definitions)}
    groups = {g.group: f"group{n}" for n, g in enumerate(stage.scale_groups)}

    def numbered(term: Term) -> Term:
        operands = tuple([Operand(names[o.name], o.indices) for o in term.operands])
        otherwise = tuple([tuple(map(numbered, terms)) for terms in term.alternatives])
        return Term(term.weight, operands, otherwise)

    definitions = []
    for d in stage.definitions:
        powers = tuple((groups[group], power) for group, power in d.powers if group in groups)
        terms = tuple(map(numbered, d.terms))
        definitions.append(dataclasses.replace(d, name=names[d.name], terms=terms, powers=powers))
    scale_groups = []
    for g in stage.scale_groups:
        definition = g.definition and names[g.definition]
        # The degree does not change the program, only how exponents are counted, so it is left out
        # of the key.
        scale_groups.append(g._replace(group=groups[g.group], degree=0, definition=definition))
    return Stage(tuple(definitions), tuple(scale_groups))


def _cheapest_ways(stage: Stage, shapes: Shapes, large: int, check: Check) -> tuple[Choices, ...]:
    """The cheapest way of every term of a numbered stage, from the caches or newly searched."""
    key = ("ways", stage, shapes, large)
    search = partial(choose_alternatives, stage, shapes, large)
    ways, _ = _kept(key, check, search, list, lambda data: _ways_of_stage(data, stage))
    return ways


def _kept(
    key: tuple[Hashable, ...],
    check: Check,
    search: Callable[[], T],
    encode: Callable[[T], Any],
    decode: Callable[[Any], T],
) -> tuple[T, str]:
    """A result from the caches, or newly searched after a check, and the searcher.

    Results of an optimiser of the caller are not kept: another call may come with another.
    """

    def searched() -> T:
        check()
        return search()

    if (name := paths.callers_searcher()) is not None:
        return searched(), name
    # By its digest in memory as well: a stage of attention has as many objects as its program.
    text = disk_cache.text_of(*key)
    return session().results.get(
        (_kept, disk_cache.digest(text)),
        lambda: disk_cache.kept(
            text, searched, encode=encode, decode=decode, searcher=paths.version()
        ),
    )


def _ways_of_stage(data: Any, stage: Stage) -> tuple[Choices, ...]:
    """The ways of a stage from parsed JSON."""
    pairs = zip(data, stage.definitions, strict=True)
    return tuple(_ways_from_data(ways, definition.terms) for ways, definition in pairs)


def _ways_from_data(data: Any, terms: Sequence[Term]) -> Choices:
    """The ways of a sum from parsed JSON. Raises `ValueError` unless every term has its way."""
    ways = []
    for (number, inner), term in zip(data, terms, strict=True):
        if type(number) is not int or not 0 <= number <= len(term.alternatives):
            raise ValueError(f"a term has no way {number!r}")
        chosen = term.alternatives[number - 1] if number else ()
        ways.append((number, _ways_from_data(inner, chosen)))
    return tuple(ways)


def _stage_program(
    stage: Stage, shapes: Shapes, exchangeable: tuple[int, ...], large: int, check: Check
) -> tuple[Program, str]:
    """The program of a numbered stage, from the caches or newly searched, and its searcher."""
    key = ("program", stage, shapes, exchangeable, large)
    search = partial(build_program, stage, shapes, exchangeable, large)
    return _kept(key, check, search, program_data, lambda data: _program_for(data, stage, shapes))


def _program_for(data: Any, stage: Stage, shapes: Shapes) -> Program:
    """A program from parsed JSON. Raises `ValueError` unless its shapes fit this stage."""
    program = program_from_data(data)
    known = {f"in{n}": shape for n, shape in enumerate(shapes)}
    for definition in stage.definitions:
        known[definition.name] = shape_of(definition, known)
    expected = tuple(known[definition.name] for definition in stage.outputs)
    given = tuple(program.value_shapes[value] for value in program.outputs)
    groups = [group for group in stage.scale_groups if group.definition is not None]
    if program.shapes != shapes or given != expected or len(program.scales) != len(groups):
        raise ValueError("the program of another stage")
    return program


@checked
@dataclass(frozen=True)
class Budget:
    """Limits of memory and work for a single plan with all its runs.

    A plan beyond the budget raises `TooLarge` before anything runs.

    Args:
        memory_bytes: Bytes of arrays in addition to the models; imported libraries and compiling
            come on top, see the page of limits. None stands for 80 % of free
            memory, less the memory of compiling. Free memory is that of the device; on a CPU, the
            least of the machine's, the control groups' and the address space's.
        multiplications: Scalar multiplications; 1e14 take about an hour on two cores.

    Raises:
        ModelError: A limit is not above 0.

    Example:
        >>> Budget(memory_bytes=2**30).room(0)
        1073741824
    """

    memory_bytes: float | None = None
    multiplications: float = 1e14

    def __post_init__(self) -> None:
        for name, limit in vars(self).items():
            if limit is not None and not limit > 0:
                raise ModelError(f"{name} of a Budget must be above 0, found {limit!r}")

    def room(self, program_bytes: int, wanted: float = math.inf) -> float:
        """Bytes of arrays allowed now; infinite where the platform does not tell free memory.

        Where `wanted` is next to nothing, free memory is not looked up: the look-up would take
        longer than the computation.

        Args:
            program_bytes: Bytes that compiling takes.
            wanted: Bytes of arrays that would be used.
        """
        if self.memory_bytes is not None:
            return self.memory_bytes
        if wanted <= _ALWAYS_FITS:
            return math.inf
        free = devices.available_bytes(compiles=program_bytes > 0)
        return math.inf if free is None else max(0.0, FREE_SHARE * free - program_bytes)


class _Needed(NamedTuple):
    """Bytes that a plan needs in its tier: of arrays, and of compiling."""

    arrays: int
    programs: int


def _needed_bytes(plan: Plan) -> _Needed:
    """The bytes that a plan needs. Raises `TooLarge` where it cannot be compiled but has to be."""
    if tier_in_use() == "interpret":
        return _Needed(plan.interpreted_bytes, 0)
    devices.check_addresses()
    return _Needed(plan.peak_bytes, plan.program_bytes)


def check_pullbacks(pullbacks: Sequence[Pullback], budget: Budget, name: str, advice: str) -> None:
    """Refuse derivatives beyond a budget.

    All plans run first, and what their pullbacks read is kept until these run.

    Args:
        pullbacks: Pullback of each run of a plan.
        budget: Limits of all runs together.
        name: Name of the metric, the beginning of the message.
        advice: Advice where the derivatives do not fit, the end of the message.

    Raises:
        TooLarge: The derivatives take more memory or more multiplications than the budget has.
    """
    # A plan counts all its runs, and here each run has a pullback of its own.
    work = sum(p.forward.multiplications / p.forward.runs + p.multiplications for p in pullbacks)
    if work > budget.multiplications:
        raise TooLarge(
            f"{name} with its gradients needs {work:.3g} multiplications here, more than the "
            f"budget of {budget.multiplications:.3g}; {advice}"
        )
    kept = sum(pullback.kept_bytes for pullback in pullbacks)
    each = [_needed_bytes(pullback.forward) for pullback in pullbacks]
    back = [pullback.own_bytes for pullback in pullbacks]
    arrays = kept + max([memory.arrays for memory in each] + back, default=0)
    allowed = budget.room(max((memory.programs for memory in each), default=0), arrays)
    if arrays > allowed:
        raise TooLarge(
            f"{name} with its gradients needs {arrays / 2**30:.3g} GiB here, of which the way back "
            f"keeps {kept / 2**30:.3g} GiB, and the budget is {allowed / 2**30:.3g} GiB; {advice}"
        )


class PlanAt(Protocol):
    """A function that plans a computation in chunks."""

    def __call__(self, *, large: int, limit: float) -> Plan:
        """The plan.

        Args:
            large: Elements beyond which an intermediate is computed in chunks.
            limit: Multiplications beyond which planning may end with `BeyondLimit`.
        """
        ...


def within(budget: Budget, name: str, plan_at: PlanAt, advice: str) -> Plan:
    """A plan within the budget, its largest contractions in smaller chunks if need be.

    Args:
        budget: Limits of the plan.
        name: Name of the metric or of the sum, the beginning of the message.
        plan_at: Function that plans.
        advice: Advice where no plan fits, the end of the message.

    Returns:
        The plan with the largest chunks that fits.

    Raises:
        TooLarge: No plan fits, or the process has too little address space to compile a plan.
    """
    limit = budget.multiplications

    def planned(large: int) -> Plan:
        # The search is told the limit and gives up early; the plan found is compared with it once
        # more. In smaller chunks it may take more work, as turns compute some values again.
        try:
            plan = plan_at(large=large, limit=limit)
        except BeyondLimit as beyond:
            raise TooLarge(
                f"{name} needs at least {beyond.least:.3g} multiplications here, more than the "
                f"budget of {limit:.3g}; {advice}"
            ) from None
        if plan.multiplications > limit:
            raise TooLarge(
                f"{name} needs {plan.multiplications:.3g} multiplications here, "
                f"more than the budget of {limit:.3g}, and would run about "
                f"{seconds_of(plan):.2g} s in NumPy; {advice}"
            )
        return plan

    best = planned(LARGE)
    needed = _needed_bytes(best)
    allowed = budget.room(needed.programs, needed.arrays)
    if needed.arrays > allowed:  # arrays that other calls left give way
        session().belongings.clear()
        devices.give_back_freed()
        allowed = budget.room(needed.programs, needed.arrays)
    least = needed.arrays
    # Chunks a quarter as large each time; LARGE / 4, / 16, / 64, / 256.
    for finer in range(2, 10, 2):
        if needed.arrays <= allowed or best.input_bytes > allowed:
            break  # it fits already, or never will: chunks make no input smaller
        best = planned(LARGE >> finer)
        needed = _needed_bytes(best)
        least = min(least, needed.arrays)
    if needed.arrays <= allowed:
        return best
    compiling = f"{needed.programs / 2**30:.3g} GiB for compiling"
    share = f" ({FREE_SHARE:.0%} of free memory less {compiling})"
    raise TooLarge(
        f"{name} needs {least / 2**30:.3g} GiB here, and the budget is "
        f"{allowed / 2**30:.3g} GiB{share if budget.memory_bytes is None else ''}; {advice}"
    )
