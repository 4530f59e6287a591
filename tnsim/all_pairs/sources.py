"""The models of a run, one by one, and their digests.

Two checkpoints with one digest are one network: the same layers with the same numbers in the same
precision. Names, files and the libraries that the arrays came from play no part.

Models come as a sequence, a mapping or a series of checkpoint files, and become entries. An entry
is small: weights stay where they are, in the caller's memory or on disk, and are read again when a
tile needs them. It pickles, so that a task for another process can carry it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tnsim.analysis.matrices import numbered
from tnsim.checkpoints.load import Reading, Series, read
from tnsim.circuits.parts import PartOfFile, PartSeries, SeriesParts
from tnsim.compare.centred import without_mean
from tnsim.engine.planner import Budget
from tnsim.errors import CheckpointError, ModelError
from tnsim.metrics.finite_measures import StoredInputs
from tnsim.metrics.metric import Gaussian
from tnsim.metrics.protocol import Metric, adds_up, points_for
from tnsim.metrics.protocol import Reading as InputsRead
from tnsim.models.arrays import SparseMatrix
from tnsim.models.differences import by_differences
from tnsim.models.functions import Function
from tnsim.models.model import Combination, Model, caveats, check_numbers, check_untraced, terms
from tnsim.options import is_list
from tnsim.problems.layer_kinds import Kinds, kinds

STANDARD = "standard"
_LOOKED_AT, _PLACES = 256, 16  # points at each place of a measure, and places, that tell it
_FED_BYTES = 2**24  # bytes of a file of inputs that are read at once for its digest


def content_hash(model: Any) -> str:
    """The digest of the layers, settings and weights of a model or combination, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, model)
    return digest.hexdigest()


