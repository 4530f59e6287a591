"""The tensor of a layer over lifted bonds: its arrays, and its symmetrised arrays.

Lifted, `x~ = (1, x)`, every layer is homogeneous: a tensor with an output leg and `order` input
legs (paper, section 2.1). That tensor is a *sum of parts*, each a small product of arrays joined
over indices, so that a skip connection stays an index and never becomes an identity block:

    Linear        WEIGHT[out, in0]
    Bilinear      sum_h DOWN[out, h] LEFT[h, in0] RIGHT[h, in1]
    Multilinear   sum_h DOWN[out, h] LEG0[h, in0] LEG1[h, in1] LEG2[h, in2] ...
    Residual      the layer's part, and for each of its n legs j a part
                  1/n delta[out, in_j] SKIP[in_k] UNIT[in_l] ...

Lifting adds the constant coordinate at position 0 of every leg and a hidden unit that computes
it, so biases cost a single row. `SKIP = skip * e_0` and, from three legs on, `UNIT = e_0` read the
constant off the legs that the skip does not use. The lift is left out where no layer of either
model has a constant.

Metrics of whole trees may exchange the legs of a layer. `symmetric_arrays` gives its arrays
symmetrised over the legs.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.models.arrays import Array
from tnsim.models.layers import Bilinear, affine_maps
from tnsim.models.model import Model
from tnsim.models.protocol import Layer
from tnsim.names import DENSE, DOWN, FACTOR, SIGNED_DOWN, SKIP, UNIT, WEIGHT, bias_of
from tnsim.problems.tensors.kinds import LayerKind, core_of
from tnsim.problems.tensors.positional import sequence_arrays
from tnsim.scaled import library


def shapes(kind: LayerKind, lifted: bool) -> dict[str, tuple[int, ...]]:
    """Shape of every array that `arrays` returns for a layer of this kind.

    Example:
        >>> shapes(LayerKind("Linear", ("WEIGHT",), None, d_in=2, d_out=3), lifted=True)
        {'WEIGHT': (4, 3)}
    """
    d_in, d_out, rank = kind.d_in + lifted, kind.d_out + lifted, kind.rank + lifted
    if kind.down is None:
        return {kind.legs[0]: (d_out, d_in)}
    roles: dict[str, tuple[int, ...]] = {kind.down: (d_out, rank)}
    for role in kind.legs:
        roles[role] = (rank, d_in)
    if kind.skips:
        roles[SKIP] = (d_in,)
    if kind.skips and kind.order > 2:
        roles[UNIT] = (d_in,)
    return roles


def arrays(layer: Layer, lifted: bool) -> dict[str, Any]:
    """The arrays of a layer's parts.

    The residual scale is multiplied into DOWN. The skip adds to the constant row as well, and the
    bias column is reduced by as much, so that the row still computes 1.

    Args:
        layer: Any layer but attention.
        lifted: Whether coordinate 0 of every bond is the constant 1, that of the output included.

    Returns:
        Arrays by role, with the shapes of `shapes`; NumPy, or JAX where a weight is.

    Example:
        >>> import tnsim
        >>> arrays(tnsim.Linear([[2.0]], [3.0]), lifted=True)["WEIGHT"]
        array([[1., 0.],
               [3., 2.]])

    Source:
        Paper, section 2.1.
    """
    plain = sequence_arrays(layer, 1)
    if not lifted:  # there are neither biases nor skips
        return plain
    xp = library(plain)
    if WEIGHT in plain:
        return {WEIGHT: _lifted_map(xp, plain[WEIGHT], plain.get(bias_of(WEIGHT)))}
    # Lifted DOWN has a row 0 that computes the constant from the constant hidden unit, and the
    # biases in the column of that unit. A skip adds skip * 1 to row 0, so its entry is 1 - skip.
    down, skip = plain[DOWN], plain.get(SKIP)
    entry = 1.0 if skip is None else 1.0 - skip
    column = _lifted_column(xp, entry, plain.get(bias_of(DOWN)), len(down), down.dtype)
    padded = xp.concatenate([xp.zeros((1, down.shape[1]), down.dtype), down])
    roles = {DOWN: xp.concatenate([padded, column[:, None]], axis=1)}
    legs = [name.upper() for name in affine_maps(core_of(layer))[0]]
    for role in legs:
        roles[role] = _with_constant_unit(xp, plain[role], plain.get(bias_of(role)))
    unit = xp.eye(1, roles[legs[0]].shape[1], dtype=down.dtype)[0]
    if skip is not None:
        roles[SKIP] = skip * unit
    if skip is not None and len(legs) > 2:
        roles[UNIT] = unit
    return roles


def unrolled_arrays(layer: Layer) -> dict[str, Any]:
    """The lifted arrays of a drawn network, with a skip spelled out as hidden units.

    A tensor network is a single product, so the sum `skip x + scale f(x)` needs units of its own:
    for every leg a unit per coordinate, which reads the coordinate on that leg and the constant on
    all others, with weight skip / n. Plans never read these arrays.

    Returns:
        Arrays by role, as from `arrays` but without SKIP and UNIT.

    Example:
        >>> import tnsim
        >>> product = tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])
        >>> unrolled_arrays(tnsim.Residual(product))["DOWN"].shape  # 2 units, and 2 for each leg
        (2, 6)
    """
    roles = arrays(layer, lifted=True)
    if SKIP not in roles:
        return roles
    skip = roles.pop(SKIP)
    roles.pop(UNIT, None)
    xp = library(roles)
    copy = xp.eye(skip.shape[0], dtype=skip.dtype)
    one = xp.zeros_like(copy) + copy[0]
    legs = [role for role in roles if role != DOWN]
    # Units of a skip stand behind the units of the layer: one block of d + 1 units for every leg,
    # which reads the coordinates on that leg and the constant on all others.
    spelled = {}
    for role in legs:
        units = [copy if other == role else one for other in legs]
        spelled[role] = xp.concatenate([roles[role], *units])
    # All n ways to carry x on one leg, the constant on the others, are one function; their mean
    # treats legs alike.
    carried = [skip[0] / len(legs) * copy] * len(legs)
    return {DOWN: xp.concatenate([roles[DOWN], *carried], axis=1), **spelled}


def raised(model: Model) -> Model:
    """A linear model as the bilinear model of the same function, multiplied by the constant 1.

    Diagrams pair all legs of two models, so both together must have an even number of legs. Every
    bilinear layer doubles the degree; a linear model has degree 1.

    Args:
        model: A model of linear layers only.

    Returns:
        Model of degree two with the last layer `I (W x + b) * (0 x + 1)`.

    Example:
        >>> import tnsim
        >>> square = raised(tnsim.Model([tnsim.Linear([[2.0]])]))
        >>> square.degree, square(np.array([3.0]))
        (2, array([6.]))
    """
    weight = arrays(model.layers[-1], lifted=True)[WEIGHT]  # [[1, 0], [b, W]]
    dtype = weight.dtype
    d_out, d_in = weight.shape[0] - 1, weight.shape[1] - 1
    # (W x + b) * 1 is the same function: the second leg has no weights and the bias 1.
    last = Bilinear(
        left=weight[1:, 1:],
        left_bias=weight[1:, 0],
        right=np.zeros((d_out, d_in), dtype),
        right_bias=np.ones(d_out, dtype),
        down=np.eye(d_out, dtype=dtype),
    )
    return Model((*model.layers[:-1], last), model.n_ctx)


def _lifted_column(xp: Any, first: Any, bias: Any, size: int, dtype: Any) -> Any:
    """The vector (first, bias); a missing bias is zero."""
    if bias is None:
        bias = xp.zeros(size, dtype)
    return xp.concatenate([xp.reshape(xp.asarray(first, dtype), (1,)), bias])


def _lifted_map(xp: Any, weight: Any, bias: Any) -> Any:
    """The lifted matrix [[1, 0], [b, W]] of an affine map."""
    padded = xp.concatenate([xp.zeros((1, weight.shape[1]), weight.dtype), weight])
    column = _lifted_column(xp, 1.0, bias, weight.shape[0], weight.dtype)
    return xp.concatenate([column[:, None], padded], axis=1)


def _with_constant_unit(xp: Any, weight: Any, bias: Any) -> Any:
    """The matrix [[b, W], [1, 0]]: biases in column 0, and a last unit for the constant."""
    if bias is None:
        bias = xp.zeros(weight.shape[0], weight.dtype)
    # b + W x = [b, W] (1, x), row by row; the last row (1, 0) reads the constant.
    rows = xp.concatenate([bias[:, None], weight], axis=1)
    return xp.concatenate([rows, xp.eye(1, weight.shape[1] + 1, dtype=weight.dtype)])


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
    # A sum and a difference of rows for each hidden unit, and for each coordinate of a skip.
    rank = 2 * (kind.rank + lifted)
    if kind.skips:
        rank += 2 * d_in
    return {SIGNED_DOWN: (d_out, rank), FACTOR: (rank, d_in)}


def symmetric_arrays(layer: Layer, lifted: bool) -> dict[str, Any]:
    """The arrays of a layer, symmetrised over its legs.

    A layer of two legs becomes a symmetrised CP decomposition, with the same FACTOR for both legs,

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
        lifted: Whether coordinate 0 of every bond is the constant 1, that of the output included.

    Returns:
        Arrays by role, with the shapes of `symmetric_shapes`: WEIGHT of a linear layer; SIGNED_DOWN
        and FACTOR of a layer of two legs; the whole tensor DENSE of other layers.

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
        return {DENSE: symmetrised(_whole_tensor(spelled))}
    left, right = _balanced_rows(xp, *legs)
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


