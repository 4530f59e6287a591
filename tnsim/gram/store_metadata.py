"""What a store says about itself, verified. In: a folder, a run's attributes. Out: attributes.

The root of a store holds the attributes of its run, a digest of the metadata file of every array,
and a digest of both. Every array holds the identity of the run as well, so that a root which is
lost can be written again by the run that the store belongs to. Reading here is plain JSON:
nothing damaged ever reaches zarr.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tnsim.errors import DamagedStore, StoreMismatch
from tnsim.files import regular
from tnsim.gram.claims import remove

FORMAT = 3
FILE = "zarr.json"  # of the root and of every array
# what must be equal for a store to be continued, and in which words a difference is told
IDENTITY = ("format", "metric", "metric_parameters", "dtype", "slices", "hash_a", "hash_b")
_CHOSEN = ("route", "tile")  # by whoever began the store
_UNREADABLE = (OSError, ValueError, RecursionError)


def digest(value: Any) -> str:
    """Of anything that JSON can hold, 32 hexadecimal digits."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def binding(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """What every array of a run's store says: whose it is, by digest, and what the run chose."""
    chosen = {name: attrs[name] for name in _CHOSEN}
    return {"run": digest([attrs[name] for name in (*IDENTITY, *_CHOSEN)]), **chosen}


def root(attrs: Mapping[str, Any], folder: Path, arrays: Iterable[str]) -> dict[str, Any]:
    """The attributes of the root of a store whose arrays are in `folder`."""
    files = {name: _file_digest(folder / name / FILE) for name in arrays}
    return {"tnsim": dict(attrs), "arrays": files, "digest": digest([dict(attrs), files])}


def attributes(path: Path) -> dict[str, Any]:
    """The verified attributes of the run in a store.

    Raises:
        StoreMismatch: There is no store, or one of another format.
        DamagedStore: There is one, but its attributes are not those that were written.
    """
    try:
        data = json.loads(_read(path / FILE))
        attrs = data["attributes"]["tnsim"]
        theirs = attrs["format"]
    except (*_UNREADABLE, KeyError, TypeError) as error:
        if _bound(path) is not None:
            raise _damaged(path, "its attributes") from None
        raise StoreMismatch(
            f"{path}: not a store of tnsim.pairwise ({type(error).__name__}: {error}); "
            "give the path of one, or of nothing"
        ) from None
    if theirs != FORMAT:
        raise _other_run(path, _differs("format", theirs, FORMAT))
    found = data["attributes"]
    whole = found.get("digest") == digest([attrs, found.get("arrays")])
    if not whole or (data.get("zarr_format"), data.get("node_type")) != (3, "group"):
        raise _damaged(path, "its attributes")
    return attrs


def damaged_arrays(path: Path) -> list[str]:
    """Arrays whose metadata are not those that were written, where the attributes are verified."""
    files = json.loads(_read(path / FILE))["attributes"]["arrays"]
    return [name for name, known in files.items() if _file_digest(path / name / FILE) != known]


def of_the_same_run(path: Path, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a store that lost them, if it belongs to the run of `attrs`.

    Raises `DamagedStore` where nothing shows that it does.
    """
    bound = _bound(path) or {}
    attrs = {**attrs, **{name: bound.get(name) for name in _CHOSEN}}
    if bound != binding(attrs):
        raise _damaged(path, "its attributes")
    return attrs


def restore(path: Path, fresh: Path) -> None:
    """Put the metadata of a new store in the place of an old one's; its numbers stay."""
    for file in fresh.rglob(FILE):
        target = path / file.relative_to(fresh)
        for place, is_wanted in ((target.parent, Path.is_dir), (target, Path.is_file)):
            if os.path.lexists(place) and not is_wanted(place):
                remove(place)
        target.parent.mkdir(exist_ok=True)
        file.replace(target)


def check(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise `StoreMismatch`, naming the difference, unless `theirs` are those of the run `ours`."""
    for name in IDENTITY:
        if theirs[name] == ours[name]:
            continue
        if name.startswith("hash_"):
            raise _other_run(path, _other_models(name[-1], theirs, ours))
        raise _other_run(path, _differs(name, theirs[name], ours[name]))


def _bound(path: Path) -> dict[str, Any] | None:
    """What the first readable array of a store says about its run, None where nothing does."""
    for file in sorted(path.glob(f"*/{FILE}")):
        try:
            bound = json.loads(_read(file))["attributes"]["tnsim"]
        except (*_UNREADABLE, KeyError, TypeError):
            continue
        if isinstance(bound, dict):
            return bound
    return None


def _read(file: Path) -> bytes:
    """The bytes of a file. Raises `OSError` for anything else: a pipe would never end."""
    with regular(file) as opened:
        return opened.read()


def _file_digest(file: Path) -> str | None:
    try:
        return hashlib.blake2b(_read(file), digest_size=16).hexdigest()
    except OSError:
        return None


def _damaged(path: Path, what: str) -> DamagedStore:
    return DamagedStore(
        f"{path}: damaged: {what} are not those that were written; "
        "run again with this store to restore it, or remove it"
    )


def _other_run(path: Path, what: str) -> StoreMismatch:
    return StoreMismatch(f"{path}: holds another run: {what}; give another path, or remove it")


def _differs(name: str, theirs: Any, ours: Any) -> str:
    return f"{name} {json.dumps(theirs)}, and {json.dumps(ours)} is asked for"


def _other_models(side: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """How the models of one side differ, in words."""
    stored, given = theirs[f"hash_{side}"], ours[f"hash_{side}"]
    if stored is None:
        return "all pairs of one list"
    if given is None:
        return "models against others, and no others are given"
    if len(stored) != len(given):
        return f"{len(stored)} models on side {side}, and {len(given)} are given"
    pairs = zip(stored, given, strict=True)
    first = next(n for n, (one, other) in enumerate(pairs) if one != other)
    label = ours[f"labels_{side}"][first]
    return f"other weights for {label} (side {side}, number {first})"
