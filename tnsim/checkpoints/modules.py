"""PyTorch modules into models that compute the same function.

Recognition is a hypothesis: rules are found on a copy with random weights, whose zeros and ones
mean nothing, and a model is returned only if its outputs equal those of the module with the
module's own weights.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tnsim.checkpoints.adapters import merged_module
from tnsim.checkpoints.dialects import Dialect
from tnsim.checkpoints.formats import Stored
from tnsim.checkpoints.guard import refusing
from tnsim.checkpoints.layer_rules import normed
from tnsim.checkpoints.module_calls import (
    AN_EXAMPLE,
    LEAVES,
    POSITIONS,
    SAMPLES,
    array,
    calls,
    example_inputs,
    forward_error,
    in_float64,
    join,
    kind,
    leaves_of,
    require_torch,
)
from tnsim.checkpoints.module_rules import (
    NORM_MODULES,
    Declared,
    ModulePart,
    Reader,
    parts_of,
    same,
)
from tnsim.checkpoints.named_arrays import NamedArrays, to_numpy, valued
from tnsim.checkpoints.norms import Normed
from tnsim.checkpoints.state_dict import assembled, inside, place_of, told
from tnsim.errors import (
    ON_INPUTS,
    OWN_ACTIVATION,
    CheckpointError,
    ModelError,
    TooLarge,
    UnsupportedLayer,
)
from tnsim.models.arrays import numbers
from tnsim.models.checks import check_length
from tnsim.models.functions import array_of, is_random_in_training
from tnsim.models.layers import Residual, with_widths
from tnsim.models.model import Model
from tnsim.models.origin import Origin

log = logging.getLogger(__name__)

SILENT = ("Identity", "Dropout", "Flatten")  # at evaluation they change no number
ENTRYWISE = (  # activations; their values tell which one stands between two layers
    "ELU",
    "GELU",
    "GLU",
    "Hardswish",
    "Hardtanh",
    "LeakyReLU",
    "Mish",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "Tanh",
    "Tanhshrink",
)
SOFTMAX = "MultiheadAttention"  # refused as a whole, not leaf by leaf
WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module"}


def from_module(
    module: Any,
    layers: Mapping[type, Declared] | None = None,
    n_ctx: int | None = None,
    *,
    inputs: Any = None,
    norm_inputs: Any = None,
    output: str | int | None = None,
) -> Model:
    """A model that computes the function of a PyTorch module.

    Linear layers, products of two, activations, gates, residual connections, embeddings and
    attention without softmax are recognised by their outputs, however the forward pass is written.
    The model is compared with the module in float64, on several batches of random inputs of
    different sizes. Activations are told apart by their values: `gelu` is never taken for
    `gelu_tanh`.

    Args:
        module: An `nn.Module` in evaluation mode, a `PeftModel` with its adapters. It is not
            changed.
        layers: Declarations of your own classes that are not recognised: a `Rule` with names as in
            the class, or a function from an instance to a single layer of tnsim or several.
        n_ctx: Length of the sequences on which a model with attention is compared.
        inputs: An example of the module's argument; by default random vectors, or token numbers
            where the module begins with an embedding.
        norm_inputs: Inputs at whose mean energy norms become constants, as in `load`; needed where
            the module has LayerNorm or RMSNorm.
        output: Name of the output that the model computes, such as "last_hidden_state", or its
            place in a tuple. None for `logits`, else `last_hidden_state`, else the single or the
            first output.

    Returns:
        The model. `model.origin.error` is the relative error of its forward pass, and
        `model.origin.dialect` reads the module's state dicts: `tnsim.load("runs/*.pt", dialect)`.

    Raises:
        UnsupportedLayer: Where a submodule, which the message names with the choices, is not
            recognised.
        ModelError: When the recognised layers compute another function than the module.
        TooLarge: A layer would be a matrix of which more than 1 GiB is stored.
        MissingExtra: When PyTorch is not installed.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = from_module(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
        >>> model, model.origin.error < 1e-12
        (Model(Linear(3 -> 4, bias), Linear(4 -> 2, bias); degree 1, 26 parameters), True)
    """
    reading = recognised(merged_module(module), layers, n_ctx, inputs, output)
    return assembled(reading.layers, norm_inputs, n_ctx, _origin(reading))


@dataclass(frozen=True, eq=False)
class StatesOf:
    """The state dicts of a module, in the place of a dialect.

    Args:
        module: An `nn.Module`, as for `from_module`.
        inputs: Example of the argument of the module, as for `from_module`.
        output: Name or place of the output that counts, as for `from_module`.
    """

    module: Any
    inputs: Any = None
    output: str | int | None = None

    @property
    def name(self) -> str:
        """Name of the class of the module."""
        return type(self.module).__name__

    def model(self, state: Mapping[str, Any], n_ctx: int | None) -> Model:
        """The model of the module with other weights.

        Args:
            state: Arrays by name, also within what training code puts around them.
            n_ctx: Length of the sequences on which a model with attention is compared.

        Returns:
            The model, compared with the forward pass of the module with these weights.

        Raises:
            CheckpointError: The names or shapes differ from those of the module.
            UnsupportedLayer, ModelError: Raised as by `from_module`.
        """
        module = self.loaded(state)
        reading = recognised(module, None, n_ctx, self.inputs, self.output)
        return assembled(reading.layers, None, n_ctx, _origin(reading))

    def loaded(self, state: Mapping[str, Any]) -> Any:
        """A copy of the module with other weights.

        Args:
            state: Arrays by name, also within what training code puts around them.

        Returns:
            The module, in the mode of the module given.

        Raises:
            CheckpointError: The names or shapes differ from those of the module.
        """
        torch = require_torch()
        module = copy.deepcopy(self.module)
        own = module.state_dict(keep_vars=True)
        # Files such as safetensors hold a tensor of several names under one of them, the first.
        first: dict[int, str] = {}
        tied = {name: first.setdefault(id(one), name) for name, one in own.items()}
        # Training code wraps state dicts in mappings of its own.
        named = dict(inside(state, place_of(state, list(first.values()))))
        for name, other in tied.items():
            if name not in named and other in named:
                named[name] = named[other]
        missing, surplus = sorted(set(own) - set(named)), sorted(set(named) - set(own))
        # A state of another architecture would otherwise end in an error of PyTorch.
        if missing or surplus:
            listed = [f"lacks {', '.join(missing[:4])}"] if missing else []
            listed += [f"has besides {', '.join(map(str, surplus[:4]))}"] if surplus else []
            raise CheckpointError(f"is no state dict of {self.name}: it {' and '.join(listed)}")
        arrays = {name: torch.as_tensor(to_numpy(named[name], name)) for name in own}
        for name, tensor in arrays.items():
            if tensor.shape != own[name].shape:
                raise CheckpointError(
                    f"tensor {name!r} has shape {tuple(tensor.shape)}, in {self.name} "
                    f"{tuple(own[name].shape)}"
                )
        module.load_state_dict(arrays)
        return module


@dataclass(frozen=True)
class DialectOf:
    """The dialect of a module, for state dicts of the module's own shapes.

    Args:
        dialect: Dialect that was read off the module.
        shapes: Shapes of the tensors that its layers read, by name.
    """

    dialect: Dialect
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def name(self) -> str:
        """Name of the dialect."""
        return self.dialect.name

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` where a tensor has another shape than in the module.

        Args:
            state: Arrays by name, also within what training code puts around them.
        """
        named = inside(state, place_of(state, list(self.shapes)))
        for name, shape in self.shapes.items():
            value = named.get(name)
            value = value.tensor if isinstance(value, Stored) else value
            found = tuple(getattr(value, "shape", shape))
            if found != shape:
                raise CheckpointError(
                    f"tensor {name!r} has shape {found}, in the module {self.name} {shape}: give a "
                    "module of these widths, or the dialect alone, which reads all widths: "
                    "tnsim.load(path, tnsim.from_module(net).origin.dialect)"
                )


def reader_of_states(
    module: Any, inputs: Any = None, output: str | int | None = None
) -> DialectOf | StatesOf:
    """The reader of a module's state dicts: a dialect where its layers have rules.

    Args:
        module: An `nn.Module`, as for `from_module`.
        inputs: Example of the argument of the module, as for `from_module`.
        output: Name or place of the output that counts, as for `from_module`.

    Returns:
        The dialect with the shapes of the module, else `StatesOf`, which reads the layers of every
        file anew.

    Raises:
        UnsupportedLayer, ModelError, MissingExtra: Raised as by `from_module`.

    Example:
        >>> from torch import nn
        >>> reader_of_states(nn.Sequential(nn.Linear(3, 2))).shapes
        {'0.weight': (2, 3), '0.bias': (2,)}
    """
    # A dialect reads files without running the module again.
    reading = recognised(module, None, None, inputs, output)
    dialect, arrays = _origin(reading).dialect, reading.arrays
    if dialect is None:
        return StatesOf(module, inputs, output)
    used = [name for name in arrays.state if name in arrays.used]
    return DialectOf(dialect, {name: tuple(arrays.state[name].shape) for name in used})


class Recognised(NamedTuple):
    """A module with the layers that were recognised in it.

    Attributes:
        module: The module without wrappers that compile or distribute it.
        parts: Rules and functions for the layers; None for layers read off traced operations.
        layers: Layers of the parts, with the module's own weights.
        arrays: Tensors of the module, including tensors that no layer uses.
        example: Inputs that the module takes.
        error: Relative error of the forward pass of the layers.
    """

    module: Any
    parts: list[ModulePart] | None
    layers: list[Normed]
    arrays: NamedArrays
    example: Any
    error: float


def recognised(
    module: Any,
    layers: Mapping[type, Declared] | None,
    n_ctx: int | None,
    inputs: Any,
    output: str | int | None = None,
) -> Recognised:
    """The layers of a module, compared with the module's own forward pass.

    Args:
        module: A module of PyTorch, as for `from_module`.
        layers: Declarations of classes of the user, as for `from_module`.
        n_ctx: Length of sequences.
        inputs: An example of the module's argument.
        output: Name of the output that counts, or its place in a tuple.

    Returns:
        The layers of the module, with the parts from which they were made.

    Raises:
        UnsupportedLayer, ModelError, MissingExtra: Raised as by `from_module`.
    """
    torch = require_torch()
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            f"expected a torch.nn.Module, found {type(module).__name__}: a state dict is read by "
            "tnsim.from_state_dict(state, dialect), a file by tnsim.load(path, dialect)"
        )
    check_length(n_ctx)
    module = _unwrapped_module(module)
    # The caller's mapping stays as it is.
    declared = dict(layers or {})
    _check_repeatable(module)
    with refusing("the module cannot be copied in float64"):
        double = copy.deepcopy(module).double().eval().requires_grad_(False)
    _settle_epsilons(module, double)
    # Two copies: one gets random weights, the other keeps those of the module.
    own = copy.deepcopy(double)
    if output is not None:
        for copied in (double, own):
            copied.register_forward_hook(lambda _, inputs, outputs: array_of(outputs, output))
    with torch.no_grad(), in_float64(torch):
        try:
            example = example_inputs(double, inputs, n_ctx)
        except ModelError:
            if output is None:
                _check_describable(module, tuple(declared))  # which says more, where it fails
            raise
        try:
            reading = _watched_layers(module, double, own, declared, example)
        except (UnsupportedLayer, ModelError) as refused:
            vectors = inputs is None and n_ctx is None and example.ndim == 2
            reading, reason = None, ""
            # Operations have no place for declarations, and a sequence would be read as one vector.
            read = not declared and example.is_floating_point()
            read = read and not any(map(_is_recurrent, module.modules()))
            if read and (vectors or inputs is not None):
                try:
                    reading = _traced_module(module, own, example, output)
                except (UnsupportedLayer, ModelError, TooLarge) as why:
                    log.debug("%s: %s", type(module).__name__, why)
                    if isinstance(why, TooLarge) and inputs is not None:
                        raise  # with inputs that the user gave, the layers themselves are known
                    # Calls of layers say more than operations, where there are any.
                    known = any(kind(leaf) in LEAVES for _, leaf in leaves_of(module, ()))
                    says = OWN_ACTIVATION in str(why) and OWN_ACTIVATION not in str(refused)
                    known = known and inputs is None and not says
                    telling = " computes " in str(why) and not known
                    reason = str(why) if telling else ""
            if reading is not None and n_ctx is not None:
                raise ModelError(_of_whole_sequences(example)) from refused
            if reading is None and vectors and _mixes_inputs(own, example):
                # The batch was taken for a sequence, as attention takes it.
                example = _sequences(example.shape[-1])
                try:
                    reading = _watched_layers(module, double, own, declared, example)
                except (UnsupportedLayer, ModelError) as on_sequences:
                    refused = on_sequences
                except Exception as why:  # of a forward pass that takes no sequences
                    log.debug("%s: %s", type(module).__name__, why)
            if reading is None and reason:
                raise UnsupportedLayer(f"{reason}. {ON_INPUTS}") from refused
            if reading is None and read and inputs is None and example.ndim == 3:
                _check_sequences(module, own, example, output, refused)
            # What watching said is closest to the code of the user.
            if reading is None:
                raise refused
    log.info("%s: relative error of the forward pass %.2g", type(module).__name__, reading.error)
    return reading


