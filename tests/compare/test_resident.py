"""What is kept of models between calls: made once, never stale, gone with the model."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import compiled
from closeness import assert_close
from refusals import refused

import tnsim
from tnsim import Session, session, using
from tnsim.compare import by_plans, operands
from tnsim.engine.runtime import execution
from tnsim.models.arrays import is_fixed
from tnsim.problems import conditioning
from tnsim.problems.conditioning import amplification
from tnsim.problems.families import Sequences
from tnsim.sessions import WeakCache

pytestmark = pytest.mark.usefixtures("diagrams")


@pytest.fixture(autouse=True)
def own_session():
    with using(Session(tier=session().tier)) as own:
        yield own


def bilinear(rng, width=3, biases=False):
    shapes = (4, width), (4, width), (width, 4)
    if biases:
        shapes += (4,), (4,), (width,)
    return tnsim.Bilinear(*(rng.normal(size=shape) for shape in shapes))


def model_of(rng, depth=2, **kwargs):
    return tnsim.Model([bilinear(rng, **kwargs) for _ in range(depth)])


# --- models never change ---------------------------------------------------------------------


@pytest.mark.parametrize("give", [np.asarray, np.ndarray.view, lambda x: x[:, ::-1][:, ::-1]])
def test_what_becomes_of_an_array_does_not_change_a_model(rng, give):
    weight = rng.normal(size=(3, 3))
    model = tnsim.Model([tnsim.Linear(give(weight))])
    other = tnsim.Model([tnsim.Linear(rng.normal(size=(3, 3)))])
    before = tnsim.similarity(model, other)
    weight *= rng.normal(size=(3, 3))
    assert tnsim.similarity(model, other) == before
    assert not np.array_equal(model.layers[0].weight, weight)
    with pytest.raises(ValueError, match="read-only"):
        model.layers[0].weight[0, 0] = 1.0


def test_an_array_that_nobody_can_write_to_is_not_copied(rng):
    weight = rng.normal(size=(3, 3))
    weight.flags.writeable = False
    assert tnsim.Linear(weight).weight is weight
    of_jax = jnp.ones((3, 3), device=jax.devices("cpu")[0])
    assert tnsim.Linear(of_jax).weight is of_jax
    assert is_fixed(np.asarray(of_jax)) and is_fixed(np.frombuffer(bytes(8)))
    assert not is_fixed(np.frombuffer(bytearray(8)))


def test_weights_of_torch_are_copied():
    torch = pytest.importorskip("torch")
    weight = torch.eye(2)
    model = tnsim.Model([tnsim.Linear(weight)])
    weight.zero_()
    assert np.array_equal(model.layers[0].weight, np.eye(2))


def test_weights_of_torch_that_are_trained_are_kept_and_read_by_no_plain_verb():
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.eye(2))
    model = tnsim.Model([tnsim.Linear(parameter)])
    assert model.layers[0].weight is parameter
    with refused("that require grad", tnsim.TnsimError):
        tnsim.similarity(model, model)


def test_a_model_rebuilt_around_arrays_that_may_change_is_read_anew(rng, own_session):
    a, other = model_of(rng), model_of(rng)
    loose = jax.tree.map(np.array, a)  # unflattening checks and copies nothing
    assert not operands.is_constant(loose)
    assert float(tnsim.similarity(loose, a)) == 1.0
    loose.layers[0].left[:] = rng.normal(size=(4, 3))
    again = tnsim.Model(tnsim.Bilinear(x.left, x.right, x.down) for x in loose.layers)
    assert tnsim.similarity(loose, other) == tnsim.similarity(again, other)


# --- made once -------------------------------------------------------------------------------


def test_a_model_is_laid_out_once_for_each_dtype(rng, monkeypatch):
    counted = []
    weights = Sequences.weights

    def counting(self, side, model):
        counted.append(model)
        return weights(self, side, model)

    monkeypatch.setattr(Sequences, "weights", counting)
    a, b, c = (model_of(rng) for _ in range(3))
    tree = tnsim.TreeSymmetric()
    for _ in range(2):
        tnsim.similarity(a, b, tree)
        tnsim.similarity(b, c, tree)  # on the other side
        tnsim.similarity(c, c, tree)  # alone
        tnsim.inner(c, a, tree)
    assert len(counted) == 3
    tnsim.similarity(a, b, tree, dtype="float32")
    assert len(counted) == 5


def test_the_conditioning_of_a_model_is_measured_once(rng, monkeypatch):
    counted = []

    def counting(model, metric):
        counted.append(model)
        return amplification(model, metric)

    monkeypatch.setattr(conditioning, "amplification", counting)
    a, b, c = (model_of(rng) for _ in range(3))
    for other in (b, c):
        tnsim.similarity(a, other, tnsim.TreeSymmetric())
    tnsim.pairwise([a, b, c], tnsim.TreeSymmetric())
    assert len(counted) >= 3  # a model and the same model in another gauge, which is a new model
    assert len(counted) == len(set(map(id, counted)))


def test_a_metric_that_is_no_pytree_is_what_it_is_alone():
    class Own:
        name = "own"

    one, other = Own(), Own()
    assert operands.content(one) == operands.content(one) != operands.content(other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "biases"), [(tnsim.TreeSymmetric(), False), (tnsim.Gaussian(), True)]
)
@compiled
def test_two_calls_give_the_same_bits(rng, backend, metric, biases):
    a, b = (model_of(rng, biases=biases) for _ in range(2))
    first = tnsim.similarity(a, b, metric), tnsim.log_inner(a, b, metric)
    for _ in range(2):
        assert (tnsim.similarity(a, b, metric), tnsim.log_inner(a, b, metric)) == first
    session().clear()
    assert (tnsim.similarity(a, b, metric), tnsim.log_inner(a, b, metric)) == first


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("slices", [False, True])
@compiled
def test_one_program_gives_what_stages_give(rng, backend, monkeypatch, slices):
    a, b = (model_of(rng, biases=True) for _ in range(2))
    verb = tnsim.slices if slices else tnsim.similarity
    found = []
    for longest in (1000, -1):
        for together in (True, False):
            monkeypatch.setattr(execution, "LONGEST", longest)
            monkeypatch.setattr(by_plans, "runs_together", lambda *args, t=together: t)
            found.append(verb(a, b))
    for other in found[1:]:
        assert_close(other, found[0], rtol=1e-12)


# --- and let go ------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_was_made_of_a_model_goes_with_it(rng, own_session):
    tnsim.similarity(model_of(rng), model_of(rng))
    gc.collect()
    of_plans = len(own_session.belongings)  # of programs, which other models use as well
    a, b = model_of(rng), model_of(rng)
    tnsim.similarity(a, b)
    family = Sequences.of(a, b, tnsim.TreeSymmetric())
    placed = operands.placed_weights(family, "A", a, "float64", "interpret")
    arrays = [weakref.ref(array) for array in placed.values()]
    assert len(own_session.belongings) > of_plans + 2 and own_session.belongings.held > 0
    del a, placed
    gc.collect()
    assert not any(array() for array in arrays)
    del b
    gc.collect()
    assert len(own_session.belongings) == of_plans and own_session.belongings.held == 0


def test_clear_empties_the_entries_of_models(rng, own_session):
    a, b = model_of(rng), model_of(rng)
    before = tnsim.similarity(a, b)
    session().clear()
    assert len(own_session.belongings) == own_session.belongings.held == 0
    assert tnsim.similarity(a, b) == before


def test_arrays_of_models_not_used_for_longest_go_first(rng):
    models = [model_of(rng) for _ in range(4)]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(models[0]))
    with using(Session(device_bytes=5 * size)) as small:
        for model in models[1:]:
            tnsim.similarity(models[0], model, tnsim.TreeSymmetric())
            assert small.belongings.held <= 5 * size
        assert models[0] in small.belongings


def test_what_is_kept_gives_way_to_a_plan_that_needs_the_memory(rng, own_session, monkeypatch):
    a, b = model_of(rng), model_of(rng)
    expected = tnsim.similarity(a, b)
    held = own_session.belongings.held
    assert held > 0
    from tnsim import Budget

    def room(self, program_bytes, wanted=0.0):
        return 2.0**30 - 2.0**31 * (own_session.belongings.held > 0)

    monkeypatch.setattr(Budget, "room", room)
    assert tnsim.similarity(a, b) == expected


@pytest.mark.slow
def test_nothing_traced_is_kept(rng, own_session):
    a, b = model_of(rng), model_of(rng)
    with jax.enable_x64(True):
        gradient = jax.grad(lambda model: tnsim.inner(model, b, tnsim.TreeSymmetric()))(a)
    kept = [entry.values.values() for entry in own_session.belongings._entries.values()]
    leaves = jax.tree.leaves([list(values) for values in kept])
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    assert np.isfinite(gradient.layers[0].left).all()


def test_threads_share_what_is_made_of_an_object():
    class Weight:
        pass

    kept, weights = WeakCache(limit=5), [Weight() for _ in range(8)]
    together, found = threading.Barrier(6), []

    def ask(_):
        together.wait()
        for _ in range(100):
            for weight in weights:
                found.append(kept.get(weight, "key", object, lambda value: 1.0))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(6)))
    assert len(found) == 4800 and kept.held <= 5


def test_values_dropped_while_one_of_them_is_made_again_are_not_held_uncounted():
    class Weight:
        pass

    kept, weights = WeakCache(limit=2), [Weight() for _ in range(4)]

    def one(value):
        return 1.0

    def make():
        # What other threads may do meanwhile: make the same value, and others that push it out.
        for weight in weights[:3]:
            kept.get(weight, "key", object, one)
        assert weights[0] not in kept
        return object()

    kept.get(weights[0], "key", make, one)
    assert weights[0] in kept and kept.held <= 2
    kept.get(weights[3], "key", object, one)
    assert kept.held <= 2
