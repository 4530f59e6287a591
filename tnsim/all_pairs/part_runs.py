"""Runs over parts: one part after another over all checkpoints, and their results as one.

The pairs of a part are a run of their own, in the store of all parts: its records have the name of
the part in their keys. So a run over parts goes on where it ended, part by part and tile by tile,
and processes may share it.

Parts do not make up a network: tables of positions, biases behind heads, settings, and all tensors
of parts that are not asked for, are its *rest*. The rest of every checkpoint has a digest by name,
and a run over parts says where the rests differ. Checkpoints are equal where all parts and the
rests are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tnsim.all_pairs import store as stores
from tnsim.all_pairs.leases import LISTS, Leases
from tnsim.all_pairs.preparation import Asked, PairwiseRun, Place, prepared
from tnsim.all_pairs.result import Pairwise
from tnsim.all_pairs.sources import content_hash
from tnsim.all_pairs.store import State
from tnsim.circuits.parts import SeriesParts
from tnsim.circuits.standard_parts import KINDS, PartName
from tnsim.errors import DamagedStore, DuplicateWarning, ModelError, StoreMismatch, warn

if TYPE_CHECKING:
    from xarray import Dataset

RESTS = "rests.json"
"""File in the store of a run over parts with the rest of every checkpoint."""

_EMPTY: dict[str, Any] = {"f": np.nan, "i": 0, "U": "", "O": ""}
"""Values that stand for none, by the kind of their type."""
_MEANS = ("mean_share_a", "mean_share_b")
_BLOCK = 2**20  # numbers of a tensor that are in memory for its digest, beside the tensor


def part_runs(
    models: SeriesParts, other: Any, names: Any, asked: Asked, folder: Path | None = None
) -> Iterator[tuple[PartName, PairwiseRun, Place | None]]:
    """The runs of all parts, in order.

    Args:
        models: Parts of the checkpoints.
        other: Parts of other checkpoints, or None.
        names: Labels of the checkpoints, None for their own.
        asked: What is asked of all pairs.
        folder: Folder of the store of all parts, or None.

    Yields:
        Each part, its run, and the place of the run in the store.

    Raises:
        ModelError: `other` has other parts.
    """
    if other is not None and not isinstance(other, SeriesParts):
        raise ModelError(
            "parts are compared with parts: give other=tnsim.parts(other, ...) of a series, found "
            f"{type(other).__name__}"
        )
    if other is not None and (other.names, other.view) != (models.names, models.view):
        raise ModelError(
            f"both series need the same parts, found {len(models)} of kinds "
            f"{', '.join(models.kinds)} and {len(other)} of kinds {', '.join(other.kinds)}"
        )
    parts = {
        "names": [list(name) for name in models.names],
        "distances": list(models.view.distances),
        "norm": models.view.norm,
    }
    for label, name in zip(models, models.names, strict=True):
        others = None if other is None else other[label]
        place = None if folder is None else Place(folder, str(name), parts)
        yield name, prepared(models[label], others, names, asked), place


class Rests(NamedTuple):
    """What belongs to no part of the checkpoints of a run, as digests by name.

    Attributes:
        a: Digests for every checkpoint of the rows.
        b: Digests for every checkpoint of the columns.
    """

    a: list[dict[str, str]]
    b: list[dict[str, str]]

    def differing(self) -> list[str]:
        """The names of what differs between any two checkpoints, in the order of the first."""
        every = [*self.a, *self.b]
        names = dict.fromkeys(name for rest in every for name in rest)
        return [name for name in names if len({rest.get(name) for rest in every}) > 1]


def rests_of(models: SeriesParts, other: SeriesParts | None) -> Rests:
    """What belongs to no part of the checkpoints of a run.

    Args:
        models: Parts of the checkpoints.
        other: Parts of other checkpoints, or None.
    """
    first = models.rests(_digest)
    return Rests(first, first if other is None else other.rests(_digest))


def _digest(value: Any) -> str:
    """The digest of a setting, or of the numbers of an array whatever their precision."""
    if not hasattr(value, "shape"):
        return content_hash(value)
    array = np.asarray(value).reshape(-1)
    blocks = (array[start : start + _BLOCK] for start in range(0, array.size, _BLOCK))
    # A sum with zero turns -0 into 0.
    digests = [content_hash(block.astype(np.float64) + 0.0) for block in blocks]
    return content_hash((tuple(value.shape), digests))


def write_rests(folder: Path, result: Pairwise, rests: Rests) -> None:
    """Write the rests of the checkpoints of a finished run beside its parts.

    Args:
        folder: Folder of the store of all parts.
        result: Result of all parts.
        rests: Rests of the checkpoints.

    Raises:
        DamagedStore: The file is damaged.
        TnsimError: The file cannot be written.
    """
    with stores.writing(folder), Leases(folder) as leases:
        leases.wait(LISTS)  # another process may add the rests of other checkpoints
        kept = _rests_in(folder)
        for side, own in zip("ab", rests, strict=True):
            for label, parts, rest in zip(*_models_of(result, side), own, strict=True):
                kept[side][label] = {"parts": parts, "rest": rest}
        stores.write_list(folder / RESTS, kept)


def read_rests(folder: Path, result: Pairwise) -> Rests | None:
    """The rests of the checkpoints of a result, None where any was not kept.

    Args:
        folder: Folder of the store of all parts.
        result: Result of all parts.

    Raises:
        DamagedStore: The file is damaged.
    """
    kept, found = _rests_in(folder), []
    for side in "ab":
        own = []
        for label, parts in zip(*_models_of(result, side), strict=True):
            known = kept[side].get(label)
            if known is None or known["parts"] != parts:
                return None
            own.append(known["rest"])
        found.append(own)
    return Rests(*found)


def _models_of(result: Pairwise, side: str) -> tuple[list[str], list[str]]:
    """Labels of models, and for each the digest of all its parts."""
    digests = result[f"hash_{side}"].values.T.tolist()
    return list(map(str, result[side].values.tolist())), list(map(content_hash, digests))


def _rests_in(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The rests in a folder; none where there is no file."""
    state, kept = stores.read_list(folder / RESTS)
    if state is State.DAMAGED:
        raise DamagedStore(
            f"{folder}: {RESTS} is damaged; remove the file and run again, and finished parts are "
            "kept"
        )
    return {side: dict(kept[side]) if kept else {} for side in "ab"}


