"""Forward passes of PyTorch modules as operations of which every one is known by name.

`make_fx` writes a forward pass down with parameters and buffers as arguments, without mutation and
without views, so that a graph of one module serves all its weights. A branch on values is refused
by PyTorch itself. The graph is made at the shapes that are asked for and at two sizes of the batch,
since a module may compute with the number of its inputs.

Source: `torch.fx.experimental.proxy_tensor.make_fx`, `torch.func.functionalize`.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import torch.fx
from torch._decomp import get_decompositions
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import tree_leaves

from tnsim.checkpoints.curves import MOST_POWERS
from tnsim.checkpoints.module_calls import join
from tnsim.checkpoints.operations import Graph, Operation, is_turned_parameter
from tnsim.errors import TnsimError, UnsupportedLayer
from tnsim.models.functions import array_of, check_one_input

log = logging.getLogger(__name__)

LENGTHS = (1, 2, 12, 33)
"""Lengths at which layers that were read at another have to compute the module, without n_ctx."""

LONG = 512
"""Numbers in code up to this one are such lengths besides, and sizes of buffers up to twice it."""

_PLAIN = {"_unsafe_view": "view", "_reshape_alias": "view", "_to": "to"}
_DECOMPOSED = (
    *("addcmul", "addcdiv", "addmv", "addr", "dot", "glu", "index_add", "index_copy"),
    *("linalg_cross", "mv"),
    *("celu", "clamp_max", "clamp_min", "elu", "hardshrink", "hardsigmoid", "hardswish"),
    *("hardtanh", "leaky_relu", "rsub", "silu", "softshrink", "square", "threshold"),
)
"""Operations that PyTorch writes out in others, activations as comparisons and exponentials."""


class TorchLibrary:
    """The functions of arrays that the algebra asks for, see `affine_values.Library`."""

    def __init__(self, like: torch.Tensor, precision: torch.dtype | None = None) -> None:
        self.like, self.precision = like, precision or like.dtype

    @property
    def rounding(self) -> float:
        return max(1e-12, 64 * torch.finfo(self.like.dtype).eps)

    def epsilon(self, dtype: torch.dtype) -> float:
        return torch.finfo(dtype).eps

    def vmap(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return torch.func.vmap(function)

    def transposed(self, function: Callable[[Any], Any], size: int) -> Callable[[Any], Any]:
        back = torch.func.vjp(function, self.like.new_zeros(size))[1]
        return lambda rows: back(rows)[0]

    def array(self, numbers: Any) -> torch.Tensor:
        numbers = np.asarray(numbers)
        if not numbers.flags.writeable:
            numbers = numbers.copy()
        floats = numbers.dtype.kind == "f"
        return torch.from_numpy(numbers).to(self.like if floats else self.like.device)

    def eye(self, size: int) -> torch.Tensor:
        return torch.eye(size, dtype=self.like.dtype, device=self.like.device)

    def concatenate(self, arrays: Sequence[Any], axis: int = 0) -> torch.Tensor:
        return torch.cat(list(arrays), axis)

    def numbers(self, array: Any) -> np.ndarray:
        return (
            array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)
        )


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all their names, also those that are tied or in no state dict."""
    named = (module.named_parameters, module.named_buffers)
    return {name: one for names in named for name, one in names(remove_duplicate=False)}


def graph_of(module: torch.nn.Module, example: torch.Tensor, whole: tuple[type, ...] = ()) -> Graph:
    """The operations of a module on inputs of the shape of an example.

    Args:
        module: A module in evaluation mode.
        example: Inputs that the module takes, the first axis the batch.
        whole: Classes of submodules that are taken whole.

    Returns:
        The operations for as many inputs.

    Raises:
        UnsupportedLayer: The module branches on values, or computes with the number of its inputs.

    Example:
        >>> graph = graph_of(torch.nn.Linear(3, 2), torch.zeros(1, 3))
        >>> [one.name for one in graph.operations if one.name not in ("weight", "input")]
        ['t', 'addmm']
    """
    return _graph(*_traced(module, example, whole), module)


