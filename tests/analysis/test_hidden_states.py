"""Layer against layer: states that hooks see, and measures between all parts of two networks."""

import numpy as np
import pytest
from closeness import LARGEST, assert_close
from oracles import bilinear, linear_cka
from refusals import refused

import tnsim
from tnsim.analysis.baselines import BATCH
from tnsim.engine import planner
from tnsim.engine.runtime import devices

torch = pytest.importorskip("torch", reason="hidden states are those of modules")
from module_cases import Module  # noqa: E402
from torch import nn  # noqa: E402


class Net(nn.Module):
    """Blocks in a list, one activation called twice, a part in place and one that is never called."""

    def __init__(self, width, blocks=2):
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5), nn.ReLU(inplace=True))
            for _ in range(blocks)
        )
        self.act, self.head, self.unused = nn.Tanh(), nn.Linear(width, 3), nn.Linear(1, 1)

    def forward(self, tokens):
        x = self.act(self.embed(tokens))
        for block in self.blocks:
            x = x + block(x)
        return {"loss": None, "logits": self.head(self.act(x))}


@pytest.fixture
def nets():
    torch.manual_seed(0)
    return Net(6).eval(), Net(9, 1).eval()


@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda net: torch.jit.trace(net, torch.ones(2, 3))]
)
def test_programs_of_torchscript_show_no_parts(make, rng):
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), rng.normal(size=(5, 3))
    program = make(net)
    verbs = (tnsim.hidden_states, program, x), (tnsim.layer_similarity, net, program, x)
    for verb, *given in verbs:
        with refused(r"TorchScript program keeps.*its state_dict\(\)"):
            verb(*given)
    states = tnsim.hidden_states(nn.Sequential(program, nn.Tanh()), x)
    assert list(states) == ["1"]


@pytest.fixture
def tokens(rng):
    return rng.integers(0, 7, size=(40, 5))


def test_states_are_those_of_the_forward_pass(nets, tokens):
    net = nets[0]
    with torch.no_grad():
        states = {"embed": net.embed(torch.tensor(tokens))}
        x = states["act"] = states["embed"].tanh()
        for n, block in enumerate(net.blocks):
            states[f"blocks.{n}.0"] = block[0](x)
            states[f"blocks.{n}.2"] = states[f"blocks.{n}.0"].relu()
            x = x + states[f"blocks.{n}.2"]
        states["act (2)"] = x.tanh()
        states["head"] = net.head(states["act (2)"])
    found = tnsim.hidden_states(net, tokens)
    assert list(found) == list(states)
    for name, wanted in states.items():
        assert_close(found[name], wanted.numpy(), rtol=1e-6, limited_by="float32 of the module")
    chosen = tnsim.hidden_states(net, tokens, ["blocks.*.2", "head"])
    assert list(chosen) == ["blocks.0.2", "blocks.1.2", "head"]
    assert not any(part._forward_hooks for part in net.modules())


def test_a_container_goes_by_the_name_that_is_asked_for(nets, tokens):
    """Blocks hand on the output of their last part, and are parts of the network all the same."""
    every = tnsim.hidden_states(nets[0], tokens)
    found = tnsim.hidden_states(nets[0], tokens, ["blocks.[01]", "head"])
    assert list(found) == ["blocks.0", "blocks.1", "head"]
    for n in range(2):
        assert (found[f"blocks.{n}"] == every[f"blocks.{n}.2"]).all()
    shown = tnsim.layer_similarity(*nets, tokens, layers="blocks.?")
    assert shown.a.values.tolist() == ["blocks.0", "blocks.1"]


def test_a_container_called_twice_has_the_states_of_both_calls(rng):
    block = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    found = tnsim.hidden_states(nn.Sequential(block, block), x := rng.normal(size=(3, 2)), "0*")
    assert list(found) == ["0.0", "0.1", "0.0 (2)", "0.1 (2)"]
    chosen = tnsim.hidden_states(nn.Sequential(block, block), x, ["0", "0 (2)"])
    assert [np.array_equal(chosen[n], found[m]) for n, m in (("0", "0.1"), ("0 (2)", "0.1 (2)"))]


