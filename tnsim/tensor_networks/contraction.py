"""Arrays in units of their own. In: the arrays of a sum of networks. Out: the same near one, a log.

No float holds what a product of a few hundred large arrays gives, so every array is divided by a
power of two, its *unit*, and the sum by what all its networks have in common. Networks that hold
each array equally often need no more. Where they do not, as in `A + A B`, only such units may be
taken out as change every network equally: with counts C[network, array] and logarithms s of the
units, s is projected on the null space of the differences of the rows of C,

    e = s - D^+ D s,    D = C[1:] - C[0],

arrays keep 2**(s - e), and the sum lacks 2**(C[0] e).

[merged from tensor_networks/contraction]
The engine for networks of anybody's. In: quimb networks with weights. Out: their sum.

The sum is planned as a whole, like an inner product of models: sub-contractions that networks have
in common are computed once, common factors are taken out of sums, and what is large is computed in
chunks. `networks(a, b, metric)` may be given as it is; its sum is `inner(a, b, metric)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from autoray import do
from jax.core import Tracer
from jaxtyping import Float
from numpy.typing import DTypeLike

from tnsim.engine.budget import Budget, within
from tnsim.engine.ir.dtypes import ALL_DTYPES, DTYPES, dtype_name
from tnsim.engine.plan import Plan
from tnsim.engine.planner import plan_problem
from tnsim.engine.runtime import execution
from tnsim.errors import ModelError, TnsimError
from tnsim.models.arrays import Array, library
from tnsim.tensor_networks.network_sums import (
    SUM,
    Leaf,
    NetworkSum,
    Tags,
    WeightedNetwork,
    checked,
    leaf_of,
    network_sum,
)

if TYPE_CHECKING:
    import quimb.tensor as qtn


_LARGEST = 1000
"""Logarithm of the largest unit: its inverse is a float too."""


_NONE = 1e-9
"""Entries of a projection below this are rounding."""


def in_units(array: Array) -> tuple[Array, Any]:
    """An array over its unit, such that networks of random ones like it have values near one.

    A bond of size n between two random arrays multiplies a network by sqrt(n), so each of its ends
    stands for n**(1/4). Units are constants to derivatives: value and logarithm would cancel.

    Example:
        >>> array, log = in_units(np.full((2, 2), 3e200))
        >>> array.round(2).tolist(), float(log)
        ([[0.98, 0.98], [0.98, 0.98]], 666.0)
    """
    xp = library(array)
    fixed = jax.lax.stop_gradient(array) if isinstance(array, jax.Array) else array
    largest = abs(fixed).max()
    largest = xp.where(largest > 0, largest, 1.0)
    size = xp.sqrt(xp.mean(abs(fixed / largest) ** 2)) * array.size**0.25
    log = xp.log2(largest) + xp.log2(xp.where(size > 0, size, 1.0))
    log = xp.clip(xp.round(log), -_LARGEST, _LARGEST)
    return array * 2.0**-log, log


def balanced(
    leaves: Mapping[str, Leaf], counts: Float[np.ndarray, "networks arrays"]
) -> tuple[dict[str, Array], Any]:
    """Arrays without what may be taken out of all networks alike.

    Args:
        leaves: The arrays over their units, in the order of the columns of `counts`.
        counts: How often each network holds each array.

    Returns:
        The arrays, and the logarithm to base 2 of the factor that the sum then lacks.

    Example:
        With networks `A A B` and `A A`, A has a unit and B has not.

        >>> one = Leaf(np.ones(1), False, [])
        >>> leaves = {"A": one._replace(log=3.0), "B": one._replace(log=5.0)}
        >>> arrays, log = balanced(leaves, np.array([[2.0, 1.0], [2.0, 0.0]]))
        >>> float(arrays["A"][0]), round(float(arrays["B"][0]), 9), round(float(log), 9)
        (1.0, 32.0, 6.0)
    """
    logs = [leaf.log for leaf in leaves.values()]
    xp = library(logs)
    # What is in the null space of D changes every network alike; D^+ D projects on the rest, which
    # has to stay in the arrays.
    rows = np.unique(counts, axis=0)
    differences = rows[1:] - rows[0]
    projection = np.linalg.pinv(differences) @ differences
    stays = projection @ xp.stack(logs)
    arrays = {name: leaf.array for name, leaf in leaves.items()}
    for name, row, kept in zip(leaves, projection, stays, strict=True):
        if abs(row).max() > _NONE:
            arrays[name] = arrays[name] * 2.0**kept
    return arrays, rows[0] @ (xp.stack(logs) - stays)


Backend = Literal["jax", "numpy"]


_ADVICE = "contract fewer networks at once, smaller ones, or give a larger tnsim.Budget"


def contract(
    networks: qtn.TensorNetwork | Iterable[WeightedNetwork],
    output_inds: Sequence[str] | None = None,
    *,
    shared_tags: Iterable[Tags] = (),
    symmetric_tags: Iterable[Tags] = (),
    strip_exponent: bool = False,
    dtype: DTypeLike | None = None,
    backend: Backend = "jax",
    budget: Budget = Budget(),
) -> Any:
    """The sum of weighted tensor networks, planned and contracted as a whole.

    Tensors that hold the same array object are recognised as copies, across networks too, so
    what the networks have in common is contracted once and common factors are taken out of the sum.

    Args:
        networks: A quimb `TensorNetwork`, or any iterable of (weight, network), such as
            `tnsim.networks` gives. Hyperindices are summed like any other index.
        output_inds: Indices of the result, in order; all others are summed over. None for the outer
            indices, those of one tensor only, in the order of the first network; the others must
            have the same ones.
        shared_tags: Tensors that carry such a tag, or all tags of a tuple, hold equal arrays, which
            are then one.
        symmetric_tags: Tensors that carry such a tag, or all tags of a tuple, hold an array whose
            axes may be exchanged in any way, so more sub-contractions are equal.
        strip_exponent: Whether to return a mantissa and an exponent, as in quimb, for what no float
            holds.
        dtype: Precision of the computation: float64 or float32, complex128 or complex64. None for
            float64, or complex128 where an array is complex.
        backend: `"jax"` compiles; `"numpy"` does not, and is faster for what runs once.
        budget: What the contraction may take.

    Returns:
        Float64 or complex128 with the axes `output_inds`, a scalar without any; inside a JAX trace
        a traced array in the dtype of what is traced. With `strip_exponent` a pair: mantissa, whose
        largest entry is 1 in size, and exponent, with the value `mantissa * 10**exponent`; of a
        zero both are 0.

    Raises:
        ModelError: The networks cannot be added up, or an array is not finite, or empty.
        TooLarge: The contraction would exceed the budget; nothing has run.
        TnsimError: A number left the range of floats on the way; use `strip_exponent`.

    Example:
        >>> import quimb.tensor as qtn, tnsim
        >>> a, b, c = (qtn.Tensor(n * np.eye(2), ("i", "j")) for n in (1, 2, 3))
        >>> float(tnsim.contract([(1.0, a & b), (0.5, a & c)]))
        7.0
        >>> tnsim.contract(a & c.reindex({"i": "j", "j": "k"}), ("k", "i"))
        array([[3., 0.],
               [0., 3.]])
        >>> square = tnsim.Model([tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])])
        >>> float(tnsim.contract(tnsim.networks(square, square)))
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
    )
    return expression()


