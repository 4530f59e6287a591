"""The notation of sequence folds: legs, products of arrays, and the names of indices.

s, S    position of an output and of its queries, in the bra and in the ket
t, T    position of keys and values, in the bra and in the ket
g       a tuple of positions (see `expansions`)
a, b    head, in the bra and in the ket
k, l    coordinate of an output, in the bra and in the ket
i, j    coordinate of a state below
u, w    coordinate of the first leg and of the second; of a mean, `u`
h, v    hidden unit, coordinate of a value
y, z    summed inside a single product of an expansion (see `expansions`)

*Rules of joining.* The *Gaussian* metrics ask for E[product of legs]. By Isserlis' theorem that is
a sum over all ways of joining some legs in pairs and leaving the others alone: a pair counts by its
covariance, a single leg by its mean.

The *tree* metrics ask for the inner product of two layers as tensors. Such a tensor reads the
state through legs, `weight x + bias`, each with a copy of the lifted state (1, x) of its own, and
leg r of the bra meets leg p(r) of the ket. For `Frobenius` p is the identity; `TreeSymmetric`
averages over all n! permutations p. Let m_r, in place of a mean, be the value of leg r at the zero
input, and let C_rp, in place of a covariance, be the inner product of the rest of two legs. Two
legs that meet then count as

    C_rp + m_r m_p^T.

Multiplied out, a product of n such factors is again a sum over matchings: some legs joined in
pairs across, the others left to their values at zero. In these terms both families of metrics are
a single computation. Layers that act position by position use the sum multiplied out (`matchings`),
attention uses the factors (`JoiningRule.with_constants`).

*Bra and ket.* Nothing is computed here. `States` names the moments below a step and `LayerStep` has
its layers; `BraKet` looks up the arrays of a slot and gives them that slot's index names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tnsim.engine.ir.problem import ALIAS_SUFFIX, Operand, Term, renamed
from tnsim.metrics.input_moments import PositionForm
from tnsim.metrics.orbits import PairingRule
from tnsim.names import (
    COVARIANCE,
    IDENTITY,
    MEAN,
    ONE,
    ONES,
    SAME_POSITION,
    SCORES,
    SKIP,
    SLOTS,
    STREAM,
    VALUE,
    Leaf,
    Pair,
    Side,
    Slot,
)
from tnsim.problems.layer_kinds import LayerKind

FIRST, SECOND = "u", "w"
"""The two ends of an array that stands between two legs; an array of one leg has the first."""

HEAD: dict[Slot, str] = {"bra": "a", "ket": "b"}
OUTPUT_END: dict[Slot, str] = {"bra": "k", "ket": "l"}
KEY_POSITION: dict[Slot, str] = {"bra": "t", "ket": "T"}
POSITIONS = ("s", "t", "S", "T")
_LEADING = ("g", *POSITIONS, *HEAD.values())

OTHER: dict[Slot, Slot] = {"bra": "ket", "ket": "bra"}


Product = tuple[Operand, ...]
"""A product of arrays, summed over the indices that occur nowhere outside it."""
Sum = tuple[Product, ...]
"""A sum of products, one for every set of open indices.

