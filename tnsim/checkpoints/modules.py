"""PyTorch modules, and files of their weights, into models that compute the same function.

A module is read by the graph of its forward pass, in which all weights are arguments (`graphs`), at
the length that is asked for; every operation is known by name (`read_graphs`). Files of its weights
are read by the same graph, so what a value decides, such as a scale that is one or a mask of zeros,
is decided for each file anew. A model is returned only if its outputs equal those of the module on
random batches of several sizes.

What depends on the code alone is made once for all files that are read by a module, and for all
steps of a training. Code may change where nothing shows it, as by a variable of its file; where
layers then differ from the module by more than rounding, the graph is made anew.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tnsim.checkpoints.adapters import (
    OUTSIDE_OF_ADAPTED,
    Adapted,
    merged_module,
    put_adapter,
)
from tnsim.checkpoints.layer_rules import NamedArrays, normed, to_numpy, valued
from tnsim.checkpoints.module_calls import (
    AN_EXAMPLE,
    POSITIONS,
    TOLERANCE,
    as_numpy,
    copy_of,
    diverged,
    example_inputs,
    forward_error,
    inputs_of_width,
    join,
    kind,
    leaves_of,
    outside_compiler,
    own_defaults,
    require_torch,
)
from tnsim.checkpoints.norms import Normed, relative_error
from tnsim.checkpoints.rules import Rule
from tnsim.checkpoints.state_dict import (
    Patterns,
    assembled,
    inside,
    place_of,
    warn_of_unfitting,
    weights_within,
)
from tnsim.errors import (
    BY_PARTS,
    ON_INPUTS,
    OWN_ACTIVATION,
    CheckpointError,
    ModelError,
    TooLarge,
    UnsupportedLayer,
    cause,
)
from tnsim.models.arrays import numbers
from tnsim.models.functions import (
    array_of,
    check_has_weights,
    is_random_in_training,
    states_of_generators,
)
from tnsim.models.model import Model, Origin, check_length
from tnsim.options import checked
from tnsim.sessions import session

if TYPE_CHECKING:
    from tnsim.checkpoints.operations import Graph

log = logging.getLogger(__name__)

Declared = Rule | Callable[[Any], Any]
"""What a class of the user is: a rule with names as in the class, or a function of an instance."""

WRAPPERS = ("DataParallel", "DistributedDataParallel")
LARGEST_BATCH = 2**18
"""Numbers of the largest batch on which a module is compared with itself on single inputs."""
_ROUNDING = 1e-12
"""Largest relative error of layers that are read by a graph of an earlier reading."""
SOFTMAX = "MultiheadAttention"  # refused as a whole, not operation by operation
QUANTISERS = ("bitsandbytes", "torchao", "optimum", "gptqmodel", "auto_gptq", "awq", "hqq")
"""Packages whose layers and tensors hold integers with scales."""
_ASK_FOR_INPUTS = f", of which the input's size is to be known: give inputs=, {AN_EXAMPLE}"
_OF_IMAGES = tuple(f"torch.nn.modules.{name}" for name in ("batchnorm", "conv", "pooling"))
"""Modules of layers that are read off operations on an example of the input."""


@outside_compiler
@checked(own="layers")
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

    The module is read by the operations of its forward pass, however it is written: everything that
    is affine, products, activations, gates, residual connections, norms before layers, embeddings
    and attention without softmax. Every operation is known by name, so the model is the module for
    all inputs of the shape that was read; it is compared with the module in float64 besides, on
    several batches of random inputs of different sizes.

    Args:
        module: An `nn.Module` in evaluation mode, a `PeftModel` with its adapters. It is not
            changed.
        layers: Declarations of your own classes that are not recognised: a `Rule` with names as in
            the class, or a function from an instance to a single layer of tnsim or several.
        n_ctx: Length of the sequences on which a model with attention is compared, and at which the
            module is read.
        inputs: An example of the module's argument; by default random vectors, or token numbers
            where the module begins with an embedding.
        norm_inputs: Inputs at whose mean energy norms become constants, as in `load`; needed where
            the module has LayerNorm or RMSNorm.
        output: Name of the output that the model computes, such as "last_hidden_state", or its
            place in a tuple. None for `logits`, else `last_hidden_state`, else the single or the
            first output.

    Returns:
        The model. `model.origin.error` is the relative error of its forward pass. Files of the
        module's weights are read by the module: `tnsim.load("runs/*.pt", net)`.

    Raises:
        UnsupportedLayer: Where an operation, which the message names with its submodule, makes no
            layer.
        ModelError: When the layers compute another function than the module.
        TooLarge: A layer would be a matrix of which more than 1 GiB is stored.
        MissingExtra: When PyTorch is not installed.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = from_module(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
        >>> model, model.origin.error < 1e-12
        (Model(Linear(3 -> 4, bias), Linear(4 -> 2, bias); degree 1, 26 parameters), True)
    """
    reading = _merged_reading(module, layers, n_ctx, inputs, output)
    return reading.model(norm_inputs, n_ctx)


