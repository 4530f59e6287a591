"""Adapters over a base, beside PEFT's own merged weights and its own forward pass."""

import copy
import json

import numpy as np
import pytest
from closeness import LARGEST, assert_close
from optional import skip_without
from refusals import refused
from transformer_cases import library_module, library_settings

import tnsim

torch = pytest.importorskip("torch")
skip_without("peft", "transformers")
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = [  # of the libraries, about themselves
    pytest.mark.filterwarnings("ignore::Warning:peft"),
    pytest.mark.filterwarnings("ignore::Warning:transformers"),
]


def network():
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 3)
    return nn.Sequential(*layers).double()


def transformer(kind):
    torch.manual_seed(0)
    settings = library_settings(8, groups=1)[kind] | {"tie_word_embeddings": kind == "gpt2"}
    return library_module(settings).double().eval()


def adapted(base, seed=1, **settings):
    """A base with an adapter whose weights are no longer those of its start."""
    import peft

    settings = {"r": 3, "lora_alpha": 5, **settings}
    model = peft.get_peft_model(base, peft.LoraConfig(**settings)).double().eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.requires_grad:
                weights.add_(0.3 * torch.randn_like(weights))
    return model


def saved(model, base, folder):
    """Folders of the base and of the adapter, which names the base."""
    where = folder / "base"
    if isinstance(base, nn.Sequential):
        where.mkdir(exist_ok=True)
        state = {name: value.contiguous() for name, value in base.state_dict().items()}
        save_file(state, where / "model.safetensors")
    else:
        base.save_pretrained(where)
    model.peft_config["default"].base_model_name_or_path = str(where)
    # PEFT would ask the hub whether embeddings were resized.
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return folder / "adapter"


def loaded(folder, net):
    model = tnsim.load(folder, net)
    assert isinstance(model, tnsim.Model)
    return model


SETTINGS = {
    "rslora": {"target_modules": ["0", "4"], "use_rslora": True},
    "plain": {"target_modules": ["0", "2", "4"]},
    "patterns": {
        "target_modules": ["0", "2", "4"],
        "rank_pattern": {"2": 2, "^4": 1},
        "alpha_pattern": {"0|4": 7},
    },
    "saved": {"target_modules": ["0"], "modules_to_save": ["4"]},
    "biases": {"target_modules": ["0", "2"], "bias": "all"},
    "lora bias": {"target_modules": ["0", "2"], "lora_bias": True},
    "dora": {"target_modules": ["0", "2", "4"], "use_dora": True},
}


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("case", SETTINGS)
def test_adapters_of_a_plain_module(case, tmp_path, rng):
    """A module, its file and its parts by name are the network that PEFT runs."""
    model = adapted(network(), **SETTINGS[case])
    folder = saved(model, network(), tmp_path)
    x = rng.normal(size=(7, 4))
    with torch.no_grad():
        expected = model(torch.as_tensor(x)).numpy()
        merged = tnsim.from_module(model)
        assert np.abs(network()(torch.as_tensor(x)).numpy() - expected).max() > 0.01
    assert_close(merged(x), expected, scale=LARGEST)
    read = loaded(folder, network())
    assert_close(read(x), expected, scale=LARGEST)
    assert read.origin is not None
    assert any(str(tmp_path / "base") in told for told in read.origin.assumptions)
    assert_close(loaded(folder, model)(x), expected, scale=LARGEST)
    # The base in the same folder, where the one that is named is not there.
    (tmp_path / "base" / "model.safetensors").rename(folder / "model.safetensors")
    (tmp_path / "base").rmdir()
    assert_close(loaded(folder, network())(x), expected, scale=LARGEST)


