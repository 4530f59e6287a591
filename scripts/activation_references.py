"""Reference values of E f(u) g(v) to 24 digits, by panels and trapezoidal sums in mpmath.

    python scripts/activation_references.py tests/activations/references.json

With two numbers behind it, PART and PARTS, the script computes every PARTS-th pair of activations.

One integral over u = m + s z, split at kinks and where g's conditional mean turns; that mean is a
closed form of one normal variable, or a second sum where g has none.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from mpmath import mp, mpf

mp.dps = 30
ENDS = 13
POINTS, WEIGHTS = [], []


def legendre(count):
    """Gauss-Legendre nodes and weights on [0, 1] by Newton's method."""
    for guess in np.polynomial.legendre.leggauss(count)[0]:
        x = mpf(float(guess))
        for _ in range(4):
            x -= mp.legendre(count, x) / slope(count, x)
        POINTS.append((x + 1) / 2)
        WEIGHTS.append(1 / ((1 - x * x) * slope(count, x) ** 2))


def slope(count, x):
    return count * (x * mp.legendre(count, x) - mp.legendre(count - 1, x)) / (x * x - 1)


def density(x):
    return mp.exp(-x * x / 2) / mp.sqrt(2 * mp.pi)


def cut_moments(mean, deviation, knot, most):
    """E (v - knot)_+^p, p = 0 .. most."""
    y = mean - knot
    if deviation == 0:
        return [(y**p if y > 0 else mpf(0)) for p in range(most + 1)]
    moments = [mp.ncdf(y / deviation)]
    for p in range(most):
        rest = deviation * density(y / deviation) if p == 0 else p * deviation**2 * moments[p - 1]
        moments.append(y * moments[p] + rest)
    return moments


def kinked(first, *kinks):
    """A polynomial of degree 2 and sum of w (u - t)_+^p, as a function and its mean."""

    def value(u):
        total = sum(c * u**p for p, c in enumerate(first))
        return total + sum(w * (u - t) ** p for t, p, w in kinks if u > t)

    def mean(m, s):
        total = sum(c * x for c, x in zip(first, (1, m, m * m + s * s), strict=False))
        return total + sum(w * cut_moments(m, s, t, p)[p] for t, p, w in kinks)

    return value, mean, [t for t, *_ in kinks], 0, None


def elu_mean(m, s):
    tail = mp.exp(m + s * s / 2) * mp.ncdf(-(m + s * s) / s) if s else (mp.exp(m) if m < 0 else 0)
    below = mp.ncdf(-m / s) if s else (1 if m <= 0 else 0)
    return cut_moments(m, s, 0, 1)[1] + tail - below


def gelu_mean(m, s):
    total = mp.sqrt(1 + s * s)
    return m * mp.ncdf(m / total) + s * s / total * density(m / total)


def tanh_gelu(u):
    return u / (1 + mp.exp(-2 * mp.sqrt(2 / mp.pi) * (u + mpf("0.044715") * u**3)))


def sigmoid(u):
    return 1 / (1 + mp.exp(-u)) if u > 0 else mp.exp(u) / (1 + mp.exp(u))


HALF, SIXTH = mpf(1) / 2, mpf(1) / 6
FUNCTIONS = {  # function, mean under a normal law, kinks, width of a smooth gate, strip
    "relu": kinked((0,), (0, 1, 1)),
    "leaky_relu": kinked((0, mpf(0.01)), (0, 1, 1 - mpf(0.01))),
    "relu2": kinked((0,), (0, 2, 1)),
    "relu6": kinked((0,), (0, 1, 1), (6, 1, -1)),
    "hardtanh": kinked((-1,), (-1, 1, 1), (1, 1, -1)),
    "hardswish": kinked((0,), (-3, 2, SIXTH), (-3, 1, -HALF), (3, 2, -SIXTH), (3, 1, -HALF)),
    "abs": kinked((0, -1), (0, 1, 2)),
    "step": kinked((0,), (0, 0, 1)),
    "square": kinked((0, 0, 1)),
    "identity": kinked((0, 1)),
    "elu": (lambda u: u if u > 0 else mp.expm1(u), elu_mean, [0], 0, 8),
    "gelu": (lambda u: u * mp.ncdf(u), gelu_mean, [], 1, 2),
    "erf": (mp.erf, lambda m, s: 2 * mp.ncdf(m / mp.sqrt(s * s + HALF)) - 1, [], 0.7, 2),
    "sin": (mp.sin, lambda m, s: mp.exp(-s * s / 2) * mp.sin(m), [], 1, 3),
    "tanh": (mp.tanh, None, [], 0, 1.5),
    "sigmoid": (sigmoid, None, [], 0, 3),
    "silu": (lambda u: u * sigmoid(u), None, [], 0, 3),
    "softplus": (lambda u: max(u, 0) + mp.log1p(mp.exp(-abs(u))), None, [], 0, 3),
    "gelu_tanh": (tanh_gelu, None, [], 0, 2),
    "mish": (lambda u: u * (1 - 2 / (1 + (1 + mp.exp(u)) ** 2)), None, [], 0, 2.3),
    "tanhshrink": (lambda u: u - mp.tanh(u), None, [], 0, 1.5),
    "gelu + 0.5 u": (
        lambda u: u * (mp.ncdf(u) + HALF),
        lambda m, s: gelu_mean(m, s) + m / 2,
        [],
        1,
        2,
    ),
}
LATER = ("mish", "tanhshrink", "gelu + 0.5 u")  # behind the other pairs, which keep their numbers


