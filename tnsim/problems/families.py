"""The families of problems, and the choice of the family that answers a comparison.

`choose` is the only place that asks which metric and which kind of models it has. The families:

    Sequences   layer over layer, every metric that no other family answers; vectors are sequences
                of one position
    WholeTree   `Symmetric`, and `Gaussian` beyond one nonlinear layer; of sequences only small ones
    Tokens      `Categorical`

Layer over layer, Gaussian moments are carried as means and covariances: raw second moments lose
digits at every layer where a mean is large relative to the spread around it.

A *family* is a way to write the inner products of two models as contractions. Each is a small
frozen object, made from the models' layers (not their numbers) and the metric. The rest of the
program asks a family the questions of the protocol `Family`, and never which family it is.

*Constants.* Diagrams over whole trees (see `whole_tree`) pair *all* legs, as if the input were a
centred Gaussian. A lifted input `(1, x)` is not centred: its mean m holds the constant 1, and the
mean of x where the metric has a mean.

The way out is to let the mean fluctuate. Write the input as `z m + y`, with y ~ N(0, C) centred
and z a number. The inner product E that is asked for has z = 1. Take z ~ N(0, t) instead,
independent of y: then the input is a centred Gaussian of second moment `C + t m m^T`, and its sum
over pairings F(t) is the value that diagrams compute. E and F differ in a known way. The part of
degree 2k in z enters E with `1^(2k) = 1`, and F with `E[z^(2k)] = (2k - 1)!! t^k`. (Of 2n legs, an
odd number at z leaves an odd number at y, with expectation zero.) With f_k the part of degree 2k,

    E = sum_k f_k,          F(t) = sum_k (2k - 1)!! f_k t^k,          k = 0 .. n.

F is a polynomial of degree n in t, so its values at n + 1 points t_j determine every f_k, and E
is a single linear combination of these values, the same for all models:

    E = sum_j w_j F(t_j),          sum_j w_j t_j^k = 1 / (2k - 1)!!,          k = 0 .. n.

The points t need not be positive: F is a polynomial, and `C + t m m^T` is an argument of it.

Values at points were chosen over coefficients of powers of t. A product of parts of degree j and k
takes (j + 1)(k + 1) products of coefficients, and n + 1 of values: counted on plans, 0.8 times as
many multiplications at depth 2, and 1.1 to 1.2 times as many at depth 3. The runs at all points are
a single run on stacks of moments where that is quicker (see `compare.by_plans.runs_together`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import jax
import numpy as np

from tnsim.engine.ir.problem import Problem
from tnsim.errors import TooLarge
from tnsim.metrics.finite_measures import Categorical, positions_of
from tnsim.metrics.input_moments import (
    InputKind,
    SequenceInputs,
    flattened,
    input_moments,
    sequence_inputs,
    sequence_moments,
    whole_tree_kind,
)
from tnsim.metrics.metric import (
    Symmetric,
    joins_whole_trees,
    layer_by_layer,
)
from tnsim.metrics.orbits import PairingRule
from tnsim.metrics.protocol import Metric, joins_layers
from tnsim.models.model import Model
from tnsim.names import IDENTITY, ONE, ONES, SAME_POSITION, TRACE, Leaf, Pair, Side
from tnsim.problems.diagrams import tree
from tnsim.problems.hidden_units import MOST_PAIRED
from tnsim.problems.layer_kinds import (
    Kinds,
    check_shapes,
    joined_levels,
    kinds,
    need_constant,
    nonlinear,
)
from tnsim.problems.layer_tensors import (
    flat_arrays,
    flat_kind,
    raised,
    sequence_arrays,
    symmetric_arrays,
)
from tnsim.problems.sequences.expansions import position_array, position_leaves
from tnsim.problems.sequences.fold import fold_sequences
from tnsim.problems.tokens import TokenKind, fold_tokens, token_inputs, token_kind, token_weights
from tnsim.problems.whole_tree import MAX_LEGS, check_size, fold_trees
from tnsim.sessions import session_cache

T = TypeVar("T")
_HALF_WIDTHS = np.linspace(0.1, 1.0, 91)
"""Half-widths h of the intervals [-h, h] that are searched for the points."""


MAX_POSITIONS = 4096
"""Most positions under `Categorical`: a table over pairs of positions then has 128 MiB."""
_LARGEST_DENSE = 2**24
"""Most elements of a dense attention layer; more take seconds to symmetrise."""
_MOST_EXCHANGED = 5
"""Most factors of a layer that plans join in all their orders: 120 of five, and six take 20 s."""


class MomentNodes(NamedTuple):
    """The points at which a plan runs and the weights of its runs: `E = sum_j w_j F(t_j)`.

    Args:
        points: Variances t_j of the constant. A run has the second moment C + t_j m m^T.
        weights: Weights w_j of the runs.
        magnification: Factor by which the sum enlarges the rounding of the runs.
    """

    points: tuple[float, ...]
    weights: tuple[float, ...]
    magnification: float


@session_cache
def moment_nodes(legs: int) -> MomentNodes:
    """Points and weights that undo the over-counting of a constant of variance t.

    The points are Chebyshev's, stretched to [-h, h]. In a wide interval the powers
    `(2n - 1)!! t^n` are large and have to cancel; in a narrow interval the points lie close
    together and the weights are large, with alternating signs. The h with the least magnification
    is taken.

    Args:
        legs: Number 2n of input legs of both models together. The nodes are right for fewer legs
            too.

    Returns:
        n + 1 points and weights. The magnification is the largest, over k, of the absolute sum
        `sum_j |w_j| |t_j|^k (2k - 1)!!`, which would be 1 without the absolute values: it is 3 for
        4 legs, 10 for 8, 340 for 16.

    Example:
        A part of degree 2k in the constant is over-counted (2k - 1)!! times: 1, 1, 3.

        >>> nodes = moment_nodes(4)
        >>> for k in range(3):
        ...     print(f"{np.dot(nodes.weights, np.power(nodes.points, k)):.3f}")
        1.000
        1.000
        0.333

    Source:
        E[z^(2k)] = (2k - 1)!! t^k for z ~ N(0, t), as derived at the head of this module.
    """
    candidates = [_nodes_within(half_width, legs // 2) for half_width in _HALF_WIDTHS]
    return min(candidates, key=lambda nodes: nodes.magnification)


def _nodes_within(half_width: float, n: int) -> MomentNodes:
    """The n + 1 Chebyshev points on [-h, h] and the weights of the runs at them."""
    odd_numbers = [2 * k - 1.0 for k in range(1, n + 1)]
    double_factorials = np.cumprod([1.0, *odd_numbers])  # (2k - 1)!! for k = 0 .. n
    chebyshev = np.cos(np.pi * (2 * np.arange(n + 1) + 1) / (2 * n + 2))
    points = half_width * chebyshev
    # sum_j t_j^k w_j = 1 / (2k - 1)!!, one equation for each degree k: a Vandermonde system
    powers = points[None, :] ** np.arange(n + 1)[:, None]  # powers[k, j] = t_j^k
    weights = np.linalg.solve(powers, 1 / double_factorials)
    # Size of the runs relative to their sum: f_k enters run j as (2k - 1)!! f_k t_j^k.
    sizes = np.abs(weights) @ np.abs(powers).T * double_factorials
    return MomentNodes(tuple(points.tolist()), tuple(weights.tolist()), float(sizes.max()))


class Family(Protocol):
    """A way in which two models and a metric become a Problem.

    Frozen and hashable: a family is the key under which plans are stored, so it holds everything
    that a plan depends on besides the inner products asked for.
    """

    @property
    def name(self) -> str:
        """Name of the metric that was asked for."""
        ...

    @property
    def exact(self) -> bool:
        """Whether the metric's own definition is met exactly."""
        ...

    @property
    def lifted(self) -> bool:
        """Whether results per output coordinate carry the constant at position 0."""
        ...

    @property
    def nodes(self) -> MomentNodes | None:
        """Variances of the constant at which a plan runs; None where a single run is enough."""
        ...

    @property
    def layout(self) -> Hashable:
        """Everything that `prepare` and `weights` depend on besides the model and its side.

        Families of equal layout make the same arrays of a model, so the arrays serve all of them.
        """
        ...

    @classmethod
    def of(cls, a: Model, b: Model | None, metric: Metric) -> Self:
        """The family member that compares `a` with `b`, or `a` with itself where `b` is None.

        Raises:
            ModelError: The metric is not defined for these models.
            TooLarge: The metric is defined, but the contraction is out of reach.
        """
        ...

    def prepare(self, model: Model) -> Model:
        """The same function as `model`, in the form of layers that the family reads."""
        ...

    def problem(self, pairs: tuple[Pair, ...], slices: bool) -> Problem:
        """The problem that has inner products for outputs.

        Args:
            pairs: The inner products asked for, which name the outputs.
            slices: Whether there is an inner product for every output coordinate, or their
                sum.
        """
        ...

    def weights(self, side: Side, model: Model) -> dict[str, Any]:
        """The arrays of a prepared model by the names of the problem's leaves."""
        ...

    def inputs(
        self, names: Collection[str], metric: Metric, d_in: int, t: float | None = None
    ) -> dict[str, Any]:
        """The leaves that belong to no model: moments of the input, and constants.

        Args:
            names: Names of the leaves that are read.
            metric: Metric with these moments, of the class that the family was made for.
            d_in: Number of coordinates of the input.
            t: Variance of the constant, any of `nodes`; None without nodes.

        Returns:
            Arrays by leaf name.
        """
        ...


