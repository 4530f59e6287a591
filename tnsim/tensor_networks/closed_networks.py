"""Closed networks of an inner product. In: two models and a metric. Out: weighted, tagged quimb networks.

The sum of weight times contraction is `inner`. Bra and ket are unrolled (see `unrolled`), and every way of
joining their legs that the metric asks for is one network: operators sit on it as nodes tagged
`SYMMETRISER`, `COVARIANCE` and `MEAN`, and an identity covariance is an index that two legs share. This is
the picture and the reference; plans never unroll.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tnsim.errors import ModelError
from tnsim.folding import whole_tree as deep
from tnsim.folding.alignment import Step, align
from tnsim.metrics import metric as metrics
from tnsim.metrics import pairings as diagrams
from tnsim.metrics.metric import Categorical, Gaussian, Metric
from tnsim.metrics.orbits import diagrams as diagrams_of_trees
from tnsim.models.model import Model, check_comparable
from tnsim.names import COVARIANCE, MEAN, OUT, bond_index
from tnsim.tensor_networks.network import MAX_TENSORS, Copy, check_models, tree_tensors
from tnsim.tensors.flattened import flat_kind
from tnsim.tensors.lifted import kind
from tnsim.tensors.positional import sequence_kind

if TYPE_CHECKING:
    import quimb.tensor as qtn


def networks(
    a: Model, b: Model, metric: Metric = Gaussian(), max_tensors: int = MAX_TENSORS
) -> Iterator[tuple[float, qtn.TensorNetwork]]:
    """Yield (weight, closed network), bra `A` and ket `B`; contract each with `output_inds=()`.

    Models of sequences meet on flattened legs (see `unrolled`), layer over layer. Attention joins five legs: its symmetriser lets one
    network stand for an orbit, 3 for the 945 pairings of two layers without constants, 21 with them.
    Raises `TooLarge` when bra and ket together have more than `max_tensors` tensors, or as `inner` does; `ModelError` as `inner` does,
    except that the Gaussian metrics let an attention layer meet a bilinear one here.
    The number of networks grows quickly with depth for `GaussianClosure`; the iterator is lazy.
    """
    check_models([a, b], max_tensors)
    metrics.check_metric(metric)
    if isinstance(metric, Categorical):
        raise ModelError(
            "Categorical counts tokens and joins no legs, so it has no networks; inner() computes it without"
        )
    check_comparable(a, b)
    nonlinear = max(sum(order > 1 for order in m.orders) for m in (a, b))
    whole = metrics.joins_whole_trees(type(metric), nonlinear) and (
        a.n_ctx is None or (nonlinear > 1 and _few_legs(a, b))
    )
    if a.n_ctx is not None and not whole:
        metric = metrics.layer_by_layer(metric, nonlinear, (a.degree, b.degree))
        return _generate(a, b, metrics.flattened(metric, a.d_in, a.n_ctx))
    if whole:
        return _whole_trees(*deep.of_even_degree(a, b, metric), metric)
    return _generate(a, b, metric)


class _End(NamedTuple):
    """The output bond of one copy: side, and number of the copy among those below `steps` steps."""

    side: str
    copy: int


class _Choice(NamedTuple):
    """One way to join: its weight, the leaf legs paired and capped, the copies to symmetrise."""

    weight: float = 1.0
    pairs: tuple[tuple[_End, _End], ...] = ()
    caps: tuple[_End, ...] = ()
    symmetrised: tuple[Copy, ...] = ()

    def times(self, other: _Choice) -> _Choice:
        return _Choice(
            self.weight * other.weight, *(x + y for x, y in zip(self[1:], other[1:], strict=True))
        )


def _generate(a: Model, b: Model, metric: Metric) -> Iterator[tuple[float, qtn.TensorNetwork]]:
    import quimb.tensor as qtn

    models = {"A": a, "B": b}
    kinds = [sequence_kind(layer) for m in models.values() for layer in m.layers]
    lifted = any(k.biases or k.skips for k in kinds)
    joins = _Joins(models, metric, lifted)
    moments = metrics.input_moments(metric, a.d_in * (a.n_ctx or 1), lifted=True)
    mean, moment = np.asarray(moments["mean"]), moments.get("moment")
    tops = {bond_index(side, len(m.layers) - 1, 0): OUT for side, m in models.items()}
    for choice in joins.pair(_End("A", 0), _End("B", 0), len(joins.steps)):
        tensors = [
            t for side, m in models.items() for t in tree_tensors(m, side, choice.symmetrised)
        ]
        merged = dict(tops)
        for one, two in choice.pairs:
            ends = [bond_index(end.side, -1, end.copy) for end in (one, two)]
            if moment is not None and np.ndim(moment) == 2:
                tensors.append(qtn.Tensor(np.asarray(moment), ends, (COVARIANCE,)))
                continue
            merged[ends[1]] = ends[0]
            if moment is not None:
                tensors.append(qtn.Tensor(np.asarray(moment), ends[:1], (COVARIANCE,)))
        for end in choice.caps:
            tensors.append(qtn.Tensor(mean, (bond_index(end.side, -1, end.copy),), (MEAN,)))
        yield choice.weight, qtn.TensorNetwork(tensors).reindex(merged)


def _whole_trees(a: Model, b: Model, metric: Metric) -> Iterator[tuple[float, qtn.TensorNetwork]]:
    """One network per diagram, every nonlinear copy symmetrised; with a constant or a mean, at each moment node."""
    import quimb.tensor as qtn

    models = {"A": a, "B": b}
    kinds = {
        side: tuple(kind(x) if m.n_ctx is None else flat_kind(x, m.n_ctx) for x in m.layers)
        for side, m in models.items()
    }
    width = a.d_in * (a.n_ctx or 1)
    metric = metric if a.n_ctx is None else metrics.flattened(metric, a.d_in, a.n_ctx)
    cross_only = isinstance(metric, metrics.Symmetric)
    deep.check_size(kinds, cross_only)
    trees = [deep.tree(k) for k in kinds.values()]
    constant = any(k.constant for found in kinds.values() for k in found)
    homogeneous = cross_only or (not constant and metric.mean is None)
    nodes = (
        ((1.0, 1.0),)
        if homogeneous
        else tuple(zip(*deep.moment_nodes(sum(t.legs for t in trees))[1::-1], strict=True))
    )
    scale = math.factorial(trees[0].legs) if cross_only else 1
    symmetrised = [
        (side, n, copy) for side, m in models.items() for n, copy in _nonlinear_copies(m)
    ]
    tops = {bond_index(side, len(m.layers) - 1, 0): OUT for side, m in models.items()}
    tensors = [t for side, m in models.items() for t in tree_tensors(m, side, symmetrised)]
    for diagram in diagrams_of_trees(*trees, cross_only):
        free = [
            [(side, node * t.bunch + p) for p in range(t.bunch)]
            for side, t in zip("AB", trees, strict=True)
            for node in range(t.bottoms)
        ]
        joined = [
            (bond_index(s, -1, x), bond_index(r, -1, y))
            for u, v in diagram.edges
            for (s, x), (r, y) in [(free[u].pop(), free[v].pop())]
        ]
        for weight, t in nodes:
            moment = None if cross_only else _moment_at(metric, width, t, homogeneous)
            merged, operators = dict(tops), []
            for one, two in joined:
                if moment is None:
                    merged[two] = one
                else:
                    operators.append(qtn.Tensor(moment, (one, two), (COVARIANCE,)))
            yield (
                weight * diagram.count / scale,
                qtn.TensorNetwork([*tensors, *operators]).reindex(merged),
            )


def _few_legs(a: Model, b: Model) -> bool:
    """Whether the joinings of whole trees over flattened sequences can be listed."""
    return a.degree + b.degree <= deep.MAX_LEGS and (a.degree + b.degree) % 2 == 0


def _nonlinear_copies(model: Model) -> Iterator[tuple[int, int]]:
    copies = 1
    for n in reversed(range(len(model.layers))):
        if model.layers[n].order > 1:
            yield from ((n, copy) for copy in range(copies))
        copies *= model.layers[n].order


def _moment_at(metric: Metric, d: int, t: float, homogeneous: bool) -> np.ndarray | None:
    """Second moment of the lifted input; None where every leg pair is simply one index.

    Without constants the constant coordinate meets zero weights only, so it may stay in the identity.
    """
    if not homogeneous:
        return np.asarray(metrics.second_moment_at(metric, d, True, t))
    if metric.cov is None:
        return None
    cov = np.asarray(metric.cov)
    return np.pad(np.diag(cov) if cov.ndim == 1 else cov, ((1, 0), (1, 0)))


class _Joins:
    """All ways to join bonds, from the output down, following the same layer alignment as the folded problem."""

    def __init__(self, models: dict[str, Model], metric: Metric, lifted: bool):
        self.models, self.metric = models, metric
        self.steps: tuple[Step, ...] = align(*(m.layers for m in models.values()), metric)
        start = metrics.input_kind(metric, lifted).centred
        self.centred = [
            {side: start and not any(self.order(side, m) > 1 for m in range(n)) for side in models}
            for n in range(len(self.steps) + 1)
        ]

    def layer(self, side: str, step: int) -> int | None:
        return self.steps[step].bra if side == "A" else self.steps[step].ket

    def order(self, side: str, step: int) -> int:
        layer = self.layer(side, step)
        return 1 if layer is None else self.models[side].layers[layer].order

    def pair(self, one: _End, two: _End, steps: int) -> Iterator[_Choice]:
        """Ways to contract two bonds, each the output of `steps` steps."""
        if steps == 0:
            yield _Choice(pairs=((one, two),))
            return
        step = steps - 1
        centred = self.centred[step][one.side] and self.centred[step][two.side]
        orders = self.order(one.side, step), self.order(two.side, step)
        yield from self.expand(self.metric.joinings(*orders, centred), {"A": one, "B": two}, step)

    def mean(self, end: _End, steps: int) -> Iterator[_Choice]:
        """Ways to take the mean of one bond."""
        if steps == 0:
            yield _Choice(caps=(end,))
            return
        joinings = diagrams.gaussian_mean(
            self.order(end.side, steps - 1), self.centred[steps - 1][end.side]
        )
        yield from self.expand(joinings, {"A": end}, steps - 1)

    def expand(
        self, joinings: tuple[diagrams.Joining, ...], ends: dict[str, _End], step: int
    ) -> Iterator[_Choice]:
        def child(leg: diagrams.Leg) -> _End:
            end = ends[leg.side]
            return _End(end.side, end.copy * self.order(end.side, step) + leg.index)

        for joining in joinings:
            copies = [ends[role] for role in joining.symmetrised]
            layers = [(e.side, self.layer(e.side, step), e.copy) for e in copies]
            start = _Choice(
                joining.weight, symmetrised=tuple(c for c in layers if c[1] is not None)
            )
            tasks = [(self.pair, child(one), child(two)) for one, two in joining.pairs]
            tasks += [(self.mean, child(leg)) for leg in joining.capped]
            yield from self.product(start, tasks, step)

    def product(self, start: _Choice, tasks: list, steps: int) -> Iterator[_Choice]:
        if not tasks:
            yield start
            return
        (ways, *ends), *rest = tasks
        for choice in ways(*ends, steps):
            yield from self.product(start.times(choice), rest, steps)
