"""Plain functions and PyTorch modules in the place of models: their outputs in NumPy."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np

from tnsim.errors import CaveatWarning, ModelError, TnsimError, warn
from tnsim.models.arrays import detached, host_array
from tnsim.models.model import AnyModel
from tnsim.options import shown
from tnsim.sessions import session

Function: TypeAlias = Callable[[Any], Any]
"""A map from a batch of inputs to outputs (points, out) or (points, positions, out)."""
ALONE = 2
"""Inputs that run once more, apart from their batch, to tell whether outputs depend on it."""
MAIN_OUTPUTS = ("logits", "last_hidden_state")
"""Names of the outputs of Hugging Face models that count where a model gives several."""
INPUTS = ("input_ids", "pixel_values", "inputs_embeds", "inputs", "x")
"""Names of the inputs in batches of Hugging Face and of others, of which the first counts."""
_MOVING_IN_TRAINING = ("BatchNorm", "SpectralNorm")
"""Parts of the names of classes that read or move a state of their own in training mode."""


@dataclass(frozen=True, eq=False)
class WithOutput:
    """A function of which a single output of several is compared.

    Args:
        function: Plain function or PyTorch module.
        output: Name of the output, or its place in a tuple.
    """

    function: Function
    output: str | int

    def __call__(self, inputs: Any) -> Any:
        """The outputs on a batch, in NumPy."""
        return outputs_of(self, inputs)


@dataclass(frozen=True, eq=False)
class Deferred:
    """A network on disk as a function, which is loaded where it runs.

    A run may have more networks than memory holds, so only those that ran last stay loaded.

    Args:
        load: Function without arguments that loads the PyTorch module.

    Example:
        >>> import torch
        >>> Deferred(torch.nn.Identity)(np.ones((1, 2))).tolist()
        [[1.0, 1.0]]
    """

    load: Callable[[], Any]

    @property
    def module(self) -> Any:
        """The module, loaded unless it still is."""
        return self._held(self.load)

    def holding(self, module: Any) -> Self:
        """The same function, of a module that is loaded already."""
        self._held(lambda: module)
        return self

    def _held(self, load: Callable[[], Any]) -> Any:
        return session().belongings.get(self, "module", load, _bytes_of)

    def __call__(self, inputs: Any) -> Any:
        """The outputs on a batch, in the form in which the module gives them."""
        return run_module(self.module, inputs)


def loaded(given: Any) -> Any:
    """The module of a network on disk; anything else as it is.

    Example:
        >>> import torch
        >>> loaded(Deferred(torch.nn.Identity)), loaded(3)
        (Identity(), 3)
    """
    return given.module if isinstance(given, Deferred) else given


def _bytes_of(module: Any) -> int:
    """Bytes of the tensors of a module, of sparse ones about those that they store."""
    tensors = (*module.parameters(), *module.buffers())
    of_entry = 24  # a number and two indices
    return sum(
        of_entry * tensor._nnz() if str(tensor.layout).startswith("torch.sparse") else tensor.nbytes
        for tensor in tensors
    )


def with_output(model: Any, output: str | int | None) -> Any:
    """A model or function as given, a function with several outputs reduced to the output named.

    Args:
        model: Model, plain function or PyTorch module.
        output: Name of the output, or its place in a tuple; None for the output that counts.

    Returns:
        The model, which has a single output, or the function.

    Example:
        >>> with_output(lambda x: {"a": x, "b": 2 * x}, "b")(np.ones((1, 2))).tolist()
        [[2.0, 2.0]]
    """
    if output is None or not is_function(model):
        return model
    return WithOutput(model, output)


def is_function(model: Any) -> bool:
    """Whether a value is a plain function: a callable that is no model.

    Example:
        >>> import tnsim
        >>> is_function(abs), is_function(tnsim.Model([tnsim.Linear([[1.0]])]))
        (True, False)
    """
    # A class has a forward pass only once it is called.
    return callable(model) and not isinstance(model, (type, AnyModel))


def is_module(given: Any) -> bool:
    """Whether a value is a PyTorch module; PyTorch itself is not imported.

    Example:
        >>> is_module(abs)
        False
    """
    return is_function(given) and hasattr(given, "named_parameters")


def refused_under(metric: Any) -> ModelError:
    """The error for plain functions under a metric that compares weights.

    Args:
        metric: Any metric but `Empirical`.

    Returns:
        The error, which the caller raises.

    Example:
        >>> import tnsim
        >>> "tnsim.from_module" in str(refused_under(tnsim.Gaussian()))
        True
    """
    return ModelError(
        "functions that are no models are compared on inputs alone: use tnsim.Empirical(inputs), "
        f"found {type(metric).__name__}. An nn.Module that computes a polynomial becomes a model "
        "by tnsim.from_module(module), and is compared from its weights"
    )


def outputs_of(function: Function, inputs: Any, apart: bool = True) -> np.ndarray:
    """The outputs of a plain function on a batch, in NumPy.

    A PyTorch module is called with a tensor of the precision and on the device of its parameters,
    other functions as `array_at` says.

    Args:
        function: Plain function or PyTorch module.
        inputs: Batch of inputs.
        apart: Whether the last inputs run apart once more, to tell whether outputs depend on what
            else is in the batch.

    Raises:
        ModelError: The outputs are no array with a row for every input, a row depends on the other
            inputs of the batch, or a module is in training mode and its outputs are random.
        TnsimError: The outputs are not finite.
    """
    outputs = _host_outputs(function, inputs)
    # Batches are as large as memory allows, so nothing may depend on their size.
    if apart and len(inputs) > ALONE:
        check_rows_alone(function, _host_outputs(function, inputs[-ALONE:]), outputs[-ALONE:])
    return outputs


def _host_outputs(function: Function, inputs: Any) -> np.ndarray:
    """The outputs on a batch in NumPy, wherever the function computed them."""
    outputs = host_array(detached(array_at(function, inputs)))
    # A copy, as the next call of a function or of a module may write into a buffer of its own.
    outputs = in_rows(outputs, len(inputs)).copy()
    if not np.isfinite(outputs).all():
        raise TnsimError(
            "a function gives outputs that are NaN or infinite: give inputs on which it has "
            "numbers, or weights that are smaller, or have not diverged"
        )
    return outputs


def is_narrow(function: Function, outputs: Any) -> bool:
    """Whether a function computes in 16 bits, which keep two or three digits.

    Outputs alone do not tell: those of PyTorch are widened for NumPy, and language models widen
    their logits themselves.

    Example:
        >>> import torch
        >>> is_narrow(torch.nn.Linear(2, 2).half(), np.ones((1, 2), np.float32))
        True
    """
    module = loaded(function.function if isinstance(function, WithOutput) else function)
    kept = module.parameters() if is_module(module) else ()
    floats = [one.dtype.itemsize for one in kept if one.is_floating_point()]
    return min(floats, default=outputs.dtype.itemsize) <= 2


def check_rows_alone(function: Function, alone: np.ndarray, together: np.ndarray) -> None:
    """Refuse a function whose outputs for an input depend on what else is in the batch.

    Args:
        function: The function.
        alone: Outputs for a few inputs.
        together: Outputs for these inputs within a larger batch.

    Raises:
        ModelError: The outputs differ by more than rounding, whose order the size of a batch may
            change.

    Example:
        >>> check_rows_alone(abs, np.ones((2, 3)), np.ones((2, 3)))
    """
    alike = 0.1 if is_narrow(function, alone) else 1e-4
    # Scaled first, so that no difference of large outputs is beyond the range of floats.
    size = max(float(np.abs(x).max(initial=0.0)) for x in (alone, together)) or 1.0
    scaled = (x.astype(np.float64) / size for x in (alone, together))
    difference = float(np.abs(np.subtract(*scaled)).max(initial=0.0))
    if difference > alike:
        raise ModelError(
            "a function gives other outputs for an input where other inputs stand in its batch "
            f"(relative difference {difference:.2g}), so there is no function of an input to "
            "compare: statistics of the batch, a division by its size, random numbers, or "
            "attention and recurrent layers that read positions along the first axis. Mend it, as "
            "module.eval() does for batch norms that track their statistics, and batch_first=True "
            "for layers of PyTorch"
        )


def array_at(function: Function, inputs: Any, gradients: bool = False) -> Any:
    """The array or tensor that counts among the outputs of a plain function, as it was given.

    A plain function is called with an array of NumPy. Where it raises and PyTorch is loaded, it is
    called with a tensor in the default type of PyTorch.

    Args:
        function: Plain function, PyTorch module, or either with the choice of an output.
        inputs: Batch of inputs, in NumPy.
        gradients: Whether tensors are to be a part of the caller's autograd graph.

    Returns:
        The array, in the library of the function.

    Raises:
        ModelError: The outputs do not say which array counts, or depend on random numbers.
        Exception: Whatever a function that is no module raises, with a note that says what it was
            called with.

    Example:
        >>> import torch
        >>> array_at(lambda x: (2 * x, None), np.ones((1, 2))).tolist()
        [[2.0, 2.0]]
        >>> array_at(lambda x: x.relu(), np.ones((1, 2)))
        tensor([[1., 1.]])
    """
    before = states_of_generators()
    outputs = _array_at(function, inputs, gradients)
    if states_of_generators() != before:
        # Some code draws numbers that it leaves unused. A copy, as the second call may write into
        # the array of the first.
        first = host_array(detached(outputs)).copy()
        again = host_array(detached(_array_at(function, inputs, False)))
        if not np.array_equal(first, again, equal_nan=first.dtype.kind in "fc"):
            raise ModelError(
                "a function draws random numbers, and gives something else each time: call "
                "module.eval() first, which takes out dropout and its like, or let it give what "
                "it draws around"
            )
    return outputs


def _array_at(function: Function, inputs: Any, gradients: bool) -> Any:
    output = None
    if isinstance(function, WithOutput):
        function, output = function.function, function.output
    if is_module(function):
        run = run_with_gradients if gradients else run_module
        return array_of(run(function, inputs), output)
    return array_of(_called(function, inputs, gradients), output)


def states_of_generators() -> list[Any]:
    """What the generators that code draws from without naming one will draw next.

    Those of Python and NumPy, and those of PyTorch where it is loaded.

    Example:
        >>> before = states_of_generators()
        >>> states_of_generators() == before, random.random() < 1, states_of_generators() == before
        (True, True, False)
    """
    _, keys, *rest = np.random.get_state()  # noqa: NPY002, the one that other code draws from
    states: list[Any] = [random.getstate(), np.asarray(keys).tobytes(), rest]
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found = [torch.get_rng_state()]
        found += torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        states += [one.tolist() for one in found]  # also inside torch.func, where NumPy has none
    return states


def _called(function: Function, inputs: Any, gradients: bool) -> Any:
    """What a plain function gives for an array, or for a tensor."""
    try:
        return function(inputs.copy())  # which the function may write into
    except TnsimError:
        raise
    except Exception as error:  # what a function of the user's raises is the user's to read
        error.add_note(
            f"The function was called with a batch of inputs, {inputs.dtype} of shape "
            f"{tuple(inputs.shape)}. One that takes a single input, such as a module of Equinox, "
            "is given as jax.tree_util.Partial(lambda net, x: jax.vmap(net)(x), net)."
        )
        torch = sys.modules.get("torch")
        if torch is None:
            raise
        tensor = tensor_of(np.asarray(inputs))
        if tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        try:
            with contextlib.nullcontext() if gradients else torch.no_grad():
                return function(tensor)
        except Exception as other:
            error.add_note(
                f"With a tensor it raised {type(other).__name__}: {other}. Types and devices are "
                "its own to choose, as in lambda x: net(x.double().cuda())."
            )
        raise


def in_rows(outputs: Any, count: int) -> Any:
    """Outputs with a row for every input, feature maps as vectors.

    Args:
        outputs: Array or tensor of outputs.
        count: Number of inputs.

    Returns:
        Outputs (points, out) or (points, positions, out).

    Raises:
        ModelError: There is no row for every input, or the outputs are no real numbers.

    Example:
        >>> in_rows(np.ones((2, 3, 4, 5)), 2).shape
        (2, 60)
    """
    if outputs.ndim < 2 or len(outputs) != count:
        raise ModelError(
            f"a function gives outputs (n, out) or (n, positions, out) for n inputs, found shape "
            f"{tuple(outputs.shape)} for {count} inputs"
        )
    if not any(kind in str(outputs.dtype) for kind in ("float", "int", "bool")):
        raise ModelError(
            f"a function that is compared gives real numbers, found {outputs.dtype}; of complex "
            "numbers both parts may be outputs, side by side"
        )
    # Every pixel of a feature map is an output.
    return outputs.reshape(len(outputs), -1) if outputs.ndim > 3 else outputs


def array_of(outputs: Any, output: str | int | None = None) -> Any:
    """The array in the outputs of a function or module.

    Args:
        outputs: An array; a tuple, of which the first element counts; a mapping or an object with
            fields, as models of Hugging Face give, of which `logits`, else `last_hidden_state`,
            else the single array counts.
        output: Name of the output that counts instead, or its place in a tuple.

    Returns:
        The array itself, or the tensor.

    Raises:
        ModelError: There is no array, there are several with names that do not say which of them
            counts, or the output named is missing.

    Example:
        >>> array_of({"loss": None, "logits": np.zeros(2)}).shape
        (2,)
    """
    fields = _named_outputs(outputs)
    if output is not None:
        return _chosen_output(outputs, fields, output)
    if hasattr(outputs, "shape"):
        return outputs
    if isinstance(outputs, (tuple, list)) and outputs and not fields:
        # Modules that return a tuple put their outputs first, and states or attentions behind.
        return array_of(outputs[0])
    # Fields without a shape are losses as numbers, or None.
    arrays = {name: value for name, value in fields.items() if hasattr(value, "shape")}
    for name in MAIN_OUTPUTS:
        if name in arrays:
            return arrays[name]
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    if arrays:
        raise ModelError(
            f"a function that is compared gives one array, found {', '.join(map(str, arrays))}: "
            f"choose one, as by output={next(iter(arrays))!r}"
        )
    raise ModelError(f"a function that is compared gives an array, found {type(outputs).__name__}")


def _named_outputs(outputs: Any) -> dict[str, Any]:
    """The outputs by name; nothing where outputs have no names."""
    if hasattr(outputs, "shape"):
        return {}
    if hasattr(outputs, "keys"):
        return dict(outputs)
    if hasattr(outputs, "_asdict"):
        return outputs._asdict()
    return vars(outputs) if hasattr(outputs, "__dataclass_fields__") else {}


def _chosen_output(outputs: Any, fields: dict[str, Any], output: str | int) -> Any:
    """The output of a name or a place, as an array."""
    several: dict[Any, Any] = dict(fields)
    if isinstance(output, int) and isinstance(outputs, (tuple, list)):
        several = dict(enumerate(outputs))
    elif not fields and isinstance(outputs, (tuple, list)):
        raise ModelError(
            f"output={output!r}: the function gives a tuple of {len(outputs)} without names; "
            "name its place, as output=0"
        )
    if output not in several:
        there = ", ".join(map(str, several)) or f"a single {type(outputs).__name__} without a name"
        raise ModelError(f"there is no output {output!r}; the function gives {there}")
    if not hasattr(several[output], "shape"):
        raise ModelError(
            f"output {output!r} is no array, found {type(several[output]).__name__}; "
            "any callable may choose an array inside"
        )
    return several[output]


def input_rows(inputs: Any) -> Any:
    """The inputs inside of what a caller has: an array, a loader, a data set or a mapping.

    Everything that reads arrays of inputs calls it first.

    Args:
        inputs: An array, which is returned as it is; a loader of batches or a data set, which is
            put together, and of tuples such as inputs with labels the first entry is the input; a
            mapping with an entry of a name in `INPUTS`, or with a single entry, as tokenizers give;
            a list of such mappings, one for each input.

    Returns:
        An array, a tensor or a list of rows.

    Raises:
        ModelError: Inputs stand beside labels in a tuple or a list, which might be two positions,
            or beside a mask with zeros, types of tokens that are not zero or positions, which no
            comparison reads; or a mapping does not say which entry is the input.

    Warns:
        CaveatWarning: Of the tuples of a loader or a data set the first entry is taken.

    Example:
        >>> input_rows({"input_ids": np.ones((2, 3), int), "attention_mask": np.ones((2, 3))}).shape
        (2, 3)
    """
    if hasattr(inputs, "dataset") and hasattr(inputs, "collate_fn"):
        # Batches of a loader are concatenated here, since a sum over inputs needs no batches of the
        # loader.
        return np.concatenate(_first_entries(inputs))
    if hasattr(inputs, "keys") and not hasattr(inputs, "shape"):
        return _of_mapping(inputs)
    if _is_dataset(inputs):
        return np.stack(_first_entries(inputs[n] for n in range(len(inputs))))
    # A list of tuples is a data set with labels, or sequences of vectors.
    first = inputs[0] if isinstance(inputs, list) and inputs else inputs
    if isinstance(first, tuple) and any(len(getattr(entry, "shape", ())) > 0 for entry in first):
        raise _labelled_refusal(first)
    if hasattr(first, "keys") and not hasattr(first, "shape"):
        return [host_array(detached(_of_mapping(row))) for row in inputs]
    # Loaders collate pairs to a list of two batches, whereas two vectors have one axis each.
    two = isinstance(inputs, list) and len(inputs) == 2
    if two and all(len(getattr(entry, "shape", ())) > 1 for entry in inputs):
        raise _labelled_refusal(inputs)
    return inputs


def batch_of_inputs(inputs: Any) -> np.ndarray:
    """The inputs inside of what a caller has, see `input_rows`, as an array of NumPy.

    Args:
        inputs: Inputs, as for `input_rows`.

    Returns:
        An array of numbers with a row for every input.

    Raises:
        ModelError: The inputs are no numbers, or no batch.

    Example:
        >>> batch_of_inputs([[1.0, 2.0]]).shape
        (1, 2)
    """
    array = host_array(detached(input_rows(inputs)))
    if array.dtype.kind not in "biufc" or not array.ndim or not len(array):
        raise ModelError(
            "inputs are a batch, an array of numbers with a row for every input; found "
            f"{shown(inputs)}"
        )
    return array


def _is_dataset(inputs: Any) -> bool:
    """Whether a value gives its items by number and is neither an array nor a list."""
    ours = isinstance(inputs, (list, tuple, str, bytes)) or hasattr(inputs, "shape")
    return not ours and hasattr(inputs, "__getitem__") and hasattr(inputs, "__len__")


def _first_entries(items: Iterable[Any]) -> list[np.ndarray]:
    """The inputs in batches of a loader, or in items of a data set."""
    found = []
    for item in items:
        several = isinstance(item, (tuple, list))
        if several and len(item) > 1 and not found:
            warn(
                f"the data gives tuples of {len(item)}, as of inputs with labels: the first entry "
                "of each is taken as the input",
                CaveatWarning,
            )
        one: Any = next(iter(item)) if several else item
        found.append(host_array(detached(_of_mapping(one) if hasattr(one, "keys") else one)))
    return found


def _of_mapping(batch: Any) -> Any:
    """The inputs among named arrays."""
    entries = dict(batch)
    mask = entries.pop("attention_mask", None)
    # A mask of ones says nothing and may be dropped.
    if mask is not None and not host_array(detached(mask)).all():
        raise ModelError(
            "some inputs are padded: their attention_mask has zeros, which no comparison reads; "
            "give inputs of one length, without a mask"
        )
    types = entries.pop("token_type_ids", None)
    for name, is_read in (
        ("token_type_ids", types is not None and host_array(detached(types)).any()),
        ("position_ids", entries.get("position_ids") is not None),
    ):
        if is_read:
            raise ModelError(
                f"no comparison reads {name}: leave them out where they are what the network takes "
                "without them, else give both side by side to a module with forward(self, x): "
                f"`ids, others = x.chunk(2, 1)` and `return self.net(ids, {name}=others)`"
            )
    for name in INPUTS:
        if name in entries:
            return entries[name]
    if len(entries) == 1:
        return next(iter(entries.values()))
    raise ModelError(
        f"inputs are one array, found {', '.join(map(str, entries)) or 'none'}: give the inputs "
        "alone, or name them inputs"
    )


def _labelled_refusal(arrays: Any) -> ModelError:
    return ModelError(
        f"inputs are one array, found a {type(arrays).__name__} of {len(arrays)} arrays, as of "
        "inputs with labels or of a batch: give the inputs alone, such as dataset.tensors[0], or "
        "np.stack them"
    )


def run_module(module: Any, inputs: Any) -> Any:
    """The outputs of a PyTorch module on a batch, without gradients.

    Args:
        module: Module that is called with a tensor of the precision and on the device of its
            parameters.
        inputs: Batch of inputs, in NumPy.

    Returns:
        The outputs in the form in which the module gives them.

    Raises:
        ModelError: The module is in training mode and its outputs are random, or it raises.

    Example:
        >>> import torch
        >>> run_module(torch.nn.Identity(), np.zeros((1, 2))).shape
        torch.Size([1, 2])
    """
    # PyTorch is loaded already where a module is given.
    import torch

    with torch.no_grad():
        return run_with_gradients(module, inputs)


def tensor_of(array: np.ndarray) -> Any:
    """A copy of an array in PyTorch, of either byte order.

    Integers are as wide as embeddings take them; files of tokens hold narrow ones.

    Example:
        >>> tensor_of(np.ones(2, np.uint16)).dtype
        torch.int64
    """
    import torch

    kind = np.int64 if array.dtype.kind in "iu" else array.dtype.newbyteorder("=")
    return torch.from_numpy(np.array(array, kind))


def run_with_gradients(module: Any, inputs: Any) -> Any:
    """The outputs of a PyTorch module on a batch, as a part of the caller's autograd graph.

    Args:
        module: Module, as for `run_module`.
        inputs: Batch of inputs, in NumPy.

    Returns:
        The outputs in the form in which the module gives them.

    Raises:
        ModelError: The module is in training mode and its outputs are random, or it raises.

    Example:
        >>> import torch
        >>> run_with_gradients(torch.nn.Linear(2, 1), np.zeros((1, 2))).requires_grad
        True
    """
    check_not_random(module)
    tensor = tensor_of(inputs)
    # A module without parameters, such as an activation, takes any precision. Packed integers and
    # complex weights say nothing about that of the inputs, unless there are complex ones alone.
    parameters = sorted(module.parameters(), key=_is_no_float)
    if parameters:
        tensor = tensor.to(parameters[0].device)
        if tensor.is_floating_point() and _is_no_float(parameters[0]) < 2:
            tensor = tensor.to(parameters[0].dtype)
    try:
        return module(tensor)
    except Exception as error:  # whatever the forward pass of a user raises
        check_one_input(module, error)
        said = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{type(module).__name__} does not take these inputs, {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}: {type(error).__name__}: {said[:200]}. Give an array (n, ...) "
            "of inputs as the module itself takes them: vectors (n, d) of floats, "
            "images (n, channels, height, width), tokens (n, positions) of integers"
        ) from error


def _is_no_float(parameter: Any) -> int:
    """0 for floats, 1 for complex numbers, 2 for others."""
    return 0 if parameter.is_floating_point() else 1 if parameter.is_complex() else 2


def check_not_random(module: Any) -> None:
    """Refuse a module whose outputs are random in the mode in which it is.

    Args:
        module: A module of PyTorch.

    Raises:
        ModelError: A part of it that is random in training is in training mode, or draws its
            weights at its first call.

    Example:
        >>> import torch
        >>> check_not_random(torch.nn.Dropout().eval())
    """
    check_has_weights(module)
    for name, child in module.named_modules():
        if child.training and is_random_in_training(child):
            raise ModelError(
                f"{name or 'the module'} ({type(child).__name__}) is in training mode, in which it "
                "gives something else each time: call module.eval() first"
            )


def check_has_weights(module: Any) -> None:
    """Refuse a lazy module of PyTorch before its first call, at which it draws its weights.

    Args:
        module: A module of PyTorch.

    Raises:
        ModelError: Tensors of a part of it have no sizes yet.

    Example:
        >>> import torch
        >>> check_has_weights(torch.nn.Linear(2, 1))
    """
    for name, child in module.named_modules():
        own = (*child._parameters.values(), *child._buffers.values())
        if any(type(one).__name__.startswith("Uninitialized") for one in own):
            raise ModelError(
                f"{name or 'the module'} ({type(child).__name__}) has no weights yet, and draws "
                "them when it is first called: call the module on an input, net(x), or load its "
                "weights, module.load_state_dict(state)"
            )


def check_one_input(module: Any, error: Exception | None = None) -> None:
    """Refuse a module that failed on one input because it asks for several.

    Args:
        module: A module of PyTorch.
        error: What its forward pass raised; None where several inputs were given for one.

    Raises:
        ModelError: The forward pass lacks arguments.

    Example:
        >>> import torch
        >>> check_one_input(torch.nn.Linear(2, 1))
    """
    if error is not None and "missing" not in str(error):
        return
    wanted = [
        parameter.name
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(wanted) > 1:
        raise ModelError(
            f"{type(module).__name__} takes {len(wanted)} inputs ({', '.join(wanted)}), and "
            "networks are compared as functions of one: wrap it in a module whose forward(self, x) "
            "is `return self.net(x[:, :3], x[:, 3:])`, of inputs side by side, or `return "
            f"self.net(x, {wanted[1]}=self.{wanted[1]})`, where one stays as it is"
        ) from error


def is_random_in_training(module: Any) -> bool:
    """Whether a module in training mode drops units, takes statistics from the batch, or moves.

    Args:
        module: A module of PyTorch.

    Returns:
        True for dropout with a chance above 0, for batch norms, for instance norms that keep
        statistics, and for spectral norms, which take a step of an iteration at each call.

    Example:
        >>> import torch
        >>> is_random_in_training(torch.nn.Dropout(0.0))
        False
    """
    # Dropout keeps its chance in `p`, attention in `dropout`; above 1 the number is a power.
    chances = (getattr(module, "p", None), getattr(module, "dropout", None))
    drops = any(isinstance(chance, float) and 0 < chance <= 1 for chance in chances)
    if "running_mean" in getattr(module, "_buffers", ()) and module.running_mean is not None:
        return True  # of instance norms as of batch norms
    # Batch norms of every dimension share a base class, and so do those of users. Spectral norms
    # are parametrisations, or in their older form hooks.
    kinds = *type(module).__mro__, *map(type, getattr(module, "_forward_pre_hooks", {}).values())
    return drops or any(x in kind.__name__ for kind in kinds for x in _MOVING_IN_TRAINING)
