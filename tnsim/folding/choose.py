"""The structure of a comparison. In: two models, a metric. Out: the key of its plan, the plan, the arrays it reads.

A plan is found by the kinds of the layers, the metric and the structure of its inputs, once per process; the arrays are
those of the models, laid out as that plan reads them, and the moments of the input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from tnsim.engine import execution
from tnsim.engine.plan import Plan
from tnsim.engine.planner import LARGE, plan_problem
from tnsim.errors import ModelError, TooLarge
from tnsim.folding import layerwise as folding
from tnsim.folding import whole_tree as deep
from tnsim.folding.sequences.coincidences import position_array
from tnsim.folding.sequences.fold import fold_sequences
from tnsim.folding.tokens import TokenKind, fold_tokens, token_inputs, token_kind, token_weights
from tnsim.metrics import metric as metrics
from tnsim.metrics.metric import Categorical, InputKind, Metric, SequenceInputs
from tnsim.models.model import Combination, Model, check_comparable, terms
from tnsim.names import (
    COVARIANCE,
    IDENTITY,
    MEAN,
    ONE,
    ONES,
    SAME_POSITION,
    TRACE,
    Leaf,
    Pair,
    Side,
)
from tnsim.tensors.flattened import flat_arrays, flat_kind
from tnsim.tensors.lifted import Kind, arrays, kind, symmetric_arrays
from tnsim.tensors.positional import SequenceKind, sequence_arrays, sequence_kind

AnyModel = Model | Combination

DTYPES = ("float64", "float32")
_ALWAYS_FITS = 2**28
_DENSE = (
    2**24
)  # elements of an attention layer as a dense tensor, which takes seconds to symmetrise
FREE_SHARE = 0.8


@dataclass(frozen=True)
class Budget:
    """What one plan may use; beyond it `TooLarge` is raised before anything runs.

    memory_bytes: None for 80 % of what is free on the device. multiplications: 1e14 take about an hour on two cores.
    """

    memory_bytes: float | None = None
    multiplications: float = 1e14


class Key(NamedTuple):
    """All that a plan depends on besides the products asked for."""

    bra: tuple[Kind, ...] | tuple[SequenceKind, ...] | tuple[TokenKind]
    ket: tuple[Kind, ...] | tuple[SequenceKind, ...] | tuple[TokenKind] | None
    metric: type
    inputs: InputKind | SequenceInputs | tuple[tuple[str, tuple[int, ...]], ...]
    lifted: bool
    deep: bool
    n_ctx: int | None

    @property
    def nodes(self) -> deep.Nodes | None:
        """Points at which a constant or a mean has its plan run, None if one run is all."""
        if not self.deep or self.inputs.centred:
            return None
        legs = max(deep.tree(kinds).legs for kinds in (self.bra, self.ket) if kinds is not None)
        return deep.moment_nodes(
            2 * legs
        )  # enough for the norm of the larger model, and so for the cross term


def kinds(model: Model) -> tuple[Kind, ...] | tuple[SequenceKind, ...]:
    """What plans are found by: models of equal kinds share them, and their weights can be stacked."""
    return tuple(map(kind if model.n_ctx is None else sequence_kind, model.layers))


def problem_key(a: Model, b: Model, metric: Metric) -> Key:
    """Everything the plan of two models depends on. Raises `ModelError` and `TooLarge` where the metric does not apply to them."""
    if isinstance(metric, Categorical):
        return _token_key(a, b, metric)
    if a.n_ctx is not None:
        return _sequence_key(a, b, metric)
    bra, ket = kinds(a), kinds(b)
    odd_and_even = len({math.prod(k.order for k in found) % 2 for found in (bra, ket)}) > 1
    lifted = (
        any(k.constant for k in bra + ket) or odd_and_even
    )  # unlifted, an odd and an even model have no legs to join
    whole = metrics.joins_whole_trees(type(metric), nonlinear(bra, ket))
    inputs = (
        metrics.whole_tree_kind(metric, lifted) if whole else metrics.input_kind(metric, lifted)
    )
    return Key(bra, ket, type(metric), inputs, lifted, whole, None)


def _sequence_key(a: Model, b: Model, metric: Metric) -> Key:
    """Models of sequences: layer by layer."""
    bra, ket = kinds(a), kinds(b)
    if metrics.joins_whole_trees(type(metric), nonlinear(bra, ket)) and nonlinear(bra, ket) > 1:
        bra, ket = (tuple(flat_kind(layer, a.n_ctx) for layer in m.layers) for m in (a, b))
        if _is_small(bra, ket):
            return Key(
                bra,
                ket,
                type(metric),
                metrics.whole_tree_kind(metric, lifted=True),
                True,
                True,
                a.n_ctx,
            )
        bra, ket = kinds(a), kinds(b)
    found = type(metrics.layer_by_layer(metric, nonlinear(bra, ket), (a.degree, b.degree)))
    return Key(
        bra, ket, found, metrics.sequence_inputs(metric, a.d_in, a.n_ctx), False, False, a.n_ctx
    )


def _is_small(*models: tuple[Kind, ...]) -> bool:
    """Whether the legs of flattened trees can be joined: few, an even number together, and dense tensors that fit."""
    legs = [deep.tree(found).legs for found in models]
    sizes = [
        (k.d_out + 1) * (k.d_in + 1) ** k.order
        for found in models
        for k in found
        if k.name == "Attention"
    ]
    return sum(legs) <= deep.MAX_LEGS and sum(legs) % 2 == 0 and max(sizes, default=0) <= _DENSE


def _token_key(a: Model, b: Model, metric: Categorical) -> Key:
    """Models over tokens; the inputs are the shapes of all arrays."""
    if a.n_ctx is None:
        raise ModelError(
            "Categorical is a distribution of token sequences: give tnsim.Model(layers, n_ctx=...) or load(..., n_ctx=...)"
        )
    key = Key((token_kind(a),), (token_kind(b),), Categorical, (), False, False, a.n_ctx)
    shapes = {
        name: array.shape
        for name, array in token_inputs(
            metric.distribution(a.d_in), key.bra + key.ket, a.n_ctx
        ).items()
    }
    for side, model in (("A", a), ("B", b)):
        found = jax.eval_shape(
            lambda m, side=side: token_weights(side, m, key.bra + key.ket), model
        )
        shapes |= {name: array.shape for name, array in found.items()}
    return key._replace(inputs=tuple(sorted(shapes.items())))


def nonlinear(*models: tuple[Kind, ...] | tuple[SequenceKind, ...]) -> int:
    """Number of nonlinear layers of the deeper model."""
    return max(sum(k.order > 1 for k in found) for found in models)


@lru_cache(maxsize=1024)
def plan_for(
    key: Key, pairs: tuple[Pair, ...], per_output: bool, dtype: str, large: int = LARGE
) -> Plan:
    """The plan of the inner products `pairs`. large: elements beyond which an intermediate is computed in chunks."""
    models = {"A": key.bra} if key.ket is None else {"A": key.bra, "B": key.ket}
    metric = key.metric()
    if key.metric is Categorical:
        problem = fold_tokens(
            {side: found for side, (found,) in models.items()}, dict(key.inputs), pairs, per_output
        )
        return plan_problem(problem, metric.name, True, dtype, large)
    if key.deep:
        cross_only = key.metric is metrics.Symmetric
        deep.check_size(models, cross_only)
        problem = deep.fold(
            models, cross_only, key.inputs, key.lifted, pairs, per_output, key.n_ctx or 1
        )
    elif key.n_ctx is not None:
        problem = fold_sequences(models, metric, key.inputs, key.n_ctx, pairs, per_output)
    else:
        problem = folding.fold(models, metric, key.inputs, key.lifted, pairs, per_output)
    return plan_problem(
        problem, metric.name, metrics.is_exact(metric, nonlinear(*models.values())), dtype, large
    )


def leaves(
    found: Plan, models: Mapping[Side, Model], metric: Metric, key: Key, t: float | None = None
) -> dict[str, Any]:
    """Every array that a plan reads, by name."""
    known = weights(models, key) | input_leaves(found, metric, models["A"].d_in, key, t)
    return {name: known[name] for name in found.shapes}


def weights(models: Mapping[Side, Model], key: Key) -> dict[str, Any]:
    """The arrays of all models, by name."""
    return {
        name: array
        for side, model in models.items()
        for name, array in weight_leaves(side, model, key).items()
    }


def weight_leaves(side: str, model: Model, key: Key) -> dict[str, Any]:
    """The arrays of one model, by name, as the plans of `key` read them."""
    if key.metric is Categorical:
        return token_weights(side, model, key.bra + (key.ket or ()))
    found: dict[str, Any] = {}
    for n, layer in enumerate(model.layers):
        if key.n_ctx is not None:
            known = flat_arrays(layer, key.n_ctx) if key.deep else sequence_arrays(layer, key.n_ctx)
        else:
            known = symmetric_arrays(layer, key.lifted) if key.deep else arrays(layer, key.lifted)
        found |= {str(Leaf(side, n, role)): array for role, array in known.items()}
    return found


def input_leaves(
    found: Plan, metric: Metric, d_in: int, key: Key, t: float | None = None
) -> dict[str, Any]:
    """The arrays that are not a model's, by name: moments of the input, with the second moment at t, and constants of the plan."""
    if key.metric is Categorical:
        known = token_inputs(metric.distribution(d_in), key.bra + (key.ket or ()), key.n_ctx)
        return {name: array for name, array in known.items() if name in found.shapes}
    if key.n_ctx is not None and key.deep:
        metric, d_in = metrics.flattened(metric, d_in, key.n_ctx), key.n_ctx * d_in
    if key.n_ctx is not None and not key.deep:
        moments, covariance = metrics.sequence_moments(metric, d_in, key.n_ctx), "covariance"
        known = {ONE: np.ones(()), ONES: np.ones(key.n_ctx), SAME_POSITION: np.eye(key.n_ctx)}
        known |= {
            name: array
            for name in found.shapes
            if (array := position_array(name, key.n_ctx)) is not None
        }
    else:
        moments, covariance, known = metrics.input_moments(metric, d_in, key.lifted), "moment", {}
    known |= {
        name: moments[kind]
        for name, kind in ((MEAN, "mean"), (COVARIANCE, covariance))
        if kind in moments
    }
    if t is not None:
        known[COVARIANCE] = metrics.second_moment_at(metric, d_in, key.lifted, t)
    if TRACE in found.shapes:
        known[TRACE] = np.concatenate([np.zeros(1), np.ones(found.shapes[TRACE][0] - 1)])
        if (
            len(found.shapes[TRACE]) == 2
        ):  # sequences: which output coordinate a row belongs to, whatever its position
            known[TRACE] = np.pad(
                np.tile(np.eye(found.shapes[TRACE][1] - 1), (key.n_ctx, 1)), ((1, 0), (1, 0))
            )
    if IDENTITY in found.shapes:
        known[IDENTITY] = np.eye(found.shapes[IDENTITY][0])
    return {name: array for name, array in known.items() if name in found.shapes}


