"""Norms and biases: folded with their error, left out on purpose and said everywhere, never dropped silently."""

import json
import warnings

import numpy as np
import pytest
from closeness import LARGEST, assert_close
from commands import command
from refusals import refused

import tnsim
from tnsim.checkpoints.norms import Norm, Normed, fold

WIDTH, RANK = 4, 6
RULES = [
    {"kind": "linear", "weight": "embed.weight"},
    {"kind": "bilinear", "left": "l.weight", "right": "r.weight", "down": "d.weight", "residual": "additive"},
    {"kind": "linear", "weight": "head.weight"},
]  # fmt: skip
NORM = {"norm": "rms", "norm_weight": "norm.weight", "norm_epsilon": 1e-5}


def dialect(tmp_path, rules=RULES, **fields):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"format": 1, "name": "mine", "layers": rules, **fields}))
    return path


def normed_rules():
    return [RULES[0], {**RULES[1], **NORM}, RULES[2]]


@pytest.fixture
def state(rng):
    shapes = {"embed": (WIDTH, 3), "l": (RANK, WIDTH), "r": (RANK, WIDTH), "d": (WIDTH, RANK), "head": (2, WIDTH)}  # fmt: skip
    arrays = {f"{name}.weight": rng.normal(size=shape) for name, shape in shapes.items()}
    return arrays | {"norm.weight": rng.normal(size=WIDTH)}


@pytest.fixture
def file(state, tmp_path):
    np.savez(tmp_path / "model.npz", **state)
    return tmp_path / "model.npz"


def forward(state, x, energy=None):
    """The network with its own norm, or with a constant energy."""
    x = x @ state["embed.weight"].T
    square = (x**2).mean(axis=-1, keepdims=True) if energy is None else energy
    y = x / np.sqrt(square + 1e-5) * state["norm.weight"]
    x = x + ((y @ state["l.weight"].T) * (y @ state["r.weight"].T)) @ state["d.weight"].T
    return x @ state["head.weight"].T


def test_an_ignored_norm_is_refused(file, tmp_path):
    message = (
        "dialect mine ignores norm.weight, which is a normalisation, by its name; without it the "
        r"model is another function\. Name it in the rule .*norm_weight.* norm_inputs=inputs, .*leave_out"
    )
    with refused(message, tnsim.UnsupportedLayer):
        tnsim.load(file, dialect(tmp_path, ignore=["norm.*"]))
    with refused(r"norm\.weight is a normalisation: .*leave_out", tnsim.UnsupportedLayer):
        tnsim.load(file, dialect(tmp_path))


@pytest.mark.parametrize(
    "name, shape, role",
    [
        ("head.bias", (2,), "is a bias, by its name"),
        ("b_up", (9,), "is a bias, by its name"),
        ("blocks.0.ln_1.weight", (5,), "is a normalisation, by its name"),
        ("final.running_mean_energy_norm", (1,), "is a normalisation, by its name"),
        ("gain", (WIDTH,), "has 4 numbers, one per coordinate: a bias or the gain of a norm"),
    ],
)
def test_norms_and_biases_are_known_by_name_or_role(name, shape, role, state, tmp_path):
    chosen = tnsim.Dialect.from_json(
        dialect(tmp_path, ignore=[name], leave_out=["norm.*"]).read_text()
    )
    with refused(f"ignores {name}, which {role}", tnsim.UnsupportedLayer):
        tnsim.from_state_dict({**state, name: np.ones(shape)}, chosen)


def test_counters_and_numbers_may_be_ignored(state, tmp_path):
    extra = {"step": np.array(7), "norm.num_batches_tracked": np.array([3]), "loss": np.array(0.5)}
    chosen = dialect(tmp_path, ignore=["step", "norm.num*", "loss"], leave_out=["norm.weight"])
    model = tnsim.from_state_dict({**state, **extra}, chosen)
    assert model.origin.ignored == ("step", "norm.num_batches_tracked", "loss")


@pytest.mark.parametrize("where", ["dialect", "call"])
def test_what_is_left_out_is_said_with_every_result(where, file, tmp_path):
    if where == "dialect":
        model = tnsim.load(file, dialect(tmp_path, leave_out=["norm.*"]))
    else:
        model = tnsim.load(file, dialect(tmp_path), leave_out=["norm.weight"])
    said = ("left out: norm.weight",)
    assert model.origin.caveats == said and "left out" in model._repr_html_()
    for verb in (tnsim.similarity, tnsim.slices, tnsim.inner):
        with pytest.warns(tnsim.CaveatWarning, match="not quite the networks .*: left out: norm"):
            value = verb(model, model)
        assert value.caveats == said
    with pytest.warns(tnsim.CaveatWarning) as caught:
        tnsim.log_inner(model, model - 0.5 * model)
    assert caught[0].filename == __file__
    with pytest.warns(tnsim.CaveatWarning):
        assert tnsim.paths(model, model).caveats == said
    tnsim.save(model, tmp_path / "own.safetensors")
    assert tnsim.load(tmp_path / "own.safetensors").origin.caveats == said


