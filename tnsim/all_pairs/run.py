"""The public functions for all pairs of many models.

A run reads every model once for its digest and shape, plans, computes the squared norms block by
block and then the inner products tile by tile. Models with equal digests are one model. Finished
blocks and tiles are kept in the store.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from numpy.typing import DTypeLike

from tnsim.all_pairs import growing, part_runs
from tnsim.all_pairs import store as stores
from tnsim.all_pairs.normalise import Doubt
from tnsim.all_pairs.preparation import Asked, PairwiseRun, Place, attributes_of, prepared
from tnsim.all_pairs.result import Pairwise, labelled, require_xarray
from tnsim.all_pairs.run_plan import in_turn
from tnsim.all_pairs.work import advice
from tnsim.checkpoints.given import check_chooses, given_models, is_path_or_paths
from tnsim.checkpoints.load import Series
from tnsim.circuits.parts import PartSeries, SeriesParts
from tnsim.circuits.standard_parts import PartName
from tnsim.compare.estimates import Estimate
from tnsim.compare.request import estimated, may_estimate, shape_of
from tnsim.engine import precision
from tnsim.engine.budget import Budget
from tnsim.engine.ir.dtypes import dtype_name
from tnsim.engine.runtime.compiling import reporting
from tnsim.errors import ModelError, StoreWarning, warn
from tnsim.long_work import announced
from tnsim.metrics.empirical import Empirical
from tnsim.metrics.metric import Gaussian, as_metric
from tnsim.metrics.protocol import Metric
from tnsim.models.functions import is_function
from tnsim.models.origin import warn_of_caveats
from tnsim.options import checked


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
            for name, run, place in part_runs.part_runs(models, other, names, asked, path):
                bar.set_description(str(name))
                results[name] = _computed(run, place, executor, progress=False)
                bar.update()
        rests = part_runs.rests_of(models, other)
        result = part_runs.joined(models.names, results)
        if path is not None:
            part_runs.write_rests(path, result, rests)
        part_runs.warn_of_duplicates(result, rests)
        return part_runs.with_rests(result, rests)
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
        every = part_runs.part_runs(models, other, None, asked)
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
    names = part_runs.names_in(folder)
    results: dict[PartName, Pairwise] = {}
    missing = []
    for name in names:
        if (found := growing.read(folder, str(name))) is None:
            missing.append(f"{name}: all")
        else:
            results[name], lacking = found
            missing += lacking
    joined = part_runs.joined(names, results)
    for name, result in results.items():
        if result.similarity.size < joined.similarity[0].size:
            missing.append(f"{name}: later models")
    rests = part_runs.read_rests(folder, joined)
    if rests is None:
        missing.append("what belongs to no part")
    _warn_of(missing, path)
    return joined if rests is None else part_runs.with_rests(joined, rests)


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