@pytest.mark.parametrize("order", [1, -1])
def test_batches_agree_on_what_a_container_is(order):
    """In place, ReLU changes nothing in the batch of positive inputs."""
    x = np.linspace(-1, 3, 2 * BATCH)[::order, None]
    found = tnsim.hidden_states(nn.Sequential(nn.Tanh(), nn.ReLU(inplace=True)), x)
    assert list(found) == ["0", "1"]
    assert_close(found["1"], np.tanh(x).clip(0), rtol=1e-12, limited_by="two tanh")


def test_every_part_against_every_part(nets, tokens):
    found = tnsim.layer_similarity(*nets, tokens)
    first, second = (tnsim.hidden_states(net, tokens) for net in nets)
    assert found.dims == ("a", "b") and found.name == "cka" and found.attrs["debiased"] == 1
    assert found.a.values.tolist() == list(first) and found.b.values.tolist() == list(second)
    wanted = [[linear_cka(x, y) for y in second.values()] for x in first.values()]
    assert_close(found.values, np.array(wanted), scale=1.0, rtol=1e-10)
    own = tnsim.layer_similarity(nets[0], nets[0], tokens)
    assert_close(np.diag(own), np.ones(len(first)), rtol=1e-12)
    cosine = tnsim.baselines.output_cosine
    heads = tnsim.layer_similarity(*nets, tokens, cosine, layers="head")
    x, y = first["head"].ravel(), second["head"].ravel()
    assert_close(heads.item(), x @ y / np.sqrt((x @ x) * (y @ y)), rtol=1e-12)


@pytest.mark.parametrize("held", [1, 5000, 40000])
def test_states_that_do_not_fit_at_once(nets, tokens, monkeypatch, held):
    """Forward passes on one input or a few, and the states of one part or a few at a time."""
    whole, states = tnsim.layer_similarity(*nets, tokens), tnsim.hidden_states(nets[0], tokens)
    monkeypatch.setattr("tnsim.analysis.hidden_states._HELD_BYTES", held)
    found = tnsim.layer_similarity(*nets, tokens)
    assert found.a.equals(whole.a) and found.b.equals(whole.b)
    # Batches of another size round otherwise.
    assert_close(found.values, whole.values, rtol=1e-5, limited_by="float32 of the modules")
    for name, some in tnsim.hidden_states(nets[0], tokens).items():
        assert_close(some, states[name], rtol=1e-5, scale=LARGEST, limited_by="float32")
    monkeypatch.setattr(devices, "available_bytes", lambda compiles: 0)
    monkeypatch.setattr(planner, "_ALWAYS_FITS", 0)
    for verb, given, what in (
        (tnsim.layer_similarity, nets, r"the states of \d+ parts in a measure"),
        (tnsim.hidden_states, nets[:1], "the hidden states"),
    ):
        said = f"{what}.* GiB on these inputs.*by layers=, or give fewer inputs"
        with refused(said, tnsim.TooLarge):
            verb(*given, tokens)


def test_a_measure_of_ones_own_reads_inputs_in_any_order(nets, tokens):
    def every_other(functions, rows, seed):
        return tnsim.baselines.cka(functions, rows[::-2], seed=seed)

    found = tnsim.layer_similarity(*nets, tokens, every_other)
    wanted = tnsim.layer_similarity(*nets, tokens[::-2])
    assert_close(found.values, wanted.values, rtol=1e-5, limited_by="float32 of the modules")


def placed():
    """Embeddings of tokens and of places, which are the same for every input."""

    def forward(m, tokens):
        places = torch.arange(tokens.shape[1]).expand(tokens.shape)
        return m.head(m.tokens(tokens) + m.places(places))

    tokens, places = nn.Embedding(7, 4), nn.Embedding(5, 4)
    return Module(forward, tokens=tokens, places=places, head=nn.Linear(4, 2))


