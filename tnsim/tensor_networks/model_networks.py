"""Models as tagged quimb tree tensor networks.

The tree is unrolled: layer i of a model with orders n_i appears in n_{i+1} ... n_L copies, which
share the same arrays. Inputs are lifted, `x~ = (1, x)`, on legs `in0`, `in1`, ... of size d_in + 1;
the output `out` has size d_out. A sequence is flattened, position-major: legs have size
1 + n_ctx * d_in, the output n_ctx * d_out. Hidden ranks, positions and heads are hyperindices
(several tensors share a single index), so contract with `output_inds`. Tags follow `names`, and the
network of a single layer comes from `problems.tensors.layer_networks`. Arrays are float64, whatever
the dtype of the weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError, TooLarge, UnsupportedLayer
from tnsim.models.checks import check_numbers, check_untraced
from tnsim.models.model import Model, in_numpy
from tnsim.names import (
    OUT,
    SYMMETRISER,
    Side,
    bond_index,
    copy_tag,
    inner_index,
    input_index,
    layer_tag,
    role_index,
)
from tnsim.options import checked
from tnsim.problems.tensors.layer_networks import Node, local_nodes, node_count, stacked
from tnsim.sessions import session_cache

if TYPE_CHECKING:
    import quimb.tensor as qtn

MAX_TENSORS = 4096
"""Default for the largest number of tensors of a network."""

AS_EXPRESSION = ", and contract_expression(networks(a, b, metric)) takes traced arrays by tag"
"""Advice where networks of traced models are asked for."""

Copy = tuple[Side, int, int]
"""A copy of a layer: side of the model, number of the layer, number of the copy."""


@dataclass(frozen=True)
class LayerArrays:
    """The arrays that all copies of a layer share, in all networks of a model.

    Args:
        order: Number of input legs.
        nodes: Nodes of the network of the layer, nodes with an input leg last (see
            `problems.tensors.layer_networks`).
    """

    order: int
    nodes: tuple[Node, ...]

    @cached_property
    def stacked(self) -> tuple[Float[np.ndarray, "*axes"], tuple[str, ...]]:
        """The nodes with input legs in a single array, as symmetrised copies need."""
        return stacked(self.nodes[-self.order :])


def layer_arrays(model: Model) -> tuple[LayerArrays, ...]:
    """The arrays of every layer of a model, in the form that networks hold."""
    top = len(model.layers) - 1
    arrays = []
    for number, layer in enumerate(model.layers):
        nodes = local_nodes(layer, model.n_ctx)
        if number == top:  # without the row of the constant, which no layer reads
            nodes = tuple(
                node._replace(array=node.array[1:]) if node.indices[0] == OUT else node
                for node in nodes
            )
        arrays.append(LayerArrays(layer.order, nodes))
    return tuple(arrays)


@checked
def network(model: Model, max_tensors: int = MAX_TENSORS) -> qtn.TensorNetwork:
    """The unrolled network of a model.

    Args:
        model: Model to unroll; every copy of a layer has tags for layer, copy and role.
        max_tensors: Largest number of tensors of the network.

    Returns:
        A network that gives model(x), shape (d_out,), when it is contracted with (1, x) on every
        leg. With n_ctx every leg takes (1, x.ravel()) and the result is model(x).ravel(), shape
        (n_ctx * d_out,).

    Raises:
        TooLarge: The tree has more than `max_tensors` tensors; the message says how many.
        ModelError: The model is a combination of models, or has attention but no n_ctx.

    Example:
        >>> import numpy as np
        >>> import quimb.tensor as qtn
        >>> import tnsim
        >>> squares = tnsim.Model([tnsim.Bilinear(np.eye(2), np.eye(2), np.eye(2))])
        >>> tn = tnsim.tensor_networks.network(squares)
        >>> for leg in ("in0", "in1"):
        ...     tn = tn & qtn.Tensor([1.0, 2.0, 3.0], (leg,))
        >>> tn.contract(output_inds=("out",)).data
        array([4., 9.])

    Source:
        Paper, section 2.1.
    """
    import quimb.tensor as qtn

    check_untraced("network", model, instead=AS_EXPRESSION)
    model = in_numpy(model)
    check_models([model], max_tensors)
    names = {bond_index("A", -1, leg): input_index(leg) for leg in range(model.degree)}
    names[bond_index("A", len(model.layers) - 1, 0)] = OUT
    return qtn.TensorNetwork(tree_tensors(layer_arrays(model), "A", ())).reindex(names)


def check_models(models: Iterable[Model], max_tensors: int) -> None:
    """Check that models can be unrolled.

    Raises:
        ModelError: A model is a combination, or attends to sequences of unknown length.
        TooLarge: The trees have more than `max_tensors` tensors together.
    """
    count, degree = 0, 1
    for model in models:
        if not isinstance(model, Model):
            raise ModelError(
                "a combination of models is several networks; "
                "take those of its .models and expand by bilinearity"
            )
        check_numbers(model)
        if not model.is_polynomial:
            raise UnsupportedLayer(
                "a model with an activation is no tensor of input legs and has no network of its "
                "own: networks(a, b, Gaussian(mean, cov)) shows the kernel between two models"
            )
        if model.attends and model.n_ctx is None:
            raise ModelError(
                "the network of an attention layer is for sequences of one length: "
                "give tnsim.Model(layers, n_ctx=...)"
            )
        copies = 1
        for layer in reversed(model.layers):
            # From the output down, every layer has a copy for each leg above it.
            count += copies * node_count(layer)
            copies *= layer.order
        degree = max(degree, model.degree)
    if count > max_tensors:
        raise TooLarge(
            f"the unrolled network has {count:,} tensors, more than max_tensors={max_tensors:,} "
            f"(degree {degree:,}); similarity() and plan() fold the copies and need no unrolled "
            "network"
        )


def tree_tensors(
    layers: Sequence[LayerArrays], side: Side, symmetrised: Collection[Copy]
) -> list[qtn.Tensor]:
    """All weight tensors of an unrolled tree, from the output down.

    Args:
        layers: Arrays of the layers of the model.
        side: Side of the model, a tag on every tensor.
        symmetrised: Copies of layers, of any model, that get a symmetriser node.

    Returns:
        Tensors with bonds `names.bond_index(side, layer, copy)`; layer -1 holds the input legs.
    """
    tensors: list[qtn.Tensor] = []
    copies = 1
    for number in reversed(range(len(layers))):
        for copy in range(copies):
            place = (side, number, copy)
            tensors += _copy_tensors(layers[number], place, place in symmetrised)
        copies *= layers[number].order
    return tensors


@session_cache
def symmetriser(order: int) -> Float[np.ndarray, "*axes"]:
    """The symmetriser P_n as a node (n,) * n on roles, with 1/n! where all roles differ."""
    node = np.zeros((order,) * order)
    for roles in itertools.permutations(range(order)):
        node[roles] = 1 / math.factorial(order)
    node.flags.writeable = False  # all networks share the array
    return node


def _copy_tensors(layer: LayerArrays, place: Copy, symmetrised: bool) -> list[qtn.Tensor]:
    """The tensors of a single copy of a layer.

    In a symmetrised copy, any node with an input leg may serve any leg: each leg gets an array that
    stacks all these nodes along a role axis, and the symmetriser joins the role axes, so that every
    role is taken once.

    Args:
        layer: Arrays of the layer.
        place: Place of the copy: side, layer and copy.
        symmetrised: Whether to average over all orders of the legs.
    """
    side, number, copy = place
    tags = (side, layer_tag(number), copy_tag(copy))
    # Index names tell the copy, as copies share their arrays.
    names = _index_names(layer.nodes, layer.order, place)
    # The nodes with input legs come last in a layer.
    inner_nodes, leg_nodes = layer.nodes[: -layer.order], layer.nodes[-layer.order :]
    tensors = []
    for node in inner_nodes if symmetrised else layer.nodes:
        indices = [names[index] for index in node.indices]
        tensors.append(tensor(node.array, indices, (*tags, node.role)))
    if not symmetrised:
        return tensors

    array, between = layer.stacked
    between_names = [names[index] for index in between]
    role_tags = [node.role for node in leg_nodes]
    roles = [role_index(side, number, copy, leg) for leg in range(layer.order)]
    for leg, role in enumerate(roles):
        # Each leg reads the stack in a role, and the symmetriser takes the mean over roles.
        indices = [role, *between_names, names[input_index(leg)]]
        tensors.append(tensor(array, indices, (*tags, *role_tags)))
    tensors.append(tensor(symmetriser(layer.order), roles, (side, SYMMETRISER)))
    return tensors


def tensor(array: np.ndarray, indices: Sequence[str], tags: Sequence[str]) -> qtn.Tensor:
    """A quimb tensor; the cast is there because quimb annotates data as a float.

    Example:
        >>> tensor(np.eye(2), ("i", "j"), ("WEIGHT",)).shape
        (2, 2)
    """
    import quimb.tensor as qtn

    return qtn.Tensor(cast(Any, array), indices, tags)


def _index_names(nodes: Sequence[Node], order: int, place: Copy) -> dict[str, str]:
    """Names in the tree of the indices of a copy: bonds to parent and children, inner indices."""
    side, number, copy = place
    names = {OUT: bond_index(side, number, copy)}
    for leg in range(order):
        names[input_index(leg)] = bond_index(side, number - 1, copy * order + leg)
    for node in nodes:
        for index in node.indices:
            if index not in names:
                names[index] = inner_index(side, number, copy, index)
    return names