def _watched_layers(
    module: Any, double: Any, own: Any, declared: dict[type, Declared], example: Any
) -> Recognised:
    """The layers of a module, found by watching the calls of its submodules.

    Args:
        module: The module.
        double: A copy in float64, which gets random weights.
        own: A copy in float64 with the module's own weights.
        declared: Declarations of classes of the user.
        example: Inputs that the module takes.
    """
    _check_describable(module, tuple(declared))
    parts = _module_parts(double, declared, _drawn(example))
    tensors = {name: tensor.detach() for name, tensor in tensors_of(module).items()}
    arrays = NamedArrays(tensors, None)
    layers = []
    for part in parts:
        for read_layer in layers_of(part, module, arrays):
            # A function of the user makes layers of the parameters themselves, not of numbers.
            layers.append(read_layer._replace(layer=numbers(read_layer.layer)))
    # Activations take their width from their neighbours.
    widths = with_widths(read_layer.layer for read_layer in layers)
    layers = [
        read_layer._replace(layer=layer) for read_layer, layer in zip(layers, widths, strict=True)
    ]
    _check_widths(layers)
    return Recognised(module, parts, layers, arrays, example, forward_error(own, layers, example))


def _check_widths(layers: Sequence[Normed]) -> None:
    """Raise `UnsupportedLayer` where a layer reads more than a position of the layer before it."""
    for (n, before), after in zip(enumerate(layers), layers[1:], strict=False):
        given, read = before.layer.d_out, after.layer.d_in
        if given != read:
            raise UnsupportedLayer(
                f"layer {n} gives {given} coordinates at every position, and layer {n + 1} reads "
                f"{read}: the module puts positions side by side, as Flatten does with the "
                "embeddings of several tokens, and layers act on every position alone. Compare it "
                "by its outputs, tnsim.Empirical(tokens), or write it on one-hot vectors of all "
                "positions, with a Linear in the place of the embedding"
            )


