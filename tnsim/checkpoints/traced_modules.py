"""PyTorch modules into layers, by the operations of their forward pass.

`torch.export` writes the forward pass for a single input down as operations on arrays. Here they
are carried out once more on *affine values*: every value that depends on the input is an affine
function of a state, the vector that the layers so far give. Operations that are affine in such
values keep them affine, whatever they do to axes: einsum with weights, convolution, pooling,
normalisation by running statistics. A product of two values makes hidden units, a unit for each
entry of the product, and values become affine in these as well. Where all that follows depends on a
single value, this value is the next state, and the layer that leads to it is

    z' = S z + D (h_1 * ... * h_n) + c,    h_j = W_j z + b_j

which is a `Linear`, a `Bilinear` or a `Multilinear`, with a `Residual` around it where S is a
multiple of the identity. Any other S is carried by hidden units of its own, `(S z) * 1`.

An activation of a value, entry by entry, makes hidden units too: `h = f(W_1 z + b_1)`, or with a
product behind it `f(W_1 z + b_1) * (W_2 z + b_2)`, the units of a `Gated` layer. There S is carried
by a state (z, S z), to the second part of which a residual connection adds the units. A step that
multiplies its own argument, as in JumpReLU, is an activation of its argument.

The linear part of a value is kept as the operations that compute it (`_Map`), and becomes a matrix
for the rows of hidden units and at the end alone. So an image of n numbers needs no n^2 of them on
its way through normalisation, convolution and pooling, and a map to few numbers is computed row by
row, backwards. Where rows have few entries, as those of convolutions of polynomial networks have,
the matrix is a `SparseMatrix`, of which `sparse_maps` finds the entries alone.

Reading order: `traced_layers` goes through the operations by a `_Trace`, which keeps the affine
values (`_Value`); `_Stack` holds the state, the hidden units on top of it and the layers.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
import math
import types
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.fx

from tnsim.activations.activation import Activation, activation, jump_relu
from tnsim.checkpoints.module_calls import array
from tnsim.checkpoints.module_rules import activation_between
from tnsim.checkpoints.sparse_maps import (
    FEWEST,
    FILLED,
    LARGEST,
    LinearMap,
    Pattern,
    agrees,
    pattern_of,
)
from tnsim.checkpoints.written_activations import FILLS, Written, WrittenActivations
from tnsim.errors import TnsimError, TooLarge, UnsupportedLayer
from tnsim.models.activated import Gated
from tnsim.models.arrays import host_array
from tnsim.models.functions import array_of
from tnsim.models.layers import Bilinear, Linear, Multilinear, Residual
from tnsim.models.matrices import Columns, SparseMatrix
from tnsim.sessions import session

log: logging.Logger = logging.getLogger(__name__)

AXES = """_to_copy _unsafe_view alias as_strided cat clone constant_pad_nd contiguous copy detach
diagonal expand flip gather index index_select lift_fresh_copy narrow permute pixel_shuffle
pixel_unshuffle repeat reshape roll select slice split split_with_sizes squeeze stack t transpose
tril triu unbind unfold unsqueeze view where"""
"""Operations that choose and order entries."""

SUMS = """_adaptive_avg_pool2d _adaptive_avg_pool3d add avg_pool1d avg_pool2d avg_pool3d convolution
cumsum div mean neg rsub sub sum upsample_bilinear2d upsample_nearest2d"""
"""Operations that add entries up, with weights that do not depend on the input."""

PRODUCTS = "_trilinear addmm baddbmm bmm dot matmul mm mul mv"
"""Operations that multiply where more than one argument depends on the input."""

AFFINE = frozenset(f"{AXES} {SUMS} {PRODUCTS}".split())
"""All operations that are affine in their arguments, as long as no two of them are multiplied."""

FIRST_ALONE = ("convolution", "div", "gather", "index")
"""Operations that are affine in their first argument alone."""

WHOLE = ("elu", "hardswish", "leaky_relu", "logaddexp", "relu6", "silu", "softplus")
"""Operations that an export would write as several."""

AT_ONCE = 2**19
"""Entries of the largest array on the way, over all rows of a matrix that are computed at once."""

NEGLIGIBLE = 1e-13
"""Singular values below this part of the largest are rounding."""

MERGED = 2**22
"""Most entries of sparse matrices that are written out in order to save hidden units."""

_Rows: TypeAlias = torch.Tensor | SparseMatrix
"""The matrix of a layer; sparse where it has no gradient and rows have few entries."""


@dataclass(frozen=True, eq=False)
class _Map:
    """A linear map from coordinates to an array, as the operations that compute it.

    Args:
        size: Number of coordinates.
        shape: Shape of the array; of the first array where an operation gives several.
        like: Array of the dtype and on the device of the numbers.
        operation: Function of the arrays that the maps before it give; None for the coordinates
            themselves, in the shape of the array.
        before: Maps of the same coordinates, the arrays of which the operation reads.
        inside: Entries of the largest array within the operation, where that is itself maps.
        grids: Shapes of the arrays that the coordinates are, one after another; by default those of
            the maps before, and the shape of the array for the coordinates themselves.
    """

    size: int
    shape: tuple[int, ...]
    like: torch.Tensor
    operation: Callable[..., Any] | None = None
    before: tuple[_Map, ...] = ()
    inside: int = 0
    grids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        known = self.before[0].grids if self.before else (self.shape,)
        object.__setattr__(self, "grids", self.grids or known)

    @classmethod
    def of(cls, matrix: torch.Tensor) -> _Map:
        """The map of a matrix (entries, coordinates)."""
        entries, size = matrix.shape
        coordinates = cls(size, (size,), matrix)
        return cls(size, (entries,), matrix, lambda z: matrix @ z, (coordinates,))

    @property
    def entries(self) -> int:
        """Number of entries of the array."""
        return math.prod(self.shape)

    @property
    def is_stored(self) -> bool:
        """Whether the dense matrix may be written out."""
        return self.entries * self.size <= LARGEST

    @property
    def is_small(self) -> bool:
        """Whether the matrix costs hardly more than a few runs."""
        return self.entries * self.size < FEWEST

    @cached_property
    def widest(self) -> int:
        """Entries of the largest array on the way."""
        before = (earlier.widest for earlier in self.before)
        return max(self.entries, self.size, self.inside, *before)

    def at(self, coordinates: torch.Tensor) -> Any:
        """The array at coordinates (size,)."""
        return self._computed(coordinates, {})

    def _computed(self, coordinates: torch.Tensor, known: dict[_Map, Any]) -> Any:
        # A map that several others read is computed once.
        if self not in known:
            if self.operation is None:
                known[self] = coordinates.reshape(self.shape)
            else:
                given = [earlier._computed(coordinates, known) for earlier in self.before]
                known[self] = self.operation(*given)
        return known[self]

    def then(self, operation: Callable[[Any], Any], shape: Sequence[int], inside: int = 0) -> _Map:
        """The map followed by a linear operation that gives an array of a shape."""
        return _Map(self.size, tuple(shape), self.like, operation, (self,), inside)

    @cached_property
    def matrix(self) -> torch.Tensor:
        """The matrix of the map, (entries, coordinates)."""
        _check_size(self.entries, self.size)
        if self.operation is None:
            return self._unit_rows(self.size)
        block, flat = self.block, self._flat_at
        if self.entries < self.size:
            # Row i of the matrix is what entry i sends back to the coordinates.
            back = torch.func.vjp(flat, self.like.new_zeros(self.size))[1]
            rows = self._unit_rows(self.entries).split(block)
            return torch.cat([torch.vmap(back)(some)[0] for some in rows])
        columns = self._unit_rows(self.size).split(block)
        return torch.cat([torch.vmap(flat)(some) for some in columns]).T

    @property
    def block(self) -> int:
        """Vectors of coordinates that are computed at once."""
        return max(1, AT_ONCE // self.widest)

    @property
    def by_runs(self) -> LinearMap:
        """The map as a function of NumPy."""

        def run(points: np.ndarray) -> np.ndarray:
            return host_array(torch.vmap(self._flat_at)(torch.from_numpy(points).to(self.like)))

        return LinearMap(run, self.grids, self.entries, self.block)

    @cached_property
    def probed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The array at ones, random coordinates, and the array there: what large maps tell."""
        rng = torch.Generator().manual_seed(0)
        random = torch.randn(self.size, generator=rng, dtype=torch.float64).to(self.like)
        return self.at(torch.ones_like(random)).flatten(), random, self.at(random).flatten()

    @property
    def matters(self) -> bool:
        """Whether the map has a gradient or is not zero."""
        entries = self.matrix if self.is_small else self.probed[2]
        return entries.requires_grad or bool(entries.any())

    def _flat_at(self, coordinates: torch.Tensor) -> torch.Tensor:
        return self.at(coordinates).flatten()

    def _unit_rows(self, count: int) -> torch.Tensor:
        return torch.eye(count, dtype=self.like.dtype, device=self.like.device)


