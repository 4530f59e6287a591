"""The mathematics of the baselines, from outputs or weights as plain arrays to K x K arrays.

Nothing here knows models or labels; a model is the number of its array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from tnsim.errors import ModelError

EPS = float(np.finfo(np.float64).eps)
_COORDINATES = 4096
"""Coordinates that are multiplied at once."""


def cosines(rows: Sequence[Float[np.ndarray, " size"]], zero: str) -> Float[np.ndarray, "K K"]:
    """Cosines of all pairs of vectors.

    Args:
        rows: K vectors of equal size.
        zero: Words of the error about a vector of zeros, after "model 3".

    Returns:
        (K, K), float64 from -1 to 1.

    Raises:
        ModelError: A vector is zero.

    Example:
        >>> import numpy as np
        >>> cosines([np.array([3.0, 0.0]), np.array([3.0, 4.0])], "is zero").round(3).tolist()
        [[1.0, 0.6], [0.6, 1.0]]
    """
    units = np.concatenate([directions(row[None]) for row in rows])
    is_zero = ~units.any(1)
    if is_zero.any():
        raise ModelError(f"model {is_zero.argmax()} {zero}: its cosine with anything is undefined")
    return np.clip(units @ units.T, -1.0, 1.0)


def directions(outputs: Float[np.ndarray, "*n out"]) -> Float[np.ndarray, "rows out"]:
    """Outputs as unit vectors, a row for every input and position; zeros stay zeros.

    Args:
        outputs: Outputs (..., d_out).

    Returns:
        (rows, d_out), float64.

    Example:
        >>> import numpy as np
        >>> directions(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
        [[0.6, 0.8], [0.0, 0.0]]
    """
    rows = outputs.reshape(-1, outputs.shape[-1])
    sizes = np.abs(rows).max(1, keepdims=True)
    rows = rows / np.where(sizes > 0, sizes, 1.0)  # the largest entry is 1: no square overflows
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1.0)


def mean_cosines(models: Sequence[Float[np.ndarray, "rows out"]]) -> Float[np.ndarray, "K K"]:
    """Mean over rows of the cosines of all pairs of models.

    Args:
        models: `directions` of K models on the same inputs.

    Returns:
        (K, K), float64 from -1 to 1.

    Raises:
        ModelError: A row is zero.

    Example:
        >>> import numpy as np
        >>> mean_cosines([np.eye(2), -np.eye(2)]).tolist()
        [[1.0, -1.0], [-1.0, 1.0]]
    """
    for n, rows in enumerate(models):
        is_zero = ~rows.any(1)
        if is_zero.any():
            raise ModelError(
                f"model {n} gives zero in row {is_zero.argmax()} of its outputs: "
                "its cosine there is undefined; leave that input out"
            )
    flat = np.array([rows.ravel() for rows in models])
    return np.clip(flat @ flat.T / len(models[0]), -1.0, 1.0)


def symmetric(count: int, entry: Callable[[int, int], float]) -> Float[np.ndarray, "K K"]:
    """A symmetric matrix from the entries of its lower triangle.

    Args:
        count: The number of rows, K.
        entry: The value at row i and column j <= i.

    Returns:
        (K, K), float64.

    Example:
        >>> symmetric(2, lambda i, j: 10.0 * i + j).tolist()
        [[0.0, 10.0], [10.0, 11.0]]
    """
    values = np.empty((count, count))
    for i in range(count):
        for j in range(i + 1):
            values[i, j] = values[j, i] = entry(i, j)
    return values


def centred(outputs: Float[np.ndarray, "n *positions out"]) -> Float[np.ndarray, "n rank"]:
    """Centred outputs A, a row for each input, or their kernel A A' where that is no larger.

    Args:
        outputs: Outputs for n inputs; positions are further coordinates.

    Returns:
        A, (n, coordinates), of fewer than n coordinates; A A', (n, n), of more. Float64, A in units
        of the largest deviation from the mean; zeros where outputs are constant up to rounding.

    Example:
        >>> import numpy as np
        >>> centred(np.array([[1.0], [2.0]])).tolist()
        [[-1.0], [1.0]]
        >>> centred(np.array([[1.0, 1.0], [2.0, 2.0]])).tolist()
        [[2.0, -2.0], [-2.0, 2.0]]
    """
    outputs = outputs.reshape(len(outputs), -1)
    count, coordinates = outputs.shape
    size, spread = _size(outputs) or 1.0, 0.0
    kernel = np.zeros((count, count))
    # Outputs of language models are large, so some coordinates come after others:
    # with A = (A1 A2), A A' = A1 A1' + A2 A2'.
    step = coordinates if coordinates < count else max(count, _COORDINATES)
    rows = np.empty((count, 0))
    for start in range(0, coordinates, step):
        rows = outputs[:, start : start + step] / size
        rows -= rows.mean(0)
        spread = max(spread, _size(rows))
        if coordinates >= count:
            kernel += rows @ rows.T
    if spread < count * EPS:  # a constant: the deviations are rounding errors
        spread = math.inf
    return rows / spread if coordinates < count else kernel / spread**2


def _size(outputs: Float[np.ndarray, "n out"]) -> float:
    """Largest absolute value."""
    return max(float(outputs.max()), -float(outputs.min()))


def hsic(
    centred_outputs: Sequence[Float[np.ndarray, "n rank"]], debiased: bool
) -> Float[np.ndarray, "K K"]:
    """Hilbert-Schmidt independence criterion of all pairs, for linear kernels.

    Args:
        centred_outputs: `centred` of K models on the same n inputs; n is at least 4 if debiased.
        debiased: Whether to give the unbiased estimator, which may be negative.

    Returns:
        (K, K), float64, up to a factor per model and a common factor, which CKA divides out.

    Raises:
        ModelError: The outputs of a model are constant.

    Example:
        >>> import numpy as np
        >>> x = np.array([[-1.0], [-1.0], [1.0], [1.0]])
        >>> y = np.array([[-1.0], [1.0], [-1.0], [1.0]])
        >>> hsic([x, y], debiased=False).round(3).tolist()
        [[1.0, 0.0], [0.0, 1.0]]

    Source:
        Song et al. 2012, "Feature selection via dependence maximization", equation 5.
    """
    are_kernels = [x.shape[1] == len(x) for x in centred_outputs]
    each = list(zip(centred_outputs, are_kernels, strict=True))
    diagonals = np.array([x.diagonal() if whole else np.square(x).sum(1) for x, whole in each])
    largest_entries = diagonals.max(1)
    if (largest_entries == 0).any():
        raise ModelError(
            f"model {np.argmin(largest_entries)} gives the same output for all inputs: "
            "its CKA with anything is undefined"
        )
    traces = diagonals.sum(1, keepdims=True)
    # With K = A A' and L = B B', tr K L = |A' B|^2. Kernels take n^2 multiplications for a pair.
    if any(are_kernels):
        kernels = [x if whole else x @ x.T for x, whole in each]
        biased = symmetric(len(kernels), lambda i, j: float(np.vdot(kernels[i], kernels[j])))
    else:
        biased = symmetric(
            len(each), lambda i, j: float(np.square(each[i][0].T @ each[j][0]).sum())
        )
    # Divided by the traces afterwards, as scaled outputs would be in memory a second time.
    biased = biased / traces / traces.T
    if not debiased:
        return biased
    # The unbiased estimator leaves out the diagonals k and l. With K~ = K - diag k and L~ =
    # L - diag l it is, times n (n - 3),
    #
    #     tr K~ L~  +  1'K~1 1'L~1 / ((n-1)(n-2))  -  2 1'K~ L~1 / (n-2).
    #
    # A constant added to the outputs adds u 1' + 1 u' to the kernel, and the estimator maps such a
    # term to zero; so the outputs may be centred, and K 1 = 0. Then K~1 = -k, 1'K~1 = -tr K and
    # tr K~ L~ = tr K L - k.l, and the estimator becomes
    #
    #     tr K L  +  tr K tr L / ((n-1)(n-2))  -  n k.l / (n-2).
    #
    # The outputs are scaled so that tr K = tr L = 1.
    n = diagonals.shape[1]
    diagonals = diagonals / traces
    return biased + (1 / ((n - 1) * (n - 2)) - n / (n - 2) * diagonals @ diagonals.T)


def softmax(outputs: Float[np.ndarray, "*n out"]) -> Float[np.ndarray, "*n out"]:
    """Probabilities `exp(y_i) / sum_j exp(y_j)`, over the last axis.

    Args:
        outputs: Logits (..., d_out).

    Returns:
        Probabilities (..., d_out), float64.

    Example:
        >>> import numpy as np
        >>> softmax(np.array([1000.0, 1000.0])).tolist()
        [0.5, 0.5]
    """
    # The largest exponent is 0, so that nothing overflows.
    weights = np.exp(outputs - outputs.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def entropy(p: Float[np.ndarray, "*n out"]) -> Float[np.ndarray, "*n"]:
    """Shannon entropy `-sum_i p_i log p_i`, with 0 log 0 = 0.

    Args:
        p: Probabilities (..., d_out).

    Returns:
        (...), float64 in nats.

    Example:
        >>> import numpy as np
        >>> entropy(np.array([0.5, 0.5, 0.0])).round(3).item()
        0.693
    """
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)


def largest(outputs: Float[np.ndarray, "*n out"]) -> Int[np.ndarray, "*n"]:
    """Place of the largest output; of equal outputs, the first.

    Args:
        outputs: Outputs (..., d_out).

    Returns:
        (...), integers from 0.

    Example:
        >>> import numpy as np
        >>> largest(np.array([0.0, 2.0, 2.0])).item()
        1
    """
    return outputs.argmax(-1)
