"""A store that grows with its run: pairs of later models are added, pairs of earlier models stay.

*Nothing that is finished changes.* Tiles of earlier pairs were cut for the number of models that
the run had then; a plan for more models would cut other tiles, and other tiles round otherwise. So
a store is never cut anew. Models that are new make new *pieces*, each an ordinary store of a run of
its own. With models 0..n in the store and n..m new, all pairs need

    within:  all pairs of n..m,
    across:  models n..m as rows, models 0..n as columns,

and a run of rows against other columns, of which r..s and c..d are new,

    rows:     rows r..s, columns 0..c,
    columns:  rows 0..s, columns c..d.

Pieces have tiles of their own, planned for their pairs, and keep the route of the first run where
this route holds the new models. So numbers of earlier pairs are those on disk, bit for bit, and a
grown run that is killed goes on with equal tiles. Norms of earlier models are copied.

*Layout.* A store holds the pieces of its n-th growth in the folder `grown/n`, which is moved to its
name as a whole: a process that wants to add models at the same time finds the folder taken, reads
which models are in the store now, and adds the rest. The list of a growth holds the new models of
each side, with their places among all models, as later models need not stand last, and the digest
of all models before it, so that a growth belongs to one state of a store. A mark in the store, or
in the growth before, says that there is a growth, so that a lost one is noticed. Claims, markers,
damage and resuming are those of every store. A process that reads sees finished pairs and the pairs
that are missing.

*Pieces are never merged.* A merged store would be another run's tiles, computed anew or copied
under readers and writers that hold the pieces open, to save what pieces cost: about 40 small files
and 3 ms of the processor a growth for whoever opens the store (60 growths of a model each: 2,400
files, 0.2 s, where a store of all models has 18 files and takes 0.02 s).

*Which runs continue a store.* The models of the store must be among the models given, in order. A
run over the models that the store had at any time reads the pieces of that time. All else is
another run, which is refused.

*Models are told by their digests alone*, in the lists of stores and in their pieces: labels and
names are those of the run that asks, and models with equal weights are one model, wherever they
stand.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tnsim.all_pairs import preparation, tasks
from tnsim.all_pairs import store as stores
from tnsim.all_pairs.claims import Claims
from tnsim.all_pairs.normalise import Doubt
from tnsim.all_pairs.preparation import PairwiseRun, Side, as_stored
from tnsim.all_pairs.sources import Entry, numbered
from tnsim.all_pairs.store import Layout, State, Store
from tnsim.all_pairs.work import complete, units_of_work
from tnsim.errors import DamagedStore, StoreMismatch

FOLDER = "grown"
_MARK = "continued"  # empty file in a store or growth that a growth follows


class Listed(NamedTuple):
    """A model as a store lists it."""

    hash: str
    label: int | str
    name: str


class Growth(NamedTuple):
    """The models that a growth added to a store.

    Attributes:
        added: New models of each side, with their places among all models.
        told: Labels and names of all models of a side, where those of earlier models changed:
            labels of files are numbers as soon as names differ by a number.
    """

    added: Mapping[str, Sequence[tuple[int, Listed]]]
    told: Mapping[str, Sequence[tuple[int | str, str]]]


class Piece(NamedTuple):
    """Pairs that are computed as a run of their own.

    Attributes:
        path: Folder of the piece's store; None for a run in memory.
        rows: Digests of the distinct models of the rows.
        columns: Digests of the models compared with the rows; None for all pairs of `rows`.
    """

    path: Path | None
    rows: tuple[str, ...]
    columns: tuple[str, ...] | None

    def described(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes of the piece, from the attributes of the first run."""
        return {**attrs, "hash_a": [*self.rows], "hash_b": self.columns and [*self.columns]}


