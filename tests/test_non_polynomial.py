"""Networks that no layers describe: the error names the next step, and its code runs as it stands."""

import re

import jax
import numpy as np
import pytest
from closeness import assert_close
from refusals import refused

import tnsim

torch = pytest.importorskip("torch", reason="modules need the torch extra")
from module_cases import Module  # noqa: E402

nn = torch.nn
VOCABULARY, POSITIONS = 7, 4
SOFTMAX = '{"format": 1, "name": "mine", "layers": [{"kind": "softmax", "weight": "w"}]}'
CODE = re.compile(r"tnsim\.(?:similarity|pairwise|baselines\.cka)\((?:[^()]|\([^()]*\))*\)")


def transformer():
    """Softmax attention, LayerNorm and ReLU, as PyTorch builds them."""
    block = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
    ends = {"embed": nn.Embedding(VOCABULARY, 8), "unembed": nn.Linear(8, VOCABULARY)}
    return Module(lambda m, tokens: m.unembed(m.block(m.embed(tokens))), block=block, **ends)


def normed():
    """SwiGLU behind an RMSNorm."""

    def forward(m, x):
        x = m.norm(x)
        return m.down(nn.functional.silu(m.gate(x)) * m.up(x))

    maps = {"gate": nn.Linear(5, 6), "up": nn.Linear(5, 6), "down": nn.Linear(6, 3)}
    return Module(forward, norm=nn.RMSNorm(5), **maps)


class Stretched(nn.LayerNorm):
    """A norm times what it reads."""

    def forward(self, x):
        return x * super().forward(x)


@pytest.fixture(params=["transformer", "norm", "mlp"])
def setting(request, rng):
    """Two networks of a kind, and inputs."""
    torch.manual_seed(0)
    if request.param == "transformer":
        inputs = rng.integers(VOCABULARY, size=(6, POSITIONS))
        make = transformer
    else:
        inputs = rng.normal(size=(6, 5))
        make = lambda: nn.Sequential(nn.Linear(5, 4), Stretched(4), nn.ReLU(), nn.Linear(4, 3))  # noqa: E731
    if request.param == "mlp":
        make = lambda: nn.Sequential(nn.Linear(5, 4), nn.Softmax(-1), nn.Linear(4, 3))  # noqa: E731
    return make().double().eval(), make().double().eval(), inputs


def refusal(attempt):
    with pytest.raises(tnsim.TnsimError) as caught:
        attempt()
    return str(caught.value)


@pytest.mark.sampled(quick=1)
def test_the_code_in_the_error_runs_as_it_stands(setting):
    net, other, inputs = setting
    code = CODE.findall(refusal(lambda: tnsim.from_module(net)))
    assert len(code) == 3
    one, several, measured = (eval(line, {"tnsim": tnsim, "net": net, "other": other, "inputs": inputs}) for line in code)  # fmt: skip
    with torch.no_grad():
        first, second = (m(torch.tensor(inputs)).numpy().ravel() for m in (net, other))
    expected = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    assert_close(one, expected, scale=1.0)
    assert one.standard_error > 0
    assert_close(several.similarity[0, 1], expected, scale=1.0)
    assert measured.shape == (2, 2) and measured.attrs["inputs"] == "given"


def test_every_road_in_names_it_where_it_is_the_fix(tmp_path, rng):
    """Softmax and norms between layers; all else ends with a fix of its own."""
    torch.save(transformer().state_dict(), tmp_path / "softmax.pt")
    norm_between = nn.Sequential(nn.Linear(3, 3), Stretched(3), nn.ReLU(), nn.Linear(3, 3))
    for attempt in (
        lambda: tnsim.load(tmp_path / "softmax.pt"),
        lambda: tnsim.from_module(transformer().eval()),
        lambda: tnsim.from_module(nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1))),
        lambda: tnsim.from_module(norm_between),
    ):
        said = refusal(attempt)
        assert "tnsim.Empirical(inputs)" in said and "tnsim.baselines.cka" in said, said


