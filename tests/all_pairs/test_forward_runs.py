"""All pairs over inputs: against the verbs, with functions, tiles, stores and executors."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from closeness import assert_close
from oracles import bilinear, expected_products, linear
from refusals import refused

import tnsim
from tnsim.all_pairs.run_routes import function_entry
from tnsim.all_pairs.sources import sources


def models(g, count):
    return [
        tnsim.Model([bilinear(g, 3, 4, 3, True), bilinear(g, 3, 3, 2, True)]) for _ in range(count)
    ]


def agrees(found, rows, columns, metric):
    for i, a in enumerate(rows):
        for j, b in enumerate(columns):
            value = tnsim.similarity(a, b, metric)
            assert_close(found.similarity[i, j], value, scale=1.0, rtol=1e-12)
            if (error := value.standard_error) is not None and a is not b:
                assert_close(found.standard_error[i, j], error, scale=1.0, rtol=1e-12)


@pytest.mark.slow
def test_all_pairs_with_functions_and_differences(rng):
    several = models(rng, 4)
    metric = tnsim.Empirical(rng.normal(size=(100, 3)), rng.uniform(size=100))
    mixed = [*several, several[0] - 2.0 * several[1], lambda x: np.abs(several[2](x))]
    found = tnsim.pairwise(mixed, metric, slices=True)
    agrees(found, mixed, mixed, metric)
    assert found.attrs["plan"].startswith("data") and found.attrs["exact"]
    slices = tnsim.slices(mixed[0], mixed[5], metric)
    assert_close(found.slices[0, 5], slices, scale=1.0, rtol=1e-12)
    across = tnsim.pairwise(several[:2], metric, other=mixed[3:])
    agrees(across, several[:2], mixed[3:], metric)
    plan = tnsim.plan_pairwise(mixed, metric)
    assert plan.route == "data" and plan.tiles.pairs == 21
    with refused(r"use tnsim.Empirical\(inputs\), found Gaussian"):
        tnsim.pairwise(mixed, tnsim.Gaussian(samples=0))


def test_functions_without_their_means_are_told_by_the_functions(rng):
    """They were by the address of a wrapper, which was gone when the next one was made there."""
    metric, functions = tnsim.Empirical(rng.normal(size=(20, 3))), [np.tanh, np.sin]
    plain, centred = (
        [function_entry(one, metric, stored=False).digest for one in sources(functions, None, mean)]
        for mean in (None, metric)
    )
    assert centred == plain and len(set(plain)) == 2


def test_functions_and_modules_in_stores(rng, tmp_path):
    """Told by their outputs on the inputs, in every process alike: stores go on and grow."""
    torch = pytest.importorskip("torch")
    metric, store = tnsim.Empirical(rng.normal(size=(50, 3))), tmp_path / "store"
    torch.manual_seed(0)
    nets = [torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU()) for _ in range(3)]
    weights = rng.normal(size=(3, 4))

    def functions():
        """Other objects each time, as another process has them."""
        return [*nets, tnsim.Model([tnsim.Linear(weights.T)]), lambda x: np.tanh(x @ weights)]

    first = tnsim.pairwise(functions(), metric, store=store)
    log = (store / "computed.log").read_text()
    assert tnsim.pairwise(functions(), metric, store=store).identical(first)
    assert (store / "computed.log").read_text() == log
    more = [*functions(), lambda x: np.sin(x @ weights)]
    found = tnsim.pairwise(more, metric, store=store)
    assert (found.similarity.values[:5, :5] == first.similarity.values).all()
    assert_close(found.similarity.values, tnsim.pairwise(more, metric).similarity.values, scale=1.0)
    with torch.no_grad():
        nets[1][0].weight[0, 0] += 1e-3
    with refused(r"other outputs of 1 \(side a, number 1\), or equal", tnsim.errors.StoreMismatch):
        tnsim.pairwise(more, metric, store=store)


def test_tiles_stores_and_executors_change_nothing(rng, tmp_path):
    several = models(rng, 5)
    metric = tnsim.Empirical(rng.normal(size=(80, 3)))
    whole = tnsim.pairwise(several, metric)
    small = tnsim.Budget(memory_bytes=60_000)
    assert tnsim.plan_pairwise(several, metric, budget=small).tiles.number > 1
    with ThreadPoolExecutor(2) as executor:
        options = {"budget": small, "store": tmp_path / "run", "executor": executor}
        tiled = tnsim.pairwise(several, metric, **options)
    for found in (tiled, tnsim.open_pairwise(tmp_path / "run")):
        for name in ("similarity", "standard_error", "log_inner"):
            assert_close(found[name], whole[name], scale=1.0, rtol=1e-12)
    other = tnsim.Empirical(rng.normal(size=(80, 3)))
    with refused("other parameters there", tnsim.errors.StoreMismatch):
        tnsim.pairwise(several, other, store=tmp_path / "run")


def test_quadrature_covers_what_every_model_reads(rng):
    """Models of equal layers look into different directions of a wider input."""
    several = []
    for _ in range(3):
        deep = [bilinear(rng, 2, 3, 2), bilinear(rng, 2, 2, 2)]
        several.append(tnsim.Model([linear(rng, 3, 2), *deep]))
    found = tnsim.pairwise(several[:2], tnsim.Gaussian(), other=several[1:])
    assert found.attrs["plan"].startswith("quadrature") and "standard_error" not in found
    for i, a in enumerate(several[:2]):
        for j, b in enumerate(several[1:]):
            pairs = (a, b), (a, a), (b, b)
            ab, aa, bb = (expected_products(*pair, tnsim.Gaussian()).sum() for pair in pairs)
            assert_close(found.similarity[i, j], ab / np.sqrt(aa * bb), scale=1.0, rtol=1e-12)
