"""Attack the bounds of kernels: random pairs of hidden units, held against dense quadrature.

    python scripts/attack/kernels.py                  10,000 pairs, some minutes
    python scripts/attack/kernels.py --pairs 800 --seed 7

A kernel E f(u) g(v) comes with a bound of its error, entry by entry. Pairs of activations are drawn
at random, and for each a block of 400 pairs of units: deviations from .05 to 60 (sines to 4), means
up to 10 deviations, correlations of all sizes, and pairs at correlations 1 - 10^-2 to 1 - 10^-14
and 1, of either sign. The oracle is a sum over nodes of Gauss-Legendre panels in both variables.
Panels end at kinks and shorten geometrically towards places where a function turns, so that the sum
is exact to the rounding of its own addition, 16 eps of the norms. It knows no series, no closed
form and no Hermite coefficient.

A row of the table has the worst error over bound of an activation, met by any partner, and the
worst error over the norms of the pair. Ends with status 1 where an error exceeds its bound.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from tnsim.activations.activation import ACTIVATIONS, activation
from tnsim.activations.kernels import NormalInputs, kernel

NODES, WEIGHTS = np.polynomial.legendre.leggauss(20)
REACH = 9.5  # 1e-20 of the mass of a standard normal variable lies beyond
SIDE = 20  # units of either layer in a block
KINKS = {"relu6": (0.0, 6.0), "hardtanh": (-1.0, 1.0), "hardswish": (-3.0, 3.0)}
KINKED = ("relu", "leaky_relu", "relu2", "abs", "step", "elu")
EPS = float(np.finfo(np.float64).eps)


def kinks_of(name: str) -> tuple[float, ...]:
    """Places where an activation or a derivative jumps."""
    return KINKS.get(name, (0.0,) if name in KINKED else ())


def around(place: Any, width: Any) -> list[Any]:
    """Ends of panels that shorten towards a place, down to a width."""
    most = int(np.ceil(np.log(4 * REACH / max(np.min(width), 1e-17)) / np.log(3))) + 1
    lengths = [0.5 * width * 3.0**k for k in range(max(most, 1))]
    return [place, *(place + x for x in lengths), *(place - x for x in lengths)]


def panels(ends: list[Any], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and normal weights of panels between given ends, (rows, nodes)."""
    regular = np.arange(-REACH, REACH + 0.1, 1.9)
    every = [np.broadcast_to(x, rows) for x in (*ends, *regular)]
    places = np.sort(np.clip(np.stack(every, 1), -REACH, REACH), 1)
    lengths = np.diff(places, axis=1)[:, :, None]
    at = (places[:, :-1, None] + 0.5 * lengths * (NODES + 1)).reshape(rows, -1)
    weights = (0.5 * lengths * WEIGHTS).reshape(rows, -1)
    return at, weights * np.exp(-0.5 * at**2) / np.sqrt(2 * np.pi)


def turns(name: str, mean: Any, deviation: float) -> list[Any]:
    """Ends of panels in z where f(mean + deviation z) turns."""
    if deviation == 0:
        return []
    kinks = kinks_of(name)
    if kinks and name != "elu":  # which is no polynomial beside its kink
        return [(kink - mean) / deviation for kink in kinks]
    return around(-mean / deviation, 1 / deviation)


def expected(f: str, g: str, law: tuple[float, ...]) -> tuple[float, float]:
    """E f(u) g(v) and E |f(u) g(v)| for u = m + s z and v = n + slope z + rest y."""
    m, s, n, slope, rest = law
    ends = turns(f, m, s)
    if slope:
        for kink in kinks_of(g) or (0.0,):
            width = rest if kinks_of(g) else np.hypot(rest, 1.0)
            ends += around((kink - n) / slope, abs(width / slope))
    (x,), (weight,) = panels(ends, 1)
    alive = weight > 0
    x, weight = x[alive], weight[alive]
    left, centre = weight * activation(f)(m + s * x), n + slope * x
    if rest == 0:
        values = left * activation(g)(centre)
        return float(values.sum()), float(abs(values).sum())
    y, inner = panels(turns(g, centre, rest), len(x))
    values = inner * activation(g)(centre[:, None] + rest * y)
    return float(left @ values.sum(1)), float(abs(left) @ abs(values).sum(1))


def block(generator: np.random.Generator, f: str, g: str) -> tuple[NormalInputs, NormalInputs, Any]:
    """Units of two layers of which pair (i, i) is nearly or exactly parallel, and its distance."""
    most = [np.log(4.0 if name == "sin" else 60.0) for name in (f, g)]
    units = []
    directions = generator.normal(size=(SIDE, 3))
    apart = np.append(10.0 ** -generator.uniform(1, 7, SIDE - 4), [0.0] * 4)
    other = directions + apart[:, None] * generator.normal(size=(SIDE, 3))
    signs = generator.choice([-1.0, 1.0], (SIDE, 1))
    for rows, top in zip((directions, signs * other), most, strict=True):
        deviations = np.exp(generator.uniform(np.log(0.05), top, SIDE))
        means = deviations * generator.uniform(-10, 10, SIDE) * generator.uniform(size=SIDE) ** 2
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        units.append(NormalInputs(means, deviations[:, None] * unit))
    return units[0], units[1], apart


def law_of(left: NormalInputs, right: NormalInputs, i: int, j: int) -> tuple[float, ...]:
    """Means, deviations and slope of a pair, with the digits of what is left beside the slope."""
    row, other = left.rows[i].astype(np.longdouble), right.rows[j].astype(np.longdouble)
    s = np.sqrt(row @ row)
    slope = (row @ other) / s
    beside = other - slope * row / s
    rest = np.sqrt(beside @ beside)
    rest = 0.0 if rest < 1e-17 * abs(slope) else rest
    return tuple(float(x) for x in (left.mean[i], s, right.mean[j], slope, rest))


def attack(pairs: int, seed: int, told: Callable[[str], None] = print) -> bool:
    """Compare kernels of random pairs with the oracle, and print a table; whether a bound broke."""
    generator = np.random.default_rng(seed)
    names = sorted(set(ACTIVATIONS) - {"square", "identity"})
    worst: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    broken = []
    for number in range(max(1, pairs // SIDE**2)):
        f = names[number % len(names)]
        g = f if number % 2 else str(generator.choice(names))
        left, right, _ = block(generator, f, g)
        found = kernel(f, g, left, right)
        for i in range(SIDE):
            for j in range(SIDE):
                law = law_of(left, right, i, j)
                value, size = expected(f, g, law)
                error = abs(found.values[i, j] - value)
                bound = found.bound[i, j] + 16 * EPS * size
                norms = max(float(found.sizes[i] * found.other_sizes[j]), 1e-300)
                for name in {f, g}:
                    row = worst[name]
                    row[0] += 1
                    row[1] = max(row[1], error / bound)
                    row[2] = max(row[2], error / norms) if size > 1e-3 * bound / EPS else row[2]
                if not error <= bound:
                    broken.append((f, g, law, found.values[i, j], value, bound))
    told("| activation | pairs | worst error / bound | worst error / norms, live units |")
    told("|---|---|---|---|")
    for name, (count, share, relative) in sorted(worst.items()):
        told(f"| {name} | {count:.0f} | {share:.2f} | {relative:.1e} |")
    for case in broken[:20]:
        print("wrong", *case, file=sys.stderr)
    told(f"{len(broken)} errors beyond their bound")
    return bool(broken)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.exit(attack(options.pairs, options.seed))


if __name__ == "__main__":
    main()