KEPT = 1e-11  # relative; operations that are kept give the outputs of the module to rounding


def _traced_module(module: Any, own: Any, example: Any, output: str | int | None) -> Recognised:
    """The layers of a module that watching cannot tell, read off the operations.

    Args:
        module: The module.
        own: A copy in float64.
        example: Inputs that the module takes.
        output: Name of the output that counts, or its place in a tuple.

    Returns:
        The layers.

    Raises:
        UnsupportedLayer, ModelError: Operations tell no more.
    """
    # Tracing loads the compiler of PyTorch, which takes seconds.
    from tnsim.checkpoints.traced_modules import exports_of, traced_layers

    exports = exports_of(module, output)

    def read() -> Recognised:
        layers = [Normed(numbers(layer)) for layer in traced_layers(own, example, exports)]
        error = forward_error(own, layers, example)
        return Recognised(module, None, layers, NamedArrays({}, None), example, error)

    if exports:
        try:
            reading = read()
        except Exception as reason:  # also of operations that no longer fit the tensors
            log.debug("%s is exported anew: %s", type(module).__name__, reason)
        else:
            if reading.error <= KEPT:
                return reading
        # The code computes something else now, for a reason that its structure does not show.
        exports.clear()
    return read()


def _mixes_inputs(own: Any, example: Any) -> bool:
    """Whether the last of several outputs depends on the other inputs, too."""
    try:
        return not same(array(own(example[-1:])), array(own(example))[-1:])
    except Exception as reason:  # also of a forward pass that takes no single input
        log.debug("%s", reason)
        return False


