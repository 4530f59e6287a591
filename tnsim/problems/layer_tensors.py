"""A single layer as named arrays: over lifted bonds, of sequences, and as an unrolled network.

*Lifted*, `x~ = (1, x)`, every layer is homogeneous: a tensor with an output leg and `order` input
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

*Sequences.* A sequence model is not lifted: its biases stay vectors next to the matrices, because
the constant is the same at every position and a lifted coordinate per position would multiply it
out. The skip of a residual is the scalar SKIP; its scale is multiplied into DOWN and O, the 1 /
d_head of each score into Q1 and Q2, and the rotation of a position into the query and key arrays,
which then have a position axis.

    Linear      WEIGHT[k, i]
                WEIGHT_BIAS[k]
    Bilinear    DOWN[k, h] LEFT[h, i] RIGHT[h, i]
                LEFT_BIAS[h] RIGHT_BIAS[h] DOWN_BIAS[k]
    Attention   O[k, a, u] V[a, u, i] MASK[s, t]
                Qc[s, a, x, i] Kc[t, a, x, i] for c = 1, 2; Qc[a, x, i] and so on without RoPE
                V_BIAS[a, u] O_BIAS[k] Qc_BIAS[s, a, x] Kc_BIAS[t, a, x]

*Networks.* A drawn network has a tensor per array, over named indices. Inputs and outputs are
lifted, `(1, x)`; sequences are flattened first, position-major, with a single constant for all
positions: `(1, x_00, x_01, ...)`, 1 + n_ctx * d coordinates.

    Linear      WEIGHT[out, in0]
    Bilinear    DOWN[out, hidden] LEFT[hidden, in0] RIGHT[hidden, in1]
    Attention   O[out, s, a, u] MASK[a, s, t]
                Q1[s, a, x, in0] K1[t, a, x, in1]
                Q2[s, a, y, in2] K2[t, a, y, in3] V[t, a, u, in4]

s and t are the positions of queries and keys, a heads, x and y coordinates of the two scores, u of
the values. A network is a single product, so the sums within a layer are spelled out: a skip around
a bilinear layer as hidden units, and the constant, the output bias and the skip of attention as
heads. Plans never read these arrays.

*Flattened layers.* `Gaussian` beyond a single nonlinear layer and `Symmetric` join the legs of
whole trees (see `problems.whole_tree`), and there a leg is a single index. A flattened sequence is
a vector with a single constant, position-wise layers have block-diagonal weights, and an attention
layer is a dense tensor of five legs, symmetrised: of size (1 + n_ctx d)^5 per output, which only
small models afford.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError
from tnsim.models.arrays import Array, add, bias_name, in_float64, is_traced, written_out
from tnsim.models.layers import (
    Attention,
    Bilinear,
    Layer,
    Residual,
    activation_of,
    affine_maps,
    innermost,
    residual_rule,
)
from tnsim.models.model import Model
from tnsim.names import (
    DENSE,
    DOWN,
    FACTOR,
    MASK,
    OUT,
    OUTPUT,
    SCORES,
    SIGNED_DOWN,
    SKIP,
    UNIT,
    VALUE,
    WEIGHT,
    bias_of,
    input_index,
)
from tnsim.problems.layer_kinds import LayerKind, core_of, layer_kind
from tnsim.scaled import library

_TURNED = tuple(role for score in SCORES for role in score)


_HEAD_INDICES = {"Q1": "sax", "K1": "tax", "Q2": "say", "K2": "tay", VALUE: "tau"}


def sequence_shapes(kind: LayerKind, n_ctx: int) -> dict[str, tuple[int, ...]]:
    """Shape of every array that `sequence_arrays` returns for a layer of this kind.

    Example:
        >>> kind = LayerKind("Linear", ("WEIGHT",), None, d_in=2, d_out=3, biases=("WEIGHT",))
        >>> sequence_shapes(kind, n_ctx=4)
        {'WEIGHT': (3, 2), 'WEIGHT_BIAS': (3,)}
    """
    found = _attention_shapes(kind, n_ctx) if kind.mixes_positions else shapes(kind, lifted=False)
    for role in kind.biases:
        shape = found[role]
        found[bias_of(role)] = shape[:1] if role == kind.down else shape[:-1]
    if kind.skips:
        found[SKIP] = ()
    return found


def _attention_shapes(kind: LayerKind, n_ctx: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of attention, without biases."""
    heads, d_head, d_value = kind.heads
    position = (n_ctx,) if kind.rotary else ()
    shapes: dict[str, tuple[int, ...]] = {}
    for role in _TURNED:
        shapes[role] = (*position, heads, d_head, kind.d_in)
    shapes[VALUE] = (heads, d_value, kind.d_in)
    shapes[OUTPUT] = (kind.d_out, heads, d_value)
    shapes[MASK] = (n_ctx, n_ctx)
    return shapes


