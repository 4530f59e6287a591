"""Layers that multiply, with the linear ones after them merged in. In: arrays. Out: layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tnsim.names import DOWN, SKIP, UNIT, WEIGHT


class MergedLayer(NamedTuple):
    """`down (leg_1 x * leg_2 x * ...) + copy x`; `copy` is None without a skip.

    The linear layers that follow it are in `down` and `copy`.
    """

    legs: list[Any]
    down: Any
    copy: Any


def merged_layers(layers: list[dict[str, Any]]) -> tuple[Any, list[MergedLayer]]:
    """The linear map before the first layer that multiplies, None without one, and those that do.

    Args:
        layers: Arrays by role, from `tensors.lifted.arrays`.

    Example:
        >>> square = {"LEFT": np.eye(1), "RIGHT": np.eye(1), "DOWN": np.eye(1)}
        >>> before, (layer,) = merged_layers([square, {"WEIGHT": np.array([[3.0]])}])
        >>> before is None, layer.down
        (True, array([[3.]]))
    """
    before, multiplying = None, []
    for roles in layers:
        if WEIGHT not in roles:
            multiplying.append(_multiplying(roles))
        elif multiplying:
            last, weight = multiplying[-1], roles[WEIGHT]
            copy = None if last.copy is None else weight @ last.copy
            multiplying[-1] = MergedLayer(last.legs, weight @ last.down, copy)
        else:
            before = roles[WEIGHT] if before is None else roles[WEIGHT] @ before
    return before, multiplying


def _multiplying(roles: dict[str, Any]) -> MergedLayer:
    legs = [array for role, array in sorted(roles.items()) if role not in (DOWN, SKIP, UNIT)]
    if SKIP not in roles:
        return MergedLayer(legs, roles[DOWN], None)
    skip = roles[SKIP]  # the factor of the input, at the constant's place
    return MergedLayer(legs, roles[DOWN], skip[0] * np.eye(len(skip), dtype=skip.dtype))
