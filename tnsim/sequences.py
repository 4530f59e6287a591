"""From two sequence models and a metric to a folded problem. In: layer kinds, input structure. Out: a `Problem`.

Carried from layer to layer are the covariances of two models' states between positions, `C_XY[s, i, t, j]`, and
their means `m_X[s, i]`, in the cheapest form that holds them (see `legs.Moment`). Linear and bilinear layers act
position by position, attention is expanded in head space by `wick`, and a residual adds the
covariance of the stream with the layer's output. For the Gaussian metrics that is Isserlis' theorem layer by layer: exact
for one nonlinear layer, the closure beyond. For the tree metrics the "mean" of a state is its value at the zero
input, bra legs meet ket legs only, and every joining counts 1/n!, or just the straight one for `Frobenius`.

Everything is homogeneous in the state and in ONE, the constant 1 in a model's current scale, so that scales can be
renormalised between layers as for models without positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from tnsim.errors import ModelError
from tnsim.folding import IDENTITY, PAIRS, Pair, Step, align
from tnsim.legs import ONE, ONES, SAME_POSITION, STREAM, Layers, Legs, Moment, States
from tnsim.metrics import Frobenius, Metric, SequenceInputs
from tnsim.names import COVARIANCE, DOWN, LEFT, MASK, MEAN, OUTPUT, RIGHT, SKIP, VALUE, WEIGHT, Leaf, Side, bias_of
from tnsim.positional import SCORES, SequenceKind, sequence_shapes
from tnsim.problem import Definition, Gauge, Operand, Problem, Stage, Term, prune
from tnsim.wick import FIRST, HEADS, SECOND, End, Factor, Value, Wick, join, renamed

Kinds = tuple[SequenceKind, ...]
STREAMS = End("A", STREAM), End("B", STREAM)


def fold_sequences(
    models: dict[Side, Kinds], metric: Metric, inputs: SequenceInputs, n_ctx: int, pairs: Iterable[Pair], per_output: bool
) -> Problem:
    """The problem whose outputs are the inner products `pairs`, summed over positions, as scalars or per output.

    Raises `ModelError` where an attention layer of one model meets a bilinear layer of the other.
    """
    folder = _Folder(models, metric, inputs, tuple(pairs))
    for step in range(len(folder.steps) - 1):
        folder.advance(step)
    folder.close(len(folder.steps) - 1, per_output)
    d = models["A"][0].d_in
    shapes = {ONE: (), ONES: (n_ctx,), SAME_POSITION: (n_ctx, n_ctx), IDENTITY: (d, d)}
    shapes |= {MEAN: inputs.mean_shape(d, n_ctx), COVARIANCE: inputs.covariance_shape(d, n_ctx)}
    for side, kinds in models.items():
        for n, kind in enumerate(kinds):
            shapes |= {str(Leaf(side, n, role)): shape for role, shape in sequence_shapes(kind, n_ctx).items()}
    return prune(Problem(tuple(folder.stages), shapes, frozenset({IDENTITY, SAME_POSITION}), tuple(p.group for p in folder.pairs)))


class _Folder:
    """Lays stages down, step by step; holds the states as they stand."""

    def __init__(self, models: dict[Side, Kinds], metric: Metric, inputs: SequenceInputs, pairs: tuple[Pair, ...]):
        self.models, self.metric, self.pairs = models, metric, pairs
        self.steps: tuple[Step, ...] = align(models["A"], models.get("B", models["A"]), metric)
        self.stages: list[Stage] = []
        covariance = Moment("" if inputs.covariance == "identity" else COVARIANCE, *inputs.form)
        mean = Moment(MEAN, inputs.mean) if inputs.mean else None
        self.states = States(dict.fromkeys(PAIRS, covariance), dict.fromkeys(models, mean), dict.fromkeys(models, ONE))
        sides = {side for pair in pairs for side in pair}
        self.tracked = tuple(p for p in PAIRS if set(p) <= sides and (p in pairs or (metric.closes and p.bra == p.ket)))
        constants = mean is not None or any(k.biases or k.skips for kinds in models.values() for k in kinds)
        self.scale_by_model = metric.closes or constants
        self.layers = [self.layers_of(n, step) for n, step in enumerate(self.steps)]
        names = [{kind.name for kind in layers.kinds.values() if kind} for layers in self.layers]
        if any({"Attention", "Bilinear"} <= found for found in names):
            raise ModelError(
                "an attention layer of one model meets a bilinear layer of the other at the same depth; "
                "models of sequences are compared attention with attention and bilinear with bilinear"
            )
        self.last_mixing = max((n for n, found in enumerate(names) if "Attention" in found), default=-1)

    def layers_of(self, number: int, step: Step) -> Layers:
        numbers = {"A": step.bra, "B": step.ket}
        return Layers(number, {s: None if numbers[s] is None else k[numbers[s]] for s, k in self.models.items()}, numbers)

    def advance(self, step: int) -> None:
        """The stages of one step: the legs and the mean of each model, the covariance of each pair, then scales."""
        work = _Step(self, step)
        states = States(*(dict(x) for x in self.states))
        updates: list[Definition] = []

        def update(name: str, indices: tuple[str, ...], operands: tuple[Operand, ...], powers: tuple[tuple[str, int], ...]) -> str:
            updates.append(Definition(f"{name}@{step}", indices, (Term(1.0, operands),), powers=powers))
            return f"{name}@{step}"

        for side in self.models:
            mean = work.side(side)
            if work.layers.kinds[side] is None:
                continue
            one = (Operand(self.states.ones[side], ()),) * work.order(side)
            states.ones[side] = update(f"one.{side}", (), one, ((side, 1),))
            states.means[side] = None
            if mean is not None:
                indices = ("s", "k") if mean.form == "each" else ("k",)
                states.means[side] = mean._replace(name=update(f"m.{side}", indices, (Operand(mean.name, indices),), ((side, 1),)))
        for pair in self.tracked:
            if all(work.layers.kinds[side] is None for side in pair):
                continue
            found, indices = work.pair(pair)
            states.moments[pair] = found._replace(
                name=update(f"S.{pair.group}", indices, (Operand(found.name, indices),), self.powers(pair))
            )
        self.stages.append(Stage(tuple(updates), tuple(self.gauges(work, states))))
        self.states = states

    def close(self, step: int, per_output: bool) -> None:
        """The last step: its inner products instead of its moments."""
        work, outputs = _Step(self, step), ("k",) if per_output else ()
        for side in self.models:
            work.side(side)
        gauges = tuple(Gauge(pair.group, 1, pair.group, 1) for pair in self.pairs)
        for pair in self.pairs:
            definitions, terms = work.closed(pair, outputs)
            own = ((pair.group, 1),) if self.scale_by_model else ()
            last = Definition(pair.group, outputs, terms, powers=self.powers(pair) + own)
            self.stages.append(Stage((*definitions, last), gauges))

    def powers(self, pair: Pair) -> tuple[tuple[str, int], ...]:
        if not self.scale_by_model:
            return ((pair.group, 1),)
        return ((pair.bra, 2),) if pair.bra == pair.ket else ((pair.bra, 1), (pair.ket, 1))

    def gauges(self, work: _Step, states: States) -> Iterable[Gauge]:
        """Under a Gaussian metric, or with constants, all values of a model share the scale read off its own covariance."""
        if not self.scale_by_model:
            yield from (Gauge(p.group, work.order(p.bra), states.moments[p].name, 1) for p in self.tracked)
            return
        for side in self.models:
            own = Pair(side, side)
            yield Gauge(side, work.order(side), states.moments[own].name if own in self.tracked else None, 2)


class _Step:
    """One layer of each model over the states of the step before."""

    def __init__(self, folder: _Folder, step: int):
        self.layers, self.states, self.stages = folder.layers[step], folder.states, folder.stages
        self.gaussian, self.straight = folder.metric.closes, isinstance(folder.metric, Frobenius)
        self.mixes_later = step < folder.last_mixing
        self.known: set[str] = set()
        self.means = dict(folder.states.means)
        self.heads: dict[Side, Operand | None] = {}

    def order(self, side: Side) -> int:
        kind = self.layers.kinds[side]
        return 1 if kind is None else kind.order

    def skip(self, legs: Legs, side: Side) -> Factor | None:
        """What multiplies the residual stream on a side; None without one. Who waits is all stream."""
        kind = self.layers.kinds[legs.models[side]]
        if kind is None:
            return Factor(())
        return Factor((legs.leaf(side, SKIP), *(legs.one(side),) * (kind.order - 1))) if kind.skips else None

    # --- one model ---------------------------------------------------------------------------------------------

    def side(self, side: Side) -> Moment | None:
        """A stage with the legs of a model and the mean of its output; that mean, None where it vanishes."""
        kind = self.layers.kinds[side]
        if kind is None:
            return self.means[side]
        legs = Legs(Pair(side, side), self.layers, self.states, self.known, one_position=True, keep=True)
        core = {"Linear": self.linear_mean, "Bilinear": self.bilinear_mean, "Attention": self.attention_mean}[kind.name]
        found = [(1.0, factor) for factor in core(legs)]
        if (skip := self.skip(legs, "A")) is not None and (stream := legs.mean(STREAMS[0])) is not None:
            found.append((1.0, times(skip, ends(stream, "k"))))
        for role in {DOWN, OUTPUT} & set(kind.biases):
            found.append((1.0, Factor((legs.leaf("A", bias_of(role), "k"), *(legs.one("A"),) * kind.order))))
        mean = None
        if found:
            each = any("s" in o.indices for _, factor in found for o in factor.operands)
            mean = Moment(f"mean.{side}@{self.layers.step}", "each" if each else "alike")
            indices = ("s", "k") if each else ("k",)
            legs.definitions.append(Definition(mean.name, indices, tuple(term(x, indices) for x in found)))
        if legs.definitions:
            self.stages.append(Stage(tuple(legs.definitions)))
        self.means[side] = mean
        return mean

    def linear_mean(self, legs: Legs) -> list[Factor]:
        mean = legs.mean(End("A", WEIGHT))
        return [] if mean is None else [ends(mean, "k")]

    def bilinear_mean(self, legs: Legs) -> list[Factor]:
        left, right = End("A", LEFT), End("A", RIGHT)
        down, means = Factor((legs.leaf("A", DOWN, "k", FIRST),)), [legs.mean(left), legs.mean(right)]
        found = [times(down, *means)] if None not in means else []
        if self.gaussian:
            found.append(times(down, ends(legs.covariance(left, right), FIRST, FIRST)))
        return found

    def attention_mean(self, legs: Legs) -> list[Factor]:
        """The mean of every head's output is a definition of its own: covariances are taken about it."""
        side = legs.models["A"]
        wick = Wick(f"wick.{side}@{self.layers.step}", scores_of("A"), self.joined(legs, "inside"), legs.mean, legs.definitions)
        value = wick.vector(End("A", VALUE), frozenset(wick.scores))
        mask = Factor((legs.leaf("A", MASK, "s", "t"),))
        name, indices = f"heads.{side}@{self.layers.step}", ("s", "a", FIRST)
        terms = tuple(term((1.0, times(factor, mask)), indices) for factor in value)
        self.heads[side] = Operand(name, indices) if terms else None
        if not terms:
            return []
        legs.definitions.append(Definition(name, indices, terms))
        return [Factor((legs.leaf("A", OUTPUT, "k", "a", FIRST), self.heads[side]))]

    # --- two models --------------------------------------------------------------------------------------------

    def pair(self, pair: Pair) -> tuple[Moment, tuple[str, ...]]:
        """A stage with the covariance of two outputs; its form and its indices."""
        legs, found = self.covariance(pair)
        apart = legs.outputs["B"] == "S"
        each = any({"s", "S"} & set(o.indices) for _, factor in found for o in factor.operands)
        indices = ("s", "k", "S", "l") if apart else ("s", "k", "l") if each else ("k", "l")
        moment = Moment(f"cov.{pair.group}@{self.layers.step}", "full" if apart else "each" if each else "alike")
        last = Definition(moment.name, indices, tuple(term(x, indices) for x in found))
        self.stages.append(Stage((*legs.definitions, last)))
        return moment, indices

    def closed(self, pair: Pair, outputs: tuple[str, ...]) -> tuple[list[Definition], tuple[Term, ...]]:
        """Definitions and terms of the inner product of two outputs, summed over positions."""
        legs, found = self.covariance(pair)
        means = [self.means[side] for side in pair]
        if None not in means:
            ends_of = zip(means, "kl", legs.marks.values(), strict=True)
            operands = [Operand(m.name + mark, ("s", end) if m.form == "each" else (end,)) for m, end, mark in ends_of]
            found.append((1.0, Factor(tuple(operands))))
        closing = (("l", "k"),)
        terms = []
        for weight, factor in found:
            one = Factor(renamed(factor.operands, closing), factor.merged)
            terms.append(term((weight, one), outputs, summed=("s",)))
        return legs.definitions, tuple(terms)

    def covariance(self, pair: Pair) -> tuple[Legs, list[tuple[float, Factor]]]:
        """The covariance of two outputs at `s`, `k` and `S`, `l`: weighted factors, and the legs they are made of."""
        kinds = [self.layers.kinds[side] for side in pair]
        mixes = any(kind is not None and kind.name == "Attention" for kind in kinds)
        full = self.states.moments[pair].form == "full"
        legs = Legs(pair, self.layers, self.states, self.known, not (self.mixes_later and (mixes or full)), keep=False)
        found: list[tuple[float, Factor]] = []
        skips = [self.skip(legs, side) for side in "AB"]
        self.wicks: dict[str, Wick] = {}
        share = 1.0 if self.gaussian else 1.0 / max(self.order(pair.bra), self.order(pair.ket))
        if None not in skips:
            found.append((share, times(*skips, ends(legs.covariance(*STREAMS), "k", "l"))))
        for side, skip, kind, out, inner in (("A", skips[0], kinds[1], "k", "l"), ("B", skips[1], kinds[0], "l", "k")):
            if skip is not None and kind is not None:
                found += [(share, times(skip, factor)) for factor in self.with_stream(legs, side, kind, out, inner)]
        if None not in kinds:
            core = {"Linear": self.linear, "Bilinear": self.bilinear, "Attention": self.attention}[kinds[0].name]
            found += core(legs)
        return legs, found

    def with_stream(self, legs: Legs, side: Side, kind: SequenceKind, out: str, inner: str) -> list[Factor]:
        """Covariance of the stream of one side (output index `out`) with the other side's layer (output index `inner`)."""
        other: Side = "B" if side == "A" else "A"
        stream = End(side, STREAM)
        if kind.name == "Linear":
            return [ends(legs.covariance(stream, End(other, WEIGHT)), out, inner)]
        if kind.name == "Bilinear":
            found = []
            for one, two in ((LEFT, RIGHT), (RIGHT, LEFT)):
                if (mean := legs.mean(End(other, two))) is not None:
                    joined = ends(legs.covariance(stream, End(other, one)), out, "h")
                    found.append(times(Factor((legs.leaf(other, DOWN, inner, "h"),)), joined, ends(mean, "h")))
            return found
        wick = self.wick(legs, "stream" if not self.gaussian else "all")
        value = wick.matrix(stream, End(other, VALUE), frozenset(n for n, s in wick.scores.items() if s[0].side == other))
        output = legs.leaf(other, OUTPUT, inner, HEADS[other], SECOND), legs.leaf(other, MASK, *places(legs, other))
        return [times(Factor(output), ends(factor, out, SECOND)) for factor in value]

    def linear(self, legs: Legs) -> list[tuple[float, Factor]]:
        return [(1.0, ends(legs.covariance(End("A", WEIGHT), End("B", WEIGHT)), "k", "l"))]

    def bilinear(self, legs: Legs) -> list[tuple[float, Factor]]:
        """Two legs on each side: both cross, or one crosses and the means of the others stay."""
        straight, crossed = ((LEFT, LEFT), (RIGHT, RIGHT)), ((LEFT, RIGHT), (RIGHT, LEFT))
        cov = {(x, y): legs.covariance(End("A", x), End("B", y)) for x, y in (*straight, *crossed)}
        other = {LEFT: RIGHT, RIGHT: LEFT}
        ways = (straight,) if self.straight else (straight, crossed)
        weight = 1.0 if self.gaussian or self.straight else 0.5
        found = []
        for way in ways:
            found.append((weight, times(*(cov[joined] for joined in way))))
            for x, y in way:
                means = legs.mean(End("A", other[x])), legs.mean(End("B", other[y]))
                if None not in means:
                    found.append((weight, times(cov[x, y], means[0], ends(means[1], SECOND))))
        here = {i for _, f in found for o in f.operands for i in o.indices}
        indices = (*(p for p in dict.fromkeys(legs.outputs.values()) if p in here), FIRST, SECOND)
        hidden = f"hidden.{legs.group}@{self.layers.step}"
        merged = join(*(f.merged for _, f in found))
        legs.definitions.append(Definition(hidden, indices, tuple(term(x, indices) for x in found), kept=False))
        downs = legs.leaf("A", DOWN, "k", FIRST), legs.leaf("B", DOWN, "l", SECOND)
        return [(1.0, Factor((*downs, Operand(hidden, indices)), merged))]

    def attention(self, legs: Legs) -> list[tuple[float, Factor]]:
        """Second moments of head outputs, keys and values summed out, minus the product of their means."""
        wick = self.wick(legs, "all" if self.gaussian else "straight" if self.straight else "cross")
        value = wick.matrix(End("A", VALUE), End("B", VALUE), frozenset(wick.scores))
        weight = 1.0 if self.gaussian or self.straight else 1 / math.factorial(5)
        masks = [Factor((legs.leaf(side, MASK, *places(legs, side)),)) for side in "AB"]
        apart = legs.outputs["B"] == "S"
        about_means = not (apart and legs.form != "full")
        groups: dict[bool, list[tuple[float, Factor]]] = {}
        for factor in value:
            table = dict(factor.merged)
            classes = [{table.get(p, p) for p in places(legs, side)} for side in "AB"]
            if not about_means and not classes[0] & classes[1]:
                continue  # independent positions: the product of the means
            groups.setdefault(apart and table.get("s", "s") == table.get("S", "S"), []).append((weight, times(factor, *masks)))
        if about_means and None not in (means := [self.heads[model] for model in legs.models.values()]):
            product = times(*(Factor((placed(m, legs, side),)) for m, side in zip(means, "AB", strict=True)))
            groups.setdefault(False, []).append((-1.0, product))
        outs = legs.leaf("A", OUTPUT, "k", "a", FIRST), legs.leaf("B", OUTPUT, "l", "b", SECOND)
        found = []
        for same, items in groups.items():
            position = ("s",) if same or not apart else ("s", "S")
            name, indices = f"heads.{legs.group}.{len(found)}@{self.layers.step}", (*position, "a", "b", FIRST, SECOND)
            legs.definitions.append(Definition(name, indices, tuple(term(x, indices) for x in items), kept=False))
            merged = (("s", "S"),) if same else ()
            found.append((1.0, Factor((*outs, Operand(name, indices)), merged)))
        return found

    def wick(self, legs: Legs, mode: str) -> Wick:
        """The expansion of a pair under one rule for joining legs, see `joined`; the stream is never left to its mean."""
        if mode not in self.wicks:
            name = f"wick.{legs.group}.{mode}@{self.layers.step}"
            means = mode in ("all", "stream")
            mean = lambda end: legs.mean(end) if means and end.role != STREAM else None  # noqa: E731
            self.wicks[mode] = Wick(name, scores_of("A") | scores_of("B"), self.joined(legs, mode), mean, legs.definitions)
        return self.wicks[mode]

    def joined(self, legs: Legs, mode: str):
        """Which legs may be joined, and how: "all"; "inside" one model, if the metric pairs there at all; "cross" the sides,
        "straight" with the same role, both with the product of two means for the constant; "stream" with the other side.
        """

        def covariance(x: End, y: End) -> Value:
            if mode == "all" or (mode == "inside" and self.gaussian):
                return (legs.covariance(x, y),)
            if mode == "inside" or x.side == y.side or (mode == "straight" and x.role != y.role):
                return ()
            if mode == "stream":
                return (legs.covariance(x, y),) if STREAM in (x.role, y.role) else ()
            means = legs.mean(x), legs.mean(y)
            constant = () if None in means else (times(means[0], ends(means[1], SECOND)),)
            return (legs.covariance(x, y), *constant)

        return covariance