def sequence_arrays(layer: Layer, n_ctx: int) -> dict[str, Any]:
    """The arrays of a layer, as the head of this module lists them.

    Args:
        layer: Any layer.
        n_ctx: Number of positions of the sequence.

    Returns:
        Arrays by role; NumPy, or JAX where a weight is.

    Example:
        >>> import tnsim
        >>> list(sequence_arrays(tnsim.Linear([[2.0]], [3.0]), n_ctx=4))
        ['WEIGHT', 'WEIGHT_BIAS']

    Source:
        Paper, section 2.1.
    """
    layer = in_float64(written_out(layer))
    xp = library(layer)
    core = core_of(layer)
    rows, output = affine_maps(core)
    skip, scale = residual_rule(layer)
    roles: dict[str, Any] = {}
    for name in (*rows, output):
        roles[name.upper()] = getattr(core, name)
        bias = getattr(core, bias_name(name))
        if bias is not None:
            roles[bias_of(name.upper())] = bias
    last = output.upper()
    if isinstance(layer, Residual):  # the scale multiplies the output matrix and its bias
        for role in {last, bias_of(last)} & roles.keys():
            roles[role] = scale * roles[role]
    if isinstance(core, Attention):
        roles = _by_head(core, roles, n_ctx, xp)
    if not isinstance(layer, Residual):
        return roles
    dtype = getattr(core, output).dtype
    if rows:
        roles[SKIP] = xp.asarray(skip, dtype)
    else:  # around a linear layer the skip is part of the matrix
        roles[WEIGHT] = roles[WEIGHT] + skip * xp.eye(core.d_in, dtype=dtype)
    return roles


def _by_head(core: Attention, roles: dict[str, Any], n_ctx: int, xp: Any) -> dict[str, Any]:
    """The arrays of attention with an axis of heads.

    Queries are divided by the width of a head. Rows of queries and keys, and their biases, are
    rotated for every position, which becomes the first axis.
    """
    by_head: dict[str, Any] = {MASK: core.pattern(n_ctx)}
    rotations = core.rotations(n_ctx)
    for role, array in roles.items():
        if role == bias_of(OUTPUT):
            by_head[role] = array
            continue
        if role == OUTPUT:
            by_head[role] = array.reshape(core.d_out, core.n_heads, core.d_value)
            continue
        array = array.reshape(core.n_heads, -1, *array.shape[1:])
        if role.startswith("Q"):
            array = 1 / core.d_head * array
        if rotations is not None and role not in (VALUE, bias_of(VALUE)):
            # In NumPy, float32 weights are rotated in float64.
            turns = rotations if xp is np else xp.asarray(rotations, array.dtype)
            is_bias = array.ndim == 2
            array = turns[:, None] @ (array[..., None] if is_bias else array)
            array = array[..., 0] if is_bias else array
        by_head[role] = array
    return by_head