def test_what_is_left_out_is_said_of_all_pairs(file, state, tmp_path):
    np.savez(tmp_path / "other.npz", **state | {"head.weight": np.ones((2, WIDTH))})
    files = [file, tmp_path / "other.npz"]
    series = tnsim.load(files, dialect(tmp_path), leave_out=["norm.weight"])
    with pytest.warns(tnsim.CaveatWarning) as caught:
        result = tnsim.pairwise(series, names=["a", "b"], store=tmp_path / "store")
    assert caught[-1].filename == __file__
    assert result.attrs["caveats"] == ["left out: norm.weight"]
    assert tnsim.open_pairwise(tmp_path / "store").attrs["caveats"] == result.attrs["caveats"]


def test_a_model_that_was_read_whole_says_nothing(state):
    whole = {name: array for name, array in state.items() if "norm" not in name}
    chosen = tnsim.Dialect.from_json(json.dumps({"format": 1, "name": "mine", "layers": RULES}))
    model = tnsim.from_state_dict(whole, chosen)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tnsim.similarity(model, model).caveats == ()


def test_a_norm_needs_inputs(file, tmp_path):
    with refused(r"norm stands before layer 1: .*norm_inputs=inputs", tnsim.UnsupportedLayer):
        tnsim.load(file, dialect(tmp_path, normed_rules()))


@pytest.mark.parametrize("inputs", [np.zeros((5, 7)), np.zeros(3), np.zeros((0, 3))])
def test_inputs_that_do_not_fit(inputs, file, tmp_path):
    with refused(r"norms are measured on inputs \(samples, 3\)"):
        tnsim.load(file, dialect(tmp_path, normed_rules()), norm_inputs=inputs)


def test_a_norm_is_folded_at_its_mean_energy(file, state, tmp_path, rng):
    x = rng.normal(size=(300, 3))
    model = tnsim.load(file, dialect(tmp_path, normed_rules()), norm_inputs=x)
    energy = ((x @ state["embed.weight"].T) ** 2).mean()
    assert_close(model(x), forward(state, x, energy), scale=LARGEST, rtol=1e-12)
    expected = forward(state, x)
    error = np.linalg.norm(model(x) - expected) / np.linalg.norm(expected)
    assert_close(model.origin.error, error, rtol=1e-12)
    assert error > 0.05
    assert model.origin.assumptions[-1] == f"norm before layer 1: mean energy {energy:.6g}"
    with pytest.warns(tnsim.CaveatWarning, match=rf"on 300 inputs, .* differ by {error:.2%} of"):
        tnsim.similarity(model, model)
    series = tnsim.load([file, file], dialect(tmp_path, normed_rules()), norm_inputs=x)
    np.testing.assert_array_equal(series[1](x), model(x))


def test_layer_norms_and_their_biases(rng):
    gain, shift = rng.normal(size=(2, 5))
    norm = Norm(True, 1e-3, gain, shift)
    x = rng.normal(size=(4, 5)) + 3.0
    centred = x - x.mean(axis=1, keepdims=True)
    assert_close(norm(x), centred / np.sqrt(centred.var(axis=1) + 1e-3)[:, None] * gain + shift)
    layers = [Normed(tnsim.Bilinear(*(rng.normal(size=s) for s in ((6, 5), (6, 5), (2, 6)))), norm)]
    folded = fold(layers, x[:1])
    assert_close(folded.model(x[:1]), layers[0](x[:1]), rtol=1e-12)
    assert folded.error < 1e-12


def test_a_norm_before_a_product_of_three_maps(rng):
    legs, biases = rng.normal(size=(3, 4, 5)), [rng.normal(size=4), None, None]
    layer = tnsim.Multilinear(list(legs), rng.normal(size=(2, 4)), biases, rng.normal(size=2))
    norm = Norm(True, 1e-5, rng.normal(size=5), rng.normal(size=5))
    x = rng.normal(size=(6, 5))
    folded = fold([Normed(layer, norm)], x)
    y = x - x.mean(1, keepdims=True)
    constant = norm.gain * y / np.sqrt(folded.energies[0] + 1e-5) + norm.shift
    assert_close(folded.model(x), layer(constant), scale=LARGEST)


