"""Ways to join the input legs of two unrolled trees. In: two models, a metric. Out: joined legs.

For the metrics that work layer by layer. The two outputs meet; what the metric says of the layers
that give them decides which of the bonds below meet, and so on down to the input legs.

[merged from tensor_networks/closed_networks]
Closed networks of an inner product. In: two models, a metric. Out: weighted quimb networks.

The sum of weight times contraction is `inner`. Bra and ket are unrolled (see `network`) and joined
at their outputs, and every way of joining their input legs that the metric asks for is one network:
operators sit on it as nodes tagged `SYMMETRISER`, `COVARIANCE` and `MEAN`, and an identity is an
index that two legs share. This is the picture and the reference; plans never unroll.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tnsim.errors import ModelError
from tnsim.metrics.input_moments import (
    flattened,
    input_kind,
    input_moments,
    second_moment_at,
    whole_tree_kind,
)
from tnsim.metrics.metric import (
    Gaussian,
    as_layerwise,
    check_metric,
    joins_legs,
    joins_whole_trees,
    layer_by_layer,
)
from tnsim.metrics.orbits import Diagram, Tree, diagrams
from tnsim.metrics.pairings import Joining, Leg, gaussian_mean
from tnsim.metrics.protocol import LayerwiseMetric, Metric
from tnsim.models.checks import check_comparable
from tnsim.models.model import Model
from tnsim.names import COVARIANCE, MEAN, OUT, SIDES, Side, bond_index
from tnsim.problems.alignment import align
from tnsim.problems.base import moment_nodes
from tnsim.problems.diagrams import tree
from tnsim.problems.families import WholeTree
from tnsim.problems.tensors.kinds import Kinds, kinds, nonlinear
from tnsim.problems.whole_tree import MAX_LEGS, check_size
from tnsim.tensor_networks.network import (
    MAX_TENSORS,
    Copy,
    LayerArrays,
    check_models,
    layer_arrays,
    tensor,
    tree_tensors,
)

if TYPE_CHECKING:
    import quimb.tensor as qtn


class Bond(NamedTuple):
    """The output bond of one copy of a layer, or below all layers an input leg."""

    side: Side
    copy: int


class JoinedLegs(NamedTuple):
    """A way to join bonds, down to the input legs.

    Args:
        weight: How often it counts.
        pairs: Input legs that are joined.
        capped: Input legs that are handed to the mean.
        symmetrised: Copies of layers whose legs are to be symmetrised.
    """

    weight: float = 1.0
    pairs: tuple[tuple[Bond, Bond], ...] = ()
    capped: tuple[Bond, ...] = ()
    symmetrised: tuple[Copy, ...] = ()

    def times(self, other: JoinedLegs) -> JoinedLegs:
        """Both ways at once, for different bonds."""
        return JoinedLegs(
            self.weight * other.weight,
            self.pairs + other.pairs,
            self.capped + other.capped,
            self.symmetrised + other.symmetrised,
        )


class LegJoinings:
    """All ways to join bonds, from the output down, along the same steps as the folded problem.

    A task is to join two bonds with each other, or to take the mean of one. What a metric says of
    the layers below these bonds turns it into tasks one step lower, in one or several ways; at the
    input a task is a pair of legs or a capped leg.
    """

    def __init__(self, models: dict[Side, Model], metric: LayerwiseMetric):
        self.models = models
        self.metric = metric
        self.steps = align(models["A"].layers, models["B"].layers, metric)
        layers = itertools.chain.from_iterable(map(kinds, models.values()))
        constant = any(kind.biases or kind.skips for kind in layers)
        inputs_centred = input_kind(metric, constant).centred
        # What a model gives after a step has mean zero as long as no layer so far was nonlinear.
        self.centred: list[dict[Side, bool]] = [dict.fromkeys(models, inputs_centred)]
        for step in range(len(self.steps)):
            above: dict[Side, bool] = {}
            for side, centred in self.centred[-1].items():
                above[side] = centred and self.order(side, step) == 1
            self.centred.append(above)

    def all(self) -> Iterator[JoinedLegs]:
        """All ways to join the two outputs."""
        return self.ways((Bond("A", 0), Bond("B", 0)), len(self.steps))

    def layer(self, side: Side, step: int) -> int | None:
        """Number of the layer that a step applies to one side; None where the side waits."""
        return self.steps[step].bra if side == "A" else self.steps[step].ket

    def order(self, side: Side, step: int) -> int:
        """Number of legs that one side has at a step."""
        number = self.layer(side, step)
        return 1 if number is None else self.models[side].layers[number].order

    def ways(self, bonds: tuple[Bond, ...], steps: int) -> Iterator[JoinedLegs]:
        """Ways to join two bonds, or to take the mean of one, that are outputs of `steps` steps."""
        if steps == 0:
            yield JoinedLegs(pairs=(bonds,)) if len(bonds) == 2 else JoinedLegs(capped=bonds)
            return
        step = steps - 1
        orders = [self.order(bond.side, step) for bond in bonds]
        centred = all(self.centred[step][bond.side] for bond in bonds)
        if len(bonds) == 2:
            joinings = self.metric.joinings(orders[0], orders[1], centred)
        else:
            joinings = gaussian_mean(orders[0], centred)
        for joining in joinings:
            start, tasks = self.expanded(joining, bonds, step)
            yield from self.all_of(tasks, start, step)

    def expanded(
        self, joining: Joining, bonds: tuple[Bond, ...], step: int
    ) -> tuple[JoinedLegs, list[tuple[Bond, ...]]]:
        """What a joining says of the copies below two bonds, and its tasks one step lower.

        A joining speaks of sides "A" and "B", which here are the first and the second bond: two
        bonds of one model may meet.
        """
        at = dict(zip(SIDES, bonds, strict=False))

        def child(leg: Leg) -> Bond:
            side, copy = at[leg.side]
            return Bond(side, copy * self.order(side, step) + leg.index)

        copies = []
        for slot in joining.symmetrised:
            side, copy = at[slot]
            number = self.layer(side, step)
            if number is not None:
                copies.append((side, number, copy))
        tasks: list[tuple[Bond, ...]] = [(child(one), child(two)) for one, two in joining.pairs]
        tasks += [(child(leg),) for leg in joining.capped]
        return JoinedLegs(joining.weight, symmetrised=tuple(copies)), tasks

    def all_of(
        self, tasks: list[tuple[Bond, ...]], start: JoinedLegs, steps: int
    ) -> Iterator[JoinedLegs]:
        """Ways to do all tasks: every way to do the first, with every way to do the rest."""
        if not tasks:
            yield start
            return
        first, *rest = tasks
        for way in self.ways(first, steps):
            yield from self.all_of(rest, start.times(way), steps)


INPUT = -1
"""The layer whose output bonds are a tree's input legs."""