def lengths_of(module: torch.nn.Module, graph: Graph, example: torch.Tensor) -> list[int]:
    """Lengths of sequences at which a forward pass may begin to do something else.

    These are the numbers with which the code compares the length, those by which operations shift,
    such as the width of a window, and the sizes of buffers, such as a mask of which a part is
    taken; of the first two the next length too.

    Args:
        module: A module in evaluation mode.
        graph: Its graph on sequences.
        example: Sequences that the module takes.

    Returns:
        The lengths, in order, `LENGTHS` among them.

    Raises:
        UnsupportedLayer: The code takes the length as a plain number.
    """
    compared = compared_sizes(module, example, 1)
    if compared is None:
        raise UnsupportedLayer(
            "the forward pass takes the length of a sequence as a plain number, and may compute "
            "something else at another: give n_ctx=, the length of sequences that counts"
        )
    leaves = tree_leaves([one.arguments for one in graph.operations])
    numbers = {abs(leaf) for leaf in leaves if type(leaf) is int}
    shifts = {n for n in numbers if max(LENGTHS) < n <= LONG}
    sizes = {size for one in module.buffers() for size in one.shape}
    found = {n for n in compared if n <= LONG + 1} | shifts | {n + 1 for n in shifts}
    return sorted({*LENGTHS, *found, *(n for n in sizes if max(LENGTHS) < n <= 2 * LONG)})


def compared_sizes(module: torch.nn.Module, example: torch.Tensor, axis: int) -> set[int] | None:
    """Sizes of an axis of the input on either side of the numbers with which code compares it.

    The module runs without numbers, on an input of which the size is a symbol; PyTorch notes the
    conditions that code puts on a symbol.

    Args:
        module: A module in evaluation mode.
        example: Inputs that the module takes.
        axis: The axis, 0 for the batch.

    Returns:
        The sizes; None where the code takes the size as a plain number, or an operation takes no
        symbol.
    """
    # Here, as these import an algebra of symbols.
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    # PyTorch would keep entries for the symbols of every reading, none of which comes again, to the
    # end of the process.
    mode.cache_enabled = False
    sizes = [DimDynamic.STATIC] * example.ndim
    sizes[axis] = DimDynamic.DYNAMIC
    try:
        with warnings.catch_warnings(), _fake_tensors_unsaid(), torch.no_grad():
            warnings.simplefilter("ignore")
            given = mode.from_tensor(
                example.clone(), symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)
            )
            state: dict[str, torch.Tensor] = {
                name: mode.from_tensor(one.detach(), static_shapes=True)
                for name, one in state_of(module).items()
            }
            # Up to PyTorch 2.12 the product of matrices in C++ asks for the number of elements.
            with enable_python_dispatcher(), mode:
                _outputs(module, state, given)
    except Exception as reason:  # whatever operations raise that take no symbol
        log.debug("%s: no symbol for axis %d: %s", type(module).__name__, axis, reason)
        return None
    guards = [guard.expr for guard in shapes.guards]
    if any(type(guard).__name__ == "Equality" for guard in guards):
        return None
    numbers = {abs(int(str(n))) for guard in guards for n in guard.atoms() if n.is_Integer}
    return {size for n in numbers for size in (n, n + 1) if size}


