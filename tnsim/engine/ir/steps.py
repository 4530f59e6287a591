"""A program as steps on views of a single stretch of memory: the form in which NumPy interprets it.

A step is a call of NumPy: a batch of matrix products, a product or a sum entry by entry, a sum
over axes, a copy, or a loop over further steps. A step reads and writes *views*, a shape
with strides on the memory of a value, so that a program is analysed once, from shapes alone, and
run by binding its views to memory and calling its steps in order.

**Orders.** The axes of a value stand in memory in an order of the value's own, which need not be
the order of its labels. An operation that only permutes axes or takes a diagonal is therefore no
step, but another view of the same memory. A product leaves its result in the order that costs the
product least. A sum asks its terms for the order in which the sum itself is wanted, so that all of
them are read from end to end. Outputs of a program stand in the order of their labels.

**Matrix products.** Labels that only a single argument has may be rows or columns of the matrices,
or join the batch, where the other argument is repeated with a stride of zero instead of being
copied. Labels that are summed over must be neighbours in both arguments. An argument is copied into
another order only where a model of the seconds of each choice says so. The model's constants are
fixed, so that equal programs have equal steps, and equal bits, on all machines.

**Memory.** Values live from the step that writes them to the last step that reads them. Values
that do not live at the same time share memory, and a sum or a product entry by entry takes over the
memory of an argument that it reads for the last time. `room` is the memory of all values together,
exactly: nothing else is allocated while steps run, but the outputs.

**Parts.** Steps of much work are cut into parts that may run at once, by size alone and never by
the number of threads: a result has the same bits however many threads there are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from tnsim.engine.ir.program import Operation, Program, n_iterations

Kind = Literal["matmul", "multiply", "add", "subtract", "scale", "copy", "reduce", "einsum", "loop"]
Labels = tuple[int, ...]
Sizes = Mapping[int, int]
Strides = dict[int, int]
"""Stride of each label of more than one value, in elements."""


class Speeds(NamedTuple):
    """Times of NumPy on a single core, for a single dtype.

    Attributes:
        call: Seconds of a call beside its work.
        product: Seconds of a single matrix product of a batch beside its work.
        multiplying: Scalar multiplications a second in a large matrix product.
        passing: Entries a second that are read and written, entry by entry.
    """

    call: float
    product: float
    multiplying: float
    passing: float


USUAL = {
    4: Speeds(1.2e-6, 2.5e-7, 5e10, 1.2e9),
    8: Speeds(1.2e-6, 2.5e-7, 2.5e10, 1e9),
    16: Speeds(1.2e-6, 4e-7, 6e9, 5e8),
}
"""Speeds that choices between equal steps are made by, for each number of bytes of an element."""


_UNLIKE = 0.7  # seconds of a result in an unwanted order, as a share of those of a copy
_RUN = 8e-9  # seconds of beginning a run of neighbouring entries
_PART = 2**22  # multiplications of a part of a matrix product, a fifth of a millisecond
_PART_ENTRIES = 2**18  # entries of a part of a step entry by entry
_MOST_PARTS = 8
_SHARED = 2.5e-4  # seconds of a step, on a single core, that repay waking threads for its parts
_BLOCK = 64  # rows or columns of a matrix that are not cut apart
_LINE = 64  # bytes of a line of the cache


class View(NamedTuple):
    """A shape with strides on the memory of a value.

    Attributes:
        value: Number of the value among those of the steps.
        start: First byte, counted from the beginning of the value.
        shape: Sizes of the axes.
        strides: Bytes between neighbours along each axis; zero where an axis is repeated.
    """

    value: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Turns(NamedTuple):
    """A loop: steps that run once for each value of some indices, and are added up.

    Attributes:
        body: Steps of a turn.
        moves: For each input of the body the bytes by which it moves along each of the indices.
        sizes: Sizes of the indices, the first running slowest.
        count: Number of turns.
        lanes: Number of sums over turns that are taken side by side and added up in order. Lane n
            takes the turns n, n + lanes, n + 2 lanes, ...
        lane_bytes: Bytes of a lane: the room of the body, and a sum.
        place: First byte of the lanes in the room of the steps.
    """

    body: Steps
    moves: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    count: int
    lanes: int
    lane_bytes: int
    place: int = 0


class Step(NamedTuple):
    """A call of NumPy, or a loop.

    Attributes:
        kind: "matmul", "multiply", "add", "subtract": two views are read. "scale": a view times
            `weight`. "copy": a view as it is. "reduce": a view summed over its last `axes` axes.
            "einsum": two views multiplied entry by entry, summed likewise. "loop": `turns`.
        reads: Views that are read.
        writes: View that is written.
        weight: Factor of "scale".
        axes: Number of axes that are summed over.
        turns: The loop, where the step is a loop.
        parts: Views of steps that may run at once in place of this step.
    """

    kind: Kind
    reads: tuple[View, ...]
    writes: View
    weight: float = 1.0
    axes: int = 0
    turns: Turns | None = None
    parts: tuple[tuple[View, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class Steps:
    """A program as steps.

    Args:
        steps: Steps in the order in which they run.
        inputs: Number of inputs, which are the first values.
        outputs: View of each output, in the order of the program's outputs.
        sizes: Number of elements of each value.
        places: First byte of each value in the room; absent for inputs, and for outputs with
            memory of their own.
        room: Bytes of all values that are neither inputs nor outputs with memory of their own.
        item: Bytes of an element.
    """

    steps: tuple[Step, ...]
    inputs: int
    outputs: tuple[View, ...]
    sizes: tuple[int, ...]
    places: Mapping[int, int]
    room: int
    item: int

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of the outputs that have memory of their own."""
        own = {view.value for view in self.outputs if view.value >= self.inputs}
        return sum(self.sizes[value] * self.item for value in own - self.places.keys())

    @cached_property
    def calls(self) -> int:
        """Number of calls of NumPy, in all turns of loops."""
        return sum(
            max(1, len(step.parts))
            if step.turns is None
            else step.turns.count * step.turns.body.calls
            for step in self.steps
        )

    def seconds(self, speeds: Speeds, threads: int = 1) -> float:
        """Seconds of all steps.

        Args:
            speeds: Speeds of a single core.
            threads: Number of threads that share the lanes of loops and the parts of large steps.
        """
        total = 0.0
        for step in self.steps:
            is_alone = threads > 1 and step.turns is None and not self.is_shared(step)
            total += _step_seconds(step, speeds, 1 if is_alone else threads)
        return total

    def is_shared(self, step: Step) -> bool:
        """Whether several threads share the parts of a step: shorter steps do not repay waking."""
        return bool(step.parts) and self.step_seconds(step) > _SHARED

    def step_seconds(self, step: Step) -> float:
        """Seconds of a step at usual speeds, on a single core."""
        return _step_seconds(step, USUAL[self.item], 1)

    @cached_property
    def usual_seconds(self) -> float:
        """Seconds of all steps at usual speeds, on a single core."""
        return self.seconds(USUAL[self.item])


