"""Checkpoints into models. In: paths. Out: models and series of models.

tnsim's own files carry their architecture; foreign ones go through a dialect. Whatever is wrong
with a file is refused as `CheckpointError`, `ModelError` or `UnsupportedLayer`, its path in front.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tnsim.checkpoints.configurations import configuration, read_text
from tnsim.checkpoints.dialects import Dialect
from tnsim.checkpoints.formats import SUFFIXES, contents
from tnsim.checkpoints.guard import naming
from tnsim.checkpoints.native import METADATA, own_model
from tnsim.checkpoints.presets import PRESETS
from tnsim.checkpoints.state_dict import detect, model_from_state, to_numpy
from tnsim.errors import CheckpointError, ModelError
from tnsim.models.model import Model


class Checkpoint(NamedTuple):
    """A model with what was assumed in reading it, and the dtypes it was stored in."""

    model: Model
    assumptions: tuple[str, ...]
    dtypes: tuple[str, ...]


def load(
    path: Any, dialect: Dialect | str | os.PathLike | None = None, n_ctx: int | None = None
) -> Model | Series:
    """Read one file into a `Model`; a list, a folder or a glob pattern into a lazy `Series`.

    Args:
        path: a file that ends in .safetensors, .npz, .pt or .pth, or several.
        dialect: a `Dialect`, the name of a preset, or the path of a JSON file; by default tnsim's
            own format, else the one preset that accounts for every tensor.
        n_ctx: length of the sequences on which a model with attention is compared; by default what
            the file says, which is nothing for foreign ones.

    Raises:
        CheckpointError: naming file and tensor, when the file is missing, damaged, out of
            proportion, or does not fit its dialect.
        ModelError: when its tensors make no model.
        UnsupportedLayer: when it holds a layer that is no polynomial.

    Example:
        >>> model = tnsim.load("runs/step_100.safetensors")
        >>> series = tnsim.load("runs/*.safetensors")
    """
    if isinstance(path, (str, os.PathLike)) and not _many(path):
        return read(path, dialect, n_ctx).model
    return Series(path, dialect, n_ctx)


def read(
    path: str | os.PathLike,
    dialect: Dialect | str | os.PathLike | None = None,
    n_ctx: int | None = None,
) -> Checkpoint:
    """As `load` for one file, with the assumptions made and the stored dtypes."""
    path = Path(path)
    dialect = None if dialect is None else find_dialect(dialect)
    with naming(path):
        inventory = contents(path)
        if dialect is None and METADATA in inventory.metadata:
            model = own_model(inventory.state, inventory.metadata[METADATA], n_ctx)
            return Checkpoint(model, ("tnsim's own format: nothing assumed",), inventory.dtypes)
        config = configuration(path)
        dialect = dialect or detect(inventory.state, config)
        model = model_from_state(inventory.state, dialect, n_ctx, config)
        return Checkpoint(model, tuple(dialect.assumptions()), inventory.dtypes)


def from_state_dict(
    state: Mapping[str, Any],
    dialect: Dialect | str | os.PathLike | None = None,
    n_ctx: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Model:
    """A model from a torch state_dict or any mapping of names to arrays.

    Args:
        state: arrays or tensors by name.
        dialect: as in `load`.
        n_ctx: as in `load`.
        config: what config.json would hold, for dialects that take numbers from it.

    Raises:
        CheckpointError, ModelError, UnsupportedLayer: as in `load`.
    """
    dialect = detect(state, config) if dialect is None else find_dialect(dialect)
    return model_from_state(state, dialect, n_ctx, config)


def find_dialect(dialect: Dialect | str | os.PathLike) -> Dialect:
    """A dialect by itself, by preset name or by the path of its JSON file."""
    if isinstance(dialect, Dialect):
        return dialect
    if str(dialect) in PRESETS:
        return PRESETS[str(dialect)]
    path = Path(dialect)
    if path.suffix == ".json":
        with naming(path):
            return Dialect.from_json(read_text(path))
    raise CheckpointError(
        f"no dialect {str(dialect)!r}: neither a preset ({', '.join(PRESETS)}) nor a JSON file"
    )


class ForwardError(NamedTuple):
    """Largest difference of two forward passes: absolute, and relative to the largest output."""

    absolute: float
    relative: float


def compare_forward(
    model: Model, forward: Callable[[np.ndarray], Any], samples: int = 64, seed: int = 0
) -> ForwardError:
    """Check a dialect: run another forward pass beside the model's.

    A float32 forward of the same function differs by about 1e-6 relatively.

    Args:
        model: as read through the dialect.
        forward: takes float32 inputs (samples, d_in), or (samples, n_ctx, d_in) for a model of
            sequences, and returns outputs (samples, d_out), or (samples, n_ctx, d_out).
        samples: number of standard normal inputs.
        seed: of the inputs.

    Raises:
        ModelError: when the shapes of the outputs differ.
    """
    shape = (samples, model.d_in) if model.n_ctx is None else (samples, model.n_ctx, model.d_in)
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    theirs = to_numpy(forward(x), "the output of forward").astype(np.float64)
    ours = np.asarray(model(x.astype(np.float64)), np.float64)
    if theirs.shape != ours.shape:
        raise ModelError(
            f"forward gives shape {theirs.shape} for inputs {x.shape}, the model {ours.shape}"
        )
    absolute = float(np.abs(theirs - ours).max())
    return ForwardError(
        absolute, absolute / max(float(np.abs(theirs).max()), np.finfo(np.float64).tiny)
    )


class Series(Sequence[Model]):
    """Checkpoints in order, read when indexed.

    A folder or a glob is sorted by the numbers in the names, a list keeps its order.

    Attributes:
        paths: files in order.
        labels: the step where the names differ by one number, else the names.

    Args:
        source: a path, a folder, a glob pattern, or several of them.
        dialect: as in `load`.
        n_ctx: as in `load`.
        names: what to take the labels from, where not the paths.

    Raises:
        CheckpointError: when nothing matches.
    """

    def __init__(
        self,
        source: Any,
        dialect: Dialect | str | os.PathLike | None = None,
        n_ctx: int | None = None,
        names: Sequence[str] | None = None,
    ):
        self.n_ctx = n_ctx
        self.dialect = None if dialect is None else find_dialect(dialect)
        self.paths = tuple(_expand(source))
        self.names = tuple(map(str, self.paths)) if names is None else tuple(names)
        self.labels = _labels([Path(name) for name in self.names])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Series(self.paths[index], self.dialect, self.n_ctx, self.names[index])
        return read(self.paths[index], self.dialect, self.n_ctx).model

    def __iter__(self) -> Iterator[Model]:
        return (self[n] for n in range(len(self)))

    def __repr__(self) -> str:
        shown = [*self.labels[:3], *(["..."] if len(self) > 3 else [])]
        return f"Series({len(self)} checkpoints: {', '.join(shown)})"


def _many(path: str | os.PathLike) -> bool:
    return os.path.isdir(path) or (not os.path.exists(path) and glob.has_magic(str(path)))


def _expand(source: Any) -> Iterator[Path]:
    if not isinstance(source, (str, os.PathLike)):
        if not isinstance(source, Iterable):
            raise CheckpointError(f"expected a path or several, found {source!r}")
        for one in source:
            yield from _expand(one)
        return
    with naming(source):
        if os.path.isdir(source):
            paths = [path for path in Path(source).iterdir() if path.suffix in SUFFIXES]
        elif _many(source):
            paths = [Path(path) for path in glob.glob(str(source))]
        else:
            paths = [Path(source)]
        if not paths:
            raise CheckpointError(f"no checkpoint matches ({', '.join(SUFFIXES)})")
    yield from sorted(paths, key=natural)


def natural(path: Path) -> list:
    """A sort key that takes the digits of a name for numbers."""
    parts = re.split(r"(\d+)", path.name)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]


def _labels(paths: Sequence[Path]) -> tuple[str, ...]:
    """The one number that tells the names apart, or the names."""
    stems = [p.stem for p in paths]
    parts = [re.split(r"(\d+)", stem) for stem in stems]
    if len(parts) > 1 and len({len(p) for p in parts}) == 1:
        differing = [n for n in range(len(parts[0])) if len({p[n] for p in parts}) > 1]
        if len(differing) == 1 and all(p[differing[0]].isdecimal() for p in parts):
            return tuple(str(int(p[differing[0]])) for p in parts)
    return tuple(stems) if len(set(stems)) == len(stems) else tuple(map(str, paths))
