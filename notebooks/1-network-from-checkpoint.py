# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # 1. From checkpoint weights to a network, and to a similarity
#
# tnsim ships thirteen checkpoints of one network learning `(a + b) mod 113`: a single bilinear
# layer, `D((L x) * (R x))`, that reads two one-hot numbers. Each is a polynomial of degree two per
# output, so "are two training steps the same function?" has an exact answer.

# %%
from pathlib import Path

import numpy as np
import quimb.tensor as qtn

import tnsim
from tnsim.analysis import figures

series = tnsim.load(Path(tnsim.__file__).parent / "data" / "modular-addition")
series

# %%
early, late = series[3], series[-1]
late

# %% [markdown]
# ## The network
#
# `tnsim.tensor_networks.network` unrolls a model into a quimb tensor network. Every tensor is
# tagged with its layer, its role and its copy; inputs are lifted, `(1, x)`, so that biases and
# skips are part of the tensor. The hidden rank is one hyperindex that LEFT, RIGHT and DOWN share.

# %%
network = tnsim.tensor_networks.network(late)
network

# %%
[(sorted(tensor.tags), tensor.inds, tensor.shape) for tensor in network]

# %% [markdown]
# Contracted with the lifted input on both legs it is the forward pass.

# %%
x = np.zeros(226)
x[[17, 113 + 40]] = 1.0
lifted = np.concatenate([[1.0], x])
inputs = [qtn.Tensor(lifted, (leg,)) for leg in ("in0", "in1")]
logits = (network & inputs).contract(output_inds=("out",)).data
assert np.allclose(logits, late(x))
int(logits.argmax()), (17 + 40) % 113

# %% [markdown]
# ## The inner product, drawn
#
# The Gaussian metric is `E<A(x), B(x)>` for standard normal `x`. By Isserlis' theorem it is a sum
# over pairings of the four input legs. The two pairings that cross from bra to ket are one orbit of
# the exchange of legs, so one network with a symmetriser on the roles of the ket and weight 2
# stands for both.

# %%
closed = list(tnsim.tensor_networks.networks(early, late))
[(weight, sorted(network.tags)) for weight, network in closed]

# %%
figures.draw(closed[-1][1], f"weight {closed[-1][0]:g}")

# %% [markdown]
# Their weighted sum is `inner`, which plans once per structure and runs through JAX.

# %%
by_quimb = sum(weight * network.contract(output_inds=()) for weight, network in closed)
assert np.isclose(by_quimb, tnsim.inner(early, late), rtol=1e-12)
tnsim.plan(early, late)

# %% [markdown]
# ## Two layers
#
# In a deeper model layer 0 appears once per leg of layer 1. Bra, ket and their operators are told
# apart by marker and colour.

# %%
rng = np.random.default_rng(0)


def bilinear(d_in, rank, d_out):
    return tnsim.Bilinear(
        rng.normal(size=(rank, d_in)), rng.normal(size=(rank, d_in)), rng.normal(size=(d_out, rank))
    )


a, b = (tnsim.Model([bilinear(4, 6, 3), bilinear(3, 5, 2)]) for _ in range(2))
((weight, two_layers),) = tnsim.tensor_networks.networks(a, b, tnsim.TreeSymmetric())
figures.draw(two_layers, "two layers under TreeSymmetric")

# %%
assert np.isclose(
    two_layers.contract(output_inds=()), tnsim.inner(a, b, tnsim.TreeSymmetric()), rtol=1e-12
)
two_layers.select("LAYER0")

# %% [markdown]
# ## The run
#
# Similarity 1 means the same function up to a positive factor. `slices` asks it of every output on
# its own, and a difference of models is a model too: how much of the final function is what changed
# after step 400?

# %%
matrix = np.array([[tnsim.similarity(p, q) for q in series] for p in series])
figures.heatmap(matrix, series.labels, "modular addition, all pairs")

# %%
slices = tnsim.slices(early, late)
print(f"outputs from {slices.min():.3f} to {slices.max():.3f}")
tnsim.similarity(late, late - early)
