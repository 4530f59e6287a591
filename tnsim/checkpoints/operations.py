"""Operations of a forward pass: what each is by its name, and what the algebra asks of it.

Front ends (`graphs` for PyTorch, `jaxprs` for JAX) write a forward pass as a `Graph` of
`Operation`s. Sets of names say what an operation is: affine in the arguments that depend on the
input; a product, affine in each of several; entrywise, a function of numbers (`entrywise`).
Everything else is refused by its name. Of an operation the algebra asks for three things:

*   `run(arrays)`: the operation on arrays, by the operations that it reads,
*   `linear(arrays, varying)`: its linear part in some of these, everything that is added set to
    zero,
*   `reach(arrays, varying)`: the same for indicators, arrays of zeros and ones, with nothing that
    cancels: an entry of the result is zero unless it reads an entry that is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

AXES = frozenset(
    (
        *("alias", "as_strided", "at_set", "block_diag", "broadcast", "cat", "channel_shuffle"),
        *("clone", "constant_pad_nd", "contiguous", "copy", "detach", "diag_embed", "diagonal"),
        *("dynamic_update", "embedding", "expand", "fill", "flip", "gather", "index"),
        *("index_fill", "index_select", "lift_fresh", "masked_fill", "movedim", "narrow", "pad"),
        *("permute", "pixel_shuffle", "pixel_unshuffle", "reflection_pad1d"),
        *("reflection_pad2d", "repeat", "replication_pad1d", "replication_pad2d", "reshape"),
        *("roll", "rot90", "scatter", "select", "slice", "squeeze", "stack", "swapaxes", "t"),
        *("to", "transpose", "tril", "triu", "unfold"),
        *("unsqueeze", "view", "where"),
    )
)
"""Operations that choose and order entries."""

SUMS = frozenset(
    (
        *("_adaptive_avg_pool1d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "add", "at_add"),
        *("avg_pool1d", "avg_pool2d", "avg_pool3d", "col2im", "convolution"),
        *("cumsum", "div", "im2col", "index_put", "mean", "neg", "scatter_add"),
        *("sub", "sum", "trace", "upsample_bilinear2d", "upsample_linear1d"),
        *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
        *("upsample_trilinear3d", "window_sum"),
    )
)
"""Operations that add entries up, with weights that do not depend on the input."""

PRODUCTS = frozenset(("addmm", "baddbmm", "bmm", "mm", "mul"))
"""Operations that multiply where more than one argument depends on the input."""

FIRST_ALONE = frozenset(
    ("convolution", "div", "embedding", "gather", "im2col", "index", "index_select")
)
"""Operations that are affine in their first argument alone."""

CHOOSING = {"where": 0, "masked_fill": 1, "index_put": 1, "scatter": 2, "scatter_add": 2}
"""Places of arguments that say which entries of others are taken, where the others may depend on
the input."""

FILLS = frozenset(
    (
        *("empty", "empty_like", "full", "full_like", "new_empty", "new_full", "new_ones"),
        *("new_zeros", "ones_like", "zeros_like"),
    )
)
"""Operations that read the shape of an argument alone."""

KEEP_ORDER = frozenset(
    (
        *("alias", "clone", "contiguous", "detach", "expand", "lift_fresh", "reshape", "squeeze"),
        *("to", "unsqueeze", "view"),
    )
)
"""Operations that leave the order of entries as it is."""

_ADDED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("add", "sub", "copy", "pad", "dynamic_update"), (0, 1)),
    **dict.fromkeys(("at_set", "at_add"), (0, 1)),
    **dict.fromkeys(("scatter", "scatter_add"), (0, 3)),
    **dict.fromkeys(("addmm", "baddbmm", "block_diag", "cat", "stack"), (0,)),
    **dict.fromkeys(("masked_fill", "convolution", "constant_pad_nd"), (2,)),
    "index_put": (0, 2),
    "where": (1, 2),
    "index_fill": (3,),
    "fill": (1,),
}
"""Places of arguments that are added, and not multiplied."""

_WITHOUT_SIGNS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "sub"), lambda x, y, *_, **__: x + y),
    **dict.fromkeys(("addmm", "baddbmm"), lambda c, x, y, **_: c + x @ y),
    "div": lambda x, y, **_: x + 0 * y,  # of the shape of both
}
"""Functions of indicators in the place of operations in which ones cancel, or divide."""


def is_affine(name: str) -> bool:
    """Whether an operation of a name is affine in each argument."""
    return name in AXES or name in SUMS or name in PRODUCTS


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation of a forward pass.

    Args:
        name: Name in the tables, such as "add".
        arguments: Its arguments, in order; operations among them, also in lists, stand for results.
        compute: Function of the arguments; None where the result is given from outside.
        keywords: Arguments by name.
        place: Words for where it stands in the code of the user.
        is_whole: Whether it is a linear layer by a whole parameter, as the user wrote it.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    compute: Callable[..., Any] | None = None
    keywords: tuple[tuple[str, Any], ...] = ()
    place: str = "the forward pass"
    is_whole: bool = False

    @property
    def given(self) -> tuple[Any, ...]:
        """All arguments, those by name last."""
        return (*self.arguments, *(one for _, one in self.keywords))

    @cached_property
    def reads(self) -> tuple[Operation, ...]:
        """Operations of which it reads the results, each once."""
        return tuple(dict.fromkeys(_operations_in(self.given)))

    def before(self) -> set[Operation]:
        """The operation, and all on which its result depends."""
        needed: list[Operation] = [self]
        found = set(needed)
        while needed:
            further = [one for one in needed.pop().reads if one not in found]
            found.update(further)
            needed += further
        return found

    @property
    def added(self) -> Iterator[Any]:
        """Arguments that are added and not multiplied."""
        for n in _ADDED.get(self.name, ()):
            if n < len(self.arguments):
                given = self.arguments[n]
                yield from given if isinstance(given, (list, tuple)) else [given]

    def run(self, values: Mapping[Operation, Any]) -> Any:
        """The result, from arrays by operation."""
        return self._computed(
            self.compute, lambda given, _: values[given] if isinstance(given, Operation) else given
        )

    def linear(self, values: Mapping[Operation, Any], varying: frozenset[Operation]) -> Any:
        """The linear part in some of the operations read, from arrays for these alone."""
        return self._varying_only(values, varying, self.compute, lambda value: value)

    def reach(self, values: Mapping[Operation, Any], varying: frozenset[Operation]) -> Any:
        """The linear part without signs, from indicators: ones at entries that read any one."""
        compute = _WITHOUT_SIGNS.get(self.name, self.compute)
        return indicator(
            self._varying_only(
                values, varying, compute, lambda x: indicator(x) if is_float(x) else x
            )
        )

    def _varying_only(
        self,
        values: Mapping[Operation, Any],
        varying: frozenset[Operation],
        compute: Callable[..., Any] | None,
        fixed: Callable[[Any], Any],
    ) -> Any:
        """A function of the arguments, everything added set to zero, and fixed arrays changed."""

        def argument(given: Any, is_added: bool) -> Any:
            if not isinstance(given, Operation):
                is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
                return 0 if is_number and is_added else given
            value = values[given]
            if given in varying or not hasattr(value, "dtype"):
                return value
            return value * 0 if is_added else fixed(value)

        return self._computed(compute, argument)

    def _computed(
        self, compute: Callable[..., Any] | None, argument: Callable[[Any, bool], Any]
    ) -> Any:
        """A function of the arguments; `argument` is told which of them are added."""
        added = _ADDED.get(self.name, ())

        def at(given: Any, is_added: bool) -> Any:
            if isinstance(given, (list, tuple)):
                parts = (at(one, is_added) for one in given)
                return tuple(parts) if isinstance(given, tuple) else list(parts)
            return argument(given, is_added)

        assert compute is not None, f"the {self.name} is given"
        given = [at(one, n in added) for n, one in enumerate(self.arguments)]
        return compute(*given, **{key: at(one, False) for key, one in self.keywords})


@dataclass(frozen=True, eq=False)
class Graph:
    """A forward pass with all weights as arguments.

    Attributes:
        operations: All operations, each after those that it reads.
        weights: Operations that stand for weights, by name or number.
        argument: Operation that stands for the input.
        output: Operation that gives the output.
        constants: Arrays that the forward pass brings with it, by their operations.
        owns: Begin and end of submodules that are taken whole, by the operation that ends one.
        rounding: Relative error with which a function itself rounds numbers on the way, 0 where it
            computes in the type of its arguments.
    """

    operations: tuple[Operation, ...]
    weights: Mapping[Any, Operation]
    argument: Operation
    output: Operation
    constants: Mapping[Operation, Any]
    owns: Mapping[Operation, tuple[str, Operation]] = field(default_factory=dict)
    rounding: float = 0.0

    def arrays(self, weights: Mapping[str, Any] | Sequence[Any]) -> dict[Operation, Any]:
        """Weights and constants by their operations.

        Args:
            weights: Weights by name or number.
        """
        named: Any = weights
        return dict(self.constants) | {one: named[name] for name, one in self.weights.items()}

    def used(self) -> set[Any]:
        """Names of weights on which the output depends."""
        found = {*self.output.before(), *(start for _, start in self.owns.values())}
        return {name for name, one in self.weights.items() if one in found}


def is_turned_parameter(given: Any) -> bool | None:
    """Whether an argument is a whole parameter in its transposed form; None for others."""
    turned = isinstance(given, Operation) and given.name == "t"
    stored = given.arguments[0] if turned else given
    return turned if getattr(stored, "name", "") == "weight" else None


def indicator(array: Any) -> Any:
    """Ones where an array is not zero, and zeros elsewhere."""
    ones = array != 0
    return ones.to(array.dtype) if hasattr(ones, "to") else np.asarray(ones, np.float64)


def is_float(array: Any) -> bool:
    """Whether an array of either library holds floats."""
    of_torch = getattr(array, "is_floating_point", None)
    return array.dtype.kind == "f" if of_torch is None else of_torch()


def number_in(array: Any) -> float | None:
    """The real number that an array of either library has everywhere; None for what is else."""
    if not hasattr(array, "reshape") or "complex" in str(array.dtype):
        return None
    flat = array.reshape(-1)
    return float(flat[0]) if len(flat) > 0 and bool((flat == flat[0]).all()) else None


def _operations_in(arguments: Any) -> Iterator[Operation]:
    for one in arguments:
        if isinstance(one, Operation):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _operations_in(one)