def _sequences(width: int) -> Any:
    """Normal vectors (inputs, positions, width)."""
    torch = require_torch()
    rng = torch.Generator().manual_seed(0)
    return torch.randn((SAMPLES, POSITIONS, width), generator=rng)


def _check_sequences(
    module: Any, own: Any, example: Any, output: str | int | None, refused: Exception
) -> None:
    """Raise `UnsupportedLayer` where a refused module is a polynomial of all positions together."""
    try:
        _traced_module(module, own, example, output)
    except Exception as reason:  # whatever else the module computes, the refusal says it
        log.debug("%s: %s", type(module).__name__, reason)
        return
    raise UnsupportedLayer(
        f"{refused}. Of a whole sequence it is a polynomial: {_of_whole_sequences(example)}"
    ) from refused


def _of_whole_sequences(example: Any) -> str:
    return (
        f"the module mixes positions as no layer does, so its {example.shape[1]} positions are "
        f"read as a single vector of {example[0].numel()} numbers: give inputs=, an example (1, "
        "positions, d) of the length that counts, and leave n_ctx out"
    )


def _drawn(example: Any) -> Any:
    """Random numbers in the shape of an example, as an example of zeros fits any layer.

    Every second vector is eight times as large, so that the kinks of activations such as ReLU6 are
    passed. Token numbers stay as they are.
    """
    if not example.is_floating_point():
        return example
    torch = require_torch()
    rng = torch.Generator().manual_seed(3)
    numbers = torch.randn(example.shape, generator=rng, dtype=torch.float64)
    sizes = 1.0 + 7.0 * (torch.arange(len(example)) % 2)
    return numbers * sizes.reshape(-1, *(1,) * (example.ndim - 1))