@dataclass(frozen=True, eq=False)
class _Value:
    """An array that is an affine function of the state and of hidden units.

    Args:
        constant: The array where the state and all hidden units are zero.
        slopes: Linear map from the coordinates of a source to the array, for every source: 0 for
            the state, n for block n of hidden units.
    """

    constant: torch.Tensor
    slopes: dict[int, _Map]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.constant.shape)


@dataclass(frozen=True, eq=False)
class _Draft:
    """A layer `s z + D (h_1 * ... * h_n) + c` of tensors; without factors `D z + c`.

    Args:
        factors: Pairs (W_j, b_j) of the factors h_j = W_j z + b_j.
        down: Linear map D.
        bias: Vector c.
        skip: Number s; None for no residual connection.
        function: Activation of the first factor; None for a product.
    """

    factors: list[tuple[_Rows, torch.Tensor]]
    down: _Map
    bias: torch.Tensor
    skip: float | None = None
    function: Activation | None = None


def exports_of(module: torch.nn.Module, output: str | int | None) -> dict[Hashable, _Export]:
    """The operations of modules of one structure that are known so far.

    An export takes most of the time of reading and is the same for all weights. The structure is
    classes with the code of their methods, modes, attributes that are no weights, and the shapes of
    all tensors. Code may read more than that, such as the attributes of foreign objects, so a
    caller compares layers with the module and clears the mapping where they differ.

    Args:
        module: A module.
        output: Output that the module is asked for.

    Returns:
        A mapping that `traced_layers` reads and adds to, shared by modules of equal structure.
    """
    return session().exports.get((output, _structure(module, set())), dict)


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_INTERNAL = frozenset(vars(torch.nn.Module()))  # attributes that every module has


def _structure(value: Any, above: set[int]) -> Hashable:
    """A key of what an export may depend on, besides the weights.

    Args:
        value: A module, or any value that is reachable from it.
        above: Identities of the objects around the value, against circles.
    """
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, torch.Tensor):
        # A tensor that is no parameter and no buffer is a constant of the export.
        content = value.detach().cpu().flatten().contiguous().view(torch.uint8)
        digest = hashlib.blake2b(content.numpy().tobytes()).hexdigest()
        return tuple(value.shape), value.dtype, digest
    if id(value) in above:
        return type(value)
    inside = partial(_structure, above=above | {id(value)})
    if isinstance(value, torch.nn.Module):
        weights = {**value._parameters, **value._buffers}
        shapes = [
            (name, tensor is not None and (tuple(tensor.shape), tensor.dtype))
            for name, tensor in weights.items()
        ]
        own = {name: one for name, one in vars(value).items() if name not in _INTERNAL}
        children = [(name, inside(child)) for name, child in value._modules.items()]
        return (type(value), value.training, *shapes, inside(own), *children, _methods(type(value)))
    if isinstance(value, types.FunctionType):
        return _code(value, inside)
    if isinstance(value, types.MethodType):
        return inside(value.__func__), inside(value.__self__)
    if isinstance(value, partial):
        return inside(value.func), inside(value.args), inside(value.keywords)
    if isinstance(value, (list, tuple)):
        return type(value), *map(inside, value)
    if isinstance(value, dict):
        return type(value), *((repr(key), inside(one)) for key, one in value.items())
    if isinstance(value, (types.BuiltinFunctionType, type)):
        return repr(value)
    own = getattr(value, "__dict__", {})  # of a foreign object, such as a configuration
    return type(value), *((name, repr(one)) for name, one in own.items() if isinstance(one, _PLAIN))


def _code(function: types.FunctionType, inside: Callable[[Any], Hashable]) -> Hashable:
    """The code of a function with the values around it that are no modules of Python."""
    named = inspect.getclosurevars(function)
    around = [function.__globals__.get(name) for name in function.__code__.co_names]
    plain = [repr(one) if isinstance(one, _PLAIN) else type(one).__name__ for one in around]
    cells = [inside(value) for value in named.nonlocals.values()]
    return function.__code__, inside(function.__defaults__), *cells, *plain


def _methods(cls: type) -> Hashable:
    """The code of the methods of a class that is no class of PyTorch."""
    methods = []
    for one in cls.__mro__:
        if one.__module__.partition(".")[0] not in ("torch", "builtins"):
            for name, value in vars(one).items():
                if isinstance(value, types.FunctionType):
                    methods.append((name, _code(value, repr)))
                elif isinstance(value, _PLAIN):
                    methods.append((name, repr(value)))
    return tuple(methods)


def traced_layers(
    module: torch.nn.Module, example: torch.Tensor, exports: dict[Hashable, _Export]
) -> list[Any]:
    """The layers of the function of a module, read off the operations of its forward pass.

    Args:
        module: A module, read as it is in evaluation mode; parameters may require grad.
        example: Inputs that the module takes, floats (inputs, ...); the first input is traced.
        exports: Operations of modules of the same structure, to which missing ones are added.

    Returns:
        Layers of tnsim on the input as a flat vector, of tensors of the type of the parameters.

    Raises:
        UnsupportedLayer: The module cannot be traced, an operation is neither polynomial nor an
            activation.
        TooLarge: A layer would be a matrix of more than `LARGEST` numbers.

    Example:
        >>> class Product(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.rows = torch.nn.Parameter(torch.ones(2, 3))
        ...
        ...     def forward(self, x):
        ...         return torch.einsum("hi,bi,bh->b", self.rows, x, x @ self.rows.T)[:, None]
        >>> with torch.no_grad():
        ...     (layer,) = traced_layers(Product(), torch.zeros(1, 3), {})
        >>> layer.left.shape, layer.down.shape
        ((1, 3), (1, 1))

    Source:
        Forward differentiation of affine maps; a product of affine functions is a term of a CP
        decomposition.
    """
    # A single input is traced, as layers act on each input alone.
    first = example[:1].detach()
    # Copies in another precision have operations of their own.
    key = first.shape, first.dtype, torch.get_default_dtype()
    if key not in exports:
        exports[key] = _exported(module, first)
    export = exports[key]
    arrays = export.arrays(module)
    # A weight that is zero now may not be zero in other checkpoints, whose places are the same.
    filled = {node: _without_zeros(one) for node, one in arrays.items()}
    is_filled = all(filled[node] is one for node, one in arrays.items())
    trace = _Trace(first, export, arrays, is_filled)
    if trace.stack.patterns == {} and not is_filled:
        try:
            _Trace(first, export, filled, True).run()
        except TnsimError as reason:  # of these numbers; the module's own say what is wrong
            log.debug("places of entries are those of the weights: %s", reason)
    return trace.run()


def _without_zeros(array: Any) -> Any:
    """A parameter with random numbers in the place of zeros; any other array unchanged."""
    if not isinstance(array, torch.nn.Parameter) or bool(array.all()):
        return array
    rng = torch.Generator().manual_seed(0)
    random = torch.rand(array.shape, generator=rng).to(array) + 0.5
    return torch.where(array.detach() == 0, random, array.detach())