TRANSFORMERS = {
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "llama": {"target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]},
    "llama, embeddings": {"target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    "llama, dora": {"target_modules": ["q_proj", "gate_proj"], "use_dora": True},
    "gpt2, dora": {"target_modules": ["c_attn"], "use_dora": True, "fan_in_fan_out": True},
    "llama, saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.sampled(quick=0)
@pytest.mark.parametrize("case", TRANSFORMERS)
def test_adapters_of_transformers(case, tmp_path, rng):
    """Parts of the adapter's folder and of the PeftModel are parts of the merged transformer."""
    kind = case.partition(",")[0]
    model = adapted(transformer(kind), **TRANSFORMERS[case])
    folder = saved(model, transformer(kind), tmp_path)
    expected = tnsim.parts(model.merge_and_unload())
    fresh = adapted(transformer(kind), **TRANSFORMERS[case])
    for found in (tnsim.parts(folder), tnsim.parts(fresh)):
        assert list(found) == list(expected)
        for label in expected:
            x = rng.normal(size=(3, expected[label].d_in))
            assert_close(found[label](x), expected[label](x), scale=LARGEST)


@pytest.mark.slow
def test_pairs_of_adapters(tmp_path):
    """Folders of a run are a series: each is the base with the adapter of its step."""
    models = [adapted(network(), seed, target_modules=["0", "4"]) for seed in range(3)]
    for step, model in enumerate(models):
        saved(model, network(), tmp_path)
        (tmp_path / "adapter").rename(tmp_path / f"checkpoint-{step}")
    (tmp_path / "run").mkdir()
    for step in range(3):
        place = tmp_path / f"checkpoint-{step}"
        place.rename(tmp_path / "run" / place.name)
    expected = tnsim.pairwise([tnsim.from_module(model) for model in models])
    for source in (tmp_path / "run", sorted((tmp_path / "run").iterdir())):
        found = tnsim.pairwise(source, dialect=network())
        assert_close(found.similarity.values, expected.similarity.values)


def test_an_adapter_has_moved_weights_of_its_base(rng):
    base = transformer("llama")
    model = adapted(copy.deepcopy(base), target_modules=["q_proj", "down_proj"])
    tokens = rng.integers(0, 11, (5, 6))
    found = tnsim.change(base, model, tnsim.Empirical(tokens))
    moved = {f"model.layers.{n}.{part}" for n in range(2) for part in ("self_attn", "mlp")}
    put_back = dict(zip(found.components, found.removed, strict=True))
    assert {name for name, value in put_back.items() if value} == moved
    with torch.no_grad():
        first, second = (net(torch.as_tensor(tokens)).logits.numpy() for net in (base, model))
    assert_close(found.total, ((second - first) ** 2).sum() / 5)


def test_disabled_and_merged_adapters(rng):
    model = adapted(network(), target_modules=["0", "4"])
    x = rng.normal(size=(5, 4))
    with torch.no_grad():
        with model.disable_adapter():
            assert_close(tnsim.from_module(model)(x), network()(torch.as_tensor(x)).numpy())
        expected = model(torch.as_tensor(x)).numpy()
        model.merge_adapter()
        assert_close(tnsim.from_module(model)(x), expected, scale=LARGEST)


def test_an_adapter_is_in_one_of_the_layers_that_share_weights(tmp_path, rng):
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)).double()
    net[2].weight = net[0].weight
    model = adapted(copy.deepcopy(net), target_modules=["2"])
    weights = next(one for one in model.parameters() if one.requires_grad)
    model.kept = {"made": [2 * weights]}  # as PEFT keeps adapters that are tied
    x = rng.normal(size=(5, 3))
    with torch.no_grad():
        assert_close(tnsim.from_module(model)(x), model(torch.as_tensor(x)).numpy(), scale=LARGEST)
    found = tnsim.change(net, model, tnsim.Empirical(x))
    assert found.components == ("0", "2")
    assert found.removed[0] == 0
    with torch.no_grad():
        moved = (model(torch.as_tensor(x)) - net(torch.as_tensor(x))).numpy()
    assert_close(found.removed[1], (moved**2).sum() / 5)
    folder = saved(model, nn.Sequential(), tmp_path)
    state = {name: value for name, value in net.state_dict().items() if name != "0.weight"}
    save_file(state, tmp_path / "base" / "model.safetensors")
    with refused("one of 0.weight and 2.weight, which are one tensor", tnsim.CheckpointError):
        tnsim.load(folder, net)


class Transposed(nn.Module):
    """A network that reads the weights of a layer once more, outside of the layer."""

    def __init__(self, activation):
        super().__init__()
        self.into = nn.Linear(3, 4)
        self.activation = activation

    def forward(self, x):
        return nn.functional.linear(self.activation(self.into(x)), self.into.weight.T)


def base_and_adapter(net, folder, **settings):
    """A network with an adapter, and their two folders."""
    model = adapted(copy.deepcopy(net), **settings)
    there = saved(model, nn.Sequential(), folder)
    save_file(net.state_dict(), folder / "base" / "model.safetensors")
    return model, [folder / "base", there]


def test_weights_that_are_read_outside_of_an_adapted_layer_are_refused(tmp_path):
    net = Transposed(nn.Identity()).double()
    model, folders = base_and_adapter(net, tmp_path, target_modules=["into"])
    with refused("reads weights of adapted layers outside .* outputs of the PeftModel"):
        tnsim.from_module(model)
    with refused("reads weights of adapted layers outside .* outputs of the PeftModel"):
        tnsim.load(folders[1], net)


def test_weights_that_are_read_outside_of_an_adapted_layer_are_of_the_base_on_inputs(tmp_path, rng):
    net, metric = Transposed(nn.Softmax(-1)).double(), tnsim.Empirical(rng.normal(size=(5, 3)))
    model, folders = base_and_adapter(net, tmp_path, target_modules=["into"])
    found = tnsim.pairwise(folders, metric, dialect=net)
    assert_close(found.similarity.values[0, 1], float(tnsim.similarity(net, model, metric)))
    with refused("reads weights of adapted layers outside"):
        tnsim.change(net, model, metric)


def test_weights_that_are_saved_with_an_adapter_are_read_outside_of_their_layer(tmp_path, rng):
    net = Transposed(nn.Identity()).double()
    net.more = nn.Linear(3, 3)
    settings = {"target_modules": ["more"], "modules_to_save": ["into"]}
    model, folders = base_and_adapter(net.double(), tmp_path, **settings)
    x = rng.normal(size=(5, 3))
    with torch.no_grad():
        assert_close(loaded(folders[1], net)(x), model(torch.as_tensor(x)).numpy())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "LOHA"}, "kind 'LOHA'"),
        ({"init_lora_weights": "pissa"}, "changes the base before training"),
        ({"some_new_setting": 3}, "some_new_setting = 3 of the adapter is not known"),
        ({"target_parameters": ["w"]}, "target_parameters"),
        ({"use_dora": True}, "use_dora and the tensors"),
        ({"r": 5}, "rank 5 of 0 .* and 3 by its tensor"),
        ({"lora_alpha": "x"}, "lora_alpha of 0 is 'x'"),
        ({"rank_pattern": {"(a+)+b*": 3}}, "too involved"),
        ({"rank_pattern": {"(": 3}}, "is no pattern"),
        ({"base_model_name_or_path": "no/where"}, "is an adapter of no/where"),
        ({"base_model_name_or_path": 3}, "names no base"),
        ({"base_model_name_or_path": "../adapter"}, "is an adapter of ../adapter"),
    ],
)
def test_settings_that_are_not_known_are_refused(change, words, tmp_path):
    folder = saved(adapted(network(), target_modules=["0", "4"]), network(), tmp_path)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with refused(words, tnsim.CheckpointError):
        tnsim.load(folder, network())