def contract_expression(
    networks: qtn.TensorNetwork | Iterable[WeightedNetwork],
    output_inds: Sequence[str] | None = None,
    *,
    shared_tags: Iterable[Tags] = (),
    symmetric_tags: Iterable[Tags] = (),
    strip_exponent: bool = False,
    dtype: DTypeLike | None = None,
    backend: Backend = "jax",
    budget: Budget = Budget(),
) -> Expression:
    """Plan a sum of networks once, to contract it many times with new arrays.

    Args:
        networks, output_inds, shared_tags, symmetric_tags, strip_exponent, dtype, backend, budget:
            As for `contract`.

    Returns:
        A function of arrays by tag, which `jax.grad`, `jax.jit` and `jax.vmap` take. Arrays that it
        is not given are those of the networks, which stay on the device.

    Raises:
        ModelError: The networks cannot be added up, or an array is not finite, or empty.
        TooLarge: The contraction would exceed the budget.

    Example:
        >>> import jax, quimb.tensor as qtn, tnsim
        >>> state = qtn.Tensor(np.ones(3), ("i",), "STATE")
        >>> matrix = qtn.Tensor(np.eye(3), ("i", "j"), "MATRIX")
        >>> energy = tnsim.contract_expression(
        ...     state & matrix & state.reindex({"i": "j"}), shared_tags=["STATE"]
        ... )
        >>> float(energy()), float(energy({"STATE": np.array([1.0, 2.0, 3.0])}))
        (3.0, 14.0)
        >>> jax.grad(energy)({"STATE": np.array([1.0, 2.0, 3.0])})["STATE"].tolist()
        [2.0, 4.0, 6.0]
    """
    if backend not in ("jax", "numpy"):
        raise ModelError(f"backend must be 'jax' or 'numpy', found {backend!r}")
    total = network_sum(networks, output_inds, shared_tags, symmetric_tags)
    precision = _precision(dtype, total)
    count = len(total.counts)
    name = "a network" if count == 1 else f"a sum of {count:,} networks"
    plan = within(
        budget, lambda large: plan_problem(total.problem, name, True, precision, large), _ADVICE
    )
    leaves = dict(total.leaves)
    logs = {leaf: _unit_of(value.array) for leaf, value in leaves.items()}
    if strip_exponent:
        leaves = {leaf: _scaled(value) for leaf, value in leaves.items()}
    if not _traced(leaves):
        arrays = _placed({leaf: value.array for leaf, value in leaves.items()}, precision, backend)
        leaves = {leaf: value._replace(array=arrays[leaf]) for leaf, value in leaves.items()}
    return Expression(plan, replace(total, leaves=leaves), strip_exponent, backend, logs)


