"""Sums of quimb networks as checked problems of the engine.

A tensor is an operand, a network a term, and the sum a single definition:

    SUM[output_inds] = sum over networks of weight * product of tensors

with every index summed that is no output, so a hyperindex is an index like any other. Tensors that
hold the same array object, or that carry a shared tag, are the same leaf of the problem. Every
error message names the network, the finding and the expectation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jax.core import Tracer

from tnsim.engine.ir.problem import Definition, Operand, Problem, Stage, Term
from tnsim.errors import ModelError
from tnsim.models.arrays import as_array, host_array, requires_grad
from tnsim.options import is_list, shown

if TYPE_CHECKING:
    import quimb.tensor as qtn


WeightedNetwork = tuple[complex, "qtn.TensorNetwork"]
SUM = "SUM"
"""Name of the definition that the networks add up to."""
ZERO = "ZERO"
"""Name of the array that an empty sum reads."""
_APART = 200
"""Largest difference of the exponents of 10 of networks, which a float must hold."""
_WEIGHED = 60
"""Largest exponent of 2 of weights that are taken as they are: half of the range of float32."""
Tags = str | tuple[str, ...]
"""A selection of tensors: all that carry the tag, or every tag of the tuple."""


def weighted(networks: Any) -> Iterator[WeightedNetwork]:
    """Check the networks of a caller and give pairs (weight, network)."""
    import quimb.tensor as qtn

    if isinstance(networks, qtn.TensorNetwork):
        networks = [networks]
    for number, item in enumerate(networks):
        # A network alone has the weight 1.
        pair = (1.0, item) if isinstance(item, qtn.TensorNetwork) else item
        pair = pair if isinstance(pair, tuple | list) else (pair,)
        if len(pair) != 2 or not isinstance(pair[1], qtn.TensorNetwork):
            raise ModelError(
                "contract takes a quimb TensorNetwork, several, or pairs (weight, TensorNetwork); "
                f"item {number} is ({', '.join(type(part).__name__ for part in pair)})"
            )
        weight, network = pair
        factor = _planned(weight, f"the weight of network {number}")
        if not network.num_tensors:
            raise ModelError(f"network {number} has no tensors")
        yield factor, network


def _planned(value: Any, what: str, real: bool = False) -> complex:
    """A number that is part of a plan, as a float or, unless it is to be real, a complex number."""
    if isinstance(value, Tracer) or requires_grad(value):
        raise ModelError(
            f"{what} is traced, but weights and exponents are part of the plan: "
            "multiply it into a tensor"
        )
    try:
        found = math.nan if np.ndim(value) or isinstance(value, str) else complex(value)
    except (TypeError, ValueError, OverflowError):  # no number, or a whole one beyond floats
        found = math.nan
    if not np.isfinite(found) or (real and np.iscomplexobj(value)):
        numbers = "real number" if real else "number"
        raise ModelError(f"{what} is no finite {numbers}: {shown(value)}")
    return found if np.iscomplexobj(value) else found.real


def index_sizes(network: qtn.TensorNetwork, what: str) -> dict[str, int]:
    """Sizes of all indices of a network, checked to be the same on all tensors."""
    known: dict[str, int] = {}
    for tensor in network.tensors:
        for index, size in zip(tensor.inds, tensor.shape, strict=True):
            # quimb itself notices such a difference only when it contracts.
            if known.setdefault(index, size) != size:
                raise ModelError(
                    f"the index {index!r} of {what} has sizes {known[index]} and {size}"
                )
    return known


def check_symmetric(array: Any, what: str) -> None:
    """Check that exchanging any two axes changes nothing, unless the array is traced.

    Raises:
        ModelError: An exchange changes the array.

    Example:
        >>> check_symmetric(np.eye(2), "the identity")
    """
    # Exchanges of neighbouring axes make up all permutations.
    for axis in range(array.ndim - 1):
        same = array.shape[axis] == array.shape[axis + 1]
        if same and not isinstance(array, Tracer):
            same = np.array_equal(array, np.swapaxes(np.asarray(array), axis, axis + 1))
        if not same:
            raise ModelError(f"{what} is declared symmetric, but its axes are not exchangeable")


def check_equal(data: Any, array: Any, tags: frozenset[str]) -> None:
    """Check that tensors of a group hold equal arrays; of traced arrays only the shape."""
    same = tuple(data.shape) == tuple(array.shape)
    if same and not isinstance(data, Tracer) and not isinstance(array, Tracer):
        same = np.array_equal(host_array(data), array)
    if not same:
        raise ModelError(
            f"tensors with the tags {listed(tags)} are said to share one array, but theirs differ"
        )


def listed(names: Iterable[str]) -> str:
    """A list of names in words, of which up to eight are shown."""
    names = list(names)
    first = ", ".join(repr(str(name)) for name in names[:8])
    if not names:
        return "none"
    return first if len(names) <= 8 else f"{first} and {len(names) - 8} more"


def tag_set(tags: Tags) -> frozenset[str]:
    """Tags as a set.

    Example:
        >>> sorted(tag_set("LEFT")), sorted(tag_set(("A", "LEFT")))
        (['LEFT'], ['A', 'LEFT'])
    """
    return frozenset([tags]) if isinstance(tags, str) else frozenset(tags)


class Leaf(NamedTuple):
    """An array that tensors of the networks hold.

    Args:
        array: Entries of the array, divided by 2**exponent.
        symmetric: Whether the array was declared symmetric.
        tags: Sets of tags of the tensors that hold the array.
        exponent: Exponent of the unit of the array, see `contraction.in_units`.
    """

    array: Any
    symmetric: bool
    tags: list[frozenset[str]]
    exponent: Any = 0.0


@dataclass(frozen=True)
class NetworkSum:
    """A sum of networks as a problem.

    Args:
        problem: Problem with the sum as its only output.
        leaves: Arrays of the problem by name.
        counts: Number of times that each network holds each leaf, (networks, leaves).
        exponent: Exponent of the power of 10 that the sum lacks as a factor.
        unit: Exponent of the power of 2 that the sum lacks besides, where all weights are so large
            or so small that float32 holds none.
    """

    problem: Problem
    leaves: Mapping[str, Leaf]
    counts: np.ndarray
    exponent: float
    unit: int

    @property
    def is_complex(self) -> bool:
        """Whether an array holds complex numbers."""
        return any(leaf.array.dtype.kind == "c" for leaf in self.leaves.values())

    @property
    def output_inds(self) -> tuple[str, ...]:
        """Indices of the result, in order."""
        return self.problem.stages[0].definitions[0].indices


def network_sum(
    networks: qtn.TensorNetwork | Iterable[WeightedNetwork],
    output_inds: Sequence[str] | None,
    shared_tags: Iterable[Tags],
    symmetric_tags: Iterable[Tags],
) -> NetworkSum:
    """Read networks as the terms of a sum.

    Args:
        networks, output_inds, shared_tags, symmetric_tags: Arguments of `contraction.contract`.

    Returns:
        The problem and its arrays.

    Raises:
        ModelError: The networks cannot be added up; the message says which network differs and how.

    Example:
        >>> import quimb.tensor as qtn
        >>> matrix = qtn.Tensor(np.eye(3), ("i", "j"))
        >>> square = qtn.TensorNetwork([matrix, matrix.reindex({"i": "j", "j": "k"})])
        >>> found = network_sum(square, None, (), ())
        >>> found.output_inds, list(found.leaves), found.counts.tolist()
        (('i', 'k'), ['T0'], [[2.0]])
    """
    leaves = _Leaves(shared_tags, symmetric_tags)
    outputs: tuple[str, ...] | None = None
    if output_inds is not None:
        outputs = _distinct_indices(output_inds)
    sizes: tuple[int, ...] | None = None
    read: list[tuple[float, float, tuple[Operand, ...]]] = []
    for number, (weight, network) in enumerate(weighted(networks)):
        what = f"network {number}"
        known = index_sizes(network, what)
        if outputs is None:
            outputs = tuple(network.outer_inds())
        elif output_inds is None and set(outputs) != set(network.outer_inds()):
            raise ModelError(
                f"networks of a sum have equal outer indices: network 0 has {listed(outputs)}, "
                f"{what} has {listed(network.outer_inds())}; "
                "reindex it, or say with output_inds what is not to be summed over"
            )
        own = _sizes_of(outputs, known, what)
        if sizes is not None and own != sizes:
            raise ModelError(
                f"the outputs {listed(outputs)} have sizes {sizes} in network 0 and {own} in {what}"
            )
        sizes = own
        operands = tuple(leaves.operand(tensor, what) for tensor in network.tensors)
        exponent = _planned(network.exponent, f"the exponent of {what}", real=True)
        # A term of weight zero is checked like all others and then left out.
        if weight != 0.0:
            if isinstance(weight, complex):
                operands = (*operands, leaves.factor(weight))
                weight = 1.0
            read.append((weight, exponent.real, operands))
    return _as_problem(read, leaves.found, outputs or (), sizes)


def _as_problem(
    read: list[tuple[float, float, tuple[Operand, ...]]],
    leaves: dict[str, Leaf],
    outputs: tuple[str, ...],
    sizes: tuple[int, ...] | None,
) -> NetworkSum:
    """The sum of some (weight, exponent, tensors), in the scale of the largest exponent."""
    if not read:
        if sizes is None and outputs:
            raise ModelError(f"a sum of no networks says nothing of the sizes of {listed(outputs)}")
        # The sum of no networks is an array of zeros.
        leaves[ZERO] = Leaf(np.zeros(sizes or ()), False, [])
        read = [(1.0, 0.0, (Operand(ZERO, outputs),))]
    exponent = max(own for _, own, _ in read)
    apart = exponent - min(own for _, own, _ in read)
    if apart > _APART:
        raise ModelError(
            f"the exponents of the networks differ by {apart:.4g}, more than a float holds: "
            "call network.distribute_exponent() first"
        )
    terms = []
    counts = np.zeros((len(read), len(leaves)))
    columns = {name: n for n, name in enumerate(leaves)}
    # Weights carry the difference of exponents, as the sum has a single scale.
    weights = [weight * 10.0 ** (own - exponent) for weight, own, _ in read]
    _, unit = math.frexp(max(map(abs, weights)))
    unit = unit if abs(unit) > _WEIGHED else 0
    for row, (weight, (_, _, operands)) in enumerate(zip(weights, read, strict=True)):
        terms.append(Term(math.ldexp(weight, -unit), operands))
        for operand in operands:
            counts[row, columns[operand.name]] += 1
    problem = Problem(
        stages=(Stage((Definition(SUM, outputs, tuple(terms)),)),),
        shapes={name: tuple(leaf.array.shape) for name, leaf in leaves.items()},
        symmetric=frozenset(name for name, leaf in leaves.items() if leaf.symmetric),
        outputs=(SUM,),
    )
    return NetworkSum(problem, leaves, counts, exponent, unit)


class _Leaves:
    """The distinct arrays of networks, numbered in the order of their first use.

    An array is known by its address, so references keep all arrays alive: a freed address could be
    given to another array.
    """

    def __init__(self, shared_tags: Iterable[Tags], symmetric_tags: Iterable[Tags]) -> None:
        self.found: dict[str, Leaf] = {}
        self._shared = [tag_set(tags) for tags in _tag_groups(shared_tags)]
        self._symmetric = [tag_set(tags) for tags in _tag_groups(symmetric_tags)]
        self._names: dict[int | frozenset[str], str] = {}
        self._held: dict[str, Any] = {}

    def operand(self, tensor: qtn.Tensor, what: str) -> Operand:
        """The operand of a tensor in the network that messages call `what`."""
        data, tags = tensor.data, frozenset(tensor.tags)
        shared = [group for group in self._shared if group <= tags]
        if len(shared) > 1:
            raise ModelError(f"a tensor of {what} belongs to several groups of shared_tags: {tags}")
        # Without tags of a group, tensors share an array where it is the same object.
        key = shared[0] if shared else id(data)
        if key not in self._names:
            self._add_leaf(key, tensor, what)
        name = self._names[key]
        leaf = self.found[name]
        # The same object needs no comparison.
        if data is not self._held[name]:
            check_equal(data, leaf.array, shared[0])
        if tags not in leaf.tags:
            leaf.tags.append(tags)
        return Operand(name, tuple(tensor.inds))

    def factor(self, weight: complex) -> Operand:
        """A complex weight as a tensor without indices, as weights of terms are real."""
        name = f"T{len(self._names)}"
        self._names[frozenset({name})] = name
        self.found[name] = Leaf(np.asarray(weight, np.complex128), False, [])
        return Operand(name, ())

    def _add_leaf(self, key: int | frozenset[str], tensor: qtn.Tensor, what: str) -> None:
        """Add a leaf with a numbered name."""
        name = f"T{len(self._names)}"
        what = f"a tensor of {what} with the indices {listed(tensor.inds)}"
        array = as_array(tensor.data, what, tensor.ndim, real=False)
        symmetric = any(group.issubset(tensor.tags) for group in self._symmetric)
        if symmetric:
            check_symmetric(array, what)
        self._names[key] = name
        self._held[name] = tensor.data
        self.found[name] = Leaf(array, symmetric, [])


def leaf_of(networks: NetworkSum, tags: Tags) -> str:
    """The name of the leaf that tensors with given tags hold.

    Raises:
        ModelError: There is no such tensor, the tensors hold several leaves, or these are no tags.
    """
    wanted = tag_set(*_tag_groups([tags]))
    found = []
    for name, leaf in networks.leaves.items():
        if any(wanted <= carried for carried in leaf.tags):
            found.append(name)
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(
            f"the tags {listed(sorted(wanted))} stand for {len(found)} different arrays: "
            "give more tags in a tuple, or say with shared_tags that these are one"
        )
    carried = set().union(*itertools.chain(*(leaf.tags for leaf in networks.leaves.values())))
    raise ModelError(
        f"no tensor carries the tags {listed(sorted(wanted))}; there are {listed(sorted(carried))}"
    )


def given_array(networks: NetworkSum, name: str, given: Any, real: bool) -> Any:
    """Check an array that replaces the array of a leaf, and return it.

    Args:
        networks: Networks for which the plan was made.
        name: Name of the leaf.
        given: New array of the leaf.
        real: Whether complex numbers are refused.

    Raises:
        ModelError: The array has another shape, is not real or not finite, or lacks a declared
            symmetry.
    """
    leaf = networks.leaves[name]
    what = f"the array of tensors with the tags {listed(sorted(leaf.tags[0]))}"
    array = as_array(given, what, leaf.array.ndim, real=real)
    if array.shape != leaf.array.shape:
        raise ModelError(f"{what} has shape {array.shape}, planned was {leaf.array.shape}")
    if leaf.symmetric:
        check_symmetric(array, what)
    return array


def _sizes_of(outputs: tuple[str, ...], known: dict[str, int], what: str) -> tuple[int, ...]:
    missing = [index for index in outputs if index not in known]
    if missing:
        raise ModelError(f"{what} lacks the outputs {listed(missing)}; it has {listed(known)}")
    return tuple(known[index] for index in outputs)


def _distinct_indices(output_inds: Sequence[str]) -> tuple[str, ...]:
    outputs = (output_inds,) if isinstance(output_inds, str) else tuple(output_inds)
    if len(set(outputs)) < len(outputs):
        raise ModelError(f"output_inds names an index twice: {listed(outputs)}")
    return outputs


def _tag_groups(tags: Iterable[Tags]) -> Iterable[Tags]:
    """The given tags as an iterable; a single string is a single tag, as everywhere in quimb."""
    groups: list[Any] = [tags] if isinstance(tags, str) else list(tags) if is_list(tags) else [None]
    if not all(isinstance(group, str) or is_list(group) for group in groups):
        raise ModelError(f"tags are texts, or tuples of texts, in a list; found {shown(tags)}")
    return groups
