"""Contraction of sums of any quimb networks through the engine.

The sum is planned as a whole, like an inner product of models: sub-contractions that networks have
in common are computed once, common factors are taken out of sums, and large contractions are
computed in chunks. `networks(a, b, metric)` may be given as it is; the sum is then
`inner(a, b, metric)`.

*Units.* No float holds the product of a few hundred large arrays. Every array is therefore divided
by a power of two, its *unit*, and the sum by the factor that all its networks have in common. If
every network holds each array equally often, that is all. Otherwise, as in `A + A B`, only units
that change every network equally may be taken out: with counts C[network, array] and logarithms s
of the units, s is projected on the null space of the differences of the rows of C,

    e = s - D^+ D s,    D = C[1:] - C[0],

arrays keep 2**(s - e), and the sum lacks 2**(C[0] e).

*Problems.* A tensor is an operand, a network a term, and the sum a single definition:

    SUM[output_inds] = sum over networks of weight * product of tensors

with every index summed that is no output, so a hyperindex is an index like any other. Tensors that
hold the same array object, or that carry a shared tag, are the same leaf of the problem. Every
error message names the network, the finding and the expectation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Float
from numpy.typing import DTypeLike

from tnsim.engine.ir.problem import (
    ALL_DTYPES,
    DTYPES,
    Definition,
    Operand,
    Problem,
    Stage,
    Term,
    dtype_name,
)
from tnsim.engine.plan import Plan
from tnsim.engine.planner import Budget, plan_problem, within
from tnsim.engine.runtime import execution
from tnsim.engine.runtime.execution import Tier, tier_in_use
from tnsim.engine.search.paths import searched_by
from tnsim.errors import ModelError, TnsimError
from tnsim.models.arrays import Array, as_array, host_array, requires_grad
from tnsim.options import checked, is_list, shown
from tnsim.scaled import (
    Scaled,
    beyond_float,
    largest_of,
    library,
    not_differentiated,
    power,
    shifted,
)

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


_LARGEST = 1000
"""Logarithm to base 2 of the largest unit, such that its inverse is a float too."""
_NEAR = 100
"""Largest exponent of 10 whose power multiplies a number near one within the range of floats."""
_STRETCH, _CLOSE = 16.0, 2.0**-6
"""Most powers of 2 by which a unit is changed, and the difference of two changes of one effect."""
_FEW = 60
"""Number of tensors whose units are never so wrong that floats hold no product of them."""
_NONE = 1e-9
"""Entries of a projection below this threshold are rounding."""
_BLOCK = 2**14
"""Entries of an array that are squared at once."""
_TIERS: Mapping[str, Tier] = {"jax": "compile", "numpy": "interpret"}
"""The tier in which a plan runs by library."""


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


class LeafArray(NamedTuple):
    """An array that tensors of the networks hold.

    Args:
        array: Entries of the array, divided by 2**exponent.
        symmetric: Whether the array was declared symmetric.
        tags: Sets of tags of the tensors that hold the array.
        exponent: Exponent of the unit of the array, see `in_units`.
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
    leaves: Mapping[str, LeafArray]
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
        networks, output_inds, shared_tags, symmetric_tags: Arguments of `contract`.

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
    leaves: dict[str, LeafArray],
    outputs: tuple[str, ...],
    sizes: tuple[int, ...] | None,
) -> NetworkSum:
    """The sum of some (weight, exponent, tensors), in the scale of the largest exponent."""
    if not read:
        if sizes is None and outputs:
            raise ModelError(f"a sum of no networks says nothing of the sizes of {listed(outputs)}")
        # The sum of no networks is an array of zeros.
        leaves[ZERO] = LeafArray(np.zeros(sizes or ()), False, [])
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
        self.found: dict[str, LeafArray] = {}
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
        self.found[name] = LeafArray(np.asarray(weight, np.complex128), False, [])
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
        self.found[name] = LeafArray(array, symmetric, [])


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


