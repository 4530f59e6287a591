"""Exact deep metrics as a folded problem. In: layer kinds, diagrams. Out: a `Problem`.

`Gaussian` and `Symmetric` join the legs of whole trees, not layer by layer: an inner product is a sum over
diagrams (see `orbits`), each a small network over the layers' symmetrised tensors. What every diagram
needs is defined once: second moments behind the leading linear layers, layer tensors with the linear
layers after them, the mean of a first-layer node (a pair inside a node only gives that vector: Wick
ordering). The diagrams are then one weighted sum, which `planning` contracts with shared parts done once
and sums taken before products.

Everything is homogeneous in the lifted input, which is treated as centred: with a constant or a mean the
problem is run at several second moments `C + t m m^T` and combined (see `moment_nodes`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import numpy as np

from tnsim.engine.problem import Definition, Gauge, Merge, Operand, Problem, Stage, Term, prune
from tnsim.errors import ModelError, TooLarge
from tnsim.metrics.metric import Gaussian, InputKind, Metric, joins_whole_trees
from tnsim.metrics.orbits import Diagram, Tree, diagrams
from tnsim.models.layers import Bilinear
from tnsim.models.model import Model
from tnsim.names import (
    COVARIANCE,
    DENSE,
    FACTOR,
    IDENTITY,
    PAIRS,
    SIGNED_DOWN,
    TRACE,
    WEIGHT,
    Leaf,
    Pair,
    Side,
)
from tnsim.tensors.lifted import Kind, arrays, symmetric_shapes


class Nodes(NamedTuple):
    """`E = sum(weights * F(points))` for the pairing sum F at second moment C + t m m^T."""

    points: tuple[float, ...]
    weights: tuple[float, ...]
    magnification: float


@cache
def moment_nodes(legs: int) -> Nodes:
    """Points t and weights that undo the over-counting of a constant treated as a Gaussian of variance t.

    F is a polynomial of degree n = legs / 2 in t whose t^k coefficient holds the true term (2k-1)!! times, so
    the weights solve sum_j w_j t_j^k = 1 / (2k-1)!! for k = 0..n. Chebyshev points on [-h, h], with the h that
    magnifies rounding least: `magnification` is the largest factor over k, 3 at n = 2, 10 at n = 4, 340 at n = 8.
    """
    n = legs // 2
    factorials = np.cumprod([1.0] + [2 * k - 1.0 for k in range(1, n + 1)])
    chebyshev = np.cos(np.pi * (2 * np.arange(n + 1) + 1) / (2 * n + 2))
    best = None
    for half in np.linspace(0.1, 1.0, 91):
        points = half * chebyshev
        powers = points[None, :] ** np.arange(n + 1)[:, None]
        weights = np.linalg.solve(powers, 1 / factorials)
        magnification = float((np.abs(weights) @ np.abs(powers).T * factorials).max())
        if best is None or magnification < best.magnification:
            best = Nodes(tuple(map(float, points)), tuple(map(float, weights)), magnification)
    return best


MAX_LEGS = 20


def of_even_degree(a: Model, b: Model, metric: Metric) -> tuple[Model, Model]:
    """The models as the diagrams of whole trees want them: a linear one beside a deep one is raised."""
    depths = [sum(order > 1 for order in m.orders) for m in (a, b)]
    if isinstance(metric, Gaussian) and joins_whole_trees(Gaussian, max(depths)):
        return a if depths[0] else raised(a), b if depths[1] else raised(b)
    return a, b


def raised(model: Model) -> Model:
    """A linear model as the bilinear one that multiplies it by a constant: the same function, of an even degree.

    Diagrams over whole trees pair all legs, so two models must have an even number of them together.
    """
    weight = arrays(model.layers[-1], lifted=True)[WEIGHT]
    rank, dtype = weight.shape[0] - 1, weight.dtype
    zero, one = np.zeros((rank, weight.shape[1] - 1), dtype), np.ones(rank, dtype)
    last = Bilinear(weight[1:, 1:], zero, np.eye(rank, dtype=dtype), weight[1:, 0], one)
    return Model((*model.layers[:-1], last))


def check_size(models: dict[Side, tuple[Kind, ...]], cross_only: bool) -> None:
    """Raise `TooLarge` before diagrams are generated that nobody could contract, `ModelError` where P_n does not exist."""
    legs = [tree(kinds).legs for kinds in (models["A"], models.get("B", models["A"]))]
    if cross_only and legs[0] != legs[1]:
        raise ModelError(
            f"Symmetric() compares tensors of one order, but the models have degrees {legs[0]} and {legs[1]}; use Gaussian()"
        )
    if sum(legs) > MAX_LEGS:
        raise TooLarge(
            f"the exact metric joins {sum(legs)} legs in more than 10^{sum(legs) // 2 - 2} ways; up to {MAX_LEGS} legs are planned "
            "(three bilinear layers a side have 16). Use GaussianClosure(), an approximation, or TreeSymmetric()"
        )


class Groups(NamedTuple):
    """A model's layers: the leading linear ones, then each nonlinear layer with the linear ones after it."""

    leading: tuple[int, ...]
    nonlinear: tuple[tuple[int, tuple[int, ...]], ...]