@contextmanager
def _fake_tensors_unsaid() -> Iterator[None]:
    """Keep PyTorch from reporting what is tried here without numbers, and may fail."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _outputs(module: torch.nn.Module, state: Mapping[str, torch.Tensor], x: Any) -> torch.Tensor:
    """The output that counts, with other tensors in the place of parameters and buffers."""
    # A submodule of several names is given its tensors under the first: PyTorch would put back,
    # after the call, what another name had put in.
    own = {
        join(path, name)
        for path, child in module.named_modules()
        for name in (*child._parameters, *child._buffers)
    }
    given = {name: one for name, one in state.items() if name in own}
    return array_of(functional_call(module, given, (x,), tie_weights=False))


def _traced(
    module: torch.nn.Module,
    example: torch.Tensor,
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
        return _outputs(module, state, x)

    for path, child in module.named_modules():
        watch(path, child)
        for method in ("get_parameter", "get_buffer"):
            # While parameters are arguments, they are attributes of another class.
            patched.append((child, method))
            child.__dict__[method] = lambda name, child=child: attrgetter(name)(child)
    names = [getattr(torch.ops.aten, name) for name in _DECOMPOSED if hasattr(torch.ops.aten, name)]
    try:
        with warnings.catch_warnings(), torch.no_grad(), _compiled_parts_inlined(), _one_mode():
            warnings.simplefilter("ignore")  # notices about the internals of the trace
            run = functionalize(forward, remove="mutations_and_views")
            smaller: Any = get_decompositions(names) | _written_out()
            traced = make_fx(run, decomposition_table=smaller)(state, example)
    except TnsimError:
        raise
    except Exception as error:  # whatever the forward pass or the trace raises
        check_one_input(module, error)
        said = " ".join(str(error).split()) or type(error).__name__
        if "setup_context" in said or "custom_function" in said:
            said = "it calls an autograd.Function, through which PyTorch does not trace"
        elif "proxy" in said.lower() or "data-dependent" in said or "vmap" in said:
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
        with torch.no_grad(), _one_mode():
            traced = make_fx(again, decomposition_table=smaller)(state, example)
        if owns or _mutates(traced):
            raise UnsupportedLayer("the forward pass writes into arrays that it reads again")
    traced.graph.eliminate_dead_code()
    return traced, owns, places


def _one_mode() -> AbstractContextManager[Any]:
    """A context in which the shapes of all values of a trace are kept by one mode.

    Else `make_fx` makes one for every value, with the stack of calls: half the time of a trace.
    """
    return tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True)))


def _compiled_parts_inlined() -> AbstractContextManager[Any]:
    """A context in which functions and submodules of `torch.compile` are traced as they were."""
    # Nothing was compiled while the compiler is not imported, which takes a second.
    dynamo: Any = sys.modules.get("torch._dynamo")
    return dynamo.config.patch(error_on_nested_fx_trace=False) if dynamo else nullcontext()


def _written_out() -> dict[Any, Callable[..., Any]]:
    """Operations that are written out in others here, as the algebra needs them."""
    aten = torch.ops.aten
    return {
        aten.lerp.Tensor: _lerp,
        aten.lerp.Scalar: _lerp,
        aten.copy.default: _copy,
        aten.prod.dim_int: _prod,
        aten.cumprod.default: _cumprod,
        aten.log_sigmoid_forward.default: _log_sigmoid,
        aten._prelu_kernel.default: _prelu,
        aten.native_batch_norm.default: _batch_norm,
        aten._native_batch_norm_legit.default: _batch_norm,
        aten._native_batch_norm_legit_no_training.default: _batch_norm,
        aten.slice_scatter.default: _scattered,
        aten.select_scatter.default: _selected,
        aten.split_copy.Tensor: _split,
        aten.split_with_sizes_copy.default: _split,
        aten.unbind_copy.int: _along,
        aten.native_layer_norm.default: _layer_norm,
        aten._trilinear.default: _trilinear,
    }


def _lerp(start: torch.Tensor, end: torch.Tensor, weight: Any) -> torch.Tensor:
    """A step from one array to another, of which the length may depend on the input."""
    return start + weight * (end - start)


def _copy(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    """What is written over a whole array, as a copy of its own, which has derivatives of no kind.

    Between precisions the operation stays, and is judged as rounding.
    """
    if into.dtype != source.dtype:
        return NotImplemented
    return source.expand(into.shape)


def _along(x: torch.Tensor, axis: int = 0) -> list[torch.Tensor]:
    """The parts of an array along an axis, each an array of its own."""
    return [x.select(axis, n) for n in range(x.shape[axis])]


def _prod(x: torch.Tensor, axis: int, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The product along an axis, factor by factor, of so few factors that it has a layer."""
    if dtype not in (None, x.dtype) or not 1 <= x.shape[axis] <= MOST_POWERS:
        return NotImplemented
    found = reduce(torch.mul, _along(x, axis))
    return found.unsqueeze(axis) if keepdim else found


def _cumprod(x: torch.Tensor, axis: int, *, dtype: Any = None) -> Any:
    """The products along an axis up to each place, as for `_prod`."""
    if dtype not in (None, x.dtype) or not 1 <= x.shape[axis] <= MOST_POWERS:
        return NotImplemented
    return torch.stack(list(accumulate(_along(x, axis), torch.mul)), axis)


def _prelu(x: torch.Tensor, slope: torch.Tensor) -> Any:
    """ReLU of slopes that differ from unit to unit, as a line beside ReLU.

    With a single slope the function is one known curve of every entry.
    """
    if slope.numel() == 1:
        return torch.where(x > 0, x, slope * x)
    return slope * x + (1 - slope) * x.relu()