_ADVICE = "contract fewer networks at once, smaller ones, or give a larger tnsim.Budget"


def in_units(array: Array) -> Scaled[Array]:
    """An array divided by its unit, a power of two, and the exponent of the unit.

    Networks of random arrays divided by their units have values near 1. A bond of size n between
    two random arrays multiplies a network by sqrt(n), so each of its ends counts n**(1/4).
    Derivatives treat units as constants, since unit and exponent cancel.

    Example:
        >>> array, exponent = in_units(np.full((2, 2), 3e200))
        >>> array.round(2).tolist(), float(exponent)
        ([[0.98, 0.98], [0.98, 0.98]], 666.0)
    """
    exponent = _exponent_of_unit(array)
    return Scaled(array * 2.0**-exponent, exponent)


def _exponent_of_unit(array: Array) -> Any:
    """The exponent of the unit of an array, see `in_units`."""
    xp = library(array)
    # A unit is a choice, so no derivative goes through it.
    fixed = not_differentiated(array)
    largest = largest_of(fixed) if xp is np else abs(fixed).max()
    largest = xp.where(largest > 0, largest, 1.0)
    if xp is np:  # in blocks, as the array may be as large as memory allows
        flat, squares = fixed.ravel("K"), 0.0
        for start in range(0, flat.size, _BLOCK):
            block = flat[start : start + _BLOCK] / largest
            squares += float(np.vdot(block, block).real)
        mean = np.float64(squares / flat.size)
    else:
        mean = xp.mean(abs(fixed / largest) ** 2)
    # The stretch of a random square matrix: the size of its entries times the fourth root of their
    # number.
    size = xp.sqrt(mean) * array.size**0.25
    exponent = xp.log2(largest) + xp.log2(xp.where(size > 0, size, 1.0))
    return xp.clip(xp.round(exponent), -_LARGEST, _LARGEST)


def balanced(
    leaves: Mapping[str, LeafArray], counts: Float[np.ndarray, "networks arrays"]
) -> Scaled[dict[str, Array]]:
    """Arrays without the units that may be taken out of all networks alike.

    Args:
        leaves: The arrays over their units, in the order of the columns of `counts`.
        counts: Number of times that each network holds each array.

    Returns:
        The arrays, and the exponent of the factor that the sum then lacks.

    Example:
        With networks `A A B` and `A A`, A has a unit and B has not.

        >>> one = LeafArray(np.ones(1), False, [])
        >>> leaves = {"A": one._replace(exponent=3.0), "B": one._replace(exponent=5.0)}
        >>> arrays, exponent = balanced(leaves, np.array([[2.0, 1.0], [2.0, 0.0]]))
        >>> float(arrays["A"][0]), round(float(arrays["B"][0]), 9), round(float(exponent), 9)
        (1.0, 32.0, 6.0)
    """
    exponents = [leaf.exponent for leaf in leaves.values()]
    xp = library(exponents)
    # Units in the null space of D change every network alike; D^+ D projects on the other units,
    # which have to stay in the arrays.
    rows = np.unique(counts, axis=0)
    differences = rows[1:] - rows[0]
    projection = np.linalg.pinv(differences) @ differences
    stays = projection @ xp.stack(exponents)
    arrays = {name: leaf.array for name, leaf in leaves.items()}
    for name, row, kept in zip(leaves, projection, stays, strict=True):
        # Where the row is zero, the unit changes all networks alike and need not stay.
        if abs(row).max() > _NONE:
            arrays[name] = arrays[name] * 2.0**kept
    return Scaled(arrays, rows[0] @ (xp.stack(exponents) - stays))


