"""Inner products of models with an activation, along sums over pairs of hidden units.

The route of `Gaussian` where a model is no polynomial and every model has at most one nonlinear
layer (see `problems.hidden_units`), and of `GaussianClosure` for any number of such layers (see
`problems.kernels`). A sum of models is expanded by bilinearity. The certified bound of what series
leave out is a part of the size of a product, from which the error of the result follows.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tnsim.compare.operands import (
    Places,
    SumOfModels,
    by_number,
    content,
    mean_share,
    numbered_models,
    over_terms,
    pairs_of_models,
    scaled_sum,
)
from tnsim.compare.request import (
    CROSS,
    Estimate,
    InnerProducts,
    Question,
    Request,
    check_affordable,
    is_exact,
    smaller_share,
)
from tnsim.engine.costs import PROGRAM_BYTES
from tnsim.engine.ir.problem import ITEM_BYTES
from tnsim.engine.planner import Budget
from tnsim.engine.runtime import execution
from tnsim.errors import TooLarge, UnsupportedLayer
from tnsim.long_work import announced
from tnsim.metrics.input_moments import marginals
from tnsim.metrics.protocol import Metric
from tnsim.models.arrays import bytes_of, weights_dtype
from tnsim.models.model import AnyModel, Model, kept_with, terms
from tnsim.models.scaling import with_powers
from tnsim.problems.hidden_units import (
    BY_DRAWS,
    MOST_PAIRED,
    hidden_units,
    small_differences,
)
from tnsim.problems.kernels import (
    KERNEL_DTYPE,
    Blocks,
    Meeting,
    PreparedModel,
    blocks_at_numbers,
    host_sum,
    mean_part,
    meetings,
    product_of,
    roots_of,
    segment_sizes,
    slope_bytes,
    under,
    units_under,
)
from tnsim.problems.layer_kinds import kinds, nonlinear
from tnsim.scaled import ScaledSum, scaled_terms
from tnsim.sessions import session

STARTING, _SERIES, _PRODUCTS = 0.06, 3.2e8, 1.5e10
"""Seconds before the first kernel; multiplications of series, entry by entry, and of matrix
products in a second."""


class Kernels:
    """The route by sums over pairs of hidden units.

    Args:
        question: Question that `has_kernels` accepts.
    """

    name = "kernels"
    search = 0.0

    def __init__(self, question: Question) -> None:
        self.question = question
        # Outside of a trace kernels are float64, whatever is asked.
        self.dtype = question.dtype if question.traced else KERNEL_DTYPE

    def estimate(self) -> Estimate:
        """What the inner products of two models take, see `routes.Route`.

        Returns:
            An estimate with the facts "kernels", the pairs of models at every distinct position of
            a sequence and, under `GaussianClosure`, at every nonlinear layer, where laws of states
            are made too; and "rows of hidden units" and "columns of hidden units", of the widest
            layers. Pairs of units of high correlation take more multiplications, which depends on
            weights.
        """
        question, metric = self.question, self.question.metric
        a, b = question.models[0], question.models[-1]
        positions = len(marginals(metric, a.d_in, a.n_ctx))
        item = ITEM_BYTES[self.dtype]
        chains = {
            side: segment_sizes(kinds(with_powers(x, MOST_PAIRED)))
            for side, x in (("A", a), ("B", b))
        }
        met: list[Meeting] = []
        for pair in question.wanted:
            levels = meetings(chains[pair.bra], chains[pair.ket], pair.bra == pair.ket)
            # Laws of a single model are made with the model, so its norm takes the last kernel.
            met += levels[-1:] if pair.bra == pair.ket else levels
        for chain in chains.values():
            met += meetings(chain, chain, True)[:-1]
        kept = self.prepared_bytes(a) + self.prepared_bytes(b)
        first, second = (max(x.units for x in chain) for chain in chains.values())
        work = positions * sum(meeting.work for meeting in met)
        series = positions * sum(meeting.series for meeting in met)
        return Estimate(
            metric=metric.name,
            exact=is_exact(metric, (a, b)),
            route=self.name,
            dtype=self.dtype,
            outputs=question.outputs,
            multiplications=work,
            peak_bytes=kept + item * max(meeting.numbers for meeting in met),
            seconds=STARTING + series / _SERIES + (work - series) / _PRODUCTS,
            facts=(
                ("kernels", len(met) * positions),
                ("rows of hidden units", first),
                ("columns of hidden units", second),
            ),
        )

    def prepared_bytes(self, model: Model) -> int:
        """Bytes of a model of the question as it is prepared for kernels."""
        positions = len(marginals(self.question.metric, model.d_in, model.n_ctx))
        chain = segment_sizes(kinds(with_powers(model, MOST_PAIRED)))
        item = ITEM_BYTES[self.dtype]
        return item * positions * sum(segment.numbers for segment in chain)

    def within(self, estimate: Estimate, budget: Budget) -> Estimate:
        """See `routes.Route`."""
        first, second = (estimate.fact(f"{side} of hidden units") for side in ("rows", "columns"))
        check_affordable(
            estimate,
            budget,
            f"{estimate.metric} of {first:,} x {second:,} hidden units",
            less_work=f"{BY_DRAWS}, or a larger tnsim.Budget",
            less_memory="give a larger tnsim.Budget",
            program_bytes=PROGRAM_BYTES,
        )
        return estimate

    def products(
        self, first: AnyModel, second: AnyModel, request: Request, traced: bool
    ) -> InnerProducts:
        """The inner products of two sums of models with an activation, or beside such models.

        Args:
            first, second: Models or sums of models.
            request: Gaussian metric, precision, budget, and the products that are wanted.
            traced: Whether weights, coefficients or metric are traced.

        Returns:
            The products of the request; of sums that are not traced, also the norms.

        Raises:
            TooLarge: The computation would exceed the budget.
            UnsupportedLayer: A model of several nonlinear layers is traced.
        """
        one, two = terms(first), terms(second)
        if traced:
            models, places = numbered_models(first, second)
            check_differentiable(models)
            request = request._replace(dtype=weights_dtype(*models))
            return traced_products(first, second, places, request, GivenKernels())
        seconds = 0.0
        for (_, a), (_, b) in itertools.combinations_with_replacement((*one, *two), 2):
            pair = Kernels(replace(self.question, models=(a, b), wanted=CROSS))
            estimate = pair.estimate()
            self.within(estimate, request.budget)
            seconds += estimate.seconds
        with announced(f"kernels of {request.metric.name}", seconds), execution.precision():
            bra = _prepared_sum(one, request.metric)
            ket = bra if first is second else _prepared_sum(two, request.metric)
            known: dict[tuple[int, int], ScaledSum] = {}

            def product(m: PreparedModel, n: PreparedModel) -> ScaledSum:
                key = id(m), id(n)  # the sums hold both
                if key not in known:
                    made = host_sum(product_of(m, n, request.slices, KERNEL_DTYPE))
                    known[key] = known[id(n), id(m)] = made
                return known[key]

            # Norms show how much of a product of sums cancels.
            norms = request.squared_norms or max(len(one), len(two)) > 1
            values, exponent = over_terms(bra, ket, product, norms), bra.exponent + ket.exponent
            share = None
            if request.squared_norms:
                share = smaller_share(
                    mean_share(bra, mean_part, values["AA"]),
                    mean_share(ket, mean_part, values["BB"]),
                )
        return InnerProducts(values, exponent, False, KERNEL_DTYPE, self.name, mean_share=share)


def _prepared_sum(summands: Sequence[tuple[Any, Model]], metric: Metric) -> SumOfModels:
    """A sum of prepared models with the powers of two of coefficients and models taken out."""
    if nonlinear(*(kinds(model) for _, model in summands)) > 1:
        made = [(c, prepared_under(model, metric)) for c, model in summands]
        return scaled_terms((c, model.exponent, model) for c, model in made)
    known = [(c, hidden_units(with_powers(model, MOST_PAIRED))) for c, model in summands]
    models = {id(units): model for (_, units), (_, model) in zip(known, summands, strict=True)}
    reading = summands[0][1].d_in, summands[0][1].n_ctx
    # Small differences become functions of their own; all others are prepared once for as long as
    # their model lives.
    made = []
    if len(known) > 1:  # equal functions leave nothing, which is a summand without weight
        known = [*small_differences(known, KERNEL_DTYPE)] or [(0.0, known[0][1])]
    for c, units in known:
        if id(units) in models:
            made.append((c, prepared_under(models[id(units)], metric)))
        else:
            made.append((c, units_under(units, metric, reading, KERNEL_DTYPE)))
    return scaled_terms((c, model.exponent, model) for c, model in made)


def check_differentiable(models: Sequence[Model]) -> None:
    """Raise `UnsupportedLayer` for models that are compared by laws of hidden states."""
    if nonlinear(*map(kinds, models)) > 1:
        raise UnsupportedLayer(
            "GaussianClosure of several nonlinear layers with an activation has no gradients, "
            "as roots of singular covariances have none: use Gaussian for one nonlinear layer, "
            "or Empirical(inputs)"
        )


class GivenKernels(NamedTuple):
    """What a trace of a comparison is given, so that it compiles no formulas of it.

    Args:
        models: Models that are not differentiated, prepared, by their numbers in the comparison.
        kernels: Kernels of pairs of models by their numbers, at every distinct position.
        products: Inner products of pairs of these models, by their numbers.
        roots: Roots of the covariances in whose coordinates these models are; None where the trace
            makes them.
    """

    models: Mapping[int, PreparedModel] = {}
    kernels: Mapping[tuple[int, int], Sequence[Blocks]] = {}
    products: Mapping[tuple[int, int], ScaledSum] = {}
    roots: tuple[Any, ...] | None = None


def kernels_at_numbers(
    models: Sequence[Model], moving: Collection[int], places: Places, request: Request
) -> GivenKernels:
    """The kernels of a comparison as numbers, with their slopes, and products without any.

    A trace of the formulas of kernels would compile for ten seconds, of gated units for a minute.
    Where a session asks for compiled plans, it is made all the same.

    Args:
        models: Distinct models of both sums, as numbers.
        moving: Numbers of the models that are differentiated.
        places: Numbers of the models of each sum.
        request: Request for the sums.

    Raises:
        TooLarge: The slopes exceed the budget.
        UnsupportedLayer: A model has several nonlinear layers.
    """
    check_differentiable(models)
    metric = request.metric
    prepared = [
        under(model, metric, KERNEL_DTYPE, moving=True)
        if n in moving
        else prepared_under(model, metric)
        for n, model in enumerate(models)
    ]
    kernels, products, taken = {}, {}, 0
    for m, n in pairs_of_models(places, request.squared_norms):
        one, two = prepared[m], prepared[n]
        if m not in moving and n not in moving:
            key = product_of, content(metric), request.slices, request.dtype
            make = partial(product_of, one, two, request.slices, request.dtype)
            made = kept_with(models[m], key, make) if m == n else make()
            products[m, n] = host_sum(made)
            continue
        both = [(x.first, y.first) for x, y in zip(one.positions, two.positions, strict=True)]
        taken += sum(itertools.starmap(slope_bytes, both))
        _check_slopes(taken, one, two, request.budget)
        if session().tier != "compile":
            moves = m in moving, n in moving
            kernels[m, n] = tuple(blocks_at_numbers(*pair, moves) for pair in both)
    fixed = {n: one for n, one in enumerate(prepared) if n not in moving}
    # Constants in float64 beside the trace give it no further digits.
    fixed = jax.tree.map(lambda array: np.asarray(array, request.dtype), fixed)
    roots = roots_of(metric, (models[0].d_in, models[0].n_ctx)) if fixed else None
    return GivenKernels(fixed, kernels, products, roots)


def _check_slopes(taken: int, one: PreparedModel, two: PreparedModel, budget: Budget) -> None:
    """Raise `TooLarge` where the slopes of all kernels so far exceed the budget."""
    room = budget.room(0, taken)
    if taken > room:
        rows, columns = (model.positions[0].first.units for model in (one, two))
        raise TooLarge(
            f"gradients through kernels of {rows:,} x {columns:,} hidden units need "
            f"{taken / 2**30:.3g} GiB here, and the budget is {room / 2**30:.3g} GiB; "
            "use Empirical(inputs) or a larger tnsim.Budget"
        )


def traced_products(
    first: AnyModel, second: AnyModel, places: Places, request: Request, given: GivenKernels
) -> InnerProducts:
    """The inner products of two sums inside a trace.

    Args:
        first, second: Models or sums of models.
        places: Numbers of the models of each sum.
        request: Request for the sums, in the precision of the trace.
        given: What is known as numbers; everything else is a part of the trace.
    """
    prepared = dict(given.models)
    for n, model in by_number(first, second, places).items():
        if n not in prepared:
            prepared[n] = under(model, request.metric, request.dtype, given.roots)
    exponents = {n: made.exponent for n, made in prepared.items()}
    bra, ket = (
        scaled_sum(one, own, exponents) for one, own in zip((first, second), places, strict=True)
    )
    products: dict[tuple[int, int], ScaledSum] = {}
    for m, n in pairs_of_models(places, request.squared_norms):
        made = given.products.get((m, n))
        if made is None:
            known = given.kernels.get((m, n), ())
            made = product_of(prepared[m], prepared[n], request.slices, request.dtype, known)
        products[m, n] = products[n, m] = made
    values = over_terms(bra, ket, lambda m, n: products[m, n], request.squared_norms)
    # Constants in float64 beside the trace give it no further digits.
    values, exponent = jax.tree.map(
        lambda array: jnp.asarray(array, request.dtype), (values, bra.exponent + ket.exponent)
    )
    return InnerProducts(values, exponent, True, request.dtype, Kernels.name)


def prepared_under(model: Model, metric: Metric) -> PreparedModel:
    """A model under a metric, made once for as long as the model lives.

    Args:
        model: Model that `has_kernels` accepts under the metric, not traced.
        metric: A Gaussian metric.
    """

    def make() -> PreparedModel:
        return under(with_powers(model, MOST_PAIRED), metric, KERNEL_DTYPE)

    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    key = prepared_under, content(metric), device
    return kept_with(model, key, make, bytes_of)