@dataclass(frozen=True)
class History:
    """The models of a store, as they were added.

    Args:
        path: Folder of the store; None for a run in memory.
        attrs: Attributes of the first run.
        growths: Models that were added, growth by growth.
        lost: Labels of the growths whose folders are lost.
    """

    path: Path | None
    attrs: Mapping[str, Any]
    growths: tuple[Growth, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def sides(self) -> str:
        """Names of the lists of models."""
        return "a" if self.attrs["hash_b"] is None else "ab"

    def models(self, side: str) -> list[Listed]:
        """The models of a side in the order in which runs gave them."""
        # Places count in the list after the growth, and rise, so models are inserted in this order.
        listed_models = listed(self.attrs, side)
        for growth in self.growths:
            for place, model in growth.added[side]:
                listed_models.insert(place, model)
            if side in growth.told:
                both = zip(listed_models, growth.told[side], strict=True)
                listed_models = [Listed(model.hash, *told) for model, told in both]
        return listed_models

    def first(self, growths: int) -> History:
        """The store as it was after some growths."""
        return History(self.path, self.attrs, self.growths[:growths])

    @property
    def pieces(self) -> list[Piece]:
        """All pieces, each after the pieces with the norms of its models."""
        known = {side: _distinct(model.hash for model in listed(self.attrs, side)) for side in "ab"}
        pieces = [Piece(self.path, known["a"], known["b"] if self.sides == "ab" else None)]
        for n, growth in enumerate(self.growths, 1):
            added = {side: [model.hash for _, model in growth.added[side]] for side in self.sides}
            pieces += self._pieces(n, known, added)
            known |= {side: _distinct([*known[side], *added[side]]) for side in self.sides}
        return pieces

    def _pieces(
        self, n: int, known: Mapping[str, Sequence[str]], added: Mapping[str, Sequence[str]]
    ) -> list[Piece]:
        assert self.path is not None  # a run in memory never grows
        folder = growth_folder(self.path, n)
        # A new model may equal an earlier one; its pairs are known then.
        new = {side: _new(added[side], known[side]) for side in added}
        rows, columns = new["a"], new.get("b", ())
        ranges = []
        if self.sides == "a" and rows:
            ranges = [("within", rows, None), ("across", rows, tuple(known["a"]))]
        if self.sides == "ab" and rows:
            ranges.append(("rows", rows, tuple(known["b"])))
        if columns:
            # Rows r..s are new in the same growth and meet the new columns here, as `rows` has
            # earlier columns only.
            ranges.append(("columns", (*known["a"], *rows), columns))
        return [Piece(folder / name, *lists) for name, *lists in ranges]

    @property
    def described(self) -> dict[str, Any]:
        """Attributes of the run over all models, of which arrays of pairs and labels are made."""
        attrs = dict(self.attrs)
        if not self.growths:
            return attrs
        duplicates = added = 0
        for side in self.sides:
            models = self.models(side)
            added += len(models) - len(self.attrs[f"hash_{side}"])
            duplicates += len(models) - len(_distinct(model.hash for model in models))
            attrs[f"hash_{side}"] = [model.hash for model in models]
            attrs[f"labels_{side}"] = numbered([model.label for model in models])
            attrs[f"names_{side}"] = [model.name for model in models]
        times = "once" if len(self.growths) == 1 else f"{len(self.growths)} times"
        plan = f"{attrs['plan']}; grown {times}, by {added} models"
        return {**attrs, "duplicates": duplicates, "plan": plan}


def listed(attrs: Mapping[str, Any], side: str) -> list[Listed]:
    """The models of a side in the attributes of a run; none where there is no such side."""
    if attrs[f"hash_{side}"] is None:
        return []
    parts = (attrs[f"{name}_{side}"] for name in ("hash", "labels", "names"))
    return [Listed(*columns) for columns in zip(*parts, strict=True)]


def growth_folder(path: Path, n: int) -> Path:
    """The folder of the n-th growth of a store."""
    return path / FOLDER / str(n)


def opened(run: PairwiseRun, path: Path | None) -> History:
    """The store of a run: in memory without a path, else new, continued or grown.

    Args:
        run: Run over all models.
        path: Folder of the store, or None.

    Returns:
        The models of the store, which are those of the run.

    Raises:
        ModelError: A model is a plain function without a digest that holds in other processes.
        StoreMismatch: The path holds another run, or something other than a store.
        DamagedStore: The attributes of the store are damaged beyond repair.
    """
    attrs = preparation.attributes_of(run)
    if path is None:
        return History(None, attrs)
    # Another process may create or grow the store between any two steps, so each turn reads the
    # store again, until the store holds all models of the run.
    lost: tuple[str, ...] = ()
    while True:
        if not path.exists():
            stores.create(path, attrs)
        stores.refuse_links(path)
        earlier = history(path, is_restored=True)
        stores.check(path, earlier.attrs, attrs, settings_alone=True)
        matched, added = _matched(earlier, attrs)
        if not any(added.values()):
            return replace(matched, lost=lost)
        lost = earlier.lost
        _grow(matched, added, run)  # read again: another process may have grown the store first


def history(path: Path, is_restored: bool = False) -> History:
    """The models of the store at `path`.

    Args:
        path: Folder of the store.
        is_restored: Whether the caller restores lost attributes, and grows the store again where
            its last growth is lost.

    Raises:
        StoreMismatch: There is no store.
        DamagedStore: A list of models is lost, or is not the list that was written.
    """
    attrs = stores.restorable(path)[0] if is_restored else stores.attributes(path)
    found = History(path, attrs)
    # Looked at before the folders, as another process may grow the store meanwhile.
    names = [folder.name for folder in (path / FOLDER).glob("*")]
    last = max((int(name) for name in names if name.isdecimal()), default=0)
    for n in itertools.count(1):
        folder = growth_folder(path, n)
        is_marked = os.path.lexists(_mark(path, n))
        if not folder.exists():
            if n < last or (is_marked and not is_restored):
                remedy = f"remove {path / FOLDER} and run" if n < last else "run pairwise"
                raise DamagedStore(
                    f"{folder}: damaged: it is lost, and with it the list of its models; {remedy} "
                    "again with this store to compute its pairs again"
                )
            return replace(found, lost=(f"{FOLDER}/{n}",)) if is_marked else found
        content = stores.read_list(folder)
        if content["before"] != _state(found):
            raise DamagedStore(
                f"{folder}: damaged: it belongs to another store; remove this folder and run again"
            )
        added = {}
        for side, models in content["added"].items():
            added[side] = [(place, Listed(*about)) for place, *about in models]
        found = replace(found, growths=(*found.growths, Growth(added, content["told"])))
    raise AssertionError("a count without end")


def _mark(path: Path, n: int) -> Path:
    """The file that says that a store has its n-th growth."""
    return (path if n == 1 else growth_folder(path, n - 1)) / _MARK


def _state(found: History) -> str:
    """The digest of the first run of a store and of its models."""
    models = [[model.hash for model in found.models(side)] for side in found.sides]
    return stores.digest([stores.run_digest(found.attrs), models])


def _matched(
    earlier_run: History, attrs: Mapping[str, Any]
) -> tuple[History, dict[str, list[int]]]:
    """The store up to the growth that the models given have, and places of the models to add.

    Raises:
        StoreMismatch: Models of the store are not among the models given, in order.
    """
    assert earlier_run.path is not None
    # The latest state of the store is tried first. Only that state may be grown; an earlier one is
    # only read, where the models given are exactly its models.
    for growths in range(len(earlier_run.growths), -1, -1):
        earlier = earlier_run.first(growths)
        added = {}
        for side in earlier_run.sides:
            places = _missing(earlier.models(side), listed(attrs, side))
            if places is not None:
                added[side] = places
        is_last = growths == len(earlier_run.growths)
        if len(added) == len(earlier_run.sides) and (is_last or not any(added.values())):
            return earlier, added
    stores.check(earlier_run.path, earlier_run.described, attrs)
    raise AssertionError("models that do not match differ in a list of digests")


def _missing(stored: Sequence[Listed], given: Sequence[Listed]) -> list[int] | None:
    """Places of the given models that are not stored; None where a stored model is not given."""
    # Stored models are looked for in the order given; `waiting` ends with the next one to be found.
    waiting = [model.hash for model in reversed(stored)]
    missing = []
    for place, model in enumerate(given):
        if waiting and waiting[-1] == model.hash:
            waiting.pop()
        else:
            missing.append(place)
    return None if waiting else missing


def _grow(earlier: History, added: Mapping[str, list[int]], run: PairwiseRun) -> None:
    """Make the folder of the next growth with empty pieces, unless another process was first."""
    assert earlier.path is not None
    ours = preparation.attributes_of(run)
    new: dict[str, list[tuple[int, Listed]]] = {}
    for side in earlier.sides:
        models = listed(ours, side)
        new[side] = [(place, models[place]) for place in added[side]]
    grown = History(earlier.path, earlier.attrs, (*earlier.growths, Growth(new, {})))
    place = growth_folder(earlier.path, len(grown.growths))
    added, told = {}, {}
    # Labels and names are written only where those of earlier models changed, as happens when
    # numbers become names.
    for side, models in new.items():
        added[side] = [[at, *model] for at, model in models]
        given = [(model.label, model.name) for model in listed(ours, side)]
        known = [(str(model.label), model.name) for model in grown.models(side)]
        if known != [(str(label), name) for label, name in given]:
            told[side] = given
    content = {"before": _state(earlier), "added": added, "told": told}
    # The folder is filled under another name and renamed as a whole, so no process sees half a
    # growth. If the rename fails because the folder exists, another process was first.
    with stores.writing(earlier.path):
        place.parent.mkdir(exist_ok=True)
        try:
            with stores.new_folder(place) as folder:
                stores.write_list(folder, content)
                for piece in grown.pieces:
                    if piece.path is not None and piece.path.parent == place:
                        attrs = preparation.attributes_of(_run_of(piece, run, earlier.attrs))
                        stores.write_empty(folder / piece.path.name, attrs)
                folder.rename(place)
                _mark(earlier.path, len(grown.growths)).touch(exist_ok=False)
        except OSError:
            if not place.exists():
                raise


def _run_of(piece: Piece, run: PairwiseRun, first: Mapping[str, Any]) -> PairwiseRun:
    """The run of a piece, by the route of a store where this route holds the models.

    Its models are those of the piece, in the order of the piece.

    Args:
        piece: Pairs to compute.
        run: Run over all models.
        first: Attributes of the store whose route is kept.

    Raises:
        StoreMismatch: Similarities of the piece have standard errors, and those of the first run
            have none, or the other way round.
    """
    rows, columns = _entries(run.rows), _entries(run.columns)
    asked = (*rows,), None if run.symmetric else (*columns,), run.estimate.route
    if asked == (piece.rows, piece.columns, first["route"]):
        return run  # which is planned already
    if run.symmetric:
        columns = rows
    others = None if piece.columns is None else [columns[digest] for digest in piece.columns]
    run_of_piece = preparation.part_of(
        run, [rows[digest] for digest in piece.rows], others, first["route"]
    )
    attrs = preparation.attributes_of(run_of_piece)
    if attrs["estimates"] != first["estimates"]:
        raise StoreMismatch(
            f"{piece.path}: similarities of the first models are computed by {first['route']}, "
            f"those of the new models by {attrs['route']}, and only one of both has standard "
            "errors; give another path"
        )
    return run_of_piece


def _entries(side: Side) -> dict[str, Entry]:
    return {entry.digest: entry for entry in side.entries}


def damaged(whole: History, pieces: Sequence[tuple[Piece, Store]]) -> list[str]:
    """Labels of what was lost, and of the records that were damaged when pieces were opened."""
    labels = [*whole.lost]
    for piece, target in pieces:
        labels += [_label(whole, piece, label) for label in target.damaged]
    return labels


def computed(
    whole: History, pieces: Sequence[tuple[Piece, Store]], run: PairwiseRun, bar: Any, executor: Any
) -> tuple[dict[str, np.ndarray], list[Doubt]]:
    """Compute what the store lacks, piece by piece.

    Args:
        whole: The models of the store, which are those of the run.
        pieces: Every piece with its store.
        run: Run over all models.
        bar: A progress bar, advanced by the number of pairs of every finished tile.
        executor: Anything with `submit`; None to compute here.

    Returns:
        Arrays of all pairs by name, and the doubts about the numbers computed now.
    """
    arrays = _Arrays(whole)
    doubts: list[Doubt] = []
    for piece, target in pieces:
        if target.is_finished:
            bar.update(_pairs(piece))
        else:
            doubts += _completed(piece, target, arrays, whole, run, bar, executor)
        arrays.put(piece, target)
    if whole.path is not None:
        stores.sweep(whole.path)
        for n in range(len(whole.growths)):
            stores.sweep(growth_folder(whole.path, n + 1))
    return arrays.whole, doubts


def stores_of(whole: History, run: PairwiseRun) -> list[tuple[Piece, Store]]:
    """Every piece with its store."""
    pieces = whole.pieces
    if whole.path is None:
        return [(pieces[0], stores.in_memory(whole.attrs))]
    opened_stores = []
    for n, piece in enumerate(pieces):
        assert piece.path is not None
        # The first piece is the store itself.
        attrs = whole.attrs if n == 0 else piece.described(whole.attrs)
        if not piece.path.exists():  # removed by hand: planned as the growth planned it
            attrs = preparation.attributes_of(_run_of(piece, run, whole.attrs))
        opened_stores.append((piece, stores.opened(piece.path, attrs)))
    return opened_stores


def _completed(
    piece: Piece,
    target: Store,
    arrays: _Arrays,
    whole: History,
    run: PairwiseRun,
    bar: Any,
    executor: Any,
) -> list[Doubt]:
    """Compute the records that a piece lacks."""
    of_piece = as_stored(_run_of(piece, run, target.attrs), target, executor is None)
    # Norms of models that an earlier piece has are copied, never computed again: another plan could
    # round them differently.
    for side in target.layout.sides:
        for record in target.layout.norms(side):
            values = arrays.norms_of(piece, side, record)
            if values is not None and target.fetch(record) is not State.WHOLE:
                target.write(record, values)
    doubts = []
    with tasks.forgetting(of_piece.job), Claims(target.path) as claims:
        for work in units_of_work(of_piece, target, bar):
            doubts += complete(work, target, claims, executor)
    target.finish()
    return doubts


def _pairs(piece: Piece) -> int:
    rows = len(piece.rows)
    return rows * (rows + 1) // 2 if piece.columns is None else rows * len(piece.columns)


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], list[str]]:
    """A store as it is on disk.

    Args:
        path: Folder of the store.

    Returns:
        Attributes of the run, arrays of all pairs by name, and the labels of norms and tiles that
        are missing.

    Raises:
        StoreMismatch: There is no store.
        DamagedStore: Part of the store differs from what was written.
    """
    whole = history(path)
    arrays = _Arrays(whole)
    missing = []
    for n, piece in enumerate(whole.pieces):
        assert piece.path is not None
        if not piece.path.exists():
            raise DamagedStore(
                f"{piece.path}: damaged: it is lost; run pairwise again with {path} to compute its "
                "pairs again"
            )
        target, lacking = stores.read(piece.path)
        if n > 0:
            stores.check(piece.path, target.attrs, piece.described(whole.attrs))
        missing += [_label(whole, piece, label) for label in lacking]
        arrays.put(piece, target)
    return whole.described, arrays.whole, missing


