"""What the rows of `run.py` time: models, plans and calls, and the figures of the past."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import sums

import tnsim
import tnsim.compare.request
from tnsim.cli.bench import hand_written, random_stack
from tnsim.engine.runtime.execution import precision, seconds_of, tier_in_use
from tnsim.engine.runtime.gradients import pulled_back

CLOSURE = tnsim.GaussianClosure()


class Planned(NamedTuple):
    """What a plan says: multiplications, bytes at once, seconds of the next call, and the tier."""

    multiplications: int
    peak_bytes: int | None = None
    seconds: float | None = None
    tier: str | None = None


@dataclass(frozen=True)
class Work:
    """What a row times.

    Attributes:
        plan: Plans the call, or says what it would take now if it has been planned.
        call: Returns when the result is there.
        beside: The same written by hand, called in turn with it.
    """

    plan: Callable[[], Planned]
    call: Callable[[], object]
    beside: Callable[[], object] | None = None


class Before(NamedTuple):
    """Seconds of the release before, on two cores: of a first call, of a warm one."""

    first: float | None = None
    warm: float | None = None


@dataclass(frozen=True)
class Row:
    """A row of the table: its work in any dtype, the dtype it has, the figures of the past."""

    work: Callable[[str], Work]
    dtype: str
    before: Before = Before()


def language_model(
    seed: int, n_ctx: int, width: int, vocabulary: int, heads: int, dtype: str = "float32"
) -> tnsim.Model:
    """Two residual attention layers with biases on queries and keys, between embeddings."""
    random = np.random.default_rng(seed)

    def block() -> tnsim.Residual:
        biases = [(0.1 * random.normal(size=width)).astype(dtype) for _ in range(4)]
        weights = [_matrix(random, dtype, width, width) for _ in range(6)]
        return tnsim.Residual(tnsim.Attention(*weights, heads, *biases), 1.0, 0.35)

    embedding = tnsim.Linear(_matrix(random, dtype, width, vocabulary))
    unembedding = tnsim.Linear(_matrix(random, dtype, vocabulary, width))
    return tnsim.Model([embedding, block(), block(), unembedding], n_ctx=n_ctx)


def stack(seed: int, dtype: str, depth: int, width: int, rank: int, outputs: int) -> tnsim.Model:
    """Bilinear layers in a row, without biases."""
    random = np.random.default_rng(seed)
    layers = []
    for output in [width] * (depth - 1) + [outputs]:
        shapes = (rank, width), (rank, width), (output, rank)
        layers.append(tnsim.Bilinear(*[_matrix(random, dtype, *shape) for shape in shapes]))
    return tnsim.Model(layers)


def _matrix(random: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    return (random.normal(size=shape) / math.sqrt(shape[-1])).astype(dtype)


def inner(models: list[tnsim.Model], metric: Any, dtype: str, beside: Any = None) -> Work:
    """One inner product of two models."""
    return Work(
        lambda: _planned(tnsim.plan(*models, metric, cosine=False, dtype=dtype)),
        lambda: tnsim.log_inner(*models, metric, dtype=dtype),
        beside,
    )


def similarity(models: list[tnsim.Model], metric: Any, dtype: str) -> Work:
    """A cosine: three inner products."""
    return Work(
        lambda: _planned(tnsim.plan(*models, metric, cosine=True, dtype=dtype)),
        lambda: tnsim.similarity(*models, metric, dtype=dtype),
    )


def _planned(estimate: tnsim.compare.request.Estimate) -> Planned:
    if estimate.contraction is not None:
        return _of_contraction(estimate.contraction)
    return Planned(estimate.multiplications, estimate.peak_bytes, estimate.seconds)


def _of_contraction(plan: Any) -> Planned:
    tier = tier_in_use()
    peak = plan.interpreted_bytes if tier == "interpret" else plan.peak_bytes
    return Planned(plan.multiplications, peak, seconds_of(plan), tier)


def cross_term(n_ctx: int) -> Callable[[str], Work]:
    """A cross term of two language models of the paper's size."""

    def work(dtype: str) -> Work:
        models = [language_model(seed, n_ctx, 256, 4096, 8, dtype) for seed in (0, 1)]
        return inner(models, CLOSURE, dtype)

    return work


def all_pairs(count: int) -> Callable[[str], Work]:
    """All pairs of language models of width 64, from models in memory to the labelled matrix."""

    def work(dtype: str) -> Work:
        models = [language_model(seed, 4, 64, 384, 4, dtype) for seed in range(count)]

        def plan() -> Planned:
            plan = tnsim.plan_pairwise(models, CLOSURE, dtype=dtype)
            assert plan.tiles is not None
            work, tier = plan.multiplications, plan.tiles.tier
            return Planned(work, plan.peak_bytes, plan.seconds, tier)

        return Work(plan, lambda: tnsim.pairwise(models, CLOSURE, dtype=dtype))

    return work


def one_attention(dtype: str) -> Work:
    """A cosine of two attention layers of width 64 with biases, exactly."""
    return similarity(_attention_layers(dtype), tnsim.Gaussian(), dtype)


