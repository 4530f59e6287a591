"""Whole models at once, exactly. In: models, a metric. Out: families of problems, see `base`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from tnsim.engine.problem import Problem
from tnsim.errors import ModelError, TooLarge
from tnsim.folding.constants import MomentNodes, moment_nodes
from tnsim.folding.leaves import (
    all_but_constant,
    by_side,
    identities,
    must_lift,
    named,
    only,
)
from tnsim.folding.tokens import fold_tokens
from tnsim.folding.tree_operands import tree
from tnsim.folding.whole_tree import MAX_LEGS, check_size, fold_trees
from tnsim.metrics.categorical import token_probabilities
from tnsim.metrics.input_moments import (
    InputKind,
    flattened,
    input_moments,
    second_moment_at,
    whole_tree_kind,
)
from tnsim.metrics.protocol import Metric
from tnsim.models.model import Model
from tnsim.names import COVARIANCE, IDENTITY, TRACE, Pair, Side
from tnsim.tensors.flattened import flat_arrays, flat_kind
from tnsim.tensors.kinds import Kinds, kinds
from tnsim.tensors.lifted import raised
from tnsim.tensors.symmetric import symmetric_arrays
from tnsim.tensors.token_tables import TokenKind, token_inputs, token_kind, token_weights

MAX_POSITIONS = 4096
"""Of `Categorical`: a table over pairs of positions has 128 MiB."""

_LARGEST_DENSE = 2**24
"""Elements of an attention layer as a dense tensor; more take seconds to symmetrise."""


@dataclass(frozen=True)
class WholeTree:
    """All legs of both trees joined at once. Exact.

    For `Symmetric`, and for `Gaussian` beyond one nonlinear layer. Small models of sequences are
    flattened into models of vectors. What the methods answer is said in `base.Family`.

    Args:
        name: Of the metric that was asked for.
        metric: Class of the metric that joins the legs.
        bra: Kinds of the layers of A.
        ket: Kinds of the layers of B; None where A meets itself.
        input_kind: Structure of the input's moments.
        lifted: Whether the constant is coordinate 0 of every bond.
        raises_linear: Whether a linear model is read as a bilinear one.
        n_ctx: Positions of the sequences that are flattened; None for vectors.

    Source:
        Paper, section 2.3 and appendix A.3.
    """

    name: str
    metric: type[Metric]
    bra: Kinds
    ket: Kinds | None
    input_kind: InputKind
    lifted: bool
    raises_linear: bool
    n_ctx: int | None

    @classmethod
    def of(cls, a: Model, b: Model | None, metric: Metric) -> Self:
        # Diagrams pair all legs, so both models together need an even number of them: beside a
        # nonlinear model, of even degree, a linear one is raised to a bilinear one.
        raises = metric.pairs_within_model
        bra = _flat_kinds(a, raises)
        ket = None if b is None else _flat_kinds(b, raises)
        lifted = a.n_ctx is not None or must_lift(bra, ket or bra)
        inputs = whole_tree_kind(metric, lifted)
        return cls(metric.name, type(metric), bra, ket, inputs, lifted, raises, a.n_ctx)

    @staticmethod
    def fits(a: Model, b: Model, metric: Metric) -> bool:
        """Whether flattened trees can be joined: they have few legs, and dense tensors that fit."""
        legs = 0
        largest = 0
        for model in (a, b):
            layers = _flat_kinds(model, metric.pairs_within_model)
            legs += tree(layers).legs
            for kind in layers:
                largest = max(largest, kind.dense_size)
        return legs <= MAX_LEGS and legs % 2 == 0 and largest <= _LARGEST_DENSE

    @property
    def exact(self) -> bool:
        return True

    @property
    def nodes(self) -> MomentNodes | None:
        if self.input_kind.centred:
            return None
        models = by_side(self.bra, self.ket).values()
        # Enough for the norm of the model with more legs, and so for the cross term.
        return moment_nodes(2 * max(tree(layers).legs for layers in models))

    @property
    def layout(self) -> Hashable:
        return type(self), self.lifted, self.raises_linear, self.n_ctx

    def prepare(self, model: Model) -> Model:
        return _raised(model) if self.raises_linear else model

    def problem(self, pairs: tuple[Pair, ...], per_output: bool) -> Problem:
        models = by_side(self.bra, self.ket)
        cross_only = not self.metric().pairs_within_model
        check_size(models, cross_only)
        return fold_trees(
            models,
            cross_only,
            self.input_kind,
            self.lifted,
            pairs,
            per_output,
            self.n_ctx or 1,
        )

    def weights(self, side: Side, model: Model) -> dict[str, Any]:
        if self.n_ctx is None:
            return named(side, [symmetric_arrays(layer, self.lifted) for layer in model.layers])
        return named(side, [flat_arrays(layer, self.n_ctx) for layer in model.layers])

    def inputs(
        self, names: Collection[str], metric: Metric, d_in: int, t: float | None = None
    ) -> dict[str, Any]:
        if self.n_ctx is not None:
            metric, d_in = flattened(metric, d_in, self.n_ctx), self.n_ctx * d_in
        leaves = input_moments(metric, d_in, self.lifted)
        if t is not None:
            leaves[COVARIANCE] = second_moment_at(metric, d_in, self.lifted, t)
        leaves |= identities(names, {IDENTITY: d_in + self.lifted})
        if TRACE in names:
            leaves[TRACE] = self._trace()
        return only(names, leaves)

    def _trace(self) -> np.ndarray:
        """Leaves out the constant; for sequences, says which coordinate each output belongs to."""
        d_out = self.bra[-1].d_out
        positions = self.n_ctx or 1
        if positions == 1:
            return all_but_constant(d_out)
        same_coordinate = np.tile(np.eye(d_out // positions), (positions, 1))
        return np.pad(same_coordinate, ((1, 0), (1, 0)))


@dataclass(frozen=True)
class Tokens:
    """Models of sequences under `Categorical`: tables over tokens, one index per position. Exact.

    What the methods answer is said in `base.Family`.

    Args:
        name: Of the metric.
        bra: What A consists of.
        ket: What B consists of; None where A meets itself.
        n_ctx: Positions.
        shapes: Of all leaves.
    """

    name: str
    bra: TokenKind
    ket: TokenKind | None
    n_ctx: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, a: Model, b: Model | None, metric: Metric) -> Self:
        if a.n_ctx is None:
            raise ModelError(
                "Categorical is a distribution of token sequences: "
                "give tnsim.Model(layers, n_ctx=...) or load(..., n_ctx=...)"
            )
        if a.n_ctx > MAX_POSITIONS:
            raise TooLarge(
                "Categorical keeps tables over pairs of positions, here "
                f"{a.n_ctx**2 / 2**27:.3g} GiB each for n_ctx={a.n_ctx}; "
                f"it is for up to {MAX_POSITIONS}: use a smaller n_ctx"
            )
        ket = None if b is None else token_kind(b)
        family = cls(metric.name, token_kind(a), ket, a.n_ctx, ())
        leaves = family._constants(metric, a.d_in)
        for side, model in by_side(a, b).items():
            leaves |= jax.eval_shape(functools.partial(family.weights, side), model)
        shapes = {name: leaf.shape for name, leaf in leaves.items()}
        return dataclasses.replace(family, shapes=tuple(sorted(shapes.items())))

    @property
    def _kinds(self) -> tuple[TokenKind, ...]:
        return (self.bra,) if self.ket is None else (self.bra, self.ket)

    def _constants(self, metric: Metric, d_in: int) -> dict[str, Any]:
        return token_inputs(token_probabilities(metric, d_in), self._kinds, self.n_ctx)

    @property
    def exact(self) -> bool:
        return True

    @property
    def lifted(self) -> bool:
        return False  # the constant is apart from the coordinates

    @property
    def nodes(self) -> MomentNodes | None:
        return None  # one run is all

    @property
    def layout(self) -> Hashable:
        return type(self), self._kinds, self.n_ctx

    def prepare(self, model: Model) -> Model:
        return model

    def problem(self, pairs: tuple[Pair, ...], per_output: bool) -> Problem:
        models = by_side(self.bra, self.ket)
        return fold_tokens(models, dict(self.shapes), pairs, per_output)

    def weights(self, side: Side, model: Model) -> dict[str, Any]:
        return token_weights(side, model, self._kinds, self.n_ctx)

    def inputs(
        self, names: Collection[str], metric: Metric, d_in: int, t: float | None = None
    ) -> dict[str, Any]:
        return only(names, self._constants(metric, d_in))


def _raised(model: Model) -> Model:
    """A linear model as a bilinear one, any other as it is."""
    return model if max(model.orders) > 1 else raised(model)


def _flat_kinds(model: Model, raises_linear: bool) -> Kinds:
    """Kinds of a model's layers, over the flattened input if it reads sequences."""
    if raises_linear:
        model = _raised(model)
    if model.n_ctx is None:
        return kinds(model)
    return tuple(flat_kind(layer, model.n_ctx) for layer in model.layers)
