"""Forward passes, operation by operation, into layers.

`layers_of_graph` goes through the operations of a graph once. Values are affine in a state and in
hidden units (`affine_values`); operations that are affine keep them so, products, activations and
attention make units (`unit_layers`, `attention_scores`), chains of entrywise operations are known
as one curve first (`entrywise`). Where all that follows depends on a single value, a layer ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from tnsim.activations.activation import activation
from tnsim.checkpoints.affine_values import Library, Value, affine_result
from tnsim.checkpoints.attention_scores import (
    Scores,
    attended,
    multiplied,
    operated,
    power,
    scores_of,
)
from tnsim.checkpoints.curves import MOST_POWERS, Curve
from tnsim.checkpoints.entrywise import Chain, is_entrywise, start_of
from tnsim.checkpoints.norms import Norm, Normed
from tnsim.checkpoints.operations import (
    CHOOSING,
    FILLS,
    FIRST_ALONE,
    KEEP_ORDER,
    PRODUCTS,
    Graph,
    Operation,
    is_affine,
    is_float,
    number_in,
)
from tnsim.checkpoints.unit_layers import Layout, NoLayerError, Stack, multiple_of_identity
from tnsim.errors import UnsupportedLayer, in_one_line
from tnsim.models.arrays import requires_grad
from tnsim.models.layers import Linear, Residual, with_widths

_RELU = activation("relu")
SLICES = ("slice", "select")

_REASONS = {
    "which compares hidden units with one another, and no pair of units knows the rest": (
        *("topk", "sort", "kthvalue", "median", "argsort"),
    ),
    "which divides by a sum over hidden units": (
        *("_softmax", "_log_softmax", "_safe_softmax"),
        *("native_layer_norm", "native_group_norm", "rsqrt"),
    ),
    "the largest of several values": ("max", "amax", "max_pool2d_with_indices", "max_pool2d"),
    "which takes entries by numbers that depend on the input": (
        *("gather", "index", "index_select", "embedding"),
    ),
    "which puts entries at places that depend on the input": (
        *("scatter", "scatter_add", "index_put"),
    ),
}
"""Why operations make no layer, where there is more to say than that."""


class Token(NamedTuple):
    """Token numbers, in the place of a value."""

    shape: tuple[int, ...]


class Part(NamedTuple):
    """Operations that are one thing of an earlier value.

    Attributes:
        start: Operation that gives the value.
        what: A curve of it, a norm of it without its gain, or the layers that the user declared.
    """

    start: Operation
    what: Curve | Norm | list[Normed]


def layers_of_graph(
    graph: Graph,
    arrays: Mapping[Operation, Any],
    example: Any,
    library: Library,
    positions: int = 1,
    declared: Mapping[Operation, Part] | None = None,
    filled: Mapping[Operation, Any] | None = None,
) -> list[Normed]:
    """The layers of a forward pass.

    Args:
        graph: The operations of the forward pass.
        arrays: Weights and constants, by their operations.
        example: An input, a batch of one; token numbers where it holds no floats.
        library: Functions of arrays.
        positions: Positions of a sequence, the second axis of the input; 1 for vectors.
        declared: Submodules of declared classes with their layers, by the operation that ends them.
        filled: The weights with other numbers in the place of zeros that other files may not have,
            so that sparse matrices of all files have the same places.

    Returns:
        The layers, each with the norm before it.

    Raises:
        UnsupportedLayer: An operation is in no table, or there is no layer for what it computes.
        TooLarge: A layer would be too large a matrix.
    """
    trace = _Trace(graph, arrays, example, library, positions, declared or {}, filled or arrays)
    layers = trace.run()
    # Declared activations take their width from their neighbours.
    widths = with_widths(one.layer for one in layers)
    return [one._replace(layer=layer) for one, layer in zip(layers, widths, strict=True)]


class _Trace:
    """A forward pass on affine values, as for `layers_of_graph`.

    Attributes:
        values: Arrays and affine values, by the operation that computed them.
        uses: Operations that still read a value, by the operation of the value.
        stack: Layers, state and hidden units.
    """

    def __init__(
        self,
        graph: Graph,
        arrays: Mapping[Operation, Any],
        example: Any,
        library: Library,
        positions: int,
        declared: Mapping[Operation, Part],
        filled: Mapping[Operation, Any],
    ) -> None:
        self.operations, self.argument, self.output = graph.operations, graph.argument, graph.output
        self.example, self.library, self.declared = example, library, declared
        self.tokens: int | None = None
        if not is_float(example):
            tables = [one.arguments[0] for one in self.operations if one.name == "embedding"]
            sizes = [arrays[table].shape[0] for table in tables if table in arrays]
            self.tokens = sizes[0] if sizes else int(example.max()) + 1
        self.values: dict[Any, Any] = dict(arrays)
        self.shown: dict[Operation, Any] = {self.argument: example}
        self.varying = self._fold_constants()
        self.filled = dict(filled)
        changed = {one for one in filled if filled[one] is not arrays[one]}
        for one in self.operations:
            if one in self.values and one not in self.filled and changed & set(one.reads):
                changed.add(one)
                self.filled[one] = one.run(
                    {r: self.filled.get(r, self.values[r]) for r in one.reads}
                )
        if self.output not in self.varying:
            raise UnsupportedLayer("the output of the forward pass does not depend on the input")
        self.scalars = {
            one: number
            for one, value in self.values.items()
            if not requires_grad(value) and (number := number_in(value)) is not None
        }
        self.known = {one: found for one in self.varying if (found := self._norm(one)) is not None}
        self.known |= declared
        self.starts: dict[Operation, Operation] = {}
        shapes = {
            one: tuple(np.shape(value)) if not isinstance(value, (list, tuple)) else ()
            for one, value in self.shown.items()
        }
        for one in self.varying:
            is_known = one in self.known
            self.starts[one] = one if is_known else start_of(one, self.starts, self.scalars, shapes)
        self.curves: dict[Any, Curve | UnsupportedLayer] = {}
        self.parts, self.reads = self._plan()
        curves = [part.what for part in self.parts.values() if isinstance(part.what, Curve)]
        polynomial = all(curve.is_polynomial for curve in curves) and not any(
            one.name in ("gt", "lt", "ge", "le") for one in self.reads
        )
        trained = any(map(requires_grad, self.values.values()))
        sparse = polynomial and positions == 1 and not trained
        shape = tuple(example.shape) if self.tokens is None else (*example.shape, self.tokens)
        self.stack = Stack(library, shape, positions, sparse)
        self.uses: dict[Any, set[Any]] = {one: set() for one in self.operations}
        for one, before in self.reads.items():
            for read in before:
                self.uses[read].add(one)
        self.uses[self.output].add(None)
        self.readers = {one: set(several) for one, several in self.uses.items()}

    def run(self) -> list[Normed]:
        """Go through all operations, and give the layers."""
        for one in self.operations:
            if one in self.reads and one not in self.values:
                self._step(one)
        value = self.values[self.output]
        if not isinstance(value, Value):
            raise UnsupportedLayer(f"{self.output.place} gives no numbers that layers give")
        return self.stack.finished(value)

    def _fold_constants(self) -> list[Operation]:
        """Compute what does not depend on the input, and list all operations that do."""
        varying: dict[Operation, None] = {}  # a set that keeps its order
        for one in self.operations:
            if one in self.values or one.name.startswith("_assert"):
                continue
            reading = [read for read in one.reads if read in varying]
            if one is self.argument:
                varying[one] = None
            elif reading and one.name not in FILLS:
                varying[one] = None
                try:
                    self.shown[one] = one.run(
                        {**self.shown, **{r: self.values[r] for r in one.reads if r not in varying}}
                    )
                except Exception as error:
                    raise UnsupportedLayer(
                        f"{one.place} computes {one.name}, which fails: {in_one_line(error)}"
                    ) from error
                self._check_precision(one)
            else:
                self.values[one] = one.run(
                    {r: self.values[r] if r in self.values else self.shown[r] for r in one.reads}
                )
        return list(varying)

    def _plan(self) -> tuple[dict[Operation, Part], dict[Operation, tuple[Operation, ...]]]:
        """Parts of which the output is made, and what each operation needed reads."""
        parts: dict[Operation, Part] = {}
        reads: dict[Operation, tuple[Operation, ...]] = {}
        needed, varying = {self.output}, set(self.varying)
        for one in reversed(self.varying):
            if one not in needed:
                continue
            if found := self.known.get(one) or self._curve_at(one):
                parts[one] = found
                reads[one] = (found.start,)
            else:
                reads[one] = tuple(read for read in one.reads if read in varying)
            needed |= set(reads[one])
        return parts, reads

    def _curve_at(self, one: Operation) -> Part | None:
        """The curve that an operation ends, of the earliest value, else of the latest one."""
        # The same chain is met in every layer: six of GELU take an eighth longer, each by itself.
        places = Chain(one, self.starts[one], self.scalars).dominators
        for place in places[:1] + places[:0:-1]:
            chain = Chain(one, place, self.scalars)
            if chain.is_line:
                return None
            key = chain.key
            if key not in self.curves:
                try:
                    self.curves[key] = chain.curve()
                except UnsupportedLayer as refused:
                    self.curves[key] = refused
            found = self.curves[key]
            if isinstance(found, Curve) and not _is_constant(found):
                return Part(place, found)
        return None

    def _norm(self, one: Operation) -> Part | None:
        """The norm that an operation ends, `x * rsqrt(mean(x^2) + epsilon)`.

        With y - mean(y) in the place of x it is one of y.
        """
        for x, factor in (one.arguments, one.arguments[::-1]) if one.name == "mul" else ():
            epsilon = self._under_root(factor, x)
            if epsilon is None:
                continue
            if x.name == "sub" and not x.keywords and self._is_mean(x.arguments[1], x.arguments[0]):
                return Part(x.arguments[0], Norm(True, epsilon))
            return Part(x, Norm(False, epsilon))
        return None

    def _under_root(self, one: Any, x: Any) -> float | None:
        """The number epsilon of an operation `rsqrt(mean(x^2) + epsilon)`; None for others."""
        steps: list[Operation] = []
        for name in ("rsqrt", "add", "mean", "pow"):
            if getattr(one, "name", "") != name:
                return None
            steps.append(one)
            one = one.arguments[0]
        _, shifted, mean, square = steps
        epsilon: Any = shifted.arguments[1]
        if isinstance(epsilon, Operation):
            epsilon = self.scalars.get(epsilon)
        if one is not x or square.arguments[1] != 2 or shifted.keywords or epsilon is None:
            return None
        return float(epsilon) if self._is_mean(mean, square) else None

    def _is_mean(self, one: Any, x: Operation) -> bool:
        """Whether an operation is the mean over the last axis of another, which is kept."""
        if getattr(one, "name", "") != "mean" or one.arguments[0] is not x:
            return False
        _, axes, *kept = (*one.arguments, None)  # without axes the mean is over all of them
        rank = len(self.shown[x].shape)
        return axes is not None and [n % rank for n in axes] == [rank - 1] and True in kept

    def _step(self, one: Operation) -> None:
        """Compute a value, and begin a new layer where all that follows depends on it alone."""
        if one is self.argument:
            self.values[one] = (
                Token(tuple(self.example.shape)) if self.tokens is not None else self.stack.state()
            )
        elif one in self.parts:
            start, what = self.parts[one]
            if isinstance(what, Curve):
                self.values[one] = self._curved_value(start, what)
            elif isinstance(what, Norm):
                self.values[one] = self._normed_value(one, start, what)
            else:
                self.values[one] = self._declared_value(one, start, what)
        else:
            self.values[one] = self._computed_value(one)
        for before in self.reads[one]:
            self.uses[before].discard(one)
        live = self._live_values()
        if list(live) != [one] or not isinstance(live[one], Value):
            return
        if self._meets_relu_or_step(one):
            return
        whole = self._is_whole(one)
        if self.stack.ends_layer(live[one], whole):
            self._settle(one, is_whole=whole)

    def _meets_relu_or_step(self, one: Operation) -> bool:
        """Whether ReLU or a step of units follows that need no layer of their own for it."""
        readers = [reader for reader in self.readers[one] if reader is not None]
        parts = (self.parts[reader].what for reader in readers if reader in self.parts)
        follows = any(isinstance(what, Curve) and what.function == _RELU for what in parts)
        follows = follows or any(reader.name == "gt" for reader in readers)
        return follows and self.stack.stays_under_relu(self.values[one])

    def _is_whole(self, one: Operation) -> bool:
        """Whether a value is a linear layer as the user wrote it, and no factor of a product."""
        made = one
        while made.name in KEEP_ORDER and made.reads[0] in self.reads:
            made = made.reads[0]
        if not made.is_whole:
            return False
        value = self.values[one]
        sources = set(value.slopes)
        if len(sources) != 1 or self.stack.is_state(value) == 0:
            return False
        # The map stands alone on the state.
        readers = list(self.readers[one])
        multiplying = 0
        while readers:
            reader = readers.pop()
            if reader is None:
                return True
            if reader in self.parts:
                what = self.parts[reader].what
                multiplying += isinstance(what, Curve) and what.is_polynomial
                if not multiplying:
                    return True
            elif reader.name in KEEP_ORDER:
                readers += self.readers[reader]
            elif reader.name in SLICES or (
                reader.name == "mul"
                and len(self.reads[reader]) + sum(a is one for a in reader.arguments) > 2
            ):
                multiplying += 1
            else:
                return True
        return not multiplying

    def _live_values(self) -> dict[Hashable, Any]:
        """Values that depend on the input and are used later, by operation."""
        used = ((one, value) for one, value in self.values.items() if self.uses.get(one))
        return {one: value for one, value in used if not _is_array(value)}

    def _settle(self, *operations: Operation, is_whole: bool = False) -> None:
        """End a layer: values that are used later, and some others, are affine in a new state."""
        live = self._live_values() | {one: self.values[one] for one in operations}
        if any(isinstance(value, Token) for value in live.values()):
            raise UnsupportedLayer("token numbers are read again behind the first layer")
        if any(isinstance(value, Scores) for value in live.values()):
            raise UnsupportedLayer("scores of attention are used by something else than attention")
        self.values |= self.stack.settle(live, is_whole)

    def _computed_value(self, one: Operation) -> Any:
        """The result of a single operation on arrays and affine values."""
        name, values = one.name, self.values
        varying = [read for read in one.reads if not _is_array(values[read])]
        if any(isinstance(values[read], Token) for read in varying):
            return self._of_tokens(one)
        places = [n for n, argument in enumerate(one.arguments) if _reads_any(argument, varying)]
        if any(isinstance(values[read], Scores) for read in varying):
            return self._of_scores(one, varying)
        if name == "gt" and places == [0]:
            return self._step_value(one)
        if name == "where" and places == [0, 1] and not self._has_entries(one.arguments[2]):
            return self._multiplied_values(one, places)  # where(u > t, u, 0)
        chooses = CHOOSING.get(name) in places
        if not is_affine(name) or (name in FIRST_ALONE and places != [0]) or chooses:
            raise self._refusal(one)
        # The first argument of `addmm` and `baddbmm` is added, not multiplied.
        factors = [n for n in places if n > 0 or name not in ("addmm", "baddbmm")]
        if name in PRODUCTS and len(factors) > 1:
            return self._multiplied_values(one, factors)
        return affine_result(one, values, self.library, self.filled)

    def _refusal(self, one: Operation) -> UnsupportedLayer:
        said = f"{one.place} computes {one.name}, "
        for reason, names in _REASONS.items():
            if one.name in names:
                return UnsupportedLayer(f"{said}{reason}")
        if one.name == "pow":
            powers = f"and powers are read up to {MOST_POWERS}, as whole numbers"
            return NoLayerError(f"{said}{powers}, or as an activation that is known")
        if is_entrywise(one.name):
            chain = Chain(one, self.starts[one], self.scalars)
            names = chain.names if self.starts[one] is not one else [one.name]
            *others, last = names
            listed = f"{', '.join(others)} and {last}" if others else last
            return NoLayerError(
                f"{one.place} computes {listed}: these of a value make no activation that is known"
            )
        return UnsupportedLayer(f"{said}which is neither polynomial nor a known activation")

    def _check_precision(self, one: Operation) -> None:
        """Raise `UnsupportedLayer` where numbers are rounded to fewer digits than weights have."""
        result = self.shown[one]
        if not is_affine(one.name) or isinstance(result, (list, tuple)):
            return
        for read in one.reads:
            before = self.shown.get(read)
            if before is None or isinstance(before, (list, tuple)):
                continue
            if not _keeps_digits(before, result, self.library):
                raise UnsupportedLayer(
                    f"{one.place} computes {one.name}, which rounds numbers that depend on the "
                    f"input to {result.dtype}"
                )

    def _of_tokens(self, one: Operation) -> Any:
        """An embedding of token numbers, or the numbers in another shape."""
        shape = tuple(self.shown[one].shape)
        if one.name == "embedding" and isinstance(self.values[one.arguments[1]], Token):
            weight = self.values[one.arguments[0]]
            slope = self.stack.sources[0].root
            table = slope.then(lambda z: (z @ weight).reshape(shape), shape, last=weight.T)
            return Value(self.stack.zeros(shape), {0: table})
        same = np.prod(shape) == np.prod(self.example.shape)
        if same and one.name in KEEP_ORDER:
            return Token(shape)
        raise UnsupportedLayer(
            f"{one.place} computes {one.name} of token numbers, and layers read tokens by an "
            "embedding alone"
        )

    def _of_scores(self, one: Operation, varying: list[Operation]) -> Any:
        """An operation on scores of attention."""
        operands = [self.values[x] if isinstance(x, Operation) else x for x in one.arguments]
        if one.name == "bmm":
            left, right = operands
            if isinstance(left, Scores) and isinstance(right, Value):
                return attended(self.stack, left, right, one.place)
            if isinstance(right, Scores) and isinstance(left, Value):
                turned = right.moved(lambda x: x.swapaxes(1, 2))
                left = left.mapped(lambda x: x.swapaxes(1, 2))
                found = attended(self.stack, turned, left, one.place)
                return found.mapped(lambda x: x.swapaxes(1, 2))
        if one.name == "mul" and all(isinstance(operand, Scores) for operand in operands):
            return multiplied(*operands)
        if len(varying) > 1:
            raise UnsupportedLayer(
                f"{one.place} computes {one.name} of scores of attention and of another value"
            )
        return operated(one, self.values, self.library)

    def _multiplied_values(self, one: Operation, places: list[int]) -> Any:
        """A product of several arguments that depend on the input."""
        name = one.name
        if len(places) == 2:
            operands = [one.arguments[n] for n in places]
            if name == "bmm":
                scores = scores_of(self.stack, *(self.values[operand] for operand in operands))
                if scores is not None:
                    return scores
            if name in ("mul", "where"):
                return self._product(operands)
            if name in ("mm", "bmm"):
                # sum_k x_ik y_kj, all products x_ik y_kj as hidden units
                product = self._product(
                    operands,
                    lambda x: x.mapped(lambda rows: rows[..., None]),
                    lambda y: y.mapped(lambda columns: columns[..., None, :, :]),
                )
                return product.mapped(lambda p: p.sum(-2))
        raise UnsupportedLayer(
            f"{one.place} multiplies {len(places)} values by {name}, which is not read"
        )

    def _has_entries(self, argument: Any) -> bool:
        """Whether an argument that does not depend on the input is not zero everywhere."""
        known = self.values[argument] if isinstance(argument, Operation) else argument
        return bool(self.library.numbers(known).any())

    def _step_value(self, one: Operation) -> Value:
        """1 where a value is above an array of thresholds, and 0 elsewhere."""
        argument, threshold = one.arguments
        known = self.values[threshold] if isinstance(threshold, Operation) else threshold
        value = self._checked_value(argument)
        # Thresholds may broadcast the argument to a larger shape.
        shape = (value.constant - known).shape
        found = self.stack.step_of_relu(value.expanded(shape), value.constant * 0 + known)
        if found is not None:
            return found
        grown = self._affine_value(argument).expanded(shape)
        return self.stack.activated(grown.shifted(-known), activation("step"))

    def _normed_value(self, one: Operation, start: Operation, norm: Norm) -> Value:
        """The state behind a norm."""

        def is_state(value: Any) -> bool:
            alone = set(self.stack.sources) == {0}
            return isinstance(value, Value) and self.stack.is_state(value) == 0 and alone

        if not is_state(self.values[start]):
            self._settle(start)
        value = self.values[start]
        if not is_state(value):
            raise UnsupportedLayer(
                f"{one.place} is a norm of a part of what the forward pass goes on with, and "
                "layers have a norm of the whole state before them"
            )
        if value.shape[-1] != self.stack.width:
            raise UnsupportedLayer(f"{one.place} is a norm of a part of the coordinates")
        return self.stack.normed(value, norm, one.place)

    def _declared_value(self, one: Operation, start: Operation, layers: list[Normed]) -> Value:
        """The output of a submodule of a declared class."""
        value = self.values[start]
        source = self.stack.is_state(value)
        if source is None:
            self._settle(start)
            source = self.stack.is_state(self.values[start])
        if source is None:
            raise UnsupportedLayer(
                f"{one.place} was declared, and reads a part of what the forward pass goes on with"
            )
        shape, n = tuple(self.shown[one].shape), self.stack.positions
        width = int(np.prod(shape)) // n

        def made(down: Any, bias: Any) -> list[Normed]:
            if down is None and bias is None:
                return layers
            scale = None if down is None else multiple_of_identity(self.library.numbers(down))
            if scale is not None and bias is None and len(layers) == 1:
                return [Normed(Residual(layers[0].layer, 0.0, scale), layers[0].norm)]
            down = np.eye(width) if down is None else down
            return [*layers, Normed(Linear(down, bias))]

        return self.stack.new_block(shape, Layout.in_rows(n, width), source, layers=made)

    def _curved_value(self, start: Operation, curve: Curve) -> Any:
        """An activation of a value, of every entry alone, or a polynomial."""
        if curve.is_polynomial:
            return self._powers(start, _coefficients(curve))
        is_relu = curve.function == _RELU and curve.scale > 0 and curve.shift == 0
        if is_relu and self.stack.stays_under_relu(value := self._checked_value(start)):
            return value.times(curve.scale * curve.factor).shifted(curve.offset)
        inner = self._affine_value(start).times(curve.scale).shifted(curve.shift)
        result = self.stack.activated(inner, curve.function).times(curve.factor)
        return result.shifted(curve.offset)

    def _affine_value(self, one: Operation) -> Value:
        """A value that is affine in the state alone, after a new layer where it is not."""
        value = self._checked_value(one)
        if self.stack.units_in(value) or len(value.slopes) > 1:
            self._settle(one)
        return self.values[one]

    def _checked_value(self, one: Operation) -> Value:
        """A value that is affine in the state and in hidden units."""
        value = self.values[one]
        if not isinstance(value, Value):
            raise UnsupportedLayer(f"{one.place} gives scores of attention to an activation")
        return value

    def _powers(self, base: Operation, coefficients: dict[int, float]) -> Any:
        """A polynomial of a value, its powers as products of equal factors."""
        if isinstance(self.values[base], Scores):
            if len(coefficients) > 1 or 0 in coefficients:
                raise UnsupportedLayer("a sum of powers of scores of attention, which no layer has")
            ((exponent, factor),) = coefficients.items()
            return power(self.values[base], exponent, factor)
        highest = max(coefficients)
        square = [self._product([base, base])] if highest > 1 else []
        powers = [self.values[base], *square]
        while len(powers) < highest:
            further = self.stack.product(powers[-1], powers[0])
            assert further is not None  # as of the square
            powers.append(further)
        terms = [
            value.times(coefficients[n]) for n, value in enumerate(powers, 1) if coefficients.get(n)
        ]
        return reduce(Value.plus, terms).shifted(coefficients.get(0, 0.0))

    def _product(
        self,
        operands: Sequence[Operation],
        first: Callable[[Value], Value] = lambda x: x,
        second: Callable[[Value], Value] = lambda y: y,
    ) -> Value:
        """The product of functions of two values, after a new layer where units do not give it."""
        for _ in range(2):
            one, two = (self._checked_value(operand) for operand in operands)
            # Of products that broadcast there would be many more units behind the product.
            grows = one.shape != two.shape and any(map(self.stack.units_in, (one, two)))
            if not grows or any(map(self.stack.function_in, (one, two))):
                product = self.stack.product(first(one), second(two))
                if product is not None:
                    return product
            self._settle(*operands)
        raise AssertionError("affine functions of one state have a product")


def _coefficients(curve: Curve) -> dict[int, float]:
    """Coefficients of the powers of u in a polynomial."""
    inner = np.polynomial.Polynomial([curve.shift, curve.scale])
    (piece,) = curve.function.pieces
    total: Any = np.polynomial.Polynomial([0.0])
    for c in reversed(piece):
        total = total * inner + c
    found = (curve.factor * total + curve.offset).coef
    return {n: float(c) for n, c in enumerate(found) if c} or {0: 0.0}


def _is_constant(curve: Curve) -> bool:
    return curve.is_polynomial and max(_coefficients(curve)) < 1


def _is_array(value: Any) -> bool:
    return not isinstance(value, (Value, Scores, Token))


def _keeps_digits(before: Any, after: Any, library: Library) -> bool:
    """Whether a change of type keeps the digits that a module or function computes with."""
    old, new = str(before.dtype), str(after.dtype)
    if "complex" in old + new:
        return True  # which no table knows
    if is_float(before):
        coarsest = library.epsilon(library.precision)
        return is_float(after) and library.epsilon(after.dtype) <= coarsest
    # Token numbers keep 32 bits at least.
    return old.endswith("bool") or is_float(after) or new.endswith(("32", "64"))


def _reads_any(argument: Any, operations: list[Operation]) -> bool:
    """Whether an argument of an operation is among some, or is a list with such an operation."""
    if isinstance(argument, (list, tuple)):
        return any(_reads_any(part, operations) for part in argument)
    return any(argument is one for one in operations)
