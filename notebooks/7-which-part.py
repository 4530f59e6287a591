# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # 7. When did the induction heads form, and what changed?
#
# Twelve checkpoints of a model of two attention layers with four heads each, which learns to repeat
# what followed a token before. No checkpoint has a head with a textbook pattern. The question is
# which heads work together, and since when, asked of the weights with uniform random tokens.

# %%
import json
from pathlib import Path

import numpy as np

import tnsim

folder = Path(tnsim.__file__).parent / "data" / "induction"
series = tnsim.load(folder, n_ctx=16)
tokens = tnsim.Categorical(samples=256)
series[-1]

# %% [markdown]
# ## Paths through both layers
#
# A path is a set of components that signals go through. The shares of all paths sum to 1. The share
# through both layers is the composition share.

# %%
run = tnsim.paths(series, metric=tokens)
log = json.loads((folder / "metrics.json").read_text())
accuracy = [row["repeated_accuracy"] for row in log["checkpoints"]]
composed = run.through("layer 1", "layer 2")
print(np.corrcoef(composed, accuracy)[0, 1].round(3))
assert np.corrcoef(composed, accuracy)[0, 1] > 0.98

# %%
tnsim.figures.shares_over_training(run.labels, run.paths, run.share, {"accuracy": accuracy})

# %% [markdown]
# The two rise together, in the same interval, though the tokens know nothing of the task.
#
# ## Which heads
#
# Shares by head, with errors of the sample.

# %%
heads = tnsim.paths(series[-1], metric=tokens, by="head", top=12)
tnsim.figures.shares(heads.bra, heads.share, heads.standard_error, title="step 4000")

# %% [markdown]
# Which head reads which, and as what? The width of a line is what is lost when the edge is cut.

# %%
edges = tnsim.paths(series[-1], metric=tnsim.Categorical(samples=32), by="head", legs=True)
tnsim.figures.edges(edges.edges, edges.cut, title="step 4000")

# %% [markdown]
# ## What changed between two checkpoints
#
# From step 650, where two thirds of the answers are right, to the end. Shares say which heads made
# the difference, `removed` what breaks when one is put back.

# %%
change = tnsim.change(series[6], series[-1], tokens, by="head")
assert abs(change.share.sum() - 1) < 1e-9
change

# %%
tnsim.figures.layers_and_heads(change.components, change.share)

# %%
removed = change.removed / change.total
tnsim.figures.layers_and_heads(change.components, removed, colour_label="change lost")
