"""The local tensor network of a layer. In: a layer. Out: its parts, its arrays, its leg symmetry.

Lifted, `x~ = (1, x)`, every layer is homogeneous: a tensor with one output leg and `order` input legs
(paper, section 2.1). That tensor is a *sum of parts*, each a small product of arrays joined over
indices, so that a skip connection stays an index and never becomes an identity block:

    Linear      WEIGHT[out, in0]
    Bilinear    sum_h DOWN[out, h] LEFT[h, in0] RIGHT[h, in1]
    Residual    the layer's part, plus 1/2 (delta[out, in0] SKIP[in1] + SKIP[in0] delta[out, in1])

Lifting appends the constant coordinate at position 0 of every leg and one hidden unit that computes
it, so biases cost one row. `SKIP = skip * e_0` reads the constant off the leg that the skip does not use.
The lift is left out altogether where no layer of either model has a constant (`has_constant`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.models.layers import Bilinear, Layer, Linear, Residual, innermost
from tnsim.names import (
    DENSE,
    DOWN,
    FACTOR,
    LEFT,
    OUT,
    RIGHT,
    SIGNED_DOWN,
    SKIP,
    WEIGHT,
    input_index,
)


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


class Kind(NamedTuple):
    """The shape of a layer without its numbers: hashable, the key under which plans are found."""

    name: str
    d_in: int
    d_out: int
    rank: int
    constant: bool
    skips: bool

    @property
    def order(self) -> int:
        return {"Linear": 1, "Bilinear": 2, "Attention": 5}[self.name]

    @property
    def dense_size(self) -> int:
        """Elements of the layer's tensor where it is given as one, 0 where it is not."""
        return (self.d_out + 1) * (self.d_in + 1) ** self.order if self.name == "Attention" else 0


_IN0, _IN1, _HIDDEN = input_index(0), input_index(1), "hidden"
_LINEAR = Part(((WEIGHT, (OUT, _IN0)),))
_BILINEAR = Part(((DOWN, (OUT, _HIDDEN)), (LEFT, (_HIDDEN, _IN0)), (RIGHT, (_HIDDEN, _IN1))))
_SKIPS = (
    Part(((SKIP, (_IN1,)),), out=_IN0, weight=0.5),
    Part(((SKIP, (_IN0,)),), out=_IN1, weight=0.5),
)


def kind(layer: Layer) -> Kind:
    core = innermost(layer)
    skips = core is not layer
    name, rank = type(core).__name__, core.rank if isinstance(core, Bilinear) else 0
    biases = (
        (core.bias,)
        if isinstance(core, Linear)
        else (core.left_bias, core.right_bias, core.down_bias)
    )
    skips = skips and not isinstance(
        core, Linear
    )  # a skip around a linear layer is added to its matrix
    return Kind(
        name, core.d_in, core.d_out, rank, skips or any(b is not None for b in biases), skips
    )


def local(kind: Kind) -> Local:
    """Parts of a layer's local tensor; the same lifted or not."""
    if kind.name == "Linear":
        return Local(1, (_LINEAR,))
    return Local(2, (_BILINEAR, *_SKIPS) if kind.skips else (_BILINEAR,))


def shapes(kind: Kind, lifted: bool) -> dict[str, tuple[int, ...]]:
    """Shape of every array that `arrays` returns for a layer of this kind."""
    d_in, d_out, rank = kind.d_in + lifted, kind.d_out + lifted, kind.rank + lifted
    if kind.name == "Linear":
        return {WEIGHT: (d_out, d_in)}
    found = {DOWN: (d_out, rank), LEFT: (rank, d_in), RIGHT: (rank, d_in)}
    return {**found, SKIP: (d_in,)} if kind.skips else found


def arrays(layer: Layer, lifted: bool) -> dict[str, Any]:
    """Role -> array. Lifted, coordinate 0 of every bond is the constant 1 and carries on to the output.

    The residual scale is multiplied into DOWN; what the skip adds to the constant row is taken off the
    bias column, so that the row still computes 1.
    """
    xp = jnp if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(layer)) else np
    core = innermost(layer)
    skips = core is not layer
    skip, scale = residual_rule(layer)
    if isinstance(core, Linear):
        weight, bias = core.weight, core.bias
        if skips:
            weight = scale * weight + skip * xp.eye(core.d_in, dtype=weight.dtype)
            bias = None if bias is None else scale * bias
        return {WEIGHT: _affine(xp, weight, bias) if lifted else weight}
    down, bias = (scale * core.down, core.down_bias) if skips else (core.down, core.down_bias)
    if not lifted:
        return {DOWN: down, LEFT: core.left, RIGHT: core.right}
    bias = scale * bias if skips and bias is not None else bias
    column = _column(xp, 1.0 - skip if skips else 1.0, bias, core.d_out, down.dtype)
    padded = xp.concatenate([xp.zeros((1, core.rank), down.dtype), down])
    found = {
        DOWN: xp.concatenate([padded, column[:, None]], axis=1),
        LEFT: _with_constant_unit(xp, core.left, core.left_bias),
        RIGHT: _with_constant_unit(xp, core.right, core.right_bias),
    }
    if skips:
        found[SKIP] = skip * xp.eye(1, core.d_in + 1, dtype=down.dtype)[0]
    return found


