"""Models: layers in a row, and linear combinations of such. In: layers. Out: checked, callable pytrees.

Models form a vector space of functions, so `a - b` and `2.0 * a` are models too: a `Combination` keeps
the coefficients beside the models and every inner product expands by bilinearity (paper, section 2.4,
tensor diff similarity). No larger network is ever built.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax
from jaxtyping import Float

from tnsim.errors import ModelError
from tnsim.models.arrays import Array, register_pytree
from tnsim.models.attention import Attention
from tnsim.models.layers import Bilinear, Layer, Multilinear, Residual, innermost, known_layer
from tnsim.tables import html_table


class _Vector:
    """Arithmetic shared by `Model` and `Combination`."""

    def __add__(self, other: Any) -> Combination:
        return _combine(self, other, 1.0)

    def __sub__(self, other: Any) -> Combination:
        return _combine(self, other, -1.0)

    def __mul__(self, factor: float) -> Combination:
        return Combination(((factor * c, m) for c, m in terms(self)))

    __rmul__ = __mul__

    def __neg__(self) -> Combination:
        return -1.0 * self


class Model(_Vector):
    """Layers applied in order to an input of shape (d_in,), or (..., d_in) for a batch.

    With `n_ctx` the input is a sequence, (..., n_ctx, d_in): linear and bilinear layers act on every position,
    `Attention` mixes them, and inner products sum over positions. A model with attention may leave `n_ctx` open
    and be called on any length; to be compared it needs one.

    Raises `ModelError` when there is no layer or two neighbours do not chain, `UnsupportedLayer` when a
    layer is not polynomial. Immutable; a pytree whose leaves are the weights.
    """

    layers: tuple[Layer, ...]
    n_ctx: int | None

    def __init__(self, layers: Iterable[Layer], n_ctx: int | None = None):
        layers = tuple(layers)
        if not layers:
            raise ModelError("a model needs at least one layer, found none")
        layers = tuple(known_layer(layer, f"layer {i}") for i, layer in enumerate(layers))
        for i, (first, second) in enumerate(itertools.pairwise(layers)):
            if first.d_out != second.d_in:
                raise ModelError(
                    f"layer {i + 1} expects {second.d_in} inputs but layer {i} gives {first.d_out}"
                )
        if n_ctx is not None and (
            isinstance(n_ctx, bool) or not isinstance(n_ctx, int) or n_ctx < 1
        ):
            raise ModelError(f"n_ctx must be a positive integer or None, found {n_ctx!r}")
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "n_ctx", n_ctx)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Model is immutable, cannot set {name!r}; build a new one")

    @property
    def d_in(self) -> int:
        return self.layers[0].d_in

    @property
    def d_out(self) -> int:
        return self.layers[-1].d_out

    @property
    def orders(self) -> tuple[int, ...]:
        """Order of each layer in its own input."""
        return tuple(layer.order for layer in self.layers)

    @property
    def degree(self) -> int:
        """Degree of the polynomial, and number n of legs of the unrolled tree."""
        return math.prod(self.orders)

    @property
    def parameters(self) -> int:
        return sum(
            math.prod(leaf.shape) for leaf in jax.tree.leaves(self) if hasattr(leaf, "shape")
        )

    @property
    def attends(self) -> bool:
        """Whether any layer mixes positions."""
        return any(isinstance(innermost(layer), Attention) for layer in self.layers)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        if self.n_ctx is not None and tuple(x.shape[-2:]) != (self.n_ctx, self.d_in):
            raise ModelError(
                f"the model reads sequences of shape ({self.n_ctx}, {self.d_in}), found an input of shape {tuple(x.shape)}"
            )
        for layer in self.layers:
            x = layer(x)
        return x

    def __repr__(self) -> str:
        kinds = ", ".join(describe(layer) for layer in self.layers)
        context = "" if self.n_ctx is None else f"n_ctx {self.n_ctx}, "
        return f"Model({kinds}; {context}degree {self.degree}, {self.parameters:,} parameters)"

    def _repr_html_(self) -> str:
        rows = [(f"layer {n}", describe(layer)) for n, layer in enumerate(self.layers)]
        if self.n_ctx is not None:
            rows.append(("positions", str(self.n_ctx)))
        rows += [("degree", str(self.degree)), ("parameters", f"{self.parameters:,}")]
        return html_table("Model", rows)


class Combination(_Vector):
    """`sum_i coefficients[i] * models[i]`, with equal inputs and outputs. Made by arithmetic on models."""

    coefficients: tuple[Any, ...]
    models: tuple[Model, ...]

    def __init__(self, weighted: Iterable[tuple[Any, Model]]):
        weighted = tuple(weighted)
        for _, model in weighted[1:]:
            check_comparable(weighted[0][1], model)
        object.__setattr__(self, "coefficients", tuple(c for c, _ in weighted))
        object.__setattr__(self, "models", tuple(m for _, m in weighted))

    __setattr__ = Model.__setattr__

    @property
    def d_in(self) -> int:
        return self.models[0].d_in

    @property
    def d_out(self) -> int:
        return self.models[0].d_out

    @property
    def n_ctx(self) -> int | None:
        return self.models[0].n_ctx

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        total: Any = 0
        for coefficient, model in terms(self):
            total = total + coefficient * model(x)
        return total

    def __repr__(self) -> str:
        return " + ".join(f"{c} * {m!r}" for c, m in terms(self))


def terms(model: Any) -> tuple[tuple[Any, Model], ...]:
    """The (coefficient, model) pairs whose sum `model` is. Raises `ModelError` on anything else."""
    if isinstance(model, Model):
        return ((1.0, model),)
    if isinstance(model, Combination):
        return tuple(zip(model.coefficients, model.models, strict=True))
    raise ModelError(
        f"expected a tnsim Model or a combination of models, found {type(model).__name__}"
    )


def check_comparable(a: Any, b: Any) -> None:
    """Raise `ModelError` unless both map R^d_in to R^d_out with the same two widths."""
    if a.d_in != b.d_in:
        raise ModelError(f"the models read different inputs: {a.d_in} and {b.d_in} coordinates")
    if a.d_out != b.d_out:
        raise ModelError(f"the models have different outputs: {a.d_out} and {b.d_out}")
    if a.n_ctx != b.n_ctx:
        raise ModelError(
            f"the models read sequences of different length: n_ctx={a.n_ctx} and n_ctx={b.n_ctx}"
        )


def describe(layer: Layer) -> str:
    """One line about a layer: kind, shapes, biases, residual rule."""
    if isinstance(layer, Residual):
        return f"Residual({describe(layer.layer)}, skip={_number(layer.skip)}, scale={_number(layer.scale)})"
    inner = f", rank {layer.rank}" if isinstance(layer, Bilinear | Multilinear) else ""
    if isinstance(layer, Attention):
        rope = "no RoPE" if layer.rope_base is None else f"RoPE base {layer.rope_base:g}"
        inner = f", {layer.n_heads} heads of {layer.d_head}, {layer.mask} mask, {rope}"
    fields = dataclasses.fields(innermost(layer))
    names = [field.name for field in fields if field.name.endswith("bias")]
    biases = [name for name in names if getattr(layer, name) is not None]
    return f"{type(layer).__name__}({layer.d_in} -> {layer.d_out}{inner}{''.join(', ' + b for b in biases)})"


def _number(x: Any) -> str:
    return f"{x:g}" if isinstance(x, float) else "array"


def _combine(a: Any, b: Any, sign: float) -> Combination:
    return Combination((*terms(a), *((sign * c, m) for c, m in terms(b))))


register_pytree(Model, ("layers",), ("n_ctx",))
register_pytree(Combination, ("coefficients", "models"))
