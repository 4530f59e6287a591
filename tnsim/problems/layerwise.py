"""The layer-wise fold of vectors: a layer of the bra over a layer of the ket.

The closed network of an inner product is a tree over a tree. The contribution of a pair (bra
subtree, ket subtree) depends on the two layers at their tops and on the pairs below, not on the
copy of the subtrees, so it is defined once. With X and Y the two models, and h_X the state of X
below a layer, the contribution is the second moment of the states and, for the metrics that pair
legs within a model, the mean of each:

    S_XY = E[h_X h_Y^T],        m_X = E[h_X].

*The recursion.* A layer's output is a sum of products of its legs, each linear in the state below.
The moment of two outputs is therefore a moment of m + n legs, and a metric says which joinings of
legs it is a sum of. A joined pair of legs counts by S of the states that the legs read, a leg that
is handed to the mean by m (see `metrics.pairings`):

    S'_XY = sum over joinings of  weight * X-layer * Y-layer * prod S * prod m.

From the input's own moments up, a step for each layer, this ends in E[<f_X, f_Y>] as the trace of
the last moment. For `TreeSymmetric` it is the Gram recursion of the paper's appendix A.2; for the
Gaussian metrics it is appendix A.3, a single layer at a time.

Layers are matched from the input up (see `alignment`); where a model has a layer more, the other
waits, and an identity stands in for its layer.

The module reads from the terms of a single step (`LayerTerms`) to the problem of all steps
(`fold_layers`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tnsim.engine.ir.problem import (
    Definition,
    Merge,
    Operand,
    Problem,
    ScaleGroup,
    Stage,
    Term,
    prune,
)
from tnsim.metrics.input_moments import InputKind
from tnsim.metrics.pairings import Joining, Leg, gaussian_mean
from tnsim.metrics.protocol import LayerwiseMetric
from tnsim.names import (
    COVARIANCE,
    IDENTITY,
    MEAN,
    PAIRS,
    SIDES,
    TRACE,
    Leaf,
    Pair,
    Side,
    input_index,
)
from tnsim.problems.alignment import Step, align
from tnsim.problems.tensors.kinds import Kinds
from tnsim.problems.tensors.lifted import LayerPart, Local, local, shapes

_WAIT = Local(1, (LayerPart((), out=input_index(0)),))
"""The tensor of a model that waits, the identity."""


class States(NamedTuple):
    """The names under which the moments of the states below a layer are defined.

    Args:
        moments: Name of S for every pair of models; None while S is the input's.
        means: Name of m for every model; None while m is the input's.
        centred: Whether a model's mean vanishes.
    """

    moments: dict[Pair, str | None]
    means: dict[Side, str | None]
    centred: dict[Side, bool]


@dataclass(frozen=True, eq=False)
class Comparison:
    """The arguments that all steps share, and the layers that each step applies.

    Args:
        models, metric, inputs, lifted, pairs: Arguments of `fold_layers`.
        steps: The layers of both models, matched.
    """

    models: dict[Side, Kinds]
    metric: LayerwiseMetric
    inputs: InputKind
    lifted: bool
    pairs: tuple[Pair, ...]
    steps: tuple[Step, ...]

    def layer(self, model: Side, number: int) -> int | None:
        """Number of the layer that a step applies to a model; None where it waits."""
        step = self.steps[number]
        return step.bra if model == "A" else step.ket

    def order(self, model: Side, number: int) -> int:
        """Number of legs that a model has at a step."""
        return self.local(model, number).order

    def local(self, model: Side, number: int) -> Local:
        """The tensor that a step applies to a model."""
        layer = self.layer(model, number)
        return _WAIT if layer is None else local(self.models[model][layer])

    def waits(self, pair: Pair, number: int) -> bool:
        """Whether a step leaves both models as they are."""
        return self.layer(pair.bra, number) is None and self.layer(pair.ket, number) is None

    def mixes_after(self, number: int) -> bool:
        """Whether a nonlinear layer, which mixes moments and means, comes after a step."""
        for later in range(number + 1, len(self.steps)):
            if any(self.order(model, later) > 1 for model in self.models):
                return True
        return False

    def carried(self) -> tuple[Pair, ...]:
        """The pairs with moments that every step needs.

        A metric that pairs legs within a model also needs the moments of each model with itself.
        """
        if not self.metric.pairs_within_model:
            return self.pairs
        present = set(itertools.chain.from_iterable(self.pairs))
        carried = []
        for pair in PAIRS:
            if set(pair) <= present and (pair.bra == pair.ket or pair in self.pairs):
                carried.append(pair)
        return tuple(carried)


class _Placed(NamedTuple):
    """A part of a layer's tensor in a term, its legs in any of their orders.

    Args:
        side: Side of a joining, "A" for the bra and "B" for the ket.
        model: Model that has the layer.
        layer: Number of the layer; None for the identity.
        part: Summand of the layer's tensor.
        order: Leg of the joining for every input of the part.
        weight: Factor of the part.
    """

    side: Side
    model: Side
    layer: int | None
    part: LayerPart
    order: tuple[int, ...]
    weight: float

    def name_of(self, index: str) -> str:
        """The name that an index of the part has in the term."""
        # An input index of the part is the leg of the joining that stands there; all other indices
        # get the side in front, so that bra and ket differ.
        for n, leg in enumerate(self.order):
            if index == input_index(n):
                return _leg_index(Leg(self.side, leg))
        return self.side + index

    def operands(self) -> list[Operand]:
        """The arrays of the part."""
        if self.layer is None:  # an identity, which has no arrays
            return []
        operands = []
        for role, indices in self.part.tensors:
            name = str(Leaf(self.model, self.layer, role))
            operands.append(Operand(name, tuple(map(self.name_of, indices))))
        return operands


@dataclass(frozen=True, eq=False)
class LayerTerms:
    """The terms of moments and means above a single step.

    Args:
        comparison: Arguments that all steps share.
        number: Number of the step.
        below: States that the step's layers read.
    """

    comparison: Comparison
    number: int
    below: States

    def moment(self, pair: Pair, outputs: tuple[str, str]) -> Iterator[Term]:
        """The moment of a pair after the step; its trace where both outputs are a single index."""
        orders = [self.comparison.order(model, self.number) for model in pair]
        centred = self.below.centred[pair.bra] and self.below.centred[pair.ket]
        joinings = self.comparison.metric.joinings(orders[0], orders[1], centred)
        return self.products(pair, joinings, outputs)

    def products(
        self, models: Sequence[Side], joinings: Iterable[Joining], outputs: tuple[str, ...]
    ) -> Iterator[Term]:
        """Joinings multiplied out: over the parts of every layer and the orders of its legs.

        Args:
            models: Models with the layers that meet, the bra's first; a single model for a mean.
            joinings: Joinings of the legs of these layers.
            outputs: Names of the layers' output indices in every term.
        """
        for joining in joinings:
            choices = []
            for side, model in zip(SIDES, models, strict=False):
                choices.append(self.placed(side, model, side in joining.symmetrised))
            for placed in itertools.product(*choices):
                yield self.term(joining, placed, outputs)

    def placed(self, side: Side, model: Side, symmetrised: bool) -> list[_Placed]:
        """The parts of a model's layer; symmetrised, each with its legs in every order."""
        # P_n T is the mean over the n! orders of T's legs. Every order is a term of its own: a
        # product of the layer's own arrays, and planning may share its parts with other terms.
        layer = self.comparison.layer(model, self.number)
        tensor = self.comparison.local(model, self.number)
        orders = [tuple(range(tensor.order))]
        if symmetrised:
            orders = list(itertools.permutations(range(tensor.order)))
        placed = []
        for part in tensor.parts:
            for order in orders:
                weight = part.weight / len(orders)
                placed.append(_Placed(side, model, layer, part, order, weight))
        return placed

    def term(self, joining: Joining, placed: Sequence[_Placed], outputs: tuple[str, ...]) -> Term:
        """A single product: the arrays of the parts, and the moments that join their legs."""
        # weight * X-part * Y-part * (S for each joined pair) * (m for each capped leg), where an
        # index is named by the leg that it is.
        weight = joining.weight
        operands: list[Operand] = []
        ends = []  # the output index of every part
        for layer in placed:
            # Parts are summands of a sum, so their weights multiply, as do those of the orders of
            # legs.
            weight *= layer.weight
            operands += layer.operands()
            ends.append(layer.name_of(layer.part.out))
        models: dict[Side, Side] = {layer.side: layer.model for layer in placed}
        merged = Merge()
        for layer, two in joining.pairs:
            pair = Pair(models[layer.side], models[two.side])
            operands += self.joined(pair, (_leg_index(layer), _leg_index(two)), ends, merged)
        for leg in joining.capped:
            mean = self.below.means[models[leg.side]]
            operands.append(Operand(mean or MEAN, (_leg_index(leg),)))
        for end, output in zip(ends, outputs, strict=True):
            merged.unite(end, output)
        if self.comparison.lifted and outputs == ("k", "k"):
            operands.append(Operand(TRACE, ("k",)))
        return Term(weight, merged.renamed(operands))

    def joined(
        self, pair: Pair, ends: tuple[str, str], outputs: Sequence[str], merged: Merge
    ) -> tuple[Operand, ...]:
        """The second moment between two legs.

        Where the input's moment is the identity or diagonal, the two legs become a single index
        instead. But two legs that are both outputs, as the streams of two residuals are, stay two
        indices: they are the rows and columns of the defined array.

        Args:
            pair: Models with the states that the legs read.
            ends: Indices of the legs.
            outputs: Indices of the outputs.
            merged: Record of the indices that have been joined.
        """
        if pair == Pair("B", "A"):  # S_AB is stored, and S_BA is its transpose
            pair, ends = Pair("A", "B"), (ends[1], ends[0])
        moment = self.below.moments[pair]
        if moment is not None:
            # Behind the first layer the moment is an array of its own, whatever the input's is.
            return (Operand(moment, ends),)
        kind = self.comparison.inputs.moment
        if kind == "full":
            return (Operand(COVARIANCE, ends),)
        diagonal: tuple[Operand, ...] = ()
        if kind == "diagonal":
            # diag(c) joins two legs by one index that also reads c.
            diagonal = (Operand(COVARIANCE, (ends[0],)),)
        if set(ends) <= set(outputs):
            return (Operand(IDENTITY, ends), *diagonal)
        merged.unite(*ends)
        return diagonal


