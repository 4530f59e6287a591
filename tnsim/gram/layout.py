"""What a run fills, piece by piece. In: numbers of models, the tile. Out: arrays and records.

The arrays of a run are filled in *records*: the norms of one block of models, the products of one
tile, and at last the end of the run. A record lists the regions it fills, one chunk of a store
each, and the place of its marker, a digest that is written after everything that the record
fills.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Region = tuple[str, tuple[slice, ...]]


class Spec(NamedTuple):
    """One array: its shape, the shape of its chunks, and its dtype by name."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str


class Record(NamedTuple):
    """Numbers that are finished together.

    Args:
        label: Which they are, in words.
        marker: The array of markers, and the place in it.
        regions: Arrays and the slices of them that are filled, in the order in which values are
            given.
        blocks: Number of the block of rows and, for a tile, of the block of columns.
    """

    label: str
    marker: tuple[str, tuple[int, ...]]
    regions: tuple[Region, ...]
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Sizes that say which arrays a run has.

    Args:
        rows: Distinct models.
        columns: Distinct models they are compared with; None for all pairs of one list.
        outputs: Output coordinates; None where there are no slices.
        tile: Models a side of a tile.
        estimates: Whether cosines have standard errors.
    """

    rows: int
    columns: int | None
    outputs: int | None
    tile: int
    estimates: bool = False

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> Layout:
        """The layout of the run that `attrs` describe."""
        others = attrs["hash_b"]
        columns = None if others is None else len(set(others))
        estimates = bool(attrs.get("estimates"))
        rows = len(set(attrs["hash_a"]))
        return cls(rows, columns, attrs["outputs"], attrs["tile"], estimates)

    @property
    def sides(self) -> dict[str, int]:
        """Sides that have norms of their own, and their numbers of models."""
        return {"a": self.rows} if self.columns is None else {"a": self.rows, "b": self.columns}

    @property
    def variables(self) -> tuple[str, ...]:
        """Arrays with one entry for every pair."""
        pairs: tuple[str, ...] = ("similarity", "log_inner", "sign")
        if self.estimates:
            pairs = (*pairs, "standard_error")
        return pairs if self.outputs is None else (*pairs, "slices")

    @property
    def arrays(self) -> dict[str, Spec]:
        """Every array by its name."""
        rows, tile = self.rows, self.tile
        columns = rows if self.columns is None else self.columns
        across = self._blocks(rows), self._blocks(columns)
        arrays = {
            "similarity": Spec((rows, columns), (tile, tile), "float64"),
            "log_inner": Spec((rows, columns), (tile, tile), "float64"),
            "sign": Spec((rows, columns), (tile, tile), "int8"),
            "tiles": Spec(across, (1, 1), "uint64"),
            "finished": Spec((1,), (1,), "uint64"),
        }
        if self.estimates:
            arrays["standard_error"] = arrays["similarity"]
        for side, count in self.sides.items():
            arrays[f"blocks_{side}"] = Spec((self._blocks(count),), (1,), "uint64")
            for name in self._norms(side):
                arrays[name] = Spec((count,), (tile,), "float64")
            if self.outputs is not None:
                chunk = (tile, self.outputs)
                for name in self._output_norms(side):
                    arrays[name] = Spec((count, self.outputs), chunk, "float64")
        if self.outputs is not None:
            chunk = (tile, tile, self.outputs)
            arrays["slices"] = Spec((rows, columns, self.outputs), chunk, "float64")
        return arrays

    def block(self, n: int) -> slice:
        """The models of a block."""
        return slice(n * self.tile, (n + 1) * self.tile)

    def norms(self, side: str) -> list[Record]:
        """The squared norms of one side, block by block."""
        names = (*self._norms(side), *self._output_norms(side))
        records = []
        for n in range(self._blocks(self.sides[side])):
            marker = f"blocks_{side}", (n,)
            regions = tuple((name, (self.block(n),)) for name in names)
            records.append(Record(f"norms {side} {n}", marker, regions, (n,)))
        return records

    def tiles(self) -> list[Record]:
        """All tiles; of one list those on and below the diagonal, which are mirrored."""
        tiles = []
        for i in range(self._blocks(self.rows)):
            across = i + 1 if self.columns is None else self._blocks(self.columns)
            tiles += [self._tile(i, j) for j in range(across)]
        return tiles

    def _tile(self, i: int, j: int) -> Record:
        places = [(self.block(i), self.block(j))]
        if self.columns is None and i != j:
            places.append((self.block(j), self.block(i)))
        regions = tuple(itertools.product(self.variables, places))
        return Record(f"tile {i} {j}", ("tiles", (i, j)), regions, (i, j))

    @property
    def end(self) -> Record:
        """The end of the run: all other markers, so that a lost one is noticed."""
        markers = ("tiles", *(f"blocks_{side}" for side in self.sides))
        regions = tuple((name, (slice(None),)) for name in markers)
        return Record("end", ("finished", (0,)), regions)

    @property
    def records(self) -> list[Record]:
        """Everything that a finished run holds."""
        norms = itertools.chain.from_iterable(self.norms(side) for side in self.sides)
        return [*norms, *self.tiles(), self.end]

    def _norms(self, side: str) -> tuple[str, ...]:
        """Squared norms of models, and the sizes of the sums that they are."""
        return f"log_norm_{side}", f"log_norm_size_{side}"

    def _output_norms(self, side: str) -> tuple[str, ...]:
        """The same of every output, where there are slices."""
        if self.outputs is None:
            return ()
        return f"log_norms_{side}", f"log_norms_size_{side}"

    def _blocks(self, models: int) -> int:
        return math.ceil(models / self.tile)