def compared_module(
    module: Any, n_ctx: int | None, width: int | None, output: str | int | None = None
) -> Model:
    """The model of a module beside something that says how many numbers the module reads.

    Args:
        module: An `nn.Module`, as for `from_module`.
        n_ctx: Length of sequences.
        width: Entries of a vector, None where nothing says so.
        output: Name or place of the output that counts, as for `from_module`.

    Raises:
        UnsupportedLayer, ModelError, TooLarge, MissingExtra: Raised as by `from_module`.

    Example:
        >>> import torch
        >>> class Halves(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w = torch.nn.Parameter(torch.ones(1, 3, 3))
        ...     def forward(self, x):
        ...         return torch.nn.functional.bilinear(x[:, :3], x[:, 3:], self.w)
        >>> compared_module(Halves(), None, 6).d_in
        6
    """
    return _merged_reading(module, None, n_ctx, None, output, width).model(None, n_ctx)


def _merged_reading(
    module: Any,
    layers: Mapping[type, Declared] | None,
    n_ctx: int | None,
    inputs: Any,
    output: str | int | None = None,
    width: int | None = None,
    reader: Any = None,
) -> Recognised:
    """The layers of a module, adapters within its weights; for arguments see `recognised`.

    Raises:
        ModelError: The code of the module reads weights of an adapted layer outside of the layer,
            where they are those of the base.
    """
    merged = merged_module(module)
    reading = recognised(merged, layers, n_ctx, inputs, output, width, reader)
    if merged is not module:
        torch = require_torch()
        with torch.no_grad():
            apart, together = (
                as_numpy(array_of(net.eval()(reading.example), output))
                for net in (double_of(module), double_of(merged))
            )
        if not relative_error(together, apart) < TOLERANCE:
            raise ModelError(
                f"{OUTSIDE_OF_ADAPTED}; compare the outputs of the PeftModel on inputs of yours, "
                "metric tnsim.Empirical(inputs)"
            )
    return reading


