"""Parts of modules of Hugging Face's library held to the modules themselves, which users may have changed."""

import copy

import numpy as np
import pytest
from closeness import assert_close
from optional import skip_without
from refusals import refused
from transformer_cases import library_module, library_settings

import tnsim

torch = pytest.importorskip("torch")
skip_without("transformers")

from tnsim.circuits.transformer import LAYOUTS, Transformer  # noqa: E402

SETTINGS = library_settings(8, groups=1)
SETTINGS["gpt_neox"] = SETTINGS["gpt_neox"] | {"rotary_pct": 0.5}


@pytest.fixture(scope="module")
def modules():
    torch.manual_seed(0)
    return {name: library_module(settings) for name, settings in SETTINGS.items()}


def doubled(module, arguments, result):
    return (2 * result[0], *result[1:]) if isinstance(result, tuple) else 2 * result


def replace(name, value):
    """An edit that gives submodules another attribute, where they have it."""

    def edit(net):
        for child in net.modules():
            if hasattr(child, name):
                setattr(child, name, value(getattr(child, name)))

    return edit


class FarOut(torch.nn.Module):
    """An activation that is another one at numbers that are rare."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation

    def forward(self, x):
        return torch.where(x > 30, 0 * x, self.activation(x))


EDITS = {
    "activation far out": (
        ("gpt2", "llama", "gemma", "opt"),
        lambda net: [replace(name, FarOut)(net) for name in ("act", "act_fn", "activation_fn")],
        "act",
    ),
    "activation": (
        ("gpt2", "llama", "gemma"),
        lambda net: [replace(name, lambda _: torch.nn.Tanh())(net) for name in ("act", "act_fn")],
        "mlp parts",
    ),
    "form of GELU": (("gpt2",), replace("act", lambda _: torch.nn.GELU()), "mlp parts"),
    "hook on an MLP": (
        ("gpt2", "gpt_neox", "qwen2"),
        lambda net: [
            child.register_forward_hook(doubled)
            for path, child in net.named_modules()
            if path.endswith("1.mlp")
        ],
        "1.mlp of this",
    ),
    "hook on the last map of an MLP": (
        ("opt",),
        lambda net: net.model.decoder.layers[1].fc2.register_forward_hook(doubled),
        "layers.1.fc2",
    ),
    "hook on a head": (
        ("llama",),
        lambda net: net.model.layers[0].self_attn.v_proj.register_forward_hook(doubled),
        "qk and ov parts",
    ),
    "scale of scores": (
        ("llama", "mistral", "qwen2", "gemma", "gpt_neox", "gpt2", "opt"),
        replace("scaling", lambda scale: 2 * scale),
        "qk and ov parts",
    ),
    "frequencies": (
        ("llama", "gpt_neox"),
        replace("inv_freq", lambda frequencies: frequencies / 2),
        "qk and ov parts",
    ),
    "constant of norms": (
        ("llama", "mistral"),
        replace("variance_epsilon", lambda _: 0.5),
        "parts",
    ),
    "logits": (
        ("gpt2", "llama"),
        lambda net: net.lm_head.register_forward_hook(doubled),
        "direct parts",
    ),
    "embeddings": (
        ("gpt2", "llama"),
        lambda net: net.get_input_embeddings().register_forward_hook(doubled),
        "direct parts",
    ),
}


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_module_as_it_was_made_has_its_parts(name, modules):
    state = {key: value.clone() for key, value in modules[name].state_dict().items()}
    modules[name].train()
    parts = tnsim.parts(modules[name])
    assert {label.split()[-1] for label in parts if parts[label]} == {"qk", "ov", "mlp", "direct"}
    assert all(child.training for child in modules[name].modules())
    assert all(torch.equal(state[key], value) for key, value in modules[name].state_dict().items())


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_model_without_its_head_has_the_direct_path_of_its_tied_table(as_dict, modules):
    net = copy.deepcopy(modules["gpt2"])
    net.config.return_dict = as_dict
    x = np.eye(13)
    expected = tnsim.parts(modules["gpt2"])["direct"](x)
    assert_close(tnsim.parts(net.transformer)["direct"](x), expected)


def test_heads_through_embeddings_are_those_of_the_module(modules):
    net = copy.deepcopy(modules["gpt2"])
    net.get_input_embeddings().register_forward_hook(doubled)
    with refused("embedding of this GPT2LMHeadModel.*something else", tnsim.UnsupportedLayer):
        tnsim.heads(net, modules["gpt2"], through="embedding")


@pytest.mark.parametrize("window", [2, 7, 4096])
@pytest.mark.parametrize("layout", ["mistral", "qwen2"])
def test_windows_of_keys_are_no_part(layout, window):
    import transformers

    settings = SETTINGS[layout] | {"sliding_window": window}
    if layout == "qwen2":
        settings |= {"use_sliding_window": True, "max_window_layers": 1}
    made = transformers.AutoConfig.for_model(**settings)
    for attention in ("eager", "sdpa"):
        net = transformers.AutoModelForCausalLM.from_config(made, attn_implementation=attention)
        parts = tnsim.parts(net, ["qk", "ov"])
        assert all(parts[label] for label in parts)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize(
    ("edit", "name"), [(edit, name) for edit, (names, _, _) in EDITS.items() for name in names]
)
def test_a_module_that_computes_something_else_is_refused_by_name_and_place(edit, name, modules):
    net = copy.deepcopy(modules[name])
    _, apply, place = EDITS[edit]
    apply(net)
    parts = tnsim.parts(net)
    with refused("something else", tnsim.UnsupportedLayer) as refusal:
        for label in parts:
            parts[label]
    assert place in str(refusal.value)


def test_parts_that_an_edit_does_not_reach_are_still_read(modules):
    net = copy.deepcopy(modules["llama"])
    net.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    parts, before = tnsim.parts(net), tnsim.parts(modules["llama"])
    assert_close(tnsim.similarity(parts["layer 1 mlp"], before["layer 1 mlp"]), 1.0)
    assert tnsim.heads(net, modules["llama"], "qk").similarity.shape == (4, 4)
    with refused(r"layers\.0\.mlp", tnsim.UnsupportedLayer):
        parts["layer 0 mlp"]


def test_weights_of_half_precision_and_wrapped_modules(modules):
    net = copy.deepcopy(modules["gpt2"]).to(torch.bfloat16)
    assert np.isfinite(tnsim.parts(net)["layer 1 mlp"](np.ones(8))).all()
    tnsim.parts(net)["direct"]


def test_windows_of_layers_are_the_same_by_their_kinds_and_by_their_number():
    """Releases of the library write which layers have a window in either form."""
    sizes = {
        "model_type": "qwen2",
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "hidden_act": "silu",
        "use_sliding_window": True,
        "sliding_window": 5,
    }
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    forms = ({"max_window_layers": 1}, {"layer_types": kinds, "max_window_layers": 28})
    one, two = (Transformer(LAYOUTS["qwen2"], {}, {**sizes, **form}) for form in forms)
    assert [one.window(i) for i in range(3)] == [None, 5, 5]
    assert one.settings == two.settings


def test_modules_in_a_wrapper_have_the_parts_of_the_module_inside(modules):
    wrapped = torch.nn.DataParallel(modules["llama"])
    inside = tnsim.parts(modules["llama"])["layer 1 head 0 ov"]
    assert_close(tnsim.parts(wrapped)["layer 1 head 0 ov"](np.eye(8)), inside(np.eye(8)), rtol=0)
