"""The contractions of a plan, to be looked at: as a table of einsum steps, and as cotengra's trees.

A plan shares equal intermediates between diagrams and adds up what has a common factor, so as a
whole it is a directed graph. What is a tree is the product behind a step, down to the arrays that
its stage reads and to sums and loops.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from tnsim.engine.ir.program import Operation
from tnsim.engine.ir.stages import Schedule
from tnsim.errors import ModelError

if TYPE_CHECKING:
    from cotengra import ContractionTree


class PathStep(NamedTuple):
    """A step of a plan.

    Args:
        stage: Number of the stage.
        kind: "contract", "sum" or "loop"; a loop sums an equation in blocks.
        inputs: Names of the arrays that are read: arrays of the plan, or `#n`, the result of step
            n.
        output: Name of the array that is written.
        equation: The step in the notation of einsum, with names of indices parted by spaces where
            letters do not suffice.
        multiplications: Scalar multiplications.
    """

    stage: int
    kind: str
    inputs: tuple[str, ...]
    output: str
    equation: str
    multiplications: int


class ContractionPath(tuple[PathStep, ...]):
    """The steps of a plan in the order in which they run; printed as a table."""

    def __str__(self) -> str:
        rows = [("step", "stage", "multiplications", "equation", "arrays")]
        for n, step in enumerate(self):
            arrays = f"{', '.join(step.inputs)} -> {step.output}"
            equation = step.equation if step.kind == "contract" else f"{step.kind} {step.equation}"
            rows.append((str(n), str(step.stage), f"{step.multiplications:,}", equation, arrays))
        widths = [max(len(row[n]) for row in rows) for n in range(5)]
        return "\n".join(
            f"{a:>{widths[0]}} {b:>{widths[1]}} {c:>{widths[2]}}  {d:<{widths[3]}}  {e}"
            for a, b, c, d, e in rows
        )


class _Value(NamedTuple):
    """A value of a stage: an array of the plan, or the result of a step.

    Args:
        name: Name in the path.
        shape: Shape of the array.
        operation: Operation that gives it, with its arguments; None of an array of the plan.
        arguments: Values of these arguments.
    """

    name: str
    shape: tuple[int, ...]
    operation: Operation | None = None
    arguments: tuple[_Value, ...] = ()


def path_of(plan: Schedule) -> ContractionPath:
    """The steps of a plan.

    Args:
        plan: Plan to be shown.

    Example:
        >>> import numpy as np, tnsim
        >>> line = tnsim.Model([tnsim.Linear(np.ones((3, 2)))])
        >>> print(path_of(tnsim.plan(line, line).contraction))
        step stage multiplications  equation  arrays
           0     0               6  ab,ab->   A.LAYER0.WEIGHT, B.LAYER0.WEIGHT -> AB
    """
    return ContractionPath(step for step, _ in _steps(plan))


def tree_of(plan: Schedule, step: int | None = None) -> ContractionTree:
    """The tree of contractions behind a step of a plan.

    Args:
        plan: Plan to be shown.
        step: Number of the step in `path_of`; by default the last one of the most multiplications.

    Returns:
        A tree of cotengra, with its costs and drawings. Its leaves are arrays that the stage reads,
        sums and loops, each as often as it is read.

    Raises:
        ModelError: There is no such step, or it is a sum or a loop.

    Example:
        >>> import numpy as np, tnsim
        >>> square = tnsim.Model([tnsim.Bilinear(*[np.ones((3, 3))] * 3)])
        >>> tree_of(tnsim.plan(square, square).contraction, 8).N > 2
        True
    """
    return _product(plan, step)[1]


def _product(plan: Schedule, step: int | None) -> tuple[list[str], ContractionTree]:
    """The names of the leaves of a tree, and the tree, see `tree_of`."""
    from cotengra import ContractionTree, get_symbol

    steps = list(_steps(plan))
    products = [n for n, (found, _) in enumerate(steps) if found.kind == "contract"]
    if step is None and products:
        step = max(products, key=lambda n: (steps[n][0].multiplications, n))
    if step not in products:
        raise ModelError(
            f"the tree of a product is asked for, and step {step} is none of the "
            f"{len(products)} products of the plan: print(plan.path) lists the steps"
        )
    leaves: list[str] = []
    inputs: list[tuple[str, ...]] = []
    sizes: dict[str, int] = {}
    pairs: list[tuple[int, ...]] = []
    fresh = map(get_symbol, itertools.count())

    def visit(value: _Value, indices: tuple[str, ...]) -> int:
        """The place of a value among the leaves from 0, among the products from -1 downwards."""
        sizes.update(zip(indices, value.shape, strict=True))
        operation = value.operation
        if operation is None or operation.kind != "contract":
            leaves.append(value.name)
            inputs.append(indices)
            return len(inputs) - 1
        names = dict(zip(operation.output, indices, strict=True))
        for labels in operation.labels:
            for label in labels:
                if label not in names:
                    names[label] = next(fresh)
        places = []
        for argument, labels in zip(value.arguments, operation.labels, strict=True):
            places.append(visit(argument, tuple(names[label] for label in labels)))
        if len(places) == 1:
            return places[0]  # an index may as well be summed later
        pairs.append(tuple(places))
        return -len(pairs)

    value = steps[step][1]
    output = tuple(next(fresh) for _ in value.shape)
    visit(value, output)

    # Products come behind the leaves, whose number is known by now.
    ssa_path = [tuple(n if n >= 0 else len(inputs) - 1 - n for n in pair) for pair in pairs]
    tree = ContractionTree.from_path(inputs, output, sizes, ssa_path=ssa_path)
    return leaves, tree


def _steps(plan: Schedule) -> Iterator[tuple[PathStep, _Value]]:
    """The steps of a plan, each with the value that it gives."""
    known = {name: _Value(name, shape) for name, shape in plan.shapes.items()}
    count = itertools.count()
    for number, stage in enumerate(plan.stages):
        program = plan.programs[stage.program]
        values = [known[name] for name in stage.inputs]
        names = dict(zip(program.outputs, stage.outputs, strict=True))
        for operation, cost in zip(program.operations, program.costs, strict=True):
            n, at = next(count), len(values)
            arguments = tuple(values[arg] for arg in operation.args)
            name = names.get(at, f"#{n}")
            shape = program.value_shapes[at]
            values.append(_Value(name, shape, operation, arguments))
            read = tuple(argument.name for argument in arguments)
            equation = _equation(operation)
            yield PathStep(number, operation.kind, read, name, equation, cost), values[-1]
        # Later stages may read an output divided by its scale, so it is an array of its own; an
        # array that is only divided keeps its name.
        for value, name in zip(program.outputs, stage.outputs, strict=True):
            known[name] = values[value]._replace(operation=None, arguments=())


def _equation(operation: Operation) -> str:
    """An operation in the notation of einsum."""
    labels = list(dict.fromkeys(itertools.chain(*operation.labels, operation.output)))
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    if len(labels) <= len(letters):
        names, between = dict(zip(labels, letters, strict=False)), ""
    else:
        names, between = {label: f"i{n}" for n, label in enumerate(labels)}, " "
    terms = [between.join(names[label] for label in term) for term in operation.labels]
    return f"{','.join(terms)}->{between.join(names[label] for label in operation.output)}"
