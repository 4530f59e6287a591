"""Models as quimb tree tensor networks. In: a `Model`. Out: a tagged `quimb.tensor.TensorNetwork`.

The tree is unrolled: layer i of a model with orders n_i appears in n_{i+1} ... n_L copies that share one
array. Inputs are lifted, `x~ = (1, x)`, on legs `in0`, `in1`, ... of size d_in + 1; the output `out` has size
d_out. A sequence is flattened, position-major: legs have size 1 + n_ctx * d_in, the output n_ctx * d_out. Hidden
ranks, positions and heads are hyperindices (several tensors share one index), so contract with `output_inds`.
Tags are those of `names`, local networks those of `nodes`; arrays are float64, whatever the weights are stored in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError, TooLarge
from tnsim.models.model import Model
from tnsim.names import (
    OUT,
    SYMMETRISER,
    bond_index,
    copy_tag,
    inner_index,
    input_index,
    layer_tag,
    role_index,
)
from tnsim.tensors.layer_networks import local_nodes, stacked

if TYPE_CHECKING:
    import quimb.tensor as qtn

MAX_TENSORS = 4096
_TENSORS = {1: 1, 2: 3, 5: 7}  # in one copy of a layer, by its order

Copy = tuple[str, int, int]


def network(model: Model, max_tensors: int = MAX_TENSORS) -> qtn.TensorNetwork:
    """The unrolled network of a model; contracted with (1, x) on every leg it gives model(x), shape (d_out,).

    With n_ctx every leg takes (1, x.ravel()) and the result is model(x).ravel(), shape (n_ctx * d_out,).
    Raises `TooLarge` when the tree has more than `max_tensors` tensors, naming the number; `ModelError` for a
    combination of models, and for attention without n_ctx.
    """
    import quimb.tensor as qtn

    check_models([model], max_tensors)
    found = qtn.TensorNetwork(tree_tensors(model, "A", ()))
    names = {bond_index("A", -1, leg): input_index(leg) for leg in range(model.degree)}
    return found.reindex({**names, bond_index("A", len(model.layers) - 1, 0): OUT})


def check_models(models: Iterable[Model], max_tensors: int) -> None:
    """Raise `ModelError` unless all are models of known length, `TooLarge` if their trees have more than `max_tensors` tensors together."""
    count, degree = 0, 1
    for model in models:
        if not isinstance(model, Model):
            raise ModelError(
                "a combination of models is several networks; take those of its .models and expand by bilinearity"
            )
        if model.attends and model.n_ctx is None:
            raise ModelError(
                "the network of an attention layer is for sequences of one length: give tnsim.Model(layers, n_ctx=...)"
            )
        copies = 1
        for order in reversed(model.orders):
            count += copies * _TENSORS[order]
            copies *= order
        degree = max(degree, model.degree)
    if count > max_tensors:
        raise TooLarge(
            f"the unrolled network has {count:,} tensors, more than max_tensors={max_tensors:,} "
            f"(degree {degree:,}); similarity() and plan() fold the copies and need no unrolled network"
        )


def tree_tensors(model: Model, side: str, symmetrised: Collection[Copy]) -> list[Any]:
    """All weight tensors of one unrolled tree, with a symmetriser node for every (side, layer, copy) listed.

    Bonds are `names.bond_index(side, layer, copy)`; layer -1 holds the input legs.
    """
    import quimb.tensor as qtn

    tensors = []
    copies = 1
    for n in reversed(range(len(model.layers))):
        order = model.layers[n].order
        nodes = local_nodes(model.layers[n], model.n_ctx)
        if n == len(model.layers) - 1:  # the constant row carries on between layers and ends here
            nodes = tuple(
                node._replace(array=node.array[1:]) if node.indices[0] == OUT else node
                for node in nodes
            )
        legs = [input_index(p) for p in range(order)]
        for copy in range(copies):
            names = {OUT: bond_index(side, n, copy)}
            names |= {leg: bond_index(side, n - 1, copy * order + p) for p, leg in enumerate(legs)}
            names |= {
                i: inner_index(side, n, copy, i)
                for node in nodes
                for i in node.indices
                if i not in names
            }
            tags = (side, layer_tag(n), copy_tag(copy))
            swaps = (side, n, copy) in symmetrised
            for node in nodes[:-order] if swaps else nodes:
                tensors.append(
                    qtn.Tensor(node.array, [names[i] for i in node.indices], (*tags, node.role))
                )
            if swaps:
                every, between = stacked(nodes[-order:])
                roles = [role_index(side, n, copy, p) for p in range(order)]
                for role, leg in zip(roles, legs, strict=True):
                    indices = (role, *(names[i] for i in between), names[leg])
                    tensors.append(
                        qtn.Tensor(every, indices, (*tags, *(node.role for node in nodes[-order:])))
                    )
                tensors.append(qtn.Tensor(symmetriser(order), roles, (side, SYMMETRISER)))
        copies *= order
    return tensors


@cache
def symmetriser(order: int) -> Float[np.ndarray, "*axes"]:
    """P_n as a node on roles, not on legs: 1/n! where all n roles differ."""
    node = np.zeros((order,) * order)
    for roles in itertools.permutations(range(order)):
        node[roles] = 1 / math.factorial(order)
    node.flags.writeable = False  # one array for all networks
    return node
