"""Cost by depth, measured. In: sizes. Out: rows of planned and measured cost, side by side in one process.

Protocol: weights are made once in the dtype of the computation; the first call compiles and is not
timed; a row is the median of `repeats` warm calls, tnsim and the hand-written recursion alternating.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.compare import similarity as verbs
from tnsim.engine import execution
from tnsim.errors import TooLarge
from tnsim.metrics.metric import TreeSymmetric
from tnsim.models.layers import Bilinear
from tnsim.models.model import Model
from tnsim.tensor_networks.closed_networks import networks

DEPTHS = (1, 2, 4, 8, 16, 32, 64)
UNROLL_UP_TO = 6


def random_stack(width: int, rank: int, depth: int, dtype: str, seed: int = 0) -> Model:
    """Bilinear layers of one size with normal weights scaled to keep activations of order one."""
    rng = np.random.default_rng(seed)

    def weight(rows: int, columns: int) -> np.ndarray:
        return (rng.normal(size=(rows, columns)) / np.sqrt(columns)).astype(dtype)

    return Model(
        [
            Bilinear(weight(rank, width), weight(rank, width), weight(width, rank))
            for _ in range(depth)
        ]
    )


def gram_step_multiplications(width: int, rank: int) -> int:
    """The paper's step (appendix A.2) for bra and ket of one size, with L G and R G formed once each."""
    return (
        2 * rank * width**2 + 4 * rank**2 * width + 2 * rank**2 + width * rank**2 + rank * width**2
    )


def hand_written(a: Model, b: Model) -> tuple[Any, Any]:
    """The paper's Gram recursion as one would write it in JAX: a jitted step, rescaled; (trace, log-scale)."""
    gram, log = jnp.eye(a.d_in, dtype=a.layers[0].left.dtype), 0.0
    for p, q in zip(a.layers, b.layers, strict=True):
        gram, scale = _gram_step(gram, p.left, p.right, p.down, q.left, q.right, q.down)
        log = 2 * log + scale
    return jnp.trace(gram), log


@jax.jit
def _gram_step(gram, left_a, right_a, down_a, left_b, right_b, down_b):
    left, right = left_a @ gram, right_a @ gram
    straight = (left @ left_b.T) * (right @ right_b.T)
    crossed = (left @ right_b.T) * (right @ left_b.T)
    gram = down_a @ ((straight + crossed) / 2) @ down_b.T
    scale = jnp.abs(gram).max()
    return gram / scale, jnp.log(scale)


def depth_rows(
    width: int, rank: int, depths: Sequence[int] = DEPTHS, dtype: str = "float64", repeats: int = 7
) -> Iterator[dict[str, Any]]:
    """One row per depth for `<A|B>` under `TreeSymmetric`; milliseconds and bytes in their names' units."""
    metric = TreeSymmetric()
    for depth in depths:
        a, b = (random_stack(width, rank, depth, dtype, seed) for seed in (0, 1))
        planned = verbs.plan(a, b, metric, dtype=dtype)

        def ours(a=a, b=b):
            return verbs.log_inner(a, b, metric, dtype=dtype)

        def theirs(a=a, b=b):
            with execution.precision():
                return jax.block_until_ready(hand_written(a, b))

        start = time.perf_counter()
        found = ours()
        first = time.perf_counter() - start
        trace, log = theirs()
        warm, hand = _alternate(ours, theirs, repeats)
        yield {
            "depth": depth,
            "multiplications": planned.multiplications,
            "paper_multiplications": depth * gram_step_multiplications(width, rank),
            "unrolled_multiplications": unrolled_cost(a, b) if depth <= UNROLL_UP_TO else None,
            "peak_bytes": planned.peak_bytes,
            "first_milliseconds": 1e3 * first,
            "milliseconds": 1e3 * warm,
            "hand_milliseconds": 1e3 * hand,
            "ratio": warm / hand,
            "log_difference": float(
                abs(found.log - (np.log(np.abs(np.float64(trace))) + np.float64(log)))
                / max(1.0, abs(found.log))
            ),
        }


def unrolled_cost(a: Model, b: Model) -> int | None:
    """Scalar multiplications of the unrolled closed network along cotengra's greedy path, None if it is too large."""
    try:
        ((_, network),) = networks(a, b, TreeSymmetric())
    except TooLarge:
        return None
    return int(network.contraction_cost(optimize="greedy", output_inds=()))


def _alternate(one: Callable, two: Callable, repeats: int) -> tuple[float, float]:
    """Medians of two functions called in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, record in zip((one, two), times, strict=True):
            start = time.perf_counter()
            function()
            record.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])
