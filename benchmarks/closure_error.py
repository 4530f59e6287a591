"""How good is the closure? Its cosines beside exact ones, where quadrature makes these possible.

    python benchmarks/closure_error.py [--out benchmarks/results/closure-error.md]
    python benchmarks/closure_error.py --one tanh 4 128

Vectors: stacks of bilinear layers under N(0, I), exact by Gauss-Hermite nodes. Tokens: two
attention layers over uniform tokens, exact by enumeration, beside the closure with the mean and
covariance of one-hot tokens and beside 10,000 sampled sequences. Networks with activations, random
and trained, have no exact value: their truth is `Empirical.normal`, with its standard error.
"""

import argparse
from pathlib import Path

import jax
import numpy as np

import tnsim
from benchmarks.paper.activations import ActivationsSetting, model_of, started, trained

DEPTHS, WIDTHS = (2, 3, 4, 5, 6), (2, 3, 4)
VOCABULARIES = (4, 8, 16, 32)
N_CTX, WIDTH, HEADS, D_HEAD = 3, 8, 2, 4
RULES = {"f(x)": (None, None), "x + 0.35 f(x)": (1.0, 0.35)}
PAIRS = 20
MOST_POINTS = 20_000_000
SAMPLES = 10_000
KINDS, HIDDEN, LAYERS = ("relu", "gelu", "tanh"), (8, 32, 128), (2, 4)
INPUTS, NORMAL_SAMPLES = 16, 2**17
COLUMNS = "mean abs. exact cosine | mean abs. closure cosine | mean abs. error | largest error"