def steps_of(program: Program, item: int) -> Steps:
    """The steps of a program.

    Args:
        program: Program on arrays whose axes stand in the order of their labels.
        item: Bytes of an element of the arrays.

    Example:
        >>> product = Operation("contract", (0, 1), ((0, 1), (1, 2)), (0, 2))
        >>> steps = steps_of(Program(((4, 3), (3, 5)), (product,), (2,)), 8)
        >>> [step.kind for step in steps.steps], steps.output_bytes, steps.room
        (['matmul'], 160, 0)
    """
    strides = []
    for shape in program.shapes:
        # Axes stand in for labels: arrays that come from outside are contiguous in the order of
        # their axes.
        sizes = dict(enumerate(shape))
        in_order = _in_order(sizes, sizes)
        strides.append(tuple(in_order[axis] for axis in sizes))
    wanted = [tuple(range(len(program.value_shapes[n]))) for n in program.outputs]
    return _Analysis(program, strides, wanted, item, is_body=False).steps()


def _step_seconds(step: Step, speeds: Speeds, threads: int) -> float:
    """Seconds of a step."""
    if step.turns is not None:
        lanes = min(step.turns.lanes, threads)
        # All turns cost alike. The sum at the end of a turn is left out: it is small beside the
        # turn.
        return step.turns.count * step.turns.body.seconds(speeds) / lanes
    shape = step.writes.shape
    if step.kind == "matmul":
        k = step.reads[0].shape[-1]
        seconds = matmul_seconds(math.prod(shape[:-2]), shape[-2], shape[-1], k, speeds)
    elif step.kind == "einsum":
        # Each argument has all axes, kept and summed; along a label that it lacks it has stride 0.
        seconds = _by_entries(math.prod(step.reads[0].shape), speeds)
    else:
        seconds = speeds.call + math.prod(step.reads[0].shape) / speeds.passing
    # Parts are of equal size, so more threads than parts gain nothing.
    return seconds / min(max(1, len(step.parts)), threads)


def matmul_seconds(batch: int, m: int, n: int, k: int, speeds: Speeds) -> float:
    """Seconds of a batch of matrix products: short sides leave registers unused."""
    slowed = (1 + 2 / m) * (1 + 2 / n) * (1 + 2 / k)
    return speeds.call + batch * (speeds.product + m * n * k * slowed / speeds.multiplying)


