"""The legs of two layers. In: moments of the states below. Out: means and covariances of legs.

A layer reads the state below through legs, `leg = weight * state + bias` (see `positional`), and
every moment of its output is made of the means of its legs and of the covariances between them:

    mean of a leg          weight m + bias
    covariance of two      weight C weight'^T

A leg of an attention layer has a head index and `d_head` coordinates, so the width of the state
is summed out once per pair of legs, and all that follows is of size `d_head`. Where states at
different positions are independent, two legs have a covariance at one position only, which is
called `s`.
"""

from __future__ import annotations

from tnsim.engine.problem import Operand, StageBuilder, renamed
from tnsim.folding.sequences.bra_ket import BraKet
from tnsim.folding.sequences.notation import FIRST, HEAD, SECOND, Leg, Product, in_order, spread
from tnsim.names import STREAM, Slot, bias_of

_EXCHANGED = {FIRST: SECOND, SECOND: FIRST}


class Projections:
    """Means and covariances of the legs of two layers, defined in a stage as they are asked for.

    Args:
        names: The layers in the bra and in the ket.
        stage: Takes the definitions.
    """

    def __init__(self, names: BraKet, stage: StageBuilder) -> None:
        self.names = names
        self.stage = stage

    def mean(self, leg: Leg) -> Product | None:
        """Mean of a leg, or for the tree metrics its value at the zero input. Its end is `FIRST`.

        Returns:
            None where it vanishes: no mean below, and no bias.
        """
        names, slot = self.names, leg.slot
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
        by_position = below is not None and "s" in below.indices and "s" not in rows
        indices = ("s", *rows) if by_position else rows
        name = f"mean.{names.models[slot]}.{leg.role}"
        return renamed([self._define(name, names.marks[slot], indices, *products)], at_leg)

    def covariance(self, one: Leg, two: Leg) -> Product:
        """Covariance of two legs, with the ends `FIRST` and `SECOND`."""
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
        array = self._half(one, two)
        if two.role != STREAM:
            array = self._whole(one, two, array, apart=positions[0] != positions[1])
        at_legs = {"s": positions[0], "S": positions[1]}
        at_legs |= {"a": HEAD[one.slot], "b": HEAD[two.slot], "j": SECOND}
        return renamed([array], at_legs)

    def uncontracted_covariance(self, one: Leg, two: Leg) -> Product:
        """The covariance of two legs as a product of weights and moment, not multiplied out.

        For linear layers: two of them can be as wide as a vocabulary, and their covariance is
        that wide squared.
        """
        names = self.names
        first = names.leaf(one.slot, one.role, FIRST, "i")
        second = names.leaf(two.slot, two.role, SECOND, "j")
        if not names.state_moment(one.slot, two.slot).name:
            return (first, second.renamed({"j": "i"}))
        positions = names.position(one), names.position(two)
        below = names.state_covariance((one.slot, two.slot), positions, ("i", "j"))
        return (first, *below, second)

    def _half(self, one: Leg, two: Leg) -> Operand:
        """`weight C`, the covariance of leg `one` with the state that leg `two` reads.

        Its indices: `s` where it depends on a position, the rows of the leg, `S` where the
        covariance is full, and `j`.
        """
        names = self.names
        slots: tuple[Slot, Slot] = (one.slot, two.slot)
        moment, rows = names.state_moment(*slots), names.rows(one)
        if not moment.name:
            return names.leaf(one.slot, one.role, *rows, "j")
        # half[s, rows, S, j] = sum_i weight[s, rows, i] C[s, i, S, j], where these axes exist
        if moment.diagonal:
            position = ("s",) if moment.form == "each" else ()
            weight = names.leaf(one.slot, one.role, *rows, "j")
            below: Product = (Operand(moment.name, (*position, "j")),)
        else:
            weight = names.leaf(one.slot, one.role, *rows, "i")
            below = names.state_covariance(slots, ("s", "S"), ("i", "j"))
        indices = (*rows, "S", "j") if moment.form == "full" else (*rows, "j")
        if moment.form != "alike" and "s" not in rows:
            indices = ("s", *indices)
        across = "" if one.slot == two.slot else ".across"
        name = f"half.{names.models[one.slot]}.{one.role}.{names.models[two.slot]}{across}"
        return self._define(name, names.marks[one.slot], indices, (weight, *below))

    def _whole(self, one: Leg, two: Leg, half: Operand, apart: bool) -> Operand:
        """`weight C weight'^T`, at the positions `s` and `S` if they are `apart`, else both at `s`.

        Two legs of one layer have one head between them; legs of two layers have the heads `a` and
        `b`.
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
        return self._define(name, mark, indices, (half, weight))

    def _define(
        self, name: str, mark: str, indices: tuple[str, ...], *products: Product
    ) -> Operand:
        terms = [spread(product, indices) for product in products]
        return self.stage.define(name, indices, terms, mark=mark)
