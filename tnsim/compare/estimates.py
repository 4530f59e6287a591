"""What a comparison would take: `Estimate`, one class for every route, of a pair and of many."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from tnsim.engine.plan import Plan
from tnsim.engine.planner import Budget
from tnsim.engine.runtime.execution import Tier
from tnsim.errors import TooLarge
from tnsim.long_work import seconds_text
from tnsim.tables import html_table


@dataclass(frozen=True)
class Tiles:
    """How a run over many pairs goes: the matrix of pairs is computed tile by tile.

    Args:
        pairs: Pairs of distinct models.
        side: Models per side of a tile.
        number: Number of tiles.
        together: Number of tiles that may run at once on the cores of a CPU.
        streamed: Whether vectors of models are too large to be kept, and are made again for every
            tile, part by part.
        programs: Number of compiled programs.
        tier: Tier in which plans of pairs run, "interpret" or "compile".
    """

    pairs: int
    side: int
    number: int
    together: int = 1
    streamed: bool = False
    programs: int = 0
    tier: Tier = "compile"


@dataclass(frozen=True)
class Estimate:
    """The costs of the inner products of two models, or of many pairs, along a route.

    Made by `tnsim.plan` and `tnsim.plan_pairwise`, which run nothing. The costs are those of all
    inner products together.

    Args:
        metric: Name of the metric.
        exact: Whether the metric's definition is met exactly.
        route: Way to compute: "contractions" of tensors, sums over "kernels" of hidden units,
            vectors of coefficients ("features", or "receptive fields" of sparse layers), or the
            kind of points of forward passes, "data", "quadrature", "enumeration" or "sampling".
        dtype: Precision of the computation, such as "float64".
        outputs: Names of the inner products: `AB` is `<a|b>`, `AA` and `BB` are squared norms.
        multiplications: Scalar multiplications.
        peak_bytes: Bytes of all arrays alive at once, without the arrays of the models.
        seconds: Expected time of a call that has its plan, on two cores of a usual processor; of
            many pairs without compiling and without reading files. The speed of the machine in use
            plays no part, so equal questions have equal routes, and numbers have equal bits.
        facts: Counts by which a route tells its size, such as ("forward passes", 1000), the passes
            of each model.
        contraction: Plan of the contractions of a pair; None on the other routes.
        tiles: How a run over many pairs goes, with the numbers of its `pairs` of distinct models,
            of models per `side` of a tile, of tiles (`number`), of those that may run at once
            (`together`) and of compiled `programs`, whether vectors are `streamed`, and the `tier`;
            None of a single pair.
        others: Estimates of the other routes that were weighed, the fastest first.
        passed_over: Routes without an estimate, each with the reason.

    Example:
        >>> import numpy as np, tnsim
        >>> model = tnsim.Model([tnsim.Bilinear(*[np.eye(2)] * 3)])
        >>> for metric in (tnsim.Gaussian(), tnsim.Empirical(np.eye(2))):
        ...     estimate = tnsim.plan(model, model, metric)
        ...     print(estimate.route, estimate.multiplications > 0, estimate.peak_bytes > 0)
        contractions True True
        data True True
        >>> print(estimate)
        metric           empirical (on these inputs)
        route            data: 2 forward passes
        inner products   AB, without the norms of a similarity (cosine=True, --cosine)
        multiplications  68 scalar multiplications of float64
        peak memory      0.00 MiB of float64 beside the models
        expected         about 0.006 s
    """

    metric: str
    exact: bool
    route: str
    dtype: str
    outputs: tuple[str, ...]
    multiplications: int
    peak_bytes: int
    seconds: float
    facts: tuple[tuple[str, int], ...] = ()
    contraction: Plan | None = None
    tiles: Tiles | None = None
    others: tuple[Estimate, ...] = ()
    passed_over: tuple[tuple[str, str], ...] = ()

    @property
    def routes(self) -> tuple[Estimate, ...]:
        """This estimate and those of the other routes."""
        return self, *self.others

    def fact(self, name: str) -> int:
        """A count of `facts` by its name. Raises `KeyError` where the route has none."""
        return dict(self.facts)[name]

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, of numbers, texts and lists, without the plan of contractions.

        `facts` stand in a dictionary of their own.
        """
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        del data["contraction"]
        others = [other.as_dict() for other in self.others]
        return data | {
            "outputs": list(self.outputs),
            "tiles": None if self.tiles is None else asdict(self.tiles),
            "facts": dict(self.facts),
            "others": others,
            "passed_over": dict(self.passed_over),
        }

    def to_json(self) -> str:
        """The fields as a JSON object; `contraction` is the document of `Plan.to_json`, or null."""
        plan = None if self.contraction is None else json.loads(self.contraction.to_json())
        return json.dumps(self.as_dict() | {"contraction": plan})

    def __repr__(self) -> str:
        guarantee = "exact" if self.exact else "not exact"
        return (
            f"Estimate({self.metric}, {guarantee}, {self.route}: {', '.join(self.outputs)}; "
            f"{self._costs})"
        )

    def __str__(self) -> str:
        return "\n".join(f"{name:<16} {text}" for name, text in self._table_rows())

    def _repr_html_(self) -> str:
        return html_table("Plan", self._table_rows())

    @property
    def _costs(self) -> str:
        return (
            f"{count_text(self.multiplications)} multiplications, "
            f"{self.peak_bytes / 2**20:,.2f} MiB of {self.dtype}, {seconds_text(self.seconds)}"
        )

    @property
    def _guarantee(self) -> str:
        if self.exact:
            return "on these inputs" if self.route == "data" else "exact"
        return "estimate" if self.route == "sampling" else "approximation"

    @property
    def _products(self) -> str:
        names = ", ".join(self.outputs)
        alone = self.outputs == ("AB",)
        return (
            f"{names}, without the norms of a similarity (cosine=True, --cosine)"
            if alone
            else names
        )

    def _table_rows(self) -> list[tuple[str, str]]:
        """Names and descriptions of the properties that tables show."""
        work = f"{count_text(self.multiplications)} scalar multiplications of {self.dtype}"
        memory = f"{self.peak_bytes / 2**20:,.2f} MiB of {self.dtype} beside the models"
        counted = ", ".join(f"{count_text(number)} {name}" for name, number in self.facts)
        rows = [
            ("metric", f"{self.metric} ({self._guarantee})"),
            ("route", f"{self.route}: {counted}" if counted else self.route),
            ("inner products", self._products),
            ("multiplications", work),
            ("peak memory", memory),
        ]
        if self.contraction is not None:
            rows = [*rows[:-2], *self.contraction.details]
        if self.tiles is not None:
            tiles = self.tiles
            rows[2:3] = [
                ("pairs", f"{tiles.pairs:,}"),
                ("tiles", f"{tiles.number:,} of {tiles.side} x {tiles.side}"),
            ]
            rows[-1] = ("peak memory", f"{self.peak_bytes / 2**20:,.2f} MiB with a tile of models")
            rows.append(("tier", f"{tiles.tier}, {tiles.programs:,} compiled programs"))
        rows.append(("expected", seconds_text(self.seconds)))
        rows += [(f"or {other.route}", other._costs) for other in self.others]
        return rows + [(f"not {route}", why) for route, why in self.passed_over]


