# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # 8. MLP blocks, layer by layer and checkpoint by checkpoint
#
# A transformer as a whole has no closed form, but each of its MLP blocks is a network of one hidden
# layer: a function of the state that enters it, with an exact similarity under a Gaussian. What a
# block reads is known from the network itself: the mean and the covariance of the states that enter
# it. Here a tiny transformer with softmax, layer norms and GELU is trained on the spot.

# %%
import numpy as np
import torch
from torch import nn

import tnsim
from tnsim.analysis import figures

WIDTH, HIDDEN, LAYERS, VOCABULARY, LENGTH = 16, 48, 2, 12, 16
STEPS = (0, 20, 60, 150, 400)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x):
        y = self.attention_norm(x)
        later = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        x = x + self.attention(y, y, y, attn_mask=later, need_weights=False)[0]
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.unembed = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.unembed(self.blocks(x))


# %% [markdown]
# The task: each token is the sum of the two tokens before it, modulo the size of the vocabulary.


# %%
def sequences(count):
    tokens = [torch.randint(VOCABULARY, (count,)) for _ in range(2)]
    while len(tokens) < LENGTH:
        tokens.append((tokens[-1] + tokens[-2]) % VOCABULARY)
    return torch.stack(tokens, 1)


def train(seed):
    """Checkpoints of one run, by step."""
    torch.manual_seed(seed)
    net, kept = Transformer(), {}
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(max(STEPS) + 1):
        if step in STEPS:
            kept[step] = Transformer().eval()
            kept[step].load_state_dict(net.state_dict())
        tokens = sequences(64)
        logits = net(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits[:, 1:].flatten(0, 1), tokens[:, 2:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    print(f"loss after training: {float(loss):.3f}, by chance {np.log(VOCABULARY):.3f}")
    return kept


run = train(0)
final = run[max(STEPS)]

# %% [markdown]
# ## What enters a block
#
# `inputs_of` runs the network on tokens and returns the states that enter a submodule, a row for
# each position of each sequence. They are far from standard normal, so they go into the metric.

# %%
tokens = sequences(64)[:, :-1]
names = [f"blocks.{n}.mlp" for n in range(LAYERS)]
states = {name: tnsim.inputs_of(final, name, tokens) for name in names}
metrics = {name: tnsim.Gaussian.fit(x) for name, x in states.items()}
{name: (x.shape, np.linalg.eigvalsh(metrics[name].cov)[[0, -1]]) for name, x in states.items()}

# %% [markdown]
# ## Checkpoint by checkpoint
#
# `from_module` reads a block, and says by the forward pass that it is the same function. One
# `pairwise` for each layer compares all checkpoints, exactly.

# %%
blocks = {
    name: {str(step): tnsim.from_module(net.get_submodule(name)) for step, net in run.items()}
    for name in names
}
blocks[names[0]]["400"]

# %%
results = {name: tnsim.pairwise(blocks[name], metrics[name]) for name in names}
results[names[0]]

# %%
figures.pairwise(results[names[0]], "heatmap", ["similarity"])

# %%
figures.pairwise(results[names[1]], "heatmap", ["similarity"])

# %% [markdown]
# How far each block is from its final form:

# %%
{name: result.similarity.sel(b="400").values.round(3) for name, result in results.items()}

# %% [markdown]
# ## Layer by layer
#
# Blocks of one width are functions of the same space, so the first may be compared with the second,
# on the states of either. Layers of one network have nothing in common that a cosine would see.

# %%
first, second = (blocks[name]["400"] for name in names)
{name: float(tnsim.similarity(first, second, metric)) for name, metric in metrics.items()}

# %% [markdown]
# ## The Gaussian is not the data
#
# The same call on the states themselves shows what the Gaussian leaves out. The number under the
# Gaussian is exact for the Gaussian.

# %%
before, after = blocks[names[0]]["150"], first
gaussian = tnsim.similarity(before, after, metrics[names[0]])
data = tnsim.similarity(before, after, tnsim.Empirical(states[names[0]]))
gaussian, data

# %% [markdown]
# ## Which hidden units
#
# The inner product is a sum over pairs of hidden units, which can be read before it is summed: here
# the shares of the ten largest units of the final block in its own squared norm.

# %%
shares = tnsim.attribution(first, first, metrics[names[0]], by="unit")
total = tnsim.inner(first, first, metrics[names[0]])
assert np.isclose(shares.values.sum(), total)
np.sort(shares.values.sum(axis=1) / total)[::-1][:10].round(3)

# %% [markdown]
# ## As a polynomial
#
# A block may be replaced by a bilinear layer, with its error said. From there on everything that
# holds for polynomials applies, such as stacks of several blocks.

# %%
surrogate = tnsim.polynomial(first, degree=2, metric=metrics[names[0]])
surrogate, surrogate.origin.error