def networks(
    a: Model, b: Model, metric: Metric = Gaussian(), max_tensors: int = MAX_TENSORS
) -> Iterator[tuple[float, qtn.TensorNetwork]]:
    """The closed networks of `<a|M|b>`, one for each way of joining legs, with their weights.

    Models of sequences meet on flattened legs, layer over layer. Attention joins five legs: its
    symmetriser lets one network stand for an orbit, 3 for the 945 pairings of two attention layers
    without constants, 21 with them. The number of networks grows quickly with depth for
    `GaussianClosure`; the iterator is lazy.

    Args:
        a: The bra, on tensors tagged `A`.
        b: The ket, on tensors tagged `B`.
        metric: How their legs are joined.
        max_tensors: What bra and ket may have together.

    Returns:
        An iterator of (weight, network). Contract with `output_inds=()`, since hidden ranks are
        hyperindices; the sum of weight times contraction is `inner(a, b, metric)`.

    Raises:
        TooLarge: Bra and ket together have more tensors, or as `inner`.
        ModelError: As `inner`, except that under the Gaussian metrics an attention layer may meet
            a bilinear one here; and for finite measures and `Categorical`, which join no legs.

    Example:
        The square of a normal number: 3 = 1 with both legs of each model joined + 2 across.

        >>> import tnsim
        >>> square = tnsim.Model([tnsim.Bilinear([[1.0]], [[1.0]], [[1.0]])])
        >>> for weight, network in networks(square, square):
        ...     print(weight, network.contract(output_inds=()))
        1.0 1.0
        2.0 1.0

    Source:
        Paper, section 2.2 (`Lambda` as a network) and appendix A.3 (pairings).
    """
    check_models([a, b], max_tensors)
    check_metric(metric)
    if not joins_legs(metric):
        raise ModelError(
            f"{type(metric).__name__} adds up over inputs and joins no legs, "
            "so it has no networks; inner() computes it without"
        )
    check_comparable(a, b)
    depth = nonlinear(kinds(a), kinds(b))
    whole_trees = joins_whole_trees(type(metric), depth)
    if a.n_ctx is None:
        return _whole_trees(a, b, metric) if whole_trees else _layer_over_layer(a, b, metric)
    if whole_trees and depth > 1 and _few_legs(a, b):
        return _whole_trees(a, b, metric)
    joined = layer_by_layer(metric, depth, (a.degree, b.degree))
    return _layer_over_layer(a, b, flattened(joined, a.d_in, a.n_ctx))