class _NoLayerError(UnsupportedLayer):
    """Values of which no layer is made, though an activation of the user's own might be."""


class _Trace:
    """A forward pass on affine values.

    Args:
        example: Input of the forward pass.
        export: Operations of the forward pass.
        arrays: Tensors of the module, by their nodes.
        is_filled: Whether no parameter has zeros, so that zeros of layers are no weights.

    Attributes:
        graph: Operations of the forward pass.
        values: Arrays, affine values and lists of both, by the node that computed them.
        uses: Nodes that still read a value, by the node of the value.
        stack: Layers, state and hidden units.
    """

    def __init__(
        self, example: torch.Tensor, export: _Export, arrays: dict[Any, Any], is_filled: bool
    ) -> None:
        self.graph, self.values = export.graph, dict(arrays)
        self.example = example
        varying = self._fold_constants()
        self.activations = WrittenActivations(varying, self.values)
        self.written, self.reads = self._plan(set(varying))
        patterns = export.patterns if self._may_be_sparse() else None
        self.stack = _Stack(example, patterns, is_filled)
        # A value that no later operation reads is left out of the next state.
        self.uses: dict[Any, set[torch.fx.Node]] = {node: set() for node in self.graph.nodes}
        for node, before in self.reads.items():
            for one in before:
                self.uses[one].add(node)

    def run(self) -> list[Any]:
        """Go through all operations, and give the layers."""
        for node in self.graph.nodes:
            try:
                if node.op == "output":
                    return self.layers(node)
                self.step(node)
            except _NoLayerError as refused:
                advice = self.activations.advice_at(node)
                raise UnsupportedLayer(f"{refused}{advice}") from refused
        raise AssertionError("a graph ends with its output")

    def step(self, node: torch.fx.Node) -> None:
        """Compute a value, and begin a new layer where all that follows depends on it alone."""
        if node not in self.reads or node in self.values:
            return
        if node.op == "placeholder":
            self.values[node] = self.stack.state(self.example.shape)
        elif node in self.written:
            self.values[node] = self._activated_value(node, self.written[node])
        else:
            self.values[node] = self._computed_value(node)
        for before in self.reads[node]:
            self.uses[before].discard(node)
        live = self._live_values()
        # Only a value that carries all the rest can become the next state.
        alone = list(live) == [(node, None)] and self.stack.ends_layer(live[node, None])
        if alone and not _is_squared(node):  # relu(x)^2 is one activation
            self._settle_values(live)

    def _fold_constants(self) -> list[torch.fx.Node]:
        """Compute what does not depend on the input, and list the nodes of all that does."""
        varying: dict[torch.fx.Node, None] = {}  # a set that keeps its order
        for node in self.graph.nodes:
            if node in self.values or _operation_name(node).startswith("_assert"):
                continue
            reading = [one for one in node.all_input_nodes if one in varying]
            if node.op == "placeholder" or (reading and _operation_name(node) not in FILLS):
                varying[node] = None
            elif node.op == "call_function":
                # Of arrays that depend on the input nothing but the shape is read.
                shapes = {one: self.example.new_empty(one.meta["val"].shape) for one in reading}
                self.values[node] = self._applied_operation(node, self.values | shapes)
        return [node for node in varying if node.op != "output"]

    def _may_be_sparse(self) -> bool:
        """Whether layers may have sparse matrices: without gradients and without activations."""
        # Kernels of activations read dense rows.
        is_polynomial = not self.written and "gt" not in map(_operation_name, self.reads)
        arrays = [value for value in self.values.values() if isinstance(value, torch.Tensor)]
        return is_polynomial and not any(value.requires_grad for value in arrays)

    def _plan(
        self, varying: set[torch.fx.Node]
    ) -> tuple[dict[torch.fx.Node, Written], dict[torch.fx.Node, list[torch.fx.Node]]]:
        """Activations that are written out, and the nodes that each node needed reads."""
        written: dict[torch.fx.Node, Written] = {}
        reads: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        needed = {node for node in self.graph.nodes if node.op == "output"}
        for node in reversed(self.graph.nodes):
            if node not in needed:
                continue
            found = self.activations.written(node) if node in varying else None
            if found is not None:
                written[node] = found
            reads[node] = node.all_input_nodes if found is None else found.reads
            needed |= set(reads[node])
        return written, reads

    def layers(self, output: torch.fx.Node) -> list[Any]:
        """The layers, up to the output."""
        ((result,),) = output.args  # pyright: ignore
        value = self.values[result]
        if not isinstance(value, _Value):
            raise UnsupportedLayer("the output of the forward pass does not depend on the input")
        return self.stack.finished(value)

    def _live_values(self) -> dict[Hashable, _Value]:
        """Values that depend on the input and are used later, by node and place in a list."""
        live: dict[Hashable, _Value] = {}
        for node, value in self.values.items():
            if self.uses[node]:
                parts = enumerate(value) if isinstance(value, list) else [(None, value)]
                live |= {(node, n): part for n, part in parts if isinstance(part, _Value)}
        return live

    def _settle_values(self, live: dict[Hashable, _Value]) -> None:
        """End a layer: live values become affine functions of a new state."""
        for (node, place), value in self.stack.settle(live).items():  # pyright: ignore
            if place is None:
                self.values[node] = value
            else:
                self.values[node][place] = value

    def _computed_value(self, node: torch.fx.Node) -> Any:
        """The result of a single operation on arrays and affine values."""
        name = _operation_name(node)
        if name == "getitem":
            whole, place = node.args
            return self.values[whole][place]
        varying = [
            operand for operand in node.all_input_nodes if isinstance(self.values[operand], _Value)
        ]
        if name == "pow" and _is_power(node):
            return self._power_value(node)
        places = [n for n, argument in enumerate(node.args) if _reads_any(argument, varying)]
        if name == "gt" and places == [0]:
            return self._step_value(node)
        chooses = name == "where" and places[0] == 0
        if chooses and places == [0, 1] and not self._has_entries(node.args[2]):
            return self._multiplied_values(node, places)  # where(u > t, u, 0)
        if name not in AFFINE or (name in FIRST_ALONE and places != [0]) or chooses:
            said = f"{_place_of(node)} computes {name}, "
            if reason := _refusal_reason(name):
                raise UnsupportedLayer(f"{said}{reason}")
            raise _NoLayerError(f"{said}which is neither polynomial nor a known activation")
        # The first argument of `addmm` and `baddbmm` is added, not multiplied.
        factors = [n for n in places if n > 0 or name not in ("addmm", "baddbmm")]
        if name in PRODUCTS.split() and len(factors) > 1:
            return self._multiplied_values(node, factors)
        return self._affine_result(node, varying)

    def _applied_operation(self, node: torch.fx.Node, values: dict[Any, Any]) -> Any:
        """The operation itself, on arrays."""
        arguments = torch.fx.map_arg((node.args, node.kwargs), lambda operand: values[operand])
        assert callable(node.target)
        return node.target(*arguments[0], **arguments[1])

    def _affine_result(self, node: torch.fx.Node, varying: list[torch.fx.Node]) -> Any:
        """An affine operation f: its constant is f(constants), its slopes are f(slopes) - f(0)."""
        given = {one: self.values[one] for one in varying}
        # All other arguments are arrays, which stay the same in every direction.
        others = {one: self.values[one] for one in node.all_input_nodes if one not in given}

        def applied(arrays: dict[torch.fx.Node, torch.Tensor]) -> Any:
            return self._applied_operation(node, others | arrays)

        constant = applied({one: value.constant for one, value in given.items()})
        zeros = {one: torch.zeros_like(value.constant) for one, value in given.items()}
        origin = applied(zeros)
        # Operations such as `split` give several arrays.
        several = not isinstance(constant, torch.Tensor)
        values = [_Value(part, {}) for part in (constant if several else [constant])]
        # An operation that is affine in its arguments maps directions as it maps their difference
        # from zero.
        for source in sorted({source for value in given.values() for source in value.slopes}):
            reading = [one for one, value in given.items() if source in value.slopes]

            def moved(*arrays: torch.Tensor, reading: list[torch.fx.Node] = reading) -> Any:
                result = applied(zeros | dict(zip(reading, arrays, strict=True)))
                if not several:
                    return result - origin
                return [one - other for one, other in zip(result, origin, strict=True)]

            before = tuple(given[one].slopes[source] for one in reading)
            whole = _Map(before[0].size, values[0].shape, self.example, moved, before)
            for n, part in enumerate(values):
                slope = whole.then(itemgetter(n), part.shape) if several else whole
                part.slopes[source] = slope
        return values if several else values[0]

    def _multiplied_values(self, node: torch.fx.Node, places: list[int]) -> _Value:
        """A product of several arguments that depend on the input."""
        name = _operation_name(node)
        if len(places) == 2:
            first, second = self._unit_factors([node.args[n] for n in places])
            if name in ("mul", "where"):
                return self._hidden_product(first, second)
            if name in ("mm", "bmm", "mv", "dot", "matmul"):
                # sum_k x_ik y_kj, all products x_ik y_kj as hidden units
                first = _mapped_value(first, lambda x: x.unsqueeze(-1))
                second = _mapped_value(second, lambda y: y.unsqueeze(-3))
                return _mapped_value(
                    self._hidden_product(first, second), lambda product: product.sum(-2)
                )
            if name == "_trilinear" and places == [0, 2]:
                # nn.Bilinear: sum_j (sum_i x_i W_oij) y_j, as many hidden units as (o, j)
                weight = self.values[node.args[1]]
                first = _mapped_value(first, lambda x: torch.einsum("bi,oij->boj", x, weight))
                second = _mapped_value(second, lambda y: y.unsqueeze(-2))
                return _mapped_value(
                    self._hidden_product(first, second), lambda product: product.sum(-1)
                )
        raise UnsupportedLayer(
            f"{_place_of(node)} multiplies {len(places)} values by {name}, which is not read"
        )

    def _has_entries(self, argument: Any) -> bool:
        """Whether an argument that does not depend on the input is not zero everywhere."""
        known = self.values[argument] if isinstance(argument, torch.fx.Node) else argument
        return bool(torch.as_tensor(known).any())

    def _step_value(self, node: torch.fx.Node) -> _Value:
        """1 where a value is above an array of thresholds, and 0 elsewhere."""
        (argument, threshold) = node.args
        value = self._affine_value(argument)
        constant = value.constant - self.values[threshold]
        shape = constant.shape
        # Thresholds may broadcast the argument to a larger shape.
        grown = _mapped_value(value, lambda x: x.expand(shape))
        return self.stack.activated(_Value(constant, grown.slopes), activation("step"))

    def _activated_value(self, node: torch.fx.Node, written: Written) -> _Value:
        """An activation of a value, of every entry alone, perhaps times another value."""
        fit = written.fit
        value = self._affine_value(written.argument)
        inner = _mapped_value(value, lambda x: fit.scale * x)
        inner = _Value(inner.constant + fit.shift, inner.slopes)
        activated = self.stack.activated(inner, fit.function)
        result = _mapped_value(activated, lambda x: fit.factor * x)
        if written.times is not None:
            # The activation is a value like others, should a product end a layer first.
            self.values[written] = result
            self.uses[written] = {node}
            product = self._hidden_product(*self._unit_factors([written, written.times]))
            del self.values[written], self.uses[written]
            return product
        return _Value(result.constant + fit.offset, result.slopes)

    def _affine_value(self, node: Any) -> _Value:
        """A value that is affine in the state alone, after a new layer where it is not."""
        if not set(self.values[node].slopes) <= {0}:
            self._settle_values(self._live_values())
        return self.values[node]

    def _power_value(self, node: torch.fx.Node) -> _Value:
        """A whole power of a value, as a product of equal factors."""
        if node.args[1] == 2 and (squared := self.stack.squared(self.values[node.args[0]])):
            return squared
        (base,) = self._unit_factors([node.args[0]])
        # Each factor is a leg of the next `Multilinear` layer.
        result = base
        for _ in range(int(node.args[1]) - 1):  # pyright: ignore
            result = self._hidden_product(result, base)
        return result

    def _unit_factors(self, nodes: list[Any]) -> list[_Value]:
        """Values that hidden units can be made of, after a new layer where they are no such."""
        values = [self.values[operand] for operand in nodes]
        # Only products of affine functions, or with single units, are hidden units again.
        if not (all(map(self.stack.multiplies, values)) and self.stack.gates(values)):
            self._settle_values(self._live_values())
        return [self.values[operand] for operand in nodes]

    def _hidden_product(self, one: _Value, two: _Value) -> _Value:
        """The product of two values that broadcast to a common shape."""
        shape = torch.broadcast_shapes(one.shape, two.shape)
        grown = [
            value if value.shape == shape else _mapped_value(value, lambda x: x.expand(shape))
            for value in (one, two)
        ]
        return self.stack.multiplied(*grown)


