"""Norms at a constant energy: layers behind norms become polynomial layers.

A norm divides by the size of its own input, so no polynomial describes it. With that size replaced
by a constant the norm is an affine map, which goes into the weights of the layer behind it. The
constant is the energy that the norm meets on average over given inputs, as in a norm that keeps
running means and is evaluated (paper, appendix on the language model, `tok0_batch`). The distance
from the network with its true norms is measured on the same inputs and is recorded in the model's
origin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError
from tnsim.models.arrays import Array, add, bias_name, host_array
from tnsim.models.layers import Layer, Multilinear, Residual, map_names
from tnsim.models.model import Model


class Norm(NamedTuple):
    """`gain * y / sqrt(mean(y^2) + epsilon) + shift`, where y is x or, centred, x - mean(x).

    Attributes:
        centred: Whether the mean over coordinates is subtracted first, as LayerNorm does.
        epsilon: Number that is added to the energy.
        gain: Factors of the coordinates; None for 1.
        shift: A number per coordinate; None for 0.

    Example:
        >>> Norm(False, 0.0)(np.array([3.0, 4.0])).round(3)
        array([0.849, 1.131])
    """

    centred: bool
    epsilon: float
    gain: Float[Array, " width"] | None = None
    shift: Float[Array, " width"] | None = None

    def __call__(self, x: Float[np.ndarray, "*batch width"]) -> Float[np.ndarray, "*batch width"]:
        y = self.normalised(x)
        return add(y if self.gain is None else y * self.gain, self.shift)

    def normalised(self, x: Float[np.ndarray, "*batch width"]) -> Float[np.ndarray, "*batch width"]:
        """The vector without gain and shift: of mean square about 1, of mean 0 where centred."""
        y = self._centred(x)
        return y / np.sqrt((y**2).mean(axis=-1, keepdims=True) + self.epsilon)

    def folded(self, weight: Any, bias: Any, energy: float | None = None) -> tuple[Any, Any]:
        """The affine map of the normalised vector that a map behind the norm is.

        `W (g n + c) + b = (W diag(g)) n + (W c + b)`. A centred vector has mean zero, so a number
        that is added to a row of the matrix changes nothing; rows are centred, which makes equal
        functions of equal matrices.

        Args:
            weight: Matrix (out, in), or matrices (heads, out, in).
            bias: Vector (out,), or (heads, out); None for none.
            energy: Mean square at which the norm is a constant, and the map one of the vector
                itself; None for the map of the normalised vector.

        Example:
            >>> norm = Norm(True, 1e-5, np.array([1.0, 2.0]), np.array([0.0, 1.0]))
            >>> norm.folded(np.array([[3.0, 4.0]]), None)
            (array([[-2.5,  2.5]]), array([4.]))
        """
        if self.shift is not None:
            # The shift goes through the matrix before gain and energy scale it.
            bias = add(weight @ self.shift, bias)
        if energy is not None:
            weight = weight / np.sqrt(np.float64(energy + self.epsilon))
        if self.gain is not None:
            weight = weight * self.gain
        return weight - weight.mean(axis=-1, keepdims=True) if self.centred else weight, bias

    def energy(self, x: Float[np.ndarray, "*batch width"]) -> float:
        """The mean square of the divided vector y, over all coordinates, inputs and positions."""
        return float((self._centred(x) ** 2).mean())

    def _centred(self, x: Float[np.ndarray, "*batch width"]) -> Float[np.ndarray, "*batch width"]:
        return x - x.mean(axis=-1, keepdims=True) if self.centred else x


class Normed(NamedTuple):
    """A layer and the norm before it, None for no norm; a residual goes around both."""

    layer: Layer
    norm: Norm | None = None

    def __call__(self, x: Any) -> Any:
        layer, norm = self
        if isinstance(layer, Residual):
            return layer.skip * x + layer.scale * Normed(layer.layer, norm)(x)
        return np.asarray(layer(x if norm is None else norm(x)))


class Folded(NamedTuple):
    """A model whose norms are constants.

    Attributes:
        model: Model of the folded layers.
        energies: Energy of the norm before each layer, None where there is no norm.
        error: Root mean square, over the inputs, of the difference from the outputs with the norms
            themselves, relative to these outputs.
    """

    model: Model
    energies: tuple[float | None, ...]
    error: float


def fold(layers: Iterable[Normed], inputs: Any, n_ctx: int | None = None) -> Folded:
    """Put a constant in the place of every norm: its mean energy on some inputs.

    The energy of a norm is measured in the network with the norms themselves, layer after layer.

    Args:
        layers: Layers from the input up.
        inputs: Vectors (samples, d_in), sequences (samples, positions, d_in), or token numbers
            (samples, positions), which stand for one-hot vectors.
        n_ctx: Length of the sequences that the model reads.

    Returns:
        The model with the energies and the error.

    Raises:
        ModelError: When the inputs do not fit, or an energy is 0 or not finite.

    Example:
        >>> from tnsim.models.layers import Linear
        >>> layers = [Normed(Linear(np.eye(2)), Norm(False, 0.0))]
        >>> folded = fold(layers, np.array([[3.0, 4.0], [4.0, 3.0]]))
        >>> folded.energies, folded.error < 1e-15
        ((12.5,), True)

    Source:
        Paper, appendix on the language model: a scalar norm becomes a constant factor.
    """
    layers = list(layers)
    stream = start = _norm_inputs(inputs, layers[0].layer.d_in, n_ctx)
    constant: list[Layer] = []
    energies: list[float | None] = []
    for n, normed in enumerate(layers):
        energy = None if normed.norm is None else normed.norm.energy(stream)
        constant.append(at_energy(normed, energy, f"the energy before layer {n}"))
        energies.append(energy)
        stream = normed(stream)
    model = Model(constant, n_ctx)
    outputs = start
    for layer in model.layers:
        outputs = np.asarray(layer(outputs))
    # Errors of all norms together, as they meet in the outputs.
    return Folded(model, tuple(energies), relative_error(outputs, stream))


def at_energy(normed: Normed, energy: float | None, what: str) -> Layer:
    """A layer with its norm inside, as an affine map before it.

    With the constant s = sqrt(energy + epsilon), `W (g y / s + c) + b = (W g / s) y + (W c + b)`.

    Args:
        normed: The layer and its norm.
        energy: The mean square to take; ignored where there is no norm.
        what: Words for the energy in messages.

    Returns:
        A layer of the same kind.

    Raises:
        ModelError: When energy + epsilon, the square of the divisor, is not positive and finite.

    Example:
        >>> from tnsim.models.layers import Linear
        >>> at_energy(Normed(Linear([[6.0]]), Norm(False, 0.0)), 4.0, "the norm").weight
        array([[3.]])
    """
    layer, norm = normed
    if norm is None or energy is None:
        return layer
    if not 0 < energy + norm.epsilon < np.inf:
        raise ModelError(f"{what} must be above 0, found {energy}")
    # The norm stands inside the residual, and the skip passes it by.
    if isinstance(layer, Residual):
        inner = at_energy(Normed(layer.layer, norm), energy, what)
        return Residual(inner, layer.skip, layer.scale)
    names = map_names(layer)
    if not names:
        raise ModelError(f"{what} stands before {type(layer).__name__}, which has no weights")
    core: Any = layer
    changed: dict[str, Any] = {}
    # The output map reads hidden units and not the norm; a linear layer has no other map.
    for name in names[:-1] or names:
        weight, bias = norm.folded(getattr(core, name), getattr(core, bias_name(name)), energy)
        changed |= {name: weight, bias_name(name): bias}
    if isinstance(core, Multilinear):  # whose legs are arguments together
        arrays = vars(core) | changed
        legs, biases = (
            [arrays[f"leg{n}{ending}"] for n in range(core.n_legs)] for ending in ("", "_bias")
        )
        return Multilinear(legs, core.down, biases, core.down_bias)
    return dataclasses.replace(core, **changed)


def _norm_inputs(inputs: Any, d_in: int, n_ctx: int | None) -> np.ndarray:
    """The inputs of a first layer as float64 vectors, token numbers as one-hot vectors."""
    array = host_array(inputs)
    if array.dtype.kind in "iu" and array.ndim == 2:  # token numbers, as in every metric
        if n_ctx is None and array.shape[1] == d_in:
            raise ModelError(
                f"norms are measured on integers (samples, {d_in}), which are token numbers, or "
                f"vectors of whole numbers: say n_ctx={d_in} for tokens, or give vectors as floats"
            )
        if array.min(initial=0) >= 0 and array.max(initial=0) < d_in:
            return np.eye(d_in)[array]
    elif array.ndim in (2, 3) and array.shape[-1] == d_in and array.size:
        return array.astype(np.float64)
    raise ModelError(
        f"norms are measured on inputs (samples, {d_in}), (samples, positions, {d_in}) or "
        f"token numbers (samples, positions) below {d_in}, found {array.dtype} {array.shape}"
    )


def relative_error(outputs: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of differences, relative to what is expected."""
    # Outputs of other size are no function to compare.
    if outputs.size != expected.size:
        return float("inf")
    largest = float(np.abs(expected).max(initial=0.0))
    if not largest:
        return float("inf") if outputs.any() else 0.0
    # Squares of numbers that floats hold may be numbers that they do not hold.
    with np.errstate(over="ignore", invalid="ignore"):
        difference = np.linalg.norm((outputs.ravel() - expected.ravel()) / largest)
    return float(difference / np.linalg.norm(expected.ravel() / largest))
