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
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tnsim.errors import ModelError
from tnsim.folding import IDENTITY, PAIRS, Pair, Step, align
from tnsim.legs import ONE, ONES, SAME_POSITION, STREAM, Layers, Legs, Moment, States
from tnsim.metrics import Frobenius, Metric, SequenceInputs
from tnsim.names import COVARIANCE, DOWN, LEFT, MASK, MEAN, OUTPUT, RIGHT, SIDES, SKIP, VALUE, WEIGHT, Leaf, Side, bias_of
from tnsim.places import OUTPUTS, Pattern, patterns, position_array
from tnsim.positional import SCORES, SequenceKind, sequence_shapes
from tnsim.problem import Definition, Gauge, Operand, Problem, Stage, Term, prune
from tnsim.wick import FIRST, HEADS, SECOND, End, Factor, Value, Wick, renamed

Kinds = tuple[SequenceKind, ...]
STREAMS = End("A", STREAM), End("B", STREAM)


def fold_sequences(
    models: dict[Side, Kinds], metric: Metric, inputs: SequenceInputs, n_ctx: int, pairs: Iterable[Pair], per_output: bool
) -> Problem:
    """The problem whose outputs are the inner products `pairs`, summed over positions, as scalars or per output.

    Raises `ModelError` where an attention layer of one model meets a bilinear layer of the other.
    """
    folder = _Folder(models, metric, inputs, n_ctx, tuple(pairs))
    for step in range(len(folder.steps) - 1):
        folder.advance(step)
    folder.close(len(folder.steps) - 1, per_output)
    d = models["A"][0].d_in
    shapes = {ONE: (), ONES: (n_ctx,), SAME_POSITION: (n_ctx, n_ctx), IDENTITY: (d, d)}
    shapes |= {MEAN: inputs.mean_shape(d, n_ctx), COVARIANCE: inputs.covariance_shape(d, n_ctx)}
    for side, kinds in models.items():
        for n, kind in enumerate(kinds):
            shapes |= {str(Leaf(side, n, role)): shape for role, shape in sequence_shapes(kind, n_ctx).items()}
    operands = {o.name for stage in folder.stages for d in stage.definitions for t in d.terms for o in t.operands}
    constants = ((name, position_array(name, n_ctx)) for name in sorted(operands))
    shapes |= {name: array.shape for name, array in constants if array is not None}
    return prune(Problem(tuple(folder.stages), shapes, frozenset({IDENTITY, SAME_POSITION}), tuple(p.group for p in folder.pairs)))


class _Folder:
    """Lays stages down, step by step; holds the states as they stand."""

    def __init__(self, models: dict[Side, Kinds], metric: Metric, inputs: SequenceInputs, n_ctx: int, pairs: tuple[Pair, ...]):
        self.models, self.metric, self.n_ctx, self.pairs = models, metric, n_ctx, pairs
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
        grown = [Gauge(side, work.order(side), None, 2) for side in self.models if self.scale_by_model]
        for pair in self.pairs:
            definitions, terms = work.closed(pair, outputs)
            own = ((pair.group, 1),) if self.scale_by_model else ()
            last = Definition(pair.group, outputs, terms, powers=self.powers(pair) + own)
            degree = 1 if self.scale_by_model else work.order(pair.bra)
            self.stages.append(Stage((*definitions, last), (*grown, Gauge(pair.group, degree, pair.group, 1))))
            grown = []

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


class Item(NamedTuple):
    """A summand of a moment: its weight, its arrays, and whether it counts at equal output positions only."""

    weight: float
    factor: Factor
    same: bool = False


