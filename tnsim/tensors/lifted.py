"""The local tensor network of a layer. In: a layer. Out: its parts, its arrays, its leg symmetry.

Lifted, `x~ = (1, x)`, every layer is homogeneous: a tensor with one output leg and `order` input legs
(paper, section 2.1). That tensor is a *sum of parts*, each a small product of arrays joined over
indices, so that a skip connection stays an index and never becomes an identity block:

    Linear        WEIGHT[out, in0]
    Bilinear      sum_h DOWN[out, h] LEFT[h, in0] RIGHT[h, in1]
    Multilinear   sum_h DOWN[out, h] LEG0[h, in0] LEG1[h, in1] LEG2[h, in2] ...
    Residual      the layer's part, plus 1/n delta[out, in_j] SKIP[in_k] UNIT[in_l] ... for each of the n legs j

Lifting appends the constant coordinate at position 0 of every leg and one hidden unit that computes
it, so biases cost one row. `SKIP = skip * e_0` and, from three legs on, `UNIT = e_0` read the constant off the
legs that the skip does not use. The lift is left out where no layer of either model has a constant.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tnsim.models.arrays import Array
from tnsim.models.layers import affine_maps, bias_name, innermost, residual_rule
from tnsim.names import DENSE, DOWN, FACTOR, OUT, SIGNED_DOWN, SKIP, UNIT, WEIGHT, input_index
from tnsim.tensors.kinds import LayerKind

_HIDDEN = "hidden"


@dataclass(frozen=True)
class Part:
    """`weight * prod(arrays)`; `tensors` pairs a role with its indices, `out` names the output index.

    Where `out` is an input index, the part is a skip: output and input are one index.
    """

    tensors: tuple[tuple[str, tuple[str, ...]], ...]
    out: str = OUT
    weight: float = 1.0


@dataclass(frozen=True)
class Local:
    """What a metric needs to know of a layer: parts, order, and whether its legs may be exchanged.

    All input legs of the layers here are exchangeable (the function does not change when they are
    permuted), so the leg symmetry is the full symmetric group of `order` legs.
    """

    order: int
    parts: tuple[Part, ...]


def local(kind: LayerKind) -> Local:
    """Parts of a layer's local tensor; the same lifted or not."""
    inputs = [input_index(n) for n in range(kind.order)]
    if kind.down is None:
        return Local(1, (Part(((kind.legs[0], (OUT, inputs[0])),)),))
    legs = [(role, (_HIDDEN, i)) for role, i in zip(kind.legs, inputs, strict=True)]
    parts = [Part(((kind.down, (OUT, _HIDDEN)), *legs))]
    if kind.skips:
        parts += [_skip(inputs, n) for n in range(kind.order)]
    return Local(kind.order, tuple(parts))


def _skip(inputs: list[str], kept: int) -> Part:
    """The skip that carries leg `kept` to the output and reads the constant off the others."""
    others = [i for n, i in enumerate(inputs) if n != kept]
    roles = [SKIP] + [UNIT] * (len(others) - 1)
    constants = tuple((role, (i,)) for role, i in zip(roles, others, strict=True))
    return Part(constants, out=inputs[kept], weight=1 / len(inputs))


def shapes(kind: LayerKind, lifted: bool) -> dict[str, tuple[int, ...]]:
    """Shape of every array that `arrays` returns for a layer of this kind."""
    d_in, d_out, rank = kind.d_in + lifted, kind.d_out + lifted, kind.rank + lifted
    if kind.down is None:
        return {kind.legs[0]: (d_out, d_in)}
    roles = {kind.down: (d_out, rank)} | {role: (rank, d_in) for role in kind.legs}
    if kind.skips:
        roles[SKIP] = (d_in,)
    if kind.skips and kind.order > 2:
        roles[UNIT] = (d_in,)
    return roles


def arrays(layer: Layer, lifted: bool) -> dict[str, Any]:
    """Role -> array. Lifted, coordinate 0 of every bond is the constant 1 and carries on to the output.

    The residual scale is multiplied into DOWN; what the skip adds to the constant row is taken off the
    bias column, so that the row still computes 1.
    """
    xp = _library(layer)
    core = innermost(layer)
    rows, output = affine_maps(core)
    skip, scale = residual_rule(layer)
    last, bias = getattr(core, output), getattr(core, bias_name(output))
    if core is not layer:
        last = scale * last
        bias = None if bias is None else scale * bias
    if not rows:
        if core is not layer:
            last = last + skip * xp.eye(core.d_in, dtype=last.dtype)
        return {WEIGHT: _affine(xp, last, bias) if lifted else last}
    legs = {name.upper(): getattr(core, name) for name in rows}
    if not lifted:
        return {DOWN: last, **legs}
    roles: dict[str, Any] = {}
    column = _column(xp, 1.0 - skip, bias, core.d_out, last.dtype)
    padded = xp.concatenate([xp.zeros((1, last.shape[1]), last.dtype), last])
    roles[DOWN] = xp.concatenate([padded, column[:, None]], axis=1)
    for name in rows:
        leg = _with_constant_unit(xp, getattr(core, name), getattr(core, bias_name(name)))
        roles[name.upper()] = leg
    if core is not layer:
        unit = xp.eye(1, core.d_in + 1, dtype=last.dtype)[0]
        roles[SKIP] = skip * unit
        if len(rows) > 2:
            roles[UNIT] = unit
    return roles