def _log_sigmoid(x: torch.Tensor) -> Any:
    """The function by softplus, which is its asymptote only where it is that to rounding."""
    return -torch.nn.functional.softplus(-x, threshold=40), x.new_empty(0)


def _scattered(
    x: torch.Tensor,
    part: torch.Tensor,
    axis: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> torch.Tensor:
    """An array with a part in the place of a slice.

    PyTorch computes its own operation on many rows at once only for slices with a known end.
    """
    places = range(x.shape[axis])[start:stop:step]
    if step != 1:
        return x.index_copy(axis, torch.tensor(list(places), dtype=torch.int64), part)
    begin, end = (places.start, places.stop) if len(places) else (0, 0)
    before, after = x.narrow(axis, 0, begin), x.narrow(axis, end, x.shape[axis] - end)
    return torch.cat([before, part.expand_as(x.narrow(axis, begin, end - begin)), after], axis)


def _split(x: torch.Tensor, sizes: Any, axis: int = 0) -> list[torch.Tensor]:
    """The parts of an array along an axis, one by one, of given sizes or of one size."""
    length = x.shape[axis]
    if isinstance(sizes, int):
        return [x.narrow(axis, n, min(sizes, length - n)) for n in range(0, length, sizes)]
    ends = accumulate(sizes)
    return [x.narrow(axis, end - size, size) for end, size in zip(ends, sizes, strict=True)]


def _selected(x: torch.Tensor, part: torch.Tensor, axis: int, index: int) -> torch.Tensor:
    """An array with a part at an index of an axis."""
    index %= x.shape[axis]
    return _scattered(x, part.unsqueeze(axis), axis, index, index + 1)


def _batch_norm(*given: Any, **_: Any) -> Any:
    """Batch norm by running statistics in operations of which many rows run at once."""
    x, weight, bias, mean, variance, *settings, epsilon = given
    if any(one is True for one in settings) or mean is None:
        raise UnsupportedLayer(
            "a batch norm or an instance norm takes mean and variance of what it is given: let it "
            "keep running ones (track_running_stats=True), and call module.eval()"
        )
    shape = (-1, *(1,) * (x.ndim - 2))
    y = (x - mean.reshape(shape)) * (variance + epsilon).rsqrt().reshape(shape)
    if weight is not None:
        y = y * weight.reshape(shape)
    if bias is not None:
        y = y + bias.reshape(shape)
    return y, x.new_empty(0), x.new_empty(0)


def _layer_norm(
    x: torch.Tensor, shape: Sequence[int], gain: Any, shift: Any, epsilon: float
) -> Any:
    """A norm of the last axis as it is written by hand, of which the algebra knows the root.

    One of several axes stays, and is refused by its name.
    """
    if len(shape) > 1:
        return NotImplemented
    y = x - x.mean(-1, keepdim=True)
    y = y * ((y**2).mean(-1, keepdim=True) + epsilon).rsqrt()
    if gain is not None:
        y = y * gain
    if shift is not None:
        y = y + shift
    return y, x.new_empty(0), x.new_empty(0)


def _trilinear(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *_: Any) -> torch.Tensor:
    """`nn.Bilinear`: sum_j (sum_i x_i W_oij) y_j, as many hidden units as (o, j)."""
    return ((x[:, None, :, None] * weight).sum(2) * y[:, None]).sum(2)


def _mutates(traced: torch.fx.GraphModule) -> bool:
    """Whether an operation writes into an array that others read as well."""
    written = [node for node in traced.graph.nodes if _opname(node).endswith("_")]
    return any(len(node.all_input_nodes[0].users) > 1 or not node.users for node in written)


def _opname(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "_opname", "")) if node.op == "call_function" else ""


