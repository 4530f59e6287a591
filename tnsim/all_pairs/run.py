"""The public functions for all pairs of many models.

A run reads every model once for its digest and shape, plans, computes the squared norms block by
block and then the inner products tile by tile. Models with equal digests are one model. Finished
blocks and tiles are kept in the store.

*Parts.* A run over parts takes one part after another over all checkpoints. The pairs of a part are
a run of their own, in the store of all parts: its records have the name of the part in their keys.
So a run over parts goes on where it ended, part by part and tile by tile, and processes may share
it.

Parts do not make up a network: tables of positions, biases behind heads, settings, and all tensors
of parts that are not asked for, are its *rest*. The rest of every checkpoint has a digest by name,
and a run over parts says where the rests differ. Checkpoints are equal where all parts and the
rests are.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from tnsim.all_pairs import growing
from tnsim.all_pairs import store as stores
from tnsim.all_pairs.preparation import Asked, PairwiseRun, Place, attributes_of, prepared
from tnsim.all_pairs.result import Doubt, Pairwise, labelled, require_xarray
from tnsim.all_pairs.sources import content_hash
from tnsim.all_pairs.store import LISTS, Leases, State
from tnsim.all_pairs.ways import in_turn
from tnsim.all_pairs.work import advice
from tnsim.checkpoints.given import check_chooses, given_models, is_path_or_paths
from tnsim.checkpoints.load import Series
from tnsim.circuits.parts import PartSeries, SeriesParts
from tnsim.circuits.standard_parts import KINDS, PartName
from tnsim.compare.request import Estimate, estimated, may_estimate, shape_of
from tnsim.engine import precision
from tnsim.engine.ir.problem import dtype_name
from tnsim.engine.planner import Budget
from tnsim.engine.runtime.compiling import reporting
from tnsim.errors import (
    DamagedStore,
    DuplicateWarning,
    ModelError,
    StoreMismatch,
    StoreWarning,
    warn,
)
from tnsim.long_work import announced
from tnsim.metrics.finite_measures import Empirical
from tnsim.metrics.metric import Gaussian, as_metric
from tnsim.metrics.protocol import Metric
from tnsim.models.functions import is_function
from tnsim.models.model import warn_of_caveats
from tnsim.options import checked

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
    """Write the rests of the checkpoints of a finished run beside its parts, if they are not there.

    Args:
        folder: Folder of the store of all parts.
        result: Result of all parts.
        rests: Rests of the checkpoints.

    Raises:
        DamagedStore: The file is damaged.
        TnsimError: The file cannot be written.
    """
    if read_rests(folder, result) == rests:  # so that a finished store may be read-only
        return
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
    if run is not None and run["parts"] is None:
        raise StoreMismatch(f"{folder}: no model was compared; run pairwise again with this store")
    if run is None:
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


@checked
def pairwise(
    models: Any,
    metric: Metric | str = Gaussian(),
    *,
    other: Any = None,
    dialect: Any = None,
    n_ctx: int | None = None,
    slices: bool = False,
    centred: bool = False,
    dtype: DTypeLike = "float64",
    store: str | os.PathLike[str] | None = None,
    executor: Any = None,
    progress: bool = False,
    budget: Budget = Budget(),
    names: Sequence[Any] | None = None,
) -> Pairwise:
    """Similarity of every pair of models, or of every model with every model of `other`.

    As in every verb the metric follows the models; `other`, which is rarely given, is a keyword.
    Parts of a series, `tnsim.parts(series)`, are compared part by part.

    Args:
        models, other: Sequences of models or combinations, mappings from labels to them, or a
            `tnsim.load` of many files, from which weights are read when needed; modules of
            PyTorch in the place of models, and folders, patterns or paths of files; or both parts
            of a series. Without `other`, all pairs of `models`.
        metric: Metric that weighs the inputs, or its name, such as "symmetric".
        dialect: Dialect of files that are given by their paths, as for `load`. Files of a module
            that is no model run under `Empirical` as copies of the module, all of them in memory.
        n_ctx: Length of the sequences on which models with attention are compared.
        slices: Whether the cosine of every output is computed as well.
        centred: Whether functions are compared without their means over the inputs.
        dtype: Precision of the computation, float64 or float32; the result is float64.
        store: A folder in which finished tiles are kept, so that the same call goes on where an
            earlier call ended, and a call with further models computes the new pairs alone. Models
            are told by their weights, functions and modules under `Empirical` by their outputs on
            its inputs.
        executor: Anything with `submit`, such as a `concurrent.futures` executor (processes must
            not fork) or a `dask.distributed.Client`.
        progress: Whether a progress bar is shown.
        budget: Limits on a single inner product and on the memory of a tile.
        names: Labels of `models`; `other` is labelled by a mapping, as `{"difference": b - a}`.

    Returns:
        A `Pairwise`: float64 similarities of shape (models, others) in [-1, 1], natural
        logarithms and signs of the inner products, and with `slices` also (models, others, d_out).
        Of parts of a series, all with the dimension `part` in front: (parts, models, others), and
        `rest_differs` (models, others), the number of tensors and settings that belong to none of
        the parts and differ; the attribute `rest` names them.

    Raises:
        ModelError: Models cannot be compared, or a model is the zero function.
        StoreMismatch: The store holds another run.
        DamagedStore: The attributes of the store are damaged, and nothing shows to which run it
            belongs.
        ExecutorError: The executor fails.
        TooLarge: A single inner product, or the memory of a tile, is beyond the budget.
        ResultError: The terms of a combination cancel until no digit is left.

    Warns:
        DuplicateWarning: Models have identical weights.
        CaveatWarning: Models are not quite the networks they were read from.
        StoreWarning: Part of the store was damaged and is computed again.
        PrecisionWarning: The largest error among the computed pairs is visible.

    Example:
        >>> import numpy as np, tnsim
        >>> weights = [np.eye(2), np.array([[1.0, 0.0], [0.0, 0.0]])]
        >>> models = [tnsim.Model([tnsim.Linear(w)]) for w in weights]
        >>> tnsim.pairwise(models).similarity.values.round(4).tolist()
        [[1.0, 0.7071], [0.7071, 1.0]]

    Source:
        Paper, equation 2, for every pair.
    """
    require_xarray()
    metric, dtype = as_metric(metric), dtype_name(dtype)
    path = None if store is None else stores.folder(store)
    asked = Asked(metric, slices, dtype, budget, centred, path is not None)
    if isinstance(models, SeriesParts):
        _check_settings_of_parts(slices, dialect, n_ctx)
        results: dict[PartName, Pairwise] = {}
        with _bar(len(models), "part", progress) as bar:
            for name, run, place in part_runs(models, other, names, asked, path):
                bar.set_description(str(name))
                results[name] = _computed(run, place, executor, progress=False)
                bar.update()
        rests = rests_of(models, other)
        result = joined(models.names, results)
        if path is not None:
            write_rests(path, result, rests)
        warn_of_duplicates(result, rests)
        return with_rests(result, rests)
    models, other, metric = _given(models, other, metric, dialect, n_ctx)
    # Every model is read once here; nothing is computed yet.
    run = prepared(models, other, names, asked._replace(metric=metric))
    return _computed(run, None if path is None else Place(path), executor, progress)


def _computed(run: PairwiseRun, place: Place | None, executor: Any, progress: bool) -> Pairwise:
    """The result of a run, the store of which says what is computed already.

    Args:
        run: Run over all models.
        place: Place in the store; None for a run in memory.
        executor: Anything with `submit`; None to compute here.
        progress: Whether a progress bar is shown.
    """
    path = None if place is None else place.path
    store, damaged = growing.opened(run, place)
    if damaged:
        listed = stores.listed(damaged)
        warn(f"{path}: damaged: {listed}; computed again", StoreWarning)
    pairs, estimate = run.models.pairs, run.estimate
    what = f"{pairs:,} inner products by {estimate.route}"
    with announced(what, estimate.seconds, bar=False), _bar(pairs, "pair", progress) as bar:
        try:
            with reporting(partial(_compiling, bar)):
                doubts = growing.computed(store, run, bar, executor)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(advice(path))
            raise
    # What was read from a store has been told of before, except for doubts of the degree alone.
    worst = max([Doubt(run.arithmetic.alone, ""), *doubts])
    precision.warn_of_error(*worst, run.arithmetic)
    warn_of_caveats(run.caveats)
    # Labels, names and caveats are those of this call; the store may have others.
    names = ("caveats", "exact", "labels_a", "labels_b", "names_a", "names_b")
    ours = attributes_of(run)
    attrs = growing.described(store.attrs)
    return labelled({**attrs, **{name: ours[name] for name in names}}, store.arrays)


@checked
def plan_pairwise(
    models: Any,
    metric: Metric | str = Gaussian(),
    *,
    other: Any = None,
    dialect: Any = None,
    n_ctx: int | None = None,
    slices: bool = False,
    centred: bool = False,
    dtype: DTypeLike = "float64",
    budget: Budget = Budget(),
) -> Estimate:
    """The cost of `pairwise` for these arguments.

    Reads every model once.

    Args:
        models, other: Sequences of models or combinations, mappings from labels to them, or a
            `tnsim.load` of many files, from which weights are read when needed; modules of
            PyTorch in the place of models, and folders, patterns or paths of files; or both parts
            of a series, all of which are read. Without `other`, all pairs of `models`.
        metric: Metric that weighs the inputs, or its name, such as "symmetric".
        dialect: Dialect of files that are given by their paths, as for `load`. Files of a module
            that is no model run under `Empirical` as copies of the module, all of them in memory.
        n_ctx: Length of the sequences on which models with attention are compared.
        slices: Whether the cosine of every output is computed as well.
        centred: Whether functions are compared without their means over the inputs.
        dtype: Precision of the computation, float64 or float32; the result is float64.
        budget: Limits on a single inner product and on the memory of a tile.

    Returns:
        An `Estimate` with its `tiles`: the route, scalar multiplications, bytes and seconds; of
        parts, of all together.

    Raises:
        ModelError: Models cannot be compared.
        TooLarge: A single inner product is beyond the budget.

    Example:
        >>> import numpy as np, tnsim
        >>> weights = [np.eye(2), np.array([[1.0, 0.0], [0.0, 0.0]])]
        >>> models = [tnsim.Model([tnsim.Linear(w)]) for w in weights]
        >>> tnsim.plan_pairwise(models).tiles.pairs
        3
    """
    metric, dtype = as_metric(metric), dtype_name(dtype)
    asked = Asked(metric, slices, dtype, budget, centred)
    if isinstance(models, SeriesParts):
        _check_settings_of_parts(slices, dialect, n_ctx)
        # Checkpoints may be equal in some parts, whose pairs are then fewer: every part is read.
        every = part_runs(models, other, None, asked)
        runs = Counter((name.kind, run.estimate) for name, run, _ in every)
        return in_turn([(planned, count) for (_, planned), count in runs.items()])
    models, other, metric = _given(models, other, metric, dialect, n_ctx)
    return prepared(models, other, None, asked._replace(metric=metric)).estimate


@checked
def open_pairwise(path: str | os.PathLike[str]) -> Pairwise:
    """The result in a store, every number of it verified.

    Args:
        path: The folder that was the `store` of a run, or the `--out` of the command.

    Returns:
        A `Pairwise` as the run returns it. Pairs that are not computed yet are NaN.

    Raises:
        StoreMismatch: There is no store.
        DamagedStore: Any part of the store differs from the bytes that were written.

    Warns:
        StoreWarning: The run is not finished.

    Example:
        >>> import tempfile
        >>> import numpy as np, tnsim
        >>> weights = [np.eye(2), np.array([[1.0, 0.0], [0.0, 0.0]])]
        >>> models = [tnsim.Model([tnsim.Linear(w)]) for w in weights]
        >>> folder = tempfile.mkdtemp() + "/run"
        >>> result = tnsim.pairwise(models, store=folder)
        >>> bool((tnsim.open_pairwise(folder).similarity == result.similarity).all())
        True
    """
    require_xarray()
    folder = stores.within_results(stores.folder(path))
    whole = growing.read(folder)
    if whole is not None:
        result, missing = whole
        _warn_of(missing, path)
        return result
    names = names_in(folder)
    results: dict[PartName, Pairwise] = {}
    missing = []
    for name in names:
        if (found := growing.read(folder, str(name))) is None:
            missing.append(f"{name}: all")
        else:
            results[name], lacking = found
            missing += lacking
    whole = joined(names, results)
    for name, result in results.items():
        if result.similarity.size < whole.similarity[0].size:
            missing.append(f"{name}: later models")
    rests = read_rests(folder, whole)
    if rests is None:
        missing.append("what belongs to no part")
    _warn_of(missing, path)
    return whole if rests is None else with_rests(whole, rests)


def _warn_of(missing: Sequence[str], path: str | os.PathLike[str]) -> None:
    """Warn that a run is not finished, where anything is missing."""
    if missing:
        warn(
            f"{path}: not finished: {stores.listed(missing)} missing, whose pairs are NaN; "
            "run pairwise again with this store to go on",
            StoreWarning,
        )


def _check_settings_of_parts(slices: bool, dialect: Any, n_ctx: int | None) -> None:
    """Refuse settings that parts do not have."""
    if dialect is not None or n_ctx is not None:
        raise ModelError(
            "parts are read as their series says: give dialect and n_ctx to tnsim.load, of which "
            "tnsim.parts makes parts"
        )
    if slices:
        raise ModelError(
            "parts have different numbers of outputs: slices are those of one part, "
            "tnsim.pairwise(tnsim.parts(series)[label], slices=True)"
        )


def _given(
    models: Any, other: Any, metric: Metric, dialect: Any, n_ctx: int | None
) -> tuple[Any, Any, Metric]:
    """Both sides of a run as models, see `given_models`, and the metric that compares functions.

    Parts of files stay in their files.
    """
    if isinstance(models, (PartSeries, SeriesParts)):
        return models, other, metric
    inputs = output = None
    if isinstance(metric, Empirical):
        inputs, output = metric.inputs, metric.output
    runs, shape = may_estimate(metric), shape_of(metric)
    first, second = given_models(models, n_ctx, inputs, dialect, output, runs, shape), None
    if other is not None:
        # A dialect for the files of one side says nothing about models on the other.
        of_paths = dialect if is_path_or_paths(other) else None
        second = given_models(other, n_ctx, inputs, of_paths, output, runs, shape)
    # Checkpoints of a series are models; they are read one by one, see `preparation.prepared`.
    sides = [list(side.values()) if isinstance(side, Mapping) else side for side in (first, second)]
    at_hand = [model for side in sides if isinstance(side, list) for model in side]
    if not any(isinstance(side, Series) for side in sides):  # which chooses as it reads
        check_chooses(output, at_hand)
    if any(map(is_function, at_hand)):
        metric = estimated(metric, at_hand, n_ctx)
    return first, second, metric


def _bar(total: int, unit: str, shown: bool) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, unit=unit, desc=f"{unit}s", disable=not shown)


def _compiling(bar: Any, done: int, total: int) -> None:
    """Show on the bar how many programs are compiled, until all are."""
    bar.set_description("pairs" if done == total else f"compiling {done + 1} of {total}")