@dataclass(frozen=True, eq=False)
class StatesOf:
    """The state dicts of a module, in the place of a dialect.

    Args:
        module: An `nn.Module`, as for `from_module`.
        inputs: Example of the argument of the module, as for `from_module`.
        output: Name or place of the output that counts, as for `from_module`.
        width: Entries of a vector that the module reads, as for `compared_module`.
    """

    module: Any
    inputs: Any = None
    output: str | int | None = None
    width: int | None = None

    @property
    def name(self) -> str:
        """Name of the class of the module."""
        return type(self.module).__name__

    def model(
        self,
        state: Mapping[str, Any],
        n_ctx: int | None,
        leave_out: Sequence[str] = (),
        norm_inputs: Any = None,
    ) -> Model:
        """The model of the module with other weights.

        Args:
            state: Arrays by name, also within what training code puts around them.
            n_ctx: Length of the sequences on which a model with attention is compared.
            leave_out: Patterns of tensors of the file that are none of the module, and are
                knowingly not read.
            norm_inputs: Inputs at whose mean energy norms become constants.

        Returns:
            The model, compared with the forward pass of the module with these weights.

        Raises:
            CheckpointError: The names or shapes differ from those of the module, or a pattern
                leaves out what the module computes with.
            UnsupportedLayer, ModelError: Raised as by `from_module`.
        """
        module, left_out = self._loaded(state, leave_out, patterns_taken=True)
        asked = None, n_ctx, self.inputs, self.output, self.width
        reading = _merged_reading(module, *asked, reader=self)
        caveats = (f"left out: {', '.join(left_out)}",) if left_out else ()
        return reading.model(norm_inputs, n_ctx, caveats)

    def loaded(self, state: Mapping[str, Any]) -> Any:
        """A copy of the module with other weights.

        Args:
            state: Arrays by name, also within what training code puts around them.

        Returns:
            The module, in the mode of the module given. What an adapter changes is as PEFT has it,
            in its layers alone.

        Raises:
            CheckpointError: The names or shapes differ from those of the module.
        """
        return self._loaded(state, ())[0]

    def _loaded(
        self, state: Mapping[str, Any], leave_out: Sequence[str], patterns_taken: bool = False
    ) -> tuple[Any, tuple[str, ...]]:
        """The module with other weights, and the names of tensors that are none of it."""
        torch = require_torch()
        _check_not_shared(self.module)
        module = copy_of(self.module)
        own = module.state_dict(keep_vars=True)
        # Files such as safetensors hold a tensor of several names under one of them, the first.
        first: dict[int, str] = {}
        tied = {name: first.setdefault(id(one), name) for name, one in own.items()}
        # Training code wraps state dicts in mappings of its own.
        named = dict(inside(state, place_of(state, list(first.values()))))
        if not named.keys() & own.keys():
            named = dict(weights_within(named))  # those of another network, which is told by them
        self._check_ties(named, tied)
        # Others hold it under another one.
        for name, other in tied.items():
            if name in named:
                named.setdefault(other, named[name])
        for name, other in tied.items():
            if other in named:
                named.setdefault(name, named[other])
        missing, surplus = sorted(set(own) - set(named)), sorted(set(named) - set(own))
        chosen = [*filter(Patterns(leave_out).__contains__, named)]
        if kept := [name for name in chosen if name in own]:
            raise CheckpointError(
                f"leave_out names {', '.join(kept[:4])}, which the module {self.name} computes "
                "with: give a module without it. Tensors of the file alone are left out"
            )
        warn_of_unfitting(leave_out, named)
        left_out = tuple(sorted(chosen))
        surplus = [name for name in surplus if name not in left_out]
        # A state of another architecture would otherwise end in an error of PyTorch.
        if missing or surplus:
            listed = [f"lacks {', '.join(missing[:4])}"] if missing else []
            listed += [f"has besides {', '.join(map(str, surplus[:4]))}"] if surplus else []
            advice = "" if missing else _to_leave_out(surplus, own, patterns_taken)
            raise CheckpointError(
                f"is no state dict of {self.name}: it {' and '.join(listed)}{advice}"
            )
        # What a module saves besides tensors, `get_extra_state`, it reads back itself.
        tensors = [name for name, one in own.items() if isinstance(one, torch.Tensor)]
        arrays = {name: named[name] for name in own}
        arrays |= {name: torch.as_tensor(to_numpy(named[name], name)) for name in tensors}
        for name in tensors:
            tensor = arrays[name]
            if tensor.shape != own[name].shape:
                raise CheckpointError(
                    f"tensor {name!r} has shape {tuple(tensor.shape)}, in the module {self.name} "
                    f"{tuple(own[name].shape)}: give a module of these widths"
                )
        adapted: dict[str, dict[str, Any]] = {}
        for name in tensors:
            stored = named[name]
            if isinstance(stored, Adapted) and stored.outside is not None:
                path, _, its = name.rpartition(".")
                adapted.setdefault(path, {})[its] = arrays[name]
                arrays[name] = torch.as_tensor(to_numpy(stored.outside, name))
        module.load_state_dict(arrays)
        for path, weights in adapted.items():
            put_adapter(module.get_submodule(path), weights)
        return module, left_out

    def _check_ties(self, named: Mapping[str, Any], tied: Mapping[str, str]) -> None:
        """Raise `CheckpointError` where names of one tensor have different numbers in a file."""
        for name, other in tied.items():
            if name == other:
                continue
            if name in named and other in named:
                pair = [to_numpy(named[each], each) for each in (name, other)]
                if not np.array_equal(*pair, equal_nan=True):
                    raise CheckpointError(
                        f"{other} and {name} are one tensor in the module {self.name}, and have "
                        "different numbers here: give a module in which they are two"
                    )
            elif isinstance(named.get(name, named.get(other)), Adapted):
                raise CheckpointError(
                    f"the adapter changes one of {other} and {name}, which are one tensor in the "
                    f"module {self.name}: give the PeftModel itself in the place of its files"
                )


def _check_not_shared(module: Any) -> None:
    """Raise `UnsupportedLayer` where an attribute of a module is a view of its weights.

    Where weights are loaded into the module the view has them too, in a copy it does not.
    """
    torch = require_torch()
    saved = module.state_dict(keep_vars=True)
    tensors = {name: one for name, one in saved.items() if isinstance(one, torch.Tensor)}
    known = {id(one) for one in tensors.values()}
    places = {_place(one): name for name, one in tensors.items()}
    for path, child in module.named_modules():
        if child._forward_pre_hooks:  # as of a spectral norm, which makes its weight before a call
            continue
        for name, value in (*vars(child).items(), *child._buffers.items()):
            if not isinstance(value, torch.Tensor) or id(value) in known:
                continue
            place = _place(value)
            if place and place in places:
                raise UnsupportedLayer(
                    f"{join(path, name)} is a view of {places[place]}, which in copies with other "
                    "weights keeps the numbers of the module that was given: compute it in forward"
                )