def _graph(
    traced: torch.fx.GraphModule,
    owns: dict[str, tuple[str, str]],
    places: dict[str, str],
    module: torch.nn.Module,
) -> Graph:
    named = state_of(module)
    own = {id(one): name for name, one in named.items()}
    names = iter([*named, None])
    known: dict[torch.fx.Node, Operation] = {}
    constants: dict[Operation, Any] = {}
    state: dict[str, Operation] = {}
    argument = Operation("input")
    output = None
    same: dict[str, Operation] = {}
    drawing: list[Operation] = []
    owned = {name for end, (_, start) in owns.items() for name in (end, start)}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            name = next(names)
            operation = argument if name is None else state.setdefault(name, Operation("weight"))
        elif node.op == "get_attr":
            value: Any = attrgetter(str(node.target))(traced)
            # A list of the module's own may hold a parameter, which is the parameter all the same.
            operation = state.get(own.get(id(value), ""))
            if operation is None:
                operation = Operation("weight")
                constants[operation] = value
        elif node.op == "output":
            output = known.get(tree_leaves(node.args)[0])
            continue
        elif _name(node) == "detach" and argument in known[node.args[0]].before():
            # The value itself, whose derivatives the algebra takes. One of weights alone stays, so
            # that they have no gradient.
            operation = known[node.args[0]]
        else:
            # What is computed twice is one operation, as an activation of the input.
            named = lambda one: f"operation {id(known[one])}"  # noqa: E731
            read = torch.fx.map_arg((node.args, node.kwargs), named)
            key = repr((str(node.target), read, node.name if node.name in owned else ""))
            if key not in same:
                place = places.get(node.name, "the forward pass")
                same[key] = _operation(node, known, place)
            operation = same[key]
            if _draws(node):
                drawing.append(operation)
        known[node] = operation
    by_name = {node.name: operation for node, operation in known.items()}
    if output is None:
        raise UnsupportedLayer("the output of the forward pass does not depend on the input")
    needed = output.before()
    if drawn := next((one for one in drawing if one in needed), None):
        raise UnsupportedLayer(
            f"{drawn.place} computes {drawn.name}, which draws random numbers: the module gives "
            "something else each time"
        )
    ends = {
        by_name[end]: (path, by_name[start])
        for end, (path, start) in owns.items()
        if end in by_name and start in by_name
    }
    operations = tuple(dict.fromkeys(known.values()))
    return Graph(operations, state, argument, output, constants, ends)


def _draws(node: torch.fx.Node) -> bool:
    """Whether an operation draws random numbers: attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    operator: Any = node.target
    arguments = [argument.name for argument in operator._schema.arguments]
    if "dropout_p" not in arguments:
        return True
    place = arguments.index("dropout_p")
    chosen = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return not isinstance(chosen, int | float) or chosen != 0


def _name(node: torch.fx.Node) -> str:
    """The name of an operation without its overload, as `add` for `aten.add.Tensor`."""
    name = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target)
    name = str(name).partition(".")[0]
    if name.endswith("_") and not name.startswith("__"):
        name = name[:-1]
    name = name.removesuffix("_copy")
    if node.kwargs.get("rounding_mode") is not None:
        return f"{name} with rounding_mode={node.kwargs['rounding_mode']!r}"
    if name == "scatter" and "reduce" in node.kwargs:
        return "scatter with reduce"
    return _PLAIN.get(name, name)


def _operation(
    node: torch.fx.Node, known: Mapping[torch.fx.Node, Operation], place: str
) -> Operation:
    """An operation of the graph, with what the algebra asks of it."""
    name = _name(node)
    known_of: Any = known.__getitem__
    arguments: Any = torch.fx.map_arg(node.args, known_of)
    keywords: Any = torch.fx.map_arg(node.kwargs, known_of)
    whole = False
    if name in ("mm", "addmm", "embedding"):
        turned = is_turned_parameter(arguments[0 if name == "embedding" else -1])
        whole = turned is not None and (turned or name == "embedding")
    target = _functional_target(node, name)
    return Operation(name, tuple(arguments), target, tuple(keywords.items()), place, whole)


def _functional_target(node: torch.fx.Node, name: str) -> Callable[..., Any]:
    """The function that computes an operation, on arrays that nothing writes to."""
    if name == "getitem":
        return lambda several, n: several[n]
    if name in ("view", "reshape"):
        return lambda x, shape, **_: x.reshape(shape)
    if name in ("empty", "new_empty", "empty_like"):
        target: Any = node.target
        return lambda *given, **named: torch.zeros_like(target(*given, **named))
    overload = str(getattr(node.target, "_overloadname", "default"))
    plain = str(getattr(node.target, "_opname", ""))
    if plain.endswith("_") and hasattr(torch.ops.aten, plain[:-1]):
        return getattr(getattr(torch.ops.aten, plain[:-1]), overload)
    # Copies of views; `index_copy` is no copy of `index`.
    if torch.Tag.view_copy in getattr(node.target, "tags", ()):
        return getattr(getattr(torch.ops.aten, plain[:-5]), overload)
    assert callable(node.target)
    return node.target