@checked(own="shared_tags symmetric_tags")
def contract(
    networks: qtn.TensorNetwork | Iterable[WeightedNetwork],
    output_inds: Sequence[str] | None = None,
    *,
    shared_tags: Iterable[Tags] = (),
    symmetric_tags: Iterable[Tags] = (),
    strip_exponent: bool = False,
    dtype: DTypeLike | None = None,
    backend: Literal["jax", "numpy"] | None = None,
    budget: Budget = Budget(),
    optimize: Any = None,
) -> Any:
    """The sum of weighted tensor networks, planned and contracted as a whole.

    Tensors that hold the same array object are recognised as copies, across networks too, so common
    parts of networks are contracted once and common factors are taken out of the sum.

    Args:
        networks: A quimb `TensorNetwork`, or any iterable of networks, which are added up, or of
            (weight, network), such as `tnsim.tensor_networks.networks` gives. Hyperindices are
            summed like any other index.
        output_inds: Indices of the result, in order; all other indices are summed over. None for
            the outer indices (on a single tensor each) in the order of the first network; all
            networks must then have the same outer indices.
        shared_tags: Tags, or tuples of tags, of tensors that hold equal arrays. Tensors that carry
            such a tag, or all tags of a tuple, then share an array.
        symmetric_tags: Tags, or tuples of tags, of tensors whose axes may be exchanged in any way,
            so that more sub-contractions are equal.
        strip_exponent: Whether to return a mantissa and an exponent, as in quimb, for values
            beyond the range of floats.
        dtype: Precision of the computation: float64 or float32, complex128 or complex64. None for
            float64, or complex128 where an array is complex.
        backend: Library that computes: `"jax"` compiles first, `"numpy"` does not; None for the
            tier of the session (`tnsim.Session`).
        budget: Limits on memory and work of the contraction.
        optimize: Name of a method of cotengra, such as "greedy", or an optimiser, such as a
            `cotengra.ReusableHyperOptimizer`, that searches the path of every product; None for the
            searches of tnsim. Common parts are shared and large contractions chunked in any case;
            slices of the optimiser are not used.

    Returns:
        An array of float64 or complex128 with the axes `output_inds`, or a scalar without axes;
        inside a JAX trace a traced array in the dtype of the traced arrays. With `strip_exponent` a
        pair (mantissa, exponent) with the value `mantissa * 10**exponent`, where the largest entry
        of the mantissa is 1 in size; the mantissa of a sum of zero is 0.

    Raises:
        ModelError: The networks cannot be added up, an array is not finite, or empty, or the
            optimiser finds no path.
        TooLarge: The contraction would exceed the budget; nothing has run.
        TnsimError: A number left the range of floats on the way; use `strip_exponent`.

    Example:
        >>> import quimb.tensor as qtn, tnsim
        >>> a, b, c = (qtn.Tensor(n * np.eye(2), ("i", "j")) for n in (1, 2, 3))
        >>> float(tnsim.tensor_networks.contract([(1.0, a & b), (0.5, a & c)]))
        7.0
        >>> float(tnsim.tensor_networks.contract([a & b, a & c]))
        10.0
        >>> tnsim.tensor_networks.contract(a & c.reindex({"i": "j", "j": "k"}), ("k", "i"))
        array([[3., 0.],
               [0., 3.]])
        >>> square = tnsim.Model([tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])])
        >>> float(tnsim.tensor_networks.contract(tnsim.tensor_networks.networks(square, square)))
        3.0
    """
    expression = contract_expression(
        networks,
        output_inds,
        shared_tags=shared_tags,
        symmetric_tags=symmetric_tags,
        strip_exponent=strip_exponent,
        dtype=dtype,
        backend=backend,
        budget=budget,
        optimize=optimize,
    )
    return expression()