def unrolled_arrays(layer: Layer) -> dict[str, Any]:
    """Lifted arrays for a drawn network, where a skip has to be spelled out as hidden units.

    A tensor network is one product, so the sum `skip x + scale f(x)` needs units of its own: one pair of
    units per coordinate, `x_i * 1` and `1 * x_i`, each with weight skip / 2. Plans never see these.
    """
    found = arrays(layer, lifted=True)
    if SKIP not in found:
        return found
    skip = found.pop(SKIP)
    xp = jnp if isinstance(skip, jax.Array) else np
    copy = xp.eye(skip.shape[0], dtype=skip.dtype)
    one = xp.zeros_like(copy) + copy[0]
    half = 0.5 * skip[0] * copy
    return {
        DOWN: xp.concatenate([found[DOWN], half, half], axis=1),
        LEFT: xp.concatenate([found[LEFT], copy, one]),
        RIGHT: xp.concatenate([found[RIGHT], one, copy]),
    }


def symmetric_shapes(kind: Kind, lifted: bool) -> dict[str, tuple[int, ...]]:
    """Shape of every array that `symmetric_arrays` returns for a layer of this kind."""
    if kind.name == "Linear":
        return shapes(kind, lifted)
    d_in, d_out = kind.d_in + lifted, kind.d_out + lifted
    if kind.name == "Attention":  # over flattened sequences, see `flattening`
        return {DENSE: (d_out, *(d_in,) * kind.order)}
    rank = 2 * (kind.rank + lifted) + (2 * d_in if kind.skips else 0)
    return {SIGNED_DOWN: (d_out, rank), FACTOR: (rank, d_in)}


def symmetric_arrays(layer: Layer, lifted: bool) -> dict[str, Any]:
    """The symmetrised layer as `sum_h SIGNED_DOWN[out, h] FACTOR[h, in0] FACTOR[h, in1]`: both legs are one array.

    L (x) R + R (x) L = ((L + R) (x) (L + R) - (L - R) (x) (L - R)) / 2, row by row, and likewise for a skip with
    the identity for L and the constant for R. The rows of L and R are first scaled to equal norm, so
    that the difference of squares cancels no digits however a model splits its scale between the two.
    """
    found = arrays(layer, lifted)
    if WEIGHT in found:
        return found
    xp = jnp if any(isinstance(x, jax.Array) for x in found.values()) else np
    left, right, down = found[LEFT], found[RIGHT], found[DOWN]
    norms = [xp.sqrt((x * x).sum(axis=1)) for x in (left, right)]
    usable = (norms[0] > 0) & (norms[1] > 0)
    balance = xp.sqrt(xp.where(usable, norms[1], 1.0) / xp.where(usable, norms[0], 1.0))[
        :, None
    ].astype(down.dtype)
    balance = jax.lax.stop_gradient(balance) if xp is jnp else balance
    left, right = left * balance, right / balance
    factors, downs = [left + right, left - right], [0.25 * down, -0.25 * down]
    if SKIP in found:
        copy = xp.eye(down.shape[0], dtype=down.dtype)
        factors += [copy + copy[0], copy - copy[0]]
        downs += [0.25 * found[SKIP][0] * copy, -0.25 * found[SKIP][0] * copy]
    return {SIGNED_DOWN: xp.concatenate(downs, axis=1), FACTOR: xp.concatenate(factors)}


def residual_rule(layer: Layer) -> tuple[Any, Any]:
    """(skip, scale) of nested residuals taken as one: s2 x + c2 (s1 x + c1 f) = (s2 + c2 s1) x + c2 c1 f."""
    skip, scale = 0.0, 1.0
    while isinstance(layer, Residual):
        skip, scale = skip + scale * layer.skip, scale * layer.scale
        layer = layer.layer
    return skip, scale


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
