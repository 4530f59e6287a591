"""Numbers that a dialect gives, or names. In: arrays by name, a configuration. Out: numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tnsim.checkpoints.named_arrays import NamedArrays
from tnsim.checkpoints.rules import Rule, is_finite
from tnsim.errors import ModelError
from tnsim.models.gradients import requires_grad


def valued(rule: Rule, arrays: NamedArrays) -> Rule:
    """A rule with its numbers in the place of the keys under which they are found.

    Args:
        rule: Of a checked dialect, for one layer.
        arrays: What the file holds, and its configuration.

    Returns:
        The rule, its `scale`, `n_heads` and `rope_base` numbers (the last may be None), and keys
        that are absent None.

    Raises:
        ModelError: Where a number is missing; and as `NamedArrays.get`.

    Example:
        >>> rule = Rule("bilinear", left="l", right="r", residual="additive", scale="config:s")
        >>> valued(rule, NamedArrays({}, {"s": 0.5})).scale
        0.5
    """
    values: dict[str, Any] = {}
    if rule.kind == "attention":
        heads = number(rule.n_heads, "number of heads", arrays)
        base = optional_number(rule.rope_base, "RoPE base", arrays)
        values["n_heads"] = constant(heads, "number of heads")
        values["rope_base"] = constant(base, "RoPE base")
    if rule.residual is not None:
        values["scale"] = number(rule.scale, "residual scale", arrays)
    for name, key in vars(rule).items():
        if isinstance(key, str) and key.endswith("?") and key not in arrays:
            values[name] = None
    return dataclasses.replace(rule, **values)


def number(value: float | str | None, what: str, arrays: NamedArrays) -> Any:
    """A number that a dialect gives.

    Args:
        value: The number, "config:a.b" for an entry of the configuration, or else the key of a
            tensor with one entry. Of "config:a.b|c" the first that is there.
        what: What it is, for messages.
        arrays: What the file holds, and its configuration.

    Returns:
        A finite number.

    Raises:
        ModelError: Where there is none; and as `NamedArrays.get`.

    Example:
        >>> arrays = NamedArrays({}, {"model": {"n_head": 4}})
        >>> number("config:model.n_head", "number of heads", arrays)
        4
    """
    found = optional_number(value, what, arrays)
    if found is None:
        raise ModelError(f"the {what} must be a finite number, found None")
    return found


def optional_number(value: float | str | None, what: str, arrays: NamedArrays) -> Any:
    """As `number`, or None where that is what the dialect or the file gives."""
    found: Any = value
    if isinstance(value, str) and value.startswith("config:"):
        found = _configured(value.removeprefix("config:"), what, arrays.config)
    elif isinstance(value, str):
        found = arrays.single(value)
    if found is not None and not requires_grad(found) and not is_finite(found):
        raise ModelError(f"the {what} must be a finite number, found {found!r}")
    return found


def constant(number: Any, what: str) -> Any:
    """A number that models take as it is.

    Args:
        number: Any, or None.
        what: What it is, for messages.

    Returns:
        The number.

    Raises:
        ModelError: When it requires grad.

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


def _configured(name: str, what: str, config: Mapping[str, Any] | None) -> Any:
    """The entry of the configuration that has such a path."""
    if config is None:
        first = name.partition("|")[0]
        raise ModelError(
            f"the {what} is {first} of config.json or config.yaml, and none is beside it"
        )
    paths = name.split("|")
    found = [_entry(config, path) for path in paths]
    for entry, missing in found:
        if not missing:
            return entry
    first, *others = paths
    missing = found[0][1]
    nor = "".join(f", nor {path}" for path in others)
    raise ModelError(f"the {what} is {first} of the configuration, which has no {missing!r}{nor}")


def _entry(config: Any, path: str) -> tuple[Any, str]:
    """What stands at a path of names, or the first name that is not there."""
    for key in path.split("."):
        if not isinstance(config, Mapping) or key not in config:
            return None, key
        config = config[key]
    return config, ""