def model_weights(family: Family, models: Mapping[Side, Model]) -> dict[str, Any]:
    """The arrays of all models by leaf name.

    Args:
        family: Family that names the leaves.
        models: Models by side, prepared by the family.

    Returns:
        Arrays by leaf name.

    Example:
        >>> import tnsim
        >>> from tnsim.problems.families import choose
        >>> model = tnsim.Model([tnsim.Linear([[2.0]])])
        >>> family = choose(model, None, tnsim.Gaussian())
        >>> model_weights(family, {"A": model})
        {'A.LAYER0.WEIGHT': array([[2.]])}
    """
    arrays: dict[str, Any] = {}
    for side, model in models.items():
        arrays |= family.weights(side, model)
    return arrays


def by_side(bra: T, ket: T | None) -> dict[Side, T]:
    """The given objects of the two models by side, without a missing second model.

    Example:
        >>> by_side(1, 2), by_side(1, None)
        ({'A': 1, 'B': 2}, {'A': 1})
    """
    if ket is None:
        return {"A": bra}
    return {"A": bra, "B": ket}


def named(side: Side, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The arrays of a model's layers, by leaf name.

    Example:
        >>> named("A", [{"WEIGHT": 1.0}])
        {'A.LAYER0.WEIGHT': 1.0}
    """
    leaves: dict[str, Any] = {}
    for number, roles in enumerate(layers):
        for role, array in roles.items():
            leaves[str(Leaf(side, number, role))] = array
    return leaves


def identities(names: Collection[str], sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The identity matrices among the names that are read; the others may be large.

    Example:
        >>> list(identities(["IDENTITY"], {"IDENTITY": 2, "SAME_POSITION": 1000}))
        ['IDENTITY']
    """
    return {name: np.eye(size) for name, size in sizes.items() if name in names}


def only(names: Collection[str], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves that a plan reads.

    Example:
        >>> only(["MEAN"], {"MEAN": 1.0, "TRACE": 2.0})
        {'MEAN': 1.0}
    """
    return {name: array for name, array in leaves.items() if name in names}


class _RunOnce:
    """A family that reads models as they are, and whose plans run once.

    The constant is no coordinate of its outputs.
    """

    nodes = None
    lifted = False

    def prepare(self, model: Model) -> Model:
        return model


@dataclass(frozen=True)
class Sequences(_RunOnce):
    """Models of sequences, layer over layer, with the covariances between positions.

    Vectors are sequences of a single position. Exact for the tree metrics at any depth and for
    `Gaussian` up to a single nonlinear layer; beyond that it is the closure. `Family`
    documents the methods.

    Args:
        name: Name of the metric that was asked for.
        rule: Rule by which the legs of layers that meet are joined.
        exact: Whether the metric's own definition is met exactly.
        bra: Kinds of the layers of A.
        ket: Kinds of the layers of B; None where A meets itself.
        input_kind: Structure of the input's moments.
        n_ctx: Number of positions.

    Source:
        Paper, appendices A.2 and A.3, for sequences.
    """

    name: str
    rule: PairingRule
    exact: bool
    bra: Kinds
    ket: Kinds | None
    input_kind: SequenceInputs
    n_ctx: int

    @classmethod
    def of(cls, a: Model, b: Model | None, metric: Metric) -> Self:
        bra, ket = kinds(a), None if b is None else kinds(b)
        positions = a.n_ctx or 1
        degrees = a.degree, (b or a).degree
        depth = nonlinear(bra, ket or ())
        joined = layer_by_layer(metric, joined_levels(bra, ket or ()), degrees)
        check_shapes(bra, ket or bra, joined)
        inputs = sequence_inputs(metric, a.d_in, positions)
        exact = joined.is_exact(depth)
        return cls(metric.name, joined.rule, exact, bra, ket, inputs, positions)

    @property
    def layout(self) -> Hashable:
        return type(self), self.n_ctx

    def problem(self, pairs: tuple[Pair, ...], slices: bool) -> Problem:
        models = by_side(self.bra, self.ket)
        return fold_sequences(models, self.rule, self.input_kind, self.n_ctx, pairs, slices)

    def weights(self, side: Side, model: Model) -> dict[str, Any]:
        return named(side, [sequence_arrays(layer, self.n_ctx) for layer in model.layers])

    def inputs(
        self, names: Collection[str], metric: Metric, d_in: int, t: float | None = None
    ) -> dict[str, Any]:
        n = self.n_ctx
        leaves = sequence_moments(metric, d_in, n)
        leaves |= {ONE: np.ones(()), ONES: np.ones(n)}
        leaves |= identities(names, {SAME_POSITION: n, IDENTITY: d_in})
        leaves |= {name: position_array(name, n) for name in position_leaves(names)}
        return only(names, leaves)


@dataclass(frozen=True)
class WholeTree:
    """All legs of both trees joined at once, exactly.

    The family of `Symmetric`, and of `Gaussian` beyond a single nonlinear layer. Small models of
    sequences are flattened into models of vectors. `Family` documents the methods.

    Args:
        name: Name of the metric that was asked for.
        metric: Class of the metric that joins the legs.
        bra: Kinds of the layers of A.
        ket: Kinds of the layers of B; None where A meets itself.
        input_kind: Structure of the input's moments.
        lifted: Whether the constant is coordinate 0 of every bond.
        raises_linear: Whether a linear model is read as a bilinear model.
        n_ctx: Number of positions of the flattened sequences; None for vectors.

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

    exact = True

    @classmethod
    def of(cls, a: Model, b: Model | None, metric: Metric) -> Self:
        # Diagrams pair all legs, so both models together need an even number of them: a linear
        # model, of odd degree, is raised to a bilinear one.
        raises = metric.pairs_within_model
        bra = _flat_kinds(a, raises)
        ket = None if b is None else _flat_kinds(b, raises)
        lifted = a.n_ctx is not None or need_constant([bra, ket or bra])
        inputs = whole_tree_kind(metric, lifted)
        check_size(bra, ket or bra, cross_only=not raises)
        return cls(metric.name, type(metric), bra, ket, inputs, lifted, raises, a.n_ctx)

    @staticmethod
    def fits(a: Model, b: Model, metric: Metric) -> bool:
        """Whether flattened trees can be joined: few legs, and small tensors.

        Unequal degrees under a metric that asks for equal ones, and an odd number of legs, are
        refused as trees, see `check_size`.
        """
        if not metric.pairs_within_model and a.degree != b.degree:
            return True
        raises = metric.pairs_within_model
        largest = max(kind.dense_size for model in (a, b) for kind in _flat_kinds(model, raises))
        return WholeTree.legs(a, b, metric) <= MAX_LEGS and largest <= _LARGEST_DENSE

    @staticmethod
    def legs(a: Model, b: Model, metric: Metric) -> int:
        """Number of legs of both models as trees of a metric."""
        return sum(tree(_flat_kinds(model, metric.pairs_within_model)).legs for model in (a, b))

    @property
    def nodes(self) -> MomentNodes | None:
        if self.input_kind.centred:
            return None
        models = by_side(self.bra, self.ket).values()
        # Enough legs for the norm of the larger model, and so for the cross term.
        return moment_nodes(2 * max(tree(layers).legs for layers in models))

    @property
    def layout(self) -> Hashable:
        return type(self), self.lifted, self.raises_linear, self.n_ctx

    def prepare(self, model: Model) -> Model:
        return _raised_model(model) if self.raises_linear else model

    def problem(self, pairs: tuple[Pair, ...], slices: bool) -> Problem:
        return fold_trees(
            by_side(self.bra, self.ket),
            not self.metric().pairs_within_model,
            self.input_kind,
            self.lifted,
            pairs,
            slices,
            self.n_ctx or 1,
        )

    def weights(self, side: Side, model: Model) -> dict[str, Any]:
        if self.n_ctx is None:
            return named(side, [symmetric_arrays(layer, self.lifted) for layer in model.layers])
        return named(side, [flat_arrays(layer, self.n_ctx) for layer in model.layers])

    def inputs(
        self, names: Collection[str], metric: Metric, d_in: int, t: float | None = None
    ) -> dict[str, Any]:
        # Flattened, the positions' moments are the moments of a single long vector.
        if self.n_ctx is not None:
            metric, d_in = flattened(metric, d_in, self.n_ctx), self.n_ctx * d_in
        leaves = input_moments(metric, d_in, self.lifted, t)
        leaves |= identities(names, {IDENTITY: d_in + self.lifted})
        if TRACE in names:
            leaves[TRACE] = self._trace_array()
        return only(names, leaves)

    def _trace_array(self) -> np.ndarray:
        """The array that leaves out the constant and, for sequences, adds up positions."""
        d_out = self.bra[-1].d_out
        positions = self.n_ctx or 1
        if positions == 1:
            return np.concatenate([np.zeros(1), np.ones(d_out)])
        # Shape (1 + positions x d, 1 + d): row (s, i) has a 1 at the coordinate i, and the
        # constant's row and column are zero.
        same_coordinate = np.tile(np.eye(d_out // positions), (positions, 1))
        return np.pad(same_coordinate, ((1, 0), (1, 0)))


@dataclass(frozen=True)
class Tokens(_RunOnce):
    """Models of sequences under `Categorical` as tables over tokens, exactly.

    `Family` documents the methods.

    Args:
        name: Name of the metric.
        bra: Kind of A.
        ket: Kind of B; None where A meets itself.
        n_ctx: Number of positions.
        shapes: Shapes of all leaves, by name.
    """

    name: str
    bra: TokenKind
    ket: TokenKind | None
    n_ctx: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    exact = True

    @classmethod
    def of(cls, a: Model, b: Model | None, metric: Metric) -> Self:
        n_ctx = positions_of(a.n_ctx)
        if n_ctx > MAX_POSITIONS:
            raise TooLarge(
                "Categorical keeps tables over pairs of positions, here "
                f"{n_ctx**2 / 2**27:.3g} GiB each for n_ctx={n_ctx}; "
                f"it is for up to {MAX_POSITIONS}: use a smaller n_ctx"
            )
        ket = None if b is None else token_kind(b)
        family = cls(metric.name, token_kind(a), ket, n_ctx, ())
        # Shapes of the leaves without their numbers: the arrays are evaluated abstractly, since a
        # table over a vocabulary would take memory.
        leaves = family._constants_of(metric, a.d_in)
        for side, model in by_side(a, b).items():
            leaves |= jax.eval_shape(functools.partial(family.weights, side), model)
        shapes = {name: leaf.shape for name, leaf in leaves.items()}
        return dataclasses.replace(family, shapes=tuple(sorted(shapes.items())))

    @property
    def _kinds_of(self) -> tuple[TokenKind, ...]:
        return (self.bra,) if self.ket is None else (self.bra, self.ket)

    def _constants_of(self, metric: Metric, d_in: int) -> dict[str, Any]:
        assert isinstance(metric, Categorical)
        return token_inputs(metric.distribution(d_in), self._kinds_of, self.n_ctx)

    @property
    def layout(self) -> Hashable:
        return type(self), self._kinds_of, self.n_ctx

    def problem(self, pairs: tuple[Pair, ...], slices: bool) -> Problem:
        models = by_side(self.bra, self.ket)
        return fold_tokens(models, dict(self.shapes), pairs, slices)

    def weights(self, side: Side, model: Model) -> dict[str, Any]:
        return token_weights(side, model, self._kinds_of, self.n_ctx)

    def inputs(
        self, names: Collection[str], metric: Metric, d_in: int, t: float | None = None
    ) -> dict[str, Any]:
        return only(names, self._constants_of(metric, d_in))


def _raised_model(model: Model) -> Model:
    """A linear model raised to a bilinear model, any other model unchanged."""
    return model if max(model.orders) > 1 else raised(model)


def _flat_kinds(model: Model, raises_linear: bool) -> Kinds:
    """Kinds of a model's layers, over the flattened input for a model of sequences."""
    if raises_linear:
        model = _raised_model(model)
    if model.n_ctx is None:
        return kinds(model)
    return tuple(flat_kind(layer, model.n_ctx) for layer in model.layers)


def choose(a: Model, b: Model | None, metric: Metric) -> Family:
    """The family that compares two models, or a model with itself where `b` is None.

    Raises:
        ModelError: The metric is not defined for these models.
        TooLarge: The metric is defined, but the contraction is out of reach.

    Example:
        >>> import numpy as np, tnsim
        >>> model = tnsim.Model([tnsim.Linear(np.eye(2))])
        >>> type(choose(model, None, tnsim.TreeSymmetric())).__name__
        'Sequences'
    """
    _check_orders(kinds(a) + kinds(a if b is None else b), metric)
    return _family_of(a, b, metric).of(a, b, metric)


def _check_orders(layers: Kinds, metric: Metric) -> None:
    """Refuse products of so many factors that joining them in every order is beyond planning."""
    rule = metric.rule if joins_layers(metric) else None
    most = None
    if rule is PairingRule.ISSERLIS:
        most = MOST_PAIRED
    elif rule is PairingRule.SYMMETRISED or isinstance(metric, Symmetric):
        most = _MOST_EXCHANGED
    # Attention is expanded in head space, where its pairings are few.
    order = max((kind.order for kind in layers if not kind.mixes_positions), default=0)
    if most is not None and order > most:
        raise TooLarge(
            f"{type(metric).__name__} joins the factors of a layer with those of another in every "
            f"order, too many for a product of {order} factors: up to {most} are planned. Use "
            "Gaussian() where this is the only nonlinear layer, tnsim.pairwise([a, b], metric), "
            "which compares coefficients where they fit in memory, or Empirical(inputs)"
        )


def _family_of(a: Model, b: Model | None, metric: Metric) -> type[Family]:
    if isinstance(metric, Categorical):
        return Tokens
    other = a if b is None else b
    depth = joined_levels(kinds(a), kinds(other))
    # Linear models have one leg each, which a layer joins without a matrix over pairs of inputs.
    whole = depth > 0 and joins_whole_trees(type(metric), depth)
    if a.n_ctx is None:
        return WholeTree if whole else Sequences
    if whole and depth > 1 and WholeTree.fits(a, other, metric):
        return WholeTree
    return Sequences


def has_plan(models: Sequence[Model], metric: Metric) -> bool:
    """Whether a family has a plan for each of these models under `Categorical`.

    Example:
        >>> import tnsim
        >>> table = tnsim.Model([tnsim.Linear([[1.0, 2.0]])], n_ctx=2)
        >>> has_plan([table], tnsim.Categorical())
        True
    """
    if not all(model.is_polynomial for model in models):
        return False
    try:
        for model in models:
            choose(model, None, metric)
    except TooLarge:
        return False
    return True
