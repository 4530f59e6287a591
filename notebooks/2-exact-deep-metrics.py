# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # 2. Exact deep metrics, diagram by diagram
#
# For two nonlinear layers a model is a quartic polynomial, and `E<A(x), B(x)>` is a sum over the
# 105 ways of pairing the eight input legs of bra and ket. Symmetrised, all pairings in one orbit of
# the trees' automorphisms give the same number, and ten diagrams remain.

# %%
import math

import numpy as np

import tnsim
from tnsim.analysis import figures
from tnsim.metrics.orbits import Tree, diagrams

two = Tree((2, 2))
for diagram in diagrams(two, two, cross_only=False):
    print(f"{diagram.count:3d}  {diagram.edges}")

# %% [markdown]
# Nodes 0 and 1 are the first-layer nodes of the bra, 2 and 3 those of the ket. An edge from a node
# to itself only shifts that node's constant. The orbits hold all pairings, and three layers have
# 606 of them for two million pairings.

# %%
three = Tree((2, 2, 2))
orbits = diagrams(three, three, cross_only=False)
assert sum(d.count for d in diagrams(two, two, False)) == math.prod(range(1, 8, 2)) == 105
assert sum(d.count for d in orbits) == math.prod(range(1, 16, 2)) == 2_027_025
len(orbits), len(diagrams(three, three, cross_only=True))


# %% [markdown]
# ## Drawn
#
# `networks` yields each diagram as a closed quimb network with its weight. The two that the closure
# lacks are the last ones in which all four first-layer nodes hang together in one cycle.


# %%
def stack(depth, width, rank, seed):
    g = np.random.default_rng(seed)

    def weight(rows, columns):
        return g.normal(size=(rows, columns)) / np.sqrt(columns)

    return tnsim.Model(
        [
            tnsim.Bilinear(weight(rank, width), weight(rank, width), weight(width, rank))
            for _ in range(depth)
        ]
    )


a, b = stack(2, 3, 4, 0), stack(2, 3, 4, 1)
closed = list(tnsim.tensor_networks.networks(a, b))
total = sum(weight * network.contract(output_inds=()) for weight, network in closed)
assert np.isclose(total, tnsim.inner(a, b), rtol=1e-11)
[weight for weight, _ in closed]

# %%
figures.draw(closed[7][1], f"cycle with neighbours inside bra and ket, {closed[7][0]:g} pairings")

# %%
figures.draw(closed[9][1], f"cycle that alternates between bra and ket, {closed[9][0]:g} pairings")

# %% [markdown]
# ## How wrong is the closure?
#
# `GaussianClosure` treats hidden states as Gaussian. It has no way to know their fourth cumulants,
# which those cycles are, and its results say so: `exact` is False. Sampling agrees with the exact
# value.

# %%
exact, approximate = tnsim.similarity(a, b), tnsim.similarity(a, b, tnsim.GaussianClosure())
print(f"exact {exact:.4f} ({exact.exact}), closure {approximate:.4f} ({approximate.exact})")
check = tnsim.check(a, b, samples=100_000)
assert abs(check.deviation) < 5
check

# %% [markdown]
# The error grows with depth and shrinks with width: wide layers average many terms and become more
# Gaussian.

# %%
rows = []
for depth, widths in ((2, (2, 4, 8)), (3, (2,))):
    for width in widths:
        errors = []
        for seed in range(3 if depth == 2 else 1):
            p, q = stack(depth, width, width, 10 + seed), stack(depth, width, width, 20 + seed)
            errors.append(
                abs(tnsim.similarity(p, q) - tnsim.similarity(p, q, tnsim.GaussianClosure()))
            )
        rows.append((depth, width, float(np.mean(errors)), float(np.max(errors))))
        print(
            f"depth {depth}, width {width:2d}: "
            f"mean |error| of the cosine {rows[-1][2]:.4f}, largest {rows[-1][3]:.4f}"
        )

# %% [markdown]
# ## What sharing saves
#
# All diagrams of an inner product form one plan, in which each distinct part is contracted once and
# sums are taken before products.

# %%
tnsim.plan(stack(2, 32, 64, 0), stack(2, 32, 64, 1))
