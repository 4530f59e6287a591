"""Models and inner products as quimb networks: trees, and the closed networks of two of them.

Bra and ket are unrolled (see `network`) and joined at their outputs, and every way of joining their
input legs that the metric asks for is a network. The sum of weight times contraction is `inner`.

For metrics that work layer by layer, `LegJoinings` lists the ways from the output down: the two
outputs meet, the joinings of the layers below them decide which of the next bonds meet, and so on
down to the input legs. Metrics that join whole trees have a network for each diagram (see
`metrics.orbits`).

Models with an activation have no input legs. A node, tagged `KERNEL`, joins their hidden legs,
beside which stand the constant and the input (see `problems.kernels.whole_kernel`).

Operators are nodes tagged `SYMMETRISER`, `COVARIANCE`, `MEAN` and `KERNEL`, and an identity is an
index that two legs share. Closed networks are the picture and the reference; plans never unroll.

*Models.* The tree is unrolled: layer i of a model with orders n_i appears in n_{i+1} ... n_L
copies, which share the same arrays. Inputs are lifted, `x~ = (1, x)`, on legs `in0`, `in1`, ... of
size d_in + 1; the output `out` has size d_out. A sequence is flattened, position-major: legs have
size 1 + n_ctx * d_in, the output n_ctx * d_out. Hidden ranks, positions and heads are hyperindices
(several tensors share a single index), so contract with `output_inds`. Tags follow `names`, and the
network of a single layer comes from `problems.layer_tensors`. Arrays are float64, whatever the
dtype of the weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from jaxtyping import Float

from tnsim.engine.runtime import execution
from tnsim.errors import ModelError, TooLarge, UnsupportedLayer
from tnsim.metrics.input_moments import (
    flattened,
    input_moments,
    whole_tree_kind,
)
from tnsim.metrics.metric import (
    Gaussian,
    as_metric,
    joins_whole_trees,
    layer_by_layer,
)
from tnsim.metrics.orbits import (
    Diagram,
    JoinedLeg,
    Joining,
    Tree,
    diagrams,
    gaussian,
    joinings,
)
from tnsim.metrics.protocol import LayerwiseMetric, Metric, adds_up, joins_layers
from tnsim.models.model import Model, check_comparable, check_numbers, check_untraced, in_numpy
from tnsim.names import (
    COVARIANCE,
    DOWN,
    KERNEL,
    MEAN,
    OUT,
    SIDES,
    SYMMETRISER,
    Side,
    bond_index,
    copy_tag,
    inner_index,
    input_index,
    layer_tag,
    role_index,
)
from tnsim.options import checked
from tnsim.problems.diagrams import tree
from tnsim.problems.families import WholeTree, moment_nodes
from tnsim.problems.hidden_units import has_kernels
from tnsim.problems.kernels import last_segments, readout, under, whole_kernel
from tnsim.problems.layer_kinds import Kinds, align, check_shapes, kinds, nonlinear
from tnsim.problems.layer_tensors import Node, local_nodes, node_count, stacked
from tnsim.problems.whole_tree import MAX_LEGS
from tnsim.scaled import shifted
from tnsim.sessions import session_cache

if TYPE_CHECKING:
    import quimb.tensor as qtn


MAX_TENSORS = 4096
"""Default for the largest number of tensors of a network."""

AS_EXPRESSION = ", and contract_expression(networks(a, b, metric)) takes traced arrays by tag"
"""Advice where networks of traced models are asked for."""

Copy = tuple[Side, int, int]
"""A copy of a layer: side of the model, number of the layer, number of the copy."""


INPUT = -1
"""Number of the layer whose output bonds are the input legs of a tree."""


@dataclass(frozen=True)
class LayerArrays:
    """The arrays that all copies of a layer share, in all networks of a model.

    Args:
        order: Number of input legs.
        nodes: Nodes of the network of the layer, nodes with an input leg last (see
            `problems.layer_tensors`).
    """

    order: int
    nodes: tuple[Node, ...]

    @cached_property
    def stacked(self) -> tuple[Float[np.ndarray, "*axes"], tuple[str, ...]]:
        """The nodes with input legs in a single array, as symmetrised copies need."""
        return stacked(self.nodes[-self.order :])


def layer_arrays(model: Model) -> tuple[LayerArrays, ...]:
    """The arrays of every layer of a model, in the form that networks hold."""
    top = len(model.layers) - 1
    arrays = []
    for number, layer in enumerate(model.layers):
        nodes = local_nodes(layer, model.n_ctx)
        if number == top:  # without the row of the constant, which no layer reads
            nodes = tuple(
                node._replace(array=node.array[1:]) if node.indices[0] == OUT else node
                for node in nodes
            )
        arrays.append(LayerArrays(layer.order, nodes))
    return tuple(arrays)


@checked
def network(model: Model, max_tensors: int = MAX_TENSORS) -> qtn.TensorNetwork:
    """The unrolled network of a model.

    Args:
        model: Model to unroll; every copy of a layer has tags for layer, copy and role.
        max_tensors: Largest number of tensors of the network.

    Returns:
        A network that gives model(x), shape (d_out,), when it is contracted with (1, x) on every
        leg. With n_ctx every leg takes (1, x.ravel()) and the result is model(x).ravel(), shape
        (n_ctx * d_out,).

    Raises:
        TooLarge: The tree has more than `max_tensors` tensors; the message says how many.
        ModelError: The model is a combination of models, or has attention but no n_ctx.

    Example:
        >>> import numpy as np
        >>> import quimb.tensor as qtn
        >>> import tnsim
        >>> squares = tnsim.Model([tnsim.Bilinear(np.eye(2), np.eye(2), np.eye(2))])
        >>> tn = tnsim.tensor_networks.network(squares)
        >>> for leg in ("in0", "in1"):
        ...     tn = tn & qtn.Tensor([1.0, 2.0, 3.0], (leg,))
        >>> tn.contract(output_inds=("out",)).data
        array([4., 9.])

    Source:
        Paper, section 2.1.
    """
    import quimb.tensor as qtn

    check_untraced("network", model, instead=AS_EXPRESSION)
    model = in_numpy(model)
    check_models([model], max_tensors)
    names = {bond_index("A", INPUT, leg): input_index(leg) for leg in range(model.degree)}
    names[bond_index("A", len(model.layers) - 1, 0)] = OUT
    return qtn.TensorNetwork(tree_tensors(layer_arrays(model), "A", ())).reindex(names)


def check_models(models: Iterable[Model], max_tensors: int) -> None:
    """Check that models can be unrolled.

    Raises:
        ModelError: A model is a combination, or attends to sequences of unknown length.
        TooLarge: The trees have more than `max_tensors` tensors together.
    """
    count, degree = 0, 1
    for model in models:
        if not isinstance(model, Model):
            raise ModelError(
                "a combination of models is several networks; "
                "take those of its .models and expand by bilinearity"
            )
        check_numbers(model)
        if not model.is_polynomial:
            raise UnsupportedLayer(
                "a model with an activation is no tensor of input legs and has no network of its "
                "own: networks(a, b, Gaussian(mean, cov)) shows the kernel between two models"
            )
        if model.attends and model.n_ctx is None:
            raise ModelError(
                "the network of an attention layer is for sequences of one length: "
                "give tnsim.Model(layers, n_ctx=...)"
            )
        copies = 1
        for layer in reversed(model.layers):
            # From the output down, every layer has a copy for each leg above it.
            count += copies * node_count(layer)
            copies *= layer.order
        degree = max(degree, model.degree)
    if count > max_tensors:
        raise TooLarge(
            f"the unrolled network has {count:,} tensors, more than max_tensors={max_tensors:,} "
            f"(degree {degree:,}); similarity() and plan() fold the copies and need no unrolled "
            "network"
        )


def tree_tensors(
    layers: Sequence[LayerArrays], side: Side, symmetrised: Collection[Copy]
) -> list[qtn.Tensor]:
    """All weight tensors of an unrolled tree, from the output down.

    Args:
        layers: Arrays of the layers of the model.
        side: Side of the model, a tag on every tensor.
        symmetrised: Copies of layers, of any model, that get a symmetriser node.

    Returns:
        Tensors with bonds `names.bond_index(side, layer, copy)`; input legs are those of the layer
        `INPUT`.
    """
    tensors: list[qtn.Tensor] = []
    copies = 1
    for number in reversed(range(len(layers))):
        for copy in range(copies):
            place = (side, number, copy)
            tensors += _copy_tensors(layers[number], place, place in symmetrised)
        copies *= layers[number].order
    return tensors


@session_cache
def symmetriser(order: int) -> Float[np.ndarray, "*axes"]:
    """The symmetriser P_n as a node (n,) * n on roles, with 1/n! where all roles differ."""
    node = np.zeros((order,) * order)
    for roles in itertools.permutations(range(order)):
        node[roles] = 1 / math.factorial(order)
    node.flags.writeable = False  # all networks share the array
    return node


def _copy_tensors(layer: LayerArrays, place: Copy, symmetrised: bool) -> list[qtn.Tensor]:
    """The tensors of a single copy of a layer.

    In a symmetrised copy, any node with an input leg may serve any leg: each leg gets an array that
    stacks all these nodes along a role axis, and the symmetriser joins the role axes, so that every
    role is taken once.

    Args:
        layer: Arrays of the layer.
        place: Place of the copy: side, layer and copy.
        symmetrised: Whether to average over all orders of the legs.
    """
    side, number, copy = place
    tags = (side, layer_tag(number), copy_tag(copy))
    # Index names tell the copy, as copies share their arrays.
    names = _index_names(layer.nodes, layer.order, place)
    # The nodes with input legs come last in a layer.
    inner_nodes, leg_nodes = layer.nodes[: -layer.order], layer.nodes[-layer.order :]
    tensors = []
    for node in inner_nodes if symmetrised else layer.nodes:
        indices = [names[index] for index in node.indices]
        tensors.append(tensor(node.array, indices, (*tags, node.role)))
    if not symmetrised:
        return tensors

    array, between = layer.stacked
    between_names = [names[index] for index in between]
    role_tags = [node.role for node in leg_nodes]
    roles = [role_index(side, number, copy, leg) for leg in range(layer.order)]
    for leg, role in enumerate(roles):
        # Each leg reads the stack in a role, and the symmetriser takes the mean over roles.
        indices = [role, *between_names, names[input_index(leg)]]
        tensors.append(tensor(array, indices, (*tags, *role_tags)))
    tensors.append(tensor(symmetriser(layer.order), roles, (side, SYMMETRISER)))
    return tensors


def tensor(array: np.ndarray, indices: Sequence[str], tags: Sequence[str]) -> qtn.Tensor:
    """A quimb tensor; the cast is there because quimb annotates data as a float.

    Example:
        >>> tensor(np.eye(2), ("i", "j"), ("WEIGHT",)).shape
        (2, 2)
    """
    import quimb.tensor as qtn

    return qtn.Tensor(cast(Any, array), indices, tags)


def _index_names(nodes: Sequence[Node], order: int, place: Copy) -> dict[str, str]:
    """Names in the tree of the indices of a copy: bonds to parent and children, inner indices."""
    side, number, copy = place
    names = {OUT: bond_index(side, number, copy)}
    for leg in range(order):
        names[input_index(leg)] = bond_index(side, number - 1, copy * order + leg)
    for node in nodes:
        for index in node.indices:
            if index not in names:
                names[index] = inner_index(side, number, copy, index)
    return names


class Bond(NamedTuple):
    """The output bond of a copy of a layer, or an input leg (below all layers)."""

    side: Side
    copy: int


class JoinedLegs(NamedTuple):
    """A way to join bonds, down to the input legs.

    Args:
        weight: Weight of the way in the sum.
        pairs: Input legs that are joined.
        capped: Input legs that are handed to the mean.
        symmetrised: Copies of layers whose legs are to be symmetrised.
    """

    weight: float = 1.0
    pairs: tuple[tuple[Bond, Bond], ...] = ()
    capped: tuple[Bond, ...] = ()
    symmetrised: tuple[Copy, ...] = ()

    def times(self, other: JoinedLegs) -> JoinedLegs:
        """Both ways at once, for disjoint sets of bonds."""
        return JoinedLegs(
            self.weight * other.weight,
            self.pairs + other.pairs,
            self.capped + other.capped,
            self.symmetrised + other.symmetrised,
        )


class LegJoinings:
    """All ways to join bonds, from the output down, along the same steps as the folded problem.

    A task is to join two bonds with each other, or to take the mean of a bond. Each joining that
    the metric has for the layers below these bonds turns the task into tasks a step lower; at
    the input a task is a pair of legs or a capped leg.
    """

    def __init__(self, models: dict[Side, Model], metric: LayerwiseMetric):
        self.models = models
        self.metric = metric
        bra, ket = kinds(models["A"]), kinds(models["B"])
        check_shapes(bra, ket, metric)
        self.steps = align(bra, ket)
        constant = any(kind.biases or kind.skips for kind in (*bra, *ket))
        # The tree metrics have the value of a leg at the zero input in the place of a mean.
        within = metric.pairs_within_model
        inputs_centred = within and whole_tree_kind(metric, constant).centred
        # States have mean zero after a step as long as no layer up to this step was nonlinear.
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
        """Number of the layer that a step applies on a side; None where the side waits."""
        return self.steps[step][side]

    def order(self, side: Side, step: int) -> int:
        """Number of legs of the layer of a side at a step; 1 where the side waits."""
        number = self.layer(side, step)
        return 1 if number is None else self.models[side].layers[number].order

    def ways(self, bonds: tuple[Bond, ...], steps: int) -> Iterator[JoinedLegs]:
        """Ways to join two bonds, or to take the mean of a bond, above the first `steps` steps."""
        # Below all steps the bonds are input legs, which the metric joins or caps.
        if steps == 0:
            yield JoinedLegs(pairs=(bonds,)) if len(bonds) == 2 else JoinedLegs(capped=bonds)
            return
        step = steps - 1
        orders = [self.order(bond.side, step) for bond in bonds]
        centred = all(self.centred[step][bond.side] for bond in bonds)
        if len(bonds) == 2:
            joined = joinings(self.metric.rule, orders[0], orders[1], centred)
        else:
            joined = gaussian(orders[0], 0, centred)
        for joining in joined:
            start, tasks = self.expanded(joining, bonds, step)
            yield from self.all_of(tasks, start, step)

    def expanded(
        self, joining: Joining, bonds: tuple[Bond, ...], step: int
    ) -> tuple[JoinedLegs, list[tuple[Bond, ...]]]:
        """Weight and symmetrised copies of a joining below some bonds, and tasks a step lower.

        The sides "A" and "B" of the joining are the first and the second bond here, since two bonds
        of the same model may meet.
        """
        # A single bond stands in the first slot of a joining, whichever side it is of.
        at = dict(zip(SIDES, bonds, strict=False))

        def child(leg: JoinedLeg) -> Bond:
            side, copy = at[leg.side]
            # Copies are numbered like the leaves of a tree: children of copy c are c * order
            # onwards.
            return Bond(side, copy * self.order(side, step) + leg.index)

        copies = []
        for slot in joining.symmetrised:
            side, copy = at[slot]
            number = self.layer(side, step)
            # A side that waits has no layer to symmetrise.
            if number is not None:
                copies.append((side, number, copy))
        tasks: list[tuple[Bond, ...]] = [(child(one), child(two)) for one, two in joining.pairs]
        tasks += [(child(leg),) for leg in joining.capped]
        return JoinedLegs(joining.weight, symmetrised=tuple(copies)), tasks

    def all_of(
        self, tasks: list[tuple[Bond, ...]], start: JoinedLegs, steps: int
    ) -> Iterator[JoinedLegs]:
        """Ways to do all tasks: every way to do the first task with every way to do the rest."""
        if not tasks:
            yield start
            return
        first, *rest = tasks
        for way in self.ways(first, steps):
            yield from self.all_of(rest, start.times(way), steps)


@checked
def networks(
    a: Model, b: Model, metric: Metric | str = Gaussian(), max_tensors: int = MAX_TENSORS
) -> Iterator[tuple[float, qtn.TensorNetwork]]:
    """The closed networks of `<a|M|b>`, a network for each way of joining legs, with their weights.

    Models of sequences meet on flattened legs, layer over layer. Attention joins five legs, and its
    symmetriser lets a network stand for an orbit: the 945 pairings of two attention layers are 3
    networks without constants and 21 networks with constants. The number of networks grows quickly
    with depth for `GaussianClosure`; the iterator is lazy.

    Args:
        a: Model of the bra, on tensors tagged `A`.
        b: Model of the ket, on tensors tagged `B`.
        metric: Metric that joins the legs of both models, or its name.
        max_tensors: Largest number of tensors of bra and ket together.

    Returns:
        An iterator of (weight, network); for models with an activation a network for every distinct
        position, with the kernel as a node between hidden legs. Contract with `output_inds=()`,
        since hidden ranks are hyperindices; the sum of weight times contraction is
        `inner(a, b, metric)`.

    Raises:
        TooLarge: Bra and ket together have more than `max_tensors` tensors, or `inner` raises it.
        ModelError: The metric joins no legs (finite measures and `Categorical`), or `inner` raises
            it. Unlike in `inner`, an attention layer may meet a bilinear layer here under the
            Gaussian metrics.

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
    metric = as_metric(metric)
    check_untraced("networks", a, b, metric, instead=AS_EXPRESSION)
    a, b = in_numpy(a), in_numpy(b)
    # Kernels come first: models with an activation have no trees.
    if isinstance(a, Model) and isinstance(b, Model) and has_kernels([a, b], metric):
        check_comparable(a, b)
        return _through_kernels(a, b, metric)
    check_models([a, b], max_tensors)
    if adds_up(metric):
        raise ModelError(
            f"{type(metric).__name__} adds up over inputs and joins no legs, "
            "so it has no networks; inner() computes it without"
        )
    check_comparable(a, b)
    depth = nonlinear(kinds(a), kinds(b))
    whole_trees = joins_whole_trees(type(metric), depth)
    if a.n_ctx is None:
        return _whole_trees(a, b, metric) if whole_trees else _layer_over_layer(a, b, metric)
    # Sequences count as one flat input here.
    if whole_trees and depth > 1 and WholeTree.legs(a, b, metric) <= MAX_LEGS:
        return _whole_trees(a, b, metric)
    joined = layer_by_layer(metric, depth, (a.degree, b.degree))
    return _layer_over_layer(a, b, flattened(joined, a.d_in, a.n_ctx))