def _balanced_rows(xp: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """The rows c x and y / c of equal norm, c a constant to derivatives; zero rows stay."""
    # c x (x) y / c is the same for every c. But squares of size |x|^2 with a difference of size
    # |x| |y| lose log10(|x| / |y|) digits.
    norms = [xp.sqrt((rows * rows).sum(axis=1)) for rows in (left, right)]
    # A row of zeros has no length to balance; its product is zero in any case.
    usable = (norms[0] > 0) & (norms[1] > 0)
    ratio = xp.where(usable, norms[1], 1.0) / xp.where(usable, norms[0], 1.0)
    balance = xp.sqrt(ratio)[:, None].astype(left.dtype)
    if xp is jnp:
        balance = jax.lax.stop_gradient(balance)
    return left * balance, right / balance


def symmetrised(tensor: Float[Array, "out *legs"]) -> Float[Array, "out *legs"]:
    """The mean of a tensor over all orders of its legs.

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


def _whole_tensor(roles: dict[str, Any]) -> Float[Array, "out *legs"]:
    """The tensor of a layer from its arrays over hidden units."""
    output, unit, *legs = range(len(roles) + 1)
    operands: list[Any] = [roles[DOWN], [output, unit]]
    rows = [array for role, array in roles.items() if role != DOWN]
    for leg, array in zip(legs, rows, strict=True):
        # T[o, i, j, ...] = sum_h D[o, h] L[h, i] R[h, j] ..., all legs at once.
        operands += [array, [unit, leg]]
    return library(roles).einsum(*operands, [output, *legs])