def test_tensors_without_a_place_are_refused(tmp_path):
    folder = saved(adapted(network(), target_modules=["0", "4"]), network(), tmp_path)
    file = folder / "adapter_model.safetensors"
    state = load_file(file)
    first = "base_model.model.0.lora_A.weight"
    for more, words in (
        ({"base_model.model.9.lora_A.weight": state[first].clone()}, "9 has tensors lora_A"),
        ({"base_model.model.0.lora_C.weight": state[first].clone()}, "no known meaning"),
        ({"prompt_embeddings": state[first].clone()}, "no part of a LoRA adapter"),
        ({first: state[first].T.contiguous()}, "by its tensor"),
        ({first: state[first][:, :3].contiguous()}, "another shape"),
    ):
        save_file(state | more, file)
        with refused(words, tnsim.CheckpointError):
            tnsim.load(folder, network())
    save_file(state, file)
    base = load_file(tmp_path / "base" / "model.safetensors")
    base["0.weight"] = base["0.weight"].to(torch.int8)
    save_file(base, tmp_path / "base" / "model.safetensors")
    with refused("dequantise the base", tnsim.CheckpointError):
        tnsim.load(folder, network())


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["wte"]},
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "modules_to_save": ["wte"]},
    ],
)
def test_shared_embeddings_are_refused(settings, tmp_path):
    model = adapted(transformer("gpt2"), **settings)
    folder = saved(model, transformer("gpt2"), tmp_path)
    with refused("shares with its lm_head", tnsim.CheckpointError):
        tnsim.parts(folder)


@pytest.mark.filterwarnings("ignore::tnsim.CaveatWarning")
def test_a_head_that_the_base_holds_is_its_own(tmp_path):
    """Where the configuration does not say whether the tables are tied, the file does."""
    model = adapted(transformer("llama"), target_modules=["embed_tokens"])
    folder = saved(model, transformer("llama"), tmp_path)
    found = tnsim.parts(folder, "direct")["direct"]
    file = tmp_path / "base" / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("tie_word_embeddings") is False
    file.write_text(json.dumps(config))
    silent = tnsim.parts(folder, "direct")["direct"]
    assert_close(tnsim.similarity(silent, found), 1.0, rtol=1e-12)
    base = tnsim.parts(tmp_path / "base", "direct")["direct"]
    assert tnsim.similarity(silent, base) < 0.999
