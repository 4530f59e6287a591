"""Numbers that know where they come from.

In: values, a metric's name, its guarantee. Out: NumPy float64.

Outside a JAX trace the verbs return these: they behave as `numpy.float64` and `numpy.ndarray` and
carry `metric`, `exact` and `caveats`. Arithmetic on them gives plain NumPy numbers again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tnsim.tables import html_table


class Number(np.float64):
    """A float64 with `.metric` (name) and `.exact` (its definition is met exactly).

    Where forward passes were run, `.route` says at which points, and `.standard_error` is that of
    the number as an estimate for the distribution that they are drawn from; else both are None.
    `.caveats` say what makes the models other functions than the networks they were read from.

    Example:
        >>> Number(0.5, "Gaussian", True)
        Number(0.5, metric='Gaussian', exact=True)
    """

    metric: str
    exact: bool
    route: str | None
    standard_error: np.float64 | None
    caveats: tuple[str, ...]

    def __new__(
        cls,
        value: Any,
        metric: str,
        exact: bool,
        route: str | None = None,
        standard_error: Any = None,
        caveats: tuple[str, ...] = (),
    ) -> Number:
        self = super().__new__(cls, value)
        self.metric, self.exact, self.caveats = metric, exact, caveats
        self.route, self.standard_error = route, standard_error
        return self

    def __repr__(self) -> str:
        return f"Number({float(self)!r}, {_facts(self)})"

    def _repr_html_(self) -> str:
        rows = [("metric", self.metric), ("exact", self.exact)]
        if self.route is not None:
            rows += [("route", self.route), ("standard error", self.standard_error)]
        rows += [("caveat", caveat) for caveat in self.caveats]
        return html_table(str(self), rows)


class Numbers(np.ndarray):
    """A float64 array with `.metric`, `.exact`, `.route`, `.caveats`; views and slices keep them.

    `.standard_error`, where there is one, is an array of the shape of the whole.

    Example:
        >>> Numbers([0.5, 1.0], "Gaussian", True)[:1]
        Numbers([0.5], metric='Gaussian', exact=True)
    """

    metric: str | None
    exact: bool | None
    route: str | None
    standard_error: np.ndarray | None
    caveats: tuple[str, ...]

    def __new__(
        cls,
        values: Any,
        metric: str,
        exact: bool,
        route: str | None = None,
        standard_error: Any = None,
        caveats: tuple[str, ...] = (),
    ) -> Numbers:
        self = np.array(values, dtype=np.float64).view(cls)
        self.metric, self.exact, self.caveats = metric, exact, caveats
        self.route, self.standard_error = route, standard_error
        return self

    def __array_finalize__(self, source: Any) -> None:
        for name in ("metric", "exact", "route", "standard_error"):
            setattr(self, name, getattr(source, name, None))
        self.caveats = getattr(source, "caveats", ())

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """What arithmetic gives is another number, of which none of this is known."""
        plain = np.asarray(array)
        return plain[()] if return_scalar else plain

    def __repr__(self) -> str:
        values = np.array2string(np.asarray(self), separator=", ", prefix="Numbers(")
        return f"Numbers({values}, {_facts(self)})"


class SignedLog(NamedTuple):
    """`sign * exp(log)`; a zero has sign 0 and log -inf. Inside a trace both are arrays.

    Example:
        >>> sign, log = (Number(x, "Gaussian", True) for x in (1.0, 2.0))
        >>> SignedLog(sign, log).log
        Number(2.0, metric='Gaussian', exact=True)
    """

    sign: Number
    log: Number


def _facts(number: Number | Numbers) -> str:
    """What a number knows of itself, as its constructor takes it."""
    facts = f"metric={number.metric!r}, exact={number.exact}"
    if number.route is not None:
        facts += f", route={number.route!r}"
    if number.standard_error is not None:
        error = np.array2string(np.asarray(number.standard_error), precision=3, separator=", ")
        facts += f", standard_error={error}"
    return facts