def shapes(kind: LayerKind, lifted: bool) -> dict[str, tuple[int, ...]]:
    """Shape of every matrix that `arrays` returns for a layer of this kind.

    Example:
        >>> shapes(LayerKind("Linear", ("WEIGHT",), None, d_in=2, d_out=3), lifted=True)
        {'WEIGHT': (4, 3)}
    """
    d_in, d_out, rank = kind.d_in + lifted, kind.d_out + lifted, kind.rank + lifted
    if kind.down is None:
        return {kind.legs[0]: (d_out, d_in)}
    return {kind.down: (d_out, rank), **dict.fromkeys(kind.legs, (rank, d_in))}


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
        rows = with_bias(plain[WEIGHT], plain.get(bias_of(WEIGHT)))
        return {WEIGHT: xp.concatenate([xp.eye(1, rows.shape[1], dtype=rows.dtype), rows])}
    # Lifted DOWN has a row 0 that computes the constant from the constant hidden unit, and the
    # biases in the column of that unit. A skip adds skip * 1 to row 0, so its entry is 1 - skip.
    down, skip = plain[DOWN], plain.get(SKIP)
    entry = xp.asarray(1.0 if skip is None else 1.0 - skip, down.dtype).reshape(1)
    bias = plain.get(bias_of(DOWN))
    column = xp.concatenate([entry, xp.zeros(len(down), down.dtype) if bias is None else bias])
    padded = xp.concatenate([xp.zeros((1, down.shape[1]), down.dtype), down])
    roles = {DOWN: xp.concatenate([padded, column[:, None]], axis=1)}
    legs = [name.upper() for name in affine_maps(core_of(layer))[0]]
    unit = xp.eye(1, plain[legs[0]].shape[1] + 1, dtype=down.dtype)[0]
    for role in legs:  # the last row of each reads the constant
        rows = with_bias(plain[role], plain.get(bias_of(role)))
        roles[role] = xp.concatenate([rows, unit[None]])
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


def with_bias(weight: Any, bias: Any) -> Any:
    """The rows `[b, W]` of an affine map, which read a lifted state; a missing bias is zero.

    Example:
        >>> with_bias(np.array([[2.0]]), None)
        array([[0., 2.]])
    """
    xp = library(weight, bias)
    # b + W x = [b, W] (1, x), row by row.
    bias = xp.zeros(len(weight), weight.dtype) if bias is None else bias
    return xp.concatenate([bias[:, None], weight], axis=1)


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
    """The rows c x and y / c of equal norm, c a constant to derivatives.

    Among numbers a row beside a row of zeros becomes zero: the difference of its squares would be
    rounding, of which a layer without products would have its norm. Derivatives need the row, which
    is made so small that this rounding is no part of any other product.
    """
    # c x (x) y / c is the same for every c. But squares of size |x|^2 with a difference of size
    # |x| |y| lose log10(|x| / |y|) digits.
    norms = [xp.sqrt((rows * rows).sum(axis=1)) for rows in (left, right)]
    # A row of zeros has no length to balance.
    usable = (norms[0] > 0) & (norms[1] > 0)
    ratio = xp.where(usable, norms[1], 1.0) / xp.where(usable, norms[0], 1.0)
    balance = xp.sqrt(ratio)[:, None].astype(left.dtype)
    if xp is jnp:
        small = float(xp.finfo(left.dtype).eps)
        of_zeros = xp.where(norms[0] > 0, small, 1 / small)[:, None]
        balance = jax.lax.stop_gradient(xp.where(usable[:, None], balance, of_zeros))
        balance = balance.astype(left.dtype)
    else:
        left, right = left * usable[:, None], right * usable[:, None]
    return left * balance, right / balance


def zero_outputs(model: Model) -> Any:
    """Which outputs of a model are zero because zeros among its weights leave nothing of them.

    Sums and differences of squares (`symmetric_arrays`) that have derivatives give such an output a
    norm of rounding, so its zero has to be told apart.

    Args:
        model: Any model of known layers, traced or not.

    Returns:
        Booleans, (outputs,); traced where the model is.

    Example:
        >>> import tnsim
        >>> zero, one = np.zeros((1, 1)), np.ones((1, 1))
        >>> product, line = tnsim.Bilinear(zero, one, one), tnsim.Linear(one, bias=[1.0])
        >>> [bool(zero_outputs(tnsim.Model(each))) for each in ([product], [product, line], [line])]
        [True, False, False]
    """
    xp = library(model)
    lives: Any = xp.ones(model.d_in, bool)  # coordinates of the state that are not always zero
    for layer in model.layers:
        core: Any = innermost(layer)
        below, (names, output) = lives, affine_maps(core)

        def passed(name: str, lives: Any, core: Any = core) -> Any:
            bias = getattr(core, bias_name(name))
            rows = ((getattr(core, name) != 0) & lives).any(axis=1)
            return rows if bias is None else rows | (bias != 0)

        if isinstance(core, Attention) or activation_of(core) is not None:  # no sums of squares
            lives = xp.ones(core.d_out, bool)
            continue
        if names:
            lives = xp.stack([passed(name, below) for name in names]).all(axis=0)
        lives = passed(output, lives)
        if isinstance(layer, Residual):
            lives = lives | below
    return ~lives


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


