"""Attack the numbers: random models in every combination, held against exact arithmetic.

    python scripts/attack/cosines.py                     ten minutes, plans run by NumPy
    python scripts/attack/cosines.py --seconds 60 --seed 7
    python scripts/attack/cosines.py --compiled          plans compiled by XLA, as for users

A case is a pair of models of one kind of layer, at one depth and one scale, under one metric. Its
cosine is known exactly, and asked for in both dtypes along every route. Each number is counted:

    right     off by no more than its stated bound, no warning
    warned    off by no more than its stated bound, with a `PrecisionWarning`
    refused   no number: `ResultError`, no digit is left, or a cosine outside [-1, 1] is reported;
              inside a trace NaN
    wrong     off by more than the stated bound, or called zero: an error in tnsim
    raw       any other exception, or a warning of NumPy: an error in tnsim

The stated bound is the error that `engine.precision` attaches to a cosine. A number inside a JAX
trace carries none and is held to the bound of the same pair outside. A trace of float32 receives
weights that the caller rounded, which moves the cosine of models in a skewed basis: there both the
exact cosine and the bound are those of the rounded weights. `error` is the largest error
of the numbers counted as right, over eps times the degree of the polynomial. What is wrong or raw
goes to stderr with its seed, which `--case` repeats alone. Ends with status 1 where there is any.

Oracles: layer-wise recursions in 60 digits, rational polynomials, and rational cubature for
expectations; none of them knows of plans. Attention under a tree metric has no independent oracle:
there the two models are one function written in two ways, and the cosine is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

if __name__ == "__main__":
    # Nothing is read that an earlier version searched or compiled.
    kept = tempfile.TemporaryDirectory(prefix="tnsim-attack-", ignore_cleanup_errors=True)
    os.environ["TNSIM_CACHE_DIR"] = kept.name
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import oracles  # pyright: ignore[reportMissingImports]
import rational_oracle  # pyright: ignore[reportMissingImports]
import recursion_oracle  # pyright: ignore[reportMissingImports]
from jax.core import Tracer

import tnsim
from tnsim.all_pairs import preparation
from tnsim.compare import by_features, by_points
from tnsim.engine import precision
from tnsim.engine.runtime import execution

WIDTH = 2
DTYPES = {"float64": 2.0**-52, "float32": 2.0**-23}
COLUMNS = ("tried", "right", "warned", "refused", "wrong", "raw", "error / (eps n)")
ERRORS = ("wrong", "raw")
Rng = np.random.Generator
Layers = list[Any]
Depths = Mapping[str, tuple[int, ...]]


class Kind(NamedTuple):
    """How models of a kind are made.

    Args:
        layer: Draws one layer from WIDTH to WIDTH coordinates, with biases of a size.
        depths: Depths by the name of a metric.
        n_ctx: Positions, or None for vectors.
        width: Coordinates of a state.
    """

    layer: Callable[[Rng, float, int], Any]
    depths: Depths
    n_ctx: int | None = None
    width: int = WIDTH


def linear(rng: Rng, biases: float, d: int) -> tnsim.Linear:
    return tnsim.Linear(_matrix(rng, d, d), biases * rng.normal(size=d))


def bilinear(rng: Rng, biases: float, d: int) -> tnsim.Bilinear:
    hidden = d + 1
    matrices = _matrix(rng, hidden, d), _matrix(rng, hidden, d), _matrix(rng, d, hidden)
    return tnsim.Bilinear(*matrices, *(biases * rng.normal(size=len(x)) for x in matrices))


def residual(rng: Rng, biases: float, d: int) -> tnsim.Residual:
    skip, scale = 2.0 ** rng.integers(-3, 4, 2)
    return tnsim.Residual(bilinear(rng, biases, d), skip, scale)


def cubic(rng: Rng, biases: float, d: int) -> tnsim.Multilinear:
    hidden = d + 1
    legs = [_matrix(rng, hidden, d) for _ in range(3)]
    leg_biases = [biases * rng.normal(size=hidden) for _ in legs]
    return tnsim.Multilinear(legs, _matrix(rng, d, hidden), leg_biases, biases * rng.normal(size=d))


def attention(rng: Rng, biases: float, d: int) -> tnsim.Attention:
    fields: dict[str, Any] = {}
    for name in ("q1", "k1", "q2", "k2", "v", "o"):
        fields[name] = _matrix(rng, *((d, 2) if name == "o" else (2, d)))
        fields[f"{name}_bias"] = biases * rng.normal(size=len(fields[name]))
    return tnsim.Attention(**fields, n_heads=2, rope_base=None)


def _matrix(rng: Rng, rows: int, columns: int) -> np.ndarray:
    return rng.normal(size=(rows, columns)) / columns**0.5


LAYERWISE = (1, 2, 3, 5, 8, 12, 16)
DEEP: Depths = dict.fromkeys(("frobenius", "tree", "closure"), LAYERWISE) | {
    "symmetric": (1, 2),
    "gaussian": (1, 2),
}
CUBIC: Depths = {"frobenius": (1, 2, 4), "tree": (1, 2, 4), "symmetric": (1,), "gaussian": (1,)}
ATTENTION: Depths = dict.fromkeys(("frobenius", "tree", "closure", "gaussian"), (1,))
KINDS = {
    "linear": Kind(linear, {**DEEP, "gaussian": LAYERWISE, "symmetric": LAYERWISE}),
    "bilinear": Kind(bilinear, DEEP),
    "residual": Kind(residual, DEEP),
    "cubic": Kind(cubic, CUBIC),
    "bilinear, n_ctx 2": Kind(
        bilinear, dict.fromkeys(("frobenius", "tree", "closure"), LAYERWISE), 2
    ),
    "attention, n_ctx 2": Kind(attention, ATTENTION, 2, 1),
    "attention, n_ctx 3": Kind(attention, ATTENTION, 3, 1),
}
METRICS = ("frobenius", "tree", "symmetric", "closure", "gaussian")


def metric(name: str, rng: Rng, kind: Kind) -> Any:
    """A metric of a name; half of the Gaussian ones have a mean and a variance for each input."""
    if name in ("gaussian", "closure"):
        make = tnsim.Gaussian if name == "gaussian" else tnsim.GaussianClosure
        if rng.integers(2) and kind.n_ctx is None:
            # powers of four, whose roots the oracle has without rounding
            return make(rng.normal(size=kind.width), 4.0 ** rng.integers(-1, 2, kind.width))
        return make()
    plain = {
        "frobenius": tnsim.Frobenius,
        "tree": tnsim.TreeSymmetric,
        "symmetric": tnsim.Symmetric,
    }
    return plain[name]()


# ------------------------------------------------------------------------------------------ scales

SCALES = ("plain", "biases", "rows", "basis", "units", "all")
"""Ordinary weights; biases of 2^-40 to 2^40; rows of lognormal size; a hidden basis of condition 1
to 1e6; hidden units times powers of two from 2^-40 to 2^40; all of them at once."""


def model(kind: Kind, depth: int, scale: str, rng: Rng) -> tnsim.Model:
    """A model whose hidden states have the basis that they are drawn in.

    Where the basis is to be changed in the middle, and no bilinear layers lie there that may take
    the change in, two identities do.
    """
    biases = 2.0 ** rng.integers(-40, 41) if scale in ("biases", "all") else 1.0
    spread = rng.uniform(0.5, 3) if scale in ("rows", "all") else 0.0
    layers = [kind.layer(rng, biases, kind.width) for _ in range(depth)]
    layers = [_spread(layer, spread, rng) for layer in layers]
    if scale in ("basis", "all") and not _bilinear_in_the_middle(layers):
        identity = tnsim.Linear(np.eye(kind.width))
        layers[_middle(layers) : _middle(layers)] = [identity, identity]
    return tnsim.Model(layers, kind.n_ctx)


def _middle(layers: Layers) -> int:
    """Layers below the state that is given another basis."""
    return (len(layers) + 1) // 2


def _bilinear_in_the_middle(layers: Layers) -> bool:
    at = _middle(layers)
    return at < len(layers) and all(isinstance(x, tnsim.Bilinear) for x in layers[at - 1 : at + 1])


def _spread(layer: Any, spread: float, rng: Rng) -> Any:
    """Each row of each matrix times a lognormal number."""

    def times(x: Any) -> Any:
        if np.ndim(x) < 2:
            return x
        return x * np.exp(spread * rng.normal(size=(len(x), 1)))

    return jax.tree.map(times, layer) if spread else layer


def near(a: tnsim.Model, rng: Rng) -> tnsim.Model:
    """Every weight changed by a third of itself."""
    return jax.tree.map(lambda x: x * (1 + 0.3 * rng.normal(size=x.shape)) if np.ndim(x) else x, a)


def written_otherwise(a: tnsim.Model, scale: str, rng: Rng) -> tnsim.Model:
    """Nearly the same function with hidden units in other units, states in another basis."""
    layers = list(a.layers)
    if scale in ("units", "all"):
        layers = [_in_units(layer, rng) for layer in layers]
    if scale in ("basis", "all"):
        at = _middle(layers)
        layers[at - 1 : at + 1] = _in_basis(layers[at - 1], layers[at], rng)
    return tnsim.Model(layers, a.n_ctx)


def _in_basis(lower: Any, upper: Any, rng: Rng) -> Layers:
    """Two layers, linear or bilinear, with another basis between them."""
    width = lower.d_out
    first, second = (np.linalg.qr(rng.normal(size=(width, width)))[0] for _ in range(2))
    sizes = np.geomspace(1, 10 ** -rng.uniform(0, 6), width)
    basis, inverse = first * sizes @ second, second.T / sizes @ first.T
    if isinstance(lower, tnsim.Linear):
        return [tnsim.Linear(basis @ lower.weight), tnsim.Linear(upper.weight @ inverse)]
    below = basis @ lower.down, lower.left_bias, lower.right_bias, basis @ lower.down_bias
    above = upper.down, upper.left_bias, upper.right_bias, upper.down_bias
    return [
        tnsim.Bilinear(lower.left, lower.right, *below),
        tnsim.Bilinear(upper.left @ inverse, upper.right @ inverse, *above),
    ]


def _in_units(layer: Any, rng: Rng) -> Any:
    """Each hidden unit 2^k times as large, counted 2^-k times: the same function exactly."""
    if isinstance(layer, tnsim.Residual):
        return tnsim.Residual(_in_units(layer.layer, rng), layer.skip, layer.scale)
    fields = dict(vars(layer))
    reading, counting = {
        tnsim.Bilinear: ("left", "down"),
        tnsim.Multilinear: ("leg0", "down"),
        tnsim.Attention: ("v", "o"),
    }.get(type(layer), (None, None))
    if reading is None or counting is None:
        return layer
    powers = rng.integers(-40, 41, len(fields[reading]))
    fields[reading] = np.ldexp(fields[reading], powers[:, None])
    fields[f"{reading}_bias"] = np.ldexp(fields[f"{reading}_bias"], powers)
    fields[counting] = np.ldexp(fields[counting], -powers)
    if isinstance(layer, tnsim.Multilinear):
        legs, biases = ([fields[f"leg{n}{end}"] for n in range(3)] for end in ("", "_bias"))
        return tnsim.Multilinear(legs, fields["down"], biases, layer.down_bias)
    return type(layer)(**fields)


def rewritten_attention(a: tnsim.Model, rng: Rng) -> tnsim.Model:
    """The same function: heads in another order, their values and scores in other units."""
    layers = []
    for layer in a.layers:
        if not isinstance(layer, tnsim.Attention):
            layers.append(layer)
            continue
        fields = dict(vars(layer))
        order = rng.permutation(layer.n_heads)
        by_two = rng.integers(-40, 41, (2, layer.n_heads))
        for name, power in (("q1", by_two[0]), ("k1", -by_two[0]), ("v", by_two[1])):
            fields[name] = np.ldexp(fields[name], power[:, None])
            fields[f"{name}_bias"] = np.ldexp(fields[f"{name}_bias"], power)
        fields["o"] = np.ldexp(fields["o"], -by_two[1])[:, order]
        for name in ("q1", "k1", "q2", "k2", "v"):  # one row for each head
            fields[name], fields[f"{name}_bias"] = (
                fields[name][order],
                fields[f"{name}_bias"][order],
            )
        layers.append(type(layer)(**fields))
    return tnsim.Model(layers, a.n_ctx)


# ----------------------------------------------------------------------------------------- oracles


def exact_products(a: tnsim.Model, b: tnsim.Model, asked: Any) -> list[Any]:
    """The inner products AB, AA and BB in numbers of mpmath, or fractions."""
    pairs = (a, b), (a, a), (b, b)
    if isinstance(asked, tnsim.Symmetric):
        exact = [map(rational_oracle.exact, pair) for pair in pairs]
        return [oracles.dense_symmetric_product(*pair).sum() for pair in exact]
    if isinstance(asked, tnsim.Gaussian) or _attends(a):
        return _expectations(a, b, asked)
    return [recursion_oracle.inner(*pair, asked) for pair in pairs]


def _attends(a: tnsim.Model) -> bool:
    return any(isinstance(layer, tnsim.Attention) for layer in a.layers)


def _expectations(a: tnsim.Model, b: tnsim.Model, asked: Any) -> list[Any]:
    """By rational cubature, exact for polynomials; inputs are independent of one another."""
    positions = a.n_ctx or 1
    shape = positions, a.d_in
    mean = np.zeros(shape) if asked.mean is None else np.reshape(asked.mean, shape)
    cov = np.ones(shape) if asked.cov is None else np.reshape(asked.cov, shape)
    root = np.diag(np.sqrt(cov).ravel())

    class Function(NamedTuple):
        model: tnsim.Model

        @property
        def degree(self) -> int:
            return self.model.degree

        def __call__(self, x: np.ndarray) -> np.ndarray:
            return _forward(self.model, x if self.model.n_ctx else x[:, 0])

    return rational_oracle.products_of_sequences(Function(a), Function(b), mean, root)


def _forward(a: tnsim.Model, x: np.ndarray) -> np.ndarray:
    for layer in a.layers:
        x = rational_oracle.layer_forward(layer, x)
    return x


def cosine_of(products: Sequence[Any]) -> Any:
    """AB / sqrt(AA BB) in 60 digits."""
    with mpmath.workdps(recursion_oracle.DIGITS):
        ab, aa, bb = (recursion_oracle.real(np.array(x, object))[()] for x in products)
        return ab / mpmath.sqrt(aa * bb)


# ------------------------------------------------------------------------------------------ routes


class Found(NamedTuple):
    """What a route says: a cosine, the bound of its error, and whether it warned."""

    value: float
    bound: float
    warned: bool


def verb(a: tnsim.Model, b: tnsim.Model, asked: Any, dtype: str) -> Any:
    return tnsim.similarity(a, b, asked, dtype=dtype)


def products(a: tnsim.Model, b: tnsim.Model, asked: Any, dtype: str) -> Any:
    """From signs and logarithms of three inner products."""
    ab, aa, bb = (tnsim.log_inner(x, y, asked, dtype=dtype) for x, y in ((a, b), (a, a), (b, b)))
    if 0 in (aa.sign, bb.sign):
        raise tnsim.ModelError("an inner product with itself is 0")
    # The norms carry an error of their own, so their logarithms are told beside the product's.
    return float(ab.sign * np.exp(ab.log - (aa.log + bb.log) / 2))


def pairwise(a: tnsim.Model, b: tnsim.Model, asked: Any, dtype: str) -> Any:
    matrix: Any = tnsim.pairwise([a, b], asked, dtype=dtype).similarity.values
    return matrix[0, 1]


def traced(a: tnsim.Model, b: tnsim.Model, asked: Any, dtype: str) -> Any:
    with jax.enable_x64(dtype == "float64"):  # inside a trace the caller's setting rules
        stacks = (jax.tree.map(lambda x: jnp.asarray(x)[None], m) for m in (a, b))
        function = jax.vmap(lambda x, y: tnsim.similarity(x, y, asked, dtype=dtype))
        values: Any = function(*stacks)
        return float(values[0])


ROUTES = {
    "verb": verb,
    "log_inner": products,
    "pairwise, features": pairwise,
    "pairwise, plans": pairwise,
    "traced": traced,
}


@contextlib.contextmanager
def along(route: str) -> Iterator[None]:
    """Runs over all pairs take the named route, and exact deep metrics go by diagrams."""
    table = preparation.routes_of_run

    def forced(*arguments: Any) -> Any:
        name = "features" if route.endswith("features") else "contractions"
        routes = [one for one in table(*arguments) if one.name == name]
        if not routes:
            raise NotOffered
        return routes

    with (
        mock.patch.object(preparation, "routes_of_run", forced),
        mock.patch.object(by_points, "gaussian_points", lambda *arguments: None),
        mock.patch.object(by_features, "polynomials", lambda *arguments: None),
    ):
        yield


class NotOffered(Exception):
    """The models have no such route."""


def ask(route: str, *arguments: Any) -> Found:
    """One number, with the bound that `engine.precision` states of it."""
    bounds: list[float] = []
    cosine = precision.cosine

    def watched(*given: Any) -> Any:
        found = cosine(*given)
        if not isinstance(found.error, Tracer):
            error = np.asarray(found.error)
            bounds.append(float(error[0, -1] if error.ndim == 2 else error.max()))
        return found

    with (
        along(route),
        mock.patch.object(precision, "cosine", watched),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        value = float(ROUTES[route](*arguments))
    for warning in told:
        if not warning.category.__module__.startswith("tnsim."):
            raise warning.category(warning.message)
    is_warned = any(issubclass(one.category, tnsim.PrecisionWarning) for one in told)
    return Found(value, max(bounds, default=np.nan), is_warned)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Plans run by NumPy; a trace calls out to it, so that nothing but the trace is compiled."""
    run = execution.run

    def by_numpy(plan: Any, arrays: Any, tier: Any = "compile", over: Any = None) -> Any:
        over = over or {}
        if not any(isinstance(x, Tracer) for x in arrays.values()):
            read = {name: np.asarray(x) for name, x in arrays.items()}
            return run(plan, read, "interpret", over)

        def on_host(given: Any) -> Any:
            found = by_numpy(plan, given)
            return found.values, list(found.exponents.values())

        def lowered(given: Any) -> Any:
            found = run(plan, given, tier, over)
            return found.values, list(found.exponents.values())

        shapes = jax.eval_shape(lowered, dict(arrays))
        given = {name: arrays[name] for name in plan.shapes}
        values, exponents = jax.pure_callback(
            lambda x: jax.tree.map(lambda y, s: np.asarray(y, s.dtype), on_host(x), shapes),
            shapes,
            given,
            vmap_method="sequential",
        )
        return execution.Result(
            values, dict(zip(plan.scale_weights, exponents, strict=True)), plan.scale_weights
        )

    with (
        mock.patch.object(execution, "run", by_numpy),
        mock.patch.object(execution, "LONGEST", -1),
    ):
        yield


