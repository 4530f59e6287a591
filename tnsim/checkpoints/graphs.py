"""Forward passes of PyTorch modules as operations of which every one is known by name.

`make_fx` writes a forward pass down with parameters and buffers as arguments, without mutation and
without views, so that a graph of one module serves all its weights. A branch on values is refused
by PyTorch itself. The graph is made at the shapes that are asked for and at two sizes of the batch,
since a module may compute with the number of its inputs.

Three tables say what an operation is: affine in the arguments that depend on the input; a product,
affine in each of several; entrywise, a function of numbers (`entrywise`). Everything else is
refused by its name. `affine_values` says what the algebra asks of an `Operation`.

Source: `torch.fx.experimental.proxy_tensor.make_fx`, `torch.func.functionalize`.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.fx
from torch._decomp import get_decompositions
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import tree_leaves

from tnsim.checkpoints.affine_values import Operation
from tnsim.checkpoints.entrywise import is_entrywise
from tnsim.checkpoints.read_graphs import Tables
from tnsim.errors import TnsimError, UnsupportedLayer
from tnsim.models.functions import array_of, check_one_input

log = logging.getLogger(__name__)

AXES = frozenset(
    (
        *("alias", "as_strided", "cat", "clone", "constant_pad_nd", "contiguous", "copy", "detach"),
        *("diagonal", "embedding", "expand", "fill", "flip", "gather", "index", "index_fill"),
        *(
            "index_select",
            "lift_fresh",
            "masked_fill",
            "movedim",
            "narrow",
            "permute",
            "pixel_shuffle",
        ),
        *("pixel_unshuffle", "repeat", "reshape", "roll", "select", "select_scatter", "slice"),
        *("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
        *("slice_scatter", "split", "split_with_sizes", "squeeze", "stack", "swapaxes", "t", "to"),
        *("transpose", "tril", "triu", "unbind", "unfold", "unsqueeze", "view", "where"),
    )
)
"""Operations that choose and order entries."""

SUMS = frozenset(
    (
        *("_adaptive_avg_pool1d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "add"),
        *("avg_pool1d", "avg_pool2d", "avg_pool3d", "batch_norm", "convolution", "cumsum", "div"),
        *("im2col", "lerp", "mean", "neg", "rsub", "sub", "sum", "upsample_bilinear2d"),
        *("upsample_nearest1d", "upsample_nearest2d"),
    )
)
"""Operations that add entries up, with weights that do not depend on the input."""

TABLES = Tables(
    axes=AXES,
    sums=SUMS,
    products=frozenset(
        ("_trilinear", "addmm", "baddbmm", "bmm", "dot", "matmul", "mm", "mul", "mv")
    ),
    first_alone=frozenset(
        ("batch_norm", "convolution", "div", "gather", "im2col", "index", "index_select")
    ),
    choices=frozenset(
        ("embedding", "gather", "index", "index_select", "masked_fill", "tril", "triu", "where")
    ),
    fills=frozenset(
        (
            *("empty", "empty_like", "full", "full_like", "new_empty", "new_full", "new_ones"),
            *("new_zeros", "ones_like", "zeros_like"),
        )
    ),
)
"""What operations of PyTorch are, by name."""

JOINED = (
    "the module computes with the number of its inputs or with more than one of them: what it "
    "gives for an input depends on the batch around it, so it is no function of an input"
)

LENGTHS = (1, 2, 12, 33)
"""Lengths at which layers that were read at another have to compute the module, without n_ctx."""

LONG = 512
"""The largest number of code that is such a length besides."""

_RESHAPES = frozenset(["view", "reshape", "_unsafe_view", "_reshape_alias"])
_PLAIN = {"_unsafe_view": "view", "_reshape_alias": "view", "_to": "to"}
_BATCH_NORMS = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
)
_ADDED: dict[str, tuple[int, ...]] = {  # places of arguments that are added
    **dict.fromkeys(("add", "sub", "rsub", "lerp", "copy"), (0, 1)),
    **dict.fromkeys(("select_scatter", "slice_scatter"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "cat", "stack"), (0,)),
    **dict.fromkeys(("masked_fill", "convolution", "constant_pad_nd"), (2,)),
    "where": (1, 2),
    "index_fill": (3,),
    "batch_norm": (2, 3),
    "fill": (1,),
}
_DECOMPOSED = ("addcmul", "addcdiv", "addmv", "addr", "index_add", "square")
_ARITHMETIC = (SUMS - {"sum", "mean"}) | TABLES.products | {"full", "new_full", "masked_fill"}


@dataclass(frozen=True, eq=False)
class Graph:
    """A forward pass with all weights as arguments.

    Attributes:
        operations: All operations, those before the input of the module without reading it.
        state: Operations that stand for parameters and buffers, by name.
        argument: Operation that stands for the input of the module.
        output: Operation that gives the output.
        owns: Begin and end of submodules that are taken whole, by the operation that ends one.
        constants: Tensors that the forward pass brings with it.
        traced: The graph as PyTorch has written it.
    """

    operations: tuple[Operation, ...]
    state: Mapping[str, Operation]
    argument: Operation
    output: Operation
    owns: Mapping[Operation, tuple[str, Operation]]
    constants: Mapping[Operation, Any]
    traced: torch.fx.GraphModule

    def arrays(self, state: Mapping[str, Any]) -> dict[Operation, Any]:
        """Weights and constants by their operations.

        Args:
            state: Parameters and buffers by name.
        """
        return dict(self.constants) | {one: state[name] for name, one in self.state.items()}

    def used(self) -> set[str]:
        """Names of parameters and buffers on which the output depends."""
        needed, found = [self.output], {self.output}
        while needed:
            for one in needed.pop().reads:
                if one not in found:
                    found.add(one)
                    needed.append(one)
        for start in self.owns.values():
            found.add(start[1])
        return {name for name, one in self.state.items() if one in found}


class TorchLibrary:
    """The functions of arrays that the algebra asks for, see `affine_values.Library`."""

    def __init__(self, like: torch.Tensor, precision: torch.dtype | None = None) -> None:
        self.like, self.precision = like, precision or like.dtype

    @property
    def rounding(self) -> float:
        return max(1e-12, 64 * torch.finfo(self.like.dtype).eps)

    def keeps(self, before: torch.Tensor, after: torch.Tensor) -> bool:
        if before.dtype.is_complex or after.dtype.is_complex:
            return True  # which no table knows
        if not before.is_floating_point():  # truth values, and token numbers, in int32 at least
            narrow = not (after.is_floating_point() or before.dtype is torch.bool)
            return not narrow or (
                after.dtype is not torch.bool and torch.iinfo(after.dtype).bits >= 32
            )
        if not after.is_floating_point():
            return False
        return torch.finfo(after.dtype).eps <= torch.finfo(self.precision).eps

    def vmap(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return torch.func.vmap(function)

    def transposed(self, function: Callable[[Any], Any], size: int) -> Callable[[Any], Any]:
        back = torch.func.vjp(function, self.like.new_zeros(size))[1]
        return lambda rows: back(rows)[0]

    def array(self, numbers: Any) -> torch.Tensor:
        if isinstance(numbers, torch.Tensor):
            return numbers
        numbers = np.asarray(numbers)
        if not numbers.flags.writeable:
            numbers = numbers.copy()
        floats = numbers.dtype.kind == "f"
        return torch.from_numpy(numbers).to(self.like if floats else self.like.device)

    def eye(self, size: int) -> torch.Tensor:
        return torch.eye(size, dtype=self.like.dtype, device=self.like.device)

    def concatenate(self, arrays: Sequence[Any], axis: int = 0) -> torch.Tensor:
        return torch.cat(list(arrays), axis)

    def requires_grad(self, array: Any) -> bool:
        return isinstance(array, torch.Tensor) and array.requires_grad

    def numbers(self, array: Any) -> np.ndarray:
        return (
            array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)
        )


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all their names, also those that are tied or in no state dict."""
    named = (module.named_parameters, module.named_buffers)
    return {name: one for names in named for name, one in names(remove_duplicate=False)}