def _place(tensor: Any) -> int:
    """Where the numbers of a tensor begin in memory; 0 where they are not in one block."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, ValueError):  # of sparse tensors, and of those without numbers yet
        return 0


def _to_leave_out(surplus: Sequence[str], own: Iterable[str], patterns_taken: bool = True) -> str:
    """How tensors are left out that a file has beside a module; empty where they may be of it.

    Args:
        surplus: Names in the file that the module has not.
        own: Names in the module.
        patterns_taken: Whether whoever reads takes patterns. A network that runs as it is has none.

    Example:
        >>> _to_leave_out(["criterion.weight", "n_averaged"], ["0.weight"])[-50:]
        "(--leave-out 'criterion.*' --leave-out n_averaged)"
        >>> _to_leave_out(["2.weight"], ["0.weight"]), _to_leave_out(["block.2"], ["block.1"])
        ('', '')
    """
    tops, known = ({name.partition(".")[0] for name in names} for names in (surplus, own))
    if tops & known or any(map(str.isdecimal, tops)):
        return ""  # more layers than the module has
    if not patterns_taken:
        return (
            ". A network that runs as it is needs them all: where they are no part of it, as of a "
            "loss, give a module that has them as well, such as that which was saved"
        )
    heads = dict.fromkeys(name.partition(".")[0] + ".*" * ("." in name) for name in surplus)
    flags = " ".join(f"--leave-out {shlex.quote(head)}" for head in heads)
    return (
        ". What is no part of the network, as of a loss or the counter of an average, is left out "
        f"by tnsim.load(path, net, leave_out={list(heads)}) ({flags})"
    )


class Recognised(NamedTuple):
    """A module with the layers that were read.

    Attributes:
        module: The module without wrappers that compile or distribute it.
        layers: The layers, with the module's own weights.
        example: Inputs that the module takes.
        positions: Positions of a sequence; 1 for vectors.
        error: Relative error of the forward pass of the layers.
        unused: Names of tensors on which the output does not depend.
        lengths: Further lengths of sequences at which the layers were compared with the module.
        graph: The operations, which are those of all weights.
    """

    module: Any
    layers: list[Normed]
    example: Any
    positions: int
    error: float
    unused: tuple[str, ...]
    lengths: tuple[int, ...]
    graph: Graph

    def model(self, norm_inputs: Any, n_ctx: int | None, caveats: tuple[str, ...] = ()) -> Model:
        """The model of the layers, with norms at their energy on inputs, and how it was read."""
        name = type(self.module).__name__
        at = f" at n_ctx {self.positions}" if self.positions > 1 else ""
        if self.lengths:
            at += f", compared at {', '.join(map(str, self.lengths))} positions"
        said = (
            f"{name} of PyTorch, read by the graph of {name}{at} and compared with its own forward "
            f"pass: relative error {self.error:.2g}"
        )
        origin = Origin(name, (said,), caveats, ignored=self.unused, error=self.error)
        return assembled(self.layers, norm_inputs, n_ctx, origin)


def recognised(
    module: Any,
    layers: Mapping[type, Declared] | None,
    n_ctx: int | None,
    inputs: Any,
    output: str | int | None = None,
    width: int | None = None,
    reader: Any = None,
) -> Recognised:
    """The layers of a module, compared with the module's own forward pass.

    Args:
        module: A module of PyTorch, as for `from_module`.
        layers: Declarations of classes of the user, as for `from_module`.
        n_ctx: Length of sequences.
        inputs: An example of the module's argument.
        output: Name of the output that counts, or its place in a tuple.
        width: Entries of a vector that the module reads, where what it is compared with says so.
        reader: Object for which the module, or copies of it, are read again and again; a `StatesOf`
            where the module is a copy with other weights.

    Returns:
        The layers of the module.

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
    module = unwrapped_module(module)
    if layers is not None and not (
        isinstance(layers, Mapping) and all(isinstance(kind, type) for kind in layers)
    ):
        raise ModelError(
            "layers maps classes of modules to what their layers are, found "
            f"{type(layers).__name__}: an example of the inputs is given by name, inputs=x"
        )
    declared = dict(layers or {})
    _check_repeatable(module)
    double = double_of(module).requires_grad_(False)
    as_given = copy_of(double) if any(child.training for child in double.modules()) else None
    double.eval()
    if output is not None:
        double.register_forward_hook(lambda _, given, outputs: array_of(outputs, output))
    with torch.no_grad(), own_defaults(module):
        try:
            example = example_inputs(double, inputs, n_ctx, width)
        except ModelError:
            if output is None:
                _check_describable(module, tuple(declared), False)  # which says more
            raise
        first = reader.module if isinstance(reader, StatesOf) else module
        asked = _Asked(module, double, declared, inputs, n_ctx, output, first, reader)
        try:
            if as_given is not None:
                _check_modes_agree(as_given, double, example)
            reading = _first_reading(asked, example)
        except ModelError:
            if said := diverged(module):  # which says more
                raise ModelError(said) from None
            raise
    log.info("%s: relative error of the forward pass %.2g", type(module).__name__, reading.error)
    return reading