def test_parts_that_are_the_same_for_all_inputs_have_no_cka(tokens):
    nets = [placed() for _ in range(2)]
    assert list(tnsim.hidden_states(nets[0], tokens)) == ["tokens", "places", "head"]
    found = tnsim.layer_similarity(*nets, tokens)
    assert found.a.values.tolist() == found.b.values.tolist() == ["tokens", "head"]
    cosines = tnsim.layer_similarity(*nets, tokens, tnsim.baselines.output_cosine, layers="places")
    assert cosines.shape == (1, 1)
    with refused("places give the same for all inputs"):
        tnsim.layer_similarity(*nets, tokens, layers="places")


def test_models_and_checkpoints(rng, tmp_path):
    models = [
        tnsim.Model([bilinear(rng, 3, 4, width, True), bilinear(rng, width, 4, 2, True)])
        for width in (3, 5)
    ]
    for name, model in zip("ab", models, strict=True):
        tnsim.save(model, tmp_path / f"{name}.safetensors")
    x = rng.normal(size=(60, 3))
    found = tnsim.layer_similarity(*models, x)
    assert found.a.values.tolist() == ["layer 0", "layer 1"]
    states = [[tnsim.Model(model.layers[:1])(x), model(x)] for model in models]
    wanted = [[linear_cka(np.asarray(p), np.asarray(q)) for q in states[1]] for p in states[0]]
    assert_close(found.values, np.array(wanted), scale=1.0, rtol=1e-10)
    files = tnsim.layer_similarity(tmp_path / "a.safetensors", tmp_path / "b.safetensors", x)
    assert files.identical(found)
    drawn = tnsim.layer_similarity(*models, 50, seed=3)
    again = tnsim.layer_similarity(*models, np.random.default_rng(3).normal(size=(50, 3)))
    assert drawn.equals(again)
    with refused("at least one input is needed, found n = 0"):
        tnsim.layer_similarity(*models, 0)
    with refused("memory does not hold", tnsim.TooLarge):
        tnsim.layer_similarity(*models, 10**30)
    with refused("the seed must be 0 or more"):
        tnsim.layer_similarity(*models, x, seed=-1)
    with refused(r"layers of a module.*found Combination"):
        tnsim.layer_similarity(models[0] - models[0], models[1], 5)


def test_models_read_token_ids_and_refuse_inputs_of_another_shape(rng):
    layers = tnsim.Linear(rng.normal(size=(3, 4))), bilinear(rng, 3, 2, 2)
    model, tokens = tnsim.Model(layers, n_ctx=2), rng.integers(0, 4, size=(5, 2))
    found = tnsim.hidden_states(model, tokens)
    for name, states in tnsim.hidden_states(model, np.eye(4)[tokens]).items():
        assert_close(found[name], states, scale=LARGEST, rtol=1e-14)
    vectors = tnsim.Model(layers)
    assert list(tnsim.hidden_states(vectors, np.ones((5, 4), int))) == ["layer 0", "layer 1"]
    for x in (np.ones(4), np.ones((5, 3))):
        with refused(r"read inputs of shape \(n, 4\)"):
            tnsim.hidden_states(vectors, x)


def test_a_picture_and_what_is_refused(nets, tokens):
    found = tnsim.layer_similarity(*nets, tokens)
    axes = tnsim.figures.layer_by_layer(found, "two nets").axes[0]
    assert axes.get_title() == "two nets"
    assert [label.get_text() for label in axes.get_yticklabels()] == found.a.values.tolist()
    states, between = tnsim.hidden_states, tnsim.layer_similarity
    for message, verb, *given in [
        (r"one network.* layer_similarity\(a, b, inputs\)", states, *nets, tokens),
        ("no part is called nope; there are embed, act", states, nets[0], tokens, "nope"),
        ("of shape", between, *nets, tokens, tnsim.baselines.output_cosine),
        ("this measure compares weights", between, *nets, tokens, tnsim.baselines.weight_cosine),
        ("give inputs as an array", between, *nets, 100),
        ("a module, a model or a file of one, found int", states, 3, tokens),
        ("has no parts with outputs", states, nn.Linear(2, 2), np.ones((5, 2))),
        ("is in training mode", states, Net(4), tokens),
    ]:
        with refused(message):
            verb(*given)
