"""What a file declares, before a number is read. In: names, sizes, readers. Out: unread tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tnsim.checkpoints.guard import refusing
from tnsim.errors import CheckpointError

SMALL = 2**25  # bytes of tensors that any file may declare
EXPANSION = 16  # a larger file may declare so many times its own size: weights hardly compress


@dataclass(frozen=True)
class Stored:
    """A tensor that lies in a file.

    Attributes:
        name: As the file spells it.
        dtype: Type of the numbers, as NumPy calls it, or else the file.
        nbytes: Memory that the numbers take as stored.
        read: Gives the tensor.

    Example:
        >>> import numpy as np
        >>> stored = Stored("weight", "float32", 16, lambda: np.zeros((2, 2), np.float32))
        >>> stored.tensor.shape
        (2, 2)
    """

    name: str
    dtype: str
    nbytes: int
    read: Callable[[], Any]

    @functools.cached_property
    def tensor(self) -> Any:
        """The numbers, read once.

        Returns:
            An array of NumPy, or a tensor of PyTorch out of its files.

        Raises:
            CheckpointError: Naming the tensor, where it cannot be read.
        """
        with refusing(f"tensor {self.name!r} cannot be read"):
            return self.read()


class Contents(NamedTuple):
    """What a file holds.

    Attributes:
        state: Tensors by name, in PyTorch's files also mappings of them and other things.
        tensors: All of them, however deep.
        metadata: Texts beside them.
    """

    state: Mapping[Any, Any]
    tensors: tuple[Stored, ...]
    metadata: Mapping[str, str]

    @classmethod
    def flat(cls, tensors: list[Stored], metadata: Mapping[str, str] | None = None) -> Contents:
        """What a file holds that knows nothing but named tensors.

        Args:
            tensors: All of them.
            metadata: Texts beside them.

        Returns:
            The contents.

        Raises:
            CheckpointError: Where two have one name, as nobody knows which of them is meant.

        Example:
            >>> Contents.flat([Stored("weight", "float32", 16, lambda: None)]).dtypes
            ('float32',)
        """
        named: dict[str, Stored] = {}
        for tensor in tensors:
            if named.setdefault(tensor.name, tensor) is not tensor:
                raise CheckpointError(f"holds two tensors of the name {tensor.name!r}")
        return cls(named, tuple(tensors), metadata or {})

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Types of the numbers, each once, in order of their names."""
        return tuple(sorted({tensor.dtype for tensor in self.tensors}))


def check_declared(tensors: tuple[Stored, ...], size: int) -> None:
    """Refuse a file that would take much more memory than it takes disk.

    Args:
        tensors: All that it declares.
        size: Of the file, in bytes.

    Raises:
        CheckpointError: When they add up to more than `EXPANSION` times the size, and `SMALL`.

    Example:
        >>> check_declared((Stored("weight", "float32", 2**30, lambda: None),), size=1000)
        Traceback (most recent call last):
            ...
        tnsim.errors.CheckpointError: declares 1,073,741,824 bytes of tensors in a file of 1,000...
    """
    declared = sum(tensor.nbytes for tensor in tensors)
    if declared > max(SMALL, EXPANSION * size):
        raise CheckpointError(
            f"declares {declared:,} bytes of tensors in a file of {size:,}, "
            f"more than {EXPANSION} times its size; if that is meant, save it uncompressed"
        )
