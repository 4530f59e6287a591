"""Sizes of a run, and of its tiles. In: entries, one model of each sort. Out: a `Sizes`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from tnsim.engine.dtypes import ITEM_BYTES
from tnsim.engine.memory import check_addresses
from tnsim.gram.sources import Entry
from tnsim.gram.stacks import Setting
from tnsim.models.model import Model
from tnsim.tensors.kinds import Kinds

# Work of a tile, so that little is lost with it and little is spent on it: at most one and a half
# seconds on two cores.
_TILE_WORK = 2**34
_ACCELERATED = 2**5  # times as much work a tile where the arrays are not on a CPU
LARGEST_TILE = 128  # models a side of a tile
_UNKNOWN = 2**33  # bytes, where the platform does not tell what is free


class Sizes(NamedTuple):
    """What the costs of both routes depend on.

    Args:
        rows, columns: Numbers of distinct models.
        symmetric: Whether they are one list.
        terms: Models that one of them adds up, at most.
        weights: Bytes of the largest model.
        products: Bytes of what is computed and kept of a pair.
        item: Bytes of a number.
        available: Bytes that the run may use.
    """

    rows: int
    columns: int
    symmetric: bool
    terms: int
    weights: int
    products: int
    item: int
    available: float

    @classmethod
    def of(
        cls,
        rows: Sequence[Entry],
        columns: Sequence[Entry] | None,
        examples: Mapping[Kinds, Model],
        setting: Setting,
    ) -> Self:
        """The sizes of a run; the arguments are those of `plan`."""
        item = ITEM_BYTES[setting.dtype]
        entries = (*rows, *(columns or ()))
        outputs = rows[0].d_out if setting.per_output else 1
        return cls(
            rows=len(rows),
            columns=len(rows if columns is None else columns),
            symmetric=columns is None,
            terms=max(len(entry.parts) for entry in entries),
            weights=max((model.parameters for model in examples.values()), default=0) * item,
            products=32 * outputs,
            item=item,
            available=memory(setting),
        )

    @property
    def pairs(self) -> int:
        """How many inner products there are, of one list each pair once."""
        return self._on_and_below(self.rows) if self.symmetric else self.rows * self.columns

    def tile(self, work: int, model_bytes: int, share: float = 1 / 8) -> int:
        """Models a side of a tile: about a second of work, a share of the memory for its models.

        Tiles are as even as they can be: 5 models in tiles of at most 4 are 3 and 2.

        Args:
            work: Of one pair, in scalar multiplications.
            model_bytes: What one model takes.
            share: Of the memory, for the models of a tile.
        """
        by_work = math.isqrt(max(1, _tile_work() // work))
        by_models = share * self.available / (self.terms * model_bytes)
        by_products = math.sqrt(self.available / 8 / self.products)
        most = max(1, int(min(LARGEST_TILE, by_work, by_models, by_products)))
        blocks = math.ceil(self.rows / min(most, self.rows))
        return math.ceil(self.rows / blocks)

    def tiles(self, tile: int) -> int:
        """How many tiles there are, of one list those on and below the diagonal."""
        blocks, across = math.ceil(self.rows / tile), math.ceil(self.columns / tile)
        return self._on_and_below(blocks) if self.symmetric else blocks * across

    def tile_bytes(self, tile: int) -> int:
        """Bytes of the products of a tile."""
        return tile * min(tile, self.columns) * self.products

    @staticmethod
    def _on_and_below(n: int) -> int:
        return n * (n + 1) // 2


def memory(setting: Setting) -> float:
    """Bytes that a run may use. Raises `TooLarge` where nothing can be compiled."""
    check_addresses()
    room = setting.budget.room(0)
    return _UNKNOWN if math.isinf(room) else room


def _tile_work() -> int:
    """By the kind of backend, never measured: equal runs have equal tiles, and so equal bits."""
    import jax

    return _TILE_WORK if jax.default_backend() == "cpu" else _ACCELERATED * _TILE_WORK
