"""The metrics that are finite measures: own inputs, tokens, independent coordinates.

*Own inputs* are an array in memory or a file; of a file only the rows of the current batch are
read.

*Independent coordinates* of any distribution. A Gauss rule with n nodes has the moments 0 to 2n - 1
of its distribution, so it gives the exact means of polynomials up to degree 2n - 1. A distribution
given by moments m_k goes through Chebyshev's algorithm in exact fractions; a distribution with a
density is cut into many small panels with a Gauss-Legendre rule in each. Both ways give the
recurrence of the orthogonal polynomials, and the recurrence gives the rule (see `input_moments`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax.core import Tracer
from jaxtyping import Float

from tnsim.errors import ModelError, PrecisionWarning, in_one_line, printable, warn
from tnsim.metrics.input_moments import GaussianMoments, gauss_rule, gaussian_draws, hermite_rule
from tnsim.metrics.protocol import (
    Points,
    Reading,
    Rule,
    WeightedPoints,
    beginnings,
    check_draws,
    draws,
    mapped,
    product_rule,
    sequences,
)
from tnsim.models.arrays import Array, as_array, host_array, in_float64, is_traced, pytree
from tnsim.models.functions import input_rows
from tnsim.models.model import Seed, seed_number
from tnsim.options import checked, shown

_PANELS, _PANEL_NODES = 400, 20  # panels between two edges of a density, nodes of a panel
_ROUNDING = 1e-12  # relative rounding of moments that are given as floats
_VISIBLE = 1e-3  # rounding of the moments beside the spread, beyond which a warning tells it
# A sum E[pi_k^2] below this share of its summands has no digit left by rounding of the moments:
# another node would be made of rounding, far from the others.
_EPS = 2.0**-50


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


@checked(own="samples")
@pytree
@dataclass(frozen=True, eq=False)
class Categorical:
    """`E<A(x), B(x)>` over sequences of one-hot tokens, independent across positions: exact.

    Models with at most one attention layer and only linear layers above it cost the vocabulary
    squared. Other models run over all `vocabulary ** n_ctx` sequences where the budget allows it;
    with causal attention, sequences that begin alike share the work on their beginning. Where the
    budget does not allow it, `samples` draws sequences instead, and results have a standard error.

    Args:
        probabilities: Probabilities of tokens at every position, (vocabulary,); None for uniform.
        samples: Number of sequences to draw, which makes the result an estimate; None for the
            exact value.
        seed: Seed of the draws: a number, a NumPy generator or a JAX key.

    Raises:
        ModelError: Probabilities are negative or do not sum to 1, or `samples` is less than 2.

    Example:
        A table of two values, 1 and 2: the mean of 1^2 and 2^2.

        >>> import tnsim
        >>> table = tnsim.Model([tnsim.Linear([[1.0, 2.0]])], n_ctx=1)
        >>> print(f"{tnsim.inner(table, table, tnsim.Categorical()):.3f}")
        2.500

    Source:
        The definition of an expectation; `problems.tokens` explains the sum.
    """

    probabilities: Float[Array, " vocabulary"] | None = None
    samples: int | None = dataclasses.field(default=None, metadata={"static": True})
    seed: Seed = dataclasses.field(default=0, metadata={"static": True})
    name = "categorical"
    pairs_within_model = True

    def __post_init__(self) -> None:
        check_draws(self.samples)
        object.__setattr__(self, "seed", seed_number(self.seed, "the seed of samples"))
        if self.probabilities is None:
            return
        p = as_array(self.probabilities, "the token probabilities", 1)
        if not isinstance(p, Tracer):
            on_host = np.asarray(p, np.float64)  # functions of JAX would round to float32
            smallest, total = on_host.min(), float(on_host.sum())
            # A sum may be off by the rounding of float32, as softmaxes give it.
            if smallest < 0 or abs(total - 1) > 1e-6:
                raise ModelError(
                    "token probabilities are at least 0 and sum to 1; "
                    f"found a smallest of {smallest:.3g} and a sum of {total:.6g}"
                )
            if total != 1:  # off by rounding
                p = as_array(on_host / total, "the token probabilities", 1)
        object.__setattr__(self, "probabilities", p)

    def is_exact(self, nonlinear_layers: int) -> bool:
        """Whether all sequences are summed over, instead of drawn."""
        return self.samples is None

    def points(self, reading: Reading) -> Points:
        """All sequences with their probabilities, or draws of sequences.

        Raises:
            ModelError: The models read no sequences, or another vocabulary.
        """
        n_ctx = positions_of(reading.n_ctx)
        p = np.asarray(self.distribution(reading.d_in), np.float64)
        # Float32 probabilities may miss the sum 1 by more than NumPy's draws tolerate.
        p = p / p.sum()
        if self.samples is None:
            # With causal attention, sequences share the work on their beginning.
            listed = beginnings if reading.causal else sequences
            return listed(p, n_ctx)
        return draws(
            self.samples, seed_number(self.seed), partial(_drawn_tokens, p, n_ctx), tokens=True
        )

    def distribution(self, vocabulary: int) -> Float[Array, " vocabulary"]:
        """Probabilities of all tokens.

        Returns:
            An array (vocabulary,), float64 unless it is traced.

        Raises:
            ModelError: The metric has the probabilities of another vocabulary.
        """
        if self.probabilities is None:
            return np.full(vocabulary, 1 / vocabulary)
        if self.probabilities.shape[0] != vocabulary:
            raise ModelError(
                f"the metric has probabilities of {self.probabilities.shape[0]} tokens, "
                f"but the models read {vocabulary}"
            )
        return in_float64(self.probabilities)


def positions_of(n_ctx: int | None) -> int:
    """The number of positions of models that read sequences.

    Raises:
        ModelError: The models read vectors.

    Example:
        >>> positions_of(3)
        3
    """
    if n_ctx is None:
        raise ModelError(
            "Categorical is a distribution of token sequences: "
            "give tnsim.Model(layers, n_ctx=...) or load(..., n_ctx=...), --n-ctx"
        )
    return n_ctx


def _drawn_tokens(p: np.ndarray, n_ctx: int, rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw sequences of independent tokens."""
    return rng.choice(len(p), size=(count, n_ctx), p=p)


