"""The result of a pairwise run. In: arrays and labels. Out: a `Pairwise`, an xarray Dataset that knows its metric.

Dimensions `a` and `b` carry the labels of the models (training steps where the names have them), `output` the
output coordinates of slices. Coordinates `name_a`, `hash_a` (and `_b`) say where a model came from and what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tnsim.errors import MissingExtra

try:
    import xarray
except ImportError:
    raise MissingExtra("xarray", "pairwise", "comparing many models") from None


class Pairwise(xarray.Dataset):
    """Similarities of all pairs, an `xarray.Dataset`.

    Variables: `similarity` (a, b), in [-1, 1]; `log_inner` and `sign` (a, b), the inner product as `sign * exp(log_inner)`;
    `log_norm_a` (a) and `log_norm_b` (b), the logarithms of the squared norms <a|a> and <b|b>; `slices` (a, b, output)
    when they were asked for. Attributes: `metric`, `metric_parameters`, `exact`, `dtype`, `plan`, `symmetric`,
    `duplicates`, `tnsim_version`, `jax_version`.
    """

    __slots__ = ()

    def plot(
        self,
        kind: str = "heatmap",
        variable: str | Sequence[str] = "similarity",
        change_points: Sequence[int] | None = None,
    ) -> Any:
        """A matplotlib figure, as `figures.pairwise` draws it; nothing is shown."""
        from tnsim.analysis import figures

        return figures.pairwise(self, kind, variable, change_points)
