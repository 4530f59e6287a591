"""Layers whose legs may be exchanged. In: a layer. Out: its arrays, symmetrised over its legs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from tnsim.models.arrays import Array, library
from tnsim.models.protocol import Layer
from tnsim.names import DENSE, DOWN, FACTOR, SIGNED_DOWN, SKIP, UNIT, WEIGHT
from tnsim.tensors.kinds import LayerKind
from tnsim.tensors.lifted import arrays, shapes, unrolled_arrays


def symmetric_shapes(kind: LayerKind, lifted: bool) -> dict[str, tuple[int, ...]]:
    """Shape of every array that `symmetric_arrays` returns for a layer of this kind.

    Example:
        >>> kind = LayerKind("Bilinear", ("LEFT", "RIGHT"), "DOWN", d_in=2, d_out=2, rank=5)
        >>> symmetric_shapes(kind, lifted=False)
        {'SIGNED_DOWN': (2, 10), 'FACTOR': (10, 2)}
    """
    if kind.down is None:
        return shapes(kind, lifted)
    d_in, d_out = kind.d_in + lifted, kind.d_out + lifted
    if kind.dense or kind.order > 2:
        return {DENSE: (d_out, *(d_in,) * kind.order)}
    rank = 2 * (kind.rank + lifted)
    if kind.skips:
        rank += 2 * d_in
    return {SIGNED_DOWN: (d_out, rank), FACTOR: (rank, d_in)}


def symmetric_arrays(layer: Layer, lifted: bool) -> dict[str, Any]:
    """The symmetrised layer.

    Two legs become a symmetrised CP decomposition, in which both read one FACTOR,

        sum_h SIGNED_DOWN[out, h] FACTOR[h, in0] FACTOR[h, in1].

    With x a row of LEFT and y the same row of RIGHT,

        x (x) y + y (x) x = ((x + y) (x) (x + y) - (x - y) (x) (x - y)) / 2,

    so every hidden unit becomes two, a sum and a difference, and half of this, the mean over the
    two orders of the legs, has the factors +1/4 and -1/4. Likewise for a skip, with a coordinate
    for x and the constant for y.

    Rows of LEFT and RIGHT are first scaled to equal norm. The difference of squares then cancels no
    digits, however a model splits its scale between the two.

    Args:
        layer: Any layer but attention.
        lifted: As for `arrays`.

    Returns:
        Role -> array, of the shapes that `symmetric_shapes` says: WEIGHT of a linear layer;
        SIGNED_DOWN and FACTOR of one with two legs; of others the whole tensor, DENSE.

    Example:
        >>> import tnsim
        >>> product = tnsim.Bilinear([[1.0, 0.0]], [[0.0, 1.0]], [[1.0]])
        >>> symmetric_arrays(product, lifted=False)["FACTOR"]
        array([[ 1.,  1.],
               [ 1., -1.]])
    """
    roles = arrays(layer, lifted)
    if WEIGHT in roles:
        return roles
    xp = library(roles)
    legs = [roles[role] for role in roles if role not in (DOWN, SKIP, UNIT)]
    if len(legs) != 2:
        spelled = unrolled_arrays(layer) if lifted else roles
        return {DENSE: symmetrised(_whole(spelled))}
    left, right = _balanced(xp, *legs)
    down = roles[DOWN]
    # (x (x) y + y (x) x) / 2 = ((x + y) (x) (x + y) - (x - y) (x) (x - y)) / 4
    factors = [left + right, left - right]
    downs = [0.25 * down, -0.25 * down]
    if SKIP in roles:
        # A skip is the mean of e_i (x) e_0 and e_0 (x) e_i for every i: e_i for x, e_0 for y.
        copy = xp.eye(down.shape[0], dtype=down.dtype)
        factors += [copy + copy[0], copy - copy[0]]
        downs += [0.25 * roles[SKIP][0] * copy, -0.25 * roles[SKIP][0] * copy]
    return {SIGNED_DOWN: xp.concatenate(downs, axis=1), FACTOR: xp.concatenate(factors)}


def _balanced(xp: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """The rows c x and y / c of equal norm; rows of zeros stay. To derivatives c is a constant."""
    # c x (x) y / c is the same for every c. But squares of size |x|^2 whose difference is of size
    # |x| |y| lose log10(|x| / |y|) digits.
    norms = [xp.sqrt((rows * rows).sum(axis=1)) for rows in (left, right)]
    usable = (norms[0] > 0) & (norms[1] > 0)
    ratio = xp.where(usable, norms[1], 1.0) / xp.where(usable, norms[0], 1.0)
    balance = xp.sqrt(ratio)[:, None].astype(left.dtype)
    if xp is jnp:
        balance = jax.lax.stop_gradient(balance)
    return left * balance, right / balance


def symmetrised(tensor: Float[Array, "out *legs"]) -> Float[Array, "out *legs"]:
    """The mean over all orders of the legs.

    Example:
        >>> import numpy as np
        >>> symmetrised(np.array([[[0.0, 2.0], [0.0, 0.0]]]))[0]
        array([[0., 1.],
               [1., 0.]])

    Source:
        The symmetriser `P_n` of the paper, section 2.3.
    """
    order = tensor.ndim - 1
    total: Any = 0.0
    for legs in itertools.permutations(range(1, order + 1)):
        total = total + tensor.transpose(0, *legs)
    return total / math.factorial(order)


def _whole(roles: dict[str, Any]) -> Float[Array, "out *legs"]:
    """The tensor of a layer from its arrays over hidden units."""
    output, unit, *legs = range(len(roles) + 1)
    operands: list[Any] = [roles[DOWN], [output, unit]]
    rows = [array for role, array in roles.items() if role != DOWN]
    for leg, array in zip(legs, rows, strict=True):
        operands += [array, [unit, leg]]
    return library(roles).einsum(*operands, [output, *legs])
