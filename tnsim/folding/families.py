"""The four families of problems. In: two models, a metric. Out: a family for each way of comparing them, see `base`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from tnsim.engine.problem import Problem
from tnsim.errors import ModelError, TooLarge
from tnsim.folding import layerwise, whole_tree
from tnsim.folding.constants import MomentNodes, moment_nodes
from tnsim.folding.sequences.coincidences import position_array
from tnsim.folding.sequences.fold import fold_sequences
from tnsim.folding.tokens import fold_tokens
from tnsim.metrics.input_moments import (
    InputKind,
    SequenceInputs,
    flattened,
    input_kind,
    input_moments,
    second_moment_at,
    sequence_inputs,
    sequence_moments,
    whole_tree_kind,
)
from tnsim.metrics.metric import Categorical, Metric, Symmetric, is_exact, layer_by_layer
from tnsim.models.model import Model
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
from tnsim.tensors.kinds import LayerKind, kinds, nonlinear
from tnsim.tensors.lifted import arrays, symmetric_arrays
from tnsim.tensors.positional import sequence_arrays
from tnsim.tensors.token_tables import TokenKind, token_inputs, token_kind, token_weights

MAX_POSITIONS = 4096
"""Of `Categorical`: a table over pairs of positions has 128 MiB."""

_LARGEST_DENSE = 2**24
"""Elements of an attention layer as a dense tensor; more take seconds to symmetrise."""


@dataclass(frozen=True)
class LayerWise:
    """Models of vectors, a layer of one over a layer of the other: Gram and moment recursions.

    Exact for the tree metrics at any depth, for `Gaussian` up to one nonlinear layer; beyond, the closure.
    """

    name: str
    metric: type[Metric]
    bra: tuple[LayerKind, ...]
    ket: tuple[LayerKind, ...] | None
    input_kind: InputKind
    lifted: bool
    nodes: MomentNodes | None = None

    @classmethod
    def of(cls, a: Model, b: Model | None, metric: Metric) -> Self:
        bra, ket = kinds(a), _kinds_of_other(b)
        lifted = _must_lift(bra, ket or bra)
        return cls(metric.name, type(metric), bra, ket, input_kind(metric, lifted), lifted)

    @property
    def exact(self) -> bool:
        return is_exact(self.metric(), nonlinear(self.bra, self.ket or ()))

    def prepare(self, model: Model) -> Model:
        return model

    def problem(self, pairs: tuple[Pair, ...], per_output: bool) -> Problem:
        models = _by_side(self.bra, self.ket)
        return layerwise.fold(
            models, self.metric(), self.input_kind, self.lifted, pairs, per_output
        )

    def weights(self, side: Side, model: Model) -> dict[str, Any]:
        return _named(side, [arrays(layer, self.lifted) for layer in model.layers])

    def inputs(
        self, names: Collection[str], metric: Metric, d_in: int, t: float | None = None
    ) -> dict[str, Any]:
        moments = input_moments(metric, d_in, self.lifted)
        leaves = _renamed(moments, {"mean": MEAN, "moment": COVARIANCE})
        leaves |= _identities(names, {IDENTITY: d_in + self.lifted})
        leaves[TRACE] = _all_but_constant(self.bra[-1].d_out)
        return _only(names, leaves)


@dataclass(frozen=True)
class WholeTree:
    """All legs of both trees joined at once: `Symmetric`, and `Gaussian` beyond one nonlinear layer. Exact.

    Small models of sequences are flattened into models of vectors; `n_ctx` is then their number of positions.
    """

    name: str
    metric: type[Metric]
    bra: tuple[LayerKind, ...]
    ket: tuple[LayerKind, ...] | None
    input_kind: InputKind
    lifted: bool
    raises_linear: bool
    n_ctx: int | None
    exact: bool = True

    @classmethod
    def of(cls, a: Model, b: Model | None, metric: Metric) -> Self:
        # Diagrams pair all legs, so both models together need an even number of them: beside a
        # nonlinear model, of even degree, a linear one is raised to a bilinear one.
        raises = metric.pairs_within_model
        bra = _flat_kinds(_raised(a) if raises else a)
        ket = None
        if b is not None:
            ket = _flat_kinds(_raised(b) if raises else b)
        lifted = a.n_ctx is not None or _must_lift(bra, ket or bra)
        inputs = whole_tree_kind(metric, lifted)
        return cls(metric.name, type(metric), bra, ket, inputs, lifted, raises, a.n_ctx)

    @staticmethod
    def fits(a: Model, b: Model, metric: Metric) -> bool:
        """Whether flattened trees of sequence models can be joined: few legs, and dense tensors that fit."""
        models = [_flat_kinds(_raised(m) if metric.pairs_within_model else m) for m in (a, b)]
        legs = sum(whole_tree.tree(layers).legs for layers in models)
        sizes = [k.dense_size for layers in models for k in layers]
        return (
            legs <= whole_tree.MAX_LEGS
            and legs % 2 == 0
            and max(sizes, default=0) <= _LARGEST_DENSE
        )

    @property
    def nodes(self) -> MomentNodes | None:
        if self.input_kind.centred:
            return None
        models = _by_side(self.bra, self.ket).values()
        # Enough for the norm of the model with more legs, and so for the cross term.
        return moment_nodes(2 * max(whole_tree.tree(m).legs for m in models))

    def prepare(self, model: Model) -> Model:
        return _raised(model) if self.raises_linear else model

    def problem(self, pairs: tuple[Pair, ...], per_output: bool) -> Problem:
        models = _by_side(self.bra, self.ket)
        cross_only = self.metric is Symmetric
        whole_tree.check_size(models, cross_only)
        return whole_tree.fold(
            models,
            cross_only,
            self.input_kind,
            self.lifted,
            pairs,
            per_output,
            self.n_ctx or 1,
        )

    def weights(self, side: Side, model: Model) -> dict[str, Any]:
        if self.n_ctx is not None:
            return _named(side, [flat_arrays(layer, self.n_ctx) for layer in model.layers])
        return _named(side, [symmetric_arrays(layer, self.lifted) for layer in model.layers])

    def inputs(
        self, names: Collection[str], metric: Metric, d_in: int, t: float | None = None
    ) -> dict[str, Any]:
        if self.n_ctx is not None:
            metric, d_in = flattened(metric, d_in, self.n_ctx), self.n_ctx * d_in
        moments = input_moments(metric, d_in, self.lifted)
        leaves = _renamed(moments, {"mean": MEAN, "moment": COVARIANCE})
        if t is not None:
            leaves[COVARIANCE] = second_moment_at(metric, d_in, self.lifted, t)
        leaves |= _identities(names, {IDENTITY: d_in + self.lifted})
        d_out = self.bra[-1].d_out
        leaves[TRACE] = _all_but_constant(d_out)
        if (self.n_ctx or 1) > 1 and TRACE in names:
            # Which output coordinate a row belongs to, whatever its position.
            same = np.tile(np.eye(d_out // self.n_ctx), (self.n_ctx, 1))
            leaves[TRACE] = np.pad(same, ((1, 0), (1, 0)))
        return _only(names, leaves)


@dataclass(frozen=True)
class Sequences:
    """Models of sequences, layer over layer, covariances between positions carried along."""

    name: str
    metric: type[Metric]
    bra: tuple[LayerKind, ...]
    ket: tuple[LayerKind, ...] | None
    input_kind: SequenceInputs
    n_ctx: int
    lifted: bool = False
    nodes: MomentNodes | None = None

    @classmethod
    def of(cls, a: Model, b: Model | None, metric: Metric) -> Self:
        bra, ket = kinds(a), _kinds_of_other(b)
        degrees = a.degree, a.degree if b is None else b.degree
        joined = layer_by_layer(metric, nonlinear(bra, ket or ()), degrees)
        inputs = sequence_inputs(metric, a.d_in, a.n_ctx)
        return cls(metric.name, type(joined), bra, ket, inputs, a.n_ctx)

    @property
    def exact(self) -> bool:
        return is_exact(self.metric(), nonlinear(self.bra, self.ket or ()))

    def prepare(self, model: Model) -> Model:
        return model

    def problem(self, pairs: tuple[Pair, ...], per_output: bool) -> Problem:
        models = _by_side(self.bra, self.ket)
        return fold_sequences(models, self.metric(), self.input_kind, self.n_ctx, pairs, per_output)

    def weights(self, side: Side, model: Model) -> dict[str, Any]:
        return _named(side, [sequence_arrays(layer, self.n_ctx) for layer in model.layers])

    def inputs(
        self, names: Collection[str], metric: Metric, d_in: int, t: float | None = None
    ) -> dict[str, Any]:
        n = self.n_ctx
        moments = sequence_moments(metric, d_in, n)
        leaves = _renamed(moments, {"mean": MEAN, "covariance": COVARIANCE})
        leaves |= {ONE: np.ones(()), ONES: np.ones(n)}
        leaves |= _identities(names, {SAME_POSITION: n, IDENTITY: d_in})
        for name in names:
            array = position_array(name, n)
            if array is not None:
                leaves[name] = array
        return _only(names, leaves)


@dataclass(frozen=True)
class Tokens:
    """Models of sequences under `Categorical`: tables over tokens, one index per position. Exact."""

    name: str
    bra: TokenKind
    ket: TokenKind | None
    n_ctx: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    exact: bool = True
    lifted: bool = False
    nodes: MomentNodes | None = None

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
        models: dict[Side, Model] = {"A": a} if b is None else {"A": a, "B": b}
        family = cls(metric.name, token_kind(a), b and token_kind(b), a.n_ctx, ())
        arrays = family._constants(metric, a.d_in)
        shapes = {name: array.shape for name, array in arrays.items()}
        for side, model in models.items():

            def laid_out(model: Model, side: Side = side) -> dict[str, Any]:
                return family.weights(side, model)

            announced = jax.eval_shape(laid_out, model)
            shapes |= {name: array.shape for name, array in announced.items()}
        return cls(metric.name, family.bra, family.ket, a.n_ctx, tuple(sorted(shapes.items())))

    @property
    def _kinds(self) -> tuple[TokenKind, ...]:
        return (self.bra,) if self.ket is None else (self.bra, self.ket)

    def _constants(self, metric: Categorical, d_in: int) -> dict[str, Any]:
        return token_inputs(metric.distribution(d_in), self._kinds, self.n_ctx)

    def prepare(self, model: Model) -> Model:
        return model

    def problem(self, pairs: tuple[Pair, ...], per_output: bool) -> Problem:
        models = _by_side(self.bra, self.ket)
        return fold_tokens(models, dict(self.shapes), pairs, per_output)

    def weights(self, side: Side, model: Model) -> dict[str, Any]:
        return token_weights(side, model, self._kinds)

    def inputs(
        self, names: Collection[str], metric: Metric, d_in: int, t: float | None = None
    ) -> dict[str, Any]:
        return _only(names, self._constants(metric, d_in))


def _by_side(bra: Any, ket: Any | None) -> dict[Side, Any]:
    """What is there of each model, under its name."""
    return {"A": bra} if ket is None else {"A": bra, "B": ket}


def _kinds_of_other(model: Model | None) -> Any | None:
    return None if model is None else kinds(model)


def _must_lift(bra: tuple[LayerKind, ...], ket: tuple[LayerKind, ...]) -> bool:
    """Whether the constant coordinate is needed: some layer has a constant, or only one of the models is odd.

    Unlifted, an odd and an even model have no legs to join.
    """
    constant = any(layer.constant for layer in bra + ket)
    return constant or whole_tree.tree(bra).legs % 2 != whole_tree.tree(ket).legs % 2


def _flat_kinds(model: Model) -> tuple[LayerKind, ...]:
    """Kinds of a model's layers, over the flattened input if it reads sequences."""
    if model.n_ctx is None:
        return kinds(model)
    return tuple(flat_kind(layer, model.n_ctx) for layer in model.layers)


def _raised(model: Model) -> Model:
    """A linear model as a bilinear one, any other as it is."""
    if max(model.orders) > 1:
        return model
    return Model(whole_tree.raised(model).layers, model.n_ctx)


def _named(side: Side, layers: list[dict[str, Any]]) -> dict[str, Any]:
    """The arrays of a model's layers, by leaf name."""
    leaves = {}
    for number, roles in enumerate(layers):
        for role, array in roles.items():
            leaves[str(Leaf(side, number, role))] = array
    return leaves


def _renamed(arrays: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names[name]: array for name, array in arrays.items()}


def _all_but_constant(d_out: int) -> np.ndarray:
    """0 for the constant row, 1 for the outputs, shape (1 + d_out,)."""
    return np.concatenate([np.zeros(1), np.ones(d_out)])


def _identities(names: Collection[str], sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Identity matrices, those alone that are read: few plans read one, and it may be large."""
    return {name: np.eye(size) for name, size in sizes.items() if name in names}


def _only(names: Collection[str], leaves: dict[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in leaves.items() if name in names}
