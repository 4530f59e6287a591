"""Layers that multiply, with the linear ones around taken in. In: arrays of layers. Out: steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tnsim.names import DOWN, SKIP, UNIT, WEIGHT


class Step(NamedTuple):
    """`down (leg_1 x * leg_2 x * ...) + copy x`; `copy` is None without a skip.

    Linear layers that follow are in `down` and `copy`.
    """

    legs: list[Any]
    down: Any
    copy: Any


def steps_of(layers: list[dict[str, Any]]) -> tuple[Any, list[Step]]:
    """The linear map before the first layer that multiplies, None where there is none, and steps.

    Args:
        layers: Arrays by role, from `tensors.lifted.arrays`.

    Example:
        >>> square = {"LEFT": np.eye(1), "RIGHT": np.eye(1), "DOWN": np.eye(1)}
        >>> before, steps = steps_of([square, {"WEIGHT": np.array([[3.0]])}])
        >>> before is None, steps[0].down
        (True, array([[3.]]))
    """
    before, steps = None, []
    for roles in layers:
        if WEIGHT not in roles:
            steps.append(_step(roles))
        elif steps:
            last, weight = steps[-1], roles[WEIGHT]
            copy = None if last.copy is None else weight @ last.copy
            steps[-1] = Step(last.legs, weight @ last.down, copy)
        else:
            before = roles[WEIGHT] if before is None else roles[WEIGHT] @ before
    return before, steps


def _step(roles: dict[str, Any]) -> Step:
    legs = [array for role, array in sorted(roles.items()) if role not in (DOWN, SKIP, UNIT)]
    if SKIP not in roles:
        return Step(legs, roles[DOWN], None)
    skip = roles[SKIP]  # the factor of the input, at the constant's place
    return Step(legs, roles[DOWN], skip[0] * np.eye(len(skip), dtype=skip.dtype))
