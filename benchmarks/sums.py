"""Sums of tensor networks, by tnsim, by cotengra one network at a time, and by quimb.

Every pairing of the input legs of two models is a network of its own, as a user of quimb would
write them: the 105 pairings of two models of two bilinear layers (eight legs) and the 945 of two
attention layers (ten legs), float64. Their sum is `tnsim.inner(a, b)`. Tools:

- contract: the sum planned as a whole.
- cotengra: for every network the better of its greedy path and the best of 32 random-greedy ones,
  jitted by JAX, with the arrays on the device.
- a jit each: one program for every network. Jits of 105: one for 105 networks together, in which
  XLA finds what they share.
- quimb: `TensorNetwork.contract` along the same paths, on NumPy, results summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import quimb.tensor as qtn

import tnsim


class Tool(NamedTuple):
    """What contracts a sum: its plan, or how many multiplications it plans; and its value."""

    plan: Callable[[], Any]
    call: Callable[[], float]


Leg = tuple[str, ...]
"""Indices of one input leg: a coordinate, and for sequences a position."""


def pairings(legs: list[Leg]) -> Iterator[list[tuple[Leg, Leg]]]:
    """All ways to join legs in pairs."""
    if not legs:
        yield []
        return
    first, *others = legs
    for n, partner in enumerate(others):
        for rest in pairings(others[:n] + others[n + 1 :]):
            yield [(first, partner), *rest]


def closed(bra: list[qtn.Tensor], ket: list[qtn.Tensor], legs: list[Leg]) -> list:
    """One network of weight 1 for every pairing of the legs of both."""
    found = []
    for pairing in pairings(legs):
        tensors = [*bra, *ket]
        for one, two in pairing:
            merged = dict(zip(two, one, strict=True))
            # An index may have been merged before: positions that several legs share are one.
            tensors = [tensor.reindex(merged) for tensor in tensors]
            pairing[:] = [
                tuple(tuple(merged.get(i, i) for i in leg) for leg in ends) for ends in pairing
            ]
        found.append((1.0, qtn.TensorNetwork(tensors)))
    return found


def two_layers(width: int) -> tuple[tnsim.Model, tnsim.Model, list]:
    """Two models of two bilinear layers of rank 2 * width, and the 105 networks."""
    g = np.random.default_rng(0)
    models, sides, legs = [], [], []
    for side in "AB":
        layers, tensors = [], []
        for _ in range(2):
            left, right = (g.normal(size=(2 * width, width)) / math.sqrt(width) for _ in range(2))
            down = g.normal(size=(width, 2 * width)) / math.sqrt(2 * width)
            layers.append(tnsim.Bilinear(left, right, down))
        lower, upper = layers
        tensors.append(qtn.Tensor(upper.down, ("out", f"{side}h"), (side, "DOWN1")))
        for branch, array in (("l", upper.left), ("r", upper.right)):
            place = side + branch
            tensors.append(qtn.Tensor(array, (f"{side}h", f"{place}x")))
            tensors.append(qtn.Tensor(lower.down, (f"{place}x", f"{place}h")))
            tensors.append(qtn.Tensor(lower.left, (f"{place}h", f"{place}0")))
            tensors.append(qtn.Tensor(lower.right, (f"{place}h", f"{place}1")))
            legs += [(f"{place}0",), (f"{place}1",)]
        models.append(tnsim.Model(layers))
        sides.append(tensors)
    return models[0], models[1], closed(*sides, legs)


def one_attention(width: int) -> tuple[tnsim.Model, tnsim.Model, list]:
    """Two attention layers of two heads over four positions, and the 945 networks."""
    n_ctx, heads = 4, 2
    g = np.random.default_rng(0)
    models, sides, legs = [], [], []
    for side in "AB":
        weights = [g.normal(size=(width, width)) / math.sqrt(width) for _ in range(6)]
        model = tnsim.Model([tnsim.Attention(*weights, heads)], n_ctx=n_ctx)
        arrays = {}
        for tensor in tnsim.tensor_networks.network(model):
            (role,) = set(tensor.tags) & {"Q1", "K1", "Q2", "K2", "V", "O", "MASK"}
            arrays[role] = np.asarray(tensor.data)
        out = arrays["O"].reshape(n_ctx, width, n_ctx, heads + 1, -1)[0, :, 0, :heads]
        mask = arrays["MASK"][:heads]
        s, t, a = "s", f"{side}t", f"{side}a"
        tensors = [
            qtn.Tensor(out, ("out", a, f"{side}u")),
            qtn.Tensor(mask, (a, s, t)),
        ]
        places = {"Q1": (s, "x"), "K1": (t, "x"), "Q2": (s, "y"), "K2": (t, "y"), "V": (t, "u")}
        for role, (position, inner) in places.items():
            lifted = arrays[role][:, :heads, :, 1:]  # without the constant, of which there is none
            blocks = lifted.reshape(n_ctx, heads, -1, n_ctx, width)
            own = np.stack([blocks[n, :, :, n] for n in range(n_ctx)])
            leg = f"{side}{role}"
            tensors.append(qtn.Tensor(own, (position, a, side + inner, leg)))
            legs.append((position, leg))
        models.append(model)
        sides.append(tensors)
    return models[0], models[1], closed(*sides, legs)


def searched(networks: list) -> list:
    """A contraction tree of cotengra for every network."""
    import cotengra

    trees = []
    for _, network in networks:
        inputs = [tuple(tensor.inds) for tensor in network]
        sizes = {index: network.ind_size(index) for index in network.ind_map}
        options = [
            "greedy",
            cotengra.RandomGreedyOptimizer(max_repeats=32, seed=0, parallel=False),
        ]
        found = [
            cotengra.array_contract_tree(inputs, (), size_dict=sizes, optimize=option)
            for option in options
        ]
        trees.append(min(found, key=lambda tree: tree.contraction_cost()))
    return trees


def with_contract(networks: list) -> Tool:
    expression = cache(lambda: tnsim.tensor_networks.contract_expression(networks))
    return Tool(lambda: expression().plan, lambda: float(expression()()))


def with_cotengra(networks: list, together: int) -> Tool:
    """Each network along its own tree, so many of them in one jitted program."""
    import jax

    trees = cache(lambda: searched(networks))
    placed = {id(t.data): t.data for _, network in networks for t in network}
    names = list(placed)

    @cache
    def programs() -> tuple[list, list]:
        made = []
        for start in range(0, len(networks), together):
            parts = []
            some = slice(start, start + together)
            for (_, network), tree in zip(networks[some], trees()[some], strict=True):
                parts.append((tree.get_contractor(), [names.index(id(t.data)) for t in network]))
            made.append(jax.jit(partial(_contracted, parts)))
        return made, [jax.device_put(array) for array in placed.values()]

    def summed() -> float:
        with jax.enable_x64(True):
            made, arrays = programs()
            return float(np.sum(jax.device_get([program(arrays) for program in made])))

    return Tool(lambda: _multiplications(trees()), summed)


def _contracted(parts: list, arrays: list) -> Any:
    """The sum of networks, each by its own function of some of the arrays."""
    total = 0.0
    for function, places in parts:
        total = total + function(*(arrays[n] for n in places))
    return total


def with_quimb(networks: list) -> Tool:
    trees = cache(lambda: searched(networks))
    paths = cache(lambda: [tree.get_path() for tree in trees()])

    def summed() -> float:
        total = 0.0
        for (weight, network), path in zip(networks, paths(), strict=True):
            total += weight * network.contract(output_inds=(), optimize=path)
        return total

    return Tool(lambda: _multiplications(trees()), summed)


def _multiplications(trees: list) -> int:
    return sum(int(tree.contraction_cost()) for tree in trees)


FEW = "105 pairings at depth 2"
MANY = "945 of attention"
SUMS: dict[str, Callable[[int], tuple]] = {FEW: two_layers, MANY: one_attention}
EACH = "cotengra, a jit each"
"""Left out where there are many networks: it would compile for minutes."""
TOOLS: dict[str, Callable[[list], Tool]] = {
    "contract": with_contract,
    EACH: partial(with_cotengra, together=1),
    "cotengra, jits of 105": partial(with_cotengra, together=105),
    "quimb": with_quimb,
}