def _label(whole: History, piece: Piece, label: str) -> str:
    """The label of a record, with the place of its piece."""
    if piece.path is None or whole.path is None or piece.path == whole.path:
        return label
    return f"{piece.path.relative_to(whole.path).as_posix()} {label}"


class _Arrays:
    """The arrays of all pairs, filled piece by piece.

    Rows and columns are distinct models, in the order of their first occurrence in the run.
    """

    def __init__(self, whole: History) -> None:
        self._found = whole
        layout = Layout.of(whole.described)
        norms = [name for side in layout.sides for name in layout.norm_arrays(side)]
        self._names = layout.variables
        kept = {name: layout.arrays[name] for name in (*self._names, *norms)}
        self.whole = stores.empty(kept)
        self._places = {}
        for side in whole.sides:
            digests = _distinct(model.hash for model in whole.models(side))
            self._places[side] = {digest: n for n, digest in enumerate(digests)}

    def put(self, piece: Piece, target: Store) -> None:
        """Copy the numbers of a piece."""
        rows = self._at("a", piece.rows)
        columns = rows if piece.columns is None else self._at("b", piece.columns)
        # In the store of one list a piece of rows against columns fills both triangles.
        is_mirrored = piece.columns is not None and self._found.sides == "a"
        for name in self._names:
            values = target.arrays[name]
            self.whole[name][np.ix_(rows, columns)] = values
            if is_mirrored:
                self.whole[name][np.ix_(columns, rows)] = np.swapaxes(values, 0, 1)
        for side, at in (("a", rows), ("b", columns)):
            if side not in target.layout.sides:
                continue
            for name in target.layout.norm_arrays(side):
                known = self.whole[self._stored(name)]
                # A piece that is not finished may lack norms that an earlier piece has.
                known[at] = np.where(np.isnan(known[at]), target.arrays[name], known[at])

    def norms_of(self, piece: Piece, side: str, record: stores.Record) -> list[np.ndarray] | None:
        """The numbers of a record of norms, where all of them are known from earlier pieces."""
        digests = piece.rows if side == "a" else piece.columns or ()
        values = []
        for name, (block,) in record.regions:
            values.append(self.whole[self._stored(name)][self._at(side, digests[block])])
        return None if any(np.isnan(value).any() for value in values) else values

    def _at(self, side: str, digests: Sequence[str]) -> np.ndarray:
        places = self._places[self._side(side)]
        return np.array([places[digest] for digest in digests], int)

    def _side(self, side: str) -> str:
        """The list of models on a side of a piece."""
        return side if self._found.sides == "ab" else "a"

    def _stored(self, name: str) -> str:
        """The array of all models for an array of norms of a piece."""
        # Names of norms end with the side: "log_norm_b" of a piece is "log_norm_a" of a single
        # list.
        return f"{name[:-1]}{self._side(name[-1])}"


def _distinct(digests: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(digests))


def _new(added: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The distinct models among those added that are not known."""
    there = set(known)
    return tuple(digest for digest in _distinct(added) if digest not in there)