class _Step:
    """One layer of each model over the states of the step before."""

    def __init__(self, folder: _Folder, step: int):
        self.layers, self.states, self.stages, self.n_ctx = folder.layers[step], folder.states, folder.stages, folder.n_ctx
        self.gaussian, self.straight = folder.metric.closes, isinstance(folder.metric, Frobenius)
        self.mixes_later = step < folder.last_mixing
        self.known: set[str] = set()
        self.means = dict(folder.states.means)
        self.heads: dict[Side, Operand | None] = {}
        self.independent = all(m.form != "full" for m in self.states.moments.values())
        alike = all(m.form == "alike" for m in self.states.moments.values())
        self.relative = alike and all(m is None or m.form == "alike" for m in self.states.means.values())

    def order(self, side: Side) -> int:
        kind = self.layers.kinds[side]
        return 1 if kind is None else kind.order

    def skip(self, legs: Legs, side: Side) -> Factor | None:
        """What multiplies the residual stream on a side; None without one. Who waits is all stream."""
        kind = self.layers.kinds[legs.models[side]]
        if kind is None:
            return ()
        return (legs.leaf(side, SKIP), *(legs.one(side),) * (kind.order - 1)) if kind.skips else None

    # --- one model ---------------------------------------------------------------------------------------------

    def side(self, side: Side) -> Moment | None:
        """A stage with the legs of a model and the mean of its output; that mean, None where it vanishes."""
        kind = self.layers.kinds[side]
        if kind is None:
            return self.means[side]
        legs = Legs(Pair(side, side), self.layers, self.states, self.known, one_position=True, keep=True)
        core = {"Linear": self.linear_mean, "Bilinear": self.bilinear_mean, "Attention": self.attention_mean}[kind.name]
        found = core(legs)
        if (skip := self.skip(legs, "A")) is not None and (stream := legs.mean(STREAMS[0])) is not None:
            found.append((*skip, *renamed(stream, {FIRST: "k"})))
        for role in {DOWN, OUTPUT} & set(kind.biases):
            found.append((legs.leaf("A", bias_of(role), "k"), *(legs.one("A"),) * kind.order))
        mean = None
        if found:
            each = any("s" in o.indices for factor in found for o in factor)
            mean = Moment(f"mean.{side}@{self.layers.step}", "each" if each else "alike")
            indices = ("s", "k") if each else ("k",)
            legs.definitions.append(Definition(mean.name, indices, tuple(term(Item(1.0, x), indices) for x in found)))
        if legs.definitions:
            self.stages.append(Stage(tuple(legs.definitions)))
        self.means[side] = mean
        return mean

    def linear_mean(self, legs: Legs) -> list[Factor]:
        mean = legs.mean(End("A", WEIGHT))
        return [] if mean is None else [renamed(mean, {FIRST: "k"})]

    def bilinear_mean(self, legs: Legs) -> list[Factor]:
        left, right = End("A", LEFT), End("A", RIGHT)
        down, means = legs.leaf("A", DOWN, "k", FIRST), [legs.mean(left), legs.mean(right)]
        found = [(down, *means[0], *means[1])] if None not in means else []
        if self.gaussian:
            found.append((down, *renamed(legs.covariance(left, right), {SECOND: FIRST})))
        return found

    def attention_mean(self, legs: Legs) -> list[Factor]:
        """The mean of every head's output is a definition of its own: covariances are taken about it."""
        items = []
        for frame in self.frames(legs, "inside", {"A": "st"}):
            value = frame.wick.vector(End("A", VALUE), frozenset(scores_of("A")))
            items += [Item(1.0, (*factor, *frame.sums)) for factor in value]
        side = legs.models["A"]
        name, indices = f"heads.{side}@{self.layers.step}", ("s", "a", FIRST)
        self.heads[side] = Operand(name, indices) if items else None
        if not items:
            return []
        legs.definitions.append(Definition(name, indices, tuple(term(x, indices) for x in items)))
        return [(legs.leaf("A", OUTPUT, "k", "a", FIRST), self.heads[side])]

    # --- two models --------------------------------------------------------------------------------------------

    def pair(self, pair: Pair) -> tuple[Moment, tuple[str, ...]]:
        """A stage with the covariance of two outputs; its form and its indices."""
        legs, found = self.covariance(pair)
        apart = legs.outputs["B"] == "S"
        each = any({"s", "S"} & set(o.indices) for item in found for o in item.factor)
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
            both = zip(means, "kl", legs.marks.values(), strict=True)
            found.append(Item(1.0, tuple(Operand(m.name + mark, ("s", end) if m.form == "each" else (end,)) for m, end, mark in both)))
        closed = (item._replace(factor=renamed(item.factor, {"l": "k"})) for item in found)
        return legs.definitions, tuple(term(item, outputs, summed=("s",)) for item in closed)

    def covariance(self, pair: Pair) -> tuple[Legs, list[Item]]:
        """The covariance of two outputs at `s`, `k` and `S`, `l`, and the legs it is made of."""
        kinds = [self.layers.kinds[side] for side in pair]
        mixes = any(kind is not None and kind.name == "Attention" for kind in kinds)
        full = self.states.moments[pair].form == "full"
        legs = Legs(pair, self.layers, self.states, self.known, not (self.mixes_later and (mixes or full)), keep=False)
        found: list[Item] = []
        skips = [self.skip(legs, side) for side in SIDES]
        share = 1.0 if self.gaussian else 1.0 / max(self.order(pair.bra), self.order(pair.ket))
        if None not in skips:
            streams = renamed(legs.covariance(*STREAMS), {FIRST: "k", SECOND: "l"})
            found.append(Item(share, (*skips[0], *skips[1], *streams), same=not full))
        for side, skip, kind in zip(SIDES, skips, reversed(kinds), strict=True):
            if skip is not None and kind is not None:
                ends = {FIRST: "k", SECOND: "l"} if side == "A" else {FIRST: "l", SECOND: "k"}
                found += [Item(share * x.weight, (*skip, *renamed(x.factor, ends)), x.same) for x in self.with_stream(legs, side, kind)]
        if None not in kinds:
            found += {"Linear": self.linear, "Bilinear": self.bilinear, "Attention": self.attention}[kinds[0].name](legs)
        return legs, found

    def with_stream(self, legs: Legs, side: Side, kind: SequenceKind) -> list[Item]:
        """Covariance of the stream of one side (end `FIRST`) with the output of the other side's layer (end `SECOND`)."""
        other: Side = "B" if side == "A" else "A"
        stream = End(side, STREAM)
        if kind.name == "Linear":
            return [Item(1.0, legs.covariance(stream, End(other, WEIGHT)), same=legs.form != "full")]
        found = []
        if kind.name == "Bilinear":
            for one, two in ((LEFT, RIGHT), (RIGHT, LEFT)):
                if (mean := legs.mean(End(other, two))) is not None:
                    joined = renamed(legs.covariance(stream, End(other, one)), {SECOND: "h"})
                    found.append(Item(1.0, (legs.leaf(other, DOWN, SECOND, "h"), *joined, *renamed(mean, {FIRST: "h"}))))
            return found
        keys = {"A": "t", "B": "T"}[other]
        variables = {side: legs.outputs[side], other: legs.outputs[other] + keys}
        for frame in self.frames(legs, "all" if self.gaussian else "stream", variables):
            output = legs.leaf(other, OUTPUT, SECOND, HEADS[other], "v")
            value = frame.wick.matrix(stream, End(other, VALUE), frozenset(scores_of(other)))
            found += [Item(1.0, (output, *renamed(factor, {SECOND: "v"}), *frame.sums), frame.same) for factor in value]
        return found

    def linear(self, legs: Legs) -> list[Item]:
        factor = renamed(legs.through(End("A", WEIGHT), End("B", WEIGHT)), {FIRST: "k", SECOND: "l"})
        return [Item(1.0, factor, same=legs.form != "full")]

    def bilinear(self, legs: Legs) -> list[Item]:
        """Two legs on each side: both cross, or one crosses and the means of the others stay."""
        straight, crossed = ((LEFT, LEFT), (RIGHT, RIGHT)), ((LEFT, RIGHT), (RIGHT, LEFT))
        other = {LEFT: RIGHT, RIGHT: LEFT}
        weight = 1.0 if self.gaussian or self.straight else 0.5
        found = []
        for way in (straight,) if self.straight else (straight, crossed):
            joined = [legs.covariance(End("A", x), End("B", y)) for x, y in way]
            found.append(Item(weight, (*joined[0], *joined[1])))
            for (x, y), covariance in zip(way, joined, strict=True):
                means = legs.mean(End("A", other[x])), legs.mean(End("B", other[y]))
                if None not in means:
                    found.append(Item(weight, (*covariance, *means[0], *renamed(means[1], {FIRST: SECOND}))))
        here = {i for item in found for o in item.factor for i in o.indices}
        indices = (*(p for p in dict.fromkeys(legs.outputs.values()) if p in here), FIRST, SECOND)
        hidden = f"hidden.{legs.group}@{self.layers.step}"
        legs.definitions.append(Definition(hidden, indices, tuple(term(x, indices) for x in found), kept=False))
        downs = legs.leaf("A", DOWN, "k", FIRST), legs.leaf("B", DOWN, "l", SECOND)
        return [Item(1.0, (*downs, Operand(hidden, indices)))]

    def attention(self, legs: Legs) -> list[Item]:
        """Second moments of head outputs, keys and values summed out, minus the product of their means.

        Where outputs at independent positions are told apart, a pattern in which nothing of the bra meets anything of the ket
        is that product and is left out; in the others it is subtracted tuple by tuple.
        """
        apart = legs.outputs["B"] == "S"
        mode = "all" if self.gaussian else "straight" if self.straight else "cross"
        weight = 1.0 if self.gaussian or self.straight else 1 / math.factorial(5)
        groups: dict[bool, list[Item]] = {}
        for frame in self.frames(legs, mode, {"A": "st", "B": legs.outputs["B"] + "T"}):
            if apart and self.independent and not frame.links:
                continue
            items = groups.setdefault(frame.same, [])
            value = frame.wick.matrix(End("A", VALUE), End("B", VALUE), frozenset(frame.wick.scores))
            items += [Item(weight, (*factor, *frame.sums)) for factor in value]
            if apart and self.independent:
                alone = frame if self.gaussian else self.frame(legs, "inside", frame.pattern, frame.sums)
                one, two = (alone.wick.vector(End(side, VALUE), frozenset(scores_of(side))) for side in SIDES)
                items += [Item(-1.0, (*x, *renamed(y, {FIRST: SECOND}), *frame.sums)) for x in one for y in two]
        means = [self.heads[model] for model in legs.models.values()]
        if None not in means and not (apart and self.independent):
            tables = {"s": legs.outputs["A"]}, {"s": legs.outputs["B"], "a": "b", FIRST: SECOND}
            both = zip(means, legs.marks.values(), tables, strict=True)
            product = [o for m, mark, table in both for o in renamed([Operand(m.name + mark, m.indices)], table)]
            groups.setdefault(False, []).append(Item(-1.0, tuple(product)))
        outs = legs.leaf("A", OUTPUT, "k", "a", FIRST), legs.leaf("B", OUTPUT, "l", "b", SECOND)
        found = []
        for same, items in groups.items():
            if not items:
                continue
            name = f"heads.{legs.group}.{len(found)}@{self.layers.step}"
            indices = (*dict.fromkeys("s" if same else p for p in legs.outputs.values()), "a", "b", FIRST, SECOND)
            legs.definitions.append(Definition(name, indices, tuple(term(x, indices) for x in items), kept=False))
            found.append(Item(1.0, (*outs, Operand(name, indices)), same))
        return found

    # --- positions and joinings --------------------------------------------------------------------------------

    def frames(self, legs: Legs, mode: str, variables: dict[Side, str]) -> Iterator[_Frame]:
        """How positions are summed: one sum over all of them, or one per pattern where the positions are independent.

        variables: the positions of a side, its output and, if it has an attention layer, its keys.
        """
        kinds = {side: self.layers.kinds[legs.models[side]] for side, names in variables.items() if len(names) == 2}
        if not self.independent:
            masks = tuple(legs.leaf(side, MASK, *variables[side]) for side in kinds)
            yield self.frame(legs, mode, None, masks)
            return
        masks = "".join("-" if side not in kinds else "c" if kinds[side].causal else "n" for side in SIDES)
        for pattern in patterns("".join(dict.fromkeys("".join(variables.values()))), masks, self.relative, self.n_ctx):
            yield self.frame(legs, mode, pattern, (Operand(pattern.name("COUNT"), ("g", *pattern.outputs)),))

    def frame(self, legs: Legs, mode: str, pattern: Pattern | None, sums: Factor) -> _Frame:
        """The expansion of a pair of layers under one rule for joining legs, within one pattern of positions.

        mode: "all" legs; "inside" one model, if the metric pairs there; "cross" the sides or "straight" between equal roles, both
        with the product of two values at zero for the constant; "stream" with the layer of the other side.
        """
        name = f"wick.{legs.group}.{mode}" + (f".{pattern.groups}" if pattern else "") + f"@{self.layers.step}"
        if name not in legs.expansions:
            constants = mode in ("cross", "straight")

            def at(factor: Factor, end: End) -> Factor:
                return factor if pattern is None else gathered(legs, factor, pattern, legs.position(end))

            def covariance(x: End, y: End) -> Value:
                across = x.side != y.side
                allowed = {"inside": self.gaussian, "cross": across, "stream": across and STREAM in (x.role, y.role)}
                allowed |= {"all": True, "straight": across and x.role == y.role}
                if not allowed[mode]:
                    return ()
                found = []
                if pattern is None or pattern.class_of(legs.position(x)) == pattern.class_of(legs.position(y)):
                    found.append(at(legs.covariance(x, y), x))
                if constants and None not in (means := [legs.mean(x), legs.mean(y)]):
                    found.append((*at(means[0], x), *renamed(at(means[1], y), {FIRST: SECOND})))
                return tuple(found)

            def mean(end: End) -> Factor | None:
                found = None if constants or end.role == STREAM else legs.mean(end)
                return found and at(found, end)

            legs.expansions[name] = Wick(name, scores_of("A") | scores_of("B"), covariance, mean, legs.definitions)
        return _Frame(legs.expansions[name], pattern, sums)


