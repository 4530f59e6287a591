"""What stands between layers and is no polynomial. In: calls of a module. Out: its name.

A forward pass may call a function that is no submodule. Where what comes next was given what such a
function makes of the layer before, the refusal can say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tnsim.checkpoints.module_calls import Call
from tnsim.checkpoints.module_forward import require_torch

ENTRYWISE = [
    "relu",
    "gelu",
    "silu",
    "tanh",
    "sigmoid",
    "softplus",
    "elu",
    "leaky_relu",
    "mish",
    "relu6",
    "hardswish",
    "selu",
]
OVER_COORDINATES = ("softmax", "log_softmax", "normalize")
NORMS = ("layer_norm", "rms_norm")


def activation(calls: Sequence[Call], end: np.ndarray) -> str | None:
    """The function between the first of some calls and what follows, alone or as a gate.

    Args:
        calls: Of a module, from a layer on.
        end: Output of the module, which follows the last call.

    Returns:
        Its name in `torch.nn.functional`, None where it is none that is known.
    """
    torch = require_torch()
    first, *rest = calls
    tensor = torch.from_numpy(first.result)
    following = rest[0].given if rest else end
    for name in (*ENTRYWISE, *OVER_COORDINATES, *NORMS):
        settings: dict[str, Any] = {}
        if name in OVER_COORDINATES:
            settings = {"dim": -1}
        elif name in NORMS:
            settings = {"normalized_shape": tensor.shape[-1:]}
        if not tensor.is_floating_point():
            continue
        result = getattr(torch.nn.functional, name)(tensor, **settings).numpy()
        if _same(result, following):
            return name
        gated = len(rest) > 1 and result.shape == rest[0].result.shape
        if gated and _same(result * rest[0].result, rest[1].given):
            return f"a gate by {name}"
    return None


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-9, atol=1e-12)
