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

    `.caveats` say what makes the models other functions than the networks they were read from.

    Example:
        >>> Number(0.5, "Gaussian", True)
        Number(0.5, metric='Gaussian', exact=True)
    """

    metric: str
    exact: bool
    caveats: tuple[str, ...]

    def __new__(cls, value: Any, metric: str, exact: bool, caveats: tuple[str, ...] = ()) -> Number:
        self = super().__new__(cls, value)
        self.metric, self.exact, self.caveats = metric, exact, caveats
        return self

    def __repr__(self) -> str:
        return f"Number({float(self)!r}, metric={self.metric!r}, exact={self.exact})"

    def _repr_html_(self) -> str:
        rows = [("metric", self.metric), ("exact", self.exact)]
        rows += [("caveat", caveat) for caveat in self.caveats]
        return html_table(str(self), rows)


class Numbers(np.ndarray):
    """A float64 array with `.metric`, `.exact` and `.caveats`; views and slices keep them.

    Example:
        >>> Numbers([0.5, 1.0], "Gaussian", True)[:1]
        Numbers([0.5], metric='Gaussian', exact=True)
    """

    metric: str | None
    exact: bool | None
    caveats: tuple[str, ...]

    def __new__(
        cls, values: Any, metric: str, exact: bool, caveats: tuple[str, ...] = ()
    ) -> Numbers:
        self = np.array(values, dtype=np.float64).view(cls)
        self.metric, self.exact, self.caveats = metric, exact, caveats
        return self

    def __array_finalize__(self, source: Any) -> None:
        self.metric, self.exact = getattr(source, "metric", None), getattr(source, "exact", None)
        self.caveats = getattr(source, "caveats", ())

    def __repr__(self) -> str:
        values = np.array2string(np.asarray(self), separator=", ", prefix="Numbers(")
        return f"Numbers({values}, metric={self.metric!r}, exact={self.exact})"


class SignedLog(NamedTuple):
    """`sign * exp(log)`; a zero has sign 0 and log -inf. Both are float64 scalars.

    Example:
        >>> SignedLog(1.0, 2.0).log
        2.0
    """

    sign: Any
    log: Any