class _Stack:
    """The layers so far, and hidden units on top of the state that they give.

    Attributes:
        drafts: The layers.
        grids: Shapes of the arrays that a source is, one after another; source 0 is the state.
        units: Factors of each block of hidden units, pairs (W, b) of shapes (n, width) and (n,).
        functions: Activations of the first factors of blocks, if any.
        patterns: Places of the entries of sparse matrices, in the order in which they are made;
            None where all matrices are dense.
        is_filled: Whether zeros in layers are no weights of the module.
    """

    def __init__(
        self, example: torch.Tensor, patterns: dict[int, Pattern | None] | None, is_filled: bool
    ) -> None:
        self.like = example
        self.drafts: list[_Draft] = []
        self.grids: dict[int, tuple[tuple[int, ...], ...]] = {0: (tuple(example.shape),)}
        self.units: dict[int, list[tuple[_Rows, torch.Tensor]]] = {}
        self.functions: dict[int, Activation] = {}
        self.patterns, self.is_filled = patterns, is_filled
        self._known: dict[_Map, tuple[int, Pattern | None, bool]] = {}
        self._matrices: dict[_Map, SparseMatrix] = {}

    @property
    def width(self) -> int:
        """Coordinates of the state."""
        return self.size(0)

    def coordinates(self, source: int) -> _Map:
        """The coordinates of a source, as a vector."""
        size = self.size(source)
        return _Map(size, (size,), self.like, grids=self.grids[source])

    def pattern(self, linear: _Map) -> Pattern | None:
        """Places of the entries of the matrix of a map; None where the matrix is dense."""
        if self.patterns is None:
            return None
        if linear not in self._known:
            number, shape = len(self._known), (linear.entries, linear.size)
            pattern = self.patterns.get(number)
            # An earlier reading met the same map at this number, unless it made other layers.
            is_new = number not in self.patterns or (pattern is not None and pattern.shape != shape)
            if is_new:
                pattern = self.patterns[number] = pattern_of(linear.by_runs)
            self._known[linear] = number, pattern, is_new
        return self._known[linear][1]

    def matrix(self, linear: _Map) -> _Rows:
        """The matrix of a map, sparse where rows have few entries."""
        pattern = self.pattern(linear)
        if pattern is None:
            return linear.matrix
        if linear in self._matrices:
            return self._matrices[linear]
        by_runs = linear.by_runs
        made = pattern.matrix_of(by_runs)
        number, _, is_new = self._known[linear]
        # Entries that are zero in earlier readings may have no place.
        if not is_new and not agrees(made, by_runs):
            self.patterns[number] = pattern = pattern_of(by_runs)
            if pattern is None:
                return linear.matrix
            made = pattern.matrix_of(by_runs)
            is_new = True
        if is_new and self.is_filled:
            self.patterns[number], made = pattern.trimmed(made)
        self._matrices[linear] = made
        return made

    def size(self, source: int) -> int:
        """Number of coordinates of the state (source 0) or of a block of hidden units."""
        return sum(map(math.prod, self.grids[source]))

    def state(self, shape: Sequence[int]) -> _Value:
        """The state itself, as an array of a shape."""
        coordinates = _Map(self.width, tuple(shape), self.like, grids=self.grids[0])
        return _Value(self.like.new_zeros(tuple(shape)), {0: coordinates})

    def multiplies(self, value: _Value) -> bool:
        """Whether each entry of a value is affine in the state alone, or a multiple of a unit."""
        if set(value.slopes) <= {0}:
            return True
        # A sum of a unit and anything else is no factor.
        if len(value.slopes) > 1 or bool(value.constant.any()):
            return False
        (slope,) = value.slopes.values()
        if slope.operation is None:
            return True
        # Every entry has to be a multiple of exactly one unit; of matrices that are too large
        # nobody looks.
        if self.pattern(slope) is None and not slope.is_stored:
            return False
        return bool((_counts(self.matrix(slope)) == 1).all())

    def multiplied(self, one: _Value, two: _Value) -> _Value:
        """The product, entry by entry, of two values of equal shape: a block of hidden units."""
        if self._activation_in(one) is None and self._activation_in(two) is None:
            return self._new_block([*self._unit_factors(one), *self._unit_factors(two)], one.shape)
        # The activation goes first, as the gate of its layer.
        first, second = (one, two) if self._activation_in(one) is not None else (two, one)
        # A step multiplies what it is a step of, so the step decides.
        if self._activation_in(second) is not None and self._operation_name(second) == "step":
            first, second = second, first
        function = self._activation_in(first)
        assert function is not None  # as `gates` says
        size, ((weight, bias),) = self._unit_of(first)
        if function.name != "step":
            up, shift = self._unit_factors(second)[0]
            factors = [(weight, bias), (size[:, None] * up, size * shift)]
            return self._new_block(factors, one.shape, function)
        # u 1(u > t) = t j(u / t) with j the JumpReLU of threshold 1, and ReLU at t = 0
        height, thresholds = self._step_heights(first, second)
        # A step at zero of its own argument is ReLU.
        if not bool((thresholds > 0).any()):
            activated = self._new_block([(weight, bias)], one.shape, activation("relu"))
        else:
            factors = [(weight / thresholds[:, None], bias / thresholds + 1)]
            height = height * thresholds
            activated = self._new_block(factors, one.shape, jump_relu(1.0))
        # Heights are put into the slope, behind the activation.
        return _mapped_value(activated, lambda x: x * (size * height).reshape(one.shape))

    def activated(self, value: _Value, function: Activation) -> _Value:
        """An activation of every entry of a value that is affine in the state."""
        return self._new_block(self._unit_factors(value), value.shape, function)

    def squared(self, value: _Value) -> _Value | None:
        """The square of multiples of rectified units, hidden units as well; else None."""
        if self._operation_name(value) != "relu" or not self.multiplies(value):
            return None
        size, factors = self._unit_of(value)
        if len(factors) > 1:
            return None
        activated = self._new_block(factors, value.shape, activation("relu2"))
        # The square of k relu(u) is k^2 times the square of relu(u), whatever the sign of k.
        return _mapped_value(activated, lambda x: x * (size**2).reshape(value.shape))

    def gates(self, values: Sequence[_Value]) -> bool:
        """Whether the product of values is hidden units, should activations be among them.

        An activation multiplies an affine function of the state, or a step what it is a step of.
        """
        activated = [value for value in values if self._activation_in(value) is not None]
        if not activated:
            return True
        if len(values) != 2 or any(len(self._unit_of(value)[1]) > 1 for value in activated):
            return False
        if not any(self._operation_name(value) == "step" for value in activated):
            return len(activated) == 1
        first, second = values if self._operation_name(values[0]) == "step" else values[::-1]
        # A step times ReLU is ReLU again, at the step's threshold.
        if self._operation_name(second) not in ("", "relu"):
            return False
        known = self._step_heights(first, second)
        if known is None or bool((known[1] < 0).any()):
            return False
        # Thresholds of both kinds would need two activations in one layer.
        return bool((known[1] > 0).all()) or not bool(known[1].any())

    def _step_heights(self, step: _Value, other: _Value) -> Any:
        """Numbers k and t with other = k (u + t) where a step is 1(u > 0); None without such."""
        _, ((weight, bias),) = self._unit_of(step)
        if self._activation_in(other) is None:
            size, (up, shift) = torch.ones_like(bias), self._unit_factors(other)[0]
        else:
            size, ((up, shift),) = self._unit_of(other)
        count = len(bias)
        # The step must read the rows that it multiplies.
        if len(shift) != count or not bool((weight == up).all()):
            return None
        return size, shift - bias

    def _activation_in(self, value: _Value) -> Activation | None:
        """The activation of the hidden units that a value is made of."""
        functions = [self.functions[block] for block in value.slopes if block in self.functions]
        return functions[0] if functions else None

    def _operation_name(self, value: _Value) -> str:
        function = self._activation_in(value)
        return "" if function is None else function.name

    def _unit_of(self, value: _Value) -> tuple[torch.Tensor, list[tuple[_Rows, torch.Tensor]]]:
        """The numbers by which entries are multiples of hidden units, and the factors of these."""
        ((block, slope),) = value.slopes.items()
        if slope.operation is None:
            return self.like.new_ones(slope.size), self.units[block]
        # `multiplies` has made sure of a single unit for each entry.
        units, size = _single_entries(self.matrix(slope))
        units, size = units.to(self.like.device), size.to(self.like)
        return size, [(_chosen_rows(w, units), b[units]) for w, b in self.units[block]]

    def _new_block(
        self,
        factors: list[tuple[_Rows, torch.Tensor]],
        shape: tuple[int, ...],
        function: Activation | None = None,
    ) -> _Value:
        """A new block of hidden units, for the entries of a value."""
        # Source 0 is the state.
        block = 1 + max(self.units, default=0)
        self.units[block], self.grids[block] = factors, (tuple(shape),)
        if function is not None:
            self.functions[block] = function
        coordinates = _Map(math.prod(shape), tuple(shape), self.like)
        return _Value(self.like.new_zeros(shape), {block: coordinates})

    def _unit_factors(self, value: _Value) -> list[tuple[_Rows, torch.Tensor]]:
        """The factors of every entry of a value that `multiplies`.

        An entry that is a multiple of a hidden unit has the factors of the unit.
        """
        if set(value.slopes) <= {0}:
            flat = value.constant.flatten()
            # A value without slopes is a constant factor.
            if 0 not in value.slopes:
                return [(self.matrix(self._zero_map(0, flat.shape)), flat)]
            return [(self.matrix(value.slopes[0]), flat)]
        factor, ((weight, bias), *others) = self._unit_of(value)
        return [(_scaled_rows(weight, factor), factor * bias), *others]

    def ends_layer(self, value: _Value) -> bool:
        """Whether a value that all the rest depends on becomes a state of its own.

        A value with hidden units does. An affine function of the state does where it is narrower
        than the state; a wider value is cheaper as rows of the next layer. So is a value that
        would be too large a matrix.
        """
        if set(value.slopes) - {0}:
            return True
        if value.constant.numel() >= self.width:
            return False
        slope = value.slopes[0]
        try:
            return slope.is_stored or self.pattern(slope) is not None
        except TooLarge:
            return False

    def settle(self, values: dict[Hashable, _Value]) -> dict[Hashable, _Value]:
        """Add a layer that gives everything that values depend on, and make this the state.

        A single value becomes the state; of several, all sources that they are affine in.

        Args:
            values: Values that are used later.

        Returns:
            The values, affine in the new state alone.
        """
        if len(values) == 1:
            ((name, value),) = values.items()
            self._append_layer(value, (value.shape,))
            return {name: self.state(value.shape)}
        sources = sorted({source for value in values.values() for source in value.slopes})
        # Units of an activation cannot be carried over the next layer.
        if function := next((self.functions[n] for n in sources if n in self.functions), None):
            raise _NoLayerError(
                f"the forward pass computes {function.name}, and keeps other values beside it over "
                "a nonlinear layer"
            )
        sizes = [self.size(source) for source in sources]
        # The new state is all sources one after another.
        total = sum(sizes)
        ends = list(accumulate(sizes))
        slopes = {}
        for source, size, end in zip(sources, sizes, ends, strict=True):
            around = (end - size, total - end)
            pad = partial(torch.nn.functional.pad, pad=around)
            slopes[source] = self.coordinates(source).then(pad, (total,))
        moved = {}
        for name, value in values.items():
            parts = [
                value.slopes.get(source, self._zero_map(source, value.shape)) for source in sources
            ]
            moved[name] = _Value(value.constant, {0: _side_by_side(parts)})
        grids = tuple(shape for source in sources for shape in self.grids[source])
        self._append_layer(_Value(self.like.new_zeros(total), slopes), grids)
        return moved

    def finished(self, value: _Value) -> list[Any]:
        """All layers of tnsim, the last of which gives a value."""
        # A last layer that is the identity is left out.
        is_state = set(value.slopes) == {0} and _multiple_of_identity(value.slopes[0]) == 1
        if not self.drafts or not is_state or bool(value.constant.any()):
            self._append_layer(value, (value.shape,))
        # Layers take tensors, which they keep where these have gradients.
        return [_layer_of(draft, self.matrix(draft.down)) for draft in self.drafts]

    def _zero_map(self, source: int, shape: Sequence[int]) -> _Map:
        """The map from a source that gives zeros."""
        return self.coordinates(source).then(lambda z: z.new_zeros(tuple(shape)), shape)

    def _append_layer(self, value: _Value, grids: tuple[tuple[int, ...], ...]) -> None:
        """Add the layer that gives a value, flat, and make the value the state, of some grids."""
        bias = value.constant.flatten()
        flat = {one: slope.then(torch.flatten, bias.shape) for one, slope in value.slopes.items()}
        matrix = flat.get(0, self._zero_map(0, bias.shape))
        blocks = [block for block in sorted(value.slopes) if block != 0]
        if blocks:
            down = _side_by_side([flat[block] for block in blocks])
            units = [self.units[block] for block in blocks]
            functions = [self.functions.get(block) for block in blocks]
            # A layer is a product or has an activation, never both.
            if any(functions):
                self._append_activation(units, functions, matrix, down, bias)
            else:
                self.drafts.append(self._product_layer(units, matrix, down, bias, grids))
        else:
            self._append_linear(matrix, bias)
        # Values are affine in the new state from here on.
        self.units, self.functions, self.grids = {}, {}, {0: grids}

    def _product_layer(
        self,
        units: list[list[tuple[_Rows, torch.Tensor]]],
        matrix: _Map,
        down: _Map,
        bias: torch.Tensor,
        grids: tuple[tuple[int, ...], ...],
    ) -> _Draft:
        """The layer `S z + D (units of all blocks) + c`."""
        # A multiple of the identity is a residual and costs no units.
        skip = _multiple_of_identity(matrix)
        if skip is None and matrix.matters:
            rows = self.matrix(matrix)
            carried = _Map(len(bias), (len(bias),), self.like, grids=grids)
            # Rows of zeros, as of a state beside others, need no units.
            needed = _rows_with_entries(rows)
            if len(needed) < len(bias):
                place = torch.full((len(bias),), len(needed), device=self.like.device)
                place[needed] = torch.arange(len(needed), device=self.like.device)
                rows = _chosen_rows(rows, needed)
                carried = _Map(len(needed), tuple(needed.shape), self.like)
                pad = torch.nn.functional.pad
                carried = carried.then(lambda z: pad(z, (0, 1))[place], bias.shape)
            # The block has a single factor, which `_stacked_factors` multiplies by 1.
            units = [*units, [(rows, self.like.new_zeros(len(needed)))]]
            down = _side_by_side([down, carried])
        return _Draft(_stacked_factors(units), down, bias, skip)

    def _append_activation(
        self,
        units: list[list[tuple[_Rows, torch.Tensor]]],
        functions: list[Activation | None],
        matrix: _Map,
        down: _Map,
        bias: torch.Tensor,
    ) -> None:
        """Add the layer `S z + D (units of all blocks) + c` of blocks with the same activation."""
        function = functions[0]
        if function is None or any(other != function for other in functions):
            names = sorted({"a product" if known is None else known.name for known in functions})
            raise _NoLayerError(
                f"one layer computes {' and '.join(names)}, and has room for one activation"
            )
        factors = _stacked_factors(units)
        skip = _multiple_of_identity(matrix)
        if skip is not None or not matrix.matters:
            self.drafts.append(_Draft(factors, down, bias, skip, function))
            return
        # z -> (z, S z) -> (z, S z + D (units) + c), of which the second part is the state
        kept, size = self.width, len(bias)
        total = kept + size
        state = _Map(kept, (kept,), self.like)
        both = (state, matrix)
        carried = _Map(kept, (total,), self.like, lambda z, mapped: torch.cat((z, mapped)), both)
        self._append_linear(carried, self.like.new_zeros(total))
        behind = partial(torch.nn.functional.pad, pad=(kept, 0))
        before = partial(torch.nn.functional.pad, pad=(0, size))
        factors = [(before(rows), shift) for rows, shift in factors]
        self.drafts.append(
            _Draft(factors, down.then(behind, (total,)), behind(bias), 1.0, function)
        )
        every = _Map(total, (total,), self.like)
        self._append_linear(every.then(lambda z: z[kept:], (size,)), torch.zeros_like(bias))

    def _append_linear(self, matrix: _Map, bias: torch.Tensor) -> None:
        """Add a linear layer, merged into a layer before it without skip where that is smaller."""
        if self.drafts and self.drafts[-1].skip is None:
            last = self.drafts[-1]
            # Merging saves a layer where the product is no larger than its two factors.
            apart = (last.down.size + len(bias)) * matrix.size
            if len(bias) * last.down.size <= apart:
                merged = last.down.then(matrix.at, bias.shape, matrix.widest)
                shifted = bias + matrix.at(last.bias)
                self.drafts[-1] = _Draft(last.factors, merged, shifted, None, last.function)
                return
        self.drafts.append(_Draft([], matrix, bias))


