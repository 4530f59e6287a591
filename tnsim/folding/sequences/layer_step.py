"""One step of a fold of sequence models: a layer of each over the states below. In: legs. Out: stages, moments.

An output is a sum of parts, the residual stream, the layer's core and its bias, and so is a covariance: stream with
stream, stream with core, core with core. Each summand is an `Item`; a moment is the sum of its items, and where only
an inner product is wanted the same items are closed over outputs and positions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tnsim.engine.problem import Definition, Operand, Stage, Term
from tnsim.folding.sequences.expansions import Positions, frame, frames, scores_of
from tnsim.folding.sequences.projections import Layers, Legs, Moment, States
from tnsim.folding.sequences.wick import FIRST, HEADS, SECOND, End, Factor, renamed
from tnsim.metrics.metric import Frobenius, Metric
from tnsim.names import (
    DOWN,
    LEFT,
    ONES,
    OUTPUT,
    RIGHT,
    SAME_POSITION,
    SIDES,
    SKIP,
    STREAM,
    VALUE,
    WEIGHT,
    Leaf,
    Pair,
    Side,
    bias_of,
)
from tnsim.tensors.positional import SequenceKind

STREAMS = End("A", STREAM), End("B", STREAM)
CORE, CONSTANT = "CORE", "CONSTANT"
"""Parts of an output beside STREAM: what the layer computes, and biases."""


def selector(part: str, side: Side) -> str:
    """Name of the array that assigns a part of a model's output, or with HEADS each head of it, to components."""
    return f"SELECT.{part}.{side}"


class Item(NamedTuple):
    """A summand of a moment: its weight, its arrays, whether it counts at equal output positions only, whose parts it joins."""

    weight: float
    factor: Factor
    same: bool = False
    parts: tuple[str, str] = (CORE, CORE)


