"""The models of a store, which may become more, and the records that all of their pairs need.

*Nothing that is finished changes.* Tiles round by their cut, so the cut of earlier pairs stays. The
list of a store says with which *growth* every model came, the models of the first run with growth
0, and how the pairs of each growth are computed. With models 0..n in the store and n..m new, all
pairs need

    within:  all pairs of n..m,
    across:  models n..m as rows, models 0..n as columns,

and a run of rows against other columns, of which r..s and c..d are new,

    rows:     rows r..s, columns 0..c,
    columns:  rows 0..s, columns c..d.

Each is a *grid* of tiles of blocks of models. So the records of a store follow from its list, in
every process alike: a run that is killed goes on with equal tiles, and numbers of earlier pairs are
those on disk, bit for bit. New pairs are planned for themselves, by the route of the first run
where this route holds the new models.

*Which runs continue a store.* The models of the store must be among the models given, in order. A
run over the models that the store had after any growth reads what there is of them. All else is
another run, which is refused.

*Models are told by their digests alone*, in lists and in records: labels and names are those of the
run that asks, and models with equal weights are one model, wherever they stand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tnsim.all_pairs import preparation
from tnsim.all_pairs import store as stores
from tnsim.all_pairs.preparation import PairwiseRun, Place
from tnsim.all_pairs.result import Doubt, Pairwise, labelled
from tnsim.all_pairs.store import (
    FINISHED,
    LISTS,
    MODELS,
    RUN,
    Leases,
    Record,
    State,
    Store,
    remove,
    sides,
)
from tnsim.all_pairs.work import Work, complete, forgetting, pairs_in
from tnsim.errors import DamagedStore, StoreMismatch

Hashes: TypeAlias = tuple[str, ...]


class Growth(NamedTuple):
    """What a store needs of the models that came at once.

    Attributes:
        new: Distinct models of each side that were not known.
        pairs: Rows and columns of their pairs, by name. Pairs "within" a list are mirrored.
    """

    new: Mapping[str, Hashes]
    pairs: Mapping[str, tuple[Hashes, Hashes]]


class Grid(NamedTuple):
    """Records of blocks of models that are cut alike.

    Attributes:
        growth: Number of the growth with which the models came.
        records: All squared norms of one list, or all tiles.
    """

    growth: int
    records: tuple[Record, ...]


def opened(run: PairwiseRun, place: Place | None) -> tuple[Store, list[str]]:
    """The store of a run: in memory without a place, else new, continued or grown.

    Args:
        run: Run over all models.
        place: Folder of the store, and the part that is compared; None for a run in memory.

    Returns:
        The store with all records that are there, and the labels of what was damaged.

    Raises:
        ModelError: A model is a plain function without a digest that holds in other processes.
        StoreMismatch: The path holds another run, or something other than a store.
        TnsimError: The store cannot be written.
    """
    ours = preparation.attributes_of(run, None if place is None else place.parts)
    if place is None:
        return Store.of(ours), []
    path, part = place.path, place.part
    stores.refuse_links(path)
    attrs, lists, damaged = _continued(place, ours, run)
    if lists:
        with stores.writing(path):
            path.mkdir(parents=True, exist_ok=True)
            with Leases(path) as leases:
                leases.wait(LISTS)
                # Read again: another process may have written the lists meanwhile.
                attrs, lists, _ = _continued(place, ours, run)
                for kind, content in lists.items():
                    file = stores.list_file(path, kind, part)
                    if content is None:
                        remove(file)
                    else:
                        stores.write_list(file, content)
    store = Store.of(attrs, path, part)
    return store, [*damaged, *_fetched(store)[State.DAMAGED]]


def _continued(
    place: Place, ours: Mapping[str, Any], run: PairwiseRun
) -> tuple[Mapping[str, Any], dict[str, Mapping[str, Any] | None], tuple[str, ...]]:
    """The attributes of the store's run over the given models, lists to write, and damaged lists.

    A list that is None is to be removed.

    Raises:
        StoreMismatch: Models of the store are not among the models given, in order.
    """
    found = stores.stated(place.path, place.part)
    lists: dict[str, Mapping[str, Any] | None] = {}
    if found.run is None or _named(place, RUN) in found.damaged:
        lists[RUN] = stores.identity(ours)
    if found.run is not None:
        stores.check(place.path, found.run, ours)
    if found.attrs is None:
        return ours, {**lists, MODELS: ours}, found.damaged
    stored = found.attrs
    if _named(place, MODELS) in found.damaged:
        lists[MODELS] = stored
    if _named(place, FINISHED) in found.damaged:
        lists[FINISHED] = None  # the end of this run tells it again
    if sides(ours) == sides(stored):
        # The latest state of the store is tried first. Only that state may be grown; an earlier one
        # is only read, where the models given are exactly its models.
        for growth in reversed(range(len(stored["growths"]))):
            earlier = _state(stored, growth)
            if all(earlier[f"hash_{side}"] == ours[f"hash_{side}"] for side in sides(ours)):
                return earlier, lists, found.damaged
        grown = _grown(stored, ours, run)
        if grown is not None:
            return grown, {**lists, MODELS: grown}, found.damaged
    stores.check_models(place.path, stored, ours)
    raise AssertionError("models that do not match differ in a list of digests")


def _named(place: Place, kind: str) -> str:
    return stores.list_file(place.path, kind, place.part).name


def _state(attrs: Mapping[str, Any], growth: int) -> Mapping[str, Any]:
    """The attributes of a store as they were after a growth."""
    state = {**attrs, "growths": attrs["growths"][: growth + 1]}
    for side in sides(attrs):
        kept = [since <= growth for since in attrs[f"since_{side}"]]
        for name in ("hash", "labels", "names", "since"):
            state[f"{name}_{side}"] = list(itertools.compress(attrs[f"{name}_{side}"], kept))
    return state


def _since(
    stored: Iterable[tuple[str, int]], given: Iterable[str], growth: int
) -> list[int] | None:
    """The growths with which the given models came, for models that are not stored the given one.

    None where a stored model is not given, or not in this order.
    """
    # Stored models are looked for in the order given; `waiting` ends with the next one to be found.
    waiting, since = list(stored)[::-1], []
    for model in given:
        is_known = bool(waiting) and waiting[-1][0] == model
        since.append(waiting.pop()[1] if is_known else growth)
    return None if waiting else since


def _grown(
    stored: Mapping[str, Any], ours: Mapping[str, Any], run: PairwiseRun
) -> dict[str, Any] | None:
    """The attributes of a store with further models; None where it holds others than the run.

    Args:
        stored: Attributes of the store.
        ours: Attributes of the run over all models.
        run: Run over all models.

    Raises:
        StoreMismatch: Similarities of the new pairs have standard errors, and those of the first
            run have none, or the other way round.
    """
    number = len(stored["growths"])
    grown = {**stored, "growths": [*stored["growths"], stored["growths"][-1]]}
    # What is said of all models: a later one may be deeper, or not quite what its file holds.
    grown |= {name: ours[name] for name in ("exact", "caveats")}
    for side in sides(stored):
        known = zip(stored[f"hash_{side}"], stored[f"since_{side}"], strict=True)
        since = _since(known, ours[f"hash_{side}"], number)
        if since is None:
            return None
        grown |= {f"{name}_{side}": ours[f"{name}_{side}"] for name in ("hash", "labels", "names")}
        grown[f"since_{side}"] = since
    first = stored["growths"][0]["route"]
    planned = _run_of(grown, number, run, first)
    if planned is not None:
        attrs = preparation.attributes_of(planned)
        if attrs["estimates"] != stored["estimates"]:
            raise StoreMismatch(
                f"similarities of the first models are computed by {first}, those of the new "
                f"models by {planned.estimate.route}, and only one of both has standard errors; "
                "give another store"
            )
        grown["growths"][-1] = attrs["growths"][0]
    return grown


def _run_of(
    attrs: Mapping[str, Any], growth: int, run: PairwiseRun, route: str
) -> PairwiseRun | None:
    """The run over the pairs of a growth, by a route where this holds the models.

    Args:
        attrs: Attributes of the store.
        growth: Number of the growth.
        run: Run over all models.
        route: Name of the route.

    Returns:
        The run; None where all models of the growth were known.
    """
    pairs = list(_growths(attrs))[growth].pairs
    if not pairs:
        return None
    # All blocks of pairs together, each model once.
    rows, columns = (
        tuple(dict.fromkeys(itertools.chain.from_iterable(models)))
        for models in zip(*pairs.values(), strict=True)
    )
    others = None if [*pairs] == ["within"] else columns
    return preparation.planned_again(run, rows, others, route)


def _growths(attrs: Mapping[str, Any]) -> Iterator[Growth]:
    """What all pairs of the models of a store need, growth by growth."""
    known: dict[str, dict[str, None]] = {side: {} for side in sides(attrs)}
    for growth in range(len(attrs["growths"])):
        before = {side: (*models,) for side, models in known.items()}
        new = {}
        for side in known:
            both = zip(attrs[f"hash_{side}"], attrs[f"since_{side}"], strict=True)
            # A new model may equal an earlier one; its pairs are known then.
            later = dict.fromkeys(model for model, since in both if since == growth)
            new[side] = tuple(model for model in later if model not in known[side])
            known[side] |= later
        if len(new) == 1:
            pairs = {"within": (new["a"], new["a"]), "across": (new["a"], before["a"])}
        else:
            pairs = {"rows": (new["a"], before["b"]), "columns": ((*known["a"],), new["b"])}
        yield Growth(new, {name: both for name, both in pairs.items() if all(both)})


def grids_of(store: Store) -> list[Grid]:
    """All records that the models of a store need, norms before the tiles that they normalise."""
    attrs = store.attrs
    grids = []
    for growth, (new, pairs) in enumerate(_growths(attrs)):
        tile = attrs["growths"][growth]["tile"]
        start = "" if store.part is None else f"{store.part}: "
        start += f"grown/{growth}/" if growth else ""

        def cut(models: Hashes, tile: int = tile) -> list[Hashes]:
            return [models[n : n + tile] for n in range(0, len(models), tile)]

        for side, models in new.items():
            norms = [
                Record(f"{start}norms {side} {n}", block, side=side)
                for n, block in enumerate(cut(models))
            ]
            grids.append(Grid(growth, tuple(norms)))
        for name, (rows, columns) in pairs.items():
            label = f"{start}{name} tile" if growth else f"{start}tile"
            tiles = [
                Record(f"{label} {i} {j}", block, other)
                for i, block in enumerate(cut(rows))
                for j, other in enumerate(cut(columns))
                if name != "within" or j <= i  # on and below the diagonal, as tiles are mirrored
            ]
            grids.append(Grid(growth, tuple(tiles)))
    return [grid for grid in grids if grid.records]


def described(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as a result has them, of the attributes of a store."""
    duplicates = added = 0
    for side in sides(attrs):
        models = attrs[f"hash_{side}"]
        duplicates += len(models) - len(set(models))
        added += sum(since > 0 for since in attrs[f"since_{side}"])
    plan, growths = attrs["plan"], len(attrs["growths"]) - 1
    if growths:
        times = "once" if growths == 1 else f"{growths} times"
        plan += f"; grown {times}, by {added} models"
    return {**attrs, "duplicates": duplicates, "plan": plan, "tier": attrs["growths"][0]["tier"]}