def graph_of(
    module: torch.nn.Module,
    example: torch.Tensor,
    output: str | int | None = None,
    whole: tuple[type, ...] = (),
) -> Graph:
    """The operations of a module on inputs of the shape of an example.

    Args:
        module: A module in evaluation mode.
        example: Inputs that the module takes, the first axis the batch.
        output: Name or place of the output that counts.
        whole: Classes of submodules that are taken whole.

    Returns:
        The operations for a single input.

    Raises:
        UnsupportedLayer: The module branches on values, or computes with the number of its inputs.

    Example:
        >>> graph = graph_of(torch.nn.Linear(3, 2), torch.zeros(1, 3))
        >>> [one.name for one in graph.operations if one.name not in ("weight", "input")]
        ['t', 'addmm']
    """
    return _graph(*_traced(module, example[:1], output, whole), module)


def check_batches(
    module: torch.nn.Module,
    graph: Graph,
    example: torch.Tensor,
    output: str | int | None = None,
    whole: tuple[type, ...] = (),
) -> None:
    """Raise `UnsupportedLayer` where what a module gives for an input depends on the others.

    Args:
        module: A module in evaluation mode.
        graph: Its graph on a single input.
        example: Inputs that the module takes, the first axis the batch.
        output: Name or place of the output that counts.
        whole: Classes of submodules that are taken whole.
    """
    pair = _repeated(example, 2)
    two = _traced(module, pair, output, whole)
    try:
        _check_batches(graph.traced, two[0])
    except UnsupportedLayer:
        # A batch of one may lose its axis on the way, which larger ones do not.
        _check_batches(two[0], _traced(module, _repeated(example, 3), output, whole)[0])
    check_inputs_apart(_graph(*two, module), state_of(module), pair)