def _model_arrays(models: dict[Side, Model]) -> dict[Side, tuple[LayerArrays, ...]]:
    """The arrays of both models, the same for all networks; made once for `<a|a>`."""
    bra = layer_arrays(models["A"])
    return {"A": bra, "B": bra if models["B"] is models["A"] else layer_arrays(models["B"])}


def _layer_over_layer(
    a: Model, b: Model, metric: Metric
) -> Iterator[tuple[float, qtn.TensorNetwork]]:
    """The networks of a metric that works layer by layer, a network per way to join legs."""
    assert joins_layers(metric)
    models: dict[Side, Model] = {"A": a, "B": b}
    # Networks always have the constant as a coordinate, so moments are lifted.
    moments = input_moments(metric, a.d_in * (a.n_ctx or 1), lifted=True)
    mean, moment = np.asarray(moments[MEAN]), _as_numpy(moments.get(COVARIANCE))
    arrays = _model_arrays(models)
    for joined in LegJoinings(models, metric).all():
        tensors = []
        for side, layers in arrays.items():
            tensors += tree_tensors(layers, side, joined.symmetrised)
        for leg in joined.capped:
            tensors.append(tensor(mean, (_input_leg(leg),), (MEAN,)))
        pairs = [(_input_leg(one), _input_leg(two)) for one, two in joined.pairs]
        yield joined.weight, _closed(models, tensors, moment, pairs)