def _leg_index(leg: Leg) -> str:
    """Index of a leg in a term."""
    return f"{leg.side}{leg.index}"


def fold_layers(
    models: dict[Side, Kinds],
    metric: LayerwiseMetric,
    inputs: InputKind,
    lifted: bool,
    pairs: Iterable[Pair],
    slices: bool,
) -> Problem:
    """The problem that has inner products for outputs, by a recursion over the layers.

    Args:
        models: Kinds of the layers of every model, from the input up.
        metric: Metric that says how the legs of two layers are joined.
        inputs: Structure of the input's second moment, and whether it has a mean.
        lifted: Whether the constant is coordinate 0 of every bond.
        pairs: The inner products asked for.
        slices: Whether there is an inner product for every output coordinate, or their sum.

    Returns:
        Problem with outputs named by their pair. Its leaves are the arrays of `lifted.arrays`,
        the input's `MEAN` and `COVARIANCE` and, lifted, `TRACE`. Lifted outputs have the constant
        at position 0, with the value 0.

    Raises:
        ModelError: The metric compares trees of equal shape, and these differ.

    Example:
        >>> import tnsim
        >>> from tnsim.problems.tensors.kinds import kinds
        >>> linear = kinds(tnsim.Model([tnsim.Linear([[1.0]])]))
        >>> centred = InputKind(True, "identity")
        >>> pair = Pair("A", "A")
        >>> fold_layers({"A": linear}, tnsim.TreeSymmetric(), centred, False, [pair], False).outputs
        ('AA',)

    Source:
        Paper, appendices A.2 and A.3.
    """
    pairs = tuple(pairs)
    steps = align(models["A"], models.get("B", models["A"]), metric)
    comparison = Comparison(models, metric, inputs, lifted, pairs, steps)
    states = States(
        dict.fromkeys(PAIRS), dict.fromkeys(SIDES), dict.fromkeys(SIDES, inputs.centred)
    )
    stages = []
    # All steps but the last form moments; the last one gives inner products, which are traces.
    for number in range(len(steps) - 1):
        stage, states = _LayerFold(comparison, number, states).stage()
        stages.append(stage)
    last = _LayerFold(comparison, len(steps) - 1, states)
    stages.append(last.closed_stage(slices))
    outputs = tuple(pair.group for pair in pairs)
    leaves = _leaf_shapes(models, inputs, lifted)
    return prune(Problem(tuple(stages), leaves, _symmetric_leaves(inputs), outputs))


