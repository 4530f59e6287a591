"""Gradients in PyTorch: against finite differences of the verbs without them; what is refused, by name."""

import copy
import functools
import itertools

import numpy as np
import pytest
from closeness import LARGEST, assert_close
from oracles import slope_of
from refusals import refused

import tnsim
import tnsim.models.model
from tnsim.compare.gradients import Form
from tnsim.metrics.protocol import Rule, product_rule

torch = pytest.importorskip("torch", reason="gradients in PyTorch need the torch extra")
from module_cases import Module  # noqa: E402
from torch import nn  # noqa: E402


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


class Block(nn.Module):
    """x + s D ((L x) * (R x)), one matrix for L and R, s learned."""

    def __init__(self, width=3, rank=4):
        super().__init__()
        self.both, self.down = nn.Linear(width, 2 * rank), nn.Linear(rank, width)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        left, right = self.both(x).chunk(2, dim=-1)
        return x + self.scale * self.down(left * right)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Linear(2, 3), Block()
        self.head = nn.Linear(3, 2, bias=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.head(self.block(self.embed(x)))


def bilinear(left, right, down, bias):
    return [tnsim.Bilinear(left, right, down, bias)]


def test_a_metric_by_its_name():
    net, goal = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    value = tnsim.torch.similarity(net, goal, "frobenius")
    assert value == tnsim.torch.similarity(net, goal, tnsim.Frobenius())
    monitor = tnsim.torch.Monitor("frobenius", every=1, reference=goal)
    assert_close(monitor(0, net)["similarity/reference"], value.item())


def residual(weight, scale, down):
    layer = tnsim.Residual(tnsim.Linear(weight), skip=1 - scale, scale=scale)
    return [layer, tnsim.Multilinear([np.eye(3, 2)] * 3, down)]


def attention(q, k, v, o):
    return tnsim.Model([tnsim.Attention(q, k, q, k, v, o, n_heads=1)], n_ctx=2)


def attention_twice(q, k, v, o):
    layer = tnsim.Attention(q, k, q, k, v, o, n_heads=1)
    return tnsim.Model([layer, layer], n_ctx=2)


def attention_with_biases(q, k, v, o, *biases):
    names = ("q1", "k1", "q2", "k2", "v", "o")
    named = {f"{name}_bias": bias for name, bias in zip(names, biases, strict=True)}
    return tnsim.Model([tnsim.Attention(q, k, q, k, v, o, n_heads=1, **named)], n_ctx=2)


def two_layers(left, right, down, bias, *others):
    return tnsim.Model(bilinear(left, right, down, bias) + bilinear(*others))


def closed(layer):
    return lambda *weights: tnsim.Model(layer(*weights))


def added(weight, scale, down):
    """A sum of models, weighted by a tensor."""
    first, second = residual(weight, scale, down)
    return tnsim.Model([first, second]) - scale * tnsim.Model([tnsim.Linear(down[:, :2])])


def activated(weight, bias, down):
    return [tnsim.Linear(weight, bias), tnsim.Elementwise("gelu"), tnsim.Linear(down)]


POINTS = np.random.default_rng(0).normal(size=(5, 2))
WEIGHTED = tnsim.Empirical(POINTS, np.arange(5.0))
TOKENS = tnsim.Categorical([0.5, 0.2, 0.3])
MOVED = tnsim.Gaussian([0.5, 0.0])
RESIDUAL = closed(residual), [(2, 2), (), (2, 3)]
BILINEAR = closed(bilinear), [(3, 2), (3, 2), (2, 3), (3,)]
ATTENTION = attention, [(2, 3)] * 3 + [(3, 2)]
GRADIENTS = {  # a builder and shapes of its arrays, a metric
    "a residual and a cubic": (RESIDUAL, tnsim.TreeSymmetric()),
    "moment nodes": (
        (two_layers, [(2, 2), (2, 2), (2, 2), (2,)] * 2),
        tnsim.Gaussian([0.5, -0.2], [1.0, 0.3]),
    ),
    "a sum of models": ((added, [(2, 2), (), (2, 3)]), tnsim.Gaussian()),
    "attention with biases": (
        (attention_with_biases, [(2, 2)] * 4 + [(2,)] * 6),
        tnsim.Gaussian([0.3, 0.1]),
    ),
    "two attention layers": ((attention_twice, [(2, 2)] * 4), tnsim.GaussianClosure()),
    "a mean": (BILINEAR, MOVED),
    "weighted inputs": (BILINEAR, WEIGHTED),
    "a product": (RESIDUAL, tnsim.Product(([-1.0, 2.0], [0.3, 0.7]))),
    "inputs of tokens": (ATTENTION, tnsim.Empirical([[0, 1], [2, 2], [1, 0]])),
    "tokens": (ATTENTION, TOKENS),
    "drawn tokens": (ATTENTION, tnsim.Categorical(samples=7, seed=1)),
    "all sequences": ((attention_twice, ATTENTION[1]), TOKENS),
}
CENTRED = {  # the mean moves with the weights, and the derivative leaves it where it is
    "a mean": (BILINEAR, MOVED),
    "an activation": ((closed(activated), [(3, 2), (3,), (2, 3)]), MOVED),
    "weighted inputs": (BILINEAR, WEIGHTED),
    "a sum of models": ((added, [(2, 2), (), (2, 3)]), tnsim.Gaussian()),
    "tokens": (ATTENTION, TOKENS),
}


@pytest.mark.sampled(quick=1, slow=6)
@pytest.mark.parametrize(
    "case, centred",
    [*((name, False) for name in GRADIENTS), *((name, True) for name in CENTRED)],
)
def test_gradients(case, centred):
    """Both models move, against differences of eighth order of the similarity without gradients."""
    (build, shapes), metric = (CENTRED if centred else GRADIENTS)[case]
    weights = [random(*shape) for shape in shapes * 2]
    direction = [torch.randn_like(weight) for weight in weights]
    length = sum((v * v).sum() for v in direction).item() ** 0.5

    def similarity(verb, arrays):
        models = build(*arrays[: len(shapes)]), build(*arrays[len(shapes) :])
        return verb(*models, metric, centred=centred)

    value = similarity(tnsim.torch.similarity, weights)
    gradient = torch.autograd.grad(value, weights)

    def moved(step):
        there = [(w + step / length * v).detach() for w, v in zip(weights, direction, strict=True)]
        return similarity(tnsim.similarity, [x if x.ndim else x.item() for x in there])

    found = sum((g * v).sum().item() for g, v in zip(gradient, direction, strict=True)) / length
    assert_close(value.item(), moved(0.0), scale=1.0, rtol=1e-13)
    assert_close(found, slope_of(moved, 0.01, order=8), scale=1.0, rtol=1e-10)


@pytest.mark.slow
def test_a_batch_of_each_step_needs_no_new_program(monkeypatch):
    module, goal = nn.Linear(2, 2), tnsim.from_module(nn.Linear(2, 2))
    net = tnsim.torch.from_module(module)
    batches = [tnsim.Empirical(np.random.default_rng(seed).normal(size=(4, 2))) for seed in (1, 2)]
    values, traces = [], []
    traced = Form.traced
    monkeypatch.setattr(Form, "traced", lambda *given: traces.append(0) or traced(*given))
    for metric in batches:
        values.append(tnsim.torch.similarity(net, goal, metric, dtype="float32").item())
        assert len(traces) == 1
    assert values[0] != values[1]
    expected = tnsim.similarity(tnsim.from_module(module), goal, batches[1])
    assert_close(values[1], expected, scale=1.0, rtol=1e-6, limited_by="float32")


class Around(Net):
    """A linear map around the block, which hidden units of its own carry."""

    def __init__(self):
        super().__init__()
        self.around = nn.Linear(3, 3, bias=False)

    def forward(self, x):
        h = self.embed(x)
        return self.head(self.block(h) + self.around(h))


@pytest.mark.slow
def test_a_module_and_finite_differences():
    """Every parameter of a module, through fused halves and a learned scale."""
    net, goal = Around(), tnsim.from_module(Around())
    tnsim.torch.similarity(net, goal).backward()
    assert net.unused.grad is None
    direction = {parameter: torch.randn_like(parameter) for parameter in net.parameters()}

    def moved(step):
        there = copy.deepcopy(net).double().requires_grad_(False)
        for parameter, own in zip(there.parameters(), direction, strict=True):
            parameter += step * direction[own]
        return tnsim.similarity(tnsim.from_module(there), goal)

    slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
    used = [parameter for parameter in net.parameters() if parameter.grad is not None]
    along = sum((parameter.grad.double() * direction[parameter]).sum().item() for parameter in used)
    assert_close(along, slope, scale=1.0, rtol=1e-6, limited_by="float32")
    assert len(used) == 9


@pytest.mark.slow
def test_autocast_rounds_no_weight():
    net, goal = Net(), tnsim.from_module(Net())
    values, slopes = [], []
    for enabled in (False, True):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            values.append(tnsim.torch.similarity(net, goal))
        values[-1].backward()
        slopes.append(net.head.weight.grad)
    assert values[0] == values[1] and (slopes[0] == slopes[1]).all()


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("inputs", [None, np.eye(2)])
def test_a_default_device_without_numbers_is_not_that_of_a_module(inputs):
    net, goal = Net(), Net()
    metric = tnsim.Gaussian() if inputs is None else tnsim.Empirical(inputs)
    values = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            values.append(float(tnsim.similarity(net, goal, metric)))
            values.append(float(tnsim.torch.similarity(net, goal, metric).detach()))
    assert values[:2] == values[2:]


def test_forward_mode_is_refused():
    """A dual number requires no grad, and its tangent was lost."""
    goal = tnsim.Model([tnsim.Linear(np.ones((2, 3)))])
    metric = tnsim.Empirical(np.eye(3))
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        dual = forward.make_dual(torch.ones(2, 3).double(), torch.ones(2, 3).double())
        model = tnsim.Model([tnsim.Linear(dual)])
        with refused("forward mode does not pass", tnsim.TnsimError):
            tnsim.torch.similarity(model, goal)
        with refused("forward mode does not pass", tnsim.TnsimError):
            tnsim.torch.similarity(model, lambda x: x[:, :2], metric)
        with refused("would be lost here"):
            tnsim.similarity(model, goal)


def test_functions_whose_outputs_have_no_numbers_are_refused():
    metric = tnsim.Empirical(np.eye(3))

    def loss(weight):
        return tnsim.torch.similarity(lambda x: torch.tensor(x) @ weight, lambda x: x, metric)

    with refused("no plain numbers, as inside torch.func"):
        torch.func.grad(loss)(torch.ones(3, 3).double())
    with refused("no plain numbers, as inside torch.func"):
        tnsim.torch.similarity(torch.nn.Linear(3, 3, device="meta"), lambda x: x, metric)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's
def test_compiled_code_around_a_similarity_leaves_it_as_it_is():
    """Inside of `torch.compile` no module can be read, and an estimate stood in its place."""
    net, goal = Net(), Net().requires_grad_(False)
    expected = tnsim.torch.similarity(net, goal)

    @functools.partial(torch.compile, backend="eager")
    def loss(x):
        return tnsim.torch.similarity(net, goal) + 0 * x.sum()

    value = loss(torch.ones(2))
    assert value == expected
    value.backward()
    assert net.head.weight.grad is not None


@pytest.mark.slow
def test_a_state_dict_with_its_parameters_needs_no_recognition():
    net, goal = Net(), tnsim.from_module(Net())
    rules = (
        tnsim.dialects.LinearRule(weight="embed.weight", bias="embed.bias"),
        tnsim.dialects.BilinearRule(
            fused="block.both.weight",
            fused_bias="block.both.bias",
            down="block.down.weight",
            down_bias="block.down.bias",
            residual="additive",
            scale="block.scale",
        ),
        tnsim.dialects.LinearRule(weight="head.weight"),
    )
    dialect = tnsim.Dialect("net", rules, unused=("unused",))
    model = tnsim.from_state_dict(net.state_dict(keep_vars=True), dialect)
    assert model.layers[0].weight is net.embed.weight and model.layers[1].scale.requires_grad
    assert "s = 0.3" in " ".join(model.origin.assumptions)
    again = tnsim.torch.from_module(net)
    for one, two in ((model, goal), (again, goal)):
        net.zero_grad()
        tnsim.torch.similarity(one, two).backward()
        gradient = net.block.both.weight.grad.clone()
    np.testing.assert_array_equal(gradient, net.block.both.weight.grad)


def turned():
    """Attention with interleaved rotations, whose rows are put in another order."""

    def rotated(x):
        angle = torch.arange(x.shape[-2])[:, None] * 10.0 ** (-torch.arange(2) / 2)
        a, b, cos, sin = x[..., ::2], x[..., 1::2], angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def forward(m, x):
        return m.o((rotated(m.q(x)) @ rotated(m.k(x)).mT / 4) ** 2 @ m.v(x))

    return Module(forward, **{name: nn.Linear(4, 4, bias=False) for name in "qkvo"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, options",
    [
        (Net, {}),
        (turned, {"inputs": torch.randn(2, 3, 4)}),
        (Net, {"layers": {Block: lambda block: declared(block)}}),
        (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), {}),
    ],
    ids=["net", "attention", "declared", "parametrised"],
)
def test_the_tensors_of_a_module_are_the_arrays_of_its_model(module, options):
    import jax

    net = module()
    live = tnsim.torch.from_module(net, **options)
    plain = tnsim.from_module(net, **options)
    weights = [leaf for leaf in jax.tree.leaves(live) if isinstance(leaf, torch.Tensor)]
    assert weights and all(tensor.requires_grad for tensor in weights)
    numbers = [
        np.asarray(getattr(leaf, "detach", lambda x=leaf: x)()) for leaf in jax.tree.leaves(live)
    ]
    for one, two in zip(numbers, jax.tree.leaves(plain), strict=True):
        assert_close(one, two, scale=LARGEST, rtol=1e-7, limited_by="float32")
    sum(tensor.sum() for tensor in weights).backward()
    used = [name for name, tensor in net.named_parameters() if tensor.grad is not None]
    assert len(used) == len([name for name, _ in net.named_parameters() if name != "unused"])


def declared(block):
    half = len(block.both.weight) // 2
    left, right = block.both.weight[:half], block.both.weight[half:]
    biases = block.both.bias[:half], block.both.bias[half:]
    layer = tnsim.Bilinear(left, right, block.down.weight, *biases, block.down.bias)
    return tnsim.Residual(layer, scale=block.scale)


def test_nothing_is_kept_where_no_gradient_is_wanted():
    net, goal = nn.Linear(2, 2), tnsim.from_module(nn.Linear(2, 2))
    with torch.no_grad():
        assert tnsim.torch.similarity(net, goal).grad_fn is None
    value = tnsim.torch.similarity(net.requires_grad_(False), goal)
    assert value.grad_fn is None
    assert value.item() == tnsim.similarity(tnsim.from_module(net), goal)


class Attending(nn.Module):
    """Tokens, softmax attention with a layer norm and a ReLU, two outputs by name."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.attend, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, ids):
        x = self.norm(self.table(ids))
        x = x + self.attend(x, x, x)[0]
        return {"logits": self.out(torch.relu(x)), "states": x}


def units(*widths):
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (nn.GELU(), layer)))


def pooled():
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(2, 3, 1))


DATA = np.random.default_rng(0)
ON_INPUTS = {
    "units": (
        lambda: units(4, 6, 6, 2),
        tnsim.Empirical(DATA.normal(size=(40, 4)), DATA.random(40)),
    ),
    "attention": (Attending, tnsim.Empirical(DATA.integers(0, 5, size=(20, 3)))),
    "states": (Attending, tnsim.Empirical(DATA.integers(0, 5, size=(20, 3)), output="states")),
    "pooling": (pooled, tnsim.Empirical(DATA.normal(size=(10, 1, 5, 5)))),
}


def by_hand(a, b, metric, centred=False):
    """The cosine of the outputs of two modules, all inputs at once."""
    inputs = torch.from_numpy(np.array(metric.inputs))
    weights = np.ones(len(inputs)) if metric.weights is None else metric.weights

    def vector(module):
        outputs = module(inputs)
        if isinstance(outputs, dict):
            outputs = outputs[metric.output or "logits"]
        if centred:  # of (inputs, positions, out) or (inputs, out)
            by_input = outputs.flatten(1, -2).mean(1) if outputs.ndim > 2 else outputs
            outputs = outputs - torch.from_numpy(weights / weights.sum()) @ by_input.double()
        return (outputs.flatten(1) * torch.from_numpy(weights).sqrt()[:, None]).flatten()

    return nn.functional.cosine_similarity(vector(a), vector(b), dim=0)


@pytest.mark.parametrize(
    "case, centred", [*((case, False) for case in ON_INPUTS), ("units", True), ("attention", True)]
)
def test_modules_that_are_no_models_on_inputs(case, centred):
    """Value and gradients of both sides against PyTorch's own cosine, values also of single precision."""
    build, metric = ON_INPUTS[case]
    nets = [build() for _ in range(2)]
    value = tnsim.torch.similarity(*nets, metric, centred=centred)
    assert value.dtype == torch.float64 and next(nets[0].parameters()).dtype == torch.float32
    expected = tnsim.similarity(*nets, metric, centred=centred)
    # Both run other batches, and the size of a batch decides how a product in float32 is rounded.
    assert_close(value.item(), expected, scale=1.0, rtol=1e-6, limited_by="float32")
    nets = [net.double() for net in nets]
    weights = [weight for net in nets for weight in net.parameters()]
    value = tnsim.torch.similarity(*nets, metric, centred=centred)
    oracle = by_hand(*nets, metric, centred)
    assert_close(
        value.item(), tnsim.similarity(*nets, metric, centred=centred), scale=1.0, rtol=1e-14
    )
    assert_close(value.item(), oracle.item(), scale=1.0, rtol=1e-13)
    found = torch.autograd.grad(value, weights, allow_unused=True)
    wanted = torch.autograd.grad(oracle, weights, allow_unused=True)
    size = max(gradient.abs().max().item() for gradient in wanted if gradient is not None)
    for one, two in zip(found, wanted, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            assert_close(one.numpy(), two.numpy(), scale=size, rtol=1e-12)


def line(weight, bias):
    return tnsim.Model([tnsim.Linear(weight, bias)])


def sum_of_models(weight, scale, down):
    model = tnsim.Model([tnsim.Linear(weight), tnsim.Bilinear(*[np.eye(3, 2)] * 2, down)])
    return model - scale * tnsim.Model([tnsim.Residual(tnsim.Linear(weight), scale=scale)])


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize(
    "build, shapes, live_first, centred",
    [
        (line, [(2, 2), (2,)], True, False),
        (line, [(2, 2), (2,)], True, True),
        (sum_of_models, [(2, 2), (), (2, 3)], True, False),
        (sum_of_models, [(2, 2), (), (2, 3)], False, False),
    ],
)
def test_a_model_of_tensors_beside_a_function_of_tensors(build, shapes, live_first, centred):
    """Weights of both sides against differences of the value."""
    net = units(2, 3, 2).double()
    metric = tnsim.Empirical(POINTS, np.arange(5.0))
    weights = [random(*shape) for shape in shapes]
    parameters = [parameter.detach().requires_grad_() for parameter in net.parameters()]

    def cosine(*tensors):
        model = build(*tensors[: len(shapes)])
        named = dict(zip(dict(net.named_parameters()), tensors[len(shapes) :], strict=True))

        def function(x):
            return torch.func.functional_call(net, named, (torch.from_numpy(x),))

        sides = (model, function) if live_first else (function, model)
        return tnsim.torch.similarity(*sides, metric, centred=centred)

    assert torch.autograd.gradcheck(cosine, (*weights, *parameters))
    plain = [x.detach() for x in (*weights, *parameters)]
    expected = tnsim.similarity(build(*plain[: len(shapes)]), net, metric, centred=centred)
    assert_close(cosine(*plain).item(), expected, scale=1.0, rtol=1e-13)
    with torch.no_grad():
        assert cosine(*weights, *parameters).grad_fn is None
    value = cosine(*weights, *parameters)
    with refused("second derivatives", tnsim.TnsimError):
        torch.autograd.grad(value, weights, create_graph=True)


@pytest.mark.parametrize("centred", [False, True])
def test_modules_on_inputs_have_second_derivatives(centred):
    nets, metric = [units(2, 3, 2).double() for _ in range(2)], tnsim.Empirical(POINTS)
    weights = nets[0][1].weight, nets[1][1].weight

    def twice(value):
        (slope,) = torch.autograd.grad(value, weights[0], create_graph=True)
        return torch.autograd.grad((slope**2).sum(), weights)

    value = tnsim.torch.similarity(*nets, metric, centred=centred)
    for found, wanted in zip(twice(value), twice(by_hand(*nets, metric, centred)), strict=True):
        assert_close(found, wanted, scale=LARGEST, rtol=1e-11)


def test_functions_of_tensors_are_the_modules_that_they_call():
    """A function that fails on an array of NumPy gets a tensor, with gradients where they count."""
    nets = [units(2, 3, 2) for _ in "ab"]
    functions = [lambda x, net=net: net(x.view(-1, 2)).sigmoid() for net in nets]
    modules = [nn.Sequential(net, nn.Sigmoid()) for net in nets]
    metric = tnsim.Empirical(POINTS)
    found, expected = [tnsim.inner(*pair, metric) for pair in (functions, modules)]
    assert_close(found, expected, scale=1.0, rtol=1e-6, limited_by="float32")
    assert tnsim.compare_forward(tnsim.from_module(nets[0]), nets[0]).relative < 1e-5
    slopes = []
    for pair in (functions, modules):
        value = tnsim.torch.similarity(*pair, metric)
        slopes.append(torch.autograd.grad(value, nets[0][1].weight)[0])
    assert_close(slopes[0], slopes[1], scale=LARGEST, rtol=1e-5, limited_by="float32")
    with pytest.raises(TypeError, match="must be Tensor") as caught:
        tnsim.inner(lambda x: nets[0].double()(x), nets[1], metric)
    assert any("x.double()" in note for note in caught.value.__notes__)


def test_a_module_beside_a_fixed_model_a_path_and_a_function(tmp_path):
    net, goal = units(2, 3, 2), tnsim.from_module(Net())
    tnsim.save(goal, tmp_path / "goal.safetensors")
    metric = tnsim.Empirical(POINTS)
    values = []
    for other in (goal, tmp_path / "goal.safetensors", goal.__call__):
        value = tnsim.torch.similarity(net, other, metric)
        value.backward()
        assert_close(value.item(), tnsim.similarity(net, other, metric), scale=1.0, rtol=1e-13)
        values.append(value.item())
    assert_close(values, np.full(3, values[0]), scale=1.0, rtol=1e-13)
    one = net[1].weight.grad.clone()
    net.zero_grad()
    tnsim.torch.similarity(goal, net, metric).backward()
    assert_close(3 * net[1].weight.grad, one, scale=LARGEST, rtol=1e-6, limited_by="float32")


@pytest.mark.slow
def test_models_of_two_activations_with_a_linear_layer_between_run_on_the_inputs_of_their_estimate():
    """Why there is no exact number is asked of weights that require grad too."""
    net = nn.Sequential(
        nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 2), nn.Linear(2, 5), nn.GELU(), nn.Linear(5, 1)
    )
    model, goal = tnsim.torch.from_module(net.double()), units(2, 3, 1).double()
    metric = tnsim.Gaussian(samples=64)
    value = tnsim.torch.similarity(model, tnsim.from_module(goal), metric)
    assert_close(value.item(), tnsim.similarity(net, goal, metric), scale=1.0)
    value.backward()
    assert net[0].weight.grad.abs().max() > 0


def test_many_inputs_pass_in_batches():
    """No call has all inputs, and batches change neither value nor gradient."""
    calls = []
    net, goal = units(3, 4, 2).double(), units(3, 2).double()
    goal.register_forward_hook(lambda module, inputs, outputs: calls.append(len(inputs[0])))
    metric = tnsim.Empirical(DATA.normal(size=(2500, 3)), DATA.random(2500))
    value, oracle = tnsim.torch.similarity(net, goal, metric), by_hand(net, goal, metric)
    apart = 2  # inputs that run once more, as nothing may depend on the others of a batch
    calls = [count for count in calls[:-1] if count > apart]
    assert sum(calls) == 2500 and max(calls) <= 1024
    assert_close(value.item(), oracle.item(), scale=1.0, rtol=1e-13)
    found, wanted = (torch.autograd.grad(x, net[1].weight)[0] for x in (value, oracle))
    assert_close(found, wanted, scale=LARGEST, rtol=1e-12)


@pytest.mark.parametrize("factor", [1e-300, 1e-30, 1e30, 1e300])
def test_outputs_of_any_size_on_inputs(factor):
    net, goal = units(3, 4, 2).double(), units(3, 2).double()
    metric = tnsim.Empirical(DATA.normal(size=(9, 3)))
    plain = tnsim.torch.similarity(net, goal, metric)
    value = tnsim.torch.similarity(lambda x: factor * net(torch.from_numpy(x)), goal, metric)
    assert_close(value.item(), plain.item(), scale=1.0, rtol=1e-13)
    found, wanted = (torch.autograd.grad(x, net[1].weight)[0] for x in (value, plain))
    assert_close(found, wanted, scale=LARGEST, rtol=1e-12)


def test_a_module_on_inputs_with_itself_and_held_fixed():
    net = units(2, 3, 2)
    metric = tnsim.Empirical(POINTS)
    value = tnsim.torch.similarity(net, net, metric)
    value.backward()
    assert value.item() == 1.0 and net[1].weight.grad.abs().max() < 1e-6
    with torch.no_grad():
        assert tnsim.torch.similarity(net, units(2, 2), metric).grad_fn is None


def wild(value):
    """The identity, but for inputs of which the first coordinate is 9."""
    return lambda x: np.where(x[:, :1] == 9, value, x)


LONG = DATA.normal(size=(1500, 2))
LONG[1300, 0] = 9.0
LONG = tnsim.Empirical(LONG)
REFUSED_ON_INPUTS = {
    "not a number": (wild(np.nan), {"metric": LONG}, "NaN or infinite, first for input 1300"),
    "infinite": (wild(np.inf), {"metric": LONG}, "NaN or infinite, first for input 1300"),
    "far apart": (wild(1e200), {"metric": LONG}, "on some inputs are beyond float64, relative to"),
    "zero": (np.zeros_like, {}, "the second model is the zero function"),
    "constant": (lambda x: np.full_like(x, 0.1), {"centred": True}, "leaves nothing of it"),
    "random": (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), {}, r"call module\.eval\(\) first"),
    "other outputs": (nn.Linear(2, 3), {}, "one shape of outputs"),
    "other inputs": (nn.Linear(3, 2), {}, "Linear does not take these inputs"),
    "another metric": (abs, {"metric": tnsim.Gaussian()}, r"use tnsim\.Empirical\(inputs\)"),
    "little memory": (
        nn.Linear(2, 2),
        {"budget": tnsim.Budget(memory_bytes=1)},
        "for a single input here, and the budget is",
    ),
}


