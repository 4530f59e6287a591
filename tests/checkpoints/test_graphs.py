"""Layers out of the graph of a forward pass, beside the module itself, far outside of the usual inputs."""

import numpy as np
import pytest
from closeness import LARGEST, assert_close
from refusals import refused

import tnsim
from tnsim.models.arrays import numbers

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from tnsim.checkpoints import graphs  # noqa: E402
from tnsim.checkpoints.read_graphs import layers_of_graph  # noqa: E402

WIDTH = 4


class Net(nn.Module):
    """A function of a module with some parameters and buffers, and of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 2.0, 1.0]))

    def forward(self, x):
        return self.function(self, x)


def read(net, example, sequence=False):
    """The model of a module, by its graph in float64."""
    graph = graphs.graph_of(net, example)
    state = {name: tensor.detach() for name, tensor in graphs.state_of(net).items()}
    library = graphs.TorchLibrary(torch.zeros(1, dtype=torch.float64))
    positions = example.shape[1] if sequence else 1
    layers = layers_of_graph(graph, graph.arrays(state), example[:1], library, positions)
    return tnsim.Model([numbers(one.layer) for one in layers])


def assigned(m, x):
    y = m.a(x).clone()
    y[:, 0] = 0
    return m.b(y) * m.c(x)


def shared(m, x):
    return m.a(functional.relu(m.a(x)))


def carried(m, x):
    return m.b(functional.gelu(m.a(x))) + m.c(x)


VECTORS = {
    "fourth power": lambda m, x: m.b(m.a(x) ** 4),
    "assignment": assigned,
    "a layer used twice": shared,
    "mask": lambda m, x: m.b(functional.silu(m.a(x)) * m.mask),
    "masked product": lambda m, x: (m.a(x) * m.mask) * m.b(x),
    "narrow kink": lambda m, x: torch.where((x > 1) & (x < 1.01), torch.zeros_like(x), x),
    "wide clamp": lambda m, x: m.b(m.a(x).clamp(-40, 40)),
    "carried": carried,
    "residual": lambda m, x: x + m.b(functional.softplus(m.a(x))),
    "polynomial": lambda m, x: m.b(1 + m.a(x) - 0.5 * m.a(x) ** 3),
    "an offset for each unit": lambda m, x: m.b((torch.tanh(m.a(x)) + m.mask) * m.c(x)),
    "rolled": lambda m, x: m.a(x).roll(1, -1) * x.flip(-1),
}


@pytest.mark.crossing
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name, size):
    torch.manual_seed(0)
    net = Net(VECTORS[name]).double().eval()
    x = size * torch.randn(20, WIDTH, dtype=torch.float64)
    x[0] = torch.tensor([1.0, 1.005, 1.01, -40.0])
    with torch.no_grad():
        model = read(net, torch.zeros(1, WIDTH, dtype=torch.float64))
        expected = net(x).numpy()
    assert_close(model(x.numpy()), expected, scale=LARGEST, rtol=1e-12)


def attention(m, x, pattern):
    scores = m.a(x) @ m.b(x).mT
    return m.c((scores * pattern(x.shape[1])) @ x)


def window(n):
    return torch.ones(n, n, dtype=torch.float64).tril().triu(-7)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("length", [2, 3, 8])
@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda m, x: m.c(m.a(x) * m.b(x)), "Bilinear"),
        (lambda m, x: x + m.b(functional.relu(m.a(x))), "Residual"),
        (lambda m, x: attention(m, x, window), "Attention"),
        (lambda m, x: attention(m, x, lambda n: 1 / n), "Attention"),
    ],
)
def test_sequences(function, kind, length):
    torch.manual_seed(0)
    net = Net(function).double().eval()
    x = torch.randn(5, length, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        model = read(net, x, True)
        expected = net(x).numpy()
    assert type(model.layers[0]).__name__ == kind
    assert_close(model(x.numpy()), expected, scale=LARGEST, rtol=1e-12)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda m, x: attention(m, x, window), "masks or weighs the scores"),
        (lambda m, x: x + torch.arange(9.0)[:, None], "something else at each position"),
        (lambda m, x: m.a(x).cumsum(1), "several positions of a sequence together"),
    ],
)
def test_sequences_that_are_no_layers(function, words):
    with torch.no_grad(), refused(words, tnsim.UnsupportedLayer):
        read(Net(function).double(), torch.zeros(1, 9, WIDTH, dtype=torch.float64), True)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda m, x: torch.softmax(m.a(x), -1), "Net.* computes _softmax, which divides by"),
        (lambda m, x: m.a(x) / m.b(x), "computes div"),
        (lambda m, x: m.a(x) * m.b(x).max(), "computes max"),
        (lambda m, x: m.a(x) ** -1, "computes pow"),
        (lambda m, x: m.a(x) ** 0.5, "computes pow"),
        (lambda m, x: torch.where(x > 0, m.a(x), m.b(x)), "where"),
        (lambda m, x: m.a(x) if x.sum() > 0 else x, "it branches on"),
        (lambda m, x: x[:, x.argmax(-1)], "computes (argmax|index)"),
        (lambda m, x: m.a(x.float().double()), "rounds numbers"),
    ],
)
def test_what_is_no_layer_is_refused_by_name(function, words):
    with torch.no_grad(), refused(words, tnsim.UnsupportedLayer):
        read(Net(function).double(), torch.zeros(1, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.a(x) - m.a(x).mean(0),
        lambda m, x: m.a(x) / len(x),
        lambda m, x: m.a(x).roll(1, 0),
        lambda m, x: functional.relu(m.a(x)) * x.sum(),
        lambda m, x: (m.a(x) @ m.b(x).T) @ m.c(x),
    ],
)
def test_batches_are_no_part_of_a_function(function):
    net, example = Net(function).double(), torch.zeros(1, WIDTH, dtype=torch.float64)
    with torch.no_grad(), refused("the batch around it", tnsim.UnsupportedLayer):
        graphs.check_batches(net, graphs.graph_of(net, example), example)


def test_a_graph_reads_the_numbers_of_other_weights():
    torch.manual_seed(0)
    net = Net(lambda m, x: m.b(functional.relu(m.a(x)) * m.mask)).double()
    net.mask.fill_(1.0)
    example = torch.zeros(1, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        graph = graphs.graph_of(net, example)
        net.mask.copy_(torch.tensor([0.0, 1.0, 3.0, -1.0]))
        state = {name: tensor.detach() for name, tensor in graphs.state_of(net).items()}
        library = graphs.TorchLibrary(example)
        layers = layers_of_graph(graph, graph.arrays(state), example, library)
        x = torch.randn(7, WIDTH, dtype=torch.float64)
        expected = net(x).numpy()
    model = tnsim.Model([numbers(one.layer) for one in layers])
    assert_close(model(x.numpy()), np.asarray(expected), scale=LARGEST, rtol=1e-12)