def tree(kinds: tuple[Kind, ...]) -> Tree:
    return Tree(tuple(k.order for k in kinds if k.order > 1))


def groups(kinds: tuple[Kind, ...]) -> Groups:
    leading: list[int] = []
    found: list[tuple[int, list[int]]] = []
    for n, kind in enumerate(kinds):
        if kind.order > 1:
            found.append((n, []))
        elif found:
            found[-1][1].append(n)
        else:
            leading.append(n)
    return Groups(tuple(leading), tuple((n, tuple(after)) for n, after in found))


def fold(
    models: dict[Side, tuple[Kind, ...]],
    cross_only: bool,
    inputs: InputKind,
    lifted: bool,
    pairs: Iterable[Pair],
    per_output: bool,
    n_ctx: int = 1,
) -> Problem:
    """The problem whose outputs are the inner products `pairs`, every diagram written in several ways.

    "factors": each layer tensor as SIGNED_DOWN and FACTOR over its hidden units. "units": only matrices between
    hidden units of neighbouring layers, so a diagram is a graph whose vertices are hidden units. "matrices": the
    same, but a first-layer node is the matrix over two input legs that a unit of the layer above sees. "dense": full
    layer tensors, the only way where a layer comes as its tensor (`flattening`). With `n_ctx` outputs are added up over
    positions, by the second axis of `TRACE`. Leaves are those of `local.symmetric_arrays`, the input's second moment
    `COVARIANCE` and, lifted, `TRACE`.
    """
    return _Folder(models, cross_only, inputs, lifted, tuple(pairs), n_ctx).problem(per_output)