def _through_kernels(
    a: Model, b: Model, metric: Metric
) -> Iterator[tuple[float, qtn.TensorNetwork]]:
    """The networks of models with an activation, position by position.

    A readout of each model meets the kernel on a hidden leg, and the other readout at the outputs.
    Of several nonlinear layers the kernel is that of the last ones, under the law of their inputs.
    """
    import quimb.tensor as qtn

    with execution.precision():
        bra, ket = (under(model, metric, "float64") for model in (a, b))
        for count, one, two, _ in last_segments(bra, ket):
            tensors, joined = [], []
            for side, model, made, last in (("A", a, bra, one), ("B", b, ket, two)):
                places = [n for n, layer in enumerate(model.layers) if layer.order > 1]
                number = places[-1] if places else 0
                legs = OUT, bond_index(side, number, 0)
                tags = side, layer_tag(number), DOWN
                # Outputs have their own size again, which a float holds as it holds the weights.
                read = shifted(np.asarray(readout(last)), made.exponent)
                tensors.append(tensor(read, legs, tags))
                joined.append(legs[1])
            tensors.append(tensor(np.asarray(whole_kernel(one, two)), joined, (KERNEL,)))
            yield float(count), qtn.TensorNetwork(tensors)


def _whole_trees(a: Model, b: Model, metric: Metric) -> Iterator[tuple[float, qtn.TensorNetwork]]:
    """The networks of a metric that joins whole trees, with every nonlinear copy symmetrised.

    There is a network for every diagram. With a constant or a mean there is a network for every
    diagram and every variance t of the constant (see `problems.families`).
    """
    family = WholeTree.of(a, b, metric)
    models: dict[Side, Model] = {"A": family.prepare(a), "B": family.prepare(b)}
    both: dict[Side, Kinds] = {"A": family.bra, "B": family.ket or family.bra}
    cross_only = not metric.pairs_within_model
    bra, ket = tree(both["A"]), tree(both["B"])
    joinings = math.factorial(bra.legs) if cross_only else 1  # P_n is a mean over n! ways

    tensors = []
    for side, layers in _model_arrays(models).items():
        tensors += tree_tensors(layers, side, _nonlinear_copies(side, models[side]))
    constant = any(kind.constant for kind in both["A"] + both["B"])
    runs = _input_moments_of(metric, a, bra.legs + ket.legs, constant)
    for diagram in diagrams(bra, ket, cross_only):
        pairs = _joined_legs((bra, ket), diagram)
        for weight, moment in runs:
            network = _closed(models, tensors, moment, pairs)
            yield weight * diagram.count / joinings, network