class Affine(NamedTuple):
    """The affine map `weight x + bias`; a weight of None is the identity, a bias of None zero."""

    weight: Float[Array, "rows in"] | None = None
    bias: Float[Array, " rows"] | None = None

    def after(self, inner: Affine) -> Affine:
        """This map of the outputs of another map."""
        bias = self.bias
        if inner.bias is not None:
            # W (V x + v) + w = W V x + (W v + w).
            bias = add(product(self.weight, inner.bias), bias)
        weight = self.weight if inner.weight is None else product(self.weight, inner.weight)
        return Affine(weight, bias)


def affine_of(layer: Layer) -> Affine:
    """A linear layer as an affine map, in float64.

    Example:
        A residual around a linear layer is linear as well: skip x + scale (W x + b).

        >>> import tnsim
        >>> affine_of(tnsim.Residual(tnsim.Linear([[2.0]], [1.0]), skip=1.0, scale=10.0))
        Affine(weight=array([[21.]]), bias=array([10.]))
    """
    arrays = sequence_arrays(layer, 1)
    return Affine(arrays[WEIGHT], arrays.get(bias_of(WEIGHT)))


def product(matrix: Any, other: Any) -> Any:
    """The product of two matrices, or of a matrix and a vector; None is the identity.

    Example:
        >>> product(None, 3.0)
        3.0
    """
    return other if matrix is None else matrix @ other


class Node(NamedTuple):
    """A tensor of a layer's network.

    Args:
        role: Role of the array in the layer.
        array: Entries, float64.
        indices: Indices of the axes; the output comes first, an input last.
    """

    role: str
    array: Float[np.ndarray, "*axes"]
    indices: tuple[str, ...]


def node_count(layer: Layer) -> int:
    """Number of tensors in the network of a layer: its affine maps, and a mask for attention.

    Example:
        >>> import tnsim
        >>> node_count(tnsim.Bilinear(np.eye(2), np.eye(2), np.eye(2)))
        3
    """
    core = core_of(layer)
    rows, _ = affine_maps(core)
    return len(rows) + 1 + isinstance(core, Attention)


def local_nodes(layer: Layer, n_ctx: int | None) -> tuple[Node, ...]:
    """The network of a layer.

    Args:
        layer: Any layer.
        n_ctx: Number of positions of the sequence; None for vectors, which attention does not read.

    Returns:
        Nodes without an input first, then the nodes that read `in0`, `in1`, ... in order.

    Example:
        >>> import tnsim
        >>> nodes = local_nodes(tnsim.Bilinear(np.eye(2), np.eye(2), np.eye(2)), None)
        >>> [(node.role, node.indices) for node in nodes][:2]
        [('DOWN', ('out', 'hidden')), ('LEFT', ('hidden', 'in0'))]

    Source:
        Paper, section 2.1.
    """
    layer = jax.tree.map(lambda x: np.asarray(x, np.float64), layer)
    core = core_of(layer)
    if isinstance(core, Attention):
        assert n_ctx is not None  # who compares or draws models asks for it
        return _attention_nodes(core, sequence_arrays(layer, n_ctx), n_ctx)
    arrays = unrolled_arrays(layer if n_ctx is None else at_every_position(layer, n_ctx))
    if WEIGHT in arrays:
        return (Node(WEIGHT, arrays[WEIGHT], (OUT, input_index(0))),)
    legs = [role for role in arrays if role != DOWN]
    nodes = [Node(DOWN, arrays[DOWN], (OUT, "hidden"))]
    for n, role in enumerate(legs):
        nodes.append(Node(role, arrays[role], ("hidden", input_index(n))))
    return tuple(nodes)