class _LayerFold:
    """A single step: moments and means above a layer, from the moments and means below it.

    Args:
        comparison: Arguments that all steps share.
        number: Number of the step.
        below: States that the step's layers read.
    """

    def __init__(self, comparison: Comparison, number: int, below: States) -> None:
        self.comparison = comparison
        self.number = number
        self.below = below
        self.terms = LayerTerms(comparison, number, below)

    def stage(self) -> tuple[Stage, States]:
        """The stage of the step, and the names of the moments and means after it."""
        comparison = self.comparison
        below = self.below
        # Whatever the step leaves as it is keeps its name.
        above = States(dict(below.moments), dict(below.means), dict(below.centred))
        definitions: list[Definition] = []
        if comparison.metric.pairs_within_model:
            for model in comparison.models:
                definitions += self.mean(model, above)
        for pair in comparison.carried():
            # Neither state changes, so the pair keeps its moment under the old name.
            if comparison.waits(pair, self.number):
                continue
            name = f"S.{pair.group}@{self.number}"
            terms = tuple(self.terms.moment(pair, ("k", "l")))
            exchangeable = 2 if pair.bra == pair.ket else 0
            powers = self.powers(pair)
            moment = Definition(name, ("k", "l"), terms, exchangeable=exchangeable, powers=powers)
            definitions.append(moment)
            above.moments[pair] = name
        return Stage(tuple(definitions), self.scale_groups(above.moments)), above

    def closed_stage(self, slices: bool) -> Stage:
        """The inner products: traces of the last moments, which are never formed themselves."""
        definitions = []
        names: dict[Pair, str | None] = {}
        for pair in self.comparison.pairs:
            terms = tuple(self.terms.moment(pair, ("k", "k")))
            indices = ("k",) if slices else ()
            definitions.append(Definition(pair.group, indices, terms, powers=self.powers(pair)))
            names[pair] = pair.group
        return Stage(tuple(definitions), self.scale_groups(names))

    def mean(self, model: Side, above: States) -> Iterator[Definition]:
        """The mean of a model's state after the step, unless it waits or vanishes."""
        if self.comparison.layer(model, self.number) is None:
            return
        order = self.comparison.order(model, self.number)
        joinings = gaussian_mean(order, self.below.centred[model])
        # Without joinings the mean of the output vanishes, and no leg of the next layer is handed
        # to it.
        above.centred[model] = not joinings
        if joinings:
            name = f"m.{model}@{self.number}"
            terms = tuple(self.terms.products((model,), joinings, ("k",)))
            above.means[model] = name
            yield Definition(name, ("k",), terms, powers=((model, 1),))

    # --- scales ------------------------------------------------------------------------------

    def powers(self, pair: Pair) -> tuple[tuple[str, int], ...]:
        """The scale groups of a pair's moment after the step, each with its power.

        Under a metric that pairs legs within a model, the next nonlinear layer *adds* products of
        S_AB S_AB, S_AA S_BB and m_A m_A m_B m_B. All of these are of the same degree in the size of
        A's state and in that of B's, so they can be added without a factor between them as long as
        every value of A is divided by powers of a single scale, read off S_AA: S_AA by its square,
        S_AB by it once. With a scale for each array, the sum would need the exponential of
        differences of logarithms, which for unlike models leaves the range of floats.

        After the last nonlinear layer no moments are added any more, and every pair has a scale of
        its own besides, so that a cross moment far smaller than the norms loses no digits. The tree
        metrics never add moments of different pairs, and have such scales from the start.
        """
        own = ((pair.group, 1),)
        if not self.comparison.metric.pairs_within_model:
            return own
        shared = ((pair.bra, 1), (pair.ket, 1))
        if pair.bra == pair.ket:
            shared = ((pair.bra, 2),)
        if self.comparison.mixes_after(self.number):
            return shared
        return shared + own

    def scale_groups(self, moments: dict[Pair, str | None]) -> tuple[ScaleGroup, ...]:
        """The scale groups of the step (see `powers`), read off the `moments` after it."""
        comparison = self.comparison
        within = comparison.metric.pairs_within_model
        mixes = within and comparison.mixes_after(self.number)
        groups = []
        if within:
            # A's scale is the root of max |S_AA|, as S_AA is of degree two in A's state. A layer of
            # order n takes a state c times as large to one c^n times as large.
            for model in comparison.models:
                largest = moments[Pair(model, model)] if mixes else None
                order = comparison.order(model, self.number)
                groups.append(ScaleGroup(model, order, largest, power=2))
        if not mixes:
            # S_AB by its own size. After the last nonlinear layer this scale starts afresh, degree
            # 1; under a tree metric S'_AB is a product of n factors S_AB and of nothing else.
            degree = 1 if within else comparison.order("A", self.number)
            for pair in comparison.pairs:
                groups.append(ScaleGroup(pair.group, degree, moments[pair]))
        return tuple(groups)


def _leaf_shapes(
    models: dict[Side, Kinds], inputs: InputKind, lifted: bool
) -> dict[str, tuple[int, ...]]:
    """Shape of every leaf that a definition may read."""
    leaves: dict[str, tuple[int, ...]] = {}
    for side, kinds in models.items():
        for layer, kind in enumerate(kinds):
            for role, shape in shapes(kind, lifted).items():
                leaves[str(Leaf(side, layer, role))] = shape
    layers = models["A"]
    d_in, d_out = layers[0].d_in + lifted, layers[-1].d_out + lifted
    leaves[MEAN] = (d_in,)
    leaves[TRACE] = (d_out,)
    leaves[IDENTITY] = (d_in, d_in)
    leaves[COVARIANCE] = (d_in,) if inputs.moment == "diagonal" else (d_in, d_in)
    return leaves


def _symmetric_leaves(inputs: InputKind) -> frozenset[str]:
    """The leaves that are symmetric matrices."""
    if inputs.moment == "diagonal":
        return frozenset({IDENTITY})
    return frozenset({COVARIANCE, IDENTITY})