def unrolled_arrays(layer: Layer) -> dict[str, Any]:
    """Lifted arrays for a drawn network, where a skip has to be spelled out as hidden units.

    A tensor network is one product, so the sum `skip x + scale f(x)` needs units of its own: for every leg one
    unit per coordinate, which reads the coordinate on that leg and the constant on all others, with weight
    skip / n. Plans never see these.
    """
    roles = arrays(layer, lifted=True)
    if SKIP not in roles:
        return roles
    skip = roles.pop(SKIP)
    roles.pop(UNIT, None)
    xp = _library(roles)
    copy = xp.eye(skip.shape[0], dtype=skip.dtype)
    one = xp.zeros_like(copy) + copy[0]
    legs = [role for role in roles if role != DOWN]
    spelled = {}
    for role in legs:
        units = [copy if other == role else one for other in legs]
        spelled[role] = xp.concatenate([roles[role], *units])
    carried = [skip[0] / len(legs) * copy] * len(legs)
    return {DOWN: xp.concatenate([roles[DOWN], *carried], axis=1), **spelled}


def symmetric_shapes(kind: LayerKind, lifted: bool) -> dict[str, tuple[int, ...]]:
    """Shape of every array that `symmetric_arrays` returns for a layer of this kind."""
    if kind.down is None:
        return shapes(kind, lifted)
    d_in, d_out = kind.d_in + lifted, kind.d_out + lifted
    if kind.dense or kind.order > 2:
        return {DENSE: (d_out, *(d_in,) * kind.order)}
    rank = 2 * (kind.rank + lifted) + (2 * d_in if kind.skips else 0)
    return {SIGNED_DOWN: (d_out, rank), FACTOR: (rank, d_in)}


def symmetric_arrays(layer: Layer, lifted: bool) -> dict[str, Any]:
    """The symmetrised layer: two legs as `sum_h SIGNED_DOWN[out, h] FACTOR[h, in0] FACTOR[h, in1]`, more as DENSE.

    L (x) R + R (x) L = ((L + R) (x) (L + R) - (L - R) (x) (L - R)) / 2, row by row, and likewise for a skip with
    the identity for L and the constant for R. The rows of L and R are first scaled to equal norm, so
    that the difference of squares cancels no digits however a model splits its scale between the two.
    """
    roles = arrays(layer, lifted)
    if WEIGHT in roles:
        return roles
    xp = _library(roles)
    legs = [roles[role] for role in roles if role not in (DOWN, SKIP, UNIT)]
    if len(legs) != 2:
        spelled = unrolled_arrays(layer) if lifted else roles
        return {DENSE: symmetrised(_whole(spelled))}
    (left, right), down = legs, roles[DOWN]
    norms = [xp.sqrt((x * x).sum(axis=1)) for x in (left, right)]
    usable = (norms[0] > 0) & (norms[1] > 0)
    ratio = xp.where(usable, norms[1], 1.0) / xp.where(usable, norms[0], 1.0)
    balance = xp.sqrt(ratio)[:, None].astype(down.dtype)
    balance = jax.lax.stop_gradient(balance) if xp is jnp else balance
    left, right = left * balance, right / balance
    factors, downs = [left + right, left - right], [0.25 * down, -0.25 * down]
    if SKIP in roles:
        copy = xp.eye(down.shape[0], dtype=down.dtype)
        factors += [copy + copy[0], copy - copy[0]]
        downs += [0.25 * roles[SKIP][0] * copy, -0.25 * roles[SKIP][0] * copy]
    return {SIGNED_DOWN: xp.concatenate(downs, axis=1), FACTOR: xp.concatenate(factors)}


def symmetrised(tensor: Float[Array, "out *legs"]) -> Float[Array, "out *legs"]:
    """The mean over all orders of the legs."""
    order = tensor.ndim - 1
    total: Any = 0.0
    for legs in itertools.permutations(range(1, order + 1)):
        total = total + tensor.transpose(0, *legs)
    return total / math.factorial(order)


def _whole(roles: dict[str, Any]) -> Float[Array, "out *legs"]:
    """The tensor of a layer from its arrays over hidden units."""
    legs = [roles[role] for role in roles if role != DOWN]
    letters = "abcdefgh"[: len(legs)]
    inputs = ",".join(["oz"] + [f"z{x}" for x in letters])
    return _library(roles).einsum(f"{inputs}->o{letters}", roles[DOWN], *legs)


def _library(arrays: Any) -> Any:
    """`jax.numpy` where an array is JAX's, else NumPy."""
    return jnp if any(isinstance(x, jax.Array) for x in jax.tree.leaves(arrays)) else np


def _column(xp: Any, first: Any, bias: Any, size: int, dtype: Any) -> Any:
    """(first, bias) as one vector; a missing bias is zero."""
    bias = xp.zeros(size, dtype) if bias is None else bias
    return xp.concatenate([xp.reshape(xp.asarray(first, dtype), (1,)), bias])


def _affine(xp: Any, weight: Any, bias: Any) -> Any:
    """[[1, 0], [b, W]]."""
    padded = xp.concatenate([xp.zeros((1, weight.shape[1]), weight.dtype), weight])
    column = _column(xp, 1.0, bias, weight.shape[0], weight.dtype)
    return xp.concatenate([column[:, None], padded], axis=1)


def _with_constant_unit(xp: Any, weight: Any, bias: Any) -> Any:
    """[[b, W], [1, 0]]: the biases as column 0, and a last unit that reads the constant."""
    bias = xp.zeros(weight.shape[0], weight.dtype) if bias is None else bias
    rows = xp.concatenate([bias[:, None], weight], axis=1)
    return xp.concatenate([rows, xp.eye(1, weight.shape[1] + 1, dtype=weight.dtype)])
