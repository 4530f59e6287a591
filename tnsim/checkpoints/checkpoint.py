"""One file into a model. In: a path, a dialect. Out: a model, and what was assumed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from tnsim.checkpoints.configurations import configuration, read_text
from tnsim.checkpoints.dialects import Dialect
from tnsim.checkpoints.formats import contents
from tnsim.checkpoints.guard import naming
from tnsim.checkpoints.native import METADATA, own_model
from tnsim.checkpoints.presets import PRESETS
from tnsim.checkpoints.state_dict import detect, model_from_state
from tnsim.errors import CheckpointError
from tnsim.models.model import Model

AnyDialect = Dialect | str | os.PathLike


class Checkpoint(NamedTuple):
    """What one file gives.

    Attributes:
        model: the model.
        assumptions: what was taken for granted in reading it, one sentence each.
        dtypes: the types its numbers are stored in, each once.
    """

    model: Model
    assumptions: tuple[str, ...]
    dtypes: tuple[str, ...]


def read(
    path: str | os.PathLike, dialect: AnyDialect | None = None, n_ctx: int | None = None
) -> Checkpoint:
    """As `load` for one file, with the assumptions made and the stored dtypes.

    Args:
        path: a file that ends in .safetensors, .npz, .pt or .pth.
        dialect: as in `load`.
        n_ctx: as in `load`.

    Returns:
        The model with what was assumed.

    Raises:
        CheckpointError, ModelError, UnsupportedLayer: as in `load`.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> file = Path(tempfile.mkdtemp(), "step_100.npz")
        >>> np.savez(file, W_l=np.ones((4, 2)), W_r=np.ones((4, 2)), W_p=np.ones((3, 4)))
        >>> read(file).dtypes
        ('float64',)
    """
    path = Path(path)
    if dialect is not None:
        dialect = find_dialect(dialect)
    with naming(path):
        inventory = contents(path)
        if dialect is None and METADATA in inventory.metadata:
            model = own_model(inventory.state, inventory.metadata[METADATA], n_ctx)
            return Checkpoint(model, ("tnsim's own format: nothing assumed",), inventory.dtypes)
        config = configuration(path)
        dialect = dialect or detect(inventory.state, config)
        model = model_from_state(inventory.state, dialect, n_ctx, config)
        return Checkpoint(model, tuple(dialect.assumptions()), inventory.dtypes)


def find_dialect(dialect: AnyDialect) -> Dialect:
    """A dialect by itself, by the name of a preset or by the path of its JSON file.

    Args:
        dialect: any of the three.

    Returns:
        The dialect.

    Raises:
        CheckpointError: when there is none, or its file is damaged.
        UnsupportedLayer: when it has a layer kind without a polynomial.

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
