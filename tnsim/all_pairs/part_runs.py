"""Runs over parts: one part after another over all checkpoints, and their results as one.

The pairs of a part are a run of their own, with a store of its own in the folder of all parts. So a
run over parts goes on where it ended, part by part and tile by tile, and processes may share it. A
small file in the folder lists the parts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tnsim.all_pairs import store as stores
from tnsim.all_pairs.result import Pairwise
from tnsim.checkpoints.guard import cause
from tnsim.circuits.parts import PartSeries, SeriesParts
from tnsim.circuits.standard_parts import KINDS, PartName
from tnsim.errors import DamagedStore, ModelError, StoreMismatch, printable
from tnsim.files import json_object, regular, replacing

LIST = "parts.json"
"""File in the folder of a run over parts that lists the parts."""

_KIND = json_object("a list of parts", "parts")
_LONGEST = 2**24  # bytes of a list: a hundred thousand parts


class PartRun(NamedTuple):
    """The run of a single part.

    Attributes:
        name: Place of the part.
        models: The part of every checkpoint.
        other: The part of every checkpoint to compare with; None for all pairs of `models`.
        store: Folder of finished tiles, None for none.
    """

    name: PartName
    models: PartSeries
    other: PartSeries | None
    store: Path | None


def part_runs(
    models: SeriesParts, other: Any, store: str | os.PathLike[str] | None
) -> Iterator[PartRun]:
    """The runs of all parts, in order.

    Args:
        models: Parts of the checkpoints.
        other: Parts of other checkpoints, or None.
        store: Folder of the stores of all parts, or None.

    Yields:
        One run after another. The list of the parts is written before the first.

    Raises:
        ModelError: `other` has other parts.
        StoreMismatch: The folder belongs to another run, or cannot be written.
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
    folder = None
    if store is not None:
        folder = stores.folder(store)
        _begin(folder, models)
    for label, name in zip(models, models.names, strict=True):
        others = None if other is None else other[label]
        yield PartRun(name, models[label], others, folder and _place(folder, name))


def _place(folder: Path, name: PartName) -> Path:
    """The store of a part."""
    return folder / str(name).replace(" ", "-")