def lengths_of(
    module: torch.nn.Module, graph: Graph, example: torch.Tensor, output: str | int | None = None
) -> list[int]:
    """Lengths of sequences at which a forward pass may begin to do something else.

    These are the numbers with which the code compares the length, those by which operations shift,
    such as the width of a window, and the sizes of buffers, such as a mask of which a part is
    taken; of each the next length too.

    Args:
        module: A module in evaluation mode.
        graph: Its graph on sequences.
        example: Sequences that the module takes.
        output: Name or place of the output that counts.

    Returns:
        The lengths, in order, `LENGTHS` among them.

    Raises:
        UnsupportedLayer: The code takes the length as a plain number.
    """
    compared = compared_sizes(module, example, 1, output)
    if compared is None:
        raise UnsupportedLayer(
            "the forward pass takes the length of a sequence as a plain number, and may compute "
            "something else at another: give n_ctx=, the length of sequences that counts"
        )
    leaves = [leaf for node in graph.traced.graph.nodes for leaf in tree_leaves(node.args)]
    shifts = {abs(leaf) for leaf in leaves if type(leaf) is int}
    sizes = {size for one in module.buffers() for size in one.shape}
    shifts = {n for n in shifts if max(LENGTHS) < n <= LONG}
    longer = {n + 1 for n in shifts}
    compared = {n for n in compared if n <= LONG + 1}
    sizes = {n for n in sizes if max(LENGTHS) < n <= 2 * LONG}
    return sorted({*LENGTHS, *compared, *shifts, *longer, *sizes})


