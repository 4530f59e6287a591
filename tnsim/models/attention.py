"""Bilinear attention as an immutable pytree of weights. In: arrays. Out: a checked layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError
from tnsim.models.arrays import Array, add, matrix, pytree, scalar, set_arrays, vector

MASKS = ("causal", "none")


@pytree
@dataclass(frozen=True, eq=False)
class Attention:
    """Bilinear attention on a sequence (paper, section 2.1): per head h and position s

        z[s, h] = sum_t mask[s, t] (q1[s] . k1[t]) (q2[s] . k2[t]) / d_head^2  v[t],    output O z + o_bias,

    with q1[s] = R_s (Q1 x_s + q1_bias) and so on; v is not rotated. q1, k1, q2, k2: (n_heads * d_head, d_in), rows of
    one head together; v: (n_heads * d_value, d_in); o: (d_out, n_heads * d_value); biases: one per row.
    mask: "causal" (t <= s) or "none". R_s turns coordinates (i, i + d_head / 2) by the angle s * rope_base^(-2 i / d_head);
    rope_base None: no rotation. Order 5 in the sequence. Raises `ModelError` on shapes that do not fit.
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

    def __post_init__(self) -> None:
        q1 = matrix(self.q1, "Attention q1", (None, None))
        rows, d_in = q1.shape
        if isinstance(self.n_heads, bool) or not isinstance(self.n_heads, int) or self.n_heads < 1:
            raise ModelError(f"n_heads must be a positive integer, found {self.n_heads!r}")
        others = {
            n: matrix(getattr(self, n), f"Attention {n}", (rows, d_in), " as in q1")
            for n in ("k1", "q2", "k2")
        }
        v = matrix(self.v, "Attention v", (None, d_in), ", the width that q1 reads")
        o = matrix(self.o, "Attention o", (None, v.shape[0]), ", the rows of v")
        for name, size in (("q1", rows), ("v", v.shape[0])):
            if size % self.n_heads:
                raise ModelError(
                    f"Attention {name} has {size} rows, which {self.n_heads} heads do not divide"
                )
        if self.mask not in MASKS:
            raise ModelError(f"mask must be one of {', '.join(MASKS)}, found {self.mask!r}")
        if self.rope_base is not None:
            scalar(self.rope_base, "Attention rope_base")
            if rows // self.n_heads % 2 or not self.rope_base > 0:
                raise ModelError(
                    "RoPE needs heads of even width and a base above 0, "
                    f"found {rows // self.n_heads} and {self.rope_base}"
                )
        sizes = {n: int(rows) for n in ("q1", "k1", "q2", "k2")}
        sizes |= {"v": v.shape[0], "o": o.shape[0]}
        biases = {
            f"{n}_bias": vector(getattr(self, f"{n}_bias"), f"Attention {n}_bias", size)
            for n, size in sizes.items()
        }
        set_arrays(self, q1=q1, **others, v=v, o=o, **biases)

    @property
    def order(self) -> int:
        return 5

    @property
    def d_in(self) -> int:
        return self.q1.shape[-1]

    @property
    def d_out(self) -> int:
        return self.o.shape[-2]

    @property
    def d_head(self) -> int:
        return self.q1.shape[-2] // self.n_heads

    @property
    def d_value(self) -> int:
        return self.v.shape[-2] // self.n_heads

    def rotations(self, n_ctx: int) -> Float[np.ndarray, "n_ctx d_head d_head"] | None:
        """R_s for every position, None without RoPE."""
        if self.rope_base is None:
            return None
        half = self.d_head // 2
        angles = np.arange(n_ctx)[:, None] * self.rope_base ** (-2 * np.arange(half) / self.d_head)
        found, i = np.zeros((n_ctx, self.d_head, self.d_head)), np.arange(half)
        found[:, i, i] = found[:, half + i, half + i] = np.cos(angles)
        found[:, half + i, i] = np.sin(angles)
        found[:, i, half + i] = -np.sin(angles)
        return found

    def pattern(self, n_ctx: int) -> Float[np.ndarray, "n_ctx n_ctx"]:
        """mask[s, t] as numbers."""
        return (
            np.tril(np.ones((n_ctx, n_ctx))) if self.mask == "causal" else np.ones((n_ctx, n_ctx))
        )

    def __call__(self, x: Float[Array, "*batch ctx in"]) -> Float[Array, "*batch ctx out"]:
        n = x.shape[-2]
        rotations = self.rotations(n)

        def heads(weight: Any, bias: Any, turned: bool) -> Any:
            y = add(x @ weight.T, bias)
            y = y.reshape((*y.shape[:-1], self.n_heads, -1)).swapaxes(
                -3, -2
            )  # (*batch, head, position, row)
            return (
                (rotations.astype(x.dtype) @ y[..., None])[..., 0]
                if turned and rotations is not None
                else y
            )

        q1, k1, q2, k2 = (
            heads(getattr(self, name), getattr(self, f"{name}_bias"), True)
            for name in ("q1", "k1", "q2", "k2")
        )
        scores = (
            (q1 @ k1.swapaxes(-1, -2))
            * (q2 @ k2.swapaxes(-1, -2))
            * (self.pattern(n).astype(x.dtype) / self.d_head**2)
        )
        z = (scores @ heads(self.v, self.v_bias, False)).swapaxes(-3, -2)
        return add(z.reshape((*z.shape[:-2], -1)) @ self.o.T, self.o_bias)