def at_every_position(layer: Layer, n_ctx: int) -> Layer:
    """The layer on flattened sequences that applies the given layer at every position.

    Its weights are block-diagonal, a block for each position.

    Example:
        >>> import tnsim
        >>> at_every_position(tnsim.Linear([[2.0]]), n_ctx=2).weight
        array([[2., 0.],
               [0., 2.]])
    """
    if isinstance(layer, Residual):
        return Residual(at_every_position(layer.layer, n_ctx), layer.skip, layer.scale)
    leaves, structure = jax.tree.flatten(layer)
    return jax.tree.unflatten(structure, [_repeated_array(leaf, n_ctx) for leaf in leaves])


def _repeated_array(array: Array, n_ctx: int) -> Array:
    """A bias repeated for every position, or a matrix repeated as the blocks of a diagonal."""
    xp = library(array)
    if array.ndim == 1:
        return xp.tile(array, n_ctx)
    return xp.kron(xp.eye(n_ctx, dtype=array.dtype), array)


def stacked(legs: Sequence[Node]) -> tuple[Float[np.ndarray, "*axes"], tuple[str, ...]]:
    """The nodes of all input legs as a single array, so that a symmetriser may permute them.

    Every node is broadcast over the indices of all nodes.

    Returns:
        Array with the role as its first axis and the leg as its last axis, and the indices of the
        axes between.

    Example:
        >>> left = Node("LEFT", np.ones((2, 3)), ("hidden", "in0"))
        >>> right = Node("RIGHT", np.ones((2, 3)), ("hidden", "in1"))
        >>> array, indices = stacked([left, right])
        >>> array.shape, indices
        ((2, 2, 3), ('hidden',))
    """
    sizes: dict[str, int] = {}
    for node in legs:
        for index, size in zip(node.indices[:-1], node.array.shape, strict=False):
            sizes[index] = size
    order = list(sizes)
    arrays = []
    for node in legs:
        own = sorted(node.indices[:-1], key=order.index)
        axes = [node.indices.index(index) for index in own]
        ordered = node.array.transpose([*axes, -1])
        missing = tuple(n for n, index in enumerate(order) if index not in own)
        spread = np.expand_dims(ordered, missing)
        arrays.append(np.broadcast_to(spread, (*sizes.values(), spread.shape[-1])))
    return np.stack(arrays), tuple(order)


def _attention_nodes(core: Attention, arrays: dict[str, Any], n_ctx: int) -> tuple[Node, ...]:
    """The nodes of attention, with extra heads for the constant, the output bias and a skip.

    In an extra head every score is 1 and a position sees itself alone. The first extra head reads
    the constant on all legs and gives the constant row and the output bias. With a skip, each of
    the others reads a coordinate of the input on a single leg and the constant on the rest: 1/5 of
    the skip comes from each leg, so that the tensor treats legs alike (as in
    `unrolled_arrays` for two legs).

    Args:
        core: Attention inside the residuals.
        arrays: Arrays of the layer with its residuals, by role.
        n_ctx: Number of positions.
    """
    copies: list[tuple[str, int]] = []  # (leg that reads, coordinate) of each further head
    if SKIP in arrays:
        copies = [(role, i) for role in _HEAD_INDICES for i in range(core.d_in)]
    heads = core.n_heads + 1 + len(copies)
    output = _attention_output(core, arrays, n_ctx, copies)
    own = np.broadcast_to(arrays[MASK], (core.n_heads, n_ctx, n_ctx))
    mask = np.concatenate([own, [np.eye(n_ctx)] * (heads - core.n_heads)])
    nodes = [Node(OUTPUT, output, (OUT, "s", "a", "u")), Node(MASK, mask, ("a", "s", "t"))]
    for leg, (role, indices) in enumerate(_HEAD_INDICES.items()):
        array = _attention_leg(core, arrays, n_ctx, copies, role)
        nodes.append(Node(role, array, (*indices, input_index(leg))))
    return tuple(nodes)


