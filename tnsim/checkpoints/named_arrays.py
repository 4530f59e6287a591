"""Named arrays of a state dict as NumPy, and the numbers that a dialect gives or names.

A number of a rule, such as the scale of a residual or the number of heads, stands in the dialect
itself, in a tensor with a single entry, or in the configuration beside the file.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped

from tnsim.checkpoints.formats import Stored, strange
from tnsim.checkpoints.guard import cause
from tnsim.checkpoints.rules import AttentionRule, Rule, is_finite
from tnsim.errors import CheckpointError, ModelError, printable
from tnsim.models.arrays import detached, host_array, requires_grad


class KeysDiffer(CheckpointError):
    """The keys of a file are not those of a dialect."""


class NamedArrays:
    """Lookup of the arrays that a dialect names, with a record of the names in use.

    A key that ends in "?" may be absent. A key of None is absent.

    Args:
        state: Arrays, tensors of any library or unread tensors, by name.
        config: Contents of config.json or config.yaml; None where there is no such file.

    Attributes:
        used: Names that were looked up and found.

    Example:
        >>> arrays = NamedArrays({"weight": np.ones((2, 3)), "bias": np.ones(2)}, None)
        >>> arrays.matrix("weight", transpose=True).shape
        (3, 2)
        >>> arrays.unused()
        ['bias']
    """

    def __init__(self, state: Mapping[str, Any], config: Mapping[str, Any] | None):
        self.state = state
        self.config = config
        self.used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key.rstrip("?") in self.state

    def unused(self) -> list[str]:
        """Names that were never looked up, in the order of the file."""
        return [name for name in self.state if name not in self.used]

    def get(self, key: str | None) -> Shaped[np.ndarray, "..."] | None:
        """The array of a key.

        Args:
            key: Name of the array.

        Returns:
            The array as it is stored, None where it may be absent and is. A tensor that requires
            grad stays a tensor.

        Raises:
            KeysDiffer: Where the array is missing.
            CheckpointError: Where the array does not hold real numbers.
        """
        if key is None:
            return None
        name = key.rstrip("?")
        if name in self.state:
            # Use is recorded here, so that every tensor is accounted for in the end.
            self.used.add(name)
            value = self.state[name]
            array = to_numpy(value, name)
            # A gradient would be lost in NumPy.
            return value if requires_grad(value) else array
        if key.endswith("?"):
            return None
        raise KeysDiffer(f"tensor {name!r} is missing{listing(self.state)}")

    def matrix(
        self, key: str | None, transpose: bool = False
    ) -> Shaped[np.ndarray, "rows columns"] | None:
        """The matrix of a key.

        Args:
            key: Name of the matrix.
            transpose: Whether the matrix is stored (columns, rows).

        Returns:
            The matrix (rows, columns), None where it may be absent and is.

        Raises:
            ModelError: Where the array is no matrix. Errors of `get` are raised too.
        """
        array = self.get(key)
        if array is None:
            return None
        if array.ndim != 2:
            raise ModelError(f"tensor {key!r} must be a matrix, found shape {tuple(array.shape)}")
        return array.T if transpose else array

    def required_matrix(self, key: str | None, transpose: bool = False) -> Any:
        """The matrix of a key that a checked dialect always names."""
        array = self.matrix(key, transpose)
        if array is None:
            raise CheckpointError(f"a layer needs the matrix {key!r}")
        return array

    def single(self, key: str | None) -> Any:
        """The number in a tensor of a single entry.

        Args:
            key: Name of the tensor.

        Returns:
            The number, None where it may be absent and is. A tensor that requires grad stays a
            tensor.

        Raises:
            ModelError: Where the tensor has more entries or none. Errors of `get` are raised too.
        """
        array = self.get(key)
        if array is None:
            return None
        if math.prod(array.shape) != 1:
            shape = tuple(array.shape)
            raise ModelError(f"tensor {key!r} must hold one number, found shape {shape}")
        number = array.reshape(())
        return number if requires_grad(number) else float(number)


def to_numpy(value: Any, name: str) -> Shaped[np.ndarray, "..."]:
    """A tensor of a file or of any library as NumPy, in this machine's order of bytes.

    Args:
        value: Tensor that is stored under a name.
        name: Name of the tensor, for messages.

    Returns:
        An array of floats, integers or booleans, of the stored shape.

    Raises:
        CheckpointError: When the tensor does not hold real numbers separately.

    Example:
        >>> to_numpy([[1, 2], [3, 4]], "weight").shape
        (2, 2)
    """
    if isinstance(value, Stored):
        value = value.tensor
    # Such tensors would fail deep inside a conversion, with an error that names no tensor.
    if (said := strange(value)) is not None:
        raise CheckpointError(f"tensor {name!r} {said}")
    try:
        array = host_array(detached(value))
    except Exception as error:  # of tnsim too, which names no tensor
        raise CheckpointError(
            f"tensor {name!r} cannot be turned into numbers: {cause(error)}"
        ) from error
    if array.dtype.kind not in "fiub":
        raise CheckpointError(f"tensor {name!r} holds {array.dtype}, not real numbers")
    # Files from other machines may have the other order of bytes, which JAX refuses.
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def listing(state: Any) -> str:
    """The first names in a state dict, for the end of a message.

    Args:
        state: A mapping, or an object in the place of a mapping.

    Returns:
        At most eight names, in brackets, with a space in front.

    Example:
        >>> listing({"weight": 1, "bias": 2})
        ' (found weight, bias)'
    """
    if not isinstance(state, Mapping):
        return f" (found {type(state).__name__})"
    names = [printable(str(name), 60) for name in itertools.islice(state, 8)]
    shown = ", ".join(names)
    if len(state) > 8:
        shown += f" and {len(state) - 8} more"
    return f" (found {shown})"


def valued(rule: Rule, arrays: NamedArrays) -> Rule:
    """A rule with its numbers in the place of the keys under which they are found.

    Args:
        rule: Rule of a checked dialect, for a single layer.
        arrays: Arrays of the file, and its configuration.

    Returns:
        The rule with numbers as `scale`, `n_heads` and `rope_base` (the last may be None), and None
        for keys that are absent.

    Raises:
        ModelError: Where a number is missing. Errors of `NamedArrays.get` are raised too.

    Example:
        >>> from tnsim.checkpoints.rules import BilinearRule
        >>> rule = BilinearRule(left="l", right="r", residual="additive", scale="config:s")
        >>> valued(rule, NamedArrays({}, {"s": 0.5})).scale
        0.5
    """
    values: dict[str, Any] = {}
    if isinstance(rule, AttentionRule):
        heads = number(rule.n_heads, "number of heads", arrays)
        base = optional_number(rule.rope_base, "RoPE base", arrays)
        values["n_heads"] = constant(heads, "number of heads")
        values["rope_base"] = constant(base, "RoPE base")
    if rule.residual is not None:
        values["scale"] = number(rule.scale, "residual scale", arrays)
    for name, key in vars(rule).items():
        # A key that is absent is settled here, so that later readers need not ask again.
        if isinstance(key, str) and key.endswith("?") and key not in arrays:
            values[name] = None
    return dataclasses.replace(rule, **values)


def number(value: float | str | None, what: str, arrays: NamedArrays) -> Any:
    """A number that a dialect gives.

    Args:
        value: The number, "config:a.b" for an entry of the configuration, or else the key of a
            tensor with one entry. "config:a.b|c" is the first of the two entries that exists.
        what: Words for the number in messages.
        arrays: Arrays of the file, and its configuration.

    Returns:
        A finite number.

    Raises:
        ModelError: Where there is no number. Errors of `NamedArrays.get` are raised too.

    Example:
        >>> arrays = NamedArrays({}, {"model": {"n_head": 4}})
        >>> number("config:model.n_head", "number of heads", arrays)
        4
    """
    entry = optional_number(value, what, arrays)
    if entry is None:
        raise ModelError(f"the {what} must be a finite number, found None")
    return entry


def optional_number(value: float | str | None, what: str, arrays: NamedArrays) -> Any:
    """The number as by `number`, or None where the dialect or the configuration gives None."""
    entry: Any = value
    if isinstance(value, str) and value.startswith("config:"):
        entry = _configured_entry(value.removeprefix("config:"), what, arrays.config)
    elif isinstance(value, str):
        entry = arrays.single(value)
    # A tensor with a gradient was checked when it was read.
    if entry is not None and not requires_grad(entry) and not is_finite(entry):
        raise ModelError(f"the {what} must be a finite number, found {entry!r}")
    return entry


def constant(number: Any, what: str) -> Any:
    """A number that has no gradient.

    Args:
        number: Any number, or None.
        what: Words for the number in messages.

    Returns:
        The number.

    Raises:
        ModelError: When the number requires grad.

    Example:
        >>> constant(4, "number of heads")
        4
    """
    if requires_grad(number):
        raise ModelError(
            f"the {what} requires grad, and nothing has a gradient with respect to it: "
            "freeze it with requires_grad_(False)"
        )
    return number


def _configured_entry(name: str, what: str, config: Mapping[str, Any] | None) -> Any:
    """The entry of the configuration at the first of several paths that exists."""
    if config is None:
        first = name.partition("|")[0]
        raise ModelError(
            f"the {what} is {first} of config.json or config.yaml, and none is beside it"
        )
    paths = name.split("|")
    entries = [_config_entry(config, path) for path in paths]
    # None is a value: a configuration may state that there is no rotation.
    for entry, missing in entries:
        if not missing:
            return entry
    first, *others = paths
    missing = entries[0][1]
    nor = "".join(f", nor {path}" for path in others)
    raise ModelError(f"the {what} is {first} of the configuration, which has no {missing!r}{nor}")


def _config_entry(config: Any, path: str) -> tuple[Any, str]:
    """The entry at a path of names, or None and the first name that is missing."""
    for key in path.split("."):
        if not isinstance(config, Mapping) or key not in config:
            return None, key
        config = config[key]
    return config, ""