class _SingleOutput(torch.nn.Module):
    """A module whose outputs are unwrapped, as `torch.export` knows few classes of outputs."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return array_of(self.module(x))


def _with_plain_activations(module: torch.nn.Module) -> torch.nn.Module:
    """A module of the same tensors, in which activations that are written out are PyTorch's own.

    Classes such as `NewGELUActivation` of transformers compute powers and a tanh, which are no
    activation of one operation. They are known by their values; the caller compares the model with
    the module as it was.
    """
    plain: dict[str | None, torch.nn.Module] = {
        "gelu": torch.nn.GELU(),
        "gelu_tanh": torch.nn.GELU(approximate="tanh"),
        "silu": torch.nn.SiLU(),
    }
    probe = torch.linspace(-9.0, 9.0, 64, dtype=torch.float64)[None]
    # Gradients go to the tensors of the module itself.
    tensors = [*module.parameters(), *module.buffers()]
    copied = copy.deepcopy(module, {id(one): one for one in tensors})
    for path, child in list(copied.named_modules()):
        arrays = any(True for _ in child.parameters()) or any(True for _ in child.buffers())
        if not path or arrays or any(True for _ in child.children()):
            continue
        try:
            function = activation_between(probe.numpy(), array(child(probe)))
        except Exception as reason:  # whatever a part raises that takes no vectors
            log.debug("%s: %s", path, reason)
            continue
        if function in plain:
            copied.set_submodule(path, plain[function])
    return copied


class _Export(NamedTuple):
    """The operations of a forward pass on an argument.

    Attributes:
        graph: Operations.
        names: Names of tensors of the module, or of constants, by the placeholders for them.
        constants: Tensors that are no parameters and no buffers of the module, by name.
        patterns: Places of the entries of sparse matrices that readings have found so far.
    """

    graph: torch.fx.Graph
    names: dict[Any, str]
    constants: dict[str, Any]
    patterns: dict[int, Pattern | None]

    def arrays(self, module: torch.nn.Module) -> dict[Any, Any]:
        """The tensors of a module at placeholders; parameters are the module's own."""
        tensors = dict(self.constants)
        for named in (module.named_buffers, module.named_parameters):
            own = named(remove_duplicate=False)
            tensors |= {f"module.{name}": tensor for name, tensor in own}
        return {node: tensors[name] for node, name in self.names.items()}


