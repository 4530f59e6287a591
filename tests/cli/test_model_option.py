"""The code of a module in the place of a dialect, in every command that reads files."""

import json

import numpy as np
import pytest
from closeness import assert_close
from commands import command, refusal, told

import tnsim

torch = pytest.importorskip("torch")

CODE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.left, self.right = nn.Linear(4, width), nn.Linear(4, width)
        self.down = nn.Linear(width, 3)

    def forward(self, x):
        return self.down(self.left(x) * self.right(x)) + x[:, :3]


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.roll(self.embed(x[:, :2]), 0).sum(1) if x.shape[1] > 1 else self.embed(x[:, 0]))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x):
        return self.layers(x)


class Images(nn.Sequential):
    def __init__(self):
        layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.ReLU()
        super().__init__(*layers, nn.Flatten(), nn.Linear(8, 3))


class Pairs(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(6, 2), nn.Flatten(), nn.Linear(4, 3))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class Needs(nn.Module):
    def __init__(self, width):
        super().__init__()


def normed():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3))


def ready():
    return Net(7)


def broken():
    raise RuntimeError("no such data set")


def script():
    raise SystemExit


class Talks(Net):
    def forward(self, x):
        print("forward")
        return super().forward(x)


def talks():
    print("made")
    return Talks()


