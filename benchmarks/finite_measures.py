"""What forward passes cost: deep models of few inputs exactly, and token data.

    python benchmarks/finite_measures.py depth
    python benchmarks/finite_measures.py tokens [--sequences 500] [--models 30]
    python benchmarks/finite_measures.py enumeration

`depth`: one inner product under N(0, I) by Gauss-Hermite nodes, against inputs and width; planned
multiplications, and the time of the second call where it is short enough to be taken.
`tokens`: all pairs of language models over sequences of 32 tokens, a part measured.
`enumeration`: one cosine under `Categorical` of two attention layers, all sequences of 4 tokens:
causal models share beginnings, those that look ahead do not.
"""

import argparse
import time

import numpy as np

import tnsim

ROWS = [(4, d, width) for d in (2, 3, 4, 5, 6) for width in (16, 64)]
ROWS += [(6, d, width) for d in (2, 3, 4) for width in (16, 64)]
MOST = 3e10


def deep(seed: int, depth: int, d: int, width: int) -> tnsim.Model:
    g = np.random.default_rng(seed)
    layers, before = [], d
    for _ in range(depth):
        shapes = ((width, before), (width, before), (width, width))
        layers.append(tnsim.Bilinear(*(g.normal(size=s) / np.sqrt(s[1]) for s in shapes)))
        before = width
    return tnsim.Model(layers)


def depths() -> None:
    print("| depth | inputs | width and rank | points | multiplications | seconds |")
    print("|---|---|---|---|---|---|")
    for depth, d, width in ROWS:
        a, b = deep(0, depth, d, width), deep(1, depth, d, width)
        points = (2**depth + 1) ** d
        work = points * 2 * depth * 3 * width * width
        taken = "not run"
        if work < MOST:
            plan = tnsim.plan(a, b)
            assert plan.route == "quadrature", plan
            work = plan.multiplications
            tnsim.inner(a, b)
            start = time.perf_counter()
            tnsim.inner(a, b)
            taken = f"{time.perf_counter() - start:.3g}"
        print(f"| {depth} | {d} | {width} | {points:,} | {work:.2e} | {taken} |", flush=True)


def language_model(
    seed: int, vocabulary: int, width: int, heads: int, n_ctx: int, mask: str = "causal"
) -> tnsim.Model:
    g = np.random.default_rng(seed)
    normal = lambda rows, columns: g.normal(size=(rows, columns)) / np.sqrt(columns)  # noqa: E731
    layers = [tnsim.Linear(g.normal(size=(width, vocabulary)))]
    for _ in range(2):
        rows = [normal(width, width) for _ in range(5)]
        inner = tnsim.Attention(*rows, normal(width, width), heads, mask=mask)
        layers.append(tnsim.Residual(inner, 1, 0.35))
    return tnsim.Model([*layers, tnsim.Linear(normal(vocabulary, width))], n_ctx=n_ctx)


def tokens(sequences: int, count: int) -> None:
    models = [language_model(seed, 384, 64, 4, 32) for seed in range(count)]
    ids = np.random.default_rng(0).integers(0, 384, size=(sequences, 32))
    metric = tnsim.Empirical(ids)
    plan = tnsim.plan_pairwise(models, metric, dtype="float32")
    tnsim.pairwise(models, tnsim.Empirical(ids[:64]), dtype="float32")
    start = time.perf_counter()
    result = tnsim.pairwise(models, metric, dtype="float32")
    seconds = time.perf_counter() - start
    rate = count * sequences / seconds
    print(f"{count} models, {sequences} sequences of 32 tokens, float32: {seconds:.1f} s,")
    print(f"{rate:.0f} sequences x models a second, {plan.multiplications / seconds:.2e}")
    print(f"multiplications a second; 100,000 sequences: {count * 1e5 / rate / 60:.1f} min")
    print(f"mean standard error {float(result.standard_error.mean()):.4f}")


def enumeration() -> None:
    print("| vocabulary | sequences | mask | multiplications | seconds |")
    print("|---|---|---|---|---|")
    metric = tnsim.Categorical()
    for vocabulary in (16, 32):
        for mask in ("causal", "none"):
            a, b = (language_model(seed, vocabulary, 32, 4, 4, mask) for seed in (0, 1))
            plan = tnsim.plan(a, b, metric)
            tnsim.similarity(a, b, metric)
            start = time.perf_counter()
            tnsim.similarity(a, b, metric)
            taken = time.perf_counter() - start
            work = f"{plan.multiplications:.2e}"
            print(f"| {vocabulary} | {plan.points:,} | {mask} | {work} | {taken:.3g} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("depth", "tokens", "enumeration"))
    parser.add_argument("--sequences", type=int, default=500)
    parser.add_argument("--models", type=int, default=30)
    args = parser.parse_args()
    if args.part == "depth":
        depths()
    elif args.part == "enumeration":
        enumeration()
    else:
        tokens(args.sequences, args.models)


if __name__ == "__main__":
    main()