class _Frame(NamedTuple):
    """An expansion over legs at certain positions, and the arrays that sum those positions."""

    wick: Wick
    pattern: Pattern | None
    sums: Factor

    @property
    def same(self) -> bool:
        """Whether both outputs are at one position, though two were asked for."""
        return self.pattern is not None and len([v for v in OUTPUTS if v in self.pattern.groups]) > len(self.pattern.outputs)

    @property
    def links(self) -> bool:
        """Whether a position of the bra coincides with one of the ket."""
        return any(set(group) & {"s", "t"} and set(group) & {"S", "T"} for group in self.pattern.groups.split("|"))


def gathered(legs: Legs, factor: Factor, pattern: Pattern, variable: str) -> Factor:
    """Arrays of one position at the tuples of a pattern."""
    found, place = [], str(pattern.class_of(variable))
    for o in factor:
        here = [n for n, index in enumerate(o.indices) if index in "stST"]
        if here:
            axes = tuple(f"x{n}" for n in range(len(o.indices)))
            packed = tuple("g" if n in here else x for n, x in enumerate(axes))
            at = Operand(f"{pattern.name('AT')} {place}", ("g", axes[here[0]]))
            name = legs.define(f"{o.name}.{pattern.groups}.{place}", "", packed, (Operand(o.name, axes), at)).name
            o = Operand(name, tuple("g" if n in here else index for n, index in enumerate(o.indices)))
        found.append(o)
    return tuple(found)


def scores_of(side: Side) -> dict[str, tuple[End, End]]:
    return {f"{side}{n}": (End(side, q), End(side, k)) for n, (q, k) in enumerate(SCORES)}


def term(item: Item, indices: tuple[str, ...], summed: tuple[str, ...] = ()) -> Term:
    """A term with exactly these output indices: spread where one is missing, diagonal if it counts at equal positions only.

    Positions in `summed` that occur nowhere are summed all the same: they count the positions.
    """
    extra = (Operand(SAME_POSITION, ("s", "S")),) if item.same and "S" in indices else ()
    present = {i for o in (*item.factor, *extra) for i in o.indices}
    spread = (Operand(ONES, (index,)) for index in (*indices, *summed) if index not in present)
    return Term(item.weight, (*item.factor, *extra, *spread))