def _arrays(models: dict[Side, Model]) -> dict[Side, tuple[LayerArrays, ...]]:
    """The arrays of both models, which are the same for all networks; those of `<a|a>` once."""
    bra = layer_arrays(models["A"])
    return {"A": bra, "B": bra if models["B"] is models["A"] else layer_arrays(models["B"])}


def _few_legs(a: Model, b: Model) -> bool:
    """Whether the joinings of whole trees over flattened sequences can be listed."""
    legs = a.degree + b.degree
    return legs <= MAX_LEGS and legs % 2 == 0


def _layer_over_layer(
    a: Model, b: Model, metric: Metric
) -> Iterator[tuple[float, qtn.TensorNetwork]]:
    """One network for each way to choose a joining at every pair of bonds that meet."""
    import quimb.tensor as qtn

    models: dict[Side, Model] = {"A": a, "B": b}
    moments = input_moments(metric, a.d_in * (a.n_ctx or 1), lifted=True)
    mean, moment = np.asarray(moments[MEAN]), _as_numpy(moments.get(COVARIANCE))
    arrays = _arrays(models)
    for joined in LegJoinings(models, as_layerwise(metric)).all():
        tensors = []
        for side, layers in arrays.items():
            tensors += tree_tensors(layers, side, joined.symmetrised)
        merged = _outputs(models)
        for one, two in joined.pairs:
            tensors += _second_moment(moment, (_input_leg(one), _input_leg(two)), merged)
        for leg in joined.capped:
            tensors.append(tensor(mean, (_input_leg(leg),), (MEAN,)))
        yield joined.weight, qtn.TensorNetwork(tensors).reindex(merged)


def _whole_trees(a: Model, b: Model, metric: Metric) -> Iterator[tuple[float, qtn.TensorNetwork]]:
    """One network per diagram, every nonlinear copy symmetrised.

    With a constant or a mean there is one at each variance t of the constant (see `constants`).
    """
    import quimb.tensor as qtn

    family = WholeTree.of(a, b, metric)
    models: dict[Side, Model] = {"A": family.prepare(a), "B": family.prepare(b)}
    both: dict[Side, Kinds] = {"A": family.bra, "B": family.ket or family.bra}
    cross_only = not metric.pairs_within_model
    check_size(both, cross_only)
    bra, ket = tree(both["A"]), tree(both["B"])
    joinings = math.factorial(bra.legs) if cross_only else 1  # P_n is the mean over all n! ways

    tensors = []
    for side, layers in _arrays(models).items():
        tensors += tree_tensors(layers, side, _nonlinear_copies(side, models[side]))
    constant = any(kind.constant for kind in both["A"] + both["B"])
    runs = _moments(metric, a, bra.legs + ket.legs, constant)
    for diagram in diagrams(bra, ket, cross_only):
        pairs = _joined_legs((bra, ket), diagram)
        for weight, moment in runs:
            merged = _outputs(models)
            operators = []
            for ends in pairs:
                operators += _second_moment(moment, ends, merged)
            network = qtn.TensorNetwork([*tensors, *operators]).reindex(merged)
            yield weight * diagram.count / joinings, network