def compared_sizes(
    module: torch.nn.Module, example: torch.Tensor, axis: int, output: str | int | None = None
) -> set[int] | None:
    """Sizes of an axis of the input on either side of the numbers with which code compares it.

    The module runs without numbers, on an input of which the size is a symbol; PyTorch notes the
    conditions that code puts on a symbol.

    Args:
        module: A module in evaluation mode.
        example: Inputs that the module takes.
        axis: The axis, 0 for the batch.
        output: Name or place of the output that counts.

    Returns:
        The sizes; None where the code takes the size as a plain number, or an operation takes no
        symbol.
    """
    # These import an algebra of symbols.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    sizes = [DimDynamic.STATIC] * example.ndim
    sizes[axis] = DimDynamic.DYNAMIC
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            given = mode.from_tensor(
                example.clone(), symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)
            )
            state: dict[str, torch.Tensor] = {
                name: mode.from_tensor(one.detach(), static_shapes=True)
                for name, one in state_of(module).items()
            }
            with mode:
                array_of(functional_call(module, state, (given,), tie_weights=False), output)
    except Exception as reason:  # whatever operations raise that take no symbol
        log.debug("%s: no symbol for axis %d: %s", type(module).__name__, axis, reason)
        return None
    guards = [guard.expr for guard in shapes.guards]
    if any(type(guard).__name__ == "Equality" for guard in guards):
        return None
    numbers = {abs(int(str(n))) for guard in guards for n in guard.atoms() if n.is_Integer}
    return {size for n in numbers for size in (n, n + 1) if size}


def _repeated(example: torch.Tensor, count: int) -> torch.Tensor:
    return example[:1].expand(count, *example.shape[1:]).clone()


