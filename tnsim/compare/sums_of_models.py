"""Sums of models, and their inner products by bilinearity.

The distinct models of two sums are numbered, so that every pair is multiplied once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tnsim.models.model import AnyModel, Model, terms
from tnsim.scaled import (
    Scaled,
    ScaledSum,
    add,
    scaled_terms,
    share_of_squares,
    times,
    total,
)

Places: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Numbers of the models that each of two sums consists of."""
SumOfModels: TypeAlias = Scaled[tuple[tuple[Any, Any, Any], ...]]
"""A sum of models: triples (coefficient, exponent, model as prepared, or its number), and the
exponent of the sum."""


def numbered_models(first: AnyModel, second: AnyModel) -> tuple[list[Model], Places]:
    """The distinct models of two sums, and the numbers of those that each sum consists of.

    Example:
        >>> import tnsim
        >>> one, two = (tnsim.Model([tnsim.Linear([[x]])]) for x in (1.0, 2.0))
        >>> numbered_models(two - one, one)[1]
        ((0, 1), (1,))
    """
    numbers: dict[int, int] = {}
    models: list[Model] = []
    for _, model in (*terms(first), *terms(second)):
        if numbers.setdefault(id(model), len(models)) == len(models):
            models.append(model)
    first_places, second_places = (
        tuple(numbers[id(model)] for _, model in terms(one)) for one in (first, second)
    )
    return models, (first_places, second_places)


def by_number(first: AnyModel, second: AnyModel, places: Places) -> dict[int, Model]:
    """The models of two sums by their numbers, also where a trace made equal ones anew.

    Args:
        first, second: Sums of models.
        places: Numbers of the models of each sum, see `numbered_models`.
    """
    models: dict[int, Model] = {}
    for one, own in zip((first, second), places, strict=True):
        for n, (_, model) in zip(own, terms(one), strict=True):
            models.setdefault(n, model)
    return models


def pairs_of_models(places: Places, norms: bool) -> list[tuple[int, int]]:
    """The pairs of models whose inner products make up those of two sums, each pair once.

    Args:
        places: Numbers of the models of each sum.
        norms: Whether the norms of both sums are wanted as well.

    Example:
        >>> pairs_of_models(((0, 1), (1,)), norms=False), pairs_of_models(((0,), (1,)), norms=True)
        ([(0, 1), (1, 1)], [(0, 1), (0, 0), (1, 1)])
    """
    first, second = places
    sides = [(first, second), *([(first, first), (second, second)] if norms else [])]
    found: dict[tuple[int, int], None] = {}
    for one, two in itertools.chain.from_iterable(itertools.product(*both) for both in sides):
        if (two, one) not in found:  # the inner product is symmetric
            found[one, two] = None
    return list(found)


def scaled_sum(
    model: AnyModel, places: tuple[int, ...], exponents: Sequence[Any] | Mapping[int, Any]
) -> SumOfModels:
    """A model or a combination as a sum of scaled models, which are given by their numbers.

    Args:
        model: Model or combination.
        places: Numbers of its models.
        exponents: Exponents of two that the scaled models lack, by number.
    """
    if isinstance(model, Model):
        (n,) = places
        return Scaled(((1.0, np.float64(0.0), n),), exponents[n])
    weighted = zip(terms(model), places, strict=True)
    return scaled_terms((c, exponents[n], n) for (c, _), n in weighted)


def over_terms(
    bra: SumOfModels, ket: SumOfModels, product: Callable[[Any, Any], ScaledSum], norms: bool
) -> dict[str, ScaledSum]:
    """The inner product of two sums of models and, with `norms`, of each with itself.

    Args:
        bra, ket: Sums of models, without their own exponents.
        product: Inner product of two of the models, without the exponents of these.
        norms: Whether `AA` and `BB` are wanted as well as `AB`.
    """
    sides = {"AB": (bra, ket)}
    if norms:
        sides |= {"AA": (bra, bra), "BB": (ket, ket)}
    values = {}
    for name, (one, two) in sides.items():
        # <sum_m c_m 2^x_m m, sum_n d_n 2^y_n n> = sum_mn c_m d_n 2^(x_m + y_n) <m, n>
        pairs = itertools.product(one.value, two.value)
        values[name] = add([times(product(m, n), c * d, x + y) for (c, x, m), (d, y, n) in pairs])
    return values


def mean_share(
    side: SumOfModels, mean: Callable[[Any], ScaledSum | None], norm: ScaledSum
) -> float:
    """The share of the squared norm of a sum of models that is in its mean.

    Args:
        side: Sum of models, without its own exponent.
        mean: Mean of every output of one of the models, without its exponent; None where it is not
            known.
        norm: Squared norm of the sum, in total or by output.

    Returns:
        The share from 0 to 1; NaN where it is not known.
    """
    means = []
    for coefficient, exponent, model in side.value:
        of_outputs = mean(model)
        if of_outputs is None:
            return math.nan
        means.append(times(of_outputs, coefficient, exponent))
    return float(share_of_squares(add(means), total(norm, slices=np.ndim(norm.mantissa) > 0)))