def _attention_layers(dtype: str) -> list[tnsim.Model]:
    models = []
    for seed in (0, 1):
        attention = language_model(seed, 4, 64, 64, 8, dtype).layers[1].layer
        models.append(tnsim.Model([attention], n_ctx=4))
    return models


def one_gradient(dtype: str) -> Work:
    """The same cosine with its gradient with respect to the weights of both layers, in PyTorch."""
    import jax
    import torch

    numbers = _attention_layers(dtype)
    models = jax.tree.map(lambda x: torch.tensor(x, requires_grad=True), numbers)

    def plan() -> Planned:
        plan = tnsim.plan(*numbers, tnsim.Gaussian(), cosine=True, dtype=dtype).contraction
        assert plan is not None
        back = pulled_back(plan, frozenset(n for n in plan.shapes if n[1] == "."))
        work = plan.multiplications + back.multiplications
        return Planned(work, back.kept_bytes + back.own_bytes, tier=tier_in_use())

    def call() -> None:
        tnsim.torch.similarity(*models, dtype=dtype).backward()

    return Work(plan, call)


def recursion(dtype: str) -> Work:
    """Sixteen layers, beside the recursion written by hand, jitted as a whole."""
    import jax

    models = [random_stack(256, 512, 16, dtype, seed) for seed in (0, 1)]
    with precision():
        by_hand = hand_written(*models)

    def beside() -> object:
        with precision():
            return jax.block_until_ready(by_hand())

    return inner(models, tnsim.TreeSymmetric(), dtype, beside)


def exact(*sizes: int) -> Callable[[str], Work]:
    """One inner product under `Gaussian`, of stacks of depth, width, rank and outputs."""
    return lambda dtype: inner([stack(n, dtype, *sizes) for n in (0, 1)], tnsim.Gaussian(), dtype)


def cosine(metric: Any, *sizes: int) -> Callable[[str], Work]:
    """A cosine of stacks of depth, width, rank and outputs."""
    return lambda dtype: similarity([stack(n, dtype, *sizes) for n in (0, 1)], metric, dtype)


def sum_of_networks(what: str, width: int, tool: str) -> Callable[[str], Work]:
    """A sum of quimb networks, by one of the tools of `sums.py`."""

    def work(dtype: str) -> Work:
        a, b, networks = sums.SUMS[what](width)
        found = sums.TOOLS[tool](networks)
        expected = float(tnsim.inner(a, b))
        return Work(lambda: _of_sum(found.plan()), lambda: _checked(found.call(), expected))

    return work


def _of_sum(plan: Any) -> Planned:
    """A tool gives a plan of the engine's, or a number of multiplications alone."""
    return Planned(plan) if isinstance(plan, int) else _of_contraction(plan)


def _checked(value: float, expected: float) -> float:
    if abs(value / expected - 1) > 1e-9:
        raise SystemExit(f"{value} where {expected} was expected")
    return value


LANGUAGE = {
    "language model, cross term, n_ctx 4": Row(cross_term(4), "float32", Before(45, 3.3)),
    "language model, cross term, n_ctx 8": Row(cross_term(8), "float32", Before(72.5, 28.3)),
    "language model, cross term, n_ctx 16": Row(cross_term(16), "float32"),
    "all pairs of 15 language models of width 64": Row(all_pairs(15), "float32"),
    "one attention layer of width 64, a cosine": Row(one_attention, "float32", Before(15.2, 0.057)),
    "one attention layer of width 64, a gradient": Row(one_gradient, "float32"),
}
DEEP = {
    "depth 16, d=256, r=512": Row(recursion, "float64", Before(None, 0.214)),
    "exact depth 2, d=128, r=256, 10 outputs": Row(
        exact(2, 128, 256, 10), "float64", Before(8.76, 3.13)
    ),
    "exact depth 3, d=r=32, 10 outputs": Row(exact(3, 32, 32, 10), "float64", Before(50, 22)),
    "exact depth 3, d=r=32, 32 outputs": Row(exact(3, 32, 32, 32), "float64", Before(269, 55)),
    "exact depth 2, width 24, a cosine": Row(
        cosine(tnsim.Gaussian(), 2, 24, 24, 24), "float64", Before(41, 1.1)
    ),
    "tiny: depth 2, d=8, a cosine": Row(
        cosine(tnsim.TreeSymmetric(), 2, 8, 8, 8), "float64", Before(None, 1e-3)
    ),
}


def _sums() -> dict[str, Row]:
    """A row for every sum, width and tool, whose name ends with the tool's."""
    rows = {}
    sizes = [(sums.FEW, width) for width in (8, 16, 32)] + [(sums.MANY, 8), (sums.MANY, 16)]
    for what, width in sizes:
        for tool in sums.TOOLS:
            if what == sums.FEW or tool != sums.EACH:
                name = f"{what}, width {width}: {tool}"
                rows[name] = Row(sum_of_networks(what, width, tool), "float64")
    return rows


ROWS = LANGUAGE | DEEP | _sums()