def _traced(
    module: torch.nn.Module,
    example: torch.Tensor,
    output: str | int | None,
    whole: tuple[type, ...],
) -> tuple[torch.fx.GraphModule, dict[str, tuple[str, str]], dict[str, str]]:
    """The graph, begin and end of submodules taken whole by the names of nodes, and places."""
    state = state_of(module)
    places: dict[str, str] = {}
    owns: dict[str, tuple[str, str]] = {}
    handles = []
    begun: list[Any] = []
    patched: list[tuple[torch.nn.Module, str]] = []

    def last_node() -> Any:
        mode: Any = get_proxy_mode()
        graph = mode.tracer.graph
        return next(iter(reversed(graph.nodes)), None)

    def watch(path: str, child: torch.nn.Module) -> None:
        own = whole and isinstance(child, whole)

        def before(_: Any, given: tuple[Any, ...]) -> Any:
            if own:
                given = (given[0].clone(), *given[1:])
            begun.append(last_node())
            return given

        def after(_: Any, given: tuple[Any, ...], result: Any) -> Any:
            start = begun.pop()
            if own:
                result = result.clone()
                owns[last_node().name] = (path, start.name)
            node = last_node()
            while node is not None and node is not start and node.op != "root":
                places.setdefault(node.name, f"{path or 'the module'} ({type(child).__name__})")
                node = node.prev
            return result

        handles.append(child.register_forward_pre_hook(before))
        handles.append(child.register_forward_hook(after))

    def forward(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return array_of(functional_call(module, state, (x,), tie_weights=False), output)

    for path, child in module.named_modules():
        watch(path, child)
        for method in ("get_parameter", "get_buffer"):
            # While parameters are arguments, they are attributes of another class.
            patched.append((child, method))
            child.__dict__[method] = partial(_attribute, child)
    names = [getattr(torch.ops.aten, name) for name in _DECOMPOSED if hasattr(torch.ops.aten, name)]
    try:
        with warnings.catch_warnings(), torch.no_grad(), _compiled_parts_inlined():
            warnings.simplefilter("ignore")  # notices about the internals of the trace
            run = functionalize(forward, remove="mutations_and_views")
            smaller: Any = get_decompositions(names) | {
                torch.ops.aten.lerp.Tensor: _lerp,
                torch.ops.aten.copy.default: _copy,
            }
            traced = make_fx(run, decomposition_table=smaller)(state, example)
    except TnsimError:
        raise
    except Exception as error:  # whatever the forward pass or the trace raises
        check_one_input(module, error)
        said = " ".join(str(error).split()) or type(error).__name__
        if "proxy" in said.lower() or "data-dependent" in said or "vmap" in said:
            said = "it branches on, or counts with, numbers that depend on the input or the weights"
        raise UnsupportedLayer(f"the forward pass cannot be traced: {said[:300]}") from error
    finally:
        for handle in handles:
            handle.remove()
        for child, method in patched:
            del child.__dict__[method]
    if _mutates(traced):
        # Some operations of PyTorch write into arrays of their own, as circular padding does.
        again = functionalize(traced, remove="mutations_and_views")
        with torch.no_grad():
            traced = make_fx(again, decomposition_table=smaller)(state, example)
        if owns or _mutates(traced):
            raise UnsupportedLayer("the forward pass writes into arrays that it reads again")
    traced.graph.eliminate_dead_code()
    return traced, owns, places


def _compiled_parts_inlined() -> AbstractContextManager[Any]:
    """A context in which functions and submodules of `torch.compile` are traced as they were."""
    # Nothing was compiled while the compiler is not imported, which takes a second.
    dynamo: Any = sys.modules.get("torch._dynamo")
    return dynamo.config.patch(error_on_nested_fx_trace=False) if dynamo else nullcontext()


def _lerp(start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A step from one array to another, of which the length may depend on the input."""
    return start + weight * (end - start)


def _copy(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    """What is written over a whole array, as a copy of its own, which has derivatives of no kind.

    Between precisions the operation stays, and is judged as rounding.
    """
    if into.dtype != source.dtype:
        return NotImplemented
    return source.expand(into.shape)


def _mutates(traced: torch.fx.GraphModule) -> bool:
    """Whether an operation writes into an array that others read as well."""
    written = [node for node in traced.graph.nodes if _opname(node).endswith("_")]
    return any(len(node.all_input_nodes[0].users) > 1 or not node.users for node in written)


def _opname(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "_opname", "")) if node.op == "call_function" else ""


def _attribute(module: torch.nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)


def _check_batches(two: torch.fx.GraphModule, three: torch.fx.GraphModule) -> None:
    """Raise `UnsupportedLayer` where a module computes otherwise on more inputs."""
    refusal = JOINED
    if len(two.graph.nodes) != len(three.graph.nodes):
        raise UnsupportedLayer(refusal)
    place = {node: n for graph in (two, three) for n, node in enumerate(graph.graph.nodes)}
    for one, other in zip(two.graph.nodes, three.graph.nodes, strict=True):
        read = [[place[before] for before in node.all_input_nodes] for node in (one, other)]
        if read[0] != read[1]:
            raise UnsupportedLayer(refusal)
        if one.op != other.op or (one.op == "call_function" and one.target is not other.target):
            raise UnsupportedLayer(refusal)
        name = _name(one) if one.op == "call_function" else ""
        if name in _ARITHMETIC or is_entrywise(name):
            first, second = (
                [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, (int, float))]
                for node in (one, other)
            )
            if first != second:
                raise UnsupportedLayer(f"{refusal} ({name} with {first} and with {second})")


def _graph(
    traced: torch.fx.GraphModule,
    owns: dict[str, tuple[str, str]],
    places: dict[str, str],
    module: torch.nn.Module,
) -> Graph:
    nodes = list(traced.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    named = state_of(module)
    own = {id(one): name for name, one in named.items()}
    names = [*named, None]
    known: dict[torch.fx.Node, Operation] = {}
    constants: dict[Operation, Any] = {}
    state: dict[str, Operation] = {}
    argument = output = None
    same: dict[str, Operation] = {}
    owned = {name for end, (_, start) in owns.items() for name in (end, start)}
    for node in nodes:
        if node.op == "placeholder":
            name = names[placeholders.index(node)]
            operation = _plain_operation("input" if name is None else "weight")
            if name is None:
                argument = operation
            else:
                state[name] = operation
        elif node.op == "get_attr":
            value: Any = traced
            for part in str(node.target).split("."):
                value = getattr(value, part)
            # A list of the module's own may hold a parameter, which is the parameter all the same.
            operation = state.get(own.get(id(value), ""))
            if operation is None:
                operation = _plain_operation("weight")
                constants[operation] = value
        elif node.op == "output":
            found = tree_leaves(node.args)
            output = known[found[0]] if isinstance(found[0], torch.fx.Node) else None
            continue
        else:
            # What is computed twice is one operation, as an activation of the input.
            read = torch.fx.map_arg((node.args, node.kwargs), lambda one: _Named(id(known[one])))
            key = repr((str(node.target), read, node.name if node.name in owned else ""))
            if key not in same:
                place = places.get(node.name, "the forward pass")
                same[key] = _operation(node, known, place)
            operation = same[key]
        known[node] = operation
    by_name = {node.name: operation for node, operation in known.items()}
    assert argument is not None
    if output is None:
        raise UnsupportedLayer("the output of the forward pass does not depend on the input")
    _check_repeatable(traced, places)
    ends = {
        by_name[end]: (path, by_name[start])
        for end, (path, start) in owns.items()
        if end in by_name and start in by_name
    }
    return Graph(
        tuple(dict.fromkeys(known.values())), state, argument, output, ends, constants, traced
    )


def _drops(node: torch.fx.Node) -> bool:
    """Whether an operation that may draw numbers does: attention without dropout does not."""
    operator: Any = node.target
    arguments = [argument.name for argument in operator._schema.arguments]
    if "dropout_p" not in arguments:
        return True
    place = arguments.index("dropout_p")
    chosen = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return not isinstance(chosen, int | float) or chosen != 0


def _check_repeatable(traced: torch.fx.GraphModule, places: Mapping[str, str]) -> None:
    """Raise `UnsupportedLayer` where the output depends on random numbers."""
    needed = list(traced.graph.find_nodes(op="output"))
    found = set(needed)
    while needed:
        node = needed.pop()
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and _drops(node):
            place = places.get(node.name, "the forward pass")
            raise UnsupportedLayer(
                f"{place} computes {_name(node)}, which draws random numbers: the module gives "
                "something else each time"
            )
        further = [one for one in node.all_input_nodes if one not in found]
        found.update(further)
        needed += further


class _Named(NamedTuple):
    """An operation in a key of another."""

    identity: int


def _plain_operation(name: str) -> Operation:
    def nothing(*_: Any) -> Any:
        raise AssertionError(f"a {name} is given")

    return Operation(name, (), (), nothing, nothing, nothing)


def _name(node: torch.fx.Node) -> str:
    """The name of an operation without its overload, as `add` for `aten.add.Tensor`."""
    name = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target)
    name = str(name).partition(".")[0]
    if name.endswith("_") and not name.startswith("__"):
        name = name[:-1]
    name = name.removesuffix("_copy")
    if name in _BATCH_NORMS:
        return "batch_norm"
    if node.kwargs.get("rounding_mode") is not None:
        return f"{name} with rounding_mode={node.kwargs['rounding_mode']!r}"
    return _PLAIN.get(name, name)


def _operation(
    node: torch.fx.Node, known: Mapping[torch.fx.Node, Operation], place: str
) -> Operation:
    """An operation of the graph, with what the algebra asks of it."""
    name = _name(node)
    reads = tuple(known[one] for one in node.all_input_nodes)
    known_of: Any = known.__getitem__
    arguments: Any = torch.fx.map_arg(node.args, known_of)
    keywords: Any = torch.fx.map_arg(node.kwargs, known_of)
    target = _functional_target(node, name)

    def at(values: Mapping[Operation, Any], given: Any) -> Any:
        if isinstance(given, Operation):
            return values[given]
        if isinstance(given, (list, tuple)):
            return [at(values, one) for one in given]
        return given

    def run(values: Mapping[Operation, Any]) -> Any:
        return target(
            *at(values, arguments), **{key: at(values, one) for key, one in keywords.items()}
        )

    def varying_only(
        values: Mapping[Operation, Any], varying: frozenset[Operation], positive: bool
    ) -> Any:
        """The operation with everything added set to zero, and all numbers positive if asked."""
        added = _ADDED.get(name, ())

        def argument(n: int, given: Any, fixed: bool) -> Any:
            if isinstance(given, (list, tuple)) and any(
                isinstance(one, Operation) for one in given
            ):
                return [argument(n, one, fixed) for one in given]
            if isinstance(given, Operation):
                value = values[given]
                if given in varying or not isinstance(value, torch.Tensor):
                    return value
                if n in added and not (name == "where" and n == 0):
                    return value * 0
                if positive and value.is_floating_point():
                    return (value != 0).to(value.dtype)
                return value
            if n in added and isinstance(given, (int, float)) and not isinstance(given, bool):
                return 0
            return given

        given = [argument(n, one, False) for n, one in enumerate(arguments)]
        if name == "convolution":
            given[2] = None
        if name == "constant_pad_nd":
            given = given[:2]
        if name == "batch_norm":
            return _batch_norm(given, varying_only=True, positive=positive)
        named = {key: argument(-1, one, True) for key, one in keywords.items()}
        if not positive:
            return target(*given, **named)
        result = _positive(name, target, given, named)
        if isinstance(result, (list, tuple)):
            return [(one != 0).to(one.dtype) for one in result]
        return (result != 0).to(result.dtype)

    def linear(values: Mapping[Operation, Any], varying: frozenset[Operation]) -> Any:
        return varying_only(values, varying, False)

    def reach(values: Mapping[Operation, Any], varying: frozenset[Operation]) -> Any:
        return varying_only(values, varying, True)

    weight = (
        arguments[-1] if name in ("mm", "addmm") else arguments[0] if name == "embedding" else None
    )
    whole = False
    if isinstance(weight, Operation):
        whole = weight.name == "weight" or (
            weight.name == "t" and weight.arguments[0].name == "weight"
        )
        whole = whole and (name == "embedding" or weight.name == "t")
    named = tuple((key, one) for key, one in keywords.items() if not isinstance(one, Operation))
    added = tree_leaves([arguments[n] for n in _ADDED.get(name, ()) if n < len(arguments)])
    read = (tuple(arguments), run, linear, reach, named, place, whole)
    return Operation(name, reads, *read, tuple(one for one in added if one is not None))


def _functional_target(node: torch.fx.Node, name: str) -> Callable[..., Any]:
    """The function that computes an operation, on arrays that nothing writes to."""
    if name == "getitem":
        return lambda several, n: several[n]
    if name in _RESHAPES or name == "view":
        return lambda x, shape, **_: x.reshape(shape)
    if name == "batch_norm":
        return lambda *given, **_: _batch_norm(list(given))
    if name in ("slice_scatter", "select_scatter"):
        return _scattered if name == "slice_scatter" else _selected
    if name in ("empty", "new_empty", "empty_like"):
        target: Any = node.target
        return lambda *given, **named: torch.zeros_like(target(*given, **named))
    overload = str(getattr(node.target, "_overloadname", "default"))
    plain = str(getattr(node.target, "_opname", ""))
    if plain.endswith("_") and hasattr(torch.ops.aten, plain[:-1]):
        return getattr(getattr(torch.ops.aten, plain[:-1]), overload)
    if (
        plain.endswith("_copy")
        and plain not in ("_to_copy", "lift_fresh_copy")
        and hasattr(torch.ops.aten, plain[:-5])
    ):
        return getattr(getattr(torch.ops.aten, plain[:-5]), overload)
    assert callable(node.target)
    return node.target


def _scattered(
    x: torch.Tensor,
    part: torch.Tensor,
    axis: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> torch.Tensor:
    """An array with a part in the place of a slice."""
    places = range(x.shape[axis])[start:stop:step]
    if step != 1:
        return x.index_copy(axis, torch.tensor(list(places), dtype=torch.int64), part)
    begin, end = (places.start, places.stop) if len(places) else (0, 0)
    before, after = x.narrow(axis, 0, begin), x.narrow(axis, end, x.shape[axis] - end)
    return torch.cat([before, part.expand_as(x.narrow(axis, begin, end - begin)), after], axis)


def _selected(x: torch.Tensor, part: torch.Tensor, axis: int, index: int) -> torch.Tensor:
    """An array with a part at an index of an axis."""
    index %= x.shape[axis]
    return _scattered(x, part.unsqueeze(axis), axis, index, index + 1)


def _positive(
    name: str, target: Callable[..., Any], given: list[Any], named: dict[str, Any]
) -> Any:
    """An operation of which no number is negative, on indicators."""
    if name in ("add", "sub", "rsub", "lerp"):
        return given[0] + given[1]
    if name == "neg":
        return given[0]
    if name == "div":
        return (
            given[0] * torch.ones_like(given[1]) if isinstance(given[1], torch.Tensor) else given[0]
        )
    if name == "mul":
        one, two = (abs(x) if isinstance(x, (int, float)) else x for x in given[:2])
        return one * two
    if name in ("addmm", "baddbmm"):
        return target(*given)
    return target(*given, **named)


def _batch_norm(given: list[Any], varying_only: bool = False, positive: bool = False) -> Any:
    """Batch norm by running statistics in operations of which many rows run at once."""
    x, weight, bias, mean, variance = given[:5]
    epsilon = given[-1]
    if True in given[5:] or mean is None:
        raise UnsupportedLayer("a batch norm takes the mean of the batch: call module.eval() first")
    if positive:
        return x, x.new_empty(0), x.new_empty(0)
    shape = (-1, *(1,) * (x.ndim - 2))
    y = x if varying_only else x - mean.reshape(shape)
    y = y * (variance + epsilon).rsqrt().reshape(shape)
    if weight is not None:
        y = y * weight.reshape(shape)
    if bias is not None and not varying_only:
        y = y + bias.reshape(shape)
    return y, x.new_empty(0), x.new_empty(0)


def check_inputs_apart(graph: Graph, state: Mapping[str, Any], example: torch.Tensor) -> None:
    """Raise `UnsupportedLayer` where an entry of the output reads more than one input of a batch.

    Args:
        graph: Operations on two inputs.
        state: Parameters and buffers by name.
        example: Two inputs.
    """
    numbers: dict[Operation, Any] = {**graph.arrays(state), graph.argument: example}
    floats = example.dtype if example.is_floating_point() else torch.get_default_dtype()
    first = torch.zeros_like(example, dtype=floats)
    first[0] = 1
    read: dict[Operation, tuple[Any, Any]] = {graph.argument: (first, 1 - first)}
    for one in graph.operations:
        if one in numbers and one is not graph.argument:
            continue
        if one is graph.argument:
            continue
        numbers[one] = one.run(numbers)
        if any(before in read for before in one.reads) and one.name not in TABLES.fills:
            read[one] = tuple(_reached(one, numbers, read, n) for n in (0, 1))  # pyright: ignore
    one, two = read[graph.output]
    if len(one) != 2 or bool(one[1].any()) or bool(two[0].any()):
        raise UnsupportedLayer(JOINED)


def _reached(
    one: Operation, numbers: Mapping[Operation, Any], read: Mapping[Operation, Any], n: int
) -> Any:
    """The entries of a result that depend on an input of a batch of two."""
    if one.name == "getitem":
        whole, place = one.arguments
        found = read[whole][n]
        return found[place] if isinstance(found, (list, tuple)) else found
    known = frozenset(before for before in one.reads if before in read)
    here = {before: read[before][n] for before in known}
    if one.name == "embedding":
        return here[one.arguments[1]][..., None].expand(numbers[one].shape)
    affine = one.name in TABLES.axes or one.name in TABLES.sums or one.name in TABLES.products
    if affine and one.name not in ("mul", "where"):
        total = None
        for before in known:
            # The others are ones, as each of several factors counts.
            ones = {other: torch.ones_like(here[other]) for other in known if other is not before}
            zeros = ones if one.name in TABLES.products else {o: x * 0 for o, x in ones.items()}
            found = one.reach({**numbers, **zeros, before: here[before]}, known)
            parts = found if isinstance(found, list) else [found]
            total = parts if total is None else [a + b for a, b in zip(total, parts, strict=True)]
        assert total is not None
        return total if isinstance(found, list) else total[0]
    result = numbers[one]
    result = result[0] if isinstance(result, (list, tuple)) else result
    floats = result.dtype if result.is_floating_point() else torch.get_default_dtype()
    total = torch.zeros(result.shape, dtype=floats)
    for before in known:
        indicator = here[before]
        if not is_entrywise(one.name):  # over the last axis, as a norm
            indicator = indicator.amax(-1, keepdim=True)
        total = total + indicator.to(total.dtype)
    return total
