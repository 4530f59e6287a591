"""The cosine of the outputs of two functions on inputs, with gradients by autograd.

With `F_a = sqrt(w_i) a(x_i)` over all inputs, positions and outputs, the cosine is
`F_a . F_b / (|F_a| |F_b|)`, see `problems.at_points`. Modules and functions of PyTorch run in their
own precision and on their own device, as a part of the autograd graph. Models run in JAX; models
with moving weights run once more on the way back. Inputs pass in batches, of which autograd keeps
the values inside of modules that have a gradient, and the outputs of the other side beside them.

Without means the outputs of both sides are less their means as numbers, of which autograd records
nothing. The means `r` of what is left are 0, but their derivatives are not: with P positions
`<a|b> - P r_a . r_b` has all derivatives of the inner product without means, and loses no digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Float

from tnsim.compare import numbers as numbers_of
from tnsim.compare.by_points import AtPoints, points_of
from tnsim.compare.centred import Mean, mean_of, without
from tnsim.compare.request import (
    InnerProducts,
    Question,
    Request,
    check_comparison,
    summands,
)
from tnsim.engine.runtime import execution
from tnsim.errors import TnsimError
from tnsim.metrics.points import WeightedPoints
from tnsim.models.arrays import host_array, numbers, requires_grad
from tnsim.models.checks import check_untraced
from tnsim.models.functions import (
    ALONE,
    array_at,
    check_rows_alone,
    in_rows,
    is_function,
    outputs_of,
)
from tnsim.models.model import Model, with_dense_matrices
from tnsim.problems.at_points import (
    Sums,
    check_shapes,
    traced_vector,
    vectors_of,
    with_cancellation,
)
from tnsim.problems.batches import batch_size
from tnsim.scaled import ScaledSum, taken
from tnsim.torch.autograd import WithPullback, of_jax, to_jax

Vector: TypeAlias = Float[torch.Tensor, "out features"]
"""Outputs of a function on a batch, float64, a part of the autograd graph."""
Run: TypeAlias = Callable[[WeightedPoints, int], tuple[Vector, float, float]]
"""A function of a batch and of the number of its first input: a vector in a unit, the exponent of
the unit, and the sum of the lengths of the terms of a sum of models by the length of the sum."""


def compared_on_inputs(a: Any, b: Any, request: Request) -> torch.Tensor:
    """The cosine of two functions, of which a side at least is no model, see
    `tnsim.torch.similarity`.

    Args:
        a: A plain function, a module, a model or a combination of models.
        b: The other function, module, model or combination.
        request: An `Empirical` metric, the precision of the forward passes of models, limits on
            work and memory, and whether means over the inputs are left out.

    Returns:
        A tensor of no axes, float64.

    Raises:
        ModelError: The functions do not read the inputs, differ in the shape of their outputs, or
            are zero.
        TooLarge: The forward passes of models are over the budget.
        TnsimError: Outputs, or sums of their products, are not finite.
    """
    check_untraced("tnsim.torch.similarity", a, b, request.metric)
    one = _numbers(a)
    two = one if b is a else _numbers(b)
    check_comparison(one, two, request.metric)
    first = _Side(a, one, request)
    second = first if b is a else _Side(b, two, request)
    (product, *norms), products = _inner_products(first, second, request)
    # The errors and warnings are those of `tnsim.similarity`, and so is the number.
    value = float(numbers_of.cosine(products, (first.fixed, second.fixed), request))
    cosine = product / (norms[0].sqrt() * norms[1].sqrt())
    return cosine + (value - cosine.detach())


def _inner_products(
    a: _Side, b: _Side, request: Request
) -> tuple[list[torch.Tensor], InnerProducts]:
    """AB, AA and BB in the graph of autograd, in the units of both sides, and as numbers."""
    terms = [summands(one.fixed) for one in (a, b)]
    known = [part for one in terms for _, part in one]
    models = tuple(part for part in known if isinstance(part, Model))
    points = points_of(models, request.metric)
    assert points is not None  # Empirical always has points
    question = Question(models, request.metric, request.pairs, request.slices, request.dtype)
    passes = AtPoints(question, points)
    passes.check(passes.estimate(), request.budget)
    size = batch_size(known, points, points.count, request.dtype, request.budget)
    # Models run first: their messages about inputs that do not fit tell the most.
    sides = sorted(dict.fromkeys((a, b)), key=lambda side: side.is_function)
    products, sizes, means = [], [], []
    for start in range(0, points.count, size):
        batch = points.block(start, min(start + size, points.count))
        rows = {side: side.at(batch, start) for side in sides}
        (one, size_of_one), (two, size_of_two) = rows[a], rows[b]
        check_shapes([one.shape, two.shape], len(batch.log_weights))
        products.append(_products(one, two))
        sizes.append((size_of_one * size_of_two, size_of_one**2, size_of_two**2))
        if request.centred:
            means.append([_mean(values, batch) for values in (one, two)])
    sums = torch.stack(products).sum(dim=0)
    if request.centred:
        sums = sums - _products(
            *(torch.stack(each).sum(dim=0) for each in zip(*means, strict=True))
        )
    sums = list(sums)
    if not all(torch.isfinite(value) for value in sums):
        raise TnsimError(
            "the squared outputs on some inputs are beyond float64, relative to outputs on the "
            "inputs before: a function gives outputs that differ by more than 1e150; divide them"
        )
    shapes = (1, 1, 1), (1, 1), (1, 1)  # groups, rows, columns
    ab, aa, bb = (
        ScaledSum(np.full(shape, value.item()), np.zeros(shape), np.full(shape, count))
        for shape, value, count in zip(shapes, sums, np.sum(sizes, axis=0), strict=True)
    )
    given = Sums(ab, aa, bb, np.ones(1))
    whole = with_cancellation(given, [terms[0]], [terms[1]], points, request.dtype)
    values = {
        "AB": taken(whole.products, (0, 0, 0)),
        "AA": taken(whole.rows, (0, 0)),
        "BB": taken(whole.columns, (0, 0)),
    }
    return sums, InnerProducts(values, 0.0, False, request.dtype, passes.name)


def _numbers(given: Any) -> Any:
    """A model or a sum of models without gradients; anything else itself."""
    if not any(map(requires_grad, jax.tree.leaves(given))):
        return given
    return numbers(with_dense_matrices(given))


def _mean(values: Vector, batch: WeightedPoints) -> Float[torch.Tensor, " out"]:
    """What a batch adds to the mean of outputs, times the root of the number of positions."""
    # sum_ip w_i y_ip / P = sum_i sqrt(w_i) (mean over p of sqrt(w_i) y_ip), of vectors sqrt(w) y
    by_input = values.reshape(len(values), len(batch.log_weights), -1)
    roots = torch.from_numpy(np.exp(batch.log_weights / 2)).to(values.device)
    return by_input.mean(dim=2) @ roots * math.sqrt(by_input.shape[2])


def _products(first: torch.Tensor, second: torch.Tensor) -> Float[torch.Tensor, "3"]:
    """Inner product and squared norms of two vectors, on an accelerator where a vector is there."""
    # The outputs of models and of functions in NumPy go to the device of the module beside them.
    if first.device.type == "cpu":
        first = first.to(second.device)
    second = second.to(first.device)
    pairs = (first, second), (first, first), (second, second)
    return torch.stack([(one * two).sum() for one, two in pairs])


class _Side:
    """One of the two functions, batch by batch in a unit of its own.

    The largest output of the first batch that has one is near 1, so that squares of outputs of any
    size are floats. A factor of its own does not change a cosine.

    Args:
        given: Plain function or module; or a model or a sum of models.
        fixed: The same without gradients.
        request: The comparison, which says whether the function is to lose its mean.
    """

    def __init__(self, given: Any, fixed: Any, request: Request) -> None:
        mean = mean_of(fixed, request.metric, request.budget) if request.centred else None
        self.is_function = is_function(given)
        if mean is not None and not self.is_function:
            given, fixed = without(given, mean), without(fixed, mean)
        self.fixed, self.unit = fixed, None
        if self.is_function:
            self.run = _of_function(given, mean)
        else:
            self.run = _of_model(given, fixed, request.dtype)

    def at(self, batch: WeightedPoints, start: int) -> tuple[Vector, float]:
        """The vector on a batch that begins with the input number `start`, in the unit of the side.

        The number beside it is its length; of sums of models the sum of the lengths of the terms.
        """
        values, exponent, cancelled = self.run(batch, start)
        top = float(values.detach().abs().max())
        if self.unit is None and top > 0:
            # A power of two beyond 2^1000 would be no float.
            self.unit = exponent + max(math.frexp(top)[1], -1000)
        if self.unit is not None:
            with np.errstate(over="ignore"):
                values = values * float(np.exp2(exponent - self.unit))
        return values, cancelled * float(values.detach().norm())


def _of_function(function: Any, mean: Mean | None) -> Run:
    """The vectors of a plain function or module less its mean, with the graph that it makes."""

    def at(batch: WeightedPoints, start: int) -> tuple[torch.Tensor, float, float]:
        given = array_at(function, batch.inputs, gradients=True)
        if not isinstance(given, torch.Tensor):
            given = torch.from_numpy(np.array(host_array(given)))
        host_array(given.detach()[:1])  # refuses what has no numbers, as inside torch.func
        # A copy, as the next call may write into a buffer of the function.
        outputs = in_rows(given, len(batch.inputs)).to(torch.float64, copy=True)
        if not torch.isfinite(outputs).all():
            finite = torch.isfinite(outputs).flatten(1).all(1)
            raise TnsimError(
                "a function gives outputs that are NaN or infinite, first for input "
                f"{start + int(finite.int().argmin())}"
            )
        if len(outputs) > ALONE:
            few = outputs[-ALONE:].detach().cpu().numpy()
            check_rows_alone(function, outputs_of(function, batch.inputs[-ALONE:]), few)
        if mean is not None:
            rest = outputs - torch.from_numpy(mean.values).to(outputs.device)
            outputs = rest * 0.0 if mean.is_all else rest
        roots = torch.from_numpy(np.exp(batch.log_weights / 2)).to(outputs.device)
        weighted = outputs * roots.reshape(-1, *(1,) * (outputs.ndim - 1))
        return weighted.movedim(-1, 0).reshape(outputs.shape[-1], -1), 0.0, 1.0

    return at


def _of_model(model: Any, fixed: Any, dtype: str) -> Run:
    """The vectors of a model or a sum of models, with gradients to weights that are tensors."""
    leaves, form = jax.tree.flatten(model if fixed is model else with_dense_matrices(model))
    moving = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    vector = vectors_of(summands(fixed), dtype)

    def at(batch: WeightedPoints, start: int) -> tuple[torch.Tensor, float, float]:
        with execution.precision():
            values, exponent, lengths, sizes = vector(batch)
        length = np.linalg.norm(lengths)
        cancelled = float(np.linalg.norm(sizes) / length) if length else 1.0

        def traced(weights: dict[int, jax.Array]) -> jax.Array:
            own = [weights.get(n, leaf) for n, leaf in enumerate(leaves)]
            own = [jnp.asarray(x, dtype) if hasattr(x, "dtype") else x for x in own]
            return traced_vector(summands(jax.tree.unflatten(form, own)), batch, exponent, dtype)

        def pullback(
            tensors: Sequence[torch.Tensor], outer: torch.Tensor
        ) -> Iterator[torch.Tensor]:
            # The model runs once more, in JAX.
            own = dict(zip(moving, map(to_jax, tensors), strict=True))
            made, pulled = jax.vjp(traced, own)
            (slopes,) = pulled(jnp.asarray(outer.cpu().numpy(), made.dtype))
            for place, tensor in zip(moving, tensors, strict=True):
                yield of_jax(slopes[place], tensor)

        numbers = torch.from_numpy(np.array(values, np.float64))
        tensor: Any = WithPullback.apply(numbers, pullback, *moving.values())
        return tensor, float(exponent[0]), cancelled

    return at