def warn_of_duplicates(result: Pairwise, rests: Rests) -> None:
    """Warn of checkpoints that are equal in all parts and in the rest.

    Args:
        result: Result of all parts.
        rests: Rests of the checkpoints.
    """
    for side, models in _identities(result, rests).items():
        first: dict[str, Any] = {}
        equal = []
        for label, model in zip(result[side].values, models, strict=True):
            if (known := first.setdefault(model, label)) is not label:
                equal.append(f"{label} = {known}")
        if equal:
            warn(
                f"models with identical weights: {stores.listed(equal)}",
                DuplicateWarning,
            )


def _identities(result: Pairwise, rests: Rests) -> dict[str, list[str]]:
    """For each list of checkpoints the digests of all parts and the rest of each."""
    identities = {}
    for side in "a" if result.attrs["symmetric"] else "ab":
        both = zip(_models_of(result, side)[1], getattr(rests, side), strict=True)
        identities[side] = list(map(content_hash, both))
    return identities


def names_in(folder: Path) -> list[PartName]:
    """The parts that a store lists.

    Args:
        folder: Folder of the store.

    Raises:
        StoreMismatch: There is no store of parts.
        DamagedStore: Models have no such parts.
    """
    run = stores.stated(folder).run
    if run is None or run["parts"] is None:
        raise StoreMismatch(f"{folder}: not a store of tnsim.pairwise; give the path of one")
    names = [PartName(*name) for name in run["parts"]["names"]]
    # Labels become names of files, so only parts that models can have are accepted from a file.
    if not all(map(_is_place, names)):
        raise DamagedStore(f"{folder}: damaged: its list of parts; remove it and run again")
    return names


def _is_place(name: PartName) -> bool:
    """Whether a part read from a file is one that models have."""
    numbers = [number for number in (name.layer, name.head) if number is not None]
    return name.kind in KINDS and all(isinstance(number, int) and number >= 0 for number in numbers)