@pytest.mark.parametrize("case", REFUSED_ON_INPUTS)
def test_refusals_on_inputs(case):
    other, options, message = REFUSED_ON_INPUTS[case]
    with refused(message, tnsim.TnsimError):
        tnsim.torch.similarity(
            nn.Linear(2, 2), other, **{"metric": tnsim.Empirical(POINTS)} | options
        )


def _without_gradients(m, x):
    with torch.no_grad():
        hidden = m.a(x) ** 2
    return m.b(hidden)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, slope):
        return -slope


GRADIENTS_OF_THEIR_OWN = {  # by what the gradient of either map is multiplied
    "no_grad": (_without_gradients, 0, 1),
    "detached": (lambda m, x: m.b((m.a(x) ** 2).detach()), 0, 1),
    "detached on one of two paths": (
        lambda m, x: 0.75 * m.b(m.a(x) ** 2).detach() + 0.25 * m.b(m.a(x).detach() ** 2),
        0,
        0.25,
    ),
    "the numbers of a weight": (lambda m, x: (m.a(x) ** 2) @ m.b.weight.data.T + m.b.bias, 1, 0),
    "reversed": (lambda m, x: m.b(_Reversed.apply(m.a(x) ** 2)), -1, 1),
}


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("case", GRADIENTS_OF_THEIR_OWN)
def test_code_that_keeps_gradients_from_weights_is_followed(case):
    """What flowed into a part that a forward pass detaches was trained, and nothing told."""
    forward, *factors = GRADIENTS_OF_THEIR_OWN[case]
    torch.manual_seed(0)
    a, b = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
    plain = Module(lambda m, x: m.b(m.a(x) ** 2), a=a, b=b)
    net, goal = Module(forward, a=a, b=b), tnsim.from_module(nn.Linear(3, 2))
    for one in (plain, net):
        tnsim.torch.similarity(one, goal, tnsim.Gaussian(samples=2**11)).backward()
    for name, factor in zip("ab", factors, strict=True):
        slope, own = (getattr(one, name).weight.grad for one in (plain, net))
        own = torch.zeros_like(slope) if own is None else own
        size = slope.abs().max().item()
        limit = "samples of the estimate"
        assert_close(own.numpy(), factor * slope.numpy(), scale=size, rtol=0.05, limited_by=limit)
    own = r"\.weight has another gradient .* requires_grad_\(False\)|calls an autograd\.Function"
    with refused(own, tnsim.UnsupportedLayer):
        tnsim.torch.from_module(net)
    for name, factor in zip("ab", factors, strict=True):
        getattr(net, name).requires_grad_(factor == 1)
    if case in ("no_grad", "detached"):  # what is kept from gradients is no weight that trains
        value = tnsim.torch.similarity(net, goal)
        assert_close(value.item(), float(tnsim.similarity(plain, goal)), scale=1.0)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("metric", [tnsim.Symmetric(), tnsim.Product(([-1.0], [1.0]))])
