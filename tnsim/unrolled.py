"""Models as quimb tree tensor networks. In: a `Model`. Out: a tagged `quimb.tensor.TensorNetwork`.

The tree is unrolled: layer i of a model with orders n_i appears in n_{i+1} ... n_L copies that share one
array. Inputs are lifted, `x~ = (1, x)`, on legs `in0`, `in1`, ... of size d_in + 1; the output `out` has size
d_out. Hidden ranks are hyperindices (three tensors share one index), so contract with `output_inds`.
Tags are those of `names`; arrays are float64, whatever the weights are stored in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from tnsim.errors import ModelError, TooLarge
from tnsim.local import unrolled_arrays
from tnsim.model import Model
from tnsim.names import (
    DOWN,
    LEFT,
    OUT,
    RIGHT,
    SYMMETRISER,
    WEIGHT,
    bond_index,
    copy_tag,
    hidden_index,
    input_index,
    layer_tag,
    role_index,
)

if TYPE_CHECKING:
    import quimb.tensor as qtn

MAX_TENSORS = 4096

Copy = tuple[str, int, int]


def network(model: Model, max_tensors: int = MAX_TENSORS) -> qtn.TensorNetwork:
    """The unrolled network of a model; contracted with (1, x) on every leg it gives model(x), shape (d_out,).

    Raises `TooLarge` when the tree has more than `max_tensors` tensors, naming the number.
    """
    import quimb.tensor as qtn

    if not isinstance(model, Model):
        raise ModelError("a combination of models is several networks; take network(m) of each of its .models")
    check_size([model], max_tensors)
    found = qtn.TensorNetwork(tree_tensors(model, "A", ()))
    names = {bond_index("A", -1, leg): input_index(leg) for leg in range(model.degree)}
    return found.reindex({**names, bond_index("A", len(model.layers) - 1, 0): OUT})


def check_size(models: Iterable[Model], max_tensors: int) -> None:
    """Raise `TooLarge` when the unrolled trees of all models together have more than `max_tensors` tensors."""
    count, degree = 0, 1
    for model in models:
        copies = 1
        for order in reversed(model.orders):
            count += copies * (1 if order == 1 else 3)
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
        layer = model.layers[n]
        arrays = {role: np.asarray(x, np.float64) for role, x in unrolled_arrays(layer).items()}
        top = WEIGHT if layer.order == 1 else DOWN
        if n == len(model.layers) - 1:
            arrays[top] = arrays[top][1:]  # the constant row carries on between layers and ends here
        for copy in range(copies):
            out = bond_index(side, n, copy)
            legs = [bond_index(side, n - 1, copy * layer.order + p) for p in range(layer.order)]
            tags = (side, layer_tag(n), copy_tag(copy))
            if layer.order == 1:
                tensors.append(qtn.Tensor(arrays[WEIGHT], (out, legs[0]), (*tags, WEIGHT)))
                continue
            hidden = hidden_index(side, n, copy)
            tensors.append(qtn.Tensor(arrays[DOWN], (out, hidden), (*tags, DOWN)))
            if (side, n, copy) not in symmetrised:
                tensors.append(qtn.Tensor(arrays[LEFT], (hidden, legs[0]), (*tags, LEFT)))
                tensors.append(qtn.Tensor(arrays[RIGHT], (hidden, legs[1]), (*tags, RIGHT)))
                continue
            stacked = np.stack([arrays[LEFT], arrays[RIGHT]])
            roles = [role_index(side, n, copy, p) for p in range(2)]
            for role, leg in zip(roles, legs, strict=True):
                tensors.append(qtn.Tensor(stacked, (role, hidden, leg), (*tags, LEFT, RIGHT)))
            tensors.append(qtn.Tensor(symmetriser(2), roles, (side, SYMMETRISER)))
        copies *= layer.order
    return tensors


def symmetriser(order: int) -> np.ndarray:
    """P_n as a node on roles, not on legs: 1/n! where all n roles differ."""
    node = np.zeros((order,) * order)
    for index in np.ndindex(node.shape):
        if len(set(index)) == order:
            node[index] = 1 / math.factorial(order)
    return node
