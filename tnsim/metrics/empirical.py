"""The metric of a user's own inputs, a finite measure.

Inputs are an array in memory or a file; of a file only the rows of the current batch are read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from tnsim.errors import ModelError, in_one_line, printable
from tnsim.metrics.input_moments import GaussianMoments
from tnsim.metrics.points import Points, Reading, WeightedPoints, check_draws, draws
from tnsim.metrics.quadrature import gaussian_draws
from tnsim.models.arrays import Array, host_array, is_traced, pytree
from tnsim.models.checks import Seed, seed_number
from tnsim.models.functions import input_rows
from tnsim.options import checked, shown


class RowsOnDemand:
    """Inputs in the form of an array, of which rows are made where they are asked for.

    Attributes:
        shape: Shape of the array, the number of rows first.
        dtype: Type of its numbers.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


class StoredInputs(RowsOnDemand):
    """The rows of a tensor in a safetensors file, read on demand.

    Args:
        path: Path of the file, which holds a single tensor or a tensor called `inputs`.

    Raises:
        ModelError: The file holds neither.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.path = path.absolute()  # other processes may have another working directory
        # The file is opened anew for every block, so that the metric can be sent to other
        # processes.
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            self._name = names[0] if len(names) == 1 else "inputs"
            if self._name not in names:
                raise ModelError(
                    f"{path} holds {len(names)} tensors and none called 'inputs': "
                    "name the inputs so, or save them alone"
                )
            part = file.get_slice(self._name)
            self.shape = tuple(part.get_shape())
            # An empty slice tells the dtype of NumPy without reading a row.
            self.dtype = part[:0].dtype

    def __getitem__(self, rows: slice) -> np.ndarray:
        from safetensors import safe_open

        with safe_open(self.path, framework="numpy") as file:
            return file.get_slice(self._name)[rows]


def rows_of(inputs: Any) -> Any:
    """Open inputs as an array, or as an object with a shape, a dtype and readable rows.

    Args:
        inputs: An array or tensor, a loader of batches, a mapping as tokenizers give, or the path
            of a `.npy` or `.safetensors` file.

    Returns:
        A NumPy array (memory-mapped for a `.npy` file), or `StoredInputs`.

    Raises:
        ModelError: There is no such file, or the file has another format.

    Example:
        >>> rows_of([[1.0, 2.0]]).shape
        (1, 2)
    """
    if not isinstance(inputs, str | os.PathLike):
        return host_array(input_rows(inputs))
    path = Path(inputs)
    if path.suffix not in (".npy", ".safetensors"):
        raise ModelError(f"inputs are read from .npy and .safetensors files, found {path}")
    if not os.path.isfile(path):  # noqa: PTH113  (False for names that no file can have)
        raise ModelError(printable(f"{path}: no such file of inputs"))
    if path.suffix == ".safetensors":
        return _opened_file(path, StoredInputs)
    return _opened_file(path, lambda path: np.load(path, mmap_mode="r", allow_pickle=False))


def _opened_file(path: Path, reader: Any) -> Any:
    try:
        return reader(path)
    except ModelError:
        # Messages of this package name the file already.
        raise
    except Exception as error:
        raise ModelError(f"{path}: not a readable file of inputs: {in_one_line(error)}") from None


@checked
@pytree
@dataclass(frozen=True, eq=False)
class Empirical:
    """`sum_i w_i <A(x_i), B(x_i)>` over inputs of your own: exact for the sample, at any depth.

    Every model runs once over the inputs, in batches, so it need not be a polynomial: a plain
    function or a PyTorch module can stand in the place of either model. A result has a standard
    error as an estimate for the distribution that the inputs were drawn from.

    Args:
        inputs: Vectors (n, d), sequences of vectors (n, n_ctx, d), token ids, integers (n, n_ctx),
            or floats of any other shape (n, ...) such as images, which models read as vectors: an
            array of NumPy, JAX or PyTorch, or the path of a `.npy` or `.safetensors` file, of which
            only the rows of a batch are in memory.
        weights: Weights (n,), at least 0, which are divided by their sum; None for equal weights.
        output: Name of the output that is compared, where functions or modules give several, such
            as "last_hidden_state", or its place in a tuple. None for `logits`, else
            `last_hidden_state`, else the single or the first output.

    Raises:
        ModelError: The inputs have another form, or the weights do not fit.

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
    output: str | int | None = field(default=None, metadata={"static": True})
    name = "empirical"
    pairs_within_model = True

    def __post_init__(self) -> None:
        # A trace would keep the data as a constant of the compiled program.
        if is_traced((self.inputs, self.weights)):
            raise ModelError(
                "inputs of Empirical and their weights are data, found traced arrays: make the "
                "metric outside the JAX trace; weights of models may be traced"
            )
        inputs = rows_of(self.inputs)
        # Integers are token ids; pixels are floats.
        tokens = inputs.dtype.kind in "iu"
        fits = inputs.ndim == 2 or (inputs.ndim > 2 and not tokens)
        if inputs.dtype.kind not in "iuf" or not fits or 0 in inputs.shape:
            pixels = "; pixels become floats by inputs / 255" if tokens and inputs.ndim > 2 else ""
            raise ModelError(
                "inputs are floats (n, d), (n, n_ctx, d) or (n, ...), or integers (n, n_ctx), "
                f"token ids; found {inputs.dtype} of shape {tuple(inputs.shape)}{pixels}"
            )
        object.__setattr__(self, "inputs", inputs)
        if self.weights is not None:
            weights = np.array(host_array(self.weights))  # always a copy
            if weights.dtype.kind not in "biuf":
                raise ModelError(f"weights are numbers, found {shown(self.weights)}")
            weights = weights.astype(np.float64)
            _check_weights(weights, len(inputs))
            object.__setattr__(self, "weights", weights)

    @classmethod
    @checked
    def normal(
        cls, mean: Any = None, cov: Any = None, samples: int = 65536, *, seed: Seed = 0
    ) -> Empirical:
        """Draws from N(mean, cov), for models that `Gaussian` has no closed form of.

        Similarities are estimates of those under `Gaussian(mean, cov)`, with a standard error.

        Args:
            mean: Mean (d,), for sequences (n_ctx, d); None for zero.
            cov: Covariance (d, d), its diagonal (d,), or None for the identity, of every position
                alike.
            samples: Number of draws, at least 2, which are all kept in memory.
            seed: Seed of the draws: a number, a NumPy generator or a JAX key.

        Returns:
            The metric with inputs (samples, d), or (samples, n_ctx, d), float64.

        Raises:
            ModelError: Neither moment is given, the moments do not fit each other, or there are too
                few samples.

        Example:
            >>> Empirical.normal(mean=[3.0], samples=1000).inputs.mean().round(1)
            np.float64(3.0)
        """
        # Making the moments checks that the mean fits the covariance.
        moments = GaussianMoments(mean, cov)
        known = moments.cov if moments.mean is None else moments.mean
        if known is None:
            raise ModelError("draws from N(mean, cov) need a mean or a covariance, for their width")
        check_draws(samples)
        number = seed_number(seed, "the seed of samples")
        n_ctx = known.shape[0] if moments.mean is not None and known.ndim == 2 else None
        # The degree matters to quadrature alone.
        reading = Reading(known.shape[-1], n_ctx, degree=1)
        return cls(
            draws(samples, number, gaussian_draws(moments, reading)).block(0, samples).inputs
        )

    def is_exact(self, nonlinear_layers: int) -> bool:
        """Whether sums are exact: always, for the given sample."""
        return True

    def points(self, reading: Reading | None) -> Points:
        """The sample with its weights, the same for all models."""
        if self.weights is None:
            log_weights = np.full(len(self.inputs), -np.log(len(self.inputs)))
        else:
            # Shares of the largest weight have a sum in the range of floats.
            shares = np.asarray(self.weights) / np.max(self.weights)
            # Inputs of weight zero have the logarithm -inf, and drop out of every sum.
            with np.errstate(divide="ignore"):
                log_weights = np.log(shares) - np.log(shares.sum())
        block = partial(_weighted_rows, self.inputs, log_weights)
        tokens = self.inputs.dtype.kind in "iu"
        return Points(len(self.inputs), block, drawn=True, tokens=tokens)


def _weighted_rows(inputs: Any, log_weights: np.ndarray, start: int, stop: int) -> WeightedPoints:
    # Of a file only these rows are read, so finiteness is checked here and not before.
    rows = np.asarray(inputs[start:stop])
    _check_finite(rows, start)
    return WeightedPoints(rows, log_weights[start:stop])


def _check_weights(weights: np.ndarray, count: int) -> None:
    if weights.shape != (count,):
        raise ModelError(f"{count} inputs need weights of shape ({count},), found {weights.shape}")
    if not (np.isfinite(weights).all() and weights.min() >= 0 and weights.max() > 0):
        raise ModelError(
            "weights of inputs are finite, not negative, and not all zero; "
            f"found them from {weights.min():g} to {weights.max():g}"
        )


def _check_finite(rows: np.ndarray, start: int) -> None:
    # The row is counted from the start of the data, not of the block.
    finite = np.isfinite(rows).reshape(len(rows), -1).all(axis=1)
    if not finite.all():
        raise ModelError(f"the inputs are not finite, first in row {start + finite.argmin()}")
