"""Plans of inner products within a budget, for two models and a metric.

`AnyPlan` is the protocol of all plans, by whatever route.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Protocol, runtime_checkable

from tnsim.engine.budget import Budget, within
from tnsim.engine.plan import Plan
from tnsim.engine.planner import LARGE, plan_problem
from tnsim.engine.runtime.devices import backend
from tnsim.engine.search.progress import planning
from tnsim.names import Pair
from tnsim.problems.base import Family
from tnsim.sessions import session

ADVICE = (
    "use GaussianClosure() (an approximation beyond one nonlinear layer), smaller widths, shorter "
    "sequences (n_ctx) or a larger tnsim.Budget"
)
"""Advice where a comparison is beyond its budget."""

_BUSY = {"cpu": 2**20, "gpu": 2**27}
"""Multiplications of one operation that keep all of a device busy, by JAX's name of the device."""


@runtime_checkable
class AnyPlan(Protocol):
    """The answers that every plan of a comparison gives, whichever route computes it.

    `str(plan)` is a table of text with a line for each property.

    Attributes:
        metric: Name of the metric.
        exact: Whether the metric's definition is met exactly.
        route: Way to compute: "contractions", "kernels", "receptive fields", or the kind of points
            of forward passes, "data", "quadrature", "enumeration" or "sampling".
        dtype: Precision of the computation, such as "float64".
        outputs: Names of the inner products: `AB` is `<a|b>`, `AA` and `BB` are squared norms.
        multiplications: Scalar multiplications of all inner products together.
        peak_bytes: Bytes of all arrays alive at once, without the arrays of the models.

    Example:
        >>> import numpy as np, tnsim
        >>> model = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
        >>> for metric in (tnsim.Gaussian(), tnsim.Empirical(np.eye(2))):
        ...     plan = tnsim.plan(model, model, metric)
        ...     print(plan.route, plan.multiplications > 0, plan.peak_bytes > 0)
        contractions True True
        data True True
    """

    @property
    def metric(self) -> str:
        """Name of the metric."""
        ...

    @property
    def exact(self) -> bool:
        """Whether the metric's definition is met exactly."""
        ...

    @property
    def route(self) -> str:
        """The way of the computation."""
        ...

    @property
    def dtype(self) -> str:
        """Precision of the computation."""
        ...

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the inner products."""
        ...

    @property
    def multiplications(self) -> int:
        """Scalar multiplications."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Peak memory in bytes."""
        ...

    def to_json(self) -> str:
        """The plan as a JSON object."""
        ...


def plan_for(
    family: Family,
    pairs: tuple[Pair, ...],
    slices: bool,
    dtype: str,
    large: int = LARGE,
    limit: float = math.inf,
) -> Plan:
    """The plan of some inner products, the same object at every call in a session.

    Args:
        family: Way in which the models and the metric become a problem.
        pairs: Inner products that are wanted.
        slices: Whether outputs are told apart.
        dtype: Precision of the computation.
        large: Elements beyond which an intermediate is computed in chunks.
        limit: Multiplications beyond which planning ends early, see `plan_problem`.

    Raises:
        BeyondLimit: The plan takes more multiplications than the limit.
    """

    def planned() -> Plan:
        # A plan with moment nodes runs once at each, and a budget counts all runs.
        runs = len(family.nodes.points) if family.nodes else 1
        with planning(family.name):
            problem = family.problem(pairs, slices)
            return plan_problem(problem, family.name, family.exact, dtype, large, runs, limit)

    # The limit ends a search and changes no plan.
    return session().results.get((plan_for, family, pairs, slices, dtype, large), planned)


def affordable(
    family: Family, wanted: tuple[Pair, ...], slices: bool, dtype: str, budget: Budget
) -> Plan:
    """A plan of some inner products within the budget. Raises `TooLarge` where none fits."""
    return within(budget, family.name, partial(plan_for, family, wanted, slices, dtype), ADVICE)


def runs_together(plan: Plan, budget: Budget) -> bool:
    """Whether the runs of a plan at all moment nodes become a single run on stacks of moments.

    Small operations then take the time of a single node for all nodes (measured on four cores: 2.5
    ms become 1.1 ms at width 8 and depth 2, 450 ms become 260 ms at width 6 and depth 3). An
    operation that keeps the device busy by itself gains nothing, and XLA multiplies stacks of
    matrices more slowly than matrices (4.6 s become 6.2 s at width 64 and depth 2). The stacks must
    also fit into the budget's memory.
    """
    # The average operation of a run keeps the device busy by itself.
    busy = _BUSY.get(backend(), _BUSY["gpu"])
    if plan.multiplications > busy * plan.runs * plan.whole.length:
        return False
    # An upper bound: arrays that do not depend on the moment are shared by all runs.
    together = plan.runs * plan.peak_bytes
    return together <= budget.room(plan.program_bytes, together)
