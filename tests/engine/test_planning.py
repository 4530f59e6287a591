"""Plans: cost linear in depth and never above the paper's, deterministic, plain data, cached by structure."""

from collections import Counter

import cases
import numpy as np
import opt_einsum
import pytest

import tnsim
import tnsim.engine.plan
from tnsim.cli import bench
from tnsim.compare import by_plans
from tnsim.engine import costs
from tnsim.engine import planner as planning
from tnsim.engine.ir.program import Operation, Program
from tnsim.engine.search import paths as paths

pytestmark = pytest.mark.usefixtures("diagrams")

METRICS = {
    "tree": tnsim.TreeSymmetric(),
    "closure": tnsim.GaussianClosure(),
    "frobenius": tnsim.Frobenius(),
}


def stack(width, rank, depth):
    layer = tnsim.Bilinear(
        *(np.ones(s, np.float32) for s in ((rank, width), (rank, width), (width, rank)))
    )
    return tnsim.Model([layer] * depth)


@pytest.mark.crossing
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("width, rank", [(256, 512), (128, 256), (64, 48), (8, 16)])
def test_cost_is_linear_in_depth_and_at_most_the_papers(width, rank, metric, norms):
    costs = {}
    for depth in (1, 2, 3, 4, 5, 16, 64):
        model = stack(width, rank, depth)
        planned = tnsim.plan(
            model, stack(width, rank, depth), METRICS[metric], cosine=norms
        ).contraction
        costs[depth] = planned.multiplications
        assert len(planned.programs) <= 3
        # a closure needs both norms' second moments for the pairs of legs inside one model
        products = 3 if norms or (metric == "closure" and depth > 1) else 1
        most = products * depth * bench.gram_step_multiplications(width, rank)
        # The paper's step has no means: the closure's states have, and matchings with one pair
        # across both models take two products of entries more for each pair of hidden units.
        means = 2 * products * depth * rank**2 if metric == "closure" else 0
        assert planned.multiplications <= most + means
    step = costs[4] - costs[3]
    assert all(costs[depth] == costs[3] + (depth - 3) * step for depth in (4, 5, 16, 64))


def test_residuals_and_biases_cost_little():
    """Structured, not as identity blocks: a skip adds 21 %, where its 2d hidden units would cost 200 %."""
    width, rank = 256, 512
    plain = tnsim.plan(
        stack(width, rank, 8), stack(width, rank, 8), METRICS["tree"]
    ).multiplications
    layer = stack(width, rank, 1).layers[0]
    layer = tnsim.Residual(
        tnsim.Bilinear(
            layer.left, layer.right, layer.down, np.ones(rank), np.ones(rank), np.ones(width)
        )
    )
    model = tnsim.Model([layer] * 8)
    assert (
        tnsim.plan(model, tnsim.Model([layer] * 8), METRICS["tree"]).multiplications < 1.22 * plain
    )


def test_plan_reads_shapes_only_and_knows_its_guarantee(rng):
    a, b = cases.pair(cases.DEEP["two bilinear"], rng)
    planned = tnsim.plan(a, b, tnsim.GaussianClosure(), dtype="float32").contraction
    assert (planned.metric, planned.exact, planned.dtype) == ("closure", False, "float32")
    assert tnsim.plan(a, b, tnsim.TreeSymmetric()).exact
    taken = planned.interpreted_bytes
    assert taken == 4 * planned.peak_elements > 4 * (a.parameters + b.parameters)
    assert taken < planned.peak_bytes < 1.5 * taken
    assert "scalar multiplications" in str(planned) and "MiB of float32" in str(planned)


def test_a_plan_is_the_one_that_runs_within_the_budget(monkeypatch):
    """A plan was told without the chunks, and inputs in the batches, of a larger budget."""
    monkeypatch.setattr(planning, "LARGE", 2**18)
    a, b = (bench.random_stack(16, 24, 2, "float64", seed) for seed in (1, 2))
    whole = tnsim.plan(a, b)
    budget = tnsim.Budget(0.5 * whole.peak_bytes)
    ran, fetched = [], by_plans.fetched
    monkeypatch.setattr(by_plans, "fetched", lambda plan, *_: ran.append(plan) or fetched(plan, *_))
    tnsim.inner(a, b, budget=budget)
    told = tnsim.plan(a, b, budget=budget)
    assert [told.contraction] == ran and told.peak_bytes <= 0.5 * whole.peak_bytes
    assert tnsim.plan(a, b, budget=tnsim.Budget(16)) == whole  # where nothing fits
    inputs = tnsim.Empirical(np.ones((1000, 16)))
    assert tnsim.plan(a, b, inputs, budget=tnsim.Budget(2**18)).peak_bytes <= 2**18


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("name", cases.SHALLOW | cases.DEEP)
def test_json_both_ways(name, rng):
    a, b = cases.pair((cases.SHALLOW | cases.DEEP)[name], rng)
    planned = tnsim.plan(a, b, tnsim.GaussianClosure(), cosine=True).contraction
    assert tnsim.engine.plan.Plan.from_json(planned.to_json()) == planned


def fresh(model, metric):
    tnsim.session().clear()
    return tnsim.plan(model, model, metric, cosine=True).contraction