@dataclass(frozen=True, eq=False)
class Expression:
    """A planned sum of networks, see `contract_expression`.

    Args:
        plan: What a call runs, with its costs.
        networks: The networks, read; their arrays, in place, are those that a call does not give.
        strip_exponent: Whether calls return a mantissa and an exponent.
        backend: On what calls run outside a JAX trace.
        logs: Logarithms of the units of the arrays, see `leaf_scales`.
    """

    plan: Plan
    networks: NetworkSum
    strip_exponent: bool
    backend: Backend
    logs: Mapping[str, float]

    def __call__(self, arrays: Mapping[Tags, Any] | None = None) -> Any:
        """The sum, for other arrays.

        Args:
            arrays: New ones by tag. A tag, or all tags of a tuple together, must stand for one
                array, which takes the place of that of every tensor that holds it.

        Returns:
            As `contract`.

        Raises:
            ModelError: Tags stand for no array or for several, or an array has another shape or is
                not finite, or complex where the plan is real.
            TnsimError: A number left the range of floats on the way.
        """
        leaves, logs = dict(self.networks.leaves), dict(self.logs)
        for tags, given in (arrays or {}).items():
            name = leaf_of(self.networks, tags)
            array = checked(self.networks, name, given, real=self.plan.dtype in DTYPES)
            leaf = leaves[name]._replace(array=array)
            leaves[name] = _scaled(leaf) if self.strip_exponent else leaf
            logs[name] = _unit_of(array)
        traced = _traced(leaves)
        if traced:
            dtype = str(jnp.result_type(*(array.dtype for array in traced)))
            return self._finished(*self._contracted(leaves, dtype, "traced", self.strip_exponent))
        is_scaled = self.strip_exponent
        if not is_scaled and self._may_underflow(logs):
            # An overflow is seen afterwards; what underflows on the way is not.
            is_scaled, leaves = True, {name: _scaled(leaf) for name, leaf in leaves.items()}
        with execution.precision(), np.errstate(over="ignore", invalid="ignore"):
            found = self._contracted(leaves, self.plan.dtype, self.backend, is_scaled)
        value, exponent = jax.device_get(found)
        widest = np.result_type(value, np.float64)
        finished = self._finished(np.asarray(value, widest)[()], float(exponent))
        if not all(np.isfinite(part).all() for part in jax.tree.leaves(finished)):
            raise TnsimError(
                f"the contraction left the range of {self.plan.dtype}; "
                "use strip_exponent=True, which returns (mantissa, exponent)"
            )
        return finished

    def _may_underflow(self, logs: Mapping[str, float]) -> bool:
        """Whether the small arrays of a network together leave the range of floats."""
        small = np.array([min(log, 0.0) for log in logs.values()])
        lowest = (self.networks.counts @ small).min()
        return bool(lowest < np.finfo(self.plan.dtype).minexp / 2)

    def _contracted(
        self, leaves: Mapping[str, Leaf], dtype: str, backend: str, is_scaled: bool
    ) -> tuple[Any, Any]:
        """The sum in one precision, and the exponent of 10 that it lacks."""
        arrays, log = {name: leaf.array for name, leaf in leaves.items()}, 0.0
        if is_scaled:
            arrays, log = balanced(leaves, self.networks.counts)
        arrays = _placed(arrays, dtype, backend)
        value = execution.run(self.plan, arrays, backend).values[SUM]
        return value, self.networks.exponent + log * np.log10(2.0)

    def _finished(self, value: Any, exponent: Any) -> Any:
        """What a call returns."""
        if not self.strip_exponent:
            with np.errstate(over="ignore", invalid="ignore"):  # is seen afterwards
                return value * float(np.power(10.0, exponent))
        largest = abs(value).max()
        largest = do("where", largest > 0, largest, do("ones_like", largest))
        return value / largest, do("log10", largest) + exponent

    def __repr__(self) -> str:
        outputs = ", ".join(self.networks.output_inds)
        arrays = len(self.networks.leaves)
        return (
            f"Expression({self.plan.metric} over {arrays} arrays, outputs ({outputs}); "
            f"{self.plan.multiplications:,} multiplications)"
        )