def _check_modes_agree(as_given: Any, double: Any, example: Any) -> None:
    """Raise `ModelError` where the mode of training, in which a module is, is another function.

    Args:
        as_given: A copy of the module in float64, in its own mode.
        double: Another one in evaluation mode, in which modules are read.
        example: Inputs that the module takes.
    """
    try:
        read = as_numpy(array_of(double(example)))
    except Exception as reason:  # which the reading says in words of its own
        log.debug("in evaluation mode: %s", reason)
        return
    before = states_of_generators()
    try:
        own = as_numpy(array_of(as_given(example)))
        limit = 1e-9 * np.abs(read).max(initial=0.0)
        agree = own.shape == read.shape and np.allclose(own, read, 0, limit, equal_nan=True)
    except Exception as reason:  # of what a forward pass asks for in training alone
        log.debug("in training mode: %s", reason)
        agree = False
    if not agree or states_of_generators() != before:
        raise ModelError(
            "the module is in training mode, in which it computes something else than in "
            "evaluation mode, where it is read: call module.eval() first"
        )


class _Asked(NamedTuple):
    """What is asked of a module.

    Attributes:
        module: The module.
        double: A copy in float64, with the output that counts alone.
        declared: Declarations of classes of the user.
        inputs: The example that the user gave, or None.
        n_ctx: Length of sequences that was asked for; None where the layers are to hold for all.
        output: Name or place of the output that counts.
        first: The module of which the module may be a copy with other weights.
        reader: Object with which the form of the module is kept; None to keep none.
    """

    module: Any
    double: Any
    declared: Mapping[type, Declared]
    inputs: Any
    n_ctx: int | None
    output: str | int | None
    first: Any
    reader: Any


def _first_reading(asked: _Asked, example: Any) -> Recognised:
    """The first way in which a module is read: as a sequence, as a vector.

    Raises:
        UnsupportedLayer, ModelError, TooLarge: The first refusal, in the words that say most.
    """
    from tnsim.checkpoints.batches import JOINED, readings  # which need SciPy
    from tnsim.checkpoints.unit_layers import NoLayerError

    module, inputs, n_ctx = asked.module, asked.inputs, asked.n_ctx
    tried = [(example, sequence) for sequence in readings(example)]
    if n_ctx is not None or inputs is None:  # one that the user gave may be images
        tried = tried[:1]
    # The batch may have been taken for a sequence, as attention takes it.
    if inputs is None and n_ctx is None and example.is_floating_point() and example.ndim == 2:
        tried += [(one, True) for one in inputs_of_width(example.shape[-1], POSITIONS)]
    refusals: list[Exception] = []
    for given, sequence in tried:
        if refusals and given is not example and JOINED not in str(refusals[0]):
            break
        try:
            return _read(asked, given, sequence)
        except (UnsupportedLayer, ModelError, TooLarge) as refused:
            log.debug("%s: %s", type(module).__name__, refused)
            refusals.append(refused)
        except Exception as failed:
            log.debug("%s: %s", type(module).__name__, failed)
            if given is example:
                refusal = UnsupportedLayer(f"the forward pass cannot be read: {cause(failed)}")
                refusal.__cause__ = failed
                refusals.append(refusal)
    refused = refusals[-1] if JOINED in str(refusals[0]) else refusals[0]
    if isinstance(refused, TooLarge):
        raise refused
    may_be_declared = isinstance(refused, NoLayerError)
    if not may_be_declared:
        _check_describable(module, tuple(asked.declared), inputs is not None)
    if not isinstance(refused, UnsupportedLayer):
        if inputs is None and isinstance(refused, ModelError):
            shape = ", ".join(map(str, example.shape[1:]))
            raise type(refused)(
                f"{refused}. Inputs of shape (n, {shape}) were guessed: where the module reads "
                f"others, give inputs=, {AN_EXAMPLE}"
            ) from refused
        raise refused
    way_out = f"{OWN_ACTIVATION}. " if may_be_declared else ""
    said = f"{refused}. {way_out}{_advice(module, example)}"
    of_length = n_ctx is not None or (inputs is None and example.ndim > 2)
    if of_length and example.is_floating_point() and _is_whole_sequence(asked, example):
        said = (
            f"{said}. Of a whole sequence it is a model: the module mixes positions as no layer "
            f"does, so its {example.shape[1]} positions are read as a single vector of "
            f"{example[0].numel()} numbers: give inputs=, an example (1, positions, d) of the "
            "length that counts, and leave n_ctx out"
        )
    raise UnsupportedLayer(said) from refused


def _advice(module: Any, example: Any) -> str:
    """What to do with a module that is no model."""
    attends = any("attn" in name or "attention" in name for name, _ in module.named_modules())
    tokens = "" if example.is_floating_point() else ", inputs here being tokens (n, positions)"
    return f"{BY_PARTS}. {ON_INPUTS}{tokens}" if attends else f"{ON_INPUTS}{tokens}"


def _is_whole_sequence(asked: _Asked, example: Any) -> bool:
    """Whether a refused module is a model of all positions together."""
    try:
        _read(asked._replace(declared={}, n_ctx=None, first=asked.module), example, False)
    except Exception as reason:  # whatever else the module computes, the refusal says it
        log.debug("%s: %s", type(asked.module).__name__, reason)
        return False
    return True