@pytest.mark.slow
def test_plans_are_deterministic_and_cached(tmp_path, monkeypatch):
    model = stack(6, 9, 3)
    monkeypatch.setenv("TNSIM_CACHE_DIR", "")
    uncached = fresh(model, METRICS["closure"])
    monkeypatch.setenv("TNSIM_CACHE_DIR", str(tmp_path))
    assert fresh(model, METRICS["closure"]) == uncached
    files = sorted((tmp_path / "plans").iterdir())
    assert len(files) == len(uncached.programs) and all(f.suffix == ".json" for f in files)
    monkeypatch.setattr(planning, "build_program", lambda *_: pytest.fail("searched again"))
    assert fresh(model, METRICS["closure"]) == uncached
    monkeypatch.undo()
    monkeypatch.setenv("TNSIM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TNSIM_CACHE_DIR", str(files[0] / "not-a-folder"))
    assert fresh(model, METRICS["closure"]) == uncached


def test_deep_plans_are_cached_too(tmp_path, monkeypatch):
    monkeypatch.setenv("TNSIM_CACHE_DIR", str(tmp_path))
    model = stack(3, 4, 2)
    first = fresh(model, tnsim.Gaussian())
    for searching in ("build_program", "choose_alternatives"):
        monkeypatch.setattr(planning, searching, lambda *_: pytest.fail("searched again"))
    assert fresh(model, tnsim.Gaussian()) == first
    assert first.unshared_multiplications > first.multiplications


def test_path_costs_agree_with_opt_einsum(rng):
    """A product contracted along a path costs what opt_einsum says of the same path."""
    for _ in range(20):
        count = int(rng.integers(3, 7))
        sizes = {n: int(rng.integers(2, 9)) for n in range(8)}
        inputs = [
            (n, (n + 1) % count, int(rng.integers(count, 8))) for n in range(count)
        ]  # a ring with chords and hyperedges
        output = (0, *(x for x in range(1, 8) if sum(x in labels for labels in inputs) == 1))
        question = tuple(inputs), output, tuple(sizes.items())
        for path in [paths.route(*question, effort, 2**60).path for effort in (0, 1)]:
            letters = ["".join(chr(97 + x) for x in labels) for labels in inputs]
            linear, pool = [], list(range(count))
            for n, step in enumerate(path):
                linear.append(tuple(sorted(pool.index(s) for s in step)))
                pool = [p for p in pool if p not in step] + [count + n]
            equation = f"{','.join(letters)}->{''.join(chr(97 + x) for x in output)}"
            operands = [np.empty([sizes[x] for x in labels]) for labels in inputs]
            _, info = opt_einsum.contract_path(equation, *operands, optimize=linear)
            theirs = sum(
                np.prod([sizes[ord(c) - 97] for c in set(step[2]) - set(",->")], dtype=int)
                for step in info.contraction_list
            )
            assert paths.LabelledProduct(inputs, output, sizes).cost(path).multiplications == theirs


def test_shared_work_is_done_once():
    """Symmetry of a self product: L G R^T and R G L^T are one contraction, so a norm costs three products, not four."""
    width, rank = 64, 128
    self_step = [
        tnsim.plan(m := stack(width, rank, n), m, METRICS["tree"], cosine=True).multiplications
        for n in (3, 4)
    ]
    cross_step = [
        tnsim.plan(stack(width, rank, n), stack(width, rank, n), METRICS["tree"]).multiplications
        for n in (3, 4)
    ]
    saved = 3 * (cross_step[1] - cross_step[0]) - (self_step[1] - self_step[0])
    assert saved == 2 * rank**2 * width


@pytest.mark.parametrize("layers, once", [("LAL", 3), ("A", 0), ("AA", 1)])
def test_attention_of_a_model_with_itself_has_the_plan_of_two_models(layers, once):
    eye = np.eye(2)
    block = tnsim.Residual(tnsim.Attention(*[eye] * 6, n_heads=1))
    kinds = {"L": tnsim.Linear(eye), "A": block}
    models = [tnsim.Model([kinds[kind] for kind in layers], n_ctx=2) for _ in range(2)]
    plan = tnsim.plan(*models, METRICS["tree"], cosine=True).contraction
    # Of attention each program runs for both models or for all pairs, but that of scales between
    # layers; a step of linear layers is a program.
    runs = Counter(stage.program for stage in plan.stages)
    assert list(runs.values()).count(1) == once


def test_outputs_of_a_stage_are_read():
    layer = tnsim.Attention(*[np.eye(2)] * 6, n_heads=1, q1_bias=np.ones(2))
    models = [tnsim.Model([layer], n_ctx=2) for _ in range(2)]
    plan = tnsim.plan(*models, METRICS["closure"], cosine=True).contraction
    for n, stage in enumerate(plan.stages):
        later = (name for other in plan.stages[n:] for name in other.inputs)
        scales = (stage.outputs[output] for output, _ in plan.programs[stage.program].scales)
        assert {*plan.outputs, *later, *scales} >= set(stage.outputs)


def test_program_counts():
    """Costs, peak and shapes of a program written by hand: (2x3)(3x4), then times a vector."""
    program = Program(
        shapes=((2, 3), (3, 4), (4,)),
        operations=(
            Operation("contract", (0, 1), ((0, 1), (1, 2)), (0, 2)),
            Operation("contract", (3, 2), ((0, 2), (2,)), (0,)),
        ),
        outputs=(4,),
    )
    assert program.costs == (24, 8) and program.multiplications == 32 and program.contractions == 2
    assert program.value_shapes[3:] == ((2, 4), (2,))
    assert costs.peak_elements(program) == 6 + 12 + 4 + 8 + 2
