"""Terms that may be written in several ways: each has the same value, contracted one by one.

The contractions here are cotengra's, over all definitions as they stand: no planning, no sharing,
no scales.
"""

import cotengra
import pytest
from closeness import LARGEST, assert_close
from oracles import bilinear, linear

import tnsim
from tnsim.engine.ir.problem import strip_alias
from tnsim.metrics.orbits import Tree, diagrams
from tnsim.names import Pair
from tnsim.problems.families import WholeTree, model_weights
from tnsim.problems.whole_tree import crossing_part

TWO = {
    "plain": lambda g: [bilinear(g, 2, 3, 2), bilinear(g, 2, 2, 1)],
    "biases": lambda g: [bilinear(g, 2, 3, 2, True), bilinear(g, 2, 2, 1, True)],
    "embedded": lambda g: [linear(g, 2, 3), bilinear(g, 3, 2, 2), bilinear(g, 2, 2, 2)],
}
THREE = {
    "three layers": lambda g: [bilinear(g, 2, 2, 2), bilinear(g, 2, 2, 2), bilinear(g, 2, 2, 1)]
}
ROUNDED = 2e-10
"""30 times the worst of 20 seeds, of sums of three layers that cancel."""
CORRELATED = tnsim.Gaussian([0.4, -0.9], [[1.3, 0.5], [0.5, 0.8]])


def product(operands, arrays, output):
    """One product of arrays by name, over all indices that are not an output."""
    chosen = [arrays[strip_alias(o.name)] for o in operands]
    return cotengra.array_contract(chosen, [o.indices for o in operands], output, optimize="greedy")


def sum_of(terms, arrays, output):
    """The terms as they are written first."""
    return sum(term.weight * product(term.operands, arrays, output) for term in terms)


def ways(term, arrays, output):
    """The value of a term's product, and of every sum that it may be written as, to any depth."""
    yield product(term.operands, arrays, output)
    for terms in term.alternatives:
        yield sum_of(terms, arrays, output)
        for inner in terms:
            first, *others = ways(inner, arrays, output)
            for other in others:
                assert_close(other, first, scale=LARGEST, rtol=ROUNDED)


@pytest.mark.parametrize(
    "name, metric",
    [
        *((name, metric) for name in TWO for metric in (tnsim.Gaussian(), CORRELATED)),
        ("three layers", tnsim.Symmetric()),
        pytest.param("three layers", tnsim.Gaussian(), marks=pytest.mark.slow),
    ],
)
def test_every_way_has_the_same_value(name, metric, rng):
    a, b = (tnsim.Model((TWO | THREE)[name](rng)) for _ in range(2))
    family = WholeTree.of(a, b, metric)
    problem = family.problem((Pair("A", "B"),), slices=True)
    t = 0.7 if family.nodes is not None else None
    arrays = model_weights(family, {"A": a, "B": b})
    arrays |= family.inputs(problem.shapes, metric, a.d_in, t)
    counted = 0
    for definition in [d for stage in problem.stages for d in stage.definitions]:
        for term in definition.terms:
            first, *others = ways(term, arrays, definition.indices)
            counted += len(others)
            for other in others:
                assert_close(other, first, scale=LARGEST, rtol=ROUNDED)
        arrays[definition.name] = sum_of(definition.terms, arrays, definition.indices)
    assert counted


def test_diagrams_of_three_layers_have_77_crossing_parts():
    tree = Tree((2, 2, 2))
    found = diagrams(tree, tree, cross_only=False)
    forms = {crossing_part(diagram.edges, 4, 8).form() for diagram in found}
    assert len(found) == 606 and len(forms) == 77


def test_a_crossing_part_does_not_depend_on_which_node_is_which(rng):
    tree = Tree((2, 2, 2))
    for diagram in diagrams(tree, tree, cross_only=False)[::37]:
        order = [*rng.permutation(4), *(4 + rng.permutation(4))]
        moved = [(int(order[u]), int(order[v])) for u, v in diagram.edges]
        before = crossing_part(diagram.edges, 4, 8)
        assert crossing_part(moved, 4, 8).form() == before.form()
