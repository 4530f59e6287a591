"""Calls of a PyTorch module: states inside it, what it takes, its outputs beside those of layers.

Inputs that the module takes are the first guess on which it runs. The layers that were read are
compared with the module on random batches of several sizes.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from tnsim.checkpoints.norms import Normed
from tnsim.errors import (
    ON_INPUTS,
    ModelError,
    TooLarge,
    UnsupportedLayer,
    cause,
    first_few,
    in_one_line,
    require,
)
from tnsim.models.arrays import detached, host_array
from tnsim.models.functions import array_of, batch_of_inputs, check_one_input, run_module, tensor_of
from tnsim.options import checked

if TYPE_CHECKING:
    from tnsim.checkpoints.batches import Beside


P = ParamSpec("P")
T = TypeVar("T")

BATCH = 16  # inputs that run at once where states are collected


LEAVES = ("Linear", "Embedding", "LayerNorm", "RMSNorm")  # PyTorch's layers that tnsim reads
SCALES = (1.0, -1.0, 0.25, 4.0)  # of inputs: functions that agree at one size may differ at another
TOLERANCE = 1e-5  # relative; in float64 only tables of a rotation in float32 may differ so much
AN_EXAMPLE = (
    "an example of them, to tnsim.from_module(net, inputs=x), for gradients to "
    "tnsim.torch.from_module(net, inputs=x), and for files of its weights to "
    "tnsim.load(path, net, inputs=x), --example x.npy on the command line"
)
SAMPLES, POSITIONS = 8, 5  # sizes of example inputs
READING = threading.RLock()
"""Held by the thread that reads a module, and by one that forks: its child would else begin within
the settings of a reading, and wait for a thread that it does not have."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=READING.acquire, after_in_parent=READING.release, after_in_child=READING.release
    )


@checked
def inputs_of(module: Any, path: str, inputs: Any) -> np.ndarray:
    """The states that enter a submodule while a module runs on inputs.

    For the distribution of what a block reads: `Gaussian.fit(states)`, `Empirical(states)`.

    Args:
        module: An `nn.Module` in evaluation mode. It is not changed.
        path: Name of the submodule, such as "transformer.h.5.mlp".
        inputs: Argument of the module, a row for each input: token ids (n, positions), or vectors.

    Returns:
        The first argument of the submodule in every call, (states, width), float64: a state for
        each position of each input.

    Raises:
        ModelError: There is no such submodule, it is not called, or its argument has no
            coordinates.
        MissingExtra: PyTorch is not installed.

    Example:
        >>> import torch, tnsim
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 4))
        >>> states = inputs_of(net, "1", np.array([[0, 1], [2, 3]]))
        >>> states.shape, tnsim.Gaussian.fit(states).mean.shape
        ((4, 3), (3,))
    """
    torch = require_torch()
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            f"states are taken from a torch.nn.Module, found {type(module).__name__}; a folder of "
            "Hugging Face is loaded by its library, transformers.AutoModel.from_pretrained(folder)"
        )
    known = dict(module.named_modules())
    if path not in known:
        # Names that end alike are the likeliest to be meant.
        names = [name for name in known if name.rpartition(".")[2] == str(path).rpartition(".")[2]]
        near = names or [name for name in known if name]
        raise ModelError(f"there is no submodule {path!r}; there are {first_few(near)}")
    rows = batch_of_inputs(inputs)
    batches: list[np.ndarray] = []

    def record(_: Any, arguments: tuple, named: dict[str, Any]) -> None:
        given = as_numpy((*arguments, *named.values())[0])
        # Token numbers are no states.
        if given.dtype.kind != "f" or given.ndim < 2:
            raise ModelError(
                f"{path} reads an array of {given.dtype} and shape {given.shape}, which are no "
                "states: name the submodule that reads vectors"
            )
        # A position is a state like any other.
        batches.append(given.reshape(-1, given.shape[-1]))

    handle = known[path].register_forward_pre_hook(record, with_kwargs=True)
    try:
        for start in range(0, len(rows), BATCH):
            run_module(module, rows[start : start + BATCH])
    finally:
        handle.remove()
    if not batches:
        raise ModelError(f"{path} is not called when the module runs on these inputs")
    return np.concatenate(batches)


