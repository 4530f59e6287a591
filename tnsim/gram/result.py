"""The result of a pairwise run.

In: arrays and labels. Out: a `Pairwise`, an xarray Dataset that knows its metric.

Dimensions `a` and `b` carry the labels of the models (training steps where the names have them),
`output` the output coordinates of slices. Coordinates `name_a`, `hash_a` (and `_b`) say where a
model came from and what it is.

What tnsim adds to a Dataset of this layout, wherever it comes from, stands under
`result.tnsim`, as xarray asks of packages that build on it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tnsim.errors import MissingExtra, TnsimError

if TYPE_CHECKING:
    import xarray
    from matplotlib.figure import Figure
    from xarray import Dataset
else:
    try:
        import xarray
        from xarray import Dataset
    except ImportError:
        xarray, Dataset = None, object


def require_xarray() -> None:
    """Raise `MissingExtra` where there is no xarray: before a run, not at its end."""
    if xarray is not None:
        return
    if importlib.util.find_spec("xarray") is None:
        raise MissingExtra("xarray", "pairwise", "comparing many models")
    raise TnsimError(
        "comparing many models needs xarray, which is installed but cannot be imported: python -c "
        "'import xarray' tells why; too little memory or address space (ulimit -v) is one reason"
    )


class Pairwise(Dataset):
    """Similarities of all pairs, an `xarray.Dataset`.

    Variables: `similarity` (a, b), in [-1, 1]; `log_inner` and `sign` (a, b), the inner product
    as `sign * exp(log_inner)`; `log_norm_a` (a) and `log_norm_b` (b), the logarithms of the
    squared norms <a|a> and <b|b>; `slices` (a, b, output) when they were asked for;
    `standard_error` (a, b) of similarities over a sample, as estimates for its distribution.
    Attributes: `metric`, `metric_parameters`, `exact`, `dtype`, `plan`, `symmetric`, `duplicates`,
    `caveats`, `device`, `tnsim_version`, `jax_version`. Pictures: `result.tnsim.plot()`.
    """

    __slots__ = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_xarray()
        super().__init__(*args, **kwargs)


class ResultAccessor:
    """What tnsim knows of a pairwise result, as `result.tnsim`."""

    def __init__(self, result: Dataset) -> None:
        self._result = result

    @property
    def metric(self) -> str:
        """Name of the metric."""
        return self._result.attrs["metric"]

    @property
    def exact(self) -> bool:
        """Whether the metric's definition is met exactly."""
        return bool(self._result.attrs["exact"])

    def plot(
        self,
        kind: str = "heatmap",
        variable: str | Sequence[str] = "similarity",
        change_points: Sequence[int] | None = None,
        curves: Sequence[str | Sequence[str]] = (),
    ) -> Figure:
        """A matplotlib figure, as `tnsim.figures.pairwise` draws it; nothing is shown.

        Args:
            kind: `"heatmap"`, `"trajectory"`, `"slices"`, `"mds"`, `"dendrogram"` or `"scatter"`.
            variable: The matrix to draw, or several, as panels or lines.
            change_points: Rows at which phases start.
            curves: Variables over `a` to draw above heatmaps, each entry a strip.

        Raises:
            ResultError: For an unknown kind or variable, and for what the picture cannot show.
        """
        from tnsim.analysis import figures

        return figures.pairwise(self._result, kind, variable, change_points, curves)


if xarray is not None:
    xarray.register_dataset_accessor("tnsim")(ResultAccessor)


def labelled(attrs: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Pairwise:
    """The arrays of a run, an entry for each distinct model, with labels: equal models repeated."""
    coordinates: dict[str, Any] = {}
    index: dict[str, np.ndarray] = {}
    for side in "ab":
        stored = "a" if attrs["symmetric"] else side
        digests = attrs[f"hash_{stored}"]
        distinct = {digest: n for n, digest in enumerate(dict.fromkeys(digests))}
        index[side] = np.array([distinct[digest] for digest in digests])
        coordinates[side] = attrs[f"labels_{stored}"]
        coordinates[f"name_{side}"] = (side, attrs[f"names_{stored}"])
        coordinates[f"hash_{side}"] = (side, digests)
        coordinates[f"log_norm_{side}"] = (
            side,
            arrays[f"log_norm_{stored}"][index[side]],
        )
    both = np.ix_(index["a"], index["b"])
    variables: dict[str, Any] = {}
    for name in ("similarity", "log_inner", "sign", "standard_error"):
        if name in arrays:
            variables[name] = (("a", "b"), arrays[name][both])
    variables |= {name: coordinates.pop(name) for name in ("log_norm_a", "log_norm_b")}
    if attrs["slices"]:
        variables["slices"] = (("a", "b", "output"), arrays["slices"][both])
        coordinates["output"] = np.arange(variables["slices"][1].shape[-1])
    known = (
        "metric",
        "metric_parameters",
        "exact",
        "dtype",
        "plan",
        "symmetric",
        "duplicates",
        "caveats",
        "device",
        "tnsim_version",
        "jax_version",
    )
    complete = {"caveats": [], "device": "unknown", **attrs}  # stores of 0.1.0 have neither
    return Pairwise(variables, coordinates, {name: complete[name] for name in known})
