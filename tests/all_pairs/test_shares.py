"""What reads one model only is computed once for each model: the same numbers as pair by pair."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
from backends import compiled
from closeness import assert_close
from oracles import bilinear, linear
from sequence_oracles import attention
from stored_runs import contents, files_of

import tnsim
from tnsim.all_pairs import contracted_runs, ways
from tnsim.all_pairs.contracted_runs import Pairs
from tnsim.all_pairs.ways import PairSetting
from tnsim.compare.by_kernels import STARTING
from tnsim.engine.hoisting import COMPILING, analysed, portion
from tnsim.engine.ir.program import Operation, PlanStage, Program
from tnsim.engine.runtime import execution
from tnsim.problems import features
from tnsim.problems.units import common_units

pytestmark = pytest.mark.usefixtures("diagrams")

SMALL = tnsim.Budget(memory_bytes=60_000)  # tiles of one or two models
CLOSURE = tnsim.GaussianClosure()


def deep(g, depth=2, biases=True):
    return tnsim.Model([bilinear(g, 3, 4, 3, biases) for _ in range(depth)])


def language_model(g):
    layers = [tnsim.Residual(attention(g, 2, 1, 2, 1, 2, True), 1.0, 0.5) for _ in range(2)]
    return tnsim.Model([linear(g, 5, 2), *layers, linear(g, 2, 5)], n_ctx=2)


def sequences(g):
    layers = [tnsim.Residual(bilinear(g, 2, 3, 2, True), 1.0, 0.5) for _ in range(2)]
    return tnsim.Model([linear(g, 3, 2), *layers], n_ctx=2)


def setting(some, pairs):
    """The setting of a run over these models."""
    units = common_units(some, CLOSURE)
    return PairSetting(CLOSURE, False, "float64", tnsim.Budget(), pairs, units)


def diagrams(g):
    return deep(g, 2, biases=False)


RUNS = {
    "closure": (deep, CLOSURE, False),
    "closure per output": (deep, CLOSURE, True),
    "closure of another input": (
        deep,
        tnsim.GaussianClosure(np.array([0.3, -1.0, 0.2]), np.diag([1.0, 2.0, 0.5])),
        True,
    ),
    "sequences": (sequences, CLOSURE, True),
    "diagrams": (diagrams, tnsim.Gaussian(), False),
    "trees": (deep, tnsim.TreeSymmetric(), True),
}


BOTH = {"argvalues": [1, 10**12], "ids": ["whole stages", "parts of stages"], "indirect": True}


@pytest.fixture
def always(request, monkeypatch):
    """Plans are cut however small they are, as over so many pairs."""
    pairs = getattr(request, "param", 10**12)
    monkeypatch.setattr(contracted_runs, "WORTH", 0)
    monkeypatch.setattr(contracted_runs, "SAVING", -1)
    monkeypatch.setattr(contracted_runs, "COMPILING", 0)
    cut = contracted_runs.shares
    monkeypatch.setattr(contracted_runs, "shares", lambda plan, owners, _: cut(plan, owners, pairs))


@pytest.fixture
def by_plans(monkeypatch):
    monkeypatch.setattr(features, "spaces", lambda *arguments: [])


@pytest.mark.sampled(quick=1, slow=6)
@pytest.mark.parametrize("always", **BOTH)
@pytest.mark.parametrize("name", [*RUNS, pytest.param("language models", marks=pytest.mark.slow)])
def test_the_numbers_are_those_of_single_pairs(name, rng, always, by_plans):
    make, metric, slices = RUNS.get(name, (language_model, CLOSURE, False))
    some = [make(rng) for _ in range(3)]
    found = tnsim.pairwise(some, metric, slices=slices)
    for i, j in [(1, 0), (2, 1), (0, 0)]:
        sign, log = tnsim.log_inner(some[i], some[j], metric)
        assert found.sign[i, j] == sign
        assert_close(found.log_inner[i, j], log, scale=max(1, abs(log)), rtol=1e-12)
        if slices:
            expected = tnsim.slices(some[i], some[j], metric)
            assert_close(found.slices[i, j], expected, scale=1.0, rtol=1e-12)
    again = tnsim.pairwise(some, metric, other=some[1:], slices=slices, budget=SMALL)
    assert_close(again.similarity, found.similarity[:, 1:], scale=1.0, rtol=1e-12)


@pytest.mark.parametrize("always", **BOTH)
def test_what_is_cut(rng, always):
    """All that reads one model is in its share, and the crossing share reads none of it again."""
    a, b = sequences(rng), sequences(rng)
    _, plan, shares = Pairs.of(a, b, setting([a, b], 15))
    assert set(shares.own) == {"A", "B"}
    works = [shares.own[name].plan.multiplications for name in ("A", "B")]
    crossing = shares.crossing.plan
    assert min(works) > 0.1 * plan.multiplications
    assert sum(works) + crossing.multiplications < 1.1 * plan.multiplications
    handed = {*shares.own["A"].plan.outputs, *shares.own["B"].plan.outputs}
    assert handed <= set(crossing.shapes) and crossing.outputs == plan.outputs


def test_small_pairs_are_computed_whole(rng):
    a, b = deep(rng), deep(rng)
    pairs = Pairs.of(a, b, setting([a, b], 15))
    assert not pairs.shares.own and pairs.shares.crossing.plan is pairs.plan


def test_few_pairs_are_computed_whole(rng, always, monkeypatch):
    """Programs of a crossing share take longer to compile than it saves over few pairs."""
    monkeypatch.setattr(contracted_runs, "COMPILING", 1000)
    a, b = deep(rng, biases=False), deep(rng, biases=False)
    cut = []
    for pairs in (1, 10**6):
        cut.append(bool(Pairs.of(a, b, setting([a, b], pairs)).shares.own))
    assert cut == [False, True]


def test_over_few_pairs_a_stage_keeps_its_program():
    """Own work that would not repay a program is left to the crossing share."""
    square = Operation("contract", (0, 0), ((0,), (0,)), (0,))
    product = Operation("contract", (2, 1), ((0,), (0,)), ())
    program = Program(((3,), (3,)), (square, product), outputs=(3,))
    whose = [frozenset({"A"}), frozenset({"B"})]
    few, many = COMPILING // 3, COMPILING  # pairs: the square takes 3 multiplications
    for pairs, is_cut in [(few, False), (many, True)]:
        stage = analysed(0, PlanStage(0, ("a", "b"), ("AB",)), program, whose, pairs)
        crossing = portion(stage, None, {"AB"})
        assert (crossing.program is not program) == is_cut
        assert (portion(stage, "A", set(crossing.inputs)) is not None) == is_cut


@pytest.mark.parametrize("always", **BOTH)
def test_every_model_once(rng, always, by_plans, monkeypatch):
    """Own shares run once for each model and side, however many tiles there are."""
    monkeypatch.setattr(ways, "_TILE_WORK", 1)
    some = [deep(rng) for _ in range(4)]
    run, runs = execution.run, []

    def counted(plan, *arguments, **options):
        runs.append(plan.outputs)
        return run(plan, *arguments, **options)

    monkeypatch.setattr(execution, "run", counted)
    found = tnsim.pairwise(some, CLOSURE)
    assert "10 tiles of 1 x 1" in found.attrs["plan"]
    own = [outputs for outputs in runs if outputs not in (("AA",), ("AB",))]
    means = len(some)  # inner products with the constant 1
    assert len(own) == 8 and runs.count(("AB",)) == 10 + means


def test_large_pairs_run_at_once(rng, always, by_plans, monkeypatch):
    monkeypatch.setattr(ways, "_TILE_WORK", 1)
    some = [deep(rng) for _ in range(4)]
    one_by_one = tnsim.pairwise(some, CLOSURE)
    assert tnsim.plan_pairwise(some, CLOSURE).tiles.together == 1
    monkeypatch.setattr(contracted_runs, "_LARGE", 0)
    assert tnsim.plan_pairwise(some, CLOSURE).tiles.together == 4
    assert tnsim.plan_pairwise(some, CLOSURE, budget=SMALL).tiles.together == 1
    assert tnsim.pairwise(some, CLOSURE).identical(one_by_one)


@pytest.mark.parametrize("always", **BOTH)
def test_planned_work(rng, always, by_plans):
    """The plan of a run counts each share as often as it runs."""
    some = [deep(rng) for _ in range(6)]
    common = setting(some, 15)
    shares = Pairs.of(some[0], some[1], common).shares
    own = sum(share.plan.multiplications for share in shares.own.values())
    norm = Pairs.of(some[0], None, common).plan.multiplications
    crossing = shares.crossing.plan.multiplications
    expected = 6 * (own + norm) + 15 * crossing
    assert tnsim.plan_pairwise(some, CLOSURE).multiplications == expected
    counts = {}
    for tier in ("interpret", "compile"):
        with tnsim.using(tnsim.Session(tier=tier)):
            counts[tier] = tnsim.plan_pairwise(some, CLOSURE).tiles.programs
    assert counts["interpret"] == 0 < counts["compile"]


def test_planned_work_of_hidden_units(rng):
    """Three pairs and three norms of models of equal sizes, and the seconds before the first."""
    some = [
        tnsim.Model([linear(rng, 4, 5), tnsim.Elementwise("gelu"), linear(rng, 5, 2)])
        for _ in range(3)
    ]
    run, pair = tnsim.plan_pairwise(some), tnsim.plan(*some[:2])
    assert (run.route, pair.route) == ("kernels", "kernels")
    assert run.multiplications == 6 * pair.multiplications
    assert_close(run.seconds, 6 * pair.seconds - 5 * STARTING, scale=run.seconds)


def test_stores_and_threads_give_the_same_bytes(rng, tmp_path, always, by_plans):
    some = [deep(rng) for _ in range(4)]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    found = tnsim.pairwise(some, CLOSURE, store=whole, budget=SMALL)
    with ThreadPoolExecutor(2) as threads:
        beside = tnsim.pairwise(some, CLOSURE, executor=threads, budget=SMALL)
    assert beside.identical(found)
    tnsim.pairwise(some, CLOSURE, store=parts, budget=SMALL)
    list(files_of(parts).values())[-1].unlink()  # the last tile is lost
    with pytest.warns(tnsim.errors.StoreWarning):
        again = tnsim.pairwise(some, CLOSURE, store=parts, budget=SMALL)
    assert again.identical(found) and contents(parts) == contents(whole)


@pytest.mark.full
@compiled
def test_worker_processes_cut_plans_of_large_models(rng):
    """No patch reaches workers: these pairs are work enough to be cut."""
    some = [tnsim.Model([bilinear(rng, 256, 512, 256, True) for _ in range(3)]) for _ in range(3)]
    assert set(Pairs.of(some[0], some[1], setting(some, 6)).shares.own) == {"A", "B"}
    one_by_one = tnsim.Budget(memory_bytes=2**26)
    alone = tnsim.pairwise(some, CLOSURE, budget=one_by_one)
    assert alone.attrs["plan"].endswith("6 tiles of 1 x 1")
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as processes:
        beside = tnsim.pairwise(some, CLOSURE, budget=one_by_one, executor=processes)
    assert beside.identical(alone)
    for i, j in [(1, 0), (2, 0), (2, 1)]:
        wanted = tnsim.similarity(some[i], some[j], CLOSURE)
        assert_close(alone.similarity[i, j], wanted, scale=1.0, rtol=1e-12)