@dataclass(frozen=True)
class Marginal:
    """A distribution of a single coordinate.

    Args:
        name: Name for users and for messages.
        rule: Function from a number n of nodes to a rule that is exact to degree 2n - 1, or to
            every degree.
        draw: Function from a generator and a shape to draws; None if only moments are known.
    """

    name: str
    rule: Callable[[int], Rule]
    draw: Callable[[np.random.Generator, tuple[int, ...]], Any] | None


def marginal(given: Any) -> Marginal:
    """The distribution that a user means.

    Args:
        given: Name in `NAMED`, a pair (nodes, weights), or moments E[x^k] for k = 0, 1, 2 and so
            on, of which the first is 1.

    Raises:
        ModelError: The value is none of these.

    Example:
        >>> marginal("bernoulli").rule(5).nodes.tolist()
        [0.0, 1.0]
    """
    if isinstance(given, str):
        if given not in NAMED:
            raise ModelError(
                f"no distribution is called {given!r}; known are {', '.join(NAMED)}; or give "
                "moments, or (nodes, weights)"
            )
        return NAMED[given]
    if _is_nodes_and_weights(given):
        return _finite_distribution("given nodes", *given)
    moments = _numbers(given)
    if moments.size == 0:
        of_scipy = (
            "; the moments of a distribution d of SciPy, for models of degree n, are "
            "np.array([d.moment(k) for k in range(2 * n + 2)])"
        )
        raise ModelError(
            f"a marginal is the name of a distribution ({', '.join(NAMED)}), an array of moments, "
            f"or (nodes, weights), and a list has one for each coordinate; found {shown(given)}"
            f"{of_scipy if hasattr(given, 'moment') else ''}"
        )
    if len(moments) < 2 or abs(moments[0] - 1) > _ROUNDING or not np.isfinite(moments).all():
        first = ", ".join(f"{moment:g}" for moment in moments[:4])
        raise ModelError(
            "moments are finite numbers E[x^0] = 1, E[x], E[x^2] and so on, two at least; "
            f"found {len(moments)}, which begin with {first}"
        )
    return Marginal("given moments", lambda nodes: rule_of_moments(moments.tolist(), nodes), None)