def metric_parameters(metric: Metric, reading: InputsRead) -> str:
    """`standard` for a metric without parameters of its own, else the digest of its parameters.

    A metric from outside may have its numbers in its code. Besides its attributes the number of
    its points counts, and some of them.

    Args:
        metric: Metric of a run.
        reading: Inputs that the models read.
    """
    if type(metric) is Gaussian:
        metric = Gaussian(metric.mean, metric.cov)  # samples are those of its estimate alone
    if adds_up(metric) and not _is_ours(metric):
        points = points_for(metric, reading)
        size = points.aligned(_LOOKED_AT) if points.continuations else _LOOKED_AT
        starts = range(0, points.count, size * max(1, points.count // (size * _PLACES)))
        blocks = [points.block(start, min(start + size, points.count)) for start in starts]
        return content_hash((getattr(metric, "__dict__", None), points.count, blocks))
    if _is_standard(metric):
        return STANDARD
    return content_hash(metric)


def _is_standard(metric: Metric) -> bool:
    if not dataclasses.is_dataclass(metric):
        return not vars(metric)
    fields = dataclasses.fields(metric)
    return all(getattr(metric, field.name) is field.default for field in fields)


def _feed(digest: Any, value: Any) -> None:
    """Feed a value to a digest.

    Fields are fed with their names, arrays with dtype, shape and bytes, so that different models
    feed different bytes. Everything else is fed as its `repr`.
    """
    if isinstance(value, StoredInputs):  # as the array, of which a batch is in memory at once
        digest.update(f"{value.dtype}{value.shape}".encode())
        step = max(1, _FED_BYTES // max(1, value[:1].nbytes))
        for start in range(0, len(value), step):
            rows = value[start : min(start + step, len(value))]
            digest.update(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
    elif hasattr(value, "shape") and not isinstance(value, SparseMatrix):
        array = np.ascontiguousarray(value)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    elif isinstance(value, tuple | list):
        digest.update(f"{'(' if isinstance(value, tuple) else '['}{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, dict):
        digest.update(f"{{{len(value)}".encode())
        for key in sorted(value, key=repr):
            digest.update(f"{key!r}:".encode())
            _feed(digest, value[key])
    elif _is_ours(value) and (content := getattr(value, "content", None)) is not None:
        _feed(digest, content)
    elif _is_ours(value) or dataclasses.is_dataclass(value):  # with all their fields
        digest.update(f"<{type(value).__name__}".encode())
        for name in _state(value):
            digest.update(f".{name}=".encode())
            _feed(digest, getattr(value, name))
    elif type(value).__repr__ is object.__repr__ and hasattr(value, "__dict__"):
        # The default text of an object is its address, which says nothing of its content.
        digest.update(f"<{type(value).__name__}".encode())
        _feed(digest, dict(vars(value)))
    else:
        digest.update(repr(value).encode())


def _state(value: Any) -> list[str]:
    """The names of all attributes that define a value, in order.

    Left out are cached properties, which follow from the others, and the origin of a model.
    """
    names = []
    for name in sorted(vars(value)):
        worked_out = isinstance(getattr(type(value), name, None), cached_property)
        told = isinstance(value, Model) and name == "origin"
        if not (worked_out or told):
            names.append(name)
    return names


def _is_ours(value: Any) -> bool:
    """Whether a value is a model, a layer or a metric of tnsim."""
    return type(value).__module__.startswith("tnsim.")


@dataclass(frozen=True)
class Source:
    """The place of a model's weights, in memory or in a file.

    Args:
        label: Training step, else a name.
        name: Name of the model in messages.
        weights: The model itself, the path of its file, or a part of a file.
        reading: How the file is read.
        centred: Metric under which the mean is taken away; None where means are kept.
        budget: Limits of the computation of the mean.
    """

    label: int | str
    name: str
    weights: Model | Combination | Function | Path | PartOfFile
    reading: Reading = Reading()
    centred: Metric | None = None
    budget: Budget = Budget()

    def read(self) -> Model | Combination | Function:
        """The model as it was given, read from its file where it is in one."""
        if isinstance(self.weights, PartOfFile):
            return self.weights.read()
        if isinstance(self.weights, Path):
            return read(self.weights, *self.reading).model
        return self.weights

    def compared(self, given: Model | Combination | Function) -> Any:
        """The model as it is compared, of the model as it was given."""
        if self.centred is None:
            return given
        return without_mean(given, self.centred, self.budget)

    @property
    def file(self) -> Path | None:
        """The file in which the weights are, None for weights in memory."""
        if isinstance(self.weights, PartOfFile):
            return self.weights.file.path
        return self.weights if isinstance(self.weights, Path) else None


@dataclass(frozen=True)
class Entry:
    """A source that has been read once: digests of its content and its bases, layer kinds, shape.

    Args:
        source: Source from which the model is read again.
        digest: Digest of the content as it was given: the last digits of a mean that is taken away
            depend on the processor.
        bases: Digest and layer kinds of every model that the source adds up.
        d_in: Coordinates of the input; None for a plain function.
        d_out: Coordinates of the output.
        n_ctx: Positions of a sequence; None for vectors.
        terms: Number of terms of the source. It may exceed the number of bases, as a small
            difference of two models is a single base.
        caveats: Differences between the model and the networks that were read.
    """

    source: Source
    digest: str
    bases: tuple[tuple[str, Kinds], ...]
    d_in: int | None
    d_out: int
    n_ctx: int | None
    terms: int
    caveats: tuple[str, ...]

    def read(self) -> Model | Combination | Function:
        """The model as it is compared.

        Raises:
            CheckpointError: The file has changed since the run began.
        """
        given = self.source.read()
        if self.source.file is not None and content_hash(given) != self.digest:
            raise CheckpointError(
                f"{self.source.file}: has changed while the run was under way; "
                "run again with a new store"
            )
        return self.source.compared(given)


def sources(
    models: Any,
    names: Sequence[Any] | None = None,
    centred: Metric | None = None,
    budget: Budget = Budget(),
) -> tuple[Source, ...]:
    """The sources of a sequence of models, of a mapping from labels to models or of a `Series`.

    Under the metric `centred` they are read without their means, which a budget limits.

    Labels are `names` where given, and numbers where all of them are. Raises `ModelError` where
    there is no model, or two labels are equal.
    """
    given = _labelled(models)
    if not given:
        raise ModelError("pairwise needs at least one model, found none")
    if names is not None and len(names) != len(given):
        raise ModelError(f"{len(names)} names for {len(given)} models")
    labels = numbered([label for label, _ in given] if names is None else names)
    if repeated := sorted(str(label) for label, count in Counter(labels).items() if count > 1):
        raise ModelError(
            f"labels must differ, found {', '.join(repeated[:5])} more than once: give "
            "each model once, or names= that differ"
        )
    reading = models.reading if isinstance(models, Series) else Reading()
    called = models.names if isinstance(models, (Series, PartSeries)) else map(str, labels)
    both = zip(labels, called, (weights for _, weights in given), strict=True)
    return tuple(Source(*source, reading, centred, budget) for source in both)


def _labelled(models: Any) -> list[tuple[Any, Any]]:
    """Models or their files, each with its own label."""
    if isinstance(models, (Model, Combination)):
        raise ModelError(
            "pairwise compares many models; give a sequence, a mapping or a tnsim.load of "
            "several files, found one model"
        )
    if isinstance(models, Series):
        paths = [path.absolute() for path in models.paths]  # links of a hub cache stay links
        return list(zip(models.labels, paths, strict=True))
    if isinstance(models, PartSeries):
        return list(zip(models.labels, models.sources, strict=True))
    if isinstance(models, SeriesParts):
        label = next(iter(models))
        raise ModelError(f"this plans or compares one part, such as parts[{label!r}]")
    if isinstance(models, Mapping):
        return list(models.items())
    if is_list(models):
        return list(enumerate(models))
    raise ModelError(
        "expected models, a mapping or a tnsim.load of several files, "
        f"found {type(models).__name__}"
    )


def entry(
    source: Source, given: Model | Combination, dtype: str
) -> tuple[Entry, tuple[Model, ...]]:
    """The entry of a model that was read, and the models that are added up to compare it.

    Raises:
        ModelError: It is no model, or its weights are traced, or tensors that require grad.
    """
    check_numbers(given)
    check_untraced("pairwise", given)
    model = source.compared(given)
    # Small differences of models become models of their own, and digests belong to these.
    bases = tuple(base for _, base in terms(by_differences(model, dtype)))
    digests = [content_hash(base) for base in bases]
    made = Entry(
        source=source,
        digest=digests[0] if bases[0] is given else content_hash(given),
        bases=tuple(zip(digests, map(kinds, bases), strict=True)),
        d_in=bases[0].d_in,
        d_out=bases[0].d_out,
        n_ctx=bases[0].n_ctx,
        terms=len(terms(model)),
        caveats=caveats(model),
    )
    return made, bases
