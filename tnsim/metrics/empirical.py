"""The distribution of a user's own data as a metric. In: inputs. Out: a finite measure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError
from tnsim.metrics.input_files import rows_of
from tnsim.metrics.points import Points, Reading, Weighted
from tnsim.models.arrays import Array, host_array, is_traced, pytree


@pytree
@dataclass(frozen=True, eq=False)
class Empirical:
    """`sum_i w_i <A(x_i), B(x_i)>` over inputs of your own: exact for that sample, at any depth.

    Every model is run once over the inputs, in batches, so what is compared need not be a
    polynomial: a plain function or a PyTorch module can stand in the place of either model. As an
    estimate for the distribution that the inputs are drawn from, a result has a standard error.

    Args:
        inputs: (n, d) for vectors, (n, n_ctx, d) for sequences of vectors, or integers (n, n_ctx),
            token ids. An array of NumPy, JAX or PyTorch, or the path of a `.npy` or `.safetensors`
            file, of which only the rows of a batch are in memory.
        weights: (n,), not negative; None for equal ones. They are divided by their sum.

    Raises:
        ModelError: The inputs are no such array, or the weights do not fit.

    Example:
        On the inputs 1 and 2, the mean of `x * x^2`.

        >>> import tnsim
        >>> line = tnsim.Model([tnsim.Linear([[1.0]])])
        >>> square = tnsim.Model([tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])])
        >>> float(tnsim.inner(line, square, tnsim.Empirical([[1.0], [2.0]])))
        4.5

    Source:
        Paper, section 2.2, with `Lambda = sum_i w_i x_i (x) ... (x) x_i`.
    """

    inputs: Any
    weights: Float[Array, " n"] | None = None
    name = "empirical"
    pairs_within_model = True

    def __post_init__(self) -> None:
        if is_traced((self.inputs, self.weights)):
            raise ModelError(
                "inputs of Empirical and their weights are data, found traced arrays: make the "
                "metric outside the JAX trace; weights of models may be traced"
            )
        inputs = rows_of(self.inputs)
        tokens = inputs.dtype.kind in "iu"
        wanted = (2,) if tokens else (2, 3)
        if inputs.dtype.kind not in "iuf" or inputs.ndim not in wanted or 0 in inputs.shape:
            raise ModelError(
                "inputs are floats (n, d) or (n, n_ctx, d), or integers (n, n_ctx), token ids; "
                f"found {inputs.dtype} of shape {tuple(inputs.shape)}"
            )
        object.__setattr__(self, "inputs", inputs)
        if self.weights is not None:
            weights = np.array(host_array(self.weights), np.float64)  # nobody else has it
            _check_weights(weights, len(inputs))
            object.__setattr__(self, "weights", weights)

    def is_exact(self, nonlinear_layers: int) -> bool:
        """Always, for the sample that it is."""
        return True

    def points(self, reading: Reading | None) -> Points:
        """The sample, whatever reads it."""
        if self.weights is None:
            log_weights = np.full(len(self.inputs), -np.log(len(self.inputs)))
        else:
            with np.errstate(divide="ignore"):
                log_weights = np.log(self.weights) - np.log(self.weights.sum())
        block = partial(_rows, self.inputs, log_weights)
        tokens = self.inputs.dtype.kind in "iu"
        return Points(len(self.inputs), block, drawn=True, tokens=tokens)


def _rows(inputs: Any, log_weights: np.ndarray, start: int, stop: int) -> Weighted:
    rows = np.asarray(inputs[start:stop])
    _check_finite(rows, start)
    return Weighted(rows, log_weights[start:stop])


def _check_weights(weights: np.ndarray, count: int) -> None:
    if weights.shape != (count,):
        raise ModelError(f"{count} inputs need weights of shape ({count},), found {weights.shape}")
    if not (np.isfinite(weights).all() and weights.min() >= 0 and weights.sum() > 0):
        raise ModelError(
            "weights of inputs are finite, not negative, and not all zero; "
            f"found them from {weights.min():g} to {weights.max():g}"
        )


def _check_finite(rows: np.ndarray, start: int) -> None:
    finite = np.isfinite(rows).reshape(len(rows), -1).all(axis=1)
    if not finite.all():
        raise ModelError(f"the inputs are not finite, first in row {start + finite.argmin()}")