class _Form(NamedTuple):
    """What of a module depends on its code alone, on inputs of a shape.

    Attributes:
        graph: Operations on a single input.
        batches: Sizes of batches at which the code may do something else.
        lengths: Lengths of sequences at which it may; empty where a single one is asked for.
    """

    graph: Graph
    batches: Sequence[int]
    lengths: Sequence[int]


def _read(asked: _Asked, example: Any, sequence: bool) -> Recognised:
    """The layers of a module on inputs of the shape of an example.

    Args:
        asked: The module, and what is asked of it.
        example: Inputs that the module takes.
        sequence: Whether the second axis of the inputs is positions.
    """
    if asked.reader is None:
        return _read_by(None, asked, example, sequence)[0]
    asked_for = tuple(example.shape[1:]), example.dtype, sequence, asked.n_ctx, asked.output
    kept = session().belongings.get(asked.reader, (_read, *asked_for), list[tuple[Any, _Form]])
    code = _code_of(asked)
    if kept and kept[0][0] == code:
        try:
            reading, _ = _read_by(kept[0][1], asked, example, sequence)
            if reading.error <= _ROUNDING:
                return reading
        except (UnsupportedLayer, ModelError) as refused:
            log.debug("%s is traced once more: %s", type(asked.module).__name__, refused)
    reading, form = _read_by(None, asked, example, sequence)
    kept[:] = [(code, form)]
    return reading


def _code_of(asked: _Asked) -> list[Any]:
    """What tells that the code of a module is the same, beside inputs of the same shape."""
    from tnsim.checkpoints.graphs import state_of

    torch = require_torch()
    tensors = {name: (one.shape, one.dtype) for name, one in state_of(asked.module).items()}
    told: list[Any] = [tensors, _settings(asked.double), list(asked.declared)]
    for path, child in asked.first.named_modules():
        told.append((path, type(child), type(child).forward))
        for name, value in vars(child).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                is_tracked = isinstance(value, torch.Tensor) and not value.is_inference()
                told.append((name, id(value), value._version if is_tracked else None))
    return told


def _read_by(
    form: _Form | None, asked: _Asked, example: Any, sequence: bool
) -> tuple[Recognised, _Form]:
    """The layers of a module by its form, which is made where there is none."""
    from tnsim.checkpoints.batches import check_batches
    from tnsim.checkpoints.graphs import TorchLibrary, graph_of, lengths_of, state_of

    torch = require_torch()
    module, double, declared, _, n_ctx, _, first, _ = asked
    state = state_of(double)

    def repeated(count: int) -> Any:
        return example[:1].expand(count, *example.shape[1:]).clone()

    def written(count: int) -> Graph:
        return graph_of(double, repeated(count), tuple(declared))

    graph = written(1) if form is None else form.graph
    layers = graph_layers(graph, state, module, declared, example, sequence)
    if form is None:
        _check_reads_no_other(graph, first)
        library = TorchLibrary(example if example.is_floating_point() else torch.zeros(()))
        check_batches(graph, written, state, repeated(2), library, "the module")
    used = graph.used()
    for path, _ in graph.owns.values():
        used |= {join(path, name) for name in tensors_of(module.get_submodule(path))}
    layers = [one._replace(layer=numbers(one.layer)) for one in layers]
    if form is None:
        of_all = sequence and n_ctx is None
        lengths = lengths_of(double, graph, example) if of_all else ()
        form = _Form(graph, _batch_sizes(double, example), lengths)
    _check_apart(double, example, form.batches)
    error = forward_error(double, layers, example)
    taken = _check_lengths(double, layers, example, form.lengths)
    positions = example.shape[1] if sequence else 1
    tensors = tensors_of(module)
    named = state_of(module) | tensors  # each by all of its names
    read = {id(one) for name, one in named.items() if name in used}
    unused = tuple(name for name, one in tensors.items() if id(one) not in read)
    found = Recognised(module, layers, example, positions, error, unused, tuple(taken), graph)
    return found, form


def _check_reads_no_other(graph: Graph, first: Any) -> None:
    """Raise `UnsupportedLayer` where the forward pass of a copy reads weights of the first module.

    A function that is made where `self` is at hand keeps that module: its copies with other weights
    compute with the weights of the first.
    """
    from tnsim.checkpoints.graphs import state_of

    constants = set(map(_place, graph.constants.values()))
    for name, one in state_of(first).items():
        place = _place(one)
        if place and place in constants:
            raise UnsupportedLayer(
                f"the forward pass reads {name} of the module that was given also in copies with "
                "other weights, since a function keeps that module: read weights from self, "
                "within a method"
            )


