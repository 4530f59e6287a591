"""Layer over layer. In: two models, a metric. Out: families of problems, see `base`."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from tnsim.engine.problem import Problem
from tnsim.folding.alignment import align, orders_that_meet
from tnsim.folding.constants import MomentNodes
from tnsim.folding.layerwise import fold_layers
from tnsim.folding.leaves import (
    all_but_constant,
    by_side,
    identities,
    kinds_of_other,
    must_lift,
    named,
    only,
)
from tnsim.folding.sequences.coincidences import position_array
from tnsim.folding.sequences.fold import fold_sequences
from tnsim.folding.sequences.joining_rules import rules_of
from tnsim.metrics.input_moments import (
    InputKind,
    SequenceInputs,
    input_kind,
    input_moments,
    sequence_inputs,
    sequence_moments,
)
from tnsim.metrics.metric import as_layerwise, layer_by_layer
from tnsim.metrics.protocol import Metric
from tnsim.metrics.ways import ALL_ORDERS, Joinings, asked
from tnsim.models.model import Model
from tnsim.names import IDENTITY, ONE, ONES, SAME_POSITION, TRACE, Pair, Side
from tnsim.tensors.kinds import Kinds, kinds, nonlinear
from tnsim.tensors.lifted import arrays
from tnsim.tensors.positional import sequence_arrays


@dataclass(frozen=True)
class LayerWise:
    """Models of vectors, a layer of one over a layer of the other: Gram and moment recursions.

    Exact for the tree metrics at any depth, for `Gaussian` up to one nonlinear layer; beyond, the
    closure. What the methods answer is said in `base.Family`.

    Args:
        name: Of the metric that was asked for.
        metric: How the legs of layers that meet are joined.
        bra: Kinds of the layers of A.
        ket: Kinds of the layers of B; None where A meets itself.
        input_kind: Structure of the input's moments.
        lifted: Whether the constant is coordinate 0 of every bond.

    Source:
        Paper, appendices A.2 and A.3.
    """

    name: str
    metric: Joinings
    bra: Kinds
    ket: Kinds | None
    input_kind: InputKind
    lifted: bool

    @classmethod
    def of(cls, a: Model, b: Model | None, metric: Metric) -> Self:
        bra, ket = kinds(a), kinds_of_other(b)
        lifted = must_lift(bra, ket or bra)
        joined = as_layerwise(metric)
        depth = nonlinear(bra, ket or ())
        joinings = asked(joined, orders_that_meet(bra, ket or bra, joined), depth)
        return cls(metric.name, joinings, bra, ket, input_kind(metric, lifted), lifted)

    @property
    def exact(self) -> bool:
        return self.metric.exact

    @property
    def nodes(self) -> MomentNodes | None:
        return None  # one run is all

    @property
    def layout(self) -> Hashable:
        return type(self), self.lifted

    def prepare(self, model: Model) -> Model:
        return model

    def problem(self, pairs: tuple[Pair, ...], per_output: bool) -> Problem:
        models = by_side(self.bra, self.ket)
        return fold_layers(models, self.metric, self.input_kind, self.lifted, pairs, per_output)

    def weights(self, side: Side, model: Model) -> dict[str, Any]:
        return named(side, [arrays(layer, self.lifted) for layer in model.layers])

    def inputs(
        self, names: Collection[str], metric: Metric, d_in: int, t: float | None = None
    ) -> dict[str, Any]:
        leaves = input_moments(metric, d_in, self.lifted)
        leaves |= identities(names, {IDENTITY: d_in + self.lifted})
        if TRACE in names:
            leaves[TRACE] = all_but_constant(self.bra[-1].d_out)
        return only(names, leaves)


@dataclass(frozen=True)
class Sequences:
    """Models of sequences, layer over layer, covariances between positions carried along.

    Vectors are sequences of one position.

    Exact where `LayerWise` is. What the methods answer is said in `base.Family`.

    Args:
        name: Of the metric that was asked for.
        metric: How the legs of layers that meet are joined.
        bra: Kinds of the layers of A.
        ket: Kinds of the layers of B; None where A meets itself.
        input_kind: Structure of the input's moments.
        n_ctx: Positions.

    Source:
        Paper, appendices A.2 and A.3, for sequences.
    """

    name: str
    metric: Joinings
    bra: Kinds
    ket: Kinds | None
    input_kind: SequenceInputs
    n_ctx: int

    @classmethod
    def of(cls, a: Model, b: Model | None, metric: Metric) -> Self:
        bra, ket = kinds(a), kinds_of_other(b)
        positions = a.n_ctx or 1
        degrees = a.degree, (b or a).degree
        depth = nonlinear(bra, ket or ())
        joined = layer_by_layer(metric, depth, degrees)
        rules_of(joined)  # refuses a metric that joins in a way of its own, by its class
        align(bra, ket or bra, joined)  # and trees of different shapes
        inputs = sequence_inputs(metric, a.d_in, positions)
        return cls(metric.name, asked(joined, ALL_ORDERS, depth), bra, ket, inputs, positions)

    @property
    def exact(self) -> bool:
        return self.metric.exact

    @property
    def lifted(self) -> bool:
        return False  # the constant is apart from the coordinates

    @property
    def nodes(self) -> MomentNodes | None:
        return None  # one run is all

    @property
    def layout(self) -> Hashable:
        return type(self), self.n_ctx

    def prepare(self, model: Model) -> Model:
        return model

    def problem(self, pairs: tuple[Pair, ...], per_output: bool) -> Problem:
        models = by_side(self.bra, self.ket)
        return fold_sequences(models, self.metric, self.input_kind, self.n_ctx, pairs, per_output)

    def weights(self, side: Side, model: Model) -> dict[str, Any]:
        return named(side, [sequence_arrays(layer, self.n_ctx) for layer in model.layers])

    def inputs(
        self, names: Collection[str], metric: Metric, d_in: int, t: float | None = None
    ) -> dict[str, Any]:
        n = self.n_ctx
        leaves = sequence_moments(metric, d_in, n)
        leaves |= {ONE: np.ones(()), ONES: np.ones(n)}
        leaves |= identities(names, {SAME_POSITION: n, IDENTITY: d_in})
        for name in names:
            array = position_array(name, n)
            if array is not None:
                leaves[name] = array
        return only(names, leaves)