def _begin(folder: Path, models: SeriesParts) -> None:
    """Write the list of parts, or check that the list is the same."""
    wanted = {
        "parts": [list(name) for name in models.names],
        "distances": list(models.view.distances),
        "norm": models.view.norm,
    }
    if (folder / LIST).exists():
        listing = _listed(folder)
        if listing != wanted:
            theirs, ours = _in_words(listing), _in_words(wanted)
            raise StoreMismatch(
                f"{folder}: belongs to a run over {theirs}, not over {ours}; give another folder"
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise StoreMismatch(f"{folder}: holds something else than a run over parts; give another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / LIST, _KIND) as temporary:
            temporary.write_text(json.dumps(wanted))
    except OSError as error:
        raise StoreMismatch(f"{folder}: cannot be written: {cause(error)}") from None


def _in_words(run: Mapping[str, Any]) -> str:
    """The contents of a list of parts in words."""
    kinds = ", ".join(dict.fromkeys(name[0] for name in run["parts"]))
    settings = f"distances {run['distances']} and norm {run['norm']!r}"
    return f"{len(run['parts'])} parts of kinds {kinds}, {settings}"


def is_of_parts(folder: Path) -> bool:
    """Whether a folder is the store of a run over parts."""
    return (folder / LIST).is_file()


def stores_of(folder: Path) -> list[tuple[PartName, Path]]:
    """The parts that a folder lists, each with its store.

    Raises:
        DamagedStore: The list is damaged.
    """
    names = [PartName(*name) for name in _listed(folder)["parts"]]
    return [(name, _place(folder, name)) for name in names]


def _listed(folder: Path) -> dict[str, Any]:
    """The contents of the list of parts, checked."""
    try:
        with regular(folder / LIST) as file:
            listing = json.loads(file.read(_LONGEST))
        names = [PartName(*name) for name in listing["parts"]]
        whole = all(isinstance(distance, int) for distance in listing["distances"])
        # Labels become names of folders, so only parts that models can have are accepted from a
        # file.
        places = {str(name) for name in names if _is_place(name)}
        if not (names and whole and len(places) == len(names) and isinstance(listing["norm"], str)):
            raise ValueError("a part has no place")
        return {"parts": [list(name) for name in names], **_settings(listing)}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = printable(cause(error), 200)
        raise DamagedStore(
            f"{folder}: {LIST} is damaged ({reason}); remove the file and run again, and finished "
            "parts are kept"
        ) from None


def _settings(listing: Mapping[str, Any]) -> dict[str, Any]:
    return {"distances": listing["distances"], "norm": listing["norm"]}


def _is_place(name: PartName) -> bool:
    """Whether a part read from a file is one that models have."""
    numbers = [number for number in (name.layer, name.head) if number is not None]
    return name.kind in KINDS and all(isinstance(number, int) and number >= 0 for number in numbers)


def joined(names: Sequence[PartName], results: Sequence[Pairwise | None]) -> Pairwise:
    """The results of all parts as one, over (part, a, b).

    Args:
        names: Places of the parts.
        results: Result of each part, None for a part that was not begun, whose pairs are NaN.

    Returns:
        Variables of the results with the dimension `part` in front, with coordinates `kind`,
        `layer` and `head` of the part, -1 where it has none.

    Raises:
        StoreMismatch: No part was begun.
    """
    known = [result for result in results if result is not None]
    if not known:
        raise StoreMismatch("no part of the run was begun; run pairwise again with this store")
    first = known[0]
    coordinates: dict[str, Any] = {
        "part": [str(name) for name in names],
        "kind": ("part", [name.kind for name in names]),
        "layer": ("part", [-1 if name.layer is None else name.layer for name in names]),
        "head": ("part", [-1 if name.head is None else name.head for name in names]),
    }
    for side in "ab":
        coordinates[side] = first[side].values
        coordinates[f"name_{side}"] = (side, first[f"name_{side}"].values)
        # Digests differ from part to part, so they have the dimension of parts as well.
        hashes = [_of(result, f"hash_{side}", first) for result in results]
        coordinates[f"hash_{side}"] = (("part", side), np.stack(hashes))
    variables = {}
    for name, variable in first.data_vars.items():
        values = np.stack([_of(result, str(name), first) for result in results])
        variables[name] = (("part", *variable.dims), values)
    return Pairwise(variables, coordinates, _attributes(names, results))


def with_all_models(
    results: Sequence[Pairwise | None],
) -> tuple[list[Pairwise | None], list[int]]:
    """Results of parts over the same models: a run that grew has not grown all of its parts yet.

    Args:
        results: Result of each part, None for a part that was not begun.

    Returns:
        Results over the models of the largest result, in which pairs that a part lacks are NaN, and
        the places of the parts that lack pairs.
    """
    known = [result for result in results if result is not None]
    largest = max(known, key=lambda result: result.similarity.size, default=None)
    completed: list[Pairwise | None] = []
    lacking = []
    for place, result in enumerate(results):
        if result is None or largest is None or result.similarity.shape == largest.similarity.shape:
            completed.append(result)
        else:
            completed.append(_spread(result, largest))
            lacking.append(place)
    return completed, lacking


def _spread(result: Pairwise, like: Pairwise) -> Pairwise | None:
    """A result over the models of a larger result; None where these have other labels."""
    # Places of the models of the smaller result among those of the larger one, by label.
    at = {}
    for side in "ab":
        places = {str(label): n for n, label in enumerate(like[side].values.tolist())}
        labels = [str(label) for label in result[side].values.tolist()]
        if not places.keys() >= set(labels):
            return None
        at[side] = [places[label] for label in labels]
    variables: dict[str, Any] = {}
    for name in (*like.data_vars, "hash_a", "hash_b"):
        values = _of(None, str(name), like)
        dims = like[name].dims
        # Only the dimensions a and b differ in length.
        inside = [at.get(str(dim), range(like.sizes[dim])) for dim in dims]
        values[np.ix_(*inside)] = result[name].values
        variables[str(name)] = (dims, values)
    coordinates: dict[str, Any] = {str(name): values for name, values in like.coords.items()}
    coordinates |= {name: variables.pop(name) for name in ("hash_a", "hash_b")}
    return Pairwise(variables, coordinates, result.attrs)


def _of(result: Pairwise | None, name: str, like: Pairwise) -> np.ndarray:
    """A variable of a result; of a part that was not begun, what stands for no value."""
    if result is not None:
        return result[name].values
    missing = np.array(like[name].values)
    empty = {"f": np.nan, "i": 0}.get(missing.dtype.kind, "")
    return np.full_like(missing, empty)


def _attributes(names: Sequence[PartName], results: Sequence[Pairwise | None]) -> dict[str, Any]:
    """Attributes of all results: plans by kind, every caveat once, exact where all are."""
    known = [
        (name, result) for name, result in zip(names, results, strict=True) if result is not None
    ]
    plans = {}
    for name, result in known:
        plans.setdefault(name.kind, result.attrs["plan"])
    caveats = [caveat for _, result in known for caveat in result.attrs["caveats"]]
    return {
        **known[0][1].attrs,
        "plan": "; ".join(f"{kind}: {plan}" for kind, plan in plans.items()),
        "exact": min(result.attrs["exact"] for _, result in known),
        "duplicates": max(result.attrs["duplicates"] for _, result in known),
        "caveats": list(dict.fromkeys(caveats)),
    }
