"""Exact deep metrics as a folded problem. In: layer kinds, a kind of joining. Out: a `Problem`.

`Gaussian` beyond one nonlinear layer and `Symmetric` join the legs of whole trees, not layer by
layer: an inner product is a sum over diagrams (see `orbits`), each a small network over the layers'
symmetrised tensors. A problem has three stages: the layers' arrays and the input's second moments;
what is built of them and shared by all diagrams (see `tree_definitions`); and one weighted sum of
diagrams for each inner product, every diagram written in several ways (see `diagram_terms`). The
planner keeps the cheapest way, contracts shared parts once and takes sums before products.

Diagrams are homogeneous in the lifted input, which they treat as centred. With a constant or a mean
the problem is run at several second moments `C + t m m^T` and combined (see `constants`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping

from tnsim.engine.problem import Definition, Problem, ScaleGroup, Stage, Term, prune
from tnsim.errors import ModelError, TooLarge
from tnsim.folding.crossings import Crossing, crossing_part
from tnsim.folding.diagram_terms import forms, write, write_over_upper
from tnsim.folding.tree_definitions import (
    layer_arrays,
    layer_powers,
    matrices_between_units,
    scale_groups,
    second_moments,
    tensors_and_means,
)
from tnsim.folding.tree_operands import TreeOperands, tree
from tnsim.folding.upper_tensors import has_upper_tensors, joinings_within, upper_tensors
from tnsim.metrics.input_moments import InputKind
from tnsim.metrics.orbits import diagrams
from tnsim.names import COVARIANCE, IDENTITY, TRACE, Leaf, Pair, Side
from tnsim.tensors.kinds import Kinds
from tnsim.tensors.symmetric import symmetric_shapes

MAX_LEGS = 20
"""Legs of both models together: 20 have 654,729,075 pairings, 32 have 1.9 * 10^17."""


def fold_trees(
    models: dict[Side, Kinds],
    cross_only: bool,
    inputs: InputKind,
    lifted: bool,
    pairs: Iterable[Pair],
    per_output: bool,
    n_ctx: int = 1,
) -> Problem:
    """The problem whose outputs are inner products, each a sum over diagrams of whole trees.

    Args:
        models: Kinds of the layers of every model, from the input up.
        cross_only: Whether bra legs join ket legs only (`Symmetric`), or any legs any (`Gaussian`).
        inputs: Structure of the input's second moment.
        lifted: Whether the constant is coordinate 0 of every bond.
        pairs: The inner products asked for.
        per_output: Whether they are wanted for every output coordinate, or summed over them.
        n_ctx: Positions of flattened sequences, over which outputs are added up.

    Returns:
        A problem whose outputs are named by their pair. Its leaves are those of
        `symmetric.symmetric_arrays`, the input's second moment `COVARIANCE` and, lifted, `TRACE`.
    """
    pairs = tuple(pairs)
    parts = TreeOperands(models, inputs, lifted, n_ctx)
    layers = layer_arrays(parts)
    groups = scale_groups(layers)
    shared = tensors_and_means(parts)
    if "units" in forms(parts):
        shared += matrices_between_units(parts)
    if has_upper_tensors(parts):
        shared += tuple(upper_tensors(parts))
    stages = [Stage(layers + second_moments(parts), groups), Stage(shared, groups)]
    for pair in pairs:  # one after the other: together they need the memory of all
        product = _inner_product(parts, pair, cross_only, per_output)
        # Divided by its own scale as well, so that it comes as a number and a logarithm.
        own = ScaleGroup(pair.group, degree=1, definition=pair.group)
        stages.append(Stage((product,), (own,)))
    symmetric = {IDENTITY} if inputs.moment == "diagonal" else {IDENTITY, COVARIANCE}
    outputs = tuple(pair.group for pair in pairs)
    return prune(Problem(tuple(stages), _leaf_shapes(parts), frozenset(symmetric), outputs))


def check_size(models: Mapping[Side, Kinds], cross_only: bool) -> None:
    """Refuse what nobody could contract, before diagrams are generated.

    Raises:
        TooLarge: The trees have more than `MAX_LEGS` legs together.
        ModelError: Only bra and ket legs may be joined, but the models' degrees differ.
    """
    bra = tree(models["A"]).legs
    ket = tree(models.get("B", models["A"])).legs
    if cross_only and bra != ket:
        raise ModelError(
            "Symmetric() compares tensors of one order, but the models have degrees "
            f"{bra} and {ket}; use Gaussian()"
        )
    legs = bra + ket
    if legs > MAX_LEGS:
        raise TooLarge(
            f"the exact metric joins {legs} legs in more than 10^{legs // 2 - 2} ways; "
            f"up to {MAX_LEGS} legs are planned (three bilinear layers a side have 16). "
            "Use GaussianClosure(), an approximation, or TreeSymmetric()"
        )


def _inner_product(
    parts: TreeOperands, pair: Pair, cross_only: bool, per_output: bool
) -> Definition:
    """All diagrams of one inner product, each weighted with the number of joinings it stands for.

    The Gaussian expectation is the sum over all pairings. The symmetriser P_n is the *mean* over
    the n! ways to join n legs of the bra to n of the ket, so there counts are divided by n!.
    """
    bra, ket = parts.trees[pair.bra], parts.trees[pair.ket]
    joinings = float(math.factorial(bra.legs)) if cross_only else 1.0
    terms: list[Term] = []
    crossings: list[Crossing] = []
    for diagram in diagrams(bra, ket, cross_only):
        first, *others = (write(parts, pair, diagram, form, per_output) for form in forms(parts))
        ways = tuple((Term(1.0, other),) for other in others)
        terms.append(Term(diagram.count / joinings, first, ways))
        crossings.append(crossing_part(diagram.edges, bra.bottoms, bra.bottoms + ket.bottoms))
    if has_upper_tensors(parts):
        terms = _by_crossing(parts, pair, terms, crossings)
    indices = parts.trace.indices[-1:] if per_output else ()
    return Definition(pair.group, indices, tuple(terms), powers=_powers(parts, pair))


def _by_crossing(
    parts: TreeOperands, pair: Pair, terms: list[Term], crossings: list[Crossing]
) -> list[Term]:
    """Diagrams with one crossing part as one product of upper tensors, or as they were."""
    # With f and g free nodes, W_f and W_g are sums over the J_f and J_g ways to join the other
    # nodes of each model among themselves. A product of the two therefore holds J_f J_g joinings,
    # and diagrams that hold N together are N / (J_f J_g) such products: as often as there are ways
    # to choose the free nodes and to draw the crossing part on them.
    groups: dict[Hashable, list[int]] = {}
    for n, crossing in enumerate(crossings):
        groups.setdefault(crossing.form(), []).append(n)
    joined = []
    for group in groups.values():
        free, edges = crossings[group[0]]
        weight = sum(terms[n].weight for n in group)
        for side, count in zip(pair, free, strict=True):
            weight /= joinings_within(parts, side, count)
        as_they_were = []
        for n in group:
            share = terms[n].weight / weight
            as_they_were.append(dataclasses.replace(terms[n], weight=share))
        product = write_over_upper(parts, pair, free, edges)
        joined.append(Term(weight, product, (tuple(as_they_were),)))
    return joined


def _powers(parts: TreeOperands, pair: Pair) -> tuple[tuple[str, int], ...]:
    """Scale groups of an inner product: every array as often as bra and ket together hold it."""
    powers: dict[str, int] = {}
    for side in pair:
        orders = parts.trees[side].orders
        copies = 1
        for level in reversed(range(len(orders))):
            for group, times in layer_powers(parts, side, level, copies):
                powers[group] = powers.get(group, 0) + times
            copies *= orders[level]
    powers[pair.group] = 1
    return tuple(powers.items())


def _leaf_shapes(parts: TreeOperands) -> dict[str, tuple[int, ...]]:
    """Shape of every leaf that a definition may read."""
    layers = parts.models["A"]
    d_in = layers[0].d_in + parts.lifted
    d_out = layers[-1].d_out
    shapes: dict[str, tuple[int, ...]] = {IDENTITY: (d_in, d_in), COVARIANCE: (d_in, d_in)}
    if parts.inputs.moment == "diagonal":
        shapes[COVARIANCE] = (d_in,)
    for side, kinds in parts.models.items():
        for number, kind in enumerate(kinds):
            for role, shape in symmetric_shapes(kind, parts.lifted).items():
                shapes[str(Leaf(side, number, role))] = shape
    shapes[TRACE] = (d_out + parts.lifted,)
    if parts.n_ctx > 1:
        shapes[TRACE] = (d_out + 1, d_out // parts.n_ctx + 1)
    return shapes
