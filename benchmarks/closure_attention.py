"""How wrong the Gaussian closure is for two attention layers.

Its cosine beside the exact one, for small random models.

    python benchmarks/closure_attention.py [--out benchmarks/results/closure-attention.md]

Sequences of two positions with two coordinates each, standard normal. Two attention layers make a
polynomial of degree 25 in these four variables, so a product of two models has degree 50, which
Gauss-Hermite quadrature with 26 nodes per variable integrates exactly (up to degree 51). The
reference is therefore the forward pass at 26^4 points; sampling could not replace it, because the
tails that decide such a moment are hardly ever drawn.
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float

import tnsim

CONTEXT = 2
WIDTH = 2
HEADS = 2
D_HEAD = 2
NODES = 26
PAIRS = 20
RULES = {
    "x + 0.01 f(x)": (1.0, 0.01),
    "x + 0.1 f(x)": (1.0, 0.1),
    "x + 0.35 f(x)": (1.0, 0.35),
    "f(x)": (0.0, 1.0),
}  # skip, scale
PROTOCOL = f"""`python benchmarks/closure_attention.py`: {{pairs}} pairs of random models per row,
of seeds (0, 1), (2, 3), ... Two attention layers, each `skip x + scale f(x)`; weights normal with
variance 1 / columns; {CONTEXT} positions of {WIDTH} coordinates, {HEADS} heads of width {D_HEAD},
causal, RoPE, no biases. Exact cosine by quadrature with {NODES} nodes per variable, float64."""


def model(seed: int, skip: float, scale: float) -> tnsim.Model:
    """Two causal attention layers, RoPE, no biases; weights normal with variance 1 / columns."""
    rng = np.random.default_rng(seed)
    rows = HEADS * D_HEAD
    shapes = [(rows, WIDTH)] * 5 + [(WIDTH, rows)]
    layers = [
        tnsim.Attention(*(rng.normal(size=s) / np.sqrt(s[1]) for s in shapes), HEADS)
        for _ in range(2)
    ]
    return tnsim.Model([tnsim.Residual(layer, skip, scale) for layer in layers], n_ctx=CONTEXT)


def quadrature() -> Iterator[
    tuple[Float[np.ndarray, "points ctx width"], Float[np.ndarray, " points"]]
]:
    """Points and weights of the product rule for CONTEXT * WIDTH standard normal variables.

    A chunk per node of the first variable.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    weights = weights / weights.sum()
    others = np.array(list(itertools.product(nodes, repeat=CONTEXT * WIDTH - 1)))
    weight = np.array(list(itertools.product(weights, repeat=CONTEXT * WIDTH - 1))).prod(axis=1)
    for x, w in zip(nodes, weights, strict=True):
        yield (
            np.column_stack([np.full(len(others), x), others]).reshape(-1, CONTEXT, WIDTH),
            w * weight,
        )


@jax.jit
def weighted_products(
    a: tnsim.Model, b: tnsim.Model, x: jax.Array, weights: jax.Array
) -> Float[jax.Array, "2 2"]:
    """Sums of <a, a>, <a, b> and <b, b> over points."""
    outputs = jax.numpy.stack([a(x), b(x)])
    return jax.numpy.einsum("p,apsk,bpsk->ab", weights, outputs, outputs)


def exact_cosine(a: tnsim.Model, b: tnsim.Model) -> float:
    """E <a(X), b(X)> over the norms, by quadrature."""
    with jax.enable_x64(True):
        products = sum(np.asarray(weighted_products(a, b, *chunk)) for chunk in quadrature())
    return float(products[0, 1] / np.sqrt(products[0, 0] * products[1, 1]))


def cosines(skip: float, scale: float, pairs: int) -> Float[np.ndarray, "pairs 2"]:
    """The exact cosine and the closure's for models of seeds (0, 1), (2, 3), ..."""
    models = [(model(2 * n, skip, scale), model(2 * n + 1, skip, scale)) for n in range(pairs)]
    return np.array(
        [(exact_cosine(a, b), tnsim.similarity(a, b, tnsim.GaussianClosure())) for a, b in models]
    )


def report(pairs: int) -> str:
    """A markdown table with a row per residual rule."""
    lines = [
        "| layer | mean abs. exact cosine | mean abs. closure cosine | mean abs. error "
        "| largest error |",
        "|---|---|---|---|---|",
    ]
    for rule, numbers in RULES.items():
        exact, closure = cosines(*numbers, pairs).T
        error = np.abs(closure - exact)
        lines.append(
            f"| `{rule}` | {np.abs(exact).mean():.3f} | {np.abs(closure).mean():.3f} "
            f"| {error.mean():.3f} | {error.max():.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    args = parser.parse_args()
    table = report(args.pairs)
    print(table)
    if args.out:
        protocol = PROTOCOL.format(pairs=args.pairs)
        title = "# The Gaussian closure for two attention layers"
        args.out.write_text(f"{title}\n\n{protocol}\n\n{table}\n")


if __name__ == "__main__":
    main()
