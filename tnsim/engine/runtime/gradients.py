"""Derivatives of a plan's outputs in its arrays, along the pullback of the plan.

`run_kept` runs a plan and keeps what its pullback reads (see `passes/pullback`), and `gradients`
runs the pullback. Each of the two plans runs in the tier that ends first, as any plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tnsim.engine.passes.pullback import Pullback
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.execution import Result
from tnsim.engine.runtime.rates import backend_of


class Kept(NamedTuple):
    """A run of a plan, as its pullback reads it.

    Attributes:
        pullback: Pullback of the plan.
        arrays: Arrays that the pullback reads, by name, without the derivatives in outputs.
    """

    pullback: Pullback
    arrays: dict[str, Any]


def run_kept(pullback: Pullback, arrays: Mapping[str, Any]) -> tuple[Result, Kept]:
    """Run a plan and keep what its pullback reads.

    Args:
        pullback: Pullback of the plan.
        arrays: Name -> array for every name in the shapes of the plan, in the dtype of the plan.

    Returns:
        The result of the plan, and the arrays for `gradients`.
    """
    plan, backward = pullback.forward, pullback.backward
    backend = backend_of(plan)
    result = execution.run(plan, execution.placed(dict(arrays), plan.dtype, backend), backend)
    given = {**arrays, **result.values}
    kept = {name: given[name] for name in backward.shapes if name in given}
    for name, powers in pullback.factors.items():
        exponent = sum(power * result.exponents[n, group] for n, group, power in powers)
        kept[name] = np.ldexp(np.ones((), plan.dtype), -int(exponent))
    for name, constant in pullback.constants.items():
        kept[name] = constant.array(plan.dtype)
    values = {name: result.values[name] for name in pullback.outputs}
    return result._replace(values=values), Kept(pullback, kept)


def gradients(kept: Kept, cotangents: Mapping[str, Any]) -> dict[str, Any]:
    """The derivatives in the arrays of a plan.

    Args:
        kept: Run of the plan.
        cotangents: Derivatives of a number in the mantissas of the plan's outputs, by name.

    Returns:
        Derivatives of the number, by the names of the arrays. An array on which no output depends
        is absent.
    """
    pullback = kept.pullback
    plan = pullback.backward
    backend = backend_of(plan)
    arrays = dict(kept.arrays)
    for name, own in pullback.cotangents.items():
        arrays[own] = np.asarray(cotangents[name])
    arrays = {name: arrays[name] for name in plan.shapes}
    result = execution.run(plan, execution.placed(arrays, plan.dtype, backend), backend)
    return {name: result.values[own] for name, own in pullback.gradients.items()}
