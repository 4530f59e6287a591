"""Planned and measured cost by depth, as tables, JSON and pictures: the work of `tnsim bench`.

Protocol: weights are made once in the dtype of the computation; the first call compiles and is not
timed; a row is the median of `repeats` warm calls in a single process, tnsim and the hand-written
recursion alternating. The recursion is as fast as it can be written in JAX: one program for all
layers, on weights that lie on the device.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tnsim.cli.options import save_picture
from tnsim.compare import similarity as compared
from tnsim.compare.numbers import SignedLog
from tnsim.engine.runtime import execution
from tnsim.errors import TooLarge
from tnsim.files import json_object, replacing
from tnsim.metrics.metric import TreeSymmetric
from tnsim.models.layers import Bilinear
from tnsim.models.model import Model
from tnsim.tensor_networks.quimb_networks import networks

DEPTHS = (1, 2, 4, 8, 16, 32, 64)
UNROLL_UP_TO = 6  # an unrolled network has 2^depth input legs on each side
COLUMNS = (
    "depth",
    "multiplications",
    "of paper's",
    "unrolled",
    "peak MiB",
    "first ms",
    "warm ms",
    "by hand",
    "ratio",
)
JSON_FILE, PICTURE = "depth.json", "depth.png"
JSON = json_object("a measurement of tnsim bench", "rows")
TIMES = ("first_milliseconds", "milliseconds", "hand_milliseconds", "ratio")


def random_stack(width: int, rank: int, depth: int, dtype: str, seed: int = 0) -> Model:
    """A model of bilinear layers of equal size; its activations stay of order 1.

    Args:
        width: Inputs and outputs of every layer.
        rank: Hidden units of every layer.
        depth: Number of layers.
        dtype: Type of the weights.
        seed: Seed of the normal weights.

    Returns:
        The model, of degree 2^depth.

    Example:
        >>> random_stack(3, 4, 2, "float64").degree
        4
    """
    rng = np.random.default_rng(seed)

    def weight(rows: int, columns: int) -> np.ndarray:
        return (rng.normal(size=(rows, columns)) / np.sqrt(columns)).astype(dtype)

    layers: list[Bilinear] = []
    for _ in range(depth):
        layers.append(Bilinear(weight(rank, width), weight(rank, width), weight(width, rank)))
    return Model(layers)


def gram_step_multiplications(width: int, rank: int) -> int:
    """Scalar multiplications of a single step of the paper's recursion, bra and ket of equal size.

    Args:
        width: Inputs and outputs of the layer.
        rank: Hidden units of the layer.

    Returns:
        The count, with L G and R G formed once each.

    Example:
        >>> gram_step_multiplications(1, 1)
        10

    Source:
        Appendix A.2 of the paper.
    """
    half_products = 2 * rank * width**2  # L G, R G
    products = 4 * rank**2 * width  # L G L', R G R', L G R', R G L'
    hadamard = 2 * rank**2  # straight and crossed
    readouts = width * rank**2 + rank * width**2  # D (...) D'
    return half_products + products + hadamard + readouts


def hand_written(a: Model, b: Model) -> Callable[[], tuple[Array, Array]]:
    """The paper's Gram recursion written by hand in JAX: jitted as a whole, rescaled.

    Args:
        a: Model of bilinear layers in a row, without biases.
        b: Model of the same kind, depth and widths.

    Returns:
        A function without arguments, whose weights lie on the device. It gives (trace, log-scale),
        and the inner product under `TreeSymmetric` is trace * exp(log-scale).

    Example:
        >>> recursion = hand_written(*(random_stack(2, 2, 1, "float32", n) for n in (0, 1)))
        >>> trace, log = recursion()
        >>> trace.shape
        ()

    Source:
        Appendix A.2 of the paper: G' = D (L G L' * R G R' + L G R' * R G L') / 2 D'.
    """
    weights = jax.device_put([_matrices(model) for model in (a, b)])
    return partial(_recursion, *weights)


def _matrices(model: Model) -> list[tuple[Any, Any, Any]]:
    layers = cast(tuple[Bilinear, ...], model.layers)
    return [(layer.left, layer.right, layer.down) for layer in layers]


@jax.jit
def _recursion(a: list[tuple], b: list[tuple]) -> tuple[Array, Array]:
    first, _, _ = a[0]
    gram = jnp.eye(first.shape[1], dtype=first.dtype)
    log = jnp.zeros((), first.dtype)
    for (left_a, right_a, down_a), (left_b, right_b, down_b) in zip(a, b, strict=True):
        left, right = left_a @ gram, right_a @ gram
        straight = (left @ left_b.T) * (right @ right_b.T)
        crossed = (left @ right_b.T) * (right @ left_b.T)
        gram = down_a @ ((straight + crossed) / 2) @ down_b.T
        scale = jnp.abs(gram).max()
        gram, log = gram / scale, 2 * log + jnp.log(scale)
    return jnp.trace(gram), log


def depth_rows(
    width: int, rank: int, depths: Sequence[int] = DEPTHS, dtype: str = "float64", repeats: int = 7
) -> Iterator[dict[str, Any]]:
    """The cost of `<A|B>` under `TreeSymmetric` by depth.

    Args:
        width: Inputs and outputs of every layer.
        rank: Hidden units of every layer.
        depths: Numbers of layers.
        dtype: Precision of weights and computation.
        repeats: Number of warm calls, of which the median is taken.

    Yields:
        A row for each depth: counts, times and bytes in the units that their names state.

    Example, as text:
        for row in depth_rows(256, 512, depths=(1, 2)):
            print(row["depth"], row["milliseconds"])
    """
    for depth in depths:
        yield _depth_row(width, rank, depth, dtype, repeats)


def _depth_row(width: int, rank: int, depth: int, dtype: str, repeats: int) -> dict[str, Any]:
    metric = TreeSymmetric()
    a = random_stack(width, rank, depth, dtype, seed=0)
    b = random_stack(width, rank, depth, dtype, seed=1)
    planned = compared.plan(a, b, metric, dtype=dtype).contraction
    assert planned is not None  # a metric that joins legs has a plan of contractions

    def ours() -> SignedLog:
        return compared.log_inner(a, b, metric, dtype=dtype)

    with execution.precision():
        recursion = hand_written(a, b)

    def theirs() -> tuple[Any, Any]:
        with execution.precision():
            return jax.block_until_ready(recursion())

    start = time.perf_counter()
    inner = ours()
    first = time.perf_counter() - start
    trace, log = theirs()
    warm, hand = _alternate(ours, theirs, repeats)
    unrolled = None
    if depth <= UNROLL_UP_TO:
        unrolled = unrolled_cost(a, b)
    expected = float(np.log(np.abs(np.float64(trace))) + np.float64(log))
    return {
        "depth": depth,
        "multiplications": planned.multiplications,
        "paper_multiplications": depth * gram_step_multiplications(width, rank),
        "unrolled_multiplications": unrolled,
        "peak_bytes": planned.peak_bytes,
        "first_milliseconds": 1e3 * first,
        "milliseconds": 1e3 * warm,
        "hand_milliseconds": 1e3 * hand,
        "ratio": warm / hand,
        "log_difference": float(abs(inner.log - expected) / max(1.0, abs(inner.log))),
    }


def unrolled_cost(a: Model, b: Model) -> int | None:
    """The cost of the unrolled closed network along cotengra's greedy path.

    Args:
        a: Model of bilinear layers in a row.
        b: Model of the same kind.

    Returns:
        Scalar multiplications, None where the network is too large.

    Example, as text:
        unrolled_cost(random_stack(2, 2, 1, "float64"), random_stack(2, 2, 1, "float64"))
    """
    try:
        ((_, network),) = networks(a, b, TreeSymmetric())
    except TooLarge:
        return None
    return int(network.contraction_cost(optimize="greedy", output_inds=()))


def _alternate(one: Callable[[], Any], two: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """The median times of two functions that are called in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, record in zip((one, two), times, strict=True):
            start = time.perf_counter()
            function()
            record.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts of a row of `depth_rows`, one for each of `COLUMNS`."""
    ours = row["multiplications"]
    unrolled = "-"
    if row["unrolled_multiplications"]:
        unrolled = f"{row['unrolled_multiplications'] / ours:.2f}x"
    return (
        str(row["depth"]),
        f"{ours:,}",
        f"{ours / row['paper_multiplications']:.2f}x",
        unrolled,
        f"{row['peak_bytes'] / 2**20:.1f}",
        *(f"{row[name]:.2f}" for name in TIMES),
    )


def line(texts: tuple[str, ...]) -> str:
    """A line of the table, each cell as wide as the name of its column, or nine characters."""
    widths = [max(9, len(name) + 1) for name in COLUMNS]
    return " ".join(f"{cell:>{width}}" for cell, width in zip(texts, widths, strict=True))


def write(result: Mapping[str, Any], out: Path) -> None:
    """Write a measurement to a folder, as JSON and as a picture."""
    from tnsim.analysis import figures

    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / JSON_FILE, JSON) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
    sizes = f"width {result['width']}, rank {result['rank']}, {result['dtype']}"
    figure = figures.depth(result["rows"], f"<A|B> under TreeSymmetric, {sizes}")
    save_picture(figure, out / PICTURE)