class Step:
    """One layer of each model over the states of the step before."""

    def __init__(
        self, layers: Layers, states: States, metric: Metric, n_ctx: int, mixes_later: bool
    ):
        self.layers, self.states, self.mixes_later = layers, states, mixes_later
        self.gaussian, self.straight = metric.closes, isinstance(metric, Frobenius)
        self.by_head = False
        self.stages: list[Stage] = []
        self.known: set[str] = set()
        self.means = dict(states.means)
        self.mean_items: dict[Side, list[Item]] = {}
        self.heads: dict[Side, Operand | None] = {}
        forms = {m.form for m in states.moments.values()}
        relative = forms == {"alike"} and all(
            m is None or m.form == "alike" for m in states.means.values()
        )
        self.positions = Positions(n_ctx, "full" not in forms, relative)

    def order(self, side: Side) -> int:
        kind = self.layers.kinds[side]
        return 1 if kind is None else kind.order

    def skip(self, legs: Legs, side: Side) -> Factor | None:
        """What multiplies the residual stream on a side; None without one. Who waits is all stream."""
        kind = self.layers.kinds[legs.models[side]]
        if kind is None:
            return ()
        return (
            (legs.leaf(side, SKIP), *(legs.one(side),) * (kind.order - 1)) if kind.skips else None
        )

    # --- one model ---------------------------------------------------------------------------------------------

    def side(self, side: Side) -> Moment | None:
        """A stage with the legs of a model and the mean of its output; that mean, None where it vanishes."""
        kind = self.layers.kinds[side]
        if kind is None:
            return self.means[side]
        legs = Legs(
            Pair(side, side), self.layers, self.states, self.known, one_position=True, keep=True
        )
        core = {
            "Linear": self.linear_mean,
            "Bilinear": self.bilinear_mean,
            "Attention": self.attention_mean,
        }[kind.name]
        found = [Item(1.0, factor) for factor in core(legs)]
        if (skip := self.skip(legs, "A")) is not None and (
            stream := legs.mean(STREAMS[0])
        ) is not None:
            found.append(Item(1.0, (*skip, *renamed(stream, {FIRST: "k"})), parts=(STREAM, STREAM)))
        for role in {DOWN, OUTPUT} & set(kind.biases):
            bias = (legs.leaf("A", bias_of(role), "k"), *(legs.one("A"),) * kind.order)
            found.append(Item(1.0, bias, parts=(CONSTANT, CONSTANT)))
        self.mean_items[side] = found
        mean = None
        if found:
            each = any("s" in o.indices for item in found for o in item.factor)
            mean = Moment(f"mean.{side}@{self.layers.step}", "each" if each else "alike")
            indices = ("s", "k") if each else ("k",)
            legs.definitions.append(
                Definition(mean.name, indices, tuple(term(x, indices) for x in found))
            )
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
        for here in frames(legs, "inside", {"A": "st"}, self.positions, self.gaussian):
            value = here.wick.vector(End("A", VALUE), frozenset(scores_of("A")))
            items += [Item(1.0, (*factor, *here.sums)) for factor in value]
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
        moment = Moment(
            f"cov.{pair.group}@{self.layers.step}", "full" if apart else "each" if each else "alike"
        )
        last = Definition(moment.name, indices, tuple(term(x, indices) for x in found))
        self.stages.append(Stage((*legs.definitions, last)))
        return moment, indices

    def closed(
        self, pair: Pair, outputs: tuple[str, ...]
    ) -> tuple[list[Definition], tuple[Term, ...]]:
        """Definitions and terms of the inner product of two outputs, summed over positions."""
        legs, found = self.covariance(pair)
        means = [self.means[side] for side in pair]
        if None not in means:
            both = zip(means, "kl", legs.marks.values(), strict=True)
            found.append(
                Item(
                    1.0,
                    tuple(
                        Operand(m.name + mark, ("s", end) if m.form == "each" else (end,))
                        for m, end, mark in both
                    ),
                )
            )
        closed = (item._replace(factor=renamed(item.factor, {"l": "k"})) for item in found)
        return legs.definitions, tuple(term(item, outputs, summed=("s",)) for item in closed)

    def covariance(self, pair: Pair) -> tuple[Legs, list[Item]]:
        """The covariance of two outputs at `s`, `k` and `S`, `l`, and the legs it is made of."""
        kinds = [self.layers.kinds[side] for side in pair]
        mixes = any(kind is not None and kind.name == "Attention" for kind in kinds)
        full = self.states.moments[pair].form == "full"
        legs = Legs(
            pair,
            self.layers,
            self.states,
            self.known,
            not (self.mixes_later and (mixes or full)),
            keep=False,
        )
        found: list[Item] = []
        skips = [self.skip(legs, side) for side in SIDES]
        share = 1.0 if self.gaussian else 1.0 / max(self.order(pair.bra), self.order(pair.ket))
        if None not in skips:
            streams = renamed(legs.covariance(*STREAMS), {FIRST: "k", SECOND: "l"})
            found.append(Item(share, (*skips[0], *skips[1], *streams), not full, (STREAM, STREAM)))
        for side, skip, kind in zip(SIDES, skips, reversed(kinds), strict=True):
            if skip is not None and kind is not None:
                ends, parts = (
                    ({FIRST: "k", SECOND: "l"}, (STREAM, CORE))
                    if side == "A"
                    else ({FIRST: "l", SECOND: "k"}, (CORE, STREAM))
                )
                found += [
                    Item(share * x.weight, (*skip, *renamed(x.factor, ends)), x.same, parts)
                    for x in self.with_stream(legs, side, kind)
                ]
        if None not in kinds:
            found += {
                "Linear": self.linear,
                "Bilinear": self.bilinear,
                "Attention": self.attention,
            }[kinds[0].name](legs)
        return legs, found

    def with_stream(self, legs: Legs, side: Side, kind: SequenceKind) -> list[Item]:
        """Covariance of the stream of one side (end `FIRST`) with the output of the other side's layer (end `SECOND`)."""
        other: Side = "B" if side == "A" else "A"
        stream = End(side, STREAM)
        if kind.name == "Linear":
            return [
                Item(1.0, legs.covariance(stream, End(other, WEIGHT)), same=legs.form != "full")
            ]
        found = []
        if kind.name == "Bilinear":
            for one, two in ((LEFT, RIGHT), (RIGHT, LEFT)):
                if (mean := legs.mean(End(other, two))) is not None:
                    joined = renamed(legs.covariance(stream, End(other, one)), {SECOND: "h"})
                    found.append(
                        Item(
                            1.0,
                            (
                                legs.leaf(other, DOWN, SECOND, "h"),
                                *joined,
                                *renamed(mean, {FIRST: "h"}),
                            ),
                        )
                    )
            return found
        keys = {"A": "t", "B": "T"}[other]
        variables = {side: legs.outputs[side], other: legs.outputs[other] + keys}
        for here in frames(
            legs, "all" if self.gaussian else "stream", variables, self.positions, self.gaussian
        ):
            output = legs.leaf(other, OUTPUT, SECOND, HEADS[other], "v")
            value = here.wick.matrix(stream, End(other, VALUE), frozenset(scores_of(other)))
            found += [
                Item(1.0, (output, *renamed(factor, {SECOND: "v"}), *here.sums), here.same)
                for factor in value
            ]
        return found

    def linear(self, legs: Legs) -> list[Item]:
        factor = renamed(
            legs.through(End("A", WEIGHT), End("B", WEIGHT)), {FIRST: "k", SECOND: "l"}
        )
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
                    found.append(
                        Item(weight, (*covariance, *means[0], *renamed(means[1], {FIRST: SECOND})))
                    )
        here = {i for item in found for o in item.factor for i in o.indices}
        indices = (*(p for p in dict.fromkeys(legs.outputs.values()) if p in here), FIRST, SECOND)
        hidden = f"hidden.{legs.group}@{self.layers.step}"
        legs.definitions.append(
            Definition(hidden, indices, tuple(term(x, indices) for x in found), kept=False)
        )
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
        for here in frames(
            legs, mode, {"A": "st", "B": legs.outputs["B"] + "T"}, self.positions, self.gaussian
        ):
            if apart and self.positions.independent and not here.links:
                continue
            items = groups.setdefault(here.same, [])
            value = here.wick.matrix(End("A", VALUE), End("B", VALUE), frozenset(here.wick.scores))
            items += [Item(weight, (*factor, *here.sums)) for factor in value]
            if apart and self.positions.independent:
                alone = (
                    here if self.gaussian else frame(legs, "inside", here.pattern, here.sums, False)
                )
                one, two = (
                    alone.wick.vector(End(side, VALUE), frozenset(scores_of(side)))
                    for side in SIDES
                )
                items += [
                    Item(-1.0, (*x, *renamed(y, {FIRST: SECOND}), *here.sums))
                    for x in one
                    for y in two
                ]
        means = [self.heads[model] for model in legs.models.values()]
        if None not in means and not (apart and self.positions.independent):
            tables = {"s": legs.outputs["A"]}, {"s": legs.outputs["B"], "a": "b", FIRST: SECOND}
            both = zip(means, legs.marks.values(), tables, strict=True)
            product = [
                o
                for m, mark, table in both
                for o in renamed([Operand(m.name + mark, m.indices)], table)
            ]
            groups.setdefault(False, []).append(Item(-1.0, tuple(product)))
        outs = legs.leaf("A", OUTPUT, "k", "a", FIRST), legs.leaf("B", OUTPUT, "l", "b", SECOND)
        found = []
        for same, items in groups.items():
            if not items:
                continue
            name = f"heads.{legs.group}.{len(found)}@{self.layers.step}"
            indices = (
                *dict.fromkeys("s" if same else p for p in legs.outputs.values()),
                "a",
                "b",
                FIRST,
                SECOND,
            )
            legs.definitions.append(
                Definition(name, indices, tuple(term(x, indices) for x in items), kept=False)
            )
            heads = (*outs, Operand(name, indices))
            if self.by_head:
                found.append(Item(1.0, heads, same))
                continue
            core, indices = f"core.{name}", (*indices[:-4], "k", "l")
            legs.definitions.append(
                Definition(core, indices, (Term(1.0, heads),), kept=False, over="a")
            )
            found.append(Item(1.0, (Operand(core, indices),), same))
        return found

    # --- contributions -----------------------------------------------------------------------------------------

    def attributed(
        self, pair: Pair, tails: dict[Side, SequenceKind | None], by_head: bool
    ) -> tuple[list[Definition], tuple[Term, ...]]:
        """As `closed`, with the outputs `c` and `d`: components of the bra's output and of the ket's, behind an optional linear layer."""
        self.by_head = by_head
        legs, found = self.covariance(pair)
        outer = {"A": ("k", "c", "a"), "B": ("l", "d", "b")}

        def part(name: str, side: Side, factor: Factor) -> Operand:
            _, component, head = outer[side]
            split = by_head and name == CORE and any(head in o.indices for o in factor)
            return Operand(
                selector("HEADS" if split else name, side),
                (component, head) if split else (component,),
            )

        tail = {
            side: (
                Operand(
                    str(Leaf(side, self.layers.numbers[side] + 1, WEIGHT)), ("o", outer[side][0])
                ),
            )
            if tails[side]
            else ()
            for side in SIDES
        }
        names = {outer[side][0]: "o" for side in SIDES if not tails[side]}
        terms, means = [], []
        for item in found:
            chosen = tuple(
                part(name, side, item.factor) for name, side in zip(item.parts, SIDES, strict=True)
            )
            factor = renamed((*item.factor, *chosen, *tail["A"], *tail["B"]), names)
            terms.append(term(item._replace(factor=factor), ("c", "d"), summed=("s",)))
        for side in SIDES:
            items = []
            for item in self.mean_items[side]:
                factor = renamed(item.factor, {"k": outer[side][0], "a": outer[side][2]})
                items.append(
                    item._replace(
                        factor=renamed(
                            (*factor, part(item.parts[0], side, factor), *tail[side]), names
                        )
                    )
                )
            if tails[side] and WEIGHT in tails[side].biases:
                bias = Operand(
                    str(Leaf(side, self.layers.numbers[side] + 1, bias_of(WEIGHT))), ("o",)
                )
                ones = (Operand(self.states.ones[side], ()),) * self.order(side)
                items.append(Item(1.0, (bias, *ones, part(CONSTANT, side, ()))))
            if items:
                indices = (outer[side][1], "s", "o")
                legs.definitions.append(
                    Definition(
                        f"components.{side}",
                        indices,
                        tuple(term(x, indices) for x in items),
                        kept=False,
                    )
                )
                means.append(Operand(f"components.{side}", indices))
        if len(means) == 2:
            terms.append(Term(1.0, tuple(means)))
        return legs.definitions, tuple(terms)


def term(item: Item, indices: tuple[str, ...], summed: tuple[str, ...] = ()) -> Term:
    """A term with exactly these output indices: spread where one is missing, diagonal if it counts at equal positions only.

    Positions in `summed` that occur nowhere are summed all the same: they count the positions.
    """
    extra = (Operand(SAME_POSITION, ("s", "S")),) if item.same and "S" in indices else ()
    present = {i for o in (*item.factor, *extra) for i in o.indices}
    spread = (Operand(ONES, (index,)) for index in (*indices, *summed) if index not in present)
    return Term(item.weight, (*item.factor, *extra, *spread))