def _batch_sizes(double: Any, example: Any) -> list[int]:
    """Sizes of batches on either side of those with which code compares them."""
    from tnsim.checkpoints.graphs import LONG, compared_sizes

    sizes = compared_sizes(double, example, 0)
    if sizes is None:  # as of code that takes the length of a batch, which is a plain number
        sizes = {LONG + 1}
    most = max(3, LARGEST_BATCH // max(1, example[:1].numel()))
    return sorted(size for size in sizes if size <= most)


def _check_apart(double: Any, example: Any, sizes: Iterable[int]) -> None:
    """Raise `UnsupportedLayer` where a batch gives something else than its inputs one by one.

    Args:
        double: The module in float64.
        example: Inputs that the module takes.
        sizes: Sizes of batches that are tried beside three.
    """
    from tnsim.checkpoints.batches import JOINED

    torch = require_torch()
    rng = torch.Generator().manual_seed(1)
    counts = [3, *sizes]
    given = example[:1].expand(max(counts), *example.shape[1:])
    if example.is_floating_point():
        given = torch.randn(given.shape, generator=rng)
    before: dict[str, Any] = {}
    alone: dict[int, np.ndarray] = {}
    for n in sorted({0, 1, 2} | {count - 1 for count in counts}):
        before = _settings(double)
        alone[n] = as_numpy(double(given[n : n + 1])).reshape(-1)
    if changed := sorted(name for name, _ in before.items() ^ _settings(double).items()):
        raise UnsupportedLayer(
            f"the forward pass changes {changed[0]} at each call, on which it may depend"
        )
    for count in counts:
        together = as_numpy(double(given[:count])).reshape(count, -1)
        for n in {0, count // 2, count - 1} & set(alone):
            one, other = together[n], alone[n]
            with np.errstate(invalid="ignore"):  # of what floats cannot hold
                error = np.abs(one - other) if one.shape == other.shape else np.inf
            if np.max(error, initial=0.0) > 1e-9 * np.abs(alone[n]).max(initial=0.0):
                raise UnsupportedLayer(f"the module {JOINED}")


def _settings(module: Any) -> dict[str, Any]:
    """Numbers and words that a module and its submodules have as attributes, by name."""
    plain = (bool, int, float, str)
    return {
        join(path, name): value
        for path, child in module.named_modules()
        for name, value in vars(child).items()
        if isinstance(value, plain)
    }


def _check_lengths(
    double: Any, layers: Sequence[Normed], example: Any, lengths: Iterable[int]
) -> list[int]:
    """Compare layers with a module at other lengths of sequences.

    Args:
        double: The module in float64.
        layers: Layers that were read at the length of the example.
        example: Sequences that the module takes.
        lengths: The other lengths.

    Returns:
        The lengths at which the module runs.

    Raises:
        UnsupportedLayer: The module computes something else at one of them.
    """
    taken = []
    for length in lengths:
        given = example.new_zeros((2, length, *example.shape[2:]))
        try:
            double(given)
        except Exception as reason:  # of a module with a largest length
            log.debug("length %d: %s", length, reason)
            continue
        try:
            forward_error(double, layers, given)
        except ModelError as differs:
            raise UnsupportedLayer(
                f"the module computes something else at {length} positions than at "
                f"{example.shape[1]}: give n_ctx=, the length of sequences that counts"
            ) from differs
        taken.append(length)
    return taken


def graph_layers(
    graph: Graph,
    state: Mapping[str, Any],
    module: Any,
    declared: Mapping[type, Declared],
    example: Any,
    sequence: bool,
) -> list[Normed]:
    """The layers of the graph of a module.

    Args:
        graph: The operations of the module.
        state: Parameters and buffers by name, of which layers are made.
        module: The module of which declared layers are made.
        declared: Declarations of classes of the user.
        example: Inputs that the module takes.
        sequence: Whether the second axis of the inputs is positions.

    Returns:
        The layers, of arrays or of tensors that require grad.

    Raises:
        UnsupportedLayer, TooLarge: Raised as by `from_module`.
    """
    from tnsim.checkpoints.graphs import TorchLibrary
    from tnsim.checkpoints.read_graphs import Part, layers_of_graph

    torch = require_torch()
    floats = [one for one in state.values() if one.is_floating_point()]
    like = floats[0] if floats else torch.zeros(1, dtype=torch.get_default_dtype())
    parameters = [one.dtype for one in module.parameters() if one.is_floating_point()]
    precision = max(parameters, key=lambda dtype: torch.finfo(dtype).eps, default=like.dtype)
    library = TorchLibrary(like, precision)
    arrays = graph.arrays(state)
    parts = {
        end: Part(start, _declared_layers(module, path, declared))
        for end, (path, start) in graph.owns.items()
    }
    trained = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    filled = dict(arrays)
    for name in trained & set(graph.weights):
        filled[graph.weights[name]] = _without_zeros(arrays[graph.weights[name]])
    positions = example.shape[1] if sequence else 1
    return layers_of_graph(graph, arrays, example[:1], library, positions, parts, filled)


def _without_zeros(array: Any) -> Any:
    """A parameter with other numbers in the place of zeros, as other files may have."""
    torch = require_torch()
    if array.requires_grad or not array.is_floating_point() or bool(array.all()):
        return array
    rng = torch.Generator().manual_seed(0)
    random = torch.rand(array.shape, generator=rng, dtype=torch.float64).to(array) + 0.5
    return torch.where(array == 0, random, array)


def _declared_layers(module: Any, path: str, declared: Mapping[type, Declared]) -> list[Normed]:
    """The layers that the user declared for a submodule."""
    submodule = module.get_submodule(path)
    given = next(one for cls, one in declared.items() if isinstance(submodule, cls))
    if not isinstance(given, Rule):
        made = given(submodule)
        return [Normed(one) for one in (made if isinstance(made, (list, tuple)) else [made])]
    names = {"kind", "norm", "residual", "mask", "fused_order", "rope_layout", "activation"}
    # Fields that are words and no names of tensors stay as they are.
    keys: Any = {
        field: join(path, value)
        for field, value in vars(given).items()
        if isinstance(value, str) and field not in names and not value.startswith("config:")
    }
    arrays = NamedArrays(tensors_of(module), None)
    return [normed(valued(replace(given, **keys), arrays), arrays)]


def unwrapped_module(module: Any) -> Any:
    """The module inside wrappers that compile or distribute it, which change no number.

    Args:
        module: A module of PyTorch.

    Returns:
        The module itself, or the one that it wraps.

    Example:
        >>> import torch
        >>> unwrapped_module(torch.nn.DataParallel(torch.nn.Identity()))
        Identity()
    """
    while True:
        inner = getattr(module, "_orig_mod", None)  # attribute of torch.compile
        if type(module).__name__ in WRAPPERS:
            inner = module.module
        if inner is None:
            return module
        module = inner


def double_of(module: Any) -> Any:
    """A copy of a module in float64 that computes what the module does.

    Args:
        module: A module of PyTorch.

    Raises:
        UnsupportedLayer: The module cannot be copied.

    Example:
        >>> import torch
        >>> double_of(torch.nn.Linear(1, 1)).weight.dtype
        torch.float64
    """
    double = copy_of(module).double()
    _settle_epsilons(module, double)
    return double


def _settle_epsilons(module: Any, double: Any) -> None:
    """Give norms of the copy in float64 the epsilon that they have in the module itself.

    An RMSNorm with `eps=None` adds the machine epsilon of the dtype of its input, which is the
    dtype of the parameters in the module, and float64 in the copy.
    """
    torch = require_torch()
    norms = [
        (path, child)
        for path, child in double.named_modules()
        if kind(child) == "RMSNorm" and child.eps is None
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
    check_has_weights(module)
    if any(isinstance(child, torch.jit.ScriptModule) for child in module.modules()):
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
        hooks = (*child._forward_hooks.values(), *child._forward_pre_hooks.values())
        for hook in hooks:
            if hasattr(hook, "apply_mask"):  # `torch.nn.utils.prune`, which need not be imported
                raise UnsupportedLayer(
                    f"{name}: pruned by a forward hook: make the zeros permanent, "
                    f"torch.nn.utils.prune.remove(module, {hook._tensor_name!r})"
                )
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


def _check_describable(module: Any, declared: tuple[type, ...], is_given: bool) -> None:
    """Raise `UnsupportedLayer` naming every submodule of which no layer can be read."""
    # PyTorch's attention is named as a whole, since its linear layers alone look readable.
    softmax = [path for path, child in module.named_modules() if kind(child) == SOFTMAX]
    unreadable = [(path, f"{SOFTMAX}, which is softmax attention") for path in softmax]
    for path, leaf in leaves_of(module, declared):
        if isinstance(leaf, declared) or path.rpartition(".")[0] in softmax:
            continue
        if reason := _leaf_reason(leaf, is_given):
            unreadable.append((path, f"{kind(leaf)}{reason}"))
    if not unreadable:
        return
    # The same request once, not for each of many convolutions.
    asked = all(why.endswith(_ASK_FOR_INPUTS) for _, why in unreadable)
    wrong = [
        f"{path or 'the module'}: {why.removesuffix(_ASK_FOR_INPUTS) if asked else why}"
        for path, why in unreadable
    ]
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


def _leaf_reason(leaf: Any, is_given: bool) -> str:
    if type(leaf).__module__ == "torch.nn.modules.rnn":
        return ", which is recurrent"
    if kind(leaf) in ("Softmax", "LogSoftmax"):
        return (
            ", which has no exact similarity; logits have: leave it out where it stands last, as "
            "net[:-1] of a Sequential"
        )
    # Classes of the user may derive from those of PyTorch.
    of_images = any(cls.__module__ in _OF_IMAGES for cls in type(leaf).__mro__)
    return _ASK_FOR_INPUTS if of_images and not is_given else ""


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
