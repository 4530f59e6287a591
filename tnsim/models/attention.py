"""Bilinear attention as an immutable, checked pytree of weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError
from tnsim.models.arrays import Array, as_array, is_count, pytree, set_arrays, vector
from tnsim.models.matrices import AffineMaps, bias_name, matrix
from tnsim.options import checked
from tnsim.scaled import library

MASKS = ("causal", "none")


@checked(own="rope_base")
@pytree
@dataclass(frozen=True, eq=False)
class Attention(AffineMaps):
    """Bilinear attention on a sequence.

    Per head and position s, with positions t of keys,

        z[s]   = sum_t mask[s, t] (q1[s] . k1[t]) (q2[s] . k2[t]) / d_head^2  v[t]
        output = O z + o_bias,

    with q1[s] = R_s (Q1 x_s + q1_bias) and so on; v is not rotated. The order in the sequence is 5:
    two queries, two keys and a value. Without RoPE and with q2 = k2 = 0 the second score is the
    constant q2_bias . k2_bias of a head, which makes the layer linear attention.

    R_s turns coordinates (i, i + d_head / 2) by the angle s * rope_base^(-2 i / d_head).

    Args:
        q1, k1, q2, k2: Matrices (n_heads * d_head, d_in), the rows of a head together.
        v: Matrix (n_heads * d_value, d_in).
        o: Matrix (d_out, n_heads * d_value).
        n_heads: Number of heads.
        q1_bias, k1_bias, q2_bias, k2_bias, v_bias, o_bias: Vectors with an entry per row, or None.
        mask: Positions that a query sees: "causal" (t <= s) or "none" (all).
        rope_base: Base of the rotary embedding; None for no rotation.

    Raises:
        ModelError: Shapes do not fit, an entry is not finite, or a setting is not allowed.

    Example:
        A head of width 1 on ones: each of s + 1 keys gives 1.

        >>> one = np.ones((1, 1))
        >>> layer = Attention(one, one, one, one, one, one, n_heads=1, rope_base=None)
        >>> layer(np.ones((3, 1)))[:, 0]
        array([1., 2., 3.])

    Source:
        Paper, section 2.1.
    """

    q1: Float[Array, "rows in"]
    k1: Float[Array, "rows in"]
    q2: Float[Array, "rows in"]
    k2: Float[Array, "rows in"]
    v: Float[Array, "values in"]
    o: Float[Array, "out values"]
    n_heads: int = dataclasses.field(metadata={"static": True})
    q1_bias: Float[Array, " rows"] | None = None
    k1_bias: Float[Array, " rows"] | None = None
    q2_bias: Float[Array, " rows"] | None = None
    k2_bias: Float[Array, " rows"] | None = None
    v_bias: Float[Array, " values"] | None = None
    o_bias: Float[Array, " out"] | None = None
    mask: str = dataclasses.field(default="causal", metadata={"static": True})
    rope_base: float | None = dataclasses.field(default=10_000.0, metadata={"static": True})
    maps = ("q1", "k1", "q2", "k2", "v"), "o"

    def __post_init__(self) -> None:
        q1 = matrix(self.q1, "Attention q1", (None, None))
        rows, d_in = q1.shape
        if not is_count(self.n_heads):
            raise ModelError(f"n_heads must be a positive integer, found {self.n_heads!r}")
        arrays = {"q1": q1}
        for name in ("k1", "q2", "k2"):
            array = getattr(self, name)
            arrays[name] = matrix(array, f"Attention {name}", (rows, d_in), " as in q1")
        v = matrix(self.v, "Attention v", (None, d_in), ", the width that q1 reads")
        arrays["v"] = v
        arrays["o"] = matrix(self.o, "Attention o", (None, v.shape[0]), ", the rows of v")
        # Rows of keys and second queries are as many as those of q1, so two checks do for all.
        for name in ("q1", "v"):
            size = arrays[name].shape[0]
            if size % self.n_heads:
                raise ModelError(
                    f"Attention {name} has {size} rows, which {self.n_heads} heads do not divide"
                )
        _check_settings(self.mask, self.rope_base, rows // self.n_heads)
        for name, array in list(arrays.items()):
            bias = bias_name(name)
            arrays[bias] = vector(getattr(self, bias), f"Attention {bias}", array.shape[0])
        set_arrays(self, **arrays)

    @property
    def d_head(self) -> int:
        """Coordinates of a query or a key."""
        return self.q1.shape[-2] // self.n_heads

    @property
    def d_value(self) -> int:
        """Coordinates of a head's value."""
        return self.v.shape[-2] // self.n_heads

    @property
    def frequencies(self) -> Float[np.ndarray, " half"] | None:
        """Angles by which R_1 turns each pair of coordinates; None without RoPE."""
        if self.rope_base is None:
            return None
        return self.rope_base ** (-2 * np.arange(self.d_head // 2) / self.d_head)

    def angles(self, n_ctx: int) -> Float[np.ndarray, "n_ctx half"] | None:
        """Angles by which R_s turns each pair of coordinates, per position; None without RoPE."""
        frequencies = self.frequencies
        return None if frequencies is None else np.arange(n_ctx)[:, None] * frequencies

    def rotations(self, n_ctx: int) -> Float[np.ndarray, "n_ctx d_head d_head"] | None:
        """Matrices R_s of every position, float64; None without RoPE."""
        angles = self.angles(n_ctx)
        return None if angles is None else turns(angles)

    def pattern(self, n_ctx: int) -> Float[np.ndarray, "n_ctx n_ctx"]:
        """The mask as numbers: entry [s, t] is 1 where s sees t, 0 elsewhere."""
        everywhere = np.ones((n_ctx, n_ctx))
        return np.tril(everywhere) if self.mask == "causal" else everywhere

    def hidden(self, x: Float[Array, "*batch ctx in"]) -> Float[Array, "*batch ctx values"]:
        """The values z of all heads, side by side, which O multiplies."""
        n_ctx = x.shape[-2]
        angles = self.angles(n_ctx)

        def by_head(name: str) -> Any:
            """Rows of a map with the axes (*batch, head, position, row)."""
            rows = self._at(name, x)
            # Heads come in front of positions, so that a product of matrices runs over positions.
            return rows.reshape((*rows.shape[:-1], self.n_heads, -1)).swapaxes(-3, -2)

        def turned(name: str) -> Any:
            rows = by_head(name)
            return rows if angles is None else rotated(rows, angles)

        def score(query: str, key: str) -> Any:
            """Scores with the axes (*batch, head, position of query, position of key)."""
            return turned(query) @ turned(key).swapaxes(-1, -2)

        # Both the mask and the scale are factors of the scores, without a softmax in between.
        share = self.pattern(n_ctx).astype(x.dtype) / self.d_head**2
        z = (score("q1", "k1") * score("q2", "k2") * share) @ by_head("v")
        z = z.swapaxes(-3, -2)  # (*batch, position, head, row)
        return z.reshape((*z.shape[:-2], -1))


def rotated(
    rows: Float[Array, "*batch d_head"], angles: Float[np.ndarray, "*batch half"]
) -> Float[Array, "*batch d_head"]:
    """Queries or keys with each pair of coordinates (i, i + d_head / 2) turned by angle i.

    Example:
        >>> rotated(np.array([1.0, 0.0]), np.array([np.pi / 2])).round(9).tolist()
        [0.0, 1.0]
    """
    half = angles.shape[-1]
    cos, sin = np.cos(angles).astype(rows.dtype), np.sin(angles).astype(rows.dtype)
    # Coordinates i and i + d_head / 2 stand at the same place of the two halves, the layout that
    # rules of files call `half`.
    first, second = rows[..., :half], rows[..., half:]
    turned = first * cos - second * sin, second * cos + first * sin
    return library(rows).concatenate(turned, axis=-1)


def turns(angles: Float[np.ndarray, "*batch half"]) -> Float[np.ndarray, "*batch d_head d_head"]:
    """The matrices by which `rotated` turns queries or keys.

    Example:
        >>> turns(np.array([np.pi / 2])).round(9).tolist()
        [[0.0, -1.0], [1.0, 0.0]]
    """
    units = np.eye(2 * angles.shape[-1])
    # Column i of a matrix is the image of unit vector i.
    return np.asarray(rotated(units, angles[..., None, :])).swapaxes(-1, -2)


def _check_settings(mask: str, rope_base: float | None, d_head: int) -> None:
    """Raise `ModelError` for an unknown mask, or for heads that cannot be rotated."""
    if mask not in MASKS:
        raise ModelError(f"mask must be one of {', '.join(MASKS)}, found {mask!r}")
    if rope_base is None:
        return
    # A base that is no finite number is refused in the words for arrays.
    as_array(rope_base, "Attention rope_base", 0)
    if d_head % 2 or not rope_base > 0:
        raise ModelError(
            f"RoPE needs heads of even width and a base above 0, found {d_head} and {rope_base}"
        )