def _input_moments_of(
    metric: Metric, model: Model, legs: int, constant: bool
) -> list[tuple[float, np.ndarray | None]]:
    """Second moments of the lifted input at which diagrams are contracted, with their weights.

    If no layer has a constant, the constant coordinate meets zero weights only, and its entries in
    the moment do not matter.

    Args:
        metric: Metric that joins whole trees.
        model: Either of the two models, for the size of the input.
        legs: Number of legs of both models together.
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
        runs.append((weight, _as_numpy(input_moments(metric, width, True, t)[COVARIANCE])))
    return runs


def _joined_legs(trees: tuple[Tree, Tree], diagram: Diagram) -> list[tuple[str, str]]:
    """Pairs of input legs, edge by edge; any free leg of a node may serve an edge."""
    free: list[list[str]] = []
    for side, side_tree in zip(SIDES, trees, strict=True):
        for node in range(side_tree.bottoms):
            first = node * side_tree.bunch
            legs = range(first, first + side_tree.bunch)
            free.append([bond_index(side, INPUT, leg) for leg in legs])
    pairs = []
    for u, v in diagram.edges:
        # Legs of a node are symmetrised, so any of them will do.
        free_leg = free[u].pop()
        two = free[v].pop()
        pairs.append((free_leg, two))
    return pairs


def _nonlinear_copies(side: Side, model: Model) -> list[Copy]:
    """All copies of all nonlinear layers in the tree of a model."""
    branching: list[Copy] = []
    copies = 1
    for number in reversed(range(len(model.layers))):
        order = model.layers[number].order
        if order > 1:
            for copy in range(copies):
                branching.append((side, number, copy))
        copies *= order
    return branching


def _closed(
    models: dict[Side, Model],
    tensors: Iterable[qtn.Tensor],
    moment: np.ndarray | None,
    pairs: Iterable[tuple[str, str]],
) -> qtn.TensorNetwork:
    """The network of two trees that meet at their outputs, and at pairs of their input legs.

    Args:
        models: Both models.
        tensors: Tensors of the trees, and nodes at single legs.
        moment: Second moment E[x x^T], (D, D), its diagonal (D,), or None for the identity.
        pairs: Indices of the legs that are joined through it.
    """
    import quimb.tensor as qtn

    # New names of indices: the outputs of both models become a single one.
    merged = {bond_index(side, len(m.layers) - 1, 0): OUT for side, m in models.items()}
    operators = []
    for one, two in pairs:
        if moment is not None and moment.ndim == 2:
            operators.append(tensor(moment, (one, two), (COVARIANCE,)))
            continue
        # Identity and diagonal need no matrix: the two legs become one index.
        merged[two] = one
        if moment is not None:
            operators.append(tensor(moment, (one,), (COVARIANCE,)))
    return qtn.TensorNetwork([*tensors, *operators]).reindex(merged)


def _as_numpy(array: Any) -> np.ndarray | None:
    return None if array is None else np.asarray(array)


def _input_leg(bond: Bond) -> str:
    """Index of an input leg."""
    return bond_index(bond.side, INPUT, bond.copy)
