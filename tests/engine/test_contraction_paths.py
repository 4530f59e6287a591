"""Paths and trees of plans give the numbers of the plans, by einsum and by cotengra."""

import numpy as np
import pytest
from closeness import LARGEST, assert_close
from refusals import refused

import tnsim
from tnsim.cli import bench
from tnsim.engine.plan import _product

CASES = {
    "gaussian": (tnsim.Gaussian(), 1),
    "closure": (tnsim.GaussianClosure(), 2),
    "tree": (tnsim.TreeSymmetric(), 2),
    "two layers": (tnsim.Gaussian(), 2),
}


def plan_of(name):
    metric, depth = CASES[name]
    models = [bench.random_stack(4, 3, depth, "float64", seed) for seed in (1, 2)]
    return tnsim.plan(*models, metric, cosine=True).contraction


@pytest.mark.parametrize("name", CASES)
def test_every_tree_gives_the_number_of_its_step(name, diagrams, rng):
    """Steps by einsum, sums as the programs weigh them; arrays are random, not those of models."""
    plan = plan_of(name)
    known = {name: rng.normal(size=shape) for name, shape in plan.shapes.items()}
    operations = [op for stage in plan.stages for op in plan.programs[stage.program].operations]
    for n, (step, operation) in enumerate(zip(plan.path, operations, strict=True)):
        given = [known[name] for name in step.inputs]
        if step.kind == "sum":
            into = [
                np.einsum(f"{term}->{step.equation.split('->')[1]}", array)
                for term, array in zip(step.equation.split("->")[0].split(","), given, strict=True)
            ]
            found = sum(w * array for w, array in zip(operation.weights, into, strict=True))
        else:
            found = np.einsum(step.equation, *given)
            leaves, tree = _product(plan, n)
            contracted = tree.contract([known[leaf] for leaf in leaves])
            # Sums of random numbers, of which an entry may be next to nothing.
            assert_close(contracted, found, scale=LARGEST, rtol=1e-12)
        known[step.output] = known[f"#{n}"] = found
    assert set(plan.outputs) <= set(known)


def test_the_path_is_a_table(diagrams):
    plan = plan_of("two layers")
    assert sum(step.multiplications for step in plan.path) == plan.multiplications
    lines = str(plan.path).splitlines()
    assert lines[0].split() == ["step", "stage", "multiplications", "equation", "arrays"]
    assert len(lines) == 1 + len(plan.path) and lines[-1].endswith(plan.path[-1].output)


def test_what_is_no_product_has_no_tree(diagrams):
    plan = plan_of("two layers")
    total = next(n for n, step in enumerate(plan.path) if step.kind == "sum")
    for wrong in (total, -1, len(plan.path)):
        with refused(f"step {wrong} is none of the .* products"):
            plan.tree(wrong)
    assert plan.tree().contraction_cost() > 0