def _by_entries(entries: int, speeds: Speeds) -> float:
    """Seconds of a contraction entry by entry."""
    return 3 * speeds.call + 2 * entries / speeds.passing


def _values_of(labels: Iterable[int], sizes: Sizes) -> int:
    """The number of values of some labels together."""
    return math.prod(sizes[label] for label in labels)


def _in_order(order: Iterable[int], sizes: Sizes) -> Strides:
    """The stride of each label of an array with labels in an order, in elements."""
    strides: Strides = {}
    step = 1
    for label in reversed(tuple(order)):
        strides[label] = step
        step *= sizes[label]
    return strides


def _stride_order(strides: Strides) -> Labels:
    """Labels from the largest stride to the smallest."""
    return tuple(sorted(strides, key=lambda label: -strides[label]))


def _is_one_axis(group: Labels, strides: Strides, sizes: Sizes) -> bool:
    """Whether a group of labels can be read as a single axis."""
    # Labels merge into one axis where a step along a label spans all values of the next label.
    pairs = itertools.pairwise(group)
    return all(strides[one] == strides[other] * sizes[other] for one, other in pairs)


def _axis_runs(strides: Strides, chosen: Sequence[int], sizes: Sizes) -> list[Labels]:
    """Longest runs of chosen labels, neighbours in memory, that can be read as a single axis."""
    runs: list[Labels] = []
    # Labels that are not chosen cut the order into runs; within a run, neighbours merge where their
    # strides allow.
    for is_chosen, run in itertools.groupby(
        _stride_order(strides), key=lambda label: label in chosen
    ):
        for label in run if is_chosen else ():
            if runs and _is_one_axis((runs[-1][-1], label), strides, sizes):
                runs[-1] = (*runs[-1], label)
            else:
                runs.append((label,))
    return runs


def _merged_axes(
    order: Sequence[int], several: Sequence[Strides], sizes: Sizes
) -> list[tuple[int, tuple[int, ...]]]:
    """Axes (size, stride for each of several arrays) in an order; an absent label has stride 0.

    Neighbours that are a single axis in all arrays are merged.
    """
    merged: list[tuple[int, tuple[int, ...]]] = []
    for label in order:
        size, steps = sizes[label], tuple(strides.get(label, 0) for strides in several)
        # The outer axis steps over the whole inner axis in every array, so both together are one
        # longer axis. An axis that all arrays lack has stride 0 everywhere, and merges likewise.
        if merged and merged[-1][1] == tuple(size * step for step in steps):
            size *= merged.pop()[0]
        merged.append((size, steps))
    return merged


def _result_order(want: Labels, rows: Labels, columns: Labels, sizes: Sizes) -> Labels:
    """The order of a product of matrices: as wanted, where BLAS can write it, else batch first."""
    # BLAS writes a matrix whose rows and columns are a single axis each, with entries that stand
    # side by side along one of them: a stride of 1 belongs to the last row label or to the last
    # column label.
    strides = _in_order(want, sizes)
    written = all(_is_one_axis(group, strides, sizes) for group in (rows, columns))
    last = [strides[group[-1]] for group in (rows, columns) if group]
    if written and (len(last) < 2 or 1 in last):
        return want
    batch = (label for label in want if label not in rows and label not in columns)
    return (*batch, *rows, *columns)


