"""Inputs from files, read as they are needed. In: arrays or a path. Out: what gives rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from tnsim.errors import ModelError, printable
from tnsim.models.arrays import host_array


class StoredInputs:
    """The rows of one tensor of a safetensors file; only those asked for are read.

    Args:
        path: The file. It holds one tensor, or one called `inputs`.

    Raises:
        ModelError: It holds neither.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.path = path
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            self._name = names[0] if len(names) == 1 else "inputs"
            if self._name not in names:
                raise ModelError(
                    f"{path} holds {len(names)} tensors and none called 'inputs': "
                    "name the inputs so, or save them alone"
                )
            part = file.get_slice(self._name)
            self.shape = tuple(part.get_shape())
            self.dtype = part[:0].dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        from safetensors import safe_open

        with safe_open(self.path, framework="numpy") as file:
            return file.get_slice(self._name)[rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


def rows_of(inputs: Any) -> Any:
    """Inputs as something with a shape and a dtype whose rows can be read.

    Args:
        inputs: An array or tensor, or the path of a `.npy` or `.safetensors` file.

    Returns:
        A NumPy array, on disk for a `.npy` file, or `StoredInputs`.

    Raises:
        ModelError: There is no such file, or it has another format.

    Example:
        >>> rows_of([[1.0, 2.0]]).shape
        (1, 2)
    """
    if not isinstance(inputs, str | os.PathLike):
        _check_unlabelled(inputs)
        return host_array(inputs)
    path = Path(inputs)
    if path.suffix not in (".npy", ".safetensors"):
        raise ModelError(f"inputs are read from .npy and .safetensors files, found {path}")
    if not os.path.isfile(path):  # noqa: PTH113  (False for names that no file can have)
        raise ModelError(printable(f"{path}: no such file of inputs"))
    if path.suffix == ".safetensors":
        return _opened(path, StoredInputs)
    return _opened(path, lambda path: np.load(path, mmap_mode="r", allow_pickle=False))


def _check_unlabelled(inputs: Any) -> None:
    """Refuse inputs with labels: a tuple of arrays, or a list of such tuples."""
    first = inputs[0] if isinstance(inputs, list) and inputs else inputs
    if isinstance(first, tuple) and any(len(getattr(one, "shape", ())) > 0 for one in first):
        raise ModelError(
            f"inputs are one array, found a tuple of {len(first)} arrays, as of inputs with labels "
            "or of a batch: give the inputs alone, such as dataset.tensors[0], or np.stack them"
        )


def _opened(path: Path, reader: Any) -> Any:
    try:
        return reader(path)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{path}: not a readable file of inputs: {error}") from None
