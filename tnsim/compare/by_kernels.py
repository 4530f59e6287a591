"""Inner products of models with an activation, along sums over pairs of hidden units.

The route of `Gaussian` where a model is no polynomial and every model has at most one nonlinear
layer (see `problems.kernels`), and of `GaussianClosure` for any number of such layers (see
`problems.kernel_models`). A sum of models is expanded by bilinearity. The certified bound of what
series leave out counts in the size of a product, relative to which the error of the result is told.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from tnsim.compare.estimates import Estimate, check_affordable
from tnsim.compare.request import CROSS, InnerProducts, Question, Request, is_exact
from tnsim.compare.resident import content, is_constant
from tnsim.engine.budget import Budget
from tnsim.engine.costs import PROGRAM_BYTES
from tnsim.engine.ir.dtypes import ITEM_BYTES
from tnsim.engine.runtime import execution
from tnsim.errors import UnsupportedLayer
from tnsim.long_work import announced
from tnsim.metrics.input_moments import marginals
from tnsim.metrics.protocol import Metric
from tnsim.models.arrays import weights_dtype
from tnsim.models.model import AnyModel, Model, terms
from tnsim.models.powers import with_powers
from tnsim.names import Pair
from tnsim.problems.kernel_models import (
    Meeting,
    PreparedModel,
    meetings,
    on_host,
    product_of,
    segment_sizes,
    under,
    units_under,
)
from tnsim.problems.kernels import (
    KERNEL_DTYPE,
    MOST_PAIRED,
    ROADS,
    hidden_units,
    own_numbers,
    small_differences,
)
from tnsim.problems.tensors.kinds import kinds, nonlinear
from tnsim.scaled import Scaled, ScaledSum, add, scaled_terms, times
from tnsim.sessions import session

_Terms: TypeAlias = Scaled[tuple[tuple[Any, Any, PreparedModel], ...]]
"""A sum of prepared models: triples (coefficient, exponent, model), and the exponent of the sum."""

STARTING, _RATE = 0.06, 1e9
"""Seconds before the first kernel, and multiplications of kernels in a second."""


class Kernels:
    """The route by sums over pairs of hidden units.

    Args:
        question: Question that `answers` accepts.
    """

    name = "kernels"
    search = 0.0

    def __init__(self, question: Question) -> None:
        self.question = question

    def estimate(self) -> Estimate:
        """See `routes.Route`."""
        question = self.question
        return kernel_estimate(
            question.models[0],
            question.models[-1],
            question.metric,
            question.wanted,
            question.dtype,
        )

    def check(self, estimate: Estimate, budget: Budget) -> None:
        """See `routes.Route`."""
        check_kernels(estimate, budget)

    def products(
        self, first: AnyModel, second: AnyModel, request: Request, traced: bool
    ) -> InnerProducts:
        """See `by_kernels`."""
        return by_kernels(first, second, request, traced)


def kernel_estimate(
    a: Model, b: Model, metric: Metric, wanted: tuple[Pair, ...], dtype: str
) -> Estimate:
    """What the inner products of two models take.

    Args:
        a, b: Models that `answers` accepts under the metric.
        metric: A Gaussian metric.
        wanted: Inner products that are wanted.
        dtype: Precision of the computation.

    Returns:
        An estimate with the facts "kernels", the pairs of models at every distinct position of a
        sequence and, under `GaussianClosure`, at every nonlinear layer, where laws of states are
        made too; and "rows of hidden units" and "columns of hidden units", of the widest layers.
        Pairs of units of high correlation take more multiplications, which depends on weights.
    """
    positions = len(marginals(metric, a.d_in, a.n_ctx))
    item = ITEM_BYTES[dtype]
    chains = {
        side: segment_sizes(kinds(with_powers(x, MOST_PAIRED))) for side, x in (("A", a), ("B", b))
    }
    met: list[Meeting] = []
    for pair in wanted:
        levels = meetings(chains[pair.bra], chains[pair.ket], pair.bra == pair.ket)
        # Laws of a single model are made with the model, so that its norm takes the last kernel.
        met += levels[-1:] if pair.bra == pair.ket else levels
    for chain in chains.values():
        met += meetings(chain, chain, True)[:-1]
    kept = sum(own_numbers(x.units, x.d_in, x.d_out) for chain in chains.values() for x in chain)
    first, second = (max(x.units for x in chain) for chain in chains.values())
    work = positions * sum(meeting.work for meeting in met)
    return Estimate(
        metric=metric.name,
        exact=is_exact(metric, (a, b)),
        route=Kernels.name,
        dtype=dtype,
        outputs=tuple(pair.group for pair in wanted),
        multiplications=work,
        peak_bytes=item * (positions * kept + max(meeting.numbers for meeting in met)),
        seconds=STARTING + work / _RATE,
        facts=(
            ("kernels", len(met) * positions),
            ("rows of hidden units", first),
            ("columns of hidden units", second),
        ),
    )


def check_kernels(estimate: Estimate, budget: Budget) -> None:
    """Raise `TooLarge` where sums over pairs of hidden units are beyond the budget."""
    first, second = (estimate.fact(f"{side} of hidden units") for side in ("rows", "columns"))
    check_affordable(
        estimate,
        budget,
        f"{estimate.metric} of {first:,} x {second:,} hidden units",
        less_work=f"{ROADS}, or a larger tnsim.Budget",
        less_memory="use dtype='float32' or a larger tnsim.Budget",
        program_bytes=PROGRAM_BYTES,
    )


def by_kernels(first: AnyModel, second: AnyModel, request: Request, traced: bool) -> InnerProducts:
    """The inner products of two sums of models with an activation, or beside such models.

    Args:
        first, second: Models or sums of models.
        request: Question asked of them, under a Gaussian metric.
        traced: Whether weights, coefficients or metric are traced.

    Returns:
        The products of the request; of sums that are not traced, also the norms.

    Raises:
        TooLarge: The computation would exceed the budget.
        UnsupportedLayer: A model of several nonlinear layers is traced.
    """
    one, two = terms(first), terms(second)
    if traced:
        if nonlinear(*(kinds(model) for _, model in (*one, *two))) > 1:
            raise UnsupportedLayer(
                "GaussianClosure of several nonlinear layers with an activation has no gradients, "
                "as roots of singular covariances have none: use Gaussian for one nonlinear layer, "
                "or Empirical(inputs)"
            )
        request = request._replace(dtype=weights_dtype(*(model for _, model in (*one, *two))))
    seconds = 0.0
    if not traced:
        for (_, a), (_, b) in itertools.combinations_with_replacement((*one, *two), 2):
            estimate = kernel_estimate(a, b, request.metric, CROSS, request.dtype)
            check_kernels(estimate, request.budget)
            seconds += estimate.seconds
    long = announced(f"kernels of {request.metric.name}", seconds)
    with long, contextlib.nullcontext() if traced else execution.precision():
        compare = _Comparison(request, traced)
        bra = compare.scaled(one)
        ket = bra if first is second else compare.scaled(two)
        sides = {"AB": (bra, ket)}
        several = max(len(one), len(two)) > 1
        if request.squared_norms or (
            several and not traced
        ):  # norms show how much of a product cancels
            sides |= {"AA": (bra, bra), "BB": (ket, ket)}
        values = {name: compare.sums(*both) for name, both in sides.items()}
        exponent = bra.exponent + ket.exponent
        if traced:  # constants in float64 beside the trace give it no further digits
            values, exponent = jax.tree.map(
                lambda array: jnp.asarray(array, request.dtype), (values, exponent)
            )
    return InnerProducts(values, exponent, traced, request.dtype, Kernels.name)


class _Comparison:
    """The inner products of pairs of prepared models, each computed once."""

    def __init__(self, request: Request, traced: bool) -> None:
        self.request, self.traced = request, traced
        self._known: dict[tuple[int, int], ScaledSum] = {}
        self._traced_models: dict[int, Model] = {}  # by prepared model

    def scaled(self, summands: Sequence[tuple[Any, Model]]) -> _Terms:
        """A sum of prepared models with the powers of two of coefficients and models taken out."""
        metric, dtype = self.request.metric, KERNEL_DTYPE
        if self.traced:
            made = [(c, under(model, metric, self.request.dtype)) for c, model in summands]
            for (_, prepared), (_, model) in zip(made, summands, strict=True):
                self._traced_models[id(prepared)] = model
            return scaled_terms((c, model.exponent, model) for c, model in made)
        if nonlinear(*(kinds(model) for _, model in summands)) > 1:
            made = [(c, prepared_under(model, metric, dtype)) for c, model in summands]
            return scaled_terms((c, model.exponent, model) for c, model in made)
        known = [(c, hidden_units(with_powers(model, MOST_PAIRED))) for c, model in summands]
        models = {id(units): model for (_, units), (_, model) in zip(known, summands, strict=True)}
        reading = summands[0][1].d_in, summands[0][1].n_ctx
        # Small differences become functions of their own; all others are prepared once for as long
        # as their model lives.
        made = []
        for c, units in small_differences(known, dtype) if len(known) > 1 else known:
            if id(units) in models:
                made.append((c, prepared_under(models[id(units)], metric, dtype)))
            else:
                made.append((c, units_under(units, metric, reading, dtype)))
        return scaled_terms((c, model.exponent, model) for c, model in made)

    def sums(self, bra: _Terms, ket: _Terms) -> ScaledSum:
        """The inner product of two sums, without their exponents."""
        parts = []
        for (c, x, m), (d, y, n) in itertools.product(bra.value, ket.value):
            parts.append(times(self._kernel_product(m, n), c * d, x + y))
        return add(parts)

    def _kernel_product(self, a: PreparedModel, b: PreparedModel) -> ScaledSum:
        key = id(a), id(b)  # the sums hold both
        if key not in self._known:
            slices, dtype = self.request.slices, self.request.dtype
            if self.traced:
                models = [self._traced_models[id(x)] for x in (a, b)]
                kernel = self.request.tracing.kernel((models, self.request.metric))
                product = product_of(a, b, slices, dtype, kernel)
            else:
                product = on_host(product_of(a, b, slices, dtype))
            self._known[key] = self._known[id(b), id(a)] = product
        return self._known[key]


def prepared_under(model: Model, metric: Metric, dtype: str) -> PreparedModel:
    """A model under a metric, made once for as long as the model lives.

    Args:
        model: Model that `answers` accepts under the metric, not traced.
        metric: A Gaussian metric.
        dtype: Type of the arrays.
    """
    if not is_constant(model):
        return under(with_powers(model, MOST_PAIRED), metric, dtype)

    def make() -> PreparedModel:
        return under(with_powers(model, MOST_PAIRED), metric, dtype)

    def size(made: PreparedModel) -> int:
        return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(made))

    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    key = prepared_under, content(metric), dtype, device
    return session().belongings.get(model, key, make, size)
