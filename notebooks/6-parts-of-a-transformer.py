# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # 6. Parts of a transformer
#
# What changed between two checkpoints of a Hugging Face transformer? As a whole it is no
# polynomial, but its parts have exact similarities from the weights alone: scores and values of
# heads are polynomials, and an MLP block is a single layer of hidden units. Here a tiny GPT-2 is
# trained on the spot in JAX, with softmax, layer norms and GELU, and saved in Hugging Face's
# layout; a checkpoint from the hub is read the same way.

# %%
import json
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import tnsim

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 32, 4, 2, 24, 24
CONFIG = {
    "model_type": "gpt2",
    "n_embd": WIDTH,
    "n_head": HEADS,
    "n_layer": LAYERS,
    "vocab_size": VOCABULARY,
    "n_positions": LENGTH,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}


# %% [markdown]
# The names of the weights are those of GPT-2. The forward pass is a plain one.


# %%
def initial(seed):
    rng = np.random.default_rng(seed)
    shapes = {"wte": (VOCABULARY, WIDTH), "wpe": (LENGTH, WIDTH)}
    for i in range(LAYERS):
        shapes |= {
            f"h.{i}.attn.c_attn": (WIDTH, 3 * WIDTH),
            f"h.{i}.attn.c_proj": (WIDTH, WIDTH),
            f"h.{i}.mlp.c_fc": (WIDTH, 4 * WIDTH),
            f"h.{i}.mlp.c_proj": (4 * WIDTH, WIDTH),
        }
    weights = {}
    for name, (rows, columns) in shapes.items():
        weights[f"transformer.{name}.weight"] = rng.normal(size=(rows, columns)) * 0.15
        if name not in ("wte", "wpe"):
            weights[f"transformer.{name}.bias"] = np.zeros(columns)
    for name in ["ln_f", *(f"h.{i}.ln_{n}" for i in range(LAYERS) for n in (1, 2))]:
        weights[f"transformer.{name}.weight"] = np.ones(WIDTH)
        weights[f"transformer.{name}.bias"] = np.zeros(WIDTH)
    return {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}


def norm(weights, name, x):
    x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + CONFIG["layer_norm_epsilon"])
    return x * weights[f"transformer.{name}.weight"] + weights[f"transformer.{name}.bias"]


def apply(weights, name, x):
    return x @ weights[f"transformer.{name}.weight"] + weights[f"transformer.{name}.bias"]


def logits(weights, tokens):
    x = weights["transformer.wte.weight"][tokens] + weights["transformer.wpe.weight"]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for i in range(LAYERS):
        fused = apply(weights, f"h.{i}.attn.c_attn", norm(weights, f"h.{i}.ln_1", x))
        q, k, v = (
            one.reshape(*one.shape[:-1], HEADS, -1).swapaxes(-2, -3)
            for one in jnp.split(fused, 3, -1)
        )
        scores = q @ k.swapaxes(-1, -2) / jnp.sqrt(q.shape[-1])
        z = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)) @ v
        z = z.swapaxes(-2, -3).reshape(x.shape)
        x = x + apply(weights, f"h.{i}.attn.c_proj", z)
        hidden = jax.nn.gelu(apply(weights, f"h.{i}.mlp.c_fc", norm(weights, f"h.{i}.ln_2", x)))
        x = x + apply(weights, f"h.{i}.mlp.c_proj", hidden)
    return norm(weights, "ln_f", x) @ weights["transformer.wte.weight"].T


# %% [markdown]
# ## Two phases of training
#
# At first texts mostly repeat the previous token; then the task changes, and the second half of a
# text repeats its first half. Checkpoints are kept along the way, with the loss on both tasks.

# %%
rng = np.random.default_rng(0)


def texts(phase, count=64):
    if phase == 1:  # each token is the one before, or now and then a new one
        new = rng.integers(0, VOCABULARY, (count, LENGTH))
        keep = rng.random((count, LENGTH)) < 0.8
        keep[:, 0] = False
        place = np.maximum.accumulate(np.where(keep, 0, np.arange(LENGTH)), 1)
        return np.take_along_axis(new, place, 1)
    return np.tile(rng.integers(0, VOCABULARY, (count, LENGTH // 2)), 2)


def loss(weights, tokens, start):
    shown = jax.nn.log_softmax(logits(weights, tokens)[:, start:-1])
    return -jnp.take_along_axis(shown, tokens[:, start + 1 :, None], -1).mean()


@partial(jax.jit, static_argnums=4)
def step(number, weights, moments, tokens, start):
    """A step of Adam."""
    slope = jax.grad(loss)(weights, tokens, start)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], slope)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, moments[1], slope)
    rate = 3e-3 * jnp.sqrt(1 - 0.999 ** (number + 1)) / (1 - 0.9 ** (number + 1))
    new = jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8), weights, first, second)
    return new, (first, second)


folder = Path(tempfile.mkdtemp()) / "run"


def save(weights, number):
    place = folder / f"step{number}"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: np.asarray(one) for name, one in weights.items()}, place / "model.safetensors")


weights = initial(0)
zeros = jax.tree.map(jnp.zeros_like, weights)
moments = zeros, zeros
losses = {}
for number in range(801):
    phase = 1 if number <= 400 else 2
    if number % 100 == 0:
        save(weights, number)
        losses[number] = [
            float(loss(weights, texts(1), 0)),
            float(loss(weights, texts(2), LENGTH // 2)),
        ]
    weights, moments = step(
        number, weights, moments, texts(phase), 0 if phase == 1 else LENGTH // 2
    )
{number: [round(one, 2) for one in pair] for number, pair in losses.items()}

# %% [markdown]
# ## Parts
#
# `tnsim.parts` names the parts of a checkpoint; each is a model. A folder of checkpoints gives the
# parts of a series.

# %%
run = tnsim.load(folder)
parts = tnsim.parts(run, ["qk", "ov", "mlp"])
parts

# %%
head = parts["layer 1 head 0 qk"][0]
head

# %% [markdown]
# All pairs of checkpoints, for every part:

# %%
result = tnsim.pairwise(parts)
result.similarity.sel(a=400).sel(b=[0, 300, 500, 800]).to_pandas().round(2)

# %% [markdown]
# One picture of all parts, layer by head: how alike the part is at step 400, where the task
# changes, and at the end.

# %%
after = result.sel(a=[400], b=[800])
after.tnsim.plot("parts")

# %% [markdown]
# The part that the new task changed most, over the whole run. Any part opens as an ordinary result.

# %%
change = after.similarity.squeeze()
most = str(change.part.values[change.values.argmin()])
print(most, f"{float(change.min()):.2f}")
result.sel(part=most).tnsim.plot("heatmap")

# %% [markdown]
# ## The units of an MLP block
#
# The inner product of two blocks is a sum over pairs of hidden units, GELU included, so it splits
# into shares of single units, which sum to 1.

# %%
block = parts["layer 1 mlp"]
units = tnsim.paths(block[4], block[8], by="unit", top=12)
assert abs(units.share.sum() - 1) < 1e-9
tnsim.figures.shares(units.bra, units.share, title="units of step 400 in step 800")

# %% [markdown]
# ## The head that each became
#
# Matching heads by similarity finds each head again where it changed little. Its matching also
# works between two models that share nothing but the vocabulary, through their embeddings.

# %%
tnsim.heads(run.paths[4], run.paths[-1], "ov").to_dataframe().unstack("b")["similarity"].round(2)

# %%
tokens = tnsim.heads(run.paths[4], run.paths[-1], "ov", through="embedding")
tokens[["became", "matched"]].to_dataframe()