def cast(array: Any, dtype: str) -> Any:
    if array.dtype == dtype:
        return array
    return array.astype(dtype) if isinstance(array, jax.Array) else np.asarray(array, dtype)


def check(a: Any, b: Any, metric: Any, dtype: str) -> None:
    metrics.check_metric(metric)
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
    one, two = terms(a)[0][1], terms(b)[0][1]
    check_comparable(one, two)
    if one.n_ctx is None and (one.attends or two.attends):
        raise ModelError(
            "attention is compared on sequences of one length: give tnsim.Model(layers, n_ctx=...) or tnsim.load(..., n_ctx=...)"
        )


def affordable(
    key: Key, wanted: tuple[Pair, ...], per_output: bool, dtype: str, budget: Budget
) -> Plan:
    """A plan within the budget, its largest contractions in smaller chunks if need be. Raises `TooLarge`."""
    found = plan_for(key, wanted, per_output, dtype, LARGE)
    advice = "use GaussianClosure() (an approximation beyond one nonlinear layer), smaller widths or a larger tnsim.Budget"
    if found.multiplications > budget.multiplications:
        raise TooLarge(
            f"{found.metric} needs {found.multiplications:.3g} multiplications here, "
            f"more than the budget of {budget.multiplications:.3g}; {advice}"
        )
    allowed = budget.memory_bytes
    if allowed is None:
        free = execution.available_bytes() if found.peak_bytes > _ALWAYS_FITS else None
        allowed = math.inf if free is None else FREE_SHARE * free
    least = found.peak_bytes
    for finer in range(2, 10, 2):
        if found.peak_bytes <= allowed:
            return found
        found = plan_for(key, wanted, per_output, dtype, LARGE >> finer)
        least = min(least, found.peak_bytes)
    raise TooLarge(
        f"{found.metric} needs {least / 2**30:.3g} GiB here, and the budget is {allowed / 2**30:.3g} GiB; {advice}"
    )