A product that does not depend on a position or a head lacks its index.
"""

MEAN_AXES: dict[PositionForm, tuple[str, ...]] = {"alike": ("k",), "each": ("s", "k")}
COVARIANCE_AXES: dict[PositionForm, tuple[str, ...]] = {
    "alike": ("k", "l"),
    "each": ("s", "k", "l"),
    "full": ("s", "k", "S", "l"),
}
"""Axes of a mean and of a covariance of outputs by form."""
_READ_AT_KEYS = (*(key for _, key in SCORES), VALUE)


class Leg(NamedTuple):
    """A leg of the layer in the bra or in the ket, by the role of its array."""

    slot: Slot
    role: str


class Score(NamedTuple):
    """A score of attention, the inner product of a query and a key."""

    query: Leg
    key: Leg


def scores_of(slot: Slot) -> frozenset[Score]:
    """The scores of an attention layer in the bra or in the ket."""
    return frozenset(Score(Leg(slot, query), Leg(slot, key)) for query, key in SCORES)


def in_order(indices: Iterable[str]) -> tuple[str, ...]:
    """Indices in the common order of axes of all arrays of a fold.

    Positions and heads come first, coordinates last: most products are products of matrices of
    coordinates, for every position and head, and so they need no transposes.
    """
    present = set(indices)
    leading = [index for index in _LEADING if index in present]
    return (*leading, *sorted(present - set(_LEADING)))


def indices_of(product: Product) -> set[str]:
    """All indices that occur in a product."""
    return {index for operand in product for index in operand.indices}


def spread(
    product: Product, indices: Collection[str], weight: float = 1.0, summed: Collection[str] = ()
) -> Term:
    """The product as a term of a definition with certain indices.

    An array of ones adds each position that the product does not depend on: along a position in
    `indices` the values are then equal, and a position in `summed` counts the positions. An
    identity that is summed over is no array: its two indices become one.
    """
    for n, operand in enumerate(product):
        if operand.name == IDENTITY and operand.indices[0] != operand.indices[1]:
            stays, goes = sorted(operand.indices, key=lambda index: index not in indices)
            if goes not in indices:
                rest = renamed((*product[:n], *product[n + 1 :]), {goes: stays})
                return spread(rest, indices, weight, summed)
    present = indices_of(product)
    missing = [index for index in (*indices, *summed) if index not in present]
    ones = tuple(Operand(ONES, (index,)) for index in missing)
    return Term(weight, (*product, *ones))


class Summand(NamedTuple):
    """A summand of a mean or of a covariance of outputs.

    Args:
        weight: Factor of the product.
        product: Arrays of the summand.
        same: Whether the summand counts only where both outputs are at the same position, though
            two positions are told apart.
    """

    weight: float
    product: Product
    same: bool = False

    def term(self, indices: tuple[str, ...], summed: tuple[str, ...] = ()) -> Term:
        """The summand as a term of a definition with these indices (see `spread`)."""
        product = self.product
        if self.same and "S" in indices:
            product = (*product, Operand(SAME_POSITION, ("s", "S")))
        return spread(product, indices, self.weight, summed)


class JoiningRule(NamedTuple):
    """A rule that says which two legs may be joined.

    Args:
        name: Part of the names of definitions.
        joins: Test whether a leg may be joined with another.
        with_constants: Whether every leg has a partner, and two joined legs count by `C + m m^T`
            instead of by C.
    """

    name: str
    joins: Callable[[Leg, Leg], bool]
    with_constants: bool = False


def _across(one: Leg, two: Leg) -> bool:
    return one.slot != two.slot


ALL = JoiningRule("all", lambda one, two: True)
NONE = JoiningRule("none", lambda one, two: False)
ACROSS = JoiningRule("across", _across, with_constants=True)
STRAIGHT = JoiningRule(
    "straight", lambda one, two: _across(one, two) and one.role == two.role, with_constants=True
)
STREAM_ACROSS = JoiningRule(
    "stream", lambda one, two: _across(one, two) and STREAM in (one.role, two.role)
)


class MetricRules(NamedTuple):
    """The rules of a metric.

    Args:
        within: Rule for a single layer alone, for its mean.
        across: Rule for a layer of the bra and a layer of the ket.
        stream: Rule for the residual stream of a side and the layer of the other.
        gaussian: Whether the metric asks for expectations, and joins legs of a single layer too.
        symmetrised: Whether joinings across are averaged over the permutations of a layer's legs.
    """

    within: JoiningRule
    across: JoiningRule
    stream: JoiningRule
    gaussian: bool
    symmetrised: bool

    def share(self, order: int, pairs: int) -> float:
        """Weight of a matching that joins `pairs` of `order` legs across.

        Of the n! permutations, (n - k)! contain k given pairs. The other legs meet by their values
        at zero, with a product that does not depend on which of them meet.
        """
        if not self.symmetrised:
            return 1.0
        return math.factorial(order - pairs) / math.factorial(order)

    def skip_share(self, order: int) -> float:
        """Weight of the stream past a layer of this order where it meets a leg of the other side.

        As a tensor with n legs a skip is `x (x) 1 (x) ... (x) 1`, averaged over which leg holds
        the state x. The tree metrics join leg with leg, so a leg of the other side meets x in
        1 of n cases, and else the constant. A Gaussian metric depends on the function alone.
        """
        return 1.0 if self.gaussian else 1.0 / order


def rules_of(rule: PairingRule) -> MetricRules:
    """The rules by which a metric joins legs layer by layer.

    Example:
        >>> rules_of(PairingRule.ISSERLIS).gaussian
        True
    """
    if rule is PairingRule.ISSERLIS:
        return MetricRules(ALL, ALL, ALL, gaussian=True, symmetrised=False)
    symmetrised = rule is PairingRule.SYMMETRISED
    across = ACROSS if symmetrised else STRAIGHT
    # A tree metric joins no legs of one layer, so the mean of a layer is its value at zero.
    return MetricRules(NONE, across, STREAM_ACROSS, gaussian=False, symmetrised=symmetrised)


class Matching(NamedTuple):
    """A way of joining legs: some in pairs, the other, single legs left to their means."""

    pairs: tuple[tuple[Leg, Leg], ...]
    singles: tuple[Leg, ...]

    @property
    def crossing(self) -> int:
        """Number of pairs between the bra and the ket."""
        return sum(one.slot != two.slot for one, two in self.pairs)


def matchings(legs: tuple[Leg, ...], rule: JoiningRule) -> Iterator[Matching]:
    """All ways of joining some legs in pairs that the rule allows, the way without pairs included.

    Example:
        >>> legs = (Leg("bra", "LEFT"), Leg("bra", "RIGHT"), Leg("ket", "WEIGHT"))
        >>> [len(matching.pairs) for matching in matchings(legs, ACROSS)]
        [1, 1, 0]
    """
    if not legs:
        yield Matching((), ())
        return
    # The first leg joins a later one, or is left alone: every matching is met once.
    first, *others = legs
    for n, partner in enumerate(others):
        if not rule.joins(first, partner):
            continue
        rest = (*others[:n], *others[n + 1 :])
        for pairs, singles in matchings(rest, rule):
            yield Matching(((first, partner), *pairs), singles)
    for pairs, singles in matchings(tuple(others), rule):
        yield Matching(pairs, (first, *singles))


class Moment(NamedTuple):
    """A mean or a covariance of states over positions, as the array `name` holds it.

    Its axes are `MEAN_AXES` or `COVARIANCE_AXES`. Where a covariance is not full, states at
    different positions are independent. A `diagonal` covariance has a common axis for both
    coordinates; a covariance without a name is the identity.
    """

    name: str
    form: PositionForm
    diagonal: bool = False


class Positions(NamedTuple):
    """Structure of the positions below a step.

    Args:
        n_ctx: Number of positions.
        independent: Whether states at different positions are independent.
        relative: Whether they are moreover distributed alike, so that only differences of positions
            matter.
    """

    n_ctx: int
    independent: bool
    relative: bool


class States(NamedTuple):
    """Moments of both models below a step.

    Args:
        moments: Covariance of the states of a pair of models.
        means: Mean of a model's state; None for zero.
        ones: Name of the constant 1 in the current scale of a model.
    """

    moments: dict[Pair, Moment]
    means: dict[Side, Moment | None]
    ones: dict[Side, str]

    def positions(self, n_ctx: int) -> Positions:
        """The structure of the positions: whether they are independent and distributed alike."""
        forms = {moment.form for moment in self.moments.values()}
        means = {mean.form for mean in self.means.values() if mean is not None}
        relative = forms == {"alike"} and means <= {"alike"}
        return Positions(n_ctx, "full" not in forms, relative)


@dataclass(frozen=True)
class LayerStep:
    """A layer of each model over the states below; a model without one waits (see `layer_kinds`).

    Args:
        number: Number of the step, from the input.
        kinds: Kinds of the layers; None for a model that waits.
        layers: Numbers of the layers within the models; None for a model that waits.
        states: Moments below the step.
        rules: Rules by which the metric joins legs.
        positions: Structure of the positions below.
        mixes_later: Whether a later layer mixes positions, so that covariances between different
            ones are still needed.
        with_own: Whether the covariance of each model with itself is computed along with the cross
            term.
        traced: Output coordinates that an inner product has, summed over equal ones; None for
            moments.
    """

    number: int
    kinds: dict[Side, LayerKind | None]
    layers: dict[Side, int | None]
    states: States
    rules: MetricRules
    positions: Positions
    mixes_later: bool
    with_own: bool
    traced: tuple[str, ...] | None = None

    @property
    def suffix(self) -> str:
        """The end of all names that the step defines."""
        return f"@{self.number}"

    @property
    def mixes(self) -> bool:
        """Whether a layer of the step mixes positions."""
        return any(kind is not None and kind.mixes_positions for kind in self.kinds.values())

    def order(self, model: Side) -> int:
        """Order of a model's layer. A model that waits applies the identity, of order 1."""
        kind = self.kinds[model]
        return 1 if kind is None else kind.order


