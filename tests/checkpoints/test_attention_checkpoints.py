"""Attention in files: conventions of others turned into tnsim's, against their own forward passes; the own format; many at once."""

import itertools
import json

import numpy as np
import pytest
from closeness import LARGEST, assert_close
from refusals import refused
from sequence_oracles import attention

import tnsim
from tnsim import Dialect
from tnsim.checkpoints.dialects import PRESETS
from tnsim.checkpoints.rules import AttentionRule, LinearRule

VOCABULARY, WIDTH, HEADS = 6, 8, 2
CONFIG = {
    "model": {"n_head": HEADS, "attn_scale": 0.35, "rope_base": 1000, "vocab_size": VOCABULARY}
}


def state_of(rng, keys, biases=(), layers=2):
    state = {
        "embed.weight": rng.normal(size=(VOCABULARY, WIDTH)),
        "unembed.weight": rng.normal(size=(VOCABULARY, WIDTH)),
    }
    for n in range(layers):
        state |= {f"layers.{n}.{key}.weight": rng.normal(size=(WIDTH, WIDTH)) for key in keys}
        state |= {f"layers.{n}.{key}.bias": rng.normal(size=WIDTH) for key in biases}
    return state


def turned(x, base, layout, direction):
    """RoPE on (n, d_head), written with complex numbers."""
    n, width = x.shape
    angles = direction * np.arange(n)[:, None] * base ** (-2 * np.arange(width // 2) / width)
    first, second = (
        (x[:, : width // 2], x[:, width // 2 :]) if layout == "half" else (x[:, ::2], x[:, 1::2])
    )
    z = (first + 1j * second) * np.exp(1j * angles)
    if layout == "half":
        return np.concatenate([z.real, z.imag], axis=1)
    found = np.empty_like(x)
    found[:, ::2], found[:, 1::2] = z.real, z.imag
    return found


def forward(state, tokens, keys, base=10_000.0, layout="half", direction=1, power=2, energy=None):
    """The model as somebody else writes it, for one sequence of one-hot rows."""
    x = tokens @ state["embed.weight"]
    n, width = len(x), WIDTH // HEADS
    for layer in range(2):
        legs = {}
        for role, key in zip(("q1", "k1", "q2", "k2", "v"), keys, strict=False):
            y = x @ state[f"layers.{layer}.{key}.weight"].T + state.get(
                f"layers.{layer}.{key}.bias", 0.0
            )
            legs[role] = y.reshape(n, HEADS, width)
        z = np.zeros((n, HEADS, width))
        for h in range(HEADS):
            q1, k1, q2, k2 = (
                turned(legs[role][:, h], base, layout, direction)
                for role in ("q1", "k1", "q2", "k2")
            )
            z[:, h] = np.tril((q1 @ k1.T) * (q2 @ k2.T) / width**power) @ legs["v"][:, h]
        x = x + 0.35 * z.reshape(n, WIDTH) @ state[f"layers.{layer}.{keys[-1]}.weight"].T
    return x @ state["unembed.weight"].T / (1.0 if energy is None else np.sqrt(energy + 1e-6))


@pytest.mark.parametrize("prefix", ["", "attn."])
def test_language_model_layout(prefix, tmp_path, rng):
    keys = [f"{prefix}{role}" for role in ("q1", "k1", "q2", "k2", "v", "o")]
    state = state_of(rng, keys, keys[:4])
    state["final_norm.running_mean_energy"] = np.array([2.5])
    np.savez(tmp_path / "model.npz", **state)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    preset = f"bilinear-attention{'-attn' if prefix else ''}"
    model = tnsim.load(tmp_path / "model.npz", preset, n_ctx=4)
    assert model.n_ctx == 4
    x = np.eye(VOCABULARY)[[1, 4, 4, 0]]
    assert_close(model(x), forward(state, x, keys, energy=2.5), scale=LARGEST, rtol=1e-12)
    same = tnsim.from_state_dict(
        {"model_state_dict": state, "step": 3},
        preset,
        4,
        CONFIG,
    )
    assert np.array_equal(same(x), model(x))


def test_quadratic_layout_and_yaml(tmp_path, rng):
    torch = pytest.importorskip("torch")
    state = state_of(rng, ["q", "k", "v", "o"])
    tensors = {name: torch.tensor(array) for name, array in state.items()}
    torch.save({"step": 5, "model_state_dict": tensors}, tmp_path / "step_5.pt")
    (tmp_path / "config.yaml").write_text(
        "model:\n  n_head: 2\n  attn_scale: 0.35\n  rope_base: 1000\n"
    )
    model = tnsim.load(tmp_path / "step_5.pt", "quadratic-attention")
    x = np.eye(VOCABULARY)[[0, 3, 5]]
    assert_close(
        model(x),
        forward(state, x, ["q", "k", "q", "k", "v", "o"], base=1000.0),
        scale=LARGEST,
        rtol=1e-12,
    )


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("power", [1, 2])
def test_conventions(layout, direction, power, rng):
    keys = ["q1", "k1", "q2", "k2", "v", "o"]
    state = state_of(rng, keys, keys[:4])
    names = {role: f"layers.{{i}}.{role}.weight" for role in keys} | {
        f"{role}_bias": f"layers.{{i}}.{role}.bias?" for role in keys
    }
    rule = AttentionRule(**names, n_heads=HEADS, score_power=power, rope_base=100.0, rope_layout=layout, rope_direction=direction,
        residual="additive", scale=0.35, repeat=True,
    )  # fmt: skip
    rules = (
        LinearRule(weight="embed.weight", transpose=True),
        rule,
        LinearRule(weight="unembed.weight"),
    )
    dialect = Dialect.from_json(Dialect("mine", rules).to_json())
    x = np.eye(VOCABULARY)[[2, 1, 1, 5, 0]]
    expected = forward(state, x, keys, base=100.0, layout=layout, direction=direction, power=power)
    assert_close(tnsim.from_state_dict(state, dialect)(x), expected, scale=LARGEST, rtol=1e-12)
    said = " ".join(dialect.assumptions())
    assert f"scores divided by d_head^{power}" in said
    assert (
        f"RoPE base 100.0, {layout} layout, {'forward' if direction == 1 else 'backward'}" in said
    )


SINGLE = {"q1": "q", "k1": "k", "v": "v", "o": "o", "scores": 1, "n_heads": HEADS}


def test_a_single_score_in_files(rng):
    """Separate and stacked projections, and those with an axis of heads, against the formula with loops."""
    q, k, v, o = (rng.normal(size=(WIDTH, WIDTH)) for _ in range(4))
    stacked = {"fused": "qkv", "fused_order": "q-k-v", "o": "o", "scores": 1, "n_heads": HEADS}
    x, width = rng.normal(size=(4, WIDTH)), WIDTH // HEADS
    z = np.zeros((4, WIDTH))
    for s, t, h in itertools.product(range(4), range(4), range(HEADS)):
        rows = slice(h * width, (h + 1) * width)
        # A query sees itself and what comes before it.
        if t > s:
            continue
        z[s, rows] += (q[rows] @ x[s]) @ (k[rows] @ x[t]) / width**0.5 * (v[rows] @ x[t])
    of_heads = {
        name: one.reshape(HEADS, width, -1).mT for name, one in zip("qkv", (q, k, v), strict=True)
    }
    for fields, state in (
        (SINGLE, {"q": q, "k": k, "v": v, "o": o}),
        (stacked, {"qkv": np.concatenate([q, k, v]), "o": o}),
        (SINGLE | {"by_head": True}, of_heads | {"o": o.T.reshape(HEADS, width, -1)}),
    ):
        rule = AttentionRule(**fields, score_power=0.5)
        layer = tnsim.from_state_dict(state, Dialect("mine", (rule,))).layers[0]
        assert_close(layer(x), z @ o.T, scale=LARGEST, rtol=1e-13)
        # The weights themselves are kept to the bit.
        assert np.array_equal(layer.q1, q)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (SINGLE | {"q2": "q"}, r"a single score \(scores = 1\) has no q2, leave it out"),
        (SINGLE | {"k2_bias": "b"}, "has no k2_bias"),
        (SINGLE | {"rope_base": 100.0}, "has no rope_base"),
        (SINGLE | {"scores": 3}, "scores 3 is unknown, use 2 or 1"),
        (SINGLE | {"k1": None}, "names q1, k1, v, o, n_heads, or fused"),
        (SINGLE | {"scores": 2}, "names q1, k1, q2, k2, v, o, n_heads, or fused"),
        (SINGLE | {"fused": "f", "fused_order": "q1-k1-q2-k2-v"}, "single score is q-k-v"),
        (SINGLE | {"by_head": True, "transpose": True}, "neither stacked .* nor transposed"),
    ],
)
def test_rules_of_attention_refuse_what_does_not_fit(fields, words):
    with refused(words, tnsim.CheckpointError):
        Dialect("mine", (AttentionRule(**fields),))


def test_arrays_by_head_have_the_heads_of_the_rule(rng):
    state = {name: rng.normal(size=(4, WIDTH, 3)) for name in "qkvo"}
    rule = AttentionRule(**SINGLE, by_head=True)
    with refused(r"'q' must have the shape \(heads, in, out\) of 2"):
        tnsim.from_state_dict(state, Dialect("mine", (rule,)))


def test_numbers_are_not_guessed(tmp_path, rng):
    state = state_of(rng, ["q", "k", "v", "o"])
    np.savez(tmp_path / "model.npz", **state)
    with refused(
        r"layer 1: the number of heads is model\.n_head of config\.json or config\.yaml, and none is beside"
    ):
        tnsim.load(tmp_path / "model.npz", "quadratic-attention")
    (tmp_path / "config.json").write_text(json.dumps({"model": {"n_head": 3, "attn_scale": 0.35}}))
    with refused(r"RoPE base is model\.rope_base of the configuration, which has no 'rope_base'"):
        tnsim.load(tmp_path / "model.npz", "quadratic-attention")
    (tmp_path / "config.json").write_text(
        json.dumps({"model": {"n_head": 3, "attn_scale": 0.35, "rope_base": 10}})
    )
    with refused("8 query rows cannot be 3 heads"):
        tnsim.load(tmp_path / "model.npz", "quadratic-attention")
    (tmp_path / "config.json").write_text("{")
    with refused(r"config\.json beside it is not JSON", tnsim.CheckpointError):
        tnsim.load(tmp_path / "model.npz", "quadratic-attention")
    rules = json.loads(PRESETS["bilinear-attention"].to_json())
    rules["layers"][1]["rope_layout"] = "spiral"
    with refused(
        "rope_layout 'spiral' is unknown, use 'half' or 'interleaved'", tnsim.CheckpointError
    ):
        Dialect.from_json(json.dumps(rules))


@pytest.mark.slow
@pytest.mark.parametrize(
    "metric", [tnsim.TreeSymmetric(), pytest.param(tnsim.Gaussian(), marks=pytest.mark.slow)]
)
def test_pairwise_of_sequences(metric, rng):
    models = [
        tnsim.Model([tnsim.Residual(attention(rng, 2, 1, 2, 1, 2), 1.0, 0.5)], n_ctx=2)
        for _ in range(3)
    ]
    result = tnsim.pairwise(models, metric)
    assert result.attrs["plan"].startswith("contractions")
    assert_close(
        float(result.similarity[0, 1]),
        tnsim.similarity(models[0], models[1], metric),
        scale=1.0,
        rtol=1e-12,
    )
    tokens = tnsim.pairwise(models, tnsim.Categorical(np.array([0.25, 0.75])), slices=True)
    expected = tnsim.slices(models[2], models[0], tnsim.Categorical(np.array([0.25, 0.75])))
    assert_close(tokens.slices[2, 0], expected, scale=1.0, rtol=1e-12)
    with refused("n_ctx=3, but 0 of n_ctx=2"):
        tnsim.pairwise([models[0], tnsim.Model(models[1].layers, n_ctx=3)])