def test_tokens_stand_for_one_hot_vectors(rng):
    layers = [
        Normed(tnsim.Linear(rng.normal(size=(4, 9)))),
        Normed(tnsim.Linear(np.eye(4)), Norm(False, 0.0)),
    ]
    tokens = rng.integers(9, size=(20, 6))
    found, dense = fold(layers, tokens, 6), fold(layers, np.eye(9)[tokens], 6)
    assert found.energies == dense.energies and found.error == dense.error
    with refused(r"token numbers .* below 9, found int"):
        fold(layers, tokens + 9, 6)
    # As many positions as tokens: a matrix of numbers would do as vectors too.
    square = rng.integers(9, size=(20, 9))
    with refused("say n_ctx=9 for tokens"):
        fold(layers, square)
    assert fold(layers, square, 9).energies == fold(layers, np.eye(9)[square]).energies
    assert fold(layers, square.astype(float)).energies != fold(layers, square, 9).energies
    with refused(r"token numbers .* below 9, found int"):
        fold(layers, square + 9, 9)


def test_the_command_line_says_it_too(file, tmp_path, rng):
    np.save(tmp_path / "x.npy", rng.normal(size=(50, 3)))
    plain, folded = dialect(tmp_path), tmp_path / "folded.json"
    folded.write_text(
        plain.read_text().replace(json.dumps(RULES[1]), json.dumps(normed_rules()[1]))
    )
    done = command("similarity", file, file, "--dialect", plain, check=False)
    assert done.returncode == 2 and "leave_out" in done.stderr
    done = command("similarity", file, file, "--dialect", plain, "--leave-out", "norm.*", "--json")
    assert json.loads(done.stdout)["caveats"] == ["left out: norm.weight"]
    assert "CaveatWarning" in done.stderr
    done = command("inspect", file, "--dialect", plain, "--leave-out", "norm.*")
    assert "caveat      left out: norm.weight" in done.stdout
    done = command("inspect", file, "--dialect", folded, "--norm-inputs", tmp_path / "x.npy")
    assert "norm before layer 1: mean energy" in done.stdout and "% of their size" in done.stdout


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("size", [1e-4, 1.0])
def test_the_epsilon_of_an_rms_norm_is_that_of_the_dtype_of_its_input(dtype, affine, size):
    """Against PyTorch's own forward pass: the error that is stated is the one that is there."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    norm = torch.nn.RMSNorm(6, elementwise_affine=affine)
    net = torch.nn.Sequential(norm, torch.nn.Linear(6, 3)).to(getattr(torch, dtype))
    inputs = size * torch.randn(200, 6, dtype=torch.float64)
    model = tnsim.from_module(net, norm_inputs=inputs)
    with torch.no_grad():
        theirs = net(inputs.to(getattr(torch, dtype))).double().numpy()
    ours = model(inputs.numpy())
    true = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    rounding = 8 * torch.finfo(getattr(torch, dtype)).eps
    assert abs(model.origin.error - true) <= rounding + 1e-9 * true


def test_a_linear_layer_behind_a_norm_of_sequences_is_one_layer():
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.RMSNorm(4), torch.nn.Linear(4, 4))
    model = tnsim.from_module(net, n_ctx=3, norm_inputs=np.ones((2, 3, 4)))
    assert [type(layer) for layer in model.layers] == [tnsim.Linear]


def test_an_rms_norm_among_several_dtypes_is_asked_for_its_epsilon():
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.RMSNorm(6), torch.nn.Linear(6, 3).double())
    with refused(r"0 has eps=None, .* torch.float32, torch.f", tnsim.UnsupportedLayer):
        tnsim.from_module(net, norm_inputs=np.ones((2, 6)))


PLACES = {
    "first": lambda m, x: m.embed(m.norm(x)),
    "behind a layer": lambda m, x: m.head((y := m.embed(x)) + m.norm(m.mix(y))),
    "inside a residual": lambda m, x: m.head((y := m.embed(x)) + m.mix(m.norm(y))),
    "around": lambda m, x: m.head((y := m.norm(m.embed(x))) + m.mix(y)),
    "around a product": lambda m, x: m.head(
        (y := m.norm(m.embed(x))) + m.mix(m.left(y) * m.right(y))
    ),
    "of a side": lambda m, x: m.head(m.mix(y := m.embed(x)) * m.mix(m.norm(y))),
    "last": lambda m, x: m.norm(m.embed(x)),
    "twice": lambda m, x: m.head(m.norm(m.norm(m.embed(x)))),
}


@pytest.mark.sampled(quick=1, slow=24)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", "Written"])
@pytest.mark.parametrize("place", PLACES)
def test_norms_with_and_without_weights_are_seen_and_named(kind, place, affine):
    torch = pytest.importorskip("torch")
    from module_cases import Module

    torch.manual_seed(0)
    nn = torch.nn
    inputs = torch.randn(50, 4, dtype=torch.float64)

    parts = {name: nn.Linear(4, 4) for name in ("embed", "mix", "head", "left", "right")}

    class Written(nn.Module):  # by hand
        def __init__(self):
            super().__init__()
            self.register_buffer("eps", torch.tensor(1e-5))

        def forward(self, x):
            y = x - x.mean(-1, keepdim=True)
            return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)

    norm = Written() if kind == "Written" else getattr(nn, kind)(4, elementwise_affine=affine)
    for weights in norm.parameters():
        nn.init.normal_(weights)
    net = Module(PLACES[place], **parts, norm=norm)
    if place in ("behind a layer", "of a side"):
        with refused(rf"norm \({kind}\)", tnsim.UnsupportedLayer):
            tnsim.from_module(net, norm_inputs=inputs)
        return
    with refused("a norm stands before layer", tnsim.UnsupportedLayer):
        tnsim.from_module(net)
    model = tnsim.from_module(net, norm_inputs=inputs)
    theirs = net.double()(inputs).detach().numpy()
    true = np.linalg.norm(model(inputs.numpy()) - theirs) / np.linalg.norm(theirs)
    assert_close(model.origin.error, true, rtol=1e-6, limited_by="the eps of RMSNorm, 1e-7")
    # On a single input the energy is that of the input.
    single = tnsim.from_module(net, norm_inputs=inputs[:1])
    assert_close(single(inputs[:1].numpy()), theirs[:1], scale=LARGEST, rtol=1e-6, limited_by="eps")


def test_one_pattern_to_leave_out_is_one_pattern(state, tmp_path):
    """The letters of "*bias", taken one by one, would begin with a pattern of every name."""
    names = {"head.bias": np.ones(2), "norm.weight": state["norm.weight"]}
    for folder in ("surplus", "sound"):
        extra = {"more": np.ones((2, 2))} if folder == "surplus" else {}
        (tmp_path / folder).mkdir()
        np.savez(tmp_path / folder / "step_1.npz", **{**state, **names, **extra})
    chosen = dialect(tmp_path, normed_rules())
    calls = [
        lambda folder: tnsim.load(tmp_path / folder / "step_1.npz", chosen, leave_out="*bias", norm_inputs=np.ones((2, 3))),
        lambda folder: tnsim.load(tmp_path / folder, chosen, leave_out="*bias", norm_inputs=np.ones((2, 3)))[0],
        lambda folder: tnsim.Series([tmp_path / folder / "step_1.npz"], chosen, leave_out="*bias", norm_inputs=np.ones((2, 3)))[0],
        lambda folder: tnsim.from_state_dict(dict(np.load(tmp_path / folder / "step_1.npz")), chosen, leave_out="*bias", norm_inputs=np.ones((2, 3))),
    ]  # fmt: skip
    for call in calls:
        assert call("sound").origin.caveats[0] == "left out: head.bias"
        with refused("does not account for more;", tnsim.CheckpointError):
            call("surplus")
    with refused(
        r"leave_out names \w+\.weight.*, which the dialect mine reads", tnsim.CheckpointError
    ):
        tnsim.load(tmp_path / "sound" / "step_1.npz", chosen, leave_out="*")
    with pytest.warns(tnsim.CaveatWarning, match="fits no tensor by '\\*bais'"):
        tnsim.load(tmp_path / "sound" / "step_1.npz", chosen, leave_out=["*bias", "*bais"], norm_inputs=np.ones((2, 3)))  # fmt: skip
    own = tmp_path / "own.safetensors"
    tnsim.save(calls[0]("sound"), own)
    with refused("leave_out= .* is for foreign files", tnsim.CheckpointError):
        tnsim.load(own, leave_out="*bias")
    for wrong in (3, [3], None):
        with refused("leave_out lists patterns of names", tnsim.CheckpointError):
            tnsim.load(tmp_path / "sound" / "step_1.npz", chosen, leave_out=wrong)


def test_inputs_for_norms_that_are_not_there_are_refused(tmp_path, rng):
    own = tmp_path / "own.safetensors"
    tnsim.save(tnsim.Model([tnsim.Linear(rng.normal(size=(2, 3)))]), own)
    for read in (tnsim.load, lambda path, **options: tnsim.load([path], **options)[0]):
        with refused(r"norm_inputs= .* has none"):
            read(own, norm_inputs=np.ones((2, 3)))
