"""Position-wise layers of any order: a toy kind, a product of n legs, against plain oracles."""

import itertools
import math

import numpy as np
import pytest
from closeness import assert_close
from oracles import quadrature
from seeds import generator

import tnsim
from tnsim.engine.planner import plan_problem
from tnsim.engine.runtime import execution
from tnsim.metrics.input_moments import sequence_inputs
from tnsim.names import (
    COVARIANCE,
    DOWN,
    IDENTITY,
    MEAN,
    ONE,
    ONES,
    PAIRS,
    SAME_POSITION,
    SKIP,
    Leaf,
    bias_of,
)
from tnsim.problems.sequences import fold
from tnsim.problems.sequences.joining_rules import ACROSS, ALL, NONE, STRAIGHT, matchings
from tnsim.problems.sequences.notation import Leg
from tnsim.problems.tensors.kinds import LayerKind
from tnsim.problems.tensors.positional import sequence_shapes

D, RANK, N_CTX = 2, 3, 2


def toy(order, constants):
    """`down (leg_1 * ... * leg_n)`, with biases and a skip or without."""
    legs = tuple(f"LEG{n}" for n in range(order))
    biases = (*legs, DOWN) if constants else ()
    return LayerKind("Toy", legs, DOWN, D, D, RANK, biases, constants)


def lifted_legs(kind, weights):
    """(order, rank, 1 + d): the legs over (1, x)."""
    biases = [weights.get(bias_of(role), np.zeros(RANK)) for role in kind.legs]
    return [np.c_[b, weights[role]] for b, role in zip(biases, kind.legs, strict=True)]


def forward(kind, weights, x):
    """The layer at inputs (..., d)."""
    lifted = np.concatenate([np.ones((*x.shape[:-1], 1)), x], axis=-1)
    hidden = np.prod([lifted @ leg.T for leg in lifted_legs(kind, weights)], axis=0)
    return hidden @ weights[DOWN].T + weights.get(bias_of(DOWN), 0.0) + weights.get(SKIP, 0.0) * x


def tensor(kind, weights):
    """(d, 1 + d, ..., 1 + d): one position of the layer over n copies of (1, x)."""
    order = kind.order
    letters = "abcdefg"[:order]
    legs = ",".join("h" + c for c in letters)
    dense = np.einsum(f"kh,{legs}->k{letters}", weights[DOWN], *lifted_legs(kind, weights))
    dense[(slice(None), *(0,) * order)] += weights.get(bias_of(DOWN), 0.0)
    for leg in range(order):
        for k in range(D):
            place = [0] * order
            place[leg] = 1 + k
            dense[(k, *place)] += weights.get(SKIP, 0.0) / order
    return dense


@pytest.fixture
def products():
    """The inner products AA, BB and AB of two toy layers, from a plan."""

    def run(kinds, weights, metric):
        inputs = sequence_inputs(metric, D, N_CTX)
        models = {"A": (kinds[0],), "B": (kinds[1],)}
        problem = fold.fold_sequences(models, metric.rule, inputs, N_CTX, PAIRS, False)
        plan = plan_problem(problem, metric.name, True, "float64")
        known = {ONE: np.ones(()), ONES: np.ones(N_CTX), SAME_POSITION: np.eye(N_CTX)}
        known |= {IDENTITY: np.eye(D)}
        if hasattr(metric, "cov"):
            known |= {MEAN: metric.mean, COVARIANCE: metric.cov}
        for side, arrays in zip("AB", weights, strict=True):
            known |= {str(Leaf(side, 0, role)): np.asarray(x) for role, x in arrays.items()}
        result = execution.run(plan, {name: known[name] for name in plan.shapes}, "interpret")
        return [
            float(result.values[p.group])
            * 2.0 ** execution.exponent_of(result, dict(plan.scales[p.group]))
            for p in PAIRS
        ]

    return run


def drawn(kinds):
    rng = generator(kinds[0].order)
    return [{r: rng.normal(size=s) for r, s in sequence_shapes(k, N_CTX).items()} for k in kinds]


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("orders", [(3, 3), (2, 3), (4, 3)])
def test_expectations_of_any_order(orders, constants, products):
    kinds = [toy(order, constants) for order in orders]
    weights = drawn(kinds)
    mean, cov = np.array([0.3, -0.5]), np.array([[0.8, 0.2], [0.2, 0.5]])
    x, w = quadrature(max(orders) + 1, mean, cov)
    outputs = [forward(kind, arrays, x) for kind, arrays in zip(kinds, weights, strict=True)]
    expected = [N_CTX * w @ (one * two).sum(axis=1) for one, two in _pairs(outputs)]
    assert_close(products(kinds, weights, tnsim.Gaussian(mean, cov)), expected, rtol=1e-10)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("metric", [tnsim.TreeSymmetric(), tnsim.Frobenius()])
@pytest.mark.parametrize("order", [3, 4])
def test_tensors_of_any_order(order, metric, constants, products):
    kinds = [toy(order, constants)] * 2
    weights = drawn(kinds)
    weights[1] = {role: x + 0.5 for role, x in weights[1].items()}
    dense = [tensor(kind, arrays) for kind, arrays in zip(kinds, weights, strict=True)]
    if isinstance(metric, tnsim.TreeSymmetric):
        orders = list(itertools.permutations(range(order)))
        dense = [
            sum(t.transpose(0, *(1 + n for n in p)) for p in orders) / len(orders) for t in dense
        ]
    expected = [N_CTX * np.vdot(one, two) for one, two in _pairs(dense)]
    assert_close(products(kinds, weights, metric), expected, rtol=1e-10)


def _pairs(found):
    a, b = found
    return (a, a), (b, b), (a, b)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_the_matchings_are_counted(order):
    """Involutions of 2n legs, partial matchings of n with n; shares of permutations add up."""
    legs = [Leg(slot, f"LEG{n}") for slot in ("bra", "ket") for n in range(order)]
    rules = fold.rules_of(tnsim.TreeSymmetric().rule)

    def count(rule):
        return len(list(matchings(tuple(legs), rule)))

    involutions = [1, 1]
    for n in range(2, 2 * order + 1):
        involutions.append(involutions[-1] + (n - 1) * involutions[-2])
    partial = [math.comb(order, k) ** 2 * math.factorial(k) for k in range(order + 1)]
    assert count(ALL) == involutions[2 * order]
    assert count(NONE) == 1
    assert count(ACROSS) == sum(partial)
    assert count(STRAIGHT) == 2**order
    assert_close(
        [rules.share(order, k) * n for k, n in enumerate(partial)],
        [math.comb(order, k) for k in range(order + 1)],
    )
