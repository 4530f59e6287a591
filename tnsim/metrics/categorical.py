"""The metric of sequences of independent tokens, a finite measure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import numpy as np
from jax.core import Tracer
from jaxtyping import Float

from tnsim.errors import ModelError
from tnsim.metrics import points
from tnsim.metrics.points import Points, Reading, check_draws
from tnsim.metrics.protocol import Metric
from tnsim.models.arrays import Array, as_array, in_float64, pytree
from tnsim.models.checks import Seed, seed_number
from tnsim.options import checked


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
            listed = points.beginnings if reading.causal else points.sequences
            return listed(p, n_ctx)
        return points.draws(
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


def token_probabilities(metric: Metric, vocabulary: int) -> Float[Array, " vocabulary"]:
    """Probabilities of all tokens under `Categorical`.

    Returns:
        An array (vocabulary,).

    Raises:
        ModelError: The metric is not `Categorical`, or has another vocabulary.
    """
    if not isinstance(metric, Categorical):
        raise ModelError(f"expected Categorical(), found {type(metric).__name__}")
    return metric.distribution(vocabulary)