def _entry_parts(views: Sequence[View]) -> tuple[tuple[View, ...], ...]:
    """The views, the last of them written, cut into parts along its longest axis."""
    shape = views[-1].shape
    # The cut depends on sizes alone, so the parts, and with them the order of all sums, are the
    # same on every machine.
    count = min(_MOST_PARTS, math.prod(views[0].shape) // _PART_ENTRIES)
    if count < 2 or not shape or max(shape) < count:
        return ()
    axis = shape.index(max(shape))
    cuts = [n * shape[axis] // count for n in range(count + 1)]
    return tuple(
        tuple(_cut_view(view, axis, one, other) for view in views)
        for one, other in itertools.pairwise(cuts)
    )


def _product_parts(x: View, y: View, z: View) -> tuple[tuple[View, ...], ...]:
    """The views of a matrix product cut into parts, between matrices or else within them."""
    *batch, m, n = z.shape
    # Scalar multiplications of the whole step over those of a part.
    count = min(_MOST_PARTS, math.prod(z.shape) * x.shape[-1] // _PART)
    if count < 2:
        return ()
    # Whole matrices are dealt out where there are enough of them; otherwise the longer side of the
    # matrices is cut, in steps of whole blocks of BLAS. Rows are cut in x and z, columns in y and
    # z, so no sum is ever cut.
    if batch and max(batch) >= count:
        axis, step = batch.index(max(batch)), 1
    else:
        axis, step = len(batch) + (n > m), _BLOCK
    blocks = z.shape[axis] // step
    count = min(count, blocks)
    # The last part takes the rest that fills no block.
    cuts = [step * (part * blocks // count) for part in range(count)] + [z.shape[axis]]
    parts = []
    for one, other in itertools.pairwise(cuts) if count > 1 else ():
        first = x if axis == len(batch) + 1 else _cut_view(x, axis, one, other)
        second = y if axis == len(batch) else _cut_view(y, axis, one, other)
        parts.append((first, second, _cut_view(z, axis, one, other)))
    return tuple(parts)


def _cut_view(view: View, axis: int, start: int, stop: int) -> View:
    """A view of some entries along an axis."""
    shape = (*view.shape[:axis], stop - start, *view.shape[axis + 1 :])
    return view._replace(start=view.start + start * view.strides[axis], shape=shape)


def _whole_lines(size: int) -> int:
    """Bytes rounded up to lines of the cache, where values begin."""
    return -(-size // _LINE) * _LINE


class _Argument(NamedTuple):
    """A value of the steps, with the stride of each label of several values in elements."""

    number: int
    strides: Strides


class _Reading(NamedTuple):
    """A way to read an argument of a matrix product.

    Attributes:
        rows: Labels of the argument alone that become rows, or columns.
        copy: Order of labels to which the argument is copied; None where it is read as it is.
        seconds: Seconds of the copy.
    """

    rows: Labels
    copy: Labels | None
    seconds: float


class _Product(NamedTuple):
    """A batch of matrix products: how the arguments are read, and how the result stands."""

    seconds: float
    first: _Reading
    second: _Reading
    summed: Labels
    order: Labels


class _Value(NamedTuple):
    """A value of the program: a view of a value of the steps, with a stride for each axis."""

    number: int
    strides: tuple[int, ...]


class _Analysis:
    """The steps of a program, put together operation by operation."""

    def __init__(
        self,
        program: Program,
        strides: Sequence[tuple[int, ...]],
        wanted: Sequence[Labels],
        item: int,
        is_body: bool,
    ) -> None:
        self.program, self.item, self.speeds = program, item, USUAL[item]
        self.is_body = is_body
        self.found: list[Step] = []
        self.sizes = [math.prod(shape) for shape in program.shapes]
        self.values = [_Value(n, own) for n, own in enumerate(strides)]
        # Key: the value, how its labels lie in it, and the order they are copied to.
        self.copies: dict[tuple[int, tuple[tuple[int, int], ...], Labels], _Argument] = {}
        self.wanted = self._wanted_orders(wanted)
        for number, operation in enumerate(program.operations, len(program.shapes)):
            self._add_operation(number, operation)
        self.outputs = [self._output_view(n) for n in program.outputs]

    def _wanted_orders(self, outputs: Sequence[Labels]) -> list[Labels]:
        """For each value the order of its axes in memory that its readers would have."""
        # Each value is wanted in the order of its labels, unless a reader says otherwise.
        orders = [tuple(range(len(shape))) for shape in self.program.value_shapes]
        for number, order in zip(self.program.outputs, outputs, strict=True):
            orders[number] = order
        first = len(self.program.shapes)
        # From the outputs back to the inputs, so that a sum knows its own order before it passes
        # the order on to its terms. Products are not asked: they choose by cost, and a term that is
        # an input stands as it stands.
        for number in reversed(range(first, len(orders))):
            operation = self.program.operations[number - first]
            if operation.kind == "sum":
                order = [operation.output[axis] for axis in orders[number]]
                for a, labels in zip(operation.args, operation.labels, strict=True):
                    if a >= first:
                        orders[a] = tuple(labels.index(x) for x in order if x in labels)
        return orders

    def _write_step(
        self,
        kind: Kind,
        reads: Sequence[_Argument],
        to: _Argument,
        order: Labels,
        sizes: Sizes,
        weight: float = 1.0,
        summed: Labels = (),
    ) -> None:
        """Append a step entry by entry, with neighbouring axes merged."""
        # An argument that lacks a label has stride 0 along it, which repeats the argument without a
        # copy. The summed axes come last; the written view lacks them.
        every = [strides for _, strides in (*reads, to)]
        kept, gone = _merged_axes(order, every, sizes), _merged_axes(summed, every, sizes)
        views = []
        for place, (number, _) in enumerate((*reads, to)):
            axes = kept if place == len(reads) else kept + gone
            views.append(self._view_of(number, [(size, steps[place]) for size, steps in axes]))
        *read, written = views
        parts = _entry_parts(views)
        self.found.append(Step(kind, tuple(read), written, weight, len(gone), None, parts))

    def _ordered_copy(self, argument: _Argument, order: Labels, sizes: Sizes) -> _Argument:
        """A copy with its labels in an order; equal copies are made once."""
        number, strides = argument
        key = (number, tuple(sorted(strides.items())), order)
        if key not in self.copies:
            copy = self._new_value(order, sizes)
            self._write_step("copy", [argument], copy, order, sizes)
            self.copies[key] = copy
        return self.copies[key]

    # Operations.

    def _add_operation(self, number: int, operation: Operation) -> None:
        """Append the steps of an operation, and its value."""
        sizes = operation.sizes(self.program.value_shapes)
        if operation.kind == "loop":
            self.values.append(self._append_loop(number, operation, sizes))
            return
        # Labels of size 1 have no stride: they neither order entries nor cost anything, so all
        # analysis leaves them out, and views add them again.
        in_order = [operation.output[axis] for axis in self.wanted[number]]
        want = tuple(label for label in in_order if sizes[label] > 1)
        arguments = []
        for a, labels in zip(operation.args, operation.labels, strict=True):
            arguments.append(self._labelled_view(a, labels, sizes))
        if operation.kind == "sum":
            result = self._weighted_sum(operation.weights, arguments, want, sizes)
        elif len(arguments) == 1:
            result = self._reduced_value(arguments[0], want, sizes)
        elif any(label not in want for label in arguments[0].strides):
            # A label of the first argument that the result lacks is summed over. A label of the
            # second argument alone is never summed here: programs sum such labels beforehand.
            result = self._contracted_value(arguments[0], arguments[1], want, sizes)
        else:
            order = self._entry_order(arguments, want, sizes)
            result = self._new_value(order, sizes)
            self._write_step("multiply", arguments, result, order, sizes)
        # A label without a stride has size 1, where any stride will do.
        strides = (result.strides.get(label, 0) for label in operation.output)
        self.values.append(_Value(result.number, tuple(strides)))

    def _reduced_value(self, argument: _Argument, want: Labels, sizes: Sizes) -> _Argument:
        """A value summed over labels that the output lacks; without any, another view of it."""
        summed = tuple(label for label in _stride_order(argument.strides) if label not in want)
        if not summed:
            return argument
        result = self._new_value(want, sizes)
        self._write_step("reduce", [argument], result, want, sizes, summed=summed)
        return result

    def _entry_order(self, arguments: Sequence[_Argument], want: Labels, sizes: Sizes) -> Labels:
        """The order of a result computed entry by entry that is read and written fastest."""
        # Candidates: the wanted order, and the order of each argument with missing labels in front,
        # so that the inner loop runs along memory of that argument.
        orders = {want: None}
        for _, strides in arguments:
            missing = (label for label in want if label not in strides)
            orders[(*missing, *_stride_order(strides))] = None
        if len(orders) == 1:
            return want
        entries = _values_of(want, sizes)

        def seconds(order: Labels) -> float:
            out = _in_order(order, sizes)
            # A result in another order makes a later reader slower or copies it, on average at a
            # share of a copy.
            total = 0.0 if order == want else _UNLIKE * entries / self.speeds.passing
            for _, strides in arguments:
                # The innermost run of merged axes: how long it is, and whether the argument is read
                # in it without gaps (stride 1) or is one number (stride 0). Strided reading takes
                # about three times as long.
                size, (step, _) = _merged_axes(order, [strides, out], sizes)[-1]
                slow = 1.0 if step in (0, 1) else 3.0
                total += entries * (slow / self.speeds.passing + _RUN / size) / len(arguments)
            return total

        return min(orders, key=seconds)

    def _weighted_sum(
        self, weights: Sequence[float], arguments: Sequence[_Argument], want: Labels, sizes: Sizes
    ) -> _Argument:
        """A weighted sum: terms of equal absolute weight are added up before they are weighted."""
        # A sum of one term of weight 1 with all labels of the result is another view of the term.
        if list(weights) == [1.0] and len(arguments[0].strides) == len(want):
            return arguments[0]
        order = self._entry_order(arguments, want, sizes)
        result = self._new_value(order, sizes)
        # Absolute weight -> terms with a flag whether the weight is negative. Terms of one absolute
        # weight need one multiplication together.
        of_weight: dict[float, list[tuple[bool, _Argument]]] = {}
        for weight, argument in zip(weights, arguments, strict=True):
            of_weight.setdefault(abs(weight), []).append((weight < 0, argument))
        is_first = True
        # Weight 1 comes last, since its terms are added to a total that exists already, without a
        # value of their own.
        for weight in sorted(of_weight, key=lambda weight: weight == 1.0):
            terms = sorted(of_weight[weight], key=lambda term: term[0])  # negative ones at the end
            if is_first:
                self._weighted_terms(weight, terms, result, order, sizes)
            elif weight == 1.0:
                for minus, term in terms:
                    kind: Kind = "subtract" if minus else "add"
                    self._write_step(kind, [result, term], result, order, sizes)
            else:
                part = self._new_value(order, sizes)
                self._weighted_terms(weight, terms, part, order, sizes)
                self._write_step("add", [result, part], result, order, sizes)
            is_first = False
        return result

    def _weighted_terms(
        self,
        weight: float,
        terms: Sequence[tuple[bool, _Argument]],
        to: _Argument,
        order: Labels,
        sizes: Sizes,
    ) -> None:
        """Terms (whether it is negative, term) of equal absolute weight, added up and weighted."""
        # Positive terms come first. If the first term is negative, all are: they are added up and
        # the sign goes into the factor.
        (all_minus, so_far), *rest = terms
        for minus, term in rest:
            kind: Kind = "add" if minus == all_minus else "subtract"
            # The first step reads two terms and writes the result; from then on the result itself
            # is read and written in place.
            self._write_step(kind, [so_far, term], to, order, sizes)
            so_far = to
        factor = -weight if all_minus else weight
        if factor != 1.0:
            self._write_step("scale", [so_far], to, order, sizes, weight=factor)
        elif not rest:
            self._write_step("copy", [so_far], to, order, sizes)

    def _contracted_value(
        self, one: _Argument, other: _Argument, want: Labels, sizes: Sizes
    ) -> _Argument:
        """A contraction, as matrix products or, where these are tiny, entry by entry."""
        # In the order of the first argument, for the case that the product is taken entry by entry.
        summed = tuple(label for label in _stride_order(one.strides) if label not in want)
        product = self._cheapest_batch(one.strides, other.strides, want, sizes)
        entries = _values_of((*want, *summed), sizes)
        if _by_entries(entries, self.speeds) < product.seconds:
            result = self._new_value(want, sizes)
            self._write_step("einsum", [one, other], result, want, sizes, summed=summed)
            return result
        # `summed` is now in the order of the argument that is read as it stands.
        _, first, second, summed, order = product
        if first.copy is not None:
            one = self._ordered_copy(one, first.copy, sizes)
        if second.copy is not None:
            other = self._ordered_copy(other, second.copy, sizes)
        result = self._new_value(order, sizes)
        three = one.strides, other.strides, result.strides
        # Axes of the three views of `np.matmul`: merged batch axes, then (rows, summed), (summed,
        # columns) and (rows, columns). A group of labels is one axis, with the stride of its last
        # label.
        batch = [label for label in order if label not in first.rows + second.rows]
        outer = _merged_axes(batch, three, sizes)
        matrices = (first.rows, summed), (summed, second.rows), (first.rows, second.rows)
        views = []
        for place, (argument, groups) in enumerate(
            zip((one, other, result), matrices, strict=True)
        ):
            axes = [(size, steps[place]) for size, steps in outer]
            for group in groups:
                axes.append((_values_of(group, sizes), argument.strides[group[-1]] if group else 1))
            views.append(self._view_of(argument.number, axes))
        x, y, written = views
        self.found.append(Step("matmul", (x, y), written, parts=_product_parts(x, y, written)))
        return result

    def _cheapest_batch(self, x: Strides, y: Strides, want: Labels, sizes: Sizes) -> _Product:
        """The batch of matrix products that takes the least time."""
        # Labels of both arguments that the result lacks are summed over; labels of one argument
        # alone are its candidates for rows or columns.
        both = [label for label in x if label not in want]
        left = [label for label in x if label not in y]
        right = [label for label in y if label not in x]
        entries = _values_of(want, sizes)
        best: _Product | None = None
        # The order of the summed labels must be the same in both arguments, so either argument may
        # prescribe its own and the other may have to be copied.
        for summed in dict.fromkeys(
            tuple(label for label in _stride_order(own) if label in both) for own in (x, y)
        ):
            k = _values_of(summed, sizes)
            readings = list(self._possible_readings(y, right, summed, sizes))
            for first in self._possible_readings(x, left, summed, sizes):
                m = _values_of(first.rows, sizes)
                for second in readings:
                    n = _values_of(second.rows, sizes)
                    seconds = first.seconds + second.seconds
                    # Labels that are neither rows nor columns join the batch: entries of the result
                    # over entries of a matrix are the number of matrices.
                    seconds += matmul_seconds(entries // (m * n), m, n, k, self.speeds)
                    if best is not None and seconds >= best.seconds:
                        continue
                    order = _result_order(want, first.rows, second.rows, sizes)
                    if order != want:
                        seconds += _UNLIKE * entries / self.speeds.passing
                    if best is None or seconds < best.seconds:
                        best = _Product(seconds, first, second, summed, order)
        assert best is not None  # copies can always be multiplied
        return best

    def _possible_readings(
        self, strides: Strides, own: Sequence[int], summed: Labels, sizes: Sizes
    ) -> Iterator[_Reading]:
        """The ways to read an argument of a matrix product: as it is, and copied."""
        order = _stride_order(strides)
        if _is_one_axis(summed, strides, sizes):
            for rows in _axis_runs(strides, own, sizes):
                # BLAS reads matrices with rows or columns that stand entry by entry.
                if 1 in (strides[rows[-1]], strides[summed[-1]]):
                    yield _Reading(rows, None, 0.0)
            yield _Reading((), None, 0.0)  # a vector, whatever else the argument has in the batch
        batch = (label for label in order if label not in own and label not in summed)
        rows = tuple(label for label in order if label in own)
        copy = (*batch, *rows, *summed)
        slow = 1.0 if order[-1] == copy[-1] else 2.0
        entries = _values_of(order, sizes)
        # The copy (batch, own, summed) makes one axis of rows and one of summed labels, which BLAS
        # always reads.
        yield _Reading(rows, copy, self.speeds.call + slow * entries / self.speeds.passing)

    def _append_loop(self, number: int, operation: Operation, sizes: Sizes) -> _Value:
        """A loop: its body reads the arguments where they stand, moved on from turn to turn."""
        body, block = operation.body, max(operation.block_size, 1)
        assert body is not None and not any(body.powers)  # scales belong to stages
        # Along a label of the loop an argument moves by its stride, times the block, from turn to
        # turn. The body sees the other axes, and with blocks also the axis of the loop, which then
        # has the size of a block.
        strides, moves, reads = [], [], []
        for a, labels in zip(operation.args, operation.labels, strict=True):
            value = self.values[a]
            own, move = [], dict.fromkeys(operation.chunks, 0)
            for label, step in zip(labels, value.strides, strict=True):
                if label in move:
                    # A label may stand twice in an argument (a diagonal), whose strides add up.
                    move[label] += step * block * self.item
                if label not in move or operation.block_size:
                    own.append(step)
            strides.append(tuple(own))
            moves.append(tuple(move.values()))
            reads.append(View(value.number, 0, (), ()))
        axes = self.wanted[number]
        # The body writes its result in the order that the readers of the loop want, so the sum over
        # turns needs no copy.
        inner = _Analysis(body, strides, [axes], self.item, is_body=True).steps()
        shape = dict(enumerate(self.program.value_shapes[number]))
        result = self._new_value(axes, shape)
        count = n_iterations(operation, dict(sizes))
        turns = Turns(
            body=inner,
            moves=tuple(moves),
            sizes=tuple(sizes[label] // block for label in operation.chunks),
            count=count,
            lanes=min(operation.concurrency, count),
            # Lane 0 adds up in the result itself; every other lane has a sum of its own behind the
            # room of its body.
            lane_bytes=_whole_lines(inner.room) + _whole_lines(_values_of(axes, shape) * self.item),
        )
        in_order = tuple(result.strides[axis] for axis in range(len(axes)))
        written = self._view_of(result.number, list(zip(shape.values(), in_order, strict=True)))
        self.found.append(Step("loop", tuple(reads), written, turns=turns))
        return _Value(result.number, in_order)

    def _output_view(self, number: int) -> View:
        """The view of an output; of a program that is no body, its axes stand in order."""
        value, shape = self.values[number], self.program.value_shapes[number]
        sizes = dict(enumerate(shape))
        inner = tuple(axis for axis, size in sizes.items() if size > 1)
        # An output of a whole program is handed out as an array that others may write to and keep.
        # So it may be neither an input, nor a view in another order, nor a part of a larger value.
        # The output of a loop's body is read at once, wherever it stands.
        argument = _Argument(value.number, {axis: value.strides[axis] for axis in inner})
        stands = argument.strides == _in_order(inner, sizes)
        is_whole = math.prod(shape) == self.sizes[value.number]
        is_input = value.number < len(self.program.shapes)
        if not self.is_body and (is_input or not stands or not is_whole):
            argument = self._ordered_copy(argument, inner, sizes)
        axes = [(size, argument.strides.get(axis, 0)) for axis, size in sizes.items()]
        return self._view_of(argument.number, axes)

    # Values and views.

    def _new_value(self, order: Labels, sizes: Sizes) -> _Argument:
        """A new value with its labels in an order."""
        self.sizes.append(_values_of(order, sizes))
        return _Argument(len(self.sizes) - 1, _in_order(order, sizes))

    def _view_of(self, number: int, axes: Sequence[tuple[int, int]]) -> View:
        """A view with an axis for each pair (size, stride in elements)."""
        shape = tuple(size for size, _ in axes)
        return View(number, 0, shape, tuple(step * self.item for _, step in axes))

    def _labelled_view(self, number: int, labels: Labels, sizes: Sizes) -> _Argument:
        """A value of the program with its labels; a repeated label goes along a diagonal."""
        value = self.values[number]
        strides: Strides = {}
        for label, stride in zip(labels, value.strides, strict=True):
            if sizes[label] > 1:
                # An index that runs along two axes at once moves by both strides.
                strides[label] = strides.get(label, 0) + stride
        return _Argument(value.number, strides)

    # Memory.

    def steps(self) -> Steps:
        """The steps, with the places of all values."""
        # Number of the last step that reads or writes each value; until then its memory is its own.
        last: dict[int, int] = {}
        for n, step in enumerate(self.found):
            last.update({view.value: n for view in (*step.reads, step.writes)})
        given = {view.value for view in self.outputs}
        # The loop reads the result of its body after the last step of the turn.
        if self.is_body:
            last.update(dict.fromkeys(given, len(self.found)))
        # Inputs have memory of the caller, outputs of a whole program arrays of their own; the
        # result of a body stays in the room.
        outside = {*range(len(self.program.shapes)), *(() if self.is_body else given)}
        room = Room()
        places: dict[int, int] = {}
        placed: list[Step] = []
        # A new value takes over an argument, or takes a gap, before values that end at this step
        # are given back, since the step reads and writes at the same time.
        for n, step in enumerate(self.found):
            new = step.writes.value
            if new not in places and new not in outside:
                over = self._taken_over(step, n, last, places)
                places[new] = room.take(self.sizes[new] * self.item) if over is None else over
            # Lanes need their memory during this one step only.
            if step.turns is not None:
                lanes = step.turns.lanes * step.turns.lane_bytes
                place = room.take(lanes)
                step = step._replace(turns=step.turns._replace(place=place))
                room.give(place, lanes)
            placed.append(step)
            for value in {view.value for view in (*step.reads, step.writes)}:
                if last[value] == n and value in places:
                    room.give(places[value], self.sizes[value] * self.item)
        return Steps(
            steps=tuple(placed),
            inputs=len(self.program.shapes),
            outputs=tuple(self.outputs),
            sizes=tuple(self.sizes),
            places=places,
            room=room.top,
            item=self.item,
        )

    def _taken_over(
        self, step: Step, n: int, last: dict[int, int], places: Mapping[int, int]
    ) -> int | None:
        """The place of an argument that is read for the last time, and stands as the result."""
        if step.kind not in ("multiply", "add", "subtract", "scale"):
            return None
        # NumPy reads and writes entry n together where both views are alike, so writing over an
        # argument is safe. An argument that is read twice is not taken over, as its two views may
        # differ.
        numbers = [view.value for view in step.reads]
        for view in step.reads:
            one_size = self.sizes[view.value] == self.sizes[step.writes.value]
            alike = one_size and view[1:] == step.writes[1:] and numbers.count(view.value) == 1
            if alike and view.value in places and last[view.value] == n:
                last[view.value] = len(self.found)  # the memory is not given back here
                return places[view.value]
        return None


class Room:
    """Memory that values take and give back; each takes the smallest gap that holds it."""

    def __init__(self) -> None:
        self.top = 0
        self.gaps: list[tuple[int, int]] = []  # pairs (start, bytes), by start

    def take(self, size: int) -> int:
        size = _whole_lines(size)
        fitting = [(length, start) for start, length in self.gaps if length >= size]
        if fitting:
            length, start = min(fitting)
            self.gaps.remove((start, length))
            if length > size:
                self.gaps.append((start + size, length - size))
            return start
        start = self.top
        # A gap at the end of the memory is used and lengthened, so that the total grows by the
        # difference only.
        if self.gaps:
            at, length = max(self.gaps)
            if at + length == self.top:  # the last gap grows
                self.gaps.remove((at, length))
                start = at
        self.top = start + size
        return start

    def give(self, start: int, size: int) -> None:
        size = _whole_lines(size)
        # A gap merges with a gap that ends where it starts and with a gap that starts where it
        # ends, so that no two gaps touch.
        for at, length in list(self.gaps):
            if at + length == start:
                self.gaps.remove((at, length))
                start, size = at, length + size
            elif start + size == at:
                self.gaps.remove((at, length))
                size += length
        if size:
            self.gaps.append((start, size))
