"""A network recorded while it trains: numbers, pictures, loggers and the loops of others."""

import copy
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from closeness import assert_close
from refusals import refused

import tnsim

torch = pytest.importorskip("torch", reason="monitors watch modules of PyTorch")
from module_cases import gated  # noqa: E402

nn = torch.nn


def bilinear():
    """A bilinear layer with a readout."""
    return gated(3, 4, 2)


def trained(net, steps, monitor):
    """The states of a network at every step, which the monitor saw, and the numbers it gave."""
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    states, numbers = {}, {}
    for step in range(steps):
        states[step] = copy.deepcopy(net).eval()
        numbers[step] = monitor(step, net)
        optimiser.zero_grad()
        net(x).square().mean().backward()
        optimiser.step()
    return states, numbers


def test_a_monitor_says_what_it_watches():
    monitor = tnsim.torch.Monitor(every=2, reference=bilinear(), centred=True, by="module")
    said = "similarity to the first and the previous state, a reference, moves by 'module'"
    assert repr(monitor) == f"Monitor({said}; gaussian, centred, every 2 steps, 0 records)"


@pytest.mark.slow
@pytest.mark.parametrize("centred", [False, True])
def test_numbers_are_similarities_of_the_states(centred):
    net, goal = bilinear(), bilinear()
    monitor = tnsim.torch.Monitor(every=2, reference=goal, centred=centred)
    similarity = partial(tnsim.similarity, centred=centred)
    states, numbers = trained(net, 5, monitor)
    assert [step for step in numbers if numbers[step]] == [0, 2, 4]
    assert set(numbers[0]) == {"similarity/reference"}
    for step in (2, 4):
        now = states[step]
        for name, other in (("first", states[0]), ("previous", states[step - 2])):
            assert_close(numbers[step][f"similarity/{name}"], similarity(now, other))
        assert_close(numbers[step]["similarity/reference"], similarity(now, goal))
    assert monitor.history[-1] == {"step": 4, **numbers[4]}
    assert monitor.similarity.a.values.tolist() == [0, 2, 4]
    kept = [states[step] for step in (0, 2, 4)]
    assert_close(monitor.similarity.values, tnsim.pairwise(kept, centred=centred).similarity.values)
    assert monitor(4, net) == {}  # a step that is recorded
    assert all(parameter.requires_grad for parameter in net.parameters()) and net.training


@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda net: torch.jit.trace(net, torch.ones(2, 3))]
)
def test_programs_of_torchscript_are_monitored_on_inputs(make):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    program = make(copy.deepcopy(net))
    data = tnsim.Empirical(np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32))
    monitors = [tnsim.torch.Monitor(data, every=1, by="module") for _ in range(2)]
    for step in range(2):
        one, other = (m(step, kind) for m, kind in zip(monitors, (net, program), strict=True))
        assert one.keys() == other.keys() and len(one) == 4 * step
        assert_close(list(one.values()), list(other.values()), rtol=1e-6, limited_by="float32")
        with torch.no_grad():
            for weight in (*net[0].parameters(), *list(program.parameters())[:2]):
                weight.add_(0.1)
    assert all(weight.requires_grad for weight in program.parameters())


def test_the_parts_that_move_are_told():
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())
    for parameter in net[0].parameters():
        parameter.requires_grad_(False)
    x = np.random.default_rng(0).normal(size=(20, 3))
    monitor = tnsim.torch.Monitor(tnsim.Empirical(x), every=3, by="module")
    states, numbers = trained(net, 4, monitor)
    moved = {name: n for name, n in numbers[3].items() if name.startswith("moved/")}
    assert set(moved) == {"moved/0", "moved/3"}
    assert not any(name.startswith("moved/") for name in numbers[0])
    now = states[3].double()
    put_back = copy.deepcopy(now)
    put_back[3].load_state_dict(states[0][3].state_dict())
    with torch.no_grad():
        outputs, other = now(torch.as_tensor(x)), put_back(torch.as_tensor(x))
    assert moved["moved/0"] == 0.0
    assert_close(moved["moved/3"], float((outputs - other).norm() / outputs.norm()))
    # A network that stands still moves by none of them.
    still = monitor(6, states[3])
    assert [still[name] for name in moved] == [0.0, 0.0]