def _unwrapped_module(module: Any) -> Any:
    """The module inside wrappers that compile or distribute it, which change no number."""
    while True:
        inner = getattr(module, "_orig_mod", None)  # attribute of torch.compile
        if type(module).__name__ in WRAPPERS:
            inner = getattr(module, WRAPPERS[type(module).__name__])
        if inner is None:
            return module
        module = inner


def _settle_epsilons(module: Any, double: Any) -> None:
    """Give norms of the copy in float64 the epsilon that they have in the module itself.

    An RMSNorm with `eps=None` adds the machine epsilon of the dtype of its input, which is the
    dtype of the parameters in the module, and float64 in the copy.
    """
    torch = require_torch()
    norms = [
        (path, child)
        for path, child in double.named_modules()
        if kind(child) in NORM_MODULES and child.eps is None
    ]
    # With parameters of several dtypes, the dtype of the input is anyone's guess.
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if norms and len(dtypes) > 1:
        shown = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise UnsupportedLayer(
            f"{norms[0][0]} has eps=None, which is the machine epsilon of the dtype of its input, "
            f"and the module has parameters in {shown}: give the norm an eps"
        )
    dtype = next(iter(dtypes), torch.get_default_dtype())
    for _, norm in norms:
        norm.eps = _default_epsilon(dtype)


def _default_epsilon(dtype: Any) -> float:
    """The epsilon of PyTorch's RMSNorm with `eps=None` for inputs of a dtype.

    Versions of PyTorch differ: the epsilon is the machine epsilon of a narrow dtype, or of float32,
    in which narrow inputs are computed. It is measured by the norm of a small number x, which is
    y = x / sqrt(x^2 + epsilon), so epsilon = (x / y)^2 - x^2.
    """
    torch = require_torch()
    x = torch.full((1,), 1e-4, dtype=dtype)
    y = torch.nn.functional.rms_norm(x, (1,), eps=None).double()
    measured = float((x.double() / y) ** 2 - x.double() ** 2)
    # Measured numbers are rounded, so the nearer machine epsilon is taken.
    machine = [float(torch.finfo(precision).eps) for precision in (dtype, torch.float32)]
    return min(machine, key=lambda epsilon: abs(measured - epsilon))