class BraKet:
    """The layers of a single step that meet in an inner product.

    Of two attention layers, in <A|A> the ket's arrays are the bra's arrays under a second name (see
    `ALIAS_SUFFIX`): the stages of <A|A>, <A|B> and <B|B> then have equal structure and share a
    single program, of thousands of products: without, planning takes 1.1 to 1.4 times as long, and
    XLA compiles up to 1.9 times the operations. Other layers have few, and in <A|A> a quarter of
    them are transposes of others or known from the mean, as long as the arrays go by one name.

    Args:
        step: Layers, and the states below.
        pair: Model in the bra and model in the ket.
        one_position: Whether outputs are needed at equal positions only, both then called `s`.
    """

    def __init__(self, step: LayerStep, pair: Pair, one_position: bool) -> None:
        self.step = step
        self.pair = pair
        self.models: dict[Slot, Side] = {"bra": pair.bra, "ket": pair.ket}
        self.marks: dict[Slot, str] = {
            "bra": "",
            "ket": ALIAS_SUFFIX if pair.bra == pair.ket and step.mixes else "",
        }
        self.outputs: dict[Slot, str] = {"bra": "s", "ket": "s" if one_position else "S"}

    @property
    def output_positions(self) -> tuple[str, ...]:
        """Names of the positions of the outputs: a name, or two where they are told apart."""
        return tuple(dict.fromkeys(self.outputs[slot] for slot in SLOTS))

    @property
    def apart(self) -> bool:
        """Whether outputs at different positions are told apart."""
        return len(self.output_positions) == 2

    # --- layers ------------------------------------------------------------------------------

    def waits(self, slot: Slot) -> bool:
        """Whether a slot has no layer, so that the identity stands in."""
        return self.step.kinds[self.models[slot]] is None

    def kind(self, slot: Slot) -> LayerKind:
        """Kind of the layer in a slot, which does not wait."""
        kind = self.step.kinds[self.models[slot]]
        assert kind is not None, f"no layer in the {slot}"
        return kind

    def number(self, slot: Slot) -> int:
        """Number of the layer in a slot, which does not wait, within its model."""
        number = self.step.layers[self.models[slot]]
        assert number is not None, f"no layer in the {slot}"
        return number

    def order(self, slot: Slot) -> int:
        """Order of the layer in a slot, 1 where the model waits."""
        return self.step.order(self.models[slot])

    def legs(self, slot: Slot) -> tuple[Leg, ...]:
        """The legs of the layer in a slot."""
        return tuple(Leg(slot, role) for role in self.kind(slot).legs)

    def leaf(self, slot: Slot, role: str, *indices: str) -> Operand:
        """An array of the layer in a slot."""
        name = str(Leaf(self.models[slot], self.number(slot), role))
        return Operand(name + self.marks[slot], indices)

    def one(self, slot: Slot) -> Operand:
        """The constant 1 in the current scale of the model in a slot."""
        return Operand(self._marked(self.step.states.ones[self.models[slot]], self.marks[slot]), ())

    def ones(self, slot: Slot, count: int) -> Product:
        """A power of the constant 1, which makes a term homogeneous of the layer's order."""
        return (self.one(slot),) * count

    def skip(self, slot: Slot) -> Product | None:
        """The factor of the residual stream in an output; None where there is no skip.

        A model that waits applies the identity: its output is the stream alone.
        """
        if self.waits(slot):
            return ()
        kind = self.kind(slot)
        if not kind.skips:
            return None
        return (self.leaf(slot, SKIP), *self.ones(slot, kind.order - 1))

    # --- legs --------------------------------------------------------------------------------

    def position(self, leg: Leg) -> str:
        """Name of the position at which a leg reads; keys and values read at a key position."""
        if leg.role in _READ_AT_KEYS:
            return KEY_POSITION[leg.slot]
        return self.outputs[leg.slot]

    def rows(self, leg: Leg) -> tuple[str, ...]:
        """Axes of a leg's weight but the last, under their names in the bra.

        The axes are the position, where RoPE rotates the leg; the head, where the layer has heads;
        and the coordinate.
        """
        kind = self.kind(leg.slot)
        position = ("s",) if kind.is_rotary(leg.role) else ()
        head = ("a",) if kind.mixes_positions else ()
        return (*position, *head, FIRST)

    # --- states below ------------------------------------------------------------------------

    def state_mean(self, slot: Slot, coordinate: str) -> Operand | None:
        """Mean of the state below, at `s` where positions have their own means; None for zero."""
        below = self.step.states.means[self.models[slot]]
        if below is None:
            return None
        position = ("s",) if below.form == "each" else ()
        return Operand(self._marked(below.name, self.marks[slot]), (*position, coordinate))

    def state_moment(self, one: Slot, two: Slot) -> Moment:
        """Covariance of the states below two slots as stored: of A with B, never of B with A."""
        models = self.models[one], self.models[two]
        stored = Pair(*sorted(models))
        moment = self.step.states.moments[stored]
        if models[0] != models[1] or not moment.name:
            return moment
        # In <A|A> moments of the bra's model with itself, of the ket's, and between both are three
        # names of one array, as they would be three arrays for two models.
        mark = self.marks[one] if one == two else 2 * self.marks["ket"]
        return moment._replace(name=self._marked(moment.name, mark))

    @staticmethod
    def _marked(name: str, mark: str) -> str:
        """A second name of an array, except of the input, which is one array for two models too."""
        return name if name in (ONE, MEAN, COVARIANCE) else name + mark

    def transposed(self, one: Slot, two: Slot) -> bool:
        """Whether the covariance of two slots is stored the other way round.

        That of <A|A> is symmetric. It is read as those of two models are, so that both have one
        plan.
        """
        first, second = ((self.models[slot], SLOTS.index(slot)) for slot in (one, two))
        return first > second

    def form(self) -> PositionForm:
        """Form of the covariance between the bra's state and the ket's."""
        return self.state_moment("bra", "ket").form

    def state_covariance(
        self, slots: tuple[Slot, Slot], positions: tuple[str, str], ends: tuple[str, str]
    ) -> Product:
        """Covariance of the states below two slots.

        Args:
            slots: Slots above the states.
            positions: Names of the positions at which states are read, where the covariance is
                full; otherwise there is a single position, called `s`.
            ends: Names of the coordinates.
        """
        moment = self.state_moment(*slots)
        if self.transposed(*slots):
            positions = (positions[1], positions[0])
            ends = (ends[1], ends[0])
        if moment.form == "full":
            return (Operand(moment.name, (positions[0], ends[0], positions[1], ends[1])),)
        if not moment.name:
            return (Operand(IDENTITY, ends),)
        position = ("s",) if moment.form == "each" else ()
        if moment.diagonal:
            return (Operand(IDENTITY, ends), Operand(moment.name, (*position, ends[0])))
        return (Operand(moment.name, (*position, *ends)),)


def stream(slot: Slot) -> Leg:
    """The residual stream as a leg: the state itself."""
    return Leg(slot, STREAM)
