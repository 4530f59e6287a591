"""PyTorch modules into layers, by the operations of their forward pass.

`torch.export` writes the forward pass for one input down as operations on arrays. Here they are
carried out once more on *affine values*: every value that depends on the input is an affine
function of a state, the vector that the layers so far give. Operations that are affine in such
values keep them affine, whatever they do to axes: einsum with weights, convolution, pooling,
normalisation by running statistics. A product of two values makes hidden units, one for each entry
of the product, and values become affine in these as well. Where all that follows depends on a
single value, this value is the next state, and the layer that leads to it is

    z' = S z + D (h_1 * ... * h_n) + c,    h_j = W_j z + b_j

which is a `Linear`, a `Bilinear` or a `Multilinear`, with a `Residual` around it where S is a
multiple of the identity. Any other S is carried by hidden units of its own, `(S z) * 1`.

Reading order: `traced_layers` goes through the operations by a `_Trace`, which keeps the affine
values (`_Value`); `_Stack` holds the state, the hidden units on top of it and the layers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from tnsim.errors import UnsupportedLayer
from tnsim.models.functions import array_of
from tnsim.models.layers import Bilinear, Linear, Multilinear, Residual

AXES = """_to_copy _unsafe_view alias as_strided cat clone constant_pad_nd contiguous copy detach
diagonal expand flip gather index index_select lift_fresh_copy narrow permute pixel_shuffle
pixel_unshuffle repeat reshape roll select slice split split_with_sizes squeeze stack t transpose
tril triu unbind unfold unsqueeze view where"""
"""Operations that choose and order entries."""

SUMS = """_adaptive_avg_pool2d _adaptive_avg_pool3d _native_batch_norm_legit_no_training add
avg_pool1d avg_pool2d avg_pool3d convolution cumsum div mean neg rsub sub sum upsample_bilinear2d
upsample_nearest2d"""
"""Operations that add entries up, with weights that do not depend on the input."""

PRODUCTS = "_trilinear addmm baddbmm bmm dot matmul mm mul mv"
"""Operations that multiply where more than one argument depends on the input."""

AFFINE = frozenset(f"{AXES} {SUMS} {PRODUCTS}".split())
"""All operations that are affine in their arguments, as long as no two of them are multiplied."""

FIRST_ALONE = ("_native_batch_norm_legit_no_training", "convolution", "div", "gather", "index")
"""Operations that are affine in their first argument alone."""

LARGEST = 2**27
"""Most entries of a map from a state to a value, 1 GiB in float64."""

NEGLIGIBLE = 1e-13
"""Singular values below this part of the largest are rounding."""


@dataclass(frozen=True, eq=False)
class _Value:
    """An array that is an affine function of the state and of hidden units.

    Args:
        constant: The array where the state and all hidden units are zero.
        slopes: Derivative of the array by each coordinate of a source, (coordinates, *shape), for
            every source: 0 for the state, n for block n of hidden units.
    """

    constant: torch.Tensor
    slopes: dict[int, torch.Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.constant.shape)


@dataclass(frozen=True, eq=False)
class _Draft:
    """A layer `s z + D (h_1 * ... * h_n) + c` of tensors; without factors `D z + c`.

    Args:
        factors: Pairs (W_j, b_j) of the factors h_j = W_j z + b_j.
        down: Matrix D.
        bias: Vector c.
        skip: Number s; None for no residual connection.
    """

    factors: list[tuple[torch.Tensor, torch.Tensor]]
    down: torch.Tensor
    bias: torch.Tensor
    skip: float | None = None


def traced_layers(module: torch.nn.Module, example: torch.Tensor) -> list[Any]:
    """The layers of the function of a module, read off the operations of its forward pass.

    Args:
        module: A module in evaluation mode, whose parameters may require grad.
        example: Inputs that the module takes, floats (inputs, ...); the first one is traced.

    Returns:
        Layers of tnsim on the input as a flat vector, of tensors of the type of the parameters.

    Raises:
        UnsupportedLayer: The module cannot be traced, an operation is no polynomial, or a layer
            would be too large a matrix.

    Example:
        >>> class Product(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.rows = torch.nn.Parameter(torch.ones(2, 3))
        ...
        ...     def forward(self, x):
        ...         return torch.einsum("hi,bi,bh->b", self.rows, x, x @ self.rows.T)[:, None]
        >>> with torch.no_grad():
        ...     (layer,) = traced_layers(Product(), torch.zeros(1, 3))
        >>> layer.left.shape, layer.down.shape
        ((1, 3), (1, 1))

    Source:
        Forward differentiation of affine maps; a product of affine functions is a term of a CP
        decomposition.
    """
    trace = _Trace(module, example[:1].detach())
    for node in trace.graph.nodes:
        if node.op == "output":
            return trace.layers(node)
        trace.step(node)
    raise AssertionError("a graph ends with its output")


class _Trace:
    """A forward pass on affine values.

    Attributes:
        graph: Operations of the forward pass.
        values: Arrays, affine values and lists of both, by the node that computed them.
        uses: Nodes that still read a value, by the node of the value.
        stack: Layers, state and hidden units.
    """

    def __init__(self, module: torch.nn.Module, example: torch.Tensor) -> None:
        self.graph, self.values = _exported(module, example)
        self.uses = {node: set(node.users) for node in self.graph.nodes}
        self.example = example
        self.stack = _Stack(example)

    def step(self, node: torch.fx.Node) -> None:
        """Compute one value, and begin a new layer where all that follows depends on it alone."""
        if node.op == "placeholder" and node not in self.values:
            self.values[node] = self.stack.state(self.example.shape)
        elif node.op == "call_function":
            self.values[node] = self._computed(node)
        for before in node.all_input_nodes:
            self.uses[before].discard(node)
        live = self._live()
        if list(live) == [(node, None)] and self.stack.ends_layer(live[node, None]):
            self._settle(live)

    def layers(self, output: torch.fx.Node) -> list[Any]:
        """The layers, up to the output."""
        ((result,),) = output.args  # pyright: ignore
        value = self.values[result]
        if not isinstance(value, _Value):
            raise UnsupportedLayer("the output of the forward pass does not depend on the input")
        return self.stack.finished(value)

    def _live(self) -> dict[Hashable, _Value]:
        """Values that depend on the input and are used later, by node and place in a list."""
        live: dict[Hashable, _Value] = {}
        for node, value in self.values.items():
            if self.uses[node]:
                parts = enumerate(value) if isinstance(value, list) else [(None, value)]
                live |= {(node, n): part for n, part in parts if isinstance(part, _Value)}
        return live

    def _settle(self, live: dict[Hashable, _Value]) -> None:
        """End a layer: live values become affine functions of a new state."""
        for (node, place), value in self.stack.settle(live).items():  # pyright: ignore
            if place is None:
                self.values[node] = value
            else:
                self.values[node][place] = value

    def _computed(self, node: torch.fx.Node) -> Any:
        """The result of a single operation on arrays and affine values."""
        name = _name(node)
        if name == "getitem":
            whole, place = node.args
            return self.values[whole][place]
        varying = [one for one in node.all_input_nodes if isinstance(self.values[one], _Value)]
        if not varying:
            return self._applied(node, self.values)
        if name == "pow" and _is_power(node):
            return self._power(node)
        places = [n for n, one in enumerate(node.args) if _reads(one, varying)]
        chooses = name == "where" and places[0] == 0
        if name not in AFFINE or (name in FIRST_ALONE and places != [0]) or chooses:
            raise UnsupportedLayer(f"{_place(node)} computes {name}, which is no polynomial")
        factors = [n for n in places if n > 0 or name not in ("addmm", "baddbmm")]
        if name in PRODUCTS.split() and len(factors) > 1:
            return self._multiplied(node, factors)
        return self._affine(node, varying)

    def _applied(self, node: torch.fx.Node, values: dict[Any, Any]) -> Any:
        """The operation itself, on arrays."""
        arguments = torch.fx.map_arg((node.args, node.kwargs), lambda one: values[one])
        assert callable(node.target)
        return node.target(*arguments[0], **arguments[1])

    def _affine(self, node: torch.fx.Node, varying: list[torch.fx.Node]) -> Any:
        """An affine operation f: its constant is f(constants), its slopes are f(slopes) - f(0)."""
        given = [self.values[one] for one in varying]

        def applied(*arrays: torch.Tensor) -> Any:
            known = self.values | dict(zip(varying, arrays, strict=True))
            return self._applied(node, known)

        constant = applied(*(value.constant for value in given))
        origin = applied(*(torch.zeros_like(value.constant) for value in given))
        slopes: dict[int, Any] = {}
        for source in sorted({source for value in given for source in value.slopes}):
            size = self.stack.size(source)
            directions = [
                value.slopes.get(source, value.constant.new_zeros((size, *value.shape)))
                for value in given
            ]
            slopes[source] = torch.vmap(applied)(*directions)
        if isinstance(constant, torch.Tensor):
            return _affine_value(constant, origin, slopes)
        parts: list[Any] = []
        for n, part in enumerate(constant):
            own = {source: slope[n] for source, slope in slopes.items()}
            parts.append(_affine_value(part, origin[n], own))
        return parts

    def _multiplied(self, node: torch.fx.Node, places: list[int]) -> _Value:
        """A product of several arguments that depend on the input."""
        name = _name(node)
        if len(places) == 2:
            first, second = self._factors([node.args[n] for n in places])
            if name == "mul":
                return self._hidden(first, second)
            if name in ("mm", "bmm", "mv", "dot", "matmul"):
                # sum_k x_ik y_kj, all products x_ik y_kj as hidden units
                first = _each(first, lambda x: x.unsqueeze(-1))
                second = _each(second, lambda y: y.unsqueeze(-3))
                return _each(self._hidden(first, second), lambda product: product.sum(-2))
            if name == "_trilinear" and places == [0, 2]:
                # nn.Bilinear: sum_j (sum_i x_i W_oij) y_j, as many hidden units as (o, j)
                weight = self.values[node.args[1]]
                first = _each(first, lambda x: torch.einsum("bi,oij->boj", x, weight))
                second = _each(second, lambda y: y.unsqueeze(-2))
                return _each(self._hidden(first, second), lambda product: product.sum(-1))
        raise UnsupportedLayer(
            f"{_place(node)} multiplies {len(places)} values by {name}, which is not read"
        )

    def _power(self, node: torch.fx.Node) -> _Value:
        """A whole power of a value, as a product of equal factors."""
        (base,) = self._factors([node.args[0]])
        result = base
        for _ in range(int(node.args[1]) - 1):  # pyright: ignore
            result = self._hidden(result, base)
        return result

    def _factors(self, nodes: list[Any]) -> list[_Value]:
        """Values that hidden units can be made of, after a new layer where they are no such."""
        if not all(self.stack.multiplies(self.values[one]) for one in nodes):
            self._settle(self._live())
        return [self.values[one] for one in nodes]

    def _hidden(self, one: _Value, two: _Value) -> _Value:
        """The product of two values that broadcast to a common shape."""
        shape = torch.broadcast_shapes(one.shape, two.shape)
        _check_size(math.prod(shape) * max(math.prod(shape), self.stack.width))
        grown = [_each(value, lambda x: x.expand(shape)) for value in (one, two)]
        return self.stack.multiplied(*grown)


class _Stack:
    """The layers so far, and hidden units on top of the state that they give.

    Attributes:
        drafts: The layers.
        width: Coordinates of the state.
        units: Factors of each block of hidden units, pairs (W, b) of shapes (n, width) and (n,).
    """

    def __init__(self, example: torch.Tensor) -> None:
        self.like = example
        self.drafts: list[_Draft] = []
        self.width: int = example.numel()
        self.units: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def size(self, source: int) -> int:
        """Number of coordinates of the state (source 0) or of a block of hidden units."""
        return len(self.units[source][0][1]) if source else self.width

    def state(self, shape: Sequence[int]) -> _Value:
        """The state itself, as an array of a shape."""
        _check_size(self.width**2)
        eye = self._eye(self.width).reshape(self.width, *shape)
        return _Value(self.like.new_zeros(tuple(shape)), {0: eye})

    def multiplies(self, value: _Value) -> bool:
        """Whether each entry of a value is affine in the state alone, or a multiple of one unit."""
        if set(value.slopes) <= {0}:
            return True
        if len(value.slopes) > 1 or bool(value.constant.any()):
            return False
        (slope,) = value.slopes.values()
        return bool(((slope.flatten(1) != 0).sum(0) == 1).all())

    def multiplied(self, one: _Value, two: _Value) -> _Value:
        """The product, entry by entry, of two values of equal shape: a block of hidden units."""
        block = 1 + max(self.units, default=0)
        self.units[block] = [*self._factors(one), *self._factors(two)]
        count = math.prod(one.shape)
        slope = self._eye(count).reshape(count, *one.shape)
        return _Value(self.like.new_zeros(one.shape), {block: slope})

    def _factors(self, value: _Value) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The factors of every entry of a value that `multiplies`.

        An entry that is a multiple of a hidden unit has the factors of the unit.
        """
        if set(value.slopes) <= {0}:
            flat = value.constant.flatten()
            if 0 not in value.slopes:
                return [(self.like.new_zeros(len(flat), self.width), flat)]
            return [(value.slopes[0].flatten(1).T, flat)]
        ((block, slope),) = value.slopes.items()
        units = slope.flatten(1).abs().argmax(0)
        factor = slope.flatten(1).gather(0, units[None])[0]
        (weight, bias), *others = [(w[units], b[units]) for w, b in self.units[block]]
        return [(factor[:, None] * weight, factor * bias), *others]

    def ends_layer(self, value: _Value) -> bool:
        """Whether a value that all the rest depends on becomes a state of its own.

        A value with hidden units does. An affine function of the state does where it is narrower
        than the state; a wider one is cheaper as rows of the next layer.
        """
        return bool(set(value.slopes) - {0}) or value.constant.numel() < self.width

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
            self._append(value)
            return {name: self.state(value.shape)}
        sources = sorted({source for value in values.values() for source in value.slopes})
        sizes = [self.size(source) for source in sources]
        slopes = dict(zip(sources, self._eye(sum(sizes)).split(sizes), strict=True))
        moved = {}
        for name, value in values.items():
            parts = []
            for source, size in zip(sources, sizes, strict=True):
                zero = value.constant.new_zeros((size, *value.shape))
                parts.append(value.slopes.get(source, zero))
            moved[name] = _Value(value.constant, {0: torch.cat(parts)})
        self._append(_Value(self.like.new_zeros(sum(sizes)), slopes))
        return moved

    def finished(self, value: _Value) -> list[Any]:
        """All layers of tnsim, the last of which gives a value."""
        slope = value.slopes.get(0, value.constant[None]).flatten(1)
        is_state = set(value.slopes) == {0} and _equal(slope, self._eye(self.width))
        if not self.drafts or not is_state or bool(value.constant.any()):
            self._append(value)
        return [_layer_of(_with_fewer_units(draft)) for draft in self.drafts]

    def _append(self, value: _Value) -> None:
        """Add the layer that gives a value, flat, and make the value the state."""
        bias = value.constant.flatten()
        matrix = bias.new_zeros(len(bias), self.width)
        if 0 in value.slopes:
            matrix = value.slopes[0].flatten(1).T
        blocks = [block for block in sorted(value.slopes) if block != 0]
        if blocks:
            down = torch.cat([value.slopes[block].flatten(1) for block in blocks]).T
            units = [self.units[block] for block in blocks]
            self.drafts.append(self._product(units, matrix, down, bias))
        else:
            self._append_linear(matrix, bias)
        self.width = len(bias)
        self.units = {}

    def _product(
        self,
        units: list[list[tuple[torch.Tensor, torch.Tensor]]],
        matrix: torch.Tensor,
        down: torch.Tensor,
        bias: torch.Tensor,
    ) -> _Draft:
        """The layer `S z + D (units of all blocks) + c`."""
        skip = _multiple_of_identity(matrix)
        if skip is None and (matrix.requires_grad or bool(matrix.any())):
            units = [*units, [(matrix, torch.zeros_like(bias))]]
            down = torch.cat([down, self._eye(len(matrix))], 1)
        factors = []
        for leg in range(max(map(len, units))):
            # A block of fewer factors than the layer has is multiplied by 1.
            ones = [(torch.zeros_like(w), torch.ones_like(b)) for (w, b), *_ in units]
            own = [
                block[leg] if leg < len(block) else one
                for block, one in zip(units, ones, strict=True)
            ]
            factors.append((torch.cat([w for w, _ in own]), torch.cat([b for _, b in own])))
        return _Draft(factors, down, bias, skip)

    def _append_linear(self, matrix: torch.Tensor, bias: torch.Tensor) -> None:
        """Add a linear layer, merged into a layer before it without skip where that is smaller."""
        if self.drafts and self.drafts[-1].skip is None:
            last = self.drafts[-1]
            if len(matrix) * last.down.shape[1] <= last.down.numel() + matrix.numel():
                merged, shifted = matrix @ last.down, bias + matrix @ last.bias
                self.drafts[-1] = _Draft(last.factors, merged, shifted)
                return
        self.drafts.append(_Draft([], matrix, bias))

    def _eye(self, size: int) -> torch.Tensor:
        return torch.eye(size, dtype=self.like.dtype, device=self.like.device)


class _SingleOutput(torch.nn.Module):
    """A module whose outputs are unwrapped, as `torch.export` knows few classes of outputs."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return array_of(self.module(x))


def _exported(
    module: torch.nn.Module, example: torch.Tensor
) -> tuple[torch.fx.Graph, dict[Any, Any]]:
    """The graph of a forward pass of one argument, and the arrays at its other placeholders."""
    module = _SingleOutput(module)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # notices about the internals of the export
            program = torch.export.export(module, (example,)).run_decompositions()
    except Exception as error:  # whatever the forward pass or the export raises
        said = str(error).strip().partition("\n")[0]
        raise UnsupportedLayer(f"the forward pass cannot be traced: {said[:200]}") from error
    signature = program.graph_signature
    tensors: dict[str, Any] = {**program.state_dict, **program.constants}
    tensors |= dict(module.named_parameters())  # the parameters themselves, for gradients
    named = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    arrays: dict[Any, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in named:
            arrays[node] = tensors[named[node.name]]
    return program.graph, arrays


def _affine_value(constant: Any, origin: Any, slopes: dict[int, Any]) -> _Value:
    for slope in slopes.values():
        _check_size(slope.numel())
    return _Value(constant, {source: slope - origin for source, slope in slopes.items()})


def _each(value: _Value, function: Callable[[Any], Any]) -> _Value:
    """A linear operation on an affine value."""
    slopes = {source: torch.vmap(function)(slope) for source, slope in value.slopes.items()}
    return _Value(function(value.constant), slopes)


def _reads(argument: Any, nodes: list[torch.fx.Node]) -> bool:
    """Whether an argument of an operation is one of several nodes, or a list that holds one."""
    if isinstance(argument, (list, tuple)):
        return any(_reads(one, nodes) for one in argument)
    return any(argument is one for one in nodes)


def _name(node: torch.fx.Node) -> str:
    """The name of an operation without its overload, as `add` for `aten.add.Tensor`."""
    name = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target)
    return str(name).partition(".")[0]


def _is_power(node: torch.fx.Node) -> bool:
    """Whether a power is a whole one."""
    exponent = node.args[1]
    return isinstance(exponent, (int, float)) and float(exponent).is_integer() and exponent >= 1


def _place(node: torch.fx.Node) -> str:
    """The submodule in which an operation stands."""
    path, _ = next(reversed((node.meta.get("nn_module_stack") or {}).values()), ("", None))
    path = str(path).removeprefix("L['self']").strip(".").removeprefix("module").strip(".")
    return path or "the forward pass"


def _check_size(entries: int) -> None:
    if entries > LARGEST:
        raise UnsupportedLayer(
            f"a layer would be a matrix of {entries:,} entries, at most {LARGEST:,} are written out"
        )


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and bool((one == two).all())


def _unless_zero(bias: torch.Tensor) -> torch.Tensor | None:
    """A bias, or None for a bias of zeros that nobody differentiates."""
    return bias if bias.requires_grad or bool(bias.any()) else None


def _multiple_of_identity(matrix: torch.Tensor) -> float | None:
    """The number s of a matrix s I; None for zero, any other matrix, and one with a gradient."""
    if matrix.shape[0] != matrix.shape[1] or matrix.requires_grad or not bool(matrix.any()):
        return None
    diagonal = torch.diag(matrix[0, 0].expand(len(matrix)))
    return float(matrix[0, 0]) if _equal(matrix, diagonal) else None


def _layer_of(draft: _Draft) -> Any:
    """The layer of tnsim of a draft."""
    down: Any = draft.down  # layers take tensors, which they keep where these have gradients
    bias: Any = _unless_zero(draft.bias)
    if not draft.factors:
        return Linear(down, bias)
    rows: list[Any] = [w for w, _ in draft.factors]
    biases: list[Any] = [_unless_zero(b) for _, b in draft.factors]
    if len(rows) == 2:
        layer: Any = Bilinear(rows[0], rows[1], down, biases[0], biases[1], bias)
    else:
        layer = Multilinear(rows, down, biases, bias)
    return layer if draft.skip is None else Residual(layer, skip=draft.skip)


def _with_fewer_units(draft: _Draft) -> _Draft:
    """The same layer with fewer hidden units, where many units share a factor.

    Units with one left row l add up to l(x) * D_g (R_g x + r_g), which are as many units as the
    matrix D_g [R_g r_g] has rank. An einsum in two copies of x, for one, is written by `torch` with
    all products x_i x_j. Layers with gradients keep their units as they are.
    """
    down = draft.down
    arrays = [down, *(array for factor in draft.factors for array in factor)]
    if len(draft.factors) != 2 or any(array.requires_grad for array in arrays):
        return draft
    first, second = (torch.cat([w, b[:, None]], 1) for w, b in draft.factors)
    best = (first, second, down)
    for turn in (1, -1):
        shared, other = (first, second)[::turn]
        alike, group_of = torch.unique(shared, dim=0, return_inverse=True)
        if 2 * len(alike) > len(shared):
            continue
        found: list[tuple[Any, Any, Any]] = []
        for group, row in enumerate(alike):
            members = group_of == group
            left, sizes, right = torch.linalg.svd(
                down[:, members] @ other[members], full_matrices=False
            )
            kept = sizes > NEGLIGIBLE * sizes[0]
            one, two = row.expand(int(kept.sum()), -1), right[kept]
            found.append((*(one, two)[::turn], (left * sizes)[:, kept]))
        if sum(len(one) for one, _, _ in found) < len(best[0]):
            one, two, out = zip(*found, strict=True)
            best = (torch.cat(one), torch.cat(two), torch.cat(out, 1))
    one, two, down = best
    factors = [(rows[:, :-1], rows[:, -1]) for rows in (one, two)]
    return _Draft(factors, down, draft.bias, draft.skip)
