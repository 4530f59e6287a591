"""Tensors that no rule uses. In: a dialect, named arrays, layers. Out: names, or a refusal.

A dialect may *ignore* what is no part of the function, such as a step counter, and *leave out* what
is: the model is then another function than the network, and every result says so. Weights that the
forward pass does not use are listed as *unused*.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from typing import Any

from tnsim.checkpoints.dialects import Dialect, is_pattern
from tnsim.checkpoints.named_arrays import KeysDiffer, NamedArrays, to_numpy
from tnsim.errors import ON_INPUTS, CheckpointError, TnsimError, UnsupportedLayer
from tnsim.models.protocol import Layer

NORM = re.compile(
    r"(^|[._])((layer|rms|batch|group)_?norm|norm|ln)(_|\d|\.|$)|norm\d*(\.|$)", re.IGNORECASE
)
BIAS = re.compile(r"(^|[._])bias(_|\d|\.|$)|(^|\.)b(_\w+|\d*)$", re.IGNORECASE)


def check_unused(
    arrays: NamedArrays, dialect: Dialect, layers: Sequence[Layer]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Account for what the rules of a dialect did not ask for.

    Args:
        arrays: After all layers were read.
        dialect: With patterns to ignore and to leave out.
        layers: That were read.

    Returns:
        Names of tensors that are ignored, and of those that are left out.

    Raises:
        KeysDiffer: Where the dialect accounts for one in neither way.
        UnsupportedLayer: Where that is a norm, or where it ignores a norm or a bias.

    Example:
        >>> import numpy as np
        >>> from tnsim.checkpoints.rules import Rule
        >>> dialect = Dialect("mine", (Rule("linear", weight="w"),), ignore=("step",))
        >>> check_unused(NamedArrays({"step": np.array(3)}, None), dialect, [])
        (('step',), ())
    """
    widths = {size for layer in layers for size in (layer.d_in, layer.d_out)}
    ignored: list[str] = []
    left_out: list[str] = []
    surplus: list[str] = []
    to_leave, unused, to_ignore = map(
        _Patterns, (dialect.leave_out, dialect.unused, dialect.ignore)
    )
    for name in arrays.unused():
        if name in to_leave:
            left_out.append(name)
        elif name in unused:
            ignored.append(name)
        elif name in to_ignore:
            _check_ignored(name, arrays.state[name], widths, dialect)
            ignored.append(name)
        else:
            surplus.append(name)
    if surplus:
        raise _unexpected(surplus, dialect)
    return tuple(ignored), tuple(left_out)


class _Patterns:
    """Names, and patterns of names as one regular expression."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._names = {pattern for pattern in patterns if not is_pattern(pattern)}
        several = dict.fromkeys(pattern for pattern in patterns if is_pattern(pattern))
        self._form = re.compile("|".join(map(fnmatch.translate, several)) or r"(?!)")

    def __contains__(self, name: str) -> bool:
        return name in self._names or self._form.match(name) is not None


def _check_ignored(name: str, value: Any, widths: set[int], dialect: Dialect) -> None:
    """Raise `UnsupportedLayer` where a tensor is a norm or a bias, by its name or its role."""
    try:
        array = to_numpy(value, name)
    except CheckpointError:
        return  # text, or a mapping: no numbers that a layer could use
    if array.dtype.kind != "f":
        return  # a counter or a mask
    if NORM.search(name):
        role = "is a normalisation, by its name"
    elif BIAS.search(name):
        role = "is a bias, by its name"
    elif array.ndim == 1 and array.size > 1 and array.size in widths:
        role = f"has {array.size} numbers, one per coordinate: a bias or the gain of a norm"
    else:
        return
    raise UnsupportedLayer(
        f"dialect {dialect.name} ignores {name}, which {role}; "
        f"without it the model is another function. {_choices(name)}"
    )


def _choices(name: str) -> str:
    use = "Name it in the rule of its layer"
    if NORM.search(name):
        use = (
            "Name it in the rule of the layer behind it (norm, norm_weight, norm_bias) and give "
            "norms=inputs, or where it is constant norm_energy"
        )
    return (
        f"{use}; or leave it out knowingly: leave_out in the dialect or in the call; or, where the "
        "forward pass does not use it, list it under unused"
    )


def _unexpected(surplus: list[str], dialect: Dialect) -> TnsimError:
    norm = next(filter(NORM.search, surplus), None)
    if norm is not None:
        return UnsupportedLayer(
            f"{norm} is a normalisation: one that depends on the input is no polynomial. "
            f"{_choices(norm)}. {ON_INPUTS}"
        )
    names = ", ".join(surplus[:8])
    return KeysDiffer(
        f"dialect {dialect.name} does not account for {names}; extend it, or list them under "
        "ignore where they are no part of the function"
    )
