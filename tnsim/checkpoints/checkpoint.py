"""One file into a model. In: a path, a dialect. Out: a model, and what was assumed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tnsim.checkpoints.configurations import configuration, read_text
from tnsim.checkpoints.dialects import Dialect
from tnsim.checkpoints.folders import located
from tnsim.checkpoints.formats import contents
from tnsim.checkpoints.guard import naming
from tnsim.checkpoints.native import METADATA, own_model
from tnsim.checkpoints.presets import PRESETS
from tnsim.checkpoints.state_dict import detect, model_from_state
from tnsim.errors import CheckpointError
from tnsim.models.model import Model

log: logging.Logger = logging.getLogger(__name__)

AnyDialect: TypeAlias = Dialect | str | os.PathLike[str]


class Reading(NamedTuple):
    """How files are read; the fields are arguments of `load`."""

    dialect: AnyDialect | None = None
    n_ctx: int | None = None
    leave_out: tuple[str, ...] = ()
    norms: Any = None


class Checkpoint(NamedTuple):
    """What one file gives.

    Attributes:
        model: The model; its `origin` says what was assumed.
        dtypes: The types its numbers are stored in, each once.
    """

    model: Model
    dtypes: tuple[str, ...]

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was taken for granted in reading it, one sentence each."""
        return self.model.origin.assumptions if self.model.origin else ()


def read(
    path: str | os.PathLike[str],
    dialect: AnyDialect | None = None,
    n_ctx: int | None = None,
    leave_out: str | Sequence[str] = (),
    norms: Any = None,
) -> Checkpoint:
    """As `load` for one file, with the stored dtypes.

    Args:
        path: A file that ends in .safetensors, .npz, .pt, .pth or .ckpt, a folder that holds one
            model, or a revision in a hub cache, as `REPOSITORY@REVISION`.
        dialect: As in `load`.
        n_ctx: As in `load`.
        leave_out: As in `load`.
        norms: As in `load`.

    Returns:
        The model and the dtypes.

    Raises:
        CheckpointError, ModelError, UnsupportedLayer: As in `load`.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> file = Path(tempfile.mkdtemp(), "step_100.npz")
        >>> np.savez(file, W_l=np.ones((4, 2)), W_r=np.ones((4, 2)), W_p=np.ones((3, 4)))
        >>> read(file).dtypes
        ('float64',)
    """
    if dialect is not None:
        dialect = find_dialect(dialect)
    leave_out = patterns(leave_out)
    with naming(path):
        file = located(path)
        log.debug("read %s", file)
        inventory = contents(file)
        if dialect is None and METADATA in inventory.metadata:
            model = own_model(inventory.state, inventory.metadata[METADATA], n_ctx)
            return Checkpoint(model, inventory.dtypes)
        config = configuration(file)
        dialect = dialect or detect(inventory.state, config, leave_out)
        log.debug("by the dialect %s", dialect.name)
        model = model_from_state(inventory.state, dialect, n_ctx, config, leave_out, norms)
        return Checkpoint(model, inventory.dtypes)


def patterns(leave_out: str | Sequence[str]) -> tuple[str, ...]:
    """Patterns of tensors to leave out; a text is one pattern.

    Args:
        leave_out: A pattern, or several.

    Returns:
        All of them.

    Raises:
        CheckpointError: They are no texts.

    Example:
        >>> patterns("*bias"), patterns(["*bias", "norm.*"])
        (('*bias',), ('*bias', 'norm.*'))
    """
    if isinstance(leave_out, str):
        return (leave_out,)
    several = tuple(leave_out) if isinstance(leave_out, Iterable) else (leave_out,)
    if not all(isinstance(pattern, str) for pattern in several):
        raise CheckpointError(
            f"leave_out lists patterns of names, such as ['*.bias'], found {leave_out!r}"
        )
    return several


def find_dialect(dialect: AnyDialect) -> Dialect:
    """A dialect by itself, by the name of a preset or by the path of its JSON file.

    Args:
        dialect: Any of the three.

    Returns:
        The dialect.

    Raises:
        CheckpointError: When there is none, or its file is damaged.
        UnsupportedLayer: When it has a layer kind without a polynomial.

    Example:
        >>> find_dialect("bilinear-readout").layers[0].left
        'W_l'
    """
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
