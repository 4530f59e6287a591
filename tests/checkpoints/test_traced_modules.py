"""Polynomial modules of any form, read off the operations of their forward pass."""

import logging
import math
import re
from functools import partial

import jax
import numpy as np
import pytest
from closeness import LARGEST, assert_close
from refusals import refused

import tnsim

torch = pytest.importorskip("torch")
from module_cases import SEQUENCES, Module, assert_same  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn import functional  # noqa: E402

from tnsim.checkpoints import graphs  # noqa: E402


def linear(d_in=4, d_out=4):
    return nn.Linear(d_in, d_out)


def cp(m, x):
    return ((x @ m.a) * (x @ m.b)) @ m.c


def pi_net(m, x):
    state = m.a(x)
    for map_of in (m.b, m.c):
        state = map_of(x) * state + state
    return m.d(state)


FACTORS = {"a": (4, 6), "b": (4, 6), "c": (6, 3)}
MAPS = {name: linear() for name in "abc"}
WIDE = {"a": linear(4, 6), "b": linear(4, 6), "c": linear(4, 6), "d": linear(6, 3)}

POLYNOMIALS = {
    "cp": (cp, FACTORS, "rank 6"),
    "cp by einsum": (
        lambda m, x: torch.einsum("bi,ir,bj,jr,ro->bo", x, m.a, x, m.b, m.c),
        FACTORS,
        "rank 6",
    ),
    "whole tensor": (
        lambda m, x: torch.einsum("oij,bi,bj->bo", m.w, x, x),
        {"w": (3, 4, 4)},
        "rank 12",
    ),
    "nn.Bilinear": (lambda m, x: m.w(x, x), {"w": nn.Bilinear(4, 4, 3)}, "Bilinear"),
    "added to itself": (
        lambda m, x: (lambda y: m.b(torch.add(y, y, alpha=2)) * m.c(y - y + x))(m.a(x)),
        MAPS,
        "degree 2",
    ),
    "nn.Bilinear of products": (
        lambda m, x: m.w(m.a(x) * m.b(x), m.c(x)),
        {**MAPS, "w": nn.Bilinear(4, 4, 3)},
        "Bilinear.*Bilinear",
    ),
    "three factors": (lambda m, x: m.d(m.a(x) * m.b(x) * m.c(x)), WIDE, "Multilinear"),
    "cube": (lambda m, x: m.d(m.a(x) ** 3), WIDE, "Multilinear"),
    "quadratic activation": (lambda m, x: m.d(1 + 0.5 * m.a(x) + 0.1 * m.a(x) ** 2), WIDE, "Bilinear"),
    "parallel": (lambda m, x: m.a(x) * m.b(x) + m.c(x) * x, MAPS, "rank 8"),
    "a factor": (lambda m, x: torch.div(m.a(x) * m.b(x), 64, rounding_mode=None), MAPS, "Bilinear"),
    "residual": (lambda m, x: 2 * x + m.a(x) * m.b(x), MAPS, "Residual.*skip=2"),
    "two residuals": (
        lambda m, x: (lambda y: y + m.c(y) * m.a(y))(x + m.a(x) * m.b(x)),
        MAPS,
        "Residual.*Residual",
    ),
    "mixed degrees": (lambda m, x: m.c((m.a(x) * m.b(x)) * m.a(x) + x), MAPS, "Multilinear"),
    "sum times sum": (lambda m, x: (m.a(x) * x + x) * (m.b(x) * x - x), MAPS, "degree 4"),
    "pi-net": (pi_net, WIDE, "Bilinear"),
    "affine": (lambda m, x: m.b(m.a(x) - 3)[:, [2, 0]].flip(1), MAPS, "degree 1"),
    "pieces": (lambda m, x: torch.cat([part * part for part in m.a(x).split([1, 3], 1)], 1), MAPS, "Bilinear"),
    "places of an array": (
        lambda m, x: torch.zeros(len(x), 5, dtype=x.dtype).index_copy(1, torch.tensor([0, 2, 4]), m.a(x)) ** 2,
        {"a": nn.Linear(4, 3)},
        "Bilinear",
    ),
    "wide pieces": (
        lambda m, x: (lambda p, q: m.d(p * q + p))(*torch.cat([m.a(x), m.b(x)], 1).chunk(2, 1)),
        WIDE,
        "Bilinear",
    ),
    "GPT-2's Conv1D": (
        lambda m, x: torch.addmm(m.b, x, m.a) * torch.addmm(m.b, x, m.a, alpha=3, beta=2),
        {"a": (4, 3), "b": (3,)},
        "Bilinear",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", POLYNOMIALS)
def test_the_model_computes_what_the_module_computes(name, rng):
    forward, parts, description = POLYNOMIALS[name]
    module = Module(forward, **parts).double()
    model = tnsim.from_module(module, inputs=torch.zeros(8, 4))
    x = rng.normal(size=(5, 4))
    assert_same(model, module, x, rtol=1e-11)
    assert re.search(description, repr(model)), model


def test_what_is_tried_in_vain_is_not_reported(monkeypatch):
    """PyTorch reports operations that take no symbol, with a trace of its own."""
    said = []
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handle", said.append)
    forward, parts, _ = POLYNOMIALS["nn.Bilinear"]
    tnsim.from_module(Module(forward, **parts))
    assert not said


def test_readings_add_nothing_to_caches_of_torch():
    """Symbols of a reading are new in each, so what is kept for them would grow for ever."""
    forward, parts, _ = POLYNOMIALS["nn.Bilinear"]
    misses = []
    for _ in range(3):
        tnsim.from_module(Module(forward, **parts))
        misses.append(FakeTensorMode.cache_info().misses)
    assert misses[1] == misses[2]


class Convolutional(nn.Module):
    """A bilinear convolution on images of a channel, with normalised inputs."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Conv2d(1, 3, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(3, momentum=1.0)  # which is no flag of training
        self.pool, self.out = nn.AvgPool2d(2), nn.Linear(12, 5)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, images):
        x = (images - 0.13) / 0.3
        return self.out(self.pool(self.norm(self.left(x) * self.right(x))).flatten(1))


def test_images(rng, capfd):
    module = Convolutional().double().eval()
    model = tnsim.from_module(module, inputs=torch.zeros(2, 1, 4, 4))
    assert "Warning" not in capfd.readouterr().err  # as of PyTorch, of batch norm row by row
    x = rng.normal(size=(6, 1, 4, 4))
    assert_same(model, module, x, rtol=1e-11)
    with refused(
        r"left: Conv2d; right: Conv2d; .*, of which .* give inputs=.*from_module\(net, inputs=x",
        tnsim.UnsupportedLayer,
    ):
        tnsim.from_module(module)


def test_parameters_alone_say_how_wide_inputs_are():
    assert tnsim.from_module(Module(cp, **FACTORS)).d_in == 4
    (attention,) = SEQUENCES["heads of parameters, added"].modules()
    assert tnsim.from_module(attention, n_ctx=3).d_in == 2


def test_unused_modules_are_no_obstacle():
    module = Module(
        lambda m, x: m.a(x) * m.b(x), **MAPS, loss=nn.CrossEntropyLoss(), none=nn.ModuleList()
    )
    assert tnsim.from_module(module).degree == 2


def test_convolutions_beyond_a_matrix_say_their_size():
    """The refusal asks for smaller images, not for the inputs that were given."""
    images = torch.randn(1, 3, 64, 64)
    net = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(262144, 1)
    )
    with refused(
        r"262,144 x 12,288 numbers, 24\.0 GiB.* 10,922 rows .*smaller images, or .*Empirical\(images\)$",
        tnsim.TooLarge,
    ):
        tnsim.from_module(net, inputs=images)


def of_patches(pixels, patch):
    """A bilinear convolution of patches that do not overlap, with average pooling."""
    left, right = (nn.Conv2d(3, 2, patch, stride=patch) for _ in range(2))
    pool, out = nn.AvgPool2d(2), nn.Linear(2 * (pixels // patch // 2) ** 2, 5)
    forward = lambda m, x: m.out(m.pool(m.left(x) * m.right(x)).flatten(1))  # noqa: E731
    return Module(forward, left=left, right=right, pool=pool, out=out).double().eval()


def inner_over_patches(one, two):
    """`E<one(x), two(x)>` over standard normal pixels, patch by patch.

    With u_c = (f_c x + a_c)(g_c x + b_c) on each patch, patches are independent, and Isserlis'
    theorem gives the mean of u_c and the covariance of u_c and u'_c' from dot products of filters.
    """
    arrays = []
    for net in (one, two):
        state = {name: value.numpy() for name, value in net.state_dict().items()}
        f, g = (state[f"{name}.weight"].reshape(2, -1) for name in ("left", "right"))
        a, b = state["left.bias"], state["right.bias"]
        side = round((state["out.weight"].shape[1] // 2) ** 0.5)
        down = state["out.weight"].reshape(-1, 2, side, side) / 4
        down = down.repeat(2, axis=2).repeat(2, axis=3)
        means = (f * g).sum(1) + a * b
        arrays.append((f, g, a, b, down, state["out.bias"] + np.einsum("ocij,c->o", down, means)))
    (f, g, a, b, down, mean), (k, m, c, d, low, other) = arrays
    covariance = (f @ k.T) * (g @ m.T) + (f @ m.T) * (g @ k.T)
    covariance += np.outer(a, c) * (g @ m.T) + np.outer(a, d) * (g @ k.T)
    covariance += np.outer(b, c) * (f @ m.T) + np.outer(b, d) * (f @ k.T)
    return mean @ other + np.einsum("ocij,oeij,ce->", down, low, covariance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pixels", "patch"), [(128, 32), pytest.param(224, 112, marks=pytest.mark.full)]
)
def test_images_of_many_pixels(pixels, patch):
    """An identity of inputs x inputs would take 18 GiB for 128 x 128 pixels, 169 for 224 x 224."""
    nets = [of_patches(pixels, patch) for _ in range(2)]
    models = [tnsim.from_module(net, inputs=torch.zeros(1, 3, pixels, pixels)) for net in nets]
    assert models[0].d_in == 3 * pixels**2
    wanted = [[inner_over_patches(one, two) for two in nets] for one in nets]
    cosine = wanted[0][1] / (wanted[0][0] * wanted[1][1]) ** 0.5
    assert_close(tnsim.similarity(*models), cosine, scale=1.0)


def test_what_is_wide_on_the_way_alone_is_no_matrix(rng):
    """A convolution with 131,072 outputs and a linear readout are a matrix of a row."""
    net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.Flatten(), nn.Linear(131072, 1))
    net = net.double().eval()
    model = tnsim.from_module(net, inputs=torch.zeros(1, 3, 64, 64))
    x = rng.normal(size=(2, 3, 64, 64))
    assert_same(model, net, x, rtol=1e-11)


@pytest.mark.slow
def test_images_keep_their_residual_connection(rng):
    """That a map of 49,152 numbers is half the identity is seen without its matrix."""
    parts = {"a": (49152, 2), "b": (49152, 2), "c": (2, 49152)}
    net = Module(lambda m, x: 0.5 * x + cp(m, x.flatten(1)).reshape(x.shape), **parts).double()
    model = tnsim.from_module(net, inputs=torch.zeros(1, 3, 128, 128))
    assert isinstance(model.layers[0], tnsim.Residual) and model.layers[0].skip == 0.5
    x = rng.normal(size=(2, 3, 128, 128)) / 100
    assert_same(model, net, x, rtol=1e-11)


class WrittenOut(nn.Module):
    """GELU by tanh as a class of its own, as transformers have it."""

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def test_activations_that_are_written_out(rng):
    """An MLP block of GPT-2, whose layers are no `nn.Linear`, is an exact model of one layer."""
    parts = {"a": (4, 9), "b": (9,), "c": (9, 4), "act": WrittenOut()}
    module = Module(lambda m, x: m.act(torch.addmm(m.b, x, m.a)) @ m.c, **parts).double()
    model = tnsim.from_module(module)
    assert "gelu_tanh" in repr(model)
    x = 3 * rng.normal(size=(5, 4))
    assert_same(model, module, x, rtol=1e-11)


WAYS = {  # to write an activation, by the layers that come of it
    "gelu_tanh": [
        lambda u: 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))),
        lambda u: 0.5 * u * (1 + torch.tanh(0.7978845608 * u * (1 + 0.044715 * u * u))),
        lambda u: u * torch.sigmoid(math.sqrt(8 / math.pi) * (u + 0.044715 * torch.pow(u, 3.0))),
        lambda u: functional.gelu(u, approximate="tanh"),
    ],
    "gelu": [
        lambda u: 0.5 * u * (1 + torch.erf(u / math.sqrt(2))),
        lambda u: u * (torch.erf(u * math.sqrt(0.5)) / 2 + 0.5),
        lambda u: 3 * functional.gelu(u) / 3,
    ],
    "silu": [
        lambda u: u * torch.sigmoid(u),
        lambda u: u * torch.sigmoid(1.702 * u),
        lambda u: u / (1 + torch.exp(-u)),
        lambda u: 0.5 * u * (1 + torch.tanh(0.5 * u)),
    ],
    "sigmoid": [lambda u: 1 / (1 + torch.exp(-u)), lambda u: u.exp() / (u.exp() + 1)],
    "tanh": [
        lambda u: 2 * torch.sigmoid(2 * u) - 1,
        lambda u: (torch.exp(u) - torch.exp(-u)) / (torch.exp(u) + torch.exp(-u)),
    ],
    "softplus": [
        lambda u: torch.log(1 + torch.exp(u)),
        lambda u: torch.log1p(torch.exp(2 * u)),
        lambda u: -functional.logsigmoid(-u),
        lambda u: torch.logaddexp(u, torch.zeros_like(u)),
        lambda u: torch.clamp(u, min=0) + torch.log1p(torch.exp(-u.abs())),
    ],
    "mish": [
        functional.mish,
        lambda u: u * torch.tanh(functional.softplus(u)),
        lambda u: u * torch.tanh(torch.log1p(torch.exp(u))),
    ],
    "tanhshrink": [
        functional.tanhshrink,
        lambda u: u - torch.tanh(u),
        lambda u: 2 * (torch.tanh(u) - u),
        lambda u: u + 1 - 2 * torch.sigmoid(2 * u),
    ],
    "gelu + 1.0 u": [lambda u: u + functional.gelu(u), lambda u: -2 * functional.gelu(u) - 2 * u],
    "tanh - 0.25 u": [lambda u: torch.tanh(2 * u + 1) - u / 2],
    "sin": [torch.sin, torch.cos],
    "erf": [torch.erf, lambda u: 1 - 2 * torch.erf(3 * u + 1)],
    "relu": [
        lambda u: torch.clamp(u, min=0),
        lambda u: torch.maximum(u, torch.tensor(0.0)),
        lambda u: torch.max(u, torch.zeros_like(u)),
        lambda u: torch.where(u <= 0, 0.0, u),
        lambda u: torch.where(u >= 0, u, torch.zeros_like(u)),
        lambda u: (u + u.abs()) / 2,
        lambda u: u * (u > 0).float(),
        lambda u: functional.relu(2 * functional.relu(u - 0.5)),
    ],
    "relu2": [
        lambda u: torch.relu(u) ** 2,
        lambda u: functional.relu(u).square(),
        lambda u: functional.relu(u) * functional.relu(3 * u),
    ],
    "relu6": [lambda u: u.clamp(0, 6), functional.hardsigmoid],
    "hardtanh": [lambda u: u.clamp(-2, 2)],
    "hardswish": [lambda u: u * functional.relu6(u + 3) / 6],
    "abs": [torch.abs, lambda u: functional.relu(u) + functional.relu(-u)],
    "leaky_relu": [
        lambda u: torch.where(u > 0, u, 0.01 * u),
        lambda u: torch.max(u, 0.01 * u),
        lambda u: functional.relu(u) - 0.01 * functional.relu(-u),
    ],
    "elu": [
        lambda u: torch.where(u > 0, u, torch.exp(u) - 1),
        lambda u: functional.celu(u, 0.5),
    ],
    "elu(1.6732632423543772)": [functional.selu],
    "jump_relu(1.0)": [lambda u: u * (u > 0.5), lambda u: torch.where(u > 2, u, 0.0)],
    "piecewise": [functional.softshrink],
    "piecewise, of powers": [
        lambda u: torch.where(u > 1, u**2, torch.where(u > -1, u, -torch.ones_like(u))),
    ],
}


class Ways(nn.Module):
    """Blocks of one input beside each other, a block for each function."""

    def __init__(self, functions, gated):
        super().__init__()
        self.functions, self.gated = functions, gated
        for name in ("rows", "up"):
            setattr(self, name, nn.Parameter(2 * torch.randn(len(functions), 6, 4)))

    def forward(self, x):
        results = []
        for function, rows, up in zip(self.functions, self.rows, self.up, strict=True):
            hidden = function(x @ rows.T)
            results.append(hidden * (x @ up.T) if self.gated else hidden)
        return torch.cat(results, -1)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_write_an_activation_is_the_activation(name):
    """Forms are recognised by algebra, so that the model is the module to rounding."""
    module = Ways(WAYS[name], gated=False).double()
    model = tnsim.from_module(module, inputs=torch.zeros(3, 4))
    assert [layer.activation.name for layer in model.layers] == [name.partition(",")[0]]
    assert_same(model, module, rtol=1e-10)


def test_constants_count_to_their_last_digit():
    """0.0447 in the place of 0.044715 is another function, though no plot would show it."""

    def nearly(u):
        return 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.0447 * u**3)))

    module = Ways([nearly], gated=False).double()
    model = tnsim.from_module(module, inputs=torch.zeros(3, 4))
    assert "gelu_tanh" not in repr(model)  # a cubic layer, and a gate by tanh
    assert_same(model, module)


@pytest.mark.slow
def test_constants_that_were_rounded_to_float32():
    module = Ways([lambda u: 0.5 * u * (1 + torch.erf(u * root))], gated=False).double()
    root = torch.tensor(0.5, dtype=torch.float32).sqrt()
    (layer,) = tnsim.from_module(module, inputs=torch.zeros(3, 4)).layers
    assert layer.activation.name == "gelu"


def test_gates_that_are_written_out():
    module = Ways([*WAYS["silu"], functional.silu], gated=True).double()
    model = tnsim.from_module(module, inputs=torch.zeros(3, 4))
    (layer,) = model.layers
    assert (layer.activation.name, layer.rank) == ("silu", 30)
    assert_same(model, module)


def test_outputs_that_do_not_say_which_counts_are_refused():
    module = Module(lambda m, x: {"first": m.a(x), "second": m.b(x)}, **MAPS)
    with refused(r"found first, second: choose one, as by output="):
        tnsim.from_module(module)


POWER = 2


def changed_by_hand(m, x):
    """Two factors, of a scale in an attribute, in a buffer and behind a name of this file."""
    scale = m.scale if m.training else m.scale + m.shift
    return ((x @ m.a) ** POWER * SETTINGS["scale"] * scale) @ m.c


SETTINGS = {"scale": 1.0}


def changeable():
    module = Module(changed_by_hand, a=(4, 6), c=(6, 3)).double()
    module.scale = 0.5
    module.register_buffer("shift", torch.tensor(0.25, dtype=torch.float64))
    return module.eval()


CHANGES = {
    "nothing": lambda m, _: None,
    "weights": lambda m, _: m.a.data.add_(1),
    "a buffer": lambda m, _: m.shift.add_(torch.rand(6, 1)[0, 0]),
    "an attribute": lambda m, _: setattr(m, "scale", -0.25 + 1e-7),
    "a name": lambda m, patch: patch.setitem(globals(), "POWER", 3),
    "what no structure shows": lambda m, patch: patch.setitem(SETTINGS, "scale", 1 + 1e-9),
    "code": lambda m, _: setattr(m, "_forward", lambda m, x: (x @ m.a) ** 2 @ m.c),
    "a method": lambda m, patch: patch.setattr(Module, "forward", lambda m, x: (x @ m.a) @ m.c),
    "shapes": lambda m, _: setattr(m, "a", nn.Parameter(torch.ones(5, 6).double())),
}


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("name", CHANGES)
def test_no_operation_outlives_what_it_was_read_from(name, monkeypatch):
    module = changeable()
    tnsim.torch.similarity(module, tnsim.from_module(module))
    CHANGES[name](module, monkeypatch)
    model = tnsim.from_module(module)
    assert_close(tnsim.torch.similarity(module.eval(), model).item(), 1.0)
    x = np.random.default_rng(0).normal(size=(5, model.d_in))
    evaluated = module.eval()(torch.as_tensor(x)).detach().numpy()
    assert_close(model(x), evaluated, scale=LARGEST)


def test_no_operation_outlives_the_mode():
    """What is remembered of a module says nothing of another mode, in which it is another function."""
    module = changeable()
    model = tnsim.from_module(module)
    with refused("in training mode, in which it computes something else"):
        tnsim.from_module(module.train())
    assert_same(tnsim.from_module(module.eval()), module)
    assert_close(tnsim.similarity(model, module), 1.0)


def test_files_and_steps_are_read_by_one_trace(monkeypatch, tmp_path):
    """A run of 100 small files took 40 ms a file for traces of one module, a training step 150."""
    traces, traced = [], graphs._traced
    monkeypatch.setattr(graphs, "_traced", lambda *given: traces.append(0) or traced(*given))
    modules = [changeable() for _ in range(3)]
    for n, module in enumerate(modules):
        torch.save(module.state_dict(), tmp_path / f"step_{n}.pt")
    counts = []
    for model, module in zip(tnsim.load(tmp_path, modules[0]), modules, strict=True):
        counts.append(len(traces))
        assert_same(model, module)
    for _ in range(3):
        modules[0].a.data.mul_(1.5)
        tnsim.torch.similarity(*modules[:2])
        counts.append(len(traces))
    assert counts[0] == counts[2] < counts[3] == counts[5]


def test_a_view_of_weights_is_no_part_of_files(tmp_path):
    module = Module(lambda m, x: x @ m.view, a=(4, 6)).double()
    module.view = module.a.data
    torch.save({"a": torch.ones(4, 6).double()}, tmp_path / "a.pt")
    assert tnsim.from_module(module).d_out == 6
    with refused("view is a view of a, which in copies", tnsim.UnsupportedLayer):
        tnsim.load(tmp_path / "a.pt", module)


def test_a_hook_is_refused_where_no_pruning_was_imported():
    net = nn.Linear(3, 2)
    net.register_forward_hook(lambda *given: None)
    with refused("a forward hook, which may change what is computed", tnsim.UnsupportedLayer):
        tnsim.from_module(net)


def test_what_is_no_view_of_weights_runs_with_those_of_files(tmp_path):
    """A spectral norm makes its weight before each call; sparse tensors have no single block."""
    x = np.eye(4)
    for n in range(2):
        net = (
            nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 2)).double().eval()
        )
        net.register_buffer("links", torch.eye(4).to_sparse(), persistent=False)
        torch.save(net.state_dict(), tmp_path / f"{n}.pt")
    files = [tmp_path / f"{n}.pt" for n in range(2)]
    assert tnsim.pairwise(files, tnsim.Empirical(x), dialect=net).similarity.shape == (2, 2)


@pytest.mark.slow
def test_the_first_linear_layer_stays_a_layer_where_it_is_narrow():
    module = nn.Sequential(nn.Linear(50, 3), Module(lambda m, x: m.a(x) * x, a=linear(3, 3)))
    model = tnsim.from_module(module, inputs=torch.zeros(2, 50))
    assert [type(layer).__name__ for layer in model.layers] == ["Linear", "Bilinear"]
    assert np.size(model.layers[0].weight) == 150


def coded(m, x, hidden):
    return hidden((x - m.centre) @ m.encoder + m.shift) @ m.decoder + m.centre


def threshold(m):
    return 0.1 + m.height.abs()


def jump_of(u, m):
    return u * (u > threshold(m)).to(u)


@pytest.mark.parametrize("second", [functional.silu, lambda u: u * torch.sigmoid(u)])
def test_an_activation_of_an_activation_is_two_layers(second):
    """Also where the second one is written out, and reads the first one twice."""

    class Twice(nn.Module):
        def forward(self, x):
            return second(functional.relu(x))

    model = tnsim.from_module(nn.Sequential(nn.Linear(3, 4), Twice()))
    assert [layer.activation.name for layer in model.layers[1:]] == ["relu", "silu"]


CODES = {"encoder": (4, 6), "decoder": (6, 4), "centre": (4,), "shift": (6,), "height": (6,)}
ACTIVATED = {  # functions of the hidden units of an autoencoder of plain parameters; what they are
    "relu": (lambda m, u: functional.relu(u), "relu"),
    "gelu": (lambda m, u: functional.gelu(u), "gelu"),
    "two ends": (lambda m, u: u.clamp(-2.0, 2.0), "hardtanh"),
    "jump": (lambda m, u: u * (u > threshold(m)), "jump_relu(1.0)"),
    "jump of relu": (lambda m, u: (u > threshold(m)) * functional.relu(u), "jump_relu(1.0)"),
    "jump by where": (lambda m, u: torch.where(u > threshold(m), u, 0.0), "jump_relu(1.0)"),
    "relu of jump": (lambda m, u: functional.relu(u * (u > threshold(m))), "jump_relu(1.0)"),
    "jump by the step of relu": (lambda m, u: jump_of(functional.relu(u), m), "jump_relu(1.0)"),
    "relu by a step": (lambda m, u: (u - m.height) * (u > m.height), "relu"),
    "step of relu": (lambda m, u: (functional.relu(u) > threshold(m)).double(), "step"),
    "equal thresholds": (lambda m, u: u * (u > 0.3 + 0 * m.height), "jump_relu(1.0)"),
    "glu": (lambda m, u: functional.silu(u) * (u - m.height), "silu"),
    "glu of a line": (lambda m, u: (u + functional.silu(u)) * (u - m.height), "silu + 1.0 u"),
    "one gate of all": (lambda m, u: functional.silu(u[:, :1]) * (u - m.height), "silu"),
}


@pytest.mark.sampled(quick=7)
@pytest.mark.parametrize("name", ACTIVATED)
def test_hidden_units_of_plain_parameters_have_their_activation(name):
    hidden, activation = ACTIVATED[name]
    module = Module(lambda m, x: coded(m, x, lambda u: hidden(m, u)), **CODES).double()
    model = tnsim.from_module(module, inputs=torch.zeros(3, 4))
    (layer,) = model.layers
    assert (type(layer), layer.activation.name, layer.rank) == (tnsim.Gated, activation, 6)
    assert_same(model, module)


@pytest.mark.parametrize(
    "hidden",
    [
        lambda m, u: (functional.relu(u) > m.height).double(),
        lambda m, u: functional.relu(m.height * functional.relu(u)),
        lambda m, u: functional.relu(functional.relu(u) - threshold(m)),
    ],
    ids=["a negative threshold", "a negative multiple", "a shift"],
)
def test_what_relu_does_not_leave_as_it_is_takes_a_layer_of_its_own(hidden):
    module = Module(lambda m, x: coded(m, x, lambda u: hidden(m, u)), **CODES).double()
    with torch.no_grad():
        module.height.copy_(torch.linspace(-0.5, 0.6, 6))
    model = tnsim.from_module(module, inputs=torch.zeros(3, 4))
    assert len(model.layers) > 1
    assert_same(model, module)


def test_a_step_of_a_norm_multiplies_the_norm_alone():
    module = Module(
        lambda m, x: (functional.rms_norm(x, (4,)) > m.height) * (x - m.height), height=(4,)
    )
    with refused("is multiplied by what it reads", tnsim.UnsupportedLayer):
        tnsim.from_module(module.double(), inputs=torch.zeros(3, 4))


def assert_exact(models, modules, step=0.1):
    """The inner product under N(0, I) of two dimensions is a trapezoidal sum of the modules' outputs.

    The sum is exact to exp(-2 pi y / step) for functions that are analytic within y.
    """
    x = np.arange(-9.0, 9.0, step)
    w = step * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    points = np.stack(np.meshgrid(x, x, indexing="ij"), -1).reshape(-1, 2)
    weights = np.outer(w, w).reshape(-1, 1)
    with torch.no_grad():
        first, second = (module(torch.as_tensor(points)).numpy() for module in modules)
    size = np.sqrt(np.sum(weights * first**2) * np.sum(weights * second**2))
    found = tnsim.inner(*models, tnsim.Gaussian())
    assert_close(found, np.sum(weights * first * second), scale=size, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("function", [torch.tanh, functional.logsigmoid])
def test_a_transcoder_with_a_linear_map_around(function, rng):
    """Compared exactly, with a hidden unit for each unit of the module and none for the map."""

    def skipped(m, x):
        return function(x @ m.encoder - 0.5) @ m.decoder + x @ m.around

    shapes = {"encoder": (2, 5), "decoder": (5, 3), "around": (2, 3)}
    modules = [Module(skipped, **shapes).double() for _ in range(2)]
    models = [tnsim.from_module(module, inputs=torch.zeros(3, 2)) for module in modules]
    assert models[0].layers[1].layer.rank == 5
    x = rng.normal(size=(50, 2))
    with torch.no_grad():
        assert_close(models[0](x), modules[0](torch.as_tensor(x)).numpy(), scale=LARGEST)
    assert_exact(models, modules)


def test_a_line_beside_an_activation_is_compared_exactly():
    """As a module that writes tanhshrink, and as a model of tnsim, beside quadrature."""
    modules = [
        nn.Sequential(nn.Linear(2, 5), nn.Tanhshrink(), nn.Linear(5, 3)).double(),
        nn.Sequential(nn.Linear(2, 4), nn.Mish(), nn.Linear(4, 3)).double(),
    ]
    models = [tnsim.from_module(module) for module in modules]
    assert_exact(models, modules)
    linear, _, last = models[0].layers
    assert models[0].layers[1].activation.name == "tanhshrink"
    same = tnsim.Model([linear, tnsim.Elementwise("tanhshrink"), last])
    assert_close(tnsim.similarity(models[0], same), 1.0, rtol=1e-12)


class Twice(nn.Module):
    def forward(self, x):
        return functional.gelu(functional.gelu(x))


@pytest.mark.slow
def test_an_activation_of_an_activation_is_an_own_activation():
    """The refusal says how both become a single one, which is exact."""
    modules = [nn.Sequential(nn.Linear(2, 5), Twice(), nn.Linear(5, 3)).double() for _ in range(2)]
    models = [tnsim.from_module(module) for module in modules]
    with refused(r"gelu reads every gelu alone.*layers=\{Class", tnsim.UnsupportedLayer):
        tnsim.inner(*models, tnsim.Gaussian(samples=0))
    gelu = partial(jax.nn.gelu, approximate=False)
    twice = tnsim.Activation(lambda u: gelu(gelu(u)), strip=1.0, name="twice")
    declared = {Twice: lambda module: tnsim.Elementwise(twice)}
    models = [tnsim.from_module(module, layers=declared) for module in modules]
    assert_exact(models, modules)
    # A layer between the activations mixes units.
    deeper = nn.Sequential(nn.Linear(2, 5), nn.GELU(), nn.Linear(5, 4), nn.GELU())
    with refused(r"found 2 in a model: use Empirical", tnsim.UnsupportedLayer):
        tnsim.inner(*[tnsim.from_module(deeper)] * 2, tnsim.Gaussian(samples=0))


def test_a_convolutional_network_of_one_hidden_layer(rng):
    layers = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 3)
    module = nn.Sequential(*layers).double()
    model = tnsim.from_module(module, inputs=torch.zeros(2, 1, 6, 6))
    convolution, layer, *_ = model.layers
    assert (convolution.d_out, layer.activation.name, layer.d_out) == (32, "relu", 32)
    x = rng.normal(size=(5, 1, 6, 6))
    assert_same(model, module, x)
    deeper = nn.Sequential(*layers[:3], nn.Flatten(), nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 3))
    found = tnsim.from_module(deeper, inputs=torch.zeros(2, 1, 6, 6))
    with refused(r"use Empirical\(inputs\)", tnsim.UnsupportedLayer):
        tnsim.similarity(found, found, tnsim.Gaussian(samples=0))


def top(u):
    values, places = u.topk(2)
    return torch.zeros_like(u).scatter(-1, places, values)


OWN = r"computes {}: these of a value make no activation.*tnsim\.Elementwise\(tnsim\.Activation\(.*Empirical"


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        (lambda m, u: top(u), r"computes topk, which compares hidden units with one another.*Empirical\(inputs\)"),
        (lambda m, u: u.softmax(-1), r"_softmax, which divides by a sum.*Empirical\(inputs\)"),
        (lambda m, u: functional.relu(u) + functional.gelu(u), "one layer computes gelu and relu"),
        (lambda m, u: torch.sin(u) / (1 + u**2), OWN.format("sin, pow, add and div")),
        (lambda m, u: torch.exp(-(u**2)), OWN.format("pow, neg and exp")),
        (lambda m, u: torch.atan(u), OWN.format("atan")),
        # A step multiplies what it is a step of, and nothing else.
        (lambda m, u: (u > m.height) * (u * u.flip(1)), "computes step, and keeps"),
        (lambda m, u: (u > m.height) * u.flip(1), "computes step, and keeps"),
        (
            lambda m, u: ((u > threshold(m)) + 1.0) * functional.relu(u),
            "one layer computes jump_relu.* and relu",
        ),
    ],
)  # fmt: skip
def test_hidden_units_that_no_layer_has_are_refused_by_name(hidden, words):
    module = Module(lambda m, x: coded(m, x, lambda u: hidden(m, u)), **CODES).double()
    with refused(words, tnsim.UnsupportedLayer):
        tnsim.from_module(module, inputs=torch.zeros(3, 4))


def root(square, **settings):
    return torch.rsqrt(torch.add(square, 1e-5, **settings))


@pytest.mark.parametrize(
    "factor",
    [lambda x: root((x**2).mean()), lambda x: root((x**2).mean(-1, keepdim=True), alpha=2)],
)
def test_norms_that_layers_do_not_have_are_refused(factor):
    net = Module(lambda m, x: m.b(m.a(x) * factor(m.a(x))), a=linear(), b=linear())
    with refused("rsqrt, which divides by a sum", tnsim.UnsupportedLayer):
        tnsim.from_module(net, norm_inputs=np.eye(4))


def test_a_factor_of_the_weights_is_no_norm(rng):
    def forward(m, x):
        weight = m.a.weight
        return x @ (weight * root((weight**2).mean(-1, keepdim=True))).T

    net = Module(forward, a=linear()).double()
    model, x = tnsim.from_module(net), rng.normal(size=(5, 4))
    assert_same(model, net, x, rtol=1e-12)