class _Folder:
    def __init__(
        self,
        models,
        cross_only: bool,
        inputs: InputKind,
        lifted: bool,
        pairs: tuple[Pair, ...],
        n_ctx: int,
    ):
        self.models, self.cross_only, self.inputs, self.lifted = models, cross_only, inputs, lifted
        self.pairs, self.n_ctx = pairs, n_ctx
        self.groups = {side: groups(kinds) for side, kinds in models.items()}
        self.trees = {side: tree(kinds) for side, kinds in models.items()}
        depth = min(len(t.orders) for t in self.trees.values())
        self.forms = ("factors", "units", "dense", "matrices")[
            : 1 if depth == 0 else 3 if depth == 1 else 4
        ]
        if any(
            self.is_dense(side, level)
            for side, tree_ in self.trees.items()
            for level in range(len(tree_.orders))
        ):
            self.forms = ("dense",)

    def is_dense(self, side: Side, level: int) -> bool:
        """Whether a nonlinear layer is given by its tensor."""
        return self.models[side][self.groups[side].nonlinear[level][0]].name == "Attention"

    @property
    def trace(self) -> Operand:
        """Leaves out the constant row and, for sequences, adds up positions: the output `k` becomes `o`."""
        return Operand(TRACE, ("k",) if self.n_ctx == 1 else ("k", "o"))

    def problem(self, per_output: bool) -> Problem:
        basis, gauges = self.basis()
        gauges += tuple(Gauge(pair.group, 1, pair.group, 1) for pair in self.pairs)
        outputs = tuple(self.output(pair, per_output) for pair in self.pairs)
        stages = [Stage(basis, gauges), Stage(self.tensors(), gauges), Stage(outputs, gauges)]
        shapes = {
            COVARIANCE: (self.d_in,) if self.inputs.moment == "diagonal" else (self.d_in, self.d_in)
        }
        for side, kinds in self.models.items():
            for n, kind in enumerate(kinds):
                shapes |= {
                    str(Leaf(side, n, role)): shape
                    for role, shape in symmetric_shapes(kind, self.lifted).items()
                }
        d_out = self.models["A"][-1].d_out
        shapes[TRACE] = (
            (d_out + self.lifted,) if self.n_ctx == 1 else (d_out + 1, d_out // self.n_ctx + 1)
        )
        shapes[IDENTITY] = (self.d_in, self.d_in)
        symmetric = frozenset(
            {COVARIANCE, IDENTITY} if self.inputs.moment != "diagonal" else {IDENTITY}
        )
        return prune(
            Problem(tuple(stages), shapes, symmetric, tuple(pair.group for pair in self.pairs))
        )

    @property
    def d_in(self) -> int:
        return self.models["A"][0].d_in + self.lifted

    def basis(self) -> tuple[tuple[Definition, ...], tuple[Gauge, ...]]:
        """Arrays per layer, each in a scale group of its own, and second moments behind leading linear layers."""
        definitions, gauges = [], []
        for side, found in self.groups.items():
            for level, (n, after) in enumerate(found.nonlinear):
                weights = [
                    Operand(str(Leaf(side, m, WEIGHT)), (f"x{i + 1}", f"x{i}"))
                    for i, m in enumerate(after)
                ]
                if self.is_dense(side, level):
                    legs = tuple(f"i{p}" for p in range(self.trees[side].orders[level]))
                    name, whole = (
                        f"T.{side}{level}",
                        (Operand(str(Leaf(side, n, DENSE)), ("x0", *legs)), *weights),
                    )
                    definitions.append(
                        Definition(
                            name,
                            (f"x{len(after)}", *legs),
                            (Term(1.0, whole),),
                            powers=((name, 1),),
                        )
                    )
                    gauges.append(Gauge(name, 1, name, 1))
                    continue
                chain = [Operand(str(Leaf(side, n, SIGNED_DOWN)), ("x0", "h")), *weights]
                down = Definition(
                    f"D.{side}{level}", (f"x{len(after)}", "h"), (Term(1.0, tuple(chain)),)
                )
                factor = Definition(
                    f"P.{side}{level}",
                    ("h", "i"),
                    (Term(1.0, (Operand(str(Leaf(side, n, FACTOR)), ("h", "i")),)),),
                )
                for d in (down, factor):
                    gauges.append(Gauge(d.name, 1, d.name, 1))
                    definitions.append(
                        Definition(d.name, d.indices, d.terms, powers=((d.name, 1),))
                    )
        definitions += [
            self.moment(pair)
            for pair in PAIRS
            if set(pair) <= set(self.models) and self.leads(pair)
        ]
        return tuple(definitions), tuple(gauges)

    def leads(self, pair: Pair) -> bool:
        """Whether linear layers stand between the inputs and the first nonlinear layers of a pair."""
        return any(self.groups[side].leading for side in pair)

    def moment(self, pair: Pair) -> Definition:
        """W_X C W_Y^T over the leading linear layers of both sides."""
        merged, operands = Merge(), []
        ends = []
        for role, side in zip("AB", pair, strict=True):
            leading = self.groups[side].leading
            operands += [
                Operand(str(Leaf(side, n, WEIGHT)), (f"{role}{i + 1}", f"{role}{i}"))
                for i, n in enumerate(leading)
            ]
            ends.append(f"{role}{len(leading)}")
        if self.inputs.moment == "full":
            operands.append(Operand(COVARIANCE, ("A0", "B0")))
        else:
            merged.unite("A0", "B0")
            operands += [Operand(COVARIANCE, ("A0",))] if self.inputs.moment == "diagonal" else []
        for end, output in zip(ends, ("k", "l"), strict=True):
            merged.unite(end, output)
        term = Term(
            1.0, tuple(Operand(o.name, tuple(map(merged.find, o.indices))) for o in operands)
        )
        return Definition(f"S.{pair.group}", ("k", "l"), (term,), symmetric=pair.bra == pair.ket)

    def tensors(self) -> tuple[Definition, ...]:
        """Dense layer tensors, the means of the first-layer nodes, and matrices between hidden units."""
        found = []
        for side, tree_ in self.trees.items():
            for level in range(len(tree_.orders)):
                if self.is_dense(side, level):
                    continue
                term = Term(1.0, self.node(side, level, "o", ["i", "j"], dense=False))
                powers = ((f"D.{side}{level}", 1), (f"P.{side}{level}", 2))
                found.append(
                    Definition(f"T.{side}{level}", ("o", "i", "j"), (term,), powers=powers)
                )
                if level == 0:
                    merged = Merge()
                    joined = self.join(Pair(side, side), ["i", "j"], merged)
                    operands = (*self.node(side, 0, "o", ["i", "j"], False), *joined)
                    term = Term(
                        1.0,
                        tuple(
                            Operand(o.name, tuple(map(merged.find, o.indices))) for o in operands
                        ),
                    )
                    found.append(Definition(f"m.{side}", ("o",), (term,), powers=powers))
        return (*found, *(self.unit_matrices() if "units" in self.forms else ()))

    def unit_matrices(self) -> list[Definition]:
        """Matrices between hidden units: `U` up a tree, `G` across a pair of legs, `K` at the outputs, `u` from means."""
        found = []
        for side, tree_ in self.trees.items():
            for level in range(1, len(tree_.orders)):
                up = (
                    Operand(f"P.{side}{level}", ("h", "o")),
                    Operand(f"D.{side}{level - 1}", ("o", "g")),
                )
                found.append(Definition(f"U.{side}{level}", ("h", "g"), (Term(1.0, up),)))
            if len(tree_.orders) > 1:
                mean = (Operand(f"P.{side}1", ("h", "o")), Operand(f"m.{side}", ("o",)))
                found.append(Definition(f"u.{side}", ("h",), (Term(1.0, mean),)))
                seen = (
                    Operand(f"P.{side}1", ("h", "o")),
                    *self.node(side, 0, "o", ["i", "j"], False),
                )
                found.append(Definition(f"M.{side}", ("h", "i", "j"), (Term(1.0, seen),)))
        for pair in PAIRS:
            if not set(pair) <= set(self.models):
                continue
            merged = Merge()
            joined = self.join(pair, ["i", "j"], merged)
            ends = [
                Operand(f"P.{side}0", (x, leg))
                for side, x, leg in zip(pair, "hg", "ij", strict=True)
            ]
            operands = tuple(
                Operand(o.name, tuple(map(merged.find, o.indices))) for o in (*ends, *joined)
            )
            found.append(
                Definition(
                    f"G.{pair.group}",
                    ("h", "g"),
                    (Term(1.0, operands),),
                    symmetric=pair.bra == pair.ket,
                )
            )
            tops = [
                Operand(f"D.{side}{len(self.trees[side].orders) - 1}", ("k", x))
                for side, x in zip(pair, "hg", strict=True)
            ]
            tops += [self.trace] if self.lifted else []
            found.append(
                Definition(
                    f"K.{pair.group}",
                    ("h", "g"),
                    (Term(1.0, tuple(tops)),),
                    symmetric=pair.bra == pair.ket,
                )
            )
        return found

    def node(
        self, side: Side, level: int, out: str, legs: list[str], dense: bool
    ) -> tuple[Operand, ...]:
        """The symmetrised tensor of one nonlinear layer, dense or over its hidden units."""
        if dense:
            return (Operand(f"T.{side}{level}", (out, *legs)),)
        factors = tuple(Operand(f"P.{side}{level}", (f"h{out}", leg)) for leg in legs)
        return (Operand(f"D.{side}{level}", (out, f"h{out}")), *factors)

    def join(self, pair: Pair, ends: list[str], merged: Merge) -> list[Operand]:
        """The second moment between two legs of the models `pair`."""
        if pair == ("B", "A"):
            pair, ends = Pair("A", "B"), ends[::-1]
        if self.leads(pair):
            return [Operand(f"S.{pair.group}", tuple(ends))]
        if self.inputs.moment == "full":
            return [Operand(COVARIANCE, tuple(ends))]
        merged.unite(*ends)
        return [] if self.inputs.moment == "identity" else [Operand(COVARIANCE, (ends[0],))]

    def output(self, pair: Pair, per_output: bool) -> Definition:
        """All diagrams of one inner product."""
        trees = self.trees[pair.bra], self.trees[pair.ket]
        legs = trees[0].legs
        scale = float(np.prod(np.arange(1.0, legs + 1))) if self.cross_only else 1.0
        terms = []
        for diagram in diagrams(*trees, self.cross_only):
            first, *rest = (self.written(pair, diagram, form, per_output) for form in self.forms)
            terms.append(Term(diagram.count / scale, first, tuple(rest)))
        powers: dict[str, int] = {}
        for side in pair:
            copies = 1
            for level in reversed(range(len(self.trees[side].orders))):
                parts = ((f"D.{side}{level}", copies), (f"P.{side}{level}", 2 * copies))
                for name, times in (
                    ((f"T.{side}{level}", copies),) if self.is_dense(side, level) else parts
                ):
                    powers[name] = powers.get(name, 0) + times
                copies *= self.trees[side].orders[level]
        powers[pair.group] = 1
        return Definition(
            pair.group,
            self.trace.indices[-1:] if per_output else (),
            tuple(terms),
            powers=tuple(powers.items()),
        )

    def written(
        self, pair: Pair, diagram: Diagram, form: str, per_output: bool
    ) -> tuple[Operand, ...]:
        if form in ("units", "matrices"):
            return self.over_units(pair, diagram, form == "matrices", per_output)
        return self.over_layers(pair, diagram, form == "dense")

    def over_layers(self, pair: Pair, diagram: Diagram, dense: bool) -> tuple[Operand, ...]:
        """One diagram: upper layers of both trees, first-layer nodes, moments along its edges."""
        merged, operands = Merge(), []
        bottoms: list[tuple[Side, str]] = []
        for role, side in zip("AB", pair, strict=True):
            orders = self.trees[side].orders
            copies = 1
            for level in reversed(range(1, len(orders))):
                for copy in range(copies):
                    legs = [
                        f"{role}{level - 1}.{copy * orders[level] + p}"
                        for p in range(orders[level])
                    ]
                    operands += self.node(side, level, f"{role}{level}.{copy}", legs, dense)
                copies *= orders[level]
            bottoms += [(side, f"{role}0.{copy}") for copy in range(copies)]
            merged.unite(f"{role}{max(len(orders) - 1, 0)}.0", "k")
        free: dict[int, list[str]] = {}
        for n, (side, bond) in enumerate(bottoms):
            level = len(self.trees[side].orders)
            if (n, n) in diagram.edges and self.trees[side].bunch == 2:
                operands.append(Operand(f"m.{side}", (bond,)))
                continue
            legs = (
                [bond] if level == 0 else [f"{bond}.leg{p}" for p in range(self.trees[side].bunch)]
            )
            if level:
                operands += self.node(side, 0, bond, legs, dense)
            free[n] = legs
        for u, v in diagram.edges:
            if u in free and v in free:
                operands += self.join(
                    Pair(bottoms[u][0], bottoms[v][0]), [free[u].pop(), free[v].pop()], merged
                )
        if self.lifted:
            operands.append(self.trace)
        return tuple(Operand(o.name, tuple(map(merged.find, o.indices))) for o in operands)

    def over_units(
        self, pair: Pair, diagram: Diagram, matrices: bool, per_output: bool
    ) -> tuple[Operand, ...]:
        """The same diagram over hidden units: a vertex per node of the trees, a matrix per edge.

        In matrix form the first-layer nodes are no vertices but matrices that hang on the vertices above.
        """
        merged = Merge()
        operands: list[Operand] = []
        bottoms: list[tuple[Side, str]] = []
        loops = {u for u, v in diagram.edges if u == v}
        free: dict[int, list[str]] = {}
        for role, side in zip("AB", pair, strict=True):
            orders = self.trees[side].orders
            copies = 1
            for level in reversed(range(1, len(orders))):
                for child in range(copies * orders[level]):
                    above, below = (
                        f"{role}{level}.{child // orders[level]}",
                        f"{role}{level - 1}.{child}",
                    )
                    node = len(bottoms) + child
                    if level == 1 and node in loops:
                        operands.append(Operand(f"u.{side}", (above,)))
                    elif level == 1 and matrices:
                        free[node] = [f"{below}.leg{p}" for p in range(2)]
                        operands.append(Operand(f"M.{side}", (above, *free[node])))
                    else:
                        operands.append(Operand(f"U.{side}{level}", (above, below)))
                copies *= orders[level]
            bottoms += [(side, f"{role}0.{copy}") for copy in range(copies)]
        tops = [
            f"{role}{len(self.trees[side].orders) - 1}.0"
            for role, side in zip("AB", pair, strict=True)
        ]
        for u, v in diagram.edges:
            (one, x), (two, y) = bottoms[u], bottoms[v]
            if u == v:
                if len(self.trees[one].orders) == 1:  # the bottom node is the top one
                    operands.append(Operand(f"m.{one}", ("k",)))
                    tops[u >= self.trees[pair.bra].bottoms] = ""
            elif matrices:
                operands += self.join(Pair(one, two), [free[u].pop(), free[v].pop()], merged)
            else:
                operands.append(
                    Operand(f"G.{one}{two}", (x, y))
                    if one <= two
                    else Operand(f"G.{two}{one}", (y, x))
                )
        if per_output or "" in tops:
            for side, top in zip(pair, tops, strict=True):
                operands += (
                    [Operand(f"D.{side}{len(self.trees[side].orders) - 1}", ("k", top))]
                    if top
                    else []
                )
            operands += [self.trace] if self.lifted else []
        else:
            operands.append(Operand(f"K.{pair.group}", tuple(tops)))
        return tuple(Operand(o.name, tuple(map(merged.find, o.indices))) for o in operands)
