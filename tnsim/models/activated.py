"""Layers with an activation: no polynomials, and exact under `Gaussian` where such a layer stands
alone.

`Elementwise` applies a function to every coordinate, `Gated` multiplies it by a second affine map.
A hidden unit is a function of a linear map or two of the input, so the inner product of two such
layers is a sum over pairs of hidden units (see `problems.hidden_units`). Their order is infinite.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtyping import Float

from tnsim.activations.activation import Activation, activation, jump_relu
from tnsim.errors import ModelError
from tnsim.models.arrays import Array, is_count, pytree, set_arrays, vector
from tnsim.models.matrices import AffineMaps, matrix, written_out
from tnsim.options import checked


@checked
@pytree
@dataclass(frozen=True, eq=False)
class Elementwise:
    """A function of every coordinate alone, between linear layers: `f(x)`.

    Args:
        activation: Name of an activation, such as "relu" or "gelu", or an `Activation`.
        width: Number of coordinates; None to take the number of the neighbours in a `Model`.

    Raises:
        ModelError: The activation is unknown, or the width is no positive integer.

    Example:
        >>> import numpy as np, tnsim
        >>> rectified = tnsim.Model([tnsim.Linear([[1.0], [-1.0]]), tnsim.Elementwise("relu")])
        >>> rectified(np.array([3.0]))
        array([3., 0.])

    Source:
        Cho and Saul 2009, "Kernel methods for deep learning", for the rectifier.
    """

    activation: Activation = dataclasses.field(metadata={"static": True})
    width: int | None = dataclasses.field(default=None, metadata={"static": True})

    if TYPE_CHECKING:  # a name becomes an activation, so that it is asked for and never held

        def __init__(self, activation: Activation | str, width: int | None = None) -> None: ...

    def __post_init__(self) -> None:
        if self.width is not None and not is_count(self.width):
            raise ModelError(f"Elementwise width must be a positive integer, found {self.width!r}")
        set_arrays(self, activation=activation(self.activation))

    @property
    def order(self) -> Any:
        """Infinity, as an activation is no polynomial."""
        return math.inf

    @property
    def d_in(self) -> int:
        """Coordinates of the input.

        Raises:
            ModelError: The layer stands alone and was given no width.
        """
        if self.width is None:
            raise ModelError(
                f"Elementwise({self.activation.name!r}) has no width: stand it beside a layer with "
                "weights in a Model, or give Elementwise(..., width=...)"
            )
        return self.width

    @property
    def d_out(self) -> int:
        """Coordinates of the output, as many as of the input."""
        return self.d_in

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        return self.activation(x)


@pytree
@dataclass(frozen=True, eq=False)
class Gated(AffineMaps):
    """An affine map times an activation of another: `D (f(G x + g) * (U x + u)) + b`.

    SwiGLU is the case "silu", GeGLU "gelu", ReGLU "relu". The case "identity" is a `Bilinear`
    layer, which a `Model` makes of it. Without `up` the gate stands alone, `D f(G x + g) + b`: an
    ordinary block of a single hidden layer, which a `Residual` can go around.

    Args:
        gate: Matrix G, (rank, d_in).
        up: Matrix U, (rank, d_in), or None.
        down: Matrix D, (d_out, rank).
        activation: Name of an activation, such as "silu", or an `Activation`.
        gate_bias: Vector g, (rank,) or None.
        up_bias: Vector u, (rank,) or None.
        down_bias: Vector b, (d_out,) or None.

    Raises:
        ModelError: Shapes do not fit, an entry is not finite, or the activation is unknown.

    Example:
        >>> import numpy as np
        >>> layer = Gated([[1.0, 0.0]], [[0.0, 1.0]], [[1.0]], "relu")
        >>> layer(np.array([3.0, 5.0])), layer(np.array([-3.0, 5.0]))
        (array([15.]), array([0.]))

    Source:
        Shazeer 2020, "GLU variants improve transformer".
    """

    gate: Float[Array, "rank in"]
    up: Float[Array, "rank in"] | None
    down: Float[Array, "out rank"]
    activation: Activation = dataclasses.field(metadata={"static": True})
    gate_bias: Float[Array, " rank"] | None = None
    up_bias: Float[Array, " rank"] | None = None
    down_bias: Float[Array, " out"] | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            gate: Any,
            up: Any,
            down: Any,
            activation: Activation | str,
            gate_bias: Any = None,
            up_bias: Any = None,
            down_bias: Any = None,
        ) -> None: ...

    @classmethod
    def jump_relu(
        cls, gate: Any, down: Any, thresholds: Any, gate_bias: Any = None, down_bias: Any = None
    ) -> Gated:
        """A layer of JumpReLU units with thresholds of their own, as sparse autoencoders have them.

        A unit is u for u > threshold and 0 up to there, which is the threshold times the unit of
        threshold 1 at u / threshold. Thresholds therefore go into the weights on either side.

        Args:
            gate: Matrix of the encoder, (rank, d_in).
            down: Matrix of the decoder, (d_out, rank).
            thresholds: Positive thresholds of the units, (rank,).
            gate_bias: Vector (rank,) or None.
            down_bias: Vector (d_out,) or None.

        Returns:
            A layer without a second factor, `up` None, exact under `Gaussian`.

        Raises:
            ModelError: Shapes do not fit, or a threshold is not positive; thresholds of zero are
                the activation "relu".

        Example:
            >>> import numpy as np
            >>> layer = Gated.jump_relu([[1.0], [1.0]], [[1.0, 1.0]], [0.5, 2.0])
            >>> layer(np.array([[1.0], [3.0]])).ravel().tolist()
            [1.0, 6.0]
        """
        gate = written_out(matrix(gate, "Gated gate", (None, None)))
        down = written_out(matrix(down, "Gated down", (None, len(gate)), ", the rank of gate"))
        sizes = vector(thresholds, "Gated thresholds", len(gate))
        if sizes is None or not bool((sizes > 0).all()):
            raise ModelError(
                "thresholds of JumpReLU are positive numbers, one for every unit, found "
                f"{thresholds!r}; a threshold of 0 is the activation 'relu'"
            )
        bias = vector(gate_bias, "Gated gate_bias", len(gate))
        # Thresholds divide the reading side and multiply the writing side, which leaves the
        # function alone.
        bias = None if bias is None else bias / sizes
        scaled = gate / sizes[:, None], None, down * sizes
        return cls(*scaled, jump_relu(1.0), bias, None, down_bias)

    def __post_init__(self) -> None:
        if self.up is None and self.up_bias is not None:
            # The bias would be a second factor without a matrix: a constant per unit.
            raise ModelError("Gated has an up_bias but no up: move the numbers into down")
        set_arrays(self, activation=activation(self.activation))
        super().__post_init__()

    @property
    def order(self) -> Any:
        """Infinity, as an activation is no polynomial."""
        return math.inf

    @property
    def maps(self) -> tuple[tuple[str, ...], str]:
        """Names of the factors and of the output map."""
        return ("gate",) if self.up is None else ("gate", "up"), "down"

    @property
    def multiplies(self) -> bool:
        """Whether a second affine map multiplies the activation."""
        return self.up is not None

    @property
    def rank(self) -> int:
        """Hidden units, over which products are summed."""
        return self.gate.shape[-2]

    def hidden(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch rank"]:
        """Values of the hidden units, which D multiplies."""
        units = self.activation(self._at("gate", x))
        return units if self.up is None else units * self._at("up", x)