# ------------------------------------------------------------------------------------------ counts


class Case(NamedTuple):
    """A combination; every number of it is drawn from the seed."""

    kind: str
    metric: str
    scale: str
    seed: int


class Pair(NamedTuple):
    """Two models, a metric, and their exact cosine."""

    a: tnsim.Model
    b: tnsim.Model
    metric: Any
    true: Any
    depth: int

    def rounded(self) -> Pair:
        """The pair of models whose weights are those of a caller's float32 arrays."""

        def cast(x: Any) -> Any:
            return np.asarray(x, np.float32).astype(np.float64) if np.ndim(x) else x

        a, b = (jax.tree.map(cast, model) for model in (self.a, self.b))
        if _attends(a) and isinstance(self.metric, tnsim.Frobenius | tnsim.TreeSymmetric):
            return self._replace(a=a, b=b)  # rewritten by powers of two: still one function
        true = cosine_of(exact_products(a, b, self.metric))
        return self._replace(a=a, b=b, true=true)


def pair(case: Case) -> Pair:
    """What a case compares: near models, unrelated ones, or one function written in two ways."""
    kind = KINDS[case.kind]
    cell = [
        list(KINDS).index(case.kind),
        METRICS.index(case.metric),
        SCALES.index(case.scale),
    ]
    rng = np.random.default_rng([case.seed, *cell])
    depths = kind.depths[case.metric]
    depth = int(rng.choice(depths))
    asked = metric(case.metric, rng, kind)
    a = model(kind, depth, case.scale, rng)
    if _attends(a) and case.metric in ("frobenius", "tree"):
        return Pair(a, rewritten_attention(a, rng), asked, 1, depth)
    others = [near(a, rng), model(kind, depth, case.scale, rng)]
    if case.scale in ("basis", "units", "all"):
        others.append(a)
    b = written_otherwise(others[rng.integers(len(others))], case.scale, rng)
    return Pair(a, b, asked, cosine_of(exact_products(a, b, asked)), depth)