def _is_nodes_and_weights(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and np.ndim(given[0]) == 1


def _numbers(given: Any) -> Float[np.ndarray, " n"]:
    """A list of numbers as an array, an empty one for anything else.

    Rows of moments are several distributions, so an array of two axes is no list.
    """
    try:
        array = host_array(given) if hasattr(given, "detach") else np.asarray(given)
        is_list = array.ndim == 1 and array.dtype.kind in "biufO"
        return array.astype(np.float64) if is_list else np.empty(0)
    except (TypeError, ValueError, OverflowError):
        return np.empty(0)


def rule_of_moments(moments: Sequence[float], nodes: int) -> Rule:
    """The Gauss rule with given moments, by Chebyshev's algorithm in exact fractions.

    Args:
        moments: Moments E[x^k] from k = 0 on, at least 2 * nodes of them.
        nodes: Number of nodes; a distribution with fewer points gives as many nodes as points.

    Raises:
        ModelError: The moments are too few, or belong to no distribution.

    Warns:
        PrecisionWarning: Rounding of the moments leaves few digits of the distribution.

    Example:
        >>> (rule_of_moments([1, 0, 1, 0, 3, 0], nodes=3).nodes ** 2).round(6).tolist()
        [3.0, 0.0, 3.0]

    Source:
        Gautschi, Orthogonal polynomials: computation and approximation, section 2.1.7.
    """
    if len(moments) < 2 * nodes:
        raise ModelError(
            f"models of this degree need the moments up to E[x^{2 * nodes - 1}], found "
            f"{len(moments)} moments"
        )
    # With pi_k the monic orthogonal polynomials and s_k(l) = E[pi_k x^l], the recurrence
    # pi_{k+1} = (x - a_k) pi_k - b_k pi_{k-1} is a recurrence of moments as well:
    #
    #     s_k(l) = s_{k-1}(l + 1) - a_{k-1} s_{k-1}(l) - b_{k-1} s_{k-2}(l),
    #     b_k = s_k(k) / s_{k-1}(k - 1),    a_k = s_k(k + 1) / s_k(k) - s_{k-1}(k) / s_{k-1}(k - 1).
    #
    # In step k `after[n]` is s_k(k + n), `row[n]` is s_{k-1}(k - 1 + n) and `before[n]` is
    # s_{k-2}(k - 2 + n). Digits cancel in these sums, so they are computed in fractions.
    before = [Fraction(0)] * (2 * nodes)
    row = [Fraction(moment) for moment in moments[: 2 * nodes]]
    # Sums of absolute values stand beside them: moments are rounded, and what is left of them by
    # cancellation has the rounding of all.
    sizes_before, sizes = before, list(map(abs, row))
    diagonal, squares, lost = [row[1] / row[0]], [], 0.0
    for k in range(1, nodes):
        a = diagonal[-1]
        b = squares[-1] if squares else Fraction(0)
        count = 2 * (nodes - k)
        places = range(count)
        after = [row[n + 2] - a * row[n + 1] - b * before[n + 2] for n in places]
        sizes_before, sizes = (
            sizes,
            [sizes[n + 2] + abs(a) * sizes[n + 1] + b * sizes_before[n + 2] for n in places],
        )
        vanishes = after[0] <= _EPS * sizes[0] and _all_vanish(after, sizes)
        # What rounding of the moments is beside the spread, of which the variance is the first to
        # be known: where it is zero up to rounding, the moments are those of a constant.
        spread = b * row[0] if k > 1 else after[0]
        if spread > 0 and not (vanishes and k == 1):
            lost = max(lost, float(sizes[0] / spread) * 2.0**-53)
        if vanishes:
            break  # the distribution has k points
        if after[0] <= 0:
            raise ModelError(f"the moments up to E[x^{2 * k}] are those of no distribution")
        squares.append(after[0] / row[0])
        diagonal.append(after[1] / after[0] - row[1] / row[0])
        before, row = row, after
    if lost > _VISIBLE:
        digits = max(0, int(-math.log10(lost)))
        warn(
            f"the moments up to E[x^{2 * nodes - 1}], as they are rounded, leave about {digits} "
            "digits of the spread about the mean: give (nodes, weights), or moments of x less its "
            "mean, with the mean in the first biases",
            PrecisionWarning,
        )
    return gauss_rule(np.array([float(a) for a in diagonal]), np.sqrt([float(b) for b in squares]))


def _all_vanish(sums: Sequence[Fraction], sizes: Sequence[Fraction]) -> bool:
    """Whether sums are zero up to the rounding of the moments in them."""
    both = zip(sums, sizes, strict=True)
    return all(abs(value) <= _ROUNDING * size for value, size in both)


def _of_density(
    density: Callable[[Any], Any], edges: Callable[[int], Sequence[float]]
) -> Callable[[int], Rule]:
    """Gauss rules of a density that is smooth between edges; edges may depend on the nodes."""

    def rule(nodes: int) -> Rule:
        t, weights = np.polynomial.legendre.leggauss(_PANEL_NODES)
        bounds = edges(nodes)
        cuts = [np.linspace(*pair, _PANELS + 1) for pair in itertools.pairwise(bounds)]
        starts = np.concatenate([cut[:-1] for cut in cuts])
        widths = np.concatenate([np.diff(cut) for cut in cuts])
        x = (starts[:, None] + widths[:, None] * (t + 1) / 2).ravel()
        w = (widths[:, None] / 2 * weights).ravel() * density(x)
        return gauss_rule(*_stieltjes(x, w / w.sum(), nodes))

    return rule


def _stieltjes(
    x: Float[np.ndarray, " n"], weights: Float[np.ndarray, " n"], nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence of the polynomials orthonormal under many weighted points."""
    diagonal, off_diagonal = np.zeros(nodes), np.zeros(nodes - 1)
    root = np.sqrt(weights)
    basis = np.zeros((nodes, len(x)))  # row k: p_k times the square roots of the weights
    basis[0] = root / np.linalg.norm(root)
    for k in range(nodes):
        diagonal[k] = basis[k] ** 2 @ x
        if k + 1 == nodes:
            break
        vector = x * basis[k]
        for _ in range(2):  # twice, as rounding leaves a part of the projection
            vector = vector - basis[: k + 1].T @ (basis[: k + 1] @ vector)
        off_diagonal[k] = np.linalg.norm(vector)
        basis[k + 1] = vector / off_diagonal[k]
    return diagonal, off_diagonal


def _finite_distribution(name: str, nodes: Any, weights: Any) -> Marginal:
    """The distribution on finitely many points."""
    x, shares = _numbers(nodes), _numbers(weights)
    fits = x.shape == shares.shape and np.isfinite([x, shares]).all()
    if not fits or not (shares >= 0).all() or not shares.any():
        raise ModelError(
            "nodes and weights are two lists of one length, finite, weights not negative and not "
            f"all zero; found nodes {shown(nodes)} and weights {shown(weights)}"
        )
    shares = shares / shares.max()  # the sum of which is in the range of floats
    p = shares / shares.sum()
    with np.errstate(divide="ignore"):
        rule = Rule(x, np.log(p))
    return Marginal(name, lambda count: rule, lambda rng, shape: rng.choice(x, shape, p=p))


def _tail_width(nodes: int) -> float:
    """Standard deviations of a normal beyond which degree 2 * nodes adds nothing to a mean."""
    return 12 + 2 * math.sqrt(2 * nodes)


def _bimodal(x: Any) -> Any:
    """The density of "bimodal" up to a factor, where 0.18 is twice the variance 0.3^2."""
    return np.exp(-((x - 1) ** 2) / 0.18) + np.exp(-((x + 1) ** 2) / 0.18)


def _draw_bimodal(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return rng.choice([-1.0, 1.0], shape) + 0.3 * rng.normal(size=shape)


def _spikes(nodes: int) -> Rule:
    """The rule of "spikes": nodes of 2 z with a quarter of the weight, and a node at 0."""
    x, log_weights = NAMED["normal"].rule(nodes)
    log_weights = np.append(log_weights + math.log(0.25), math.log(0.75))
    return Rule(np.append(2 * x, 0.0), log_weights)


def _draw_spikes(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return rng.choice([0.0, 2.0], shape, p=[0.75, 0.25]) * rng.normal(size=shape)


def _named_distributions() -> dict[str, Marginal]:
    def uniform(nodes: int) -> Rule:
        # Legendre's polynomials on [-1, 1], orthonormal: a_k = 0, b_k = k / sqrt(4 k^2 - 1).
        k = np.arange(1.0, nodes)
        return gauss_rule(np.zeros(nodes), k / np.sqrt(4 * k**2 - 1))

    def laplace(nodes: int) -> list[float]:
        # Under x^(2n) times the density, sqrt(2) x is a gamma number of mean 2n + 1 and variance
        # 2n + 1: the reach is more than 8 standard deviations above it.
        reach = (2 * nodes + 60 + 8 * math.sqrt(2 * nodes)) / math.sqrt(2)
        return [-reach, 0.0, reach]

    half = _of_density(lambda x: np.exp(-(x**2) / 2), lambda nodes: [0.0, _tail_width(nodes)])
    double = _of_density(lambda x: np.exp(-math.sqrt(2) * abs(x)), laplace)
    modes = _of_density(
        _bimodal, lambda n: [-1 - 0.3 * _tail_width(n), 0.0, 1 + 0.3 * _tail_width(n)]
    )
    marginals = [
        Marginal("normal", hermite_rule, lambda rng, shape: rng.normal(size=shape)),
        Marginal("half-normal", half, lambda rng, shape: abs(rng.normal(size=shape))),
        Marginal("uniform", uniform, lambda rng, shape: rng.uniform(-1, 1, shape)),
        Marginal("laplace", double, lambda rng, shape: rng.laplace(0, 0.5**0.5, shape)),
        Marginal("bimodal", modes, _draw_bimodal),
        Marginal("spikes", _spikes, _draw_spikes),
        _finite_distribution("bernoulli", [0.0, 1.0], [0.5, 0.5]),
        _finite_distribution("signs", [-1.0, 1.0], [0.5, 0.5]),
    ]
    return {one.name: one for one in marginals}


NAMED = _named_distributions()
"""Distributions by name: normal, half-normal `|z|`, uniform on [-1, 1], laplace of variance 1,
bimodal (-1 or 1 plus 0.3 z), spikes (2 z, or 0 with probability 3/4), bernoulli (0 or 1) and signs
(-1 or 1), where z is a standard normal number."""


@checked(own="samples")
@pytree
@dataclass(frozen=True, eq=False)
class Product:
    """`E<A(x), B(x)>` over independent coordinates of any distribution.

    Few coordinates are integrated exactly by Gauss quadrature, with degree + 1 nodes in every
    coordinate. For many coordinates `samples` draws inputs instead, and results have a standard
    error.

    Args:
        marginals: Distribution of all coordinates, or a list of distributions, one for each
            coordinate of an input (of a position, for sequences). A distribution is a name
            ("normal", "half-normal" `|z|`, "uniform" on [-1, 1], "laplace" of variance 1, "bimodal"
            -1 or 1 plus 0.3 z, "spikes" 2 z or 0 with probability 3/4, "bernoulli" 0 or 1, "signs"
            -1 or 1), a pair (nodes, weights), or an array of moments E[x^0], E[x], E[x^2] and so
            on.
        samples: Number of inputs to draw, which makes the result an estimate; None for the exact
            value.
        seed: Seed of the draws: a number, a NumPy generator or a JAX key.

    Raises:
        ModelError: A distribution has another form, or `samples` is less than 2.

    Example:
        On [-1, 1], E[x^2] = 1/3 and E[x^4] = 1/5.

        >>> import tnsim
        >>> line = tnsim.Model([tnsim.Linear([[1.0]])])
        >>> square = tnsim.Model([tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])])
        >>> uniform = tnsim.Product("uniform")
        >>> for model in (line, square):
        ...     print(f"{tnsim.inner(model, model, uniform):.3f}")
        0.333
        0.200

    Source:
        Golub and Welsch, Calculation of Gauss quadrature rules, 1969.
    """

    marginals: Any = dataclasses.field(metadata={"static": True})
    samples: int | None = dataclasses.field(default=None, metadata={"static": True})
    seed: Seed = dataclasses.field(default=0, metadata={"static": True})
    name = "product"
    pairs_within_model = True

    def __post_init__(self) -> None:
        check_draws(self.samples)
        object.__setattr__(self, "seed", seed_number(self.seed, "the seed of samples"))
        given = self.marginals
        if isinstance(given, _Marginals):
            return
        if is_traced(given):
            raise ModelError(
                "distributions of Product are data, found traced arrays: make the metric outside "
                "the JAX trace; weights of models may be traced"
            )
        if not isinstance(given, list):
            given = [given]
        for one in given:
            marginal(one)  # refuses what is no distribution
        object.__setattr__(self, "marginals", _Marginals(map(_stored_form, given)))

    def is_exact(self, nonlinear_layers: int) -> bool:
        """Whether nodes of Gauss rules are summed over, instead of draws."""
        return self.samples is None

    def points(self, reading: Reading) -> Points:
        """A product of Gauss rules, or draws of inputs.

        Raises:
            ModelError: The distributions are for another number of coordinates, moments are too few
                for the degree of the models, or there are samples of a distribution of which only
                moments are known.
        """
        if len(self.marginals) not in (1, reading.d_in):
            raise ModelError(
                f"the metric has {len(self.marginals)} distributions, but the models read "
                f"{reading.d_in} coordinates"
            )
        known = [marginal(one) for one in self.marginals]
        if self.samples is not None:
            for one in known:
                if one.draw is None:
                    raise ModelError(f"nothing can be drawn from {one.name}; leave out samples")
            draw = partial(_draw_inputs, self.marginals, reading.shape)
            return draws(self.samples, seed_number(self.seed), draw)
        if math.isinf(reading.degree):
            raise ModelError(
                "the nodes of Product are exact for polynomials, and a model has an activation: "
                "give Product(..., samples=...) for an estimate with its standard error"
            )
        rules = [one.rule(reading.degree + 1) for one in known]
        each = rules * (reading.d_in // len(rules)) * (reading.n_ctx or 1)
        return mapped(product_rule(each), partial(_in_shape, reading.shape))


class _Marginals(tuple[Any, ...]):
    """Distributions as the metric stores them, so that `dataclasses.replace` gives them back.

    A plain tuple would not do: two lists of moments look like nodes with their weights.
    """


def _stored_form(given: Any) -> Any:
    """A distribution as the metric stores it, a name or numbers that can be compared and hashed."""
    if isinstance(given, str):
        return given
    if _is_nodes_and_weights(given):
        return tuple(map(_stored_form, map(list, given)))
    return tuple(_numbers(given).tolist())


def _in_shape(shape: tuple[int, ...], inputs: Any) -> Any:
    return inputs.reshape(len(inputs), *shape)


def _draw_inputs(given: tuple, shape: tuple[int, ...], rng: np.random.Generator, count: int) -> Any:
    """Draw inputs, coordinate by coordinate where distributions differ."""
    drawing = [marginal(one).draw for one in given]
    if len(drawing) == 1:
        assert drawing[0] is not None
        return drawing[0](rng, (count, *shape))
    columns = [draw(rng, (count, *shape[:-1])) for draw in drawing if draw is not None]
    return np.stack(columns, axis=-1)