def _check_repeatable(module: Any) -> None:
    """Raise `UnsupportedLayer` where a module does something that a copy of it would not do."""
    torch = require_torch()
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedLayer(
            "a TorchScript program says nothing of its layers: load its state_dict() into the "
            "module that it was made of, or compare its outputs, tnsim.Empirical(inputs)"
        )
    if any(parameter.is_meta for parameter in module.parameters()):
        raise UnsupportedLayer(
            "weights are on the device 'meta', where tensors have no numbers: load the weights "
            "first, module.load_state_dict(state, assign=True)"
        )
    for path, child in module.named_modules():
        name = path or "the module"
        _check_unquantised(name, child)
        # A hook may change outputs, and copies would lose it or run it twice.
        if child._forward_hooks or child._forward_pre_hooks:
            raise UnsupportedLayer(
                f"{name}: a forward hook, which may change what is computed: remove it"
            )
        # Dropout draws anew at each call, so outputs would never agree.
        if child.training and is_random_in_training(child):
            chance = f"(p={child.p})" if kind(child) == "Dropout" else ""
            raise UnsupportedLayer(
                f"{name}: {type(child).__name__}{chance} in training mode, in which it gives "
                "something else each time: call module.eval() first"
            )


QUANTISERS = ("bitsandbytes", "torchao", "optimum", "gptqmodel", "auto_gptq", "awq", "hqq")
"""Packages whose layers and tensors hold integers with scales."""


def _check_unquantised(name: str, module: Any) -> None:
    """Raise `UnsupportedLayer` where a submodule or a tensor of its own is quantised."""
    own = [*module._parameters.values(), *module._buffers.values()]
    for cls in (type(module), *map(type, own)):
        package = cls.__module__
        if package.partition(".")[0] in QUANTISERS or ".quantized" in package:
            raise UnsupportedLayer(
                f"{name}: {cls.__name__} of {package}, which is quantised: its weights are "
                "integers with scales. Give the module before quantisation, or load the "
                "dequantised weights into it; as it is it is compared by its outputs, metric "
                "tnsim.Empirical(inputs)"
            )


def _check_describable(module: Any, declared: tuple[type, ...]) -> None:
    """Raise `UnsupportedLayer` naming every submodule of which no layer can be read."""
    unreadable = list(_unreadable_parts(module, declared))
    # The same request once, not for each of many convolutions.
    asked = all(why.endswith(_ASK_FOR_INPUTS) for _, why in unreadable)
    wrong = [
        f"{path or 'the module'}: {why.removesuffix(_ASK_FOR_INPUTS) if asked else why}"
        for path, why in unreadable
    ]
    if not wrong:
        return
    shown = "; ".join(wrong[:6])
    if len(wrong) > 6:
        shown += f"; and {len(wrong) - 6} more"
    said = f"no layers of tnsim describe this module: {shown}"
    if asked:
        raise UnsupportedLayer(f"{said}{_ASK_FOR_INPUTS}")
    raise UnsupportedLayer(
        f"{said}. A class of your own that they describe can be declared: "
        f"layers={{Class: BilinearRule(...) or a function}}. {ON_INPUTS}"
    )


def _unreadable_parts(module: Any, declared: tuple[type, ...]) -> Iterable[tuple[str, str]]:
    softmax = [path for path, child in module.named_modules() if kind(child) == SOFTMAX]
    # PyTorch's attention is named as a whole, since its linear layers alone look readable.
    for path in softmax:
        yield path, f"{SOFTMAX}, which is softmax attention"
    for path, leaf in leaves_of(module, declared):
        name = kind(leaf)
        if isinstance(leaf, declared) or path.rpartition(".")[0] in softmax:
            continue
        if name and name not in (*LEAVES, *SILENT, *ENTRYWISE):
            yield path, f"{name}{_leaf_reason(leaf)}"


def _leaf_reason(leaf: Any) -> str:
    if _is_recurrent(leaf):
        return ", which is recurrent"
    if kind(leaf) in ("Softmax", "LogSoftmax"):
        return (
            ", which has no exact similarity; logits have: leave it out where it stands last, as "
            "net[:-1] of a Sequential"
        )
    # Classes of the user may derive from those of PyTorch.
    for cls in type(leaf).__mro__:
        if cls.__module__ == "torch.nn.modules.activation":
            return ", which has no exact similarity"
        if cls.__module__ in _OF_IMAGES:
            return _ASK_FOR_INPUTS
    return ", which is no layer of tnsim"