def outcomes(case: Case) -> Iterator[tuple[dict[str, str], str, float]]:
    """Of each dtype and route: where it is counted, what came out, its error over eps times n."""
    given = pair(case)
    degree = max(given.a.degree, given.b.degree)
    for dtype, eps in DTYPES.items():
        bound = np.nan
        for route in ROUTES:
            compared = given
            if route == "traced" and compared.depth > 3:
                continue  # tracing the forward passes of units takes seconds a layer
            if (route, dtype) == ("traced", "float32"):
                compared = given.rounded()
                with contextlib.suppress(tnsim.TnsimError):
                    bound = ask("verb", *compared[:3], dtype).bound
            where = case._asdict() | {"dtype": dtype, "route": route, "depth": str(compared.depth)}
            try:
                found = ask(route, compared.a, compared.b, compared.metric, dtype)
            except (NotOffered, tnsim.TooLarge):
                continue
            except tnsim.TnsimError as error:
                is_zero = isinstance(error, tnsim.ModelError)
                yield where, "wrong" if is_zero else "refused", 0.0
                _say(is_zero or not isinstance(error, tnsim.errors.ResultError), where, str(error))
                continue
            except Exception as error:
                yield where, "raw", 0.0
                traceback.print_exc()
                _say(True, where, repr(error))
                continue
            if route == "traced" and np.isnan(found.value):
                yield where, "refused", 0.0
                continue
            bound = found.bound if route == "verb" else bound
            stated = found.bound if np.isfinite(found.bound) else bound
            if np.isnan(stated):
                if route == "traced":
                    continue  # the pair is refused outside of the trace
                stated = precision.USELESS if found.warned else precision.VISIBLE
            error = abs(float(mpmath.mpf(found.value) - compared.true))
            name = "warned" if found.warned else "right"
            if not error <= stated:
                name = "wrong"
            _say(
                name == "wrong",
                where,
                f"{found.value} for {float(compared.true)}: off by {error:.2g}, not {stated:.2g}",
            )
            yield where, name, error / (eps * degree)


