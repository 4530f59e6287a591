"""PyTorch modules into models. In: an `nn.Module`. Out: a model that computes the same.

Recognition is a hypothesis: rules are found on a copy with random weights, whose zeros and ones
mean nothing, and a model is returned only if it gives what the module gives with its own weights.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tnsim.checkpoints.dialects import Dialect
from tnsim.checkpoints.guard import refusing
from tnsim.checkpoints.layer_rules import normed
from tnsim.checkpoints.module_calls import LEAVES, array, calls, join, kind, leaves_of
from tnsim.checkpoints.module_rules import Declared, Part, Reader, parts_of
from tnsim.checkpoints.named_arrays import NamedArrays
from tnsim.checkpoints.named_numbers import valued
from tnsim.checkpoints.norms import Normed
from tnsim.checkpoints.state_dict import assembled, told
from tnsim.errors import MissingExtra, ModelError, UnsupportedLayer
from tnsim.models.layers import Residual
from tnsim.models.model import Model
from tnsim.models.origin import Origin

log = logging.getLogger(__name__)

SCALES = (1.0, 0.25, 4.0)  # of inputs: polynomials that agree at one need not at another
TOLERANCE = 1e-5  # relative; in float64 all that may differ are tables of a rotation in float32
SAMPLES, POSITIONS = 8, 5
SILENT = ("Identity", "Dropout", "Flatten")  # at evaluation they change no number
WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module"}


def from_module(
    module: Any,
    layers: Mapping[type, Declared] | None = None,
    n_ctx: int | None = None,
    *,
    inputs: Any = None,
    norms: Any = None,
) -> Model:
    """A model that computes what a PyTorch module computes.

    Linear layers, products of two, residual connections, embeddings and bilinear attention are
    recognised by what they compute, however the forward pass is written. The result was compared
    with the module in float64, on several batches of random inputs of different sizes.

    Args:
        module: an `nn.Module` in evaluation mode. It is not changed.
        layers: what classes of your own are, where they are not recognised: a `Rule` with names as
            in the class, or a function from an instance to a layer of tnsim, or several.
        n_ctx: length of the sequences on which a model with attention is compared.
        inputs: an example of what the module is called with; by default random vectors, or token
            numbers where it begins with an embedding.
        norms: as in `load`; needed where the module has LayerNorm or RMSNorm.

    Returns:
        The model. `model.origin.error` is the relative error of its forward pass, and
        `model.origin.dialect` reads the module's state dicts: `tnsim.load("runs/*.pt", dialect)`.

    Raises:
        UnsupportedLayer: where something is no polynomial or is not recognised, naming submodule
            and choices.
        ModelError: when what was recognised computes something else.
        MissingExtra: when PyTorch is not installed.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = from_module(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
        >>> model, model.origin.error < 1e-12
        (Model(Linear(3 -> 4, bias), Linear(4 -> 2, bias); degree 1, 26 parameters), True)
    """
    torch = _torch()
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"expected a torch.nn.Module, found {type(module).__name__}")
    module = _unwrapped(module)
    declared = dict(layers or {})
    _check_describable(module, tuple(declared))
    with refusing("the module cannot be copied in float64"):
        double = copy.deepcopy(module).double().eval().requires_grad_(False)
    own = copy.deepcopy(double)
    with torch.no_grad(), _in_float64(torch):
        example = _example(double, inputs, n_ctx)
        parts = _parts(double, declared, example)
        arrays = NamedArrays(_tensors(module), None)
        found = [one for part in parts for one in _layers(part, module, arrays)]
        error = _compared(own, found, example)
    log.info("%s: relative error of the forward pass %.2g", type(module).__name__, error)
    origin = _origin(module, parts, arrays, error)
    return assembled(found, norms, n_ctx, origin)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", "torch", "reading a module") from None
    return torch


@contextlib.contextmanager
def _in_float64(torch: Any) -> Iterator[None]:
    """What a forward pass makes itself, such as a mask, is float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _unwrapped(module: Any) -> Any:
    """The module inside what compiles or distributes it, which changes no number."""
    while True:
        inner = getattr(module, "_orig_mod", None)  # of torch.compile
        if type(module).__name__ in WRAPPERS:
            inner = getattr(module, WRAPPERS[type(module).__name__])
        if inner is None:
            return module
        module = inner


def _check_describable(module: Any, declared: tuple[type, ...]) -> None:
    """Raise `UnsupportedLayer` naming every submodule of which no polynomial can be read."""
    wrong = [f"{path or 'the module'}: {why}" for path, why in _wrong(module, declared)]
    if not wrong:
        return
    shown = "; ".join(wrong[:6])
    if len(wrong) > 6:
        shown += f"; and {len(wrong) - 6} more"
    raise UnsupportedLayer(
        f"no polynomial describes this module: {shown}. A class of your own that computes one can "
        "be declared: layers={Class: Rule(...) or a function}; other networks can only be compared "
        "by their outputs (tnsim.baselines)"
    )


def _wrong(module: Any, declared: tuple[type, ...]) -> Iterable[tuple[str, str]]:
    for path, child in module.named_modules():
        if child._forward_hooks or child._forward_pre_hooks:
            yield path, "a forward hook, which may change what is computed: remove it"
    for path, leaf in leaves_of(module, declared):
        name = kind(leaf)
        if isinstance(leaf, declared):
            continue
        if name == "Dropout" and leaf.training and leaf.p > 0:
            yield path, f"Dropout(p={leaf.p}) in training mode: call module.eval() first"
        elif name and name not in (*LEAVES, *SILENT):
            yield path, f"{name}, {_reason(leaf)}"


def _reason(leaf: Any) -> str:
    for cls in type(leaf).__mro__:
        if cls.__module__ == "torch.nn.modules.activation":
            return "which is no polynomial"
        if cls.__module__ == "torch.nn.modules.batchnorm":
            return "a norm: fold it into the layer before it, with its running statistics"
    return "which is no layer of tnsim"


def _tensors(module: Any) -> dict[str, Any]:
    """Parameters and buffers by name; parametrised ones as what they amount to."""
    found: dict[str, Any] = {}
    for path, child in module.named_modules():
        if "parametrizations" in path.split("."):
            continue
        names = [*child._parameters, *child._buffers, *getattr(child, "parametrizations", ())]
        for name in names:
            tensor = getattr(child, name)
            if tensor is not None:
                found[join(path, name)] = tensor.detach()
    return found


def _example(module: Any, inputs: Any, n_ctx: int | None) -> Any:
    """Inputs that the module takes: those given, else the first of a few kinds that it runs on."""
    torch = _torch()
    if inputs is not None:
        example = torch.as_tensor(inputs)
        return example.double() if example.is_floating_point() else example
    error: Exception | None = None
    for example in _guesses(module, n_ctx):
        try:
            module(example)
            return example
        except Exception as failed:  # whatever a forward pass raises on inputs that it cannot take
            error = failed
    raise ModelError(
        "no inputs were found that the module takes; give inputs=, an example of them "
        f"(the last try: {error})"
    ) from error


def _guesses(module: Any, n_ctx: int | None) -> Iterable[Any]:
    torch = _torch()
    rng = torch.Generator().manual_seed(0)
    for _, leaf in leaves_of(module, ()):
        shape = (SAMPLES, n_ctx or POSITIONS)
        if kind(leaf) == "Embedding":
            yield torch.randint(leaf.num_embeddings, shape, generator=rng)
        elif kind(leaf) == "Linear":
            if n_ctx is None:
                vectors = (SAMPLES, leaf.in_features)
                yield torch.randn(vectors, generator=rng, dtype=torch.float64)
            yield torch.randn((*shape, leaf.in_features), generator=rng, dtype=torch.float64)
        else:
            continue
        return


def _parts(module: Any, declared: Mapping[type, Declared], example: Any) -> list[Part]:
    """What the module is made of, found on random weights."""
    torch = _torch()
    rng = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        width = parameter.shape[-1] if parameter.ndim > 1 else 1
        parameter.normal_(generator=rng).div_(width**0.5)
    found, end = calls(module, example, tuple(declared))
    if not found:
        raise UnsupportedLayer(
            f"{type(module).__name__} has no layers of PyTorch inside; declare it: "
            "layers={Class: Rule(...) or a function}"
        )
    state = _tensors(module)
    numbers = {name: float(tensor) for name, tensor in state.items() if tensor.numel() == 1}
    reader = Reader(module, declared, state, numbers)
    return parts_of(reader, found, array(example), end)


def _layers(part: Part, module: Any, arrays: NamedArrays) -> list[Normed]:
    """The layers of one part, with the module's own weights."""
    if part.rule is not None:
        return [normed(valued(part.rule, arrays), arrays)]
    assert part.make is not None  # a part without a rule has a function
    submodule = module.get_submodule(part.path)
    arrays.used.update(join(part.path, name) for name in _tensors(submodule))
    made = part.make(submodule)
    layers = list(made) if isinstance(made, (list, tuple)) else [made]
    if part.around is not None:
        if len(layers) != 1:
            raise UnsupportedLayer(
                f"{part.path}: a residual connection goes around {len(layers)} layers; "
                "tnsim has it around one"
            )
        layers = [Residual(layers[0], *part.around)]
    return [Normed(one) for one in layers]


def _compared(module: Any, layers: Sequence[Normed], example: Any) -> float:
    """The largest relative error over several batches. Raises `ModelError` where it is large."""
    torch = _torch()
    rng = torch.Generator().manual_seed(2)
    errors: list[float] = []
    for scale in SCALES:
        if example.is_floating_point():
            inputs = scale * torch.randn(example.shape, generator=rng)
            x = array(inputs).reshape(_shape(example, layers[0].layer.d_in))
            expected = array(module(inputs))
        else:
            inputs = torch.randint(layers[0].layer.d_in, example.shape, generator=rng)
            x = scale * np.eye(layers[0].layer.d_in)[array(inputs)]
            with _scaled_embeddings(module, scale):
                expected = array(module(inputs))
        for one in layers:
            x = one(x)
        errors.append(_error(x, expected))
    if not max(errors) < TOLERANCE:
        each = ", ".join(f"{error:.2g}" for error in errors)
        raise ModelError(
            "what was recognised is another function than the module: outputs on random inputs of "
            f"size {', '.join(map(str, SCALES))} differ by {each} of their size. Declare the "
            "classes that do more than was seen: layers={Class: Rule(...) or a function}"
        )
    return max(errors)


def _shape(example: Any, d_in: int) -> tuple[int, ...]:
    """Of a batch as tnsim reads it: what a module flattens is flat."""
    if example.shape[-1] == d_in:
        return tuple(example.shape)
    return (len(example), d_in)


@contextlib.contextmanager
def _scaled_embeddings(module: Any, scale: float) -> Iterator[None]:
    """Token numbers of another size: the module's first layer gives so many times its vector."""
    leaves = [leaf for _, leaf in leaves_of(module, ()) if kind(leaf) == "Embedding"]
    handle = leaves[0].register_forward_hook(lambda leaf, given, result: scale * result)
    try:
        yield
    finally:
        handle.remove()


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    if found.size != expected.size:
        return float("inf")
    difference = np.linalg.norm(found.ravel() - expected.ravel())
    return float(difference / max(float(np.linalg.norm(expected)), 1e-300))


def _origin(module: Any, parts: Sequence[Part], arrays: NamedArrays, error: float) -> Origin:
    """What was recognised, and how well it fits."""
    name = type(module).__name__
    assumptions = [
        f"{name} of PyTorch, compared with its own forward pass: relative error {error:.2g}"
    ]
    rules = [part.rule for part in parts if part.rule is not None]
    unused = tuple(arrays.unused())
    dialect = None
    if len(rules) == len(parts):
        dialect = Dialect(name, tuple(rules), unused=unused, description="read off the module")
        runs = [(told(valued(rule, arrays), arrays),) for rule in rules]
        assumptions += dialect.assumptions(runs)[1:]
    return Origin(name, tuple(assumptions), ignored=unused, error=error, dialect=dialect)