def test_other_errors_end_with_their_own_fix(tmp_path):
    """A file, a dialect, a layer, a norm and an image say what to write, and nothing besides."""
    torch.save(normed().state_dict(), tmp_path / "gated.pt")
    for attempt, fix in (
        (lambda: tnsim.load(tmp_path / "gated.pt"), "or name a preset: .*"),
        (lambda: tnsim.Dialect.from_json(SOFTMAX), "known are linear, bilinear, .*"),
        (lambda: tnsim.Model([torch.relu]), r"is read by tnsim.from_module\(module\)"),
        (lambda: tnsim.Residual(nn.ReLU()), r"is read by tnsim.from_module\(module\)"),
        (lambda: tnsim.from_module(normed()), r"metric tnsim.Empirical\(inputs\)"),
        (lambda: tnsim.from_module(nn.Conv2d(3, 4, 3)), r"--example x.npy on the command line"),
        (lambda: tnsim.from_module(nn.ReLU()), r"--example x.npy on the command line"),
    ):
        said = refusal(attempt)
        assert re.search(f"{fix}$", said) and "What has no layer here" not in said, said


def test_measures_of_functions_beside_models(rng):
    """Token ids for both; what a model has for a table of tokens is one-hot vectors."""
    net = transformer().double().eval()
    layers = [tnsim.Linear(rng.normal(size=(VOCABULARY, VOCABULARY)))]
    model = tnsim.Model(layers, n_ctx=POSITIONS)
    tokens = rng.integers(VOCABULARY, size=(9, POSITIONS))
    found = tnsim.baselines.output_cosine([net, model], tokens)
    expected = tnsim.similarity(net, model, tnsim.Empirical(tokens))
    assert_close(float(found[0, 1]), expected, scale=1.0, rtol=1e-12)
    share = tnsim.baselines.agreement([net, model], tokens)
    with torch.no_grad():
        mine = net(torch.tensor(tokens)).argmax(-1).numpy()
    theirs = model(np.eye(VOCABULARY)[tokens]).argmax(-1)
    assert float(share[0, 1]) == (mine == theirs).mean()


def test_outputs_of_functions_may_be_whole_numbers_and_truth_values(rng):
    x = rng.normal(size=(20, 3))
    for function in (lambda x: np.rint(3 * x).astype(int), lambda x: x > 0):
        wanted = np.vdot(x, function(x)) / np.linalg.norm(x) / np.linalg.norm(function(x))
        found = tnsim.similarity(function, lambda x: x, tnsim.Empirical(x))
        assert_close(found, wanted, scale=1.0)


@pytest.mark.parametrize("verb", [tnsim.similarity, tnsim.inner, tnsim.pairwise, tnsim.change])
def test_a_function_that_fails_says_what_it_was_called_with(verb, rng):
    alone = [jax.tree_util.Partial(lambda w, x: w @ x, rng.normal(size=(3, 8))) for _ in "ab"]
    given = [alone] if verb is tnsim.pairwise else alone
    with pytest.raises((TypeError, ValueError), match=r"mismatch|contracting") as caught:
        verb(*given, tnsim.Empirical(rng.normal(size=(20, 8))))
    (note,) = [each for each in caught.value.__notes__ if "batch" in each]
    assert re.search(r"float64 of shape \(\d+, 8\)", note) and "jax.vmap" in note


def test_what_a_measure_of_functions_refuses(rng):
    double = lambda x: 2 * x  # noqa: E731
    wide = lambda x: np.ones((len(x), 5))  # noqa: E731
    x = rng.normal(size=(6, 3))
    for message, attempt in {
        "give inputs as an array": lambda: tnsim.baselines.cka([double, double], 20),
        r"model 1 gives outputs of shape \(6, 5\)": lambda: tnsim.baselines.output_cosine(
            [double, wide], x
        ),
        "model 1 gives the same output": lambda: tnsim.baselines.cka([double, wide], x),
        "expected a tnsim Model": lambda: tnsim.baselines.cka([double, 3], x),
        r"TransformerEncoderLayer|MultiheadAttention.*training mode.*call module.eval\(\) first": lambda: (
            tnsim.similarity(transformer(), abs, tnsim.Empirical([[0, 1]]))
        ),
        "model 0 is a function: the cosine of weights is for models": lambda: (
            tnsim.baselines.weight_cosine([double, double])
        ),
    }.items():
        with refused(message):
            attempt()


def images_and_networks():
    """Two ordinary convolutional networks in evaluation mode, and images as a data set has them."""
    torch.manual_seed(0)
    networks = [
        nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 5),
        )
        .double()
        .eval()
        for _ in range(2)
    ]
    return networks, torch.randn(20, 3, 8, 8, dtype=torch.float64)


def outputs(network, images):
    return network(images).detach().numpy()