def test_modules_that_are_no_models_need_inputs(metric):
    with pytest.raises(tnsim.TnsimError):
        tnsim.torch.similarity(units(2, 3, 3, 2), units(2, 3, 2), metric)


class Sides:
    """A metric from outside that is no pytree."""

    name = "sides"
    pairs_within_model = False

    def is_exact(self, nonlinear_layers):
        return True

    def points(self, reading):
        side = Rule(np.array([-1.0, 2.0]), np.log([0.5, 0.5]))
        return product_rule([side] * reading.d_in)


@pytest.mark.slow
def test_single_precision_and_a_metric_from_outside():
    net, goal = nn.Linear(2, 2), tnsim.from_module(nn.Linear(2, 2))
    value = tnsim.torch.similarity(net, goal, Sides(), dtype="float32")
    value.backward()
    assert value.dtype == torch.float64 and net.weight.grad.dtype == torch.float32
    expected = tnsim.similarity(tnsim.from_module(net), goal, Sides())
    assert_close(value.item(), expected, scale=1.0, rtol=1e-6, limited_by="float32")


VERBS = {
    "similarity": lambda a, b: tnsim.similarity(a, b),
    "slices": lambda a, b: tnsim.slices(b, a),
    "inner": lambda a, b: tnsim.inner(a, b),
    "log_inner": lambda a, b: tnsim.log_inner(a, b),
    "plan": lambda a, b: tnsim.plan(a, b),
    "a difference": lambda a, b: tnsim.similarity(b - a, b),
    "samples": lambda a, b: tnsim.similarity(a, b, tnsim.Empirical(np.eye(2))),
    "a function": lambda a, b: tnsim.similarity(a, abs, tnsim.Empirical(np.eye(2))),
    "check": lambda a, b: tnsim.check(a, b),
    "paths": lambda a, b: tnsim.paths(a, b, by="unit"),
    "network": lambda a, b: tnsim.tensor_networks.network(a),
    "networks": lambda a, b: list(tnsim.tensor_networks.networks(a, b)),
    "pairwise": lambda a, b: tnsim.pairwise([a, b]),
    "plan_pairwise": lambda a, b: tnsim.plan_pairwise([a, b]),
    "save": lambda a, b: tnsim.save(a, "never.safetensors"),
    "weight_cosine": lambda a, b: tnsim.baselines.weight_cosine([a, b]),
    "cka": lambda a, b: tnsim.baselines.cka([a, b], 10),
    "the mean of a metric": lambda a, b: tnsim.Gaussian(random(2)),
    "a sample": lambda a, b: tnsim.Empirical(random(5, 2)),
}