def as_numpy(value: Any) -> np.ndarray:
    """A tensor as NumPy, floats in float64.

    Args:
        value: A tensor, or outputs of a module that hold a tensor, as for `array_of`.

    Returns:
        A copy of the numbers.
    """
    found = host_array(detached(array_of(value)))
    return np.array(found, np.float64 if found.dtype.kind == "f" else found.dtype)


def copy_of(module: Any) -> Any:
    """A copy of a module, also of one that keeps tensors computed from its parameters.

    Pruning and the norms of `torch.nn.utils` keep a weight as an attribute, beside the parameters
    that it is computed from before every call. PyTorch copies no such tensor, as a copy would have
    no history; that of a module needs none, since the next call computes it anew.

    Args:
        module: A module of PyTorch, or what a package wraps one in.

    Raises:
        UnsupportedLayer: Python cannot copy what the module holds.

    Example:
        >>> import torch
        >>> from torch.nn.utils import prune
        >>> pruned = prune.l1_unstructured(torch.nn.Linear(2, 1), "weight", 1)
        >>> int((copy_of(pruned).weight == 0).sum())
        1
    """
    torch = require_torch()
    known: dict[int, Any] = {}
    for child in module.modules() if isinstance(module, torch.nn.Module) else ():
        for kept in _leaves(vars(child)):
            if isinstance(kept, torch.Tensor) and not kept.is_leaf:
                known[id(kept)] = kept.detach().clone()
    try:
        return copy.deepcopy(module, known)
    except Exception as error:  # of locks and open files, of sparse weights, of code of a user
        said = f"the module cannot be copied: {cause(error)}"
        raise UnsupportedLayer(f"{said}. {ON_INPUTS}") from error


def _leaves(value: Any) -> Iterator[Any]:
    """What a nest of mappings, lists and tuples holds."""
    if isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(one)
    else:
        yield value


def outside_compiler(function: Callable[P, T]) -> Callable[P, T]:
    """The function, run as it is where `torch.compile` compiles the code that calls it.

    The compiler would compile tnsim itself, for half a minute, and modules cannot be read there.

    Args:
        function: Function that reads modules.

    Example:
        >>> outside_compiler(abs)(-1)
        1
    """

    @wraps(function)
    def called(*given: P.args, **named: P.kwargs) -> T:
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*given, **named)
        return function(*given, **named)

    return called


def diverged(module: Any) -> str | None:
    """What to say of the numbers of a module that are NaN or infinite; None where all are finite.

    Args:
        module: An `nn.Module`.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(1, 1)
        >>> diverged(net) is None
        True
        >>> _ = net.weight.data.fill_(torch.inf)
        >>> diverged(net)
        "'weight' has numbers that are NaN or infinite: the run diverged there"
    """
    names = [
        repr(name)
        for name, one in module.named_parameters()
        if not one.is_meta and not bool(one.detach().isfinite().all())
    ]
    if not names:
        return None
    has = "has" if len(names) == 1 else "have"
    return f"{first_few(names)} {has} numbers that are NaN or infinite: the run diverged there"


def require_torch() -> Any:
    """The package `torch`.

    Returns:
        The package.

    Raises:
        MissingExtra: When PyTorch is not installed.
    """
    require("torch", "torch", "reading a module")
    import torch

    return torch