def count_text(number: int) -> str:
    """A count as text; a count such as vocab ** n_ctx may be beyond a float.

    Example:
        >>> count_text(1200), count_text(50**12)
        ('1,200', '10^20.4')
    """
    return f"{number:,}" if number < 10**15 else f"10^{math.log10(number):,.1f}"


def work_text(number: int) -> str:
    """A large count with three digits.

    Example:
        >>> work_text(123456), work_text(10**400)
        ('1.23e+05', '10^400.0')
    """
    return f"{number:.3g}" if number < 10**300 else count_text(number)


def check_affordable(
    estimate: Estimate,
    budget: Budget,
    what: str,
    less_work: str,
    less_memory: str,
    program_bytes: int = 0,
) -> None:
    """Raise `TooLarge` where an estimate is beyond the budget.

    Args:
        estimate: Estimate of a route.
        budget: Limits of memory and work.
        what: Words for the computation, the beginning of the message.
        less_work: Advice where there are too many multiplications.
        less_memory: Advice where the arrays are too large.
        program_bytes: Bytes that compiling takes.
    """
    if estimate.multiplications > budget.multiplications:
        raise TooLarge(
            f"{what} takes {work_text(estimate.multiplications)} multiplications, more than the "
            f"budget of {budget.multiplications:.3g}; {less_work}"
        )
    room = budget.room(program_bytes, estimate.peak_bytes)
    if estimate.peak_bytes > room:
        raise TooLarge(
            f"{what} needs {estimate.peak_bytes / 2**30:.3g} GiB, and the budget is "
            f"{room / 2**30:.3g} GiB; {less_memory}"
        )