@checked(own="shared_tags symmetric_tags")
def contract_expression(
    networks: qtn.TensorNetwork | Iterable[WeightedNetwork],
    output_inds: Sequence[str] | None = None,
    *,
    shared_tags: Iterable[Tags] = (),
    symmetric_tags: Iterable[Tags] = (),
    strip_exponent: bool = False,
    dtype: DTypeLike | None = None,
    backend: Literal["jax", "numpy"] | None = None,
    budget: Budget = Budget(),
    optimize: Any = None,
) -> Expression:
    """Plan a sum of networks once, to contract it many times with new arrays.

    Args:
        networks, output_inds, shared_tags, symmetric_tags: Arguments of `contract`.
        strip_exponent, dtype, backend, budget, optimize: Arguments of `contract`.

    Returns:
        A function of arrays by tag, to which `jax.grad`, `jax.jit` and `jax.vmap` apply. Arrays
        that are not given are taken from the networks and stay on the device.

    Raises:
        ModelError: The networks cannot be added up, or an array is not finite, or empty.
        TooLarge: The contraction would exceed the budget.

    Example:
        >>> import jax, quimb.tensor as qtn, tnsim
        >>> state = qtn.Tensor(np.ones(3), ("i",), "STATE")
        >>> matrix = qtn.Tensor(np.eye(3), ("i", "j"), "MATRIX")
        >>> energy = tnsim.tensor_networks.contract_expression(
        ...     state & matrix & state.reindex({"i": "j"}), shared_tags=["STATE"]
        ... )
        >>> float(energy()), float(energy({"STATE": np.array([1.0, 2.0, 3.0])}))
        (3.0, 14.0)
        >>> jax.grad(energy)({"STATE": np.array([1.0, 2.0, 3.0])})["STATE"].tolist()
        [2.0, 4.0, 6.0]
    """
    if backend not in (None, *_TIERS):
        raise ModelError(f"backend must be 'jax' or 'numpy', found {backend!r}")
    total = network_sum(networks, output_inds, shared_tags, symmetric_tags)
    precision = _precision_of(dtype, total)
    count = len(total.counts)
    name = "a network" if count == 1 else f"a sum of {count:,} networks"
    # A plan that does not fit the budget ends here, with advice.
    with searched_by(optimize):
        plan = within(
            budget, name, partial(plan_problem, total.problem, name, True, precision), _ADVICE
        )
    tier = tier_in_use() if backend is None else _TIERS[backend]
    leaves = dict(total.leaves)
    exponents = {leaf: _unit_of(value.array) for leaf, value in leaves.items()}
    if strip_exponent:
        leaves = {leaf: _scaled_leaf(value) for leaf, value in leaves.items()}
    if not _traced_arrays(leaves):
        # Arrays that stay are moved to the device once. Those near the ends of the range of floats
        # wait for a call, which divides small ones by their units first.
        near_one = {
            leaf: value.array
            for leaf, value in leaves.items()
            if strip_exponent or abs(exponents[leaf]) < _half_range(precision)
        }
        for leaf, array in _placed_arrays(near_one, precision, tier).items():
            leaves[leaf] = leaves[leaf]._replace(array=array)
    return Expression(plan, replace(total, leaves=leaves), strip_exponent, tier, exponents)