@contextlib.contextmanager
def as_precise_as(dtypes: Collection[Any]) -> Iterator[None]:
    """Run a copy of a module in float64 as precisely as the module itself runs.

    In a module of float32 or less, casts to float32 lose nothing, as in `x.float()`. In its copy
    they would round, or mix two types in one product, and are left out. In a module of float64 they
    round, and so they do in its copy.

    Args:
        dtypes: Types of the parameters of the module, of which a copy in float64 runs.

    Example:
        >>> import torch
        >>> with as_precise_as([torch.float32]):
        ...     torch.zeros(1, dtype=torch.float64).float().dtype
        torch.float64
    """
    torch = require_torch()
    from torch.overrides import TorchFunctionMode

    class Wide(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            named = kwargs or {}
            if not args or getattr(args[0], "dtype", None) is not torch.float64:
                return function(*args, **named)
            if function is torch.Tensor.float:
                return args[0]
            return function(*map(wider, args), **{name: wider(x) for name, x in named.items()})

    def wider(given: Any) -> Any:
        return torch.float64 if given is torch.float32 else given

    with contextlib.nullcontext() if torch.float64 in dtypes else Wide():
        yield


def leaves_of(module: Any, classes: tuple[type, ...], path: str = "") -> Iterator[tuple[str, Any]]:
    """The submodules that are taken whole: given classes, and modules without submodules.

    Args:
        module: A module of PyTorch.
        classes: Classes that are taken whole though they have submodules.
        path: Name of the module in the outermost module.

    Yields:
        Path and submodule, in the order in which they were declared.
    """
    # A layer of PyTorch may be parametrised, and so have submodules.
    whole = isinstance(module, classes) or kind(module) in LEAVES
    if whole or not any(True for _ in module.children()):
        yield path, module
        return
    for name, child in module.named_children():
        yield from leaves_of(child, classes, join(path, name))


def join(path: str, name: str) -> str:
    """The full name of a parameter or module inside a submodule.

    Args:
        path: Name of the submodule, "" for the module itself.
        name: Name inside the submodule.

    Returns:
        Both names with a dot between.

    Example:
        >>> join("blocks.0", "weight"), join("", "weight")
        ('blocks.0.weight', 'weight')
    """
    return f"{path}.{name}" if path else name


def kind(module: Any) -> str:
    """The name of PyTorch's own class of a submodule, though derived or parametrised.

    Args:
        module: Any module.

    Returns:
        The name of the first class that PyTorch itself defines; "" for a class of the user.
    """
    for cls in type(module).__mro__:
        # Derived and parametrised classes have PyTorch's own class further up.
        if cls.__module__.startswith("torch.nn.modules.") and cls.__name__ != "Module":
            return cls.__name__
    return ""


@contextlib.contextmanager
def own_defaults(module: Any) -> Iterator[None]:
    """Make float64, and the CPU of a module that is there, the defaults of what PyTorch makes.

    Code that is compiled runs as it was written, since it reads addresses, which the inputs of a
    trace do not have. PyTorch keeps both for the whole process, so one thread reads at a time.

    Masks and tables of a forward pass of its copy are then what the weights are. Other code in the
    process may have set defaults of its own, such as the device "meta", on which tensors have no
    numbers.

    Args:
        module: The module, of which a copy in float64 runs.
    """
    torch = require_torch()
    tensors = itertools.chain(module.parameters(), module.buffers())
    on_host = all(tensor.device.type == "cpu" for tensor in tensors)
    dtypes = {parameter.dtype for parameter in module.parameters()}
    place = torch.device("cpu") if on_host else contextlib.nullcontext()
    with READING:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.compiler.set_stance("force_eager"), place, as_precise_as(dtypes):
                yield
        finally:
            torch.set_default_dtype(before)


def example_inputs(module: Any, inputs: Any, n_ctx: int | None, width: int | None = None) -> Any:
    """Inputs that the module takes: the given inputs, else the first guess on which it runs.

    A guess has to give an output for every input; and a batch of vectors that the module puts
    together, as attention does, gives way to sequences of such vectors.

    Args:
        module: The module in float64.
        inputs: Inputs that the user gave, or None.
        n_ctx: Length of sequences, or None.
        width: Entries of a vector, as what the module is compared with says; None where nothing
            does.

    Returns:
        A tensor of vectors, float64, or of token numbers.

    Raises:
        ModelError: Where the module runs on no guess.
    """
    torch = require_torch()
    if inputs is not None:
        if isinstance(inputs, (tuple, list)) and any(hasattr(each, "shape") for each in inputs):
            check_one_input(module)
        is_tensor = isinstance(inputs, torch.Tensor)
        example: Any = inputs if is_tensor else tensor_of(batch_of_inputs(inputs))
        if example.is_floating_point():
            return example.double()
        return example if example.is_complex() or example.dtype == torch.bool else example.long()
    # The last refusal is told where no guess fits.
    found, error = _first_taken(module, _guessed_inputs(module, n_ctx, width))
    if found is not None:
        return found
    # Modules of parameters alone do not say which axis reads the input.
    tensors = (*module.parameters(), *module.buffers())
    widths = sorted({size for tensor in tensors for size in tensor.shape if size})
    each = [_first_taken(module, inputs_of_width(size, n_ctx))[0] for size in widths]
    fits = [example for example in each if example is not None]
    vectors = [example for example in fits if example.ndim == 2 or n_ctx is not None]
    # A single width that fits is the input; several would be a guess.
    taken = vectors or fits
    if len(taken) == 1:
        return taken[0]
    if vectors:
        sizes = ", ".join(str(example.shape[-1]) for example in vectors)
        raise ModelError(f"the module takes vectors of {sizes} entries: give inputs=, {AN_EXAMPLE}")
    if error is not None:
        check_one_input(module, error)
    last = "" if error is None else f" (the last try: {in_one_line(error)})"
    raise ModelError(
        "no inputs were found that the module takes; compare it under a metric that says how many "
        f"numbers it reads, tnsim.Gaussian(mean=np.zeros(d)), or give inputs=, {AN_EXAMPLE}{last}"
    ) from error


def shape_of_inputs(module: Any, n_ctx: int | None, width: int | None = None) -> tuple[int, ...]:
    """The shape of a single input of a module that reads vectors.

    Args:
        module: Module of PyTorch, in any precision.
        n_ctx: Length of sequences, None for vectors.
        width: Entries of a vector, as for `example_inputs`.

    Returns:
        The shape (d,), or (n_ctx, d).

    Raises:
        ModelError: The module takes no vectors, or sequences of a length that nobody said.

    Example:
        >>> import torch
        >>> shape_of_inputs(torch.nn.Linear(3, 2), None)
        (3,)
    """
    torch = require_torch()
    with torch.no_grad():
        double = copy_of(module).double().eval()
    with torch.no_grad(), own_defaults(module):
        example = example_inputs(double, None, n_ctx, width)
    name = type(module).__name__
    if not example.is_floating_point():
        raise ModelError(
            f"{name} reads token numbers, which no Gaussian draws: compare on sequences of yours "
            "by tnsim.Empirical(tokens), an array (n, positions)"
        )
    if example.ndim > 2 and n_ctx is None:
        raise ModelError(
            f"{name} reads sequences of {example.shape[-1]} coordinates: say how long they are, by "
            "n_ctx=, or give inputs of your own by tnsim.Empirical(inputs)"
        )
    return tuple(example.shape[1:])


def _refusal_of(module: Any, example: Any) -> Exception | None:
    """The error of a forward pass, or None where the module takes the inputs."""
    try:
        outputs = module(example)
    except ModelError:  # of outputs: no input gives the output that was asked for
        raise
    except Exception as failed:  # whatever a forward pass raises on inputs that it cannot take
        return failed
    shape = tuple(getattr(outputs, "shape", (len(example),)))
    if shape[:1] != (len(example),):
        return ModelError(f"outputs of shape {shape} for {len(example)} inputs")
    return None


def _joins(module: Any, example: Any) -> bool:
    """Whether a module gives other outputs for vectors where others stand in their batch."""
    if not example.is_floating_point() or example.ndim != 2:
        return False
    try:
        together, alone = array_of(module(example))[-2:], array_of(module(example[-2:]))
    except Exception:  # of outputs that are no array, or of code that counts its inputs
        return True
    if together.shape != alone.shape:
        return True
    return alone.numel() > 0 and bool((together - alone).abs().max() > 1e-6 * alone.abs().max())


def _first_taken(module: Any, guesses: Iterable[Any]) -> tuple[Any, Exception | None]:
    """The first guess that a module takes, and the last refusal before it.

    One of which the module puts inputs together gives way to a later one.
    """
    joined, error = None, None
    try:
        for example in guesses:
            error = _refusal_of(module, example)
            if error is None and not _joins(module, example):
                return example, None
            if error is None and joined is None:
                joined = example
    except RuntimeError as failed:  # of a guess as it is made
        raise TooLarge(f"memory holds no inputs of this length: {in_one_line(failed)}") from None
    return joined, error


def inputs_of_width(size: int, n_ctx: int | None) -> Iterator[Any]:
    """Random vectors and sequences.

    Args:
        size: Coordinates of a vector.
        n_ctx: Length of the sequences; None for vectors first, and sequences of a few positions.

    Yields:
        Tensors (inputs, size) and (inputs, positions, size), float64.
    """
    torch = require_torch()
    rng = torch.Generator().manual_seed(0)
    # Vectors first: most modules take a batch of either form.
    if n_ctx is None:
        yield torch.randn((SAMPLES, size), generator=rng, dtype=torch.float64)
    shape = (SAMPLES, n_ctx or POSITIONS, size)
    yield torch.randn(shape, generator=rng, dtype=torch.float64)


def _guessed_inputs(module: Any, n_ctx: int | None, width: int | None) -> Iterable[Any]:
    torch = require_torch()
    rng = torch.Generator().manual_seed(0)
    shape = (SAMPLES, n_ctx or POSITIONS)
    readers = [leaf for _, leaf in leaves_of(module, ()) if kind(leaf) in ("Embedding", "Linear")]
    if width is not None:
        yield from inputs_of_width(width, n_ctx)
    # The leaf that was made first mostly reads the input; an embedding made later may do so too.
    later = [leaf for leaf in readers[1:] if kind(leaf) == "Embedding"]
    for leaf in (*readers[:1], *later):
        if kind(leaf) == "Embedding":
            yield torch.randint(leaf.num_embeddings, shape, generator=rng)
        else:
            yield from inputs_of_width(leaf.in_features, n_ctx)


def forward_error(module: Any, layers: Sequence[Normed], example: Any) -> float:
    """The largest relative error of layers over several batches.

    Args:
        module: The module in float64.
        layers: Layers that were recognised.
        example: Inputs that the module takes.

    Returns:
        Root mean square of the differences of outputs, relative to the outputs.

    Raises:
        ModelError: Where the error is larger than rounding.
    """
    from tnsim.checkpoints.batches import beside  # which needs SciPy

    torch = require_torch()
    count = max(len(example), 2)
    # A function that agrees at one size may differ at another, as ReLU does with the identity, and
    # one that agrees in one batch may differ in others.
    batches = zip(SCALES, (count, count, 1, 3), strict=True)
    both = beside(lambda x: as_numpy(module(torch.as_tensor(x))), layers, example, batches)
    errors = [one.error for one in both]
    worst = float(np.max(errors))
    # Written with `not`, so that NaN is refused.
    if not worst < TOLERANCE:
        factors = [_common_factor(one) for one in both]
        first = factors[0]
        if first and all(factor and abs(factor / first - 1) < TOLERANCE for factor in factors):
            raise ModelError(
                "what was recognised differs from the module by a constant factor: the module "
                f"gives {first:.12g} times the outputs of the layers. Multiply the last layer that "
                "was declared by it"
            )
        sizes = ", ".join(str(one.scale) for one in both)
        each = ", ".join(f"{error:.2g}" for error in errors)
        raise ModelError(
            "what was recognised is another function than the module: outputs on random inputs of "
            f"size {sizes} differ by {each} of their size. Declare the "
            "classes that do more than was seen: layers={Class: BilinearRule(...) or a function}; "
            "and take no numbers out of parameters in the forward pass, by .item() or NumPy"
        )
    return worst


def _common_factor(both: Beside) -> float | None:
    """The number by which all outputs are multiplied in the expected ones; None where none is."""
    outputs, expected = both.outputs.ravel(), both.expected.ravel()
    if outputs.size != expected.size or not outputs.any():
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        factor = float(outputs @ expected / (outputs @ outputs))
    return factor if both._replace(outputs=factor * outputs).error < TOLERANCE else None