@pytest.mark.sampled(quick=7)
@pytest.mark.parametrize("verb", VERBS)
def test_no_gradient_is_lost_in_silence(verb):
    live = tnsim.Model([tnsim.Bilinear(random(3, 2), random(3, 2), random(2, 3))])
    plain = tnsim.Model([tnsim.Linear(np.eye(2))])
    with refused(r"requires? grad.*tnsim\.torch\.similarity"):
        VERBS[verb](live, plain)


def backward_twice(net, goal):
    value = tnsim.torch.similarity(net, goal)
    torch.autograd.grad(value, net.head.weight, create_graph=True)


def changed_between(net, goal):
    value = tnsim.torch.similarity(net, goal)
    with torch.no_grad():
        net.head.weight.add_(1)
    value.backward()


def of_a_learned_base(net, goal):
    attention = turned()
    names = {role: f"{role[0]}.weight" for role in ("q1", "k1", "q2", "k2", "v", "o")}
    rule = tnsim.dialects.AttentionRule(**names, n_heads=1, rope_base="base")
    state = attention.state_dict(keep_vars=True) | {"base": nn.Parameter(torch.tensor(10.0))}
    tnsim.from_state_dict(state, tnsim.Dialect("turned", (rule,)))


REFUSED = {
    "second derivatives": (backward_twice, "second derivatives of a similarity are not supported"),
    "written to": (changed_between, "modified by an inplace operation"),
    "other points": (
        lambda net, goal: tnsim.torch.similarity(net, goal, tnsim.Empirical(np.eye(3))),
        r"the models read inputs of shape \(n, 2\), found \(n, 3\)",
    ),
    "too many points": (
        lambda net, goal: tnsim.torch.similarity(
            net, goal, tnsim.Empirical(np.eye(2)), budget=tnsim.Budget(memory_bytes=10)
        ),
        "for a single input here, and the budget is",
    ),
    "a way back beyond the budget": (
        lambda net, goal: tnsim.torch.similarity(
            net.head, tnsim.from_module(Net().head), budget=tnsim.Budget(multiplications=25)
        ),
        "gaussian with its gradients needs .* multiplications here, more than the budget of 25",
    ),
    "norms": (
        lambda net, goal: tnsim.torch.from_module(nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3))),
        "a norm stands before layer 0. At a constant energy",
    ),
    "the same function": (
        lambda net, goal: tnsim.torch.similarity(
            tnsim.from_module(net.head) - tnsim.torch.from_module(net.head),
            tnsim.from_module(net.head),
        ),
        "difference of models",
    ),
    "zero": (
        lambda net, goal: tnsim.torch.similarity(net.apply(zero), goal),
        "the first model is the zero function",
    ),
    "no model": (lambda net, goal: tnsim.torch.similarity(net, 3), "found int"),
    "other inputs": (
        lambda net, goal: tnsim.torch.similarity(nn.Linear(3, 2), goal),
        "the models read different inputs: 3 and 2 coordinates",
    ),
    "a learned base": (
        of_a_learned_base,
        "the RoPE base requires grad, and nothing has a gradient",
    ),
}