def _moments(
    metric: Metric, model: Model, legs: int, constant: bool
) -> list[tuple[float, np.ndarray | None]]:
    """Second moments of the lifted input at which diagrams are contracted, with their weights.

    Where no layer has a constant, the constant coordinate meets zero weights only, and what the
    moment says of it does not matter.

    Args:
        metric: It joins whole trees.
        model: One of the two, for the size of its input.
        legs: Of both models together.
        constant: Whether a layer has a constant.
    """
    width = model.d_in
    if model.n_ctx is not None:
        metric, width = flattened(metric, width, model.n_ctx), width * model.n_ctx
    if whole_tree_kind(metric, lifted=constant).centred:
        moments = input_moments(metric, width, lifted=True)
        return [(1.0, _as_numpy(moments.get(COVARIANCE)))]
    nodes = moment_nodes(legs)
    runs = []
    for weight, t in zip(nodes.weights, nodes.points, strict=True):
        runs.append((weight, _as_numpy(second_moment_at(metric, width, True, t))))
    return runs


def _joined_legs(trees: tuple[Tree, Tree], diagram: Diagram) -> list[tuple[str, str]]:
    """Pairs of input legs, one for each edge; which legs of a node they are does not matter."""
    free: list[list[str]] = []
    for side, side_tree in zip(SIDES, trees, strict=True):
        for node in range(side_tree.bottoms):
            first = node * side_tree.bunch
            legs = range(first, first + side_tree.bunch)
            free.append([bond_index(side, INPUT, leg) for leg in legs])
    pairs = []
    for u, v in diagram.edges:
        one = free[u].pop()
        two = free[v].pop()
        pairs.append((one, two))
    return pairs


def _nonlinear_copies(side: Side, model: Model) -> list[Copy]:
    """All copies of all nonlinear layers in a model's tree."""
    branching: list[Copy] = []
    copies = 1
    for number in reversed(range(len(model.layers))):
        order = model.layers[number].order
        if order > 1:
            for copy in range(copies):
                branching.append((side, number, copy))
        copies *= order
    return branching


def _outputs(models: dict[Side, Model]) -> dict[str, str]:
    """New names of the output bonds: both models' outputs are one index."""
    return {bond_index(side, len(m.layers) - 1, 0): OUT for side, m in models.items()}


def _second_moment(
    moment: np.ndarray | None, ends: tuple[str, str], merged: dict[str, str]
) -> list[qtn.Tensor]:
    """What joins two input legs.

    Args:
        moment: E[x x^T], (D, D), or its diagonal (D,), or None for the identity.
        ends: Indices of the legs.
        merged: New names of indices. Takes down where the legs have become one index.

    Returns:
        The node that carries the moment; none for the identity.
    """
    if moment is not None and moment.ndim == 2:
        return [tensor(moment, ends, (COVARIANCE,))]
    merged[ends[1]] = ends[0]
    if moment is None:
        return []
    return [tensor(moment, ends[:1], (COVARIANCE,))]


def _as_numpy(array: Any) -> np.ndarray | None:
    return None if array is None else np.asarray(array)


def _input_leg(bond: Bond) -> str:
    """Index of an input leg."""
    return bond_index(bond.side, INPUT, bond.copy)