def _precision(dtype: DTypeLike | None, networks: NetworkSum) -> str:
    """The name of the precision to compute in.

    Raises:
        ModelError: There is none such, or it has no complex numbers and the networks have.
    """
    if dtype is None:
        return "complex128" if networks.is_complex else "float64"
    name = dtype_name(dtype, ALL_DTYPES)
    if networks.is_complex and name in DTYPES:
        raise ModelError(f"the networks hold complex numbers, which {name} does not")
    return name


def _scaled(leaf: Leaf) -> Leaf:
    """A leaf in units of its own."""
    array, log = in_units(leaf.array)
    return leaf._replace(array=array, log=log)


def _unit_of(array: Any) -> float:
    """Logarithm of the unit of an array; 0 of what is traced."""
    return 0.0 if isinstance(array, Tracer) else float(in_units(array)[1])


def _traced(leaves: Mapping[str, Leaf]) -> list[Tracer]:
    """Arrays that JAX traces."""
    return [leaf.array for leaf in leaves.values() if isinstance(leaf.array, Tracer)]


def _placed(arrays: Mapping[str, Any], dtype: str, backend: str) -> dict[str, Any]:
    """Arrays in one precision, where the backend wants them."""
    if backend == "traced":
        return {name: jnp.asarray(array, dtype) for name, array in arrays.items()}
    if backend == "numpy":
        return {name: np.asarray(array, dtype) for name, array in arrays.items()}
    with execution.precision():
        return execution.placed(dict(arrays), dtype)
