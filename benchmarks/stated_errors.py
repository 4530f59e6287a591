"""Coverage of stated errors: how often intervals of 95 % hold the exact similarity, and the bias.

    python benchmarks/stated_errors.py [--cases N] [--samples N]

A case is a pair of networks of one hidden layer of ReLU units, of random sizes and weights, the
second on the way from the first to a network of its own. Its exact similarity is that of arc-cosine
kernels (Cho and Saul 2009), in NumPy. Its two estimates draw inputs of their own: Sobol points in
16 replicates, scrambled anew for every case, and independent draws as data (32 groups). An interval
is the value and t standard errors to both sides, t the quantile of Student's distribution for one
less than the number of groups.
"""

import argparse
from typing import Any
from unittest import mock

import numpy as np

import tnsim
from tnsim.metrics.metric import estimate_of

T = {"Sobol points": 2.131, "independent draws": 2.040}
"""Quantiles 0.975 of Student's distribution with 15 and 31 degrees of freedom."""
COLUMNS = "inputs | cases | held by t | held by 1.96 | bias / its error | error (root mean square)"


def weights(rng: np.random.Generator, d: int, hidden: int) -> list[np.ndarray]:
    """Weights of one hidden layer, and of a readout."""
    return [rng.normal(size=(hidden, d)), rng.normal(size=(3, hidden))]


def network(numbers: list[np.ndarray]) -> Any:
    """The function of these weights."""
    read, write = numbers
    return lambda x: np.maximum(x @ read.T, 0.0) @ write.T


def product(one: list[np.ndarray], two: list[np.ndarray]) -> float:
    """`E <a(x), b(x)>` over standard normal x, by the arc-cosine kernel of order 1."""
    lengths = np.outer(*(np.linalg.norm(numbers[0], axis=1) for numbers in (one, two)))
    cosines = np.clip(one[0] @ two[0].T / lengths, -1.0, 1.0)
    kernel = np.sqrt(1 - cosines**2) + (np.pi - np.arccos(cosines)) * cosines
    return float(np.sum((one[1].T @ two[1]) * lengths * kernel / (2 * np.pi)))


def case(seed: int, samples: int) -> list[tuple[float, float]]:
    """For either kind of inputs the error of a similarity, and its stated standard error."""
    rng = np.random.default_rng([7, seed])
    d, hidden = int(rng.integers(2, 17)), int(rng.integers(4, 25))
    one, two = weights(rng, d, hidden), weights(rng, d, hidden)
    share = rng.uniform()
    mixed = [(1 - share) * x + share * y for x, y in zip(one, two, strict=True)]
    exact = product(one, mixed) / np.sqrt(product(one, one) * product(mixed, mixed))
    usual = np.random.default_rng

    def fresh(own: Any = None) -> np.random.Generator:
        """The generator of a replicate, with the seed of the case in front of its own."""
        return usual([seed, *own] if isinstance(own, list) else own)

    metrics = (
        estimate_of(tnsim.Gaussian(samples=samples), (d,)),
        tnsim.Empirical(rng.normal(size=(samples, d))),
    )
    found = []
    for metric in metrics:
        # The scrambles of a metric are those of one seed; here each case has a seed of its own.
        with mock.patch("numpy.random.default_rng", fresh):
            value = tnsim.similarity(network(one), network(mixed), metric)
        assert value.standard_error is not None
        found.append((float(value - exact), float(value.standard_error)))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=4096)
    asked = parser.parse_args()
    every = np.array([case(seed, asked.samples) for seed in range(asked.cases)])
    lines = [f"| {COLUMNS} |", "|---|---|---|---|---|---|"]
    for kind, (errors, stated) in zip(T, every.transpose(1, 2, 0), strict=True):
        ratio = errors / stated
        held = [100 * float(np.mean(abs(ratio) <= t)) for t in (T[kind], 1.96)]
        bias = ratio.mean() / (ratio.std() / len(ratio) ** 0.5)
        size = float(np.sqrt(np.mean(errors**2)))
        row = f"{held[0]:.1f} % | {held[1]:.1f} % | {bias:+.1f} | {size:.1e}"
        lines.append(f"| {kind} | {len(errors):,} | {row} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
