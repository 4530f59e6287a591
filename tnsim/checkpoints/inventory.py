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
        name: as the file spells it.
        dtype: type of the numbers, as NumPy calls it, or else the file.
        nbytes: memory that the numbers take as stored.
        read: gives the tensor.
    """

    name: str
    dtype: str
    nbytes: int
    read: Callable[[], Any]

    @functools.cached_property
    def tensor(self) -> Any:
        """The numbers, read once. Raises `CheckpointError` naming the tensor."""
        with refusing(f"tensor {self.name!r} cannot be read"):
            return self.read()


class Contents(NamedTuple):
    """What a file holds.

    Attributes:
        state: tensors by name, in PyTorch's files also mappings of them and other things.
        tensors: all of them, however deep.
        metadata: texts beside them.
    """

    state: Mapping[Any, Any]
    tensors: tuple[Stored, ...]
    metadata: Mapping[str, str]

    @classmethod
    def flat(cls, tensors: list[Stored], metadata: Mapping[str, str] | None = None) -> Contents:
        """Of a file that knows nothing but named tensors."""
        return cls({t.name: t for t in tensors}, tuple(tensors), metadata or {})

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({tensor.dtype for tensor in self.tensors}))


def check_declared(tensors: tuple[Stored, ...], size: int) -> None:
    """Refuse a file that would take much more memory than it takes disk.

    Args:
        tensors: all that it declares.
        size: of the file, in bytes.

    Raises:
        CheckpointError: when they add up to more than `EXPANSION` times the size, and `SMALL`.
    """
    declared = sum(tensor.nbytes for tensor in tensors)
    if declared > max(SMALL, EXPANSION * size):
        raise CheckpointError(
            f"declares {declared:,} bytes of tensors in a file of {size:,}, "
            f"more than {EXPANSION} times its size; if that is meant, save it uncompressed"
        )