def scores_of(side: Side) -> dict[str, tuple[End, End]]:
    return {f"{side}{n}": (End(side, q), End(side, k)) for n, (q, k) in enumerate(SCORES)}


def places(legs: Legs, side: Side) -> tuple[str, str]:
    """Positions of the output and of the keys of one side."""
    return legs.outputs[side], {"A": "t", "B": "T"}[side]


def placed(heads: Operand, legs: Legs, side: Side) -> Operand:
    """The mean of a model's heads in the indices of the bra or the ket."""
    return Operand(heads.name + legs.marks[side], (legs.outputs[side], HEADS[side], FIRST if side == "A" else SECOND))


def times(*factors: Factor) -> Factor:
    merged = join(*(f.merged for f in factors))
    return Factor(renamed((o for f in factors for o in f.operands), merged), merged)


def ends(factor: Factor, first: str, second: str = SECOND) -> Factor:
    """The same with its ends renamed."""
    return Factor(renamed(factor.operands, (), {FIRST: first, SECOND: second}), factor.merged)


def term(weighted: tuple[float, Factor], indices: tuple[str, ...], summed: tuple[str, ...] = ()) -> Term:
    """A term with exactly these output indices: spread where one is missing, diagonal where two positions are one.

    Positions in `summed` that occur nowhere are summed all the same: they count the positions.
    """
    weight, (operands, merged) = weighted
    table = dict(merged)
    named: dict[str, str] = {}
    extra = []
    for index in indices:
        become = table.get(index, index)
        if become in named:
            extra.append(Operand(SAME_POSITION, (named[become], index)))
        named.setdefault(become, index)
    operands = renamed(operands, tuple((x, named.get(y, y)) for x, y in table.items()), named)
    present = {i for o in (*operands, *extra) for i in o.indices}
    spread = [Operand(ONES, (index,)) for index in (*indices, *summed) if index not in present and not present & {table.get(index, index)}]
    return Term(weight, (*operands, *extra, *spread))