def normal(g: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Weights of variance 1 / columns."""
    return g.normal(size=(rows, columns)) / np.sqrt(columns)


def with_skip(layer, skip, scale):
    return layer if skip is None else tnsim.Residual(layer, skip, scale)


def stack(seed: int, depth: int, d: int, rule: str) -> tnsim.Model:
    """Bilinear layers of width d and rank 2 d."""
    g = np.random.default_rng(seed)
    layers = []
    for _ in range(depth):
        layer = tnsim.Bilinear(normal(g, 2 * d, d), normal(g, 2 * d, d), normal(g, d, 2 * d))
        layers.append(with_skip(layer, *RULES[rule]))
    return tnsim.Model(layers)


def language_model(seed: int, vocabulary: int, rule: str) -> tnsim.Model:
    """An embedding, two attention layers and an unembedding."""
    g = np.random.default_rng(seed)
    layers = [tnsim.Linear(g.normal(size=(WIDTH, vocabulary)))]
    for _ in range(2):
        rows = [normal(g, HEADS * D_HEAD, WIDTH) for _ in range(5)]
        attention = tnsim.Attention(*rows, normal(g, WIDTH, HEADS * D_HEAD), HEADS)
        layers.append(with_skip(attention, *RULES[rule]))
    return tnsim.Model([*layers, tnsim.Linear(normal(g, vocabulary, WIDTH))], n_ctx=N_CTX)


def errors(make, exact, closure) -> tuple[np.ndarray, np.ndarray]:
    """Exact cosines and the closure's, for models of seeds (0, 1), (2, 3), ..."""
    pairs = [(make(2 * n), make(2 * n + 1)) for n in range(PAIRS)]
    true = np.array([float(tnsim.similarity(a, b, exact)) for a, b in pairs])
    return true, np.array([float(tnsim.similarity(a, b, closure)) for a, b in pairs])


def cells(true: np.ndarray, found: np.ndarray) -> str:
    off = abs(found - true)
    return f"{abs(true).mean():.3f} | {abs(found).mean():.3f} | {off.mean():.3f} | {off.max():.3f}"


def vectors() -> list[str]:
    """A table with a row for every rule, depth and width that quadrature reaches."""
    lines = [f"| layer | depth | d | {COLUMNS} |", "|---|---|---|---|---|---|---|"]
    for rule in RULES:
        for depth in DEPTHS:
            for d in WIDTHS:
                if (2**depth + 1) ** d * PAIRS > MOST_POINTS:
                    continue
                found = errors(
                    lambda seed, depth=depth, d=d, rule=rule: stack(seed, depth, d, rule),
                    tnsim.Gaussian(),
                    tnsim.GaussianClosure(),
                )
                lines.append(f"| `{rule}` | {depth} | {d} | {cells(*found)} |")
                print(lines[-1], flush=True)
    return lines


def tokens() -> list[str]:
    """A table with a row for every rule and vocabulary, sampling beside the closure."""
    header = f"{COLUMNS} | mean abs. error of sampling | its standard error"
    lines = [f"| layer | vocabulary | {header} |", "|---|---|---|---|---|---|---|---|"]
    for rule in RULES:
        for vocabulary in VOCABULARIES:
            p = np.full(vocabulary, 1 / vocabulary)
            one_hot = tnsim.GaussianClosure(p, np.diag(p) - np.outer(p, p))
            make = lambda seed, v=vocabulary, r=rule: language_model(seed, v, r)  # noqa: E731
            true, found = errors(make, tnsim.Categorical(), one_hot)
            metric = tnsim.Categorical(samples=SAMPLES)
            drawn = [tnsim.similarity(make(2 * n), make(2 * n + 1), metric) for n in range(PAIRS)]
            off = np.mean([abs(value - exact) for value, exact in zip(drawn, true, strict=True)])
            error = np.mean([value.standard_error for value in drawn])
            row = f"{cells(true, found)} | {off:.4f} | {error:.4f}"
            lines.append(f"| `{rule}` | {vocabulary} | {row} |")
            print(lines[-1], flush=True)
    return lines


def activations() -> list[str]:
    """A table with a row for every activation, depth and width, random and trained."""
    lines = [
        "| activation | layers | width | random: cosine | error of the closure | trained: cosine | "
        "error of the closure | largest standard error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        for layers in LAYERS:
            for width in HIDDEN:
                lines.append(networks(kind, layers, width))
                print(lines[-1], flush=True)
    return lines


def networks(kind: str, layers: int, width: int) -> str:
    """The row of an activation, a depth and a width."""
    setting = ActivationsSetting(inputs=INPUTS, hidden=width, steps=500)
    keys = jax.random.split(jax.random.key(layers * width), 2)
    weights = started(keys[0], layers, setting)
    g = np.random.default_rng(0)
    moved = [(w + 0.3 * np.std(w) * g.normal(size=w.shape), b) for w, b in weights]
    learnt = [trained(kind, layers, key, setting) for key in keys]
    cells, errors = [], []
    for pair in ((weights, moved), learnt):
        a, b = (model_of(one, kind) for one in pair)
        metric = tnsim.Empirical.normal(np.zeros(INPUTS), None, NORMAL_SAMPLES)
        true = tnsim.similarity(a, b, metric)
        found = tnsim.similarity(a, b, tnsim.GaussianClosure())
        cells.append(f"{float(true):.3f} | {float(found) - float(true):+.3f}")
        errors.append(float(true.standard_error or 0.0))
    return f"| {kind} | {layers} | {width} | {' | '.join(cells)} | {max(errors):.5f} |"


PROTOCOL = f"""`python benchmarks/closure_error.py`: {PAIRS} pairs of random models per row, of
seeds (0, 1), (2, 3), ...; weights normal with variance 1 / columns (embeddings variance 1), no
biases, float64. A pair of random models has a cosine near 0: errors of about the size of the
cosines mean that the closure says nothing about the expectation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=("vectors", "tokens", "activations"))
    parser.add_argument("--one", nargs=3, metavar=("ACTIVATION", "LAYERS", "WIDTH"))
    args = parser.parse_args()
    if args.one:
        kind, layers, width = args.one
        print(networks(kind, int(layers), int(width)))
        return
    tables = {
        "vectors": ("Bilinear stacks of width d and rank 2 d under N(0, I)", vectors),
        "tokens": (
            f"Two attention layers over {N_CTX} uniform tokens, width {WIDTH}, {HEADS} heads",
            tokens,
        ),
        "activations": (f"Networks with activations under N(0, I), {INPUTS} inputs", activations),
    }
    text = ["# How good is the closure?", "", PROTOCOL]
    for part, (title, table) in tables.items():
        if args.part in (None, part):
            text += ["", f"## {title}", "", *table()]
    if args.out:
        args.out.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