made, number, text = Net(), 3, lambda: "text"
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of two checkpoints of the code that lies beside them."""
    (tmp_path / "user_net.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("Net", "Deep", "Images", "Pairs", "Recurrent"):
        for n in range(2):
            torch.manual_seed(n)
            torch.save(net(name).state_dict(), tmp_path / f"{name}_{n}.pt")
    return tmp_path


def net(name="Net", *arguments):
    """A network of the code."""
    code: dict = {}
    exec(CODE, code)
    return code[name](*arguments)


def files(place, name="Net"):
    return [place / f"{name}_{n}.pt" for n in range(2)]


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("model", ["user_net.py:Net", "user_net:Net", "user_net.py:made"])
def test_the_number_is_that_of_python(place, model):
    a, b = (tnsim.load(file, net()) for file in files(place))
    said = told("similarity", *files(place), "--model", model)
    assert said["similarity"] == tnsim.similarity(a, b) and said["exact"]


def test_what_the_code_prints_is_not_among_json(place):
    done = command("inspect", files(place)[0], "--model", "user_net.py:talks", "--json")
    assert json.loads(done.stdout)["inputs"] == 4
    assert done.stderr.startswith("made\nforward\n")


@pytest.mark.slow
def test_every_command_reads_by_a_module(place):
    one, two = files(place)
    option = ("--model", "user_net.py:Net")
    models = [tnsim.load(file, net()) for file in (one, two)]
    assert "read by the graph of Net" in command("inspect", one, *option).stdout
    planned = told("plan", one, two, *option)
    assert planned["metric"] == "gaussian"
    for order in (("paths", one), ("paths", one, "--legs"), ("change", one, two)):
        assert told(*order, *option), order
    command("convert", one, "own.safetensors", *option)
    assert tnsim.similarity(tnsim.load("own.safetensors"), models[0]) == 1.0
    pytest.importorskip("xarray")
    out = ("--out", place / "run", "--json")
    found = json.loads(command("pairwise", one, two, *option, *out).stdout)
    assert len(found["similarity"]) == 2
    following = ("--out", place / "w", "--until", 2, "--follow", 0.05)
    ended = command("pairwise", one, two, *option, *following)
    assert "models 2" in ended.stdout


def test_a_module_runs_as_it_is_on_inputs(place, rng):
    """What no layers say is compared on inputs: two hidden layers of ReLU."""
    np.save(place / "x.npy", rng.normal(size=(20, 4)).astype(np.float32))
    option = ("--model", "user_net.py:Deep", "--metric", "empirical", "--inputs", "x.npy")
    one, two = files(place, "Deep")
    said = told("similarity", one, two, *option)
    outputs = []
    for file in (one, two):
        module = net("Deep").double()
        module.load_state_dict(torch.load(file))
        x = torch.as_tensor(np.load(place / "x.npy")).double()
        outputs.append(module(x).detach().numpy().ravel())
    x, y = outputs
    expected = x @ y / np.sqrt(x @ x * (y @ y))
    assert abs(said["similarity"] - expected) < 1e-5 and said["tier"] is None
    pytest.importorskip("xarray")
    out = ("--out", place / "run", "--json")
    assert len(json.loads(command("pairwise", one, two, *option, *out).stdout)["similarity"]) == 2
    said = "runs the module as it is, on --inputs, to which --n-ctx does not apply"
    refusal("similarity", one, two, *option, "--n-ctx", 3, said=said)


def test_a_convolutional_network_with_batch_norms_as_its_class_makes_it(place, rng):
    """No option asks for evaluation mode, and inputs of the metric need no example beside them."""
    np.save(place / "x.npy", rng.normal(size=(20, 1, 6, 6)))
    torch.save({"state": {}}, place / "optimizer.pt")  # beside the weights, as of `*.pt`
    run = (*files(place, "Images"), "optimizer.pt", "--model", "user_net.py:Images")
    said = told("change", *run, "--metric", "empirical", "--inputs", "x.npy")
    (found,) = said["shares"].values()
    assert list(found) == ["0", "1", "3", "6"] and abs(sum(found.values()) - 1) < 1e-3
    line = refusal("change", *run, said="--metric empirical --inputs x.npy")
    assert line.count("give inputs=") == 1
    torch.save({"model": net().state_dict(), "epoch": 3}, place / "other.pt")
    other = ("other.pt", "--model", "user_net.py:Images")
    refusal("inspect", *other, said="and has besides down.bias, down.weight")


def test_the_inputs_of_a_metric_say_what_a_module_takes(place):
    np.save(place / "x.npy", np.array([[0, 5], [1, 2], [4, 3]]))
    run = (*files(place, "Pairs"), "--model", "user_net.py:Pairs")
    said = told("change", *run, "--metric", "empirical", "--inputs", "x.npy")
    assert said["components"] == ["0", "2"]
    refusal("change", *run, said="no inputs were found that the module takes")


def test_a_recurrent_network_runs_at_the_length_that_is_asked_for(place):
    run = (*files(place, "Recurrent"), "--model", "user_net.py:Recurrent", "--samples", 32)
    refusal("similarity", *run, said="say how long they are, by n_ctx=")
    nets = [net("Recurrent") for _ in range(2)]
    for one, file in zip(nets, files(place, "Recurrent"), strict=True):
        one.load_state_dict(torch.load(file))
    run = (*run, "--n-ctx", 3)
    expected = tnsim.similarity(*nets, tnsim.Gaussian(samples=32), n_ctx=3)
    assert told("similarity", *run)["similarity"] == expected
    assert told("plan", *run)["facts"] == {"forward passes": 32}
    assert told("pairwise", *run, "--dry-run")["tiles"]["pairs"] == 3


def test_an_example_says_what_the_module_takes(place):
    torch.manual_seed(0)
    torch.save(net("Net", 9).state_dict(), place / "wide.pt")
    np.save(place / "x.npy", np.zeros((2, 4), np.float32))
    (place / "own.py").write_text("from user_net import Net\n\ndef wide():\n    return Net(9)\n")
    option = ("--model", "own.py:wide", "--example", "x.npy")
    said = told("inspect", "wide.pt", *option)
    assert said["inputs"] == 4


@pytest.mark.parametrize(
    "options, said",
    [
        (["--model", "net"], "give FILE.py:NAME or package.module:NAME"),
        (["--model", "none.py:Net"], "there is no such file of Python code"),
        (["--model", "no_such_module:Net"], "there is no module 'no_such_module' that Python"),
        (["--model", "user_net.py:Nett"], "there is no 'Nett' in it; there is Net"),
        (["--model", "user_net.py:number"], "no nn.Module, nor anything that makes one, found 3"),
        (["--model", "user_net.py:text"], "text() is a str, no nn.Module"),
        (["--model", "user_net.py:Needs"], "write a function without any that calls it"),
        (["--model", "user_net.py:broken"], "broken() raises RuntimeError: no such data set"),
        (["--model", "user_net.py:script"], "script() raises SystemExit"),
        (["--model", "user_net.py:ready"], "left.weight"),
        (["--model", "bad.py:Net"], "its code raises ZeroDivisionError"),
        (["--model", "exits.py:Net"], "its code raises SystemExit: 0"),
        (["--model", "user_net.py:Net", "--dialect", "x"], "both say what the files"),
        (["--example", "x.npy"], "--example is an example of the argument of a module"),
    ],
)
def test_what_is_no_module_is_one_line(place, options, said):
    (place / "bad.py").write_text("1 / 0\n")
    (place / "exits.py").write_text("raise SystemExit(0)\n")
    refusal("similarity", *files(place), *options, said=said)


@pytest.mark.slow
def test_a_module_that_is_no_model_is_estimated_on_normal_inputs(place):
    """A norm over vectors has no exact inner product; the command says that its number has none."""
    nets = [net("normed").eval() for _ in range(2)]
    for n, one in enumerate(nets):
        torch.save(one.state_dict(), f"step_{n}.pt")
    given = ["step_0.pt", "step_1.pt", "--model", "user_net.py:normed"]
    found = told("similarity", *given)
    assert_close(found["similarity"], tnsim.similarity(*nets), scale=1.0, rtol=1e-12)
    assert found["exact"] is False and found["inputs"] == 16_384
    assert "an estimate on 16,384 inputs, standard error" in command("similarity", *given).stdout
    said = command("pairwise", *given, "--out", "all").stdout
    assert "(estimates, with standard errors up to" in said
    assert "sampling: 16,384 forward passes" in command("plan", *given).stdout