@dataclass(frozen=True, eq=False)
class Expression:
    """A planned sum of networks, see `contract_expression`.

    Args:
        plan: Plan that a call runs, with its costs.
        networks: Networks as read, with the arrays that a call does not replace.
        strip_exponent: Whether calls return a mantissa and an exponent.
        tier: Tier in which the plan runs outside a JAX trace: "compile" or "interpret".
        exponents: Exponents of the units of the arrays, see `in_units`.
    """

    plan: Plan
    networks: NetworkSum
    strip_exponent: bool
    tier: Tier
    exponents: Mapping[str, float]

    @checked
    def __call__(self, arrays: Mapping[Tags, Any] | None = None) -> Any:
        """The sum with new arrays in the networks.

        Args:
            arrays: New arrays by tag. A tag, or all tags of a tuple together, must stand for a
                single array; the new array replaces it in every tensor that holds it.

        Returns:
            The sum, in the form that `contract` returns.

        Raises:
            ModelError: Tags stand for no array or for several, or an array has another shape or is
                not finite, or complex where the plan is real.
            TnsimError: A number left the range of floats on the way.
        """
        leaves, exponents = dict(self.networks.leaves), dict(self.exponents)
        for tags, given in (arrays or {}).items():
            name = leaf_of(self.networks, tags)
            array = given_array(self.networks, name, given, real=self.plan.dtype in DTYPES)
            leaf = leaves[name]._replace(array=array)
            leaves[name] = _scaled_leaf(leaf) if self.strip_exponent else leaf
            exponents[name] = _unit_of(array)
        traced = _traced_arrays(leaves)
        if traced:
            # Arrays that are not traced may be complex where those that are traced are real.
            is_complex = any(leaf.array.dtype.kind == "c" for leaf in leaves.values())
            kinds = [array.dtype for array in traced] + [np.complex64] * is_complex
            dtype = str(jnp.result_type(*kinds))
            return self._finished_value(
                *self._contracted_sum(leaves, dtype, "trace", self.strip_exponent)
            )
        is_scaled = self.strip_exponent
        if not is_scaled and self._may_underflow(exponents):
            # An overflow shows in the result; an underflow on the way does not.
            is_scaled, leaves = True, {name: _scaled_leaf(leaf) for name, leaf in leaves.items()}
        with execution.precision():
            value, exponent = self._sum_on_host(leaves, is_scaled)
            finished = self._finished_value(value, exponent)
        is_lost = not self.strip_exponent and beyond_float(finished, value)
        if is_lost or not np.isfinite([*map(largest_of, jax.tree.leaves(finished))]).all():
            raise TnsimError(
                f"the contraction left the range of {self.plan.dtype}; "
                "use strip_exponent=True, which returns (mantissa, exponent)"
            )
        return finished

    def _sum_on_host(self, leaves: Mapping[str, LeafArray], is_scaled: bool) -> tuple[Any, float]:
        """The sum in the precision of the plan, and the exponent of the power of 2 that it lacks.

        Units are those of random arrays. Sums without cancellation, as of positive arrays, grow
        faster with the number of tensors, and others more slowly: a thousand tensors may leave the
        range of floats. Then all units are changed by one power of two, which is found by halving.
        """
        step, least, most = 0.0, -_STRETCH, _STRETCH
        tensors = self.networks.counts.sum(axis=1).max()
        while True:
            moved = {
                name: leaf._replace(array=leaf.array * 2.0**-step, exponent=leaf.exponent + step)
                for name, leaf in (leaves.items() if step else ())
            }
            value, exponent = jax.device_get(
                self._contracted_sum(moved or leaves, self.plan.dtype, self.tier, is_scaled)
            )
            # Float64 holds the exponent, whatever the precision of the run.
            value = np.asarray(value, np.result_type(value, np.float64))
            held = [leaf.array for leaf in leaves.values()]
            # What JAX gives is read-only, and an array of the networks stays theirs.
            if not value.flags.writeable or any(np.may_share_memory(value, x) for x in held):
                value = value.copy()
            value = value[()]
            largest = largest_of(value)
            is_finite = bool(np.isfinite(largest))
            # Numbers below the normal ones are rounded to few digits, down to none. Of few tensors
            # a zero is no underflow, as units are not that wrong.
            is_normal = largest >= np.finfo(self.plan.dtype).tiny
            is_done = is_finite and (is_normal or tensors < _FEW)
            if is_done or not is_scaled or most - least < _CLOSE:
                return value, float(exponent)
            least, most = (least, step) if is_finite else (step, most)
            step = (least + most) / 2

    def _may_underflow(self, exponents: Mapping[str, float]) -> bool:
        """Whether the product of the small arrays of a network may leave the range of floats."""
        # Large arrays cannot make up for small ones on the way.
        small = np.array([min(exponent, 0.0) for exponent in exponents.values()])
        lowest = (self.networks.counts @ small).min()
        return bool(lowest < -_half_range(self.plan.dtype))

    def _contracted_sum(
        self, leaves: Mapping[str, LeafArray], dtype: str, tier: Tier, is_scaled: bool
    ) -> tuple[Any, Any]:
        """The sum in a given precision, and the exponent of the power of 2 that the sum lacks."""
        arrays, exponent = {name: leaf.array for name, leaf in leaves.items()}, 0.0
        if is_scaled:
            arrays, exponent = balanced(leaves, self.networks.counts)
        arrays = _placed_arrays(arrays, dtype, tier)
        value = execution.run(self.plan, arrays, tier).values[SUM]
        return value, exponent + self.networks.unit

    def _finished_value(self, value: Any, exponent: Any) -> Any:
        """The return value of a call, from the sum and the exponent of 2 that it lacks."""
        of_ten = self.networks.exponent
        if not self.strip_exponent:
            near = min(max(of_ten, -_NEAR), _NEAR)
            exponent = exponent + (of_ten - near) * np.log2(10.0)
            if isinstance(value, jax.Array):
                return value * float(10.0**near) * float(np.exp2(exponent))
            if not (near or exponent):
                return value
            # The powers may make up for each other and for the value: it is brought near one first.
            own = np.float64(np.frexp(largest_of(value))[1])
            return power(shifted(value, -own) * 10.0**near, own + exponent)
        xp = library(value)
        largest = largest_of(value) if xp is np else abs(value).max()
        # A result of zero has no logarithm.
        largest = xp.where(largest > 0, largest, 1.0)
        logarithm = xp.log10(largest) + exponent * np.log10(2.0) + of_ten
        if isinstance(value, np.ndarray):  # in the result itself, which may be large
            return np.divide(value, largest, out=value), logarithm
        return value / largest, logarithm

    def __repr__(self) -> str:
        outputs = ", ".join(self.networks.output_inds)
        arrays = len(self.networks.leaves)
        return (
            f"Expression({self.plan.metric} over {arrays} arrays, outputs ({outputs}); "
            f"{self.plan.multiplications:,} multiplications)"
        )


