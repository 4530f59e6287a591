"""Models with activations, and an oracle of their inner products by nested panels of quadrature.

The oracle knows two normal coordinates and no kernel. Kinks of activations lie on lines: the outer
panels end where two lines cross, the inner ones on the lines themselves, so that every panel holds
an analytic function. A line w x + v y = c that is steep takes its inner integral from one side to
the other within |v / w|, so outer panels are of that length along a steep line.
"""

import numpy as np

import tnsim
from tnsim.activations.kernels import GatedPairing, between, gated_expanded, in_turn

NODES, STEEPER_NODES = 20, 28  # 28 follow what turns within a tenth of a panel, to 1e-13
KINKS = {"relu6": (0.0, 6.0), "hardtanh": (-1.0, 1.0), "hardswish": (-3.0, 3.0)}
KINKED = ("relu", "leaky_relu", "relu2", "abs", "step", "elu")
STEEP = 0.5  # panels of length 1 resolve what changes over more than half of it
STEEPEST = 5.0  # 20 nodes of a panel follow a smooth activation of such an argument
REACH = 9.5  # 1e-20 of the mass of a standard normal coordinate lies beyond


def mlp(generator, activation, hidden=5, outputs=2, inputs=2):
    """A network of one hidden layer with biases."""
    first = tnsim.Linear(generator.normal(size=(hidden, inputs)), generator.normal(size=hidden))
    last = tnsim.Linear(generator.normal(size=(outputs, hidden)), generator.normal(size=outputs))
    return tnsim.Model([first, tnsim.Elementwise(activation), last])


def gated(generator, activation, hidden=5, outputs=2, inputs=2):
    """A gated layer with biases."""
    shapes = (hidden, inputs), (hidden, inputs), (outputs, hidden)
    gate, up, down = (generator.normal(size=shape) for shape in shapes)
    biases = (generator.normal(size=size) for size in (hidden, hidden, outputs))
    return tnsim.Model([tnsim.Gated(gate, up, down, activation, *biases)])


def gated_kernel(f, g, units, other_units):
    """E f(u_i) w_i g(v_j) w'_j for all pairs of gated units."""
    first, second = gated_expanded(f, units), gated_expanded(g, other_units)
    return between(GatedPairing(first.f, second.f), first, second, in_turn)


def gaussian(generator, inputs=2):
    """A Gaussian metric with a mean and a full covariance."""
    root = generator.normal(size=(inputs, inputs))
    return tnsim.Gaussian(generator.normal(size=inputs), root @ root.T)


def lines(model, metric, root):
    """The lines w . z = c on which a model of two inputs has kinks, and how steep it is elsewhere.

    Rows (w, c), and the largest entry of a row of what a smooth activation reads.
    """
    found, state = [], (np.eye(2), np.zeros(2))
    for layer in model.layers:
        while isinstance(layer, tnsim.Residual):
            layer = layer.layer
        if isinstance(layer, tnsim.Linear):
            bias = 0.0 if layer.bias is None else layer.bias
            state = layer.weight @ state[0], layer.weight @ state[1] + bias
            continue
        if not isinstance(layer, tnsim.Elementwise | tnsim.Gated):
            break
        gates = state
        if isinstance(layer, tnsim.Gated):
            bias = 0.0 if layer.gate_bias is None else layer.gate_bias
            gates = layer.gate @ state[0], layer.gate @ state[1] + bias
        name = layer.activation.name
        rows = gates[0] @ root
        if name not in KINKS and name not in KINKED:
            return np.zeros((0, 3)), np.abs(rows).max()
        mean = np.zeros(2) if metric.mean is None else metric.mean
        for kink in KINKS.get(name, (0.0,)):
            found.append(np.column_stack([rows, kink - gates[1] - gates[0] @ mean]))
        break
    return np.concatenate(found) if found else np.zeros((0, 3)), 0.0


def panels(splits, nodes=NODES):
    """Gauss-Legendre nodes and normal weights of panels of length at most 1 between splits."""
    places, legendre = np.polynomial.legendre.leggauss(nodes)
    ends = np.unique(np.clip([*splits, *np.arange(-REACH, REACH + 0.1)], -REACH, REACH))
    lengths = np.diff(ends)
    at = (ends[:-1, None] + 0.5 * lengths[:, None] * (places + 1)).ravel()
    weights = (0.5 * lengths[:, None] * legendre).ravel()
    return at, weights * np.exp(-0.5 * at**2) / np.sqrt(2 * np.pi)


def points(models, metric):
    """Inputs and weights that integrate products of models of two inputs to rounding."""
    values, vectors = np.linalg.eigh(np.eye(2) if metric.cov is None else metric.cov)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    kinks, steepness = zip(*(lines(model, metric, root) for model in models), strict=True)
    edges = np.concatenate(kinks)
    nodes = STEEPER_NODES if max(steepness) > STEEPEST else NODES
    crossings = []
    for n, one in enumerate(edges):
        for two in edges[:n]:
            matrix = np.stack([one[:2], two[:2]])
            if abs(np.linalg.det(matrix)) > 1e-9:
                crossings.append(np.linalg.solve(matrix, [one[2], two[2]])[0])
    steps = np.arange(-REACH, REACH + 0.1)
    for w, v, c in edges:
        if abs(v) < STEEP * abs(w):
            crossings += [c / w] if abs(v) <= 1e-9 else [*((c - v * steps) / w)]
    found, weights = [], []
    for x, weight in zip(*panels(crossings, nodes), strict=True):
        at, inner = panels([(c - w * x) / v for w, v, c in edges if abs(v) > 1e-9], nodes)
        found.append(np.column_stack([np.full(len(at), x), at]))
        weights.append(weight * inner)
    mean = 0.0 if metric.mean is None else metric.mean
    return np.concatenate(found) @ root.T + mean, np.concatenate(weights)


def by_quadrature(a, b, metric):
    """`E a b` by output, and the squared norms of both, from forward passes alone."""
    x, weights = points([a, b], metric)
    one, two = a(x), b(x)
    # Pairwise sums along contiguous rows: a running sum of 10^6 terms loses the small ones, 1e-13.
    return tuple(
        (weights * (f * g).T.copy()).sum(axis=-1) for f, g in ((one, two), (one, one), (two, two))
    )
