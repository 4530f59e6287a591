"""The tier in which plans run, and the seconds that they are expected to take.

**Tiers** (`tier_in_use`). On a CPU plans run in NumPy, at once. XLA runs what is on an accelerator,
what is inside a trace of JAX, and what a session asks it to run (`tnsim.Session.tier`). The tier
depends on session and device alone, so equal runs have equal bits.

**Seconds** (`seconds_of`). The seconds of a plan are those of its operations in NumPy, at speeds of
two cores of a usual processor (`costs.host_seconds`). They are written down and measured nowhere:
equal questions are answered by equal routes, to the last bit, on every machine. Nothing is said of
XLA: its time depends on the device, and on what is compiled already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from tnsim.engine.costs import host_seconds
from tnsim.engine.ir.dtypes import ITEM_BYTES
from tnsim.engine.plan import Plan
from tnsim.engine.runtime.binding import prepared
from tnsim.engine.runtime.compiling import default_device
from tnsim.engine.runtime.devices import can_compile
from tnsim.engine.runtime.execution import Tier
from tnsim.engine.runtime.stacking import StackedAxes, stacked_stages
from tnsim.sessions import session

USUAL_CORES = 2
"""Cores of a usual processor, for expected times."""

_SHARING = 0.5  # speed-up of a further thread, as calls of NumPy begin under Python's lock
_CALLING, _BOUND = 2e-4, 2e-5  # seconds that Python takes for a run of a plan, and for a stage


def tier_in_use() -> Tier:
    """The tier in which plans run in the session in use.

    Example:
        >>> import tnsim
        >>> with tnsim.using(tnsim.Session(tier="compile")):
        ...     tier_in_use()
        'compile'
    """
    asked = session().tier
    if asked == "compile":
        return "compile"
    if not can_compile():  # asking for the device would start XLA, which would end the process
        return "interpret"
    return "interpret" if default_device().platform == "cpu" else "compile"


def seconds_of(
    plan: Plan,
    times: int = 1,
    side: int = 1,
    over: Mapping[str, StackedAxes] = MappingProxyType({}),
) -> float:
    """Seconds of a plan in NumPy, at all its moment nodes.

    Args:
        plan: Plan of a single pair.
        times: Number of pairs.
        side: Number of models a side that run together.
        over: Stacked axes of the arrays of a batch, by name; empty where pairs run one by one.

    Example:
        >>> import numpy as np, tnsim
        >>> model = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
        >>> seconds_of(tnsim.plan(model, model).contraction) < 1
        True
    """
    # Models of a batch are stacked along each side, so a batch of two stacked axes is a square of
    # pairs.
    axes = max(map(len, over.values()), default=0)
    item = ITEM_BYTES[plan.dtype]
    stacks, _ = stacked_stages(plan, (side,) * axes, over)
    ready = prepared(plan.whole, item, stacks)
    threads = 1 + _SHARING * (USUAL_CORES - 1)
    once = _CALLING
    for each in ready.rounds:
        alone = [host_seconds(ready.stages[n].program, item) for n in each.stages]
        # A round takes at least its longest stage, and at least its work divided over the threads
        # that it may use.
        once += _BOUND * len(alone) + max(max(alone), sum(alone) / min(threads, each.at_once))
    return math.ceil(times / side**axes) * plan.runs * once
