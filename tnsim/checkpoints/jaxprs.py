"""Functions of JAX as operations of which every one is known by name.

JAX writes a function of weights and inputs down as a jaxpr, a list of primitives. Each becomes an
operation, or a few, of the names that `read_graphs` knows, on arrays of NumPy: nothing is compiled.
Calls of other functions are written out, also those with derivatives of their own, and loops of a
fixed number of turns. Branches and loops on values are refused by name.

Source: the reference of `jax.lax`, which says what each primitive computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from tnsim.checkpoints.curves import MOST_POWERS
from tnsim.checkpoints.entrywise import FUNCTIONS, is_entrywise
from tnsim.checkpoints.operations import Graph, Operation, is_affine, is_turned_parameter
from tnsim.errors import UnsupportedLayer

_ENTRYWISE = {
    "add_any": "add",
    "and": "logical_and",
    "logistic": "sigmoid",
    "max": "maximum",
    "min": "minimum",
    "not": "logical_not",
    "or": "logical_or",
}
"""Names of entrywise operations by those of primitives, where these differ."""

_AFFINE = {
    "conv_general_dilated": "convolution",
    "cumsum": "cumsum",
    "pad": "pad",
    "reduce_window_sum": "window_sum",
}
"""Names of affine operations that JAX computes, by those of primitives."""

_REFUSED = {
    "argmax": "topk",
    "argmin": "topk",
    "reduce_max": "amax",
    "reduce_min": "amax",
    "reduce_window_max": "max_pool2d",
    "sort": "sort",
    "top_k": "topk",
}
"""Names under which the reason of a refusal is known."""

MOST_TURNS = 1024
"""Turns of a loop that is written out."""


class NumpyLibrary:
    """The functions of arrays that the algebra asks for, see `affine_values.Library`."""

    def __init__(self, precision: np.dtype) -> None:
        self.precision = precision

    @property
    def rounding(self) -> float:
        return 1e-12

    def epsilon(self, dtype: np.dtype) -> float:
        return float(jax.numpy.finfo(dtype).eps)

    def vmap(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda rows: np.stack([function(row) for row in rows])

    def transposed(self, function: Callable[[Any], Any], size: int) -> Callable[[Any], Any]:
        image = np.stack([function(row).reshape(-1) for row in np.eye(size)])
        return lambda row: image @ row

    def array(self, numbers: Any) -> np.ndarray:
        return np.asarray(numbers)

    def eye(self, size: int) -> np.ndarray:
        return np.eye(size)

    def concatenate(self, arrays: Sequence[Any], axis: int = 0) -> np.ndarray:
        return np.concatenate(list(arrays), axis)

    def numbers(self, array: Any) -> np.ndarray:
        return np.asarray(array)


def graph_of(
    function: Callable[[list[Any], Any], Any],
    weights: Sequence[np.ndarray],
    x: np.ndarray,
    place: str,
    precision: np.dtype,
) -> Graph:
    """The operations of a function on inputs of the shape of an example.

    Args:
        function: Function of a list of weights and an input, with one array as its result.
        weights: The weights, in float64 where they are floats.
        x: Inputs, of which the first axis is the batch.
        place: Words for the function, for messages.
        precision: Fewest digits that weights had, to which the function may round numbers.

    Returns:
        The operations.

    Raises:
        UnsupportedLayer: The function branches on values, or has a primitive of another kind.
    """
    given = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (*weights, x)]
    try:
        with jax.enable_x64(True):
            closed = jax.make_jaxpr(lambda *all_of: function(list(all_of[:-1]), all_of[-1]))(*given)
    except jax.errors.ConcretizationTypeError as error:
        raise UnsupportedLayer(
            f"{place} branches on, or counts with, numbers that depend on the input or the "
            f"weights: {str(error).split('.')[0]}"
        ) from error
    writer = _Writer(place, precision)
    arguments = [writer.leaf("weight", one.shape) for one in weights]
    argument = writer.leaf("input", x.shape)
    try:
        (output,) = writer.called(closed, [*arguments, argument])
    except UnsupportedLayer:
        raise
    except Exception as error:  # of whatever kind a primitive raises
        raise UnsupportedLayer(
            f"{place} cannot be read: {' '.join(str(error).split())[:300]}"
        ) from error
    return Graph(
        tuple(writer.operations),
        dict(enumerate(arguments)),
        argument,
        output,
        writer.constants,
        rounding=writer.rounding,
    )


def is_random_key(value: Any) -> bool:
    """Whether a value is a key of `jax.random`, which is no array of numbers."""
    dtype: Any = getattr(value, "dtype", None)
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


class _Writer:
    """Writes primitives down as operations.

    Where a primitive is not one operation of the tables, the method `_NAME(eqn, given, shape)`
    writes the primitive NAME, with its operands and the shape of its result.

    Args:
        place: Words for the function, for messages.
        precision: Fewest digits to which numbers may be rounded.
    """

    def __init__(self, place: str, precision: np.dtype) -> None:
        self.place, self.precision = place, precision
        self.operations: list[Operation] = []
        self.constants: dict[Operation, np.ndarray] = {}
        self.shapes: dict[Operation, tuple[int, ...]] = {}
        self.rounding = 0.0

    def leaf(self, name: str, shape: Sequence[int]) -> Operation:
        """An operation whose result is given from outside."""
        one = Operation(name, place=self.place)
        self.operations.append(one)
        self.shapes[one] = tuple(shape)
        return one

    def constant(self, value: Any) -> Operation:
        """An operation that gives a number, or an array, floats in float64."""
        if is_random_key(value):
            raise self._drawing()
        array = np.asarray(value)
        one = self.leaf("constant", array.shape)
        self.constants[one] = _wide(array)
        return one

    def _drawing(self) -> UnsupportedLayer:
        return UnsupportedLayer(
            f"{self.place} draws random numbers (jax.random): read it as it is in evaluation, or "
            "draw what stays before, as a part of the weights"
        )

    def are_constant(self, given: Sequence[Operation]) -> bool:
        """Whether arrays are known for all of some operations."""
        return all(one in self.constants for one in given)

    def add(
        self,
        name: str,
        arguments: Sequence[Any],
        shape: Sequence[int],
        compute: Callable[..., Any],
    ) -> Operation:
        """Write an operation down, or the array that one of constants gives.

        Args:
            name: Name in the tables.
            arguments: Operations, also in lists, and numbers.
            shape: Shape of the result.
            compute: The operation on arrays.
        """
        whole = name == "mm" and is_turned_parameter(arguments[1]) is not None
        made = Operation(name, tuple(arguments), compute, (), self.place, whole)
        if self.are_constant(made.reads):
            return self.constant(made.run(self.constants))
        self.operations.append(made)
        self.shapes[made] = tuple(shape)
        return made

    def called(self, closed: ClosedJaxpr | Jaxpr, given: Sequence[Operation]) -> list[Operation]:
        """Write a jaxpr down, and give its outputs."""
        jaxpr = closed.jaxpr if isinstance(closed, ClosedJaxpr) else closed
        consts = closed.consts if isinstance(closed, ClosedJaxpr) else ()
        known: dict[Any, Operation] = dict(zip(jaxpr.invars, given, strict=True))
        known |= zip(jaxpr.constvars, map(self.constant, consts), strict=True)

        def read(atom: Any) -> Operation:
            return self.constant(atom.val) if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            results = self._written(eqn, [read(atom) for atom in eqn.invars])
            known |= zip(eqn.outvars, results, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _written(self, eqn: Any, given: list[Operation]) -> list[Operation]:
        """The results of a primitive."""
        name, params = eqn.primitive.name, eqn.params
        if name.startswith("random_"):
            raise self._drawing()
        shape = tuple(eqn.outvars[0].aval.shape) if eqn.outvars else ()
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            if key in params and name not in ("scan", "while", "cond", "reduce", "reduce_window"):
                return self.called(params[key], given)
        if name == "scan":
            return self._turns(eqn, given)
        if name == "cond" and given[0] in self.constants:
            branches = params["branches"]
            branch = int(np.clip(self.constants[given[0]], 0, len(branches) - 1))
            return self.called(branches[branch], given[1:])
        if self.are_constant(given):
            return [*map(self.constant, _results(eqn, [self.constants[one] for one in given]))]
        if name == "split":
            return self._split(params, given[0])
        if name == "unstack":
            places = self._places(given[0], params["axis"])
            return [self._viewed(one, shape) for one in places]
        if name == "optimization_barrier":
            return given
        if name in _AFFINE:
            return [self._by_jax(_AFFINE[name], eqn, given, shape)]
        write = getattr(self, f"_{name.replace('-', '_')}", None)
        if write is not None:
            return [write(eqn, given, shape)]
        if name in ("ne", "eq") and given[0] is given[1]:
            return [self.constant(np.full(shape, name == "eq"))]  # a test for NaN
        # Quotients and bits of whole numbers are not those of others.
        whole = eqn.outvars[0].aval.dtype.kind in "iu" and name in (
            "div",
            "and",
            "or",
            "not",
            "pow",
        )
        known = _ENTRYWISE.get(name, name)
        if is_entrywise(known) and not whole:
            return [self._entrywise(known, given, shape)]
        if name == "while":
            raise UnsupportedLayer(
                f"{self.place} has a loop that ends by a value (jax.lax.while_loop): give the "
                "number of turns as a number of Python"
            )
        if name == "cond":
            raise UnsupportedLayer(
                f"{self.place} has a branch on values (jax.lax.cond), another function on either "
                "side: use jnp.where"
            )
        # Another primitive may have the name of an operation that is known here.
        known = _REFUSED.get(name, f"lax.{name}" if is_affine(name) else name)
        return [
            self.add(known, given, var.aval.shape, lambda *x, n=n: _results(eqn, x)[n])
            for n, var in enumerate(eqn.outvars)
        ]

    def _entrywise(self, name: str, given: list[Operation], shape: tuple[int, ...]) -> Operation:
        return self.add(name, given, shape, FUNCTIONS[name].compute)

    def _integer_pow(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        return self._entrywise("pow", [given[0], self.constant(eqn.params["y"])], shape)

    def _square(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        return self._entrywise("pow", [given[0], self.constant(2)], shape)

    def _clamp(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        low, x, high = given
        return self._entrywise("clamp", [x, low, high], shape)

    def _select_n(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        chosen, *cases = given
        if len(cases) != 2:
            raise UnsupportedLayer(f"{self.place} chooses among {len(cases)} cases by numbers")
        if np.unique(self.constants.get(chosen, [0, 1])).size == 1:
            return cases[int(self.constants[chosen].flat[0])]
        return self._entrywise("where", [chosen, cases[1], cases[0]], shape)

    def _convert_element_type(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        return self._converted(given[0], eqn.params["new_dtype"])

    def _converted(self, x: Operation, new_dtype: Any) -> Operation:
        """The numbers in another type, floats in float64 where weights had no more digits."""
        dtype = np.dtype(new_dtype)
        floats = jax.numpy.issubdtype(dtype, np.floating)
        if floats and jax.numpy.finfo(dtype).eps <= jax.numpy.finfo(self.precision).eps:
            if dtype != np.float64:  # as weights are, so the function is read without the rounding
                self.rounding = max(self.rounding, float(jax.numpy.finfo(dtype).eps))
            dtype = np.dtype(np.float64)
        return self.add("to", [x], self.shapes[x], lambda x: np.asarray(x).astype(dtype))

    def _copy(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        return given[0]

    _copy_p = _stop_gradient = _copy

    def _reshape(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        order = eqn.params["dimensions"]  # of the axes before, as of an array of parts to stack
        return self._viewed(self._permuted(given[0], order) if order else given[0], shape)

    def _squeeze(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        return self._viewed(given[0], shape)

    def _viewed(self, x: Any, shape: Sequence[int]) -> Any:
        if self.shapes[x] == tuple(shape):
            return x
        return self.add("view", [x, tuple(shape)], shape, lambda x, shape: x.reshape(shape))

    def _broadcast_in_dim(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        x, places = given[0], eqn.params["broadcast_dimensions"]
        own = self.shapes[x]
        between = [1] * len(shape)
        for size, place in zip(own, places, strict=True):
            between[place] = size
        if math.prod(between) == math.prod(shape):
            return self._viewed(x, shape)

        def compute(x: np.ndarray) -> np.ndarray:
            return np.broadcast_to(x.reshape(between), shape)

        last = bool(own) and places[-1] == len(shape) - 1 and own[-1] == shape[-1]
        return self.add("expand" if last else "broadcast", [x], shape, compute)

    def _transpose(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        return self._permuted(given[0], eqn.params["permutation"])

    def _permuted(self, x: Operation, order: Sequence[int]) -> Operation:
        if list(order) == sorted(order):
            return x
        shape = [self.shapes[x][n] for n in order]
        name = "t" if tuple(order) == (1, 0) else "permute"
        arguments = [x] if name == "t" else [x, tuple(order)]
        return self.add(name, arguments, shape, lambda x, *_: np.transpose(x, order))

    def _rev(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        axes = tuple(eqn.params["dimensions"])
        return self.add("flip", [given[0], axes], shape, lambda x, axes: np.flip(x, axes))

    def _slice(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        x, params = given[0], eqn.params
        starts, stops = params["start_indices"], params["limit_indices"]
        steps = params["strides"] or [1] * len(starts)
        for axis, (start, stop, step) in enumerate(zip(starts, stops, steps, strict=True)):
            x = self._sliced(x, axis, start, stop, step)
        return x

    def _sliced(self, x: Any, axis: int, start: int, stop: int, step: int = 1) -> Any:
        own = list(self.shapes[x])
        if (start, stop, step) == (0, own[axis], 1):
            return x
        taken = (*[slice(None)] * axis, slice(start, stop, step))
        own[axis] = len(range(start, stop, step))
        arguments = [x, axis, start, stop, step]
        return self.add("slice", arguments, own, lambda x, *_: x[taken])

    def _split(self, params: Mapping[str, Any], x: Any) -> list[Any]:
        ends = np.cumsum([0, *params["sizes"]]).tolist()
        return [self._sliced(x, params["axis"], start, stop) for start, stop in pairwise(ends)]

    def _concatenate(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        axis = eqn.params["dimension"]
        return self.add("cat", [given, axis], shape, np.concatenate)

    def _stack(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        axis = eqn.params["axis"]
        own = (*shape[:axis], 1, *shape[axis + 1 :])
        rows = [self._viewed(one, own) for one in given]
        return self.add("cat", [rows, axis], shape, np.concatenate)

    def _tile(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        x = given[0]
        for axis, times in enumerate(eqn.params["reps"]):
            if times != 1:
                own = (*shape[: axis + 1], *self.shapes[x][axis + 1 :])
                x = self.add("cat", [[x] * times, axis], own, np.concatenate)
        return x

    def _reduce_sum(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        axes = tuple(eqn.params["axes"])
        return self.add("sum", [given[0], axes], shape, lambda x, axes: np.sum(x, axes))

    def _reduce_prod(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        """The product along an axis, factor by factor, of so few factors that it has a layer."""
        x, axes = given[0], eqn.params["axes"]
        if len(axes) != 1 or not 1 <= self.shapes[x][axes[0]] <= MOST_POWERS:
            return self._by_jax("reduce_prod", eqn, given, shape)
        factors = [self._viewed(one, shape) for one in self._places(x, axes[0])]
        return reduce(lambda u, v: self._entrywise("mul", [u, v], shape), factors)

    def _cumprod(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        x, axis, turn = given[0], eqn.params["axis"], -1 if eqn.params["reverse"] else 1
        if not 1 <= shape[axis] <= MOST_POWERS:
            return self._by_jax("lax.cumprod", eqn, given, shape)
        factors = self._places(x, axis)[::turn]
        one = self.shapes[factors[0]]
        products = accumulate(factors, lambda u, v: self._entrywise("mul", [u, v], one))
        return self.add("cat", [list(products)[::turn], axis], shape, np.concatenate)

    def _places(self, x: Any, axis: int) -> list[Any]:
        """The entries at each place of an axis, which is kept."""
        return [self._sliced(x, axis, n, n + 1) for n in range(self.shapes[x][axis])]

    def _gather(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        operand, places = given
        numbers, own = eqn.params["dimension_numbers"], self.shapes[operand]
        # A single token that is mapped over inputs and positions: its row has an axis more.
        single = self._starts_rows(places) and numbers.start_index_map == (0, 1)
        tokens = self._tokens_in(places.arguments[0][0] if single else places, operand)
        if tokens is not None and len(own) == 2 and tuple(eqn.params["slice_sizes"]) == (1, own[1]):
            read = self.shapes[tokens]
            rows = (*read, 1, own[1]) if single else (*read, own[1])
            if shape == rows and numbers.offset_dims == tuple(range(len(read), len(shape))):
                return self._viewed(self._embedded(operand, tokens), shape)
        return self._by_jax("index", eqn, given, shape)

    def _embedded(self, table: Operation, tokens: Operation) -> Operation:
        """The rows of a table that tokens name."""
        shape = (*self.shapes[tokens], self.shapes[table][1])
        rows = lambda weight, tokens: weight[np.asarray(tokens)]  # noqa: E731
        return self.add("embedding", [table, tokens], shape, rows)

    def _starts_rows(self, places: Operation) -> bool:
        """Whether places are rows, each with the beginning of the row, as `table[i]` has them."""
        if places.name != "cat" or len(places.arguments[0]) != 2:
            return False
        start = self.constants.get(places.arguments[0][1])
        return start is not None and not start.any()

    def _tokens_in(self, places: Operation, operand: Operation) -> Operation | None:
        """The tokens t of which `where(t < 0, t + size, t)` says which rows are taken."""
        while places.name in ("view", "to", "expand"):
            places = places.arguments[0]
        if places.name == "where":
            below, added, places = places.arguments
            for one, name, number in (
                (below, "lt", 0),
                (added, "add", self.shapes[operand][0]),
            ):
                is_usual = one.name == name and one.arguments[0] is places
                if not is_usual or self.constants.get(one.arguments[1]) != number:
                    return None
        while places.name == "to":
            places = places.arguments[0]
        return places if places.name == "input" else None

    def _dynamic_slice(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        x, *starts = given
        if not self.are_constant(starts):
            return self._by_jax("index", eqn, given, shape)
        for axis, (start, size) in enumerate(zip(starts, shape, strict=True)):
            start = int(np.clip(self.constants[start], 0, self.shapes[x][axis] - size))
            x = self._sliced(x, axis, start, start + size)
        return x

    def _dynamic_update_slice(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        if not self.are_constant(given[2:]):
            raise UnsupportedLayer(f"{self.place} writes to places that depend on numbers")
        return self._by_jax("dynamic_update", eqn, given, shape)

    def _scatter(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        x, places, updates = given
        if eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is not None:
            raise UnsupportedLayer(
                f"{self.place} applies a function to entries where they stand (at[...].apply): "
                "apply it to the entries that are taken, and write these with at[...].set"
            )
        at = self.constants.get(places)
        if at is None:
            raise UnsupportedLayer(f"{self.place} writes to places that depend on numbers")
        name = "at_set" if eqn.primitive.name == "scatter" else "at_add"

        def compute(x: Any, updates: Any) -> np.ndarray:
            return _results(eqn, [x, at, updates])[0]

        return self.add(name, [x, updates], shape, compute)

    _scatter_add = _scatter

    def _by_jax(self, name: str, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        """A primitive that JAX computes."""
        return self.add(name, given, shape, lambda *x: _results(eqn, x)[0])

    def _dot_general(self, eqn: Any, given: list[Any], shape: tuple[int, ...]) -> Any:
        """Sums of products, as a product of matrices or of stacks of matrices."""
        (left_sums, right_sums), (left_batch, right_batch) = eqn.params["dimension_numbers"]
        left, right = given

        def free(x: Operation, *taken: Sequence[int]) -> list[int]:
            used = {axis for axes in taken for axis in axes}
            return [axis for axis in range(len(self.shapes[x])) if axis not in used]

        rows, columns = free(left, left_sums, left_batch), free(right, right_sums, right_batch)
        sizes = [
            math.prod(self.shapes[left][axis] for axis in axes)
            for axes in (left_batch, rows, left_sums)
        ]
        several, m, k = sizes
        n = math.prod(self.shapes[right][axis] for axis in columns)
        left = self._permuted(left, [*left_batch, *rows, *left_sums])
        if left_batch:
            right = self._permuted(right, [*right_batch, *right_sums, *columns])
            factors = self._viewed(left, (several, m, k)), self._viewed(right, (several, k, n))
            product = self.add("bmm", list(factors), (several, m, n), np.matmul)
        elif self._is_fixed(left) and not self._is_fixed(right):
            # The weight stands last, as in a linear layer.
            right = self._viewed(self._permuted(right, [*columns, *right_sums]), (n, k))
            weight = self._permuted(self._viewed(left, (m, k)), (1, 0))
            product = self.add("mm", [right, weight], (n, m), np.matmul)
            product = self._permuted(product, (1, 0))
        else:
            right = self._viewed(self._permuted(right, [*right_sums, *columns]), (k, n))
            product = self.add("mm", [self._viewed(left, (m, k)), right], (m, n), np.matmul)
        if (dtype := eqn.params["preferred_element_type"]) not in (None, eqn.invars[0].aval.dtype):
            product = self._converted(product, dtype)
        return self._viewed(product, shape)

    def _is_fixed(self, one: Operation) -> bool:
        """Whether a value does not depend on the input."""
        return all(before.name != "input" for before in one.before())

    def _turns(self, eqn: Any, given: list[Any]) -> list[Any]:
        """A loop of a fixed number of turns, turn by turn."""
        params, body = eqn.params, eqn.params["jaxpr"]
        length = params["length"]
        # Constants come first, then the state, then arrays of which every turn reads a row. How
        # many there are of each has other names in other versions of JAX; what a turn reads or
        # gives row by row has an axis less in the body.
        pairs = zip(eqn.invars, body.in_avals, strict=True)
        row_by_row = sum(outside.aval.ndim > inside.ndim for outside, inside in pairs)
        pairs = zip(eqn.outvars, body.out_avals, strict=True)
        carried = sum(outside.aval.ndim == inside.ndim for outside, inside in pairs)
        fixed = len(given) - row_by_row - carried
        if length > MOST_TURNS:
            raise UnsupportedLayer(
                f"{self.place} has a loop of {length:,} turns (jax.lax.scan), and loops are "
                f"written out up to {MOST_TURNS:,}"
            )
        constants, state = given[:fixed], given[fixed : fixed + carried]
        every = given[fixed + carried :]
        results: list[list[Any]] = []
        order = range(length - 1, -1, -1) if params["reverse"] else range(length)
        for turn in order:
            rows = (self._sliced(x, 0, turn, turn + 1) for x in every)
            parts = [self._viewed(row, self.shapes[row][1:]) for row in rows]
            found = self.called(body, [*constants, *state, *parts])
            state = found[:carried]
            results.append(found[carried:])
        if not results:
            rows_of_none = [np.zeros(var.aval.shape) for var in eqn.outvars[carried:]]
            return [*state, *map(self.constant, rows_of_none)]
        if params["reverse"]:
            results.reverse()
        stacked = []
        for column in zip(*results, strict=True):
            rows = [self._viewed(one, (1, *self.shapes[one])) for one in column]
            whole = (length, *self.shapes[rows[0]][1:])
            stacked.append(self.add("cat", [rows, 0], whole, np.concatenate))
        return [*state, *stacked]


def _results(eqn: Any, given: Sequence[Any]) -> list[Any]:
    """What JAX computes for a primitive, in float64."""
    with jax.enable_x64(True):
        given = [
            np.asarray(one, dtype=atom.aval.dtype) if np.ndim(one) == 0 else np.asarray(one)
            for one, atom in zip(given, eqn.invars, strict=True)
        ]
        found = eqn.primitive.bind(*given, **eqn.params)
    several = found if eqn.primitive.multiple_results else [found]
    return [np.asarray(one) for one in several]


def _wide(array: np.ndarray) -> np.ndarray:
    """An array of floats in float64."""
    floats = jax.numpy.issubdtype(array.dtype, np.floating)
    return array.astype(np.float64) if floats else array