def computed(store: Store, run: PairwiseRun, bar: Any, executor: Any) -> list[Doubt]:
    """Compute what a store lacks, growth by growth.

    Args:
        store: Store of the run.
        run: Run over all models.
        bar: A progress bar, advanced by the number of pairs of every finished tile.
        executor: Anything with `submit`; None to compute here.

    Returns:
        The doubts about the numbers computed now.

    Raises:
        ExecutorError: The executor fails.
        TnsimError: The store cannot be written, or a task failed.
    """
    doubts: list[Doubt] = []
    for growth, several in itertools.groupby(grids_of(store), key=lambda grid: grid.growth):
        grids = list(several)
        lacking = [one for grid in grids for one in grid.records if one.label not in store.known]
        if not lacking:
            records = itertools.chain.from_iterable(grid.records for grid in grids)
            bar.update(sum(pairs_in(store, record) for record in records))
            continue
        chosen = store.attrs["growths"][growth]
        planned = _run_of(store.attrs, growth, run, chosen["route"])
        assert planned is not None, "a growth with records has new models"
        planned = preparation.as_stored(planned, chosen["tier"], executor is None)
        with forgetting(planned.job), Leases(store.path) as leases:
            for grid in grids:
                first = grid.records[0]  # no block has more models
                sizes = len(first.rows), len(first.columns or first.rows)
                of_grid = planned._replace(job=planned.job._replace(sizes=sizes))
                work = Work(of_grid, store, grid.records)
                doubts += complete(work, leases, executor, bar)
    if store.path is not None:
        with stores.writing(store.path):
            _finish(store)
        stores.sweep(store.path)
    return doubts