def joined(names: Sequence[PartName], results: Mapping[PartName, Pairwise]) -> Pairwise:
    """The results of all parts as one, over (part, a, b), without the rests of the checkpoints.

    A run that grew has not grown all of its parts yet: pairs that a part lacks are NaN.

    Args:
        names: Places of the parts.
        results: Results of the parts that were begun.

    Returns:
        Variables of the results with the dimension `part` in front, with coordinates `kind`,
        `layer` and `head` of the part, -1 where it has none. Means have no meaning of parts such as
        scores, and are left out.

    Raises:
        StoreMismatch: No part was begun.
    """
    if not results:
        raise StoreMismatch("no part of the run was begun; run pairwise again with this store")
    import xarray

    largest = max(results.values(), key=lambda result: result.similarity.size)
    nothing = largest.isel(a=[], b=[])
    places = {
        "kind": [name.kind for name in names],
        "layer": [-1 if name.layer is None else name.layer for name in names],
        "head": [-1 if name.head is None else name.head for name in names],
    }
    result = xarray.concat(
        [
            _spread(results.get(name, nothing), largest).drop_vars(_MEANS, errors="ignore")
            for name in names
        ],
        xarray.Variable("part", [str(name) for name in names]),
        # Digests differ from part to part, so they have the dimension of parts as well.
        coords=["hash_a", "hash_b"],
        compat="override",
        join="override",
        combine_attrs="override",
    )
    result = result.assign_coords({name: ("part", values) for name, values in places.items()})
    return result.assign_attrs(_attributes(results))  # type: ignore[return-value]


def with_rests(result: Pairwise, rests: Rests) -> Pairwise:
    """A result over parts that says where the rests of the checkpoints differ.

    Args:
        result: Result of all parts.
        rests: Rests of the checkpoints.

    Returns:
        The result with the variable `rest_differs` (a, b), the number of tensors and settings of
        no part that differ, the attribute `rest`, their names, and `duplicates`, the number of
        checkpoints that are equal to others in all parts and in the rest.
    """
    identities = _identities(result, rests)
    duplicates = sum(len(models) - len(set(models)) for models in identities.values())
    differing = rests.differing()
    codes = [np.array([[rest.get(n, "") for n in differing] for rest in own]) for own in rests]
    counts = np.array([(row != codes[1]).sum(axis=-1) for row in codes[0]], np.int64)
    counts = counts.reshape(len(rests.a), len(rests.b))
    result = result.assign(rest_differs=(("a", "b"), counts))  # type: ignore[assignment]
    return result.assign_attrs(duplicates=duplicates, rest=differing)  # type: ignore[return-value]


def _spread(result: Dataset, like: Dataset) -> Dataset:
    """A result over the models of a larger result; nothing of it where it has other labels."""
    if result.similarity.shape == like.similarity.shape:
        return result
    texts = [
        one.assign_coords({side: one[side].astype(str) for side in "ab"}) for one in (result, like)
    ]
    small, large = ({side: one[side].values for side in "ab"} for one in texts)
    if not all(np.isin(small[side], large[side]).all() for side in "ab"):
        return _spread(result.isel(a=[], b=[]), like)
    empty = {name: _EMPTY[variable.dtype.kind] for name, variable in like.variables.items()}
    spread = texts[0].reindex(large, fill_value=empty)
    kept = [f"{name}{side}" for side in "ab" for name in ("", "name_")]
    return spread.assign_coords({name: like.variables[name] for name in kept})


def _attributes(results: Mapping[PartName, Pairwise]) -> dict[str, Any]:
    """Attributes of all results: plans by kind, every caveat once, exact where all are."""
    plans: dict[str, str] = {}
    for name, result in results.items():
        plans.setdefault(name.kind, result.attrs["plan"])
    every = [result.attrs for result in results.values()]
    caveats = itertools.chain.from_iterable(attrs["caveats"] for attrs in every)
    return {
        **every[0],
        "plan": "; ".join(f"{kind}: {plan}" for kind, plan in plans.items()),
        "exact": min(attrs["exact"] for attrs in every),
        "duplicates": 0,  # equal parts do not make equal models, see `with_rests`
        "caveats": list(dict.fromkeys(caveats)),
    }