@pytest.mark.parametrize("by", [pytest.param("layer", marks=pytest.mark.slow), "module"])
def test_the_parts_of_models_that_move_are_told(by):
    net = bilinear()
    # Under a metric of weights the layers of the model move, and under inputs the modules do.
    monitor = tnsim.torch.Monitor(tnsim.Gaussian(samples=256), every=3, by=by)
    states, numbers = trained(net, 4, monitor)
    moved = {name: n for name, n in numbers[3].items() if name.startswith("moved/")}
    if by == "module":
        assert set(moved) == {"moved/left", "moved/right", "moved/down"}
        assert all(0 < n < 1 for n in moved.values())
        return
    change = tnsim.change(states[0], states[3], by="layer")
    norm = tnsim.inner(tnsim.from_module(states[3]), tnsim.from_module(states[3]))
    wanted = [(n / float(norm)) ** 0.5 for n in change.removed]
    assert_close(list(moved.values()), wanted)


def test_a_network_in_training_is_compared_as_in_evaluation():
    """Dropout draws anew and batch norm takes the batch while a network trains."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))
    states, numbers = trained(net, 2, tnsim.torch.Monitor(every=1))
    assert_close(numbers[1]["similarity/first"], tnsim.similarity(states[1], states[0]))
    assert net.training and all(one.requires_grad for one in net.parameters())


@pytest.mark.slow
def test_any_network_on_inputs_and_a_full_matrix():
    """Dropout is off in what is recorded; a full matrix loses every second of its models."""
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 2))
    metric = tnsim.Empirical(np.random.default_rng(0).normal(size=(50, 3)))
    monitor = tnsim.torch.Monitor(metric, every=1, matrix=4)
    states, numbers = trained(net, 7, monitor)
    assert monitor.similarity.a.values.tolist() == [0, 4, 6]
    kept = [states[step] for step in (0, 4, 6)]
    assert_close(
        monitor.similarity.values, tnsim.pairwise(kept, metric).similarity.values, rtol=1e-9
    )
    assert_close(numbers[6]["similarity/first"], tnsim.similarity(kept[2], kept[0], metric))
    assert net.training


class Writer:
    """A logger with the methods of a `SummaryWriter`."""

    def __init__(self):
        self.scalars, self.images = [], []

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def add_image(self, name, pixels, step, dataformats):
        self.images.append((name, pixels.shape, pixels.dtype, step, dataformats))


class Run:
    """A logger with the method of a wandb run."""

    def __init__(self):
        self.rows = []

    def log(self, numbers, step):
        self.rows.append((numbers, step))


@pytest.fixture
def wandb(monkeypatch):
    module = ModuleType("wandb")
    module.Image = lambda pixels: ("image", pixels.shape)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.mark.slow
def test_loggers_get_numbers_and_the_matrix(wandb):
    writer, run, rows = Writer(), Run(), []
    for log in (writer, run, lambda numbers, step: rows.append((numbers, step))):
        torch.manual_seed(0)
        _, numbers = trained(bilinear(), 2, tnsim.torch.Monitor(every=1, log=log))
    assert rows == [({}, 0), (numbers[1], 1)]
    assert set(numbers[1]) == {"similarity/first", "similarity/previous"}
    assert writer.scalars == [(name, value, 1) for name, value in numbers[1].items()]
    name, shape, dtype, step, order = writer.images[1]
    assert (name, shape[2], dtype, step, order) == ("similarity/matrix", 3, np.uint8, 1, "HWC")
    shown, step = run.rows[1]
    assert step == 1 and shown.pop("similarity/matrix")[0] == "image" and shown == numbers[1]
    with refused("has the method add_scalar or log, found int"):
        tnsim.torch.Monitor(log=3)
    for settings in ({"every": 0}, {"every": 1.5}, {"every": "10"}, {"matrix": 2.5}):
        with refused("give whole numbers, at least 1 and 2"):
            tnsim.torch.Monitor(**settings)
    with refused(r"^n_ctx must be a positive integer"):
        tnsim.torch.Monitor(n_ctx=0)
    with refused(r"step must be a whole number, found 0\.5"):
        tnsim.torch.Monitor()(0.5, bilinear())


def test_steps_are_numbers_whatever_holds_them():
    monitor = tnsim.torch.Monitor(every=1)
    for step in (0, np.int64(1), torch.tensor(2)):
        monitor(step, bilinear())
    assert monitor.similarity.a.values.tolist() == [0, 1, 2]


def test_the_loops_of_others(monkeypatch, wandb):
    """The adaptors are callbacks of the class that each loop asks for, made when they are asked for."""
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with refused("run  pip install lightning", tnsim.errors.MissingExtra):
        tnsim.torch.Monitor().lightning()
    with refused("run  pip install transformers", tnsim.errors.MissingExtra):
        tnsim.torch.Monitor().trainer()
    for name, base in (("lightning.pytorch", "Callback"), ("transformers", "TrainerCallback")):
        module = ModuleType(name)
        setattr(module, base, type(base, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    net, other = bilinear(), bilinear()
    writer, logged = Writer(), []
    logger = SimpleNamespace(
        experiment=writer, log_metrics=lambda numbers, step: logged.append((numbers, step))
    )
    callback = tnsim.torch.Monitor(every=2, reference=other).lightning()
    assert isinstance(callback, sys.modules["lightning.pytorch"].Callback)
    trainer = SimpleNamespace(global_step=0, loggers=[logger])
    callback.on_train_start(trainer, net)
    trainer.global_step = 1
    callback.on_train_batch_end(trainer, net, None, None, 0)
    trainer.global_step = 2
    callback.on_train_batch_end(trainer, net, None, None, 1)
    assert [step for _, step in logged] == [0, 2] and len(writer.images) == 2
    callback = tnsim.torch.Monitor(every=2).trainer()
    assert isinstance(callback, sys.modules["transformers"].TrainerCallback)
    state = SimpleNamespace(global_step=0, log_history=[])
    callback.on_train_begin(None, state, None, model=net)
    state.global_step = 2
    callback.on_step_end(None, state, None, model=net)
    assert [row["step"] for row in state.log_history] == [2]
    assert_close(state.log_history[0]["similarity/first"], 1.0, rtol=1e-12)


def deep():
    layers = (torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    return torch.nn.Sequential(*layers, torch.nn.Softmax(-1))


@pytest.mark.parametrize("centred", [False, True])
def test_networks_without_an_exact_product_are_estimated(centred):
    net, metric = deep(), tnsim.Gaussian(samples=1024)
    before = copy.deepcopy(net).eval()
    monitor = tnsim.torch.Monitor(metric, every=1, centred=centred)
    assert monitor(0, net) == {}
    with torch.no_grad():
        net[0].weight += 0.5
    found = monitor(1, net)["similarity/first"]
    assert_close(found, tnsim.similarity(before, net.eval(), metric, centred=centred), rtol=1e-12)
    assert 0 < found < 1
    first = tnsim.torch.similarity(before, net, metric, centred=centred)
    assert_close(first.item(), found, rtol=1e-6, limited_by="modules run in float32")
    first.backward()
    assert net[0].weight.grad.abs().sum() > 0


def test_a_run_that_diverged_is_called_so():
    net, monitor = bilinear(), tnsim.torch.Monitor(every=1)
    monitor(0, net)
    net.down.weight.data.fill_(torch.nan)
    with refused(r"^'down\.weight' has numbers .* NaN .* diverged"):
        monitor(1, net)


def test_networks_of_tokens_name_the_monitor_to_use():
    tokens = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Softmax(-1))
    with refused(r"tnsim.torch.Monitor\(tnsim.Empirical\(inputs\)\)", tnsim.TnsimError):
        tnsim.torch.Monitor()(0, tokens)
    monitor = tnsim.torch.Monitor(tnsim.Empirical(np.arange(5)[:, None]), every=1)
    monitor(0, tokens)
    assert_close(monitor(1, tokens)["similarity/first"], 1.0, rtol=1e-12)


def test_steps_that_go_back_leave_the_run_alone():
    monitor, net = tnsim.torch.Monitor(every=5), torch.nn.Linear(2, 2)
    assert monitor(10, net) == {} and monitor(10, net) == {}  # the first, and the same again
    with pytest.warns(tnsim.CaveatWarning, match="nothing is recorded before step 10.*another"):
        assert monitor(5, net) == {}
    assert monitor(15, net)["similarity/first"] == 1
    assert [record["step"] for record in monitor.history] == [10, 15]