def zero(module):
    for parameter in module.parameters():
        nn.init.zeros_(parameter)


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_gradient_is_refused(case):
    attempt, message = REFUSED[case]
    kind = RuntimeError if case == "written to" else tnsim.TnsimError
    with pytest.raises(kind, match=message):
        attempt(Net(), tnsim.from_module(Net()))


@pytest.mark.slow
def test_warnings_are_those_of_the_verbs_without_gradients():
    net = Net()
    goal = tnsim.from_module(Net())
    origin = tnsim.models.model.Origin("a file", caveats=("left out: norm.weight",))
    with pytest.warns(tnsim.CaveatWarning, match="left out: norm.weight"):
        tnsim.torch.similarity(net, tnsim.Model(goal.layers, origin=origin))


@pytest.mark.parametrize("number", [torch.tensor(0.5), torch.tensor(0.5).double(), torch.tensor(2)])
def test_a_tensor_without_axes_is_a_coefficient(number, rng):
    """A combination with a float tensor ended in a raw TypeError, with whole numbers in a warning of NumPy."""
    a, b = (tnsim.Model([tnsim.Bilinear(*rng.normal(size=(3, 3, 3)))]) for _ in range(2))
    plain = tnsim.similarity(float(number) * a - b, b)
    assert tnsim.similarity(number * a - b, b) == tnsim.similarity(a * number - b, b) == plain
    assert tnsim.log_inner(number * a, b) == tnsim.log_inner(float(number) * a, b)


def test_precision_is_named_as_in_torch(rng):
    model = tnsim.Model([tnsim.Linear(rng.normal(size=(2, 2)))])
    found = tnsim.log_inner(model, model, dtype=torch.float32).log
    assert found == tnsim.log_inner(model, model, dtype="float32").log
    with refused("dtype must be one of float64, float32, found torch.bfloat16"):
        tnsim.similarity(model, model, dtype=torch.bfloat16)