def _attention_leg(
    core: Attention, arrays: dict[str, Any], n_ctx: int, copies: list[tuple[str, int]], role: str
) -> Float[np.ndarray, "position head row in"]:
    """Queries, keys or values of all heads, over flattened and lifted inputs."""
    heads = core.n_heads + 1 + len(copies)
    rows = arrays[role].shape[-2]
    every = np.arange(n_ctx)
    constant = np.zeros((n_ctx, heads, rows))
    # Axes (position of the leg, head, row, position of the input, coordinate); a leg reads its own
    # position only, so the blocks off the diagonal stay zero.
    body = np.zeros((n_ctx, heads, rows, n_ctx, core.d_in))
    constant[:, : core.n_heads] = arrays.get(bias_of(role), 0.0)
    constant[:, core.n_heads :, 0] = 1.0
    body[every, : core.n_heads, :, every] = arrays[role]
    for head, (reads, i) in enumerate(copies, core.n_heads + 1):
        if reads == role:
            constant[:, head, 0] = 0.0
            body[every, head, 0, every, i] = 1.0
    flat = body.reshape(n_ctx, heads, rows, -1)
    return np.concatenate([constant[..., None], flat], axis=-1)


def _attention_output(
    core: Attention, arrays: dict[str, Any], n_ctx: int, copies: list[tuple[str, int]]
) -> Float[np.ndarray, "out position head value"]:
    """The output matrix of all heads, over flattened and lifted outputs."""
    heads = core.n_heads + 1 + len(copies)
    every = np.arange(n_ctx)
    output = np.zeros((1 + n_ctx * core.d_out, n_ctx, heads, core.d_value))
    # The constant output is read off the first extra head at position 0.
    output[0, 0, core.n_heads, 0] = 1.0
    blocks = output[1:].reshape(n_ctx, core.d_out, n_ctx, heads, core.d_value)  # a view
    blocks[every, :, every, : core.n_heads] = arrays[OUTPUT]
    blocks[every, :, every, core.n_heads, 0] = arrays.get(bias_of(OUTPUT), 0.0)
    for head, (_, i) in enumerate(copies, core.n_heads + 1):
        blocks[every, i, every, head, 0] = arrays[SKIP] / core.order
    return output


def flat_kind(layer: Layer, n_ctx: int) -> LayerKind:
    """The kind of a layer over flattened sequences.

    Attention is given by its whole tensor, and so is always lifted.

    Example:
        >>> import tnsim
        >>> flat_kind(tnsim.Linear(np.eye(2)), n_ctx=3).d_in
        6
    """
    kind = layer_kind(layer)
    flat = kind._replace(d_in=n_ctx * kind.d_in, d_out=n_ctx * kind.d_out, rank=n_ctx * kind.rank)
    if not kind.mixes_positions:
        return flat
    return LayerKind(flat.name, flat.legs, flat.down, flat.d_in, flat.d_out, dense=True)


def flat_arrays(layer: Layer, n_ctx: int) -> dict[str, Any]:
    """The arrays of a layer over flattened sequences.

    Returns:
        Arrays by role, as from `symmetric_arrays`; DENSE alone for attention.

    Raises:
        ModelError: The weights of an attention layer are traced.

    Example:
        >>> import tnsim
        >>> flat_arrays(tnsim.Linear(np.eye(2)), n_ctx=3)["WEIGHT"].shape
        (7, 7)
    """
    if not isinstance(innermost(layer), Attention):
        return symmetric_arrays(at_every_position(layer, n_ctx), lifted=True)
    if is_traced(layer):
        raise ModelError(
            "the exact metrics of deep models with attention have no derivatives; "
            "use GaussianClosure() or TreeSymmetric()"
        )
    return {DENSE: symmetrised(dense(layer, n_ctx))}


def dense(layer: Layer, n_ctx: int) -> Float[np.ndarray, "out i j k l m"]:
    """The tensor of an attention layer over flattened, lifted sequences, not symmetrised.

    Returns:
        Tensor of float64, (1 + n_ctx * d_out, (1 + n_ctx * d_in) five times).

    Example:
        >>> import tnsim
        >>> one = np.ones((1, 1))
        >>> layer = tnsim.Attention(one, one, one, one, one, one, n_heads=1, rope_base=None)
        >>> dense(layer, n_ctx=1).shape
        (2, 2, 2, 2, 2, 2)
    """
    nodes = local_nodes(layer, n_ctx)
    # np.einsum takes numbers for indices, here numbered in the order of their occurrence.
    numbers: dict[str, int] = {}
    arguments: list[Any] = []
    for node in nodes:
        arguments += [node.array, [numbers.setdefault(i, len(numbers)) for i in node.indices]]
    output = [numbers[index] for index in (OUT, *map(input_index, range(5)))]
    return np.einsum(*arguments, output, optimize=True)