def _exported(module: torch.nn.Module, example: torch.Tensor) -> _Export:
    """The operations of the forward pass of a module on an argument."""
    # As everywhere, a module means what it computes in evaluation mode.
    module = _SingleOutput(_with_plain_activations(module)).eval()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # notices about the internals of the export
            program = torch.export.export(module, (example,))
            smaller = torch.export.default_decompositions()
            smaller[torch.ops.aten._native_batch_norm_legit_no_training.default] = _batch_norm
            for name in WHOLE:
                # Such activations stay single operations, so that they can be known by name.
                smaller.pop(getattr(torch.ops.aten, name).default, None)
            program = program.run_decompositions(smaller)
    except Exception as error:  # whatever the forward pass or the export raises
        said = str(error).strip().partition("\n")[0]
        raise UnsupportedLayer(f"the forward pass cannot be traced: {said[:200]}") from error
    signature = program.graph_signature
    named = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    names = {
        node: named[node.name]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in named
    }
    return _Export(program.graph, names, dict(program.constants), {})


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    momentum: float,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Batch norm by running statistics in operations of which many rows run at once."""
    shape = (-1, *(1,) * (x.ndim - 2))
    y = (x - mean.reshape(shape)) * (variance + epsilon).rsqrt().reshape(shape)
    if weight is not None:
        y = y * weight.reshape(shape)
    if bias is not None:
        y = y + bias.reshape(shape)
    # Statistics of the batch, which evaluation has none of.
    return y, x.new_empty(0), x.new_empty(0)


def _side_by_side(maps: Sequence[_Map]) -> _Map:
    """The map of the coordinates of all maps, one after another, to the sum of their arrays."""
    if len(maps) == 1:
        return maps[0]
    sizes = [one.size for one in maps]

    def added(coordinates: torch.Tensor) -> torch.Tensor:
        parts = coordinates.split(sizes)
        return reduce(torch.add, (one.at(part) for one, part in zip(maps, parts, strict=True)))

    total = sum(sizes)
    grids = tuple(shape for one in maps for shape in one.grids)
    every = _Map(total, (total,), maps[0].like, grids=grids)
    return every.then(added, maps[0].shape, max(one.widest for one in maps))


def _refusal_reason(name: str) -> str:
    """The reason why an operation makes no layer, where there is more to say than that."""
    if name in ("topk", "sort", "kthvalue", "median", "argsort"):
        return "which compares hidden units with one another, and no pair of units knows the rest"
    if name in ("_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "rsqrt"):
        return "which divides by a sum over hidden units"
    if name in ("max", "amax", "max_pool2d_with_indices", "max_pool2d"):
        return "the largest of several values"
    return ""


def _mapped_value(value: _Value, function: Callable[[Any], Any]) -> _Value:
    """A linear operation on an affine value."""
    constant = function(value.constant)
    slopes = {one: slope.then(function, constant.shape) for one, slope in value.slopes.items()}
    return _Value(constant, slopes)


def _reads_any(argument: Any, nodes: list[torch.fx.Node]) -> bool:
    """Whether an argument of an operation is among some nodes, or is a list with such a node."""
    if isinstance(argument, (list, tuple)):
        return any(_reads_any(part, nodes) for part in argument)
    return any(argument is node for node in nodes)


def _operation_name(node: torch.fx.Node) -> str:
    """The name of an operation without its overload, as `add` for `aten.add.Tensor`."""
    name = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target)
    return str(name).partition(".")[0]


def _is_squared(node: torch.fx.Node) -> bool:
    """Whether squares alone read a value."""
    return all(_operation_name(user) == "pow" and user.args[1] == 2 for user in node.users)


def _is_power(node: torch.fx.Node) -> bool:
    """Whether a power is whole."""
    exponent = node.args[1]
    return isinstance(exponent, (int, float)) and float(exponent).is_integer() and exponent >= 1


def _place_of(node: torch.fx.Node) -> str:
    """The submodule in which an operation stands."""
    path, _ = next(reversed((node.meta.get("nn_module_stack") or {}).values()), ("", None))
    path = str(path).removeprefix("L['self']").strip(".").removeprefix("module").strip(".")
    return path or "the forward pass"


def _check_size(outputs: int, inputs: int) -> None:
    if outputs * inputs > LARGEST:
        raise TooLarge(
            f"a layer would be a matrix of {outputs:,} x {inputs:,} numbers, "
            f"{outputs * inputs / 2**27:,.1f} GiB in float64, and layers such as convolutions are "
            f"written out up to {LARGEST / 2**27:.3g} GiB, {LARGEST // inputs:,} rows of so many "
            "inputs: pool or stride before the product, give an example of smaller images, or "
            "compare outputs, metric tnsim.Empirical(images)"
        )


def _are_equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and bool((one == two).all())


def _unless_zero(bias: torch.Tensor) -> torch.Tensor | None:
    """A bias, or None for a bias of zeros that nobody differentiates."""
    return bias if bias.requires_grad or bool(bias.any()) else None


def _stacked_factors(
    units: list[list[tuple[_Rows, torch.Tensor]]],
) -> list[tuple[_Rows, torch.Tensor]]:
    """The factors of a layer: matrix (units, in) and bias (units,) of all blocks, leg by leg."""
    factors = []
    for leg in range(max(map(len, units))):
        # A block of fewer factors than the layer has is multiplied by 1.
        own = [block[leg] if leg < len(block) else _ones_like(*block[0]) for block in units]
        rows = _stacked_rows([w for w, _ in own])
        factors.append((rows, torch.cat([b for _, b in own])))
    return factors


def _ones_like(matrix: _Rows, bias: torch.Tensor) -> tuple[_Rows, torch.Tensor]:
    """The factor 1 for every unit of another factor."""
    if not isinstance(matrix, SparseMatrix):
        return torch.zeros_like(matrix), torch.ones_like(bias)
    none = Columns(np.full((len(bias), 1), -1), matrix.columns.width)
    return SparseMatrix(np.zeros((len(bias), 1), matrix.dtype), none), torch.ones_like(bias)


def _stacked_rows(parts: list[_Rows]) -> _Rows:
    """The rows of several matrices, sparse where any is and it pays for all."""
    if len(parts) == 1:
        return parts[0]
    known = [part for part in parts if isinstance(part, SparseMatrix)]
    if not known:
        return torch.cat(parts)  # pyright: ignore
    parts = [part if isinstance(part, SparseMatrix) else SparseMatrix.of(part) for part in parts]
    most = max(part.values.shape[1] for part in parts)
    values = [_padded(part.values, most, 0) for part in parts]
    columns = [_padded(part.columns.array, most, -1) for part in parts]
    stacked = np.concatenate(values)
    stacked.flags.writeable = False
    return SparseMatrix(stacked, Columns(np.concatenate(columns), parts[0].columns.width))


def _padded(array: np.ndarray, width: int, value: int) -> np.ndarray:
    return np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=value)


def _scaled_rows(matrix: _Rows, factors: torch.Tensor) -> _Rows:
    """A matrix with each row times a number."""
    if isinstance(matrix, SparseMatrix):
        values = matrix.values * host_array(factors)[:, None]
        values.flags.writeable = False
        return matrix.with_values(values)
    return factors[:, None] * matrix


def _chosen_rows(matrix: _Rows, rows: torch.Tensor) -> _Rows:
    """Some rows of a matrix, in a given order."""
    if isinstance(matrix, SparseMatrix):
        chosen = host_array(rows)
        values = matrix.values[chosen]
        values.flags.writeable = False
        return SparseMatrix(values, Columns(matrix.columns.array[chosen], matrix.columns.width))
    return matrix[rows]


def _rows_with_entries(matrix: _Rows) -> torch.Tensor:
    """The rows that have a gradient, an entry, or the place of an entry."""
    if isinstance(matrix, SparseMatrix):
        return torch.from_numpy(np.flatnonzero(matrix.columns.filled.any(1)))
    if matrix.requires_grad:
        return torch.arange(len(matrix), device=matrix.device)
    return matrix.any(1).nonzero().ravel()


def _counts(matrix: _Rows) -> Any:
    """The number of entries in each row that are not zero."""
    return ((matrix.values if isinstance(matrix, SparseMatrix) else matrix) != 0).sum(1)


def _single_entries(matrix: _Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Column and value of the largest entry of each row."""
    if isinstance(matrix, SparseMatrix):
        rows, places = np.arange(len(matrix.values)), np.abs(matrix.values).argmax(1)
        columns, values = matrix.columns.array[rows, places], matrix.values[rows, places]
        return torch.from_numpy(columns.astype(np.int64)), torch.from_numpy(values)
    columns = matrix.abs().argmax(1)
    return columns, matrix.gather(1, columns[:, None])[:, 0]