def test_images_under_empirical():
    """Inputs (n, channels, height, width), of modules, functions and models of pixels."""
    (a, b), images = images_and_networks()
    u, v = outputs(a, images), outputs(b, images)
    cosine = (u * v).sum() / np.sqrt((u * u).sum() * (v * v).sum())
    inputs = tnsim.Empirical(images)
    assert_close(tnsim.similarity(a, b, inputs), cosine, scale=1.0, rtol=1e-9)
    result = tnsim.pairwise([a, b], inputs, progress=False)
    assert_close(result.similarity.values[0, 1], cosine, scale=1.0, rtol=1e-9)
    pixels = np.asarray(images, np.float64).reshape(20, -1)
    readout = np.random.default_rng(0).normal(size=(5, 192))
    w = pixels @ readout.T
    expected = (u * w).sum() / np.sqrt((u * u).sum() * (w * w).sum())
    model = tnsim.Model([tnsim.Linear(readout)])
    assert_close(
        tnsim.similarity(a, model, inputs), expected, scale=1.0, rtol=1e-9
    )  # float32 images
    kernels = [lambda x, n=n: np.asarray(x, np.float64)[:, :, n:, n:] ** 2 for n in (0, 0)]
    assert_close(tnsim.similarity(*kernels, inputs), 1.0, scale=1.0, rtol=1e-9)  # feature maps
    with refused(r"shape \(n, 192\), found \(n, 3, 8, 7\)"):
        tnsim.similarity(model, model, tnsim.Empirical(images[..., :7]))
    with refused(r"uint8.*pixels become floats by inputs / 255"):
        tnsim.Empirical(np.zeros((2, 3, 8, 8), np.uint8))
    flat = r"Sequential does not take these inputs, torch\.float64 of shape \(20, 192\).*channels"
    with refused(flat):
        tnsim.similarity(a, b, tnsim.Empirical(images.reshape(20, -1)))


def test_images_under_every_baseline():
    (a, b), images = images_and_networks()
    u, v = outputs(a, images), outputs(b, images)
    baselines = tnsim.baselines
    same = (u.argmax(1) == v.argmax(1)).mean()
    assert_close(baselines.agreement([a, b], images)[0, 1], same, scale=1.0, rtol=1e-12)
    each = (u * v).sum(1) / np.sqrt((u * u).sum(1) * (v * v).sum(1))
    assert_close(baselines.mean_cosine([a, b], images)[0, 1], each.mean(), scale=1.0, rtol=1e-9)
    whole = (u * v).sum() / np.sqrt((u * u).sum() * (v * v).sum())
    assert_close(baselines.output_cosine([a, b], images)[0, 1], whole, scale=1.0, rtol=1e-9)
    for measure in (baselines.cka, baselines.js_divergence):
        values = measure([a, b], images)
        assert_close(measure([a, b], images.numpy()), values, scale=1.0, rtol=1e-9)
    model = tnsim.Model([tnsim.Linear(np.eye(5, 192))])
    pixels = images.numpy().reshape(20, 192)
    for images_ in (images, pixels):
        found = baselines.output_cosine([model, model], images_)
        assert_close(found, np.ones((2, 2)), scale=1.0, rtol=1e-9)


ACROSS_THE_BATCH = {
    "mean": lambda x: x - x.mean(0),
    "size": lambda x: x / len(x),
    "sum of outputs": lambda x: (lambda y: y / y.sum(0))(x**2 + 1),
}


def across(function):
    """A module around a function of a batch."""
    return Module(lambda m, x: m.map(function(x)), map=nn.Linear(5, 3)).double()


@pytest.mark.parametrize("name", ACROSS_THE_BATCH)
@pytest.mark.parametrize("is_module", [True, False])
def test_functions_whose_inputs_touch_in_a_batch_are_refused(name, is_module, rng):
    function = ACROSS_THE_BATCH[name]
    points = rng.normal(size=(50, 5))
    inputs = tnsim.Empirical(points)
    one, two = (across(function), across(lambda x: x)) if is_module else (function, abs)
    for attempt in (
        lambda: tnsim.similarity(one, two, inputs),
        lambda: tnsim.pairwise([one, two], inputs),
        lambda: tnsim.baselines.cka([one, two], points),
    ):
        assert "other inputs stand in its batch" in refusal(attempt)
    if is_module:
        assert "other inputs" in refusal(lambda: tnsim.torch.similarity(one, two, inputs))
    assert np.isfinite(float(tnsim.similarity(two, two, inputs)))