def inner_mean(g, mean, deviation):
    """E g(v) by a trapezoidal sum of 26 digits."""
    if g[1]:
        return g[1](mean, deviation)
    if deviation == 0:
        return g[0](mean)
    y = min(g[4] / deviation, mpf(11))
    step = 2 * mp.pi * y / (60 + y * y / 2)
    count = int(mp.ceil(11 / step))
    return step * sum(
        density(i * step) * g[0](mean + deviation * i * step) for i in range(-count, count + 1)
    )


def reference(f, g, m, s, n, t, sign, gap):
    """E f(u) g(v) with correlation sign (1 - gap)."""
    f, g = FUNCTIONS[f], FUNCTIONS[g]
    m, s, n, t, gap = map(mpf, (m, s, n, t, gap))
    rho, bar = sign * (1 - gap), mp.sqrt(gap * (2 - gap))
    ends = {mpf(-ENDS), mpf(ENDS)} | {(k - m) / s for k in f[2]}
    longest = min(mpf(1), mpf(f[4] or 8) / s, mpf(g[4] or 8) / max(t * abs(rho), mpf("1e-30")))
    for knot in (g[2] or [0]) if g[3] == 0 and g[1] else []:
        if rho:
            centre, width = (knot - n) / (t * rho), max(bar / abs(rho), mpf("1e-26"))
            ends.add(centre)
            while width < 2 * ENDS:
                ends |= {centre - width, centre + width}
                width *= 2
    return panels(
        lambda z: f[0](m + s * z) * inner_mean(g, n + t * rho * z, t * bar), ends, longest
    )


def norm(f, m, s):
    """sqrt(E f(u)^2)."""
    f, m, s = FUNCTIONS[f], mpf(m), mpf(s)
    ends = {mpf(-ENDS), mpf(ENDS)} | {(k - m) / s for k in f[2]}
    return mp.sqrt(panels(lambda z: f[0](m + s * z) ** 2, ends, min(mpf(1), mpf(f[4] or 8) / s)))


def panels(function, ends, longest):
    """E function(z) over Gauss-Legendre panels between ends."""
    ends = sorted(x for x in ends if abs(x) <= ENDS)
    total = mpf(0)
    for low, high in pairwise(ends):
        count = max(1, int(mp.ceil((high - low) / longest)))
        length = (high - low) / count
        for i in range(count):
            if low + i * length > 11 or low + (i + 1) * length < -11:
                continue
            for x, w in zip(POINTS, WEIGHTS, strict=True):
                z = low + (i + x) * length
                total += w * length * density(z) * function(z)
    return total


def cases(f, g, count, seed):
    """Parameters at the edges: means to 10 deviations, scales, nearly equal units."""
    generator = np.random.default_rng(seed)
    dear = sum(FUNCTIONS[x][1] is None for x in (f, g))
    gaps = (1.0, 1 - 1e-9, 0.1, 0.01, 1e-4, 1e-8, 1e-12, 0.0)
    for i in range(count):
        gap = gaps[i % len(gaps)]
        top = 60.0 if not dear else 12.0 if gap < 1e-3 and dear < 2 else 2.0
        s, t = np.exp(generator.uniform(np.log(0.05), np.log(top), 2))
        reach = 10.0 if i % 3 == 2 else 2.0
        m, n = generator.uniform(-reach, reach, 2) * (s, t)
        sign = 1 if i % 2 == 0 or gap == 1.0 else -1
        if i % 4 == 0:  # nearly equal units
            n, t = m * (1 + 1e-9), s * (1 - 1e-10)
        yield [float(x) for x in (m, s, n, t, sign, gap)]


def main(path, part, parts):
    legendre(24)
    smooth = [x for x in FUNCTIONS if FUNCTIONS[x][1] is None]
    own = [(x, x, 4 if x in smooth else 8) for x in FUNCTIONS]
    pairs = [pair for pair in own if pair[0] not in LATER]
    pairs += [("tanh", "relu", 4), ("silu", "gelu", 4), ("relu2", "gelu", 6), ("elu", "step", 6)]
    pairs += [("sin", "relu", 4), ("square", "tanh", 4), ("gelu_tanh", "hardtanh", 4)]
    pairs += [pair for pair in own if pair[0] in LATER]
    pairs += [("mish", "relu", 4), ("tanhshrink", "gelu", 4), ("gelu + 0.5 u", "step", 4)]
    table = []
    for seed, (f, g, count) in list(enumerate(pairs))[part::parts]:
        if FUNCTIONS[g][1] is None and FUNCTIONS[f][1]:
            f, g = g, f
        for law in cases(f, g, count, seed):
            m, s, n, t, sign, gap = law
            norms = [float(norm(f, m, s)), float(norm(g, n, t))]
            value = float(reference(f, g, m, s, n, t, sign, gap))
            table.append({"f": f, "g": g, "law": law, "value": value, "norms": norms})
        print(f, g, flush=True)
        Path(path).write_text("[\n" + ",\n".join(map(json.dumps, table)) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:] or (0, 1)))
