"""Random checkpoints of every layout, and forward passes of each written from its definition.

A forward pass here reads tensors by the names of the layout and follows the layout's published code step by step:
fused maps are split after they are applied, positions rotate whole vectors, heads share keys by repeating them. It
shares no line with `tnsim.circuits`.
"""

import json
import math
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

import tnsim

LENGTH = 6
VOCABULARY, WIDTH, LAYERS, HEADS, HIDDEN = 7, 12, 2, 4, 10
GPT2 = {"model_type": "gpt2", "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
OPT = {"model_type": "opt", "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
LINEAR_ROPE = dict(rope_type="linear", factor=3.0, rope_theta=50.0, partial_rotary_factor=0.67)
LLAMA3_ROPE = dict(
    rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip


def library_settings(width, groups):
    """Settings of small models of two layers by layout, in the names of Hugging Face's library."""
    ends = {"vocab_size": 13, "bos_token_id": 1, "eos_token_id": 2}
    sizes = ends | {
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 10,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
        "hidden_act": "silu",
    }
    grouped = sizes | {"num_key_value_heads": groups}
    of_opt = {"ffn_dim": 10, "word_embed_proj_dim": width, "activation_function": "relu"}
    of_gpt2 = {"n_embd": width, "n_layer": 2, "n_head": 2, "n_positions": 16, "n_inner": 10}
    found = dict.fromkeys(("llama", "mistral", "qwen2", "olmo"), grouped)
    found |= {"gpt2": ends | of_gpt2 | {"activation_function": "gelu_new"}, "gpt_neox": sizes}
    found |= {"gemma": grouped | {"head_dim": width // 2}, "opt": sizes | of_opt}
    return {kind: settings | {"model_type": kind} for kind, settings in found.items()}


def library_module(settings):
    """A module of Hugging Face's library with these settings, all of its weights random."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**settings)
    config._attn_implementation = "eager"
    net = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return net


def _small(kind: str, heads: int = HEADS, **settings: Any) -> dict[str, Any]:
    """A configuration of a kind that names its sizes as Llama does."""
    sizes = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=HIDDEN)
    counts = dict(num_hidden_layers=LAYERS, num_attention_heads=heads)
    return {"model_type": kind, **sizes, **counts, **settings}


def _neox(**settings: Any) -> dict[str, Any]:
    return _small("gpt_neox", heads=2, layer_norm_eps=1e-5, **settings)


def _rms(kind: str, **settings: Any) -> dict[str, Any]:
    """A configuration of a kind with RMS norms."""
    return _small(kind, rms_norm_eps=1e-6, **settings)


CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2 | dict(activation_function="gelu_new", layer_norm_epsilon=1e-5),
    "gpt2 by layer": GPT2
    | dict(activation_function="linear", layer_norm_epsilon=0.3)
    | dict(scale_attn_by_inverse_layer_idx=True),
    "gpt_neox": _neox(
        hidden_act="gelu", rotary_pct=0.34, rotary_emb_base=100.0,
        tie_word_embeddings=False, use_parallel_residual=True,
    ),
    "gpt_neox of v5": _neox(
        hidden_act="linear", rope_parameters=LINEAR_ROPE, use_parallel_residual=False
    ),
    "llama": _rms(
        "llama", heads=6, num_key_value_heads=2, hidden_act="silu", attention_bias=True,
        rope_theta=30.0,
    ),
    "llama 3": _rms(
        "llama", heads=2, hidden_act="linear", rope_theta=1000.0, rope_scaling=LLAMA3_ROPE,
        tie_word_embeddings=True,
    ),
    "mistral": _rms(
        "mistral", num_key_value_heads=2, hidden_act="linear", head_dim=6, sliding_window=3
    ),
    "qwen2": _rms("qwen2", heads=2, num_key_value_heads=1, hidden_act="swish"),
    "gemma": _rms(
        "gemma", num_key_value_heads=1, hidden_act="gelu", head_dim=8,
        hidden_activation="gelu_pytorch_tanh",
    ),
    "opt": OPT | dict(
        word_embed_proj_dim=WIDTH, num_attention_heads=HEADS, ffn_dim=HIDDEN,
        activation_function="relu", do_layer_norm_before=True,
    ),
}  # fmt: skip
"""Configurations by the name of a case."""


class Layer(NamedTuple):
    """Observations of one layer in a forward pass, for one text.

    Attributes:
        read: Normalised stream before gain and bias, (positions, width), which attention reads.
        scores: Scores before mask and softmax, (heads, positions, positions).
        pattern: Softmax of the masked scores.
        heads: What each head adds to the stream, (heads, positions, width), without the output bias.
        mlp_read: Normalised stream that the MLP reads.
        mlp: What the MLP adds.
    """

    read: np.ndarray
    scores: np.ndarray
    pattern: np.ndarray
    heads: np.ndarray
    mlp_read: np.ndarray
    mlp: np.ndarray


def kind(config):
    return config["model_type"]


def checkpoint(rng, config, dtype=np.float64):
    """Tensors by name, all random: norms, biases and tables too."""
    make = {"gpt2": _gpt2, "gpt_neox": _gpt_neox, "opt": _opt}.get(kind(config), _llama)
    return {
        name: (0.6 * rng.normal(size=shape) / shape[-1] ** 0.25).astype(dtype)
        for name, shape in make(config).items()
    }


def _linear(name, rows, columns, bias=True):
    return {f"{name}.weight": (rows, columns), **({f"{name}.bias": (rows,)} if bias else {})}


def _norm(name, bias=True):
    return {f"{name}.weight": (WIDTH,), **({f"{name}.bias": (WIDTH,)} if bias else {})}


def _gpt2(config):
    found = {"transformer.wte.weight": (VOCABULARY, WIDTH), "transformer.wpe.weight": (9, WIDTH)}
    for i in range(LAYERS):
        h = f"transformer.h.{i}"
        for name, shape in {
            "attn.c_attn": (WIDTH, 3 * WIDTH),
            "attn.c_proj": (WIDTH, WIDTH),
            "mlp.c_fc": (WIDTH, HIDDEN),
            "mlp.c_proj": (HIDDEN, WIDTH),
        }.items():
            found |= {f"{h}.{name}.weight": shape, f"{h}.{name}.bias": shape[1:]}
        found |= {**_norm(f"{h}.ln_1"), **_norm(f"{h}.ln_2"), f"{h}.attn.bias": (1, 1, 9, 9)}
    return found | _norm("transformer.ln_f")


def _gpt_neox(config):
    found = {"gpt_neox.embed_in.weight": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        h = f"gpt_neox.layers.{i}"
        found |= _linear(f"{h}.attention.query_key_value", 3 * WIDTH, WIDTH)
        found |= _linear(f"{h}.attention.dense", WIDTH, WIDTH)
        found |= _linear(f"{h}.mlp.dense_h_to_4h", HIDDEN, WIDTH)
        found |= _linear(f"{h}.mlp.dense_4h_to_h", WIDTH, HIDDEN)
        found |= {**_norm(f"{h}.input_layernorm"), **_norm(f"{h}.post_attention_layernorm")}
        found |= {f"{h}.attention.rotary_emb.inv_freq": (2,)}
    return found | _norm("gpt_neox.final_layer_norm") | {"embed_out.weight": (VOCABULARY, WIDTH)}


def _opt(config):
    root = "model.decoder"
    found = {
        f"{root}.embed_tokens.weight": (VOCABULARY, WIDTH),
        f"{root}.embed_positions.weight": (11, WIDTH),
    }
    for i in range(LAYERS):
        h = f"{root}.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= _linear(f"{h}.self_attn.{name}", WIDTH, WIDTH)
        found |= {**_linear(f"{h}.fc1", HIDDEN, WIDTH), **_linear(f"{h}.fc2", WIDTH, HIDDEN)}
        found |= {**_norm(f"{h}.self_attn_layer_norm"), **_norm(f"{h}.final_layer_norm")}
    return found | _norm(f"{root}.final_layer_norm")


def _llama(config):
    heads, d_head = config["num_attention_heads"], d_head_of(config)
    groups = config.get("num_key_value_heads", heads)
    found = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        h = f"model.layers.{i}"
        bias = config.get("attention_bias", False)
        of_qkv = bias or kind(config) == "qwen2"
        found |= _linear(f"{h}.self_attn.q_proj", heads * d_head, WIDTH, of_qkv)
        found |= _linear(f"{h}.self_attn.k_proj", groups * d_head, WIDTH, of_qkv)
        found |= _linear(f"{h}.self_attn.v_proj", groups * d_head, WIDTH, of_qkv)
        found |= _linear(f"{h}.self_attn.o_proj", WIDTH, heads * d_head, bias)
        found |= _linear(f"{h}.mlp.up_proj", HIDDEN, WIDTH, False)
        found |= _linear(f"{h}.mlp.gate_proj", HIDDEN, WIDTH, False)
        found |= _linear(f"{h}.mlp.down_proj", WIDTH, HIDDEN, False)
        found |= _norm(f"{h}.input_layernorm", False)
        found |= _norm(f"{h}.post_attention_layernorm", False)
    if not config.get("tie_word_embeddings", kind(config) == "gemma"):
        found |= {"lm_head.weight": (VOCABULARY, WIDTH)}
    return found | _norm("model.norm", False)


def d_head_of(config):
    width = config.get("hidden_size", WIDTH)
    heads = config.get("num_attention_heads", HEADS)
    return config.get("head_dim") or width // heads


def module(state, config):
    """What a module of Hugging Face's library has for `parts`: a configuration and tensors."""

    class Module:
        def __init__(self):
            self.config = config

        def state_dict(self):
            return state

    return Module()


def written(folder, state, config, shards=1):
    """A checkpoint in Hugging Face's layout, in one file or in several."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    places = {}
    for n in range(shards):
        name = f"model-{n + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(state.items())[n::shards])
        save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def attention_model(rng, rope_base):
    d, heads, d_head = 4, 2, 2

    def weights(*shape):
        return rng.normal(size=shape)

    rows = heads * d_head
    layer = tnsim.Attention(
        *(weights(rows, d) for _ in range(4)),
        weights(rows, d),
        weights(d, rows),
        heads,
        q1_bias=weights(rows),
        k2_bias=weights(rows),
        v_bias=weights(rows),
        rope_base=rope_base,
    )
    mlp = tnsim.Bilinear(weights(5, d), weights(5, d), weights(d, 5), weights(5), None, weights(d))
    ends = tnsim.Linear(weights(d, 6)), tnsim.Linear(weights(6, d))
    middle = tnsim.Residual(layer, 0.5, 0.7), tnsim.Residual(mlp, 2.0, -0.3)
    return tnsim.Model([ends[0], *middle, ends[1]], n_ctx=3)


# Forward passes


def _layer_norm(x, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(centred.var(-1, keepdims=True) + x.dtype.type(eps))


def _rms_norm(x, eps):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + x.dtype.type(eps))


def _softmax(scores):
    seen = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
    weights = np.exp(seen - seen.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _activated(config, x):
    """The activation that a configuration names, by its definition."""
    named = config.get("hidden_activation") or config.get("hidden_act")
    named = named or config["activation_function"]
    wide = x.astype(np.float64)
    if named in ("silu", "swish"):
        wide = wide / (1 + np.exp(-wide))
    elif named in ("gelu_new", "gelu_pytorch_tanh"):
        wide = wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    elif named == "gelu":
        wide = wide / 2 * (1 + np.vectorize(math.erf)(wide / np.sqrt(2)))
    elif named == "relu":
        wide = np.maximum(wide, 0)
    else:
        assert named == "linear"
    return wide.astype(x.dtype)


PLACES = {  # of a layer, its second norm, and the first and last map of its MLP
    "gpt2": ("transformer.h", "ln_2", "mlp.c_fc", "mlp.c_proj"),
    "gpt_neox": (
        "gpt_neox.layers", "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
    ),
    "opt": ("model.decoder.layers", "final_layer_norm", "fc1", "fc2"),
}  # fmt: skip


def mlp(state, config, i, read):
    """What the MLP of layer i adds, by the normalised stream that it reads."""
    llama = "model.layers", "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj"
    root, norm, first, last = PLACES.get(kind(config), llama)

    def linear(name, y):
        weight, bias = (state.get(f"{root}.{i}.{name}.{part}") for part in ("weight", "bias"))
        mapped = y @ (weight if kind(config) == "gpt2" else weight.T)
        return mapped if bias is None else mapped + bias

    gain = state[f"{root}.{i}.{norm}.weight"] + read.dtype.type(kind(config) == "gemma")
    shift = state.get(f"{root}.{i}.{norm}.bias", read.dtype.type(0))
    inner = read * gain + shift
    opened = _activated(config, linear(first, inner))
    return linear(last, opened if kind(config) in PLACES else opened * linear("mlp.up_proj", inner))


def _split(x, heads):
    """(positions, heads * d) -> (heads, positions, d)."""
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def _attend(q, k, v, scale, out):
    scores = q @ k.transpose(0, 2, 1) * q.dtype.type(scale)
    pattern = _softmax(scores)
    z = pattern @ v
    d_head = v.shape[-1]
    heads = [z[h] @ out[:, h * d_head : (h + 1) * d_head].T for h in range(len(z))]
    return scores, pattern, np.stack(heads)


def _rotate(x, frequencies):
    """The published form: a vector and its half-exchanged copy, times cosines and sines."""
    turned = 2 * len(frequencies)
    angles = np.arange(x.shape[1])[:, None] * np.concatenate([frequencies, frequencies])
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    first, rest = x[..., :turned], x[..., turned:]
    half = np.concatenate([-first[..., turned // 2 :], first[..., : turned // 2]], -1)
    return np.concatenate([first * cos + half * sin, rest], -1)


def _frequencies(config):
    newer = config.get("rope_parameters") or {}
    base = newer.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", 10_000)))
    share = newer.get("partial_rotary_factor", config.get("rotary_pct", 1.0))
    turned = int(d_head_of(config) * share)
    found = 1.0 / base ** (np.arange(0, turned, 2) / turned)
    if newer.get("rope_type") == "linear":
        return found / newer["factor"]
    scaling = config.get("rope_scaling")
    if scaling is None:
        return found
    old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    stretched = []
    for one in found:
        wavelength = 2 * np.pi / one
        smooth = (old / wavelength - low) / (high - low)
        if wavelength < old / high:
            stretched.append(one)
        elif wavelength > old / low:
            stretched.append(one / factor)
        else:
            stretched.append((1 - smooth) * one / factor + smooth * one)
    return np.array(stretched)


def forward(state, config, tokens):
    """All layers of the forward pass of one text, in the precision of the tensors."""
    run = {"gpt2": _run_gpt2, "gpt_neox": _run_gpt_neox, "opt": _run_opt}
    return run.get(kind(config), _run_llama)(state, config, tokens)


def _run_gpt2(state, config, tokens):
    eps = config["layer_norm_epsilon"]
    x = state["transformer.wte.weight"][tokens] + state["transformer.wpe.weight"][: len(tokens)]
    layers = []
    for i in range(LAYERS):

        def get(name, i=i):
            return state[f"transformer.h.{i}.{name}"]

        read = _layer_norm(x, eps)
        inner = read * get("ln_1.weight") + get("ln_1.bias")
        fused = inner @ get("attn.c_attn.weight") + get("attn.c_attn.bias")
        q, k, v = (_split(one, HEADS) for one in np.split(fused, 3, axis=-1))
        scale = (WIDTH // HEADS) ** -0.5
        if config.get("scale_attn_by_inverse_layer_idx"):
            scale = scale / (i + 1)
        scores, pattern, heads = _attend(q, k, v, scale, get("attn.c_proj.weight").T)
        x = x + heads.sum(0) + get("attn.c_proj.bias")
        mlp_read = _layer_norm(x, eps)
        added = mlp(state, config, i, mlp_read)
        x = x + added
        layers.append(Layer(read, scores, pattern, heads, mlp_read, added))
    return layers


def _run_gpt_neox(state, config, tokens):
    eps, heads_of = config["layer_norm_eps"], config["num_attention_heads"]
    x = state["gpt_neox.embed_in.weight"][tokens]
    layers = []
    for i in range(LAYERS):

        def get(name, i=i):
            return state[f"gpt_neox.layers.{i}.{name}"]

        read = _layer_norm(x, eps)
        inner = read * get("input_layernorm.weight") + get("input_layernorm.bias")
        fused = inner @ get("attention.query_key_value.weight").T
        fused = _split(fused + get("attention.query_key_value.bias"), heads_of)
        q, k, v = np.split(fused, 3, axis=-1)  # of each head
        q, k = (_rotate(one, _frequencies(config)) for one in (q, k))
        scores, pattern, heads = _attend(
            q, k, v, q.shape[-1] ** -0.5, get("attention.dense.weight")
        )
        attended = x + heads.sum(0) + get("attention.dense.bias")
        mlp_read = _layer_norm(x if config["use_parallel_residual"] else attended, eps)
        added = mlp(state, config, i, mlp_read)
        x = attended + added
        layers.append(Layer(read, scores, pattern, heads, mlp_read, added))
    return layers


def _run_opt(state, config, tokens):
    root = "model.decoder"
    x = state[f"{root}.embed_tokens.weight"][tokens]
    x = x + state[f"{root}.embed_positions.weight"][2 : 2 + len(tokens)]
    layers = []
    for i in range(LAYERS):

        def linear(name, y, i=i):
            h = f"{root}.layers.{i}.{name}"
            return y @ state[f"{h}.weight"].T + state[f"{h}.bias"]

        norm = f"{root}.layers.{i}.self_attn_layer_norm"
        read = _layer_norm(x, 1e-5)
        inner = read * state[f"{norm}.weight"] + state[f"{norm}.bias"]
        q, k, v = (_split(linear(f"self_attn.{one}_proj", inner), HEADS) for one in "qkv")
        q = q * q.dtype.type((WIDTH // HEADS) ** -0.5)
        out = state[f"{root}.layers.{i}.self_attn.out_proj.weight"]
        scores, pattern, heads = _attend(q, k, v, 1.0, out)
        x = x + heads.sum(0) + state[f"{root}.layers.{i}.self_attn.out_proj.bias"]
        mlp_read = _layer_norm(x, 1e-5)
        added = mlp(state, config, i, mlp_read)
        x = x + added
        layers.append(Layer(read, scores, pattern, heads, mlp_read, added))
    return layers


def _run_llama(state, config, tokens):
    eps, heads_of = config["rms_norm_eps"], config["num_attention_heads"]
    groups = config.get("num_key_value_heads", heads_of)
    x = state["model.embed_tokens.weight"][tokens]
    is_gemma = kind(config) == "gemma"
    if is_gemma:
        x = x * x.dtype.type(WIDTH**0.5)
    layers = []
    for i in range(LAYERS):
        h = f"model.layers.{i}"

        def linear(name, y, h=h):
            bias = state.get(f"{h}.{name}.bias", y.dtype.type(0))
            return y @ state[f"{h}.{name}.weight"].T + bias

        read = _rms_norm(x, eps)
        inner = read * (state[f"{h}.input_layernorm.weight"] + x.dtype.type(is_gemma))
        q = _split(linear("self_attn.q_proj", inner), heads_of)
        k, v = (_split(linear(f"self_attn.{one}_proj", inner), groups) for one in "kv")
        q, k = (_rotate(one, _frequencies(config)) for one in (q, k))
        k, v = (np.repeat(one, heads_of // groups, axis=0) for one in (k, v))
        out = state[f"{h}.self_attn.o_proj.weight"]
        scores, pattern, heads = _attend(q, k, v, q.shape[-1] ** -0.5, out)
        x = x + heads.sum(0) + state.get(f"{h}.self_attn.o_proj.bias", x.dtype.type(0))
        mlp_read = _rms_norm(x, eps)
        added = mlp(state, config, i, mlp_read)
        x = x + added
        layers.append(Layer(read, scores, pattern, heads, mlp_read, added))
    return layers
