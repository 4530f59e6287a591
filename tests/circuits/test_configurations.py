"""Configurations as files hold them, read as Hugging Face's library computes them or refused by name.

Each configuration makes a small random module of the library, and parts are made of its tensors and of the
configuration as it was written, without the library. They are then held to the module's own blocks.
"""

import copy

import pytest
from optional import skip_without
from refusals import refused
from transformer_cases import library_module, library_settings, module

import tnsim
from tnsim.circuits.parts import Parts, PartsOfModule
from tnsim.circuits.standard_parts import KINDS, StandardParts, View
from tnsim.circuits.transformer import Transformer

torch = pytest.importorskip("torch")
skip_without("transformers")

BASES = library_settings(16, groups=2)
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 3.0}
ROTATED = [
    {"rope_theta": 50.0},
    {"rotary_emb_base": 50.0},
    {"rotary_emb_base": 50.0, "rope_theta": 20.0},
    {"partial_rotary_factor": 0.5},
    {"rotary_pct": 0.5},
    {"rotary_pct": 0.5, "partial_rotary_factor": 0.75},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rope_theta": 20.0},
    {"rope_scaling": LINEAR, "rope_theta": 50.0},
    {"rope_scaling": {"type": "linear", "factor": 3.0}},
    {"rope_parameters": {**LINEAR, "rope_theta": 20.0}, "rope_scaling": {**LINEAR, "factor": 5.0}},
    {"rope_parameters": {"rope_theta": 20.0}, "rope_scaling": LINEAR},
    {"rope_scaling": {**LINEAR, "partial_rotary_factor": 0.5}},
    {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8}},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": LLAMA3, "original_max_position_embeddings": 6},
    {
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8},
        "original_max_position_embeddings": 6,
    },
    {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
]
ACTIVATIONS = [
    *(
        {entry: name}
        for entry in ("hidden_act", "activation_function")
        for name in ("relu", "gelu")
    ),
    {"hidden_act": "gelu_pytorch_tanh"},
    {"hidden_activation": "relu"},
    {"hidden_act": "gelu", "hidden_activation": "gelu"},
    {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
    {"hidden_act": "relu", "hidden_activation": "relu"},
]
OTHERS = [
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False},
    *({name: 0.3} for name in ("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps", "norm_eps")),
    *({name: value} for name in ("attention_bias", "mlp_bias") for value in (True, False)),
    {"enable_bias": False},
    {"layer_norm_elementwise_affine": False},
    {"_remove_final_layer_norm": True},
    {"head_dim": 6},
    {"num_key_value_heads": 1},
    {"sliding_window": 9},
    {"attn_logit_softcapping": 0.5},
    {"final_logit_softcapping": 0.5},
    {"qk_layernorm": True},
    *({name: 3.0} for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")),
    *({name: 3.0} for name in ("attention_multiplier", "query_pre_attn_scalar")),
    {"scale_attn_weights": False},
    {"scale_attn_by_inverse_layer_idx": True},
    {"use_parallel_residual": False},
    {"clip_qkv": 0.5},
    {"scale_embedding": True},
]
SAID = (
    "two rotations, of which|rotate whole heads|RoPE of type|two functions for gemma"
    "|caps by tanh|head_dim of|clips queries|normalises queries and keys|_remove_final_layer_norm"
)
"""What refusals of these configurations name."""
READ = {"gpt2": 40, "gpt_neox": 44, "gemma": 40, "opt": 39}
READ |= dict.fromkeys(("llama", "mistral", "qwen2"), 43) | {"olmo": 42}
"""The least number of configurations of each layout that are read, so that not all are refused."""


def made(written):
    """The library's module of a configuration, with random weights; None where it has none."""
    try:
        net = library_module(copy.deepcopy(written))
        net(input_ids=torch.zeros((1, 3), dtype=torch.int64))
    except (
        UserWarning,
        ValueError,
        TypeError,
        KeyError,
        RuntimeError,
        AttributeError,
        ZeroDivisionError,
    ):
        return None
    return net


def is_read(written, net):
    """Whether a configuration is read, and then as the module computes; else it is refused by name."""
    view = View()
    try:
        transformer = Transformer.of(net.state_dict(), written)
        parts = Parts(StandardParts(transformer), KINDS, view)
        for label in parts:
            assert parts[label].d_out
    except tnsim.UnsupportedLayer as error:
        assert any(said in str(error) for said in SAID.split("|")), (written, error)
        return False
    held = Parts(PartsOfModule(transformer, net), KINDS, view)
    for label in held:
        assert held[label].d_out, written
    return True


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("layout", BASES)
def test_configurations_are_read_as_they_are_computed(layout):
    read, rotated = 0, ROTATED if layout not in ("gpt2", "opt") else ROTATED[:4]
    for change in ({}, *rotated, *ACTIVATIONS, *OTHERS):
        written = {**BASES[layout], **change}
        net = made(written)
        read += net is not None and is_read(written, net)
    assert read >= READ[layout]


@pytest.mark.parametrize(
    ("layout", "change"), [("opt", {"layer_norm_elementwise_affine": False}), ("olmo", {})]
)
def test_norms_without_weights_are_no_activations(layout, change):
    written = BASES[layout] | change
    assert is_read(written, made(written))


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        ("llama", {"partial_rotary_factor": 0.5}, "rotate whole heads"),
        ("llama", {"rope_scaling": {**LINEAR, "factor": 0.0}}, "divide by zero"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor"),
        ("llama", {"rope_scaling": [1]}, "are entries by name"),
        ("gpt_neox", {"rope_theta": 50.0}, "rope_theta = 50.0 of config.json, and elsewhere or by"),
        ("gemma", {"hidden_act": "gelu_new", "hidden_activation": "relu"}, "are two functions"),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu"}, "are two functions"),
        ("gpt_neox", {"head_dim": 4}, "head_dim of config.json differs"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        ("olmo", {"clip_qkv": 0.5}, "clips queries, keys and values"),
    ],
)
def test_configurations_with_two_meanings_are_refused_by_name(layout, change, said):
    net = made(BASES[layout])
    with refused(said, tnsim.TnsimError):
        parts = tnsim.parts(module(net.state_dict(), BASES[layout] | change))
        [parts[label] for label in parts]


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize(
    ("layout", "change"),
    [
        ("llama", {"hidden_activation": "relu"}),
        ("llama", {"scale_attn_weights": False, "layer_norm_epsilon": 0.3}),
        ("gemma", {"hidden_act": "relu"}),
        ("gemma", {"hidden_act": "gelu"}),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
        ("gpt_neox", {"num_key_value_heads": 1, "rotary_pct": 0.5}),
    ],
)
def test_entries_that_mean_nothing_to_a_layout_change_no_part(layout, change):
    written = BASES[layout] | change
    assert is_read(written, made(written))


def test_tensors_that_the_configuration_gives_no_place_are_refused():
    """Hugging Face's library leaves them out, and a norm without a weight is none."""
    config = BASES["llama"]
    state = made(config).state_dict()
    bias = torch.ones(16)
    for name in ("model.layers.0.self_attn.q_proj.bias", "model.norm.bias", "lm_head.bias"):
        with refused(f"{name}' has no place in the layout", tnsim.CheckpointError):
            tnsim.parts(module({**state, name: bias}, config))
    del state["model.norm.weight"]
    with refused(r"tensor 'model.norm.weight' is missing"):
        assert tnsim.parts(module(state, config))["direct"]
