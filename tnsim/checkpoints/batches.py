"""Batches of inputs: whether one depends on others, and layers beside a function on several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from tnsim.checkpoints.affine_values import Library
from tnsim.checkpoints.entrywise import is_entrywise
from tnsim.checkpoints.norms import Normed, relative_error
from tnsim.checkpoints.operations import (
    FILLS,
    PRODUCTS,
    SUMS,
    Graph,
    Operation,
    is_affine,
    is_float,
    number_in,
)
from tnsim.errors import ModelError, UnsupportedLayer

JOINED = (
    "computes with the number of its inputs or with more than one of them: what it gives for an "
    "input depends on the batch around it, so it is no function of an input"
)
_ARITHMETIC = (SUMS - {"sum", "mean"}) | PRODUCTS | {"full", "new_full", "masked_fill"}
"""Operations whose numbers count, which are the shape of the batch in others."""


def readings(example: Any) -> list[bool]:
    """Whether the second axis of an example is positions of sequences, in the order of trial.

    Example:
        >>> readings(np.zeros((1, 5, 3))), readings(np.zeros((1, 5), int))
        ([True, False], [True])
    """
    if not is_float(example):  # token numbers
        return [example.ndim == 2]
    return [True, False] if example.ndim == 3 else [False]


def check_batches(
    one: Graph,
    written: Callable[[int], Graph],
    weights: Mapping[str, Any] | Sequence[Any],
    pair: Any,
    library: Library,
    what: str,
) -> None:
    """Raise `UnsupportedLayer` where what a forward pass gives for an input depends on the others.

    Args:
        one: Operations on a single input.
        written: Function from a number of inputs to the operations on so many.
        weights: Weights by name or number.
        pair: Two inputs.
        library: Functions of arrays.
        what: Words for what is read.
    """
    two = written(2)
    try:
        _check_alike(one, two, what)
    except UnsupportedLayer:
        # A batch of one may lose its axis on the way, which larger ones do not.
        _check_alike(two, written(3), what)
    if joins_inputs(two, two.arrays(weights), pair, library):
        raise UnsupportedLayer(f"{what} {JOINED}")


def _check_alike(one: Graph, other: Graph, what: str) -> None:
    """Raise `UnsupportedLayer` where the operations on more inputs are others, shapes aside."""
    refusal = f"{what} {JOINED}"
    weights = {made: name for graph in (one, other) for name, made in graph.weights.items()}
    constants = {**one.constants, **other.constants}
    pairs = [(one.output, other.output)]
    seen = set(pairs)
    while pairs:
        pair = first, second = pairs.pop()
        same_kind = first.name == second.name and len(first.reads) == len(second.reads)
        if not same_kind or weights.get(first) != weights.get(second):
            raise UnsupportedLayer(refusal)
        if first.name in _ARITHMETIC or is_entrywise(first.name):
            numbers, others = (
                [x for given in one.given if (x := _number(given, constants)) is not None]
                for one in pair
            )
            if numbers != others:
                raise UnsupportedLayer(f"{refusal} ({first.name} with {numbers} and with {others})")
        further = [x for x in zip(first.reads, second.reads, strict=True) if x not in seen]
        seen.update(further)
        pairs += further


def _number(given: Any, constants: Mapping[Operation, Any]) -> float | None:
    """An argument that is a number, or a constant array of equal numbers."""
    if isinstance(given, Operation):
        return number_in(constants[given]) if given in constants else None
    return given if isinstance(given, (int, float)) else None


def joins_inputs(graph: Graph, arrays: Mapping[Operation, Any], x: Any, library: Library) -> bool:
    """Whether an entry of the output reads more than one input of a batch of two.

    Args:
        graph: Operations on two inputs.
        arrays: Weights and constants, by their operations.
        x: Two inputs.
        library: Functions of arrays.
    """
    numbers: dict[Operation, Any] = {**arrays, graph.argument: x}
    first = np.zeros(tuple(x.shape))
    first[0] = 1
    read: dict[Operation, tuple[Any, Any]] = {
        graph.argument: (library.array(first), library.array(1 - first))
    }
    for one in graph.operations:
        if one not in numbers:
            numbers[one] = one.run(numbers)
            if any(before in read for before in one.reads) and one.name not in FILLS:
                pair = [_reached(one, numbers, read, n, library) for n in (0, 1)]
                read[one] = (pair[0], pair[1])
    if graph.output not in read:
        return False
    one, two = read[graph.output]
    return len(one) != 2 or bool(one[1].any()) or bool(two[0].any())


def _reached(
    one: Operation,
    numbers: Mapping[Operation, Any],
    read: Mapping[Operation, tuple[Any, Any]],
    n: int,
    library: Library,
) -> Any:
    """The entries of a result that depend on an input of a batch of two."""
    known = frozenset(before for before in one.reads if before in read)
    here = {before: read[before][n] for before in known}
    if is_affine(one.name) and one.name not in ("mul", "where", "embedding"):
        # The others are ones where each of several factors counts, and zeros in a sum.
        fill = int(one.name in PRODUCTS)
        each = []
        for before in known:
            others = {other: here[other] * 0 + fill for other in known if other is not before}
            each.append(one.reach({**numbers, **others, before: here[before]}, known))
        return sum(each[1:], each[0])
    total = library.array(np.zeros(tuple(numbers[one].shape)))
    for indicator in here.values():
        if one.name == "embedding":
            total = total + indicator[..., None]
        else:  # of others over the last axis, as a norm
            total = total + (indicator if is_entrywise(one.name) else indicator.sum(-1)[..., None])
    return total


class Beside(NamedTuple):
    """Outputs of layers and of the function that they are to compute.

    Attributes:
        scale: Size of the inputs.
        outputs: Outputs of the layers.
        expected: Outputs of the function.
    """

    scale: float
    outputs: np.ndarray
    expected: np.ndarray

    @property
    def error(self) -> float:
        """Root mean square of the differences, relative to the outputs of the function."""
        return relative_error(self.outputs, self.expected)


def beside(
    run: Callable[[np.ndarray], np.ndarray],
    layers: Sequence[Normed],
    example: Any,
    batches: Iterable[tuple[float, int]],
) -> list[Beside]:
    """Layers beside a function, on random batches.

    Args:
        run: The function of inputs in NumPy.
        layers: Layers that were read.
        example: Inputs that the function takes.
        batches: Size of the normal inputs, and number of inputs, of each batch.

    Returns:
        The outputs on each batch on which those of the function are finite numbers: a deep
        polynomial of large inputs has none.

    Raises:
        ModelError: There is no such batch.
    """
    rng = np.random.default_rng(2)
    width = layers[0].layer.d_in
    drawn = np.zeros(0)
    found = []
    for scale, count in batches:
        shape = (count, *example.shape[1:])
        if is_float(example):
            # Opposite inputs take the other branch of a forward pass that asks for a sign.
            drawn = drawn if scale == -1 else rng.normal(size=shape)
            inputs = scale * drawn
            # Flat where the function flattens its input.
            rows = inputs if shape[-1] == width else inputs.reshape(count, width)
        else:
            inputs = rng.integers(width, size=shape)
            rows = np.eye(width)[inputs]
        expected = run(inputs)
        if np.isfinite(expected).all():
            with np.errstate(over="ignore", invalid="ignore"):
                outputs = np.asarray(reduce(lambda x, layer: layer(x), layers, rows))
            found.append(Beside(scale, outputs, expected))
    if not found:
        raise ModelError(
            "the outputs on random inputs are no finite numbers: divide the weights, or compare "
            "the outputs on inputs of yours, tnsim.Empirical(inputs)"
        )
    return found