def _multiple_of_identity(linear: _Map) -> float | None:
    """The number s of a map s I; None for zero, other maps, and maps with a gradient."""
    # A skip is a number, through which no gradient goes.
    if linear.entries != linear.size:
        return None
    if linear.operation is None:
        return 1.0
    if not linear.is_small:
        ones, random, there = linear.probed
        same = torch.allclose(there, ones[0] * random, rtol=NEGLIGIBLE, atol=0)
        # No map but s I sends random coordinates to their multiple; the model is checked besides.
        return float(ones[0]) if same and linear.matters and not there.requires_grad else None
    matrix = linear.matrix
    if matrix.requires_grad or not bool(matrix.any()):
        return None
    diagonal = torch.diag(matrix[0, 0].expand(len(matrix)))
    return float(matrix[0, 0]) if _are_equal(matrix, diagonal) else None


def _layer_of(draft: _Draft, down: Any) -> Any:
    """The layer of tnsim of a draft, with the matrix of its map `down`."""
    bias: Any = _unless_zero(draft.bias)
    if not draft.factors:
        return Linear(down, bias)
    factors = draft.factors
    if draft.function is None and len(factors) == 2:
        factors, down = _with_fewer_units(factors, down)
    rows: list[Any] = [w for w, _ in factors]
    biases: list[Any] = [_unless_zero(b) for _, b in factors]
    if draft.function is not None:
        up, up_bias = (rows[1], biases[1]) if len(rows) == 2 else (None, None)
        layer: Any = Gated(rows[0], up, down, draft.function, biases[0], up_bias, bias)
    elif len(rows) == 2:
        layer = Bilinear(rows[0], rows[1], down, biases[0], biases[1], bias)
    else:
        layer = Multilinear(rows, down, biases, bias)
    return layer if draft.skip is None else Residual(layer, skip=draft.skip)


