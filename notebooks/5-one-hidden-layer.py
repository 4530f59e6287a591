# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # 5. An ordinary GELU network, compared from its weights
#
# A network of one hidden layer is no polynomial, yet under a Gaussian its inner product with
# another one is exact: a sum over pairs of hidden units of a known function of two normal numbers.
# Two networks are trained in PyTorch from different seeds, and everything else is read off their
# weights.

# %%
import numpy as np
import torch
from torch import nn

import tnsim
from tnsim.analysis import figures

INPUTS, HIDDEN, OUTPUTS = 6, 24, 2
STEPS = (0, 25, 100, 400, 1600)


def task(x):
    return torch.stack([x[:, 0] * x[:, 1], torch.relu(x[:, 2] + x[:, 3])], 1)


def train(seed):
    """Checkpoints of one run, by step."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, OUTPUTS))
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    kept = {}
    for step in range(max(STEPS) + 1):
        if step in STEPS:
            kept[step] = tnsim.from_module(net)
        x = torch.randn(256, INPUTS)
        loss = nn.functional.mse_loss(net(x), task(x))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return kept


first, second = train(0), train(1)
first[1600]

# %% [markdown]
# `from_module` read the activation in the module's graph and compared the model with the module's
# own forward pass. GELU and its form by tanh, as in GPT-2, differ by 4e-4 and are two activations
# here.
#
# ## Two seeds

# %%
a, b = first[1600], second[1600]
tnsim.similarity(a, b)

# %% [markdown]
# The number is exact, and no data were drawn. Sampling agrees within its standard error:

# %%
tnsim.check(a, b, samples=65536)

# %% [markdown]
# Shuffling hidden units changes nothing, though a cosine of the weights is lost:

# %%
order = np.random.default_rng(0).permutation(HIDDEN)
into, activation, out = a.layers
shuffled = tnsim.Model(
    [
        tnsim.Linear(into.weight[order], into.bias[order]),
        activation,
        tnsim.Linear(out.weight[:, order], out.bias),
    ]
)
similarity = tnsim.similarity(a, shuffled)
assert abs(similarity - 1) < 1e-12
similarity, tnsim.baselines.weight_cosine([a, shuffled])[0, 1]

# %% [markdown]
# ## Where it counts: a Gaussian of your data
#
# The metric says which inputs count. `Gaussian.fit` takes the mean and the covariance of data or of
# activations; here the first two inputs are made rare.

# %%
data = np.random.default_rng(0).normal(size=(2000, INPUTS)) * [0.1, 0.1, 1, 1, 1, 1]
metric = tnsim.Gaussian.fit(data)
tnsim.similarity(a, b, metric), np.asarray(tnsim.slices(a, b, metric))

# %% [markdown]
# ## All pairs of two runs

# %%
run = tnsim.pairwise(
    {**{f"first {n}": m for n, m in first.items()}, **{f"second {n}": m for n, m in second.items()}}
)
run

# %%
figures.pairwise(run, "heatmap", ["similarity"])

# %% [markdown]
# ## Hidden units that agree
#
# The inner product is a sum over pairs of hidden units, so it can be read before it is summed.

# %%
shares = tnsim.paths(a, b, by="unit")
assert np.isclose(shares.values.sum(), tnsim.inner(a, b))
units = shares.values[1:, 1:]
largest = np.unravel_index(np.argsort(units, axis=None)[-3:], units.shape)
[
    (shares.bra[1 + i], shares.ket[1 + j], units[i, j] / tnsim.inner(a, b))
    for i, j in zip(*largest, strict=True)
]

# %% [markdown]
# ## As a network
#
# The metric is an operator between the hidden legs: one node, tagged `KERNEL`, in a closed network
# of three. Contracted it is the inner product.

# %%
((weight, network),) = tnsim.tensor_networks.networks(a, b)
assert np.isclose(weight * network.contract(output_inds=()), tnsim.inner(a, b))
[(sorted(tensor.tags), tensor.shape) for tensor in network]
