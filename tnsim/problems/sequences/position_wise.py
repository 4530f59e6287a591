"""The legs of two layers, and the moments of layers that act position by position.

*Legs.* A layer reads the state below through legs, `leg = weight * state + bias` (see
`layer_tensors`), and every moment of its output is made of the means of its legs and of the
covariances between them:

    mean of a leg          weight m + bias
    covariance of two      weight C weight'^T

A leg of an attention layer has a head index and `d_head` coordinates, so the width of the state
is summed out once per pair of legs, and all later arrays are of size `d_head`. Where states at
different positions are independent, two legs have a covariance at a single position only, which is
called `s`.

*Layers.* A layer that acts position by position is an elementwise product of n legs, mapped to the
output:

    y[k] = sum over h of  down[k, h] leg_1[h] * ... * leg_n[h].

A bilinear layer has n = 2; a linear layer has n = 1, and its leg is the output.

A moment of products of legs is a sum over matchings (see `notation`): legs joined in pairs
count by their covariances, the others by their means, all of it elementwise in the hidden unit of
the bra and in the hidden unit of the ket. A *covariance* is the sum over the matchings that join
a leg of the bra with a leg of the ket; the others make up the product of the two means. For two
bilinear layers with legs L and R that leaves

    C_LL C_RR + C_LR C_RL                                            both legs cross,
    C_LL m_R m_R + C_RR m_L m_L + C_LR m_R m_L + C_RL m_L m_R        a single leg crosses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tnsim.engine.ir.problem import Operand, StageBuilder, renamed
from tnsim.names import SLOTS, STREAM, Slot, bias_of
from tnsim.problems.sequences.notation import (
    FIRST,
    HEAD,
    OTHER,
    OUTPUT_END,
    SECOND,
    BraKet,
    Leg,
    Matching,
    Product,
    Summand,
    in_order,
    indices_of,
    matchings,
    spread,
    stream,
)

_EXCHANGED = {FIRST: SECOND, SECOND: FIRST}


class Projections:
    """Means and covariances of the legs of two layers, defined in a stage as they are asked for.

    Args:
        names: Layers in the bra and in the ket.
        stage: Builder that receives the definitions.
    """

    def __init__(self, names: BraKet, stage: StageBuilder) -> None:
        self.names = names
        self.stage = stage

    def mean(self, leg: Leg) -> Product | None:
        """The mean of a leg, or for the tree metrics its value at the zero input.

        Returns:
            Mean with the end `FIRST`; None where it vanishes: no mean below, and no bias.
        """
        names, slot = self.names, leg.slot
        # Definitions are made under the bra's names; the operand then gets the names of its own
        # slot.
        at_leg = {"s": names.position(leg), "a": HEAD[slot]}
        if leg.role == STREAM:
            below = names.state_mean(slot, FIRST)
            return None if below is None else renamed([below], at_leg)
        below = names.state_mean(slot, "i")
        rows = names.rows(leg)
        products: list[Product] = []
        if below is not None:
            products.append((names.leaf(slot, leg.role, *rows, "i"), below))
        if leg.role in names.kind(slot).biases:
            products.append((names.leaf(slot, bias_of(leg.role), *rows), names.one(slot)))
        if not products:
            return None
        # A bias alone is the same at every position; the mean of a leg depends on it where the mean
        # below does, or where rows are rotated.
        by_position = below is not None and "s" in below.indices and "s" not in rows
        indices = ("s", *rows) if by_position else rows
        name = f"mean.{names.models[slot]}.{leg.role}"
        return renamed([self._new_definition(name, names.marks[slot], indices, *products)], at_leg)

    def covariance(self, one: Leg, two: Leg) -> Product:
        """The covariance of two legs, with the ends `FIRST` and `SECOND`."""
        names = self.names
        if one.role == STREAM == two.role:
            positions = names.position(one), names.position(two)
            return names.state_covariance((one.slot, two.slot), positions, (FIRST, SECOND))
        # One order for each pair of legs, so that nothing is computed twice; the stream is second.
        wrong_order = two.role != STREAM and two < one
        if one.role == STREAM or wrong_order:
            return renamed(self.covariance(two, one), _EXCHANGED)
        positions = ("s", "s")
        if names.state_moment(one.slot, two.slot).form == "full":
            positions = names.position(one), names.position(two)
        array = self._half_covariance(one, two)
        if two.role != STREAM:
            array = self._whole_covariance(one, two, array, apart=positions[0] != positions[1])
        at_legs = {"s": positions[0], "S": positions[1]}
        at_legs |= {"a": HEAD[one.slot], "b": HEAD[two.slot], "j": SECOND}
        return renamed([array], at_legs)

    def covariance_at_a_unit(self, one: Leg, two: Leg) -> Product:
        """The covariance of two legs of a layer at equal hidden units, with the end `FIRST`.

        Of the matrix `weight C weight'^T` only the diagonal is read: `half` is there for other
        covariances, and a sum over `j` for each hidden unit is cheap beside another matrix product:
        a cross term of 512 units over 16 inputs would take 1.4 times the multiplications.
        """
        names, slot = self.names, one.slot
        one, two = sorted((one, two))
        half = self._half_covariance(one, two).renamed({"S": "s"})
        weight = names.leaf(slot, two.role, FIRST, "j")
        indices = in_order({*half.indices} - {"j"})
        name = f"cov.{names.models[slot]}.{one.role}.{two.role}.at"
        array = self._new_definition(name, names.marks[slot], indices, (half, weight))
        return renamed([array], {"s": names.outputs[slot]})

    def uncontracted_covariance(self, one: Leg, two: Leg) -> Product:
        """The covariance of two legs as a product of weights and moment, not multiplied out.

        Linear layers need it: two of them can be as wide as a vocabulary, and their covariance has
        as many elements as that width squared.
        """
        names = self.names
        first = names.leaf(one.slot, one.role, FIRST, "i")
        second = names.leaf(two.slot, two.role, SECOND, "j")
        positions = names.position(one), names.position(two)
        below = names.state_covariance((one.slot, two.slot), positions, ("i", "j"))
        return (first, *below, second)

    def _half_covariance(self, one: Leg, two: Leg) -> Operand:
        """The covariance `weight C` of leg `one` with the state that leg `two` reads.

        Its indices are `s` where it depends on a position, the rows of the leg, `S` where the
        covariance is full, and `j`.
        """
        names = self.names
        slots: tuple[Slot, Slot] = (one.slot, two.slot)
        moment, rows = names.state_moment(*slots), names.rows(one)
        if not moment.name:
            return names.leaf(one.slot, one.role, *rows, "j")
        # half[s, rows, S, j] = sum_i weight[s, rows, i] C[s, i, S, j], where these axes exist
        weight = names.leaf(one.slot, one.role, *rows, "i")
        below = names.state_covariance(slots, ("s", "S"), ("i", "j"))
        indices = (*rows, "S", "j") if moment.form == "full" else (*rows, "j")
        if moment.form != "alike" and "s" not in rows:
            indices = ("s", *indices)
        across = "" if one.slot == two.slot or not names.marks["ket"] else ".across"
        name = f"half.{names.models[one.slot]}.{one.role}.{names.models[two.slot]}{across}"
        return self._new_definition(name, names.marks[one.slot], indices, (weight, *below))

    def _whole_covariance(self, one: Leg, two: Leg, half: Operand, apart: bool) -> Operand:
        """The covariance `weight C weight'^T`, at `s` and `S` if `apart`, else both legs at `s`.

        Two legs of a layer have a head in common; legs of two layers have the heads `a` and `b`.
        """
        names = self.names
        inside = one.slot == two.slot
        own = {FIRST: SECOND}  # the axes of the second leg's rows under names of their own
        if apart:
            own["s"] = "S"
        if not inside:
            own["a"] = "b"
        rows = tuple(own.get(index, index) for index in names.rows(two))
        weight = names.leaf(two.slot, two.role, *rows, "j")
        if not apart:
            half = half.renamed({"S": "s"})
        indices = in_order({*half.indices, *rows} - {"j"})
        name = f"cov.{names.models[one.slot]}.{one.role}.{names.models[two.slot]}.{two.role}"
        name += (".inside" if inside else "") + (".apart" if apart else "")
        mark = names.marks[one.slot] if inside else ""
        return self._new_definition(name, mark, indices, (half, weight))

    def _new_definition(
        self, name: str, mark: str, indices: tuple[str, ...], *products: Product
    ) -> Operand:
        """A definition of the stage, the sum of products, as an operand."""
        terms = [spread(product, indices) for product in products]
        return self.stage.define(name, indices, terms, alias=mark)


def mean(legs: Projections) -> list[Summand]:
    """The mean of the output of the layer in the bra, at `k`."""
    names = legs.names
    hidden, down = _hidden_index(names, "bra", OUTPUT_END["bra"], FIRST)
    every = matchings(names.legs("bra"), names.step.rules.within)
    return _summands(legs, every, down, {"bra": hidden})


def covariance(legs: Projections) -> list[Summand]:
    """The covariance of the outputs of two layers, at `k` and `l`."""
    names, rules = legs.names, legs.names.step.rules
    bra, ket = (names.legs(slot) for slot in SLOTS)
    if all(names.kind(slot).down is None for slot in SLOTS):
        product = legs.uncontracted_covariance(*bra, *ket)
        outputs = {FIRST: OUTPUT_END["bra"], SECOND: OUTPUT_END["ket"]}
        return [Summand(1.0, renamed(product, outputs))]
    bra_hidden, bra_down = _hidden_index(names, "bra", OUTPUT_END["bra"], FIRST)
    ket_hidden, ket_down = _hidden_index(names, "ket", OUTPUT_END["ket"], SECOND)
    summands = []
    for matching in matchings((*bra, *ket), rules.across):
        if matching.crossing == 0:
            continue  # a summand of the product of the two means
        product = _matching_arrays(legs, matching, {"bra": bra_hidden, "ket": ket_hidden})
        if product is not None:
            # Under the tree metrics a matching stands for all with the same number of crossing
            # pairs, each by its share.
            weight = rules.share(len(bra), matching.crossing)
            summands.append(Summand(weight, product))
    if not summands:
        return []  # legs of odd and even number, all of mean zero
    present = set().union(*(indices_of(summand.product) for summand in summands))
    positions = tuple(index for index in names.output_positions if index in present)
    indices = (*positions, bra_hidden, ket_hidden)
    terms = [summand.term(indices) for summand in summands]
    # The sum over matchings is taken between hidden units, so that both output maps are applied
    # once.
    hidden = legs.stage.define(f"hidden.{names.pair.group}", indices, terms)
    return [Summand(1.0, (*bra_down, *ket_down, hidden))]


def covariance_with_stream(legs: Projections, slot: Slot) -> list[Summand]:
    """The covariance of the stream in a slot with the output of the layer in the other slot.

    The stream has the end `FIRST`, the output the end `SECOND`.
    """
    names, layer = legs.names, OTHER[slot]
    if names.kind(layer).down is None:
        (leg,) = names.legs(layer)
        return [Summand(1.0, legs.covariance(stream(slot), leg))]
    if layer == "bra" and not names.step.with_own:
        return _leg_by_leg_with_stream(legs, slot)
    slope = _mean_slope(legs, slot)
    if slope is None:
        return []
    at = {"s": names.outputs[layer], FIRST: SECOND}
    positions = names.outputs[slot], names.outputs[layer]
    below = names.state_covariance((slot, layer), positions, (FIRST, "j"))
    return [Summand(1.0, (slope.renamed(at), *below))]


def _leg_by_leg_with_stream(legs: Projections, slot: Slot) -> list[Summand]:
    """The same from the products of the layer's legs with the state.

    The legs of the bra have these already. The slope is of use only where it is in two products,
    that of the pair and that of its model with itself.
    """
    names, layer = legs.names, OTHER[slot]
    hidden, down = _hidden_index(names, layer, SECOND, "h")
    return _summands(legs, _with_stream(names, slot), down, {slot: FIRST, layer: hidden})


def _mean_slope(legs: Projections, slot: Slot) -> Operand | None:
    """The mean of the derivative of a layer's output by its input, the layer opposite to `slot`.

    By Stein's lemma `Cov[x, f(x)] = Cov[x, x] E[f'(x)]^T`: legs that are joined with the stream
    have the state's covariance in common, so the matrix of the other legs, of one model alone,
    comes first. Its indices are `s` where it depends on a position, `FIRST` for the output and `j`
    for the input.
    """
    names, layer = legs.names, OTHER[slot]
    hidden, down = _hidden_index(names, layer, FIRST, "h")
    products = []
    for matching in _with_stream(names, slot):
        (joined,) = (two for one, two in matching.pairs if one == stream(slot))
        pairs = tuple(pair for pair in matching.pairs if stream(slot) not in pair)
        rest = _matching_arrays(legs, Matching(pairs, matching.singles), {layer: hidden})
        if rest is not None:
            rows = names.leaf(layer, joined.role, hidden, "j")
            products.append((*down, rows, *renamed(rest, {names.outputs[layer]: "s"})))
    if not products:
        return None
    position = ("s",) if any("s" in indices_of(product) for product in products) else ()
    indices = (*position, FIRST, "j")
    terms = [spread(product, indices) for product in products]
    mark = names.marks[layer]
    return legs.stage.define(f"slope.{names.models[layer]}", indices, terms, alias=mark)


def _with_stream(names: BraKet, slot: Slot) -> Iterator[Matching]:
    """The matchings that join the stream in a slot with a leg of the layer in the other slot."""
    legs = stream(slot), *names.legs(OTHER[slot])
    return (each for each in matchings(legs, names.step.rules.stream) if each.crossing)


def _summands(
    legs: Projections, every: Iterable[Matching], down: Product, ends: dict[Slot, str]
) -> list[Summand]:
    """The summands of some matchings, mapped to the output, without those that vanish.

    Args:
        legs: Means and covariances of the legs.
        every: Matchings.
        down: Map of the elementwise product of legs to the output.
        ends: Coordinates of the legs, as for `_matching_arrays`.
    """
    products = (_matching_arrays(legs, matching, ends) for matching in every)
    return [Summand(1.0, (*down, *product)) for product in products if product is not None]


def _hidden_index(names: BraKet, slot: Slot, output: str, hidden: str) -> tuple[str, Product]:
    """The index of the elementwise product of a layer's legs, and its map to the output.

    Where a leg is the output, both have a single index, and the map is the empty product.
    """
    down = names.kind(slot).down
    if down is None:
        return output, ()
    return hidden, (names.leaf(slot, down, output, hidden),)


def _matching_arrays(
    legs: Projections, matching: Matching, ends: dict[Slot, str]
) -> Product | None:
    """The arrays of a matching; None where a leg is left to a mean that vanishes.

    Args:
        legs: Means and covariances of the legs.
        matching: Legs that are joined, and legs that are left to their means.
        ends: Name of the coordinate of all legs of a slot, as their product is elementwise.
    """
    operands: list[Operand] = []
    for one, two in matching.pairs:
        names = {FIRST: ends[one.slot], SECOND: ends[two.slot]}
        within = one.slot == two.slot
        joined = legs.covariance_at_a_unit if within else legs.covariance
        operands += renamed(joined(one, two), names)
    for leg in matching.singles:
        value = legs.mean(leg)
        if value is None:
            return None
        operands += renamed(value, {FIRST: ends[leg.slot]})
    return tuple(operands)