def _with_fewer_units(
    factors: list[tuple[_Rows, torch.Tensor]], down: _Rows
) -> tuple[list[tuple[_Rows, torch.Tensor]], _Rows]:
    """Two factors and a map D with fewer hidden units, where many units share a factor.

    Units with the same left row l add up to l(x) * D_g (R_g x + r_g), which are as many units as
    the matrix D_g [R_g r_g] has rank. An einsum in two copies of x, for instance, is written by
    `torch` with all products x_i x_j. Layers with gradients keep their units as they are, and so do
    large sparse ones.
    """
    arrays = [down, *(array for factor in factors for array in factor)]
    if any(isinstance(array, torch.Tensor) and array.requires_grad for array in arrays):
        return factors, down
    sparse = [array for array in arrays if isinstance(array, SparseMatrix)]
    if max((math.prod(matrix.shape) for matrix in sparse), default=0) > MERGED:
        return factors, down
    grouped = [torch.unique(_digests(*factor), return_inverse=True) for factor in factors]
    # Groups of hardly more than one unit save nothing.
    shared_by_many = [2 * len(groups) <= down.shape[1] for groups, _ in grouped]
    if not any(shared_by_many):
        return factors, down
    best: Any = None
    fewest = down.shape[1]
    dense = _written_out(down, factors[0][1])
    # Biases are a last column, so that they go with their rows.
    lifted = [torch.cat([_written_out(w, b), b[:, None]], 1) for w, b in factors]
    for turn, (groups, group_of), is_shared in zip((1, -1), grouped, shared_by_many, strict=True):
        # Either factor may be the one that many units share.
        if not is_shared:
            continue
        shared, other = lifted[::turn]
        terms: list[tuple[Any, Any, Any]] = []
        # In the order of their first units, so that models of one module have units in one order.
        for group in dict.fromkeys(group_of.tolist()):
            members = group_of == group
            row = shared[members][0]
            # The rank of a group is the number of units that it needs. The product of a few members
            # has the singular values of a small matrix between orthogonal ones.
            outer, core = torch.linalg.qr(dense[:, members])
            read = other[members].any(0)
            inner, rest = torch.linalg.qr(other[members][:, read].T)
            left, sizes, small = torch.linalg.svd(core @ rest.T, full_matrices=False)
            left, right = outer @ left, other.new_zeros(len(sizes), other.shape[1])
            right[:, read] = small @ inner.T
            kept = sizes > NEGLIGIBLE * sizes[0]
            one, two = row.expand(int(kept.sum()), -1), right[kept]
            one, two = (one, two)[::turn]
            terms.append((one, two, (left * sizes)[:, kept]))
        if (count := sum(len(one) for one, _, _ in terms)) < fewest:
            one, two, out = zip(*terms, strict=True)
            fewest, best = count, (torch.cat(one), torch.cat(two), torch.cat(out, 1))
    if best is None:
        return factors, down
    one, two, down = best
    return [(_like_before(rows[:, :-1], sparse), rows[:, -1]) for rows in (one, two)], down


def _like_before(matrix: torch.Tensor, sparse: list[SparseMatrix]) -> _Rows:
    """A matrix made of others, as a sparse one where some of these are and it has few entries."""
    few = int(_counts(matrix).max()) * FILLED <= matrix.shape[1] and matrix.numel() >= FEWEST
    return SparseMatrix.of(matrix) if sparse and few else matrix


def _written_out(matrix: _Rows, like: torch.Tensor) -> torch.Tensor:
    """A matrix as a tensor beside another tensor."""
    if isinstance(matrix, SparseMatrix):
        return torch.from_numpy(np.array(matrix.dense())).to(like)
    return matrix


def _digests(matrix: _Rows, bias: torch.Tensor) -> torch.Tensor:
    """A number for every row with its bias, equal for equal rows.

    Sums of whole multiples of the bits, modulo 2^64, depend on no order of summation. Two rows that
    differ share a digest once in 2^64.
    """
    rng = torch.Generator().manual_seed(0)
    digests = torch.zeros(len(bias), dtype=torch.int64)
    for numbers in (matrix, bias[:, None]):
        odd = torch.randint(-(2**62), 2**62, (numbers.shape[1],), generator=rng) * 2 + 1
        if isinstance(numbers, SparseMatrix):
            # Entries that are not stored are zeros, which add nothing.
            odd = odd[torch.from_numpy(np.maximum(numbers.columns.array, 0))]
            numbers = torch.from_numpy(np.array(numbers.values))
        # Adding zero makes -0.0 a 0.0.
        bits = (numbers.detach().cpu().double() + 0.0).view(torch.int64)
        digests = digests * 31 + (bits * odd).sum(1)
    return digests.to(bias.device)