def _is_recurrent(module: Any) -> bool:
    return type(module).__module__ == "torch.nn.modules.rnn"


_ASK_FOR_INPUTS = f", of which the input's size is to be known: give inputs=, {AN_EXAMPLE}"
_OF_IMAGES = tuple(f"torch.nn.modules.{name}" for name in ("batchnorm", "conv", "pooling"))
"""Modules of layers that are read off operations on an example of the input."""


def tensors_of(module: Any) -> dict[str, Any]:
    """Parameters and buffers by name, parametrised tensors by their values.

    Args:
        module: A module of PyTorch.

    Returns:
        The tensors themselves, not detached.
    """
    tensors: dict[str, Any] = {}
    for path, child in module.named_modules():
        # The tensors inside a parametrisation are no weights; the value that they give is.
        if "parametrizations" in path.split("."):
            continue
        names = [*child._parameters, *child._buffers, *getattr(child, "parametrizations", ())]
        for name in names:
            tensor = getattr(child, name)
            if tensor is not None:
                tensors[join(path, name)] = tensor
    return tensors


def _module_parts(module: Any, declared: Mapping[type, Declared], example: Any) -> list[ModulePart]:
    """The layers of the module, found on random weights."""
    torch = require_torch()
    rng = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        # Divided by the root of the width, states stay near 1 at any depth.
        width = parameter.shape[-1] if parameter.ndim > 1 else 1
        parameter.normal_(generator=rng).div_(width**0.5)
    recorded, end = calls(module, example, tuple(declared))
    if not recorded:
        raise UnsupportedLayer(
            f"{type(module).__name__} has no layers of PyTorch inside; declare it: "
            "layers={Class: BilinearRule(...) or a function}"
        )
    state = tensors_of(module)
    # Parameters of one entry may be scales of residuals.
    numbers = {name: float(tensor) for name, tensor in state.items() if tensor.numel() == 1}
    reader = Reader(module, declared, state, numbers)
    return parts_of(reader, recorded, array(example), end)


def layers_of(part: ModulePart, module: Any, arrays: NamedArrays) -> list[Normed]:
    """The layers of a single part, with the module's own weights.

    Args:
        part: A part of the module that was recognised.
        module: The module with its own weights.
        arrays: Tensors of the module, in which the keys of rules are looked up.

    Returns:
        The layers in order.

    Raises:
        UnsupportedLayer, ModelError: Where a function of the user returns no layers that fit.
    """
    if part.rule is not None:
        return [normed(valued(part.rule, arrays), arrays)]
    assert part.make is not None  # a part without a rule has a function
    submodule = module.get_submodule(part.path)
    # The function of the user accounts for all tensors of its submodule.
    arrays.used.update(join(part.path, name) for name in tensors_of(submodule))
    made = part.make(submodule)
    layers = list(made) if isinstance(made, (list, tuple)) else [made]
    if part.around is not None:
        if len(layers) != 1:
            raise UnsupportedLayer(
                f"{part.path}: a residual connection goes around {len(layers)} layers; "
                "tnsim has it around one"
            )
        layers = [Residual(layers[0], *part.around)]
    return [Normed(layer) for layer in layers]


def _origin(reading: Recognised) -> Origin:
    """The origin of the model: rules as assumptions, the error, and a dialect for state dicts."""
    name, parts, arrays, error = (
        type(reading.module).__name__,
        reading.parts,
        reading.arrays,
        reading.error,
    )
    assumptions = [
        f"{name} of PyTorch, compared with its own forward pass: relative error {error:.2g}"
    ]
    if parts is None:
        read = f"{name} of PyTorch, read off the operations of its forward pass, with which it"
        return Origin(name, (f"{read} was compared: relative error {error:.2g}",), error=error)
    # A dialect needs a rule for every layer; functions of the user cannot be written down.
    rules = [part.rule for part in parts if part.rule is not None]
    unused = tuple(arrays.unused())
    dialect = None
    if len(rules) == len(parts):
        dialect = Dialect(name, tuple(rules), unused=unused, description="read off the module")
        runs = [(told(valued(rule, arrays), arrays),) for rule in rules]
        assumptions += dialect.assumptions(runs)[1:]
    return Origin(name, tuple(assumptions), ignored=unused, error=error, dialect=dialect)