def _finish(store: Store) -> None:
    """Write that all records of the list of a store are there."""
    assert store.path is not None
    files = [stores.list_file(store.path, kind, store.part) for kind in (MODELS, FINISHED)]
    (_, listed), (_, finished) = map(stores.read_list, files)
    # Another process may have more models by now.
    if listed == store.attrs != finished:
        stores.write_list(files[1], store.attrs)


def _fetched(store: Store) -> dict[State, list[str]]:
    """Fetch every record and return the labels of the records in each state.

    Where the run was finished, every record was written, so a record missing now was lost.
    """
    assert store.path is not None
    labels: dict[State, list[str]] = {state: [] for state in State}
    # The end is read first, as another process may write it while the records are read.
    _, finished = stores.read_list(stores.list_file(store.path, FINISHED, store.part))
    for grid in grids_of(store):
        for record in grid.records:
            labels[store.fetch(record)].append(record.label)
    growths = store.attrs["growths"]
    if finished is not None and finished["growths"][: len(growths)] == growths:
        labels[State.DAMAGED] += labels[State.MISSING]
        labels[State.MISSING] = []
    return labels


def read(path: Path, part: str | None = None) -> tuple[Pairwise, list[str]] | None:
    """The result in a store, or that of one part in it, as it is on disk.

    Args:
        path: Folder of the store.
        part: Name of the part; None for whole models.

    Returns:
        The result and the labels of norms and tiles that are missing; None where no model was
        compared.

    Raises:
        StoreMismatch: There is no store.
        DamagedStore: Part of the store differs from what was written.
    """
    found = stores.stated(path, part)
    _refuse(path, found.damaged)
    if found.attrs is None:
        return None
    store = Store.of(found.attrs, path, part)
    labels = _fetched(store)
    _refuse(path, labels[State.DAMAGED])
    return labelled(described(store.attrs), store.arrays), labels[State.MISSING]


def _refuse(path: Path, damaged: Sequence[str]) -> None:
    if damaged:
        raise DamagedStore(
            f"{path}: damaged: {stores.listed(damaged)}; run pairwise again with this store to "
            "compute again what was lost, or remove it"
        )
