"""The first answers of a pairwise run in words: how far, when, how sure, and what to ask next."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from tnsim.analysis.matrices import are_steps, is_one_set, matrix, place_of, square
from tnsim.analysis.phases import segmentations
from tnsim.errors import ResultError, printable

if TYPE_CHECKING:
    import xarray as xr

_SHARP = 2.0
"""Steps of this many median steps are called a change."""
_ROUNDING = 1e-7
"""Distance of unit vectors below which the rounding of their cosine is all there is."""
_PHASES = 3
"""Phases into which a run is divided, as on the page and in the demo."""
_NAMED = 3
"""Most parts of a kind that are named."""


def distance(result: xr.Dataset) -> xr.DataArray:
    """Distances |b - a| of all pairs as functions, see `result.tnsim.distance`.

    Args:
        result: Result with similarities and the logarithms of squared norms.

    Raises:
        ResultError: A distance is beyond float64, or a variable is missing.

    Example:
        >>> import numpy as np, xarray as xr
        >>> norms = {f"log_norm_{side}": (side, np.log([1.0, 9.0])) for side in "ab"}
        >>> run = xr.Dataset({"similarity": (("a", "b"), np.ones((2, 2))), **norms})
        >>> distance(run).values.round(6).tolist()
        [[0.0, 2.0], [2.0, 0.0]]
    """
    for name in ("similarity", "log_norm_a", "log_norm_b"):
        if name not in result:
            raise ResultError(f"the result has no {name}, which distances are made of")
    # |b - a|^2 = (|b| - |a|)^2 + 2 |a| |b| (1 - cos), without a difference of squares.
    with np.errstate(over="ignore"):
        lengths = np.exp(result["log_norm_a"] / 2), np.exp(result["log_norm_b"] / 2)
        apart = (lengths[1] - lengths[0]) ** 2
        apart = apart + 2 * lengths[0] * lengths[1] * (1 - result["similarity"])
    if np.isinf(apart).any():
        raise ResultError(
            "distances of functions are beyond float64 here: scale down the last layer of all "
            "models, which changes no similarity"
        )
    apart: Any = np.sqrt(apart)
    return apart.transpose(*result["similarity"].dims).rename("distance")


def most_changed(result: xr.Dataset, a: Any = None, b: Any = None) -> xr.Dataset:
    """The parts of a result whose functions moved furthest, see `result.tnsim.most_changed`.

    Args:
        result: Result of a run over parts.
        a, b: Labels of two models; None for the first row and the last column.

    Raises:
        ResultError: The result has no parts, or a label is unknown.
    """
    if "part" not in result.dims:
        raise ResultError("the result has no parts: compare tnsim.parts(series)")
    places = {}
    for dim, label, end in (("a", a, 0), ("b", b, -1)):
        places[dim] = end if label is None else place_of(result[dim], label)
        if places[dim] is None:
            shown = ", ".join(map(str, result[dim].values.tolist()[:8]))
            raise ResultError(f"no model is called {label!r} along {dim}: {shown}")
    pair = result.assign(distance=distance(result)).isel(places)[["distance", "similarity"]]
    return pair.isel(part=np.argsort(-pair["distance"].values, kind="stable"))


def copies(result: xr.Dataset) -> dict[int, int]:
    """The rows that repeat a model under a name, such as `model_best`, with the row repeated.

    A label with a number is a step of its own, whatever its weights.

    Args:
        result: Result of a run that compares one set with itself.

    Example:
        >>> import xarray as xr
        >>> labels = {"a": ["1", "2", "model_best"], "hash_a": ("a", ["p", "q", "p"])}
        >>> copies(xr.Dataset(coords=labels))
        {2: 0}
    """
    if "hash_a" not in result.variables:
        return {}
    digests, labels = result["hash_a"].values.tolist(), result["a"].values.tolist()
    named = [row for row, label in enumerate(labels) if not re.search(r"\d", str(label))]
    firsts: dict[str, int] = {}
    # Steps come first: of a step and its copy the step is kept, wherever it stands.
    for row in sorted(range(len(labels)), key=lambda row: row in named):
        firsts.setdefault(digests[row], row)
    return {row: firsts[digests[row]] for row in named if firsts[digests[row]] != row}


def without_copies(result: xr.Dataset) -> xr.Dataset:
    """A run without rows and columns that repeat a model under a name, see `copies`.

    Results that compare two sets, or that have no digests of models, stay as they are.

    Args:
        result: Result of a run.

    Example:
        >>> import numpy as np, xarray as xr
        >>> labels = {name: ["1", "2", "model_best"] for name in "ab"}
        >>> digests = {"hash_a": ("a", ["p", "q", "p"])}
        >>> run = xr.Dataset({"similarity": (("a", "b"), np.ones((3, 3)))}, {**labels, **digests})
        >>> without_copies(run).a.values.tolist()
        ['1', '2']
    """
    if not is_one_set(result):
        return result
    repeated = copies(result)
    kept = [row for row in range(result.sizes["a"]) if row not in repeated]
    return result.isel(a=kept, b=kept) if repeated else result


def findings(result: xr.Dataset) -> list[str]:
    """Sentences that say what a result shows.

    Args:
        result: Result of a run, over parts as well.

    Returns:
        Sentences: the models and the range of similarity; where labels are steps, when the function
        changed, and its phases; of parts those that moved furthest.

    Raises:
        ResultError: A similarity is not finite, or there is no matrix over (a, b).

    Example:
        >>> import numpy as np, xarray as xr
        >>> values = np.array([[1.0, 0.99, 0.2], [0.99, 1.0, 0.21], [0.2, 0.21, 1.0]])
        >>> steps = {"a": [0, 100, 200], "b": [0, 100, 200]}
        >>> for sentence in findings(xr.Dataset({"similarity": (("a", "b"), values)}, steps)):
        ...     print(sentence)
        3 models, 0 to 200: similarity from 0.2 (0 and 200) to 0.99 (0 and 100).
        Changed here: from 100 to 200 (similarity 0.21; the other steps 0.99).
    """
    if "similarity" in result and not np.isfinite(result["similarity"]).all():
        raise ResultError("similarities that are not finite have no summary: finish the run first")
    over_parts = "part" in result.dims
    table = matrix(result.isel(part=0) if over_parts else result)
    one_set = is_one_set(result)
    if over_parts:
        return list(map(printable, _of_parts(result, one_set)))
    result = result.assign(similarity=table)
    repeated = copies(result) if one_set else {}
    kept = without_copies(result)
    said = [_range(kept, one_set), *_of_means(kept, one_set)]
    if repeated:
        labels = result["a"].values
        pairs = [f"{labels[row]} = {labels[first]}" for row, first in repeated.items()]
        said.append(f"Copies are left out: {', '.join(pairs)}.")
    if one_set and kept.sizes["a"] > 2 and are_steps(kept["a"].values):
        said += _changes(kept["similarity"])
    return list(map(printable, said))  # names of files may hold the end of a line


def summary(result: xr.Dataset) -> str:
    """The findings of a result, how sure they are, and what to call next; see `findings`.

    Args:
        result: Result of a run.

    Example:
        >>> import tnsim
        >>> models = [tnsim.Model([tnsim.Linear([[w, 1.0]])]) for w in (1.0, 3.0)]
        >>> print(tnsim.pairwise(models).tnsim.summary())
        2 models, 0 and 1: similarity 0.894.
        Exact under gaussian.
        Next: tnsim.change(a, b) says which part changed.
    """
    said = findings(result)
    if "exact" in result.attrs:
        kind, rest = certainty(result)
        said.append(f"{kind.capitalize()} under {result.attrs['metric']}{rest}.")
    return "\n".join([*said, f"Next: {_advice(result)}."])


def _range(result: xr.Dataset, one_set: bool) -> str:
    values, (rows, columns) = result["similarity"].values, (result[dim].values for dim in "ab")
    counted = (
        f"{len(rows)} models, {rows[0]}" if one_set else f"{len(rows)} x {len(columns)} models"
    )
    if one_set and len(rows) < 2:
        return "1 model: nothing to compare it with."
    if one_set and len(rows) == 2:
        return f"{counted} and {rows[1]}: similarity {_shown(values[0, 1])}."
    # Of one set each pair once, and no model beside itself.
    counts = np.triu(np.ones(values.shape, bool), 1) if one_set else np.ones(values.shape, bool)
    places = [
        np.unravel_index(find(np.where(counts, values, beyond)), values.shape)
        for find, beyond in ((np.argmin, np.inf), (np.argmax, -np.inf))
    ]
    ends = [f"{_shown(values[i, j])} ({rows[i]} and {columns[j]})" for i, j in places]
    counted += f" to {rows[-1]}" if one_set else ""
    return f"{counted}: similarity from {ends[0]} to {ends[1]}."


def _of_means(result: xr.Dataset, one_set: bool) -> list[str]:
    """What the means over the inputs are of the functions, where they make pairs alike."""
    if not {"mean_share_a", "mean_share_b"} <= set(result.variables):
        return []
    sides = [result[f"mean_share_{side}"].values for side in ("a" if one_set else "ab")]
    large = [int(np.count_nonzero(shares > 0.5)) for shares in sides]
    # A pair is alike by its means where both of its models are mostly their means.
    if min(large) < (2 if one_set else 1):
        return []
    most, counted = max(np.nanmax(shares) for shares in sides), sum(map(len, sides))
    return [
        f"More than half of the squared norm is the mean over the inputs in {sum(large)} of "
        f"{counted} models (up to {100 * most:.0f} %): centred=True (--centred) compares without "
        "it."
    ]


def _changes(similarity: xr.DataArray) -> list[str]:
    """When the function changed, by steps between neighbours, and the phases of the run."""
    table = square(similarity)
    labels, along = table["a"].values.tolist(), np.diagonal(table.values, 1)
    steps = np.sqrt(np.maximum(2 - 2 * along, 0.0))  # chords
    largest = int(steps.argmax())
    others = np.delete(steps, largest)
    usual = float(np.median(others))
    # A median alone hides that the steps beside the largest may be nearly as large.
    least, rest = (_shown(1 - size**2 / 2) for size in (float(others.max()), usual))
    if least != rest:
        rest = f"{least} or more, their median {rest}"
    place = f"from {labels[largest]} to {labels[largest + 1]}"
    if steps[largest] < _ROUNDING:
        return ["The function did not change."]
    if steps[largest] < _SHARP * usual:
        said = [
            f"It changed evenly: most {place} (similarity {_shown(along[largest])}), less than "
            f"twice as far as in the other steps ({rest})."
        ]
    else:
        said = [
            f"Changed here: {place} (similarity {_shown(along[largest])}; the other steps {rest})."
        ]
    if len(labels) >= 2 * _PHASES:
        whole, *_, found = segmentations(table, _PHASES)
        within = found.cost / whole.cost
        spans = [
            f"{labels[start]} to {labels[stop - 1]}" if stop - start > 1 else f"{labels[start]}"
            for start, stop in zip(
                (0, *found.change_points), (*found.change_points, len(labels)), strict=True
            )
        ]
        said.append(
            f"The best {_PHASES} phases: {'; '.join(spans)} ({100 * within:.0f} % of the scatter "
            "is within them)."
        )
    return said


def _of_parts(result: xr.Dataset, one_set: bool) -> list[str]:
    """The parts of each kind that moved furthest from the first model to the last."""
    first, last = result["a"].values[0], result["b"].values[-1]
    counted = f"{result.sizes['a']} models" if one_set else "models"
    counted = f"{result.sizes['part']} parts of {counted}"
    if not {"log_norm_a", "log_norm_b", "kind"} <= set(result.variables):
        return [f"{counted}."]  # with similarities alone
    said = [f"{counted}; from {first} to {last} moved furthest:"]
    moved = most_changed(result)
    labels, apart, alike = (moved[name].values for name in ("part", "distance", "similarity"))
    for kind in dict.fromkeys(result["kind"].values.tolist()):
        # Outputs of one kind have one meaning, so that their distances can be compared.
        parts = [
            f"{labels[n]} (|b - a| {apart[n]:.3g}, similarity {_shown(alike[n])})"
            for n in np.flatnonzero((moved["kind"].values == kind) & (apart > 0))[:_NAMED]
        ]
        said.append(f"{kind}: {', '.join(parts) or 'none moved'}.")
    return said


def certainty(result: xr.Dataset) -> tuple[str, str]:
    """What kind of numbers a result has, and how sure they are, in words.

    Args:
        result: Result with its attributes.

    Returns:
        The kind, such as "exact"; and the rest of the sentence, which may be empty.
    """
    about = result.attrs
    apart = ", without means" if about.get("centred") else ""
    if "standard_error" not in result:
        return "exact" if about["exact"] else "an approximation", apart
    errors = result["standard_error"].values
    worst = np.nanmax(errors) if np.isfinite(errors).any() else np.inf
    kind = "on these inputs" if about["exact"] else "estimates"
    return kind, f"{apart}, with standard errors up to {worst:.1g}"


def _advice(result: xr.Dataset) -> str:
    if "part" in result.dims:
        return "result.tnsim.most_changed(), result.tnsim.plot('parts'), result.sel(part=...)"
    ask = "tnsim.change(a, b) says which part changed"
    if result.sizes["a"] <= 2:
        return ask
    return f"result.tnsim.plot() draws all pairs, {ask}"


def _shown(similarity: Any) -> str:
    """A similarity to three digits, or by its difference from 1 where this is small."""
    apart = 1 - float(similarity)
    return f"1 - {apart:.2g}" if 1e-15 < abs(apart) < 5e-3 else f"{float(similarity):.3g}"