def _say(is_said: bool, where: dict[str, str], text: str) -> None:
    if is_said:
        print(*where.values(), "->", text[:300], file=sys.stderr, flush=True)


class Cell:
    """Counts of a row, and the worst error of what is right in it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.worst = 0.0

    def add(self, name: str, error: float) -> None:
        self.counts[name] += 1
        if name == "right":
            self.worst = max(self.worst, error)

    @property
    def row(self) -> str:
        counts = [f"{self.counts[name]:,}" for name in COLUMNS[1:-1]]
        return " | ".join([f"{sum(self.counts.values()):,}", *counts, f"{self.worst:.2g}"])


TABLES = (("kind", "metric"), ("dtype", "route"), ("scale", "dtype"), ("depth", "dtype"))


def show(cells: dict[tuple[str, ...], dict[tuple[str, ...], Cell]]) -> None:
    """The tables, each a view of all numbers."""
    for keys in TABLES:
        titles = ["layer kind" if key == "kind" else key for key in keys]
        print(f"\n| {' | '.join([*titles, *COLUMNS])} |\n|{'---|' * (len(keys) + len(COLUMNS))}")
        for key in sorted(cells[keys], key=lambda key: [_place(x) for x in key]):
            print(f"| {' | '.join(key)} | {cells[keys][key].row} |")
    print(f"\n| all | {cells[()][()].row} |")


def _place(value: str) -> tuple[int, Any]:
    """Where a value stands in its column."""
    order = [*KINDS, *METRICS, *DTYPES, *ROUTES, *SCALES]
    return (0, int(value)) if value.isdecimal() else (1, order.index(value))


def cases(seed: int) -> Iterator[Case]:
    """All combinations in a random order, again and again with other seeds."""
    rng = np.random.default_rng(seed)
    known = [
        (kind, name, scale)
        for kind, one in KINDS.items()
        for name in one.depths
        for scale in SCALES
        if (kind, scale) != ("linear", "units")  # there are no hidden units
    ]
    while True:
        for n in rng.permutation(len(known)):
            kind, name, scale = known[n]
            yield Case(kind, name, scale, seed)
        seed += 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Attack the numbers, and count the outcomes.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", action="store_true", help="run plans on XLA")
    parser.add_argument(
        "--case", nargs=4, metavar=("KIND", "METRIC", "SCALE", "SEED"), help="this case alone"
    )
    asked = parser.parse_args()
    drawn: Iterator[Case] = cases(asked.seed)
    if asked.case:
        kind, name, scale, seed = asked.case
        drawn = iter([Case(kind, name, scale, int(seed))])
    cells: dict[Any, dict[Any, Cell]] = defaultdict(lambda: defaultdict(Cell))
    end = time.monotonic() + asked.seconds
    with contextlib.nullcontext() if asked.compiled else interpreted():
        for case in drawn:
            for where, name, error in outcomes(case):
                for keys in ((), *TABLES):
                    cells[keys][tuple(where[key] for key in keys)].add(name, error)
            if time.monotonic() > end:
                break
    show(cells)
    return int(any(cells[()][()].counts[name] for name in ERRORS))


if __name__ == "__main__":
    sys.exit(main())