def _precision_of(dtype: DTypeLike | None, networks: NetworkSum) -> str:
    """The name of the precision to compute in.

    Raises:
        ModelError: There is no such precision, or it is real and the networks are complex.
    """
    if dtype is None:
        return "complex128" if networks.is_complex else "float64"
    name = dtype_name(dtype, ALL_DTYPES)
    if networks.is_complex and name in DTYPES:
        raise ModelError(f"the networks hold complex numbers, which {name} does not")
    return name


def _half_range(dtype: str) -> float:
    """Half of the range of exponents of floats, which leaves a margin for sums and products."""
    return -np.finfo(dtype).minexp / 2


def _scaled_leaf(leaf: LeafArray) -> LeafArray:
    """A leaf with its array divided by its unit."""
    array, exponent = in_units(leaf.array)
    return leaf._replace(array=array, exponent=exponent)


def _unit_of(array: Any) -> float:
    """Logarithm to base 2 of the unit of an array; 0 for a traced array."""
    return 0.0 if isinstance(array, Tracer) else float(_exponent_of_unit(array))


def _traced_arrays(leaves: Mapping[str, LeafArray]) -> list[Tracer]:
    """The arrays that JAX traces."""
    return [leaf.array for leaf in leaves.values() if isinstance(leaf.array, Tracer)]


def _placed_arrays(arrays: Mapping[str, Any], dtype: str, tier: Tier) -> dict[str, Any]:
    """Arrays in a given precision, in the place where the tier reads them."""
    if tier == "trace":
        return {name: jnp.asarray(array, dtype) for name, array in arrays.items()}
    with execution.precision():
        return execution.placed(dict(arrays), dtype, tier)
