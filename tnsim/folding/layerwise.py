"""From two layered models and a metric to a folded problem. In: layer kinds, joinings. Out: a `Problem`.

The closed network of an inner product is a tree over a tree. Every pair (bra subtree, ket subtree) that
occurs in it depends on the two layers alone, not on the copy, so it is defined once: its second moment
`S_XY = E[h_X h_Y^T]`, and for the Gaussian metrics the means of both. One layer over one layer is then a
sum over joinings of small networks whose legs end in the moments below; the Gram recursion of the
paper's appendix A.2 is what remains for `TreeSymmetric`.

Layers are matched from the input up; where one model has a layer more, the other waits (an identity).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from tnsim.engine.problem import Definition, Merge, Operand, Problem, ScaleGroup, Stage, Term, prune
from tnsim.folding.alignment import Step, align
from tnsim.metrics import pairings as diagrams
from tnsim.metrics.input_moments import InputKind
from tnsim.metrics.metric import Metric
from tnsim.metrics.pairings import Joining, Leg
from tnsim.names import (
    COVARIANCE,
    IDENTITY,
    MEAN,
    PAIRS,
    SIDES,
    TRACE,
    Leaf,
    Pair,
    Side,
    input_index,
)
from tnsim.tensors.kinds import LayerKind
from tnsim.tensors.lifted import Local, Part, local, shapes

_WAIT = Local(1, (Part((), out=input_index(0)),))


def fold(
    models: dict[Side, tuple[LayerKind, ...]],
    metric: Metric,
    inputs: InputKind,
    lifted: bool,
    pairs: Iterable[Pair],
    per_output: bool,
) -> Problem:
    """The problem whose outputs are the inner products `pairs`, as scalars or per output coordinate.

    Outputs are named by their pair (`AA`, `AB`, `BB`); leaves by `names.Leaf`, the input's by `MEAN` and
    `COVARIANCE`. Lifted outputs keep the constant at position 0, with the value 0.
    """
    steps = align(models["A"], models.get("B", models["A"]), metric)
    folder = _Folder(models, metric, inputs, lifted, tuple(pairs), steps)
    *first, last = enumerate(steps)
    stages = [folder.stage(n, step) for n, step in first]
    stages.append(folder.closing_stage(*last, per_output))
    outputs = tuple(pair.group for pair in folder.pairs)
    leaves, symmetric = _leaf_shapes(models, inputs, lifted)
    return prune(Problem(tuple(stages), leaves, symmetric, outputs))


class _Folder:
    """Holds, while stages are laid down, where the moments and means of each pair stand now."""

    def __init__(
        self,
        models,
        metric,
        inputs: InputKind,
        lifted: bool,
        pairs: tuple[Pair, ...],
        steps: tuple[Step, ...],
    ):
        self.models, self.metric, self.lifted, self.pairs = models, metric, lifted, pairs
        self.inputs = inputs
        nonlinear = [
            n for n, step in enumerate(steps) if any(self.order(side, step) > 1 for side in models)
        ]
        self.last_nonlinear = max(nonlinear, default=0)
        self.moments: dict[Pair, str | None] = dict.fromkeys(PAIRS)  # None: still the input's
        self.means: dict[Side, str | None] = dict.fromkeys(SIDES)
        self.centred = dict.fromkeys(SIDES, inputs.centred)

    def tracked(self) -> tuple[Pair, ...]:
        """Pairs that have to be carried along: the Gaussian metrics pair legs inside one model too."""
        if not self.metric.pairs_within_model:
            return self.pairs
        sides = {side for pair in self.pairs for side in pair}
        return tuple(p for p in PAIRS if set(p) <= sides and (p.bra == p.ket or p in self.pairs))

    def stage(self, number: int, step: Step) -> Stage:
        definitions, moments, means, centred = (
            [],
            dict(self.moments),
            dict(self.means),
            dict(self.centred),
        )
        for side in self.models if self.metric.pairs_within_model else ():
            layer = self.layer(side, step)
            if layer is None:
                continue
            joinings = diagrams.gaussian_mean(self.order(side, step), self.centred[side])
            if joinings:
                means[side] = f"m.{side}@{number}"
                terms = tuple(self.terms(Pair(side, side), (layer, None), joinings, alone=True))
                definitions.append(Definition(means[side], ("k",), terms, powers=((side, 1),)))
            centred[side] = not joinings
        for pair in self.tracked():
            if self.layer(pair.bra, step) is None and self.layer(pair.ket, step) is None:
                continue
            moments[pair] = f"S.{pair.group}@{number}"
            terms, symmetric = self.pair_terms(pair, step), pair.bra == pair.ket
            definitions.append(
                Definition(moments[pair], ("k", "l"), terms, symmetric, self.powers(pair, number))
            )
        self.moments, self.means, self.centred = moments, means, centred
        return Stage(tuple(definitions), self.scale_groups(number, step, moments))

    def closing_stage(self, number: int, step: Step, per_output: bool) -> Stage:
        indices = ("k",) if per_output else ()
        definitions = tuple(
            Definition(
                p.group,
                indices,
                self.pair_terms(p, step, closed=True),
                powers=self.powers(p, number),
            )
            for p in self.pairs
        )
        return Stage(definitions, self.scale_groups(number, step, {p: p.group for p in self.pairs}))

    def powers(self, pair: Pair, number: int) -> tuple[tuple[str, int], ...]:
        """Scale groups of a pair's moment after a stage.

        Under a Gaussian metric all values of model A share the gauge A, read off `S_AA`: their sums mix S_AB
        with S_AA and the means, and ratios kept in one gauge never pass through a logarithm. From the last
        nonlinear layer on nothing mixes any more and every pair has a gauge of its own, as the tree metrics do.
        """
        own = ((pair.group, 1),)
        if not self.metric.pairs_within_model:
            return own
        shared = ((pair.bra, 2),) if pair.bra == pair.ket else ((pair.bra, 1), (pair.ket, 1))
        return shared + own if number >= self.last_nonlinear else shared

    def scale_groups(
        self, number: int, step: Step, moments: dict[Pair, str | None]
    ) -> tuple[ScaleGroup, ...]:
        found, settled = [], not self.metric.pairs_within_model or number >= self.last_nonlinear
        if self.metric.pairs_within_model:
            for side in self.models:
                name = None if settled else moments[Pair(side, side)]
                found.append(ScaleGroup(side, self.order(side, step), name, 2))
        if settled:
            degree = 1 if self.metric.pairs_within_model else self.order("A", step)
            found += [ScaleGroup(pair.group, degree, moments[pair], 1) for pair in self.pairs]
        return tuple(found)

    def layer(self, side: Side, step: Step) -> int | None:
        return step.bra if side == "A" else step.ket

    def order(self, side: Side, step: Step) -> int:
        layer = self.layer(side, step)
        return 1 if layer is None else local(self.models[side][layer]).order

    def pair_terms(self, pair: Pair, step: Step, closed: bool = False) -> tuple[Term, ...]:
        layers = self.layer(pair.bra, step), self.layer(pair.ket, step)
        orders = self.order(pair.bra, step), self.order(pair.ket, step)
        centred = self.centred[pair.bra] and self.centred[pair.ket]
        return tuple(
            self.terms(pair, layers, self.metric.joinings(*orders, centred), closed=closed)
        )

    def terms(
        self, pair, layers, joinings: Iterable[Joining], closed: bool = False, alone: bool = False
    ):
        """Expand joinings over the parts of both local tensors and over the leg permutations to average."""
        locals_ = [
            _WAIT if n is None else local(self.models[s][n])
            for s, n in zip(pair, layers, strict=True)
        ]
        if alone:
            locals_[1] = Local(0, (Part((), out=""),))
        for joining in joinings:
            choices = []
            for role, layer in zip(SIDES, locals_, strict=True):
                if role in joining.symmetrised:
                    permutations = list(itertools.permutations(range(layer.order)))
                else:
                    permutations = [tuple(range(layer.order))]
                choices.append(
                    [
                        (part, p, part.weight / len(permutations))
                        for part in layer.parts
                        for p in permutations
                    ]
                )
            for (bra, p, x), (ket, q, y) in itertools.product(*choices):
                sides = {"A": (pair.bra, layers[0], bra, p), "B": (pair.ket, layers[1], ket, q)}
                yield self.term(joining.weight * x * y, sides, joining, closed, alone)

    def term(self, weight: float, sides: dict, joining: Joining, closed: bool, alone: bool) -> Term:
        """One product: the arrays of a bra part and a ket part, and what joins their legs."""
        operands, merged = [], Merge()
        outer: list[str] = []  # the output index of each side
        for role, (side, layer, part, permutation) in sides.items():
            legs = {input_index(i): f"{role}{p}" for i, p in enumerate(permutation)}
            rename = lambda index, legs=legs, role=role: legs.get(index, role + index)  # noqa: E731
            for name, indices in part.tensors:
                operands.append(Operand(str(Leaf(side, layer, name)), tuple(map(rename, indices))))
            if not (alone and role == "B"):
                outer.append(rename(part.out))
        for one, two in joining.pairs:
            operands += self.join(one, two, sides, merged, outer)
        for leg in joining.capped:
            operands.append(Operand(self.means[sides[leg.side][0]] or MEAN, (_end(leg),)))
        outputs = ("k", "k") if closed else ("k", "l")
        for index, output in zip(outer, outputs, strict=False):
            merged.unite(index, output)
        if closed and self.lifted:
            operands.append(Operand(TRACE, ("k",)))
        return Term(weight, merged.renamed(operands))

    def join(
        self, one: Leg, two: Leg, sides: dict, merged: Merge, outer: list[str]
    ) -> list[Operand]:
        """The second moment between two legs; where it is the identity, the two indices become one."""
        models = sides[one.side][0], sides[two.side][0]
        ends = [_end(one), _end(two)]
        if models == ("B", "A"):
            models, ends = ("A", "B"), ends[::-1]
        moment = self.moments[Pair(*models)]
        if moment is not None:
            return [Operand(moment, tuple(ends))]
        if self.inputs.moment == "full":
            return [Operand(COVARIANCE, tuple(ends))]
        if all(end in outer for end in ends):
            if self.inputs.moment == "identity":
                return [Operand(IDENTITY, tuple(ends))]
            return [Operand(IDENTITY, tuple(ends)), Operand(COVARIANCE, (ends[0],))]
        merged.unite(*ends)
        return [] if self.inputs.moment == "identity" else [Operand(COVARIANCE, (ends[0],))]


def _end(leg: Leg) -> str:
    return f"{leg.side}{leg.index}"


def _leaf_shapes(
    models, inputs: InputKind, lifted: bool
) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
    found = {}
    for side, kinds in models.items():
        for layer, kind in enumerate(kinds):
            for role, shape in shapes(kind, lifted).items():
                found[str(Leaf(side, layer, role))] = shape
    kinds = models["A"]
    d_in, d_out = kinds[0].d_in + lifted, kinds[-1].d_out + lifted
    found[MEAN], found[TRACE], found[IDENTITY] = (d_in,), (d_out,), (d_in, d_in)
    found[COVARIANCE] = (d_in,) if inputs.moment == "diagonal" else (d_in, d_in)
    return found, frozenset({COVARIANCE, IDENTITY} if inputs.moment != "diagonal" else {IDENTITY})
